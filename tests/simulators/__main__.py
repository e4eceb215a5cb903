# SPDX-License-Identifier: Apache-2.0
"""`python -m tests.simulators build OUT_DIR` makes the packages of catalogue.py, and signed flat repositories.

OUT_DIR/<repository>/ holds the .deb files, Packages, Release and InRelease; OUT_DIR/key.asc is the public key.
`python -m tests.simulators debs OUT_DIR VERSION` prints the files of one driver set of the cuda repository, for dpkg.
"""

from __future__ import annotations

import gzip
import hashlib
import shutil
import subprocess
import sys
import tempfile
from email.utils import formatdate
from pathlib import Path

from tests.simulators.catalogue import FILES, REPOSITORIES, Package

DRIVER_SET = (
    "libnvidia-ml1",
    "libcuda1",
    "libnvidia-ptxjitcompiler1",
    "firmware-nvidia-gsp",
    "nvidia-modprobe",
    "nvidia-kernel-support",
    "nvidia-kernel-dkms",
    "nvidia-persistenced",
    "nvidia-driver-cuda",
)


def control(package: Package) -> str:
    fields = {
        "Package": package.name,
        "Version": package.version,
        "Architecture": "amd64",
        "Maintainer": "Tests <tests@example.invalid>",
        "Depends": package.depends,
        "Provides": package.provides,
        "Conflicts": package.conflicts,
        "Description": package.description,
    }
    return "".join(f"{key}: {value}\n" for key, value in fields.items() if value)


def build_package(package: Package, out: Path) -> Path:
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch)
        root.chmod(0o755)
        (root / "DEBIAN").mkdir(mode=0o755)
        (root / "DEBIAN" / "control").write_text(control(package), encoding="utf-8")
        if any(name.startswith("etc/") and "systemd" not in name for name in package.files):
            names = [f"/{name}\n" for name in package.files if name.startswith("etc/")]
            (root / "DEBIAN" / "conffiles").write_text("".join(names), encoding="utf-8")
        for script, text in (("postinst", package.postinst), ("postrm", package.postrm)):
            if text:
                path = root / "DEBIAN" / script
                path.write_text("#!/bin/sh\nset -e\n" + text, encoding="utf-8")
                path.chmod(0o755)
        for name, content in package.files.items():
            path = root / name
            path.parent.mkdir(parents=True, exist_ok=True)
            if isinstance(content, str) and content.startswith("->"):
                path.symlink_to(content[2:])
                continue
            path.write_bytes(content if isinstance(content, bytes) else content.encode())
            path.chmod(0o755 if name in package.executables else 0o644)
        target = out / f"{package.name}_{package.version}_amd64.deb"
        command = ["dpkg-deb", "--root-owner-group", "-Zgzip", "-z1", "--build", str(root), str(target)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return target


def index(packages: list[Package], out: Path) -> None:
    stanzas = []
    for package in packages:
        target = out / f"{package.name}_{package.version}_amd64.deb"
        data = target.read_bytes()
        stanzas.append(
            control(package)
            + f"Filename: ./{target.name}\nSize: {len(data)}\nSHA256: {hashlib.sha256(data).hexdigest()}\n"
        )
    text = "\n".join(stanzas).encode()
    (out / "Packages").write_bytes(text)
    (out / "Packages.gz").write_bytes(gzip.compress(text, mtime=0))
    lines = [
        "Origin: tests",
        "Label: tests",
        f"Suite: {out.name}",
        f"Codename: {out.name}",
        f"Date: {formatdate(usegmt=True)}",
        "Architectures: amd64",
        "SHA256:",
    ]
    for name in ("Packages", "Packages.gz"):
        data = (out / name).read_bytes()
        lines.append(f" {hashlib.sha256(data).hexdigest()} {len(data)} {name}")
    (out / "Release").write_text("\n".join(lines) + "\n", encoding="utf-8")


def sign(root: Path, repositories: list[Path]) -> None:
    """One key for the whole build, kept beside it so that repeated builds stay trusted."""
    home = root / ".gnupg"
    home.mkdir(mode=0o700, exist_ok=True)
    gpg = [
        "gpg",
        "--homedir",
        str(home),
        "--batch",
        "--yes",
        "--quiet",
        "--pinentry-mode",
        "loopback",
        "--passphrase",
        "",
    ]
    if not (root / "key.asc").exists():
        identity = "Test repositories <tests@example.invalid>"
        subprocess.run([*gpg, "--quick-generate-key", identity, "rsa3072", "sign", "never"], check=True)
        key = subprocess.run([*gpg, "--armor", "--export"], check=True, stdout=subprocess.PIPE).stdout
        (root / "key.asc").write_bytes(key)
    for path in repositories:
        command = [*gpg, "--digest-algo", "SHA256", "--clearsign", "-o", str(path / "InRelease"), str(path / "Release")]
        subprocess.run(command, check=True)
    subprocess.run(["gpgconf", "--homedir", str(home), "--kill", "gpg-agent"], check=False)


def fingerprint() -> str:
    digest = hashlib.sha256()
    for path in [*sorted(FILES.iterdir()), Path(__file__), Path(__file__).with_name("catalogue.py")]:
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def build(root: Path) -> None:
    """Builds everything; does nothing where the last build was made from the same sources."""
    stamp = root / ".stamp"
    if stamp.exists() and stamp.read_text(encoding="ascii") == fingerprint():
        return
    root.mkdir(parents=True, exist_ok=True)
    made = []
    for name, packages in REPOSITORIES.items():
        out = root / name
        shutil.rmtree(out, ignore_errors=True)
        out.mkdir()
        listed = packages()
        for package in listed:
            build_package(package, out)
        index(listed, out)
        made.append(out)
    sign(root, made)
    stamp.write_text(fingerprint(), encoding="ascii")


def driver_set(root: Path, version: str) -> list[Path]:
    found = [root / "cuda" / f"{name}_{version}-1_amd64.deb" for name in DRIVER_SET]
    missing = [path.name for path in found if not path.exists()]
    if missing:
        raise SystemExit(f"not built: {', '.join(missing)}; run: python -m tests.simulators build {root}")
    return found


def main(arguments: list[str]) -> int:
    if arguments[:1] == ["build"] and len(arguments) == 2:
        build(Path(arguments[1]).absolute())
    elif arguments[:1] == ["debs"] and len(arguments) == 3:
        print("\n".join(str(path) for path in driver_set(Path(arguments[1]).absolute(), arguments[2])))
    else:
        print(__doc__, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

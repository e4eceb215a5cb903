# SPDX-License-Identifier: Apache-2.0
"""Where a verified model file lives: names, layout of the Hub's cache, state and markers.

Private to the collection; may change at any time.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import stat
from collections.abc import Mapping
from typing import Any, NamedTuple, Optional

from ansible_collections.tensorless.fleet.plugins.module_utils import _plan_paths
from ansible_collections.tensorless.fleet.plugins.module_utils._refusal import Refusal

_REPO_PART = re.compile(r"[A-Za-z0-9_](?:[A-Za-z0-9_.-]*[A-Za-z0-9_])?")
_COMMIT = re.compile(r"[0-9a-f]{40}")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)


class BlobError(Refusal):
    """What went wrong, worded for the user, with a `reason` that a program can test and further details."""

    def __init__(self, message: str, reason: str = "failed", **details: Any) -> None:
        super().__init__(message, rc=2 if reason == "bad_option" else 1)
        self.reason = reason
        self.details = details


class BlobPaths(NamedTuple):
    """Every path that belongs to one file of one revision."""

    blob: str
    partial: str
    snapshot: str
    link_text: str
    folder: str

    @property
    def sidecar(self) -> str:
        return self.partial + ".json"

    @property
    def lock(self) -> str:
        return self.partial + ".lock"


def blob_paths(cache: str, repo: str, revision: str, file: str, sha256: str) -> BlobPaths:
    """The layout of the Hub's cache; the link is relative, one `..` more for each folder in the file's name."""
    blob = _plan_paths.blob_path(cache, repo, sha256)
    return BlobPaths(
        blob=blob,
        partial=blob + ".incomplete",
        snapshot=_plan_paths.snapshot_path(cache, repo, revision, file),
        link_text=_plan_paths.snapshot_link(file) + sha256,
        folder=_plan_paths.repo_dir(cache, repo),
    )


def state_dir(environ: Mapping[str, str], home: str) -> str:
    """Where markers live when no option says otherwise."""
    base = environ.get("XDG_STATE_HOME") or os.path.join(home, ".local", "state")
    return os.path.join(base, "tensorless")


def marker_path(state: str, sha256: str) -> str:
    return os.path.join(state, "verified", sha256 + ".json")


def check_names(repo: str, revision: str, file: str, sha256: str) -> None:
    """Refuses what could leave the cache or be two things at once, before any request."""
    parts = repo.split("/")
    if len(parts) != 2 or any(not _REPO_PART.fullmatch(p) or "--" in p or ".." in p for p in parts):
        raise BlobError(
            f"repo {repo!r} is not a repository id of the form org/name (letters, digits, '_', '.', '-'; "
            "no '--' and no '..').",
            "bad_option",
        )
    if not _COMMIT.fullmatch(revision):
        raise BlobError(
            f"revision {revision!r} is not a commit: 40 lower-case hexadecimal digits are needed, because a branch "
            "or tag can move.",
            "bad_option",
        )
    segments = file.split("/")
    if (
        any(segment in ("", ".", "..") for segment in segments)
        or "\\" in file
        or any(ord(c) < 32 or ord(c) == 127 for c in file)
    ):
        raise BlobError(
            f"file {file!r} is not a plain relative path inside the repository (no leading '/', no empty, '.' or "
            "'..' parts, no backslash).",
            "bad_option",
        )
    if not _SHA256.fullmatch(sha256):
        raise BlobError(f"sha256 {sha256!r} is not 64 lower-case hexadecimal digits.", "bad_option")


def cached_state(paths: BlobPaths, size: int) -> str:
    """`yes` (there at its full size), `partial` (an interrupted download) or `no`."""
    found = None
    with contextlib.suppress(OSError):
        info = os.stat(paths.blob)
        found = info.st_size if stat.S_ISREG(info.st_mode) else None
    return _plan_paths.cached_state(found, os.path.isfile(paths.partial), size)


def read_marker(path: str) -> Optional[dict[str, Any]]:
    """The marker's four fields, or None where there is none that can be read."""
    try:
        with open(path, encoding="utf-8") as stream:
            value = json.load(stream)
    except (OSError, ValueError):
        return None
    return value if isinstance(value, dict) else None


def marker_for(sha256: str, blob: str) -> dict[str, Any]:
    """The marker that the file as it stands deserves once its hash matched."""
    info = os.stat(blob)
    return {"sha256": sha256, "size": info.st_size, "mtime_ns": info.st_mtime_ns, "path": blob}


def marker_holds(path: str, sha256: str, blob: str) -> bool:
    """True while size, modification time and path are those of the verified file. Reads no byte of it."""
    try:
        return read_marker(path) == marker_for(sha256, blob)
    except OSError:
        return False


def write_file(path: str, data: bytes, mode: int, temporary: Optional[str] = None) -> None:
    """Replaces PATH in one step: a temporary name beside it, synced, then a rename."""
    temporary = temporary or f"{path}.{os.getpid()}.tmp"
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, mode)
    try:
        os.fchmod(descriptor, mode)
        rest = memoryview(data)
        while rest:
            rest = rest[os.write(descriptor, rest) :]
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    os.replace(temporary, path)


def write_marker(path: str, marker: Mapping[str, Any]) -> None:
    make_dirs(os.path.dirname(path), 0o755)
    write_file(path, (json.dumps(marker, separators=(",", ":")) + "\n").encode(), 0o644)


def make_dirs(path: str, mode: int, owner: tuple[int, int] = (-1, -1)) -> list[str]:
    """Creates the missing folders of PATH with exactly MODE and OWNER; returns those created, outermost first."""
    missing = []
    while not os.path.isdir(path):
        missing.append(path)
        path = os.path.dirname(path)
    for folder in reversed(missing):
        try:
            os.mkdir(folder, mode)
        except FileExistsError:
            continue
        os.chmod(folder, mode)
        if owner != (-1, -1):
            os.chown(folder, *owner)
    return missing[::-1]


def sync_dir(path: str) -> None:
    """Makes a rename in PATH last through a power cut, where the file system can."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.ENOSYS):
            raise
    finally:
        os.close(descriptor)


def check_link(paths: BlobPaths) -> None:
    """The link is relative, so it leads nowhere when `snapshots` or a folder in it is itself a link elsewhere."""
    if not os.path.exists(paths.snapshot):
        folder = os.path.realpath(os.path.dirname(paths.snapshot))
        raise BlobError(
            f"the link {paths.snapshot} does not lead to {paths.blob}: its folder is really {folder}. Make the whole "
            f"folder {paths.folder} the link, or none in it.",
            "bad_link",
        )


def link_state(paths: BlobPaths) -> str:
    """The snapshot link: `right`, `missing`, `wrong` (a link elsewhere) or `file` (not a link)."""
    try:
        return "right" if os.readlink(paths.snapshot) == paths.link_text else "wrong"
    except FileNotFoundError:
        return "missing"
    except OSError as error:
        if error.errno == errno.EINVAL:
            return "file"
        if error.errno == errno.ENOTDIR:
            return "missing"
        raise


def make_link(paths: BlobPaths, dir_mode: int, owner: tuple[int, int] = (-1, -1)) -> None:
    """The snapshot link, made under a temporary name and renamed. What is not a link is never replaced."""
    folder = os.path.dirname(paths.snapshot)
    try:
        make_dirs(folder, dir_mode, owner)
    except OSError as error:
        raise BlobError(f"could not make {folder}: {error.strerror}.", "write_failed") from error
    temporary = os.path.join(folder, f".{os.path.basename(paths.snapshot)[:200]}.{os.getpid()}.tmp")
    with contextlib.suppress(FileNotFoundError):
        os.unlink(temporary)  # of a killed run whose number came round again
    try:
        os.symlink(paths.link_text, temporary)
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise BlobError(f"could not make {paths.snapshot}: {error.strerror}.", "write_failed") from error
        raise BlobError(
            f"could not make the snapshot link {paths.snapshot}: {error.strerror} (errno {error.errno}). The cache "
            "needs a file system with symbolic links; choose another cache.",
            "no_links",
            errno=error.errno,
        ) from error
    if owner != (-1, -1):
        os.lchown(temporary, *owner)
    os.replace(temporary, paths.snapshot)


def same_but_case(paths: BlobPaths) -> list[str]:
    """Folders beside the repository's own that differ in upper and lower case only."""
    parent, own = os.path.split(paths.folder)
    try:
        names = os.listdir(parent)
    except OSError:
        return []
    return sorted(os.path.join(parent, n) for n in names if n != own and n.lower() == own.lower())


def giga(count: int) -> str:
    """Bytes for people: decimal gigabytes, or smaller units where those say more."""
    if count >= 10**9:
        return f"{count / 1e9:.2f} GB"
    if count >= 10**6:
        return f"{count / 1e6:.2f} MB"
    if count >= 10**4:
        return f"{count / 1e3:.1f} kB"
    return f"{count} bytes"

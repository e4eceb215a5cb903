# SPDX-License-Identifier: Apache-2.0
"""Which tensorless this is: version, commit and platform."""

from __future__ import annotations

import os

from tensorless_fleet import __version__


def version_line() -> str:
    """``tensorless 0.1.0 (commit ...), linux/amd64``; without the commit where none is recorded."""
    known = commit()
    return f"tensorless {__version__}{f' (commit {known})' if known != 'unknown' else ''}, {platform()}\n"


def platform() -> str:
    """Operating system and architecture in the launcher's words: ``linux/amd64``."""
    system = os.uname()
    machine = {"x86_64": "amd64", "aarch64": "arm64"}.get(system.machine, system.machine)
    return f"{system.sysname.lower()}/{machine}"


def commit() -> str:
    """The commit this was built from: recorded in the wheel, read from the repository in a checkout."""
    here = os.path.dirname(os.path.abspath(__file__))
    for path in (os.path.join(here, "_commit.txt"),):
        if os.path.exists(path):
            with open(path, encoding="ascii", errors="replace") as file:
                return file.read().strip() or "unknown"
    git = os.path.join(os.path.dirname(here), ".git")
    try:
        with open(os.path.join(git, "HEAD"), encoding="ascii") as file:
            head = file.read().strip()
        if not head.startswith("ref: "):
            return head
        name = head[5:]
        if os.path.exists(os.path.join(git, name)):
            with open(os.path.join(git, name), encoding="ascii") as file:
                return file.read().strip()
        with open(os.path.join(git, "packed-refs"), encoding="ascii") as file:
            for line in file:
                if line.rstrip().endswith(" " + name):
                    return line.split()[0]
    except (OSError, ValueError):
        pass
    return "unknown"

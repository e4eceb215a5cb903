# SPDX-License-Identifier: GPL-3.0-or-later
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Refuses to go on when several versions of this collection lie in Ansible's path: only the first would be used."""

from __future__ import annotations

import json
import os
import sys
from typing import Any, Optional

from ansible.plugins.action import ActionBase
from ansible.utils.collection_loader import AnsibleCollectionConfig

INSIDE = os.path.join("ansible_collections", "tensorless", "fleet")


def version_of(path: str) -> str:
    """The version in MANIFEST.json (installed) or galaxy.yml (a checkout)."""
    try:
        with open(os.path.join(path, "MANIFEST.json"), encoding="utf-8") as file:
            return str(json.load(file)["collection_info"]["version"])
    except (OSError, ValueError, KeyError, TypeError):
        pass
    try:
        with open(os.path.join(path, "galaxy.yml"), encoding="utf-8") as file:
            for line in file:
                if line.startswith("version:"):
                    return line.partition(":")[2].strip().strip("'\"")
    except OSError:
        pass
    return "unknown"


def copies(folders: list[str]) -> list[tuple[str, str]]:
    """Every copy of the collection below ``folders``: (path, version), in the order of search, each once."""
    found: dict[str, tuple[str, str]] = {}
    for folder in folders:
        if os.path.basename(folder.rstrip("/")) == "ansible_collections":
            folder = os.path.dirname(folder.rstrip("/"))
        path = os.path.join(folder or ".", INSIDE)
        if os.path.isdir(os.path.join(path, "plugins")):
            found.setdefault(os.path.realpath(path), (path, version_of(path)))
    return list(found.values())


def conflict(found: list[tuple[str, str]]) -> Optional[str]:
    """The message when the copies are not all of one version."""
    if len({version for _path, version in found}) < 2:
        return None
    listed = ", ".join(f"{version} at {path}" for path, version in found)
    newest_path, newest = next((each for each in found[1:] if each[1] != found[0][1]), found[0])
    return (
        f"several versions of the collection tensorless.fleet are installed: {listed}. Ansible uses only the first, "
        f"{found[0][1]}. Remove it (rm -r {found[0][0]}) to use {newest} at {newest_path}, or remove the other"
    )


class ActionModule(ActionBase):  # type: ignore[misc]
    """See the module's documentation."""

    _requires_connection = False
    TRANSFERS_FILES = False

    def run(self, tmp: Optional[str] = None, task_vars: Optional[dict[str, Any]] = None) -> dict[str, Any]:
        result: dict[str, Any] = super().run(tmp, task_vars)
        self.validate_argument_spec(argument_spec={})
        folders = [os.fspath(path) for path in AnsibleCollectionConfig.collection_paths] + list(sys.path)
        found = copies(folders)
        message = conflict(found)
        result.update(
            changed=False,
            path=found[0][0] if found else None,
            version=found[0][1] if found else None,
        )
        if message:
            result.update(failed=True, msg=message)
        return result

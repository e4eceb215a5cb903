# SPDX-License-Identifier: Apache-2.0
"""Build hook: lays the collection into the wheel, with its MANIFEST.json and FILES.json.

Ansible reads a collection's version from MANIFEST.json. ``ansible-galaxy collection build`` would write the same
two files, but needs Ansible inside the build environment.
"""

import hashlib
import json
import pathlib
import sys
import tempfile
from typing import Any

import yaml
from hatchling.builders.hooks.plugin.interface import BuildHookInterface

PREFIX = "ansible_collections/tensorless/fleet"
CONTENT = (
    "plugins",
    "roles",
    "playbooks",
    "recipes",
    "meta",
    "docs",
    "changelogs",
    "LICENSES",
    "LICENSE",
    "README.md",
    "inventory-sample.yml",
)


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _files(root: pathlib.Path) -> "list[dict[str, Any]]":
    """One FILES.json entry for each folder and file of the collection."""
    entries: list[dict[str, Any]] = [
        {"name": ".", "ftype": "dir", "chksum_type": None, "chksum_sha256": None, "format": 1}
    ]
    for source in CONTENT:
        top = root / source
        for path in [top, *sorted(top.rglob("*"))] if top.is_dir() else [top]:
            if "__pycache__" in path.parts:
                continue
            is_dir = path.is_dir()
            entries.append(
                {
                    "name": path.relative_to(root).as_posix(),
                    "ftype": "dir" if is_dir else "file",
                    "chksum_type": None if is_dir else "sha256",
                    "chksum_sha256": None if is_dir else _sha256(path.read_bytes()),
                    "format": 1,
                }
            )
    return entries


class CollectionManifest(BuildHookInterface):  # type: ignore[misc]
    """Maps the two generated files into the wheel."""

    def initialize(self, version: str, build_data: "dict[str, Any]") -> None:
        if version == "editable":
            return
        root = pathlib.Path(self.root)
        galaxy = yaml.safe_load((root / "galaxy.yml").read_text(encoding="utf-8"))
        files = json.dumps({"files": _files(root), "format": 1}, indent=1).encode()
        info = {
            key: galaxy.get(key)
            for key in [
                "namespace",
                "name",
                "version",
                "authors",
                "readme",
                "tags",
                "description",
                "license",
                "dependencies",
                "repository",
                "documentation",
                "homepage",
                "issues",
            ]
        }
        manifest = {
            "collection_info": {**info, "license_file": None},
            "file_manifest_file": {
                "name": "FILES.json",
                "ftype": "file",
                "chksum_type": "sha256",
                "chksum_sha256": _sha256(files),
                "format": 1,
            },
            "format": 1,
        }
        out = pathlib.Path(tempfile.mkdtemp(prefix="collection-manifest-"))
        (out / "FILES.json").write_bytes(files)
        (out / "MANIFEST.json").write_text(json.dumps(manifest, indent=1), encoding="utf-8")
        sys.path.insert(0, str(root))
        from tensorless_fleet._version import commit

        (out / "_commit.txt").write_text(commit() + "\n", encoding="ascii")  # what `tensorless version` says
        build_data["force_include"][str(out / "_commit.txt")] = "tensorless_fleet/_commit.txt"
        for name in CONTENT:
            build_data["force_include"][str(root / name)] = f"{PREFIX}/{name}"
        for name in ("FILES.json", "MANIFEST.json"):
            build_data["force_include"][str(out / name)] = f"{PREFIX}/{name}"

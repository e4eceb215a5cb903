# SPDX-License-Identifier: Apache-2.0
"""Where this package's own copy of the collection lies, and which other copies Ansible would take before it."""

from __future__ import annotations

import os

from tensorless_fleet.errors import CollectionConflict

NAME = "tensorless.fleet"
INSIDE = os.path.join("ansible_collections", "tensorless", "fleet")


def own_root() -> str:
    """The folder that holds ``ansible_collections/tensorless/fleet`` of this installation."""
    beside = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    if os.path.isdir(os.path.join(beside, INSIDE, "plugins")):
        return beside
    # A checkout: the collection is the repository itself, reached through a link that python's path names.
    from ansible_collections.tensorless.fleet import plugins

    for path in plugins.__path__:
        return os.path.dirname(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(path)))))
    raise CollectionConflict(
        "the collection tensorless.fleet is not installed beside this package; reinstall it with: "
        "pip install --force-reinstall tensorless-fleet"
    )


def own_path() -> str:
    """The folder of this installation's collection."""
    return os.path.join(own_root(), INSIDE)


def version_of(path: str) -> str:
    """The version of the collection at ``path``, or ``unknown``."""
    manifest = os.path.join(path, "MANIFEST.json")
    if os.path.exists(manifest):
        import json

        try:
            with open(manifest, encoding="utf-8") as file:
                return str(json.load(file)["collection_info"]["version"])
        except (OSError, ValueError, KeyError, TypeError):
            return "unknown"
    try:
        with open(os.path.join(path, "galaxy.yml"), encoding="utf-8") as file:
            for line in file:
                if line.startswith("version:"):
                    return line.partition(":")[2].strip().strip("'\"")
    except OSError:
        pass
    return "unknown"


def search_path(environ: dict[str, str]) -> list[str]:
    """The folders that ansible-playbook looks through before python's own path, in its order."""
    text = environ.get("ANSIBLE_COLLECTIONS_PATH") or _from_config(environ)
    if not text:
        home = environ.get("ANSIBLE_HOME") or "~/.ansible"
        text = os.pathsep.join([os.path.join(home, "collections"), "/usr/share/ansible/collections"])
    found = []
    for entry in text.split(os.pathsep):
        if entry.strip():
            found.append(os.path.abspath(os.path.expanduser(os.path.expandvars(entry.strip()))))
    return found


def _from_config(environ: dict[str, str]) -> str:
    """``collections_path`` of the ansible.cfg that Ansible would read, if it names one."""
    named = environ.get("ANSIBLE_CONFIG", "")
    if named and os.path.isdir(named):
        named = os.path.join(named, "ansible.cfg")
    here = os.path.abspath("ansible.cfg")
    try:
        # Ansible ignores a configuration in a folder that others may write to.
        trusted = not os.stat(os.path.dirname(here)).st_mode & 0o002
    except OSError:
        trusted = False
    candidates = [named, here if trusted else "", os.path.expanduser("~/.ansible.cfg"), "/etc/ansible/ansible.cfg"]
    for path in candidates:
        if path and os.path.isfile(path):
            import configparser

            parser = configparser.RawConfigParser()
            try:
                parser.read(path, encoding="utf-8")
                base = os.path.dirname(os.path.abspath(path))
                text = parser.get("defaults", "collections_path", fallback="")
            except (configparser.Error, OSError, UnicodeDecodeError):
                return ""
            entries = [os.path.expanduser(os.path.expandvars(entry)) for entry in text.split(os.pathsep) if entry]
            return os.pathsep.join(os.path.join(base, entry) for entry in entries)
    return ""


def refuse_other_versions(environ: dict[str, str]) -> None:
    """Raises CollectionConflict when another version of the collection lies where Ansible looks first."""
    own = own_path()
    mine = version_of(own)
    for folder in search_path(environ):
        other = os.path.join(folder, INSIDE)
        if not os.path.isdir(other) or os.path.realpath(other) == os.path.realpath(own):
            continue
        theirs = version_of(other)
        if theirs != mine:
            raise CollectionConflict(
                f"another version of the collection {NAME} would be used before this command's own: {theirs} at "
                f"{other}, own {mine} at {own}. Remove the other one (rm -r {other}) or bring it to this version: "
                f"ansible-galaxy collection install -p {folder} --force {NAME}:=={mine}"
            )

# SPDX-License-Identifier: Apache-2.0
"""Why something did not work, in one line with the fix: what ssh, sudo and Ansible say, in the user's words."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

from tensorless_fleet._play import Job, clean
from tensorless_fleet.errors import InventoryError, PlayError


def check_inventory(entries: Sequence[str]) -> None:
    """Refuses an inventory that is not there or cannot be read, before Ansible starts."""
    if not entries:
        raise InventoryError("no inventory was given; name a file: inventory.yml")
    for entry in entries:
        if not entry:
            raise InventoryError("the inventory's name is empty; name a file: inventory.yml")
        if "," in entry:
            continue
        if not os.path.exists(entry):
            raise InventoryError(
                f"the inventory {clean(entry)} does not exist; correct the path (a single host is written with a "
                f"comma: {clean(entry)},)"
            )
        if not os.access(entry, os.R_OK):
            raise InventoryError(f"the inventory {clean(entry)} cannot be read; correct its mode or its owner")


def reason_of(answer: Mapping[str, Any]) -> str:
    """Why a task failed, as one line."""
    for key in ("msg", "message", "reason", "module_stderr", "stderr", "exception"):
        value = answer.get(key)
        if value:
            text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
            text = clean(text)
            if key == "msg" and text.startswith("MODULE FAILURE") and answer.get("module_stderr"):
                text = f"{text}: {clean(str(answer['module_stderr']))[-400:]}"
            return re.sub(r"^Task failed: (?:Action failed: |Module failed: )?", "", text)
    if answer.get("censored"):
        return "failed; the details are hidden because they may hold secrets"
    return "failed without saying why"


def explain_login(host: str, text: str) -> str:
    """One line with the fix for a host that cannot be reached or logged in to."""
    text = re.sub(r"^(Task failed: )?Failed to connect to the host via ssh: ", "", text)
    low = text.lower()
    if "host key verification failed" in low or "remote host identification has changed" in low:
        if "changed" in low:
            return (
                f"the ssh host key of {host} is not the one known here, so the connection was refused. If the "
                f"host was reinstalled: ssh-keygen -R {host}, then connect once with ssh and compare the key"
            )
        return (
            f"the ssh host key of {host} is not known here. Connect once with ssh {host} and compare the key, or "
            "pass --host-keys accept-new"
        )
    if "no such identity" in low or ("identity file" in low and "not accessible" in low):
        found = re.search(r"(?:no such identity|identity file):? (\S+?)[: ]", text, re.I)
        path = found.group(1) if found else "named in the inventory"
        return (
            f"cannot log in to {host}: the ssh key {path} does not exist. Correct ansible_ssh_private_key_file in "
            "the inventory, or make the key with ssh-keygen and bring it over with ssh-copy-id"
        )
    if "permission denied" in low:
        return (
            f"cannot log in to {host}: {text}. Bring your key over with ssh-copy-id, load it with ssh-add, or set "
            "ansible_user and ansible_ssh_private_key_file in the inventory"
        )
    if "could not resolve hostname" in low:
        return f"the name {host} leads nowhere: {text}. Set ansible_host in the inventory, or correct the name"
    if "incorrect sudo password" in low or "missing sudo password" in low:
        return explain_become(host, text)
    return f"{text.rstrip('.')}. Check that {host} is up and that ssh reaches it, then run the command again"


def explain_become(host: str, text: str) -> str:
    """One line with the fix where sudo wants a password; any other text as it is."""
    low = text.lower()
    if "missing sudo password" in low or "a password is required" in low or "missing become password" in low:
        return (
            f"sudo on {host} wants a password. Pass --become-password-file FILE, set ansible_become_password in a "
            "vault, or allow the user sudo without one"
        )
    if "incorrect sudo password" in low or "incorrect become password" in low:
        return f"sudo on {host} refused the password. Correct --become-password-file or ansible_become_password"
    return text


def last_error(lines: Sequence[str]) -> str:
    """Ansible's last error message among ``lines``, on one line."""
    text = clean("\n".join(lines))
    found = re.findall(
        r"(?:\[ERROR\]:|ERROR!)\s*(.+?)(?=\s*(?:\[(?:ERROR|WARNING|DEPRECATION WARNING)\]:|ERROR!|$))", text
    )
    return found[-1][:600] if found else ""


def no_host(lines: Sequence[str], played: bool, job: Job, code: int) -> BaseException:
    """What went wrong when a run ended without having met any host."""
    text = clean("\n".join(lines))
    low = text.lower()
    names = ", ".join(job.inventory)
    if "--limit" in low and ("no hosts to target" in low or "does not match any hosts" in low):
        return InventoryError(
            f'no host of the inventory {names} matches "{clean(job.limit or "")}"; '
            f"ansible-inventory -i {names} --graph lists what there is"
        )
    if "unable to find limit file" in low or "invalid host list pattern" in low:
        return InventoryError(f"the host pattern {clean(job.limit or '')} cannot be used: {last_error(lines)}")
    if "failed to parse" in low or "unable to parse" in low or "could not be parsed" in low:
        detail = parse_error(text) or last_error(lines) or text[-400:]
        return InventoryError(
            f"the inventory {names} cannot be read: {detail.rstrip('.')}. Correct it; ansible-inventory -i {names} "
            "--graph shows whether Ansible can read it"
        )
    if code == 0 and not played:
        if job.limit:
            return InventoryError(
                f'no host of the group gpu in {names} matches "{clean(job.limit.removesuffix(",localhost"))}"'
            )
        return InventoryError(
            f"the inventory {names} has no host in the group gpu; put the hosts with cards into a group named gpu"
        )
    message = last_error(lines) or text[-400:] or f"Ansible ended with code {code} and said nothing"
    return PlayError(f"Ansible could not start the work: {message}")


def parse_error(text: str) -> str | None:
    """Why an inventory could not be parsed. Ansible tries one reader after the other: the file's own one counts."""
    causes = dict(
        re.findall(r"Failed to parse inventory with '(\w+)' plugin: (.+?)(?= Failed to parse|\[|<<<|$)", text)
    )
    if not causes:
        return None
    source = re.search(r"(?:Completely failed to parse inventory source|Unable to parse) (\S+)", text)
    is_yaml = source is not None and source[1].endswith((".yml", ".yaml", ".json"))
    cause = causes["yaml"] if is_yaml and "yaml" in causes else list(causes.values())[-1]
    cause = re.sub(r", got: <class .*?>", "", cause.removeprefix("Failed to parse inventory: ")).strip(" .")
    place = re.search(rf"Origin: {re.escape(source[1])}:(\d+)", text) if source else None
    return cause[:400] + (f" (line {place[1]})" if place else "")

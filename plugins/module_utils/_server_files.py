# SPDX-License-Identifier: Apache-2.0
"""Private to the collection, may change at any time.

What a server leaves on a host: one template unit, one launcher, and per instance a data file (and the one before it).
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Optional

from ansible_collections.tensorless.fleet.plugins.module_utils import _launch
from ansible_collections.tensorless.fleet.plugins.module_utils._refusal import Refusal

UNIT = "tensorless@.service"
PARTIAL = ".tensorless-new"  # suffix of a file being written; a crash leaves it, the next run removes it
_INSTANCE = re.compile(r"[a-z0-9][a-z0-9_.-]*")
_LONGEST_INSTANCE = 200  # a unit's whole name may have 255 bytes

TEMPLATE = """\
# Written by tensorless.fleet and kept the same for every server; put changes of your own into a drop-in.
[Unit]
Description=tensorless model server %i
Wants=network-online.target
After=network-online.target docker.service nvidia-persistenced.service
After=tensorless-cdi.service nvidia-cdi-refresh.service
# Six starts in an hour end a crash loop; a model that loads for ten minutes can still fail six times within it.
StartLimitIntervalSec=3600
StartLimitBurst=6

[Service]
Type=exec
ExecStart={launcher} start {instances}/%i.json
ExecStop={launcher} stop {instances}/%i.json
ExecStopPost={launcher} settle {instances}/%i.json
Restart=on-failure
# Long enough for the runtime to let go of the name and the port, short against loading a model.
RestartSec=5
# 78: the instance's file cannot be used; another start would not change that.
RestartPreventExitStatus=78
# Asked for to stop: SIGTERM's 143, 137 where an open answer outlasted the grace, and 127 where podman lost the status.
# The launcher turns a 137 or 127 that nobody asked for into a failure.
SuccessExitStatus=143 137 127
# The container's own grace is 90 s, and the service manager's limit has to be longer.
TimeoutStopSec=150
# Only the runtime's client gets signals: podman's own clean-up, cut short, would leave half a record that keeps the
# name. What the client leaves behind is settled by the launcher.
KillMode=process
RuntimeDirectory=tensorless/%i
SyslogIdentifier=tensorless

[Install]
WantedBy={target}
"""


@dataclass(frozen=True)
class Places:
    """Where the files of one scope lie."""

    scope: str
    unit_dir: str
    instances: str
    launcher: str
    target: str
    linger: Optional[str] = None  # the file that says that the user's services run without a login

    @property
    def unit(self) -> str:
        return f"{self.unit_dir}/{UNIT}"

    @property
    def wants(self) -> str:
        return f"{self.unit_dir}/{self.target}.wants"

    def document(self, instance: str) -> str:
        return f"{self.instances}/{instance}.json"

    def previous(self, instance: str) -> str:
        return f"{self.instances}/{instance}.previous"

    def enabled_link(self, instance: str) -> str:
        return f"{self.wants}/{unit_name(instance)}"

    def unit_text(self) -> str:
        return TEMPLATE.format(launcher=self.launcher, instances=self.instances, target=self.target)


def places(scope: str, home: str = "", user: str = "") -> Places:
    if scope == "system":
        return Places(
            "system",
            "/etc/systemd/system",
            "/etc/tensorless/instances",
            "/usr/local/lib/tensorless/launch",
            "multi-user.target",
        )
    return Places(
        "user",
        f"{home}/.config/systemd/user",
        f"{home}/.config/tensorless/instances",
        f"{home}/.local/lib/tensorless/launch",
        "default.target",
        f"/var/lib/systemd/linger/{user}",
    )


def unit_name(instance: str) -> str:
    return f"tensorless@{instance}.service"


def check_instance(name: str) -> str:
    """An instance name is a container name and part of a unit's name, so it needs no escaping in either."""
    if not _INSTANCE.fullmatch(name) or len(name) > _LONGEST_INSTANCE:
        raise Refusal(
            f"{name!r} cannot be an instance name: it needs 1 to {_LONGEST_INSTANCE} characters of a-z, 0-9, '_', '.' "
            "and '-', the first a letter or a digit; nothing was written",
            rc=2,
        )
    return name


def launcher_text() -> str:
    """The launcher as this collection carries it, with the interpreter of this host."""
    python = "/usr/bin/python3" if os.path.exists("/usr/bin/python3") else sys.executable
    loader = _launch.__loader__
    source = loader.get_source(_launch.__name__) if loader is not None else None  # type: ignore[attr-defined]
    if not source:
        raise Refusal("the launcher's source is not in this copy of the collection; install the collection again")
    return f"#!{python} -I\n{source}"


DOCUMENT_KEYS = (
    "runtime", "container_name", "exec", "plan_hash", "image", "cards", "model", "alias", "host", "port", "endpoint",
    "health_url", "context", "api_key_file", "offload", "untuned_label",
)  # fmt: skip


def document(plan: Mapping[str, Any]) -> dict[str, Any]:
    """The instance file for a plan: what starting, watching and returning to it needs, and nothing that is secret."""
    data: dict[str, Any] = {"schema": 1, "instance": plan["instance"]}
    data.update({key: plan.get(key) for key in DOCUMENT_KEYS})
    download = plan.get("download") or {}
    data["model_file"] = {key: download.get(key) for key in ("blob", "sha256", "size_bytes")}
    return data


def as_plan(data: Mapping[str, Any]) -> dict[str, Any]:
    """The plan that an instance file was written for, as far as the servers read plans."""
    return {**data, "download": data.get("model_file") or {}}


def document_text(data: Mapping[str, Any]) -> str:
    return json.dumps(data, indent=1, sort_keys=True, ensure_ascii=False) + "\n"


def read_text(path: str) -> Optional[str]:
    try:
        with open(path, encoding="utf-8", errors="replace") as stream:
            return stream.read()
    except (FileNotFoundError, NotADirectoryError):
        return None


def read_document(path: str) -> tuple[str, Optional[dict[str, Any]]]:
    """`absent`, `ok` or `broken` (half written, edited, another schema), with its content when it is ok."""
    text = read_text(path)
    if text is None:
        return "absent", None
    try:
        data = json.loads(text)
        if isinstance(data, dict) and data.get("schema") == 1 and isinstance(data.get("exec"), list):
            return "ok", data
    except ValueError:
        pass
    return "broken", None


def instance_names(where: Places) -> list[str]:
    try:
        names = os.listdir(where.instances)
    except (FileNotFoundError, NotADirectoryError):
        return []
    return sorted(name[: -len(".json")] for name in names if name.endswith(".json"))


def partial_files(where: Places) -> list[str]:
    """Files that an interrupted run was writing."""
    found = []
    for folder in (where.unit_dir, where.instances, os.path.dirname(where.launcher)):
        with contextlib.suppress(OSError):
            found += [f"{folder}/{name}" for name in sorted(os.listdir(folder)) if name.endswith(PARTIAL)]
    return found


def write_text(path: str, text: str, mode: int) -> None:
    """Whole or not at all: a crash or a full disk leaves the earlier file."""
    stage(path, text, mode)
    commit(path)


def stage(path: str, text: str, mode: int) -> None:
    """Puts the text beside the file, so that taking its place needs no more room on the disk."""
    make_folders(os.path.dirname(path))
    partial = f"{path}{PARTIAL}"
    descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as stream:
            stream.write(text)
            stream.flush()
            os.fchmod(stream.fileno(), mode)
            os.fsync(stream.fileno())
    except OSError:
        discard(path)
        raise


def commit(path: str) -> None:
    """What was staged takes the file's place."""
    os.rename(f"{path}{PARTIAL}", path)
    _sync_folder(os.path.dirname(path))


def discard(path: str) -> None:
    """Nothing stays staged."""
    with contextlib.suppress(OSError):
        os.unlink(f"{path}{PARTIAL}")


def make_folders(folder: str) -> None:
    """Missing folders, readable by all whatever the umask is."""
    if folder and not os.path.isdir(folder):
        make_folders(os.path.dirname(folder))
        with contextlib.suppress(FileExistsError):
            os.mkdir(folder)
            os.chmod(folder, 0o755)


def _sync_folder(folder: str) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove(path: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)


def remove_empty_folders(where: Places) -> None:
    """Takes away the folders that nothing is left in."""
    folders = [where.instances, os.path.dirname(where.instances), os.path.dirname(where.launcher), where.wants]
    for folder in folders:
        with contextlib.suppress(OSError):
            os.rmdir(folder)

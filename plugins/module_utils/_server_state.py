# SPDX-License-Identifier: Apache-2.0
"""Private to the collection, may change at any time.

Reads what a host has of a model server: unit, data file, container, answer. Changes nothing; at most three child
processes (systemctl, podman, docker) however many servers there are, and not a byte of a model.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Optional

from ansible_collections.tensorless.fleet.plugins.module_utils import _server_files as files
from ansible_collections.tensorless.fleet.plugins.module_utils._runtime import (
    Container,
    Run,
    Runtime,
    RuntimeUnavailable,
    last_line,
)
from ansible_collections.tensorless.fleet.plugins.module_utils._server_files import Places

_PROPERTIES = (
    "Id", "ActiveState", "SubState", "Result", "MainPID", "NRestarts", "NeedDaemonReload", "DropInPaths",
    "InvocationID", "ExecMainStatus", "LoadState", "FragmentPath",
)  # fmt: skip
# Since systemd 256 or so, enabling a unit without a reload makes every unit say NeedDaemonReload, this one too. Then it
# says nothing about ours, and enabling must not lead to a reload.
_ANY_UNIT = "-.slice"


@dataclass(frozen=True)
class Unit:
    active: str = "inactive"  # systemd's ActiveState
    sub: str = "dead"
    result: str = "success"
    main_pid: int = 0
    restarts: int = 0
    exit_status: int = 0
    needs_reload: bool = False
    drop_ins: tuple[str, ...] = ()
    invocation: str = ""
    masked: bool = False
    fragment: str = ""  # the file that systemd read the unit from

    @property
    def up(self) -> bool:
        return self.active in ("active", "reloading")

    @property
    def busy(self) -> bool:
        """Up, on its way up or down, or about to be started again."""
        return self.active not in ("inactive", "failed")


@dataclass(frozen=True)
class Seen:
    """One instance on the host. `containers` has what bears its name, by runtime."""

    instance: str
    file_state: str  # absent | ok | broken
    document: Optional[dict[str, Any]]
    enabled: bool
    unit: Unit
    containers: dict[str, Container] = field(default_factory=dict)

    def container(self, runtime: str) -> Optional[Container]:
        return self.containers.get(runtime)


@dataclass(frozen=True)
class HostSeen:
    unit_text: Optional[str]
    launcher_text: Optional[str]
    leftovers: tuple[str, ...]
    lingers: bool
    runtimes: tuple[str, ...]  # installed
    unavailable: dict[str, str]  # installed, but cannot be asked: why
    instances: dict[str, Seen] = field(default_factory=dict)


def systemctl(where: Places, *words: str) -> list[str]:
    return ["systemctl", *(["--user"] if where.scope == "user" else []), *words]


def read_units(run: Run, where: Places, instances: Sequence[str]) -> dict[str, Unit]:
    if not instances:
        return {}
    names = [files.unit_name(i) for i in instances] + [_ANY_UNIT]
    rc, out, err = run(systemctl(where, "show", "--property", ",".join(_PROPERTIES), "--", *names))
    if rc != 0 and not out.strip():
        if where.linger is not None and not os.path.exists(where.linger):
            return {i: Unit() for i in instances}  # the user's manager does not run yet, so nothing of it does
        raise RuntimeUnavailable(f"systemd does not answer: {last_line(err) or 'no output'}")
    units: dict[str, Unit] = {}
    for block in out.strip().split("\n\n"):
        values = dict(line.partition("=")[::2] for line in block.splitlines())
        units[values.get("Id", "")] = Unit(
            active=values.get("ActiveState", "inactive"),
            sub=values.get("SubState", "dead"),
            result=values.get("Result", "success"),
            main_pid=_int(values.get("MainPID")),
            restarts=_int(values.get("NRestarts")),
            exit_status=_int(values.get("ExecMainStatus")),
            needs_reload=values.get("NeedDaemonReload") == "yes",
            drop_ins=tuple(values.get("DropInPaths", "").split()),
            invocation=values.get("InvocationID", ""),
            masked=values.get("LoadState") == "masked",
            fragment=values.get("FragmentPath", ""),
        )
    if units.get(_ANY_UNIT, Unit()).needs_reload:
        units = {name: replace(unit, needs_reload=False) for name, unit in units.items()}
    return {i: units.get(files.unit_name(i), Unit()) for i in instances}


def _int(text: Optional[str]) -> int:
    return int(text) if text and text.isdigit() else 0


def read_containers(
    run: Run, runtimes: Sequence[str], names: Sequence[str]
) -> tuple[dict[str, dict[str, Container]], dict[str, str]]:
    """Containers by runtime and name, and the runtimes that could not be asked with the reason."""
    found: dict[str, dict[str, Container]] = {}
    unavailable: dict[str, str] = {}
    for runtime in runtimes:
        try:
            found[runtime] = Runtime(runtime, run).inspect(names)
        except RuntimeUnavailable as exc:
            unavailable[runtime] = str(exc)
    return found, unavailable


def observe(run: Run, where: Places, installed: Sequence[str], wanted: Mapping[str, str]) -> HostSeen:
    """`wanted` maps each instance to its container's name."""
    instances = list(wanted)
    units = read_units(run, where, instances)
    found, unavailable = read_containers(run, installed, sorted(set(wanted.values())))
    seen = {}
    for instance, name in wanted.items():
        state, document = files.read_document(where.document(instance))
        seen[instance] = Seen(
            instance=instance,
            file_state=state,
            document=document,
            enabled=is_enabled(where, instance),
            unit=units[instance],
            containers={rt: by_name[name] for rt, by_name in found.items() if name in by_name},
        )
    return HostSeen(
        unit_text=files.read_text(where.unit),
        launcher_text=files.read_text(where.launcher),
        leftovers=tuple(files.partial_files(where)),
        lingers=where.linger is None or os.path.exists(where.linger),
        runtimes=tuple(installed),
        unavailable=unavailable,
        instances=seen,
    )


def is_enabled(where: Places, instance: str) -> bool:
    """The link that systemd follows at boot, read from the disk: the manager's own view of it may be old."""
    link = where.enabled_link(instance)
    return os.path.islink(link) and os.path.realpath(link) == os.path.realpath(where.unit)


def journal(run: Run, where: Places, instance: str, invocation: str, lines: int) -> list[str]:
    """The last lines that the server itself wrote (its runtime logs the same lines a second time)."""
    scope = ["--user"] if where.scope == "user" else []
    unit = "_SYSTEMD_USER_UNIT" if where.scope == "user" else "_SYSTEMD_UNIT"
    match = [f"_SYSTEMD_INVOCATION_ID={invocation}"] if invocation else [f"{unit}={files.unit_name(instance)}"]
    rc, out, _err = run(
        ["journalctl", *scope, "--no-pager", "-q", "-o", "cat", "-n", str(lines), "_TRANSPORT=stdout", *match]
    )
    return out.splitlines() if rc == 0 else []

# SPDX-License-Identifier: Apache-2.0
"""Private to the collection, may change at any time.

From what is wanted and what was seen to the smallest list of actions. Pure: reads nothing, changes nothing.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Optional

from ansible_collections.tensorless.fleet.plugins.module_utils import _server_files as files
from ansible_collections.tensorless.fleet.plugins.module_utils._refusal import Refusal
from ansible_collections.tensorless.fleet.plugins.module_utils._runtime import Container
from ansible_collections.tensorless.fleet.plugins.module_utils._server_files import Places
from ansible_collections.tensorless.fleet.plugins.module_utils._server_state import HostSeen, Seen


@dataclass(frozen=True)
class Action:
    """One change. `kind` is what the applier does, `text` what a person reads; no instance means the host itself."""

    kind: str
    text: str
    instance: str = ""
    runtime: str = ""
    path: str = ""

    @property
    def ends(self) -> bool:
        """Takes something away that runs or may run."""
        return self.kind in ("unpause", "stop", "stop_container", "remove_container")

    def line(self) -> str:
        return f"{self.instance}: {self.text}" if self.instance else self.text


def host_actions(host: HostSeen, where: Places, launcher: str) -> list[Action]:
    """The files that all servers share. A template that is new needs no reload; one that changed does."""
    actions = [
        Action("remove_file", f"remove {path}, left by an interrupted run", path=path) for path in host.leftovers
    ]
    if host.launcher_text != launcher:
        actions.append(Action("write_launcher", f"write {where.launcher}"))
    rewritten = host.unit_text != where.unit_text()
    if rewritten:
        actions.append(Action("write_unit", f"write {where.unit}"))
    stale = any(seen.unit.needs_reload for seen in host.instances.values())
    if stale or (rewritten and host.unit_text is not None):
        actions.append(Action("reload_units", "systemctl daemon-reload"))
    if not host.lingers:
        actions.append(Action("enable_linger", "loginctl enable-linger, so that servers run without a login"))
    return actions


def check_together(plans: Sequence[Mapping[str, Any]]) -> None:
    """What no single plan can see: two of them that would take each other's name or address."""
    for key, what in (("instance", "name"), ("container_name", "container name")):
        _refuse_twice(((str(p[key]), p) for p in plans), what)
    for number, plan in enumerate(plans):
        for earlier in plans[:number]:
            if plan["port"] == earlier["port"] and _overlap(str(plan["host"]), str(earlier["host"])):
                raise Refusal(
                    f"{earlier['model']} and {plan['model']} would both use the address {plan['host']}:{plan['port']}; "
                    "give each its own (port)",
                    rc=2,
                )
        files.check_instance(str(plan["instance"]))
        files.check_instance(str(plan["container_name"]))


def _refuse_twice(pairs: Iterable[tuple[str, Mapping[str, Any]]], what: str) -> None:
    owners: dict[str, str] = {}
    for value, plan in pairs:
        if value in owners:
            raise Refusal(
                f"{owners[value]} and {plan['model']} would both use the {what} {value}; give each its own (instance)",
                rc=2,
            )
        owners[value] = str(plan["model"])


def _overlap(one: str, other: str) -> bool:
    """Whether two addresses take each other's ports: the same, or one of them is every address of its family."""
    return one == other or ((":" in one) == (":" in other) and bool({one, other} & {"0.0.0.0", "::"}))


def started(
    plan: Mapping[str, Any], seen: Seen, host: HostSeen, where: Places, on_change: str = "converge"
) -> list[Action]:
    """What brings one server to its plan."""
    instance, runtime, name = str(plan["instance"]), str(plan["runtime"]), str(plan["container_name"])
    document = files.document(plan)
    refuse_strangers(name, seen)
    if seen.unit.masked:
        unit = files.unit_name(instance)
        raise Refusal(f"{unit} is masked, so it cannot be started; allow it: systemctl unmask {unit}, then run again")
    current = _running(seen)
    same = (
        current is not None
        and current.runtime == runtime
        and current.plan_hash == plan["plan_hash"]
        and seen.unit.busy
        and current.running
    )
    if on_change == "refuse" and current is not None and current.plan_hash != plan["plan_hash"]:
        raise Refusal(
            f"{name} is already running in {current.runtime} with other options; "
            f"stop it first: tensorless stop {plan['model']}"
        )
    actions = _resume(name, instance, seen)
    for other in seen.containers.values():
        if other.running and not (seen.unit.busy and other.runtime == _unit_runtime(seen)):
            actions.append(
                Action(
                    "stop_container", f"stop {name}, which no service owns ({other.runtime})", instance, other.runtime
                )
            )
        elif not other.running and (other.runtime == runtime or other.ours):
            actions.append(_remove(name, other, instance))
    if seen.unit.busy and not same:
        # before the data file changes: the unit stops what the file names
        why = "its plan changed" if current is not None else "its container is gone"
        actions.append(Action("stop", f"stop it: {why}", instance))
    if seen.file_state != "ok" or seen.document != document:
        actions.append(Action("write_document", f"write {where.document(instance)}", instance))
    if not seen.enabled:
        actions.append(Action("enable", "start it at boot", instance))
    if not same:
        gpu = ", ".join(card["uuid"] for card in plan.get("cards") or []) or plan.get("gpu") or "all"
        actions.append(Action("start", f"start it ({runtime}, GPU {gpu})", instance, runtime))
    return actions


def _resume(name: str, instance: str, seen: Seen) -> list[Action]:
    """A paused server answers nobody, and takes no SIGTERM either."""
    return [
        Action("unpause", f"resume {name}, which is paused ({c.runtime})", instance, c.runtime)
        for c in seen.containers.values()
        if c.paused and c.ours
    ]


def _remove(name: str, container: Container, instance: str) -> Action:
    text = f"remove the stopped container {name} ({container.runtime})"
    return Action("remove_container", text, instance, container.runtime)


def refuse_strangers(name: str, seen: Seen) -> None:
    """A running container that this collection did not make is never touched."""
    for container in seen.containers.values():
        if container.running and not container.ours:
            raise Refusal(
                f"{name} is already running in {container.runtime} (container {container.id[:12]}), and it was not "
                f"started by this service; stop it first: {container.runtime} stop {name}"
            )


def _running(seen: Seen) -> Optional[Container]:
    """The container of ours that runs, the unit's own runtime first."""
    alive = [c for c in seen.containers.values() if c.running and c.ours]
    alive.sort(key=lambda c: c.runtime != _unit_runtime(seen))
    return alive[0] if alive else None


def _unit_runtime(seen: Seen) -> Optional[str]:
    """Where the unit's container runs: as its file says, or, where that is lost, the only one of ours that runs."""
    if seen.document:
        return str(seen.document.get("runtime"))
    alive = [c.runtime for c in seen.containers.values() if c.running and c.ours]
    return alive[0] if seen.unit.busy and len(alive) == 1 else None


def stopped(instance: str, name: str, seen: Seen) -> list[Action]:
    """What stops a server and keeps it from coming back at boot; its files stay."""
    actions = _resume(name, instance, seen)
    unit_runtime = _unit_runtime(seen)
    if seen.unit.busy:
        runtime = next((c.runtime for c in seen.containers.values() if c.running), unit_runtime or "")
        actions.append(Action("stop", f"stop it ({runtime})" if runtime else "stop it", instance, runtime))
    for other in seen.containers.values():
        if other.running and not (seen.unit.busy and other.runtime == unit_runtime):
            actions.append(Action("stop_container", f"stop {name} ({other.runtime})", instance, other.runtime))
        elif not other.running and other.ours:
            actions.append(_remove(name, other, instance))
    if seen.unit.active == "failed":
        actions.append(Action("reset_failed", "clear its failed state", instance))
    if seen.enabled:
        actions.append(Action("disable", "no longer start it at boot", instance))
    return actions


def absent(instance: str, name: str, seen: Seen, where: Places, has_previous: bool) -> list[Action]:
    actions = stopped(instance, name, _without_strangers(seen))
    if seen.file_state != "absent":
        actions.append(
            Action("remove_file", f"remove {where.document(instance)}", instance, path=where.document(instance))
        )
    if has_previous:
        actions.append(
            Action("remove_file", f"remove {where.previous(instance)}", instance, path=where.previous(instance))
        )
    return actions


def shared_files_gone(host: HostSeen, where: Places) -> list[Action]:
    """After the last server has gone: the template and the launcher go too."""
    actions = [Action("remove_file", f"remove {path}", path=path) for path in host.leftovers]
    if host.unit_text is not None:
        # no reload: systemd forgets a template by itself once its instances are gone
        actions.append(Action("remove_file", f"remove {where.unit}", path=where.unit))
    if host.launcher_text is not None:
        actions.append(Action("remove_file", f"remove {where.launcher}", path=where.launcher))
    return actions


def _without_strangers(seen: Seen) -> Seen:
    """Removing takes what this collection made and nothing else."""
    return replace(seen, containers={runtime: c for runtime, c in seen.containers.items() if c.ours})


def warnings(seen: Seen, where: Places) -> list[str]:
    """What somebody else put over the unit. What a distribution ships for every service is no news."""
    unit = files.unit_name(seen.instance)
    paths = [path for path in seen.unit.drop_ins if not path.startswith(("/usr/", "/lib/"))]
    found = [f"{path} changes {unit}; this collection did not write it and leaves it alone" for path in paths]
    if seen.unit.fragment and os.path.realpath(seen.unit.fragment) != os.path.realpath(where.unit):
        found.append(
            f"{seen.unit.fragment} takes the place of {where.unit} for {unit}; this collection did not write it and "
            "leaves it alone"
        )
    return found

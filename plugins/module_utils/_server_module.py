# SPDX-License-Identifier: Apache-2.0
"""Private to the collection, may change at any time.

The work of the module tensorless_server from its options to its result: observe, plan, apply.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Optional

from ansible_collections.tensorless.fleet.plugins.module_utils import _lease
from ansible_collections.tensorless.fleet.plugins.module_utils import _server as planner
from ansible_collections.tensorless.fleet.plugins.module_utils import _server_apply as applier
from ansible_collections.tensorless.fleet.plugins.module_utils import _server_cards as cards
from ansible_collections.tensorless.fleet.plugins.module_utils import _server_check as check
from ansible_collections.tensorless.fleet.plugins.module_utils import _server_files as files
from ansible_collections.tensorless.fleet.plugins.module_utils import _server_health as health
from ansible_collections.tensorless.fleet.plugins.module_utils import _server_state as state
from ansible_collections.tensorless.fleet.plugins.module_utils._refusal import Refusal
from ansible_collections.tensorless.fleet.plugins.module_utils._runtime import RUNTIMES, Runtime
from ansible_collections.tensorless.fleet.plugins.module_utils._server import Action
from ansible_collections.tensorless.fleet.plugins.module_utils._server_apply import Failed, Job, Tools
from ansible_collections.tensorless.fleet.plugins.module_utils._server_state import HostSeen, Seen

REQUIRED = ("instance", "container_name", "runtime", "exec", "plan_hash", "image", "host", "port", "endpoint",
            "health_url", "alias", "model", "download")  # fmt: skip


@dataclass
class Outcome:
    """What the module returns. `failure` is the one message for the user."""

    changed: bool = False
    servers: list[dict[str, Any]] = field(default_factory=list)
    actions: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    looked_in: list[str] = field(default_factory=list)
    unlisted: list[str] = field(default_factory=list)
    failure: Optional[str] = None
    rc: int = 0


def check_plans(plans: Sequence[Mapping[str, Any]]) -> None:
    for plan in plans:
        missing = [key for key in REQUIRED if plan.get(key) in (None, "", [])]
        if missing:
            raise Refusal(
                f"a plan lacks {', '.join(missing)}: give tensorless_server the plans that tensorless_recipe returned",
                rc=2,
            )
    planner.check_together(plans)


def start(
    plans: Sequence[Mapping[str, Any]],
    tools: Tools,
    installed: Sequence[str],
    on_change: str = "converge",
    check_mode: bool = False,
    going_back: bool = False,
    exclusive: bool = False,
) -> Outcome:
    """State `started`: every plan runs, is enabled, and answers. With `exclusive` no other server of ours is left."""
    check_plans(plans)
    wanted = {str(p["instance"]): str(p["container_name"]) for p in plans}
    others = _others(tools.where, wanted)
    if exclusive and not plans:
        outcome = stop(others, tools, installed, gone=True, check_mode=check_mode)
        outcome.servers, outcome.unlisted = [], list(others)
        return outcome
    host = state.observe(tools.run, tools.where, installed, {**wanted, **others})
    outcome = Outcome(looked_in=list(installed))
    for plan in plans:
        _need_runtime(plan, host, check_mode, outcome)
    launcher = files.launcher_text()
    host_actions = planner.host_actions(host, tools.where, launcher) if plans else []
    outcome.unlisted = [name for name in others if exclusive or _comes_back(host.instances[name])]
    leaving = [_leaving(host.instances[name], others[name], tools) for name in (others if exclusive else ())]
    jobs = []
    for plan in plans:
        seen = host.instances[str(plan["instance"])]
        outcome.warnings += planner.warnings(seen, tools.where)
        outcome.warnings += publish_warnings(plan)
        actions = planner.started(plan, seen, host, tools.where, on_change)
        jobs.append(Job(seen.instance, files.document(plan), actions, seen, going_back=going_back))
    freed = _freed_ports([*leaving, *jobs])
    for plan, job in zip(plans, jobs):
        _prerequisites(plan, job, host, tools, check_mode, outcome)
        if job.starts and plan["port"] not in freed:  # else it is looked at again once that server has stopped
            _check_port(plan, host, tools)
    _check_cards([pair for pair in zip(plans, jobs) if pair[1].starts], leaving, tools)
    _record(outcome, host_actions, [*leaving, *jobs])
    if check_mode:
        outcome.servers = [_server(job, "would be started" if job.starts else "started") for job in jobs]
        return outcome
    applier.apply_host(host_actions, tools, launcher)
    for job in leaving:
        applier.stop_job(job, tools)
    failures = applier.apply_all(jobs, tools)
    _results(outcome, jobs, failures, tools)
    return outcome


def _others(where: files.Places, wanted: Mapping[str, str]) -> dict[str, str]:
    """The instances of ours that no plan names, with their containers' names."""
    found = {}
    for instance in files.instance_names(where):
        if instance not in wanted:
            document = files.read_document(where.document(instance))[1]
            found[instance] = str(document["container_name"]) if document else instance
    return found


def _comes_back(seen: Seen) -> bool:
    """It runs, or will after the next boot; one that was stopped for good is nobody's concern."""
    return seen.enabled or seen.unit.busy


def _leaving(seen: Seen, name: str, tools: Tools) -> Job:
    actions = planner.absent(
        seen.instance, name, seen, tools.where, os.path.exists(tools.where.previous(seen.instance))
    )
    return Job(seen.instance, seen.document or {"container_name": name}, actions, seen)


def _ending(jobs: Sequence[Job]) -> list[Job]:
    """The jobs whose server of ours runs now and is stopped in this run."""
    return [
        job
        for job in jobs
        if any(action.kind in ("stop", "stop_container") for action in job.actions)
        and any(c.running and c.ours for c in job.seen.containers.values())
    ]


def _freed_ports(jobs: Sequence[Job]) -> set[Any]:
    return {(job.seen.document or job.document).get("port") for job in _ending(jobs)}


def _check_port(plan: Mapping[str, Any], host: HostSeen, tools: Tools) -> None:
    port = int(plan["port"])

    def published_by(_port: int) -> Optional[str]:
        for runtime in host.runtimes:
            for name in Runtime(runtime, tools.run).publishing(port):
                known = any(name in (c.name for c in seen.containers.values()) for seen in host.instances.values())
                whose = "a server of this collection" if known else "a container"
                return f"{name}, {whose} in {runtime}"
        return None

    taken = check.port_taken(str(plan["host"]), port, published_by=published_by)
    if taken:
        raise Refusal(taken)


def go_back(instances: Sequence[str], tools: Tools, installed: Sequence[str], check_mode: bool = False) -> Outcome:
    """State `previous`: servers return to the plan before their last change. Where none is kept nothing happens."""
    plans = []
    for instance in instances:
        state_of_file, document = files.read_document(tools.where.previous(instance))
        if state_of_file == "ok" and document is not None:
            plans.append(files.as_plan(document))
    outcome = start(plans, tools, installed, check_mode=check_mode, going_back=True) if plans else Outcome()
    kept = {str(plan["instance"]) for plan in plans}
    outcome.notes += [f"{name}: no earlier plan is kept" for name in instances if name not in kept]
    return outcome


def _previous(instance: str, tools: Tools) -> Optional[dict[str, Any]]:
    """What the server ran before its last change, while that is kept."""
    _state, document = files.read_document(tools.where.previous(instance))
    return {key: document.get(key) for key in ("plan_hash", "image", "runtime")} if document else None


def publish_warnings(plan: Mapping[str, Any]) -> list[str]:
    host = str(plan["host"])
    if host in ("0.0.0.0", "::"):
        return [
            f"{plan['model']} listens on every interface of this host (--host {host}): anyone who can reach port "
            f"{plan['port']} can use it"
        ]
    return []


def _need_runtime(plan: Mapping[str, Any], host: HostSeen, check_mode: bool, outcome: Outcome) -> None:
    runtime = str(plan["runtime"])
    reason = host.unavailable.get(runtime)
    if runtime in host.runtimes and reason is None:
        return
    if not check_mode:
        raise Refusal(reason or f"{runtime} is not installed; install it (role container_runtime) and run again")
    note = f"the containers are known after {runtime} is {'running' if reason else 'installed'}"
    if note not in outcome.notes:
        outcome.notes.append(note)


def _prerequisites(
    plan: Mapping[str, Any], job: Job, host: HostSeen, tools: Tools, check_mode: bool, outcome: Outcome
) -> None:
    """Everything a start needs, asked before anything that answers is stopped."""
    missing_model = check.model_missing(plan)
    if not job.starts:
        if missing_model:
            outcome.warnings.append(f"{plan['model']} runs, but could not be started again: {missing_model}")
        return
    complaints = [missing_model]
    if plan["runtime"] in host.runtimes and plan["runtime"] not in host.unavailable:
        complaints += [check.image_missing(plan, tools.run)]
        if not any(complaints):
            complaints += [check.pn_off_the_card(plan, tools.run)]
    for complaint in filter(None, complaints):
        if not check_mode:
            raise Refusal(complaint)
        outcome.notes.append(f"not yet: {complaint}")


def _check_cards(starting: Sequence[tuple[Mapping[str, Any], Job]], leaving: Sequence[Job], tools: Tools) -> None:
    """Room for every model on its card, counting what is stopped first, and no measurement that a start would spoil."""
    if tools.cards is None or not any(plan.get("cards") for plan, _job in starting):
        return
    for plan, _job in starting:
        for card in plan.get("cards") or []:
            holder = _lease.read(str(card["uuid"]))
            if holder is not None:
                raise Refusal(
                    f"{card['uuid']} is being measured by {holder.get('owner')} ({holder.get('purpose')}); starting a "
                    "server would spoil that; wait until it ends, then run again"
                )
    facts = tools.cards()
    parents = cards.parents()
    ending = [*leaving, *(job for _plan, job in starting)]
    stopping = {c.pid for job in ending for c in job.seen.containers.values() if c.running and c.ours}
    freed = frozenset(pid for main in stopping for pid in cards.descendants(main, parents))
    promised: dict[str, int] = {}
    for plan, _job in starting:
        complaint = cards.too_full(plan, facts, freed, promised)
        if complaint:
            raise Refusal(complaint)


def stop(
    targets: Mapping[str, str],
    tools: Tools,
    installed: Sequence[str],
    gone: bool = False,
    check_mode: bool = False,
) -> Outcome:
    """States `stopped` and `absent`. `targets` maps instances to container names."""
    for instance in targets:
        files.check_instance(instance)
    host = state.observe(tools.run, tools.where, installed, targets)
    outcome = Outcome(looked_in=[runtime for runtime in installed if runtime not in host.unavailable])
    outcome.notes += [f"{reason}; nothing was looked for there" for reason in host.unavailable.values()]
    jobs = []
    for instance, name in targets.items():
        seen = host.instances[instance]
        if gone:
            actions = planner.absent(instance, name, seen, tools.where, os.path.exists(tools.where.previous(instance)))
        else:
            actions = planner.stopped(instance, name, seen)
        jobs.append(Job(instance, seen.document or {"container_name": name}, actions, seen))
    last = gone and not set(files.instance_names(tools.where)) - set(targets)
    host_actions = planner.shared_files_gone(host, tools.where) if last else []
    _record(outcome, [], jobs, host_actions)
    outcome.servers = [_stopped_server(job, gone) for job in jobs]
    if check_mode:
        return outcome
    for job in jobs:
        applier.stop_job(job, tools)
    applier.apply_host(host_actions, tools, "")
    if last:
        files.remove_empty_folders(tools.where)
    for job, server in zip(jobs, outcome.servers):
        server["answers_cut"] = job.answers_cut
        if job.answers_cut:
            outcome.warnings.append(f"stopping {job.instance} cut {job.answers_cut} answer(s) short")
    return outcome


def _stopped_server(job: Job, gone: bool) -> dict[str, Any]:
    name = job.document["container_name"]
    ran = any(a.kind in ("stop", "stop_container") for a in job.actions)
    server = _server(job, "absent" if gone else "stopped")
    server["message"] = f"stopped {name}" if ran else f"{name} is not running"
    return server


def _record(outcome: Outcome, host_actions: Sequence[Action], jobs: Sequence[Job], last: Sequence[Action] = ()) -> None:
    planned = [action for job in jobs for action in job.actions]
    every = [*host_actions, *(a for a in planned if a.ends), *(a for a in planned if not a.ends), *last]
    outcome.actions = [action.line() for action in every]
    outcome.changed = bool(every)


def _server(job: Job, condition: str) -> dict[str, Any]:
    document = job.document
    return {
        "instance": job.instance,
        "state": condition,
        "model": document.get("model"),
        "runtime": document.get("runtime"),
        "container_name": document.get("container_name"),
        "plan_hash": document.get("plan_hash"),
        "image": document.get("image"),
        "model_path": (document.get("model_file") or {}).get("blob"),
        "endpoint": document.get("endpoint"),
        "cards": document.get("cards") or [],
        "actions": [action.text for action in job.actions],
    }


def _other_than_planned(document: Mapping[str, Any]) -> list[str]:
    """What the running server made of its context: engines divide it among slots, or lower it when memory is short."""
    found = health.properties(str(document["endpoint"]), health.read_key(document.get("api_key_file")))
    texts = []
    if found and isinstance(found["n_ctx"], int) and found["n_ctx"] < int(document["context"]):
        texts.append(
            f"{document['instance']} has a context of {found['n_ctx']} tokens for each request instead of "
            f"{document['context']}"
        )
    if found and isinstance(found["total_slots"], int) and found["total_slots"] != 1:
        texts.append(
            f"{document['instance']} serves {found['total_slots']} requests at a time; recipes are measured with 1"
        )
    return texts


def _results(outcome: Outcome, jobs: Sequence[Job], failures: Sequence[Failed], tools: Tools) -> None:
    """Adds what the running servers say about themselves; asks again only where something was started."""
    failed = {failure.instance: failure for failure in failures}
    changed = {job.instance: str(job.document["container_name"]) for job in jobs if job.starts}
    now = {job.instance: job.seen for job in jobs}
    if changed:
        runtimes = sorted({str(job.document["runtime"]) for job in jobs}, key=RUNTIMES.index)
        now.update(state.observe(tools.run, tools.where, runtimes, changed).instances)
    for job in jobs:
        seen = now[job.instance]
        server = _server(job, "failed" if job.instance in failed else "started")
        container = seen.container(str(job.document["runtime"]))
        server.update(
            container_id=container.id if container else None,
            pid=container.pid if container else None,
            started_at=container.started_at if container else None,
            answers_cut=job.answers_cut,
            seconds_down=None if job.seconds_down is None else round(job.seconds_down, 1),
            previous=_previous(job.instance, tools),
            enabled=seen.enabled,
        )
        if job.starts and job.instance not in failed:
            outcome.warnings += _other_than_planned(job.document)
        if job.answers_cut:
            outcome.warnings.append(f"restarting {job.instance} cut {job.answers_cut} answer(s) short")
        outcome.servers.append(server)
    if failures:
        outcome.failure = "\n".join(failure.text() for failure in failures)
        outcome.rc = 1

# SPDX-License-Identifier: Apache-2.0
"""Private to the collection, may change at any time.

Carries out the actions that `_server` planned: starting and proving a server, going back to the one before it when the
new one does not come up, stopping one without cutting answers short if that can be helped.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Optional

from ansible_collections.tensorless.fleet.plugins.module_utils import _server_cards as cards
from ansible_collections.tensorless.fleet.plugins.module_utils import _server_check as check
from ansible_collections.tensorless.fleet.plugins.module_utils import _server_files as files
from ansible_collections.tensorless.fleet.plugins.module_utils import _server_health as health
from ansible_collections.tensorless.fleet.plugins.module_utils import _server_state as state
from ansible_collections.tensorless.fleet.plugins.module_utils._refusal import Refusal
from ansible_collections.tensorless.fleet.plugins.module_utils._runtime import Run, Runtime, last_line
from ansible_collections.tensorless.fleet.plugins.module_utils._server import Action
from ansible_collections.tensorless.fleet.plugins.module_utils._server_files import Places
from ansible_collections.tensorless.fleet.plugins.module_utils._server_health import Clock, Exited, NotReady
from ansible_collections.tensorless.fleet.plugins.module_utils._server_state import Seen

LOG_LINES = 60


@dataclass
class Tools:
    """What the applier works with; a test passes its own."""

    run: Run
    clock: Clock
    where: Places
    user: str = ""
    health_timeout: float = 1200
    drain_timeout: float = 60
    progress: Callable[[str, str], None] = lambda what, note: None
    get: health.Get = health.http_get
    lives: Callable[[int], bool] = lambda pid: os.path.exists(f"/proc/{pid}")
    cards: Optional[Callable[[], Mapping[str, Any]]] = None  # reads the cards; None where that is not wanted


class Failed(Exception):
    """A server did not come up. `log` holds its last lines, `outcome` what was done about it."""

    def __init__(self, instance: str, reason: str, log: Sequence[str]) -> None:
        super().__init__(reason)
        self.instance = instance
        self.reason = reason
        self.log = list(log)
        self.outcome = ""

    def text(self) -> str:
        cause = health.likely_cause(self.log)
        if cause is None and self.reason.endswith("exit status 137)"):
            cause = "it was killed, as the kernel does when memory (or the limit set in hardening) runs out"
        parts = [f"{self.instance}: {self.reason}"]
        if cause:
            parts.append(f"probably: {cause}")
        if self.outcome:
            parts.append(self.outcome)
        lines = [f"last {len(self.log)} log lines:", *self.log] if self.log else ["it left no log lines"]
        return "; ".join(parts) + "\n" + "\n".join(lines)


@dataclass
class Job:
    """One instance on its way to a document: what was there before, for the way back."""

    instance: str
    document: dict[str, Any]
    actions: list[Action]
    seen: Seen
    undone: list[str] = field(default_factory=list)
    answers_cut: Optional[int] = 0
    memory_before: dict[str, int] = field(default_factory=dict)  # of the cards, just before the start
    going_back: bool = False  # to the plan before: afterwards there is none to go back to
    down_since: Optional[float] = None
    seconds_down: Optional[float] = None

    @property
    def starts(self) -> bool:
        return any(action.kind == "start" for action in self.actions)


def command(tools: Tools, *words: str) -> None:
    """A systemctl command that has to work."""
    argv = state.systemctl(tools.where, *words)
    rc, out, err = tools.run(argv)
    if rc != 0:
        raise Refusal(f"{' '.join(argv)} failed: {last_line(err) or last_line(out) or f'exit status {rc}'}")


def apply_host(actions: Sequence[Action], tools: Tools, launcher: str) -> None:
    where = tools.where
    for action in actions:
        if action.kind == "write_launcher":
            files.write_text(where.launcher, launcher, 0o755)
        elif action.kind == "write_unit":
            files.write_text(where.unit, where.unit_text(), 0o644)
        elif action.kind == "reload_units":
            command(tools, "daemon-reload")
        elif action.kind == "remove_file":
            files.remove(action.path)
        elif action.kind == "enable_linger":
            rc, _out, err = tools.run(["loginctl", "enable-linger", tools.user])
            if rc != 0:
                raise Refusal(
                    f"servers of {tools.user} would end at logout: {last_line(err)}; as root run: "
                    f"loginctl enable-linger {tools.user}"
                )
            for _unused in range(10):  # its service manager comes up by itself
                if tools.run(state.systemctl(where, "show-environment"))[0] == 0:
                    break
                tools.clock.sleep(1)


def apply_all(jobs: Sequence[Job], tools: Tools) -> list[Failed]:
    """Brings every job to its plan. All servers load at the same time; each that fails goes back to what it was.

    First all that ends, then all that starts: a port or a card that one server gives up may be another's from now on.
    """
    _stage(jobs, tools)
    failures: list[Failed] = []
    waiting = list(jobs)
    for ending in (True, False):
        for job in list(waiting):
            try:
                for action in job.actions:
                    if action.ends == ending:
                        _apply(action, job, tools)
            except (Failed, Refusal, OSError) as exc:
                waiting.remove(job)
                failure = _as_failure(job, exc)
                failures.append(_go_back(job, failure, tools) if job.starts else _left_alone(job, failure))
    for job in waiting:
        try:
            prove(job.document, job.seen.unit.main_pid if not job.starts else None, tools)
            if job.down_since is not None:
                job.seconds_down = tools.clock.monotonic() - job.down_since
            _prove_placed(job, tools)
            _remember(job, tools)
        except Failed as failure:
            failures.append(_go_back(job, failure, tools) if job.starts else _left_alone(job, failure))
    return failures


def _left_alone(job: Job, failure: Failed) -> Failed:
    """A server of the right plan that this run did not start and that does not answer: ours to tell, not to end."""
    failure.reason = failure.reason.replace(", so it was stopped", "")
    failure.outcome = f"it was left as it is; start it anew: systemctl restart {files.unit_name(job.instance)}"
    return failure


def _stage(jobs: Sequence[Job], tools: Tools) -> None:
    """Writes every new data file beside the old one: a disk that is full or read-only shows before a server stops."""
    paths = []
    try:
        for job in jobs:
            if any(action.kind == "write_document" for action in job.actions):
                paths.append(tools.where.document(job.instance))
                files.stage(paths[-1], files.document_text(job.document), 0o644)
    except OSError:
        for path in paths:
            files.discard(path)
        raise


def _as_failure(job: Job, exc: Exception) -> Failed:
    if isinstance(exc, Failed):
        return exc
    if isinstance(exc, OSError):
        return Failed(job.instance, f"cannot write {exc.filename or 'a file'}: {exc.strerror or exc}", [])
    return Failed(job.instance, str(exc), [])


def _apply(action: Action, job: Job, tools: Tools) -> None:
    where, instance, document = tools.where, job.instance, job.document
    name, unit = str(document["container_name"]), files.unit_name(job.instance)
    if action.kind == "write_document":
        files.commit(where.document(instance))
    elif action.kind == "enable":
        command(tools, "enable", "--no-reload", unit)
    elif action.kind == "disable":
        command(tools, "disable", "--no-reload", unit)
    elif action.kind == "reset_failed":
        command(tools, "reset-failed", unit)
    elif action.kind == "stop":
        job.answers_cut = drain(job.seen.document or document, tools)
        job.down_since = tools.clock.monotonic()
        command(tools, "stop", unit)
    elif action.kind == "stop_container":
        job.answers_cut = drain(job.seen.document or document, tools)
        _must(Runtime(action.runtime, tools.run).stop(name), f"{action.runtime} stop {name}")
        Runtime(action.runtime, tools.run).remove(name)
    elif action.kind == "unpause":
        _must(Runtime(action.runtime, tools.run).unpause(name), f"{action.runtime} unpause {name}")
    elif action.kind == "remove_container":
        _must(Runtime(action.runtime, tools.run).remove(name), f"{action.runtime} rm {name}")
    elif action.kind == "remove_file":
        files.remove(action.path)
    elif action.kind == "start":
        taken = check.port_taken(str(document["host"]), int(document["port"]))
        if taken:
            raise Failed(instance, taken, [])
        if tools.cards is not None and document.get("cards"):
            job.memory_before = cards.used_by_card(tools.cards())
        start_unit(instance, document, tools)


def _must(result: tuple[int, str, str], what: str) -> None:
    rc, out, err = result
    if rc != 0:
        raise Refusal(f"{what} failed: {last_line(err) or last_line(out)}")


def start_unit(instance: str, document: Mapping[str, Any], tools: Tools) -> None:
    unit = files.unit_name(instance)
    tools.run(state.systemctl(tools.where, "reset-failed", unit))  # fresh start limit; nothing to reset is fine
    rc, _out, err = tools.run(state.systemctl(tools.where, "start", unit))
    if rc != 0:
        raise Failed(instance, f"could not start the container: {last_line(err)}", _log(instance, tools))


def _log(instance: str, tools: Tools) -> list[str]:
    unit = state.read_units(tools.run, tools.where, [instance])[instance]
    return state.journal(tools.run, tools.where, instance, unit.invocation, LOG_LINES)


def prove(document: Mapping[str, Any], known_pid: Optional[int], tools: Tools) -> float:
    """Waits until the server is ready and is the one that the plan means. Returns the seconds it took."""
    instance = str(document["instance"])
    watched = _Watched(instance, known_pid, tools)
    try:
        ready = health.wait_ready(
            str(document["health_url"]),
            tools.health_timeout,
            watched.ended,
            tools.clock,
            tools.get,
            lambda seconds, seen: tools.progress(
                str(document["model"]), f"{health.phase(seen)}, {health.span(seconds)}"
            ),
            lambda: _listening(document, tools),
        )
    except Exited as exc:
        reason = f"the server exited before it was ready ({exc})"
        if any("could not start the container" in line for line in watched.log()):
            reason = "could not start the container"
        raise Failed(instance, reason, watched.log()) from exc
    except NotReady as exc:
        raise Failed(instance, str(exc), watched.log()) from exc
    names = health.served_names(str(document["endpoint"]), tools.get)
    if names is not None and document["alias"] not in names:
        raise Failed(
            instance,
            f"another server answers at {document['endpoint']}: it serves {', '.join(names) or 'nothing'}, not "
            f"{document['alias']}",
            [],
        )
    return ready.seconds


def _prove_placed(job: Job, tools: Tools) -> None:
    """The server sits on the card that it was given."""
    if tools.cards is None or not job.memory_before or job.document.get("offload"):
        return
    name = str(job.document["container_name"])
    container = Runtime(str(job.document["runtime"]), tools.run).inspect([name]).get(name)
    if container is None:
        return
    family = cards.descendants(container.pid, cards.parents())
    wanted = [str(card["uuid"]) for card in job.document["cards"]]
    complaint = cards.misplaced(wanted, job.memory_before, tools.cards(), family)
    if complaint:
        raise Failed(job.instance, complaint, _log(job.instance, tools))


class _Watched:
    """Whether a unit's server still lives, mostly without asking systemd."""

    def __init__(self, instance: str, pid: Optional[int], tools: Tools) -> None:
        self.instance = instance
        self.tools = tools
        self.pid = pid
        self.invocation = ""

    def ended(self) -> Optional[str]:
        if self.pid and self.tools.lives(self.pid):
            return None
        unit = state.read_units(self.tools.run, self.tools.where, [self.instance])[self.instance]
        self.invocation = unit.invocation or self.invocation
        if unit.up and unit.restarts == 0 and unit.main_pid:
            self.pid = unit.main_pid
            return None
        return f"{unit.result}, exit status {unit.exit_status}"

    def log(self) -> list[str]:
        return state.journal(self.tools.run, self.tools.where, self.instance, self.invocation, LOG_LINES)


def _listening(document: Mapping[str, Any], tools: Tools) -> bool:
    name = str(document["container_name"])
    container = Runtime(str(document["runtime"]), tools.run).inspect([name]).get(name)
    return container is not None and check.listens_inside(container.pid)


def _remember(job: Job, tools: Tools) -> None:
    """Keeps the plan that this one replaced, for the way back, once the new one has proved itself."""
    if job.going_back:
        files.remove(tools.where.previous(job.instance))
        return
    before = job.seen.document
    if (
        before
        and before != job.document
        and (before.get("plan_hash") != job.document["plan_hash"] or before.get("runtime") != job.document["runtime"])
    ):
        path = tools.where.previous(job.instance)
        files.write_text(path, files.document_text(before), 0o644)


def _go_back(job: Job, failure: Failed, tools: Tools) -> Failed:
    """The state before this run: the earlier server if there was one, else nothing that would start by itself."""
    where, instance, unit = tools.where, job.instance, files.unit_name(job.instance)
    files.discard(where.document(instance))
    tools.run(state.systemctl(where, "stop", unit))
    tools.run(state.systemctl(where, "reset-failed", unit))
    before = job.seen.document
    if not job.seen.enabled:
        tools.run(state.systemctl(where, "disable", "--no-reload", unit))
    try:
        if before is None:
            files.remove(where.document(instance))
            failure.outcome = "nothing of it was left on the host"
            return failure
        if files.read_document(where.document(instance))[1] != before:
            files.write_text(where.document(instance), files.document_text(before), 0o644)
    except OSError as exc:
        failure.outcome = f"the server is stopped, and its earlier file could not be written ({exc.strerror or exc})"
        return failure
    if not job.seen.unit.busy or before == job.document:
        failure.outcome = "the server is stopped"
        return failure
    try:
        start_unit(instance, before, tools)
        prove(before, None, tools)
        failure.outcome = f"the earlier server is back at {before['endpoint']}"
        if job.down_since is not None:
            job.seconds_down = tools.clock.monotonic() - job.down_since
    except Failed as second:
        tools.run(state.systemctl(where, "stop", unit))
        failure.outcome = f"and the earlier server did not come back either ({second.reason})"
        failure.log += ["--- log of the earlier server ---", *second.log]
    return failure


def drain(document: Mapping[str, Any], tools: Tools) -> Optional[int]:
    """Waits for idle. Returns how many answers a stop would cut now; None when the server does not tell."""
    endpoint = str(document.get("endpoint") or "")
    if not endpoint:
        return None
    key = health.read_key(document.get("api_key_file"))
    until = tools.clock.monotonic() + tools.drain_timeout
    told = False
    while True:
        busy = health.busy_slots(endpoint, key)
        if not busy or tools.clock.monotonic() >= until:
            return busy
        if not told:
            what = f"up to {health.span(tools.drain_timeout)} for {busy} answer(s) to end before the stop"
            tools.progress(str(document.get("model")), f"waiting {what}")
            told = True
        tools.clock.sleep(1)


def stop_job(job: Job, tools: Tools) -> None:
    for action in job.actions:
        _apply(action, job, tools)

# SPDX-License-Identifier: Apache-2.0
"""Private to the collection, may change at any time.

One server on this machine, the documented way: `run -d --rm` by the calling user, no unit, gone after a reboot. The
commands `run`, `serve` and `stop` without an inventory are made of this; commands, time, HTTP and output are passed in.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from ansible_collections.tensorless.fleet.plugins.module_utils import _server_check as check
from ansible_collections.tensorless.fleet.plugins.module_utils import _server_health as health
from ansible_collections.tensorless.fleet.plugins.module_utils._refusal import Refusal
from ansible_collections.tensorless.fleet.plugins.module_utils._runtime import (
    Container,
    Run,
    Runtime,
    RuntimeUnavailable,
    last_line,
)
from ansible_collections.tensorless.fleet.plugins.module_utils._server_health import Clock, Exited, NotReady

READY_LIMIT = 1200.0
QUIET_SECONDS = 30.0  # a load shorter than this says nothing on its way
LOG_LINES = 60


class Follower(Protocol):
    """The log of a running container, read from its start on: after its end `--rm` leaves nothing to read."""

    def tail(self, lines: int) -> list[str]: ...

    def close(self) -> None: ...


@dataclass
class LocalTools:
    """`follow(runtime, name)` starts reading a container's log. `say` prints one line for the user."""

    run: Run
    follow: Callable[[str, str], Follower]
    say: Callable[[str], None]
    installed: Sequence[str]
    clock: Clock = time
    get: health.Get = health.http_get
    bind: check.Bind = check.bind


def containers(name: str, tools: LocalTools, runtimes: Sequence[str]) -> dict[str, Container]:
    """What bears the name, by runtime. A runtime that cannot be asked holds nothing that this user could see."""
    found = {}
    for runtime in runtimes:
        try:
            by_name = Runtime(runtime, tools.run).inspect([name])
        except RuntimeUnavailable:
            continue
        if name in by_name:
            found[runtime] = by_name[name]
    return found


def check_free(plan: Mapping[str, Any], tools: LocalTools) -> None:
    """What `run` looks at before it pulls, and `serve` before it starts: name and port."""
    name = str(plan["container_name"])
    for runtime, container in containers(name, tools, tools.installed).items():
        if container.running:
            raise Refusal(f"{name} is already running in {runtime}; stop it first: tensorless stop {plan['model']}")
    taken = check.port_taken(str(plan["host"]), int(plan["port"]), tools.bind)
    if taken:
        raise Refusal(taken)


def serve(plan: Mapping[str, Any], tools: LocalTools, detach: bool, limit: float = READY_LIMIT) -> float:
    """Starts the plan's documented command and waits until the server is ready; returns the seconds that took.

    The Refusal of a server that ended early comes after its last log lines have been said.
    """
    name, runtime = str(plan["container_name"]), str(plan["runtime"])
    check_free(plan, tools)
    for missing in (check.image_missing(plan, tools.run), check.model_missing(plan)):
        if missing:
            raise Refusal(missing)
    if containers(name, tools, [runtime]):
        Runtime(runtime, tools.run).remove(name)
    tools.say(f"starting {name} ({runtime}, GPU {plan['gpu']})")
    rc, out, err = tools.run(list(plan["command"]))
    if rc != 0:
        raise Refusal(
            f"could not start the container: {last_line(err) or last_line(out) or f'exit status {rc}'}; "
            "run: tensorless doctor"
        )
    log = tools.follow(runtime, name)
    try:
        tools.say(f"waiting for {plan['health_url']} while the model loads (up to {health.span(limit)})")
        ready = health.wait_ready(
            str(plan["health_url"]), limit, _ended(runtime, name, tools), tools.clock, tools.get, _Teller(tools.say)
        )
    except Exited as exc:
        if detach:  # in the foreground its lines have been on the screen as they came
            _show(log, tools)
        cause = health.likely_cause(log.tail(LOG_LINES))
        raise Refusal(f"the server exited before it was ready{f': {cause}' if cause else ''}") from exc
    except NotReady as exc:
        if detach:
            _show(log, tools)
        stop(name, [runtime], tools)
        raise Refusal(str(exc)) from exc
    except KeyboardInterrupt:
        interrupted(runtime, name, tools)
        raise
    finally:
        log.close()
    for line in ready_lines(plan, detach):
        tools.say(line)
    return ready.seconds


def _ended(runtime: str, name: str, tools: LocalTools) -> Callable[[], str | None]:
    def ended() -> str | None:
        container = Runtime(runtime, tools.run).inspect([name]).get(name)
        if container is None:
            return "it is gone"
        return None if container.running else f"exit status {container.exit_code}"

    return ended


class _Teller:
    """Says `still loading` every 30 seconds, so a short load says nothing."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self.say = say
        self.told = 0.0

    def __call__(self, seconds: float, seen: health.Health) -> None:
        if seconds - self.told >= QUIET_SECONDS:
            self.told = seconds
            self.say(f"still loading ({health.span(seconds)}): {health.phase(seen)}")


def _show(log: Follower, tools: LocalTools) -> None:
    for line in log.tail(LOG_LINES):
        tools.say(line)


def ready_lines(plan: Mapping[str, Any], detach: bool) -> list[str]:
    endpoint, model = plan["endpoint"], plan["model"]
    lines = [f"{model} is ready at {endpoint} (OpenAI-compatible API under /v1)"]
    if plan["host"] in ("0.0.0.0", "::", "[::]"):
        lines.append(f"it listens on every interface of this host (--host {plan['host']})")
    lines += [
        "try it:",
        f"  curl {endpoint}/v1/chat/completions -H 'Content-Type: application/json' \\",
        f'    -d \'{{"model": "{plan["alias"]}", "messages": [{{"role": "user", "content": "Hello"}}]}}\'',
    ]
    if detach:
        lines.append(f"stop it with: tensorless stop {model}")
    return lines


def interrupted(runtime: str, name: str, tools: LocalTools) -> None:
    """Ctrl-C or SIGTERM in the foreground: the server goes with the command (which then exits with 130)."""
    tools.say(f"stopping {name}")
    Runtime(runtime, tools.run).stop(name)


@dataclass(frozen=True)
class Stopped:
    """Where was looked, and where something was stopped."""

    looked_in: tuple[str, ...]
    stopped_in: tuple[str, ...]
    commands: tuple[tuple[str, ...], ...]


def stop(name: str, runtimes: Sequence[str], tools: LocalTools, dry_run: bool = False) -> Stopped:
    """Stops what runs under the name in each of the runtimes; says the documented line for it."""
    running = [runtime for runtime, c in containers(name, tools, runtimes).items() if c.running]
    commands = tuple(tuple(Runtime(runtime, tools.run).stop_command(name)) for runtime in running)
    if dry_run:
        for command in commands:
            tools.say(" ".join(command))
        if not commands:
            tools.say(f"{name} is not running")
        return Stopped(tuple(runtimes), (), commands)
    for runtime in running:
        rc, out, err = Runtime(runtime, tools.run).stop(name)
        if rc != 0:
            raise Refusal(f"could not stop {name} in {runtime}: {last_line(err) or last_line(out)}")
    tools.say(f"stopped {name}" if running else f"{name} is not running")
    return Stopped(tuple(runtimes), tuple(running), commands)

# SPDX-License-Identifier: Apache-2.0
"""Area 8 of the conformance corpus: the documented server on one machine, against a host in memory and a fake clock."""

from __future__ import annotations

import pathlib
import re
from typing import Any

from ansible_collections.tensorless.fleet.plugins.module_utils import _image, _server_local
from ansible_collections.tensorless.fleet.plugins.module_utils._plan import container_name, plan_model
from ansible_collections.tensorless.fleet.plugins.module_utils._plan_types import Choice, HostFacts
from ansible_collections.tensorless.fleet.plugins.module_utils._refusal import Refusal
from ansible_collections.tensorless.fleet.plugins.module_utils._runtime import Runtime

from tests.conformance.frame import Env
from tests.unit.server.fakes import Behaviour, Box, FakeHost

AREA = "server_lifecycle"


class _Log:
    """Follows a fake server's log: what it wrote up to its end."""

    def __init__(self, host: FakeHost) -> None:
        self.host = host

    def tail(self, lines: int) -> list[str]:
        return self.host.logs[-lines:]

    def close(self) -> None:
        pass


class _Case:
    def __init__(self, env: Env, given: dict[str, Any]) -> None:
        self.given = given
        self.runtime = (given.get("installed") or ["podman"])[0] if given["runtime"] == "auto" else given["runtime"]
        self.host = FakeHost(env.tmp, given.get("installed", [self.runtime]))
        self.said: list[str] = []
        gpu = given.get("gpu")
        choice = Choice(
            cache=str(env.tmp),
            card="p100",
            gpu=None if gpu is None else str(gpu),
            runtime=self.runtime,
            host=given.get("host", "127.0.0.1"),
            port=given.get("port", 8080),
        )
        # A server can be stopped whatever is installed: its name needs no runtime.
        runtimes = ("podman", "docker") if given["operation"] == "stop" else self.host.installed
        host = HostFacts(cpu_count=32, runtimes=runtimes)
        self.plan = plan_model(env.load({"recipe": given["recipe"]}), host, choice).plans[0]
        self.name = str(self.plan["container_name"])
        self.tools = _server_local.LocalTools(
            run=self.host.run,
            follow=lambda _runtime, _name: _Log(self.host),
            say=self.said.append,
            installed=self.host.installed,
            clock=self.host.clock,
            get=self.host.get,
            bind=self.bind,
        )
        lines = [f"line {n}" for n in range(1, given.get("log_line_count", 0) + 1)]
        self.how = Behaviour(
            given.get("healthy_after_s"),
            given.get("exits_after_s"),
            list(given.get("health_answers", [])),
            lines,
            start_fails="Error: the command was refused" if given.get("run_fails") else None,
        )
        self.host.behaviour = lambda _argv: self.how
        before = given.get("container", "absent")
        if before != "absent":
            self.host.boxes[self.runtime][self.name] = Box(self.name, ["--rm"], running=before == "running")
        if given.get("image_present"):
            self.host.images[self.runtime].add(self.plan["image"])
        self.downloaded = False
        self._cache(given.get("blob", "absent"))

    def bind(self, _host: str, _port: int) -> None:
        if not self.given["port_free"]:
            raise OSError(98, "Address already in use")

    def _cache(self, state: str) -> None:
        """The model file as the case has it; the size that the plan wants is its stand-in's."""
        blob = pathlib.Path(self.plan["download"]["blob"])
        blob.parent.mkdir(parents=True, exist_ok=True)
        self.plan["download"]["size_bytes"] = 4
        if state == "partial":
            blob.with_name(blob.name + ".incomplete").write_bytes(b"GG")
        elif state in ("valid", "corrupt"):
            blob.write_bytes(b"GGUF" if state == "valid" else b"FUGG")


def _started(case: _Case) -> bool:
    return any(call[1:2] == ["run"] for call in case.host.calls) and not case.given.get("run_fails")


def _serve(env: Env, given: dict[str, Any]) -> dict[str, Any]:
    case = _Case(env, given)
    got: dict[str, Any] = {"failed": False, "message": "", "changed": False, "pulled": False}
    try:
        if given["operation"] == "run":
            _server_local.check_free(case.plan, case.tools)
            _pull(case)
        got["ready_seconds"] = _server_local.serve(case.plan, case.tools, given["detach"])
        got["changed"] = True
    except Refusal as refusal:
        got.update(failed=True, message=refusal.message)
    calls = case.host.calls
    got["started"] = _started(case)
    got["pulled"] = any(call[1] == "pull" for call in calls)
    got["downloaded"] = case.downloaded
    got["pull_command"] = next((call for call in calls if call[1] == "pull"), None)
    got["removed_first"] = [call[1] for call in calls if call[1] in ("rm", "run")][:1] == ["rm"]
    got["endpoint"], got["health_url"] = case.plan["endpoint"], case.plan["health_url"]
    got["served_model_name"] = case.plan["alias"]
    got["models_url"] = f"{case.plan['endpoint']}/v1/models"
    got["output"] = "\n".join(case.said)
    got["polls"] = len(case.host.health_polls)
    gaps = {b - a for a, b in zip(case.host.health_polls, case.host.health_polls[1:], strict=False)}
    got["poll_interval_s"] = gaps.pop() if len(gaps) == 1 else None
    got["still_loading_lines"] = sum("still loading" in line for line in case.said)
    got["log"] = [line for line in case.said if re.fullmatch(r"line \d+", line)]
    return got


def _pull(case: _Case) -> None:
    runtime = Runtime(case.runtime, case.host.run)
    if runtime.image(case.plan["image"]) is None:
        _image.pull(case.plan["image"], case.runtime, case.host.run, 0, case.host.clock.sleep, lambda _text: None)
    case.downloaded = case.given["blob"] != "valid"


def _stop(env: Env, given: dict[str, Any]) -> dict[str, Any]:
    case = _Case(env, {**given, "port_free": True})
    for runtime in given["running_in"]:
        case.host.boxes[runtime][case.name] = Box(case.name, ["--rm"])
    runtimes = given["installed"] if given["runtime"] == "auto" else [given["runtime"]]
    stopped = _server_local.stop(case.name, runtimes, case.tools, given.get("dry_run", False))
    return {
        "failed": False,
        "changed": bool(stopped.stopped_in),
        "looked_in": list(stopped.looked_in),
        "still_running": any(case.name in boxes for boxes in case.host.boxes.values()),
        "output": "\n".join(case.said),
    }


def _interrupt(env: Env, given: dict[str, Any]) -> dict[str, Any]:
    """Ctrl-C while the model loads."""
    case = _Case(env, {**given, "port_free": True, "image_present": True, "blob": "valid", "healthy_after_s": None})
    looks = case.tools.get

    def get(url: str) -> tuple[int, bytes]:
        if case.host.clock.now >= 3:
            raise KeyboardInterrupt
        return looks(url)

    case.tools.get = get
    code = 0
    try:
        _server_local.serve(case.plan, case.tools, given["detach"])
    except KeyboardInterrupt:
        code = 130  # what the interpreter's caller makes of it; see the command line's own tests
    gone = not any(case.name in boxes for boxes in case.host.boxes.values())
    return {
        "failed": True,
        "exit_code": code,
        "container_after": "absent" if gone else "running",
        "output": "\n".join(case.said),
    }


def _name(_env: Env, given: dict[str, Any]) -> dict[str, Any]:
    return {"failed": False, "container_name": container_name(given["hf_repo"])}


def run_case(case: dict[str, Any], env: Env) -> dict[str, Any]:
    given = case["given"]
    operation = {"name": _name, "serve": _serve, "run": _serve, "stop": _stop, "interrupt": _interrupt}
    return operation[given["operation"]](env, given)


def _within(expected: list[float], got: dict[str, Any], _case: dict[str, Any]) -> str | None:
    seconds = got.get("ready_seconds")
    if seconds is not None and expected[0] <= seconds <= expected[1]:
        return None
    return f"ready_within_s: expected {expected}, got {seconds}"


def _lines(expected: dict[str, int], got: dict[str, Any], _case: dict[str, Any]) -> str | None:
    wanted = [f"line {n}" for n in range(expected["first"], expected["last"] + 1)]
    if got["log"] == wanted and len(wanted) == expected["count"]:
        return None
    return f"log_lines_shown: expected {expected}, got {got['log'][:1]}..{got['log'][-1:]} ({len(got['log'])})"


CHECKS = {"ready_within_s": _within, "log_lines_shown": _lines}

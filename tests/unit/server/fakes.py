# SPDX-License-Identifier: Apache-2.0
"""A host in memory for tests of the servers: two runtimes, systemd, a clock, and servers that answer over 'HTTP'."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from ansible_collections.tensorless.fleet.plugins.module_utils._runtime import PLAN_LABEL
from ansible_collections.tensorless.fleet.plugins.module_utils._server_apply import Tools
from ansible_collections.tensorless.fleet.plugins.module_utils._server_files import Places

MISSING = {
    "podman": 'Error: inspecting object: no such container "{0}"',
    "docker": "Error: No such container: {0}",
}
NO_IMAGE = {
    "podman": "Error: inspecting object: {0}: image not known",
    "docker": "Error: No such image: {0}",
}
DAEMON_DOWN = "Cannot connect to the Docker daemon at unix:///var/run/docker.sock. Is the docker daemon running?"


class Clock:
    def __init__(self) -> None:
        self.now = 0.0
        self.slept: list[float] = []

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float, /) -> None:
        self.slept.append(seconds)
        self.now += seconds


@dataclass
class Box:
    """A container. `argv` is what was run."""

    name: str
    argv: list[str]
    running: bool = True
    label: str | None = None
    started: float = 0.0
    id: str = "0" * 64
    exit_code: int = 0
    paused: bool = False
    dead: bool = False  # killed together with its monitor, so that the record was never put right

    def record(self) -> dict[str, Any]:
        return {
            "Id": self.id,
            "Name": self.name,
            "State": {
                "Status": "paused" if self.paused else "running" if self.running else "exited",
                "Running": self.running,
                "Pid": 4242 if self.running else 0,
                "ExitCode": self.exit_code,
                "StartedAt": f"t{self.started}",
            },
            "Config": {"Image": "image", "Labels": {PLAN_LABEL: self.label} if self.label else {}},
        }


@dataclass
class Behaviour:
    """How a server started from a plan behaves. `None` seconds: never."""

    healthy_after: float | None = 2.0
    exits_after: float | None = None
    answers: list[int] = field(default_factory=list)  # health answers in turn, then 200
    log: list[str] = field(default_factory=list)
    alias: str | None = None
    start_fails: str | None = None


class FakeHost:
    def __init__(self, tmp: pathlib.Path, installed: Sequence[str] = ("podman",)) -> None:
        self.tmp = tmp
        self.clock = Clock()
        self.installed = list(installed)
        self.daemon_down: set[str] = set()
        self.boxes: dict[str, dict[str, Box]] = {"podman": {}, "docker": {}}
        self.images: dict[str, set[str]] = {"podman": set(), "docker": set()}
        self.behaviour: Callable[[list[str]], Behaviour] = lambda argv: Behaviour()
        self.calls: list[list[str]] = []
        self.units: dict[str, dict[str, str]] = {}
        self.crashes_before: str | None = None  # raise instead of the first command that contains this
        self.logs: list[str] = []
        self.health_polls: list[float] = []
        self.busy: int | None = 0  # answers in progress, as /slots tells
        self.serial = 0
        self.where = Places(
            "system",
            str(tmp / "units"),
            str(tmp / "instances"),
            str(tmp / "lib/launch"),
            "multi-user.target",
        )

    # what the code under test gets

    def tools(self, **more: Any) -> Tools:
        options: dict[str, Any] = {
            "run": self.run,
            "clock": self.clock,
            "where": self.where,
            "get": self.get,
            "lives": self.lives,
            **more,
        }
        return Tools(**options)

    def lives(self, pid: int) -> bool:
        self.age()
        return any(state.get("MainPID") == str(pid) for state in self.units.values())

    def run(self, argv: Sequence[str]) -> tuple[int, str, str]:
        words = list(argv)
        self.calls.append(words)
        if self.crashes_before and self.crashes_before in " ".join(words):
            self.crashes_before = None
            raise KeyboardInterrupt
        if words[0] in ("podman", "docker"):
            return self._runtime(words)
        if words[0] == "systemctl":
            return self._systemctl([w for w in words[1:] if w not in ("--user", "--no-reload", "--")])
        if words[0] == "journalctl":
            return 0, "".join(f"{line}\n" for line in self.logs[-int(words[words.index("-n") + 1]) :]), ""
        return 127, "", f"[Errno 2] No such file or directory: {words[0]}"

    def get(self, url: str) -> tuple[int, bytes]:
        """Whoever published the port answers."""
        port = url.split("//")[1].split("/")[0].rsplit(":", 1)[1]
        box = self.listener(port)
        if url.endswith("/health"):
            self.health_polls.append(self.clock.now)
        if box is None:
            raise ConnectionRefusedError
        how = self.behaviour(box.argv)
        if url.endswith("/health"):
            if how.answers:
                status = how.answers.pop(0)
                return status, b'{"status":"ok"}' if status == 200 else b"{}"
            ready = how.healthy_after is not None and self.clock.now - box.started >= how.healthy_after
            return (200, b'{"status":"ok"}') if ready else (503, b'{"error":{"message":"Loading model"}}')
        alias = how.alias or box.argv[box.argv.index("--alias") + 1]
        return 200, json.dumps({"data": [{"id": alias}]}).encode()

    def listener(self, port: str) -> Box | None:
        self.age()
        for boxes in self.boxes.values():
            for box in boxes.values():
                if box.running and any(f":{port}:8080" in word for word in box.argv):
                    return box
        return None

    def bind(self, host: str, port: int) -> None:
        if self.listener(str(port)) is not None:
            raise OSError(98, "Address already in use")

    # what happens

    def age(self) -> None:
        """Servers that should have ended by now have."""
        for boxes in self.boxes.values():
            for name, box in list(boxes.items()):
                how = self.behaviour(box.argv)
                if box.running and how.exits_after is not None and self.clock.now - box.started >= how.exits_after:
                    self.logs = list(how.log)
                    del boxes[name]
                    for unit, state in self.units.items():
                        if name == unit.removeprefix("tensorless@").removesuffix(".service"):
                            state.update(ActiveState="activating", SubState="auto-restart", NRestarts="1",
                                         Result="exit-code", ExecMainStatus="1", MainPID="0")  # fmt: skip

    def launch(self, argv: list[str]) -> tuple[int, str, str]:
        how = self.behaviour(argv)
        if how.start_fails:
            return 125, "", how.start_fails
        name = argv[argv.index("--name") + 1]
        boxes = self.boxes[argv[0]]
        if name in boxes:
            return 125, "", f'Error: the container name "{name}" is already in use'
        label = next((w.split("=", 1)[1] for w in argv if w.startswith(f"{PLAN_LABEL}=")), None)
        self.serial += 1
        boxes[name] = Box(name, argv, label=label, started=self.clock.now, id=f"{self.serial:064d}")
        return 0, boxes[name].id, ""

    def _runtime(self, words: list[str]) -> tuple[int, str, str]:
        runtime = words[0]
        if runtime not in self.installed:
            return 127, "", f"[Errno 2] No such file or directory: {runtime}"
        if runtime in self.daemon_down:
            return 1, "[]\n", DAEMON_DOWN
        self.age()
        boxes = self.boxes[runtime]
        if words[1:3] == ["container", "inspect"]:
            found = [boxes[name].record() for name in words[3:] if name in boxes]
            missing = [MISSING[runtime].format(name) for name in words[3:] if name not in boxes]
            return (1 if missing else 0), json.dumps(found), "\n".join(missing)
        if words[1:3] == ["image", "inspect"]:
            if words[3] in self.images[runtime]:
                return 0, json.dumps([{"Id": "sha256:1", "RepoTags": []}]), ""
            return 1, "[]", NO_IMAGE[runtime].format(words[3])
        if words[1] == "pull":
            self.images[runtime].add(words[2])
            return 0, "", ""
        if words[1] == "run":
            return self.launch(words)
        if words[1] == "ps":
            ports = {box.name: box.argv[box.argv.index("-p") + 1] for box in boxes.values() if "-p" in box.argv}
            return 0, "".join(f"{n}\t{p.rpartition(':')[0]}->8080/tcp\n" for n, p in ports.items()), ""
        name = words[-1]
        if name not in boxes:
            return 1, "", MISSING[runtime].format(name)
        if words[1] == "unpause":
            boxes[name].paused = False
            return 0, name, ""
        if words[1] in ("stop", "rm") and boxes[name].dead and boxes[name].running:
            boxes[name].running = False  # podman 5.4 finds it out only now
            return 125, "", f"Error: container {boxes[name].id} conmon exited prematurely: internal libpod error"
        if words[1] == "stop":
            if "--rm" in boxes[name].argv:
                del boxes[name]
            else:
                boxes[name].running = False
            return 0, name, ""
        if words[1] == "rm":
            del boxes[name]
            return 0, name, ""
        raise AssertionError(words)

    def _systemctl(self, words: list[str]) -> tuple[int, str, str]:
        verb, names = words[0], words[1:]
        if verb == "daemon-reload":
            for state in self.units.values():
                state["NeedDaemonReload"] = "no"
            return 0, "", ""
        if verb == "show":
            self.age()
            blocks = []
            for name in names[2:]:
                state = {"Id": name, "ActiveState": "inactive", "SubState": "dead", **self.units.get(name, {})}
                blocks.append("".join(f"{k}={v}\n" for k, v in state.items()))
            return 0, "\n".join(blocks), ""
        unit = names[0]
        instance = unit.removeprefix("tensorless@").removesuffix(".service")
        link = pathlib.Path(self.where.enabled_link(instance))
        if verb == "enable":
            link.parent.mkdir(parents=True, exist_ok=True)
            link.unlink(missing_ok=True)
            link.symlink_to(self.where.unit)
        elif verb == "disable":
            link.unlink(missing_ok=True)
        elif verb == "reset-failed":
            self.units.get(unit, {}).pop("Result", None)
        elif verb == "start":
            return self._start(unit, instance)
        elif verb == "stop":
            document = json.loads(pathlib.Path(self.where.document(instance)).read_text())
            self.boxes[document["runtime"]].pop(document["container_name"], None)
            self.units.pop(unit, None)
        return 0, "", ""

    def _start(self, unit: str, instance: str) -> tuple[int, str, str]:
        document = json.loads(pathlib.Path(self.where.document(instance)).read_text())
        rc, _out, err = self.launch(document["exec"])
        if rc != 0:
            self.logs = [err]
            self.units[unit] = {"ActiveState": "activating", "SubState": "auto-restart", "NRestarts": "1",
                                "Result": "exit-code", "ExecMainStatus": str(rc)}  # fmt: skip
            return 0, "", ""
        self.units[unit] = {"ActiveState": "active", "SubState": "running", "MainPID": "4999999", "NRestarts": "0"}
        return 0, "", ""

    def changes(self) -> list[list[str]]:
        """The commands that could have changed something."""
        quiet = (["show"], ["inspect"])
        return [c for c in self.calls if not any(set(q) & set(c[1:3]) for q in quiet) and c[0] != "journalctl"]


def plan(tmp: pathlib.Path, **changes: Any) -> dict[str, Any]:
    """A plan as tensorless_recipe returns it, as far as the servers read it; its model file is there."""
    port, host = changes.get("port", 8080), changes.get("host", "127.0.0.1")
    runtime, instance = changes.get("runtime", "podman"), changes.get("instance", "tensorless-org-model")
    uuid = changes.get("uuid", "GPU-aaaaaaaa-0000-0000-0000-000000000000")
    context = changes.get("context", 4096)
    blob = tmp / "blob"
    if not blob.exists():
        blob.write_bytes(b"GGUF")
    plan_hash = f"{abs(hash((port, host, uuid, context, changes.get('image', 'image@sha256:1')))):064x}"[-64:]
    image = changes.get("image", "image@sha256:1")
    local = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, host)
    tail = ["-p", f"{host}:{port}:8080", image, "-m", "/models/m.gguf", "--alias", "Org/Model", "-c", str(context)]
    endpoint = f"http://{local}:{port}"
    return {
        "model": "Org/Model",
        "instance": instance,
        "container_name": instance,
        "runtime": runtime,
        "command": [runtime, "run", "-d", "--rm", "--name", instance, *tail],
        "exec": [runtime, "run", "--rm", "--name", instance, "--label", f"{PLAN_LABEL}={plan_hash}", *tail],
        "plan_hash": plan_hash,
        "image": image,
        "cards": [{"index": 0, "uuid": uuid, "name": "Tesla P100"}],
        "gpu": "0",
        "host": host,
        "port": port,
        "endpoint": endpoint,
        "health_url": f"{endpoint}/health",
        "alias": "Org/Model",
        "context": context,
        "download": {"blob": str(blob), "sha256": "0" * 64, "size_bytes": 4},
    }

# SPDX-License-Identifier: Apache-2.0
"""Private to the collection, may change at any time.

The two container runtimes behind one interface. What podman and docker (and their versions) do differently is settled
here and nowhere else: callers see `Container` and `Runtime`, never the output of a command.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Optional

Run = Callable[[Sequence[str]], "tuple[int, str, str]"]

RUNTIMES = ("podman", "docker")
PLAN_LABEL = "org.tensorless.plan"
STOP_GRACE = 90  # seconds between SIGTERM and SIGKILL: an open streaming answer alone needs 30


class RuntimeUnavailable(Exception):
    """The runtime is not installed, or its daemon or storage does not answer."""


@dataclass(frozen=True)
class Container:
    """One container as its runtime describes it. `plan_hash` is None when this collection did not make it."""

    runtime: str
    name: str
    id: str
    running: bool
    status: str
    pid: int
    exit_code: int
    oom_killed: bool
    image: str
    plan_hash: Optional[str]
    started_at: str

    @property
    def ours(self) -> bool:
        return self.plan_hash is not None

    @property
    def paused(self) -> bool:
        return self.status == "paused"


class Runtime:
    """Commands of one runtime, run through `run`, which must not raise when the program is missing."""

    def __init__(self, name: str, run: Run) -> None:
        self.name = name
        self.run = run

    def inspect(self, names: Sequence[str]) -> dict[str, Container]:
        """The containers that exist under these names, with one child process for all of them."""
        if not names:
            return {}
        rc, out, err = self.run([self.name, "container", "inspect", *names])
        records = _json_list(out)
        if rc != 0 and not _only_missing(err):
            raise RuntimeUnavailable(self.explain(err))
        return {c.name: c for c in (self._container(r) for r in records)}

    def _container(self, record: dict[str, Any]) -> Container:
        state = record.get("State") or {}
        config = record.get("Config") or {}
        status = str(state.get("Status", "")).lower()
        return Container(
            runtime=self.name,
            name=str(record.get("Name", "")).lstrip("/"),  # docker answers "/name"
            id=str(record.get("Id", "")),
            running=bool(state.get("Running")) or status in ("paused", "stopping", "restarting"),
            status=status,
            pid=int(state.get("Pid") or 0),
            exit_code=int(state.get("ExitCode") or 0),
            oom_killed=bool(state.get("OOMKilled")),
            image=str(config.get("Image") or record.get("ImageName") or ""),
            plan_hash=(config.get("Labels") or {}).get(PLAN_LABEL),
            started_at=str(state.get("StartedAt", "")),
        )

    def stop(self, name: str, grace: int = STOP_GRACE) -> tuple[int, str, str]:
        """Afterwards it does not run. podman complains of a server that was killed together with its monitor."""
        rc, out, err = self.run(self.stop_command(name, grace))
        if rc != 0:
            with contextlib.suppress(RuntimeUnavailable):
                left = self.inspect([name]).get(name)
                if left is None or not left.running:
                    rc = 0
        return rc, out, err

    def stop_command(self, name: str, grace: int = STOP_GRACE) -> list[str]:
        return [self.name, "stop", "-t", str(grace), name]

    def unpause(self, name: str) -> tuple[int, str, str]:
        return self.run([self.name, "unpause", name])

    def publishing(self, port: int) -> list[str]:
        """The names of the running containers that publish a port of this host."""
        rc, out, _err = self.run([self.name, "ps", "--format", "{{.Names}}\t{{.Ports}}"])
        found = []
        for line in out.splitlines() if rc == 0 else ():
            name, _tab, ports = line.partition("\t")
            spans = [(int(low), int(high or low)) for low, high in _PUBLISHED.findall(ports)]
            if any(low <= port <= high for low, high in spans):
                found.append(name)
        return found

    def remove(self, name: str) -> tuple[int, str, str]:
        """Removes the record of a container that does not run (podman: also what only its storage still knows)."""
        return self.run([self.name, "rm", "-f", name])

    def image(self, reference: str) -> Optional[dict[str, Any]]:
        """What the runtime knows of an image: id, digests and tags; None when it is not there."""
        rc, out, err = self.run([self.name, "image", "inspect", reference])
        records = _json_list(out)
        if rc == 0 and records:
            return records[0]
        if rc != 0 and not _only_missing(err):
            raise RuntimeUnavailable(self.explain(err))
        return None

    def logs(self, name: str, lines: int) -> list[str]:
        rc, out, err = self.run([self.name, "logs", "--tail", str(lines), name])
        return (out + err).splitlines()[-lines:] if rc == 0 else []

    def explain(self, err: str) -> str:
        """One line on why the runtime cannot be asked, with the next step."""
        text = last_line(err) or f"{self.name} gave no answer"
        if "permission denied" in err.lower() and self.name == "docker":
            return f"docker refused this user: {text}; add the user to the docker group, or run as root"
        if any(words in err.lower() for words in _NO_DAEMON):
            return "docker is installed but its daemon does not answer; start it: systemctl start docker"
        if is_missing_program(err):
            return f"{self.name} is not installed"
        return f"{self.name} does not answer: {text}"


def last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else ""


def is_missing_program(err: str) -> bool:
    return "No such file or directory" in err and "Errno 2" in err


def _json_list(text: str) -> list[dict[str, Any]]:
    try:
        value = json.loads(text) if text.strip() else []
    except ValueError:
        return []
    return [v for v in value if isinstance(v, dict)] if isinstance(value, list) else []


_NO_DAEMON = ("cannot connect to the docker daemon", "docker daemon running", "failed to connect to the docker api")
_PUBLISHED = re.compile(r":(\d+)(?:-(\d+))?->")
_MISSING = re.compile(
    r"no such (container|object|image)|no container with name|(container|image) not known|failed to find image|"
    r"reference does not exist|unable to inspect \".*\"",
    re.IGNORECASE,
)


def _only_missing(err: str) -> bool:
    """Every complaint is that the thing is not there."""
    lines = [line for line in err.splitlines() if line.strip() and "level=warning" not in line]
    return bool(lines) and all(_MISSING.search(line) for line in lines)


def choose_runtime(wanted: str, installed: Iterable[str]) -> str:
    """`auto` prefers podman. Raises RuntimeUnavailable with the documented words when nothing fits."""
    have = [name for name in RUNTIMES if name in set(installed)]
    if wanted != "auto":
        if wanted not in have:
            raise RuntimeUnavailable(f"{wanted} is not installed; install it, or choose another runtime")
        return wanted
    if not have:
        raise RuntimeUnavailable(
            "neither podman nor docker is installed; install podman or docker and the NVIDIA container toolkit"
        )
    return have[0]

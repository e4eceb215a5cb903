# SPDX-License-Identifier: Apache-2.0
"""What runs on the gateway of the fleet's network: the registry, the Hub and its CDN, and the package repository."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request

from tests.fleet.hosts import REGISTRY
from tests.fleet.machine import CACHE, ROOT, STATE, FleetError

GATEWAY = "10.213.7.1"
HUB = f"http://{GATEWAY}:8090"
APT = f"http://{GATEWAY}:8092"
FOLDER = STATE / "services"
TOKEN = "hf_TestToken000000000000000000000000"


def _began(pid: int) -> str:
    """When a process began, in the kernel's ticks: with its number, that names it."""
    return pathlib.Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[19]


@dataclasses.dataclass(frozen=True)
class Service:
    """A process in the background, known by its pid file."""

    name: str
    argv: tuple[str, ...]
    url: str

    @property
    def _pid_file(self) -> pathlib.Path:
        return FOLDER / f"{self.name}.pid"

    def pid(self) -> int | None:
        """The process, unless it has ended; a recycled number began at another time."""
        with contextlib.suppress(OSError, ValueError):
            pid, began = self._pid_file.read_text().split()
            if _began(int(pid)) == began:
                return int(pid)
        return None

    def answers(self) -> bool:
        try:
            with urllib.request.urlopen(self.url, timeout=2):
                return True
        except urllib.error.HTTPError:
            return True
        except OSError:
            return False

    def start(self) -> None:
        if self.pid() and self.answers():
            return
        self.stop()
        FOLDER.mkdir(parents=True, exist_ok=True)
        log = FOLDER / f"{self.name}.log"
        with log.open("ab") as out:
            process = subprocess.Popen(
                self.argv, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True
            )
        self._pid_file.write_text(f"{process.pid} {_began(process.pid)}")
        until = time.monotonic() + 20
        while not self.answers():
            if process.poll() is not None or time.monotonic() > until:
                raise FleetError(f"{self.name} does not answer at {self.url}: {log.read_text()[-1000:]}")
            time.sleep(0.1)
        time.sleep(0.2)
        if process.poll() is not None:
            raise FleetError(f"something else answers at {self.url}; end it, or choose another machine")

    def stop(self) -> None:
        pid = self.pid()
        if pid:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
            for _ in range(50):
                if not pathlib.Path(f"/proc/{pid}").exists() or self.pid() is None:
                    break
                time.sleep(0.1)
        self._pid_file.unlink(missing_ok=True)


def _registry() -> Service:
    program = shutil.which("docker-registry") or shutil.which("registry")
    if program is None:
        raise FleetError("docker-registry is not installed; run tools/fleet-prerequisites.sh as root")
    storage = STATE / "registry"
    storage.mkdir(parents=True, exist_ok=True)
    config = STATE / "registry.yml"
    config.write_text(
        f"version: 0.1\nlog: {{level: warn}}\nstorage: {{filesystem: {{rootdirectory: {storage}}}}}\n"
        f"http: {{addr: '{REGISTRY}'}}\n"
    )
    return Service("registry", (program, "serve", str(config)), f"http://{REGISTRY}/v2/")


def _hub() -> Service:
    argv = (
        sys.executable, "-m", "tests.hub", "--bind", GATEWAY, "--port", "8090", "--cdn-port", "8091",
        "--log", str(FOLDER / "hub-bytes.jsonl"), "--files", str(STATE / "hub-files.json"),
    )  # fmt: skip
    return Service("hub", argv, f"{HUB}/api/models")


def _apt() -> Service:
    argv = (sys.executable, "-m", "http.server", "8092", "--bind", GATEWAY, "--directory", str(CACHE / "simulators"))
    return Service("apt", argv, f"{APT}/")


def all_services() -> list[Service]:
    return [_registry(), _hub(), _apt()]

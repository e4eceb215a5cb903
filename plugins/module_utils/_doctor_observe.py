# SPDX-License-Identifier: Apache-2.0
"""Looks at a host for the doctor. It reads, and changes nothing.

Private to the collection: may change at any time.
"""

from __future__ import annotations

import json
import os
import platform
import re
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Optional

from ansible_collections.tensorless.fleet.plugins.module_utils import _cards as cards
from ansible_collections.tensorless.fleet.plugins.module_utils import _cdi, _doctor, _gpu_bus, _gpu_log
from ansible_collections.tensorless.fleet.plugins.module_utils import _plan_paths as paths
from ansible_collections.tensorless.fleet.plugins.module_utils._cdi_apply import HOOK, OUR_LABEL, REFRESH, UNITS
from ansible_collections.tensorless.fleet.plugins.module_utils._doctor_host import HostSeen, host_checks
from ansible_collections.tensorless.fleet.plugins.module_utils._driver import follows_kernel, is_driver_package, unbuilt
from ansible_collections.tensorless.fleet.plugins.module_utils._gpu import read_gpus
from ansible_collections.tensorless.fleet.plugins.module_utils._host import Files, Run
from ansible_collections.tensorless.fleet.plugins.module_utils._hub_http import (
    Session,
    TransportError,
    token_may_travel,
)
from ansible_collections.tensorless.fleet.plugins.module_utils._plan import bracketed
from ansible_collections.tensorless.fleet.plugins.module_utils._plan_observe import blob_state
from ansible_collections.tensorless.fleet.plugins.module_utils._recipe import Recipe
from ansible_collections.tensorless.fleet.plugins.module_utils._refusal import Refusal

Find = Callable[[str], Optional[str]]
_UNIT_FOLDERS = (UNITS, "/lib/systemd/system", "/usr/lib/systemd/system")


@dataclass
class Question:
    """What the doctor is asked about. `run` has a time limit of its own."""

    run: Run
    find: Find
    recipes: Sequence[Recipe]
    cache: str
    runtime: str = "auto"
    ports: Sequence[str] = ("127.0.0.1:8080",)
    servers: Sequence[Mapping[str, Any]] = ()  # planned ones: {repo, gpu, host, port}; their addresses are checked too
    endpoint: str = paths.DEFAULT_ENDPOINT
    token: Optional[str] = None
    controller_time: Optional[float] = None
    environ: Mapping[str, str] = field(default_factory=dict)
    files: Files = field(default_factory=Files)


def examine(ask: Question) -> dict[str, Any]:
    """The whole report of this host."""
    facts = read_gpus(ask.run, ask.find("nvidia-smi"), ask.files)
    runtimes = {name: path for name in ("podman", "docker") for path in [ask.find(name)] if path}
    docker = _docker_info(ask, runtimes)
    seen = _doctor.Seen(
        gpu_facts=facts,
        runtimes=runtimes,
        cdi_files=[path for path in _doctor.CDI_FILES if ask.files.exists(path)],
        docker_problem=docker["problem"],
        docker_runtimes=docker["runtimes"],
        docker_hook=ask.find(HOOK) is not None,
        toolkit=ask.find("nvidia-ctk") is not None,
        cache=ask.cache,
        free_bytes=free_bytes(ask.cache),
        cached=_cached(ask),
        package_manager="apt-get" if ask.find("apt-get") else "dnf",
    )
    checks = _doctor.documented(seen, ask.recipes, ask.runtime)
    chosen = next((name for name in ("podman", "docker") if name in runtimes and ask.runtime in ("auto", name)), None)
    return _doctor.report([*checks, *host_checks(_host(ask, facts, chosen, docker["root"]))])


def _docker_info(ask: Question, runtimes: Mapping[str, str]) -> dict[str, Any]:
    result: dict[str, Any] = {"problem": None, "runtimes": [], "root": "/var/lib/docker"}
    if "docker" not in runtimes:
        return result
    rc, out, err = ask.run([runtimes["docker"], "info", "--format", "{{json .}}"])
    try:
        data = json.loads(out) if out.strip() else {}
    except ValueError:
        data = {}
    trouble = (data.get("ServerErrors") or []) if isinstance(data, dict) else []
    if rc != 0 or trouble or not isinstance(data, dict):
        words = trouble[0] if trouble else (err.strip() or f"status {rc}")
        result["problem"] = " ".join(str(words).split())[:300]
        return result
    result["runtimes"] = sorted(data.get("Runtimes") or {})
    result["root"] = data.get("DockerRootDir") or result["root"]
    return result


def _cached(ask: Question) -> dict[str, str]:
    found = {}
    for recipe in ask.recipes:
        model = recipe.data["model"]
        blob = paths.blob_path(ask.cache, recipe.repo, model["sha256"])
        found[model["sha256"]] = blob_state(blob, model["size_bytes"])
    return found


def free_bytes(path: str) -> Optional[int]:
    """What an ordinary user may still write where this path is or would be."""
    while True:
        try:
            status = os.statvfs(path)
            return status.f_bavail * status.f_frsize
        except FileNotFoundError:
            if path in ("/", ""):
                return None
            path = os.path.dirname(path)
        except OSError:
            return None


def _host(ask: Question, facts: Mapping[str, Any], runtime: Optional[str], docker_root: str) -> HostSeen:
    ours = _our_containers(ask, runtime)
    store = docker_root
    if runtime != "docker":
        rc, out, _err = ask.run(["podman", "info", "--format", "{{.Store.GraphRoot}}"]) if runtime else (1, "", "")
        store = out.strip() if rc == 0 and out.strip().startswith("/") else "/var/lib/containers/storage"
    cpuinfo = re.search(r"^flags\s*:(.*)$", ask.files.read("/proc/cpuinfo") or "", re.MULTILINE)
    return HostSeen(
        gpu_facts=facts,
        runtime=runtime,
        architecture=platform.machine(),
        cpu_flags=cpuinfo.group(1).split() if cpuinfo else None,
        secure_boot=_gpu_bus.secure_boot(ask.files),
        kernel_log=_gpu_log.read(ask.run),
        cdi_problems=_cdi_problems(ask, facts, runtime),
        refresh_units=any(ask.files.exists(f"{folder}/{REFRESH[1]}") for folder in _UNIT_FOLDERS),
        toolkit=ask.find("nvidia-ctk") is not None,
        unbuilt=unbuilt(ask.run, ask.files, platform.release(), facts["loaded_version"]),
        movable=_movable(ask),
        persistenced=any(ask.files.exists(f"{folder}/nvidia-persistenced.service") for folder in _UNIT_FOLDERS),
        our_pids=[item["pid"] for item in facts["processes"] if _descends(item["pid"], ours["pids"], ask.files)],
        ports={place: _port_state(place, ours["ports"]) for place in [*ask.ports, *places(ask, facts)]},
        clock_skew=None if ask.controller_time is None else time.time() - ask.controller_time,
        clock_synchronised=_synchronised(ask),
        image_store=store,
        image_free=free_bytes(store),
        image_present=runtime is not None and _image_present(ask, runtime),
        token=_token_state(ask),
        lost_access=_lost_access(ask, ours["names"]) if runtime == "docker" else (),
    )


def places(ask: Question, facts: Mapping[str, Any]) -> list[str]:
    """Where the planned servers will listen. With gpu: each there is one for each card, with its port counted up."""
    found = []
    for server in ask.servers:
        count = 1
        if server.get("gpu") == "each":
            recipes = [recipe for recipe in ask.recipes if recipe.repo == server.get("repo")]
            gpus = cards.from_facts(facts).cards
            count = max(1, sum(cards.best_recipe(recipes, gpu) is not None for gpu in gpus))
        host = bracketed(str(server.get("host") or "127.0.0.1"))
        found += [f"{host}:{int(server.get('port') or 8080) + offset}" for offset in range(count)]
    return found


def _our_containers(ask: Question, runtime: Optional[str]) -> dict[str, list[Any]]:
    found: dict[str, list[Any]] = {"names": [], "pids": [], "ports": []}
    if runtime is None:
        return found
    shape = "{{.ID}}\t{{.Names}}\t{{.Ports}}"
    _rc, out, _err = ask.run([runtime, "ps", "--filter", f"label={OUR_LABEL}", "--format", shape])
    rows = [line.split("\t") for line in out.splitlines() if line.count("\t") == 2]
    found["names"] = [row[1] for row in rows]
    found["ports"] = [int(port) for row in rows for port in re.findall(r":(\d+)->", row[2])]
    if rows:
        _rc, out, _err = ask.run([runtime, "inspect", "--format", "{{.State.Pid}}", *(row[0] for row in rows)])
        found["pids"] = [int(word) for word in out.split() if word.isdigit() and word != "0"]
    return found


def _descends(pid: int, roots: Sequence[int], files: Files) -> bool:
    """Whether a process is one of these or a child of one."""
    for _step in range(64):
        if pid in roots:
            return True
        stat = (files.read(f"/proc/{pid}/stat") or "").rpartition(")")[2].split()
        if len(stat) < 2 or not stat[1].isdigit() or int(stat[1]) <= 1:
            return False
        pid = int(stat[1])
    return False


def _cdi_problems(ask: Question, facts: Mapping[str, Any], runtime: Optional[str]) -> Optional[list[str]]:
    view = _cdi.view(ask.files)
    # Without a driver that answers there is nothing to hold a spec against.
    if runtime != "podman" or not (view.specs or view.ignored) or not facts["cards"]:
        return None
    _rc, out, _err = ask.run(["podman", "--version"])
    version = _cdi.version_tuple(out)
    return _cdi.problems(view, facts["cards"], facts["loaded_version"], ask.files, bool(version) and version < (5,))


def _movable(ask: Question) -> Optional[list[str]]:
    """Driver packages that unattended-upgrades would move; None where it is not installed or switched off."""
    if ask.find("dpkg-query") is None:
        return None
    shape = "${db:Status-Want} ${db:Status-Status} ${Package}\\n"
    _rc, out, _err = ask.run(["dpkg-query", "-W", "-f", shape])
    rows = [line.split() for line in out.splitlines() if len(line.split()) == 3]
    if not any(row[2] == "unattended-upgrades" and row[1] == "installed" for row in rows):
        return None
    _rc, out, _err = ask.run(["apt-config", "dump"])
    switch = re.search(r'^APT::Periodic::Unattended-Upgrade "(.*)";', out, re.MULTILINE)
    if switch is None or switch.group(1) in ("0", "", "false"):
        return None
    patterns = re.findall(r'^Unattended-Upgrade::Package-Blacklist:: "(.*)";', out, re.MULTILINE)
    names = [row[2] for row in rows if row[1] == "installed" and row[0] != "hold" and is_driver_package(row[2])]
    free = [name for name in names if not any(_matches(pattern, name) for pattern in patterns)]
    return sorted(name for name in free if not follows_kernel(name))


def _matches(pattern: str, name: str) -> bool:
    try:
        return re.match(pattern, name) is not None
    except re.error:
        return False


def _port_state(place: str, ours: Sequence[int]) -> str:
    host, _colon, port = place.rpartition(":")
    host = host.strip("[]")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        # As a runtime would bind it: not refused by connections of an earlier server that are just closing.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, int(port)))
        except OSError as exc:
            return "ours" if int(port) in ours else (exc.strerror or str(exc)).lower()
    return "free"


def _synchronised(ask: Question) -> Optional[bool]:
    rc, out, _err = ask.run(["timedatectl", "show", "-p", "NTPSynchronized", "--value"])
    return {"yes": True, "no": False}.get(out.strip()) if rc == 0 else None


def _image_present(ask: Question, runtime: str) -> bool:
    images = {str(recipe.data["engine"]["image"]) for recipe in ask.recipes}
    return any(ask.run([runtime, "image", "inspect", image])[0] == 0 for image in sorted(images))


def _lost_access(ask: Question, names: Sequence[str]) -> list[str]:
    lost = []
    for name in names:
        rc, out, err = ask.run(["docker", "exec", name, "nvidia-smi", "-L"])
        if rc not in (0, 14) and "NVML" in out + err:
            lost.append(name)
    return lost


def _token_state(ask: Question) -> str:
    token = ask.token or ask.environ.get("HF_TOKEN")
    if not token:
        return "none"
    session = Session("tensorless-doctor", 10, ask.environ)
    try:
        if not token_may_travel(ask.endpoint):
            return "the endpoint is neither https nor this machine"
        answer = session.request(
            "GET", f"{ask.endpoint.rstrip('/')}/api/whoami-v2", {"Authorization": f"Bearer {token}"}
        )
        status = answer.status
    except (TransportError, Refusal) as exc:
        return str(exc)
    finally:
        session.close()
    return {200: "accepted", 401: "refused", 403: "refused"}.get(status, f"the Hub answered {status}")

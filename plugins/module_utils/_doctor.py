# SPDX-License-Identifier: Apache-2.0
"""The doctor's report: the six documented checks, then this collection's own, from what was observed. Pure.

Private to the collection: may change at any time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Optional

from ansible_collections.tensorless.fleet.plugins.module_utils import _cards as cards
from ansible_collections.tensorless.fleet.plugins.module_utils._plan_text import gigabytes, printable
from ansible_collections.tensorless.fleet.plugins.module_utils._recipe import Recipe

SCHEMA = 1
PASS, WARN, FAIL = "PASS", "WARN", "FAIL"
DOCUMENTED, HOST = "documented", "host"
CDI_FILES = ("/etc/cdi/nvidia.yaml", "/var/run/cdi/nvidia.yaml")
CTK_PODMAN = "nvidia-ctk cdi generate --output=/etc/cdi/nvidia.yaml"
CTK_DOCKER = "nvidia-ctk runtime configure --runtime=docker && sudo systemctl restart docker"
# systemd refuses to start a service that was started several times within a minute, until its count is cleared.
CLEAR_DOCKER = "systemctl reset-failed docker.service 2>/dev/null"


@dataclass(frozen=True)
class Check:
    """One line. `fix` is for people; `fix_command`, where one exists, runs on the host as root and turns it to PASS."""

    id: str
    level: str
    text: str
    fix: Optional[str] = None
    fix_command: Optional[str] = None
    block: str = DOCUMENTED


@dataclass
class Seen:
    """What the documented checks look at."""

    gpu_facts: Mapping[str, Any] = field(default_factory=dict)
    runtimes: Mapping[str, str] = field(default_factory=dict)  # installed: name -> path
    cdi_files: Sequence[str] = ()  # of CDI_FILES, those that exist
    docker_problem: Optional[str] = None  # `docker info` failed with this
    docker_runtimes: Sequence[str] = ()
    docker_hook: bool = False
    toolkit: bool = False
    cache: str = ""
    free_bytes: Optional[int] = None
    cached: Mapping[str, str] = field(default_factory=dict)  # sha256 -> yes | partial | no
    package_manager: str = "apt-get"


def documented(seen: Seen, recipes: Sequence[Recipe], runtime: str = "auto") -> list[Check]:
    """The documented checks in the documented order and words."""
    gpus = cards.from_facts(seen.gpu_facts)
    fitting = [recipe for recipe in recipes if any(cards.matches(recipe, gpu) for gpu in gpus.cards)]
    oldest = _lowest(recipes)
    checks = [_driver(gpus, oldest)]
    if not gpus.problem and gpus.cards:
        checks += _gpu_lines(gpus, recipes)
        checks += _driver_version(gpus, fitting)
    chosen, line = _runtime(seen, runtime)
    checks.append(line)
    if chosen is not None:
        checks.append(_support(seen, chosen))
    checks.append(_disk(seen, fitting or recipes))
    return checks


def _lowest(recipes: Sequence[Recipe]) -> str:
    versions = [str(recipe.data["card"]["min_driver"]) for recipe in recipes]
    return min(versions, key=cards.version_key, default="525.60.13")


def _driver(gpus: cards.Gpus, oldest: str) -> Check:
    if gpus.problem == "nvidia-smi not found":
        return Check(
            "nvidia_driver",
            FAIL,
            "nvidia-smi not found: no NVIDIA driver is installed",
            f"install the NVIDIA driver, {oldest} or newer, and reboot",
        )
    if gpus.problem or not gpus.cards:
        return Check(
            "nvidia_driver",
            FAIL,
            gpus.problem or "nvidia-smi lists no GPU",
            "the driver is not loaded: reboot, then run nvidia-smi (R580 is the last driver branch for Pascal cards)",
        )
    count = len(gpus.cards)
    return Check("nvidia_driver", PASS, f"nvidia-smi lists {count} GPU{'' if count == 1 else 's'}")


def _gpu_lines(gpus: cards.Gpus, recipes: Sequence[Recipe]) -> list[Check]:
    lines: list[Check] = []
    for gpu in gpus.cards:
        memory = "unknown memory" if gpu.memory_mib is None else f"{gpu.memory_mib} MiB"
        text = (
            f"GPU {gpu.index}: {printable(gpu.name)}, compute {gpu.compute_capability or 'unknown'}, {memory}, "
            f"driver {gpu.driver or 'unknown'}"
        )
        fits = [recipe.label for recipe in recipes if cards.matches(recipe, gpu)]
        if fits:
            lines.append(Check("gpu", PASS, f"{text}; fits {', '.join(fits)}"))
        else:
            lines.append(Check("gpu", WARN, f"{text}; fits no recipe"))
    if not any(line.level == PASS for line in lines):
        needs = sorted({cards.needs(recipe) for recipe in recipes}) or ["a recipe: there is none"]
        wanted = "; or ".join(needs)
        lines.append(Check("gpu", FAIL, f"no GPU fits a recipe, which needs {wanted}", f"install a card with {wanted}"))
    return lines


def _driver_version(gpus: cards.Gpus, fitting: Sequence[Recipe]) -> list[Check]:
    if not fitting:
        return []
    # Of equal needs the first one is named, so a later recipe has to need strictly more.
    hardest = fitting[0]
    for recipe in fitting[1:]:
        if cards.compare_versions(recipe.data["card"]["min_driver"], hardest.data["card"]["min_driver"]) > 0:
            hardest = recipe
    wanted = hardest.data["card"]["min_driver"]
    driver = next(gpu.driver for gpu in gpus.cards if any(cards.matches(recipe, gpu) for recipe in fitting))
    problem = cards.driver_problem(hardest, driver)
    if problem is None:
        return [Check("driver_version", PASS, f"driver {driver} is at least {wanted} (needed by {hardest.label})")]
    return [Check("driver_version", FAIL, problem, f"install a driver: {cards.driver_range(hardest)}, and reboot")]


def _runtime(seen: Seen, wanted: str) -> tuple[Optional[str], Check]:
    names = [name for name in ("podman", "docker") if name in seen.runtimes and wanted in ("auto", name)]
    if names:
        name = names[0]
        return name, Check("container_runtime", PASS, f"container runtime: {name} ({seen.runtimes[name]})")
    install = "sudo apt install podman (Debian, Ubuntu) or sudo dnf install podman (Fedora, RHEL)"
    command = f"{seen.package_manager} install -y podman"
    if wanted == "auto":
        text, fix = "neither podman nor docker is installed", f"{install}, or install docker"
    else:
        text, fix = f"{wanted} is not installed", install if wanted == "podman" else "install docker"
        command = command if wanted == "podman" else f"{seen.package_manager} install -y docker.io"
    return None, Check("container_runtime", FAIL, text, fix, command)


def _support(seen: Seen, runtime: str) -> Check:
    check = "nvidia_container_support"
    first, second = CDI_FILES
    found = next((path for path in CDI_FILES if path in seen.cdi_files), None)
    if runtime == "podman":
        if found:
            return Check(check, PASS, f"NVIDIA CDI spec for podman: {found}")
        command = f"mkdir -p /etc/cdi && {CTK_PODMAN}" if seen.toolkit else None
        fix = f"install nvidia-container-toolkit, then: sudo {CTK_PODMAN}"
        return Check(check, FAIL, f"no NVIDIA CDI spec for podman in {first} or {second}", fix, command)
    if seen.docker_problem is not None:
        return Check(
            check,
            FAIL,
            f"docker info failed: {printable(seen.docker_problem)}",
            "start docker (sudo systemctl start docker) and make sure that your user may use it (the docker group)",
            f"{CLEAR_DOCKER}; systemctl start docker",
        )
    if "nvidia" in seen.docker_runtimes:
        return Check(check, PASS, "NVIDIA support for docker: the nvidia runtime")
    if found:
        return Check(check, PASS, f"NVIDIA support for docker: the CDI spec {found}")
    if seen.docker_hook:
        return Check(check, PASS, "NVIDIA support for docker: the container toolkit's hook")
    command = f"{CLEAR_DOCKER}; {CTK_DOCKER.replace('sudo ', '')}" if seen.toolkit else None
    fix = f"install nvidia-container-toolkit, then: sudo {CTK_DOCKER}"
    return Check(check, FAIL, "docker has no nvidia runtime, no CDI spec and no NVIDIA hook", fix, command)


def _disk(seen: Seen, recipes: Sequence[Recipe]) -> Check:
    check, where = "disk_space", f"model cache {seen.cache}"
    if seen.free_bytes is None:
        return Check(
            check, WARN, f"{where}: its free space could not be read", "check that the directory can be reached"
        )
    free = f"{gigabytes(seen.free_bytes)} free"
    missing = [r.data["model"]["size_bytes"] for r in recipes if seen.cached.get(r.data["model"]["sha256"]) != "yes"]
    need = max(missing, default=0)
    if need == 0:
        return Check(check, PASS, f"{where}: {free}, every model is there")
    text = f"{where}: {free}, the model needs {gigabytes(need)}"
    if seen.free_bytes >= need:
        return Check(check, PASS, text)
    return Check(check, FAIL, text, "free some space, or move the cache to a larger disk (--cache, HF_HUB_CACHE)")


def failed(checks: Sequence[Check], block: str) -> int:
    return sum(check.level == FAIL and check.block == block for check in checks)


def summary(count: int) -> str:
    if count == 0:
        return "all checks passed."
    return f"{count} check{'' if count == 1 else 's'} failed."


def lines(checks: Sequence[Check]) -> list[str]:
    """The checks as people read them."""
    out: list[str] = []
    for check in checks:
        out.append(f"{check.level:<4}  {check.text}")
        if check.level == FAIL and check.fix:
            out.append(f"      fix: {check.fix}")
    return out


def report(checks: Sequence[Check]) -> dict[str, Any]:
    """The report for programs. Its schema has a number of its own."""
    documented_failed, host_failed = failed(checks, DOCUMENTED), failed(checks, HOST)
    return {
        "schema": SCHEMA,
        "checks": [asdict(check) for check in checks],
        "failed_checks": documented_failed,
        "summary": summary(documented_failed),
        "host_failed_checks": host_failed,
        "host_summary": f"further checks: {summary(host_failed)}",
        "exit_code": 1 if documented_failed + host_failed else 0,
        "text": text(checks),
    }


def text(checks: Sequence[Check]) -> str:
    """The whole report: the documented block with its last line, then ours with its own."""
    first = [check for check in checks if check.block == DOCUMENTED]
    second = [check for check in checks if check.block == HOST]
    out = [*lines(first), "", summary(failed(checks, DOCUMENTED))]
    if second:
        out += ["", "Further checks of this host:", *lines(second), ""]
        out += [f"further checks: {summary(failed(checks, HOST))}"]
    return "\n".join(out) + "\n"

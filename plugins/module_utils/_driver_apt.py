# SPDX-License-Identifier: Apache-2.0
"""The driver from apt: the whole transaction is simulated first, and refused when any package of it is out of range.

A metapackage's name is no ceiling (cuda-drivers-580 has pulled R590 in), a hold alone is none either, and a package of
one branch may be a transition to another. So versions decide, over everything that would land.
Private to the collection: may change at any time.
"""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Optional

from ansible_collections.tensorless.fleet.plugins.module_utils import _driver
from ansible_collections.tensorless.fleet.plugins.module_utils._gpu_bus import branch as branch_of
from ansible_collections.tensorless.fleet.plugins.module_utils._host import Run
from ansible_collections.tensorless.fleet.plugins.module_utils._refusal import Refusal

# Of several pins for one version apt takes the first that it reads, in the order of the files' names.
PREFERENCES = "/etc/apt/preferences.d/00-tensorless-nvidia"
PARTS = "/etc/apt/preferences.d"
UPGRADES = "/etc/apt/apt.conf.d/51tensorless-nvidia"
BLACKLIST = (
    *("nvidia-", "libnvidia-", "libcuda", "cuda-drivers", "firmware-nvidia", "xserver-xorg-video-nvidia"),
    *("libegl-nvidia", "libgl1-nvidia", "libgles-nvidia", "libglx-nvidia", "libnvcuvid", "libnvoptix", "libxnvctrl"),
)
_NAMES = "*nvidia* cuda-drivers* libcuda* libnv* libxnvctrl*"
_OPEN_NAMES = "nvidia-open* nvidia-kernel-open* nvidia-*-open nvidia-*-open-* linux-modules-nvidia-*open*"
_INST = re.compile(r"^Inst (\S+?)(?::\w+)? (?:\[(\S+)\] )?\((\S+)", re.MULTILINE)
_REMOVE = re.compile(r"^Remv (\S+?)(?::\w+)? ", re.MULTILINE)


def preferences(branch: int, priority: int, old_cards: bool) -> str:
    """Pins: the chosen branch before others, nothing above the ceiling, and no open module where it drives no card.

    The patterns also match the container toolkit's names; its versions are 1.x, which no pin here speaks of.
    """
    text = f"""# Written by tensorless.fleet: R{_driver.NEWEST} is the last driver branch that supports Pascal cards.
Package: {_NAMES}
Pin: version /^([0-9]+:)?{branch}\\./
Pin-Priority: {priority}

Package: {_NAMES}
Pin: version /^([0-9]+:)?(58[1-9]|59[0-9]|[6-9][0-9][0-9]|1[0-9]{{3}})\\./
Pin-Priority: -1
"""
    if old_cards:
        text += f"\nPackage: {_OPEN_NAMES}\nPin: version /^([0-9]+:)?[0-9]{{3}}\\./\nPin-Priority: -1\n"
    return text


def upgrades_text() -> str:
    """Unattended upgrades leave the driver alone, its libraries too: half a new driver stops every program."""
    names = "".join(f'    "{name}";\n' for name in BLACKLIST)
    return f"// Written by tensorless.fleet\nUnattended-Upgrade::Package-Blacklist {{\n{names}}};\n"


@dataclass(frozen=True)
class Step:
    """A package that would be installed: from which version (None: new) to which."""

    name: str
    old: Optional[str]
    new: str


@dataclass
class Transaction:
    """What apt said that it would do."""

    install: list[Step] = field(default_factory=list)
    remove: list[str] = field(default_factory=list)

    @property
    def driver(self) -> list[Step]:
        return [step for step in self.install if _driver.is_driver_package(step.name)]


def parse_simulation(text: str) -> Transaction:
    found = Transaction([Step(name, old or None, new) for name, old, new in _INST.findall(text)])
    found.remove = _REMOVE.findall(text)
    return found


def transaction_problems(steps: Sequence[Step], branch: int, drift: bool, old_cards: bool) -> list[str]:
    """Why a transaction must not run; looks at the driver's packages only."""
    found: list[str] = []
    for step in steps:
        if not _driver.is_driver_package(step.name):
            continue
        lands = _driver.package_branch(step.name, step.new)
        if old_cards and _driver.is_open_package(step.name):
            found.append(f"{step.name} {step.new} is of the open kernel module, which does not drive Pascal cards")
        if lands is None:
            continue  # a helper with a version of its own, such as nvidia-prime
        if _driver.outside(step.name, step.new):
            found.append(f"{step.name} would land at {step.new}, outside R{_driver.OLDEST} to R{_driver.NEWEST}")
        elif lands != branch and not drift and not _driver.is_tool(step.name):
            found.append(f"{step.name} would land at {step.new}, which is not of branch {branch}")
    return found


@dataclass
class Apt:
    """apt on one host."""

    run: Run

    def installed(self) -> dict[str, str]:
        """The driver's packages that are installed, with their versions."""
        return {
            name: version
            for state, name, version in self._packages()
            if state == "installed" and _driver.package_branch(name, version)
        }

    def unfinished(self) -> dict[str, str]:
        """The driver's packages that dpkg began to install and did not finish, with their state."""
        unfinished = ("half-installed", "half-configured", "unpacked")
        return {name: state for state, name, _version in self._packages() if state in unfinished}

    def _packages(self) -> list[tuple[str, str, str]]:
        """State, name and version of the driver's packages that dpkg knows; the version may be empty."""
        _rc, out, _err = self.run(["dpkg-query", "-W", "-f", "${db:Status-Status} ${Package} ${Version}\\n"])
        rows = [(*line.split(" ", 2), "", "")[:3] for line in out.splitlines()]
        return [(state, name, version.strip()) for state, name, version in rows if _driver.is_driver_package(name)]

    def held(self) -> set[str]:
        _rc, out, _err = self.run(["apt-mark", "showhold"])
        return set(out.split())

    def available(self, names: Sequence[str]) -> dict[str, list[str]]:
        """Versions that the repositories have, as apt lists them, newest first."""
        _rc, out, _err = self.run(["apt-cache", "madison", *names])
        found: dict[str, list[str]] = {}
        for line in out.splitlines():
            parts = [part.strip() for part in line.split("|")]
            if len(parts) == 3 and parts[1] not in found.setdefault(parts[0], []):
                found[parts[0]].append(parts[1])
        return found

    def choose(self, wanted: Optional[int]) -> tuple[int, list[str]]:
        """The branch and the packages for a machine without a display: kernel module, libraries, nvidia-smi.

        wanted None: the newest allowed branch that the repositories have.
        """
        branches = [wanted] if wanted is not None else list(range(_driver.NEWEST, _driver.OLDEST - 1, -1))
        names = ["nvidia-driver-cuda", "nvidia-kernel-dkms", "nvidia-smi", "libcuda1"]
        for number in branches:
            names += [f"nvidia-driver-pinning-{number}"]
            names += [
                f"nvidia-{part}-{number}{tail}" for part in ("headless", "dkms", "utils") for tail in ("-server", "")
            ]
        have = self.available(names)
        for number in branches:
            for tail in ("-server", ""):
                for module in ("headless", "dkms"):
                    parts = [f"nvidia-{module}-{number}{tail}", f"nvidia-utils-{number}{tail}"]
                    if all(any(branch_of(v) == number for v in have.get(part, [])) for part in parts):
                        return number, parts
            for parts in (
                ["nvidia-driver-cuda", "nvidia-kernel-dkms"],
                ["nvidia-smi", "nvidia-kernel-dkms", "libcuda1"],
            ):
                exact = [next((v for v in have.get(part, []) if branch_of(v) == number), None) for part in parts]
                if all(exact):
                    pinning = f"nvidia-driver-pinning-{number}"
                    first = [pinning] if pinning in have else []
                    return number, [*first, *(f"{part}={version}" for part, version in zip(parts, exact))]
        seen = sorted({number for versions in have.values() for v in versions for number in [branch_of(v)] if number})
        raise Refusal(
            f"the repositories of this host have no driver of {'R' + str(wanted) if wanted else 'R525 to R580'}"
            + (f" (they have R{', R'.join(map(str, seen))})" if seen else "")
            + ". Name one that has in nvidia_driver_repository_url (NVIDIA's for Debian 12 and Ubuntu have R580; "
            "Debian's own archive has R535 or R550 in non-free), or choose another nvidia_driver_branch"
        )

    def lower(self, names: Sequence[str], branch: int) -> list[str]:
        """By name; the pins choose. Metapackages that have no version of an allowed branch leave."""
        gone = re.compile(r"(^cuda-drivers(-\d+)?$|-(59\d|[6-9]\d\d)(-|$))")
        return [f"{name}-" if gone.search(name) else name for name in names]

    def simulate(self, packages: Sequence[str], pins: str, downgrade: bool) -> Transaction:
        """What an installation would do with these pins; nothing on the host changes."""
        with tempfile.TemporaryDirectory(prefix="tensorless-") as folder:
            parts = os.path.join(folder, "preferences.d")
            if os.path.isdir(PARTS):
                shutil.copytree(PARTS, parts)
            else:
                os.mkdir(parts)
            with open(os.path.join(parts, os.path.basename(PREFERENCES)), "w", encoding="utf-8") as handle:
                handle.write(pins)
            rc, out, err = self.run(["apt-get", "-s", *self._options(parts, downgrade), "install", *packages])
        if rc != 0:
            words = " ".join((err.strip() or out.strip())[-900:].split())
            raise Refusal(f"apt finds no way to install {' '.join(packages)}: {words}")
        return parse_simulation(out)

    def _options(self, parts: str, downgrade: bool) -> list[str]:
        # The holds of the driver's parts are this role's own; with them apt finds no way to move the parts together.
        options = ["-q", "-y", "--no-install-recommends", "--ignore-hold", "--allow-change-held-packages"]
        if downgrade:
            options.append("--allow-downgrades")
        return [*options, "-o", f"Dir::Etc::PreferencesParts={parts}", "-o", "DPkg::Lock::Timeout=300"]

    def install(self, packages: Sequence[str], downgrade: bool, pins: str) -> None:
        """The transaction that was simulated, under the pins of the simulation."""
        with tempfile.TemporaryDirectory(prefix="tensorless-") as folder:
            parts = os.path.join(folder, "preferences.d")
            shutil.copytree(PARTS, parts)
            with open(os.path.join(parts, os.path.basename(PREFERENCES)), "w", encoding="utf-8") as handle:
                handle.write(pins)
            os.chmod(folder, 0o755)
            keep = ["-o", "Dpkg::Options::=--force-confdef", "-o", "Dpkg::Options::=--force-confold"]
            argv = ["apt-get", *self._options(parts, downgrade), *keep, "install", *packages]
            rc, out, err = self.run(["env", "DEBIAN_FRONTEND=noninteractive", *argv])
        if rc != 0:
            words = " ".join((err.strip() or out.strip())[-900:].split())
            raise Refusal(f"installing the driver failed with status {rc}: {words}. Run it again once that is mended")

    def is_older(self, new: str, old: str) -> bool:
        return self.run(["dpkg", "--compare-versions", new, "lt", old])[0] == 0

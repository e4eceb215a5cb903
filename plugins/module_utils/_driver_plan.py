# SPDX-License-Identifier: Apache-2.0
"""Brings a host to a driver that serves, and keeps it there: observes, plans changes, applies them.

Private to the collection: may change at any time.
"""

from __future__ import annotations

import platform
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Optional, Protocol

from ansible_collections.tensorless.fleet.plugins.module_utils import _driver, _driver_apt, _gpu_bus
from ansible_collections.tensorless.fleet.plugins.module_utils._cdi_apply import Change
from ansible_collections.tensorless.fleet.plugins.module_utils._driver import package_branch
from ansible_collections.tensorless.fleet.plugins.module_utils._driver_apt import Step, Transaction
from ansible_collections.tensorless.fleet.plugins.module_utils._host import Files, Run
from ansible_collections.tensorless.fleet.plugins.module_utils._refusal import Refusal

NOUVEAU = "/etc/modprobe.d/tensorless-nouveau.conf"
NOUVEAU_TEXT = "# Written by tensorless.fleet\nblacklist nouveau\noptions nouveau modeset=0\n"
_LIBRARY = re.compile(r"^(?:libnvidia-ml1?|libcuda1|libnvidia-compute-.*|nvidia-driver-cuda-libs)$")
WAY_BACK = "set nvidia_driver_allow_downgrade to true to let the role go back to R580"


def _release(version: str) -> str:
    """580.105.08 of 3:580.105.08-1.el9."""
    return re.sub(r"^\d+:|-[^-]*$", "", version)


def _above(installed: Mapping[str, str]) -> dict[str, str]:
    """The packages of a branch above the newest allowed one."""
    return {
        name: version for name, version in installed.items() if (package_branch(name, version) or 0) > _driver.NEWEST
    }


class Manager(Protocol):
    """A package manager, as far as a driver needs one."""

    def installed(self) -> dict[str, str]: ...
    def unfinished(self) -> dict[str, str]: ...
    def held(self) -> set[str]: ...

    def choose(self, wanted: Optional[int]) -> tuple[int, list[str]]:
        """The branch to install, and its packages."""
        raise NotImplementedError

    def lower(self, names: Sequence[str], branch: int) -> list[str]:
        """How to ask for these installed packages at an older branch."""
        raise NotImplementedError

    def simulate(self, packages: Sequence[str], pins: str, downgrade: bool) -> Transaction: ...
    def install(self, packages: Sequence[str], downgrade: bool, pins: str) -> None: ...
    def is_older(self, new: str, old: str) -> bool: ...


@dataclass
class Wish:
    """What the user asks for."""

    branch: Optional[int] = None  # None: the newest allowed one that the repositories have
    packages: Sequence[str] = ()
    allow_downgrade: bool = False
    allow_branch_drift: bool = False
    upgrade: bool = False
    headers: bool = True
    secure_boot_ready: bool = False


@dataclass
class Driver:
    """The work on one host."""

    run: Run
    files: Files
    manager: Manager
    facts: Mapping[str, Any]
    wish: Wish
    write: Callable[[str, str], None]
    branch: int = _driver.NEWEST
    packages: list[str] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def old_cards(self) -> bool:
        return _driver.old_cards(self.facts) or not self.facts["pci_cards"]

    def plan(self) -> list[Change]:
        installed = self.manager.installed()
        changes = self._packages(installed) if self._needs_packages(installed) else []
        if not changes:
            # What is installed counts before what is loaded: between an upgrade and its reboot they differ.
            self.branch = self._branch_of(installed) or self.facts["branch"] or self.branch
        # Guards come first: an interruption between the two leaves a host that cannot drift.
        return [*self._guards(), *changes, *self._holds(installed)]

    def _branch_of(self, installed: Mapping[str, str]) -> Optional[int]:
        numbers = [package_branch(name, version) for name, version in installed.items() if not _driver.is_tool(name)]
        return max((number for number in numbers if number), default=None)

    def _needs_packages(self, installed: Mapping[str, str]) -> bool:
        """A driver that serves is left alone, however it was installed; so is one that only waits for a reboot."""
        if self.wish.upgrade:
            return True
        if self.facts["driver_ok"] and (self.wish.branch is None or self.facts["branch"] == self.wish.branch):
            return False
        if not installed:
            return True
        right = all(
            not _driver.outside(name, version) and not (self.old_cards and _driver.is_open_package(name))
            for name, version in installed.items()
        )
        wanted = self.wish.branch is None or self._branch_of(installed) == self.wish.branch
        # A module of one version beside libraries of another stays that way however often the host is rebooted.
        modules = {_release(installed[name]) for name in installed if re.search(r"dkms|modules|kmod", name)}
        libraries = {_release(installed[name]) for name in installed if _LIBRARY.match(name)}
        prebuilt = any(name.startswith("linux-modules-nvidia") for name in installed)
        same = prebuilt or not libraries or bool(modules & libraries)
        return not (right and wanted and modules and same)

    def _packages(self, installed: Mapping[str, str]) -> list[Change]:
        high = _above(installed)
        if high and not self.wish.allow_downgrade:
            name, version = next(iter(sorted(high.items())))
            raise Refusal(
                f"{len(high)} packages of a driver above R{_driver.NEWEST} are installed (such as {name} {version}), "
                f"and it does not drive Pascal cards: {WAY_BACK}"
            )
        for name, state in sorted(self.manager.unfinished().items()):
            raise Refusal(
                f"dpkg has not finished {name} (it is {state}): run `dpkg --configure -a` and mend what it names, then "
                "run this again. Why a module does not build stands in /var/lib/dkms/nvidia*/*/build/make.log"
            )
        self._secure_boot()
        if self.wish.packages:
            self.packages = list(self.wish.packages)
            self.branch = self.wish.branch or _driver.NEWEST
            self._names()
        else:
            self.branch, self.packages = self.manager.choose(self.wish.branch)
        if self.wish.branch is None and self.branch != _driver.NEWEST:
            self.notes.append(
                f"the repositories have no R{_driver.NEWEST}; R{self.branch} is the newest allowed one there"
            )
        self.packages += self._headers()
        if self._open_installed(installed):
            self.notes.append("packages of the open kernel module are replaced")
        downgrade = self.wish.allow_downgrade
        pins = _driver_apt.preferences(self.branch, 1001 if downgrade else 600, self.old_cards)
        transaction = self.manager.simulate([*self.packages, *self._back(installed)], pins, downgrade)
        self.steps = transaction.driver
        problems = _driver_apt.transaction_problems(
            self.steps, self.branch, self.wish.allow_branch_drift, self.old_cards
        )
        if problems:
            more = f" (and {len(problems) - 3} more)" if len(problems) > 3 else ""
            raise Refusal(
                f"the driver was not installed, for its transaction is out of range: {'; '.join(problems[:3])}{more}"
            )
        strangers = [name for name in transaction.remove if not _driver.is_driver_package(name)]
        if strangers:
            raise Refusal(
                f"the driver was not installed, for {', '.join(strangers[:4])} would have to be removed, which is "
                "no part of the driver: remove that by hand first, if it may go"
            )
        left = [
            name for name in high if name not in {step.name for step in self.steps} and name not in transaction.remove
        ]
        if left:
            raise Refusal(
                f"apt would leave {', '.join(sorted(left)[:4])} above R{_driver.NEWEST}: remove them by hand first"
            )
        lower = [step for step in self.steps if step.old and self.manager.is_older(step.new, step.old)]
        if lower and not downgrade:
            raise Refusal(f"{lower[0].name} would go back from {lower[0].old} to {lower[0].new}: {WAY_BACK}")
        if not self.steps:
            return []
        shown = ", ".join(f"{step.name} {step.new}" for step in self.steps)
        words = f"install the driver {self._version()}: {shown}"
        names = [*self.packages, *self._back(installed)]
        return [Change(words, lambda: self.manager.install(names, downgrade, pins))]

    def _version(self) -> str:
        return next((step.new for step in self.steps if _gpu_bus.branch(step.new)), f"R{self.branch}")

    def _back(self, installed: Mapping[str, str]) -> list[str]:
        """On the way back every installed part is named, or apt would keep the high ones that nothing asks for."""
        if not self.wish.allow_downgrade:
            return []
        named = {package.partition("=")[0] for package in self.packages}
        keep = [name for name in _above(installed) if name not in named and not _driver.is_open_package(name)]
        return self.manager.lower(sorted(keep), self.branch)

    def _open_installed(self, installed: Mapping[str, str]) -> bool:
        return self.old_cards and any(_driver.is_open_package(name) for name in installed)

    def _names(self) -> None:
        for package in self.packages:
            name = package.partition("=")[0]
            problem = _driver.name_problem(name, self.old_cards)
            if problem:
                raise Refusal(f"{name} is refused: {problem}")

    def _secure_boot(self) -> None:
        if _gpu_bus.secure_boot(self.files) and not self.wish.secure_boot_ready:
            raise Refusal(
                "Secure Boot is on, and a driver module built here is not signed for it: the host would come back "
                "without a card. Enrol a key (sudo mokutil --import /var/lib/dkms/mok.pub, reboot, confirm at the "
                "console) and set nvidia_driver_secure_boot_ready to true, or turn Secure Boot off"
            )

    def _headers(self) -> list[str]:
        release = platform.release()
        if not self.wish.headers or self.files.exists(f"/lib/modules/{release}/build"):
            return []
        name = f"linux-headers-{release}"
        if isinstance(self.manager, _driver_apt.Apt) and name in self.manager.available([name]):
            return [name]
        raise Refusal(
            f"there are no headers for the running kernel {release} (package {name}), so the driver's module cannot "
            "be built: update the kernel, reboot and run again, or set nvidia_driver_headers to false where modules "
            "are prebuilt"
        )

    # keeping it there

    def _guards(self) -> list[Change]:
        changes: list[Change] = []
        if isinstance(self.manager, _driver_apt.Apt):
            texts = {
                _driver_apt.PREFERENCES: _driver_apt.preferences(self.branch, 600, self.old_cards),
                _driver_apt.UPGRADES: _driver_apt.upgrades_text(),
            }
            for path, text in texts.items():
                if self.files.read(path) != text:
                    changes.append(Change(f"write {path}", partial(self.write, path, text)))
        if self.files.read(NOUVEAU) != NOUVEAU_TEXT:
            changes.append(Change(f"write {NOUVEAU}", partial(self.write, NOUVEAU, NOUVEAU_TEXT)))
            if self.facts["kernel_module"] == "nouveau":
                changes.append(Change("rebuild the initramfs without nouveau", self._initramfs))
        return changes

    def _initramfs(self) -> None:
        for argv in (["update-initramfs", "-u"], ["dracut", "--force"]):
            rc, _out, err = self.run(argv)
            if rc == 0:
                return
            if rc != 127:
                raise Refusal(f"`{' '.join(argv)}` failed: {err.strip()[-300:]}")

    def _holds(self, installed: Mapping[str, str]) -> list[Change]:
        if not isinstance(self.manager, _driver_apt.Apt):
            return []
        later = {step.name for step in self.steps}
        wanted = {name for name in {*installed, *later} if not _driver.follows_kernel(name)}
        missing = sorted(wanted - self.manager.held())
        if not missing:
            return []
        return [Change(f"hold {len(missing)} packages of the driver", self._hold)]

    def _hold(self) -> None:
        """Holds what is installed now; dozens of names that are not there stay unmarked."""
        here = {name for name in self.manager.installed() if not _driver.follows_kernel(name)}
        names = sorted(here - self.manager.held())
        if names:
            rc, _out, err = self.run(["apt-mark", "hold", *names])
            if rc != 0:
                raise Refusal(f"apt-mark hold failed: {err.strip()[-300:]}")

    def check_installed(self) -> None:
        """The packages after the transaction: what landed, whatever was asked for."""
        for name, version in self.manager.installed().items():
            if _driver.outside(name, version):
                raise Refusal(f"{name} landed at {version}, outside R{_driver.OLDEST} to R{_driver.NEWEST}")
            if self.old_cards and _driver.is_open_package(name):
                raise Refusal(
                    f"{name} {version} of the open kernel module is installed, which does not drive Pascal cards"
                )
        release = _gpu_bus.installed_version(self.files)
        problems = _driver.dkms_problems(self.run, _driver.kernels(self.files), platform.release(), release)
        if problems:
            raise Refusal(
                f"the driver's kernel module was not built: {'; '.join(problems)}. Do not reboot before it is"
            )

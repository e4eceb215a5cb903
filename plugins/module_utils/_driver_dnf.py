# SPDX-License-Identifier: Apache-2.0
"""The driver from dnf, under the same rules: the transaction is simulated first and judged by versions.

Private to the collection: may change at any time.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Optional

from ansible_collections.tensorless.fleet.plugins.module_utils import _driver
from ansible_collections.tensorless.fleet.plugins.module_utils._driver_apt import Step, Transaction
from ansible_collections.tensorless.fleet.plugins.module_utils._gpu_bus import branch as branch_of
from ansible_collections.tensorless.fleet.plugins.module_utils._host import Run
from ansible_collections.tensorless.fleet.plugins.module_utils._refusal import Refusal

# What a machine without a display needs; the package of the stream 580-dkms is still called latest-dkms.
PARTS = ("nvidia-driver-cuda", "kmod-nvidia-latest-dkms")
_ROW = re.compile(r"^ (\S+)\s+(?:x86_64|noarch|i686|amd64)\s+(\S+)\s+\S+\s+[\d.]+ *\w{1,3}\s*$", re.MULTILINE)
_SECTION = re.compile(r"^(Installing|Upgrading|Downgrading|Reinstalling|Removing)[^:]*:\s*$", re.MULTILINE)


def _numbers(version: str) -> list[int]:
    return [int(part) for part in re.findall(r"\d+", version, re.ASCII)]


def parse_transaction(text: str) -> Transaction:
    """The table that dnf prints before it asks."""
    found = Transaction()
    marks = [*_SECTION.finditer(text)]
    for mark, end in zip(marks, [*(m.start() for m in marks[1:]), len(text)]):
        for name, version in _ROW.findall(text[mark.end() : end]):
            if mark.group(1) == "Removing":
                found.remove.append(name)
            else:
                found.install.append(Step(name, None, version))
    return found


@dataclass
class Dnf:
    """dnf on one host."""

    run: Run

    def installed(self) -> dict[str, str]:
        _rc, out, _err = self.run(["rpm", "-qa", "--qf", "%{NAME} %{EPOCHNUM}:%{VERSION}-%{RELEASE}\\n"])
        rows = [line.split() for line in out.splitlines()]
        parts = [row for row in rows if len(row) == 2 and _driver.is_driver_package(row[0])]
        return {name: version for name, version in parts if _driver.package_branch(name, version)}

    def unfinished(self) -> dict[str, str]:
        return {}

    def held(self) -> set[str]:
        return set()

    def _available(self, names: Sequence[str]) -> dict[str, list[str]]:
        shape = "%{name} %{epoch}:%{version}-%{release}\n"
        _rc, out, _err = self.run(["dnf", "-q", "repoquery", "--showduplicates", "--qf", shape, *names])
        found: dict[str, list[str]] = {}
        for line in out.splitlines():
            parts = line.split()
            if len(parts) == 2:
                found.setdefault(parts[0], []).append(parts[1])
        # Newest first; dnf lists them in the order of their letters, in which 580.105 comes before 580.95.
        return {name: sorted(versions, key=_numbers, reverse=True) for name, versions in found.items()}

    def choose(self, wanted: Optional[int]) -> tuple[int, list[str]]:
        branches = [wanted] if wanted is not None else list(range(_driver.NEWEST, _driver.OLDEST - 1, -1))
        have = self._available(PARTS)
        for number in branches:
            exact = [next((v for v in have.get(part, []) if branch_of(v) == number), None) for part in PARTS]
            if all(exact):
                return number, [f"{part}-{version}" for part, version in zip(PARTS, exact)]
        raise Refusal(
            "the repositories of this host have no driver of the wanted branch. On EL 8 and 9 enable NVIDIA's stream "
            f"first (dnf module reset nvidia-driver; dnf module enable nvidia-driver:{_driver.NEWEST}-dkms), or name a "
            "repository in nvidia_driver_repository_url"
        )

    def lower(self, names: Sequence[str], branch: int) -> list[str]:
        """By version: dnf goes back with what is named, and with nothing that only depends on it."""
        have = self._available(names) if names else {}
        found = [(name, next((v for v in have.get(name, []) if branch_of(v) == branch), None)) for name in names]
        return [f"{name}-{version}" for name, version in found if version]

    def simulate(self, packages: Sequence[str], pins: str, downgrade: bool) -> Transaction:
        rc, out, err = self.run(["dnf", "--assumeno", *self._options(), "install", *packages])
        found = parse_transaction(out)
        had = self.installed()
        found.install = [Step(step.name, had.get(step.name), step.new) for step in found.install]
        if rc != 0 and not found.install and "Nothing to do" not in out:
            words = " ".join((err.strip() or out.strip())[-900:].split())
            raise Refusal(f"dnf finds no way to install {' '.join(packages)}: {words}")
        return found

    def install(self, packages: Sequence[str], downgrade: bool, pins: str) -> None:
        rc, out, err = self.run(["dnf", "-y", *self._options(), "install", *packages])
        if rc != 0:
            words = " ".join((err.strip() or out.strip())[-900:].split())
            raise Refusal(f"installing the driver failed with status {rc}: {words}")

    @staticmethod
    def _options() -> list[str]:
        """dnf has no pins: what must never land is excluded from each transaction of ours. The open module may go."""
        high = [
            f"{name}-{epoch}{digits}*"
            for name in ("*nvidia*", "cuda-drivers*")
            for epoch in ("", "3:")
            for digits in ("59", "6")
        ]
        never = ",".join(["*nvidia-open*", "*open-dkms*", *high])
        return ["--setopt=install_weak_deps=False", "--allowerasing", f"--exclude={never}"]

    def is_older(self, new: str, old: str) -> bool:
        pair = [text.partition(":")[2] or text for text in (new, old)]
        if not all(re.match(r"^[\w.+~^-]+$", text, re.ASCII) for text in pair):
            return (branch_of(new) or 0) < (branch_of(old) or 0)
        _rc, out, _err = self.run(["rpm", "--eval", "%{lua:print(rpm.vercmp('" + "','".join(pair) + "'))}"])
        return out.strip() == "-1"

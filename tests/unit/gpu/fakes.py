# SPDX-License-Identifier: Apache-2.0
"""A host as the product's readers see it, without a host: files by path, and an nvidia-smi that answers by field."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ansible_collections.tensorless.fleet.plugins.module_utils._gpu import read_gpus
from ansible_collections.tensorless.fleet.plugins.module_utils._host import Files

UUID = "GPU-11111111-2222-3333-4444-555555555555"
P100 = {
    "index": "0",
    "uuid": UUID,
    "name": "Tesla P100-PCIE-16GB",
    "pci.bus_id": "00000000:3B:00.0",
    "compute_cap": "6.0",
    "memory.total": "16384 MiB",
    "memory.used": "0 MiB",
    "memory.free": "16384 MiB",
    "driver_version": "580.178.04",
    "persistence_mode": "Enabled",
    "pcie.link.gen.current": "3",
    "pcie.link.gen.max": "3",
    "pcie.link.width.current": "16",
    "pcie.link.width.max": "16",
    "temperature.gpu": "34",
    "temperature.memory": "N/A",
    "clocks.sm": "405 MHz",
    "clocks.mem": "715 MHz",
    "clocks.max.sm": "1328 MHz",
    "clocks.max.mem": "715 MHz",
    "power.draw": "27.50 W",
    "power.limit": "250.00 W",
    "power.default_limit": "250.00 W",
    "clocks_throttle_reasons.active": "0x0000000000000001",
    "ecc.mode.current": "Enabled",
    "ecc.errors.corrected.volatile.total": "0",
    "ecc.errors.uncorrected.volatile.total": "0",
    "retired_pages.single_bit_ecc.count": "0",
    "retired_pages.double_bit.count": "0",
    "retired_pages.pending": "No",
    "mig.mode.current": "[N/A]",
    "utilization.gpu": "0 %",
    "pci.device_id": "0x15F810DE",
}
PROPRIETARY = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  {}  Tue Jun 23 08:38:17 UTC 2026\nGCC version:  gcc 14\n"
OPEN = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  {}  Release Build  (dvs-builder@host)\n"


class FakeFiles(Files):
    """Files by path; a value that starts with -> is a link."""

    def __init__(self, content: Mapping[str, str] | None = None) -> None:
        self.content = dict(content or {})

    def read(self, path: str) -> str | None:
        return self.content.get(path)

    def read_bytes(self, path: str) -> bytes | None:
        text = self.content.get(path)
        return None if text is None else text.encode("latin-1")

    def names(self, path: str) -> list[str]:
        prefix = path.rstrip("/") + "/"
        return sorted({name[len(prefix) :].split("/")[0] for name in self.content if name.startswith(prefix)})

    def exists(self, path: str) -> bool:
        return path in self.content or any(name.startswith(path.rstrip("/") + "/") for name in self.content)

    def target(self, path: str) -> str | None:
        text = self.content.get(path)
        return text[2:] if text and text.startswith("->") else (path if self.exists(path) else None)


def pci(
    address: str = "0000:3b:00.0", device: str = "0x15f8", driver: str | None = "nvidia", **more: str
) -> dict[str, str]:
    """A card on the bus. A P100 is class 0302."""
    base = f"/sys/bus/pci/devices/{address}"
    found = {f"{base}/vendor": "0x10de\n", f"{base}/device": device + "\n", f"{base}/class": "0x030200\n"}
    found |= {f"{base}/{name}": text for name, text in more.items()}
    if driver:
        found[f"{base}/driver"] = f"->/sys/bus/pci/drivers/{driver}"
    return found


def loaded(version: str = "580.178.04", shape: str = PROPRIETARY) -> dict[str, str]:
    return {"/proc/driver/nvidia/version": shape.format(version)}


class Smi:
    """nvidia-smi: rows by field, refused fields, an exit status, lines around the table. Counts its starts."""

    def __init__(
        self,
        rows: Sequence[Mapping[str, str]] = (P100,),
        rc: int = 0,
        text: str | None = None,
        refused: Sequence[str] = (),
        before: str = "",
        after: str = "",
        log: str = "",
        xml: str = "",
        raw: Callable[[Sequence[str]], str] | None = None,
    ) -> None:
        self.rows, self.rc, self.text, self.refused = rows, rc, text, refused
        self.before, self.after, self.log, self.xml, self.raw = before, after, log, xml, raw
        self.calls: list[list[str]] = []

    @property
    def starts(self) -> int:
        return len([call for call in self.calls if call[0].endswith("nvidia-smi")])

    def __call__(self, argv: Sequence[str]) -> tuple[int, str, str]:
        self.calls.append(list(argv))
        if argv[0] in ("journalctl", "dmesg"):
            return 0, self.log, ""
        if self.text is not None:
            return self.rc, self.text, ""
        if "-x" in argv:
            return 0, self.xml, ""
        if "--help-query-gpu" in argv:
            return 0, "".join(f'"{name}"\nwords\n\n' for name in P100 if name not in self.refused), ""
        fields = next(word for word in argv if word.startswith("--query-gpu=")).partition("=")[2].split(",")
        for name in fields:
            if name in self.refused:
                return 2, f'Field "{name}" is not a valid field to query.\n\n', ""
        if self.raw:
            return self.rc, self.raw(fields), ""
        plain = "nounits" in next(word for word in argv if word.startswith("--format="))
        lines = []
        for row in self.rows:
            cells = [row.get(name, "[N/A]") for name in fields]
            if plain:
                cells = [
                    cell.rsplit(" ", 1)[0] if cell.endswith((" MiB", " MHz", " W", " %")) else cell for cell in cells
                ]
            lines.append(", ".join(cells))
        return self.rc, self.before + "".join(f"{line}\n" for line in lines) + self.after, ""


def really(argv: Sequence[str]) -> tuple[int, str, str]:
    """Runs a program of the test."""
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout, done.stderr


def facts(smi: Smi, files: Mapping[str, str] | None = None, **options: Any) -> dict[str, Any]:
    content = {**pci(), **loaded()} if files is None else files
    return read_gpus(smi, "nvidia-smi", FakeFiles(content), **options)

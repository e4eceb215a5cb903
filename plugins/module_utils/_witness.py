# SPDX-License-Identifier: Apache-2.0
"""What the card and the host did while a number was taken. Private to the collection: it may change at any time.

The samples are taken by a process of its own, so that a slow nvidia-smi never stands between a token and its time
stamp. What cannot be read is null and named; a sample that is missing stays missing.
"""

from __future__ import annotations

import json
import os
import re
import select
import signal
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any, Optional

Run = Callable[[Sequence[str]], "tuple[int, str, str]"]

INTERVAL_S = 0.5
APPS_EVERY = 4  # every so many samples the card's processes are listed as well

# Name in the witness -> nvidia-smi's field. The old spelling of the throttle mask is the one that every driver
# from R525 to R580 understands.
CARD_FIELDS = {
    "sm_mhz": "clocks.sm",
    "mem_mhz": "clocks.mem",
    "power_w": "power.draw",
    "power_limit_w": "power.limit",
    "temperature_c": "temperature.gpu",
    "memory_temperature_c": "temperature.memory",
    "fan_percent": "fan.speed",
    "throttle_mask": "clocks_throttle_reasons.active",
    "memory_used_mib": "memory.used",
    "utilization_percent": "utilization.gpu",
    "pcie_gen": "pcie.link.gen.current",
    "pcie_gen_max": "pcie.link.gen.max",
    "pcie_width": "pcie.link.width.current",
    "pcie_width_max": "pcie.link.width.max",
}

THROTTLE_BITS = {
    0x2: "applications_clocks_setting",
    0x4: "sw_power_cap",
    0x8: "hw_slowdown",
    0x10: "sync_boost",
    0x20: "sw_thermal_slowdown",
    0x40: "hw_thermal_slowdown",
    0x80: "hw_power_brake_slowdown",
    0x100: "display_clock_setting",
}


def tolerant(run_command: Callable[..., Any]) -> Run:
    """A module's run_command as the readers here want it: a program that is not installed is an exit status."""

    def run(argv: Sequence[str]) -> tuple[int, str, str]:
        try:
            rc, out, err = run_command(list(argv), handle_exceptions=False)
        except OSError as fault:
            return 127, "", str(fault)
        return int(rc), str(out), str(err)

    return run


class CardReader:
    """Reads one card through nvidia-smi and remembers which fields this driver does not know."""

    def __init__(self, run: Run, uuid: Optional[str]) -> None:
        self.run = run
        self.uuid = uuid
        self.fields = dict(CARD_FIELDS)
        self.refused: list[str] = []

    def card(self) -> dict[str, Any]:
        """One reading, or {} where there is no card or no nvidia-smi."""
        if not self.uuid:
            return {}
        while self.fields:
            query = ",".join(self.fields.values())
            rc, out, err = self.run(
                ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader,nounits", "-i", self.uuid]
            )
            unknown = re.search(r'Field "([^"]+)" is not a valid field', out + err)
            if unknown:
                name = next((k for k, v in self.fields.items() if v == unknown.group(1)), None)
                if name is None:
                    return {}
                self.refused.append(name)
                del self.fields[name]
                continue
            return self._row(out) if rc == 0 else {}
        return {}

    def _row(self, out: str) -> dict[str, Any]:
        for line in reversed(out.strip().splitlines()):
            cells = [cell.strip() for cell in line.split(",")]
            if len(cells) == len(self.fields):
                return {name: cell_value(cell) for name, cell in zip(self.fields, cells)}
        return {}

    def processes(self) -> Optional[list[dict[str, Any]]]:
        """Who computes on the card; None where that cannot be told."""
        if not self.uuid:
            return None
        query = "--query-compute-apps=pid,process_name,used_memory"
        rc, out, _err = self.run(["nvidia-smi", query, "--format=csv,noheader,nounits", "-i", self.uuid])
        if rc != 0:
            return None
        found = []
        for line in out.splitlines():
            cells = [cell.strip() for cell in line.split(",")]
            if len(cells) >= 3 and cells[0].isdigit():
                name = ", ".join(cells[1:-1])  # a process name may hold a comma
                found.append({"pid": int(cells[0]), "name": name, "memory_mib": cell_value(cells[-1])})
        return found


def cell_value(cell: str) -> Any:
    """A number where it is one. `[N/A]`, `[Not Supported]` and the like are null, never 0."""
    if cell.startswith("[") or cell in ("", "N/A"):
        return None
    if cell.startswith("0x"):
        try:
            return int(cell, 16)
        except ValueError:
            return None
    try:
        value = float(cell)
    except ValueError:
        return cell
    return int(value) if value.is_integer() else value


def _text(path: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="replace") as handle:
            return handle.read()
    except OSError:
        return ""


def pressure(text: str) -> Optional[float]:
    """The ten-second average of `some` from a /proc/pressure file."""
    found = re.search(r"^some .*?avg10=([0-9.]+)", text, re.M)
    return float(found.group(1)) if found else None


def read_host(proc: str = "/proc", sys: str = "/sys") -> dict[str, Any]:
    """Load, pressure, free memory and the processor's clock."""
    load = _text(f"{proc}/loadavg").split()
    free = re.search(r"^MemAvailable:\s+(\d+)", _text(f"{proc}/meminfo"), re.M)
    clocks = [float(m) for m in re.findall(r"^cpu MHz\s*:\s*([0-9.]+)", _text(f"{proc}/cpuinfo"), re.M)]
    if not clocks:
        one = _text(f"{sys}/devices/system/cpu/cpu0/cpufreq/scaling_cur_freq").strip()
        clocks = [float(one) / 1000.0] if one.isdigit() else []
    return {
        "load1": float(load[0]) if load else None,
        "io_pressure": pressure(_text(f"{proc}/pressure/io")),
        "cpu_pressure": pressure(_text(f"{proc}/pressure/cpu")),
        "memory_pressure": pressure(_text(f"{proc}/pressure/memory")),
        "cpu_mhz": sum(clocks) / len(clocks) if clocks else None,
        "memory_available_mib": int(free.group(1)) // 1024 if free else None,
    }


def read_process(pid: Optional[int], proc: str = "/proc") -> dict[str, Any]:
    """Counters of the server process; {} where there is none or it may not be read."""
    if not pid:
        return {}
    stat = _text(f"{proc}/{pid}/stat").rpartition(")")[2].split()
    if len(stat) < 22:
        return {}
    rss = re.search(r"^VmRSS:\s+(\d+)", _text(f"{proc}/{pid}/status"), re.M)
    read = re.search(r"^read_bytes:\s+(\d+)", _text(f"{proc}/{pid}/io"), re.M)
    return {
        "rss_mib": int(rss.group(1)) // 1024 if rss else None,
        "majflt": int(stat[9]),
        "cpu_s": (int(stat[11]) + int(stat[12])) / float(os.sysconf("SC_CLK_TCK")),
        "read_bytes": int(read.group(1)) if read else None,
    }


def read_aer(pci_id: Optional[str], sys: str = "/sys") -> dict[str, int]:
    """Corrected and uncorrected PCIe errors of the card and of the port that it hangs on, by sysfs name."""
    if not pci_id:
        return {}
    # nvidia-smi writes an eight-digit domain, sysfs a four-digit one.
    device = f"{sys}/bus/pci/devices/{re.sub('^0000(?=[0-9a-f]{4}:)', '', pci_id.lower())}"
    found = {}
    port = os.path.dirname(os.path.realpath(device)) if os.path.exists(device) else ""
    for where in (device, port):
        for kind in ("aer_dev_correctable", "aer_dev_nonfatal", "aer_dev_fatal"):
            total = re.search(r"^TOTAL_ERR_\w+\s+(\d+)", _text(f"{where}/{kind}"), re.M) if where else None
            if total:
                found[f"{os.path.basename(where)}/{kind}"] = int(total.group(1))
    return found


class Witness:
    """A sampling process beside a measurement. Start it, measure, stop it, read its samples."""

    def __init__(
        self,
        run: Run,
        uuid: Optional[str] = None,
        server_pid: Optional[int] = None,
        interval_s: float = INTERVAL_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.reader = CardReader(run, uuid)
        self.server_pid = server_pid
        self.interval_s = interval_s
        self.clock = clock
        self.samples: list[dict[str, Any]] = []
        self.lost = False
        self._pid = 0
        self._stop = -1
        self._file: Any = None

    def start(self) -> Witness:
        # Learn the refused fields here, once, so that the child does not relearn them at each start.
        self.reader.card()
        descriptor, path = tempfile.mkstemp(prefix="tensorless-witness-")
        os.unlink(path)  # only the two processes know it, and nothing stays behind whichever way they end
        self._file = os.fdopen(descriptor, "w+", encoding="utf-8")
        watched, self._stop = os.pipe()
        self._pid = os.fork()
        if self._pid == 0:
            os.close(self._stop)
            try:
                self._child(watched)
            finally:
                os._exit(0)
        os.close(watched)
        return self

    def _child(self, watched: int) -> None:
        os.setsid()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)
        os.nice(5)
        due = self.clock()
        count = 0
        # The pipe closes when the measuring process stops us or dies, whichever way.
        while not select.select([watched], [], [], max(0.0, due - self.clock()))[0]:
            self._file.write(json.dumps(self.sample(count % APPS_EVERY == 0)) + "\n")
            self._file.flush()
            count += 1
            due = max(due + self.interval_s, self.clock())

    def sample(self, with_processes: bool) -> dict[str, Any]:
        """One look at everything."""
        at = self.clock()
        out = {"at": at, **self.reader.card(), **read_host(), **read_process(self.server_pid)}
        if with_processes:
            out["processes"] = self.reader.processes()
        out["took_s"] = self.clock() - at
        return out

    def stop(self, patience_s: float = 10.0) -> list[dict[str, Any]]:
        """End the sampling; a sampler that hangs in the driver is killed, and that is a finding of its own."""
        if not self._pid:
            return self.samples
        os.close(self._stop)
        until = time.monotonic() + patience_s
        while os.waitpid(self._pid, os.WNOHANG)[0] == 0:
            if time.monotonic() > until:
                self.lost = True
                os.killpg(self._pid, signal.SIGKILL)
                os.waitpid(self._pid, 0)
                break
            time.sleep(0.02)
        self._pid = 0
        self._file.seek(0)
        lines = self._file.read().splitlines()
        self._file.close()
        for line in lines:
            try:
                self.samples.append(json.loads(line))
            except ValueError:  # the last line of a killed sampler
                self.lost = True
        return self.samples

    def __enter__(self) -> Witness:
        return self.start()

    def __exit__(self, *_exc: object) -> None:
        self.stop()


def throttle_names(mask: Any) -> list[str]:
    """Names of the set bits. Idle is no throttling."""
    return [name for bit, name in THROTTLE_BITS.items() if isinstance(mask, int) and mask & bit]


GAUGES = (
    *("sm_mhz", "mem_mhz", "power_w", "power_limit_w", "temperature_c", "memory_temperature_c", "fan_percent"),
    *("memory_used_mib", "utilization_percent", "pcie_gen", "pcie_gen_max", "pcie_width", "pcie_width_max"),
    *("load1", "io_pressure", "cpu_pressure", "memory_pressure", "cpu_mhz", "memory_available_mib", "rss_mib"),
)


def window(
    samples: Sequence[dict[str, Any]],
    begin: float,
    end: float,
    interval_s: float,
    server_pids: Sequence[int] = (),
    tokens: int = 0,
) -> dict[str, Any]:
    """What the samples say about one run. Peaks are lower bounds: a spike between two samples is not seen."""
    inside = [s for s in samples if begin <= s["at"] <= end]
    fields: dict[str, Any] = {}
    for name in GAUGES:
        values = [s[name] for s in inside if isinstance(s.get(name), (int, float))]
        fields[name] = (
            {"min": min(values), "mean": sum(values) / len(values), "max": max(values), "n": len(values)}
            if values
            else None
        )
    masks = [s["throttle_mask"] for s in inside if isinstance(s.get("throttle_mask"), int)]
    shares: dict[str, float] = {}
    for mask in masks:
        for name in throttle_names(mask):
            shares[name] = shares.get(name, 0) + 1
    edges = [begin, *[s["at"] for s in inside], end]
    gaps = [
        [round(a - begin, 3), round(b - begin, 3)] for a, b in zip(edges, edges[1:]) if b - a > max(1.0, 2 * interval_s)
    ]
    others: dict[int, dict[str, Any]] = {}
    listed = [s["processes"] for s in inside if isinstance(s.get("processes"), list)]
    for processes in listed:
        for process in processes:
            if process["pid"] not in server_pids:
                others[process["pid"]] = process
    out: dict[str, Any] = {
        "interval_s": interval_s,
        "samples": len(inside),
        "peaks": "at least",
        "gaps_s": gaps,
        "fields": fields,
        "throttle": {name: round(count / len(masks), 4) for name, count in sorted(shares.items())} if masks else None,
        "other_processes": sorted(others.values(), key=lambda p: p["pid"]) if listed else None,
    }
    out["server"] = _counters(inside, tokens)
    return out


def _counters(inside: Sequence[dict[str, Any]], tokens: int) -> Optional[dict[str, Any]]:
    """Growth of the server's counters from the first sample of the run to the last."""
    seen = [s for s in inside if isinstance(s.get("majflt"), int)]
    if len(seen) < 2:
        return None
    first, last = seen[0], seen[-1]
    seconds = last["at"] - first["at"]
    out: dict[str, Any] = {"majflt": last["majflt"] - first["majflt"], "read_bytes": None}
    if isinstance(first.get("read_bytes"), int) and isinstance(last.get("read_bytes"), int):
        out["read_bytes"] = last["read_bytes"] - first["read_bytes"]
    if tokens:
        out["majflt_per_token"] = out["majflt"] / tokens
        out["read_bytes_per_token"] = None if out["read_bytes"] is None else out["read_bytes"] / tokens
    out["cores_busy"] = (last["cpu_s"] - first["cpu_s"]) / seconds if seconds > 0 else None
    return out

# SPDX-License-Identifier: Apache-2.0
"""What stands out about a card, and why a slow one is most likely slow. No I/O.

Private to the collection: it may change at any time.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Optional

SLOW_PERCENT = 5.0  # "a few percent" is the documentation's word for what is normal
THROTTLE_SHARE = 0.10  # a cap that was brushed once is not a reason
IO_PRESSURE = 20.0

HEAT = ("hw_thermal_slowdown", "sw_thermal_slowdown")
POWER = ("sw_power_cap", "hw_power_brake_slowdown", "hw_slowdown")

# Order is likelihood: what slows a card most surely comes first.
ORDER = (
    *("other_process", "heat", "power", "narrow_link", "untuned", "other_model", "cpu", "page_faults", "host_busy"),
    *("other_driver", "pcie_errors", "kernel_fault", "sampler_lost", "unstable", "falling"),
)


def finding(code: str, text: str) -> dict[str, str]:
    return {"code": code, "text": text}


def _share(runs: Iterable[Mapping[str, Any]], names: Sequence[str]) -> tuple[float, str]:
    """The largest mean share of samples among these throttle reasons, and its name."""
    best, which = 0.0, ""
    rows = [r["witness"]["throttle"] for r in runs if (r.get("witness") or {}).get("throttle") is not None]
    for name in names:
        share = sum(row.get(name, 0.0) for row in rows) / len(rows) if rows else 0.0
        if share > best:
            best, which = share, name
    return best, which


def _gauge(runs: Iterable[Mapping[str, Any]], name: str, kind: str) -> Optional[float]:
    values = []
    for run in runs:
        gauge = ((run.get("witness") or {}).get("fields") or {}).get(name)
        if gauge:
            values.append(gauge[kind])
    return (
        (max(values) if kind == "max" else min(values) if kind == "min" else sum(values) / len(values))
        if values
        else None
    )


def findings(result: Mapping[str, Any], usual_driver: Optional[str] = None) -> list[dict[str, str]]:
    """Everything the result's own witness says about its card, most weighty first."""
    runs = list(result.get("runs") or [])
    found: list[dict[str, str]] = []
    others: dict[int, Mapping[str, Any]] = {}
    for run in runs:
        for process in (run.get("witness") or {}).get("other_processes") or []:
            others[process["pid"]] = process
    for process in ((result.get("quiet") or {}).get("before") or {}).get("other_processes") or []:
        others[process["pid"]] = process
    for process in sorted(others.values(), key=lambda p: int(p["pid"])):
        found.append(
            finding("other_process", f"another process used the card: {process['name']} (pid {process['pid']})")
        )
    for code, names, word in (("heat", HEAT, "heat"), ("power", POWER, "power")):
        share, name = _share(runs, names)
        if share >= THROTTLE_SHARE:
            found.append(finding(code, f"throttled by {word}: {name} in {share * 100:.0f} % of the samples"))
    width, widest = _gauge(runs, "pcie_width", "max"), _gauge(runs, "pcie_width_max", "max")
    if width is not None and widest is not None and width < widest:
        found.append(finding("narrow_link", f"the PCIe link is x{width:.0f} where the card can x{widest:.0f}"))
    gen, newest = _gauge(runs, "pcie_gen", "max"), _gauge(runs, "pcie_gen_max", "max")
    if gen is not None and newest is not None and gen < newest:
        # An idle card lowers its link by itself; this is read while it works.
        found.append(finding("narrow_link", f"the PCIe link ran at generation {gen:.0f} of {newest:.0f} under load"))
    if result.get("untuned_label"):
        found.append(finding("untuned", str(result["untuned_label"])))
    if result.get("other_model"):
        found.append(finding("other_model", f"the server serves {', '.join(result.get('served_models') or [])}"))
    cores = [(r.get("witness") or {}).get("server") or {} for r in runs]
    busy = [c["cores_busy"] for c in cores if c.get("cores_busy") is not None]
    load = _gauge(runs, "utilization_percent", "mean")
    if busy and load is not None and min(busy) >= 2.0 and load < 30.0:
        found.append(finding("cpu", f"the work ran on the processor: {min(busy):.1f} cores busy, card at {load:.0f} %"))
    faulted = sum(c.get("majflt") or 0 for c in cores)
    tokens = sum(int(r.get("tokens") or 0) for r in runs)
    if tokens and faulted > tokens:
        found.append(
            finding("page_faults", f"{faulted / tokens:.1f} major page faults a token: the model is not in memory")
        )
    io = _gauge(runs, "io_pressure", "max")
    quiet = [label for label in result.get("labels") or [] if str(label).startswith("not quiet: ")]
    if quiet:
        found.append(finding("host_busy", str(quiet[0])))
    elif io is not None and io >= IO_PRESSURE:
        found.append(finding("host_busy", f"drives were busy during the measurement (IO pressure {io:.0f} %)"))
    driver = result.get("driver_version")
    if usual_driver and driver and driver != usual_driver:
        found.append(finding("other_driver", f"driver {driver}, the rest of the fleet has {usual_driver}"))
    whole = result.get("witness") or {}
    for counter, grown in sorted((whole.get("aer_growth") or {}).items()):
        found.append(finding("pcie_errors", f"{grown} PCIe errors during the measurement at {counter}"))
    for line in whole.get("kernel") or []:
        found.append(finding("kernel_fault", f"the kernel said: {line}"))
    if whole.get("sampler_lost"):
        found.append(finding("sampler_lost", "nvidia-smi did not answer during the measurement: the card may hang"))
    if result.get("trend") == "falling":
        found.append(finding("falling", "each run was slower than the one before"))
    elif result.get("stable") is False:
        found.append(finding("unstable", f"the runs differ by {float(result.get('spread') or 0) * 100:.0f} %"))
    return sorted(found, key=lambda f: ORDER.index(f["code"]))


# Findings that explain a slow card; the others only stand beside it.
CAUSES = frozenset(ORDER) - {"unstable", "sampler_lost"}


def slowness(
    result: Mapping[str, Any], peers_median: Optional[float], found: Sequence[Mapping[str, str]]
) -> tuple[bool, Optional[str]]:
    """Whether a card is below its receipt or its equals in the fleet, and the most likely reason."""
    behind = []
    if result.get("receipt_applies") and "vs_receipt_percent" in result:
        behind.append(-float(result["vs_receipt_percent"]))
    if peers_median:
        behind.append((1.0 - float(result["median_decode_tps"]) / peers_median) * 100.0)
    band = max(SLOW_PERCENT, float(result.get("spread") or 0.0) * 100.0)
    if not behind or max(behind) <= band:
        return False, None
    for item in found:
        if item["code"] in CAUSES:
            return True, item["text"]
    return True, "no reason was seen by the witness"

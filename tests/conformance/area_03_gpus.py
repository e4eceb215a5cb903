# SPDX-License-Identifier: Apache-2.0
"""Area 3: cards, GPUs and drivers."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from ansible_collections.tensorless.fleet.plugins.module_utils._gpu import read_gpus

from tests.conformance.frame import Env
from tests.conformance.planning import plan_case

AREA = "gpu_selection"


def run_case(case: dict[str, Any], env: Env) -> dict[str, Any]:
    given = case["given"]
    if "nvidia_smi_csv" in given:
        return _facts(given)
    model = None if given["command"] in ("models", "doctor", "capabilities") else env.recipe(given)["model"]["hf_repo"]
    got = plan_case(given, env, model)
    if "rows" in got:
        got["fits"] = got["rows"][0]["fits"]
    plan = got.get("plan")
    if plan:
        # The chosen card comes first among those the container gets; where no UUID is used there is none.
        index = plan["cards"][0]["index"] if plan["cards"] else None
        got |= {"gpu_index": index, "container_gpu": plan["gpu"], "card": plan["card"], "fits": plan["fits"]}
        got |= {"checks_skipped": plan["detection"] == "skipped", "fits_reason": plan["fits_reason"]}
        got["flagged"] = bool(plan["notes"])
    return got


def _facts(given: dict[str, Any]) -> dict[str, Any]:
    """The product's reader, in front of an nvidia-smi that knows the table of the case."""
    lines = given["nvidia_smi_csv"].splitlines()
    names = [re.sub(r" \[.*\]$", "", name) for name in lines[0].split(", ")]
    rows = [dict(zip(names, line.split(", "))) for line in lines[1:]]

    def nvidia_smi(argv: Sequence[str]) -> tuple[int, str, str]:
        asked = next((word.partition("=")[2].split(",") for word in argv if word.startswith("--query-gpu=")), None)
        if asked is None:
            return 1, "", ""
        answer = [", ".join(asked)]
        for row in rows:
            unknown = {"uuid": f"GPU-{row['index']}", "pci.bus_id": f"00000000:0{row['index']}:00.0"}
            answer.append(", ".join(row.get(field, unknown.get(field, "[N/A]")) for field in asked))
        return 0, "\n".join(answer) + "\n", ""

    gpus = [
        {
            "index": card["index"],
            "name": card["name"],
            "compute_cap": card["compute_capability"],
            "memory_mib": card["memory_mib"],
            "driver": card["driver_version"],
        }
        for card in read_gpus(nvidia_smi)["cards"]
    ]
    return {"failed": False, "message": "", "gpus": gpus}


def _fits_reason(expected: Any, got: dict[str, Any], case: dict[str, Any]) -> str | None:
    reason = got.get("fits_reason") or ""
    return None if str(expected) in reason else f"fits_reason: expected {expected!r} in {reason!r}"


CHECKS = {"fits_reason_contains": _fits_reason}

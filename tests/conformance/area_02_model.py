# SPDX-License-Identifier: Apache-2.0
"""Area 2: what the MODEL argument may be."""

from __future__ import annotations

from typing import Any

from tests.conformance.frame import Env
from tests.conformance.planning import plan_case

AREA = "model_argument"


def run_case(case: dict[str, Any], env: Env) -> dict[str, Any]:
    got = plan_case(case["given"], env, case["given"].get("model"))
    plan = got.pop("plan", None)
    if plan:
        download = plan["download"]
        got |= {"hf_repo": plan["model"], "card": plan["card"], "untuned": plan["untuned"], "plan": plan}
        got |= {key: download[key] for key in ("revision", "url", "blob", "snapshot", "sha256")}
    return got

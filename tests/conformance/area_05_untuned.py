# SPDX-License-Identifier: Apache-2.0
"""Area 5: tuned and untuned."""

from __future__ import annotations

from typing import Any

from tests.conformance.frame import Env
from tests.conformance.planning import plan_case

AREA = "untuned"


def run_case(case: dict[str, Any], env: Env) -> dict[str, Any]:
    given = case["given"]
    model = env.recipe(given)["model"]["hf_repo"]
    if given.get("model_revision"):
        model += "@" + given["model_revision"]
    got = plan_case(given, env, model)
    plan = got.get("plan")
    if plan:
        got |= {"untuned": plan["untuned"], "reasons": plan["untuned_reasons"], "label": plan["untuned_label"]}
        got |= {"reason_count": len(plan["untuned_reasons"]), "receipt_applies": plan["receipt_applies"]}
        # Whatever shows the run shows the label.
        if plan["untuned"] and got["output"] and plan["untuned_label"] not in got["output"]:
            got["label"] = f"missing from what is printed: {got['output']}"
    return got


def _label_contains(expected: Any, got: dict[str, Any], case: dict[str, Any]) -> str | None:
    words = [expected] if isinstance(expected, str) else expected
    missing = [word for word in words if word not in (got.get("label") or "")]
    return f"label {got.get('label')!r} lacks {missing}" if missing else None


def _label_lacks(expected: Any, got: dict[str, Any], case: dict[str, Any]) -> str | None:
    words = [expected] if isinstance(expected, str) else expected
    there = [word for word in words if word in (got.get("label") or "")]
    return f"label {got.get('label')!r} has {there}" if there else None


CHECKS = {"label_contains": _label_contains, "label_lacks": _label_lacks}

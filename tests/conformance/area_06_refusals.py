# SPDX-License-Identifier: Apache-2.0
"""Area 6: drafts, unpublished recipes, dry runs and refused values."""

from __future__ import annotations

from typing import Any

from tests.conformance.frame import Env
from tests.conformance.planning import plan_case

AREA = "status_refusal"
WITHOUT_MODEL = ("models", "doctor", "capabilities", "version")


def run_case(case: dict[str, Any], env: Env) -> dict[str, Any]:
    given = case["given"]
    model = None if given["command"] in WITHOUT_MODEL else env.recipe(given)["model"]["hf_repo"]
    if model and given.get("model_revision"):
        model += "@" + given["model_revision"]
    got = plan_case(given, env, model)
    if "rows" in got:
        row = got["rows"][0]
        got["status_column"] = row["status"] + ("" if row["published"] else ", unpublished")
        if got["status_column"] not in got["message"]:
            got["status_column"] = f"not in the table: {got['message']}"
    plan = got.get("plan")
    if plan:
        got |= {"untuned": plan["untuned"], "label": plan["untuned_label"], "published": plan["published"]}
        got["receipt_applies"] = plan["receipt_applies"]
        got["shown"] = plan["model"] in got["output"] and plan["download"]["url"] in got["output"]
    # Up to the plan nothing is done: the planner has no way to run a command, and no file may have appeared.
    touched = [path for path in env.tmp.rglob("*") if "recipes" not in path.parts]
    got |= {"started": bool(touched), "pulled": bool(touched), "downloaded": bool(touched)}
    return got

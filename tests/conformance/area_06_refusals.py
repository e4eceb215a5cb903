# SPDX-License-Identifier: Apache-2.0
"""Area 6: drafts, unpublished recipes, dry runs and refused values."""

from __future__ import annotations

from typing import Any

from tests.conformance.frame import Env
from tests.conformance.planning import drive_command, plan_case, words_of

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
    if given["dry_run"] or given["command"] in ("info", "models"):
        got |= _by_the_command(given, env, model, got)
    return got


def _by_the_command(given: dict[str, Any], env: Env, model: str | None, got: dict[str, Any]) -> dict[str, Any]:
    """The same by the real command, which must say the same and do nothing."""
    done = drive_command(given, env, words_of(given, model))
    out = {key: done[key] for key in ("pulled", "started", "downloaded")}
    if (done["code"] != 0) != got["failed"]:
        return {**out, "failed": done["code"] != 0, "message": f"the command differs from the plan: {done}"}
    if got["failed"]:
        return {**out, "message": done["err"].removeprefix("tensorless: ").split("\nRun 'tensorless")[0].rstrip("\n")}
    shown = done["out"]
    return {
        **out,
        "output": shown,
        "shown": model is None or (model in shown and _plan_of(given["command"], got["plan"]) in shown),
    }


def _plan_of(command: str, plan: dict[str, Any]) -> str:
    """What a plan of this command cannot leave out: the download, the image that serves it, or the server's name."""
    if command in ("serve", "stop"):
        return str(plan["image"] if command == "serve" else plan["container_name"])
    return str(plan["download"]["url"])

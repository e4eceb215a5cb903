# SPDX-License-Identifier: Apache-2.0
"""Area 10: the doctor's documented block."""

from __future__ import annotations

from typing import Any

from ansible_collections.tensorless.fleet.plugins.module_utils import _doctor
from ansible_collections.tensorless.fleet.plugins.module_utils._gpu import read_gpus

from tests.conformance.frame import Env, text_of

AREA = "doctor"


def _facts(given: dict[str, Any]) -> dict[str, Any]:
    """What the product's reader makes of the nvidia-smi of a case."""

    def nvidia_smi(argv: Any) -> tuple[int, str, str]:
        asked = next((word.partition("=")[2].split(",") for word in argv if word.startswith("--query-gpu=")), None)
        if given["nvidia_smi"] == "fails":
            return 9, "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.\n", ""
        if asked is None:
            return 1, "", ""
        rows = []
        for gpu in given["gpus"]:
            known = {
                "index": str(gpu["index"]),
                "uuid": f"GPU-{gpu['index']}",
                "pci.bus_id": f"00000000:0{gpu['index']}:00.0",
                "name": gpu["name"],
                "compute_cap": gpu["compute_cap"],
                "memory.total": str(gpu["memory_mib"]),
                "driver_version": gpu["driver"],
            }
            rows.append(", ".join(known.get(field, "[N/A]") for field in asked))
        return 0, "\n".join(rows) + "\n", ""

    return read_gpus(nvidia_smi, None if given["nvidia_smi"] == "absent" else "nvidia-smi")


def run_case(case: dict[str, Any], env: Env) -> dict[str, Any]:
    given = case["given"]
    recipes = env.load(given)
    docker = given["docker_info"]
    names = {"pn3": "PN3", "q3floor": "Q3Floor"}
    cached = {
        recipe.data["model"]["sha256"]: state
        for name, state in given["cached"].items()
        for recipe in recipes
        if names[name] in recipe.repo
    }
    seen = _doctor.Seen(
        gpu_facts=_facts(given),
        runtimes=given["installed"],
        cdi_files=[path for path in given["host_files"] if path in _doctor.CDI_FILES],
        docker_problem=None if docker is None or docker["ok"] else str(docker.get("error", "failed")),
        docker_runtimes=[] if docker is None else docker.get("runtimes", []),
        docker_hook=given["docker_hook"],
        cache=given["cache"],
        free_bytes=given["free_bytes"],
        cached=cached,
    )
    report = _doctor.report(_doctor.documented(seen, recipes, given["runtime"]))
    checks = report["checks"]
    return {
        "failed": report["exit_code"] != 0,
        "exit_code": report["exit_code"],
        "failed_checks": report["failed_checks"],
        "summary": report["summary"],
        "message": report["text"],
        "output": report["text"],
        "checks": checks,
    }


def _levels(got: dict[str, Any]) -> dict[str, str]:
    """Each check's own result: the worst line, leaving out a WARN for a single GPU beside another result."""
    found: dict[str, str] = {}
    for check in got["checks"]:
        if check["level"] == "WARN" and any(
            other["id"] == check["id"] and other["level"] != "WARN" for other in got["checks"]
        ):
            continue
        if found.get(check["id"]) != "FAIL":
            found[check["id"]] = check["level"]
    return found


def _lines(expected: Any, got: dict[str, Any], case: dict[str, Any]) -> str | None:
    if [(line["level"], line["check"]) for line in expected] != [(c["level"], c["id"]) for c in got["checks"]]:
        return f"lines: {[(c['level'], c['id'], c['text']) for c in got['checks']]}"
    for line, check in zip(expected, got["checks"], strict=True):
        for words in line.get("contains", []):
            if words not in check["text"]:
                return f"{words!r} is not in {check['text']!r}"
        for words in line.get("fix_mentions", []):
            if words.lower() not in (check["fix"] or "").lower():
                return f"{words!r} is not in the fix {check['fix']!r}"
    return None


def _contains(expected: Any, got: dict[str, Any], case: dict[str, Any]) -> str | None:
    for name, phrases in expected.items():
        text = "\n".join(check["text"] for check in got["checks"] if check["id"] == name)
        for words in phrases:
            if words not in text:
                return f"{words!r} is not in {text!r}"
    return None


def _fixes(expected: Any, got: dict[str, Any], case: dict[str, Any]) -> str | None:
    for name, phrases in expected.items():
        text = "\n".join(check["fix"] or "" for check in got["checks"] if check["id"] == name).lower()
        for words in phrases:
            if words.lower() not in text:
                return f"{words!r} is not in the fix {text!r}"
    return None


CHECKS = {
    "lines": _lines,
    "line_contains": _contains,
    "fix_mentions": _fixes,
    "levels": lambda expected, got, case: (
        None if all(_levels(got).get(name) == level for name, level in expected.items()) else f"levels: {_levels(got)}"
    ),
    "levels_any": lambda expected, got, case: (
        None
        if all(_levels(got).get(name) in levels for name, levels in expected.items())
        else f"levels: {_levels(got)}"
    ),
    "failed_checks_min": lambda expected, got, case: (
        None if got["failed_checks"] >= expected else f"only {got['failed_checks']} failed"
    ),
    "every_fail_has_fix": lambda expected, got, case: (
        None if all(check["fix"] for check in got["checks"] if check["level"] == "FAIL") else "a FAIL without a fix"
    ),
    "summary_mentions": lambda expected, got, case: (
        None
        if all(str(words).lower() in text_of(got["summary"]).lower() for words in expected)
        else f"summary: {got['summary']!r}"
    ),
}

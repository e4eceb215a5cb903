# SPDX-License-Identifier: Apache-2.0
"""Further cases of conformance area 8, of our own: the neighbours of the handed ones."""

from __future__ import annotations

import pathlib
from typing import Any

import pytest

from tests.conformance import area_08_server as area
from tests.conformance.frame import Env, compare

NAME = "tensorless-iammrduncan-qwen3.8-27b-pn3-gguf"
REPO = "iamMrDuncan/Qwen3.8-27B-PN3-GGUF"
SERVE: dict[str, Any] = {
    "operation": "serve", "recipe": "pn3", "runtime": "podman", "detach": True, "host": "127.0.0.1", "port": 8080,
    "container": "absent", "port_free": True, "image_present": True, "blob": "valid", "healthy_after_s": 5,
}  # fmt: skip
STOP: dict[str, Any] = {
    "operation": "stop", "recipe": "pn3", "runtime": "auto", "installed": ["podman", "docker"], "running_in": [],
}  # fmt: skip
REFUSED = {"failed": True, "started": False}
NO_IMAGE = f"the engine image is not pulled|tensorless pull {REPO}"
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "docker says so": (
        {"runtime": "docker"},
        {"failed": False, "output_contains": [f"starting {NAME} (docker, GPU all)"]},
    ),
    "one GPU is named": ({"gpu": 1}, {"failed": False, "output_contains": [f"starting {NAME} (podman, GPU 1)"]}),
    "runs in docker": (
        {"runtime": "docker", "container": "running"},
        {**REFUSED, "message_contains": [f"{NAME} is already running in docker", f"tensorless stop {REPO}"]},
    ),
    "stopped in docker": (
        {"runtime": "docker", "container": "exited"},
        {"failed": False, "removed_first": True, "started": True},
    ),
    "its port is taken": ({"port_free": False}, {**REFUSED, "message_contains": ["cannot use port 8080 on 127.0.0.1"]}),
    "a port of one address": (
        {"host": "10.1.2.3", "port": 65535, "port_free": False},
        {**REFUSED, "message_contains": ["cannot use port 65535 on 10.1.2.3"]},
    ),
    "an IPv6 port is taken": (
        {"host": "::1", "port_free": False},
        {**REFUSED, "message_contains": ["cannot use port 8080 on ::1"]},
    ),
    "no image": ({"image_present": False}, {**REFUSED, "message_contains": NO_IMAGE.split("|"), "pulled": False}),
    "neither image nor model": (
        {"image_present": False, "blob": "absent"},
        {**REFUSED, "message_contains": NO_IMAGE.split("|")},
    ),
    "run pulls": (
        {"operation": "run", "image_present": False, "blob": "valid"},
        {"failed": False, "pulled": True, "downloaded": False, "started": True},
    ),
    "run pulls nothing that is there": (
        {"operation": "run"},
        {"failed": False, "pulled": False, "downloaded": False, "started": True},
    ),
    "run with docker and a taken port": (
        {"operation": "run", "runtime": "docker", "port_free": False, "image_present": False},
        {**REFUSED, "pulled": False, "message_contains": ["cannot use port"]},
    ),
    "never ready": (
        {"healthy_after_s": 1300},
        {"failed": True, "message_contains": ["the server was not ready after 20m, so it was stopped"]},
    ),
    "answers that are no good answers": ({"health_answers": [503, 500, 404, 302, 200]}, {"failed": False, "polls": 5}),
    "good at once": ({"health_answers": [200]}, {"failed": False, "polls": 1, "still_loading_lines": 0}),
    "a load of 95 s": ({"healthy_after_s": 95}, {"failed": False, "still_loading_lines": 3}),
    "a load of 29 s": ({"healthy_after_s": 29}, {"failed": False, "still_loading_lines": 0}),
    "a short log": (
        {"exits_after_s": 2, "healthy_after_s": None, "log_line_count": 3},
        {"failed": True, "log_lines_shown": {"count": 3, "first": 1, "last": 3}},
    ),
    "a log of 60 lines": (
        {"exits_after_s": 2, "healthy_after_s": None, "log_line_count": 60},
        {"failed": True, "log_lines_shown": {"count": 60, "first": 1, "last": 60}},
    ),
    "a log of 61 lines": (
        {"exits_after_s": 2, "healthy_after_s": None, "log_line_count": 61},
        {"failed": True, "log_lines_shown": {"count": 60, "first": 2, "last": 61}},
    ),
    "no log": (
        {"exits_after_s": 0, "healthy_after_s": None},
        {"failed": True, "message_contains": ["the server exited before it was ready"]},
    ),
    "docker refuses the command": (
        {"runtime": "docker", "run_fails": True},
        {
            "failed": True,
            "message_contains": ["could not start the container"],
            "message_mentions": ["tensorless doctor"],
        },
    ),
    "every IPv6 interface": (
        {"host": "::"},
        {
            "failed": False,
            "endpoint": "http://[::1]:8080",
            "health_url": "http://[::1]:8080/health",
            "output_contains": ["it listens on every interface of this host (--host ::)"],
        },
    ),
    "one IPv6 address": (
        {"host": "fd00::5", "port": 9000},
        {"failed": False, "endpoint": "http://[fd00::5]:9000", "output_lacks": ["every interface"]},
    ),
    "the other recipe": (
        {"recipe": "q3floor"},
        {"served_model_name": "iamMrDuncan/Qwen3.8-27B-UD-IQ3_XXS-Q3Floor-GGUF"},
    ),
    "in the foreground no stop line": ({"detach": False}, {"failed": False, "output_lacks": ["stop it with"]}),
    "stops what runs in docker only": (
        {**STOP, "running_in": ["docker"]},
        {"failed": False, "changed": True, "looked_in": ["podman", "docker"], "output_contains": [f"stopped {NAME}"]},
    ),
    "stops in both": (
        {**STOP, "running_in": ["podman", "docker"]},
        {"failed": False, "changed": True, "still_running": False},
    ),
    "stop, docker named": (
        {**STOP, "runtime": "docker", "running_in": ["podman"]},
        {
            "changed": False,
            "looked_in": ["docker"],
            "still_running": True,
            "output_contains": [f"{NAME} is not running"],
        },
    ),
    "dry run of both": (
        {**STOP, "running_in": ["podman", "docker"], "dry_run": True},
        {"changed": False, "still_running": True, "output_mentions": ["podman stop", "docker stop"]},
    ),
    "dry run of nothing": (
        {**STOP, "dry_run": True},
        {"changed": False, "output_contains": [f"{NAME} is not running"]},
    ),
    "stop, no runtime at all": ({**STOP, "installed": [], "runtime": "auto"}, {"failed": False, "changed": False}),
    "stop, the named one is not installed": (
        {**STOP, "installed": ["docker"], "runtime": "podman"},
        {"failed": False, "changed": False, "output_contains": [f"{NAME} is not running"]},
    ),
    "interrupted with docker": (
        {"operation": "interrupt", "recipe": "pn3", "runtime": "docker", "detach": False},
        {"exit_code": 130, "container_after": "absent", "output_contains": [f"stopping {NAME}"]},
    ),
    "a name of other letters": (
        {"operation": "name", "hf_repo": "Ünï/Qwen@1:2"},
        {"container_name": "tensorless--n--qwen-1-2"},
    ),
    "a name with an emoji": (
        {"operation": "name", "hf_repo": "o/a\U0001f600b"},
        {"container_name": "tensorless-o-a-b"},
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_variant(name: str, tmp_path: pathlib.Path) -> None:
    given, expect = CASES[name]
    given = given if given.get("operation") in ("stop", "interrupt", "name") else {**SERVE, **given}
    env = Env(tmp_path, None)
    try:
        case = {"id": name, "area": area.AREA, "given": given, "expect": expect}
        assert compare(case, area.run_case(case, env), area.CHECKS) == []
    finally:
        env.close()

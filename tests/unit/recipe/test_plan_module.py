# SPDX-License-Identifier: Apache-2.0
"""The module's work on a host, and the whole way through ansible-playbook."""

from __future__ import annotations

import hashlib
import json
import os
import pathlib
import subprocess
import sys
from typing import Any

import pytest
import yaml
from ansible_collections.tensorless.fleet.plugins.module_utils import _plan_observe as seen
from ansible_collections.tensorless.fleet.plugins.module_utils._plan_module import (
    ARGUMENT_SPEC,
    in_a_play,
    plan_on_host,
)
from ansible_collections.tensorless.fleet.plugins.module_utils._plan_types import Choice
from ansible_collections.tensorless.fleet.plugins.module_utils._recipe import Recipe
from ansible_collections.tensorless.fleet.plugins.module_utils._refusal import Refusal

from tests.conformance.frame import to_toml
from tests.unit.recipe.recipe_made import VALID, changed, gpu

IMAGE = VALID["engine"]["image"]
SHA = VALID["model"]["sha256"]
CARD = {"index": 0, "uuid": gpu().uuid, "name": "X1", "compute_capability": "6.0", "memory_mib": 16269}
FACTS = {"nvidia_smi": {"found": True, "rc": 0}, "driver_version": "535.1", "cards": [CARD]}
LABELS = json.dumps([{"Config": {"Labels": {"org.tensorless.switches": "GGML_A"}}}])


class Runtime:
    """Answers `image inspect` and remembers what was asked."""

    def __init__(self, rc: int = 0, out: str = LABELS) -> None:
        self.rc, self.out, self.asked = rc, out, [list[str]()]
        self.asked.clear()

    def __call__(self, command: Any) -> tuple[int, str, str]:
        self.asked.append(list(command))
        return self.rc, self.out, ""


def params(tmp_path: pathlib.Path, **values: Any) -> dict[str, Any]:
    given = {name: option.get("default") for name, option in ARGUMENT_SPEC.items()}
    data = values.pop("data", VALID)
    recipes = [{"path": "Org/Tiny-GGUF/x1.toml", "data": data}]
    return {**given, "model": "tiny", "recipes": recipes, "cache": str(tmp_path), "gpu_facts": FACTS, **values}


def run(
    tmp_path: pathlib.Path, runtime: Runtime | None = None, installed: str = "podman", **values: Any
) -> dict[str, Any]:
    check_mode = values.pop("check_mode", False)
    found = installed.split()
    return plan_on_host(
        params(tmp_path, **values),
        check_mode,
        runtime or Runtime(rc=1),
        lambda name: f"/usr/bin/{name}" if name in found else None,
    )


def blob(tmp_path: pathlib.Path, name: str = "", content: bytes = b"x" * 1000) -> pathlib.Path:
    path = tmp_path / "models--Org--Tiny-GGUF/blobs" / (SHA + name)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


def test_the_ordinary_case(tmp_path: pathlib.Path) -> None:
    result = run(tmp_path)
    assert sorted(result) == ["info_text", "plan", "plans", "skipped_cards"]
    plan = result["plan"]
    assert result["plans"] == [plan]
    assert plan["runtime"] == "podman"
    assert plan["threads"] == min(8, os.cpu_count() or 1)
    assert plan["download"]["cache"] == str(tmp_path)
    assert plan["recipe_path"] == "recipes/Org/Tiny-GGUF/x1.toml"
    assert f"nvidia.com/gpu={gpu().uuid}" in plan["exec"]
    assert result["info_text"].startswith("Org/Tiny-GGUF on x1: Tiny\n")
    assert json.loads(json.dumps(result)) == result


def test_the_options_arrive_in_the_plan(tmp_path: pathlib.Path) -> None:
    key = tmp_path / "key"
    key.write_text("k")
    values: dict[str, Any] = {
        "port": 9000,
        "host": "::1",
        "context": 1024,
        "extra_args": ["-b", "1"],
        "endpoint": "http://h",
    }
    values |= {"hardening": {"read_only": True, "memory": None}, "api_key_file": str(key), "gpu": "0"}
    plan = run(tmp_path, installed="docker", recipes_dir="/my/", **values)["plan"]
    assert (plan["endpoint"], plan["context"], plan["runtime"]) == ("http://[::1]:9000", 1024, "docker")
    assert plan["command"][-2:] == ["-b", "1"]
    assert plan["download"]["url"].startswith("http://h/Org/")
    assert plan["differences"] == ["--read-only", "--tmpfs=/tmp"]
    assert plan["api_key_file"] == str(key)
    assert plan["recipe_path"] == "/my/Org/Tiny-GGUF/x1.toml"
    assert plan["gpu"] == "0"
    before = plan["plan_hash"]
    key.write_text("another")
    assert run(tmp_path, installed="docker", **values)["plan"]["plan_hash"] != before
    key.unlink()
    assert run(tmp_path, installed="docker", **values)["plan"]["api_key_file"] == str(key)


def test_the_cache_of_the_host_is_the_default(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", "/from/env")
    assert run(tmp_path, cache=None)["plan"]["download"]["cache"] == "/from/env"


def test_what_the_cache_holds(tmp_path: pathlib.Path) -> None:
    assert run(tmp_path)["plan"]["download"]["cached"] == "no"
    blob(tmp_path, ".incomplete")
    assert run(tmp_path)["plan"]["download"]["cached"] == "partial"
    path = blob(tmp_path)
    plan = run(tmp_path)["plan"]
    assert (plan["download"]["cached"], plan["pn"]) == ("yes", "unknown")
    path.write_bytes(b"x")
    assert run(tmp_path)["plan"]["download"]["cached"] == "partial"


def test_the_header_is_read_once_the_file_is_whole(tmp_path: pathlib.Path) -> None:
    path = blob(tmp_path)
    read: list[str] = []

    def describe(name: str) -> dict[str, Any]:
        read.append(name)
        return {"pn": True, "block_count": 64}

    def observe(describe: Any) -> Any:
        return seen.observe(
            [Recipe(changed())], Choice(cache=str(tmp_path)), FACTS, Runtime(), lambda name: None, describe
        )

    facts = observe(describe)
    assert read == [str(path)]
    assert (facts.pn, facts.block_count) == ({SHA: "yes"}, {SHA: 64})
    facts = observe(lambda name: {"pn": False, "block_count": None})
    assert (facts.pn, facts.block_count) == ({SHA: "no"}, {})
    for error in (ValueError("no GGUF"), OSError("gone")):

        def broken(name: str, error: Exception = error) -> dict[str, Any]:
            raise error

        assert observe(broken).pn == {}


def test_labels_of_the_image(tmp_path: pathlib.Path) -> None:
    runtime = Runtime()
    plan = run(tmp_path, runtime)["plan"]
    assert runtime.asked == [["podman", "image", "inspect", IMAGE]]
    assert plan["untuned_reasons"] == ["engine switches that the image does not list (GGML_B)"]
    runtime = Runtime()
    choice = Choice(cache="/none", runtime="docker")
    both = seen.observe([Recipe(changed())], choice, FACTS, runtime, lambda name: name, lambda path: {})
    assert runtime.asked == [["docker", "image", "inspect", IMAGE]]
    assert both.labels == {IMAGE: {"org.tensorless.switches": "GGML_A"}}
    assert both.runtimes == ["podman", "docker"]
    assert run(tmp_path, Runtime(rc=1))["plan"]["untuned"] is False


@pytest.mark.parametrize("out", ["", "[]", "{}", "[1]", "nonsense"])
def test_an_answer_that_is_no_image(out: str) -> None:
    assert seen.image_labels("podman", IMAGE, Runtime(out=out)) is None


@pytest.mark.parametrize("out", ["[{}]", '[{"Config": null}]', '[{"Config": {"Labels": null}}]'])
def test_an_image_without_labels(out: str) -> None:
    assert seen.image_labels("podman", IMAGE, Runtime(out=out)) == {}


def test_without_a_runtime_nothing_is_asked(tmp_path: pathlib.Path) -> None:
    runtime = Runtime()
    plan = run(tmp_path, runtime, installed="", check_mode=True)["plan"]
    assert (runtime.asked, plan["runtime"]) == ([], "podman")
    with pytest.raises(Refusal, match="neither podman nor docker is installed"):
        run(tmp_path, installed="")


def test_a_rehearsal_on_a_bare_host(tmp_path: pathlib.Path) -> None:
    bare = {"nvidia_smi": {"found": False}}
    with pytest.raises(Refusal, match="cannot detect the GPU"):
        run(tmp_path, gpu_facts=bare)
    plan = run(tmp_path, gpu_facts=bare, check_mode=True)["plan"]
    assert plan["notes"] == ["no GPU can be read (nvidia-smi not found): the card and its driver are not checked yet"]


def test_the_gpus_are_read_where_no_fact_is_there(tmp_path: pathlib.Path) -> None:
    with pytest.raises(Refusal, match="cannot detect the GPU: nvidia-smi not found"):
        run(tmp_path, gpu_facts=None)
    assert run(tmp_path, gpu_facts=None, card="x1")["plan"]["detection"] == "skipped"


def test_show_refuses_no_draft(tmp_path: pathlib.Path) -> None:
    draft = changed(status="draft")
    with pytest.raises(Refusal, match="is a draft"):
        run(tmp_path, data=draft)
    assert run(tmp_path, data=draft, show=True)["plan"]["status"] == "draft"
    assert run(tmp_path, data=draft, allow_draft=True)["plan"]["receipt_applies"] is False


@pytest.mark.parametrize(
    ("models", "suffix"),
    [
        ([], False),
        (["tiny"], False),
        (["tiny", "other"], False),
        (["tiny", "Org/tiny-gguf"], True),
        (["tiny", "tiny@main"], False),
    ],
)
def test_a_model_that_a_host_runs_twice(tmp_path: pathlib.Path, models: list[str], suffix: bool) -> None:
    assert run(tmp_path, host_models=models)["plan"]["instance"].endswith("-00000000") is suffix


def test_the_module_alone_has_no_recipes(tmp_path: pathlib.Path) -> None:
    for values in ({"recipes": None}, {"model": None}):
        with pytest.raises(Refusal, match="no recipes reached the host"):
            run(tmp_path, **values)


def test_secrets_are_refused_for_services(tmp_path: pathlib.Path) -> None:
    with pytest.raises(Refusal, match="api_key_file"):
        run(tmp_path, extra_args=["--api-key", "x"])


def test_refusals_name_the_options_of_a_play() -> None:
    assert in_a_play("plain") == "plain"
    assert in_a_play("Pass --allow-draft") == "Pass --allow-draft (in a play, --allow-draft is allow_draft: true)"
    assert in_a_play("--card or --context").endswith(" (in a play, --card is card: ID and --context is context: N)")


# -- through ansible-playbook ----------------------------------------------------------------------------------------

ODD = "{{ 7 * 7 }}"


def play(tmp_path: pathlib.Path, tasks: list[dict[str, Any]], **variables: Any) -> subprocess.CompletedProcess[str]:
    """Run tasks on this machine, with a python and a PATH that has podman."""
    (tmp_path / "bin").mkdir(exist_ok=True)
    podman = tmp_path / "bin/podman"
    podman.write_text("#!/bin/sh\nexit 1\n")
    podman.chmod(0o755)
    book = tmp_path / "play.yml"
    given = {"ansible_python_interpreter": sys.executable, **variables}
    head: dict[str, Any] = {"hosts": "localhost", "connection": "local", "gather_facts": False, "vars": given}
    head["environment"] = {"PATH": f"{tmp_path}/bin:/usr/bin:/bin"}
    book.write_text(yaml.safe_dump([{**head, "tasks": tasks}]))
    command = [str(pathlib.Path(sys.executable).parent / "ansible-playbook"), "-i", "localhost,", str(book)]
    env = {
        **os.environ,
        "ANSIBLE_INJECT_FACT_VARS": "false",
        "ANSIBLE_LOCALHOST_WARNING": "false",
        "ANSIBLE_NOCOLOR": "1",
    }
    return subprocess.run(command, capture_output=True, text=True, env=env, cwd=tmp_path, check=False)


def odd_recipes(tmp_path: pathlib.Path) -> pathlib.Path:
    """A recipe whose text looks like templates, wherever text may stand."""
    data = changed(model__title=ODD, model__license=ODD, run__args=["-sm", "none", ODD, "{% if %}"])
    data["run"]["env"] = {"GGML_A": ODD}
    data["receipt"] = {"summary": ODD, "notes": [ODD]}
    target = tmp_path / "recipes/Org/Tiny-GGUF/x1.toml"
    target.parent.mkdir(parents=True)
    target.write_text(to_toml(data))
    return tmp_path / "recipes"


def test_text_of_recipes_passes_through_a_play_untouched(tmp_path: pathlib.Path) -> None:
    directory = odd_recipes(tmp_path)
    servers = [{"model": "tiny", "gpu": "each", "port": 8090}]
    tasks = [
        {"ansible.builtin.set_fact": {"nvidia_gpu": FACTS, "cacheable": True}},
        {"tensorless.fleet.tensorless_recipe": {"recipes_dir": str(directory)}, "register": "listed"},
        {
            "tensorless.fleet.tensorless_recipe": {"model": "tiny", "recipes_dir": "recipes", "gpu_facts": FACTS},
            "register": "direct",
        },
        {
            "ansible.builtin.include_role": {"name": "tensorless.fleet.plan"},
            "vars": {"plan_recipes_dir": str(directory)},
        },
        {
            "ansible.builtin.copy": {
                "content": "{{ [listed['recipes'], direct, plan_results, plan_skipped] | to_json }}",
                "dest": str(tmp_path / "out.json"),
                "mode": "0600",
            }
        },
    ]
    done = play(tmp_path, tasks, plan_servers=servers)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "changed=1 " in done.stdout
    listed, direct, plans, skipped = json.loads((tmp_path / "out.json").read_text())
    assert [row["title"] for row in listed] == [ODD]
    for plan in (direct["plan"], *plans):
        assert plan["recipe"]["model"]["title"] == ODD
        assert plan["recipe"]["receipt"] == {"summary": ODD, "notes": [ODD]}
        assert plan["command"][-2:] == [ODD, "{% if %}"]
        assert plan["exec"][-2:] == [ODD, "{% if %}"]
        assert f"GGML_A={ODD}" in plan["exec"]
    assert direct["changed"] is False
    assert ODD in direct["info_text"]
    assert [plan["port"] for plan in plans] == [8090]
    assert skipped == []


def test_a_refusal_in_a_play_is_one_message(tmp_path: pathlib.Path) -> None:
    target = tmp_path / "recipes/Org/Tiny-GGUF/x1.toml"
    target.parent.mkdir(parents=True)
    target.write_text(to_toml(changed(status="odd", run__context=0)))
    done = play(tmp_path, [{"tensorless.fleet.tensorless_recipe": {"model": "tiny", "recipes_dir": "recipes"}}])
    assert done.returncode == 2
    assert "Traceback" not in done.stdout + done.stderr
    assert f"{tmp_path}/recipes/Org/Tiny-GGUF/x1.toml: invalid recipe:\n  - status must be" in done.stdout + done.stderr


def test_two_servers_in_one_place_are_refused(tmp_path: pathlib.Path) -> None:
    two = {**FACTS, "cards": [CARD, {**CARD, "index": 1, "uuid": gpu(1).uuid}]}
    same_port = [{"model": "tiny", "gpu": "0"}, {"model": "Org/Tiny-GGUF", "gpu": "1"}]
    same_card = [{"model": "tiny", "gpu": "0"}, {"model": "tiny", "gpu": "0", "port": 8081}]
    tasks: list[dict[str, Any]] = [{"ansible.builtin.set_fact": {"nvidia_gpu": two, "cacheable": True}}]
    for servers in (same_port, same_card, [{"model": "tiny", "ports": 1}], ["tiny"], [{"gpu": "0"}]):
        role = {"ansible.builtin.include_role": {"name": "tensorless.fleet.plan"}, "vars": {"plan_servers": servers}}
        tasks.append({"block": [role], "rescue": [{"ansible.builtin.debug": {"msg": "was refused"}}]})
    done = play(tmp_path, tasks, plan_recipes_dir=str(odd_recipes(tmp_path)))
    said = " ".join(done.stdout.split())
    assert done.returncode == 0, done.stdout + done.stderr
    assert "publish the same port (8080, 8080): give each its own port" in said, done.stdout
    assert "give a container of the same name" in said, done.stdout
    assert said.count("An entry is a dictionary with model and, where wanted, gpu, card, host,") == 6, (
        done.stdout
    )  # each is printed twice
    assert said.count("was refused") == 5


def test_the_digest_of_a_key_file(tmp_path: pathlib.Path) -> None:
    key = tmp_path / "key"
    key.write_bytes(b"abc")
    facts = seen.observe(
        [Recipe(changed())],
        Choice(cache="/none", api_key_file=str(key)),
        None,
        Runtime(),
        lambda name: None,
        lambda path: {},
    )
    assert facts.file_digests == {str(key): hashlib.sha256(b"abc").hexdigest()}
    assert facts.gpus.problem == "nvidia-smi not found"

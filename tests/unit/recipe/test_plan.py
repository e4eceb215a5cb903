# SPDX-License-Identifier: Apache-2.0
"""The plan: both commands, the hash, names, and what each command refuses."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from ansible_collections.tensorless.fleet.plugins.module_utils import _plan
from ansible_collections.tensorless.fleet.plugins.module_utils import _plan_rules as rules
from ansible_collections.tensorless.fleet.plugins.module_utils._cards import Gpus
from ansible_collections.tensorless.fleet.plugins.module_utils._plan import Plan, plan_model
from ansible_collections.tensorless.fleet.plugins.module_utils._plan_types import Choice, HostFacts
from ansible_collections.tensorless.fleet.plugins.module_utils._recipe_schema import LONGEST_REPO
from ansible_collections.tensorless.fleet.plugins.module_utils._refusal import Refusal

from tests.unit.recipe.recipe_made import DIGEST, VALID, changed, gpu, gpus, recipe

IMAGE = f"reg.example:5000/a/b@sha256:{DIGEST}"
SHA = "cd" * 32
BLOB = f"/cache/models--Org--Tiny-GGUF/blobs/{SHA}"
OTHER = "f" * 40
P40 = {"compute_capability": "6.1"}
NO_GPU = Gpus(problem="nvidia-smi not found")
HOST = HostFacts(gpus=gpus(gpu(0)), cpu_count=4, runtimes=("podman", "docker"))


def choice(**values: Any) -> Choice:
    return Choice(**{"cache": "/cache", **values})


def plans(recipes: Any = None, host: HostFacts = HOST, **values: Any) -> _plan.Planned:
    return plan_model(recipes or [recipe()], host, choice(**values))


def plan(recipe_values: dict[str, Any] | None = None, host: HostFacts = HOST, **values: Any) -> Plan:
    return plans([recipe(**(recipe_values or {}))], host, **values).plans[0]


def refuse(recipes: Any = None, host: HostFacts = HOST, **values: Any) -> Refusal:
    with pytest.raises(Refusal) as error:
        plans(recipes, host, **values)
    return error.value


def host(**values: Any) -> HostFacts:
    return dataclasses.replace(HOST, **values)


TAIL = ["-p", "127.0.0.1:8080:8080", "-v", f"{BLOB}:/models/tiny.gguf:ro"]
TAIL += ["-e", "OMP_NUM_THREADS=4", "-e", "GGML_A=1", "-e", "GGML_B=2", IMAGE, "-m", "/models/tiny.gguf"]
TAIL += ["--host", "0.0.0.0", "--port", "8080", "-c", "4096", "--alias", "Org/Tiny", "-t", "4", "-tb", "4"]
TAIL += ["-ngl", "99", "-sm", "none"]
NAME = "tensorless-org-tiny-gguf"
UUID = gpu(0).uuid


def test_podman() -> None:
    made = plan()
    device = ["--device", "nvidia.com/gpu=all", "--security-opt", "label=disable"]
    assert made["command"] == ["podman", "run", "-d", "--rm", "--name", NAME, *device, *TAIL]
    label = ["--label", f"org.tensorless.plan={made['plan_hash']}"]
    device[1] = f"nvidia.com/gpu={UUID}"
    assert made["exec"] == ["podman", "run", "--rm", "--name", NAME, *label, *device, *TAIL]


def test_docker() -> None:
    made = plan(runtime="docker")
    assert made["command"] == ["docker", "run", "-d", "--rm", "--name", NAME, "--gpus", "all", *TAIL]
    label = ["--label", f"org.tensorless.plan={made['plan_hash']}"]
    assert made["exec"] == ["docker", "run", "--rm", "--name", NAME, *label, "--gpus", f"device={UUID}", *TAIL]


def test_the_rest_of_a_plan() -> None:
    made = plan(host=host(cached={SHA: "partial"}))
    assert made["model"] == "Org/Tiny-GGUF"
    assert (made["name"], made["card"], made["status"]) == ("tiny", "x1", "released")
    assert made["recipe"] == VALID
    assert made["recipe_path"] == "recipes/Org/Tiny-GGUF/x1.toml"
    assert (made["published"], made["unpublished"], made["notes"]) == (True, [], [])
    assert (made["fits"], made["fits_reason"], made["detection"]) == ("yes", "GPU 0: Tesla X1", "matched")
    assert (made["untuned"], made["untuned_reasons"], made["untuned_label"]) == (False, [], None)
    assert (made["receipt_applies"], made["receipt_decode_tps"]) == (True, 30.5)
    revision = VALID["model"]["revision"]
    assert made["download"] == {
        "url": f"https://huggingface.co/Org/Tiny-GGUF/resolve/{revision}/gguf/tiny.gguf",
        "endpoint": "https://huggingface.co",
        "repo": "Org/Tiny-GGUF",
        "revision": revision,
        "file": "gguf/tiny.gguf",
        "sha256": SHA,
        "size_bytes": 1000,
        "cache": "/cache",
        "blob": BLOB,
        "snapshot": f"/cache/models--Org--Tiny-GGUF/snapshots/{revision}/gguf/tiny.gguf",
        "snapshot_link": f"../../../blobs/{SHA}",
        "cached": "partial",
    }
    assert (made["image"], made["pull_command"]) == (IMAGE, ["podman", "pull", IMAGE])
    assert (made["runtime"], made["gpu"], made["threads"], made["context"]) == ("podman", "all", 4, 4096)
    assert made["cards"] == [{"index": 0, "uuid": UUID, "name": "Tesla X1"}]
    assert (made["alias"], made["container_name"], made["instance"]) == ("Org/Tiny", NAME, NAME)
    assert (made["host"], made["port"]) == ("127.0.0.1", 8080)
    assert made["endpoint"] == "http://127.0.0.1:8080"
    assert made["health_url"] == "http://127.0.0.1:8080/health"
    assert (made["model_mount"], made["pn"], made["offload"]) == ("/models/tiny.gguf", "unknown", [])
    assert (made["api_key_file"], made["differences"]) == (None, [])
    assert plan({"receipt": ...})["receipt_decode_tps"] is None
    assert plan({"model__name": ...})["name"] is None
    assert plan()["download"]["cached"] == "no"
    assert plan(endpoint="")["download"]["endpoint"] == "https://huggingface.co"


@pytest.mark.parametrize(("cpus", "threads"), [(1, 1), (7, 7), (8, 8), (64, 8), (0, 1)])
def test_threads(cpus: int, threads: int) -> None:
    made = plan(host=host(cpu_count=cpus))
    assert made["threads"] == threads
    assert f"OMP_NUM_THREADS={threads}" in made["command"]


@pytest.mark.parametrize(
    ("address", "published", "url"),
    [
        ("127.0.0.1", "127.0.0.1:9000:8080", "http://127.0.0.1:9000"),
        ("0.0.0.0", "0.0.0.0:9000:8080", "http://127.0.0.1:9000"),
        ("::1", "[::1]:9000:8080", "http://[::1]:9000"),
        ("[::1]", "[::1]:9000:8080", "http://[::1]:9000"),
        ("::", "[::]:9000:8080", "http://[::1]:9000"),
        ("fd00::5", "[fd00::5]:9000:8080", "http://[fd00::5]:9000"),
    ],
)
def test_addresses(address: str, published: str, url: str) -> None:
    made = plan_model([recipe()], HOST, choice(host=address, port=9000)).plans[0]
    assert made["command"][made["command"].index("-p") + 1] == published
    assert (made["endpoint"], made["health_url"]) == (url, url + "/health")
    everywhere = address in ("0.0.0.0", "::")
    assert made["notes"] == ([f"it listens on every interface of this host (--host {address})"] if everywhere else [])


def test_the_order_of_the_environment_is_the_alphabet() -> None:
    made = plan({"run__env": {"b": "1", "B": "2", "_": "3", "A1": "4", "A": "5"}})
    words = made["command"]
    values = [words[at + 1] for at, word in enumerate(words) if word == "-e"]
    assert values == ["OMP_NUM_THREADS=4", "A=5", "A1=4", "B=2", "_=3", "b=1"]


def test_without_arguments_and_switches() -> None:
    made = plan({"run__args": ..., "run__env": ...}, extra_args=("-b", "1"))
    assert made["command"][-4:] == ["-tb", "4", "-b", "1"]


@pytest.mark.parametrize(
    ("recipe_values", "values"),
    [
        ({}, {"context": 1}),
        ({}, {"extra_args": ("-b", "1")}),
        ({}, {"revision": OTHER}),
        ({"status": "draft"}, {}),
        ({"model__size_bytes": 0}, {}),
    ],
)
def test_where_the_receipt_does_not_apply(recipe_values: dict[str, Any], values: dict[str, Any]) -> None:
    assert plan(recipe_values, command="info", **values)["receipt_applies"] is False


# -- which card ------------------------------------------------------------------------------------------------------


def test_all_in_print_and_one_card_by_uuid_in_what_runs() -> None:
    made = plan(host=host(gpus=gpus(gpu(0), gpu(1))))
    assert made["gpu"] == "all"
    assert f"nvidia.com/gpu={UUID}" in made["exec"]
    assert gpu(1).uuid not in " ".join(made["exec"])
    assert [card["index"] for card in made["cards"]] == [0]


@pytest.mark.parametrize("args", [[], ["-sm", "layer"], ["-sm", "none", "--split-mode", "row"]])
def test_a_recipe_that_splits_over_cards_gets_all_of_them(args: list[str]) -> None:
    two = host(gpus=gpus(gpu(0), gpu(1)))
    both = [gpu(0).uuid, gpu(1).uuid]
    podman = plan({"run__args": args}, two)["exec"]
    at = podman.index("--device")
    assert podman[at : at + 4] == ["--device", f"nvidia.com/gpu={both[0]}", "--device", f"nvidia.com/gpu={both[1]}"]
    docker = plan({"run__args": args}, two, runtime="docker")["exec"]
    assert docker[docker.index("--gpus") + 1] == f'"device={both[0]},{both[1]}"'


def test_a_named_card() -> None:
    made = plan(host=host(gpus=gpus(gpu(0), gpu(1))), gpu="1")
    assert "nvidia.com/gpu=1" in made["command"]
    assert f"nvidia.com/gpu={gpu(1).uuid}" in made["exec"]
    assert plan(host=host(gpus=gpus(gpu(0), gpu(1))), gpu="01")["gpu"] == "1"
    assert plan(host=host(gpus=gpus(gpu(0))), gpu="0", runtime="docker")["command"][7] == "device=0"


def test_a_card_without_uuid_goes_by_index_in_bus_order() -> None:
    made = plan(host=host(gpus=gpus(gpu(0, **P40), gpu(1, uuid=None))))
    assert "nvidia.com/gpu=1" in made["exec"]
    assert made["exec"][made["exec"].index("-e") + 1] == "CUDA_DEVICE_ORDER=PCI_BUS_ID"
    assert "CUDA_DEVICE_ORDER=PCI_BUS_ID" not in made["command"]
    assert made["cards"] == [{"index": 1, "uuid": None, "name": "Tesla X1"}]
    everyone = plan(host=host(gpus=gpus(gpu(0, uuid=None), gpu(1))))
    assert "nvidia.com/gpu=all" in everyone["exec"]
    assert everyone["cards"] == []


def test_card_skips_all_checks() -> None:
    odd = host(gpus=gpus(gpu(0, **P40, driver="390.157"), gpu(1)))
    made = plan(host=odd, card="x1")
    assert (made["detection"], made["gpu"], made["cards"]) == ("skipped", "all", [])
    assert "nvidia.com/gpu=all" in made["exec"]
    named = plan(host=odd, card="x1", gpu="1")
    assert (named["gpu"], [card["uuid"] for card in named["cards"]]) == ("1", [gpu(1).uuid])
    assert plan(host=odd, card="x1", gpu="7")["gpu"] == "7"
    assert refuse(host=odd, card="x9").message.startswith('no recipe for "Org/Tiny-GGUF" on card "x9"')


def test_each_card_gets_a_server() -> None:
    mixed = host(gpus=gpus(gpu(0), gpu(1, **P40), gpu(2)))
    planned = plans(host=mixed, gpu="each", port=8090)
    assert [(made["gpu"], made["port"], made["instance"]) for made in planned.plans] == [
        ("0", 8090, f"{NAME}-00000000"),
        ("2", 8091, f"{NAME}-00000002"),
    ]
    assert [made["command"][5] for made in planned.plans] == [NAME, NAME]
    assert [made["exec"][4] for made in planned.plans] == [f"{NAME}-00000000", f"{NAME}-00000002"]
    assert planned.skipped == [
        {
            "index": 1,
            "uuid": gpu(1).uuid,
            "name": "Tesla X1",
            "reason": "GPU 1 (Tesla X1, compute 6.1, 16269 MiB, driver 535.183.01) fits no recipe of Org/Tiny-GGUF, "
            "which needs compute capability 6.0 and at least 16000 MiB (x1)",
        }
    ]


def test_each_on_a_host_with_one_card_needs_no_suffix() -> None:
    assert [made["instance"] for made in plans(gpu="each").plans] == [NAME]
    odd = plans(host=host(gpus=gpus(gpu(0), gpu(1))), gpu="each", port=8091).plans
    assert [made["port"] for made in odd] == [8091, 8092]
    assert plan(gpu="each", suffix=True)["instance"] == f"{NAME}-00000000"


def test_each_where_none_fits_or_none_can_be_read() -> None:
    assert "fits this host's GPUs" in refuse(host=host(gpus=gpus(gpu(0, **P40))), gpu="each").message
    assert refuse(host=host(gpus=NO_GPU), gpu="each").message.startswith("cannot detect the GPU: nvidia-smi not found.")
    made = plans(host=host(gpus=NO_GPU), gpu="each", dry_run=True).plans
    assert [each["gpu"] for each in made] == ["all"]
    assert plan(gpu="each", card="x1")["gpu"] == "all"


def test_each_needs_room_for_its_ports() -> None:
    two = host(gpus=gpus(gpu(0), gpu(1)))
    error = refuse(host=two, gpu="each", port=65535)
    assert (error.message, error.rc) == ("port 65535 leaves no room for 2 servers: choose a lower one", 2)
    assert [made["port"] for made in plans(host=two, gpu="each", port=65534).plans] == [65534, 65535]


def test_a_suffix_without_uuid() -> None:
    assert plan(host=host(gpus=NO_GPU), card="x1", gpu="3", suffix=True)["instance"] == f"{NAME}-gpu3"


def test_nothing_is_skipped_where_nothing_was_looked_at() -> None:
    mixed = host(gpus=gpus(gpu(0), gpu(1, **P40)))
    assert len(plans(host=mixed).skipped) == 1
    assert plans(host=mixed, card="x1").skipped == []
    assert plans(host=host(gpus=NO_GPU), dry_run=True).skipped == []


# -- without a GPU ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["run", "serve", "pull"])
def test_starting_needs_a_gpu(command: str) -> None:
    error = refuse(host=host(gpus=NO_GPU), command=command)
    assert error.message == (
        "cannot detect the GPU: nvidia-smi not found. Install the NVIDIA driver, 525.60.13 or newer, up to the R580 "
        "branch; to only look at a recipe on a machine without the card, pass --card x1"
    )
    assert error.rc == 1
    for rehearsal in ({"dry_run": True}, {"assume_installed": True}):
        made = plan(host=host(gpus=NO_GPU), command=command, **rehearsal)
        assert (made["detection"], made["gpu"], made["fits"]) == ("unreadable", "all", "unknown")
        assert made["notes"] == [
            "no GPU can be read (nvidia-smi not found): the card and its driver are not checked yet"
        ]


@pytest.mark.parametrize("command", ["info", "bench", "models"])
def test_looking_needs_none(command: str) -> None:
    made = plan(host=host(gpus=NO_GPU), command=command)
    assert (made["detection"], made["card"], made["notes"]) == ("unreadable", "x1", [])
    both = [recipe(), recipe(card__id="x2")]
    assert "say which with --card (x1, x2)" in refuse(both, host(gpus=NO_GPU), command=command).message


def test_info_shows_a_recipe_that_does_not_fit() -> None:
    made = plan(host=host(gpus=gpus(gpu(0, **P40))), command="info")
    assert (made["detection"], made["fits"], made["gpu"]) == ("unmatched", "no", "all")
    assert plan(command="info", gpu="9")["gpu"] == "9"
    assert plan(host=host(gpus=gpus(gpu(0, driver="470.1"))), command="info")["detection"] == "matched"
    both = [recipe(), recipe(card__id="x2")]
    assert "say which with --card (x1, x2)" in refuse(both, host(gpus=gpus(gpu(0, **P40))), command="info").message


def test_bench_checks_the_card_but_not_the_driver() -> None:
    assert plan(host=host(gpus=gpus(gpu(0, driver="470.1"))), command="bench")["card"] == "x1"
    assert "no recipe for" in refuse(host=host(gpus=gpus(gpu(0, **P40))), command="bench").message
    assert "is older than" in refuse(host=host(gpus=gpus(gpu(0, driver="470.1")))).message


def test_stop_asks_for_no_card() -> None:
    assert plan(host=host(gpus=gpus(gpu(0, **P40))), command="stop")["container_name"] == NAME
    assert plans([recipe(), recipe(card__id="x2")], host(gpus=NO_GPU), command="stop").plans[0]["card"] == "x1"


# -- the runtime -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("asked", "installed", "got"),
    [
        ("auto", ("docker", "podman"), "podman"),
        ("auto", ("docker",), "docker"),
        ("docker", ("docker", "podman"), "docker"),
        ("auto", None, "podman"),
        ("docker", None, "docker"),
    ],
)
def test_runtime(asked: str, installed: Any, got: str) -> None:
    assert plan(host=host(runtimes=installed), runtime=asked)["runtime"] == got


@pytest.mark.parametrize("command", ["run", "serve", "pull", "stop"])
def test_a_missing_runtime(command: str) -> None:
    none = host(runtimes=())
    hint = "install podman or docker, with NVIDIA container support"
    assert refuse(host=none, command=command).message == f"neither podman nor docker is installed: {hint}"
    assert refuse(host=none, command=command, runtime="docker").message == f"docker is not installed: {hint}"
    assert plan(host=none, command=command, dry_run=True)["runtime"] == "podman"
    assert plan(host=none, command=command, assume_installed=True, runtime="docker")["runtime"] == "docker"


def test_info_and_bench_need_no_runtime() -> None:
    assert plan(host=host(runtimes=()), command="info")["runtime"] == "podman"
    assert plan(host=host(runtimes=()), command="bench", runtime="docker")["runtime"] == "docker"


# -- the hash --------------------------------------------------------------------------------------------------------


def test_what_has_an_effect_changes_the_hash_and_what_has_none_does_not() -> None:
    base = plan()["plan_hash"]
    assert len(base) == 64
    two = host(gpus=gpus(gpu(0), gpu(1)))
    effects = [
        plan(host=HOST, context=1),
        plan(host=HOST, extra_args=("-b", "1")),
        plan(host=HOST, port=8081),
        plan({"run__alias": "other"}),
        plan({"run__env": {"GGML_A": "2", "GGML_B": "2"}}),
        plan({"engine__image": f"a@sha256:{'00' * 31}01"}),
        plan({"model__sha256": "ee" * 32}),
        plan({"model__file": "other.gguf"}),
        plan(host=host(cpu_count=2)),
        plan(host=two, gpu="1"),
        plan(hardening={"read_only": True}),
        plan(api_key_file="/k"),
        plan(api_key_file="/k", host=host(file_digests={"/k": "1"})),
    ]
    hashes = [made["plan_hash"] for made in effects]
    assert base not in hashes
    assert len(set(hashes)) == len(hashes)
    none = [
        plan(),
        plan(cache="/elsewhere"),
        plan(host=HOST, runtime="docker"),
        plan(revision=OTHER, allow_draft=True),
        plan({"model__title": "x", "receipt": {}, "model__license": "y", "engine__release": "z"}),
        plan({"engine__image": f"mirror.example/x@sha256:{DIGEST}"}),
        plan({"card__min_driver": "525.1"}),
        plan(suffix=True),
        plan(host=two),
        plan(host=two, gpu="0"),
        plan({"model__hf_repo": "Moved/Tiny"}),
        plan(endpoint="https://hub.example"),
    ]
    assert {made["plan_hash"] for made in none} == {base}


def test_the_published_address_is_an_effect() -> None:
    other = plan_model([recipe()], HOST, choice(host="10.0.0.1")).plans[0]
    assert other["plan_hash"] != plan()["plan_hash"]


# -- keys and hardening ----------------------------------------------------------------------------------------------


def test_an_api_key_file_is_mounted_where_the_server_reads_it() -> None:
    made = plan(api_key_file="/etc/keys/a")
    assert made["api_key_file"] == "/etc/keys/a"
    at = made["exec"].index("-v")
    assert made["exec"][at + 2 : at + 4] == ["-v", "/etc/keys/a:/run/tensorless/api-key:ro"]
    assert made["exec"][-2:] == ["--api-key-file", "/run/tensorless/api-key"]
    assert "--api-key-file" not in made["command"]
    assert made["untuned_reasons"] == ["extra arguments --api-key-file ***"]
    both = plan(api_key_file="/etc/keys/a", extra_args=("--temp", "1"))
    assert both["untuned_reasons"] == ["extra arguments --temp 1 --api-key-file ***"]


@pytest.mark.parametrize("typed", [("--api-key-file", "/k", "-b", "1"), ("--api-key-file=/k", "-b", "1")])
def test_an_api_key_file_among_the_arguments_of_a_service(typed: tuple[str, ...]) -> None:
    made = plan(extra_args=typed, service=True)
    assert made["api_key_file"] == "/k"
    assert made["exec"][-4:] == ["-b", "1", "--api-key-file", "/run/tensorless/api-key"]
    assert made["command"][-len(typed) :] == list(typed)
    local = plan(extra_args=typed)
    assert local["api_key_file"] is None
    assert local["exec"][-len(typed) :] == list(typed)


@pytest.mark.parametrize("path", ["relative", "/a:b", "/a\nb", ""])
def test_an_api_key_file_has_a_plain_absolute_path(path: str) -> None:
    error = refuse(extra_args=("--api-key-file", path), service=True)
    assert (
        error.message.startswith("api_key_file must be an absolute path without ':', not ")
        or "newline" in error.message
    )
    assert error.rc == 2


@pytest.mark.parametrize("typed", ["--api-key", "--api-key=x", "--api_key", "-hft", "--hf-token"])
def test_a_secret_among_the_arguments_of_a_service(typed: str) -> None:
    error = refuse(extra_args=(typed, "secret"), service=True)
    assert "would show its secret in process lists" in error.message
    assert "api_key_file" in error.message
    assert "secret" not in error.message.replace("its secret", "")
    assert error.rc == 2
    assert plan(extra_args=(typed, "secret"))["command"][-2:] == [typed, "secret"]


def test_hardening_goes_before_the_image_of_what_runs() -> None:
    made = plan(hardening={"pids_limit": 512, "no_new_privileges": True})
    assert made["differences"] == ["--security-opt=no-new-privileges", "--pids-limit=512"]
    at = made["exec"].index(IMAGE)
    assert made["exec"][at - 2 : at] == made["differences"]
    assert "--pids-limit=512" not in made["command"]
    error = refuse(hardening={"unheard_of": True})
    assert (error.message.startswith("hardening has no option unheard_of"), error.rc) == (True, 2)


# -- PN files --------------------------------------------------------------------------------------------------------

OFF = ("-ngl", "10")
LABELS = {IMAGE: {rules.PN_CPU_LABEL: "exact"}}


def test_layers_of_a_pn_file_stay_on_the_card() -> None:
    error = refuse(host=host(pn={SHA: "yes"}, labels={IMAGE: {}}), extra_args=OFF)
    assert error.message.startswith("-ngl 10 would move layers of a PN file off the card")
    assert rules.PN_CPU_LABEL in error.message
    assert plan(host=host(pn={SHA: "yes"}, labels=LABELS), extra_args=OFF)["offload"] == ["-ngl 10"]
    assert plan(host=host(pn={SHA: "no"}, labels={IMAGE: {}}), extra_args=OFF)["notes"] == []
    assert plan(host=host(pn={SHA: "yes"}, labels={IMAGE: {}}))["pn"] == "yes"
    assert plan(host=host(pn={SHA: "yes"}, labels={IMAGE: {}}), extra_args=OFF, command="info")["offload"] == [
        "-ngl 10"
    ]


@pytest.mark.parametrize("facts", [{}, {"labels": {IMAGE: {}}}, {"pn": {SHA: "yes"}}])
def test_what_is_not_known_yet_is_noted(facts: dict[str, Any]) -> None:
    made = plan(host=host(**facts), extra_args=OFF)
    assert made["notes"] == [
        "-ngl 10 moves layers off the card: refused at the start if the file holds PN weights and the image does not "
        "say that its CPU path for them is exact"
    ]


def test_the_number_of_layers_comes_from_the_file_where_it_is_there() -> None:
    assert plan(host=host(block_count={SHA: 9}), extra_args=OFF)["offload"] == []
    assert plan(host=host(block_count={SHA: 10}), extra_args=OFF)["offload"] == ["-ngl 10"]


# -- names -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("repo", "name"),
    [
        ("Org/Model+v2~x", "tensorless-org-model-v2-x"),
        ("Org/A__b..C--d", "tensorless-org-a__b..c--d"),
        ("Org/Mod\u00e8le", "tensorless-org-mod-le"),
        ("Org/\u0130", "tensorless-org--"),
        ("Org/a++b", "tensorless-org-a--b"),
    ],
)
def test_container_names(repo: str, name: str) -> None:
    assert _plan.container_name(repo) == name


def test_the_longest_name_fits_a_unit_and_a_container() -> None:
    longest = "Org/" + "x" * (LONGEST_REPO - 4)
    assert len(plan({"model__hf_repo": longest}, suffix=True)["instance"]) == 200


# -- another card ----------------------------------------------------------------------------------------------------


def test_a_card_that_the_code_has_never_heard_of() -> None:
    data = {"card__id": "h9", "card__compute_capability": "11.2", "card__min_memory_mib": 1, "card__min_driver": "900"}
    made = plan({**data, "engine__arch": "sm112"}, host(gpus=gpus(gpu(0, compute_capability="11.2", driver="901.1"))))
    assert (made["card"], made["fits"], made["gpu"]) == ("h9", "yes", "all")


def test_a_plan_is_json_and_leaves_the_recipe_alone() -> None:
    import json

    before = changed()
    made = plan()
    assert json.loads(json.dumps(made)) == made
    assert before == VALID

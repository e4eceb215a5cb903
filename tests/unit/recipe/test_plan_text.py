# SPDX-License-Identifier: Apache-2.0
"""What people and programs are shown."""

from __future__ import annotations

import json
import shlex
from typing import Any

import pytest
from ansible_collections.tensorless.fleet.plugins.module_utils import _plan_text as text
from ansible_collections.tensorless.fleet.plugins.module_utils._cards import Gpus
from ansible_collections.tensorless.fleet.plugins.module_utils._plan import Plan, plan_model
from ansible_collections.tensorless.fleet.plugins.module_utils._plan_types import Choice, HostFacts
from ansible_collections.tensorless.fleet.plugins.module_utils._recipe import build_catalog, load_directory, resolve

from tests.conformance.frame import ROOT
from tests.unit.recipe.recipe_made import DIGEST, changed, gpu, gpus, recipe

NOT_FOUND = Gpus(problem="nvidia-smi not found")
CACHE = "/home/you/.cache/huggingface/hub"


def plan(recipe_values: dict[str, Any] | None = None, host: HostFacts | None = None, **values: Any) -> Plan:
    seen = host or HostFacts(gpus=gpus(gpu()), cpu_count=4)
    return plan_model([recipe(**(recipe_values or {}))], seen, Choice(**{"cache": "/cache", **values})).plans[0]


def released(name: str, **values: Any) -> Plan:
    recipes, _revision = resolve(load_directory(str(ROOT / "recipes"), "recipes/"), name)
    return plan_model(recipes, HostFacts(gpus=NOT_FOUND, cpu_count=32), Choice(**{"cache": CACHE, **values})).plans[0]


DOCUMENTED_INFO = """\
iamMrDuncan/Qwen3.8-27B-PN3-GGUF on p100: Qwen3.8-27B-PN3 (P100-native 3-bit, mix P0k+19)
  short name      pn3
  status          released
  recipe          recipes/iamMrDuncan/Qwen3.8-27B-PN3-GGUF/p100.toml
  fits this host  unknown (nvidia-smi not found)

Model
  repository  iamMrDuncan/Qwen3.8-27B-PN3-GGUF
  revision    c701b6690ec360b16d40f85df1cb76062e30cd38
  file        Qwen3.8-27B-PN3-P0k19.gguf
  sha256      15ce2d4469673f1f1753c55de3780cfe04311dd6f05cb41633d73df128e91476
  size        12.95 GB (12954114496 bytes)
  license     Apache-2.0 (from Qwen/Qwen3.8-27B)
"""
DOCUMENTED_CARD = """\
  cached      no

Card
  title    NVIDIA Tesla P100 16 GB
  compute  6.0
  memory   at least 16000 MiB
  driver   525.60.13 or newer

Engine
  release  engine-v0.1.0
  arch     sm60
"""


def test_info_begins_as_documented() -> None:
    shown = text.info_text(released("pn3", command="info"))
    assert shown.startswith(DOCUMENTED_INFO)
    assert DOCUMENTED_CARD in shown
    assert "\n\nRun\n  context   65536\n  threads   8 (at most 8)\n" in shown
    assert "  decode   30.06 tok/s (short)\n  prefill  121.4 tok/s (ctx_4k)\n" in shown
    assert shown.index("Engine\n") < shown.index("Run\n") < shown.index("Receipt\n")


def test_info_of_a_bare_recipe() -> None:
    bare = {
        "model__name": ...,
        "model__title": ...,
        "card__title": ...,
        "receipt": ...,
        "run__args": ...,
        "run__env": ...,
    }
    shown = text.info_text(plan(bare))
    assert shown.startswith("Org/Tiny-GGUF on x1\n  status          released\n")
    assert "\nCard\n  compute  6.0\n" in shown
    assert "  args      none\n" in shown
    assert "  switches  none\n" in shown
    assert "Receipt" not in shown
    assert "Receipt" not in text.info_text(plan({"receipt": {"summary": "", "decode_tps": {}}}))


def test_info_marks_what_is_untuned_unpublished_or_noted() -> None:
    everywhere = Choice(cache="/cache", command="info", context=1, host="0.0.0.0")
    shown = text.info_text(plan_model([recipe(model__size_bytes=0)], HostFacts(), everywhere).plans[0])
    lines = shown.splitlines()
    assert "  status          released, unpublished" in lines
    assert "  NOT PUBLISHED: model.size_bytes still to come; it cannot be pulled or run" in lines
    assert any(line.startswith("  UNTUNED: --context 1 instead of 4096. This is not") for line in lines)
    assert "  note: it listens on every interface of this host (--host 0.0.0.0)" in lines
    plain = text.info_text(plan())
    assert not any(word in plain for word in ("UNTUNED", "NOT PUBLISHED", "note:"))


def test_the_command_in_info_is_the_plan_and_can_be_pasted() -> None:
    made = plan({"run__args": ["--x", "a b", "it's"]}, command="info")
    shown = text.info_text(made).split("  command\n")[1].split("\n\n")[0]
    assert shlex.split(shown.replace("\\\n", " ")) == made["command"]
    assert shown.splitlines()[0] == "    podman run -d --rm --name tensorless-org-tiny-gguf \\"
    assert shown.splitlines()[1] == "        --device nvidia.com/gpu=all \\"


def test_switches_and_receipt_order() -> None:
    rates = {"zeta": 12345.678, "ctx_65k": 4.0, "alpha": 2.0, "ctx_32k": 3.0, "ctx_4k": 121.4, "short": 9}
    receipt = {"summary": "S", "source": "W", "decode_tps": {}, "prefill_tps": rates, "notes": ["one", "two"]}
    shown = text.info_text(plan({"receipt": receipt}))
    assert "  switches\n    GGML_A=1\n    GGML_B=2\n  command\n" in shown
    assert shown.endswith(
        "Receipt\n  summary  S\n  source   W\n  prefill  9 tok/s (short)\n  prefill  121.4 tok/s (ctx_4k)\n"
        "  prefill  3 tok/s (ctx_32k)\n  prefill  4 tok/s (ctx_65k)\n  prefill  2 tok/s (alpha)\n"
        "  prefill  12345.678 tok/s (zeta)\n  note     one\n  note     two\n"
    )


def test_control_characters_reach_no_terminal() -> None:
    shown = text.info_text(plan({"receipt": {"summary": "a\x1b[31m\nb", "notes": ["\x07"]}}))
    assert "\x1b" not in shown
    assert "\x07" not in shown
    assert "  summary  a [31m b\n" in shown


def test_secrets_are_masked_wherever_a_command_is_shown() -> None:
    made = plan(extra_args=("--api-key", "sesame"))
    assert made["command"][-1] == "sesame"
    for shown in (text.info_text(made), json.dumps(text.info_json(made)), text.dry_run_text(made, "x", ("serve",))):
        assert "sesame" not in shown
        assert "***" in shown


def test_info_json_has_the_documented_keys() -> None:
    made = plan(context=1)
    shown = text.info_json(made)
    documented = [
        "recipe",
        "published",
        "unpublished",
        "fits",
        "untuned",
        "download",
        "runtime",
        "gpu",
        "threads",
        "command",
        "endpoint",
    ]
    ours = ["untuned_reasons", "untuned_label", "receipt_applies"]
    assert sorted(shown) == sorted(documented + ours)
    assert sorted(shown["download"]) == ["blob", "cached", "size_bytes", "snapshot", "url"]
    assert (shown["untuned"], shown["fits"], shown["gpu"]) == (True, "yes", "all")
    assert shown["command"] == made["command"]
    assert shown["download"]["blob"] == made["download"]["blob"]


DRY_RUN = """\
dry run of 'tensorless run iamMrDuncan/Qwen3.8-27B-PN3-GGUF': nothing is pulled, downloaded or started.
recipe:   iamMrDuncan/Qwen3.8-27B-PN3-GGUF on p100 (released), from recipes/iamMrDuncan/Qwen3.8-27B-PN3-GGUF/p100.toml
gpu:      chosen with --card; GPU detection skipped; the container gets GPU all
runtime:  podman

# 1. pull the engine image, unless 'podman image inspect' finds it
podman pull \\
    ghcr.io/iammrduncan/tensorless-engine@sha256:35409ff97c2f518e468790c28bd19206ae777a945fcffe5775585e28fd9939a7

# 2. download the model (12.95 GB), resuming a partial download, and check its sha256 \
15ce2d4469673f1f1753c55de3780cfe04311dd6f05cb41633d73df128e91476
GET https://huggingface.co/iamMrDuncan/Qwen3.8-27B-PN3-GGUF/resolve/c701b6690ec360b16d40f85df1cb76062e30cd38/\
Qwen3.8-27B-PN3-P0k19.gguf
    into /home/you/.cache/huggingface/hub/models--iamMrDuncan--Qwen3.8-27B-PN3-GGUF/blobs/\
15ce2d4469673f1f1753c55de3780cfe04311dd6f05cb41633d73df128e91476
"""


def test_a_dry_run_begins_as_documented() -> None:
    made = released("pn3", card="p100", dry_run=True)
    shown = text.dry_run_text(made, "tensorless run iamMrDuncan/Qwen3.8-27B-PN3-GGUF", ("pull", "serve"))
    assert shown.startswith(DRY_RUN)
    assert "\n# 3. link it into the snapshot" in shown
    assert "\n# 4. start the server\npodman run -d --rm --name tensorless-iammrduncan" in shown
    assert shown.endswith("\n# 5. wait until the model is loaded (up to 20m)\nGET http://127.0.0.1:8080/health\n")
    link = shown.split("look\n")[1].split("\n\n")[0]
    assert shlex.split(link.replace("\\\n", "")) == [
        *("ln", "-s", made["download"]["snapshot_link"], made["download"]["snapshot"])
    ]


def test_the_steps_of_a_dry_run() -> None:
    made = plan(dry_run=True, context=1)
    pull = text.dry_run_text(made, "tensorless pull tiny", ("pull",), token=True)
    assert "# 3. link" in pull
    assert "# 4." not in pull
    assert "    with the token of HF_TOKEN\n    into /cache/" in pull
    serve = text.dry_run_text(made, "tensorless serve tiny", ("serve",))
    assert "# 1. start the server\n" in serve
    assert "# 2. wait" in serve
    assert "# 3." not in serve
    assert "HF_TOKEN" not in serve
    assert made["untuned_label"] + "\n" in serve


def test_a_dry_run_shows_notes_and_placeholders() -> None:
    made = plan({"status": "draft", "model__size_bytes": 0}, dry_run=True, allow_draft=True)
    shown = text.dry_run_text(made, "x", ("serve",))
    assert "recipe:   Org/Tiny-GGUF on x1 (draft, unpublished), from recipes/" in shown
    assert "note:     using the draft recipe for Org/Tiny-GGUF on x1 (--allow-draft)\n" in shown


@pytest.mark.parametrize(
    ("host", "values", "line"),
    [
        (gpus(gpu()), {}, "GPU 0: Tesla X1; the container gets GPU all"),
        (gpus(gpu(), gpu(1, compute_capability="6.1")), {}, "GPU 0: Tesla X1; the container gets GPU 0"),
        (gpus(gpu(), gpu(1)), {"gpu": "1"}, "GPU 1: Tesla X1; the container gets GPU 1"),
        (
            gpus(gpu()),
            {"card": "x1", "gpu": "3"},
            "chosen with --card; GPU detection skipped; the container gets GPU 3",
        ),
        (
            NOT_FOUND,
            {},
            "none can be read here (nvidia-smi not found); the model's only recipe is shown; "
            "the container gets GPU all",
        ),
        (
            gpus(gpu(compute_capability="6.1")),
            {"command": "info"},
            "no: no GPU has compute capability 6.0 and at least 16000 MiB; the container gets GPU all",
        ),
    ],
)
def test_the_gpu_line(host: Gpus, values: dict[str, Any], line: str) -> None:
    assert text.gpu_line(plan(host=HostFacts(gpus=host), **{"dry_run": True, **values})) == line


def test_the_table_of_models() -> None:
    catalog = load_directory(str(ROOT / "recipes"), "recipes/")
    rows = text.model_rows(catalog, NOT_FOUND, {})
    assert text.models_text(rows, NOT_FOUND) == (
        "MODEL                                            CARD  STATUS    ENGINE         FITS     CACHED\n"
        "iamMrDuncan/Qwen3.8-27B-PN3-GGUF                 p100  released  engine-v0.1.0  unknown  no\n"
        "iamMrDuncan/Qwen3.8-27B-UD-IQ3_XXS-Q3Floor-GGUF  p100  released  engine-v0.1.0  unknown  no\n"
        "fits is unknown: nvidia-smi not found\n"
    )
    assert "fits is unknown" not in text.models_text(rows, gpus())


def test_rows_of_models() -> None:
    other = changed(card__id="x2", status="draft", model__size_bytes=0, model__title=..., model__name=...)
    catalog = build_catalog([("Org/Tiny-GGUF/x1.toml", changed(), []), ("Org/Tiny-GGUF/x2.toml", other, [])])
    rows = text.model_rows(catalog, gpus(gpu()), {"cd" * 32: "partial"})
    assert rows[0] == {
        "model": "Org/Tiny-GGUF",
        "name": "tiny",
        "card": "x1",
        "title": "Tiny",
        "status": "released",
        "published": True,
        "release": "engine-v1",
        "arch": "sm60",
        "fits": "yes",
        "cached": "partial",
    }
    assert [row["title"] for row in rows] == ["Tiny", None]
    assert "x2    draft, unpublished  engine-v1  yes   partial\n" in text.models_text(rows, gpus(gpu()))
    assert [row["card"] for row in text.model_rows(catalog, gpus(), {}, card="x2")] == ["x2"]
    assert text.model_rows(catalog, gpus(), {})[0]["cached"] == "no"


def test_capabilities() -> None:
    other = changed(card__id="x2", card__title=..., engine__arch="sm70")
    catalog = build_catalog([("Org/Tiny-GGUF/x1.toml", changed(), []), ("Org/Tiny-GGUF/x2.toml", other, [])])
    shown = text.capabilities(catalog, "1.2", "abc", "linux/amd64")
    assert {key: shown[key] for key in ("name", "version", "commit", "platform", "recipe_schema", "runtimes")} == {
        "name": "tensorless",
        "version": "1.2",
        "commit": "abc",
        "platform": "linux/amd64",
        "recipe_schema": 1,
        "runtimes": ["podman", "docker"],
    }
    base = {"compute_capability": "6.0", "min_memory_mib": 16000, "min_driver": "525.60.13"}
    assert shown["cards"] == [
        {"id": "x1", "title": "Card X1", "arch": "sm60", **base},
        {"id": "x2", "title": None, "arch": "sm70", **base},
    ]
    assert shown["recipes"][1] == {
        "model": "Org/Tiny-GGUF",
        "name": "tiny",
        "card": "x2",
        "status": "released",
        "published": True,
        "release": "engine-v1",
        "arch": "sm70",
    }
    both = load_directory(str(ROOT / "recipes"))
    assert [card["id"] for card in text.capabilities(both, "", "", "")["cards"]] == ["p100"]


def test_command_lines() -> None:
    command = ["docker", "run", "-d", "--rm", "--name", "n", "-e", f"A=x@sha256:{DIGEST}", f"i@sha256:{DIGEST}", "-m"]
    assert text.command_lines([*command, "a@sha256:b"]) == [
        "docker run -d --rm --name n",
        f"    -e A=x@sha256:{DIGEST}",
        f"    i@sha256:{DIGEST}",
        "    -m a@sha256:b",
    ]
    assert text.command_text(["podman", "pull", f"i@sha256:{DIGEST}"]) == f"podman pull \\\n    i@sha256:{DIGEST}"


def test_gigabytes() -> None:
    assert text.gigabytes(12954114496) == "12.95 GB"
    assert text.gigabytes(0) == "0.00 GB"

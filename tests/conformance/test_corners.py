# SPDX-License-Identifier: Apache-2.0
"""Corners of areas 1 to 6 that the handed cases leave out, in their format and by the same runner."""

from __future__ import annotations

from typing import Any

import pytest

from tests.conformance.__main__ import drivers, run_case

PN3 = "iamMrDuncan/Qwen3.8-27B-PN3-GGUF"
Q3 = "iamMrDuncan/Qwen3.8-27B-UD-IQ3_XXS-Q3Floor-GGUF"
ONES, DIGEST = "1" * 40, "a" * 64
REVISION = "c701b6690ec360b16d40f85df1cb76062e30cd38"
SHA256 = "15ce2d4469673f1f1753c55de3780cfe04311dd6f05cb41633d73df128e91476"
BLOB = f"/c/models--iamMrDuncan--Qwen3.8-27B-PN3-GGUF/blobs/{SHA256}"
DRIVERS, _broken = drivers()
CASES: list[Any] = []


def add(area: str, given: dict[str, Any], expect: dict[str, Any]) -> None:
    case = {"id": f"{area}-{len(CASES)}", "area": area, "given": given, "expect": expect}
    CASES.append(pytest.param(case, id=case["id"]))


def put(dotted: str, value: Any) -> dict[str, Any]:
    return {"op": "set", "path": dotted.split("."), "value": value}


def file(*patch: dict[str, Any], path: str = f"{PN3}/p100.toml", base: str = "pn3") -> dict[str, Any]:
    return {"path": path, "base": base, "patch": list(patch)}


def good(outcome: str = "accepted", **more: Any) -> dict[str, Any]:
    return {"outcome": outcome, "failed": False, **more}


def bad(*words: str, **more: Any) -> dict[str, Any]:
    return {"outcome": "refused", "failed": True, "message_mentions": list(words), **more}


USAGE = {"outcome": "refused", "failed": True, "exit_code": 2}

# -- 1: recipe files -------------------------------------------------------------------------------------------------

for value in (1.0, True, "1"):
    add("recipe_schema", {"files": [file(put("schema", value))]}, bad("schema"))
add("recipe_schema", {"files": [file(put("schema", 2), put("later", 1))]}, bad("update", "schema"))
for key, value in (
    ("model.size_bytes", -1),
    ("engine.image", f"ghcr.io/x/y:1@sha256:{DIGEST}"),
    ("engine.image", f"ghcr.io/x/y@sha256:{DIGEST.upper()}"),
    ("run.args", ["--port=1"]),
    ("run.args", ["--threads-http", "4", "-tb"]),
    ("run.env", {"A-B": "1"}),
    ("run.env", {"A": True}),
    ("run.env", {"OMP_NUM_THREADS": "8"}),
    ("receipt.decode_tps", {"short": -0.1}),
    ("receipt.prefill_tps", {"x": "12"}),
    ("receipt.notes", "text"),
    ("model.title", "a\nb"),
    ("model.file", "/abs.gguf"),
    ("model.file", "a/./b.gguf"),
    ("model.file", "a/b.gguf/"),
    ("model.revision", "main"),
    ("model.name", PN3.lower()),
    ("model.name", "Pn3"),
    ("card.compute_capability", "6"),
    ("card.min_driver", "525."),
    ("card.min_memory_mib", 0),
):
    add("recipe_schema", {"files": [file(put(key, value))]}, bad(key))
for key, value in (
    ("engine.image", f"localhost:5000/y@sha256:{DIGEST}"),
    ("engine.image", f"y@sha256:{DIGEST}"),
    ("engine.image", f"docker.io/library/a/b/c__d@sha256:{DIGEST}"),
    ("run.args", ["--threads-http", "4", "-cb", "--modelx", "-mg", "0", "--model-url", "x"]),
    ("run.args", []),
    ("run.env", {}),
    ("run.env", {"_A1": "", "a": "x=y z"}),
    ("run.alias", "a/b.c_d-e"),
    ("model.file", "sub dir/b..gguf"),
    ("card.min_driver", "525"),
):
    add("recipe_schema", {"files": [file(put(key, value))]}, good("loads", models=[PN3]))
add("recipe_schema", {"files": [file(put("model.size_bytes", 0))]}, good("loads", published={PN3: False}))
add("recipe_schema", {"files": [file(put("receipt.note", []))]}, bad("unknown keys", "receipt.note"))
add("recipe_schema", {"files": [file(put("receipts", {}))]}, bad("unknown keys", "receipts"))
add(
    "recipe_schema",
    {"files": [file(put("run.args", ["-m"]), put("run.context", 0), put("model.license", ""))]},
    bad("run.args", "run.context", "model.license", problems_min=3),
)
add(
    "recipe_schema",
    {"files": [file(put("receipt.decode_tps", {"z": 1, "ctx_65k": 2.5, "a": 3, "ctx_4k": 1, "short": 0}))]},
    good("loads", display_order={"decode_tps": ["short", "ctx_4k", "ctx_65k", "a", "z"]}),
)
same_name = file(put("model.name", "pn3"), path=f"{Q3}/p100.toml", base="q3floor")
add("recipe_schema", {"files": [file(), same_name]}, bad("pn3", "short name"))
other_case = file(put("model.hf_repo", PN3.upper()), path=f"{PN3.upper()}/p100.toml", base="q3floor")
add("recipe_schema", {"files": [file(), other_case]}, bad("case"))
second_card = file(put("card.id", "p100-16"), path=f"{PN3}/p100-16.toml")
add("recipe_schema", {"files": [second_card, file()]}, good("loads", cards={PN3: ["p100", "p100-16"]}))
add("recipe_schema", {"files": [file(path=f"{PN3}/v100.toml")]}, bad("card.id", "p100", "v100"))
add("recipe_schema", {"files": [file(path="Other/Repo/p100.toml")]}, bad("model.hf_repo"))
ignored = ("p100.toml", f"{PN3}/README.md", f"{PN3}/deep/er/p100.toml", f"{PN3}/p100.TOML", f"{PN3}/p100.toml.bak")
add(
    "recipe_schema",
    {"files": [file(), *({"path": path, "text": "( no TOML"} for path in ignored)]},
    good("loads", models=[PN3]),
)
add("recipe_schema", {"files": [{"path": f"{PN3}/p100.toml", "text": "schema = 1\nschema = 1\n"}]}, bad("p100.toml"))
bad_threads = file(put("run.threads_max", -3), path=f"{Q3}/p100.toml", base="q3floor")
both_bad = [file(put("model.size_bytes", "x")), bad_threads]
add("recipe_schema", {"files": both_bad}, bad(PN3, Q3, "size_bytes", "threads_max", problems_min=2))

# -- 2: MODEL --------------------------------------------------------------------------------------------------------


def model(name: str | None, expect: dict[str, Any], command: str = "run", **more: Any) -> None:
    add("model_argument", {"recipes": "released", "command": command, "model": name, **more}, expect)


for name in ("PN3", f"{PN3}/p100", " pn3"):
    model(name, bad("no recipe for"))
for name in (f"{PN3}@", "", "pn3@main", f"{PN3}@{REVISION.upper()}"):
    model(name, USAGE, allow_draft=True)
for command in ("capabilities", "version", "doctor", "models"):
    model("pn3", USAGE, command)
foreign = f"pn3@{ONES}"
for command in ("run", "serve", "pull"):
    model(foreign, bad("--allow-draft"), command)
    model(foreign, good("resolves", hf_repo=PN3, revision=ONES, untuned=True), command, allow_draft=True)
for command in ("info", "bench"):
    model(foreign, good("resolves", revision=ONES, untuned=True), command)
model(foreign, good("resolves"), "stop")
TWO = [file(), file(put("card.id", "v100"), put("card.compute_capability", "7.0"), path=f"{PN3}/v100.toml")]

# -- 3: cards --------------------------------------------------------------------------------------------------------


def p100(index: int = 0, **more: Any) -> dict[str, Any]:
    card = {"name": "Tesla P100-PCIE-16GB", "compute_cap": "6.0", "memory_mib": 16269, "driver": "535.183.01"}
    return {"index": index, **card, **more}


def p40(index: int = 0) -> dict[str, Any]:
    return p100(index, name="Tesla P40", compute_cap="6.1", memory_mib=24576)


def card(gpus: list[Any] | None, expect: dict[str, Any], command: str = "run", **more: Any) -> None:
    listed = {"nvidia_smi": "absent"} if gpus is None else {"nvidia_smi": "present", "gpus": gpus}
    add("gpu_selection", {"recipe": "pn3", "command": command, **listed, **more}, expect)


model("pn3", bad("--card", "p100", "v100"), "info", recipes=TWO, nvidia_smi="absent")
model("pn3", bad("a100", "p100", "v100"), recipes=TWO, card="a100")
v100_first = [p100(0, compute_cap="7.0"), p100(1)]
model("pn3", good("resolves", card="v100"), recipes=TWO, nvidia_smi="present", gpus=v100_first)
model("pn3", bad("no recipe for", "6.0", "7.0"), recipes=TWO, nvidia_smi="present", gpus=[p40()])

card([], bad("no recipe for", "fits this host's gpus"))
for unread in (None, "[N/A]", "[Unknown Error]", ""):
    card([p100(memory_mib=unread)], bad("no recipe for"))
    card([p100(compute_cap=unread)], bad("no recipe for"))
    card([p100(driver=unread)], bad("driver", "525.60.13"))
card([p40(), p100(1)], good("selected", gpu_index=1, container_gpu="1"), gpu=1)
card([p100(), p40(1)], good("selected", gpu_index=0, container_gpu="0"), gpu=0)
card([p100(), p100(1, memory_mib=None)], good("selected", container_gpu="0"))
card([p100(2, compute_cap="6.1"), p100(10)], good("selected", gpu_index=10, container_gpu="10"))
card([p40(), p100(1)], good("selected", container_gpu="1", checks_skipped=True), card="p100", gpu=1)
card(None, good("selected", container_gpu="3", checks_skipped=True), card="p100", gpu=3, dry_run=True)
card(None, good("selected", container_gpu="all", checks_skipped=True), "serve", card="p100")
card(None, good("selected", container_gpu="2"), gpu=2, dry_run=True)
card([p100()], bad("no gpu 1"), gpu=1, dry_run=True)
for driver in ("525.60.12", "525.60", "470"):
    card([p100(driver=driver)], bad("is older than", "525.60.13"))
    card([p100(driver=driver)], bad("is older than", "525.60.13"), dry_run=True)
    card([p100(driver=driver)], good("selected"), "bench")
    card([p100(driver=driver)], good("selected", fits="no"), "info")
for driver in ("525.60.13", "525.60.13.0", "526", "580.999"):
    card([p100(driver=driver)], good("selected", container_gpu="all", fits="yes"))
card([p100(driver="581.0")], {"outcome": "refused_or_flagged", "message_mentions_any": ["580"]})
card([p100(driver="590.1")], good("selected", fits="no"), "info")
for gpus in ([], [p40()]):
    card(gpus, good("selected", fits="no"), "info")
    card(gpus, good("reported", fits="no"), "models")
    card(gpus, good("selected"), "stop")
card([p100(driver="470.1.2")], good("reported", fits="no"), "models")
card([p40(), p100(1)], good("reported", fits="yes"), "models")
for command in ("run", "pull", "serve"):
    card(None, bad("cannot detect", "nvidia-smi not found"), command)
card(None, good("selected"), "stop")

# -- 4: the command --------------------------------------------------------------------------------------------------


def argv(expect: dict[str, Any], **more: Any) -> None:
    plain = {"recipe": "pn3", "runtime": "podman", "container_gpu": "all", "cpu_count": 32, "cache": "/c"}
    rest = {"host": "127.0.0.1", "port": 8080, "context": None, "extra_args": []}
    add("container_command", {**plain, **rest, **more}, {"failed": False, **expect})


for host in ("::1", "[::1]"):
    argv({"argv_contains": ["-p", "[::1]:8080:8080", "-v", f"{BLOB}:/models/Qwen3.8-27B-PN3-P0k19.gguf:ro"]}, host=host)
argv({"argv_contains": ["-p", "0.0.0.0:1:8080"]}, host="0.0.0.0", port=1)
argv({"argv_contains": ["--gpus", "device=12"], "argv_lacks": ["--security-opt"]}, runtime="docker", container_gpu="12")
argv({"argv_contains": ["-v", f"{BLOB}:/models/b.gguf:ro"]}, patch=[put("model.file", "a/b.gguf")])
sorted_env = ["-e", "OMP_NUM_THREADS=8", "-e", "A=x=y z", "-e", "B=2", "-e", "a=3"]
argv({"argv_contains": sorted_env}, patch=[put("run.env", {"a": "3", "B": "2", "A": "x=y z"})])
argv({"threads": 3, "argv_contains": ["-t", "3", "-tb", "3"]}, cpu_count=16, patch=[put("run.threads_max", 3)])
argv({"argv_ends": ["--jinja", "--temp", "0.7", "a b"]}, extra_args=["--temp", "0.7", "a b"])
argv({"argv_contains": ["--alias", "x/y"]}, patch=[put("run.alias", "x/y")])
argv({"argv_contains": ["-c", "70000"]}, context=70000)
argv({"argv_ends": ["-tb", "8"]}, patch=[{"op": "unset", "path": ["run", name]} for name in ("args", "env")])
argv({"argv0": "docker"}, runtime="auto", installed=["docker"])
argv({"argv0": "podman"}, runtime="auto", installed=["docker", "podman"])
argv(bad("docker"), runtime="docker", installed=["podman"])
argv(bad("podman", "docker"), runtime="auto", installed=[])
argv(bad(":"), cache="/c:d")

# -- 5: untuned ------------------------------------------------------------------------------------------------------


def untuned(*reasons: str, command: str = "run", **more: Any) -> None:
    expect = {"untuned": bool(reasons), "failed": False, "reasons": list(reasons)}
    add("untuned", {"recipe": "pn3", "command": command, **more}, expect)


foreign_reason = f"revision {ONES} instead of {REVISION}"
untuned("extra arguments --system-prompt 'a b'", extra_args=["--system-prompt", "a b"])
untuned("extra arguments ''", extra_args=[""])
untuned("extra arguments --api-key ***", extra_args=["--api-key", "s3cret"])
untuned("extra arguments --api-key=***", extra_args=["--api-key=s3cret"])
untuned("extra arguments --ctx-sizeX 3", extra_args=["--ctx-sizeX", "3"])
untuned("--context 131072 instead of 65536", command="serve", context=131072)
untuned(foreign_reason, command="info", model_revision=ONES)
untuned(
    "--context 1024 instead of 65536",
    "extra arguments --temp 0.7",
    foreign_reason,
    context=1024,
    extra_args=["--temp", "0.7"],
    model_revision=ONES,
    allow_draft=True,
)
untuned(port=9000, host="0.0.0.0", runtime="docker", cache="/x", gpu=0)
untuned(allow_draft=True)

# -- 6: status and refusals ------------------------------------------------------------------------------------------

DRAFT, EMPTY = put("status", "draft"), put("model.revision", "0" * 40)


def status(expect: dict[str, Any], *patch: dict[str, Any], command: str = "run", **more: Any) -> None:
    switches = {"allow_draft": False, "dry_run": False}
    add("status_refusal", {"recipe": "pn3", "command": command, "patch": list(patch), **switches, **more}, expect)


for command in ("pull", "serve", "run"):
    status(bad("draft", "--allow-draft"), DRAFT, command=command)
    status(bad("draft", "--allow-draft"), DRAFT, command=command, dry_run=True)
    status(bad("not published"), put("model.size_bytes", 0), command=command, allow_draft=True)
    status(good("allowed", shown=True, pulled=False, started=False), EMPTY, command=command, dry_run=True)
    status(bad("--allow-draft"), command=command, model_revision=ONES, dry_run=True)
note = f"note: using the draft recipe for {PN3} on p100 (--allow-draft)"
status(good("allowed", note_exact=note), DRAFT, allow_draft=True)
status(good("allowed", shown=True), DRAFT, EMPTY, dry_run=True, allow_draft=True)
status(good("allowed", output_contains=["NOT PUBLISHED"]), DRAFT, EMPTY, command="info")
status(good("allowed", status_column="draft, unpublished"), DRAFT, EMPTY, command="models")
unpublished_image = put("engine.image", f"a@sha256:{'0' * 64}")
status(good("allowed", status_column="released, unpublished"), unpublished_image, command="models")
for command in ("stop", "bench"):
    status(good("allowed"), DRAFT, command=command)
    status(good("allowed"), EMPTY, command=command)
status(good("allowed"), DRAFT, command="stop", dry_run=True)
status(bad("-tb", exit_code=2), extra_args=["-tb=4"])
status(bad("--alias", exit_code=2), extra_args=["--temp", "1", "--alias", "x"])
for command in ("bench", "models", "pull", "stop"):
    status(USAGE, command=command, extra_args=["x"])
for refused in ({"port": 70000}, {"context": 0}, {"context": -5}, {"gpu": -1}, {"gpu": "x"}, {"runs": 5}):
    status(USAGE, **refused)
for refused in ({"runtime": "Podman"}, {"cache": "/a:b"}, {"host": ""}, {"host": "999.1.1.1"}):
    status(USAGE, **refused)
for refused in ({"runs": -1}, {"tokens": 0}):
    status(USAGE, command="bench", **refused)
status(good("allowed"), command="bench", runs=1, tokens=2)


@pytest.mark.parametrize("case", CASES)
def test_corner(case: dict[str, Any]) -> None:
    assert run_case(case, DRIVERS[case["area"]], None) == []

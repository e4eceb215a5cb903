# SPDX-License-Identifier: Apache-2.0
"""Bad usage, drafts, placeholders, labels, and what moves layers off a card."""

from __future__ import annotations

from typing import Any

import pytest
from ansible_collections.tensorless.fleet.plugins.module_utils import _plan_rules as rules
from ansible_collections.tensorless.fleet.plugins.module_utils._plan_types import Choice
from ansible_collections.tensorless.fleet.plugins.module_utils._recipe_schema import OWNED_FLAGS
from ansible_collections.tensorless.fleet.plugins.module_utils._refusal import Refusal

from tests.unit.recipe.recipe_made import recipe

PINNED = "0123456789abcdef0123456789abcdef01234567"
OTHER = "f" * 40
END = "This is not the configuration the receipt measured; its numbers do not apply."


def choice(**values: Any) -> Choice:
    return Choice(**{"cache": "/cache", **values})


GOOD: dict[str, list[Any]] = {
    "port": [1, 8080, 65535],
    "host": ["127.0.0.1", "0.0.0.0", "::", "fe80::1", "100.64.0.7", "[::1]"],
    "runtime": ["auto", "podman", "docker"],
    "context": [None, 1, 2**63 - 1],
    "runs": [1, 3],
    "tokens": [2, 256],
    "gpu": [None, "0", "00", "9999", "GPU-3f2a-1", "MIG-GPU-1/2/3", "each"],
    "api_key_file": [None, "/etc/key"],
    "extra_args": [
        (),
        ("--temp", "0.7"),
        ("--threads-http", "2"),
        ("-ctk", "f16"),
        ("k\te y",),
        ("--chat", '{"a": "$x"}'),
    ],
}
BAD: dict[str, tuple[str, list[Any]]] = {
    "port": ("port must be a whole number from 1 to 65535, not ", [0, -1, 65536, True, "8080", None, 80.0]),
    "host": (
        "host must be an IP address of the machine (such as 127.0.0.1, ::1, or 0.0.0.0 for every interface), not ",
        [
            *("", "a b", "a/b", "u@h", "a\n", "\x7f", "localhost", "999.1.1.1", "127.1", "1.2.3.4:80"),
            *("::g", "[1.2.3.4]", "[::1", "fe80::1%eth0", "127.0.0.1\n"),
        ],
    ),
    "runtime": ("runtime must be auto, podman or docker, not ", ["", "containerd", "Podman"]),
    "context": ("context must be a whole number, at least 1, not ", [0, -1, True, "1", 2**63, 2**64, 1.5]),
    "runs": ("runs must be a whole number, at least 1, not ", [0, -1, True]),
    "tokens": ("tokens must be a whole number, at least 2, not ", [1, 0, True]),
    "gpu": (
        "gpu must be an index as nvidia-smi has it, a UUID (GPU-...) or each, not ",
        ["", "-1", "x", "\u00b2", "1\n", "GPU-", "GPU-a b", "00000"],
    ),
    "api_key_file": ("api_key_file must be an absolute path without ':', not ", ["", "key", "/a:b", "/a\n"]),
    "extra_args": (
        "a llama-server argument must not contain a newline",
        [(word,) for word in ("a\nb", "\0", "\r", "\x1b[m", "\x9b", "\u2028")],
    ),
}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in GOOD.items() for value in values])
def test_good_choices(name: str, value: Any) -> None:
    assert rules.check_choice(choice(**{name: value})) is None


@pytest.mark.parametrize(
    ("name", "value"), [(name, value) for name, (_words, values) in BAD.items() for value in values]
)
def test_bad_choices(name: str, value: Any) -> None:
    with pytest.raises(Refusal) as error:
        rules.check_choice(choice(**{name: value}))
    assert error.value.message.startswith(BAD[name][0])
    assert error.value.rc == 2
    assert "\n" not in error.value.message


@pytest.mark.parametrize("command", ["bench", "stop", "pull"])
def test_a_server_elsewhere_may_have_a_name(command: str) -> None:
    for name in ("localhost", "gpu-host-1.lan", "::1", "[::1]"):
        assert rules.check_choice(choice(host=name, command=command)) is None
    for name in ("", "999.1.1.1", "1.2.3.4.", "a b", "a:b", "[a]", "a\n", "u@h", "a/b"):
        with pytest.raises(Refusal, match="host must be an IP address"):
            rules.check_choice(choice(host=name, command=command))


@pytest.mark.parametrize("cache", ["/a:b", "relative", ""])
def test_the_cache_is_checked_too(cache: str) -> None:
    with pytest.raises(Refusal) as error:
        rules.check_choice(choice(cache=cache))
    assert error.value.message.startswith("the model cache ")
    assert error.value.rc == 2


@pytest.mark.parametrize("command", ["run", "serve", "info", "plan", "pull", "stop", "bench", "models"])
def test_who_takes_arguments_for_the_server(command: str) -> None:
    assert rules.check_choice(choice(command=command)) is None
    if command in ("run", "serve", "info", "plan"):
        assert rules.check_choice(choice(command=command, extra_args=("-b", "1"))) is None
    else:
        with pytest.raises(Refusal) as error:
            rules.check_choice(choice(command=command, extra_args=("-b", "1")))
        assert error.value.message == f"{command} takes no llama-server arguments (after --)"
        assert error.value.rc == 2


@pytest.mark.parametrize("flag", OWNED_FLAGS)
@pytest.mark.parametrize("form", ["{}", "{}=x"])
def test_owned_flags_after_the_dashes(flag: str, form: str) -> None:
    with pytest.raises(Refusal) as error:
        rules.check_choice(choice(extra_args=("--temp", "1", form.format(flag), "1")))
    assert error.value.message == (
        f"do not pass {flag} after --: the launcher sets it. Use --host, --port or --context instead; "
        "the model, alias and threads come from the recipe"
    )
    assert error.value.rc == 2


def test_masking() -> None:
    args = [
        "--api-key",
        "s",
        "-b",
        "1",
        "--api-key=s",
        "--api_key",
        "s",
        "-hft",
        "s",
        "--hf-token=s",
        "--api-keys",
        "x",
    ]
    assert rules.masked(args) == [
        *("--api-key", "***", "-b", "1", "--api-key=***", "--api_key", "***", "-hft", "***", "--hf-token=***"),
        *("--api-keys", "x"),
    ]
    assert rules.masked(["--api-key"]) == ["--api-key"]
    assert rules.quoted(["a b", "***", "c", "it's"]) == "'a b' *** c 'it'\"'\"'s'"
    assert rules.quoted(["--api-key=***", "a*", "a b=***", "x***"]) == "--api-key=*** 'a*' 'a b=***' 'x***'"


def test_flag_value() -> None:
    args = ["-sm", "layer", "--x=1", "-sm", "none", "--split_mode=row"]
    assert rules.flag_value(args, ("-sm",)) == "none"
    assert rules.flag_value(args, ("-sm", "--split-mode")) == "row"
    assert rules.flag_value(["-sm"], ("-sm",)) is None
    assert rules.flag_value(["x", "-sm"], ("-sm",)) is None
    assert rules.flag_value([], ("-sm",)) is None
    assert rules.flag_value(["--x=a=b"], ("--x",)) == "a=b"


def test_without_flag() -> None:
    assert rules.without_flag(["-a", "1", "--k", "v", "--k=w", "-b", "--k"], "--k") == ["-a", "1", "-b"]
    assert rules.without_flag(["--a", "1", "--kk=2", "--k", "v"], "--k") == ["--a", "1", "--kk=2"]


# -- drafts, placeholders, revisions ---------------------------------------------------------------------------------

DRAFT = recipe(status="draft")
EMPTY = recipe(model__size_bytes=0)
BOTH = recipe(status="draft", model__size_bytes=0)


def status(which: Any, **values: Any) -> Any:
    try:
        return rules.check_status(which, choice(**values))
    except Refusal as refusal:
        assert refusal.rc == 1
        return refusal.message


IS_DRAFT = (
    "the recipe for Org/Tiny-GGUF on x1 is a draft: it has not passed the release gate. Pass --allow-draft to use it "
    "anyway; 'tensorless info Org/Tiny-GGUF' shows it"
)
IS_EMPTY = (
    "the recipe for Org/Tiny-GGUF on x1 is not published yet: model.size_bytes is a placeholder, so there is nothing "
    "to pull. Wait for a release that has it; 'tensorless info Org/Tiny-GGUF' shows it"
)
NOTE = ["using the draft recipe for Org/Tiny-GGUF on x1 (--allow-draft)"]


@pytest.mark.parametrize("command", ["run", "pull", "serve"])
def test_drafts_and_placeholders(command: str) -> None:
    assert status(recipe(), command=command) == []
    assert status(DRAFT, command=command) == IS_DRAFT
    assert status(DRAFT, command=command, dry_run=True) == IS_DRAFT
    assert status(DRAFT, command=command, allow_draft=True) == NOTE
    assert status(EMPTY, command=command) == IS_EMPTY
    assert status(EMPTY, command=command, allow_draft=True) == IS_EMPTY
    assert status(EMPTY, command=command, dry_run=True) == []
    assert status(BOTH, command=command) == IS_EMPTY
    assert status(BOTH, command=command, dry_run=True) == IS_DRAFT
    assert status(BOTH, command=command, dry_run=True, allow_draft=True) == NOTE


def test_two_placeholders() -> None:
    message = status(recipe(model__size_bytes=0, model__revision="0" * 40))
    assert "not published yet: model.revision, model.size_bytes are placeholders, so" in message


@pytest.mark.parametrize("command", ["info", "stop", "bench", "models"])
def test_commands_that_start_nothing(command: str) -> None:
    assert status(BOTH, command=command, revision=OTHER) == []


def test_another_revision_is_like_a_draft() -> None:
    assert status(recipe(), revision=PINNED) == []
    assert status(recipe(), revision=OTHER) == (
        f"revision {OTHER} is not the one the recipe for Org/Tiny-GGUF on x1 pins ({PINNED}): no release gate "
        "measured it. Pass --allow-draft to use it anyway; the run is then untuned"
    )
    assert status(recipe(), revision=OTHER, allow_draft=True) == [
        f"using revision {OTHER} instead of the recipe's (--allow-draft)"
    ]
    assert len(status(DRAFT, revision=OTHER, allow_draft=True)) == 2


# -- untuned ---------------------------------------------------------------------------------------------------------


def reasons(labels: Any = None, which: Any = None, **values: Any) -> list[str]:
    return rules.untuned_reasons(which or recipe(), choice(**values), labels)


def test_reasons_and_label() -> None:
    assert reasons() == []
    assert rules.untuned_label([]) is None
    assert reasons(context=4096, revision=PINNED, card="x1", gpu="0", port=1, host="::", runtime="docker") == []
    assert reasons(context=2048) == ["--context 2048 instead of 4096"]
    three = reasons(context=2048, extra_args=("--temp", "0.7"), revision=OTHER)
    assert three == [
        "--context 2048 instead of 4096",
        "extra arguments --temp 0.7",
        f"revision {OTHER} instead of {PINNED}",
    ]
    assert rules.untuned_label(three[:1]) == f"UNTUNED: {three[0]}. {END}"
    assert rules.untuned_label(three[:2]) == f"UNTUNED: {three[0]} and {three[1]}. {END}"
    assert rules.untuned_label(three) == f"UNTUNED: {three[0]}, {three[1]} and {three[2]}. {END}"


def test_arguments_are_quoted_only_where_needed_and_keys_are_hidden() -> None:
    assert reasons(extra_args=("--x", "a b", "--api-key", "secret")) == ["extra arguments --x 'a b' --api-key ***"]


def test_switches_that_an_image_does_not_list() -> None:
    assert reasons({}) == []
    assert reasons({rules.SWITCHES_LABEL: "GGML_A GGML_B"}) == []
    assert reasons({rules.SWITCHES_LABEL: "GGML_B,GGML_A"}) == []
    assert reasons({rules.SWITCHES_LABEL: "GGML_B"}) == ["engine switches that the image does not list (GGML_A)"]
    assert reasons({rules.SWITCHES_LABEL: ""}) == ["engine switches that the image does not list (GGML_A, GGML_B)"]
    assert reasons({rules.SWITCHES_LABEL: ""}, recipe(run__env=...)) == []


# -- layers off the card ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("args", "measured", "blocks", "found"),
    [
        ([], "99", None, []),
        (["-ngl", "99"], "99", None, []),
        (["-ngl", "100"], "99", None, []),
        (["-ngl", "099"], "99", None, []),
        (["-ngl", "98"], "99", None, ["-ngl 98"]),
        (["-ngl", "0"], "99", None, ["-ngl 0"]),
        (["--gpu-layers", "0"], "99", None, ["-ngl 0"]),
        (["--n-gpu-layers=0"], "99", None, ["-ngl 0"]),
        (["--n_gpu_layers=0"], "99", None, ["-ngl 0"]),
        (["-ngl", "0", "-ngl", "99"], "99", None, []),
        (["-ngl", "99", "-ngl", "0"], "99", None, ["-ngl 0"]),
        (["-ngl", "all"], "99", None, []),
        (["-ngl", "auto"], "99", None, ["-ngl auto"]),
        (["-ngl", "-1"], "99", None, ["-ngl -1"]),
        (["-ngl", "5"], None, None, ["-ngl 5"]),
        (["-ngl", "5"], "all", None, ["-ngl 5"]),
        (["-ngl", "65"], "99", 64, []),
        (["-ngl", "64"], "99", 64, ["-ngl 64"]),
        (["-ngl", "10"], "99", 64, ["-ngl 10"]),
        (["-dev", "none"], None, None, ["-dev none"]),
        (["--device", "CUDA0"], None, None, []),
        (["-dev", "none", "--device", "CUDA0"], None, None, []),
        (["-ot", "token_embd.weight=CUDA0"], None, None, []),
        (["-ot", r"blk\..*=CPU"], None, None, [r"-ot blk\..*=CPU"]),
        (["--override-tensor=a=CUDA0,b=cpu"], None, None, ["-ot a=CUDA0,b=cpu"]),
        (["-ot", "a=CUDA0", "--x=cpu"], None, None, []),
        (["-ot", "x=CPU_Mapped"], None, None, ["-ot x=CPU_Mapped"]),
        (["-cmoe"], None, None, ["-cmoe"]),
        (["--cpu-moe"], None, None, ["-cmoe"]),
        (["-ncmoe", "3"], None, None, ["-ncmoe 3"]),
        (["--n-cpu-moe=0"], None, None, []),
        (["-ncmoe", "0"], None, None, []),
        (["-ncmoe", "-1"], None, None, ["-ncmoe -1"]),
        (["-ngl", "0", "-cmoe", "-ot", "a=CPU"], "99", None, ["-ngl 0", "-cmoe", "-ot a=CPU"]),
    ],
)
def test_offload_options(args: list[str], measured: str | None, blocks: int | None, found: list[str]) -> None:
    assert rules.offload_options(args, measured, blocks) == found


@pytest.mark.parametrize(
    ("offload", "pn", "labels", "refused"),
    [
        (["-ngl 0"], "yes", {}, True),
        (["-ngl 0"], "yes", {rules.PN_CPU_LABEL: "no"}, True),
        (["-ngl 0"], "yes", {rules.PN_CPU_LABEL: "exact"}, False),
        (["-ngl 0"], "yes", None, False),
        (["-ngl 0"], "no", {}, False),
        (["-ngl 0"], "unknown", {}, False),
        ([], "yes", {}, False),
    ],
)
def test_pn_refusal(offload: list[str], pn: str, labels: Any, refused: bool) -> None:
    assert bool(rules.pn_refusal(offload, pn, labels)) is refused


def test_the_pn_refusal_names_every_option() -> None:
    message = str(rules.pn_refusal(["-ngl 0", "-cmoe"], "yes", {}))
    assert message.startswith("-ngl 0 and -cmoe would move layers of a PN file off the card")
    assert f"label {rules.PN_CPU_LABEL}=exact" in message

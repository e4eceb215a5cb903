# SPDX-License-Identifier: Apache-2.0
"""What a plan refuses or labels: bad usage, drafts, placeholders, untuned runs, PN weights off the card.

Private to the collection: may change at any time.
"""

from __future__ import annotations

import ipaddress
import re
import shlex
from collections.abc import Mapping, Sequence
from typing import Optional

from ansible_collections.tensorless.fleet.plugins.module_utils import _recipe_schema as schema
from ansible_collections.tensorless.fleet.plugins.module_utils._plan_paths import check_cache, check_endpoint
from ansible_collections.tensorless.fleet.plugins.module_utils._plan_types import Choice
from ansible_collections.tensorless.fleet.plugins.module_utils._recipe import Recipe
from ansible_collections.tensorless.fleet.plugins.module_utils._refusal import Refusal

RUNTIMES = ("podman", "docker")  # in the order of preference
STARTING = ("run", "pull", "serve")  # the commands that need a released, published recipe and a fitting card
TAKE_EXTRA_ARGS = ("run", "serve", "info", "plan")
SECRET_FLAGS = ("--api-key", "-hft", "--hf-token")
KEY_FILE_FLAG = "--api-key-file"
PN_CPU_LABEL = "org.tensorless.pn.cpu"
SWITCHES_LABEL = "org.tensorless.switches"
_CPU_BUFFER = re.compile(r"=\s*cpu", re.IGNORECASE)


def check_choice(choice: Choice) -> None:
    """Refuse a value that can never work: bad usage, exit status 2."""
    check_cache(choice.cache)
    check_endpoint(choice.endpoint)
    if isinstance(choice.port, bool) or not isinstance(choice.port, int) or not 1 <= choice.port <= 65535:
        raise Refusal(f"port must be a whole number from 1 to 65535, not {schema.shown(choice.port)}", rc=2)
    if not _is_address(choice.host, names=choice.command not in TAKE_EXTRA_ARGS):
        raise Refusal(
            "host must be an IP address of the machine (such as 127.0.0.1, ::1, or 0.0.0.0 for every interface), "
            f"not {schema.shown(choice.host)}",
            rc=2,
        )
    if choice.runtime not in ("auto", *RUNTIMES):
        raise Refusal(f"runtime must be auto, podman or docker, not {schema.shown(choice.runtime)}", rc=2)
    for name, value, least in (
        ("context", choice.context, 1),
        ("runs", choice.runs, 1),
        ("tokens", choice.tokens, 2),
    ):
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or not least <= value < 2**63):
            raise Refusal(f"{name} must be a whole number, at least {least}, not {schema.shown(value)}", rc=2)
    if choice.gpu is not None and not re.fullmatch(r"[0-9]{1,4}|(GPU|MIG)-[A-Za-z0-9/-]+|each", choice.gpu):
        raise Refusal(
            f"gpu must be an index as nvidia-smi has it, a UUID (GPU-...) or each, not {schema.shown(choice.gpu)}",
            rc=2,
        )
    for path in (choice.api_key_file, flag_value(choice.extra_args, (KEY_FILE_FLAG,)) if choice.service else None):
        if path is not None and (not path.startswith("/") or ":" in path or schema.breaks_line(path)):
            raise Refusal(f"api_key_file must be an absolute path without ':', not {schema.shown(path)}", rc=2)
    _check_extra_args(choice)


def _is_address(host: str, names: bool) -> bool:
    """Whether podman and docker can publish a port on this address. names: whether a host name is one as well."""
    bracketed = host.startswith("[") and host.endswith("]")
    try:
        address = ipaddress.ip_address(host[1:-1] if bracketed else host)
    except ValueError:
        return names and not re.fullmatch(r"[0-9.]*|.*[\s/@:\[\]\x00-\x1f\x7f].*", host, re.DOTALL)
    return "%" not in host and (address.version == 6 or not bracketed)


def _check_extra_args(choice: Choice) -> None:
    if not choice.extra_args:
        return
    if choice.command not in TAKE_EXTRA_ARGS:
        raise Refusal(f"{choice.command} takes no llama-server arguments (after --)", rc=2)
    for argument in choice.extra_args:
        if schema.breaks_line(argument):
            raise Refusal("a llama-server argument must not contain a newline or another control character", rc=2)
        flag = schema.owned_flag(argument)
        if flag:
            raise Refusal(
                f"do not pass {flag} after --: the launcher sets it. Use --host, --port or --context instead; "
                "the model, alias and threads come from the recipe",
                rc=2,
            )
    if choice.service:
        refuse_secrets(choice.extra_args)


def refuse_secrets(arguments: Sequence[str]) -> None:
    """For a service: its arguments lie on the host for everyone to read."""
    for argument in arguments:
        if _plain(argument) in SECRET_FLAGS:
            raise Refusal(
                f"{_plain(argument)} would show its secret in process lists and container records: write the key to a "
                "file of mode 0600 on the host and name that file in api_key_file",
                rc=2,
            )


def _plain(argument: str) -> str:
    """The flag of an argument as llama-server reads it."""
    flag = argument.split("=", 1)[0]
    return flag.replace("_", "-") if flag.startswith("--") else flag


def masked(args: Sequence[str]) -> list[str]:
    """Arguments with the values of secret flags replaced, for anything that is printed."""
    out: list[str] = []
    hide = False
    for argument in args:
        if hide:
            out.append("***")
            hide = False
        elif _plain(argument) in SECRET_FLAGS:
            flag, equals, _value = argument.partition("=")
            out.append(flag + "=***" if equals else flag)
            hide = not equals
        else:
            out.append(argument)
    return out


def quoted(args: Sequence[str]) -> str:
    """Arguments as one shell line, quoted only where needed; *** and --flag=*** stay as they are."""
    return " ".join(arg if re.fullmatch(r"([\w-]+=)?\*\*\*", arg) else shlex.quote(arg) for arg in args)


def flag_value(args: Sequence[str], flags: Sequence[str]) -> Optional[str]:
    """The value of a flag in a llama-server command line: the last one counts."""
    found = None
    for position, argument in enumerate(args):
        name, equals, value = argument.partition("=")
        if _plain(name) in flags:
            if equals:
                found = value
            elif position + 1 < len(args):
                found = args[position + 1]
    return found


def key_file(choice: Choice) -> Optional[str]:
    """The file on the host that holds the server's API keys, however it was named."""
    return choice.api_key_file or (flag_value(choice.extra_args, (KEY_FILE_FLAG,)) if choice.service else None)


def without_flag(args: Sequence[str], flag: str) -> list[str]:
    """Arguments without a flag and its value."""
    out: list[str] = []
    drop = False
    for argument in args:
        if drop:
            drop = False
        elif _plain(argument) == flag:
            drop = "=" not in argument
        else:
            out.append(argument)
    return out


def check_status(recipe: Recipe, choice: Choice) -> list[str]:
    """Refuse what may not start; returns the notes that an allowed draft or revision earns."""
    if choice.command not in STARTING:
        return []
    unpublished = recipe.unpublished
    if unpublished and not choice.dry_run:
        raise Refusal(
            f"the recipe for {recipe.label} is not published yet: {', '.join(unpublished)} "
            f"{'is a placeholder' if len(unpublished) == 1 else 'are placeholders'}, so there is nothing to pull. "
            f"Wait for a release that has it; 'tensorless info {recipe.repo}' shows it"
        )
    notes = []
    if recipe.status == "draft":
        if not choice.allow_draft:
            raise Refusal(
                f"the recipe for {recipe.label} is a draft: it has not passed the release gate. "
                f"Pass --allow-draft to use it anyway; 'tensorless info {recipe.repo}' shows it"
            )
        notes.append(f"using the draft recipe for {recipe.label} (--allow-draft)")
    pinned = recipe.data["model"]["revision"]
    if choice.revision not in (None, pinned):
        if not choice.allow_draft:
            raise Refusal(
                f"revision {choice.revision} is not the one the recipe for {recipe.label} pins ({pinned}): no release "
                "gate measured it. Pass --allow-draft to use it anyway; the run is then untuned"
            )
        notes.append(f"using revision {choice.revision} instead of the recipe's (--allow-draft)")
    return notes


def untuned_reasons(recipe: Recipe, choice: Choice, labels: Optional[Mapping[str, str]]) -> list[str]:
    """What differs from the measured configuration, in the documented order and words."""
    reasons = []
    measured = recipe.data["run"]["context"]
    if choice.context not in (None, measured):
        reasons.append(f"--context {choice.context} instead of {measured}")
    extra = [*masked(choice.extra_args), *([KEY_FILE_FLAG, "***"] if choice.api_key_file else [])]
    if extra:
        reasons.append("extra arguments " + quoted(extra))
    pinned = recipe.data["model"]["revision"]
    if choice.revision not in (None, pinned):
        reasons.append(f"revision {choice.revision} instead of {pinned}")
    unlisted = unlisted_switches(recipe, labels)
    if unlisted:
        reasons.append(f"engine switches that the image does not list ({', '.join(unlisted)})")
    return reasons


def unlisted_switches(recipe: Recipe, labels: Optional[Mapping[str, str]]) -> list[str]:
    """Switches of the recipe that the image says it does not know; an image that lists none says nothing."""
    listed = (labels or {}).get(SWITCHES_LABEL)
    if listed is None:
        return []
    known = set(re.split(r"[\s,]+", listed))
    return [name for name in sorted(recipe.data["run"].get("env", {})) if name not in known]


def joined(reasons: Sequence[str]) -> str:
    """a; a and b; a, b and c."""
    return " and ".join([", ".join(reasons[:-1]), reasons[-1]] if len(reasons) > 1 else reasons)


def untuned_label(reasons: Sequence[str]) -> Optional[str]:
    """The documented line, or None for a tuned run."""
    if not reasons:
        return None
    return f"UNTUNED: {joined(reasons)}. This is not the configuration the receipt measured; its numbers do not apply."


def offload_options(
    args: Sequence[str], measured_layers: Optional[str], block_count: Optional[int] = None
) -> list[str]:
    """The options of a server command that keep layers, or experts, off the card.

    measured_layers is the recipe's own -ngl; block_count the file's number of layers, where its header was read.
    """
    found = []
    layer_flags = ("-ngl", "--gpu-layers", "--n-gpu-layers")
    layers = flag_value(args, layer_flags)
    if layers is not None and not _all_layers(layers, measured_layers, block_count):
        found.append(f"-ngl {layers}")
    if flag_value(args, ("-dev", "--device")) == "none":
        found.append("-dev none")
    for position, argument in enumerate(args):
        name = _plain(argument)
        value = argument.partition("=")[2] if "=" in argument else "".join(args[position + 1 : position + 2])
        if name in ("-ot", "--override-tensor") and _CPU_BUFFER.search(value):
            found.append(f"-ot {value}")
        elif name in ("-cmoe", "--cpu-moe"):
            found.append("-cmoe")
        elif name in ("-ncmoe", "--n-cpu-moe") and value != "0":
            found.append(f"-ncmoe {value}")
    return found


def _all_layers(layers: str, measured: Optional[str], block_count: Optional[int]) -> bool:
    if layers == "all" or layers == measured:
        return True
    if not re.fullmatch(r"[0-9]{1,9}", layers):
        return False  # "auto" and what nobody knows: the engine decides
    if block_count is not None:
        return int(layers) > block_count  # the output layer counts as one more
    return bool(measured and re.fullmatch(r"[0-9]{1,9}", measured) and int(layers) >= int(measured))


def pn_refusal(offload: Sequence[str], pn: str, labels: Optional[Mapping[str, str]]) -> Optional[str]:
    """Why these options may not be used with this file and image; None while that is allowed or not yet known.

    PN weights give wrong answers on the CPU path of an engine that does not say that its path is exact: that is
    wrong output, not slow output, so it is refused and not labelled.
    """
    if not offload or pn != "yes" or labels is None or labels.get(PN_CPU_LABEL) == "exact":
        return None
    return (
        f"{joined(list(offload))} would move layers of a PN file off the card, and the engine image does not say that "
        f"its CPU path for PN weights is exact (label {PN_CPU_LABEL}=exact): the answers would be wrong. "
        "Leave the option out, or use an image with that label"
    )

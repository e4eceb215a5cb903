# SPDX-License-Identifier: Apache-2.0
"""The plan: what exactly would run on one host and card. Pure; the module, the roles and the command all call it.

Private to the collection: may change at any time.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Optional

from ansible_collections.tensorless.fleet.plugins.module_utils import _cards as cards
from ansible_collections.tensorless.fleet.plugins.module_utils import _plan_paths as paths
from ansible_collections.tensorless.fleet.plugins.module_utils import _plan_rules as rules
from ansible_collections.tensorless.fleet.plugins.module_utils._hardening import hardening_flags
from ansible_collections.tensorless.fleet.plugins.module_utils._plan_types import Choice, HostFacts
from ansible_collections.tensorless.fleet.plugins.module_utils._recipe import Recipe, choose_card, fold
from ansible_collections.tensorless.fleet.plugins.module_utils._refusal import Refusal

Plan = dict[str, Any]

HASH_LABEL = "org.tensorless.plan"
KEY_MOUNT = "/run/tensorless/api-key"
CONTAINER_PORT = "8080"


@dataclass(frozen=True)
class Planned:
    """The plans of one model on one host, and the cards that it leaves alone."""

    plans: list[Plan]
    skipped: list[dict[str, Any]] = field(default_factory=list)


def plan_model(recipes: Sequence[Recipe], host: HostFacts, choice: Choice) -> Planned:
    """Plan one model (its recipes, one for each card id) on one host: one plan, or one for each card with gpu: each."""
    rules.check_choice(choice)
    selections = _select_each(recipes, host, choice) if choice.gpu == "each" else [_select(recipes, host, choice)]
    suffix = choice.suffix or len(selections) > 1
    if choice.port + len(selections) - 1 > 65535:
        raise Refusal(f"port {choice.port} leaves no room for {len(selections)} servers: choose a lower one", rc=2)
    plans = [
        make_plan(selection, host, replace(choice, port=choice.port + offset, suffix=suffix))
        for offset, selection in enumerate(selections)
    ]
    skipped = []
    if choice.card is None and not host.gpus.problem:
        skipped = [_skip(recipes, gpu) for gpu in host.gpus.cards if cards.best_recipe(recipes, gpu) is None]
    return Planned(plans, skipped)


def _skip(recipes: Sequence[Recipe], gpu: cards.Gpu) -> dict[str, Any]:
    wants = "; or ".join(f"{cards.needs(recipe)} ({recipe.card_id})" for recipe in recipes)
    return {
        "index": gpu.index,
        "uuid": gpu.uuid,
        "name": gpu.name,
        "reason": f"{gpu.describe()} fits no recipe of {recipes[0].repo}, which needs {wants}",
    }


def _select_each(recipes: Sequence[Recipe], host: HostFacts, choice: Choice) -> list[cards.Selection]:
    if choice.card is not None or host.gpus.problem:
        # Without a list of cards there is nothing to count: one plan, refused or shown as without "each".
        return [_select(recipes, host, replace(choice, gpu=None))]
    fitting = [gpu for gpu in host.gpus.cards if cards.best_recipe(recipes, gpu)]
    if not fitting:
        return [_select(recipes, host, replace(choice, gpu=None))]
    return [_select(recipes, host, replace(choice, gpu=str(gpu.index))) for gpu in fitting]


def _select(recipes: Sequence[Recipe], host: HostFacts, choice: Choice) -> cards.Selection:
    wanted = None if choice.gpu is None else re.sub(r"^0+(?=[0-9])", "", choice.gpu)
    shown = "all" if wanted is None else wanted
    if choice.card is not None:
        recipe = choose_card(list(recipes), choice.card)
        return cards.Selection(recipe, shown, _known(host, wanted), detection="skipped")
    if choice.command == "stop":
        return cards.Selection(recipes[0], shown, detection="skipped")
    strict = choice.command in rules.STARTING
    if host.gpus.problem:
        if strict and not (choice.dry_run or choice.assume_installed):
            raise Refusal(
                f"cannot detect the GPU: {host.gpus.problem}. Install the NVIDIA driver, "
                f"{cards.driver_range(recipes[0])}; to only look at a recipe on a machine without the card, "
                f"pass --card {recipes[0].card_id}"
            )
        recipe = cards.only_recipe(recipes, host.gpus.problem)
        return cards.Selection(recipe, shown, detection="unreadable")
    try:
        return cards.select(recipes, host.gpus, wanted, check_driver=strict)
    except Refusal as refusal:
        if choice.command != "info":
            raise
        # Showing a recipe needs no GPU; that none fits is part of what is shown.
        recipe = cards.only_recipe(recipes, refusal.message)
        return cards.Selection(recipe, shown, _known(host, wanted), detection="unmatched")


def _known(host: HostFacts, wanted: Optional[str]) -> tuple[cards.Gpu, ...]:
    """The named card where it is listed: its UUID may be used although nothing was checked."""
    return tuple(gpu for gpu in host.gpus.cards if wanted in (str(gpu.index), gpu.uuid))[:1]


def pick_runtime(choice: Choice, host: HostFacts) -> str:
    """podman or docker: what was asked for, else the first that is installed."""
    wanted = rules.RUNTIMES if choice.runtime == "auto" else (choice.runtime,)
    strict = choice.command in (*rules.STARTING, "stop") and not (choice.dry_run or choice.assume_installed)
    for runtime in wanted:
        if host.runtimes is not None and runtime in host.runtimes:
            return runtime
    if strict and host.runtimes is not None:
        found = "neither podman nor docker is installed" if len(wanted) > 1 else f"{wanted[0]} is not installed"
        raise Refusal(f"{found}: install podman or docker, with NVIDIA container support")
    return wanted[0]


def container_name(repo: str) -> str:
    """The documented container name of a model."""
    return "tensorless-" + re.sub(r"[^a-z0-9_.-]", "-", fold(repo))


def instance_name(name: str, gpus: Sequence[cards.Gpu], gpu: str) -> str:
    """The name of one of several servers of a model on a host: it ends in eight hex digits of the card's UUID."""
    uuid = gpus[0].uuid if gpus else None
    return f"{name}-{uuid.partition('-')[2][:8].lower()}" if uuid else f"{name}-gpu{gpu}"


def bracketed(host: str) -> str:
    """An address as it stands before a port."""
    bare = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    return f"[{bare}]" if ":" in bare else bare


def endpoint(host: str, port: int) -> str:
    """Where a client on the host itself reaches the server."""
    address = bracketed(host)
    local = {"0.0.0.0": "127.0.0.1", "[::]": "[::1]"}.get(address, address)
    return f"http://{local}:{port}"


def make_plan(selection: cards.Selection, host: HostFacts, choice: Choice) -> Plan:
    """The plan for one selected recipe and card."""
    recipe = selection.recipe
    model, run = recipe.data["model"], recipe.data["run"]
    notes = rules.check_status(recipe, choice)
    runtime = pick_runtime(choice, host)
    image: str = recipe.data["engine"]["image"]
    labels = host.labels.get(image)
    revision = choice.revision or model["revision"]
    context = choice.context if choice.context is not None else run["context"]
    threads = max(1, min(host.cpu_count, run["threads_max"]))
    args = [*run.get("args", []), *choice.extra_args]
    mount = "/models/" + model["file"].rpartition("/")[2]
    blob = paths.blob_path(choice.cache, recipe.repo, model["sha256"])
    server = ["-m", mount, "--host", "0.0.0.0", "--port", CONTAINER_PORT, "-c", str(context)]
    server += ["--alias", run["alias"], "-t", str(threads), "-tb", str(threads), *args]
    env = {"OMP_NUM_THREADS": str(threads), **{name: run.get("env", {})[name] for name in sorted(run.get("env", {}))}}
    address = f"{bracketed(choice.host)}:{choice.port}"

    gpus = _container_cards(selection, args)
    name = container_name(recipe.repo)
    instance = instance_name(name, gpus, selection.gpu) if choice.suffix else name
    parts = _Parts(
        runtime, name, selection.gpu, address, [(blob, mount, "sha256:" + model["sha256"])], env, image, server
    )
    effective = replace(parts, name=instance, flags=_hardening(choice, runtime))
    key_file = rules.key_file(choice)
    if key_file:
        key = (key_file, KEY_MOUNT, "sha256:" + host.file_digests.get(key_file, "unknown"))
        effective = replace(
            effective,
            mounts=[*parts.mounts, key],
            server=[*rules.without_flag(server, rules.KEY_FILE_FLAG), rules.KEY_FILE_FLAG, KEY_MOUNT],
        )
    plan_hash = _plan_hash(effective, gpus)

    reasons = rules.untuned_reasons(recipe, choice, labels)
    offload = rules.offload_options(
        args, rules.flag_value(run.get("args", []), ("-ngl",)), host.block_count.get(model["sha256"])
    )
    pn = host.pn.get(model["sha256"], "unknown")
    refusal = rules.pn_refusal(offload, pn, labels)
    if refusal and choice.command in (*rules.STARTING, "plan"):
        raise Refusal(refusal)
    if offload and pn != "no":
        notes.append(
            f"{rules.joined(offload)} moves layers off the card: refused at the start if the file holds PN weights and "
            "the image does not say that its CPU path for them is exact"
        )
    if selection.detection == "unreadable" and choice.command in rules.STARTING:
        notes.append(f"no GPU can be read ({host.gpus.problem}): the card and its driver are not checked yet")
    if reasons and choice.command == "bench":
        notes.append(
            f"this run is untuned ({rules.joined(reasons)}): its comparison with the receipt is only a rough guide"
        )
    if bracketed(choice.host) in ("0.0.0.0", "[::]"):
        notes.append(f"it listens on every interface of this host (--host {choice.host})")
    fits, fits_reason = cards.fits(recipe, host.gpus)
    url = endpoint(choice.host, choice.port)
    return {
        "model": recipe.repo,
        "name": recipe.name,
        "card": recipe.card_id,
        "recipe": recipe.data,
        "recipe_path": recipe.path,
        "status": recipe.status,
        "published": not recipe.unpublished,
        "unpublished": recipe.unpublished,
        "notes": notes,
        "fits": fits,
        "fits_reason": fits_reason,
        "detection": selection.detection,
        "untuned": bool(reasons),
        "untuned_reasons": reasons,
        "untuned_label": rules.untuned_label(reasons),
        "receipt_applies": not reasons and recipe.status == "released" and not recipe.unpublished,
        "receipt_decode_tps": recipe.data.get("receipt", {}).get("decode_tps", {}).get("short"),
        "download": {
            "url": paths.resolve_url(choice.endpoint, recipe.repo, revision, model["file"]),
            "endpoint": choice.endpoint or paths.DEFAULT_ENDPOINT,
            "repo": recipe.repo,
            "revision": revision,
            "file": model["file"],
            "sha256": model["sha256"],
            "size_bytes": model["size_bytes"],
            "cache": choice.cache,
            "blob": blob,
            "snapshot": paths.snapshot_path(choice.cache, recipe.repo, revision, model["file"]),
            "snapshot_link": paths.snapshot_link(model["file"]) + model["sha256"],
            "cached": host.cached.get(model["sha256"], "no"),
        },
        "image": image,
        "pull_command": [runtime, "pull", image],
        "runtime": runtime,
        "gpu": selection.gpu,
        "cards": [{"index": gpu.index, "uuid": gpu.uuid, "name": gpu.name} for gpu in gpus],
        "threads": threads,
        "context": context,
        "alias": run["alias"],
        "container_name": instance,
        "instance": instance,
        "host": choice.host,
        "port": choice.port,
        "endpoint": url,
        "health_url": url + "/health",
        "model_mount": mount,
        "api_key_file": key_file,
        "differences": list(effective.flags),
        "pn": pn,
        "offload": offload,
        "command": documented_command(parts),
        "exec": exec_command(effective, gpus, plan_hash),
        "plan_hash": plan_hash,
    }


def _container_cards(selection: cards.Selection, args: Sequence[str]) -> list[cards.Gpu]:
    """The cards that exec names. With `-sm none` the server keeps to one card, so it is given that one only."""
    if not all(gpu.uuid for gpu in selection.cards):
        return list(selection.cards)[:1] if selection.gpu != "all" else []
    one = rules.flag_value(args, ("-sm", "--split-mode")) == "none"
    return list(selection.cards[:1] if one else selection.cards)


def _hardening(choice: Choice, runtime: str) -> list[str]:
    try:
        return hardening_flags(choice.hardening, runtime)
    except ValueError as error:
        raise Refusal(str(error), rc=2) from error


@dataclass(frozen=True)
class _Parts:
    """What both commands are put together from."""

    runtime: str
    name: str
    gpu: str
    address: str
    mounts: Sequence[tuple[str, str, str]]  # path on the host, path in the container, content
    env: Mapping[str, str]
    image: str
    server: Sequence[str]
    flags: Sequence[str] = ()  # hardening

    def tail(self) -> list[str]:
        """From the published port on, both commands are the same."""
        out = ["-p", f"{self.address}:{CONTAINER_PORT}"]
        for source, target, _content in self.mounts:
            out += ["-v", f"{source}:{target}:ro"]
        for name, value in self.env.items():
            out += ["-e", f"{name}={value}"]
        return [*out, *self.flags, self.image, *self.server]


def _device(runtime: str, gpu: str) -> list[str]:
    if runtime == "podman":
        return ["--device", f"nvidia.com/gpu={gpu}"]
    return ["--gpus", "all" if gpu == "all" else f"device={gpu}"]


def documented_command(parts: _Parts) -> list[str]:
    """The command that the documentation shows and a person can paste."""
    security = ["--security-opt", "label=disable"] if parts.runtime == "podman" else []
    head = [parts.runtime, "run", "-d", "--rm", "--name", parts.name]
    return [*head, *_device(parts.runtime, parts.gpu), *security, *parts.tail()]


def exec_command(parts: _Parts, gpus: Sequence[cards.Gpu], plan_hash: str) -> list[str]:
    """What the service runs. It differs from the documented command in this closed list and nothing else:

    1. foreground instead of -d, because systemd follows the process;
    2. each card by UUID; where none is known, the documented GPU with CUDA_DEVICE_ORDER=PCI_BUS_ID;
    3. a label with the plan hash, which also marks the container as ours;
    4. the name with its instance suffix, where a host runs several servers of the model;
    5. what the user asked for: hardening flags, and the API key's file, mounted read-only.
    """
    uuids = [gpu.uuid for gpu in gpus if gpu.uuid]
    head = [parts.runtime, "run", "--rm", "--name", parts.name]
    head += ["--label", f"{HASH_LABEL}={plan_hash}"]
    if not uuids:
        device = _device(parts.runtime, parts.gpu)
        parts = replace(parts, env={"CUDA_DEVICE_ORDER": "PCI_BUS_ID", **parts.env})
    elif parts.runtime == "podman":
        device = [word for uuid in uuids for word in _device(parts.runtime, uuid)]
    elif len(uuids) == 1:
        device = _device(parts.runtime, uuids[0])
    else:
        # docker reads this value as CSV, so a list of devices has quotes of its own.
        device = ["--gpus", '"device=' + ",".join(uuids) + '"']
    security = ["--security-opt", "label=disable"] if parts.runtime == "podman" else []
    return [*head, *device, *security, *parts.tail()]


def _plan_hash(parts: _Parts, gpus: Sequence[cards.Gpu]) -> str:
    """A hash of what has an effect on the server, and of nothing else: not paths, names, runtimes or versions."""
    effective = {
        "argv": list(parts.server),
        "env": dict(parts.env),
        "image": parts.image.rpartition("@")[2],
        "model": parts.mounts[0][2],
        "cards": [gpu.uuid or str(gpu.index) for gpu in gpus] or [parts.gpu],
        "address": parts.address,
        "flags": list(parts.flags),
        "mounts": [[target, content] for _source, target, content in parts.mounts],
    }
    text = json.dumps(effective, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()

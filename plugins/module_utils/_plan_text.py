# SPDX-License-Identifier: Apache-2.0
"""What people and programs are shown of recipes and plans: info, dry run, the list of models, capabilities. Pure.

Private to the collection: may change at any time.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from typing import Any, Optional

from ansible_collections.tensorless.fleet.plugins.module_utils import _cards as cards
from ansible_collections.tensorless.fleet.plugins.module_utils import _plan_rules as rules
from ansible_collections.tensorless.fleet.plugins.module_utils._recipe import Catalog
from ansible_collections.tensorless.fleet.plugins.module_utils._recipe_schema import SCHEMA

_FIRST_MEASURES = ("short", "ctx_4k", "ctx_32k", "ctx_65k")
_INFO_JSON = (
    "recipe",
    "published",
    "unpublished",
    "fits",
    "untuned",
    "untuned_reasons",
    "untuned_label",
    "receipt_applies",
    "runtime",
    "gpu",
    "threads",
    "command",
    "endpoint",
)
_DOWNLOAD_JSON = ("url", "blob", "snapshot", "size_bytes", "cached")


def gigabytes(size: int) -> str:
    """Decimal gigabytes, as the Hub counts them."""
    return f"{size / 10**9:.2f} GB"


def printable(text: str) -> str:
    """Text from a recipe on one line: control characters must not reach a terminal."""
    return "".join(c if c.isprintable() else " " for c in text)


def measure_order(table: Mapping[str, Any]) -> list[str]:
    """Measurement keys in the documented order: the known ones first, then the rest by name."""
    return [key for key in _FIRST_MEASURES if key in table] + sorted(set(table) - set(_FIRST_MEASURES))


def command_lines(command: Sequence[str], indent: str = "    ") -> list[str]:
    """A command as lines for a shell, one option with its value a line; secrets are masked."""
    words = rules.masked(list(command))
    lines: list[list[str]] = [[]]
    in_args = False
    for position, word in enumerate(words):
        fresh = position > 2 and word.startswith("-") and word not in ("-d", "--rm", "--name")
        is_image = position > 1 and not in_args and "@sha256:" in word and not lines[-1][-1].startswith("-")
        if fresh or is_image:
            lines.append([])
        lines[-1].append(word)
        in_args = in_args or is_image
    return [(indent if number else "") + rules.quoted(line) for number, line in enumerate(lines) if line]


def command_text(command: Sequence[str]) -> str:
    """A command as a shell reads it, broken over several lines."""
    return " \\\n".join(command_lines(command))


def _section(title: str, rows: Sequence[tuple[str, str]]) -> list[str]:
    width = max(len(label) for label, _value in rows) + 2
    return [title, *(f"  {label:<{width}}{printable(value)}".rstrip() for label, value in rows)]


def info_text(plan: Mapping[str, Any]) -> str:
    """Everything about a recipe and how it would run here, for people."""
    recipe, download = plan["recipe"], plan["download"]
    model, card, engine, run = recipe["model"], recipe["card"], recipe["engine"], recipe["run"]
    title = f": {model['title']}" if model.get("title") else ""
    status = plan["status"] + ("" if plan["published"] else ", unpublished")
    fits = plan["fits"] + (f" ({plan['fits_reason']})" if plan["fits_reason"] else "")
    header = [("short name", plan["name"])] if plan["name"] else []
    header += [("status", status), ("recipe", plan["recipe_path"]), ("fits this host", fits)]
    out = _section(printable(f"{plan['model']} on {plan['card']}{title}"), header)
    if not plan["published"]:
        out.append(f"  NOT PUBLISHED: {', '.join(plan['unpublished'])} still to come; it cannot be pulled or run")
    if plan["untuned_label"]:
        out.append("  " + printable(plan["untuned_label"]))
    out += [f"  note: {printable(note)}" for note in plan["notes"]]
    out += ["", *_section("Model", _model_rows(plan, model, download))]
    rows = [("title", card["title"])] if card.get("title") else []
    rows += [("compute", card["compute_capability"]), ("memory", f"at least {card['min_memory_mib']} MiB")]
    rows += [("driver", f"{card['min_driver']} or newer")]
    out += ["", *_section("Card", rows)]
    rows = [(key, engine[key]) for key in ("release", "arch", "image")]
    out += ["", *_section("Engine", rows)]
    out += ["", *_run_section(plan, run)]
    receipt = _receipt_section(recipe.get("receipt", {}))
    return "\n".join([*out, *(["", *receipt] if receipt else [])]) + "\n"


def _model_rows(
    plan: Mapping[str, Any], model: Mapping[str, Any], download: Mapping[str, Any]
) -> list[tuple[str, str]]:
    return [
        ("repository", plan["model"]),
        ("revision", download["revision"]),
        ("file", model["file"]),
        ("sha256", model["sha256"]),
        ("size", f"{gigabytes(model['size_bytes'])} ({model['size_bytes']} bytes)"),
        ("license", model["license"]),
        ("url", download["url"]),
        ("cache", download["blob"]),
        ("cached", download["cached"]),
    ]


def _run_section(plan: Mapping[str, Any], run: Mapping[str, Any]) -> list[str]:
    rows = [
        ("context", str(plan["context"])),
        ("threads", f"{plan['threads']} (at most {run['threads_max']})"),
        ("args", shlex.join(run.get("args", [])) or "none"),
        ("runtime", plan["runtime"]),
        ("gpu", plan["gpu"]),
        ("endpoint", plan["endpoint"]),
    ]
    out = _section("Run", rows)
    switches = sorted(run.get("env", {}).items())
    out.append("  switches" if switches else "  switches  none")
    out += [f"    {name}={printable(value)}" for name, value in switches]
    out.append("  command")
    return out + ["    " + line for line in command_text(plan["command"]).split("\n")]


def _receipt_section(receipt: Mapping[str, Any]) -> list[str]:
    rows = [(key, receipt[key]) for key in ("summary", "source") if receipt.get(key)]
    for key, what in (("decode_tps", "decode"), ("prefill_tps", "prefill")):
        table = receipt.get(key, {})
        rows += [(what, f"{table[name]:.15g} tok/s ({name})") for name in measure_order(table)]
    rows += [("note", note) for note in receipt.get("notes", [])]
    return _section("Receipt", rows) if rows else []


def info_json(plan: Mapping[str, Any]) -> dict[str, Any]:
    """The documented JSON of info: the recipe and what was worked out for this host."""
    out = {key: plan[key] for key in _INFO_JSON}
    out["command"] = rules.masked(plan["command"])
    out["download"] = {key: plan["download"][key] for key in _DOWNLOAD_JSON}
    return out


def gpu_line(plan: Mapping[str, Any]) -> str:
    """How the GPU came about, for the header of a dry run."""
    gets = f"the container gets GPU {plan['gpu']}"
    how = {
        "skipped": "chosen with --card; GPU detection skipped",
        "unreadable": f"none can be read here ({plan['fits_reason']}); the model's only recipe is shown",
    }.get(plan["detection"])
    if how is None and plan["detection"] == "matched" and plan["cards"]:
        how = f"GPU {plan['cards'][0]['index']}: {plan['cards'][0]['name']}"
    if how is None:
        how = plan["fits_reason"] if plan["fits"] == "yes" else f"{plan['fits']}: {plan['fits_reason']}"
    return f"{how}; {gets}"


def dry_run_text(plan: Mapping[str, Any], typed: str, steps: Sequence[str], token: bool = False) -> str:
    """The plan of a command, with nothing done. typed: the command line; steps: pull, serve or both."""
    download = plan["download"]
    status = plan["status"] + ("" if plan["published"] else ", unpublished")
    out = [
        f"dry run of '{typed}': nothing is pulled, downloaded or started.",
        f"recipe:   {plan['model']} on {plan['card']} ({status}), from {plan['recipe_path']}",
        f"gpu:      {printable(gpu_line(plan))}",
        f"runtime:  {plan['runtime']}",
    ]
    out += [f"note:     {printable(note)}" for note in plan["notes"]]
    if plan["untuned_label"]:
        out.append(printable(plan["untuned_label"]))
    blocks: list[list[str]] = []
    if "pull" in steps:
        blocks.append(
            [
                f"pull the engine image, unless '{plan['runtime']} image inspect' finds it",
                command_text(plan["pull_command"]),
            ]
        )
        lines = [f"GET {download['url']}", f"    into {download['blob']}"]
        if token:
            lines.insert(1, "    with the token of HF_TOKEN")
        size = gigabytes(download["size_bytes"])
        what = f"download the model ({size}), resuming a partial download, and check its sha256 {download['sha256']}"
        blocks.append([what, *lines])
        blocks.append(
            [
                "link it into the snapshot, where other Hugging Face tools look",
                f"ln -s {shlex.quote(download['snapshot_link'])} \\\n    {shlex.quote(download['snapshot'])}",
            ]
        )
    if "serve" in steps:
        blocks.append(["start the server", command_text(plan["command"])])
        blocks.append(["wait until the model is loaded (up to 20m)", f"GET {plan['health_url']}"])
    for number, (what, *lines) in enumerate(blocks, 1):
        out += ["", f"# {number}. {what}", *lines]
    return "\n".join(out) + "\n"


def bench_lines(plan: Mapping[str, Any], runs: int, tokens: int) -> list[str]:
    """The requests that ``bench`` makes."""
    return [
        f"GET {plan['health_url']}",
        f"GET {plan['endpoint']}/v1/models",
        f"POST {plan['endpoint']}/completion (1 warm-up of 8 tokens, {runs} runs of {tokens} tokens)",
    ]


def model_rows(
    catalog: Catalog, gpus: cards.Gpus, cached: Mapping[str, str], card: Optional[str] = None
) -> list[dict[str, Any]]:
    """One row for each recipe, as `models --json` has it. cached: sha256 to yes, partial or no."""
    return [
        {
            "model": recipe.repo,
            "name": recipe.name,
            "card": recipe.card_id,
            "title": recipe.data["model"].get("title"),
            "status": recipe.status,
            "published": not recipe.unpublished,
            "release": recipe.data["engine"]["release"],
            "arch": recipe.data["engine"]["arch"],
            "fits": cards.fits(recipe, gpus)[0],
            "cached": cached.get(recipe.data["model"]["sha256"], "no"),
        }
        for recipe in catalog.recipes
        if card in (None, recipe.card_id)
    ]


def models_text(rows: Sequence[Mapping[str, Any]], gpus: cards.Gpus) -> str:
    """The table of `models`."""
    table = [("MODEL", "CARD", "STATUS", "ENGINE", "FITS", "CACHED")]
    for row in rows:
        status = row["status"] + ("" if row["published"] else ", unpublished")
        table.append((row["model"], row["card"], status, row["release"], row["fits"], row["cached"]))
    widths = [max(len(line[column]) for line in table) for column in range(6)]
    out = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths)).rstrip() for line in table]
    if gpus.problem:
        out.append(f"fits is unknown: {gpus.problem}")
    return "\n".join(out) + "\n"


def capabilities(catalog: Catalog, version: str, commit: str, platform: str) -> dict[str, Any]:
    """What `capabilities --json` tells of this program."""
    known: list[dict[str, Any]] = []
    for recipe in catalog.recipes:
        card = {"title": None, **recipe.data["card"], "arch": recipe.data["engine"]["arch"]}
        if card not in known:
            known.append(card)
    keep = ("model", "name", "card", "status", "published", "release", "arch")
    rows = model_rows(catalog, cards.Gpus(), {})
    return {
        "name": "tensorless",
        "version": version,
        "commit": commit,
        "platform": platform,
        "recipe_schema": SCHEMA,
        "runtimes": list(rules.RUNTIMES),
        "cards": known,
        "recipes": [{key: row[key] for key in keep} for row in rows],
    }

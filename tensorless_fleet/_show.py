# SPDX-License-Identifier: Apache-2.0
"""What only looks: ``models``, ``info``, ``capabilities`` and every ``--dry-run`` on this machine.

All of it comes from the collection's planning functions; no Ansible is started and nothing is written.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Any

from ansible_collections.tensorless.fleet.plugins.module_utils import _cards as cards
from ansible_collections.tensorless.fleet.plugins.module_utils import _plan_paths, _plan_text, _recipe
from ansible_collections.tensorless.fleet.plugins.module_utils._plan_types import Choice, HostFacts

from tensorless_fleet import __version__, _collection
from tensorless_fleet._usage import Options


def catalog_of(options: Options) -> _recipe.Catalog:
    """The recipes: the built-in ones or those of --recipes. Warnings go to standard error."""
    if options.recipes:
        folder = os.path.abspath(os.path.expanduser(options.recipes))
        catalog = _recipe.load_directory(folder)
    else:
        catalog = _recipe.load_directory(os.path.join(_collection.own_path(), "recipes"), "recipes/")
    for warning in catalog.warnings:
        sys.stderr.write(f"tensorless: warning: {warning}\n")
    return catalog


def which(program: str) -> str | None:
    """Where a program lies on PATH. (shutil brings half a dozen compressors along, which quick commands feel.)"""
    for folder in os.environ.get("PATH", os.defpath).split(os.pathsep):
        path = os.path.join(folder or ".", program)
        if os.path.isfile(path) and os.access(path, os.X_OK):
            return path
    return None


def command_runner(limit: float | None = 120) -> Any:
    """A callable that runs one command for at most ``limit`` seconds: (argv) -> (code, stdout, stderr)."""
    import subprocess

    def run(argv: Sequence[str]) -> tuple[int, str, str]:
        try:
            done = subprocess.run(list(argv), capture_output=True, stdin=subprocess.DEVNULL, check=False, timeout=limit)
        except subprocess.TimeoutExpired:
            return 124, "", f"{argv[0]} did not answer within {limit:g} s"
        except OSError as error:
            return 127, "", f"{argv[0]}: {error.strerror}"
        return done.returncode, done.stdout.decode(errors="replace"), done.stderr.decode(errors="replace")

    return run


def gpus_here(options: Options) -> cards.Gpus:
    """The GPUs of this machine, or why none can be read. --card skips the question."""
    if options.card is not None:
        return cards.Gpus(problem="not asked: --card was given")
    if which("nvidia-smi") is None:
        return cards.Gpus(problem="nvidia-smi not found")
    from ansible_collections.tensorless.fleet.plugins.module_utils._gpu import read_gpus

    return cards.from_facts(read_gpus(command_runner()))


def cache_of(options: Options) -> str:
    """The Hugging Face cache directory that holds here."""
    return _plan_paths.hub_cache(options.cache, os.environ, os.path.expanduser("~"), os.getcwd())


def cached_states(recipes: Sequence[_recipe.Recipe], cache: str) -> dict[str, str]:
    """sha256 to yes, partial or no, for each recipe's file."""
    states = {}
    for recipe in recipes:
        model = recipe.data["model"]
        blob = _plan_paths.blob_path(cache, recipe.repo, model["sha256"])
        try:
            size: int | None = os.stat(blob).st_size
        except OSError:
            size = None
        partial = os.path.exists(blob + ".incomplete")
        states[model["sha256"]] = _plan_paths.cached_state(size, partial, model["size_bytes"])
    return states


def host_facts(options: Options, recipes: Sequence[_recipe.Recipe], cache: str) -> HostFacts:
    """This machine as the planner wants it, without starting a container tool: quick."""
    return HostFacts(
        gpus=gpus_here(options),
        cpu_count=os.cpu_count() or 1,
        runtimes=[name for name in ("podman", "docker") if which(name)],
        cached=cached_states(recipes, cache),
    )


def observed(options: Options, recipes: Sequence[_recipe.Recipe], choice: Choice) -> HostFacts:
    """This machine for a command that acts: also the labels of the engine image and the header of the model file."""
    from dataclasses import replace

    from ansible_collections.tensorless.fleet.plugins.module_utils._gguf import describe
    from ansible_collections.tensorless.fleet.plugins.module_utils._plan_observe import observe

    facts = observe(recipes, choice, None, command_runner(), which, describe)
    return replace(facts, gpus=gpus_here(options))


def choice_of(options: Options, cache: str, revision: str | None, **more: Any) -> Choice:
    """What the command line says of a server, as the planner takes it; ``more`` depends on where it runs."""
    return Choice(
        cache=cache,
        command=options.command,
        revision=revision,
        card=options.card,
        runtime=options.runtime,
        host=options.host,
        port=options.port,
        context=options.context,
        extra_args=tuple(options.extra_args),
        allow_draft=options.allow_draft,
        runs=options.runs,
        tokens=options.tokens,
        **more,
    )


def plan_here(options: Options, thorough: bool = False) -> dict[str, Any]:
    """The plan of this command on this machine. Raises Refusal."""
    from ansible_collections.tensorless.fleet.plugins.module_utils._plan import plan_model

    catalog = catalog_of(options)
    recipes, revision = _recipe.resolve(catalog, options.model)
    cache = cache_of(options)
    choice = choice_of(
        options,
        cache,
        revision,
        gpu=None if options.gpu is None else str(options.gpu),
        endpoint=os.environ.get("HF_ENDPOINT") or _plan_paths.DEFAULT_ENDPOINT,
        dry_run=options.dry_run,
    )
    facts = observed(options, recipes, choice) if thorough else host_facts(options, recipes, cache)
    return plan_model(recipes, facts, choice).plans[0]


def print_json(value: Any) -> None:
    """JSON for programs, on standard output."""
    import json

    sys.stdout.write(json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def answer(options: Options) -> int:
    """Shows what was asked for."""
    if options.command == "models":
        _models(options)
    elif options.command == "capabilities":
        _capabilities(options)
    elif options.command == "info":
        plan = plan_here(options)
        if options.json:
            print_json(_plan_text.info_json(plan))
        else:
            sys.stdout.write(_plan_text.info_text(plan))
    elif options.command in ("run", "pull", "serve"):
        plan = plan_here(options)
        steps = {"run": ("pull", "serve"), "pull": ("pull",), "serve": ("serve",)}[options.command]
        typed = f"tensorless {options.command} {plan['model']}"
        token = bool(os.environ.get("HF_TOKEN"))
        sys.stdout.write(_plan_text.dry_run_text(plan, typed, steps, token))
    elif options.command == "stop":
        plan = plan_here(options)
        sys.stdout.write(f"dry run of 'tensorless stop {plan['model']}': nothing is stopped.\n")
        for runtime in runtimes_to_ask(options):
            sys.stdout.write(f"{runtime} stop {plan['container_name']}\n")
    elif options.command == "bench":
        plan = plan_here(options)
        sys.stdout.write(f"dry run of 'tensorless bench {plan['model']}': nothing is measured.\n")
        for line in _plan_text.bench_lines(plan, options.runs, options.tokens):
            sys.stdout.write(line + "\n")
    else:
        from tensorless_fleet import _local

        return _local.answer(options)  # doctor, gguf-check: they change nothing anyway
    return 0


def runtimes_to_ask(options: Options) -> list[str]:
    """Where ``stop`` looks: the named runtime, else every installed one."""
    if options.runtime != "auto":
        return [options.runtime]
    return [name for name in ("podman", "docker") if which(name)] or ["podman"]


def _models(options: Options) -> None:
    catalog = catalog_of(options)
    gpus = gpus_here(options)
    cached = cached_states(catalog.recipes, cache_of(options))
    rows = _plan_text.model_rows(catalog, gpus, cached, options.card)
    if options.json:
        print_json(rows)
    else:
        sys.stdout.write(_plan_text.models_text(rows, gpus))


def _capabilities(options: Options) -> None:
    from tensorless_fleet._version import commit, platform, version_line

    data = _plan_text.capabilities(catalog_of(options), __version__, commit(), platform())
    if options.json:
        print_json(data)
        return
    sys.stdout.write(version_line())
    sys.stdout.write(f"recipe schema  {data['recipe_schema']}\nruntimes       {', '.join(data['runtimes'])}\n")
    for card in data["cards"]:
        sys.stdout.write(
            f"card           {card['id']}: {card['title'] or card['id']}, compute {card['compute_capability']}, at "
            f"least {card['min_memory_mib']} MiB, driver {card['min_driver']} or newer\n"
        )
    for row in data["recipes"]:
        status = row["status"] + ("" if row["published"] else ", unpublished")
        sys.stdout.write(f"recipe         {row['model']} on {row['card']} ({status}, {row['release']})\n")

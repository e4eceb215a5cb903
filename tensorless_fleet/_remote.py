# SPDX-License-Identifier: Apache-2.0
"""The commands on a fleet: options become a Fleet run, its events a view, its result an exit code."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any, cast

from ansible_collections.tensorless.fleet.plugins.module_utils import _plan_text

from tensorless_fleet import _show, _view
from tensorless_fleet._commands import CHECKABLE
from tensorless_fleet._usage import Options, Usage
from tensorless_fleet.errors import HostsFailed, Interrupted, PlayError, TensorlessError
from tensorless_fleet.fleet import Fleet, HostKeys, Run, ServerOptions, bench_values
from tensorless_fleet.results import Result

WITH_MODEL = ("run", "pull", "serve", "stop", "bench")
NOTHING = {
    "stop": "nothing is stopped",
    "bench": "nothing is measured",
    "run": "nothing is pulled, downloaded or started",
}


def answer(options: Options) -> int:
    """Runs one command on the fleet; returns the exit code."""
    fleet = Fleet(
        options.inventory,
        recipes=options.recipes,
        host_keys=cast(HostKeys, options.host_keys),
        hf_token=os.environ.get("HF_TOKEN") or None,
        forks=options.forks,
        vault_password_file=options.vault_password_file,
        become_password_file=options.become_password_file,
    )
    check_usage(options)
    if options.dry_run and options.command in WITH_MODEL:
        return dry_run(fleet, options)
    if options.command == "fleet" and options.watch:
        return watch(fleet, options)
    result = work(start(fleet, options), options)
    if options.dry_run and not options.json and options.command in CHECKABLE:
        sys.stdout.write("dry run: nothing was changed; what is said above is what would be done\n")
    if result.interrupted:
        return 130
    if options.command == "doctor" and any(
        check.level == "FAIL" for host in result.hosts.values() for check in host.checks
    ):
        return 1
    return 0 if result.ok else 1


def check_usage(options: Options) -> None:
    """Refuses, before any host is asked, a model or card that no recipe has. (Values: Fleet does.)"""
    if options.model is None:
        return
    from ansible_collections.tensorless.fleet.plugins.module_utils import _recipe

    recipes = find_model(options)
    if options.card is not None and recipes:
        _recipe.choose_card(recipes, options.card)


def find_model(options: Options) -> list[Any]:
    """The recipes that MODEL means. Raises Refusal where no recipe of the fleet has it.

    The built-in recipes (or --recipes) are asked first, then the folders that the inventory names. Where the inventory
    computes its folder, only the hosts' plan can tell: no recipes, no refusal.
    """
    from ansible_collections.tensorless.fleet.plugins.module_utils import _recipe
    from ansible_collections.tensorless.fleet.plugins.module_utils._refusal import Refusal

    try:
        return _recipe.resolve(_show.catalog_of(options), options.model)[0]
    except Refusal as refusal:
        if options.recipes or refusal.rc == 2:
            raise
        unknown = refusal
    folders = inventory_values(options, "tensorless_recipes_dir")
    if folders is None:
        return []  # the run itself says what is wrong with the inventory
    for folder in sorted(folders):
        if "{{" in folder or not os.path.isdir(folder):
            return []
        try:
            return _recipe.resolve(_recipe.load_directory(folder), options.model)[0]
        except Refusal as refusal:
            unknown = refusal
    raise unknown


def inventory_values(options: Options, name: str) -> set[str] | None:
    """The texts that a variable has on the hosts of the inventory; None where Ansible cannot read it."""
    import json
    import subprocess

    from tensorless_fleet._play import Job, environment
    from tensorless_fleet._private import Private

    words = [sys.executable, "-m", "ansible", "inventory", "--list"]
    for entry in options.inventory:
        words += ["-i", entry if "," in entry else os.path.abspath(entry)]
    if options.vault_password_file:
        words += ["--vault-password-file", options.vault_password_file]
    with Private() as private:
        env = environment(Job("inventory", "", options.inventory), private, os.environ)
        done = subprocess.run(words, env=env, capture_output=True, stdin=subprocess.DEVNULL, check=False)
    try:
        hosts = json.loads(done.stdout)["_meta"]["hostvars"]
    except (ValueError, KeyError, TypeError):
        return None
    return {str(values[name]) for values in hosts.values() if values.get(name)}


def server_options(options: Options) -> ServerOptions:
    """The options in Fleet's words: what was not given stays out, so that the inventory decides."""
    chosen: ServerOptions = {"hosts": options.limit, "check": False}
    if options.model is None:
        if options.allow_draft:
            chosen["allow_draft"] = True
        return chosen
    given = options.given
    if options.gpu is not None:
        chosen["gpu"] = options.gpu
    if options.card is not None:
        chosen["card"] = options.card
    if "port" in given:
        chosen["port"] = options.port
    if "host" in given:
        chosen["host"] = options.host
    if options.context is not None:
        chosen["context"] = options.context
    if options.extra_args:
        chosen["extra_args"] = options.extra_args
    if options.allow_draft:
        chosen["allow_draft"] = True
    if "runtime" in given:
        chosen["runtime"] = options.runtime
    if options.cache is not None:
        chosen["cache"] = options.cache
    return chosen


def start(fleet: Fleet, options: Options) -> Run:
    """Starts the run of this command."""
    values: dict[str, Any] = {}
    if options.command == "bench":
        values = bench_values(options.runs, options.tokens)
    chosen = server_options(options)
    if options.dry_run and options.command in CHECKABLE:
        chosen["check_mode"] = True
    return fleet.start(options.command, options.model, values=values, **chosen)


@contextmanager
def signals(run: Run) -> Iterator[None]:
    """While the run works: INT, TERM and HUP cancel it. The caller's handlers come back afterwards."""

    def cancel(_number: int, _frame: FrameType | None) -> None:
        run.cancel()

    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, cancel) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def work(run: Run, options: Options, show_result: bool = True) -> Result:
    """Shows a run until it ends."""
    words = f"tensorless {options.command}" + (f" {options.model}" if options.model else "")
    view = _view.choose(options.json, options.plain, words)
    with signals(run):
        try:
            with view:
                for event in run.events():
                    view.event(event)
        except OSError:
            # Nobody reads what is shown (`| head`), or it cannot be written: nothing goes on unseen.
            run.cancel()
            sys.stderr.write(
                f"tensorless: the output cannot be written, so {options.command} is ended; the same command goes on "
                "from there\n"
            )
            with suppress(TensorlessError):
                run.result()
            raise
        try:
            result = run.result()
        except Interrupted as error:
            result = error.result
        except HostsFailed as error:
            result = error.result
        except PlayError:
            if show_result and run.so_far.hosts:
                view.result(run.so_far)
            raise
    if show_result:
        view.result(result)
    if result.interrupted:
        where = "where each host stands is listed above, and the same command goes on from there"
        sys.stderr.write(f"tensorless: interrupted; {where if result.hosts else 'no host was touched'}\n")
    return result


def watch(fleet: Fleet, options: Options) -> int:
    """``fleet --watch N``: the table again and again, until Ctrl-C."""
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    if not sys.stdout.isatty():
        raise Usage("--watch needs a terminal; without one run fleet --json as often as you like")
    console = Console(highlight=False)
    with Live(Text("asking the hosts ..."), console=console, refresh_per_second=2, screen=True) as live:
        try:
            while True:
                run = start(fleet, options)
                result = run.result()
                stamp = time.strftime("%H:%M:%S")
                lines = [f"tensorless fleet, every {options.watch} s, last at {stamp}; Ctrl-C ends", ""]
                live.update(Text("\n".join(lines + _view.fleet_lines(result))))
                time.sleep(options.watch or 0)
        except KeyboardInterrupt:
            return 130


def dry_run(fleet: Fleet, options: Options) -> int:
    """The plan of the command on every host; what is the same is said once."""
    chosen = server_options(options)
    chosen["check_mode"] = True
    run = fleet.start("run", options.model, tags=("plan",), **chosen)
    result = work(run, options, show_result=options.json)
    if not options.json:
        sys.stdout.write(grouped_plan(options, result))
    if result.interrupted:
        return 130
    return 0 if result.ok else 1


def grouped_plan(options: Options, result: Result) -> str:
    """The plans of all hosts, grouped: recipe and download once, each different command once with its hosts."""
    typed = f"tensorless {options.command}" + (f" {options.model}" if options.model else "")
    number = len(result.hosts)
    where = f"{number} host{'' if number == 1 else 's'}"
    out = [f"dry run of '{typed}' on {where}: {NOTHING.get(options.command, NOTHING['run'])}."]
    pairs = [(host.host, plan) for host in result.hosts.values() for plan in host.plans]
    downloads: dict[tuple[str, str], list[tuple[str, dict[str, Any]]]] = {}
    for host, plan in pairs:
        downloads.setdefault((plan["model"], plan["download"]["sha256"]), []).append((host, plan))
    for (model, sha256), users in downloads.items():
        if options.command in ("stop", "bench"):
            for host, plan in users:
                out += ["", plan_line(host, plan), *deeds(options, plan)]
            continue
        plan = users[0][1]
        download = plan["download"]
        out += ["", f"recipe:   {model} on {plan['card']} ({plan['status']}), from {plan['recipe_path']}"]
        if plan["untuned_label"]:
            out.append(plan["untuned_label"])
        size = _plan_text.gigabytes(download["size_bytes"])
        missing = sorted({host for host, each in users if each["download"]["cached"] != "yes"})
        out.append(f"download: {size}, sha256 {sha256}, from {download['url']}")
        out.append(f"          missing on: {', '.join(missing) or 'no host'}")
        if options.command == "pull":
            continue
        out += grouped_commands(users)
    for host_result in result.hosts.values():
        for item in host_result.skipped:
            out += ["", f"# {host_result.host}: skipped: {item.get('reason')}"]
        if host_result.reason:
            out += ["", f"# {host_result.host}: {host_result.state.upper()}: {host_result.reason}"]
    return "\n".join(out) + "\n"


def plan_line(host: str, plan: dict[str, Any]) -> str:
    """Which card of a host a plan is for, and where its server answers."""
    cards = ", ".join(f"GPU {card['index']} ({card['uuid']})" for card in plan["cards"])
    return f"# {host}: {cards or 'GPU ' + plan['gpu']}, published on {plan['host']}:{plan['port']}"


def deeds(options: Options, plan: dict[str, Any]) -> list[str]:
    """What ``stop`` and ``bench`` would do on a host."""
    if options.command == "stop":
        return [f"systemctl disable --now tensorless@{plan['instance']}.service"]
    return _plan_text.bench_lines(plan, options.runs, options.tokens)


def grouped_commands(users: list[tuple[str, dict[str, Any]]]) -> list[str]:
    """Each different command once with the hosts that run it; card and address stand there where they vary."""
    groups: dict[str, list[tuple[str, dict[str, Any]]]] = {}
    for host, plan in users:
        groups.setdefault(_plan_text.command_text(general(plan["command"])), []).append((host, plan))
    out = []
    for text, members in groups.items():
        plans = [plan for _host, plan in members]
        if len({_plan_text.command_text(plan["command"]) for plan in plans}) == 1:
            text = _plan_text.command_text(plans[0]["command"])
        out += ["", *(plan_line(host, plan) for host, plan in members)]
        out += [_plan_text.command_text(plans[0]["pull_command"]), text]
    return out


def general(command: list[str]) -> list[str]:
    """A command with placeholders for the card and the published address."""
    words = list(command)
    for index, word in enumerate(words[:-1]):
        if word == "--device":
            words[index + 1] = "nvidia.com/gpu=<GPU>"
        elif word == "--gpus":
            words[index + 1] = "device=<GPU>"
        elif word == "-p":
            words[index + 1] = "<ADDRESS>:8080"
            break  # what follows is the image and the server's own arguments
    return words

# SPDX-License-Identifier: Apache-2.0
"""The command line's grammar: one or two dashes, flags before or after MODEL, values after a space or =."""

from __future__ import annotations

import re

import pytest

from tensorless_fleet import _commands, _help
from tensorless_fleet._commands import COMMANDS
from tensorless_fleet._usage import Usage, parse


def test_a_flag_may_stand_anywhere_and_have_one_dash_or_two():
    ways = [
        ["run", "pn3", "--port", "9000", "--detach"],
        ["run", "--port", "9000", "--detach", "pn3"],
        ["run", "-port=9000", "pn3", "-detach"],
        ["run", "-port", "9000", "-detach=true", "pn3"],
        ["--port=9000", "run", "--detach", "pn3"],
    ]
    for words in ways:
        options = parse(words)
        assert (options.command, options.model, options.port, options.detach) == ("run", "pn3", 9000, True), words


def test_what_follows_two_dashes_belongs_to_the_server():
    options = parse(["run", "pn3", "--context", "32768", "--", "--temp", "0.7", "--port", "1"])
    assert options.extra_args == ["--temp", "0.7", "--port", "1"]
    assert (options.context, options.port) == (32768, 8080)


def test_two_dashes_with_nothing_behind_add_nothing():
    assert parse(["pull", "pn3", "--"]).extra_args == []


def test_the_documented_defaults():
    options = parse(["bench", "pn3"])
    assert (options.host, options.port, options.runs, options.tokens) == ("127.0.0.1", 8080, 3, 256)
    assert (options.runtime, options.context, options.gpu, options.card) == ("auto", None, None, None)
    assert not options.allow_draft and not options.dry_run and not options.detach and not options.json


def test_the_fleet_flags_may_stand_before_the_command():
    options = parse(["-i", "a.yml", "-i", "b.yml", "run", "smol", "--limit", "p100-a"])
    assert (options.command, options.inventory, options.limit) == ("run", ["a.yml", "b.yml"], "p100-a")


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["frobnicate"], 'unknown command "frobnicate"'),
        (["run"], "run needs a MODEL"),
        (["run", "a", "b"], 'takes one MODEL; "b" is too much'),
        (["models", "pn3"], "models takes no MODEL"),
        (["run", "pn3", "--prot", "1"], "unknown flag --prot for run"),
        (["pull", "pn3", "--detach"], "pull takes no --detach"),
        (["run", "pn3", "--port", "0"], '--port needs a whole number from 1 to 65535, not "0"'),
        (["run", "pn3", "--port", "65536"], "from 1 to 65535"),
        (["run", "pn3", "--port", "80a"], "whole number"),
        (["run", "pn3", "--port", "8_0"], "whole number"),
        (["run", "pn3", "--port", "٨٠"], "whole number"),
        (["run", "pn3", "--port"], "--port needs a value"),
        (["run", "pn3", "--port", "--", "x"], "--port needs a value"),
        (["run", "pn3", "--gpu", "-1"], "of at least 0"),
        (["run", "pn3", "--context", "0"], "of at least 1"),
        (["run", "pn3", "--host", ""], "--host must not be empty"),
        (["run", "pn3", "--host="], "--host must not be empty"),
        (["run", "pn3", "--runtime", "containerd"], "auto, podman or docker"),
        (["run", "pn3", "--cache", "/a:b"], "contains ':'"),
        (["run", "pn3", "--detach=maybe"], "is a switch"),
        (["run", ""], "MODEL must not be empty"),
        (["bench", "pn3", "--runs", "0"], "of at least 1"),
        (["bench", "pn3", "--tokens", "1"], "of at least 2"),
        (["pull", "pn3", "--", "--temp", "1"], "takes no llama-server arguments"),
        (["stop", "pn3", "--", "--temp", "1"], "takes no llama-server arguments"),
        (["models", "-i", "x"], "models takes no -i"),
        (["fleet"], "fleet needs an inventory"),
        (["run", "pn3", "--limit", "a"], "belongs to --inventory"),
        (["doctor", "--json"], "event stream of a fleet"),
        (["version", "--json"], "version takes no --json"),
        (["-i", "x"], "no command"),
        (["--bogus", "run", "pn3"], "unknown flag --bogus"),
        (["gguf-check"], "gguf-check needs a FILE"),
    ],
)
def test_bad_usage_is_refused_with_its_reason(words, part):
    with pytest.raises(Usage) as error:
        parse(words)
    assert part in str(error.value)
    assert "\n" not in str(error.value)


def test_control_characters_in_bad_usage_do_not_reach_the_terminal():
    with pytest.raises(Usage) as error:
        parse(["run", "a", "\x1b]0;owned\x07"])
    assert "\x1b" not in str(error.value) and "\x07" not in str(error.value)


def test_help_wins_over_what_is_missing():
    assert parse(["run", "-h"]).help and parse(["run", "--help"]).help


def test_every_command_lists_its_flags_and_only_those():
    for command in COMMANDS:
        text = _help.of_command(command)
        for flag in _commands.FLAGS:
            takes = flag in _commands.flags_of(command)
            shown = re.search(rf"^  (-\w, )?--{flag.name}( |$)", text, re.M) is not None
            assert shown is takes, (command.name, flag.name)


def test_commands_for_fleets_alone_take_nothing_that_they_would_pass_over():
    for command in COMMANDS:
        names = {flag.name for flag in _commands.flags_of(command)}
        if command.where == (_commands.FLEET,):
            assert not names & set(_commands.NO_FLEET_USE), command.name
            assert ("dry-run" in names) is (command.name in _commands.CHECKABLE)
        elif command.flags:
            assert names >= set(_commands.NO_FLEET_USE) | {"dry-run"}, "as documented"


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["stop", "pn3", "--gpu", "0"], "stop takes no --gpu here: on a fleet every server of MODEL is stopped"),
        (["stop", "pn3", "--port", "8081"], "stop takes no --port here"),
        (["doctor", "--runtime", "podman"], "doctor takes no --runtime here: on a fleet the inventory says"),
        (["fleet", "--gpu", "2"], "fleet takes no --gpu (it belongs to: run, pull,"),
        (["fleet", "--dry-run"], "fleet takes no --dry-run"),
        (["info", "pn3"], "tensorless -i FILE run MODEL --dry-run"),
    ],
)
def test_what_a_fleet_would_pass_over_is_refused(words, part):
    with pytest.raises(Usage) as error:
        parse(["-i", "a.yml", *words])
    assert part in str(error.value)


def test_the_overview_names_every_command():
    text = _help.overview()
    for command in COMMANDS:
        assert f"  {command.name} " in text and command.summary in text


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_knows_every_command(shell):
    script = _help.completion(shell)
    for command in COMMANDS:
        assert command.name in script
    with pytest.raises(Usage):
        _help.completion("tcsh")

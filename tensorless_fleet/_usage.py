# SPDX-License-Identifier: Apache-2.0
"""Reads the command line by the tables of ``_commands``.

The parser is not argparse: a flag has one dash or two (``-port``, ``--port``), stands before or after MODEL, and
everything after ``--`` belongs to llama-server.
"""

from __future__ import annotations

import os
from typing import NoReturn, Optional, Union

from tensorless_fleet._commands import BY_NAME, COMMANDS, FLAGS, FLEET, LOCAL, NO_FLEET_USE, Command, Flag, flags_of

Value = Union[str, int, bool, "list[str]"]


class Usage(Exception):
    """Bad usage: the command line itself is refused (exit code 2)."""


# Flags that llama-server gets from the launcher are refused after ``--`` by the plan (one list, in the recipe rules).


class Options:
    """What the command line said. A flag that was not given is None (or False, for a switch)."""

    def __init__(self, command: Command) -> None:
        self.command = command.name
        self.model: Optional[str] = None
        self.operand: Optional[str] = None
        self.extra_args: list[str] = []
        self.help = False
        self.recipes: Optional[str] = None
        self.card: Optional[str] = None
        self.gpu: Optional[int] = None
        self.runtime = "auto"
        self.cache: Optional[str] = None
        self.allow_draft = False
        self.dry_run = False
        self.host = "127.0.0.1"
        self.port = 8080
        self.context: Optional[int] = None
        self.detach = False
        self.json = False
        self.runs = 3
        self.tokens = 256
        self.inventory: list[str] = []
        self.limit: Optional[str] = None
        self.forks: Optional[int] = None
        self.host_keys = "strict"
        self.vault_password_file: Optional[str] = None
        self.become_password_file: Optional[str] = None
        self.watch: Optional[int] = None
        self.plain = False
        self.given: set[str] = set()


def _convert(flag: Flag, shown: str, text: str) -> Value:
    if flag.number:
        try:
            number = int(text, 10) if text.isascii() and text.strip() == text and "_" not in text else None
        except ValueError:
            number = None
        low, high = flag.minimum, flag.maximum
        if number is None or number < (low or 0) or (high is not None and number > high):
            span = f"from {low} to {high}" if high is not None else f"of at least {low}"
            raise Usage(f"{shown} needs a whole number {span}, not {_quote(text)}")
        return number
    if flag.choices and text not in flag.choices:
        raise Usage(f"{shown} must be {_any_of(flag.choices)}, not {_quote(text)}")
    if not text:
        raise Usage(f"{shown} must not be empty")
    return text


def _quote(text: str) -> str:
    return '"' + text.encode("unicode_escape").decode("ascii").replace('"', '\\"') + '"'


def _any_of(words: tuple[str, ...]) -> str:
    return ", ".join(words[:-1]) + " or " + words[-1]


def _bad_flag(word: str, command: Command) -> NoReturn:
    for flag in FLAGS:
        if word.lstrip("-").split("=", 1)[0] in (flag.name, flag.short or flag.name):
            shown = word.split("=", 1)[0]
            if flag.fleet and command.name == "info":
                raise Usage(f"info takes no {shown}; for the plans of a fleet: tensorless -i FILE run MODEL --dry-run")
            takers = ", ".join(each.name for each in COMMANDS if flag in flags_of(each))
            raise Usage(f"{command.name} takes no {shown} (it belongs to: {takers})")
    raise Usage(
        f"unknown flag {word.split('=', 1)[0]} for {command.name}; 'tensorless {command.name} -h' lists its flags"
    )


def parse(words: list[str]) -> Options:
    """The command line after ``tensorless``, read and checked. Raises Usage for whatever is refused."""
    if not words:
        raise Usage("no command")
    first, rest = words[0], words[1:]
    if first in ("-h", "-help", "--help"):
        first = "help"
    if first in ("-version", "--version"):
        first = "version"
    if first.startswith("-"):
        # Flags may stand before MODEL, and so may -i before the command: find the command's word.
        first, rest = _command_word(words)
    command = BY_NAME.get(first)
    if command is None:
        raise Usage(f"unknown command {_quote(first)}; the commands are: {', '.join(BY_NAME)}")
    options = Options(command)
    flags = {flag.name: flag for flag in flags_of(command)}
    flags.update({flag.short: flag for flag in flags_of(command) if flag.short})
    operands: list[str] = []
    index = 0
    while index < len(rest):
        word = rest[index]
        index += 1
        if word == "--":
            options.extra_args = rest[index:]
            options.given.add("--")
            break
        if not word.startswith("-") or word == "-":
            operands.append(word)
            continue
        if word in ("-h", "-help", "--help"):
            options.help = True
            continue
        name, equals, value = word[2 if word.startswith("--") else 1 :].partition("=")
        flag = flags.get(name)
        if flag is None or (flag.short == name and word.startswith("--") and len(name) == 1):
            _bad_flag(word, command)
        shown = word.partition("=")[0]
        if flag.switch:
            if equals and value not in ("true", "false"):
                raise Usage(f"{shown} is a switch: give it without a value, not {_quote(value)}")
            parsed: Value = value != "false"
        else:
            if not equals:
                if index >= len(rest) or rest[index] == "--":
                    raise Usage(f"{shown} needs a value: {shown} {flag.metavar}")
                value = rest[index]
                index += 1
            parsed = _convert(flag, shown, value)
        field = flag.name.replace("-", "_")
        if flag.repeat:
            getattr(options, field).append(parsed)
        else:
            setattr(options, field, parsed)
        options.given.add(flag.name)
    if not options.help:
        _check(options, command, operands)
    return options


def _command_word(words: list[str]) -> tuple[str, list[str]]:
    """``tensorless -i hosts.yml run pn3``: the command after the flags that stand before it."""
    takes_value = {name for flag in FLAGS if not flag.switch for name in (flag.name, flag.short) if name}
    index = 0
    while index < len(words):
        word = words[index]
        if word == "--":
            break
        if not word.startswith("-"):
            return word, words[:index] + words[index + 1 :]
        name, equals, _value = word.lstrip("-").partition("=")
        index += 2 if name in takes_value and not equals else 1
    known = {name for flag in FLAGS for name in (flag.name, flag.short)}
    word = words[0].partition("=")[0]
    if word.lstrip("-") not in known:
        raise Usage(f"unknown flag {word}")
    raise Usage("no command: flags alone do nothing")


def _check(options: Options, command: Command, operands: list[str]) -> None:
    wanted = "MODEL" if command.model else command.operand
    if wanted and not operands:
        example = "pn3" if command.model else "model.gguf" if command.name == "gguf-check" else "bash"
        raise Usage(f"{command.name} needs {_article(wanted)}, for example: tensorless {command.name} {example}")
    if len(operands) > (1 if wanted else 0):
        extra = operands[1] if wanted else operands[0]
        takes = f"one {wanted}" if wanted else "no MODEL"
        raise Usage(f"{command.name} takes {takes}; {_quote(extra)} is too much")
    if command.model:
        options.model = operands[0]
        if not options.model:
            raise Usage("MODEL must not be empty")
    elif command.operand:
        options.operand = operands[0]
    if "--" in options.given and not command.extra and options.extra_args:
        raise Usage(f"{command.name} takes no llama-server arguments after --; run, serve and info do")
    if options.inventory and FLEET not in command.where:
        raise Usage(f"{command.name} works on this machine only; leave --inventory out")
    if options.inventory:
        _check_fleet(options, command)
    if not options.inventory and LOCAL not in command.where:
        raise Usage(f"{command.name} needs an inventory: tensorless {command.name} -i inventory.yml")
    if not options.inventory:
        for flag in FLAGS:
            if flag.fleet and flag.name in options.given:
                raise Usage(f"--{flag.name} belongs to --inventory; on this machine alone it means nothing")
        if options.json and command.name in ("run", "pull", "serve", "stop", "doctor"):
            raise Usage(f"--json of {command.name} is the event stream of a fleet: add --inventory FILE")
    if options.cache is not None:
        options.cache = os.path.abspath(os.path.expanduser(options.cache))
        if ":" in options.cache:
            raise Usage(
                f"--cache {options.cache} contains ':', which a container mount cannot express; choose a "
                "directory without one"
            )


def _check_fleet(options: Options, command: Command) -> None:
    """Refuses what would be passed over in silence on a fleet."""
    given = [name for name in NO_FLEET_USE if name in options.given]
    if command.name == "stop":
        given = [name for name in given if name in ("gpu", "host", "port", "context")]
        why = "on a fleet every server of MODEL is stopped, on whichever card; --limit chooses the hosts"
    elif not command.model:
        why = "on a fleet the inventory says what each host serves"
    else:
        return
    if given:
        raise Usage(f"{command.name} takes no --{given[0]} here: {why}")


def _article(word: str) -> str:
    return ("an " if word[0] in "AEIO" else "a ") + word

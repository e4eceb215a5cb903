# SPDX-License-Identifier: Apache-2.0
"""The commands and flags of ``tensorless``, and the parser that reads them.

One table is the source of the parser, of ``tensorless help``, of each command's ``-h``, of the shell completion and of
``docs/reference/cli.md``. The parser is not argparse: a flag has one dash or two (``-port``, ``--port``), stands before
or after MODEL, and everything after ``--`` belongs to llama-server.
"""

from __future__ import annotations

import os
from typing import NamedTuple, NoReturn, Optional, Union

Value = Union[str, int, bool, "list[str]"]

LOCAL = "local"
FLEET = "fleet"


class Usage(Exception):
    """Bad usage: the command line itself is refused (exit code 2)."""


class Flag(NamedTuple):
    """One flag. ``commands`` is empty for a flag that every command takes."""

    name: str
    metavar: str
    default: str
    meaning: str
    commands: tuple[str, ...] = ()
    minimum: Optional[int] = None
    maximum: Optional[int] = None
    choices: tuple[str, ...] = ()
    short: str = ""
    repeat: bool = False
    fleet: bool = False

    @property
    def switch(self) -> bool:
        return not self.metavar

    @property
    def number(self) -> bool:
        return self.minimum is not None


class Command(NamedTuple):
    """One command: its summary and what it takes."""

    name: str
    summary: str
    model: bool = False
    extra: bool = False
    where: tuple[str, ...] = (LOCAL, FLEET)
    operand: str = ""
    flags: bool = True
    about: str = ""

    @property
    def usage(self) -> str:
        words = ["tensorless", self.name]
        if self.model:
            words.append("MODEL")
        if self.operand:
            words.append(self.operand)
        if self.flags:
            words.append("[flags]")
        if self.extra and self.name != "info":  # the documentation's usage line of info leaves them out
            words.append("[-- llama-server args]")
        return " ".join(words)


COMMANDS: tuple[Command, ...] = (
    Command(
        "run",
        "Pull, then serve.",
        model=True,
        extra=True,
        about="Before anything is pulled, the port and the container's name must be free. On this machine the "
        "server's log is followed and Ctrl-C stops the server, unless --detach is given. On a fleet every "
        "host is brought from bare to healthy, and the servers come back after a reboot.",
    ),
    Command(
        "pull",
        "Pull the engine image by digest and download the model into the Hugging Face cache.",
        model=True,
        about="A download that was interrupted goes on where it stopped. A file whose sha256 differs is removed.",
    ),
    Command(
        "serve",
        "Start the server, wait until it is healthy, and print the endpoint.",
        model=True,
        extra=True,
        about="Starts from what `pull` has fetched and checked; fetches nothing.",
    ),
    Command(
        "stop",
        "Stop the model's server.",
        model=True,
        about="Looks in every installed runtime (or the one --runtime names). That nothing runs is no failure.",
    ),
    Command(
        "bench",
        "Measure decode speed against the running server and compare it with the receipt.",
        model=True,
        about="Measures the server that answers on --host and --port; starts none.",
    ),
    Command("models", "List the recipes, whether they fit this GPU, and whether the model is cached.", where=(LOCAL,)),
    Command("info", "Show a recipe exactly as it would run. Needs no GPU.", model=True, extra=True, where=(LOCAL,)),
    Command(
        "doctor",
        "Check the GPU, driver, container runtime, NVIDIA container support and disk space.",
        about="Exits 1 when a check failed.",
    ),
    Command(
        "capabilities",
        "Describe this launcher: version, recipes, runtimes. Needs no GPU, runtime or network.",
        where=(LOCAL,),
    ),
    Command("fleet", "Show each host and card: plan, state, health, tuned, last bench.", where=(FLEET,)),
    Command("report", "Write the fleet report (JSON, Markdown, HTML) from what is known.", where=(FLEET,)),
    Command(
        "upgrade", "Move running servers to the recipes of this version, one batch of hosts at a time.", where=(FLEET,)
    ),
    Command("rollback", "Take servers back to what they ran before the last upgrade.", where=(FLEET,)),
    Command("verify", "Hash the cached model files again and compare them with the recipes.", where=(FLEET,)),
    Command(
        "gguf-check",
        "Check a GGUF file: header, tensors, and whether its weights are PN.",
        operand="FILE",
        where=(LOCAL,),
    ),
    Command(
        "completion", "Print a completion script for bash, zsh or fish.", operand="SHELL", where=(LOCAL,), flags=False
    ),
    Command("version", "Print the version.", where=(LOCAL,), flags=False),
    Command("help", "Print the list of commands.", where=(LOCAL,), flags=False),
)
BY_NAME: dict[str, Command] = {command.name: command for command in COMMANDS}
FLEET_COMMANDS = tuple(command.name for command in COMMANDS if FLEET in command.where)

FLAGS: tuple[Flag, ...] = (
    Flag(
        "recipes",
        "DIR",
        "built-in recipes",
        "Read recipes from DIR/<org>/<repo>/<card>.toml instead of the built-in ones.",
    ),
    Flag(
        "card",
        "ID",
        "detected",
        "Use this card's recipe, for example p100, and skip GPU detection, with its memory and driver checks.",
    ),
    Flag(
        "gpu",
        "N",
        "the first GPU that matches the recipe",
        "Use GPU index N, as nvidia-smi numbers them. The container gets only that GPU.",
        minimum=0,
    ),
    Flag(
        "runtime",
        "NAME",
        "auto",
        "The container runtime. auto prefers podman, then docker.",
        choices=("auto", "podman", "docker"),
    ),
    Flag(
        "cache",
        "DIR",
        "$HF_HUB_CACHE, else $HF_HOME/hub, else ~/.cache/huggingface/hub",
        "The Hugging Face cache directory for model files.",
    ),
    Flag(
        "allow-draft",
        "",
        "off",
        "Allow a draft recipe, or a MODEL@REVISION other than the recipe's. Never allows a "
        "recipe that is not published.",
    ),
    Flag(
        "dry-run",
        "",
        "off",
        "Print every command and download URL instead of running it. The GPU list is still "
        "read, unless --card is given.",
    ),
    Flag("host", "ADDR", "127.0.0.1", "The host address the server is published on. Must not be empty."),
    Flag("port", "N", "8080", "The host port the server is published on.", minimum=1, maximum=65535),
    Flag(
        "context",
        "N",
        "the recipe's run.context",
        "The context length. Any other value than the recipe's makes the run untuned.",
        minimum=1,
    ),
    Flag(
        "detach",
        "",
        "off",
        "Return once the server is healthy instead of following its logs.",
        commands=("run", "serve"),
    ),
    Flag(
        "json",
        "",
        "off",
        "Print JSON. With --inventory: one JSON object per line, events first, the result last.",
        commands=(
            "bench",
            "models",
            "info",
            "capabilities",
            "gguf-check",
            "run",
            "pull",
            "serve",
            "stop",
            "doctor",
            "fleet",
            "report",
            "upgrade",
            "rollback",
            "verify",
        ),
    ),
    Flag("runs", "N", "3", "The number of measured runs. At least 1.", commands=("bench",), minimum=1),
    Flag("tokens", "N", "256", "Tokens to generate per run. At least 2.", commands=("bench",), minimum=2),
    Flag(
        "inventory",
        "FILE",
        "this machine",
        "Work on the hosts of this Ansible inventory (a file, a folder or a "
        "comma-separated list) instead of this machine. May be given more than once.",
        commands=FLEET_COMMANDS,
        short="i",
        repeat=True,
        fleet=True,
    ),
    Flag(
        "limit",
        "PATTERN",
        "gpu",
        "Only the hosts that this Ansible pattern names.",
        commands=FLEET_COMMANDS,
        fleet=True,
    ),
    Flag(
        "forks",
        "N",
        "Ansible's own (5)",
        "How many hosts are worked on at once.",
        commands=FLEET_COMMANDS,
        minimum=1,
        fleet=True,
    ),
    Flag(
        "host-keys",
        "POLICY",
        "strict",
        "What to do with ssh host keys: strict refuses an unknown or changed key, "
        "accept-new takes unknown ones and refuses changed ones, off checks nothing.",
        commands=FLEET_COMMANDS,
        choices=("strict", "accept-new", "off"),
        fleet=True,
    ),
    Flag(
        "vault-password-file",
        "FILE",
        "none",
        "Where Ansible reads the vault password.",
        commands=FLEET_COMMANDS,
        fleet=True,
    ),
    Flag(
        "become-password-file",
        "FILE",
        "none",
        "Where Ansible reads the sudo password.",
        commands=FLEET_COMMANDS,
        fleet=True,
    ),
    Flag(
        "watch",
        "SECONDS",
        "once",
        "Show the table again every so many seconds, until Ctrl-C.",
        commands=("fleet",),
        minimum=1,
        fleet=True,
    ),
    Flag(
        "plain",
        "",
        "off when a terminal shows the output",
        "Plain lines instead of the live view.",
        commands=FLEET_COMMANDS,
        fleet=True,
    ),
)

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


def flags_of(command: Command) -> list[Flag]:
    """The flags that ``command`` takes, in the table's order."""
    if not command.flags:
        return []
    return [flag for flag in FLAGS if not flag.commands or command.name in flag.commands]


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
            takers = ", ".join(flag.commands) or "every command but version"
            raise Usage(f"{command.name} takes no {word.split('=', 1)[0]} (it belongs to: {takers})")
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


def _article(word: str) -> str:
    return ("an " if word[0] in "AEIO" else "a ") + word

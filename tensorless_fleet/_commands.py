# SPDX-License-Identifier: Apache-2.0
"""The commands and flags of ``tensorless``.

One table is the source of the parser, of ``tensorless help``, of each command's ``-h``, of the shell completion and of
``docs/reference/cli.md``.
"""

from __future__ import annotations

from typing import NamedTuple

LOCAL = "local"
FLEET = "fleet"


class Flag(NamedTuple):
    """One flag. ``commands`` is empty for a flag that every command takes."""

    name: str
    metavar: str
    default: str
    meaning: str
    commands: tuple[str, ...] = ()
    minimum: int | None = None
    maximum: int | None = None
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
        "upgrade",
        "Move running servers to the recipes of this version, one batch of hosts at a time.",
        where=(FLEET,),
        about="With --dry-run it says which servers would move, and to what.",
    ),
    Command(
        "rollback",
        "Take servers back to what they ran before the last upgrade.",
        where=(FLEET,),
        about="Changes nothing where no earlier plan is kept. With --dry-run it only says what would go back.",
    ),
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

# What the commands that are for fleets alone cannot use: there the inventory says what each host serves and how.
NO_FLEET_USE = ("card", "gpu", "runtime", "cache", "host", "port", "context")
CHECKABLE = ("upgrade", "rollback")  # of those commands, the ones that change hosts and take --dry-run


def flags_of(command: Command) -> list[Flag]:
    """The flags that ``command`` takes, in the table's order."""
    if not command.flags:
        return []
    chosen = [flag for flag in FLAGS if not flag.commands or command.name in flag.commands]
    if LOCAL not in command.where:
        useless = NO_FLEET_USE if command.name in CHECKABLE else (*NO_FLEET_USE, "dry-run")
        chosen = [flag for flag in chosen if flag.name not in useless]
    return chosen

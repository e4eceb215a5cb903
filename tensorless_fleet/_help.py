# SPDX-License-Identifier: Apache-2.0
"""Help texts, the reference page and the shell completion, all made from the one table in ``_commands``."""

from __future__ import annotations

import textwrap

from tensorless_fleet._commands import COMMANDS, FLAGS, FLEET, FLEET_COMMANDS, LOCAL, Command, Flag, flags_of
from tensorless_fleet._usage import Usage

EXIT_CODES = (
    (0, "Success, including `help` and `-h`."),
    (1, "The command failed on this machine or on a host, or `doctor` found a failure."),
    (
        2,
        "Bad usage: an unknown command or flag, a missing or extra MODEL, a refused value, an inventory or host "
        "pattern that leads to no host. Nothing was touched.",
    ),
    (130, "Interrupted by Ctrl-C, SIGTERM or a terminal that closed."),
)
ENVIRONMENT = (
    ("HF_HUB_CACHE", "The model cache directory. `--cache` takes precedence. An empty value counts as not set."),
    ("HF_HOME", "When `HF_HUB_CACHE` is not set, the cache is `$HF_HOME/hub`."),
    ("HF_ENDPOINT", "The Hub that models are downloaded from (default `https://huggingface.co`)."),
    (
        "HF_TOKEN",
        "Sent with downloads from `HF_ENDPOINT`, for private or gated repositories. Never printed and never "
        "written where a run leaves traces.",
    ),
    ("XDG_STATE_HOME", "The base of the state directory, `$XDG_STATE_HOME/tensorless` (default `~/.local/state`)."),
    ("NO_COLOR", "Set to anything: no colours in the live view."),
)


def overview() -> str:
    """What ``tensorless help`` prints."""
    width = max(len(command.name) for command in COMMANDS)
    lines = [
        "tensorless runs tuned models on Tesla P100 cards: on this machine, or on the hosts of an inventory.",
        "",
        "usage: tensorless COMMAND [MODEL] [flags] [-- llama-server args]",
        "",
        "commands:",
    ]
    lines += [f"  {command.name:<{width}}  {command.summary}" for command in COMMANDS]
    lines += [
        "",
        "With -i INVENTORY a command works on a fleet: tensorless -i inventory.yml run pn3 --detach",
        "Run 'tensorless COMMAND -h' for a command's flags.",
    ]
    return "\n".join(lines) + "\n"


def _flag_words(flag: Flag) -> str:
    short = f"-{flag.short}, " if flag.short else ""
    return f"{short}--{flag.name}" + (f" {flag.metavar}" if flag.metavar else "")


def of_command(command: Command) -> str:
    """What ``tensorless COMMAND -h`` prints."""
    lines = [f"usage: {command.usage}", "", *textwrap.wrap(command.summary, 100)]
    if command.about:
        lines += ["", *textwrap.wrap(command.about.replace("`", ""), 100)]
    for title, fleet in (("flags:", False), ("flags for a fleet:", True)):
        chosen = [flag for flag in flags_of(command) if flag.fleet is fleet]
        if not chosen:
            continue
        lines += ["", title]
        for flag in chosen:
            lines.append(f"  {_flag_words(flag)}")
            text = flag.meaning + ("" if flag.switch else f" Default: {flag.default}.")
            lines += textwrap.wrap(text, 96, initial_indent="      ", subsequent_indent="      ")
    return "\n".join(lines) + "\n"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def reference() -> str:
    """The page ``docs/reference/cli.md``."""
    out = [
        "<!-- Made from the command's own tables: python -m tensorless_fleet._help > docs/reference/cli.md -->",
        "# Command line",
        "",
        "    tensorless COMMAND [MODEL] [flags] [-- llama-server args]",
        "",
        "Without `--inventory` a command works on this machine, as you, with the container started exactly as the plan "
        "prints it. With `-i INVENTORY` it works on the hosts of an Ansible inventory, several at once, as root and "
        "through systemd. A flag has one dash or two, stands before or after MODEL, and takes its value after a space "
        "or `=`. Differences from the launcher's documentation are listed in [differences](differences.md).",
        "",
        "## Commands",
        "",
        "| Command | Usage | Works on | Summary |",
        "| --- | --- | --- | --- |",
    ]
    names = {(LOCAL,): "this machine", (FLEET,): "a fleet", (LOCAL, FLEET): "this machine, a fleet"}
    for command in COMMANDS:
        out.append(
            f"| [`{command.name}`](#{command.name}) | `{command.usage}` | {names[command.where]} | "
            f"{_cell(command.summary)} |"
        )
    out += [
        "",
        "## MODEL",
        "",
        "| Form | Example |",
        "| --- | --- |",
        "| Repo id, in any case | `iamMrDuncan/Qwen3.8-27B-PN3-GGUF` |",
        "| Short name of a recipe | `pn3` |",
        "| Either with a revision: 40 lower-case hex digits | `pn3@c701b6690ec360b16d40f85df1cb76062e30cd38` |",
        "",
        "A revision other than the recipe's needs `--allow-draft` and makes the run untuned.",
        "",
        "## Flags",
        "",
        "| Flag | Default | Commands | Meaning |",
        "| --- | --- | --- | --- |",
    ]
    for flag in FLAGS:
        if not flag.commands:
            takers = "all"
        elif flag.commands == FLEET_COMMANDS:
            takers = "those that work on a fleet"
        else:
            takers = ", ".join(f"`{name}`" for name in flag.commands)
        choices = f" One of {', '.join(f'`{choice}`' for choice in flag.choices)}." if flag.choices else ""
        out.append(f"| `{_flag_words(flag)}` | {_cell(flag.default)} | {takers} | {_cell(flag.meaning)}{choices} |")
    out += [
        "",
        "`version`, `help` and `completion` take no flags. `run`, `serve` and `info` accept llama-server arguments "
        "after `--`; they make the run untuned.",
        "",
        "## Exit codes",
        "",
        "| Code | Meaning |",
        "| --- | --- |",
    ]
    out += [f"| `{code}` | {meaning} |" for code, meaning in EXIT_CODES]
    out += ["", "## Environment", "", "| Variable | Meaning |", "| --- | --- |"]
    out += [f"| `{name}` | {meaning} |" for name, meaning in ENVIRONMENT]
    for command in COMMANDS:
        out += ["", f"## {command.name}", "", "```text", of_command(command).rstrip(), "```"]
    return "\n".join(out) + "\n"


def completion(shell: str) -> str:
    """A completion script. Raises Usage for a shell that it does not know."""
    names = " ".join(command.name for command in COMMANDS)
    if shell == "bash":
        cases = "\n".join(
            f"    {command.name}) words='{' '.join('--' + flag.name for flag in flags_of(command))}' ;;"
            for command in COMMANDS
        )
        return f"""# tensorless completion for bash: eval "$(tensorless completion bash)"
_tensorless() {{
  local cur=${{COMP_WORDS[COMP_CWORD]}} word command='' words=''
  for word in "${{COMP_WORDS[@]:1:COMP_CWORD-1}}"; do
    case " {names} " in *" $word "*) command=$word; break ;; esac
  done
  case $command in
    '') words='{names}' ;;
{cases}
  esac
  if [[ -n $command && $cur != -* ]]; then
    mapfile -t COMPREPLY < <(compgen -f -- "$cur")
    case $command in run|pull|serve|stop|bench|info)
      word=$(tensorless models 2>/dev/null | awk '$1 ~ "/" {{print $1}}')
      mapfile -t -O "${{#COMPREPLY[@]}}" COMPREPLY < <(compgen -W "$word" -- "$cur") ;;
    esac
  else
    mapfile -t COMPREPLY < <(compgen -W "$words" -- "$cur")
  fi
}}
complete -F _tensorless tensorless
"""
    if shell == "zsh":
        described = "\n".join(f"    '{command.name}:{command.summary.replace(chr(39), '')}'" for command in COMMANDS)
        cases = "\n".join(
            f"    {command.name}) _arguments -s "
            + " ".join(
                f"'--{flag.name}[{flag.default}]"
                + (f":{flag.metavar}:" + ("_files" if flag.metavar in ("DIR", "FILE") else "") if flag.metavar else "")
                + "'"
                for flag in flags_of(command)
            )
            + " '*:file:_files' ;;"
            for command in COMMANDS
            if flags_of(command)
        )
        return f"""#compdef tensorless
# tensorless completion for zsh: tensorless completion zsh > ~/.zfunc/_tensorless
_tensorless() {{
  local -a commands=(
{described}
  )
  if (( CURRENT == 2 )); then
    _describe command commands
    return
  fi
  local command=$words[2]
  shift words
  (( CURRENT-- ))
  case $command in
{cases}
  esac
}}
compdef _tensorless tensorless
"""
    if shell == "fish":
        lines = [
            "# tensorless completion for fish: tensorless completion fish > ~/.config/fish/completions/tensorless.fish"
        ]
        for command in COMMANDS:
            summary = command.summary.replace("'", "")
            lines.append(f"complete -c tensorless -n __fish_use_subcommand -f -a {command.name} -d '{summary}'")
        for command in COMMANDS:
            for flag in flags_of(command):
                short = f" -s {flag.short}" if flag.short else ""
                needs = "" if flag.switch else " -r"
                seen = f"__fish_seen_subcommand_from {command.name}"
                lines.append(f"complete -c tensorless -n '{seen}' -l {flag.name}{short}{needs}")
        return "\n".join(lines) + "\n"
    raise Usage(f'no completion for the shell "{shell}"; there is bash, zsh and fish')


if __name__ == "__main__":
    print(reference(), end="")

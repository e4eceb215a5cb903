# SPDX-License-Identifier: Apache-2.0
"""Walks the launcher's documentation: every command line is accepted, and what is literal comes out word for word."""

from __future__ import annotations

import json
import os
import pathlib
import re
import stat

import pytest

from tensorless_fleet import _commands, _usage, cli
from tests.unit.cli import documented

PN3 = "iamMrDuncan/Qwen3.8-27B-PN3-GGUF"
Q3FLOOR = "iamMrDuncan/Qwen3.8-27B-UD-IQ3_XXS-Q3Floor-GGUF"


@pytest.fixture
def machine(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    """The documentation's laptop: podman, no NVIDIA driver, an empty cache in /home/you."""
    programs = tmp_path / "bin"
    programs.mkdir()
    add(programs, "podman", "#!/bin/sh\nexit 1\n")
    monkeypatch.setenv("PATH", str(programs))
    monkeypatch.setenv("HOME", "/home/you")
    for name in ("HF_HUB_CACHE", "HF_HOME", "HF_ENDPOINT", "HF_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    return programs


def plain(words: str) -> str:
    """Typewriter apostrophes, as a terminal shows them."""
    return words.replace("\u2019", "'")


def add(folder: pathlib.Path, name: str, script: str) -> None:
    path = folder / name
    path.write_text(script)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


def output(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> str:
    got = cli.main(list(words))
    captured = capsys.readouterr()
    assert got == code, captured.err
    return captured.out if code == 0 else captured.err


def test_every_command_line_of_the_documentation_is_accepted():
    seen = 0
    for command in [example.command for example in documented.examples()] + documented.inline():
        words = documented.Example("", command, "").words
        if words[0] in ("run", "pull", "serve", "stop", "bench", "info") and all(w.startswith("-") for w in words[1:]):
            continue  # the command's name in a sentence
        assert words
        options = _usage.parse(words)
        assert options.command in _commands.BY_NAME, command
        seen += 1
    assert seen > 60


def test_the_commands_and_their_usage_lines_are_the_documented_ones():
    rows = re.findall(r"^\| \[`(\w+)`\]\(#\w+\)\s+\| `(tensorless [^`]+)`\s+\| (.*?)\s+\|$", documented.text(), re.M)
    assert len(rows) == 11
    for name, usage, summary in rows:
        command = _commands.BY_NAME[name]
        assert (command.usage, command.summary) == (usage, plain(summary)), name


def test_the_documented_flags_their_kinds_and_defaults():
    table = documented.text().split("### Common flags")[1].split("### Extra llama-server arguments")[0]
    rows = re.findall(r"^\| `--([a-z-]+)(?: ([A-Z]+))?`\s+\| ([^|]+?)\s+\| (.+?)\s+\|", table, re.M)
    assert len(rows) == 14
    flags = {flag.name: flag for flag in _commands.FLAGS}
    for name, metavar, kind, default in rows:
        flag = flags[name]
        assert flag.metavar == metavar
        if name not in ("detach", "json", "runs", "tokens"):
            assert flag.commands == ()
            assert flag.default == plain(default.replace("`", "")), name
        else:
            assert set(re.findall(r"`(\w+)`", kind)) <= set(flag.commands)
            assert flag.default == default.replace("`", ""), name


def test_info_word_for_word(machine, capsys):
    (shown,) = documented.blocks("Show a recipe")
    got = documented.squeezed(output(capsys, "info", PN3))
    want = documented.squeezed(shown)
    assert got[: len(want)] == want
    rest = "\n".join(got[len(want) :])
    assert re.search(r"^Run$", rest, re.M) and re.search(r"^Receipt$", rest, re.M)


def test_the_plan_of_run_word_for_word(machine, capsys):
    (shown,) = documented.blocks("Show the plan of a command")
    got = documented.squeezed(output(capsys, "run", PN3, "--card", "p100", "--dry-run"))
    want = documented.squeezed(shown)
    assert got[: len(want)] == want
    rest = "\n".join(got[len(want) :])
    assert "podman run -d --rm --name tensorless-iammrduncan-qwen3.8-27b-pn3-gguf" in rest and "/health" in rest


def test_models_without_a_gpu_word_for_word(machine, capsys):
    _version, shown = install_page()
    assert output(capsys, "models").rstrip("\n") == shown


def install_page() -> list[str]:
    page = documented.text().split("# Install the launcher\n")[1].split("\n# Prepare a Linux host")[0]
    return [
        block for block in re.findall(r"```text\n(.*?)\n```", page, re.S) if block.startswith(("tensorless ", "MODEL"))
    ]


def test_version_has_the_documented_form(machine, capsys):
    shown = install_page()[0]
    form = re.escape(re.sub(r"[0-9a-f]{40}", "HEX", shown)).replace("HEX", "[0-9a-f]{40}")
    for words in (["version"], ["--version"], ["-version"]):
        assert re.fullmatch(
            form.replace(re.escape(" (commit [0-9a-f]{40})"), "()"), output(capsys, *words).rstrip("\n")
        )


@pytest.mark.parametrize(
    ("words", "number"),
    [
        (["--context", "32768"], 0),
        (["--", "--temp", "0.7"], 1),
        (["--context", "32768", "--", "--temp", "0.7"], 3),
    ],
)
def test_untuned_lines_word_for_word(machine, capsys, words, number):
    page = documented.text().split("# Change the context length or server arguments\n")[1]
    shown = re.findall(r"```text\n(.*?)\n```", page, re.S)[number]
    assert shown.startswith("UNTUNED: ")
    got = output(capsys, "run", PN3, "--card", "p100", "--dry-run", *words)
    assert shown in got.split("\n")


def test_an_owned_flag_is_refused_word_for_word(machine, capsys):
    page = documented.text().split("# Change the context length or server arguments\n")[1]
    shown = re.findall(r"```text\n(.*?)\n```", page, re.S)[2]
    got = output(capsys, "run", PN3, "--card", "p100", "--dry-run", "--", "-c", "5", code=2)
    assert got.rstrip("\n") == shown


@pytest.fixture
def draft(tmp_path: pathlib.Path) -> pathlib.Path:
    """The recipe of the documentation's guide: a copy of a released one, set to draft."""
    source = pathlib.Path(cli.__file__).parents[1] / "recipes" / PN3 / "p100.toml"
    target = tmp_path / "my-recipes" / PN3 / "p100.toml"
    target.parent.mkdir(parents=True)
    target.write_text(source.read_text().replace('status = "released"', 'status = "draft"', 1))
    return target


def test_a_draft_is_refused_word_for_word(machine, capsys, draft):
    page = documented.text().split("# Try a recipe of your own\n")[1]
    shown = next(b for b in re.findall(r"```text\n(.*?)\n```", page, re.S) if "is a draft" in b)
    folder = str(draft.parents[2])
    assert output(capsys, "run", PN3, "--recipes", folder, "--card", "p100", "--dry-run", code=1).rstrip("\n") == shown
    allowed = output(capsys, "run", PN3, "--recipes", folder, "--card", "p100", "--allow-draft", "--dry-run")
    assert f"using the draft recipe for {PN3} on p100 (--allow-draft)" in allowed
    assert re.search(rf"^{PN3}\s+p100\s+draft ", output(capsys, "models", "--recipes", folder), re.M)


def test_mistakes_in_a_recipe_are_listed_word_for_word(machine, capsys, draft):
    page = documented.text().split("# Try a recipe of your own\n")[1]
    shown = next(b for b in re.findall(r"```text\n(.*?)\n```", page, re.S) if "invalid recipe" in b)
    body = draft.read_text()
    body = re.sub(r'image = ".*"', 'image = "ghcr.io/iammrduncan/tensorless-engine:0.1.0-sm60"', body)
    body = body.replace("args = [", 'args = ["-c", "5", ', 1)
    draft.write_text(body)
    folder = str(draft.parents[2])
    got = output(capsys, "info", PN3, "--recipes", folder, "--card", "p100", code=1)
    assert got.rstrip("\n") == shown.replace("/home/user/my-recipes", folder)


def test_bench_without_a_server_word_for_word(machine, capsys):
    page = documented.text().split("# Benchmark a running server\n")[1]
    shown = re.findall(r"```text\n(.*?)\n```", page, re.S)[0]
    got = output(capsys, "bench", PN3, "--card", "p100", "--port", "1", code=1)
    assert got.rstrip("\n") == shown.replace(":8080", ":1")


def test_doctor_without_a_driver_word_for_word(machine, capsys, monkeypatch):
    page = documented.text().split("# Fix a failed check or a failed start\n")[1]
    shown = documented.squeezed(re.findall(r"```text\n(.*?)\n```", page, re.S)[0])
    for name in ("timeout", "sh", "cat"):
        (machine / name).symlink_to(f"/bin/{name}" if os.path.exists(f"/bin/{name}") else f"/usr/bin/{name}")
    assert cli.main(["doctor"]) == 1
    got = documented.squeezed(capsys.readouterr().out)[: len(shown)]

    def general(lines: list[str]) -> list[str]:
        text = "\n".join(lines).replace(f"({machine}/podman)", "(/usr/bin/podman)")
        return re.sub(r"[0-9.]+ GB free", "N GB free", text).split("\n")

    if os.path.exists("/etc/cdi/nvidia.yaml") or os.path.exists("/var/run/cdi/nvidia.yaml"):
        pytest.skip("this machine has a CDI spec of its own")
    assert general(got) == general(shown)


def test_documented_json_fields(machine, capsys):
    text = documented.text()
    rows = json.loads(output(capsys, "models", "--json"))
    names = re.search(r"The JSON rows have (.*?)\.", text).group(1)
    assert [list(row) for row in rows] == [re.findall(r"`(\w+)`", names)] * 2
    info = json.loads(output(capsys, "info", "pn3", "--card", "p100", "--json"))
    names = re.search(r"The JSON output has `recipe`(.*?)\.\n", text).group(0)
    outer = [
        name
        for name in re.findall(r"`(\w+)`", names)
        if name not in ("url", "blob", "snapshot", "size_bytes", "cached")
    ]
    assert set(outer) <= set(info)
    assert set(info["download"]) == {"url", "blob", "snapshot", "size_bytes", "cached"}
    data = json.loads(output(capsys, "capabilities", "--json"))
    table = text.split("## capabilities")[1].split("## version")[0]
    fields = re.findall(r"^\| `(\w+)`(?:, `(\w+)`)?\s+\|", table, re.M)
    assert [name for pair in fields for name in pair if name] == list(data)
    assert data["name"] == "tensorless" and data["runtimes"] == ["podman", "docker"] and data["recipe_schema"] == 1


def test_help_in_every_documented_form(machine, capsys):
    texts = {output(capsys, *words) for words in (["help"], ["-h"], ["--help"])}
    assert len(texts) == 1
    assert cli.main([]) == 2
    assert capsys.readouterr().out in texts
    for command in _commands.COMMANDS:
        assert "usage: tensorless" in output(capsys, command.name, "-h")


def test_stop_with_dry_run_prints_the_stop_commands(machine, capsys):
    add(machine, "docker", "#!/bin/sh\nexit 1\n")
    got = output(capsys, "stop", "pn3", "--dry-run")
    name = "tensorless-iammrduncan-qwen3.8-27b-pn3-gguf"
    assert f"podman stop {name}" in got and f"docker stop {name}" in got
    assert "docker stop" not in output(capsys, "stop", "pn3", "--dry-run", "--runtime", "podman")


def test_a_dry_run_says_that_a_token_is_sent_and_not_which(machine, capsys, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_FAKE123")
    got = output(capsys, "pull", "pn3", "--card", "p100", "--dry-run")
    assert "token" in got and "hf_FAKE123" not in got


def test_looking_writes_nothing_and_starts_no_ansible(machine, tmp_path):
    import subprocess
    import sys

    code = (
        "import sys\nfrom tensorless_fleet import cli\n"
        "cli.main(['models']); cli.main(['info', 'pn3', '--card', 'p100']); cli.main(['capabilities'])\n"
        "heavy = ('ansible.', 'ansible_runner', 'rich', 'yaml', 'pexpect')\n"
        "bad = [name for name in sys.modules if name == 'ansible' or name.startswith(heavy)]\n"
        "sys.exit(','.join(bad) or 0)"
    )
    home = tmp_path / "home"
    home.mkdir()
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "HOME": str(home)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert list(home.iterdir()) == []

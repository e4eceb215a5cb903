# SPDX-License-Identifier: Apache-2.0
"""run, pull, serve, stop on this machine: texts as documented, with a stand-in for podman and a local Hub."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import re
import signal
import socket
import subprocess
import sys
import time

import pytest

from tensorless_fleet import cli
from tests.hub import FakeHub
from tests.unit.cli import documented

HERE = pathlib.Path(__file__).parent
PN3 = "iamMrDuncan/Qwen3.8-27B-PN3-GGUF"
NAME = "tensorless-iammrduncan-qwen3.8-27b-pn3-gguf"
BODY = b"GGUF" + bytes(range(256)) * 4000


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


class Machine:
    """A machine with the stand-in, the released recipe for a small file, and a Hub that has that file."""

    def __init__(self, tmp_path: pathlib.Path, hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
        import hashlib

        self.path = tmp_path
        self.podman = tmp_path / "podman"
        self.podman.mkdir()
        self.port = free_port()
        programs = tmp_path / "bin"
        programs.mkdir()
        script = programs / "podman"
        script.write_text(f'#!/bin/sh\nexec {sys.executable} {HERE / "fake_podman.py"} "$@"\n')
        script.chmod(0o755)
        source = pathlib.Path(cli.__file__).parents[1] / "recipes" / PN3 / "p100.toml"
        self.recipe = tmp_path / "recipes" / PN3 / "p100.toml"
        self.recipe.parent.mkdir(parents=True)
        sha256 = hashlib.sha256(BODY).hexdigest()
        text = re.sub(r'(?m)^sha256 = ".*"', f'sha256 = "{sha256}"', source.read_text())
        self.recipe.write_text(re.sub(r"(?m)^size_bytes = .*", f"size_bytes = {len(BODY)}", text))
        hub.add(PN3, "c701b6690ec360b16d40f85df1cb76062e30cd38", "Qwen3.8-27B-PN3-P0k19.gguf", BODY)
        self.hub = hub
        self.env = {
            "PATH": f"{programs}:/usr/bin:/bin",
            "HOME": str(tmp_path / "home"),
            "FAKE_PODMAN": str(self.podman),
            "HF_ENDPOINT": hub.url,
            "XDG_STATE_HOME": str(tmp_path / "state"),
            "XDG_RUNTIME_DIR": str(tmp_path / "r"),
            "HF_TOKEN": "hf_FAKE123",
            "PYTHONUNBUFFERED": "1",
        }
        (tmp_path / "home").mkdir()

    def words(self, *words: str) -> list[str]:
        flags = ["--recipes", str(self.path / "recipes"), "--card", "p100"]
        return [sys.executable, "-m", "tensorless_fleet", *words[:2], *flags, "--port", str(self.port), *words[2:]]

    def run(self, *words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self.words(*words), env=self.env, capture_output=True, text=True, check=False, timeout=60,
            cwd=HERE.parents[2],
        )  # fmt: skip

    def start(self, *words: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            self.words(*words), env=self.env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            cwd=HERE.parents[2],
        )  # fmt: skip

    def calls(self) -> list[list[str]]:
        path = self.podman / "calls"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def blob(self) -> pathlib.Path:
        return next((self.path / "home/.cache/huggingface/hub").glob("models--*/blobs/*[0-9a-f]"))


@pytest.fixture
def machine(tmp_path, monkeypatch):
    with FakeHub() as hub:
        here = Machine(tmp_path, hub, monkeypatch)
        yield here
        for record in here.podman.glob("*.json"):
            with contextlib.suppress(ProcessLookupError):
                os.kill(json.loads(record.read_text())["pid"], signal.SIGKILL)


def test_run_detached_says_the_documented_lines_and_stop_ends_it(machine):
    done = machine.run("run", PN3, "--detach")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.split("\n")
    image = re.search(r'(?m)^image = "(.*)"', machine.recipe.read_text()).group(1)
    page = documented.text().split("# Run a model in the background, and stop it\n")[1]
    blocks = [block.replace("8080", str(machine.port)) for block in re.findall(r"```text\n(.*?)\n```", page, re.S)]
    want = [
        f"pulling the engine image {image}",
        "model Qwen3.8-27B-PN3-P0k19.gguf from iamMrDuncan/Qwen3.8-27B-PN3-GGUF at c701b6690ec3",
        f"starting {NAME} (podman, GPU all)",
        *blocks[0].split("\n"),
        *blocks[1].split("\n"),
    ]
    assert [line for line in lines if line] == want
    assert machine.blob().read_bytes() == BODY
    run = next(call for call in machine.calls() if call[0] == "run")
    assert run[:4] == ["run", "-d", "--rm", "--name"] and "hf_FAKE123" not in " ".join(run)
    again = machine.run("run", PN3, "--detach")
    assert again.returncode == 1 and f"{NAME} is already running in podman" in again.stderr
    assert "tensorless stop" in again.stderr
    stopped = machine.run("stop", PN3)
    assert (stopped.returncode, stopped.stdout) == (0, f"stopped {NAME}\n")
    twice = machine.run("stop", "pn3")
    assert (twice.returncode, twice.stdout) == (0, f"{NAME} is not running\n")


def test_serve_names_the_pull_command_and_fetches_nothing(machine):
    done = machine.run("serve", PN3, "--detach")
    assert done.returncode == 1
    assert "the engine image is not pulled" in done.stderr and f"tensorless pull {PN3}" in done.stderr
    (machine.podman / "images").write_text(re.search(r'(?m)^image = "(.*)"', machine.recipe.read_text()).group(1))
    done = machine.run("serve", PN3, "--detach")
    assert "the model is not downloaded" in done.stderr and machine.hub.requests("cdn") == []


def test_pull_twice_downloads_once(machine):
    assert machine.run("pull", PN3).returncode == 0
    sent = machine.hub.bytes_sent("cdn")
    again = machine.run("pull", "pn3")
    assert again.returncode == 0 and machine.hub.bytes_sent("cdn") == sent >= len(BODY)
    assert sum(call[0] == "pull" for call in machine.calls()) == 1


def test_a_used_port_is_refused_before_anything_is_pulled(machine):
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", machine.port))
        sock.listen()
        done = machine.run("run", PN3, "--detach")
    assert done.returncode == 1 and f"cannot use port {machine.port} on 127.0.0.1" in done.stderr
    assert not any(call[0] in ("pull", "run") for call in machine.calls())


def test_the_last_sixty_lines_of_a_server_that_dies(machine):
    (machine.podman / "behaviour").write_text("dies")
    done = machine.run("run", PN3, "--detach")
    assert done.returncode == 1
    assert "tensorless: the server exited before it was ready" in done.stderr
    assert re.findall(r"^log line (\d+)$", done.stdout, re.M) == [str(number) for number in range(41, 101)]


def test_a_registry_that_does_not_answer(machine):
    (machine.podman / "no-registry").write_text("")
    done = machine.run("pull", PN3)
    assert done.returncode == 1 and "could not pull the engine image" in done.stderr


def wait_for(process: subprocess.Popen[str], text: str) -> str:
    assert process.stdout is not None
    seen = ""
    until = time.monotonic() + 40
    while time.monotonic() < until:
        line = process.stdout.readline()
        seen += line
        if text in line or not line:
            break
    assert text in seen, seen
    return seen


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_the_foreground_follows_the_log_and_stops_with_the_command(machine, number):
    (machine.podman / "behaviour").write_text("slow")
    process = machine.start("run", PN3)
    try:
        seen = wait_for(process, "Ctrl-C stops the server.")
        assert "loading the model" in seen and f"{PN3} is ready at http://127.0.0.1:{machine.port} " in seen
        process.send_signal(number)
        out, err = process.communicate(timeout=30)
    finally:
        process.kill()
    assert out.splitlines()[-1:] == [f"stopping {NAME}"] and process.returncode == 130, err
    assert machine.run("stop", PN3).stdout == f"{NAME} is not running\n"


def test_the_foreground_ends_when_another_command_stops_the_server(machine):
    process = machine.start("run", PN3)
    try:
        wait_for(process, "Ctrl-C stops the server.")
        assert machine.run("stop", PN3).stdout == f"stopped {NAME}\n"
        out, _err = process.communicate(timeout=30)
    finally:
        process.kill()
    # The server's own last lines may come before it: how fast the log is read is the machine's affair.
    assert (process.returncode, out.splitlines()[-1:]) == (0, [f"{NAME} was stopped"])


def test_an_untuned_run_says_so_before_it_starts(machine):
    done = machine.run("run", PN3, "--detach", "--context", "32768")
    lines = done.stdout.split("\n")
    label = (
        "UNTUNED: --context 32768 instead of 65536. This is not the configuration the receipt measured; its numbers "
        "do not apply."
    )
    assert lines[0] == label and done.returncode == 0


def test_every_interface_is_said_when_ready(machine):
    done = machine.run("run", PN3, "--detach", "--host", "0.0.0.0")
    lines = done.stdout.split("\n")
    position = lines.index("it listens on every interface of this host (--host 0.0.0.0)")
    assert lines[position - 1].startswith(f"{PN3} is ready at http://127.0.0.1:{machine.port} ")
    assert "note:" not in done.stdout


def test_ctrl_c_during_a_download_keeps_what_has_come(machine):
    machine.hub.rate = 100_000  # bytes a second and connection: the whole would take seconds
    process = machine.start("pull", PN3)
    try:
        until = time.monotonic() + 20
        while machine.hub.bytes_sent("cdn") < 100_000 and time.monotonic() < until:
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=30)
    finally:
        process.kill()
    assert process.returncode == 130
    kept = list((machine.path / "home/.cache/huggingface/hub").glob("models--*/blobs/*.incomplete"))
    assert len(kept) == 1 and kept[0].stat().st_size > 0
    machine.hub.rate = None
    sent = machine.hub.bytes_sent("cdn")
    done = machine.run("pull", PN3)
    assert done.returncode == 0 and machine.blob().read_bytes() == BODY
    assert machine.hub.bytes_sent("cdn") - sent < len(BODY), "what had come was not fetched again"


def test_gguf_check(tmp_path, capsys):
    path = tmp_path / "bad.gguf"
    path.write_bytes(b"not a model")
    assert cli.main(["gguf-check", str(path)]) == 1
    assert str(path) in capsys.readouterr().err

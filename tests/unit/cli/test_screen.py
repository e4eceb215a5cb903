# SPDX-License-Identifier: Apache-2.0
"""What a fleet run shows: the table, plain lines, JSON lines, grouped plans; and nothing that a terminal would obey."""

from __future__ import annotations

import io
import json

import pytest

from tensorless_fleet import _collect, _play, _reasons, _remote, _usage, _view
from tensorless_fleet.results import Bench, Card, Event, HostResult, Result, Server


def result(**hosts: HostResult) -> Result:
    return Result("run", hosts=dict(hosts), seconds=12.3, log="/tmp/x.log")


def test_control_characters_and_escapes_never_reach_the_screen():
    nasty = "a\x1b]0;owned\x07b\x1b[31mc\x00d\u2028e\nf\tg\x9b1m"
    assert _play.clean(nasty) == "abc\ufffdd\ufffde f g\ufffd1m"
    events: list[Event] = []
    collector = _collect.Collector("run", events.append)
    collector.feed(
        {"event": "runner_on_failed", "event_data": {"host": "h", "task": "t\x1b[2J", "res": {"msg": nasty}}}
    )
    assert events[0].text == _play.clean(nasty) and "\x1b" not in events[0].step
    assert collector.result.hosts["h"].reason == events[0].text


def test_markup_in_names_is_shown_as_text():
    from rich.console import Console

    view = _view.LiveView("tensorless run [bold]x[/bold]")
    view.event(Event("step", 0.0, "[red]h1[/red]", "Do [link=file:///x]this[/link]"))
    view.event(Event("progress", 0.0, "[red]h1[/red]", "", "downloading 5 %"))
    view.event(Event("failed", 0.0, "h2", "Check", "no card"))
    out = io.StringIO()
    Console(file=out, width=160, highlight=False).print(view._table())
    text = out.getvalue()
    assert "[red]h1[/red]" in text and "[link=file:///x]this[/link]" in text and "[bold]x[/bold]" in text
    assert "downloading 5 %" in text and "FAILED" in text and "no card" in text


def test_plain_lines_say_what_changed_and_stay_silent_otherwise(capsys):
    view = _view.PlainView()
    for event in (
        Event("play", 0.0, text="Bring hosts"),
        Event("step", 0.0, "h1", "Look"),
        Event("ok", 0.0, "h1", "Look"),
        Event("changed", 0.0, "h1", "Install"),
        Event("progress", 0.0, "h1", "Fetch", "downloading 5 %"),
        Event("unreachable", 0.0, "h2", "Fetch", "no answer"),
        Event("play", 0.0, text="Nobody is in this one"),
        Event("line", 0.0, text="[WARNING]: something"),
    ):
        view.event(event)
    captured = capsys.readouterr()
    assert captured.out.splitlines() == [
        "Bring hosts",
        "h1: Install: changed",
        "h1: downloading 5 %",
        "h2: UNREACHABLE Fetch: no answer",
    ]
    assert captured.err == "[WARNING]: something\n"


def test_json_lines_are_events_and_then_the_result(capsys):
    view = _view.JsonView()
    view.event(Event("step", 1.0, "h1", "Look"))
    view.result(result(h1=HostResult("h1", "ok")))
    first, last = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert first == {"event": {"kind": "step", "time": 1.0, "host": "h1", "step": "Look", "text": ""}}
    assert last["result"]["hosts"]["h1"]["state"] == "ok" and last["result"]["log"] == "/tmp/x.log"


def test_the_table_at_the_end():
    bench = Bench("org/m", "GPU-1", 29.95, 4460.0, 429, 30.06, -0.4)
    server = Server("s1", "started", "http://127.0.0.1:8080", actions=("start",))
    lines = _view.result_lines(
        result(
            a=HostResult("a", "changed", servers=[server], benches=[bench]),
            b=HostResult("b", "failed", reason="no card fits"),
            c=HostResult("c", "ok", servers=[Server("s2", "stopped")]),
            d=HostResult("d", "ok", notes=["model.gguf ok, 0.5 s"]),
        )
    )
    assert lines[0].split() == ["HOST", "STATE", "WHAT"]
    assert lines[1] == "a     changed  s1 started at http://127.0.0.1:8080"
    assert lines[2].strip() == "org/m 29.95 tok/s decode, TTFT 4460 ms (-0.4% against the receipt)"
    assert lines[4] == "c     ok       s2 already stopped" and lines[5] == "d     ok       model.gguf ok, 0.5 s"
    assert lines[3] == "b     FAILED   no card fits" and lines[-1] == "12 s; the log is in /tmp/x.log"


def test_the_fleet_table_names_hosts_that_did_not_answer():
    card = Card(
        0, "GPU-000000a1-x", "Tesla P100", model="org/m", state="active", health="ok", tuned=True, bench_tps=30.0,
        bench_vs_receipt_percent=-0.2,
    )  # fmt: skip
    good = HostResult("a", "ok", cards=[card])
    lines = _view.fleet_lines(Result("fleet", {"a": good, "b": HostResult("b", "unreachable", reason="no answer")}))
    assert lines[1] == "a     0 Tesla P100 000000a1  org/m  active       ok      tuned  30.00 tok/s (-0.2%)"
    assert "unreachable" in lines[2] and lines[2].endswith("no answer")


def plan(host: str, gpu: int, port: int, runtime: str = "podman") -> dict:
    device = ["--device", f"nvidia.com/gpu={gpu}"] if runtime == "podman" else ["--gpus", f"device={gpu}"]
    head = [runtime, "run", "-d", "--rm", "--name", "n", *device]
    return {
        "model": "org/m",
        "card": "p100",
        "status": "released",
        "recipe_path": "recipes/org/m/p100.toml",
        "gpu": str(gpu),
        "untuned_label": None,
        "host": "127.0.0.1",
        "port": port,
        "cards": [{"index": gpu, "uuid": f"GPU-{host}{gpu}"}],
        "download": {
            "sha256": "ab",
            "size_bytes": 10**9,
            "url": "https://h/f",
            "cached": "no" if host == "a" else "yes",
        },
        "pull_command": [runtime, "pull", "i@sha256:cd"],
        "command": [*head, "-p", f"127.0.0.1:{port}:8080", "i@sha256:cd", "-m", "x"],
    }


def test_a_fleets_plan_says_once_what_is_the_same():
    hosts = {
        "a": HostResult("a", plans=[plan("a", 0, 8080)]),
        "b": HostResult(
            "b", plans=[plan("b", 0, 8080), plan("b", 2, 8081)], skipped=[{"reason": "6.1 fits no recipe"}]
        ),
        "c": HostResult("c", plans=[plan("c", 0, 8080, "docker")]),
        "d": HostResult("d", "unreachable", reason="no answer"),
    }
    text = _remote.grouped_plan(_usage.parse(["-i", "x", "run", "m"]), Result("run", hosts))
    assert text.count("download: 1.00 GB") == 1 and "missing on: a\n" in text
    assert text.count("podman run -d") == 1 and text.count("docker run -d") == 1
    assert "# b: GPU 2 (GPU-b2), published on 127.0.0.1:8081" in text
    assert "nvidia.com/gpu=<GPU>" in text and "device=0" in text, "what does not vary is written out"
    assert "# b: skipped: 6.1 fits no recipe" in text and "# d: UNREACHABLE: no answer" in text


@pytest.mark.parametrize(
    ("said", "part"),
    [
        ("Host key verification failed.", "--host-keys accept-new"),
        ("@ WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED! @ Host key verification failed.", "ssh-keygen -R h"),
        ("ops@h: Permission denied (publickey).", "ssh-copy-id"),
        ("no such identity: /x/key: No such file or directory ops@h: Permission denied (publickey).", "/x/key"),
        ("ssh: Could not resolve hostname h: Name or service not known", "ansible_host"),
        ("ssh: connect to host h port 22: Connection refused", "Check that h is up"),
    ],
)
def test_what_keeps_a_controller_out_comes_with_its_fix(said, part):
    text = _reasons.explain_login("h", f"Failed to connect to the host via ssh: {said}")
    assert part in text and "\n" not in text


def test_sudo_passwords():
    assert "--become-password-file" in _reasons.explain_become("h", "Task failed: Missing sudo password")
    assert "refused" in _reasons.explain_become("h", "Incorrect sudo password")
    assert _reasons.explain_become("h", "no card") == "no card"

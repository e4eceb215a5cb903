# SPDX-License-Identifier: Apache-2.0
"""What a run keeps of ansible-runner's events."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

from tensorless_fleet import AsyncFleet, Fleet, UsageError, _collect, _remote, _usage, _view
from tensorless_fleet.results import Event, HostResult


class Feed:
    def __init__(self) -> None:
        self.events: list[Event] = []
        self.collector = _collect.Collector("run", self.events.append)

    def __call__(self, event: str, host: str | None = "h", res: dict[str, Any] | None = None, **data: Any) -> None:
        stdout = data.pop("stdout", "")
        self.collector.feed({"event": event, "stdout": stdout, "event_data": {"host": host, "res": res or {}, **data}})

    @property
    def host(self) -> HostResult:
        return self.collector.result.hosts["h"]


def test_a_loop_fails_with_the_reasons_of_its_items():
    feed = Feed()
    feed("runner_on_start", task="Plan")
    feed("runner_item_on_ok", task="Plan", res={"msg": "fine"})
    feed("runner_item_on_failed", task="Plan", res={"msg": 'no recipe for "x"'})
    feed("runner_item_on_failed", task="Plan", res={"msg": 'no recipe for "x"'})
    feed("runner_item_on_failed", task="Plan", res={"msg": 'no recipe for "y"'})
    feed("runner_on_failed", task="Plan", res={"msg": "One or more items failed"})
    assert feed.host.reason == 'no recipe for "x"; no recipe for "y"' == feed.events[-1].text


def test_items_that_failed_in_an_earlier_step_are_forgotten():
    feed = Feed()
    feed("runner_item_on_failed", task="Try", res={"msg": "not there"})
    feed("runner_on_failed", task="Try", res={"msg": "One or more items failed"}, ignore_errors=True)
    assert feed.events[-1].kind == "ignored" and feed.events[-1].text == "not there"
    feed("runner_on_failed", task="Work", res={"msg": "no card"})
    assert feed.host.reason == "no card"


def servers(state: str, *actions: str) -> dict[str, Any]:
    return {"servers": [{"instance": "s1", "state": state, "endpoint": "http://127.0.0.1:1", "actions": list(actions)}]}


def test_a_server_is_named_once_with_what_became_of_it():
    feed = Feed()
    name = "tensorless.fleet.tensorless_server"
    feed("runner_on_ok", task="See", task_action=name, res=servers("would be started", "restart"))
    feed("runner_on_ok", task="Go back", task_action=name, res={**servers("started", "restart"), "changed": True})
    assert [(server.state, server.actions) for server in feed.host.servers] == [("started", ("restart",))]
    feed("runner_on_ok", task="Again", task_action=name, res=servers("started", "write"))
    assert feed.host.servers[0].actions == ("restart", "write"), "what was done in one run adds up"
    assert _view.host_texts(feed.host) == ["s1 started at http://127.0.0.1:1"]


def test_what_ansible_says_before_any_host_is_left_to_the_error():
    feed = Feed()
    feed("warning", None, stdout="[WARNING]: Could not match supplied host pattern, ignoring: gpu")
    feed("playbook_on_play_start", None, name="See the fleet")
    assert [event.kind for event in feed.events] == ["play"] and feed.collector.played
    feed("playbook_on_no_hosts_matched", None)
    assert not feed.collector.played
    feed("runner_on_start", task="Look")
    assert [event.kind for event in feed.events] == ["play", "line", "step"]


def test_every_note_of_a_host_is_shown():
    host = HostResult("h", "ok", plans=[{"model": "org/m"}, {"model": "org/m"}], notes=["answered nobody for 5.2 s"])
    host.skipped.append({"reason": "no recipe fits"})
    assert _view.host_texts(host, "upgrade") == ["answered nobody for 5.2 s", "skipped: no recipe fits"]
    assert _view.host_texts(host, "pull")[0] == "org/m: engine image and model file are there"


def test_the_async_form_has_the_same_methods():
    for name, method in vars(Fleet).items():
        if name.startswith("_") or not callable(method):
            continue
        other = vars(AsyncFleet)[name]
        if name not in ("start", "events"):
            assert inspect.iscoroutinefunction(other), name
            wanted = [each for each in inspect.signature(method).parameters.values() if each.name != "wait"]
            assert [each.name for each in wanted] == list(inspect.signature(other).parameters), name


@pytest.mark.parametrize(
    ("options", "part"),
    [
        ({"port": 70000}, "port must be a whole number from 1 to 65535"),
        ({"context": 0}, "context must be a whole number, at least 1"),
        ({"gpu": "first"}, "gpu must be an index"),
        ({"host": "example"}, "host must be an IP address"),
        ({"extra_args": ["-c", "5"]}, "do not pass -c after --"),
        ({"cache": "/a:b"}, "which a container mount cannot express"),
    ],
)
def test_values_that_can_never_work_are_refused_before_any_host_is_asked(options, part):
    with pytest.raises(UsageError) as error:
        Fleet("localhost,").run("pn3", **options)
    assert part in str(error.value)


def test_a_model_is_not_called_unknown_where_the_inventory_cannot_be_read(monkeypatch):
    monkeypatch.setattr(_remote, "inventory_values", lambda _options, _name: None)
    assert _remote.find_model(_usage.parse(["-i", "x", "run", "of-the-inventory"])) == []


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        (["stop", "m"], "systemctl disable --now tensorless@n.service"),
        (["bench", "m", "--runs", "2"], "POST http://e/completion (1 warm-up of 8 tokens, 2 runs of 256 tokens)"),
    ],
)
def test_a_dry_run_names_what_this_command_would_do(words, shown):
    plan = {
        "model": "org/m", "instance": "n", "gpu": "0", "cards": [], "host": "127.0.0.1", "port": 8080,
        "download": {"sha256": "ab"}, "endpoint": "http://e", "health_url": "http://e/health",
    }  # fmt: skip
    result = _collect.Result("run", {"a": HostResult("a", plans=[plan])})
    text = _remote.grouped_plan(_usage.parse(["-i", "x", *words]), result)
    assert shown in text and "# a: GPU 0, published on 127.0.0.1:8080" in text
    assert "podman" not in text and "download:" not in text

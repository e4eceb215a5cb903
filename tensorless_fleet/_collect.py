# SPDX-License-Identifier: Apache-2.0
"""Turns ansible-runner's events into this package's events and results."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from tensorless_fleet._play import clean
from tensorless_fleet._reasons import explain_become, explain_login, reason_of
from tensorless_fleet.results import Bench, Card, Check, Event, EventKind, HostResult, HostState, Result, Server

ENDINGS: dict[str, EventKind] = {
    "runner_on_ok": "ok",
    "runner_on_failed": "failed",
    "runner_on_unreachable": "unreachable",
    "runner_on_skipped": "skipped",
}
ITEMS = ("runner_item_on_ok", "runner_item_on_failed")
WORST: dict[HostState, int] = {
    "untouched": 0, "ok": 1, "changed": 2, "interrupted": 3, "failed": 4, "unreachable": 5,
}  # fmt: skip
PREFIX = "tensorless.fleet."


class Collector:
    """Feeds on runner events (``feed``); keeps ``result`` up to date; hands each Event to ``emit``."""

    def __init__(self, command: str, emit: Callable[[Event], None]) -> None:
        self.result = Result(command)
        self.emit = emit
        self.plays = 0
        self.empty_plays = 0
        self.running: dict[str, str] = {}  # host -> step at work
        self.here: str | None = None  # why a step on the controller itself (the report) failed
        self._items: dict[str, list[str]] = {}  # host -> why items of the loop at work failed
        # What is said before a host begins. When none does, the error of the run says it in one line.
        self._early: list[str] | None = []

    @property
    def played(self) -> bool:
        """Whether there was a play, and each had a host to play with."""
        return bool(self.plays) and not self.empty_plays

    def host(self, name: str) -> HostResult:
        return self.result.hosts.setdefault(name, HostResult(name))

    def say(self, kind: EventKind, host: str | None = None, step: str = "", text: str = "") -> None:
        self.emit(Event(kind, time.time(), host, step, text))

    def feed(self, event: Mapping[str, Any]) -> None:
        """One event of ansible-runner."""
        name = str(event.get("event"))
        data = event.get("event_data") or {}
        step = clean(str(data.get("task") or ""))
        host = data.get("host")
        if host and data.get("play_pattern") == "localhost":
            self._on_controller(name, step, data)
            return
        if name == "playbook_on_play_start":
            self.plays += 1
            self.say("play", text=clean(str(data.get("name") or "")))
        elif name == "playbook_on_no_hosts_matched":
            self.empty_plays += 1
        elif name == "runner_on_start" and host:
            early, self._early = self._early or [], None
            for line in early:
                self.say("line", text=line)
            self.host(str(host)).step = step
            self.running[str(host)] = step
            self.say("step", str(host), step)
        elif name in ENDINGS and host:
            self._ended(str(host), step, ENDINGS[name], data)
        elif name in ITEMS and host:
            raw = data.get("res")
            answer: Mapping[str, Any] = raw if isinstance(raw, Mapping) else {}
            self._learn(self.host(str(host)), action_of(data), answer)
            if name.endswith("failed"):
                self._items.setdefault(str(host), []).append(reason_of(answer))
            if text := self._note(str(host), data, answer):
                self.say("ok", str(host), step, text)
        elif name == "playbook_on_stats":
            self._on_stats(data)
        elif name in ("verbose", "warning", "error", "system_warning", "deprecated"):
            self._line(clean(str(event.get("stdout") or "")))

    def _on_stats(self, data: Mapping[str, Any]) -> None:
        """Ansible's own count has the last word: a failure that the play rescued is none."""
        failures, dark, changed = (data.get(key) or {} for key in ("failures", "dark", "changed"))
        for name, host in self.result.hosts.items():
            rescued = host.state == "failed" and not failures.get(name)
            returned = host.state == "unreachable" and not dark.get(name)
            if rescued or returned:
                host.state = "changed" if changed.get(name) else "ok"
                host.reason = None

    def _on_controller(self, name: str, step: str, data: Mapping[str, Any]) -> None:
        """Steps of plays on the controller belong to no host of the fleet."""
        raw = data.get("res")
        answer: Mapping[str, Any] = raw if isinstance(raw, Mapping) else {}
        if name == "runner_on_ok":
            self._learn(HostResult("localhost"), action_of(data), answer)
        elif name in ("runner_on_failed", "runner_on_unreachable") and not data.get("ignore_errors"):
            self.here = f"{step}: {reason_of(answer)}"
            self.say("line", text=self.here)

    def _raise_to(self, host: HostResult, state: HostState) -> None:
        if WORST[state] > WORST[host.state]:
            host.state = state

    def _ended(self, name: str, step: str, kind: EventKind, data: Mapping[str, Any]) -> None:
        host = self.host(name)
        self.running.pop(name, None)
        raw = data.get("res")
        answer: Mapping[str, Any] = raw if isinstance(raw, Mapping) else {}
        # Of a loop Ansible says at the end only that items failed; the reasons came with the items.
        reason = "; ".join(dict.fromkeys(self._items.pop(name, []))) or reason_of(answer)
        if kind == "failed" and data.get("ignore_errors"):
            self.say("ignored", name, step, reason)
            return
        text = ""
        if kind in ("failed", "unreachable"):
            text = reason
            text = explain_login(name, text) if kind == "unreachable" else explain_become(name, text)
            host.reason = text
            self._raise_to(host, "failed" if kind == "failed" else "unreachable")
        elif kind == "ok":
            if answer.get("changed"):
                kind = "changed"
            self._raise_to(host, "changed" if kind == "changed" else "ok")
            text = self._note(name, data, answer)
        else:
            self._raise_to(host, "ok")
        self._learn(host, action_of(data), answer)
        self.say(kind, name, step, text)

    def _note(self, name: str, data: Mapping[str, Any], answer: Mapping[str, Any]) -> str:
        """What a debug step says about a host; "" for any other step and for the end of a loop."""
        said = answer.get("msg")
        if not action_of(data).endswith("debug") or not isinstance(said, str) or "results" in answer:
            return ""
        text = clean(said).removeprefix(f"{name} ").removeprefix(f"{name}: ")
        self.host(name).notes.append(text)
        return text

    def progress(self, report: Mapping[str, Any]) -> None:
        """The figures of a long step: how far a host is."""
        from ansible_collections.tensorless.fleet.plugins.module_utils._progress import words

        name = str(report.get("host"))
        text = words(report)
        self.say("progress", name, self.running.get(name, ""), clean(text))

    def _line(self, text: str) -> None:
        # Figures of long steps come by their own file; their printed form is left out here.
        # That it was interrupted, the result says, host by host.
        if text and not text.startswith("tensorless: [") and "User interrupted execution" not in text:
            if self._early is None:
                self.say("line", text=text)
            else:
                self._early.append(text)

    def _learn(self, host: HostResult, action: str, answer: Mapping[str, Any]) -> None:
        """Keeps what a module of the collection said about the host."""
        if not action.startswith(PREFIX):
            return
        module = action[len(PREFIX) :]
        if module == "tensorless_status":
            host.cards = [card_of(item) for item in answer.get("cards") or [] if isinstance(item, Mapping)]
        elif module == "tensorless_recipe":
            host.plans += [plan for plan in answer.get("plans") or [] if isinstance(plan, dict)]
            host.skipped += [item for item in answer.get("skipped_cards") or [] if isinstance(item, dict)]
        elif module == "tensorless_server":
            for item in answer.get("servers") or []:
                if isinstance(item, Mapping):
                    keep_server(host.servers, server_of(item))
        elif module == "tensorless_bench":
            for item in answer.get("benches") or ([answer] if "median_decode_tps" in answer else []):
                if isinstance(item, Mapping) and item.get("median_decode_tps") is not None:
                    host.benches.append(bench_of(item))
        elif module == "tensorless_doctor":
            host.checks += [check_of(item) for item in answer.get("checks") or [] if isinstance(item, Mapping)]
        elif module == "tensorless_report":
            self.result.files += [str(path) for path in answer.get("files") or []]
            self.result.summary = [clean(str(text)) for text in answer.get("summary") or []]

    def finish(self, seconds: float, interrupted: bool) -> Result:
        """Closes the books: hosts that were at work when it ended get their state."""
        self.result.seconds = seconds
        self.result.interrupted = interrupted
        for name, step in self.running.items():
            host = self.host(name)
            if host.state in ("failed", "unreachable"):
                continue
            if interrupted:
                host.state = "interrupted"
                host.reason = f"interrupted during '{step}'; run the command again, it goes on from there"
        if interrupted:
            for host in self.result.hosts.values():
                if host.state in ("ok", "changed"):
                    host.state = "interrupted"
                    host.reason = f"stopped after '{host.step}'; run the command again, it goes on from there"
        return self.result


def action_of(data: Mapping[str, Any]) -> str:
    """The full name of the module or action that an event is about."""
    return str(data.get("resolved_action") or data.get("task_action") or "")


def _text(value: Any) -> str | None:
    return None if value is None else clean(str(value))


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None


def _whole(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def server_of(item: Mapping[str, Any]) -> Server:
    actions = item.get("actions") or []
    return Server(
        instance=clean(str(item.get("instance") or "")),
        state=clean(str(item.get("state") or "")),
        endpoint=_text(item.get("endpoint")),
        plan_hash=_text(item.get("plan_hash")),
        actions=tuple(clean(str(action)) for action in actions),
    )


def keep_server(servers: list[Server], fresh: Server) -> None:
    """Keeps what was said of a server last, with all that was done; a look ahead gives way to the deed."""
    for index, known in enumerate(servers):
        if known.instance == fresh.instance:
            done = () if known.state.startswith("would be") else known.actions
            servers[index] = replace(fresh, actions=done + fresh.actions)
            return
    servers.append(fresh)


def bench_of(item: Mapping[str, Any]) -> Bench:
    card = item.get("card_uuid") or item.get("uuid")
    return Bench(
        model=clean(str(item.get("model") or "")),
        card_uuid=_text(card),
        decode_tps=float(item["median_decode_tps"]),
        ttft_ms=float(item.get("median_ttft_ms") or 0.0),
        prompt_tokens=_whole(item.get("prompt_tokens")),
        receipt_decode_tps=_number(item.get("receipt_decode_tps")),
        vs_receipt_percent=_number(item.get("vs_receipt_percent")),
        data={str(key): value for key, value in item.items() if not str(key).startswith("_ansible")},
    )


def check_of(item: Mapping[str, Any]) -> Check:
    return Check(
        level=clean(str(item.get("level") or "")),
        text=clean(str(item.get("text") or item.get("message") or "")),
        fix=_text(item.get("fix")),
    )


def card_of(item: Mapping[str, Any]) -> Card:
    tuned = item.get("tuned")
    return Card(
        index=_whole(item.get("index")),
        uuid=_text(item.get("uuid")),
        name=clean(str(item.get("name") or "")),
        memory_mib=_whole(item.get("memory_mib")),
        memory_used_mib=_whole(item.get("memory_used_mib")),
        instance=_text(item.get("instance")),
        model=_text(item.get("model")),
        state=clean(str(item.get("state") or "absent")),
        health=clean(str(item.get("health") or "none")),
        tuned=tuned if isinstance(tuned, bool) else None,
        bench_tps=_number(item.get("bench_tps")),
        bench_vs_receipt_percent=_number(item.get("bench_vs_receipt_percent")),
        bench_time=_text(item.get("bench_time")),
        bench_current=bool(item.get("bench_current")) if item.get("bench_tps") is not None else None,
        endpoint=_text(item.get("endpoint")),
        note=clean(str(item.get("note") or "")),
    )

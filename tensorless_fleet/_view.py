# SPDX-License-Identifier: Apache-2.0
"""What a fleet run shows: a live table on a terminal, plain lines elsewhere, JSON lines for programs."""

from __future__ import annotations

import json
import os
import sys
import time
from types import TracebackType
from typing import TYPE_CHECKING, Any

from tensorless_fleet.results import Card, Event, HostResult, Result

if TYPE_CHECKING:
    from rich.table import Table

MARKS = {"ok": "ok", "changed": "changed", "failed": "FAILED", "unreachable": "UNREACHABLE"}
COLOURS = {
    "ok": "green", "changed": "yellow", "failed": "bold red", "unreachable": "bold red", "interrupted": "magenta",
}  # fmt: skip


class View:
    """Shows events. Use as a context manager; ``event`` may be called from any thread."""

    def __enter__(self) -> View:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None

    def event(self, event: Event) -> None:
        """Shows one event."""

    def result(self, result: Result) -> None:
        """Shows the end."""


class JsonView(View):
    """One JSON object per line: events, then ``{"result": ...}``."""

    def event(self, event: Event) -> None:
        self._write({"event": event.as_dict()})

    def result(self, result: Result) -> None:
        self._write({"result": result.as_dict()})

    def _write(self, value: Any) -> None:
        sys.stdout.write(json.dumps(value, ensure_ascii=False) + "\n")
        sys.stdout.flush()


class PlainView(View):
    """One line for what changed, failed or moved on; steps that found all in order stay silent."""

    def __init__(self) -> None:
        self.play = ""  # said when a host begins in it
        self.said: dict[str, str] = {}  # host -> its last line of progress

    def event(self, event: Event) -> None:
        if event.kind == "play":
            self.play = event.text
        elif event.kind == "step" and self.play:
            self._write(self.play)
            self.play = ""
        elif event.kind == "line":
            if event.text.startswith(("[ERROR]", "[WARNING]", "ERROR!")):
                sys.stderr.write(event.text + "\n")
        elif event.host is None:
            return
        elif event.kind in ("failed", "unreachable"):
            self._write(f"{event.host}: {MARKS[event.kind]} {event.step}: {event.text}")
        elif event.kind == "changed":
            self._write(f"{event.host}: {event.step}: changed")
        elif event.kind == "ok" and event.text:
            self._write(f"{event.host}: {event.text}")
        elif event.kind == "progress" and self.said.get(event.host) != event.text:
            self.said[event.host] = event.text
            self._write(f"{event.host}: {event.text}")

    def _write(self, text: str) -> None:
        sys.stdout.write(text + "\n")
        sys.stdout.flush()

    def result(self, result: Result) -> None:
        self._write("")
        for line in result_lines(result):
            self._write(line)


class LiveView(View):
    """A table with a line per host that follows the work."""

    def __init__(self, title: str) -> None:
        from rich.console import Console
        from rich.live import Live

        self.title = title
        self.begin = time.monotonic()
        self.rows: dict[str, dict[str, Any]] = {}
        self.phase = "starting"
        self.console = Console(highlight=False)
        self.live = Live(
            console=self.console, refresh_per_second=4, get_renderable=self._table, transient=True, screen=False
        )

    def __enter__(self) -> LiveView:
        self.live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.live.stop()

    def event(self, event: Event) -> None:
        if event.kind == "play" and event.text:
            self.phase = event.text
        if event.host is None:
            return
        row = self.rows.setdefault(event.host, {"state": "", "step": "", "note": "", "since": time.monotonic()})
        if event.kind == "step":
            row.update(step=event.step, note="", since=time.monotonic(), busy=True)
        elif event.kind == "progress":
            row["note"] = event.text
        else:
            row["busy"] = False
        if event.kind in ("failed", "unreachable"):
            row.update(state=event.kind, note=event.text, step=event.step or row["step"])
        elif event.kind == "changed" and row["state"] not in ("failed", "unreachable"):
            row["state"] = "changed"
        elif event.kind == "ok":
            row["state"] = row["state"] or "ok"
            if event.text:
                row["note"] = event.text

    def _table(self) -> Table:
        from rich.table import Table
        from rich.text import Text

        seconds = int(time.monotonic() - self.begin)
        table = Table(
            title=Text(f"{self.title}  {self.phase}  {seconds} s"), title_justify="left", expand=True, box=None
        )
        table.add_column("HOST", no_wrap=True)
        table.add_column("STATE", no_wrap=True)
        table.add_column("STEP", ratio=2, no_wrap=True, overflow="ellipsis")
        table.add_column("DETAIL", ratio=3, no_wrap=True, overflow="ellipsis")
        for host, row in self.rows.items():
            ended = row["state"] in ("failed", "unreachable")
            age = int(time.monotonic() - row["since"])
            detail = row["note"] or (f"{age} s" if age >= 2 and not ended else "")
            shown = MARKS.get(row["state"], "working")
            if row.get("busy") and not ended:
                shown = "working"
            table.add_row(Text(host), Text(shown, style=COLOURS.get(row["state"], "")), Text(row["step"]), Text(detail))
        return table

    def result(self, result: Result) -> None:
        from rich.text import Text

        for line in result_lines(result):
            style = ""
            for state in ("FAILED", "UNREACHABLE"):
                if f"  {state}" in line:
                    style = "bold red"
            self.console.print(Text(line, style=style), soft_wrap=True)


def choose(json_lines: bool, plain: bool, title: str) -> View:
    """The view for this output: JSON where asked, live on a terminal, plain elsewhere."""
    if json_lines:
        return JsonView()
    if plain or not sys.stdout.isatty() or os.environ.get("TERM", "dumb") == "dumb":
        return PlainView()
    return LiveView(title)


def columns(rows: list[list[str]]) -> list[str]:
    """Rows as aligned lines; the last column is not padded."""
    widths = [max(len(row[index]) for row in rows) for index in range(len(rows[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def result_lines(result: Result) -> list[str]:
    """The short table at the end, and where the log is."""
    lines: list[str] = []
    if result.command == "doctor":
        lines += doctor_lines(result)
    elif result.command == "fleet":
        lines += fleet_lines(result)
    elif result.command == "report" and result.summary:
        lines += result.summary
    elif result.hosts:
        rows = [["HOST", "STATE", "WHAT"]]
        for host in result.hosts.values():
            for number, text in enumerate(host_texts(host, result.command) or [""]):
                shown = host.state.upper() if not host.ok else host.state
                rows.append([host.host, shown, text] if number == 0 else ["", "", text])
        lines += columns(rows)
    lines += [f"wrote {path}" for path in result.files]
    lines.append(f"{result.seconds:.0f} s" + (f"; the log is in {result.log}" if result.log else ""))
    return lines


def host_texts(host: HostResult, command: str = "") -> list[str]:
    """What there is to say about one host, most important first."""
    texts = [host.reason] if host.reason else []
    for server in host.servers:
        where = f" at {server.endpoint}" if server.endpoint and server.state == "started" else ""
        state = server.state if server.actions else f"already {server.state}"
        texts.append(f"{server.instance} {state}{where}")
    for bench in host.benches:
        versus = "" if bench.vs_receipt_percent is None else f" ({bench.vs_receipt_percent:+.1f}% against the receipt)"
        texts.append(f"{bench.model} {bench.decode_tps:.2f} tok/s decode, TTFT {bench.ttft_ms:.0f} ms{versus}")
    if command == "pull" and host.ok:
        texts += [f"{model}: engine image and model file are there" for model in {p["model"]: 0 for p in host.plans}]
    texts += host.notes
    texts += [f"skipped: {item.get('reason')}" for item in host.skipped]
    return texts


def doctor_lines(result: Result) -> list[str]:
    """The doctor's lines, host by host."""
    lines: list[str] = []
    for host in result.hosts.values():
        lines.append(f"{host.host}:")
        for check in host.checks:
            lines.append(f"  {check.level}  {check.text}")
            if check.fix and check.level == "FAIL":
                lines.append(f"        fix: {check.fix}")
        if host.reason and not host.checks:
            lines.append(f"  {host.state.upper()}  {host.reason}")
        failed = sum(check.level == "FAIL" for check in host.checks)
        if host.checks:
            lines.append(f"  {failed_words(failed)}")
    return lines


def failed_words(failed: int) -> str:
    """The doctor's last line."""
    if not failed:
        return "all checks passed."
    return f"{failed} check{'' if failed == 1 else 's'} failed."


def fleet_lines(result: Result) -> list[str]:
    """The table of hosts and cards."""
    rows = [["HOST", "CARD", "MODEL", "STATE", "HEALTH", "TUNED", "BENCH", "NOTE"]]
    for host in result.hosts.values():
        if not host.cards:
            rows.append([host.host, "-", "-", host.state, "-", "-", "-", host.reason or "no card"])
        for card in host.cards:
            rows.append([host.host, *card_cells(card)])
    return columns(rows)


def card_cells(card: Card) -> list[str]:
    """One card's columns."""
    uuid = (card.uuid or "").partition("-")[2][:8]
    name = f"{'-' if card.index is None else card.index} {card.name}" + (f" {uuid}" if uuid else "")
    tuned = {True: "tuned", False: "untuned", None: "-"}[card.tuned]
    bench = "-"
    if card.bench_tps is not None:
        versus = "" if card.bench_vs_receipt_percent is None else f" ({card.bench_vs_receipt_percent:+.1f}%)"
        if card.bench_current is False:
            versus = " (another plan)"
        bench = f"{card.bench_tps:.2f} tok/s{versus}"
    note = card.note.partition(". ")[0] if card.tuned is False else card.note  # the label's first sentence
    return [name, card.model or "-", card.state, card.health, tuned, bench, note]

# SPDX-License-Identifier: Apache-2.0
"""What the orchestrator returns: events while work goes on, and one result per host at the end.

The names in this file are public. Within 0.x a minor version may add fields; none is renamed or removed without a
note in the changelog. Times are Unix seconds, durations seconds, memory MiB, sizes bytes, speeds tokens per second.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Literal

EventKind = Literal[
    "begin", "play", "step", "ok", "changed", "skipped", "failed", "ignored", "unreachable", "progress", "line", "end"
]
HostState = Literal["ok", "changed", "failed", "unreachable", "interrupted", "untouched"]


@dataclass(frozen=True)
class Event:
    """One thing that happened.

    Attributes:
        kind: ``begin`` and ``end`` of the work, ``play``, a ``step`` that starts on a host, how it ended there (``ok``,
            ``changed``, ``skipped``, ``failed``, ``ignored``, ``unreachable``), ``progress`` inside a long step, or a
            ``line`` of Ansible's that belongs to no host.
        time: when, in Unix seconds on this machine.
        host: the inventory's name of the host, or None.
        step: the name of the task, or "".
        text: what a person should read; one line, without control characters.
    """

    kind: EventKind
    time: float
    host: str | None = None
    step: str = ""
    text: str = ""

    def as_dict(self) -> dict[str, Any]:
        """The event as JSON-ready data."""
        return asdict(self)


@dataclass(frozen=True)
class Server:
    """One server on one host.

    Attributes:
        instance: its name (the unit is ``tensorless@<instance>``).
        state: ``started``, ``stopped`` or ``absent``.
        endpoint: its base URL on that host, or None.
        plan_hash: 64 hex digits, or None where nothing is planned.
        actions: what was done to it in this run; empty when it was already so.
    """

    instance: str
    state: str
    endpoint: str | None = None
    plan_hash: str | None = None
    actions: tuple[str, ...] = ()


@dataclass(frozen=True)
class Bench:
    """One measurement.

    Attributes:
        model: the repo id.
        card_uuid: the card measured, or None where the server was reached through a tunnel.
        decode_tps: median decode speed in tokens per second.
        ttft_ms: median time to the first token in milliseconds.
        prompt_tokens: tokens of the prompt.
        receipt_decode_tps: what the recipe's receipt says, or None.
        vs_receipt_percent: the difference in percent, or None where no comparison is honest.
        data: the whole JSON of the measurement.
    """

    model: str
    card_uuid: str | None
    decode_tps: float
    ttft_ms: float
    prompt_tokens: int | None = None
    receipt_decode_tps: float | None = None
    vs_receipt_percent: float | None = None
    data: dict[str, Any] = field(default_factory=dict, repr=False)


@dataclass(frozen=True)
class Check:
    """One line of the doctor: level ``PASS``, ``WARN`` or ``FAIL``, its text, and what fixes it."""

    level: str
    text: str
    fix: str | None = None


@dataclass(frozen=True)
class Card:
    """One card of one host, as ``status`` sees it.

    Attributes:
        index: its number in nvidia-smi, which may change at a reboot.
        uuid: its identity.
        name: the card's name.
        memory_mib, memory_used_mib: MiB, or None where the driver does not say.
        instance: the server that has it, or None.
        model: the repo id that is served, or None.
        endpoint: where the server answers on its host, or None.
        state: ``active``, ``inactive``, ``failed``, ``absent`` (no server planned) and so on, as systemd says.
        health: ``ok``, ``loading``, ``down`` or ``none``.
        tuned: True, False, or None where nothing runs.
        bench_tps: last measured decode speed, or None.
        bench_vs_receipt_percent: its distance from the receipt, or None.
        bench_time: when it was measured (ISO 8601), or None.
        bench_current: whether the server's present plan was measured, or an earlier one; None without a measurement.
        note: why the card is not used, or "".
    """

    index: int | None
    uuid: str | None
    name: str
    memory_mib: int | None = None
    memory_used_mib: int | None = None
    instance: str | None = None
    model: str | None = None
    state: str = "absent"
    health: str = "none"
    tuned: bool | None = None
    bench_tps: float | None = None
    bench_vs_receipt_percent: float | None = None
    bench_time: str | None = None
    bench_current: bool | None = None
    endpoint: str | None = None
    note: str = ""


@dataclass
class HostResult:
    """How one host ended.

    Attributes:
        host: the inventory's name.
        state: ``ok`` (nothing to do), ``changed``, ``failed``, ``unreachable``, ``interrupted`` or ``untouched``.
        reason: one line for anything but ok and changed: what was found and what to do.
        step: the last step that started there.
        plans, skipped, servers, benches, checks, cards: what the run learnt about the host.
        notes: what the playbook said about the host in so many words, one line each.
    """

    host: str
    state: HostState = "untouched"
    reason: str | None = None
    step: str = ""
    plans: list[dict[str, Any]] = field(default_factory=list, repr=False)
    skipped: list[dict[str, Any]] = field(default_factory=list, repr=False)
    servers: list[Server] = field(default_factory=list)
    benches: list[Bench] = field(default_factory=list)
    checks: list[Check] = field(default_factory=list, repr=False)
    cards: list[Card] = field(default_factory=list, repr=False)
    notes: list[str] = field(default_factory=list, repr=False)

    @property
    def ok(self) -> bool:
        """Whether the work on this host is done."""
        return self.state in ("ok", "changed", "untouched")


@dataclass
class Result:
    """How a whole run ended.

    Attributes:
        command: the command that ran (``run``, ``stop``, ...).
        hosts: one entry per host, in the order in which they first appeared.
        seconds: how long it took.
        log: the path of the kept log, or None.
        files: files written on this machine (the report).
        summary: the report in a few lines.
        interrupted: whether it was cancelled.
    """

    command: str
    hosts: dict[str, HostResult] = field(default_factory=dict)
    seconds: float = 0.0
    log: str | None = None
    files: list[str] = field(default_factory=list)
    summary: list[str] = field(default_factory=list, repr=False)
    interrupted: bool = False

    @property
    def ok(self) -> bool:
        """Whether every host is done."""
        return not self.interrupted and all(host.ok for host in self.hosts.values())

    @property
    def failed(self) -> list[HostResult]:
        """The hosts that are not done."""
        return [host for host in self.hosts.values() if not host.ok]

    def __str__(self) -> str:
        """The short table that the command shows at the end."""
        from tensorless_fleet._view import result_lines

        return "\n".join(result_lines(self))

    def as_dict(self) -> dict[str, Any]:
        """The result as JSON-ready data."""
        return asdict(self)

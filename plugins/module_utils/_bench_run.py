# SPDX-License-Identifier: Apache-2.0
"""Measuring one running server. Private to the collection: it may change at any time."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Optional

from ansible_collections.tensorless.fleet.plugins.module_utils import _bench, _bench_quiet, _lease, _witness
from ansible_collections.tensorless.fleet.plugins.module_utils._bench import BenchError
from ansible_collections.tensorless.fleet.plugins.module_utils._bench_http import (
    HttpFault,
    completion,
    endpoint,
    get_json,
)
from ansible_collections.tensorless.fleet.plugins.module_utils._bench_prompt import build_prompt, prompt_hash
from ansible_collections.tensorless.fleet.plugins.module_utils._bench_stream import Stream, StreamFault

RESULTS_DIR = "/var/lib/tensorless/bench"


@dataclass
class Request:
    """Everything that one benchmark is told."""

    model: str
    card: Optional[str] = None
    host: str = _bench.HOST
    port: int = _bench.PORT
    alias: Optional[str] = None
    api_key: Optional[str] = None
    runs: int = _bench.RUNS
    tokens: int = _bench.TOKENS
    prompt: str = field(default_factory=build_prompt)
    warmup: bool = True
    pause_s: float = 0.0
    first_token_s: float = 600.0
    receipt_decode_tps: Optional[float] = None
    receipt_applies: bool = True
    untuned_label: Optional[str] = None
    untuned_reasons: list[str] = field(default_factory=list)
    # What makes a stored result this configuration's:
    card_uuid: Optional[str] = None
    image_digest: Optional[str] = None
    plan_hash: Optional[str] = None
    driver_version: Optional[str] = None
    scope: dict[str, Any] = field(default_factory=dict)
    # How carefully:
    on_busy: str = "refuse"
    wait_s: float = 120.0
    witness_interval_s: float = _witness.INTERVAL_S
    lease: bool = True
    lease_dir: str = _lease.LEASE_DIR
    owner: str = "tensorless_bench"

    def check(self) -> None:
        """Refuse what cannot be measured before anything is sent."""
        if self.tokens < 2:
            raise BenchError(f"tokens is {self.tokens}; a rate needs at least 2 tokens per run")
        if self.runs < 1:
            raise BenchError(f"runs is {self.runs}; at least 1 run is needed")
        if not 0 < self.port < 65536:
            raise BenchError(f"port is {self.port}; a port is a number from 1 to 65535")
        if not (self.host.isascii() and self.host.isprintable()) or set(self.host) & set(" /@?#"):
            raise BenchError(f"host is {self.host!r}; a host is a name or an address, without port and path")
        if self.on_busy not in ("wait", "refuse", "label"):
            raise BenchError(f"on_busy is {self.on_busy!r}; it is one of wait, refuse, label")


class Bench:
    """One measurement, step by step. `run` runs commands, `say` takes progress lines."""

    def __init__(
        self,
        request: Request,
        run: _witness.Run,
        say: Callable[[str], None] = lambda _line: None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        request.check()
        self.request = request
        self.run = run
        self.say = say
        self.clock = clock
        self.sleep = sleep
        self.address = endpoint(request.host, request.port)
        self.warnings: list[str] = []
        self.notes: list[str] = []
        self.labels: list[str] = []

    def identity(self) -> dict[str, Any]:
        """What a stored result must agree with to be this one's."""
        card = self.card_identity()
        return {
            "image_digest": self.request.image_digest,
            "plan_hash": self.request.plan_hash,
            "driver_version": self.request.driver_version or card.get("driver_version"),
            "card_uuid": self.request.card_uuid,
            "machine_id": _bench_quiet.machine_id(),
            "method": _bench.METHOD,
        }

    def card_identity(self) -> dict[str, Any]:
        """Name, slot and driver of the card now, asked by UUID."""
        return _bench_quiet.card_identity(self.run, self.request.card_uuid)

    def measure(self) -> dict[str, Any]:
        """Take the card, look around, warm up, run, and return the whole result."""
        with self._leased() as lease:
            server = self._server()
            before = self._quiet()
            card = self.card_identity()
            aer = _witness.read_aer(card.get("pci_id"))
            kernel = _bench_quiet.kernel_log(self.run)
            began = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
            self.say(
                f"benchmarking {self.request.model} at {self.address}: "
                f"warm-up, then {self.request.runs} runs of {self.request.tokens} tokens"
            )
            self._warm_up()
            witness = _witness.Witness(
                self.run, self.request.card_uuid, before["server_pid"], self.request.witness_interval_s, self.clock
            )
            with witness:
                good, bad, texts = self._runs()
            for record in (*good, *bad):
                self._testify(record, witness, before)
            result = self._result(good, bad, server)
            result.update(
                measured_at=began,
                lease=lease,
                quiet={"before": before, "after": self._look()},
                card_name=card.get("name"),
                card_index=card.get("index"),
                pci_id=card.get("pci_id"),
                output_sha256=texts,
                witness=self._summary(witness, aer, card, kernel),
                heat=_bench.heat(good),
            )
            if result["heat"]["settled"] is False:
                result["notes"].append(
                    f"the card had not settled: {result['heat']['start_c']:g} to {result['heat']['end_c']:g} degrees"
                )
            return {**result, "complete": True}

    # --- before ---------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _leased(self) -> Iterator[Any]:
        """Only a card that is known can be leased; through a tunnel there is none, and the result says so."""
        if not self.request.lease or not self.request.card_uuid:
            yield "none"
            return
        wait = 0.0 if self.request.on_busy == "refuse" else self.request.wait_s
        try:
            with _lease.held(
                self.request.card_uuid,
                self.request.owner,
                f"bench of {self.request.model}",
                wait,
                self.request.lease_dir,
                self.sleep,
                self.clock,
            ) as lease:
                if lease["took_over"]:
                    self.notes.append(
                        f"took over a lease whose process {lease['took_over'].get('pid')} no longer lives"
                    )
                yield {key: lease[key] for key in ("owner", "pid", "since", "purpose")}
        except _lease.LeaseHeld as held:
            raise BenchError(f"{held}. Wait for it to end, or measure with on_busy: wait") from None

    def _server(self) -> dict[str, Any]:
        """Who answers, and whether it is the model that was named."""
        request = self.request
        until = self.clock() + 60.0
        while True:
            try:
                get_json(request.host, request.port, "/health", request.api_key)
                break
            except HttpFault as fault:
                if fault.status != 503 or self.clock() > until:
                    raise BenchError(
                        f"no server answers {self.address}/health. "
                        f"Start one with: tensorless serve {request.model} --detach"
                        + (f" ({fault})" if fault.status else "")
                    ) from None
                self.sleep(1.0)  # the model is loading
        served = _bench_quiet.served_models(self._ask("/v1/models"))
        props = self._ask("/props")
        props = props if isinstance(props, dict) else {}
        other = bool(request.alias and served and request.alias not in served)
        if other:
            self.labels.append(f"another model: the server serves {', '.join(served)}")
            self.warnings.append(
                f"the server at {self.address} serves {', '.join(served)}, not {request.alias}: "
                "the comparison with the receipt does not apply"
            )
        settings = props.get("default_generation_settings")
        return {
            "served_models": served,
            "other_model": other,
            "build_info": props.get("build_info"),
            "total_slots": props.get("total_slots"),
            "n_ctx": settings.get("n_ctx") if isinstance(settings, dict) else None,
            "model_path": props.get("model_path"),
        }

    def _ask(self, path: str) -> Any:
        """An answer that helps but is not needed. A wrong key is a mistake to name, not a missing feature."""
        try:
            return get_json(self.request.host, self.request.port, path, self.request.api_key)
        except HttpFault as fault:
            if fault.status in (401, 403):
                raise BenchError(
                    f"{self.address} refuses the API key ({fault}). Give the key it was started with"
                ) from None
            return None

    def _look(self) -> dict[str, Any]:
        return _bench_quiet.look(self.run, self.request.card_uuid, self.request.alias, self._ask("/slots"))

    def _quiet(self) -> dict[str, Any]:
        """Wait, refuse or note, as asked, when something else is at work."""
        until = self.clock() + (self.request.wait_s if self.request.on_busy == "wait" else 0.0)
        while True:
            seen = self._look()
            if not seen["busy"]:
                return seen
            if self.clock() >= until:
                break
            self.sleep(min(2.0, max(0.1, until - self.clock())))
        text = "; ".join(seen["busy"])
        if self.request.on_busy != "label":
            raise BenchError(f"not quiet: {text}. End it, or measure anyway with on_busy: label")
        self.labels.append(f"not quiet: {text}")
        return seen

    def _warm_up(self) -> None:
        if not self.request.warmup:
            return
        try:
            stream = self._send(_bench.WARMUP_TOKENS)
        except (StreamFault, HttpFault) as fault:
            raise BenchError(f"the warm-up request failed: {fault}") from None
        self.notes += _bench_quiet.echo_notes((stream.final or {}).get("generation_settings"))

    # --- the runs -------------------------------------------------------------------------------------------------

    def _send(self, tokens: int) -> Stream:
        request = self.request
        body = _bench.request_body(request.prompt, tokens)
        until = self.clock() + 60.0
        while True:
            try:
                return completion(
                    request.host,
                    request.port,
                    body,
                    request.api_key,
                    first_token_s=request.first_token_s,
                    clock=self.clock,
                )
            except HttpFault as fault:
                if fault.status != 503 or self.clock() > until:
                    raise
                self.sleep(0.5)

    def _runs(self) -> tuple[list[dict[str, Any]], list[dict[str, Any]], list[str]]:
        """As many runs as asked that count. A run that does not count is repeated once, then the set is as it is."""
        good: list[dict[str, Any]] = []
        bad: list[dict[str, Any]] = []
        texts: list[str] = []
        while len(good) < self.request.runs and len(good) + len(bad) < 2 * self.request.runs:
            if (good or bad) and self.request.pause_s:
                self.sleep(self.request.pause_s)
            record, text = self._one()
            number = len(good) + len(bad) + 1
            if record["valid"]:
                good.append(record)
                texts.append(text)
                self.say(f"run {number}: {record['decode_tps']:.2f} tok/s decode, TTFT {record['ttft_ms']:.0f} ms")
            else:
                bad.append(record)
                self.say(f"run {number}: thrown out: {'; '.join(record['reasons'])}")
        return good, bad, sorted(set(texts))

    def _one(self) -> tuple[dict[str, Any], str]:
        slots = self._ask("/slots")
        metrics = _bench_quiet.tokens_total(self._ask("/metrics"))
        begin = self.clock()
        text = ""
        if _bench_quiet.busy_slots(slots):
            record = _bench.failed_run("another request was in the server's slot")
        else:
            try:
                stream = self._send(self.request.tokens)
                record = _bench.run_record(stream, self.request.tokens)
                text = hashlib.sha256("".join(stream.text).encode("utf-8", "replace")).hexdigest()
            except (StreamFault, HttpFault) as fault:
                record = _bench.failed_run(str(fault))
        record.update(begin=begin, end=self.clock(), exclusive="unknown")
        after = _bench_quiet.tokens_total(self._ask("/metrics"))
        if metrics is not None and after is not None and record["tokens"]:
            foreign = after - metrics - record["tokens"]
            # The server may count a character's last bytes once more; a request of others is many tokens.
            record["exclusive"] = "yes" if foreign <= _bench.OVERRUN else "no"
            if foreign > _bench.OVERRUN:
                record["valid"] = False
                record["reasons"].append(f"the server generated {foreign} tokens for somebody else during the run")
        if not record["valid"]:
            self.sleep(1.0)
        return record, text

    # --- after ----------------------------------------------------------------------------------------------------

    def _testify(self, record: dict[str, Any], witness: _witness.Witness, before: dict[str, Any]) -> None:
        """Give the run its own part of the samples."""
        begin, end = record.pop("begin"), record.pop("end")
        record["witness"] = _witness.window(
            witness.samples, begin, end, witness.interval_s, before["server_pids"], record["tokens"]
        )

    def _result(self, good: list[dict[str, Any]], bad: list[dict[str, Any]], server: dict[str, Any]) -> dict[str, Any]:
        request = self.request
        if not good:
            reasons = sorted({reason for record in bad for reason in record["reasons"]})
            raise BenchError(f"no run of {len(bad)} is a measurement: {'; '.join(reasons)}")
        result = _bench.summarise(
            request.model, request.card, self.address, good, request.receipt_decode_tps, server["other_model"]
        )
        steady = _bench.stability([r["decode_tps"] for r in good], [r["ttft_ms"] for r in good])
        off = [
            r["server"]["disagreement_percent"]
            for r in good
            if abs(r["server"]["disagreement_percent"] or 0.0) > _bench.DISAGREE_PERCENT
        ]
        if off:
            self.warnings.append(
                f"the client's decode rate and the server's own differ by {max(off, key=abs):.1f} % (same definition)"
            )
        if bad:
            self.warnings.append(f"{len(bad)} run(s) were thrown out; their reasons are in `discarded`")
        if request.untuned_label:
            self.labels.append(request.untuned_label)
        prefill = [r["server"]["prefill_tps"] for r in good if r["server"].get("prefill_tps")]
        result.update(
            schema=_bench.SCHEMA,
            **self.identity(),
            **server,
            boot_id=_lease.boot_id(),
            requested_runs=request.runs,
            requested_tokens=request.tokens,
            state="warm" if request.warmup else "cold",
            discarded=bad,
            prefill_tps=_bench.median(prefill) if prefill else None,
            server_decode_tps=_server_median(good),
            prompt_sha256=prompt_hash(request.prompt),
            untuned=bool(request.untuned_label),
            untuned_reasons=request.untuned_reasons,
            untuned_label=request.untuned_label,
            receipt_applies=bool(
                request.receipt_applies
                and not request.untuned_label
                and not server["other_model"]
                and not any(_bench.drafted(record) for record in good)
            ),
            exclusive=_exclusive(good),
            labels=[*self.labels, *sorted({label for r in good for label in r["labels"]})],
            notes=[*self.notes, *steady.pop("notes")],
            warnings=self.warnings,
            scope=request.scope,
            **steady,
        )
        return result

    def _summary(
        self, witness: _witness.Witness, aer: dict[str, int], card: dict[str, Any], kernel: Optional[list[str]]
    ) -> dict[str, Any]:
        now = _witness.read_aer(card.get("pci_id"))
        return {
            "interval_s": witness.interval_s,
            "samples": len(witness.samples),
            "sampler_lost": witness.lost,
            "not_readable": sorted(witness.reader.refused),
            "aer_before": aer,
            "aer_growth": {k: v - aer.get(k, 0) for k, v in now.items() if v > aer.get(k, 0)},
            "kernel": _bench_quiet.new_faults(kernel, _bench_quiet.kernel_log(self.run)),
            "bmc": _bench_quiet.bmc(self.run),
        }


def _server_median(good: Sequence[dict[str, Any]]) -> Optional[float]:
    own = [r["server"]["decode_tps"] for r in good if r["server"]["decode_tps"] is not None]
    return _bench.median(own) if own else None


def _exclusive(good: Sequence[dict[str, Any]]) -> str:
    return "yes" if all(r["exclusive"] == "yes" for r in good) else "unknown"


# --- stored results ----------------------------------------------------------------------------------------------


def load_result(directory: str, uuid: Optional[str]) -> Optional[dict[str, Any]]:
    """The last result of a card, or None."""
    try:
        with open(result_path(directory, uuid), encoding="utf-8") as handle:
            found = json.load(handle)
    except (OSError, ValueError):
        return None
    # `complete` is written last of all: without it this is part of a result.
    whole = isinstance(found, dict) and found.get("schema") == _bench.SCHEMA and found.get("complete") is True
    return found if whole else None


def load_results(directory: str) -> list[dict[str, Any]]:
    """The last result of every card of this host."""
    try:
        names = sorted(os.listdir(directory))
    except OSError:
        return []
    found = [load_result(directory, name[: -len(".json")]) for name in names if name.endswith(".json")]
    return [result for result in found if result is not None]


def result_path(directory: str, uuid: Optional[str]) -> str:
    """One file a card. A server without a card that can be named has one too."""
    return os.path.join(directory, os.path.basename(uuid or "no-card") + ".json")


def store_result(directory: str, result: dict[str, Any]) -> str:
    """Replace the card's last result in one step."""
    os.makedirs(directory, mode=0o755, exist_ok=True)
    path = result_path(directory, result.get("card_uuid"))
    draft = f"{path}.{os.getpid()}"
    handle = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    with os.fdopen(handle, "w", encoding="utf-8") as out:
        json.dump(result, out, separators=(",", ":"))
        out.flush()
        os.fsync(out.fileno())
    os.chmod(draft, 0o644)
    os.replace(draft, path)
    return path

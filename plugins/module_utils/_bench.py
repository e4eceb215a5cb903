# SPDX-License-Identifier: Apache-2.0
"""The benchmark's arithmetic: what is sent, what counts, what the result says. No I/O.

Private to the collection: it may change at any time.
"""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Optional

from ansible_collections.tensorless.fleet.plugins.module_utils._bench_stream import Stream
from ansible_collections.tensorless.fleet.plugins.module_utils._refusal import Refusal

SCHEMA = 1
METHOD = "tensorless/completion-stream/1"
RUNS, TOKENS, WARMUP_TOKENS = 3, 256, 8
HOST, PORT = "127.0.0.1", 8080
OVERRUN = 3  # the server may finish a character
DISAGREE_PERCENT = 1.0  # client against server, same definition
UNSTABLE_DECODE, UNSTABLE_TTFT, FALLING = 0.05, 0.20, 0.03
STALL_FACTOR = 4.0
RECEIPT_NOTE = "The receipt was measured with a different prompt, so expect a few percent of difference."


class BenchError(Refusal):
    """There is no measurement; the text says what was found and what to do."""


def request_body(prompt: str, tokens: int, slot: Optional[int] = None) -> dict[str, Any]:
    """What one request asks for: greedy, fixed seed, the full count, nothing from the prompt cache."""
    body: dict[str, Any] = {
        "prompt": prompt,
        "n_predict": tokens,
        "stream": True,
        "temperature": 0,
        "top_k": 1,
        "seed": 424242,
        "ignore_eos": True,
        "cache_prompt": False,
        "sse_ping_interval": -1,
    }
    if slot is not None:
        body["id_slot"] = slot
    return body


def rates(start: float, stamps: Sequence[tuple[float, int]]) -> tuple[float, float, int]:
    """(decode tok/s, TTFT ms, tokens) from when each count was reached.

    Decode is the tokens after the first stamp over the time from the first stamp to the last. With one token a frame
    that is (tokens - 1) over first to last; where the first stamp already stands for several, it is still right.
    """
    if not stamps:
        raise BenchError("no token came, so there is no rate")
    (first_at, first), (last_at, last) = stamps[0], stamps[-1]
    if last - first < 1:
        raise BenchError(f"{last} token{'s' if last != 1 else ''} in one moment: a rate needs two tokens apart in time")
    if last_at <= first_at:
        raise BenchError("no time passed between the first token and the last: the stream was buffered on its way")
    return (last - first) / (last_at - first_at), (first_at - start) * 1000.0, last


def median(values: Iterable[float]) -> float:
    """The middle value; of an even number of values the mean of the middle two."""
    ordered = sorted(float(v) for v in values)
    if not ordered:
        raise BenchError("a median needs at least one value")
    half = len(ordered) // 2
    return ordered[half] if len(ordered) % 2 else (ordered[half - 1] + ordered[half]) / 2


def quantile(values: Sequence[float], share: float) -> float:
    """Linear interpolation between the two nearest ranks."""
    ordered = sorted(values)
    if not ordered:
        raise BenchError("a quantile needs at least one value")
    place = share * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def vs_percent(value: float, base: float) -> float:
    """How far `value` is from `base`, in percent of `base`; faster is positive."""
    if base <= 0:
        raise BenchError(f"a receipt of {base} tok/s cannot be compared with")
    return (value / base - 1.0) * 100.0


def shown_percent(value: float) -> str:
    """One decimal, ASCII sign, and never a minus zero."""
    text = f"{value:.1f}"
    return "0.0" if text == "-0.0" else text


def short_receipt(receipt: Optional[dict[str, Any]]) -> Optional[float]:
    """The one number of a recipe's receipt that a benchmark is compared with."""
    decode = (receipt or {}).get("decode_tps")
    value = decode.get("short") if isinstance(decode, dict) else None
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) and value > 0 else None


# --- one run -----------------------------------------------------------------------------------------------------


ECHOED = {"seed": 424242, "temperature": 0, "top_k": 1, "ignore_eos": True}


def contradictions(settings: Any) -> list[str]:
    """What the server says it understood, where that is not what was asked."""
    if not isinstance(settings, dict):
        return []
    return [
        f"the server took {key} as {settings[key]!r} instead of {value!r}"
        for key, value in ECHOED.items()
        if key in settings and settings[key] != value
    ]


def faults(stream: Stream, asked: int) -> list[str]:
    """Why this run is no measurement. An empty list: it is one."""
    final = stream.final or {}
    timings = final.get("timings") or {}
    found = contradictions(final.get("generation_settings"))
    kind = final.get("stop_type")
    if kind == "word" or final.get("stopped_word"):
        found.append(
            f"stopped at the word {final.get('stopping_word')!r} after {stream.tokens} of {asked} tokens: "
            "the server was started with a stop word (-r); restart it without"
        )
    elif kind == "eos" or final.get("stopped_eos"):
        found.append(f"stopped at an end token after {stream.tokens} of {asked} tokens: the server ignored ignore_eos")
    elif kind not in (None, "limit"):
        found.append(f"stopped with {kind!r} instead of at the limit")
    said = final.get("tokens_predicted")
    count = said if isinstance(said, int) else stream.tokens
    if not asked <= count <= asked + OVERRUN:
        found.append(f"generated {count} tokens instead of {asked}")
    elif count != stream.tokens:
        found.append(f"the frames carried {stream.tokens} tokens, the end of the stream says {count}")
    if final.get("truncated"):
        found.append("the server cut the prompt or shifted the context")
    cached = timings.get("cache_n")
    if isinstance(cached, int) and cached > 0:
        found.append(f"{cached} prompt tokens came from the prompt cache")
    read, whole = timings.get("prompt_n"), final.get("tokens_evaluated")
    if isinstance(read, int) and isinstance(whole, int) and read != whole and not (cached or 0) > 0:
        found.append(f"the server read {read} of {whole} prompt tokens in this run")
    drafted = timings.get("draft_n")
    if isinstance(drafted, int) and drafted > 0 and not isinstance(timings.get("draft_n_accepted"), int):
        found.append("a draft model was used and the server does not say how many of its tokens were accepted")
    return found


def labels(stream: Stream) -> list[str]:
    """What a reader must know about a run that does count."""
    timings = (stream.final or {}).get("timings") or {}
    found = []
    if isinstance(timings.get("draft_n"), int) and timings["draft_n"] > 0:
        found.append(f"drafted: {timings.get('draft_n_accepted')} of {timings['draft_n']} draft tokens accepted")
    elif stream.max_jump > 4:
        # A character takes at most four bytes, so at most four byte tokens; more at once is a burst.
        found.append(f"bursts: up to {stream.max_jump} tokens in one frame")
    merged = stream.frames - len(stream.stamps)
    if stream.frames and merged / stream.frames > 0.1:
        found.append(f"coalesced: {merged} of {stream.frames} frames arrived together with the one before")
    if stream.counted_by != "tokens_predicted":
        found.append("the server gives no token counter: frames with text were counted")
    if stream.headers.get("via") or stream.headers.get("server", "llama.cpp") != "llama.cpp":
        found.append("a proxy answered: TTFT includes it")
    return found


def drafted(record: Mapping[str, Any]) -> bool:
    """Whether a draft model was at work: another configuration than any receipt's."""
    return any(str(label).startswith("drafted: ") for label in record["labels"])


def gaps_ms(stamps: Sequence[tuple[float, int]]) -> list[float]:
    """Inter-token latencies; a frame with several tokens spreads its time over them."""
    out: list[float] = []
    for (t0, n0), (t1, n1) in zip(stamps, stamps[1:]):
        out += [(t1 - t0) * 1000.0 / (n1 - n0)] * (n1 - n0)
    return out


def pack_times(start: float, stamps: Sequence[tuple[float, int]]) -> str:
    """All stamps, small: zlib and base64 over JSON [[microseconds since the one before, tokens since], ...]."""
    rows, last_t, last_n = [], 0, 0
    for at, count in stamps:
        now = round((at - start) * 1e6)
        rows.append([now - last_t, count - last_n])
        last_t, last_n = now, count
    return base64.b64encode(zlib.compress(json.dumps(rows, separators=(",", ":")).encode(), 9)).decode("ascii")


def unpack_times(packed: str) -> list[tuple[float, int]]:
    """The inverse of pack_times, with seconds since the request and the running count."""
    out, at, count = [], 0, 0
    for delta, tokens in json.loads(zlib.decompress(base64.b64decode(packed))):
        at, count = at + int(delta), count + int(tokens)
        out.append((at / 1e6, count))
    return out


def server_timings(stream: Stream, decode_tps: float) -> dict[str, Any]:
    """The server's own clock beside ours, by the same definition: the gaps between tokens, not the tokens."""
    timings = (stream.final or {}).get("timings") or {}
    count, spent = timings.get("predicted_n"), timings.get("predicted_ms")
    out: dict[str, Any] = {"timings": timings, "decode_tps": None, "disagreement_percent": None}
    if isinstance(count, int) and isinstance(spent, (int, float)) and count > 1 and spent > 0:
        own = (count - 1) / (spent / 1000.0)
        out["decode_tps"] = own
        out["disagreement_percent"] = vs_percent(decode_tps, own)
    read, read_ms = timings.get("prompt_n"), timings.get("prompt_ms")
    if isinstance(read, int) and isinstance(read_ms, (int, float)) and read > 0 and read_ms > 0:
        out["prefill_tps"] = read / (read_ms / 1000.0)
    return out


def prompt_tokens(stream: Stream) -> Optional[int]:
    """As the server counted them."""
    final = stream.final or {}
    for value in ((final.get("timings") or {}).get("prompt_n"), final.get("tokens_evaluated")):
        if isinstance(value, int):
            return value
    return None


def run_record(stream: Stream, asked: int) -> dict[str, Any]:
    """One run as it is stored, whether it counts or not."""
    reasons = faults(stream, asked)
    decode: Optional[float] = None
    ttft: Optional[float] = None
    tokens = stream.tokens
    try:
        decode, ttft, tokens = rates(stream.start, stream.stamps)
    except BenchError as fault:
        reasons.append(str(fault))
    record: dict[str, Any] = {
        "decode_tps": decode,
        "ttft_ms": ttft,
        "prompt_tokens": prompt_tokens(stream),
        "tokens": tokens,
        "valid": not reasons,
        "reasons": reasons,
        "labels": labels(stream),
        "frames": stream.frames,
        "max_jump": stream.max_jump,
        "connect_ms": stream.connect_s * 1000.0,
        "model": (stream.final or {}).get("model"),
        "times": pack_times(stream.start, stream.stamps),
    }
    if decode is not None:
        record["server"] = server_timings(stream, decode)
        gaps = gaps_ms(stream.stamps)
        middle = median(gaps)
        record["itl_ms"] = {
            "p50": middle,
            "p90": quantile(gaps, 0.9),
            "p99": quantile(gaps, 0.99),
            "max": max(gaps),
            "stalls": sum(1 for gap in gaps if gap > STALL_FACTOR * middle),
        }
    return record


def failed_run(reason: str) -> dict[str, Any]:
    """A run without numbers."""
    return {
        "decode_tps": None,
        "ttft_ms": None,
        "prompt_tokens": None,
        "tokens": 0,
        "valid": False,
        "reasons": [reason],
        "labels": [],
    }


# --- the result --------------------------------------------------------------------------------------------------


def spread(values: Sequence[float]) -> float:
    """(largest - smallest) over the median."""
    return (max(values) - min(values)) / median(values) if values else 0.0


def stability(decode: Sequence[float], ttft: Sequence[float]) -> dict[str, Any]:
    """Whether the runs agree with each other, and whether they fall one after the other."""
    notes = []
    stable = spread(decode) <= UNSTABLE_DECODE and spread(ttft) <= UNSTABLE_TTFT
    if not stable:
        notes.append(
            f"the runs differ: decode by {spread(decode) * 100:.1f} %, TTFT by {spread(ttft) * 100:.1f} % of the median"
        )
    if len(ttft) > 2 and ttft[0] > max(ttft[1:]) * (1 + UNSTABLE_TTFT):
        notes.append("the first run's TTFT is much longer than the others': the warm-up may be too short")
    falling = (
        len(decode) > 2 and all(b < a for a, b in zip(decode, decode[1:])) and decode[-1] < decode[0] * (1 - FALLING)
    )
    if falling:
        notes.append(f"each run was slower than the one before ({decode[0]:.2f} to {decode[-1]:.2f} tok/s): heat?")
    return {"stable": stable, "trend": "falling" if falling else "level", "spread": spread(decode), "notes": notes}


SETTLED_C = 5.0


def heat(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The card's temperature at the start and at the end, and whether it had settled in between."""
    seen = [((run.get("witness") or {}).get("fields") or {}).get("temperature_c") for run in runs]
    gauges = [gauge for gauge in seen if gauge]
    if not gauges:
        return {"start_c": None, "end_c": None, "settled": None}
    start, end = gauges[0]["min"], gauges[-1]["max"]
    return {"start_c": start, "end_c": end, "settled": end - start < SETTLED_C}


def compare(result: dict[str, Any], receipt_decode_tps: Optional[float], other_model: bool = False) -> dict[str, Any]:
    """The result with its comparison, where there is one to make."""
    out = dict(result)
    if receipt_decode_tps and not other_model:
        out["receipt_decode_tps"] = receipt_decode_tps
        out["vs_receipt_percent"] = vs_percent(out["median_decode_tps"], receipt_decode_tps)
    return out


def summarise(
    model: str,
    card: Optional[str],
    address: str,
    runs: Sequence[dict[str, Any]],
    receipt_decode_tps: Optional[float] = None,
    other_model: bool = False,
) -> dict[str, Any]:
    """The documented fields from the runs that count."""
    if not runs:
        raise BenchError("no run was a measurement")
    result = {
        "model": model,
        "card": card,
        "endpoint": address,
        "runs": list(runs),
        "median_decode_tps": median(r["decode_tps"] for r in runs),
        "median_ttft_ms": median(r["ttft_ms"] for r in runs),
        "prompt_tokens": runs[0]["prompt_tokens"],
    }
    return compare(result, receipt_decode_tps, other_model)


DOCUMENTED = (
    *("model", "card", "endpoint", "runs", "median_decode_tps", "median_ttft_ms", "prompt_tokens"),
    *("receipt_decode_tps", "vs_receipt_percent"),
)
DOCUMENTED_RUN = ("decode_tps", "ttft_ms", "prompt_tokens", "tokens")


def documented(result: dict[str, Any]) -> dict[str, Any]:
    """Exactly the fields that the launcher's JSON output has."""
    out = {key: result[key] for key in DOCUMENTED if key in result}
    out["runs"] = [{key: run.get(key) for key in DOCUMENTED_RUN} for run in result["runs"]]
    return out


def text_lines(result: dict[str, Any], tokens: int = TOKENS) -> list[str]:
    """The summary as the launcher prints it."""
    count = len(result["runs"])
    lines = [
        f"{result['model']} on {result['card']}, {count} run{'s' if count != 1 else ''} of {tokens} tokens (median):",
        f"  decode         {result['median_decode_tps']:.2f} tok/s",
        f"  TTFT           {result['median_ttft_ms']:.0f} ms",
        f"  prompt tokens  {result['prompt_tokens']}",
    ]
    if "vs_receipt_percent" in result:
        percent = shown_percent(result["vs_receipt_percent"])
        lines.append(
            f"  receipt        {result['receipt_decode_tps']:.2f} tok/s decode (short); this run is {percent}%"
        )
        if result.get("untuned_label"):
            lines.append(str(result["untuned_label"]))
            lines.append("This run is untuned: the receipt's number is only a rough guide.")
        elif result.get("receipt_applies") is False:
            lines.append("The receipt does not apply to this run: its number is only a rough guide.")
        else:
            lines.append(RECEIPT_NOTE)
    elif result.get("other_model"):
        lines.append("  receipt        not compared: the server serves another model")
    else:
        lines.append("  receipt        the recipe has no decode receipt to compare with")
    return lines

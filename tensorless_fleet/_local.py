# SPDX-License-Identifier: Apache-2.0
"""The commands on this machine, as the calling user: pull, serve, run, stop, bench, doctor, gguf-check.

The work is that of the collection's modules, called as functions: no Ansible, no root, no systemd. The container is
started as the plan prints it; it is gone after a reboot, as documented.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

from tensorless_fleet import _show
from tensorless_fleet._usage import Options

Say = Callable[[str], None]


class Ended(BaseException):
    """SIGTERM or SIGHUP, which end a command as Ctrl-C does."""


def answer(options: Options) -> int:
    """Runs one command here; returns the exit code."""
    work = {
        "pull": pull,
        "serve": serve,
        "run": serve,
        "stop": stop,
        "bench": bench,
        "doctor": doctor,
        "gguf-check": gguf_check,
    }[options.command]
    with endings():
        try:
            return work(options)
        except (KeyboardInterrupt, Ended):
            sys.stderr.write("tensorless: interrupted\n")
            return 130


@contextmanager
def endings() -> Iterator[None]:
    """SIGTERM and SIGHUP raise, so that whatever is at work is left in order."""

    def end(_number: int, _frame: FrameType | None) -> None:
        raise Ended

    before = {number: signal.signal(number, end) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def say(text: str) -> None:
    """One line for the user, at once."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def whisper(text: str) -> None:
    """One line that must not mix with JSON on standard output."""
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


def planned(options: Options) -> dict[str, Any]:
    """The plan of a command that acts, from everything that can be observed here."""
    return _show.plan_here(options, thorough=True)


def announce(plan: dict[str, Any]) -> None:
    """What the user must know before anything starts: notes, and that the run is untuned."""
    for note in plan["notes"]:
        if not note.startswith("it listens on every interface"):  # said when it is ready
            say(f"note: {note}")
    if plan["untuned_label"]:
        say(plan["untuned_label"])


# --- pull -------------------------------------------------------------------------------------------------------------


def pull(options: Options) -> int:
    """``pull``: the engine image by digest, then the model."""
    plan = planned(options)
    announce(plan)
    fetch(plan)
    return 0


def fetch(plan: dict[str, Any]) -> None:
    """Brings image and model here. Raises Refusal."""
    pull_image(plan)
    pull_model(plan)


def pull_image(plan: dict[str, Any]) -> None:
    """The engine image by digest, with the runtime's own progress on the terminal."""
    from ansible_collections.tensorless.fleet.plugins.module_utils import _image
    from ansible_collections.tensorless.fleet.plugins.module_utils._runtime import Runtime

    quiet = _show.command_runner()

    def run(argv: Sequence[str]) -> tuple[int, str, str]:
        if list(argv[1:2]) != ["pull"]:
            return quiet(argv)
        say(f"pulling the engine image {argv[-1]}")
        import subprocess

        return subprocess.run(list(argv), stdin=subprocess.DEVNULL, check=False).returncode, "", ""

    _image.present(plan["image"], Runtime(plan["runtime"], run), run, 2, time.sleep, lambda _text: None, False)


def pull_model(plan: dict[str, Any]) -> None:
    """The model file, resumed, checked and linked."""
    from ansible_collections.tensorless.fleet.plugins.module_utils._blob import state_dir
    from ansible_collections.tensorless.fleet.plugins.module_utils._blob_job import Job, Tools, free_space
    from ansible_collections.tensorless.fleet.plugins.module_utils._blob_job import Options as BlobOptions
    from ansible_collections.tensorless.fleet.plugins.module_utils._hub import Wanted

    download = plan["download"]
    say(f"model {download['file']} from {download['repo']} at {download['revision'][:12]}")
    wanted = Wanted(
        download["repo"], download["revision"], download["file"], download["sha256"], download["size_bytes"]
    )
    where = BlobOptions(
        cache=download["cache"],
        state=os.path.abspath(state_dir(os.environ, os.path.expanduser("~"))),
        endpoint=download["endpoint"],
        token=os.environ.get("HF_TOKEN") or None,
    )
    meter = Meter()
    job = Job(wanted, where, Tools(os.environ, free_space, meter.report))
    try:
        seen = job.observe()
        job.apply(seen, job.plan(seen))
    finally:
        meter.close()
        for note in job.notes:
            whisper(f"note: {note}")


class Meter:
    """The progress of a download: one line that moves on a terminal, a line every ten seconds elsewhere."""

    def __init__(self) -> None:
        self.moves = sys.stderr.isatty()
        self.shown = 0.0
        self.open = False

    def report(self, figures: dict[str, Any]) -> None:
        from ansible_collections.tensorless.fleet.plugins.module_utils._progress import words

        now = time.monotonic()
        if now - self.shown < (0.5 if self.moves else 10.0):
            return
        self.shown = now
        text = words(figures)
        if self.moves:
            width = shutil.get_terminal_size().columns - 1
            sys.stderr.write("\r" + text[:width].ljust(width))
            sys.stderr.flush()
            self.open = True
        else:
            whisper(text)

    def close(self) -> None:
        if self.open:
            sys.stderr.write("\n")
            self.open = False


# --- bench ------------------------------------------------------------------------------------------------------------


def bench(options: Options) -> int:
    """``bench``: measures the server that answers on --host and --port."""
    from ansible_collections.tensorless.fleet.plugins.module_utils import _bench
    from ansible_collections.tensorless.fleet.plugins.module_utils._bench_plan import make_request
    from ansible_collections.tensorless.fleet.plugins.module_utils._bench_run import Bench

    plan = _show.plan_here(options)
    request = make_request({"plan": plan, "runs": options.runs, "tokens": options.tokens})
    work = Bench(request, _show.command_runner(), whisper if options.json else say)
    result = work.measure()
    for warning in result.get("warnings") or []:
        whisper(f"tensorless: warning: {warning}")
    if options.json:
        _show.print_json(_bench.documented(result))
    else:
        for line in _bench.text_lines(result, options.tokens):
            say(line)
    return 0


def serve(options: Options) -> int:
    raise NotImplementedError


stop = doctor = gguf_check = serve

# SPDX-License-Identifier: Apache-2.0
"""The commands on this machine, as the calling user: pull, serve, run, stop, bench, doctor, gguf-check.

The work is that of the collection's modules, called as functions: no Ansible, no root, no systemd. The container is
started as the plan prints it; it is gone after a reboot, as documented.
"""

from __future__ import annotations

import collections
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import Any

from ansible_collections.tensorless.fleet.plugins.module_utils._plan_paths import DEFAULT_ENDPOINT

from tensorless_fleet import _show
from tensorless_fleet._usage import Options

Run = Callable[[Sequence[str]], tuple[int, str, str]]


class Ended(KeyboardInterrupt):
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
            return int(work(options))
        except KeyboardInterrupt:
            sys.stderr.write("tensorless: interrupted\n")
            return 130


@contextlib.contextmanager
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

    quiet: Run = _show.command_runner()

    def run(argv: Sequence[str]) -> tuple[int, str, str]:
        if list(argv[1:2]) != ["pull"]:
            return quiet(argv)
        say(f"pulling the engine image {argv[-1]}")
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


# --- serve, run, stop -------------------------------------------------------------------------------------------------


class Follower:
    """The log of one container, from its start to its end, and the status it ended with.

    Two processes of the container tool, ``logs -f`` and ``wait``, in a session of their own: Ctrl-C is for this
    command, which then stops the server and so ends them too.
    """

    def __init__(self, runtime: str, name: str, shown: bool) -> None:
        self._lines: collections.deque[str] = collections.deque(maxlen=400)
        self._shown = shown
        self._log = subprocess.Popen(
            [runtime, "logs", "-f", name],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self._wait = subprocess.Popen(
            [runtime, "wait", name],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        self._thread = threading.Thread(target=self._read, name="tensorless-log", daemon=True)
        self._thread.start()

    def _read(self) -> None:
        from tensorless_fleet._play import clean_lines

        if self._log.stdout is None:
            return
        for raw in self._log.stdout:
            line = clean_lines(raw.decode(errors="replace").rstrip("\r\n"))
            self._lines.append(line)
            if self._shown:
                with contextlib.suppress(BrokenPipeError, ValueError):
                    say(line)

    def tail(self, lines: int) -> list[str]:
        """The last lines; waits a moment for those that are still on their way from a container that has ended."""
        self._thread.join(1.0 if self._log.poll() is None else 5.0)
        return list(self._lines)[-lines:]

    def ended(self) -> int | None:
        """Blocks until the container has ended; its exit status where the tool told it."""
        out, _err = self._wait.communicate()
        self._thread.join(5.0)
        text = out.decode(errors="replace").strip().split("\n")[-1]
        return int(text) if text.isdigit() else None

    def close(self) -> None:
        """Ends both processes."""
        for process in (self._log, self._wait):
            if process.poll() is None:
                process.terminate()
        for process in (self._log, self._wait):
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(5)
        self._thread.join(2.0)
        for process in (self._log, self._wait):
            if process.stdout is not None and not self._thread.is_alive():
                process.stdout.close()


class _Kept:
    """A follower that outlives the wait for readiness: ``close`` is left to the one who made it."""

    def __init__(self, follower: Follower) -> None:
        self.tail = follower.tail

    def close(self) -> None:
        return None


def serve(options: Options) -> int:
    """``serve`` and ``run``: starts the container as the plan prints it; follows it unless --detach is given."""
    from ansible_collections.tensorless.fleet.plugins.module_utils import _server_local as local

    plan = planned(options)
    followers: list[Follower] = []

    def follow(runtime: str, name: str) -> _Kept:
        followers.append(Follower(runtime, name, shown=not options.detach))
        return _Kept(followers[-1])

    tools = local.LocalTools(run=_show.command_runner(None), follow=follow, say=say, installed=installed(), clock=time)
    local.check_free(plan, tools)
    announce(plan)
    if options.command == "run":
        fetch(plan)
        plan = planned(options)  # image and file are here now, and may say more about the plan
    try:
        local.serve(plan, tools, options.detach)
        if options.detach:
            return 0
        say("Ctrl-C stops the server.")
        return _attend(plan, followers[-1])
    except KeyboardInterrupt:
        # Whenever it comes after the start, the server is not left behind; a second Ctrl-C does not change that.
        with contextlib.suppress(KeyboardInterrupt):
            if local.containers(plan["container_name"], tools, [plan["runtime"]]):
                local.interrupted(plan["runtime"], plan["container_name"], tools)
        raise
    finally:
        for follower in followers:
            follower.close()


def _attend(plan: dict[str, Any], follower: Follower) -> int:
    """The foreground: until the server ends."""
    status = follower.ended()
    if status in (0, 143):
        say(f"{plan['container_name']} was stopped")
        return 0
    what = "ended" if status is None else f"ended with status {status}"
    whisper(f"tensorless: the server {what}; its last lines are above. 'tensorless doctor' checks this machine")
    return 1


def installed() -> list[str]:
    """The container tools of this machine."""
    return [name for name in ("podman", "docker") if shutil.which(name)]


def stop(options: Options) -> int:
    """``stop``: in every installed runtime, or the named one."""
    from ansible_collections.tensorless.fleet.plugins.module_utils import _server_local as local

    plan = _show.plan_here(options)
    tools = local.LocalTools(
        run=_show.command_runner(None), follow=lambda runtime, name: Follower(runtime, name, False), say=say,
        installed=installed(),
    )  # fmt: skip
    local.stop(plan["container_name"], _show.runtimes_to_ask(options), tools)
    return 0


def gguf_check(options: Options) -> int:
    """``gguf-check``: a file's or an address's GGUF header."""
    from ansible_collections.tensorless.fleet.plugins.module_utils._gguf_check import check_target

    finding = check_target(options.operand or "", os.environ, os.environ.get("HF_TOKEN") or None)
    if options.json:
        _show.print_json(
            {
                "target": finding.target,
                "size_bytes": finding.size,
                "pn": finding.header.pn,
                "tensors": len(finding.header.tensors),
                "faults": finding.faults,
            }
        )
    else:
        for line in finding.lines():
            say(line)
    return 1 if finding.faults else 0


def doctor(options: Options) -> int:
    """``doctor``: the documented checks, then a block of further ones."""
    from ansible_collections.tensorless.fleet.plugins.module_utils._doctor_observe import Question, examine
    from ansible_collections.tensorless.fleet.plugins.module_utils._host import bounded
    from ansible_collections.tensorless.fleet.plugins.module_utils._plan import bracketed

    report = examine(
        Question(
            run=bounded(_show.command_runner(None), 30),
            find=shutil.which,
            recipes=_show.catalog_of(options).recipes,
            cache=_show.cache_of(options),
            runtime=options.runtime,
            ports=[f"{bracketed(options.host)}:{options.port}"],
            endpoint=os.environ.get("HF_ENDPOINT") or DEFAULT_ENDPOINT,
            token=os.environ.get("HF_TOKEN") or None,
            environ=os.environ,
        )
    )
    sys.stdout.write(report["text"])
    return int(report["exit_code"])

# SPDX-License-Identifier: Apache-2.0
"""``Fleet``: the commands of ``tensorless`` on an inventory, for Python programs."""

from __future__ import annotations

import asyncio
import atexit
import os
import threading
import time
import weakref
from collections.abc import AsyncIterator, Callable, Generator, Iterator, Mapping, Sequence
from typing import Any, Literal, TypedDict, Unpack, overload

from tensorless_fleet import _collection
from tensorless_fleet._collect import Collector
from tensorless_fleet._play import Job as PlayJob
from tensorless_fleet._play import Play
from tensorless_fleet._reasons import check_inventory, last_error, no_host
from tensorless_fleet.errors import HostsFailed, Interrupted, PlayError, UsageError
from tensorless_fleet.results import Event, Result

HostKeys = Literal["strict", "accept-new", "off"]
PLAYBOOKS = {
    "run": "site", "pull": "pull", "serve": "serve", "stop": "stop", "bench": "bench", "doctor": "doctor",
    "report": "report", "upgrade": "upgrade", "rollback": "rollback", "verify": "verify", "fleet": "fleet",
}  # fmt: skip
# `run` goes from bare to serving; measuring and reporting are commands of their own.
PHASES = {"run": ("driver", "runtime", "cdi", "plan", "image", "model", "server")}

ENDS_HERE = ("bench", "report")  # their last play writes the report on this machine

_LIVE: weakref.WeakSet[Run] = weakref.WeakSet()


class Run:
    """Work in progress on a fleet, in a thread of its own. Made by the methods of ``Fleet`` with ``wait=False``.

    Iterate over ``events()`` while it works; ``result()`` waits for the end; ``cancel()`` ends it early. ``await run``
    waits inside an event loop.
    """

    def __init__(self, job: PlayJob, check: bool, listeners: Sequence[Callable[[Event], None]] = ()) -> None:
        self._job = job
        self._check = check
        self._listeners = list(listeners)
        self._history: list[Event] = []
        self._more = threading.Condition()
        self._collector = Collector(job.command, self._emit)
        self._play = Play(job, self._collector.feed, self._collector.progress)
        self._error: BaseException | None = None
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._work, name=f"tensorless-{job.command}", daemon=True)
        _LIVE.add(self)
        self._thread.start()

    def _emit(self, event: Event) -> None:
        with self._more:
            self._history.append(event)
            self._more.notify_all()
        for listener in self._listeners:
            listener(event)

    def _work(self) -> None:
        begin = time.monotonic()
        code = 1
        try:
            self._collector.say("begin", text=self._job.command)
            code = self._play.execute()
        except BaseException as error:
            self._error = error
        finally:
            self._collector.finish(time.monotonic() - begin, self._play.canceled)
            self._collector.result.log = self._play.log
            if self._error is None:
                self._error = self._verdict(code)
            self._collector.say("end", text=summary(self._collector.result))
            with self._more:
                self._done.set()
                self._more.notify_all()

    def _verdict(self, code: int) -> BaseException | None:
        result = self._collector.result
        if result.interrupted:
            return Interrupted(f"{result.command} was interrupted; {summary(result)}", result)
        if self._collector.here:
            return PlayError(self._collector.here)
        if not result.hosts:
            return no_host(self._play.lines, self._collector.played, self._job, code)
        if result.failed:
            return HostsFailed(f"{result.command} did not work everywhere: {failures(result)}", result)
        if code not in (0, 2, 4):
            return PlayError(f"Ansible ended with code {code}: {last_error(self._play.lines) or 'no message'}")
        return None

    @property
    def done(self) -> bool:
        """Whether the work has ended."""
        return self._done.is_set()

    @property
    def so_far(self) -> Result:
        """What is known by now; after an error of the controller, what the hosts had done."""
        return self._collector.result

    def events(self) -> Iterator[Event]:
        """Every event from the beginning, as it happens, until the work ends. Any number of readers."""
        index = 0
        while True:
            with self._more:
                while index >= len(self._history) and not self._done.is_set():
                    self._more.wait()
                fresh = self._history[index:]
            if not fresh:
                return
            index += len(fresh)
            yield from fresh

    def cancel(self) -> None:
        """Ends the work: nothing new starts, and all is gone within 20 s, here and on the hosts. Twice: at once."""
        self._play.cancel()

    def result(self, timeout: float | None = None) -> Result:
        """Waits for the end and returns the result.

        Raises HostsFailed (unless the run was started with ``check=False``), Interrupted, InventoryError or PlayError;
        TimeoutError after ``timeout`` seconds, while the work goes on.
        """
        try:
            finished = self._done.wait(timeout)
        except KeyboardInterrupt:
            self.cancel()
            self._done.wait()
            raise
        if not finished:
            raise TimeoutError(f"{self._job.command} is still at work after {timeout} s")
        if isinstance(self._error, HostsFailed) and not self._check:
            return self._collector.result
        if self._error is not None:
            raise self._error
        return self._collector.result

    def __await__(self) -> Generator[Any, None, Result]:
        return self._wait().__await__()

    async def _wait(self) -> Result:
        try:
            while not self._done.is_set():
                await asyncio.sleep(0.05)
        except asyncio.CancelledError:
            self.cancel()
            raise
        return self.result()


@atexit.register
def _end_all() -> None:
    """A program that ends takes its runs with it."""
    live = [run for run in list(_LIVE) if not run.done]
    for run in live:
        run.cancel()
    for run in live:
        run._done.wait(25)


class ServerOptions(TypedDict, total=False):
    """What the methods of Fleet take beside the model.

    hosts: an Ansible pattern; without it the group ``gpu``. check: False returns the result even where hosts failed.
    check_mode: show what would change, and change nothing. on_event: called with each Event in the run's thread.
    gpu: an index, a UUID or ``each`` (every matching card, the default). card: a card id; skips detection. port: the
    first port, counted up on hosts with several servers. host: the address to publish on. context: tokens.
    extra_args: more llama-server arguments. allow_draft, runtime, cache: as on the command line.
    """

    hosts: str | None
    check: bool
    check_mode: bool
    on_event: Callable[[Event], None] | None
    gpu: int | str | None
    card: str | None
    port: int | None
    host: str | None
    context: int | None
    extra_args: Sequence[str] | None
    allow_draft: bool
    runtime: str | None
    cache: str | None


class Fleet:
    """The hosts of an inventory.

    Args:
        inventory: an Ansible inventory: a file or folder, several of them, or a comma-separated list of hosts.
        recipes: read recipes from this folder instead of the collection's own.
        host_keys: ``strict`` refuses unknown and changed ssh host keys, ``accept-new`` takes unknown ones, ``off``
            checks nothing.
        hf_token: the Hub token. It travels in a file that only you can read and is removed with the run. Without it
            the inventory's ``tensorless_hf_token`` holds; the caller's environment is not read.
        forks: how many hosts are worked on at once (Ansible's default is 5).
        vault_password_file, become_password_file: handed to Ansible as paths.

    Raises:
        CollectionConflict: another version of the collection would be found before the one of this package.
        InventoryError: the inventory cannot be read.

    A Fleet holds no connection and starts nothing until a method is called. It may be used from several threads.
    """

    def __init__(
        self,
        inventory: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
        *,
        recipes: str | os.PathLike[str] | None = None,
        host_keys: HostKeys = "strict",
        hf_token: str | None = None,
        forks: int | None = None,
        vault_password_file: str | os.PathLike[str] | None = None,
        become_password_file: str | os.PathLike[str] | None = None,
    ) -> None:
        entries = [inventory] if isinstance(inventory, (str, os.PathLike)) else list(inventory)
        self.inventory = [os.fspath(entry) for entry in entries]
        check_inventory(self.inventory)
        if host_keys not in ("strict", "accept-new", "off"):
            raise UsageError(f"host_keys must be strict, accept-new or off, not {host_keys!r}")
        for path in (vault_password_file, become_password_file):
            if path is not None and not os.access(path, os.R_OK):
                raise UsageError(f"the password file {os.fspath(path)} cannot be read; correct the path or its mode")
        if recipes is not None and not os.path.isdir(recipes):
            raise UsageError(f"the recipes folder {os.fspath(recipes)} does not exist")
        self.recipes = None if recipes is None else os.path.abspath(os.fspath(recipes))
        self.host_keys: HostKeys = host_keys
        self.forks = forks
        self.vault_password_file = None if vault_password_file is None else os.fspath(vault_password_file)
        self.become_password_file = None if become_password_file is None else os.fspath(become_password_file)
        self._hf_token = hf_token
        self._last: Run | None = None
        _collection.refuse_other_versions(dict(os.environ))

    def start(
        self,
        command: str,
        model: str | None = None,
        *,
        values: Mapping[str, Any] | None = None,
        tags: Sequence[str] = (),
        **options: Unpack[ServerOptions],
    ) -> Run:
        """Starts a command (a key of ``PLAYBOOKS``) and returns at once. Raises UsageError for what can never work.

        Args:
            model: the MODEL that every host serves, instead of the inventory's ``tensorless_servers``.
            values: more variables for the play; plain data, never treated as templates.
            tags: only these phases.
            options: see ServerOptions.
        """
        playbook = PLAYBOOKS.get(command)
        if playbook is None:
            raise UsageError(f"no such command: {command!r}; there is {', '.join(PLAYBOOKS)}")
        check_values(command, model, options)
        chosen = {**server_values(model, options), **(values or {})}
        if self.recipes:
            chosen["tensorless_recipes_dir"] = self.recipes
        job = PlayJob(
            command=command,
            playbook=f"{_collection.NAME}.{playbook}",
            inventory=self.inventory,
            limit=limit_for(command, options.get("hosts")),
            values=chosen,
            secrets={} if self._hf_token is None else {"tensorless_hf_token": self._hf_token},
            tags=tags or PHASES.get(command, ()),
            check=options.get("check_mode", False),
            forks=self.forks,
            host_keys=self.host_keys,
            vault_password_file=self.vault_password_file,
            become_password_file=self.become_password_file,
        )
        listener = options.get("on_event")
        self._last = Run(job, options.get("check", True), [listener] if listener else [])
        return self._last

    def events(self) -> Iterator[Event]:
        """The events of the run that was started last, from its beginning until it ends."""
        if self._last is not None:
            yield from self._last.events()

    @overload
    def run(
        self, model: str | None = None, *, wait: Literal[True] = True, **options: Unpack[ServerOptions]
    ) -> Result: ...

    @overload
    def run(self, model: str | None = None, *, wait: Literal[False], **options: Unpack[ServerOptions]) -> Run: ...

    def run(self, model: str | None = None, *, wait: bool = True, **options: Unpack[ServerOptions]) -> Result | Run:
        """Brings hosts from bare to serving ``model`` on every matching card. Changes nothing where all is right.

        With ``wait=False`` it returns the Run at once.
        """
        run = self.start("run", model, **options)
        return run.result() if wait else run

    def pull(self, model: str | None = None, **options: Unpack[ServerOptions]) -> Result:
        """Fetches the engine image and the model file; starts nothing."""
        return self.start("pull", model, **options).result()

    def serve(self, model: str | None = None, **options: Unpack[ServerOptions]) -> Result:
        """Starts servers from what has been pulled, and waits until they are healthy."""
        return self.start("serve", model, **options).result()

    def stop(self, model: str | None = None, **options: Unpack[ServerOptions]) -> Result:
        """Stops servers: waits for idle with a limit, then ends them."""
        return self.start("stop", model, **options).result()

    def bench(
        self, model: str | None = None, *, runs: int = 3, tokens: int = 256, **options: Unpack[ServerOptions]
    ) -> Result:
        """Measures running servers. ``result.hosts[...].benches`` holds one Bench per card, in tokens per second."""
        return self.start("bench", model, values=bench_values(runs, tokens), **options).result()

    def doctor(self, **options: Unpack[ServerOptions]) -> Result:
        """Checks hosts. ``result.hosts[...].checks`` holds the lines; a failed check raises HostsFailed."""
        return self.start("doctor", **options).result()

    def status(self, **options: Unpack[ServerOptions]) -> Result:
        """Looks at hosts and cards and changes nothing. ``result.hosts[...].cards`` holds one Card per card."""
        return self.start("fleet", **options).result()

    def report(self, directory: str | os.PathLike[str] | None = None, **options: Unpack[ServerOptions]) -> Result:
        """Writes the fleet report; ``result.files`` names what was written."""
        return self.start("report", values=report_values(directory), **options).result()

    def upgrade(self, **options: Unpack[ServerOptions]) -> Result:
        """Moves servers to the recipes of this version, a batch of hosts at a time."""
        return self.start("upgrade", **options).result()

    def rollback(self, **options: Unpack[ServerOptions]) -> Result:
        """Takes servers back to what they ran before the last upgrade."""
        return self.start("rollback", **options).result()

    def verify(self, **options: Unpack[ServerOptions]) -> Result:
        """Hashes cached model files again."""
        return self.start("verify", **options).result()


class AsyncFleet:
    """``Fleet`` for a running event loop: the same methods, awaited. Cancelling the task cancels the run.

    ``async for event in fleet.events()`` reads the events of the run that was started last.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.fleet = Fleet(*args, **kwargs)

    def start(self, command: str, model: str | None = None, **options: Any) -> Run:
        """As Fleet.start: returns a Run, which can be awaited."""
        return self.fleet.start(command, model, **options)

    async def events(self) -> AsyncIterator[Event]:
        """The events of the run that was started last."""
        source = self.fleet.events()
        while (event := await asyncio.to_thread(next, source, None)) is not None:
            yield event

    async def run(self, model: str | None = None, **options: Unpack[ServerOptions]) -> Result:
        """See Fleet.run."""
        return await self.fleet.start("run", model, **options)

    async def pull(self, model: str | None = None, **options: Unpack[ServerOptions]) -> Result:
        """See Fleet.pull."""
        return await self.fleet.start("pull", model, **options)

    async def serve(self, model: str | None = None, **options: Unpack[ServerOptions]) -> Result:
        """See Fleet.serve."""
        return await self.fleet.start("serve", model, **options)

    async def stop(self, model: str | None = None, **options: Unpack[ServerOptions]) -> Result:
        """See Fleet.stop."""
        return await self.fleet.start("stop", model, **options)

    async def bench(
        self, model: str | None = None, *, runs: int = 3, tokens: int = 256, **options: Unpack[ServerOptions]
    ) -> Result:
        """See Fleet.bench."""
        return await self.fleet.start("bench", model, values=bench_values(runs, tokens), **options)

    async def doctor(self, **options: Unpack[ServerOptions]) -> Result:
        """See Fleet.doctor."""
        return await self.fleet.start("doctor", **options)

    async def status(self, **options: Unpack[ServerOptions]) -> Result:
        """See Fleet.status."""
        return await self.fleet.start("fleet", **options)

    async def report(self, directory: str | os.PathLike[str] | None = None, **options: Unpack[ServerOptions]) -> Result:
        """See Fleet.report."""
        return await self.fleet.start("report", values=report_values(directory), **options)

    async def upgrade(self, **options: Unpack[ServerOptions]) -> Result:
        """See Fleet.upgrade."""
        return await self.fleet.start("upgrade", **options)

    async def rollback(self, **options: Unpack[ServerOptions]) -> Result:
        """See Fleet.rollback."""
        return await self.fleet.start("rollback", **options)

    async def verify(self, **options: Unpack[ServerOptions]) -> Result:
        """See Fleet.verify."""
        return await self.fleet.start("verify", **options)


def bench_values(runs: int, tokens: int) -> dict[str, Any]:
    """The variables of a measurement that was asked for."""
    if runs < 1 or tokens < 2:
        raise UsageError(f"bench needs at least 1 run and 2 tokens, not {runs} and {tokens}")
    return {"bench_runs": runs, "bench_tokens": tokens, "bench_mode": "always"}


def report_values(directory: str | os.PathLike[str] | None) -> dict[str, Any]:
    """The variable that says where the report is written."""
    return {} if directory is None else {"tensorless_report_dir": os.path.abspath(os.fspath(directory))}


def check_values(command: str, model: str | None, options: ServerOptions) -> None:
    """Refuses, before any host is asked, values that can never work."""
    from ansible_collections.tensorless.fleet.plugins.module_utils._plan_rules import check_choice
    from ansible_collections.tensorless.fleet.plugins.module_utils._plan_types import Choice
    from ansible_collections.tensorless.fleet.plugins.module_utils._refusal import Refusal

    if model is None:
        return
    names = ("runtime", "host", "port", "context", "cache", "extra_args")
    given: dict[str, Any] = {name: options.get(name) for name in names if options.get(name) is not None}
    gpu = options.get("gpu")
    choice = Choice(**{"cache": "/", **given}, command=command, gpu=None if gpu is None else str(gpu), service=True)
    try:
        check_choice(choice)
    except Refusal as refusal:
        raise UsageError(refusal.message) from None


def server_values(model: str | None, options: ServerOptions) -> dict[str, Any]:
    """The variables that say which model hosts serve and how."""
    values: dict[str, Any] = {}
    server: dict[str, Any] = {"model": model, "gpu": "each"}
    for name in ("gpu", "card", "port", "host", "context", "extra_args"):
        if options.get(name) is not None:
            server[name] = options[name]
    if model is not None:
        values["tensorless_servers"] = [server]
        values["tensorless_exclusive"] = False  # one model on the command line says nothing about the host's others
    elif len(server) > 2:
        raise UsageError(
            "gpu, card, port, host, context and extra_args need a model; without one the inventory decides"
        )
    if options.get("allow_draft"):
        values["tensorless_allow_draft"] = True
    if options.get("runtime"):
        values["tensorless_runtime"] = options["runtime"]
    if options.get("cache"):
        values["tensorless_hf_hub_cache"] = options["cache"]
    return values


def limit_for(command: str, hosts: str | None) -> str | None:
    """The pattern for ``--limit``: commands that end on the controller need it in the pattern as well."""
    return f"{hosts},localhost" if hosts and command in ENDS_HERE else hosts


def failures(result: Result) -> str:
    """``host: reason`` for each host that is not done."""
    return "; ".join(f"{host.host}: {host.reason or host.state}" for host in result.failed)


def summary(result: Result) -> str:
    """``3 hosts: 2 changed, 1 unreachable``."""
    counts: dict[str, int] = {}
    for host in result.hosts.values():
        counts[host.state] = counts.get(host.state, 0) + 1
    number = len(result.hosts)
    parts = ", ".join(f"{count} {state}" for state, count in counts.items())
    return f"{number} host{'' if number == 1 else 's'}" + (f": {parts}" if parts else "")

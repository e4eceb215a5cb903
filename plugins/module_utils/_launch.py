# SPDX-License-Identifier: Apache-2.0
"""Private to the collection, may change at any time.

Starts, stops and settles one model server for systemd. `tensorless_server` writes this file to the host as it stands
here, with a first line naming the interpreter; so it uses nothing but the standard library of Python 3.9.

    launch start FILE     makes room for the container that FILE describes, then becomes its command
    launch stop FILE      asks the runtime to stop it
    launch settle FILE    after the end: no container is left, and an end that nobody asked for counts as a failure
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from typing import Any, NoReturn, Optional

LABEL = "org.tensorless.plan"
GRACE = 90  # seconds that an open answer gets before the container is killed
DAEMON_WAIT = 60  # seconds that docker's daemon gets to come back before a container is given up for gone
REFUSED = 78  # the unit's RestartPreventExitStatus: trying again cannot help
KILLED = "137"
LOST = "127"  # podman 4's client, when the container's record is removed before the client has read how it ended
CLEAN = ("0", "143", KILLED)  # how a server leaves that was told to
UNREACHABLE = ("cannot connect to the docker", "failed to connect to the docker", "error during connect")
STOP_ASKED = "stop-was-asked"


def call(*argv: str) -> tuple[int, str, str]:
    try:
        done = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    except OSError as exc:
        return 127, "", str(exc)
    return done.returncode, done.stdout, done.stderr


def say(text: str) -> None:
    sys.stdout.write(f"tensorless: {text}\n")
    sys.stdout.flush()


def refuse(text: str) -> NoReturn:
    say(text)
    raise SystemExit(REFUSED)


def read(path: str) -> dict[str, Any]:
    try:
        with open(path, encoding="utf-8") as stream:
            data = json.load(stream)
        argv = data["exec"]
        if data["schema"] != 1 or not argv or not all(isinstance(word, str) for word in argv):
            raise ValueError("not an instance file of schema 1")
    except (OSError, ValueError, KeyError, TypeError) as exc:
        refuse(f"cannot use {path}: {exc}; run the play again, it writes the file anew")
    return dict(data)


def container(data: dict[str, Any], limit: float) -> Optional[dict[str, Any]]:
    """What the runtime knows under this name; waits for a docker daemon that is not there (yet, or again)."""
    runtime, name = data["runtime"], data["container_name"]
    until = time.monotonic() + limit
    told = False
    while True:
        rc, out, err = call(runtime, "container", "inspect", name)
        if rc == 0:
            return dict(json.loads(out)[0])
        if not no_daemon(err) or time.monotonic() > until:
            return None
        if not told:
            say("docker's daemon does not answer; waiting for it")
            told = True
        time.sleep(1)


def no_daemon(err: str) -> bool:
    """Docker could not be reached; not what it answered (`Error response from daemon: No such container`)."""
    text = err.lower()
    return "permission denied" not in text and any(words in text for words in UNREACHABLE)


def ours(record: dict[str, Any]) -> bool:
    return LABEL in ((record.get("Config") or {}).get("Labels") or {})


def make_room(data: dict[str, Any]) -> None:
    """A power cut leaves the record of a container that --rm never removed; its name must be free again."""
    runtime, name = data["runtime"], data["container_name"]
    record = container(data, float("inf"))  # a start that gives up would stay down when the daemon is back
    if record is None:
        clear_remains(runtime, name)
        return
    if not ours(record):
        state = "running" if record["State"].get("Running") else "there, stopped"
        refuse(
            f"a container named {name} that this service did not make is {state} in {runtime} "
            f"({str(record.get('Id'))[:12]}); remove it: {runtime} rm -f {name}"
        )
    clear(runtime, name, record)


def clear_remains(runtime: str, name: str) -> None:
    """What an interrupted removal leaves with podman: a record without its storage, or storage without a record.

    Neither can be inspected, and either keeps the name. The record still has its labels; the storage alone has none,
    and nothing of it can run.
    """
    if runtime != "podman":
        return
    mine = ["--filter", f"name=^{name}$", "--filter", f"label={LABEL}"]
    listed = call("podman", "ps", "-aq", *mine)[1].strip()
    if listed or (
        call("podman", "container", "exists", name)[0] != 0
        and call("podman", "container", "exists", "--external", name)[0] == 0
    ):
        call("podman", "rm", "-f", name)


def clear(runtime: str, name: str, record: dict[str, Any]) -> None:
    """Stops and removes a container of ours, and ends its process when the runtime could not."""
    state = record.get("State") or {}
    pid = int(state.get("Pid") or 0)
    born = birth(pid)
    if state.get("Running"):
        say(f"stopping {name}, which outlived its service")
        call(runtime, "stop", "-t", str(GRACE), name)
    call(runtime, "rm", "-f", name)
    if born and birth(pid) == born:  # the process outlived its monitor: it still holds the card
        with contextlib.suppress(OSError):
            os.kill(pid, 9)


def birth(pid: int) -> Optional[str]:
    """The start time of a process, which with its number names it for good."""
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as stream:
            return stream.read().rsplit(")", 1)[1].split()[19]
    except (OSError, IndexError):
        return None


def stop_was_asked(data: dict[str, Any]) -> bool:
    """Somebody gave a stop command: told by docker's event log, and by our own watch over podman, which keeps none."""
    if data["runtime"] == "podman":
        return os.path.exists(note(STOP_ASKED))
    try:
        begun = os.stat(note("started")).st_mtime  # a container of the name that was stopped earlier does not count
    except OSError:
        begun = time.time() - GRACE
    for _unused in range(6):  # the event may be written a moment after the container is gone
        rc, out, _err = call(
            "docker", "events", "--since", f"{begun:.6f}", "--until", str(int(time.time())), "--format",
            "{{json .}}", "--filter", f"container={data['container_name']}", "--filter", "event=kill",
        )  # fmt: skip
        if rc == 0 and '"signal":"15"' in out:
            return True
        time.sleep(0.5)
    return False


def daemon() -> str:
    """Which run of docker's daemon this is, while it is up; empty where its unit has another name."""
    out = call("systemctl", "show", "-p", "LoadState,ActiveState,InvocationID", "docker.service")[1]
    values = dict(line.partition("=")[::2] for line in out.splitlines())
    if values.get("LoadState") != "loaded":
        return ""
    gone = values.get("ActiveState") in ("inactive", "failed", "deactivating")
    return "down" if gone else values.get("InvocationID", "")


def daemon_went() -> bool:
    """The daemon has ended or is ending since our start: then it took the server along, as a package upgrade does."""
    try:
        with open(note("started"), encoding="ascii") as stream:
            then = stream.read()
    except OSError:
        return False
    return bool(then) and daemon() != then


def note(name: str) -> str:
    """A file of this run of the service; systemd takes its folder away when the service has ended."""
    return os.path.join(os.environ.get("RUNTIME_DIRECTORY", "/run"), name)


def write_note(name: str, text: str = "") -> None:
    with contextlib.suppress(OSError), open(note(name), "w", encoding="ascii") as stream:
        stream.write(text)


def watch(name: str) -> None:
    """Keeps the one thing that podman forgets: that a container which ends was told to.

    podman says `stopping` from the stop command to the end of the container. It is asked only when its own database has
    changed, so an idle host does nothing here.
    """
    record = None
    for _unused in range(60):
        rc, out, _err = call("podman", "container", "inspect", name)
        record = json.loads(out)[0] if rc == 0 else None
        if record and record["State"].get("Running"):
            break
        time.sleep(1)
    if not record:
        return
    storage, pid = record["StaticDir"].split("/overlay-containers/")[0], record["State"].get("Pid")
    known, again = changed(storage), False
    while True:
        time.sleep(0.5)
        if changed(storage) == known and not again:
            if not os.path.exists(f"/proc/{pid}"):
                return
            continue
        rc, out, _err = call("podman", "container", "inspect", name)
        if rc != 0:
            return
        if json.loads(out)[0]["State"].get("Status") == "stopping":
            write_note(STOP_ASKED)
            return
        # Asking changes the database too; one more look makes up for what happened meanwhile.
        known, again = changed(storage), not again


def changed(storage: str) -> int:
    """Grows whenever podman's database is written: a folder up to version 4, the file db.sql since version 5."""
    newest = 0
    for folder, start in ((os.path.join(storage, "libpod"), ""), (storage, "db.sql")):
        with contextlib.suppress(OSError):
            for entry in os.scandir(folder):
                if entry.name.startswith(start):
                    with contextlib.suppress(OSError):
                        newest = max(newest, entry.stat().st_mtime_ns)
    return newest


def watch_beside(name: str) -> None:
    """Watches in a process of its own, which belongs to the service and to nobody else."""
    if os.fork():
        os.wait()
        return
    if os.fork():
        os._exit(0)
    with contextlib.suppress(Exception):
        watch(name)
    os._exit(0)


def start(data: dict[str, Any]) -> NoReturn:
    make_room(data)
    argv = data["exec"]
    with contextlib.suppress(OSError):
        os.unlink(note(STOP_ASKED))
    write_note("started", daemon() if data["runtime"] == "docker" else "")
    if data["runtime"] == "podman":
        watch_beside(data["container_name"])
    try:
        os.execvp(argv[0], argv)
    except OSError as exc:
        refuse(f"cannot run {argv[0]}: {exc}")


def stop(data: dict[str, Any]) -> None:
    # systemd also runs this after the server ended by itself; then there is no main process and nothing to stop
    if os.environ.get("MAINPID"):
        write_note(STOP_ASKED)
        call(data["runtime"], "stop", "-t", str(GRACE), data["container_name"])


def settle(data: dict[str, Any]) -> None:
    runtime, name = data["runtime"], data["container_name"]
    status = os.environ.get("EXIT_STATUS") if os.environ.get("EXIT_CODE") == "exited" else None
    failed = False
    if status in CLEAN and runtime == "docker" and daemon_went():
        say("docker's daemon ended, and the server with it; nobody had asked the server to stop")
        failed = True
    elif status in (KILLED, LOST) and not stop_was_asked(data):
        how = "was killed" if status == KILLED else f"ended with status {LOST}"
        say(f"the server {how} and nobody had asked for a stop")
        failed = True
    record = container(data, DAEMON_WAIT)
    if record is None:
        clear_remains(runtime, name)
    elif ours(record):
        clear(runtime, name, record)
    raise SystemExit(1 if failed else 0)


def main() -> None:
    if len(sys.argv) != 3 or sys.argv[1] not in ("start", "stop", "settle"):
        refuse("usage: launch start|stop|settle FILE")
    {"start": start, "stop": stop, "settle": settle}[sys.argv[1]](read(sys.argv[2]))


if __name__ == "__main__":
    main()

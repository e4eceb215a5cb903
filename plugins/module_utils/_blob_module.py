# SPDX-License-Identifier: Apache-2.0
"""From the module's options to a job and back to a result.

Private to the collection; may change at any time.
"""

from __future__ import annotations

import grp
import os
import pwd
import select
import signal
import time
from typing import Any, NoReturn, Optional, Protocol

from ansible_collections.tensorless.fleet.plugins.module_utils._blob import BlobError, state_dir
from ansible_collections.tensorless.fleet.plugins.module_utils._blob_job import (
    Job,
    Options,
    Tools,
    free_space,
)
from ansible_collections.tensorless.fleet.plugins.module_utils._blob_parts import Limits
from ansible_collections.tensorless.fleet.plugins.module_utils._hub import Wanted
from ansible_collections.tensorless.fleet.plugins.module_utils._plan_paths import check_endpoint, hub_cache
from ansible_collections.tensorless.fleet.plugins.module_utils._progress import progress_writer
from ansible_collections.tensorless.fleet.plugins.module_utils._refusal import Refusal

ARGUMENTS: dict[str, Any] = {
    "repo": {"type": "str", "required": True},
    "revision": {"type": "str", "required": True},
    "file": {"type": "str", "required": True},
    "sha256": {"type": "str", "required": True},
    "size_bytes": {"type": "int"},
    "cache": {"type": "path"},
    "endpoint": {"type": "str"},
    "token": {"type": "str", "no_log": True},
    "state_dir": {"type": "path"},
    "connections": {"type": "int", "default": 8},
    "verify": {"type": "str", "choices": ["marker", "always"], "default": "marker"},
    "repair": {"type": "bool", "default": False},
    "download": {"type": "bool", "default": True},
    "lock_wait": {"type": "int", "default": 600},
    "stall_timeout": {"type": "int", "default": 120},
    "min_rate": {"type": "int", "default": 65536},
    "mode": {"type": "str", "default": "0644"},
    "owner": {"type": "str"},
    "group": {"type": "str"},
    "progress_file": {"type": "path"},
}


class Module(Protocol):
    """The part of AnsibleModule that is used here."""

    params: dict[str, Any]
    check_mode: bool
    no_log_values: set[str]

    def exit_json(self, **result: Any) -> NoReturn: ...

    def fail_json(self, msg: str, **result: Any) -> NoReturn: ...

    def warn(self, warning: str) -> None: ...


class Interrupted(BaseException):
    """SIGTERM or SIGHUP: stop, and keep what has come."""


def _asker_gone() -> bool:
    """True when nobody reads our result any more: the controller, or the connection to it, has ended."""
    poller = select.poll()
    poller.register(1, 0)
    return any(event & (select.POLLERR | select.POLLHUP) for _fd, event in poller.poll(0))


def _interrupt(number: int, _frame: object) -> None:
    raise Interrupted(signal.Signals(number).name)


def _mode(text: str) -> int:
    try:
        value = int(text, 8)
    except ValueError:
        value = -1
    if not 0o400 <= value <= 0o777:
        raise BlobError(
            f"mode {text!r} is not an octal mode with read permission for the owner, like 0644.", "bad_option"
        )
    return value


def _ids(owner: Optional[str], group: Optional[str]) -> tuple[int, int]:
    try:
        uid = -1 if owner is None else pwd.getpwnam(owner).pw_uid
    except KeyError:
        raise BlobError(f"owner: there is no user {owner!r} on this host.", "bad_option") from None
    try:
        gid = -1 if group is None else grp.getgrnam(group).gr_gid
    except KeyError:
        raise BlobError(f"group: there is no group {group!r} on this host.", "bad_option") from None
    return uid, gid


def options_from(params: dict[str, Any]) -> Options:
    """The module's options with every default resolved on this host."""
    home = os.path.expanduser("~")
    if not 1 <= params["connections"] <= 16:
        raise BlobError(f"connections is {params['connections']}; 1 to 16 are possible.", "bad_option")
    endpoint = params["endpoint"] or os.environ.get("HF_ENDPOINT") or None
    try:
        check_endpoint(endpoint or "")
    except Refusal as error:
        raise BlobError(error.message, "bad_option") from None
    mode = _mode(params["mode"])
    return Options(
        cache=hub_cache(params["cache"], os.environ, home, os.getcwd()),
        state=os.path.abspath(params["state_dir"] or state_dir(os.environ, home)),
        endpoint=endpoint,
        token=params["token"] or os.environ.get("HF_TOKEN") or None,
        verify=params["verify"],
        repair=params["repair"],
        download=params["download"],
        mode=mode,
        dir_mode=mode | ((mode & 0o444) >> 2) | 0o300,
        owner=_ids(params["owner"], params["group"]),
        lock_wait=float(params["lock_wait"]),
        limits=Limits(
            connections=params["connections"],
            silence=float(params["stall_timeout"]),
            part_silence=min(30.0, max(1.0, params["stall_timeout"] / 4)),
            floor=params["min_rate"],
        ),
    )


def run(module: Module) -> None:
    """Observe, plan, apply; exits the module."""
    began = time.monotonic()
    params = module.params
    if os.environ.get("HF_TOKEN"):
        module.no_log_values.add(os.environ["HF_TOKEN"])
    write, close = progress_writer(params["progress_file"])

    def report(value: dict[str, Any]) -> None:
        write(value)
        if _asker_gone():
            raise Interrupted("the controller is gone")

    job = None
    try:
        for number in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, _interrupt)
        wanted = Wanted(params["repo"], params["revision"], params["file"], params["sha256"], params["size_bytes"])
        job = Job(wanted, options_from(params), Tools(os.environ, free_space, report))
        seen = job.observe()
        steps = job.plan(seen)
        if module.check_mode:
            job.verified = seen.marked
            done = [step for step in steps if step.changes]
        else:
            done = job.apply(seen, steps)
    except Refusal as error:
        details = getattr(error, "details", {})
        reason = getattr(error, "reason", "failed")
        close()
        module.fail_json(msg=str(error), reason=reason, rc=error.rc, **{**_result(job, began), **details})
    except OSError as error:
        close()
        where = f" {error.filename}" if error.filename else ""
        message = f"could not use{where}: {error.strerror or error}. Check permissions and the file system."
        module.fail_json(msg=message, reason="io", rc=1, **_result(job, began))
    except (Interrupted, KeyboardInterrupt) as error:
        close()
        text = f"interrupted ({error}). What has come is kept; run again to resume."
        module.fail_json(msg=text, reason="interrupted", rc=130, **_result(job, began))
    close()
    result = _result(job, began)
    for note in job.notes:
        module.warn(note)
    actions = [step.text for step in done]
    diff = {"before": "", "after": "".join(f"{text}\n" for text in actions)}
    module.exit_json(changed=bool(done), cached=seen.state, actions=actions, diff=diff, **result)


def _result(job: Optional[Job], began: float) -> dict[str, Any]:
    result: dict[str, Any] = {"seconds": round(time.monotonic() - began, 3)}
    if job is None:
        return result
    outcome = job.outcome
    result.update(
        path=job.paths.blob,
        snapshot=job.paths.snapshot,
        marker=job.marker,
        verified=job.verified,
        bytes_fetched=outcome.fetched if outcome else 0,
        bytes_resumed=job.resumed_from,
        bytes_hashed=job.hashed_bytes,
        parts=outcome.parts if outcome else 0,
        restarts=outcome.restarts if outcome else 0,
        notes=job.notes,
    )
    return result

# SPDX-License-Identifier: Apache-2.0
"""The machine that carries the fleet: commands as root, the keeper's mount namespace, podman inside it.

crun refuses a hybrid cgroup tree. Where /sys/fs/cgroup is not cgroup2, one long-living process (the keeper) holds a
mount namespace with a cgroup2 mount there, and every podman command enters it: podman finds the network namespaces of
its containers only in the mount namespace that made them.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import pathlib
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence

ROOT = pathlib.Path(__file__).resolve().parents[2]
STATE = ROOT / ".build" / "fleet"
CACHE = pathlib.Path(os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache") / "tensorless-fleet-tests"
CA_BUNDLE = pathlib.Path("/etc/ssl/certs/ca-certificates.crt")
_RUN = pathlib.Path("/run/tensorless-fleet-tests")  # one keeper a machine: podman's storage is the machine's too
_PID = _RUN / "keeper.pid"
_KEEPER = """
if [ "$(stat -fc %T /sys/fs/cgroup)" != cgroup2fs ]; then
  mount --make-rprivate /
  umount -R /sys/fs/cgroup 2>/dev/null || umount -l /sys/fs/cgroup
  mount -t cgroup2 none /sys/fs/cgroup
fi
exec sleep infinity
"""


class FleetError(Exception):
    """What went wrong and what to do, for people."""


def say(text: str) -> None:
    print(f"fleet: {text}", file=sys.stderr, flush=True)


def as_root(argv: Sequence[str]) -> list[str]:
    return list(argv) if os.geteuid() == 0 else ["sudo", "-n", *argv]


def run(argv: Sequence[str], check: bool = True, **kw: object) -> subprocess.CompletedProcess[str]:
    """Runs a command and returns its output as text; a failure carries the command's own last words."""
    kw.setdefault("capture_output", True)
    done = subprocess.run(list(argv), text=True, **kw)  # type: ignore[call-overload]
    if check and done.returncode != 0:
        words = ((done.stderr or "") + (done.stdout or "")).strip()[-2000:]
        raise FleetError(f"`{' '.join(argv)}` ended with status {done.returncode}: {words}")
    return done


@contextlib.contextmanager
def lock(name: str) -> Iterator[None]:
    """One at a time on this machine."""
    CACHE.mkdir(parents=True, exist_ok=True)
    with (CACHE / f"{name}.lock").open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def _pure_cgroup2() -> bool:
    return run(["stat", "-fc", "%T", "/sys/fs/cgroup"]).stdout.strip() == "cgroup2fs"


def _keeper_pid() -> int | None:
    with contextlib.suppress(OSError, ValueError):
        pid = int(_PID.read_text())
        if b"infinity" in pathlib.Path(f"/proc/{pid}/cmdline").read_bytes():
            return pid
    return None


def inside(argv: Sequence[str]) -> list[str]:
    """The command line that runs ``argv`` as root where podman can start systemd hosts."""
    if _pure_cgroup2():
        return as_root(argv)
    return as_root(["nsenter", "--mount", f"--target={keeper()}", f"--wd={os.getcwd()}", "--", *argv])


def keeper() -> int:
    """The keeper's process id; starts it when it is not there."""
    pid = _keeper_pid()
    if pid:
        return pid
    with lock("keeper"):
        pid = _keeper_pid()
        if pid:
            return pid
        run(as_root(["mkdir", "-p", str(_RUN)]))
        run(as_root(["sh", "-c", f"setsid unshare -m sh -c '{_KEEPER}' </dev/null >/dev/null 2>&1 & echo $! >{_PID}"]))
        for _ in range(100):
            pid = _keeper_pid()
            if pid:
                return pid
            time.sleep(0.05)
    raise FleetError("the keeper of the mount namespace did not start; root with CAP_SYS_ADMIN is needed")


def end_keeper() -> None:
    """Ends the keeper when no container needs it any more."""
    pid = _keeper_pid()
    if pid and not podman("ps", "-q").stdout.strip():
        run(as_root(["kill", str(pid)]), check=False)
        run(as_root(["rm", "-f", str(_PID)]))


def podman(*argv: str, check: bool = True, **kw: object) -> subprocess.CompletedProcess[str]:
    return run(inside(["podman", *argv]), check=check, **kw)

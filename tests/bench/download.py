# SPDX-License-Identifier: Apache-2.0
"""`make bench-download`: time to a verified file, against raw reads, other tools, and one connection. Needs root.

A Hub for tests redirects to nginx in a network namespace behind a veth pair whose rate tbf limits; nginx limits each
connection, and an authorization subrequest to a server that sleeps adds the delay before each answer (this kernel may
have no netem). All figures of one run are compared with each other only.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import http.client
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.parse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ansible_collections.tensorless.fleet.plugins.module_utils._blob_parts import Limits

from tests.hub.jobs import COMMIT, REPO

ROOT = Path(__file__).parents[2]
HERE, THERE = "10.213.250.1", "10.213.250.2"
NGINX = """
worker_processes 1;
daemon off;
pid {folder}/nginx.pid;
error_log {folder}/nginx.log;
events {{ worker_connections 512; }}
http {{
  access_log off;
  sendfile on;
  sendfile_max_chunk 512k;
  client_body_temp_path {folder}/t1; proxy_temp_path {folder}/t2; fastcgi_temp_path {folder}/t3;
  uwsgi_temp_path {folder}/t4; scgi_temp_path {folder}/t5;
  server {{
    listen {address}:8091;
    location = /delay {{ internal; proxy_pass http://{address}:8090/api/whoami-v2; proxy_pass_request_body off;
                         proxy_set_header Content-Length ""; }}
    location ~ ^/xet-bridge-us/ {{ {delay} {limit} alias {file}; }}
  }}
}}
"""


def run(*command: str) -> None:
    subprocess.run(command, check=True)


@contextlib.contextmanager
def network(rate: int | None) -> Iterator[list[str]]:
    """A namespace behind a veth pair; yields the words that run a command inside it. Without RATE: loopback."""
    if rate is None:
        yield []
        return
    keeper = subprocess.Popen(["unshare", "-n", "sleep", "3600"])
    pid = str(keeper.pid)
    inside = ["nsenter", "-t", pid, "-n"]
    try:
        time.sleep(0.3)
        run("ip", "link", "add", "tlbench0", "type", "veth", "peer", "name", "tlbench1", "netns", pid)
        run("ip", "addr", "add", f"{HERE}/30", "dev", "tlbench0")
        run("ip", "link", "set", "tlbench0", "up")
        run(*inside, "ip", "addr", "add", f"{THERE}/30", "dev", "tlbench1")
        run(*inside, "ip", "link", "set", "tlbench1", "up")
        run(*inside, "ip", "link", "set", "lo", "up")
        run(*inside, "tc", "qdisc", "add", "dev", "tlbench1", "root", "tbf",
            "rate", f"{rate * 8}bit", "burst", "512kb", "latency", "100ms")  # fmt: skip
        yield inside
    finally:
        subprocess.run(["ip", "link", "del", "tlbench0"], check=False)
        keeper.kill()
        keeper.wait()


@contextlib.contextmanager
def servers(folder: Path, file: Path, inside: list[str], limit: int | None, delay: float) -> Iterator[str]:
    """The Hub and nginx as its CDN; yields the Hub's address."""
    address = THERE if inside else "127.0.0.1"
    known = file.with_suffix(".sha256").read_text()
    spec = [{"repo": REPO, "revision": COMMIT, "file": "f.gguf", "path": str(file), "sha256": known}]
    (folder / "files.json").write_text(json.dumps(spec))
    text = NGINX.format(
        folder=folder,
        address=address,
        file=file,
        delay="auth_request /delay;" if delay else "",
        limit=f"limit_rate {limit};" if limit else "",
    )
    (folder / "nginx.conf").write_text(text)
    hub = [sys.executable, "-m", "tests.hub", "--bind", address, "--port", "8090", "--cdn-port", "8092",
           "--files", str(folder / "files.json"), "--delay", str(delay),
           "--cdn-base", f"http://{address}:8091"]  # fmt: skip
    processes = [
        subprocess.Popen([*inside, *hub], cwd=ROOT, stdout=subprocess.DEVNULL),
        subprocess.Popen([*inside, "nginx", "-c", str(folder / "nginx.conf"), "-e", str(folder / "nginx.log")]),
    ]
    try:
        deadline = time.monotonic() + 20
        for port in (8090, 8091):
            while True:
                try:
                    http.client.HTTPConnection(address, port, timeout=1).connect()
                    break
                except OSError:
                    if time.monotonic() > deadline:
                        raise
                    time.sleep(0.1)
        yield f"http://{address}:8090"
    finally:
        for process in processes:
            process.terminate()
            process.wait()


def cdn_address(hub: str) -> str:
    place = urllib.parse.urlsplit(hub)
    connection = http.client.HTTPConnection(place.hostname or "", place.port)
    connection.request("HEAD", f"/{REPO}/resolve/{COMMIT}/f.gguf")
    location = connection.getresponse().getheader("Location")
    assert location is not None
    return location


def raw_reads(hub: str, size: int, connections: int) -> float:
    """Seconds to read the file over so many connections and throw it away."""
    url = urllib.parse.urlsplit(cdn_address(hub))
    errors: list[BaseException] = []

    def read(number: int) -> None:
        try:
            start, end = size * number // connections, size * (number + 1) // connections
            connection = http.client.HTTPConnection(url.hostname or "", url.port)
            connection.request("GET", f"{url.path}?{url.query}", headers={"Range": f"bytes={start}-{end - 1}"})
            response = connection.getresponse()
            assert response.status == 206, response.status
            buffer = bytearray(1 << 20)
            got = 0
            while count := response.readinto(buffer):
                got += count
            assert got == end - start
        except BaseException as error:
            errors.append(error)

    began = time.monotonic()
    threads = [threading.Thread(target=read, args=(n,)) for n in range(connections)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return time.monotonic() - began


def hash_rate() -> float:
    """Bytes a second of sha256 on one core."""
    block = bytes(1 << 20)
    digest = hashlib.sha256()
    began = time.monotonic()
    for _block in range(512):
        digest.update(block)
    return 512 * len(block) / (time.monotonic() - began)


def timed(command: list[str], **more: Any) -> tuple[float, int]:
    """Seconds and peak memory in KiB of a command that must succeed."""
    began = time.monotonic()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, cwd=ROOT, **more)
    _pid, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise RuntimeError(f"{command[0]} ended with {process.returncode}")
    return time.monotonic() - began, usage.ru_maxrss


def ours(hub: str, folder: Path, sha: str, size: int, connections: int) -> tuple[float, int]:
    """Time to the verified file at its final path, fsync included, in a process of its own."""
    target = folder / "ours"
    wanted = {"repo": REPO, "revision": COMMIT, "file": "f.gguf", "sha256": sha, "size": size}
    given = {"root": str(target), "wanted": wanted, "endpoint": hub, "limits": {"connections": connections}}
    try:
        return timed([sys.executable, "-m", "tests.hub.fetch", json.dumps(given)])
    finally:
        shutil.rmtree(target, ignore_errors=True)


def in_turn(folder: Path, *commands: list[str], environ: dict[str, str] | None = None) -> float:
    """Seconds for commands one after the other; what they wrote is removed."""
    target = folder / "theirs"
    target.mkdir()
    try:
        return sum(
            timed([w.replace("DIR", str(target)) for w in c], env={**os.environ, **(environ or {})})[0]
            for c in commands
        )
    finally:
        shutil.rmtree(target, ignore_errors=True)


def make_file(folder: Path, size: int) -> tuple[Path, str]:
    """Bytes that look random, made once per run. Kept out of the way of what is measured: synced."""
    file = folder / "f.bin"
    digest = hashlib.sha256()
    block = bytearray(os.urandom(8 << 20))
    block[:4] = b"GGUF"
    with file.open("wb") as stream:
        for number in range(0, size, len(block)):
            part = bytes(block[: size - number])
            stream.write(part)
            digest.update(part)
            block[4:12] = (number + 1).to_bytes(8, "little")
        stream.flush()
        os.fsync(stream.fileno())
    file.with_suffix(".sha256").write_text(digest.hexdigest())
    return file, digest.hexdigest()


def shaped(folder: Path, file: Path, sha: str, size: int, connections: int, slow: bool) -> dict[str, float]:
    """The link that is measured: 200 MB/s in all, 25 MB/s a connection, 100 ms before each answer."""
    with network(200_000_000) as inside, servers(folder, file, inside, 25_000_000, 0.1) as hub:
        results: dict[str, float] = {}
        results["raw"] = raw_reads(hub, size, connections)
        results["hash"] = size / hash_rate()
        results["ours"], memory = ours(hub, folder, sha, size, connections)
        results["memory_mb"] = memory / 1000
        cdn = cdn_address(hub)
        results["aria2c"] = in_turn(
            folder,
            ["aria2c", "-q", "-x16", "-s16", "-k1M", "--file-allocation=none", "-d", "DIR", "-o", "f", cdn],
            ["openssl", "dgst", "-sha256", "DIR/f"],
        )
        if slow:
            results["one"] = ours(hub, folder, sha, size, 1)[0]
            environ = {"HF_ENDPOINT": hub, "HF_HUB_DISABLE_XET": "1", "HF_HOME": str(folder / "hfhome"),
                       "HF_HUB_DISABLE_TELEMETRY": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}  # fmt: skip
            client = str(Path(sys.executable).with_name("hf"))
            results["hf"] = in_turn(
                folder,
                [client, "download", REPO, "f.gguf", "--revision", COMMIT, "--local-dir", "DIR"],
                ["openssl", "dgst", "-sha256", "DIR/f.gguf"],
                environ=environ,
            )
        return results


def unshaped(folder: Path, file: Path, sha: str, size: int) -> dict[str, float]:
    """Loopback without limits, against curl, sync and openssl one after the other: medians of rounds in turn."""
    rounds: list[dict[str, float]] = []
    with servers(folder, file, [], None, 0.0) as hub:
        for _round in range(3):
            seconds, memory = ours(hub, folder, sha, size, Limits().connections)
            theirs = in_turn(
                folder,
                ["curl", "-sSL", "-o", "DIR/f", cdn_address(hub)],
                ["sync", "DIR/f"],
                ["openssl", "dgst", "-sha256", "DIR/f"],
            )
            rounds.append({"ours": seconds, "curl": theirs, "ratio": theirs / seconds, "memory_mb": memory / 1000})
    return {key: statistics.median(one[key] for one in rounds) for key in rounds[0]}


def verdict(name: str, value: float, limit: float, at_most: bool) -> bool:
    good = value <= limit if at_most else value >= limit
    print(f"  {'ok  ' if good else 'MISS'} {name}: {value:.2f} ({'at most' if at_most else 'at least'} {limit})")
    return good


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.download", description=__doc__)
    parser.add_argument("--size", type=int, default=2_000_000_000)
    parser.add_argument("--connections", type=int, default=12)
    parser.add_argument("--quick", action="store_true", help="leave out what takes minutes: one connection and hf")
    parser.add_argument("--folder", type=Path, help="where to work (default: a temporary folder)")
    args = parser.parse_args()
    for tool in ("nginx", "aria2c", "openssl", "curl", "tc", "nsenter"):
        if shutil.which(tool) is None:
            print(f"{tool} is missing: apt-get install nginx-light aria2 openssl curl iproute2 util-linux")
            return 2
    with tempfile.TemporaryDirectory(dir=args.folder) as name:
        folder = Path(name)
        folder.chmod(0o755)
        file, sha = make_file(folder, args.size)
        good = True
        one = shaped(folder, file, sha, args.size, args.connections, not args.quick)
        print(f"shaped link, {args.size / 1e9:.1f} GB, {args.connections} connections: "
              + ", ".join(f"{k} {v:.2f}" for k, v in one.items()) + " (seconds)")  # fmt: skip
        good &= verdict("time / floor", one["ours"] / max(one["raw"], one["hash"]), 1.10, True)
        good &= verdict("time / aria2c -x16 and openssl", one["ours"] / one["aria2c"], 0.9, True)
        good &= verdict("peak memory, MB", one["memory_mb"], 100, True)
        if "one" in one:
            good &= verdict("one connection / time", one["one"] / one["ours"], 5, False)
            good &= verdict("time / hf download and openssl", one["ours"] / one["hf"], 0.2, True)
        two = unshaped(folder, file, sha, args.size)
        print("loopback, connections by default, medians of 3: "
              + ", ".join(f"{k} {v:.2f}" for k, v in two.items()) + " (seconds)")  # fmt: skip
        good &= verdict("curl, sync, openssl / time", two["ratio"], 1.2, False)
        good &= verdict("peak memory, MB", two["memory_mb"], 100, True)
    return 0 if good else 1


if __name__ == "__main__":
    raise SystemExit(main())

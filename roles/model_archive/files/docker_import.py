# SPDX-License-Identifier: Apache-2.0
"""docker_import.py ARCHIVE NAME@DIGEST: has docker take an image from an OCI archive, with its name and digest.

docker knows the digests only of what it pulled. So it pulls, and this script answers as the registry for as long as
that takes: a line in /etc/hosts leads the registry's name to an address of loopback, where docker needs no certificate,
and a rule of iptables leads that address (or that of a registry without a name) to the script's port. Both go at the
end; what a killed run left goes at the next start. docker checks every byte against the digest.
"""

from __future__ import annotations

import ipaddress
import json
import pathlib
import re
import shlex
import signal
import subprocess
import sys
import tarfile
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

MARK = "tensorless-archive"
NEAR = "127.83.0.1"  # any address of loopback but the first, which others may listen on
HOSTS = pathlib.Path("/etc/hosts")
TYPES = {True: "application/vnd.oci.image.index.v1+json", False: "application/vnd.oci.image.manifest.v1+json"}


class Archive:
    """Blobs of an OCI archive, read from where they lie in the tar."""

    def __init__(self, path: str) -> None:
        self.path = path
        with tarfile.open(path, "r:") as tar:
            self.blobs = {
                "sha256:" + member.name.rpartition("/")[2]: (member.offset_data, member.size)
                for member in tar.getmembers()
                if member.isfile() and re.search(r"blobs/sha256/[0-9a-f]{64}$", member.name)
            }

    def kind(self, digest: str) -> str:
        start, size = self.blobs[digest]
        with open(self.path, "rb") as stream:
            stream.seek(start)
            value = json.loads(stream.read(size))
        return str(value.get("mediaType") or TYPES["manifests" in value])


class Registry(BaseHTTPRequestHandler):
    """Answers GET and HEAD of the registry's protocol, for any repository, from one archive."""

    archive: Archive
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        found = re.fullmatch(r"/v2/.+/(manifests|blobs)/(sha256:[0-9a-f]{64})", self.path)
        if self.path == "/v2/":
            self._head(200, "application/json", 2)
            self._body(b"{}")
        elif found is None or found[2] not in self.archive.blobs:
            self._head(404, "application/json", 0)
        else:
            start, left = self.archive.blobs[found[2]]
            kind = self.archive.kind(found[2]) if found[1] == "manifests" else "application/octet-stream"
            self._head(200, kind, left, found[2])
            with open(self.archive.path, "rb") as stream:
                stream.seek(start)
                while left > 0:
                    block = stream.read(min(left, 1 << 20))
                    left -= len(block)
                    self._body(block)

    do_HEAD = do_GET

    def _head(self, status: int, kind: str, length: int, digest: str = "") -> None:
        self.send_response(status)
        self.send_header("Docker-Distribution-Api-Version", "registry/2.0")
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(length))
        if digest:
            self.send_header("Docker-Content-Digest", digest)
        self.end_headers()

    def _body(self, data: bytes) -> None:
        if self.command == "GET":
            self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None:
        """docker tells what matters."""


def iptables(*argv: str) -> str:
    return subprocess.run(["iptables", "-w", "-t", "nat", *argv], check=True, capture_output=True, text=True).stdout


def undo() -> None:
    """Takes away every line and rule of ours."""
    for line in iptables("-S", "OUTPUT").splitlines():
        if MARK in line:
            iptables(*shlex.split(line.replace("-A", "-D", 1)))
    text = HOSTS.read_text()
    kept = "".join(line for line in text.splitlines(keepends=True) if MARK not in line)
    if kept != text:
        HOSTS.write_text(kept)  # in place: in a container the file cannot be replaced


def lead_here(registry: str, port: int) -> None:
    name, _colon, its_port = registry.partition(":")
    try:
        address = str(ipaddress.IPv4Address(name))
    except ValueError:
        address = NEAR
        with HOSTS.open("a") as stream:
            stream.write(f"{NEAR} {name} # {MARK}\n")
    for wanted in [its_port] if its_port else ["443", "80"]:
        iptables("-I", "OUTPUT", "-p", "tcp", "-d", address, "--dport", wanted, "-m", "comment", "--comment", MARK,
                 "-j", "REDIRECT", "--to-ports", str(port))  # fmt: skip


def main() -> int:
    path, reference = sys.argv[1:]
    registry = reference.partition("/")[0]
    if not re.fullmatch(r"[a-z0-9-]+(\.[a-z0-9-]+)+(:\d+)?", registry) or registry == "docker.io":
        print(f"{reference} names no registry of its own; docker cannot import it. Push it to a registry inside.")
        return 1
    Registry.archive = Archive(path)
    if reference.partition("@")[2] not in Registry.archive.blobs:
        print(f"{path} does not hold {reference}; export it again")
        return 1
    signal.signal(signal.SIGTERM, lambda *_args: sys.exit(143))
    server = ThreadingHTTPServer(("127.0.0.1", 0), Registry)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        undo()
        lead_here(registry, server.server_address[1])
        for attempt in range(3):
            pull = ["docker", "pull", "--quiet", reference]
            done = subprocess.run(pull, capture_output=True, text=True, check=False)
            if done.returncode == 0:
                return 0
            print(done.stderr.strip() or done.stdout.strip())
            time.sleep(3 * (attempt + 1))  # docker may remember for some seconds where the name led before
        return 1
    finally:
        undo()


if __name__ == "__main__":
    raise SystemExit(main())

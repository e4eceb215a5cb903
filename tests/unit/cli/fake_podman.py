# SPDX-License-Identifier: Apache-2.0
"""A stand-in for podman on a machine without containers: one image store, containers that are small HTTP servers.

Its folder is $FAKE_PODMAN. `images` lists pulled images; a container is a file NAME.json with its process. What the
server does is in `behaviour`: `ready`, `slow` (503 for a second first) or `dies` (100 log lines, then exit 3).
"""

from __future__ import annotations

import json
import os
import pathlib
import signal
import subprocess
import sys
import time

FOLDER = pathlib.Path(os.environ["FAKE_PODMAN"])
SERVER = """
import http.server, sys, time
port, behaviour = int(sys.argv[1]), sys.argv[2]
if behaviour == "dies":
    for number in range(1, 101):
        print(f"log line {number}", flush=True)
    sys.exit(3)
begin = time.monotonic()
print("loading the model", flush=True)
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        ready = behaviour != "slow" or time.monotonic() - begin > 1
        self.send_response(200 if ready else 503)
        self.end_headers()
        self.wfile.write(b'{"status":"ok"}' if ready else b'{"status":"loading"}')
    def log_message(self, *words):
        pass
http.server.HTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


def alive(pid: int) -> bool:
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def container(name: str) -> dict | None:
    path = FOLDER / f"{name}.json"
    if not path.exists():
        return None
    record = json.loads(path.read_text())
    if not alive(record["pid"]) and not record.get("kept"):
        return None  # --rm
    return record


def main(words: list[str]) -> int:
    with open(FOLDER / "calls", "a", encoding="utf-8") as file:
        file.write(json.dumps(words) + "\n")
    images = (FOLDER / "images").read_text().split() if (FOLDER / "images").exists() else []
    if words[0] == "pull":
        if (FOLDER / "no-registry").exists():
            sys.stderr.write("Error: initializing source: dial tcp: connection refused\n")
            return 125
        print("Trying to pull ...", file=sys.stderr)
        with open(FOLDER / "images", "a", encoding="utf-8") as file:
            file.write(words[1] + "\n")
        return 0
    if words[:2] == ["image", "inspect"]:
        if words[2] not in images:
            sys.stderr.write(f"Error: {words[2]}: image not known\n")
            return 125
        print(json.dumps([{"Id": "sha256:1", "RepoTags": (FOLDER / "tags").read_text().split()
                           if (FOLDER / "tags").exists() else [], "Config": {"Labels": {}}}]))  # fmt: skip
        return 0
    if words[0] == "tag":
        with open(FOLDER / "tags", "a", encoding="utf-8") as file:
            file.write(words[2] + "\n")
        return 0
    if words[:2] == ["container", "inspect"]:
        found = [(name, container(name)) for name in words[2:]]
        print(json.dumps([
            {"Name": name, "Id": "1", "State": {"Status": "running" if alive(record["pid"]) else "exited",
                                                "Running": alive(record["pid"]), "Pid": record["pid"]}, "Config": {}}
            for name, record in found if record
        ]))  # fmt: skip
        for name, record in found:
            if not record:
                sys.stderr.write(f"Error: no such container {name}\n")
        return 0 if all(record for _name, record in found) else 125
    name = words[-1]
    if words[0] == "run":
        name = words[words.index("--name") + 1]
        port = words[words.index("-p") + 1].split(":")[-2]
        behaviour = (FOLDER / "behaviour").read_text() if (FOLDER / "behaviour").exists() else "ready"
        with open(FOLDER / f"{name}.log", "wb") as log:
            child = subprocess.Popen(
                [sys.executable, "-c", SERVER, port, behaviour], stdout=log, stderr=log, start_new_session=True
            )
        (FOLDER / f"{name}.json").write_text(json.dumps({"pid": child.pid}))
        print("1" * 64)
        return 0
    record = container(name) or (
        json.loads((FOLDER / f"{name}.json").read_text()) if (FOLDER / f"{name}.json").exists() else None
    )
    if record is None:
        sys.stderr.write(f"Error: no such container {name}\n")
        return 125
    if words[0] == "logs":
        with open(FOLDER / f"{name}.log", "rb") as log:
            while True:
                gone = not alive(record["pid"])
                sys.stdout.buffer.write(log.read())
                sys.stdout.flush()
                if gone:
                    return 0
                time.sleep(0.05)
    if words[0] == "wait":
        while alive(record["pid"]):
            time.sleep(0.05)
        print(143)
        return 0
    if words[0] in ("stop", "rm"):
        if alive(record["pid"]):
            os.kill(record["pid"], signal.SIGTERM)
            while alive(record["pid"]):
                time.sleep(0.02)
        (FOLDER / f"{name}.json").unlink(missing_ok=True)
        return 0
    sys.stderr.write(f"fake podman does not know {words}\n")
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

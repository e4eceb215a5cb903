# SPDX-License-Identifier: Apache-2.0
"""`make demo`: from nothing to a measured fleet, and a second run that changes nothing."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time

from tests.fleet import fleet, services
from tests.fleet.machine import ROOT, STATE, FleetError, say

PORT = 18080
RECAP = re.compile(r"^(\S+)\s+: ok=(\d+)\s+changed=(\d+)\s+unreachable=(\d+)\s+failed=(\d+)")


def environment() -> dict[str, str]:
    """A controller's environment: this checkout's tools and settings, nothing of the caller's Ansible."""
    own = {key: value for key, value in os.environ.items() if not key.startswith("ANSIBLE_")}
    own["PATH"] = f"{ROOT / '.venv' / 'bin'}:{own['PATH']}"
    own["ANSIBLE_CONFIG"] = str(STATE / "ansible.cfg")
    own["ANSIBLE_COLLECTIONS_PATH"] = str(ROOT / ".build" / "collections")
    own["ANSIBLE_FORCE_COLOR"] = "1" if sys.stdout.isatty() else "0"
    return own


def playbook(*argv: str, show: bool = True, check: bool = True) -> tuple[str, dict[str, dict[str, int]]]:
    """Runs `ansible-playbook -i INVENTORY ARGV` and returns its output and its recap by host."""
    command = ["ansible-playbook", "-i", str(fleet.INVENTORY), *argv]
    process = subprocess.Popen(
        command, cwd=ROOT, env=environment(), text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    lines = []
    for line in process.stdout or ():
        lines.append(line)
        if show:
            print(line, end="", flush=True)
    output = "".join(lines)
    if process.wait() != 0 and check:
        raise FleetError(f"`{' '.join(command)}` ended with status {process.returncode}\n{'' if show else output}")
    return output, recap(output)


def recap(output: str) -> dict[str, dict[str, int]]:
    found = {}
    for line in re.sub(r"\x1b\[[0-9;]*m", "", output).splitlines():
        match = RECAP.match(line)
        if match:
            numbers = map(int, match.groups()[1:])
            found[match[1]] = dict(zip(("ok", "changed", "unreachable", "failed"), numbers, strict=True))
    return found


def endpoint() -> services.Service:
    """The server of the first host, on this machine's loopback through ssh, as its owner would reach it."""
    host = fleet.HOSTS[0]
    argv = host.ssh_argv("-N", "-o", "ExitOnForwardFailure=yes", "-L", f"127.0.0.1:{PORT}:127.0.0.1:8080")
    return services.Service("endpoint", tuple(argv), f"http://127.0.0.1:{PORT}/health")


def main() -> None:
    begin = time.monotonic()
    fleet.up()
    say("first run of site.yml")
    _, first = playbook("tensorless.fleet.site")
    say("second run of site.yml: it must change nothing")
    start = time.monotonic()
    _, second = playbook("tensorless.fleet.site")
    changed = {host: row["changed"] for host, row in second.items() if row["changed"]}
    if changed or not set(first) >= {host.name for host in fleet.HOSTS}:
        raise FleetError(f"the second run changed something: {changed or second}")
    say(f"second run: changed=0 on {', '.join(sorted(second))}, in {time.monotonic() - start:.0f} s")
    endpoint().start()
    report = STATE / "report"
    print(next(report.glob("*.md")).read_text())
    say(f"report: {', '.join(str(path.relative_to(ROOT)) for path in sorted(report.iterdir()))}")
    request = json.dumps({"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 32})
    say(
        f"endpoint: curl http://127.0.0.1:{PORT}/v1/chat/completions -H 'Content-Type: application/json' -d '{request}'"
    )
    say(f"done in {time.monotonic() - begin:.0f} s; `make demo-down` removes all of it")

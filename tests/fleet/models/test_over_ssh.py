# SPDX-License-Identifier: Apache-2.0
"""A download on a host, seen from the controller: it ends with its controller, goes on later, and keeps its secret."""

from __future__ import annotations

import json
import signal
from typing import Any

import pytest

from tests.fleet.models.conftest import HOSTS, Spread, until

pytestmark = pytest.mark.fleet

TOKEN = "hf_0123456789abcdefghijklmnop"
# The module by what it holds open: with pipelining its command line is Python's alone.
MODULE = "ls -l /proc/[0-9]*/fd/* 2>/dev/null | grep '[.]incomplete$' | sed 's,.* /proc/,,; s,/.*,,' | sort -u"
# Wherever a secret could be read on a host while it is used: other processes, the journal, files of any run.
SEARCH = """
pattern=$(printf %s hf_0123456789; printf %s abcdefghijklmnop)
for file in /proc/[0-9]*/environ /proc/[0-9]*/cmdline; do
  case $file in /proc/$$/*|/proc/self/*) continue;; esac
  grep -qsaF "$pattern" "$file" && echo "$file"
done
ps axeww | grep -F "$pattern" | grep -v 'grep -F'
journalctl --no-pager -o export 2>/dev/null | grep -aF "$pattern" | head -3
grep -rlaF "$pattern" /tmp /var/tmp /run/user /home /root /var/log /var/lib/tensorless /etc /dev/shm 2>/dev/null
true
"""


def begin(spread: Spread, **variables: Any) -> Any:
    """A download on the third host, slow enough to be met in the middle."""
    spread.hub.rate = 100_000.0
    HOSTS[2].sh("rm -rf /var/lib/tensorless")
    before = spread.hub.bytes_sent("cdn")
    playing = spread.start(HOSTS[2].name, ["model"], **variables)
    partial = f"{spread.blob}.incomplete.json"
    read = f"cat {partial} 2>/dev/null || true"
    until(
        "some of the file is named in the sidecar",
        lambda: (
            (json.loads(HOSTS[2].sh(read) or '{"done": []}')["done"] and spread.hub.bytes_sent("cdn") > before)
            or playing.process.poll() is not None
        ),
    )
    assert playing.process.poll() is None, playing.end()
    return playing


def goes_on(spread: Spread) -> None:
    """Nothing of the run is left on the host but the partial file; the next run fetches the rest only."""
    host = HOSTS[2]
    until("the module has ended", lambda: host.sh(MODULE).strip() == "", 40)
    left = sorted(host.sh(f"cd $(dirname {spread.blob}) && ls -A").split())
    names = [f"{spread.file.sha256}.incomplete", f"{spread.file.sha256}.incomplete.json"]
    assert left in (names, [*names, f"{spread.file.sha256}.incomplete.lock"])
    have = sum(b - a for a, b in json.loads(host.sh(f"cat {spread.blob}.incomplete.json"))["done"])
    assert have > 0
    spread.hub.rate = None
    before = spread.hub.bytes_sent("cdn")
    code, text = spread.play(host.name, ["model"])
    assert code == 0, text
    assert spread.sha256(host) == spread.file.sha256
    assert spread.hub.bytes_sent("cdn") - before == spread.file.size - have
    assert host.sh(f"ls -A $(dirname {spread.blob})").split() == [spread.file.sha256]


@pytest.mark.parametrize(
    "number",
    [
        signal.SIGINT,
        pytest.param(signal.SIGHUP, marks=pytest.mark.soak),
        pytest.param(signal.SIGTERM, marks=pytest.mark.soak),
        pytest.param(signal.SIGKILL, marks=pytest.mark.soak),
    ],
)
def test_a_controller_that_ends_takes_the_download_along(spread: Spread, number: signal.Signals) -> None:
    playing = begin(spread)
    playing.signal(number)
    playing.end()
    goes_on(spread)


@pytest.mark.soak
def test_a_module_that_is_killed_on_its_host(spread: Spread) -> None:
    playing = begin(spread)
    pids = HOSTS[2].sh(MODULE).split()
    assert pids
    HOSTS[2].sh(f"kill -9 {' '.join(pids)}")
    assert playing.process.wait(60) != 0
    goes_on(spread)


@pytest.mark.soak
def test_a_connection_that_breaks(spread: Spread) -> None:
    playing = begin(spread)
    HOSTS[2].sh("pkill -9 -u ops sshd || pkill -9 -f 'sshd: ops' || true")
    playing.end()
    goes_on(spread)


@pytest.mark.parametrize("pipelining", [pytest.param(True, marks=pytest.mark.soak), False])
def test_a_token_is_found_nowhere_on_the_host(spread: Spread, pipelining: bool) -> None:
    host = HOSTS[2]
    spread.hub.rate = None
    secret = spread.folder / "token"
    secret.write_text(TOKEN)
    token = "{{ lookup('file', '" + str(secret) + "') }}"
    playing = begin(spread, model_hf_token=token, ansible_pipelining=pipelining)
    during = host.sh(SEARCH)
    playing.signal(signal.SIGINT)
    text = playing.end()
    after = host.sh(SEARCH)
    assert during == ""
    assert after == ""
    assert TOKEN not in text
    spread.hub.rate = None
    code, text = spread.play(host.name, ["model"], "-vvvv", model_hf_token=token)
    assert code == 0, text
    assert TOKEN not in text
    assert "the token was not sent" in text
    assert host.sh(SEARCH) == ""
    # Plain http to another machine: not even the Hub sees it.
    assert all(request.header("Authorization") is None for request in spread.hub.requests())

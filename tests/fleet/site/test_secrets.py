# SPDX-License-Identifier: Apache-2.0
"""A token on its way to a gated model, at -vvv: it reaches the Hub, and nothing that is written, logged or shown."""

from __future__ import annotations

import json
import pathlib
import subprocess
import threading
import time
from collections.abc import Iterator

import pytest

from tests.fleet import fleet, services, wheels
from tests.fleet.conftest import Fleet, one_line
from tests.hub import FakeHub

pytestmark = pytest.mark.fleet
TOKEN = "hf_" + "SecretOfThisTest" + "0123456789"
GATED = "test/Gated-135M-GGUF"
PORT, CDN_PORT = 8190, 8191


@pytest.fixture(autouse=True)
def nothing_there_yet(hosts: Fleet) -> Iterator[None]:
    script = "rm -rf /var/lib/tensorless/gated /var/lib/tensorless/gated-state /var/lib/tensorless/elsewhere"
    hosts.a.sh(script)
    yield
    hosts.a.sh(script)


@pytest.fixture
def hub(hosts: Fleet) -> Iterator[FakeHub]:
    """A Hub with a gated model on the host's own loopback: a token travels over https or loopback only."""
    forward = f"127.0.0.1:{PORT}:{services.GATEWAY}:{PORT}"
    with FakeHub(bind=services.GATEWAY, port=PORT, cdn_port=CDN_PORT, tokens=[TOKEN]) as found:
        found.add(GATED, fleet.REVISION, wheels.GGUF_NAME, wheels.model_file(), sha256=wheels.GGUF_SHA256, gated=True)
        tunnel = subprocess.Popen(hosts.a.ssh_argv("-N", "-o", "ExitOnForwardFailure=yes", "-R", forward))
        try:
            time.sleep(2)
            assert tunnel.poll() is None
            yield found
        finally:
            tunnel.terminate()
            tunnel.wait()


def commands_with_the_token(hosts: Fleet, stop: threading.Event, found: list[str]) -> None:
    """What `ps` shows on the host and here while the play runs."""
    while not stop.wait(0.5):
        for text in (hosts.a.sh("ps axeww -o args"), subprocess.run(
            ["ps", "axww", "-o", "args"], capture_output=True, text=True).stdout):  # fmt: skip
            found += [line for line in text.splitlines() if TOKEN in line]


def test_the_token_is_nowhere(hosts: Fleet, hub: FakeHub, tmp_path: pathlib.Path) -> None:
    recipes = tmp_path / "recipes"
    fleet.write_recipe(fleet.engine_image(), recipes, model=GATED, name="gated")
    secret = tmp_path / "secret.yml"
    secret.write_text(f"tensorless_hf_token: {TOKEN}\n")
    extra = {
        "tensorless_servers": [{"model": "gated"}],
        "tensorless_recipes_dir": str(recipes),
        "tensorless_hf_endpoint": f"http://127.0.0.1:{PORT}",
        "tensorless_hf_hub_cache": "/var/lib/tensorless/gated",
        "model_state_dir": "/var/lib/tensorless/gated-state",
    }
    stop, seen = threading.Event(), list[str]()
    watcher = threading.Thread(target=commands_with_the_token, args=(hosts, stop, seen))
    watcher.start()
    try:
        run = hosts.play("-vvv", "--limit", "p100-a", "-e", json.dumps(extra), "-e", f"@{secret}", name="pull")
    finally:
        stop.set()
        watcher.join()
    # Long steps show how far they are (the same run; a download of 98 MB).
    assert f"{wheels.GGUF_NAME}" in run.output
    secret.unlink()

    assert any(request.header("Authorization") for request in hub.requests("hub")), "the Hub got the token"
    assert hub.requests("cdn") and not any(request.header("Authorization") for request in hub.requests("cdn")), (
        "the CDN did not"
    )
    blob = f"/var/lib/tensorless/gated/models--{GATED.replace('/', '--')}/blobs/{wheels.GGUF_SHA256}"
    assert hosts.a.sh(f"stat -c %s {blob}").strip() == str(wheels.GGUF_SIZE), "the token opened the gate"

    assert TOKEN not in run.output
    assert seen == []
    assert TOKEN not in hosts.a.sh("journalctl --no-pager -o export | tr -d '\\0'")
    on_host = f"grep -rlF {TOKEN} /etc /root /home /tmp /var /run /usr/local --exclude-dir=blobs 2>/dev/null || true"
    assert hosts.a.sh(on_host) == ""
    here = ["grep", "-rlF", TOKEN, str(fleet.STATE), str(pathlib.Path.home() / ".ansible")]
    assert subprocess.run(here, capture_output=True, text=True).stdout == ""


def test_the_token_is_not_sent_in_the_clear(hosts: Fleet, tmp_path: pathlib.Path) -> None:
    """A Hub address that is neither https nor loopback gets no token, and the run says so."""
    log = services.FOLDER / "hub-bytes.jsonl"
    before = log.read_text().count("\n")
    secret = tmp_path / "secret.yml"
    secret.write_text(
        f"tensorless_hf_token: {TOKEN}\ntensorless_hf_hub_cache: /var/lib/tensorless/elsewhere\n"
        "model_state_dir: /var/lib/tensorless/gated-state\n"
    )
    run = hosts.play("--limit", "p100-a", "-e", f"@{secret}", name="pull")
    text = one_line(run.output)
    assert "the token was not sent" in text and "https" in text and TOKEN not in text
    asked = [json.loads(line) for line in log.read_text().splitlines()[before:]]
    assert asked and not any(request["authorization"] for request in asked)

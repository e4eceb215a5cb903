# SPDX-License-Identifier: Apache-2.0
"""Bad input through site.yml: one clear message with the input, what was expected and what to do; nothing changes."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import pytest

from tests.fleet import fleet
from tests.fleet.conftest import Fleet, Run, one_line
from tests.fleet.hosts import Host

pytestmark = pytest.mark.fleet
ABSENT = "0123456789abcdef" * 4


def serve(hosts: Fleet, host: Host, recipes: pathlib.Path | None = None, **server: Any) -> Run:
    """site.yml for one server of one host, without the steps that are done already."""
    extra: dict[str, Any] = {"tensorless_servers": [{"model": fleet.NAME, **server}]}
    if recipes:
        extra["tensorless_recipes_dir"] = str(recipes)
    return hosts.play("-e", json.dumps(extra), "--limit", host.name, "--tags", "plan,image,model,server", check=False)


def state(hosts: Fleet, host: Host) -> dict[str, str]:
    """What a refusal must leave alone."""
    return {
        "files": host.sh(
            "find /etc/tensorless /etc/systemd/system /usr/local/lib/tensorless /var/lib/tensorless "
            "-not -type d -printf '%p %s %T@\\n' | sort"
        ),
        "images": host.sh("podman images --digests --noheading"),
        "servers": str(hosts.server_pids(host)),
    }


def said(run: Run, host: Host, *words: str) -> None:
    assert run.rc != 0
    assert run.recap[host.name]["failed"] == 1
    text = one_line(run.output)
    assert "Traceback" not in text
    for word in words:
        assert word in text, f"{word!r} is not in: {text[-3000:]}"


def test_unknown_model(hosts: Fleet) -> None:
    before = state(hosts, hosts.a)
    run = serve(hosts, hosts.a, model="nobody/Nothing-GGUF")
    said(run, hosts.a, "nobody/Nothing-GGUF", fleet.MODEL)
    assert state(hosts, hosts.a) == before


def test_a_card_that_no_recipe_fits(hosts: Fleet) -> None:
    before = state(hosts, hosts.b)
    run = serve(hosts, hosts.b, gpu="1")
    said(run, hosts.b, "Tesla P4", "6.1", "6.0")
    assert state(hosts, hosts.b) == before


def test_digest_that_the_registry_does_not_have(hosts: Fleet, tmp_path: pathlib.Path) -> None:
    before = state(hosts, hosts.a)
    fleet.write_recipe(fleet.engine_image().split("@")[0] + "@sha256:" + ABSENT, tmp_path)
    run = serve(hosts, hosts.a, tmp_path)
    said(run, hosts.a, ABSENT)
    assert state(hosts, hosts.a) == before


def test_file_with_another_sha256_never_gets_its_final_name(hosts: Fleet, tmp_path: pathlib.Path) -> None:
    before = state(hosts, hosts.a)
    fleet.write_recipe(fleet.engine_image(), tmp_path, sha256=ABSENT)
    run = serve(hosts, hosts.a, tmp_path)
    said(run, hosts.a, ABSENT)
    assert state(hosts, hosts.a) == before
    assert hosts.a.sh(f"find / -xdev -name '*{ABSENT}*'") == ""


def test_port_in_use(hosts: Fleet) -> None:
    before = state(hosts, hosts.a)
    hosts.a.sh(
        "setsid python3 -m http.server 9555 --bind 127.0.0.1 >/dev/null 2>&1 & echo $! >/run/squatter.pid; sleep 1"
    )
    try:
        run = serve(hosts, hosts.a, port=9555)
    finally:
        hosts.a.sh("kill $(cat /run/squatter.pid); rm /run/squatter.pid")
    said(run, hosts.a, "9555")
    assert state(hosts, hosts.a) == before
    assert hosts.healthy(hosts.a)


def test_server_that_exits_while_loading_shows_its_last_words(hosts: Fleet, tmp_path: pathlib.Path) -> None:
    fleet.write_recipe(fleet.engine_image(), tmp_path, args=[*fleet.ARGS, "--no-such-flag"])
    run = serve(hosts, hosts.a, tmp_path)
    said(run, hosts.a, "exited", "--no-such-flag", "log lines")
    # What the failed start left, the next run of the right plan repairs.
    hosts.play("--limit", "p100-a", "--tags", "plan,image,model,server")
    assert hosts.healthy(hosts.a)

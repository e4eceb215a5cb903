# SPDX-License-Identifier: Apache-2.0
"""A rolling upgrade over the fleet in which the second host's new server cannot start, watched by clients."""

from __future__ import annotations

import json
import pathlib
import re

import pytest

from tests.fleet import engine, fleet
from tests.fleet.conftest import Fleet, one_line
from tests.fleet.hosts import REGISTRY, Host

pytestmark = pytest.mark.fleet

CLIENT = """
import json, os, time, urllib.request
body = json.dumps({"prompt": "x", "n_predict": 1}).encode()
with open("/root/client.jsonl", "w", buffering=1) as log:
    while not os.path.exists("/root/client.stop"):
        begun = time.time()
        try:
            answer = urllib.request.urlopen("http://127.0.0.1:8080/completion", body, timeout=60)
            good = json.load(answer)["stop"] is True
        except Exception:
            good = False
        log.write(json.dumps([begun, good]) + "\\n")
        time.sleep(0.2)
"""


def watch(host: Host) -> None:
    host.write("/root/client.py", CLIENT)
    host.sh("rm -f /root/client.stop; systemd-run -q --unit client --collect python3 /root/client.py")


def watched(host: Host) -> list[tuple[float, bool]]:
    host.sh("touch /root/client.stop; while systemctl -q is-active client; do sleep 0.2; done")
    return [tuple(json.loads(line)) for line in host.sh("cat /root/client.jsonl").splitlines()]


def image_of(host: Host, hosts: Fleet) -> set[str]:
    found = host.sh("cat /etc/tensorless/instances/*.json")
    return set(re.findall(r'"image": "([^"]+)"', found))


def test_upgrade_stops_at_the_host_that_fails(hosts: Fleet, tmp_path: pathlib.Path) -> None:
    old = image_of(hosts.a, hosts)
    new = engine.push(REGISTRY, "0.0.1-rolling", labels={"org.opencontainers.image.version": "0.0.1-rolling"})
    recipe = next(fleet.RECIPES.glob("*/*/p100.toml"))
    copy = tmp_path / "recipes" / recipe.relative_to(fleet.RECIPES)
    copy.parent.mkdir(parents=True)
    copy.write_text(re.sub(r"(?m)^image .*$", f'image   = "{new}"', recipe.read_text()))
    broken = {"model": fleet.NAME, "gpu": "each", "extra_args": ["--no-such-option"]}
    inventory = tmp_path / "broken.yml"
    inventory.write_text(json.dumps({"gpu": {"hosts": {hosts.b.name: {"tensorless_servers": [broken]}}}}))
    recipes = ["-e", f"tensorless_recipes_dir={tmp_path / 'recipes'}"]
    before = hosts.server_pids(hosts.c)
    for host in (hosts.a, hosts.c):
        watch(host)
    try:
        failed = hosts.play("-i", str(inventory), *recipes, name="upgrade", check=False)
    finally:
        seen = {host.name: watched(host) for host in (hosts.a, hosts.c)}
    said = one_line(failed.output)
    assert failed.rc != 0
    assert failed.recap[hosts.b.name]["failed"] == 1
    assert hosts.c.name not in failed.recap, "the third host was not touched"
    assert "the server exited before it was ready" in said
    assert "the earlier server is back at http://127.0.0.1:8080" in said
    assert "no-such-option" in said
    assert image_of(hosts.a, hosts) == {new}
    assert image_of(hosts.b, hosts) == old
    assert hosts.healthy(hosts.b)
    assert hosts.server_pids(hosts.c) == before
    assert all(good for _time, good in seen[hosts.c.name])
    _one_gap(seen[hosts.a.name], said)

    resumed = hosts.play(*recipes, name="upgrade")
    assert resumed.changed()[hosts.a.name] == 0, "it goes on from where it stopped"
    assert image_of(hosts.b, hosts) == image_of(hosts.c, hosts) == {new}
    hosts.play(name="rollback")
    assert image_of(hosts.a, hosts) == image_of(hosts.b, hosts) == image_of(hosts.c, hosts) == old
    assert set(hosts.play(name="rollback").changed().values()) == {0}
    assert set(hosts.play("--tags", "server").changed().values()) == {0}


def _one_gap(seen: list[tuple[float, bool]], said: str) -> None:
    """Requests failed in one stretch only, about as long as the play says."""
    bad = [index for index, (_time, good) in enumerate(seen) if not good]
    assert bad == list(range(bad[0], bad[-1] + 1)), "requests failed outside the restart"
    gap = seen[bad[-1] + 1][0] - seen[bad[0]][0]
    told = re.search(r"answered nobody for ([0-9.]+) s", said)
    assert told is not None
    print(f"the client of the first host saw a gap of {gap:.1f} s; the play says {told.group(1)} s")
    assert gap <= float(told.group(1)) + 3

# SPDX-License-Identifier: Apache-2.0
"""What happens between two runs of site.yml, and what the next run makes of it."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.fleet import fleet
from tests.fleet.conftest import Fleet, until
from tests.fleet.hosts import Host

pytestmark = pytest.mark.fleet


def test_second_run_changes_nothing_and_is_quick(hosts: Fleet) -> None:
    begin = time.monotonic()
    run = hosts.play()
    assert set(run.changed().values()) == {0}, run.output[-6000:]
    assert {host.name for host in fleet.HOSTS} <= set(run.recap)
    print(f"second run: {time.monotonic() - begin:.1f} s")


def test_check_mode_after_the_run_changes_nothing(hosts: Fleet) -> None:
    run = hosts.play("--check", "--diff")
    assert set(run.changed().values()) == {0}, run.output[-6000:]


@pytest.mark.parametrize("name", ["a", "c"])
def test_killed_server_comes_back_without_ansible(hosts: Fleet, name: str) -> None:
    host = getattr(hosts, name)
    before = hosts.server_pids(host)
    assert len(before) == 1
    host.exec("kill", "-KILL", str(before[0]))
    until(lambda: hosts.server_pids(host) not in ([], before) and hosts.healthy(host), 60, "a new healthy server")


def test_stopped_by_hand_stays_stopped_until_the_next_run(hosts: Fleet) -> None:
    """podman stop and docker stop are somebody's wish; the next run of site.yml is another."""
    for host in (hosts.a, hosts.c):
        unit = hosts.units(host)[0]
        host.exec(fleet.RUNTIME[host.name], "stop", unit)
    time.sleep(15)  # longer than the pause before a restart
    for host in (hosts.a, hosts.c):
        unit = hosts.units(host)[0]
        assert hosts.active(host, unit) == "inactive"
        assert hosts.server_pids(host) == []
    run = hosts.play("--limit", "p100-a,p100-c,localhost")
    assert run.changed()["p100-a"] >= 1 and run.changed()["p100-c"] >= 1
    assert hosts.healthy(hosts.a) and hosts.healthy(hosts.c)


def test_reboot_brings_every_server_back(hosts: Fleet) -> None:
    with ThreadPoolExecutor(3) as pool:
        list(pool.map(Host.reboot, fleet.HOSTS))
    for host, port in ((hosts.a, 8080), (hosts.b, 8080), (hosts.b, 8081), (hosts.c, 8080)):
        until(lambda host=host, port=port: hosts.healthy(host, port), 90, f"{host.name}:{port} after a reboot")  # type: ignore[misc]


def test_stop_then_site_converges(hosts: Fleet) -> None:
    hosts.play(name="stop")
    for host in fleet.HOSTS:
        for unit in hosts.units(host):
            assert hosts.active(host, unit) == "inactive"
        assert hosts.server_pids(host) == []
    again = hosts.play(name="stop")
    assert set(again.changed().values()) == {0}, again.output[-4000:]
    hosts.play()
    assert all(hosts.healthy(host) for host in fleet.HOSTS)
    assert hosts.healthy(hosts.b, 8081)


def test_unreachable_host_stops_no_other_and_is_named_in_the_report(hosts: Fleet) -> None:
    hosts.c.stop()
    try:
        hosts.a.exec("systemctl", "stop", f"tensorless@{hosts.units(hosts.a)[0]}.service")
        run = hosts.play("-e", "tensorless_serial=1", check=False)
        assert run.rc != 0
        assert run.recap["p100-c"]["unreachable"] == 1
        assert hosts.healthy(hosts.a), "the host before it in the list was repaired"
        assert run.recap["p100-b"]["failed"] == 0 and run.recap["p100-b"]["ok"] > 10
        row = next(row for row in hosts.report()["hosts"] if row["name"] == "p100-c")
        assert "unreachable" in str(row), row
    finally:
        hosts.c.start()
    until(lambda: hosts.healthy(hosts.c), 90, "the server of the host that is back")

# SPDX-License-Identifier: Apache-2.0
"""The provisioned fleet, seen from outside the collection: units, containers, files, answers and the report."""

from __future__ import annotations

import json
from typing import Any

import pytest
import testinfra

from tests.fleet import fleet, wheels

SERVERS = [("p100-a", 8080), ("p100-b", 8080), ("p100-b", 8081), ("p100-c", 8080)]
HUB = f"/var/lib/tensorless/hub/models--{fleet.MODEL.replace('/', '--')}"


def host_of(name: str) -> Any:
    return testinfra.get_host(f"ssh://{name}?ssh_config={fleet.SSH_CONFIG}&sudo=true&controlpersist=60")


@pytest.fixture(scope="module", params=[host.name for host in fleet.HOSTS])
def host(request: pytest.FixtureRequest) -> Any:
    found = host_of(request.param)
    found.name = request.param
    return found


def instances(host: Any) -> list[str]:
    names = host.run("ls /etc/tensorless/instances").stdout.split()
    return [name.removesuffix(".json") for name in names if name.endswith(".json")]  # not the way back of an upgrade


def test_each_instance_is_a_service_that_runs_and_is_enabled(host: Any) -> None:
    names = instances(host)
    assert len(names) == (2 if host.name == "p100-b" else 1)
    for name in names:
        service = host.service(f"tensorless@{name}.service")
        assert service.is_running and service.is_enabled
        data = host.file(f"/etc/tensorless/instances/{name}.json")
        assert (data.user, data.group, data.mode) == ("root", "root", 0o644)
        content = json.loads(data.content_string)
        assert content["schema"] == 1 and content["runtime"] == fleet.RUNTIME[host.name]
        assert content["exec"][0] == fleet.RUNTIME[host.name]
        assert content["image"] == fleet.engine_image()


def test_the_containers_are_the_planned_ones_and_each_has_its_card(host: Any) -> None:
    runtime = fleet.RUNTIME[host.name]
    wanted = {card["uuid"] for card in fleet.CARDS[host.name] if card["compute_cap"] == "6.0"}
    seen = set()
    for name in instances(host):
        data = json.loads(host.file(f"/etc/tensorless/instances/{name}.json").content_string)
        container = json.loads(host.check_output(f"{runtime} inspect {name}"))[0]
        assert container["State"]["Running"]
        assert container["Config"]["Labels"]["org.tensorless.plan"] == data["plan_hash"]
        assert fleet.engine_image().split("@")[1] in str(container) or runtime == "docker"
        cards = [card["uuid"] for card in data["cards"]]
        assert len(cards) == 1 and cards[0] in " ".join(data["exec"])
        seen |= set(cards)
    assert seen == wanted


@pytest.mark.parametrize(("name", "port"), SERVERS)
def test_the_server_answers_on_loopback_only(name: str, port: int) -> None:
    found = host_of(name)
    assert found.socket(f"tcp://127.0.0.1:{port}").is_listening
    assert f"0.0.0.0:{port}" not in found.check_output("ss -Hlnt")
    script = f"import urllib.request as u; print(u.urlopen('http://127.0.0.1:{port}/v1/models').read().decode())"
    models = json.loads(found.check_output(f'python3 -c "{script}"'))
    assert [model["id"] for model in models["data"]] == [fleet.MODEL]


def test_the_model_is_in_the_cache_verified_and_linked(host: Any) -> None:
    blob = host.file(f"{HUB}/blobs/{wheels.GGUF_SHA256}")
    assert (blob.size, blob.mode, blob.user) == (wheels.GGUF_SIZE, 0o644, "root")
    assert host.check_output(f"sha256sum {blob.path}").split()[0] == wheels.GGUF_SHA256
    link = host.file(f"{HUB}/snapshots/{fleet.REVISION}/{wheels.GGUF_NAME}")
    assert link.is_symlink and link.linked_to == blob.path
    assert host.file(f"/var/lib/tensorless/state/verified/{wheels.GGUF_SHA256}.json").exists
    assert host.run(f"ls {HUB}/blobs").stdout.split() == [wheels.GGUF_SHA256]


def test_system_folders_kept_their_owner(host: Any) -> None:
    for path in ("/etc", "/usr/local", "/var/lib", "/etc/systemd/system"):
        folder = host.file(path)
        assert (folder.user, folder.group, folder.mode & 0o777) == ("root", "root", 0o755), path
    for path in ("/usr/local/lib/tensorless/launch", "/etc/systemd/system/tensorless@.service"):
        assert host.file(path).user == "root"


def test_the_report_shows_four_measured_cards_and_one_skipped() -> None:
    report = json.loads((fleet.STATE / "report" / "report.json").read_text())
    cards = {card["uuid"]: card for card in report["cards"]}
    assert len(cards) == 5
    benched = [card for card in cards.values() if card["status"] == "benched"]
    assert len(benched) == 4 and {card["host"] for card in benched} == {host.name for host in fleet.HOSTS}
    for card in benched:
        # The same definition, gaps and not tokens, seen from the client and from the server.
        assert card["decode_tps"] == pytest.approx(card["server_decode_tps"], rel=0.02)
    [skipped] = [card for card in cards.values() if card["status"] == "skipped"]
    assert "6.1" in skipped["reason"] and "6.0" in skipped["reason"]
    page = (fleet.STATE / "report" / "report.html").read_text()
    assert "http://" not in page.split("<body", 1)[0] and "src=" not in page.split("<body", 1)[0]
    assert all(uuid in page for uuid in cards)

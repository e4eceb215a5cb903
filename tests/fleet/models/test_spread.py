# SPDX-License-Identifier: Apache-2.0
"""One download for three hosts: the outside server sees each byte once, and a mirror that lies is caught."""

from __future__ import annotations

import subprocess

import pytest

from tests.fleet.models.conftest import HOSTS, Spread
from tests.hub.jobs import COMMIT, REPO

pytestmark = pytest.mark.fleet


def test_the_outside_sees_each_byte_once(spread: Spread) -> None:
    first, *others = HOSTS
    for host in HOSTS:
        host.sh("rm -rf /var/lib/tensorless")
    before = spread.hub.bytes_sent()
    code, text = spread.play(first.name, ["model", "model_mirror"])
    assert code == 0, text
    mirror = f"http://{first.ip}:8088"
    code, text = spread.play("gpu:!" + first.name, ["model"], model_mirror_endpoint=mirror)
    assert code == 0, text
    assert [spread.sha256(host) for host in HOSTS] == [spread.file.sha256] * 3
    assert spread.file.size <= spread.hub.bytes_sent() - before <= 1.01 * spread.file.size
    assert all(host.exec("systemctl", "is-active", "nginx", check=False).stdout.strip() != "active" for host in HOSTS)
    code, text = spread.play(first.name, ["model", "model_mirror"])
    assert code == 0
    assert "changed=0" in text
    outside = subprocess.run(
        ["curl", "-s", "-o", "/dev/null", "-w", "%{http_code}", f"{mirror}/etc/passwd"], capture_output=True, text=True
    )
    assert outside.stdout == "404"
    assert others


def test_a_mirror_that_lies_is_caught(spread: Spread) -> None:
    first, second, third = HOSTS
    mirror = f"http://{first.ip}:8088"
    first.sh(f"printf X | dd of={spread.blob} bs=1 seek=20000000 conv=notrunc 2>/dev/null")
    for host in (second, third):
        host.sh("rm -rf /var/lib/tensorless")
    before = spread.hub.bytes_sent()
    code, text = spread.play(second.name, ["model"], model_mirror_endpoint=mirror, model_mirror_fallback=False)
    assert code != 0
    assert "sha256 mismatch" in text
    assert second.sh(f"ls $(dirname {spread.blob})").strip() == ""
    assert spread.hub.bytes_sent() == before
    code, text = spread.play(f"{second.name}:{third.name}", ["model"], model_mirror_endpoint=mirror)
    assert code == 0, text
    assert [spread.sha256(host) for host in (second, third)] == [spread.file.sha256] * 2
    assert spread.hub.bytes_sent() - before <= 2.02 * spread.file.size


def test_a_mirror_refuses_strangers(spread: Spread) -> None:
    first, second, _third = HOSTS
    code, text = spread.play(first.name, ["model_mirror"], model_mirror_allow=["127.0.0.0/8"])
    assert code == 0, text
    address = f"http://{first.ip}:8088/{REPO}/resolve/{COMMIT}/f.gguf"
    asked = f"import urllib.request as u; u.urlopen({address!r}, timeout=5)"
    assert "403" in second.exec("python3", "-c", asked, check=False).stderr
    code, text = spread.play(first.name, ["model_mirror"], model_mirror_state="absent")
    assert code == 0, text
    assert "Connection refused" in second.exec("python3", "-c", asked, check=False).stderr
    assert first.sh("systemctl list-units --all --no-legend 'tensorless-mirror*'; ls -d /etc/tensorless || true") == ""
    assert first.sh("systemctl list-unit-files --no-legend 'tensorless-mirror*' || true") == ""
    code, text = spread.play(first.name, ["model_mirror"], model_mirror_state="absent")
    assert code == 0, text
    assert "changed=0" in text


@pytest.mark.soak
def test_a_port_that_is_taken_fails_the_mirror(spread: Spread) -> None:
    """Otherwise every receiver would go to the Hub, and nobody would know."""
    first = HOSTS[0]
    first.sh("systemd-run -q --unit=taken python3 -m http.server 8088 && sleep 1")
    try:
        code, text = spread.play(first.name, ["model_mirror"])
        assert code != 0
        assert "tensorless-mirror.service" in text
    finally:
        first.sh("systemctl stop taken")
        spread.play(first.name, ["model_mirror"], model_mirror_state="absent")

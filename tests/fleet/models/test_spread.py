# SPDX-License-Identifier: Apache-2.0
"""One download for three hosts: the outside server sees each byte once, and a mirror that lies is caught.

The hosts are the test's own, bare and without cards: the role gets its plans directly.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.fleet.hosts import PRIVATE_KEY, SSH_USER, Host, ssh_options
from tests.fleet.machine import FleetError, podman
from tests.hub import FakeHub
from tests.hub.jobs import COMMIT, REPO, noise

pytestmark = pytest.mark.fleet

GATEWAY = "10.213.22.1"
HOSTS = [Host(f"spread-{n}", "bookworm", f"10.213.22.{10 + n}", "tensorless-spread") for n in (1, 2, 3)]
CACHE = "/var/lib/tensorless/hub"


class Spread:
    """The three hosts with one file on a Hub outside."""

    def __init__(self, hub: FakeHub, folder: Path) -> None:
        self.hub = hub
        self.folder = folder
        self.file = hub.add(REPO, COMMIT, "f.gguf", noise(40_000_000))
        self.blob = f"{CACHE}/models--{REPO.replace('/', '--')}/blobs/{self.file.sha256}"
        options = " ".join(ssh_options())
        hosts = {host.name: {"ansible_host": host.ip} for host in HOSTS}
        shared = {
            "ansible_user": SSH_USER,
            "ansible_ssh_private_key_file": str(PRIVATE_KEY),
            "ansible_ssh_common_args": options,
            "ansible_python_interpreter": "/usr/bin/python3",
        }
        (folder / "inventory.json").write_text(json.dumps({"gpu": {"hosts": hosts, "vars": shared}}))

    def play(self, hosts: str, roles: list[str], **variables: Any) -> tuple[int, str]:
        download = {"repo": REPO, "revision": COMMIT, "file": "f.gguf", "sha256": self.file.sha256,
                    "size_bytes": self.file.size, "cache": CACHE, "endpoint": self.hub.url}  # fmt: skip
        tasks = [{"ansible.builtin.import_role": {"name": f"tensorless.fleet.{role}"}} for role in roles]
        play = [{"hosts": hosts, "become": True, "vars": {"plan_results": [{"download": download}], **variables},
                 "tasks": tasks}]  # fmt: skip
        book = self.folder / "play.json"
        book.write_text(json.dumps(play))
        command = [str(Path(sys.executable).with_name("ansible-playbook")), "-i", str(self.folder / "inventory.json")]
        environ = {**os.environ, "ANSIBLE_NOCOLOR": "1", "ANSIBLE_INJECT_FACT_VARS": "false"}
        done = subprocess.run([*command, str(book)], capture_output=True, text=True, env=environ)
        return done.returncode, done.stdout + done.stderr

    def sha256(self, host: Host) -> str:
        return host.sh(f"sha256sum {self.blob} 2>/dev/null | cut -d' ' -f1").strip()


@pytest.fixture(scope="module")
def spread(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Spread]:
    try:
        for host in HOSTS:
            host.start()
    except (FleetError, FileNotFoundError) as error:
        pytest.fail(f"hosts cannot be had on this machine: {error}")
    try:
        with FakeHub(bind=GATEWAY) as hub:
            yield Spread(hub, tmp_path_factory.mktemp("spread"))
    finally:
        for host in HOSTS:
            host.remove()
        podman("network", "rm", "-f", HOSTS[0].network, check=False)


def test_the_outside_sees_each_byte_once(spread: Spread) -> None:
    first, *others = HOSTS
    code, text = spread.play(first.name, ["model", "model_mirror"])
    assert code == 0, text
    mirror = f"http://{first.ip}:8088"
    code, text = spread.play("gpu:!" + first.name, ["model"], model_mirror_endpoint=mirror)
    assert code == 0, text
    assert [spread.sha256(host) for host in HOSTS] == [spread.file.sha256] * 3
    assert spread.file.size <= spread.hub.bytes_sent() <= 1.01 * spread.file.size
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

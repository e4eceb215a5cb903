# SPDX-License-Identifier: Apache-2.0
"""mirror.yml and archive.yml as a person runs them: hosts with cards, an engine image, a model; one host with docker.

The registry is the fleet's (`python -m tests.fleet up`).
"""

from __future__ import annotations

import json
import re
import subprocess

import pytest

from tests.fleet import cards, fleet, hosts, wheels
from tests.fleet.models.conftest import CACHE, HOSTS, Spread
from tests.fleet.server.rig import PACKAGES, image

pytestmark = [pytest.mark.fleet, pytest.mark.soak]

RUNTIME = dict(zip((host.name for host in HOSTS), ("podman", "podman", "docker")))
ARCHIVE = "/var/lib/tensorless/archive"
BLOB = f"{CACHE}/models--{fleet.MODEL.replace('/', '--')}/blobs/{wheels.GGUF_SHA256}"


class Books:
    """The collection's playbooks on the three hosts."""

    def __init__(self, spread: Spread) -> None:
        self.spread = spread
        self.inventory = spread.folder / "books.json"
        inventory = json.loads((spread.folder / "inventory.json").read_text())
        for name, runtime in RUNTIME.items():
            inventory["gpu"]["hosts"][name]["tensorless_runtime"] = runtime
        inventory["gpu"]["vars"].update(
            tensorless_servers=[{"model": fleet.NAME}],
            tensorless_recipes_dir=str(fleet.RECIPES),
            tensorless_hf_endpoint=spread.hub.url,
        )
        self.inventory.write_text(json.dumps(inventory))

    def play(self, book: str, *argv: str) -> tuple[int, str]:
        command = [self.spread.program, "-i", str(self.inventory), f"tensorless.fleet.{book}", *argv]
        done = subprocess.run(command, capture_output=True, text=True, env=self.spread.environ())
        return done.returncode, done.stdout + done.stderr


@pytest.fixture(scope="module")
def books(spread: Spread) -> Books:
    cards.build()
    for number, host in enumerate(HOSTS):
        packages = PACKAGES[RUNTIME[host.name]]
        host.sh(
            "export DEBIAN_FRONTEND=noninteractive; apt-get update -q && "
            f"apt-get install -y -q --no-install-recommends iptables {packages}"
        )
        cards.install(host, [cards.p100(0xE0 + number, "3B")])
        host.sh("rm -rf /var/lib/tensorless")
    spread.hub.rate = None
    spread.hub.faults.clear()
    spread.hub.add(fleet.MODEL, fleet.REVISION, wheels.GGUF_NAME, wheels.model_file(), sha256=wheels.GGUF_SHA256)
    return Books(spread)


def plain(text: str) -> str:
    return " ".join(text.split())


def test_mirror(books: Books) -> None:
    hub = books.spread.hub
    first, *others = HOSTS
    before = hub.bytes_sent()
    code, text = books.play("mirror", "-e", f"tensorless_mirror_host={first.name}", "-e", "model_mirror_fallback=false")
    assert code == 0, text
    assert [host.sh(f"sha256sum {BLOB}").split()[0] for host in HOSTS] == [wheels.GGUF_SHA256] * 3
    assert wheels.GGUF_SIZE <= hub.bytes_sent() - before <= 1.01 * wheels.GGUF_SIZE
    code, text = books.play("mirror")
    assert code == 0, text
    assert re.findall(r"changed=(\d+)", text) == ["0"] * 3
    assert hub.bytes_sent() - before <= 1.01 * wheels.GGUF_SIZE
    code, text = books.play("mirror", "--limit", ",".join(host.name for host in others))
    assert code != 0
    assert text.count("fatal: [") == 1
    assert f"{first.name}, which downloads and serves them, is left out by --limit" in plain(text)
    assert "Traceback" not in text
    code, text = books.play("mirror", "-e", "tensorless_mirror_host=nobody")
    assert code != 0
    assert text.count("fatal: [") == 1
    assert "nobody, which downloads and serves them," in plain(text)


def test_mirror_that_lies(books: Books) -> None:
    hub = books.spread.hub
    first, *others = HOSTS
    limit = ["-e", f"tensorless_mirror_host={first.name}"]
    # Same size and time: its own marker holds, so only the receivers can notice.
    flip = f"printf X | dd of={BLOB} bs=1 seek=9000000 conv=notrunc"
    first.sh(f"touch -r {BLOB} /tmp/t && {flip} && touch -r /tmp/t {BLOB}")
    for host in others:
        host.sh(f"rm -rf {CACHE} /var/lib/tensorless/state")
    before = hub.bytes_sent()
    code, text = books.play("mirror", *limit, "-e", "model_mirror_fallback=false")
    assert code != 0
    for host in others:
        assert re.search(rf"\[{host.name}\].*sha256 mismatch", text, re.DOTALL)
        assert host.sh(f"ls {BLOB}* 2>/dev/null || true") == ""
    assert hub.bytes_sent() == before
    code, text = books.play("mirror", *limit)
    assert code == 0, text
    assert [host.sh(f"sha256sum {BLOB}").split()[0] for host in others] == [wheels.GGUF_SHA256] * 2
    first.sh(f"rm -rf {CACHE} /var/lib/tensorless/state")
    code, text = books.play("mirror", *limit)
    assert code == 0, text
    code, text = books.spread.play(first.name, ["model_mirror"], model_mirror_state="absent")
    assert code == 0, text


def test_archive(books: Books) -> None:
    first, second, third = HOSTS
    export = ["--limit", first.name, "-e", "model_archive_tls_verify=false"]
    first.sh(f"rm -rf {ARCHIVE}; mkdir -p {ARCHIVE}/images && echo half > {ARCHIVE}/images/.part-x.tar")
    code, text = books.play("archive", *export)
    assert code == 0, text
    digest = image().rpartition(":")[2]
    listed = [f"images/{digest}.tar", f"models/{wheels.GGUF_SHA256}"]
    assert first.sh(f"cd {ARCHIVE} && find . -type f | sort").split() == ["./SHA256SUMS", *(f"./{n}" for n in listed)]
    assert sorted(line.split()[1] for line in first.sh(f"cat {ARCHIVE}/SHA256SUMS").splitlines()) == listed
    code, text = books.play("archive", *export)
    assert code == 0, text
    assert "changed=0" in text
    pack = hosts.command(first.name, ["tar", "-C", "/var/lib/tensorless", "-cf", "-", "archive"], tty=False)
    data = subprocess.run(pack, check=True, capture_output=True).stdout
    registry, port = hosts.REGISTRY.split(":")
    for host in (second, third):
        host.sh(f"rm -rf {CACHE} /var/lib/tensorless/state {ARCHIVE}")
        host.put(data, "/tmp/archive.tar")
        host.sh("tar -C /var/lib/tensorless -xf /tmp/archive.tar")
        host.sh(f"iptables -I OUTPUT -p tcp -d {registry} --dport {port} -j DROP")
    into = ["-e", "model_archive_action=import", "--limit", f"{second.name},{third.name}"]
    before = len(books.spread.hub.requests())
    for host in (second, third):
        host.sh(f"printf X | dd of={ARCHIVE}/models/{wheels.GGUF_SHA256} bs=1 seek=7000 conv=notrunc")
    code, text = books.play("archive", *into)
    assert code != 0
    assert f"models/{wheels.GGUF_SHA256}: FAILED" in text
    assert all(host.sh(f"ls {CACHE} 2>/dev/null || true") == "" for host in (second, third))
    for host in (second, third):
        host.sh("tar -C /var/lib/tensorless -xf /tmp/archive.tar")
    code, text = books.play("archive", *into)
    assert code == 0, text
    for host in (second, third):
        assert host.sh(f"sha256sum {BLOB}").split()[0] == wheels.GGUF_SHA256
        assert host.exec(RUNTIME[host.name], "image", "inspect", image(), check=False).returncode == 0
        assert "tensorless-archive" not in host.sh("cat /etc/hosts; iptables -t nat -S")
    code, text = books.play("archive", *into)
    assert code == 0, text
    assert re.findall(r"changed=(\d+)", text) == ["0"] * 2
    third.sh(f"rm {ARCHIVE}/images/*")
    code, text = books.play("archive", *into)
    assert code != 0
    assert f"lacks images/{digest}.tar" in plain(text)
    assert len(books.spread.hub.requests()) == before

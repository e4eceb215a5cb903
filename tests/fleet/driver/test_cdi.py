# SPDX-License-Identifier: Apache-2.0
"""From one driver version to the next: containers fail as in the field, and start again after the role."""

from __future__ import annotations

import pytest

from tests.fleet.driver.conftest import UUID, Rig

pytestmark = pytest.mark.fleet
ROLES = ["preflight", "nvidia_driver", "container_runtime", "nvidia_cdi"]
# A small image of the host's own shell: what runs in it does not matter, only that it gets its card.
IMAGE = (
    "rm -rf /tmp/image; mkdir -p /tmp/image; cd /tmp/image; for f in /bin/sh $(ldd /bin/sh | grep -o '/[^ ]*'); do "
    "mkdir -p ./$(dirname $f); cp -L $f ./$f; done; tar -c . | {0} import - localhost/small:1"
)


def test_podman(rig: Rig) -> None:
    rig.install("580.95.05")
    rig.sh("nvidia-smi -L")
    rig.play(ROLES, nvidia_cdi_toolkit_version="1.17.8")
    rig.sh(IMAGE.format("podman"))
    start = (
        f"podman run --rm --network none --device nvidia.com/gpu={UUID} localhost/small:1 /bin/sh -c 'nvidia-smi -L'"
    )
    assert UUID in rig.sh(start)

    rig.install("580.105.08")
    rig.host.reboot()
    rig.sh("nvidia-smi -L; rm -f /run/tensorless/card-access.json")
    # Our own unit renewed the spec at the boot; a host whose spec was made by hand has the old one.
    rig.sh("sed -i 's/580.105.08/580.95.05/' /etc/cdi/nvidia.yaml")
    rc, words = rig.rc(start)
    assert rc != 0
    assert "580.95.05" in words
    assert "no such file or directory" in words.lower()
    _rc, output, recap = rig.play(ROLES, "--diff")
    assert recap["changed"] == 1
    assert "made for driver 580.95.05, but 580.105.08 is loaded" in output
    assert UUID in rig.sh(start)
    _rc, _out, recap = rig.play(ROLES)
    assert recap["changed"] == 0

    # A stale spec in the folder that wins, and one that nobody reads.
    rig.sh("mkdir -p /run/cdi; sed 's/580.105.08/535.1.2/' /etc/cdi/nvidia.yaml >/run/cdi/nvidia.yaml")
    rig.sh("cp /etc/cdi/nvidia.yaml /etc/cdi/nvidia-copy.yaml")
    assert rig.rc(start)[0] != 0
    _rc, output, recap = rig.play(ROLES, "--diff")
    assert "remove /var/run/cdi/nvidia.yaml" in output
    assert "remove /etc/cdi/nvidia-copy.yaml" in output
    assert UUID in rig.sh(start)
    _rc, _out, recap = rig.play(ROLES)
    assert recap["changed"] == 0


@pytest.mark.soak
def test_podman_newer_toolkit(rig: Rig) -> None:
    """1.19.1 writes what podman 4.3 cannot read, and its own list of devices looks fine."""
    rig.install("580.105.08")
    rig.sh("nvidia-smi -L")
    rig.play(ROLES, nvidia_cdi_toolkit_version="1.19.1")
    assert "no-additional-gids" in rig.sh("cat /etc/nvidia-container-toolkit/nvidia-cdi-refresh.env")
    assert "additionalGids" not in rig.sh("cat /var/run/cdi/nvidia.yaml")
    assert not rig.sh("ls /etc/cdi 2>/dev/null || true").strip(), "one owner, one file"
    rig.host.reboot()
    _rc, _out, recap = rig.play(ROLES)
    assert recap["changed"] == 0


def test_docker(docker_rig: Rig) -> None:
    rig = docker_rig
    rig.repositories("toolkit")  # the owner's own entry for the repository, with another key file, stays the only one
    rig.install("580.95.05")
    rig.sh("nvidia-smi -L")
    before = rig.sh("cat /etc/docker/daemon.json")
    rig.play(ROLES, tensorless_runtime="docker")
    assert "insecure-registries" in before
    assert "insecure-registries" in rig.sh("cat /etc/docker/daemon.json"), "what others wrote stays"
    rig.sh(IMAGE.format("docker"))
    start = f"docker run --rm --network none --gpus device={UUID} localhost/small:1 /bin/sh -c 'nvidia-smi -L'"
    assert UUID in rig.sh(start)
    _rc, _out, recap = rig.play(ROLES, tensorless_runtime="docker")
    assert recap["changed"] == 0

    rig.install("580.105.08")
    rc, words = rig.rc(start)
    assert rc != 0
    assert "driver/library version mismatch" in words
    rc, output, _recap = rig.play(ROLES, check=False, tensorless_runtime="docker")
    assert rc != 0
    assert "reboot" in output
    rig.host.reboot()
    rig.play(ROLES, tensorless_runtime="docker")
    assert UUID in rig.sh(start)
    _rc, _out, recap = rig.play(ROLES, tensorless_runtime="docker")
    assert recap["changed"] == 0

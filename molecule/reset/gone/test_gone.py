# SPDX-License-Identifier: Apache-2.0
"""After reset.yml, nothing of the collection's work is left; packages stay."""

from __future__ import annotations

import json
import re

from tests.fleet import fleet, snapshot

# Of packages that site.yml installed and reset.yml leaves: what dpkg put there, and what their programs wrote.
PACKAGES = re.compile(
    r"^(package |unit |processes|listeners|/(usr|boot)/"
    r"|/var/(lib/(dpkg|apt|ucf|containers|cni|nfs|polkit-1|python)|cache)(/|$)"
    r"|/etc/(apt|containers|cni|ld\.so|alternatives|default|init\.d|rc.\.d|profile\.d|dbus-1|nvidia-container|bash_completion"
    r"|xdg|xtables|iproute2|ca-certificates|ssl|subuid|subgid|ucf|terminfo|security|logrotate|cdi|nftables|ethertypes|protocols|X11|logcheck|networks|rpc|services"
    r"|cron|criu)"
    r"|/etc/systemd/(system|user)(/|$))"
)


def test_nothing_is_named_after_the_product() -> None:
    found = fleet.P100_D.sh("find / -xdev -iname '*tensorless*' -not -path '/proc/*'").split()
    assert found == []
    assert "tensorless" not in fleet.P100_D.sh(
        "systemctl list-units --all --type=service --no-legend; podman ps -a; podman images"
    )


def test_only_packages_are_left() -> None:
    before = json.loads(fleet.BARE_SNAPSHOT.read_text())
    left = [line for line in snapshot.differences(before, snapshot.take(fleet.P100_D)) if not PACKAGES.match(line)]
    assert left == []

# SPDX-License-Identifier: Apache-2.0
"""What a host is like: every file, package, enabled unit and container; to be compared with itself later."""

from __future__ import annotations

import re

from tests.fleet.hosts import Host

# What changes on a host that nobody touches, and what any ssh login or Ansible run leaves for a moment.
NOISE = re.compile(
    r"^/(proc|sys|dev|run|tmp|var/tmp|var/log|var/cache/apt/archives|var/lib/(systemd|dbus|private))(/|$)"
    r"|^/(root|home/[^/]+)/\.ansible(/|$)|^/(root|home/[^/]+)$"
    r"|^/var/lib/(containers|docker)/?$"
)


def take(host: Host) -> dict[str, str]:
    """Path or thing -> what it is."""
    found: dict[str, str] = {}
    listing = host.sh("find / -xdev -printf '%p\\t%y %m %U:%G %s %T@ %l\\n' 2>/dev/null; true")
    for line in listing.splitlines():
        path, _, what = line.partition("\t")
        if not NOISE.search(path):
            # A folder's time and size follow from what is in it.
            found[path] = " ".join(what.split()[:3]) if what.startswith("d") else what
    for line in host.sh("dpkg-query -W -f '${Package} ${Version} ${db:Status-Status}\\n'").splitlines():
        found[f"package {line.split()[0]}"] = line
    for line in host.sh("systemctl list-unit-files --no-legend").splitlines():
        found[f"unit {line.split()[0]}"] = " ".join(line.split()[:2])
    found["processes"] = host.sh("ps -eo args --no-headers | grep -Ec 'podman|dockerd|llama-server' || true").strip()
    found["listeners"] = host.sh("ss -Hlnt | awk '{print $4}' | sort | tr '\\n' ' '")
    return found


def differences(before: dict[str, str], after: dict[str, str]) -> list[str]:
    lines = []
    for key in sorted(before.keys() | after.keys()):
        if before.get(key) != after.get(key):
            lines.append(f"{key}: {before.get(key, 'absent')} -> {after.get(key, 'absent')}")
    return lines

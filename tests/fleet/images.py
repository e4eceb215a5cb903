# SPDX-License-Identifier: Apache-2.0
"""The host images localhost/testhost:bookworm and :trixie: plain Debian with systemd, sshd and Python.

They are made by mmdebstrap from the package mirror that this machine uses itself, and trust the certificates that it
trusts. The root file systems stay in the cache, keyed by everything that went in.
"""

from __future__ import annotations

import hashlib
import pathlib
import re
import tempfile

from tests.fleet.machine import CA_BUNDLE, CACHE, as_root, lock, podman, run, say

PACKAGES = [
    "systemd",
    "systemd-sysv",
    "dbus",
    "openssh-server",
    "python3",
    "python3-apt",
    "sudo",
    "iproute2",
    "ca-certificates",
    "procps",
    "kmod",
]
SUITES = ("bookworm", "trixie")
_KEYRING = "/usr/share/keyrings/debian-archive-keyring.gpg"

# Hosts of a test are thrown away: no fsync storms, no services that a container cannot have, no waiting at login.
_CUSTOMIZE = r"""
set -e
cd "$1"
rm -f etc/ssh/ssh_host_* etc/machine-id var/lib/dbus/machine-id
: > etc/machine-id
for unit in systemd-networkd-wait-online.service systemd-udevd.service systemd-resolved.service \
            systemd-timesyncd.service apt-daily.timer apt-daily-upgrade.timer e2scrub_all.timer fstrim.timer \
            man-db.timer dpkg-db-backup.timer systemd-logind.service getty.target console-getty.service; do
  ln -sf /dev/null "etc/systemd/system/$unit"
done
mkdir -p etc/systemd/system/ssh.service.d
printf '[Service]\nExecStartPre=\nExecStartPre=/usr/bin/ssh-keygen -A\nExecStartPre=/usr/sbin/sshd -t\n' \
  > etc/systemd/system/ssh.service.d/host-keys.conf
ln -sf /lib/systemd/system/ssh.service etc/systemd/system/multi-user.target.wants/ssh.service
printf 'UseDNS no\nMaxStartups 100\nMaxSessions 100\n' > etc/ssh/sshd_config.d/tests.conf
"""


def _apt_sources(suite: str) -> list[str]:
    """One-line sources for ``suite`` on the mirrors that this machine's own apt uses."""
    found: dict[str, str] = {}
    listing = run(["apt-get", "indextargets", "--format", "$(SITE)|$(RELEASE)|$(CREATED_BY)"], check=False).stdout
    for line in listing.splitlines():
        site, release, made_by = [*line.split("|"), "", ""][:3]
        if made_by == "Packages" and re.fullmatch(r"(bookworm|trixie)(-security)?", release):
            found.setdefault("security" if release.endswith("-security") else "main", site)
    main = found.get("main", "http://deb.debian.org/debian")
    security = found.get("security", "http://deb.debian.org/debian-security")
    signed = f"[signed-by={_KEYRING}]"
    return [f"deb {signed} {main} {suite} main", f"deb {signed} {security} {suite}-security main"]


def _apt_settings() -> str:
    """The settings with which this machine's apt reaches its mirrors (a proxy, a clock that is off)."""
    wanted = re.compile(r'Acquire::(Check-|https?::(Proxy|CAInfo|Verify)|Retries|Languages)[^"]*"[^"]+"')
    lines = run(["apt-config", "dump"]).stdout.splitlines()
    return "\n".join(line for line in lines if wanted.match(line)) + "\n"


def _build(suite: str) -> None:
    sources, settings, ca = _apt_sources(suite), _apt_settings(), CA_BUNDLE.read_bytes()
    key = hashlib.sha256(repr((suite, PACKAGES, sources, settings, _CUSTOMIZE)).encode() + ca).hexdigest()[:16]
    name = f"localhost/testhost:{suite}"
    label = podman("image", "inspect", "--format", '{{index .Labels "inputs"}}', name, check=False)
    if label.returncode == 0 and label.stdout.strip() == key:
        return
    tar = CACHE / f"testhost-{suite}-{key}.tar"
    if not tar.exists():
        say(f"making the host image {name} (about a minute)")
        with tempfile.TemporaryDirectory(dir=CACHE) as scratch:
            hook, conf = pathlib.Path(scratch, "hook"), pathlib.Path(scratch, "99machine")
            hook.write_text("#!/bin/sh\n" + _CUSTOMIZE)
            hook.chmod(0o755)
            conf.write_text(settings)
            pathlib.Path(scratch).chmod(0o755)
            part = tar.with_suffix(".part")
            command = [
                "mmdebstrap", "--quiet", "--variant=minbase", f"--include={','.join(PACKAGES)}", "--format=tar",
                f"--aptopt={conf}", "--dpkgopt=force-unsafe-io", "--skip=cleanup/apt/lists",
                f"--customize-hook={hook}",
                f"--customize-hook=copy-in {CA_BUNDLE} /etc/ssl/certs",
                suite, str(part), *sources,
            ]  # fmt: skip
            run(as_root(command))
            run(as_root(["mv", str(part), str(tar)]))
        for old in CACHE.glob(f"testhost-{suite}-*.tar"):
            if old != tar:
                run(as_root(["rm", "-f", str(old)]))
    podman("import", "--change", f"LABEL inputs={key}", "--change", 'CMD ["/sbin/init"]', str(tar), name)


def ensure(suites: tuple[str, ...] = SUITES) -> None:
    """Both host images, made when their inputs changed."""
    with lock("images"):
        for suite in suites:
            _build(suite)

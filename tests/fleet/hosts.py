# SPDX-License-Identifier: Apache-2.0
"""Hosts of the test fleet: start, enter, restart and remove one."""

from __future__ import annotations

import dataclasses
import pathlib
import shlex
import subprocess
import time

from tests.fleet.machine import CACHE, FleetError, as_root, inside, lock, podman, run

LABEL = "tensorless-fleet-tests"
SSH_USER = "ops"  # an ordinary account that may sudo, as on a host that people administer
PRIVATE_KEY = CACHE / "ssh" / "id_ed25519"
REGISTRY = "10.213.7.1:5000"

# podman inside a host: what a host that is itself a container lacks (its own limits and cgroup controllers).
_CONTAINERS_CONF = """[containers]
default_ulimits = ["nofile=5000:5000", "nproc=20000:20000"]
pids_limit = 0
cgroups = "disabled"
"""


@dataclasses.dataclass(frozen=True)
class Host:
    """One host: its name, Debian suite and address; its network is named after the fleet that it belongs to."""

    name: str
    suite: str
    ip: str
    network: str = "tensorless-fleet"

    @property
    def subnet(self) -> str:
        return self.ip.rsplit(".", 1)[0] + ".0/24"

    def exec(self, *argv: str, check: bool = True, **kw: object) -> subprocess.CompletedProcess[str]:
        """Runs a command on the host as root, not through ssh."""
        stdin = ["-i"] if "input" in kw or "stdin" in kw else []
        return podman("exec", *stdin, self.name, *argv, check=check, **kw)

    def sh(self, script: str, check: bool = True) -> str:
        return self.exec("sh", "-c", script, check=check).stdout

    def write(self, path: str, text: str, mode: str = "0644") -> None:
        quoted = shlex.quote(path)
        script = f"mkdir -p $(dirname {quoted}) && cat >{quoted} && chmod {mode} {quoted}"
        self.exec("sh", "-c", script, input=text)

    def put(self, data: bytes, path: str) -> None:
        argv = command(self.name, ["sh", "-c", f"cat >{shlex.quote(path)}"], tty=False)
        subprocess.run(argv, input=data, check=True, capture_output=True)

    def ssh_argv(self, *argv: str) -> list[str]:
        return ["ssh", *ssh_options(), f"{SSH_USER}@{self.ip}", *argv]

    def exists(self) -> bool:
        return podman("container", "exists", self.name, check=False).returncode == 0

    def running(self) -> bool:
        done = podman("inspect", "--format", "{{.State.Running}}", self.name, check=False)
        return done.stdout.strip() == "true"

    def start(self) -> None:
        """Creates the host when it is not there, boots it when it is off, and waits until it is up."""
        if not self.exists():
            self._create()
        elif not self.running():
            podman("start", self.name)
        self.wait()

    def _create(self) -> None:
        self._network()
        archives = CACHE / "apt" / self.suite / self.name  # packages fetched once, kept for the next fleet
        run(as_root(["mkdir", "-p", str(archives / "partial")]))
        podman(
            "run", "-d", "--name", self.name, "--hostname", self.name, "--label", LABEL,
            "--systemd=always", "--privileged", "--pids-limit=0",
            "--ulimit", "nofile=10000:10000", "--ulimit", "nproc=30000:30000",
            "--network", self.network, "--ip", self.ip,
            # Storage of the runtimes inside: a volume, not the overlay of this container.
            "-v", f"{self.name}-podman:/var/lib/containers", "-v", f"{self.name}-docker:/var/lib/docker",
            "-v", f"{archives}:/var/cache/apt/archives",
            f"localhost/testhost:{self.suite}", "/sbin/init",
        )  # fmt: skip
        self._prepare()

    def _network(self) -> None:
        with lock("network"):
            if podman("network", "exists", self.network, check=False).returncode != 0:
                podman("network", "create", "--subnet", self.subnet, "--label", LABEL, self.network)

    def _prepare(self) -> None:
        """What the owner of a host would have done before Ansible comes: an account, and how to reach the registry."""
        self.write("/etc/containers/containers.conf.d/50-test-host.conf", _CONTAINERS_CONF)
        self.write(
            "/etc/containers/registries.conf.d/50-test-registry.conf",
            f'[[registry]]\nlocation = "{REGISTRY}"\ninsecure = true\n',
        )
        self.write("/etc/docker/daemon.json", f'{{"insecure-registries": ["{REGISTRY}"]}}\n')
        self.sh(f"id {SSH_USER} 2>/dev/null || useradd -m -s /bin/bash {SSH_USER}")
        self.write(f"/etc/sudoers.d/{SSH_USER}", f"{SSH_USER} ALL=(ALL) NOPASSWD:ALL\n", "0440")
        home = f"/home/{SSH_USER}/.ssh"
        self.write(f"{home}/authorized_keys", ssh_key().read_text())
        self.sh(f"chown -R {SSH_USER}: {home} && chmod 700 {home} && chmod 600 {home}/authorized_keys")

    def wait(self, seconds: float = 180) -> None:
        """Until systemd has booted and sshd answers."""
        until = time.monotonic() + seconds
        while True:
            state = self.exec("systemctl", "is-system-running", check=False).stdout.strip()
            if state in ("running", "degraded") and run(self.ssh_argv("true"), check=False).returncode == 0:
                return
            if time.monotonic() > until:
                failed = self.exec("systemctl", "--failed", "--no-legend", check=False).stdout
                raise FleetError(f"{self.name} is not up after {seconds:.0f} s: state {state!r}, failed: {failed!r}")
            time.sleep(0.3)

    def stop(self) -> None:
        podman("stop", "-t", "20", self.name)

    def reboot(self) -> None:
        self.stop()
        self.start()

    def remove(self) -> None:
        podman("rm", "-f", "-t", "0", self.name, check=False)
        podman("volume", "rm", "-f", f"{self.name}-podman", f"{self.name}-docker", check=False)


def ssh_key() -> pathlib.Path:
    """The public key of the fleet's controller; the pair is made on first use."""
    with lock("ssh-key"):
        if not PRIVATE_KEY.exists():
            PRIVATE_KEY.parent.mkdir(parents=True, exist_ok=True)
            run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", LABEL, "-f", str(PRIVATE_KEY)])
    return PRIVATE_KEY.with_suffix(".pub")


def ssh_options() -> list[str]:
    """Hosts are made anew all the time, so their keys are not remembered."""
    return [
        "-i", str(PRIVATE_KEY), "-o", "IdentitiesOnly=yes", "-o", "StrictHostKeyChecking=no",
        "-o", "UserKnownHostsFile=/dev/null", "-o", "LogLevel=ERROR", "-o", "ConnectTimeout=5", "-o", "BatchMode=yes",
    ]  # fmt: skip


def by_label() -> list[str]:
    return podman("ps", "-a", "--filter", f"label={LABEL}", "--format", "{{.Names}}").stdout.split()


def command(host: str, argv: list[str], tty: bool) -> list[str]:
    """The command line that runs ``argv`` on a host."""
    return inside(["podman", "exec", *(["-it"] if tty else ["-i"]), host, *argv])

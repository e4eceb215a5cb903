# SPDX-License-Identifier: Apache-2.0
"""A host of its own for the tests of the servers: runtimes, cards, image, model; Ansible runs the modules."""

from __future__ import annotations

import base64
import dataclasses
import json
import os
import pathlib
import re
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import tomllib
from ansible_collections.tensorless.fleet.plugins.module_utils._cards import Gpu, Gpus
from ansible_collections.tensorless.fleet.plugins.module_utils._plan import plan_model
from ansible_collections.tensorless.fleet.plugins.module_utils._plan_types import Choice, HostFacts
from ansible_collections.tensorless.fleet.plugins.module_utils._recipe import Recipe
from ansible_collections.tensorless.fleet.plugins.module_utils._server_files import Places, places

from tests.fleet import cards, wheels
from tests.fleet.fleet import RECIPES
from tests.fleet.hosts import LABEL, SSH_USER, Host, ssh_options
from tests.fleet.machine import podman

CACHE = "/var/lib/tensorless/hub"
CARDS = [cards.p100(0xC1, "3B"), cards.p100(0xC2, "AF")]
PACKAGES = {
    "podman": "podman crun netavark aardvark-dns iptables nftables catatonit uidmap",
    "docker": "docker.io iptables",
}
TOOLKIT = "1.18.2"


@dataclasses.dataclass
class Rig:
    """One prepared host. `runtime` is the one that plans are made for; with `user`, servers are that account's."""

    host: Host
    runtime: str
    user: str = ""
    interpreter: str = "/usr/bin/python3"

    @property
    def places(self) -> Places:
        return places("user" if self.user else "system", f"/home/{self.user}", self.user)

    @property
    def cache(self) -> str:
        return f"/home/{self.user}/hub" if self.user else CACHE

    def own(self, script: str, check: bool = True) -> str:
        """A shell line as the account that the servers belong to."""
        if not self.user:
            return self.sh(script, check)
        line = f"cd; export XDG_RUNTIME_DIR=/run/user/$(id -u); {script}"
        return self.host.exec("runuser", "-u", self.user, "--", "sh", "-c", line, check=check).stdout

    def systemctl(self, *words: str, check: bool = True) -> str:
        return self.own(shlex.join(["systemctl", *(["--user"] if self.user else []), *words]), check)

    def sh(self, script: str, check: bool = True) -> str:
        return self.host.sh(script, check=check)

    def plan(self, **choice: Any) -> dict[str, Any]:
        return self.plans(**choice)[0]

    def plans(self, recipe: dict[str, Any] | None = None, **choice: Any) -> list[dict[str, Any]]:
        data = recipe or tomllib.loads(next(RECIPES.glob("*/*/p100.toml")).read_text())
        gpus = [
            Gpu(
                index=i,
                uuid=c["uuid"],
                name=c["name"],
                compute_capability=c["compute_cap"],
                memory_mib=c["memory_mib"],
                driver=cards.DRIVER,
            )
            for i, c in enumerate(CARDS)
        ]
        facts = HostFacts(gpus=Gpus(cards=tuple(gpus)), cpu_count=1, runtimes=("podman", "docker"))
        chosen = {"runtime": self.runtime, "gpu": "0", "service": True, **choice}
        loaded = Recipe(path="test.toml", data=data)
        return plan_model([loaded], facts, Choice(cache=self.cache, **chosen)).plans

    def module(self, name: str, /, check: bool = False, fail: bool = False, **options: Any) -> dict[str, Any]:
        """Runs a module of the collection on the host, over ssh and sudo, and returns its result."""
        with tempfile.TemporaryDirectory() as folder:
            argv = self._play(pathlib.Path(folder), name, check, options)
            done = subprocess.run(argv, capture_output=True, text=True, env=environment(), check=False)
            printed = re.search(r'"msg": "RESULT:([A-Za-z0-9+/=]+)"', done.stdout)
            assert printed, done.stdout + done.stderr
            data: dict[str, Any] = json.loads(base64.b64decode(printed[1]))
            data["playbook_output"] = done.stdout + done.stderr
            assert bool(data.get("failed")) == fail, json.dumps(data, indent=1) + done.stdout + done.stderr
            return data

    def start_module(self, name: str, /, **options: Any) -> subprocess.Popen[bytes]:
        """Starts it and returns at once; the caller ends it."""
        folder = tempfile.mkdtemp()
        argv = self._play(pathlib.Path(folder), name, False, options)
        return subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment())

    def _play(self, folder: pathlib.Path, name: str, check: bool, options: dict[str, Any]) -> list[str]:
        """Writes what one task needs into a folder; returns Ansible's command line."""
        (folder / "options.json").write_text(json.dumps(options))
        task = {
            f"tensorless.fleet.{name}": "{{ lookup('file', 'options.json') | from_json }}",
            "register": "done",
            "ignore_errors": True,
        }
        # Printed by the controller itself: a second module would cost as much time again.
        show = {"ansible.builtin.debug": {"msg": "RESULT:{{ done | to_json | b64encode }}"}}
        argv = self.command(folder, [task, show])
        return [*argv, *(["--check"] if check else []), "--diff"]

    def bring(self, content: str, path: pathlib.Path) -> dict[str, Any]:
        """A task that writes a text of the play to a file on this machine."""
        return {
            "ansible.builtin.copy": {"content": content, "dest": str(path), "mode": "0600"},
            "delegate_to": "localhost",
            "become": False,
            "check_mode": False,
            "diff": False,
            "vars": {"ansible_connection": "local", "ansible_python_interpreter": sys.executable},
        }

    def command(self, folder: pathlib.Path, tasks: list[dict[str, Any]]) -> list[str]:
        """The command line that runs these tasks on the host."""
        host = {
            "ansible_host": self.host.ip,
            "ansible_user": SSH_USER,
            "ansible_ssh_common_args": " ".join(ssh_options()),
            "ansible_python_interpreter": self.interpreter,
        }
        play = [{"hosts": "all", "gather_facts": False, "become": not self.user, "tasks": tasks}]
        (folder / "play.yml").write_text(json.dumps(play))
        (folder / "inventory.json").write_text(json.dumps({"all": {"hosts": {self.host.name: host}}}))
        program = f"{os.path.dirname(sys.executable)}/ansible-playbook"
        return [program, "-i", f"{folder}/inventory.json", f"{folder}/play.yml"]

    def serve(self, *plans: dict[str, Any], **options: Any) -> dict[str, Any]:
        chosen = {"health_timeout": 120, "scope": self.places.scope, **options}
        return self.module("tensorless_server", plans=list(plans), **chosen)

    def unit(self, instance: str, *properties: str) -> dict[str, str]:
        names = ",".join(properties or ("ActiveState", "SubState", "NRestarts", "Result", "MainPID"))
        out = self.systemctl("show", "-p", names, f"tensorless@{instance}.service")
        return dict(line.partition("=")[::2] for line in out.splitlines())

    def container(self, name: str, runtime: str = "") -> dict[str, Any] | None:
        out = self.own(f"{runtime or self.runtime} container inspect {name}", check=False)
        found = json.loads(out or "[]")
        return found[0] if found else None

    def clean(self) -> None:
        """Nothing of any earlier test: neither units nor containers. Not by the product, so that it can be wrong."""
        if self.user:
            self.own(
                "systemctl --user stop 'tensorless@*'; rm -rf .config/tensorless .config/systemd; "
                "rm -rf .local/lib/tensorless; systemctl --user daemon-reload; systemctl --user reset-failed; "
                "podman rm -fa; true"
            )
        self.sh(
            "systemctl stop 'tensorless@*'; rm -rf /etc/tensorless /usr/local/lib/tensorless; "
            "rm -rf /etc/systemd/system/tensorless@* /etc/systemd/system/multi-user.target.wants/tensorless@*; "
            "systemctl daemon-reload; systemctl reset-failed; true"
        )
        for runtime in ("podman", "docker"):
            self.sh(f"command -v {runtime} && {runtime} ps -aq | xargs -r {runtime} rm -f", check=False)


def until(what: Callable[[], Any], seconds: float = 60) -> Any:
    """The first true answer; fails after `seconds`."""
    end = time.monotonic() + seconds
    while True:
        answer = what()
        if answer:
            return answer
        assert time.monotonic() < end, f"still {answer!r} after {seconds} s"
        time.sleep(0.5)


def healthy(rig: Rig, port: int = 8080) -> bool:
    return '"ok"' in rig.sh(f"curl -s -m 2 http://127.0.0.1:{port}/health", check=False)


def environment() -> dict[str, str]:
    return {
        **os.environ,
        "ANSIBLE_PIPELINING": "1",
        "ANSIBLE_INJECT_FACT_VARS": "false",
        "INJECTED_SECRET": "env-of-the-controller",
    }


def cgroups(rig: Rig) -> str:
    """What the tests print about the ground that they ran on."""
    off = 'cgroups = "disabled"' in rig.sh("cat /etc/containers/containers.conf.d/* 2>/dev/null; true")
    return "without cgroups for podman's containers" if off else "with cgroups"


def image() -> str:
    return str(tomllib.loads(next(RECIPES.glob("*/*/p100.toml")).read_text())["engine"]["image"])


def prepare(name: str, suite: str, ip: str, runtimes: list[str]) -> Rig:
    """The host with everything that the earlier roles would have brought; quick when it is there already."""
    host = Host(name, suite, ip, network=f"{LABEL}-{ip.split('.')[2]}")
    host.start()
    if host.exec("test", "-e", "/root/prepared", check=False).returncode != 0:
        packages = " ".join(PACKAGES[runtime] for runtime in runtimes)
        if suite == "trixie" and "docker" in runtimes:
            packages += " docker-cli"  # in Debian 12 a part of docker.io
        host.sh(
            "export DEBIAN_FRONTEND=noninteractive; apt-get update -q && "
            f"apt-get install -y -q --no-install-recommends curl procps strace {packages}"
        )
        cards.build()
        cards.install(host, CARDS)
        _toolkit(host, runtimes)
        _model(host)
        for runtime in runtimes:
            host.exec(runtime, "pull", image())
        host.sh("touch /root/prepared")
    return Rig(host, runtimes[0])


def _toolkit(host: Host, runtimes: list[str]) -> None:
    host.sh("mkdir -p /root/toolkit")
    for deb in sorted((cards.REPOSITORIES / "toolkit").glob(f"*_{TOOLKIT}-1_amd64.deb")):
        podman("cp", str(deb), f"{host.name}:/root/toolkit/{deb.name}")
    host.sh("dpkg -i /root/toolkit/*.deb && rm -r /root/toolkit && mkdir -p /etc/cdi")
    host.sh("nvidia-ctk cdi generate --output=/etc/cdi/nvidia.yaml")
    if "docker" in runtimes:
        host.sh("systemctl reset-failed docker; systemctl restart docker")


def _model(host: Host) -> None:
    data = tomllib.loads(next(RECIPES.glob("*/*/p100.toml")).read_text())["model"]
    folder = f"{CACHE}/models--{data['hf_repo'].replace('/', '--')}/blobs"
    host.sh(f"mkdir -p {folder}")
    podman("cp", str(wheels.model_file()), f"{host.name}:{folder}/{data['sha256']}")
    host.sh(f"chmod 644 {folder}/*")


def prepare_rootless(rig: Rig) -> Rig:
    """The same host for an ordinary account: its own storage, image and model. Logins are masked in the host images."""
    found = Rig(rig.host, "podman", SSH_USER)
    if rig.host.exec("test", "-e", "/root/rootless", check=False).returncode != 0:
        rig.sh("systemctl unmask systemd-logind.service && systemctl start systemd-logind.service")
        rig.sh("apt-get install -y -q --no-install-recommends passt uidmap dbus-user-session")
        rig.sh(f"mkdir -p /var/lib/containers/{SSH_USER} && chown {SSH_USER}: /var/lib/containers/{SSH_USER}")
        rig.host.write(
            "/etc/containers/storage.conf",
            '[storage]\ndriver = "overlay"\nrunroot = "/run/containers/storage"\n'
            'graphroot = "/var/lib/containers/storage"\nrootless_storage_path = "/var/lib/containers/$USER"\n',
        )
        # As on every machine outside a container: its network needs the tun device.
        rig.host.write("/etc/tmpfiles.d/tun.conf", "z /dev/net/tun 0666 root root\n")
        rig.sh("systemd-tmpfiles --create /etc/tmpfiles.d/tun.conf")
        # The stand-ins lie over a part of /proc, and the kernel lets an account mount its own only beside a whole one.
        rig.sh("mkdir -p /var/whole-proc && echo 'proc /var/whole-proc proc defaults 0 0' >>/etc/fstab && mount -a")
        rig.sh(f"loginctl enable-linger {SSH_USER}")
        until(lambda: found.systemctl("is-system-running", check=False).strip() in ("running", "degraded"))
        folder = f"/home/{SSH_USER}/hub"
        rig.sh(f"cp -r {CACHE} {folder} && chown -R {SSH_USER}: {folder}")
        found.own(f"podman pull -q {image()}")
        rig.sh("touch /root/rootless")
    return found

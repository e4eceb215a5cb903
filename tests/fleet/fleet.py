# SPDX-License-Identifier: Apache-2.0
"""The fleet itself: three hosts, their cards, the services on the gateway, and the files that a controller needs."""

from __future__ import annotations

import json
import pathlib
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import yaml

from tests.fleet import cards, engine, hosts, images, services, snapshot, wheels
from tests.fleet.hosts import Host
from tests.fleet.machine import STATE, as_root, end_keeper, podman, run, say

P100_A = Host("p100-a", "bookworm", "10.213.7.11")
P100_B = Host("p100-b", "trixie", "10.213.7.12")
P100_C = Host("p100-c", "bookworm", "10.213.7.13")
HOSTS = (P100_A, P100_B, P100_C)
P100_D = Host("p100-d", "bookworm", "10.213.7.14")  # stays bare until a test takes it

MODEL = "test/SmolLM2-135M-Instruct-GGUF"
NAME = "smol"
REVISION = "5e0c1d2b3a49586776859403a1b2c3d4e5f60718"
RECIPES = STATE / "recipes"
ARGS = ["-np", "1", "-ngl", "99", "-fit", "off", "--threads-http", "4", "-b", "512", "-ub", "512", "--jinja"]
INVENTORY = STATE / "inventory.yml"
SSH_CONFIG = STATE / "ssh_config"  # for people too: ssh -F .build/fleet/ssh_config p100-a
BARE_INVENTORY = STATE / "bare.yml"
BARE_SNAPSHOT = STATE / "bare.json"
RUNTIME = {P100_A.name: "podman", P100_B.name: "podman", P100_C.name: "docker", P100_D.name: "podman"}


CARDS = {
    P100_A.name: [cards.p100(0xA1, "3B")],
    P100_B.name: [cards.p100(0xB1, "3B"), cards.p4(0xB3, "5E"), cards.p100(0xB2, "AF")],
    P100_C.name: [cards.p100(0xC1, "3B")],
    P100_D.name: [cards.p100(0xD1, "3B")],
}


def write_recipe(image: str, folder: pathlib.Path = RECIPES, **changes: Any) -> None:
    """The recipe of the test model on the P100; ``changes`` replace values by their key."""
    value = {
        "status": "released", "sha256": wheels.GGUF_SHA256, "size": wheels.GGUF_SIZE, "revision": REVISION,
        "context": 4096, "receipt": 60.0, "model": MODEL, "name": NAME, "args": ARGS, **changes,
    }  # fmt: skip
    text = f"""# SPDX-License-Identifier: Apache-2.0
schema = 1
status = "{value["status"]}"

[model]
name       = "{value["name"]}"
title      = "SmolLM2 135M, for tests"
hf_repo    = "{value["model"]}"
revision   = "{value["revision"]}"
file       = "{wheels.GGUF_NAME}"
sha256     = "{value["sha256"]}"
size_bytes = {value["size"]}
license    = "Apache-2.0"

[card]
id                 = "p100"
title              = "NVIDIA Tesla P100 16 GB"
compute_capability = "6.0"
min_memory_mib     = 16000
min_driver         = "525.60.13"

[engine]
release = "engine-v0.0.0"
arch    = "sm60"
image   = "{image}"

[run]
alias       = "{value["model"]}"
context     = {value["context"]}
threads_max = 1
args = {json.dumps(value["args"])}

[run.env]
{engine.SWITCHES[0]} = "1"

[receipt]
source      = "A round number on a test machine's processor; it only gives the comparison something to compare with."
summary     = "Decode about 60 tok/s on one processor thread."
decode_tps  = {{ short = {value["receipt"]} }}
"""
    path = folder / value["model"] / "p100.toml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def write_inventory(path: pathlib.Path, members: tuple[Host, ...], **more: Any) -> None:
    """The inventory of some hosts, as their owner would write it; ``more`` are further variables of the group."""
    inventory = {
        # The report is written on the controller, which is no member of `gpu`.
        "all": {"vars": {"tensorless_report_dir": str(STATE / ("report" if path == INVENTORY else "report-bare"))}},
        "gpu": {
            "hosts": {
                host.name: {
                    "ansible_host": host.ip,
                    "tensorless_runtime": RUNTIME[host.name],
                    # Where a host has several cards, one server on each that the recipe fits.
                    "tensorless_servers": [{"model": NAME, "gpu": "each"} if host == P100_B else {"model": NAME}],
                }
                for host in members
            },
            "vars": {
                "ansible_user": hosts.SSH_USER,
                "ansible_ssh_private_key_file": str(hosts.PRIVATE_KEY),
                "ansible_ssh_common_args": " ".join(hosts.ssh_options()[2:]),
                "ansible_python_interpreter": "/usr/bin/python3",
                "tensorless_recipes_dir": str(RECIPES),
                "tensorless_hf_endpoint": services.HUB,
                "nvidia_cdi_repository_url": f"{services.APT}/toolkit",
                "nvidia_cdi_repository_key": f"{services.APT}/key.asc",
                "nvidia_cdi_repository_suite": "./",
                **more,
            },
        },
    }
    path.write_text("---\n" + yaml.safe_dump(inventory, sort_keys=False))
    (STATE / "ansible.cfg").write_text(
        "[defaults]\ninject_facts_as_vars = false\nforks = 10\nhost_key_checking = false\n"
        "[ssh_connection]\npipelining = true\n"
    )


def write_ssh_config() -> None:
    words = hosts.ssh_options()
    settings = [word.replace("=", " ", 1) for word in words[3::2]]
    lines = [f"Host {host.name}\n  HostName {host.ip}" for host in (*HOSTS, P100_D)]
    lines += ["Host p100-*", f"  User {hosts.SSH_USER}", f"  IdentityFile {hosts.PRIVATE_KEY}"]
    SSH_CONFIG.write_text("\n".join([*lines, *(f"  {setting}" for setting in settings)]) + "\n")


def engine_image() -> str:
    """The engine image by digest, as the recipe of the fleet names it."""
    return f"{hosts.REGISTRY}/{engine.NAME}@{engine.layout()[1]}"


def write_hub_files() -> None:
    files = [{"repo": MODEL, "revision": REVISION, "file": wheels.GGUF_NAME, "path": str(wheels.model_file()),
              "sha256": wheels.GGUF_SHA256}]  # fmt: skip
    (STATE / "hub-files.json").write_text(json.dumps(files))


def up(members: tuple[Host, ...] = HOSTS, inventory: pathlib.Path = INVENTORY) -> None:
    """Hosts, services, engine image and files; what is there already stays."""
    begin = time.monotonic()
    images.ensure()
    hosts.ssh_key()
    STATE.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(len(members)) as pool:
        list(pool.map(Host.start, members))
    write_hub_files()
    cards.build()
    for service in services.all_services():
        service.start()
    write_recipe(engine.push(hosts.REGISTRY))
    write_inventory(inventory, members)
    write_ssh_config()
    with ThreadPoolExecutor(len(members)) as pool:
        list(pool.map(lambda host: cards.install(host, CARDS[host.name]), members))
    say(f"{', '.join(host.name for host in members)} are up after {time.monotonic() - begin:.0f} s")


def bare_up() -> None:
    """A new bare host of its own, and what it is like."""
    P100_D.remove()
    up((P100_D,), BARE_INVENTORY)
    # What is measured is no matter here: one short run.
    write_inventory(BARE_INVENTORY, (P100_D,), bench_runs=1, bench_tokens=16)
    BARE_SNAPSHOT.write_text(json.dumps(snapshot.take(P100_D)))


def down() -> None:
    """Removes the hosts, the services and all files of the fleet; the cache of images stays."""
    for service in services.all_services():
        service.stop()
    for host in (*HOSTS, P100_D):
        host.remove()
    podman("network", "rm", HOSTS[0].network, check=False)
    end_keeper()
    if STATE.exists():
        run(as_root(["rm", "-rf", str(STATE)]))
    shutil.rmtree(STATE, ignore_errors=True)


def status() -> list[str]:
    """One line for each host and service."""
    lines = [f"{host.name}  {host.suite}  {host.ip}  {'up' if host.running() else 'down'}" for host in HOSTS]
    return lines + [f"{s.name}  {s.url}  {'up' if s.answers() else 'down'}" for s in services.all_services()]

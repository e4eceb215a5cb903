# SPDX-License-Identifier: Apache-2.0
"""How long recipes take to load and hosts to plan, on one core: `make bench-plan`.

Prints the time for several sizes, so that a cost that grows faster than the number shows, and exits 1 when a limit of
the design is broken: 1 s for 1,000 recipes, 1 s for 1,000 hosts.
"""

from __future__ import annotations

import pathlib
import sys
import tempfile
import time

from ansible_collections.tensorless.fleet.plugins.module_utils._cards import from_facts
from ansible_collections.tensorless.fleet.plugins.module_utils._plan import plan_model
from ansible_collections.tensorless.fleet.plugins.module_utils._plan_types import Choice, HostFacts
from ansible_collections.tensorless.fleet.plugins.module_utils._recipe import load_directory, resolve

ROOT = pathlib.Path(__file__).resolve().parents[2]
SIZES = (100, 500, 1000, 2000)
LIMIT_S = 1.0  # for 1,000


def write_recipes(directory: pathlib.Path, count: int) -> None:
    """Copies of a released recipe under other names."""
    source = next((ROOT / "recipes").glob("*/*PN3-GGUF/p100.toml")).read_text(encoding="utf-8")
    for number in range(count):
        repo = f"org{number % 50}/Model-{number}-GGUF"
        text = source.replace("iamMrDuncan/Qwen3.8-27B-PN3-GGUF", repo).replace('"pn3"', f'"m{number}"')
        target = directory / repo / "p100.toml"
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text, encoding="utf-8")


def load(count: int) -> float:
    with tempfile.TemporaryDirectory() as name:
        directory = pathlib.Path(name)
        write_recipes(directory, count)
        start = time.process_time()
        catalog = load_directory(str(directory))
        seconds = time.process_time() - start
        if len(catalog.recipes) != count:
            raise SystemExit(f"loaded {len(catalog.recipes)} recipes, not {count}")
        return seconds


def plan(count: int) -> float:
    recipes, _revision = resolve(load_directory(str(ROOT / "recipes")), "pn3")
    card = {"name": "Tesla P100-PCIE-16GB", "compute_capability": "6.0", "memory_mib": 16269}
    facts = [
        {
            "nvidia_smi": {"found": True, "rc": 0},
            "driver_version": "580.105.08",
            "cards": [{**card, "index": index, "uuid": f"GPU-{host:08x}-{index:04x}"} for index in range(4)],
        }
        for host in range(count)
    ]
    start = time.process_time()
    hashes = set()
    for each in facts:
        host = HostFacts(gpus=from_facts(each), cpu_count=32, runtimes=("podman",))
        hashes.add(plan_model(recipes, host, Choice(cache="/var/lib/tensorless/hub")).plans[0]["plan_hash"])
    seconds = time.process_time() - start
    if len(hashes) != count:
        raise SystemExit(f"made {len(hashes)} different plans, not {count}")
    return seconds


def main() -> int:
    broken = 0
    for what, measure in (("load recipes", load), ("plan hosts", plan)):
        for count in SIZES:
            seconds = min(measure(count) for _try in range(3))
            print(f"{what:<13} {count:>5}: {seconds:6.3f} s, {seconds / count * 1000:.3f} ms each")
            broken += count == 1000 and seconds > LIMIT_S
    print("within the limits" if not broken else f"over the limit of {LIMIT_S:g} s for 1,000")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())

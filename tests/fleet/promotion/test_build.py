# SPDX-License-Identifier: Apache-2.0
"""The engine images, built by the playbook from their Containerfiles and pushed to the fleet's registry.

The bases are made here. Their `cmake` takes the place of the compiler: it puts finished programs where a build would,
those of `make engine-cpu` where TENSORLESS_ENGINE_BIN names their folder, else shell scripts. All other steps are real.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import tomllib

from engine.pn import convert, mix
from tests.fleet import wheels
from tests.fleet.fleet import RECIPES
from tests.fleet.hosts import Host
from tests.fleet.promotion.test_promote import PLAY, REGISTRY, ROOT, inside
from tests.fleet.server.rig import prepare

REPOSITORY = f"{REGISTRY}/engine-build-test"
# No namespaces of their own: the tests may run in a container that cannot give any.
UNPRIVILEGED = ("--isolation=chroot", "--network=host")
PROGRAMS = os.environ.get("TENSORLESS_ENGINE_BIN", "")
SUITE = os.environ.get("TENSORLESS_ENGINE_SUITE", "bookworm")  # whose C library those programs need
CMAKE = """#!/bin/sh
set -eu
[ "$1" = --build ] || exit 0
bin=$2/bin
mkdir -p "$bin"
while [ "$1" != --target ]; do shift; done
shift
for target; do
  if [ -d /prebuilt ]; then cp "/prebuilt/$target" "$bin/"; else
    printf '#!/bin/sh\\necho "%s: $*"\\n' "$target" > "$bin/$target"
  fi
  chmod 755 "$bin/$target"
done
if [ -d /prebuilt ]; then find /prebuilt -name '*.so' -exec cp {} "$bin/" \\;; fi
[ ! -e /fail ] || printf '#!/bin/sh\\necho "1 failed"; exit 1\\n' > "$bin/test-pn-format"
"""
pytestmark = [pytest.mark.fleet, pytest.mark.soak]


def base(folder: Path, name: str, *commands: str) -> str:
    """A base image in the registry, by digest."""
    folder.mkdir()
    (folder / "cmake").write_text(CMAKE)
    lines = [
        f"FROM localhost/testhost:{SUITE}",
        "COPY cmake /usr/local/bin/cmake",
        # What a compiler would need is not fetched; the programs' own library is this machine's.
        "RUN chmod 755 /usr/local/bin/cmake && ln -s /bin/true /usr/local/bin/apt-get",
        *commands,
    ]
    gomp = Path("/usr/lib/x86_64-linux-gnu/libgomp.so.1")
    if gomp.exists():
        shutil.copy(gomp, folder / gomp.name)
        lines.append(f"COPY {gomp.name} {gomp}")
    (folder / "Containerfile").write_text("\n".join(lines) + "\n")
    image = f"{REGISTRY}/engine-base:{name}"
    for words in (
        ["build", "-q", *UNPRIVILEGED, "-t", image, str(folder)],
        ["push", "-q", "--tls-verify=false", "--digestfile", str(folder / "digest"), image],
    ):
        done = inside("podman", *words)
        assert done.returncode == 0, done.stderr
    return f"{REGISTRY}/engine-base@{(folder / 'digest').read_text().strip()}"


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """What a builder's checkout holds, with a source that is only as much as the steps ask for."""
    found = tmp_path / "tree"
    for name in ("containers", "LICENSES"):
        shutil.copytree(ROOT / name, found / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("LICENSE", ".dockerignore", "engine/build.sh"):
        (found / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, found / name)
    source = found / ".build/engine/source"
    (source / "licenses").mkdir(parents=True)
    (source / "tests").mkdir()
    (source / "PROVENANCE.md").write_text("# Provenance\n")
    (source / "LICENSE").write_text("MIT\n")
    (source / "licenses/LICENSE-other").write_text("other\n")
    (source / "tests/pn-golden.txt").write_text((ROOT / "engine/pn/golden.txt").read_text())
    return found


def build(tree: Path, **values: object) -> subprocess.CompletedProcess[str]:
    inventory = tree.parent / "inventory.yml"
    inventory.write_text(json.dumps({"engine_builder": {"hosts": {"builder": {"ansible_connection": "local"}}}}))
    # What `cmake` puts comes from outside of the build, so an earlier build's layer may hold other programs.
    arguments = [*UNPRIVILEGED, "--no-cache", "--tls-verify=false"]
    if PROGRAMS:
        arguments += ["-v", f"{Path(PROGRAMS).resolve()}:/prebuilt:ro"]
    given = {
        "engine_repository": REPOSITORY, "engine_tree": str(tree), "engine_push_args": ["--tls-verify=false"],
        "engine_build_args": arguments, "ansible_python_interpreter": sys.executable, **values,
    }  # fmt: skip
    return inside(PLAY, "-i", str(inventory), "playbooks/engine_build.yml", "-e", json.dumps(given))


def pin(tree: Path, **bases: str) -> None:
    pins = tree / "containers/pins.toml"
    text = pins.read_text()
    for key, value in bases.items():
        text = text.replace(f'{key} = ""', f'{key} = "{value}"')
    pins.write_text(text)


@pytest.mark.parametrize("arch", ["cpu", "sm60"])
def test_image_has_the_documented_layout(tree: Path, tmp_path: Path, arch: str) -> None:
    image = base(tmp_path / "base", "good")
    pin(tree, **({"base": image} if arch == "cpu" else {"devel": image, "runtime": image}))
    done = build(tree, engine_version="9.3.0", engine_candidate=2, engine_arch=arch)
    assert done.returncode == 0, done.stdout[-3000:]
    name = f"{REPOSITORY}:9.3.0-rc2-{arch}"
    look = inside("podman", "image", "inspect", name)
    config = json.loads(look.stdout)[0]["Config"]
    labels = config["Labels"]
    assert labels["org.opencontainers.image.version"] == f"9.3.0-rc2-{arch}"
    assert labels["org.tensorless.pn.cpu"] == "exact"
    assert ("GGML_CUDA_PN_GEMV" in labels["org.tensorless.switches"]) == (arch == "sm60")
    assert config["Entrypoint"] == ["/opt/tensorless/bin/llama-server"]
    script = "cd /opt/tensorless && sha256sum -c --quiet SHA256SUMS && cat VERSION PROVENANCE.md && find . -type f"
    limits = ("--ulimit", "nofile=10000:10000", "--ulimit", "nproc=30000:30000", "--privileged", "--pids-limit=0")
    ran = inside("podman", "run", "--rm", "--network=none", *limits, "--entrypoint", "sh", name, "-c", script)
    assert ran.returncode == 0, ran.stderr
    for part in (f"9.3.0-rc2-{arch}", "# Provenance", "./LICENSES/engine/LICENSE", "./NOTICE", "./bin/llama-quantize"):
        assert part in ran.stdout
    assert f"{name} is {REPOSITORY}@sha256:" in done.stdout


def test_decoding_error_fails_the_build(tree: Path, tmp_path: Path) -> None:
    pin(tree, base=base(tmp_path / "base", "bad", "RUN touch /fail"))
    done = build(tree, engine_version="9.4.0", engine_candidate=1, engine_arch="cpu")
    assert done.returncode != 0
    assert "1 failed" in done.stdout
    assert inside("podman", "pull", "-q", "--tls-verify=false", f"{REPOSITORY}:9.4.0-rc1-cpu").returncode != 0


@pytest.mark.skipif(not PROGRAMS, reason="TENSORLESS_ENGINE_BIN names no folder with programs: make engine-cpu first")
def test_product_serves_a_pn_model_with_the_image(tree: Path, tmp_path: Path) -> None:
    pin(tree, base=base(tmp_path / "base", "serve"))
    done = build(tree, engine_version="9.5.0", engine_candidate=1, engine_arch="cpu")
    assert done.returncode == 0, done.stdout[-3000:]
    digest = re.findall(rf"{re.escape(REPOSITORY)}@(sha256:[0-9a-f]{{64}})", done.stdout)[-1]
    plain, model = tmp_path / "f32.gguf", tmp_path / "pn.gguf"
    convert.dequantize(wheels.model_file(), plain)
    assert convert.quantize(plain, model, mix.load("pn4t"))["pn4t"] > 100
    with model.open("rb") as stream:
        sha = hashlib.file_digest(stream, "sha256").hexdigest()

    Host("engine-pn", "", "").remove()  # of a run that was killed
    try:
        rig = prepare("engine-pn", SUITE, "10.213.47.11", ["podman"])
        recipe = tomllib.loads(next(RECIPES.glob("*/*/p100.toml")).read_text())
        recipe["engine"]["image"] = f"{REPOSITORY}@{digest}"
        recipe["model"] |= {"sha256": sha, "size_bytes": model.stat().st_size}
        plan = rig.plans(recipe)[0]
        rig.sh(f"mkdir -p $(dirname {plan['download']['blob']})")
        copied = inside("podman", "cp", str(model), f"engine-pn:{plan['download']['blob']}")
        assert copied.returncode == 0, copied.stderr
        rig.sh(f"chmod 644 {plan['download']['blob']}")
        rig.host.exec("podman", "pull", "-q", recipe["engine"]["image"])
        rig.serve(plan, health_timeout=600)
        asked = json.dumps({"prompt": "The capital of France is", "n_predict": 8, "temperature": 0})
        answer = rig.sh(f"curl -s http://127.0.0.1:8080/completion -d '{asked}'")
        assert "Paris" in json.loads(answer)["content"]
    finally:
        Host("engine-pn", "", "").remove()

# SPDX-License-Identifier: Apache-2.0
"""The engine image of the tests: a real llama-server (CPU) laid out as the documented engine image.

The image is written as an OCI layout by hand, with fixed times and sorted names, so the same inputs give the same
digest: hosts that have it already keep it, and a repeated run changes nothing.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
import pathlib
import re
import shutil
import tarfile
import tempfile
import zipfile

from tests.fleet import wheels
from tests.fleet.machine import CACHE, FleetError, lock, run, say

NAME = "engine"
SWITCHES = ("GGML_CUDA_FATTN_SM60", "GGML_CUDA_MMV_SM60")  # what the label says that this engine knows
LABELS = {
    "org.opencontainers.image.title": "test engine (llama-server on the CPU)",
    "org.opencontainers.image.version": "0.0.0-test",
    "org.opencontainers.image.licenses": "MIT",
    "org.tensorless.switches": " ".join(SWITCHES),
}
_BIN = "opt/tensorless/bin"
_TOOLS = ("/bin/sh", "/usr/bin/sha256sum", "/bin/cat", "/bin/ls", "/bin/sleep", "/usr/bin/env", "/bin/true")


def _libraries(paths: list[str], extra: str) -> dict[str, bytes]:
    """Path in the image -> content, for every shared library that the programs need from this machine."""
    found: dict[str, bytes] = {}
    for path in paths:
        text = run(["ldd", path], env={**os.environ, "LD_LIBRARY_PATH": extra}).stdout
        for library in re.findall(r"(/[^\s]+)\s+\(0x", text):
            if not library.startswith(extra):
                found[library.lstrip("/")] = pathlib.Path(library).read_bytes()
    return found


def _files() -> dict[str, bytes]:
    with tempfile.TemporaryDirectory() as scratch:
        with zipfile.ZipFile(wheels.fetch(wheels.ENGINE)) as archive:
            for name in archive.namelist():
                base = os.path.basename(name)
                # Each library is there under three names; the programs ask for NAME.so.0 (and .so.1 of the loader).
                if "/bin/" in name and not re.search(r"\.so\.\d+\.\d+", base) and base != "ggml-rpc-server":
                    target = pathlib.Path(scratch, base)
                    target.write_bytes(archive.read(name))
                    target.chmod(0o755)
        needed = run(["ldd", f"{scratch}/llama-server"], env={**os.environ, "LD_LIBRARY_PATH": scratch}).stdout
        own = {"llama-server", *re.findall(rf"{re.escape(scratch)}/(\S+)", needed)}
        files = _libraries([f"{scratch}/llama-server", *_TOOLS], scratch)
        files |= {f"{_BIN}/{name}": pathlib.Path(scratch, name).read_bytes() for name in own}
    files |= {tool.lstrip("/"): pathlib.Path(tool).read_bytes() for tool in _TOOLS}
    sums = {name: data for name, data in files.items() if name.startswith("opt/tensorless/")}
    sums["opt/tensorless/VERSION"] = files["opt/tensorless/VERSION"] = b"0.0.0-test\n"
    listing = [f"{hashlib.sha256(sums[n]).hexdigest()}  {n.removeprefix('opt/tensorless/')}\n" for n in sorted(sums)]
    files["opt/tensorless/SHA256SUMS"] = "".join(listing).encode()
    files["etc/passwd"] = b"root:x:0:0:root:/root:/bin/sh\n"
    return files


def _layer(files: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    folders = sorted({str(p) for name in files for p in pathlib.PurePath(name).parents if str(p) != "."} | {"tmp"})
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.GNU_FORMAT) as tar:
        for name in [*folders, *sorted(files)]:
            info = tarfile.TarInfo(name)
            if name in files:
                info.size, info.mode = len(files[name]), 0o755
                tar.addfile(info, io.BytesIO(files[name]))
            else:
                info.type, info.mode = tarfile.DIRTYPE, 0o1777 if name == "tmp" else 0o755
                tar.addfile(info)
    return buffer.getvalue()


def _digest(data: bytes) -> str:
    return "sha256:" + hashlib.sha256(data).hexdigest()


def _layout(folder: pathlib.Path, labels: dict[str, str]) -> None:
    """Writes the OCI layout."""
    layer = _layer(_files())
    packed = gzip.compress(layer, compresslevel=1, mtime=0)
    config = {
        "created": "2026-01-01T00:00:00Z",
        "architecture": "amd64",
        "os": "linux",
        "config": {
            "Entrypoint": [f"/{_BIN}/llama-server"],
            "Env": [f"PATH=/{_BIN}:/usr/bin:/bin", f"LD_LIBRARY_PATH=/{_BIN}"],
            "ExposedPorts": {"8080/tcp": {}},
            "Labels": labels,
        },
        "rootfs": {"type": "layers", "diff_ids": [_digest(layer)]},
        "history": [{"created": "2026-01-01T00:00:00Z", "created_by": "tests/fleet/engine.py"}],
    }
    blobs = folder / "blobs" / "sha256"
    blobs.mkdir(parents=True)

    def put(data: bytes, kind: str) -> dict[str, object]:
        (blobs / _digest(data).removeprefix("sha256:")).write_bytes(data)
        return {"mediaType": f"application/vnd.oci.image.{kind}", "digest": _digest(data), "size": len(data)}

    manifest = {
        "schemaVersion": 2,
        "mediaType": "application/vnd.oci.image.manifest.v1+json",
        "config": put(json.dumps(config).encode(), "config.v1+json"),
        "layers": [put(packed, "layer.v1.tar+gzip")],
    }
    entry = put(json.dumps(manifest).encode(), "manifest.v1+json")
    (folder / "index.json").write_text(json.dumps({"schemaVersion": 2, "manifests": [entry]}))
    (folder / "oci-layout").write_text('{"imageLayoutVersion": "1.0.0"}')


def layout(version: str = "0.0.0-test", labels: dict[str, str] | None = None) -> tuple[pathlib.Path, str]:
    """The cached OCI layout of the engine image and its digest. Another version gives another digest."""
    wanted = {**LABELS, "org.opencontainers.image.version": version, **(labels or {})}
    recipe = repr((wheels.ENGINE, wanted, pathlib.Path(__file__).read_bytes()))
    folder = CACHE / "engine" / hashlib.sha256(recipe.encode()).hexdigest()[:16]
    with lock("engine"):
        if not (folder / "oci-layout").exists():
            say(f"making the engine image {version}")
            shutil.rmtree(folder, ignore_errors=True)
            _layout(folder, wanted)
    return folder, json.loads((folder / "index.json").read_text())["manifests"][0]["digest"]


def push(registry: str, version: str = "0.0.0-test", labels: dict[str, str] | None = None) -> str:
    """Pushes the image and returns it by digest, as recipes name it."""
    folder, digest = layout(version, labels)
    target = f"{registry}/{NAME}:{version}"
    digest_file = folder / "pushed"
    run([
        "skopeo", "copy", "-q", "--preserve-digests", "--dest-tls-verify=false", "--digestfile", str(digest_file),
        f"oci:{folder}", f"docker://{target}",
    ])  # fmt: skip
    pushed = digest_file.read_text().strip()
    if pushed != digest:
        raise FleetError(f"the registry names {target} {pushed}, the image is {digest}")
    return f"{registry}/{NAME}@{digest}"

# SPDX-License-Identifier: Apache-2.0
"""The proof that a container gets its card: one of the host's own shell, with nvidia-smi from the runtime in it.

No image is pulled for that: the shell and the C library of the host make one, which is removed afterwards.
Private to the collection: may change at any time.
"""

from __future__ import annotations

import os
import re
import tarfile
import tempfile
from collections.abc import Sequence
from typing import Optional

from ansible_collections.tensorless.fleet.plugins.module_utils._host import Run

IMAGE = "localhost/tensorless-probe:1"
_NVIDIA = re.compile(r"/lib(?:nvidia|cuda)")


def _libraries(run: Run, programs: Sequence[str]) -> list[str]:
    found: dict[str, None] = {}
    for program in programs:
        rc, out, _err = run(["ldd", program])
        for path in re.findall(r"(/\S+\.so[\S]*)", out) if rc == 0 else []:
            if not _NVIDIA.search(path):
                found[path] = None
    return list(found)


def _image(run: Run, runtime: str) -> Optional[str]:
    """Makes the probe's image; returns what went wrong."""
    shell = os.path.realpath("/bin/sh")
    with tempfile.TemporaryDirectory(prefix="tensorless-") as folder:
        archive = os.path.join(folder, "probe.tar")
        with tarfile.open(archive, "w") as tar:
            tar.add(shell, "bin/sh", recursive=False)
            for path in _libraries(run, [shell, "/usr/bin/nvidia-smi"]):
                tar.add(os.path.realpath(path), path.lstrip("/"), recursive=False)
            for name in ("etc", "tmp", "usr/bin", "proc", "dev", "sys"):
                item = tarfile.TarInfo(name)
                item.type, item.mode = tarfile.DIRTYPE, 0o755
                tar.addfile(item)
        rc, _out, err = run([runtime, "import", archive, IMAGE])
    return None if rc == 0 else f"{runtime} could not import a small image for the probe: {err.strip()[-300:]}"


def device_arguments(runtime: str, uuid: str) -> list[str]:
    return ["--device", f"nvidia.com/gpu={uuid}"] if runtime == "podman" else ["--gpus", f"device={uuid}"]


def probe(run: Run, runtime: str, uuids: Sequence[str]) -> dict[str, Optional[str]]:
    """For each card: None when a container got it and saw it under its UUID, else the runtime's own words."""
    trouble = _image(run, runtime)
    if trouble:
        return dict.fromkeys(uuids, trouble)
    result: dict[str, Optional[str]] = {}
    for uuid in uuids:
        path = "LD_LIBRARY_PATH=/usr/lib/x86_64-linux-gnu:/usr/lib64"
        argv = [runtime, "run", "--rm", "--network", "none", "-e", path, *device_arguments(runtime, uuid), IMAGE]
        rc, out, err = run([*argv, "/bin/sh", "-c", "nvidia-smi -L"])
        if rc in (0, 14) and uuid in out:
            result[uuid] = None
        else:
            words = " ".join((err.strip() or out.strip() or "no output").split())
            result[uuid] = f"status {rc}: {words[-600:]}"
    run([runtime, "rmi", IMAGE])
    return result


def explain(words: str, podman: tuple[int, ...] = ()) -> str:
    """The cause behind a runtime's words, as far as the words alone give it; empty where they do not."""
    if "unresolvable CDI devices" in words:
        return "no readable CDI spec names this card"
    if "additionalGids" in words:
        return "this podman is older than the spec: generate it without additional groups"
    if "error stat'ing file" in words or "No such file or directory: OCI runtime attempted" in words:
        if "nvidia-smi" in words:
            return "the runtime put no driver into the container"
        return "the CDI spec is of another driver version: a file that it names is gone"
    if 'could not select device driver ""' in words:
        return "dockerd did not find the NVIDIA hook when it started"
    if 'could not select device driver "cdi"' in words:
        return "CDI is not enabled in dockerd"
    if "unknown device" in words:
        return "the card with this UUID is not here (any more)"
    if "version mismatch" in words:
        return "the driver's libraries are newer than its loaded module: reboot"
    if "Insufficient Permissions" in words:
        return "the container may not open the card: SELinux, or the rights of /dev/nvidia*"
    if "Unknown Error" in words:
        return "the container's access to the card was taken away"
    if "no such file or directory" in words.lower() and podman and podman < (4, 1):
        return "this podman is too old for CDI"
    return ""

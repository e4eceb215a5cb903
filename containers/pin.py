# SPDX-License-Identifier: Apache-2.0
"""Pins the base images: asks the registry for each tag's digest and writes containers/pins.toml.

Run once by a person with access to docker.io: ``python containers/pin.py [--tool podman|docker|skopeo]``. Only a digest
that the registry itself gave is written; what cannot be asked stays as it was, and the exit status is 1.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

PINS = Path(__file__).with_name("pins.toml")
TAGS = {
    ("cuda", "devel"): "docker.io/nvidia/cuda:12.6.3-devel-ubuntu24.04",
    ("cuda", "runtime"): "docker.io/nvidia/cuda:12.6.3-runtime-ubuntu24.04",
    ("cpu", "base"): "docker.io/library/debian:12-slim",
}


def commands(tool: str, tag: str) -> list[list[str]]:
    """What to run to learn a tag's digest; the last one prints it."""
    if tool == "skopeo":
        return [["skopeo", "inspect", "--format", "{{.Digest}}", f"docker://{tag}"]]
    return [[tool, "pull", "-q", tag], [tool, "image", "inspect", "--format", "{{json .RepoDigests}}", tag]]


def digest(tool: str, tag: str) -> str:
    """`name@sha256:...` of a tag; RuntimeError with the tool's words."""
    out = ""
    for command in commands(tool, tag):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()[-300:]}")
        out = done.stdout.strip()
    name = tag.rsplit(":", 1)[0]
    found = re.search(r"sha256:[0-9a-f]{64}", out if tool == "skopeo" else " ".join(json.loads(out)))
    if not found:
        raise RuntimeError(f"{tag}: {tool} gave no digest: {out!r}")
    return f"{name}@{found[0]}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tool", choices=["podman", "docker", "skopeo"])
    tool = parser.parse_args().tool or next((t for t in ("skopeo", "podman", "docker") if shutil.which(t)), None)
    if tool is None:
        print("pin: needed: skopeo, podman or docker", file=sys.stderr)
        return 1
    text, failed = PINS.read_text(), False
    for (section, key), tag in TAGS.items():
        try:
            value = digest(tool, tag)
        except RuntimeError as error:
            print(f"pin: {error}", file=sys.stderr)
            failed = True
            continue
        text = re.sub(rf'(\[{section}\][^\[]*?\n{key} = )"[^"]*"', rf'\g<1>"{value}"', text)
        print(f"{tag} is {value}")
    PINS.write_text(text)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())

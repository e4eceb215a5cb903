# SPDX-License-Identifier: Apache-2.0
"""CDI specs: what runtimes see in them, whether they fit the loaded driver, and who should own the file.

Runtimes read /etc/cdi and then /var/run/cdi; a device of the latter hides the same one of the former, and a device that
two files of one folder name is dropped. So a spec is judged by what is effective, not by a file's age.
Private to the collection: may change at any time.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Optional

from ansible_collections.tensorless.fleet.plugins.module_utils._host import Files

LOW, HIGH = "/etc/cdi", "/var/run/cdi"
FOLDERS = (LOW, HIGH)  # in rising priority
OURS, TOOLKIT = f"{LOW}/nvidia.yaml", f"{HIGH}/nvidia.yaml"
KIND = "nvidia.com/gpu"
GIDS_FLAG = "no-additional-gids-for-device-nodes"

_LINE_NAME = re.compile(r"^\s*-?\s*name:\s*[\"']?([^\"'\s#]+)[\"']?\s*$", re.MULTILINE)
_LINE_PATH = re.compile(r"^\s*-?\s*hostPath:\s*[\"']?([^\"'\s#]+)[\"']?\s*$", re.MULTILINE)
_LINE_KIND = re.compile(r"^\s*kind:\s*[\"']?([^\"'\s#]+)", re.MULTILINE)
_LINE_VERSION = re.compile(r"^\s*cdiVersion:\s*[\"']?([0-9.]+)", re.MULTILINE)
_NODE = re.compile(r"^\s*-?\s*path:\s*[\"']?(/dev/[^\"'\s#]+)[\"']?\s*$", re.MULTILINE)
_DRIVER = re.compile(r"(?:\.so\.|--host-driver-version[= ])(\d{3}\.\d{1,3}(?:\.\d{1,3})?)(?![\w.])", re.ASCII)


@dataclass
class Spec:
    """One file: which devices it offers, what it needs from the host, and for which driver it was made."""

    path: str
    kind: str = ""
    cdi_version: str = ""
    devices: tuple[str, ...] = ()
    host_paths: tuple[str, ...] = ()
    nodes: tuple[str, ...] = ()
    drivers: tuple[str, ...] = ()
    gids: bool = False
    problem: Optional[str] = None

    @property
    def ours(self) -> bool:
        """Whether it speaks of NVIDIA cards; specs of other vendors are not our business."""
        return self.kind == KIND or (self.problem is not None and "nvidia" in self.path)


@dataclass
class View:
    """What a runtime makes of all files: device name to the file that it comes from, and the names that it drops."""

    specs: list[Spec] = field(default_factory=list)
    devices: dict[str, str] = field(default_factory=dict)
    conflicts: dict[str, tuple[str, ...]] = field(default_factory=dict)
    ignored: list[str] = field(default_factory=list)


def _walk(value: Any, key: str) -> list[Any]:
    found: list[Any] = []
    if isinstance(value, dict):
        for name, item in value.items():
            found += [item] if name == key else []
            found += _walk(item, key)
    elif isinstance(value, list):
        for item in value:
            found += _walk(item, key)
    return found


def parse(path: str, text: str) -> Spec:
    """A spec file, YAML as nvidia-ctk writes it or JSON. Managed hosts have no YAML reader, and need none for this."""
    drivers = tuple(sorted(set(_DRIVER.findall(text))))
    if text.lstrip().startswith("{"):
        try:
            data = json.loads(text)
        except ValueError as exc:
            return Spec(path, problem=f"broken JSON: {exc}")
        if not isinstance(data, dict):
            return Spec(path, problem="not a CDI spec")
        devices = data.get("devices") or []
        names = tuple(str(item["name"]) for item in devices if isinstance(item, dict) and "name" in item)
        paths = tuple(str(item) for item in _walk(data, "hostPath"))
        nodes = tuple(str(node.get("path")) for nodes in _walk(data, "deviceNodes") for node in nodes or [])
        version = str(data.get("cdiVersion", ""))
        gids = bool(_walk(data, "additionalGids"))
        return Spec(path, str(data.get("kind", "")), version, names, paths, nodes, drivers, gids)
    kind, version_found = _LINE_KIND.search(text), _LINE_VERSION.search(text)
    if kind is None or version_found is None:
        return Spec(path, problem="not a CDI spec (no kind or no cdiVersion)")
    return Spec(
        path,
        kind.group(1),
        version_found.group(1),
        tuple(_LINE_NAME.findall(text)),
        tuple(_LINE_PATH.findall(text)),
        tuple(_NODE.findall(text)),
        drivers,
        "additionalGids" in text,
    )


def view(files: Files) -> View:
    """All specs of both folders, and what is effective."""
    result = View()
    for folder in FOLDERS:
        here: dict[str, list[str]] = {}
        for name in files.names(folder):
            path = f"{folder}/{name}"
            if not name.endswith((".yaml", ".json")):
                if name.endswith(".yml"):
                    result.ignored.append(path)
                continue
            text = files.read(path)
            if text is None:
                continue
            spec = parse(path, text)
            if not spec.ours:
                continue
            result.specs.append(spec)
            for device in dict.fromkeys(spec.devices):
                here.setdefault(device, []).append(path)
        for device, paths in here.items():
            if len(paths) > 1:
                result.conflicts[device] = tuple(paths)
                result.devices.pop(device, None)
            else:
                result.devices[device] = paths[0]
    return result


def problems(
    seen: View, cards: Sequence[Mapping[str, Any]], driver: Optional[str], files: Files, old_podman: bool = False
) -> list[str]:
    """Why the effective spec does not serve; empty means fresh: every live card, existing paths, the loaded version."""
    found: list[str] = []
    for spec in seen.specs:
        if spec.problem:
            found.append(f"{spec.path}: {spec.problem}")
    for device, paths in seen.conflicts.items():
        found.append(f"{KIND}={device} is in {' and in '.join(paths)}: runtimes drop it")
    for path in seen.ignored:
        found.append(f"{path} is not read by runtimes: the name has to end in .yaml or .json")
    if not seen.specs:
        return [*found, f"there is no CDI spec for NVIDIA cards in {LOW} or {HIGH}"]
    effective = set(seen.devices.values())
    for card in cards:
        missing = [name for name in (str(card["index"]), str(card["uuid"])) if name not in seen.devices]
        if missing:
            found.append(f"card {card['index']} is missing as {' and '.join(missing)}")
    live = {str(card["uuid"]) for card in cards}
    gone = sorted(name for name in seen.devices if name.startswith("GPU-") and name not in live)
    if gone and cards:
        found.append(f"the spec names cards that are not here: {', '.join(gone)}")
    for spec in seen.specs:
        if spec.path not in effective:
            found.append(f"{spec.path} is hidden by another spec")
            continue
        other = [version for version in spec.drivers if driver is not None and version != driver]
        if other:
            found.append(f"{spec.path} was made for driver {', '.join(other)}, but {driver} is loaded")
        absent = [path for path in spec.host_paths if not files.exists(path)]
        if absent:
            more = f" and {len(absent) - 1} more" if len(absent) > 1 else ""
            found.append(f"{spec.path} needs {absent[0]}{more}, which does not exist")
        if old_podman and spec.gids:
            found.append(f"{spec.path} has additionalGids, which this podman does not know")
    if len(effective) > 1:
        found.append(f"two files serve the cards: {' and '.join(sorted(effective))}")
    return found


def version_tuple(text: str) -> tuple[int, ...]:
    found = re.search(r"(\d+(?:\.\d+)+)", text, re.ASCII)
    return tuple(int(part) for part in found.group(1).split(".")) if found else ()


def choose_owner(wanted: str, toolkit: tuple[int, ...], units: bool, smi_rc: Optional[int]) -> tuple[str, str]:
    """Who writes the spec, toolkit or tensorless, and why.

    The toolkit's refresh service works where its unit finds the module under each of its names, is tried again when the
    card is not ready yet, and does not wait for the end of the boot: 1.18.2, and from 1.19.1 on where `nvidia-smi -L`
    ends well, because its unit runs that first.
    """
    if wanted != "auto":
        if wanted == "toolkit" and not units:
            return "tensorless", "the toolkit has no refresh service"
        return wanted, "as configured"
    if not units:
        return "tensorless", "the toolkit has no refresh service"
    if toolkit[:3] < (1, 18, 2):
        return "tensorless", "the refresh service of this toolkit misses modules and gives up when the card is late"
    if toolkit[:3] == (1, 19, 0):
        return "tensorless", "the refresh service of this toolkit waits for the end of the boot"
    if toolkit[:3] >= (1, 19, 1) and smi_rc not in (0, None):
        return (
            "tensorless",
            f"the refresh service of this toolkit needs nvidia-smi to end with 0, and it ends with {smi_rc}",
        )
    return "toolkit", "the toolkit's refresh service works"

# SPDX-License-Identifier: Apache-2.0
"""Which drivers may serve the cards: branches, flavours, and what a package's name and version say about both.

Private to the collection: may change at any time.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Optional

from ansible_collections.tensorless.fleet.plugins.module_utils._gpu_bus import branch
from ansible_collections.tensorless.fleet.plugins.module_utils._host import Files, Run

OLDEST, NEWEST = 525, 580
RANGE = f"a driver from 525.60.13 up to the R{NEWEST} branch"


def old_cards(facts: Mapping[str, Any]) -> bool:
    """Whether a card of this host is older than Turing: it needs the proprietary module and at most R580."""
    for card in [*facts["cards"], *facts["pci_cards"]]:
        major = (card["compute_capability"] or "").partition(".")[0]
        if card.get("driver") != "vfio-pci" and major.isdigit() and int(major) < 7:
            return True
    return False


def verdict(facts: Mapping[str, Any]) -> Optional[str]:
    """What is wrong with the loaded driver and what to do, or None. Takes the facts of _gpu.read_gpus."""
    version, reasons = facts["driver_version"], "; ".join(facts["reasons"])
    if facts["state"] == "absent":
        return f"{reasons or 'no NVIDIA driver is installed'}: install {RANGE}, proprietary kernel module, and reboot"
    if facts["reboot_required"]:
        return (
            f"the installed driver {facts['installed_version'] or ''} is not the loaded one "
            f"({facts['loaded_version'] or 'none'}): reboot"
        ).replace("  ", " ")
    major = branch(version)
    if major is not None and not OLDEST <= major <= NEWEST and (old_cards(facts) or not facts["cards"]):
        side = "newer than the last branch that supports Pascal cards" if major > NEWEST else "too old"
        return f"the NVIDIA driver {version} is {side}: install {RANGE}, and reboot"
    if facts["kernel_module"] == "open" and (old_cards(facts) or not facts["cards"]):
        return (
            f"the NVIDIA driver {version} has the open kernel module, which does not drive Pascal cards: "
            "install the proprietary module of the same branch, and reboot"
        )
    if facts["state"] == "failed":
        return reasons or "nvidia-smi lists no card"
    return None


_OPEN = re.compile(r"(?:^|[-_:@])open(?:$|[-_:@])")
_DRIVER = re.compile(
    r"^(?:cuda-drivers|lib(?:nvidia|cuda\d|cudadebugger|nvcuvid|xnvctrl|nvoptix|nvsdm)"
    r"|lib(?:egl|gl1?|gles|glx|vdpau)-nvidia|nvidia-(?!container|cuda-|docker)"
    r"|firmware-nvidia"
    r"|xserver-xorg-video-nvidia|linux-(?:modules|objects|signatures)-nvidia|kmod-nvidia|akmod-nvidia"
    r"|xorg-x11-drv-nvidia"
    r"|dkms-nvidia)"
)


def is_driver_package(name: str) -> bool:
    """Whether a package is a part of the driver (not of the container toolkit, whose versions are 1.x)."""
    return bool(_DRIVER.match(name)) and not name.startswith("libnvidia-container")


# Tools that distributions package on their own, at versions of their own: Ubuntu has nvidia-settings 510 beside every
# driver, and Debian builds each of them from its own source. They work with any driver.
_TOOL = re.compile(r"^(?:nvidia-(?:settings|modprobe|persistenced|xconfig|installer)|libxnvctrl)(?:[-\d].*)?$")


def package_branch(name: str, version: str) -> Optional[int]:
    """The driver branch of a package. Ubuntu's prebuilt modules have the kernel's version and a branch in the name.

    None where the version is one of its own: of CUDA (12.4), a date (2025.3), or without a dot.
    """
    prebuilt = re.match(r"^linux-(?:modules|objects|signatures)-nvidia-(\d{3})\b", name)
    number = int(prebuilt.group(1)) if prebuilt else branch(version)
    return number if number is not None and 100 <= number < 2000 else None


def is_tool(name: str) -> bool:
    """Whether a package is a helper that need not be of the driver's branch; the ceiling is for it as well."""
    return bool(_TOOL.match(name))


def follows_kernel(name: str) -> bool:
    """Whether a package brings the prebuilt module for each new kernel. On hold, the next kernel would have none.

    Its branch stands in its name, and it goes no further than the driver's other packages, which are on hold.
    """
    return bool(re.match(r"^linux-modules-nvidia-\d{3}(?:-server)?-(?!\d|server-\d)", name))


def outside(name: str, version: str) -> bool:
    """Whether a package is of a branch that may not be on the host."""
    number = package_branch(name, version)
    return number is not None and not (number <= NEWEST if is_tool(name) else OLDEST <= number <= NEWEST)


def is_open_package(name: str) -> bool:
    """Whether a package or stream is of the open flavour: the word stands alone in it, wherever it stands."""
    return bool(_OPEN.search(name))


_LATEST = re.compile(r"(?:^|[:-])latest(?:$|-)")


def name_problem(name: str, old_cards: bool = True) -> Optional[str]:
    """Why a package or a module stream (nvidia-driver:580-dkms) must not be asked for by this name, or None."""
    if old_cards and is_open_package(name):
        return "it is of the open kernel module, which does not drive Pascal cards"
    package, _colon, stream = name.partition(":")
    if stream:
        number = re.match(r"^(\d{3})(?:-dkms)?$", stream)
        if number is None:
            return f"the stream {stream} follows the newest driver: take {NEWEST}-dkms"
        if not OLDEST <= int(number.group(1)) <= NEWEST:
            return f"the stream {stream} is outside R{OLDEST} to R{NEWEST}"
        return None
    if package in ("cuda", "cuda-drivers", "nvidia-open", "nvidia-driver-latest", "nvidia-driver-latest-dkms"):
        return f"it follows the newest driver, above R{NEWEST}: name a branch"
    if _LATEST.search(package) and not package.startswith("kmod-nvidia-latest"):
        # The package of the stream 580-dkms is called kmod-nvidia-latest-dkms; there the version decides.
        return f"it follows the newest driver, above R{NEWEST}: name a branch"
    number = re.search(r"-(\d{3})(?:xx)?(?:-|$)", package)
    if number and is_driver_package(package) and not OLDEST <= int(number.group(1)) <= NEWEST:
        return f"its branch is outside R{OLDEST} to R{NEWEST}"
    return None


def dkms_problems(run: Run, kernels: Sequence[str], running: str, version: Optional[str] = None) -> list[str]:
    """Kernels for which dkms has not installed the driver: the running one and the newest installed one.

    version: of the driver that is installed; a module of another version that dkms still keeps does not count.
    """
    rc, out, _err = run(["dkms", "status"])
    # nvidia/580.95.05, 6.8.0-90-generic, x86_64: installed; before dkms 3 a comma stands in the slash's place.
    rows = re.findall(r"^(nvidia[\w-]*)[/,] ?([\d.]+)(?:, (\S+), \S+)?: (.*)$", out, re.MULTILINE)
    if rc != 0 or not rows:
        return []  # no dkms: prebuilt modules, or none of the driver's
    if version is not None and any(row[1] == version for row in rows):
        rows = [row for row in rows if row[1] == version]
    built = {row[2] for row in rows if row[3].startswith("installed")}
    newest = max(kernels, key=_kernel_key, default=running)
    return [f"dkms has no module for kernel {name}" for name in dict.fromkeys([running, newest]) if name not in built]


def unbuilt(run: Run, files: Files, running: str, version: Optional[str]) -> list[str]:
    """Kernels that this host may boot without a module of the driver, in words: not built, or not installed."""
    names = kernels(files)
    found = dkms_problems(run, names, running, version)
    newest = max(names, key=_kernel_key, default=running)

    def has(name: str) -> bool:
        listed = files.read(f"/lib/modules/{name}/modules.dep") or ""
        return re.search(r"(?:^|/)nvidia(?:-current)?\.ko\b", listed, re.MULTILINE) is not None

    # Without dkms (prebuilt modules, the runfile) the list of modules tells, where it knows the running kernel's.
    if not found and has(running) and not has(newest):
        return [f"there is no module of the driver for kernel {newest}"]
    return found


def kernels(files: Files) -> list[str]:
    """The kernels that this host may boot. A removed one may leave its folder, with nothing but old modules in it."""
    folder = "/lib/modules"
    return [name for name in files.names(folder) if files.exists(f"{folder}/{name}/kernel")]


def _kernel_key(name: str) -> list[tuple[int, str]]:
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"[.\-+_]", name)]

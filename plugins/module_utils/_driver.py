# SPDX-License-Identifier: Apache-2.0
"""Which drivers may serve the cards: branches, flavours, and what a package's name and version say about both.

Private to the collection: may change at any time.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Optional

from ansible_collections.tensorless.fleet.plugins.module_utils._gpu_bus import branch

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
    r"^(?:cuda-drivers|lib(?:nvidia|cuda\d|nvcuvid|xnvctrl|nvoptix)|nvidia-(?!container|cuda-toolkit|docker|sim)|firmware-nvidia"
    r"|xserver-xorg-video-nvidia|linux-(?:modules|objects|signatures)-nvidia|kmod-nvidia|akmod-nvidia|xorg-x11-drv-nvidia"
    r"|dkms-nvidia)"
)


def is_driver_package(name: str) -> bool:
    """Whether a package is a part of the driver (not of the container toolkit, whose versions are 1.x)."""
    return bool(_DRIVER.match(name)) and not name.startswith("libnvidia-container")


def is_open_package(name: str) -> bool:
    """Whether a package or stream is of the open flavour: the word stands alone in it, wherever it stands."""
    return bool(_OPEN.search(name))

# SPDX-License-Identifier: Apache-2.0
"""The doctor's second block: what the documentation's six checks do not see, and what breaks P100 hosts in the field.

Pure: each check is a function of what was observed, and says PASS, WARN or FAIL in one line.
Private to the collection: may change at any time.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Optional

from ansible_collections.tensorless.fleet.plugins.module_utils import _driver
from ansible_collections.tensorless.fleet.plugins.module_utils import _gpu_log as kernel_log
from ansible_collections.tensorless.fleet.plugins.module_utils._doctor import FAIL, HOST, PASS, WARN, Check
from ansible_collections.tensorless.fleet.plugins.module_utils._driver_apt import UPGRADES, upgrades_text
from ansible_collections.tensorless.fleet.plugins.module_utils._gpu import HARD_THROTTLE, IDLE_MIB
from ansible_collections.tensorless.fleet.plugins.module_utils._gpu_bus import branch, unserved
from ansible_collections.tensorless.fleet.plugins.module_utils._plan_text import gigabytes, printable

CPU_FLAGS = ("avx2", "fma", "f16c")
IMAGE_BYTES = 5 * 10**9  # the engine image unpacked, with room for the pull itself
SKEW_WARN, SKEW_FAIL = 120, 3600

# Checks that a command on the host cannot mend, and why. The documentation prints this table.
NO_COMMAND: Mapping[str, str] = {
    "nvidia_driver": "installing a driver is a simulated transaction, a reboot and a check: the role nvidia_driver",
    "gpu": "another card is needed",
    "driver_version": "changing the driver is a simulated transaction, a reboot and a check: the role nvidia_driver",
    "disk_space": "what may be deleted is the owner's decision",
    "cpu_flags": "another CPU, or an engine image built for this one, is needed",
    "driver_branch": "changing the driver is a simulated transaction, a reboot and a check: the role nvidia_driver",
    "driver_loaded": "a reboot ends running servers, so its time is the owner's decision",
    "kernel_module": "changing the driver is a simulated transaction, a reboot and a check: the role nvidia_driver",
    "nouveau": "the initramfs is rebuilt and the host rebooted: the role nvidia_driver",
    "secure_boot": "a key is enrolled, or the firmware changed, at the machine's console",
    "cards_reachable": "a lost card needs a reboot or a power cycle",
    "throttle": "cooling, power and their settings are at the machine",
    "memory_errors": "retired pages need a reboot; a card with uncorrected errors may need replacing",
    "kernel_log": "what the log names (cabling, power, a worn card) is at the machine",
    "card_processes": "whose process may be ended is the owner's decision",
    "port": "whose program may be ended is the owner's decision; or choose another port",
    "clock": "a time service needs minutes and a network; setting the clock by hand is the owner's decision",
    "image_disk": "what may be deleted is the owner's decision",
    "hf_token": "a new token comes from the Hub's web page",
    "docker_reload": "the container has to be made anew, which interrupts its server",
}


@dataclass
class HostSeen:
    """What these checks look at; None is what could not be read."""

    gpu_facts: Mapping[str, Any]
    runtime: Optional[str] = None
    cpu_flags: Optional[Sequence[str]] = None
    architecture: str = "x86_64"
    secure_boot: Optional[bool] = None
    kernel_log: Optional[str] = None
    cdi_problems: Optional[Sequence[str]] = None  # None: there is no spec, which the documented check says
    refresh_units: bool = False
    toolkit: bool = False
    unbuilt: Sequence[str] = ()  # kernels for which dkms has no module of the driver, in words
    movable: Optional[Sequence[str]] = None  # installed driver packages that unattended upgrades may move
    persistenced: bool = False  # the daemon's unit is installed
    our_pids: Sequence[int] = ()
    ports: Mapping[str, str] = field(default_factory=dict)  # "host:port" -> free | ours | the reason why it is taken
    clock_skew: Optional[float] = None  # seconds that this clock is ahead of the controller's
    clock_synchronised: Optional[bool] = None
    image_store: str = ""
    image_free: Optional[int] = None
    image_present: bool = False
    token: str = "none"  # none | accepted | refused | a reason why it could not be tried
    lost_access: Sequence[str] = ()


def _check(name: str, level: str, text: str, fix: Optional[str] = None, command: Optional[str] = None) -> Check:
    return Check(name, level, printable(text), fix, command, HOST)


def host_checks(seen: HostSeen) -> list[Check]:
    """All of them, in a fixed order; those about a driver only where one answers."""
    checks = [_cpu(seen), *_driver_checks(seen), _secure_boot(seen), _upgrades(seen)]
    if seen.cdi_problems is not None:
        checks.append(_cdi(seen))
    facts = seen.gpu_facts
    if facts["cards"] or facts["lost_cards"]:
        checks += [_reachable(facts), _persistence(seen), _throttle(facts), _memory(facts)]
        checks.append(_processes(seen))
    checks.append(_log(seen))
    checks += [_port(place, state) for place, state in seen.ports.items()]
    checks += [_clock(seen), _image_disk(seen)]
    if seen.token != "none":
        checks.append(_token(seen.token))
    if seen.lost_access:
        names = ", ".join(seen.lost_access)
        text = f"containers that lost their card, which a reload of systemd does: {names}"
        checks.append(_check("docker_reload", FAIL, text, "make the container anew (run site.yml with --tags server)"))
    return checks


def _cpu(seen: HostSeen) -> Check:
    if seen.architecture != "x86_64":
        return _check(
            "cpu_flags",
            FAIL,
            f"this machine is {seen.architecture}; the engine image is for x86_64",
            "use another host",
        )
    if seen.cpu_flags is None:
        return _check("cpu_flags", WARN, "the CPU's flags could not be read")
    missing = [flag for flag in CPU_FLAGS if flag not in seen.cpu_flags]
    if missing:
        return _check(
            "cpu_flags",
            FAIL,
            f"the CPU lacks {', '.join(missing)}, which the engine image is built for",
            "use a host with a newer CPU, or build an engine image for this one",
        )
    return _check("cpu_flags", PASS, "the CPU has AVX2, FMA and F16C")


def _driver_checks(seen: HostSeen) -> list[Check]:
    facts = seen.gpu_facts
    module, version = facts["kernel_module"], facts["loaded_version"]
    if module == "nouveau":
        return [
            _check(
                "nouveau",
                FAIL,
                "nouveau holds the NVIDIA card",
                "blacklist nouveau, rebuild the initramfs and reboot (the role nvidia_driver does)",
            )
        ]
    if module == "none":
        return []
    checks: list[Check] = []
    major, old = branch(version), _driver.old_cards(facts) or not facts["cards"]
    if major is not None and major > _driver.NEWEST and old:
        checks.append(
            _check(
                "driver_branch",
                FAIL,
                f"the loaded driver {version} is newer than R{_driver.NEWEST}, the last branch for Pascal cards",
                f"install {_driver.RANGE}, and reboot",
            )
        )
    else:
        checks.append(
            _check("driver_branch", PASS, f"driver branch R{major}, R{_driver.NEWEST} is the last for Pascal")
        )
    if module == "open" and old:
        checks.append(
            _check(
                "kernel_module",
                FAIL,
                "the open kernel module is loaded, which does not drive Pascal cards",
                "install the proprietary kernel module of the same branch, and reboot",
            )
        )
    else:
        checks.append(_check("kernel_module", PASS, f"the {module} kernel module is loaded"))
    if facts["reboot_required"] or (facts["installed_version"] and version and facts["installed_version"] != version):
        checks.append(
            _check(
                "driver_loaded",
                FAIL,
                f"driver {facts['installed_version']} is installed, but {version} is loaded"
                if facts["installed_version"]
                else f"the installed driver is not the loaded one ({version or 'unknown'})",
                "reboot",
            )
        )
    else:
        checks.append(_check("driver_loaded", PASS, "the installed driver is the loaded one"))
    if seen.unbuilt:
        text = f"{'; '.join(seen.unbuilt)}: a boot into it comes up without a card"
        checks.append(_check("driver_kernels", WARN, text))
    return checks


def _secure_boot(seen: HostSeen) -> Check:
    if not seen.secure_boot:
        return _check("secure_boot", PASS, "Secure Boot is off" if seen.secure_boot is False else "no Secure Boot")
    if seen.gpu_facts["kernel_module"] in ("proprietary", "open"):
        return _check("secure_boot", PASS, "Secure Boot is on, and the driver's module is signed for it")
    return _check(
        "secure_boot",
        FAIL,
        "Secure Boot is on, and no NVIDIA module is loaded: an unsigned one is refused",
        "enrol the key that signs it (sudo mokutil --import /var/lib/dkms/mok.pub, then reboot), or turn it off",
    )


def _upgrades(seen: HostSeen) -> Check:
    if seen.movable is None:
        return _check("unattended_upgrades", PASS, "no unattended upgrades on this host")
    if not seen.movable:
        return _check("unattended_upgrades", PASS, "unattended upgrades leave the driver alone")
    shown = ", ".join(seen.movable[:4]) + (f" and {len(seen.movable) - 4} more" if len(seen.movable) > 4 else "")
    held = " ".join(shlex.quote(name) for name in seen.movable)
    return _check(
        "unattended_upgrades",
        FAIL,
        f"unattended upgrades may move the driver under a running server: {shown}",
        f"put these packages on hold and on the blacklist of unattended-upgrades ({UPGRADES})",
        f"printf %s {shlex.quote(upgrades_text())} > {UPGRADES} && apt-mark hold {held}",
    )


def _cdi(seen: HostSeen) -> Check:
    problems = list(seen.cdi_problems or ())
    if not problems:
        return _check("cdi_spec", PASS, "the CDI spec fits the cards and the driver, and there is one")
    command = None
    if seen.toolkit:
        off = (
            "systemctl disable --now nvidia-cdi-refresh.path nvidia-cdi-refresh.service; " if seen.refresh_units else ""
        )
        clean = "rm -f /var/run/cdi/nvidia.yaml /var/run/cdi/nvidia.json /etc/cdi/*nvidia*"
        command = f"{off}{clean}; mkdir -p /etc/cdi && nvidia-ctk cdi generate --output=/etc/cdi/nvidia.yaml"
    return _check(
        "cdi_spec",
        FAIL,
        f"the CDI spec does not fit: {problems[0]}" + (f" (and {len(problems) - 1} more)" if problems[1:] else ""),
        "generate it anew and keep one file: run site.yml with --tags cdi",
        command,
    )


def _reachable(facts: Mapping[str, Any]) -> Check:
    found = [f"{card['pci_id'] or card['index']} ({card['reason']})" for card in facts["lost_cards"]]
    listed = {card["pci_id"] for card in facts["cards"]} | {card["pci_id"] for card in facts["lost_cards"]}
    for card in facts["pci_cards"]:
        if card["lost"]:
            found.append(f"{card['pci_id']} (its link is dead)")
        elif card["pci_id"] not in listed and unserved(card):
            found.append(f"{card['pci_id']} ({unserved(card)})")
    faults = [
        f"{card['index']} ({why})"
        for card in facts["cards"]
        for why in card["reasons"]
        if why.startswith("nvidia-smi says")
    ]
    if found or faults:
        text = f"cards that do not answer: {', '.join(found + faults)}"
        return _check("cards_reachable", FAIL, text, "reboot or power-cycle the host; then reseat or replace the card")
    narrow = [
        f"{card['index']} ({card['pcie_width']} of {card['pcie_width_max']} lanes)"
        for card in facts["cards"]
        if card["pcie_width"] and card["pcie_width_max"] and card["pcie_width"] < card["pcie_width_max"]
    ]
    if narrow:
        return _check(
            "cards_reachable", WARN, f"cards with a narrow link: {', '.join(narrow)}; model loading is slower"
        )
    return _check("cards_reachable", PASS, "every card on the bus answers")


def _persistence(seen: HostSeen) -> Check:
    off = [str(card["index"]) for card in seen.gpu_facts["cards"] if card["persistence_mode"] is False]
    if not off:
        return _check("persistence", PASS, "persistence mode is on")
    command = (
        "systemctl enable --now nvidia-persistenced && nvidia-smi -pm 1" if seen.persistenced else "nvidia-smi -pm 1"
    )
    return _check(
        "persistence",
        FAIL,
        f"persistence mode is off on card {', '.join(off)}: each start of a program waits for the driver",
        f"sudo {command.partition(' && ')[0]}",
        command,
    )


def _throttle(facts: Mapping[str, Any]) -> Check:
    slow = []
    for card in facts["cards"]:
        hard = [name for name in card["throttle_reasons"] or [] if name in HARD_THROTTLE]
        if hard:
            slow.append(
                f"card {card['index']}: {', '.join(hard)}"
                + (f" at {card['temperature_c']} C" if card["temperature_c"] else "")
            )
    if slow:
        return _check(
            "throttle",
            FAIL,
            f"slowed down by the hardware: {'; '.join(slow)}",
            "check cooling, power cables and power supply",
        )
    return _check("throttle", PASS, "no card is slowed down by heat or power")


def _memory(facts: Mapping[str, Any]) -> Check:
    bad = []
    for card in facts["cards"]:
        if card["ecc_uncorrected"]:
            bad.append(f"card {card['index']}: {card['ecc_uncorrected']} uncorrected errors")
        if card["retired_pages_pending"]:
            bad.append(f"card {card['index']}: pages wait for retirement")
        if (card["retired_pages_double"] or 0) + (card["retired_pages_single"] or 0) >= 60:
            bad.append(f"card {card['index']}: 60 or more pages are retired")
    if bad:
        return _check(
            "memory_errors",
            FAIL,
            f"memory errors: {'; '.join(bad)}",
            "reboot; a card that goes on with errors is worn out",
        )
    off = [str(card["index"]) for card in facts["cards"] if card["ecc"] is False]
    if off:
        return _check("memory_errors", WARN, f"ECC is off on card {', '.join(off)}: memory errors go unseen")
    return _check("memory_errors", PASS, "no uncorrected memory errors, no page waits for retirement")


def _processes(seen: HostSeen) -> Check:
    others = [item for item in seen.gpu_facts["processes"] if item["pid"] not in seen.our_pids]
    if others:
        names = ", ".join(
            f"{item['name'] or 'unknown'} (pid {item['pid']}, {item['memory_mib'] or '?'} MiB)" for item in others[:4]
        )
        return _check(
            "card_processes", FAIL, f"other processes use a card: {names}", "stop them before a model is started"
        )
    named = {item["uuid"] for item in seen.gpu_facts["processes"]}
    nameless = [
        f"{card['index']} ({card['memory_used_mib']} MiB)"
        for card in seen.gpu_facts["cards"]
        if (card["memory_used_mib"] or 0) > IDLE_MIB and card["uuid"] not in named
    ]
    if nameless:
        text = f"memory of card {', '.join(nameless)} is in use, but nvidia-smi names no process"
        return _check("card_processes", WARN, text)
    return _check("card_processes", PASS, "no other process uses a card")


def _log(seen: HostSeen) -> Check:
    if seen.kernel_log is None:
        return _check("kernel_log", WARN, "the kernel log could not be read (as root it can)")
    problem = kernel_log.driver_problem(seen.kernel_log)
    faults = [
        item
        for item in kernel_log.faults(seen.kernel_log)
        if item["xid"] is None or item["xid"] in kernel_log.HARDWARE_XIDS
    ]
    ours = {card["pci_id"] for card in seen.gpu_facts["pci_cards"]}
    faults = [item for item in faults if item["kind"] != "aer" or item["pci_id"] in ours]
    if faults:
        shown = "; ".join(f"{item['pci_id']} {item['text']} ({item['count']} times)" for item in faults[:3])
        return _check(
            "kernel_log",
            FAIL,
            f"the kernel log names trouble with a card: {shown}",
            "check seating, power and cooling; reboot",
        )
    if problem and not seen.gpu_facts["cards"]:
        return _check("kernel_log", FAIL, f"the kernel log says: {problem['message']}", problem["fix"])
    return _check("kernel_log", PASS, "no Xid or bus error of a card in the kernel log since the boot")


def _port(place: str, state: str) -> Check:
    if state == "free":
        return _check("port", PASS, f"{place} is free")
    if state == "ours":
        return _check("port", PASS, f"{place} is in use by a server of ours")
    return _check("port", FAIL, f"{place} cannot be used: {state}", "stop what listens there, or choose another port")


def _clock(seen: HostSeen) -> Check:
    if seen.clock_skew is not None and abs(seen.clock_skew) >= SKEW_WARN:
        way = "ahead of" if seen.clock_skew > 0 else "behind"
        words = f"the clock is {abs(seen.clock_skew):.0f} s {way} the controller's"
        if abs(seen.clock_skew) < SKEW_FAIL:
            return _check("clock", WARN, words)
        return _check(
            "clock",
            FAIL,
            f"{words}, wrong enough for TLS to refuse certificates",
            "set the clock and let a time service keep it (sudo timedatectl set-ntp true)",
        )
    if seen.clock_synchronised is False:
        return _check("clock", WARN, "no time service keeps the clock right")
    return _check(
        "clock", PASS, "the clock is right" if seen.clock_skew is not None else "a time service keeps the clock"
    )


def _image_disk(seen: HostSeen) -> Check:
    where = seen.image_store
    if seen.image_free is None:
        return _check("image_disk", WARN, f"image store {where}: its free space could not be read")
    text = f"image store {where}: {gigabytes(seen.image_free)} free"
    if seen.image_present:
        return _check("image_disk", PASS, f"{text}, the engine image is there")
    text += f", the engine image needs {gigabytes(IMAGE_BYTES)}"
    if seen.image_free < IMAGE_BYTES:
        return _check("image_disk", FAIL, text, "free some space, or move the runtime's storage to a larger disk")
    return _check("image_disk", PASS, text)


def _token(state: str) -> Check:
    if state == "accepted":
        return _check("hf_token", PASS, "the Hub accepts the token")
    if state == "refused":
        return _check(
            "hf_token",
            FAIL,
            "a Hugging Face token is set, and the Hub refuses it",
            "make a new token on the Hub and set it",
        )
    return _check("hf_token", WARN, f"the token could not be tried: {state}")

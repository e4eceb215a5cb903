# SPDX-License-Identifier: Apache-2.0
"""Further kernel logs and modules of the kinds that were collected."""

from __future__ import annotations

import pytest
from ansible_collections.tensorless.fleet.plugins.module_utils import _gpu_log
from ansible_collections.tensorless.fleet.plugins.module_utils._gpu_bus import kernel_module

from tests.unit.gpu.fakes import FakeFiles


def test_module_without_its_proc_file() -> None:
    base = {"/sys/module/nvidia/version": "580.178.04\n"}
    assert kernel_module(FakeFiles({**base, "/sys/module/nvidia/taint": "POE\n"})) == "proprietary"
    assert kernel_module(FakeFiles({**base, "/sys/module/nvidia/taint": "OE\n"})) == "open"


@pytest.mark.parametrize(
    ("log", "xid"),
    [
        ("NVRM: Xid (PCI:0000:82:00): 31, pid=77, name=x, Ch 00000010\n", 31),
        ("NVRM: Xid (PCI:00000000:82:00.0): 48, pid='<unknown>'\n", 48),
        ("[ 12.5] NVRM: Xid (PCI:0000:82:00): 119, Timeout\r\n", 119),
        ("Nov 30 02:00:00 h kernel: NVRM: Xid (PCI:0000:82:00): 63, Row Remapper\n", 63),
        (
            "NVRM: Xid (PCI:0000:82:00): 154, GPU recovery action changed from 0x0 (None) to 0x2 (Node Reboot "
            "Required)\n",
            154,
        ),
    ],
)
def test_xids(log: str, xid: int) -> None:
    found = _gpu_log.faults(log)
    assert [(item["pci_id"], item["xid"]) for item in found] == [("0000:82:00.0", xid)]


@pytest.mark.parametrize(
    ("log", "cause"),
    [
        (
            "NVRM: API mismatch: the client has the version 580.95.05, but\nNVRM: this kernel module has 535.1.\n",
            "mismatch",
        ),
        ("Loading of module with unavailable key is rejected\n", "secure_boot"),
        ("modprobe: ERROR: could not insert 'nvidia': Key was rejected by service\r\n", "secure_boot"),
        ("NVRM:  supported through the NVIDIA 470.xx Legacy drivers. Please\n", "branch_too_new"),
        (
            "NVRM: The NVIDIA GPU 0000:3b:00.0 (PCI ID: 10de:15f8)\n"
            "NVRM: installed in this system is not supported by\nNVRM: the NVIDIA 610.43.02 driver release.\n",
            "branch_too_new",
        ),
        (
            "NVRM: installed in this system is not supported by the\nNVRM: NVIDIA 470.256.02 driver release.\n",
            "not_supported",
        ),
        (
            "NVRM: This PCI I/O region assigned to your NVIDIA device is invalid:\n"
            "NVRM: BAR1 is 0M @ 0x0 (PCI:0000:3b:00.0)\nnvidia: probe of 0000:3b:00.0 failed with error -1\n"
            "NVRM: GPU 0000:3b:00.0: RmInitAdapter failed! (0x24:0x72:1447)\n",
            "no_address_space",
        ),
        ("NVRM: ignoring the legacy GPU 0000:07:00.0\n", "branch_too_new"),
        ("NVRM: GPU 0000:3b:00.0: RmInitAdapter failed! (0x24:0x72:1568)\n", "start_failed"),
    ],
)
def test_reasons_in_the_log(log: str, cause: str) -> None:
    problem = _gpu_log.driver_problem(log)
    assert problem is not None
    assert problem["cause"] == cause


def test_a_recovery_that_was_done_is_no_fault() -> None:
    line = "NVRM: Xid (PCI:0000:82:00): 154, GPU recovery action changed from {} to {}\n"
    asked = line.format("0x0 (None)", "0x1 (GPU Reset Required)")
    done = line.format("0x1 (GPU Reset Required)", "0x0 (None)")
    assert [item["xid"] for item in _gpu_log.faults(asked)] == [154]
    assert _gpu_log.faults(asked + done) == []
    assert len(_gpu_log.faults(asked + done + asked)) == 1


def test_the_branch_is_named_where_the_log_names_it() -> None:
    named = "NVRM:  supported through the NVIDIA 470.xx Legacy drivers. Please\n"
    problem = _gpu_log.driver_problem(named + "NVRM: ignoring the legacy GPU 0000:07:00.0\n")
    assert problem is not None
    assert "R470" in problem["fix"]

#!/usr/bin/python
# SPDX-License-Identifier: Apache-2.0
"""Ansible module; the logic is in module_utils/_gpu*.py."""

from __future__ import annotations

DOCUMENTATION = r"""
module: nvidia_gpu_facts
short_description: Gather facts on NVIDIA cards and their driver
version_added: 0.1.0
author:
  - tensorless.fleet authors (@tensorless)
description:
  - Reads the cards with one start of C(nvidia-smi), and what the kernel says about them (PCI bus, loaded module).
  - Answers in every case that occurs in the field. A driver that is not loaded, a lost card or a hanging C(nvidia-smi)
    is a state with reasons and not a failed task, and a value that the driver does not give is null with its reason,
    never 0.
  - A second start, C(nvidia-smi -q -x), follows only for the processes on cards that have memory in use.
options:
  program:
    description: The program to ask. By default C(nvidia-smi) on the search path.
    type: path
  timeout:
    description: Seconds until a hanging C(nvidia-smi) is ended, its children too.
    type: float
    default: 30
  processes:
    description: Whether to list the processes on the cards. V(auto) does where a card has memory in use.
    type: str
    choices: [auto, 'yes', 'no']
    default: auto
attributes:
  check_mode:
    description: Changes nothing, so check mode is no different.
    support: full
  diff_mode:
    description: There is nothing to compare.
    support: none
  facts:
    description: Returns its result as facts of the host.
    support: full
  platform:
    description: Linux.
    support: full
    platforms: linux
seealso:
  - module: tensorless.fleet.tensorless_doctor
"""

EXAMPLES = r"""
- name: Read the cards
  tensorless.fleet.nvidia_gpu_facts:

- name: Show them
  ansible.builtin.debug:
    msg: "{{ ansible_facts['nvidia_gpu']['cards'] | map(attribute='name') | list }}"
"""

RETURN = r"""
ansible_facts:
  description: The facts; nothing else is returned.
  returned: always
  type: dict
  contains:
    nvidia_gpu:
      description: The cards and their driver.
      type: dict
      returned: always
      contains:
        state:
          description:
            - V(ok), V(degraded) (cards answer, with reasons), V(failed) (none answers) or V(absent) (no driver).
          type: str
          returned: always
        healthy:
          description: Whether there is nothing to complain of.
          type: bool
          returned: always
        reasons:
          description: Why it is not healthy, for people.
          type: list
          elements: str
          returned: always
        driver_version:
          description: Version of the loaded driver, or null.
          type: str
          returned: always
        branch:
          description: Its branch, for example 580, or null.
          type: int
          returned: always
        loaded_version:
          description: Version of the loaded kernel module, or null.
          type: str
          returned: always
        installed_version:
          description: Version of the installed driver library, or null.
          type: str
          returned: always
        kernel_module:
          description: V(proprietary), V(open), V(nouveau) or V(none).
          type: str
          returned: always
        reboot_required:
          description: Whether the installed libraries do not fit the loaded module.
          type: bool
          returned: always
        driver_ok:
          description: Whether this driver may serve the cards (loaded, from 525 to 580, proprietary for Pascal).
          type: bool
          returned: always
        driver_message:
          description: What is wrong with the driver and what to do, or null.
          type: str
          returned: always
        problem:
          description: Why the driver drives no card (C(cause), C(message), C(fix)), or null.
          type: dict
          returned: always
        cards:
          description:
            - The cards by their C(index) as C(nvidia-smi) lists them; indices may have holes.
            - Each has C(index), C(uuid), C(name), C(pci_id) (as the kernel writes it), C(device_id),
              C(compute_capability) and its source, C(memory_mib), C(memory_used_mib), C(memory_free_mib) (MiB),
              C(persistence_mode), C(pcie_gen), C(pcie_gen_max), C(pcie_width), C(pcie_width_max) (lanes),
              C(temperature_c), C(temperature_memory_c) (degrees Celsius), C(clock_sm_mhz), C(clock_memory_mhz) and
              their C(_max_) (MHz), C(power_w), C(power_limit_w), C(power_default_limit_w) (watts), C(throttle_mask),
              C(throttle_reasons), C(ecc), C(ecc_corrected), C(ecc_uncorrected), C(retired_pages_single),
              C(retired_pages_double), C(retired_pages_pending), C(mig), C(utilization_percent), C(healthy), C(reasons)
              and C(missing).
            - A value that is not known is null, and C(missing) says why.
          type: list
          elements: dict
          returned: always
        lost_cards:
          description: Cards that C(nvidia-smi) cannot reach, with C(index), C(pci_id) and C(reason).
          type: list
          elements: dict
          returned: always
        pci_cards:
          description:
            - NVIDIA cards on the PCI bus, driver or not. Each has C(pci_id), C(device_id), C(class), C(driver)
              (C(nvidia), C(nouveau), C(vfio-pci) or null), C(link_width), C(link_speed), C(lost) and
              C(compute_capability) where known.
          type: list
          elements: dict
          returned: always
        processes:
          description: Processes on the cards, with C(pid), C(uuid), C(name), C(type) and C(memory_mib).
          type: list
          elements: dict
          returned: always
        nvidia_smi:
          description: How the program answered, with C(found), C(rc), C(message), C(seconds) and C(timed_out).
          type: dict
          returned: always
      sample: {"state": "ok", "driver_version": "580.105.08", "branch": 580, "kernel_module": "proprietary"}
"""

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.tensorless.fleet.plugins.module_utils._gpu import read_gpus
from ansible_collections.tensorless.fleet.plugins.module_utils._host import bounded


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "program": {"type": "path"},
            "timeout": {"type": "float", "default": 30.0},
            "processes": {"type": "str", "choices": ["auto", "yes", "no"], "default": "auto"},
        },
        supports_check_mode=True,
    )
    module.run_command_environ_update = {"LC_ALL": "C", "LANG": "C"}
    limit = module.params["timeout"]
    if limit <= 0:
        module.fail_json(msg=f"timeout is {limit}: it needs to be a number of seconds above 0")
    program = module.params["program"] or module.get_bin_path("nvidia-smi")
    run = bounded(lambda argv: module.run_command(list(argv)), limit)
    facts = read_gpus(run, program, processes=module.params["processes"], limit=limit)
    module.exit_json(changed=False, ansible_facts={"nvidia_gpu": facts})


if __name__ == "__main__":
    main()

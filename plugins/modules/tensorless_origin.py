#!/usr/bin/python
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

DOCUMENTATION = r"""
module: tensorless_origin
short_description: Refuse to mix versions of this collection
version_added: 0.1.0
author: "tensorless.fleet authors (@tensorless)"
description:
  - Looks through Ansible's collection path on the controller. When copies of C(tensorless.fleet) of different versions
    lie in it, only the first would be used, without a word; this fails and names all of them.
  - Runs on the controller only.
options: {}
attributes:
  check_mode:
    support: full
    description: Reads only.
  diff_mode:
    support: none
    description: There is nothing to differ.
  platform:
    support: full
    description: Runs on the controller.
    platforms: posix
"""

EXAMPLES = r"""
- name: The collection is of one version
  tensorless.fleet.tensorless_origin:
  run_once: true
"""

RETURN = r"""
path:
  description: The copy that is used.
  returned: always
  type: str
version:
  description: Its version.
  returned: always
  type: str
"""

# SPDX-License-Identifier: GPL-3.0-or-later
"""Runs tensorless_sweep on the host and shows its progress."""

from __future__ import annotations

from ansible_collections.tensorless.fleet.plugins.plugin_utils._progress import ProgressAction


class ActionModule(ProgressAction):
    """Nothing of its own: Ansible looks for one file of each module's name."""

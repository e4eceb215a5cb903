# SPDX-License-Identifier: Apache-2.0
"""``python -m tensorless_fleet`` is the ``tensorless`` command."""

from tensorless_fleet.cli import entry

entry()

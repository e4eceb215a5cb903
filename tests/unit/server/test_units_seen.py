# SPDX-License-Identifier: Apache-2.0
"""What systemd says of a unit, where a newer systemd says it of every unit."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from ansible_collections.tensorless.fleet.plugins.module_utils._server_files import places
from ansible_collections.tensorless.fleet.plugins.module_utils._server_state import read_units


@pytest.mark.parametrize(("every_unit", "needs"), [("no", True), ("yes", False)])
def test_a_reload_is_needed_only_where_not_every_unit_says_so(every_unit: str, needs: bool) -> None:
    def run(argv: Sequence[str]) -> tuple[int, str, str]:
        units = argv[argv.index("--") + 1 :]
        blocks = [f"Id={u}\nNeedDaemonReload={'yes' if u.startswith('tensorless@') else every_unit}\n" for u in units]
        return 0, "\n".join(blocks), ""

    found = read_units(run, places("system"), ["a"])
    assert found["a"].needs_reload is needs

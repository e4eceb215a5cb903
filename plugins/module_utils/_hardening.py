# SPDX-License-Identifier: Apache-2.0
"""Private to the collection, may change at any time.

Opt-in limits on a server's container, as flags that a container with a GPU tolerates. Each one is a difference from the
documented command and is named as such.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

KEYS = ("no_new_privileges", "read_only", "drop_capabilities", "memory", "pids_limit")
_MEMORY = re.compile(r"[1-9][0-9]*[bkmg]?", re.IGNORECASE)


def hardening_flags(options: Mapping[str, Any], runtime: str) -> list[str]:
    """Container flags for `options`; raises ValueError with a message for the user."""
    unknown = sorted(set(options) - set(KEYS))
    if unknown:
        raise ValueError(f"hardening has no option {', '.join(unknown)}; it has {', '.join(KEYS)}")
    flags: list[str] = []
    if options.get("no_new_privileges"):
        flags.append("--security-opt=no-new-privileges")
    if options.get("read_only"):
        # podman mounts its own tmpfs on /tmp, /run and /var/tmp of a read-only container; docker does not
        flags.append("--read-only")
        if runtime == "docker":
            flags.append("--tmpfs=/tmp")
    if options.get("drop_capabilities"):
        flags.append("--cap-drop=ALL" if runtime == "docker" else "--cap-drop=all")
    memory = options.get("memory")
    if memory is not None:
        if not _MEMORY.fullmatch(str(memory)):
            raise ValueError(f"hardening.memory is {memory!r}; give a number with k, m or g, such as 20g")
        flags.append(f"--memory={memory}")
    pids = options.get("pids_limit")
    if pids is not None:
        if isinstance(pids, bool) or not isinstance(pids, int) or pids < 1:
            raise ValueError(f"hardening.pids_limit is {pids!r}; give a whole number above 0, such as 512")
        flags.append(f"--pids-limit={pids}")
    return flags

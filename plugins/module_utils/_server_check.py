# SPDX-License-Identifier: Apache-2.0
"""Private to the collection, may change at any time.

What must hold before a server is started or an answering one is stopped for it: image, model, port.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import sys
from collections.abc import Callable, Mapping
from typing import Any, Optional

from ansible_collections.tensorless.fleet.plugins.module_utils import _gguf, _plan_rules
from ansible_collections.tensorless.fleet.plugins.module_utils._runtime import Run, Runtime

Bind = Callable[[str, int], None]


def image_missing(plan: Mapping[str, Any], run: Run) -> Optional[str]:
    if Runtime(str(plan["runtime"]), run).image(str(plan["image"])) is not None:
        return None
    return (
        f"the engine image is not pulled: {plan['image']} is not in {plan['runtime']}; "
        f"run: tensorless pull {plan['model']}"
    )


def pn_off_the_card(plan: Mapping[str, Any], run: Run) -> Optional[str]:
    """The refusal of options that would compute PN weights on a processor that this image is not exact on."""
    if not plan.get("offload"):
        return None
    try:
        pn = "yes" if _gguf.describe(str(plan["download"]["blob"]))["pn"] else "no"
    except (OSError, ValueError):
        return None
    found = Runtime(str(plan["runtime"]), run).image(str(plan["image"])) or {}
    labels = (found.get("Config") or {}).get("Labels") or found.get("Labels") or {}
    return _plan_rules.pn_refusal(plan["offload"], pn, labels)


def model_missing(plan: Mapping[str, Any]) -> Optional[str]:
    download = plan["download"]
    blob = str(download["blob"])
    next_step = f"run: tensorless pull {plan['model']}"
    try:
        size = os.stat(blob).st_size
    except OSError:
        kept = "; a part of it is there" if os.path.exists(f"{blob}.incomplete") else ""
        return f"the model is not downloaded: {blob} does not exist{kept}; {next_step}"
    wanted = download.get("size_bytes")
    if wanted and size != wanted:
        return f"the model is not downloaded: {blob} has {size} bytes instead of {wanted}; {next_step}"
    return None


def bind(host: str, port: int) -> None:
    """Raises OSError when the address cannot be listened on."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with contextlib.closing(socket.socket(family, socket.SOCK_STREAM)) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        sock.bind((host, port))
        sock.listen(1)


def port_taken(
    host: str, port: int, binder: Bind = bind, *, published_by: Callable[[int], Optional[str]] = lambda port: None
) -> Optional[str]:
    """The documented complaint when the address cannot be used, with the reason and who holds it."""
    try:
        binder(host, port)
    except (OSError, OverflowError) as exc:
        code = exc.errno if isinstance(exc, OSError) else None
        reason = os.strerror(code).lower() if code else str(exc)
        if code == errno.EADDRINUSE:
            reason += _held_by(host, port, published_by(port))
            step = "choose another port, or stop what uses it"
        elif code == errno.EADDRNOTAVAIL:
            step = "choose an address that this host has"
        else:
            step = "choose another address or port"
        return f"cannot use port {port} on {host}: {reason}; {step}"
    return None


def _held_by(host: str, port: int, container: Optional[str]) -> str:
    """' (pid 12, nginx)' when that can be found out, and the container that the port leads to."""
    words = [word for word in (_process_on(host, port), container) if word]
    return f" ({'; '.join(words)})" if words else ""


def _hex_addresses(host: str) -> frozenset[str]:
    """How /proc/net writes an address and the ones that stand for every address."""
    every = {"0" * 8, "0" * 32}
    with contextlib.suppress(OSError):
        packed = socket.inet_pton(socket.AF_INET6 if ":" in host else socket.AF_INET, host)
        for address in (packed, b"\0" * 10 + b"\xff\xff" + packed) if len(packed) == 4 else (packed,):
            words = [int.from_bytes(address[i : i + 4], sys.byteorder) for i in range(0, len(address), 4)]
            every.add("".join(f"{word:08X}" for word in words))
    return frozenset(every)


def _process_on(host: str, port: int) -> str:
    wanted = _hex_addresses(host)
    any_address = host in ("0.0.0.0", "::")
    inodes = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with contextlib.suppress(OSError), open(table, encoding="ascii") as stream:
            for line in list(stream)[1:]:
                fields = line.split()
                address, _colon, number = fields[1].rpartition(":")
                if fields[3] == "0A" and int(number, 16) == port and (any_address or address in wanted):
                    inodes.add(f"socket:[{fields[9]}]")
    if not inodes:
        return ""
    for pid in (name for name in os.listdir("/proc") if name.isdigit()):
        with contextlib.suppress(OSError):
            for descriptor in os.listdir(f"/proc/{pid}/fd"):
                with contextlib.suppress(OSError):
                    if os.readlink(f"/proc/{pid}/fd/{descriptor}") in inodes:
                        with open(f"/proc/{pid}/comm", encoding="utf-8", errors="replace") as stream:
                            return f"pid {pid}, {stream.read().strip()}"
    return ""


def listens_inside(pid: int, port: int = 8080) -> bool:
    """The process's own network has a listener on the port: told without any program inside the container."""
    for table in ("tcp", "tcp6"):
        with contextlib.suppress(OSError, ValueError), open(f"/proc/{pid}/net/{table}", encoding="ascii") as stream:
            for line in list(stream)[1:]:
                fields = line.split()
                if fields[3] == "0A" and int(fields[1].rsplit(":", 1)[1], 16) == port:
                    return True
    return False

# SPDX-License-Identifier: Apache-2.0
"""The second reader: `nvidia-smi -q -x`, for what the CSV query cannot say, which is the processes on each card.

Private to the collection: may change at any time.
"""

from __future__ import annotations

import re
from typing import Any, Optional
from xml.etree import ElementTree

_FORBIDDEN = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
_BARE = re.compile(r"&(?!(?:amp|lt|gt|quot|apos|#\d{1,7}|#x[0-9A-Fa-f]{1,6});)")
_NO_ELEMENT = re.compile(r"<(?![/!?]?[A-Za-z_][\w.-]*(?: [^<>]*)?/?>)")


class XmlError(ValueError):
    """The text is no report of nvidia-smi; the message is for the user."""


def _document(text: str) -> ElementTree.Element:
    start, end = text.find("<nvidia_smi_log"), text.rfind("</nvidia_smi_log>")
    if start < 0 or end < 0:
        raise XmlError("nvidia-smi -q -x printed no report")
    body = text[start : end + len("</nvidia_smi_log>")]
    # Names of processes are whatever their owners chose, and are printed as they are: bytes that XML cannot hold, bare
    # ampersands, and signs that open no element.
    body = _FORBIDDEN.sub("?", body)
    body = _BARE.sub("&amp;", body)
    body = _NO_ELEMENT.sub("&lt;", body)
    # The document type is cut off with the head; entities of its own have no place in such a report.
    try:
        return ElementTree.fromstring(body)
    except ElementTree.ParseError as exc:
        raise XmlError(f"nvidia-smi -q -x printed broken XML: {exc}") from exc


def _number(text: Optional[str]) -> Optional[int]:
    found = re.match(r"^\s*(\d{1,12})(?: MiB)?\s*$", text or "", re.ASCII)
    return int(found.group(1)) if found else None


def processes(text: str) -> list[dict[str, Any]]:
    """The processes of all cards: pid, uuid, name, type (C, G, C+G), memory_mib (None where it is not said)."""
    found: list[dict[str, Any]] = []
    for gpu in _document(text).iter("gpu"):
        uuid = (gpu.findtext("uuid") or "").strip() or None
        for item in gpu.iter("process_info"):
            pid = _number(item.findtext("pid"))
            if pid is None:
                continue
            found.append(
                {
                    "pid": pid,
                    "uuid": uuid,
                    "name": (item.findtext("process_name") or "").strip() or None,
                    "type": (item.findtext("type") or "").strip() or None,
                    "memory_mib": _number(item.findtext("used_memory")),
                }
            )
    return found

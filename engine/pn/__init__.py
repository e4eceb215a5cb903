# SPDX-License-Identifier: Apache-2.0
"""PNX-FORMAT-v0 (pn3t, pn4t) in numpy. `c/pn.c` is normative; this library gives the same bits."""

from __future__ import annotations

from engine.pn.format import PN3T, PN4T, TYPES, BadBlock, BadInput, PnType, decode, dot, quantize, validate

__all__ = ["PN3T", "PN4T", "TYPES", "BadBlock", "BadInput", "PnType", "decode", "dot", "quantize", "validate"]

# SPDX-License-Identifier: Apache-2.0
"""The one way in which this collection says no. Private to the collection: may change at any time."""

from __future__ import annotations


class Refusal(Exception):
    """A refusal meant for a person: what was found, what is needed and what to do next.

    rc is the launcher's documented exit status: 2 for bad usage (a value that can never work), else 1.
    """

    def __init__(self, message: str, rc: int = 1) -> None:
        super().__init__(message)
        self.message = message
        self.rc = rc

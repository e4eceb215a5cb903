# SPDX-License-Identifier: Apache-2.0
"""Runs conformance cases against the product: `python -m tests.conformance FILE...`."""

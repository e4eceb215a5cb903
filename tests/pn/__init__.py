# SPDX-License-Identifier: Apache-2.0
"""Golden vectors of the PN format: reading them, and running them on the Python and the C code."""

# SPDX-License-Identifier: Apache-2.0
"""Stand-ins for the NVIDIA driver and toolkit, packaged like the real ones, for test hosts without a card."""

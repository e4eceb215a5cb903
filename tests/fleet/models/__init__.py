# SPDX-License-Identifier: Apache-2.0
"""The spread of model files over real hosts."""

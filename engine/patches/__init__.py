# SPDX-License-Identifier: Apache-2.0
"""The patch queue on llama.cpp (queue.toml) and the script that applies it."""

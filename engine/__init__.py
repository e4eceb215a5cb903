# SPDX-License-Identifier: Apache-2.0
"""The engine: the PN weight format, the patch queue on llama.cpp and its kernels. Not part of the collection."""

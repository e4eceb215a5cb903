# SPDX-License-Identifier: Apache-2.0
"""Tools around the sm_60 kernels: the compiler, the SASS count, the kernel tests."""

// SPDX-License-Identifier: Apache-2.0
// What slots.py counts: `nvcc -arch=sm_60 -cubin` of this file holds every kernel that the engine runs on a P100.
#include "pn-gemv.cuh"
#define KERNEL(bits, cols, rows, warps, blocks) \
    template __global__ void pn_gemv<bits, cols, rows, warps, blocks>(const char *, const float *, float *, int, int, int64_t, int64_t);
#define FIXED(warps) KERNEL(3, 1, 4, warps, 64) KERNEL(4, 1, 4, warps, 80) KERNEL(4, 1, 4, warps, 96) KERNEL(4, 1, 4, warps, 272)
FIXED(1) FIXED(2) FIXED(4)
#define ANY(cols) KERNEL(3, cols, 4, 4, 0) KERNEL(4, cols, 4, 4, 0)
ANY(1) ANY(2) ANY(3) ANY(4) ANY(5) ANY(6) ANY(7) ANY(8)

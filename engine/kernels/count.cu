// SPDX-License-Identifier: Apache-2.0
// What slots.py counts: `nvcc -arch=sm_60 -cubin` of this file holds every kernel that the engine runs on a P100.
#include "pn-gemv.cuh"
#define KERNEL(bits, cols, rows, warps, blocks, one) \
    template __global__ void pn_gemv<bits, cols, rows, warps, blocks, one>(const pn_group, const float *, int, int64_t);
#define BOTH(bits, cols, rows, warps, blocks) KERNEL(bits, cols, rows, warps, blocks, true) KERNEL(bits, cols, rows, warps, blocks, false)
#define FIXED(warps) BOTH(3, 1, 4, warps, 64) BOTH(4, 1, 4, warps, 80) BOTH(4, 1, 4, warps, 96) BOTH(4, 1, 4, warps, 272)
FIXED(1) FIXED(2) FIXED(4)
#define ANY(cols) BOTH(3, cols, 4, 4, 0) BOTH(4, cols, 4, 4, 0)
ANY(1) ANY(2) ANY(3) ANY(4) ANY(5) ANY(6) ANY(7) ANY(8)
#define EXPERT(bits, rows, warps) template __global__ void pn_gemv_id<bits, rows, warps>(const pn_experts, const float *, int, int64_t);
EXPERT(3, 4, 1) EXPERT(4, 4, 1) EXPERT(3, 4, 4) EXPERT(4, 4, 4)

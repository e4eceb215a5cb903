// SPDX-License-Identifier: Apache-2.0
// PN weight blocks on CUDA: decoding, and what ggml-cuda.cu, convert.cu and getrows.cu call.
#pragma once

#include <cstdint>
#include <cuda_fp16.h>

#define PN_CUDA_BLOCK_BYTES 34

template <int BITS> struct pn_shape {
    static constexpr int QK       = BITS == 3 ? 80 : 64;
    static constexpr int Z        = 1 << (BITS - 1);
    static constexpr int PER_WORD = QK / 8;
    static constexpr int PAIRS    = PER_WORD / 2;
    static constexpr int MASK     = (1 << BITS) - 1;
};

// A pair of weights, elements iqs and iqs + 1 (iqs even): the same position in the two halves of one word.
// Each weight is one product, so that a zero under a negative scale is -0.0.
template <int BITS>
static __device__ __forceinline__ void pn_dequantize_pair(const void * vx, const int64_t ib, const int iqs, float2 & v) {
    using S = pn_shape<BITS>;
    const uint16_t * block = (const uint16_t *) ((const char *) vx + ib * PN_CUDA_BLOCK_BYTES);
    const float      d     = __half2float(__ushort_as_half(block[0]));
    const int        word  = iqs / S::PER_WORD;
    const int        shift = BITS * ((iqs % S::PER_WORD) / 2);
    v.x = d * (float) ((block[1 + 2 * word] >> shift & S::MASK) - S::Z);
    v.y = d * (float) ((block[2 + 2 * word] >> shift & S::MASK) - S::Z);
}

static __device__ __forceinline__ void dequantize_pn3t(const void * vx, const int64_t ib, const int iqs, float2 & v) {
    pn_dequantize_pair<3>(vx, ib, iqs, v);
}

static __device__ __forceinline__ void dequantize_pn4t(const void * vx, const int64_t ib, const int iqs, float2 & v) {
    pn_dequantize_pair<4>(vx, ib, iqs, v);
}

// SPDX-License-Identifier: Apache-2.0
// Matrix-vector products over PN weights, 1 to 8 columns. No ggml in this file: the kernel tests and the SASS
// script compile it alone.
//
// Decode (docs/explanation/pn-subnormals.md): a 16-bit half of a word holds its codes at bits 0, BITS, 2*BITS...
// `half & (MASK << BITS*j)`, read as the bits of an fp32 number, is exactly code * 2^(BITS*j - 149), a subnormal.
// Activations come scaled by 2^(100 - BITS*j), which is exact, so one AND and one FMA give code * x * 2^-49. The zero
// point is the accumulator's first value (-z times the sum of x) and 2^49 is applied once at the end.
//
// The top code of a half needs no AND: the half itself is that code plus the lower ones, so the lower activations have
// the top one's subtracted beforehand. (pn3t: bit 15 of a half is reserved and 0.)
//
// The FMA must keep subnormals whatever -use_fast_math says: only __fmaf_ieee_rn here, never fmaf or a plain a*b+c.
#pragma once

#include "pn.cuh"

#include <algorithm>
#include <climits>

#define PN_SCALE_UP   100
#define PN_SCALE_DOWN (-49)

// Words per lane and step: one column shares a scale between 4 words; more columns need the registers.
template <int NCOLS> struct pn_unit { static constexpr int WORDS = NCOLS == 1 ? 4 : 1; };

static __host__ __device__ inline int pn_steps(int nblk, int unit) { return (nblk * 8 / unit + 31) / 32; }

// Prepared activations of one column: float4 quads [step][quad][lane], then the zero sums [step][lane].
template <int BITS, int U> static __host__ __device__ inline int pn_prep_floats(int nblk) {
    return pn_steps(nblk, U) * 32 * (pn_shape<BITS>::PER_WORD * U + 1);
}

static __device__ __forceinline__ float pn_pow2(int e) { return __int_as_float((127 + e) << 23); }

// One thread per word of a column; U neighbours make a lane's slot. Slots past the row's end hold zeros.
template <int BITS, int U>
__global__ void pn_prepare(const float * __restrict__ x, float * __restrict__ out, int nblk, int64_t stride_x) {
    using S = pn_shape<BITS>;
    constexpr int N     = S::PER_WORD * U;
    constexpr int GROUP = N % 4 == 0 ? 4 : 2;  // what a lane loads at once
    const int     steps = pn_steps(nblk, U);
    const int     word  = blockIdx.x * blockDim.x + threadIdx.x;
    const int     unit  = word / U;
    if (unit >= steps * 32) {  // whole warps: 32 * U words are a step
        return;
    }
    x   += blockIdx.y * stride_x + (int64_t) word * S::PER_WORD;
    out += (int64_t) blockIdx.y * pn_prep_floats<BITS, U>(nblk);
    const bool inside = word < nblk * 8;

    float v[S::PER_WORD];
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < S::PER_WORD; i++) {
        v[i] = inside ? x[i] : 0.0f;
        sum += v[i];
    }
    // The activations of the low half (j ascending), then those of the high half.
    float * slot = out + (int64_t) (unit / 32) * N * 32 + unit % 32 * GROUP;
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const float top = v[2 * (S::PAIRS - 1) + h] * pn_pow2(PN_SCALE_UP - BITS * (S::PAIRS - 1));
#pragma unroll
        for (int j = 0; j < S::PAIRS; j++) {
            const float own = v[2 * j + h] * pn_pow2(PN_SCALE_UP - BITS * j);
            const int   i   = word % U * S::PER_WORD + h * S::PAIRS + j;
            slot[i / GROUP * GROUP * 32 + i % GROUP] = j == S::PAIRS - 1 ? top : own - top;
        }
    }
#pragma unroll
    for (int o = 1; o < U; o *= 2) {
        sum += __shfl_xor_sync(0xffffffffu, sum, o);
    }
    if (word % U == 0) {
        out[(int64_t) steps * 32 * N + unit] = -(float) S::Z * sum * pn_pow2(PN_SCALE_DOWN);
    }
}

// N activations from quads or pairs that lie 32 lanes apart.
template <int N> static __device__ __forceinline__ void pn_load_x(const char * base, float * a) {
    if constexpr (N % 4 == 0) {
#pragma unroll
        for (int q = 0; q < N / 4; q++) {
            const float4 v = __ldg((const float4 *) base + q * 32);
            a[4 * q] = v.x, a[4 * q + 1] = v.y, a[4 * q + 2] = v.z, a[4 * q + 3] = v.w;
        }
    } else {
#pragma unroll
        for (int q = 0; q < N / 2; q++) {
            const float2 v = __ldg((const float2 *) base + q * 32);
            a[2 * q] = v.x, a[2 * q + 1] = v.y;
        }
    }
}

// Hides where a pointer came from. Without it the compiler rewrites `pointer + constant` from what it knows of the
// low bits, and loads get 64-bit additions of their own in place of constant offsets.
static __device__ __forceinline__ const char * pn_opaque(const char * p) {
    asm("" : "+l"(p));
    return p;
}

// The sum over a warp of R values a lane, R = 1, 2 or 4. Halving the number of values with the first exchanges takes
// 6 shuffles for 4 values, not 20; value r ends up in lanes r * 32/R and up.
template <int R> static __device__ __forceinline__ float pn_reduce(const float * v, int lane) {
    float s;
    int   o = 16;
    static_assert(R == 1 || R == 2 || R == 4, "rows a warp");
    if constexpr (R == 4) {
        const bool  high = lane & 16, mid = lane & 8;
        const float a = (high ? v[2] : v[0]) + __shfl_xor_sync(0xffffffffu, high ? v[0] : v[2], 16);
        const float b = (high ? v[3] : v[1]) + __shfl_xor_sync(0xffffffffu, high ? v[1] : v[3], 16);
        s = (mid ? b : a) + __shfl_xor_sync(0xffffffffu, mid ? a : b, 8);
        o = 4;
    } else if constexpr (R == 2) {
        const bool high = lane & 16;
        s = (high ? v[1] : v[0]) + __shfl_xor_sync(0xffffffffu, high ? v[0] : v[1], 16);
        o = 8;
    } else {
        s = v[0];
    }
#pragma unroll
    for (; o > 0; o >>= 1) {
        s += __shfl_xor_sync(0xffffffffu, s, o);
    }
    return s;
}

static constexpr int pn_threads(int wk) { return wk == 1 ? 128 : 32 * wk; }

// Products with the same activations that run in one launch, prepared once: q, k and v; gate and up.
#define PN_GROUP 3
struct pn_product {
    const char * weights;
    float *      dst;
    int64_t      stride_dst;  // between columns
    int          nrows;
};
struct pn_group {
    pn_product of[PN_GROUP];
    int        count;
};

// R rows a warp. WK = 1: four warps a block, each with rows of its own; else WK warps a block split K between them.
// NBLK is the row length in blocks, 0 for any. nrows >= R: the last block of rows
// starts early and repeats rows of the one before (same values, written twice), so that no load needs a guard and all
// addresses are one pointer and constants. Weights are loaded as 16-bit halves: nothing in a row is more aligned.
template <int BITS, int NCOLS, int R, int WK, int NBLK>
static __device__ __forceinline__ void pn_rows(const pn_product & p, const float * __restrict__ prepared, int nblk_any,
        int64_t row_bytes_any) {
    using S = pn_shape<BITS>;
    constexpr int     U         = pn_unit<NCOLS>::WORDS;
    constexpr int     N         = S::PER_WORD * U;
    const int         nblk      = NBLK ? NBLK : nblk_any;
    const int64_t     row_bytes = NBLK ? (int64_t) NBLK * PN_CUDA_BLOCK_BYTES : row_bytes_any;
    const int         units     = nblk * 8 / U;
    const int         steps     = pn_steps(nblk, U);
    constexpr bool    EXACT     = NBLK != 0 && NBLK * 8 / U % 32 == 0;
    constexpr int     STEP      = 4 * U * PN_CUDA_BLOCK_BYTES;  // 32 lanes of U words: 4 * U blocks
    const int         warp      = WK == 1 ? 0 : threadIdx.x / 32;
    const int         lane      = threadIdx.x % 32;
    const int         group     = WK == 1 ? blockIdx.x * 4 + threadIdx.x / 32 : blockIdx.x;
    const int         row0      = min(group * R, p.nrows - R);
    const int64_t     col_size  = pn_prep_floats<BITS, U>(nblk);
    constexpr int     QUAD      = N % 4 == 0 ? 16 : 8;

    const char * row   = pn_opaque(p.weights + row0 * row_bytes);
    const char * scale = pn_opaque(row + warp * STEP + lane / (8 / U) * PN_CUDA_BLOCK_BYTES);
    const char * code  = pn_opaque(scale + 2 + 4 * U * (lane % (8 / U)));
    const char * quads = pn_opaque((const char *) (prepared + warp * 32 * N) + lane * QUAD);
    const char * zeros = pn_opaque((const char *) (prepared + (int64_t) steps * 32 * N + warp * 32 + lane));

    float acc[NCOLS][R] = {};
#pragma unroll 1
    for (int step = warp; step < steps; step += WK) {
        // A lane past the row's end reads the row's first word; its activations and zero sums are zeros.
        const bool   inside   = EXACT || step * 32 + lane < units;
        const char * at_scale = inside ? scale : row;
        const char * at_code  = inside ? code : row + 2;

        float a[NCOLS][N], zero[NCOLS];
#pragma unroll
        for (int c = 0; c < NCOLS; c++) {
            pn_load_x<N>(quads + c * col_size * 4, a[c]);
            zero[c] = __ldg((const float *) (zeros + c * col_size * 4));
        }
        uint32_t half[R][2 * U];
        float    d[R];
#pragma unroll
        for (int r = 0; r < R; r++) {
#pragma unroll
            for (int i = 0; i < 2 * U; i++) {
                half[r][i] = __ldg((const uint16_t *) (at_code + r * row_bytes) + i);
            }
            d[r] = __half2float(__ushort_as_half(__ldg((const uint16_t *) (at_scale + r * row_bytes))));
        }
#pragma unroll
        for (int r = 0; r < R; r++) {
            float part[NCOLS];
#pragma unroll
            for (int c = 0; c < NCOLS; c++) {
                part[c] = zero[c];
            }
#pragma unroll
            for (int i = 0; i < 2 * U; i++) {
#pragma unroll
                for (int j = 0; j < S::PAIRS; j++) {
                    const uint32_t bits = j == S::PAIRS - 1 ? half[r][i] : half[r][i] & ((uint32_t) S::MASK << (BITS * j));
#pragma unroll
                    for (int c = 0; c < NCOLS; c++) {
                        part[c] = __fmaf_ieee_rn(__uint_as_float(bits), a[c][i * S::PAIRS + j], part[c]);
                    }
                }
            }
#pragma unroll
            for (int c = 0; c < NCOLS; c++) {
                acc[c][r] = __fmaf_ieee_rn(d[r], part[c], acc[c][r]);
            }
        }
        scale += WK * STEP;
        code  += WK * STEP;
        quads += WK * 32 * N * 4;
        zeros += WK * 32 * 4;
    }

    __shared__ float shared[WK][NCOLS][R];
    const int r = lane / (32 / R);
#pragma unroll
    for (int c = 0; c < NCOLS; c++) {
        const float v = pn_reduce<R>(acc[c], lane);
        if (lane % (32 / R) == 0) {
            if (WK == 1) {
                p.dst[c * p.stride_dst + row0 + r] = v * pn_pow2(-PN_SCALE_DOWN);
            } else {
                shared[warp][c][r] = v;
            }
        }
    }
    if (WK > 1) {
        __syncthreads();
        for (int i = threadIdx.x; i < NCOLS * R; i += 32 * WK) {
            float v = 0.0f;
#pragma unroll
            for (int k = 0; k < WK; k++) {
                v += (&shared[k][0][0])[i];
            }
            p.dst[i / R * p.stride_dst + row0 + i % R] = v * pn_pow2(-PN_SCALE_DOWN);
        }
    }
}

// One product, or a group of which blockIdx.y is the product.
template <int BITS, int NCOLS, int R, int WK, int NBLK, bool ONE>
__global__ void __launch_bounds__(pn_threads(WK))
pn_gemv(const pn_group group, const float * __restrict__ prepared, int nblk, int64_t row_bytes) {
    if constexpr (ONE) {
        pn_rows<BITS, NCOLS, R, WK, NBLK>(group.of[0], prepared, nblk, row_bytes);
    } else {
        // No index: it would copy the group into memory first.
        const int        y = blockIdx.y;
        const pn_product p = y == 0 ? group.of[0] : y == 1 ? group.of[1] : group.of[2];
        if (blockIdx.x * (WK == 1 ? 4 * R : R) < p.nrows) {
            pn_rows<BITS, NCOLS, R, WK, NBLK>(p, prepared, nblk, row_bytes);
        }
    }
}

// Matrices that an index on the card picks: blockIdx.y is the slot of a token, blockIdx.z the token.
struct pn_experts {
    const char *    weights;
    int64_t         bytes;       // of a matrix
    const int32_t * ids;
    int64_t         stride_ids;  // between tokens
    int             columns;     // activations of a token: one for all slots, or one each
    float *         dst;
    int64_t         stride_slot, stride_token;
    int             nrows;
};

template <int BITS, int R, int WK>
__global__ void __launch_bounds__(pn_threads(WK))
pn_gemv_id(const pn_experts e, const float * __restrict__ prepared, int nblk, int64_t row_bytes) {
    const int        slot = blockIdx.y, token = blockIdx.z;
    const pn_product p    = { e.weights + e.ids[token * e.stride_ids + slot] * e.bytes,
        e.dst + token * e.stride_token + slot * e.stride_slot, 0, e.nrows };
    const int column = token * e.columns + slot % e.columns;
    pn_rows<BITS, 1, R, WK, 0>(p, prepared + (int64_t) column * pn_prep_floats<BITS, pn_unit<1>::WORDS>(nblk), nblk, row_bytes);
}

// The reference: shift, mask, convert, one product per weight, activations as they are. A warp per row and column.
template <int BITS>
__global__ void pn_gemv_reference(const char * __restrict__ weights, const float * __restrict__ x, float * __restrict__ dst,
        int nrows, int nblk, int64_t row_bytes, int64_t stride_x, int64_t stride_dst) {
    using S = pn_shape<BITS>;
    const int row  = blockIdx.x * blockDim.y + threadIdx.y;
    const int lane = threadIdx.x;
    if (row >= nrows) {
        return;
    }
    const char * base = weights + (int64_t) row * row_bytes;
    x += blockIdx.y * stride_x;
    float acc = 0.0f;
    for (int word = lane; word < nblk * 8; word += 32) {
        const int64_t ib = word / 8;
#pragma unroll
        for (int j = 0; j < S::PAIRS; j++) {
            float2 w;
            pn_dequantize_pair<BITS>(base, ib, (word % 8) * S::PER_WORD + 2 * j, w);
            acc = fmaf(w.x, x[(int64_t) word * S::PER_WORD + 2 * j], acc);
            acc = fmaf(w.y, x[(int64_t) word * S::PER_WORD + 2 * j + 1], acc);
        }
    }
#pragma unroll
    for (int o = 16; o > 0; o >>= 1) {
        acc += __shfl_xor_sync(0xffffffffu, acc, o);
    }
    if (lane == 0) {
        dst[blockIdx.y * stride_dst + row] = acc;
    }
}

struct pn_options {
    bool subnormal = true;  // false: the reference kernel
    bool fixed     = true;  // false: the any-length kernel for every row length
    int  sms       = 56;    // multiprocessors of the card
};

template <int BITS, int U>
static void pn_prepare_run(const float * x, float * prep, int nblk, int columns, int64_t stride_x, cudaStream_t stream) {
    const int words = pn_steps(nblk, U) * 32 * U;
    pn_prepare<BITS, U><<<dim3((words + 127) / 128, columns), 128, 0, stream>>>(x, prep, nblk, stride_x);
}

template <int BITS, int NCOLS, int R, int WK, int NBLK>
static void pn_launch_one(const pn_group & group, const float * prep, int most, int nblk, int64_t row_bytes,
        cudaStream_t stream) {
    constexpr int rows_a_block = WK == 1 ? 4 * R : R;
    const dim3 blocks((most + rows_a_block - 1) / rows_a_block, group.count);
    if (group.count == 1) {
        pn_gemv<BITS, NCOLS, R, WK, NBLK, true><<<blocks, pn_threads(WK), 0, stream>>>(group, prep, nblk, row_bytes);
    } else {
        pn_gemv<BITS, NCOLS, R, WK, NBLK, false><<<blocks, pn_threads(WK), 0, stream>>>(group, prep, nblk, row_bytes);
    }
}

template <int BITS, int NCOLS>
static void pn_launch(const pn_group & group, const float * x, float * prep, int nblk, int64_t row_bytes, int64_t stride_x,
        const pn_options & options, cudaStream_t stream) {
    int most = 0, least = INT_MAX, warps = 0;
    for (int i = 0; i < group.count; i++) {
        most  = std::max(most, group.of[i].nrows);
        least = std::min(least, group.of[i].nrows);
        warps += (group.of[i].nrows + 3) / 4;
    }
    pn_prepare_run<BITS, pn_unit<NCOLS>::WORDS>(x, prep, nblk, NCOLS, stride_x, stream);
    if constexpr (NCOLS == 1) {
        // The row lengths of the documented model. K is split between warps where there are too few rows for 16 warps
        // a multiprocessor.
        if (options.fixed && least >= 4 && row_bytes == (int64_t) nblk * PN_CUDA_BLOCK_BYTES) {
            const int wanted = 16 * options.sms;
#define PN_FIXED(b, n) if (BITS == b && nblk == n) { \
                constexpr int len = BITS == b ? n : 0; \
                if (warps >= wanted) { \
                    pn_launch_one<BITS, 1, 4, 1, len>(group, prep, most, nblk, row_bytes, stream); \
                } else if (2 * warps >= wanted) { \
                    pn_launch_one<BITS, 1, 4, 2, len>(group, prep, most, nblk, row_bytes, stream); \
                } else { \
                    pn_launch_one<BITS, 1, 4, 4, len>(group, prep, most, nblk, row_bytes, stream); \
                } \
                return; \
            }
            PN_FIXED(3, 64)   // 5120
            PN_FIXED(4, 80)   // 5120
            PN_FIXED(4, 96)   // 6144
            PN_FIXED(4, 272)  // 17408
#undef PN_FIXED
        }
    }
    if (least < 4) {
        return pn_launch_one<BITS, NCOLS, 1, 4, 0>(group, prep, most, nblk, row_bytes, stream);
    }
    pn_launch_one<BITS, NCOLS, 4, 4, 0>(group, prep, most, nblk, row_bytes, stream);
}

// Floats of workspace for these columns of a group, and of a product by expert.
template <int BITS> static size_t pn_workspace(int nblk, int ncols) {
    return (size_t) ncols * (ncols == 1 ? pn_prep_floats<BITS, 4>(nblk) : pn_prep_floats<BITS, 1>(nblk));
}
template <int BITS> static size_t pn_workspace_id(int nblk, int columns) {
    return (size_t) columns * pn_prep_floats<BITS, pn_unit<1>::WORDS>(nblk);
}

template <int BITS>
static void pn_gemv_run(const pn_group & group, const float * x, float * prep, int nblk, int64_t row_bytes, int ncols,
        int64_t stride_x, const pn_options & options, cudaStream_t stream) {
    if (!options.subnormal) {
        for (int i = 0; i < group.count; i++) {
            const pn_product & p = group.of[i];
            pn_gemv_reference<BITS><<<dim3((p.nrows + 3) / 4, ncols), dim3(32, 4), 0, stream>>>(
                p.weights, x, p.dst, p.nrows, nblk, row_bytes, stride_x, p.stride_dst);
        }
        return;
    }
#define PN_CASE(n) case n: return pn_launch<BITS, n>(group, x, prep, nblk, row_bytes, stride_x, options, stream)
    switch (ncols) {
        PN_CASE(1); PN_CASE(2); PN_CASE(3); PN_CASE(4); PN_CASE(5); PN_CASE(6); PN_CASE(7); PN_CASE(8);
    }
#undef PN_CASE
}

// `slots` products a token. Short rows: no warp would be left without a step of K.
template <int BITS>
static void pn_gemv_id_run(const pn_experts & e, const float * x, float * prep, int nblk, int slots, int tokens, int64_t stride_x,
        cudaStream_t stream) {
    constexpr int U = pn_unit<1>::WORDS;
    const int64_t row_bytes = (int64_t) nblk * PN_CUDA_BLOCK_BYTES;
    pn_prepare_run<BITS, U>(x, prep, nblk, e.columns * tokens, stride_x, stream);
    if (e.nrows < 4) {
        pn_gemv_id<BITS, 1, 4><<<dim3(e.nrows, slots, tokens), pn_threads(4), 0, stream>>>(e, prep, nblk, row_bytes);
    } else if (pn_steps(nblk, U) < 4) {
        pn_gemv_id<BITS, 4, 1><<<dim3((e.nrows + 15) / 16, slots, tokens), pn_threads(1), 0, stream>>>(e, prep, nblk, row_bytes);
    } else {
        pn_gemv_id<BITS, 4, 4><<<dim3((e.nrows + 3) / 4, slots, tokens), pn_threads(4), 0, stream>>>(e, prep, nblk, row_bytes);
    }
}

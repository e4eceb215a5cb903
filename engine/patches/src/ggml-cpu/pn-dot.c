// SPDX-License-Identifier: Apache-2.0
// Every decoded value is exact and every product is in F32: what differs from the dequantized row is the order of the
// sum and that a block's scale is applied once.
#include "pn-dot.h"
#include "pn.h"

#include <stdint.h>
#include <string.h>

#if defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#include <immintrin.h>

static inline __m256i spread(const uint8_t * word) {
    int32_t w;
    memcpy(&w, word, 4);
    return _mm256_set1_epi32(w);
}

static inline float half_to_float(const uint8_t * p) {
    return _mm_cvtss_f32(_mm_cvtph_ps(_mm_cvtsi32_si128(p[0] | p[1] << 8)));
}

static inline float sum8(__m256 v) {
    const __m128 a = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    const __m128 b = _mm_add_ps(a, _mm_movehl_ps(a, a));
    return _mm_cvtss_f32(_mm_add_ss(b, _mm_movehdup_ps(b)));
}

// Two activations of each of four words: elements 8 and 9, 18 and 19, 28 and 29, 38 and 39.
static inline __m256 tail_x(const float * x) {
    const __m128 lo = _mm_loadh_pi(_mm_castpd_ps(_mm_load_sd((const double *) (x + 8))), (const __m64 *) (x + 18));
    const __m128 hi = _mm_loadh_pi(_mm_castpd_ps(_mm_load_sd((const double *) (x + 28))), (const __m64 *) (x + 38));
    return _mm256_set_m128(hi, lo);
}

void ggml_vec_dot_pn3t_f32(int n, float * s, size_t bs, const void * vx, size_t bx, const void * vy, size_t by, int nrc) {
    (void) bs, (void) bx, (void) by, (void) nrc;
    const uint8_t * block = (const uint8_t *) vx;
    const float *   x     = (const float *) vy;
    // A permute reads only the low three bits of each index: one instruction masks, converts and subtracts the zero point.
    const __m256  values = _mm256_setr_ps(-4, -3, -2, -1, 0, 1, 2, 3);
    const __m256i head   = _mm256_setr_epi32(0, 16, 3, 19, 6, 22, 9, 25);
    const __m256i tail   = _mm256_setr_epi32(12, 28, 12, 28, 12, 28, 12, 28);
    const __m256i first  = _mm256_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3);
    const __m256i second = _mm256_setr_epi32(4, 4, 5, 5, 6, 6, 7, 7);
    __m256        total  = _mm256_setzero_ps();
    for (int i = 0; i < n; i += PN3T_WEIGHTS, block += PN_BLOCK_BYTES, x += PN3T_WEIGHTS) {
        const uint8_t * words = block + 2;
        __m256          a = _mm256_setzero_ps(), b = _mm256_setzero_ps();
#define HEAD(w) _mm256_permutevar8x32_ps(values, _mm256_srlv_epi32(spread(words + 4 * (w)), head))
        for (int w = 0; w < PN_WORDS; w += 2) {
            a = _mm256_fmadd_ps(HEAD(w), _mm256_loadu_ps(x + 10 * w), a);
            b = _mm256_fmadd_ps(HEAD(w + 1), _mm256_loadu_ps(x + 10 * w + 10), b);
        }
#undef HEAD
        const __m256i all = _mm256_loadu_si256((const __m256i *) words);
#define TAIL(which) _mm256_permutevar8x32_ps(values, _mm256_srlv_epi32(_mm256_permutevar8x32_epi32(all, which), tail))
        a = _mm256_fmadd_ps(TAIL(first), tail_x(x), a);
        b = _mm256_fmadd_ps(TAIL(second), tail_x(x + 40), b);
#undef TAIL
        total = _mm256_fmadd_ps(_mm256_set1_ps(half_to_float(block)), _mm256_add_ps(a, b), total);
    }
    *s = sum8(total);
}

void ggml_vec_dot_pn4t_f32(int n, float * s, size_t bs, const void * vx, size_t bx, const void * vy, size_t by, int nrc) {
    (void) bs, (void) bx, (void) by, (void) nrc;
    const uint8_t * block  = (const uint8_t *) vx;
    const float *   x      = (const float *) vy;
    const __m256i   shifts = _mm256_setr_epi32(0, 16, 4, 20, 8, 24, 12, 28);
    // The code under the exponent of 2^23 is the number 2^23 + code: no conversion, and the subtraction is exact.
    const __m256i   mask   = _mm256_set1_epi32(15);
    const __m256i   magic  = _mm256_set1_epi32(0x4b000000);
    const __m256    bias   = _mm256_set1_ps(8388608.0f + 8.0f);
    __m256          total  = _mm256_setzero_ps();
    for (int i = 0; i < n; i += PN4T_WEIGHTS, block += PN_BLOCK_BYTES, x += PN4T_WEIGHTS) {
        const uint8_t * words = block + 2;
        __m256          a = _mm256_setzero_ps(), b = _mm256_setzero_ps();
#define CODES(w) _mm256_sub_ps(_mm256_castsi256_ps(_mm256_or_si256(_mm256_and_si256( \
            _mm256_srlv_epi32(spread(words + 4 * (w)), shifts), mask), magic)), bias)
        for (int w = 0; w < PN_WORDS; w += 2) {
            a = _mm256_fmadd_ps(CODES(w), _mm256_loadu_ps(x + 8 * w), a);
            b = _mm256_fmadd_ps(CODES(w + 1), _mm256_loadu_ps(x + 8 * w + 8), b);
        }
#undef CODES
        total = _mm256_fmadd_ps(_mm256_set1_ps(half_to_float(block)), _mm256_add_ps(a, b), total);
    }
    *s = sum8(total);
}

#else

static float dot(int bits, int n, const uint8_t * block, const float * x) {
    const int per_block = pn_block_weights(bits);
    const int z         = 1 << (bits - 1);
    uint8_t   codes[PN3T_WEIGHTS];
    float     total = 0.0f;
    for (int i = 0; i < n; i += per_block, block += PN_BLOCK_BYTES, x += per_block) {
        float sum = 0.0f;
        pn_block_codes(bits, block, codes);
        for (int e = 0; e < per_block; e++) {
            sum += (float) (codes[e] - z) * x[e];
        }
        total += pn_half_to_float((uint16_t) (block[0] | block[1] << 8)) * sum;
    }
    return total;
}

void ggml_vec_dot_pn3t_f32(int n, float * s, size_t bs, const void * vx, size_t bx, const void * vy, size_t by, int nrc) {
    (void) bs, (void) bx, (void) by, (void) nrc;
    *s = dot(3, n, (const uint8_t *) vx, (const float *) vy);
}

void ggml_vec_dot_pn4t_f32(int n, float * s, size_t bs, const void * vx, size_t bx, const void * vy, size_t by, int nrc) {
    (void) bs, (void) bx, (void) by, (void) nrc;
    *s = dot(4, n, (const uint8_t *) vx, (const float *) vy);
}

#endif

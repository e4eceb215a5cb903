// SPDX-License-Identifier: Apache-2.0
// A block's eight words are decoded at once: lane w of vector t holds code t of word w, so that one shift or mask serves
// eight weights and nothing is broadcast or left over. Activations are put into that order (word inside element) first.
#include "pn-dot.h"
#include "pn.h"

#include <string.h>

#if defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#include <immintrin.h>

#define INLINE static inline __attribute__((always_inline))
#define COLUMNS 4
// How far ahead weights are asked for: one request a block. Without it a core waits for memory a third of its time.
#define AHEAD 2048

// pn3t: 10 vectors a block. pn4t: 8 vectors, and one for the zero point.
#define VECTORS(bits) ((bits) == 3 ? 10 : 9)
#define CODES(bits)   ((bits) == 3 ? 10 : 8)
#define SHIFT(bits, t) ((bits) * ((t) >> 1) + 16 * ((t) & 1))

size_t ggml_pn_prepared_size(int bits, int64_t n_blocks) { return (size_t) n_blocks * VECTORS(bits) * 8; }

// pn4t codes stay where they are in the word: code t reads as n * 2^shift, so its activation is divided by 2^shift, which
// is exact down to |x| = 2^-98.
void ggml_pn_prepare(int bits, int64_t first, int64_t last, const float * x, float * prepared) {
    const int codes = CODES(bits);
    for (int64_t b = first; b < last; b++) {
        const float * from = x + b * codes * PN_WORDS;
        float *       to   = prepared + b * VECTORS(bits) * 8;
        for (int w = 0; w < PN_WORDS; w++) {
            float sum = 0.0f;
            for (int t = 0; t < codes; t++) {
                const float v = from[w * codes + t];
                to[t * 8 + w] = bits == 3 ? v : v / (float) (1u << SHIFT(4, t));
                sum += t == 7 ? 0.0f : v;
            }
            if (bits == 4) {
                to[8 * 8 + w] = -8.0f * sum;
            }
        }
    }
}

INLINE __m256i block_words(const uint8_t * block) { return _mm256_loadu_si256((const __m256i *) (block + 2)); }

INLINE __m256 block_scale(const uint8_t * block) {
    int16_t half;
    memcpy(&half, block, sizeof(half));
    return _mm256_cvtph_ps(_mm_set1_epi16(half));
}

INLINE float sum8(__m256 v) {
    const __m128 a = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    const __m128 b = _mm_add_ps(a, _mm_movehl_ps(a, a));
    return _mm_cvtss_f32(_mm_add_ss(b, _mm_movehdup_ps(b)));
}

// n - 4: a permute reads only the low three bits of each index, so it masks, converts and subtracts the zero point.
INLINE __m256 steps3(__m256i words, int t) {
    return _mm256_permutevar8x32_ps(_mm256_setr_ps(-4, -3, -2, -1, 0, 1, 2, 3), _mm256_srli_epi32(words, SHIFT(3, t)));
}

INLINE __m256i mask4(__m256i words, int t) { return _mm256_and_si256(words, _mm256_set1_epi32((int) (15u << SHIFT(4, t)))); }

// (n - 8) * 2^shift; the code at the top wraps into the right sign.
INLINE __m256 steps4(__m256i words, int t) {
    return _mm256_cvtepi32_ps(_mm256_sub_epi32(mask4(words, t), _mm256_set1_epi32((int) (8u << SHIFT(4, t)))));
}

// One row, one column. The scale is applied once a block. pn4t starts each block at -8 * sum(x), so that its codes need no
// subtraction; the code at the top gets its zero point from the flipped sign.
INLINE float one(int bits, int64_t n_blocks, const uint8_t * block, const float * x) {
    __m256 total = _mm256_setzero_ps();
    for (int64_t i = 0; i < n_blocks; i++, block += PN_BLOCK_BYTES, x += VECTORS(bits) * 8) {
        _mm_prefetch((const char *) block + AHEAD, _MM_HINT_T0);
        __m256i words = block_words(block);
        __m256  a = _mm256_setzero_ps(), b = a;
        if (bits == 3) {
#pragma GCC unroll 5
            for (int t = 0; t < 10; t += 2) {
                a = _mm256_fmadd_ps(steps3(words, t), _mm256_loadu_ps(x + 8 * t), a);
                b = _mm256_fmadd_ps(steps3(words, t + 1), _mm256_loadu_ps(x + 8 * t + 8), b);
            }
        } else {
            words = _mm256_xor_si256(words, _mm256_set1_epi32((int) 0x80000000u));
            a     = _mm256_loadu_ps(x + 8 * 8);
#pragma GCC unroll 4
            for (int t = 0; t < 8; t += 2) {
                a = _mm256_fmadd_ps(_mm256_cvtepi32_ps(mask4(words, t)), _mm256_loadu_ps(x + 8 * t), a);
                b = _mm256_fmadd_ps(_mm256_cvtepi32_ps(mask4(words, t + 1)), _mm256_loadu_ps(x + 8 * t + 8), b);
            }
        }
        total = _mm256_fmadd_ps(block_scale(block), _mm256_add_ps(a, b), total);
    }
    return sum8(total);
}

INLINE void multiply(__m256 w0, __m256 w1, int cols, const float * x, size_t x_stride, __m256 * sum0, __m256 * sum1) {
    for (int c = 0; c < cols; c++) {
        const __m256 v = _mm256_loadu_ps(x + c * x_stride);
        sum0[c]        = _mm256_fmadd_ps(w0, v, sum0[c]);
        sum1[c]        = _mm256_fmadd_ps(w1, v, sum1[c]);
    }
}

// Two rows, 2 to 4 columns: each weight is decoded once, as the exact product d * (n - z), and used for every column.
INLINE void tile(int bits, int cols, int64_t n_blocks, const uint8_t * row0, const uint8_t * row1, const float * x,
                 size_t x_stride, float * y, size_t y_stride, int n_rows) {
    __m256 sum0[COLUMNS], sum1[COLUMNS];
    for (int c = 0; c < cols; c++) {
        sum0[c] = sum1[c] = _mm256_setzero_ps();
    }
    for (int64_t i = 0; i < n_blocks; i++, row0 += PN_BLOCK_BYTES, row1 += PN_BLOCK_BYTES, x += VECTORS(bits) * 8) {
        const __m256i words0 = block_words(row0), words1 = block_words(row1);
        const __m256  d0 = block_scale(row0), d1 = block_scale(row1);
        if (bits == 3) {
#pragma GCC unroll 10
            for (int t = 0; t < 10; t++) {
                multiply(_mm256_mul_ps(d0, steps3(words0, t)), _mm256_mul_ps(d1, steps3(words1, t)), cols, x + 8 * t,
                    x_stride, sum0, sum1);
            }
        } else {
#pragma GCC unroll 8
            for (int t = 0; t < 8; t++) {
                multiply(_mm256_mul_ps(d0, steps4(words0, t)), _mm256_mul_ps(d1, steps4(words1, t)), cols, x + 8 * t,
                    x_stride, sum0, sum1);
            }
        }
    }
    for (int c = 0; c < cols; c++) {
        y[c * y_stride] = sum8(sum0[c]);
        if (n_rows > 1) {
            y[c * y_stride + 1] = sum8(sum1[c]);
        }
    }
}

INLINE void rows_of(int bits, int64_t n_blocks, const uint8_t * rows, size_t row_bytes, int64_t n_rows, const float * x,
                    int64_t n_cols, float * y, size_t y_stride) {
    const size_t x_stride = ggml_pn_prepared_size(bits, n_blocks);
    for (int64_t c = 0; c < n_cols; c += COLUMNS, x += COLUMNS * x_stride, y += COLUMNS * y_stride) {
        const int64_t cols = n_cols - c;
        if (cols == 1) {
            for (int64_t r = 0; r < n_rows; r++) {
                y[r] = one(bits, n_blocks, rows + r * row_bytes, x);
            }
            continue;
        }
        for (int64_t r = 0; r < n_rows; r += 2) {
            const uint8_t * row0 = rows + r * row_bytes;
            const int       n    = r + 1 < n_rows ? 2 : 1;  // a last single row is computed beside itself
            const uint8_t * row1 = n == 2 ? row0 + row_bytes : row0;
            switch (cols) {
                case 2:  tile(bits, 2, n_blocks, row0, row1, x, x_stride, y + r, y_stride, n); break;
                case 3:  tile(bits, 3, n_blocks, row0, row1, x, x_stride, y + r, y_stride, n); break;
                default: tile(bits, 4, n_blocks, row0, row1, x, x_stride, y + r, y_stride, n); break;
            }
        }
    }
}

void ggml_pn_rows(int bits, int64_t n_blocks, const uint8_t * rows, size_t row_bytes, int64_t n_rows, const float * prepared,
                  int64_t n_cols, float * y, size_t y_stride) {
    if (bits == 3) {
        rows_of(3, n_blocks, rows, row_bytes, n_rows, prepared, n_cols, y, y_stride);
    } else {
        rows_of(4, n_blocks, rows, row_bytes, n_rows, prepared, n_cols, y, y_stride);
    }
}

#else

size_t ggml_pn_prepared_size(int bits, int64_t n_blocks) {
    (void) bits, (void) n_blocks;
    return 0;
}

void ggml_pn_prepare(int bits, int64_t first, int64_t last, const float * x, float * prepared) {
    (void) bits, (void) first, (void) last, (void) x, (void) prepared;
}

void ggml_pn_rows(int bits, int64_t n_blocks, const uint8_t * rows, size_t row_bytes, int64_t n_rows, const float * prepared,
                  int64_t n_cols, float * y, size_t y_stride) {
    (void) bits, (void) n_blocks, (void) rows, (void) row_bytes, (void) n_rows, (void) prepared, (void) n_cols, (void) y;
    (void) y_stride;
}

#endif

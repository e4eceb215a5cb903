/* SPDX-License-Identifier: Apache-2.0 */
#include "pn.h"

#include <math.h>
#include <string.h>

#define PN_CANDIDATES 36
#define PN_MAX_WEIGHTS 80

static uint32_t load_u16(const uint8_t * p) { return (uint32_t) p[0] | (uint32_t) p[1] << 8; }

static uint32_t load_u32(const uint8_t * p) { return load_u16(p) | load_u16(p + 2) << 16; }

static void store_u16(uint8_t * p, uint32_t v) {
    p[0] = (uint8_t) v;
    p[1] = (uint8_t) (v >> 8);
}

static int code_shift(int bits, int t) { return bits * (t >> 1) + 16 * (t & 1); }

float pn_half_to_float(uint16_t h) {
    const uint32_t sign = (uint32_t) (h & 0x8000u) << 16;
    const uint32_t exp  = (h >> 10) & 31u;
    const uint32_t man  = h & 0x3ffu;
    uint32_t bits;
    if (exp == 31) {
        bits = sign | 0x7f800000u | man << 13;
    } else if (exp != 0) {
        bits = sign | (exp + 112) << 23 | man << 13;
    } else { /* zero or subnormal: man * 2^-24 is exact */
        float v = (float) man * 5.9604644775390625e-08f;
        memcpy(&bits, &v, 4);
        bits |= sign;
    }
    float out;
    memcpy(&out, &bits, 4);
    return out;
}

uint16_t pn_double_to_half(double v) {
    uint64_t u;
    memcpy(&u, &v, 8);
    const uint16_t sign = (uint16_t) (u >> 48 & 0x8000u);
    const int      exp  = (int) (u >> 52 & 0x7ff) - 1023;
    uint64_t       man  = u & 0xfffffffffffffull;
    if (exp == 1024) {
        return (uint16_t) (sign | 0x7c00u | (man ? 0x200u : 0u));
    }
    if (exp < -26) { /* under half of the least subnormal, doubles that are subnormal included */
        return sign;
    }
    if (exp > 15) {
        return (uint16_t) (sign | 0x7c00u);
    }
    man |= 1ull << 52;
    /* keep 11 significant bits, fewer below 2^-14; the rest decides the rounding */
    const int      drop = exp >= -14 ? 42 : 42 + (-14 - exp);
    uint64_t       kept = man >> drop;
    const uint64_t rest = man & ((1ull << drop) - 1);
    const uint64_t half = 1ull << (drop - 1);
    if (rest > half || (rest == half && (kept & 1))) {
        kept++;
    }
    /* the implicit bit of a normal number adds one to the exponent field, a carry adds the next */
    const uint64_t field = exp >= -14 ? (uint64_t) (exp + 14) << 10 : 0;
    return (uint16_t) (sign | (uint16_t) (field + kept));
}

void pn_block_codes(int bits, const uint8_t * block, uint8_t * codes) {
    const int      per_word = bits == 3 ? 10 : 8;
    const uint32_t mask     = (1u << bits) - 1;
    for (int w = 0; w < PN_WORDS; w++) {
        const uint32_t word = load_u32(block + 2 + 4 * w);
        for (int t = 0; t < per_word; t++) {
            codes[w * per_word + t] = (uint8_t) (word >> code_shift(bits, t) & mask);
        }
    }
}

void pn_decode(int bits, const void * src, float * dst, int64_t n_blocks) {
    const int       n = pn_block_weights(bits);
    const int       z = 1 << (bits - 1);
    const uint8_t * block = (const uint8_t *) src;
    uint8_t         codes[PN_MAX_WEIGHTS];
    for (int64_t b = 0; b < n_blocks; b++, block += PN_BLOCK_BYTES, dst += n) {
        const float d = pn_half_to_float((uint16_t) load_u16(block));
        pn_block_codes(bits, block, codes);
        for (int e = 0; e < n; e++) {
            dst[e] = d * (float) (codes[e] - z);
        }
    }
}

static void pack(int bits, uint16_t d, const uint8_t * codes, uint8_t * block) {
    const int per_word = bits == 3 ? 10 : 8;
    store_u16(block, d);
    for (int w = 0; w < PN_WORDS; w++) {
        uint32_t word = 0;
        for (int t = 0; t < per_word; t++) {
            word |= (uint32_t) codes[w * per_word + t] << code_shift(bits, t);
        }
        store_u16(block + 2 + 4 * w, word & 0xffffu);
        store_u16(block + 4 + 4 * w, word >> 16);
    }
}

static inline double nearest_step(double w, double s, double lo, double hi) {
    const double q = rint(w / s);
    return q < lo ? lo : q > hi ? hi : q;
}

/* The inner loop of the quantizer is vector code where the processor has it; results do not depend on that. */
#if defined(__GNUC__) && !defined(__clang__) && defined(__x86_64__) && defined(__gnu_linux__) && !defined(__AVX2__) && \
    !defined(__SANITIZE_ADDRESS__)
#define PN_CLONES __attribute__((target_clones("avx2", "default"), optimize("O3")))
#else
#define PN_CLONES
#endif

PN_CLONES
enum pn_status pn_quantize_block(int bits, const float * src, uint8_t * block, int * best_m, double * err) {
    const int    n  = pn_block_weights(bits);
    const int    z  = 1 << (bits - 1);
    const double lo = -z, hi = z - 1;
    double       max = src[0], min = src[0];
    uint8_t      codes[PN_MAX_WEIGHTS];

    if (best_m) *best_m = -1;
    if (err) *err = 0.0;
    for (int e = 0; e < n; e++) {
        if (!isfinite(src[e])) {
            return PN_BAD_INPUT;
        }
        max = src[e] > max ? src[e] : max;
        min = src[e] < min ? src[e] : min;
    }
    const double amax  = fabs(min) > fabs(max) ? fabs(min) : fabs(max);
    const double sigma = fabs(min) > max ? 1.0 : -1.0;

    /* The candidates that fp16 can hold, in ascending m. */
    double s[PN_CANDIDATES], sum[PN_CANDIDATES];
    int    index[PN_CANDIDATES];
    int    used = 0, overflow = 0;
    for (int i = 0; i < PN_CANDIDATES && amax > 0; i++) {
        const uint16_t h = pn_double_to_half(sigma * ((50 + 2 * i) / 100.0) * amax / z);
        if ((h & 0x7c00u) == 0x7c00u) {
            overflow = 1;
        } else if (h & 0x7fffu) {
            s[used] = pn_half_to_float(h);
            sum[used] = 0.0;
            index[used++] = i;
        }
    }
    /* Elements outside, candidates inside: each sum runs in element order and the inner loop is vector code. */
    for (int e = 0; e < n; e++) {
        const double w = src[e];
        for (int i = 0; i < used; i++) {
            const double diff = w - s[i] * nearest_step(w, s[i], lo, hi);
            sum[i] += diff * diff;
        }
    }
    int best = -1;
    for (int i = 0; i < used; i++) {
        if (best < 0 || sum[i] <= sum[best]) {
            best = i;
        }
    }
    if (best < 0 && !overflow) { /* zeros only, or too small for any fp16 scale: the canonical zero group */
        memset(codes, z, sizeof codes);
        pack(bits, 0, codes, block);
        if (err) {
            for (int e = 0; e < n; e++) {
                *err += (double) src[e] * (double) src[e];
            }
        }
        return PN_OK;
    }
    const double scale = best < 0 ? sigma * 65504.0 : s[best]; /* none fits under the largest half: saturate */
    double       total = 0.0;
    for (int e = 0; e < n; e++) {
        const double q    = nearest_step(src[e], scale, lo, hi);
        const double diff = src[e] - scale * q;
        total += diff * diff;
        codes[e] = (uint8_t) ((int) q + z);
    }
    pack(bits, pn_double_to_half(scale), codes, block);
    if (best_m) *best_m = best < 0 ? -1 : index[best];
    if (err) *err = total;
    return PN_OK;
}

enum pn_status pn_quantize(int bits, const float * src, void * dst, int64_t n_blocks, int64_t * bad_block) {
    const int n = pn_block_weights(bits);
    for (int64_t b = 0; b < n_blocks; b++) {
        if (pn_quantize_block(bits, src + b * n, (uint8_t *) dst + b * PN_BLOCK_BYTES, NULL, NULL) != PN_OK) {
            if (bad_block) *bad_block = b;
            return PN_BAD_INPUT;
        }
    }
    return PN_OK;
}

enum pn_status pn_validate(int bits, const void * src, size_t n_bytes, int64_t * bad_block) {
    const int64_t   n_blocks = (int64_t) (n_bytes / PN_BLOCK_BYTES);
    const uint8_t * block    = (const uint8_t *) src;
    for (int64_t b = 0; b < n_blocks; b++, block += PN_BLOCK_BYTES) {
        enum pn_status status = (load_u16(block) & 0x7c00u) == 0x7c00u ? PN_BAD_SCALE : PN_OK;
        uint32_t       all    = 0;
        for (int w = 0; w < PN_WORDS; w++) {
            all |= load_u32(block + 2 + 4 * w);
        }
        if (status == PN_OK && bits == 3 && (all & 0x80008000u)) {
            status = PN_RESERVED_BIT;
        }
        if (status != PN_OK) {
            if (bad_block) *bad_block = b;
            return status;
        }
    }
    if (n_bytes % PN_BLOCK_BYTES) {
        if (bad_block) *bad_block = n_blocks;
        return PN_BAD_SIZE;
    }
    return PN_OK;
}

double pn_dot(int bits, const void * row, const float * x, int64_t n_blocks) {
    const int n = pn_block_weights(bits);
    float     w[PN_MAX_WEIGHTS];
    double    sum = 0.0;
    for (int64_t b = 0; b < n_blocks; b++) {
        pn_decode(bits, (const uint8_t *) row + b * PN_BLOCK_BYTES, w, 1);
        for (int e = 0; e < n; e++) {
            sum += (double) w[e] * (double) x[b * n + e];
        }
    }
    return sum;
}

const char * pn_status_text(enum pn_status status) {
    switch (status) {
        case PN_OK:           return "valid";
        case PN_BAD_SIZE:     return "the size is not a whole number of 34-byte blocks";
        case PN_BAD_SCALE:    return "the scale is a NaN or an infinity";
        case PN_RESERVED_BIT: return "a reserved bit (15 or 31 of a word) is set";
        case PN_BAD_INPUT:    return "a weight is a NaN or an infinity";
    }
    return "unknown status";
}

/* SPDX-License-Identifier: Apache-2.0 */
/*
 * PNX-FORMAT-v0: the pn3t and pn4t weight blocks. This file and pn.c are the normative code: the Python
 * library is tested against it and the patched ggml compiles it unchanged. C99, no dependency but <math.h>.
 *
 * A block is 34 bytes: a signed fp16 scale d, then eight little-endian 32-bit words of codes. `bits` is 3
 * (pn3t, 80 weights, zero point 4) or 4 (pn4t, 64 weights, zero point 8) in every function below.
 * Nothing here assumes more than byte alignment.
 */
#ifndef TENSORLESS_PN_H
#define TENSORLESS_PN_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define PN_FORMAT      "PNX-FORMAT-v0"
#define PN_BLOCK_BYTES 34
#define PN_WORDS       8
#define PN3T_TYPE_ID   124
#define PN4T_TYPE_ID   125
#define PN3T_WEIGHTS   80
#define PN4T_WEIGHTS   64

enum pn_status {
    PN_OK             = 0,
    PN_BAD_SIZE       = 1, /* the byte count is no multiple of 34 */
    PN_BAD_SCALE      = 2, /* d is a NaN or an infinity */
    PN_RESERVED_BIT   = 3, /* pn3t: bit 15 or 31 of a word is set */
    PN_BAD_INPUT      = 4  /* quantizing: a weight is a NaN or an infinity */
};

static inline int pn_block_weights(int bits) { return bits == 3 ? PN3T_WEIGHTS : PN4T_WEIGHTS; }

/* fp16 bit pattern <-> value; the way down rounds once, to nearest even, straight from the double. */
float    pn_half_to_float(uint16_t h);
uint16_t pn_double_to_half(double v);

/* Codes of one block, in element order. */
void pn_block_codes(int bits, const uint8_t * block, uint8_t * codes);

/* w = d * (n - z), exact in fp32, one product (so that code z under a negative d is -0.0). */
void pn_decode(int bits, const void * src, float * dst, int64_t n_blocks);

/* The reference quantizer. Returns PN_OK, or PN_BAD_INPUT with the block in *bad_block (may be NULL);
 * a block that fails is not written and nothing after it is. */
enum pn_status pn_quantize(int bits, const float * src, void * dst, int64_t n_blocks, int64_t * bad_block);

/* One group; best_m (0..35, -1 when no candidate was chosen) and err may be NULL. */
enum pn_status pn_quantize_block(int bits, const float * src, uint8_t * block, int * best_m, double * err);

/* Checks every block; the first bad one goes to *bad_block (may be NULL). */
enum pn_status pn_validate(int bits, const void * src, size_t n_bytes, int64_t * bad_block);

/* Dot product of a row and fp32 activations: double products and one double accumulator, element order. */
double pn_dot(int bits, const void * row, const float * x, int64_t n_blocks);

const char * pn_status_text(enum pn_status status);

#ifdef __cplusplus
}
#endif
#endif

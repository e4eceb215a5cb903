/* SPDX-License-Identifier: Apache-2.0 */
/* Golden vectors, one a line on standard input (tests/pn/vectors.py writes them), against pn.c.
 * Prints each failure as `line N: why`, then `N passed, N failed`. `--wrong-shift` decodes with the shift by
 * element index, a known defect of another engine: the vectors must catch it. */
#include "pn.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MAX_LINE (1 << 22)

static int wrong_shift;

static size_t unhex(const char * hex, uint8_t * out) {
    size_t n = 0;
    if (strcmp(hex, "-") == 0) {
        return 0;
    }
    for (; hex[0] && hex[1]; hex += 2) {
        const char pair[3] = { hex[0], hex[1], 0 };
        out[n++] = (uint8_t) strtoul(pair, NULL, 16);
    }
    return n;
}

static size_t unhex_floats(const char * hex, float * out) {
    size_t n = 0;
    for (size_t left = strlen(hex); left >= 8; left -= 8, hex += 8) {
        char word[9] = { 0 };
        memcpy(word, hex, 8);
        const uint32_t bits = (uint32_t) strtoul(word, NULL, 16);
        memcpy(&out[n++], &bits, 4);
    }
    return n;
}

static void decode(int bits, const uint8_t * src, float * dst, int64_t n_blocks) {
    if (!wrong_shift) {
        pn_decode(bits, src, dst, n_blocks);
        return;
    }
    const int per_word = bits == 3 ? 10 : 8, z = 1 << (bits - 1);
    for (int64_t b = 0; b < n_blocks; b++, src += PN_BLOCK_BYTES) {
        const float d = pn_half_to_float((uint16_t) (src[0] | src[1] << 8));
        for (int w = 0; w < PN_WORDS; w++) {
            const uint8_t * p = src + 2 + 4 * w;
            const uint32_t word = p[0] | p[1] << 8 | (uint32_t) p[2] << 16 | (uint32_t) p[3] << 24;
            for (int t = 0; t < per_word; t++) {
                *dst++ = d * (float) ((int) (word >> (bits * t) & ((1u << bits) - 1)) - z);
            }
        }
    }
}

static int same_double(double a, double b) { return a == b || (a != a && b != b); }

/* Bit for bit; only which NaN it is may differ. */
static int same_floats(const float * a, const float * b, size_t n) {
    for (size_t i = 0; i < n; i++) {
        if (memcmp(a + i, b + i, 4) && !(a[i] != a[i] && b[i] != b[i])) return 0;
    }
    return 1;
}

static const char * check(char * line, uint8_t * bytes, uint8_t * made, float * x, float * w) {
    char *    field[6] = { 0 };
    int       n_fields = 0;
    for (char * p = strtok(line, " \n"); p && n_fields < 6; p = strtok(NULL, " \n")) {
        field[n_fields++] = p;
    }
    if (n_fields < 4) {
        return "malformed";
    }
    const int bits = atoi(field[1]);
    const int n    = pn_block_weights(bits);
    switch (field[0][0]) {
        case 'D': {
            const size_t blocks = unhex(field[2], bytes) / PN_BLOCK_BYTES;
            if (unhex_floats(field[3], x) != blocks * (size_t) n) return "element count";
            decode(bits, bytes, w, (int64_t) blocks);
            return same_floats(x, w, blocks * (size_t) n) ? NULL : "decoded weights differ";
        }
        case 'Q': {
            int    m;
            double err;
            if (n_fields < 6 || unhex_floats(field[2], x) != (size_t) n) return "element count";
            const enum pn_status status = pn_quantize_block(bits, x, made, &m, &err);
            const int            refuse = strcmp(field[3], "-") == 0;
            if (status != PN_OK || refuse) return refuse && status == PN_BAD_INPUT ? NULL : "refusal differs";
            unhex(field[3], bytes);
            if (memcmp(made, bytes, PN_BLOCK_BYTES)) return "block differs";
            if (m != atoi(field[4])) return "m differs";
            return strcmp(field[5], "-") && err != strtod(field[5], NULL) ? "error differs" : NULL;
        }
        case 'V': {
            const size_t size = unhex(field[2], bytes);
            return (pn_validate(bits, bytes, size, NULL) == PN_OK) == atoi(field[3]) ? NULL : "verdict differs";
        }
        case 'T': {
            const size_t blocks = unhex(field[2], bytes) / PN_BLOCK_BYTES;
            if (n_fields < 5 || unhex_floats(field[3], x) != blocks * (size_t) n) return "element count";
            if (wrong_shift) {
                double sum = 0;
                decode(bits, bytes, w, (int64_t) blocks);
                for (size_t i = 0; i < blocks * (size_t) n; i++) sum += (double) w[i] * x[i];
                return same_double(sum, strtod(field[4], NULL)) ? NULL : "dot product differs";
            }
            return same_double(pn_dot(bits, bytes, x, (int64_t) blocks), strtod(field[4], NULL)) ? NULL : "dot product differs";
        }
        default: return "unknown kind";
    }
}

int main(int argc, char ** argv) {
    wrong_shift = argc > 1 && strcmp(argv[1], "--wrong-shift") == 0;
    char *    line  = malloc(MAX_LINE);
    uint8_t * bytes = malloc(MAX_LINE);
    uint8_t * made  = malloc(PN_BLOCK_BYTES);
    float *   x     = malloc(MAX_LINE);
    float *   w     = malloc(MAX_LINE);
    long      passed = 0, failed = 0;
    if (!line || !bytes || !made || !x || !w) return 2;
    for (long number = 1; fgets(line, MAX_LINE, stdin); number++) {
        if (line[0] == '#') {
            continue;
        }
        const char * why = check(line, bytes, made, x, w);
        if (why) {
            printf("line %ld: %s\n", number, why);
            failed++;
        } else {
            passed++;
        }
    }
    printf("%ld passed, %ld failed\n", passed, failed);
    free(line), free(bytes), free(made), free(x), free(w);
    return failed != 0 || passed == 0;
}

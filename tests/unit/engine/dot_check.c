/* SPDX-License-Identifier: Apache-2.0 */
/* The CPU backend's products over rows of 1 to 40 blocks, by single rows and by many rows and columns: one-hot activations
 * must return each decoded weight, random ones the sum in double to within fp32 rounding. */
#include "pn.h"
#include "pn-dot.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

static float uniform(void) { return (float) rand() / (float) RAND_MAX - 0.5f; }

/* Rows at an odd distance, 1 to 9 columns, prepared in two parts; -1: this build has no such code. */
static long rows_failed(int bits) {
    enum { ROWS = 5, COLS = 9 };
    const int z      = bits == 3 ? 4 : 8;
    long      failed = 0;
    if (ggml_pn_prepared_size(bits, 1) == 0) return -1;
    for (int blocks = 1; blocks <= 40; blocks++) {
        const int    n      = pn_block_weights(bits) * blocks;
        const size_t stride = (size_t) PN_BLOCK_BYTES * blocks + blocks % 2;
        const size_t column = ggml_pn_prepared_size(bits, blocks);
        uint8_t *    rows   = malloc(ROWS * stride);
        float *      w      = malloc(sizeof(float) * n * ROWS);
        float *      x      = malloc(sizeof(float) * n * COLS);
        float *      p      = malloc(sizeof(float) * (column + 1) * COLS);
        double *     reach  = malloc(sizeof(double) * n * ROWS);
        float        y[COLS * (ROWS + 1)];
        for (int i = 0; i < n * ROWS; i++) w[i] = uniform();
        for (int r = 0; r < ROWS; r++) {
            pn_quantize(bits, w + r * n, rows + r * stride, blocks, NULL);
            pn_decode(bits, rows + r * stride, w + r * n, blocks);
            for (int i = 0; i < n; i++) {
                const uint8_t * block = rows + r * stride + i / (n / blocks) * PN_BLOCK_BYTES;
                reach[r * n + i] = z * fabs(pn_half_to_float((uint16_t) (block[0] | block[1] << 8)));
            }
        }
        for (int hot = -1; hot < n; hot += hot >= 0 && blocks > 2 ? 13 : 1) {
            for (int i = 0; i < n * COLS; i++) x[i] = hot < 0 ? uniform() : i % n == hot;
            for (int cols = 1; cols <= COLS; cols++) {
                for (int c = 0; c < cols; c++) {
                    ggml_pn_prepare(bits, 0, blocks / 2, x + c * n, p + c * column);
                    ggml_pn_prepare(bits, blocks / 2, blocks, x + c * n, p + c * column);
                }
                for (int i = 0; i < COLS * (ROWS + 1); i++) y[i] = 77;
                ggml_pn_rows(bits, blocks, rows, stride, ROWS, p, cols, y, ROWS + 1);
                for (int i = 0; i < COLS * (ROWS + 1); i++) {
                    const int c = i / (ROWS + 1), r = i % (ROWS + 1);
                    double    sum = 0, size = 0;
                    if (c >= cols || r == ROWS) { /* untouched */
                        failed += y[i] != 77;
                        continue;
                    }
                    if (hot >= 0) {
                        failed += y[i] != w[r * n + hot];
                        continue;
                    }
                    for (int e = 0; e < n; e++) {
                        sum += (double) w[r * n + e] * x[c * n + e];
                        size += reach[r * n + e] * fabs(x[c * n + e]);
                    }
                    failed += !(fabs(sum - y[i]) <= 3e-7 * size);
                }
            }
        }
        free(rows), free(w), free(x), free(p), free(reach);
    }
    return failed;
}

int main(void) {
    long failed = 0;
    for (int bits = 3; bits <= 4; bits++) {
        for (int blocks = 1; blocks <= 40; blocks++) {
            const int n     = pn_block_weights(bits) * blocks;
            float *   x     = malloc(sizeof(float) * n);
            float *   w     = malloc(sizeof(float) * n);
            uint8_t * row   = malloc((size_t) PN_BLOCK_BYTES * blocks + 2);
            uint8_t * at    = row + blocks % 3; /* any alignment */
            float     got;
            double    sum = 0, size = 0;
            for (int i = 0; i < n; i++) w[i] = uniform(), x[i] = uniform();
            pn_quantize(bits, w, at, blocks, NULL);
            pn_decode(bits, at, w, blocks);
            for (int i = 0; i < n; i++) sum += (double) w[i] * x[i], size += fabs((double) w[i] * x[i]);
            (bits == 3 ? ggml_vec_dot_pn3t_f32 : ggml_vec_dot_pn4t_f32)(n, &got, 0, at, 0, x, 0, 1);
            failed += !(fabs(sum - got) <= 3e-7 * size);
            for (int i = 0; i < n; i++) x[i] = 0;
            for (int i = 0; i < n; i += blocks > 4 ? 13 : 1) {
                x[i] = 1;
                (bits == 3 ? ggml_vec_dot_pn3t_f32 : ggml_vec_dot_pn4t_f32)(n, &got, 0, at, 0, x, 0, 1);
                failed += got != w[i];
                x[i] = 0;
            }
            free(x), free(w), free(row);
        }
    }
    const long rows3 = rows_failed(3), rows4 = rows_failed(4);
    printf("%ld failed, many rows: %ld, %ld\n", failed, rows3, rows4);
    failed += (rows3 > 0) + (rows4 > 0);
    return failed != 0;
}

/* SPDX-License-Identifier: Apache-2.0 */
/* The CPU backend's dot products over rows of 1 to 40 blocks: one-hot activations must return each decoded weight, random
 * ones the sum in double to within fp32 rounding. */
#include "pn.h"
#include "pn-dot.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

static float uniform(void) { return (float) rand() / (float) RAND_MAX - 0.5f; }

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
    printf("%ld failed\n", failed);
    return failed != 0;
}

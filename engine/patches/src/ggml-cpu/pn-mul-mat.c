// SPDX-License-Identifier: Apache-2.0
// MUL_MAT with PN weights on the CPU backend: prepares the activations, then hands rows to threads.
#include "ggml-cpu-impl.h"
#include "pn-dot.h"

#include "../ggml-pn.h"

#define CHUNK 64  // rows that a thread takes at a time: with four columns of activations they fit the second-level cache

static int bits_of(const struct ggml_tensor * t) { return t->type == GGML_TYPE_PN3T ? 3 : 4; }

static size_t column_size(const struct ggml_tensor * weights) {
    return ggml_pn_prepared_size(bits_of(weights), weights->ne[0] / ggml_blck_size(weights->type));
}

static bool is_ours(const struct ggml_tensor * dst) {
    const struct ggml_tensor * w = dst->src[0];
    const struct ggml_tensor * x = dst->src[1];
    return ggml_is_pn(w->type) && x->type == GGML_TYPE_F32 && x->nb[0] == sizeof(float) && column_size(w) > 0;
}

size_t ggml_pn_mul_mat_size(const struct ggml_tensor * dst) {
    return is_ours(dst) ? column_size(dst->src[0]) * ggml_nrows(dst->src[1]) * sizeof(float) : 0;
}

bool ggml_pn_mul_mat(const struct ggml_compute_params * params, struct ggml_tensor * dst) {
    if (!is_ours(dst) || params->use_ref) {
        return false;
    }
    const struct ggml_tensor * src0 = dst->src[0];
    const struct ggml_tensor * src1 = dst->src[1];
    GGML_TENSOR_BINARY_OP_LOCALS
    GGML_ASSERT(nb00 == ggml_type_size(src0->type) && nb0 == sizeof(float));

    const int     bits     = bits_of(src0);
    const int64_t n_blocks = ne00 / ggml_blck_size(src0->type);
    const size_t  column   = column_size(src0);
    float *       prepared = (float *) params->wdata;
    GGML_ASSERT(params->wsize >= ggml_pn_mul_mat_size(dst));

    const int64_t first = n_blocks * params->ith / params->nth;
    const int64_t last  = n_blocks * (params->ith + 1) / params->nth;
    for (int64_t i = 0; i < ne11 * ne12 * ne13; i++) {
        const char * from = (const char *) src1->data + i % ne11 * nb11 + i / ne11 % ne12 * nb12 + i / ne11 / ne12 * nb13;
        ggml_pn_prepare(bits, first, last, (const float *) from, prepared + i * column);
    }
    if (params->ith == 0) {
        ggml_threadpool_chunk_set(params->threadpool, params->nth);
    }
    ggml_barrier(params->threadpool);

    // Small products still give every thread something to do.
    const int64_t share  = (ne01 + params->nth - 1) / params->nth;
    const int64_t chunk  = share < CHUNK ? (share + 1) / 2 * 2 : CHUNK;
    const int64_t chunks = (ne01 + chunk - 1) / chunk;
    for (int64_t job = params->ith; job < chunks * ne12 * ne13; job = ggml_threadpool_chunk_add(params->threadpool, 1)) {
        const int64_t row = job % chunks * chunk, i2 = job / chunks % ne12, i3 = job / chunks / ne12;
        const char *  rows = (const char *) src0->data + row * nb01 + i2 / (ne12 / ne02) * nb02 + i3 / (ne13 / ne03) * nb03;
        float *       y    = (float *) ((char *) dst->data + i2 * nb2 + i3 * nb3) + row;
        ggml_pn_rows(bits, n_blocks, (const uint8_t *) rows, nb01, MIN(chunk, ne01 - row),
            prepared + (i3 * ne12 + i2) * ne11 * column, ne11, y, nb1 / sizeof(float));
    }
    return true;
}

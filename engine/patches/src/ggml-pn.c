// SPDX-License-Identifier: Apache-2.0
#include "ggml-pn.h"
#include "ggml-impl.h"

#include <inttypes.h>
#include <string.h>

void dequantize_row_pn3t(const void * x, float * y, int64_t k) { pn_decode(3, x, y, k / PN3T_WEIGHTS); }
void dequantize_row_pn4t(const void * x, float * y, int64_t k) { pn_decode(4, x, y, k / PN4T_WEIGHTS); }

// A group that holds a NaN or an infinity has no PN form. ggml's quantizers return nothing, so the block is written
// with a NaN scale, which ggml_validate_row_data then refuses: the tensor fails, under its name.
static void quantize_row(int bits, const float * x, void * y, int64_t k) {
    const int     n      = pn_block_weights(bits);
    const int64_t blocks = k / n;
    for (int64_t b = 0; b < blocks; b++) {
        uint8_t * block = (uint8_t *) y + b * PN_BLOCK_BYTES;
        if (pn_quantize_block(bits, x + b * n, block, NULL, NULL) != PN_OK) {
            memset(block, 0, PN_BLOCK_BYTES);
            block[1] = 0x7e;
        }
    }
}

void quantize_row_pn3t_ref(const float * x, void * y, int64_t k) { quantize_row(3, x, y, k); }
void quantize_row_pn4t_ref(const float * x, void * y, int64_t k) { quantize_row(4, x, y, k); }

size_t ggml_pn_quantize(enum ggml_type type, const float * src, void * dst, int64_t nrows, int64_t n_per_row) {
    quantize_row(type == GGML_TYPE_PN3T ? 3 : 4, src, dst, nrows * n_per_row);
    return nrows * ggml_row_size(type, n_per_row);
}

bool ggml_pn_validate(enum ggml_type type, const void * data, size_t nbytes) {
    int64_t              block  = 0;
    const enum pn_status status = pn_validate(type == GGML_TYPE_PN3T ? 3 : 4, data, nbytes, &block);
    if (status != PN_OK) {
        fprintf(stderr, "ggml_validate_row_data: %s block %" PRId64 ": %s\n", ggml_type_name(type), block, pn_status_text(status));
    }
    return status == PN_OK;
}

// SPDX-License-Identifier: Apache-2.0
// ggml's view of the PN weight types; the format itself is pn.c.
#pragma once

#include "ggml.h"
#include "pn.h"

#ifdef __cplusplus
extern "C" {
#endif

GGML_API void dequantize_row_pn3t(const void * x, float * y, int64_t k);
GGML_API void dequantize_row_pn4t(const void * x, float * y, int64_t k);
GGML_API void quantize_row_pn3t_ref(const float * x, void * y, int64_t k);
GGML_API void quantize_row_pn4t_ref(const float * x, void * y, int64_t k);
// One message with the block on stderr for an invalid row.
GGML_API bool ggml_pn_validate(enum ggml_type type, const void * data, size_t nbytes);
// Quantizes rows; stops the program with the block's number for a NaN or an infinity.
GGML_API size_t ggml_pn_quantize(enum ggml_type type, const float * src, void * dst, int64_t nrows, int64_t n_per_row);

static inline bool ggml_is_pn(enum ggml_type type) { return type == GGML_TYPE_PN3T || type == GGML_TYPE_PN4T; }

#ifdef __cplusplus
}
#endif

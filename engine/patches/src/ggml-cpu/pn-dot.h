// SPDX-License-Identifier: Apache-2.0
// Products of PN rows with F32 activations, for the CPU backend.
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

// One row and activations as they are: what ggml calls where no whole product is at hand.
void ggml_vec_dot_pn3t_f32(int n, float * s, size_t bs, const void * vx, size_t bx, const void * vy, size_t by, int nrc);
void ggml_vec_dot_pn4t_f32(int n, float * s, size_t bs, const void * vx, size_t bx, const void * vy, size_t by, int nrc);

// Many rows: activations are first put into the order in which a block's words decode, once for all rows.
// Floats of one prepared column; 0 when this build has no such code.
size_t ggml_pn_prepared_size(int bits, int64_t n_blocks);
// Blocks [first, last) of one column.
void ggml_pn_prepare(int bits, int64_t first, int64_t last, const float * x, float * prepared);
// y[row + y_stride * column], columns side by side in `prepared`.
void ggml_pn_rows(int bits, int64_t n_blocks, const uint8_t * rows, size_t row_bytes, int64_t n_rows, const float * prepared,
    int64_t n_cols, float * y, size_t y_stride);

// The whole product, as ggml_compute_forward_mul_mat; false when it is left to that function.
struct ggml_compute_params;
struct ggml_tensor;
bool   ggml_pn_mul_mat(const struct ggml_compute_params * params, struct ggml_tensor * dst);
size_t ggml_pn_mul_mat_size(const struct ggml_tensor * dst);  // bytes of the work buffer

#ifdef __cplusplus
}
#endif

// SPDX-License-Identifier: Apache-2.0
// What ggml-cuda.cu asks of the PN kernels.
#pragma once

#include "common.cuh"

bool ggml_cuda_is_pn(ggml_type type);

// Whether CUDA can run this product, product by expert or get_rows over PN weights.
bool ggml_cuda_pn_supports(const ggml_tensor * op);

// Runs a product of 1 to 8 columns; false when it must go through dequantization.
bool ggml_cuda_pn_mul_mat_vec(ggml_backend_cuda_context & ctx, const ggml_tensor * src0, const ggml_tensor * src1, ggml_tensor * dst);

// Runs products that follow node `first` and share its input with it, in one launch; returns how many nodes to skip.
int ggml_cuda_pn_fuse(ggml_backend_cuda_context & ctx, const ggml_cgraph * cgraph, int first);

// Products by expert of up to 8 tokens, without a look at the indices on the host. Others go expert by expert through
// ggml's own path, which ends in ggml_cuda_mul_mat.
bool ggml_cuda_pn_mul_mat_id_direct(const ggml_tensor * dst);
bool ggml_cuda_pn_mul_mat_id(ggml_backend_cuda_context & ctx, const ggml_tensor * dst);  // false: not direct

// SPDX-License-Identifier: Apache-2.0
// What ggml-cuda.cu asks of the PN kernels.
#pragma once

#include "common.cuh"

bool ggml_cuda_is_pn(ggml_type type);

// Whether CUDA can run this product or get_rows over PN weights.
bool ggml_cuda_pn_supports(const ggml_tensor * op);

// Runs a product of 1 to 8 columns; false when it must go through dequantization.
bool ggml_cuda_pn_mul_mat_vec(ggml_backend_cuda_context & ctx, const ggml_tensor * src0, const ggml_tensor * src1, ggml_tensor * dst);

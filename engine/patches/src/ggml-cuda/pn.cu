// SPDX-License-Identifier: Apache-2.0
#include "common.cuh"
#include "pn-ops.cuh"
#include "pn-gemv.cuh"

#include <cstdlib>

// A switch is off when its variable is `0`; read once.
static bool pn_switch(const char * name) {
    const char * value = getenv(name);
    return !(value && value[0] == '0' && value[1] == '\0');
}

bool ggml_cuda_is_pn(ggml_type type) {
    return type == GGML_TYPE_PN3T || type == GGML_TYPE_PN4T;
}

bool ggml_cuda_pn_supports(const ggml_tensor * op) {
    const ggml_tensor * a = op->src[0];
    if (op->op == GGML_OP_GET_ROWS) {
        return true;
    }
    // MUL_MAT_ID has no PN kernels: the scheduler keeps such products on the CPU.
    return op->op == GGML_OP_MUL_MAT && ggml_is_contiguous(a) && op->src[1]->type == GGML_TYPE_F32 && op->type == GGML_TYPE_F32;
}

template <int BITS>
static void pn_mul_mat(ggml_backend_cuda_context & ctx, const ggml_tensor * src0, const ggml_tensor * src1, ggml_tensor * dst) {
    static const bool subnormal = pn_switch("GGML_CUDA_PN_SUBNORMAL"), fixed = pn_switch("GGML_CUDA_PN_FIXED");
    const pn_options  options   = { subnormal, fixed, ggml_cuda_info().devices[ctx.device].nsm };
    GGML_TENSOR_BINARY_OP_LOCALS
    const int nblk = ne00 / pn_shape<BITS>::QK;
    ggml_cuda_pool_alloc<float> prepared(ctx.pool(), pn_workspace<BITS>(nblk, ne11));
    for (int64_t i3 = 0; i3 < ne13; i3++) {
        for (int64_t i2 = 0; i2 < ne12; i2++) {
            pn_gemv_run<BITS>(
                (const char *) src0->data + i2 / (ne12 / ne02) * nb02 + i3 / (ne13 / ne03) * nb03,
                (const float *) ((const char *) src1->data + i2 * nb12 + i3 * nb13), prepared.get(),
                (float *) ((char *) dst->data + i2 * nb2 + i3 * nb3),
                ne01, nblk, nb01, ne11, nb11 / sizeof(float), nb1 / sizeof(float), options, ctx.stream());
            CUDA_CHECK(cudaGetLastError());
        }
    }
}

bool ggml_cuda_pn_mul_mat_vec(ggml_backend_cuda_context & ctx, const ggml_tensor * src0, const ggml_tensor * src1, ggml_tensor * dst) {
    static const bool enabled = pn_switch("GGML_CUDA_PN_GEMV");
    if (!enabled || src1->ne[1] > 8 || src1->type != GGML_TYPE_F32 || dst->type != GGML_TYPE_F32
            || src1->nb[0] != sizeof(float) || src1->nb[1] % sizeof(float) != 0) {
        return false;
    }
    if (src0->type == GGML_TYPE_PN3T) {
        pn_mul_mat<3>(ctx, src0, src1, dst);
    } else {
        pn_mul_mat<4>(ctx, src0, src1, dst);
    }
    return true;
}

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
    const ggml_tensor * b = op->src[1];
    if (op->op == GGML_OP_GET_ROWS) {
        return true;
    }
    if (!ggml_is_contiguous(a) || b->type != GGML_TYPE_F32 || op->type != GGML_TYPE_F32) {
        return false;
    }
    return op->op == GGML_OP_MUL_MAT
        || (op->op == GGML_OP_MUL_MAT_ID && a->ne[3] == 1 && b->ne[3] == 1 && b->nb[2] % b->nb[1] == 0);
}

static bool pn_subnormal() {
    static const bool enabled = pn_switch("GGML_CUDA_PN_SUBNORMAL");
    return enabled;
}

static pn_options pn_device_options(const ggml_backend_cuda_context & ctx) {
    static const bool fixed = pn_switch("GGML_CUDA_PN_FIXED");
    return { pn_subnormal(), fixed, ggml_cuda_info().devices[ctx.device].nsm };
}

static bool pn_has_kernel(const ggml_tensor * src1, const ggml_tensor * dst) {
    static const bool enabled = pn_switch("GGML_CUDA_PN_GEMV");
    return enabled && src1->type == GGML_TYPE_F32 && dst->type == GGML_TYPE_F32 && src1->nb[0] == sizeof(float)
        && src1->nb[1] % sizeof(float) == 0 && dst->nb[0] == sizeof(float);
}

static pn_product pn_of(const ggml_tensor * src0, const ggml_tensor * dst) {
    return { (const char *) src0->data, (float *) dst->data, (int64_t) (dst->nb[1] / sizeof(float)), (int) src0->ne[1] };
}

template <int BITS>
static void pn_mul_mat(ggml_backend_cuda_context & ctx, const ggml_tensor * src0, const ggml_tensor * src1, ggml_tensor * dst) {
    GGML_TENSOR_BINARY_OP_LOCALS
    const int nblk = ne00 / pn_shape<BITS>::QK;
    ggml_cuda_pool_alloc<float> prepared(ctx.pool(), pn_workspace<BITS>(nblk, ne11));
    for (int64_t i3 = 0; i3 < ne13; i3++) {
        for (int64_t i2 = 0; i2 < ne12; i2++) {
            pn_group group = { { pn_of(src0, dst) }, 1 };
            group.of[0].weights += i2 / (ne12 / ne02) * nb02 + i3 / (ne13 / ne03) * nb03;
            group.of[0].dst     += (i2 * nb2 + i3 * nb3) / sizeof(float);
            pn_gemv_run<BITS>(group, (const float *) ((const char *) src1->data + i2 * nb12 + i3 * nb13), prepared.get(), nblk,
                nb01, ne11, nb11 / sizeof(float), pn_device_options(ctx), ctx.stream());
            CUDA_CHECK(cudaGetLastError());
        }
    }
}

bool ggml_cuda_pn_mul_mat_vec(ggml_backend_cuda_context & ctx, const ggml_tensor * src0, const ggml_tensor * src1, ggml_tensor * dst) {
    if (src1->ne[1] > 8 || !pn_has_kernel(src1, dst)) {
        return false;
    }
    if (src0->type == GGML_TYPE_PN3T) {
        pn_mul_mat<3>(ctx, src0, src1, dst);
    } else {
        pn_mul_mat<4>(ctx, src0, src1, dst);
    }
    return true;
}

// ---- products with the same input ----

static bool pn_overlap(const ggml_tensor * a, const ggml_tensor * b) {
    const char * pa = (const char *) a->data;
    const char * pb = (const char *) b->data;
    return pa < pb + ggml_nbytes(b) && pb < pa + ggml_nbytes(a);
}

// A plain matrix times 1 to 8 columns.
static bool pn_can_group(const ggml_tensor * t) {
    return t->op == GGML_OP_MUL_MAT && (t->flags & GGML_TENSOR_FLAG_COMPUTE) && ggml_cuda_is_pn(t->src[0]->type)
        && t->ne[1] <= 8 && t->ne[2] == 1 && t->ne[3] == 1 && pn_has_kernel(t->src[1], t);
}

template <int BITS>
static void pn_run_group(ggml_backend_cuda_context & ctx, const ggml_tensor ** members, int count) {
    const ggml_tensor * src0 = members[0]->src[0];
    const ggml_tensor * src1 = members[0]->src[1];
    const int           nblk = src0->ne[0] / pn_shape<BITS>::QK, ncols = src1->ne[1];
    pn_group            group {};
    for (; group.count < count; group.count++) {
        group.of[group.count] = pn_of(members[group.count]->src[0], members[group.count]);
    }
    ggml_cuda_pool_alloc<float> prepared(ctx.pool(), pn_workspace<BITS>(nblk, ncols));
    pn_gemv_run<BITS>(group, (const float *) src1->data, prepared.get(), nblk, src0->nb[1], ncols, src1->nb[1] / sizeof(float),
        pn_device_options(ctx), ctx.stream());
    CUDA_CHECK(cudaGetLastError());
}

// Only products that follow each other, with nothing computed in between: none can find its input changed. Their outputs
// may overlap neither each other nor anything that one of them reads, so their order does not matter.
int ggml_cuda_pn_fuse(ggml_backend_cuda_context & ctx, const ggml_cgraph * cgraph, int first) {
    static const bool   enabled = pn_switch("GGML_CUDA_PN_GROUP");
    const ggml_tensor * members[PN_GROUP] = { cgraph->nodes[first] };
    if (!enabled || !pn_can_group(members[0]) || !ctx.stream_context().concurrent_events.empty()) {
        return 0;
    }
    const ggml_tensor * src0 = members[0]->src[0];
    const ggml_tensor * src1 = members[0]->src[1];
    int count = 1, last = first;
    if (pn_overlap(members[0], src1) || pn_overlap(members[0], src0)) {
        return 0;
    }
    for (int i = first + 1; i < cgraph->n_nodes && count < PN_GROUP; i++) {
        const ggml_tensor * t = cgraph->nodes[i];
        if (t->op == GGML_OP_RESHAPE || t->op == GGML_OP_VIEW || t->op == GGML_OP_PERMUTE || t->op == GGML_OP_TRANSPOSE) {
            continue;  // computes nothing
        }
        bool fits = pn_can_group(t) && t->src[1] == src1 && t->src[0]->type == src0->type && t->src[0]->nb[1] == src0->nb[1]
            && !pn_overlap(t, src1) && !pn_overlap(t, t->src[0]);
        for (int m = 0; fits && m < count; m++) {
            fits = !pn_overlap(t, members[m]) && !pn_overlap(t, members[m]->src[0]) && !pn_overlap(members[m], t->src[0]);
        }
        if (!fits) {
            break;
        }
        members[count++] = t;
        last = i;
    }
    if (count == 1) {
        return 0;
    }
    if (src0->type == GGML_TYPE_PN3T) {
        pn_run_group<3>(ctx, members, count);
    } else {
        pn_run_group<4>(ctx, members, count);
    }
    return last - first;
}

// ---- mixture of experts ----

bool ggml_cuda_pn_mul_mat_id_direct(const ggml_tensor * dst) {
    const ggml_tensor * src1 = dst->src[1];
    const ggml_tensor * ids  = dst->src[2];
    return pn_subnormal() && ggml_cuda_is_pn(dst->src[0]->type) && dst->ne[2] <= 8 && dst->ne[3] == 1 && pn_has_kernel(src1, dst)
        && src1->nb[2] == src1->ne[1] * src1->nb[1] && ids->nb[0] == sizeof(int32_t);
}

template <int BITS>
static void pn_mul_mat_id(ggml_backend_cuda_context & ctx, const ggml_tensor * dst) {
    const ggml_tensor * src0 = dst->src[0];
    const ggml_tensor * src1 = dst->src[1];
    const ggml_tensor * ids  = dst->src[2];
    const int           nblk = src0->ne[0] / pn_shape<BITS>::QK, columns = src1->ne[1], tokens = dst->ne[2];
    const pn_experts    e    = {
        (const char *) src0->data, (int64_t) src0->nb[2], (const int32_t *) ids->data,
        (int64_t) (ids->nb[1] / sizeof(int32_t)), columns, (float *) dst->data, (int64_t) (dst->nb[1] / sizeof(float)),
        (int64_t) (dst->nb[2] / sizeof(float)), (int) src0->ne[1],
    };
    ggml_cuda_pool_alloc<float> prepared(ctx.pool(), pn_workspace_id<BITS>(nblk, columns * tokens));
    pn_gemv_id_run<BITS>(e, (const float *) src1->data, prepared.get(), nblk, ids->ne[0], tokens, src1->nb[1] / sizeof(float),
        ctx.stream());
    CUDA_CHECK(cudaGetLastError());
}

bool ggml_cuda_pn_mul_mat_id(ggml_backend_cuda_context & ctx, const ggml_tensor * dst) {
    if (!ggml_cuda_pn_mul_mat_id_direct(dst)) {
        return false;
    }
    if (dst->src[0]->type == GGML_TYPE_PN3T) {
        pn_mul_mat_id<3>(ctx, dst);
    } else {
        pn_mul_mat_id<4>(ctx, dst);
    }
    return true;
}

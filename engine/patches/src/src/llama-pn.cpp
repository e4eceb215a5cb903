// SPDX-License-Identifier: Apache-2.0
#include "llama-pn.h"

#include "llama-graph.h"
#include "llama-hparams.h"
#include "llama-impl.h"
#include "llama-model-loader.h"

#include "../ggml/src/ggml-pn.h"

#include <cinttypes>
#include <cmath>
#include <stdexcept>
#include <string>
#include <vector>

static const char * const ROTATION_KEY = "tensorless.pn.rotation";

bool llama_pn_has_weights(const llama_model_loader & ml) {
    for (const auto & it : ml.weights_map) {
        if (ggml_is_pn(it.second.tensor->type)) {
            return true;
        }
    }
    return false;
}

uint32_t llama_pn_rotation(llama_model_loader & ml) {
    if (!llama_pn_has_weights(ml)) {
        return 0;
    }
    const int64_t id = gguf_find_key(ml.metadata, ROTATION_KEY);
    if (id < 0 || gguf_get_kv_type(ml.metadata, id) != GGUF_TYPE_STRING) {
        throw std::runtime_error(format("this file has PN weights but does not say how they are rotated (no string %s in its "
            "metadata); serving it could produce noise. Quantize the model with this engine's tools, or run the file with the "
            "engine that it was made for", ROTATION_KEY));
    }
    const std::string name = gguf_get_val_str(ml.metadata, id);
    if (name == "none") {
        return 0;
    }
    uint32_t size = 0;
    for (const uint32_t n : { 64u, 128u, 256u, 512u }) {
        if (name == "hadamard-" + std::to_string(n)) {
            size = n;
        }
    }
    if (size == 0) {
        throw std::runtime_error(format("this file's PN weights are rotated by '%s' (%s), which this engine does not know; it "
            "knows none, hadamard-64, hadamard-128, hadamard-256 and hadamard-512", name.c_str(), ROTATION_KEY));
    }
    // Only architectures whose every product goes through build_lora_mm, where the rotation is applied.
    const llm_arch arch = ml.get_arch();
    if (arch != LLM_ARCH_LLAMA && arch != LLM_ARCH_QWEN2 && arch != LLM_ARCH_QWEN3) {
        throw std::runtime_error(format("rotated PN weights (%s) are not supported for architecture '%s'; llama, qwen2 and "
            "qwen3 are", name.c_str(), ml.get_arch_name().c_str()));
    }
    for (const auto & it : ml.weights_map) {
        const ggml_tensor * t = it.second.tensor;
        if (!ggml_is_pn(t->type)) {
            continue;
        }
        if (t->ne[0] % size != 0 || t->ne[2] != 1 || it.first == "token_embd.weight") {
            throw std::runtime_error(format("tensor '%s': rotated PN weights (%s) need rows of a multiple of %u and a plain "
                "matrix that is no embedding table", it.first.c_str(), name.c_str(), size));
        }
    }
    return size;
}

bool llama_pn_tensor_valid(const ggml_tensor * tensor, const void * data, size_t size) {
    if (!ggml_is_pn(tensor->type)) {
        return ggml_validate_row_data(tensor->type, data, size);
    }
    int64_t              block  = 0;
    const enum pn_status status = pn_validate(tensor->type == GGML_TYPE_PN3T ? 3 : 4, data, size, &block);
    if (status != PN_OK) {
        LLAMA_LOG_ERROR("%s: tensor '%s' (%s), block %" PRId64 ": %s\n", __func__, tensor->name, ggml_type_name(tensor->type),
            block, pn_status_text(status));
    }
    return status == PN_OK;
}

// The orthonormal Hadamard matrix in Sylvester's order. ggml's CPU and CUDA backends run the product as a fast transform
// and do not read it; any other backend may.
class llm_graph_input_pn_matrix : public llm_graph_input_i {
public:
    explicit llm_graph_input_pn_matrix(ggml_tensor * tensor) : tensor(tensor) {
        const int64_t n     = tensor->ne[0];
        const float   scale = 1.0f / sqrtf((float) n);
        data.resize(n * n);
        for (int64_t i = 0; i < n; i++) {
            for (int64_t j = 0; j < n; j++) {
                int odd = 0;
                for (int64_t bits = i & j; bits != 0; bits &= bits - 1) {
                    odd ^= 1;
                }
                data[i * n + j] = odd ? -scale : scale;
            }
        }
    }

    void set_input(const llama_ubatch *) override {
        if (tensor->buffer) {
            ggml_backend_tensor_set(tensor, data.data(), 0, ggml_nbytes(tensor));
        }
    }

    bool can_reuse(const llm_graph_params &) override { return true; }

private:
    ggml_tensor *      tensor;
    std::vector<float> data;
};

ggml_tensor * llama_pn_rotate(const llm_graph_context & graph, const ggml_tensor * w, ggml_tensor * cur) {
    const uint32_t n = graph.hparams.pn_rotation;
    if (n == 0 || !ggml_is_pn(w->type)) {
        return cur;
    }
    llama_pn_graph & pn = graph.pn;
    if (pn.matrix == nullptr) {
        pn.matrix = ggml_new_tensor_2d(graph.ctx0, GGML_TYPE_F32, n, n);
        ggml_set_input(pn.matrix);
        ggml_set_name(pn.matrix, "pn_hadamard");
        graph.res->add_input(std::make_unique<llm_graph_input_pn_matrix>(pn.matrix));
    }
    if (pn.input != cur) {
        pn.input   = cur;
        pn.rotated = llama_mul_mat_hadamard(graph.ctx0, cur, pn.matrix);
    }
    return pn.rotated;
}

void llama_pn_together(ggml_cgraph * gf, std::initializer_list<ggml_tensor *> results) {
    for (ggml_tensor * t : results) {
        while (t->op == GGML_OP_ADD) {  // a bias
            t = t->src[0];
        }
        if (t->op == GGML_OP_MUL_MAT && ggml_is_pn(t->src[0]->type)) {
            ggml_build_forward_expand(gf, t);
        }
    }
}

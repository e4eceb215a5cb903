// SPDX-License-Identifier: Apache-2.0
// PN files: which rotation they carry, whether their weights are valid, and applying the rotation to activations.
#pragma once

#include <cstddef>
#include <cstdint>
#include <initializer_list>

struct ggml_cgraph;
struct ggml_tensor;
struct llama_model_loader;
struct llm_graph_context;

// Size of the Hadamard blocks of a file's PN weights; 0 for `none` and for files without PN weights. Throws for a PN file
// whose rotation is missing, unknown, or out of this engine's reach: such a file would be served as noise.
uint32_t llama_pn_rotation(llama_model_loader & ml);

bool llama_pn_has_weights(const llama_model_loader & ml);

// ggml_validate_row_data, but an invalid PN tensor gets one message with its name and block.
bool llama_pn_tensor_valid(const ggml_tensor * tensor, const void * data, size_t size);

// What a graph remembers, so that products which share their input share the rotated one.
struct llama_pn_graph {
    ggml_tensor * matrix  = nullptr;
    ggml_tensor * input   = nullptr;
    ggml_tensor * rotated = nullptr;
};

// `cur` as the weight `w` wants it.
ggml_tensor * llama_pn_rotate(const llm_graph_context & graph, const ggml_tensor * w, ggml_tensor * cur);

// Puts products with PN weights into the graph one after the other, before what is done with their results.
void llama_pn_together(ggml_cgraph * gf, std::initializer_list<ggml_tensor *> results);

// SPDX-License-Identifier: Apache-2.0
// The golden vectors of the PN format (pn-golden.txt, one a line) through ggml's public API: decode, quantize, validate,
// get_rows and mul_mat on every backend of this build, and a GGUF file written and read back.
// Usage: test-pn-format [pn-golden.txt]

#include "ggml.h"
#include "ggml-backend.h"
#include "ggml-alloc.h"
#include "gguf.h"

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <sstream>
#include <string>
#include <vector>

static long passed = 0, failed = 0;

static void check(bool ok, const std::string & what) {
    if (ok) {
        passed++;
    } else {
        failed++;
        printf("FAILED %s\n", what.c_str());
    }
}

// More than 8 columns may go through a library's matrix product, which rounds its inputs on newer cards (TF32) unless
// NVIDIA_TF32_OVERRIDE=0 forbids it.
static double library_bound() {
    const char * tf32 = getenv("NVIDIA_TF32_OVERRIDE");
    return tf32 && strcmp(tf32, "0") == 0 ? 1e-6 : 1e-3;
}

static std::vector<uint8_t> bytes(const std::string & hex) {
    std::vector<uint8_t> out;
    for (size_t i = 0; hex != "-" && i + 1 < hex.size(); i += 2) {
        out.push_back((uint8_t) strtoul(hex.substr(i, 2).c_str(), nullptr, 16));
    }
    return out;
}

static std::vector<float> floats(const std::string & hex) {
    std::vector<float> out;
    for (size_t i = 0; i + 7 < hex.size(); i += 8) {
        const uint32_t bits = (uint32_t) strtoul(hex.substr(i, 8).c_str(), nullptr, 16);
        float          f;
        memcpy(&f, &bits, 4);
        out.push_back(f);
    }
    return out;
}

struct product {
    ggml_type            type;
    std::vector<uint8_t> rows;  // n_rows rows of k weights
    std::vector<float>   x;     // n_cols columns
    int64_t              k, n_rows, n_cols;
};

// rows x columns on one backend.
static std::vector<float> mul_mat(ggml_backend_t backend, const product & p) {
    ggml_init_params params = { 16 * ggml_tensor_overhead() + ggml_graph_overhead(), nullptr, true };
    ggml_context *   ctx    = ggml_init(params);
    ggml_tensor *    w      = ggml_new_tensor_2d(ctx, p.type, p.k, p.n_rows);
    ggml_tensor *    x      = ggml_new_tensor_2d(ctx, GGML_TYPE_F32, p.k, p.n_cols);
    ggml_tensor *    out    = ggml_mul_mat(ctx, w, x);
    ggml_cgraph *    graph  = ggml_new_graph(ctx);
    ggml_build_forward_expand(graph, out);
    ggml_backend_buffer_t buffer = ggml_backend_alloc_ctx_tensors(ctx, backend);
    ggml_backend_tensor_set(w, p.rows.data(), 0, p.rows.size());
    ggml_backend_tensor_set(x, p.x.data(), 0, p.x.size() * sizeof(float));
    std::vector<float> result(p.n_rows * p.n_cols);
    if (ggml_backend_supports_op(backend, out) && ggml_backend_graph_compute(backend, graph) == GGML_STATUS_SUCCESS) {
        ggml_backend_tensor_get(out, result.data(), 0, result.size() * sizeof(float));
    } else {
        result.clear();
    }
    ggml_backend_buffer_free(buffer);
    ggml_free(ctx);
    return result;
}

static std::vector<float> get_rows(ggml_backend_t backend, ggml_type type, const std::vector<uint8_t> & rows, int64_t k, int64_t n) {
    ggml_init_params params = { 16 * ggml_tensor_overhead() + ggml_graph_overhead(), nullptr, true };
    ggml_context *   ctx    = ggml_init(params);
    ggml_tensor *    w      = ggml_new_tensor_2d(ctx, type, k, n);
    ggml_tensor *    ids    = ggml_new_tensor_1d(ctx, GGML_TYPE_I32, n);
    ggml_tensor *    out    = ggml_get_rows(ctx, w, ids);
    ggml_cgraph *    graph  = ggml_new_graph(ctx);
    ggml_build_forward_expand(graph, out);
    ggml_backend_buffer_t buffer = ggml_backend_alloc_ctx_tensors(ctx, backend);
    std::vector<int32_t>  order(n);
    for (int64_t i = 0; i < n; i++) {
        order[i] = (int32_t) i;
    }
    ggml_backend_tensor_set(w, rows.data(), 0, rows.size());
    ggml_backend_tensor_set(ids, order.data(), 0, n * sizeof(int32_t));
    std::vector<float> result(k * n);
    if (ggml_backend_supports_op(backend, out) && ggml_backend_graph_compute(backend, graph) == GGML_STATUS_SUCCESS) {
        ggml_backend_tensor_get(out, result.data(), 0, result.size() * sizeof(float));
    } else {
        result.clear();
    }
    ggml_backend_buffer_free(buffer);
    ggml_free(ctx);
    return result;
}

static bool same_bits(const std::vector<float> & a, const std::vector<float> & b) {
    return a.size() == b.size() && memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

// All decode vectors of a type as one matrix: get_rows bit for bit; one-hot products return each weight; random
// products of 1 to 9 columns and rows of 1 to 5 blocks agree with the sum in double.
static void check_backend(ggml_backend_t backend, ggml_type type, const std::vector<uint8_t> & blocks, const std::vector<float> & weights) {
    const std::string name = std::string(ggml_backend_name(backend)) + " " + ggml_type_name(type);
    const int64_t     k = ggml_blck_size(type), n = (int64_t) weights.size() / k;
    check(same_bits(get_rows(backend, type, blocks, k, n), weights), name + " get_rows");
    bool one_hot = true;
    for (int64_t first = 0; first < k; first += 8) {
        const int64_t      cols = std::min<int64_t>(8, k - first);
        std::vector<float> x(k * cols, 0.0f);
        for (int64_t c = 0; c < cols; c++) {
            x[c * k + first + c] = 1.0f;
        }
        for (const int64_t at_once : { cols, (int64_t) 1 }) {
            for (int64_t c0 = 0; c0 < cols; c0 += at_once) {
                const product p = { type, blocks, { x.begin() + c0 * k, x.begin() + (c0 + at_once) * k }, k, n, at_once };
                const std::vector<float> y = mul_mat(backend, p);
                one_hot = one_hot && y.size() == (size_t) (n * at_once);
                for (size_t i = 0; one_hot && i < y.size(); i++) {
                    one_hot = y[i] == weights[(i % n) * k + first + c0 + i / n];
                }
            }
        }
    }
    check(one_hot, name + " one-hot products");
    // The scale of each block: on CUDA the zero point enters as -z times the sum of x, so the bound is in |z d x|.
    std::vector<float> reach(n);
    for (int64_t b = 0; b < n; b++) {
        ggml_fp16_t d;
        memcpy(&d, blocks.data() + b * (blocks.size() / n), sizeof(d));
        reach[b] = fabsf(ggml_fp16_to_fp32(d)) * (type == GGML_TYPE_PN3T ? 4.0f : 8.0f);
    }
    uint32_t seed = 1;
    for (int64_t blocks_a_row = 1; blocks_a_row <= 5; blocks_a_row++) {
        const int64_t row = blocks_a_row * k, rows = n / blocks_a_row;
        const std::vector<uint8_t> part(blocks.begin(), blocks.begin() + rows * blocks_a_row * (blocks.size() / n));
        for (int64_t cols = 1; cols <= 9; cols++) {
            std::vector<float> x(row * cols);
            for (float & v : x) {
                seed = seed * 1664525u + 1013904223u;
                v    = (float) (int32_t) seed / 1e9f;
            }
            const std::vector<float> y = mul_mat(backend, { type, part, x, row, rows, cols });
            double worst = y.empty() ? 1.0 : 0.0;
            for (int64_t i = 0; i < (int64_t) y.size(); i++) {
                double sum = 0, size = 1e-30;
                for (int64_t e = 0; e < row; e++) {
                    const double v = (double) weights[(i % rows) * row + e] * x[i / rows * row + e];
                    sum += v;
                    size += (double) reach[((i % rows) * row + e) / k] * fabs(x[i / rows * row + e]);
                }
                worst = std::max(worst, fabs(sum - y[i]) / size);
            }
            check(worst < (cols > 8 ? library_bound() : 1e-6), name + " product of " + std::to_string(blocks_a_row) + " blocks, "
                + std::to_string(cols) + " columns: " + std::to_string(worst));
        }
    }
}

// Products with the same input, which a backend may run at once: the same bits as each by itself, again and again with
// other activations (a captured graph), and not across a change of the input.
static void check_together(ggml_backend_t backend, ggml_type type, const std::vector<uint8_t> & blocks, int64_t n) {
    const std::string name = std::string(ggml_backend_name(backend)) + " " + ggml_type_name(type);
    const int64_t     k = ggml_blck_size(type), size = (int64_t) blocks.size() / n;
    const int64_t     rows[4] = { n, n / 2, 5, n - 3 }, first[4] = { 0, 1, 2, 3 };
    for (const int64_t cols : { 1, 2, 8, 9 }) {
        ggml_init_params params = { 64 * ggml_tensor_overhead() + ggml_graph_overhead(), nullptr, true };
        ggml_context *   ctx    = ggml_init(params);
        ggml_cgraph *    graph  = ggml_new_graph(ctx);
        ggml_tensor *    x      = ggml_new_tensor_2d(ctx, GGML_TYPE_F32, k, cols);
        ggml_tensor *    one    = ggml_new_tensor_1d(ctx, GGML_TYPE_F32, k);
        ggml_tensor *    w[4], * y[5];
        for (int i = 0; i < 4; i++) {
            w[i] = ggml_new_tensor_2d(ctx, type, k, rows[i]);
            y[i] = ggml_mul_mat(ctx, w[i], x);
            ggml_build_forward_expand(graph, y[i]);
        }
        ggml_build_forward_expand(graph, ggml_add_inplace(ctx, x, one));
        y[4] = ggml_mul_mat(ctx, w[1], x);  // the input as changed
        ggml_build_forward_expand(graph, y[4]);
        ggml_backend_buffer_t buffer = ggml_backend_alloc_ctx_tensors(ctx, backend);
        for (int i = 0; i < 4; i++) {
            ggml_backend_tensor_set(w[i], blocks.data() + first[i] * size * (i < 2), 0, rows[i] * size);
        }
        const std::vector<float> ones(k, 1.0f);
        ggml_backend_tensor_set(one, ones.data(), 0, k * sizeof(float));
        bool same = true;
        for (int run = 0; run < 5; run++) {
            std::vector<float> values(k * cols), changed;
            for (int64_t i = 0; i < k * cols; i++) {
                values[i] = (float) ((i * 37 + run * 11) % 101 - 50) / 16.0f;
                changed.push_back(values[i] + 1.0f);
            }
            ggml_backend_tensor_set(x, values.data(), 0, values.size() * sizeof(float));
            same = same && ggml_backend_graph_compute(backend, graph) == GGML_STATUS_SUCCESS;
            for (int i = 0; i < 5; i++) {
                const int          from = i == 4 ? 1 : i;
                std::vector<float> got(rows[from] * cols);
                ggml_backend_tensor_get(y[i], got.data(), 0, got.size() * sizeof(float));
                const uint8_t * part = blocks.data() + first[from] * size * (from < 2);
                same = same && same_bits(got, mul_mat(backend, { type, { part, part + rows[from] * size }, i == 4 ? changed : values,
                    k, rows[from], cols }));
            }
        }
        check(same, name + " products with the same input, " + std::to_string(cols) + " columns");
        ggml_backend_buffer_free(buffer);
        ggml_free(ctx);
    }
}

// Products by expert against the sum in double.
static void check_experts(ggml_backend_t backend, ggml_type type, const std::vector<uint8_t> & blocks, const std::vector<float> & weights) {
    const std::string name = std::string(ggml_backend_name(backend)) + " " + ggml_type_name(type);
    const int64_t     block = ggml_blck_size(type), n = (int64_t) weights.size() / block, bytes = (int64_t) blocks.size() / n;
    const int64_t     experts = 4, slots = 2;
    std::vector<float> reach(n);  // see check_backend
    for (int64_t b = 0; b < n; b++) {
        ggml_fp16_t d;
        memcpy(&d, blocks.data() + b * bytes, sizeof(d));
        reach[b] = fabsf(ggml_fp16_to_fp32(d)) * (type == GGML_TYPE_PN3T ? 4.0f : 8.0f);
    }
    for (const int64_t blocks_a_row : { 1, 2 }) for (const int64_t tokens : { 1, 3, 8, 9, 40 }) for (const int64_t columns : { (int64_t) 1, slots }) {
        const int64_t    k = block * blocks_a_row, rows = n / blocks_a_row / experts;
        ggml_init_params params = { 16 * ggml_tensor_overhead() + ggml_graph_overhead(), nullptr, true };
        ggml_context *   ctx    = ggml_init(params);
        ggml_tensor *    w      = ggml_new_tensor_3d(ctx, type, k, rows, experts);
        ggml_tensor *    x      = ggml_new_tensor_3d(ctx, GGML_TYPE_F32, k, columns, tokens);
        ggml_tensor *    all    = ggml_new_tensor_2d(ctx, GGML_TYPE_I32, experts, tokens);  // sorted experts, of which some are used
        ggml_tensor *    ids    = ggml_view_2d(ctx, all, slots, tokens, all->nb[1], 0);
        ggml_tensor *    out    = ggml_mul_mat_id(ctx, w, x, ids);
        ggml_cgraph *    graph  = ggml_new_graph(ctx);
        ggml_build_forward_expand(graph, out);
        ggml_backend_buffer_t buffer = ggml_backend_alloc_ctx_tensors(ctx, backend);
        std::vector<float>    values(k * columns * tokens), y(rows * slots * tokens);
        std::vector<int32_t>  order(experts * tokens);
        for (size_t i = 0; i < values.size(); i++) {
            values[i] = (float) ((int64_t) (i * 61 % 127) - 63) / 32.0f;
        }
        for (int64_t t = 0; t < tokens; t++) {
            for (int64_t s = 0; s < experts; s++) {
                order[t * experts + s] = (int32_t) ((s * 3 + t * t) % experts);
            }
        }
        ggml_backend_tensor_set(w, blocks.data(), 0, experts * rows * blocks_a_row * bytes);
        ggml_backend_tensor_set(x, values.data(), 0, values.size() * sizeof(float));
        ggml_backend_tensor_set(all, order.data(), 0, order.size() * sizeof(int32_t));
        double worst = 1.0;
        if (ggml_backend_supports_op(backend, out) && ggml_backend_graph_compute(backend, graph) == GGML_STATUS_SUCCESS) {
            ggml_backend_tensor_get(out, y.data(), 0, y.size() * sizeof(float));
            worst = 0.0;
            for (int64_t i = 0; i < (int64_t) y.size(); i++) {
                const int64_t t = i / rows / slots, s = i / rows % slots;
                const int64_t row = order[t * experts + s] * rows + i % rows;
                const float * column = values.data() + (t * columns + s % columns) * k;
                double        sum = 0, size = 1e-30;
                for (int64_t e = 0; e < k; e++) {
                    sum += (double) weights[row * k + e] * column[e];
                    size += (double) reach[(row * k + e) / block] * fabs(column[e]);
                }
                worst = std::max(worst, fabs(sum - y[i]) / size);
            }
        }
        check(worst < (tokens > 8 ? library_bound() : 1e-6), name + " products by expert, " + std::to_string(blocks_a_row) + " blocks, "
            + std::to_string(tokens) + " tokens, " + std::to_string(columns) + " columns each: " + std::to_string(worst));
        ggml_backend_buffer_free(buffer);
        ggml_free(ctx);
    }
}

static void check_gguf(ggml_type type, const std::vector<uint8_t> & blocks, int64_t n) {
    const std::string path = std::string("test-pn-format-") + ggml_type_name(type) + ".gguf";
    ggml_init_params  params = { blocks.size() + 4 * ggml_tensor_overhead(), nullptr, false };
    ggml_context *    ctx = ggml_init(params);
    ggml_tensor *     t   = ggml_new_tensor_2d(ctx, type, ggml_blck_size(type), n);
    memcpy(t->data, blocks.data(), blocks.size());
    ggml_set_name(t, "blk.0.ffn_up.weight");
    gguf_context * out = gguf_init_empty();
    gguf_add_tensor(out, t);
    check(gguf_write_to_file(out, path.c_str(), false), path + " written");
    ggml_context *   read_ctx = nullptr;
    gguf_init_params read     = { false, &read_ctx };
    gguf_context *   in       = gguf_init_from_file(path.c_str(), read);
    ggml_tensor *    back     = in ? ggml_get_tensor(read_ctx, "blk.0.ffn_up.weight") : nullptr;
    check(back && back->type == type && memcmp(back->data, blocks.data(), blocks.size()) == 0, path + " read back");
    gguf_free(in), gguf_free(out), ggml_free(read_ctx), ggml_free(ctx);
    remove(path.c_str());
}

int main(int argc, char ** argv) {
    std::ifstream file(argc > 1 ? argv[1] : "pn-golden.txt");
    if (!file) {
        fprintf(stderr, "test-pn-format: cannot read %s\n", argc > 1 ? argv[1] : "pn-golden.txt");
        return 2;
    }
    ggml_backend_load_all();
    std::vector<uint8_t> blocks[2];
    std::vector<float>   weights[2];
    std::string          line;
    for (int number = 1; std::getline(file, line); number++) {
        std::istringstream in(line);
        std::string        kind, bits, a, b;
        if (!(in >> kind) || kind[0] == '#') {
            continue;
        }
        in >> bits >> a >> b;
        const ggml_type   type = bits == "3" ? GGML_TYPE_PN3T : GGML_TYPE_PN4T;
        const int64_t     k    = ggml_blck_size(type);
        const std::string what = "line " + std::to_string(number) + " " + kind;
        if (kind == "D") {
            const auto         src = bytes(a);
            const auto         w   = floats(b);
            std::vector<float> got(w.size());
            ggml_get_type_traits(type)->to_float(src.data(), got.data(), (int64_t) got.size());
            check(same_bits(got, w), what);
            bool usual = true;  // backends may treat values near the ends of fp16 as they like in sums
            for (const float v : w) {
                usual = usual && std::isfinite(v);
            }
            if (usual) {
                blocks[bits == "4"].insert(blocks[bits == "4"].end(), src.begin(), src.end());
                weights[bits == "4"].insert(weights[bits == "4"].end(), w.begin(), w.end());
            }
        } else if (kind == "Q") {
            const auto           x = floats(a);
            std::vector<uint8_t> got(34);
            ggml_quantize_chunk(type, x.data(), got.data(), 0, 1, k, nullptr);
            check(b == "-" ? !ggml_validate_row_data(type, got.data(), 34) : got == bytes(b), what);
        } else if (kind == "V") {
            const auto src = bytes(a);
            check(ggml_validate_row_data(type, src.data(), src.size()) == (b == "1"), what);
        } else if (kind == "T") {
            const auto src = bytes(a);
            const auto x   = floats(b);
            std::string want;
            in >> want;
            ggml_backend_t cpu = ggml_backend_init_by_type(GGML_BACKEND_DEVICE_TYPE_CPU, nullptr);
            const auto     y   = mul_mat(cpu, { type, src, x, (int64_t) x.size(), 1, 1 });
            double         size = 0;
            std::vector<float> w(x.size());
            ggml_get_type_traits(type)->to_float(src.data(), w.data(), (int64_t) w.size());
            for (size_t i = 0; i < x.size(); i++) {
                size += fabs((double) w[i] * x[i]);
            }
            check(y.size() == 1 && fabs(y[0] - strtod(want.c_str(), nullptr)) <= 1e-6 * size, what);
            ggml_backend_free(cpu);
        }
    }
    for (int i = 0; i < 2; i++) {
        const ggml_type type = i ? GGML_TYPE_PN4T : GGML_TYPE_PN3T;
        check(!blocks[i].empty(), "decode vectors");
        check_gguf(type, blocks[i], (int64_t) weights[i].size() / ggml_blck_size(type));
        for (size_t d = 0; d < ggml_backend_dev_count(); d++) {
            ggml_backend_t backend = ggml_backend_dev_init(ggml_backend_dev_get(d), nullptr);
            printf("%s: %s\n", ggml_type_name(type), ggml_backend_name(backend));
            check_backend(backend, type, blocks[i], weights[i]);
            check_together(backend, type, blocks[i], (int64_t) weights[i].size() / ggml_blck_size(type));
            check_experts(backend, type, blocks[i], weights[i]);
            ggml_backend_free(backend);
        }
    }
    printf("%ld passed, %ld failed\n", passed, failed);
    return failed != 0;
}

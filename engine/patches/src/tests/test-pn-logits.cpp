// SPDX-License-Identifier: Apache-2.0
// Logits of two models over the same text, compared as they leave the graph (F32, nothing rounded or stored):
//   test-pn-logits REFERENCE.gguf MODEL.gguf TEXT [--context N] [--chunks N] [--batch N] [--threads N]
// Ends with 1 when the mean KL divergence is 1e-6 or more, or when another token is on top although the reference's logits
// of the two tokens lie further apart than both models differ in them: that would be more than a near tie decided by rounding.
// What rounding alone does to a model: the same tool with a REFERENCE whose sums run in another order (tests/pn/reorder.py).
#include "llama.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

struct model {
    llama_model *   weights = nullptr;
    llama_context * context = nullptr;
    int             vocab   = 0;

    model(const char * path, int n_ctx, int batch, int threads) {
        llama_model_params m = llama_model_default_params();
        m.n_gpu_layers       = 0;
        weights              = llama_model_load_from_file(path, m);
        if (weights == nullptr) {
            fprintf(stderr, "test-pn-logits: cannot load %s\n", path);
            exit(2);
        }
        llama_context_params c = llama_context_default_params();
        c.n_ctx                = (uint32_t) n_ctx;
        c.n_batch = c.n_ubatch = (uint32_t) batch;
        c.n_threads = c.n_threads_batch = threads;
        // Keys and values in F32: rounding them to F16 would turn the last bit of a product into a step of 2^-11.
        c.type_k = c.type_v = GGML_TYPE_F32;
        context = llama_init_from_model(weights, c);
        if (context == nullptr) {
            exit(2);
        }
        vocab = llama_vocab_n_tokens(llama_model_get_vocab(weights));
    }

    // Logits of every position of one chunk.
    std::vector<float> run(const llama_token * tokens, int n, int batch_size) {
        std::vector<float> out;
        llama_memory_clear(llama_get_memory(context), true);
        for (int first = 0; first < n; first += batch_size) {
            const int   count = std::min(batch_size, n - first);
            llama_batch batch = llama_batch_init(count, 0, 1);
            batch.n_tokens    = count;
            for (int i = 0; i < count; i++) {
                batch.token[i]     = tokens[first + i];
                batch.pos[i]       = first + i;
                batch.n_seq_id[i]  = 1;
                batch.seq_id[i][0] = 0;
                batch.logits[i]    = 1;
            }
            if (llama_decode(context, batch) != 0) {
                fprintf(stderr, "test-pn-logits: llama_decode failed\n");
                exit(2);
            }
            for (int i = 0; i < count; i++) {
                const float * l = llama_get_logits_ith(context, i);
                out.insert(out.end(), l, l + vocab);
            }
            llama_batch_free(batch);
        }
        return out;
    }
};

static double log_sum(const float * l, int n) {
    const double top = *std::max_element(l, l + n);
    double       sum = 0;
    for (int i = 0; i < n; i++) {
        sum += exp(l[i] - top);
    }
    return top + log(sum);
}

int main(int argc, char ** argv) {
    if (argc < 4) {
        fprintf(stderr, "usage: %s REFERENCE.gguf MODEL.gguf TEXT [--context N] [--chunks N] [--batch N] [--threads N]\n", argv[0]);
        return 2;
    }
    int n_ctx = 512, chunks = 8, batch = 512, threads = 2;
    for (int i = 4; i + 1 < argc; i += 2) {
        const int value = atoi(argv[i + 1]);
        if (strcmp(argv[i], "--context") == 0) { n_ctx = value; }
        if (strcmp(argv[i], "--chunks") == 0) { chunks = value; }
        if (strcmp(argv[i], "--batch") == 0) { batch = value; }
        if (strcmp(argv[i], "--threads") == 0) { threads = value; }
    }
    llama_log_set([](ggml_log_level level, const char * text, void *) {
        if (level == GGML_LOG_LEVEL_ERROR) {
            fputs(text, stderr);
        }
    }, nullptr);
    llama_backend_init();
    std::ifstream     file(argv[3]);
    const std::string text((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
    model             a(argv[1], n_ctx, batch, threads), b(argv[2], n_ctx, batch, threads);
    std::vector<llama_token> tokens(text.size() + 8);
    const int n_tokens = llama_tokenize(llama_model_get_vocab(a.weights), text.c_str(), (int) text.size(), tokens.data(),
        (int) tokens.size(), true, false);
    chunks = std::min(chunks, n_tokens / n_ctx);
    if (chunks < 1 || a.vocab != b.vocab) {
        fprintf(stderr, "test-pn-logits: %d tokens, needed: %d; %d and %d words, needed: as many\n", n_tokens, n_ctx, a.vocab, b.vocab);
        return 2;
    }

    long   positions = 0, other_top = 0, beyond_rounding = 0;
    double kl_sum = 0, kl_max = 0, diff_max = 0, size_max = 0, nll[2] = { 0, 0 };
    for (int chunk = 0; chunk < chunks; chunk++) {
        const llama_token * at = tokens.data() + chunk * n_ctx;
        const auto          la = a.run(at, n_ctx, batch), lb = b.run(at, n_ctx, batch);
        for (int p = 0; p < n_ctx; p++, positions++) {
            const float * x = la.data() + (size_t) p * a.vocab;
            const float * y = lb.data() + (size_t) p * a.vocab;
            const double  sx = log_sum(x, a.vocab), sy = log_sum(y, a.vocab);
            double        kl = 0, worst = 0;
            for (int i = 0; i < a.vocab; i++) {
                const double px = x[i] - sx, py = y[i] - sy;
                kl += exp(px) * (px - py);
                worst    = std::max(worst, fabs((double) x[i] - y[i]));
                size_max = std::max(size_max, fabs((double) x[i]));
            }
            kl_sum += kl;
            kl_max   = std::max(kl_max, kl);
            diff_max = std::max(diff_max, worst);
            if (p + 1 < n_ctx) {
                nll[0] += sx - x[at[p + 1]];
                nll[1] += sy - y[at[p + 1]];
            }
            const long tx = std::max_element(x, x + a.vocab) - x, ty = std::max_element(y, y + a.vocab) - y;
            if (tx != ty) {
                const double apart = x[tx] - x[ty];
                const double moved = fabs((double) x[tx] - y[tx]) + fabs((double) x[ty] - y[ty]);
                other_top++;
                beyond_rounding += apart > moved;
                if (other_top > 20) {
                    continue;
                }
                printf("chunk %d position %d: token %ld and not %ld; the reference has them %.3g apart, the models differ by %.3g\n",
                    chunk, p, ty, tx, apart, moved);
            }
        }
    }
    const long predicted = (long) chunks * (n_ctx - 1);
    printf("%ld positions: mean KL %.3g, largest %.3g; largest difference of a logit %.3g (largest logit %.3g)\n", positions,
        kl_sum / positions, kl_max, diff_max, size_max);
    printf("perplexity %.6f and %.6f\n", exp(nll[0] / predicted), exp(nll[1] / predicted));
    printf("same token on top: %ld of %ld; %ld differ by more than a near tie\n", positions - other_top, positions, beyond_rounding);
    return kl_sum / positions >= 1e-6 || beyond_rounding > 0;
}

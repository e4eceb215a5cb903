// SPDX-License-Identifier: Apache-2.0
// The PN kernels on a real GPU, without ggml. Build with and without -use_fast_math:
//   cc -O2 -c engine/pn/c/pn.c -o pn.o
//   nvcc -std=c++17 -O3 -arch=native -I engine/patches/src/ggml-cuda engine/kernels/gpu_test.cu pn.o -o gpu_test
//   gpu_test engine/pn/golden.txt      golden vectors, one-hot products, random products against sums in double
//   gpu_test --bench                   decode products over copy bandwidth, the four shapes of the documented model
//   gpu_test --once                    one product of each shape, for a profiler that counts the bytes read (`ncu`)
#include "pn-gemv.cuh"
#include "../pn/c/pn.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <random>
#include <sstream>
#include <string>
#include <vector>

#define CK(call) do { const cudaError_t e_ = (call); if (e_ != cudaSuccess) { \
    printf("%s:%d %s\n", __FILE__, __LINE__, cudaGetErrorString(e_)); exit(2); } } while (0)

static std::mt19937 rng(7);
static int          sms = 56;
static long         passed = 0, failed = 0;
static void check(bool ok, const std::string & what) {
    ok ? passed++ : failed++;
    if (!ok) printf("FAILED %s\n", what.c_str());
}

template <typename T> struct device {
    T *    p = nullptr;
    size_t n;
    explicit device(size_t n) : n(n) { CK(cudaMalloc(&p, std::max<size_t>(n, 1) * sizeof(T))); }
    device(const std::vector<T> & v) : device(v.size()) { CK(cudaMemcpy(p, v.data(), n * sizeof(T), cudaMemcpyHostToDevice)); }
    device(const device &) = delete;
    ~device() { cudaFree(p); }
    std::vector<T> host() const {
        std::vector<T> v(n);
        CK(cudaMemcpy(v.data(), p, n * sizeof(T), cudaMemcpyDeviceToHost));
        return v;
    }
};

template <int BITS> __global__ void decode_kernel(const char * w, float * out, int64_t k) {
    const int64_t i = 2 * ((int64_t) blockIdx.x * blockDim.x + threadIdx.x);
    if (i < k) {
        float2 v;
        pn_dequantize_pair<BITS>(w, i / pn_shape<BITS>::QK, i % pn_shape<BITS>::QK, v);
        out[i] = v.x, out[i + 1] = v.y;
    }
}

struct matrix {
    int                  nrows, nblk;
    int64_t              row_bytes;
    std::vector<uint8_t> data;
    std::vector<float>   weights;  // decoded, [nrows][K]
    std::vector<float>   scales;   // |d| of each block
};

template <int BITS>
static std::vector<float> gemv(const device<uint8_t> & w, const matrix & m, const std::vector<float> & x, int ncols, pn_options options = {}) {
    options.sms = sms;
    device<float> dx(x), prep(pn_workspace<BITS>(m.nblk, ncols)), dy((size_t) m.nrows * ncols);
    CK(cudaMemset(dy.p, 0xff, dy.n * 4));
    pn_gemv_run<BITS>({ { { (const char *) w.p, dy.p, m.nrows, m.nrows } }, 1 }, dx.p, prep.p, m.nblk, m.row_bytes, ncols,
        x.size() / ncols, options, 0);
    CK(cudaGetLastError());
    CK(cudaDeviceSynchronize());
    return dy.host();
}

template <int BITS> static matrix random_matrix(int nrows, int nblk, int pad) {
    constexpr int QK = pn_shape<BITS>::QK;
    matrix m { nrows, nblk, (int64_t) nblk * 34 + pad, {}, {}, {} };
    m.data.resize(nrows * m.row_bytes);
    m.weights.resize((size_t) nrows * nblk * QK);
    for (int r = 0; r < nrows; r++) {
        uint8_t * row = m.data.data() + r * m.row_bytes;
        for (int64_t i = 0; i < (int64_t) nblk * 34; i++) row[i] = rng();
        for (int b = 0; b < nblk; b++) {
            const uint16_t d = 0x2000 + rng() % 0x800 + (rng() & 0x8000);
            memcpy(row + b * 34, &d, 2);
            m.scales.push_back(fabsf(pn_half_to_float(d)));
            if (BITS == 3) for (int i = 1; i < 17; i++) row[b * 34 + 2 * i + 1] &= 0x7f;
        }
        pn_decode(BITS, row, m.weights.data() + (size_t) r * nblk * QK, nblk);
    }
    return m;
}

// The worst row, relative to the sum of |w x|, or (`whole`) of |z d x|: the zero point enters as -z times the sum of x,
// so an activation under a weight of zero still leaves its rounding behind.
template <int BITS> static double error(const matrix & m, const std::vector<float> & x, const std::vector<float> & y, int ncols,
        bool whole = false) {
    const size_t k = (size_t) m.nblk * pn_shape<BITS>::QK;
    double       worst = 0;
    for (int c = 0; c < ncols; c++) for (int r = 0; r < m.nrows; r++) {
        double sum = 0, size = 1e-30;
        for (size_t e = 0; e < k; e++) {
            const double v = (double) m.weights[r * k + e] * x[c * k + e];
            sum += v;
            size += whole ? pn_shape<BITS>::Z * m.scales[r * m.nblk + e / pn_shape<BITS>::QK] * fabs(x[c * k + e]) : fabs(v);
        }
        const double off = fabs(sum - y[(size_t) c * m.nrows + r]) / size;
        worst = std::isfinite(off) ? std::max(worst, off) : 1.0;
    }
    return worst;
}

template <int BITS> static void one_hot(const matrix & m, const std::vector<int> & positions, const std::string & what, pn_options options = {}) {
    const size_t    k = (size_t) m.nblk * pn_shape<BITS>::QK;
    device<uint8_t> w(m.data);
    for (int ncols : { 1, 8 }) {
        bool same = true;
        for (size_t p = 0; p + ncols <= positions.size(); p += ncols) {
            std::vector<float> x(k * ncols, 0.0f);
            for (int c = 0; c < ncols; c++) x[c * k + positions[p + c]] = 1.0f;
            const auto y = gemv<BITS>(w, m, x, ncols, options);
            for (int c = 0; c < ncols; c++) for (int r = 0; r < m.nrows; r++) {
                same = same && y[(size_t) c * m.nrows + r] == m.weights[r * k + positions[p + c]];
            }
        }
        check(same, what + ", one-hot, " + std::to_string(ncols) + " columns");
    }
}

template <int BITS> static void run(const std::vector<std::vector<uint8_t>> & blocks, const std::vector<std::vector<float>> & expected) {
    constexpr int     QK   = pn_shape<BITS>::QK;
    const std::string name = "pn" + std::to_string(BITS) + "t ";
    // Decoding, from a base that is 4-byte aligned and from one that is not.
    for (int base : { 0, 2 }) {
        std::vector<uint8_t> all(base);
        std::vector<float>   want;
        for (size_t i = 0; i < blocks.size(); i++) {
            all.insert(all.end(), blocks[i].begin(), blocks[i].end());
            want.insert(want.end(), expected[i].begin(), expected[i].end());
        }
        device<uint8_t> w(all);
        device<float>   out(want.size());
        decode_kernel<BITS><<<(want.size() / 2 + 127) / 128, 128>>>((const char *) w.p + base, out.p, want.size());
        const auto got = out.host();
        check(memcmp(got.data(), want.data(), want.size() * 4) == 0, name + "decode, base " + std::to_string(base));
    }
    // One-hot products return the golden weights: rows of 1 block, and ragged rows of 3 and 5.
    for (int nblk : { 1, 3, 5 }) {
        matrix m { (int) blocks.size() / nblk, nblk, nblk * 34, {}, {}, {} };
        for (int i = 0; i < m.nrows * nblk; i++) {
            m.data.insert(m.data.end(), blocks[i].begin(), blocks[i].end());
            m.weights.insert(m.weights.end(), expected[i].begin(), expected[i].end());
        }
        std::vector<int> positions(nblk * QK);
        for (int i = 0; i < nblk * QK; i++) positions[i] = i;
        one_hot<BITS>(m, positions, name + std::to_string(nblk) + " blocks");
        one_hot<BITS>(m, positions, name + std::to_string(nblk) + " blocks, reference", { false, true, 56 });
    }
    // The kernels with the row length compiled in.
    const std::vector<int> lengths = BITS == 3 ? std::vector<int> { 64 } : std::vector<int> { 80, 96, 272 };
    double worst = 0;
    for (int nblk : lengths) {
        const matrix     m = random_matrix<BITS>(2051, nblk, 0);
        std::vector<int> positions;
        for (int i = 0; i < 160; i++) positions.push_back(i < 80 ? i : rng() % (nblk * QK));
        const int real = sms;
        for (int some : { 16, 48, 132 }) {  // 1, 2 and 4 warps a row
            sms = some;
            one_hot<BITS>(m, positions, name + std::to_string(nblk) + " blocks compiled in, for " + std::to_string(some) + " SMs");
        }
        sms = real;
    }
    std::normal_distribution<float> normal;
    for (int nblk : { 1, 2, 7, 64, 80, 96, 100, 272 }) for (int nrows : { 1, 3, 4, 515, 2051 }) for (int pad : { 0, 2, 34 }) {
        if (nblk > 96 && nrows > 4 && pad) continue;
        const matrix    m = random_matrix<BITS>(nrows, nblk, pad);
        device<uint8_t> w(m.data);
        for (int ncols = 1; ncols <= 8; ncols += nrows > 515 ? 7 : nblk > 7 && nrows > 4 ? 3 : 1) {
            std::vector<float> x((size_t) ncols * nblk * QK);
            for (float & v : x) v = normal(rng);
            const double off = error<BITS>(m, x, gemv<BITS>(w, m, x, ncols), ncols);
            worst = std::max(worst, off);
            check(off < 5e-7, name + std::to_string(nblk) + " blocks, " + std::to_string(nrows) + " rows, " + std::to_string(ncols)
                + " columns: error " + std::to_string(off));
        }
        // Outliers: one activation 10,000 times the others.
        std::vector<float> x((size_t) nblk * QK);
        for (float & v : x) v = normal(rng);
        for (size_t i = 0; i < x.size(); i += 97) x[i] *= 1e4f;
        const double off = error<BITS>(m, x, gemv<BITS>(w, m, x, 1), 1, true);
        check(off < 2e-6, name + "outliers: " + std::to_string(off));
    }
    printf("%sworst error over sum of magnitudes: %.2g\n", name.c_str(), worst);
}

// Products in one launch return exactly what each returns by itself.
template <int BITS> static void groups(int nblk, std::vector<int> rows, int ncols, bool subnormal) {
    pn_options         options { subnormal, true, 1 };  // one warp a row where the length is compiled in, whatever the group
    std::vector<float> x((size_t) ncols * nblk * pn_shape<BITS>::QK);
    std::normal_distribution<float> normal;
    for (float & v : x) v = normal(rng);
    device<float> dx(x), prep(pn_workspace<BITS>(nblk, ncols));
    std::vector<matrix> m;
    for (int n : rows) m.push_back(random_matrix<BITS>(n, nblk, 0));
    std::vector<device<uint8_t> *> w;
    std::vector<device<float> *>   y;
    pn_group group {};
    for (const matrix & one : m) {
        w.push_back(new device<uint8_t>(one.data));
        y.push_back(new device<float>((size_t) one.nrows * ncols));
        CK(cudaMemset(y.back()->p, 0xff, y.back()->n * 4));
        group.of[group.count++] = { (const char *) w.back()->p, y.back()->p, one.nrows, one.nrows };
    }
    pn_gemv_run<BITS>(group, dx.p, prep.p, nblk, (int64_t) nblk * 34, ncols, x.size() / ncols, options, 0);
    CK(cudaGetLastError());
    CK(cudaDeviceSynchronize());
    for (size_t i = 0; i < m.size(); i++) {
        const int real = sms;
        sms = 1;
        // Rows of fewer than 4 anywhere in the group choose another kernel for all of it, which sums in another order.
        const auto alone = gemv<BITS>(*w[i], m[i], x, ncols, options), together = y[i]->host();
        sms = real;
        const bool few = *std::min_element(rows.begin(), rows.end()) < 4;
        check(few ? error<BITS>(m[i], x, together, ncols) < 5e-7 : memcmp(alone.data(), together.data(), alone.size() * 4) == 0,
            "pn" + std::to_string(BITS) + "t group, " + std::to_string(nblk) + " blocks, " + std::to_string(ncols)
            + " columns, product " + std::to_string(i));
        delete w[i], delete y[i];
    }
}

// Products by an index on the card, against sums in double.
template <int BITS> static void experts(int nblk, int nrows, int slots, int tokens, bool shared) {
    const int          count = 5, columns = shared ? 1 : slots;
    const size_t       k = (size_t) nblk * pn_shape<BITS>::QK;
    const matrix       all = random_matrix<BITS>(count * nrows, nblk, 0);
    std::vector<float> x(k * columns * tokens);
    std::normal_distribution<float> normal;
    for (float & v : x) v = normal(rng);
    std::vector<int32_t> ids;
    for (int t = 0; t < tokens; t++) for (int s = 0; s < slots + 1; s++) ids.push_back((rng() % 2 + 2 * s + t) % count);  // one unused
    device<uint8_t> w(all.data);
    device<float>   dx(x), prep(pn_workspace_id<BITS>(nblk, columns * tokens)), y((size_t) nrows * slots * tokens);
    device<int32_t> di(ids);
    CK(cudaMemset(y.p, 0xff, y.n * 4));
    pn_gemv_id_run<BITS>({ (const char *) w.p, (int64_t) nrows * nblk * 34, di.p, slots + 1, columns, y.p, nrows,
        (int64_t) nrows * slots, nrows }, dx.p, prep.p, nblk, slots, tokens, k, 0);
    CK(cudaGetLastError());
    CK(cudaDeviceSynchronize());
    const auto got = y.host();
    double     worst = 0;
    for (int t = 0; t < tokens; t++) for (int s = 0; s < slots; s++) {
        const int first = ids[t * (slots + 1) + s] * nrows;
        matrix one { nrows, nblk, (int64_t) nblk * 34, {},
            { all.weights.begin() + first * k, all.weights.begin() + (first + nrows) * k }, {} };
        const float * column = x.data() + (t * columns + s % columns) * k;
        const float * out    = got.data() + ((size_t) t * slots + s) * nrows;
        worst = std::max(worst, error<BITS>(one, { column, column + k }, { out, out + nrows }, 1));
    }
    check(worst < 5e-7, "pn" + std::to_string(BITS) + "t by expert, " + std::to_string(nblk) + " blocks, " + std::to_string(nrows)
        + " rows, " + std::to_string(slots) + " slots, " + std::to_string(tokens) + " tokens: " + std::to_string(worst));
}

template <int BITS> static void launches() {
    for (int nblk : { 1, 7, BITS == 3 ? 64 : 80 }) for (int ncols : { 1, 2, 8 }) for (bool subnormal : { true, false }) {
        groups<BITS>(nblk, { 515, 64, 130 }, ncols, subnormal);
        groups<BITS>(nblk, { 64, 64 }, ncols, subnormal);
        groups<BITS>(nblk, { 3, 70 }, ncols, subnormal);
    }
    for (int nblk : { 1, 7, 64 }) for (int nrows : { 1, 4, 33 }) for (int tokens : { 1, 3 }) for (bool shared : { true, false }) {
        experts<BITS>(nblk, nrows, 1, tokens, shared);
        experts<BITS>(nblk, nrows, 4, tokens, shared);
    }
}

static float milliseconds(cudaGraphExec_t graph, cudaStream_t stream) {
    cudaEvent_t a, b;
    CK(cudaEventCreate(&a)); CK(cudaEventCreate(&b));
    std::vector<float> times;
    for (int i = 0; i < 9; i++) {
        CK(cudaEventRecord(a, stream));
        CK(cudaGraphLaunch(graph, stream));
        CK(cudaEventRecord(b, stream));
        CK(cudaEventSynchronize(b));
        float ms;
        CK(cudaEventElapsedTime(&ms, a, b));
        times.push_back(ms);
    }
    std::sort(times.begin(), times.end());
    return times[times.size() / 2];
}

// A chain of launches, or four chains side by side, `at_once` products a launch with the same activations.
template <int BITS> struct measured {
    int             k, n, nblk;
    size_t          bytes, count;  // of a matrix; matrices, spread over a pool much larger than the cache: each launch reads cold weights
    device<uint8_t> pool;
    device<float>   x, prep, y;
    measured(int k, int n) : k(k), n(n), nblk(k / pn_shape<BITS>::QK), bytes((size_t) n * nblk * 34),
            count(std::min<size_t>(96, 3000000000ull / bytes)), pool(bytes * count), x(k), prep(pn_workspace<BITS>(nblk, 1) * 4),
            y((size_t) n * 4 * PN_GROUP) {
        CK(cudaMemset(pool.p, 0x12, pool.n));
        CK(cudaMemset(x.p, 0, x.n * 4));
    }
    double rate(int branches, size_t at_once, bool subnormal) {
        cudaStream_t s[4];
        cudaEvent_t  fork, join[4];
        for (auto & v : s) CK(cudaStreamCreate(&v));
        for (auto & v : join) CK(cudaEventCreate(&v));
        CK(cudaEventCreate(&fork));
        CK(cudaStreamBeginCapture(s[0], cudaStreamCaptureModeGlobal));
        CK(cudaEventRecord(fork, s[0]));
        for (int i = 1; i < branches; i++) CK(cudaStreamWaitEvent(s[i], fork, 0));
        for (size_t i = 0; i < count; i += at_once) {
            const int b = i / at_once % branches;
            pn_group  group {};
            for (size_t j = i; j < std::min(count, i + at_once); j++, group.count++) {
                group.of[group.count] = { (const char *) pool.p + j * bytes, y.p + (size_t) n * (b + 4 * group.count), n, n };
            }
            pn_gemv_run<BITS>(group, x.p, prep.p + prep.n / 4 * b, nblk, nblk * 34, 1, k, { subnormal, true, sms }, s[b]);
        }
        for (int i = 1; i < branches; i++) {
            CK(cudaEventRecord(join[i], s[i]));
            CK(cudaStreamWaitEvent(s[0], join[i], 0));
        }
        cudaGraph_t     graph;
        cudaGraphExec_t exec;
        CK(cudaStreamEndCapture(s[0], &graph));
        CK(cudaGraphInstantiate(&exec, graph, 0));
        const double gbs = bytes * count / milliseconds(exec, s[0]) / 1e6;
        CK(cudaGraphExecDestroy(exec));
        CK(cudaGraphDestroy(graph));
        return gbs;
    }
};

template <int BITS> static void bench(int k, int n, double copy) {
    measured<BITS> m(k, n);
    const double chain = m.rate(1, 1, true), overlap = m.rate(4, 1, true), two = m.rate(1, 2, true), three = m.rate(1, 3, true);
    printf("pn%dt K%-5d N%-5d of copy: chain %.2f, two a launch %.2f, three %.2f, overlap %.2f; reference kernel %.2f, %.2f\n", BITS, k, n,
        chain / copy, two / copy, three / copy, overlap / copy, m.rate(1, 1, false) / copy, m.rate(4, 1, false) / copy);
}

template <int BITS> static void once(int k, int n) {
    const int       nblk = k / pn_shape<BITS>::QK;
    device<uint8_t> w((size_t) n * nblk * 34);
    CK(cudaMemset(w.p, 0x12, w.n));
    device<float> x(k), prep(pn_workspace<BITS>(nblk, 1)), y(n);
    CK(cudaMemset(x.p, 0, x.n * 4));
    pn_gemv_run<BITS>({ { { (const char *) w.p, y.p, n, n } }, 1 }, x.p, prep.p, nblk, nblk * 34, 1, k, { true, true, sms }, 0);
    CK(cudaDeviceSynchronize());
    printf("pn%dt K%d N%d: %zu bytes of weights\n", BITS, k, n, w.n);
}

static double copy_bandwidth() {
    const size_t    n = 2000000000;
    device<uint8_t> a(n), b(n);
    CK(cudaMemset(a.p, 1, n));
    cudaEvent_t t0, t1;
    CK(cudaEventCreate(&t0)); CK(cudaEventCreate(&t1));
    std::vector<float> times;
    for (int i = 0; i < 7; i++) {
        CK(cudaEventRecord(t0));
        CK(cudaMemcpyAsync(b.p, a.p, n, cudaMemcpyDeviceToDevice));
        CK(cudaEventRecord(t1));
        CK(cudaEventSynchronize(t1));
        float ms;
        CK(cudaEventElapsedTime(&ms, t0, t1));
        times.push_back(ms);
    }
    std::sort(times.begin(), times.end());
    return 2.0 * n / times[3] / 1e6;
}

int main(int argc, char ** argv) {
    cudaDeviceProp prop;
    CK(cudaGetDeviceProperties(&prop, 0));
    sms = prop.multiProcessorCount;
    printf("%s, compute capability %d.%d\n", prop.name, prop.major, prop.minor);
    if (argc > 1 && strcmp(argv[1], "--bench") == 0) {
        const double copy = copy_bandwidth();
        printf("copy %.0f GB/s, read and written\n", copy);
        bench<3>(5120, 17408, copy); bench<3>(5120, 5120, copy);
        bench<4>(5120, 17408, copy); bench<4>(5120, 5120, copy); bench<4>(6144, 5120, copy); bench<4>(17408, 5120, copy);
        return 0;
    }
    if (argc > 1 && strcmp(argv[1], "--once") == 0) {
        once<3>(5120, 17408), once<3>(5120, 5120), once<4>(5120, 17408), once<4>(5120, 5120), once<4>(6144, 5120);
        once<4>(17408, 5120);
        return 0;
    }
    std::vector<std::vector<uint8_t>> blocks[2];
    std::vector<std::vector<float>>   weights[2];
    for (int i = 1; i < argc; i++) {
        std::ifstream file(argv[i]);
        std::string   line;
        while (std::getline(file, line)) {
            std::istringstream in(line);
            std::string        kind, bits, block, w;
            in >> kind >> bits >> block >> w;
            if (kind != "D") continue;
            std::vector<uint8_t> b;
            std::vector<float>   f;
            for (size_t p = 0; p < block.size(); p += 2) b.push_back((uint8_t) strtoul(block.substr(p, 2).c_str(), 0, 16));
            for (size_t p = 0; p < w.size(); p += 8) {
                const uint32_t v = (uint32_t) strtoul(w.substr(p, 8).c_str(), 0, 16);
                float          x;
                memcpy(&x, &v, 4);
                f.push_back(x);
            }
            blocks[bits == "4"].push_back(b), weights[bits == "4"].push_back(f);
        }
    }
    printf("%zu and %zu golden blocks\n", blocks[0].size(), blocks[1].size());
    if (blocks[0].empty() || blocks[1].empty()) return 2;
    run<3>(blocks[0], weights[0]);
    run<4>(blocks[1], weights[1]);
    launches<3>();
    launches<4>();
    printf("%ld passed, %ld failed\n", passed, failed);
    return failed != 0;
}

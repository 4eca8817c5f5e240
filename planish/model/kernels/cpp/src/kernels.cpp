// Kernels for CPUs with AVX-512 and BF16, or AVX2: norms, rotary embeddings, gated activations,
// attention, matmuls with frozen weights and with adapters. Every function has a reference in
// torch, which the tests compare.
//
// A row's outcome has bits that depend on that row alone: not on the number of rows, nor on how
// they are cut into blocks, nor on the number of threads. So every sum has one order, written where
// it is made, and every multiply-add is an explicit instruction.
//
// bf16 is uint16_t here, widened exactly, rounded to nearest even. All rows are contiguous unless a
// stride is given.

#include <cpuid.h>
#include <sys/mman.h>

#include "adapters.h"
#include "amx.h"
#include "attention.h"
#include "decode.h"
#include "delta_net.h"
#include "elementwise.h"
#include "head.h"
#include "matmul.h"

// What the functions return: 0, or how many bytes of memory could not be allocated (buffer.h).
using Status = int64_t;
template <class F>
Status status_of(F f) {
    AllocationGuard guard;
    guard.run(f);
    return guard.missing_bytes();
}

// One name for each type: `_f` float32, `_h` bf16.
#define EXPORT extern "C" __attribute__((visibility("default")))
#define FOR_TYPES(S, X)                                                                            \
    EXPORT Status rms_norm_##S(const float* x, const X* y, const float* w, float eps,              \
                               float* x_out, X* out, float* scale, int64_t rows, int64_t d,        \
                               int threads) {                                                      \
        return status_of(                                                                          \
            [&] { rms_norm<X, X>(x, y, w, eps, x_out, out, scale, rows, d, threads); });           \
    }                                                                                              \
    EXPORT Status rms_norm_backward_##S(const X* g, const float* x, const float* w,                \
                                        const float* scale, const float* grad_total, float* out,   \
                                        int64_t rows, int64_t d, int threads) {                    \
        return status_of(                                                                          \
            [&] { rms_norm_backward<X>(g, x, w, scale, grad_total, out, rows, d, threads); });     \
    }                                                                                              \
    EXPORT Status rope_##S(const X* x, int64_t stride, const float* cos, const float* sin,         \
                           float sign, X* out, int64_t rows, int64_t heads, int64_t e,             \
                           int threads) {                                                          \
        return status_of(                                                                          \
            [&] { rope<X>(x, stride, cos, sin, sign, out, rows, heads, e, threads); });            \
    }                                                                                              \
    EXPORT Status swiglu_##S(const X* gate_up, X* out, int64_t rows, int64_t d, int threads) {     \
        return status_of([&] { gated<Silu>(gate_up, out, rows, d, threads); });                    \
    }                                                                                              \
    EXPORT Status swiglu_backward_##S(const X* grad, const X* gate_up, X* out, int64_t rows,       \
                                      int64_t d, int threads) {                                    \
        return status_of([&] { gated_backward<Silu>(grad, gate_up, out, rows, d, threads); });     \
    }                                                                                              \
    EXPORT Status geglu_##S(const X* gate_up, X* out, int64_t rows, int64_t d, int threads) {      \
        return status_of([&] { gated<Gelu>(gate_up, out, rows, d, threads); });                    \
    }                                                                                              \
    EXPORT Status geglu_backward_##S(const X* grad, const X* gate_up, X* out, int64_t rows,        \
                                     int64_t d, int threads) {                                     \
        return status_of([&] { gated_backward<Gelu>(grad, gate_up, out, rows, d, threads); });     \
    }                                                                                              \
    EXPORT Status clamped_swiglu_##S(const X* gate_up, X* out, float alpha, float limit,           \
                                     int64_t rows, int64_t d, int threads) {                       \
        return status_of([&] { clamped_swiglu(gate_up, out, alpha, limit, rows, d, threads); });   \
    }                                                                                              \
    EXPORT Status clamped_swiglu_backward_##S(const X* grad, const X* gate_up, X* out,             \
                                              float alpha, float limit, int64_t rows, int64_t d,   \
                                              int threads) {                                       \
        return status_of(                                                                          \
            [&] { clamped_swiglu_backward(grad, gate_up, out, alpha, limit, rows, d, threads); }); \
    }                                                                                              \
    EXPORT Status log_sum_exp_##S(const X* logits, const int64_t* tokens, const float* exact,      \
                                  int64_t k, const float* temperature, float* weights, float* out, \
                                  int64_t rows, int64_t v, int threads) {                          \
        return status_of([&] {                                                                     \
            log_sum_exp<X>(logits, tokens, exact, k, temperature, weights, out, rows, v, threads); \
        });                                                                                        \
    }                                                                                              \
    EXPORT Status log_sum_exp_backward_##S(                                                        \
        const X* logits, const int64_t* from, const int64_t* tokens, const float* exact,           \
        int64_t k, float temperature, const float* log_total, const int64_t* first,                \
        const int64_t* targets, const float* grads, X* out, int64_t rows, int64_t v,               \
        int threads) {                                                                             \
        return status_of([&] {                                                                     \
            log_sum_exp_backward<X>(logits, from, tokens, exact, k, temperature, log_total, first, \
                                    targets, grads, out, rows, v, threads);                        \
        });                                                                                        \
    }                                                                                              \
    EXPORT Status store_kv_##S(const Range* own, const int64_t* rows, int64_t n, const X* k,       \
                               int64_t k_stride, const X* v, int64_t v_stride, int64_t heads,      \
                               int64_t e, int) {                                                   \
        return status_of([&] { store_kv<X>(own, rows, n, k, k_stride, v, v_stride, heads, e); });  \
    }                                                                                              \
    EXPORT Status attend_##S(const Attention* a, int64_t n_blocks, const X* q, X* out, float* lse, \
                             int threads) {                                                        \
        return status_of([&] { attend<X>(*a, n_blocks, q, out, lse, threads); });                  \
    }                                                                                              \
    EXPORT Status attend_backward_##S(const Attention* a, const int64_t* part_ends, int64_t parts, \
                                      const X* grad, const X* q, const X* out, const float* lse,   \
                                      const X* k0, X* grad_q, X* grad_k, X* grad_v, float* sums,   \
                                      int64_t size, int threads) {                                 \
        return status_of([&] {                                                                     \
            attend_backward<X>(*a, part_ends, parts, grad, q, out, lse, k0, grad_q, grad_k,        \
                               grad_v, sums, size, threads);                                       \
        });                                                                                        \
    }                                                                                              \
    EXPORT Status pack_panels_##S(const PackRecord<X>* matrices, int64_t count,                    \
                                  int64_t transposed, int threads) {                               \
        return status_of([&] { pack_panels(matrices, count, transposed, threads); });              \
    }                                                                                              \
    EXPORT Status matmul_##S(const X* panels, const X* x, const X* bias, X* out, int64_t rows,     \
                             int64_t n, int64_t k, int threads) {                                  \
        return status_of([&] { matmul(Panels<X>{panels, n, k}, x, bias, out, rows, threads); });   \
    }                                                                                              \
    EXPORT Status quantized_matmul_##S(const QuantizedWeight* weight, int64_t transposed,          \
                                       const X* x, const X* bias, X* out, int64_t rows,            \
                                       int threads) {                                              \
        return status_of([&] {                                                                     \
            matmul(quantized_panels<X>(*weight, transposed), x, bias, out, rows, threads);         \
        });                                                                                        \
    }                                                                                              \
    EXPORT Status add_lora_##S(const LoraAdapter<X>* adapters, int64_t n, const X* x, int64_t in,  \
                               X* out, const int64_t* sizes, int64_t linears, X* lora_hidden,      \
                               int threads) {                                                      \
        return status_of(                                                                          \
            [&] { add_lora(adapters, n, x, in, out, sizes, linears, lora_hidden, threads); });     \
    }                                                                                              \
    EXPORT Status lora_backward_##S(const LoraAdapter<X>* adapters, int64_t n, const X* grad,      \
                                    const int64_t* sizes, int64_t linears, X* hidden_grad,         \
                                    X* grad_x, int64_t in, int threads) {                          \
        return status_of([&] {                                                                     \
            lora_backward(adapters, n, grad, sizes, linears, hidden_grad, grad_x, in, threads);    \
        });                                                                                        \
    }                                                                                              \
    EXPORT Status lora_gradients_##S(const X* x, int64_t in, const X* lora_hidden, const X* grad,  \
                                     const int64_t* sizes, int64_t linears, const X* hidden_grad,  \
                                     int64_t rank, float* grad_a, float* grad_bs, int64_t rows,    \
                                     int threads) {                                                \
        return status_of([&] {                                                                     \
            lora_gradients(x, in, lora_hidden, grad, sizes, linears, hidden_grad, rank, grad_a,    \
                           grad_bs, rows, threads);                                                \
        });                                                                                        \
    }                                                                                              \
    EXPORT Status head_lora_hidden_##S(const HeadAdapter<X>* adapters, int64_t n, const X* x,      \
                                       int64_t in, X* lora_hidden, int64_t hidden_stride,          \
                                       int64_t rows, int threads) {                                \
        return status_of([&] {                                                                     \
            head_lora_hidden(adapters, n, x, in, lora_hidden, hidden_stride, rows, threads);       \
        });                                                                                        \
    }                                                                                              \
    EXPORT Status add_head_lora_##S(const HeadAdapter<X>* adapters, int64_t n,                     \
                                    const X* lora_hidden, int64_t hidden_stride, X* logits,        \
                                    int64_t v, int threads) {                                      \
        return status_of(                                                                          \
            [&] { add_head_lora(adapters, n, lora_hidden, hidden_stride, logits, v, threads); });  \
    }                                                                                              \
    EXPORT Status decode_##S(const DecodePass<X>* pass, X* out, int threads) {                     \
        return status_of([&] { decode(*pass, out, threads); });                                    \
    }

FOR_TYPES(f, float)
FOR_TYPES(h, uint16_t)

// Whether the CPU multiplies pairs of bf16; one with AMX by that, or not at all: oneDNN is faster
// then.
EXPORT int has_fast_bf16_matmul() { return amx::is_available() == amx_enabled; }
EXPORT int has_amx() { return amx::is_available(); }
EXPORT void use_amx(int enabled) { amx_enabled = enabled && amx::is_available(); }
// Fills x with bf16 numbers: whole ones from -8 to 7, or ones whose sums are rounded.
void fill(std::vector<uint16_t>& x, bool whole, uint32_t& state) {
    for (uint16_t& v : x) {
        state = state * 1664525 + 1013904223;
        const float number = whole ? (float)(int)(state >> 28) - 8 : (float)(int)state;
        uint32_t bits;
        std::memcpy(&bits, &number, 4);
        v = bits >> 16;
    }
}
// Whether scores of tiles are the same for few and many queries, and for few and many keys, and
// sums the same whatever number of zeros is behind them.
bool scores_agree() {
    constexpr int64_t E = 96, FEW = 5;
    uint32_t state = 1;
    std::vector<uint16_t> q((FEW + amx::ROWS) * E), rows(KEYS * E);
    fill(q, false, state), fill(rows, false, state);
    std::vector<const uint16_t*> keys(KEYS), queries(LANES, q.data());
    for (int64_t j = 0; j < KEYS; j++) keys[j] = rows.data() + j * E;
    for (int64_t i = 0; i < FEW; i++) queries[i] = q.data() + i * E;
    std::vector<uint32_t> transposed_queries(KEYS * E / 2), few(E / 2 * LANES);
    pack_transposed(queries.data(), LANES, E, transposed_queries.data());
    for (int64_t p = 0; p < E / 2; p++)
        std::copy_n(transposed_queries.data() + p * KEYS, LANES, few.data() + p * LANES);
    const amx::TileScope scope(true);
    Scratch& scratch = Scratch::of_thread();
    std::vector<float> many(FEW * KEYS), found(many);
    AmxAttention::many_dots(q.data(), FEW, E, keys.data(), KEYS, 1.5f, scratch, many.data(), KEYS);
    bool agree = true;
    for (int64_t n : {1, 16, 23, 32}) {
        AmxAttention::few_tile_dots<FEW>(few.data(), E, keys.data(), n, 1.5f, scratch, found.data(),
                                         KEYS);
        for (int64_t i = 0; i < FEW; i++)
            agree = agree && std::equal(found.data() + i * KEYS, found.data() + i * KEYS + n,
                                        many.data() + i * KEYS);
    }
    // Of keys as weights of themselves, 10 and then zeros.
    std::vector<float> sums[2];
    for (int64_t pairs : {16, 32}) {
        std::vector<uint16_t> weights(amx::ROWS * 2 * KEYS);
        for (int64_t r = 0; r < amx::ROWS; r++)
            std::copy_n(keys[r], 10, weights.data() + r * 2 * KEYS);
        std::vector<float>& own = sums[pairs / 32];
        own.assign(FEW * E, 1.0f);
        AmxAttention::add_weighted_packed((const uint32_t*)weights.data(), KEYS, FEW,
                                          (const uint32_t*)rows.data(), pairs, E / 2, own.data(),
                                          E);
    }
    return agree && sums[0] == sums[1];
}
// Whether tiles and vectors multiply whole numbers to the same products, which are exact in both;
// 16 and more rows, ends of all kinds.
EXPORT int amx_self_test() {
    if (!amx::is_available() || !scores_agree()) return false;
    uint32_t state = 1;
    const bool before = amx_enabled;
    bool agree = true;
    for (int64_t rows : {1, 15, 16, 17, 32, 33, 70})
        for (int64_t n : {16, 48, 64, 96, 272})
            for (int64_t k : {2, 30, 32, 34, 96, 1536}) {
                struct alignas(64) Line {
                    uint16_t numbers[32];
                };
                std::vector<uint16_t> x(rows * k), weight(n * k), bias(n), out[2];
                std::vector<Line> panels((n + PANEL - 1) / PANEL * PANEL * k / 32);
                fill(x, true, state), fill(weight, true, state), fill(bias, true, state);
                const PackRecord<uint16_t> record{weight.data(), panels.data()->numbers, n, k};
                pack_panels(&record, 1, false, 1);
                for (int uses_amx = 0; uses_amx < 2; uses_amx++) {
                    amx_enabled = uses_amx;
                    out[uses_amx].assign(rows * n, 0);
                    matmul(Panels<uint16_t>{record.panels, n, k}, x.data(), bias.data(),
                           out[uses_amx].data(), rows, 1);
                }
                agree = agree && out[0] == out[1];
            }
    amx_enabled = before;
    return agree;
}
// Asks for pages of 2 MB for memory that nobody has written to yet.
EXPORT void advise_huge_pages(uintptr_t address, int64_t bytes) {
    constexpr uintptr_t PAGE = 1 << 21;
    const uintptr_t first = (address + PAGE - 1) / PAGE * PAGE,
                    last = (address + bytes) / PAGE * PAGE;
    if (first < last) madvise((void*)first, last - first, MADV_HUGEPAGE);
}
EXPORT Status sample_from_weights_f(const float* weights, const double* uniforms, int64_t* tokens,
                                    int64_t rows, int64_t v, int64_t k, int threads) {
    return status_of([&] { sample_from_weights(weights, uniforms, tokens, rows, v, k, threads); });
}
EXPORT Status sample_f(const float* logits, const int64_t* rows, const float* temperature,
                       const double* uniforms, const uint32_t* allowed, float min_weight,
                       int64_t* tokens, float* log_total, int64_t n, int64_t v, int threads) {
    return status_of([&] {
        sample(logits, rows, temperature, uniforms, allowed, min_weight, tokens, log_total, n, v,
               threads);
    });
}
EXPORT Status delta_scan_f(const DeltaScan* delta, float* out, int threads) {
    return status_of([&] { delta_scan(*delta, out, threads); });
}
EXPORT Status delta_scan_backward_f(const DeltaScan* delta, const float* grad, float* grad_q,
                                    float* grad_k, float* grad_v, float* grad_decay,
                                    float* grad_beta, int threads) {
    return status_of([&] {
        delta_scan_backward(*delta, grad, grad_q, grad_k, grad_v, grad_decay, grad_beta, threads);
    });
}
EXPORT Status top_k_logits_h(const ExactLogits* exact, const uint16_t* logits, int64_t k,
                             int64_t* tokens, float* values, float* float_logits, int64_t rows,
                             int64_t v, int threads) {
    return status_of(
        [&] { top_k_logits(*exact, logits, k, tokens, values, float_logits, rows, v, threads); });
}
EXPORT Status single_logits_h(const ExactLogits* exact, const int64_t* rows, const int64_t* tokens,
                              float* out, int64_t pairs, int threads) {
    return status_of([&] { single_logits(*exact, rows, tokens, out, pairs, threads); });
}

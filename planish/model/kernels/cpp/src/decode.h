// All layers in one call.

#pragma once

#include <initializer_list>
#include <vector>

#include "adapters.h"
#include "attention.h"
#include "elementwise.h"
#include "matmul.h"

namespace {

// Frozen weights of a decoder layer: norms, and linears as panels with their biases, which may be
// null. Norms of heads, and of the outputs of attention and MLP, likewise. cos, sin: [positions,
// E/2]. window: as in Attention.
template <class X>
struct Layer {
    const float *input_norm, *mlp_norm, *q_norm, *k_norm, *attn_output_norm, *mlp_output_norm, *cos,
        *sin;
    int64_t window;
    const void* qkv;  // panels, or a QuantizedWeight if the pass is quantized; so are the others
    const X* qkv_bias;
    const void* o;
    const X* o_bias;
    const void* gate_up;
    const X* gate_up_bias;
    const void* down;
    const X* down_bias;
};

// New rows of running samples through all layers. Attention and adapters [layers,
// MODULES_PER_LAYER, n_adapters] are those of the first layer; ranges, and ranges of their own, of
// the next layer lie `layer_ranges` and `entries` further. gelu: whether the MLP's activation is
// GELU instead of SiLU.
template <class X>
struct DecodePass {
    int64_t layers, rows, hidden, inner, gelu, quantized;
    float eps, embedding_scale;
    const Layer<X>* layer;
    const float* final_norm;
    const X* embedding;
    const int64_t *tokens, *positions;
    Attention attention;
    int64_t blocks, layer_ranges, entries;
    const LoraAdapter<X>* adapters;
    int64_t n_adapters;
};
constexpr int64_t MODULES_PER_LAYER = 4;

// Heads [T, heads, E], whose rows are `stride` apart, become their norms.
template <class X>
void norm_heads(X* x, int64_t stride, const float* weight, float eps, int64_t rows, int64_t heads,
                int64_t e) {
    std::vector<float> wide(e);
    for (int64_t t = 0; t < rows; t++)
        for (int64_t h = 0; h < heads; h++) {
            X* head = x + t * stride + h * e;
            for (int64_t i = 0; i < e; i += LANES)
                store(wide.data() + i, load(head + i, tail(e - i)), tail(e - i));
            rms_norm<X, X>(wide.data(), nullptr, weight, eps, nullptr, head, nullptr, 1, e, 1);
        }
}

// Norms (if the family has such norms) and applies RoPE to queries and keys of qkv [T, (Hq + 2 Hkv)
// * E], and appends keys and values to the private ranges of their rows. All of it is one parallel
// region, because each part takes only a few microseconds.
template <class X>
void norm_rope_and_store_kv(const DecodePass<X>& p, const Layer<X>& own, const Attention& attention,
                            X* qkv, const float* cos, const float* sin, X* q, X* k, int threads) {
    const int64_t e = attention.e, heads = attention.heads, query_heads = heads * attention.group,
                  q_size = query_heads * e, k_size = heads * e, stride = q_size + 2 * k_size;
    parallel(p.rows, p.rows * stride, threads,
             [=, &p, &own, &attention](int64_t first, int64_t last) {
                 const int64_t rows = last - first, angles = first * (e / 2);
                 X *queries = qkv + first * stride, *keys = queries + q_size;
                 if (own.q_norm)
                     norm_heads(queries, stride, own.q_norm, p.eps, rows, query_heads, e);
                 if (own.k_norm) norm_heads(keys, stride, own.k_norm, p.eps, rows, heads, e);
                 rope(queries, stride, cos + angles, sin + angles, 1.0f, q + first * q_size, rows,
                      query_heads, e, 1);
                 rope(keys, stride, cos + angles, sin + angles, 1.0f, k + first * k_size, rows,
                      heads, e, 1);
                 for (int64_t i = 0; i < p.entries; i++)
                     if (const int64_t row = attention.rows[i]; row >= first && row < last)
                         store_kv(attention.own + i, attention.rows + i, 1, k, k_size,
                                  qkv + q_size + k_size, stride, heads, e);
             });
}

// out [T, D]: hidden states after the final norm. Call by call the same as decoder/decoder.py.
template <class X>
void decode(const DecodePass<X>& p, X* out, int threads) {
    const int64_t rows = p.rows, e = p.attention.e, heads = p.attention.heads,
                  q_size = heads * p.attention.group * e, k_size = heads * e;
    const int64_t qkv_size = q_size + 2 * k_size;
    static thread_local Buffer float_buffer, buffer;  // reused by every pass: fresh pages would
                                                      // cost as much as what is written to them
    float* x = float_buffer.reserve<float>(rows * (p.hidden + e));
    float *cos = x + rows * p.hidden, *sin = cos + rows * (e / 2);
    X* h = buffer.reserve<X>(rows * (2 * p.hidden + qkv_size + 2 * q_size + k_size + 3 * p.inner));
    X *delta = h + rows * p.hidden, *qkv = delta + rows * p.hidden, *q = qkv + rows * qkv_size,
      *attended = q + rows * q_size;
    X *k = attended + rows * q_size, *gate_up = k + rows * k_size,
      *act = gate_up + rows * 2 * p.inner;
    for (int64_t t = 0; t < rows; t++) {
        const X* from = p.embedding + p.tokens[t] * p.hidden;
        X* scaled = h + t * p.hidden;  // the product is rounded to X before it is widened
        for (int64_t i = 0; i < p.hidden; i += LANES) {
            const Tail mask = tail(p.hidden - i);
            store(scaled + i, mul(load(from + i, mask), broadcast(p.embedding_scale)), mask);
            store(x + t * p.hidden + i, load(scaled + i, mask), mask);
        }
    }
    const float* table = nullptr;  // whose rows `cos` and `sin` hold
    auto output_norm = [&](const float* weight) {
        if (!weight) return;
        parallel(rows, rows * p.hidden, threads, [=, &p](int64_t first, int64_t last) {
            norm_heads(delta + first * p.hidden, p.hidden, weight, p.eps, last - first, 1,
                       p.hidden);
        });
    };
    if (p.entries < rows)
        std::fill(attended, attended + rows * q_size, 0);  // rows that attend to nothing
    auto linear = [&](const void* weight, const X* bias, const X* from, int64_t in, X* to,
                      std::initializer_list<int64_t> sizes, int64_t module) {
        int64_t size = 0;
        for (int64_t part : sizes) size += part;
        const auto panels = p.quantized
                                ? quantized_panels<X>(*(const QuantizedWeight*)weight, false)
                                : Panels<X>{(const X*)weight, size, in};
        matmul(panels, from, bias, to, rows, threads);
        if (p.n_adapters)
            add_lora<X>(p.adapters + module * p.n_adapters, p.n_adapters, from, in, to,
                        sizes.begin(), sizes.size(), nullptr, threads);
    };
    Attention attention = p.attention;
    for (int64_t l = 0; l < p.layers; l++) {
        const Layer<X>& own = p.layer[l];
        attention.window = own.window;
        if (own.cos != table)
            for (int64_t t = 0; t < rows; t++) {
                std::memcpy(cos + t * (e / 2), own.cos + p.positions[t] * (e / 2), 2 * e);
                std::memcpy(sin + t * (e / 2), own.sin + p.positions[t] * (e / 2), 2 * e);
            }
        table = own.cos;
        rms_norm<X, X>(x, l ? delta : nullptr, own.input_norm, p.eps, x, h, nullptr, rows, p.hidden,
                       threads);
        linear(own.qkv, own.qkv_bias, h, p.hidden, qkv, {q_size, k_size, k_size},
               l * MODULES_PER_LAYER);
        norm_rope_and_store_kv(p, own, attention, qkv, cos, sin, q, k, threads);
        attend(attention, p.blocks, q, attended, nullptr, threads);
        linear(own.o, own.o_bias, attended, q_size, delta, {p.hidden}, l * MODULES_PER_LAYER + 1);
        output_norm(own.attn_output_norm);
        rms_norm<X, X>(x, delta, own.mlp_norm, p.eps, x, h, nullptr, rows, p.hidden, threads);
        linear(own.gate_up, own.gate_up_bias, h, p.hidden, gate_up, {p.inner, p.inner},
               l * MODULES_PER_LAYER + 2);
        if (p.gelu)
            gated<Gelu>(gate_up, act, rows, p.inner, threads);
        else
            gated<Silu>(gate_up, act, rows, p.inner, threads);
        linear(own.down, own.down_bias, act, p.inner, delta, {p.hidden}, l * MODULES_PER_LAYER + 3);
        output_norm(own.mlp_output_norm);
        attention.ranges += p.layer_ranges;
        attention.own += p.entries;
    }
    rms_norm<X, X>(x, delta, p.final_norm, p.eps, x, out, nullptr, rows, p.hidden, threads);
}

}  // namespace

// Attention of blocks of rows that share ranges of keys, forward and backward.

#pragma once

#include <vector>

#include "attention_matmuls.h"
#include "matmul.h"

namespace {

// The width of a row of scores for `num_keys` keys, rounded up.
template <class Kernel>
int64_t padded_keys(int64_t num_keys) {
    return (num_keys + Kernel::KEY_MULTIPLE - 1) / Kernel::KEY_MULTIPLE * Kernel::KEY_MULTIPLE;
}

template <class Kernel, class X>
void attend_block(const Attention& a, const Block& b, int64_t head, const X* q, X* out, float* lse,
                  Scratch& scratch) {
    const int64_t m = b.count * a.group, e = a.e;
    const KeyExtent extent(a, b);
    const int64_t max_own = extent.max_own - extent.skip_own,
                  shared_width = padded_keys<Kernel>(extent.num_shared - extent.skip_shared),
                  width = shared_width + padded_keys<Kernel>(max_own),
                  query_stride = Kernel::query_stride(e);
    Prefetcher prefetcher(a, b, extent, head, sizeof(X));
    const typename Kernel::Query* queries = Kernel::queries(a, b, head, q, scratch);
    float* s = scratch.s.reserve<float>((m + Kernel::PADDING_ROWS) * width);
    float* o = scratch.o.reserve<float>(m * e);
    std::fill(o, o + m * e, 0.0f);
    const X *k[KEYS], *v[KEYS];
    int64_t key_start = 0;
    for (KeyTileIterator<X> iterator(a.ranges + b.first_range, b.ranges, extent.skip_shared);
         int64_t n = iterator.next(head, k, v); key_start += n)
        Kernel::scores(a, queries, m, k, n, scratch, prefetcher, s + key_start, width);
    for (int64_t r = 0; r < b.count; r++) {
        const int64_t visible = a.visible[b.first + r],
                      window_start = first_visible(a, b.first + r);
        for (int64_t g = 0; g < a.group; g++) {
            float* row = s + (r * a.group + g) * width;
            mask_from(row, visible - extent.skip_shared, shared_width);
            mask_until(row, window_start - extent.skip_shared, shared_width);
        }
        if (!max_own) continue;
        float* own_scores = s + r * a.group * width;
        int64_t first = shared_width;
        const Range& own_range = a.own[b.first + r];
        for (KeyTileIterator<X> iterator(&own_range, own_range.count > 0, extent.skip_own);
             int64_t n = iterator.next(head, k, v); first += n)
            Kernel::scores(a, queries + r * a.group * query_stride, a.group, k, n, scratch,
                           prefetcher, own_scores + first, width);
        for (int64_t g = 0; g < a.group; g++) {
            float* row = own_scores + g * width + shared_width;
            mask_from(row, own_range.count - extent.skip_own, width - shared_width);
            mask_until(row, window_start - visible - extent.skip_own, width - shared_width);
        }
    }
    WeightSums* totals = scratch.stats.reserve<WeightSums>(m);
    for (int64_t i = 0; i < m; i++) {
        float max_score = max_of(s + i * width, width), sink = 0.0f;
        if (a.sinks) {
            sink = a.sinks[head * a.group + i % a.group] * Kernel::LOG_SCALE;
            max_score = std::max(max_score, sink);
        }
        if (!(max_score > -std::numeric_limits<float>::infinity()))
            max_score = std::isnan(max_score) ? max_score : 0.0f;
        totals[i] = Kernel::softmax_numerators(s + i * width, width, max_score);
        if (a.sinks) {
            const float weight = Kernel::weight(sink - max_score);
            totals[i].rounded += weight, totals[i].exact += weight;
        }
        totals[i].exact = Kernel::log_sum(max_score, totals[i].exact);
    }
    key_start = 0;
    for (KeyTileIterator<X> iterator(a.ranges + b.first_range, b.ranges, extent.skip_shared);
         int64_t n = iterator.next(head, k, v); key_start += n)
        Kernel::add_weighted_values(a, s, key_start, width, m, v, n, scratch, prefetcher, o);
    if (max_own)
        for (int64_t r = 0; r < b.count; r++) {
            int64_t first = shared_width;
            const Range& own_range = a.own[b.first + r];
            for (KeyTileIterator<X> iterator(&own_range, own_range.count > 0, extent.skip_own);
                 int64_t n = iterator.next(head, k, v); first += n)
                Kernel::add_weighted_values(a, s + r * a.group * width, first, width, a.group, v, n,
                                            scratch, prefetcher, o + r * a.group * e);
        }
    for (int64_t i = 0; i < m; i++) {
        int64_t row =
            a.rows[b.first + i / a.group] * a.heads * a.group + head * a.group + i % a.group;
        V inverse = broadcast(1.0f / totals[i].rounded);
        for (int64_t c = 0; c < e; c += LANES)
            store(out + row * e + c, mul(load(o + i * e + c), inverse));
        if (lse) lse[row] = totals[i].exact;
    }
}

template <class X>
void attend(const Attention& a, int64_t n_blocks, const X* q, X* out, float* lse, int threads) {
    const bool use_amx = uses_amx<X>();
    parallel_items(n_blocks * a.heads, threads, [=](int64_t item) {
        const amx::TileScope scope(use_amx);
        const Block& block = a.blocks[item / a.heads];
        const int64_t head = item % a.heads;
        if constexpr (!IS_BF16<X>)
            attend_block<Float32Attention>(a, block, head, q, out, lse, Scratch::of_thread());
        else if (use_amx)
            attend_block<AmxAttention>(a, block, head, q, out, lse, Scratch::of_thread());
        else
            attend_block<Bf16Attention>(a, block, head, q, out, lse, Scratch::of_thread());
    });
}

// Gradients of one block and head: those of its queries are written, those of keys and values added
// to rows of [T, Hkv, E].
inline void attend_block_backward(const Attention& a, const Block& b, int64_t head,
                                  const float* grad, const float* q, const float* out,
                                  const float* lse, const float* k0, float* grad_q, float* grad_k,
                                  float* grad_v, Scratch& scratch) {
    const int64_t m = b.count * a.group, e = a.e;
    float* queries = scratch.q.reserve<float>(m * e);
    float* g = scratch.g.reserve<float>(m * e);
    float* s = scratch.s.reserve<float>(2 * m * KEYS);
    float* ds = s + m * KEYS;
    float* dq = scratch.o.reserve<float>(m * e);
    float* transposed_weights = scratch.d.reserve<float>(2 * m * KEYS);
    float* stats = scratch.stats.reserve<float>(2 * m);
    std::vector<const float*> query_rows(m), grad_rows(m);
    gather_queries(a, b, head, q, a.scale, queries);
    gather_queries(a, b, head, grad, 1.0f, g);
    std::fill(dq, dq + m * e, 0.0f);
    for (int64_t i = 0; i < m; i++) {
        int64_t row =
            a.rows[b.first + i / a.group] * a.heads * a.group + head * a.group + i % a.group;
        V grad_dot_out = zero();
        for (int64_t c = 0; c < e; c += LANES)
            grad_dot_out = fma(load(g + i * e + c), load(out + row * e + c), grad_dot_out);
        stats[i] = lse[row];
        stats[m + i] = sum(grad_dot_out);
        query_rows[i] = queries + i * e;
        grad_rows[i] = g + i * e;
    }
    const float *k[KEYS], *v[KEYS];
    int64_t key_start = KeyExtent(a, b).skip_shared;
    for (KeyTileIterator<float> iterator(a.ranges + b.first_range, b.ranges, key_start);
         int64_t n = iterator.next(head, k, v); key_start += n) {
        const int64_t padded = (n + 15) / 16 * 16;
        for (int64_t j = 0; j < n; j += LANES) {
            dots(queries, m, e, k + j, s + j, KEYS);
            dots(g, m, e, v + j, ds + j, KEYS);
        }
        int64_t first = m;  // queries before it see nothing of this tile
        for (int64_t i = m; i-- > 0;) {
            int64_t num_visible = a.visible[b.first + i / a.group] - key_start;
            if (num_visible <= 0) break;
            first = i;
            mask_from(s + i * KEYS, num_visible, padded);
            mask_until(s + i * KEYS, first_visible(a, b.first + i / a.group) - key_start, padded);
            for (int64_t j = 0; j < padded; j += LANES) {
                V p = exp_(sub(load(s + i * KEYS + j), broadcast(stats[i])));
                p = select(tail(n - j), p);
                store(s + i * KEYS + j, p);
                store(ds + i * KEYS + j,
                      mul(p, sub(load(ds + i * KEYS + j), broadcast(stats[m + i]))));
            }
        }
        const int64_t num_queries = m - first;
        if (!num_queries) continue;
        add_weighted_sums(ds + first * KEYS, KEYS, num_queries, k, n, dq + first * e, e);
        // Sums over queries: the tile's transposed weights, so that a key's lie in a row.
        transpose(s + first * KEYS, KEYS, num_queries, padded, transposed_weights, m);
        transpose(ds + first * KEYS, KEYS, num_queries, padded, transposed_weights + KEYS * m, m);
        for (int64_t j = 0; j < n;) {
            // Neighbouring keys of one range are neighbours in the gradients too; runs of them
            // share the loads of the queries.
            int64_t run = 1;
            const int64_t row_size = a.heads * e;
            while (j + run < n && k[j + run] == k[j + run - 1] + row_size) run++;
            const int64_t offset = k[j] - k0;
            for (int64_t c = 0; c < e;) {
                const int64_t width = e - c >= 64 ? 64 : 16;
                for (int64_t part = 0; part < num_queries; part += KEYS) {
                    const float *qs[KEYS], *gs[KEYS];
                    const int64_t take = std::min<int64_t>(KEYS, num_queries - part);
                    for (int64_t i = 0; i < take; i++)
                        qs[i] = query_rows[first + part + i] + c,
                        gs[i] = grad_rows[first + part + i] + c;
                    const float* pw = transposed_weights + j * m + part;
                    const float* dw = transposed_weights + KEYS * m + j * m + part;
                    if (width == 64) {
                        weighted_sums<4>(pw, m, run, gs, take, grad_v + offset + c, row_size);
                        weighted_sums<4>(dw, m, run, qs, take, grad_k + offset + c, row_size);
                    } else {
                        weighted_sums<1>(pw, m, run, gs, take, grad_v + offset + c, row_size);
                        weighted_sums<1>(dw, m, run, qs, take, grad_k + offset + c, row_size);
                    }
                }
                c += width;
            }
            j += run;
        }
    }
    for (int64_t i = 0; i < m; i++) {
        int64_t row =
            a.rows[b.first + i / a.group] * a.heads * a.group + head * a.group + i % a.group;
        for (int64_t c = 0; c < e; c += LANES)
            store(grad_q + row * e + c, mul(load(dq + i * e + c), broadcast(a.scale)));
    }
}

// to[j * stride + i] = entries (2i, j) and (2i + 1, j) of rows of bf16, `row` pairs apart, for n
// columns j, a multiple of 16.
inline void transpose_row_pairs(const uint32_t* from, int64_t row, int64_t pairs, int64_t n,
                                uint32_t* to, int64_t stride) {
    for (int64_t i = 0; i < pairs; i += LANES)
        for (int64_t j = 0; j < n; j += LANES) {
            I x[LANES];
            for (int p = 0; p < LANES; p++) {
                const uint16_t* first = (const uint16_t*)(from + 2 * (i + p) * row) + j;
                if (i + p < pairs)
                    interleave_rows<1>(first, first + 2 * row, 0, x + p);
                else
                    x[p] = zero_words();
            }
            transpose16(x);
            for (int c = 0; c < LANES; c++) store_words(to + (j + c) * stride + i, x[c]);
        }
}

// One query's weights p = exp(score - lse), in the place of s as pairs of bf16 that add up to them,
// and in the place of dp its gradients of scores, scale * p * (dp - the mean of dp by p), as bf16,
// side by side; 0 from `num_visible` on. n is a multiple of 16. The mean is taken of these very
// numbers, lane by lane, then over lanes: nearer to the truth than the product of the output, which
// was rounded, with its gradient.
void softmax_backward(float* s, float* dp, int64_t num_visible, int64_t n, float lse, float scale) {
    V total = zero();
    for (int64_t j = 0; j < num_visible; j += LANES) {
        const Tail mask = tail(num_visible - j);
        V p = select(mask, exp2_(sub(load(s + j), broadcast(lse * Bf16Attention::LOG_SCALE))));
        total = fma(p, select(mask, load(dp + j)), total);
        store(s + j, p);
    }
    const V mean = broadcast(sum(total));
    for (int64_t j = 0; j < n; j += LANES) {
        const Tail mask = tail(std::max<int64_t>(num_visible - j, 0));
        V p = select(mask, load(s + j));
        V ds = select(mask, mul(mul(p, broadcast(scale)), sub(load(dp + j), mean)));
        const H high = to_bf16_fast(p), low = to_bf16_fast(sub(p, to_float32(high)));
        store_words(s + j, interleave(high, low));
        store((uint16_t*)dp + j, to_bf16_fast(ds));
    }
}

// Adds to rows of gradients, which lie like the keys `k` of a tile from k0 on, the rows that
// `values` holds, weighted by columns.
template <class Kernel>
void add_weighted_to_key_rows(const uint32_t* columns, int64_t stride, const uint32_t* values,
                              int64_t pairs, int64_t e, const uint16_t* const* k, int64_t n,
                              const uint16_t* k0, float* out, int64_t row_size) {
    for (int64_t j = 0; j < n;) {
        // Neighbouring keys of one range are neighbours in the gradients too; runs of them share
        // the loads of the values.
        int64_t run = 1;
        while (j + run < n && k[j + run] == k[j + run - 1] + row_size) run++;
        Kernel::add_weighted_packed(columns + j * stride, stride, run, values, pairs, e,
                                    out + (k[j] - k0), row_size);
        j += run;
    }
}

// The same by pairs. Gradients of scores are rounded to bf16; weights, of which errors would reach
// the values' gradients undiminished, are two bf16 each. Over queries, rows of a block (or pairs of
// them) are added one after another.
template <class Kernel>
void attend_block_backward(const Attention& a, const Block& b, int64_t head, const uint16_t* grad,
                           const uint16_t* q, const float* lse, const uint16_t* k0,
                           uint16_t* grad_q, float* grad_k, float* grad_v, Scratch& scratch) {
    const int64_t m = b.count * a.group, e = a.e, row_size = a.heads * e,
                  query_stride = Kernel::query_stride(e);
    const int64_t padded_queries =
        (m + Kernel::QUERY_MULTIPLE - 1) / Kernel::QUERY_MULTIPLE * Kernel::QUERY_MULTIPLE;
    // Weights are two numbers each, so half as many queries make a multiple of QUERY_MULTIPLE
    // numbers.
    const int64_t half_padded_queries = (m + Kernel::QUERY_MULTIPLE / 2 - 1) /
                                        (Kernel::QUERY_MULTIPLE / 2) * (Kernel::QUERY_MULTIPLE / 2);
    const KeyExtent extent(a, b);
    const int64_t skip = extent.skip_shared, width = padded_keys<Kernel>(extent.num_shared - skip);
    uint16_t* queries = Kernel::gather_rows(
        a, b, head, q, scratch.q.reserve<uint16_t>(padded_queries * query_stride));
    const uint16_t* g = Kernel::gather_rows(
        a, b, head, grad, scratch.g.reserve<uint16_t>(padded_queries * query_stride));
    float* s = scratch.s.reserve<float>(half_padded_queries * width);
    float* ds = scratch.d.reserve<float>(padded_queries * width);
    std::fill(queries + m * query_stride, queries + padded_queries * query_stride, 0);
    std::fill(s + m * width, s + half_padded_queries * width, 0.0f);
    std::fill(ds + m * width, ds + padded_queries * width, 0.0f);
    const uint16_t *k[KEYS], *v[KEYS];
    int64_t key_start = 0;
    for (KeyTileIterator<uint16_t> iterator(a.ranges + b.first_range, b.ranges, skip);
         int64_t n = iterator.next(head, k, v); key_start += n) {
        Kernel::many_dots(queries, m, e, k, n, a.scale * Bf16Attention::LOG_SCALE, scratch,
                          s + key_start, width);
        Kernel::many_dots(g, m, e, v, n, 1.0f, scratch, ds + key_start, width);
    }
    std::vector<const uint16_t*> rows(padded_queries), grad_pair_rows(2 * half_padded_queries);
    for (int64_t i = 0; i < padded_queries; i++) rows[i] = queries + i * query_stride;
    // Weights of 0 multiply what is behind the last row's gradients.
    for (int64_t i = 0; i < half_padded_queries; i++)
        grad_pair_rows[2 * i] = grad_pair_rows[2 * i + 1] = i < m ? g + i * query_stride : rows[i];
    for (int64_t i = 0; i < m; i++) {
        const int64_t row =
            a.rows[b.first + i / a.group] * a.heads * a.group + head * a.group + i % a.group;
        const int64_t entry = b.first + i / a.group;
        mask_until(s + i * width, first_visible(a, entry) - skip, width);
        softmax_backward(s + i * width, ds + i * width,
                         std::min(a.visible[entry] - skip, key_start), width, lse[row], a.scale);
    }
    const uint32_t* packed_queries = pack_row_pairs(
        rows.data(), padded_queries, e, scratch.pairs.reserve<uint32_t>(padded_queries / 2 * e));
    const uint32_t* packed_grads =
        pack_row_pairs(grad_pair_rows.data(), 2 * half_padded_queries, e,
                       scratch.twice.reserve<uint32_t>(half_padded_queries * e));
    const int64_t stride = (m + LANES - 1) / LANES * LANES;
    uint32_t* columns = scratch.v.reserve<uint32_t>((KEYS + Kernel::PADDING_ROWS) * stride);
    float* dq = scratch.o.reserve<float>(m * e);
    std::fill(dq, dq + m * e, 0.0f);
    key_start = 0;
    for (KeyTileIterator<uint16_t> iterator(a.ranges + b.first_range, b.ranges, skip);
         int64_t n = iterator.next(head, k, v); key_start += n) {
        int64_t first = m;  // queries before it see nothing of this tile
        while (first && a.visible[b.first + (first - 1) / a.group] > key_start + skip) first--;
        if (first == m) continue;
        first = Kernel::align_first_query(first);
        const int64_t padded = (n + 15) / 16 * 16, masked_pairs = first / 2;
        const uint32_t* d = (const uint32_t*)ds + key_start / 2;
        uint32_t* packed_keys = scratch.k.reserve<uint32_t>(KEYS / 2 * e);
        const int64_t pairs = Kernel::pack_values(k, n, e, packed_keys);
        Kernel::add_weighted_packed(d + first * width, width, m - first, packed_keys, pairs, e,
                                    dq + first * e, e);
        transpose(s + first * width + key_start, width, half_padded_queries - first, padded,
                  (float*)columns, stride);
        add_weighted_to_key_rows<Kernel>(columns, stride, packed_grads + first * e,
                                         half_padded_queries - first, e, k, n, k0, grad_v,
                                         row_size);
        transpose_row_pairs(d + 2 * masked_pairs * width, width, padded_queries / 2 - masked_pairs,
                            padded, columns, stride);
        add_weighted_to_key_rows<Kernel>(columns, stride, packed_queries + masked_pairs * e,
                                         padded_queries / 2 - masked_pairs, e, k, n, k0, grad_k,
                                         row_size);
    }
    for (int64_t i = 0; i < m; i++) {
        const int64_t row =
            a.rows[b.first + i / a.group] * a.heads * a.group + head * a.group + i % a.group;
        for (int64_t c = 0; c < e; c += LANES) store(grad_q + row * e + c, load(dq + i * e + c));
    }
}

// Which of T keys the blocks first .. last - 1 read.
inline std::vector<uint8_t> keys_read_by(const Attention& a, int64_t first, int64_t last,
                                         const void* k0, int64_t key_bytes, int64_t num_keys) {
    std::vector<uint8_t> is_read(num_keys);
    for (int64_t b = first; b < last; b++)
        for (int64_t i = 0; i < a.blocks[b].ranges; i++) {
            const Range& range = a.ranges[a.blocks[b].first_range + i];
            const auto from =
                is_read.begin() + ((const char*)range.k - (const char*)k0) / key_bytes;
            std::fill(from, from + range.count, 1);
        }
    return is_read;
}

// `num_parts` runs of blocks, each with sums of its own for keys and values
// [num_parts, 2, T, Hkv, E], added up in their order: so bits do not depend on the number of
// threads. Of the memory for sums, which need not be zeros, only what a part's keys need is
// touched.
template <class X>
void attend_backward(const Attention& a, const int64_t* part_ends, int64_t num_parts, const X* grad,
                     const X* q, const X* out, const float* lse, const X* k0, X* grad_q, X* grad_k,
                     X* grad_v, float* sums, int64_t size, int threads) {
    const int64_t row = a.heads * a.e, num_keys = size / row;
    std::vector<std::vector<uint8_t>> is_read;
    for (int64_t part = 0; part < num_parts; part++)
        is_read.push_back(keys_read_by(a, part ? part_ends[part - 1] : 0, part_ends[part], k0,
                                       row * sizeof(X), num_keys));
    const bool use_amx = uses_amx<X>();
    const auto backward_of_block =
        use_amx ? attend_block_backward<AmxAttention> : attend_block_backward<Bf16Attention>;
    parallel_items(num_parts * a.heads, threads, [&](int64_t item) {
        const amx::TileScope scope(use_amx);
        const int64_t part = item / a.heads, head = item % a.heads;
        float *gk = sums + part * 2 * size, *gv = gk + size;
        for (int64_t t = 0; t < num_keys; t++)
            if (is_read[part][t])
                for (float* to : {gk, gv})
                    std::fill(to + t * row + head * a.e, to + t * row + (head + 1) * a.e, 0.0f);
        for (int64_t b = part ? part_ends[part - 1] : 0; b < part_ends[part]; b++)
            if constexpr (sizeof(X) == 2)
                backward_of_block(a, a.blocks[b], head, grad, q, lse, k0, grad_q, gk, gv,
                                  Scratch::of_thread());
            else
                attend_block_backward(a, a.blocks[b], head, grad, q, out, lse, k0, grad_q, gk, gv,
                                      Scratch::of_thread());
    });
    parallel(num_keys, 2 * num_parts * size, threads, [&](int64_t first, int64_t last) {
        for (int64_t t = first; t < last; t++)
            for (int64_t i = t * row; i < (t + 1) * row; i += LANES) {
                V gk = zero(), gv = zero();
                for (int64_t p = 0; p < num_parts; p++) {
                    if (!is_read[p][t]) continue;
                    gk = add(gk, load(sums + p * 2 * size + i));
                    gv = add(gv, load(sums + p * 2 * size + size + i));
                }
                store(grad_k + i, gk);
                store(grad_v + i, gv);
            }
    });
}

// New keys and values [T, H, E], whose rows lie apart, to the last position of each entry's own
// range.
template <class X>
void store_kv(const Range* own, const int64_t* rows, int64_t n, const X* k, int64_t k_stride,
              const X* v, int64_t v_stride, int64_t heads, int64_t e) {
    for (int64_t i = 0; i < n; i++)
        for (int64_t h = 0; h < heads; h++) {
            int64_t offset = (own[i].count - 1) * own[i].row + h * own[i].head;
            for (int64_t c = 0; c < e; c += LANES) {
                store((X*)own[i].k + offset + c, load(k + rows[i] * k_stride + h * e + c));
                store((X*)own[i].v + offset + c, load(v + rows[i] * v_stride + h * e + c));
            }
        }
}

}  // namespace

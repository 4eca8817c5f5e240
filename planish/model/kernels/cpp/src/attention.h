// Attention of blocks of rows that share ranges of keys, forth and back.

#pragma once

#include <vector>

#include "attention_products.h"
#include "products.h"

namespace {

// The width of a row of scores for so many keys.
template <class By>
int64_t whole_runs(int64_t keys) {
    return (keys + By::RUN - 1) / By::RUN * By::RUN;
}

template <class By, class X>
void attend_block(const Attention& a, const Block& b, int64_t head, const X* q, X* out, float* lse,
                  Scratch& scratch) {
    const int64_t m = b.count * a.group, e = a.e;
    const Reach reach(a, b);
    const int64_t own = reach.own - reach.skip_own,
                  shared_width = whole_runs<By>(reach.shared - reach.skip_shared),
                  width = shared_width + whole_runs<By>(own), query_stride = By::query_stride(e);
    Course course(a, b, reach, head, sizeof(X));
    const typename By::Query* queries = By::queries(a, b, head, q, scratch);
    float* s = scratch.s.of<float>((m + By::SPARE) * width);
    float* o = scratch.o.of<float>(m * e);
    std::fill(o, o + m * e, 0.0f);
    const X *k[KEYS], *v[KEYS];
    int64_t at = 0;
    for (Walk<X> walk(a.ranges + b.first_range, b.ranges, reach.skip_shared);
         int64_t n = walk.next(head, k, v); at += n)
        By::scores(a, queries, m, k, n, scratch, course, s + at, width);
    for (int64_t r = 0; r < b.count; r++) {
        const int64_t visible = a.visible[b.first + r], unseen = first_seen(a, b.first + r);
        for (int64_t g = 0; g < a.group; g++) {
            float* row = s + (r * a.group + g) * width;
            mask_from(row, visible - reach.skip_shared, shared_width);
            mask_until(row, unseen - reach.skip_shared, shared_width);
        }
        if (!own) continue;
        float* mine_s = s + r * a.group * width;
        int64_t first = shared_width;
        const Range& mine = a.own[b.first + r];
        for (Walk<X> walk(&mine, mine.count > 0, reach.skip_own); int64_t n = walk.next(head, k, v);
             first += n)
            By::scores(a, queries + r * a.group * query_stride, a.group, k, n, scratch, course,
                       mine_s + first, width);
        for (int64_t g = 0; g < a.group; g++) {
            float* row = mine_s + g * width + shared_width;
            mask_from(row, mine.count - reach.skip_own, width - shared_width);
            mask_until(row, unseen - visible - reach.skip_own, width - shared_width);
        }
    }
    Totals* totals = scratch.stats.of<Totals>(m);
    for (int64_t i = 0; i < m; i++) {
        float peak = largest(s + i * width, width), sink = 0.0f;
        if (a.sinks) {
            sink = a.sinks[head * a.group + i % a.group] * By::PER_LN;
            peak = std::max(peak, sink);
        }
        if (!(peak > -std::numeric_limits<float>::infinity()))
            peak = std::isnan(peak) ? peak : 0.0f;
        totals[i] = By::soften(s + i * width, width, peak);
        if (a.sinks) {
            const float weight = By::weight(sink - peak);
            totals[i].used += weight, totals[i].exact += weight;
        }
        totals[i].exact = By::log_sum(peak, totals[i].exact);
    }
    at = 0;
    for (Walk<X> walk(a.ranges + b.first_range, b.ranges, reach.skip_shared);
         int64_t n = walk.next(head, k, v); at += n)
        By::weigh_values(a, s, at, width, m, v, n, scratch, course, o);
    if (own)
        for (int64_t r = 0; r < b.count; r++) {
            int64_t first = shared_width;
            const Range& mine = a.own[b.first + r];
            for (Walk<X> walk(&mine, mine.count > 0, reach.skip_own);
                 int64_t n = walk.next(head, k, v); first += n)
                By::weigh_values(a, s + r * a.group * width, first, width, a.group, v, n, scratch,
                                 course, o + r * a.group * e);
        }
    for (int64_t i = 0; i < m; i++) {
        int64_t row =
            a.rows[b.first + i / a.group] * a.heads * a.group + head * a.group + i % a.group;
        V inverse = all(1.0f / totals[i].used);
        for (int64_t c = 0; c < e; c += LANES)
            store(out + row * e + c, mul(load(o + i * e + c), inverse));
        if (lse) lse[row] = totals[i].exact;
    }
}

template <class X>
void attend(const Attention& a, int64_t n_blocks, const X* q, X* out, float* lse, int threads) {
    const bool tiled = by_tiles_of_amx<X>();
    parallel_items(n_blocks * a.heads, threads, [=](int64_t item) {
        const tiles::Use use(tiled);
        const Block& block = a.blocks[item / a.heads];
        const int64_t head = item % a.heads;
        if constexpr (!NARROW<X>)
            attend_block<Floats>(a, block, head, q, out, lse, Scratch::own());
        else if (tiled)
            attend_block<Tiled>(a, block, head, q, out, lse, Scratch::own());
        else
            attend_block<Pairs>(a, block, head, q, out, lse, Scratch::own());
    });
}

// Gradients of one block and head: those of its queries are written, those of keys and values added
// to rows of [T, Hkv, E].
inline void attend_block_backward(const Attention& a, const Block& b, int64_t head,
                                  const float* grad, const float* q, const float* out,
                                  const float* lse, const float* k0, float* grad_q, float* grad_k,
                                  float* grad_v, Scratch& scratch) {
    const int64_t m = b.count * a.group, e = a.e;
    float* queries = scratch.q.of<float>(m * e);
    float* g = scratch.g.of<float>(m * e);
    float* s = scratch.s.of<float>(2 * m * KEYS);
    float* ds = s + m * KEYS;
    float* dq = scratch.o.of<float>(m * e);
    float* column = scratch.d.of<float>(2 * m * KEYS);
    float* stats = scratch.stats.of<float>(2 * m);
    std::vector<const float*> query_rows(m), grad_rows(m);
    gather(a, b, head, q, a.scale, queries);
    gather(a, b, head, grad, 1.0f, g);
    std::fill(dq, dq + m * e, 0.0f);
    for (int64_t i = 0; i < m; i++) {
        int64_t row =
            a.rows[b.first + i / a.group] * a.heads * a.group + head * a.group + i % a.group;
        V inner = zero();
        for (int64_t c = 0; c < e; c += LANES)
            inner = fma(load(g + i * e + c), load(out + row * e + c), inner);
        stats[i] = lse[row];
        stats[m + i] = sum(inner);
        query_rows[i] = queries + i * e;
        grad_rows[i] = g + i * e;
    }
    const float *k[KEYS], *v[KEYS];
    int64_t at = Reach(a, b).skip_shared;
    for (Walk<float> walk(a.ranges + b.first_range, b.ranges, at);
         int64_t n = walk.next(head, k, v); at += n) {
        const int64_t padded = (n + 15) / 16 * 16;
        for (int64_t j = 0; j < n; j += LANES) {
            dots(queries, m, e, k + j, s + j, KEYS);
            dots(g, m, e, v + j, ds + j, KEYS);
        }
        int64_t first = m;  // queries before it see nothing of this tile
        for (int64_t i = m; i-- > 0;) {
            int64_t seen = a.visible[b.first + i / a.group] - at;
            if (seen <= 0) break;
            first = i;
            mask_from(s + i * KEYS, seen, padded);
            mask_until(s + i * KEYS, first_seen(a, b.first + i / a.group) - at, padded);
            for (int64_t j = 0; j < padded; j += LANES) {
                V p = exp_(sub(load(s + i * KEYS + j), all(stats[i])));
                p = only(tail(n - j), p);
                store(s + i * KEYS + j, p);
                store(ds + i * KEYS + j, mul(p, sub(load(ds + i * KEYS + j), all(stats[m + i]))));
            }
        }
        const int64_t live = m - first;
        if (!live) continue;
        add_weighted(ds + first * KEYS, KEYS, live, k, n, dq + first * e, e);
        // Sums over queries: the tile's weights turned, so that a key's lie in a row.
        turn(s + first * KEYS, KEYS, live, padded, column, m);
        turn(ds + first * KEYS, KEYS, live, padded, column + KEYS * m, m);
        for (int64_t j = 0; j < n;) {
            // Neighbouring keys of one range are neighbours in the gradients too; runs of them
            // share the loads of the queries.
            int64_t run = 1;
            const int64_t row_size = a.heads * e;
            while (j + run < n && k[j + run] == k[j + run - 1] + row_size) run++;
            const int64_t offset = k[j] - k0;
            for (int64_t c = 0; c < e;) {
                const int64_t wide = e - c >= 64 ? 64 : 16;
                for (int64_t part = 0; part < live; part += KEYS) {
                    const float *qs[KEYS], *gs[KEYS];
                    const int64_t take = std::min<int64_t>(KEYS, live - part);
                    for (int64_t i = 0; i < take; i++)
                        qs[i] = query_rows[first + part + i] + c,
                        gs[i] = grad_rows[first + part + i] + c;
                    const float* pw = column + j * m + part;
                    const float* dw = column + KEYS * m + j * m + part;
                    if (wide == 64) {
                        weighted_rows<4>(pw, m, run, gs, take, grad_v + offset + c, row_size);
                        weighted_rows<4>(dw, m, run, qs, take, grad_k + offset + c, row_size);
                    } else {
                        weighted_rows<1>(pw, m, run, gs, take, grad_v + offset + c, row_size);
                        weighted_rows<1>(dw, m, run, qs, take, grad_k + offset + c, row_size);
                    }
                }
                c += wide;
            }
            j += run;
        }
    }
    for (int64_t i = 0; i < m; i++) {
        int64_t row =
            a.rows[b.first + i / a.group] * a.heads * a.group + head * a.group + i % a.group;
        for (int64_t c = 0; c < e; c += LANES)
            store(grad_q + row * e + c, mul(load(dq + i * e + c), all(a.scale)));
    }
}

// to[j * stride + i] = entries (2i, j) and (2i + 1, j) of rows of bf16, `row` pairs apart, for n
// columns j, a multiple of 16.
inline void turn_pairs(const uint32_t* from, int64_t row, int64_t pairs, int64_t n, uint32_t* to,
                       int64_t stride) {
    for (int64_t i = 0; i < pairs; i += LANES)
        for (int64_t j = 0; j < n; j += LANES) {
            I x[LANES];
            for (int p = 0; p < LANES; p++) {
                const uint16_t* first = (const uint16_t*)(from + 2 * (i + p) * row) + j;
                if (i + p < pairs)
                    two_rows<1>(first, first + 2 * row, 0, x + p);
                else
                    x[p] = no_words();
            }
            turn16(x);
            for (int c = 0; c < LANES; c++) store_words(to + (j + c) * stride + i, x[c]);
        }
}

// One query's weights p = exp(score - lse), in the place of s as pairs of bf16 that add up to them,
// and in the place of dp its gradients of scores, scale * p * (dp - the mean of dp by p), as bf16,
// side by side; 0 from `seen` on. n is a multiple of 16. The mean is taken of these very numbers,
// lane by lane, then over lanes: nearer to the truth than the product of the output, which was
// rounded, with its gradient.
void slopes(float* s, float* dp, int64_t seen, int64_t n, float lse, float scale) {
    V total = zero();
    for (int64_t j = 0; j < seen; j += LANES) {
        const Tail there = tail(seen - j);
        V p = only(there, exp2_(sub(load(s + j), all(lse * Pairs::PER_LN))));
        total = fma(p, only(there, load(dp + j)), total);
        store(s + j, p);
    }
    const V mean = all(sum(total));
    for (int64_t j = 0; j < n; j += LANES) {
        const Tail there = tail(std::max<int64_t>(seen - j, 0));
        V p = only(there, load(s + j));
        V ds = only(there, mul(mul(p, all(scale)), sub(load(dp + j), mean)));
        const H high = narrowed_fast(p), low = narrowed_fast(sub(p, widened(high)));
        store_words(s + j, joined(high, low));
        store((uint16_t*)dp + j, narrowed_fast(ds));
    }
}

// Adds to rows of gradients, which lie like the keys `k` of a tile from k0 on, the rows that
// `values` holds, weighted by columns.
template <class By>
void weigh_keys(const uint32_t* columns, int64_t stride, const uint32_t* values, int64_t pairs,
                int64_t e, const uint16_t* const* k, int64_t n, const uint16_t* k0, float* out,
                int64_t row_size) {
    for (int64_t j = 0; j < n;) {
        // Neighbouring keys of one range are neighbours in the gradients too; runs of them share
        // the loads of the values.
        int64_t run = 1;
        while (j + run < n && k[j + run] == k[j + run - 1] + row_size) run++;
        By::weigh_laid(columns + j * stride, stride, run, values, pairs, e, out + (k[j] - k0),
                       row_size);
        j += run;
    }
}

// The same by pairs. Gradients of scores are rounded to bf16; weights, of which errors would reach
// the values' gradients undiminished, are two bf16 each. Over queries, rows of a block (or pairs of
// them) are added one after another.
template <class By>
void attend_block_backward(const Attention& a, const Block& b, int64_t head, const uint16_t* grad,
                           const uint16_t* q, const float* lse, const uint16_t* k0,
                           uint16_t* grad_q, float* grad_k, float* grad_v, Scratch& scratch) {
    const int64_t m = b.count * a.group, e = a.e, row_size = a.heads * e,
                  query_stride = By::query_stride(e);
    const int64_t folded = (m + By::FOLD - 1) / By::FOLD * By::FOLD;
    // Weights are two numbers each, so half a fold of queries is a fold of numbers.
    const int64_t half_folded = (m + By::FOLD / 2 - 1) / (By::FOLD / 2) * (By::FOLD / 2);
    const Reach reach(a, b);
    const int64_t skip = reach.skip_shared, width = whole_runs<By>(reach.shared - skip);
    uint16_t* queries = By::of_rows(a, b, head, q, scratch.q.of<uint16_t>(folded * query_stride));
    const uint16_t* g =
        By::of_rows(a, b, head, grad, scratch.g.of<uint16_t>(folded * query_stride));
    float* s = scratch.s.of<float>(half_folded * width);
    float* ds = scratch.d.of<float>(folded * width);
    std::fill(queries + m * query_stride, queries + folded * query_stride, 0);
    std::fill(s + m * width, s + half_folded * width, 0.0f);
    std::fill(ds + m * width, ds + folded * width, 0.0f);
    const uint16_t *k[KEYS], *v[KEYS];
    int64_t at = 0;
    for (Walk<uint16_t> walk(a.ranges + b.first_range, b.ranges, skip);
         int64_t n = walk.next(head, k, v); at += n) {
        By::many_dots(queries, m, e, k, n, a.scale * Pairs::PER_LN, scratch, s + at, width);
        By::many_dots(g, m, e, v, n, 1.0f, scratch, ds + at, width);
    }
    std::vector<const uint16_t*> rows(folded), twice(2 * half_folded);
    for (int64_t i = 0; i < folded; i++) rows[i] = queries + i * query_stride;
    // Weights of 0 multiply what is behind the last row's gradients.
    for (int64_t i = 0; i < half_folded; i++)
        twice[2 * i] = twice[2 * i + 1] = i < m ? g + i * query_stride : rows[i];
    for (int64_t i = 0; i < m; i++) {
        const int64_t row =
            a.rows[b.first + i / a.group] * a.heads * a.group + head * a.group + i % a.group;
        const int64_t entry = b.first + i / a.group;
        mask_until(s + i * width, first_seen(a, entry) - skip, width);
        slopes(s + i * width, ds + i * width, std::min(a.visible[entry] - skip, at), width,
               lse[row], a.scale);
    }
    const uint32_t* of_queries =
        laid(rows.data(), folded, e, scratch.pairs.of<uint32_t>(folded / 2 * e));
    const uint32_t* of_grads =
        laid(twice.data(), 2 * half_folded, e, scratch.twice.of<uint32_t>(half_folded * e));
    const int64_t stride = (m + LANES - 1) / LANES * LANES;
    uint32_t* columns = scratch.v.of<uint32_t>((KEYS + By::SPARE) * stride);
    float* dq = scratch.o.of<float>(m * e);
    std::fill(dq, dq + m * e, 0.0f);
    at = 0;
    for (Walk<uint16_t> walk(a.ranges + b.first_range, b.ranges, skip);
         int64_t n = walk.next(head, k, v); at += n) {
        int64_t first = m;  // queries before it see nothing of this tile
        while (first && a.visible[b.first + (first - 1) / a.group] > at + skip) first--;
        if (first == m) continue;
        first = By::first_of_fold(first);
        const int64_t padded = (n + 15) / 16 * 16, blind = first / 2;
        const uint32_t* d = (const uint32_t*)ds + at / 2;
        uint32_t* keys = scratch.k.of<uint32_t>(KEYS / 2 * e);
        const int64_t pairs = By::lay(k, n, e, keys);
        By::weigh_laid(d + first * width, width, m - first, keys, pairs, e, dq + first * e, e);
        turn(s + first * width + at, width, half_folded - first, padded, (float*)columns, stride);
        weigh_keys<By>(columns, stride, of_grads + first * e, half_folded - first, e, k, n, k0,
                       grad_v, row_size);
        turn_pairs(d + 2 * blind * width, width, folded / 2 - blind, padded, columns, stride);
        weigh_keys<By>(columns, stride, of_queries + blind * e, folded / 2 - blind, e, k, n, k0,
                       grad_k, row_size);
    }
    for (int64_t i = 0; i < m; i++) {
        const int64_t row =
            a.rows[b.first + i / a.group] * a.heads * a.group + head * a.group + i % a.group;
        for (int64_t c = 0; c < e; c += LANES) store(grad_q + row * e + c, load(dq + i * e + c));
    }
}

// Which of T keys the blocks first .. last - 1 read.
inline std::vector<uint8_t> read_by(const Attention& a, int64_t first, int64_t last, const void* k0,
                                    int64_t key_bytes, int64_t keys) {
    std::vector<uint8_t> found(keys);
    for (int64_t b = first; b < last; b++)
        for (int64_t i = 0; i < a.blocks[b].ranges; i++) {
            const Range& range = a.ranges[a.blocks[b].first_range + i];
            const auto from = found.begin() + ((const char*)range.k - (const char*)k0) / key_bytes;
            std::fill(from, from + range.count, 1);
        }
    return found;
}

// `parts` runs of blocks, each with sums of its own for keys and values [parts, 2, T, Hkv, E],
// added up in their order: so bits do not depend on the number of threads. Of the memory for sums,
// which need not be zeros, only what a part's keys need is touched.
template <class X>
void attend_backward(const Attention& a, const int64_t* part_ends, int64_t parts, const X* grad,
                     const X* q, const X* out, const float* lse, const X* k0, X* grad_q, X* grad_k,
                     X* grad_v, float* sums, int64_t size, int threads) {
    const int64_t row = a.heads * a.e, keys = size / row;
    std::vector<std::vector<uint8_t>> read;
    for (int64_t part = 0; part < parts; part++)
        read.push_back(
            read_by(a, part ? part_ends[part - 1] : 0, part_ends[part], k0, row * sizeof(X), keys));
    const bool tiled = by_tiles_of_amx<X>();
    const auto backward_of_block =
        tiled ? attend_block_backward<Tiled> : attend_block_backward<Pairs>;
    parallel_items(parts * a.heads, threads, [&](int64_t item) {
        const tiles::Use use(tiled);
        const int64_t part = item / a.heads, head = item % a.heads;
        float *gk = sums + part * 2 * size, *gv = gk + size;
        for (int64_t t = 0; t < keys; t++)
            if (read[part][t])
                for (float* to : {gk, gv})
                    std::fill(to + t * row + head * a.e, to + t * row + (head + 1) * a.e, 0.0f);
        for (int64_t b = part ? part_ends[part - 1] : 0; b < part_ends[part]; b++)
            if constexpr (sizeof(X) == 2)
                backward_of_block(a, a.blocks[b], head, grad, q, lse, k0, grad_q, gk, gv,
                                  Scratch::own());
            else
                attend_block_backward(a, a.blocks[b], head, grad, q, out, lse, k0, grad_q, gk, gv,
                                      Scratch::own());
    });
    parallel(keys, 2 * parts * size, threads, [&](int64_t first, int64_t last) {
        for (int64_t t = first; t < last; t++)
            for (int64_t i = t * row; i < (t + 1) * row; i += LANES) {
                V gk = zero(), gv = zero();
                for (int64_t p = 0; p < parts; p++) {
                    if (!read[p][t]) continue;
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
void keep(const Range* own, const int64_t* rows, int64_t n, const X* k, int64_t k_stride,
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

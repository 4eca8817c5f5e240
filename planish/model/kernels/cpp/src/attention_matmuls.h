// The matmuls of attention, of float32 and of pairs of bf16: scores of queries and keys, sums of
// values weighted by them. What is given are addresses of rows, which lie in ranges.

#pragma once

#include <vector>

#include "amx.h"
#include "vectors.h"

namespace {

// Keys and values of consecutive positions, in the queries' type: `row` elements from one to the
// next, `head` from one head to the next.
struct Range {
    const void* k;
    const void* v;
    int64_t count, row, head;
};

// Rows that share key ranges, one behind the other: entries first .. first + count - 1 of the row
// lists.
struct Block {
    int64_t first, count, first_range, ranges;
};

struct Attention {
    // window: positions that a row attends to, with its own; 0 if it attends to all before it.
    int64_t heads, group, e, window;
    float scale;
    const Block* blocks;
    const Range* ranges;
    const int64_t* rows;
    const int64_t* visible;
    const Range* own;    // one for each entry, behind the shared positions; or null
    const float* sinks;  // a score of each query head that adds to the sum of weights; or null
    const int64_t* window_ends;  // the position at which each entry's window ends; or null: `visible`
};

// The keys of one block that no window hides. Skipped keys are whole tiles, so that the remaining
// ones are added in the same order as if they had been multiplied by weights of 0.
struct KeyExtent {
    int64_t num_shared = 0, max_own = 0;    // positions of the ranges; the most of own ones
    int64_t skip_shared = 0, skip_own = 0;  // leading positions that no row attends to

    inline KeyExtent(const Attention& a, const Block& b);
};

// The first position that an entry attends to.
inline int64_t first_visible(const Attention& a, int64_t entry) {
    if (!a.window) return 0;
    if (a.window_ends) return a.window_ends[entry] - a.window;
    return a.visible[entry] + (a.own ? a.own[entry].count : 0) - a.window;
}

// Asks for the rows of one block and head some way before they are read: keys, then values, each
// the shared ones, then every row's own. They mostly come from memory, in pieces too short for the
// CPU to foresee.
class Prefetcher {
    static constexpr int64_t DISTANCE = 64;
    const Attention& a;
    const Block& b;
    const KeyExtent& extent;
    int64_t head, size, row_bytes, segment = 0, left = 0, step = 0, hidden = 0;
    const char* at = nullptr;

    void next_segment() {
        const int64_t of_own = a.own ? b.count : 0, segments = b.ranges + of_own;
        for (; !left && segment < 2 * segments; segment++) {
            const int64_t i = segment % segments;
            const Range& range =
                i < b.ranges ? a.ranges[b.first_range + i] : a.own[b.first + i - b.ranges];
            if (!i) hidden = extent.skip_shared;
            const int64_t skip = std::min(i < b.ranges ? hidden : extent.skip_own, range.count);
            if (i < b.ranges) hidden -= skip;
            left = range.count - skip;
            step = range.row * size;
            at = (const char*)(segment < segments ? range.k : range.v) + head * range.head * size +
                 skip * step;
        }
    }

  public:
    Prefetcher(const Attention& a, const Block& b, const KeyExtent& extent, int64_t head,
               int64_t size)
        : a(a), b(b), extent(extent), head(head), size(size), row_bytes(a.e * size) {
        prefetch(DISTANCE);
    }
    void prefetch(int64_t rows) {
        while (rows) {
            if (!left) next_segment();
            if (!left) return;
            const int64_t take = std::min(rows, left);
            for (const char* end = at + take * step; at < end; at += step)
                for (int64_t i = 0; i < row_bytes; i += 64) _mm_prefetch(at + i, _MM_HINT_T0);
            rows -= take;
            left -= take;
        }
    }
};

// out[i * stride ...] = dot(q_i, key_j) for N rows of q and 16 keys: lanes of 16 elements, then
// their tree. E is a multiple of 16.
template <int N>
inline void dots16(const float* q, int64_t e, const float* const* keys, float* out,
                   int64_t stride) {
    V found[N][LANES];
    for (int j = 0; j < LANES; j += 4) {
        V acc[N][4];
        for (int i = 0; i < N; i++)
            for (int c = 0; c < 4; c++) acc[i][c] = zero();
        for (int64_t s = 0; s < e; s += LANES) {
            V k[4];
            for (int c = 0; c < 4; c++) k[c] = load(keys[j + c] + s);
            for (int i = 0; i < N; i++) {
                V x = load(q + i * e + s);
                for (int c = 0; c < 4; c++) acc[i][c] = fma(x, k[c], acc[i][c]);
            }
        }
        for (int i = 0; i < N; i++)
            for (int c = 0; c < 4; c++) found[i][j + c] = acc[i][c];
    }
    for (int i = 0; i < N; i++) store(out + i * stride, sums16(found[i]));
}

inline void dots(const float* q, int64_t rows, int64_t e, const float* const* keys, float* out,
                 int64_t stride) {
    int64_t i = 0;
    for (; i + 4 <= rows; i += 4) dots16<4>(q + i * e, e, keys, out + i * stride, stride);
    switch (rows - i) {
        case 3:
            return dots16<3>(q + i * e, e, keys, out + i * stride, stride);
        case 2:
            return dots16<2>(q + i * e, e, keys, out + i * stride, stride);
        case 1:
            return dots16<1>(q + i * e, e, keys, out + i * stride, stride);
    }
}

// out[i] += sum over j of w[i * stride + j] * values_j, in the order of j; N rows, C * 16 columns.
template <int N, int C>
inline void weighted_sum(const float* w, int64_t stride, const float* const* values, int64_t n,
                         float* out, int64_t e) {
    V acc[N][C];
    for (int i = 0; i < N; i++)
        for (int c = 0; c < C; c++) acc[i][c] = load(out + i * e + c * LANES);
    for (int64_t j = 0; j < n; j++) {
        V v[C];
        for (int c = 0; c < C; c++) v[c] = load(values[j] + c * LANES);
        for (int i = 0; i < N; i++) {
            V x = broadcast(w[i * stride + j]);
            for (int c = 0; c < C; c++) acc[i][c] = fma(x, v[c], acc[i][c]);
        }
    }
    for (int i = 0; i < N; i++)
        for (int c = 0; c < C; c++) store(out + i * e + c * LANES, acc[i][c]);
}

template <int C>
inline void weighted_sums(const float* w, int64_t stride, int64_t rows, const float* const* values,
                          int64_t n, float* out, int64_t e) {
    int64_t i = 0;
    for (; i + 4 <= rows; i += 4)
        weighted_sum<4, C>(w + i * stride, stride, values, n, out + i * e, e);
    switch (rows - i) {
        case 3:
            return weighted_sum<3, C>(w + i * stride, stride, values, n, out + i * e, e);
        case 2:
            return weighted_sum<2, C>(w + i * stride, stride, values, n, out + i * e, e);
        case 1:
            return weighted_sum<1, C>(w + i * stride, stride, values, n, out + i * e, e);
    }
}

constexpr int KEYS = 64;  // keys of a tile

inline KeyExtent::KeyExtent(const Attention& a, const Block& b) {
    for (int64_t i = 0; i < b.ranges; i++) num_shared += a.ranges[b.first_range + i].count;
    int64_t of_shared = std::numeric_limits<int64_t>::max(), of_own = of_shared;
    for (int64_t r = b.first; r < b.first + b.count; r++) {
        const int64_t first = first_visible(a, r);
        of_shared = std::min(of_shared, first);
        if (!a.own) continue;
        max_own = std::max(max_own, a.own[r].count);
        of_own = std::min(of_own, first - a.visible[r]);
    }
    skip_shared = std::clamp<int64_t>(of_shared, 0, num_shared) / KEYS * KEYS;
    if (a.own) skip_own = std::max<int64_t>(of_own, 0) / KEYS * KEYS;
}

// weighted_sums over all columns, 64 at a time.
inline void add_weighted_sums(const float* w, int64_t stride, int64_t rows,
                              const float* const* values, int64_t n, float* out, int64_t e) {
    const float* shifted[KEYS];
    int64_t c = 0;
    for (; c + 64 <= e; c += 64) {
        for (int64_t j = 0; j < n; j++) shifted[j] = values[j] + c;
        weighted_sums<4>(w, stride, rows, shifted, n, out + c, e);
    }
    for (; c < e; c += 16) {
        for (int64_t j = 0; j < n; j++) shifted[j] = values[j] + c;
        weighted_sums<1>(w, stride, rows, shifted, n, out + c, e);
    }
}

// Iterates over the positions of ranges, one tile of keys at a time.
template <class X>
struct KeyTileIterator {
    const Range* range;
    int64_t left, at = 0;

    // Begins behind the first `skip` positions.
    KeyTileIterator(const Range* ranges, int64_t n, int64_t skip) : range(ranges), left(n) {
        for (; left && skip >= range->count; range++, left--) skip -= range->count;
        at = skip;
    }

    // Where the keys and values of the next positions lie, at most KEYS; the last is repeated up to
    // a multiple of 16. How many there are.
    int64_t next(int64_t head, const X** k, const X** v) {
        int64_t n = 0;
        while (n < KEYS && left) {
            int64_t take = std::min<int64_t>(KEYS - n, range->count - at);
            for (int64_t i = 0; i < take; i++, n++) {
                int64_t offset = (at + i) * range->row + head * range->head;
                k[n] = (const X*)range->k + offset;
                v[n] = (const X*)range->v + offset;
            }
            at += take;
            if (at == range->count) range++, left--, at = 0;
        }
        for (int64_t i = n; n && i < (n + 15) / 16 * 16; i++) k[i] = k[n - 1], v[i] = v[n - 1];
        return n;
    }
};

// Dot products of pairs are added one after another, in one sum, whatever the number of rows; there
// are no sums over lanes.

// A tile of at most KEYS rows [E], in sixteens, so that a pair of columns lies side by side for
// all: [E/2][KEYS] pairs.
inline void pack_transposed(const uint16_t* const* rows, int64_t n, int64_t e, uint32_t* to) {
    for (int64_t j = 0; j < n; j += LANES)
        for (int64_t c = 0; c < e; c += 2 * LANES) {
            I x[LANES];
            for (int i = 0; i < LANES; i++) x[i] = load_words(rows[j + i] + c, e - c);
            transpose16(x);
            for (int i = 0; i < std::min<int64_t>(LANES, (e - c) / 2); i++)
                store_words(to + (c / 2 + i) * KEYS + j, x[i]);
        }
}

template <int R, int C>
void pair_dots_tile(const Operand<uint16_t>& queries, int64_t row, int64_t e, const uint32_t* keys,
                    float scale, float* out, int64_t stride) {
    Sums<R, C> sums;
    queries.multiply(row, (const uint16_t*)keys, 2 * KEYS, 0, e, sums);
    sums.each([=](int r, int c, V sum) {
        store(out + r * stride + c * LANES, mul(sum, broadcast(scale)));
    });
}

template <int C>
void pair_dots(const uint16_t* q, int64_t rows, int64_t e, const uint32_t* keys, float scale,
               float* out, int64_t stride) {
    const Operand<uint16_t> queries(q, e, rows, e);
    for_row_tiles(rows, [&](int64_t r, auto size) {
        constexpr int R = size, W = std::min(C, tile_vectors(R));
        float* to = out + r * stride;
        int c = 0;
        for (; c + W <= C; c += W)
            pair_dots_tile<R, W>(queries, r, e, keys + c * LANES, scale, to + c * LANES, stride);
        if constexpr (C % W)
            pair_dots_tile<R, C % W>(queries, r, e, keys + c * LANES, scale, to + c * LANES,
                                     stride);
    });
}

// The same for R queries and G * 16 keys, too few queries to be worth laying keys out for: these
// are transposed in registers.
template <int R, int G>
inline void few_dots_tile(const uint16_t* q, int64_t e, const uint16_t* const* keys, float scale,
                          float* out, int64_t stride) {
    Sums<R, G> sums;
    for (int64_t c = 0; c < e; c += LANES) {
        I k[G][LANES / 2];
        for (int g = 0; g < G; g++) transpose_rows(keys + g * LANES, c, k[g]);
        for (int i = 0; i < LANES / 2; i++) {
            auto words = [&](I* to) {
                for (int g = 0; g < G; g++) to[g] = k[g][i];
            };
            sums.add([=](int r) { return q + r * e + c + 2 * i; }, words);
        }
    }
    sums.each([=](int r, int g, V sum) {
        store(out + r * stride + g * LANES, mul(sum, broadcast(scale)));
    });
}

template <int R>
void few_dots(const uint16_t* q, int64_t e, const uint16_t* const* keys, int64_t n, float scale,
              float* out, int64_t stride, Prefetcher& prefetcher) {
    constexpr int G = std::min(2, tile_vectors(R));
    int64_t j = 0;
    for (; j + (G - 1) * LANES < n; j += G * LANES) {
        prefetcher.prefetch(std::min<int64_t>(n - j, G * LANES));
        few_dots_tile<R, G>(q, e, keys + j, scale, out + j, stride);
    }
    if (j < n) {
        prefetcher.prefetch(n - j);
        few_dots_tile<R, 1>(q, e, keys + j, scale, out + j, stride);
    }
}

// Rows of weights, `stride` pairs apart, and the rows that they multiply, each at its own address.
class RowPointers {
    const uint32_t* w;
    int64_t stride;
    const uint16_t* const* rows;

  public:
    RowPointers(const uint32_t* w, int64_t stride, const uint16_t* const* rows)
        : w(w), stride(stride), rows(rows) {}

    template <int R, int C>
    ALWAYS_INLINE void multiply(int64_t row, int64_t pairs, int64_t c, Sums<R, C>& sums) const {
        for (int64_t j = 0; j < pairs; j++)
            sums.add([=](int r) { return w + (row + r) * stride + j; },
                     [=](I* to) { interleave_rows<C>(rows[2 * j], rows[2 * j + 1], c, to); });
    }
};

// The same with the rows packed as pairs, [n/2][E], which many rows of weights read.
class PackedRows {
    Operand<uint16_t> w;
    const uint32_t* at;
    int64_t e;

  public:
    PackedRows(const uint32_t* w, int64_t stride, int64_t rows, int64_t pairs, const uint32_t* at,
               int64_t e)
        : w((const uint16_t*)w, 2 * stride, rows, 2 * pairs), at(at), e(e) {}

    template <int R, int C>
    ALWAYS_INLINE void multiply(int64_t row, int64_t pairs, int64_t c, Sums<R, C>& sums) const {
        w.multiply(row, (const uint16_t*)(at + c), 2 * e, 0, 2 * pairs, sums);
    }
};

inline const uint32_t* pack_row_pairs(const uint16_t* const* rows, int64_t n, int64_t e,
                                      uint32_t* to) {
    for (int64_t j = 0; j < n; j += 2) {
        int64_t c = 0;
        for (; c + 2 * LANES <= e; c += 2 * LANES) {
            I x[2];
            interleave_rows<2>(rows[j], rows[j + 1], c, x);
            for (int i = 0; i < 2; i++) store_words(to + j / 2 * e + c + i * LANES, x[i]);
        }
        if (c < e) {
            I x;
            interleave_rows<1>(rows[j], rows[j + 1], c, &x);
            store_words(to + j / 2 * e + c, x);
        }
    }
    return to;
}

// out[r * out_stride + ...] += sum over j of w_rj * value_j for pairs of j one after another: R
// rows of weights by C * 16 columns from `c` on.
template <int R, int C, class Values>
void add_weighted_pairs_tile(const Values& values, int64_t row, int64_t pairs, int64_t c,
                             float* out, int64_t out_stride) {
    Sums<R, C> sums(out + c, out_stride);
    values.multiply(row, pairs, c, sums);
    sums.each([=](int r, int i, V sum) { store(out + r * out_stride + c + i * LANES, sum); });
}

template <class Values>
void add_weighted_pairs(const Values& values, int64_t rows, int64_t pairs, int64_t e, float* out,
                        int64_t out_stride) {
    for_row_tiles(rows, [&](int64_t r, auto size) {
        constexpr int R = size, W = tile_vectors(R);
        float* to = out + r * out_stride;
        int64_t c = 0;
        for (; c + W * LANES <= e; c += W * LANES)
            add_weighted_pairs_tile<R, W>(values, r, pairs, c, to, out_stride);
        if constexpr (W > 2)
            for (; c + 2 * LANES <= e; c += 2 * LANES)
                add_weighted_pairs_tile<R, 2>(values, r, pairs, c, to, out_stride);
        if constexpr (W > 1)
            if (c < e) add_weighted_pairs_tile<R, 1>(values, r, pairs, c, to, out_stride);
    });
}

// A thread's buffers for one block and head. They are kept from call to call, because fresh pages
// cost as much as what is written to them.
struct Scratch {
    Buffer q, s, o, g, d, stats, k, v, pairs, twice;

    static Scratch& of_thread() {
        static thread_local Scratch scratch;
        return scratch;
    }
};

// Queries of a block's rows for one key head, row by row, each with its group: scaled [count *
// group, E].
inline void gather_queries(const Attention& a, const Block& b, int64_t head, const float* x,
                           float scale, float* to) {
    for (int64_t r = 0; r < b.count; r++)
        for (int64_t g = 0; g < a.group; g++) {
            const float* from =
                x + (a.rows[b.first + r] * a.heads * a.group + head * a.group + g) * a.e;
            for (int64_t i = 0; i < a.e; i += LANES)
                store(to + (r * a.group + g) * a.e + i, mul(load(from + i), broadcast(scale)));
        }
}

inline float max_of(const float* w, int64_t n) {
    V top = broadcast(-std::numeric_limits<float>::infinity());
    for (int64_t j = 0; j < n; j += LANES) top = max_(load(w + j), top);
    return largest_lane(top);
}

inline void mask_until(float* s, int64_t end, int64_t n) {
    for (int64_t j = 0; j < std::min(end, n); j++) s[j] = -std::numeric_limits<float>::infinity();
}

inline void mask_from(float* s, int64_t first, int64_t n) {
    for (int64_t j = std::max<int64_t>(first, 0); j < n; j++)
        s[j] = -std::numeric_limits<float>::infinity();
}

// Sums of a row of weights: rounded, as they are multiplied with values, and exact.
struct WeightSums {
    float rounded, exact;
};

// Attention's matmuls in float32. Scores: by dots16; sums of values: in the order of positions.
struct Float32Attention {
    using Query = float;
    static constexpr float LOG_SCALE = 1.0f;
    static constexpr int64_t KEY_MULTIPLE = LANES;  // a row of scores is padded to a multiple of it
    static constexpr int64_t PADDING_ROWS = 0;      // rows of scores that are read, but not used
    static int64_t query_stride(int64_t e) { return e; }

    // Scaled.
    static const float* queries(const Attention& a, const Block& b, int64_t head, const float* q,
                                Scratch& scratch) {
        float* to = scratch.q.reserve<float>(b.count * a.group * a.e);
        gather_queries(a, b, head, q, a.scale, to);
        return to;
    }

    // out[i * stride + j] = score of query i and key j, for a tile of n keys.
    static void scores(const Attention& a, const float* q, int64_t rows, const float* const* keys,
                       int64_t n, Scratch&, Prefetcher& prefetcher, float* out, int64_t stride) {
        prefetcher.prefetch(n);
        for (int64_t j = 0; j < n; j += LANES) dots(q, rows, a.e, keys + j, out + j, stride);
    }

    // s[0 .. n) become weights exp(s - max_score), summed lane by lane, then over lanes. n is a
    // multiple of 16.
    static WeightSums softmax_numerators(float* s, int64_t n, float max_score) {
        V total = zero();
        for (int64_t j = 0; j < n; j += LANES) {
            V x = exp_(sub(load(s + j), broadcast(max_score)));
            store(s + j, x);
            total = add(total, x);
        }
        return {sum(total), sum(total)};
    }
    static float weight(float score) { return std::exp(score); }
    static float log_sum(float max_score, float total) { return max_score + std::log(total); }

    // Adds to out [rows, E] the n values weighted by entries first .. of each row of weights.
    static void add_weighted_values(const Attention& a, const float* s, int64_t first,
                                    int64_t stride, int64_t rows, const float* const* values,
                                    int64_t n, Scratch&, Prefetcher& prefetcher, float* out) {
        prefetcher.prefetch(n);
        add_weighted_sums(s + first, stride, rows, values, n, out, a.e);
    }
};

// The same of bf16, by pairs: of elements for scores, of positions for sums of values, whose
// weights are rounded to bf16 for it (in the place of the scores: a row of weights begins where its
// scores began). Few queries and many have the same bits.
struct Bf16Attention {
    using Query = uint16_t;
    static constexpr float LOG_SCALE = 1.44269504088896341f;  // scores are in powers of 2
    static constexpr int64_t KEY_MULTIPLE = LANES, PADDING_ROWS = 0;
    static constexpr int64_t QUERY_MULTIPLE =
        2;  // sums over queries are padded to a multiple of it
    static constexpr int FEW =
        6;  // queries for which it does not pay to lay out a tile of keys or values
    static int64_t query_stride(int64_t e) { return e; }

    static uint16_t* queries(const Attention& a, const Block& b, int64_t head, const uint16_t* q,
                             Scratch& scratch) {
        return gather_rows(a, b, head, q, scratch.q.reserve<uint16_t>(b.count * a.group * a.e));
    }

    static uint16_t* gather_rows(const Attention& a, const Block& b, int64_t head,
                                 const uint16_t* x, uint16_t* to) {
        for (int64_t r = 0; r < b.count; r++)
            std::memcpy(to + r * a.group * a.e,
                        x + (a.rows[b.first + r] * a.heads + head) * a.group * a.e,
                        2 * a.group * a.e);
        return to;
    }

    static void scores(const Attention& a, const uint16_t* q, int64_t rows,
                       const uint16_t* const* keys, int64_t n, Scratch& scratch,
                       Prefetcher& prefetcher, float* out, int64_t stride) {
        using Few = void (*)(const uint16_t*, int64_t, const uint16_t* const*, int64_t, float,
                             float*, int64_t, Prefetcher&);
        constexpr Few few[] = {few_dots<1>, few_dots<2>, few_dots<3>,
                               few_dots<4>, few_dots<5>, few_dots<6>};
        if (rows <= FEW)
            return few[rows - 1](q, a.e, keys, n, a.scale * LOG_SCALE, out, stride, prefetcher);
        prefetcher.prefetch(n);
        many_dots(q, rows, a.e, keys, n, a.scale * LOG_SCALE, scratch, out, stride);
    }

    static void many_dots(const uint16_t* q, int64_t rows, int64_t e, const uint16_t* const* keys,
                          int64_t n, float scale, Scratch& scratch, float* out, int64_t stride) {
        uint32_t* buffer = scratch.k.reserve<uint32_t>(KEYS * e / 2);
        pack_transposed(keys, n, e, buffer);
        using Many =
            void (*)(const uint16_t*, int64_t, int64_t, const uint32_t*, float, float*, int64_t);
        constexpr Many many[] = {pair_dots<1>, pair_dots<2>, pair_dots<3>, pair_dots<4>};
        many[(n - 1) / LANES](q, rows, e, buffer, scale, out, stride);
    }

    static WeightSums softmax_numerators(float* s, int64_t n, float max_score) {
        V rounded = zero(), exact = zero();
        for (int64_t j = 0; j < n; j += LANES) {
            V x = exp2_(sub(load(s + j), broadcast(max_score)));
            exact = add(exact, x);
            const H weight = to_bf16_fast(x);
            store((uint16_t*)s + j, weight);
            rounded = add(rounded, to_float32(weight));
        }
        return {sum(rounded), sum(exact)};
    }
    static float weight(float score) { return std::exp2(score); }
    static float log_sum(float max_score, float total) {
        return (max_score + std::log2(total)) / LOG_SCALE;
    }

    static void add_weighted_values(const Attention& a, const float* s, int64_t first,
                                    int64_t stride, int64_t rows, const uint16_t* const* values,
                                    int64_t n, Scratch& scratch, Prefetcher& prefetcher,
                                    float* out) {
        const uint32_t* w = (const uint32_t*)s + first / 2;
        prefetcher.prefetch(n);
        const int64_t pairs = (n + 1) / 2;
        if (rows <= FEW)
            return add_weighted_pairs(RowPointers(w, stride, values), rows, pairs, a.e, out, a.e);
        const uint32_t* packed =
            pack_row_pairs(values, n, a.e, scratch.k.reserve<uint32_t>(KEYS / 2 * a.e));
        add_weighted_packed(w, stride, rows, packed, pairs, a.e, out, a.e);
    }

    // Rows to be multiplied by weights, laid out as pairs; returns how many pairs there are.
    static int64_t pack_values(const uint16_t* const* rows, int64_t n, int64_t e, uint32_t* to) {
        pack_row_pairs(rows, n, e, to);
        return (n + 1) / 2;
    }
    // Where sums over queries begin whose first `first` weights are 0.
    static int64_t align_first_query(int64_t first) { return first; }
    static void add_weighted_packed(const uint32_t* w, int64_t stride, int64_t rows,
                                    const uint32_t* values, int64_t pairs, int64_t e, float* out,
                                    int64_t out_stride) {
        add_weighted_pairs(PackedRows(w, stride, rows, pairs, values, e), rows, pairs, e, out,
                           out_stride);
    }
};

// The same by AMX's tiles, with sums in their order: runs of 32 elements or keys. So that each sum
// has whole runs, all operands end with zeros. The tiles of a few queries have the keys as rows and
// the queries as outputs: then only the queries must be transposed. The products and their order
// are the same.
struct AmxAttention : Bf16Attention {
    static constexpr int64_t KEY_MULTIPLE = 2 * amx::PAIRS, PADDING_ROWS = amx::ROWS,
                             QUERY_MULTIPLE = KEY_MULTIPLE;
    static int64_t query_stride(int64_t e) { return round_up(e, KEY_MULTIPLE); }

    static int64_t round_up(int64_t n, int64_t size) { return (n + size - 1) / size * size; }

    // Whether the queries of one row are multiplied as a few.
    static bool are_few(const Attention& a) { return a.group <= FEW && a.e % KEY_MULTIPLE == 0; }

    // [count * group and PADDING_ROWS more, query_stride], with zeros behind each row's E.
    static uint16_t* queries(const Attention& a, const Block& b, int64_t head, const uint16_t* q,
                             Scratch& scratch) {
        const int64_t rows = b.count * a.group + PADDING_ROWS, pairs = a.e / 2;
        uint16_t* found =
            gather_rows(a, b, head, q, scratch.q.reserve<uint16_t>(rows * query_stride(a.e)));
        if (!are_few(a) || (!a.own && b.count > 1)) return found;
        uint32_t* to = scratch.pairs.reserve<uint32_t>(b.count * pairs * LANES);
        for (int64_t r = 0; r < b.count; r++)
            for (int64_t c = 0; c < pairs; c += LANES) {
                I x[LANES];
                for (int64_t g = 0; g < LANES; g++)
                    x[g] = g < a.group ? load_words(found + (r * a.group + g) * a.e + 2 * c)
                                       : zero_words();
                transpose16(x);
                for (int i = 0; i < LANES; i++) store_words(to + (r * pairs + c + i) * LANES, x[i]);
            }
        return found;
    }

    static uint16_t* gather_rows(const Attention& a, const Block& b, int64_t head,
                                 const uint16_t* x, uint16_t* to) {
        const int64_t stride = query_stride(a.e);
        if (stride == a.e) return Bf16Attention::gather_rows(a, b, head, x, to);
        for (int64_t i = 0; i < b.count * a.group; i++) {
            const int64_t row = a.rows[b.first + i / a.group] * a.heads + head;
            std::memcpy(to + i * stride, x + (row * a.group + i % a.group) * a.e, 2 * a.e);
            std::fill(to + i * stride + a.e, to + (i + 1) * stride, 0);
        }
        return to;
    }

    static void scores(const Attention& a, const uint16_t* q, int64_t rows,
                       const uint16_t* const* keys, int64_t n, Scratch& scratch,
                       Prefetcher& prefetcher, float* out, int64_t stride) {
        const float scale = a.scale * LOG_SCALE;
        if (rows != a.group || !are_few(a)) {
            prefetcher.prefetch(n);
            return many_dots(q, rows, a.e, keys, n, scale, scratch, out, stride);
        }
        // `queries` has transposed them.
        const int64_t row = (q - scratch.q.reserve<uint16_t>(0)) / (rows * a.e);
        const uint32_t* transposed = scratch.pairs.reserve<uint32_t>(0) + row * a.e / 2 * LANES;
        with_size<FEW>(rows, [&](auto size) {
            for (int64_t j = 0; j < n; j += amx::BLOCK) {
                const int64_t count = std::min<int64_t>(amx::BLOCK, n - j);
                prefetcher.prefetch(count);
                few_tile_dots<size>(transposed, a.e, keys + j, count, scale, scratch, out + j,
                                    stride);
            }
        });
    }

    // Scores of R queries [e/2][LANES] and n keys, at most a block of tiles.
    template <int R>
    static void few_tile_dots(const uint32_t* q, int64_t e, const uint16_t* const* keys, int64_t n,
                              float scale, Scratch& scratch, float* out, int64_t stride) {
        alignas(64) float found[amx::BLOCK * LANES];
        const int64_t step = n > 1 ? keys[1] - keys[0] : e;
        int64_t count = 1;
        while (count < n && keys[count] - keys[0] == count * step) count++;
        const uint16_t* rows = keys[0];
        int64_t row_stride = step;
        // Whole tiles are read where they lie, if the keys lie evenly.
        if (count < n || n % amx::ROWS) {
            uint16_t* copies = scratch.k.reserve<uint16_t>(KEYS * e);
            for (int64_t j = 0; j < round_up(n, LANES); j++)
                std::memcpy(copies + j * e, keys[j], 2 * e);
            rows = copies, row_stride = e;
        }
        amx::multiply<false>(rows, row_stride, round_up(n, LANES), q, LANES, e / 2, LANES, found,
                             LANES);
        for (int64_t j = 0; j < n; j += LANES) {
            I x[LANES];
            for (int i = 0; i < LANES; i++) x[i] = load_words(found + (j + i) * LANES);
            transpose16(x);
            for (int r = 0; r < R; r++) {
                float* to = out + r * stride + j;
                store_words(to, x[r]);
                store(to, mul(load(to), broadcast(scale)));
            }
        }
    }

    static void many_dots(const uint16_t* q, int64_t rows, int64_t e, const uint16_t* const* keys,
                          int64_t n, float scale, Scratch& scratch, float* out, int64_t stride) {
        const int64_t outputs = round_up(n, LANES), pairs = query_stride(e) / 2;
        uint32_t* buffer = scratch.k.reserve<uint32_t>(KEYS * pairs);
        pack_transposed(keys, n, e, buffer);
        std::fill(buffer + KEYS * e / 2, buffer + KEYS * pairs, 0);
        amx::multiply<false>(q, 2 * pairs, rows, buffer, KEYS, pairs, outputs, out, stride);
        for (int64_t i = 0; i < rows; i++)
            for (int64_t j = 0; j < outputs; j += LANES)
                store(out + i * stride + j, mul(load(out + i * stride + j), broadcast(scale)));
    }

    static void add_weighted_values(const Attention& a, const float* s, int64_t first,
                                    int64_t stride, int64_t rows, const uint16_t* const* values,
                                    int64_t n, Scratch& scratch, Prefetcher& prefetcher,
                                    float* out) {
        prefetcher.prefetch(n);
        uint32_t* packed = scratch.k.reserve<uint32_t>(KEYS / 2 * a.e);
        const int64_t pairs = pack_values(values, n, a.e, packed);
        add_weighted_packed((const uint32_t*)s + first / 2, stride, rows, packed, pairs, a.e, out,
                            a.e);
    }

    static int64_t pack_values(const uint16_t* const* rows, int64_t n, int64_t e, uint32_t* to) {
        pack_row_pairs(rows, n, e, to);
        const int64_t pairs = round_up(n, KEY_MULTIPLE) / 2;
        std::fill(to + (n + 1) / 2 * e, to + pairs * e, 0);
        return pairs;
    }
    static int64_t align_first_query(int64_t first) {
        return first / QUERY_MULTIPLE * QUERY_MULTIPLE;
    }
    static void add_weighted_packed(const uint32_t* w, int64_t stride, int64_t rows,
                                    const uint32_t* values, int64_t pairs, int64_t e, float* out,
                                    int64_t out_stride) {
        amx::multiply<true>((const uint16_t*)w, 2 * stride, rows, values, e, pairs, e, out,
                            out_stride);
    }
};

}  // namespace

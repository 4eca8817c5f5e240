// The products of attention, of float32 and of pairs of bf16: scores of queries and keys, sums of values weighted by them. What is given are
// addresses of rows, which lie in ranges.

#pragma once

#include <vector>

#include "vectors.h"

namespace {

// Keys and values of consecutive positions, in the queries' type: `row` elements from one to the next, `head` from one head to the next.
struct Range {
    const void* k;
    const void* v;
    int64_t count, row, head;
};

// Rows that share key ranges, one behind the other: entries first .. first + count - 1 of the row lists.
struct Block {
    int64_t first, count, first_range, ranges;
};

struct Attention {
    int64_t heads, group, e;
    float scale;
    const Block* blocks;
    const Range* ranges;
    const int64_t* rows;
    const int64_t* visible;
    const Range* own;  // one for each entry, behind the shared positions; or null
};

// Asks for the rows of one block and head some way before they are read: keys, then values, each the shared ones, then every row's own.
// They mostly come from memory, in pieces too short for the CPU to foresee.
class Course {
    static constexpr int64_t AHEAD = 64;
    const Attention& a;
    const Block& b;
    int64_t head, size, row_bytes, segment = 0, left = 0, step = 0;
    const char* at = nullptr;

    void next_segment() {
        const int64_t of_own = a.own ? b.count : 0, segments = b.ranges + of_own;
        for (; !left && segment < 2 * segments; segment++) {
            const int64_t i = segment % segments;
            const Range& range = i < b.ranges ? a.ranges[b.first_range + i] : a.own[b.first + i - b.ranges];
            left = range.count;
            step = range.row * size;
            at = (const char*)(segment < segments ? range.k : range.v) + head * range.head * size;
        }
    }

  public:
    Course(const Attention& a, const Block& b, int64_t head, int64_t size) : a(a), b(b), head(head), size(size), row_bytes(a.e * size) {
        fetch(AHEAD);
    }
    void fetch(int64_t rows) {
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

// Element pairs of sixteen vectors added up: lane j of the result is the sum over the lanes of x[j], by a tree over lanes.
inline V sums16(V* x) {
    const __m512i even = _mm512_set_epi32(30, 28, 26, 24, 22, 20, 18, 16, 14, 12, 10, 8, 6, 4, 2, 0);
    const __m512i odd = _mm512_set_epi32(31, 29, 27, 25, 23, 21, 19, 17, 15, 13, 11, 9, 7, 5, 3, 1);
    for (int n = 8; n; n /= 2)
        for (int i = 0; i < n; i++)
            x[i] = _mm512_add_ps(_mm512_permutex2var_ps(x[2 * i], even, x[2 * i + 1]),
                                 _mm512_permutex2var_ps(x[2 * i], odd, x[2 * i + 1]));
    return x[0];
}

// out[i * stride ...] = dot(q_i, key_j) for N rows of q and 16 keys: lanes of 16 elements, then their tree. E is a multiple of 16.
template <int N>
inline void dots16(const float* q, int64_t e, const float* const* keys, float* out, int64_t stride) {
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

inline void dots(const float* q, int64_t rows, int64_t e, const float* const* keys, float* out, int64_t stride) {
    int64_t i = 0;
    for (; i + 4 <= rows; i += 4) dots16<4>(q + i * e, e, keys, out + i * stride, stride);
    switch (rows - i) {
        case 3: return dots16<3>(q + i * e, e, keys, out + i * stride, stride);
        case 2: return dots16<2>(q + i * e, e, keys, out + i * stride, stride);
        case 1: return dots16<1>(q + i * e, e, keys, out + i * stride, stride);
    }
}

// out[i] += sum over j of w[i * stride + j] * values_j, in the order of j; N rows, C * 16 columns.
template <int N, int C>
inline void weighted(const float* w, int64_t stride, const float* const* values, int64_t n, float* out, int64_t e) {
    V acc[N][C];
    for (int i = 0; i < N; i++)
        for (int c = 0; c < C; c++) acc[i][c] = load(out + i * e + c * LANES);
    for (int64_t j = 0; j < n; j++) {
        V v[C];
        for (int c = 0; c < C; c++) v[c] = load(values[j] + c * LANES);
        for (int i = 0; i < N; i++) {
            V x = all(w[i * stride + j]);
            for (int c = 0; c < C; c++) acc[i][c] = fma(x, v[c], acc[i][c]);
        }
    }
    for (int i = 0; i < N; i++)
        for (int c = 0; c < C; c++) store(out + i * e + c * LANES, acc[i][c]);
}

template <int C>
inline void weighted_rows(const float* w, int64_t stride, int64_t rows, const float* const* values, int64_t n, float* out, int64_t e) {
    int64_t i = 0;
    for (; i + 4 <= rows; i += 4) weighted<4, C>(w + i * stride, stride, values, n, out + i * e, e);
    switch (rows - i) {
        case 3: return weighted<3, C>(w + i * stride, stride, values, n, out + i * e, e);
        case 2: return weighted<2, C>(w + i * stride, stride, values, n, out + i * e, e);
        case 1: return weighted<1, C>(w + i * stride, stride, values, n, out + i * e, e);
    }
}

constexpr int KEYS = 64;  // keys of a tile

// weighted_rows over all columns, 64 at a time.
inline void add_weighted(const float* w, int64_t stride, int64_t rows, const float* const* values, int64_t n, float* out, int64_t e) {
    const float* shifted[KEYS];
    int64_t c = 0;
    for (; c + 64 <= e; c += 64) {
        for (int64_t j = 0; j < n; j++) shifted[j] = values[j] + c;
        weighted_rows<4>(w, stride, rows, shifted, n, out + c, e);
    }
    for (; c < e; c += 16) {
        for (int64_t j = 0; j < n; j++) shifted[j] = values[j] + c;
        weighted_rows<1>(w, stride, rows, shifted, n, out + c, e);
    }
}

// Walks the positions of ranges, a tile at a time.
template <class X>
struct Walk {
    const Range* range;
    int64_t left, at = 0;

    Walk(const Range* ranges, int64_t n) : range(ranges), left(n) {}

    // Where the keys and values of the next positions lie, at most KEYS; the last is repeated up to a multiple of 16. How many there are.
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

// The rows in float32: as they lie, or widened into `room` [KEYS, E]. A tile fits the first cache, and is read by many queries.
inline const float* const* widened(const float* const* rows, int64_t, int64_t, float*, const float**) { return rows; }
inline const float* const* widened(const uint16_t* const* rows, int64_t n, int64_t e, float* room, const float** wide) {
    for (int64_t j = 0; j < (n + 15) / 16 * 16; j++) {
        float* to = room + j * e;
        for (int64_t c = 0; c < e; c += LANES) store(to + c, load(rows[j] + c));
        wide[j] = to;
    }
    return wide;
}

// Dot products of pairs are added one after another, in one sum, whatever the number of rows; there are no sums over lanes.

// A tile of at most KEYS rows [E], in sixteens, so that a pair of columns lies side by side for all: [E/2][KEYS] pairs.
inline void turned(const uint16_t* const* rows, int64_t n, int64_t e, uint32_t* to) {
    for (int64_t j = 0; j < n; j += LANES)
        for (int64_t c = 0; c < e; c += 2 * LANES) {
            const __mmask16 there = tail((e - c) / 2);
            __m512i x[LANES];
            for (int i = 0; i < LANES; i++) x[i] = _mm512_maskz_loadu_epi32(there, rows[j + i] + c);
            turn16(x);
            for (int i = 0; i < std::min<int64_t>(LANES, (e - c) / 2); i++) _mm512_storeu_si512(to + (c / 2 + i) * KEYS + j, x[i]);
        }
}

template <int R, int C>
BF16 void pair_dots_tile(const uint16_t* q, int64_t e, const uint32_t* keys, float scale, float* out, int64_t stride) {
    V acc[R][C];
    for (int r = 0; r < R; r++)
        for (int c = 0; c < C; c++) acc[r][c] = zero();
    for (int64_t i = 0; i < e / 2; i++) {
        __m512bh k[C];
        for (int c = 0; c < C; c++) k[c] = (__m512bh)_mm512_loadu_si512(keys + i * KEYS + c * LANES);
        for (int r = 0; r < R; r++) {
            int32_t pair;
            std::memcpy(&pair, q + r * e + 2 * i, 4);
            const __m512bh both = (__m512bh)_mm512_set1_epi32(pair);
            for (int c = 0; c < C; c++) acc[r][c] = _mm512_dpbf16_ps(acc[r][c], both, k[c]);
        }
    }
    for (int r = 0; r < R; r++)
        for (int c = 0; c < C; c++) store(out + r * stride + c * LANES, _mm512_mul_ps(acc[r][c], all(scale)));
}

template <int C>
void pair_dots(const uint16_t* q, int64_t rows, int64_t e, const uint32_t* keys, float scale, float* out, int64_t stride) {
    using Tile = void (*)(const uint16_t*, int64_t, const uint32_t*, float, float*, int64_t);
    const Tile tiles[] = {pair_dots_tile<1, C>, pair_dots_tile<2, C>, pair_dots_tile<3, C>,
                          pair_dots_tile<4, C>, pair_dots_tile<5, C>, pair_dots_tile<6, C>};
    for (int64_t r = 0; r < rows;) {
        const int64_t left = (rows - r + 5) / 6, take = (rows - r + left - 1) / left;
        tiles[take - 1](q + r * e, e, keys, scale, out + r * stride, stride);
        r += take;
    }
}

// Sixteen elements of each of sixteen rows, turned: to[i] holds pair i of all.
__attribute__((always_inline)) inline void turn_keys(const uint16_t* const* rows, int64_t c, __m512i* to) {
    constexpr int HALF_LANES = LANES / 2;
    __m512i x[HALF_LANES], y[HALF_LANES];
    for (int i = 0; i < HALF_LANES; i++) {
        const int row = i / 4 * 8 + i % 4;
        const __m256i low = _mm256_loadu_si256((const __m256i*)(rows[row] + c));
        x[i] = _mm512_inserti64x4(_mm512_castsi256_si512(low), _mm256_loadu_si256((const __m256i*)(rows[row + 4] + c)), 1);
    }
    for (int i = 0; i < HALF_LANES; i += 2) {
        y[i] = _mm512_unpacklo_epi32(x[i], x[i + 1]);
        y[i + 1] = _mm512_unpackhi_epi32(x[i], x[i + 1]);
    }
    for (int i = 0; i < HALF_LANES; i += 4)
        for (int h = 0; h < 2; h++) {
            x[i + 2 * h] = _mm512_unpacklo_epi64(y[i + h], y[i + 2 + h]);
            x[i + 2 * h + 1] = _mm512_unpackhi_epi64(y[i + h], y[i + 2 + h]);
        }
    for (int i = 0; i < 4; i++) {
        to[i] = _mm512_shuffle_i32x4(x[i], x[i + 4], 0x88);
        to[i + 4] = _mm512_shuffle_i32x4(x[i], x[i + 4], 0xdd);
    }
}

// The same for R queries and G * 16 keys, too few queries to be worth laying keys out for: these are turned in registers.
template <int R, int G>
BF16 inline void few_dots_tile(const uint16_t* q, int64_t e, const uint16_t* const* keys, float scale, float* out, int64_t stride) {
    V acc[G][R];
    for (int g = 0; g < G; g++)
        for (int r = 0; r < R; r++) acc[g][r] = zero();
    for (int64_t c = 0; c < e; c += LANES) {
        __m512i k[G][LANES / 2];
        for (int g = 0; g < G; g++) turn_keys(keys + g * LANES, c, k[g]);
        for (int i = 0; i < LANES / 2; i++)
            for (int r = 0; r < R; r++) {
                int32_t pair;
                std::memcpy(&pair, q + r * e + c + 2 * i, 4);
                const __m512bh both = (__m512bh)_mm512_set1_epi32(pair);
                for (int g = 0; g < G; g++) acc[g][r] = _mm512_dpbf16_ps(acc[g][r], both, (__m512bh)k[g][i]);
            }
    }
    for (int g = 0; g < G; g++)
        for (int r = 0; r < R; r++) store(out + r * stride + g * LANES, _mm512_mul_ps(acc[g][r], all(scale)));
}

template <int R>
BF16 void few_dots(const uint16_t* q, int64_t e, const uint16_t* const* keys, int64_t n, float scale, float* out, int64_t stride, Course& course) {
    int64_t j = 0;
    for (; j + LANES < n; j += 2 * LANES) {
        course.fetch(std::min<int64_t>(n - j, 2 * LANES));
        few_dots_tile<R, 2>(q, e, keys + j, scale, out + j, stride);
    }
    if (j < n) {
        course.fetch(n - j);
        few_dots_tile<R, 1>(q, e, keys + j, scale, out + j, stride);
    }
}

// Rows two by two: a pair of them lies side by side for each of C * 16 columns from `c` on.
template <int C>
inline void two_rows(const uint16_t* first, const uint16_t* second, int64_t c, __m512i* to) {
    const __m512i low = _mm512_set_epi16(47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8, 39, 7, 38, 6, 37, 5, 36, 4, 35, 3,
                                         34, 2, 33, 1, 32, 0);
    if constexpr (C == 1) {
        const __m512i x = _mm512_castsi256_si512(_mm256_loadu_si256((const __m256i*)(first + c)));
        const __m512i y = _mm512_castsi256_si512(_mm256_loadu_si256((const __m256i*)(second + c)));
        to[0] = _mm512_permutex2var_epi16(x, low, y);
    } else {
        const __m512i high = _mm512_add_epi16(low, _mm512_set1_epi16(16));
        for (int i = 0; i < C; i += 2) {
            const __m512i x = _mm512_loadu_si512(first + c + i * LANES), y = _mm512_loadu_si512(second + c + i * LANES);
            to[i] = _mm512_permutex2var_epi16(x, low, y);
            to[i + 1] = _mm512_permutex2var_epi16(x, high, y);
        }
    }
}

// Rows of a tile as they lie.
struct Apart {
    const uint16_t* const* rows;

    template <int C>
    inline void get(int64_t pair, int64_t c, __m512i* to) const {
        two_rows<C>(rows[2 * pair], rows[2 * pair + 1], c, to);
    }
};

// Rows of a tile laid out as pairs, [n/2][E], to be read by many.
struct Laid {
    const uint32_t* at;
    int64_t e;

    template <int C>
    inline void get(int64_t pair, int64_t c, __m512i* to) const {
        for (int i = 0; i < C; i++) to[i] = _mm512_loadu_si512(at + pair * e + c + i * LANES);
    }
};

inline Laid laid(const uint16_t* const* rows, int64_t n, int64_t e, uint32_t* to) {
    for (int64_t j = 0; j < n; j += 2)
        for (int64_t c = 0; c < e; c += LANES) {
            __m512i x;
            two_rows<1>(rows[j], rows[j + 1], c, &x);
            _mm512_storeu_si512(to + j / 2 * e + c, x);
        }
    return {to, e};
}

// out[r * out_stride + ...] += sum over j of w_rj * value_j for pairs of j one after another, in the instruction's own order within a pair:
// R rows of weights, `stride` pairs apart, by C * 16 columns from `c` on.
template <int R, int C, class Values>
BF16 void weigh_tile(const uint32_t* w, int64_t stride, const Values& values, int64_t pairs, int64_t c, float* out, int64_t out_stride) {
    V acc[R][C];
    for (int r = 0; r < R; r++)
        for (int i = 0; i < C; i++) acc[r][i] = load(out + r * out_stride + c + i * LANES);
    for (int64_t j = 0; j < pairs; j++) {
        __m512i v[C];
        values.template get<C>(j, c, v);
        for (int r = 0; r < R; r++) {
            const __m512bh x = (__m512bh)_mm512_set1_epi32(w[r * stride + j]);
            for (int i = 0; i < C; i++) acc[r][i] = _mm512_dpbf16_ps(acc[r][i], x, (__m512bh)v[i]);
        }
    }
    for (int r = 0; r < R; r++)
        for (int i = 0; i < C; i++) store(out + r * out_stride + c + i * LANES, acc[r][i]);
}

template <int C, class Values>
void weigh_columns(const uint32_t* w, int64_t stride, int64_t rows, const Values& values, int64_t pairs, int64_t c, float* out,
                   int64_t out_stride) {
    using Tile = void (*)(const uint32_t*, int64_t, const Values&, int64_t, int64_t, float*, int64_t);
    constexpr Tile tiles[] = {weigh_tile<1, C, Values>, weigh_tile<2, C, Values>, weigh_tile<3, C, Values>,
                              weigh_tile<4, C, Values>, weigh_tile<5, C, Values>, weigh_tile<6, C, Values>};
    for (int64_t r = 0; r < rows;) {
        const int64_t left = (rows - r + 5) / 6, take = (rows - r + left - 1) / left;
        tiles[take - 1](w + r * stride, stride, values, pairs, c, out + r * out_stride, out_stride);
        r += take;
    }
}

template <class Values>
void weigh(const uint32_t* w, int64_t stride, int64_t rows, const Values& values, int64_t pairs, int64_t e, float* out, int64_t out_stride) {
    int64_t c = 0;
    for (; c + 64 <= e; c += 64) weigh_columns<4>(w, stride, rows, values, pairs, c, out, out_stride);
    for (; c + 32 <= e; c += 32) weigh_columns<2>(w, stride, rows, values, pairs, c, out, out_stride);
    if (c < e) weigh_columns<1>(w, stride, rows, values, pairs, c, out, out_stride);
}

struct Scratch {
    Room q, s, o, g, d, stats, k, v, pairs, twice;
};

// Queries of a block's rows for one key head, row by row, each with its group: scaled, float32 [count * group, E].
template <class X>
void gather(const Attention& a, const Block& b, int64_t head, const X* x, float scale, float* to) {
    for (int64_t r = 0; r < b.count; r++)
        for (int64_t g = 0; g < a.group; g++) {
            const X* from = x + (a.rows[b.first + r] * a.heads * a.group + head * a.group + g) * a.e;
            for (int64_t i = 0; i < a.e; i += LANES) store(to + (r * a.group + g) * a.e + i, _mm512_mul_ps(load(from + i), all(scale)));
        }
}

inline float largest(const float* w, int64_t n) {
    V top = all(-std::numeric_limits<float>::infinity());
    for (int64_t j = 0; j < n; j += LANES) top = _mm512_max_ps(load(w + j), top);
    return _mm512_reduce_max_ps(top);
}

inline void mask_from(float* s, int64_t first, int64_t n) {
    for (int64_t j = std::max<int64_t>(first, 0); j < n; j++) s[j] = -std::numeric_limits<float>::infinity();
}

// Sums of a row of weights: as they are multiplied with values, and before they were rounded for it.
struct Totals {
    float used, exact;
};

// Attention's products in float32, of bf16 widened exactly. Scores: by dots16; sums of values: in the order of positions.
template <class X>
struct Floats {
    using Query = float;

    // Scaled.
    static const float* queries(const Attention& a, const Block& b, int64_t head, const X* q, Scratch& scratch) {
        float* to = scratch.q.of<float>(b.count * a.group * a.e);
        gather(a, b, head, q, a.scale, to);
        return to;
    }

    // out[i * stride + j] = score of query i and key j, for a tile of n keys.
    static void scores(const Attention& a, const float* q, int64_t rows, const X* const* keys, int64_t n, Scratch& scratch, Course& course, float* out,
                       int64_t stride) {
        course.fetch(n);
        const float* wide[KEYS];
        const float* const* there = widened(keys, n, a.e, scratch.k.of<float>(KEYS * a.e), wide);
        for (int64_t j = 0; j < n; j += LANES) dots(q, rows, a.e, there + j, out + j, stride);
    }

    // s[0 .. n) become weights exp(s - peak), summed lane by lane, then over lanes. n is a multiple of 16.
    static Totals soften(float* s, int64_t n, float peak) {
        V total = zero();
        for (int64_t j = 0; j < n; j += LANES) {
            V x = exp_(_mm512_sub_ps(load(s + j), all(peak)));
            store(s + j, x);
            total = _mm512_add_ps(total, x);
        }
        return {sum(total), sum(total)};
    }
    static float log_sum(float peak, float total) { return peak + std::log(total); }

    // Adds to out [rows, E] the n values weighted by entries first .. of each row of weights.
    static void weigh_values(const Attention& a, const float* s, int64_t first, int64_t stride, int64_t rows, const X* const* values, int64_t n,
                             Scratch& scratch, Course& course, float* out) {
        course.fetch(n);
        const float* wide[KEYS];
        add_weighted(s + first, stride, rows, widened(values, n, a.e, scratch.k.of<float>(KEYS * a.e), wide), n, out, a.e);
    }
};

// The same of bf16, where the CPU multiplies pairs: of elements for scores, of positions for sums of values, whose weights are rounded to
// bf16 for it (in the place of the scores: a row of weights begins where its scores began). Few queries and many have the same bits.
struct Pairs {
    using Query = uint16_t;
    static constexpr float PER_LN = 1.44269504088896341f;  // scores are in powers of 2
    static constexpr int FEW = 6;  // queries for which it does not pay to lay out a tile of keys or values

    static uint16_t* queries(const Attention& a, const Block& b, int64_t head, const uint16_t* q, Scratch& scratch) {
        return of_rows(a, b, head, q, scratch.q.of<uint16_t>(b.count * a.group * a.e));
    }

    static uint16_t* of_rows(const Attention& a, const Block& b, int64_t head, const uint16_t* x, uint16_t* to) {
        for (int64_t r = 0; r < b.count; r++)
            std::memcpy(to + r * a.group * a.e, x + (a.rows[b.first + r] * a.heads + head) * a.group * a.e, 2 * a.group * a.e);
        return to;
    }

    static void scores(const Attention& a, const uint16_t* q, int64_t rows, const uint16_t* const* keys, int64_t n, Scratch& scratch,
                       Course& course, float* out, int64_t stride) {
        using Few = void (*)(const uint16_t*, int64_t, const uint16_t* const*, int64_t, float, float*, int64_t, Course&);
        constexpr Few few[] = {few_dots<1>, few_dots<2>, few_dots<3>, few_dots<4>, few_dots<5>, few_dots<6>};
        if (rows <= FEW) return few[rows - 1](q, a.e, keys, n, a.scale * PER_LN, out, stride, course);
        course.fetch(n);
        many_dots(q, rows, a.e, keys, n, a.scale * PER_LN, scratch, out, stride);
    }

    static void many_dots(const uint16_t* q, int64_t rows, int64_t e, const uint16_t* const* keys, int64_t n, float scale, Scratch& scratch,
                          float* out, int64_t stride) {
        uint32_t* room = scratch.k.of<uint32_t>(KEYS * e / 2);
        turned(keys, n, e, room);
        using Many = void (*)(const uint16_t*, int64_t, int64_t, const uint32_t*, float, float*, int64_t);
        constexpr Many many[] = {pair_dots<1>, pair_dots<2>, pair_dots<3>, pair_dots<4>};
        many[(n - 1) / LANES](q, rows, e, room, scale, out, stride);
    }

    BF16 static Totals soften(float* s, int64_t n, float peak) {
        V used = zero(), exact = zero();
        for (int64_t j = 0; j < n; j += LANES) {
            V x = exp2_(_mm512_sub_ps(load(s + j), all(peak)));
            exact = _mm512_add_ps(exact, x);
            const __m256i narrow = (__m256i)_mm512_cvtneps_pbh(x);
            _mm256_storeu_si256((__m256i*)((uint16_t*)s + j), narrow);
            used = _mm512_add_ps(used, load((const uint16_t*)&narrow));
        }
        return {sum(used), sum(exact)};
    }
    static float log_sum(float peak, float total) { return (peak + std::log2(total)) / PER_LN; }

    static void weigh_values(const Attention& a, const float* s, int64_t first, int64_t stride, int64_t rows, const uint16_t* const* values,
                             int64_t n, Scratch& scratch, Course& course, float* out) {
        const uint32_t* w = (const uint32_t*)s + first / 2;
        course.fetch(n);
        if (rows <= FEW) return weigh(w, stride, rows, Apart{values}, (n + 1) / 2, a.e, out, a.e);
        weigh(w, stride, rows, laid(values, n, a.e, scratch.k.of<uint32_t>(KEYS / 2 * a.e)), (n + 1) / 2, a.e, out, a.e);
    }
};

}  // namespace

// The names of vectors.h (avx512.h has them first, and says what they mean) for CPUs with AVX2 and
// FMA: a vector of 16 is two of 8. There is no instruction for pairs of bf16; widened they cost as
// many multiplications as float32, and half its memory.

#pragma once

#include <immintrin.h>

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "buffer.h"

namespace {

constexpr int LANES = 16, HALF_LANES = 8;
struct V {
    __m256 low, high;
};
using H = __m256i;
struct I {
    __m256i low, high;
};
struct Tail {
    int count;
    bool whole() const { return count >= LANES; }
};

// Of 16 registers, two for a vector of sums.
constexpr int TILE_ROWS = 5;
constexpr int tile_vectors(int rows) { return rows == 1 ? 4 : rows == 2 ? 2 : 1; }

inline Tail tail(int64_t left) { return {left >= LANES ? LANES : left > 0 ? (int)left : 0}; }

#define EACH(call_low, call_high) {(call_low), (call_high)}
inline V zero() { return EACH(_mm256_setzero_ps(), _mm256_setzero_ps()); }
inline V broadcast(float x) { return EACH(_mm256_set1_ps(x), _mm256_set1_ps(x)); }
inline V add(V a, V b) { return EACH(_mm256_add_ps(a.low, b.low), _mm256_add_ps(a.high, b.high)); }
inline V sub(V a, V b) { return EACH(_mm256_sub_ps(a.low, b.low), _mm256_sub_ps(a.high, b.high)); }
inline V mul(V a, V b) { return EACH(_mm256_mul_ps(a.low, b.low), _mm256_mul_ps(a.high, b.high)); }
inline V div(V a, V b) { return EACH(_mm256_div_ps(a.low, b.low), _mm256_div_ps(a.high, b.high)); }
inline V fma(V a, V b, V c) {
    return EACH(_mm256_fmadd_ps(a.low, b.low, c.low), _mm256_fmadd_ps(a.high, b.high, c.high));
}
inline V fnma(V a, V b, V c) {
    return EACH(_mm256_fnmadd_ps(a.low, b.low, c.low), _mm256_fnmadd_ps(a.high, b.high, c.high));
}
inline V max_(V a, V b) { return EACH(_mm256_max_ps(a.low, b.low), _mm256_max_ps(a.high, b.high)); }
inline V min_(V a, V b) { return EACH(_mm256_min_ps(a.low, b.low), _mm256_min_ps(a.high, b.high)); }
inline V round_(V x) {
    constexpr int NEAREST = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
    return EACH(_mm256_round_ps(x.low, NEAREST), _mm256_round_ps(x.high, NEAREST));
}
// In two steps, of which only the second can round, as the exponent of one number goes no further
// than 2^-126.
inline __m256 ldexp_(__m256 x, __m256 n) {
    const __m256i whole = _mm256_cvtps_epi32(n), first = _mm256_srai_epi32(whole, 1),
                  bias = _mm256_set1_epi32(127);
    auto power = [=](__m256i by) {
        return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(by, bias), 23));
    };
    return _mm256_mul_ps(_mm256_mul_ps(x, power(first)), power(_mm256_sub_epi32(whole, first)));
}
inline V ldexp_(V x, V n) { return EACH(ldexp_(x.low, n.low), ldexp_(x.high, n.high)); }
inline V zero_below(V x, V bar, V y) {
    return EACH(_mm256_andnot_ps(_mm256_cmp_ps(x.low, bar.low, _CMP_LT_OQ), y.low),
                _mm256_andnot_ps(_mm256_cmp_ps(x.high, bar.high, _CMP_LT_OQ), y.high));
}
inline V select(Tail m, V x, V otherwise) {
    if (m.whole()) return x;
    const __m256i count = _mm256_set1_epi32(m.count),
                  lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    const __m256i low = _mm256_cmpgt_epi32(count, lane),
                  high = _mm256_cmpgt_epi32(count,
                                            _mm256_add_epi32(lane, _mm256_set1_epi32(HALF_LANES)));
    return EACH(_mm256_blendv_ps(otherwise.low, x.low, _mm256_castsi256_ps(low)),
                _mm256_blendv_ps(otherwise.high, x.high, _mm256_castsi256_ps(high)));
}
inline V select(Tail m, V x) { return select(m, x, zero()); }
// The lanes whose bits are set, lane 0 first; 0 in the others.
inline V select_bits(uint16_t bits, V x) {
    const __m256i set_bits = _mm256_set1_epi32(bits);
    const __m256i low = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128),
                  high = _mm256_slli_epi32(low, HALF_LANES);
    auto lane_mask = [=](__m256i lanes) {
        return _mm256_castsi256_ps(_mm256_cmpeq_epi32(_mm256_and_si256(set_bits, lanes), lanes));
    };
    return EACH(_mm256_and_ps(lane_mask(low), x.low), _mm256_and_ps(lane_mask(high), x.high));
}
inline __m256 low_half(V x) { return x.low; }
inline __m256 high_half(V x) { return x.high; }

inline __m256 to_float32(__m128i x) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(x), 16));
}
inline V to_float32(H x) {
    return EACH(to_float32(_mm256_castsi256_si128(x)), to_float32(_mm256_extracti128_si256(x, 1)));
}
// Words of which the upper half is the number.
inline __m256i rounded(__m256 x) {
    const __m256i bits = _mm256_castps_si256(x);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i up = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
    const __m256i nan = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
    return _mm256_blendv_epi8(up, nan, _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q)));
}
inline H to_bf16(V x) {
    const __m256i packed = _mm256_packus_epi32(_mm256_srli_epi32(rounded(x.low), 16),
                                               _mm256_srli_epi32(rounded(x.high), 16));
    return _mm256_permute4x64_epi64(packed, 0xd8);
}
inline H to_bf16_fast(V x) { return to_bf16(x); }

// The first numbers from `p` on, then zeros.
template <class X>
inline void copy_padded(const X* p, int count, X* to) {
    std::memset(to, 0, LANES * sizeof(X));
    std::memcpy(to, p, count * sizeof(X));
}

inline V load(const float* p) { return EACH(_mm256_loadu_ps(p), _mm256_loadu_ps(p + HALF_LANES)); }
inline V load(const float* p, Tail m) {
    if (m.whole()) return load(p);
    float padded[LANES];
    copy_padded(p, m.count, padded);
    return load(padded);
}
inline H load_bf16(const uint16_t* p, Tail m) {
    if (m.whole()) return _mm256_loadu_si256((const __m256i*)p);
    uint16_t padded[LANES];
    copy_padded(p, m.count, padded);
    return _mm256_loadu_si256((const __m256i*)padded);
}
inline V load(const uint16_t* p) { return to_float32(_mm256_loadu_si256((const __m256i*)p)); }
inline V load(const uint16_t* p, Tail m) { return to_float32(load_bf16(p, m)); }
inline void store(float* p, V x) {
    _mm256_storeu_ps(p, x.low);
    _mm256_storeu_ps(p + HALF_LANES, x.high);
}
inline void store(uint16_t* p, H x) { _mm256_storeu_si256((__m256i*)p, x); }
inline void store(uint16_t* p, V x) { store(p, to_bf16(x)); }
template <class X>
inline void store(X* p, V x, Tail m) {
    if (m.whole()) return store(p, x);
    X padded[LANES];
    store(padded, x);
    std::memcpy(p, padded, m.count * sizeof(X));
}

inline I zero_words() { return EACH(_mm256_setzero_si256(), _mm256_setzero_si256()); }
inline I load_words(const void* p) {
    return EACH(_mm256_loadu_si256((const __m256i*)p), _mm256_loadu_si256((const __m256i*)p + 1));
}
inline I load_words(const uint16_t* p, int64_t left) {
    if (left >= 2 * LANES) return load_words(p);
    uint16_t padded[2 * LANES] = {};
    if (left > 0) std::memcpy(padded, p, left * sizeof(uint16_t));
    return load_words(padded);
}
inline void store_words(void* p, I x) {
    _mm256_storeu_si256((__m256i*)p, x.low);
    _mm256_storeu_si256((__m256i*)p + 1, x.high);
}
inline void store_words(void* p, I x, Tail m) {
    if (m.whole()) return store_words(p, x);
    uint32_t padded[LANES];
    store_words(padded, x);
    std::memcpy(p, padded, m.count * sizeof(uint32_t));
}
inline void stream_words(void* p, I x) {
    _mm256_stream_si256((__m256i*)p, x.low);
    _mm256_stream_si256((__m256i*)p + 1, x.high);
}
inline I interleave(H even, H odd) {
    const __m256i first = _mm256_unpacklo_epi16(even, odd),
                  second = _mm256_unpackhi_epi16(even, odd);
    return EACH(_mm256_permute2x128_si256(first, second, 0x20),
                _mm256_permute2x128_si256(first, second, 0x31));
}
inline I load_interleaved(const uint16_t* even, Tail m, const uint16_t* odd, Tail n) {
    return interleave(load_bf16(even, m), load_bf16(odd, n));
}

inline I interleave_as_bf16(V even, V odd) { return interleave(to_bf16(even), to_bf16(odd)); }
inline void load_pairs(const int8_t* p, V& even, V& odd) {
    auto half = [](const int8_t* from, __m256& even, __m256& odd) {
        const __m256i words = _mm256_cvtepi16_epi32(_mm_loadu_si128((const __m128i*)from));
        even = _mm256_cvtepi32_ps(_mm256_srai_epi32(_mm256_slli_epi32(words, 24), 24));
        odd = _mm256_cvtepi32_ps(_mm256_srai_epi32(words, 8));
    };
    half(p, even.low, odd.low), half(p + LANES, even.high, odd.high);
}
class PairScales {
    V scale;

  public:
    void load_from(const float* scales) { scale = load(scales); }
    ALWAYS_INLINE I words(const int8_t* p) const {
        V even, odd;
        load_pairs(p, even, odd);
        return interleave_as_bf16(mul(even, scale), mul(odd, scale));
    }
};
class Table {
    V numbers;

    // The permutation looks only at the lowest three bits of a word; the fourth chooses the half.
    __m256 lookup(__m256i words) const {
        return _mm256_blendv_ps(_mm256_permutevar8x32_ps(numbers.low, words),
                                _mm256_permutevar8x32_ps(numbers.high, words),
                                _mm256_castsi256_ps(_mm256_slli_epi32(words, 28)));
    }

  public:
    explicit Table(const float* from) : numbers(load(from)) {}
    void load_pairs(const uint8_t* p, V& even, V& odd) const {
        const __m256i low = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)p)),
                      high =
                          _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)(p + HALF_LANES)));
        even = EACH(lookup(low), lookup(high));
        odd = EACH(lookup(_mm256_srli_epi32(low, 4)), lookup(_mm256_srli_epi32(high, 4)));
    }
};

template <int C>
inline void interleave_rows(const uint16_t* first, const uint16_t* second, int64_t c, I* to) {
    for (int i = 0; i < C; i++, c += LANES)
        to[i] = interleave(_mm256_loadu_si256((const __m256i*)(first + c)),
                           _mm256_loadu_si256((const __m256i*)(second + c)));
}

// Vectors of 8 as members rather than in an array, which the compiler would keep in memory.
template <int N>
struct Vectors {
    __m256 first;
    Vectors<N - 1> rest;

    ALWAYS_INLINE void clear() { first = _mm256_setzero_ps(), rest.clear(); }
    ALWAYS_INLINE void load(const float* from) {
        first = _mm256_loadu_ps(from), rest.load(from + HALF_LANES);
    }
    ALWAYS_INLINE void even_of(const __m256i* words) {
        first = _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_loadu_si256(words), 16)),
        rest.even_of(words + 1);
    }
    ALWAYS_INLINE void odd_of(const __m256i* words) {
        first = _mm256_castsi256_ps(
            _mm256_and_si256(_mm256_loadu_si256(words), _mm256_set1_epi32(0xffff0000))),
        rest.odd_of(words + 1);
    }
    ALWAYS_INLINE void add(__m256 same, const Vectors& x) {
        first = _mm256_fmadd_ps(same, x.first, first), rest.add(same, x.rest);
    }
    template <class F>
    ALWAYS_INLINE void each(int r, int c, F f) const {
        f(r, c, V{first, rest.first}), rest.rest.each(r, c + 1, f);
    }
};
template <>
struct Vectors<0> {
    void clear() {}
    void load(const float*) {}
    void even_of(const __m256i*) {}
    void odd_of(const __m256i*) {}
    void add(__m256, const Vectors&) {}
    template <class F>
    void each(int, int, F) const {}
};
template <int R, int N>
struct Matrix {
    Vectors<N> row;
    Matrix<R - 1, N> rest;

    ALWAYS_INLINE void clear() { row.clear(), rest.clear(); }
    ALWAYS_INLINE void load(const float* from, int64_t stride) {
        row.load(from), rest.load(from + stride, stride);
    }
    // number_of(r): what row r multiplies the vectors with.
    template <class F>
    ALWAYS_INLINE void add(int r, F number_of, const Vectors<N>& x) {
        row.add(number_of(r), x), rest.add(r + 1, number_of, x);
    }
    template <class F>
    ALWAYS_INLINE void each(int r, F f) const {
        row.each(r, 0, f), rest.each(r + 1, f);
    }
};
template <int N>
struct Matrix<0, N> {
    void clear() {}
    void load(const float*, int64_t) {}
    template <class F>
    void add(int, F, const Vectors<N>&) {}
    template <class F>
    void each(int, F) const {}
};

// Of a pair the even number's product is added first, then the odd one's.
template <int R, int W>
class Sums {
    Matrix<R, 2 * W> sums;

    static __m256i same_words(const void* pair) {
        int32_t word;
        std::memcpy(&word, pair, 4);
        return _mm256_set1_epi32(word);
    }

  public:
    ALWAYS_INLINE Sums() { sums.clear(); }
    ALWAYS_INLINE Sums(const float* from, int64_t stride) { sums.load(from, stride); }
    template <class P, class F>
    ALWAYS_INLINE void add(P pair_of, F words) {
        I w[W];
        Vectors<2 * W> x;
        words(w);
        x.even_of((const __m256i*)w);
        sums.add(
            0,
            [=](int r) {
                return _mm256_castsi256_ps(_mm256_slli_epi32(same_words(pair_of(r)), 16));
            },
            x);
        x.odd_of((const __m256i*)w);
        sums.add(
            0,
            [=](int r) {
                return _mm256_castsi256_ps(
                    _mm256_and_si256(same_words(pair_of(r)), _mm256_set1_epi32(0xffff0000)));
            },
            x);
    }
    ALWAYS_INLINE void add(const float* number, int64_t stride, const float* vectors) {
        Vectors<2 * W> x;
        x.load(vectors);
        sums.add(0, [=](int r) { return _mm256_broadcast_ss(number + r * stride); }, x);
    }
    // Pairs of which the rows' are of float32, `stride` from row to row.
    ALWAYS_INLINE void add(const float* pair, int64_t stride, const __m256i* words) {
        Vectors<2 * W> x;
        x.even_of(words);
        sums.add(0, [=](int r) { return _mm256_broadcast_ss(pair + r * stride); }, x);
        asm("" : "+r"(words));  // read again: no registers are left to keep them
        x.odd_of(words);
        sums.add(0, [=](int r) { return _mm256_broadcast_ss(pair + r * stride + 1); }, x);
    }
    template <class F>
    ALWAYS_INLINE void each(F f) const {
        sums.each(0, f);
    }
};

// The rows are widened, once for all weights. In memory of the thread's own: until it makes the
// next one.
template <class X>
class Operand;
template <>
class Operand<uint16_t> {
    static constexpr int64_t PREFETCH_PAIRS = 16;
    int64_t stride;
    const float* x;

  public:
    Operand(const uint16_t* from, int64_t row_stride, int64_t rows, int64_t columns)
        : stride((columns + LANES - 1) / LANES * LANES + LANES) {
        static thread_local Buffer buffer;
        float* to = buffer.reserve<float>(rows * stride);
        for (int64_t r = 0; r < rows; r++)
            for (int64_t i = 0; i < columns; i += LANES)
                store(to + r * stride + i, load(from + r * row_stride + i, tail(columns - i)));
        x = to;
    }

    template <int R, int W>
    ALWAYS_INLINE void multiply(int64_t row, const uint16_t* weight, int64_t step, int64_t first,
                                int64_t last, Sums<R, W>& sums) const {
        const float* from = x + row * stride;
        const uint16_t* words = weight + first / 2 * step;
        for (int64_t i = first; i < last; i += 2, words += step) {
            for (int c = 0; c < W; c++)
                _mm_prefetch((const char*)(words + PREFETCH_PAIRS * step + c * 2 * LANES),
                             _MM_HINT_T0);
            sums.add(from + i, stride, (const __m256i*)words);
        }
    }
};

// Eight vectors of words as a matrix, transposed.
ALWAYS_INLINE void transpose8(__m256i* x) {
    __m256i y[HALF_LANES];
    for (int i = 0; i < HALF_LANES; i += 2) {
        y[i] = _mm256_unpacklo_epi32(x[i], x[i + 1]);
        y[i + 1] = _mm256_unpackhi_epi32(x[i], x[i + 1]);
    }
    for (int i = 0; i < HALF_LANES; i += 4)
        for (int h = 0; h < 2; h++) {
            x[i + 2 * h] = _mm256_unpacklo_epi64(y[i + h], y[i + 2 + h]);
            x[i + 2 * h + 1] = _mm256_unpackhi_epi64(y[i + h], y[i + 2 + h]);
        }
    for (int i = 0; i < 4; i++) {
        y[i] = _mm256_permute2x128_si256(x[i], x[i + 4], 0x20);
        y[i + 4] = _mm256_permute2x128_si256(x[i], x[i + 4], 0x31);
    }
    for (int i = 0; i < HALF_LANES; i++) x[i] = y[i];
}

ALWAYS_INLINE void transpose16(I* x) {
    __m256i part[4][HALF_LANES];
    for (int i = 0; i < HALF_LANES; i++) {
        part[0][i] = x[i].low;
        part[1][i] = x[i].high;
        part[2][i] = x[i + HALF_LANES].low;
        part[3][i] = x[i + HALF_LANES].high;
    }
    for (auto& matrix : part) transpose8(matrix);
    for (int i = 0; i < HALF_LANES; i++) {
        x[i] = EACH(part[0][i], part[2][i]);
        x[i + HALF_LANES] = EACH(part[1][i], part[3][i]);
    }
}

ALWAYS_INLINE void transpose_rows(const uint16_t* const* rows, int64_t c, I* to) {
    __m256i part[2][HALF_LANES];
    for (int i = 0; i < LANES; i++)
        part[i / HALF_LANES][i % HALF_LANES] = _mm256_loadu_si256((const __m256i*)(rows[i] + c));
    for (auto& matrix : part) transpose8(matrix);
    for (int i = 0; i < HALF_LANES; i++) to[i] = EACH(part[0][i], part[1][i]);
}

inline V sums16(V* x) {
    auto neighbours = [](V v) {
        return _mm256_castpd_ps(
            _mm256_permute4x64_pd(_mm256_castps_pd(_mm256_hadd_ps(v.low, v.high)), 0xd8));
    };
    for (int n = 8; n; n /= 2)
        for (int i = 0; i < n; i++) x[i] = EACH(neighbours(x[2 * i]), neighbours(x[2 * i + 1]));
    return x[0];
}

class OrderedBf16 {
    __m256i low = _mm256_set1_epi16(-32768), high = low;

    static __m256i ordered(__m256i bits) {
        return _mm256_xor_si256(bits, _mm256_srli_epi16(_mm256_srai_epi16(bits, 15), 1));
    }

  public:
    static constexpr int COUNT = 32;
    OrderedBf16() = default;
    OrderedBf16(const uint16_t* p, int64_t left) {
        uint16_t padded[COUNT];
        if (left < COUNT) {
            for (uint16_t& x : padded) x = 0xffff;  // a NaN, the least
            std::memcpy(padded, p, left * sizeof(uint16_t));
            p = padded;
        }
        low = ordered(_mm256_loadu_si256((const __m256i*)p));
        high = ordered(_mm256_loadu_si256((const __m256i*)p + 1));
    }
    void update_max(const OrderedBf16& other) {
        low = _mm256_max_epi16(low, other.low);
        high = _mm256_max_epi16(high, other.high);
    }
    void store_keys(int16_t* p) const {
        _mm256_storeu_si256((__m256i*)p, low);
        _mm256_storeu_si256((__m256i*)p + 1, high);
    }
    uint32_t at_least(int16_t bar) const {
        const __m256i limit = _mm256_set1_epi16(bar);
        const __m256i below =
            _mm256_packs_epi16(_mm256_cmpgt_epi16(limit, low), _mm256_cmpgt_epi16(limit, high));
        return ~(uint32_t)_mm256_movemask_epi8(_mm256_permute4x64_epi64(below, 0xd8));
    }
};
#undef EACH

}  // namespace

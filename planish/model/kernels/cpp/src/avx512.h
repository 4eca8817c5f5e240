// The names of vectors.h for CPUs with AVX-512: F, BW, VL, DQ and BF16, whose VDPBF16PS does twice
// the multiplications of float32.

#pragma once

#include <immintrin.h>

#include <cstdint>

namespace {

using V = __m512;   // 16 numbers of float32
using H = __m256i;  // 16 numbers of bf16
using I = __m512i;  // 16 words of 32 bits: of two bf16 each, the even one in the lower half
using Tail = __mmask16;
constexpr int LANES = 16;

// Of tiles that multiply rows by vectors: the sums fill the 32 registers beside what is multiplied.
constexpr int TILE_ROWS = 6;
constexpr int tile_vectors(int) { return 4; }  // for so many rows

inline Tail tail(int64_t left) {
    return left >= LANES ? (Tail)0xffff : left > 0 ? (Tail)((1u << left) - 1) : (Tail)0;
}

inline V zero() { return _mm512_setzero_ps(); }
inline V broadcast(float x) { return _mm512_set1_ps(x); }
inline V add(V a, V b) { return _mm512_add_ps(a, b); }
inline V sub(V a, V b) { return _mm512_sub_ps(a, b); }
inline V mul(V a, V b) { return _mm512_mul_ps(a, b); }
inline V div(V a, V b) { return _mm512_div_ps(a, b); }
inline V fma(V a, V b, V c) { return _mm512_fmadd_ps(a, b, c); }
inline V fnma(V a, V b, V c) { return _mm512_fnmadd_ps(a, b, c); }  // c - a b
// Where one is NaN: the second.
inline V max_(V a, V b) { return _mm512_max_ps(a, b); }
inline V min_(V a, V b) { return _mm512_min_ps(a, b); }
inline V round_(V x) {
    return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
inline V ldexp_(V x, V n) { return _mm512_scalef_ps(x, n); }  // x 2^n, n whole
inline V zero_below(V x, V bar, V y) {
    return _mm512_mask_mov_ps(y, _mm512_cmp_ps_mask(x, bar, _CMP_LT_OQ), zero());
}
inline V select(Tail m, V x) { return _mm512_maskz_mov_ps(m, x); }
inline V select(Tail m, V x, V otherwise) { return _mm512_mask_mov_ps(otherwise, m, x); }
// The lanes whose bits are set, lane 0 first; 0 in the others.
inline V select_bits(uint16_t bits, V x) { return _mm512_maskz_mov_ps(bits, x); }
inline __m256 low_half(V x) { return _mm512_castps512_ps256(x); }
inline __m256 high_half(V x) { return _mm512_extractf32x8_ps(x, 1); }

inline V to_float32(H x) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16));
}
inline H to_bf16(V x) {
    __m512i bits = _mm512_castps_si512(x);
    __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    __m512i up = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
    // A NaN must stay one: rounding could carry its bits away.
    __mmask16 nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
    up = _mm512_mask_or_epi32(up, nan, bits, _mm512_set1_epi32(0x400000));
    return _mm512_cvtepi32_epi16(_mm512_srli_epi32(up, 16));
}
// Rounds as `to_bf16` does, in one step for ten, but makes 0 of what is below 2^-126.
ALWAYS_INLINE H to_bf16_fast(V x) { return (H)_mm512_cvtneps_pbh(x); }

inline V load(const float* p) { return _mm512_loadu_ps(p); }
inline V load(const float* p, Tail m) { return _mm512_maskz_loadu_ps(m, p); }
inline V load(const uint16_t* p) { return to_float32(_mm256_loadu_si256((const __m256i*)p)); }
inline V load(const uint16_t* p, Tail m) { return to_float32(_mm256_maskz_loadu_epi16(m, p)); }
inline void store(float* p, V x) { _mm512_storeu_ps(p, x); }
inline void store(float* p, V x, Tail m) { _mm512_mask_storeu_ps(p, m, x); }
inline void store(uint16_t* p, H x) { _mm256_storeu_si256((__m256i*)p, x); }
inline void store(uint16_t* p, V x) { store(p, to_bf16(x)); }
inline void store(uint16_t* p, V x, Tail m) { _mm256_mask_storeu_epi16(p, m, to_bf16(x)); }

inline I zero_words() { return _mm512_setzero_si512(); }
inline I load_words(const void* p) { return _mm512_loadu_si512(p); }
// Of 32 bf16 the first `left`, then zeros.
inline I load_words(const uint16_t* p, int64_t left) {
    return _mm512_maskz_loadu_epi16(left >= 2 * LANES ? ~0u : left > 0 ? (1u << left) - 1 : 0u, p);
}
inline void store_words(void* p, I x) { _mm512_storeu_si512(p, x); }
inline void store_words(void* p, I x, Tail m) { _mm512_mask_storeu_epi32(p, m, x); }
inline void stream_words(void* p, I x) { _mm512_stream_si512((__m512i*)p, x); }
inline I interleave(H even, H odd) {
    return _mm512_or_si512(_mm512_cvtepu16_epi32(even),
                           _mm512_slli_epi32(_mm512_cvtepu16_epi32(odd), 16));
}
// Numbers that lie apart, those of the second beside those of the first.
inline I load_interleaved(const uint16_t* even, Tail m, const uint16_t* odd, Tail n) {
    return interleave(_mm256_maskz_loadu_epi16(m, even), _mm256_maskz_loadu_epi16(n, odd));
}

// Rounds as `to_bf16_fast` does; the odd numbers come beside the even ones.
ALWAYS_INLINE I interleave_as_bf16(V even, V odd) {
    const __m512i order =
        _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6,
                         21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    return _mm512_permutexvar_epi16(order, (__m512i)_mm512_cvtne2ps_pbh(odd, even));
}
// 16 pairs of bytes.
ALWAYS_INLINE void load_pairs(const int8_t* p, V& even, V& odd) {
    const __m512i words = _mm512_cvtepi16_epi32(_mm256_loadu_si256((const __m256i*)p));
    even = _mm512_cvtepi32_ps(_mm512_srai_epi32(_mm512_slli_epi32(words, 24), 24));
    odd = _mm512_cvtepi32_ps(_mm512_srai_epi32(words, 8));
}
// The scales of 16 outputs, each beside itself as the numbers of a pair are.
class PairScales {
    V low, high;

  public:
    ALWAYS_INLINE void load_from(const float* scales) {
        const __m512i twice = _mm512_set_epi32(7, 7, 6, 6, 5, 5, 4, 4, 3, 3, 2, 2, 1, 1, 0, 0);
        const V from = load(scales);
        low = _mm512_permutexvar_ps(twice, from);
        high = _mm512_permutexvar_ps(_mm512_add_epi32(twice, _mm512_set1_epi32(8)), from);
    }
    // 16 pairs of bytes times their scales. Pairs stay side by side, so nothing has to be joined.
    ALWAYS_INLINE I words(const int8_t* p) const {
        auto scaled = [](const int8_t* from, V scale) {
            const __m128i bytes = _mm_loadu_si128((const __m128i*)from);
            return mul(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes)), scale);
        };
        return (I)_mm512_cvtne2ps_pbh(scaled(p + LANES, high), scaled(p, low));
    }
};
// 16 numbers, and the pairs of them that the halves of 16 bytes stand for, the lower half first.
class Table {
    V numbers;

  public:
    explicit Table(const float* from) : numbers(load(from)) {}
    ALWAYS_INLINE void load_pairs(const uint8_t* p, V& even, V& odd) const {
        // The permutation looks only at the lowest four bits of a word.
        const __m512i words = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p));
        even = _mm512_permutexvar_ps(words, numbers);
        odd = _mm512_permutexvar_ps(_mm512_srli_epi32(words, 4), numbers);
    }
};

// Two rows, joined, for C * 16 columns from `c` on.
template <int C>
inline void interleave_rows(const uint16_t* first, const uint16_t* second, int64_t c, I* to) {
    const __m512i low = _mm512_set_epi16(47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40,
                                         8, 39, 7, 38, 6, 37, 5, 36, 4, 35, 3, 34, 2, 33, 1, 32, 0);
    if constexpr (C == 1) {
        const __m512i x = _mm512_castsi256_si512(_mm256_loadu_si256((const __m256i*)(first + c)));
        const __m512i y = _mm512_castsi256_si512(_mm256_loadu_si256((const __m256i*)(second + c)));
        to[0] = _mm512_permutex2var_epi16(x, low, y);
    } else {
        const __m512i high = _mm512_add_epi16(low, _mm512_set1_epi16(16));
        for (int i = 0; i < C; i += 2) {
            const __m512i x = _mm512_loadu_si512(first + c + i * LANES),
                          y = _mm512_loadu_si512(second + c + i * LANES);
            to[i] = _mm512_permutex2var_epi16(x, low, y);
            to[i + 1] = _mm512_permutex2var_epi16(x, high, y);
        }
    }
}

// The same pair, of two bf16, for all lanes.
ALWAYS_INLINE I broadcast_pair(const void* pair) {
    int32_t word;
    __builtin_memcpy(&word, pair, 4);
    return _mm512_set1_epi32(word);
}

// Sums of products, one after another, of pairs in the instruction's own order within each: of R
// rows by W vectors.
template <int R, int W>
class Sums {
    V sums[R][W];

  public:
    ALWAYS_INLINE Sums() {
        for (int r = 0; r < R; r++)
            for (int c = 0; c < W; c++) sums[r][c] = zero();
    }
    ALWAYS_INLINE Sums(const float* from, int64_t stride) {
        for (int r = 0; r < R; r++)
            for (int c = 0; c < W; c++) sums[r][c] = load(from + r * stride + c * LANES);
    }
    // pair_of(row): where its pair is. words(to): puts the vectors' pairs there; it may be called
    // more than once.
    template <class P, class F>
    ALWAYS_INLINE void add(P pair_of, F words) {
        I w[W];
        words(w);
        for (int r = 0; r < R; r++) {
            const I pair = broadcast_pair(pair_of(r));
            for (int c = 0; c < W; c++)
                sums[r][c] = _mm512_dpbf16_ps(sums[r][c], (__m512bh)pair, (__m512bh)w[c]);
        }
    }
    // Of float32: row r's number lies r * stride behind the first one's; the vectors lie side by
    // side.
    ALWAYS_INLINE void add(const float* number, int64_t stride, const float* vectors) {
        V w[W];
        for (int c = 0; c < W; c++) w[c] = load(vectors + c * LANES);
        for (int r = 0; r < R; r++) {
            const V x = broadcast(number[r * stride]);
            for (int c = 0; c < W; c++) sums[r][c] = fma(x, w[c], sums[r][c]);
        }
    }
    // f(row, vector, sums)
    template <class F>
    ALWAYS_INLINE void each(F f) const {
        for (int r = 0; r < R; r++)
            for (int c = 0; c < W; c++) f(r, c, sums[r][c]);
    }
};

// Rows of numbers, `row_stride` apart, to be multiplied with weights: of bf16, a pair of columns
// lies side by side for each of the outputs.
template <class X>
class Operand;
template <>
class Operand<uint16_t> {
    const uint16_t* x;
    int64_t stride;

  public:
    Operand(const uint16_t* x, int64_t row_stride, int64_t, int64_t) : x(x), stride(row_stride) {}

    // Where a row's pair of columns from `column` on is.
    ALWAYS_INLINE const uint16_t* pair(int64_t row, int64_t column) const {
        return x + row * stride + column;
    }

    // Adds the products of rows `row` .. and columns first .. last - 1; the next pair's weights are
    // `step` numbers on.
    template <int R, int W>
    ALWAYS_INLINE void multiply(int64_t row, const uint16_t* weight, int64_t step, int64_t first,
                                int64_t last, Sums<R, W>& sums) const {
        const uint16_t* from = x + row * stride;
        const uint16_t* words = weight + first / 2 * step;
        for (int64_t i = first; i < last; i += 2, words += step)
            sums.add([=](int r) { return from + r * stride + i; },
                     [=](I* to) {
                         for (int c = 0; c < W; c++) to[c] = load_words(words + c * 2 * LANES);
                     });
    }
};

// Each four of N vectors, whose quarters are matrices of four by four words: all of them
// transposed.
template <int N>
ALWAYS_INLINE void transpose_quarters(I* x) {
    I y[N];
    for (int i = 0; i < N; i += 2) {
        y[i] = _mm512_unpacklo_epi32(x[i], x[i + 1]);
        y[i + 1] = _mm512_unpackhi_epi32(x[i], x[i + 1]);
    }
    for (int i = 0; i < N; i += 4)
        for (int h = 0; h < 2; h++) {
            x[i + 2 * h] = _mm512_unpacklo_epi64(y[i + h], y[i + 2 + h]);
            x[i + 2 * h + 1] = _mm512_unpackhi_epi64(y[i + h], y[i + 2 + h]);
        }
}

// Sixteen vectors of words as a matrix, transposed.
ALWAYS_INLINE void transpose16(I* x) {
    I y[LANES];
    transpose_quarters<LANES>(x);
    for (int i = 0; i < 4; i++)
        for (int h = 0; h < 2; h++) {
            y[i + 8 * h] = _mm512_shuffle_i32x4(x[i + 8 * h], x[i + 4 + 8 * h], 0x88);
            y[i + 4 + 8 * h] = _mm512_shuffle_i32x4(x[i + 8 * h], x[i + 4 + 8 * h], 0xdd);
        }
    for (int i = 0; i < 8; i++) {
        x[i] = _mm512_shuffle_i32x4(y[i], y[i + 8], 0x88);
        x[i + 8] = _mm512_shuffle_i32x4(y[i], y[i + 8], 0xdd);
    }
}

// Sixteen elements of each of sixteen rows, transposed: to[i] holds pair i of all.
ALWAYS_INLINE void transpose_rows(const uint16_t* const* rows, int64_t c, I* to) {
    constexpr int HALF_LANES = LANES / 2;
    I x[HALF_LANES];
    for (int i = 0; i < HALF_LANES; i++) {
        const int row = i / 4 * 8 + i % 4;
        const __m256i low = _mm256_loadu_si256((const __m256i*)(rows[row] + c));
        x[i] = _mm512_inserti64x4(_mm512_castsi256_si512(low),
                                  _mm256_loadu_si256((const __m256i*)(rows[row + 4] + c)), 1);
    }
    transpose_quarters<HALF_LANES>(x);
    for (int i = 0; i < 4; i++) {
        to[i] = _mm512_shuffle_i32x4(x[i], x[i + 4], 0x88);
        to[i + 4] = _mm512_shuffle_i32x4(x[i], x[i + 4], 0xdd);
    }
}

// Neighbours of sixteen vectors added up: lane j of the result is the sum over the lanes of x[j],
// by a tree over lanes.
inline V sums16(V* x) {
    const __m512i even =
        _mm512_set_epi32(30, 28, 26, 24, 22, 20, 18, 16, 14, 12, 10, 8, 6, 4, 2, 0);
    const __m512i odd = _mm512_set_epi32(31, 29, 27, 25, 23, 21, 19, 17, 15, 13, 11, 9, 7, 5, 3, 1);
    for (int n = 8; n; n /= 2)
        for (int i = 0; i < n; i++)
            x[i] = _mm512_add_ps(_mm512_permutex2var_ps(x[2 * i], even, x[2 * i + 1]),
                                 _mm512_permutex2var_ps(x[2 * i], odd, x[2 * i + 1]));
    return x[0];
}

// bf16 as whole numbers of the same order: -0 is below 0, and NaNs are beyond the infinities. 32 of
// them.
class OrderedBf16 {
    __m512i x = _mm512_set1_epi16(-32768);

  public:
    static constexpr int COUNT = 32;
    OrderedBf16() = default;  // the least
    // The first `left` from `p` on, then the least.
    OrderedBf16(const uint16_t* p, int64_t left) {
        const __mmask32 mask = left >= COUNT ? (__mmask32)~0u : (__mmask32)((1u << left) - 1);
        const __m512i bits = _mm512_maskz_loadu_epi16(mask, p);
        x = _mm512_mask_mov_epi16(
            x, mask, _mm512_xor_si512(bits, _mm512_srli_epi16(_mm512_srai_epi16(bits, 15), 1)));
    }
    void update_max(const OrderedBf16& other) { x = _mm512_max_epi16(x, other.x); }
    void store_keys(int16_t* p) const { _mm512_storeu_si512(p, x); }
    uint32_t at_least(int16_t bar) const {
        return _mm512_cmpge_epi16_mask(x, _mm512_set1_epi16(bar));
    }
};

}  // namespace

// Sixteen numbers at a time: loads and stores of float32 and bf16, sums over lanes, powers; and
// work shared out among threads.
//
// What depends on the CPU's instructions has one home for each set of them, with the same names
// and, but for the products of pairs, the same bits.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <utility>

#include "buffer.h"
#include "pool.h"

#define ALWAYS_INLINE __attribute__((always_inline)) inline

#ifdef __AVX512F__
#include "avx512.h"
#else
#include "avx2.h"
#endif

namespace {

inline float largest_lane(V x) {
    const __m256 h = _mm256_max_ps(low_half(x), high_half(x));
    __m128 q = _mm_max_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1));
    q = _mm_max_ps(q, _mm_movehl_ps(q, q));
    return _mm_cvtss_f32(_mm_max_ss(q, _mm_movehdup_ps(q)));
}

// Lane 0 + 8, 1 + 9, ...; then halves of halves: one order for every sum over lanes.
inline float sum(V x) {
    const __m256 h = _mm256_add_ps(low_half(x), high_half(x));
    __m128 q = _mm_add_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1));
    q = _mm_add_ps(q, _mm_movehl_ps(q, q));
    return _mm_cvtss_f32(_mm_add_ss(q, _mm_movehdup_ps(q)));
}

// Sums in double, lane by lane.
class DoubleAccumulator {
    __m256d quarter[4] = {_mm256_setzero_pd(), _mm256_setzero_pd(), _mm256_setzero_pd(),
                          _mm256_setzero_pd()};

  public:
    void add(V x) {
        const __m256 low = low_half(x), high = high_half(x);
        quarter[0] = _mm256_add_pd(quarter[0], _mm256_cvtps_pd(_mm256_castps256_ps128(low)));
        quarter[1] = _mm256_add_pd(quarter[1], _mm256_cvtps_pd(_mm256_extractf128_ps(low, 1)));
        quarter[2] = _mm256_add_pd(quarter[2], _mm256_cvtps_pd(_mm256_castps256_ps128(high)));
        quarter[3] = _mm256_add_pd(quarter[3], _mm256_cvtps_pd(_mm256_extractf128_ps(high, 1)));
    }
    // Lane 0 + 8, 1 + 9, ...; these eight in their order.
    double total() const {
        double lanes[8], found = 0;
        _mm256_storeu_pd(lanes, _mm256_add_pd(quarter[0], quarter[2]));
        _mm256_storeu_pd(lanes + 4, _mm256_add_pd(quarter[1], quarter[3]));
        for (double lane : lanes) found += lane;
        return found;
    }
};

// exp(x) within 1 ulp or so, for x <= 88; 0 below -87.3 (Cephes: range reduction by ln 2,
// polynomial of degree 5).
inline V exp_(V x) {
    const V given = x;
    x = min_(broadcast(88.3762626647949f), x);  // a NaN passes through
    V n = round_(mul(x, broadcast(1.44269504088896341f)));
    V r = fnma(n, broadcast(0.693359375f), x);
    r = fnma(n, broadcast(-2.12194440e-4f), r);
    V p = broadcast(1.9875691500e-4f);
    p = fma(p, r, broadcast(1.3981999507e-3f));
    p = fma(p, r, broadcast(8.3334519073e-3f));
    p = fma(p, r, broadcast(4.1665795894e-2f));
    p = fma(p, r, broadcast(1.6666665459e-1f));
    p = fma(p, r, broadcast(5.0000001201e-1f));
    return zero_below(given, broadcast(-87.336544f),
                      ldexp_(add(fma(p, mul(r, r), r), broadcast(1.0f)), n));
}

// 2^x within 1 ulp or so, for x <= 127; 0 from -150 on (Cephes: polynomial of degree 6).
inline V exp2_(V x) {
    x = max_(broadcast(-200.0f), x);  // a NaN passes through
    V n = round_(x);
    V r = sub(x, n);
    V p = broadcast(1.535336188319500e-4f);
    p = fma(p, r, broadcast(1.339887440266574e-3f));
    p = fma(p, r, broadcast(9.618437357674640e-3f));
    p = fma(p, r, broadcast(5.550332471162809e-2f));
    p = fma(p, r, broadcast(2.402264791363012e-1f));
    p = fma(p, r, broadcast(6.931472028550421e-1f));
    return ldexp_(fma(p, r, broadcast(1.0f)), n);
}

inline V sigmoid(V x) { return div(broadcast(1.0f), add(broadcast(1.0f), exp_(sub(zero(), x)))); }

// What sums become: rounded in one step.
inline void store_sums(uint16_t* p, V x) { store(p, to_bf16_fast(x)); }
inline void store_sums(float* p, V x) { store(p, x); }

// to[j * stride + i] = from[i * row + j] for rows i and n columns j, a multiple of 16.
inline void transpose(const float* from, int64_t row, int64_t rows, int64_t n, float* to,
                      int64_t stride) {
    for (int64_t i = 0; i < rows; i += LANES)
        for (int64_t j = 0; j < n; j += LANES) {
            const Tail mask = tail(rows - i);
            I x[LANES];
            for (int r = 0; r < LANES; r++)
                x[r] = i + r < rows ? load_words(from + (i + r) * row + j) : zero_words();
            transpose16(x);
            for (int c = 0; c < LANES; c++) store_words(to + (j + c) * stride + i, x[c], mask);
        }
}

// Of float32, a column of the weights lies side by side for all outputs, and behind it the other
// one of its pair.
template <>
class Operand<float> {
    static constexpr int64_t PREFETCH_COLUMNS = 16;
    const float* x;
    int64_t stride;

  public:
    Operand(const float* x, int64_t row_stride, int64_t, int64_t) : x(x), stride(row_stride) {}

    template <int R, int W>
    ALWAYS_INLINE void multiply(int64_t row, const float* weight, int64_t step, int64_t first,
                                int64_t last, Sums<R, W>& sums) const {
        const float* from = x + row * stride;
        const int64_t column = step / 2;
        weight += first * column;
        for (int64_t i = first; i < last; i++, weight += column) {
            for (int c = 0; c < W; c++)
                _mm_prefetch((const char*)(weight + PREFETCH_COLUMNS * column + c * LANES),
                             _MM_HINT_T0);
            sums.add(from + i, stride, weight);
        }
    }
};

// Calls f(first, last) for chunks of at most `max_chunk` of 0 .. n - 1, on several threads if the
// work is worth waking them. `work` is roughly the number of multiply-adds of all n.
template <class F>
void parallel(int64_t n, int64_t work, int64_t max_chunk, int threads, F f) {
    constexpr int64_t MIN_WORK = 1 << 14, MIN_CHUNK_WORK = 1 << 13;
    if (threads < 2 || work < MIN_WORK || n < 2) return f(0, n);
    AllocationGuard guard;
    ThreadPool::shared().run(
        n, std::max<int64_t>(1, n * MIN_CHUNK_WORK / work), max_chunk, threads,
        [&](int64_t first, int64_t last) { guard.run([&] { f(first, last); }); });
    guard.rethrow();
}
template <class F>
void parallel(int64_t n, int64_t work, int threads, F f) {
    parallel(n, work, n, threads, f);
}

// Calls f(i) for 0 .. n - 1. Threads claim single items, because their costs differ.
template <class F>
void parallel_items(int64_t n, int threads, F f) {
    parallel(n, std::numeric_limits<int64_t>::max(), 1, threads, [&](int64_t i, int64_t last) {
        for (; i < last; i++) f(i);
    });
}

// f(size) with a size from 1 to MAX as a constant of its type.
template <class F, int... BELOW>
inline void with_size(int64_t size, F f, std::integer_sequence<int, BELOW...>) {
    ((size == BELOW + 1 ? f(std::integral_constant<int, BELOW + 1>()) : void()), ...);
}
template <int MAX, class F>
inline void with_size(int64_t size, F f) {
    with_size(size, f, std::make_integer_sequence<int, MAX>());
}

// f(first, size) for tiles of at most MAX of so many rows, as equal as can be.
template <int MAX = TILE_ROWS, class F>
inline void for_row_tiles(int64_t rows, F f) {
    const int64_t tiles = (rows + MAX - 1) / MAX;
    for (int64_t t = 0; t < tiles; t++) {
        const int64_t first = rows * t / tiles, last = rows * (t + 1) / tiles;
        with_size<MAX>(last - first, [&](auto size) { f(first, size); });
    }
}

}  // namespace

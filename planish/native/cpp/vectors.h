// Sixteen numbers at a time: loads and stores of float32 and bf16, sums over lanes, powers; and work shared out among threads.

#pragma once

#include <immintrin.h>
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <limits>

namespace {

using V = __m512;
constexpr int LANES = 16;

inline V zero() { return _mm512_setzero_ps(); }
inline V all(float x) { return _mm512_set1_ps(x); }
inline V fma(V a, V b, V c) { return _mm512_fmadd_ps(a, b, c); }

inline V load(const float* p) { return _mm512_loadu_ps(p); }
inline V load(const uint16_t* p) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16));
}
inline V load(const float* p, __mmask16 m) { return _mm512_maskz_loadu_ps(m, p); }
inline V load(const uint16_t* p, __mmask16 m) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(m, p)), 16));
}
inline void store(float* p, V x) { _mm512_storeu_ps(p, x); }
inline __m256i rounded(V x) {
    __m512i bits = _mm512_castps_si512(x);
    __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    __m512i up = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
    // A NaN must stay one: rounding could carry its bits away.
    __mmask16 nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
    up = _mm512_mask_or_epi32(up, nan, bits, _mm512_set1_epi32(0x400000));
    return _mm512_cvtepi32_epi16(_mm512_srli_epi32(up, 16));
}
inline void store(uint16_t* p, V x) { _mm256_storeu_si256((__m256i*)p, rounded(x)); }
inline void store(float* p, V x, __mmask16 m) { _mm512_mask_storeu_ps(p, m, x); }
inline void store(uint16_t* p, V x, __mmask16 m) { _mm256_mask_storeu_epi16(p, m, rounded(x)); }

// Lane 0 + 8, 1 + 9, ...; then halves of halves: one order for every sum over lanes.
inline float sum(V x) {
    __m256 h = _mm256_add_ps(_mm512_castps512_ps256(x), _mm512_extractf32x8_ps(x, 1));
    __m128 q = _mm_add_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1));
    q = _mm_add_ps(q, _mm_movehl_ps(q, q));
    return _mm_cvtss_f32(_mm_add_ss(q, _mm_movehdup_ps(q)));
}

// exp(x) within 1 ulp or so, for x <= 88; 0 below -87.3 (Cephes: range reduction by ln 2, polynomial of degree 5).
inline V exp_(V x) {
    const V lowest = all(-87.336544f);
    __mmask16 gone = _mm512_cmp_ps_mask(x, lowest, _CMP_LT_OQ);
    x = _mm512_min_ps(all(88.3762626647949f), x);  // min(a, NaN) is the second: a NaN passes through
    V n = _mm512_roundscale_ps(_mm512_mul_ps(x, all(1.44269504088896341f)), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    V r = _mm512_fnmadd_ps(n, all(0.693359375f), x);
    r = _mm512_fnmadd_ps(n, all(-2.12194440e-4f), r);
    V p = all(1.9875691500e-4f);
    p = fma(p, r, all(1.3981999507e-3f));
    p = fma(p, r, all(8.3334519073e-3f));
    p = fma(p, r, all(4.1665795894e-2f));
    p = fma(p, r, all(1.6666665459e-1f));
    p = fma(p, r, all(5.0000001201e-1f));
    V y = _mm512_add_ps(fma(p, _mm512_mul_ps(r, r), r), all(1.0f));
    y = _mm512_scalef_ps(y, n);
    return _mm512_mask_mov_ps(y, gone, zero());
}

// 2^x within 1 ulp or so, for x <= 127; 0 from -150 on (Cephes: polynomial of degree 6).
inline V exp2_(V x) {
    x = _mm512_max_ps(all(-200.0f), x);  // max(a, NaN) is the second: a NaN passes through
    V n = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    V r = _mm512_sub_ps(x, n);
    V p = all(1.535336188319500e-4f);
    p = fma(p, r, all(1.339887440266574e-3f));
    p = fma(p, r, all(9.618437357674640e-3f));
    p = fma(p, r, all(5.550332471162809e-2f));
    p = fma(p, r, all(2.402264791363012e-1f));
    p = fma(p, r, all(6.931472028550421e-1f));
    return _mm512_scalef_ps(fma(p, r, all(1.0f)), n);
}

inline V sigmoid(V x) { return _mm512_div_ps(all(1.0f), _mm512_add_ps(all(1.0f), exp_(_mm512_sub_ps(zero(), x)))); }

inline __mmask16 tail(int64_t left) { return left >= LANES ? (__mmask16)0xffff : (__mmask16)((1u << left) - 1); }

// f(first, last) over 0 .. n - 1, by threads if the work is worth waking them.
template <class F>
void parallel(int64_t n, int64_t work, int threads, F f) {
    if (threads < 2 || work < (1 << 14) || n < 2) return f(0, n);
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int t = 0; t < threads; t++) {
        int64_t a = n * t / threads, b = n * (t + 1) / threads;
        if (a < b) f(a, b);
    }
}

// Sixteen vectors of 32-bit entries as a matrix, turned.
__attribute__((always_inline)) inline void turn16(__m512i* x) {
    __m512i y[LANES];
    for (int i = 0; i < LANES; i += 2) {
        y[i] = _mm512_unpacklo_epi32(x[i], x[i + 1]);
        y[i + 1] = _mm512_unpackhi_epi32(x[i], x[i + 1]);
    }
    for (int i = 0; i < LANES; i += 4)
        for (int h = 0; h < 2; h++) {
            x[i + 2 * h] = _mm512_unpacklo_epi64(y[i + h], y[i + 2 + h]);
            x[i + 2 * h + 1] = _mm512_unpackhi_epi64(y[i + h], y[i + 2 + h]);
        }
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

// Functions that multiply pairs of bf16 (VDPBF16PS): twice the multiplications of float32 an instruction. Called where the CPU has it.
#define BF16 __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,fma,avx512bf16")))
inline bool has_pairs() {
    static const bool has = __builtin_cpu_supports("avx512bf16");
    return has;
}

// Memory that grows, from the beginning of a cache line on: vectors that lie across two of them are read half as fast.
class Room {
    void* at = nullptr;
    int64_t bytes = 0;

  public:
    Room() = default;
    Room(const Room&) = delete;
    ~Room() { std::free(at); }
    template <class X>
    X* of(int64_t n) {
        const int64_t wanted = (n * sizeof(X) + 63) / 64 * 64;
        if (bytes < wanted) {
            std::free(at);
            at = std::aligned_alloc(64, bytes = wanted);
        }
        return (X*)at;
    }
};

}  // namespace

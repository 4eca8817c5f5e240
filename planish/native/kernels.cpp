// Kernels for CPUs with AVX-512: norms, rotations, SwiGLU, attention, products with bf16 weights. Every function has a twin in torch,
// which the tests compare.
//
// A row's outcome has bits that depend on that row alone: not on the number of rows, nor on how they are cut into blocks, nor on the
// number of threads. So every sum has one order, written below where it is made, and every multiply-add is an explicit instruction.
//
// bf16 is uint16_t here, widened exactly, rounded to nearest even. All rows are contiguous unless a stride is given.

#include <cpuid.h>
#include <immintrin.h>
#include <sys/mman.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

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

// Norm of rows [T, D]: sum of squares lane by lane, then over lanes. y (any) is added to x first if given, and x keeps the sum in x_out.
template <class Y, class O>
void rms_norm(const float* x, const Y* y, const float* w, float eps, float* x_out, O* out, float* scale, int64_t rows, int64_t d,
              int threads) {
    parallel(rows, rows * d, threads, [=](int64_t a, int64_t b) {
        for (int64_t t = a; t < b; t++) {
            const float* xs = x + t * d;
            float* xo = x_out ? x_out + t * d : nullptr;
            V s = zero();
            for (int64_t i = 0; i < d; i += LANES) {
                __mmask16 m = tail(d - i);
                V v = load(xs + i, m);
                if (y) {
                    v = _mm512_add_ps(v, load(y + t * d + i, m));
                    store(xo + i, v, m);
                }
                s = fma(v, v, s);
            }
            float k = 1.0f / std::sqrt(sum(s) / (float)d + eps);
            if (scale) scale[t] = k;
            const float* from = y ? xo : xs;
            for (int64_t i = 0; i < d; i += LANES) {
                __mmask16 m = tail(d - i);
                store(out + t * d + i, _mm512_mul_ps(_mm512_mul_ps(load(from + i, m), all(k)), load(w + i, m)), m);
            }
        }
    });
}

// d/dx of the norm: scale * (g w - x * scale^2 * mean(g w x)), added to `add` if given.
template <class G>
void rms_norm_backward(const G* g, const float* x, const float* w, const float* scale, const float* add, float* out, int64_t rows,
                       int64_t d, int threads) {
    parallel(rows, rows * d, threads, [=](int64_t a, int64_t b) {
        for (int64_t t = a; t < b; t++) {
            V s = zero();
            for (int64_t i = 0; i < d; i += LANES) {
                __mmask16 m = tail(d - i);
                s = fma(_mm512_mul_ps(load(g + t * d + i, m), load(w + i, m)), load(x + t * d + i, m), s);
            }
            float k = scale[t], inner = sum(s) / (float)d * k * k;
            for (int64_t i = 0; i < d; i += LANES) {
                __mmask16 m = tail(d - i);
                V gw = _mm512_mul_ps(load(g + t * d + i, m), load(w + i, m));
                V v = _mm512_mul_ps(_mm512_fnmadd_ps(load(x + t * d + i, m), all(inner), gw), all(k));
                if (add) v = _mm512_add_ps(v, load(add + t * d + i, m));
                store(out + t * d + i, v, m);
            }
        }
    });
}

// Pairs (x[e], x[e + E/2]) turned by their row's angles; cos, sin [T, E/2]; `sign` -1 turns back. Rows of x are x_stride apart.
template <class X>
void rotate(const X* x, int64_t x_stride, const float* cos, const float* sin, float sign, X* out, int64_t rows, int64_t heads, int64_t e,
            int threads) {
    int64_t half = e / 2;
    parallel(rows, rows * heads * e, threads, [=](int64_t a, int64_t b) {
        for (int64_t t = a; t < b; t++)
            for (int64_t h = 0; h < heads; h++) {
                const X* from = x + t * x_stride + h * e;
                X* to = out + (t * heads + h) * e;
                for (int64_t i = 0; i < half; i += LANES) {
                    __mmask16 m = tail(half - i);
                    V c = load(cos + t * half + i, m), s = _mm512_mul_ps(load(sin + t * half + i, m), all(sign));
                    V p = load(from + i, m), q = load(from + half + i, m);
                    store(to + i, _mm512_fnmadd_ps(q, s, _mm512_mul_ps(p, c)), m);
                    store(to + half + i, fma(p, s, _mm512_mul_ps(q, c)), m);
                }
            }
    });
}

// silu(gate) * up; the two lie side by side in a row: [T, 2 * d].
template <class X>
void swiglu(const X* gate_up, X* out, int64_t rows, int64_t d, int threads) {
    parallel(rows, rows * d * 4, threads, [=](int64_t a, int64_t b) {
        for (int64_t t = a; t < b; t++)
            for (int64_t i = 0; i < d; i += LANES) {
                __mmask16 m = tail(d - i);
                V g = load(gate_up + t * 2 * d + i, m), u = load(gate_up + t * 2 * d + d + i, m);
                store(out + t * d + i, _mm512_mul_ps(_mm512_mul_ps(g, sigmoid(g)), u), m);
            }
    });
}

template <class X>
void swiglu_backward(const X* grad, const X* gate_up, X* out, int64_t rows, int64_t d, int threads) {
    parallel(rows, rows * d * 4, threads, [=](int64_t a, int64_t b) {
        for (int64_t t = a; t < b; t++)
            for (int64_t i = 0; i < d; i += LANES) {
                __mmask16 m = tail(d - i);
                V g = load(gate_up + t * 2 * d + i, m), u = load(gate_up + t * 2 * d + d + i, m);
                V dy = load(grad + t * d + i, m), s = sigmoid(g);
                V slope = fma(_mm512_mul_ps(g, s), _mm512_sub_ps(all(1.0f), s), s);  // silu' = s + g s (1 - s)
                store(out + t * 2 * d + i, _mm512_mul_ps(_mm512_mul_ps(dy, u), slope), m);
                store(out + t * 2 * d + d + i, _mm512_mul_ps(dy, _mm512_mul_ps(g, s)), m);
            }
    });
}

// ---------------------------------------------------------------------------------------------------------------- the head

// A row of logits in float32: widened, with exact values in the place of some, divided by a temperature.
template <class X>
inline void scaled_row(const X* from, const int64_t* tokens, const float* exact, int64_t k, float temperature, float* to, int64_t v) {
    V t = all(temperature);
    for (int64_t i = 0; i < v; i += LANES) {
        __mmask16 m = tail(v - i);
        store(to + i, _mm512_div_ps(load(from + i, m), t), m);
    }
    for (int64_t i = 0; i < k; i++) to[tokens[i]] = exact[i] / temperature;
}

// log of the sum of exp(row), which becomes exp(row - its largest entry). Runs of 128 entries are summed in float32 lane by lane, runs in
// double, lanes last.
inline float log_sum(float* row, int64_t v) {
    V top = all(-std::numeric_limits<float>::infinity());
    for (int64_t i = 0; i < v; i += LANES) {
        __mmask16 m = tail(v - i);
        top = _mm512_mask_max_ps(top, m, load(row + i, m), top);
    }
    const float peak = _mm512_reduce_max_ps(top);
    __m512d low = _mm512_setzero_pd(), high = _mm512_setzero_pd();
    for (int64_t first = 0; first < v; first += 128) {
        V run = zero();
        for (int64_t i = first; i < std::min(first + 128, v); i += LANES) {
            __mmask16 m = tail(v - i);
            V x = exp_(_mm512_sub_ps(load(row + i, m), all(peak)));
            store(row + i, x, m);
            run = _mm512_add_ps(run, _mm512_maskz_mov_ps(m, x));
        }
        low = _mm512_add_pd(low, _mm512_cvtps_pd(_mm512_castps512_ps256(run)));
        high = _mm512_add_pd(high, _mm512_cvtps_pd(_mm512_extractf32x8_ps(run, 1)));
    }
    double lanes[8], total = 0;
    _mm512_storeu_pd(lanes, _mm512_add_pd(low, high));
    for (double lane : lanes) total += lane;
    return (float)(peak + std::log(total));
}

// Each row's log-sum-exp; `weights` [R, v], if given, takes exp(row - its largest entry), and may be the logits themselves.
template <class X>
void normalizers(const X* logits, const int64_t* tokens, const float* exact, int64_t k, const float* temperature, float* weights, float* out,
                 int64_t rows, int64_t v, int threads) {
    parallel(rows, rows * v, threads, [=](int64_t a, int64_t b) {
        std::vector<float> room(weights ? 0 : v);
        for (int64_t r = a; r < b; r++) {
            float* row = weights ? weights + r * v : room.data();
            scaled_row(logits + r * v, tokens + r * k, exact + r * k, k, temperature[r], row, v);
            out[r] = log_sum(row, v);
        }
    });
}

// Logits become the gradient of the sum of (pair gradient * log-softmax at the pair's target): the pairs of row r are first[r] .. first[r + 1].
template <class X>
void normalizers_backward(X* logits, const int64_t* tokens, const float* exact, int64_t k, float temperature, const float* log_total,
                          const int64_t* first, const int64_t* targets, const float* grads, int64_t rows, int64_t v, int threads) {
    parallel(rows, rows * v, threads, [=](int64_t a, int64_t b) {
        std::vector<float> room(v);
        float* row = room.data();
        for (int64_t r = a; r < b; r++) {
            scaled_row(logits + r * v, tokens + r * k, exact + r * k, k, temperature, row, v);
            float total = 0;
            for (int64_t p = first[r]; p < first[r + 1]; p++) total += grads[p];
            for (int64_t i = 0; i < v; i += LANES) {
                __mmask16 m = tail(v - i);
                store(row + i, _mm512_mul_ps(exp_(_mm512_sub_ps(load(row + i, m), all(log_total[r]))), all(-total)), m);
            }
            for (int64_t p = first[r]; p < first[r + 1]; p++) row[targets[p]] += grads[p];
            for (int64_t i = 0; i < v; i += LANES) store(logits + r * v + i, load(row + i, tail(v - i)), tail(v - i));
        }
    });
}

// ---------------------------------------------------------------------------------------------------------------- attention

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

// Sixteen vectors of 32-bit entries as a matrix, turned.
inline void turn16(__m512i* x) {
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

// Dot products of bf16 where the CPU multiplies pairs (VDPBF16PS): one pair of elements after another, in one sum, whatever the number of
// rows. Twice the multiplications of float32 an instruction, and no sums over lanes.
#define BF16 __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,fma,avx512bf16")))
inline bool has_pairs() {
    static const bool has = __builtin_cpu_supports("avx512bf16");
    return has;
}

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

struct Scratch {
    std::vector<float> q, s, o, g, d, stats, k, v;
    std::vector<uint16_t> narrow_q, narrow_g;
    template <class X>
    X* of(std::vector<X>& x, int64_t n) {
        if ((int64_t)x.size() < n) x.resize(n);
        return x.data();
    }
};

// Rows of one side of dot products: in float32, or also as the bf16 they came as, where pairs are multiplied.
struct Left {
    const float* wide;  // times `scale`
    const uint16_t* narrow;
    int64_t e;
    float scale;
};

// out[i * stride + j] = scale * dot(row first + i, key_j) for `rows` rows and a tile of n keys, whose room takes KEYS * E floats.
template <class X>
void tile_dots(const Left& left, int64_t first, int64_t rows, const X* const* keys, int64_t n, float* room, float* out, int64_t stride) {
    if constexpr (sizeof(X) == 2)
        if (left.narrow) {
            turned(keys, n, left.e, (uint32_t*)room);
            const uint16_t* q = left.narrow + first * left.e;
            switch ((n + 15) / 16) {
                case 1: return pair_dots<1>(q, rows, left.e, (uint32_t*)room, left.scale, out, stride);
                case 2: return pair_dots<2>(q, rows, left.e, (uint32_t*)room, left.scale, out, stride);
                case 3: return pair_dots<3>(q, rows, left.e, (uint32_t*)room, left.scale, out, stride);
                default: return pair_dots<4>(q, rows, left.e, (uint32_t*)room, left.scale, out, stride);
            }
        }
    const float* wide[KEYS];
    const float* const* there = widened(keys, n, left.e, room, wide);
    for (int64_t j = 0; j < n; j += 16) dots(left.wide + first * left.e, rows, left.e, there + j, out + j, stride);
}

struct Attention {
    int64_t heads, group, e;
    float scale;
    const Block* blocks;
    const Range* ranges;
    const int64_t* rows;
    const int64_t* visible;
    const Range* own;  // one for each entry, behind the shared positions; or null
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

// The same rows as a side of dot products.
template <class X>
Left left_side(const Attention& a, const Block& b, int64_t head, const X* x, float scale, const float* wide, Scratch& scratch,
               std::vector<uint16_t>& room) {
    if constexpr (sizeof(X) == 2)
        if (has_pairs()) {
            uint16_t* to = scratch.of(room, b.count * a.group * a.e);
            for (int64_t r = 0; r < b.count; r++)
                std::memcpy(to + r * a.group * a.e, x + (a.rows[b.first + r] * a.heads + head) * a.group * a.e, 2 * a.group * a.e);
            return {wide, to, a.e, scale};
        }
    return {wide, nullptr, a.e, scale};
}

// weights[0 .. n) become exp(w - peak) and their sum is returned: lane by lane, then over lanes. n is a multiple of 16.
inline float exponentials(float* w, int64_t n, float peak) {
    V total = zero();
    for (int64_t j = 0; j < n; j += LANES) {
        V x = exp_(_mm512_sub_ps(load(w + j), all(peak)));
        store(w + j, x);
        total = _mm512_add_ps(total, x);
    }
    return sum(total);
}

inline float largest(const float* w, int64_t n) {
    V top = all(-std::numeric_limits<float>::infinity());
    for (int64_t j = 0; j < n; j += LANES) top = _mm512_max_ps(load(w + j), top);
    return _mm512_reduce_max_ps(top);
}

inline void mask_from(float* s, int64_t first, int64_t n) {
    for (int64_t j = std::max<int64_t>(first, 0); j < n; j++) s[j] = -std::numeric_limits<float>::infinity();
}

template <class X>
void attend_block(const Attention& a, const Block& b, int64_t head, const X* q, X* out, float* lse, Scratch& scratch) {
    const int64_t m = b.count * a.group, e = a.e;
    int64_t shared = 0, own = 0;
    for (int64_t i = 0; i < b.ranges; i++) shared += a.ranges[b.first_range + i].count;
    if (a.own)
        for (int64_t r = 0; r < b.count; r++) own = std::max(own, a.own[b.first + r].count);
    const int64_t shared_width = (shared + 15) / 16 * 16, width = shared_width + (own + 15) / 16 * 16;
    float* queries = scratch.of(scratch.q, m * e);
    float* s = scratch.of(scratch.s, m * width);
    float* o = scratch.of(scratch.o, m * e);
    if (sizeof(X) == 4 || !has_pairs()) gather(a, b, head, q, a.scale, queries);
    const Left left = left_side(a, b, head, q, a.scale, queries, scratch, scratch.narrow_q);
    std::fill(o, o + m * e, 0.0f);
    const X *k[KEYS], *v[KEYS];
    const float* wide[KEYS];
    float* room = scratch.of(scratch.k, KEYS * e);
    int64_t at = 0;
    for (Walk<X> walk(a.ranges + b.first_range, b.ranges); int64_t n = walk.next(head, k, v); at += n)
        tile_dots(left, 0, m, k, n, room, s + at, width);
    for (int64_t r = 0; r < b.count; r++) {
        for (int64_t g = 0; g < a.group; g++) mask_from(s + (r * a.group + g) * width, a.visible[b.first + r], shared_width);
        if (!own) continue;
        int64_t first = shared_width;
        const Range& mine = a.own[b.first + r];
        for (Walk<X> walk(&mine, mine.count > 0); int64_t n = walk.next(head, k, v); first += n)
            tile_dots(left, r * a.group, a.group, k, n, room, s + r * a.group * width + first, width);
        for (int64_t g = 0; g < a.group; g++) mask_from(s + (r * a.group + g) * width + shared_width, mine.count, width - shared_width);
    }
    float* totals = scratch.of(scratch.stats, 2 * m);
    for (int64_t i = 0; i < m; i++) {
        float peak = largest(s + i * width, width);
        if (!(peak > -std::numeric_limits<float>::infinity())) peak = std::isnan(peak) ? peak : 0.0f;
        totals[i] = exponentials(s + i * width, width, peak);
        totals[m + i] = peak;
    }
    at = 0;
    for (Walk<X> walk(a.ranges + b.first_range, b.ranges); int64_t n = walk.next(head, k, v); at += n)
        add_weighted(s + at, width, m, widened(v, n, e, room, wide), n, o, e);
    if (own)
        for (int64_t r = 0; r < b.count; r++) {
            int64_t first = shared_width;
            const Range& mine = a.own[b.first + r];
            for (Walk<X> walk(&mine, mine.count > 0); int64_t n = walk.next(head, k, v); first += n)
                add_weighted(s + r * a.group * width + first, width, a.group, widened(v, n, e, room, wide), n, o + r * a.group * e, e);
        }
    for (int64_t i = 0; i < m; i++) {
        int64_t row = a.rows[b.first + i / a.group] * a.heads * a.group + head * a.group + i % a.group;
        V inverse = all(1.0f / totals[i]);
        for (int64_t c = 0; c < e; c += LANES) store(out + row * e + c, _mm512_mul_ps(load(o + i * e + c), inverse));
        if (lse) lse[row] = totals[m + i] + std::log(totals[i]);
    }
}

template <class X>
void attend(const Attention& a, int64_t n_blocks, const X* q, X* out, float* lse, int threads) {
#pragma omp parallel num_threads(threads) if (threads > 1 && n_blocks * a.heads > 1)
    {
        Scratch scratch;
#pragma omp for schedule(dynamic, 1)
        for (int64_t item = 0; item < n_blocks * a.heads; item++)
            attend_block(a, a.blocks[item / a.heads], item % a.heads, q, out, lse, scratch);
    }
}

// to[j * stride + i] = from[i * KEYS + j] for rows i and n columns j, a multiple of 16.
inline void turn(const float* from, int64_t rows, int64_t n, float* to, int64_t stride) {
    for (int64_t i = 0; i < rows; i += LANES)
        for (int64_t j = 0; j < n; j += LANES) {
            const __mmask16 there = tail(rows - i);
            __m512i x[LANES];
            for (int r = 0; r < LANES; r++)
                x[r] = i + r < rows ? _mm512_loadu_si512(from + (i + r) * KEYS + j) : _mm512_setzero_si512();
            turn16(x);
            for (int c = 0; c < LANES; c++) _mm512_mask_storeu_epi32(to + (j + c) * stride + i, there, x[c]);
        }
}

// Gradients of one block and head: those of its queries are written, those of keys and values added to rows of [T, Hkv, E].
template <class X>
void attend_block_backward(const Attention& a, const Block& b, int64_t head, const X* grad, const X* q, const X* out, const float* lse,
                           const X* k0, X* grad_q, float* grad_k, float* grad_v, Scratch& scratch) {
    const int64_t m = b.count * a.group, e = a.e;
    float* queries = scratch.of(scratch.q, m * e);
    float* g = scratch.of(scratch.g, m * e);
    float* s = scratch.of(scratch.s, 2 * m * KEYS);
    float* ds = s + m * KEYS;
    float* dq = scratch.of(scratch.o, m * e);
    float* column = scratch.of(scratch.d, 2 * m * KEYS);
    float* stats = scratch.of(scratch.stats, 2 * m);
    std::vector<const float*> query_rows(m), grad_rows(m);
    gather(a, b, head, q, a.scale, queries);
    gather(a, b, head, grad, 1.0f, g);
    const Left left_q = left_side(a, b, head, q, a.scale, queries, scratch, scratch.narrow_q);
    const Left left_g = left_side(a, b, head, grad, 1.0f, g, scratch, scratch.narrow_g);
    std::fill(dq, dq + m * e, 0.0f);
    for (int64_t i = 0; i < m; i++) {
        int64_t row = a.rows[b.first + i / a.group] * a.heads * a.group + head * a.group + i % a.group;
        V inner = zero();
        for (int64_t c = 0; c < e; c += LANES) inner = fma(load(g + i * e + c), load(out + row * e + c), inner);
        stats[i] = lse[row];
        stats[m + i] = sum(inner);
        query_rows[i] = queries + i * e;
        grad_rows[i] = g + i * e;
    }
    const X *k[KEYS], *v[KEYS];
    const float* wide[KEYS];
    float *room_k = scratch.of(scratch.k, KEYS * e), *room = scratch.of(scratch.v, KEYS * e);
    int64_t at = 0;
    for (Walk<X> walk(a.ranges + b.first_range, b.ranges); int64_t n = walk.next(head, k, v); at += n) {
        const int64_t padded = (n + 15) / 16 * 16;
        tile_dots(left_q, 0, m, k, n, room, s, KEYS);
        tile_dots(left_g, 0, m, v, n, room, ds, KEYS);
        const float* const* keys = widened(k, n, e, room_k, wide);
        int64_t first = m;  // queries before it see nothing of this tile
        for (int64_t i = m; i-- > 0;) {
            int64_t seen = a.visible[b.first + i / a.group] - at;
            if (seen <= 0) break;
            first = i;
            mask_from(s + i * KEYS, seen, padded);
            for (int64_t j = 0; j < padded; j += LANES) {
                V p = exp_(_mm512_sub_ps(load(s + i * KEYS + j), all(stats[i])));
                p = _mm512_maskz_mov_ps(tail(n - j), p);
                store(s + i * KEYS + j, p);
                store(ds + i * KEYS + j, _mm512_mul_ps(p, _mm512_sub_ps(load(ds + i * KEYS + j), all(stats[m + i]))));
            }
        }
        const int64_t live = m - first;
        if (!live) continue;
        add_weighted(ds + first * KEYS, KEYS, live, keys, n, dq + first * e, e);
        // Sums over queries: the tile's weights turned, so that a key's lie in a row.
        turn(s + first * KEYS, live, padded, column, m);
        turn(ds + first * KEYS, live, padded, column + KEYS * m, m);
        for (int64_t j = 0; j < n;) {
            // Neighbouring keys of one range are neighbours in the gradients too; runs of them share the loads of the queries.
            int64_t run = 1;
            const int64_t row_size = a.heads * e;
            while (j + run < n && k[j + run] == k[j + run - 1] + row_size) run++;
            const int64_t offset = k[j] - k0;
            for (int64_t c = 0; c < e;) {
                const int64_t wide = e - c >= 64 ? 64 : 16;
                for (int64_t part = 0; part < live; part += KEYS) {
                    const float *qs[KEYS], *gs[KEYS];
                    const int64_t take = std::min<int64_t>(KEYS, live - part);
                    for (int64_t i = 0; i < take; i++) qs[i] = query_rows[first + part + i] + c, gs[i] = grad_rows[first + part + i] + c;
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
        int64_t row = a.rows[b.first + i / a.group] * a.heads * a.group + head * a.group + i % a.group;
        for (int64_t c = 0; c < e; c += LANES) store(grad_q + row * e + c, _mm512_mul_ps(load(dq + i * e + c), all(a.scale)));
    }
}

// `parts` runs of blocks, each with sums of its own for keys and values [parts, T, Hkv, E], added up in their order: so bits do not
// depend on the number of threads.
template <class X>
void attend_backward(const Attention& a, const int64_t* part_ends, int64_t parts, const X* grad, const X* q, const X* out,
                     const float* lse, const X* k0, X* grad_q, X* grad_k, X* grad_v, float* sums, int64_t size, int threads) {
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
        Scratch scratch;
#pragma omp for schedule(dynamic, 1)
        for (int64_t item = 0; item < parts * a.heads; item++) {
            int64_t part = item / a.heads, head = item % a.heads;
            float* gk = sums + part * 2 * size;
            for (int64_t b = part ? part_ends[part - 1] : 0; b < part_ends[part]; b++)
                attend_block_backward(a, a.blocks[b], head, grad, q, out, lse, k0, grad_q, gk, gk + size, scratch);
        }
#pragma omp for schedule(static)
        for (int64_t i = 0; i < size; i += LANES) {
            V gk = zero(), gv = zero();
            for (int64_t p = 0; p < parts; p++) {
                gk = _mm512_add_ps(gk, load(sums + p * 2 * size + i));
                gv = _mm512_add_ps(gv, load(sums + p * 2 * size + size + i));
            }
            store(grad_k + i, gk);
            store(grad_v + i, gv);
        }
    }
}

// New keys and values [T, H, E], whose rows lie apart, to the last position of each entry's own range.
template <class X>
void keep(const Range* own, const int64_t* rows, int64_t n, const X* k, int64_t k_stride, const X* v, int64_t v_stride, int64_t heads,
          int64_t e) {
    for (int64_t i = 0; i < n; i++)
        for (int64_t h = 0; h < heads; h++) {
            int64_t offset = (own[i].count - 1) * own[i].row + h * own[i].head;
            for (int64_t c = 0; c < e; c += LANES) {
                store((X*)own[i].k + offset + c, load(k + rows[i] * k_stride + h * e + c));
                store((X*)own[i].v + offset + c, load(v + rows[i] * v_stride + h * e + c));
            }
        }
}

// ------------------------------------------------------------------------------------------------------- products with bf16 weights

// Weights are [N, K] in panels of 64 outputs, [N/64][K/2][64][2], so that a pair of columns meets 16 outputs in one instruction; what the
// last panel has too many is 0. Of an output, pairs of columns are added one after another, in the instruction's own order within a pair,
// a fresh sum for each `SUMMED` columns; then these sums in their order, then the bias.
constexpr int64_t PANEL = 64, HALF = PANEL / 2, SUMMED = 512;
constexpr int TILE_ROWS = 6;                  // by 4 vectors of outputs: 24 sums, and 4 vectors of weights, fill 28 of 32 registers
constexpr int64_t CACHED_INPUTS = 1 << 18;  // numbers of x that stay in the second cache, beside a panel

void pack_panels(const uint16_t* weight, uint16_t* panels, int64_t n, int64_t k, int threads) {
    parallel((n + PANEL - 1) / PANEL, n * k, threads, [=](int64_t a, int64_t b) {
        for (int64_t p = a; p < b; p++)
            for (int64_t i = 0; i < k; i += 2)
                for (int64_t j = 0; j < PANEL; j++) {
                    int32_t pair = 0;
                    if (p * PANEL + j < n) std::memcpy(&pair, weight + (p * PANEL + j) * k + i, 4);
                    std::memcpy(panels + (p * k + i) * PANEL + j * 2, &pair, 4);
                }
    });
}

// Inputs and outputs of a product, whose rows lie apart. What is added last: a bias (stride 0), rows like those of the output, or nothing.
struct Rows {
    const uint16_t* x;
    int64_t x_stride;
    const uint16_t* addend;
    int64_t addend_stride;
    uint16_t* out;
    int64_t out_stride;

    Rows from(int64_t r) const {
        return {x + r * x_stride, x_stride, addend ? addend + r * addend_stride : nullptr, addend_stride, out + r * out_stride, out_stride};
    }
    Rows at(int64_t c) const { return {x, x_stride, addend ? addend + c : nullptr, addend_stride, out + c, out_stride}; }
};

// R rows by W vectors of outputs.
template <int R, int W>
BF16 void product_tile(const uint16_t* weight, const Rows& rows, int64_t k) {
    V total[R][W];
    for (int64_t first = 0; first < k; first += SUMMED) {
        V acc[R][W];
        for (int r = 0; r < R; r++)
            for (int c = 0; c < W; c++) acc[r][c] = zero();
        const int64_t last = std::min(k, first + SUMMED);
        for (int64_t i = first; i < last; i += 2) {
            __m512bh w[W];
            for (int c = 0; c < W; c++) w[c] = (__m512bh)_mm512_loadu_si512(weight + i * PANEL + c * 2 * LANES);
            for (int r = 0; r < R; r++) {
                int32_t pair;
                std::memcpy(&pair, rows.x + r * rows.x_stride + i, 4);
                for (int c = 0; c < W; c++) acc[r][c] = _mm512_dpbf16_ps(acc[r][c], (__m512bh)_mm512_set1_epi32(pair), w[c]);
            }
        }
        for (int r = 0; r < R; r++)
            for (int c = 0; c < W; c++) total[r][c] = first ? _mm512_add_ps(total[r][c], acc[r][c]) : acc[r][c];
    }
    for (int r = 0; r < R; r++)
        for (int c = 0; c < W; c++)
            store(rows.out + r * rows.out_stride + c * LANES,
                  rows.addend ? _mm512_add_ps(total[r][c], load(rows.addend + r * rows.addend_stride + c * LANES)) : total[r][c]);
}

template <int W>
void product_rows(const uint16_t* weight, const Rows& rows, int64_t count, int64_t k) {
    using Tile = void (*)(const uint16_t*, const Rows&, int64_t);
    constexpr Tile tiles[TILE_ROWS] = {product_tile<1, W>, product_tile<2, W>, product_tile<3, W>,
                                       product_tile<4, W>, product_tile<5, W>, product_tile<6, W>};
    const int64_t groups = (count + TILE_ROWS - 1) / TILE_ROWS;
    for (int64_t g = 0; g < groups; g++) {
        const int64_t first = count * g / groups, last = count * (g + 1) / groups;
        tiles[last - first - 1](weight, rows.from(first), k);
    }
}

// All n outputs, a multiple of HALF, of `count` rows.
void product_part(const uint16_t* panels, const Rows& rows, int64_t count, int64_t n, int64_t k) {
    for (int64_t at = 0; at < n; at += PANEL)
        (at + PANEL <= n ? product_rows<4> : product_rows<2>)(panels + at * k, rows.at(at), count, k);
}

// x [T, K] by panels to [T, N]. Parts of the rows by half panels: a part's inputs are cached while the weights stream by, and halves are
// shared out more evenly than panels, which may be fewer than threads.
void product(const uint16_t* panels, const uint16_t* x, const uint16_t* bias, uint16_t* out, int64_t rows, int64_t n, int64_t k, int threads) {
    const int64_t halves = n / HALF;
    const int64_t for_threads = std::min((rows + 31) / 32, (4 * threads + halves - 1) / halves);
    const int64_t parts = std::max((rows * k + CACHED_INPUTS - 1) / CACHED_INPUTS, for_threads);
    parallel(parts * halves, rows * n * k, threads, [=](int64_t a, int64_t b) {
        for (int64_t item = a; item < b;) {
            const int64_t part = item / halves, at = item % halves * HALF;
            const int64_t first = rows * part / parts, last = rows * (part + 1) / parts;
            const uint16_t* weight = panels + at / PANEL * PANEL * k + at % PANEL * 2;
            const bool whole = at % PANEL == 0 && at + PANEL <= n && item + 2 <= b;
            const Rows all{x, k, bias, 0, out, n};
            (whole ? product_rows<4> : product_rows<2>)(weight, all.from(first).at(at), last - first, k);
            item += whole ? 2 : 1;
        }
    });
}

// The rows of one adapter in a batch, and its matrices for linears that read one input, as panels: A of all of them [linears * rank, in], and each
// B [out, rank]. `rank` is even: an odd one has a column of zeros more in the Bs.
struct LoraRows {
    const uint16_t *a, *b[3];
    int64_t rank, columns;  // `columns` of A: linears * rank as it was given
    int64_t first, count;
};

int64_t low_width(int64_t columns) { return (columns + HALF - 1) / HALF * HALF; }

// f(adapter, first row, rows): pieces of all adapters' rows, for the threads to share.
template <class F>
void by_rows(const LoraRows* adapters, int64_t n, int64_t work, int threads, F f) {
    int64_t total = 0;
    for (int64_t i = 0; i < n; i++) total += adapters[i].count;
    const int64_t size = std::min<int64_t>(48, std::max<int64_t>(TILE_ROWS, total / (2 * threads)));
    std::vector<std::array<int64_t, 3>> pieces;
    for (int64_t i = 0; i < n; i++)
        for (int64_t r = 0; r < adapters[i].count; r += size)
            pieces.push_back({i, adapters[i].first + r, std::min(size, adapters[i].count - r)});
    parallel(pieces.size(), total * work, threads, [&](int64_t a, int64_t b) {
        for (int64_t p = a; p < b; p++) f(adapters[pieces[p][0]], pieces[p][1], pieces[p][2]);
    });
}

// out [T, sum of sizes] += (x [T, in] A^T) B^T of each row's adapter; low, the rounded product with A [T, low_width], is kept if there is room for it.
void add_lora(const LoraRows* adapters, int64_t n, const uint16_t* x, int64_t in, uint16_t* out, const int64_t* sizes, int64_t linears,
              uint16_t* kept, int threads) {
    int64_t width = 0;
    for (int64_t l = 0; l < linears; l++) width += sizes[l];
    by_rows(adapters, n, (in + width) * HALF, threads, [=](const LoraRows& own, int64_t first, int64_t count) {
        const int64_t columns = low_width(own.columns);
        std::vector<uint16_t> room(kept ? 0 : count * columns);
        uint16_t* low = kept ? kept + first * columns : room.data();
        product_part(own.a, {x + first * in, in, nullptr, 0, low, columns}, count, columns, in);
        uint16_t* to = out + first * width;
        for (int64_t l = 0; l < linears; to += sizes[l++])
            product_part(own.b[l], {low + l * (own.columns / linears), columns, to, width, to, width}, count, sizes[l], own.rank);
    });
}

// The way back: low_grad [T, low_width] = the linears' parts of grad [T, sum of sizes] times their Bs, and grad_x [T, in] += low_grad A. Here the panels
// are of the matrices turned: each b of B^T [rank, out], a of A^T [in, columns], with a column of zeros more if there are oddly many.
void lora_backward(const LoraRows* adapters, int64_t n, const uint16_t* grad, const int64_t* sizes, int64_t linears, uint16_t* low_grad,
                   uint16_t* grad_x, int64_t in, int threads) {
    int64_t width = 0;
    for (int64_t l = 0; l < linears; l++) width += sizes[l];
    by_rows(adapters, n, (in + width) * HALF, threads, [=](const LoraRows& own, int64_t first, int64_t count) {
        const int64_t columns = low_width(own.columns), rank = own.columns / linears;
        // A linear's columns may end within a panel, so they go through a room of their own.
        std::vector<uint16_t> room(count * low_width(rank));
        const uint16_t* from = grad + first * width;
        for (int64_t l = 0; l < linears; from += sizes[l++]) {
            product_part(own.b[l], {from, width, nullptr, 0, room.data(), low_width(rank)}, count, low_width(rank), sizes[l]);
            for (int64_t r = 0; r < count; r++)
                std::memcpy(low_grad + (first + r) * columns + l * rank, room.data() + r * low_width(rank), 2 * rank);
        }
        for (int64_t r = 0; r < count; r++)
            std::fill(low_grad + (first + r) * columns + own.columns, low_grad + (first + r + 1) * columns, 0);
        uint16_t* to = grad_x + first * in;
        product_part(own.a, {low_grad + first * columns, columns, to, in, to, in}, count, in, (own.columns + 1) / 2 * 2);
    });
}

}  // namespace

// One name for each type: `_f` float32, `_h` bf16.
#define EXPORT extern "C" __attribute__((visibility("default")))
#define FOR_TYPES(S, X)                                                                                                                      \
    EXPORT void rms_norm_##S(const float* x, const X* y, const float* w, float eps, float* x_out, X* out, float* scale, int64_t rows,       \
                             int64_t d, int threads) {                                                                                       \
        rms_norm<X, X>(x, y, w, eps, x_out, out, scale, rows, d, threads);                                                                   \
    }                                                                                                                                        \
    EXPORT void rms_norm_backward_##S(const X* g, const float* x, const float* w, const float* scale, const float* add, float* out,         \
                                      int64_t rows, int64_t d, int threads) {                                                                \
        rms_norm_backward<X>(g, x, w, scale, add, out, rows, d, threads);                                                                    \
    }                                                                                                                                        \
    EXPORT void rotate_##S(const X* x, int64_t stride, const float* cos, const float* sin, float sign, X* out, int64_t rows, int64_t heads, \
                           int64_t e, int threads) {                                                                                         \
        rotate<X>(x, stride, cos, sin, sign, out, rows, heads, e, threads);                                                                  \
    }                                                                                                                                        \
    EXPORT void swiglu_##S(const X* gate_up, X* out, int64_t rows, int64_t d, int threads) { swiglu<X>(gate_up, out, rows, d, threads); }   \
    EXPORT void swiglu_backward_##S(const X* grad, const X* gate_up, X* out, int64_t rows, int64_t d, int threads) {                        \
        swiglu_backward<X>(grad, gate_up, out, rows, d, threads);                                                                            \
    }                                                                                                                                        \
    EXPORT void normalizers_##S(const X* logits, const int64_t* tokens, const float* exact, int64_t k, const float* temperature,            \
                                float* weights, float* out, int64_t rows, int64_t v, int threads) {                                          \
        normalizers<X>(logits, tokens, exact, k, temperature, weights, out, rows, v, threads);                                               \
    }                                                                                                                                        \
    EXPORT void normalizers_backward_##S(X* logits, const int64_t* tokens, const float* exact, int64_t k, float temperature,                \
                                         const float* log_total, const int64_t* first, const int64_t* targets, const float* grads,          \
                                         int64_t rows, int64_t v, int threads) {                                                             \
        normalizers_backward<X>(logits, tokens, exact, k, temperature, log_total, first, targets, grads, rows, v, threads);                  \
    }                                                                                                                                        \
    EXPORT void keep_##S(const Range* own, const int64_t* rows, int64_t n, const X* k, int64_t k_stride, const X* v, int64_t v_stride,       \
                         int64_t heads, int64_t e, int) {                                                                                    \
        keep<X>(own, rows, n, k, k_stride, v, v_stride, heads, e);                                                                           \
    }                                                                                                                                        \
    EXPORT void attend_##S(const Attention* a, int64_t n_blocks, const X* q, X* out, float* lse, int threads) {                             \
        attend<X>(*a, n_blocks, q, out, lse, threads);                                                                                       \
    }                                                                                                                                        \
    EXPORT void attend_backward_##S(const Attention* a, const int64_t* part_ends, int64_t parts, const X* grad,                             \
                                    const X* q, const X* out, const float* lse, const X* k0, X* grad_q, X* grad_k, X* grad_v,           \
                                    float* sums, int64_t size, int threads) {                                                                \
        attend_backward<X>(*a, part_ends, parts, grad, q, out, lse, k0, grad_q, grad_k, grad_v, sums, size, threads);             \
    }

FOR_TYPES(f, float)
FOR_TYPES(h, uint16_t)

// Whether the CPU has the instruction for pairs of bf16 and not AMX, which is faster for many rows.
EXPORT int multiplies_bf16() {
    unsigned a, b, c, d;
    const bool amx = __get_cpuid_count(7, 0, &a, &b, &c, &d) && (d >> 22 & 1);
    return __builtin_cpu_supports("avx512bf16") && !amx;
}
// Asks for pages of 2 MB for memory that nobody has written to yet.
EXPORT void on_huge_pages(uintptr_t address, int64_t bytes) {
    constexpr uintptr_t PAGE = 1 << 21;
    const uintptr_t first = (address + PAGE - 1) / PAGE * PAGE, last = (address + bytes) / PAGE * PAGE;
    if (first < last) madvise((void*)first, last - first, MADV_HUGEPAGE);
}
EXPORT void pack_panels_h(const uint16_t* weight, uint16_t* panels, int64_t n, int64_t k, int threads) {
    pack_panels(weight, panels, n, k, threads);
}
EXPORT void product_h(const uint16_t* panels, const uint16_t* x, const uint16_t* bias, uint16_t* out, int64_t rows, int64_t n, int64_t k,
                      int threads) {
    product(panels, x, bias, out, rows, n, k, threads);
}
EXPORT void add_lora_h(const LoraRows* adapters, int64_t n, const uint16_t* x, int64_t in, uint16_t* out, const int64_t* sizes,
                       int64_t linears, uint16_t* low, int threads) {
    add_lora(adapters, n, x, in, out, sizes, linears, low, threads);
}
EXPORT void lora_backward_h(const LoraRows* adapters, int64_t n, const uint16_t* grad, const int64_t* sizes, int64_t linears,
                            uint16_t* low_grad, uint16_t* grad_x, int64_t in, int threads) {
    lora_backward(adapters, n, grad, sizes, linears, low_grad, grad_x, in, threads);
}

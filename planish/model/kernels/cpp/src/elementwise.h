// Norms, rotations, SwiGLU and GeGLU, forth and back.

#pragma once

#include "vectors.h"

namespace {

// Norm of rows [T, D]: sum of squares lane by lane, then over lanes. y (any) is added to x first if
// given, and x keeps the sum in x_out.
template <class Y, class O>
void rms_norm(const float* x, const Y* y, const float* w, float eps, float* x_out, O* out,
              float* scale, int64_t rows, int64_t d, int threads) {
    parallel(rows, rows * d, threads, [=](int64_t a, int64_t b) {
        for (int64_t t = a; t < b; t++) {
            const float* xs = x + t * d;
            float* xo = x_out ? x_out + t * d : nullptr;
            V s = zero();
            for (int64_t i = 0; i < d; i += LANES) {
                Tail m = tail(d - i);
                V v = load(xs + i, m);
                if (y) {
                    v = add(v, load(y + t * d + i, m));
                    store(xo + i, v, m);
                }
                s = fma(v, v, s);
            }
            float k = 1.0f / std::sqrt(sum(s) / (float)d + eps);
            if (scale) scale[t] = k;
            const float* from = y ? xo : xs;
            for (int64_t i = 0; i < d; i += LANES) {
                Tail m = tail(d - i);
                store(out + t * d + i, mul(mul(load(from + i, m), all(k)), load(w + i, m)), m);
            }
        }
    });
}

// d/dx of the norm: scale * (g w - x * scale^2 * mean(g w x)), added to `more` if given.
template <class G>
void rms_norm_backward(const G* g, const float* x, const float* w, const float* scale,
                       const float* more, float* out, int64_t rows, int64_t d, int threads) {
    parallel(rows, rows * d, threads, [=](int64_t a, int64_t b) {
        for (int64_t t = a; t < b; t++) {
            V s = zero();
            for (int64_t i = 0; i < d; i += LANES) {
                Tail m = tail(d - i);
                s = fma(mul(load(g + t * d + i, m), load(w + i, m)), load(x + t * d + i, m), s);
            }
            float k = scale[t], inner = sum(s) / (float)d * k * k;
            for (int64_t i = 0; i < d; i += LANES) {
                Tail m = tail(d - i);
                V gw = mul(load(g + t * d + i, m), load(w + i, m));
                V v = mul(fnma(load(x + t * d + i, m), all(inner), gw), all(k));
                if (more) v = add(v, load(more + t * d + i, m));
                store(out + t * d + i, v, m);
            }
        }
    });
}

// Pairs (x[e], x[e + E/2]) turned by their row's angles; cos, sin [T, E/2]; `sign` -1 turns back.
// Rows of x are x_stride apart.
template <class X>
void rotate(const X* x, int64_t x_stride, const float* cos, const float* sin, float sign, X* out,
            int64_t rows, int64_t heads, int64_t e, int threads) {
    int64_t half = e / 2;
    parallel(rows, rows * heads * e, threads, [=](int64_t a, int64_t b) {
        for (int64_t t = a; t < b; t++)
            for (int64_t h = 0; h < heads; h++) {
                const X* from = x + t * x_stride + h * e;
                X* to = out + (t * heads + h) * e;
                for (int64_t i = 0; i < half; i += LANES) {
                    Tail m = tail(half - i);
                    V c = load(cos + t * half + i, m),
                      s = mul(load(sin + t * half + i, m), all(sign));
                    V p = load(from + i, m), q = load(from + half + i, m);
                    store(to + i, fnma(q, s, mul(p, c)), m);
                    store(to + half + i, fma(p, s, mul(q, c)), m);
                }
            }
    });
}

// The activations of a gated MLP are g * s. `gate` returns s, and `slope` the derivative of g * s.
struct Silu {
    static V gate(V g) { return sigmoid(g); }
    static V slope(V g, V s) { return fma(mul(g, s), sub(all(1.0f), s), s); }  // s + g s (1 - s)
};

// GELU's approximation by tanh: s = sigmoid(z) with z = 2 sqrt(2 / pi) (g + 0.044715 g^3).
struct Gelu {
    static constexpr float SCALE = 1.5957691216057308f, CUBIC = 0.044715f;
    static V gate(V g) {
        V cubic = fma(mul(mul(g, g), g), all(CUBIC), g);
        return sigmoid(mul(cubic, all(SCALE)));
    }
    static V slope(V g, V s) {  // s + g s (1 - s) z'
        V inner = mul(fma(mul(g, g), all(3.0f * CUBIC), all(1.0f)), all(SCALE));
        return fma(mul(mul(g, s), sub(all(1.0f), s)), inner, s);
    }
};

// activation(gate) * up; the two lie side by side in a row: [T, 2 * d].
template <class Activation, class X>
void gated(const X* gate_up, X* out, int64_t rows, int64_t d, int threads) {
    parallel(rows, rows * d * 4, threads, [=](int64_t a, int64_t b) {
        for (int64_t t = a; t < b; t++)
            for (int64_t i = 0; i < d; i += LANES) {
                Tail m = tail(d - i);
                V g = load(gate_up + t * 2 * d + i, m), u = load(gate_up + t * 2 * d + d + i, m);
                store(out + t * d + i, mul(mul(g, Activation::gate(g)), u), m);
            }
    });
}

template <class Activation, class X>
void gated_backward(const X* grad, const X* gate_up, X* out, int64_t rows, int64_t d,
                    int threads) {
    parallel(rows, rows * d * 4, threads, [=](int64_t a, int64_t b) {
        for (int64_t t = a; t < b; t++)
            for (int64_t i = 0; i < d; i += LANES) {
                Tail m = tail(d - i);
                V g = load(gate_up + t * 2 * d + i, m), u = load(gate_up + t * 2 * d + d + i, m);
                V dy = load(grad + t * d + i, m), s = Activation::gate(g);
                store(out + t * 2 * d + i, mul(mul(dy, u), Activation::slope(g, s)), m);
                store(out + t * 2 * d + d + i, mul(dy, mul(g, s)), m);
            }
    });
}

}  // namespace

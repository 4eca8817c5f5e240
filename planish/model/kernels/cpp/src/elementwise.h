// RMSNorm, RoPE, SwiGLU, GeGLU and clamped SwiGLU, forward and backward.

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
                store(out + t * d + i, mul(mul(load(from + i, m), broadcast(k)), load(w + i, m)),
                      m);
            }
        }
    });
}

// d/dx of the norm: scale * (g w - x * scale^2 * mean(g w x)), added to `grad_total` if given.
template <class G>
void rms_norm_backward(const G* g, const float* x, const float* w, const float* scale,
                       const float* grad_total, float* out, int64_t rows, int64_t d, int threads) {
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
                V v = mul(fnma(load(x + t * d + i, m), broadcast(inner), gw), broadcast(k));
                if (grad_total) v = add(v, load(grad_total + t * d + i, m));
                store(out + t * d + i, v, m);
            }
        }
    });
}

// Pairs (x[e], x[e + E/2]) rotated by their row's angles; cos, sin [T, E/2]; `sign` -1 rotates
// back. Rows of x are x_stride apart.
template <class X>
void rope(const X* x, int64_t x_stride, const float* cos, const float* sin, float sign, X* out,
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
                      s = mul(load(sin + t * half + i, m), broadcast(sign));
                    V p = load(from + i, m), q = load(from + half + i, m);
                    store(to + i, fnma(q, s, mul(p, c)), m);
                    store(to + half + i, fma(p, s, mul(q, c)), m);
                }
            }
    });
}

// The activations of a gated MLP are g * s. `gate` returns s, and `derivative` the derivative of g
// * s.
struct Silu {
    static V gate(V g) { return sigmoid(g); }
    static V derivative(V g, V s) {
        return fma(mul(g, s), sub(broadcast(1.0f), s), s);
    }  // s + g s (1 - s)
};

// GELU's approximation by tanh: s = sigmoid(z) with z = 2 sqrt(2 / pi) (g + 0.044715 g^3).
struct Gelu {
    static constexpr float SCALE = 1.5957691216057308f, CUBIC = 0.044715f;
    static V gate(V g) {
        V cubic = fma(mul(mul(g, g), g), broadcast(CUBIC), g);
        return sigmoid(mul(cubic, broadcast(SCALE)));
    }
    static V derivative(V g, V s) {  // s + g s (1 - s) z'
        V inner = mul(fma(mul(g, g), broadcast(3.0f * CUBIC), broadcast(1.0f)), broadcast(SCALE));
        return fma(mul(mul(g, s), sub(broadcast(1.0f), s)), inner, s);
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
void gated_backward(const X* grad, const X* gate_up, X* out, int64_t rows, int64_t d, int threads) {
    parallel(rows, rows * d * 4, threads, [=](int64_t a, int64_t b) {
        for (int64_t t = a; t < b; t++)
            for (int64_t i = 0; i < d; i += LANES) {
                Tail m = tail(d - i);
                V g = load(gate_up + t * 2 * d + i, m), u = load(gate_up + t * 2 * d + d + i, m);
                V dy = load(grad + t * d + i, m), s = Activation::gate(g);
                store(out + t * 2 * d + i, mul(mul(dy, u), Activation::derivative(g, s)), m);
                store(out + t * 2 * d + d + i, mul(dy, mul(g, s)), m);
            }
    });
}

// The clamped SwiGLU of gpt-oss: (u + 1) * g * sigmoid(alpha * g), where g is the gate, at most
// `limit`, and u is up, between -limit and limit. Gate and up alternate in a row: [T, d, 2].
struct Clamp {
    float alpha, limit;

    // A NaN stays one: the comparisons return their second operand.
    V gate(V g) const { return min_(broadcast(limit), g); }
    V up(V u) const { return max_(broadcast(-limit), min_(broadcast(limit), u)); }
};

// The numbers at even and at odd places of 2 * n numbers, n at most 16; 0 behind them.
template <class X>
inline void load_alternating(const X* from, int64_t n, V& even, V& odd) {
    X first[LANES] = {}, second[LANES] = {};
    for (int64_t i = 0; i < n; i++) first[i] = from[2 * i], second[i] = from[2 * i + 1];
    even = load(first), odd = load(second);
}

template <class X>
void clamped_swiglu(const X* gate_up, X* out, float alpha, float limit, int64_t rows, int64_t d,
                    int threads) {
    const Clamp clamp{alpha, limit};
    parallel(rows, rows * d * 4, threads, [=](int64_t a, int64_t b) {
        for (int64_t t = a; t < b; t++)
            for (int64_t i = 0; i < d; i += LANES) {
                V g, u;
                load_alternating(gate_up + (t * d + i) * 2, std::min<int64_t>(LANES, d - i), g, u);
                g = clamp.gate(g), u = add(clamp.up(u), broadcast(1.0f));
                V y = mul(mul(g, sigmoid(mul(g, broadcast(clamp.alpha)))), u);
                store(out + t * d + i, y, tail(d - i));
            }
    });
}

// Numbers beyond the limit have the gradient 0.
template <class X>
void clamped_swiglu_backward(const X* grad, const X* gate_up, X* out, float alpha, float limit,
                             int64_t rows, int64_t d, int threads) {
    const Clamp clamp{alpha, limit};
    parallel(rows, rows * d * 4, threads, [=](int64_t a, int64_t b) {
        for (int64_t t = a; t < b; t++)
            for (int64_t i = 0; i < d; i += LANES) {
                const int64_t n = std::min<int64_t>(LANES, d - i);
                V gate, up;
                load_alternating(gate_up + (t * d + i) * 2, n, gate, up);
                const V g = clamp.gate(gate), u = add(clamp.up(up), broadcast(1.0f)),
                        s = sigmoid(mul(g, broadcast(clamp.alpha))),
                        dy = load(grad + t * d + i, tail(d - i));
                // s + alpha g s (1 - s)
                const V derivative =
                    fma(mul(mul(g, broadcast(clamp.alpha)), s), sub(broadcast(1.0f), s), s);
                float gates[LANES], ups[LANES];
                X of_gate[LANES], of_up[LANES];
                store(gates, gate), store(ups, up);
                store(of_gate, mul(mul(dy, u), derivative)), store(of_up, mul(dy, mul(g, s)));
                X* to = out + (t * d + i) * 2;
                for (int64_t j = 0; j < n; j++) {
                    to[2 * j] = gates[j] > limit ? X(0) : of_gate[j];
                    to[2 * j + 1] = std::abs(ups[j]) > limit ? X(0) : of_up[j];
                }
            }
    });
}

}  // namespace

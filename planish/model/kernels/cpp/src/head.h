// What the head needs beyond products: log-sum-exp, drawing, the likeliest logits and single ones.

#pragma once

#include <vector>

#include "vectors.h"

namespace {

// A row of logits in float32: widened, with exact values in the place of some, divided by a
// temperature.
template <class X>
inline void scaled_row(const X* from, const int64_t* tokens, const float* exact, int64_t k,
                       float temperature, float* to, int64_t v) {
    V t = all(temperature);
    for (int64_t i = 0; i < v; i += LANES) {
        Tail m = tail(v - i);
        store(to + i, div(load(from + i, m), t), m);
    }
    for (int64_t i = 0; i < k; i++) to[tokens[i]] = exact[i] / temperature;
}

// log of the sum of exp(row), which becomes exp(row - its largest entry). Runs of 128 entries are
// summed in float32 lane by lane, runs in double, lanes last.
inline float log_sum(float* row, int64_t v) {
    V top = all(-std::numeric_limits<float>::infinity());
    for (int64_t i = 0; i < v; i += LANES) {
        Tail m = tail(v - i);
        top = only(m, larger(load(row + i, m), top), top);
    }
    const float peak = largest_lane(top);
    Doubles total;
    for (int64_t first = 0; first < v; first += 128) {
        V run = zero();
        for (int64_t i = first; i < std::min(first + 128, v); i += LANES) {
            Tail m = tail(v - i);
            V x = exp_(sub(load(row + i, m), all(peak)));
            store(row + i, x, m);
            run = add(run, only(m, x));
        }
        total.add(run);
    }
    return (float)(peak + std::log(total.total()));
}

// Each row's log-sum-exp; `weights` [R, v], if given, takes exp(row - its largest entry), and may
// be the logits themselves.
template <class X>
void normalizers(const X* logits, const int64_t* tokens, const float* exact, int64_t k,
                 const float* temperature, float* weights, float* out, int64_t rows, int64_t v,
                 int threads) {
    parallel(rows, rows * v, threads, [=](int64_t a, int64_t b) {
        std::vector<float> room(weights ? 0 : v);
        for (int64_t r = a; r < b; r++) {
            float* row = weights ? weights + r * v : room.data();
            scaled_row(logits + r * v, tokens + r * k, exact + r * k, k, temperature[r], row, v);
            out[r] = log_sum(row, v);
        }
    });
}

constexpr int64_t RUN = 128;

// Running sums of non-negative weights at the ends of runs of 128: of each lane by lane and then
// over lanes, added in double.
inline void run_ends(const float* weights, int64_t v, double* ends) {
    double total = 0;
    for (int64_t r = 0; r < (v + RUN - 1) / RUN; r++) {
        V s = zero();
        for (int64_t i = r * RUN; i < std::min(r * RUN + RUN, v); i += LANES)
            s = add(s, load(weights + i, tail(v - i)));
        ends[r] = total += sum(s);
    }
}

// The first entry at which the running sum exceeds uniform times the total. The entries of the run
// in which it happens are added in double. Rounding may point past all that have weight: then the
// last that has.
inline int64_t inverted(const float* weights, int64_t v, double uniform, const double* ends) {
    const int64_t runs = (v + RUN - 1) / RUN;
    const double goal = uniform * ends[runs - 1];
    int64_t run = std::min<int64_t>(std::upper_bound(ends, ends + runs, goal) - ends, runs - 1);
    while (run > 0 && !(ends[run] > ends[run - 1])) run--;
    const double rest = goal - (run ? ends[run - 1] : 0);
    double within = 0;
    int64_t last = run * RUN;
    for (int64_t i = run * RUN; i < std::min(run * RUN + RUN, v); i++) {
        if (!(weights[i] > 0)) continue;
        last = i, within += weights[i];
        if (within > rest) break;
    }
    return last;
}

// Tokens [R, k] of weights [R, v], by as many uniform numbers.
void invert(const float* weights, const double* uniforms, int64_t* tokens, int64_t rows, int64_t v,
            int64_t k, int threads) {
    parallel(rows, rows * (v + RUN * k), threads, [=](int64_t a, int64_t b) {
        std::vector<double> ends((v + RUN - 1) / RUN);
        for (int64_t r = a; r < b; r++) {
            run_ends(weights + r * v, v, ends.data());
            for (int64_t i = r * k; i < r * k + k; i++)
                tokens[i] = inverted(weights + r * v, v, uniforms[i], ends.data());
        }
    });
}

// Zeroes the weights [v] whose bits in `allowed` are 0, bit 0 of word 0 first. Returns the largest
// weight that is left.
inline float keep_allowed(float* weights, const uint32_t* allowed, int64_t v) {
    V top = zero();
    for (int64_t i = 0; i < v; i += LANES) {
        Tail m = tail(v - i);
        V x = only_bits((uint16_t)(allowed[i / 32] >> (i % 32)), load(weights + i, m));
        store(weights + i, x, m);
        top = larger(x, top);
    }
    return largest_lane(top);
}

// For each i a token by logits [*, v] of row rows[i] / temperature[i], and their log-sum-exp: the
// same as `normalizers` with weights, and `invert`. `allowed` [n, (v + 31) / 32], if given: the
// bits of the tokens that may be drawn. The token is -1 where all of them have weights below
// `least`, and may have become 0; the caller draws these tokens from the logits. The log-sum-exp is
// that of the whole row.
void draw(const float* logits, const int64_t* rows, const float* temperature,
          const double* uniforms, const uint32_t* allowed, float least, int64_t* tokens,
          float* normalizer, int64_t n, int64_t v, int threads) {
    parallel(n, n * v, threads, [=](int64_t a, int64_t b) {
        std::vector<float> row(v);
        std::vector<double> ends((v + RUN - 1) / RUN);
        for (int64_t i = a; i < b; i++) {
            scaled_row<float>(logits + rows[i] * v, nullptr, nullptr, 0, temperature[i], row.data(),
                              v);
            normalizer[i] = log_sum(row.data(), v);
            if (allowed && keep_allowed(row.data(), allowed + i * ((v + 31) / 32), v) < least) {
                tokens[i] = -1;
                continue;
            }
            run_ends(row.data(), v, ends.data());
            tokens[i] = inverted(row.data(), v, uniforms[i], ends.data());
        }
    });
}

// out [rows, v]: the gradient of the sum of (pair gradient * log-softmax at the pair's target), by
// the logits of rows from[0], from[1], ... (null: 0, 1, ...); then `out` may be the logits. The
// pairs of row r of `out` are first[r] .. first[r + 1].
template <class X>
void normalizers_backward(const X* logits, const int64_t* from, const int64_t* tokens,
                          const float* exact, int64_t k, float temperature, const float* log_total,
                          const int64_t* first, const int64_t* targets, const float* grads, X* out,
                          int64_t rows, int64_t v, int threads) {
    parallel(rows, rows * v, threads, [=](int64_t a, int64_t b) {
        std::vector<float> room(v);
        float* row = room.data();
        for (int64_t r = a; r < b; r++) {
            const int64_t own = from ? from[r] : r;
            scaled_row(logits + own * v, tokens + own * k, exact + own * k, k, temperature, row, v);
            float total = 0;
            for (int64_t p = first[r]; p < first[r + 1]; p++) total += grads[p];
            for (int64_t i = 0; i < v; i += LANES) {
                Tail m = tail(v - i);
                store(row + i, mul(exp_(sub(load(row + i, m), all(log_total[r]))), all(-total)), m);
            }
            for (int64_t p = first[r]; p < first[r + 1]; p++) row[targets[p]] += grads[p];
            for (int64_t i = 0; i < v; i += LANES)
                store(out + r * v + i, load(row + i, tail(v - i)), tail(v - i));
        }
    });
}

// The head's adapters: rows first .. first + count - 1 of a batch have this one. B [V, rank] as it
// is, and A [rank, in] and B as panels (products.h) if products are to be made with them; then
// `columns` is the rank or, if that is odd, one more.
template <class X>
struct HeadRows {
    const X *b, *a_panels, *b_panels;
    int64_t rank, columns, first, count;
};

// The k largest entries of a row, k <= v: the largest first, of equal ones the first.
inline void largest_entries(const uint16_t* row, int64_t v, int64_t k, int64_t* tokens) {
    constexpr int WIDE = Ordered::COUNT, CLASSES = 4;
    // Entries are in 128 classes by their place: those below the k-th largest of the classes'
    // largest are passed over, so few are looked at singly.
    Ordered tops[CLASSES];
    for (int64_t i = 0; i < v; i += WIDE * CLASSES)
        for (int c = 0; c < CLASSES && i + c * WIDE < v; c++)
            tops[c].rise(Ordered(row + i + c * WIDE, v - i - c * WIDE));
    int16_t classes[WIDE * CLASSES];
    for (int c = 0; c < CLASSES; c++) tops[c].to(classes + c * WIDE);
    std::nth_element(classes, classes + k - 1, classes + WIDE * CLASSES,
                     [](int16_t a, int16_t b) { return a > b; });
    int16_t bar = classes[k - 1], keys[WIDE * CLASSES];
    int64_t found = 0;
    for (int64_t i = 0; i < v; i += WIDE) {
        const uint32_t there = v - i >= WIDE ? ~0u : (1u << (v - i)) - 1;
        for (uint32_t m = there & Ordered(row + i, v - i).at_least(bar); m; m &= m - 1) {
            const int64_t token = i + __builtin_ctz(m);
            const int16_t key = (int16_t)(row[token] ^ ((int16_t)row[token] >> 15 & 0x7fff));
            if (found == k && key <= keys[k - 1]) continue;
            int64_t at = found < k ? found++ : k - 1;
            for (; at > 0 && keys[at - 1] < key; at--)
                keys[at] = keys[at - 1], tokens[at] = tokens[at - 1];
            keys[at] = key, tokens[at] = token;
            if (found == k) {
                if (keys[k - 1] == 32767) return;
                bar = keys[k - 1] + 1;
            }
        }
    }
}

// Sixteen lanes of products of pairs, then over lanes.
inline float dot(const uint16_t* x, const uint16_t* y, int64_t n) {
    V s = zero();
    for (int64_t i = 0; i < n; i += LANES)
        s = fma(load(x + i, tail(n - i)), load(y + i, tail(n - i)), s);
    return sum(s);
}

// What float32 needs for single logits: hidden states x [R, d], the weight [V, d], and for rows
// with an adapter what lies between A and B, `low`.
struct ExactLogits {
    const uint16_t *x, *weight;
    int64_t d;
    const HeadRows<uint16_t>* adapters;
    int64_t n;
    const uint16_t* low;
    int64_t low_stride;

    // The base model's, then the adapter's.
    float at(int64_t row, int64_t token) const {
        const float base = dot(x + row * d, weight + token * d, d);
        for (const HeadRows<uint16_t>* own = adapters; own < adapters + n; own++)
            if (row >= own->first && row < own->first + own->count)
                return base + dot(low + row * low_stride, own->b + token * own->rank, own->rank);
        return base;
    }
};

// Of each row of logits [R, v] the k largest entries: tokens [R, k], their exact values [R, k].
// `wide` [R, v], if given, takes the logits in float32, exact ones where they are known.
void likeliest(const ExactLogits& exact, const uint16_t* logits, int64_t k, int64_t* tokens,
               float* values, float* wide, int64_t rows, int64_t v, int threads) {
    parallel(rows, rows * v, threads, [=](int64_t a, int64_t b) {
        for (int64_t r = a; r < b; r++) {
            largest_entries(logits + r * v, v, k, tokens + r * k);
            for (int64_t i = 0; i < k; i++) values[r * k + i] = exact.at(r, tokens[r * k + i]);
            if (wide)
                scaled_row(logits + r * v, tokens + r * k, values + r * k, k, 1.0f, wide + r * v,
                           v);
        }
    });
}

// Pairs (row, token).
void single_logits(const ExactLogits& exact, const int64_t* rows, const int64_t* tokens, float* out,
                   int64_t pairs, int threads) {
    parallel(pairs, pairs * exact.d, threads, [=](int64_t a, int64_t b) {
        for (int64_t p = a; p < b; p++) out[p] = exact.at(rows[p], tokens[p]);
    });
}

}  // namespace

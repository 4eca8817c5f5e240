// What the head needs beyond matmuls: log-sum-exp, sampling, the top-k logits and single ones.

#pragma once

#include <vector>

#include "vectors.h"

namespace {

// A row of logits in float32: widened, with exact values in the place of some, divided by a
// temperature.
template <class X>
inline void scaled_row(const X* from, const int64_t* tokens, const float* exact, int64_t k,
                       float temperature, float* to, int64_t v) {
    V t = broadcast(temperature);
    for (int64_t i = 0; i < v; i += LANES) {
        Tail m = tail(v - i);
        store(to + i, div(load(from + i, m), t), m);
    }
    for (int64_t i = 0; i < k; i++) to[tokens[i]] = exact[i] / temperature;
}

// log of the sum of exp(row), which becomes exp(row - its largest entry). Blocks of 128 entries are
// summed in float32 lane by lane, blocks in double, lanes last.
inline float log_sum(float* row, int64_t v) {
    V top = broadcast(-std::numeric_limits<float>::infinity());
    for (int64_t i = 0; i < v; i += LANES) {
        Tail m = tail(v - i);
        top = select(m, max_(load(row + i, m), top), top);
    }
    const float max_logit = largest_lane(top);
    DoubleAccumulator total;
    for (int64_t first = 0; first < v; first += 128) {
        V block = zero();
        for (int64_t i = first; i < std::min(first + 128, v); i += LANES) {
            Tail m = tail(v - i);
            V x = exp_(sub(load(row + i, m), broadcast(max_logit)));
            store(row + i, x, m);
            block = add(block, select(m, x));
        }
        total.add(block);
    }
    return (float)(max_logit + std::log(total.total()));
}

// Each row's log-sum-exp; `weights` [R, v], if given, takes exp(row - its largest entry), and may
// be the logits themselves.
template <class X>
void log_sum_exp(const X* logits, const int64_t* tokens, const float* exact, int64_t k,
                 const float* temperature, float* weights, float* out, int64_t rows, int64_t v,
                 int threads) {
    parallel(rows, rows * v, threads, [=](int64_t a, int64_t b) {
        std::vector<float> buffer(weights ? 0 : v);
        for (int64_t r = a; r < b; r++) {
            float* row = weights ? weights + r * v : buffer.data();
            scaled_row(logits + r * v, tokens + r * k, exact + r * k, k, temperature[r], row, v);
            out[r] = log_sum(row, v);
        }
    });
}

constexpr int64_t SUM_BLOCK = 128;

// Running sums of non-negative weights at the ends of blocks of 128: of each lane by lane and then
// over lanes, added in double.
inline void cumulative_block_sums(const float* weights, int64_t v, double* ends) {
    double total = 0;
    for (int64_t r = 0; r < (v + SUM_BLOCK - 1) / SUM_BLOCK; r++) {
        V s = zero();
        for (int64_t i = r * SUM_BLOCK; i < std::min(r * SUM_BLOCK + SUM_BLOCK, v); i += LANES)
            s = add(s, load(weights + i, tail(v - i)));
        ends[r] = total += sum(s);
    }
}

// The first entry at which the running sum exceeds uniform times the total. The entries of the
// block in which it happens are added in double. Rounding may point past all that have weight: then
// the last that has.
inline int64_t sample_by_inversion(const float* weights, int64_t v, double uniform,
                                   const double* ends) {
    const int64_t num_blocks = (v + SUM_BLOCK - 1) / SUM_BLOCK;
    const double goal = uniform * ends[num_blocks - 1];
    int64_t block =
        std::min<int64_t>(std::upper_bound(ends, ends + num_blocks, goal) - ends, num_blocks - 1);
    while (block > 0 && !(ends[block] > ends[block - 1])) block--;
    const double rest = goal - (block ? ends[block - 1] : 0);
    double within = 0;
    int64_t last = block * SUM_BLOCK;
    for (int64_t i = block * SUM_BLOCK; i < std::min(block * SUM_BLOCK + SUM_BLOCK, v); i++) {
        if (!(weights[i] > 0)) continue;
        last = i, within += weights[i];
        if (within > rest) break;
    }
    return last;
}

// Tokens [R, k] of weights [R, v], by as many uniform numbers.
void sample_from_weights(const float* weights, const double* uniforms, int64_t* tokens,
                         int64_t rows, int64_t v, int64_t k, int threads) {
    parallel(rows, rows * (v + SUM_BLOCK * k), threads, [=](int64_t a, int64_t b) {
        std::vector<double> ends((v + SUM_BLOCK - 1) / SUM_BLOCK);
        for (int64_t r = a; r < b; r++) {
            cumulative_block_sums(weights + r * v, v, ends.data());
            for (int64_t i = r * k; i < r * k + k; i++)
                tokens[i] = sample_by_inversion(weights + r * v, v, uniforms[i], ends.data());
        }
    });
}

// Zeroes the weights [v] whose bits in `allowed` are 0, bit 0 of word 0 first. Returns the largest
// weight that is left.
inline float mask_disallowed(float* weights, const uint32_t* allowed, int64_t v) {
    V top = zero();
    for (int64_t i = 0; i < v; i += LANES) {
        Tail m = tail(v - i);
        V x = select_bits((uint16_t)(allowed[i / 32] >> (i % 32)), load(weights + i, m));
        store(weights + i, x, m);
        top = max_(x, top);
    }
    return largest_lane(top);
}

// For each i a token by logits [*, v] of row rows[i] / temperature[i], and their log-sum-exp: the
// same as `log_sum_exp` with weights, and `sample_from_weights`. `allowed` [n, (v + 31) / 32], if
// given: the bits of the tokens that may be sampled. The token is -1 where all of them have weights
// below `min_weight`, and may have become 0; the caller samples these tokens from the logits. The
// log-sum-exp is that of the whole row.
void sample(const float* logits, const int64_t* rows, const float* temperature,
            const double* uniforms, const uint32_t* allowed, float min_weight, int64_t* tokens,
            float* log_total, int64_t n, int64_t v, int threads) {
    parallel(n, n * v, threads, [=](int64_t a, int64_t b) {
        std::vector<float> row(v);
        std::vector<double> ends((v + SUM_BLOCK - 1) / SUM_BLOCK);
        for (int64_t i = a; i < b; i++) {
            scaled_row<float>(logits + rows[i] * v, nullptr, nullptr, 0, temperature[i], row.data(),
                              v);
            log_total[i] = log_sum(row.data(), v);
            if (allowed &&
                mask_disallowed(row.data(), allowed + i * ((v + 31) / 32), v) < min_weight) {
                tokens[i] = -1;
                continue;
            }
            cumulative_block_sums(row.data(), v, ends.data());
            tokens[i] = sample_by_inversion(row.data(), v, uniforms[i], ends.data());
        }
    });
}

// out [rows, v]: the gradient of the sum of (pair gradient * log-softmax at the pair's target), by
// the logits of rows from[0], from[1], ... (null: 0, 1, ...); then `out` may be the logits. The
// pairs of row r of `out` are first[r] .. first[r + 1].
template <class X>
void log_sum_exp_backward(const X* logits, const int64_t* from, const int64_t* tokens,
                          const float* exact, int64_t k, float temperature, const float* log_total,
                          const int64_t* first, const int64_t* targets, const float* grads, X* out,
                          int64_t rows, int64_t v, int threads) {
    parallel(rows, rows * v, threads, [=](int64_t a, int64_t b) {
        std::vector<float> buffer(v);
        float* row = buffer.data();
        for (int64_t r = a; r < b; r++) {
            const int64_t own = from ? from[r] : r;
            scaled_row(logits + own * v, tokens + own * k, exact + own * k, k, temperature, row, v);
            float total = 0;
            for (int64_t p = first[r]; p < first[r + 1]; p++) total += grads[p];
            for (int64_t i = 0; i < v; i += LANES) {
                Tail m = tail(v - i);
                store(row + i,
                      mul(exp_(sub(load(row + i, m), broadcast(log_total[r]))), broadcast(-total)),
                      m);
            }
            for (int64_t p = first[r]; p < first[r + 1]; p++) row[targets[p]] += grads[p];
            for (int64_t i = 0; i < v; i += LANES)
                store(out + r * v + i, load(row + i, tail(v - i)), tail(v - i));
        }
    });
}

// The head's adapters: rows first .. first + count - 1 of a batch have this one. B [V, rank] as it
// is, and A [rank, in] and B as panels (matmul.h) if matmuls are to be made with them; then
// `columns` is the rank or, if that is odd, one more.
template <class X>
struct HeadAdapter {
    const X *b, *a_panels, *b_panels;
    int64_t rank, columns, first, count;
};

// The k largest entries of a row, k <= v: the largest first, of equal ones the first.
inline void top_k(const uint16_t* row, int64_t v, int64_t k, int64_t* tokens) {
    constexpr int WIDTH = OrderedBf16::COUNT, CLASSES = 4;
    // Entries are in 128 classes by their place: those below the k-th largest of the classes'
    // largest are passed over, so few are looked at singly.
    OrderedBf16 class_maxima[CLASSES];
    for (int64_t i = 0; i < v; i += WIDTH * CLASSES)
        for (int c = 0; c < CLASSES && i + c * WIDTH < v; c++)
            class_maxima[c].update_max(OrderedBf16(row + i + c * WIDTH, v - i - c * WIDTH));
    int16_t classes[WIDTH * CLASSES];
    for (int c = 0; c < CLASSES; c++) class_maxima[c].store_keys(classes + c * WIDTH);
    std::nth_element(classes, classes + k - 1, classes + WIDTH * CLASSES,
                     [](int16_t a, int16_t b) { return a > b; });
    int16_t threshold = classes[k - 1], keys[WIDTH * CLASSES];
    int64_t found = 0;
    for (int64_t i = 0; i < v; i += WIDTH) {
        const uint32_t mask = v - i >= WIDTH ? ~0u : (1u << (v - i)) - 1;
        for (uint32_t m = mask & OrderedBf16(row + i, v - i).at_least(threshold); m; m &= m - 1) {
            const int64_t token = i + __builtin_ctz(m);
            const int16_t key = (int16_t)(row[token] ^ ((int16_t)row[token] >> 15 & 0x7fff));
            if (found == k && key <= keys[k - 1]) continue;
            int64_t at = found < k ? found++ : k - 1;
            for (; at > 0 && keys[at - 1] < key; at--)
                keys[at] = keys[at - 1], tokens[at] = tokens[at - 1];
            keys[at] = key, tokens[at] = token;
            if (found == k) {
                if (keys[k - 1] == 32767) return;
                threshold = keys[k - 1] + 1;
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
// with an adapter what lies between A and B, `lora_hidden`.
struct ExactLogits {
    const uint16_t *x, *weight;
    int64_t d;
    const HeadAdapter<uint16_t>* adapters;
    int64_t n;
    const uint16_t* lora_hidden;
    int64_t hidden_stride;

    // The base model's, then the adapter's.
    float logit(int64_t row, int64_t token) const {
        const float base = dot(x + row * d, weight + token * d, d);
        for (const HeadAdapter<uint16_t>* own = adapters; own < adapters + n; own++)
            if (row >= own->first && row < own->first + own->count)
                return base + dot(lora_hidden + row * hidden_stride, own->b + token * own->rank,
                                  own->rank);
        return base;
    }
};

// Of each row of logits [R, v] the k largest entries: tokens [R, k], their exact values [R, k].
// `float_logits` [R, v], if given, takes the logits in float32, exact ones where they are known.
void top_k_logits(const ExactLogits& exact, const uint16_t* logits, int64_t k, int64_t* tokens,
                  float* values, float* float_logits, int64_t rows, int64_t v, int threads) {
    parallel(rows, rows * v, threads, [=](int64_t a, int64_t b) {
        for (int64_t r = a; r < b; r++) {
            top_k(logits + r * v, v, k, tokens + r * k);
            for (int64_t i = 0; i < k; i++) values[r * k + i] = exact.logit(r, tokens[r * k + i]);
            if (float_logits)
                scaled_row(logits + r * v, tokens + r * k, values + r * k, k, 1.0f,
                           float_logits + r * v, v);
        }
    });
}

// Pairs (row, token).
void single_logits(const ExactLogits& exact, const int64_t* rows, const int64_t* tokens, float* out,
                   int64_t pairs, int threads) {
    parallel(pairs, pairs * exact.d, threads, [=](int64_t a, int64_t b) {
        for (int64_t p = a; p < b; p++) out[p] = exact.logit(rows[p], tokens[p]);
    });
}

}  // namespace

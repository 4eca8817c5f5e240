// The recurrences of gated delta nets and Mamba-2 layers, forward and backward.
//
// A state is a matrix [keys, values] for each head. Its columns do not depend on one another, so a
// thread computes blocks of columns that fit into its cache. At each position:
//
//     S = decay * S;  delta = beta * (v - S^T k);  S = S + k delta^T;  out = S^T q
//
// A Mamba-2 layer has B and C in the place of k and q, dt * x in the place of v, and no correction:
// its delta is v.
//
// Every sum has one order, over the rows of the state. So a position has the same bits whatever
// else is computed, and wherever the computation began.

#pragma once

#include <vector>

#include "vectors.h"

namespace {

// Consecutive positions of one sequence: rows start .. stop - 1. The segment continues
// `initial_state`, or zeros without it, and stores its state to `final_state` if given: [heads,
// keys, values] each.
struct DeltaSegment {
    int64_t start, stop, parent;
    const float* initial_state;
    float* final_state;
};

// q, k: [T, heads / sharing, keys]. v: [T, heads, values]. decay, beta: [T, heads]. `sharing`
// consecutive heads have one q and one k. Without `beta`, there is no correction. The segments of
// tree i are trees[i] .. trees[i + 1] - 1, and a parent comes before its children.
struct DeltaScan {
    const float *q, *k, *v, *decay, *beta;
    const DeltaSegment* segments;
    const int64_t* trees;
    int64_t n_trees, heads, sharing, keys, values;
};

constexpr int64_t DELTA_BLOCK = 32;  // the positions whose states a backward pass keeps at a time

// W vectors of columns of one head's state, from `column` on. CORRECTS: whether there is a correction.
template <int W, bool CORRECTS>
class DeltaColumns {
    static constexpr int64_t WIDTH = W * LANES;
    const DeltaScan& d;
    const int64_t head, column;

    int64_t row(int64_t t) const { return t * d.heads + head; }
    int64_t key(int64_t t) const { return row(t) / d.sharing * d.keys; }

  public:
    DeltaColumns(const DeltaScan& d, int64_t head, int64_t column)
        : d(d), head(head), column(column) {}

    // From `from` to `to`, which may be the same: the state behind position t. `error` receives
    // v - S^T k, and `out` the output, if given.
    ALWAYS_INLINE void step(int64_t t, const float* from, float* to, float* error,
                            float* out) const {
        const float *q = d.q + key(t), *k = d.k + key(t);
        const float* v = d.v + row(t) * d.values + column;
        const V decay = broadcast(d.decay[row(t)]);
        V seen[W], delta[W], sums[W];
        if constexpr (!CORRECTS) {
            for (int c = 0; c < W; c++) {
                delta[c] = load(v + c * LANES);
                sums[c] = zero();
            }
            for (int64_t i = 0; i < d.keys; i++) {
                const V key = broadcast(k[i]), query = broadcast(q[i]);
                for (int c = 0; c < W; c++) {
                    const V s = decayed_plus(from + i * WIDTH + c * LANES, decay, key, delta[c]);
                    store(to + i * WIDTH + c * LANES, s);
                    sums[c] = fma(s, query, sums[c]);
                }
            }
            store_out(t, sums, out);
            return;
        }
        const V beta = broadcast(CORRECTS ? d.beta[row(t)] : 0);
        for (int c = 0; c < W; c++) seen[c] = sums[c] = zero();
        for (int64_t i = 0; i < d.keys; i++) {
            const V key = broadcast(k[i]);
            for (int c = 0; c < W; c++) {
                const V s = mul(load(from + i * WIDTH + c * LANES), decay);
                seen[c] = fma(s, key, seen[c]);
                store(to + i * WIDTH + c * LANES, s);
            }
        }
        for (int c = 0; c < W; c++) {
            const V missing = sub(load(v + c * LANES), seen[c]);
            if (error) store(error + c * LANES, missing);
            delta[c] = mul(missing, beta);
        }
        for (int64_t i = 0; i < d.keys; i++) {
            const V key = broadcast(k[i]), query = broadcast(q[i]);
            for (int c = 0; c < W; c++) {
                const V s = fma(key, delta[c], load(to + i * WIDTH + c * LANES));
                store(to + i * WIDTH + c * LANES, s);
                sums[c] = fma(s, query, sums[c]);
            }
        }
        store_out(t, sums, out);
    }

    void forward(int64_t tree, float* out) const {
        Buffer buffer;
        float* state = buffer.reserve<float>(d.keys * WIDTH);
        for (int64_t r = d.trees[tree]; r < d.trees[tree + 1]; r++) {
            const DeltaSegment& segment = d.segments[r];
            for (int64_t i = 0; i < d.keys; i++)
                for (int c = 0; c < W; c++) {
                    const int64_t at = (head * d.keys + i) * d.values + column + c * LANES;
                    store(state + i * WIDTH + c * LANES,
                          segment.initial_state ? load(segment.initial_state + at) : zero());
                }
            for (int64_t t = segment.start; t < segment.stop; t++)
                step(t, state, state, nullptr, out);
            if (!segment.final_state) continue;
            for (int64_t i = 0; i < d.keys; i++)
                for (int c = 0; c < W; c++) {
                    const int64_t at = (head * d.keys + i) * d.values + column + c * LANES;
                    store(segment.final_state + at, load(state + i * WIDTH + c * LANES));
                }
        }
    }

    // Adds the gradients of q, k, decay and beta, and writes those of v. Those of q and k are
    // [T, heads, keys], also if heads share them. The segments of the tree begin with zeros or with
    // the state of their parent.
    void backward(int64_t tree, const float* grad, float* grad_q, float* grad_k, float* grad_v,
                  float* grad_decay, float* grad_beta) const {
        const int64_t first = d.trees[tree], n = d.trees[tree + 1] - first;
        const int64_t size = d.keys * WIDTH;
        std::vector<int64_t> blocks(n + 1);
        for (int64_t r = 0; r < n; r++) {
            const int64_t rows = d.segments[first + r].stop - d.segments[first + r].start;
            blocks[r + 1] = blocks[r] + (rows + DELTA_BLOCK - 1) / DELTA_BLOCK;
        }
        Buffer starts_buffer, ends_buffer, states_buffer, errors_buffer;
        float* starts =
            starts_buffer.reserve<float>(blocks[n] * size);  // of each block of each segment
        float* ends = ends_buffer.reserve<float>(n * size);  // of each segment
        float* states = states_buffer.reserve<float>(DELTA_BLOCK * size);
        float* errors = errors_buffer.reserve<float>(DELTA_BLOCK * WIDTH);
        for (int64_t r = 0; r < n; r++) {
            const DeltaSegment& segment = d.segments[first + r];
            float* state = ends + r * size;
            if (segment.parent < 0)
                std::memset(state, 0, size * sizeof(float));
            else
                std::memcpy(state, ends + (segment.parent - first) * size, size * sizeof(float));
            for (int64_t t = segment.start; t < segment.stop; t++) {
                const int64_t done = t - segment.start;
                if (done % DELTA_BLOCK == 0)
                    std::memcpy(starts + (blocks[r] + done / DELTA_BLOCK) * size, state,
                                size * sizeof(float));
                step(t, state, state, nullptr, nullptr);
            }
        }
        // From here on, the end of a segment holds the gradient of the state that it began with.
        for (int64_t r = n - 1; r >= 0; r--) {
            const DeltaSegment& segment = d.segments[first + r];
            float* grad_state = ends + r * size;
            std::memset(grad_state, 0, size * sizeof(float));
            for (int64_t child = r + 1; child < n; child++)
                if (d.segments[first + child].parent == first + r)
                    for (int64_t i = 0; i < size; i += LANES)
                        store(grad_state + i,
                              add(load(grad_state + i), load(ends + child * size + i)));
            for (int64_t b = blocks[r + 1] - blocks[r] - 1; b >= 0; b--) {
                const int64_t begin = segment.start + b * DELTA_BLOCK;
                const int64_t rows = std::min(DELTA_BLOCK, segment.stop - begin);
                std::memcpy(states, starts + (blocks[r] + b) * size, size * sizeof(float));
                for (int64_t i = 0; i + 1 < rows; i++)
                    step(begin + i, states + i * size, states + (i + 1) * size, errors + i * WIDTH,
                         nullptr);
                last_error(begin + rows - 1, states + (rows - 1) * size,
                           errors + (rows - 1) * WIDTH);
                for (int64_t i = rows - 1; i >= 0; i--)
                    step_backward(begin + i, states + i * size, errors + i * WIDTH, grad_state,
                                  grad, grad_q, grad_k, grad_v, grad_decay, grad_beta);
            }
        }
    }

  private:
    ALWAYS_INLINE V decayed_plus(const float* s, V decay, V key, V value) const {
        return fma(key, value, mul(load(s), decay));
    }

    ALWAYS_INLINE void store_out(int64_t t, const V* sums, float* out) const {
        if (out)
            for (int c = 0; c < W; c++)
                store(out + row(t) * d.values + column + c * LANES, sums[c]);
    }

    void last_error(int64_t t, const float* from, float* error) const {
        if constexpr (!CORRECTS) return;
        const float* k = d.k + key(t);
        const V decay = broadcast(d.decay[row(t)]);
        V seen[W];
        for (int c = 0; c < W; c++) seen[c] = zero();
        for (int64_t i = 0; i < d.keys; i++)
            for (int c = 0; c < W; c++)
                seen[c] =
                    fma(mul(load(from + i * WIDTH + c * LANES), decay), broadcast(k[i]), seen[c]);
        for (int c = 0; c < W; c++)
            store(error + c * LANES,
                  sub(load(d.v + row(t) * d.values + column + c * LANES), seen[c]));
    }

    // `before`: the state before position t. `grad_state`: the gradient of the state behind it,
    // which becomes that of the state before it.
    void step_backward(int64_t t, const float* before, const float* error, float* grad_state,
                       const float* grad, float* grad_q, float* grad_k, float* grad_v,
                       float* grad_decay, float* grad_beta) const {
        if constexpr (!CORRECTS) {
            plain_step_backward(t, before, grad_state, grad, grad_q, grad_k, grad_v, grad_decay);
            return;
        }
        const float *q = d.q + key(t), *k = d.k + key(t);
        const V decay = broadcast(d.decay[row(t)]), beta = broadcast(CORRECTS ? d.beta[row(t)] : 0);
        V of_out[W], delta[W], of_delta[W], of_v[W], of_beta = zero(), of_decay = zero();
        for (int c = 0; c < W; c++) {
            of_out[c] = load(grad + row(t) * d.values + column + c * LANES);
            delta[c] = mul(load(error + c * LANES), beta);
            of_delta[c] = zero();
        }
        for (int64_t i = 0; i < d.keys; i++) {
            const V key = broadcast(k[i]), query = broadcast(q[i]);
            V of_query = zero();
            for (int c = 0; c < W; c++) {
                const int64_t at = i * WIDTH + c * LANES;
                const V after = fma(key, delta[c], mul(load(before + at), decay));
                of_query = fma(after, of_out[c], of_query);
                const V of_state = fma(query, of_out[c], load(grad_state + at));
                store(grad_state + at, of_state);
                of_delta[c] = fma(of_state, key, of_delta[c]);
            }
            grad_q[row(t) * d.keys + i] += sum(of_query);
        }
        for (int c = 0; c < W; c++) {
            of_v[c] = mul(of_delta[c], beta);
            store(grad_v + row(t) * d.values + column + c * LANES, of_v[c]);
            of_beta = fma(of_delta[c], load(error + c * LANES), of_beta);
        }
        grad_beta[row(t)] += sum(of_beta);
        for (int64_t i = 0; i < d.keys; i++) {
            const V key = broadcast(k[i]);
            V of_key = zero();
            for (int c = 0; c < W; c++) {
                const int64_t at = i * WIDTH + c * LANES;
                const V s = load(before + at), of_after = load(grad_state + at);
                of_key = fma(of_after, delta[c], of_key);
                of_key = fnma(mul(s, decay), of_v[c], of_key);
                const V of_decayed = fnma(key, of_v[c], of_after);
                of_decay = fma(of_decayed, s, of_decay);
                store(grad_state + at, mul(of_decayed, decay));
            }
            grad_k[row(t) * d.keys + i] += sum(of_key);
        }
        grad_decay[row(t)] += sum(of_decay);
    }

    // The same without a correction.
    void plain_step_backward(int64_t t, const float* before, float* grad_state, const float* grad,
                             float* grad_q, float* grad_k, float* grad_v, float* grad_decay) const {
        const float *q = d.q + key(t), *k = d.k + key(t);
        const V decay = broadcast(d.decay[row(t)]);
        V of_out[W], value[W], of_v[W], of_decay = zero();
        for (int c = 0; c < W; c++) {
            of_out[c] = load(grad + row(t) * d.values + column + c * LANES);
            value[c] = load(d.v + row(t) * d.values + column + c * LANES);
            of_v[c] = zero();
        }
        for (int64_t i = 0; i < d.keys; i++) {
            const V key = broadcast(k[i]), query = broadcast(q[i]);
            V of_query = zero(), of_key = zero();
            for (int c = 0; c < W; c++) {
                const int64_t at = i * WIDTH + c * LANES;
                of_query = fma(decayed_plus(before + at, decay, key, value[c]), of_out[c], of_query);
                const V of_state = fma(query, of_out[c], load(grad_state + at));
                of_v[c] = fma(of_state, key, of_v[c]);
                of_key = fma(of_state, value[c], of_key);
                of_decay = fma(of_state, load(before + at), of_decay);
                store(grad_state + at, mul(of_state, decay));
            }
            grad_q[row(t) * d.keys + i] += sum(of_query);
            grad_k[row(t) * d.keys + i] += sum(of_key);
        }
        for (int c = 0; c < W; c++)
            store(grad_v + row(t) * d.values + column + c * LANES, of_v[c]);
        grad_decay[row(t)] += sum(of_decay);
    }
};

// Calls f(columns, tree) for blocks of columns of all heads of all trees. One thread has all blocks
// of a head, because they add to the same gradients.
template <class F>
void for_delta_columns(const DeltaScan& d, int threads, F f) {
    parallel_items(d.n_trees * d.heads, threads, [&](int64_t item) {
        const int64_t tree = item / d.heads, head = item % d.heads;
        for (int64_t column = 0; column < d.values;) {
            const int64_t vectors = std::min<int64_t>(4, (d.values - column) / LANES);
            with_size<4>(vectors, [&](auto size) {
                constexpr int W = decltype(size)::value;
                if (d.beta)
                    f(DeltaColumns<W, true>(d, head, column), tree);
                else
                    f(DeltaColumns<W, false>(d, head, column), tree);
            });
            column += vectors * LANES;
        }
    });
}

void delta_scan(const DeltaScan& d, float* out, int threads) {
    for_delta_columns(d, threads,
                      [&](const auto& columns, int64_t tree) { columns.forward(tree, out); });
}

void delta_scan_backward(const DeltaScan& d, const float* grad, float* grad_q, float* grad_k,
                         float* grad_v, float* grad_decay, float* grad_beta, int threads) {
    for_delta_columns(d, threads, [&](const auto& columns, int64_t tree) {
        columns.backward(tree, grad, grad_q, grad_k, grad_v, grad_decay, grad_beta);
    });
}

}  // namespace

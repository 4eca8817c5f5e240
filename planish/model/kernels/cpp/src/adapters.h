// LoRA: the adapters of a batch's rows, forward and backward, and the gradients of one adapter.

#pragma once

#include <array>
#include <vector>

#include "head.h"
#include "matmul.h"

namespace {

// The rows of one adapter in a batch, and its matrices for linears that read one input, as panels:
// A of all of them [linears * rank, in], and each B [out, rank]. `rank` is even: an odd one has a
// column of zeros more in the Bs.
template <class X>
struct LoraAdapter {
    const X *a, *b[3];
    int64_t rank, columns;  // `columns` of A: linears * rank as it was given
    int64_t first, count;
};

// f(adapter, first row, rows): pieces of all adapters' rows, for the threads to share.
template <class X, class F>
void for_adapter_rows(const LoraAdapter<X>* adapters, int64_t n, int64_t work, int threads, F f) {
    int64_t total = 0;
    for (int64_t i = 0; i < n; i++) total += adapters[i].count;
    const int64_t size = std::min<int64_t>(48, std::max<int64_t>(TILE_ROWS, total / (2 * threads)));
    std::vector<std::array<int64_t, 3>> pieces;
    for (int64_t i = 0; i < n; i++)
        for (int64_t r = 0; r < adapters[i].count; r += size)
            pieces.push_back({i, adapters[i].first + r, std::min(size, adapters[i].count - r)});
    parallel(pieces.size(), total * work, threads, [&](int64_t a, int64_t b) {
        const amx::TileScope scope(uses_amx<X>());
        for (int64_t p = a; p < b; p++) f(adapters[pieces[p][0]], pieces[p][1], pieces[p][2]);
    });
}

// out [T, sum of sizes] += (x [T, in] A^T) B^T of each row's adapter. The rounded product with A is
// stored to lora_hidden_out [T, L], if given. Here and below, L is `columns` rounded up to whole
// vectors.
template <class X>
void add_lora(const LoraAdapter<X>* adapters, int64_t n, const X* x, int64_t in, X* out,
              const int64_t* sizes, int64_t linears, X* lora_hidden_out, int threads) {
    int64_t width = 0;
    for (int64_t l = 0; l < linears; l++) width += sizes[l];
    for_adapter_rows(
        adapters, n, (in + width) * LANES, threads,
        [=](const LoraAdapter<X>& own, int64_t first, int64_t count) {
            const int64_t columns = round_up_to_vector(own.columns);
            std::vector<X> buffer(lora_hidden_out ? 0 : count * columns);
            X* lora_hidden = lora_hidden_out ? lora_hidden_out + first * columns : buffer.data();
            matmul_outputs(Panels<X>{own.a, columns, in},
                           {x + first * in, in, nullptr, 0, lora_hidden, columns}, count);
            X* to = out + first * width;
            for (int64_t l = 0; l < linears; to += sizes[l++])
                matmul_outputs(
                    Panels<X>{own.b[l], sizes[l], own.rank},
                    {lora_hidden + l * (own.columns / linears), columns, to, width, to, width},
                    count);
        });
}

// The backward pass: hidden_grad [T, L] = the linears' parts of grad [T, sum of sizes] times their
// Bs, and grad_x [T, in] += hidden_grad A, unless grad_x is null. Here the panels are of the
// transposed matrices: each b of B^T [rank, out], a of A^T [in, columns], with a column of zeros
// more if there are oddly many.
template <class X>
void lora_backward(const LoraAdapter<X>* adapters, int64_t n, const X* grad, const int64_t* sizes,
                   int64_t linears, X* hidden_grad, X* grad_x, int64_t in, int threads) {
    int64_t width = 0;
    for (int64_t l = 0; l < linears; l++) width += sizes[l];
    for_adapter_rows(
        adapters, n, (in + width) * LANES, threads,
        [=](const LoraAdapter<X>& own, int64_t first, int64_t count) {
            const int64_t columns = round_up_to_vector(own.columns), rank = own.columns / linears,
                          wide = round_up_to_vector(rank);
            // A linear's columns may end within a panel, so they go through a buffer.
            std::vector<X> buffer(count * wide);
            const X* from = grad + first * width;
            for (int64_t l = 0; l < linears; from += sizes[l++]) {
                matmul_outputs(Panels<X>{own.b[l], wide, sizes[l]},
                               {from, width, nullptr, 0, buffer.data(), wide}, count);
                for (int64_t r = 0; r < count; r++)
                    std::memcpy(hidden_grad + (first + r) * columns + l * rank,
                                buffer.data() + r * wide, rank * sizeof(X));
            }
            for (int64_t r = 0; r < count; r++)
                std::fill(hidden_grad + (first + r) * columns + own.columns,
                          hidden_grad + (first + r + 1) * columns, 0);
            if (!grad_x) return;
            X* to = grad_x + first * in;
            matmul_outputs(Panels<X>{own.a, in, (own.columns + 1) / 2 * 2},
                           {hidden_grad + first * columns, columns, to, in, to, in}, count);
        });
}

// One gradient of an adapter's matrices: the sum over all rows t of narrow[t][c] * wide[t][w], for
// `columns` c and `width` w, a multiple of LANES.
template <class X>
struct RowSum {
    const X* narrow;
    int64_t narrow_stride, columns;
    const X* wide;
    int64_t wide_stride, width;
    // Where (c, w) goes: out[c * column_step + w * width_step]. One of the steps is 1.
    float* out;
    int64_t column_step, width_step;
};

// Of a sum over rows, rows of float32 or pairs of rows of bf16 are added one after another
// (`Sums`), a fresh sum for each SUM_STEPS of them; then these sums in their order. Columns are
// shared out among threads, rows are not.
constexpr int64_t SUM_STEPS = 256;
constexpr int64_t SUM_WIDTH =
    256;  // columns of `wide` that a thread takes at a time: they stay in the second cache
constexpr int64_t SUM_PREFETCH_ROWS =
    16;  // rows that are called for before they are needed: they lie on a page each
constexpr int SUM_VECTORS = std::min(2, tile_vectors(TILE_ROWS));  // of `wide` in a tile
constexpr int SUM_TILE =
    TILE_ROWS * tile_vectors(TILE_ROWS) / SUM_VECTORS;  // by columns of `narrow`

// What one step multiplies, side by side for all columns: [steps][stride]. Of bf16 two rows; a last
// one that is alone meets zeros.
template <class X>
using Step = std::conditional_t<IS_BF16<X>, uint32_t, float>;
template <class X>
constexpr int64_t STEP_ROWS = IS_BF16<X> ? 2 : 1;

inline void gather_steps(const uint16_t* rows, int64_t row_stride, int64_t count, int64_t columns,
                         uint32_t* to, int64_t stride) {
    for (int64_t t = 0; t < count; t += 2)
        for (int64_t c = 0; c < columns; c += LANES) {
            const int64_t left = columns - c;
            const uint16_t* from = rows + t * row_stride + c;
            _mm_prefetch((const char*)(from + SUM_PREFETCH_ROWS * row_stride), _MM_HINT_T0);
            _mm_prefetch((const char*)(from + (SUM_PREFETCH_ROWS + 1) * row_stride), _MM_HINT_T0);
            store_words(to + t / 2 * stride + c,
                        load_interleaved(from, tail(left), from + row_stride,
                                         tail(t + 1 < count ? left : 0)),
                        tail(left));
        }
}

inline void gather_steps(const float* rows, int64_t row_stride, int64_t count, int64_t columns,
                         float* to, int64_t stride) {
    for (int64_t t = 0; t < count; t++)
        for (int64_t c = 0; c < columns; c += LANES) {
            const float* from = rows + t * row_stride + c;
            _mm_prefetch((const char*)(from + SUM_PREFETCH_ROWS * row_stride), _MM_HINT_T0);
            const Tail mask = tail(columns - c);
            store(to + t * stride + c, load(from, mask), mask);
        }
}

template <int R>
ALWAYS_INLINE void add_step(const uint32_t* narrow, const uint32_t* wide,
                            Sums<R, SUM_VECTORS>& sums) {
    auto words = [=](I* to) {
        for (int c = 0; c < SUM_VECTORS; c++) to[c] = load_words(wide + c * LANES);
    };
    sums.add([=](int r) { return narrow + r; }, words);
}
template <int R>
ALWAYS_INLINE void add_step(const float* narrow, const float* wide, Sums<R, SUM_VECTORS>& sums) {
    sums.add(narrow, 1, wide);
}

// total[R][SUM_WIDTH] (+)= the sum over steps, for R columns of `narrow` and some vectors of
// `wide`.
template <int R, class S>
void row_sum_tile(const S* narrow, int64_t stride, const S* wide, int64_t steps, bool is_first,
                  float* total) {
    Sums<R, SUM_VECTORS> sums;
    for (int64_t t = 0; t < steps; t++)
        add_step<R>(narrow + t * stride, wide + t * SUM_WIDTH, sums);
    sums.each([=](int r, int c, V sum) {
        float* to = total + r * SUM_WIDTH + c * LANES;
        store(to, is_first ? sum : add(load(to), sum));
    });
}

struct RowSumBuffers {
    Buffer narrow, wide, total, transposed;
};

// total [columns][SUM_WIDTH] (+)= the sum over steps by AMX's tiles, in their order: runs of 32
// rows. `narrow` [steps][stride], `wide` [steps][SUM_WIDTH]; both are large enough for whole runs.
inline void row_sum_amx(uint32_t* narrow, int64_t stride, int64_t columns, uint32_t* wide,
                        int64_t width, int64_t steps, bool is_first, float* total, Buffer& buffer) {
    const int64_t whole =
        round_up_to_vector(steps);  // a run has as many pairs as a vector has lanes
    std::fill(narrow + steps * stride, narrow + whole * stride, 0);
    std::fill(wide + steps * SUM_WIDTH, wide + whole * SUM_WIDTH, 0);
    float* transposed = buffer.reserve<float>(stride * whole);
    transpose((const float*)narrow, stride, whole, stride, transposed, whole);
    (is_first ? amx::multiply<false> : amx::multiply<true>)((const uint16_t*)transposed, 2 * whole,
                                                            columns, wide, SUM_WIDTH, whole, width,
                                                            total, SUM_WIDTH);
}

// Columns first .. first + width - 1 of `wide`, at most SUM_WIDTH.
template <class X>
void row_sum(const RowSum<X>& own, int64_t first, int64_t width, int64_t rows,
             RowSumBuffers& buffers) {
    constexpr int64_t AT_ONCE = SUM_STEPS * STEP_ROWS<X>;
    const int64_t stride = round_up_to_vector(own.columns);
    auto* narrow = buffers.narrow.reserve<Step<X>>(SUM_STEPS * stride);
    auto* wide = buffers.wide.reserve<Step<X>>(SUM_STEPS * SUM_WIDTH);
    float* total = buffers.total.reserve<float>(own.columns * SUM_WIDTH);
    for (int64_t t = 0; t < rows; t += AT_ONCE) {
        const int64_t count = std::min(AT_ONCE, rows - t),
                      steps = (count + STEP_ROWS<X> - 1) / STEP_ROWS<X>;
        gather_steps(own.narrow + t * own.narrow_stride, own.narrow_stride, count, own.columns,
                     narrow, stride);
        gather_steps(own.wide + t * own.wide_stride + first, own.wide_stride, count, width, wide,
                     SUM_WIDTH);
        if constexpr (IS_BF16<X>)
            if (amx_enabled) {
                row_sum_amx(narrow, stride, own.columns, wide, width, steps, t == 0, total,
                            buffers.transposed);
                continue;
            }
        for (int64_t w = 0; w < width; w += SUM_VECTORS * LANES)
            for_row_tiles<SUM_TILE>(own.columns, [&](int64_t c, auto size) {
                row_sum_tile<size>(narrow + c, stride, wide + w, steps, t == 0,
                                   total + c * SUM_WIDTH + w);
            });
    }
    if (!rows) std::fill(total, total + own.columns * SUM_WIDTH, 0.0f);
    if (own.width_step > 1)
        return transpose(total, SUM_WIDTH, own.columns, width, own.out + first * own.width_step,
                         own.width_step);
    for (int64_t c = 0; c < own.columns; c++)
        std::memcpy(own.out + c * own.column_step + first, total + c * SUM_WIDTH, 4 * width);
}

// Gradients of the matrices of one adapter for all rows: of A, [columns, in], hidden_grad^T x; of
// each B, [size, rank], its part of grad^T times its part of lora_hidden. lora_hidden and
// hidden_grad [T, L] are the results of `add_lora` and `lora_backward`.
template <class X>
void lora_gradients(const X* x, int64_t in, const X* lora_hidden, const X* grad,
                    const int64_t* sizes, int64_t linears, const X* hidden_grad, int64_t rank,
                    float* grad_a, float* grad_bs, int64_t rows, int threads) {
    const int64_t columns = linears * rank, stride = round_up_to_vector(columns);
    int64_t width = 0;
    for (int64_t l = 0; l < linears; l++) width += sizes[l];
    std::vector<RowSum<X>> sums = {{hidden_grad, stride, columns, x, in, in, grad_a, in, 1}};
    for (int64_t l = 0, at = 0; l < linears; at += sizes[l++])
        sums.push_back({lora_hidden + l * rank, stride, rank, grad + at, width, sizes[l],
                        grad_bs + at * rank, 1, rank});
    std::vector<std::array<int64_t, 2>> items;
    for (int64_t i = 0; i < (int64_t)sums.size(); i++)
        for (int64_t w = 0; w < sums[i].width; w += SUM_WIDTH) items.push_back({i, w});
    parallel_items(items.size(), threads, [&](int64_t item) {
        const amx::TileScope scope(uses_amx<X>());
        static thread_local RowSumBuffers buffers;
        const auto [i, w] = items[item];
        row_sum(sums[i], w, std::min(SUM_WIDTH, sums[i].width - w), rows, buffers);
    });
}

// x A^T of each row's adapter, rounded: lora_hidden [T, hidden_stride]. Rows without an adapter,
// and columns after L, stay as they are.
template <class X>
void head_lora_hidden(const HeadAdapter<X>* adapters, int64_t n, const X* x, int64_t in,
                      X* lora_hidden, int64_t hidden_stride, int64_t rows, int threads) {
    parallel(rows, rows * in * LANES, threads, [=](int64_t a, int64_t b) {
        const amx::TileScope scope(uses_amx<X>());
        for (const HeadAdapter<X>* own = adapters; own < adapters + n; own++) {
            const int64_t first = std::max(a, own->first),
                          last = std::min(b, own->first + own->count);
            const MatmulRows<X> operands{x, in, nullptr, 0, lora_hidden, hidden_stride};
            if (first < last)
                matmul_outputs(Panels<X>{own->a_panels, round_up_to_vector(own->rank), in},
                               operands.from_row(first), last - first);
        }
    });
}

// logits [T, v] += lora_hidden B^T of each row's adapter. Threads share the columns, of which there
// are many even for one row; within some of them, whose panels stay in the second cache, a few rows
// at a time are read and written along.
template <class X>
void add_head_lora(const HeadAdapter<X>* adapters, int64_t n, const X* lora_hidden,
                   int64_t hidden_stride, X* logits, int64_t v, int threads) {
    const int64_t COLUMNS = 1024, FEW = uses_amx<X>() ? amx::BLOCK : 2 * TILE_ROWS;
    int64_t rows = 0;
    for (int64_t i = 0; i < n; i++) rows += adapters[i].count;
    parallel((v + PANEL - 1) / PANEL, rows * v * LANES, threads, [=](int64_t a, int64_t b) {
        const amx::TileScope scope(uses_amx<X>());
        const MatmulRows<X> operands{lora_hidden, hidden_stride, logits, v, logits, v};
        for (const HeadAdapter<X>* own = adapters; own < adapters + n; own++)
            for (int64_t at = a * PANEL; at < std::min(b * PANEL, v); at += COLUMNS) {
                const int64_t columns = std::min(COLUMNS, std::min(b * PANEL, v) - at);
                const Panels<X> panels{own->b_panels + at * own->columns, columns, own->columns};
                for (int64_t r = 0; r < own->count; r += FEW)
                    matmul_outputs(panels, operands.from_row(own->first + r).from_column(at),
                                   std::min(FEW, own->count - r));
            }
    });
}

}  // namespace

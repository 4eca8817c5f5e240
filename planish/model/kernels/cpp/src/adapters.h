// LoRA: the adapters of a batch's rows, forth and back, and the gradients of one.

#pragma once

#include <array>
#include <vector>

#include "head.h"
#include "products.h"

namespace {

// The rows of one adapter in a batch, and its matrices for linears that read one input, as panels:
// A of all of them [linears * rank, in], and each B [out, rank]. `rank` is even: an odd one has a
// column of zeros more in the Bs.
template <class X>
struct LoraRows {
    const X *a, *b[3];
    int64_t rank, columns;  // `columns` of A: linears * rank as it was given
    int64_t first, count;
};

// f(adapter, first row, rows): pieces of all adapters' rows, for the threads to share.
template <class X, class F>
void by_rows(const LoraRows<X>* adapters, int64_t n, int64_t work, int threads, F f) {
    int64_t total = 0;
    for (int64_t i = 0; i < n; i++) total += adapters[i].count;
    const int64_t size = std::min<int64_t>(48, std::max<int64_t>(TILE_ROWS, total / (2 * threads)));
    std::vector<std::array<int64_t, 3>> pieces;
    for (int64_t i = 0; i < n; i++)
        for (int64_t r = 0; r < adapters[i].count; r += size)
            pieces.push_back({i, adapters[i].first + r, std::min(size, adapters[i].count - r)});
    parallel(pieces.size(), total * work, threads, [&](int64_t a, int64_t b) {
        const tiles::Use use(by_tiles_of_amx<X>());
        for (int64_t p = a; p < b; p++) f(adapters[pieces[p][0]], pieces[p][1], pieces[p][2]);
    });
}

// out [T, sum of sizes] += (x [T, in] A^T) B^T of each row's adapter; the rounded product with A,
// low [T, L], is kept if there is room for it. Here and below, L are `columns` in whole vectors.
template <class X>
void add_lora(const LoraRows<X>* adapters, int64_t n, const X* x, int64_t in, X* out,
              const int64_t* sizes, int64_t linears, X* kept, int threads) {
    int64_t width = 0;
    for (int64_t l = 0; l < linears; l++) width += sizes[l];
    by_rows(adapters, n, (in + width) * LANES, threads,
            [=](const LoraRows<X>& own, int64_t first, int64_t count) {
                const int64_t columns = whole_vectors(own.columns);
                std::vector<X> room(kept ? 0 : count * columns);
                X* low = kept ? kept + first * columns : room.data();
                product_part(Panels<X>{own.a, columns, in},
                             {x + first * in, in, nullptr, 0, low, columns}, count);
                X* to = out + first * width;
                for (int64_t l = 0; l < linears; to += sizes[l++])
                    product_part(Panels<X>{own.b[l], sizes[l], own.rank},
                                 {low + l * (own.columns / linears), columns, to, width, to, width},
                                 count);
            });
}

// The way back: low_grad [T, L] = the linears' parts of grad [T, sum of sizes] times their Bs, and
// grad_x [T, in] += low_grad A, unless grad_x is null. Here the panels are of the matrices turned:
// each b of B^T [rank, out], a of A^T [in, columns], with a column of zeros more if there are oddly
// many.
template <class X>
void lora_backward(const LoraRows<X>* adapters, int64_t n, const X* grad, const int64_t* sizes,
                   int64_t linears, X* low_grad, X* grad_x, int64_t in, int threads) {
    int64_t width = 0;
    for (int64_t l = 0; l < linears; l++) width += sizes[l];
    by_rows(adapters, n, (in + width) * LANES, threads,
            [=](const LoraRows<X>& own, int64_t first, int64_t count) {
                const int64_t columns = whole_vectors(own.columns), rank = own.columns / linears,
                              wide = whole_vectors(rank);
                // A linear's columns may end within a panel, so they go through a room of their
                // own.
                std::vector<X> room(count * wide);
                const X* from = grad + first * width;
                for (int64_t l = 0; l < linears; from += sizes[l++]) {
                    product_part(Panels<X>{own.b[l], wide, sizes[l]},
                                 {from, width, nullptr, 0, room.data(), wide}, count);
                    for (int64_t r = 0; r < count; r++)
                        std::memcpy(low_grad + (first + r) * columns + l * rank,
                                    room.data() + r * wide, rank * sizeof(X));
                }
                for (int64_t r = 0; r < count; r++)
                    std::fill(low_grad + (first + r) * columns + own.columns,
                              low_grad + (first + r + 1) * columns, 0);
                if (!grad_x) return;
                X* to = grad_x + first * in;
                product_part(Panels<X>{own.a, in, (own.columns + 1) / 2 * 2},
                             {low_grad + first * columns, columns, to, in, to, in}, count);
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
constexpr int64_t SUM_AHEAD =
    16;  // rows that are called for before they are needed: they lie on a page each
constexpr int SUM_VECTORS = std::min(2, tile_vectors(TILE_ROWS));  // of `wide` in a tile
constexpr int SUM_TILE =
    TILE_ROWS * tile_vectors(TILE_ROWS) / SUM_VECTORS;  // by columns of `narrow`

// What one step multiplies, side by side for all columns: [steps][stride]. Of bf16 two rows; a last
// one that is alone meets zeros.
template <class X>
using Step = std::conditional_t<NARROW<X>, uint32_t, float>;
template <class X>
constexpr int64_t STEP_ROWS = NARROW<X> ? 2 : 1;

inline void gather_steps(const uint16_t* rows, int64_t row_stride, int64_t count, int64_t columns,
                         uint32_t* to, int64_t stride) {
    for (int64_t t = 0; t < count; t += 2)
        for (int64_t c = 0; c < columns; c += LANES) {
            const int64_t left = columns - c;
            const uint16_t* from = rows + t * row_stride + c;
            _mm_prefetch((const char*)(from + SUM_AHEAD * row_stride), _MM_HINT_T0);
            _mm_prefetch((const char*)(from + (SUM_AHEAD + 1) * row_stride), _MM_HINT_T0);
            store_words(
                to + t / 2 * stride + c,
                load_joined(from, tail(left), from + row_stride, tail(t + 1 < count ? left : 0)),
                tail(left));
        }
}

inline void gather_steps(const float* rows, int64_t row_stride, int64_t count, int64_t columns,
                         float* to, int64_t stride) {
    for (int64_t t = 0; t < count; t++)
        for (int64_t c = 0; c < columns; c += LANES) {
            const float* from = rows + t * row_stride + c;
            _mm_prefetch((const char*)(from + SUM_AHEAD * row_stride), _MM_HINT_T0);
            const Tail there = tail(columns - c);
            store(to + t * stride + c, load(from, there), there);
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
void row_sum_tile(const S* narrow, int64_t stride, const S* wide, int64_t steps, bool fresh,
                  float* total) {
    Sums<R, SUM_VECTORS> sums;
    for (int64_t t = 0; t < steps; t++)
        add_step<R>(narrow + t * stride, wide + t * SUM_WIDTH, sums);
    sums.each([=](int r, int c, V sum) {
        float* to = total + r * SUM_WIDTH + c * LANES;
        store(to, fresh ? sum : add(load(to), sum));
    });
}

struct RowSumRooms {
    Room narrow, wide, total, turned;
};

// total [columns][SUM_WIDTH] (+)= the sum over steps by AMX's tiles, in their order: runs of 32
// rows. `narrow` [steps][stride], `wide` [steps][SUM_WIDTH]; both have room for whole runs.
inline void row_sum_of_tiles(uint32_t* narrow, int64_t stride, int64_t columns, uint32_t* wide,
                             int64_t width, int64_t steps, bool fresh, float* total, Room& room) {
    const int64_t whole = whole_vectors(steps);  // a run has as many pairs as a vector has lanes
    std::fill(narrow + steps * stride, narrow + whole * stride, 0);
    std::fill(wide + steps * SUM_WIDTH, wide + whole * SUM_WIDTH, 0);
    float* turned = room.of<float>(stride * whole);
    turn((const float*)narrow, stride, whole, stride, turned, whole);
    (fresh ? tiles::multiply<false> : tiles::multiply<true>)((const uint16_t*)turned, 2 * whole,
                                                             columns, wide, SUM_WIDTH, whole, width,
                                                             total, SUM_WIDTH);
}

// Columns first .. first + width - 1 of `wide`, at most SUM_WIDTH.
template <class X>
void row_sum(const RowSum<X>& own, int64_t first, int64_t width, int64_t rows, RowSumRooms& rooms) {
    constexpr int64_t AT_ONCE = SUM_STEPS * STEP_ROWS<X>;
    const int64_t stride = whole_vectors(own.columns);
    auto* narrow = rooms.narrow.of<Step<X>>(SUM_STEPS * stride);
    auto* wide = rooms.wide.of<Step<X>>(SUM_STEPS * SUM_WIDTH);
    float* total = rooms.total.of<float>(own.columns * SUM_WIDTH);
    for (int64_t t = 0; t < rows; t += AT_ONCE) {
        const int64_t count = std::min(AT_ONCE, rows - t),
                      steps = (count + STEP_ROWS<X> - 1) / STEP_ROWS<X>;
        gather_steps(own.narrow + t * own.narrow_stride, own.narrow_stride, count, own.columns,
                     narrow, stride);
        gather_steps(own.wide + t * own.wide_stride + first, own.wide_stride, count, width, wide,
                     SUM_WIDTH);
        if constexpr (NARROW<X>)
            if (uses_tiles) {
                row_sum_of_tiles(narrow, stride, own.columns, wide, width, steps, t == 0, total,
                                 rooms.turned);
                continue;
            }
        for (int64_t w = 0; w < width; w += SUM_VECTORS * LANES)
            by_tiles<SUM_TILE>(own.columns, [&](int64_t c, auto size) {
                row_sum_tile<size>(narrow + c, stride, wide + w, steps, t == 0,
                                   total + c * SUM_WIDTH + w);
            });
    }
    if (!rows) std::fill(total, total + own.columns * SUM_WIDTH, 0.0f);
    if (own.width_step > 1)
        return turn(total, SUM_WIDTH, own.columns, width, own.out + first * own.width_step,
                    own.width_step);
    for (int64_t c = 0; c < own.columns; c++)
        std::memcpy(own.out + c * own.column_step + first, total + c * SUM_WIDTH, 4 * width);
}

// Gradients of the matrices of one adapter for all rows: of A, [columns, in], low_grad^T x; of each
// B, [size, rank], its part of grad^T times its part of low. low and low_grad [T, L] are what
// `add_lora` and `lora_backward` left.
template <class X>
void lora_gradients(const X* x, int64_t in, const X* low, const X* grad, const int64_t* sizes,
                    int64_t linears, const X* low_grad, int64_t rank, float* grad_a, float* grad_bs,
                    int64_t rows, int threads) {
    const int64_t columns = linears * rank, stride = whole_vectors(columns);
    int64_t width = 0;
    for (int64_t l = 0; l < linears; l++) width += sizes[l];
    std::vector<RowSum<X>> sums = {{low_grad, stride, columns, x, in, in, grad_a, in, 1}};
    for (int64_t l = 0, at = 0; l < linears; at += sizes[l++])
        sums.push_back({low + l * rank, stride, rank, grad + at, width, sizes[l],
                        grad_bs + at * rank, 1, rank});
    std::vector<std::array<int64_t, 2>> items;
    for (int64_t i = 0; i < (int64_t)sums.size(); i++)
        for (int64_t w = 0; w < sums[i].width; w += SUM_WIDTH) items.push_back({i, w});
    parallel_items(items.size(), threads, [&](int64_t item) {
        const tiles::Use use(by_tiles_of_amx<X>());
        static thread_local RowSumRooms rooms;
        const auto [i, w] = items[item];
        row_sum(sums[i], w, std::min(SUM_WIDTH, sums[i].width - w), rows, rooms);
    });
}

// x A^T of each row's adapter, rounded: low [T, low_stride], of which rows without an adapter, and
// columns behind L, stay as they are.
template <class X>
void head_low(const HeadRows<X>* adapters, int64_t n, const X* x, int64_t in, X* low,
              int64_t low_stride, int64_t rows, int threads) {
    parallel(rows, rows * in * LANES, threads, [=](int64_t a, int64_t b) {
        const tiles::Use use(by_tiles_of_amx<X>());
        for (const HeadRows<X>* own = adapters; own < adapters + n; own++) {
            const int64_t first = std::max(a, own->first),
                          last = std::min(b, own->first + own->count);
            const Rows<X> all{x, in, nullptr, 0, low, low_stride};
            if (first < last)
                product_part(Panels<X>{own->a_panels, whole_vectors(own->rank), in},
                             all.from(first), last - first);
        }
    });
}

// logits [T, v] += low B^T of each row's adapter. Threads share the columns, of which there are
// many even for one row; within some of them, whose panels stay in the second cache, a few rows at
// a time are read and written along.
template <class X>
void add_head(const HeadRows<X>* adapters, int64_t n, const X* low, int64_t low_stride, X* logits,
              int64_t v, int threads) {
    const int64_t COLUMNS = 1024, FEW = by_tiles_of_amx<X>() ? tiles::BLOCK : 2 * TILE_ROWS;
    int64_t rows = 0;
    for (int64_t i = 0; i < n; i++) rows += adapters[i].count;
    parallel((v + PANEL - 1) / PANEL, rows * v * LANES, threads, [=](int64_t a, int64_t b) {
        const tiles::Use use(by_tiles_of_amx<X>());
        const Rows<X> all{low, low_stride, logits, v, logits, v};
        for (const HeadRows<X>* own = adapters; own < adapters + n; own++)
            for (int64_t at = a * PANEL; at < std::min(b * PANEL, v); at += COLUMNS) {
                const int64_t columns = std::min(COLUMNS, std::min(b * PANEL, v) - at);
                const Panels<X> there{own->b_panels + at * own->columns, columns, own->columns};
                for (int64_t r = 0; r < own->count; r += FEW)
                    product_part(there, all.from(own->first + r).at(at),
                                 std::min(FEW, own->count - r));
            }
    });
}

}  // namespace

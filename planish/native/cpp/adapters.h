// LoRA: the adapters of a batch's rows, forth and back, and the gradients of one.

#pragma once

#include <array>
#include <vector>

#include "head.h"
#include "products.h"

namespace {

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
        const tiles::Use use(uses_tiles);
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

// One gradient of an adapter's matrices: the sum over all rows t of narrow[t][c] * wide[t][w], for `columns` c and `width` w, a multiple of 32.
struct RowSum {
    const uint16_t* narrow;
    int64_t narrow_stride, columns;
    const uint16_t* wide;
    int64_t wide_stride, width;
    float* out;
    int64_t column_step, width_step;  // where (c, w) goes: out[c * column_step + w * width_step]
};

// Of a sum over rows, pairs of rows are added one after another (`Sums`), a fresh sum for each
// `SUMMED` rows; then these sums in their order. Columns are shared out among threads, rows are not.
constexpr int64_t SUM_WIDTH = 256;  // columns of `wide` that a thread takes at a time: in pairs, they stay in the second cache
constexpr int64_t SUM_AHEAD = 16;   // rows that are called for before they are needed: they lie on a page each
constexpr int SUM_VECTORS = std::min(2, tile_vectors(TILE_ROWS));                // of `wide` in a tile
constexpr int SUM_TILE = TILE_ROWS * tile_vectors(TILE_ROWS) / SUM_VECTORS;  // by columns of `narrow`

// Rows in pairs, column by column: [count/2][stride]; a last row that is alone meets zeros.
inline void paired(const uint16_t* rows, int64_t row_stride, int64_t count, int64_t columns, uint32_t* to, int64_t stride) {
    for (int64_t t = 0; t < count; t += 2)
        for (int64_t c = 0; c < columns; c += LANES) {
            const int64_t left = columns - c;
            const uint16_t* from = rows + t * row_stride + c;
            _mm_prefetch((const char*)(from + SUM_AHEAD * row_stride), _MM_HINT_T0);
            _mm_prefetch((const char*)(from + (SUM_AHEAD + 1) * row_stride), _MM_HINT_T0);
            store_words(to + t / 2 * stride + c, load_joined(from, tail(left), from + row_stride, tail(t + 1 < count ? left : 0)), tail(left));
        }
}

// total[R][SUM_WIDTH] (+)= the sum over pairs of rows, for R columns of `narrow` and some vectors of `wide`.
template <int R>
void row_sum_tile(const uint32_t* narrow, int64_t stride, const uint32_t* wide, int64_t pairs, bool fresh, float* total) {
    Sums<R, SUM_VECTORS> sums;
    for (int64_t t = 0; t < pairs; t++) {
        auto words = [=](I* to) {
            for (int c = 0; c < SUM_VECTORS; c++) to[c] = load_words(wide + t * SUM_WIDTH + c * LANES);
        };
        sums.add([=](int r) { return narrow + t * stride + r; }, words);
    }
    sums.each([=](int r, int c, V sum) {
        float* to = total + r * SUM_WIDTH + c * LANES;
        store(to, fresh ? sum : add(load(to), sum));
    });
}

struct RowSumRooms {
    Room narrow, wide, total;
};

// Columns first .. first + width - 1 of `wide`, at most SUM_WIDTH.
inline void row_sum(const RowSum& own, int64_t first, int64_t width, int64_t rows, RowSumRooms& rooms) {
    auto* narrow = rooms.narrow.of<uint32_t>(SUMMED / 2 * own.columns);
    auto* wide = rooms.wide.of<uint32_t>(SUMMED / 2 * SUM_WIDTH);
    float* total = rooms.total.of<float>(own.columns * SUM_WIDTH);
    for (int64_t t = 0; t < rows; t += SUMMED) {
        const int64_t count = std::min(SUMMED, rows - t);
        paired(own.narrow + t * own.narrow_stride, own.narrow_stride, count, own.columns, narrow, own.columns);
        paired(own.wide + t * own.wide_stride + first, own.wide_stride, count, width, wide, SUM_WIDTH);
        for (int64_t w = 0; w < width; w += SUM_VECTORS * LANES)
            by_tiles<SUM_TILE>(own.columns, [&](int64_t c, auto size) {
                row_sum_tile<size>(narrow + c, own.columns, wide + w, (count + 1) / 2, t == 0, total + c * SUM_WIDTH + w);
            });
    }
    if (!rows) std::fill(total, total + own.columns * SUM_WIDTH, 0.0f);
    for (int64_t w = 0; w < width; w++)
        for (int64_t c = 0; c < own.columns; c++)
            own.out[c * own.column_step + (first + w) * own.width_step] = total[c * SUM_WIDTH + w];
}

// Gradients of the matrices of one adapter for all rows: of A, [columns, in], low_grad^T x; of each B, [size, rank], its part of grad^T times its part of
// low. low and low_grad [T, low_width] are what `add_lora` and `lora_backward` left.
void lora_gradients(const uint16_t* x, int64_t in, const uint16_t* low, const uint16_t* grad, const int64_t* sizes, int64_t linears,
                    const uint16_t* low_grad, int64_t rank, float* grad_a, float* grad_bs, int64_t rows, int threads) {
    const int64_t columns = linears * rank, stride = low_width(columns);
    int64_t width = 0;
    for (int64_t l = 0; l < linears; l++) width += sizes[l];
    std::vector<RowSum> sums = {{low_grad, stride, columns, x, in, in, grad_a, in, 1}};
    for (int64_t l = 0, at = 0; l < linears; at += sizes[l++])
        sums.push_back({low + l * rank, stride, rank, grad + at, width, sizes[l], grad_bs + at * rank, 1, rank});
    std::vector<std::array<int64_t, 2>> items;
    for (int64_t i = 0; i < (int64_t)sums.size(); i++)
        for (int64_t w = 0; w < sums[i].width; w += SUM_WIDTH) items.push_back({i, w});
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
        RowSumRooms rooms;
#pragma omp for schedule(dynamic, 1)
        for (int64_t item = 0; item < (int64_t)items.size(); item++) {
            const auto [i, w] = items[item];
            row_sum(sums[i], w, std::min(SUM_WIDTH, sums[i].width - w), rows, rooms);
        }
    }
}

// x A^T of each row's adapter, rounded: low [T, low_stride], of which rows without an adapter, and columns behind low_width(rank), stay as they are.
void head_low(const HeadRows* adapters, int64_t n, const uint16_t* x, int64_t in, uint16_t* low, int64_t low_stride, int64_t rows, int threads) {
    parallel(rows, rows * in * HALF, threads, [=](int64_t a, int64_t b) {
        const tiles::Use use(uses_tiles);
        for (const HeadRows* own = adapters; own < adapters + n; own++) {
            const int64_t first = std::max(a, own->first), last = std::min(b, own->first + own->count);
            const Rows all{x, in, nullptr, 0, low, low_stride};
            if (first < last) product_part(own->a_panels, all.from(first), last - first, low_width(own->rank), in);
        }
    });
}

// logits [T, v] += low B^T of each row's adapter. Threads share the columns, of which there are many even for one row; within some of them, whose
// panels stay in the second cache, a few rows at a time are read and written along.
void add_head(const HeadRows* adapters, int64_t n, const uint16_t* low, int64_t low_stride, uint16_t* logits, int64_t v, int threads) {
    const int64_t COLUMNS = 1024, FEW = uses_tiles ? tiles::BLOCK : 2 * TILE_ROWS;
    int64_t rows = 0;
    for (int64_t i = 0; i < n; i++) rows += adapters[i].count;
    parallel((v + PANEL - 1) / PANEL, rows * v * LANES, threads, [=](int64_t a, int64_t b) {
        const tiles::Use use(uses_tiles);
        const Rows all{low, low_stride, logits, v, logits, v};
        for (const HeadRows* own = adapters; own < adapters + n; own++)
            for (int64_t at = a * PANEL; at < std::min(b * PANEL, v); at += COLUMNS) {
                const int64_t columns = std::min(COLUMNS, std::min(b * PANEL, v) - at);
                for (int64_t r = 0; r < own->count; r += FEW)
                    product_part(own->b_panels + at * own->columns, all.from(own->first + r).at(at), std::min(FEW, own->count - r), columns,
                                 own->columns);
            }
    });
}

}  // namespace

// Products with bf16 weights.

#pragma once

#include <vector>

#include "tiles.h"
#include "vectors.h"

namespace {

// Weights are [N, K] in panels of 64 outputs, [N/64][K/2][64][2], so that a pair of columns meets 16 outputs in one instruction; what the
// last panel has too many is 0. Of an output, pairs of columns are added one after another (`Sums`),
// a fresh sum for each `SUMMED` columns; then these sums in their order, then the bias. (By AMX: tiles.h.)
constexpr int64_t PANEL = 64, HALF = PANEL / 2, SUMMED = 512;
constexpr int64_t CACHED_INPUTS = 1 << 18;  // numbers of x that stay in the second cache, beside a panel

// A matrix [n, k] to panels of its n outputs; the matrix is [k, n] if it is to be turned. Of an odd k, the pair of the last column has a zero.
struct Packing {
    const uint16_t* matrix;
    uint16_t* panels;
    int64_t n, k;

    int64_t columns() const { return (k + 1) / 2 * 2; }
};

// The outputs from `first` on. What a panel has behind a half without outputs is not read, and not written. The stores go past the caches, which a
// whole adapter would flood: panels begin at multiples of 64 bytes.
inline void pack_panel(const Packing& given, int64_t first, uint16_t* panel, bool turned) {
    const int64_t n = given.n, k = given.k, outputs = std::min(PANEL, (n - first + HALF - 1) / HALF * HALF);
    if (turned) {
        for (int64_t i = 0; i < k; i += 2)
            for (int64_t c = 0; c < outputs; c += LANES) {
                const int64_t left = n - first - c;
                const uint16_t* from = given.matrix + i * n + first + c;
                stream_words(panel + i * PANEL + c * 2, load_joined(from, tail(left), from + n, tail(i + 1 < k ? left : 0)));
            }
        return;
    }
    for (int64_t i = 0; i < k; i += 2 * LANES) {
        for (int64_t c = 0; c < outputs; c += LANES) {
            I x[LANES];
            for (int r = 0; r < LANES; r++)
                x[r] = first + c + r < n ? load_words(given.matrix + (first + c + r) * k + i, k - i) : no_words();
            turn16(x);
            for (int j = 0; j < LANES && i + 2 * j < k; j++) stream_words(panel + (i + 2 * j) * PANEL + c * 2, x[j]);
        }
    }
}

// Panels are shared out to threads by their size, as they lie one behind the other.
void pack_panels(const Packing* matrices, int64_t count, bool turned, int threads) {
    auto panels = [](const Packing& one) { return (one.n + PANEL - 1) / PANEL; };
    int64_t total = 0;
    for (int64_t i = 0; i < count; i++) total += panels(matrices[i]) * PANEL * matrices[i].columns();
    parallel(total, total, threads, [=](int64_t a, int64_t b) {
        int64_t at = 0;
        for (const Packing* one = matrices; one < matrices + count; one++)
            for (int64_t p = 0; p < panels(*one); p++, at += PANEL * one->columns())
                if (at >= a && at < b) pack_panel(*one, p * PANEL, one->panels + p * PANEL * one->columns(), turned);
        _mm_sfence();
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
void product_tile(const uint16_t* weight, const Operand& x, int64_t row, const Rows& rows, int64_t k) {
    V total[R][W];
    // What the next tile writes is called for: it lies on a page for each row, where the CPU foresees nothing.
    for (int r = 0; r < R; r++)
        for (int c = 0; c < W; c += 2) _mm_prefetch((const char*)(rows.out + (r + TILE_ROWS) * rows.out_stride + c * LANES), _MM_HINT_T0);
    for (int64_t first = 0; first < k; first += SUMMED) {
        Sums<R, W> sums;
        x.multiply(row, weight, 2 * PANEL, first, std::min(k, first + SUMMED), sums);
        sums.each([&](int r, int c, V sum) { total[r][c] = first ? add(total[r][c], sum) : sum; });
    }
    for (int r = 0; r < R; r++)
        for (int c = 0; c < W; c++) {
            const V found = rows.addend ? add(total[r][c], load(rows.addend + r * rows.addend_stride + c * LANES)) : total[r][c];
            store(rows.out + r * rows.out_stride + c * LANES, narrowed_fast(found));
        }
}

// What multiplies: AMX's tiles if the CPU has them and they were seen to multiply right (use_tiles), else vectors. They add in different orders.
bool uses_tiles = false;

template <int W>
void amx_rows(const uint16_t* weight, const Rows& rows, int64_t count, int64_t k) {
    alignas(64) float sums[tiles::BLOCK * tiles::BLOCK];
    for (int c = 0; c < W; c += 2)
        for (int64_t first = 0; first < count; first += tiles::BLOCK) {
            const Rows own = rows.from(first).at(c * LANES);
            const int64_t size = std::min<int64_t>(tiles::BLOCK, count - first);
            tiles::block(weight + c * 2 * LANES, 2 * PANEL, own.x, own.x_stride, size, k, sums);
            for (int64_t r = 0; r < size; r++)
                for (int v = 0; v < 2 * LANES; v += LANES) {
                    V total = load(sums + r * tiles::BLOCK + v);
                    if (own.addend) total = add(total, load(own.addend + r * own.addend_stride + v));
                    store(own.out + r * own.out_stride + v, total);
                }
        }
}

template <int W>
void product_rows(const uint16_t* weight, const Operand& x, const Rows& rows, int64_t count, int64_t k) {
    if (uses_tiles) return amx_rows<W>(weight, rows, count, k);
    by_tiles(count, [&](int64_t first, auto size) {
        constexpr int R = size, C = std::min(W, tile_vectors(R));
        for (int c = 0; c < W; c += C) product_tile<R, C>(weight + c * 2 * LANES, x, first, rows.from(first).at(c * LANES), k);
    });
}

// All n outputs, a multiple of HALF, of `count` rows.
void product_part(const uint16_t* panels, const Rows& rows, int64_t count, int64_t n, int64_t k) {
    const Operand x(rows.x, rows.x_stride, count, k);
    for (int64_t at = 0; at < n; at += PANEL)
        (at + PANEL <= n ? product_rows<4> : product_rows<2>)(panels + at * k, x, rows.at(at), count, k);
}

// x [T, K] by panels to [T, N]. Parts of the rows by half panels: a part's inputs are cached while the weights stream by, and halves are
// shared out more evenly than panels, which may be fewer than threads.
void product(const uint16_t* panels, const uint16_t* x, const uint16_t* bias, uint16_t* out, int64_t rows, int64_t n, int64_t k, int threads) {
    const int64_t halves = n / HALF;
    const int64_t for_threads = std::min((rows + 31) / 32, (4 * threads + halves - 1) / halves);
    const int64_t parts = std::max((rows * k + CACHED_INPUTS - 1) / CACHED_INPUTS, for_threads);
    parallel(parts * halves, rows * n * k, threads, [=](int64_t a, int64_t b) {
        const tiles::Use use(uses_tiles);
        for (int64_t item = a; item < b;) {
            const int64_t part = item / halves, end = std::min(b, (part + 1) * halves);
            const int64_t first = rows * part / parts, count = rows * (part + 1) / parts - first;
            const Rows own = Rows{x, k, bias, 0, out, n}.from(first);
            const Operand inputs(own.x, k, count, k);
            while (item < end) {
                const int64_t at = item % halves * HALF;
                const uint16_t* weight = panels + at / PANEL * PANEL * k + at % PANEL * 2;
                const bool whole = at % PANEL == 0 && item + 2 <= end;
                (whole ? product_rows<4> : product_rows<2>)(weight, inputs, own.at(at), count, k);
                item += whole ? 2 : 1;
            }
        }
    });
}

}  // namespace

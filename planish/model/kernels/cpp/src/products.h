// Products with weights of bf16 or float32.

#pragma once

#include <vector>

#include "quantized.h"
#include "tiles.h"
#include "vectors.h"

namespace {

// Weights are [N, K] in panels of 64 outputs: of bf16 [N/64][K/2][64][2], so that a pair of columns
// meets 16 outputs in one instruction, of float32 [N/64][K][64]. The last panel has only the
// vectors of 16 that it needs, of which what is too many is 0: what an adapter has between its
// matrices is often less than a panel. Of an output, columns, or pairs of them, are added one after
// another (`Sums`), a fresh sum for each `SUMMED` columns; then these sums in their order, then the
// bias. (By AMX: tiles.h.)
constexpr int64_t PANEL = 64, HALF = PANEL / 2;
constexpr int64_t CACHED_INPUTS =
    1 << 19;                       // bytes of x that stay in the second cache, beside a panel
constexpr int64_t STRETCH = 2048;  // columns that are multiplied at a time, for the same reason: a
                                   // head's way back has 100,000 and more
template <class X>
constexpr bool NARROW = sizeof(X) == 2;
template <class X>
constexpr int64_t SUMMED =
    NARROW<X> ? 512 : 64;  // of float32 fewer: the longer a sum, the more its last bits are off
template <class X>
constexpr int64_t APART =
    NARROW<X> ? 2 * LANES : LANES;  // how far apart 16 outputs and the next lie in a panel

inline int64_t whole_vectors(int64_t numbers) { return (numbers + LANES - 1) / LANES * LANES; }

// A matrix [n, k] to panels of its n outputs; the matrix is [k, n] if it is to be turned. Of an odd
// k, the last column has one of zeros beside it.
template <class X>
struct Packing {
    const X* matrix;
    X* panels;
    int64_t n, k;

    int64_t columns() const { return (k + 1) / 2 * 2; }
};

constexpr int64_t PACK_AHEAD = 32;  // rows of a matrix to be turned that are called for before they
                                    // are needed: they lie on a page each

// The panel of the outputs from `first` on. The stores go past the caches, which a whole adapter
// would flood: panels begin at multiples of 64 bytes.
inline void pack_panel(const Packing<uint16_t>& given, int64_t first, uint16_t* panel,
                       bool turned) {
    const int64_t n = given.n, k = given.k, outputs = std::min(PANEL, whole_vectors(n - first));
    if (turned) {
        for (int64_t i = 0; i < k; i += 2)
            for (int64_t c = 0; c < outputs; c += LANES) {
                const int64_t left = n - first - c;
                const uint16_t* from = given.matrix + i * n + first + c;
                _mm_prefetch((const char*)(from + PACK_AHEAD * n), _MM_HINT_T0);
                _mm_prefetch((const char*)(from + (PACK_AHEAD + 1) * n), _MM_HINT_T0);
                stream_words(panel + i * outputs + c * 2,
                             load_joined(from, tail(left), from + n, tail(i + 1 < k ? left : 0)));
            }
        return;
    }
    for (int64_t i = 0; i < k; i += 2 * LANES) {
        for (int64_t c = 0; c < outputs; c += LANES) {
            I x[LANES];
            for (int r = 0; r < LANES; r++)
                x[r] = first + c + r < n ? load_words(given.matrix + (first + c + r) * k + i, k - i)
                                         : no_words();
            turn16(x);
            for (int j = 0; j < LANES && i + 2 * j < k; j++)
                stream_words(panel + (i + 2 * j) * outputs + c * 2, x[j]);
        }
    }
}

inline void pack_panel(const Packing<float>& given, int64_t first, float* panel, bool turned) {
    const int64_t n = given.n, k = given.k, outputs = std::min(PANEL, whole_vectors(n - first));
    auto words = [](const float* from, int64_t left) {
        return load_words((const uint16_t*)from, 2 * left);
    };
    for (int64_t i = 0; i < given.columns(); i += turned ? 1 : LANES)
        for (int64_t c = 0; c < outputs; c += LANES) {
            if (turned) {
                stream_words(
                    panel + i * outputs + c,
                    i < k ? words(given.matrix + i * n + first + c, n - first - c) : no_words());
                continue;
            }
            I x[LANES];
            for (int r = 0; r < LANES; r++)
                x[r] = first + c + r < n ? words(given.matrix + (first + c + r) * k + i, k - i)
                                         : no_words();
            turn16(x);
            for (int j = 0; j < LANES && i + j < given.columns(); j++)
                stream_words(panel + (i + j) * outputs + c, x[j]);
        }
}

// Panels are shared out to threads by their size, as they lie one behind the other.
template <class X>
void pack_panels(const Packing<X>* matrices, int64_t count, bool turned, int threads) {
    auto panels = [](const Packing<X>& one) { return (one.n + PANEL - 1) / PANEL; };
    int64_t total = 0;
    for (int64_t i = 0; i < count; i++)
        total += panels(matrices[i]) * PANEL * matrices[i].columns();
    parallel(total, total, threads, [=](int64_t a, int64_t b) {
        int64_t at = 0;
        for (const Packing<X>* one = matrices; one < matrices + count; one++)
            for (int64_t p = 0; p < panels(*one); p++, at += PANEL * one->columns())
                if (at >= a && at < b)
                    pack_panel(*one, p * PANEL, one->panels + p * PANEL * one->columns(), turned);
        _mm_sfence();
    });
}

// Inputs and outputs of a product, whose rows lie apart. What is added last: a bias (stride 0),
// rows like those of the output, or nothing. `kept`: the sums of stretches so far, if there are
// several.
template <class X>
struct Rows {
    const X* x;
    int64_t x_stride;
    const X* addend;
    int64_t addend_stride;
    X* out;
    int64_t out_stride;
    float* kept = nullptr;
    int64_t kept_stride = 0;

    Rows from(int64_t r) const {
        return {x + r * x_stride,
                x_stride,
                addend ? addend + r * addend_stride : nullptr,
                addend_stride,
                out + r * out_stride,
                out_stride,
                kept ? kept + r * kept_stride : nullptr,
                kept_stride};
    }
    Rows at(int64_t c) const {
        return {x,       x_stride,   addend ? addend + c : nullptr, addend_stride,
                out + c, out_stride, kept ? kept + c : nullptr,     kept_stride};
    }
};

// Columns of a product, and whether none come before them, and none behind.
struct Stretch {
    int64_t columns;
    bool first, last;
};

// The panels of a matrix [n, k]; n is a multiple of LANES here, k is even. A quantized matrix has
// codes in place of numbers; `transposed`: it is that of the codes, transposed.
template <class X>
struct Panels {
    const X* numbers;
    int64_t n, k;
    const QuantizedWeight* codes = nullptr;
    bool transposed = false;
};

template <class X>
Panels<X> panels_of(const QuantizedWeight& codes, bool transposed) {
    return {nullptr, transposed ? codes.k : codes.n, transposed ? codes.n : codes.k, &codes,
            transposed};
}

// R rows by W vectors of outputs. multiply(first, last, sums) adds the products of these columns to
// `sums`.
template <int R, int W, class X, class F>
ALWAYS_INLINE void product_tile(F multiply, const Rows<X>& rows, const Stretch& stretch) {
    V total[R][W];
    // What the next tile writes is called for: it lies on a page for each row, where the CPU
    // foresees nothing.
    for (int r = 0; r < R; r++)
        for (int c = 0; c < W; c += NARROW<X> ? 2 : 1)
            _mm_prefetch((const char*)(rows.out + (r + TILE_ROWS) * rows.out_stride + c * LANES),
                         _MM_HINT_T0);
    for (int64_t first = 0; first < stretch.columns; first += SUMMED<X>) {
        Sums<R, W> sums;
        multiply(first, std::min(stretch.columns, first + SUMMED<X>), sums);
        sums.each([&](int r, int c, V sum) { total[r][c] = first ? add(total[r][c], sum) : sum; });
        if (first == 0 && !stretch.first)
            for (int r = 0; r < R; r++)
                for (int c = 0; c < W; c++)
                    total[r][c] =
                        add(load(rows.kept + r * rows.kept_stride + c * LANES), total[r][c]);
    }
    if (!stretch.last) {
        for (int r = 0; r < R; r++)
            for (int c = 0; c < W; c++)
                store(rows.kept + r * rows.kept_stride + c * LANES, total[r][c]);
        return;
    }
    for (int r = 0; r < R; r++)
        for (int c = 0; c < W; c++) {
            const V found =
                rows.addend
                    ? add(total[r][c], load(rows.addend + r * rows.addend_stride + c * LANES))
                    : total[r][c];
            store_sums(rows.out + r * rows.out_stride + c * LANES, found);
        }
}

// What multiplies: AMX's tiles if the CPU has them and they were seen to multiply right
// (use_tiles), else vectors. They add in different orders.
bool uses_tiles = false;
template <class X>
bool by_tiles_of_amx() {
    return NARROW<X> && uses_tiles;
}

template <int W>
void amx_rows(const uint16_t* weight, int64_t width, const Rows<uint16_t>& rows, int64_t count,
              const Stretch& stretch) {
    alignas(64) float sums[tiles::BLOCK * tiles::BLOCK];
    for (int c = 0; c < W; c += 2)
        for (int64_t first = 0; first < count; first += tiles::BLOCK) {
            const auto own = rows.from(first).at(c * LANES);
            const int64_t size = std::min<int64_t>(tiles::BLOCK, count - first);
            const int outputs = std::min(2, W - c) * LANES;
            tiles::block(weight + c * 2 * LANES, 2 * width, outputs, own.x, own.x_stride, size,
                         stretch.columns, sums);
            for (int64_t r = 0; r < size; r++)
                for (int v = 0; v < outputs; v += LANES) {
                    V total = load(sums + r * tiles::BLOCK + v);
                    float* kept = own.kept + r * own.kept_stride + v;
                    if (!stretch.first) total = add(load(kept), total);
                    if (!stretch.last) {
                        store(kept, total);
                        continue;
                    }
                    if (own.addend)
                        total = add(total, load(own.addend + r * own.addend_stride + v));
                    store(own.out + r * own.out_stride + v, total);
                }
        }
}

template <int W, class X>
void product_rows(const X* weight, int64_t width, const Operand<X>& x, const Rows<X>& rows,
                  int64_t count, const Stretch& stretch) {
    if constexpr (NARROW<X>)
        if (uses_tiles) return amx_rows<W>(weight, width, rows, count, stretch);
    by_tiles(count, [&](int64_t first, auto size) {
        constexpr int R = size, MOST = tile_vectors(R), C = W <= MOST ? W : W % MOST ? 1 : MOST;
        for (int c = 0; c < W; c += C)
            product_tile<R, C>(
                [&](int64_t from, int64_t to, Sums<R, C>& sums) {
                    x.multiply(first, weight + c * APART<X>, 2 * width, from, to, sums);
                },
                rows.from(first).at(c * LANES), stretch);
    });
}

// Of a few rows, the codes are multiplied as they are read: a panel of numbers between would cost
// as much again. The sums are the same. AVX2 widens pairs of bf16, so it has no such way.
#ifdef __AVX512F__
template <template <int> class Pairs, int R, int W>
void few_rows(const QuantizedWeight& codes, int64_t output, int64_t column,
              const Operand<uint16_t>& x,
              const Rows<uint16_t>& rows, const Stretch& stretch) {
    Pairs<W> pairs(codes);
    product_tile<R, W>(
        [&](int64_t first, int64_t last, Sums<R, W>& sums) {
            each_pair(codes, pairs, output, column, first, last,
                      [&](int64_t i, const uint8_t* from) {
                          sums.add([&](int r) { return x.pair(r, i); },
                                   [&](I* to) {
                                       for (int c = 0; c < W; c++) to[c] = pairs.words(from, c);
                                   });
                      });
        },
        rows, stretch);
}
#endif

// Whether these rows were multiplied by codes, `outputs` of them in one panel.
template <class X>
bool product_of_few(const Panels<X>& panels, int64_t output, int64_t outputs, int64_t column,
                    const Operand<X>& x, const Rows<X>& rows, int64_t count,
                    const Stretch& stretch) {
#ifdef __AVX512F__
    if constexpr (NARROW<X>) {
        if (count > TILE_ROWS || panels.transposed || uses_tiles) return false;
        with_size<TILE_ROWS>(count, [&](auto size) {
            with_size<PANEL / LANES>(outputs / LANES, [&](auto vectors) {
                constexpr int R = size, W = vectors;
                const int64_t scheme = panels.codes->scheme;
                const auto multiply = scheme == INT8  ? few_rows<Int8Pairs, R, W>
                                      : scheme == NF4 ? few_rows<Nf4Pairs, R, W>
                                                      : few_rows<Mxfp4Pairs, R, W>;
                multiply(*panels.codes, output, column, x, rows, stretch);
            });
        });
        return true;
    }
#endif
    return false;
}

// Outputs first .. last - 1 of `count` rows, whose `out` and `addend` begin with the first of them:
// from a half of a panel on, to another or the end.
template <class X>
void product_part(const Panels<X>& panels, Rows<X> rows, int64_t count, int64_t first,
                  int64_t last) {
    static thread_local Room room, tile_room;
    X* tile = panels.codes ? tile_room.of<X>(PANEL * STRETCH) : nullptr;
    if (panels.k > STRETCH)
        rows.kept = room.of<float>(count * (last - first)), rows.kept_stride = last - first;
    for (int64_t at = 0; at < panels.k; at += STRETCH, rows.x += STRETCH) {
        const Stretch stretch{std::min(STRETCH, panels.k - at), at == 0, at + STRETCH >= panels.k};
        const Operand<X> x(rows.x, rows.x_stride, count, stretch.columns);
        for (int64_t output = first, end; output < last; output = end) {
            const int64_t panel = output / PANEL * PANEL;
            int64_t width = std::min(PANEL, panels.n - panel);
            const X* weight = panels.numbers + panel * panels.k + at * width +
                              (output - panel) / LANES * APART<X>;
            end = std::min(last, panel + width);
            if (panels.codes) {
                if (product_of_few(panels, output, end - output, at, x, rows.at(output - first),
                                   count, stretch))
                    continue;
                weight = tile, width = end - output;
                panel_of_codes(*panels.codes, panels.transposed, output, width, at, stretch.columns,
                               tile);
            }
            with_size<PANEL / LANES>((end - output) / LANES, [&](auto vectors) {
                product_rows<vectors>(weight, width, x, rows.at(output - first), count, stretch);
            });
        }
    }
}

template <class X>
void product_part(const Panels<X>& panels, const Rows<X>& rows, int64_t count) {
    product_part(panels, rows, count, 0, panels.n);
}

// x [T, K] by panels to [T, N]. Parts of the rows by half panels: a part's inputs are cached while
// the weights stream by, and halves are shared out more evenly than panels, which may be fewer than
// threads.
template <class X>
void product(const Panels<X>& panels, const X* x, const X* bias, X* out, int64_t rows,
             int threads) {
    const int64_t n = panels.n, k = panels.k;
    const int64_t halves = (n + HALF - 1) / HALF,
                  input_bytes = rows * std::min(k, STRETCH) * (int64_t)sizeof(X);
    const int64_t for_threads = std::min((rows + 31) / 32, (4 * threads + halves - 1) / halves);
    const int64_t parts = std::max((input_bytes + CACHED_INPUTS - 1) / CACHED_INPUTS, for_threads);
    parallel(parts * halves, rows * n * k, threads, [=](int64_t a, int64_t b) {
        const tiles::Use use(by_tiles_of_amx<X>());
        for (int64_t item = a, end; item < b; item = end) {
            const int64_t part = item / halves, from = item % halves * HALF;
            end = std::min(b, (part + 1) * halves);
            const int64_t first = rows * part / parts, count = rows * (part + 1) / parts - first,
                          to = std::min(n, from + (end - item) * HALF);
            product_part(panels, Rows<X>{x, k, bias, 0, out, n}.from(first).at(from), count, from,
                         to);
        }
    });
}

}  // namespace

// Matmuls with weights of bf16 or float32.

#pragma once

#include <vector>

#include "amx.h"
#include "quantized.h"
#include "vectors.h"

namespace {

// Weights are [N, K] in panels of 64 outputs: of bf16 [N/64][K/2][64][2], so that a pair of columns
// meets 16 outputs in one instruction, of float32 [N/64][K][64]. The last panel has only the
// vectors of 16 that it needs, of which what is too many is 0: what an adapter has between its
// matrices is often less than a panel. Of an output, columns, or pairs of them, are added one after
// another (`Sums`), a fresh sum for each `COLUMNS_PER_SUM` columns; then these sums in their order,
// then the bias. (By AMX: amx.h.)
constexpr int64_t PANEL = 64, HALF_PANEL = PANEL / 2;
constexpr int64_t CACHED_INPUT_BYTES =
    1 << 19;                            // bytes of x that stay in the second cache, beside a panel
constexpr int64_t COLUMN_BLOCK = 2048;  // columns that are multiplied at a time, for the same
                                        // reason: a head's backward pass has 100,000 and more
template <class X>
constexpr bool IS_BF16 = sizeof(X) == 2;
template <class X>
constexpr int64_t COLUMNS_PER_SUM =
    IS_BF16<X> ? 512 : 64;  // of float32 fewer: the longer a sum, the more its last bits are off
template <class X>
constexpr int64_t VECTOR_STRIDE =
    IS_BF16<X> ? 2 * LANES : LANES;  // how far apart 16 outputs and the next lie in a panel

inline int64_t round_up_to_vector(int64_t elements) {
    return (elements + LANES - 1) / LANES * LANES;
}

// A matrix [n, k] to panels of its n outputs; the matrix is [k, n] if it is to be transposed. Of an
// odd k, the last column has one of zeros beside it.
template <class X>
struct PackRecord {
    const X* matrix;
    X* panels;
    int64_t n, k;

    int64_t columns() const { return (k + 1) / 2 * 2; }
};

constexpr int64_t PACK_PREFETCH_ROWS = 32;  // rows of a matrix to transpose that are prefetched
                                            // before they are needed: they lie on a page each

// The panel of the outputs from `first` on. The stores go past the caches, which a whole adapter
// would flood: panels begin at multiples of 64 bytes.
inline void pack_panel(const PackRecord<uint16_t>& record, int64_t first, uint16_t* panel,
                       bool transposed) {
    const int64_t n = record.n, k = record.k,
                  outputs = std::min(PANEL, round_up_to_vector(n - first));
    if (transposed) {
        for (int64_t i = 0; i < k; i += 2)
            for (int64_t c = 0; c < outputs; c += LANES) {
                const int64_t left = n - first - c;
                const uint16_t* from = record.matrix + i * n + first + c;
                _mm_prefetch((const char*)(from + PACK_PREFETCH_ROWS * n), _MM_HINT_T0);
                _mm_prefetch((const char*)(from + (PACK_PREFETCH_ROWS + 1) * n), _MM_HINT_T0);
                stream_words(
                    panel + i * outputs + c * 2,
                    load_interleaved(from, tail(left), from + n, tail(i + 1 < k ? left : 0)));
            }
        return;
    }
    for (int64_t i = 0; i < k; i += 2 * LANES) {
        for (int64_t c = 0; c < outputs; c += LANES) {
            I x[LANES];
            for (int r = 0; r < LANES; r++)
                x[r] = first + c + r < n
                           ? load_words(record.matrix + (first + c + r) * k + i, k - i)
                           : zero_words();
            transpose16(x);
            for (int j = 0; j < LANES && i + 2 * j < k; j++)
                stream_words(panel + (i + 2 * j) * outputs + c * 2, x[j]);
        }
    }
}

inline void pack_panel(const PackRecord<float>& record, int64_t first, float* panel,
                       bool transposed) {
    const int64_t n = record.n, k = record.k,
                  outputs = std::min(PANEL, round_up_to_vector(n - first));
    auto words = [](const float* from, int64_t left) {
        return load_words((const uint16_t*)from, 2 * left);
    };
    for (int64_t i = 0; i < record.columns(); i += transposed ? 1 : LANES)
        for (int64_t c = 0; c < outputs; c += LANES) {
            if (transposed) {
                stream_words(
                    panel + i * outputs + c,
                    i < k ? words(record.matrix + i * n + first + c, n - first - c) : zero_words());
                continue;
            }
            I x[LANES];
            for (int r = 0; r < LANES; r++)
                x[r] = first + c + r < n ? words(record.matrix + (first + c + r) * k + i, k - i)
                                         : zero_words();
            transpose16(x);
            for (int j = 0; j < LANES && i + j < record.columns(); j++)
                stream_words(panel + (i + j) * outputs + c, x[j]);
        }
}

// Panels are shared out to threads by their size, as they lie one behind the other.
template <class X>
void pack_panels(const PackRecord<X>* matrices, int64_t count, bool transposed, int threads) {
    auto panels = [](const PackRecord<X>& record) { return (record.n + PANEL - 1) / PANEL; };
    int64_t total = 0;
    for (int64_t i = 0; i < count; i++)
        total += panels(matrices[i]) * PANEL * matrices[i].columns();
    parallel(total, total, threads, [=](int64_t a, int64_t b) {
        int64_t at = 0;
        for (const PackRecord<X>* record = matrices; record < matrices + count; record++)
            for (int64_t p = 0; p < panels(*record); p++, at += PANEL * record->columns())
                if (at >= a && at < b)
                    pack_panel(*record, p * PANEL, record->panels + p * PANEL * record->columns(),
                               transposed);
        _mm_sfence();
    });
}

// Inputs and outputs of a matmul, whose rows lie apart. What is added last: a bias (stride 0),
// rows like those of the output, or nothing. `partial_sums`: the sums of the column
// blocks so far, if there are several.
template <class X>
struct MatmulRows {
    const X* x;
    int64_t x_stride;
    const X* addend;
    int64_t addend_stride;
    X* out;
    int64_t out_stride;
    float* partial_sums = nullptr;
    int64_t partial_stride = 0;

    MatmulRows from_row(int64_t r) const {
        return {x + r * x_stride,
                x_stride,
                addend ? addend + r * addend_stride : nullptr,
                addend_stride,
                out + r * out_stride,
                out_stride,
                partial_sums ? partial_sums + r * partial_stride : nullptr,
                partial_stride};
    }
    MatmulRows from_column(int64_t c) const {
        return {x,
                x_stride,
                addend ? addend + c : nullptr,
                addend_stride,
                out + c,
                out_stride,
                partial_sums ? partial_sums + c : nullptr,
                partial_stride};
    }
};

// Columns of a matmul, and whether none come before them, and none behind.
struct ColumnBlock {
    int64_t columns;
    bool is_first, is_last;
};

// The panels of a matrix [n, k]; n is a multiple of LANES here, k is even. A quantized matrix has
// codes in place of elements; `transposed`: it is that of the codes, transposed.
template <class X>
struct Panels {
    const X* elements;
    int64_t n, k;
    const QuantizedWeight* quantized = nullptr;
    bool transposed = false;
};

template <class X>
Panels<X> quantized_panels(const QuantizedWeight& quantized, bool transposed) {
    return {nullptr, transposed ? quantized.k : quantized.n, transposed ? quantized.n : quantized.k,
            &quantized, transposed};
}

// R rows by W vectors of outputs. multiply(first, last, sums) adds the products of these columns to
// `sums`.
template <int R, int W, class X, class F>
ALWAYS_INLINE void matmul_tile(F multiply, const MatmulRows<X>& rows,
                               const ColumnBlock& column_block) {
    V total[R][W];
    // What the next tile writes is called for: it lies on a page for each row, where the CPU
    // foresees nothing.
    for (int r = 0; r < R; r++)
        for (int c = 0; c < W; c += IS_BF16<X> ? 2 : 1)
            _mm_prefetch((const char*)(rows.out + (r + TILE_ROWS) * rows.out_stride + c * LANES),
                         _MM_HINT_T0);
    for (int64_t first = 0; first < column_block.columns; first += COLUMNS_PER_SUM<X>) {
        Sums<R, W> sums;
        multiply(first, std::min(column_block.columns, first + COLUMNS_PER_SUM<X>), sums);
        sums.each([&](int r, int c, V sum) { total[r][c] = first ? add(total[r][c], sum) : sum; });
        if (first == 0 && !column_block.is_first)
            for (int r = 0; r < R; r++)
                for (int c = 0; c < W; c++)
                    total[r][c] = add(load(rows.partial_sums + r * rows.partial_stride + c * LANES),
                                      total[r][c]);
    }
    if (!column_block.is_last) {
        for (int r = 0; r < R; r++)
            for (int c = 0; c < W; c++)
                store(rows.partial_sums + r * rows.partial_stride + c * LANES, total[r][c]);
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
// (use_amx), else vectors. They add in different orders.
bool amx_enabled = false;
template <class X>
bool uses_amx() {
    return IS_BF16<X> && amx_enabled;
}

template <int W>
void amx_rows(const uint16_t* weight, int64_t width, const MatmulRows<uint16_t>& rows,
              int64_t count, const ColumnBlock& column_block) {
    alignas(64) float sums[amx::BLOCK * amx::BLOCK];
    for (int c = 0; c < W; c += 2)
        for (int64_t first = 0; first < count; first += amx::BLOCK) {
            const auto own = rows.from_row(first).from_column(c * LANES);
            const int64_t size = std::min<int64_t>(amx::BLOCK, count - first);
            const int outputs = std::min(2, W - c) * LANES;
            amx::multiply_block(weight + c * 2 * LANES, 2 * width, outputs, own.x, own.x_stride,
                                size, column_block.columns, sums);
            for (int64_t r = 0; r < size; r++)
                for (int v = 0; v < outputs; v += LANES) {
                    V total = load(sums + r * amx::BLOCK + v);
                    float* partial_sums = own.partial_sums + r * own.partial_stride + v;
                    if (!column_block.is_first) total = add(load(partial_sums), total);
                    if (!column_block.is_last) {
                        store(partial_sums, total);
                        continue;
                    }
                    if (own.addend)
                        total = add(total, load(own.addend + r * own.addend_stride + v));
                    store(own.out + r * own.out_stride + v, total);
                }
        }
}

template <int W, class X>
void matmul_panel(const X* weight, int64_t width, const Operand<X>& x, const MatmulRows<X>& rows,
                  int64_t count, const ColumnBlock& column_block) {
    if constexpr (IS_BF16<X>)
        if (amx_enabled) return amx_rows<W>(weight, width, rows, count, column_block);
    for_row_tiles(count, [&](int64_t first, auto size) {
        constexpr int R = size, MAX_VECTORS = tile_vectors(R),
                      C = W <= MAX_VECTORS  ? W
                          : W % MAX_VECTORS ? 1
                                            : MAX_VECTORS;
        for (int c = 0; c < W; c += C)
            matmul_tile<R, C>(
                [&](int64_t from, int64_t to, Sums<R, C>& sums) {
                    x.multiply(first, weight + c * VECTOR_STRIDE<X>, 2 * width, from, to, sums);
                },
                rows.from_row(first).from_column(c * LANES), column_block);
    });
}

// Of a few rows, the codes are multiplied as they are read: a panel of numbers between would cost
// as much again. The sums are the same. AVX2 widens pairs of bf16, so it has no such way.
#ifdef __AVX512F__
template <template <int> class Pairs, int R, int W>
void quantized_matmul_few_rows(const QuantizedWeight& quantized, int64_t output, int64_t column,
                               const Operand<uint16_t>& x, const MatmulRows<uint16_t>& rows,
                               const ColumnBlock& column_block) {
    Pairs<W> pairs(quantized);
    matmul_tile<R, W>(
        [&](int64_t first, int64_t last, Sums<R, W>& sums) {
            each_pair(quantized, pairs, output, column, first, last,
                      [&](int64_t i, const uint8_t* from) {
                          sums.add([&](int r) { return x.pair(r, i); },
                                   [&](I* to) {
                                       for (int c = 0; c < W; c++) to[c] = pairs.words(from, c);
                                   });
                      });
        },
        rows, column_block);
}
#endif

// Whether these rows were multiplied by codes, `outputs` of them in one panel.
template <class X>
bool matmul_few_rows(const Panels<X>& panels, int64_t output, int64_t outputs, int64_t column,
                     const Operand<X>& x, const MatmulRows<X>& rows, int64_t count,
                     const ColumnBlock& column_block) {
#ifdef __AVX512F__
    if constexpr (IS_BF16<X>) {
        if (count > TILE_ROWS || panels.transposed || amx_enabled) return false;
        with_size<TILE_ROWS>(count, [&](auto size) {
            with_size<PANEL / LANES>(outputs / LANES, [&](auto vectors) {
                constexpr int R = size, W = vectors;
                const int64_t scheme = panels.quantized->scheme;
                const auto multiply = scheme == INT8  ? quantized_matmul_few_rows<Int8Pairs, R, W>
                                      : scheme == NF4 ? quantized_matmul_few_rows<Nf4Pairs, R, W>
                                                      : quantized_matmul_few_rows<Mxfp4Pairs, R, W>;
                multiply(*panels.quantized, output, column, x, rows, column_block);
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
void matmul_outputs(const Panels<X>& panels, MatmulRows<X> rows, int64_t count, int64_t first,
                    int64_t last) {
    static thread_local Buffer buffer, tile_buffer, input_buffer;
    // AMX reads a cache line of each of 16 rows. Where rows are multiples of 1 KiB apart, these lines
    // share a few sets of the first cache and displace one another. So such rows are copied.
    constexpr int64_t COPY_STRIDE = COLUMN_BLOCK + amx::BLOCK, SHARED_SETS = 1024, OUTPUTS = 256;
    const int64_t row_bytes = rows.x_stride * sizeof(X);
    const bool copies = uses_amx<X>() && count >= amx::ROWS && last - first >= OUTPUTS &&
                        row_bytes % SHARED_SETS == 0;
    X* copy = copies ? input_buffer.reserve<X>(count * COPY_STRIDE) : nullptr;
    X* tile = panels.quantized ? tile_buffer.reserve<X>(PANEL * COLUMN_BLOCK) : nullptr;
    if (panels.k > COLUMN_BLOCK)
        rows.partial_sums = buffer.reserve<float>(count * (last - first)),
        rows.partial_stride = last - first;
    const X* const inputs = rows.x;
    const int64_t input_stride = rows.x_stride;
    for (int64_t at = 0; at < panels.k; at += COLUMN_BLOCK) {
        const ColumnBlock column_block{std::min(COLUMN_BLOCK, panels.k - at), at == 0,
                                       at + COLUMN_BLOCK >= panels.k};
        rows.x = inputs + at;
        if (copies) {
            for (int64_t r = 0; r < count; r++)
                std::memcpy(copy + r * COPY_STRIDE, rows.x + r * input_stride,
                            column_block.columns * sizeof(X));
            rows.x = copy, rows.x_stride = COPY_STRIDE;
        }
        const Operand<X> x(rows.x, rows.x_stride, count, column_block.columns);
        for (int64_t output = first, end; output < last; output = end) {
            const int64_t panel = output / PANEL * PANEL;
            int64_t width = std::min(PANEL, panels.n - panel);
            const X* weight = panels.elements + panel * panels.k + at * width +
                              (output - panel) / LANES * VECTOR_STRIDE<X>;
            end = std::min(last, panel + width);
            if (panels.quantized) {
                if (matmul_few_rows(panels, output, end - output, at, x,
                                    rows.from_column(output - first), count, column_block))
                    continue;
                weight = tile, width = end - output;
                dequantize_panel(*panels.quantized, panels.transposed, output, width, at,
                                 column_block.columns, tile);
            }
            with_size<PANEL / LANES>((end - output) / LANES, [&](auto vectors) {
                matmul_panel<vectors>(weight, width, x, rows.from_column(output - first), count,
                                      column_block);
            });
        }
    }
}

template <class X>
void matmul_outputs(const Panels<X>& panels, const MatmulRows<X>& rows, int64_t count) {
    matmul_outputs(panels, rows, count, 0, panels.n);
}

// x [T, K] by panels to [T, N]. Parts of the rows by half panels: a part's inputs are cached while
// the weights stream by, and halves are shared out more evenly than panels, which may be fewer than
// threads.
template <class X>
void matmul(const Panels<X>& panels, const X* x, const X* bias, X* out, int64_t rows, int threads) {
    const int64_t n = panels.n, k = panels.k;
    const int64_t halves = (n + HALF_PANEL - 1) / HALF_PANEL,
                  input_bytes = rows * std::min(k, COLUMN_BLOCK) * (int64_t)sizeof(X);
    const int64_t for_threads = std::min((rows + 31) / 32, (4 * threads + halves - 1) / halves);
    const int64_t parts =
        std::max((input_bytes + CACHED_INPUT_BYTES - 1) / CACHED_INPUT_BYTES, for_threads);
    parallel(parts * halves, rows * n * k, threads, [=](int64_t a, int64_t b) {
        const amx::TileScope scope(uses_amx<X>());
        for (int64_t item = a, end; item < b; item = end) {
            const int64_t part = item / halves, from = item % halves * HALF_PANEL;
            end = std::min(b, (part + 1) * halves);
            const int64_t first = rows * part / parts, count = rows * (part + 1) / parts - first,
                          to = std::min(n, from + (end - item) * HALF_PANEL);
            matmul_outputs(panels,
                           MatmulRows<X>{x, k, bias, 0, out, n}.from_row(first).from_column(from),
                           count, from, to);
        }
    });
}

}  // namespace

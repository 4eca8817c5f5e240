// Frozen weights in codes of 8 or 4 bits, and how a matmul reads them.
//
// A matmul makes panels of X from the codes, tile by tile, and multiplies by these tiles. A tile
// has the layout and the bits of the same part of a packed weight, so the result has the bits of a
// matmul with the dequantized weight, and no dequantized copy of the weight is kept.

#pragma once

#include "vectors.h"

namespace {

constexpr int64_t CODES_PANEL = 64;  // outputs of a panel

// A weight [n, k]; n is a multiple of 16 and k one of 32 (nf4: of 64). Two columns of an output are
// a pair. Codes lie in panels of 64 outputs, of which the last one has only the outputs that there
// are.
// int8: [n/64][k/2][64][2], one scale for each output.
// nf4: [n/64][k/2][64] bytes, of which the lower half is the first column's code. A block is 64
// columns of an output, and its scale is scale_values[scale_codes[n/64][k/64][64]] *
// scale_scales[block / 256] + offsets[output], where first_blocks[output] counts the blocks of the
// outputs before.
// mxfp4: codes as nf4, but a block is 32 columns, and its scale is
// scale_values[scale_codes[n/64][k/32][64]].
struct QuantizedWeight {
    int64_t scheme, n, k;
    const uint8_t* codes;
    const float* scales;
    const float* values;  // nf4 and mxfp4: what the 16 codes mean
    const uint8_t* scale_codes;
    const float *scale_values, *scale_scales, *offsets;
    const int64_t* first_blocks;

    // The scale codes of the outputs from `output` on, in the block of `block_size` columns that
    // `column` is in.
    const uint8_t* scale_codes_at(int64_t output, int64_t column, int64_t block_size) const {
        const int64_t panel = output / CODES_PANEL * CODES_PANEL,
                      width = std::min(CODES_PANEL, n - panel);
        return scale_codes + panel * (k / block_size) + column / block_size * width +
               (output - panel);
    }
};
constexpr int64_t INT8 = 1, NF4 = 2;

// These classes read the pairs of W vectors of 16 outputs, after `move_to` was told the first
// output and a column of their block.
template <int W>
class Int8Pairs {
    const QuantizedWeight& weight;
    const float* scales;
    PairScales pair_scales[W];

  public:
    static constexpr int64_t BYTES = 2, BLOCK = 64;  // of a pair, columns of a block
    explicit Int8Pairs(const QuantizedWeight& weight) : weight(weight) {}
    void move_to(int64_t output, int64_t) {
        scales = weight.scales + output;
        for (int c = 0; c < W; c++) pair_scales[c].load_from(scales + c * LANES);
    }
    // Vector c as numbers, and as pairs of bf16.
    ALWAYS_INLINE void read(const uint8_t* from, int c, V& even, V& odd) const {
        load_pairs((const int8_t*)from + c * LANES * BYTES, even, odd);
        const V scale = load(scales + c * LANES);
        even = mul(even, scale), odd = mul(odd, scale);
    }
    ALWAYS_INLINE I words(const uint8_t* from, int c) const {
        return pair_scales[c].words((const int8_t*)from + c * LANES * BYTES);
    }
};

template <int W>
class Nf4Pairs {
    const QuantizedWeight& weight;
    const Table table;
    V scale[W];

  public:
    static constexpr int64_t BYTES = 1, BLOCK = 64;
    explicit Nf4Pairs(const QuantizedWeight& weight) : weight(weight), table(weight.values) {}
    void move_to(int64_t output, int64_t column) {
        const int64_t block = column / BLOCK;
        const uint8_t* codes = weight.scale_codes_at(output, column, BLOCK);
        for (int c = 0; c < W; c++) {
            float products[LANES];
            for (int i = 0; i < LANES; i++) {
                const int64_t first = weight.first_blocks[output + c * LANES + i];
                products[i] = weight.scale_values[codes[c * LANES + i]] *
                              weight.scale_scales[(first + block) / 256];
            }
            // The reference rounds the product. Compilers would make a multiply-add of it and the
            // sum, which rounds once.
            asm("" : "+m"(products));
            scale[c] = add(load(products), load(weight.offsets + output + c * LANES));
        }
    }
    ALWAYS_INLINE void read(const uint8_t* from, int c, V& even, V& odd) const {
        table.load_pairs(from + c * LANES * BYTES, even, odd);
        even = mul(even, scale[c]), odd = mul(odd, scale[c]);
    }
    ALWAYS_INLINE I words(const uint8_t* from, int c) const {
        V even, odd;
        read(from, c, even, odd);
        return interleave_as_bf16(even, odd);
    }
};

template <int W>
class Mxfp4Pairs {
    const QuantizedWeight& weight;
    const Table table;
    V scale[W];

  public:
    static constexpr int64_t BYTES = 1, BLOCK = 32;
    explicit Mxfp4Pairs(const QuantizedWeight& weight) : weight(weight), table(weight.values) {}
    void move_to(int64_t output, int64_t column) {
        const uint8_t* codes = weight.scale_codes_at(output, column, BLOCK);
        for (int c = 0; c < W; c++) {
            float scales[LANES];
            for (int i = 0; i < LANES; i++) scales[i] = weight.scale_values[codes[c * LANES + i]];
            scale[c] = load(scales);
        }
    }
    ALWAYS_INLINE void read(const uint8_t* from, int c, V& even, V& odd) const {
        table.load_pairs(from + c * LANES * BYTES, even, odd);
        even = mul(even, scale[c]), odd = mul(odd, scale[c]);
    }
    ALWAYS_INLINE I words(const uint8_t* from, int c) const {
        V even, odd;
        read(from, c, even, odd);
        return interleave_as_bf16(even, odd);
    }
};

// The pair of columns from `column` on, of vector c of a panel of `outputs`.
template <class Pairs>
ALWAYS_INLINE void store_pair(const Pairs& pairs, const uint8_t* from, int c, int64_t outputs,
                              int64_t column, uint16_t* panel) {
    store_words(panel + column * outputs + c * 2 * LANES, pairs.words(from, c));
}
template <class Pairs>
ALWAYS_INLINE void store_pair(const Pairs& pairs, const uint8_t* from, int c, int64_t outputs,
                              int64_t column, float* panel) {
    V even, odd;
    pairs.read(from, c, even, odd);
    store(panel + column * outputs + c * LANES, even);
    store(panel + (column + 1) * outputs + c * LANES, odd);
}

// Where the codes of an output and a column are, and how far the next pair is.
template <int64_t BYTES>
const uint8_t* codes_at(const QuantizedWeight& weight, int64_t output, int64_t column,
                        int64_t& stride) {
    const int64_t panel = output / CODES_PANEL * CODES_PANEL,
                  width = std::min(CODES_PANEL, weight.n - panel);
    stride = width * BYTES;
    return weight.codes + (panel * (weight.k / 2) + column / 2 * width + (output - panel)) * BYTES;
}

// Calls f(i, from) for the columns first .. last - 1, counted from `column` on; `pairs` is at
// the outputs from `output` on, and at the column's block.
template <class Pairs, class F>
ALWAYS_INLINE void each_pair(const QuantizedWeight& weight, Pairs& pairs, int64_t output,
                             int64_t column, int64_t first, int64_t last, F f) {
    for (int64_t block = first; block < last; block += Pairs::BLOCK) {
        pairs.move_to(output, column + block);
        int64_t stride;
        const uint8_t* from = codes_at<Pairs::BYTES>(weight, output, column + block, stride);
        const int64_t end = std::min(last, block + Pairs::BLOCK);
        for (int64_t i = block; i < end; i += 2, from += stride) f(i, from);
    }
}

// A panel of `outputs` outputs, all in one panel of codes, and of `columns` columns.
template <template <int> class Pairs, class X>
void dequantize(const QuantizedWeight& weight, int64_t output, int64_t outputs, int64_t column,
                int64_t columns, X* panel) {
    with_size<CODES_PANEL / LANES>(outputs / LANES, [&](auto vectors) {
        constexpr int W = vectors;
        Pairs<W> pairs(weight);
        each_pair(weight, pairs, output, column, 0, columns, [&](int64_t i, const uint8_t* from) {
            for (int c = 0; c < W; c++) store_pair(pairs, from, c, outputs, i, panel);
        });
    });
}

// 16 outputs' pairs of 32 columns become 16 columns of 32 outputs: the panel's pairs are pairs of
// the weight's outputs.
template <class Pairs>
ALWAYS_INLINE void transpose_pairs(const Pairs& pairs, const uint8_t* from, int64_t stride,
                                   int64_t ahead, uint16_t* panel, int64_t outputs) {
    alignas(64) uint16_t rows[LANES][2 * LANES];
    I words[LANES];
    for (int j = 0; j < LANES; j++) {
        _mm_prefetch((const char*)from + j * stride + ahead, _MM_HINT_T0);
        words[j] = pairs.words(from + j * stride, 0);
    }
    transpose16(words);
    for (int r = 0; r < LANES; r++) store_words(rows[r], words[r]);
    for (int r = 0; r < LANES; r += 2) {
        I two[2];
        interleave_rows<2>(rows[r], rows[r + 1], 0, two);
        for (int v = 0; v < 2; v++) store_words(panel + r * outputs + v * 2 * LANES, two[v]);
    }
}
template <class Pairs>
void transpose_pairs(const Pairs& pairs, const uint8_t* from, int64_t stride, int64_t ahead,
                     float* panel, int64_t outputs) {
    for (int j = 0; j < LANES; j++) {
        V read[2];
        float numbers[LANES];
        _mm_prefetch((const char*)from + j * stride + ahead, _MM_HINT_T0);
        pairs.read(from + j * stride, 0, read[0], read[1]);
        for (int odd = 0; odd < 2; odd++) {
            store(numbers, read[odd]);
            for (int r = 0; r < LANES; r++) panel[r * outputs + 2 * j + odd] = numbers[r];
        }
    }
}

// The same of the transposed weight: its outputs are the columns of the codes, 32 or 64 of them,
// and its columns are outputs, a multiple of 16.
template <template <int> class Pairs, class X>
void dequantize_transposed(const QuantizedWeight& weight, int64_t output, int64_t outputs,
                           int64_t column, int64_t columns, X* panel) {
    constexpr int64_t BYTES = Pairs<1>::BYTES, WORD = sizeof(X) == 2 ? 2 : 1;
    // Each panel of codes lies on pages of its own, which the CPU does not foresee.
    const int64_t ahead = CODES_PANEL * (weight.k / 2) * BYTES;
    Pairs<1> pairs(weight);
    for (int64_t r = 0; r < columns; r += LANES)
        for (int64_t c = 0; c < outputs; c += 2 * LANES) {
            pairs.move_to(column + r, output + c);
            int64_t stride;
            const uint8_t* from = codes_at<BYTES>(weight, column + r, output + c, stride);
            transpose_pairs(pairs, from, stride, ahead, panel + r * outputs + c * WORD, outputs);
        }
}

template <class X>
void dequantize_panel(const QuantizedWeight& weight, bool transposed, int64_t output,
                      int64_t outputs, int64_t column, int64_t columns, X* panel) {
    const auto run = [&](auto direct, auto from_transposed) {
        (transposed ? from_transposed : direct)(weight, output, outputs, column, columns, panel);
    };
    if (weight.scheme == INT8)
        run(dequantize<Int8Pairs, X>, dequantize_transposed<Int8Pairs, X>);
    else if (weight.scheme == NF4)
        run(dequantize<Nf4Pairs, X>, dequantize_transposed<Nf4Pairs, X>);
    else
        run(dequantize<Mxfp4Pairs, X>, dequantize_transposed<Mxfp4Pairs, X>);
}

}  // namespace

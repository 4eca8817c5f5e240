// Products of bf16 by AMX: tiles of 16 rows of 64 bytes, of which one instruction multiplies two
// and adds the outcome to a third.
//
// EMULATED_TILES compiles the same with the instructions written out, after Intel's description of
// them, for machines that lack them; what an instruction would refuse ends the process there. A
// process must ask Linux for permission before it uses tiles (`is_available`), so the emulator also
// ends one that did not ask.

#pragma once

#include <cpuid.h>
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <cstring>

namespace amx {

constexpr int ROWS = 16, PAIRS = 16,
              OUTPUTS = 16;  // of a tile: rows of x, pairs of columns, outputs
constexpr int BLOCK = 32;    // rows, and outputs, of a block of two by two tiles

struct alignas(64) TileConfig {
    uint8_t palette = 0, start = 0, reserved[14] = {};
    uint16_t bytes[16] = {};
    uint8_t rows[16] = {};
};
static_assert(sizeof(TileConfig) == 64, "as the instruction reads it");

#ifdef EMULATED_TILES

#define AMX_TARGET
struct Tile {
    uint8_t data[ROWS][64];
};
inline thread_local Tile tile[8];
inline thread_local TileConfig config;

inline void require(bool holds) {
    if (!holds) std::abort();
}
inline std::atomic<bool> permitted{false};  // of the process, as the kernel's permission is
inline void configure(const TileConfig& to) {
    require(permitted && to.palette <= 1);
    for (int t = 0; t < 16; t++)
        require(to.rows[t] <= (t < 8 ? 16 : 0) && to.bytes[t] <= (t < 8 ? 64 : 0) &&
                (to.rows[t] == 0) == (to.bytes[t] == 0));
    config = to;
    std::memset(tile, 0, sizeof tile);
}
inline void read_configuration(TileConfig& to) {
    require(permitted);
    to = config;
}
inline void check_tile(int t) { require(permitted && config.palette == 1 && config.rows[t]); }
inline void TILE_ZERO(int t) {
    check_tile(t);
    std::memset(&tile[t], 0, sizeof tile[t]);
}
inline void TILE_LOAD(int t, const void* from, int64_t stride) {
    check_tile(t);
    for (int r = 0; r < config.rows[t]; r++)
        std::memcpy(tile[t].data[r], (const uint8_t*)from + r * stride, config.bytes[t]);
}
inline void TILE_STORE(int t, void* to, int64_t stride) {
    check_tile(t);
    for (int r = 0; r < config.rows[t]; r++)
        std::memcpy((uint8_t*)to + r * stride, tile[t].data[r], config.bytes[t]);
}
inline float to_float32(uint16_t x) {
    const uint32_t bits = (uint32_t)x << 16;
    float found;
    std::memcpy(&found, &bits, 4);
    return found;
}
inline void TILE_DOT(int c, int a, int b) {
    check_tile(a), check_tile(b), check_tile(c);
    require(config.rows[c] == config.rows[a] && config.bytes[c] == config.bytes[b] &&
            config.bytes[a] == 4 * config.rows[b]);
    for (int m = 0; m < config.rows[c]; m++)
        for (int n = 0; n < config.bytes[c] / 4; n++) {
            float even = 0, odd = 0;
            for (int k = 0; k < config.rows[b]; k++) {
                even += to_float32(((uint16_t*)tile[a].data[m])[2 * k]) *
                        to_float32(((uint16_t*)tile[b].data[k])[2 * n]);
                odd += to_float32(((uint16_t*)tile[a].data[m])[2 * k + 1]) *
                       to_float32(((uint16_t*)tile[b].data[k])[2 * n + 1]);
            }
            ((float*)tile[c].data[m])[n] += even + odd;
        }
}
inline bool is_available() {
    permitted = true;
    return true;
}

#else

#define AMX_TARGET \
    __attribute__((target("amx-tile,amx-bf16,avx512f,avx512bw,avx512vl,avx512dq,fma")))
// Compilers' headers say of these instructions that they read and write less memory than they do;
// hence what stands beside them.
AMX_TARGET inline void configure(const TileConfig& to) {
    asm volatile("" : : "r"(&to) : "memory");
    _tile_loadconfig(&to);
}
AMX_TARGET inline void read_configuration(TileConfig& to) {
    _tile_storeconfig(&to);
    asm volatile("" : : "r"(&to) : "memory");
}
#define TILE_ZERO(t) _tile_zero(t)
#define TILE_LOAD(t, from, stride) _tile_loadd(t, from, stride)
#define TILE_STORE(t, to, stride) _tile_stored(t, to, stride)
#define TILE_DOT(c, a, b) _tile_dpbf16ps(c, a, b)

// Whether the CPU has tiles and Linux lets this process use them. Call this before the first
// instruction on tiles: without permission Linux ends the process with SIGILL.
#ifdef __AVX512F__
inline bool is_available() {
    static const bool found = [] {
        unsigned a, b, c, d;
        if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || !(d >> 24 & 1) || !(d >> 22 & 1))
            return false;
        constexpr int ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18;
        return syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0;
    }();
    return found;
}
#else
inline bool is_available() { return false; }  // every CPU with AMX has AVX-512
#endif

#endif

// While it lives, this thread's tiles are ours; then they have the shapes that they had, which
// other libraries may count on.
class TileScope {
  public:
    explicit TileScope(bool is_active) : is_active(is_active) {
        if (is_active) read_configuration(before);
        current() = 0;
    }
    ~TileScope() {
        if (is_active) configure(before);
    }
    TileScope(const TileScope&) = delete;

    // Of what the tiles of this thread have the shapes: rows of the first and the second, and pairs
    // of columns.
    static int& current() {
        static thread_local int found = 0;
        return found;
    }

  private:
    const bool is_active;
    TileConfig before;
};

// Tiles 0 to 3 take sums, 4 and 5 rows of x, 6 and 7 weights.
inline void set_shapes(int first, int second, int pairs) {
    const int wanted = first << 16 | second << 8 | pairs;
    if (TileScope::current() == wanted) return;
    TileConfig to;
    to.palette = 1;
    const int rows[8] = {first, first, second, second, first, second, pairs, pairs};
    for (int t = 0; t < 8; t++)
        if (rows[t]) to.rows[t] = rows[t], to.bytes[t] = t == 4 || t == 5 ? 4 * pairs : 4 * OUTPUTS;
    configure(to);
    TileScope::current() = wanted;
}

// Multiplies x's columns [0, k) with outputs of weights, whose pairs of columns lie
// `weight_stride` numbers apart, for one or two tiles of rows, and of outputs. Writes the sums to
// out, whose rows lie `out_stride` numbers apart; ACCUMULATES: continues the sums that are there. k
// is a multiple of `pairs` pairs.
template <bool TWO_ROW_TILES, bool TWO_OUTPUT_TILES, bool ACCUMULATES = false>
AMX_TARGET void multiply_tiles(const uint16_t* weight, int64_t weight_stride, const uint16_t* x,
                               int64_t x_stride, int64_t k, int pairs, float* out,
                               int64_t out_stride) {
    float* const below = out + ROWS * out_stride;
    asm volatile("" : : : "memory");
    if constexpr (ACCUMULATES) {
        TILE_LOAD(0, out, 4 * out_stride);
        if constexpr (TWO_OUTPUT_TILES) TILE_LOAD(1, out + OUTPUTS, 4 * out_stride);
        if constexpr (TWO_ROW_TILES) TILE_LOAD(2, below, 4 * out_stride);
        if constexpr (TWO_ROW_TILES && TWO_OUTPUT_TILES)
            TILE_LOAD(3, below + OUTPUTS, 4 * out_stride);
    } else {
        TILE_ZERO(0);
        if constexpr (TWO_OUTPUT_TILES) TILE_ZERO(1);
        if constexpr (TWO_ROW_TILES) TILE_ZERO(2);
        if constexpr (TWO_ROW_TILES && TWO_OUTPUT_TILES) TILE_ZERO(3);
    }
    for (int64_t i = 0; i < k; i += 2 * pairs) {
        const uint16_t* w = weight + i / 2 * weight_stride;
        TILE_LOAD(6, w, 2 * weight_stride);
        if constexpr (TWO_OUTPUT_TILES) TILE_LOAD(7, w + 2 * OUTPUTS, 2 * weight_stride);
        TILE_LOAD(4, x + i, 2 * x_stride);
        TILE_DOT(0, 4, 6);
        if constexpr (TWO_OUTPUT_TILES) TILE_DOT(1, 4, 7);
        if constexpr (TWO_ROW_TILES) {
            TILE_LOAD(5, x + ROWS * x_stride + i, 2 * x_stride);
            TILE_DOT(2, 5, 6);
            if constexpr (TWO_OUTPUT_TILES) TILE_DOT(3, 5, 7);
        }
    }
    TILE_STORE(0, out, 4 * out_stride);
    if constexpr (TWO_OUTPUT_TILES) TILE_STORE(1, out + OUTPUTS, 4 * out_stride);
    if constexpr (TWO_ROW_TILES) TILE_STORE(2, below, 4 * out_stride);
    if constexpr (TWO_ROW_TILES && TWO_OUTPUT_TILES) TILE_STORE(3, below + OUTPUTS, 4 * out_stride);
    asm volatile("" : : : "memory");
}

// out [BLOCK, BLOCK] for at most so many rows of x, and 16 or 32 outputs, within a `TileScope`. Of
// each sum, runs of 32 columns one after another in the instruction's own order; then, what is left
// of k beyond its last whole run by itself.
inline void multiply_block(const uint16_t* weight, int64_t weight_stride, int outputs,
                           const uint16_t* x, int64_t x_stride, int64_t rows, int64_t k,
                           float* out) {
    const int first = rows < ROWS ? rows : ROWS, second = rows - first;
    const int64_t whole = k / (2 * PAIRS) * (2 * PAIRS);
    const int left = (k - whole) / 2;
    const bool wide = outputs > OUTPUTS;
    const auto sums = second ? wide ? multiply_tiles<true, true> : multiply_tiles<true, false>
                      : wide ? multiply_tiles<false, true>
                             : multiply_tiles<false, false>;
    if (whole || !left)
        set_shapes(first, second, PAIRS),
            sums(weight, weight_stride, x, x_stride, whole, PAIRS, out, BLOCK);
    if (!left) return;
    alignas(64) float remainder[BLOCK * BLOCK];
    set_shapes(first, second, left);
    sums(weight + whole / 2 * weight_stride, weight_stride, x + whole, x_stride, k - whole, left,
         whole ? remainder : out, BLOCK);
    if (whole)
        for (int64_t r = 0; r < rows; r++)
            for (int c = 0; c < outputs; c++) out[r * BLOCK + c] += remainder[r * BLOCK + c];
}

// out [rows, outputs] = x [rows, 2 * pairs] by weights [pairs][outputs] of two numbers each, within
// a `Use`; ADDS: += with the sums that are there continued. Each sum adds runs of 32 columns one
// after another in the instruction's own order. Only whole tiles are multiplied, of one shape: x is
// read up to a multiple of ROWS rows, and there are whole tiles of pairs and outputs. So a sum does
// not depend on the number of rows, nor on zeros behind its last column.
template <bool ACCUMULATES>
inline void multiply(const uint16_t* x, int64_t x_stride, int64_t rows, const uint32_t* weight,
                     int64_t weight_stride, int64_t pairs, int64_t outputs, float* out,
                     int64_t out_stride) {
    set_shapes(ROWS, ROWS, PAIRS);
    alignas(64) float buffer[BLOCK * BLOCK];
    for (int64_t r = 0; r < rows; r += BLOCK)
        for (int64_t c = 0; c < outputs; c += BLOCK) {
            const int64_t left = rows - r < BLOCK ? rows - r : BLOCK;
            const bool two = left > ROWS, wide = outputs - c > OUTPUTS, whole = left % ROWS == 0;
            const auto sums = two    ? wide ? multiply_tiles<true, true, ACCUMULATES>
                                            : multiply_tiles<true, false, ACCUMULATES>
                              : wide ? multiply_tiles<false, true, ACCUMULATES>
                                     : multiply_tiles<false, false, ACCUMULATES>;
            float* to = out + r * out_stride + c;
            const size_t bytes = 4 * (wide ? BLOCK : OUTPUTS);
            if (ACCUMULATES && !whole)
                for (int64_t i = 0; i < left; i++)
                    std::memcpy(buffer + i * BLOCK, to + i * out_stride, bytes);
            sums((const uint16_t*)(weight + c), 2 * weight_stride, x + r * x_stride, x_stride,
                 2 * pairs, PAIRS, whole ? to : buffer, whole ? out_stride : BLOCK);
            if (!whole)
                for (int64_t i = 0; i < left; i++)
                    std::memcpy(to + i * out_stride, buffer + i * BLOCK, bytes);
        }
}

}  // namespace amx

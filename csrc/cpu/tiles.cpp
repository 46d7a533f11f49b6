// Linear layers on matrix tiles (AMX): bf16 weights for any number of rows, and integer weights for
// many rows. A panel is a chain of steps; a step is two neighbouring tiles of weights (32 outputs;
// 32 k of bf16 or 64 k of int8, in rows of 128 bytes). Every output adds its steps in ascending order
// and a step's arithmetic does not depend on the other rows of the tile: batch invariant bit for bit.
// bf16 activations are rounded once; denormals count as zero.
#include <algorithm>

#include "ahead.h"
#include "epilogue.h"
#include "int8.h"
#include "rows.h"
#include "tile_config.h"
#include "weights.h"

namespace radix {
namespace RADIX_ISA {

enum TileOp { BF16, SIGNED, NIBBLES };  // what is multiplied: bf16, int8 by int8, int8 by unsigned

constexpr int64_t STEP_BYTES = 2048;  // of weights
constexpr int64_t FEW_ROWS = 32;      // two tiles: weights are read once, straight from memory
constexpr int64_t SLICE_STEPS = 16;   // of a panel: 32 KB, two thirds of the first-level cache
constexpr int64_t BLOCK_ROWS = 512;   // rows that share a slice
constexpr int64_t GROUP_PANELS = 4;   // panels that share a slice of x in second-level cache

// Tiles 0-3: sums [first rows | second rows] x [left | right]; 4, 5: x; 6, 7: weights of `k_rows` rows.
static void configure(int first_rows, int second_rows, int k_rows) {
    TileConfig c;
    for (int t = 0; t < 8; t++) {
        c.row_bytes[t] = uint16_t(t == 4 || t == 5 ? 4 * k_rows : 64);
        c.rows[t] = uint8_t(t >= 6 ? k_rows : t == 0 || t == 1 || t == 4 ? first_rows : second_rows);
    }
    c.use();
}

#define RADIX_TILE_MULTIPLY(c, a, b)     \
    do {                                 \
        if constexpr (OP == BF16)        \
            _tile_dpbf16ps(c, a, b);     \
        else if constexpr (OP == SIGNED) \
            _tile_dpbssd(c, a, b);       \
        else                             \
            _tile_dpbsud(c, a, b);       \
    } while (0)

#define RADIX_LOAD_X(tile, from)                \
    do {                                        \
        if constexpr (READS == X_PASSES)        \
            _tile_stream_loadd(tile, from, 64); \
        else                                    \
            _tile_loadd(tile, from, 64);        \
    } while (0)

// How often operands are read: AGAIN, by further calls; X_PASSES, x comes from second-level cache and is not
// to evict the weights from the first; WEIGHTS_ONCE, these come from memory and are prefetched from `ahead`
// on.
enum Reads { AGAIN, X_PASSES, WEIGHTS_ONCE };

// Where a kernel finds a slice of x (tiles of 64-byte rows) and of a panel.
struct Slice {
    const char* x;
    int64_t x_step, x_tile;  // bytes to the next step and to the next sixteen rows
    const char* w;
    int64_t w_step, steps;
    const char* ahead;    // weights to prefetch meanwhile
    int64_t ahead_lines;  // for each step
};

// sums [16 * TILES][32] of 32-bit numbers (+)= x * w. `is_first` starts from zero.
template <int OP, int TILES, Reads READS = AGAIN>
static void multiply(const Slice& s, char* sums, bool is_first) {
    if (is_first) {
        _tile_zero(0);
        _tile_zero(1);
        if (TILES == 2) {
            _tile_zero(2);
            _tile_zero(3);
        }
    } else {
        asm volatile("" ::: "memory");
        _tile_loadd(0, sums, 128);
        _tile_loadd(1, sums + 64, 128);
        if (TILES == 2) {
            _tile_loadd(2, sums + 2048, 128);
            _tile_loadd(3, sums + 2048 + 64, 128);
        }
    }
    const char *x = s.x, *w = s.w, *ahead = s.ahead;
    const int64_t x_tile = s.x_tile;
    for (int64_t i = 0; i < s.steps; i++) {
        _tile_loadd(6, w, 128);
        RADIX_LOAD_X(4, x);
        RADIX_TILE_MULTIPLY(0, 4, 6);
        _tile_loadd(7, w + 64, 128);
        RADIX_TILE_MULTIPLY(1, 4, 7);
        if (TILES == 2) {
            RADIX_LOAD_X(5, x + x_tile);
            RADIX_TILE_MULTIPLY(2, 5, 6);
            RADIX_TILE_MULTIPLY(3, 5, 7);
        }
        for (int64_t l = 0; l < s.ahead_lines; l++, ahead += 64)
            if constexpr (READS == WEIGHTS_ONCE)
                __builtin_prefetch(prefetched_in_turn(ahead));
            else
                __builtin_prefetch(ahead, 0, 2);
        x += s.x_step, w += s.w_step;
    }
    _tile_stored(0, sums, 128);
    _tile_stored(1, sums + 64, 128);
    if (TILES == 2) {
        _tile_stored(2, sums + 2048, 128);
        _tile_stored(3, sums + 2048 + 64, 128);
    }
}

// ---- activations ----

// Rows of x as tiles: [tile][step][rows of the tile][64 bytes]; missing rows and k are zero.
struct TileRows {
    int64_t m, tiles, steps, rows;  // rows of each tile: 16, or all of a few
    TileRows(const LinearArgs& a, int64_t k_step, bool is_padded) : m(a.m) {
        tiles = (m + 15) / 16, steps = (a.w.k + k_step - 1) / k_step;
        rows = m < 16 && !is_padded ? m : 16;
    }
    int64_t step_bytes() const { return rows * 64; }
    int64_t tile_bytes() const { return steps * step_bytes(); }
    int64_t bytes() const { return tiles * tile_bytes(); }
    int64_t held(int64_t tile) const { return std::min<int64_t>(16, m - tile * 16); }
};

static const float* source_row(const LinearArgs& a, int64_t row) {
    return a.x + (a.rows ? a.rows[row] : row) * a.ldx;
}

static void round_row(const float* x, int64_t k, char* out, int64_t step_bytes) {
    int64_t i = 0;
    for (; i + 32 <= k; i += 32, out += step_bytes)
        _mm512_store_si512(out, (__m512i)_mm512_cvtne2ps_pbh(load(x + i + 16).v, load(x + i).v));
    if (i == k) return;
    const int left = int(k - i);
    vf low = load_n(x + i, left < 16 ? left : 16), high = left > 16 ? load_n(x + i + 16, left - 16) : zero();
    _mm512_store_si512(out, (__m512i)_mm512_cvtne2ps_pbh(high.v, low.v));
}

static void round_tile(const LinearArgs& a, const TileRows& t, int64_t tile, char* out) {
    for (int64_t r = 0; r < t.rows; r++) {
        char* at = out + r * 64;
        if (r < t.held(tile))
            round_row(source_row(a, tile * 16 + r), a.w.k, at, t.step_bytes());
        else
            for (int64_t s = 0; s < t.steps; s++) std::memset(at + s * t.step_bytes(), 0, 64);
    }
}

// ---- bf16 ----

static int64_t panel_steps(const Weight& w) { return (w.k + 31) / 32; }

static void finish_rows(const LinearArgs& a, int64_t row0, int64_t rows, int64_t panel, const float* sums) {
    for (int64_t r = 0; r < rows; r++)
        finish(a, row0 + r, panel, load(sums + r * 32), load(sums + r * 32 + 16));
}

template <int TILES>
static void few_rows(const LinearArgs& a, const TileRows& t, const char* x, const Ctx& ctx) {
    configure(int(t.held(0)), TILES == 2 ? int(t.held(1)) : 1, 16);
    alignas(64) float sums[32 * 32];
    ctx.each(panels_of(a.w), 4, [&](int64_t p0, int64_t p1) {
        for (int64_t p = p0; p < p1; p++) {
            const char* w = (const char*)a.w.data + p * t.steps * STEP_BYTES;
            multiply<BF16, TILES, WEIGHTS_ONCE>(
                {x, t.step_bytes(), t.tile_bytes(), w, STEP_BYTES, t.steps, w, 32}, (char*)sums, true);
            finish_rows(a, 0, a.m, p, sums);
        }
    });
}

// Blocks of rows x groups of panels; a group goes through x slice by slice, sums rest in `local`.
struct Grid {
    int64_t tiles_each, blocks, panels_each, groups;
    Grid(int64_t tiles, int64_t panels, int threads) {
        blocks = (tiles * 16 + BLOCK_ROWS - 1) / BLOCK_ROWS;
        tiles_each = ((tiles + blocks - 1) / blocks + 1) / 2 * 2;
        blocks = (tiles + tiles_each - 1) / tiles_each;
        panels_each = std::clamp<int64_t>(panels / (3 * threads), 1, GROUP_PANELS);
        groups = (panels + panels_each - 1) / panels_each;
    }
};

template <int OP, class Finish>
static void many_rows(const Weight& weight, int64_t panel_bytes, const TileRows& t, const char* x,
                      const Ctx& ctx, Finish&& done) {
    configure(16, 16, 16);
    const int64_t panels = panels_of(weight);
    const char* data = (const char*)weight.data;
    const Grid grid(t.tiles, panels, ctx.threads());
    char* rest = ctx.local();
    const int64_t rest_each = grid.tiles_each * 2048;
    ctx.each(grid.groups * grid.blocks, 1, [&](int64_t i0, int64_t i1) {
        for (int64_t i = i0; i < i1; i++) {
            const int64_t t0 = i / grid.groups * grid.tiles_each,
                          t1 = std::min(t0 + grid.tiles_each, t.tiles);
            const int64_t p0 = i % grid.groups * grid.panels_each,
                          p1 = std::min(p0 + grid.panels_each, panels);
            const int64_t pairs = (t1 - t0 + 1) / 2;
            for (int64_t s0 = 0; s0 < t.steps; s0 += SLICE_STEPS) {
                const int64_t steps = std::min(SLICE_STEPS, t.steps - s0);
                const bool is_last = s0 + steps == t.steps;
                for (int64_t p = p0; p < p1; p++) {
                    const char* w = data + p * panel_bytes + s0 * STEP_BYTES;
                    const char* ahead = p + 1 < p1 ? w + panel_bytes
                                        : is_last  ? data + p1 * panel_bytes
                                                   : data + p0 * panel_bytes + (s0 + steps) * STEP_BYTES;
                    const int64_t lines = (32 + pairs - 1) / pairs;
                    for (int64_t tile = t0; tile < t1; tile += 2) {
                        char* sums = rest + (p - p0) * rest_each + (tile - t0) * 2048;
                        Slice s{x + tile * t.tile_bytes() + s0 * t.step_bytes(),
                                t.step_bytes(),
                                t.tile_bytes(),
                                w,
                                STEP_BYTES,
                                steps,
                                ahead + (tile - t0) / 2 * steps * lines * 64,
                                lines};
                        if (tile + 1 < t1)
                            multiply<OP, 2, X_PASSES>(s, sums, s0 == 0);
                        else
                            multiply<OP, 1, X_PASSES>(s, sums, s0 == 0);
                        if (is_last)
                            done(tile * 16, std::min(int64_t(32), std::min(t1 * 16, t.m) - tile * 16), p,
                                 sums);
                    }
                }
            }
        }
    });
}

constexpr int64_t MAX_CACHED_BYTES = int64_t(4)
                                     << 20;  // bytes of y that the next layer may find in the caches

// The call with its way of writing y chosen. Sums with a residual read their lines anyway.
static LinearArgs streaming(LinearArgs a) {
    const int64_t width = a.w.paired ? a.w.n / 2 : a.w.n;
    const bool is_aligned = uintptr_t(a.y) % 64 == 0 && a.ldy % 16 == 0;
    a.streams = is_aligned && !a.residual && a.m * width * 4 > MAX_CACHED_BYTES;
    return a;
}

static void linear_tiles(const LinearArgs& given, const Ctx& ctx) {
    if (given.m <= 0) return;
    const LinearArgs a = streaming(given);
    const TileRows t(a, 32, false);
    char* x = ctx.packing();
    const bool is_alone = a.m <= 2;  // each thread rounds its own copy: cheaper than a barrier
    if (is_alone)
        round_tile(a, t, 0, x = ctx.local());
    else
        ctx.each_packed(t.tiles, 1, [&](int64_t t0, int64_t t1) {
            for (int64_t i = t0; i < t1; i++) round_tile(a, t, i, x + i * t.tile_bytes());
        });
    asm volatile("" ::: "memory");
    if (a.m <= 16)
        few_rows<1>(a, t, x, ctx);
    else if (a.m <= FEW_ROWS)
        few_rows<2>(a, t, x, ctx);
    else
        many_rows<BF16>(a.w, t.steps * STEP_BYTES, t, x, ctx,
                        [&](int64_t row0, int64_t rows, int64_t panel, const char* sums) {
                            finish_rows(a, row0, rows, panel, (const float*)sums);
                        });
    release_tiles();
    _mm_sfence();  // what was written past the caches is seen before the barrier is
    ctx.barrier();
}

static size_t tiles_shared(const LinearArgs& a) {
    return size_t((a.m + 15) / 16 * 16 * panel_steps(a.w) * 64 + 64);
}
static size_t tiles_local(const LinearArgs& a) {
    const int64_t few = 2 * panel_steps(a.w) * 64, sums = GROUP_PANELS * (BLOCK_ROWS + 32) * 128,
                  wide = a.w.k * PANEL;
    const int64_t four = a.w.multiple ? sums + MAX_SPAN * PANEL : wide;
    return size_t(std::max({few, sums, a.w.format == W_W4A8 ? four : 0})) + 64;
}

// ---- peak throughput of the tiles ----

template <int OP>
static void busy_tiles(size_t rounds) {
    for (size_t i = 0; i < rounds; i++) {
        RADIX_TILE_MULTIPLY(0, 4, 6);
        RADIX_TILE_MULTIPLY(1, 4, 7);
        RADIX_TILE_MULTIPLY(2, 5, 6);
        RADIX_TILE_MULTIPLY(3, 5, 7);
    }
}

template <int OP>
static double tile_ceiling(size_t rounds) {
    configure(16, 16, 16);
    busy_tiles<OP>(rounds);
    release_tiles();
    return double(rounds) * 4 * (OP == BF16 ? 16384 : 32768);
}

}  // namespace RADIX_ISA
}  // namespace radix

// Linear layers on matrix tiles (AMX): bf16 weights for any number of rows, and integer weights for
// many rows. A panel is a chain of steps; a step is two tiles of weights beside each other (32 outputs;
// 32 k of bf16 or 64 k of int8, in rows of 128 bytes). Every output adds its steps in ascending order
// and a step's arithmetic does not depend on the other rows of the tile: batch invariant bit for bit.
// bf16 activations are rounded once; denormals count as zero.
#include <algorithm>

#include "epilogue.h"
#include "int8.h"
#include "rows.h"
#include "tile_config.h"
#include "weights.h"

namespace radix {
namespace RADIX_ISA {

enum TileOp { BF16, SIGNED, NIBBLES };  // what is multiplied: bf16, int8 by int8, int8 by unsigned

constexpr int64_t STEP_BYTES = 2048;     // of weights
constexpr int64_t FEW_ROWS = 32;         // two tiles: weights are read once, straight from memory
constexpr int64_t SLICE_STEPS = 8;       // of a panel: 16 KB, half of the first-level cache
constexpr int64_t BLOCK_ROWS = 512;      // rows that share a slice
constexpr int64_t GROUP_PANELS = 4;      // panels that share a slice of x in second-level cache
constexpr int64_t PREFETCH_BYTES = 4096;  // ahead of the weights of few rows

// Tiles 0-3: sums [first rows | second rows] x [left | right]; 4, 5: x; 6, 7: weights of `k_rows` rows.
static void configure(int first_rows, int second_rows, int k_rows) {
    TileConfig c;
    for (int t = 0; t < 8; t++) {
        c.row_bytes[t] = uint16_t(t == 4 || t == 5 ? 4 * k_rows : 64);
        c.rows[t] = uint8_t(t >= 6 ? k_rows : t == 0 || t == 1 || t == 4 ? first_rows : second_rows);
    }
    c.use();
}

#define RADIX_TILE_MULTIPLY(c, a, b)                              \
    do {                                                          \
        if constexpr (OP == BF16) _tile_dpbf16ps(c, a, b);        \
        else if constexpr (OP == SIGNED) _tile_dpbssd(c, a, b);   \
        else _tile_dpbsud(c, a, b);                               \
    } while (0)

// Where a kernel finds a slice of x (tiles of 64-byte rows) and of a panel.
struct Slice {
    const char* x;
    int64_t x_step, x_tile;  // bytes to the next step and to the next sixteen rows
    const char* w;
    int64_t w_step, steps;
    const char* ahead;       // weights to prefetch meanwhile
    int64_t ahead_lines;     // for each step
};

// sums [16 * TILES][32] of 32-bit numbers (+)= x * w. `is_first` starts from zero.
template <int OP, int TILES>
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
        _tile_loadd(4, x, 64);
        RADIX_TILE_MULTIPLY(0, 4, 6);
        _tile_loadd(7, w + 64, 128);
        RADIX_TILE_MULTIPLY(1, 4, 7);
        if (TILES == 2) {
            _tile_loadd(5, x + x_tile, 64);
            RADIX_TILE_MULTIPLY(2, 5, 6);
            RADIX_TILE_MULTIPLY(3, 5, 7);
        }
        for (int64_t l = 0; l < s.ahead_lines; l++, ahead += 64) __builtin_prefetch(ahead, 0, 2);
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

static const float* source_row(const LinearArgs& a, int64_t row) { return a.x + (a.rows ? a.rows[row] : row) * a.ldx; }

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
        if (r < t.held(tile)) round_row(source_row(a, tile * 16 + r), a.w.k, at, t.step_bytes());
        else
            for (int64_t s = 0; s < t.steps; s++) std::memset(at + s * t.step_bytes(), 0, 64);
    }
}

// ---- bf16 ----

static int64_t panel_steps(const Weight& w) { return (w.k + 31) / 32; }

static void finish_rows(const LinearArgs& a, int64_t row0, int64_t rows, int64_t panel, const float* sums) {
    for (int64_t r = 0; r < rows; r++) finish(a, row0 + r, panel, load(sums + r * 32), load(sums + r * 32 + 16));
}

template <int TILES>
static void few_rows(const LinearArgs& a, const TileRows& t, const char* x, const Ctx& ctx) {
    configure(int(t.held(0)), TILES == 2 ? int(t.held(1)) : 1, 16);
    alignas(64) float sums[32 * 32];
    ctx.each(panels_of(a.w), 4, [&](int64_t p0, int64_t p1) {
        for (int64_t p = p0; p < p1; p++) {
            const char* w = (const char*)a.w.data + p * t.steps * STEP_BYTES;
            multiply<BF16, TILES>({x, t.step_bytes(), t.tile_bytes(), w, STEP_BYTES, t.steps, w + PREFETCH_BYTES, 32}, (char*)sums, true);
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
static void many_rows(const Weight& weight, int64_t panel_bytes, const TileRows& t, const char* x, const Ctx& ctx, Finish&& done) {
    configure(16, 16, 16);
    const int64_t panels = panels_of(weight);
    const char* data = (const char*)weight.data;
    const Grid grid(t.tiles, panels, ctx.threads());
    char* rest = ctx.local();
    const int64_t rest_each = grid.tiles_each * 2048;
    ctx.each(grid.groups * grid.blocks, 1, [&](int64_t i0, int64_t i1) {
        for (int64_t i = i0; i < i1; i++) {
            const int64_t t0 = i / grid.groups * grid.tiles_each, t1 = std::min(t0 + grid.tiles_each, t.tiles);
            const int64_t p0 = i % grid.groups * grid.panels_each, p1 = std::min(p0 + grid.panels_each, panels);
            const int64_t pairs = (t1 - t0 + 1) / 2;
            for (int64_t s0 = 0; s0 < t.steps; s0 += SLICE_STEPS) {
                const int64_t steps = std::min(SLICE_STEPS, t.steps - s0);
                const bool is_last = s0 + steps == t.steps;
                for (int64_t p = p0; p < p1; p++) {
                    const char* w = data + p * panel_bytes + s0 * STEP_BYTES;
                    const char* ahead = p + 1 < p1 ? w + panel_bytes : is_last ? data + p1 * panel_bytes : data + p0 * panel_bytes + (s0 + steps) * STEP_BYTES;
                    const int64_t lines = (32 + pairs - 1) / pairs;
                    for (int64_t tile = t0; tile < t1; tile += 2) {
                        char* sums = rest + (p - p0) * rest_each + (tile - t0) * 2048;
                        Slice s{x + tile * t.tile_bytes() + s0 * t.step_bytes(), t.step_bytes(), t.tile_bytes(), w, STEP_BYTES, steps, ahead + (tile - t0) / 2 * steps * lines * 64, lines};
                        if (tile + 1 < t1) multiply<OP, 2>(s, sums, s0 == 0);
                        else multiply<OP, 1>(s, sums, s0 == 0);
                        if (is_last) done(tile * 16, std::min(int64_t(32), std::min(t1 * 16, t.m) - tile * 16), p, sums);
                    }
                }
            }
        }
    });
}

static void linear_tiles(const LinearArgs& a, const Ctx& ctx) {
    if (a.m <= 0) return;
    const TileRows t(a, 32, false);
    char* x = ctx.shared();
    const bool is_alone = a.m <= 2;  // each thread rounds its own copy: cheaper than to meet
    if (is_alone) round_tile(a, t, 0, x = ctx.local());
    else {
        ctx.each(t.tiles, 1, [&](int64_t t0, int64_t t1) {
            for (int64_t i = t0; i < t1; i++) round_tile(a, t, i, x + i * t.tile_bytes());
        });
        ctx.barrier();
    }
    asm volatile("" ::: "memory");
    if (a.m <= 16) few_rows<1>(a, t, x, ctx);
    else if (a.m <= FEW_ROWS) few_rows<2>(a, t, x, ctx);
    else
        many_rows<BF16>(a.w, t.steps * STEP_BYTES, t, x, ctx, [&](int64_t row0, int64_t rows, int64_t panel, const char* sums) {
            finish_rows(a, row0, rows, panel, (const float*)sums);
        });
    release_tiles();
    ctx.barrier();
}

static size_t tiles_shared(const LinearArgs& a) { return size_t((a.m + 15) / 16 * 16 * panel_steps(a.w) * 64 + 64); }
static size_t tiles_local(const LinearArgs& a) {
    const int64_t few = 2 * panel_steps(a.w) * 64, sums = GROUP_PANELS * (BLOCK_ROWS + 32) * 128, wide = a.w.k * PANEL;
    const int64_t four = a.w.multiple ? sums + MOST_SPAN * PANEL : wide;
    return size_t(std::max({few, sums, a.w.format == W_W4A8 ? four : 0})) + 64;
}

// ---- integers ----

// Quantised rows of one call: tiles as above, and for each tile [span][16 rows] of scales and extras.
struct TileBytes : TileRows {
    int64_t k_step, spans;
    char* x;
    float *scale, *extra;
    TileBytes(const LinearArgs& a, char* base) : TileRows(a, step_of(a.w), true), k_step(step_of(a.w)), x(base) {
        spans = a.w.format == W_W4A8 ? spans_of(a.w) : 1;
        scale = (float*)(base + bytes()), extra = scale + tiles * 16 * spans;
    }
    static int64_t step_of(const Weight& w) { return w.format == W_W4A8 && w.span < 64 ? w.span : 64; }
    static size_t needed(const LinearArgs& a) {
        const TileBytes t(a, nullptr);
        return size_t(t.bytes() + t.tiles * 16 * t.spans * 8 + 64);
    }
};

static void quantise_tile_row(const LinearArgs& a, const TileBytes& t, int64_t tile, int64_t r) {
    const bool four = a.w.format == W_W4A8;
    const int64_t span = four ? a.w.span : a.w.k;
    char* out = t.x + tile * t.tile_bytes() + r * 64;
    float *scale = t.scale + tile * 16 * t.spans + r, *extra = t.extra + tile * 16 * t.spans + r;
    if (r >= t.held(tile)) {
        for (int64_t s = 0; s < t.steps; s++) std::memset(out + s * t.step_bytes(), 0, 64);
        for (int64_t s = 0; s < t.spans; s++) scale[s * 16] = extra[s * 16] = 0;
        return;
    }
    std::memset(out + (t.steps - 1) * t.step_bytes(), 0, 64);  // k may end inside the last step
    const float* x = source_row(a, tile * 16 + r);
    const __m128i apart = _mm_setr_epi8(0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15);  // even k first
    for (int64_t s = 0; s < t.spans; s++) {
        const int64_t k0 = s * span, k1 = std::min(k0 + span, a.w.k);
        const float top = largest(x + k0, k1 - k0);
        const float sum = quantise_part(x, k0, k1, top, [&](int64_t k, const int8_t* b, int) {
            __m128i v = _mm_load_si128((const __m128i*)b);
            if (four) v = _mm_shuffle_epi8(v, apart);
            _mm_store_si128((__m128i*)(out + k / t.k_step * t.step_bytes() + k % t.k_step), v);
        });
        scale[s * 16] = top / 127.0f;
        if (four) extra[s * 16] = group_extra(a, top / 127.0f, sum);
    }
}

static void finish_w8a8(const LinearArgs& a, const TileBytes& t, int64_t row0, int64_t rows, int64_t panel, const char* sums) {
    const vf left = load(a.w.scale + panel * PANEL), right = load(a.w.scale + panel * PANEL + 16);
    for (int64_t r = 0; r < rows; r++) {
        const vf x = set1(t.scale[row0 + r]);
        finish(a, row0 + r, panel, mul(mul(to_float(vi_load(sums + r * 128)), left), x), mul(mul(to_float(vi_load(sums + r * 128 + 64)), right), x));
    }
}

// A panel's nibbles as bytes [k / 4][32][4]: signed around 8, or unsigned where zero points differ.
static void widen_nibbles(const Weight& w, int64_t panel, char* out) {
    const char* from = (const char*)w.data + panel * w.k * (PANEL / 2);
    const __m512i low = _mm512_set1_epi8(15), centre = _mm512_set1_epi8(w.offset ? 0 : 8);
    for (int64_t i = 0; i < w.k / 8; i++, from += 128, out += 256)
        for (int h = 0; h < 2; h++) {
            const __m512i v = _mm512_loadu_si512(from + h * 64);
            _mm512_store_si512(out + h * 64, _mm512_sub_epi8(_mm512_and_si512(v, low), centre));
            _mm512_store_si512(out + 128 + h * 64, _mm512_sub_epi8(_mm512_and_si512(_mm512_srli_epi32(v, 4), low), centre));
        }
}

// out [rows][32] += scale * x scale * products of one group, as tile_w4a8 adds them.
template <bool HAS_OFFSET>
static void add_group(const LinearArgs& a, const TileBytes& t, int64_t tile, int64_t rows, int64_t panel, int64_t g, const char* sums, float* out) {
    const int64_t at = (panel * t.spans + g) * PANEL;
    const vf left = load(a.w.scale + at), right = load(a.w.scale + at + 16);
    const vf left_offset = HAS_OFFSET ? load(a.w.offset + at) : zero(), right_offset = HAS_OFFSET ? load(a.w.offset + at + 16) : zero();
    for (int64_t r0 = 0; r0 < rows; r0 += 16, tile++) {
        const float *scale = t.scale + (tile * t.spans + g) * 16, *extra = t.extra + (tile * t.spans + g) * 16;
        const int64_t end = std::min<int64_t>(16, rows - r0);
        RADIX_UNROLL(4)
        for (int64_t r = 0; r < end; r++, sums += 128, out += 32) {
            const vf x = set1(scale[r]);
            vf u = fma(mul(to_float(vi_load(sums)), left), x, g ? load(out) : zero());
            vf v = fma(mul(to_float(vi_load(sums + 64)), right), x, g ? load(out + 16) : zero());
            if (HAS_OFFSET) u = fma(left_offset, set1(extra[r]), u), v = fma(right_offset, set1(extra[r]), v);
            store(out, u), store(out + 16, v);
        }
    }
}

// While vectors add up one group, tiles multiply the next: two places for products. Neither begins at
// the same offset of a page as the other or as the sums, which loads would wait for.
struct alignas(64) GroupSums {
    char even[4096], gap[1024], odd[4096], gap2[1024];
    float out[32 * 32];
};

template <int OP>
static void groups_of_nibbles(const LinearArgs& a, const TileBytes& t, const Ctx& ctx) {
    configure(16, 16, int(t.k_step / 4));
    const int64_t per = a.w.span / t.k_step, w_step = t.k_step * PANEL, panels = panels_of(a.w);
    char* wide = ctx.local();
    GroupSums sums;
    const Grid grid(t.tiles, panels, ctx.threads());
    auto multiply_group = [&](int64_t tile, bool is_pair, int64_t g) {
        const Slice s{t.x + tile * t.tile_bytes() + g * per * t.step_bytes(), t.step_bytes(), t.tile_bytes(), wide + g * per * w_step, w_step, per, nullptr, 0};
        if (is_pair) multiply<OP, 2>(s, g % 2 ? sums.odd : sums.even, true);
        else multiply<OP, 1>(s, g % 2 ? sums.odd : sums.even, true);
    };
    ctx.each(panels * grid.blocks, 2, [&](int64_t i0, int64_t i1) {
        for (int64_t i = i0; i < i1; i++) {
            const int64_t panel = i % panels, t0 = i / panels * grid.tiles_each, t1 = std::min(t0 + grid.tiles_each, t.tiles);
            widen_nibbles(a.w, panel, wide);
            asm volatile("" ::: "memory");
            for (int64_t tile = t0; tile < t1; tile += 2) {
                const bool is_pair = tile + 1 < t1;
                const int64_t rows = std::min(int64_t(is_pair ? 32 : 16), t.m - tile * 16);
                multiply_group(tile, is_pair, 0);
                for (int64_t g = 0; g < t.spans; g++) {
                    if (g + 1 < t.spans) multiply_group(tile, is_pair, g + 1);
                    add_group<OP == NIBBLES>(a, t, tile, rows, panel, g, g % 2 ? sums.odd : sums.even, sums.out);
                }
                finish_rows(a, tile * 16, rows, panel, sums.out);
            }
        }
    });
}

// ---- 4 bits with multiples ----

// Nibbles of one span and panel as signed bytes [k / 4][32][4], each times its group's multiple.
static void widen_multiples(const Weight& w, int64_t panel, int64_t k0, int64_t k1, char* out) {
    const char* from = (const char*)w.data + (panel * w.k + k0) * (PANEL / 2);
    const __m512i low = _mm512_set1_epi8(15);
    for (int64_t g = k0 / w.group; g < k1 / w.group; g++) {
        const int8_t* m = w.multiple + (panel * (w.k / w.group) + g) * 2 * PANEL;
        __m512i times[2], less[2];
        for (int h = 0; h < 2; h++) {
            // Both bytes of a 16-bit product stay below 256, so one multiplication makes two.
            times[h] = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)(m + h * 16)));
            times[h] = _mm512_or_si512(times[h], _mm512_slli_epi32(times[h], 16));
            less[h] = _mm512_mullo_epi32(_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)(m + PANEL + h * 16))), _mm512_set1_epi32(0x01010101));
        }
        for (int64_t i = 0; i < w.group / 8; i++, from += 128, out += 256)
            for (int h = 0; h < 2; h++) {
                const __m512i v = _mm512_loadu_si512(from + h * 64);
                const __m512i even = _mm512_and_si512(v, low), odd = _mm512_and_si512(_mm512_srli_epi32(v, 4), low);
                _mm512_store_si512(out + h * 64, _mm512_sub_epi8(_mm512_mullo_epi16(even, times[h]), less[h]));
                _mm512_store_si512(out + 128 + h * 64, _mm512_sub_epi8(_mm512_mullo_epi16(odd, times[h]), less[h]));
                __builtin_prefetch(from + PREFETCH_BYTES + h * 64);
            }
    }
}

// The products of up to two tiles of rows with a panel over one span, until vectors add them up.
struct SpanProducts {
    int64_t tile, rows, panel, span;
    const char* sums;
    float* rest;  // sums of the spans before, [rows][32]
};

static void add_span(const LinearArgs& a, const TileBytes& t, const SpanProducts& p) {
    const float* scale = a.w.scale + (p.panel * t.spans + p.span) * PANEL;
    const vf left = load(scale), right = load(scale + 16);
    const bool is_last = p.span + 1 == t.spans;
    for (int64_t r = 0; r < p.rows; r++) {
        const vf x = set1(t.scale[((p.tile + r / 16) * t.spans + p.span) * 16 + r % 16]);
        const char* sums = p.sums + r * 128;
        float* rest = p.rest + r * 32;
        const vf u = fma(mul(to_float(vi_load(sums)), left), x, p.span ? load(rest) : zero());
        const vf v = fma(mul(to_float(vi_load(sums + 64)), right), x, p.span ? load(rest + 16) : zero());
        if (is_last) finish(a, p.tile * 16 + r, p.panel, u, v);
        else store(rest, u), store(rest + 16, v);
    }
}

// As many_rows goes through bytes, but a span's nibbles are widened first, and its sums are added up as
// floats while tiles multiply the next rows.
static void spans_of_nibbles(const LinearArgs& a, const TileBytes& t, const Ctx& ctx) {
    configure(16, 16, 16);
    const int64_t panels = panels_of(a.w), most_steps = a.w.span / 64;
    const Grid grid(t.tiles, panels, ctx.threads());
    char* wide = ctx.local();
    float* rest = (float*)(wide + MOST_SPAN * PANEL);
    GroupSums sums;
    ctx.each(grid.groups * grid.blocks, 1, [&](int64_t i0, int64_t i1) {
        SpanProducts last{0, 0, 0, 0, nullptr, nullptr};
        int64_t count = 0;
        for (int64_t i = i0; i < i1; i++) {
            const int64_t t0 = i / grid.groups * grid.tiles_each, t1 = std::min(t0 + grid.tiles_each, t.tiles);
            const int64_t p0 = i % grid.groups * grid.panels_each, p1 = std::min(p0 + grid.panels_each, panels);
            for (int64_t span = 0; span < t.spans; span++) {
                const int64_t s0 = span * most_steps, steps = std::min(most_steps, t.steps - s0);
                for (int64_t p = p0; p < p1; p++) {
                    widen_multiples(a.w, p, span * a.w.span, std::min(a.w.k, (span + 1) * a.w.span), wide);
                    asm volatile("" ::: "memory");
                    for (int64_t tile = t0; tile < t1; tile += 2, count++) {
                        const Slice s{t.x + tile * t.tile_bytes() + s0 * t.step_bytes(), t.step_bytes(), t.tile_bytes(), wide, STEP_BYTES, steps, nullptr, 0};
                        char* out = count % 2 ? sums.odd : sums.even;
                        if (tile + 1 < t1) multiply<SIGNED, 2>(s, out, true);
                        else multiply<SIGNED, 1>(s, out, true);
                        if (last.rows) add_span(a, t, last);
                        const int64_t rows = std::min(int64_t(32), std::min(t1 * 16, t.m) - tile * 16);
                        last = {tile, rows, p, span, out, rest + ((p - p0) * grid.tiles_each + tile - t0) * 512};
                    }
                }
            }
        }
        add_span(a, t, last);
    });
}

// Up to here vectors keep up with the memory or with widening nibbles.
static int64_t vector_rows(const Weight& w) { return w.format == W_W4A8 && !w.multiple ? 8 : 5; }

static void linear_integers(const LinearArgs& a, const Ctx& ctx) {
    if (a.m <= vector_rows(a.w)) return linear_int8(a, ctx);
    const TileBytes t(a, ctx.shared());
    ctx.each(t.tiles * 16, 4, [&](int64_t r0, int64_t r1) {
        for (int64_t r = r0; r < r1; r++) quantise_tile_row(a, t, r / 16, r % 16);
    });
    ctx.barrier();
    asm volatile("" ::: "memory");
    if (a.w.format == W_W8A8)
        many_rows<SIGNED>(a.w, (a.w.k + 3) / 4 * 128, t, t.x, ctx, [&](int64_t row0, int64_t rows, int64_t panel, const char* sums) {
            finish_w8a8(a, t, row0, rows, panel, sums);
        });
    else if (a.w.multiple) spans_of_nibbles(a, t, ctx);
    else if (a.w.offset) groups_of_nibbles<NIBBLES>(a, t, ctx);
    else groups_of_nibbles<SIGNED>(a, t, ctx);
    release_tiles();
    ctx.barrier();
}
static size_t integers_shared(const LinearArgs& a) { return a.m <= vector_rows(a.w) ? linear_int8_shared(a) : TileBytes::needed(a); }

// ---- what the tiles can do at most ----

template <int OP>
static void busy_tiles(size_t rounds) {
    for (size_t i = 0; i < rounds; i++) {
        RADIX_TILE_MULTIPLY(0, 4, 6);
        RADIX_TILE_MULTIPLY(1, 4, 7);
        RADIX_TILE_MULTIPLY(2, 5, 6);
        RADIX_TILE_MULTIPLY(3, 5, 7);
    }
}

static double tile_ceiling(int kind, size_t rounds) {
    configure(16, 16, 16);
    if (kind == 2) busy_tiles<BF16>(rounds);
    else busy_tiles<SIGNED>(rounds);
    release_tiles();
    return double(rounds) * 4 * (kind == 2 ? 16384 : 32768);
}

}  // namespace RADIX_ISA
}  // namespace radix

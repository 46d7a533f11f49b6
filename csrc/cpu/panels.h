// y = x W^T by register tiles of rows and panels, whatever the weights' format (a reader of weights.h) and
// its arithmetic. Every output is one chain over ascending steps of k, started at zero, whatever the number
// of rows, the tile or the thread: batch invariant bit for bit.
#pragma once
#include <utility>

#include "../common/transpose.h"
#include "ahead.h"
#include "epilogue.h"
#include "weights.h"

namespace radix {
namespace RADIX_ISA {

#if defined(__AVX512F__)
constexpr int MAX_ROWS = 12;  // 12 x 32 outputs fill 24 of the 32 registers
#else
constexpr int MAX_ROWS = 3;
#endif
constexpr int64_t KC = 256;                 // of a widened panel: 32 KB, first-level cache
constexpr int64_t BLOCK_TILES = 32;         // row tiles that share a widened panel
constexpr int64_t GROUP = 4;                // panels that share a slice of x in second-level cache
constexpr int64_t NEAR = 1024, FAR = 8192;  // bytes ahead of a weight stream: into first-, second-level cache

// What a pass over a panel brings into second-level cache: of the same stream, or its share of the next panel
// where several passes read one.
struct FarLines {
    int64_t offset = FAR;
    int shift = 0;
    FarLines(int64_t pass, int64_t passes, int64_t panel_bytes) {
        while (int64_t(1) << shift < passes) shift++;
        if (shift) offset = panel_bytes + pass * (panel_bytes >> shift);
    }
    RADIX_INLINE const char* of(const char* begin, const char* now) const {
        return begin + offset + ((now - begin) >> shift);
    }
};

// acc[row][2 * panel + half] += x[k][row] * w[panel][k] over steps k; x is packed [k][ROWS].
template <class W, int ROWS, int NP>
RADIX_INLINE void chain(const Weight& w, W* reader, int64_t panel, const FarLines& far, const float* x,
                        vf (&acc)[ROWS][2 * NP]) {
    const int64_t steps = steps_of<W>(w), step = W::FORMAT == W_INT4 ? w.group : steps;
    for (int64_t g = 0; g < steps; g += step) {
        const int64_t end = g + step;
        if (W::FORMAT == W_INT4 && g != 0)
            for (int p = 0; p < NP; p++) reader[p].group(w, panel + p, g);
        auto one = [&](int64_t k) __attribute__((always_inline)) {
            vf a[NP], b[NP];
            for (int p = 0; p < NP; p++) reader[p].at(k, a[p], b[p]);
            for (int r = 0; r < ROWS; r++) {
                vf xv = set1(x[k * ROWS + r]);
                for (int p = 0; p < NP; p++) {
                    acc[r][2 * p] = W::Step::add(acc[r][2 * p], xv, a[p]);
                    acc[r][2 * p + 1] = W::Step::add(acc[r][2 * p + 1], xv, b[p]);
                }
            }
        };
        constexpr int BURST = W::Step::INPUTS == 1 ? 8 : 4;  // steps between two rounds of prefetches
        int64_t k = g;
        for (; k + BURST <= end; k += BURST) {
            for (int p = 0; p < NP; p++) {
                const char *now = reader[p].address(k), *begin = reader[p].address(0);
                const int64_t each = reader[p].address(k + BURST) - now;
                for (int64_t line = 0; line < BURST * 32 * 4 && line < each; line += 64) {
                    __builtin_prefetch(now + line + NEAR);
                    __builtin_prefetch(far.of(begin, now + line), 0, 2);
                }
            }
            RADIX_UNROLL(8)
            for (int j = 0; j < BURST; j++) one(k + j);
        }
        for (; k < end; k++) one(k);
    }
}

template <class W, int ROWS, int NP>
static void direct_tile(const LinearArgs& a, const float* x, int64_t row0, int64_t panel, int64_t pass,
                        int64_t passes) {
    W reader[NP];
    for (int p = 0; p < NP; p++) reader[p].open(a.w, panel + p, 0);
    vf acc[ROWS][2 * NP];
    for (int r = 0; r < ROWS; r++)
        for (int c = 0; c < 2 * NP; c++) acc[r][c] = zero();
    const FarLines far(pass, passes, reader[0].address(steps_of<W>(a.w)) - reader[0].address(0));
    chain<W, ROWS, NP>(a.w, reader, panel, far, x, acc);
    for (int r = 0; r < ROWS; r++)
        for (int p = 0; p < NP; p++) finish(a, row0 + r, panel + p, acc[r][2 * p], acc[r][2 * p + 1]);
}

// One slice of k over a block of dwords, as they are or widened; partial sums rest in c[ROWS][32]. A row
// prefetches `lines` of the slice that follows.
template <class Step, int ROWS>
static void block_tile(const LinearArgs& a, const float* wide, int64_t kn, const float* x, float* c,
                       bool first, bool last, int64_t row0, int64_t panel, Ahead& ahead, int lines) {
    vf acc[ROWS][2];
    for (int r = 0; r < ROWS; r++) {
        acc[r][0] = first ? zero() : load(c + r * 32);
        acc[r][1] = first ? zero() : load(c + r * 32 + 16);
    }
    int64_t k = 0;
    for (int part = 0; part < ROWS; part++) {
        if (last) prefetch_outputs(a, row0 + part, panel);
        ahead.lines(lines);
        RADIX_UNROLL(4)
        for (const int64_t end = kn * (part + 1) / ROWS; k < end; k++) {
            vf u = load(wide + k * 32), v = load(wide + k * 32 + 16);
            RADIX_UNROLL(12)
            for (int r = 0; r < ROWS; r++) {
                vf xv = set1(x[k * ROWS + r]);
                acc[r][0] = Step::add(acc[r][0], xv, u);
                acc[r][1] = Step::add(acc[r][1], xv, v);
            }
        }
    }
    for (int r = 0; r < ROWS; r++) {
        if (last)
            finish(a, row0 + r, panel, acc[r][0], acc[r][1]);
        else
            store(c + r * 32, acc[r][0]), store(c + r * 32 + 16, acc[r][1]);
    }
}

using DirectTile = void (*)(const LinearArgs&, const float*, int64_t, int64_t, int64_t, int64_t);
using BlockTile = void (*)(const LinearArgs&, const float*, int64_t, const float*, float*, bool, bool,
                           int64_t, int64_t, Ahead&, int);

template <class W>
struct Tiles {
    DirectTile one[MAX_ROWS + 1];   // one panel
    DirectTile many[MAX_ROWS + 1];  // several, while registers last
    int width[MAX_ROWS + 1];
};

constexpr int width_of(int rows, int wide) {
    return MAX_ROWS < 12 ? 1 : rows <= 3 ? wide : rows <= 6 ? 2 : 1;
}

template <class W, int... R>
static Tiles<W> make_tiles(std::integer_sequence<int, R...>) {
    Tiles<W> t{};
    ((t.one[R + 1] = direct_tile<W, R + 1, 1>), ...);
    ((t.many[R + 1] = direct_tile<W, R + 1, width_of(R + 1, W::WIDE)>), ...);
    ((t.width[R + 1] = width_of(R + 1, W::WIDE)), ...);
    return t;
}
template <class W>
static const Tiles<W>& tiles() {
    static const Tiles<W> t = make_tiles<W>(std::make_integer_sequence<int, MAX_ROWS>{});
    return t;
}
template <class Step, int... R>
static BlockTile block_for(int rows, std::integer_sequence<int, R...>) {
    static const BlockTile t[] = {block_tile<Step, R + 1>...};
    return t[rows - 1];
}

struct RowTiles {  // rows cut into equal tiles, the last one shorter
    int64_t m, rows, count;
    explicit RowTiles(int64_t num_rows) : m(num_rows) {
        count = (m + MAX_ROWS - 1) / MAX_ROWS;
        rows = count ? (m + count - 1) / count : 0;
        count = rows ? (m + rows - 1) / rows : 0;
    }
    int64_t size(int64_t t) const { return t + 1 < count ? rows : m - t * rows; }
};

// Rows of a tile as [step][rows of the tile], a dword each: the inputs of a step of k.
template <class Step>
static void pack_rows(const LinearArgs& a, const RowTiles& rt, int64_t t, float* dst) {
    const int64_t n = rt.size(t), steps = steps_of<Step>(a.w.k);
    const float* src[MAX_ROWS];
    for (int64_t r = 0; r < n; r++) {
        const int64_t row = t * rt.rows + r;
        src[r] = a.x + (a.rows ? a.rows[row] : row) * a.ldx;
    }
    dst += t * rt.rows * steps;
    for (int64_t i = 0; i < steps; i += 16) {
        const int lanes = lanes_at(i, steps);
        if (n == 1) {
            store_n(dst + i, Step::inputs(src[0], i, a.w.k), lanes);
            continue;
        }
        vf block[16];
        for (int64_t r = 0; r < 16; r++) block[r] = r < n ? Step::inputs(src[r], i, a.w.k) : zero();
        transpose_16x16(block);
        for (int64_t j = 0; j < lanes; j++) store_n(dst + (i + j) * n, block[j], int(n));
    }
}

// Not many rows: weights are read once, straight from memory.
template <class W>
static void run_direct(const LinearArgs& a, const RowTiles& rt, const float* x, const Ctx& ctx) {
    const Tiles<W>& table = tiles<W>();
    const int width = table.width[rt.rows];
    const int64_t steps = steps_of<W>(a.w);
    ctx.each(panels_of(a.w), 4, [&](int64_t p0, int64_t p1) {
        int64_t p = p0;
        for (; p + width <= p1; p += width)
            for (int64_t t = 0; t < rt.count; t++) {
                int rows = int(rt.size(t));
                const float* xt = x + t * rt.rows * steps;
                if (table.width[rows] == width)
                    table.many[rows](a, xt, t * rt.rows, p, t, rt.count);
                else
                    for (int i = 0; i < width; i++) table.one[rows](a, xt, t * rt.rows, p + i, t, rt.count);
            }
        for (; p < p1; p++)
            for (int64_t t = 0; t < rt.count; t++)
                table.one[rt.size(t)](a, x + t * rt.rows * steps, t * rt.rows, p, t, rt.count);
    });
}

template <class W>
static void widen(const Weight& w, int64_t panel, int64_t k0, int64_t kn, float* out) {
    W reader;
    const int64_t step = W::FORMAT == W_INT4 ? w.group : kn;
    for (int64_t g = 0; g < kn; g += step) {
        int64_t n = g + step < kn ? step : kn - g;
        reader.open(w, panel, k0 + g);
        for (int64_t k = 0; k < n; k++) {
            vf u, v;
            reader.at(k, u, v);
            store(out + (g + k) * 32, u), store(out + (g + k) * 32 + 16, v);
        }
    }
}

// The slice that run_blocked multiplies after that of panel p from k0 on: of the next panel up to p1, of the
// next inputs, of the next group.
template <class W>
static Ahead next_slice(const Weight& w, int64_t p0, int64_t p1, int64_t p, int64_t k0, int64_t kn) {
    const bool is_last = p + 1 == p1, is_end = is_last && k0 + kn == steps_of<W>(w);
    W reader;
    if (is_end)
        reader.open(w, p1 % panels_of(w), 0);
    else
        reader.open(w, is_last ? p0 : p + 1, is_last ? k0 + kn : k0);
    return {reader.address(0), reader.address(kn)};
}

// Many rows: a slice of a panel is brought near, widened if it must be, and used by a block of row tiles.
template <class W>
static void run_blocked(const LinearArgs& a, const RowTiles& rt, const float* x, const Ctx& ctx) {
    const int64_t panels = panels_of(a.w), k = steps_of<W>(a.w);
    int64_t per_group = panels / (2 * ctx.threads());
    per_group = per_group < 1 ? 1 : per_group > GROUP ? GROUP : per_group;
    const int64_t groups = (panels + per_group - 1) / per_group;
    const int64_t blocks = (rt.count + BLOCK_TILES - 1) / BLOCK_TILES;
    const int64_t per_block = (rt.count + blocks - 1) / blocks;
    float* wide = (float*)ctx.local();
    float* sums = wide + KC * 32;
    auto seq = std::make_integer_sequence<int, MAX_ROWS>{};
    ctx.each(groups * blocks, 1, [&](int64_t i0, int64_t i1) {
        for (int64_t i = i0; i < i1; i++) {
            int64_t t0 = i / groups * per_block, t1 = t0 + per_block < rt.count ? t0 + per_block : rt.count;
            int64_t p0 = i % groups * per_group, p1 = p0 + per_group < panels ? p0 + per_group : panels;
            for (int64_t k0 = 0; k0 < k; k0 += KC) {
                int64_t kn = k0 + KC < k ? KC : k - k0;
                for (int64_t p = p0; p < p1; p++) {
                    Ahead ahead = next_slice<W>(a.w, p0, p1, p, k0, kn);
                    const int64_t num_rows = (t1 - t0) * rt.rows;
                    const int lines = int(((ahead.end - ahead.at) / 64 + num_rows - 1) / num_rows);
                    const float* src = wide;
                    if constexpr (W::IS_WIDE) {
                        W reader;
                        reader.open(a.w, p, k0);
                        src = (const float*)reader.address(0);
                    } else
                        widen<W>(a.w, p, k0, kn, wide);
                    for (int64_t t = t0; t < t1; t++) {
                        int64_t rows = rt.size(t);
                        float* c = sums + ((p - p0) * per_block + (t - t0)) * MAX_ROWS * 32;
                        block_for<typename W::Step>(int(rows), seq)(
                            a, src, kn, x + t * rt.rows * k + k0 * rows, c, k0 == 0, k0 + kn == k,
                            t * rt.rows, p, ahead, lines);
                    }
                }
            }
        }
    });
}

template <class W>
static void run_format(const LinearArgs& a, const RowTiles& rt, const float* x, const Ctx& ctx) {
    // Widening for each tile of rows again costs less than partial sums, until x leaves second-level cache.
    constexpr int64_t direct = MAX_ROWS == 12 && W::FORMAT != W_INT8 && W::FORMAT != W_INT4 ? 8 : 2;
    if (rt.count <= direct)
        run_direct<W>(a, rt, x, ctx);
    else
        run_blocked<W>(a, rt, x, ctx);
}

// Rows of x packed for everyone. `alone`: each thread packs its own copy, cheaper than a barrier for a few.
template <class Step>
static const float* packed_rows(const LinearArgs& a, const RowTiles& rt, bool alone, const Ctx& ctx) {
    float* packed = (float*)(alone ? ctx.local() : ctx.packing());
    if (alone) {
        pack_rows<Step>(a, rt, 0, packed);
        return packed;
    }
    ctx.each_packed(rt.count, 1, [&](int64_t t0, int64_t t1) {
        for (int64_t t = t0; t < t1; t++) pack_rows<Step>(a, rt, t, packed);
    });
    return packed;
}

template <class Step>
size_t panel_shared(const LinearArgs& a) {
    return size_t(a.m) * size_t(steps_of<Step>(a.w.k)) * 4 + 64;
}
inline size_t panel_local() { return size_t(KC) * 32 * 4 + size_t(BLOCK_TILES) * GROUP * MAX_ROWS * 32 * 4; }

}  // namespace RADIX_ISA
}  // namespace radix

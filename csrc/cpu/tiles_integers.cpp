// Linear layers with integer weights on matrix tiles, for more rows than vectors keep up with: int8 by
// int8, nibbles on any grid, and nibbles whose scales are multiples (see int8.cpp for what they mean).
#include <algorithm>

#include "tiles.cpp"

namespace radix {
namespace RADIX_ISA {

// Quantised rows of one call: tiles as above, and for each tile [span][16 rows] of scales and extras.
// Activations of 16 bits fill two neighbouring tiles, high bytes and low bytes.
struct TileBytes : TileRows {
    int64_t k_step, spans, planes, blocks;  // blocks: sixteen rows of x
    char* x;
    float *scale, *extra;
    TileBytes(const LinearArgs& a, char* base)
        : TileRows(a, step_of(a.w), true), k_step(step_of(a.w)), x(base) {
        spans = a.w.format == W_W4A8 ? spans_of(a.w) : 1;
        planes = a.w.format == W_W8A16 ? 2 : 1;
        blocks = tiles, tiles *= planes;
        scale = (float*)(base + bytes()), extra = scale + blocks * 16 * spans;
    }
    static int64_t step_of(const Weight& w) { return w.format == W_W4A8 && w.span < 64 ? w.span : 64; }
    static size_t needed(const LinearArgs& a) {
        const TileBytes t(a, nullptr);
        return size_t(t.bytes() + t.blocks * 16 * t.spans * 8 + 64);
    }
};

struct Numbers64 {
    __m512i q[4];
    Numbers64() = default;
    RADIX_INLINE Numbers64(const float* x, vf inverse) {
        for (int i = 0; i < 4; i++) q[i] = _mm512_cvtps_epi32(mul(load(x + i * 16), inverse).v);
    }
    RADIX_INLINE __m512i bytes() const {  // in their order; all fit
        const __m512i packed =
            _mm512_packs_epi16(_mm512_packs_epi32(q[0], q[1]), _mm512_packs_epi32(q[2], q[3]));
        return _mm512_permutexvar_epi32(
            _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15), packed);
    }
};

static void clear_tile_row(const TileBytes& t, char* out) {
    for (int64_t s = 0; s < t.steps; s++) std::memset(out + s * t.step_bytes(), 0, 64);
}

static void quantise_twice_tile_row(const LinearArgs& a, const TileBytes& t, int64_t block, int64_t r) {
    char *high = t.x + block * 2 * t.tile_bytes() + r * 64, *low = high + t.tile_bytes();
    float& scale = t.scale[block * 16 + r];
    scale = 0;
    if (r >= t.held(block)) return clear_tile_row(t, high), clear_tile_row(t, low);
    const float *x = source_row(a, block * 16 + r), top = largest(x, a.w.k);
    scale = top / MAX_INT16_PAIR;
    int64_t k0 = 0;
    for (const vf inverse = set1(top > 0 ? MAX_INT16_PAIR / top : 0.0f); k0 + 64 <= a.w.k; k0 += 64) {
        Numbers64 upper(x + k0, inverse), rest = upper;
        for (int i = 0; i < 4; i++) {
            upper.q[i] = _mm512_srai_epi32(_mm512_add_epi32(rest.q[i], _mm512_set1_epi32(128)), 8);
            rest.q[i] = _mm512_sub_epi32(rest.q[i], _mm512_slli_epi32(upper.q[i], 8));
        }
        _mm512_store_si512(high + k0 / 64 * t.step_bytes(), upper.bytes());
        _mm512_store_si512(low + k0 / 64 * t.step_bytes(), rest.bytes());
    }
    if (k0 == a.w.k) return;
    char *high_end = high + k0 / 64 * t.step_bytes(), *low_end = low + k0 / 64 * t.step_bytes();
    std::memset(high_end, 0, 64), std::memset(low_end, 0, 64);
    quantise_twice(x, k0, a.w.k, top, [&](int64_t k, const int8_t* upper, const int8_t* rest, int) {
        std::memcpy(high_end + k % 64, upper, 16), std::memcpy(low_end + k % 64, rest, 16);
    });
}

static void quantise_tile_row(const LinearArgs& a, const TileBytes& t, int64_t tile, int64_t r) {
    const bool four = a.w.format == W_W4A8, is_grid = four && !a.w.multiple;
    const int64_t span = four ? a.w.span : a.w.k;
    char* out = t.x + tile * t.tile_bytes() + r * 64;
    float *scale = t.scale + tile * 16 * t.spans + r, *extra = t.extra + tile * 16 * t.spans + r;
    if (r >= t.held(tile)) {
        clear_tile_row(t, out);
        for (int64_t s = 0; s < t.spans; s++) scale[s * 16] = extra[s * 16] = 0;
        return;
    }
    std::memset(out + (t.steps - 1) * t.step_bytes(), 0, 64);  // k may end inside the last step
    const float* x = source_row(a, tile * 16 + r);
    const __m128i apart =
        _mm_setr_epi8(0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15);  // even k first
    for (int64_t s = 0; s < t.spans; s++) {
        int64_t k0 = s * span;
        const int64_t k1 = std::min(k0 + span, a.w.k);
        const float top = largest(x + k0, k1 - k0);
        for (const vf inverse = set1(top > 0 ? 127.0f / top : 0.0f); !is_grid && k0 + 64 <= k1; k0 += 64) {
            const __m512i v = Numbers64(x + k0, inverse).bytes();
            _mm512_store_si512(out + k0 / 64 * t.step_bytes(),
                               four ? _mm512_shuffle_epi8(v, _mm512_broadcast_i32x4(apart)) : v);
        }
        const float sum = quantise_part(x, k0, k1, top, [&](int64_t k, const int8_t* b, int) {
            __m128i v = _mm_load_si128((const __m128i*)b);
            if (four) v = _mm_shuffle_epi8(v, apart);
            _mm_store_si128((__m128i*)(out + k / t.k_step * t.step_bytes() + k % t.k_step), v);
        });
        scale[s * 16] = top / 127.0f;
        if (is_grid) extra[s * 16] = group_extra(a.w, false, top / 127.0f, sum);
    }
}

static void finish_w8a8(const LinearArgs& a, const TileBytes& t, int64_t row0, int64_t rows, int64_t panel,
                        const char* sums) {
    const vf left = load(a.w.scale + panel * PANEL), right = load(a.w.scale + panel * PANEL + 16);
    for (int64_t r = 0; r < rows; r++) {
        const vf x = set1(t.scale[row0 + r]);
        finish(a, row0 + r, panel, mul(mul(to_float(vi_load(sums + r * 128)), left), x),
               mul(mul(to_float(vi_load(sums + r * 128 + 64)), right), x));
    }
}

// `sums`: sixteen rows of products with high bytes, then those with low ones.
static void finish_w8a16(const LinearArgs& a, const TileBytes& t, int64_t block, int64_t panel,
                         const char* sums) {
    const vf left = load(a.w.scale + panel * PANEL), right = load(a.w.scale + panel * PANEL + 16);
    for (int64_t r = 0; r < t.held(block); r++, sums += 128) {
        const vf x = set1(t.scale[block * 16 + r]);
        const vf u = join_planes(vi_load(sums), vi_load(sums + 2048)),
                 v = join_planes(vi_load(sums + 64), vi_load(sums + 2048 + 64));
        finish(a, block * 16 + r, panel, mul(mul(u, left), x), mul(mul(v, right), x));
    }
}

// A panel's nibbles as bytes [k / 4][32][4]: signed around 8, or unsigned where zero points differ; of
// e2m1 twice its numbers.
static void widen_nibbles(const Weight& w, int64_t panel, char* out) {
    const char* from = (const char*)w.data + panel * w.k * (PANEL / 2);
    const __m512i low = _mm512_set1_epi8(15), centre = _mm512_set1_epi8(w.offset ? 0 : 8);
    const __m512i twice = _mm512_broadcast_i32x4(_mm_load_si128((const __m128i*)TWICE_FP4));
    auto widened = [&](__m512i q) {
        return w.fp4 ? _mm512_shuffle_epi8(twice, q) : _mm512_sub_epi8(q, centre);
    };
    for (int64_t i = 0; i < w.k / 8; i++, from += 128, out += 256)
        for (int h = 0; h < 2; h++) {
            const __m512i v = _mm512_loadu_si512(from + h * 64);
            _mm512_store_si512(out + h * 64, widened(_mm512_and_si512(v, low)));
            _mm512_store_si512(out + 128 + h * 64, widened(_mm512_and_si512(_mm512_srli_epi32(v, 4), low)));
        }
}

// out [rows][32] += scale * x scale * products of one group, as tile_w4a8 adds them.
template <bool HAS_OFFSET>
static void add_group(const LinearArgs& a, const TileBytes& t, int64_t tile, int64_t rows, int64_t panel,
                      int64_t g, const char* sums, float* out) {
    const int64_t at = (panel * t.spans + g) * PANEL;
    const vf left = load(a.w.scale + at), right = load(a.w.scale + at + 16);
    const vf left_offset = HAS_OFFSET ? load(a.w.offset + at) : zero(),
             right_offset = HAS_OFFSET ? load(a.w.offset + at + 16) : zero();
    for (int64_t r0 = 0; r0 < rows; r0 += 16, tile++) {
        const float *scale = t.scale + (tile * t.spans + g) * 16,
                    *extra = t.extra + (tile * t.spans + g) * 16;
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
        const Slice s{t.x + tile * t.tile_bytes() + g * per * t.step_bytes(),
                      t.step_bytes(),
                      t.tile_bytes(),
                      wide + g * per * w_step,
                      w_step,
                      per,
                      nullptr,
                      0};
        if (is_pair)
            multiply<OP, 2>(s, g % 2 ? sums.odd : sums.even, true);
        else
            multiply<OP, 1>(s, g % 2 ? sums.odd : sums.even, true);
    };
    ctx.each(panels * grid.blocks, 2, [&](int64_t i0, int64_t i1) {
        for (int64_t i = i0; i < i1; i++) {
            const int64_t panel = i % panels, t0 = i / panels * grid.tiles_each,
                          t1 = std::min(t0 + grid.tiles_each, t.tiles);
            widen_nibbles(a.w, panel, wide);
            asm volatile("" ::: "memory");
            for (int64_t tile = t0; tile < t1; tile += 2) {
                const bool is_pair = tile + 1 < t1;
                const int64_t rows = std::min(int64_t(is_pair ? 32 : 16), t.m - tile * 16);
                multiply_group(tile, is_pair, 0);
                for (int64_t g = 0; g < t.spans; g++) {
                    if (g + 1 < t.spans) multiply_group(tile, is_pair, g + 1);
                    add_group<OP == NIBBLES>(a, t, tile, rows, panel, g, g % 2 ? sums.odd : sums.even,
                                             sums.out);
                }
                finish_rows(a, tile * 16, rows, panel, sums.out);
            }
        }
    });
}

// ---- 4 bits with multiples ----

static const char* nibbles_at(const Weight& w, int64_t panel, int64_t k) {
    return (const char*)w.data + (panel * w.k + k) * (PANEL / 2);
}

// Nibbles of one span and panel as signed bytes [k / 4][32][4], each times its group's multiple. Half as
// many from `next` on are prefetched meanwhile.
static void widen_multiples(const Weight& w, int64_t panel, int64_t k0, int64_t k1, const char* next,
                            char* out) {
    const char* from = nibbles_at(w, panel, k0);
    const __m512i low = _mm512_set1_epi8(15);
    for (int64_t g = k0 / w.group; g < k1 / w.group; g++) {
        const int8_t* m = w.multiple + (panel * (w.k / w.group) + g) * 2 * PANEL;
        __m512i times[2], less[2];
        for (int h = 0; h < 2; h++) {
            // Both bytes of a 16-bit product stay below 256, so one multiplication makes two.
            times[h] = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)(m + h * 16)));
            times[h] = _mm512_or_si512(times[h], _mm512_slli_epi32(times[h], 16));
            less[h] = _mm512_mullo_epi32(
                _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)(m + PANEL + h * 16))),
                _mm512_set1_epi32(0x01010101));
        }
        for (int64_t i = 0; i < w.group / 8; i++, from += 128, next += 64, out += 256) {
            __builtin_prefetch(next, 0, 2);
            for (int h = 0; h < 2; h++) {
                const __m512i v = _mm512_loadu_si512(from + h * 64);
                const __m512i even = _mm512_and_si512(v, low),
                              odd = _mm512_and_si512(_mm512_srli_epi32(v, 4), low);
                _mm512_store_si512(out + h * 64,
                                   _mm512_sub_epi8(_mm512_mullo_epi16(even, times[h]), less[h]));
                _mm512_store_si512(out + 128 + h * 64,
                                   _mm512_sub_epi8(_mm512_mullo_epi16(odd, times[h]), less[h]));
            }
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
        if (is_last)
            finish(a, p.tile * 16 + r, p.panel, u, v);
        else
            store(rest, u), store(rest + 16, v);
    }
}

// As many_rows goes through bytes, but a span's nibbles are widened first, and its sums are added up as
// floats while tiles multiply the next rows.
static void spans_of_nibbles(const LinearArgs& a, const TileBytes& t, const Ctx& ctx) {
    configure(16, 16, 16);
    const int64_t panels = panels_of(a.w), max_steps = a.w.span / 64;
    const Grid grid(t.tiles, panels, ctx.threads());
    char* wide = ctx.local();
    float* rest = (float*)(wide + MAX_SPAN * PANEL);
    GroupSums sums;
    ctx.each(grid.groups * grid.blocks, 1, [&](int64_t i0, int64_t i1) {
        SpanProducts last{0, 0, 0, 0, nullptr, nullptr};
        int64_t count = 0;
        for (int64_t i = i0; i < i1; i++) {
            const int64_t t0 = i / grid.groups * grid.tiles_each,
                          t1 = std::min(t0 + grid.tiles_each, t.tiles);
            const int64_t p0 = i % grid.groups * grid.panels_each,
                          p1 = std::min(p0 + grid.panels_each, panels);
            const int64_t pairs = (t1 - t0 + 1) / 2, lines = (8 + pairs - 1) / pairs;
            for (int64_t span = 0; span < t.spans; span++) {
                const int64_t s0 = span * max_steps, steps = std::min(max_steps, t.steps - s0);
                const int64_t k0 = span * a.w.span, k1 = std::min(a.w.k, k0 + a.w.span);
                for (int64_t p = p0; p < p1; p++) {
                    const char* next = p + 1 < p1   ? nibbles_at(a.w, p + 1, k0)
                                       : k1 < a.w.k ? nibbles_at(a.w, p0, k1)
                                                    : nibbles_at(a.w, p1, 0);
                    widen_multiples(a.w, p, k0, k1, next, wide);
                    next += (k1 - k0) * (PANEL / 4);  // the other half, during the products
                    asm volatile("" ::: "memory");
                    for (int64_t tile = t0; tile < t1; tile += 2, count++) {
                        const char *x = t.x + tile * t.tile_bytes() + s0 * t.step_bytes(),
                                   *ahead = next + (tile - t0) / 2 * steps * lines * 64;
                        const Slice s{x,          t.step_bytes(), t.tile_bytes(), wide,
                                      STEP_BYTES, steps,          ahead,          lines};
                        char* out = count % 2 ? sums.odd : sums.even;
                        if (tile + 1 < t1)
                            multiply<SIGNED, 2>(s, out, true);
                        else
                            multiply<SIGNED, 1>(s, out, true);
                        if (last.rows) add_span(a, t, last);
                        const int64_t rows = std::min(int64_t(32), std::min(t1 * 16, t.m) - tile * 16);
                        last = {tile, rows, p,
                                span, out,  rest + ((p - p0) * grid.tiles_each + tile - t0) * 512};
                    }
                }
            }
        }
        add_span(a, t, last);
    });
}

// Up to here vectors keep up with the memory or with widening nibbles (measured with steps of Qwen3-0.6B's
// shape, two threads). Groups of 16 would fill a quarter of a tile.
static int64_t vector_rows(const Weight& w) {
    if (w.format == W_W4A8 && w.group < 32) return INT64_MAX;
    if (w.format != W_W4A8) return 5;
    return w.multiple ? 7 : 8;
}

static void linear_integers(const LinearArgs& given, const Ctx& ctx) {
    if (given.m <= vector_rows(given.w)) return linear_int8(given, ctx);
    const LinearArgs a = streaming(given);
    const TileBytes t(a, ctx.packing());
    const auto quantise = t.planes == 2 ? quantise_twice_tile_row : quantise_tile_row;
    ctx.each_packed(t.blocks * 16, 4, [&](int64_t r0, int64_t r1) {
        for (int64_t r = r0; r < r1; r++) quantise(a, t, r / 16, r % 16);
    });
    asm volatile("" ::: "memory");
    if (a.w.format == W_W8A8)
        many_rows<SIGNED>(a.w, (a.w.k + 3) / 4 * 128, t, t.x, ctx,
                          [&](int64_t row0, int64_t rows, int64_t panel, const char* sums) {
                              finish_w8a8(a, t, row0, rows, panel, sums);
                          });
    else if (t.planes == 2)
        many_rows<SIGNED>(a.w, (a.w.k + 3) / 4 * 128, t, t.x, ctx,
                          [&](int64_t row0, int64_t, int64_t panel, const char* sums) {
                              finish_w8a16(a, t, row0 / 32, panel, sums);
                          });
    else if (a.w.multiple)
        spans_of_nibbles(a, t, ctx);
    else if (a.w.offset)
        groups_of_nibbles<NIBBLES>(a, t, ctx);
    else
        groups_of_nibbles<SIGNED>(a, t, ctx);
    release_tiles();
    _mm_sfence();
    ctx.barrier();
}
static size_t integers_shared(const LinearArgs& a) {
    return a.m <= vector_rows(a.w) ? linear_int8_shared(a) : TileBytes::needed(a);
}

}  // namespace RADIX_ISA
}  // namespace radix

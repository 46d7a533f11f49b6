// W8A8, W8A16 and W4A8: activations are quantised per row (W4A8: per row and span), products are summed
// as integers. W8A16 splits activations of 16 bits into two bytes with separate products: 256 * high +
// low. Integer sums are exact, so only the short float chain over spans has an order, and it is ascending:
// batch invariant bit for bit.
#include "int8.h"

#include <array>

#include "ahead.h"
#include "epilogue.h"
#include "int8_rows.h"

namespace radix {
namespace RADIX_ISA {

// What a pass over a panel prefetches at each step of 128 bytes: what it reads later, or its share of the
// next panel where several passes read one; and into first-level cache 1 KB ahead.
struct PanelAhead {
    int64_t offset = 8192, stride = 128;
    PanelAhead(int64_t steps, int64_t pass, int64_t passes) {
        if (passes > 1) stride = 128 / passes, offset = steps * (128 + pass * stride);
    }
    RADIX_INLINE void prefetch(const void* panel, int64_t step) const {
        const char *far = (const char*)panel + offset + step * stride,
                   *near = (const char*)panel + step * 128;
#if defined(__AMX_TILE__)
        if (stride == 128)
            far = prefetched_in_turn(near), __builtin_prefetch(far), __builtin_prefetch(far + 64);
        else
#endif
            __builtin_prefetch(far, 0, 2), __builtin_prefetch(far + stride / 2, 0, 2);
        __builtin_prefetch(near + 1024), __builtin_prefetch(near + 1088);
    }
};

// GCC 12 drops a call that does nothing but prefetch, unless it is inlined first.
#define RADIX_KEPT __attribute__((always_inline))

#if RADIX_HALVES
template <int ROWS, bool SIGNED_X>
RADIX_INLINE void add_bytes(const int8_t* w, const int32_t* x, vi (&acc)[ROWS][2]) {
    RADIX_UNROLL(4)
    for (int i = 0; i < 4; i++) {
        const __m256i b = _mm256_loadu_si256((const __m256i*)w + i);
        RADIX_UNROLL(3)
        for (int r = 0; r < ROWS; r++) {
            const __m256i xv = _mm256_set1_epi32(x[r]);
            __m256i& sum = half_of(acc[r], i);
            sum = SIGNED_X ? dot256(sum, b, xv) : dot256(sum, xv, b);
        }
    }
}
template <int ROWS, bool FP4>
RADIX_INLINE void add_nibbles(const uint32_t* w, const int32_t* x, vi (&acc)[ROWS][2]) {
    RADIX_UNROLL(4)
    for (int i = 0; i < 4; i++) {
        const __m256i m = _mm256_set1_epi8(15), both = _mm256_loadu_si256((const __m256i*)w + i);
        __m256i even = _mm256_and_si256(both, m), odd = _mm256_and_si256(_mm256_srli_epi32(both, 4), m);
        if (FP4) even = look_up(even, RAISED_FP4), odd = look_up(odd, RAISED_FP4);
        RADIX_UNROLL(3)
        for (int r = 0; r < ROWS; r++) {
            __m256i& sum = half_of(acc[r], i);
            sum = dot256(sum, even, _mm256_set1_epi32(x[r]));
            sum = dot256(sum, odd, _mm256_set1_epi32(x[ROWS + r]));
        }
    }
}
#else
template <int ROWS, bool SIGNED_X>
RADIX_INLINE void add_bytes(const int8_t* w, const int32_t* x, vi (&acc)[ROWS][2]) {
    const vi b[2] = {vi_load(w), vi_load(w + 64)};
    RADIX_UNROLL(12)
    for (int r = 0; r < ROWS; r++) {
        const vi xv = vi_set1(x[r]);
        for (int c = 0; c < 2; c++)
            acc[r][c] = SIGNED_X ? dot_wx(acc[r][c], b[c], xv) : dot_xw(acc[r][c], xv, b[c]);
    }
}
template <int ROWS, bool FP4>
RADIX_INLINE void add_nibbles(const uint32_t* w, const int32_t* x, vi (&acc)[ROWS][2]) {
    vi even[2], odd[2];
    for (int c = 0; c < 2; c++) {
        split_nibbles(vi_load(w + c * 16), even[c], odd[c]);
        if (FP4) even[c] = look_up(even[c], RAISED_FP4), odd[c] = look_up(odd[c], RAISED_FP4);
    }
    RADIX_UNROLL(12)
    for (int r = 0; r < ROWS; r++) {
        const vi x0 = vi_set1(x[r]), x1 = vi_set1(x[ROWS + r]);
        for (int c = 0; c < 2; c++) acc[r][c] = dot_wx(dot_wx(acc[r][c], even[c], x0), odd[c], x1);
    }
}
#endif

// acc += x * w of steps [0, steps), four k each; ahead(s) prefetches at step s, outputs(r) once for each
// row, evenly among them. x is signed or w is: the other one holds unsigned bytes where the instruction
// wants them.
template <int ROWS, bool SIGNED_X, class Ahead, class Outputs>
RADIX_INLINE void byte_products(const int8_t* w, const int32_t* x, int64_t steps, Ahead ahead,
                                Outputs outputs, vi (&acc)[ROWS][2]) {
    int64_t s = 0;
    for (int r = 0; r < ROWS; r++) {
        outputs(r);
        for (const int64_t end = steps * (r + 1) / ROWS; s < end; s++) {
            ahead(s);
            add_bytes<ROWS, SIGNED_X>(w + s * 128, x + s * ROWS, acc);
        }
    }
}

template <int ROWS, int PLANES>
static void tile_bytes(const LinearArgs& a, const Quantised& q, int64_t t, int64_t panel,
                       const PanelAhead& ahead) {
    const int8_t* w = (const int8_t*)a.w.data + panel * q.steps * 128;
    vi acc[ROWS * PLANES][2];
    for (int r = 0; r < ROWS * PLANES; r++) acc[r][0] = acc[r][1] = vi_zero();
    byte_products<ROWS * PLANES, false>(
        w, q.tile(t), q.steps, [&](int64_t s) RADIX_KEPT { ahead.prefetch(w, s); },
        [&](int r) RADIX_KEPT {
            if (r < ROWS) prefetch_outputs(a, t * q.rows + r, panel);
        },
        acc);
    for (int r = 0; r < ROWS; r++) {
        vf out[2];
        for (int h = 0; h < 2; h++) {
            const int64_t lane = panel * PANEL + h * 16;
            auto sum = [&](int row) {
                return BIASED ? vi_sub(acc[row][h], vi_load(a.w.column_sum + lane)) : acc[row][h];
            };
            const vf whole = PLANES == 2 ? join_planes(sum(2 * r), sum(2 * r + 1)) : to_float(sum(r));
            out[h] = mul(mul(whole, load(a.w.scale + lane)), set1(q.scale[t * q.rows + r]));
        }
        finish(a, t * q.rows + r, panel, out[0], out[1]);
    }
}

// acc += x * w of steps [s0, s1), eight k each.
template <int ROWS, bool FP4 = false>
RADIX_INLINE void nibble_products(const uint32_t* w, const int32_t* x, int64_t s0, int64_t s1,
                                  const PanelAhead& ahead, vi (&acc)[ROWS][2]) {
    for (int64_t s = s0; s < s1; s++) {
        ahead.prefetch(w, s);
        add_nibbles<ROWS, FP4>(w + s * PANEL, x + 2 * s * ROWS, acc);
    }
}

// Scales and offsets of any value: those of a group are those of its span.
template <int ROWS, bool FP4>
static void tile_grids(const LinearArgs& a, const Quantised& q, int64_t t, int64_t panel,
                       const PanelAhead& ahead) {
    const int64_t per = a.w.group / 8;
    const uint32_t* w = (const uint32_t*)a.w.data + panel * (a.w.k / 8) * PANEL;
    const int32_t* x = q.tile(t);
    vf out[ROWS][2];
    for (int r = 0; r < ROWS; r++) out[r][0] = out[r][1] = zero();
    for (int64_t g = 0; g < q.groups; g++) {
        const float *xs = q.scale + t * q.rows * q.groups + g * ROWS,
                    *xe = q.extra + t * q.rows * q.groups + g * ROWS;
        vi acc[ROWS][2];
        for (int r = 0; r < ROWS; r++) {
            const vi start = a.w.offset ? vi_zero() : vi_set1(int32_t(float_to_bits(xe[r])));
            acc[r][0] = acc[r][1] = start;
        }
        for (int64_t r = ROWS * g / q.groups; r < ROWS * (g + 1) / q.groups; r++)
            prefetch_outputs(a, t * q.rows + r, panel);
        nibble_products<ROWS, FP4>(w, x, g * per, (g + 1) * per, ahead, acc);
        for (int c = 0; c < 2; c++) {
            const int64_t at = (panel * q.groups + g) * PANEL + c * 16;
            const vf scale = load(a.w.scale + at);
            for (int r = 0; r < ROWS; r++)
                out[r][c] = fma(mul(to_float(acc[r][c]), scale), set1(xs[r]), out[r][c]);
            if (!a.w.offset) continue;
            const vf offset = load(a.w.offset + at);
            for (int r = 0; r < ROWS; r++) out[r][c] = fma(offset, set1(xe[r]), out[r][c]);
        }
    }
    for (int r = 0; r < ROWS; r++) finish(a, t * q.rows + r, panel, out[r][0], out[r][1]);
}

// Scales that are multiples of their span's: whole numbers are summed over a span, in floats that hold
// them exactly, so tiles that sum them as integers give the same bits.
template <int ROWS>
static void tile_multiples(const LinearArgs& a, const Quantised& q, int64_t t, int64_t panel,
                           const PanelAhead& ahead) {
    const int64_t per = a.w.group / 8, per_span = a.w.span / a.w.group;
    const uint32_t* w = (const uint32_t*)a.w.data + panel * (a.w.k / 8) * PANEL;
    const int32_t* x = q.tile(t);
    const float *xs = q.scale + t * q.rows * q.spans, *xe = q.extra + t * q.rows * q.groups;
    vf out[ROWS][2];
    for (int r = 0; r < ROWS; r++) out[r][0] = out[r][1] = zero();
    for (int64_t s = 0; s < q.spans; s++, xs += ROWS) {
        vf whole[ROWS][2];
        for (int r = 0; r < ROWS; r++) whole[r][0] = whole[r][1] = zero();
        const int64_t g1 = (s + 1) * per_span < q.groups ? (s + 1) * per_span : q.groups;
        for (int64_t g = s * per_span; g < g1; g++) {
            vi acc[ROWS][2];
            for (int r = 0; r < ROWS; r++) acc[r][0] = acc[r][1] = vi_zero();
            nibble_products<ROWS>(w, x, g * per, (g + 1) * per, ahead, acc);
            for (int c = 0; c < 2; c++) {
                const int8_t* m = a.w.multiple + (panel * q.groups + g) * 2 * PANEL + c * 16;
                const vf times = load_i8(m), less = load_i8(m + PANEL);
                for (int r = 0; r < ROWS; r++)
                    whole[r][c] =
                        fma(less, set1(xe[g * ROWS + r]), fma(to_float(acc[r][c]), times, whole[r][c]));
            }
        }
        for (int c = 0; c < 2; c++) {
            const vf scale = load(a.w.scale + (panel * q.spans + s) * PANEL + c * 16);
            for (int r = 0; r < ROWS; r++) out[r][c] = fma(mul(whole[r][c], scale), set1(xs[r]), out[r][c]);
        }
    }
    for (int r = 0; r < ROWS; r++) finish(a, t * q.rows + r, panel, out[r][0], out[r][1]);
}

#if RADIX_UNSIGNED_BY_SIGNED
// What a group's nibbles become: times `times` (the same in both halves of a dword), plus `plus`.
struct WideGroup {
    vi times[2], plus[2];
    explicit WideGroup(const int8_t* multiple) {
        for (int h = 0; h < 2; h++, multiple += 16) {
            alignas(64) int32_t t[16], p[16];
            for (int i = 0; i < 16; i++) {
                t[i] = multiple[i] * 0x00010001;
                p[i] = (CENTRE - multiple[PANEL + i]) * 0x01010101;
            }
            times[h] = vi_load(t), plus[h] = vi_load(p);
        }
    }
};

// A panel's nibbles as unsigned bytes [k / 4][32][4], even k of eight first; CENTRE stands for zero.
static void widen_panel(const Weight& w, int64_t panel, int8_t* out) {
    const uint32_t* from = (const uint32_t*)w.data + panel * (w.k / 8) * PANEL;
    const int8_t* multiple = w.multiple + panel * (w.k / w.group) * 2 * PANEL;
    for (int64_t k = 0; k < w.k; k += w.group, multiple += 2 * PANEL) {
        const WideGroup g(multiple);
        for (int i = 0; i < w.group; i += 8, from += PANEL, out += 256)
            for (int h = 0; h < 2; h++) {
                vi even, odd;
                split_nibbles(vi_load(from + h * 16), even, odd);
                vi_store(out + h * 64, scale_bytes(even, g.times[h], g.plus[h]));
                vi_store(out + 128 + h * 64, scale_bytes(odd, g.times[h], g.plus[h]));
            }
    }
}

// Rows times a widened panel: the same whole numbers as tile_multiples, in the same chain. `next`: memory
// to prefetch, `stride` bytes at each step.
template <int ROWS>
static void tile_wide(const LinearArgs& a, const Quantised& q, int64_t t, int64_t panel, const int8_t* w,
                      const char* next, int64_t stride) {
    const int32_t* x = q.tile(t);
    const float *xs = q.scale + t * q.rows * q.spans, *xe = q.extra + t * q.rows * q.spans;
    vf out[ROWS][2];
    for (int r = 0; r < ROWS; r++) out[r][0] = out[r][1] = zero();
    for (int64_t s = 0; s < q.spans; s++, xs += ROWS, xe += ROWS) {
        vi acc[ROWS][2];
        for (int r = 0; r < ROWS; r++) acc[r][0] = acc[r][1] = vi_set1(int32_t(float_to_bits(xe[r])));
        const int64_t left = (a.w.k - s * a.w.span) / 4, steps = left < a.w.span / 4 ? left : a.w.span / 4;
        byte_products<ROWS, true>(
            w, x, steps, [&](int64_t i) RADIX_KEPT { __builtin_prefetch(next + i * stride, 0, 2); },
            [&](int r) RADIX_KEPT {
                if (s + 1 == q.spans) prefetch_outputs(a, t * q.rows + r, panel);
            },
            acc);
        w += steps * 128, x += steps * ROWS, next += steps * stride;
        for (int h = 0; h < 2; h++) {
            const vf scale = load(a.w.scale + (panel * q.spans + s) * PANEL + h * 16);
            for (int r = 0; r < ROWS; r++)
                out[r][h] = fma(mul(to_float(acc[r][h]), scale), set1(xs[r]), out[r][h]);
        }
    }
    for (int r = 0; r < ROWS; r++) finish(a, t * q.rows + r, panel, out[r][0], out[r][1]);
}

using WideTile = void (*)(const LinearArgs&, const Quantised&, int64_t, int64_t, const int8_t*, const char*,
                          int64_t);
template <int... R>
static void wide_tiles(const LinearArgs& a, const Quantised& q, int64_t t0, int64_t t1, int64_t panel,
                       int8_t* bytes, std::integer_sequence<int, R...>) {
    static constexpr WideTile tiles[] = {tile_wide<R + 1>...};
    widen_panel(a.w, panel, bytes);
    const int64_t stride = 64 / (t1 - t0);  // of the next panel's nibbles
    const char* next = (const char*)a.w.data + (panel + 1) * a.w.k * (PANEL / 2);
    for (int64_t t = t0; t < t1; t++, next += q.steps * stride)
        tiles[q.size(t) - 1](a, q, t, panel, bytes, next, stride);
}
#endif

using Int8Tile = void (*)(const LinearArgs&, const Quantised&, int64_t, int64_t, const PanelAhead&);
// Tiles of 1, 2, ... rows. constexpr: no code of this instruction set may run before it is chosen.
template <int PLANES, int... R>
static constexpr std::array<Int8Tile, sizeof...(R)> make_bytes(std::integer_sequence<int, R...>) {
    return {tile_bytes<R + 1, PLANES>...};
}
template <bool FP4, int... R>
static constexpr std::array<Int8Tile, sizeof...(R)> make_grids(std::integer_sequence<int, R...>) {
    return {tile_grids<R + 1, FP4>...};
}
template <int... R>
static constexpr std::array<Int8Tile, sizeof...(R)> make_multiples(std::integer_sequence<int, R...>) {
    return {tile_multiples<R + 1>...};
}
static constexpr auto W8A8 = make_bytes<1>(std::make_integer_sequence<int, INT8_ROWS>{});
static constexpr auto W8A16 = make_bytes<2>(std::make_integer_sequence<int, INT8_ROWS / 2>{});
static constexpr auto GRIDS = make_grids<false>(std::make_integer_sequence<int, INT4_ROWS>{});
static constexpr auto FLOATS = make_grids<true>(std::make_integer_sequence<int, INT4_ROWS>{});
static constexpr auto MULTIPLES = make_multiples(std::make_integer_sequence<int, INT4_ROWS>{});

void linear_int8(const LinearArgs& a, const Ctx& ctx) {
    if (a.m <= 0) return;
    const Int8Tile* tiles = a.w.format == W_W8A8    ? W8A8.data()
                            : a.w.format == W_W8A16 ? W8A16.data()
                            : a.w.multiple          ? MULTIPLES.data()
                            : a.w.fp4               ? FLOATS.data()
                                                    : GRIDS.data();
    const Quantised q(a, ctx.packing());
    ctx.each_packed(a.m, 1, [&](int64_t r0, int64_t r1) {
        for (int64_t r = r0; r < r1; r++) quantise_row(a, q, r);
    });
    const int64_t panels = panels_of(a.w);
    // Rows in equal blocks whose quantised x stays in second-level cache while panels pass by.
    const int64_t tile_bytes = q.rows * q.planes * q.steps * 4, most = int64_t(384) << 10;
    const int64_t least = q.count * tile_bytes < most ? 1 : (q.count * tile_bytes + most - 1) / most;
    const int64_t per_block = (q.count + least - 1) / least;
    const int64_t blocks = (q.count + per_block - 1) / per_block;  // none of them empty
    const int64_t each = q.count > 1 ? 1 : 4, chunks = (panels + each - 1) / each;
    const int64_t panel_steps = a.w.format == W_W4A8 ? a.w.k / 8 : q.steps;
    ctx.each(blocks * chunks, 1, [&](int64_t i0, int64_t i1) {
        for (int64_t i = i0; i < i1; i++) {
            const int64_t t0 = i / chunks * per_block,
                          t1 = t0 + per_block < q.count ? t0 + per_block : q.count;
            const int64_t p0 = i % chunks * each, p1 = p0 + each < panels ? p0 + each : panels;
            for (int64_t p = p0; p < p1; p++) {
#if RADIX_UNSIGNED_BY_SIGNED
                if (q.widens) {
                    wide_tiles(a, q, t0, t1, p, (int8_t*)ctx.local(),
                               std::make_integer_sequence<int, INT4_ROWS>{});
                    continue;
                }
#endif
                for (int64_t t = t0; t < t1; t++)
                    tiles[q.size(t) - 1](a, q, t, p, PanelAhead(panel_steps, t - t0, t1 - t0));
            }
        }
    });
    ctx.barrier();
}

size_t linear_int8_shared(const LinearArgs& a) { return Quantised::bytes(a); }
size_t linear_int8_local(const LinearArgs& a) { return WIDENS && a.w.multiple ? size_t(a.w.k) * PANEL : 0; }

// Products in registers, as many at a time as hide their latency. Returns the operations done.
double int8_ceiling(size_t rounds) {
    constexpr int CHAINS = INT8_ROWS > 3 ? 20 : INT8_ROWS > 2 ? 6 : 4, WEIGHTS = INT8_ROWS > 3 ? 4 : 1;
    alignas(64) int8_t bytes[(WEIGHTS + 1) * 64] = {};
    vi acc[CHAINS];
    RADIX_UNROLL(20)
    for (int i = 0; i < CHAINS; i++) acc[i] = vi_set1(i);
    for (size_t r = 0; r < rounds; r++) {
        asm volatile("" : "+m"(bytes));  // different each time, for all that the compiler knows
        vi w[WEIGHTS];
        for (int i = 0; i < WEIGHTS; i++) w[i] = vi_load(bytes + i * 64);
        const vi x = vi_load(bytes + WEIGHTS * 64);
        RADIX_UNROLL(20)
        for (int i = 0; i < CHAINS; i++) acc[i] = dot_xw(acc[i], x, w[i % WEIGHTS]);
    }
    vf total = zero();
    RADIX_UNROLL(20)
    for (int i = 0; i < CHAINS; i++) total = add(total, to_float(acc[i]));
    volatile float sink = lane_tree_sum(total);
    (void)sink;
    return double(rounds) * CHAINS * 128;
}

}  // namespace RADIX_ISA
}  // namespace radix

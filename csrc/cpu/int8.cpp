// W8A8, W8A16 and W4A8: activations are quantised per row (W4A8: per row and span), products are summed
// as integers. W8A16 splits activations of 16 bits into two bytes with separate products: 256 * high +
// low. Integer sums are exact, so only the short float chain over spans has an order, and it is ascending:
// batch invariant bit for bit.
#include "int8.h"

#include "byte_vectors.h"
#include "epilogue.h"
#include "rows.h"
#include "weights.h"

namespace radix {
namespace RADIX_ISA {

constexpr float MAX_INT16_PAIR = 127 * 256;  // 127 in the high byte, 0 in the low one

// Quantised rows of one call. Dwords hold four k: W8A8 [tile][k/4][row]; W8A16 [tile][k/4][row][high, low];
// W4A8 [tile][k/8][2][row], even k of eight first, as a packed dword's low and high nibbles are.
struct Quantised {
    int64_t steps, spans, groups, rows, count, m, planes;  // planes: bytes of an activation
    int32_t* x;
    float *scale, *extra;  // [tile][span][row]; extra (W4A8) [tile][group][row]: see group_extra
    Quantised(const LinearArgs& a, char* base) : m(a.m) {
        const bool four = a.w.format == W_W4A8;
        planes = a.w.format == W_W8A16 ? 2 : 1;
        const int64_t max_rows = four ? INT4_ROWS : INT8_ROWS / planes;
        steps = four ? a.w.k / 4 : (a.w.k + 3) / 4;
        spans = four ? spans_of(a.w) : 1;
        groups = four ? a.w.k / a.w.group : 1;
        count = (m + max_rows - 1) / max_rows;
        rows = (m + count - 1) / count;
        count = (m + rows - 1) / rows;
        x = (int32_t*)base;
        scale = (float*)(base + (size_t(count * rows * planes * steps) * 4 + 63) / 64 * 64);
        extra = scale + count * rows * spans;
    }
    static size_t bytes(const LinearArgs& a) {
        const int64_t rows = a.m + 12;
        const int64_t groups = a.w.group ? a.w.k / a.w.group : 1, planes = a.w.format == W_W8A16 ? 2 : 1;
        return size_t(rows * ((a.w.k + 3) / 4 * 4 * planes + groups * 8)) + 128;
    }
    int64_t size(int64_t t) const { return t + 1 < count ? rows : m - t * rows; }
    int32_t* tile(int64_t t) const { return x + t * rows * planes * steps; }
};

static float largest(const float* x, int64_t n) {
    vf top = zero();
    for (int64_t i = 0; i < n; i += 16) top = vmax(top, vabs(load_n(x + i, lanes_at(i, n))));
    return lane_max(top);
}

// Quantises x[k0, k1) of a span whose largest magnitude is `top`; put(k, bytes, n) takes up to sixteen
// at a time. Returns the sum of the quantised values.
template <class Put>
RADIX_INLINE float quantise_part(const float* x, int64_t k0, int64_t k1, float top, Put put) {
    const float inverse = top > 0 ? 127.0f / top : 0.0f;
    vf total = zero();
    for (int64_t k = k0; k < k1; k += 16) {
        const int n = lanes_at(k, k1);
        alignas(16) int8_t b[16];
        vf steps = vround(mul(load_n(x + k, n), set1(inverse)));
        store_i8(b, steps);
        total = add(total, steps);  // whole numbers below 2^24: exact
        put(k, b, n);
    }
    return lane_tree_sum(total);
}

// Quantises x[0, k) to 16 bits: put(k, high, low, n) takes bytes of up to sixteen at a time.
template <class Put>
RADIX_INLINE void quantise_twice(const float* x, int64_t k0, int64_t k1, float top, Put put) {
    const float inverse = top > 0 ? MAX_INT16_PAIR / top : 0.0f;
    for (int64_t k = k0; k < k1; k += 16) {
        const int n = lanes_at(k, k1);
        alignas(16) int8_t high[16], low[16];
        const vf steps = vround(mul(load_n(x + k, n), set1(inverse)));
        const vf upper = vround(fma(steps, set1(1.0f / 256), set1(1.0f / 512)));  // low bytes: -128 to 127
        store_i8(high, upper), store_i8(low, fma(upper, set1(-256.0f), steps));
        put(k, high, low, n);
    }
}
// The sum of both bytes' products.
RADIX_INLINE vf join_planes(vi high, vi low) { return fma(to_float(high), set1(256.0f), to_float(low)); }

// What a group adds to its products, from the sum of its quantised x. Weights with multiples take
// -sum, for what they subtract. Others without zero points are centred on 8, e2m1 on 12: the sums of
// such a group start there, as integers. With zero points it is the float sum of x, for their offsets.
RADIX_INLINE float group_extra(const LinearArgs& a, float scale, float sum) {
    if (a.w.multiple) return -sum;
    return a.w.offset ? scale * sum : bits_to_float(uint32_t(int32_t((a.w.fp4 ? -12.0f : -8.0f) * sum)));
}

// The even ones of eight bytes, then the odd ones, twice.
RADIX_INLINE void even_first(const int8_t* b, int32_t* out) {
#if defined(__AVX2__)
    const __m128i order = _mm_setr_epi8(0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15);
    _mm_store_si128((__m128i*)out, _mm_shuffle_epi8(_mm_load_si128((const __m128i*)b), order));
#else
    int8_t* to = (int8_t*)out;
    for (int i = 0; i < 16; i++) to[i] = b[i / 8 * 8 + i % 4 * 2 + i / 4 % 2];
#endif
}

static void quantise_row(const LinearArgs& a, const Quantised& q, int64_t row) {
    const bool four = a.w.format == W_W4A8;
    const float* x = a.x + (a.rows ? a.rows[row] : row) * a.ldx;
    const int64_t t = row / q.rows, r = row % q.rows, width = q.size(t);
    const int64_t span = four ? a.w.span : a.w.k, group = four ? a.w.group : a.w.k;
    int32_t* out = q.tile(t);
    // sixteen bytes as four dwords; `places` of them from one to the next
    auto put_bytes = [&](int64_t k, const int8_t* b, int n, int64_t place, int64_t places) {
        uint32_t d[4];
        std::memcpy(d, b, 16);
        int32_t* to = out + k / 4 * places + place;
        for (int i = 0; i < (n + 3) / 4; i++, to += places) *to = int32_t(BIASED ? d[i] ^ 0x80808080u : d[i]);
    };
    if (q.planes == 2) {
        const float top = largest(x, a.w.k);
        q.scale[t * q.rows + r] = top / MAX_INT16_PAIR;
        return quantise_twice(x, 0, a.w.k, top, [&](int64_t k, const int8_t* high, const int8_t* low, int n) {
            put_bytes(k, high, n, 2 * r, 2 * width), put_bytes(k, low, n, 2 * r + 1, 2 * width);
        });
    }
    auto put = [&](int64_t k, const int8_t* b, int n) {
        if (!four) return put_bytes(k, b, n, r, width);
        alignas(16) int32_t apart[4];
        even_first(b, apart);
        int32_t* to = out + k / 4 * width + r;
        for (int i = 0; i < n / 4; i++, to += width) *to = apart[i];
    };
    for (int64_t s = 0; s < q.spans; s++) {
        const int64_t k0 = s * span, k1 = k0 + span < a.w.k ? k0 + span : a.w.k;
        const float top = largest(x + k0, k1 - k0), scale = top / 127.0f;
        q.scale[t * q.rows * q.spans + s * width + r] = scale;
        for (int64_t k = k0; k < k1; k += group) {
            const float sum = quantise_part(x, k, k + group, top, put);
            if (four) q.extra[t * q.rows * q.groups + k / group * width + r] = group_extra(a, scale, sum);
        }
    }
}

// What a pass over a panel prefetches at each step of 128 bytes: into second-level cache what it reads 8 KB
// later, or its share of the next panel where several passes read one; into first-level cache 1 KB ahead.
struct PanelAhead {
    int64_t offset = 8192, stride = 128;
    PanelAhead(int64_t steps, int64_t pass, int64_t passes) {
        if (passes > 1) stride = 128 / passes, offset = steps * (128 + pass * stride);
    }
    RADIX_INLINE void prefetch(const void* panel, int64_t step) const {
        const char *far = (const char*)panel + offset + step * stride,
                   *near = (const char*)panel + step * 128;
        __builtin_prefetch(far, 0, 2), __builtin_prefetch(far + stride / 2, 0, 2);
        __builtin_prefetch(near + 1024), __builtin_prefetch(near + 1088);
    }
};

template <int ROWS, int NP, int PLANES>
static void tile_bytes(const LinearArgs& a, const Quantised& q, int64_t t, int64_t panel,
                       const PanelAhead& ahead) {
    const int8_t* w = (const int8_t*)a.w.data + panel * q.steps * 128;
    const int32_t* x = q.tile(t);
    const int64_t next = q.steps * 128;
    vi acc[ROWS * PLANES][2 * NP];
    for (int r = 0; r < ROWS * PLANES; r++)
        for (int c = 0; c < 2 * NP; c++) acc[r][c] = vi_zero();
    for (int64_t s = 0; s < q.steps; s++) {
        vi b[2 * NP];
        for (int p = 0; p < NP; p++) {
            const int8_t* from = w + p * next + s * 128;
            b[2 * p] = vi_load(from), b[2 * p + 1] = vi_load(from + 64);
            ahead.prefetch(w + p * next, s);
        }
        RADIX_UNROLL(12)
        for (int r = 0; r < ROWS * PLANES; r++) {
            vi xv = vi_set1(x[s * ROWS * PLANES + r]);
            for (int c = 0; c < 2 * NP; c++) acc[r][c] = dot_xw(acc[r][c], xv, b[c]);
        }
    }
    for (int r = 0; r < ROWS; r++)
        for (int p = 0; p < NP; p++) {
            vf out[2];
            for (int h = 0; h < 2; h++) {
                int64_t lane = (panel + p) * PANEL + h * 16;
                auto sum = [&](int row) {
                    return BIASED ? vi_sub(acc[row][2 * p + h], vi_load(a.w.column_sum + lane))
                                  : acc[row][2 * p + h];
                };
                const vf whole = PLANES == 2 ? join_planes(sum(2 * r), sum(2 * r + 1)) : to_float(sum(r));
                out[h] = mul(mul(whole, load(a.w.scale + lane)), set1(q.scale[t * q.rows + r]));
            }
            finish(a, t * q.rows + r, panel + p, out[0], out[1]);
        }
}

// acc += x * w of steps [s0, s1), eight k each.
template <int ROWS, int NP, bool FP4 = false>
RADIX_INLINE void nibble_products(const uint32_t* w, int64_t k8, const int32_t* x, int64_t s0, int64_t s1,
                                  const PanelAhead& ahead, vi (&acc)[ROWS][2 * NP]) {
    for (int64_t s = s0; s < s1; s++) {
        vi even[2 * NP], odd[2 * NP];
        for (int c = 0; c < 2 * NP; c++) {
            split_nibbles(vi_load(w + (c / 2 * k8 + s) * PANEL + c % 2 * 16), even[c], odd[c]);
            if (FP4) even[c] = look_up(even[c], RAISED_FP4), odd[c] = look_up(odd[c], RAISED_FP4);
        }
        for (int p = 0; p < NP; p++) ahead.prefetch(w + p * k8 * PANEL, s);
        RADIX_UNROLL(12)
        for (int r = 0; r < ROWS; r++) {
            vi x0 = vi_set1(x[2 * s * ROWS + r]), x1 = vi_set1(x[(2 * s + 1) * ROWS + r]);
            for (int c = 0; c < 2 * NP; c++) acc[r][c] = dot_wx(dot_wx(acc[r][c], even[c], x0), odd[c], x1);
        }
    }
}

// Scales and offsets of any value: those of a group are those of its span.
template <int ROWS, int NP, bool FP4>
static void tile_grids(const LinearArgs& a, const Quantised& q, int64_t t, int64_t panel,
                       const PanelAhead& ahead) {
    const int64_t k8 = a.w.k / 8, per = a.w.group / 8;
    const uint32_t* w = (const uint32_t*)a.w.data + panel * k8 * PANEL;
    const int32_t* x = q.tile(t);
    vf out[ROWS][2 * NP];
    for (int r = 0; r < ROWS; r++)
        for (int c = 0; c < 2 * NP; c++) out[r][c] = zero();
    for (int64_t g = 0; g < q.groups; g++) {
        const float *xs = q.scale + t * q.rows * q.groups + g * ROWS,
                    *xe = q.extra + t * q.rows * q.groups + g * ROWS;
        vi acc[ROWS][2 * NP];
        for (int r = 0; r < ROWS; r++) {
            const vi start = a.w.offset ? vi_zero() : vi_set1(int32_t(float_to_bits(xe[r])));
            for (int c = 0; c < 2 * NP; c++) acc[r][c] = start;
        }
        nibble_products<ROWS, NP, FP4>(w, k8, x, g * per, (g + 1) * per, ahead, acc);
        for (int c = 0; c < 2 * NP; c++) {
            const int64_t at = ((panel + c / 2) * q.groups + g) * PANEL + c % 2 * 16;
            const vf scale = load(a.w.scale + at);
            for (int r = 0; r < ROWS; r++)
                out[r][c] = fma(mul(to_float(acc[r][c]), scale), set1(xs[r]), out[r][c]);
            if (!a.w.offset) continue;
            const vf offset = load(a.w.offset + at);
            for (int r = 0; r < ROWS; r++) out[r][c] = fma(offset, set1(xe[r]), out[r][c]);
        }
    }
    for (int r = 0; r < ROWS; r++)
        for (int p = 0; p < NP; p++) finish(a, t * q.rows + r, panel + p, out[r][2 * p], out[r][2 * p + 1]);
}

// Scales that are multiples of their span's: whole numbers are summed over a span, in floats that hold
// them exactly, so tiles that sum them as integers give the same bits.
template <int ROWS, int NP>
static void tile_multiples(const LinearArgs& a, const Quantised& q, int64_t t, int64_t panel,
                           const PanelAhead& ahead) {
    const int64_t k8 = a.w.k / 8, per = a.w.group / 8, per_span = a.w.span / a.w.group;
    const uint32_t* w = (const uint32_t*)a.w.data + panel * k8 * PANEL;
    const int32_t* x = q.tile(t);
    const float *xs = q.scale + t * q.rows * q.spans, *xe = q.extra + t * q.rows * q.groups;
    vf out[ROWS][2 * NP];
    for (int r = 0; r < ROWS; r++)
        for (int c = 0; c < 2 * NP; c++) out[r][c] = zero();
    for (int64_t s = 0; s < q.spans; s++, xs += ROWS) {
        vf whole[ROWS][2 * NP];
        for (int r = 0; r < ROWS; r++)
            for (int c = 0; c < 2 * NP; c++) whole[r][c] = zero();
        const int64_t g1 = (s + 1) * per_span < q.groups ? (s + 1) * per_span : q.groups;
        for (int64_t g = s * per_span; g < g1; g++) {
            vi acc[ROWS][2 * NP];
            for (int r = 0; r < ROWS; r++)
                for (int c = 0; c < 2 * NP; c++) acc[r][c] = vi_zero();
            nibble_products<ROWS, NP>(w, k8, x, g * per, (g + 1) * per, ahead, acc);
            for (int c = 0; c < 2 * NP; c++) {
                const int8_t* m = a.w.multiple + ((panel + c / 2) * q.groups + g) * 2 * PANEL + c % 2 * 16;
                const vf times = load_i8(m), less = load_i8(m + PANEL);
                for (int r = 0; r < ROWS; r++)
                    whole[r][c] =
                        fma(less, set1(xe[g * ROWS + r]), fma(to_float(acc[r][c]), times, whole[r][c]));
            }
        }
        for (int c = 0; c < 2 * NP; c++) {
            const vf scale = load(a.w.scale + ((panel + c / 2) * q.spans + s) * PANEL + c % 2 * 16);
            for (int r = 0; r < ROWS; r++) out[r][c] = fma(mul(whole[r][c], scale), set1(xs[r]), out[r][c]);
        }
    }
    for (int r = 0; r < ROWS; r++)
        for (int p = 0; p < NP; p++) finish(a, t * q.rows + r, panel + p, out[r][2 * p], out[r][2 * p + 1]);
}

using Int8Tile = void (*)(const LinearArgs&, const Quantised&, int64_t, int64_t, const PanelAhead&);
constexpr int width8(int rows) { return WIDE8 == 1 ? 1 : rows <= 2 ? 4 : rows <= 5 ? 2 : 1; }
constexpr int width4(int rows) { return WIDE4 == 1 ? 1 : rows <= 2 ? 2 : 1; }

struct Int8Tiles {  // constexpr: no code of this instruction set may run before it is chosen
    Int8Tile one[13], many[13];
    int width[13];
};
template <int PLANES, int... R>
static constexpr Int8Tiles make_bytes(std::integer_sequence<int, R...>) {
    Int8Tiles t{};
    constexpr auto width = [](int rows) { return width8(rows * PLANES); };
    ((t.one[R + 1] = tile_bytes<R + 1, 1, PLANES>, t.many[R + 1] = tile_bytes<R + 1, width(R + 1), PLANES>,
      t.width[R + 1] = width(R + 1)),
     ...);
    return t;
}
template <bool FP4, int... R>
static constexpr Int8Tiles make_grids(std::integer_sequence<int, R...>) {
    Int8Tiles t{};
    ((t.one[R + 1] = tile_grids<R + 1, 1, FP4>, t.many[R + 1] = tile_grids<R + 1, width4(R + 1), FP4>,
      t.width[R + 1] = width4(R + 1)),
     ...);
    return t;
}
template <int... R>
static constexpr Int8Tiles make_multiples(std::integer_sequence<int, R...>) {
    Int8Tiles t{};
    ((t.one[R + 1] = tile_multiples<R + 1, 1>, t.many[R + 1] = tile_multiples<R + 1, width4(R + 1)>,
      t.width[R + 1] = width4(R + 1)),
     ...);
    return t;
}
static constexpr Int8Tiles W8A8 = make_bytes<1>(std::make_integer_sequence<int, INT8_ROWS>{});
static constexpr Int8Tiles W8A16 = make_bytes<2>(std::make_integer_sequence<int, INT8_ROWS / 2>{});
static constexpr Int8Tiles GRIDS = make_grids<false>(std::make_integer_sequence<int, INT4_ROWS>{});
static constexpr Int8Tiles FLOATS = make_grids<true>(std::make_integer_sequence<int, INT4_ROWS>{});
static constexpr Int8Tiles MULTIPLES = make_multiples(std::make_integer_sequence<int, INT4_ROWS>{});

void linear_int8(const LinearArgs& a, const Ctx& ctx) {
    if (a.m <= 0) return;
    const Int8Tiles& table = a.w.format == W_W8A8    ? W8A8
                             : a.w.format == W_W8A16 ? W8A16
                             : a.w.multiple          ? MULTIPLES
                             : a.w.fp4               ? FLOATS
                                                     : GRIDS;
    const Quantised q(a, ctx.shared());
    ctx.each(a.m, 1, [&](int64_t r0, int64_t r1) {
        for (int64_t r = r0; r < r1; r++) quantise_row(a, q, r);
    });
    ctx.barrier();
    const int64_t panels = panels_of(a.w);
    const int width = table.width[q.rows];
    // Rows in blocks whose quantised x stays in second-level cache while panels pass by.
    int64_t per_block = (int64_t(384) << 10) / (q.rows * q.planes * q.steps * 4);
    per_block = per_block < 1 ? 1 : per_block;
    const int64_t blocks = (q.count + per_block - 1) / per_block;
    const int64_t chunks = (panels + 3) / 4;
    const int64_t panel_steps = a.w.format == W_W4A8 ? a.w.k / 8 : q.steps;
    ctx.each(blocks * chunks, 1, [&](int64_t i0, int64_t i1) {
        for (int64_t i = i0; i < i1; i++) {
            int64_t t0 = i / chunks * per_block, t1 = t0 + per_block < q.count ? t0 + per_block : q.count;
            int64_t p = i % chunks * 4, p1 = p + 4 < panels ? p + 4 : panels;
            for (; p < p1;) {
                bool wide = p + width <= p1;
                for (int64_t t = t0; t < t1; t++) {
                    int64_t rows = q.size(t);
                    const PanelAhead ahead(panel_steps, t - t0, t1 - t0);
                    if (wide && table.width[rows] == width)
                        table.many[rows](a, q, t, p, ahead);
                    else
                        for (int64_t j = p; j < (wide ? p + width : p + 1); j++)
                            table.one[rows](a, q, t, j, ahead);
                }
                p += wide ? width : 1;
            }
        }
    });
    ctx.barrier();
}

size_t linear_int8_shared(const LinearArgs& a) { return Quantised::bytes(a); }

// Products in registers, as many at a time as hide their latency. Returns the operations done.
double int8_ceiling(size_t rounds) {
    constexpr int CHAINS = WIDE8 > 1 ? 20 : 4, WEIGHTS = 4;
    alignas(64) int8_t bytes[(WEIGHTS + 1) * 64] = {};
    vi acc[CHAINS];
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
    for (int i = 0; i < CHAINS; i++) total = add(total, to_float(acc[i]));
    volatile float sink = lane_tree_sum(total);
    (void)sink;
    return double(rounds) * CHAINS * 128;
}

}  // namespace RADIX_ISA
}  // namespace radix

// Row-major weights into the panels that the kernels stream. Rows may come from several sources.
// Blocks of sixteen rows and sixteen dwords of each are transposed, so that writes are contiguous.
#include <algorithm>

#include "../common/api.h"
#include "../common/simd.h"
#include "../common/transpose.h"

namespace radix {
namespace RADIX_ISA {

struct Place {
    int64_t panel, lane;
};
// Paired weights put gate row i and up row i into lanes i and 16 + i of the same panel.
static Place place_of(const Weight& w, int64_t row) {
    if (!w.paired) return {row / PANEL, row % PANEL};
    int64_t half = w.n / 2, up = row >= half, i = row - up * half;
    return {i / 16, i % 16 + 16 * up};
}

struct Range {
    float low, high;
    float largest() const { return high > -low ? high : -low; }
};
static Range range_of(const PackArgs& a, int64_t r, int64_t k0, int64_t k1) {
    vf low = zero(), high = zero();
    int64_t k = k0;
    for (; k + 16 <= k1; k += 16) {
        const vf v = load_any(a.src, a.src_dtype, r * a.ld + k);
        low = vmin(low, v), high = vmax(high, v);
    }
    Range found{-lane_max(sub(zero(), low)), lane_max(high)};
    for (; k < k1; k++) {
        const float v = load_scalar(a.src, a.src_dtype, r * a.ld + k);
        found.low = v < found.low ? v : found.low, found.high = v > found.high ? v : found.high;
    }
    return found;
}

// Sixteen values; those past `n` are zero and not read.
static vf values_of(const PackArgs& a, int64_t from, int64_t n) {
    if (n >= 16)
        return a.src_dtype == DT_I8 ? load_i8((const int8_t*)a.src + from)
                                    : load_any(a.src, a.src_dtype, from);
    float t[16] = {0};
    for (int64_t i = 0; i < n; i++) t[i] = load_scalar(a.src, a.src_dtype, from + i);
    return load(t);
}

// Sixteen values times `inverse`, rounded, plus `shift`, within [low, high].
static void quantise_16(vf v, float inverse, float shift, float low, float high, int8_t* out) {
    store_i8(out, vmin(vmax(add(vround(mul(v, set1(inverse))), set1(shift)), set1(low)), set1(high)));
}

// The place of a row in a quantised panel: its lane, and its index in arrays of [panel][n][32].
static int64_t lane_of(Place at) { return at.panel * PANEL + at.lane; }
static int64_t lane_of(Place at, int64_t n, int64_t i) { return (at.panel * n + i) * PANEL + at.lane; }

// The scale of a row: floats become whole numbers up to 127. int8 sources keep their values (scale set
// apart).
static void scale_int8(const PackArgs& a, int64_t r, Place at) {
    if (a.src_dtype != DT_I8) ((float*)a.w.scale)[lane_of(at)] = range_of(a, r, 0, a.w.k).largest() / 127.0f;
    if (a.w.column_sum) ((int32_t*)a.w.column_sum)[lane_of(at)] = 0;
}

// The value of largest magnitude with its sign (the first of two): it maps to -8 exactly.
static float group_peak(const PackArgs& a, int64_t r, int64_t k0, int64_t k1) {
    const Range range = range_of(a, r, k0, k1);
    if (range.high != -range.low) return range.high > -range.low ? range.high : range.low;
    for (int64_t k = k0; k < k1; k++) {
        const float v = load_scalar(a.src, a.src_dtype, r * a.ld + k);
        if (v != 0 && std::fabs(v) == range.high) return v;
    }
    return 0;
}

// int4 from floats: symmetric groups, q in 0..15 around 8.
static void scale_int4(const PackArgs& a, int64_t r, Place at) {
    const int64_t groups = a.w.k / a.w.group;
    for (int64_t g = 0; g < groups; g++) {
        const float scale = group_peak(a, r, g * a.w.group, (g + 1) * a.w.group) / -8.0f;
        ((float*)a.w.scale)[lane_of(at, groups, g)] = scale;
        if (a.w.offset) ((float*)a.w.offset)[lane_of(at, groups, g)] = -8.0f * scale;
    }
}

// What is lost by values of -`centre`..15 - `centre` times a step.
struct Rounding {
    vf step, inverse, low, high, lost = zero();
    Rounding(float s, float centre)
        : step(set1(s)), inverse(set1(1.0f / s)), low(set1(-centre)), high(set1(15.0f - centre)) {}
    void add_16(vf v) {
        const vf d = sub(v, mul(vmin(vmax(vround(mul(v, inverse)), low), high), step));
        lost = fma(d, d, lost);
    }
};

// Rounded up the peak fits; one less is finer for all others. The better one is taken.
static int multiple_of(const PackArgs& a, int64_t from, float peak, float unit, int centre) {
    if (unit <= 0) return 1;
    const int limit = std::clamp(int(std::ceil(std::fabs(peak) / unit - 1e-4f)), 1, MAX_MULTIPLE);
    if (limit == 1) return 1;
    Rounding up(unit * float(limit), float(centre)), down(unit * float(limit - 1), float(centre));
    for (int64_t k = 0; k < a.w.group; k += 16) {
        const vf v = load_any(a.src, a.src_dtype, from + k);
        up.add_16(v), down.add_16(v);
    }
    return lane_tree_sum(down.lost) < lane_tree_sum(up.lost) ? limit - 1 : limit;
}

// w4a8 from floats: a group's scale is a whole multiple of its span's. Values are centred on 8, or on
// 7 if the largest magnitude is positive, so that it can be represented.
static void scale_multiples(const PackArgs& a, int64_t r, Place at) {
    for (int64_t s = 0, k0 = 0; k0 < a.w.k; s++, k0 += a.w.span) {
        const int64_t n = (a.w.k - k0 < a.w.span ? a.w.k - k0 : a.w.span) / a.w.group;
        float peak[MAX_SPAN / 32], top = 0;
        for (int64_t g = 0; g < n; g++) {
            peak[g] = group_peak(a, r, k0 + g * a.w.group, k0 + (g + 1) * a.w.group) / 8.0f;
            top = std::max(top, std::fabs(peak[g]));
        }
        const float unit = top / float(MAX_MULTIPLE);
        ((float*)a.w.scale)[lane_of(at, spans_of(a.w), s)] = unit;
        for (int64_t g = 0; g < n; g++) {
            const int64_t from = k0 + g * a.w.group;
            const int centre = peak[g] > 0 ? 7 : 8,
                      multiple = multiple_of(a, r * a.ld + from, peak[g], unit, centre);
            int8_t* m = (int8_t*)a.w.multiple + lane_of(at, 2 * (a.w.k / a.w.group), 2 * (from / a.w.group));
            m[0] = int8_t(multiple), m[PANEL] = int8_t(centre * multiple);
        }
    }
}

// How the group at input k is rounded: q = round(v / step) + centre.
struct Grid {
    float step, centre;
};
static Grid grid_of(const PackArgs& a, Place at, int64_t k) {
    const int64_t groups = a.w.k / a.w.group, g = k / a.w.group;
    if (!a.w.multiple) return {a.w.scale[lane_of(at, groups, g)], 8};
    const int8_t* m = a.w.multiple + lane_of(at, 2 * groups, 2 * g);
    return {a.w.scale[lane_of(at, spans_of(a.w), k / a.w.span)] * float(m[0]), float(m[PANEL] / m[0])};
}

// Eight values 0..15 as the nibbles of a dword, the first one lowest.
static uint32_t nibbles_of(const int8_t* q) {
    uint64_t u;
    std::memcpy(&u, q, 8);
    u &= 0x0f0f0f0f0f0f0f0full;
    u = (u | u >> 4) & 0x00ff00ff00ff00ffull;
    u = (u | u >> 8) & 0x0000ffff0000ffffull;
    return uint32_t(u | u >> 16);
}

// A row as the dwords of its panel: `values` inputs in each.
static int values_a_dword(const Weight& w) {
    switch (w.format) {
        case W_F32:
        case W_BF16:
        case W_F16:
        case W_INT8: return 1;
        case W_BF16_PAIRS: return 2;
        case W_W8A8:
        case W_W8A16: return 4;
        default: return 8;
    }
}

// Dwords j to j + 16 of a row; zero past its inputs.
static void encode_floats(const PackArgs& a, int64_t r, int64_t j, uint32_t* out) {
    const int values = values_a_dword(a.w);
    if (values == 2 && a.src_dtype == DT_BF16) {
        const int64_t n = std::min<int64_t>(a.w.k - j * 2, 32);
        std::memcpy(out, (const uint16_t*)a.src + r * a.ld + j * 2, size_t(n) * 2);
        return;
    }
    for (int64_t part = 0; part < values; part++) {
        const int64_t k = j * values + part * 16;
        const vf v = values_of(a, r * a.ld + k, std::max<int64_t>(a.w.k - k, 0));
        uint16_t half[16];
        if (a.w.format == W_F32) {
            float line[16];
            store(line, v);
            std::memcpy(out, line, 64);
            continue;
        }
        if (a.w.format == W_F16)
            store_f16(half, v);
        else
            store_bf16(half, v);
        if (values == 2)
            std::memcpy(out + part * 8, half, 32);
        else
            for (int i = 0; i < 16; i++) out[i] = half[i];
    }
}

static void encode_int8(const PackArgs& a, int64_t r, Place at, int64_t j, uint32_t* out) {
    const int values = values_a_dword(a.w);
    const float scale = a.src_dtype == DT_I8 ? 1.0f : a.w.scale[lane_of(at)];
    const vf inverse = set1(scale > 0 ? 1.0f / scale : 0.0f), limit = set1(127),
             low = set1(a.src_dtype == DT_I8 ? -128 : -127);
    vf sum = zero();
    for (int64_t part = 0; part < values; part++) {
        const int64_t k = j * values + part * 16;
        const vf v = values_of(a, r * a.ld + k, std::max<int64_t>(a.w.k - k, 0));
        const vf rounded = vmin(vmax(vround(mul(v, inverse)), low), limit);
        sum = add(sum, rounded);
        int8_t q[16];
        store_i8(q, rounded);
        if (values == 4)
            std::memcpy(out + part * 4, q, 16);
        else
            for (int i = 0; i < 16; i++) out[i] = uint8_t(q[i]);
    }
    if (a.w.column_sum) ((int32_t*)a.w.column_sum)[lane_of(at)] += 128 * int32_t(lane_tree_sum(sum));
}

// Values 0..15 of a quantised checkpoint are kept; the caller fills in their scales.
static void encode_given_int4(const PackArgs& a, int64_t r, int64_t j, uint32_t* out) {
    for (int64_t i = 0; i < 16 && (j + i) * 8 < a.w.k; i++)
        out[i] = nibbles_of((const int8_t*)a.src + r * a.ld + (j + i) * 8);
}
static void encode_int4(const PackArgs& a, int64_t r, Place at, int64_t j, uint32_t* out) {
    const int64_t end = std::min((j + 16) * 8, a.w.k);
    for (int64_t k = j * 8; k < end;) {
        const Grid grid = grid_of(a, at, k);
        const float inverse = grid.step != 0 ? 1.0f / grid.step : 0.0f;
        for (const int64_t stop = std::min(end, k + a.w.group - k % a.w.group); k < stop; k += 16, out += 2) {
            alignas(16) int8_t q[16];
            quantise_16(load_any(a.src, a.src_dtype, r * a.ld + k), inverse, grid.centre, 0, 15, q);
            out[0] = nibbles_of(q), out[1] = nibbles_of(q + 8);
        }
    }
}

static void encode(const PackArgs& a, int64_t r, Place at, int64_t j, uint32_t* out) {
    if (a.w.format <= W_F16 || a.w.format == W_BF16_PAIRS)
        encode_floats(a, r, j, out);
    else if (values_a_dword(a.w) < 8)
        encode_int8(a, r, at, j, out);
    else if (a.src_dtype == DT_I8)
        encode_given_int4(a, r, j, out);
    else
        encode_int4(a, r, at, j, out);
}
static void choose_scales(const PackArgs& a, int64_t r, Place at) {
    if (a.w.format <= W_F16 || a.w.format == W_BF16_PAIRS) return;
    if (values_a_dword(a.w) < 8)
        scale_int8(a, r, at);
    else if (a.src_dtype == DT_I8)
        return;
    else if (a.w.multiple)
        scale_multiples(a, r, at);
    else
        scale_int4(a, r, at);
}

// A dword of each row into the lanes from `out` on, STEP apart.
template <class T, int STEP>
static void put(vf column, int64_t rows, T* out) {
    float line[16];
    uint32_t bits[16];
    store(line, column);
    if (rows == 16 && sizeof(T) == 4) {
        std::memcpy(out, line, 64);
        return;
    }
    std::memcpy(bits, line, 64);
    for (int64_t n = 0; n < rows; n++) out[n * STEP] = T(bits[n]);
}

// `rows` rows from r on, into the lanes from `out` on.
template <class T, int STEP = 1>
static void pack_strip(const PackArgs& a, int64_t r, int64_t rows, Place at, int64_t dwords, T* out) {
    for (int64_t i = 0; i < rows; i++) choose_scales(a, r + i, {at.panel, at.lane + i});
    for (int64_t j = 0; j < dwords; j += 16) {
        alignas(64) uint32_t bits[16][16] = {};
        float lines[16][16];
        for (int64_t i = 0; i < rows; i++) encode(a, r + i, {at.panel, at.lane + i}, j, bits[i]);
        std::memcpy(lines, bits, sizeof lines);
        vf block[16];
        for (int64_t i = 0; i < 16; i++) block[i] = load(lines[i]);
        transpose_16x16(block);
        for (int64_t i = 0; i < 16 && j + i < dwords; i++)
            put<T, STEP>(block[i], rows, out + (j + i) * PANEL);
    }
}

// The dwords of a panel are [dwords][32]; two or four of them where a value is 16 or 8 bits apart.
static void pack_rows(const PackArgs& a, int64_t r, int64_t rows, Place at) {
    const int64_t values = values_a_dword(a.w), whole = a.w.format == W_BF16_PAIRS ? 32 : values;
    const int64_t dwords = (a.w.k + whole - 1) / whole * whole / values, first = at.panel * dwords * PANEL;
    switch (a.w.format) {
        case W_BF16:
            pack_strip<uint16_t, 2>(
                a, r, rows, at, dwords,
                (uint16_t*)a.w.data + first + (at.lane < 16 ? 2 * at.lane : 2 * at.lane - 31));
            break;
        case W_F16: pack_strip(a, r, rows, at, dwords, (uint16_t*)a.w.data + first + at.lane); break;
        case W_INT8: pack_strip(a, r, rows, at, dwords, (uint8_t*)a.w.data + first + at.lane); break;
        default: pack_strip(a, r, rows, at, dwords, (uint32_t*)a.w.data + first + at.lane);
    }
}

void pack(const PackArgs& a, const Ctx& ctx) {
    ctx.each(a.rows, 32, [&](int64_t r0, int64_t r1) {
        for (int64_t r = r0, rows; r < r1; r += rows) {
            const Place at = place_of(a.w, a.first_row + r);
            rows = std::min(16 - at.lane % 16, r1 - r);
            if (a.w.paired && a.first_row + r < a.w.n / 2) rows = std::min(rows, a.w.n / 2 - a.first_row - r);
            pack_rows(a, r, rows, at);
        }
    });
    ctx.barrier();
}

}  // namespace RADIX_ISA
}  // namespace radix

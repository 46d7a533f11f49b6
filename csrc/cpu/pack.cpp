// Row-major weights into the panels that the kernels stream. Rows may come from several sources.
#include <algorithm>

#include "../common/api.h"
#include "../common/simd.h"

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

// Sixteen values times `inverse`, rounded, plus `shift`, within [low, high]; those past `n` are not read.
static void quantise_16(const PackArgs& a, int64_t from, int n, float inverse, float shift, float low, float high, int8_t* out) {
    float t[16] = {0};
    for (int i = 0; n < 16 && i < n; i++) t[i] = load_scalar(a.src, a.src_dtype, from + i);
    const vf v = n < 16 ? load(t) : load_any(a.src, a.src_dtype, from);
    store_i8(out, vmin(vmax(add(vround(mul(v, set1(inverse))), set1(shift)), set1(low)), set1(high)));
}

static void pack_float(const PackArgs& a, int64_t r, Place at) {
    const int64_t base = at.panel * a.w.k * PANEL;
    const int64_t pair = at.lane < 16 ? 2 * at.lane : 2 * at.lane - 31;
    for (int64_t k = 0; k < a.w.k; k++) {
        float v = load_scalar(a.src, a.src_dtype, r * a.ld + k);
        int64_t i = base + k * PANEL;
        switch (a.w.format) {
            case W_F32: ((float*)a.w.data)[i + at.lane] = v; break;
            case W_BF16: ((uint16_t*)a.w.data)[i + pair] = float_to_bf16(v); break;
            default: ((uint16_t*)a.w.data)[i + at.lane] = float_to_f16(v);
        }
    }
}

// Pairs of k side by side, panels padded to 32 k: what tiles multiply.
static int64_t tile_pairs(const Weight& w) { return (w.k + 31) / 32 * 16; }

static void pack_tiles(const PackArgs& a, int64_t r, Place at) {
    uint16_t* out = (uint16_t*)a.w.data + at.panel * tile_pairs(a.w) * 64 + 2 * at.lane;
    for (int64_t k = 0; k < a.w.k; k++) out[k / 2 * 64 + k % 2] = float_to_bf16(load_scalar(a.src, a.src_dtype, r * a.ld + k));
}

// Sixteen rows of bf16 that land side by side: pairs are moved as they are.
static void pack_tiles_16(const PackArgs& a, int64_t r, Place at) {
    uint32_t* out = (uint32_t*)a.w.data + at.panel * tile_pairs(a.w) * PANEL + at.lane;
    const uint16_t* src = (const uint16_t*)a.src + r * a.ld;
    const int64_t pairs = a.w.k / 2;
    for (int64_t j0 = 0; j0 < pairs; j0 += 16) {
        const int64_t n = j0 + 16 < pairs ? 16 : pairs - j0;
        uint32_t block[16][16];
        for (int64_t i = 0; i < 16; i++) std::memcpy(block[i], src + i * a.ld + 2 * j0, size_t(n) * 4);
        for (int64_t j = 0; j < n; j++)
            for (int64_t i = 0; i < 16; i++) out[(j0 + j) * PANEL + i] = block[i][j];
    }
    if (a.w.k % 2)
        for (int64_t i = 0; i < 16; i++) out[pairs * PANEL + i] = src[i * a.ld + a.w.k - 1];
}
static bool is_side_by_side(const PackArgs& a, int64_t r, int64_t end, Place at) {
    if (a.w.format != W_BF16_TILES || a.src_dtype != DT_BF16 || r + 16 > end || at.lane % 16) return false;
    const Place last = place_of(a.w, a.first_row + r + 15);
    return last.panel == at.panel && last.lane == at.lane + 15;
}

// int8: floats are quantised by the row's maximum; int8 sources keep their values (scale given apart).
static void pack_int8(const PackArgs& a, int64_t r, Place at) {
    const bool given = a.src_dtype == DT_I8;
    const float scale = given ? 1.0f : range_of(a, r, 0, a.w.k).largest() / 127.0f, inverse = scale > 0 ? 1.0f / scale : 0.0f;
    const int64_t lane = at.panel * PANEL + at.lane, k4 = (a.w.k + 3) / 4 * 4;
    if (!given) ((float*)a.w.scale)[lane] = scale;
    int32_t sum = 0;
    for (int64_t k = 0; k < a.w.k; k += 16) {
        const int n = a.w.k - k < 16 ? int(a.w.k - k) : 16;
        alignas(16) int8_t q[16] = {0};
        if (given) std::memcpy(q, (const int8_t*)a.src + r * a.ld + k, size_t(n));
        else quantise_16(a, r * a.ld + k, n, inverse, 0, -127, 127, q);
        for (int i = 0; i < n; i++) sum += q[i];
        if (a.w.format == W_INT8) {
            int8_t* out = (int8_t*)a.w.data + (at.panel * a.w.k + k) * PANEL + at.lane;
            for (int i = 0; i < n; i++) out[i * PANEL] = q[i];
        } else {
            char* out = (char*)a.w.data + at.panel * k4 * PANEL + k / 4 * 128 + at.lane * 4;
            for (int i = 0; i < n; i += 4) std::memcpy(out + i * PANEL, q + i, 4);
        }
    }
    if (a.w.column_sum) ((int32_t*)a.w.column_sum)[lane] = 128 * sum;
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

// Eight values 0..15 as the nibbles of a dword, the first one lowest.
static uint32_t nibbles_of(const int8_t* q) {
    uint32_t u = 0;
    for (int j = 0; j < 8; j++) u |= uint32_t(q[j] & 15) << (4 * j);
    return u;
}

// int4 from floats: symmetric groups, q in 0..15 around 8.
static void pack_int4(const PackArgs& a, int64_t r, Place at) {
    uint32_t* data = (uint32_t*)a.w.data + at.panel * (a.w.k / 8) * PANEL + at.lane;
    for (int64_t g = 0; g < a.w.k / a.w.group; g++) {
        const float scale = group_peak(a, r, g * a.w.group, (g + 1) * a.w.group) / -8.0f, inverse = scale != 0 ? 1.0f / scale : 0.0f;
        const int64_t s = (at.panel * (a.w.k / a.w.group) + g) * PANEL + at.lane;
        ((float*)a.w.scale)[s] = scale;
        if (a.w.offset) ((float*)a.w.offset)[s] = -8.0f * scale;
        for (int64_t k = g * a.w.group; k < (g + 1) * a.w.group; k += 16) {
            alignas(16) int8_t q[16];
            quantise_16(a, r * a.ld + k, 16, inverse, 8, 0, 15, q);
            data[k / 8 * PANEL] = nibbles_of(q), data[(k / 8 + 1) * PANEL] = nibbles_of(q + 8);
        }
    }
}

// Sum of squared errors of values -`centre`..15 - `centre` times `step`.
static float error_of(const PackArgs& a, int64_t from, int64_t n, float step, float centre) {
    const vf inverse = set1(1.0f / step), low = set1(-centre), high = set1(15.0f - centre);
    vf total = zero();
    for (int64_t k = 0; k < n; k += 16) {
        const vf v = load_any(a.src, a.src_dtype, from + k);
        const vf d = sub(v, mul(vmin(vmax(vround(mul(v, inverse)), low), high), set1(step)));
        total = fma(d, d, total);
    }
    return lane_tree_sum(total);
}

// w4a8 from floats: a group's scale is a whole multiple of its span's. Values stand around 8, or around
// 7 where the largest magnitude is positive, so that it has a value of its own.
static void pack_multiples(const PackArgs& a, int64_t r, Place at) {
    uint32_t* data = (uint32_t*)a.w.data + at.panel * (a.w.k / 8) * PANEL + at.lane;
    for (int64_t s = 0, k0 = 0; k0 < a.w.k; s++, k0 += a.w.span) {
        const int64_t n = (a.w.k - k0 < a.w.span ? a.w.k - k0 : a.w.span) / a.w.group;
        float peak[MOST_SPAN / 32], top = 0;
        for (int64_t g = 0; g < n; g++) {
            peak[g] = group_peak(a, r, k0 + g * a.w.group, k0 + (g + 1) * a.w.group) / 8.0f;
            top = std::max(top, std::fabs(peak[g]));
        }
        const float unit = top / float(MOST_MULTIPLE);
        ((float*)a.w.scale)[(at.panel * spans_of(a.w) + s) * PANEL + at.lane] = unit;
        for (int64_t g = 0; g < n; g++) {
            const int64_t from = k0 + g * a.w.group;
            const int centre = peak[g] > 0 ? 7 : 8;
            // Rounded up the peak fits; one less is finer for all others. The better one is taken.
            int multiple = unit > 0 ? std::clamp(int(std::ceil(std::fabs(peak[g]) / unit - 1e-4f)), 1, MOST_MULTIPLE) : 1;
            auto error = [&](int m) { return error_of(a, r * a.ld + from, a.w.group, unit * float(m), float(centre)); };
            if (multiple > 1 && error(multiple - 1) < error(multiple)) multiple--;
            int8_t* m = (int8_t*)a.w.multiple + (at.panel * (a.w.k / a.w.group) + from / a.w.group) * 2 * PANEL + at.lane;
            m[0] = int8_t(multiple), m[PANEL] = int8_t(centre * multiple);
            const float step = unit * float(multiple), inverse = step > 0 ? 1.0f / step : 0.0f;
            for (int64_t k = from; k < from + a.w.group; k += 16) {
                alignas(16) int8_t q[16];
                quantise_16(a, r * a.ld + k, 16, inverse, float(centre), 0, 15, q);
                data[k / 8 * PANEL] = nibbles_of(q), data[(k / 8 + 1) * PANEL] = nibbles_of(q + 8);
            }
        }
    }
}

// int4 from unpacked values 0..15 (one byte each); scale and offset are filled by the caller.
static void pack_nibbles(const PackArgs& a, int64_t r, Place at) {
    uint32_t* data = (uint32_t*)a.w.data;
    const uint8_t* src = (const uint8_t*)a.src + r * a.ld;
    for (int64_t k8 = 0; k8 < a.w.k / 8; k8++) data[(at.panel * (a.w.k / 8) + k8) * PANEL + at.lane] = nibbles_of((const int8_t*)src + k8 * 8);
}

void pack(const PackArgs& a, const Ctx& ctx) {
    ctx.each(a.rows, 32, [&](int64_t r0, int64_t r1) {
        for (int64_t r = r0; r < r1; r++) {
            Place at = place_of(a.w, a.first_row + r);
            if (is_side_by_side(a, r, r1, at)) {
                pack_tiles_16(a, r, at);
                r += 15;
            } else if (a.w.format == W_BF16_TILES) pack_tiles(a, r, at);
            else if (a.w.format <= W_F16) pack_float(a, r, at);
            else if (a.w.format <= W_W8A8 || a.w.format == W_W8A16) pack_int8(a, r, at);
            else if (a.src_dtype == DT_I8) pack_nibbles(a, r, at);
            else if (a.w.multiple) pack_multiples(a, r, at);
            else pack_int4(a, r, at);
        }
    });
    ctx.barrier();
}

}  // namespace RADIX_ISA
}  // namespace radix

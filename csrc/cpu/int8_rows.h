// Rows of activations as bytes: the quantised x of one call of an integer linear layer.
#pragma once
#include "byte_vectors.h"
#include "rows.h"
#include "weights.h"

namespace radix {
namespace RADIX_ISA {

constexpr float MAX_INT16_PAIR = 127 * 256;  // 127 in the high byte, 0 in the low one

constexpr int64_t NIBBLE_ROWS = 8;  // of a tile of nibbles: more sums of groups leave the registers

// Quantised rows of one call. Dwords hold four k: W8A8 [tile][k/4][row]; W8A16 [tile][k/4][row][high, low];
// W4A8 [tile][k/8][2][row], even k of eight first, as a packed dword's low and high nibbles are.
struct Quantised {
    int64_t steps, spans, group, groups, rows, count, m, planes;  // planes: bytes of an activation
    bool widens;  // nibbles with multiples are widened to bytes first, once for many tiles of rows
    int32_t* x;
    float *scale, *extra;  // [tile][span][row]; extra (W4A8) [tile][group][row]: see group_extra
    Quantised(const LinearArgs& a, char* base) : m(a.m) {
        const bool four = a.w.format == W_W4A8;
        planes = a.w.format == W_W8A16 ? 2 : 1;
        const int64_t max_rows = four ? INT4_ROWS : INT8_ROWS / planes;
        steps = four ? a.w.k / 4 : (a.w.k + 3) / 4;
        spans = four ? spans_of(a.w) : 1;
        count = (m + max_rows - 1) / max_rows;
        widens = WIDENS && a.w.multiple && count > 3;
        if (four && !widens && max_rows > NIBBLE_ROWS) count = (m + NIBBLE_ROWS - 1) / NIBBLE_ROWS;
        group = !four ? a.w.k : widens ? a.w.span : a.w.group;
        groups = (a.w.k + group - 1) / group;
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

// The largest magnitude; NaN where x is not finite, so that what has its scale is NaN.
static float largest(const float* x, int64_t n) {
    vf top = zero(), nothing = zero();  // x * 0 is NaN where x is not finite
    for (int64_t i = 0; i < n; i += 16) {
        const vf v = load_n(x + i, lanes_at(i, n));
        top = vmax(top, vabs(v)), nothing = fma(v, zero(), nothing);
    }
    return lane_max(top) + lane_tree_sum(nothing);
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

constexpr int CENTRE = 120;  // of nibbles times their multiple, as unsigned bytes: -8 * 15 to 8 * 15

// What a group adds to its products, from the sum of its quantised x. Weights with multiples take
// -sum, for what they subtract. Others without zero points are centred on 8, e2m1 on 12, widened ones on
// CENTRE: the sums of such a group start there, as integers. With zero points it is the float sum of x,
// for their offsets.
RADIX_INLINE float group_extra(const Weight& w, bool widens, float scale, float sum) {
    if (w.offset) return scale * sum;
    if (w.multiple && !widens) return -sum;
    return bits_to_float(uint32_t(int32_t(sum)) * -uint32_t(widens ? CENTRE : w.fp4 ? 12 : 8));
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
    const int64_t span = four ? a.w.span : a.w.k;
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
        for (int64_t k = k0; k < k1; k += q.group) {
            const float sum = quantise_part(x, k, k + q.group < k1 ? k + q.group : k1, top, put);
            if (four)
                q.extra[t * q.rows * q.groups + k / q.group * width + r] =
                    group_extra(a.w, q.widens, scale, sum);
        }
    }
}

}  // namespace RADIX_ISA
}  // namespace radix

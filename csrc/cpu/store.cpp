// q/k norm, rotary embedding and the store into the paged cache, one pass over a token's row.
#include "kv.h"

namespace radix {
namespace RADIX_ISA {

static void rotate_halves(float* x, const float* cs, int rotary) {
    const int half = rotary / 2;
    for (int i = 0; i < half; i += 16) {
        int n = lanes_at(i, half);
        vf c = load_n(cs + i, n), s = load_n(cs + half + i, n);
        vf a = load_n(x + i, n), b = load_n(x + half + i, n);
        store_n(x + i, fnma(b, s, mul(a, c)), n);
        store_n(x + half + i, fma(a, s, mul(b, c)), n);
    }
}
static void rotate_pairs(float* x, const float* cs, int rotary) {
    const int half = rotary / 2;
    for (int i = 0; i < half; i += 16) {
        int n = lanes_at(i, half);
        alignas(64) float even[16] = {0}, odd[16] = {0};
        for (int j = 0; j < n; j++) even[j] = x[2 * (i + j)], odd[j] = x[2 * (i + j) + 1];
        vf c = load_n(cs + i, n), s = load_n(cs + half + i, n), a = load(even), b = load(odd);
        store(even, fnma(b, s, mul(a, c)));
        store(odd, fma(a, s, mul(b, c)));
        for (int j = 0; j < n; j++) x[2 * (i + j)] = even[j], x[2 * (i + j) + 1] = odd[j];
    }
}

static void norm_to(const StoreArgs& a, float* x, const float* w, const float* b, int64_t dim) {
    if (a.layer_norm) layer_norm_to(x, x, w, b, dim, a.eps, a.norm_offset);
    else rms_norm_to(x, x, w, b, dim, a.eps, a.norm_offset);
}

static void prepare_heads(const StoreArgs& a, float* x, int heads, int stride, const float* weight, const float* bias, const float* cs) {
    if (a.norm == 2) norm_to(a, x, weight, bias, int64_t(heads) * a.head_dim);
    for (int h = 0; h < heads; h++) {
        float* head = x + int64_t(h) * stride;
        const int64_t own = a.norm == 3 ? int64_t(h) * a.head_dim : 0;
        if (a.norm == 1 || a.norm == 3) norm_to(a, head, weight ? weight + own : nullptr, bias ? bias + own : nullptr, a.head_dim);
        if (!cs) continue;
        if (a.interleaved) rotate_pairs(head, cs, a.rotary);
        else rotate_halves(head, cs, a.rotary);
    }
}

static void prepare_queries(const StoreArgs& a, int64_t token, const float* cs) {
    float *q = a.q + token * a.ldq, *to = q;
    int stride = a.q_head;
    if (a.q_to) {
        to = a.q_to + token * a.ldq_to, stride = a.q_to_head;
        for (int h = 0; h < a.heads; h++) std::memcpy(to + int64_t(h) * stride, q + int64_t(h) * a.q_head, size_t(a.head_dim) * 4);
    }
    prepare_heads(a, to, a.heads, stride, a.q_norm, a.q_norm_bias, cs);
}

constexpr float E4M3_MOST = 448.0f, E5M2_MOST = 57344.0f;

// Eight-bit floats, rounded to nearest even; what is too large becomes the largest. FRACTION bits of
// mantissa, exponents biased by BIAS; the sum with 2^(24 - BIAS - FRACTION) rounds the subnormal ones.
template <int FRACTION, int BIAS>
RADIX_INLINE uint8_t float_to_f8(float f, float most, uint8_t nan) {
    constexpr int shift = 23 - FRACTION;
    uint32_t u = float_to_bits(f);
    const uint8_t sign = uint8_t((u >> 24) & 0x80u);
    u &= 0x7fffffffu;
    if (u > 0x7f800000u) return uint8_t(sign | nan);
    if (u > float_to_bits(most)) u = float_to_bits(most);
    if (u < uint32_t(128 - BIAS) << 23) {
        const float magic = bits_to_float(uint32_t(127 + 24 - BIAS - FRACTION) << 23);
        return uint8_t(sign | (float_to_bits(bits_to_float(u) + magic) - float_to_bits(magic)));
    }
    u += (1u << (shift - 1)) - 1u + ((u >> shift) & 1u);
    return uint8_t(sign | ((u >> shift) - (uint32_t(127 - BIAS) << FRACTION)));
}
RADIX_INLINE uint8_t float_to_e4m3(float f) { return float_to_f8<3, 7>(f, E4M3_MOST, 0x7f); }
RADIX_INLINE uint8_t float_to_e5m2(float f) { return float_to_f8<2, 15>(f, E5M2_MOST, 0x7f); }

// The scale of an int8 row: its largest magnitude is 127. Sixteen significant bits make 127 * scale
// exact, so that quantising a row that was read gives the same bytes. NaN for a row that is not finite.
static inline float int8_scale(const float* x, int n) {
    vf most = zero();
    bool finite = true;
    for (int i = 0; i < n; i += 16) most = vmax(most, vabs(load_n(x + i, lanes_at(i, n))));
    for (int i = 0; i < n; i++) finite &= (float_to_bits(x[i]) & 0x7f800000u) != 0x7f800000u;
    if (!finite) return bits_to_float(0x7fc00000u);
    float largest = lane_max(most);
    if (largest < 1e-30f) return 0.0f;
    return bits_to_float((float_to_bits(largest / 127.0f) + 0x80u) & ~0xffu);
}
// 16 numbers as int8 of a scale; zeros where the row has none.
RADIX_INLINE vf quantised(vf x, float scale) {
    if (!(scale > 0.0f)) return zero();
    return vmax(vmin(vround(div(x, set1(scale))), set1(127.0f)), set1(-127.0f));
}

// One row into the cache, its numbers `step` apart, sixteen at a time; narrow(out, x) makes them of type T.
template <class T, class Narrow>
static void put_numbers(void* base, int64_t step, const float* x, int n, Narrow narrow) {
    T* out = (T*)base;
    for (int i = 0; i < n; i += 16) {
        const int count = lanes_at(i, n);
        alignas(64) T b[16];
        narrow(b, load_n(x + i, count));
        if (step == 1 && count == 16) std::memcpy(out + i, b, sizeof(b));
        else if (count == 16)
            RADIX_UNROLL(16)
            for (int j = 0; j < 16; j++) out[(i + j) * step] = b[j];
        else
            for (int j = 0; j < count; j++) out[(i + j) * step] = b[j];
    }
}
static void put_row(void* base, int dtype, int64_t step, const float* x, int n, float scale) {
    switch (dtype) {
        case DT_F32: return put_numbers<float>(base, step, x, n, [](float* b, vf v) { store(b, v); });
        case DT_BF16: return put_numbers<uint16_t>(base, step, x, n, [](uint16_t* b, vf v) { store_bf16(b, v); });
        case DT_F16: return put_numbers<uint16_t>(base, step, x, n, [](uint16_t* b, vf v) { store_f16(b, v); });
        case DT_I8: return put_numbers<int8_t>(base, step, x, n, [=](int8_t* b, vf v) { store_i8(b, quantised(v, scale)); });
        case DT_E4M3:
            for (int d = 0; d < n; d++) ((uint8_t*)base)[d * step] = float_to_e4m3(x[d]);
            break;
        default:
            for (int d = 0; d < n; d++) ((uint8_t*)base)[d * step] = float_to_e5m2(x[d]);
    }
}

static void put_token(const Cache& c, int64_t slot, int head, const float* k, const float* v) {
    const int tile = int(slot % c.page_size) / TILE, lane = int(slot % TILE), size = dtype_size(c.dtype), width = v_width(c);
    const int32_t page = int32_t(slot / c.page_size);
    // tile_at looks pages up by the tile's number in its sequence: here the page is the only one
    Tile t = tile_at(c, &page, head, tile);
    const bool scaled = c.dtype == DT_I8;
    const float ks = scaled ? int8_scale(k, c.k_dim) : 1.0f;
    if (scaled) const_cast<float*>(t.k_scale)[lane] = ks;
    char* row = (char*)const_cast<void*>(t.v) + int64_t(lane) * width * size;
    if (c.latent) return put_row(row, c.dtype, 1, k, c.k_dim, ks);
    put_row((char*)const_cast<void*>(t.k) + lane * size, c.dtype, TILE, k, c.k_dim, ks);
    const float vs = scaled ? int8_scale(v, c.v_dim) : 1.0f;
    if (scaled) const_cast<float*>(t.v_scale)[lane] = vs;
    put_row(row, c.dtype, 1, v, c.v_dim, vs);
}

void store(const StoreArgs& a, const Ctx& ctx) {
    ctx.each(a.tokens, 1, [&](int64_t t0, int64_t t1) {
        for (int64_t t = t0; t < t1; t++) {
            const float* cs = a.cos_sin ? a.cos_sin + int64_t(a.positions ? a.positions[t] : t) * a.rotary : nullptr;
            if (a.q) prepare_queries(a, t, cs);
            if (!a.k) continue;
            float* k = a.k + t * a.ldk;
            prepare_heads(a, k + a.k_lead, a.kv_heads, a.head_dim, a.k_norm, a.k_norm_bias, cs);
            if (!a.slots || a.slots[t] < 0) continue;
            const Cache& c = a.cache;
            for (int h = 0; h < c.kv_heads; h++) put_token(c, a.slots[t], h, k + int64_t(h) * c.k_dim, c.latent ? nullptr : a.v + t * a.ldv + int64_t(h) * c.v_dim);
        }
    });
    ctx.barrier();
}

}  // namespace RADIX_ISA
}  // namespace radix

// q/k norm, rotary embedding and the store into the paged cache, one pass over a token's row.
#include <type_traits>

#include "heavy.h"
#include "store_int4.h"

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
    if (a.layer_norm)
        layer_norm_to(x, x, w, b, dim, a.eps, a.norm_offset);
    else
        rms_norm_to(x, x, w, b, dim, a.eps, a.norm_offset);
}

// The usual heads, in registers: RMS norm of 16 * N channels, all of them rotated by halves. The arithmetic
// of rms_norm_to and rotate_halves.
template <int N>
static void prepare_usual(const StoreArgs& a, float* x, int heads, int stride, const float* weight,
                          const float* cs) {
    for (int h = 0; h < heads; h++, x += stride) {
        vf v[N];
        for (int i = 0; i < N; i++) v[i] = load(x + i * 16);
        if (a.norm) {
            vf s[4] = {zero(), zero(), zero(), zero()};
            for (int i = 0; i < N; i++) s[i & 3] = fma(v[i], v[i], s[i & 3]);
            const float inverse =
                1.0f /
                std::sqrt(lane_tree_sum(add(add(s[0], s[1]), add(s[2], s[3]))) / float(N * 16) + a.eps);
            const float* w = weight ? weight + (a.norm == 3 ? int64_t(h) * N * 16 : 0) : nullptr;
            for (int i = 0; i < N; i++) {
                v[i] = mul(v[i], set1(inverse));
                if (w) v[i] = mul(v[i], add(load(w + i * 16), set1(a.norm_offset)));
            }
        }
        for (int i = 0; cs && i < N / 2; i++) {
            const vf c = load(cs + i * 16), s = load(cs + (i + N / 2) * 16), one = v[i], other = v[i + N / 2];
            v[i] = fnma(other, s, mul(one, c)), v[i + N / 2] = fma(one, s, mul(other, c));
        }
        for (int i = 0; i < N; i++) store(x + i * 16, v[i]);
    }
}

static void prepare_heads(const StoreArgs& a, float* x, int heads, int stride, const float* weight,
                          const float* bias, const float* cs) {
    const bool is_normed = a.norm == 1 || a.norm == 3,
               rotates_all = !cs || (!a.interleaved && a.rotary == a.head_dim);
    if ((is_normed ? !a.layer_norm && !bias : a.norm == 0) && rotates_all) {
        if (a.head_dim == 64) return prepare_usual<4>(a, x, heads, stride, weight, cs);
        if (a.head_dim == 128) return prepare_usual<8>(a, x, heads, stride, weight, cs);
    }
    if (a.norm == 2) norm_to(a, x, weight, bias, int64_t(heads) * a.head_dim);
    for (int h = 0; h < heads; h++) {
        float* head = x + int64_t(h) * stride;
        const int64_t own = a.norm == 3 ? int64_t(h) * a.head_dim : 0;
        if (is_normed)
            norm_to(a, head, weight ? weight + own : nullptr, bias ? bias + own : nullptr, a.head_dim);
        if (!cs) continue;
        if (a.interleaved)
            rotate_pairs(head, cs, a.rotary);
        else
            rotate_halves(head, cs, a.rotary);
    }
}

static void prepare_queries(const StoreArgs& a, int64_t token, const float* cs) {
    float *q = a.q + token * a.ldq, *to = q;
    int stride = a.q_head;
    if (a.q_to) {
        to = a.q_to + token * a.ldq_to, stride = a.q_to_head;
        for (int h = 0; h < a.heads; h++)
            std::memcpy(to + int64_t(h) * stride, q + int64_t(h) * a.q_head, size_t(a.head_dim) * 4);
    }
    prepare_heads(a, to, a.heads, stride, a.q_norm, a.q_norm_bias, cs);
}

constexpr float E4M3_MOST = 448.0f, E5M2_MOST = 57344.0f;

// Eight-bit floats, rounded to nearest even; what is too large becomes the largest. FRACTION bits of
// mantissa, exponents biased by BIAS; the sum with 2^(24 - BIAS - FRACTION) rounds the subnormal ones.
template <int FRACTION, int BIAS, int NOT>
RADIX_INLINE void store_f8(uint8_t* out, vf x, float limit) {
    constexpr int shift = 23 - FRACTION;
    constexpr uint32_t first_normal = uint32_t(128 - BIAS) << 23,
                       magic = uint32_t(127 + 24 - BIAS - FRACTION) << 23,
                       rebias = uint32_t(127 - BIAS) << FRACTION;
#if defined(__AVX512F__)
    auto all = [](uint32_t u) { return _mm512_set1_epi32(int(u)); };
    const __m512i u = _mm512_castps_si512(x.v), magnitude = _mm512_and_si512(u, all(0x7fffffffu)),
                  kept = _mm512_min_epu32(magnitude, all(float_to_bits(limit)));
    const __m512i sum =
        _mm512_castps_si512(_mm512_add_ps(_mm512_castsi512_ps(kept), _mm512_castsi512_ps(all(magic))));
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(kept, shift), all(1));
    const __m512i rounded = _mm512_srli_epi32(
        _mm512_add_epi32(_mm512_add_epi32(kept, all((1u << (shift - 1)) - 1u)), odd), shift);
    __m512i number = _mm512_sub_epi32(rounded, all(rebias));
    number = _mm512_mask_sub_epi32(number, _mm512_cmplt_epu32_mask(kept, all(first_normal)), sum, all(magic));
    number = _mm512_mask_mov_epi32(number, _mm512_cmpgt_epu32_mask(magnitude, all(0x7f800000u)), all(NOT));
    const __m512i sign = _mm512_and_si512(_mm512_srli_epi32(u, 24), all(0x80u));
    _mm_storeu_si128((__m128i*)out, _mm512_cvtepi32_epi8(_mm512_or_si512(number, sign)));
#else
    alignas(64) float all[16];
    store(all, x);
    for (int i = 0; i < 16; i++) {
        const uint32_t u = float_to_bits(all[i]), magnitude = u & 0x7fffffffu, top = float_to_bits(limit),
                       kept = magnitude > top ? top : magnitude;
        uint32_t number = ((kept + (1u << (shift - 1)) - 1u + ((kept >> shift) & 1u)) >> shift) - rebias;
        if (kept < first_normal) number = float_to_bits(bits_to_float(kept) + bits_to_float(magic)) - magic;
        if (magnitude > 0x7f800000u) number = NOT;
        out[i] = uint8_t(((u >> 24) & 0x80u) | number);
    }
#endif
}

// The scale of an int8 row: its largest magnitude is 127. Sixteen significant bits make 127 * scale
// exact, so that quantising a row that was read gives the same bytes. NaN for a row that is not finite.
static inline float int8_scale(const float* x, int n) {
    vf largest_abs = zero(), nothing = zero();  // x - x is NaN where x is not finite
    for (int i = 0; i < n; i += 16) {
        const vf v = load_n(x + i, lanes_at(i, n));
        largest_abs = vmax(largest_abs, vabs(v)), nothing = add(nothing, sub(v, v));
    }
    if (lane_tree_sum(nothing) != 0.0f) return bits_to_float(0x7fc00000u);
    float largest = lane_max(largest_abs);
    if (largest < 1e-30f) return 0.0f;
    return bits_to_float((float_to_bits(largest / 127.0f) + 0x80u) & ~0xffu);
}
// 16 numbers as int8 of a scale; zeros where the row has none.
RADIX_INLINE vf quantised(vf x, float scale) {
    if (!(scale > 0.0f)) return zero();
    return vmax(vmin(vround(div(x, set1(scale))), set1(127.0f)), set1(-127.0f));
}

// f(type, narrow): narrow(out, x) makes 16 numbers of a cache's type; those of int8 are whole already.
template <class F>
static void with_type(int dtype, F&& f) {
    switch (dtype) {
        case DT_F32: return f(float(), [](float* b, vf v) { store(b, v); });
        case DT_BF16: return f(uint16_t(), [](uint16_t* b, vf v) { store_bf16(b, v); });
        case DT_F16: return f(uint16_t(), [](uint16_t* b, vf v) { store_f16(b, v); });
        case DT_I8: return f(int8_t(), [](int8_t* b, vf v) { store_i8(b, v); });
        default: break;
    }
    if (dtype == DT_E4M3)
        f(uint8_t(), [](uint8_t* b, vf v) { store_f8<3, 7, 0x7f>(b, v, E4M3_MOST); });
    else
        f(uint8_t(), [](uint8_t* b, vf v) { store_f8<2, 15, 0x7f>(b, v, E5M2_MOST); });
}
template <class T>
RADIX_INLINE vf in_scale(T, vf v, float scale) {
    if constexpr (std::is_same_v<T, int8_t>)
        return quantised(v, scale);
    else
        return v;
}

// One row into the cache, its numbers `step` apart.
static void put_row(void* base, int dtype, int64_t step, const float* x, int n, float scale) {
    with_type(dtype, [&](auto type, auto narrow) {
        using T = decltype(type);
        T* out = (T*)base;
        for (int i = 0; i < n; i += 16) {
            const int count = lanes_at(i, n);
            alignas(64) T b[16];
            narrow(b, in_scale(type, load_n(x + i, count), scale));
            if (step == 1 && count == 16)
                std::memcpy(out + i, b, sizeof(b));
            else if (count == 16)
                RADIX_UNROLL(16)
            for (int j = 0; j < 16; j++) out[(i + j) * step] = b[j];
            else for (int j = 0; j < count; j++) out[(i + j) * step] = b[j];
        }
    });
}
// Sixteen rows become the columns [n][16] of a tile of K.
static void put_columns(void* base, int dtype, const float* x, int64_t ld, int n, const float* scale) {
    with_type(dtype, [&](auto type, auto narrow) {
        auto* out = (decltype(type)*)base;
        for (int i = 0; i < n; i += 16) {
            const int count = lanes_at(i, n);
            vf r[TILE];
            for (int t = 0; t < TILE; t++) r[t] = in_scale(type, load_n(x + t * ld + i, count), scale[t]);
            transpose_16x16(r);
            for (int j = 0; j < count; j++) narrow(out + (i + j) * TILE, r[j]);
        }
    });
}

static Tile tile_of_slot(const Cache& c, int64_t slot, int head) {
    const int32_t page = int32_t(slot / c.page_size);
    // tile_at looks pages up by the tile's number in its sequence: here the page is the only one
    return tile_at(c, &page, head, int(slot % c.page_size) / TILE);
}
static float* scale_at(const float* of_tile, int lane) { return const_cast<float*>(of_tile) + lane; }

// V, or the row of a latent cache.
static void put_value(const Cache& c, const Tile& t, int lane, const float* x) {
    if (c.dtype == DT_I4) return put_value_i4(c, t, lane, x);
    const int width = v_width(c), size = dtype_size(c.dtype);
    const float scale = c.dtype == DT_I8 ? int8_scale(x, width) : 1.0f;
    if (t.v_scale) *scale_at(t.v_scale, lane) = scale;
    put_row((char*)const_cast<void*>(t.v) + int64_t(lane) * width * size, c.dtype, 1, x, width, scale);
}

// K once more, as a row, and its label, made of what the row holds.
static void put_heavy(const Cache& c, int64_t slot, int head, const float* k) {
    if (!c.heavy) return;
    const Heavy& h = *c.heavy;
    const Cache rows = rows_of_keys(c);
    const Tile row = tile_of_slot(rows, slot, head);
    const int lane = int(slot % TILE), padded = 2 * label_pairs(h);
    const bool is_int4 = c.dtype == DT_I4;  // whose rows are rotated
    float numbers[512], x[512 + 16];
    if (is_int4) std::memcpy(x, k, size_t(c.k_dim) * 4), rotate(x, c.k_dim);
    put_value(rows, row, lane, is_int4 ? x : k);
    if (is_int4) {
        const VRows<DT_I4> stored{row.v, row.v_groups, c.k_dim};
        for (int i = 0; i < c.k_dim; i += 16) store(x + i, stored.load(lane, i));
        rotate(x, c.k_dim);
    }
    const char* stored = (const char*)row.v + int64_t(lane) * c.k_dim * dtype_size(c.dtype);
    const float of_row = row.v_scale ? row.v_scale[lane] : is_int4 ? 1.0f / rotated_block(c.k_dim) : 1.0f;
    int8_t* labels = labels_at(c, int32_t(slot / c.page_size), head, int(slot % c.page_size) / TILE);
    for (int i = 0; i < h.width; i++) {
        const int channel = h.channels[int64_t(head) * h.width + i];
        numbers[i] = (is_int4 ? x[channel] : load_number(stored, c.dtype, channel)) * of_row;
    }
    const float scale = int8_scale(numbers, h.width);
    for (int i = 0; i < padded; i++) {
        const float x = i < h.width && scale > 0.0f ? std::nearbyint(numbers[i] / scale) : 0.0f;
        labels[(i / 2 * TILE + lane) * 2 + i % 2] = int8_t(x);
    }
    *scale_at((const float*)(labels + padded * TILE), lane) = scale;
}

static void put_token(const StoreArgs& a, int64_t token, int head) {
    const Cache& c = a.cache;
    const int lane = int(a.slots[token] % TILE);
    const Tile t = tile_of_slot(c, a.slots[token], head);
    const float* k = a.k + token * a.ldk + int64_t(head) * c.k_dim;
    if (c.latent) return put_value(c, t, lane, k);
    put_value(c, t, lane, a.v + token * a.ldv + int64_t(head) * c.v_dim);
    put_heavy(c, a.slots[token], head, k);
    if (c.dtype == DT_I4) return put_key_i4(c, t, lane, k);
    const float scale = c.dtype == DT_I8 ? int8_scale(k, c.k_dim) : 1.0f;
    if (t.k_scale) *scale_at(t.k_scale, lane) = scale;
    put_row((char*)const_cast<void*>(t.k) + lane * dtype_size(c.dtype), c.dtype, TILE, k, c.k_dim, scale);
}
// Sixteen tokens that fill a tile.
static void put_tile(const StoreArgs& a, int64_t token, int head) {
    const Cache& c = a.cache;
    const Tile t = tile_of_slot(c, a.slots[token], head);
    const float *k = a.k + token * a.ldk + int64_t(head) * c.k_dim,
                *v = a.v + token * a.ldv + int64_t(head) * c.v_dim;
    for (int i = 0; i < TILE; i++) {
        put_value(c, t, i, v + i * a.ldv);
        put_heavy(c, a.slots[token + i], head, k + i * a.ldk);
    }
    if (c.dtype == DT_I4) {
        for (int i = 0; i < TILE; i++) put_key_i4(c, t, i, k + i * a.ldk);
        return;
    }
    float scale[TILE];
    for (int i = 0; i < TILE; i++) scale[i] = c.dtype == DT_I8 ? int8_scale(k + i * a.ldk, c.k_dim) : 1.0f;
    if (t.k_scale) std::memcpy(scale_at(t.k_scale, 0), scale, sizeof(scale));
    put_columns(const_cast<void*>(t.k), c.dtype, k, a.ldk, c.k_dim, scale);
}

// A token's numbers of K are in as many cache lines as a tile has.
static void prefetch_token(const StoreArgs& a, int64_t token, int head) {
    const Cache& c = a.cache;
    if (token >= a.tokens || a.slots[token] < 0 || c.latent) return;
    const Tile t = tile_of_slot(c, a.slots[token], head);
    const int64_t row = kv_bytes(c.dtype, v_width(c));
    for (int64_t i = 0, n = tile_bytes(c, c.k_dim); i < n; i += 64)
        __builtin_prefetch((const char*)t.k + i, 1, 3);
    for (int64_t i = 0; i < row; i += 64)
        __builtin_prefetch((const char*)t.v + a.slots[token] % TILE * row + i, 1, 3);
}

static bool follows(const StoreArgs& a, int64_t token) {
    return a.slots[token] % TILE && a.slots[token - 1] >= 0 && a.slots[token] == a.slots[token - 1] + 1;
}
// From here on a thread's tokens: those of a tile are written by one.
static int64_t first_writable(const StoreArgs& a, int64_t token) {
    if (!a.k || !a.slots) return token;
    while (token > 0 && token < a.tokens && follows(a, token)) token--;
    return token;
}
static bool fills_tile(const StoreArgs& a, int64_t token, int64_t end) {
    if (a.cache.latent || token + TILE > end || a.slots[token] < 0 || a.slots[token] % TILE) return false;
    for (int i = 1; i < TILE; i++)
        if (!follows(a, token + i)) return false;
    return true;
}

static void prepare_token(const StoreArgs& a, int64_t t) {
    const float* cs = a.cos_sin ? a.cos_sin + int64_t(a.positions ? a.positions[t] : t) * a.rotary : nullptr;
    if (a.q) prepare_queries(a, t, cs);
    if (a.k)
        prepare_heads(a, a.k + t * a.ldk + a.k_lead, a.kv_heads, a.head_dim, a.k_norm, a.k_norm_bias, cs);
}

void store(const StoreArgs& a, const Ctx& ctx) {
    const bool is_stored = a.k && a.slots;
    ctx.each(a.tokens, a.tokens < 4 * TILE * ctx.threads() ? 1 : TILE, [&](int64_t t0, int64_t t1) {
        t0 = first_writable(a, t0), t1 = first_writable(a, t1);
        for (int64_t t = t0, n; t < t1; t += n) {
            const bool is_tile = is_stored && fills_tile(a, t, t1);
            n = is_tile ? TILE : 1;
            for (int64_t i = t; i < t + n; i++) prepare_token(a, i);
            if (!is_stored || a.slots[t] < 0) continue;
            for (int h = 0; h < a.cache.kv_heads; h++) {
                if (is_tile)
                    put_tile(a, t, h);
                else
                    prefetch_token(a, t + 1, h), put_token(a, t, h);
            }
        }
    });
    ctx.barrier();
}

}  // namespace RADIX_ISA
}  // namespace radix

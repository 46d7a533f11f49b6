// Tiles of 16 tokens of one head in the paged cache, whatever their element type.
//
// K tile: [k_dim][16]; V tile: [16][v_dim]; both at the same place of their page. An int8 tile ends with
// 16 float scales, one a token: value = q * scale. A latent cache has no K: its V rows hold k_dim
// numbers, of which all are the key and the first v_dim the value.
//
// An int4 tile is in the order of products of bytes, four to a sum, its dimensions padded to 32. 64 bytes
// have sixteen sums' four bytes each, and a byte two numbers, plus 8:
// K: 8 channels of 16 tokens; byte b of a token has channels b and b + 4.
// V: 4 tokens of 32 channels; byte b of channel c has channels c and c + 16 of token b; 16 tokens of 32
//    channels, then of the next 32.
// Either ends with bfloat16 scales [dim / 32][16], one a token and 32 channels: value = q * scale. K is
// rotated (hadamard.h), rows of latents are not: they are values too.
#pragma once
#include "../common/transpose.h"
#include "rows.h"

namespace radix {
namespace RADIX_ISA {

constexpr int TILE = 16;
// An e5m2 byte is the upper half of a half float; an e4m3 one, moved by 7 bits, is one 2^8 too small.
RADIX_INLINE uint16_t e5m2_to_f16(uint8_t b) { return uint16_t(b << 8); }
RADIX_INLINE uint16_t e4m3_to_f16(uint8_t b) {
    return uint16_t(((b & 0x80u) << 8) | ((b & 0x7fu) == 0x7fu ? 0x7e00u : (b & 0x7fu) << 7));
}
RADIX_INLINE float e5m2_to_float(uint8_t b) { return f16_to_float(e5m2_to_f16(b)); }
RADIX_INLINE float e4m3_to_float(uint8_t b) { return f16_to_float(e4m3_to_f16(b)) * 256.0f; }

#if defined(__AVX512F__) || defined(__AVX2__)
RADIX_INLINE vf lanes_of_f16(__m256i h) {
#if defined(__AVX512F__)
    return {_mm512_cvtph_ps(h)};
#else
    return {_mm256_cvtph_ps(_mm256_castsi256_si128(h)), _mm256_cvtph_ps(_mm256_extracti128_si256(h, 1))};
#endif
}
RADIX_INLINE vf load_e5m2(const uint8_t* p) {
    return lanes_of_f16(_mm256_slli_epi16(_mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i*)p)), 8));
}
RADIX_INLINE vf load_e4m3(const uint8_t* p) {
    __m256i b = _mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i*)p));
    __m256i mask = _mm256_set1_epi16(0x7f), magnitude = _mm256_and_si256(b, mask);
    __m256i sign = _mm256_slli_epi16(_mm256_andnot_si256(mask, b), 8);
    __m256i nan = _mm256_and_si256(_mm256_cmpeq_epi16(magnitude, mask), _mm256_set1_epi16(0x7e00));
    __m256i h = _mm256_or_si256(_mm256_or_si256(sign, nan), _mm256_slli_epi16(magnitude, 7));
    return mul(lanes_of_f16(h), set1(256.0f));
}
#else
static inline vf load_e5m2(const uint8_t* p) {
    float t[16];
    for (int i = 0; i < 16; i++) t[i] = e5m2_to_float(p[i]);
    return load(t);
}
static inline vf load_e4m3(const uint8_t* p) {
    float t[16];
    for (int i = 0; i < 16; i++) t[i] = e4m3_to_float(p[i]);
    return load(t);
}
#endif

template <int DTYPE>
RADIX_INLINE vf load_kv(const void* p, int64_t i) {
    if constexpr (DTYPE == DT_I8)
        return load_i8((const int8_t*)p + i);
    else if constexpr (DTYPE == DT_E4M3)
        return load_e4m3((const uint8_t*)p + i);
    else if constexpr (DTYPE == DT_E5M2)
        return load_e5m2((const uint8_t*)p + i);
    else
        return load_any(p, DTYPE, i);
}
template <int DTYPE>
RADIX_INLINE float load_kv_scalar(const void* p, int64_t i) {
    if constexpr (DTYPE == DT_E4M3)
        return e4m3_to_float(((const uint8_t*)p)[i]);
    else if constexpr (DTYPE == DT_E5M2)
        return e5m2_to_float(((const uint8_t*)p)[i]);
    else
        return load_scalar(p, DTYPE, i);
}

inline float load_number(const void* p, int dtype, int64_t i) {
    return dtype == DT_E4M3   ? load_kv_scalar<DT_E4M3>(p, i)
           : dtype == DT_E5M2 ? load_kv_scalar<DT_E5M2>(p, i)
                              : load_scalar(p, dtype, i);
}

struct Tile {
    const void* k;  // null in a latent cache
    const void* v;
    const float* k_scale;  // null: all ones
    const float* v_scale;
    const uint16_t* k_groups;  // of int4, else null
    const uint16_t* v_groups;
};

constexpr int GROUP_4 = 32;  // channels of int4 that have one scale
RADIX_INLINE constexpr int groups_of(int dim) { return (dim + GROUP_4 - 1) / GROUP_4; }
RADIX_INLINE constexpr int64_t kv_bytes(int dtype, int64_t numbers) {
    return dtype == DT_I4 ? numbers / 2 : numbers * dtype_size(dtype);
}
// Without scales
RADIX_INLINE int64_t numbers_bytes(const Cache& c, int dim) {
    return kv_bytes(c.dtype, int64_t(c.dtype == DT_I4 ? groups_of(dim) * GROUP_4 : dim) * TILE);
}
RADIX_INLINE int64_t tile_bytes(const Cache& c, int dim) {
    const int64_t scales = c.dtype == DT_I8 ? TILE * 4 : c.dtype == DT_I4 ? groups_of(dim) * TILE * 2 : 0;
    return numbers_bytes(c, dim) + scales;
}
RADIX_INLINE int v_width(const Cache& c) {
    return c.latent ? c.k_dim : c.v_dim;
}  // numbers from one V row to the next

// Of tile `tile` of a sequence among those of the cache.
RADIX_INLINE int64_t tile_index(const Cache& c, const int32_t* pages, int kv_head, int tile) {
    const int per_page = c.page_size / TILE;
    const int page = per_page == 1 ? tile : tile / per_page;  // no division for the usual page
    return (int64_t(pages[page]) * c.kv_heads + kv_head) * per_page + tile - page * per_page;
}
// The tiles of a sequence's KV head. Sizes are computed once: a block of a decode step reads eight of them,
// and their addresses took a seventh of its time.
class HeadTiles {
  public:
    HeadTiles() = default;
    HeadTiles(const Cache& cache, const int32_t* page_table, int of_head)
        : c(&cache),
          pages(page_table),
          kv_head(of_head),
          k_numbers(numbers_bytes(cache, cache.k_dim)),
          v_numbers(numbers_bytes(cache, v_width(cache))),
          k_bytes(tile_bytes(cache, cache.k_dim)),
          v_bytes(tile_bytes(cache, v_width(cache))) {}
    RADIX_INLINE Tile at(int tile) const {
        const int64_t index = tile_index(*c, pages, kv_head, tile);
        Tile t{};
        t.k = c->latent ? nullptr : (const char*)c->k + index * k_bytes;
        t.v = (const char*)c->v + index * v_bytes;
        if (c->dtype != DT_I8 && c->dtype != DT_I4) return t;
        const char* v_end = (const char*)t.v + v_numbers;
        const char* k_end = c->latent ? v_end : (const char*)t.k + k_numbers;
        if (c->dtype == DT_I8)
            t.k_scale = (const float*)k_end, t.v_scale = (const float*)v_end;
        else
            t.k_groups = (const uint16_t*)k_end, t.v_groups = (const uint16_t*)v_end;
        return t;
    }
    int64_t bytes_of_k() const { return k_bytes; }
    int64_t bytes_of_v() const { return v_bytes; }

  private:
    const Cache* c = nullptr;
    const int32_t* pages = nullptr;
    int kv_head = 0;
    int64_t k_numbers = 0, v_numbers = 0, k_bytes = 0, v_bytes = 0;
};
RADIX_INLINE Tile tile_at(const Cache& c, const int32_t* pages, int kv_head, int tile) {
    return HeadTiles(c, pages, kv_head).at(tile);
}

// A tile is a few kilobytes at an arbitrary address: the hardware prefetcher is too late.
RADIX_INLINE void prefetch_bytes(const void* p, int64_t bytes) {
    for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch((const char*)p + i, 0, 2);
}
RADIX_INLINE void prefetch_tile(const Cache& c, const Tile& t) {
    if (t.k) prefetch_bytes(t.k, tile_bytes(c, c.k_dim));
    prefetch_bytes(t.v, tile_bytes(c, v_width(c)));
}
RADIX_INLINE void prefetch_scales(const Cache& c, const Tile& t) {
    if (t.k_scale) prefetch_bytes(t.k_scale, TILE * 4), prefetch_bytes(t.v_scale, TILE * 4);
}

// Prefetch the line of number `i` of a later tile, during the work on an earlier one: many requests at
// once would stall each other and all later loads.
template <int DTYPE>
RADIX_INLINE void prefetch_line(const void* p, int64_t i) {
    __builtin_prefetch((const char*)p + i * dtype_size(DTYPE), 0, 2);
}

// 32 channels of an int4 value as two vectors. `bytes`: those of four tokens, of which it is number `lane`.
RADIX_INLINE void load_i4_pair(const uint8_t* bytes, int lane, uint16_t scale, vf& low, vf& high) {
    const vf step = set1(bf16_to_float(scale));
#if defined(__AVX512F__)
    const __m512i both = _mm512_srl_epi32(_mm512_loadu_si512(bytes), _mm_cvtsi32_si128(8 * lane)),
                  mask = _mm512_set1_epi32(15), zero_at = _mm512_set1_epi32(8);
    auto numbers = [&](__m512i x) {
        return vf{_mm512_cvtepi32_ps(_mm512_sub_epi32(_mm512_and_si512(x, mask), zero_at))};
    };
    low = mul(numbers(both), step), high = mul(numbers(_mm512_srli_epi32(both, 4)), step);
#else
    alignas(64) float x[2][16];
    for (int j = 0; j < 16; j++) {
        const uint8_t b = bytes[j * 4 + lane];
        x[0][j] = float((b & 15) - 8), x[1][j] = float((b >> 4) - 8);
    }
    low = mul(load(x[0]), step), high = mul(load(x[1]), step);
#endif
}

// Rows of a tile of V from some channel on. int4 has whole vectors, whose last ones may be padding.
template <int DTYPE>
struct VRows {
    const void* v;
    const uint16_t* groups;
    int width;  // numbers from one row to the next
    VRows from(int channel) const {
        if (DTYPE == DT_I4)
            return {(const char*)v + channel * TILE / 2, groups + channel / GROUP_4 * TILE, width};
        return {(const char*)v + kv_bytes(DTYPE, channel), groups, width};
    }
    RADIX_INLINE vf load(int row, int i) const {
        if constexpr (DTYPE == DT_I4) {
            const int group = i / GROUP_4;
            vf x[2];
            load_i4_pair((const uint8_t*)v + group * 256 + row / 4 * 64, row % 4, groups[group * TILE + row],
                         x[0], x[1]);
            return x[i / 16 % 2];
        } else
            return load_kv<DTYPE>(v, int64_t(row) * width + i);
    }
    int whole(int dim) const { return DTYPE == DT_I4 ? (dim + 15) / 16 * 16 : dim / 16 * 16; }
};
// As floats, `pad` apart, zeros after the last channel.
template <int DTYPE>
static void upcast_v(const VRows<DTYPE>& rows, int dim, int pad, float* out) {
    for (int r = 0; r < TILE; r++) {
        float* dst = out + r * pad;
        int i = 0;
        for (; i < rows.whole(dim); i += 16) store(dst + i, rows.load(r, i));
        for (; i < pad; i++)
            dst[i] = i < dim ? load_kv_scalar<DTYPE>(rows.v, int64_t(r) * rows.width + i) : 0.0f;
    }
}
// K as floats [k_dim][16]
template <int DTYPE>
static void upcast_k(const void* k, int k_dim, float* out) {
    for (int i = 0; i < k_dim; i++) store(out + i * TILE, load_kv<DTYPE>(k, i * TILE));
}
// `count` channels of 16 rows of a latent cache as floats [count][16]
template <int DTYPE>
static void transpose_rows(const VRows<DTYPE>& rows, int count, float* out) {
    int i = 0;
    for (; i < rows.whole(count); i += 16) {
        vf r[16];
        for (int t = 0; t < TILE; t++) r[t] = rows.load(t, i);
        transpose_16x16(r);
        for (int j = 0; j < lanes_at(i, count); j++) store(out + (i + j) * TILE, r[j]);
    }
    for (; i < count; i++)
        for (int t = 0; t < TILE; t++)
            out[i * TILE + t] = load_kv_scalar<DTYPE>(rows.v, int64_t(t) * rows.width + i);
}

}  // namespace RADIX_ISA
}  // namespace radix

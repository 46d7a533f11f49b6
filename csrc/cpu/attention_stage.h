// Tiles of the cache in the order in which matrix tiles multiply them: pairs of channels of K, pairs of
// tokens of V, as bfloat16.
#pragma once
#include "ahead.h"
#include "kv.h"

#include <immintrin.h>

namespace radix {
namespace RADIX_ISA {

// 16 bfloat16 pairs (a_i, b_i) of numbers that are exact in it
RADIX_INLINE __m512i paired(vf a, vf b) {
    return _mm512_or_si512(_mm512_srli_epi32(_mm512_castps_si512(a.v), 16),
                           _mm512_and_si512(_mm512_castps_si512(b.v), _mm512_set1_epi32(int(0xffff0000u))));
}
// K of 16 tokens as pairs of channels: out [k_pad / 2][16], zeros after the last channel
template <int DTYPE>
static void pair_k(const void* k, int k_dim, int k_pad, uint32_t* out, Ahead ahead) {
    int d = 0;
    if constexpr (DTYPE == DT_BF16) {
        const __m512i order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8,
                                               23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
        for (; d + 2 <= k_dim; d += 2)
            ahead.lines(1), _mm512_store_si512(out + d * 8,
                                               _mm512_permutexvar_epi16(
                                                   order, _mm512_loadu_si512((const uint16_t*)k + d * TILE)));
    }
    for (; d < k_pad; d += 2) {
        if (d % 4 == 0) ahead.lines(1);
        vf a = d < k_dim ? load_kv<DTYPE>(k, d * TILE) : zero(),
           b = d + 1 < k_dim ? load_kv<DTYPE>(k, (d + 1) * TILE) : zero();
        _mm512_store_si512(out + d * 8, paired(a, b));
    }
}

// V of 16 tokens as pairs of tokens: 8 rows of each tile of 16 channels, `step` apart; tokens from
// `count` on are zeros, whatever the cache holds there.
template <int DTYPE>
static void pair_v(const void* v, int width, int dim, int count, uint32_t* out, int64_t step, Ahead ahead) {
    const int64_t size = dtype_size(DTYPE);
    alignas(64) char rest[2][64];
    const __m512i first = _mm512_set_epi64(11, 10, 3, 2, 9, 8, 1, 0),
                  second = _mm512_set_epi64(15, 14, 7, 6, 13, 12, 5, 4);
    for (int t = 0; t < TILE; t += 2) {
        int i = 0;
        if (DTYPE == DT_BF16 && t + 2 <= count)
            for (const uint16_t *x = (const uint16_t*)v + int64_t(t) * width, *y = x + width; i + 32 <= dim;
                 i += 32) {
                ahead.lines(2);
                const __m512i a = _mm512_loadu_si512(x + i), b = _mm512_loadu_si512(y + i);
                const __m512i even = _mm512_unpacklo_epi16(a, b), odd = _mm512_unpackhi_epi16(a, b);
                _mm512_store_si512(out + (i / 16) * step + t * 8,
                                   _mm512_permutex2var_epi64(even, first, odd));
                _mm512_store_si512(out + (i / 16 + 1) * step + t * 8,
                                   _mm512_permutex2var_epi64(even, second, odd));
            }
        for (; i < dim; i += 16) {
            if (i % 32 == 0) ahead.lines(1);
            const char *x = (const char*)v + (int64_t(t) * width + i) * size, *y = x + width * size;
            if (dim - i < 16) {  // the last row of a cache ends where its memory does
                if (t < count) std::memcpy(rest[0], x, size_t((dim - i) * size)), x = rest[0];
                if (t + 1 < count) std::memcpy(rest[1], y, size_t((dim - i) * size)), y = rest[1];
            }
            vf a = t < count ? load_kv<DTYPE>(x, 0) : zero(),
               b = t + 1 < count ? load_kv<DTYPE>(y, 0) : zero();
            _mm512_store_si512(out + (i / 16) * step + t * 8,
                               paired(keep_lanes(a, 0, dim - i, zero()), keep_lanes(b, 0, dim - i, zero())));
        }
    }
}

}  // namespace RADIX_ISA
}  // namespace radix

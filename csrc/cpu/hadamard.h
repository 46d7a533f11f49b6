// The Hadamard transform of a head's channels, not normalised: keys of int4 caches are stored so, and queries
// meet them so. Order and bits of kernels/ops/kv.py: rotate.
#pragma once
#include "../common/simd.h"

namespace radix {
namespace RADIX_ISA {

// Channels that meet: the largest power of two that divides them.
RADIX_INLINE constexpr int rotated_block(int dim) { return dim & -dim; }

// Lanes i and i + D, where i has not that bit: their sum and difference.
template <int D>
RADIX_INLINE vf meet_lanes(vf x) {
#if defined(__AVX512F__)
    const __m512i lane = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0),
                  other = _mm512_xor_si512(lane, _mm512_set1_epi32(D));
    const __mmask16 is_second = _mm512_test_epi32_mask(lane, _mm512_set1_epi32(D));
    const __m512 swapped = _mm512_permutexvar_ps(other, x.v);
    return {_mm512_mask_sub_ps(_mm512_add_ps(x.v, swapped), is_second, swapped, x.v)};
#else
    alignas(64) float from[16], to[16];
    store(from, x);
    for (int i = 0; i < 16; i++) to[i] = i & D ? from[i - D] - from[i] : from[i] + from[i ^ D];
    return load(to);
#endif
}

// In place; a tail of fewer than 16 channels has blocks of at most 8.
static void rotate(float* x, int dim) {
    const int block = rotated_block(dim);
    for (int i = 0; i < dim; i += 16) {
        const int n = lanes_at(i, dim);
        vf v = load_n(x + i, n);
        if (block > 1) v = meet_lanes<1>(v);
        if (block > 2) v = meet_lanes<2>(v);
        if (block > 4) v = meet_lanes<4>(v);
        if (block > 8) v = meet_lanes<8>(v);
        store_n(x + i, v, n);
    }
    for (int distance = 16; distance < block; distance *= 2)
        for (int i = 0; i < dim; i += 16) {
            if (i & distance) continue;
            const vf a = load(x + i), b = load(x + i + distance);
            store(x + i, add(a, b)), store(x + i + distance, sub(a, b));
        }
}

}  // namespace RADIX_ISA
}  // namespace radix

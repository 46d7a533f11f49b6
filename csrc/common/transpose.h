// Sixteen rows of sixteen numbers become columns.
#pragma once
#include "simd.h"

namespace radix {
namespace RADIX_ISA {

#if defined(__AVX512F__)
static inline void transpose_16x16(__m512i* r) {
    __m512i t[16];
    for (int i = 0; i < 16; i += 2) t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]), t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
    for (int i = 0; i < 16; i += 4)
        for (int j = 0; j < 2; j++) {
            r[i + 2 * j] = _mm512_unpacklo_epi64(t[i + j], t[i + j + 2]);
            r[i + 2 * j + 1] = _mm512_unpackhi_epi64(t[i + j], t[i + j + 2]);
        }
    for (int i = 0; i < 4; i++)
        for (int j = 0; j < 2; j++) {
            t[i + 8 * j] = _mm512_shuffle_i32x4(r[i + 8 * j], r[i + 8 * j + 4], 0x88);
            t[i + 8 * j + 4] = _mm512_shuffle_i32x4(r[i + 8 * j], r[i + 8 * j + 4], 0xdd);
        }
    for (int i = 0; i < 8; i++) {
        r[i] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0x88);
        r[i + 8] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0xdd);
    }
}
static inline void transpose(vf* r) {
    __m512i bits[16];
    for (int i = 0; i < 16; i++) bits[i] = _mm512_castps_si512(r[i].v);
    transpose_16x16(bits);
    for (int i = 0; i < 16; i++) r[i].v = _mm512_castsi512_ps(bits[i]);
}
#elif defined(__AVX2__) && defined(__FMA__)
static inline void transpose_8x8(__m256* r) {
    __m256 t[8];
    for (int i = 0; i < 8; i += 2) t[i] = _mm256_unpacklo_ps(r[i], r[i + 1]), t[i + 1] = _mm256_unpackhi_ps(r[i], r[i + 1]);
    for (int i = 0; i < 8; i += 4)
        for (int j = 0; j < 2; j++) {
            r[i + 2 * j] = _mm256_shuffle_ps(t[i + j], t[i + j + 2], 0x44);
            r[i + 2 * j + 1] = _mm256_shuffle_ps(t[i + j], t[i + j + 2], 0xee);
        }
    for (int i = 0; i < 4; i++) t[i] = _mm256_permute2f128_ps(r[i], r[i + 4], 0x20), t[i + 4] = _mm256_permute2f128_ps(r[i], r[i + 4], 0x31);
    for (int i = 0; i < 8; i++) r[i] = t[i];
}
static inline void transpose(vf* r) {
    __m256 part[4][8];  // first and second half of the first eight rows, of the others
    for (int i = 0; i < 8; i++) part[0][i] = r[i].a, part[1][i] = r[i].b, part[2][i] = r[i + 8].a, part[3][i] = r[i + 8].b;
    for (auto& p : part) transpose_8x8(p);
    for (int i = 0; i < 8; i++) r[i] = {part[0][i], part[2][i]}, r[i + 8] = {part[1][i], part[3][i]};
}
#else
static inline void transpose(vf* r) {
    float rows[16][16], columns[16][16];
    for (int i = 0; i < 16; i++) store(rows[i], r[i]);
    for (int i = 0; i < 16; i++)
        for (int j = 0; j < 16; j++) columns[j][i] = rows[i][j];
    for (int i = 0; i < 16; i++) r[i] = load(columns[i]);
}
#endif

}  // namespace RADIX_ISA
}  // namespace radix

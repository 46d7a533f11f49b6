// Sixteen vectors of sixteen become each other's columns.
#pragma once
#include "simd.h"

namespace radix {
namespace RADIX_ISA {

// Lanes 0-7 from p and 8-15 from q, of whatever 32 bits.
RADIX_INLINE vf load_halves(const void* p, const void* q) {
#if defined(__AVX512F__)
    return {_mm512_insertf32x8(_mm512_castps256_ps512(_mm256_loadu_ps((const float*)p)),
                               _mm256_loadu_ps((const float*)q), 1)};
#elif defined(__AVX2__) && defined(__FMA__)
    return {_mm256_loadu_ps((const float*)p), _mm256_loadu_ps((const float*)q)};
#else
    float t[16];
    std::memcpy(t, p, 32), std::memcpy(t + 8, q, 32);
    return load(t);
#endif
}

#if defined(__AVX512F__)
static inline void transpose_16x16(__m512i* r) {
    __m512i t[16];
    for (int i = 0; i < 16; i += 2)
        t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]), t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
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
static inline void transpose_16x16(vf* r) {
    __m512i t[16];
    for (int i = 0; i < 16; i++) t[i] = _mm512_castps_si512(r[i].v);
    transpose_16x16(t);
    for (int i = 0; i < 16; i++) r[i].v = _mm512_castsi512_ps(t[i]);
}

#elif defined(__AVX2__) && defined(__FMA__)
RADIX_INLINE void transpose_8x8(__m256* r) {
    __m256 t[8];
    for (int i = 0; i < 8; i += 2)
        t[i] = _mm256_unpacklo_ps(r[i], r[i + 1]), t[i + 1] = _mm256_unpackhi_ps(r[i], r[i + 1]);
    for (int i = 0; i < 8; i += 4)
        for (int j = 0; j < 2; j++) {
            r[i + 2 * j] = _mm256_shuffle_ps(t[i + j], t[i + j + 2], 0x44);
            r[i + 2 * j + 1] = _mm256_shuffle_ps(t[i + j], t[i + j + 2], 0xee);
        }
    for (int i = 0; i < 4; i++)
        t[i] = _mm256_permute2f128_ps(r[i], r[i + 4], 0x20),
        t[i + 4] = _mm256_permute2f128_ps(r[i], r[i + 4], 0x31);
    for (int i = 0; i < 8; i++) r[i] = t[i];
}
static inline void transpose_16x16(vf* r) {
    __m256 t[4][8];  // upper left, lower left, upper right, lower right
    for (int i = 0; i < 8; i++)
        t[0][i] = r[i].a, t[1][i] = r[i + 8].a, t[2][i] = r[i].b, t[3][i] = r[i + 8].b;
    for (auto& block : t) transpose_8x8(block);
    for (int i = 0; i < 8; i++) r[i] = {t[0][i], t[1][i]}, r[i + 8] = {t[2][i], t[3][i]};
}

#elif defined(RADIX_NEON)
RADIX_INLINE void transpose_4x4(float32x4_t& a, float32x4_t& b, float32x4_t& c, float32x4_t& d) {
    const float64x2_t p = vreinterpretq_f64_f32(vtrn1q_f32(a, b)),
                      q = vreinterpretq_f64_f32(vtrn2q_f32(a, b));
    const float64x2_t r = vreinterpretq_f64_f32(vtrn1q_f32(c, d)),
                      s = vreinterpretq_f64_f32(vtrn2q_f32(c, d));
    a = vreinterpretq_f32_f64(vtrn1q_f64(p, r)), b = vreinterpretq_f32_f64(vtrn1q_f64(q, s));
    c = vreinterpretq_f32_f64(vtrn2q_f64(p, r)), d = vreinterpretq_f32_f64(vtrn2q_f64(q, s));
}
static inline void transpose_16x16(vf* r) {
    float32x4_t t[4][16];  // columns of four, of all rows
    for (int i = 0; i < 16; i++) t[0][i] = r[i].a, t[1][i] = r[i].b, t[2][i] = r[i].c, t[3][i] = r[i].d;
    for (auto& rows : t)
        for (int i = 0; i < 16; i += 4) transpose_4x4(rows[i], rows[i + 1], rows[i + 2], rows[i + 3]);
    for (int i = 0; i < 16; i++)
        r[i] = {t[i / 4][i % 4], t[i / 4][i % 4 + 4], t[i / 4][i % 4 + 8], t[i / 4][i % 4 + 12]};
}

#else
static inline void transpose_16x16(vf* r) {
    float t[16][16], column[16];
    for (int i = 0; i < 16; i++) store(t[i], r[i]);
    for (int j = 0; j < 16; j++) {
        for (int i = 0; i < 16; i++) column[i] = t[i][j];
        r[j] = load(column);
    }
}
#endif

}  // namespace RADIX_ISA
}  // namespace radix

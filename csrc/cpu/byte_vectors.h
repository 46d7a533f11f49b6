// 64 bytes as sixteen sums of four products, of each instruction set; nibbles, and what they stand for.
#pragma once
#include "../common/api.h"
#include "../common/simd.h"

namespace radix {
namespace RADIX_ISA {

#if defined(__AVX512VNNI__) || defined(__AVXVNNI__)
#define RADIX_UNSIGNED_BY_SIGNED 1  // sums of unsigned by signed bytes, which nothing saturates
#else
#define RADIX_UNSIGNED_BY_SIGNED 0
#endif
constexpr bool WIDENS = RADIX_UNSIGNED_BY_SIGNED;

#if defined(__AVXVNNI__) && !defined(__AVX512VNNI__)
#define RADIX_HALVES 1  // sixteen registers hold the sums of three rows, if all meet half a vector at a time
#else
#define RADIX_HALVES 0
#endif

#if defined(__AVX512F__)
constexpr bool HAS_32_REGISTERS = true;
#else
constexpr bool HAS_32_REGISTERS = false;
#endif

#if defined(__AVX512VNNI__)
struct vi {
    __m512i v;
};
constexpr bool BIASED = true;  // vpdpbusd multiplies unsigned by signed: x + 128, corrected by column_sum
RADIX_INLINE vi vi_zero() { return {_mm512_setzero_si512()}; }
RADIX_INLINE vi vi_load(const void* p) { return {_mm512_loadu_si512(p)}; }
RADIX_INLINE void vi_store(void* p, vi x) { _mm512_storeu_si512(p, x.v); }
RADIX_INLINE vi vi_set1(int32_t x) { return {_mm512_set1_epi32(x)}; }
RADIX_INLINE vi vi_sub(vi a, vi b) { return {_mm512_sub_epi32(a.v, b.v)}; }
RADIX_INLINE vf to_float(vi a) { return {_mm512_cvtepi32_ps(a.v)}; }
// As assembly: GCC 12 copies accumulators around the intrinsic, and spills where there are many.
RADIX_INLINE vi dot_bytes(vi acc, vi unsigned_bytes, vi signed_bytes) {
    asm("vpdpbusd %2, %1, %0" : "+v"(acc.v) : "v"(unsigned_bytes.v), "v"(signed_bytes.v));
    return acc;
}
RADIX_INLINE vi dot_xw(vi acc, vi x, vi w) { return dot_bytes(acc, x, w); }
RADIX_INLINE vi dot_wx(vi acc, vi w, vi x) { return dot_bytes(acc, w, x); }
RADIX_INLINE void split_nibbles(vi a, vi& even, vi& odd) {
    __m512i m = _mm512_set1_epi8(15);
    even.v = _mm512_and_si512(a.v, m), odd.v = _mm512_and_si512(_mm512_srli_epi32(a.v, 4), m);
}
RADIX_INLINE void split_in_place(vi a, vi& even, vi& odd) {
    __m512i m = _mm512_set1_epi8(15);
    even.v = _mm512_and_si512(a.v, m), odd.v = _mm512_andnot_si512(m, a.v);
}
// Bytes times a number of 16 bits, whose products fit a byte, plus bytes.
RADIX_INLINE vi scale_bytes(vi bytes, vi times, vi plus) {
    return {_mm512_add_epi8(_mm512_mullo_epi16(bytes.v, times.v), plus.v)};
}
RADIX_INLINE vi look_up(vi nibbles, const int8_t* table) {
    return {_mm512_shuffle_epi8(_mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i*)table)), nibbles.v)};
}
constexpr int INT8_ROWS = 12, INT4_ROWS = 12;
#elif defined(__AVX2__)
struct vi {
    __m256i a, b;
};
RADIX_INLINE vi vi_zero() { return {_mm256_setzero_si256(), _mm256_setzero_si256()}; }
RADIX_INLINE vi vi_load(const void* p) {
    return {_mm256_loadu_si256((const __m256i*)p), _mm256_loadu_si256((const __m256i*)p + 1)};
}
RADIX_INLINE vi vi_set1(int32_t x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
RADIX_INLINE vi vi_sub(vi x, vi y) { return {_mm256_sub_epi32(x.a, y.a), _mm256_sub_epi32(x.b, y.b)}; }
#if defined(__AVX512F__)
RADIX_INLINE vf to_float(vi x) {
    return {_mm512_cvtepi32_ps(_mm512_inserti64x4(_mm512_castsi256_si512(x.a), x.b, 1))};
}
#else
RADIX_INLINE vf to_float(vi x) { return {_mm256_cvtepi32_ps(x.a), _mm256_cvtepi32_ps(x.b)}; }
#endif
#if RADIX_HALVES
RADIX_INLINE __m256i& half_of(vi (&panel)[2], int i) { return i % 2 ? panel[i / 2].b : panel[i / 2].a; }
constexpr bool BIASED = true;  // as with AVX-512
RADIX_INLINE __m256i dot256(__m256i acc, __m256i unsigned_bytes, __m256i signed_bytes) {
    asm("%{vex%} vpdpbusd %2, %1, %0" : "+x"(acc) : "x"(unsigned_bytes), "x"(signed_bytes));
    return acc;
}
RADIX_INLINE vi dot_xw(vi acc, vi x, vi w) { return {dot256(acc.a, x.a, w.a), dot256(acc.b, x.b, w.b)}; }
RADIX_INLINE void vi_store(void* p, vi x) {
    _mm256_storeu_si256((__m256i*)p, x.a), _mm256_storeu_si256((__m256i*)p + 1, x.b);
}
RADIX_INLINE vi scale_bytes(vi bytes, vi times, vi plus) {
    return {_mm256_add_epi8(_mm256_mullo_epi16(bytes.a, times.a), plus.a),
            _mm256_add_epi8(_mm256_mullo_epi16(bytes.b, times.b), plus.b)};
}
constexpr int INT8_ROWS = 3, INT4_ROWS = 3;
#else
constexpr bool BIASED = false;  // |x| * (w with x's sign): two products of 127 * 127 fit 16 bits
constexpr int INT8_ROWS = 2, INT4_ROWS = 2;
RADIX_INLINE __m256i dot256(__m256i acc, __m256i u, __m256i s) {
    return _mm256_add_epi32(acc, _mm256_madd_epi16(_mm256_maddubs_epi16(u, s), _mm256_set1_epi16(1)));
}
RADIX_INLINE vi dot_xw(vi acc, vi x, vi w) {
    __m256i u = _mm256_abs_epi8(x.a);
    return {dot256(acc.a, u, _mm256_sign_epi8(w.a, x.a)), dot256(acc.b, u, _mm256_sign_epi8(w.b, x.a))};
}
#endif
RADIX_INLINE vi dot_wx(vi acc, vi w, vi x) { return {dot256(acc.a, w.a, x.a), dot256(acc.b, w.b, x.b)}; }
RADIX_INLINE void split_nibbles(vi x, vi& even, vi& odd) {
    __m256i m = _mm256_set1_epi8(15);
    even = {_mm256_and_si256(x.a, m), _mm256_and_si256(x.b, m)};
    odd = {_mm256_and_si256(_mm256_srli_epi32(x.a, 4), m), _mm256_and_si256(_mm256_srli_epi32(x.b, 4), m)};
}
RADIX_INLINE __m256i look_up(__m256i nibbles, const int8_t* table) {
    return _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i*)table)), nibbles);
}
RADIX_INLINE vi look_up(vi nibbles, const int8_t* table) {
    return {look_up(nibbles.a, table), look_up(nibbles.b, table)};
}
#elif defined(RADIX_NEON)
struct vi {
    int32x4_t a, b, c, d;
};
constexpr bool BIASED = false;
RADIX_INLINE vi vi_set1(int32_t x) {
    const int32x4_t v = vdupq_n_s32(x);
    return {v, v, v, v};
}
RADIX_INLINE vi vi_zero() { return vi_set1(0); }
RADIX_INLINE vi vi_load(const void* p) {
    const int32_t* q = (const int32_t*)p;
    return {vld1q_s32(q), vld1q_s32(q + 4), vld1q_s32(q + 8), vld1q_s32(q + 12)};
}
RADIX_INLINE vi vi_sub(vi x, vi y) {
    return {vsubq_s32(x.a, y.a), vsubq_s32(x.b, y.b), vsubq_s32(x.c, y.c), vsubq_s32(x.d, y.d)};
}
RADIX_INLINE vf to_float(vi x) {
    return {vcvtq_f32_s32(x.a), vcvtq_f32_s32(x.b), vcvtq_f32_s32(x.c), vcvtq_f32_s32(x.d)};
}
RADIX_INLINE int32x4_t dot4(int32x4_t acc, int32x4_t x, int32x4_t w) {
    const int8x16_t p = vreinterpretq_s8_s32(x), q = vreinterpretq_s8_s32(w);
#if defined(__ARM_FEATURE_DOTPROD)
    return vdotq_s32(acc, p, q);
#else
    const int16x8_t lo = vmull_s8(vget_low_s8(p), vget_low_s8(q)), hi = vmull_high_s8(p, q);
    return vaddq_s32(acc, vpaddq_s32(vpaddlq_s16(lo), vpaddlq_s16(hi)));
#endif
}
RADIX_INLINE vi dot_xw(vi acc, vi x, vi w) {
    return {dot4(acc.a, x.a, w.a), dot4(acc.b, x.b, w.b), dot4(acc.c, x.c, w.c), dot4(acc.d, x.d, w.d)};
}
RADIX_INLINE vi dot_wx(vi acc, vi w, vi x) { return dot_xw(acc, x, w); }  // nibbles fit a signed byte
RADIX_INLINE int32x4_t low_nibbles(int32x4_t x) { return vandq_s32(x, vdupq_n_s32(0x0f0f0f0f)); }
RADIX_INLINE void split_nibbles(vi x, vi& even, vi& odd) {
    even = {low_nibbles(x.a), low_nibbles(x.b), low_nibbles(x.c), low_nibbles(x.d)};
    odd = {low_nibbles(vshrq_n_s32(x.a, 4)), low_nibbles(vshrq_n_s32(x.b, 4)),
           low_nibbles(vshrq_n_s32(x.c, 4)), low_nibbles(vshrq_n_s32(x.d, 4))};
}
RADIX_INLINE vi look_up(vi nibbles, const int8_t* table) {
    const int8x16_t t = vld1q_s8(table);
    auto one = [&](int32x4_t n) { return vreinterpretq_s32_s8(vqtbl1q_s8(t, vreinterpretq_u8_s32(n))); };
    return {one(nibbles.a), one(nibbles.b), one(nibbles.c), one(nibbles.d)};
}
constexpr int INT8_ROWS = 2, INT4_ROWS = 2;
#else
struct vi {
    int32_t l[16];
};
constexpr bool BIASED = false;
static inline vi vi_zero() { return vi{}; }
static inline vi vi_load(const void* p) {
    vi r;
    std::memcpy(&r, p, 64);
    return r;
}
static inline vi vi_set1(int32_t x) {
    vi r;
    for (int i = 0; i < 16; i++) r.l[i] = x;
    return r;
}
static inline vi vi_sub(vi a, vi b) {
    for (int i = 0; i < 16; i++) a.l[i] -= b.l[i];
    return a;
}
static inline vf to_float(vi a) {
    float t[16];
    for (int i = 0; i < 16; i++) t[i] = float(a.l[i]);
    return load(t);
}
static inline vi dot_xw(vi acc, const vi& x, const vi& w) {
    const int8_t *a = (const int8_t*)&x, *b = (const int8_t*)&w;
    for (int i = 0; i < 16; i++)
        acc.l[i] += a[4 * i] * b[4 * i] + a[4 * i + 1] * b[4 * i + 1] + a[4 * i + 2] * b[4 * i + 2] +
                    a[4 * i + 3] * b[4 * i + 3];
    return acc;
}
static inline vi dot_wx(vi acc, const vi& w, const vi& x) {
    return dot_xw(acc, w, x);
}  // nibbles fit a signed byte
static inline void split_nibbles(const vi& a, vi& even, vi& odd) {
    for (int i = 0; i < 16; i++) even.l[i] = a.l[i] & 0x0f0f0f0f, odd.l[i] = (a.l[i] >> 4) & 0x0f0f0f0f;
}
static inline vi look_up(vi nibbles, const int8_t* table) {
    int8_t* n = (int8_t*)&nibbles;
    for (int i = 0; i < 64; i++) n[i] = table[n[i]];
    return nibbles;
}
constexpr int INT8_ROWS = 2, INT4_ROWS = 2;
#endif

#if defined(__AVX512VNNI__)
constexpr int IN_PLACE = 16;  // what split_in_place multiplies the odd nibbles by
#else
constexpr int IN_PLACE = 1;
RADIX_INLINE void split_in_place(vi x, vi& even, vi& odd) { split_nibbles(x, even, odd); }
#endif

#if defined(__AVX512VBMI__)
// Where the bytes of 64 numbers of 32 bits are after packing to 16 bits, lane by lane: four of each vector in
// turn.
struct PackedBytes {
    alignas(64) uint8_t lower[64] = {}, upper[64] = {};
    constexpr PackedBytes() {
        for (int i = 0; i < 64; i++) {
            const int vector = i / 16, number = i % 16;
            lower[i] = uint8_t(vector / 2 * 64 + (number / 4 * 8 + vector % 2 * 4 + number % 4) * 2);
            upper[i] = uint8_t(lower[i] + 1);
        }
    }
};
#endif

// 64 numbers times `factor`, rounded to whole ones from -32768 to 32639, as 256 * high + low. Returns sums of
// them, whose sum fits a float.
RADIX_INLINE vf store_halves(const vf (&x)[4], float factor, int8_t* high, int8_t* low) {
#if defined(__AVX512F__)
    __m512i n[4];
    for (int i = 0; i < 4; i++) n[i] = _mm512_cvtps_epi32(mul(x[i], set1(factor)).v);
    // Packing goes lane by lane: four numbers of each vector in turn.
    const __m512i a = _mm512_packs_epi32(n[0], n[1]), b = _mm512_packs_epi32(n[2], n[3]),
                  half = _mm512_set1_epi16(128);
    const __m512i a_up = _mm512_add_epi16(a, half), b_up = _mm512_add_epi16(b, half);
#if defined(__AVX512VBMI__)
    static constexpr PackedBytes bytes;
    const __m512i lower = _mm512_load_si512(bytes.lower), upper = _mm512_load_si512(bytes.upper);
    _mm512_storeu_si512(high, _mm512_permutex2var_epi8(a_up, upper, b_up));
    _mm512_storeu_si512(low, _mm512_permutex2var_epi8(a, lower, b));
#else
    const __m512i order = _mm512_set_epi32(15, 11, 7, 3, 14, 10, 6, 2, 13, 9, 5, 1, 12, 8, 4, 0),
                  byte = _mm512_set1_epi16(255);
    const __m512i h = _mm512_packs_epi16(_mm512_srai_epi16(a_up, 8), _mm512_srai_epi16(b_up, 8)),
                  l = _mm512_packus_epi16(_mm512_and_si512(a, byte), _mm512_and_si512(b, byte));
    _mm512_storeu_si512(high, _mm512_permutexvar_epi32(order, h));
    _mm512_storeu_si512(low, _mm512_permutexvar_epi32(order, l));
#endif
    const __m512i one = _mm512_set1_epi16(1);  // sums of what was packed: of NaN, too, without overflow
    return {_mm512_cvtepi32_ps(_mm512_add_epi32(_mm512_madd_epi16(a, one), _mm512_madd_epi16(b, one)))};
#else
    vf sum = zero();
    for (int i = 0; i < 4; i++) {
        const vf whole = vround(mul(x[i], set1(factor)));
        const vf upper = vround(mul(add(whole, set1(0.5f)), set1(1.0f / 256.0f)));  // no ties
        store_i8(high + i * 16, upper), store_i8(low + i * 16, fnma(upper, set1(256.0f), whole));
        sum = add(sum, whole);
    }
    return sum;
#endif
}

}  // namespace RADIX_ISA
}  // namespace radix

// Sixteen float lanes on every machine. One register with AVX-512, two with AVX2, four with NEON, an
// array elsewhere.
// Kernels are written once on `vf`; every operation rounds as the scalar one does, so results do not
// depend on where a vector begins or ends. Compile with -ffp-contract=off: `fma` is the only fusion.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__ARM_NEON) && defined(__aarch64__)
#define RADIX_NEON 1
#include <arm_neon.h>
#endif
#if defined(__AVX512F__) || defined(__AVX2__)
#include <immintrin.h>
#endif
#if defined(__AVX512F__) || defined(__AVX2__) || defined(RADIX_NEON)
#define RADIX_UNROLL(n) RADIX_PRAGMA(GCC unroll n)
#else
#define RADIX_UNROLL(n)  // keeps the fallback quick to compile
#endif
#define RADIX_PRAGMA(x) _Pragma(#x)

#define RADIX_INLINE inline __attribute__((always_inline))

// The compiler does not watch what masked instructions read and write.
#if defined(__SANITIZE_ADDRESS__)
extern "C" void __asan_loadN(void*, long);
extern "C" void __asan_storeN(void*, long);
#define RADIX_WATCH_READ(p, n) __asan_loadN((void*)(p), (n) > 0 ? (n) * 4L : 0L)
#define RADIX_WATCH_WRITE(p, n) __asan_storeN((void*)(p), (n) > 0 ? (n) * 4L : 0L)
#elif defined(__SANITIZE_THREAD__)
extern "C" void __tsan_read_range(void*, long);
extern "C" void __tsan_write_range(void*, long);
#define RADIX_WATCH_READ(p, n) __tsan_read_range((void*)(p), (n) > 0 ? (n) * 4L : 0L)
#define RADIX_WATCH_WRITE(p, n) __tsan_write_range((void*)(p), (n) > 0 ? (n) * 4L : 0L)
#else
#define RADIX_WATCH_READ(p, n)
#define RADIX_WATCH_WRITE(p, n)
#endif

namespace radix {
namespace RADIX_ISA {

RADIX_INLINE float bits_to_float(uint32_t u) {
    float f;
    std::memcpy(&f, &u, 4);
    return f;
}
RADIX_INLINE uint32_t float_to_bits(float f) {
    uint32_t u;
    std::memcpy(&u, &f, 4);
    return u;
}
RADIX_INLINE float bf16_to_float(uint16_t h) { return bits_to_float(uint32_t(h) << 16); }
RADIX_INLINE uint16_t float_to_bf16(float f) {
    uint32_t u = float_to_bits(f);
    if ((u & 0x7fffffffu) > 0x7f800000u) return uint16_t((u >> 16) | 0x40);  // keep NaN a NaN
    return uint16_t((u + 0x7fffu + ((u >> 16) & 1u)) >> 16);
}
RADIX_INLINE float f16_to_float(uint16_t h) {
    uint32_t sign = uint32_t(h & 0x8000u) << 16, magnitude = h & 0x7fffu;
    if (magnitude >= 0x7c00u) return bits_to_float(sign | 0x7f800000u | ((magnitude & 0x3ffu) << 13));
    if (magnitude >= 0x400u) return bits_to_float(sign | ((magnitude + 0x1c000u) << 13));
    float f = float(magnitude) * 5.9604644775390625e-8f;  // subnormal: multiples of 2^-24
    return sign ? -f : f;
}
RADIX_INLINE uint16_t float_to_f16(float f) {
    uint32_t u = float_to_bits(f), sign = (u >> 16) & 0x8000u;
    u &= 0x7fffffffu;
    if (u > 0x7f800000u) return uint16_t(sign | 0x7e00u);
    if (u >= 0x477ff000u) return uint16_t(sign | 0x7c00u);
    if (u < 0x38800000u) {  // subnormal: let the adder round
        float m = bits_to_float(u) + 0.5f;
        return uint16_t(sign | (float_to_bits(m) - 0x3f000000u));
    }
    u += 0xc8000fffu + ((u >> 13) & 1u);
    return uint16_t(sign | (u >> 13));
}

#if defined(__AVX512F__)

struct vf {
    __m512 v;
};
RADIX_INLINE __mmask16 first_lanes(int n) { return __mmask16((1u << n) - 1u); }
RADIX_INLINE vf zero() { return {_mm512_setzero_ps()}; }
RADIX_INLINE vf set1(float x) { return {_mm512_set1_ps(x)}; }
RADIX_INLINE vf load(const float* p) { return {_mm512_loadu_ps(p)}; }
RADIX_INLINE vf load_n(const float* p, int n) {
    RADIX_WATCH_READ(p, n);
    return {_mm512_maskz_loadu_ps(first_lanes(n), p)};
}
RADIX_INLINE void store(float* p, vf a) { _mm512_storeu_ps(p, a.v); }
RADIX_INLINE void store_n(float* p, vf a, int n) {
    RADIX_WATCH_WRITE(p, n);
    _mm512_mask_storeu_ps(p, first_lanes(n), a.v);
}
RADIX_INLINE vf add(vf a, vf b) { return {_mm512_add_ps(a.v, b.v)}; }
RADIX_INLINE vf sub(vf a, vf b) { return {_mm512_sub_ps(a.v, b.v)}; }
RADIX_INLINE vf mul(vf a, vf b) { return {_mm512_mul_ps(a.v, b.v)}; }
RADIX_INLINE vf div(vf a, vf b) { return {_mm512_div_ps(a.v, b.v)}; }
RADIX_INLINE vf fma(vf a, vf b, vf c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
RADIX_INLINE vf fnma(vf a, vf b, vf c) { return {_mm512_fnmadd_ps(a.v, b.v, c.v)}; }
// Of vmax and vmin: where one is NaN, the second.
RADIX_INLINE vf vmax(vf a, vf b) { return {_mm512_max_ps(a.v, b.v)}; }
RADIX_INLINE vf vmin(vf a, vf b) { return {_mm512_min_ps(a.v, b.v)}; }
RADIX_INLINE vf vabs(vf a) { return {_mm512_abs_ps(a.v)}; }
RADIX_INLINE vf vround(vf a) { return {_mm512_roundscale_ps(a.v, 0x08)}; }
RADIX_INLINE vf times_pow2(vf a, vf n) { return {_mm512_scalef_ps(a.v, n.v)}; }
// a where x < y, else b
RADIX_INLINE vf select_lt(vf x, vf y, vf a, vf b) {
    return {_mm512_mask_blend_ps(_mm512_cmp_ps_mask(x.v, y.v, _CMP_LT_OQ), b.v, a.v)};
}
// lanes [lo, hi) of a, fill elsewhere
RADIX_INLINE vf keep_lanes(vf a, int lo, int hi, vf fill) {
    lo = lo < 0 ? 0 : lo > 16 ? 16 : lo;
    hi = hi < 0 ? 0 : hi > 16 ? 16 : hi;
    return {_mm512_mask_blend_ps(__mmask16(first_lanes(hi) & ~first_lanes(lo)), fill.v, a.v)};
}
RADIX_INLINE float lane_tree_sum(vf a) {
    __m256 h = _mm256_add_ps(_mm512_castps512_ps256(a.v),
                             _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(a.v), 1)));
    __m128 q = _mm_add_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1));
    q = _mm_add_ps(q, _mm_movehl_ps(q, q));
    return _mm_cvtss_f32(_mm_add_ss(q, _mm_movehdup_ps(q)));
}
RADIX_INLINE float lane_max(vf a) { return _mm512_reduce_max_ps(a.v); }
RADIX_INLINE vf load_bf16(const uint16_t* p) {
    __m512i w = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p));
    return {_mm512_castsi512_ps(_mm512_slli_epi32(w, 16))};
}
// 32 bf16 stored as 16 pairs (a_j, b_j): two shifts instead of two widenings
RADIX_INLINE void load_bf16_pairs(const uint16_t* p, vf& a, vf& b) {
    __m512i w = _mm512_loadu_si512(p);
    a.v = _mm512_castsi512_ps(_mm512_slli_epi32(w, 16));
    b.v = _mm512_castsi512_ps(_mm512_and_si512(w, _mm512_set1_epi32(int(0xffff0000u))));
}
RADIX_INLINE vf load_f16(const uint16_t* p) {
    return {_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p))};
}
RADIX_INLINE vf load_i8(const int8_t* p) {
    return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)))};
}
RADIX_INLINE void store_f16(uint16_t* p, vf a) {
    _mm256_storeu_si256((__m256i*)p, _mm512_cvtps_ph(a.v, _MM_FROUND_TO_NEAREST_INT));
}

#elif defined(__AVX2__) && defined(__FMA__)

struct vf {
    __m256 a, b;
};
RADIX_INLINE __m256i lane_mask8(int n) {
    return _mm256_cmpgt_epi32(_mm256_set1_epi32(n), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}
RADIX_INLINE vf zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
RADIX_INLINE vf set1(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
RADIX_INLINE vf load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
RADIX_INLINE vf load_n(const float* p, int n) {
    RADIX_WATCH_READ(p, n);
    return {_mm256_maskload_ps(p, lane_mask8(n)),
            n > 8 ? _mm256_maskload_ps(p + 8, lane_mask8(n - 8)) : _mm256_setzero_ps()};
}
RADIX_INLINE void store(float* p, vf x) {
    _mm256_storeu_ps(p, x.a);
    _mm256_storeu_ps(p + 8, x.b);
}
RADIX_INLINE void store_n(float* p, vf x, int n) {
    RADIX_WATCH_WRITE(p, n);
    _mm256_maskstore_ps(p, lane_mask8(n), x.a);
    if (n > 8) _mm256_maskstore_ps(p + 8, lane_mask8(n - 8), x.b);
}
#define RADIX_TWO(name, op) \
    RADIX_INLINE vf name(vf x, vf y) { return {op(x.a, y.a), op(x.b, y.b)}; }
RADIX_TWO(add, _mm256_add_ps)
RADIX_TWO(sub, _mm256_sub_ps)
RADIX_TWO(mul, _mm256_mul_ps)
RADIX_TWO(div, _mm256_div_ps)
RADIX_TWO(vmax, _mm256_max_ps)
RADIX_TWO(vmin, _mm256_min_ps)
#undef RADIX_TWO
RADIX_INLINE vf fma(vf x, vf y, vf z) {
    return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)};
}
RADIX_INLINE vf fnma(vf x, vf y, vf z) {
    return {_mm256_fnmadd_ps(x.a, y.a, z.a), _mm256_fnmadd_ps(x.b, y.b, z.b)};
}
RADIX_INLINE vf vabs(vf x) {
    __m256 m = _mm256_castsi256_ps(_mm256_set1_epi32(0x7fffffff));
    return {_mm256_and_ps(x.a, m), _mm256_and_ps(x.b, m)};
}
RADIX_INLINE vf vround(vf x) { return {_mm256_round_ps(x.a, 8), _mm256_round_ps(x.b, 8)}; }
RADIX_INLINE __m256 pow2_256(__m256 n) {
    return _mm256_castsi256_ps(
        _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23));
}
RADIX_INLINE vf times_pow2(vf x, vf n) {
    return {_mm256_mul_ps(x.a, pow2_256(n.a)), _mm256_mul_ps(x.b, pow2_256(n.b))};
}
RADIX_INLINE vf select_lt(vf x, vf y, vf a, vf b) {
    return {_mm256_blendv_ps(b.a, a.a, _mm256_cmp_ps(x.a, y.a, _CMP_LT_OQ)),
            _mm256_blendv_ps(b.b, a.b, _mm256_cmp_ps(x.b, y.b, _CMP_LT_OQ))};
}
RADIX_INLINE vf keep_lanes(vf x, int lo, int hi, vf f) {
    __m256 ma = _mm256_castsi256_ps(_mm256_andnot_si256(lane_mask8(lo), lane_mask8(hi)));
    __m256 mb = _mm256_castsi256_ps(_mm256_andnot_si256(lane_mask8(lo - 8), lane_mask8(hi - 8)));
    return {_mm256_blendv_ps(f.a, x.a, ma), _mm256_blendv_ps(f.b, x.b, mb)};
}
RADIX_INLINE float lane_tree_sum(vf x) {
    __m256 h = _mm256_add_ps(x.a, x.b);
    __m128 q = _mm_add_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1));
    q = _mm_add_ps(q, _mm_movehl_ps(q, q));
    return _mm_cvtss_f32(_mm_add_ss(q, _mm_movehdup_ps(q)));
}
RADIX_INLINE float lane_max(vf x) {
    __m256 h = _mm256_max_ps(x.a, x.b);
    __m128 q = _mm_max_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1));
    q = _mm_max_ps(q, _mm_movehl_ps(q, q));
    return _mm_cvtss_f32(_mm_max_ss(q, _mm_movehdup_ps(q)));
}
RADIX_INLINE vf load_bf16(const uint16_t* p) {
    __m256i w = _mm256_loadu_si256((const __m256i*)p);
    __m256i lo = _mm256_cvtepu16_epi32(_mm256_castsi256_si128(w)),
            hi = _mm256_cvtepu16_epi32(_mm256_extracti128_si256(w, 1));
    return {_mm256_castsi256_ps(_mm256_slli_epi32(lo, 16)), _mm256_castsi256_ps(_mm256_slli_epi32(hi, 16))};
}
RADIX_INLINE void load_bf16_pairs(const uint16_t* p, vf& x, vf& y) {
    __m256i m = _mm256_set1_epi32(int(0xffff0000u));
    __m256i w0 = _mm256_loadu_si256((const __m256i*)p), w1 = _mm256_loadu_si256((const __m256i*)(p + 16));
    x = {_mm256_castsi256_ps(_mm256_slli_epi32(w0, 16)), _mm256_castsi256_ps(_mm256_slli_epi32(w1, 16))};
    y = {_mm256_castsi256_ps(_mm256_and_si256(w0, m)), _mm256_castsi256_ps(_mm256_and_si256(w1, m))};
}
RADIX_INLINE vf load_f16(const uint16_t* p) {
    return {_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)),
            _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)(p + 8)))};
}
RADIX_INLINE vf load_i8(const int8_t* p) {
    __m128i w = _mm_loadu_si128((const __m128i*)p);
    return {_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(w)),
            _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_srli_si128(w, 8)))};
}
RADIX_INLINE void store_f16(uint16_t* p, vf x) {
    _mm_storeu_si128((__m128i*)p, _mm256_cvtps_ph(x.a, _MM_FROUND_TO_NEAREST_INT));
    _mm_storeu_si128((__m128i*)(p + 8), _mm256_cvtps_ph(x.b, _MM_FROUND_TO_NEAREST_INT));
}

#elif defined(RADIX_NEON)

#include "simd_neon.h"

#else

// Four vectors of four: SSE2 and whatever else the compiler knows.
typedef float v4 __attribute__((vector_size(16)));
typedef int32_t i4 __attribute__((vector_size(16)));
struct vf {
    v4 q[4];
};
#define RADIX_QUARTERS(expr)                       \
    do {                                           \
        vf r;                                      \
        for (int i = 0; i < 4; i++) r.q[i] = expr; \
        return r;                                  \
    } while (0)
RADIX_INLINE v4 fma4(v4 a, v4 b, v4 c) { return a * b + c; }
RADIX_INLINE v4 load4(const float* p) {
    v4 r;
    std::memcpy(&r, p, 16);
    return r;
}
RADIX_INLINE v4 set4(float x) { return v4{x, x, x, x}; }
RADIX_INLINE vf zero() { RADIX_QUARTERS(set4(0.0f)); }
RADIX_INLINE vf set1(float x) { RADIX_QUARTERS(set4(x)); }
RADIX_INLINE vf load(const float* p) { RADIX_QUARTERS(load4(p + 4 * i)); }
RADIX_INLINE void store(float* p, vf a) { std::memcpy(p, &a, 64); }
static inline vf load_n(const float* p, int n) {
    float t[16] = {0};
    for (int i = 0; i < n; i++) t[i] = p[i];
    return load(t);
}
static inline void store_n(float* p, vf a, int n) { std::memcpy(p, &a, size_t(n) * 4); }
RADIX_INLINE vf add(vf a, vf b) { RADIX_QUARTERS(a.q[i] + b.q[i]); }
RADIX_INLINE vf sub(vf a, vf b) { RADIX_QUARTERS(a.q[i] - b.q[i]); }
RADIX_INLINE vf mul(vf a, vf b) { RADIX_QUARTERS(a.q[i] * b.q[i]); }
RADIX_INLINE vf div(vf a, vf b) { RADIX_QUARTERS(a.q[i] / b.q[i]); }
RADIX_INLINE vf fma(vf a, vf b, vf c) { RADIX_QUARTERS(fma4(a.q[i], b.q[i], c.q[i])); }
RADIX_INLINE vf fnma(vf a, vf b, vf c) { RADIX_QUARTERS(fma4(-a.q[i], b.q[i], c.q[i])); }
RADIX_INLINE vf vmax(vf a, vf b) { RADIX_QUARTERS(a.q[i] > b.q[i] ? a.q[i] : b.q[i]); }
RADIX_INLINE vf vmin(vf a, vf b) { RADIX_QUARTERS(a.q[i] < b.q[i] ? a.q[i] : b.q[i]); }
RADIX_INLINE vf vabs(vf a) { RADIX_QUARTERS((v4)((i4)a.q[i] & 0x7fffffff)); }
RADIX_INLINE vf vround(vf a) { RADIX_QUARTERS((a.q[i] + set4(12582912.0f)) - set4(12582912.0f)); }
RADIX_INLINE vf times_pow2(vf a, vf n) {
    RADIX_QUARTERS(a.q[i] * (v4)((__builtin_convertvector(n.q[i], i4) + 127) << 23));
}
RADIX_INLINE vf select_lt(vf x, vf y, vf a, vf b) { RADIX_QUARTERS(x.q[i] < y.q[i] ? a.q[i] : b.q[i]); }
static inline vf keep_lanes(vf a, int lo, int hi, vf f) {
    float t[16], u[16];
    store(t, a), store(u, f);
    for (int i = 0; i < 16; i++)
        if (i < lo || i >= hi) t[i] = u[i];
    return load(t);
}
static inline float lane_tree_sum(vf a) {
    float t[16];
    store(t, a);
    for (int w = 8; w; w >>= 1)
        for (int i = 0; i < w; i++) t[i] += t[i + w];
    return t[0];
}
static inline float lane_max(vf a) {
    float t[16], m;
    store(t, a), m = t[0];
    for (int i = 1; i < 16; i++) m = t[i] > m ? t[i] : m;
    return m;
}
typedef uint16_t h4 __attribute__((vector_size(8)));
typedef uint32_t u4 __attribute__((vector_size(16)));
RADIX_INLINE vf load_bf16(const uint16_t* p) {
    vf r;
    for (int i = 0; i < 4; i++) {
        h4 h;
        std::memcpy(&h, p + 4 * i, 8);
        r.q[i] = (v4)(__builtin_convertvector(h, u4) << 16);
    }
    return r;
}
RADIX_INLINE void load_bf16_pairs(const uint16_t* p, vf& a, vf& b) {
    for (int i = 0; i < 4; i++) {
        u4 w;
        std::memcpy(&w, p + 8 * i, 16);
        a.q[i] = (v4)(w << 16), b.q[i] = (v4)(w & 0xffff0000u);
    }
}
static inline vf load_f16(const uint16_t* p) {
    float t[16];
    for (int i = 0; i < 16; i++) t[i] = f16_to_float(p[i]);
    return load(t);
}
static inline vf load_i8(const int8_t* p) {
    float t[16];
    for (int i = 0; i < 16; i++) t[i] = float(p[i]);
    return load(t);
}
static inline void store_f16(uint16_t* p, vf a) {
    float t[16];
    store(t, a);
    for (int i = 0; i < 16; i++) p[i] = float_to_f16(t[i]);
}
#undef RADIX_QUARTERS
#endif

RADIX_INLINE void store_bf16(uint16_t* p, vf a) {
#if defined(__AVX512F__)
    __m512i u = _mm512_castps_si512(a.v);
    __m512i odd = _mm512_and_si512(_mm512_srli_epi32(u, 16), _mm512_set1_epi32(1));
    __m512i r = _mm512_srli_epi32(_mm512_add_epi32(_mm512_add_epi32(u, _mm512_set1_epi32(0x7fff)), odd), 16);
    __mmask16 nan = _mm512_cmp_ps_mask(a.v, a.v, _CMP_UNORD_Q);
    r = _mm512_mask_or_epi32(r, nan, _mm512_srli_epi32(u, 16), _mm512_set1_epi32(0x40));
    _mm256_storeu_si256((__m256i*)p, _mm512_cvtepi32_epi16(r));
#elif defined(RADIX_NEON)
    store_bf16_4(p, a.a), store_bf16_4(p + 4, a.b), store_bf16_4(p + 8, a.c), store_bf16_4(p + 12, a.d);
#else
    alignas(64) float t[16];
    store(t, a);
    for (int i = 0; i < 16; i++) p[i] = float_to_bf16(t[i]);
#endif
}

#if defined(__AVX512F__)
// `join` of all lanes of each of four vectors.
template <class Join>
RADIX_INLINE void join_lanes(const vf (&x)[4], float* out, Join join) {
    const __m512 a = join(_mm512_unpacklo_ps(x[0].v, x[1].v), _mm512_unpackhi_ps(x[0].v, x[1].v));
    const __m512 b = join(_mm512_unpacklo_ps(x[2].v, x[3].v), _mm512_unpackhi_ps(x[2].v, x[3].v));
    __m512 c = join(_mm512_shuffle_ps(a, b, 0x44), _mm512_shuffle_ps(a, b, 0xee));
    c = join(c, _mm512_shuffle_f32x4(c, c, 0x4e));
    _mm_storeu_ps(out, _mm512_castps512_ps128(join(c, _mm512_shuffle_f32x4(c, c, 0xb1))));
}
#endif
// The largest lanes of four vectors.
RADIX_INLINE void lane_maxima(const vf (&x)[4], float* out) {
#if defined(__AVX512F__)
    join_lanes(x, out, [](__m512 a, __m512 b) { return _mm512_max_ps(a, b); });
#else
    for (int i = 0; i < 4; i++) out[i] = lane_max(x[i]);
#endif
}
// Sums of four vectors, of whole numbers so small that no order of additions rounds.
RADIX_INLINE void lane_sums(const vf (&x)[4], float* out) {
#if defined(__AVX512F__)
    join_lanes(x, out, [](__m512 a, __m512 b) { return _mm512_add_ps(a, b); });
#else
    for (int i = 0; i < 4; i++) out[i] = lane_tree_sum(x[i]);
#endif
}

// 16 whole numbers within [-128, 127] as bytes
RADIX_INLINE void store_i8(int8_t* p, vf a) {
#if defined(__AVX512F__)
    _mm_storeu_si128((__m128i*)p, _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(a.v)));
#elif defined(RADIX_NEON)
    const int16x8_t lo = vcombine_s16(vmovn_s32(vcvtq_s32_f32(a.a)), vmovn_s32(vcvtq_s32_f32(a.b)));
    const int16x8_t hi = vcombine_s16(vmovn_s32(vcvtq_s32_f32(a.c)), vmovn_s32(vcvtq_s32_f32(a.d)));
    vst1q_s8(p, vcombine_s8(vmovn_s16(lo), vmovn_s16(hi)));
#else
    alignas(64) float t[16];
    store(t, a);
    for (int i = 0; i < 16; i++) p[i] = int8_t(t[i]);
#endif
}

// e^x, 1 ulp or so; exactly 1 at 0 and exactly 0 below -87.3 (and at -inf); NaN of NaN.
RADIX_INLINE vf vexp(vf x) {
    vf low = set1(-87.3365f);
    vf c = vmin(set1(88.7228f), vmax(low, x));
    vf n = vround(mul(c, set1(1.44269504088896341f)));
    n = vmin(n, set1(127.0f));
    vf r = fnma(n, set1(0.693359375f), c);
    r = fnma(n, set1(-2.12194440e-4f), r);
    vf p = set1(1.9875691500e-4f);
    p = fma(p, r, set1(1.3981999507e-3f));
    p = fma(p, r, set1(8.3334519073e-3f));
    p = fma(p, r, set1(4.1665795894e-2f));
    p = fma(p, r, set1(1.6666665459e-1f));
    p = fma(p, r, set1(5.0000001201e-1f));
    p = fma(mul(r, r), p, r);
    p = times_pow2(add(p, set1(1.0f)), n);
    return select_lt(x, low, zero(), p);
}
RADIX_INLINE float first_lane(vf a) {
    alignas(64) float t[16];
    store(t, a);
    return t[0];
}
// scalar exp with the vector's arithmetic, so that merges agree wherever they run
RADIX_INLINE float exp1(float x) { return first_lane(vexp(set1(x))); }
RADIX_INLINE vf vsigmoid(vf x) { return div(set1(1.0f), add(set1(1.0f), vexp(sub(zero(), x)))); }
RADIX_INLINE vf vtanh(vf x) {
    // odd polynomial near zero, where the exponential form cancels
    vf ax = vmin(set1(20.0f), vabs(x));
    vf e = vexp(mul(ax, set1(2.0f)));
    vf big = sub(set1(1.0f), div(set1(2.0f), add(e, set1(1.0f))));
    vf z = mul(x, x);
    vf p = set1(-5.70498872745e-3f);
    p = fma(p, z, set1(2.06390887954e-2f));
    p = fma(p, z, set1(-5.37397155531e-2f));
    p = fma(p, z, set1(1.33314422036e-1f));
    p = fma(p, z, set1(-3.33332819422e-1f));
    vf small = fma(mul(p, z), x, x);
    vf signed_big = select_lt(x, zero(), sub(zero(), big), big);
    return select_lt(ax, set1(0.625f), small, signed_big);
}
// The error function: an odd polynomial below 1, Cephes' erfcf above; |error| < 2e-7.
RADIX_INLINE vf verf(vf x) {
    vf ax = vabs(x);
    // |x| < 1: odd minimax polynomial
    vf z = mul(x, x);
    vf p = set1(7.853861353153693e-5f);
    p = fma(p, z, set1(-8.010193625184903e-4f));
    p = fma(p, z, set1(5.188327685732524e-3f));
    p = fma(p, z, set1(-2.685381193529856e-2f));
    p = fma(p, z, set1(1.128358514861418e-1f));
    p = fma(p, z, set1(-3.761262582423300e-1f));
    p = fma(p, z, set1(1.128379165726710e+0f));
    vf small = mul(p, x);
    // |x| >= 1: 1 - exp(-x*x) * (1/x) * P(1/x^2), Cephes erfcf
    vf c = vmin(vmax(ax, set1(1.0f)), set1(6.0f));
    vf q = div(set1(1.0f), c);
    vf y = mul(q, q);
    vf s = set1(2.326819970068386e-2f);
    s = fma(s, y, set1(-1.387039388740657e-1f));
    s = fma(s, y, set1(3.687424674597105e-1f));
    s = fma(s, y, set1(-5.824733027278666e-1f));
    s = fma(s, y, set1(6.210004621745983e-1f));
    s = fma(s, y, set1(-4.944515323274145e-1f));
    s = fma(s, y, set1(3.404879937665872e-1f));
    s = fma(s, y, set1(-2.741127028184656e-1f));
    s = fma(s, y, set1(5.638259427386472e-1f));
    vf t = set1(-1.047766399936249e+1f);
    t = fma(t, y, set1(1.297719955372516e+1f));
    t = fma(t, y, set1(-7.495518717768503e+0f));
    t = fma(t, y, set1(2.921019019210786e+0f));
    t = fma(t, y, set1(-1.015265279202700e+0f));
    t = fma(t, y, set1(4.218463358204948e-1f));
    t = fma(t, y, set1(-2.820767439740514e-1f));
    t = fma(t, y, set1(5.641895067754075e-1f));
    vf poly = select_lt(c, set1(2.0f), s, t);
    vf e = vexp(sub(zero(), mul(c, c)));
    vf big = sub(set1(1.0f), mul(mul(e, q), poly));
    vf signed_big = select_lt(x, zero(), sub(zero(), big), big);
    return select_lt(ax, set1(1.0f), small, signed_big);
}

// Element types of caches and tables.
enum : int { DT_F32 = 0, DT_BF16 = 1, DT_F16 = 2, DT_I8 = 3, DT_E4M3 = 4, DT_E5M2 = 5, DT_I4 = 6 };
RADIX_INLINE constexpr int dtype_size(int dt) { return dt == DT_F32 ? 4 : dt >= DT_I8 ? 1 : 2; }
RADIX_INLINE float load_scalar(const void* p, int dt, int64_t i) {
    switch (dt) {
        case DT_F32: return ((const float*)p)[i];
        case DT_BF16: return bf16_to_float(((const uint16_t*)p)[i]);
        case DT_F16: return f16_to_float(((const uint16_t*)p)[i]);
        default: return float(((const int8_t*)p)[i]);
    }
}
RADIX_INLINE vf load_any(const void* p, int dt, int64_t i) {
    return dt == DT_F32    ? load((const float*)p + i)
           : dt == DT_BF16 ? load_bf16((const uint16_t*)p + i)
                           : load_f16((const uint16_t*)p + i);
}

}  // namespace RADIX_ISA
}  // namespace radix

// How each weight format turns 32 stored weights into two float vectors.
// A reader walks one panel; `at(k)` gives outputs 0-15 in a and 16-31 in b of step k of its arithmetic.
#pragma once
#include "../common/api.h"
#include "rows.h"

namespace radix {
namespace RADIX_ISA {

RADIX_INLINE int64_t panels_of(const Weight& w) { return (w.n + PANEL - 1) / PANEL; }

// fp32 arithmetic: an input a step.
struct FloatStep {
    static constexpr int64_t INPUTS = 1;
    static RADIX_INLINE vf add(vf sum, vf x, vf w) { return fma(x, w, sum); }
    // The inputs of steps i to i + 16 of a row of k, each as a dword; zero past the last one.
    static RADIX_INLINE vf inputs(const float* x, int64_t i, int64_t k) {
        return load_n(x + i, lanes_at(i, k));
    }
};
template <class Step>
RADIX_INLINE int64_t steps_of(int64_t k) {
    return (k + Step::INPUTS - 1) / Step::INPUTS;
}
template <class W>
RADIX_INLINE int64_t steps_of(const Weight& w) {
    return steps_of<typename W::Step>(w.k);
}

struct ReadF32 {
    using Step = FloatStep;
    static constexpr int FORMAT = W_F32, WIDE = 4;
    static constexpr bool IS_WIDE = true;  // stored as it is multiplied
    const float* p;
    RADIX_INLINE void open(const Weight& w, int64_t panel, int64_t k) {
        p = (const float*)w.data + (panel * w.k + k) * PANEL;
    }
    RADIX_INLINE void group(const Weight&, int64_t, int64_t) {}
    RADIX_INLINE const char* address(int64_t k) const { return (const char*)(p + k * PANEL); }
    RADIX_INLINE void at(int64_t k, vf& a, vf& b) const {
        a = load(p + k * PANEL), b = load(p + k * PANEL + 16);
    }
};
struct ReadBf16 {
    using Step = FloatStep;
    static constexpr int FORMAT = W_BF16, WIDE = 4;
    static constexpr bool IS_WIDE = false;
    const uint16_t* p;
    RADIX_INLINE void open(const Weight& w, int64_t panel, int64_t k) {
        p = (const uint16_t*)w.data + (panel * w.k + k) * PANEL;
    }
    RADIX_INLINE void group(const Weight&, int64_t, int64_t) {}
    RADIX_INLINE const char* address(int64_t k) const { return (const char*)(p + k * PANEL); }
    RADIX_INLINE void at(int64_t k, vf& a, vf& b) const { load_bf16_pairs(p + k * PANEL, a, b); }
};
struct ReadF16 {
    using Step = FloatStep;
    static constexpr int FORMAT = W_F16, WIDE = 4;
    static constexpr bool IS_WIDE = false;
    const uint16_t* p;
    RADIX_INLINE void open(const Weight& w, int64_t panel, int64_t k) {
        p = (const uint16_t*)w.data + (panel * w.k + k) * PANEL;
    }
    RADIX_INLINE void group(const Weight&, int64_t, int64_t) {}
    RADIX_INLINE const char* address(int64_t k) const { return (const char*)(p + k * PANEL); }
    RADIX_INLINE void at(int64_t k, vf& a, vf& b) const {
        a = load_f16(p + k * PANEL), b = load_f16(p + k * PANEL + 16);
    }
};
struct ReadInt8 {  // the channel's scale waits for the epilogue
    using Step = FloatStep;
    static constexpr int FORMAT = W_INT8, WIDE = 4;
    static constexpr bool IS_WIDE = false;
    const int8_t* p;
    RADIX_INLINE void open(const Weight& w, int64_t panel, int64_t k) {
        p = (const int8_t*)w.data + (panel * w.k + k) * PANEL;
    }
    RADIX_INLINE void group(const Weight&, int64_t, int64_t) {}
    RADIX_INLINE const char* address(int64_t k) const { return (const char*)(p + k * PANEL); }
    RADIX_INLINE void at(int64_t k, vf& a, vf& b) const {
        a = load_i8(p + k * PANEL), b = load_i8(p + k * PANEL + 16);
    }
};

// 16 nibbles number j of 16 dwords, as floats 0..15
RADIX_INLINE vf nibbles(const uint32_t* p, int j) {
#if defined(__AVX512F__)
    __m512 table = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    __m512i v = _mm512_loadu_si512(p);
    return {_mm512_permutexvar_ps(_mm512_srli_epi32(v, unsigned(4 * j)), table)};
#elif defined(__AVX2__)
    __m256i m = _mm256_set1_epi32(15), a = _mm256_loadu_si256((const __m256i*)p),
            b = _mm256_loadu_si256((const __m256i*)(p + 8));
    return {_mm256_cvtepi32_ps(_mm256_and_si256(_mm256_srli_epi32(a, 4 * j), m)),
            _mm256_cvtepi32_ps(_mm256_and_si256(_mm256_srli_epi32(b, 4 * j), m))};
#elif defined(RADIX_NEON)
    const int32x4_t down = vdupq_n_s32(-4 * j);
    auto four = [&](const uint32_t* q) {
        return vcvtq_f32_u32(vandq_u32(vshlq_u32(vld1q_u32(q), down), vdupq_n_u32(15)));
    };
    return {four(p), four(p + 4), four(p + 8), four(p + 12)};
#else
    float t[16];
    for (int i = 0; i < 16; i++) t[i] = float((p[i] >> (4 * j)) & 15u);
    return load(t);
#endif
}

struct ReadInt4 {  // eight k in each dword of an output; weight = q * scale + offset
    using Step = FloatStep;
    static constexpr int FORMAT = W_INT4, WIDE = 2;
    static constexpr bool IS_WIDE = false;
    const uint32_t* p;
    vf sa, sb, oa, ob;
    RADIX_INLINE void open(const Weight& w, int64_t panel, int64_t k) {
        p = (const uint32_t*)w.data + (panel * (w.k / 8) + k / 8) * PANEL;
        group(w, panel, k);
    }
    RADIX_INLINE void group(const Weight& w, int64_t panel, int64_t k) {
        int64_t at = (panel * (w.k / w.group) + k / w.group) * PANEL;
        sa = load(w.scale + at), sb = load(w.scale + at + 16);
        oa = load(w.offset + at), ob = load(w.offset + at + 16);
    }
    RADIX_INLINE const char* address(int64_t k) const { return (const char*)(p + (k / 8) * PANEL); }
    RADIX_INLINE void at(int64_t k, vf& a, vf& b) const {
        const uint32_t* q = p + (k / 8) * PANEL;
        a = fma(nibbles(q, int(k & 7)), sa, oa);
        b = fma(nibbles(q + 16, int(k & 7)), sb, ob);
    }
};

}  // namespace RADIX_ISA
}  // namespace radix

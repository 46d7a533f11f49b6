// Weights of attention as bfloat16: e to the scores, from a maximum that follows them lazily.
#pragma once
#include "../common/simd.h"

#include <immintrin.h>

namespace radix {
namespace RADIX_ISA {

// Exponents are taken from a row's maximum, which follows the scores only when they have outgrown it by
// this much: weights reach e^8 instead of 1, and sums are hardly ever scaled anew.
constexpr float GROWTH = 8.0f;

// Denormals are zeros while it lives, as they are to products of bfloat16.
class FlushDenormals {
  public:
    FlushDenormals() : before(_mm_getcsr()) { _mm_setcsr(before | 0x8040); }
    ~FlushDenormals() { _mm_setcsr(before); }
    FlushDenormals(const FlushDenormals&) = delete;
    FlushDenormals& operator=(const FlushDenormals&) = delete;

  private:
    const unsigned before;
};

// 32 numbers, rounded to bfloat16
RADIX_INLINE void round_to(vf x0, vf x1, uint16_t* out) {
    const __m512bh h = _mm512_cvtne2ps_pbh(x1.v, x0.v);
    std::memcpy(out, &h, 64);
}
// e^x of x <= 0, as 2^(n + f) with |f| <= 1/2: exactly 1 at 0, 0 where x is lower than floats reach. The
// polynomial (Chebyshev, degree 5) is within 2.4e-7; numbers that are added and taken away round n.
RADIX_INLINE vf exp_weight(vf x) {
    const __m512 log2e = _mm512_set1_ps(1.44269504088896341f), rounder = _mm512_set1_ps(12582912.0f);
    const __m512 c = _mm512_max_ps(_mm512_set1_ps(-200.0f), x.v);  // NaN stays
    const __m512 n = _mm512_sub_ps(_mm512_fmadd_ps(c, log2e, rounder), rounder),
                 f = _mm512_fmsub_ps(c, log2e, n);
    __m512 p = _mm512_set1_ps(0.001339086681f);
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(0.009666373953f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(0.05550356954f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(0.2402234823f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(0.6931471825f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(1.0f));
    return {_mm512_scalef_ps(p, n)};
}

}  // namespace RADIX_ISA
}  // namespace radix

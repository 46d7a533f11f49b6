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
// e^x of x <= 0, as 2^(whole + part): exactly 1 at 0, 0 where x is lower than floats reach; NaN stays. The
// polynomial of the part (minimax, degree 3) is within 8.6e-5, a fiftieth of what rounding to bfloat16 takes.
RADIX_INLINE vf exp_weight(vf x) {
    const __m512 t = _mm512_mul_ps(x.v, _mm512_set1_ps(1.44269504088896341f));
    const __m512 part = _mm512_reduce_ps(t, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
    __m512 p = _mm512_set1_ps(0.077067019f);
    p = _mm512_fmadd_ps(p, part, _mm512_set1_ps(0.227645017f));
    p = _mm512_fmadd_ps(p, part, _mm512_set1_ps(0.695116781f));
    p = _mm512_fmadd_ps(p, part, _mm512_set1_ps(1.0f));
    return {_mm512_scalef_ps(p, t)};
}

}  // namespace RADIX_ISA
}  // namespace radix

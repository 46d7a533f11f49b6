// What the machine can do at most, measured by the instructions that the kernels use. A thread's work:
// kind 0 reads `bytes` of `memory` (returns bytes), 1 does multiply-adds (returns FLOP).
#include "../common/api.h"
#include "../common/simd.h"

namespace radix {
namespace RADIX_ISA {

#if defined(__AVX512F__)
constexpr int CHAINS = 20;
#elif defined(__AVX2__)
constexpr int CHAINS = 6;
#else
constexpr int CHAINS = 4;
#endif

double ceiling(int kind, const float* memory, size_t bytes, float* sink) {
    vf acc[CHAINS];
    for (int i = 0; i < CHAINS; i++) acc[i] = set1(float(i));
    if (kind == 0) {
        vf s[4] = {zero(), zero(), zero(), zero()};
        const size_t n = bytes / 256;
        for (size_t i = 0; i < n; i++)
            for (int j = 0; j < 4; j++) s[j] = vmax(s[j], load(memory + i * 64 + j * 16));
        *sink = lane_max(vmax(vmax(s[0], s[1]), vmax(s[2], s[3])));
        return double(n) * 256;
    }
    vf a = set1(0.999f), b = set1(*sink);
    const int64_t rounds = int64_t(bytes);
    for (int64_t r = 0; r < rounds; r++) {
        RADIX_UNROLL(20)
        for (int i = 0; i < CHAINS; i++) acc[i] = fma(acc[i], a, b);
    }
    vf total = zero();
    for (int i = 0; i < CHAINS; i++) total = add(total, acc[i]);
    *sink = lane_tree_sum(total);
    return double(rounds) * CHAINS * 32;
}

}  // namespace RADIX_ISA
}  // namespace radix

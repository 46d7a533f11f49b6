// A block of attention for few rows of a bfloat16 cache, by the instruction itself: half of the multiply-adds
// of attention_few.h and a permutation for two conversions, with the same bits.
#pragma once
#include "attention_few.h"

namespace radix {
namespace RADIX_ISA {

RADIX_INLINE vf add_pairs(vf sum, vf x, vf y) {
    return {_mm512_dpbf16_ps(sum.v, (__m512bh)x.v, (__m512bh)y.v)};
}
// Places of pairs: of number i and number i + `apart`, from i = `first` on.
RADIX_INLINE __m512i pair_places(int first, int apart) {
    const __m512i count = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15),
                  even = _mm512_add_epi32(count, _mm512_set1_epi32(first));
    return _mm512_or_si512(even, _mm512_slli_epi32(_mm512_add_epi32(even, _mm512_set1_epi32(apart)), 16));
}
// Sixteen pairs of 32 numbers: of each of the first sixteen and the one sixteen places on.
RADIX_INLINE vf pairs_of_halves(__m512i numbers) {
    return {_mm512_castsi512_ps(_mm512_permutexvar_epi16(pair_places(0, 16), numbers))};
}
// Of each of sixteen numbers of a, from `first` on, and that of b at the same place.
RADIX_INLINE vf pairs_of(__m512i a, __m512i b, int first) {
    return {_mm512_castsi512_ps(_mm512_permutex2var_epi16(a, pair_places(first, 32), b))};
}

struct PairFew : FewKernels<PairChain> {
    static constexpr bool takes_pairs(int dtype) { return dtype == DT_BF16; }

    template <int R, int N>
    static void pair_scores_of(const uint16_t* q, int k_dim, const FewTile* tile, float* p) {
        vf sum[R][N];
        for (int r = 0; r < R; r++)
            for (int t = 0; t < N; t++) sum[r][t] = zero();
        for (int d0 = 0; d0 < k_dim; d0 += STEP, q += R * STEP) {
            const int end = d0 + STEP < k_dim ? d0 + STEP : k_dim;
            RADIX_UNROLL(2)
            for (int d = d0; d < end; d += 2) {
                vf k[N];
                for (int t = 0; t < N; t++) {
                    k[t] = pairs_of_halves(_mm512_loadu_si512((const uint16_t*)tile[t].k + d * TILE));
                    prefetch_line<DT_BF16>(tile[t].next_k, d * TILE);
                }
                RADIX_UNROLL(8)
                for (int r = 0; r < R; r++) {
                    const vf x = pair_at(q + r * STEP + d - d0);
                    for (int t = 0; t < N; t++) sum[r][t] = add_pairs(sum[r][t], x, k[t]);
                }
            }
        }
        for (int r = 0; r < R; r++)
            for (int t = 0; t < N; t++) store(p + r * 4 * TILE + t * TILE, sum[r][t]);
    }
    template <int R>
    static void pair_scores(const FewFactors& q, int k_dim, const FewTile* tile, float* p) {
        constexpr int MOST = R > 4 ? 2 : 4;
        using Fn = void (*)(const uint16_t*, int, const FewTile*, float*);
        static constexpr Fn OF[] = {pair_scores_of<R, 1>, pair_scores_of<R, 2>,
                                    pair_scores_of<R, (MOST > 2 ? 3 : 1)>,
                                    pair_scores_of<R, (MOST > 2 ? 4 : 1)>};
        each_run<R, MOST>(tile, p, [&](int n, int t) { OF[n - 1](q.pairs, k_dim, tile + t, p + t * TILE); });
    }

    // sums[row] += weights . v of the tokens of two tiles, N vectors of channels
    template <int R, int N>
    static void pair_sums_of(float* state, int stride, const FewFactors& weight, const FewTile* tile,
                             int64_t width, int at) {
        vf sum[R][N];
        for (int r = 0; r < R; r++)
            for (int c = 0; c < N; c++) sum[r][c] = load(state + r * stride + at + c * 16);
        for (int i = 0; i < 2; i++) {
            const uint16_t *v = (const uint16_t*)tile[i].v + at, *w = weight.pairs + i * TILE;
            for (int t = 0; t < tile[i].count; t += 2, v += 2 * width, w += 2) {
                const bool is_alone = t + 1 == tile[i].count;
                vf x[N];
                read_pairs<N>(v, is_alone ? nullptr : v + width, x);
                for (int c = 0; c < N; c += 2)
                    for (int k = 0; k < 2; k++)
                        prefetch_line<DT_BF16>(tile[i].next_v, (t + k) * width + at + c * 16);
                RADIX_UNROLL(8)
                for (int r = 0; r < R; r++) {
                    const vf y = pair_at(w + r * weight.stride);
                    for (int c = 0; c < N; c++) sum[r][c] = add_pairs(sum[r][c], y, x[c]);
                }
            }
        }
        for (int r = 0; r < R; r++)
            for (int c = 0; c < N; c++) store(state + r * stride + at + c * 16, sum[r][c]);
    }
    template <int R>
    static void pair_sums(float* state, int stride, const FewFactors& weight, const FewTile* tile,
                          int64_t width, int v_dim) {
        constexpr int N = R > 4 ? 2 : 4;
        int at = 0;
        for (; at + N * 16 <= v_dim; at += N * 16) pair_sums_of<R, N>(state, stride, weight, tile, width, at);
        for (; at < v_dim; at += 16) pair_sums_of<R, 1>(state, stride, weight, tile, width, at);
    }

    static const Scores* scores_of_type(int of_type) { return of_type ? SCORES[of_type] : PAIR_SCORES; }
    static const Sums* sums_of_type(int of_type) { return of_type ? SUMS[of_type] : PAIR_SUMS; }

  private:
    static RADIX_INLINE vf pair_at(const uint16_t* x) {
        float both;
        std::memcpy(&both, x, 4);
        return set1(both);
    }
    // Channels of two tokens; `b` null: the second one is zeros.
    template <int N>
    static RADIX_INLINE void read_pairs(const uint16_t* a, const uint16_t* b, vf (&x)[N]) {
        if constexpr (N == 1) {
            const __m256i low = _mm256_loadu_si256((const __m256i*)a),
                          high = b ? _mm256_loadu_si256((const __m256i*)b) : _mm256_setzero_si256();
            x[0] = pairs_of_halves(_mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1));
        } else
            for (int c = 0; c < N; c += 2) {
                const __m512i low = _mm512_loadu_si512(a + c * 16),
                              high = b ? _mm512_loadu_si512(b + c * 16) : _mm512_setzero_si512();
                x[c] = pairs_of(low, high, 0), x[c + 1] = pairs_of(low, high, 16);
            }
    }
    static constexpr Scores PAIR_SCORES[FEW] = {pair_scores<1>, pair_scores<2>, pair_scores<3>,
                                                pair_scores<4>, pair_scores<5>, pair_scores<6>,
                                                pair_scores<7>, pair_scores<8>};
    static constexpr Sums PAIR_SUMS[FEW] = {pair_sums<1>, pair_sums<2>, pair_sums<3>, pair_sums<4>,
                                            pair_sums<5>, pair_sums<6>, pair_sums<7>, pair_sums<8>};
};

}  // namespace RADIX_ISA
}  // namespace radix

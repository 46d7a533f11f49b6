// A block of attention for few rows, in vectors, with the bits of matrix tiles: decode is bound by
// memory, and vectors read the cache in place.
//
// One multiplication of tiles adds 32 products in two chains, of the even and of the odd ones, and
// then both to its sum; FMAs in that order give the same bits, denormals flushed as tiles flush them.
#pragma once
#include "kv.h"

namespace radix {
namespace RADIX_ISA {

constexpr int FEW = 8, STEP = 32;  // rows; products of one multiplication

struct FewTile {
    const void *k, *v;            // null: absent
    const void *next_k, *next_v;  // what a later block reads, or these again
    int count;                    // tokens
};
// p[row][64] of tiles [t0, t0 + N) = q . k; q is float32, rounded to bfloat16, `k_pad` apart
template <int R, int DTYPE, int N>
static void few_scores_of(const float* q, int k_dim, int k_pad, const FewTile* tile, float* p) {
    constexpr int LINE = 4 / dtype_size(DTYPE);  // of K: as many channels
    vf sum[R][N];
    for (int r = 0; r < R; r++)
        for (int t = 0; t < N; t++) sum[r][t] = zero();
    for (int d0 = 0; d0 < k_dim; d0 += STEP) {
        const int end = d0 + STEP < k_dim ? d0 + STEP : k_dim;
        vf even[R][N], odd[R][N];
        for (int r = 0; r < R; r++)
            for (int t = 0; t < N; t++) even[r][t] = odd[r][t] = zero();
        for (int d = d0; d < end; d += 2) {
            vf a[N], b[N];
            for (int t = 0; t < N; t++) {
                a[t] = load_kv<DTYPE>(tile[t].k, d * TILE), b[t] = load_kv<DTYPE>(tile[t].k, (d + 1) * TILE);
                if (d % LINE == 0) prefetch_line<DTYPE>(tile[t].next_k, d * TILE);
                if (LINE == 1) prefetch_line<DTYPE>(tile[t].next_k, (d + 1) * TILE);
            }
            RADIX_UNROLL(8)
            for (int r = 0; r < R; r++) {
                const vf x = set1(q[r * k_pad + d]), y = set1(q[r * k_pad + d + 1]);
                for (int t = 0; t < N; t++)
                    even[r][t] = fma(x, a[t], even[r][t]), odd[r][t] = fma(y, b[t], odd[r][t]);
            }
        }
        for (int r = 0; r < R; r++)
            for (int t = 0; t < N; t++) sum[r][t] = add(sum[r][t], add(even[r][t], odd[r][t]));
    }
    for (int r = 0; r < R; r++)
        for (int t = 0; t < N; t++) store(p + r * 4 * TILE + t * TILE, sum[r][t]);
}

// Present tiles are neighbours; as many are read together as registers hold sums for.
template <int R, int DTYPE>
static void few_scores(const float* q, int k_dim, int k_pad, const FewTile* tile, float* p) {
    constexpr int MAX_TILES = R > 4 ? 1 : R > 2 ? 2 : 4;
    for (int t = 0, n; t < 4; t += n) {
        for (n = 0; n < MAX_TILES && t + n < 4 && tile[t + n].k;) n++;
        if (n == 0)
            for (int r = n++; r < R; r++) store(p + r * 4 * TILE + t * TILE, zero());
        else if (n == 1)
            few_scores_of<R, DTYPE, 1>(q, k_dim, k_pad, tile + t, p + t * TILE);
        else if constexpr (MAX_TILES > 1) {
            if (n == 2)
                few_scores_of<R, DTYPE, 2>(q, k_dim, k_pad, tile + t, p + t * TILE);
            else if constexpr (MAX_TILES > 2) {
                if (n == 3)
                    few_scores_of<R, DTYPE, 3>(q, k_dim, k_pad, tile + t, p + t * TILE);
                else
                    few_scores_of<R, DTYPE, 4>(q, k_dim, k_pad, tile + t, p + t * TILE);
            }
        }
    }
}

// Tokens of V and their weights to two chains, the even ones and the odd ones.
template <int R, int DTYPE, int N>
struct FewChains {
    vf even[R][N], odd[R][N];
    RADIX_INLINE static void add_token(vf (&chain)[R][N], const float* weight, const FewTile& from,
                                       int64_t at) {
        vf x[N];
        for (int c = 0; c < N; c++) x[c] = load_kv<DTYPE>(from.v, at + c * 16);
        for (int c = 0; c < N * 16; c += 64 / dtype_size(DTYPE)) prefetch_line<DTYPE>(from.next_v, at + c);
        RADIX_UNROLL(8)
        for (int r = 0; r < R; r++) {
            const vf w = set1(weight[r * 4 * TILE]);
            for (int c = 0; c < N; c++) chain[r][c] = fma(w, x[c], chain[r][c]);
        }
    }
    RADIX_INLINE void add_pairs(const float* weight, const FewTile& from, int count, int64_t width,
                                int64_t at) {
        for (int t = 0; t + 1 < count; t += 2)
            add_token(even, weight + t, from, t * width + at),
                add_token(odd, weight + t + 1, from, (t + 1) * width + at);
    }
};

// sums[row] += weights . v of the tokens of two tiles; weights are float32, rounded to bfloat16
template <int R, int DTYPE, int N>
static void few_sums_of(float* state, int stride, const float* weight, const FewTile* tile, int64_t width,
                        int at) {
    FewChains<R, DTYPE, N> all;
    for (int r = 0; r < R; r++)
        for (int c = 0; c < N; c++) all.even[r][c] = all.odd[r][c] = zero();
    const int first = tile[0].count, second = tile[1].count;
    if (first == TILE && second == TILE) {  // both as one loop, all in registers
        all.add_pairs(weight, tile[0], TILE, width, at);
        all.add_pairs(weight + TILE, tile[1], TILE, width, at);
    } else {
        all.add_pairs(weight, tile[0], first, width, at);
        if (first % 2) all.add_token(all.even, weight + first - 1, tile[0], (first - 1) * width + at);
        all.add_pairs(weight + TILE, tile[1], second, width, at);
        if (second % 2)
            all.add_token(all.even, weight + TILE + second - 1, tile[1], (second - 1) * width + at);
    }
    for (int r = 0; r < R; r++)
        for (int c = 0; c < N; c++) {
            float* to = state + r * stride + at + c * 16;
            store(to, add(load(to), add(all.even[r][c], all.odd[r][c])));
        }
}

template <int R, int DTYPE>
static void few_sums(float* state, int stride, const float* weight, const FewTile* tile, int64_t width,
                     int v_dim) {
    constexpr int N = R > 4 ? 1 : R > 2 ? 2 : 4;
    int at = 0;
    for (; at + N * 16 <= v_dim; at += N * 16)
        few_sums_of<R, DTYPE, N>(state, stride, weight, tile, width, at);
    for (; at < v_dim; at += 16) few_sums_of<R, DTYPE, 1>(state, stride, weight, tile, width, at);
}

using FewScores = void (*)(const float*, int, int, const FewTile*, float*);
using FewSums = void (*)(float*, int, const float*, const FewTile*, int64_t, int);
#define RADIX_FEW(f, dtype) \
    {f<1, dtype>, f<2, dtype>, f<3, dtype>, f<4, dtype>, f<5, dtype>, f<6, dtype>, f<7, dtype>, f<8, dtype>}
// [bfloat16, int8, e4m3, e5m2][rows - 1]
static const FewScores FEW_SCORES[4][FEW] = {RADIX_FEW(few_scores, DT_BF16), RADIX_FEW(few_scores, DT_I8),
                                             RADIX_FEW(few_scores, DT_E4M3), RADIX_FEW(few_scores, DT_E5M2)};
static const FewSums FEW_SUMS[4][FEW] = {RADIX_FEW(few_sums, DT_BF16), RADIX_FEW(few_sums, DT_I8),
                                         RADIX_FEW(few_sums, DT_E4M3), RADIX_FEW(few_sums, DT_E5M2)};
#undef RADIX_FEW

}  // namespace RADIX_ISA
}  // namespace radix

// A block of attention for few rows, in vectors, with the bits of products of bfloat16 pairs: decode is
// bound by memory, and vectors read the cache in place. FMAs in the order of the instruction give the same
// bits, denormals flushed as it flushes them.
#pragma once
#include "kv.h"

namespace radix {
namespace RADIX_ISA {

constexpr int FEW = 8, STEP = 32;  // rows; products of one multiplication

// Sums of R rows and N vectors in the order of matrix tiles: one multiplication adds 32 products in two
// chains, of the even and of the odd ones, and then both to its sum.
template <int R, int N>
struct TileChains {
    vf sum[R][N], even[R][N], odd[R][N];
    RADIX_INLINE void begin_step() {
        for (int r = 0; r < R; r++)
            for (int i = 0; i < N; i++) even[r][i] = odd[r][i] = zero();
    }
    RADIX_INLINE void end_step() {
        for (int r = 0; r < R; r++)
            for (int i = 0; i < N; i++) sum[r][i] = add(sum[r][i], add(even[r][i], odd[r][i]));
    }
    RADIX_INLINE void add_even(int r, int i, vf x, vf y) { even[r][i] = fma(x, y, even[r][i]); }
    RADIX_INLINE void add_odd(int r, int i, vf x, vf y) { odd[r][i] = fma(x, y, odd[r][i]); }
};
// In the order of dot products of pairs: one chain, of each pair first the odd product.
template <int R, int N>
struct PairChain {
    vf sum[R][N];
    RADIX_INLINE void begin_step() {}
    RADIX_INLINE void end_step() {}
    RADIX_INLINE void add_even(int r, int i, vf x, vf y) { sum[r][i] = fma(x, y, sum[r][i]); }
    RADIX_INLINE void add_odd(int r, int i, vf x, vf y) { sum[r][i] = fma(x, y, sum[r][i]); }
};

struct FewTile {
    const void *k, *v;            // null: absent
    const void *next_k, *next_v;  // what a later block reads, or these again
    int count;                    // tokens
};

// Queries [k_dim / 32][R][32] or weights [R][64], rounded to bfloat16: as float32, where conversions of the
// cache are met by them, and as bfloat16, whose weights are `stride` apart from row to row.
struct FewFactors {
    const float* wide;
    const uint16_t* pairs;
    int stride = 0;
    FewFactors from(int token) const { return {wide + token, pairs + token, stride}; }
};

// What few rows need of an order of sums.
template <template <int, int> class Chains>
struct FewKernels {
    // p[row][64] of N tiles = q . k
    template <int R, int DTYPE, int N>
    static void scores_of(const float* q, int k_dim, const FewTile* tile, float* p) {
        constexpr int LINE = 4 / dtype_size(DTYPE);  // of K: as many channels
        Chains<R, N> all;
        for (int r = 0; r < R; r++)
            for (int t = 0; t < N; t++) all.sum[r][t] = zero();
        for (int d0 = 0; d0 < k_dim; d0 += STEP, q += R * STEP) {
            const int end = d0 + STEP < k_dim ? d0 + STEP : k_dim;
            all.begin_step();
            for (int d = d0; d < end; d += 2) {
                vf a[N], b[N];
                for (int t = 0; t < N; t++) {
                    a[t] = load_kv<DTYPE>(tile[t].k, d * TILE),
                    b[t] = load_kv<DTYPE>(tile[t].k, (d + 1) * TILE);
                    if (d % LINE == 0) prefetch_line<DTYPE>(tile[t].next_k, d * TILE);
                    if (LINE == 1) prefetch_line<DTYPE>(tile[t].next_k, (d + 1) * TILE);
                }
                RADIX_UNROLL(8)
                for (int r = 0; r < R; r++) {
                    const vf x = set1(q[r * STEP + d - d0]), y = set1(q[r * STEP + d - d0 + 1]);
                    for (int t = 0; t < N; t++) all.add_odd(r, t, y, b[t]), all.add_even(r, t, x, a[t]);
                }
            }
            all.end_step();
        }
        for (int r = 0; r < R; r++)
            for (int t = 0; t < N; t++) store(p + r * 4 * TILE + t * TILE, all.sum[r][t]);
    }

    // Present tiles are neighbours: f(n, t) for n of them from tile t on, `MOST` at a time.
    template <int R, int MOST, class F>
    static RADIX_INLINE void each_run(const FewTile* tile, float* p, F f) {
        for (int t = 0, n; t < 4; t += n) {
            for (n = 0; n < MOST && t + n < 4 && tile[t + n].k;) n++;
            if (n)
                f(n, t);
            else
                for (int r = n++; r < R; r++) store(p + r * 4 * TILE + t * TILE, zero());
        }
    }

    // As many are read together as registers hold sums for.
    template <int R, int DTYPE>
    static void scores(const FewFactors& q, int k_dim, const FewTile* tile, float* p) {
        constexpr int MAX_TILES = R > 4 ? 1 : R > 2 ? 2 : 4;
        using Fn = void (*)(const float*, int, const FewTile*, float*);
        static constexpr Fn OF[] = {scores_of<R, DTYPE, 1>, scores_of<R, DTYPE, (MAX_TILES > 1 ? 2 : 1)>,
                                    scores_of<R, DTYPE, (MAX_TILES > 2 ? 3 : 1)>,
                                    scores_of<R, DTYPE, (MAX_TILES > 2 ? 4 : 1)>};
        each_run<R, MAX_TILES>(tile, p,
                               [&](int n, int t) { OF[n - 1](q.wide, k_dim, tile + t, p + t * TILE); });
    }

    // Tokens of V and their weights to sums.
    template <int R, int DTYPE, int N>
    struct Tokens {
        Chains<R, N> all;
        template <bool IS_ODD>
        RADIX_INLINE void add_token(const float* weight, const FewTile& from, int64_t at) {
            vf x[N];
            for (int c = 0; c < N; c++) x[c] = load_kv<DTYPE>(from.v, at + c * 16);
            for (int c = 0; c < N * 16; c += 64 / dtype_size(DTYPE))
                prefetch_line<DTYPE>(from.next_v, at + c);
            RADIX_UNROLL(8)
            for (int r = 0; r < R; r++) {
                const vf w = set1(weight[r * 4 * TILE]);
                for (int c = 0; c < N; c++) IS_ODD ? all.add_odd(r, c, w, x[c]) : all.add_even(r, c, w, x[c]);
            }
        }
        RADIX_INLINE void add_pairs(const float* weight, const FewTile& from, int count, int64_t width,
                                    int64_t at) {
            for (int t = 0; t + 1 < count; t += 2)
                add_token<true>(weight + t + 1, from, (t + 1) * width + at),
                    add_token<false>(weight + t, from, t * width + at);
        }
        RADIX_INLINE void add_tokens(const float* weight, const FewTile& from, int64_t width, int64_t at) {
            add_pairs(weight, from, from.count, width, at);
            const int last = from.count - 1;
            if (from.count % 2) add_token<false>(weight + last, from, last * width + at);
        }
    };

    // sums[row] += weights . v of the tokens of two tiles
    template <int R, int DTYPE, int N>
    static void sums_of(float* state, int stride, const float* weight, const FewTile* tile, int64_t width,
                        int at) {
        Tokens<R, DTYPE, N> tokens;
        for (int r = 0; r < R; r++)
            for (int c = 0; c < N; c++) tokens.all.sum[r][c] = load(state + r * stride + at + c * 16);
        tokens.all.begin_step();
        if (tile[0].count == TILE && tile[1].count == TILE) {  // both as one loop, all in registers
            tokens.add_pairs(weight, tile[0], TILE, width, at);
            tokens.add_pairs(weight + TILE, tile[1], TILE, width, at);
        } else
            for (int i = 0; i < 2; i++) tokens.add_tokens(weight + i * TILE, tile[i], width, at);
        tokens.all.end_step();
        for (int r = 0; r < R; r++)
            for (int c = 0; c < N; c++) store(state + r * stride + at + c * 16, tokens.all.sum[r][c]);
    }

    template <int R, int DTYPE>
    static void sums(float* state, int stride, const FewFactors& weight, const FewTile* tile, int64_t width,
                     int v_dim) {
        constexpr int N = R > 4 ? 1 : R > 2 ? 2 : 4;
        int at = 0;
        for (; at + N * 16 <= v_dim; at += N * 16)
            sums_of<R, DTYPE, N>(state, stride, weight.wide, tile, width, at);
        for (; at < v_dim; at += 16) sums_of<R, DTYPE, 1>(state, stride, weight.wide, tile, width, at);
    }

    using Scores = void (*)(const FewFactors&, int, const FewTile*, float*);
    using Sums = void (*)(float*, int, const FewFactors&, const FewTile*, int64_t, int);
#define RADIX_FEW(f, dtype) \
    {f<1, dtype>, f<2, dtype>, f<3, dtype>, f<4, dtype>, f<5, dtype>, f<6, dtype>, f<7, dtype>, f<8, dtype>}
    // [bfloat16, int8, e4m3, e5m2][rows - 1]
    static constexpr Scores SCORES[4][FEW] = {RADIX_FEW(scores, DT_BF16), RADIX_FEW(scores, DT_I8),
                                              RADIX_FEW(scores, DT_E4M3), RADIX_FEW(scores, DT_E5M2)};
    static constexpr Sums SUMS[4][FEW] = {RADIX_FEW(sums, DT_BF16), RADIX_FEW(sums, DT_I8),
                                          RADIX_FEW(sums, DT_E4M3), RADIX_FEW(sums, DT_E5M2)};
#undef RADIX_FEW
    // Whether they read a cache of this type without `wide` factors.
    static constexpr bool takes_pairs(int) { return false; }
    static const Scores* scores_of_type(int of_type) { return SCORES[of_type]; }
    static const Sums* sums_of_type(int of_type) { return SUMS[of_type]; }
};

}  // namespace RADIX_ISA
}  // namespace radix

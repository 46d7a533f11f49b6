// Attention by dot products of bfloat16 pairs (AVX-512 with bf16 instructions), twice the rate of fp32
// multiply-adds. An instruction adds two products to a sum, the odd one of the pair first.
#include "attention_bf16.h"
#include "attention_few_pairs.h"
#include "panels.h"

namespace radix {
namespace RADIX_ISA {

struct PairProducts {
    using Few = PairFew;

    static void open(int) {}
    static void close() {}
    // What no row of them sees is masked, whatever its scores are.
    static void scores(const ScoreOperands& o) {
        each_rows(o.n, [&](int r0, auto rows) {
            for (int step = o.first_step; step <= o.last_step; step++) scores_of<rows.value>(o, r0, 2 * step);
        });
    }
    static void sums(const SumOperands& o) {
        each_rows(o.n, [&](int r0, auto rows) {
            int at = 0;
            for (; at + 32 <= o.v_pad; at += 32) sums_of<rows.value, 2>(o, r0, at);
            if (at < o.v_pad) sums_of<rows.value, 1>(o, r0, at);
        });
    }

  private:
    // n rows in equal parts that registers hold the sums of
    template <class F>
    static void each_rows(int n, F f) {
        const int parts = (n + MAX_ROWS - 1) / MAX_ROWS, each = (n + parts - 1) / parts;
        for (int r0 = 0; r0 < n; r0 += each)
            with_rows(
                std::min(each, n - r0), [&](auto rows) { f(r0, rows); },
                std::make_integer_sequence<int, MAX_ROWS>{});
    }
    template <class F, int... R>
    static void with_rows(int n, F f, std::integer_sequence<int, R...>) {
        ((n == R + 1 ? f(std::integral_constant<int, R + 1>{}) : void()), ...);
    }

    template <int R, int N>
    static RADIX_INLINE void add_step(const uint32_t* x, int64_t x_row, const uint32_t* const (&y)[N],
                                      vf (&acc)[R][N]) {
        RADIX_UNROLL(4)
        for (int i = 0; i < 16; i++) {
            vf b[N];
            for (int c = 0; c < N; c++) b[c] = load((const float*)(y[c] + i * 16));
            RADIX_UNROLL(12)
            for (int r = 0; r < R; r++) {
                const vf a = set1(bits_to_float(x[r * x_row + i]));
                for (int c = 0; c < N; c++) acc[r][c] = add_pairs(acc[r][c], a, b[c]);
            }
        }
    }
    // Of 32 tokens, from tile `t` on.
    template <int R>
    static void scores_of(const ScoreOperands& o, int r0, int t) {
        vf acc[R][2];
        for (int r = 0; r < R; r++) acc[r][0] = acc[r][1] = zero();
        for (int step = 0; step < o.k_pad / 32; step++) {
            const uint32_t* k = o.k + int64_t(t) * o.k_pad * 8 + step * 256;
            const uint32_t* const both[2] = {k, k + int64_t(o.k_pad) * 8};
            add_step<R, 2>((const uint32_t*)o.q + (step * o.q_rows + r0) * 16, 16, both, acc);
        }
        for (int r = 0; r < R; r++)
            for (int c = 0; c < 2; c++) store(o.p + (r0 + r) * BLOCK + (t + c) * 16, acc[r][c]);
    }
    // Of N vectors of channels, from channel `at` on.
    template <int R, int N>
    static void sums_of(const SumOperands& o, int r0, int at) {
        float* state = o.state + r0 * o.state_stride + at;
        vf acc[R][N];
        for (int r = 0; r < R; r++)
            for (int c = 0; c < N; c++) acc[r][c] = load(state + r * o.state_stride + c * 16);
        for (const BlockItem* item = o.items; item < o.items + o.num_items; item++)
            for (int step = item->first_step; step <= item->last_step; step++) {
                const uint16_t* w = o.weights + r0 * WEIGHTS + item->number % PENDING * BLOCK + step * 32;
                const uint32_t* v[N];
                for (int c = 0; c < N; c++)
                    v[c] = item->block->v + int64_t(step) * o.v_pad * 16 + (at / 16 + c) * 256;
                add_step<R, N>((const uint32_t*)w, WEIGHTS / 2, v, acc);
            }
        for (int r = 0; r < R; r++)
            for (int c = 0; c < N; c++) store(state + r * o.state_stride + c * 16, acc[r][c]);
    }
};

static void attention_pairs(const AttnArgs& a, const Ctx& ctx) {
    const FlushDenormals flush;
    run_attention<Bf16Block<PairProducts>>(a, ctx);
}
static size_t attention_pairs_local(const AttnArgs& a) { return attention_bytes<Bf16Block<PairProducts>>(a); }

}  // namespace RADIX_ISA
}  // namespace radix

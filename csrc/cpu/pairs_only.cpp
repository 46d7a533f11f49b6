// What dot products of bfloat16 pairs do: attention (attention_pairs.cpp), and here linear layers with bf16
// weights: a step of k is two inputs. Activations are rounded to bf16 once, products of two
// inputs are added to a float32 sum in the order of the instruction; denormals count as zero. The weights'
// layout is that of matrix tiles.
#include "attention_pairs.cpp"

namespace radix {
namespace RADIX_ISA {

struct PairStep {
    static constexpr int64_t INPUTS = 2;
    static RADIX_INLINE vf add(vf sum, vf x, vf w) { return add_pairs(sum, x, w); }
    static RADIX_INLINE vf inputs(const float* x, int64_t i, int64_t k) {
        const int64_t left = k - 2 * i;
        const vf low = load_n(x + 2 * i, left < 16 ? int(left) : 16);
        const vf high = left >= 32   ? load(x + 2 * i + 16)
                        : left <= 16 ? zero()
                                     : load_n(x + 2 * i + 16, int(left - 16));
        return {(__m512)_mm512_cvtne2ps_pbh(high.v, low.v)};
    }
};

struct ReadPairs {
    using Step = PairStep;
    static constexpr int FORMAT = W_BF16_PAIRS, WIDE = 2;
    static constexpr bool IS_WIDE = true;
    const float* p;
    RADIX_INLINE void open(const Weight& w, int64_t panel, int64_t step) {
        p = (const float*)w.data + (panel * ((w.k + 31) / 32 * 16) + step) * PANEL;
    }
    RADIX_INLINE void group(const Weight&, int64_t, int64_t) {}
    RADIX_INLINE const char* address(int64_t step) const { return (const char*)(p + step * PANEL); }
    RADIX_INLINE void at(int64_t step, vf& a, vf& b) const {
        a = load(p + step * PANEL), b = load(p + step * PANEL + 16);
    }
};

static void linear_pairs(const LinearArgs& a, const Ctx& ctx) {
    if (a.m <= 0) return;
    const RowTiles rt(a.m);
    run_format<ReadPairs>(a, rt, packed_rows<PairStep>(a, rt, a.m <= 2, ctx), ctx);
    ctx.barrier();
}

static size_t pairs_local(const LinearArgs& a) {
    return std::max(panel_local(), size_t(2 * steps_of<PairStep>(a.w.k)) * 4 + 64);
}

// Dot products in registers, as many at a time as hide their latency. Returns the operations done.
static double pairs_ceiling(size_t rounds) {
    constexpr int CHAINS = 20;
    vf sums[CHAINS];
    for (int i = 0; i < CHAINS; i++) sums[i] = set1(float(i));
    const vf x = set1(bits_to_float(0x3f803f80));
    for (size_t r = 0; r < rounds; r++) {
        RADIX_UNROLL(20)
        for (int i = 0; i < CHAINS; i++) sums[i] = PairStep::add(sums[i], x, x);
        asm volatile("");  // every round is done
    }
    vf total = zero();
    for (int i = 0; i < CHAINS; i++) total = add(total, sums[i]);
    volatile float sink = lane_tree_sum(total);
    (void)sink;
    return double(rounds) * CHAINS * 64;
}

extern const PairKernels pair_table;
const PairKernels pair_table = {linear_pairs, panel_shared<PairStep>, pairs_local, pairs_ceiling};
extern const Bf16Kernels bf16_table;
const Bf16Kernels bf16_table = {attention_pairs, attention_pairs_local};

}  // namespace RADIX_ISA
}  // namespace radix

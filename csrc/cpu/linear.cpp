// Linear layers with fp32 arithmetic: a step of k is a fused multiply-add.
#include "panels.h"

namespace radix {
namespace RADIX_ISA {

void linear(const LinearArgs& a, const Ctx& ctx) {
    if (a.m <= 0) return;
    RowTiles rt(a.m);
    const float* x = a.m > 1 || a.rows ? packed_rows<FloatStep>(a, rt, false, ctx) : a.x;
    switch (a.w.format) {
        case W_F32: run_format<ReadF32>(a, rt, x, ctx); break;
        case W_BF16: run_format<ReadBf16>(a, rt, x, ctx); break;
        case W_F16: run_format<ReadF16>(a, rt, x, ctx); break;
        case W_INT8: run_format<ReadInt8>(a, rt, x, ctx); break;
        default: run_format<ReadInt4>(a, rt, x, ctx); break;
    }
    ctx.barrier();
}

size_t linear_shared(const LinearArgs& a) { return panel_shared<FloatStep>(a); }
size_t linear_local(const LinearArgs&, int) { return panel_local(); }

}  // namespace RADIX_ISA
}  // namespace radix

// RMSNorm and LayerNorm of rows, with the residual add in front. Four partial sums in a fixed order.
#include "rows.h"

namespace radix {
namespace RADIX_ISA {

static void norm_row(const NormArgs& a, int64_t row) {
    const float* x = a.x + row * a.ldx;
    if (a.residual) {
        float* r = a.residual + row * a.ldr;
        for (int64_t i = 0; i < a.dim; i += 16) {
            int n = lanes_at(i, a.dim);
            store_n(r + i, fma(load_n(x + i, n), set1(a.x_scale), load_n(r + i, n)), n);
        }
        x = r;
    }
    float* y = a.y + row * a.ldy;
    if (a.layer_norm)
        layer_norm_to(x, y, a.weight, a.bias, a.dim, a.eps, a.offset);
    else
        rms_norm_to(x, y, a.weight, a.bias, a.dim, a.eps, a.offset);
}

void norm(const NormArgs& a, const Ctx& ctx) {
    ctx.each(a.rows, 1, [&](int64_t r0, int64_t r1) {
        for (int64_t r = r0; r < r1; r++) norm_row(a, r);
    });
    ctx.barrier();
}

}  // namespace RADIX_ISA
}  // namespace radix

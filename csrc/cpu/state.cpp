// Kernels around a recurrence: convolutions over the last tokens, norms, decays, gates. A result
// depends neither on how a prompt was cut nor on other sequences.
#include <algorithm>

#include "epilogue.h"
#include "rows.h"

namespace radix {
namespace RADIX_ISA {

// log(1 + e^x) of any x: the larger of x and 0, and a logarithm of 1 to 2 by its series in u / (2 + u).
RADIX_INLINE vf vsoftplus(vf x) {
    const vf u = vexp(sub(zero(), vabs(x)));
    const vf s = div(u, add(u, set1(2.0f))), t = mul(s, s);
    vf p = set1(1.0f / 15.0f);
    p = fma(p, t, set1(1.0f / 13.0f));
    p = fma(p, t, set1(1.0f / 11.0f));
    p = fma(p, t, set1(1.0f / 9.0f));
    p = fma(p, t, set1(1.0f / 7.0f));
    p = fma(p, t, set1(1.0f / 5.0f));
    p = fma(p, t, set1(1.0f / 3.0f));
    p = fma(p, t, set1(1.0f));
    return fma(add(s, s), p, vmax(x, zero()));
}

RADIX_INLINE vf opened(vf x, Gate gate) {
    switch (gate) {
        case Gate::SILU: return mul(x, vsigmoid(x));
        case Gate::SOFTPLUS: return vsoftplus(x);
        case Gate::IDENTITY: return x;
        case Gate::TWICE_SIGMOID: return mul(set1(2.0f), vsigmoid(x));
        default: return vsigmoid(x);
    }
}

// Sixteen channels of a convolution, over all runs.
static void conv_channels(const ConvArgs& a, int64_t c0) {
    const int lanes = lanes_at(c0, a.channels), kept = a.width - 1;
    vf past[MAX_CONV], tap[MAX_CONV];
    for (int i = 0; i < a.width; i++) tap[i] = load_n(a.weight + i * a.channels + c0, lanes);
    const vf bias = a.bias ? load_n(a.bias + c0, lanes) : zero();
    alignas(64) float lane[16] = {0};
    for (int64_t r = 0; r < a.num_runs; r++) {
        const StateRun& run = a.runs[r];
        const float* before = a.state + (run.source * a.channels + c0) * kept;
        for (int i = 0; i < kept; i++) {
            for (int j = 0; j < lanes; j++) lane[j] = before[j * kept + i];
            past[i] = load(lane);
        }
        for (int64_t row = run.row; row < run.row + run.tokens; row++) {
            const float* x = a.x + row * a.ldx + c0;
            vf now = load_n(x, lanes);
            if (a.times) now = mul(now, load_n(a.times + row * a.ldx + c0, lanes));
            vf y = bias;
            for (int i = 0; i < kept; i++) y = fma(past[i], tap[i], y);
            y = activate(fma(now, tap[kept], y), a.act);
            if (a.gate) y = mul(y, load_n(a.gate + row * a.ldx + c0, lanes));
            store_n(a.y + row * a.ldy + c0, y, lanes);
            for (int i = 0; i + 1 < kept; i++) past[i] = past[i + 1];
            if (kept) past[kept - 1] = now;
        }
        float* after = a.state + (run.target * a.channels + c0) * kept;
        for (int i = 0; i < kept; i++) {
            store(lane, past[i]);
            for (int j = 0; j < lanes; j++) after[j * kept + i] = lane[j];
        }
    }
}

void conv(const ConvArgs& a, const Ctx& ctx) {
    ctx.each((a.channels + 15) / 16, 4, [&](int64_t c0, int64_t c1) {
        for (int64_t c = c0; c < c1; c++) conv_channels(a, c * 16);
    });
    ctx.barrier();
}

static void decay_row(const DecayArgs& a, int64_t row) {
    const float* x = a.x + row * a.ldx;
    for (int64_t i = 0; i < a.dim; i += 16) {
        const int n = lanes_at(i, a.dim);
        vf v = load_n(x + i, n);
        if (a.bias) v = add(v, load_n(a.bias + i, n));
        const vf rate = a.rate ? load_n(a.rate + i, n) : zero();
        if (a.floor != 0.0f) {
            v = mul(set1(a.floor), vsigmoid(mul(rate, v)));
        } else {
            v = vmin(set1(a.high), vmax(set1(a.low), vsoftplus(v)));
            if (a.step) store_n(a.step + row * a.lds + i, v, n);
            v = mul(rate, v);
        }
        if (a.log) store_n(a.log + row * a.ldl + i, a.is_factor ? vexp(v) : v, n);
    }
}

void decay(const DecayArgs& a, const Ctx& ctx) {
    ctx.each(a.rows, 1, [&](int64_t r0, int64_t r1) {
        for (int64_t r = r0; r < r1; r++) decay_row(a, r);
    });
    ctx.barrier();
}

static void norm_head(const HeadNormArgs& a, int64_t row, int64_t head) {
    const float *x = a.x + row * a.ldx + head * a.width,
                *gate = a.gate ? a.gate + row * a.ldg + head * a.width : nullptr;
    float* y = a.y + row * a.ldy + head * a.width;
    const float* weight = a.weight ? a.weight + (a.per_head_weights ? head * a.width : 0) : nullptr;
    const bool first = gate && !a.gates_last;
    if (first)
        for (int64_t i = 0; i < a.width; i += 16) {
            const int n = lanes_at(i, a.width);
            store_n(y + i, mul(load_n(x + i, n), opened(load_n(gate + i, n), a.act)), n);
        }
    const float* from = first ? y : x;
    const float squares = sum_squares(from, a.width, 0.0f),
                mean = a.is_sum ? squares : squares / float(a.width);
    scale_row(from, y, weight, nullptr, a.width, 0.0f, a.scale / std::sqrt(mean + a.eps), 0.0f);
    if (!gate || first) return;
    for (int64_t i = 0; i < a.width; i += 16) {
        const int n = lanes_at(i, a.width);
        store_n(y + i, mul(load_n(y + i, n), opened(load_n(gate + i, n), a.act)), n);
    }
}

void head_norm(const HeadNormArgs& a, const Ctx& ctx) {
    ctx.each(a.rows * a.heads, 4, [&](int64_t i0, int64_t i1) {
        for (int64_t i = i0; i < i1; i++) norm_head(a, i / a.heads, i % a.heads);
    });
    ctx.barrier();
}

static void gate_row(const GateArgs& a, int64_t row) {
    const float* x = a.x + row * a.ldx;
    float* y = a.y + row * a.ldy;
    for (int64_t h = 0; h < a.heads; h++) {
        const vf whole = a.per_head ? opened(set1(x[h]), a.act) : zero();
        for (int64_t i = 0; i < a.width; i += 16) {
            const int n = lanes_at(i, a.width);
            float* at = y + h * a.width + i;
            store_n(at,
                    mul(load_n(at, n), a.per_head ? whole : opened(load_n(x + h * a.stride + i, n), a.act)),
                    n);
        }
    }
}

void gate(const GateArgs& a, const Ctx& ctx) {
    ctx.each(a.rows, 1, [&](int64_t r0, int64_t r1) {
        for (int64_t r = r0; r < r1; r++) gate_row(a, r);
    });
    ctx.barrier();
}

}  // namespace RADIX_ISA
}  // namespace radix

// What happens to 32 finished outputs of one row: scale, bias, activation, residual, store.
#pragma once
#include "../common/api.h"
#include "../common/simd.h"

namespace radix {
namespace RADIX_ISA {

RADIX_INLINE vf activate(vf x, int act) {
    switch (act) {
        case ACT_SILU: return mul(x, vsigmoid(x));
        case ACT_GELU:
            return mul(mul(x, set1(0.5f)), add(set1(1.0f), verf(mul(x, set1(0.70710678118654752f)))));
        case ACT_GELU_TANH: {
            vf cube = mul(mul(x, x), x);
            vf inner = mul(set1(0.79788456080286536f), fma(cube, set1(0.044715f), x));
            return mul(mul(x, set1(0.5f)), add(set1(1.0f), vtanh(inner)));
        }
        case ACT_GELU_QUICK: return mul(x, vsigmoid(mul(x, set1(1.702f))));
        case ACT_TANH: return vtanh(x);
        case ACT_RELU: return vmax(zero(), x);
        case ACT_RELU2: {
            vf r = vmax(zero(), x);
            return mul(r, r);
        }
        default: return x;
    }
}

constexpr float OAI_LIMIT = 7.0f;

// act(gate) * up; gpt-oss clamps both and adds one to up
RADIX_INLINE vf gated(vf gate, vf up, int act, GateLimit cut) {
    const bool is_oai = act == ACT_SWIGLU_OAI;
    const float limit = is_oai && cut.limit == 0.0f ? OAI_LIMIT : cut.limit;
    if (limit != 0.0f) {
        if (!cut.after) gate = vmin(set1(limit), gate);
        up = vmin(set1(limit), vmax(set1(-limit), up));
    }
    if (is_oai) return mul(mul(add(up, set1(1.0f)), gate), vsigmoid(mul(gate, set1(1.702f))));
    gate = activate(gate, act);
    return mul(limit != 0.0f && cut.after ? vmin(set1(limit), gate) : gate, up);
}

// To an aligned place, past the caches where the processor can.
RADIX_INLINE void store_past(float* p, vf v) {
#if defined(__AVX512F__)
    _mm512_stream_ps(p, v.v);
#else
    store(p, v);
#endif
}

RADIX_INLINE void finish_half(const LinearArgs& a, int64_t row, int64_t col, vf v) {
    int64_t left = a.w.n - col;
    if (left <= 0) return;
    int lanes = left < 16 ? int(left) : 16;
    v = activate(v, a.act);
    if (a.out_scale != 1.0f) v = mul(v, set1(a.out_scale));
    float* y = a.y + row * a.ldy + col;
    if (lanes == 16) {
        if (a.residual) v = add(v, load(a.residual + row * a.ldr + col));
        store(y, v);
    } else {
        if (a.residual) v = add(v, load_n(a.residual + row * a.ldr + col, lanes));
        store_n(y, v, lanes);
    }
}

// noinline: one copy of the code of every activation, not one in each register tile
static __attribute__((noinline)) void finish_general(const LinearArgs& a, int64_t row, int64_t panel,
                                                     const float* acc) {
    int64_t at = panel * PANEL;
    vf u = load(acc), v = load(acc + 16);
    if (a.w.scale && a.w.format == W_INT8)
        u = mul(u, load(a.w.scale + at)), v = mul(v, load(a.w.scale + at + 16));
    if (a.w.bias) u = add(u, load(a.w.bias + at)), v = add(v, load(a.w.bias + at + 16));
    if (!a.w.paired) {
        finish_half(a, row, at, u);
        finish_half(a, row, at + 16, v);
        return;
    }
    int64_t col = panel * 16, left = a.w.n / 2 - col;
    if (a.act == ACT_APART) {
        float* y = a.y + row * a.ldy + col;
        const int lanes = left < 16 ? int(left) : 16;
        if (left > 0) store_n(y, u, lanes), store_n(y + a.w.n / 2, v, lanes);
        return;
    }
    vf g = gated(u, v, a.act, a.w.limit);
    if (a.out_scale != 1.0f) g = mul(g, set1(a.out_scale));
    if (a.streams && left >= 16)
        store_past(a.y + row * a.ldy + col, g);
    else if (left > 0)
        store_n(a.y + row * a.ldy + col, g, left < 16 ? int(left) : 16);
}

// Gates and ups as most models have them: the arithmetic of finish_general without its choices.
static __attribute__((noinline)) void finish_silu(const LinearArgs& a, int64_t row, int64_t panel, vf u,
                                                  vf v) {
    const int64_t at = panel * PANEL;
    if (a.w.scale && a.w.format == W_INT8)
        u = mul(u, load(a.w.scale + at)), v = mul(v, load(a.w.scale + at + 16));
    if (a.w.bias) u = add(u, load(a.w.bias + at)), v = add(v, load(a.w.bias + at + 16));
    store(a.y + row * a.ldy + panel * 16, mul(mul(u, vsigmoid(u)), v));
}

// Rows of y are far apart: a tile asks for its places of them while it multiplies.
RADIX_INLINE void prefetch_outputs(const LinearArgs& a, int64_t row, int64_t panel) {
    const float* y = a.y + row * a.ldy + panel * (a.w.paired ? 16 : PANEL);
    __builtin_prefetch(y, 1);
    if (!a.w.paired) __builtin_prefetch(y + 16, 1);
}

RADIX_INLINE void finish(const LinearArgs& a, int64_t row, int64_t panel, vf u, vf v) {
    const int64_t at = panel * PANEL;
    const bool is_whole = a.out_scale == 1.0f && at + PANEL <= a.w.n;
    if (is_whole && a.w.paired && a.act == ACT_SILU && a.w.limit.limit == 0.0f && !a.streams)
        return finish_silu(a, row, panel, u, v);
    if (is_whole && a.act == ACT_NONE && !a.w.paired) {
        // The same arithmetic as below for the usual case, inline.
        if (a.w.format == W_INT8) u = mul(u, load(a.w.scale + at)), v = mul(v, load(a.w.scale + at + 16));
        if (a.w.bias) u = add(u, load(a.w.bias + at)), v = add(v, load(a.w.bias + at + 16));
        if (a.residual) {
            const float* r = a.residual + row * a.ldr + at;
            u = add(u, load(r)), v = add(v, load(r + 16));
        }
        float* y = a.y + row * a.ldy + at;
        if (a.streams)
            store_past(y, u), store_past(y + 16, v);
        else
            store(y, u), store(y + 16, v);
        return;
    }
    alignas(64) float t[32];
    store(t, u), store(t + 16, v);
    finish_general(a, row, panel, t);
}

}  // namespace RADIX_ISA
}  // namespace radix

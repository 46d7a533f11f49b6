// q/k norm, rotary embedding and the store into the paged cache, one pass over a token's row.
#include "kv.h"

namespace radix {
namespace RADIX_ISA {

static void rotate_halves(float* x, const float* cs, int rotary) {
    const int half = rotary / 2;
    for (int i = 0; i < half; i += 16) {
        int n = lanes_at(i, half);
        vf c = load_n(cs + i, n), s = load_n(cs + half + i, n);
        vf a = load_n(x + i, n), b = load_n(x + half + i, n);
        store_n(x + i, fnma(b, s, mul(a, c)), n);
        store_n(x + half + i, fma(a, s, mul(b, c)), n);
    }
}
static void rotate_pairs(float* x, const float* cs, int rotary) {
    const int half = rotary / 2;
    for (int i = 0; i < half; i += 16) {
        int n = lanes_at(i, half);
        alignas(64) float even[16] = {0}, odd[16] = {0};
        for (int j = 0; j < n; j++) even[j] = x[2 * (i + j)], odd[j] = x[2 * (i + j) + 1];
        vf c = load_n(cs + i, n), s = load_n(cs + half + i, n), a = load(even), b = load(odd);
        store(even, fnma(b, s, mul(a, c)));
        store(odd, fma(a, s, mul(b, c)));
        for (int j = 0; j < n; j++) x[2 * (i + j)] = even[j], x[2 * (i + j) + 1] = odd[j];
    }
}

static void norm_to(const StoreArgs& a, float* x, const float* w, const float* b, int64_t dim) {
    if (a.layer_norm) layer_norm_to(x, x, w, b, dim, a.eps, a.norm_offset);
    else rms_norm_to(x, x, w, b, dim, a.eps, a.norm_offset);
}

static void prepare_heads(const StoreArgs& a, float* x, int heads, int stride, const float* weight, const float* bias, const float* cs) {
    if (a.norm == 2) norm_to(a, x, weight, bias, int64_t(heads) * a.head_dim);
    for (int h = 0; h < heads; h++) {
        float* head = x + int64_t(h) * stride;
        const int64_t own = a.norm == 3 ? int64_t(h) * a.head_dim : 0;
        if (a.norm == 1 || a.norm == 3) norm_to(a, head, weight ? weight + own : nullptr, bias ? bias + own : nullptr, a.head_dim);
        if (!cs) continue;
        if (a.interleaved) rotate_pairs(head, cs, a.rotary);
        else rotate_halves(head, cs, a.rotary);
    }
}

void store(const StoreArgs& a, const Ctx& ctx) {
    ctx.each(a.tokens, 1, [&](int64_t t0, int64_t t1) {
        for (int64_t t = t0; t < t1; t++) {
            const float* cs = a.cos_sin ? a.cos_sin + int64_t(a.positions ? a.positions[t] : t) * a.rotary : nullptr;
            if (a.q) prepare_heads(a, a.q + t * a.ldq, a.heads, a.q_head, a.q_norm, a.q_norm_bias, cs);
            if (!a.k) continue;
            float* k = a.k + t * a.ldk;
            prepare_heads(a, k, a.kv_heads, a.head_dim, a.k_norm, a.k_norm_bias, cs);
            if (!a.slots || a.slots[t] < 0) continue;
            const Cache& c = a.cache;
            for (int h = 0; h < c.kv_heads; h++) put_token(c, a.slots[t], h, k + int64_t(h) * c.k_dim, c.latent ? nullptr : a.v + t * a.ldv + int64_t(h) * c.v_dim);
        }
    });
    ctx.barrier();
}

}  // namespace RADIX_ISA
}  // namespace radix

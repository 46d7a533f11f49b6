// Online softmax of a row of attention: its running sums, and the tokens that it may see.
#pragma once
#include "kv.h"

namespace radix {
namespace RADIX_ISA {

constexpr int BLOCK = ATTN_BLOCK, TILES = BLOCK / TILE;
constexpr float EMPTY = -3.0e38f;  // finite: exp(EMPTY - EMPTY) is 1, exp(EMPTY - score) is 0

// A row's state: [v_pad] sums, [16] partial weights, [0] the maximum.
struct Shape {
    int group, k_dim, v_dim, v_pad, state;
    explicit Shape(const AttnArgs& a)
        : group(a.heads / a.cache.kv_heads),
          k_dim(a.cache.k_dim),
          v_dim(a.cache.v_dim),
          v_pad((a.cache.v_dim + 15) / 16 * 16),
          state(state_floats(v_dim)) {}
};

inline vf count_from_zero() {
    alignas(64) static const float numbers[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    return load(numbers);
}

static void clear_state(float* s, const Shape& sh) {
    for (int i = 0; i < sh.v_pad + 16; i += 16) store(s + i, zero());
    s[sh.v_pad + 16] = EMPTY;
}

// The tree says which new tokens a new token sees: everything older is seen.
static void mask_tree(const AttnArgs& a, int64_t token, int block0, int first_new, int kv_len, float* p) {
    for (int t = 0; t < BLOCK; t++) {
        int at = block0 + t;
        if (at >= first_new && at < kv_len && !a.tree[token * a.tree_ld + (at - first_new)]) p[t] = -INFINITY;
    }
}

// Tokens [lo, hi) of a block that a row sees; a slope adds slope * (token + distance) to the score.
struct VisibleRange {
    int lo, hi;
    float slope, distance;
};

// Scores of one row become weights, times the scales of K before and of V after; the row's state is
// rescaled to the new maximum.
static void online_softmax(const AttnArgs& a, const Shape& s, float* p, const float* k_scale,
                           const float* v_scale, float* state, const VisibleRange& seen) {
    const bool sees_all = seen.lo <= 0 && seen.hi >= BLOCK;
    vf v[TILES];
    vf top = set1(-INFINITY);
    for (int t = 0; t < TILES; t++) {
        v[t] = load(p + t * 16);
        if (k_scale) v[t] = mul(v[t], load(k_scale + t * 16));
        if (a.softcap != 0.0f) v[t] = mul(set1(a.softcap), vtanh(div(v[t], set1(a.softcap))));
        if (seen.slope != 0.0f)
            v[t] = fma(set1(seen.slope), add(count_from_zero(), set1(seen.distance + float(t * 16))), v[t]);
        if (!sees_all) v[t] = keep_lanes(v[t], seen.lo - t * 16, seen.hi - t * 16, set1(-INFINITY));
        top = vmax(top, v[t]);
    }
    float old = state[s.v_pad + 16], m = lane_max(top);
    m = m > old ? m : old;
    vf sum = zero();
    for (int t = 0; t < TILES; t++) {
        v[t] = vexp(sub(v[t], set1(m)));
        store(p + t * 16, v_scale ? mul(v[t], load(v_scale + t * 16)) : v[t]);
        sum = add(sum, v[t]);
    }
    float* weights = state + s.v_pad;
    if (m != old) {
        vf shrink = vexp(set1(old - m));
        for (int i = 0; i < s.v_pad; i += 16) store(state + i, mul(load(state + i), shrink));
        store(weights, mul(load(weights), shrink));
        state[s.v_pad + 16] = m;
    }
    store(weights, add(load(weights), sum));
}

// total absorbs a later split. Weights of `total` and `now` are single sums here, in lane 0.
static void merge(const Shape& s, float* total, const float* now) {
    const float ma = total[s.v_pad + 16], mb = now[s.v_pad + 16];
    const vf less = vexp(set1(ma > mb ? mb - ma : ma - mb)), one = set1(1.0f);
    const vf ea = ma > mb ? one : less, eb = ma > mb ? less : one;
    for (int i = 0; i < s.v_pad + 16; i += 16)
        store(total + i, fma(load(total + i), ea, mul(load(now + i), eb)));
    total[s.v_pad + 16] = ma > mb ? ma : mb;
}
// The first split of all: what `merge` makes of it and an empty total.
static void begin_accumulator(const Shape& s, float* total, const float* now) {
    for (int i = 0; i < s.v_pad + 16; i += 16) store(total + i, add(load(now + i), zero()));  // no -0
    total[s.v_pad + 16] = now[s.v_pad + 16];
}
static void close_split(const Shape& s, float* state) {
    float sum = lane_tree_sum(load(state + s.v_pad));
    store(state + s.v_pad, keep_lanes(set1(sum), 0, 1, zero()));
}

static void write_row(const AttnArgs& a, const Shape& s, const float* total, int64_t token, int head) {
    float sum = total[s.v_pad], m = total[s.v_pad + 16], factor = 1.0f;
    if (a.sinks) {
        float sink = a.sinks[head], top = sink > m ? sink : m;
        factor = exp1(m - top);
        sum = sum * factor + exp1(sink - top);
    }
    vf inverse = set1(sum == 0.0f ? 0.0f : factor / sum);  // nothing was seen
    float* out = a.out + token * a.ldo + int64_t(head) * s.v_dim;
    for (int i = 0; i < s.v_dim; i += 16)
        store_n(out + i, mul(load(total + i), inverse), lanes_at(i, s.v_dim));
}

}  // namespace RADIX_ISA
}  // namespace radix

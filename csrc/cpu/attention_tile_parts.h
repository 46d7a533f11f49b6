// What kernels of attention on matrix tiles share, and the softmax of rows whose scores tiles have written
// and whose weights they will read.
#pragma once
#include "attention_rows.h"
#include "attention_stage.h"
#include "attention_weights.h"
#include "tile_config.h"

namespace radix {
namespace RADIX_ISA {

constexpr int PAIRS = 32;  // of numbers: what one multiplication adds up, in its two halves of 16

class TileSoftmax {
  protected:
    TileSoftmax(const AttnArgs& args, const Shape& shape, const Rows& of, int head)
        : a(args), s(shape), rows(of), kv_head(head) {}
    const AttnArgs& a;
    const Shape& s;
    const Rows& rows;
    int kv_head;
    float* scale = nullptr;  // [2][64]: of the block's keys, of its values

    void mask_scores(int i, int block0, float* w) const;
    // Rows [r0, r0 + n): of_rows [n][64] are scores and become e^(score - maximum), `weights` the same as
    // bfloat16. beside(part, parts) is called between the rows.
    template <class Beside>
    void online_softmax(int r0, int n, int block0, float* of_rows, uint16_t* weights, Beside&& beside) const;
};

// What a row does not see, caps and slopes: the rare changes of scores.
inline void TileSoftmax::mask_scores(int i, int block0, float* w) const {
    if (a.tree && block0 + BLOCK > rows.first_new)
        mask_tree(a, rows.token0 + i / s.group, block0, rows.first_new, rows.kv_len, w);
    const int lo = rows.row_lo[i] - block0, hi = rows.row_hi[i] - block0;
    const float slope = a.alibi_slopes ? a.alibi_slopes[kv_head * s.group + i % s.group] : 0.0f,
                distance = float(block0 - rows.position(i, s.group));
    for (int t = 0; t < TILES; t++) {
        vf v = load(w + t * 16);
        if (a.cache.dtype == DT_I8) v = mul(v, load(scale + t * 16));
        if (a.softcap != 0.0f) v = mul(set1(a.softcap), vtanh(div(v, set1(a.softcap))));
        if (slope != 0.0f) v = fma(set1(slope), add(count_from_zero(), set1(distance + float(t * 16))), v);
        store(w + t * 16, keep_lanes(v, lo - t * 16, hi - t * 16, set1(-INFINITY)));
    }
}

template <class Beside>
void TileSoftmax::online_softmax(int r0, int n, int block0, float* of_rows, uint16_t* weights,
                                 Beside&& beside) const {
    const bool scaled = a.cache.dtype == DT_I8,
               changes = scaled || a.softcap != 0.0f || a.alibi_slopes || a.tree;
    float highest[16];
    for (int r = 0; r < n; r++) {
        const int row = r0 + r;
        float *w = of_rows + r * BLOCK, *state = rows.now + int64_t(row) * s.state;
        if (changes || rows.row_lo[row] > block0 || rows.row_hi[row] < block0 + BLOCK)
            mask_scores(row, block0, w);
        const float old = state[s.v_pad + 16],
                    top = lane_max(vmax(vmax(load(w), load(w + 16)), vmax(load(w + 32), load(w + 48))));
        highest[r] = top > old + GROWTH ? top : old;
        if (highest[r] != old) {
            if (old != EMPTY) {
                const vf shrink = exp_weight(set1(old - highest[r]));
                for (int i = 0; i < s.v_pad + 16; i += 16) store(state + i, mul(load(state + i), shrink));
            }
            state[s.v_pad + 16] = highest[r];
        }
        beside(r + 1, 3 * n);
    }
    for (int r = 0; r < n; r++) {
        const float* w = of_rows + r * BLOCK;
        float* partial = rows.now + int64_t(r0 + r) * s.state + s.v_pad;
        const vf m = set1(highest[r]);
        vf e[TILES];
        for (int t = 0; t < TILES; t++) e[t] = exp_weight(sub(load(w + t * 16), m));
        store(partial, add(load(partial), add(add(e[0], e[1]), add(e[2], e[3]))));
        if (scaled)
            for (int t = 0; t < TILES; t++) e[t] = mul(e[t], load(scale + BLOCK + t * 16));
        round_to(e[0], e[1], weights + r * BLOCK);
        round_to(e[2], e[3], weights + r * BLOCK + 32);
        beside(n + 2 * (r + 1), 3 * n);
    }
}

}  // namespace RADIX_ISA
}  // namespace radix

// Tokens whose V is not finite, in blocks that not all rows see alike: a weight of 0 times NaN is NaN, but a
// token that a row does not see is nothing to it. Such tokens count as zeros, and rows that see one are NaN.
#pragma once
#include "attention_rows.h"

namespace radix {
namespace RADIX_ISA {

template <int DTYPE>
static uint32_t lost_rows(const void* v, int width, int dim) {
    uint32_t lost = 0;
    for (int t = 0; t < TILE; t++) {
        vf nothing = zero();
        int64_t i = int64_t(t) * width;
        const int64_t end = i + dim;
        for (; i + 16 <= end; i += 16) nothing = fma(load_kv<DTYPE>(v, i), zero(), nothing);
        float sum = lane_tree_sum(nothing);
        for (; i < end; i++) sum += load_kv_scalar<DTYPE>(v, i) * 0.0f;
        lost |= uint32_t(sum != 0.0f) << t;
    }
    return lost;
}
static uint32_t lost_rows_of(const Cache& c, const Tile& t, int dim) {
    uint32_t lost = 0;
    switch (c.dtype) {
        case DT_F32: return lost_rows<DT_F32>(t.v, v_width(c), dim);
        case DT_BF16: return lost_rows<DT_BF16>(t.v, v_width(c), dim);
        case DT_F16: return lost_rows<DT_F16>(t.v, v_width(c), dim);
        case DT_E4M3: return lost_rows<DT_E4M3>(t.v, v_width(c), dim);
        case DT_E5M2: return lost_rows<DT_E5M2>(t.v, v_width(c), dim);
        case DT_I4:
            for (int i = 0; i < groups_of(dim) * TILE; i++)
                lost |= uint32_t(!std::isfinite(bf16_to_float(t.v_groups[i]))) << i % TILE;
            return lost;
        case DT_I8:
            for (int i = 0; i < TILE; i++) lost |= uint32_t(!std::isfinite(t.v_scale[i])) << i;
    }
    return lost;
}

// Bits of tokens [lo, hi) of a block.
RADIX_INLINE uint64_t token_bits(int lo, int hi) {
    lo = std::max(lo, 0), hi = std::min(hi, BLOCK);
    return lo < hi ? (~uint64_t(0) >> (BLOCK - (hi - lo))) << lo : 0;
}

// Of a block: the lost tokens that some rows see, and others do not.
static uint64_t lost_tokens(const AttnArgs& a, const Shape& s, const Rows& rows, const int32_t* pages,
                            int kv_head, int block0) {
    const int lo = std::max(rows.lo, block0), hi = std::min(rows.hi, block0 + BLOCK);
    const bool is_tree = a.tree && hi > rows.first_new;
    if (!is_tree && rows.row_hi[0] >= hi && rows.row_lo[rows.count - 1] <= lo) return 0;  // rows grow
    uint64_t lost = 0;
    for (int tile = lo / TILE; tile * TILE < hi; tile++)
        lost |= uint64_t(lost_rows_of(a.cache, tile_at(a.cache, pages, kv_head, tile), s.v_dim))
                << (tile * TILE - block0);
    return lost & token_bits(lo - block0, hi - block0);
}

// NaN for row i where it sees one of these tokens, else 0.
static float loss_of(const AttnArgs& a, const Shape& s, const Rows& rows, int i, int block0, uint64_t lost) {
    lost &= token_bits(rows.row_lo[i] - block0, rows.row_hi[i] - block0);
    for (uint64_t left = lost; a.tree && left; left &= left - 1) {
        const int token = __builtin_ctzll(left), at = block0 + token - rows.first_new;
        if (at >= 0 && !a.tree[(rows.token0 + i / s.group) * a.tree_ld + at]) lost ^= uint64_t(1) << token;
    }
    return lost ? bits_to_float(0x7fc00000u) : 0.0f;
}

RADIX_INLINE uint32_t of_tile(uint64_t tokens, int tile) {
    return uint32_t(tokens >> (tile * TILE)) & 0xffff;
}
// f(lane) of each token of a tile.
template <class F>
static void each_lane(uint32_t tokens, F&& f) {
    for (; tokens; tokens &= tokens - 1) f(__builtin_ctz(tokens));
}
// Rows of V of `bytes` each become zeros.
static void clear_lanes(uint32_t tokens, void* rows, int64_t bytes) {
    each_lane(tokens, [&](int lane) { std::memset((char*)rows + lane * bytes, 0, size_t(bytes)); });
}

// The same where rows are pairs of tokens: [channels / 16][256], of a tile 8 pairs of 16 channels.
inline void clear_pairs(uint32_t tokens, uint32_t* pairs, int channels) {
    each_lane(tokens, [&](int lane) {
        uint16_t* x = (uint16_t*)(pairs + lane / 2 * 16) + lane % 2;
        for (int c = 0; c < channels; c++) x[(c / 16 * 256 + c % 16) * 2] = 0;
    });
}

}  // namespace RADIX_ISA
}  // namespace radix

// Labels of K for double sparsity (arXiv:2408.07092): a few channels of each key, as int8 with one scale a
// token, in tiles of 16 tokens [pairs of channels][16][2] and 16 float scales. Beside them stand K's rows, in
// the layout of V, because the tokens that are chosen are apart. See api.h: Heavy.
#pragma once
#include "kv.h"

namespace radix {
namespace RADIX_ISA {

RADIX_INLINE int label_pairs(const Heavy& h) { return (h.width + 1) / 2; }
RADIX_INLINE int64_t label_bytes(const Heavy& h) { return int64_t(label_pairs(h)) * 2 * TILE + TILE * 4; }

// The tile of labels at the place that tile_at gives for K and V.
RADIX_INLINE int8_t* labels_at(const Cache& c, int32_t page, int kv_head, int tile_in_page) {
    const int64_t per_page = c.page_size / TILE;
    return (int8_t*)c.heavy->labels +
           ((int64_t(page) * c.kv_heads + kv_head) * per_page + tile_in_page) * label_bytes(*c.heavy);
}
// K's rows as a cache of values.
RADIX_INLINE Cache rows_of_keys(const Cache& c) {
    Cache rows = c;
    rows.k = c.heavy->rows, rows.v = c.heavy->rows, rows.v_dim = c.k_dim;
    return rows;
}

}  // namespace RADIX_ISA
}  // namespace radix

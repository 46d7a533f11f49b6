// Arithmetic over one row that several kernels share.
#pragma once
#include "../common/api.h"
#include "../common/simd.h"

namespace radix {
namespace RADIX_ISA {

RADIX_INLINE int lanes_at(int64_t i, int64_t dim) { return dim - i < 16 ? int(dim - i) : 16; }

static inline float sum_squares(const float* x, int64_t dim, float mean) {
    vf s[4] = {zero(), zero(), zero(), zero()};
    for (int64_t i = 0, c = 0; i < dim; i += 16, c = (c + 1) & 3) {
        int n = lanes_at(i, dim);
        vf v = keep_lanes(sub(load_n(x + i, n), set1(mean)), 0, n, zero());
        s[c] = fma(v, v, s[c]);
    }
    return lane_tree_sum(add(add(s[0], s[1]), add(s[2], s[3])));
}
static inline float row_sum(const float* x, int64_t dim) {
    vf s[4] = {zero(), zero(), zero(), zero()};
    for (int64_t i = 0, c = 0; i < dim; i += 16, c = (c + 1) & 3)
        s[c] = add(s[c], load_n(x + i, lanes_at(i, dim)));
    return lane_tree_sum(add(add(s[0], s[1]), add(s[2], s[3])));
}
// y = (x - mean) * inverse * (weight + offset) + bias
static inline void scale_row(const float* x, float* y, const float* w, const float* b, int64_t dim,
                             float mean, float inverse, float offset) {
    for (int64_t i = 0; i < dim; i += 16) {
        int n = lanes_at(i, dim);
        vf v = mul(sub(load_n(x + i, n), set1(mean)), set1(inverse));
        if (w) v = mul(v, add(load_n(w + i, n), set1(offset)));
        if (b) v = add(v, load_n(b + i, n));
        store_n(y + i, v, n);
    }
}
static inline void rms_norm_to(const float* x, float* y, const float* w, const float* b, int64_t dim,
                               float eps, float offset) {
    float inverse = 1.0f / std::sqrt(sum_squares(x, dim, 0.0f) / float(dim) + eps);
    scale_row(x, y, w, b, dim, 0.0f, inverse, offset);
}
static inline void layer_norm_to(const float* x, float* y, const float* w, const float* b, int64_t dim,
                                 float eps, float offset) {
    float mean = row_sum(x, dim) / float(dim);
    float inverse = 1.0f / std::sqrt(sum_squares(x, dim, mean) / float(dim) + eps);
    scale_row(x, y, w, b, dim, mean, inverse, offset);
}

}  // namespace RADIX_ISA
}  // namespace radix

// Rows of K and V as numbers of 4 bits; kv.h has the layout.
#pragma once
#include <vector>

#include "hadamard.h"
#include "kv.h"

namespace radix {
namespace RADIX_ISA {

// 32 channels of a row: x = number * scale, zeros from channel `n` on. The number of largest magnitude
// becomes -8, so that quantising what was read gives the same bits. NaN for a group that is not finite.
struct Group4 {
    alignas(32) int8_t numbers[GROUP_4];  // plus 8
    uint16_t scale;
    Group4(const float* x, int n) {
        const vf low = load_n(x, lanes_at(0, n)), high = n > 16 ? load_n(x + 16, lanes_at(16, n)) : zero();
        const float top = lane_max(vmax(low, high)),
                    depth = lane_max(vmax(sub(zero(), low), sub(zero(), high))),
                    most = top >= depth ? top : -depth,
                    nothing = lane_tree_sum(add(sub(low, low), sub(high, high)));  // NaN if x is not finite
        if (nothing != 0.0f)
            scale = 0x7fc0;
        else
            scale = std::fabs(most) < 1e-30f ? uint16_t(0) : float_to_bf16(most * -0.125f);
        const float step = bf16_to_float(scale);
        store_i8(numbers, whole(low, step)), store_i8(numbers + 16, whole(high, step));
    }
    static vf whole(vf x, float step) {
        if (!(step > 0.0f || step < 0.0f)) return set1(8.0f);
        return add(vmax(vmin(vround(div(x, set1(step))), set1(7.0f)), set1(-8.0f)), set1(8.0f));
    }
};

static void put_value_i4(const Cache& c, const Tile& t, int lane, const float* x) {
    uint8_t* out = (uint8_t*)const_cast<void*>(t.v) + lane / 4 * 64 + lane % 4;
    uint16_t* scales = const_cast<uint16_t*>(t.v_groups) + lane;
    for (int i = 0; i < v_width(c); i += GROUP_4, out += 256, scales += TILE) {
        const Group4 g(x + i, v_width(c) - i);
        for (int j = 0; j < 16; j++) out[j * 4] = uint8_t(g.numbers[j] | g.numbers[j + 16] << 4);
        *scales = g.scale;
    }
}
static void put_key_i4(const Cache& c, const Tile& t, int lane, const float* k) {
    std::vector<float> x(k, k + c.k_dim);
    rotate(x.data(), c.k_dim);
    uint8_t* out = (uint8_t*)const_cast<void*>(t.k) + lane * 4;
    uint16_t* scales = const_cast<uint16_t*>(t.k_groups) + lane;
    for (int i = 0; i < c.k_dim; i += GROUP_4, scales += TILE) {
        const Group4 g(&x[size_t(i)], c.k_dim - i);
        for (int j = 0; j < GROUP_4; j += 8, out += 64)
            for (int b = 0; b < 4; b++) out[b] = uint8_t(g.numbers[j + b] | g.numbers[j + 4 + b] << 4);
        *scales = g.scale;
    }
}

}  // namespace RADIX_ISA
}  // namespace radix

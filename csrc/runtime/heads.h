// A linear map a head: row h of y's heads is weight h times row h of x's heads.
#pragma once
#include <vector>

#include "linear.h"

namespace radix {

struct HeadArgs {
    const Weight* w = nullptr;  // [heads], of one shape
    int heads = 0;
    const float* x = nullptr;
    int64_t ldx = 0, x_head = 0, m = 0;  // numbers from one row, one head to the next
    float* y = nullptr;
    int64_t ldy = 0, y_head = 0;
};
// Every thread of the team; a head's matrix is small, so threads take whole heads.
void run_heads(const Kernels& k, const HeadArgs& a, const Ctx& ctx);
size_t heads_shared(const Kernels& k, const HeadArgs& a);
size_t heads_local(const Kernels& k, const HeadArgs& a, int threads);

// The weights of a layer's heads, as Python holds them.
struct HeadLinear {
    std::vector<Weight> w;
    explicit HeadLinear(const std::vector<const Linear*>& heads);
    double numbers() const { return double(w.size()) * double(w[0].n) * double(w[0].k); }
    void run(Address x, int64_t ldx, int64_t x_head, int64_t m, Address y, int64_t ldy, int64_t y_head,
             int threads) const;
};

}  // namespace radix

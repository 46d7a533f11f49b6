#include "heads.h"

#include <algorithm>
#include <stdexcept>

namespace radix {

constexpr int64_t ROWS_AT_ONCE = 256;  // of a head: what is packed of them stays in second-level cache

static LinearArgs rows_of_head(const HeadArgs& a, int head, int64_t r0, int64_t r1) {
    LinearArgs l;
    l.w = a.w[head], l.m = r1 - r0;
    l.x = a.x + r0 * a.ldx + head * a.x_head, l.ldx = a.ldx;
    l.y = a.y + r0 * a.ldy + head * a.y_head, l.ldy = a.ldy;
    return l;
}
static LinearArgs widest_args(const HeadArgs& a) {
    return rows_of_head(a, 0, 0, std::min(a.m, ROWS_AT_ONCE));
}
// Fewer heads than threads: all threads take one head after the other.
static bool is_shared(const HeadArgs& a, int threads) { return a.heads < threads; }
static size_t lines(size_t bytes) { return (bytes + 63) / 64 * 64; }

void run_heads(const Kernels& k, const HeadArgs& a, const Ctx& ctx) {
    if (a.m <= 0) return;
    const int64_t blocks = (a.m + ROWS_AT_ONCE - 1) / ROWS_AT_ONCE;
    auto rows = [&](int64_t i) {
        return rows_of_head(a, int(i / blocks), i % blocks * ROWS_AT_ONCE,
                            std::min(a.m, (i % blocks + 1) * ROWS_AT_ONCE));
    };
    if (is_shared(a, ctx.threads())) {
        for (int64_t i = 0; i < a.heads * blocks; i++) run_linear(k, rows(i), ctx);
        return;
    }
    // A team of this thread alone, with the thread's own memory.
    const size_t packed = lines(shared_for(k, widest_args(a)));
    Workspace own{ctx.local(), packed, ctx.local() + packed, ctx.team->space->local_bytes - packed, 1};
    Team alone(1, &own);
    ctx.each(a.heads * blocks, 1, [&](int64_t i0, int64_t i1) {
        for (int64_t i = i0; i < i1; i++) run_linear(k, rows(i), Ctx{&alone, 0});
    });
    ctx.barrier();
}

size_t heads_shared(const Kernels& k, const HeadArgs& a) { return shared_for(k, widest_args(a)); }
size_t heads_local(const Kernels& k, const HeadArgs& a, int threads) {
    const LinearArgs l = widest_args(a);
    return lines(shared_for(k, l)) +
           std::max(local_for(k, l, 1), local_for(k, l, threads));  // a team may be smaller than asked
}

HeadLinear::HeadLinear(const std::vector<const Linear*>& heads) {
    if (heads.empty()) throw std::invalid_argument("at least one head");
    for (auto l : heads) {
        w.push_back(l->w);
        if (l->w.n != w[0].n || l->w.k != w[0].k || l->w.paired)
            throw std::invalid_argument("heads differ in shape");
    }
}

void HeadLinear::run(Address x, int64_t ldx, int64_t x_head, int64_t m, Address y, int64_t ldy,
                     int64_t y_head, int threads) const {
    HeadArgs a;
    a.w = w.data(), a.heads = int(w.size()), a.m = m;
    a.x = at<float>(x), a.ldx = ldx, a.x_head = x_head, a.y = at<float>(y), a.ldy = ldy, a.y_head = y_head;
    const Kernels& k = kernels();
    const int n =
        threads > 0 ? threads : threads_for(numbers() * bytes_each(w[0].format), 2 * numbers() * double(m));
    run_team(n, heads_shared(k, a), heads_local(k, a, n), [&](const Ctx& c) { run_heads(k, a, c); });
}

}  // namespace radix

#include "moe.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <stdexcept>

namespace radix {

void Assignment::reserve(int64_t tokens, int top_k, int experts) {
    const size_t n = size_t(tokens * top_k);
    if (ids.size() < n) ids.resize(n), weights.resize(n), rows.resize(n), slot.resize(n);
    if (first.size() < size_t(experts) + 1) first.resize(size_t(experts) + 1);
}

void Assignment::sort(int64_t tokens, int top_k, int experts) {
    const int64_t n = tokens * top_k;
    std::fill(first.begin(), first.end(), 0);
    for (int64_t i = 0; i < n; i++) first[size_t(ids[size_t(i)]) + 1]++;
    for (int e = 0; e < experts; e++) first[size_t(e) + 1] += first[size_t(e)];
    for (int64_t i = 0; i < n; i++) {  // `first` moves on, and back below
        int32_t at = first[size_t(ids[size_t(i)])]++;
        rows[size_t(at)] = int32_t(i / top_k);
        slot[size_t(i)] = at;
    }
    for (int e = experts; e > 0; e--) first[size_t(e)] = first[size_t(e) - 1];
    first[0] = 0;
}

constexpr float LEAST = -std::numeric_limits<float>::infinity();

// The first of the largest numbers, which becomes NaN: one that is NaN is not chosen again.
static int take_largest(std::vector<float>& of) {
    int best = -1;
    for (int i = 0; i < int(of.size()); i++)
        if (!std::isnan(of[size_t(i)]) && (best < 0 || of[size_t(i)] > of[size_t(best)])) best = i;
    of[size_t(best)] = std::numeric_limits<float>::quiet_NaN();
    return best;
}
// What experts are chosen by: where a score is not a number, each of them can still be chosen, and once.
static void replace_nan(std::vector<float>& of) {
    std::replace_if(of.begin(), of.end(), [](float x) { return std::isnan(x); }, LEAST);
}

static void mask_groups(const Route& r, float* pick) {
    const int each = r.experts / r.groups;
    std::vector<float> rating(size_t(r.groups));
    for (int g = 0; g < r.groups; g++) {
        float a = LEAST, b = a;
        for (int i = 0; i < each; i++) {
            float v = pick[g * each + i];
            if (v > a)
                b = a, a = v;
            else if (v > b)
                b = v;
        }
        rating[size_t(g)] = r.group_top2 ? a + b : a;
    }
    std::vector<char> keep(size_t(r.groups), 0);
    for (int n = 0; n < r.groups_kept; n++) {
        int best = -1;
        for (int g = 0; g < r.groups; g++)
            if (!keep[size_t(g)] && (best < 0 || rating[size_t(g)] > rating[size_t(best)])) best = g;
        keep[size_t(best)] = 1;
    }
    for (int i = 0; i < r.experts; i++)
        if (!keep[size_t(i / each)]) pick[i] = LEAST;
}

static void route_sparsemixer(const Route& r, const float* logits, int32_t* ids, float* weights) {
    thread_local std::vector<float> left;
    left.assign(logits, logits + r.experts);
    replace_nan(left);
    for (int j = 0; j < r.top_k; j++) {
        const int best = ids[j] = take_largest(left);
        const float top = logits[best];
        float sum = 1;
        for (int i = 0; i < r.experts; i++)
            if (!std::isnan(left[size_t(i)]) &&
                (top - logits[i]) / std::max(std::abs(logits[i]), top) <= 2 * r.jitter)
                sum += std::exp(logits[i] - top);
        weights[j] = 1.0f / sum;
    }
}

void choose(const Route& r, const float* logits, int32_t* ids, float* weights) {
    if (r.score == RouterScore::SPARSEMIXER) return route_sparsemixer(r, logits, ids, weights);
    thread_local std::vector<float> score, pick;
    score.assign(logits, logits + r.experts);
    if (r.score == RouterScore::SOFTMAX) {
        float top = *std::max_element(score.begin(), score.end()), sum = 0;
        for (float& s : score) s = std::exp(s - top), sum += s;
        for (float& s : score) s /= sum;
    } else if (r.score == RouterScore::SIGMOID) {
        for (float& s : score) s = 1.0f / (1.0f + std::exp(-s));
    }
    pick = score;
    if (r.correction)
        for (int i = 0; i < r.experts; i++) pick[size_t(i)] += r.correction[i];
    replace_nan(pick);
    if (r.groups > 1) mask_groups(r, pick.data());
    for (int j = 0; j < r.top_k; j++) ids[j] = take_largest(pick), weights[j] = score[size_t(ids[j])];
    if (r.score == RouterScore::SOFTMAX_TOPK) {
        float top = weights[0], sum = 0;
        for (int j = 1; j < r.top_k; j++) top = std::max(top, weights[j]);
        for (int j = 0; j < r.top_k; j++) weights[j] = std::exp(weights[j] - top), sum += weights[j];
        for (int j = 0; j < r.top_k; j++) weights[j] /= sum;
    }
    if (r.score == RouterScore::SIGMOID_TOPK)
        for (int j = 0; j < r.top_k; j++) weights[j] = 1.0f / (1.0f + std::exp(-weights[j]));
    float sum = 0;
    for (int j = 0; j < r.top_k; j++) sum += weights[j];
    for (int j = 0; j < r.top_k; j++)
        weights[j] = (r.renorm ? weights[j] / (sum + 1e-20f) : weights[j]) * r.scale;
    if (r.expert_scale)
        for (int j = 0; j < r.top_k; j++) weights[j] *= r.expert_scale[ids[j]];
}

static LinearArgs up_args(const ExpertArgs& e, const Assignment& a, int expert) {
    LinearArgs l;
    const int32_t first = a.first[size_t(expert)];
    l.w = e.up[expert - e.first], l.act = e.act, l.x = e.x, l.ldx = e.ldx, l.rows = a.rows.data() + first;
    if (e.scaled) l.x = e.scaled + first * e.lds, l.ldx = e.lds, l.rows = nullptr;
    l.m = a.first[size_t(expert) + 1] - first;
    l.y = e.hidden + first * e.inner + e.first_inner, l.ldy = e.inner;
    return l;
}
// Up before the activation.
static LinearArgs wide_args(const ExpertArgs& e, const Assignment& a, int expert) {
    LinearArgs l = up_args(e, a, expert);
    l.act = l.w.paired ? ACT_APART : ACT_NONE, l.ldy = l.w.n;
    l.y = e.wide + a.first[size_t(expert)] * l.w.n;
    return l;
}
static LinearArgs down_args(const ExpertArgs& e, const Assignment& a, int expert) {
    LinearArgs l;
    const int32_t first = a.first[size_t(expert)];
    l.w = e.down[expert - e.first], l.x = e.hidden + first * e.inner, l.ldx = e.inner;
    l.m = a.first[size_t(expert) + 1] - first, l.y = e.out + first * e.own_dim, l.ldy = e.own_dim;
    return l;
}

// Each choice's input times its weight, at the choice's place.
static void scale_inputs(const ExpertArgs& e, const Assignment& a, const Ctx& ctx) {
    ctx.each(e.tokens * e.top_k, 1, [&](int64_t i0, int64_t i1) {
        for (int64_t i = i0; i < i1; i++) {
            const float *x = e.x + i / e.top_k * e.ldx, weight = a.weights[size_t(i)];
            float* to = e.scaled + int64_t(a.slot[size_t(i)]) * e.lds;
            for (int64_t d = 0; d < e.dim; d++) to[d] = x[d] * weight;
        }
    });
    ctx.barrier();
}

constexpr int64_t FLOAT = sizeof(float);

std::vector<int32_t> ExpertPart::experts() const {
    std::vector<int32_t> found(size_t(starts.back()), -1);
    for (int32_t i = 0; i < variants * width; i++)
        if (size_t(table[i]) < found.size()) found[size_t(table[i])] = i % width;
    return found;
}

// Columns that the ranks of `inside` have computed, of rows [rows, ld].
static void gather_inside(const ExpertArgs& e, float* y, int64_t ld, int64_t rows,
                          const std::vector<int64_t>& bounds, const Ctx& ctx) {
    std::vector<int64_t> bytes;
    for (int64_t bound : bounds) bytes.push_back(bound * FLOAT);
    RankGroup& inside = *e.part->inside;
    inside.gather(ctx, (char*)y + bytes[size_t(inside.rank)], ld * FLOAT, (char*)y, ld * FLOAT, rows,
                  bytes.data(), -1);
}

// This rank's experts with what adapters add: between up and the activation, and to down.
static void run_adapted(const Kernels& k, const ExpertArgs& e, const Assignment& a, const Ctx& ctx) {
    LoraSlots& lora = *e.lora;
    const int64_t wide = e.up[0].n;
    auto products = [&](LinearArgs (*args_of)(const ExpertArgs&, const Assignment&, int),
                        const LoraWork& work, LoraArgs l) {
        l.max_rank = work.max_rank, l.h = lora.h.data();
        l.tasks = work.shrink.data(), l.num_tasks = int64_t(work.shrink.size());
        k.lora_shrink(l, ctx);
        for (int expert = e.first; expert < e.first + e.count; expert++) {
            LinearArgs one = args_of(e, a, expert);
            if (one.m > 0) run_linear(k, one, ctx);
        }
        l.tokens = lora.slots.data();
        l.tasks = work.expand.data(), l.num_tasks = int64_t(work.expand.size());
        k.lora_expand(l, ctx);
    };
    LoraArgs up;
    up.tokens = e.scaled ? lora.slots.data() : lora.tokens.data(), up.inputs = e.dim;
    up.x = e.scaled ? e.scaled : e.x, up.ldx = e.scaled ? e.lds : e.ldx, up.y = e.wide, up.ldy = wide;
    products(wide_args, lora.up, up);
    ActArgs act;
    const int32_t first = a.first[size_t(e.first)], rows = a.first[size_t(e.first + e.count)] - first;
    float* hidden = e.hidden + first * e.inner;
    act.x = e.wide + first * wide, act.ldx = wide, act.y = hidden + e.first_inner, act.ldy = e.inner;
    act.act = e.act, act.rows = rows, act.gated = e.up[0].paired, act.dim = act.gated ? wide / 2 : wide;
    act.limit = e.up[0].limit;
    k.activation(act, ctx);
    if (e.part && e.part->inside) gather_inside(e, hidden, e.inner, rows, e.part->inner, ctx);
    LoraArgs down;
    down.tokens = lora.slots.data(), down.inputs = e.inner, down.x = e.hidden, down.ldx = e.inner;
    down.y = e.out, down.ldy = e.own_dim;
    products(down_args, lora.down, down);
}

void combine(const ExpertArgs& e, const int32_t* ids, const int32_t* slot, const float* weights,
             const Ctx& ctx) {
    ctx.each(e.tokens, 1, [&](int64_t t0, int64_t t1) {
        for (int64_t t = t0; t < t1; t++) {
            float* y = e.y + t * e.ldy + e.first_dim;
            for (int64_t d0 = 0; d0 < e.own_dim; d0 += 64) {
                const int64_t n = std::min<int64_t>(64, e.own_dim - d0);
                float sum[64] = {0};
                for (int j = 0; j < e.top_k; j++) {
                    const float w = e.scaled ? 1.0f : weights[t * e.top_k + j];
                    const bool is_expert = !ids || ids[t * e.top_k + j] < e.experts;
                    if (!is_expert && !e.passes) continue;
                    const float* o = is_expert ? e.out + int64_t(slot[t * e.top_k + j]) * e.own_dim + d0
                                               : e.x + t * e.ldx + e.first_dim + d0;
                    for (int64_t d = 0; d < n; d++) sum[d] += w * o[d];
                }
                for (int64_t d = 0; d < n; d++)
                    y[d0 + d] = e.adds ? y[d0 + d] + e.scale * sum[d] : e.scale * sum[d];
            }
        }
    });
    ctx.barrier();
}

static void run_cut(const Kernels& k, const ExpertArgs& e, const Assignment& a, const Ctx& ctx) {
    const int32_t first = a.first[size_t(e.first)], rows = a.first[size_t(e.first + e.count)] - first;
    auto run = [&](LinearArgs (*args)(const ExpertArgs&, const Assignment&, int)) {
        for (int expert = e.first; expert < e.first + e.count; expert++)
            if (a.first[size_t(expert) + 1] > a.first[size_t(expert)]) run_linear(k, args(e, a, expert), ctx);
    };
    run(up_args);
    gather_inside(e, e.hidden + first * e.inner, e.inner, rows, e.part->inner, ctx);
    run(down_args);
}

// Rows are sorted by slot, so that those of a rank follow each other.
static void gather_outcomes(const ExpertArgs& e, const Assignment& a, const Ctx& ctx) {
    std::vector<int64_t> bytes;
    for (int64_t start : e.part->starts) bytes.push_back(a.first[size_t(start)] * e.own_dim * FLOAT);
    char* out = (char*)e.out;
    e.part->group->gather(ctx, out + bytes[size_t(e.part->group->rank)], 0, out, 0, 1, bytes.data(), -1);
}

void run_experts(const Kernels& k, const ExpertArgs& e, const Assignment& a, const Ctx& ctx) {
    if (e.scaled) scale_inputs(e, a, ctx);
    const bool is_cut = e.part && e.part->inside;
    if (e.lora)
        run_adapted(k, e, a, ctx);
    else if (is_cut)
        run_cut(k, e, a, ctx);
    for (int expert = e.first; expert < e.first + e.count && !is_cut && !e.lora; expert++) {
        if (a.first[size_t(expert) + 1] == a.first[size_t(expert)]) continue;
        run_linear(k, up_args(e, a, expert), ctx);
        run_linear(k, down_args(e, a, expert), ctx);
    }
    if (e.part && e.part->group) gather_outcomes(e, a, ctx);
    combine(e, a.ids.data(), a.slot.data(), a.weights.data(), ctx);
    if (is_cut) gather_inside(e, e.y, e.ldy, e.tokens, e.part->dim, ctx);
}

static LinearArgs widest_args(const ExpertArgs& e, bool is_up) {
    LinearArgs l;
    l.w = is_up ? e.up[0] : e.down[0], l.m = std::max(e.tokens, e.max_expert_rows);
    return l;
}
size_t experts_shared(const Kernels& k, const ExpertArgs& e) {
    return std::max(shared_for(k, widest_args(e, true)), shared_for(k, widest_args(e, false)));
}
size_t experts_local(const Kernels& k, const ExpertArgs& e, int threads) {
    return std::max(local_for(k, widest_args(e, true), threads),
                    local_for(k, widest_args(e, false), threads));
}

Experts::Experts(const std::vector<const Linear*>& ups, const std::vector<const Linear*>& downs,
                 int activation, GateLimit limit)
    : act(activation) {
    if (ups.empty() || ups.size() != downs.size())
        throw std::invalid_argument("one up and one down for each expert");
    for (auto l : ups) up.push_back(l->w), up.back().limit = limit;
    for (auto l : downs) down.push_back(l->w);
    for (size_t i = 0; i < up.size(); i++)
        if (up[i].k != up[0].k || down[i].n != down[0].n || down[i].k != down[0].k ||
            (up[i].paired ? up[i].n / 2 : up[i].n) > down[0].k)
            throw std::invalid_argument("experts differ in shape");
}

void Experts::run(Address x, int64_t ldx, int64_t tokens, Address ids, Address weights, int top_k, Address y,
                  int64_t ldy, int threads, Address lora, int site, const ExpertPart* part) {
    const int experts = part ? int(part->starts.back()) : int(up.size());
    assignment.reserve(tokens, top_k, experts);
    std::copy_n(at<int32_t>(ids), tokens * top_k, assignment.ids.begin());
    for (int64_t i = 0; part && i < tokens * top_k; i++)
        assignment.ids[size_t(i)] = part->slot(i / top_k, assignment.ids[size_t(i)]);
    std::copy_n(at<float>(weights), tokens * top_k, assignment.weights.begin());
    assignment.sort(tokens, top_k, experts);
    if (hidden.size() < size_t(tokens * top_k * inner())) hidden.resize(size_t(tokens * top_k * inner()));
    if (out.size() < size_t(tokens * top_k * dim())) out.resize(size_t(tokens * top_k * dim()));
    ExpertArgs e;
    e.top_k = top_k, e.x = at<float>(x), e.ldx = ldx, e.tokens = tokens;
    fill(e, experts, part);
    e.hidden = hidden.data(), e.out = out.data(), e.y = at<float>(y), e.ldy = ldy;
    for (int i = 0; i < experts; i++)
        e.max_expert_rows = std::max<int64_t>(e.max_expert_rows,
                                              assignment.first[size_t(i) + 1] - assignment.first[size_t(i)]);
    if (lora) {
        at<LoraBatch>(lora)->work(site, false, assignment, e.first, e.first + e.count,
                                  part ? part->experts() : blocks, slots);
        if (wide.size() < size_t(tokens * top_k * up[0].n)) wide.resize(size_t(tokens * top_k * up[0].n));
        e.lora = &slots, e.wide = wide.data();
    }
    const Kernels& k = kernels();
    const double size = double(up[0].n) * double(up[0].k) + double(down[0].n) * double(down[0].k);
    int n = threads > 0 ? threads
                        : threads_for(size * double(std::min<int64_t>(experts, tokens * top_k)),
                                      2 * size * double(tokens * top_k));
    const size_t spare = e.lora ? k.lora_local(at<LoraBatch>(lora)->max_rank) : 0;
    run_team(n, experts_shared(k, e), std::max(spare, experts_local(k, e, n)),
             [&](const Ctx& c) { run_experts(k, e, assignment, c); });
    if (part) (part->group ? part->group : part->inside)->check();
}

void Experts::fill(ExpertArgs& e, int slots, const ExpertPart* part) const {
    e.up = up.data(), e.down = down.data(), e.act = act, e.experts = slots, e.count = int(up.size());
    e.dim = e.own_dim = dim(), e.inner = inner(), e.part = part;
    if (!part) return;
    e.first = int(part->starts.at(part->place()));
    if (part->starts.at(part->place() + 1) - e.first != e.count)
        throw std::invalid_argument("a rank has other experts than its part says");
    if (!part->inside) return;
    e.dim = part->dim.back();
    e.first_inner = part->inner.at(size_t(part->inside->rank));
    e.first_dim = part->dim.at(size_t(part->inside->rank));
}

void Experts::combine(Address outs, Address slot, Address weights, int64_t tokens, int top_k, Address y,
                      int threads) const {
    ExpertArgs e;
    e.top_k = top_k, e.tokens = tokens, e.own_dim = e.ldy = dim();
    e.out = at<float>(outs), e.y = at<float>(y);
    const int n = threads > 0 ? threads : threads_for(0, 2.0 * double(tokens * top_k * e.own_dim));
    run_team(n, 0, 0,
             [&](const Ctx& c) { radix::combine(e, nullptr, at<int32_t>(slot), at<float>(weights), c); });
}

int64_t Experts::take_chosen(Address to) {
    const int64_t n = int64_t(chosen.size());
    if (to) std::copy(chosen.begin(), chosen.end(), at<int32_t>(to)), chosen.clear();
    return n;
}

}  // namespace radix

// How ops are appended to a program: what Python calls once for a model.
#include <algorithm>
#include <stdexcept>

#include "program.h"

namespace radix {

Program::Op& Program::push(Kind kind) {
    ops.emplace_back();
    ops.back().kind = kind, ops.back().of_all = of_all;
    return ops.back();
}
Program::Op& Program::push_mix(MixKind kind, int x, int y, int64_t dim, bool selected) {
    Op& op = push(MIX);
    op.x = x, op.y = y, op.selected = selected;
    op.mix.kind = kind, op.mix.dim = dim;
    return op;
}

int Program::buffer(int64_t width, int rows_per_token) {
    int64_t stride = (width + 15) / 16 * 16;
    if (stride % 1024 == 0) stride += 16;  // rows a page apart would share cache sets
    buffers.push_back({width, stride, rows_per_token});
    return int(buffers.size()) - 1;
}

void Program::embed(int y, const Linear* tied, EmbedArgs args, bool replaced) {
    Op& op = push(EMBED);
    op.y = y, op.embed = args;
    if (tied) op.embed.packed = 1, op.embed.w = tied->w;
    if (!replaced) return;
    push(EMBEDS).y = y;
    ops.back().mix.dim = args.dim;
}
void Program::norm(int x, int y, NormArgs args, int64_t offset, bool selected) {
    Op& op = push(NORM);
    op.x = x, op.y = y, op.norm = args, op.x_offset = offset, op.selected = selected;
}
void Program::linear(int x, int y, const Linear& w, int residual, float out_scale, int act, bool selected,
                     int site, int lora_x, int64_t offset) {
    if (site >= 0 && (act || w.w.paired) && (residual >= 0 || out_scale != 1.0f))
        throw std::invalid_argument("adapters need an activation without scale and residual");
    if (site >= 0 && residual >= 0 && residual != y)
        throw std::invalid_argument("adapters need the residual in the place of the outcome");
    Op& op = push(LINEAR);
    op.x = x, op.y = y, op.residual = residual, op.selected = selected, op.y_offset = offset;
    op.linear.w = w.w, op.linear.out_scale = op.out_scale = out_scale, op.linear.act = op.act = act;
    op.site = site, op.lora_x = lora_x;
    if (site < 0) return;
    // Layers of one width share the buffer.
    for (const Op& other : ops)
        if (other.apart >= 0 && other.linear.w.n == w.w.n) op.apart = other.apart;
    if (op.apart < 0) op.apart = buffer(w.w.n, 1);
}
void Program::store(int x, std::array<int64_t, 3> offsets, StoreArgs args, int rope, int group, int parts) {
    Op& op = push(STORE);
    op.x = x, op.rope = rope, op.group = group, op.parts = parts, op.store = args;
    std::copy(offsets.begin(), offsets.end(), op.offsets);
    Cache& c = op.store.cache;
    c.kv_heads = args.kv_heads, c.k_dim = args.head_dim, c.v_dim = args.v_dim, c.latent = !c.k && c.v;
}
void Program::latent_store(int q, int kv, int absorbed, StoreArgs args, int rope, int group) {
    Op& op = push(STORE);
    op.x = kv, op.q = q, op.q_to = absorbed, op.rope = rope, op.group = group, op.store = args;
    op.offsets[0] = args.q_head - args.head_dim;
    op.store.kv_heads = 1, op.store.v_dim = args.k_lead, op.store.q_to_head = args.k_lead + args.head_dim;
    Cache& c = op.store.cache;
    c.kv_heads = 1, c.k_dim = args.k_lead + args.head_dim, c.v_dim = args.k_lead, c.latent = !c.k && c.v;
}
void Program::heads(int x, int y, const HeadLinear& w, int64_t x_head, int64_t y_head, int site) {
    Op& op = push(HEADS);
    op.x = x, op.y = y, op.site = site;
    op.heads.w = w.w.data(), op.heads.heads = int(w.w.size()), op.heads.x_head = x_head,
    op.heads.y_head = y_head;
}

static bool has_one_plan(const AttnArgs& a, const AttnArgs& b) {
    const Cache &c = a.cache, &d = b.cache;
    return a.window == b.window && a.chunk == b.chunk && a.heads == b.heads && c.kv_heads == d.kv_heads &&
           c.k_dim == d.k_dim && c.v_dim == d.v_dim && c.dtype == d.dtype && !c.heavy == !d.heavy;
}
void Program::attention(int q, int y, AttnArgs args) {
    auto stored = std::find_if(ops.rbegin(), ops.rend(), [](const Op& o) { return o.kind == STORE; });
    if (stored == ops.rend()) throw std::invalid_argument("attention must follow a store");
    const Op last = *stored;
    Op& op = push(ATTENTION);
    op.x = q, op.y = y, op.group = last.group, op.x_offset = last.q_to < 0 ? last.offsets[0] : 0;
    op.attention = args, op.attention.cache = last.store.cache;
    for (size_t p = 0; p < plan_of.size(); p++) {
        const Op& other = ops[size_t(plan_of[p])];
        if (other.group == op.group && has_one_plan(other.attention, op.attention)) op.plan = int(p);
    }
    if (op.plan < 0) {
        op.plan = int(plan_of.size());
        plan_of.push_back(int(ops.size()) - 1);
        plans.emplace_back();
    }
}

void Program::gate(int x, int y, GateArgs args, int64_t offset, bool selected) {
    Op& op = push(GATE);
    op.x = x, op.y = y, op.gate = args, op.x_offset = offset, op.selected = selected;
}
void Program::activation(int x, int y, ActArgs args, bool selected) {
    Op& op = push(ACTIVATION);
    op.x = x, op.y = y, op.activation = args, op.selected = selected;
}
void Program::head_norm(int x, int y, HeadNormArgs args, int64_t x_offset, int64_t y_offset, int gate,
                        int64_t gate_offset) {
    Op& op = push(HEAD_NORM);
    op.x = x, op.y = y, op.q = gate, op.head_norm = args;
    op.x_offset = x_offset, op.y_offset = y_offset, op.offsets[0] = gate_offset;
}
void Program::conv(int x, int y, ConvArgs args, int64_t offset, int64_t times, int64_t gate) {
    if (args.width < 1 || args.width > MAX_CONV) throw std::invalid_argument("a convolution is too wide");
    Op& op = push(CONV);
    op.x = x, op.y = y, op.conv = args;
    op.offsets[0] = offset, op.offsets[1] = times, op.offsets[2] = gate;
}
void Program::decay(int x, int64_t offset, int step, int log, DecayArgs args) {
    Op& op = push(DECAY);
    op.x = x, op.x_offset = offset, op.q = step, op.y = log, op.decay = args;
}
void Program::scan(std::vector<ScanSource> inputs, int y, ScanArgs args) {
    if (inputs.size() > 5) throw std::invalid_argument("a scan has at most 5 inputs");
    Op& op = push(SCAN);
    op.y = y, op.scan = args;
    op.scan.page = args.heads * args.keys * args.values;
    std::copy(inputs.begin(), inputs.end(), op.sources);
}

void Program::add(int x, int y, int64_t dim, float scale, bool selected) {
    push_mix(MixKind::ADD, x, y, dim, selected).mix.x_scale = scale;
}
void Program::add_weighted(int x, int y, int64_t dim, int weights, int64_t column, float shift,
                           bool selected) {
    Op& op = push_mix(MixKind::ADD_WEIGHTED, x, y, dim, selected);
    op.q = weights, op.offsets[0] = column, op.mix.x_scale = shift;
}
void Program::copy(int x, int y, int64_t dim, int64_t y_offset, bool selected) {
    push_mix(MixKind::COPY_ROWS, x, y, dim, selected).y_offset = y_offset;
}
void Program::affine(int y, Address shift, Address factor, int64_t dim, bool selected) {
    MixArgs& a = push_mix(MixKind::AFFINE, -1, y, dim, selected).mix;
    a.shift = at<float>(shift), a.factor = at<float>(factor);
}
void Program::above_normal(int y, int64_t dim, float deviations, bool selected) {
    push_mix(MixKind::ABOVE_NORMAL, -1, y, dim, selected).mix.x_scale = deviations;
}
void Program::size_as(int x, int y, int64_t dim, float least, bool selected) {
    push_mix(MixKind::SIZE_AS, x, y, dim, selected).mix.cap = least;
}
void Program::rg_lru(int x, int gates, Address log, int64_t dim, int head) {
    MixArgs& a = push_mix(MixKind::RG_LRU, x, gates, dim, false).mix;
    a.factor = at<float>(log), a.head = head;
}
void Program::gather(int x, int y, int64_t dim, int64_t offset) {
    Op& op = push_mix(MixKind::COPY_ROWS, x, y, dim, true);
    op.x_offset = offset, op.gathers = true;
}
void Program::columns(int x, int y, Address index, int64_t dim, bool selected) {
    push_mix(MixKind::COPY_COLUMNS, x, y, dim, selected).mix.index = at<int32_t>(index);
}
void Program::scale(int y, int64_t offset, int64_t dim, float scale, float cap, bool sigmoid, bool selected) {
    Op& op = push_mix(sigmoid ? MixKind::SIGMOID_SCALE : MixKind::SCALE, -1, y, dim, selected);
    op.y_offset = offset, op.mix.x_scale = scale, op.mix.cap = cap;
}
void Program::scale_heads(int y, Address factors, int heads, int head_dim, int stride) {
    Op& op = push_mix(MixKind::SCALE_HEADS, -1, y, int64_t(heads) * head_dim, false);
    op.factors = at<float>(factors), op.mix.head = head_dim, op.mix.head_stride = stride;
}
void Program::xielu(int y, int64_t dim, Xielu coefficients, bool selected) {
    push_mix(MixKind::XIELU, -1, y, dim, selected).mix.xielu = coefficients;
}

void Program::moe(int x, int logits, int y, Experts& experts, Route route, float scale, bool adds,
                  int zero_experts, bool zero_experts_are_identity, bool scales_input, bool selected,
                  const ExpertPart* part, int site) {
    ExpertArgs e;
    experts.fill(e, part ? int(part->starts.back()) : route.experts - zero_experts, part);
    if (!part && e.experts != e.count)
        throw std::invalid_argument("the router and the experts differ in number");
    // Layers of one shape share their scratch.
    int hidden = -1, out = -1, wide = -1;
    for (const Op& op : ops)
        if (op.kind == MOE && op.route.top_k == route.top_k && op.experts.inner == experts.inner() &&
            op.experts.own_dim == experts.dim())
            hidden = op.hidden, out = op.out, wide = op.wide;
    if (hidden < 0) hidden = buffer(experts.inner(), route.top_k), out = buffer(experts.dim(), route.top_k);
    if (site >= 0 && wide < 0) wide = buffer(experts.up[0].n, route.top_k);
    const int scaled = scales_input ? buffer(e.dim, route.top_k) : -1;
    Op& op = push(MOE);
    op.x = x, op.y = y, op.logits = logits, op.hidden = hidden, op.out = out, op.residual = scaled;
    op.selected = selected, op.route = route;
    op.expert_owner = &experts, op.group_of_ranks = part ? part->group ? part->group : part->inside : nullptr;
    op.site = site, op.wide = wide;
    e.top_k = route.top_k;
    e.scale = scale, e.adds = adds, e.passes = zero_experts_are_identity;
    op.experts = e, op.num_slots = e.experts + zero_experts;
}

void Program::hidden(int x, int64_t dim) {
    Op& op = push(HIDDEN);
    op.x = x, op.selected = true, op.mix.kind = MixKind::COPY_ROWS, op.mix.dim = dim;
}
void Program::tap(int x, int64_t dim, int64_t offset, bool selected) {
    Op& op = push(TAP);
    op.x = x, op.y_offset = offset, op.selected = selected;
    op.mix.kind = MixKind::COPY_ROWS, op.mix.dim = dim;
}
void Program::all_gather(int y, std::vector<int64_t> bounds, RankGroup& group, int64_t offset, bool selected,
                         int x) {
    if (int(bounds.size()) != group.size + 1) throw std::invalid_argument("bounds do not fit the group");
    Op& op = push(GATHER);
    op.x = x, op.y = y, op.y_offset = offset, op.selected = selected, op.group_of_ranks = &group;
    for (int64_t bound : bounds) op.bounds.push_back(bound * 4);
}
void Program::gather_rows(int x, int y, RankGroup& group, int each) {
    if (stride(x) != stride(y)) throw std::invalid_argument("rows of groups are gathered whole");
    Op& op = push(GATHER);
    op.x = x, op.y = y, op.group_of_ranks = &group, op.each = each;
    op.bounds.resize(size_t(group.size) + 1);
}
void Program::own_rows(int x, int y, int64_t dim, RankGroup& group, int each) {
    Op& op = push_mix(MixKind::COPY_ROWS, x, y, dim, false);
    op.group_of_ranks = &group, op.each = each;
}
void Program::gather_logits(std::vector<int64_t> bounds, RankGroup& group, int target) {
    auto cut = std::find_if(ops.rbegin(), ops.rend(), [](const Op& op) { return op.kind == LOGITS; });
    if (cut != ops.rend()) cut->is_cut = true;
    all_gather(-1, bounds, group, 0, true, -1);
    ops.back().target = target;
}
void Program::logits(int x, const Linear& w, float scale, float softcap, int site, int lora_x,
                     int64_t first) {
    Op& op = push(LOGITS);
    op.site = site, op.lora_x = lora_x, op.y_offset = first;
    op.x = x, op.selected = true;
    op.linear.w = w.w, op.linear.out_scale = op.out_scale = softcap != 0.0f ? 1.0f : scale;
    if (softcap == 0.0f) return;
    Op& cap = push_mix(MixKind::SOFTCAP, -1, -1, w.w.n, true);
    cap.mix.x_scale = scale, cap.mix.cap = softcap, cap.y_offset = first;
}

}  // namespace radix

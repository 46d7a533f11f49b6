#include "program_call.h"

#include <sys/mman.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <new>
#include <stdexcept>

namespace radix {

Program::~Program() { free(memory); }

Program::Op& Program::push(Kind kind) {
    ops.emplace_back();
    ops.back().kind = kind;
    return ops.back();
}

int Program::buffer(int64_t width, int rows_per_token) {
    int64_t stride = (width + 15) / 16 * 16;
    if (stride % 1024 == 0) stride += 16;  // rows a page apart would share cache sets
    buffers.push_back({stride, rows_per_token});
    return int(buffers.size()) - 1;
}

void Program::embed(int y, const Linear* tied, Address table, int dtype, int64_t vocab, int64_t dim,
                    float scale, Address positions, int64_t offset, bool is_second) {
    Op& op = push(EMBED);
    op.y = y;
    EmbedArgs& a = op.embed;
    a.vocab = vocab, a.dim = dim, a.table = at<void>(table), a.dtype = dtype, a.scale = scale;
    if (tied) a.packed = 1, a.w = tied->w;
    a.positions_table = at<void>(positions), a.position_offset = offset;
    a.takes_first = is_second;
    if (is_second) return;
    push(EMBEDS).y = y;
    ops.back().mix.dim = dim;
}
void Program::norm(int x, int residual, int y, Address weight, Address bias, int64_t dim, float eps,
                   bool layer, bool selected, int64_t offset) {
    Op& op = push(NORM);
    op.x = x, op.residual = residual, op.y = y, op.selected = selected, op.x_offset = offset;
    NormArgs& a = op.norm;
    a.weight = at<float>(weight), a.bias = at<float>(bias), a.dim = dim, a.eps = eps, a.layer_norm = layer;
}
void Program::linear(int x, int y, const Linear& w, int residual, float out_scale, int act, bool selected) {
    Op& op = push(LINEAR);
    op.x = x, op.y = y, op.residual = residual, op.selected = selected;
    op.linear.w = w.w, op.linear.out_scale = out_scale, op.linear.act = act;
}
void Program::store(int qkv, std::vector<int64_t> offsets, std::vector<int> shape,
                    std::tuple<int, bool, Address, Address, Address, Address, float> norm, int rope,
                    bool interleaved, int rotary, int group, std::tuple<Address, Address, int, int> cache,
                    int parts) {
    Op& op = push(STORE);
    op.parts = parts;
    op.x = qkv, op.rope = rope, op.group = group;
    std::copy(offsets.begin(), offsets.end(), op.offsets);
    StoreArgs& a = op.store;
    a.heads = shape.at(0), a.kv_heads = shape.at(1), a.head_dim = shape.at(2), a.v_dim = shape.at(3),
    a.q_head = shape.at(4);
    a.norm = std::get<0>(norm), a.layer_norm = std::get<1>(norm), a.q_norm = at<float>(std::get<2>(norm)),
    a.k_norm = at<float>(std::get<3>(norm));
    a.q_norm_bias = at<float>(std::get<4>(norm)), a.k_norm_bias = at<float>(std::get<5>(norm)),
    a.eps = std::get<6>(norm);
    a.interleaved = interleaved, a.rotary = rotary;
    a.cache = make_cache(std::get<0>(cache), std::get<1>(cache), std::get<2>(cache), a.kv_heads, a.head_dim,
                         a.v_dim, std::get<3>(cache));
}
void Program::latent_store(int q, int kv, int absorbed, std::vector<int> shape, int rope, bool interleaved,
                           int rotary, int group, std::tuple<Address, Address, int, int> cache) {
    const int heads = shape.at(0), q_head = shape.at(1), rope_dim = shape.at(2), rank = shape.at(3);
    Op& op = push(STORE);
    op.x = kv, op.q = q, op.q_to = absorbed, op.rope = rope, op.group = group,
    op.offsets[0] = q_head - rope_dim;
    StoreArgs& a = op.store;
    a.heads = heads, a.kv_heads = 1, a.head_dim = rope_dim, a.v_dim = rank, a.q_head = q_head;
    a.k_lead = rank, a.q_to_head = rank + rope_dim, a.interleaved = interleaved, a.rotary = rotary;
    a.cache = make_cache(std::get<0>(cache), std::get<1>(cache), std::get<2>(cache), 1, rank + rope_dim, rank,
                         std::get<3>(cache));
}
void Program::heads(int x, int y, const HeadLinear& w, int64_t x_head, int64_t y_head, bool selected) {
    Op& op = push(HEADS);
    op.x = x, op.y = y, op.selected = selected;
    op.heads.w = w.w.data(), op.heads.heads = int(w.w.size()), op.heads.x_head = x_head,
    op.heads.y_head = y_head;
}
static bool has_one_plan(const AttnArgs& a, const AttnArgs& b) {
    const Cache &c = a.cache, &d = b.cache;
    return a.window == b.window && a.chunk == b.chunk && a.heads == b.heads && c.kv_heads == d.kv_heads &&
           c.k_dim == d.k_dim && c.v_dim == d.v_dim && c.dtype == d.dtype;
}
void Program::attention(int qkv, int y, int heads, int q_head, float scale, int window, float softcap,
                        Address sinks, int chunk, Address slopes) {
    auto stored = std::find_if(ops.rbegin(), ops.rend(), [](const Op& o) { return o.kind == STORE; });
    if (stored == ops.rend()) throw std::invalid_argument("attention must follow a store");
    const Op last = *stored;
    Op& op = push(ATTENTION);
    op.x = qkv, op.y = y, op.group = last.group, op.x_offset = last.q_to < 0 ? last.offsets[0] : 0;
    AttnArgs& a = op.attention;
    a.cache = last.store.cache, a.heads = heads, a.q_head = q_head, a.scale = scale, a.window = window,
    a.softcap = softcap, a.sinks = at<float>(sinks);
    a.chunk = chunk, a.slopes = at<float>(slopes);
    for (size_t p = 0; p < plan_of.size(); p++) {
        const Op& other = ops[size_t(plan_of[p])];
        if (other.group == op.group && has_one_plan(other.attention, a)) op.plan = int(p);
    }
    if (op.plan < 0) {
        op.plan = int(plan_of.size());
        plan_of.push_back(int(ops.size()) - 1);
        plans.emplace_back();
    }
}
void Program::add(int x, int y, int64_t dim, float scale, bool selected) {
    Op& op = push(MIX);
    op.x = x, op.y = y, op.selected = selected, op.mix.mode = 0, op.mix.dim = dim, op.mix.x_scale = scale;
}
void Program::xielu(int y, int64_t dim, std::array<float, 4> rising, bool selected) {
    Op& op = push(MIX);
    op.y = y, op.selected = selected, op.mix.mode = 8, op.mix.dim = dim;
    std::copy(rising.begin(), rising.end(), op.mix.rising);
}
void Program::gather(int x, int y, int64_t dim, int64_t offset) {
    Op& op = push(MIX);
    op.x_offset = offset;
    op.x = x, op.y = y, op.selected = op.gathers = true, op.mix.mode = 2, op.mix.dim = dim;
}
void Program::columns(int x, int y, Address index, int64_t dim, bool selected) {
    Op& op = push(MIX);
    op.x = x, op.y = y, op.selected = selected, op.mix.mode = 4, op.mix.index = at<int32_t>(index),
    op.mix.dim = dim;
}
void Program::activation(int x, int y, int64_t dim, int act, bool gated, bool selected) {
    Op& op = push(ACT);
    op.x = x, op.y = y, op.selected = selected, op.act.dim = dim, op.act.act = act, op.act.gated = gated;
}
void Program::moe(int x, int logits, int y, const Experts& experts,
                  std::tuple<int, int, int, bool, float, Address, int, int, bool> route, float scale,
                  bool selected, std::tuple<bool, int, bool, bool, Address, float> more) {
    Route r;
    r.experts = std::get<0>(route), r.top_k = std::get<1>(route), r.score = std::get<2>(route),
    r.renorm = std::get<3>(route), r.scale = std::get<4>(route);
    r.correction = at<float>(std::get<5>(route)), r.groups = std::get<6>(route), r.kept = std::get<7>(route),
    r.best_two = std::get<8>(route);
    const int passing = std::get<1>(more);
    if (r.experts != int(experts.up.size()) + passing)
        throw std::invalid_argument("the router and the experts differ in number");
    // Layers of one shape share their scratch.
    int hidden = -1, out = -1;
    for (const Op& op : ops)
        if (op.kind == MOE && op.route.top_k == r.top_k && op.experts.inner == experts.inner() &&
            op.experts.dim == experts.dim())
            hidden = op.hidden, out = op.out;
    if (hidden < 0) hidden = buffer(experts.inner(), r.top_k), out = buffer(experts.dim(), r.top_k);
    Op& op = push(MOE);
    op.x = x, op.y = y, op.logits = logits, op.hidden = hidden, op.out = out, op.selected = selected,
    op.route = r;
    ExpertArgs& e = op.experts;
    e.up = experts.up.data(), e.down = experts.down.data(), e.experts = r.experts - passing,
    e.top_k = r.top_k, e.act = experts.act;
    e.dim = experts.dim(), e.inner = experts.inner(), e.scale = scale, e.adds = std::get<0>(more),
    e.passes = std::get<2>(more);
    op.route.factors = at<float>(std::get<4>(more)), op.route.jitter = std::get<5>(more);
    if (std::get<3>(more)) op.residual = buffer(experts.dim(), r.top_k);
}
void Program::hidden(int x, int64_t dim) {
    Op& op = push(HIDDEN);
    op.x = x, op.selected = true, op.mix.mode = 2, op.mix.dim = dim;
}
void Program::logits(int x, const Linear& w, float scale, float softcap) {
    Op& op = push(LOGITS);
    op.x = x, op.selected = true;
    op.linear.w = w.w, op.linear.out_scale = softcap != 0.0f ? 1.0f : scale;
    if (softcap == 0.0f) return;
    Op& cap = push(MIX);
    cap.selected = true, cap.mix.mode = 3, cap.mix.x_scale = scale, cap.mix.cap = softcap,
    cap.mix.dim = w.w.n;
}

void Program::grow(int64_t tokens) {
    if (tokens <= capacity) return;
    capacity = std::max(tokens, capacity * 2);
    size_t floats = 0;
    for (auto& b : buffers) floats += size_t(b.stride * b.rows_per_token * capacity);
    free(memory);
    memory = nullptr;
    void* p = nullptr;
    const size_t huge = size_t(2) << 20;
    if (posix_memalign(&p, floats * 4 > huge ? huge : 4096, floats * 4 + 64)) {
        capacity = 0;
        throw std::bad_alloc();
    }
    memory = (char*)p;
    if (floats * 4 > huge) madvise(p, floats * 4, MADV_HUGEPAGE);
    float* at = (float*)p;
    for (auto& b : buffers) b.data = at, at += b.stride * b.rows_per_token * capacity;
}

// Fills this step's addresses and row counts into the ops.
void Program::bind(const Call& c) {
    auto data = [&](int b) { return b < 0 ? nullptr : buffers[size_t(b)].data; };
    auto stride = [&](int b) { return b < 0 ? 0 : buffers[size_t(b)].stride; };
    for (Op& op : ops) {
        const int64_t n = c.count(op.selected);
        float *x = data(op.x), *y = data(op.y), *residual = data(op.residual);
        switch (op.kind) {
            case EMBED:
                op.embed.ids = at<int32_t>(c.ids), op.embed.tokens = n,
                op.embed.positions = at<int32_t>(c.positions);
                op.embed.y = y, op.embed.ldy = stride(op.y);
                break;
            case EMBEDS:
                op.mix.mode = 2, op.mix.rows = c.embeds ? n : 0, op.mix.x = at<float>(c.embeds),
                op.mix.ldx = op.mix.dim;
                op.mix.mask = at<uint8_t>(c.embeds_mask), op.mix.y = y, op.mix.ldy = stride(op.y);
                break;
            case NORM:
                op.norm.x = x + op.x_offset, op.norm.ldx = stride(op.x), op.norm.residual = residual,
                op.norm.ldr = stride(op.residual);
                op.norm.y = y + op.x_offset, op.norm.ldy = stride(op.y), op.norm.rows = n;
                break;
            case LINEAR:
            case LOGITS:
                op.linear.x = x, op.linear.ldx = stride(op.x), op.linear.m = n;
                op.linear.residual = residual, op.linear.ldr = stride(op.residual);
                op.linear.y = op.kind == LINEAR ? y : at<float>(c.logits),
                op.linear.ldy = op.kind == LINEAR ? stride(op.y) : c.ld_logits;
                if (op.kind == LOGITS && !c.logits) op.linear.m = 0;
                break;
            case STORE: {
                StoreArgs& a = op.store;
                const int q = op.q < 0 ? op.x : op.q;
                a.q = data(q) + op.offsets[0], a.k = x + op.offsets[1], a.v = x + op.offsets[2];
                a.ldq = stride(q), a.ldk = a.ldv = stride(op.x), a.tokens = n;
                if (op.q_to >= 0) a.q_to = data(op.q_to) + a.k_lead, a.ldq_to = stride(op.q_to);
                if (!(op.parts & 1)) a.q = nullptr;
                if (!(op.parts & 2)) a.k = nullptr;
                a.slots = op.parts & 4 ? at<int32_t>(std::get<2>(c.groups.at(size_t(op.group)))) : nullptr;
                a.cos_sin = nullptr;
                if (op.rope >= 0) {
                    a.cos_sin = at<float>(std::get<0>(c.ropes.at(size_t(op.rope))));
                    a.positions = std::get<1>(c.ropes[size_t(op.rope)]) ? nullptr : at<int32_t>(c.positions);
                }
                break;
            }
            case ATTENTION: {
                AttnArgs& a = op.attention;
                a.q = x + op.x_offset, a.ldq = stride(op.x), a.out = y, a.ldo = stride(op.y);
                a.page_table = at<int32_t>(std::get<0>(c.groups.at(size_t(op.group)))),
                a.ldp = std::get<1>(c.groups[size_t(op.group)]);
                a.query_start = at<int32_t>(c.query_start), a.kv_len = at<int32_t>(c.kv_len),
                a.num_seqs = c.num_seqs;
                a.tree = at<uint8_t>(c.tree), a.tree_ld = c.tree_ld;
                break;
            }
            case HEADS:
                op.heads.x = x, op.heads.ldx = stride(op.x), op.heads.y = y, op.heads.ldy = stride(op.y),
                op.heads.m = n;
                break;
            case MIX:
                op.mix.x = x ? x + op.x_offset : nullptr, op.mix.ldx = stride(op.x), op.mix.rows = n;
                if (op.gathers) op.mix.index = at<int32_t>(c.rows);
                if (op.mix.mode == 5) op.mix.x = op.factors, op.mix.index = at<int32_t>(c.positions);
                op.mix.y = op.mix.mode == 3 ? at<float>(c.logits) : y + op.y_offset,
                op.mix.ldy = op.mix.mode == 3 ? c.ld_logits : stride(op.y);
                if (op.mix.mode == 3 && !c.logits) op.mix.rows = 0;
                break;
            case ACT:
                op.act.x = x, op.act.ldx = stride(op.x), op.act.y = y, op.act.ldy = stride(op.y),
                op.act.rows = n;
                break;
            case MOE:
                op.experts.x = x, op.experts.ldx = stride(op.x), op.experts.tokens = n, op.experts.y = y,
                op.experts.ldy = stride(op.y);
                op.experts.scaled = residual, op.experts.lds = stride(op.residual);
                op.experts.hidden = data(op.hidden), op.experts.out = data(op.out);
                assignment.reserve(n, op.route.top_k, op.route.experts);
                break;
            case HIDDEN:
                op.mix.x = x, op.mix.ldx = stride(op.x), op.mix.y = at<float>(c.hidden),
                op.mix.ldy = c.ld_hidden, op.mix.rows = c.hidden ? n : 0;
                break;
            case GATE:
            case HEAD_NORM:
            case CONV:
            case DECAY:
            case SCAN: bind_state(op, c, n); break;
        }
    }
}

double Program::cost_flops(const Call& c, double& bytes) const {
    double flops = 0;
    for (const Op& op : ops) {
        if (op.kind == LINEAR || op.kind == LOGITS) {
            double size = double(op.linear.w.n) * double(op.linear.w.k);
            bytes += size * bytes_each(op.linear.w.format);
            flops += 2 * size * double(op.linear.m);
        }
        if (op.kind == MOE) {
            const ExpertArgs& e = op.experts;
            double size = double(e.up[0].n) * double(e.up[0].k) + double(e.down[0].n) * double(e.down[0].k),
                   chosen = double(e.tokens * e.top_k);
            bytes += size * bytes_each(e.up[0].format) * std::min(chosen, double(e.experts));
            flops += 2 * size * chosen;
        }
        if (op.kind == HEADS) {
            const double size = double(op.heads.heads) * double(op.heads.w[0].n) * double(op.heads.w[0].k);
            bytes += size * bytes_each(op.heads.w[0].format);
            flops += 2 * size * double(op.heads.m);
        }
        if (op.kind == SCAN) {
            const double size = double(op.scan.page);
            bytes += 8 * size * double(c.num_runs), flops += 8 * size * double(c.tokens);
        }
        if (op.kind == ATTENTION)
            bytes += plans[size_t(op.plan)].bytes, flops += plans[size_t(op.plan)].flops;
    }
    return flops + 200.0 * double(c.tokens) * double(ops.size());
}

void Program::execute_moe(const Op& op, const Kernels& k, const Ctx& ctx) {
    const Route& r = op.route;
    const Buffer& logits = buffers[size_t(op.logits)];
    ctx.each(op.experts.tokens, 1, [&](int64_t t0, int64_t t1) {
        for (int64_t t = t0; t < t1; t++)
            choose(r, logits.data + t * logits.stride, assignment.ids.data() + t * r.top_k,
                   assignment.weights.data() + t * r.top_k);
    });
    ctx.barrier();
    if (ctx.tid == 0) assignment.sort(op.experts.tokens, r.top_k, r.experts);
    ctx.barrier();
    run_experts(k, op.experts, assignment, ctx);
}

void Program::execute(const Op& op, const Kernels& k, const Ctx& ctx) {
    switch (op.kind) {
        case EMBED: k.embed(op.embed, ctx); break;
        case NORM: k.norm(op.norm, ctx); break;
        case LINEAR:
        case LOGITS: run_linear(k, op.linear, ctx); break;
        case STORE: k.store(op.store, ctx); break;
        case ATTENTION: {
            AttnArgs a = op.attention;
            plans[size_t(op.plan)].give(a, ctx.shared());
            run_attention(k, a, ctx);
            break;
        }
        case MOE:
            if (op.experts.tokens > 0) execute_moe(op, k, ctx);
            break;
        case HEADS: run_heads(k, op.heads, ctx); break;
        case EMBEDS:
        case HIDDEN:
        case MIX:
            if (op.mix.rows > 0) k.mix(op.mix, ctx);
            break;
        case ACT: k.activation(op.act, ctx); break;
        case GATE: k.gate(op.gate, ctx); break;
        case HEAD_NORM: k.head_norm(op.head_norm, ctx); break;
        case CONV: k.conv(op.conv, ctx); break;
        case DECAY: k.decay(op.decay, ctx); break;
        case SCAN: k.scan(op.scan, ctx); break;
    }
}

void Program::run(int64_t tokens, Address ids, Address positions, int num_seqs, Address query_start,
                  Address kv_len, std::vector<std::tuple<Address, int64_t, Address>> groups,
                  std::vector<std::tuple<Address, bool>> ropes, Address rows, int64_t num_rows,
                  Address logits, int64_t ld_logits, Address hidden, int64_t ld_hidden, Address embeds,
                  Address embeds_mask, Address tree, int64_t tree_ld, Address runs, int64_t num_runs,
                  int threads) {
    Call c{tokens, num_rows,  ids,    positions, num_seqs, query_start, kv_len, groups,  ropes, rows,
           logits, ld_logits, hidden, ld_hidden, embeds,   embeds_mask, tree,   tree_ld, runs,  num_runs};
    grow(std::max(tokens, num_rows));
    bind(c);
    const Kernels& k = kernels();
    const int most = threads > 0 ? threads : max_threads();
    size_t shared = 0, local = 0;
    for (size_t p = 0; p < plans.size(); p++) {
        const AttnArgs& a = ops[size_t(plan_of[p])].attention;
        plans[p].make(a, most);
        shared = std::max(shared, plans[p].partial_floats * 4);
        local = std::max(local, local_for(k, a));
    }
    double bytes = 0, flops = cost_flops(c, bytes);
    int n = threads > 0 ? threads : threads_for(bytes, flops);
    for (const Op& op : ops)
        if (op.kind == LINEAR || op.kind == LOGITS) {
            shared = std::max(shared, shared_for(k, op.linear));
            local = std::max(local, local_for(k, op.linear, n));
        } else if (op.kind == MOE) {
            shared = std::max(shared, experts_shared(k, op.experts));
            local = std::max(local, experts_local(k, op.experts, n));
        } else if (op.kind == HEADS) {
            shared = std::max(shared, heads_shared(k, op.heads));
            local = std::max(local, heads_local(k, op.heads, n));
        }
    run_team(n, shared, local, [&](const Ctx& ctx) {
        if (!profiling) {
            for (const Op& op : ops) execute(op, k, ctx);
            return;
        }
        for (const Op& op : ops) {
            auto t0 = std::chrono::steady_clock::now();
            execute(op, k, ctx);
            if (ctx.tid == 0)
                seconds[op.kind] +=
                    std::chrono::duration<double>(std::chrono::steady_clock::now() - t0).count();
        }
    });
}

std::vector<std::tuple<std::string, double>> Program::profile() {
    static const char* names[] = {"embed",      "norm",      "linear", "store",  "attention", "mix",
                                  "activation", "logits",    "hidden", "embeds", "moe",       "heads",
                                  "gate",       "head norm", "conv",   "decay",  "scan"};
    std::vector<std::tuple<std::string, double>> out;
    for (int i = 0; i < NUM_KINDS; i++) {
        out.emplace_back(names[i], seconds[i]);
        seconds[i] = 0;
    }
    return out;
}

}  // namespace radix

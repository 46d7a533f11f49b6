#include "program.h"

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <new>
#include <numeric>
#include <stdexcept>

namespace radix {

Program::~Program() { free(memory); }

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
    if (floats * 4 > huge) want_huge(p, floats * 4);
    float* at = (float*)p;
    for (auto& b : buffers) b.own = at, at += b.stride * b.rows_per_token * capacity;
}

// Fills this step's addresses and row counts into the ops.
void Program::bind(const Step& c) {
    lora_batch = c.lora ? at<LoraBatch>(c.lora) : nullptr;
    lora_of_all = c.lora_of_all ? at<LoraBatch>(c.lora_of_all) : nullptr;
    if (lora_batch) lora_batch->select(at<int32_t>(c.rows), c.num_rows);
    const int64_t all = tokens_before(c, int(c.group_tokens.size()));
    for (Op& op : ops) {
        const int64_t n = op.of_all ? all : op.selected ? c.num_rows : c.tokens;
        float *x = data(op.x), *y = data(op.y);
        switch (op.kind) {
            case EMBED: {
                EmbedArgs& a = op.embed;
                a.ids = at<int32_t>(c.ids), a.tokens = n, a.positions = at<int32_t>(c.positions);
                a.y = y, a.ldy = stride(op.y);
                break;
            }
            case NORM: {
                NormArgs& a = op.norm;
                a.x = x + op.x_offset, a.ldx = stride(op.x);
                a.y = y + op.x_offset, a.ldy = stride(op.y), a.rows = n;
                break;
            }
            case LINEAR:
            case LOGITS: {
                LinearArgs& a = op.linear;
                const bool is_logits = op.kind == LOGITS;
                a.x = x, a.ldx = stride(op.x), a.m = is_logits && !c.logits ? 0 : n;
                a.residual = data(op.residual, op.y_offset), a.ldr = stride(op.residual);
                a.y = (is_logits ? at<float>(c.logits) : y) + op.y_offset;
                a.ldy = is_logits ? c.ld_logits : stride(op.y);
                if (op.site >= 0) bind_lora(op);
                break;
            }
            case HEADS: {
                HeadArgs& a = op.heads;
                a.x = x, a.ldx = stride(op.x), a.y = y, a.ldy = stride(op.y), a.m = n;
                op.lora = lora_batch && op.site >= 0 ? lora_batch->work(op.site, false) : nullptr;
                if (op.lora) reserve_lora(*op.lora);
                break;
            }
            case MOE: {
                ExpertArgs& a = op.experts;
                a.x = x, a.ldx = stride(op.x), a.tokens = n, a.y = y, a.ldy = stride(op.y);
                a.scaled = data(op.residual), a.lds = stride(op.residual);
                a.hidden = data(op.hidden), a.out = data(op.out), a.wide = data(op.wide);
                const LoraBatch* lora = lora_of(op);
                const bool is_adapted =
                    lora && op.site >= 0 && (lora->has(op.site) || lora->has(op.site + 1));
                a.lora = is_adapted ? &lora_slots : nullptr;
                assignment.reserve(n, op.route.top_k, op.num_slots);
                break;
            }
            case GATHER: bind_gather(op, c, n); break;
            case STORE:
            case ATTENTION: bind_attention(op, c, n); break;
            case EMBEDS:
            case HIDDEN:
            case TAP:
            case MIX: bind_mix(op, c, n); break;
            default: bind_state(op, c, n); break;
        }
    }
}

int64_t Program::tokens_before(const Step& c, int group) {
    return std::accumulate(c.group_tokens.begin(), c.group_tokens.begin() + group, int64_t(0));
}

void Program::bind_gather(Op& op, const Step& c, int64_t n) {
    const bool is_logits = op.y < 0;
    op.gathered = (char*)(is_logits ? at<float>(c.logits) : data(op.y, op.y_offset));
    op.ld_gathered = (is_logits ? c.ld_logits : stride(op.y)) * 4;
    op.num_rows = is_logits && !c.logits ? 0 : n;
    op.own = op.x < 0 ? op.gathered + op.bounds[size_t(op.group_of_ranks->rank)] : (char*)data(op.x);
    op.ld_own = op.x < 0 ? op.ld_gathered : stride(op.x) * 4;
    if (!op.each) return;
    // whole rows are one run of bytes, which the first rank of a group brings
    for (int r = 0; r <= op.group_of_ranks->size; r++)
        op.bounds[size_t(r)] = tokens_before(c, (r + op.each - 1) / op.each) * op.ld_gathered;
    op.num_rows = 1;
}

// What adapters add comes before the activation, scale and residual, which are then steps of their own, from
// a buffer apart. One order for all adapters: a row must not depend on those of others.
void Program::bind_lora(Op& op) {
    LinearArgs& a = op.linear;
    LoraBatch* lora = lora_of(op);
    op.lora = lora && a.m > 0 ? lora->work(op.site, op.selected && !op.of_all) : nullptr;
    a.act = op.act, a.out_scale = op.out_scale;
    if (!op.lora) return;
    reserve_lora(*op.lora);
    a.act = a.w.paired ? ACT_APART : ACT_NONE;
    if (!is_apart(op)) return;
    a.y = data(op.apart), a.ldy = stride(op.apart), a.residual = nullptr, a.out_scale = 1.0f;
}

void Program::reserve_lora(const LoraWork& work) {
    if (lora_h.size() < size_t(work.num_h)) lora_h.resize(size_t(work.num_h));
}

bool Program::is_apart(const Op& op) {
    const bool is_sum = op.residual >= 0 || op.out_scale != 1.0f;
    return op.apart >= 0 && (op.linear.w.paired || is_sum);
}

void Program::bind_attention(Op& op, const Step& c, int64_t n) {
    const KvGroup& group = c.groups.at(size_t(op.group));
    const float* x = data(op.x);
    if (op.kind == ATTENTION) {
        AttnArgs& a = op.attention;
        a.q = x + op.x_offset, a.ldq = stride(op.x), a.out = data(op.y), a.ldo = stride(op.y);
        a.page_table = at<int32_t>(group.page_table), a.ldp = group.stride;
        a.query_start = at<int32_t>(c.query_start), a.kv_len = at<int32_t>(c.kv_len), a.num_seqs = c.num_seqs;
        a.tree = at<uint8_t>(c.tree), a.tree_ld = c.tree_ld;
        op.sparse = SparseArgs{};
        a.is_sparse = nullptr;
        if (!a.cache.heavy || c.num_sparse == 0) return;
        a.is_sparse = at<uint8_t>(c.is_sparse);
        op.sparse = {a, at<SparseRow>(c.sparse_rows), c.num_sparse, c.max_sparse_len};
        return;
    }
    StoreArgs& a = op.store;
    const int q = op.q < 0 ? op.x : op.q;
    a.q = op.parts & STORE_Q ? data(q, op.offsets[0]) : nullptr;
    a.k = op.parts & STORE_K ? data(op.x, op.offsets[1]) : nullptr;
    a.v = x + op.offsets[2];
    a.ldq = stride(q), a.ldk = a.ldv = stride(op.x), a.tokens = n;
    if (op.q_to >= 0) a.q_to = data(op.q_to, a.k_lead), a.ldq_to = stride(op.q_to);
    a.slots = op.parts & STORE_CACHE ? at<int32_t>(group.slots) : nullptr;
    a.cos_sin = nullptr;
    if (op.rope < 0) return;
    const RopeTable& rope = c.ropes.at(size_t(op.rope));
    a.cos_sin = at<float>(rope.cos_sin), a.positions = rope.by_token ? nullptr : at<int32_t>(c.positions);
}

void Program::bind_mix(Op& op, const Step& c, int64_t n) {
    MixArgs& a = op.mix;
    a.x = op.x < 0 ? nullptr : data(op.x, op.x_offset), a.ldx = stride(op.x);
    a.y = data(op.y, op.y_offset), a.ldy = stride(op.y), a.rows = n;
    if (op.each) a.x += tokens_before(c, op.group_of_ranks->rank / op.each) * a.ldx;
    if (op.gathers) a.index = at<int32_t>(c.rows);
    if (op.kind == EMBEDS) {
        a.kind = MixKind::COPY_ROWS, a.x = at<float>(c.embeds), a.ldx = a.dim;
        a.mask = at<uint8_t>(c.embeds_mask), a.rows = c.embeds ? n : 0;
    } else if (op.kind == HIDDEN) {
        a.y = at<float>(c.hidden), a.ldy = c.ld_hidden, a.rows = c.hidden ? n : 0;
    } else if (op.kind == TAP) {
        a.y = at<float>(c.taps) + op.y_offset, a.ldy = c.ld_taps, a.rows = c.taps ? n : 0;
    } else if (a.kind == MixKind::ADD_WEIGHTED) {
        a.weights = data(op.q, op.offsets[0]), a.ldw = stride(op.q);
    } else if (a.kind == MixKind::RG_LRU) {
        a.index = at<int32_t>(c.positions);
    } else if (a.kind == MixKind::SCALE_HEADS) {
        a.x = op.factors, a.index = at<int32_t>(c.positions);
    } else if (a.kind == MixKind::SOFTCAP) {
        a.y = at<float>(c.logits) + op.y_offset, a.ldy = c.ld_logits, a.rows = c.logits ? n : 0;
    }
}

void Program::bind_state(Op& op, const Step& c, int64_t n) {
    float *x = data(op.x, op.x_offset), *y = data(op.y, op.y_offset);
    const int64_t ldx = stride(op.x), ldy = stride(op.y);
    switch (op.kind) {
        case GATE:
            op.gate.x = x, op.gate.ldx = ldx, op.gate.y = y, op.gate.ldy = ldy, op.gate.rows = n;
            break;
        case ACTIVATION: {
            ActArgs& a = op.activation;
            a.x = x, a.ldx = ldx, a.y = y, a.ldy = ldy, a.rows = n;
            break;
        }
        case HEAD_NORM: {
            HeadNormArgs& a = op.head_norm;
            a.x = x, a.ldx = ldx, a.y = y, a.ldy = ldy, a.rows = n;
            a.gate = data(op.q, op.offsets[0]), a.ldg = stride(op.q);
            break;
        }
        case CONV: {
            ConvArgs& a = op.conv;
            a.x = data(op.x, op.offsets[0]), a.ldx = ldx, a.y = y, a.ldy = ldy;
            a.times = op.offsets[1] < 0 ? nullptr : data(op.x, op.offsets[1]);
            a.gate = op.offsets[2] < 0 ? nullptr : data(op.x, op.offsets[2]);
            a.runs = at<StateRun>(c.runs), a.num_runs = c.num_runs;
            break;
        }
        case DECAY: {
            DecayArgs& a = op.decay;
            a.x = x, a.ldx = ldx, a.step = data(op.q), a.lds = stride(op.q), a.log = y, a.ldl = ldy,
            a.rows = n;
            break;
        }
        default: {
            ScanArgs& s = op.scan;
            ScanInput* to[] = {&s.q, &s.k, &s.v, &s.decay, &s.beta};
            for (int i = 0; i < 5; i++) {
                const ScanSource& from = op.sources[i];
                to[i]->data = data(from.buffer, from.offset), to[i]->token = stride(from.buffer);
                to[i]->head = from.head;
            }
            s.out = y, s.out_token = ldy, s.tokens = n, s.runs = at<StateRun>(c.runs),
            s.num_runs = c.num_runs;
        }
    }
}

double Program::cost_flops(const Step& c, double& bytes) const {
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
        if (op.kind == ATTENTION) {
            bytes += plans[size_t(op.plan)].bytes + sparse_bytes(op.sparse);
            flops += plans[size_t(op.plan)].flops;
        }
    }
    return flops + 200.0 * double(c.tokens) * double(ops.size());
}

void Program::execute_linear(const Op& op, const Kernels& k, const Ctx& ctx) {
    const LinearArgs& a = op.linear;
    Ctx together = ctx;
    together.packers = op.packers;
    if (!op.lora) return run_linear(k, a, together);
    LoraArgs l;
    l.tokens = op.lora->tokens, l.inputs = a.w.k, l.max_rank = op.lora->max_rank, l.scale = a.out_scale;
    l.x = data(op.lora_x < 0 ? op.x : op.lora_x), l.ldx = stride(op.lora_x < 0 ? op.x : op.lora_x);
    l.h = const_cast<float*>(lora_h.data()), l.y = a.y, l.ldy = a.ldy;
    l.tasks = op.lora->shrink.data(), l.num_tasks = int64_t(op.lora->shrink.size());
    k.lora_shrink(l, ctx);
    run_linear(k, a, together);
    l.tasks = op.lora->expand.data(), l.num_tasks = int64_t(op.lora->expand.size());
    k.lora_expand(l, ctx);
    float* y = data(op.y, op.y_offset);
    if (a.w.paired || op.act != ACT_NONE) {
        ActArgs act;
        act.x = a.y, act.ldx = a.ldy, act.y = y, act.ldy = stride(op.y), act.rows = a.m, act.act = op.act;
        act.gated = a.w.paired, act.dim = a.w.paired ? a.w.n / 2 : a.w.n;
        return k.activation(act, ctx);
    }
    if (!is_apart(op)) return;
    MixArgs mix;
    mix.kind = MixKind::SCALE, mix.rows = a.m, mix.dim = a.w.n, mix.x_scale = op.out_scale;
    mix.y = a.y, mix.ldy = a.ldy;
    if (op.out_scale != 1.0f) k.mix(mix, ctx);
    mix.kind = op.residual >= 0 ? MixKind::ADD : MixKind::COPY_ROWS, mix.x_scale = 1.0f;
    mix.x = a.y, mix.ldx = a.ldy, mix.y = y, mix.ldy = stride(op.y);
    k.mix(mix, ctx);
}

void Program::execute_moe(const Op& op, const Kernels& k, const Ctx& ctx) {
    const Route& r = op.route;
    ctx.each(op.experts.tokens, 1, [&](int64_t t0, int64_t t1) {
        for (int64_t t = t0; t < t1; t++)
            choose(r, data(op.logits, t * stride(op.logits)), assignment.ids.data() + t * r.top_k,
                   assignment.weights.data() + t * r.top_k);
    });
    ctx.barrier();
    if (ctx.tid == 0) {
        if (op.expert_owner->records)
            op.expert_owner->chosen.assign(assignment.ids.data(),
                                           assignment.ids.data() + op.experts.tokens * r.top_k);
        if (const ExpertPart* part = op.experts.part)
            for (int64_t i = 0; i < op.experts.tokens * r.top_k; i++) {
                int32_t& id = assignment.ids[size_t(i)];
                id = part->slot(i / r.top_k, id);
            }
        assignment.sort(op.experts.tokens, r.top_k, op.num_slots);
        if (op.experts.lora)
            lora_of(op)->work(op.site, op.selected && !op.of_all, assignment, op.experts.first,
                              op.experts.first + op.experts.count,
                              op.experts.part ? op.experts.part->experts() : op.expert_owner->blocks,
                              lora_slots);
    }
    ctx.barrier();
    run_experts(k, op.experts, assignment, ctx);
}

void Program::execute_heads(const Op& op, const Kernels& k, const Ctx& ctx) {
    const HeadArgs& a = op.heads;
    run_heads(k, a, ctx);
    if (!op.lora) return;
    LoraArgs l;
    l.tokens = op.lora->tokens, l.inputs = a.w[0].k, l.max_rank = op.lora->max_rank, l.h = lora_h.data();
    l.x = a.x, l.ldx = a.ldx, l.x_block = a.x_head, l.y = a.y, l.ldy = a.ldy, l.y_block = a.y_head;
    l.tasks = op.lora->shrink.data(), l.num_tasks = int64_t(op.lora->shrink.size());
    k.lora_shrink(l, ctx);
    l.tasks = op.lora->expand.data(), l.num_tasks = int64_t(op.lora->expand.size());
    k.lora_expand(l, ctx);
}

void Program::execute(const Op& op, const Kernels& k, const Ctx& ctx) {
    switch (op.kind) {
        case EMBED: k.embed(op.embed, ctx); break;
        case NORM: execute_norm(op, k, ctx); break;
        case LINEAR:
        case LOGITS: execute_linear(op, k, ctx); break;
        case STORE: k.store(op.store, ctx); break;
        case ATTENTION: {
            AttnArgs a = op.attention;
            plans[size_t(op.plan)].fill(a, ctx.shared());
            run_attention(k, a, ctx);
            if (op.sparse.num_rows == 0) break;
            SparseArgs s = op.sparse;
            s.work = ctx.shared();
            k.sparse_attention(s, ctx);
            break;
        }
        case MOE:
            if (op.experts.tokens > 0) execute_moe(op, k, ctx);
            break;
        case HEADS: execute_heads(op, k, ctx); break;
        case EMBEDS:
        case HIDDEN:
        case TAP:
        case MIX:
            if (op.mix.rows > 0) k.mix(op.mix, ctx);
            break;
        case GATE: k.gate(op.gate, ctx); break;
        case ACTIVATION: k.activation(op.activation, ctx); break;
        case HEAD_NORM: k.head_norm(op.head_norm, ctx); break;
        case CONV: k.conv(op.conv, ctx); break;
        case DECAY: k.decay(op.decay, ctx); break;
        case SCAN: k.scan(op.scan, ctx); break;
        case GATHER: execute_gather(op, ctx); break;
        case NUM_KINDS: break;
    }
}

void Program::execute_gather(const Op& op, const Ctx& ctx) {
    if (shares && op.y >= 0 && buffers[size_t(op.y)].is_common) return common->barrier(ctx);
    op.group_of_ranks->gather(ctx, op.own, op.ld_own, op.gathered, op.ld_gathered, op.num_rows,
                              op.bounds.data(), op.target);
}

std::span<const Program::Op> Program::ops_of(const Step& c) const {
    const int first = c.first_op, count = c.num_ops < 0 ? num_ops() - first : c.num_ops;
    if (first < 0 || count < 0 || count > num_ops() - first)
        throw std::invalid_argument(std::to_string(count) + " ops from " + std::to_string(first) +
                                    " of a program of " + std::to_string(num_ops()));
    return std::span(ops).subspan(size_t(first), size_t(count));
}

void Program::run(const Step& c) {
    const std::span<const Op> chosen = ops_of(c);
    const int64_t most = std::max({c.tokens, c.num_rows, tokens_before(c, int(c.group_tokens.size()))});
    grow(most);
    bind_common(most);
    bind(c);
    bind_packers();
    const int threads = c.threads;
    const Kernels& k = kernels();
    const int team = threads > 0 ? threads : max_threads();
    size_t shared = 0, local = 0;
    for (const LoraBatch* lora : {lora_batch, lora_of_all})
        if (lora) local = std::max(local, k.lora_local(lora->max_rank));
    for (size_t p = 0; p < plans.size(); p++) {
        const AttnArgs& a = ops[size_t(plan_of[p])].attention;
        plans[p].make(a, team);
        shared = std::max(shared, plans[p].partial_floats * 4);
        local = std::max(local, local_for(k, a));
    }
    double bytes = 0, flops = cost_flops(c, bytes);
    int n = threads > 0 ? threads : c.is_lone ? threads_for_step(bytes, flops) : threads_for(bytes, flops);
    for (const Op& op : ops)
        if (op.kind == LINEAR || op.kind == LOGITS) {
            if (!op.packers) shared = std::max(shared, shared_for(k, op.linear));
            local = std::max(local, local_for(k, op.linear, n));
        } else if (op.kind == MOE) {
            shared = std::max(shared, experts_shared(k, op.experts));
            local = std::max(local, experts_local(k, op.experts, n));
        } else if (op.kind == ATTENTION && op.sparse.num_rows > 0) {
            shared = std::max(shared, k.sparse_shared(op.sparse));
            local = std::max(local, k.sparse_local(op.sparse));
        } else if (op.kind == HEADS) {
            shared = std::max(shared, heads_shared(k, op.heads));
            local = std::max(local, heads_local(k, op.heads, n));
        }
    run_team(n, shared, local, [&](const Ctx& ctx) {
        if (shares) common->barrier(ctx);  // all have left the step before
        for (const Op& op : chosen) {
            if (shares && op.fence) common->barrier(ctx);
            if (!profiling) {
                execute(op, k, ctx);
                continue;
            }
            auto t0 = std::chrono::steady_clock::now();
            execute(op, k, ctx);
            if (ctx.tid == 0)
                seconds[op.kind] +=
                    std::chrono::duration<double>(std::chrono::steady_clock::now() - t0).count();
        }
    });
    for (const Op& op : ops)
        if (op.group_of_ranks) op.group_of_ranks->check();
}

std::vector<std::tuple<std::string, double>> Program::profile() {
    static const char* names[] = {"embed", "norm",   "linear",     "store",     "attention",
                                  "mix",   "logits", "hidden",     "embeds",    "moe",
                                  "heads", "gate",   "activation", "head norm", "conv",
                                  "decay", "scan",   "tap",        "all gather"};
    std::vector<std::tuple<std::string, double>> out;
    for (int i = 0; i < NUM_KINDS; i++) {
        out.emplace_back(names[i], seconds[i]);
        seconds[i] = 0;
    }
    return out;
}

}  // namespace radix

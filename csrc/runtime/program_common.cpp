// Buffers in memory that all ranks of a group see: a gather is then a barrier, and work that every rank
// would repeat (norms, the packing of a layer's input) is divided by rows.
//
// A buffer is *common* if ranks write columns of their own into it and gather them, or all write the same.
// It is *divided* if norms of common buffers are all that writes it: each rank writes rows of its own. A
// buffer that is gathered from into a common one is its part there (`part_of`). All ranks have the same ops
// and step sizes, so that all come to the same decisions.
#include <algorithm>

#include "program.h"

namespace radix {

namespace {
constexpr size_t ALIGN = 4096;
size_t aligned(size_t bytes) { return (bytes + ALIGN - 1) / ALIGN * ALIGN; }
}  // namespace

void Program::StepPackers::barrier(const Ctx& ctx) { group->barrier(ctx); }

// What an op does to buffers: others than its y it reads, unless it is of a kind that changes them.
bool Program::only_reads(const Op& op, int b) {
    switch (op.kind) {
        case NORM:
        case LINEAR:
        case LOGITS:
        case HIDDEN:
        case TAP:
        case ACTIVATION:
        case GATE:
        case MIX: return op.y != b;
        case MOE: return op.y != b && op.hidden != b && op.out != b && op.wide != b && op.residual != b;
        default: return false;
    }
}

bool Program::touches(const Op& op, int b) {
    const int all[] = {op.x,      op.y,   op.residual, op.q,      op.q_to, op.logits,
                       op.hidden, op.out, op.wide,     op.lora_x, op.apart};
    return std::find(std::begin(all), std::end(all), b) != std::end(all) ||
           std::any_of(std::begin(op.sources), std::end(op.sources),
                       [&](const ScanSource& s) { return s.buffer == b; });
}

// How op i writes the buffer.
Program::Writes Program::writes(size_t i, int b) const {
    const Op& op = ops[i];
    if (op.y != b) return touches(op, b) && !only_reads(op, b) && op.kind != GATHER ? CHANGES : NOTHING;
    const bool is_fresh = op.x != b;
    switch (op.kind) {
        case LINEAR: {
            const Op* next = i + 1 < ops.size() ? &ops[i + 1] : nullptr;
            const bool is_gathered = next && next->kind == GATHER && next->y == b && next->x < 0;
            return is_gathered && is_fresh && (op.residual < 0 || op.residual == b) ? OWN_COLUMNS : CHANGES;
        }
        case GATHER: return op.group_of_ranks == common && op.target < 0 ? NOTHING : CHANGES;
        case EMBED:
        case EMBEDS: return THE_SAME;
        case NORM: return is_fresh ? ROWS : CHANGES;
        case MIX: return is_fresh && op.mix.kind == MixKind::COPY_ROWS ? THE_SAME : CHANGES;
        default: return CHANGES;
    }
}

// The buffer that is gathered from, if it can lie in the one that is gathered into; else -1.
int Program::part_in(int b) const {
    const Op* first = nullptr;
    for (const Op& op : ops) {
        if (op.kind != GATHER || op.y != b) continue;
        if (op.x < 0 || (first && (op.x != first->x || op.bounds != first->bounds))) return -1;
        first = &op;
    }
    if (!first) return -1;
    for (const Op& op : ops)
        if (op.kind == GATHER && op.y != b && (op.x == first->x || op.y == first->x)) return -1;
    const size_t rank = size_t(common->rank);
    const int64_t width = first->bounds[rank + 1] - first->bounds[rank];
    return buffers[size_t(first->x)].width * 4 == width ? first->x : -1;
}

void Program::choose_common() {
    for (int b = 0; b < int(buffers.size()); b++) {
        Buffer& buffer = buffers[size_t(b)];
        const int part = part_in(b);
        const Op* gathered = nullptr;
        bool is_normed = false, is_common = buffer.rows_per_token == 1, is_divided = is_common;
        for (size_t i = 0; i < ops.size(); i++) {
            const Op& op = ops[i];
            const Writes how = writes(i, b);
            if (op.kind == GATHER && op.y == b) gathered = &op;
            is_normed = is_normed || how == ROWS;
            is_divided = is_divided && (how == NOTHING || how == ROWS);
            is_common = is_common && how != CHANGES && how != ROWS;
            if (op.kind == GATHER && (op.x == b || (op.y == b && op.x != part))) is_common = false;
        }
        buffer.is_common = gathered && is_common;
        buffer.is_divided = is_normed && is_divided;
        if (!buffer.is_common || part < 0) continue;
        buffers[size_t(part)].part_of = b;
        buffers[size_t(part)].part_at = gathered->bounds[size_t(common->rank)] / 4;
    }
    for (const Op& op : ops)  // norms of what this rank alone has are its own
        if (op.kind == NORM && !buffers[size_t(op.x)].is_common) buffers[size_t(op.y)].is_divided = false;
}

// Before an op that writes what another rank may still read, or reads what it may still write, ranks wait
// for each other, unless they have done so since.
void Program::place_fences() {
    std::vector<int> read(buffers.size()), written(buffers.size()), same(buffers.size());
    auto pass = [&] {
        for (auto* marks : {&read, &written, &same}) std::fill(marks->begin(), marks->end(), 0);
    };
    for (size_t i = 0; i < ops.size(); i++) {
        Op& op = ops[i];
        op.fence = false;
        if (op.kind == GATHER && op.y >= 0 && buffers[size_t(op.y)].is_common) {
            pass();
            continue;
        }
        for (int turn = 0; turn < 2; turn++)  // first whether a fence is needed, then what is touched
            for (size_t b = 0; b < buffers.size(); b++) {
                const Buffer& buffer = buffers[b];
                const size_t to = buffer.part_of < 0 ? b : size_t(buffer.part_of);
                if (!touches(op, int(b)) || !(buffers[to].is_common || buffers[to].is_divided)) continue;
                const Writes how = buffer.part_of < 0 ? writes(i, int(b)) : OWN_COLUMNS;
                const bool is_own = how == OWN_COLUMNS || how == ROWS;
                const bool waits =
                    read[to] * (how != NOTHING) || same[to] * (how != THE_SAME) || written[to] * !is_own;
                if (!turn && waits && !op.fence) op.fence = true, pass();
                if (turn) (how == NOTHING ? read : is_own ? written : same)[to] = 1;
                // rows are complete behind their norm
                if (turn && how == ROWS) written[to] = 0;
            }
    }
}

// Once for all steps, when all ops are there.
void Program::plan_common() {
    if (num_planned == num_ops()) return;
    num_planned = num_ops(), common = nullptr;
    bool has_groups = false;
    for (const Op& op : ops) {
        has_groups = has_groups || op.each;
        if (!common && op.kind == GATHER && op.group_of_ranks->common().bytes) common = op.group_of_ranks;
    }
    for (Buffer& b : buffers) b.is_common = b.is_divided = false, b.part_of = -1;
    if (has_groups) common = nullptr;  // ranks have different tokens
    if (!common) return;
    choose_common();
    // ranks with fewer heads or channels may have other local buffers: what all agree on holds
    while (!agree()) {}
    place_fences();
    std::vector<uint8_t> fences;
    for (const Op& op : ops) fences.push_back(op.fence);
    for (const std::vector<uint8_t>& theirs : of_all_ranks(fences))
        for (size_t i = 0; i < ops.size(); i++) ops[i].fence |= bool(theirs[i]);
}

std::vector<std::vector<uint8_t>> Program::of_all_ranks(const std::vector<uint8_t>& mine) {
    const size_t n = mine.size();
    std::vector<uint8_t> all(n * size_t(common->size));
    std::vector<int64_t> bounds;
    for (int r = 0; r <= common->size; r++) bounds.push_back(int64_t(n) * r);
    Team team(1, nullptr);
    common->gather(Ctx{&team, 0}, (const char*)mine.data(), 0, (char*)all.data(), 0, 1, bounds.data(), -1);
    common->check();
    std::vector<std::vector<uint8_t>> found;
    for (int r = 0; r < common->size; r++)
        found.emplace_back(all.begin() + bounds[size_t(r)], all.begin() + bounds[size_t(r) + 1]);
    return found;
}

// False: some rank had chosen what another has not, and has dropped it.
bool Program::agree() {
    std::vector<uint8_t> mine;
    for (const Op& op : ops) {
        const Buffer* y = op.y < 0 ? nullptr : &buffers[size_t(op.y)];
        mine.push_back(y && ((op.kind == GATHER && y->is_common) || (op.kind == NORM && y->is_divided)));
    }
    bool all_same = true;
    for (const std::vector<uint8_t>& theirs : of_all_ranks(mine))
        for (size_t i = 0; i < ops.size(); i++) {
            if (theirs[i] == mine[i]) continue;
            all_same = false;
            if (theirs[i]) continue;
            buffers[size_t(ops[i].y)].is_common = buffers[size_t(ops[i].y)].is_divided = false;
            for (Buffer& part : buffers)
                if (part.part_of == ops[i].y) part.part_of = -1;
        }
    return all_same;
}

// Where the step's buffers lie.
void Program::bind_common(int64_t tokens) {
    plan_common();
    const RankGroup::Common all = common ? common->common() : RankGroup::Common{};
    common_used = 0;
    for (Buffer& b : buffers) b.data = b.own;
    for (const Op& op : ops) {  // in the order of the ops, which is that of all ranks
        if (op.y < 0 || !(op.kind == GATHER || op.kind == NORM)) continue;
        Buffer& b = buffers[size_t(op.y)];
        const bool is_shared = b.is_common || (b.is_divided && tokens * b.width >= together_from);
        if (!is_shared || b.data != b.own) continue;
        b.data = (float*)(all.memory + common_used);
        common_used += aligned(size_t(b.stride * tokens) * 4);
    }
    shares = common && common_used <= all.bytes;
    for (Buffer& b : buffers)
        if (!shares) b.data = b.own;
    for (Buffer& b : buffers)
        if (b.part_of >= 0) b.data = buffers[size_t(b.part_of)].data + b.part_at;
}

// Which inputs are packed together: in two places in turn, as a rank may still read the layer before's.
void Program::bind_packers() {
    size_t bytes = 0;
    int turn = 0;
    for (Op& op : ops) {
        const LinearArgs& a = op.linear;
        const bool is_cut = op.kind == LINEAR || op.is_cut;
        const bool together = shares && is_cut && a.m > 2 && a.m * a.w.k >= together_from;
        op.packers = together ? &packers[turn++ % 2] : nullptr;
        if (together) bytes = std::max(bytes, aligned(shared_for(kernels(), a)));
    }
    if (!turn) return;
    const RankGroup::Common all = common->common();
    const bool fits = common_used + 2 * bytes <= all.bytes;
    for (int i = 0; i < 2; i++) {
        StepPackers& p = packers[i];
        p.group = common, p.rank = common->rank, p.size = common->size;
        p.memory = all.memory + common_used + size_t(i) * bytes;
    }
    for (Op& op : ops)
        if (!fits) op.packers = nullptr;
}

void Program::execute_norm(const Op& op, const Kernels& k, const Ctx& ctx) {
    const Buffer& y = buffers[size_t(op.y)];
    if (!y.is_divided || y.data == y.own) return k.norm(op.norm, ctx);
    NormArgs a = op.norm;
    const int64_t first = a.rows * common->rank / common->size;
    a.rows = a.rows * (common->rank + 1) / common->size - first;
    a.x += first * a.ldx, a.y += first * a.ldy;
    k.norm(a, ctx);
    common->barrier(ctx);
}

}  // namespace radix

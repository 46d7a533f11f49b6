// How the work of one attention call is cut into tasks.
#include <algorithm>

#include "runtime.h"

namespace radix {

// Of a sequence; none of one that the dense kernels leave alone.
static int new_tokens(const AttnArgs& a, int s) {
    return a.is_sparse && a.is_sparse[s] ? 0 : a.query_start[s + 1] - a.query_start[s];
}
static double bytes_of_token(const Cache& c) {
    return double(c.kv_heads) * (c.k_dim + (c.latent ? 0 : c.v_dim)) *
           (c.dtype == 0   ? 4
            : c.dtype == 6 ? 0.5625
            : c.dtype >= 3 ? 1
                           : 2);
}

// Sequences with few new tokens (one, and drafts) whose first pages are the same, read together: a block of
// keys is loaded once for the rows of all. A row's arithmetic does not depend on other rows.
class Sharing {
  public:
    Sharing(AttnPlan& plan, const AttnArgs& args)
        : a(args), p(plan), group(a.heads / a.cache.kv_heads), per_task(std::max(TASK_ROWS, group) / group) {
        from.assign(size_t(a.num_seqs), 0), member_of.assign(size_t(a.num_seqs), -1);
        const bool plain = a.causal && !a.tree && !a.alibi_slopes && a.window == 0 && a.chunk == 0;
        if (!plain || per_task < 2) return;
        for (int s = 0; s < a.num_seqs; s++)
            if (tokens(s) >= 1 && tokens(s) <= per_task && blocks_before(s) >= MIN_BLOCKS) order.push_back(s);
        if (order.size() < 2) return;
        std::sort(order.begin(), order.end(), [&](int s, int t) {
            const int32_t *x = pages(s), *y = pages(t);
            return std::lexicographical_compare(x, x + num_pages(s), y, y + num_pages(t));
        });
        same.assign(order.size(), 0);
        for (size_t i = 1; i < order.size(); i++) same[i] = common(order[i - 1], order[i]);
        choose(0, order.size(), 0);
        for (const Range& r : ranges) {
            const int at = int(p.readers.size());
            for (size_t m = r.first; m < r.last; m++) join(order[m], r.end);
            read(order[r.first], at, r.from, r.end);
            p.bytes -= bytes_of_token(a.cache) * double(r.last - r.first) * (r.end - r.from) * ATTN_BLOCK;
        }
    }
    std::vector<int> from;       // of a sequence: the block where its own work begins
    std::vector<int> member_of;  // its place in the plan's members, or -1

  private:
    static constexpr int MIN_BLOCKS = 2, IN_SPLIT = SPLIT / ATTN_BLOCK;
    const AttnArgs& a;
    AttnPlan& p;
    const int group, per_task;
    struct Range {
        size_t first, last;  // of the order
        int from, end;       // blocks
    };
    std::vector<Range> ranges;
    std::vector<int> order, same;  // sequences sorted by their pages; blocks shared with the one before

    const int32_t* pages(int s) const { return a.page_table + int64_t(s) * a.ldp; }
    int tokens(int s) const { return new_tokens(a, s); }
    int num_pages(int s) const { return (a.kv_len[s] - tokens(s)) / a.cache.page_size; }  // full before them
    int blocks_before(int s) const { return num_pages(s) * a.cache.page_size / ATTN_BLOCK; }
    int common(int s, int t) const {
        const int32_t* x = pages(s);
        const int n = std::min(num_pages(s), num_pages(t));
        return int(std::mismatch(x, x + n, pages(t)).first - x) * a.cache.page_size / ATTN_BLOCK;
    }

    // Sequences [i, j) of the order share what follows block `done`: all of them up to where the first
    // two differ, or up to a split's beginning, where parts of them go on (a split that is shared halfway
    // has one kind of reader). What saves more; the number of blocks that are not read.
    int64_t choose(size_t i, size_t j, int done) {
        const size_t mark = ranges.size();
        const int all = *std::min_element(same.begin() + int64_t(i) + 1, same.begin() + int64_t(j)),
                  whole_splits = std::max(done, all / IN_SPLIT * IN_SPLIT);
        const int64_t others = int64_t(j - i) - 1;
        if (whole_splits > done) ranges.push_back({i, j, done, whole_splits});
        int64_t saved = others * (whole_splits - done);
        for (size_t m = i; m < j;) {
            size_t end = m + 1;
            while (end < j && same[end] > all) end++;
            if (end - m > 1) saved += choose(m, end, whole_splits);
            m = end;
        }
        if (all - done < MIN_BLOCKS || others * (all - done) <= saved) return saved;
        ranges.resize(mark);
        ranges.push_back({i, j, done, all});
        return others * (all - done);
    }
    void join(int s, int blocks) {
        from[size_t(s)] = blocks;
        if (member_of[size_t(s)] < 0) {
            const int splits = (a.kv_len[s] + SPLIT - 1) / SPLIT, rows = tokens(s) * group;
            member_of[size_t(s)] = int(p.members.size());
            p.members.push_back({s, int32_t(p.partial_rows), splits, rows});
            p.partial_rows += int64_t(a.cache.kv_heads) * splits * rows;
        }
        for (int t = 0; t < tokens(s); t++) p.readers.push_back({member_of[size_t(s)], t});
    }
    // All readers from `at` on read the pages of sequence s.
    void read(int s, int at, int first, int end) {
        for (; at < int(p.readers.size()); at += per_task) {
            const int count = std::min(per_task, int(p.readers.size()) - at);
            for (int b = first; b < end; b = b / IN_SPLIT * IN_SPLIT + IN_SPLIT)
                for (int h = 0; h < a.cache.kv_heads; h++) {
                    AttnTask t{s, 0, count, h, b / IN_SPLIT, b / IN_SPLIT + 1, 0};
                    t.readers = at, t.from = b, t.end = std::min(end, b / IN_SPLIT * IN_SPLIT + IN_SPLIT);
                    p.tasks.push_back(t);
                }
            p.bytes += bytes_of_token(a.cache) * double(end - first) * ATTN_BLOCK;
        }
    }
};

constexpr int LONG_SPLITS = 4;
// Splits of one head at a time: more would evict second-level cache before the next head reads it.
static int piece_splits(const Cache& c) { return c.dtype == 6 ? 4 : 2; }  // int4 has a fourth of the bytes

// Enough sequences keep every thread busy without a merge. Heads are joined as far as every thread still has
// several tasks. `splits`: of all KV heads, of the sequences that may be cut.
AttnPlan::Cut AttnPlan::cut(const AttnArgs& a, int threads, int64_t short_units, int64_t splits) {
    const int64_t tasks = 4 * threads, units = std::max<int64_t>(1, short_units);
    const int most = a.cache.latent ? 1 : std::min(a.cache.kv_heads, JOINED_HEADS);
    const int heads = int(std::clamp<int64_t>(splits / (2 * tasks), 1, most));
    const int64_t wanted = heads > 1 ? 2 * tasks * heads : tasks;
    return {int(std::max<int64_t>(1, (wanted + units - 1) / units)), heads};
}

// Whole work of a sequence in splits; a member of a shared reading has its rows' places from split 0 on,
// where others wrote the first ones.
void AttnPlan::add_short(const AttnArgs& a, int s, int first, int from, int member, Cut cut,
                         std::vector<AttnTask>& short_tasks, std::vector<AttnTask>& merges) {
    const int q = a.query_start[s + 1] - a.query_start[s], heads = a.cache.kv_heads, group = a.heads / heads;
    const int s0 = std::max(first, from * ATTN_BLOCK) / SPLIT, s1 = (a.kv_len[s] + SPLIT - 1) / SPLIT;
    const int joined = q * group <= JOINED_ROWS ? cut.heads : 1;
    int pieces = std::min(s1 - s0, cut.pieces);
    if (s1 - s0 > LONG_SPLITS && q * group <= 16)
        pieces = std::max(pieces, (s1 - s0) / (joined > 1 ? LONG_SPLITS : piece_splits(a.cache)));
    auto add = [&](AttnTask t) {
        t.heads = std::min(joined, heads - t.kv_head);
        short_tasks.push_back(t);
    };
    if (pieces <= 1 && member < 0) {
        for (int h = 0; h < heads; h += joined) add({s, 0, q, h, s0, s1, -1});
        return;
    }
    const int begin = member < 0 ? s0 : 0;
    const int64_t base = member < 0 ? partial_rows : members[size_t(member)].base, rows = int64_t(q) * group;
    if (member < 0) partial_rows += heads * int64_t(s1 - s0) * rows;
    for (int h = 0; h < heads; h++)
        merges.push_back({s, 0, q, h, begin, s1, int32_t(base + int64_t(h) * (s1 - begin) * rows)});
    // All heads of a piece, then the next piece: heads are neighbours in a page, and what the processor
    // fetches beyond a tile is the next head's.
    for (int i = 0; i < pieces; i++) {
        const int a0 = s0 + (s1 - s0) * i / pieces, a1 = s0 + (s1 - s0) * (i + 1) / pieces;
        for (int h = 0; h < heads; h += joined) {
            AttnTask t{s, 0, q, h, a0, a1, int32_t(base + (int64_t(h) * (s1 - begin) + a0 - begin) * rows)};
            t.from = i == 0 ? from : 0, t.head_rows = int32_t((s1 - begin) * rows);
            add(t);
        }
    }
}

// Extends are cut into blocks of queries; short ones (decode) into splits when they are few.
void AttnPlan::make(const AttnArgs& a, int threads) {
    tasks.clear(), members.clear(), readers.clear();
    std::vector<AttnTask> merges, short_tasks, long_tasks;
    const int heads = a.cache.kv_heads, group = a.heads / heads;
    const int few = std::max(TASK_ROWS, group);  // rows of one task
    int64_t short_units = 0, splits = 0, long_rows = 0;
    partial_rows = 0, bytes = flops = 0;
    const Sharing sharing(*this, a);
    num_shared = int(tasks.size());
    for (int s = 0; s < a.num_seqs; s++) {
        int q = new_tokens(a, s);
        if (q * group <= few && q > 0) {
            const int of_head = (a.kv_len[s] - std::max(0, first_seen(a, a.kv_len[s] - q))) / SPLIT;
            short_units += heads, splits += heads * (of_head > LONG_SPLITS ? of_head : 1);
        }
        if (q * group > few) long_rows += int64_t(q) * a.heads;
    }
    // Large tasks, as long as there are several for every thread.
    const int limit = max_rows(a.cache.v_dim, group),
              each = int(std::clamp<int64_t>(long_rows / (8 * threads), std::min(few, limit), limit));
    const int block = std::max(1, each / group);
    const Cut short_cut = cut(a, threads, short_units, splits);
    for (int s = 0; s < a.num_seqs; s++) {
        const int q = new_tokens(a, s), kv = a.kv_len[s];
        if (q <= 0 || kv <= 0) continue;
        const int first = std::max(0, first_seen(a, kv - q));
        bytes += double(kv - first) * bytes_of_token(a.cache);
        flops += 2.0 * double(kv - first) * q * a.heads * (a.cache.k_dim + a.cache.v_dim);
        if (q * group <= few) {
            add_short(a, s, first, sharing.from[size_t(s)], sharing.member_of[size_t(s)], short_cut,
                      short_tasks, merges);
            continue;
        }
        for (int h = 0; h < heads; h++)  // one head's keys after the other's: they stay in a core's cache
            for (int q0 = (q - 1) / block * block; q0 >= 0; q0 -= block) {
                const int qn = std::min(block, q - q0), last = a.causal && !a.tree ? kv - q + q0 + qn : kv;
                const int lo = std::max(0, first_seen(a, kv - q + q0));
                long_tasks.push_back({s, q0, qn, h, lo / SPLIT, (last + SPLIT - 1) / SPLIT, -1});
            }
    }
    tasks.insert(tasks.end(), long_tasks.begin(), long_tasks.end());
    tasks.insert(tasks.end(), short_tasks.begin(), short_tasks.end());
    num_tasks = int(tasks.size()) - num_shared, num_merges = int(merges.size());
    tasks.insert(tasks.end(), merges.begin(), merges.end());
    partial_floats = size_t(partial_rows) * size_t(state_floats(a.cache.v_dim));
}

void AttnPlan::fill(AttnArgs& a, void* shared) const {
    a.tasks = tasks.data(), a.num_shared = num_shared, a.num_tasks = num_tasks, a.num_merges = num_merges;
    a.members = members.data(), a.readers = readers.data(), a.partials = (float*)shared;
}

}  // namespace radix

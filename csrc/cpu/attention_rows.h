// Rows of attention, for all kernels of blocks: which rows a task has, which tokens they attend to, how
// splits are merged.
//
// All use the same arithmetic: splits of 512 tokens and blocks of 64 at absolute positions. A split runs an
// online softmax over its blocks from an empty state; splits merge in order. A block that a row may not see
// leaves its state as it is, bit for bit, so a row's result depends neither on other rows nor on how its
// sequence was cut into chunks. Rows of several sequences may therefore read what their first pages have in
// common together.
#pragma once
#include <algorithm>
#include <optional>

#include "softmax.h"

namespace radix {
namespace RADIX_ISA {

// Rows of a task: query major (of a shared task, reader major), the KV head's query heads inside.
struct Rows {
    int count, first_new, kv_len, lo, hi;  // [lo, hi): what any of them sees
    int64_t token0;
    int *row_lo, *row_hi;
    float *now, *total;  // states: of this split (row i at i & slot_mask), of the splits before
    int slot_mask = -1;
    float* state(const Shape& s, int i) const { return now + int64_t(i & slot_mask) * s.state; }
    int position0;  // of the first row
    int position(int i, int group) const { return position0 + i / group; }
};

inline int rows_of_task(const AttnArgs& a) {
    return radix::max_rows(a.cache.v_dim, a.heads / a.cache.kv_heads);
}
inline size_t rows_floats(const Shape& s, int rows) { return size_t(rows + 15) * (2 * s.state + 2); }

// All see all of [from, end).
static Rows open_shared(const AttnArgs& a, const Shape& s, const AttnTask& task, float* memory,
                        int max_rows) {
    Rows r{};
    r.now = memory, r.total = r.now + int64_t(max_rows + 15) * s.state;
    r.row_lo = (int*)(r.total + int64_t(max_rows) * s.state), r.row_hi = r.row_lo + max_rows;
    r.count = task.qn * s.group;
    r.lo = task.from * BLOCK, r.hi = r.kv_len = task.end * BLOCK;
    for (int i = 0; i < r.count; i++) r.row_lo[i] = r.lo, r.row_hi[i] = r.hi;
    return r;
}
static Rows open_rows(const AttnArgs& a, const Shape& s, const AttnTask& task, float* memory, int max_rows) {
    Rows r{};
    if (task.readers >= 0) return open_shared(a, s, task, memory, max_rows);
    const int q_len = a.query_start[task.seq + 1] - a.query_start[task.seq];
    r.now = memory, r.total = r.now + int64_t(max_rows + 15) * s.state;
    r.row_lo = (int*)(r.total + int64_t(max_rows) * s.state), r.row_hi = r.row_lo + max_rows;
    r.kv_len = a.kv_len[task.seq];
    r.first_new = r.kv_len - q_len;
    r.token0 = a.query_start[task.seq] + task.q0;
    r.count = task.qn * s.group;
    r.position0 = r.first_new + task.q0;
    r.lo = r.kv_len, r.hi = 0;
    for (int i = 0; i < r.count; i++) {
        const int pos = r.position(i, s.group);
        r.row_hi[i] = a.causal && !a.tree ? pos + 1 : r.kv_len;
        r.row_lo[i] = std::max(first_seen(a, pos), task.from * BLOCK);
        r.lo = r.row_lo[i] < r.lo ? r.row_lo[i] : r.lo;
        r.hi = r.row_hi[i] > r.hi ? r.row_hi[i] : r.hi;
    }
    return r;
}
inline const float* query_of(const AttnArgs& a, const Shape& s, const AttnTask& task, const Rows& r, int i) {
    int64_t token = r.token0 + i / s.group;
    if (task.readers >= 0) {
        const AttnReader& reader = a.readers[task.readers + i / s.group];
        token = a.query_start[a.members[reader.member].seq] + reader.token;
    }
    return a.q + token * a.ldq + int64_t(task.kv_head * s.group + i % s.group) * a.q_head;
}

// What row i makes of its scores of a block: weights in place.
inline void softmax_row(const AttnArgs& a, const Shape& s, const Rows& r, int kv_head, int i, int block0,
                        float* p, const float* k_scale, const float* v_scale) {
    if (a.tree && block0 + BLOCK > r.first_new)
        mask_tree(a, r.token0 + i / s.group, block0, r.first_new, r.kv_len, p);
    const float slope = a.alibi_slopes ? a.alibi_slopes[kv_head * s.group + i % s.group] : 0.0f;
    const VisibleRange seen{r.row_lo[i] - block0, r.row_hi[i] - block0, slope,
                            float(block0 - r.position(i, s.group))};
    online_softmax(a, s, p, k_scale, v_scale, r.now + int64_t(i) * s.state, seen);
}

// The place of row i's state after a split, or within it, for the task that continues.
inline float* kept_row(const AttnArgs& a, const Shape& s, const AttnTask& task, int count, int split, int i) {
    int64_t row = task.partial + int64_t(split - task.split0) * count + i;
    if (task.readers >= 0) {
        const AttnReader& reader = a.readers[task.readers + i / s.group];
        const AttnMember& m = a.members[reader.member];
        row = m.base + (int64_t(task.kv_head) * m.splits + split) * m.rows + reader.token * s.group +
              i % s.group;
    }
    return a.partials + row * s.state;
}

// Which tiles of the cache are read a block later, of joined heads two heads later: of this task, then of the
// one that follows it.
class NextTiles {
  public:
    NextTiles(const AttnArgs& args, const AttnTask& task, int of_head, const AttnTask* following, int end)
        : a(args), last((end - 1) / TILE) {
        const int place = of_head - task.kv_head + std::min(2, task.heads);
        blocks = place / task.heads;
        tiles = HeadTiles(a.cache, pages_of(task), task.kv_head + place % task.heads);
        if (!following) return;
        const int len = a.kv_len[following->seq],
                  q_len = a.query_start[following->seq + 1] - a.query_start[following->seq];
        const int first = std::max(std::max(following->split0 * SPLIT, following->from * BLOCK),
                                   first_seen(a, len - q_len + following->q0));
        const int head = following->kv_head + std::min(place % task.heads, following->heads - 1);
        next_tiles = HeadTiles(a.cache, pages_of(*following), head);
        next_first = first / BLOCK * TILES, next_last = (len - 1) / TILE;
    }
    // The tile that is read so much later than `tile`; none after the last.
    Tile of(int tile) const {
        const int later = tile + blocks * TILES;
        if (later <= last) return tiles.at(later);
        const int next = next_first + tile % TILES;
        return next <= next_last ? next_tiles.at(next) : Tile{};
    }

  private:
    const AttnArgs& a;
    HeadTiles tiles, next_tiles;
    int last, blocks, next_first = 0, next_last = -1;
    const int32_t* pages_of(const AttnTask& task) const { return a.page_table + int64_t(task.seq) * a.ldp; }
};

// The states of some rows at the beginning and at the end of a split.
struct SplitRows {
    const AttnArgs& a;
    const Shape& s;
    const AttnTask& task;
    const Rows& rows;
    int split;

    void open(int r0, int n) const {
        for (int i = r0; i < r0 + (n + 15) / 16 * 16; i++)
            clear_state(rows.state(s, i), s);  // tiles have 16 rows
        if (task.readers >= 0 || task.from * BLOCK <= split * SPLIT) return;
        for (int i = r0; i < r0 + n; i++)
            std::memcpy(rows.state(s, i), kept_row(a, s, task, rows.count, split, i), size_t(s.state) * 4);
    }
    void close(int r0, int n) const {
        for (int i = r0; i < r0 + n; i++) {
            float* now = rows.state(s, i);
            if (task.readers < 0 || rows.hi == (split + 1) * SPLIT) close_split(s, now);
            float* total = rows.total + int64_t(i) * s.state;
            if (task.partial < 0)
                split == task.split0 ? begin_accumulator(s, total, now) : merge(s, total, now);
            else
                std::memcpy(kept_row(a, s, task, rows.count, split, i), now, size_t(s.state) * 4);
        }
    }
};

// Block(a, shape, task, rows, next_tiles, memory) prepares the queries; run(from, to, split) opens all rows,
// adds tokens from the beginning of a block on to their states, and closes them. slots(): states at a time.
// JOINS: step(block0) adds a block to rows that are open, for heads that take turns.
template <class Block>
struct HeadOfTask {
    const AttnTask task;
    Rows rows;
    const NextTiles next_tiles;
    Block block;
    static size_t floats(const Shape& s, int max_rows) { return (rows_floats(s, max_rows) + 15) / 16 * 16; }

    HeadOfTask(const AttnArgs& a, const Shape& s, const AttnTask& whole, int head, const AttnTask* following,
               float* memory, int max_rows)
        : task(one_head(whole, head)),
          rows(open_rows(a, s, task, memory, max_rows)),
          next_tiles(a, whole, head, following, rows.hi),
          block(a, s, task, rows, next_tiles, memory + floats(s, max_rows)) {
        const int slots = Block::slots(s, rows.count);
        rows.slot_mask = slots < rows.count ? slots - 1 : -1;
    }
    int from(int split) const { return std::max(split * SPLIT, rows.lo / BLOCK * BLOCK); }
    int to(int split) const { return std::min((split + 1) * SPLIT, rows.hi); }
    void write(const AttnArgs& a, const Shape& s) const {
        for (int i = 0; task.partial < 0 && i < rows.count; i++)
            write_row(a, s, rows.total + int64_t(i) * s.state, rows.token0 + i / s.group,
                      task.kv_head * s.group + i % s.group);
    }

  private:
    static AttnTask one_head(AttnTask t, int head) {
        if (t.partial >= 0) t.partial += (head - t.kv_head) * t.head_rows;
        t.kv_head = head, t.heads = 1;
        return t;
    }
};

template <class Block>
static size_t joined_floats(const Shape& s) {
    return HeadOfTask<Block>::floats(s, JOINED_ROWS) + (Block::floats(s, JOINED_ROWS) + 31) / 16 * 16;
}
// Heads take turns, block by block: pages are read from one end to the other.
template <class Block>
static void run_joined(const AttnArgs& a, const AttnTask& task, const AttnTask* following, char* local) {
    const Shape s(a);
    std::optional<HeadOfTask<Block>> heads[JOINED_HEADS];
    for (int h = 0; h < task.heads; h++)
        heads[h].emplace(a, s, task, task.kv_head + h, following, (float*)local + h * joined_floats<Block>(s),
                         JOINED_ROWS);
    auto each = [&](auto&& f) {
        for (int h = 0; h < task.heads; h++) f(*heads[h]);
    };
    for (int split = task.split0; split < task.split1; split++) {
        const int from = heads[0]->from(split), to = heads[0]->to(split), count = heads[0]->rows.count;
        each([&](auto& h) { SplitRows{a, s, h.task, h.rows, split}.open(0, count); });
        for (int block0 = from; block0 < to; block0 += BLOCK) each([&](auto& h) { h.block.step(block0); });
        each([&](auto& h) { SplitRows{a, s, h.task, h.rows, split}.close(0, count); });
    }
    each([&](auto& h) { h.write(a, s); });
}
template <class Block>
static void run_task(const AttnArgs& a, const AttnTask& task, const AttnTask* following, char* local) {
    if constexpr (Block::JOINS)
        if (task.heads > 1) return run_joined<Block>(a, task, following, local);
    const Shape s(a);
    HeadOfTask<Block> head(a, s, task, task.kv_head, following, (float*)local, rows_of_task(a));
    for (int split = task.split0; split < task.split1; split++)
        head.block.run(head.from(split), head.to(split), SplitRows{a, s, head.task, head.rows, split});
    head.write(a, s);
}

static void run_merge(const AttnArgs& a, const AttnTask& task, char* local) {
    const Shape s(a);
    float* total = (float*)local;
    const int count = task.qn * s.group;
    for (int i = 0; i < count; i++) {
        clear_state(total, s);
        for (int split = task.split0; split < task.split1; split++)
            merge(s, total, kept_row(a, s, task, count, split, i));
        int64_t token = a.query_start[task.seq] + task.q0 + i / s.group;
        write_row(a, s, total, token, task.kv_head * s.group + i % s.group);
    }
}

template <class Block>
static void run_attention(const AttnArgs& a, const Ctx& ctx) {
    const AttnTask* task = a.tasks;
    for (int count : {a.num_shared, a.num_tasks}) {
        if (count == 0) continue;
        ctx.each(count, 1, [&](int64_t i0, int64_t i1) {
            for (int64_t i = i0; i < i1; i++)
                run_task<Block>(a, task[i], i + 1 < count ? task + i + 1 : nullptr, ctx.local());
        });
        ctx.barrier();
        task += count;
    }
    if (a.num_merges == 0) return;
    ctx.each(a.num_merges, 1, [&](int64_t i0, int64_t i1) {
        for (int64_t i = i0; i < i1; i++) run_merge(a, task[i], ctx.local());
    });
    ctx.barrier();
}
template <class Block>
static size_t attention_bytes(const AttnArgs& a) {
    const Shape s(a);
    const int max_rows = rows_of_task(a);
    const size_t alone = rows_floats(s, max_rows) + Block::floats(s, max_rows) + 32;
    return std::max(alone, Block::JOINS ? JOINED_HEADS * joined_floats<Block>(s) : 0) * 4;
}

}  // namespace RADIX_ISA
}  // namespace radix

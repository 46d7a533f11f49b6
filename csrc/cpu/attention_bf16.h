// Blocks of attention whose products are of bfloat16 numbers: caches that are exact in it, which are
// bfloat16, int8 and the 8-bit floats. Queries and weights are rounded to bfloat16 as the cache is;
// products and sums are float32.
//
// A row's arithmetic does not depend on the other rows: decode and prefill use the same (few rows are
// computed by vectors to the same bits, see attention_few.h). Weights of hidden tokens are 0 and change
// no sum, so whole steps of them may be left out. The products flush denormals; vectors are set to do
// the same.
#pragma once
#include <algorithm>

#include "attention_few.h"
#include "attention_lost.h"
#include "attention_stage.h"
#include "attention_weights.h"

namespace radix {
namespace RADIX_ISA {

constexpr int GROUP_ROWS = 32;                 // rows that go through the staged blocks together
constexpr int PENDING = 2;                     // items whose weights wait for the sums
constexpr int WEIGHTS = PENDING * BLOCK + 32;  // numbers from row to row

struct StagedBlock {
    uint32_t *k, *v;  // [TILES][k_pad / 2][16] and [2][v_pad / 16][16][16] pairs
    float *k_scale, *v_scale;
    int block0;
    uint64_t lost;  // tokens whose V is zeros instead (attention_lost.h)
};
// Up to 32 rows and a block: scores, then weights, then sums.
struct BlockItem {
    const StagedBlock* block;
    int r0, n, first_step, last_step, number;
    uint32_t scaled = ~0u;  // rows whose scores have been multiplied by scales of K already
};
// The operands of scores and of sums of a group of rows.
struct ScoreOperands {
    const uint16_t* q;  // [k_pad / 32][q_rows][32], from the group's first row on
    int64_t q_rows;
    const uint32_t* k;
    int k_pad, n;
    float* p;                   // [n][64]
    int first_step, last_step;  // of the block's two steps of 32 tokens: what some row sees
};
struct SumOperands {
    const BlockItem* items;  // those whose weights are not added up yet
    int num_items;
    const uint16_t* weights;  // [32][WEIGHTS]: 64 of each pending item
    float* state;             // [n][state_stride]
    int64_t state_stride;
    int v_pad, n;
};

// Products: Few, the kernels of few rows in the order in which it adds products; open(rows), close(),
// scores(), sums().
template <class Products>
class Bf16Block {
  public:
    static constexpr bool JOINS = true;
    static int padded(int k_dim) { return (k_dim + 31) / 32 * 32; }
    static size_t floats(const Shape& s, int rows) {
        rows = (rows + GROUP - 1) / GROUP * GROUP;
        const size_t staged =
            size_t(blocks_at_once(s, rows)) * BLOCK * (size_t(padded(s.k_dim) + s.v_pad) / 2 + 2);
        return staged + size_t(rows) * padded(s.k_dim) / 2 + GROUP * BLOCK + GROUP * WEIGHTS / 2 + 64 +
               size_t(FEW) * (padded(s.k_dim) + BLOCK);
    }
    Bf16Block(const AttnArgs& args, const Shape& shape, const AttnTask& task, const Rows& of,
              const NextTiles& after, float* memory)
        : a(args),
          s(shape),
          rows(of),
          next_tiles(after),
          pages(args.page_table + int64_t(task.seq) * args.ldp),
          kv_head(task.kv_head),
          k_pad(padded(shape.k_dim)) {
        is_few = rows.count <= FEW && s.k_dim % 2 == 0 && s.v_dim % 16 == 0;
        q_rows = is_few ? rows.count : (rows.count + 15) / 16 * 16;
        float* f = (float*)((uintptr_t(memory) + 63) / 64 * 64);
        for (int i = 0; i < blocks_at_once(s, rows.count); i++) {
            staged[i].k = (uint32_t*)f, f += size_t(BLOCK) * k_pad / 2;
            staged[i].v = (uint32_t*)f, f += size_t(BLOCK) * s.v_pad / 2;
            staged[i].k_scale = f, f += BLOCK;
            staged[i].v_scale = f, f += BLOCK;
        }
        p = f, f += GROUP * BLOCK;
        weights = (uint16_t*)f, f += GROUP * WEIGHTS / 2;
        q = (uint16_t*)f, f += size_t(q_rows) * size_t(k_pad) / 2;
        for (int i = 0; i < q_rows; i++) {
            if (i + AHEAD < rows.count)
                prefetch_bytes(query_of(a, s, task, rows, i + AHEAD), int64_t(s.k_dim) * 4);
            round_query(task, i);
        }
        if (is_few) {
            few_q = f, few_weights = f + FEW * k_pad;
            if (!Few::takes_pairs(a.cache.dtype)) widen_bf16(q, rows.count * k_pad, few_q);
            return;
        }
        std::memset(weights, 0, GROUP * WEIGHTS * 2);
        Products::open(rows.count);
    }
    // Groups of rows go through a split one after the other where all of it is staged: their sums stay
    // in first-level cache.
    static int slots(const Shape& s, int rows) {
        return blocks_at_once(s, rows) == SPLIT / BLOCK ? GROUP : rows;
    }
    void run(int from, int to, const SplitRows& split);
    void step(int block0);
    ~Bf16Block() {
        if (!is_few) Products::close();
    }

  private:
    static constexpr int GROUP = GROUP_ROWS;
    static constexpr int BURST = 24;                   // lines that may be prefetched at once
    static constexpr int AHEAD = 8;                    // queries: tokens are far apart in memory
    static constexpr size_t STAGED_BYTES = 288 << 10;  // of K and V in second-level cache
    using Few = typename Products::Few;

    const AttnArgs& a;
    const Shape& s;
    const Rows& rows;
    const NextTiles& next_tiles;
    const int32_t* pages;
    int kv_head, k_pad, q_rows;
    StagedBlock staged[SPLIT / BLOCK];
    float* p;                          // [32][64]
    uint16_t* weights;                 // [32][WEIGHTS]
    uint16_t* q;                       // [k_pad / 32][q_rows][32]
    alignas(64) float highest[GROUP];  // maxima of the group's rows
    const BlockItem* pending = nullptr;
    int num_pending = 0;
    bool is_few;
    float *few_q, *few_weights;  // q and weights as float32

    // Few rows go through one block after the other. Many take 32 rows through as many blocks as second-
    // level cache holds, so that their sums stay in the first.
    static int blocks_at_once(const Shape& s, int rows) {
        if (rows <= 32) return 1;
        return std::clamp(int(STAGED_BYTES / (size_t(BLOCK) * size_t(padded(s.k_dim) + s.v_pad) * 2)), 1,
                          SPLIT / BLOCK);
    }
    void round_query(const AttnTask& task, int i) {
        const bool is_there = i < rows.count;
        const float* from = is_there ? query_of(a, s, task, rows, i) : nullptr;
        auto part = [&](int d) {
            return is_there && d < s.k_dim ? mul(load_n(from + d, lanes_at(d, s.k_dim)), set1(a.scale))
                                           : zero();
        };
        for (int d = 0; d < k_pad; d += 32) round_to(part(d), part(d + 16), q + int64_t(d) * q_rows + i * 32);
    }
    template <int DTYPE>
    void stage(const StagedBlock& to, const Tile& t, int tile, int count, const Tile& next) {
        uint32_t* k = to.k + int64_t(tile) * k_pad * 8;
        pair_k<DTYPE>(
            t.k, s.k_dim, k_pad, k,
            {(const char*)next.k, (const char*)next.k + (next.k ? tile_bytes(a.cache, s.k_dim) : 0)});
        uint32_t* v = to.v + int64_t(tile / 2) * s.v_pad * 16 + tile % 2 * 128;
        pair_v<DTYPE>(t.v, v_width(a.cache), s.v_dim, count, v, 256,
                      {(const char*)next.v,
                       (const char*)next.v + (next.v ? tile_bytes(a.cache, v_width(a.cache)) : 0)});
    }
    void open(StagedBlock& to, int block0);
    static void widen_bf16(const uint16_t* x, int64_t n, float* out) {
        for (int64_t i = 0; i < n; i += 16) store(out + i, load_bf16(x + i));
    }
    template <class F>
    void each_group(F&& f) const;
    void run_few(int block0);
    void drop_lost(const StagedBlock& b) const;
    void drop_lost(const StagedBlock& b, FewTile* tile) const;
    int stage_blocks(int from, int to);
    void attend(int r0, int n, int num_blocks);
    void open_maxima(int r0, int n);
    void close_maxima(int r0, int n);
    void mask_scores(const StagedBlock& b, int i, float* w) const;
    void find_maxima(BlockItem& g);
    void raise(const BlockItem& g, int r, float top);
    void softmax_item(BlockItem& g);
    void score(const BlockItem& g) {
        Products::scores({q + g.r0 * 32, q_rows, g.block->k, k_pad, g.n, p, g.first_step, g.last_step});
    }
    void weigh() {
        if (num_pending)
            Products::sums(
                {pending, num_pending, weights, rows.state(s, pending->r0), s.state, s.v_pad, pending->n});
        pending += num_pending, num_pending = 0;
    }
};

// Brings a block's tiles into the order of the multiplications; what is not there becomes zeros.
template <class Products>
void Bf16Block<Products>::open(StagedBlock& to, int block0) {
    const Cache& c = a.cache;
    const int end = rows.hi < block0 + BLOCK ? rows.hi : block0 + BLOCK,
              start = rows.lo > block0 ? rows.lo : block0;
    to.block0 = block0;
    for (int i = 0; i < TILES; i++) {
        const int tile = block0 / TILE + i;
        const Tile next = next_tiles.of(tile);
        if (tile < start / TILE || tile > (end - 1) / TILE) {  // its scores are masked
            if (next.v) prefetch_tile(c, next);
            store(to.v_scale + i * TILE, zero());
            for (int j = 0; j < s.v_pad / 16; j++)
                std::memset(to.v + int64_t(i / 2) * s.v_pad * 16 + i % 2 * 128 + j * 256, 0, 512);
            continue;
        }
        const Tile t = tile_at(c, pages, kv_head, tile);
        const int left = rows.kv_len - tile * TILE, count = left < TILE ? left : TILE;
        if (t.k_scale) {
            std::memcpy(to.k_scale + i * TILE, t.k_scale, TILE * 4);
            store(to.v_scale + i * TILE, load_n(t.v_scale, count));
        }
        switch (c.dtype) {
            case DT_BF16: stage<DT_BF16>(to, t, i, count, next); break;
            case DT_I8: stage<DT_I8>(to, t, i, count, next); break;
            case DT_E4M3: stage<DT_E4M3>(to, t, i, count, next); break;
            default: stage<DT_E5M2>(to, t, i, count, next);
        }
    }
    if ((to.lost = lost_tokens(a, s, rows, pages, kv_head, block0))) drop_lost(to);
}

template <class Products>
void Bf16Block<Products>::drop_lost(const StagedBlock& b) const {
    for (int i = 0; i < TILES; i++) {
        const uint32_t lost = of_tile(b.lost, i);
        clear_pairs(lost, b.v + int64_t(i / 2) * s.v_pad * 16 + i % 2 * 128, s.v_pad);
        if (a.cache.dtype == DT_I8) each_lane(lost, [&](int lane) { b.v_scale[i * TILE + lane] = 0.0f; });
    }
}
// Few rows read V in the cache: a copy without what is lost.
template <class Products>
void Bf16Block<Products>::drop_lost(const StagedBlock& b, FewTile* tile) const {
    const int64_t bytes = int64_t(v_width(a.cache)) * dtype_size(a.cache.dtype);
    for (int i = 0; i < TILES; i++) {
        const uint32_t lost = of_tile(b.lost, i);
        if (!lost) continue;
        if (a.cache.dtype == DT_I8)
            each_lane(lost, [&](int lane) { b.v_scale[i * TILE + lane] = 0.0f; });
        else {
            char* copy = (char*)b.v + i * TILE * bytes;
            std::memcpy(copy, tile[i].v, size_t(TILE * bytes));
            clear_lanes(lost, copy, bytes), tile[i].v = copy;
        }
    }
}

// What a row does not see, caps and slopes: the rare changes of scores.
template <class Products>
void Bf16Block<Products>::mask_scores(const StagedBlock& b, int i, float* w) const {
    const int block0 = b.block0;
    if (a.tree && block0 + BLOCK > rows.first_new)
        mask_tree(a, rows.token0 + i / s.group, block0, rows.first_new, rows.kv_len, w);
    const int lo = rows.row_lo[i] - block0, hi = rows.row_hi[i] - block0;
    const float slope = a.alibi_slopes ? a.alibi_slopes[kv_head * s.group + i % s.group] : 0.0f,
                distance = float(block0 - rows.position(i, s.group));
    for (int t = 0; t < TILES; t++) {
        vf v = load(w + t * 16);
        if (a.cache.dtype == DT_I8) v = mul(v, load(b.k_scale + t * 16));
        if (a.softcap != 0.0f) v = mul(set1(a.softcap), vtanh(div(v, set1(a.softcap))));
        if (slope != 0.0f) v = fma(set1(slope), add(count_from_zero(), set1(distance + float(t * 16))), v);
        store(w + t * 16, keep_lanes(v, lo - t * 16, hi - t * 16, set1(-INFINITY)));
    }
}

template <class Products>
void Bf16Block<Products>::open_maxima(int r0, int n) {
    for (int r = 0; r < GROUP; r++) highest[r] = r < n ? rows.state(s, r0 + r)[s.v_pad + 16] : EMPTY;
}
template <class Products>
void Bf16Block<Products>::close_maxima(int r0, int n) {
    for (int r = 0; r < n; r++) rows.state(s, r0 + r)[s.v_pad + 16] = highest[r];
}

// A score has outgrown the row's maximum: what is summed up so far is scaled anew.
template <class Products>
void Bf16Block<Products>::raise(const BlockItem& g, int r, float top) {
    if (highest[r] != EMPTY) {
        weigh();
        float* state = rows.state(s, g.r0 + r);
        const vf shrink = exp_weight(set1(highest[r] - top));
        for (int i = 0; i < s.v_pad + 16; i += 16) store(state + i, mul(load(state + i), shrink));
    }
    highest[r] = top;
}

template <class Score>
RADIX_INLINE vf highest_of(Score score) {
    return vmax(vmax(score(0), score(1)), vmax(score(2), score(3)));
}

// Masks the scores of an item and raises the maxima that they outgrow, four rows at a time.
template <class Products>
void Bf16Block<Products>::find_maxima(BlockItem& g) {
    const StagedBlock& b = *g.block;
    const bool has_scales = a.cache.dtype == DT_I8, changes = a.softcap != 0.0f || a.alibi_slopes || a.tree;
    float* w = p;
    for (int r0 = 0; r0 < g.n; r0 += 4) {
        vf top[4];
        for (int r = r0; r < r0 + 4; r++, w += BLOCK) {
            const int row = g.r0 + r;
            if (r < g.n && (changes || rows.row_lo[row] > b.block0 || rows.row_hi[row] < b.block0 + BLOCK))
                mask_scores(b, row, w);
            else if (has_scales) {
                g.scaled &= ~(1u << r);
                top[r - r0] =
                    highest_of([&](int t) { return mul(load(w + t * 16), load(b.k_scale + t * 16)); });
                continue;
            }
            top[r - r0] = highest_of([&](int t) { return load(w + t * 16); });
        }
        alignas(16) float tops[4];
        lane_maxima(top, tops);
        const unsigned grown = _mm_cmp_ps_mask(
            _mm_load_ps(tops), _mm_add_ps(_mm_load_ps(highest + r0), _mm_set1_ps(GROWTH)), _CMP_GT_OQ);
        for (int i = 0; grown >> i; i++)
            if (grown >> i & 1 && r0 + i < g.n) raise(g, r0 + i, tops[i]);
    }
}

// Scores of an item become weights, as bfloat16, and their sums.
template <class Products>
void Bf16Block<Products>::softmax_item(BlockItem& g) {
    find_maxima(g);
    const StagedBlock& b = *g.block;
    const bool has_scales = a.cache.dtype == DT_I8;
    const float* w = p;
    uint16_t* out = weights + g.number % PENDING * BLOCK;
    float* partial = rows.state(s, g.r0) + s.v_pad;
    for (int r = 0; r < g.n; r++, w += BLOCK, out += WEIGHTS, partial += s.state) {
        const vf m = set1(highest[r]);
        const bool is_scaled = g.scaled >> r & 1;
        vf e[TILES];
        for (int t = 0; t < TILES; t++)
            e[t] = exp_weight(
                sub(is_scaled ? load(w + t * 16) : mul(load(w + t * 16), load(b.k_scale + t * 16)), m));
        store(partial, add(load(partial), add(add(e[0], e[1]), add(e[2], e[3]))));
        if (b.lost) partial[0] += loss_of(a, s, rows, g.r0 + r, b.block0, b.lost);
        if (has_scales)
            for (int t = 0; t < TILES; t++) e[t] = mul(e[t], load(b.v_scale + t * 16));
        round_to(e[0], e[1], out);
        round_to(e[2], e[3], out + 32);
    }
}

// A group of rows goes through the staged blocks. What it reads again and again, its queries, scores,
// weights and sums, is to stay in first-level cache.
template <class Products>
void Bf16Block<Products>::attend(int r0, int n, int num_blocks) {
    BlockItem items[SPLIT / BLOCK];
    int count = 0;
    const int lo = rows.row_lo[r0], hi = rows.row_hi[r0 + n - 1];  // both grow with the row
    for (int i = 0; i < num_blocks; i++) {
        const int block0 = staged[i].block0;
        if (hi <= block0 || lo >= block0 + BLOCK) continue;
        items[count] = {&staged[i], r0, n, lo > block0 + 31 ? 1 : 0, hi > block0 + 32 ? 1 : 0, count};
        count++;
    }
    if (!count) return;
    open_maxima(r0, n);
    pending = items;
    for (int i = 0; i < count; i++) {
        score(items[i]);
        softmax_item(items[i]);
        num_pending++;
        if ((i + 1) % PENDING == 0) weigh();
    }
    weigh();
    close_maxima(r0, n);
}

template <class Products>
void Bf16Block<Products>::run_few(int block0) {
    const int end = rows.hi < block0 + BLOCK ? rows.hi : block0 + BLOCK,
              start = rows.lo > block0 ? rows.lo : block0;
    StagedBlock& block = staged[0];
    block.block0 = block0;
    FewTile tile[TILES];
    for (int i = 0; i < TILES; i++) {
        const int number = block0 / TILE + i, left = rows.kv_len - number * TILE;
        const Tile next = next_tiles.of(number);
        if (next.k_scale) __builtin_prefetch(next.k_scale, 0, 2), __builtin_prefetch(next.v_scale, 0, 2);
        if (number < start / TILE || number > (end - 1) / TILE) {
            if (next.v) prefetch_tile(a.cache, next);
            tile[i] = {};
            continue;
        }
        const Tile t = tile_at(a.cache, pages, kv_head, number);
        tile[i] = {t.k, t.v, next.v ? next.k : t.k, next.v ? next.v : t.v, left < TILE ? left : TILE};
        if (!t.k_scale) continue;
        std::memcpy(block.k_scale + i * TILE, t.k_scale, TILE * 4);
        store(block.v_scale + i * TILE, load_n(t.v_scale, tile[i].count));
    }
    if ((block.lost = lost_tokens(a, s, rows, pages, kv_head, block0))) drop_lost(block, tile);
    const int of_type = a.cache.dtype == DT_BF16 ? 0 : a.cache.dtype - DT_I8 + 1, n = rows.count;
    Few::scores_of_type(of_type)[n - 1]({few_q, q}, s.k_dim, tile, p);
    if (tile[0].k) prefetch_bytes(tile[0].next_v, BURST * 64);  // memory is not to rest meanwhile
    BlockItem all{&block, 0, n, 0, 1, 0};
    open_maxima(0, n);
    softmax_item(all);
    close_maxima(0, n);
    if (!Few::takes_pairs(a.cache.dtype))
        for (int r = 0; r < n; r++) widen_bf16(weights + r * WEIGHTS, BLOCK, few_weights + r * BLOCK);
    const FewFactors all_weights{few_weights, weights, WEIGHTS};
    for (int half = 0; half < 2; half++)
        if (tile[2 * half].k || tile[2 * half + 1].k)
            Few::sums_of_type(of_type)[n - 1](rows.now, s.state, all_weights.from(half * STEP),
                                              tile + 2 * half, v_width(a.cache), s.v_dim);
}

template <class Products>
int Bf16Block<Products>::stage_blocks(int from, int to) {
    int count = 0;
    for (const int limit = blocks_at_once(s, rows.count); from < to && count < limit; from += BLOCK)
        open(staged[count++], from);
    return count;
}

// f(first, count) for each group of rows
template <class Products>
template <class F>
void Bf16Block<Products>::each_group(F&& f) const {
    for (int r0 = 0; r0 < rows.count; r0 += GROUP) f(r0, std::min(GROUP, rows.count - r0));
}
template <class Products>
void Bf16Block<Products>::step(int block0) {
    if (is_few) return run_few(block0);
    const int count = stage_blocks(block0, block0 + BLOCK);
    each_group([&](int r0, int n) { attend(r0, n, count); });
}

// Tokens [from, to) of a split.
template <class Products>
void Bf16Block<Products>::run(int from, int to, const SplitRows& split) {
    if (slots(s, rows.count) < rows.count) {
        const int count = stage_blocks(from, to);
        return each_group([&](int r0, int n) {
            split.open(r0, n);
            attend(r0, n, count);
            split.close(r0, n);
        });
    }
    split.open(0, rows.count);
    const int at_once = blocks_at_once(s, rows.count);
    for (; at_once == 1 && from < to; from += BLOCK) step(from);
    for (; from < to; from += at_once * BLOCK)
        each_group([&, count = stage_blocks(from, to)](int r0, int n) { attend(r0, n, count); });
    split.close(0, rows.count);
}

}  // namespace RADIX_ISA
}  // namespace radix

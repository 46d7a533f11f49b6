// Attention over caches of 4 bits by products of bytes.
//
// A query's numbers have 8 bits for each 32 channels. A block's weights have 16 for each 64 tokens, in two
// bytes each: x = (256 * high + low) * step. Sums of products are whole numbers, so a row's bits depend
// neither on how the instruction set adds them up nor on other rows. The cache holds its numbers plus 8:
// sums begin at -8 * (the sum of what is multiplied).
#include <algorithm>
#include <climits>

#include "attention_rows.h"
#include "byte_vectors.h"
#include "hadamard.h"

namespace radix {
namespace RADIX_ISA {

constexpr float MOST_8 = 127.0f, MOST_16 = 32639.0f;  // 127 * 256 + 127
RADIX_INLINE float inverse_step(float limit, float most) { return most > 1e-30f ? limit / most : 0.0f; }

// 32 channels of a query, four to a word, and where the sums of their products begin.
struct QueryGroup {
    int32_t words[GROUP_4 / 4];
    int32_t start;
    float step;

    RADIX_INLINE void make(vf x0, vf x1) {
        const float most = lane_max(vmax(vabs(x0), vabs(x1)));
        const vf inverse = set1(inverse_step(MOST_8, most));
        x0 = vround(mul(x0, inverse)), x1 = vround(mul(x1, inverse));
        store_i8((int8_t*)words, x0), store_i8((int8_t*)words + 16, x1);
        const float total = lane_tree_sum(add(x0, x1));
        step = most / MOST_8 + (total - total);   // NaN where x is not finite
        start = int(-8u * uint32_t(int(total)));  // of NaN, too, without overflow
    }
};
// A row's weights of the tokens of a block, times a group's scales of V.
struct BlockWeights {
    int32_t high[BLOCK / 4], low[BLOCK / 4];
    int32_t start;  // of `low`
    float step;
};
// V's scales in a block, those of a group side by side. A token whose scales are not all finite has zeros
// instead, and NaN in `lost`: rows that see it are NaN.
struct BlockScales {
    float* of_groups;  // [groups][64]
    float* most;       // of each group, in fours
    bool is_finite;
    alignas(64) float lost[BLOCK];

    void make(const Tile* tiles, int groups) {
        vf nothing[TILES], any = zero();
        float* const to = of_groups;
        for (int t = 0; t < TILES; t++) {
            const uint16_t* from = tiles[t].v_groups;
            nothing[t] = zero();
            for (int g = 0; g < groups; g++) {
                const vf x = load_bf16(from + g * TILE);
                store(to + g * BLOCK + t * TILE, x);
                nothing[t] = fma(x, zero(), nothing[t]);
            }
            any = add(any, nothing[t]);
        }
        is_finite = lane_tree_sum(any) == 0.0f;
        if (!is_finite) drop(nothing, groups);
        for (int g = 0; g < groups; g += 4) find_most(g, groups, nullptr, most + g);
    }
    // The largest scale of four groups, of all tokens or of those whose weights are above zero.
    RADIX_INLINE void find_most(int g0, int groups, const float* weights, float* out) const {
        vf top[4];
        for (int g = 0; g < 4; g++) {
            top[g] = zero();
            for (int t = 0; g0 + g < groups && t < TILES; t++) {
                vf x = vabs(load(of_groups + (g0 + g) * BLOCK + t * TILE));
                if (weights) x = select_lt(zero(), load(weights + t * TILE), x, zero());
                top[g] = vmax(top[g], x);
            }
        }
        lane_maxima(top, out);
    }
    // NaN for a row with these weights that sees a lost token, else 0.
    float loss_of(const float* p) const {
        vf sum = zero();
        for (int i = 0; i < BLOCK; i += 16)
            sum = add(sum, select_lt(zero(), load(p + i), load(lost + i), zero()));
        return lane_tree_sum(sum);
    }

  private:
    void drop(const vf (&nothing)[TILES], int groups) {
        for (int t = 0; t < TILES; t++) {
            store(lost + t * TILE, nothing[t]);
            for (int g = 0; g < groups; g++) {
                float* x = of_groups + g * BLOCK + t * TILE;
                store(x, select_lt(nothing[t], set1(1.0f), load(x), zero()));  // NaN is not below
            }
        }
    }
};

// What the next block reads, two lines at a time between the steps of this one: memory is never to rest, and
// requests that come in bursts stall each other and all later loads. Lines of K and V of four tiles in turn:
// memory answers several places faster than one.
class NextBlock {
  public:
    void open(const Tile (&later)[TILES], int64_t bytes_of_k, int64_t bytes_of_v) {
        count = number = 0, at = 0, k_bytes = later[0].k ? bytes_of_k : 0, v_bytes = bytes_of_v;
        for (const Tile& t : later)
            if (t.v) k[count] = (const char*)t.k, v[count++] = (const char*)t.v;
        end = count ? std::max(k_bytes, v_bytes) : 0;
    }
    RADIX_INLINE void lines(int n) {
        for (; n > 0 && at < end; n -= 2) {
            if (at < k_bytes) __builtin_prefetch(k[number] + at, 0, 2);
            if (at < v_bytes) __builtin_prefetch(v[number] + at, 0, 2);
            if (++number == count) number = 0, at += 64;
        }
    }

  private:
    const char *k[TILES], *v[TILES];
    int64_t k_bytes, v_bytes, at, end;
    int count, number;
};

// p[row][64] of tiles [t0, t0 + N) = q . k
template <int R, int N>
static void int4_scores(const QueryGroup* q, int groups, const Tile* tile, NextBlock& next, float* p) {
    for (int g = 0; g < groups; g++) {
        vi sum[R][N];
        for (int r = 0; r < R; r++)
            for (int t = 0; t < N; t++) sum[r][t] = vi_set1(q[r * groups + g].start);
        for (int j = 0; j < 4; j++) {
            vi first[N], second[N];
            for (int t = 0; t < N; t++) {
                const int64_t at = (g * 4 + j) * 64;
                split_nibbles(vi_load((const char*)tile[t].k + at), first[t], second[t]);
            }
            next.lines(N / 2);
            RADIX_UNROLL(4)
            for (int r = 0; r < R; r++) {
                const QueryGroup& x = q[r * groups + g];
                const vi a = vi_set1(x.words[2 * j]), b = vi_set1(x.words[2 * j + 1]);
                for (int t = 0; t < N; t++) sum[r][t] = dot_wx(dot_wx(sum[r][t], first[t], a), second[t], b);
            }
        }
        for (int t = 0; t < N; t++) {
            const vf scale = load_bf16(tile[t].k_groups + g * TILE);
            for (int r = 0; r < R; r++) {
                float* to = p + r * BLOCK + t * TILE;
                const vf x = to_float(sum[r][t]), step = mul(scale, set1(q[r * groups + g].step));
                store(to, g == 0 ? mul(x, step) : fma(x, step, load(to)));
            }
        }
    }
}

RADIX_INLINE vf total_of(vi high, vi low) { return fma(to_float(high), set1(256.0f), to_float(low)); }

// Sums of 32 channels of R rows, or of their first 16, += weights . v of tiles [first, last]
template <int R>
static void int4_sums(const BlockWeights* w, int group, const Tile* tile, int first, int last,
                      NextBlock& next, float* const* sums, bool is_whole) {
    vi acc[R][4];  // high and low of the first 16 channels, then of the others
    for (int r = 0; r < R; r++)
        for (int i = 0; i < 4; i++)
            acc[r][i] = i % 2 ? vi_set1(w[r].start * (i == 1 ? 1 : IN_PLACE)) : vi_zero();
    for (int t = first; t <= last; t++)
        for (int i = 0; i < 4; i++) {
            const int64_t at = (group * 4 + i) * 64;
            vi a, b;
            split_in_place(vi_load((const char*)tile[t].v + at), a, b);
            if (i % 2) next.lines(2);
            RADIX_UNROLL(4)
            for (int r = 0; r < R; r++) {
                const vi high = vi_set1(w[r].high[t * 4 + i]), low = vi_set1(w[r].low[t * 4 + i]);
                acc[r][0] = dot_wx(acc[r][0], a, high), acc[r][1] = dot_wx(acc[r][1], a, low);
                acc[r][2] = dot_wx(acc[r][2], b, high), acc[r][3] = dot_wx(acc[r][3], b, low);
            }
        }
    for (int r = 0; r < R; r++)
        for (int i = 0; i < (is_whole ? 2 : 1); i++) {
            float* to = sums[r] + group * GROUP_4 + i * 16;
            const float step = i == 0 ? w[r].step : w[r].step * (1.0f / IN_PLACE);
            store(to, fma(total_of(acc[r][2 * i], acc[r][2 * i + 1]), set1(step), load(to)));
        }
}

class Int4Block {
  public:
    static constexpr bool JOINS = true;
    static size_t floats(const Shape& s, int rows) {
        return (size_t(rows) * groups_of(s.k_dim) * sizeof(QueryGroup) +
                size_t(AT_ONCE) * groups_of(s.v_dim) * sizeof(BlockWeights)) /
                   4 +
               size_t(AT_ONCE + groups_of(s.v_dim)) * BLOCK + s.k_dim + groups_of(s.v_dim) + 32;
    }
    Int4Block(const AttnArgs& args, const Shape& shape, const AttnTask& task, const Rows& of,
              const NextTiles& after, float* memory)
        : a(args),
          s(shape),
          rows(of),
          next_tiles(after),
          all_tiles(args.cache, args.page_table + int64_t(task.seq) * args.ldp, task.kv_head),
          kv_head(task.kv_head),
          k_groups(groups_of(shape.k_dim)),
          v_groups(groups_of(shape.v_dim)),
          p(memory) {
        scales.of_groups = p + AT_ONCE * BLOCK;
        scales.most = scales.of_groups + v_groups * BLOCK;
        weights = (BlockWeights*)(scales.most + (v_groups + 15) / 16 * 16);
        q = (QueryGroup*)(weights + AT_ONCE * v_groups);
        float* rotated = (float*)(q + int64_t(rows.count) * k_groups);
        const vf scale = set1(a.scale / float(rotated_block(s.k_dim)));
        for (int i = 0; i < rows.count; i++) {
            std::memcpy(rotated, query_of(a, s, task, rows, i), size_t(s.k_dim) * 4);
            rotate(rotated, s.k_dim);
            for (int g = 0; g < k_groups; g++) {
                const float* from = rotated + g * GROUP_4;
                const int n = s.k_dim - g * GROUP_4;
                const vf second = n > 16 ? load_n(from + 16, lanes_at(16, n)) : zero();
                q[i * k_groups + g].make(mul(load_n(from, lanes_at(0, n)), scale), mul(second, scale));
            }
        }
    }
    static int slots(const Shape&, int rows) { return rows; }
    void run(int from, int to, const SplitRows& split) {
        split.open(0, rows.count);
        for (int block0 = from; block0 < to; block0 += BLOCK) step(block0);
        split.close(0, rows.count);
    }
    void step(int block0);

  private:
    static constexpr int AT_ONCE = 4;  // rows
    static constexpr int LINES = 12;   // that are prefetched at once
    const AttnArgs& a;
    const Shape& s;
    const Rows& rows;
    const NextTiles& next_tiles;
    const HeadTiles all_tiles;
    const int kv_head, k_groups, v_groups;
    float* p;  // [AT_ONCE][64]
    BlockScales scales;
    BlockWeights* weights;  // [groups of V][AT_ONCE]
    QueryGroup* q;
    Tile tiles[TILES];
    NextBlock next;
    int first, last;  // tiles that are there

    void open(int block0);
    void weigh(int r, bool sees_all);
    template <int R>
    void run_rows(int r0, int block0);
};

void Int4Block::open(int block0) {
    const int end = rows.hi < block0 + BLOCK ? rows.hi : block0 + BLOCK,
              start = rows.lo > block0 ? rows.lo : block0;
    first = (start - block0) / TILE, last = (end - 1 - block0) / TILE;
    Tile later[TILES];
    for (int i = 0; i < TILES; i++) {
        // scores of absent tiles are masked
        tiles[i] = all_tiles.at(block0 / TILE + std::clamp(i, first, last));
        later[i] = next_tiles.of(block0 / TILE + i);
    }
    next.open(later, all_tiles.bytes_of_k(), all_tiles.bytes_of_v());
    scales.make(tiles, v_groups);
}

// The weights of row r of those at once, times the scales of each group. Their unit is that of the largest
// weight times the largest scale, so that each waits for one largest number only. What a row does not see
// must not count: `sees_all` tells whether the scales' largest numbers are its own.
void Int4Block::weigh(int r, bool sees_all) {
    vf x[TILES], top = zero();
    for (int t = 0; t < TILES; t++) x[t] = load(p + r * BLOCK + t * TILE), top = vmax(top, x[t]);
    const float largest = lane_max(top);
    for (int g0 = 0; g0 < v_groups; g0 += 4) {
        const int n = std::min(4, v_groups - g0);
        vf sum[4] = {zero(), zero(), zero(), zero()};
        float seen[4];
        if (!sees_all) scales.find_most(g0, v_groups, p + r * BLOCK, seen);
        const float* of_scales = sees_all ? scales.most + g0 : seen;
        for (int g = 0; g < n; g++) {
            BlockWeights& to = weights[(g0 + g) * AT_ONCE + r];
            const float most = largest * of_scales[g];
            vf w[TILES];
            for (int t = 0; t < TILES; t++)
                w[t] = mul(x[t], load(scales.of_groups + (g0 + g) * BLOCK + t * TILE));
            sum[g] = store_halves(w, inverse_step(MOST_16, most), (int8_t*)to.high, (int8_t*)to.low);
            to.step = most * (1.0f / MOST_16);
        }
        float total[4];
        lane_sums(sum, total);
        for (int g = 0; g < n; g++)
            weights[(g0 + g) * AT_ONCE + r].start = int(-8u * uint32_t(int(total[g])));
    }
}

template <int R>
void Int4Block::run_rows(int r0, int block0) {
    constexpr int N = R > 1 && !HAS_32_REGISTERS ? 2 : 4;
    float* sums[R];
    for (int r = 0; r < R; r++) sums[r] = rows.now + int64_t(r0 + r) * s.state;
    for (int t = 0; t < TILES; t += N)
        int4_scores<R, N>(q + r0 * k_groups, k_groups, tiles + t, next, p + t * TILE);
    for (int r = 0; r < R; r++) {
        next.lines(LINES);
        softmax_row(a, s, rows, kv_head, r0 + r, block0, p + r * BLOCK, nullptr, nullptr);
    }
    for (int r = 0; r < R; r++) {
        next.lines(LINES);
        if (!scales.is_finite) sums[r][s.v_pad] += scales.loss_of(p + r * BLOCK);
        const bool is_masked = a.tree && block0 + BLOCK > rows.first_new;
        weigh(r, rows.row_lo[r0 + r] <= block0 && rows.row_hi[r0 + r] >= block0 + BLOCK && !is_masked);
    }
    for (int g = 0; g < v_groups; g++)
        int4_sums<R>(weights + g * AT_ONCE, g, tiles, first, last, next, sums, g * GROUP_4 + 16 < s.v_pad);
}

void Int4Block::step(int block0) {
    open(block0);
    for (int r0 = 0; r0 < rows.count; r0 += AT_ONCE) {
        const int n = std::min(AT_ONCE, rows.count - r0);
        // both grow with the row
        if (rows.row_hi[r0 + n - 1] <= block0 || rows.row_lo[r0] >= block0 + BLOCK) continue;
        switch (n) {
            case 1: run_rows<1>(r0, block0); break;
            case 2: run_rows<2>(r0, block0); break;
            case 3: run_rows<3>(r0, block0); break;
            default: run_rows<4>(r0, block0);
        }
    }
    next.lines(INT_MAX);
}

static void attention_int4(const AttnArgs& a, const Ctx& ctx) { run_attention<Int4Block>(a, ctx); }
static size_t attention_int4_local(const AttnArgs& a) { return attention_bytes<Int4Block>(a); }

}  // namespace RADIX_ISA
}  // namespace radix

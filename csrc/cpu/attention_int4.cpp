// Attention over caches of 4 bits by products of bytes.
//
// Queries and the weights of a block are numbers of 16 bits for 32 channels or 64 tokens, in two bytes
// each: x = (256 * high + low) * step. Sums of products are whole numbers, so a row's bits depend neither
// on how the instruction set adds them up nor on other rows. The cache holds its numbers plus 8: sums
// begin at -8 * (the sum of what is multiplied).
#include <algorithm>

#include "attention_rows.h"
#include "byte_vectors.h"
#include "hadamard.h"

namespace radix {
namespace RADIX_ISA {

constexpr float MOST_16 = 32639.0f;  // 127 * 256 + 127

// 4 * WORDS numbers of a row, four to a word, and where the sums of their products begin.
template <int WORDS>
struct Halves {
    int32_t high[WORDS], low[WORDS];
    int32_t start;  // of `low`
    float step;

    RADIX_INLINE void make(const vf (&x)[WORDS / 4]) {
        vf largest = zero();
        for (const vf& v : x) largest = vmax(largest, vabs(v));
        const float most = lane_max(largest);
        const vf inverse = set1(most > 1e-30f ? MOST_16 / most : 0.0f);
        vf sum = zero();
        for (int i = 0; i < WORDS / 4; i++) {
            const vf whole = vround(mul(x[i], inverse));
            store_halves(whole, (int8_t*)high + i * 16, (int8_t*)low + i * 16);
            sum = add(sum, whole);
        }
        const float total = lane_tree_sum(sum);
        step = most / MOST_16 + (total - total);  // NaN where x is not finite
        start = int(-8u * uint32_t(int(total)));  // of NaN, too, without overflow
    }
};
using QueryGroup = Halves<GROUP_4 / 4>;  // 32 channels of a query
using BlockWeights = Halves<BLOCK / 4>;  // of a row's tokens in a block, times a group's scales of V

RADIX_INLINE vf total_of(vi high, vi low) { return fma(to_float(high), set1(256.0f), to_float(low)); }

// p[row][64] of tiles [t0, t0 + N) = q . k
template <int R, int N>
static void int4_scores(const QueryGroup* q, int groups, const Tile* tile, const char* const* next,
                        float* p) {
    for (int g = 0; g < groups; g++) {
        vi high[R][N], low[R][N];
        for (int r = 0; r < R; r++)
            for (int t = 0; t < N; t++) {
                high[r][t] = vi_zero(), low[r][t] = vi_set1(q[r * groups + g].start);
            }
        for (int j = 0; j < 4; j++) {
            vi first[N], second[N];
            for (int t = 0; t < N; t++) {
                const int64_t at = (g * 4 + j) * 64;
                split_nibbles(vi_load((const char*)tile[t].k + at), first[t], second[t]);
                __builtin_prefetch(next[t] + at, 0, 2);
            }
            RADIX_UNROLL(4)
            for (int r = 0; r < R; r++) {
                const QueryGroup& x = q[r * groups + g];
                const vi a = vi_set1(x.high[2 * j]), b = vi_set1(x.high[2 * j + 1]),
                         c = vi_set1(x.low[2 * j]), d = vi_set1(x.low[2 * j + 1]);
                for (int t = 0; t < N; t++) {
                    high[r][t] = dot_wx(dot_wx(high[r][t], first[t], a), second[t], b);
                    low[r][t] = dot_wx(dot_wx(low[r][t], first[t], c), second[t], d);
                }
            }
        }
        for (int t = 0; t < N; t++) {
            const vf scale = load_bf16(tile[t].k_groups + g * TILE);
            for (int r = 0; r < R; r++) {
                float* to = p + r * BLOCK + t * TILE;
                const vf part = mul(total_of(high[r][t], low[r][t]), set1(q[r * groups + g].step));
                store(to, g == 0 ? mul(part, scale) : fma(part, scale, load(to)));
            }
        }
    }
}

// Sums of 32 channels of R rows, or of their first 16, += weights . v of tiles [first, last]
template <int R>
static void int4_sums(const BlockWeights* w, int group, const Tile* tile, int first, int last,
                      const char* const* next, float* const* sums, bool is_whole) {
    vi acc[R][4];  // high and low of the first 16 channels, then of the others
    for (int r = 0; r < R; r++)
        for (int i = 0; i < 4; i++) acc[r][i] = i % 2 ? vi_set1(w[r].start) : vi_zero();
    for (int t = first; t <= last; t++)
        for (int i = 0; i < 4; i++) {
            const int64_t at = (group * 4 + i) * 64;
            vi a, b;
            split_nibbles(vi_load((const char*)tile[t].v + at), a, b);
            __builtin_prefetch(next[t] + at, 0, 2);
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
            store(to, fma(total_of(acc[r][2 * i], acc[r][2 * i + 1]), set1(w[r].step), load(to)));
        }
}

class Int4Block {
  public:
    static size_t floats(const Shape& s, int rows) {
        return (size_t(rows) * groups_of(s.k_dim) * sizeof(QueryGroup) +
                size_t(AT_ONCE) * groups_of(s.v_dim) * sizeof(BlockWeights)) /
                   4 +
               AT_ONCE * BLOCK + s.k_dim + 16;
    }
    Int4Block(const AttnArgs& args, const Shape& shape, const AttnTask& task, const Rows& of,
              const NextTiles& after, float* memory)
        : a(args),
          s(shape),
          rows(of),
          next_tiles(after),
          pages(args.page_table + int64_t(task.seq) * args.ldp),
          kv_head(task.kv_head),
          k_groups(groups_of(shape.k_dim)),
          p(memory),
          weights((BlockWeights*)(memory + AT_ONCE * BLOCK)),
          q((QueryGroup*)(weights + AT_ONCE * groups_of(shape.v_dim))) {
        float* rotated = (float*)(q + int64_t(rows.count) * k_groups);
        const vf scale = set1(a.scale / float(rotated_block(s.k_dim)));
        for (int i = 0; i < rows.count; i++) {
            std::memcpy(rotated, query_of(a, s, task, rows, i), size_t(s.k_dim) * 4);
            rotate(rotated, s.k_dim);
            for (int g = 0; g < k_groups; g++) {
                const float* from = rotated + g * GROUP_4;
                const int n = s.k_dim - g * GROUP_4;
                const vf x[] = {load_n(from, lanes_at(0, n)),
                                n > 16 ? load_n(from + 16, lanes_at(16, n)) : zero()};
                q[i * k_groups + g].make({mul(x[0], scale), mul(x[1], scale)});
            }
        }
    }
    static int slots(const Shape&, int rows) { return rows; }
    void run(int from, int to, const SplitRows& split) {
        split.open(0, rows.count);
        for (int block0 = from; block0 < to; block0 += BLOCK) run_block(block0);
        split.close(0, rows.count);
    }

  private:
    static constexpr int AT_ONCE = 4;  // rows
    const AttnArgs& a;
    const Shape& s;
    const Rows& rows;
    const NextTiles& next_tiles;
    const int32_t* pages;
    const int kv_head, k_groups;
    float* p;               // [AT_ONCE][64]
    BlockWeights* weights;  // [groups of V][AT_ONCE]
    QueryGroup* q;
    Tile tiles[TILES];
    const char *next_k[TILES], *next_v[TILES];  // what the next block reads there, or this one again
    int first, last;                            // tiles that are there

    void open(int block0);
    void run_block(int block0);
    template <int R>
    void run_rows(int r0, int block0);
};

void Int4Block::open(int block0) {
    const int end = rows.hi < block0 + BLOCK ? rows.hi : block0 + BLOCK,
              start = rows.lo > block0 ? rows.lo : block0;
    first = (start - block0) / TILE, last = (end - 1 - block0) / TILE;
    for (int i = 0; i < TILES; i++) {
        // scores of absent tiles are masked
        tiles[i] = tile_at(a.cache, pages, kv_head, block0 / TILE + std::clamp(i, first, last));
        const Tile next = next_tiles.of(block0 / TILE + i);
        next_k[i] = (const char*)(next.v ? next.k : tiles[i].k);
        next_v[i] = (const char*)(next.v ? next.v : tiles[i].v);
        if (!next.v) continue;
        prefetch_bytes(next.k_groups, k_groups * TILE * 2);
        prefetch_bytes(next.v_groups, groups_of(s.v_dim) * TILE * 2);
    }
}

template <int R>
void Int4Block::run_rows(int r0, int block0) {
    constexpr int N = R > 1 ? 2 : 4;
    float* sums[R];
    for (int r = 0; r < R; r++) sums[r] = rows.now + int64_t(r0 + r) * s.state;
    for (int t = 0; t < TILES; t += N)
        int4_scores<R, N>(q + r0 * k_groups, k_groups, tiles + t, next_k + t, p + t * TILE);
    for (int r = 0; r < R; r++)
        softmax_row(a, s, rows, kv_head, r0 + r, block0, p + r * BLOCK, nullptr, nullptr);
    // All at once: each waits for its largest number, and the processor has others to go on with.
    for (int g = 0; g < groups_of(s.v_dim); g++)
        for (int r = 0; r < R; r++) {
            vf w[TILES], nothing = zero();
            for (int t = 0; t < TILES; t++) {  // what is not seen may be anything
                const vf x = load(p + r * BLOCK + t * TILE), scale = load_bf16(tiles[t].v_groups + g * TILE);
                w[t] = select_lt(zero(), x, mul(x, scale), zero());
                nothing = add(nothing, sub(w[t], w[t]));  // NaN where V is not finite: the row is NaN
            }
            float* sum = sums[r] + s.v_pad;
            store(sum, add(load(sum), nothing));
            weights[g * AT_ONCE + r].make(w);
        }
    for (int g = 0; g < groups_of(s.v_dim); g++)
        int4_sums<R>(weights + g * AT_ONCE, g, tiles, first, last, next_v, sums, g * GROUP_4 + 16 < s.v_pad);
}

void Int4Block::run_block(int block0) {
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
}

static void attention_int4(const AttnArgs& a, const Ctx& ctx) { run_attention<Int4Block>(a, ctx); }
static size_t attention_int4_local(const AttnArgs& a) { return attention_bytes<Int4Block>(a); }

}  // namespace RADIX_ISA
}  // namespace radix

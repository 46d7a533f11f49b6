// Blocks of attention in float32 vectors: caches of every type, on every processor.
#include "attention_lost.h"

namespace radix {
namespace RADIX_ISA {

// Rows at a time, and tiles of keys or vectors of values that meet them: sums fill 24 of 32 registers.
#if defined(__AVX512F__)
constexpr int MAX_GROUP = 12;
constexpr int at_once(int rows) { return rows > 6 ? 2 : 4; }
#else
constexpr int MAX_GROUP = 6;
constexpr int at_once(int) { return 1; }
#endif
constexpr int RAW_ROWS = 48;  // of a task; for more a block is widened once

struct BlockPointers {     // float32, or bfloat16 straight from the cache
    const void* k[TILES];  // [k_dim][16]
    const void* v[TILES];  // 16 rows of v_stride
    int64_t v_stride;
    const float* k_scale;  // [64] each, or null: all ones
    const float* v_scale;
    const void* next_k[TILES];  // what the next block reads there, or this one again
    const void* next_v[TILES];
    uint64_t lost = 0;  // tokens whose V is zeros instead (attention_lost.h)
};
template <int DTYPE>
static void upcast_tile(const Shape& s, const Tile& t, int width, float* k, float* v) {
    upcast_k<DTYPE>(t.k, s.k_dim, k);
    upcast_v<DTYPE>({t.v, nullptr, width}, s.v_dim, s.v_pad, v);
}

// p[row][64] = q . k, one chain over d for each token
template <int R, int DTYPE>
static void scores(const float* q, int k_dim, const BlockPointers& bp, float* p) {
    constexpr int LINE = 4 / dtype_size(DTYPE), TILES_AT_ONCE = at_once(R);  // of K: as many channels
    for (int t0 = 0; t0 < TILES; t0 += TILES_AT_ONCE) {
        vf acc[R][TILES_AT_ONCE];
        for (int r = 0; r < R; r++)
            for (int t = 0; t < TILES_AT_ONCE; t++) acc[r][t] = zero();
        RADIX_UNROLL(2)
        for (int d = 0; d < k_dim; d++) {
            vf k[TILES_AT_ONCE];
            for (int t = 0; t < TILES_AT_ONCE; t++) k[t] = load_kv<DTYPE>(bp.k[t0 + t], d * 16);
            if (d % LINE == 0)
                for (int t = 0; t < TILES_AT_ONCE; t++) prefetch_line<DTYPE>(bp.next_k[t0 + t], d * 16);
            RADIX_UNROLL(12)
            for (int r = 0; r < R; r++) {
                vf qv = set1(q[r * k_dim + d]);
                for (int t = 0; t < TILES_AT_ONCE; t++) acc[r][t] = fma(qv, k[t], acc[r][t]);
            }
        }
        for (int r = 0; r < R; r++)
            for (int t = 0; t < TILES_AT_ONCE; t++) store(p + r * BLOCK + (t0 + t) * 16, acc[r][t]);
    }
}

// sums[row] += p[row][t] * v[t] for t in [t0, t1)
template <int R, int DTYPE, int NV>
static void weighted_part(float* state, int stride, const float* p, const BlockPointers& bp, int t0, int t1,
                          int at) {
    vf acc[R][NV];
    for (int r = 0; r < R; r++)
        for (int c = 0; c < NV; c++) acc[r][c] = load(state + r * stride + at + c * 16);
    for (int tile = t0 / 16; tile * 16 < t1; tile++) {
        const void* v = bp.v[tile];
        int lo = t0 > tile * 16 ? t0 - tile * 16 : 0, hi = t1 < tile * 16 + 16 ? t1 - tile * 16 : 16;
        for (int t = lo; t < hi; t++) {
            vf x[NV];
            for (int c = 0; c < NV; c++) x[c] = load_kv<DTYPE>(v, t * bp.v_stride + at + c * 16);
            for (int c = 0; c < NV * 16; c += 64 / dtype_size(DTYPE))
                prefetch_line<DTYPE>(bp.next_v[tile], t * bp.v_stride + at + c);
            RADIX_UNROLL(12)
            for (int r = 0; r < R; r++) {
                vf w = set1(p[r * BLOCK + tile * 16 + t]);
                for (int c = 0; c < NV; c++) acc[r][c] = fma(w, x[c], acc[r][c]);
            }
        }
    }
    for (int r = 0; r < R; r++)
        for (int c = 0; c < NV; c++) store(state + r * stride + at + c * 16, acc[r][c]);
}

template <int R, int DTYPE>
static void weighted(float* state, const Shape& s, const float* p, const BlockPointers& bp, int t0, int t1) {
    constexpr int V_AT_ONCE = at_once(R);
    int at = 0;
    for (; at + V_AT_ONCE * 16 <= s.v_pad; at += V_AT_ONCE * 16)
        weighted_part<R, DTYPE, V_AT_ONCE>(state, s.state, p, bp, t0, t1, at);
    for (; at < s.v_pad; at += 16) weighted_part<R, DTYPE, 1>(state, s.state, p, bp, t0, t1, at);
}

using ScoreFn = void (*)(const float*, int, const BlockPointers&, float*);
using WeightFn = void (*)(float*, const Shape&, const float*, const BlockPointers&, int, int);
template <int DTYPE, class Rows>
struct GroupFns;
template <int DTYPE, int... R>
struct GroupFns<DTYPE, std::integer_sequence<int, R...>> {
    static constexpr ScoreFn score[] = {scores<R + 1, DTYPE>...};
    static constexpr WeightFn weight[] = {weighted<R + 1, DTYPE>...};
};
template <int DTYPE>
using OfType = GroupFns<DTYPE, std::make_integer_sequence<int, MAX_GROUP>>;
// [0 widened, 1 straight from bfloat16, 2 from int8][rows - 1]; constexpr: no code of this instruction set
// may run before it is chosen
static constexpr const ScoreFn* SCORE[] = {OfType<DT_F32>::score, OfType<DT_BF16>::score,
                                           OfType<DT_I8>::score};
static constexpr const WeightFn* WEIGHT[] = {OfType<DT_F32>::weight, OfType<DT_BF16>::weight,
                                             OfType<DT_I8>::weight};

// The task's queries times the scale of scores, [rows][k_dim]
static void scale_queries(const AttnArgs& a, const Shape& s, const AttnTask& task, const Rows& rows,
                          float* q) {
    for (int i = 0; i < rows.count; i++, q += s.k_dim) {
        const float* from = query_of(a, s, task, rows, i);
        for (int d = 0; d < s.k_dim; d += 16) {
            const int n = lanes_at(d, s.k_dim);
            store_n(q + d, mul(load_n(from + d, n), set1(a.scale)), n);
        }
    }
}

class VectorBlock {
  public:
    static constexpr bool JOINS = true;
    static size_t floats(const Shape& s, int rows) {
        return size_t(rows) * s.k_dim + size_t(BLOCK) * (s.k_dim + s.v_pad) + (MAX_GROUP + 2) * BLOCK;
    }
    VectorBlock(const AttnArgs& args, const Shape& shape, const AttnTask& task, const Rows& of,
                const NextTiles& after, float* memory)
        : a(args),
          s(shape),
          rows(of),
          next_tiles(after),
          pages(args.page_table + int64_t(task.seq) * args.ldp),
          kv_head(task.kv_head) {
        k = memory;
        v = k + size_t(BLOCK) * s.k_dim;
        p = v + size_t(BLOCK) * s.v_pad;
        scale = p + MAX_GROUP * BLOCK;
        q = scale + 2 * BLOCK;
        scale_queries(a, s, task, rows, q);
        // Both ways give the same bits.
        const bool may = s.v_dim % 16 == 0 && rows.count <= RAW_ROWS;
        raw = !may ? 0 : a.cache.dtype == DT_BF16 ? 1 : a.cache.dtype == DT_I8 ? 2 : 0;
    }
    static int slots(const Shape&, int rows) { return rows; }
    void run(int from, int to, const SplitRows& split) {
        split.open(0, rows.count);
        for (int block0 = from; block0 < to; block0 += BLOCK) step(block0);
        split.close(0, rows.count);
    }
    void step(int block0);

  private:
    const AttnArgs& a;
    const Shape& s;
    const Rows& rows;
    const NextTiles& next_tiles;
    const int32_t* pages;
    int kv_head, raw;
    float *k, *v, *p, *scale, *q;
    void open(int first_tile, int last_tile, BlockPointers& out) const;
    void drop_lost(int block0, BlockPointers& out) const;
};

void VectorBlock::open(int first_tile, int last_tile, BlockPointers& out) const {
    const Cache& c = a.cache;
    const bool direct = c.dtype == DT_F32 && s.v_dim % 16 == 0;
    const int width = v_width(c);
    out.v_stride = raw || direct ? width : s.v_pad;
    out.k_scale = out.v_scale = nullptr;
    const void* any = nullptr;
    for (int i = 0; i < TILES; i++) {
        const int tile = first_tile / TILES * TILES + i;
        const bool is_there = tile >= first_tile && tile <= last_tile, is_read = raw || direct;
        const Tile next = next_tiles.of(tile);
        if (next.v && !(is_read && is_there)) prefetch_tile(c, next);
        out.k[i] = nullptr;
        if (!is_there) continue;
        const Tile t = tile_at(c, pages, kv_head, tile);
        float *own_k = k + int64_t(i) * s.k_dim * TILE, *own_v = v + int64_t(i) * TILE * s.v_pad;
        const bool direct_k = raw || c.dtype == DT_F32;
        out.k[i] = any = direct_k ? t.k : own_k;
        out.v[i] = is_read ? t.v : own_v;
        out.next_k[i] = is_read && next.v ? next.k : out.k[i];
        out.next_v[i] = is_read && next.v ? next.v : out.v[i];
        if (is_read && next.v) prefetch_scales(c, next);
        if (t.k_scale) {
            std::memcpy(scale + i * TILE, t.k_scale, TILE * 4);
            std::memcpy(scale + BLOCK + i * TILE, t.v_scale, TILE * 4);
            out.k_scale = scale, out.v_scale = scale + BLOCK;
        }
        if (raw || (direct_k && direct)) continue;
        switch (c.dtype) {
            case DT_F32: upcast_tile<DT_F32>(s, t, width, own_k, own_v); break;
            case DT_BF16: upcast_tile<DT_BF16>(s, t, width, own_k, own_v); break;
            case DT_F16: upcast_tile<DT_F16>(s, t, width, own_k, own_v); break;
            case DT_I8: upcast_tile<DT_I8>(s, t, width, own_k, own_v); break;
            case DT_E4M3: upcast_tile<DT_E4M3>(s, t, width, own_k, own_v); break;
            default: upcast_tile<DT_E5M2>(s, t, width, own_k, own_v);
        }
    }
    for (int i = 0; i < TILES; i++)
        if (!out.k[i]) out.k[i] = out.next_k[i] = any;  // scores of absent tiles are masked, never used
}

void VectorBlock::drop_lost(int block0, BlockPointers& b) const {
    for (int i = 0; i < TILES; i++) {
        const uint32_t lost = of_tile(b.lost, i);
        if (!lost) continue;
        if (b.v_scale) {
            each_lane(lost, [&](int lane) { scale[BLOCK + i * TILE + lane] = 0.0f; });
            continue;
        }
        float* own = v + int64_t(i) * TILE * s.v_pad;
        const int64_t bytes = b.v_stride * (raw ? 2 : 4);
        if (b.v[i] != own) std::memcpy(own, b.v[i], size_t(TILE * bytes));
        clear_lanes(lost, own, bytes);
        b.v[i] = own;
    }
}

void VectorBlock::step(int block0) {
    const int end = rows.hi < block0 + BLOCK ? rows.hi : block0 + BLOCK,
              start = rows.lo > block0 ? rows.lo : block0;
    BlockPointers bp;
    open(start / TILE, (end - 1) / TILE, bp);
    if ((bp.lost = lost_tokens(a, s, rows, pages, kv_head, block0))) drop_lost(block0, bp);
    const int groups = (rows.count + MAX_GROUP - 1) / MAX_GROUP, each = (rows.count + groups - 1) / groups;
    for (int r0 = 0; r0 < rows.count; r0 += each) {
        const int n = rows.count - r0 < each ? rows.count - r0 : each;
        const int lo = rows.row_lo[r0], hi = rows.row_hi[r0 + n - 1];  // both grow with the row
        if (hi <= block0 || lo >= block0 + BLOCK) continue;
        SCORE[raw][n - 1](q + int64_t(r0) * s.k_dim, s.k_dim, bp, p);
        for (int r = 0; r < n; r++) {
            softmax_row(a, s, rows, kv_head, r0 + r, block0, p + r * BLOCK, bp.k_scale, bp.v_scale);
            if (bp.lost) rows.state(s, r0 + r)[s.v_pad] += loss_of(a, s, rows, r0 + r, block0, bp.lost);
        }
        const int t0 = lo > block0 ? lo - block0 : 0, t1 = hi < block0 + BLOCK ? hi - block0 : BLOCK;
        WEIGHT[raw][n - 1](rows.now + int64_t(r0) * s.state, s, p, bp, t0, t1);
    }
}

// Rows of k_dim numbers whose first v_dim are the value, read by all query heads: a strip of the block's
// channels is loaded into first-level cache once, transposed for the scores and as stored for the sums,
// and meets all rows of the task there. The arithmetic is that of VectorBlock.
class LatentBlock {
  public:
    static constexpr bool JOINS = false;
    static size_t floats(const Shape& s, int rows) {
        return size_t(rows) * (s.k_dim + BLOCK) + size_t(STRIP) * BLOCK + 2 * BLOCK;
    }
    LatentBlock(const AttnArgs& args, const Shape& shape, const AttnTask& task, const Rows& of,
                const NextTiles& after, float* memory)
        : a(args),
          s(shape),
          rows(of),
          next_tiles(after),
          pages(args.page_table + int64_t(task.seq) * args.ldp),
          kv_head(task.kv_head) {
        strip = memory;
        scale = strip + STRIP * BLOCK;
        p = scale + 2 * BLOCK;
        q = p + int64_t(rows.count) * BLOCK;
        scale_queries(a, s, task, rows, q);
    }
    static int slots(const Shape&, int rows) { return rows; }
    void run(int from, int to, const SplitRows& split) {
        split.open(0, rows.count);
        for (int block0 = from; block0 < to; block0 += BLOCK) run_block(block0);
        split.close(0, rows.count);
    }

  private:
    void run_block(int block0) {
        switch (a.cache.dtype) {
            case DT_F32: return run_of<DT_F32>(block0);
            case DT_BF16: return run_of<DT_BF16>(block0);
            case DT_F16: return run_of<DT_F16>(block0);
            case DT_I8: return run_of<DT_I8>(block0);
            case DT_E4M3: return run_of<DT_E4M3>(block0);
            case DT_I4: return run_of<DT_I4>(block0);
            default: return run_of<DT_E5M2>(block0);
        }
    }
    static constexpr int STRIP = 64, GROUP = 6, TILES_AT_ONCE = at_once(GROUP);  // channels, rows
    const AttnArgs& a;
    const Shape& s;
    const Rows& rows;
    const NextTiles& next_tiles;
    const int32_t* pages;
    int kv_head;
    float *strip, *scale, *p, *q;  // [TILES][STRIP][16]; [2][64]; [rows][64]; [rows][k_dim]
    Tile tiles[TILES];
    int first, last;  // tiles that are there
    uint64_t lost;    // tokens whose values are zeros instead (attention_lost.h)

    template <int DTYPE>
    VRows<DTYPE> rows_of(int i) const {
        return {tiles[i].v, tiles[i].v_groups, s.k_dim};
    }
    void open(int block0);
    template <int DTYPE>
    void run_of(int block0);
    template <int DTYPE>
    void add_values(int block0);
    template <int DTYPE>
    void prefetch_next(int block0, int d, int n) const;
    template <class F>
    void each_group(int block0, F&& f) const {
        for (int r0 = 0; r0 < rows.count; r0 += GROUP) {
            const int n = rows.count - r0 < GROUP ? rows.count - r0 : GROUP;
            if (rows.row_hi[r0 + n - 1] > block0 && rows.row_lo[r0] < block0 + BLOCK)
                f(r0, n);  // both grow with the row
        }
    }
    template <int R>
    static void scores(const float* q, int k_dim, int n, const float* strip, float* p, int first, int last,
                       bool begins);
};

// p[row][64] (+)= q . k over `n` channels, one chain for each token
template <int R>
void LatentBlock::scores(const float* q, int k_dim, int n, const float* strip, float* p, int first, int last,
                         bool begins) {
    for (int t0 = first / TILES_AT_ONCE * TILES_AT_ONCE; t0 <= last; t0 += TILES_AT_ONCE) {
        vf acc[R][TILES_AT_ONCE];
        for (int r = 0; r < R; r++)
            for (int t = 0; t < TILES_AT_ONCE; t++)
                acc[r][t] = begins ? zero() : load(p + r * BLOCK + (t0 + t) * 16);
        RADIX_UNROLL(2)
        for (int d = 0; d < n; d++) {
            vf k[TILES_AT_ONCE];
            for (int t = 0; t < TILES_AT_ONCE; t++) k[t] = load(strip + ((t0 + t) * STRIP + d) * 16);
            RADIX_UNROLL(6)
            for (int r = 0; r < R; r++) {
                vf qv = set1(q[r * k_dim + d]);
                for (int t = 0; t < TILES_AT_ONCE; t++) acc[r][t] = fma(qv, k[t], acc[r][t]);
            }
        }
        for (int r = 0; r < R; r++)
            for (int t = 0; t < TILES_AT_ONCE; t++) store(p + r * BLOCK + (t0 + t) * 16, acc[r][t]);
    }
}

void LatentBlock::open(int block0) {
    const int end = rows.hi < block0 + BLOCK ? rows.hi : block0 + BLOCK,
              start = rows.lo > block0 ? rows.lo : block0;
    first = (start - block0) / TILE, last = (end - 1 - block0) / TILE;
    for (int i = first; i <= last; i++) {
        tiles[i] = tile_at(a.cache, pages, kv_head, block0 / TILE + i);
        if (!tiles[i].k_scale) continue;
        std::memcpy(scale + i * TILE, tiles[i].k_scale, TILE * 4);
        std::memcpy(scale + BLOCK + i * TILE, tiles[i].v_scale, TILE * 4);
    }
    lost = lost_tokens(a, s, rows, pages, kv_head, block0);
    for (int i = first; a.cache.dtype == DT_I8 && i <= last; i++)
        each_lane(of_tile(lost, i), [&](int lane) { scale[BLOCK + i * TILE + lane] = 0.0f; });
}

template <int DTYPE>
void LatentBlock::prefetch_next(int block0, int d, int n) const {
    for (int i = 0; i < TILES; i++) {
        const char* next = (const char*)next_tiles.of(block0 / TILE + i).v;
        if (!next) continue;
        if (DTYPE == DT_I4)
            prefetch_bytes(next + d * TILE / 2, n * TILE / 2);
        else
            for (int64_t r = 0; r < TILE; r++)
                prefetch_bytes(next + kv_bytes(DTYPE, r * s.k_dim + d), kv_bytes(DTYPE, n));
    }
}

template <int DTYPE>
void LatentBlock::run_of(int block0) {
    using Fn = void (*)(const float*, int, int, const float*, float*, int, int, bool);
    static const Fn SCORES[GROUP] = {scores<1>, scores<2>, scores<3>, scores<4>, scores<5>, scores<6>};
    open(block0);
    for (int d = 0; d < s.k_dim; d += STRIP) {
        const int n = s.k_dim - d < STRIP ? s.k_dim - d : STRIP;
        for (int i = first; i <= last; i++)
            transpose_rows<DTYPE>(rows_of<DTYPE>(i).from(d), n, strip + i * STRIP * TILE);
        prefetch_next<DTYPE>(block0, d, n);
        each_group(block0, [&](int r0, int count) {
            SCORES[count - 1](q + int64_t(r0) * s.k_dim + d, s.k_dim, n, strip, p + int64_t(r0) * BLOCK,
                              first, last, d == 0);
        });
    }
    const float *k_scale = DTYPE == DT_I8 ? scale : nullptr,
                *v_scale = DTYPE == DT_I8 ? scale + BLOCK : nullptr;
    each_group(block0, [&](int r0, int count) {
        for (int r = r0; r < r0 + count; r++) {
            softmax_row(a, s, rows, kv_head, r, block0, p + int64_t(r) * BLOCK, k_scale, v_scale);
            if (lost) rows.state(s, r)[s.v_pad] += loss_of(a, s, rows, r, block0, lost);
        }
    });
    add_values<DTYPE>(block0);
}

template <int DTYPE>
void LatentBlock::add_values(int block0) {
    const bool direct = DTYPE == DT_F32 && s.v_dim % 16 == 0 && !lost;
    for (int at = 0; at < s.v_pad; at += STRIP) {
        Shape part = s;
        part.v_pad = s.v_pad - at < STRIP ? s.v_pad - at : STRIP;
        BlockPointers bp{};
        bp.v_stride = direct ? s.k_dim : part.v_pad;
        for (int i = first; i <= last; i++) {
            const VRows<DTYPE> from = rows_of<DTYPE>(i).from(at);
            float* own = strip + i * STRIP * TILE;
            if (!direct) upcast_v<DTYPE>(from, s.v_dim - at < STRIP ? s.v_dim - at : STRIP, part.v_pad, own);
            if (!direct) clear_lanes(of_tile(lost, i), own, part.v_pad * 4);
            bp.v[i] = bp.next_v[i] = direct ? from.v : own;
        }
        each_group(block0, [&](int r0, int count) {
            const int lo = rows.row_lo[r0], hi = rows.row_hi[r0 + count - 1];
            const int t0 = lo > block0 ? lo - block0 : 0, t1 = hi < block0 + BLOCK ? hi - block0 : BLOCK;
            WEIGHT[0][count - 1](rows.now + int64_t(r0) * s.state + at, part, p + int64_t(r0) * BLOCK, bp, t0,
                                 t1);
        });
    }
}

void attention(const AttnArgs& a, const Ctx& ctx) {
    if (a.cache.latent)
        run_attention<LatentBlock>(a, ctx);
    else
        run_attention<VectorBlock>(a, ctx);
}
size_t attention_local(const AttnArgs& a) {
    return a.cache.latent ? attention_bytes<LatentBlock>(a) : attention_bytes<VectorBlock>(a);
}

}  // namespace RADIX_ISA
}  // namespace radix

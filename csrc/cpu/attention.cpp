// Blocks of attention in float32 vectors: caches of every type, on every processor.
#include "attention_rows.h"

namespace radix {
namespace RADIX_ISA {

constexpr int MAX_GROUP = 6;
#if defined(__AVX512F__)
constexpr int TILES_AT_ONCE = 4, V_AT_ONCE = 4;
#else
constexpr int TILES_AT_ONCE = 1, V_AT_ONCE = 1;
#endif

struct BlockPointers {  // float32, or bfloat16 straight from the cache
    const void* k[TILES];  // [k_dim][16]
    const void* v[TILES];  // 16 rows of v_stride
    int64_t v_stride;
    const float* k_scale;  // [64] each, or null: all ones
    const float* v_scale;
    const void* next_k[TILES];  // what the next block reads there, or this one again
    const void* next_v[TILES];
};
template <int DTYPE>
static void widen_tile(const Shape& s, const Tile& t, int width, float* k, float* v) {
    widen_k<DTYPE>(t, s.k_dim, k);
    widen_v<DTYPE>(t.v, width, s.v_dim, s.v_pad, v);
}

// p[row][64] = q . k, one chain over d for each token
template <int R, int DTYPE>
static void scores(const float* q, int k_dim, const BlockPointers& bp, float* p) {
    constexpr int LINE = 4 / dtype_size(DTYPE);  // of K: as many channels
    for (int t0 = 0; t0 < TILES; t0 += TILES_AT_ONCE) {
        vf acc[R][TILES_AT_ONCE];
        for (int r = 0; r < R; r++)
            for (int t = 0; t < TILES_AT_ONCE; t++) acc[r][t] = zero();
RADIX_UNROLL(2)
        for (int d = 0; d < k_dim; d++) {
            vf k[TILES_AT_ONCE];
            for (int t = 0; t < TILES_AT_ONCE; t++) k[t] = load_kv<DTYPE>(bp.k[t0 + t], d * 16);
            if (d % LINE == 0)
                for (int t = 0; t < TILES_AT_ONCE; t++) ask_for<DTYPE>(bp.next_k[t0 + t], d * 16);
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

// sums[row] += p[row][t] * v[t] for t in [t0, t1)
template <int R, int DTYPE, int NV>
static void weighted_part(float* state, int stride, const float* p, const BlockPointers& bp, int t0, int t1, int at) {
    vf acc[R][NV];
    for (int r = 0; r < R; r++)
        for (int c = 0; c < NV; c++) acc[r][c] = load(state + r * stride + at + c * 16);
    for (int tile = t0 / 16; tile * 16 < t1; tile++) {
        const void* v = bp.v[tile];
        int lo = t0 > tile * 16 ? t0 - tile * 16 : 0, hi = t1 < tile * 16 + 16 ? t1 - tile * 16 : 16;
        for (int t = lo; t < hi; t++) {
            vf x[NV];
            for (int c = 0; c < NV; c++) x[c] = load_kv<DTYPE>(v, t * bp.v_stride + at + c * 16);
            for (int c = 0; c < NV * 16; c += 64 / dtype_size(DTYPE)) ask_for<DTYPE>(bp.next_v[tile], t * bp.v_stride + at + c);
RADIX_UNROLL(6)
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
    int at = 0;
    for (; at + V_AT_ONCE * 16 <= s.v_pad; at += V_AT_ONCE * 16) weighted_part<R, DTYPE, V_AT_ONCE>(state, s.state, p, bp, t0, t1, at);
    for (; at < s.v_pad; at += 16) weighted_part<R, DTYPE, 1>(state, s.state, p, bp, t0, t1, at);
}

using ScoreFn = void (*)(const float*, int, const BlockPointers&, float*);
using WeightFn = void (*)(float*, const Shape&, const float*, const BlockPointers&, int, int);
#define RADIX_GROUPS(f, dtype) {f<1, dtype>, f<2, dtype>, f<3, dtype>, f<4, dtype>, f<5, dtype>, f<6, dtype>}
// [0 widened, 1 straight from bfloat16, 2 from int8][rows - 1]
static const ScoreFn SCORE[3][MAX_GROUP] = {RADIX_GROUPS(scores, DT_F32), RADIX_GROUPS(scores, DT_BF16), RADIX_GROUPS(scores, DT_I8)};
static const WeightFn WEIGHT[3][MAX_GROUP] = {RADIX_GROUPS(weighted, DT_F32), RADIX_GROUPS(weighted, DT_BF16), RADIX_GROUPS(weighted, DT_I8)};
#undef RADIX_GROUPS

class VectorBlock {
  public:
    static size_t floats(const Shape& s, int rows) { return size_t(rows) * s.k_dim + size_t(BLOCK) * (s.k_dim + s.v_pad) + (MAX_GROUP + 2) * BLOCK; }
    VectorBlock(const AttnArgs& args, const Shape& shape, const AttnTask& task, const Rows& of, const Later& after, float* memory)
        : a(args), s(shape), rows(of), later(after), pages(args.page_table + int64_t(task.seq) * args.ldp), kv_head(task.kv_head) {
        k = memory;
        v = k + size_t(BLOCK) * s.k_dim;
        p = v + size_t(BLOCK) * s.v_pad;
        scale = p + MAX_GROUP * BLOCK;
        q = scale + 2 * BLOCK;
        for (int i = 0; i < rows.count; i++) {
            const float* from = query_of(a, s, task, rows, i);
            for (int d = 0; d < s.k_dim; d += 16) {
                const int n = lanes_at(d, s.k_dim);
                store_n(q + int64_t(i) * s.k_dim + d, mul(load_n(from + d, n), set1(a.scale)), n);
            }
        }
        // Widening a block pays when several groups of rows read it; both ways give the same bits.
        const bool may = s.v_dim % 16 == 0 && rows.count <= MAX_GROUP && !a.cache.latent;
        raw = !may ? 0 : a.cache.dtype == DT_BF16 ? 1 : a.cache.dtype == DT_I8 ? 2 : 0;
    }
    static int slots(const Shape&, int rows) { return rows; }
    void run(int from, int to, const SplitRows& split) {
        split.open(0, rows.count);
        for (int block0 = from; block0 < to; block0 += BLOCK) run_block(block0);
        split.close(0, rows.count);
    }

  private:
    const AttnArgs& a;
    const Shape& s;
    const Rows& rows;
    const Later& later;
    const int32_t* pages;
    int kv_head, raw;
    float *k, *v, *p, *scale, *q;
    void open(int first_tile, int last_tile, BlockPointers& out) const;
    void run_block(int block0);
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
        const Tile next = later.of(tile);
        if (next.v && !(is_read && is_there)) prefetch_tile(c, next);
        out.k[i] = nullptr;
        if (!is_there) continue;
        const Tile t = tile_at(c, pages, kv_head, tile);
        float *own_k = k + int64_t(i) * s.k_dim * TILE, *own_v = v + int64_t(i) * TILE * s.v_pad;
        const bool direct_k = raw || (c.dtype == DT_F32 && t.k);
        out.k[i] = any = direct_k ? t.k : own_k;
        out.v[i] = is_read ? t.v : own_v;
        out.next_k[i] = is_read && next.v ? next.k : out.k[i];
        out.next_v[i] = is_read && next.v ? next.v : out.v[i];
        if (t.k_scale) {
            std::memcpy(scale + i * TILE, t.k_scale, TILE * 4);
            std::memcpy(scale + BLOCK + i * TILE, t.v_scale, TILE * 4);
            out.k_scale = scale, out.v_scale = scale + BLOCK;
        }
        if (raw || (direct_k && direct)) continue;
        switch (c.dtype) {
            case DT_F32: widen_tile<DT_F32>(s, t, width, own_k, own_v); break;
            case DT_BF16: widen_tile<DT_BF16>(s, t, width, own_k, own_v); break;
            case DT_F16: widen_tile<DT_F16>(s, t, width, own_k, own_v); break;
            case DT_I8: widen_tile<DT_I8>(s, t, width, own_k, own_v); break;
            case DT_E4M3: widen_tile<DT_E4M3>(s, t, width, own_k, own_v); break;
            default: widen_tile<DT_E5M2>(s, t, width, own_k, own_v);
        }
    }
    for (int i = 0; i < TILES; i++)
        if (!out.k[i]) out.k[i] = out.next_k[i] = any;  // scores of absent tiles are masked, never used
}

void VectorBlock::run_block(int block0) {
    const int end = rows.hi < block0 + BLOCK ? rows.hi : block0 + BLOCK, start = rows.lo > block0 ? rows.lo : block0;
    BlockPointers bp;
    open(start / TILE, (end - 1) / TILE, bp);
    for (int r0 = 0; r0 < rows.count; r0 += MAX_GROUP) {
        const int n = rows.count - r0 < MAX_GROUP ? rows.count - r0 : MAX_GROUP;
        const int lo = rows.row_lo[r0], hi = rows.row_hi[r0 + n - 1];  // both grow with the row
        if (hi <= block0 || lo >= block0 + BLOCK) continue;
        SCORE[raw][n - 1](q + int64_t(r0) * s.k_dim, s.k_dim, bp, p);
        for (int r = 0; r < n; r++) soften_row(a, s, rows, kv_head, r0 + r, block0, p + r * BLOCK, bp.k_scale, bp.v_scale);
        const int t0 = lo > block0 ? lo - block0 : 0, t1 = hi < block0 + BLOCK ? hi - block0 : BLOCK;
        WEIGHT[raw][n - 1](rows.now + int64_t(r0) * s.state, s, p, bp, t0, t1);
    }
}

void attention(const AttnArgs& a, const Ctx& ctx) { run_attention<VectorBlock>(a, ctx); }
size_t attention_local(const AttnArgs& a) { return attention_bytes<VectorBlock>(a); }

}  // namespace RADIX_ISA
}  // namespace radix

// Paged attention for any mixture of decode and prefill rows.
//
// One arithmetic for all: tokens of the cache stand in splits of 512 and blocks of 64 at absolute
// positions. A split runs an online softmax over its blocks from an empty state; splits merge in
// order. A block that a row may not see leaves its state as it is, bit for bit, so a row's result
// depends neither on the rows computed beside it nor on how its sequence was cut into chunks.
#include "softmax.h"

namespace radix {
namespace RADIX_ISA {

constexpr int MAX_GROUP = 6;
#if defined(__AVX512F__)
constexpr int TILES_AT_ONCE = 4, V_AT_ONCE = 4;
#else
constexpr int TILES_AT_ONCE = 1, V_AT_ONCE = 1;
#endif

struct Buffers {
    float *q, *now, *total, *k, *v, *p, *scale;
    int *lo, *hi;
    static size_t floats(const Shape& s, int rows) {
        return size_t(rows) * (s.k_dim + 2 * s.state + 2) + size_t(BLOCK) * (s.k_dim + s.v_pad) + (MAX_GROUP + 2) * BLOCK + 64;
    }
    Buffers(char* base, const Shape& s, int rows) {
        float* f = (float*)base;
        k = f, f += size_t(BLOCK) * s.k_dim;
        v = f, f += size_t(BLOCK) * s.v_pad;
        p = f, f += MAX_GROUP * BLOCK;
        scale = f, f += 2 * BLOCK;
        q = f, f += size_t(rows) * s.k_dim;
        now = f, f += size_t(rows) * s.state;
        total = f, f += size_t(rows) * s.state;
        lo = (int*)f, hi = lo + rows;
    }
};

static int rows_of_task(const AttnArgs& a) {
    int group = a.heads / a.cache.kv_heads;
    return group > 96 ? group : 96;
}

struct BlockPointers {  // float32, or bfloat16 straight from the cache
    const void* k[TILES];  // [k_dim][16]
    const void* v[TILES];  // 16 rows of v_stride
    int64_t v_stride;
    const float* k_scale;  // [64] each, or null: all ones
    const float* v_scale;
};

template <int DTYPE>
static void widen_tile(const Shape& s, const Tile& t, int width, float* k, float* v) {
    widen_k<DTYPE>(t, s.k_dim, k);
    widen_v<DTYPE>(t.v, width, s.v_dim, s.v_pad, v);
}

static void open_block(const AttnArgs& a, const Shape& s, const int32_t* pages, int kv_head, int first_tile, int last_tile, int final_tile, bool raw, const Buffers& b, BlockPointers& out) {
    const Cache& c = a.cache;
    const bool direct = c.dtype == DT_F32 && s.v_dim % 16 == 0;
    const int width = v_width(c);
    out.v_stride = raw || direct ? width : s.v_pad;
    out.k_scale = out.v_scale = nullptr;
    const void* any = nullptr;
    for (int i = 0; i < TILES; i++) {
        const int tile = first_tile / TILES * TILES + i, ahead = tile + TILES;
        if (ahead <= final_tile) prefetch_tile(c, tile_at(c, pages, kv_head, ahead));
        out.k[i] = nullptr;
        if (tile < first_tile || tile > last_tile) continue;
        const Tile t = tile_at(c, pages, kv_head, tile);
        float *k = b.k + int64_t(i) * s.k_dim * TILE, *v = b.v + int64_t(i) * TILE * s.v_pad;
        const bool own_k = raw || (c.dtype == DT_F32 && t.k);
        out.k[i] = any = own_k ? t.k : k;
        out.v[i] = raw || direct ? t.v : v;
        if (t.k_scale) {
            std::memcpy(b.scale + i * TILE, t.k_scale, TILE * 4);
            std::memcpy(b.scale + BLOCK + i * TILE, t.v_scale, TILE * 4);
            out.k_scale = b.scale, out.v_scale = b.scale + BLOCK;
        }
        if (raw || (own_k && direct)) continue;
        switch (c.dtype) {
            case DT_F32: widen_tile<DT_F32>(s, t, width, k, v); break;
            case DT_BF16: widen_tile<DT_BF16>(s, t, width, k, v); break;
            case DT_F16: widen_tile<DT_F16>(s, t, width, k, v); break;
            case DT_I8: widen_tile<DT_I8>(s, t, width, k, v); break;
            case DT_E4M3: widen_tile<DT_E4M3>(s, t, width, k, v); break;
            default: widen_tile<DT_E5M2>(s, t, width, k, v);
        }
    }
    for (int i = 0; i < TILES; i++)
        if (!out.k[i]) out.k[i] = any;  // scores of absent tiles are masked, never used
}

// p[row][64] = q . k, one chain over d for each token
template <int R, int DTYPE>
static void scores(const float* q, int k_dim, const BlockPointers& bp, float* p) {
    for (int t0 = 0; t0 < TILES; t0 += TILES_AT_ONCE) {
        vf acc[R][TILES_AT_ONCE];
        for (int r = 0; r < R; r++)
            for (int t = 0; t < TILES_AT_ONCE; t++) acc[r][t] = zero();
RADIX_UNROLL(2)
        for (int d = 0; d < k_dim; d++) {
            vf k[TILES_AT_ONCE];
            for (int t = 0; t < TILES_AT_ONCE; t++) k[t] = load_kv<DTYPE>(bp.k[t0 + t], d * 16);
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

struct Rows {  // the rows of a task: query major, the kv head's query heads inside
    int count, first_new, kv_len, lo, hi;
    int64_t token0;
};

static Rows open_rows(const AttnArgs& a, const Shape& s, const AttnTask& task, const Buffers& b) {
    Rows r{};
    const int q_len = a.query_start[task.seq + 1] - a.query_start[task.seq];
    r.kv_len = a.kv_len[task.seq];
    r.first_new = r.kv_len - q_len;
    r.token0 = a.query_start[task.seq] + task.q0;
    r.count = task.qn * s.group;
    r.lo = r.kv_len, r.hi = 0;
    for (int i = 0; i < r.count; i++) {
        int pos = r.first_new + task.q0 + i / s.group;
        b.hi[i] = a.causal && !a.tree ? pos + 1 : r.kv_len;
        b.lo[i] = first_seen(a, pos);
        r.lo = b.lo[i] < r.lo ? b.lo[i] : r.lo;
        r.hi = b.hi[i] > r.hi ? b.hi[i] : r.hi;
        const float* q = a.q + (r.token0 + i / s.group) * a.ldq + int64_t(task.kv_head * s.group + i % s.group) * a.q_head;
        float* dst = b.q + int64_t(i) * s.k_dim;
        for (int d = 0; d < s.k_dim; d += 16) {
            int n = lanes_at(d, s.k_dim);
            store_n(dst + d, mul(load_n(q + d, n), set1(a.scale)), n);
        }
    }
    return r;
}

static void run_block(const AttnArgs& a, const Shape& s, const AttnTask& task, const Rows& rows, const Buffers& b, int block0) {
    int end = rows.hi < block0 + BLOCK ? rows.hi : block0 + BLOCK;
    int start = rows.lo > block0 ? rows.lo : block0;
    BlockPointers bp;
    // Widening a block pays when several groups of rows read it; both ways give the same bits.
    const bool may = s.v_dim % 16 == 0 && rows.count <= MAX_GROUP && !a.cache.latent;
    const int raw = !may ? 0 : a.cache.dtype == DT_BF16 ? 1 : a.cache.dtype == DT_I8 ? 2 : 0;
    open_block(a, s, a.page_table + int64_t(task.seq) * a.ldp, task.kv_head, start / TILE, (end - 1) / TILE, (rows.hi - 1) / TILE, raw != 0, b, bp);
    for (int r0 = 0; r0 < rows.count; r0 += MAX_GROUP) {
        int n = rows.count - r0 < MAX_GROUP ? rows.count - r0 : MAX_GROUP;
        int lo = b.lo[r0], hi = b.hi[r0 + n - 1];  // both grow with the row
        if (hi <= block0 || lo >= block0 + BLOCK) continue;
        SCORE[raw][n - 1](b.q + int64_t(r0) * s.k_dim, s.k_dim, bp, b.p);
        for (int r = 0; r < n; r++) {
            float* p = b.p + r * BLOCK;
            int64_t token = rows.token0 + (r0 + r) / s.group;
            if (a.tree && block0 + BLOCK > rows.first_new) mask_tree(a, token, block0, rows.first_new, rows.kv_len, p);
            soften(a, s, p, bp.k_scale, bp.v_scale, b.now + int64_t(r0 + r) * s.state, b.lo[r0 + r] - block0, b.hi[r0 + r] - block0);
        }
        int t0 = lo > block0 ? lo - block0 : 0, t1 = hi < block0 + BLOCK ? hi - block0 : BLOCK;
        WEIGHT[raw][n - 1](b.now + int64_t(r0) * s.state, s, b.p, bp, t0, t1);
    }
}

static void run_task(const AttnArgs& a, const AttnTask& task, char* local) {
    Shape s(a);
    Buffers b(local, s, rows_of_task(a));
    Rows rows = open_rows(a, s, task, b);
    const bool direct = task.partial < 0;
    if (direct)
        for (int i = 0; i < rows.count; i++) clear_state(b.total + int64_t(i) * s.state, s);
    for (int split = task.split0; split < task.split1; split++) {
        for (int i = 0; i < rows.count; i++) clear_state(b.now + int64_t(i) * s.state, s);
        for (int block0 = split * SPLIT; block0 < (split + 1) * SPLIT; block0 += BLOCK)
            if (block0 < rows.hi && block0 + BLOCK > rows.lo) run_block(a, s, task, rows, b, block0);
        for (int i = 0; i < rows.count; i++) {
            float* now = b.now + int64_t(i) * s.state;
            close_split(s, now);
            if (direct) merge(s, b.total + int64_t(i) * s.state, now);
            else std::memcpy(a.partials + (task.partial + int64_t(split - task.split0) * rows.count + i) * s.state, now, size_t(s.state) * 4);
        }
    }
    if (!direct) return;
    for (int i = 0; i < rows.count; i++)
        write_row(a, s, b.total + int64_t(i) * s.state, rows.token0 + i / s.group, task.kv_head * s.group + i % s.group);
}

static void run_merge(const AttnArgs& a, const AttnTask& task, char* local) {
    Shape s(a);
    float* total = (float*)local;
    const int count = task.qn * s.group;
    for (int i = 0; i < count; i++) {
        clear_state(total, s);
        for (int split = task.split0; split < task.split1; split++)
            merge(s, total, a.partials + (task.partial + int64_t(split - task.split0) * count + i) * s.state);
        int64_t token = a.query_start[task.seq] + task.q0 + i / s.group;
        write_row(a, s, total, token, task.kv_head * s.group + i % s.group);
    }
}

void attention(const AttnArgs& a, const Ctx& ctx) {
    ctx.each(a.num_tasks, 1, [&](int64_t i0, int64_t i1) {
        for (int64_t i = i0; i < i1; i++) run_task(a, a.tasks[i], ctx.local());
    });
    ctx.barrier();
    if (a.num_merges == 0) return;
    ctx.each(a.num_merges, 1, [&](int64_t i0, int64_t i1) {
        for (int64_t i = i0; i < i1; i++) run_merge(a, a.tasks[a.num_tasks + i], ctx.local());
    });
    ctx.barrier();
}

size_t attention_local(const AttnArgs& a) { return Buffers::floats(Shape(a), rows_of_task(a)) * 4; }

}  // namespace RADIX_ISA
}  // namespace radix

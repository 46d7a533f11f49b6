// Paged attention for any mixture of decode and prefill rows.
//
// One arithmetic for all: tokens of the cache stand in splits of 512 and blocks of 64 at absolute
// positions. A split runs an online softmax over its blocks from an empty state; splits merge in
// order. A block that a row may not see leaves its state as it is, bit for bit, so a row's result
// depends neither on the rows computed beside it nor on how its sequence was cut into chunks.
#include "rows.h"

namespace radix {
namespace RADIX_ISA {

constexpr int BLOCK = 64, TILES = BLOCK / 16;
constexpr int MAX_GROUP = 6;
#if defined(__AVX512F__)
constexpr int TILES_AT_ONCE = 4, V_AT_ONCE = 4;
#else
constexpr int TILES_AT_ONCE = 1, V_AT_ONCE = 1;
#endif
constexpr float EMPTY = -3.0e38f;  // finite: exp(EMPTY - EMPTY) is 1, exp(EMPTY - score) is 0

// A row's state: [v_pad] sums, [16] partial weights, [0] the maximum.
struct Shape {
    int group, k_dim, v_dim, v_pad, state;
    explicit Shape(const AttnArgs& a)
        : group(a.heads / a.cache.kv_heads), k_dim(a.cache.k_dim), v_dim(a.cache.v_dim), v_pad((a.cache.v_dim + 15) / 16 * 16), state(v_pad + 32) {}
};

struct Buffers {
    float *q, *now, *total, *k, *v, *p;
    int *lo, *hi;
    static size_t floats(const Shape& s, int rows) {
        return size_t(rows) * (s.k_dim + 2 * s.state + 2) + size_t(BLOCK) * (s.k_dim + s.v_pad) + MAX_GROUP * BLOCK + 64;
    }
    Buffers(char* base, const Shape& s, int rows) {
        float* f = (float*)base;
        k = f, f += size_t(BLOCK) * s.k_dim;
        v = f, f += size_t(BLOCK) * s.v_pad;
        p = f, f += MAX_GROUP * BLOCK;
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
};

static void clear_state(float* s, const Shape& sh) {
    for (int i = 0; i < sh.v_pad + 16; i += 16) store(s + i, zero());
    s[sh.v_pad + 16] = EMPTY;
}

template <int DTYPE>
static void widen_tile(const Cache& c, const Shape& s, int64_t ki, int64_t vi, float* k, float* v) {
    for (int i = 0; i < s.k_dim; i++) store(k + i * 16, load_any(c.k, DTYPE, ki + i * 16));
    const bool whole = s.v_dim % 16 == 0;
    for (int r = 0; r < 16; r++) {
        float* dst = v + r * s.v_pad;
        int i = 0;
        for (; i + 16 <= s.v_dim; i += 16) store(dst + i, load_any(c.v, DTYPE, vi + r * s.v_dim + i));
        if (whole) continue;
        for (; i < s.v_pad; i++) dst[i] = i < s.v_dim ? load_scalar(c.v, DTYPE, vi + r * s.v_dim + i) : 0.0f;
    }
}

// A tile is a few kilobytes somewhere in memory: hardware prefetch sees it too late.
RADIX_INLINE void prefetch_bytes(const void* p, int64_t bytes) {
    for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch((const char*)p + i, 0, 2);
}

static void open_block(const AttnArgs& a, const Shape& s, const int32_t* pages, int kv_head, int first_tile, int last_tile, int final_tile, bool raw, const Buffers& b, BlockPointers& out) {
    const Cache& c = a.cache;
    const int per_page = c.page_size / 16, width = dtype_size(c.dtype);
    const bool direct_v = c.dtype == DT_F32 && s.v_dim % 16 == 0;
    out.v_stride = s.v_pad;
    const void* any = nullptr;
    for (int t = 0; t < TILES; t++) {
        const int tile = first_tile / TILES * TILES + t, ahead = tile + TILES;
        if (ahead <= final_tile) {
            int64_t block = int64_t(pages[ahead / per_page]) * c.kv_heads + kv_head;
            prefetch_bytes((const char*)c.k + (block * per_page + ahead % per_page) * s.k_dim * 16 * width, int64_t(s.k_dim) * 16 * width);
            prefetch_bytes((const char*)c.v + (block * c.page_size + int64_t(ahead % per_page) * 16) * s.v_dim * width, int64_t(s.v_dim) * 16 * width);
        }
        out.k[t] = nullptr;
        if (tile < first_tile || tile > last_tile) continue;
        int64_t block = int64_t(pages[tile / per_page]) * c.kv_heads + kv_head;
        int64_t ki = (block * per_page + tile % per_page) * s.k_dim * 16;
        int64_t vi = (block * c.page_size + int64_t(tile % per_page) * 16) * s.v_dim;
        if (raw) {
            out.k[t] = any = (const uint16_t*)c.k + ki;
            out.v[t] = (const uint16_t*)c.v + vi;
            continue;
        }
        float *k = b.k + int64_t(t) * s.k_dim * 16, *v = b.v + int64_t(t) * 16 * s.v_pad;
        out.k[t] = c.dtype == DT_F32 ? (const float*)c.k + ki : k;
        out.v[t] = direct_v ? (const float*)c.v + vi : v;
        any = out.k[t];
        if (c.dtype == DT_BF16) widen_tile<DT_BF16>(c, s, ki, vi, k, v);
        else if (c.dtype == DT_F16) widen_tile<DT_F16>(c, s, ki, vi, k, v);
        else if (!direct_v) widen_tile<DT_F32>(c, s, ki, vi, k, v);
    }
    for (int t = 0; t < TILES; t++)
        if (!out.k[t]) out.k[t] = any;  // scores of absent tiles are masked, never used
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
            for (int t = 0; t < TILES_AT_ONCE; t++) k[t] = load_any(bp.k[t0 + t], DTYPE, d * 16);
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
            for (int c = 0; c < NV; c++) x[c] = load_any(v, DTYPE, t * bp.v_stride + at + c * 16);
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
// [straight from bfloat16][rows - 1]
static const ScoreFn SCORE[2][MAX_GROUP] = {
    {scores<1, DT_F32>, scores<2, DT_F32>, scores<3, DT_F32>, scores<4, DT_F32>, scores<5, DT_F32>, scores<6, DT_F32>},
    {scores<1, DT_BF16>, scores<2, DT_BF16>, scores<3, DT_BF16>, scores<4, DT_BF16>, scores<5, DT_BF16>, scores<6, DT_BF16>}};
static const WeightFn WEIGHT[2][MAX_GROUP] = {
    {weighted<1, DT_F32>, weighted<2, DT_F32>, weighted<3, DT_F32>, weighted<4, DT_F32>, weighted<5, DT_F32>, weighted<6, DT_F32>},
    {weighted<1, DT_BF16>, weighted<2, DT_BF16>, weighted<3, DT_BF16>, weighted<4, DT_BF16>, weighted<5, DT_BF16>, weighted<6, DT_BF16>}};

// The tree says which new tokens a new token sees: everything older is seen.
static void mask_tree(const AttnArgs& a, int64_t token, int block0, int first_new, int kv_len, float* p) {
    for (int t = 0; t < BLOCK; t++) {
        int at = block0 + t;
        if (at >= first_new && at < kv_len && !a.tree[token * a.tree_ld + (at - first_new)]) p[t] = -INFINITY;
    }
}

// Scores of one row become weights; its state is rescaled to the new maximum.
static void soften(const AttnArgs& a, const Shape& s, float* p, float* state, int lo, int hi) {
    vf v[TILES];
    vf top = set1(-INFINITY);
    for (int t = 0; t < TILES; t++) {
        v[t] = load(p + t * 16);
        if (a.softcap != 0.0f) v[t] = mul(set1(a.softcap), vtanh(div(v[t], set1(a.softcap))));
        v[t] = keep_lanes(v[t], lo - t * 16, hi - t * 16, set1(-INFINITY));
        top = vmax(top, v[t]);
    }
    float old = state[s.v_pad + 16], m = lane_max(top);
    m = m > old ? m : old;
    vf sum = zero();
    for (int t = 0; t < TILES; t++) {
        v[t] = vexp(sub(v[t], set1(m)));
        store(p + t * 16, v[t]);
        sum = add(sum, v[t]);
    }
    float* weights = state + s.v_pad;
    if (m != old) {
        vf shrink = vexp(set1(old - m));
        for (int i = 0; i < s.v_pad; i += 16) store(state + i, mul(load(state + i), shrink));
        store(weights, mul(load(weights), shrink));
        state[s.v_pad + 16] = m;
    }
    store(weights, add(load(weights), sum));
}

// total absorbs a later split. Weights of `total` and `now` are single sums here, in lane 0.
static void merge(const Shape& s, float* total, const float* now) {
    float ma = total[s.v_pad + 16], mb = now[s.v_pad + 16], m = ma > mb ? ma : mb;
    vf ea = vexp(set1(ma - m)), eb = vexp(set1(mb - m));
    for (int i = 0; i < s.v_pad + 16; i += 16) store(total + i, fma(load(total + i), ea, mul(load(now + i), eb)));
    total[s.v_pad + 16] = m;
}
static void close_split(const Shape& s, float* state) {
    float sum = lane_tree_sum(load(state + s.v_pad));
    store(state + s.v_pad, keep_lanes(set1(sum), 0, 1, zero()));
}

static void write_row(const AttnArgs& a, const Shape& s, const float* total, int64_t token, int head) {
    float sum = total[s.v_pad], m = total[s.v_pad + 16], factor = 1.0f;
    if (a.sinks) {
        float sink = a.sinks[head], top = sink > m ? sink : m;
        factor = exp1(m - top);
        sum = sum * factor + exp1(sink - top);
    }
    vf inverse = set1(sum > 0 ? factor / sum : 0.0f);
    float* out = a.out + token * a.ldo + int64_t(head) * s.v_dim;
    for (int i = 0; i < s.v_dim; i += 16) store_n(out + i, mul(load(total + i), inverse), lanes_at(i, s.v_dim));
}

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
        b.lo[i] = a.window > 0 && pos + 1 > a.window ? pos + 1 - a.window : 0;
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
    const bool raw = a.cache.dtype == DT_BF16 && s.v_dim % 16 == 0 && rows.count <= MAX_GROUP;
    open_block(a, s, a.page_table + int64_t(task.seq) * a.ldp, task.kv_head, start / 16, (end - 1) / 16, (rows.hi - 1) / 16, raw, b, bp);
    if (raw) bp.v_stride = s.v_dim;
    for (int r0 = 0; r0 < rows.count; r0 += MAX_GROUP) {
        int n = rows.count - r0 < MAX_GROUP ? rows.count - r0 : MAX_GROUP;
        int lo = b.lo[r0], hi = b.hi[r0 + n - 1];  // both grow with the row
        if (hi <= block0 || lo >= block0 + BLOCK) continue;
        SCORE[raw][n - 1](b.q + int64_t(r0) * s.k_dim, s.k_dim, bp, b.p);
        for (int r = 0; r < n; r++) {
            float* p = b.p + r * BLOCK;
            int64_t token = rows.token0 + (r0 + r) / s.group;
            if (a.tree && block0 + BLOCK > rows.first_new) mask_tree(a, token, block0, rows.first_new, rows.kv_len, p);
            soften(a, s, p, b.now + int64_t(r0 + r) * s.state, b.lo[r0 + r] - block0, b.hi[r0 + r] - block0);
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

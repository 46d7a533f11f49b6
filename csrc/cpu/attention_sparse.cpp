// Double sparsity (arXiv:2408.07092): the queries of a KV head score all tokens by the labels of their keys,
// then attend to the best ones. Their numbers depend on nothing but their own sequence: sums of labels are
// integers, of equal scores the earlier token is chosen, chosen tokens are attended to in order, in splits of
// 512.
#include "hadamard.h"
#include "heavy_tokens.h"

namespace radix {
namespace RADIX_ISA {

// Up to 64 chosen tokens of a KV head.
struct ChosenBlock {
    int count = 0;
    const char *k[BLOCK], *v[BLOCK];
    // Null where there are none; of int4 a bfloat16 for each 32 channels, TILE apart.
    const char *k_scale[BLOCK], *v_scale[BLOCK];
};

// 32 channels of an int4 row as two vectors. `row`: its byte of the first four, in a tile of values.
RADIX_INLINE void load_i4_group(const char* row, const char* scale, int group, vf& low, vf& high) {
    const int lane = int(uintptr_t(row) & 3);
    load_i4_pair((const uint8_t*)row - lane + group * 256, lane, ((const uint16_t*)scale)[group * TILE], low,
                 high);
}
// Channels [at, at + 16) of a row, zeros from `dim` on.
template <int DTYPE>
RADIX_INLINE vf load_part(const char* row, const char* scale, int at, int dim) {
    if constexpr (DTYPE == DT_I4) {
        vf x[2];
        load_i4_group(row, scale, at / 32, x[0], x[1]);
        return x[at / 16 % 2];
    } else {
        if (at + 16 <= dim) return load_kv<DTYPE>(row, at);
        float rest[16] = {0};
        for (int i = at; i < dim; i++) rest[i - at] = load_kv_scalar<DTYPE>(row, i);
        return load(rest);
    }
}
// Channels [at, at + 32) of a row that has them, in the order that pair_order gives.
template <int DTYPE>
RADIX_INLINE void load_pair(const char* row, const char* scale, int at, vf& first, vf& second) {
    if constexpr (DTYPE == DT_I4)
        load_i4_group(row, scale, at / 32, first, second);
    else
        load_bf16_pairs((const uint16_t*)row + at, first, second);
}

class ChosenTokens {
  public:
    ChosenTokens(const SparseArgs& s, const SparseRow& row, int head)
        : c(s.a.cache),
          rows(rows_of_keys(s.a.cache)),
          pages(s.a.page_table + int64_t(row.seq) * s.a.ldp),
          kv_head(head) {}
    void open(const int32_t* chosen, int count, ChosenBlock& b) const {
        const int64_t k_row = c.k_dim * dtype_size(c.dtype), v_row = c.v_dim * dtype_size(c.dtype);
        const int64_t k_numbers = numbers_bytes(rows, c.k_dim), v_numbers = numbers_bytes(c, c.v_dim);
        const int scale = c.dtype == DT_I8 ? 4 : is_int4 ? 2 : 0;
        b.count = count;
        for (int i = 0; i < count; i++) {
            const int lane = chosen[i] % TILE;
            const int64_t at = tile_index(c, pages, kv_head, chosen[i] / TILE);
            const char *k = (const char*)rows.v + at * k_tile, *v = (const char*)c.v + at * v_tile;
            b.k[i] = k + (is_int4 ? lane / 4 * 64 + lane % 4 : lane * k_row);
            b.v[i] = v + (is_int4 ? lane / 4 * 64 + lane % 4 : lane * v_row);
            b.k_scale[i] = scale ? k + k_numbers + lane * scale : nullptr;
            b.v_scale[i] = scale ? v + v_numbers + lane * scale : nullptr;
        }
    }
    // Ask for token i, which is somewhere in memory; many at once would stall each other.
    RADIX_INLINE void prefetch_k(const ChosenBlock& b, int i) const {
        if (i < b.count) prefetch_row(b.k[i], c.k_dim, b.k_scale[i]);
    }
    RADIX_INLINE void prefetch_v(const ChosenBlock& b, int i) const {
        if (i < b.count) prefetch_row(b.v[i], c.v_dim, b.v_scale[i]);
    }

  private:
    const Cache c, rows;
    const int32_t* pages;
    int kv_head;
    const int64_t k_tile = tile_bytes(rows, c.k_dim), v_tile = tile_bytes(c, c.v_dim);
    const bool is_int4 = c.dtype == DT_I4;

    RADIX_INLINE void prefetch_row(const char* row, int dim, const char* scale) const {
        if (is_int4) {
            for (int i = 0; i < groups_of(dim); i++) __builtin_prefetch(row + i * 256, 0, 2);
            prefetch_bytes(scale, groups_of(dim) * TILE * 2);
            return;
        }
        prefetch_bytes(row, dim * dtype_size(c.dtype));
        if (scale) __builtin_prefetch(scale, 0, 2);
    }
};

// Rows of bfloat16 and int4 are widened 32 channels at a time. Of bfloat16 these are the even ones and the
// odd ones, two operations instead of four: so queries and sums are in this order while a split lasts.
constexpr bool is_paired(int dtype, int dim) { return (dtype == DT_BF16 || dtype == DT_I4) && dim % 32 == 0; }
constexpr bool is_reordered(int dtype, int dim) { return dtype == DT_BF16 && is_paired(dtype, dim); }
// x [dim] to that order, or back.
static void pair_order(float* x, int dim, bool is_back) {
    float from[1024];
    std::memcpy(from, x, size_t(dim) * 4);
    for (int i = 0; i < dim; i++) {
        const int at = i / 32 * 32 + i % 2 * 16 + i % 32 / 2;
        is_back ? x[i] = from[at] : x[at] = from[i];
    }
}

// p[g]: products of the b.count rows with G queries. G is 1 or 2: sums of 16 or 8 tokens at a time.
template <int DTYPE, int G>
static void chosen_scores(const Shape& s, const float* const (&q)[G], const ChosenTokens& tokens,
                          const ChosenBlock& b, const ChosenBlock& next, float (*p)[BLOCK]) {
    constexpr int AT_ONCE = 16 / G;
    for (int t0 = 0; t0 < BLOCK; t0 += AT_ONCE) {
        vf r[16];
        for (int i = 0; i < 16; i++) r[i] = zero();
        for (int t = 0; t < AT_ONCE; t++) {
            tokens.prefetch_k(next, t0 + t);
            if (t0 + t >= b.count) continue;
            const char *k = b.k[t0 + t], *scale = b.k_scale[t0 + t];
            if (is_paired(DTYPE, s.k_dim))
                for (int i = 0; i < s.k_dim; i += 32) {
                    vf first, second;
                    load_pair<DTYPE>(k, scale, i, first, second);
                    for (int g = 0; g < G; g++) {
                        vf& sum = r[g * AT_ONCE + t];
                        sum = fma(load(q[g] + i + 16), second, fma(load(q[g] + i), first, sum));
                    }
                }
            else
                for (int i = 0; i < s.k_dim; i += 16) {
                    const vf x = load_part<DTYPE>(k, scale, i, s.k_dim);
                    for (int g = 0; g < G; g++)
                        r[g * AT_ONCE + t] = fma(load(q[g] + i), x, r[g * AT_ONCE + t]);
                }
        }
        transpose_16x16(r);
        for (int step = 8; step; step /= 2)
            for (int t = 0; t < step; t++) r[t] = add(r[t], r[t + step]);
        alignas(64) float all[16];
        store(all, r[0]);
        for (int g = 0; g < G; g++) std::memcpy(p[g] + t0, all + g * AT_ONCE, AT_ONCE * 4);
    }
}
// N vectors of channels
template <int DTYPE, int N, bool IS_PAIRED, int G>
static void chosen_part(const Shape& s, const float (*p)[BLOCK], const ChosenTokens& tokens,
                        const ChosenBlock& b, const ChosenBlock& next, int at, float* const (&state)[G]) {
    vf sum[G][N];
    for (int g = 0; g < G; g++)
        for (int c = 0; c < N; c++) sum[g][c] = load(state[g] + at + c * 16);
    for (int t = 0; t < b.count; t++) {
        if (at == 0) tokens.prefetch_v(next, t);
        vf x[N];
        if constexpr (IS_PAIRED)
            for (int c = 0; c < N; c += 2)
                load_pair<DTYPE>(b.v[t], b.v_scale[t], at + c * 16, x[c], x[c + 1]);
        else if constexpr (N > 1)
            for (int c = 0; c < N; c++) x[c] = load_kv<DTYPE>(b.v[t], at + c * 16);
        else
            x[0] = load_part<DTYPE>(b.v[t], b.v_scale[t], at, s.v_dim);
        for (int g = 0; g < G; g++) {
            const vf w = set1(p[g][t]);
            for (int c = 0; c < N; c++) sum[g][c] = fma(w, x[c], sum[g][c]);
        }
    }
    for (int g = 0; g < G; g++)
        for (int c = 0; c < N; c++) store(state[g] + at + c * 16, sum[g][c]);
}
template <int DTYPE, int G>
static void chosen_sums(const Shape& s, const float (*p)[BLOCK], const ChosenTokens& tokens,
                        const ChosenBlock& b, const ChosenBlock& next, float* const (&state)[G]) {
    constexpr bool IS_PAIRED = is_paired(DTYPE, 32);
    int at = 0;
    if (is_paired(DTYPE, s.v_dim)) {
        for (; at + 128 <= s.v_dim; at += 128)
            chosen_part<DTYPE, 8, IS_PAIRED>(s, p, tokens, b, next, at, state);
        for (; at < s.v_dim; at += 32) chosen_part<DTYPE, 2, IS_PAIRED>(s, p, tokens, b, next, at, state);
        return;
    }
    if constexpr (DTYPE != DT_I4)
        for (; at + 128 <= s.v_dim; at += 128) chosen_part<DTYPE, 8, false>(s, p, tokens, b, next, at, state);
    for (; at < s.v_dim; at += 16) chosen_part<DTYPE, 1, false>(s, p, tokens, b, next, at, state);
}
// A query of a head, scaled, as the rows are: q [k_dim].
template <int DTYPE>
static void read_query(const AttnArgs& a, const Shape& shape, int token, int head, float* q) {
    const float* from = a.q + int64_t(token) * a.ldq + int64_t(head) * a.q_head;
    for (int i = 0; i < shape.k_dim; i += 16)
        store(q + i, mul(load_n(from + i, lanes_at(i, shape.k_dim)), set1(a.scale)));
    if (is_reordered(DTYPE, shape.k_dim)) pair_order(q, shape.k_dim, false);
    if (DTYPE != DT_I4) return;
    rotate(q, shape.k_dim);
    for (int i = 0; i < shape.k_dim; i++) q[i] /= float(rotated_block(shape.k_dim));
}
// Heads `head` to head + G - 1, of one KV head, over the tokens that it has chosen.
template <int DTYPE, int G>
static void attend_heads(const SparseArgs& s, const SparseRow& row, int head, const int32_t* chosen,
                         int count, float* const (&state)[G]) {
    const AttnArgs& a = s.a;
    const Shape shape(a);
    const bool scaled = DTYPE == DT_I8;
    alignas(64) float p[G][BLOCK], k_scale[BLOCK] = {0}, v_scale[BLOCK] = {0}, queries[G][1024];
    const float* q[G];
    for (int g = 0; g < G; g++) {
        read_query<DTYPE>(a, shape, row.token, head + g, queries[g]), q[g] = queries[g];
        clear_state(state[g], shape);
    }
    const ChosenTokens tokens(s, row, head / shape.group);
    ChosenBlock blocks[2];
    tokens.open(chosen, std::min(count, BLOCK), blocks[0]);
    for (int i = 0; i < BLOCK; i++) tokens.prefetch_k(blocks[0], i), tokens.prefetch_v(blocks[0], i);
    for (int t = 0, which = 0; t < count; t += BLOCK, which ^= 1) {
        const ChosenBlock& b = blocks[which];
        ChosenBlock& next = blocks[which ^ 1];
        tokens.open(chosen + t + b.count, std::min(count - t - b.count, BLOCK), next);
        for (int i = 0; scaled && i < b.count; i++)
            k_scale[i] = *(const float*)b.k_scale[i], v_scale[i] = *(const float*)b.v_scale[i];
        chosen_scores<DTYPE, G>(shape, q, tokens, b, next, p);
        for (int g = 0; g < G; g++)
            online_softmax(a, shape, p[g], scaled ? k_scale : nullptr, scaled ? v_scale : nullptr, state[g],
                           VisibleRange{0, b.count, 0.0f, 0.0f});
        chosen_sums<DTYPE, G>(shape, p, tokens, b, next, state);
    }
    for (int g = 0; g < G; g++) {
        close_split(shape, state[g]);
        if (is_reordered(DTYPE, shape.v_dim)) pair_order(state[g], shape.v_dim, true);
    }
}
// All query heads of KV head k, in pairs, over a split of the chosen tokens.
template <int DTYPE>
static void attend_split(const SparseArgs& s, const SparsePlaces& places, const SparseRow& row, int k,
                         const SparseHead& head, int split) {
    const int n = std::min(std::min(s.a.cache.heavy->top, row.kv_len) - split * SPLIT, SPLIT);
    if (n <= 0) return;
    const int group = int(places.group), first = k * group;
    const int32_t* chosen = head.chosen + split * SPLIT;
    auto state = [&](int g) { return head.partials(g) + split * places.state; };
    int g = 0;
    for (; g + 2 <= group; g += 2)
        attend_heads<DTYPE, 2>(s, row, first + g, chosen, n, {state(g), state(g + 1)});
    if (g < group) attend_heads<DTYPE, 1>(s, row, first + g, chosen, n, {state(g)});
}
using AttendSplit = void (*)(const SparseArgs&, const SparsePlaces&, const SparseRow&, int, const SparseHead&,
                             int);
static AttendSplit attend_split_of(int dtype) {
    switch (dtype) {
        case DT_F32: return attend_split<DT_F32>;
        case DT_BF16: return attend_split<DT_BF16>;
        case DT_F16: return attend_split<DT_F16>;
        case DT_I8: return attend_split<DT_I8>;
        case DT_I4: return attend_split<DT_I4>;
        case DT_E4M3: return attend_split<DT_E4M3>;
        default: return attend_split<DT_E5M2>;
    }
}

size_t sparse_shared(const SparseArgs& s) {
    const SparsePlaces p(s);
    return size_t(p.head * s.a.cache.kv_heads * p.rows);
}
size_t sparse_local(const SparseArgs& s) { return size_t(BINS + s.max_len + 16) * 4; }

// The rows from `first` on that one wave takes.
static void sparse_wave(const SparseArgs& s, const SparsePlaces& places, int64_t first, const Ctx& ctx) {
    const AttnArgs& a = s.a;
    const int top = a.cache.heavy->top, kv_heads = a.cache.kv_heads, group = int(places.group);
    const int64_t count = std::min<int64_t>(places.rows, s.num_rows - first);
    const int64_t ranges = (s.max_len + SCORED - 1) / SCORED;
    const SparseRow* rows = s.rows + first;
    // f(row, its number in the wave, part) for each part of each row
    auto each = [&](int64_t parts, auto&& f) {
        ctx.each(count * parts, 1, [&](int64_t i0, int64_t i1) {
            for (int64_t i = i0; i < i1; i++) f(rows[i / parts], i / parts, int(i % parts));
        });
        ctx.barrier();
    };
    auto head_at = [&](int64_t row, int k) { return SparseHead(places, s.work, row * kv_heads + k); };
    each(kv_heads, [&](const SparseRow& row, int64_t r, int k) {
        const SparseHead head = head_at(r, k);
        for (int g = 0; g < group; g++) label_query(s, row, k * group + g, head.labels(g));
        guess_least(head, top, group, RowLabels(s, row, k), (int32_t*)ctx.local());
    });
    each(ranges, [&](const SparseRow& row, int64_t r, int range) {
        if (range * SCORED < row.kv_len) score_range(s, places, r, row, range);
    });
    each(kv_heads, [&](const SparseRow& row, int64_t r, int k) {
        const SparseHead head = head_at(r, k);
        const int n = join_candidates(head, top, group, RowLabels(s, row, k));
        choose_best(head.scores, head.tokens, n, top, head.chosen, (int32_t*)ctx.local());
    });
    const AttendSplit attend = attend_split_of(a.cache.dtype);
    each(kv_heads * places.splits, [&](const SparseRow& row, int64_t r, int part) {
        const int k = int(part / places.splits), split = int(part % places.splits);
        attend(s, places, row, k, head_at(r, k), split);
    });
    const Shape shape(a);
    each(a.heads, [&](const SparseRow& row, int64_t r, int h) {
        float* total = head_at(r, h / group).partials(h % group);
        begin_accumulator(shape, total, total);
        for (int split = 1; split * SPLIT < std::min(top, row.kv_len); split++)
            merge(shape, total, total + split * places.state);
        write_row(a, shape, total, row.token, h);
    });
}
void sparse_attention(const SparseArgs& s, const Ctx& ctx) {
    const SparsePlaces places(s);
    for (int64_t first = 0; first < s.num_rows; first += places.rows) sparse_wave(s, places, first, ctx);
}

}  // namespace RADIX_ISA
}  // namespace radix

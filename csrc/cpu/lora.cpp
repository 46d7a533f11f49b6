// Low-rank adapters: h = A x of each row's own adapter, then y += scale B h. Weights stay in the order of
// checkpoints and are read from memory once for all rows of a task. A number of h is sixteen chains of
// multiply-adds over ascending inputs, summed as a tree, one of y a chain over ascending ranks: a row's
// bits depend neither on other rows nor on how tasks were cut.
#include <algorithm>
#include <type_traits>
#include <utility>

#include "../common/transpose.h"
#include "rows.h"

namespace radix {
namespace RADIX_ISA {

// Sums that stay in registers: rows by ranks of A, rows by vectors of outputs.
#if defined(__AVX512F__)
constexpr int LORA_TILE = 6, LORA_RANKS = 4, LORA_VECS = 4;
#elif defined(RADIX_NEON)
constexpr int LORA_TILE = 2, LORA_RANKS = 2, LORA_VECS = 2;
#else
constexpr int LORA_TILE = 3, LORA_RANKS = 2, LORA_VECS = 2;
#endif
constexpr int64_t LORA_DEPTH = 1024;  // inputs of a tile of rows that first-level cache holds
constexpr int64_t LORA_WIDTH = LORA_VECS * 16;
constexpr int64_t LORA_AHEAD = 1024;  // bytes that a row of A is fetched ahead

// Up to sixteen numbers from p[i] on, then zeros.
template <int DTYPE>
RADIX_INLINE vf load_first(const void* p, int64_t i, int64_t n) {
    if (n >= 16) return load_any(p, DTYPE, i);
    std::conditional_t<DTYPE == DT_F32, float, uint16_t> t[16] = {0};
    std::memcpy(t, (const char*)p + i * dtype_size(DTYPE), size_t(n) * dtype_size(DTYPE));
    return load_any(t, DTYPE, 0);
}

struct LoraRows {  // a tile of rows
    const float* x[LORA_TILE];
    float* h[LORA_TILE];
    float* y[LORA_TILE];
};

// Inputs [k0, k1) of RANKS rows of A with ROWS rows of x; sums rest in `sums` between slices.
template <int DTYPE, int ROWS, int RANKS>
static void dot_tile(const LoraRows& rows, const char* a, int64_t inputs, int64_t k0, int64_t k1, float* sums,
                     int64_t rank) {
    vf acc[ROWS][RANKS];
    for (int r = 0; r < ROWS; r++)
        for (int j = 0; j < RANKS; j++) acc[r][j] = k0 ? load(sums + (r * RANKS + j) * 16) : zero();
    auto step = [&](int64_t k, auto&& load_x, auto&& load_a) __attribute__((always_inline)) {
        vf w[RANKS];
        for (int j = 0; j < RANKS; j++) w[j] = load_a(a, j * inputs + k);
        for (int r = 0; r < ROWS; r++) {
            const vf x = load_x(rows.x[r] + k);
            for (int j = 0; j < RANKS; j++) acc[r][j] = fma(x, w[j], acc[r][j]);
        }
    };
    int64_t k = k0;
    for (; k + 16 <= k1; k += 16) {
        for (int j = 0; j < RANKS; j++)
            __builtin_prefetch(a + (j * inputs + k) * dtype_size(DTYPE) + LORA_AHEAD);
        step(
            k, [](const float* p) { return load(p); },
            [](const char* p, int64_t i) { return load_any(p, DTYPE, i); });
    }
    if (k < k1) {
        const int n = int(k1 - k);
        step(
            k, [n](const float* p) { return load_n(p, n); },
            [n](const char* p, int64_t i) { return load_first<DTYPE>(p, i, n); });
    }
    for (int r = 0; r < ROWS; r++)
        for (int j = 0; j < RANKS; j++) {
            if (k1 < inputs)
                store(sums + (r * RANKS + j) * 16, acc[r][j]);
            else
                rows.h[r][rank + j] = lane_tree_sum(acc[r][j]);
        }
}

using DotTile = void (*)(const LoraRows&, const char*, int64_t, int64_t, int64_t, float*, int64_t);
template <int DTYPE, int RANKS, int... R>
static DotTile dot_for(int rows, std::integer_sequence<int, R...>) {
    static const DotTile t[] = {dot_tile<DTYPE, R + 1, RANKS>...};
    return t[rows - 1];
}

static LoraRows rows_at(const LoraArgs& a, const LoraTask& t, int64_t first, int count) {
    LoraRows rows{};
    for (int r = 0; r < count; r++) {
        const int64_t token = a.tokens[t.row + first + r];
        rows.h[r] = a.h + t.h + (first + r) * t.part->rank;
        rows.x[r] = a.x + token * a.ldx + t.part->block * a.x_block;
        rows.y[r] = a.y + token * a.ldy + t.part->block * a.y_block + t.part->first + t.at;
    }
    return rows;
}

template <int DTYPE>
static void shrink_task(const LoraArgs& a, const LoraTask& t, float* sums) {
    constexpr auto seq = std::make_integer_sequence<int, LORA_TILE>{};
    const int64_t size = dtype_size(DTYPE), depth = t.rows <= LORA_TILE ? a.inputs : LORA_DEPTH;
    const char* weight = (const char*)t.part->a;
    for (int r = 0; r < t.rows; r += LORA_TILE) {
        const int count = std::min(LORA_TILE, t.rows - r);
        const LoraRows rows = rows_at(a, t, r, count);
        for (int64_t k0 = 0; k0 < a.inputs; k0 += depth) {
            const int64_t k1 = std::min(k0 + depth, a.inputs);
            float* at = sums;
            for (int j = t.at, many = 0; j < t.at + t.count; j += many) {
                many = j + LORA_RANKS <= t.at + t.count ? LORA_RANKS : 1;
                const DotTile dot =
                    many == 1 ? dot_for<DTYPE, 1>(count, seq) : dot_for<DTYPE, LORA_RANKS>(count, seq);
                dot(rows, weight + j * a.inputs * size, a.inputs, k0, k1, at, j);
                at += LORA_TILE * many * 16;
            }
        }
    }
}

// Sixteen pairs of 16-bit numbers.
template <int DTYPE>
RADIX_INLINE void widen_pairs(vf pairs, vf& first, vf& second) {
    alignas(64) float bits[16];
    alignas(64) uint16_t h[32];
    store(bits, pairs);
    std::memcpy(h, bits, 64);
    if constexpr (DTYPE == DT_BF16) return load_bf16_pairs(h, first, second);
    uint16_t low[16], high[16];
    for (int i = 0; i < 16; i++) low[i] = h[2 * i], high[i] = h[2 * i + 1];
    first = load_f16(low), second = load_f16(high);
}

// Outputs [0, 32) of B [.., rank] as float32 [ranks][LORA_WIDTH], of those that are there: a row's last
// ranks may be read with what follows in B, of which `left` numbers remain.
template <int DTYPE>
RADIX_INLINE void transpose_32(const char* b, int64_t left, int64_t rank, int64_t ranks, int64_t count,
                               float* wide) {
    constexpr int64_t size = dtype_size(DTYPE), each = 32 / size;  // numbers of half a vector
    for (int64_t r = 0; r < ranks; r += each) {
        const bool is_whole = count >= 32 && 31 * rank + r + each <= left;
        auto half = [&](int64_t o, char* spare) __attribute__((always_inline)) -> const char* {
            const int64_t at = o * rank + r;
            if (is_whole || (o < count && at + each <= left)) return b + at * size;
            std::memset(spare, 0, 32);
            if (o < count) std::memcpy(spare, b + at * size, size_t(std::min(each, left - at) * size));
            return spare;
        };
        vf v[16];
        for (int i = 0; i < 16; i++) {
            alignas(32) char spare[2][32];
            v[i] = load_halves(half(i, spare[0]), half(i + 16, spare[1]));
        }
        transpose_16x16(v);
        for (int64_t j = 0; j < 16; j++) {
            float* to = wide + j / 8 * 16;
            if constexpr (DTYPE == DT_F32) {
                if (r + j % 8 < ranks) store(to + (r + j % 8) * LORA_WIDTH, v[j]);
            } else {
                const int64_t at = r + j % 8 * 2;
                vf first, second;
                widen_pairs<DTYPE>(v[j], first, second);
                if (at < ranks) store(to + at * LORA_WIDTH, first);
                if (at + 1 < ranks) store(to + (at + 1) * LORA_WIDTH, second);
            }
        }
    }
}

template <int ROWS>
static void add_tile(const LoraRows& rows, const float* wide, const LoraPart& part, vf scale, int64_t first,
                     int64_t at, int64_t count) {
    const int64_t ranks = part.rank;
    auto of = [&](const float* p, int c, int n) { return load_n(p + first + at + c * 16, n); };
    vf acc[ROWS][LORA_VECS];
    for (int r = 0; r < ROWS; r++)
        for (int c = 0; c < LORA_VECS; c++) acc[r][c] = zero();
    for (int64_t j = 0; j < ranks; j++) {
        vf w[LORA_VECS];
        for (int c = 0; c < LORA_VECS; c++) w[c] = load(wide + j * LORA_WIDTH + c * 16);
        for (int r = 0; r < ROWS; r++) {
            const vf h = set1(rows.h[r][j]);
            for (int c = 0; c < LORA_VECS; c++) acc[r][c] = fma(h, w[c], acc[r][c]);
        }
    }
    for (int r = 0; r < ROWS; r++)
        for (int c = 0; c < LORA_VECS && c * 16 < count; c++) {
            float* y = rows.y[r] + at + c * 16;
            const int n = lanes_at(c * 16, count);
            vf v = n == 16 ? load(y) : load_n(y, n);
            if (part.bias) acc[r][c] = add(acc[r][c], of(part.bias, c, n));
            if (part.own) v = sub(v, of(part.own, c, n));
            v = fma(acc[r][c], scale, v);
            if (part.gain) v = mul(v, of(part.gain, c, n));
            if (part.own) v = add(v, of(part.own, c, n));
            if (n == 16)
                store(y, v);
            else
                store_n(y, v, n);
        }
}

using AddTile = void (*)(const LoraRows&, const float*, const LoraPart&, vf, int64_t, int64_t, int64_t);
template <int... R>
static AddTile add_for(int rows, std::integer_sequence<int, R...>) {
    static const AddTile t[] = {add_tile<R + 1>...};
    return t[rows - 1];
}

template <int DTYPE>
static void expand_task(const LoraArgs& a, const LoraTask& t, float* wide) {
    const LoraPart& p = *t.part;
    const int64_t rank = p.rank;
    const vf scale = set1(p.scale * a.scale);
    for (int64_t o = 0; o < t.count; o += LORA_WIDTH) {
        const int64_t count = std::min<int64_t>(LORA_WIDTH, t.count - o);
        for (int64_t i = 0; i < count; i += 32) {
            const int64_t at = (t.at + o + i) * rank;
            transpose_32<DTYPE>((const char*)p.b + at * dtype_size(DTYPE), p.width * rank - at, rank, rank,
                                count - i, wide + i);
        }
        for (int r = 0; r < t.rows; r += LORA_TILE) {
            const int many = std::min(LORA_TILE, t.rows - r);
            add_for(many, std::make_integer_sequence<int, LORA_TILE>{})(rows_at(a, t, r, many), wide, p,
                                                                        scale, t.at, o, count);
        }
    }
}

template <class F>
static void each_task(const LoraArgs& a, const Ctx& ctx, F run) {
    float* scratch = (float*)ctx.local();
    ctx.each(a.num_tasks, 1, [&](int64_t i0, int64_t i1) {
        for (int64_t i = i0; i < i1; i++) run(a, a.tasks[i], scratch);
    });
    ctx.barrier();
}
void lora_shrink(const LoraArgs& a, const Ctx& ctx) {
    each_task(a, ctx, [](const LoraArgs& args, const LoraTask& t, float* local) {
        t.part->dtype == DT_F32    ? shrink_task<DT_F32>(args, t, local)
        : t.part->dtype == DT_BF16 ? shrink_task<DT_BF16>(args, t, local)
                                   : shrink_task<DT_F16>(args, t, local);
    });
}
void lora_expand(const LoraArgs& a, const Ctx& ctx) {
    each_task(a, ctx, [](const LoraArgs& args, const LoraTask& t, float* local) {
        t.part->dtype == DT_F32    ? expand_task<DT_F32>(args, t, local)
        : t.part->dtype == DT_BF16 ? expand_task<DT_BF16>(args, t, local)
                                   : expand_task<DT_F16>(args, t, local);
    });
}
size_t lora_local(int64_t max_rank) {
    return size_t(std::max<int64_t>(max_rank * LORA_WIDTH, LORA_TILE * LORA_TASK_RANKS * 16)) * 4;
}

}  // namespace RADIX_ISA
}  // namespace radix

// Blocks of attention on matrix tiles (AMX): caches whose numbers are exact in bfloat16, which are
// bfloat16, int8 and the 8-bit floats. Queries and weights are rounded to bfloat16 as the cache is;
// products and sums are float32.
//
// A tile multiplies 16 rows whether or not they are there, and each row by itself: decode and prefill
// are one arithmetic (few rows are computed by vectors to the same bits, see attention_few.h). Weights
// of hidden tokens are 0 and change no sum, so whole steps of them may be left out. Tiles flush
// denormals; vectors are told to do the same.
#include "attention_few.h"
#include "attention_rows.h"
#include "tile_config.h"

#include <immintrin.h>

namespace radix {
namespace RADIX_ISA {

// Exponents are taken from a row's maximum, which follows the scores only when they have outgrown it by
// this much: weights reach e^8 instead of 1, and sums are hardly ever scaled anew.
constexpr float GROWTH = 8.0f;
constexpr int PAIRS = 32;  // of numbers: what one multiplication adds up, in its two halves of 16

// 16 bfloat16 pairs (a_i, b_i) of numbers that are exact in it
RADIX_INLINE __m512i paired(vf a, vf b) {
    return _mm512_or_si512(_mm512_srli_epi32(_mm512_castps_si512(a.v), 16), _mm512_and_si512(_mm512_castps_si512(b.v), _mm512_set1_epi32(int(0xffff0000u))));
}
// 32 numbers, rounded to bfloat16
RADIX_INLINE void round_to(vf x0, vf x1, uint16_t* out) {
    const __m512bh h = _mm512_cvtne2ps_pbh(x1.v, x0.v);
    std::memcpy(out, &h, 64);
}
// e^x of x <= 0: exactly 1 at 0, 0 where x is lower than floats reach
RADIX_INLINE vf exp_weight(vf x) {
    const __m512 c = _mm512_max_ps(_mm512_set1_ps(-200.0f), x.v);  // NaN stays
    const __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(c, _mm512_set1_ps(1.44269504088896341f)), 8);
    __m512 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693359375f), c);
    r = _mm512_fnmadd_ps(n, _mm512_set1_ps(-2.12194440e-4f), r);
    __m512 p = _mm512_set1_ps(1.9875691500e-4f);
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.3981999507e-3f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(8.3334519073e-3f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(4.1665795894e-2f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.6666665459e-1f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(5.0000001201e-1f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f));
    return {_mm512_scalef_ps(p, n)};
}

// Bytes that a later block reads. They are asked for line by line between the steps of this block's
// work: many at once would wait for each other and stop all that comes after.
struct Ahead {
    const char *at, *end;
    RADIX_INLINE void lines(int n) {
        for (; n > 0 && at < end; n--, at += 64) __builtin_prefetch(at, 0, 2);
    }
};

// K of 16 tokens as pairs of channels: out [k_pad / 2][16], zeros after the last channel
template <int DTYPE>
static void pair_k(const void* k, int k_dim, int k_pad, uint32_t* out, Ahead ahead) {
    int d = 0;
    if constexpr (DTYPE == DT_BF16) {
        const __m512i order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
        for (; d + 2 <= k_dim; d += 2) ahead.lines(1), _mm512_store_si512(out + d * 8, _mm512_permutexvar_epi16(order, _mm512_loadu_si512((const uint16_t*)k + d * TILE)));
    }
    for (; d < k_pad; d += 2) {
        if (d % 4 == 0) ahead.lines(1);
        vf a = d < k_dim ? load_kv<DTYPE>(k, d * TILE) : zero(), b = d + 1 < k_dim ? load_kv<DTYPE>(k, (d + 1) * TILE) : zero();
        _mm512_store_si512(out + d * 8, paired(a, b));
    }
}

// V of 16 tokens as pairs of tokens: 8 rows of each tile of 16 channels, `step` apart; tokens from
// `count` on are zeros, whatever the cache holds there.
template <int DTYPE>
static void pair_v(const void* v, int width, int dim, int count, uint32_t* out, int64_t step, Ahead ahead) {
    const int64_t size = dtype_size(DTYPE);
    alignas(64) char rest[2][64];
    const __m512i first = _mm512_set_epi64(11, 10, 3, 2, 9, 8, 1, 0), second = _mm512_set_epi64(15, 14, 7, 6, 13, 12, 5, 4);
    for (int t = 0; t < TILE; t += 2) {
        int i = 0;
        if (DTYPE == DT_BF16 && t + 2 <= count)
            for (const uint16_t *x = (const uint16_t*)v + int64_t(t) * width, *y = x + width; i + 32 <= dim; i += 32) {
                ahead.lines(2);
                const __m512i a = _mm512_loadu_si512(x + i), b = _mm512_loadu_si512(y + i);
                const __m512i even = _mm512_unpacklo_epi16(a, b), odd = _mm512_unpackhi_epi16(a, b);
                _mm512_store_si512(out + (i / 16) * step + t * 8, _mm512_permutex2var_epi64(even, first, odd));
                _mm512_store_si512(out + (i / 16 + 1) * step + t * 8, _mm512_permutex2var_epi64(even, second, odd));
            }
        for (; i < dim; i += 16) {
            if (i % 32 == 0) ahead.lines(1);
            const char *x = (const char*)v + (int64_t(t) * width + i) * size, *y = x + width * size;
            if (dim - i < 16) {  // the last row of a cache ends where its memory does
                if (t < count) std::memcpy(rest[0], x, size_t((dim - i) * size)), x = rest[0];
                if (t + 1 < count) std::memcpy(rest[1], y, size_t((dim - i) * size)), y = rest[1];
            }
            vf a = t < count ? load_kv<DTYPE>(x, 0) : zero(), b = t + 1 < count ? load_kv<DTYPE>(y, 0) : zero();
            _mm512_store_si512(out + (i / 16) * step + t * 8, paired(keep_lanes(a, 0, dim - i, zero()), keep_lanes(b, 0, dim - i, zero())));
        }
    }
}

// 32 numbers of a row as bfloat16, zeros from `n` on
template <int DTYPE>
RADIX_INLINE __m512i row_of_32(const void* p, int64_t at, int n) {
    const int64_t size = dtype_size(DTYPE);
    alignas(64) char rest[64];
    const char* x = (const char*)p + at * size;
    if (n < 32) {
        std::memset(rest, 0, 64);
        std::memcpy(rest, x, size_t(n * size)), x = rest;
    }
    if constexpr (DTYPE == DT_BF16) return _mm512_loadu_si512(x);
    __m512bh h = _mm512_cvtne2ps_pbh(load_kv<DTYPE>(x, 16).v, load_kv<DTYPE>(x, 0).v);
    __m512i bits;
    std::memcpy(&bits, &h, 64);
    return bits;
}
static void transpose_16x16(__m512i* r) {
    __m512i t[16];
    for (int i = 0; i < 16; i += 2) t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]), t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
    for (int i = 0; i < 16; i += 4)
        for (int j = 0; j < 2; j++) {
            r[i + 2 * j] = _mm512_unpacklo_epi64(t[i + j], t[i + j + 2]);
            r[i + 2 * j + 1] = _mm512_unpackhi_epi64(t[i + j], t[i + j + 2]);
        }
    for (int i = 0; i < 4; i++)
        for (int j = 0; j < 2; j++) {
            t[i + 8 * j] = _mm512_shuffle_i32x4(r[i + 8 * j], r[i + 8 * j + 4], 0x88);
            t[i + 8 * j + 4] = _mm512_shuffle_i32x4(r[i + 8 * j], r[i + 8 * j + 4], 0xdd);
        }
    for (int i = 0; i < 8; i++) {
        r[i] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0x88);
        r[i + 8] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0xdd);
    }
}
// pair_k of the rows of a latent cache
template <int DTYPE>
static void pair_rows(const void* rows, int k_dim, int k_pad, int count, uint32_t* out) {
    for (int d = 0; d < k_pad; d += 32) {
        __m512i r[16];
        for (int t = 0; t < TILE; t++) r[t] = t < count ? row_of_32<DTYPE>(rows, int64_t(t) * k_dim + d, k_dim - d < 32 ? k_dim - d : 32) : _mm512_setzero_si512();
        transpose_16x16(r);
        for (int i = 0; i < 16; i++) _mm512_store_si512(out + d * 8 + i * 16, r[i]);
    }
}

class TileBlock {
  public:
    static int padded(int k_dim) { return (k_dim + 31) / 32 * 32; }
    static size_t floats(const Shape& s, int rows) {
        rows = (rows + 15) / 16 * 16;
        return size_t(rows) * padded(s.k_dim) / 2 + size_t(BLOCK) * (padded(s.k_dim) + s.v_pad) / 2 + 2 * 16 * BLOCK * 3 / 2 + 2 * BLOCK + 64 + size_t(FEW) * (padded(s.k_dim) + BLOCK);
    }
    TileBlock(const AttnArgs& args, const Shape& shape, const AttnTask& task, const Rows& of, const Later& after, float* memory)
        : a(args), s(shape), rows(of), later(after), pages(args.page_table + int64_t(task.seq) * args.ldp), kv_head(task.kv_head), k_pad(padded(shape.k_dim)) {
        const size_t padded_rows = size_t(rows.count + 15) / 16 * 16;
        float* f = (float*)((uintptr_t(memory) + 63) / 64 * 64);
        k = (uint32_t*)f, f += size_t(BLOCK) * k_pad / 2;
        v = (uint32_t*)f, f += size_t(BLOCK) * s.v_pad / 2;
        p = f, f += 2 * 16 * BLOCK;
        weights = (uint16_t*)f, f += 16 * BLOCK;
        scale = f, f += 2 * BLOCK;
        q = (uint16_t*)f, f += padded_rows * size_t(k_pad) / 2;
        is_few = rows.count <= FEW && !a.cache.latent && s.k_dim % 2 == 0 && s.v_dim % 16 == 0;
        for (size_t i = 0; i < (is_few ? size_t(rows.count) : padded_rows); i++) round_query(task, int(i));
        if (is_few) {
            few_q = f, few_weights = f + FEW * k_pad;
            widen_bf16(q, rows.count * k_pad, few_q);
            return;
        }
        std::memset(weights, 0, 2 * 16 * BLOCK * 2);
        configure(rows.count < 16 ? rows.count : 16);
    }
    void run(int block0);
    ~TileBlock() {
        if (!is_few) release_tiles();
    }

  private:
    const AttnArgs& a;
    const Shape& s;
    const Rows& rows;
    const Later& later;
    const int32_t* pages;
    int kv_head, k_pad;
    uint32_t *k, *v;  // [TILES][k_pad / 2][16] and [2][v_pad / 16][16][16] pairs
    float *p, *scale;  // p, weights: twice 16 rows of 64, for rows that follow each other
    uint16_t *weights, *q;
    bool is_few;
    float *few_q, *few_weights;  // q and weights as float32

    // Sixteen rows on their way through a block: scores, then weights, then sums.
    struct Group {
        int r0, n, first_step, last_step, side;  // side: of p
    };
    // Products of the rows after and of the rows before those that the vectors are at, in pieces that
    // are begun between two rows: the matrix unit goes on by itself.
    struct Products {
        const Group *scores, *sums;  // null: none
        int all, done;
    };
    Products products(const Group* scores, const Group* sums) const {
        return {scores, sums, (scores ? k_pad / PAIRS : 0) + (sums ? (s.v_pad + 63) / 64 * 2 : 0), 0};
    }

    static void configure(int count) {
        TileConfig c;
        for (int i = 0; i < 8; i++) c.row_bytes[i] = 64, c.rows[i] = uint8_t(i < 6 ? count : 16);
        c.use();
    }
    void round_query(const AttnTask& task, int i) {
        const bool is_there = i < rows.count;
        const float* from = is_there ? query_of(a, s, task, rows, i) : nullptr;
        auto part = [&](int d) { return is_there && d < s.k_dim ? mul(load_n(from + d, lanes_at(d, s.k_dim)), set1(a.scale)) : zero(); };
        for (int d = 0; d < k_pad; d += 32) round_to(part(d), part(d + 16), q + int64_t(i) * k_pad + d);
    }
    template <int DTYPE>
    void stage(const Tile& t, int tile, int count, const Tile& next) {
        uint32_t* to = k + int64_t(tile) * k_pad * 8;
        if (t.k) pair_k<DTYPE>(t.k, s.k_dim, k_pad, to, {(const char*)next.k, (const char*)next.k + (next.k ? tile_bytes(a.cache, s.k_dim) : 0)});
        else pair_rows<DTYPE>(t.v, s.k_dim, k_pad, count, to);
        pair_v<DTYPE>(t.v, v_width(a.cache), s.v_dim, count, v + int64_t(tile / 2) * s.v_pad * 16 + tile % 2 * 128, 256, {(const char*)next.v, (const char*)next.v + (next.v ? tile_bytes(a.cache, v_width(a.cache)) : 0)});
    }
    void open(int block0, int first_tile, int last_tile);
    void prefetch(int tile) const {
        if (tile <= (rows.hi - 1) / TILE) prefetch_tile(a.cache, tile_at(a.cache, pages, kv_head, tile));
    }
    static void widen_bf16(const uint16_t* x, int64_t n, float* out) {
        for (int64_t i = 0; i < n; i += 16) store(out + i, load_bf16(x + i));
    }
    void run_few(int block0, int first_tile, int last_tile);
    void mask_scores(int i, int block0, float* w) const;
    void soften_tile(const Group& g, int block0, Products& beside);
    void score(const Group& g, int step);
    void weigh(const Group& g, int piece);
    template <int N>
    void weigh_part(const Group& g, int at, int step, bool begins, bool ends);
    void do_piece(Products& w);
    void do_until(Products& w, int part, int parts) {
        while (w.done * parts < w.all * part) do_piece(w);
    }
};

// Brings the block's tiles into the order of the multiplications; what is not there becomes zeros.
void TileBlock::open(int block0, int first_tile, int last_tile) {
    const Cache& c = a.cache;
    const bool is_short = rows.count <= 32;
    for (int i = 0; i < TILES; i++) {
        const int tile = block0 / TILE + i;
        const Tile next = is_short ? later.of(tile) : Tile{};
        if (tile < first_tile || tile > last_tile) {  // its scores are masked
            if (next.v) prefetch_tile(c, next);
            store(scale + BLOCK + i * TILE, zero());
            for (int j = 0; j < s.v_pad / 16; j++) std::memset(v + int64_t(i / 2) * s.v_pad * 16 + i % 2 * 128 + j * 256, 0, 512);
            continue;
        }
        const Tile t = tile_at(c, pages, kv_head, tile);
        const int left = rows.kv_len - tile * TILE, count = left < TILE ? left : TILE;
        if (t.k_scale) {
            std::memcpy(scale + i * TILE, t.k_scale, TILE * 4);
            store(scale + BLOCK + i * TILE, load_n(t.v_scale, count));
        }
        switch (c.dtype) {
            case DT_BF16: stage<DT_BF16>(t, i, count, next); break;
            case DT_I8: stage<DT_I8>(t, i, count, next); break;
            case DT_E4M3: stage<DT_E4M3>(t, i, count, next); break;
            default: stage<DT_E5M2>(t, i, count, next);
        }
    }
}

// p [16][64] = q . k of 16 rows, 32 channels a step
void TileBlock::score(const Group& g, int step) {
    if (step == 0) {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
    }
    const int64_t at = int64_t(g.r0) * k_pad + step * PAIRS, tile = int64_t(k_pad) * 8;
    const uint32_t* b = k + step * 256;
    _tile_loadd(4, q + at, k_pad * 2);
    _tile_loadd(6, b, 64);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(7, b + tile, 64);
    _tile_dpbf16ps(1, 4, 7);
    _tile_loadd(6, b + 2 * tile, 64);
    _tile_dpbf16ps(2, 4, 6);
    _tile_loadd(7, b + 3 * tile, 64);
    _tile_dpbf16ps(3, 4, 7);
    if ((step + 1) * PAIRS < k_pad) return;
    float* to = p + g.side * 16 * BLOCK;
    _tile_stored(0, to, BLOCK * 4);
    _tile_stored(1, to + 16, BLOCK * 4);
    _tile_stored(2, to + 32, BLOCK * 4);
    _tile_stored(3, to + 48, BLOCK * 4);
}

// sums of 16 rows += weights . v, for N tiles of 16 channels and 32 tokens
template <int N>
void TileBlock::weigh_part(const Group& g, int at, int step, bool begins, bool ends) {
    float* state = rows.now + int64_t(g.r0) * s.state + at;
    const int64_t ld = s.state * 4;
    if (begins) {
        _tile_loadd(0, state, ld);
        if constexpr (N > 1) _tile_loadd(1, state + 16, ld);
        if constexpr (N > 2) _tile_loadd(2, state + 32, ld);
        if constexpr (N > 3) _tile_loadd(3, state + 48, ld);
    }
    _tile_loadd(4, weights + g.side * 16 * BLOCK + step * 32, BLOCK * 2);
    const uint32_t* b = v + int64_t(step) * s.v_pad * 16 + int64_t(at / 16) * 256;
    _tile_loadd(6, b, 64);
    _tile_dpbf16ps(0, 4, 6);
    if constexpr (N > 1) {
        _tile_loadd(7, b + 256, 64);
        _tile_dpbf16ps(1, 4, 7);
    }
    if constexpr (N > 2) {
        _tile_loadd(6, b + 512, 64);
        _tile_dpbf16ps(2, 4, 6);
    }
    if constexpr (N > 3) {
        _tile_loadd(7, b + 768, 64);
        _tile_dpbf16ps(3, 4, 7);
    }
    if (!ends) return;
    _tile_stored(0, state, ld);
    if constexpr (N > 1) _tile_stored(1, state + 16, ld);
    if constexpr (N > 2) _tile_stored(2, state + 32, ld);
    if constexpr (N > 3) _tile_stored(3, state + 48, ld);
}
// Pieces: the first and the second 32 tokens of every 64 channels.
void TileBlock::weigh(const Group& g, int piece) {
    const int at = piece / 2 * 64, step = piece % 2 ? g.last_step : g.first_step;
    const bool begins = piece % 2 == 0, ends = step == g.last_step;
    if (!begins && g.first_step == g.last_step) return;
    switch (s.v_pad - at) {
        case 16: return weigh_part<1>(g, at, step, begins, ends);
        case 32: return weigh_part<2>(g, at, step, begins, ends);
        case 48: return weigh_part<3>(g, at, step, begins, ends);
        default: return weigh_part<4>(g, at, step, begins, ends);
    }
}
void TileBlock::do_piece(Products& w) {
    asm volatile("" ::: "memory");  // the compiler does not see what tiles read and write
    const int piece = w.done++, scores = w.scores ? k_pad / PAIRS : 0;
    if (piece < scores) score(*w.scores, piece);
    else weigh(*w.sums, piece - scores);
    asm volatile("" ::: "memory");
}

// What a row does not see, caps and slopes: the rare changes of scores.
void TileBlock::mask_scores(int i, int block0, float* w) const {
    if (a.tree && block0 + BLOCK > rows.first_new) mask_tree(a, rows.token0 + i / s.group, block0, rows.first_new, rows.kv_len, w);
    const int lo = rows.row_lo[i] - block0, hi = rows.row_hi[i] - block0;
    const float slope = a.slopes ? a.slopes[kv_head * s.group + i % s.group] : 0.0f, distance = float(block0 - rows.position(i, s.group));
    for (int t = 0; t < TILES; t++) {
        vf v = load(w + t * 16);
        if (a.cache.dtype == DT_I8) v = mul(v, load(scale + t * 16));
        if (a.softcap != 0.0f) v = mul(set1(a.softcap), vtanh(div(v, set1(a.softcap))));
        if (slope != 0.0f) v = fma(set1(slope), add(count_from_zero(), set1(distance + float(t * 16))), v);
        store(w + t * 16, keep_lanes(v, lo - t * 16, hi - t * 16, set1(-INFINITY)));
    }
}

// `soften` of 16 rows, and their weights as two bfloat16
void TileBlock::soften_tile(const Group& g, int block0, Products& beside) {
    const bool scaled = a.cache.dtype == DT_I8, changes = scaled || a.softcap != 0.0f || a.slopes || a.tree;
    const int64_t side = g.side * 16 * BLOCK;
    float highest[16];
    for (int r = 0; r < g.n; r++) {
        const int row = g.r0 + r;
        float *w = p + side + r * BLOCK, *state = rows.now + int64_t(row) * s.state;
        if (changes || rows.row_lo[row] > block0 || rows.row_hi[row] < block0 + BLOCK) mask_scores(row, block0, w);
        const float old = state[s.v_pad + 16], top = lane_max(vmax(vmax(load(w), load(w + 16)), vmax(load(w + 32), load(w + 48))));
        highest[r] = top > old + GROWTH ? top : old;
        if (highest[r] != old) {
            if (old != EMPTY) {
                const vf shrink = exp_weight(set1(old - highest[r]));
                for (int i = 0; i < s.v_pad + 16; i += 16) store(state + i, mul(load(state + i), shrink));
            }
            state[s.v_pad + 16] = highest[r];
        }
        do_until(beside, r + 1, 3 * g.n);
    }
    for (int r = 0; r < g.n; r++) {
        const float* w = p + side + r * BLOCK;
        float* partial = rows.now + int64_t(g.r0 + r) * s.state + s.v_pad;
        const vf m = set1(highest[r]);
        vf e[TILES];
        for (int t = 0; t < TILES; t++) e[t] = exp_weight(sub(load(w + t * 16), m));
        store(partial, add(load(partial), add(add(e[0], e[1]), add(e[2], e[3]))));
        if (scaled)
            for (int t = 0; t < TILES; t++) e[t] = mul(e[t], load(scale + BLOCK + t * 16));
        round_to(e[0], e[1], weights + side + r * BLOCK);
        round_to(e[2], e[3], weights + side + r * BLOCK + 32);
        do_until(beside, g.n + 2 * (r + 1), 3 * g.n);
    }
}

void TileBlock::run_few(int block0, int first_tile, int last_tile) {
    FewTile tile[TILES];
    for (int i = 0; i < TILES; i++) {
        const int number = block0 / TILE + i, left = rows.kv_len - number * TILE;
        const Tile next = later.of(number);
        if (number < first_tile || number > last_tile) {
            if (next.v) prefetch_tile(a.cache, next);
            tile[i] = {};
            continue;
        }
        const Tile t = tile_at(a.cache, pages, kv_head, number);
        tile[i] = {t.k, t.v, next.v ? next.k : t.k, next.v ? next.v : t.v, left < TILE ? left : TILE};
        if (!t.k_scale) continue;
        std::memcpy(scale + i * TILE, t.k_scale, TILE * 4);
        store(scale + BLOCK + i * TILE, load_n(t.v_scale, tile[i].count));
    }
    const int of_type = a.cache.dtype == DT_BF16 ? 0 : a.cache.dtype - DT_I8 + 1, n = rows.count;
    FEW_SCORES[of_type][n - 1](few_q, s.k_dim, k_pad, tile, p);
    Products none{};
    soften_tile({0, n, 0, 1, 0}, block0, none);
    widen_bf16(weights, n * BLOCK, few_weights);
    for (int half = 0; half < 2; half++)
        if (tile[2 * half].k || tile[2 * half + 1].k) FEW_SUMS[of_type][n - 1](rows.now, s.state, few_weights + half * STEP, tile + 2 * half, v_width(a.cache), s.v_dim);
}

void TileBlock::run(int block0) {
    const int end = rows.hi < block0 + BLOCK ? rows.hi : block0 + BLOCK, start = rows.lo > block0 ? rows.lo : block0;
    if (is_few) return run_few(block0, start / TILE, (end - 1) / TILE);
    open(block0, start / TILE, (end - 1) / TILE);
    int ahead = block0 / TILE + TILES;  // tiles of the next block are fetched between those of this one
    const int last = ahead + TILES;
    Group group[3];
    const Group *before = nullptr, *now = nullptr;
    auto turn = [&](const Group* after) {
        Products beside = products(after, before);
        if (now) soften_tile(*now, block0, beside);
        do_until(beside, 1, 1);
        before = now, now = after;
    };
    int num = 0;
    for (int r0 = 0; r0 < rows.count; r0 += 16) {
        if (rows.count > 32 && ahead < last) prefetch(ahead++);
        const int n = rows.count - r0 < 16 ? rows.count - r0 : 16;
        const int lo = rows.row_lo[r0], hi = rows.row_hi[r0 + n - 1];  // both grow with the row
        if (hi <= block0 || lo >= block0 + BLOCK) continue;
        group[num % 3] = {r0, n, lo > block0 + 31 ? 1 : 0, hi > block0 + 32 ? 1 : 0, num % 2};
        turn(&group[num++ % 3]);
    }
    turn(nullptr);
    turn(nullptr);
}

void attention_tiles(const AttnArgs& a, const Ctx& ctx) {
    const unsigned before = _mm_getcsr();
    _mm_setcsr(before | 0x8040);  // denormals: flushed, and taken for zeros
    run_attention<TileBlock>(a, ctx);
    _mm_setcsr(before);
}
size_t attention_tiles_local(const AttnArgs& a) { return attention_bytes<TileBlock>(a); }

}  // namespace RADIX_ISA
}  // namespace radix

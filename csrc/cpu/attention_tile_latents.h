// Blocks of attention to latents on matrix tiles. A row of the cache is the key and the value of every
// query head, so rows have the same order in tiles and in memory: tokens times channels by channels times
// heads gives scores by token, which are transposed. Values are rearranged into pairs of
// tokens in strips of channels that stay in first-level cache while all rows read them.
#pragma once
#include "attention_lost.h"
#include "attention_tile_parts.h"

namespace radix {
namespace RADIX_ISA {

class LatentTiles : TileSoftmax {
  public:
    static constexpr bool JOINS = false;
    static size_t floats(const Shape& s, int rows) {
        const size_t padded_rows = size_t(rows + 15) / 16 * 16, k_pad = size_t(padded(s.k_dim));
        return padded_rows * (k_pad / 2 + BLOCK + BLOCK / 2) + BLOCK * k_pad / 2 + BLOCK * STRIP / 2 +
               16 * BLOCK + 2 * BLOCK + 16;
    }
    LatentTiles(const AttnArgs& args, const Shape& shape, const AttnTask& task, const Rows& of,
                const NextTiles& after, float* memory)
        : TileSoftmax(args, shape, of, task.kv_head),
          next_tiles(after),
          pages(args.page_table + int64_t(task.seq) * args.ldp),
          k_pad(padded(shape.k_dim)) {
        const int64_t groups = (rows.count + 15) / 16;
        float* f = (float*)((uintptr_t(memory) + 63) / 64 * 64);
        q = (uint32_t*)f, f += groups * k_pad * 8;
        p = f, f += groups * 16 * BLOCK;
        weights = (uint16_t*)f, f += groups * 8 * BLOCK;
        staged = (uint16_t*)f, f += BLOCK * k_pad / 2;
        strip = (uint32_t*)f, f += BLOCK * STRIP / 2;
        turned = f, f += 16 * BLOCK;
        scale = f;
        std::memset(weights, 0, size_t(groups) * 16 * BLOCK * 2);
        for (int g = 0; g < groups; g++) pair_queries(task, g);
        TileConfig c;
        for (int i = 0; i < 8; i++) c.row_bytes[i] = 64, c.rows[i] = 16;
        c.use();
    }
    static int slots(const Shape&, int rows) { return rows; }
    void run(int from, int to, const SplitRows& split) {
        split.open(0, rows.count);
        for (int block0 = from; block0 < to; block0 += BLOCK) run_block(block0);
        split.close(0, rows.count);
    }
    ~LatentTiles() { release_tiles(); }

  private:
    static constexpr int STRIP = 64;  // channels
    const NextTiles& next_tiles;
    const int32_t* pages;
    int k_pad;
    uint32_t *q,
        *strip;  // q: [groups][k_pad / 2][16 rows] pairs of channels; strip: [2][4][16][16] pairs of tokens
    float *p, *turned;  // [rows][64]; [64][16]: scores as tiles give them
    uint16_t *weights,
        *staged;  // weights [rows][64]; staged [64][k_pad]: rows that cannot be read where they are

    struct Tokens {  // of a tile
        const uint16_t* row;
        int count;
        const char* next;  // the same place one block later, or null
    };
    Tokens tokens[TILES];
    int64_t stride;  // numbers from one row to the next
    uint64_t lost;   // tokens whose values are zeros instead (attention_lost.h)

    static int padded(int k_dim) { return (k_dim + PAIRS - 1) / PAIRS * PAIRS; }
    int rows_of(int g) const { return rows.count - g * 16 < 16 ? rows.count - g * 16 : 16; }
    bool sees(int g, int block0) const {
        return rows.row_hi[g * 16 + rows_of(g) - 1] > block0 && rows.row_lo[g * 16] < block0 + BLOCK;
    }  // both grow with the row
    void pair_queries(const AttnTask& task, int g);
    template <int DTYPE>
    void stage(const void* from, int tile, int count);
    void open(int block0, int first_tile, int last_tile);
    void prefetch_next(int step) const;
    void score(int g, bool asks);
    void stage_values(int at);
    template <int N>
    void weigh(int g, int at, int first_step, int last_step);
    void run_block(int block0);
};

inline void LatentTiles::pair_queries(const AttnTask& task, int g) {
    const float* from[16] = {};
    for (int r = 0; r < rows_of(g); r++) from[r] = query_of(a, s, task, rows, g * 16 + r);
    for (int d = 0; d < k_pad; d += PAIRS) {
        __m512i line[16];
        for (int r = 0; r < 16; r++) {
            auto part = [&](int at) {
                return from[r] && at < s.k_dim
                           ? mul(load_n(from[r] + at, lanes_at(at, s.k_dim)), set1(a.scale))
                           : zero();
            };
            alignas(64) uint16_t rounded[PAIRS];
            round_to(part(d), part(d + 16), rounded);
            line[r] = _mm512_load_si512(rounded);
        }
        transpose_16x16(line);
        for (int i = 0; i < 16; i++) _mm512_store_si512(q + int64_t(g) * k_pad * 8 + d * 8 + i * 16, line[i]);
    }
}

// Rows as bfloat16, zeros after the last channel.
template <int DTYPE>
void LatentTiles::stage(const void* from, int tile, int count) {
    const int64_t size = dtype_size(DTYPE);
    for (int t = 0; t < count; t++) {
        const char* x = (const char*)from + int64_t(t) * s.k_dim * size;
        uint16_t* to = staged + int64_t(tile * TILE + t) * k_pad;
        int d = 0;
        for (; d + PAIRS <= s.k_dim; d += PAIRS)
            round_to(load_kv<DTYPE>(x, d), load_kv<DTYPE>(x, d + 16), to + d);
        for (; d < k_pad; d++) to[d] = d < s.k_dim ? float_to_bf16(load_kv_scalar<DTYPE>(x, d)) : uint16_t(0);
    }
}

inline void LatentTiles::open(int block0, int first_tile, int last_tile) {
    const Cache& c = a.cache;
    const bool direct = c.dtype == DT_BF16 && s.k_dim == k_pad;
    stride = direct ? s.k_dim : k_pad;
    const uint16_t* any = staged;
    for (int i = 0; i < TILES; i++) {
        const int tile = block0 / TILE + i, left = rows.kv_len - tile * TILE;
        tokens[i] = {nullptr, 0, (const char*)next_tiles.of(tile).v};
        store(scale + BLOCK + i * TILE, zero());
        if (tile < first_tile || tile > last_tile) continue;
        const Tile t = tile_at(c, pages, kv_head, tile);
        tokens[i].count = left < TILE ? left : TILE;
        tokens[i].row = any = direct ? (const uint16_t*)t.v : staged + int64_t(i) * TILE * k_pad;
        if (t.k_scale) {
            std::memcpy(scale + i * TILE, t.k_scale, TILE * 4);
            store(scale + BLOCK + i * TILE, load_n(t.v_scale, tokens[i].count));
        }
        if (direct) continue;
        switch (c.dtype) {
            case DT_BF16: stage<DT_BF16>(t.v, i, tokens[i].count); break;
            case DT_I8: stage<DT_I8>(t.v, i, tokens[i].count); break;
            case DT_E4M3: stage<DT_E4M3>(t.v, i, tokens[i].count); break;
            default: stage<DT_E5M2>(t.v, i, tokens[i].count);
        }
    }
    for (int i = 0; i < TILES; i++)
        if (!tokens[i].row) tokens[i].row = any;  // its scores are masked
    lost = lost_tokens(a, s, rows, pages, kv_head, block0);
    for (int i = 0; c.dtype == DT_I8 && i < TILES; i++)
        each_lane(of_tile(lost, i), [&](int lane) { scale[BLOCK + i * TILE + lane] = 0.0f; });
}

// Prefetch lines of the next block during the multiplications that read as many of this one.
inline void LatentTiles::prefetch_next(int step) const {
    const int64_t size = dtype_size(a.cache.dtype);
    if (size == 1 && step % 2) return;
    for (const Tokens& t : tokens)
        if (t.next)
            for (int64_t r = 0; r < TILE; r++)
                __builtin_prefetch(t.next + (r * s.k_dim + step * PAIRS) * size, 0, 2);
}

// p [16][64] = q . k of 16 rows
inline void LatentTiles::score(int g, bool asks) {
    const uint32_t* b = q + int64_t(g) * k_pad * 8;
    const int64_t bytes = stride * 2;
    asm volatile("" ::: "memory");  // the compiler does not see what tiles read and write
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int step = 0; step * PAIRS < k_pad; step++) {
        const int64_t at = step * PAIRS;
        _tile_loadd(6, b + step * 256, 64);
        _tile_loadd(4, tokens[0].row + at, bytes);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(5, tokens[1].row + at, bytes);
        _tile_dpbf16ps(1, 5, 6);
        _tile_loadd(4, tokens[2].row + at, bytes);
        _tile_dpbf16ps(2, 4, 6);
        _tile_loadd(5, tokens[3].row + at, bytes);
        _tile_dpbf16ps(3, 5, 6);
        if (asks) prefetch_next(step);
    }
    _tile_stored(0, turned, 64);
    _tile_stored(1, turned + 256, 64);
    _tile_stored(2, turned + 512, 64);
    _tile_stored(3, turned + 768, 64);
    asm volatile("" ::: "memory");
    for (int i = 0; i < TILES; i++) {
        __m512i line[16];
        for (int t = 0; t < TILE; t++) line[t] = _mm512_load_si512(turned + i * 256 + t * 16);
        transpose_16x16(line);
        for (int r = 0; r < 16; r++)
            _mm512_store_si512(p + (int64_t(g) * 16 + r) * BLOCK + i * TILE, line[r]);
    }
}

// 64 channels of the block's values as pairs of tokens; zeros for tokens that are not there.
inline void LatentTiles::stage_values(int at) {
    const int width = s.v_dim - at < STRIP ? s.v_dim - at : STRIP;
    for (int i = 0; i < TILES; i++) {
        uint32_t* to = strip + i / 2 * 1024 + i % 2 * 128;
        if (tokens[i].count > 0)
            pair_v<DT_BF16>(tokens[i].row + at, int(stride), width, tokens[i].count, to, 256, Ahead{});
        else
            for (int j = 0; j * 16 < width; j++) std::memset(to + j * 256, 0, 512);
        clear_pairs(of_tile(lost, i), to, width);
    }
}

// sums of 16 rows += weights . v, for N tiles of 16 channels
template <int N>
void LatentTiles::weigh(int g, int at, int first_step, int last_step) {
    float* state = rows.now + int64_t(g) * 16 * s.state + at;
    const int64_t ld = s.state * 4;
    _tile_loadd(0, state, ld);
    if constexpr (N > 1) _tile_loadd(1, state + 16, ld);
    if constexpr (N > 2) _tile_loadd(2, state + 32, ld);
    if constexpr (N > 3) _tile_loadd(3, state + 48, ld);
    for (int step = first_step; step <= last_step; step++) {
        const uint32_t* b = strip + step * 1024;
        _tile_loadd(4, weights + int64_t(g) * 16 * BLOCK + step * 32, BLOCK * 2);
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
    }
    _tile_stored(0, state, ld);
    if constexpr (N > 1) _tile_stored(1, state + 16, ld);
    if constexpr (N > 2) _tile_stored(2, state + 32, ld);
    if constexpr (N > 3) _tile_stored(3, state + 48, ld);
}

inline void LatentTiles::run_block(int block0) {
    const int end = rows.hi < block0 + BLOCK ? rows.hi : block0 + BLOCK,
              start = rows.lo > block0 ? rows.lo : block0;
    open(block0, start / TILE, (end - 1) / TILE);
    const int groups = (rows.count + 15) / 16;
    bool asks = true;
    for (int g = 0; g < groups; g++) {
        if (!sees(g, block0)) continue;
        score(g, asks);
        asks = false;
        online_softmax(g * 16, rows_of(g), block0, p + int64_t(g) * 16 * BLOCK,
                       weights + int64_t(g) * 16 * BLOCK, [](int, int) {});
        for (int r = g * 16; lost && r < g * 16 + rows_of(g); r++)
            rows.now[int64_t(r) * s.state + s.v_pad] += loss_of(a, s, rows, r, block0, lost);
    }
    for (int at = 0; at < s.v_pad; at += STRIP) {
        stage_values(at);
        asm volatile("" ::: "memory");
        for (int g = 0; g < groups; g++) {
            if (!sees(g, block0)) continue;
            const int first = rows.row_lo[g * 16] > block0 + 31 ? 1 : 0,
                      last = rows.row_hi[g * 16 + rows_of(g) - 1] > block0 + 32 ? 1 : 0;
            switch (s.v_pad - at) {
                case 16: weigh<1>(g, at, first, last); break;
                case 32: weigh<2>(g, at, first, last); break;
                case 48: weigh<3>(g, at, first, last); break;
                default: weigh<4>(g, at, first, last);
            }
        }
        asm volatile("" ::: "memory");
    }
}

}  // namespace RADIX_ISA
}  // namespace radix

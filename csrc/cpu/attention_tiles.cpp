// Attention on matrix tiles (AMX). A tile always multiplies 16 rows, each independently of the others.
#include "attention_bf16.h"
#include "attention_tile_latents.h"

namespace radix {
namespace RADIX_ISA {

// Sums of products in registers 0 to 3: two rows of tiles with up to two columns, or one with up to four.
//
// Few tiles are renamed, so a register that waits for its sum blocks what follows: it is stored only when it
// is to hold another. K and V pass through once and are not to evict what stays in first-level cache, hence
// the streaming loads. Multiplications that follow each other share an operand where they can.
template <bool IS_PAIR>
class TileSums {
  public:
    static constexpr int TILES_ACROSS = IS_PAIR ? 2 : 4;
    struct Place {
        float* at;
        int64_t stride;  // numbers from row to row
    };
    // The first step of N columns: `to` = x . y, added to what is there or to zeros.
    template <int N>
    RADIX_INLINE void begin(const uint16_t* x, int64_t x_bytes, const uint32_t* y, int64_t y_tile, Place to,
                            bool adds) {
        adds ? multiply<N, true>(x, x_bytes, y, y_tile, (const float*)to.at, to.stride)
             : multiply<N, true>(x, x_bytes, y, y_tile, ZEROS, 0);
        held = to, num_held = N;
    }
    template <int N>
    RADIX_INLINE void go_on(const uint16_t* x, int64_t x_bytes, const uint32_t* y, int64_t y_tile) {
        multiply<N, false>(x, x_bytes, y, y_tile, ZEROS, 0);
    }
#define RADIX_STORE(tile) \
    if (column(tile) < num_held) _tile_stored(tile, held.at + offset(held.stride, tile), held.stride * 4)
    void end() {
        RADIX_STORE(0);
        RADIX_STORE(1);
        RADIX_STORE(2);
        RADIX_STORE(3);
        num_held = 0;
    }

  private:
    // Zeroing a register waits for what it held; loading zeros does not.
    alignas(64) static constexpr float ZEROS[64] = {0};
    Place held{};
    int num_held = 0;  // columns
    static constexpr int column(int tile) { return IS_PAIR ? tile % 2 : tile; }
    static int64_t offset(int64_t stride, int tile) {
        return column(tile) * 16 + (IS_PAIR ? tile / 2 * 16 * stride : 0);
    }
#define RADIX_BEGIN(tile)                                                                           \
    if constexpr (BEGINS) {                                                                         \
        RADIX_STORE(tile);                                                                          \
        if constexpr (column(tile) < N) _tile_loadd(tile, from + offset(stride, tile), stride * 4); \
    }
    template <int N, bool BEGINS>
    RADIX_INLINE void multiply(const uint16_t* x, int64_t x_bytes, const uint32_t* y, int64_t y_tile,
                               const float* from, int64_t stride) {
        _tile_stream_loadd(6, y, 64);
        _tile_loadd(4, x, x_bytes);
        RADIX_BEGIN(0)
        _tile_dpbf16ps(0, 4, 6);
        if constexpr (IS_PAIR) {
            _tile_loadd(5, x + 8 * x_bytes, x_bytes);
            RADIX_BEGIN(2)
            _tile_dpbf16ps(2, 5, 6);
        }
        if constexpr (N > 1) _tile_stream_loadd(7, y + y_tile, 64);
        RADIX_BEGIN(1)
        if constexpr (N > 1) _tile_dpbf16ps(1, 4, 7);
        if constexpr (!IS_PAIR) {
            if constexpr (N > 2) _tile_stream_loadd(6, y + 2 * y_tile, 64);
            RADIX_BEGIN(2)
            if constexpr (N > 2) _tile_dpbf16ps(2, 4, 6);
            if constexpr (N > 3) _tile_stream_loadd(7, y + 3 * y_tile, 64);
        }
        RADIX_BEGIN(3)
        if constexpr (IS_PAIR && N > 1) _tile_dpbf16ps(3, 5, 7);
        if constexpr (!IS_PAIR && N > 3) _tile_dpbf16ps(3, 4, 7);
    }
};
#undef RADIX_BEGIN
#undef RADIX_STORE

struct TileProducts {
    using Few = FewKernels<TileChains>;

    static void open(int count) {
        TileConfig c;
        for (int i = 0; i < 8; i++)
            c.row_bytes[i] = 64, c.rows[i] = uint8_t(i < 6 ? std::min(count, 16) : 16);
        c.use();
    }
    static void close() { release_tiles(); }
    static void scores(const ScoreOperands& o) { o.n > 16 ? scores_of<true>(o) : scores_of<false>(o); }
    static void sums(const SumOperands& o) { o.n > 16 ? sums_of<true>(o) : sums_of<false>(o); }

  private:
    template <bool IS_PAIR>
    static void scores_of(const ScoreOperands& o);
    template <bool IS_PAIR>
    static void sums_of(const SumOperands& o);
    template <bool IS_PAIR, int N>
    static void sums_part(const SumOperands& o, int at, TileSums<IS_PAIR>& tiles);
};

// Sixteen rows take 64 tokens at once, 32 rows first 32 tokens and then the others.
template <bool IS_PAIR>
void TileProducts::scores_of(const ScoreOperands& o) {
    asm volatile("" ::: "memory");  // the compiler does not see what tiles read and write
    constexpr int N = TileSums<IS_PAIR>::TILES_ACROSS;
    const int64_t tile = int64_t(o.k_pad) * 8, q_step = o.q_rows * PAIRS;
    TileSums<IS_PAIR> tiles;
    for (int t = 0; t < TILES; t += N) {
        const uint32_t* k = o.k + t * tile;
        tiles.template begin<N>(o.q, PAIRS * 2, k, tile, {o.p + t * 16, BLOCK}, false);
        for (int step = 1; step < o.k_pad / PAIRS; step++)
            tiles.template go_on<N>(o.q + step * q_step, PAIRS * 2, k + step * 256, tile);
    }
    tiles.end();
    asm volatile("" ::: "memory");
}

// Sums += weights . v of what is pending, for N tiles of 16 channels.
template <bool IS_PAIR, int N>
void TileProducts::sums_part(const SumOperands& o, int at, TileSums<IS_PAIR>& tiles) {
    const typename TileSums<IS_PAIR>::Place sums{o.state + at, o.state_stride};
    bool begins = true;
    for (const BlockItem* item = o.items; item < o.items + o.num_items; item++)
        for (int step = item->first_step; step <= item->last_step; step++) {
            const uint16_t* w = o.weights + item->number % PENDING * BLOCK + step * PAIRS;
            const uint32_t* v = item->block->v + int64_t(step) * o.v_pad * 16 + at * 16;
            if (begins)
                tiles.template begin<N>(w, WEIGHTS * 2, v, 256, sums, true);
            else
                tiles.template go_on<N>(w, WEIGHTS * 2, v, 256);
            begins = false;
        }
}
template <bool IS_PAIR>
void TileProducts::sums_of(const SumOperands& o) {
    asm volatile("" ::: "memory");
    constexpr int WIDTH = TileSums<IS_PAIR>::TILES_ACROSS * 16;
    TileSums<IS_PAIR> tiles;
    int at = 0;
    for (; at + WIDTH <= o.v_pad; at += WIDTH) sums_part<IS_PAIR, WIDTH / 16>(o, at, tiles);
    switch ((o.v_pad - at) / 16) {
        case 1: sums_part<IS_PAIR, 1>(o, at, tiles); break;
        case 2:
            if constexpr (!IS_PAIR) sums_part<IS_PAIR, 2>(o, at, tiles);
            break;
        case 3:
            if constexpr (!IS_PAIR) sums_part<IS_PAIR, 3>(o, at, tiles);
    }
    tiles.end();
    asm volatile("" ::: "memory");
}

void attention_tiles(const AttnArgs& a, const Ctx& ctx) {
    const FlushDenormals flush;
    if (a.cache.latent)
        run_attention<LatentTiles>(a, ctx);
    else
        run_attention<Bf16Block<TileProducts>>(a, ctx);
}
size_t attention_tiles_local(const AttnArgs& a) {
    return a.cache.latent ? attention_bytes<LatentTiles>(a) : attention_bytes<Bf16Block<TileProducts>>(a);
}

}  // namespace RADIX_ISA
}  // namespace radix

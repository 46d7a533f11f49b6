// Attention on matrix tiles (AMX). A tile always multiplies 16 rows, each independently of the others.
#include "attention_bf16.h"
#include "attention_tile_latents.h"

namespace radix {
namespace RADIX_ISA {

static void clear_sums() {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
}

struct TileProducts {
    static constexpr int SIDES = 2, PENDING = 4, WEIGHTS = PENDING * BLOCK + 32;
    template <int R, int N>
    using Chains = TileChains<R, N>;

    static void open(int count) {
        TileConfig c;
        for (int i = 0; i < 8; i++)
            c.row_bytes[i] = 64, c.rows[i] = uint8_t(i < 6 ? std::min(count, 16) : 16);
        c.use();
    }
    static void close() { release_tiles(); }
    static void scores(const ScoreOperands& o);
    static void sums(const SumOperands& o) {
        asm volatile("" ::: "memory");
        const bool is_pair = o.n > 16;
        for (int at = 0; at < o.v_pad; at += is_pair ? 32 : 64) {
            const int tiles = (o.v_pad - at) / 16;
            if (is_pair)
                tiles == 1 ? sums_part<2, 1>(o, at) : sums_part<2, 2>(o, at);
            else if (tiles == 1)
                sums_part<1, 1>(o, at);
            else if (tiles == 2)
                sums_part<1, 2>(o, at);
            else if (tiles == 3)
                sums_part<1, 3>(o, at);
            else
                sums_part<1, 4>(o, at);
        }
        asm volatile("" ::: "memory");
    }

  private:
    template <int ROW_TILES, int N>
    static void sums_part(const SumOperands& o, int at);
};

// Sixteen rows take 64 tokens at once, 32 rows first 32 tokens and then the others.
void TileProducts::scores(const ScoreOperands& o) {
    asm volatile("" ::: "memory");  // the compiler does not see what tiles read and write
    const int64_t tile = int64_t(o.k_pad) * 8, q_step = o.q_rows * PAIRS;
    float* to = o.p;
    if (o.n <= 16) {
        clear_sums();
        for (int step = 0; step < o.k_pad / PAIRS; step++) {
            const uint32_t* b = o.k + step * 256;
            _tile_loadd(4, o.q + step * q_step, PAIRS * 2);
            _tile_loadd(6, b, 64);
            _tile_dpbf16ps(0, 4, 6);
            _tile_loadd(7, b + tile, 64);
            _tile_dpbf16ps(1, 4, 7);
            _tile_loadd(6, b + 2 * tile, 64);
            _tile_dpbf16ps(2, 4, 6);
            _tile_loadd(7, b + 3 * tile, 64);
            _tile_dpbf16ps(3, 4, 7);
        }
        _tile_stored(0, to, BLOCK * 4);
        _tile_stored(1, to + 16, BLOCK * 4);
        _tile_stored(2, to + 32, BLOCK * 4);
        _tile_stored(3, to + 48, BLOCK * 4);
    } else
        for (int half = 0; half < 2; half++, to += 32) {
            clear_sums();
            for (int step = 0; step < o.k_pad / PAIRS; step++) {
                const uint32_t* b = o.k + half * 2 * tile + step * 256;
                _tile_loadd(4, o.q + step * q_step, PAIRS * 2);
                _tile_loadd(6, b, 64);
                _tile_dpbf16ps(0, 4, 6);
                _tile_loadd(7, b + tile, 64);
                _tile_dpbf16ps(1, 4, 7);
                _tile_loadd(5, o.q + step * q_step + 16 * PAIRS, PAIRS * 2);
                _tile_dpbf16ps(2, 5, 6);
                _tile_dpbf16ps(3, 5, 7);
            }
            _tile_stored(0, to, BLOCK * 4);
            _tile_stored(1, to + 16, BLOCK * 4);
            _tile_stored(2, to + 16 * BLOCK, BLOCK * 4);
            _tile_stored(3, to + 16 * BLOCK + 16, BLOCK * 4);
        }
    asm volatile("" ::: "memory");
}

// Sums of 16 or 32 rows += weights . v of what is pending, for N tiles of 16 channels.
template <int ROW_TILES, int N>
void TileProducts::sums_part(const SumOperands& o, int at) {
    constexpr bool IS_PAIR = ROW_TILES == 2;
    float *state = o.state + at, *second = IS_PAIR ? state + 16 * o.state_stride : state + 32;
    const int64_t ld = o.state_stride * 4;
    _tile_loadd(0, state, ld);
    if constexpr (N > 1) _tile_loadd(1, state + 16, ld);
    if constexpr (IS_PAIR || N > 2) _tile_loadd(2, second, ld);
    if constexpr (IS_PAIR ? N > 1 : N > 3) _tile_loadd(3, second + 16, ld);
    for (const BlockItem* item = o.items; item < o.items + o.num_items; item++)
        for (int step = item->first_step; step <= item->last_step; step++) {
            const uint16_t* w = o.weights + item->number % PENDING * BLOCK + step * 32;
            const uint32_t* b = item->block->v + int64_t(step) * o.v_pad * 16 + int64_t(at / 16) * 256;
            _tile_loadd(4, w, WEIGHTS * 2);
            _tile_loadd(6, b, 64);
            _tile_dpbf16ps(0, 4, 6);
            if constexpr (N > 1) {
                _tile_loadd(7, b + 256, 64);
                _tile_dpbf16ps(1, 4, 7);
            }
            if constexpr (IS_PAIR) {
                _tile_loadd(5, w + 16 * WEIGHTS, WEIGHTS * 2);
                _tile_dpbf16ps(2, 5, 6);
                if constexpr (N > 1) _tile_dpbf16ps(3, 5, 7);
            }
            if constexpr (!IS_PAIR && N > 2) {
                _tile_loadd(6, b + 512, 64);
                _tile_dpbf16ps(2, 4, 6);
            }
            if constexpr (!IS_PAIR && N > 3) {
                _tile_loadd(7, b + 768, 64);
                _tile_dpbf16ps(3, 4, 7);
            }
        }
    _tile_stored(0, state, ld);
    if constexpr (N > 1) _tile_stored(1, state + 16, ld);
    if constexpr (IS_PAIR || N > 2) _tile_stored(2, second, ld);
    if constexpr (IS_PAIR ? N > 1 : N > 3) _tile_stored(3, second + 16, ld);
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

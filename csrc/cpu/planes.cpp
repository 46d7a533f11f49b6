// Bytes of pages on their way to tiers and back. Those of numbers are sorted by their place in the number, so
// that a compressor finds exponents side by side.
#include "../common/api.h"

#include <cstring>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace radix {

template <int WIDTH>
static void split(const uint8_t* __restrict x, int64_t n, uint8_t* __restrict y) {
    for (int64_t i = 0; i < n; i++)
        for (int b = 0; b < WIDTH; b++) y[b * n + i] = x[i * WIDTH + b];
}

template <int WIDTH>
static void join(const uint8_t* __restrict x, int64_t n, uint8_t* __restrict y) {
    for (int64_t i = 0; i < n; i++)
        for (int b = 0; b < WIDTH; b++) y[i * WIDTH + b] = x[b * n + i];
}

void byte_planes(const uint8_t* x, int64_t n, int width, uint8_t* y, bool joins) {
    if (width == 2)
        joins ? join<2>(x, n, y) : split<2>(x, n, y);
    else
        joins ? join<4>(x, n, y) : split<4>(x, n, y);
}

// memcpy past the caches where the processor can: what is copied is larger than they are, and lines that are
// written whole need not be read first. A fence must follow.
static void stream(uint8_t* to, const uint8_t* from, int64_t n) {
#if defined(__x86_64__)
    if (reinterpret_cast<uintptr_t>(to) % 16 == 0 && n % 64 == 0) {
        for (int64_t i = 0; i < n; i += 64) {
            const auto* x = reinterpret_cast<const __m128i*>(from + i);
            const __m128i a = _mm_loadu_si128(x), b = _mm_loadu_si128(x + 1), c = _mm_loadu_si128(x + 2),
                          d = _mm_loadu_si128(x + 3);
            auto* y = reinterpret_cast<__m128i*>(to + i);
            _mm_stream_si128(y, a), _mm_stream_si128(y + 1, b), _mm_stream_si128(y + 2, c),
                _mm_stream_si128(y + 3, d);
        }
        return;
    }
#endif
    memcpy(to, from, n);
}

void copy_pages(const PageRows& p, int64_t begin, int64_t end, bool to_pool) {
    for (int64_t i = begin; i < end; i++) {
        const int64_t page = i / p.layers, layer = i % p.layers;
        uint8_t* in_pool = p.pool + layer * p.layer_bytes + p.pages[page] * p.page_bytes;
        uint8_t* in_row = p.rows[page] + p.start + layer * p.page_bytes;
        to_pool ? stream(in_pool, in_row, p.page_bytes) : stream(in_row, in_pool, p.page_bytes);
    }
#if defined(__x86_64__)
    _mm_sfence();
#endif
}

}  // namespace radix

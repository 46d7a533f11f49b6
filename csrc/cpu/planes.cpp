// Bytes of pages on their way to tiers and back. Those of numbers are sorted by their place in the number, so
// that a compressor finds exponents side by side.
#include "../common/api.h"

#include <cstring>

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

void copy_pages(const PageRows& p, int64_t begin, int64_t end, bool to_pool) {
    for (int64_t i = begin; i < end; i++) {
        const int64_t page = i / p.layers, layer = i % p.layers;
        uint8_t* in_pool = p.pool + layer * p.layer_bytes + p.pages[page] * p.page_bytes;
        uint8_t* in_row = p.rows[page] + p.start + layer * p.page_bytes;
        to_pool ? memcpy(in_pool, in_row, p.page_bytes) : memcpy(in_row, in_pool, p.page_bytes);
    }
}

}  // namespace radix

// Bytes of numbers sorted by their place in the number, so that a compressor finds exponents side by side.
#include "../common/api.h"

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

}  // namespace radix

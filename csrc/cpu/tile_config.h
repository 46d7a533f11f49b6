// Shapes of the matrix tiles of a thread.
#pragma once
#include <cstdint>

namespace radix {
namespace RADIX_ISA {

// GCC 12 tells the optimiser of eight bytes only, so stores to the rest may be dropped.
struct alignas(64) TileConfig {
    uint8_t palette = 1, start_row = 0, reserved[14] = {0};
    uint16_t row_bytes[16] = {0};
    uint8_t rows[16] = {0};
    void use() const { asm volatile("ldtilecfg %0" ::"m"(*this) : "memory"); }
};
inline void release_tiles() { asm volatile("tilerelease" ::: "memory"); }

}  // namespace RADIX_ISA
}  // namespace radix

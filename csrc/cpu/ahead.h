// Prefetches into second-level cache.
#pragma once
#include "../common/simd.h"

namespace radix {
namespace RADIX_ISA {

// Bytes that a later block reads. They are prefetched line by line between the steps of this block:
// many requests at once would stall each other and all later loads.
struct Ahead {
    const char *at, *end;
    RADIX_INLINE void lines(int n) {
        for (; n > 0 && at < end; n--, at += 64) __builtin_prefetch(at, 0, 2);
    }
};

}  // namespace RADIX_ISA
}  // namespace radix

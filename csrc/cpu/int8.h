// W8A8 and W4A8: activations quantised per row, integer sums.
#pragma once
#include "../common/api.h"

namespace radix {
namespace RADIX_ISA {
void linear_int8(const LinearArgs& a, const Ctx& ctx);
size_t linear_int8_shared(const LinearArgs& a);
size_t linear_int8_local(const LinearArgs& a);
}  // namespace RADIX_ISA
}  // namespace radix

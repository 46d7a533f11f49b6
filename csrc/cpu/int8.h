// W8A8 and W4A8 linear layers; compiled once more where the processor has VNNI.
#pragma once
#include "../common/api.h"

namespace radix {
namespace RADIX_ISA {
void linear_int8(const LinearArgs& a, const Ctx& ctx);
size_t linear_int8_shared(const LinearArgs& a);
size_t linear_int8_local(const LinearArgs& a);
double int8_ceiling(size_t rounds);
}  // namespace RADIX_ISA
}  // namespace radix

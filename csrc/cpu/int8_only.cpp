// The integer linear layers alone, for instruction sets that differ in nothing else.
#include <utility>

#include "int8.cpp"

namespace radix {
namespace RADIX_ISA {
extern const Int8Kernels int8_table;
const Int8Kernels int8_table = {linear_int8, linear_int8_shared, int8_ceiling};
}  // namespace RADIX_ISA
}  // namespace radix

// The kernels of integers alone, for instruction sets that differ in nothing else.
#include <utility>

#include "attention_int4.cpp"
#include "int8.cpp"

namespace radix {
namespace RADIX_ISA {
extern const Int8Kernels int8_table;
const Int8Kernels int8_table = {linear_int8,  linear_int8_shared, linear_int8_local,
                                int8_ceiling, attention_int4,     attention_int4_local};
}  // namespace RADIX_ISA
}  // namespace radix

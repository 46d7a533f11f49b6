// The linear layers alone, for processors with matrix tiles.
#include <utility>

#include "int8.cpp"
#include "tiles.cpp"

namespace radix {
namespace RADIX_ISA {
extern const Int8Kernels int8_table;
const Int8Kernels int8_table = {linear_int8, linear_int8_shared};
}  // namespace RADIX_ISA
}  // namespace radix

// What matrix tiles do: linear layers and attention.
#include <utility>

#include "attention_int4.cpp"
#include "attention_tiles.cpp"
#include "int8.cpp"
#include "tiles_integers.cpp"

namespace radix {
namespace RADIX_ISA {
extern const Int8Kernels int8_table;
const Int8Kernels int8_table = {linear_integers,      integers_shared, tiles_local,
                                tile_ceiling<SIGNED>, attention_int4,  attention_int4_local};
extern const PairKernels pair_table;
const PairKernels pair_table = {linear_tiles, tiles_shared, tiles_local, tile_ceiling<BF16>};
extern const Bf16Kernels bf16_table;
const Bf16Kernels bf16_table = {attention_tiles, attention_tiles_local, true};
}  // namespace RADIX_ISA
}  // namespace radix

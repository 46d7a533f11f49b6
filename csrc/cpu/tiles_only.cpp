// The linear layers alone, for processors with matrix tiles.
#include <utility>

#include "int8.cpp"
#include "tiles.cpp"

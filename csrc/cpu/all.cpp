// All kernels of one instruction set, as one translation unit: RADIX_ISA names the namespace.
#include <utility>

#include "activation.cpp"
#include "attention.cpp"
#include "attention_int4.cpp"
#include "attention_sparse.cpp"
#include "ceiling.cpp"
#include "int8.cpp"
#include "linear.cpp"
#include "lora.cpp"
#include "norm.cpp"
#include "pack.cpp"
#include "sampler.cpp"
#include "scan.cpp"
#include "state.cpp"
#include "store.cpp"
#include "table.cpp"

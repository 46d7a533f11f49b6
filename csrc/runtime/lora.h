// Low-rank adapters: which rows belong together, and the work of their two products.
#pragma once
#include <vector>

#include "linear.h"

namespace radix {

// Adapters of a step: sequence s has tokens [starts[s], starts[s + 1]) and an adapter, or none (< 0).
struct LoraStep {
    const int32_t* adapter = nullptr;
    const int32_t* starts = nullptr;
    int64_t sequences = 0, tokens = 0, adapters = 0;
    const int32_t* ranks = nullptr;  // of each adapter, or null
};
// A: [adapters, parts, rank, inputs]; h of tokens without an adapter is left alone. Both throw
// std::invalid_argument for a step that reaches beyond its tensors.
void run_lora_shrink(const LoraStep& step, LoraArgs a, int threads);
// B: [adapters, outputs, rank]; widths: outputs of each part.
void run_lora_expand(const LoraStep& step, LoraArgs a, const std::vector<int64_t>& widths, int threads);

}  // namespace radix

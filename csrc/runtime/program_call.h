// What a step gives to a program.
#pragma once
#include "program.h"

namespace radix {

struct Program::Call {
    int64_t tokens, num_rows;
    Address ids, positions;
    int num_seqs;
    Address query_start, kv_len;
    const std::vector<std::tuple<Address, int64_t, Address>>& groups;
    const std::vector<std::tuple<Address, bool>>& ropes;
    Address rows, logits;
    int64_t ld_logits;
    Address hidden;
    int64_t ld_hidden;
    Address embeds, embeds_mask, tree;
    int64_t tree_ld;
    Address runs;
    int64_t num_runs;
    int64_t count(bool selected) const { return selected ? num_rows : tokens; }
};

}  // namespace radix

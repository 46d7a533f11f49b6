// Low-rank adapters of a step: which rows belong together, and the work of their products.
#pragma once
#include <array>
#include <vector>

#include "linear.h"

namespace radix {

// What one adapter adds to each of a model's linear layers, by the layer's number (site).
struct LoraAdapter {
    std::vector<std::vector<LoraPart>> sites;
    int max_rank = 0;
    // vectors: bias, gain, own; 0 for none
    void add(int site, Address a, Address b, const std::array<Address, 3>& vectors, int dtype, int rank,
             int first, int width, float scale, int block);
};

// The products of one layer: A x of all its rows, then B.
struct LoraWork {
    std::vector<LoraTask> shrink, expand;
    const int32_t* tokens = nullptr;
    int64_t num_h = 0, max_rank = 0;
};

// Rows of a step in the order of their experts, of those that have adapters.
struct LoraSlots {
    std::vector<int32_t> slots, tokens;  // places in Assignment's order and the tokens there, by adapter
    std::vector<int32_t> first;          // [adapters, slots of this rank + 1]
    LoraWork up, down;
    std::vector<float> h;
};

struct Assignment;

// The rows of a step that have adapters. What is made of them is kept, for as many steps as have the same.
class LoraBatch {
  public:
    // adapter: of each token, -1 for none. std::invalid_argument for one that is not there.
    LoraBatch(std::vector<const LoraAdapter*> adapters, Address adapter, int64_t tokens);
    Address address() const { return Address(this); }
    bool has(int site) const;
    void select(const int32_t* rows, int64_t count);  // the tokens that are the rows of `selected` work
    // null where no row of the step has an adapter that changes the layer
    const LoraWork* work(int site, bool selected);
    // The work of experts whose layer has the numbers site (up) and site + 1 (down): those in the slots from
    // `begin` to `end`. `blocks`: the expert in each slot; empty where they are the same numbers.
    void work(int site, bool selected, const Assignment& a, int begin, int end,
              const std::vector<int32_t>& blocks, LoraSlots& to) const;
    // y += what the adapters add, of all tokens. Blocks: numbers from one head to the next
    void add_to(int site, Address x, int64_t ldx, int64_t inputs, Address y, int64_t ldy, int64_t x_block,
                int64_t y_block, int threads);
    int max_rank = 0;

  private:
    struct Rows {
        std::vector<int32_t> of, tokens, first;  // `of`: adapter of each row; tokens ordered by adapter
        std::vector<LoraWork> sites;
        std::vector<char> is_made;
    };
    std::vector<const LoraAdapter*> adapters;
    size_t num_sites = 0;
    Rows all, selected;
    void group(Rows& rows) const;
    void make(const Rows& rows, int site, LoraWork& work) const;
    static void add_tasks(const LoraPart& part, int32_t row, int32_t end, LoraWork& work);
};

}  // namespace radix

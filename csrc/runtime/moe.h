// Mixture of experts: choose, group rows by expert, run each expert's rows, combine. No padding.
#pragma once
#include <vector>

#include "lora.h"
#include "shm.h"

namespace radix {

// How a router's logits become weights; SOFTMAX_TOPK and SIGMOID_TOPK: of the chosen logits alone.
enum class RouterScore : int {
    SOFTMAX,
    SIGMOID,
    SOFTMAX_TOPK,
    SIGMOID_TOPK,
    SPARSEMIXER,  // one choice after another, each a softmax over the logits near it (arXiv:2409.12136)
};

struct Route {  // see radixlm.arch.spec.Moe
    int experts = 0, top_k = 0;
    RouterScore score = RouterScore::SOFTMAX;
    bool renorm = false;
    float scale = 1.0f;
    const float* correction = nullptr;
    int groups = 1, groups_kept = 1;
    bool group_top2 = true;
    const float* expert_scale = nullptr;  // [experts], multiplies their weights; or null
    float jitter = 0;
};

// Which tokens go where: filled once a layer, by all threads of a team.
struct Assignment {
    std::vector<int32_t> ids;    // [T * top_k]
    std::vector<float> weights;  // [T * top_k]
    std::vector<int32_t> rows;   // [T * top_k]: tokens, sorted by expert
    std::vector<int32_t> slot;   // [T * top_k]: place of (token, choice) in that order
    std::vector<int32_t> first;  // [experts + 1]
    void reserve(int64_t tokens, int top_k, int experts);
    void sort(int64_t tokens, int top_k, int experts);
};

void choose(const Route& r, const float* logits, int32_t* ids, float* weights);  // one token

// Experts that several ranks hold. A slot holds a copy of one; rank r of the group has the slots starts[r] to
// starts[r + 1]. Token t that chose i computes with slot table[t % variants][i]; zero experts follow the
// slots.
// The ranks of `inside` share the insides of the same slots: rank r has inner channels inner[r] to inner[r +
// 1] of up, outputs dim[r] to dim[r + 1] of down.
struct ExpertPart {
    RankGroup* group = nullptr;  // null: every rank has all slots
    std::vector<int64_t> starts;
    const int32_t* table = nullptr;
    int variants = 1, width = 0;  // of the table: rows, entries of a row
    RankGroup* inside = nullptr;
    std::vector<int64_t> inner, dim;
    int32_t slot(int64_t token, int32_t id) const { return table[token % variants * width + id]; }
    size_t place() const { return group ? size_t(group->rank) : 0; }
    std::vector<int32_t> experts() const;  // in each slot, -1 in those that no token uses
};

struct ExpertArgs {
    const Weight* up = nullptr;  // [count], paired or plain
    const Weight* down = nullptr;
    int experts = 0, top_k = 0, act = 0;  // experts: slots of all ranks
    int first = 0, count = 0;             // this rank's slots
    const ExpertPart* part = nullptr;     // null: one rank has all
    const float* x = nullptr;
    int64_t ldx = 0, tokens = 0, dim = 0, inner = 0;      // of whole experts
    int64_t first_inner = 0, first_dim = 0, own_dim = 0;  // this rank's part of them
    int64_t max_expert_rows = 0;  // where that may exceed tokens: one expert comes twice for a token
    float* scaled = nullptr;      // [T * top_k, dim]: where inputs, not outcomes, are weighed
    int64_t lds = 0;
    float* hidden = nullptr;  // [T * top_k, inner]
    float* out = nullptr;     // [T * top_k, own_dim]
    float* y = nullptr;       // y (+)= scale * sum of weighted experts
    int64_t ldy = 0;
    float scale = 1.0f;
    bool adds = false;
    bool passes = false;        // zero experts return x; otherwise nothing
    LoraSlots* lora = nullptr;  // what adapters add, or null
    float* wide = nullptr;      // [T * top_k, rows of up]: before the activation, with adapters
};
// What the chosen experts made of token t, added in the order of the choice.
void combine(const ExpertArgs& e, const int32_t* ids, const int32_t* slot, const float* weights,
             const Ctx& ctx);
// Every thread of the team; `a` is sorted already.
void run_experts(const Kernels& k, const ExpertArgs& e, const Assignment& a, const Ctx& ctx);
size_t experts_shared(const Kernels& k, const ExpertArgs& e);
size_t experts_local(const Kernels& k, const ExpertArgs& e, int threads);

// A layer's experts, as Python holds them.
struct Experts {
    std::vector<Weight> up, down;
    int act;
    Assignment assignment;
    std::vector<float> hidden, out, wide;
    LoraSlots slots;
    std::vector<int32_t> blocks;  // the expert of each, where they are some of many; see LoraPart
    bool records = false;         // keep what the tokens of a step program chose
    std::vector<int32_t> chosen;  // [T * top_k] of the last step
    Experts(const std::vector<const Linear*>& ups, const std::vector<const Linear*>& downs, int activation,
            GateLimit limit);
    int64_t dim() const { return down[0].n; }
    int64_t inner() const { return down[0].k; }
    // lora: LoraBatch, or 0; site: as in LoraBatch::work
    void run(Address x, int64_t ldx, int64_t tokens, Address ids, Address weights, int top_k, Address y,
             int64_t ldy, int threads, Address lora, int site, const ExpertPart* part);
    void combine(Address out, Address slot, Address weights, int64_t tokens, int top_k, Address y,
                 int threads) const;
    void fill(ExpertArgs& e, int slots,
              const ExpertPart* part) const;  // what does not change from run to run
    int64_t take_chosen(Address to);          // their number; 0 without a place only counts
};

}  // namespace radix

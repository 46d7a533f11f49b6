// A whole step of a decoder as a list of ops, bound once to weights and caches, run by one call.
//
// Python appends the ops (radixlm/layers/program.py). It fills in weights and sizes, in the kernels' own
// argument structs. `run` fills in the addresses and row counts of each step.
#pragma once
#include <array>
#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <tuple>
#include <vector>

#include "heads.h"
#include "lora.h"
#include "moe.h"
#include "shm.h"

namespace radix {

struct ScanSource {  // the place of a scan's input
    int buffer = -1;
    int64_t offset = 0, head = 0;  // head: floats from one head to the next
};

struct KvGroup {  // page table [num_seqs, stride] and store slots [tokens] of a KV group, int32
    Address page_table = 0;
    int64_t stride = 0;
    Address slots = 0;
};
struct RopeTable {
    Address cos_sin = 0;
    bool by_token = false;  // row t belongs to token t, else to position t
};

// What one step passes to a program.
struct Step {
    int64_t tokens = 0;
    Address ids = 0, positions = 0;  // int32 [tokens]
    int num_seqs = 0;
    Address query_start = 0, kv_len = 0;  // int32 [num_seqs + 1], [num_seqs]
    std::vector<KvGroup> groups;
    std::vector<RopeTable> ropes;
    Address rows = 0;  // int32 [num_rows]: the tokens whose logits or hidden states are wanted
    int64_t num_rows = 0;
    Address logits = 0, hidden = 0;  // float [num_rows, ld]; 0: not wanted
    int64_t ld_logits = 0, ld_hidden = 0;
    Address taps = 0;  // float [tokens, ld]: residual streams that a drafter reads; 0: not wanted
    int64_t ld_taps = 0;
    Address embeds = 0, embeds_mask = 0;  // float [tokens, dim], bytes [tokens] or 0 for all rows
    Address tree = 0;                     // as in AttnArgs
    int64_t tree_ld = 0;
    Address sparse_rows = 0, is_sparse = 0;  // SparseRow [num_sparse], bytes [num_seqs]: as in SparseArgs
    int num_sparse = 0, max_sparse_len = 0;
    Address runs = 0;  // StateRun [num_runs]
    int64_t num_runs = 0;
    Address lora = 0;  // LoraBatch: the rows with adapters, or 0
    // Of data-parallel attention: tokens of each group, and the rows of all of them with adapters. All rows
    // are wanted then.
    std::vector<int64_t> group_tokens;
    Address lora_of_all = 0;
    int first_op = 0, num_ops = -1;  // the ops to run, all by default
    int threads = 0;                 // 0: by the amount of work
    bool is_lone = true;             // the server's other processes get what it gives before the next step
};

// What `Program::go_on` draws from the logits of a step whose sequences decode, and where that goes on. All
// arrays have num_rows numbers for each of the `passes`; `slots` has none for the first.
struct Draws {
    int passes = 0;
    Address rows = 0;                // SampleRow, whose logits are set here
    Address counts = 0;              // int32 [num_rows]: how many tokens each row gets
    Address tokens = 0, is_bad = 0;  // int64; bytes: a NaN, or no token is allowed
    std::vector<Address> slots;      // int32 of each KV group, as in KvGroup; 0 behind a row's last token
    int64_t vocab = 0;
    Address suppressed = 0;  // int64 [num_suppressed]: never drawn
    int64_t num_suppressed = 0;
    std::vector<int64_t> ends;      // tokens behind which a row needs no others
    std::function<void(int)> told;  // called between a pass and the draws of the next; may change masks
};

// Buffers are numbers that `buffer` returned, -1 for none. `selected`: of the wanted rows only.
// Offsets are floats from the beginning of a buffer's row.
class Program {
  public:
    enum StoreParts { STORE_Q = 1, STORE_K = 2, STORE_CACHE = 4 };

    ~Program();
    int buffer(int64_t width, int rows_per_token);  // a float matrix, freed with the program
    // y = rows of a table. `replaced`: the step's embeddings replace them where it has some.
    void embed(int y, const Linear* tied, EmbedArgs args, bool replaced);
    void norm(int x, int y, NormArgs args, int64_t offset, bool selected);  // offset: of x and of y
    // y = act(x w^T + bias) * out_scale + residual. `site`: the layer's number among those that adapters may
    // change, `lora_x`: their input where it is not x. `offset`: of y and the residual.
    void linear(int x, int y, const Linear& w, int residual, float out_scale, int act, bool selected,
                int site, int lora_x, int64_t offset);
    // q, k and v are at `offsets` of x. `parts`: which of q and k are normed and rotated, and whether
    // k and v go to the cache.
    void store(int x, std::array<int64_t, 3> offsets, StoreArgs args, int rope, int group, int parts);
    // Rows of a latent cache: kv is [k_lead latents, head_dim rotated numbers]. The last head_dim numbers
    // of each head of q are rotated too and stored after the k_lead numbers of a head of `absorbed`.
    void latent_store(int q, int kv, int absorbed, StoreArgs args, int rope, int group);
    // y's head h = w_h x_h
    void heads(int x, int y, const HeadLinear& w, int64_t x_head, int64_t y_head, int site);
    void attention(int q, int y, AttnArgs args);  // over the cache of the last store
    void gate(int x, int y, GateArgs args, int64_t offset, bool selected);
    void head_norm(int x, int y, HeadNormArgs args, int64_t x_offset, int64_t y_offset, int gate,
                   int64_t gate_offset);
    // offsets of x: what is convolved, what multiplies it first, what multiplies the outcome (-1: none)
    // y = the activation of x's rows, gate before up where it is gated.
    void activation(int x, int y, ActArgs args, bool selected);
    void conv(int x, int y, ConvArgs args, int64_t offset, int64_t times, int64_t gate);
    void decay(int x, int64_t offset, int step, int log, DecayArgs args);
    void scan(std::vector<ScanSource> inputs, int y, ScanArgs args);  // inputs: q, k, v, decay, beta
    void add(int x, int y, int64_t dim, float scale, bool selected);  // y += x * scale
    // y += x * (w + shift), where w is the number at `column` of each of the weights' rows
    void add_weighted(int x, int y, int64_t dim, int weights, int64_t column, float shift, bool selected);
    void copy(int x, int y, int64_t dim, int64_t y_offset, bool selected);
    void affine(int y, Address shift, Address factor, int64_t dim, bool selected);  // 0: none
    void above_normal(int y, int64_t dim, float deviations, bool selected);
    void size_as(int x, int y, int64_t dim, float least, bool selected);  // least: of a mean square
    void rg_lru(int x, int gates, Address log, int64_t dim, int head);
    void gather(int x, int y, int64_t dim, int64_t offset);                 // the wanted rows of x
    void columns(int x, int y, Address index, int64_t dim, bool selected);  // y[i] = x[index[i]]
    void scale(int y, int64_t offset, int64_t dim, float scale, float cap, bool sigmoid, bool selected);
    void scale_heads(int y, Address factors, int heads, int head_dim, int stride);  // by position
    void xielu(int y, int64_t dim, Xielu coefficients, bool selected);
    // y (+)= scale * experts(x), chosen by the router's logits; ids of the last `zero_experts` experts have
    // no weights: they return x, or nothing. `scales_input`: an expert's weight multiplies its input. `part`:
    // null where one rank has all experts.
    void moe(int x, int logits, int y, Experts& experts, Route route, float scale, bool adds,
             int zero_experts, bool zero_experts_are_identity, bool scales_input, bool selected,
             const ExpertPart* part, int site);
    // Columns from `first` on of the step's logits.
    void logits(int x, const Linear& w, float scale, float softcap, int site, int lora_x, int64_t first);
    // y's columns offset + bounds[r] .. offset + bounds[r + 1] come from rank r of the group, which has them
    // there, or in x.
    void all_gather(int y, std::vector<int64_t> bounds, RankGroup& group, int64_t offset, bool selected,
                    int x);
    // Rows of all attention groups, of `each` ranks, one group after another; and this rank's among them.
    void gather_rows(int x, int y, RankGroup& group, int each);
    void own_rows(int x, int y, int64_t dim, RankGroup& group, int each);
    // The step's logits likewise, which only `target` gets whole.
    void gather_logits(std::vector<int64_t> bounds, RankGroup& group, int target);
    void hidden(int x, int64_t dim);                              // rows that a step may want
    void tap(int x, int64_t dim, int64_t offset, bool selected);  // to the step's taps, from `offset` on

    void run(const Step& step);
    // Draws from the step's logits, then runs the step again with these tokens, a place further on, and so
    // on. `step`: its ids, positions and kv_len are changed in place.
    int go_on(Step step, const Draws& draws);  // the passes: fewer where no row needs more
    int num_ops() const { return int(ops.size()); }
    std::vector<std::tuple<std::string, double>> profile();  // seconds in each kind of op since the last call
    bool profiling = false;
    inline static int64_t together_from = 1 << 15;  // numbers that ranks divide; fewer are sooner done twice
    bool of_all = false;  // whether ops that are appended work on the rows of all attention groups

  private:
    enum Kind {
        EMBED,
        NORM,
        LINEAR,
        STORE,
        ATTENTION,
        MIX,
        LOGITS,
        HIDDEN,
        EMBEDS,
        MOE,
        HEADS,
        GATE,
        ACTIVATION,
        HEAD_NORM,
        CONV,
        DECAY,
        SCAN,
        TAP,
        GATHER,
        NUM_KINDS,
    };
    struct Op {
        Kind kind;
        int x = -1, y = -1, residual = -1, q = -1, q_to = -1, group = 0, rope = -1, plan = -1;
        bool selected = false, gathers = false, of_all = false;
        bool fence = false;   // ranks wait for each other before it
        bool is_cut = false;  // logits that ranks share
        Packers* packers = nullptr;
        const float* factors = nullptr;  // of positions
        int64_t x_offset = 0, y_offset = 0, offsets[3] = {0, 0, 0};
        int parts = STORE_Q | STORE_K | STORE_CACHE;
        ScanSource sources[5];
        EmbedArgs embed;
        NormArgs norm;
        LinearArgs linear;
        StoreArgs store;
        AttnArgs attention;
        SparseArgs sparse;  // rows of it, where the cache has labels
        MixArgs mix;
        Route route;
        ExpertArgs experts;
        Experts* expert_owner = nullptr;
        int num_slots = 0;  // of experts, and zero experts
        HeadArgs heads;
        GateArgs gate;
        ActArgs activation;
        HeadNormArgs head_norm;
        ConvArgs conv;
        DecayArgs decay;
        ScanArgs scan;
        int logits = -1, hidden = -1, out = -1, wide = -1;
        // of ranks: bounds in bytes, what is gathered
        RankGroup* group_of_ranks = nullptr;
        std::vector<int64_t> bounds;
        const char* own = nullptr;
        char* gathered = nullptr;
        int64_t ld_own = 0, ld_gathered = 0, num_rows = 0;
        int target = -1, each = 0;  // each: ranks of an attention group
        // of a linear layer that adapters may change; `apart`: its outcome before what follows
        int site = -1, lora_x = -1, apart = -1, act = 0;
        float out_scale = 1.0f;
        const LoraWork* lora = nullptr;
    };
    struct Buffer {
        int64_t width, stride;
        int rows_per_token;
        float *own = nullptr, *data = nullptr;  // of this process; what the step uses
        // of ranks (program_common.cpp)
        bool is_common = false, is_divided = false;
        int part_of = -1;
        int64_t part_at = 0;
    };
    struct StepPackers : Packers {
        RankGroup* group = nullptr;
        void barrier(const Ctx& ctx) override;
    };
    enum Writes { NOTHING, OWN_COLUMNS, ROWS, THE_SAME, CHANGES };
    std::vector<Op> ops;
    std::vector<Buffer> buffers;
    std::vector<AttnPlan> plans;
    std::vector<int> plan_of;  // op index that a plan was made for
    int64_t capacity = 0;
    char* memory = nullptr;
    double seconds[NUM_KINDS] = {0};
    Assignment assignment;  // of the layer that runs
    LoraSlots lora_slots;   // of it, too
    LoraBatch *lora_batch = nullptr, *lora_of_all = nullptr;
    std::vector<float> lora_h;
    RankGroup* common = nullptr;  // whose memory holds what ranks exchange
    bool shares = false;          // the step uses it
    size_t common_used = 0;
    int num_planned = -1;
    StepPackers packers[2];

    Op& push(Kind kind);
    Op& push_mix(MixKind kind, int x, int y, int64_t dim, bool selected);
    float* data(int b, int64_t offset = 0) const {
        return b < 0 ? nullptr : buffers[size_t(b)].data + offset;
    }
    int64_t stride(int b) const {
        if (b < 0) return 0;
        const Buffer& buffer = buffers[size_t(b)];
        return buffer.part_of < 0 ? buffer.stride : buffers[size_t(buffer.part_of)].stride;
    }
    void grow(int64_t tokens);
    static bool only_reads(const Op& op, int b);
    static bool touches(const Op& op, int b);
    Writes writes(size_t i, int b) const;
    int part_in(int b) const;
    void choose_common();
    void place_fences();
    std::vector<std::vector<uint8_t>> of_all_ranks(const std::vector<uint8_t>& mine);
    bool agree();
    void plan_common();
    void bind_common(int64_t tokens);
    void bind_packers();
    void bind(const Step& step);
    void bind_lora(Op& op);
    void bind_gather(Op& op, const Step& step, int64_t rows);
    LoraBatch* lora_of(const Op& op) const { return op.of_all ? lora_of_all : lora_batch; }
    static int64_t tokens_before(const Step& step, int group);  // of the groups before it
    void reserve_lora(const LoraWork& work);
    static bool is_apart(const Op& op);
    void bind_attention(Op& op, const Step& step, int64_t rows);
    void bind_mix(Op& op, const Step& step, int64_t rows);
    void bind_state(Op& op, const Step& step, int64_t rows);
    double cost_flops(const Step& step, double& bytes) const;
    std::span<const Op> ops_of(const Step& c) const;  // std::invalid_argument for others than there are
    void execute(const Op& op, const Kernels& k, const Ctx& ctx);
    void execute_linear(const Op& op, const Kernels& k, const Ctx& ctx);
    void execute_gather(const Op& op, const Ctx& ctx);
    void execute_norm(const Op& op, const Kernels& k, const Ctx& ctx);
    void execute_moe(const Op& op, const Kernels& k, const Ctx& ctx);
    void execute_heads(const Op& op, const Kernels& k, const Ctx& ctx);
};

}  // namespace radix

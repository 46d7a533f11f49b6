// A whole step of a decoder as a list of ops, bound once to weights and caches, run by one call.
#pragma once
#include <array>
#include <cstdint>
#include <string>
#include <tuple>
#include <vector>

#include "heads.h"
#include "moe.h"

namespace radix {

class Program {
  public:
    ~Program();
    int buffer(int64_t width, int rows_per_token);  // a float matrix, freed with the program
    void embed(int y, const Linear* tied, Address table, int dtype, int64_t vocab, int64_t dim, float scale,
               Address positions, int64_t offset,
               bool is_second);  // second: rows of another table, nothing given in their place
    void norm(int x, int residual, int y, Address weight, Address bias, int64_t dim, float eps, bool layer,
              bool selected, int64_t offset);  // offset: of x and of y in their rows
    void linear(int x, int y, const Linear& w, int residual, float out_scale, int act, bool selected);
    void store(int qkv, std::vector<int64_t> offsets, std::vector<int> shape,
               std::tuple<int, bool, Address, Address, Address, Address, float> norm, int rope,
               bool interleaved, int rotary, int group, std::tuple<Address, Address, int, int> cache,
               int parts);  // parts: 1 q, 2 k, 4 into the cache
    // Rows of a latent cache: kv is [rank latents, rope_dim numbers that turn]. The last rope_dim numbers of
    // each query head turn too and go behind the rank numbers of a head of `absorbed`. shape: heads, q_head,
    // rope_dim, rank
    void latent_store(int q, int kv, int absorbed, std::vector<int> shape, int rope, bool interleaved,
                      int rotary, int group, std::tuple<Address, Address, int, int> cache);
    void heads(int x, int y, const HeadLinear& w, int64_t x_head, int64_t y_head,
               bool selected);  // y's head h = w's head h times x's head h
    void attention(int qkv, int y, int heads, int q_head, float scale, int window, float softcap,
                   Address sinks, int chunk, Address slopes);  // over the cache of the last store
    // y's heads (from y_offset) times what the gate lets through: numbers of x's heads from `offset`,
    // `stride` apart, or one a head
    void gate(int x, int y, int heads, int head_dim, int64_t offset, int stride, bool selected, int act,
              bool one_each);
    void grow_rows(int y, Address factors, int heads, int head_dim,
                   int stride);  // y's heads times the factor of the row's position
    void scale(int y, int64_t offset, int64_t dim, float scale, float cap, bool sigmoid,
               bool selected);  // y times scale, within +-cap unless 0; of its sigmoid
    void head_norm(int x, int y, std::tuple<int64_t, int64_t, int64_t> offsets, int gate,
                   std::tuple<int64_t, int64_t> heads, Address weight, bool own_weights,
                   std::tuple<float, float, bool> of, int act,
                   bool gates_last);  // offsets: x, y, gate; heads: count, width; of: eps, scale, by the sum
    void conv(int x, int y, std::array<int64_t, 3> offsets, std::array<int64_t, 3> shape, Address weight,
              Address bias,
              Address state);  // offsets: x, times, gate (-1: none); shape: channels, width, act
    void decay(int x, int64_t offset, int step, int log, int64_t dim, Address bias, Address rate,
               std::array<float, 3> limits, bool is_factor);  // limits: low, high, floor
    // inputs: (buffer, offset, numbers to the next head) of q, k, v, decay, beta; shape: kind, heads, keys,
    // values, decays, repeats
    void scan(std::vector<std::tuple<int, int64_t, int64_t>> inputs, int y, std::array<int64_t, 6> shape,
              Address a, Address skip, Address state);
    void add(int x, int y, int64_t dim, float scale, bool selected);
    void gather(int x, int y, int64_t dim, int64_t offset);  // the wanted rows of dim numbers from `offset`
    void xielu(int y, int64_t dim, std::array<float, 4> rising, bool selected);
    void columns(int x, int y, Address index, int64_t dim,
                 bool selected);  // y's column i is x's column index[i]
    void activation(int x, int y, int64_t dim, int act, bool gated, bool selected);
    // y += scale * experts(x), chosen by the router's logits. route: experts, top_k, score, renorm, scale,
    // correction, groups, kept, best_two
    void moe(
        int x, int logits, int y, const Experts& experts,
        std::tuple<int, int, int, bool, float, Address, int, int, bool> route, float scale, bool selected,
        std::tuple<bool, int, bool, bool, Address, float>
            more);  // more: adds to y, experts that hand their input through, whether these give anything,
    // weights are of inputs, factors of the experts' weights, jitter
    void logits(int x, const Linear& w, float scale, float softcap);
    void hidden(int x, int64_t dim);  // rows that the caller may take out

    struct Group {
        Address page_table;
        int64_t stride;
        Address slots;
    };
    void run(int64_t tokens, Address ids, Address positions, int num_seqs, Address query_start,
             Address kv_len, std::vector<std::tuple<Address, int64_t, Address>> groups,
             std::vector<std::tuple<Address, bool>> ropes, Address rows, int64_t num_rows, Address logits,
             int64_t ld_logits, Address hidden, int64_t ld_hidden, Address embeds, Address embeds_mask,
             Address tree, int64_t tree_ld, Address runs, int64_t num_runs, int threads);
    int num_ops() const { return int(ops.size()); }
    std::vector<std::tuple<std::string, double>> profile();  // seconds in each kind of op since the last call
    bool profiling = false;

  private:
    enum Kind {
        EMBED,
        NORM,
        LINEAR,
        STORE,
        ATTENTION,
        MIX,
        ACT,
        LOGITS,
        HIDDEN,
        EMBEDS,
        MOE,
        HEADS,
        GATE,
        HEAD_NORM,
        CONV,
        DECAY,
        SCAN
    };
    struct Op {
        Kind kind;
        int x = -1, y = -1, residual = -1, q = -1, q_to = -1, group = 0, rope = -1, plan = -1;
        bool selected = false, gathers = false;
        const float* factors = nullptr;  // of positions
        int64_t x_offset = 0, y_offset = 0, offsets[3] = {0, 0, 0};
        int parts = 7;                       // of a store
        int from[5] = {-1, -1, -1, -1, -1};  // of a scan
        int64_t at[5] = {0, 0, 0, 0, 0};
        EmbedArgs embed;
        NormArgs norm;
        LinearArgs linear;
        StoreArgs store;
        AttnArgs attention;
        MixArgs mix;
        ActArgs act;
        Route route;
        ExpertArgs experts;
        HeadArgs heads;
        GateArgs gate;
        HeadNormArgs head_norm;
        ConvArgs conv;
        DecayArgs decay;
        ScanArgs scan;
        int logits = -1, hidden = -1, out = -1;
    };
    struct Buffer {
        int64_t stride;
        int rows_per_token;
        float* data = nullptr;
    };
    struct Call;
    std::vector<Op> ops;
    std::vector<Buffer> buffers;
    std::vector<AttnPlan> plans;
    std::vector<int> plan_of;  // op index that a plan was made for
    int64_t capacity = 0;
    char* memory = nullptr;
    static constexpr int NUM_KINDS = SCAN + 1;
    double seconds[NUM_KINDS] = {0};
    Assignment assignment;  // of the layer that runs

    Op& push(Kind kind);
    void grow(int64_t tokens);
    void bind(const Call& c);
    void bind_state(Op& op, const Call& c, int64_t n);
    double cost_flops(const Call& c, double& bytes) const;
    void execute(const Op& op, const Kernels& k, const Ctx& ctx);
    void execute_moe(const Op& op, const Kernels& k, const Ctx& ctx);
};

}  // namespace radix

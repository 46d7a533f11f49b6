// The table of kernels that each instruction set fills. Plain structs, no ownership.
#pragma once
#include <cstddef>
#include <cstdint>

#include "parallel.h"

namespace radix {

enum Format : int {
    W_F32 = 0,
    W_BF16 = 1,
    W_F16 = 2,
    W_INT8 = 3,
    W_W8A8 = 4,
    W_INT4 = 5,
    W_W4A8 = 6,
    W_BF16_PAIRS = 7,
    W_W8A16 = 8,
    W_FP4 = 9  // as Python names it: here w4a8 with `fp4`
};
inline double bytes_each(int format) {
    constexpr double each[] = {4, 2, 2, 1, 1, 0.5, 0.5, 2, 1};
    return each[format];
}
enum Act : int {
    ACT_NONE = 0,
    ACT_SILU = 1,
    ACT_GELU = 2,
    ACT_GELU_TANH = 3,
    ACT_GELU_QUICK = 4,
    ACT_RELU = 5,
    ACT_RELU2 = 6,
    ACT_TANH = 7,
    ACT_SWIGLU_OAI = 8,
    ACT_APART = 9  // of paired weights: gate and up are stored beside each other, not activated
};  // the last two gated only

constexpr int PANEL = 32;      // output channels of one weight panel
constexpr int MAX_SPAN = 512;  // inputs; integer sums of a span stay below 2^24, so floats hold them exactly
constexpr int MAX_MULTIPLE = 15;  // q * multiple fits a byte

// By e2m1 code: twice the number, and the same plus 12, which is never negative.
alignas(16) inline constexpr int8_t TWICE_FP4[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};
alignas(16) inline constexpr int8_t RAISED_FP4[16] = {12, 13, 14, 15, 16, 18, 20, 24,
                                                      12, 11, 10, 9,  8,  6,  4,  0};

// Of a gated activation: the gate is cut above before its activation or after it, up on both sides.
struct GateLimit {
    float limit = 0;  // 0: none
    bool after = false;
};

// Weights [N, K] as panels of 32 outputs: [ceil(N/32)][K][32] (see pack.cpp for each format's order).
struct Weight {
    const void* data = nullptr;
    const float* scale = nullptr;  // int8: [N padded]; int4, w4a8: [panel][spans][32]
    const float* offset =
        nullptr;  // int4: as scale, added to q * scale; w4a8 without: weights are (q - 8) * scale
    const int8_t* multiple =
        nullptr;  // w4a8 or null: [panel][K/group][2][32], weights are (q * first - second) * scale
    const int32_t* column_sum = nullptr;  // w8a8, w8a16: 128 * sum_k w[n, k], [N padded]
    const float* bias = nullptr;          // [N padded] in panel order, or null
    int64_t n = 0, k = 0;
    int format = W_F32;
    int group = 0;   // 4 bits: inputs that share a multiple, or a scale where there are none
    int span = 0;    // 4 bits: inputs that share a scale; the last span may be shorter
    int paired = 0;  // lanes 0-15 gate, 16-31 up of the same 16 outputs
    GateLimit limit;
    int fp4 = 0;  // w4a8 without offsets: values are e2m1 codes, weights are twice those numbers * scale
};

inline int64_t spans_of(const Weight& w) { return (w.k + w.span - 1) / w.span; }

struct LinearArgs {
    Weight w;
    const float* x = nullptr;
    int64_t ldx = 0, m = 0;
    const int32_t* rows = nullptr;  // gather: row i of x is rows[i]
    float* y = nullptr;
    int64_t ldy = 0;
    const float* residual = nullptr;  // y = out_scale * (x w^T + bias) + residual
    int64_t ldr = 0;
    float out_scale = 1.0f;
    int act = ACT_NONE;
    int streams = 0;  // y is too large for the caches: written past them
};

struct NormArgs {
    const float* x = nullptr;
    int64_t ldx = 0;
    float* residual = nullptr;  // when set: residual += x first, and the sum is normalised
    int64_t ldr = 0;
    const float* weight = nullptr;
    const float* bias = nullptr;
    float* y = nullptr;
    int64_t ldy = 0, rows = 0, dim = 0;
    float eps = 0, offset = 0, x_scale = 1.0f;
    int layer_norm = 0;
};

// What double sparsity keeps of a layer's keys: K's rows in the layout of V, and labels of `width` channels
// (cpu/heavy.h). A query attends to the `top` tokens whose labels fit its own best.
struct Heavy {
    void* rows = nullptr;
    void* labels = nullptr;
    const int32_t* channels = nullptr;  // [kv_heads][width]
    int width = 0, top = 0;
};

// One layer's paged cache. K: [page][kv_head][page_size/16][k_dim][16]; V: [page][kv_head][page_size][v_dim].
// latent: V alone, rows of k_dim numbers, whose first v_dim are the value. See cpu/kv.h.
struct Cache {
    void* k = nullptr;
    void* v = nullptr;
    int dtype = 0, kv_heads = 0, k_dim = 0, v_dim = 0, page_size = 16, latent = 0;
    const Heavy* heavy = nullptr;
};

struct StoreArgs {  // q/k norm, rope and cache store; the parts that are null are skipped
    float* q = nullptr;
    float* k = nullptr;
    const float* v = nullptr;
    int64_t ldq = 0, ldk = 0, ldv = 0, tokens = 0;
    int heads = 0, kv_heads = 0, head_dim = 0, v_dim = 0;
    int q_head = 0;         // floats from one query head to the next: head_dim, or more with a gate between
    float* q_to = nullptr;  // where query heads go, if not back
    int64_t ldq_to = 0;
    int q_to_head = 0;
    int k_lead = 0;  // numbers of a latent row before the rotated ones
    int norm = 0;    // 0 none, 1 each head, shared weights, 2 the whole row, 3 each head, separate weights
    int layer_norm = 0;
    const float* q_norm = nullptr;
    const float* k_norm = nullptr;
    const float* q_norm_bias = nullptr;
    const float* k_norm_bias = nullptr;
    float eps = 0, norm_offset = 0;
    const float* cos_sin = nullptr;      // [positions][rotary]: cos half, sin half
    const int32_t* positions = nullptr;  // null: row t of cos_sin belongs to token t
    int rotary = 0, interleaved = 0;
    const int32_t* slots = nullptr;  // < 0: token is not stored
    Cache cache;
};

struct AttnTask {
    int32_t seq, q0, qn, kv_head, split0, split1, partial;  // partial < 0: write the output
    int32_t from = 0;       // the first block; inside a split, the rows' states are in `partials`
    int32_t heads = 1;      // from kv_head on, block by block: they are neighbours in a page
    int32_t head_rows = 0;  // in `partials`, from a head to the next
    int32_t readers = -1;   // shared: the first of `qn` readers, which see all of blocks [from, end)
    int32_t end = 0;
};
// A sequence that shares reading. Row i of a split of a KV head: base + (kv_head * splits + split) * rows +
// i.
struct AttnMember {
    int32_t seq, base, splits, rows;
};
struct AttnReader {  // a new token of a member
    int32_t member, token;
};

struct AttnArgs {
    const float* q = nullptr;
    float* out = nullptr;
    int64_t ldq = 0, ldo = 0;
    int q_head = 0;  // floats between query heads, >= k_dim
    Cache cache;
    const int32_t* page_table = nullptr;
    int64_t ldp = 0;
    const int32_t* query_start = nullptr;
    const int32_t* kv_len = nullptr;
    const uint8_t* is_sparse = nullptr;  // [num_seqs] or null: sequences that SparseArgs has the rows of
    int num_seqs = 0, heads = 0;
    float scale = 1, softcap = 0;
    int window = 0, causal = 1;
    int chunk = 0;  // a token attends within its own chunk of this many positions
    const float* sinks = nullptr;
    const float* alibi_slopes = nullptr;  // [heads]: slope * (key - query position) is added to a score
    const uint8_t* tree = nullptr;        // [tokens][tree_ld]: may query i see new token j of its sequence
    int64_t tree_ld = 0;
    const AttnTask* tasks = nullptr;
    int num_shared = 0, num_tasks = 0, num_merges = 0;  // tasks: shared ones, then others, then merges
    const AttnMember* members = nullptr;
    const AttnReader* readers = nullptr;
    float* partials = nullptr;
};

// The first token that the one at this position sees.
inline int first_seen(const AttnArgs& a, int position) {
    const int window = a.window > 0 && position + 1 > a.window ? position + 1 - a.window : 0;
    const int chunk = a.chunk > 0 ? position / a.chunk * a.chunk : 0;
    return window > chunk ? window : chunk;
}

struct SparseRow {  // a query token, its sequence, how many tokens it sees
    int32_t token, seq, kv_len;
};
// Attention of some query tokens over a cache with `heavy`.
struct SparseArgs {
    AttnArgs a;
    const SparseRow* rows = nullptr;
    int num_rows = 0, max_len = 0;
    char* work = nullptr;  // of `sparse_shared` bytes
};

struct ActArgs {
    const float* x = nullptr;  // [rows, 2 * dim] gate, up when gated, else [rows, dim]
    int64_t ldx = 0;
    float* y = nullptr;
    int64_t ldy = 0, rows = 0, dim = 0;
    int act = 0, gated = 0;
    GateLimit limit;
};

// Operations on rows, most of them elementwise.
enum class MixKind : int {
    ADD,            // y += x * x_scale
    COPY_ROWS,      // y = x, or x's row index[r]
    SOFTCAP,        // y = tanh(y * x_scale / cap) * cap
    COPY_COLUMNS,   // y[i] = x[index[i]]
    SCALE_HEADS,    // y's heads times x[index[r]]
    SCALE,          // y = y * x_scale, clamped to +-cap unless that is 0
    SIGMOID_SCALE,  // y = sigmoid(y) * x_scale
    XIELU,          // above 0: above * y^2, else (e^min(y, eps) - 1 - y) * below; plus beta * y
    AFFINE,         // y = (y + shift) * factor, of each column
    ADD_WEIGHTED,   // y += x * (weights[r] + x_scale)
    ABOVE_NORMAL,   // y = max(y - mean - x_scale * standard deviation, 0), of each row
    SIZE_AS,        // y = y / its root mean square (of a mean square of cap at least) * that of x
    RG_LRU,         // y's heads [input gate, decay gate] become [what joins a state, log of its decay]
};
struct Xielu {  // arXiv:2411.13010
    float above = 0, below = 0, eps = 0, beta = 0;
};
struct MixArgs {
    const float* x = nullptr;
    float* y = nullptr;
    int64_t ldx = 0, ldy = 0, rows = 0, dim = 0;
    MixKind kind = MixKind::ADD;
    float x_scale = 1, cap = 0;
    int head = 0, head_stride = 0;  // of y: head h starts at h * head_stride
    const int32_t* index = nullptr;
    const uint8_t* mask = nullptr;  // COPY_ROWS: rows whose byte is set
    Xielu xielu;
    const float* shift = nullptr;   // [dim]
    const float* factor = nullptr;  // [dim]; RG_LRU: logs of the decays of open gates
    const float* weights = nullptr;
    int64_t ldw = 0;
};

// Tokens of one sequence, in the rows of a step, that go from a page's states to another's. Runs of a
// sequence come in the order of its tokens.
struct StateRun {
    int32_t row = 0, tokens = 0, source = 0, target = 0;
};

// Causal convolutions a channel, over the last `width` tokens: see state.cpp.
constexpr int MAX_CONV = 16;
struct ConvArgs {
    const float* x = nullptr;
    const float* times = nullptr;  // x is multiplied with it first, or null
    const float* gate = nullptr;   // the outcome is multiplied with it, or null
    float* y = nullptr;
    int64_t ldx = 0, ldy = 0, channels = 0;  // ldx: of gate and times too
    int width = 0, act = ACT_NONE;
    const float* weight = nullptr;  // [width, channels]
    const float* bias = nullptr;
    float* state = nullptr;  // [pages, channels, width - 1]
    const StateRun* runs = nullptr;
    int64_t num_runs = 0;
};

// step = softplus(x + bias) within [low, high]; log = step * rate, or with a floor floor * sigmoid(rate * (x
// + bias)).
struct DecayArgs {
    const float* x = nullptr;
    float* step = nullptr;
    float* log = nullptr;
    const float* bias = nullptr;
    const float* rate = nullptr;
    int64_t ldx = 0, lds = 0, ldl = 0, rows = 0, dim = 0;
    float low = 0, high = 0, floor = 0;
    int is_factor = 0;  // e^log is written
};

enum class Gate : int { SIGMOID, SILU, SOFTPLUS, TWICE_SIGMOID, IDENTITY };

// RMS norms of heads, with an optional gate before or after. is_sum: by the sum of squares, not the mean.
struct HeadNormArgs {
    const float* x = nullptr;
    const float* gate = nullptr;
    const float* weight = nullptr;  // [width], per_head_weights: [heads, width]
    float* y = nullptr;
    int64_t ldx = 0, ldg = 0, ldy = 0, rows = 0, heads = 0, width = 0;
    float eps = 0, scale = 1;
    Gate act = Gate::SIGMOID;
    bool gates_last = false, per_head_weights = false, is_sum = false;
};

// y's heads times what a gate lets through: a number each of x's heads, `stride` apart, or one a head.
struct GateArgs {
    const float* x = nullptr;
    float* y = nullptr;
    int64_t ldx = 0, ldy = 0, rows = 0, heads = 0, width = 0, stride = 0;
    Gate act = Gate::SIGMOID;
    bool per_head = false;
};

// Recurrences over a state: see scan.cpp. Decays per key channel of a delta rule come as factors.
enum class ScanKind : int { SELECTIVE, DECAYED, DELTA, CHANNELS };
struct ScanInput {
    const float* data = nullptr;
    int64_t sequence = 0, token = 0, head = 0;  // numbers from one to the next
};
struct ScanArgs {
    ScanKind kind = ScanKind::SELECTIVE;
    int decays = 1;  // of a head, or of each of its keys
    int64_t sequences = 0, tokens = 0, heads = 0, keys = 0, values = 0;
    ScanInput q, k, v, decay, beta;
    const float* a = nullptr;        // selective: [heads, values, keys]
    float* state = nullptr;          // [sequences, heads, values, keys]; delta: [.., keys, values]
    const float* before = nullptr;   // the states that are gone on from, if not those
    float* out = nullptr;            // [sequences, tokens, heads, values]
    int64_t out_token = 0;           // numbers from one token's to the next one's; 0: no gaps
    int64_t repeats = 1;             // heads that have one q and one k
    const float* skip = nullptr;     // of a head, selective: of each of its values; y gains skip * v
    const StateRun* runs = nullptr;  // instead of sequences: states are pages
    int64_t num_runs = 0, page = 0;  // numbers of a page
};

// Low-rank adapters: see lora.cpp. A part adds scale * (B (A x) + bias) to some outputs y of a linear layer.
// With a gain (DoRA) it makes gain * (y - own + what it adds) + own of them.
struct LoraPart {
    const void *a = nullptr, *b = nullptr;                         // A [rank, inputs], B [width, rank]
    const float *bias = nullptr, *gain = nullptr, *own = nullptr;  // [width]; own: the layer's bias
    int32_t dtype = 0, rank = 0, first = 0, width = 0;             // outputs [first, first + width)
    float scale = 1.0f;
    int32_t block = 0;  // which expert or head
};
constexpr int LORA_ROWS = 48, LORA_TASK_RANKS = 16, LORA_TASK_OUTPUTS = 128;  // at most, of a task
struct LoraTask {                                                             // rows that have one adapter
    const LoraPart* part = nullptr;
    int64_t h = 0;              // where A x of its first row is
    int32_t row = 0, rows = 0;  // the first of its rows in `tokens`, and how many
    int32_t at = 0, count = 0;  // ranks of A, or outputs of B
};
struct LoraArgs {
    const LoraTask* tasks = nullptr;
    int64_t num_tasks = 0;
    const int32_t* tokens = nullptr;  // ordered by adapter: rows of x for lora_shrink, of y for lora_expand
    int64_t inputs = 0, max_rank = 0;
    const float* x = nullptr;
    float *h = nullptr, *y = nullptr;
    int64_t ldx = 0, ldy = 0, x_block = 0, y_block = 0;  // numbers from row to row, from block to block
    float scale = 1.0f;                                  // of what is added
};

struct EmbedArgs {
    const int32_t* ids = nullptr;
    int64_t tokens = 0, vocab = 0, dim = 0;
    const void* table = nullptr;  // row major [vocab, dim] when packed == 0
    int dtype = 0, packed = 0;
    Weight w;
    float scale = 1;
    int takes_first = 0;                    // ids past the table have its first row, not zeros
    const void* positions_table = nullptr;  // learned positions, fp32 [rows, dim]
    const int32_t* positions = nullptr;
    int64_t position_offset = 0;
    float* y = nullptr;
    int64_t ldy = 0;
};

struct PackArgs {
    const void* src = nullptr;
    int src_dtype = 0;
    int64_t ld = 0, rows = 0;  // rows of this source
    int64_t first_row = 0;     // where they go
    Weight w;                  // destination (data, scale, ... written)
};

// One row to sample from. Logits are changed in place by what comes before the draw.
struct SampleRow {
    float* logits;
    const uint8_t* seen;    // [vocab] tokens that are penalised, or null
    const int32_t* counts;  // [vocab] how often each is in the output
    const int64_t* bias_ids;
    const float* bias_values;
    const int32_t* mask;        // bit i of word w allows token 32 w + i; or null
    const int64_t* suppressed;  // not drawn unless nothing else may be
    uint64_t key;
    int64_t top_k;  // the vocabulary: no limit
    int32_t num_bias, num_suppressed;
    float temperature, top_p, min_p, repetition, frequency, presence;
    int32_t greedy, unused;
};
struct SampleArgs {
    const SampleRow* rows = nullptr;
    int64_t num_rows = 0, vocab = 0;
    int64_t* tokens = nullptr;
};

struct Int8Kernels {
    void (*linear)(const LinearArgs&, const Ctx&);
    size_t (*shared)(const LinearArgs&);
    size_t (*local)(const LinearArgs&);
    double (*ceiling)(size_t rounds);                // operations done
    void (*attention)(const AttnArgs&, const Ctx&);  // caches of 4 bits that are not latent
    size_t (*attention_local)(const AttnArgs&);
};

// bf16 weights and activations in pairs of k, on matrix tiles or as dot products. Null where the processor
// has neither.
struct PairKernels {
    void (*linear)(const LinearArgs&, const Ctx&) = nullptr;
    size_t (*shared)(const LinearArgs&) = nullptr;
    size_t (*local)(const LinearArgs&) = nullptr;
    double (*ceiling)(size_t rounds) = nullptr;  // operations done
};

// Attention to caches whose numbers are exact in bf16, by products of bf16. Null where the processor has
// none.
struct Bf16Kernels {
    void (*attention)(const AttnArgs&, const Ctx&) = nullptr;
    size_t (*attention_local)(const AttnArgs&) = nullptr;
    bool has_latents = false;
};

struct Kernels {
    const char* name;
    Int8Kernels int8;
    void (*linear)(const LinearArgs&, const Ctx&);
    size_t (*linear_shared)(const LinearArgs&);
    size_t (*linear_local)(const LinearArgs&, int threads);
    void (*norm)(const NormArgs&, const Ctx&);
    void (*store)(const StoreArgs&, const Ctx&);
    void (*attention)(const AttnArgs&, const Ctx&);
    size_t (*attention_local)(const AttnArgs&);
    void (*activation)(const ActArgs&, const Ctx&);
    void (*mix)(const MixArgs&, const Ctx&);
    void (*embed)(const EmbedArgs&, const Ctx&);
    void (*pack)(const PackArgs&, const Ctx&);
    void (*scan)(const ScanArgs&, const Ctx&);
    void (*conv)(const ConvArgs&, const Ctx&);
    void (*decay)(const DecayArgs&, const Ctx&);
    void (*head_norm)(const HeadNormArgs&, const Ctx&);
    void (*gate)(const GateArgs&, const Ctx&);
    void (*lora_shrink)(const LoraArgs&, const Ctx&);
    void (*lora_expand)(const LoraArgs&, const Ctx&);
    size_t (*lora_local)(int64_t max_rank);
    void (*sample)(const SampleArgs&, const Ctx&);
    size_t (*sample_local)(const SampleArgs&);
    double (*ceiling)(int kind, const float* memory, size_t bytes, float* sink);
    void (*sparse_attention)(const SparseArgs&, const Ctx&);
    size_t (*sparse_shared)(const SparseArgs&);
    size_t (*sparse_local)(const SparseArgs&);
    PairKernels pairs = {};
    Bf16Kernels bf16 = {};
};

inline bool is_integer(const LinearArgs& a) {
    return a.w.format == W_W8A8 || a.w.format == W_W4A8 || a.w.format == W_W8A16;
}
inline bool has_pairs(const LinearArgs& a) { return a.w.format == W_BF16_PAIRS; }
inline void run_linear(const Kernels& k, const LinearArgs& a, const Ctx& ctx) {
    (is_integer(a) ? k.int8.linear : has_pairs(a) ? k.pairs.linear : k.linear)(a, ctx);
}
inline size_t shared_for(const Kernels& k, const LinearArgs& a) {
    return is_integer(a) ? k.int8.shared(a) : has_pairs(a) ? k.pairs.shared(a) : k.linear_shared(a);
}
inline size_t local_for(const Kernels& k, const LinearArgs& a, int threads) {
    return is_integer(a) ? k.int8.local(a) : has_pairs(a) ? k.pairs.local(a) : k.linear_local(a, threads);
}

// The arithmetic of attention depends on the processor and the cache's type, on nothing else.
inline bool is_bf16(const Kernels& k, const AttnArgs& a) {
    return k.bf16.attention && (!a.cache.latent || k.bf16.has_latents) && a.cache.dtype != 0 &&
           a.cache.dtype != 2 && a.cache.dtype != 6;
}
inline bool is_integer(const AttnArgs& a) { return a.cache.dtype == 6 && !a.cache.latent; }
inline void run_attention(const Kernels& k, const AttnArgs& a, const Ctx& ctx) {
    (is_integer(a) ? k.int8.attention : is_bf16(k, a) ? k.bf16.attention : k.attention)(a, ctx);
}
inline size_t local_for(const Kernels& k, const AttnArgs& a) {
    return (is_integer(a)   ? k.int8.attention_local
            : is_bf16(k, a) ? k.bf16.attention_local
                            : k.attention_local)(a);
}

// Rows of an attention task: query heads of one KV head, of several tokens. A large task brings a block
// of keys into order once for all of its rows, whose sums still fit into second-level cache.
constexpr int TASK_ROWS = 96, MAX_TASK_ROWS = 512, TASK_SUMS = MAX_TASK_ROWS * 160;
// Several KV heads are one task where each has few rows.
constexpr int JOINED_HEADS = 8, JOINED_ROWS = 8;
inline int state_floats(int v_dim) { return (v_dim + 15) / 16 * 16 + 32; }
inline int max_rows(int v_dim, int group) {
    const int rows = TASK_SUMS / state_floats(v_dim) / 16 * 16;
    return group > TASK_ROWS      ? group
           : rows < TASK_ROWS     ? TASK_ROWS
           : rows > MAX_TASK_ROWS ? MAX_TASK_ROWS
                                  : rows;
}
constexpr int ATTN_BLOCK = 64;  // tokens of one iteration of the online softmax
constexpr int SPLIT =
    512;  // tokens of an attention split, absolute: part of the arithmetic, never tuned by shape

// planes.cpp: `n` numbers of `width` (2 or 4) bytes to `width` planes of n bytes; `joins`: the inverse.
void byte_planes(const uint8_t* x, int64_t n, int width, uint8_t* y, bool joins);

// Pages of a pool [layers, pages, page_bytes], and rows elsewhere that have theirs from `start` on, [layers,
// page_bytes].
struct PageRows {
    uint8_t* pool;
    int64_t layers, layer_bytes, page_bytes;
    const int32_t* pages;
    uint8_t* const* rows;
    int64_t start;
};
// The pieces [begin, end) of them, one for each page and layer, to the pool or to the rows.
void copy_pages(const PageRows& p, int64_t begin, int64_t end, bool to_pool);

}  // namespace radix

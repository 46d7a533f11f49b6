// radixlm._cpu: kernels called with raw addresses; the GIL is released around every one.
#include <nanobind/nanobind.h>
#include <nanobind/stl/array.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <sys/mman.h>

#include <algorithm>
#include <array>
#include <chrono>

#include "runtime/lora.h"
#include "runtime/program.h"
#include "runtime/runtime.h"

namespace nb = nanobind;
using namespace radix;
using nb::arg;

namespace {

void run_norm(Address x, int64_t ldx, Address residual, int64_t ldr, Address weight, Address bias, Address y,
              int64_t ldy, int64_t rows, int64_t dim, float eps, float offset, float x_scale, bool layer,
              int threads) {
    NormArgs a;
    a.x = at<float>(x), a.ldx = ldx, a.residual = at<float>(residual), a.ldr = ldr,
    a.weight = at<float>(weight), a.bias = at<float>(bias);
    a.y = at<float>(y), a.ldy = ldy, a.rows = rows, a.dim = dim, a.eps = eps, a.offset = offset,
    a.x_scale = x_scale, a.layer_norm = layer;
    int n = threads > 0 ? threads : threads_for(double(rows) * double(dim) * 12, 0);
    const Kernels& k = kernels();
    run_team(n, 0, 0, [&](const Ctx& c) { k.norm(a, c); });
}

void run_store(nb::tuple qkv, nb::tuple shape, nb::tuple norm, nb::tuple rope, Address slots, nb::tuple cache,
               int threads) {
    StoreArgs a;
    a.q = at<float>(nb::cast<Address>(qkv[0])), a.ldq = nb::cast<int64_t>(qkv[1]);
    a.k = at<float>(nb::cast<Address>(qkv[2])), a.ldk = nb::cast<int64_t>(qkv[3]);
    a.v = at<float>(nb::cast<Address>(qkv[4])), a.ldv = nb::cast<int64_t>(qkv[5]);
    a.tokens = nb::cast<int64_t>(shape[0]), a.heads = nb::cast<int>(shape[1]),
    a.kv_heads = nb::cast<int>(shape[2]);
    a.head_dim = nb::cast<int>(shape[3]), a.v_dim = nb::cast<int>(shape[4]);
    a.q_head = nb::cast<int>(shape[5]);
    a.layer_norm = nb::cast<int>(norm[5]), a.q_norm_bias = at<float>(nb::cast<Address>(norm[6])),
    a.k_norm_bias = at<float>(nb::cast<Address>(norm[7]));
    a.norm = nb::cast<int>(norm[0]), a.q_norm = at<float>(nb::cast<Address>(norm[1])),
    a.k_norm = at<float>(nb::cast<Address>(norm[2]));
    a.eps = nb::cast<float>(norm[3]), a.norm_offset = nb::cast<float>(norm[4]);
    a.cos_sin = at<float>(nb::cast<Address>(rope[0])), a.positions = at<int32_t>(nb::cast<Address>(rope[1]));
    a.rotary = nb::cast<int>(rope[2]), a.interleaved = nb::cast<int>(rope[3]);
    a.slots = at<int32_t>(slots);
    a.cache = make_cache(nb::cast<Address>(cache[0]), nb::cast<Address>(cache[1]), nb::cast<int>(cache[2]),
                         nb::cast<int>(cache[3]), nb::cast<int>(cache[4]), nb::cast<int>(cache[5]),
                         nb::cast<int>(cache[6]));
    int n = threads > 0 ? threads
                        : threads_for(double(a.tokens) * (a.heads + 2 * a.kv_heads) * a.head_dim * 16, 0);
    nb::gil_scoped_release free_gil;
    const Kernels& k = kernels();
    run_team(n, 0, 0, [&](const Ctx& c) { k.store(a, c); });
}

struct Attention {
    AttnArgs a;
    AttnPlan plan;
    Attention(int heads, int kv_heads, int k_dim, int v_dim, int page_size, int dtype, float scale,
              int window, int chunk, float softcap, bool causal, Address sinks, Address slopes) {
        a.heads = heads, a.q_head = k_dim, a.scale = scale, a.window = window, a.chunk = chunk,
        a.softcap = softcap, a.causal = causal, a.sinks = at<float>(sinks), a.slopes = at<float>(slopes);
        a.cache = make_cache(0, 0, dtype, kv_heads, k_dim, v_dim, page_size);
    }
    void run(Address q, int64_t ldq, Address out, int64_t ldo, Address k_cache, Address v_cache,
             Address pages, int64_t ldp, Address query_start, Address kv_len, int num_seqs, Address tree,
             int64_t tree_ld, int threads) {
        AttnArgs c = a;
        c.q = at<float>(q), c.ldq = ldq, c.out = at<float>(out), c.ldo = ldo, c.cache.k = at<void>(k_cache),
        c.cache.v = at<void>(v_cache), c.cache.latent = !k_cache;
        c.page_table = at<int32_t>(pages), c.ldp = ldp, c.query_start = at<int32_t>(query_start),
        c.kv_len = at<int32_t>(kv_len), c.num_seqs = num_seqs;
        c.tree = at<uint8_t>(tree), c.tree_ld = tree_ld;
        plan.make(c, threads > 0 ? threads : max_threads());
        const Kernels& k = kernels();
        int n = threads > 0 ? threads : threads_for(plan.bytes, plan.flops);
        run_team(n, plan.partial_floats * 4, local_for(k, c), [&](const Ctx& ctx) {
            AttnArgs mine = c;
            plan.give(mine, ctx.shared());
            run_attention(k, mine, ctx);
        });
    }
};

void run_activation(Address x, int64_t ldx, Address y, int64_t ldy, int64_t rows, int64_t dim, int act,
                    bool gated, int threads) {
    ActArgs a;
    a.gated = gated;
    a.x = at<float>(x), a.ldx = ldx, a.y = at<float>(y), a.ldy = ldy, a.rows = rows, a.dim = dim, a.act = act;
    int n = threads > 0 ? threads : threads_for(double(rows) * double(dim) * 24, 0);
    const Kernels& k = kernels();
    run_team(n, 0, 0, [&](const Ctx& c) { k.activation(a, c); });
}

// Units of work a second by all threads: bytes read (kind 0) or operations: 1 float32, 2 bf16 and 3 int8
// on tiles (0 where the instruction set has none).
double measure(int kind, Address memory, size_t bytes, int threads) {
    const Kernels& k = kernels();
    double total = 0;
    if (kind >= 2 && !k.tiles.ceiling) return 0;
    auto begin = std::chrono::steady_clock::now();
    run_team(threads, 0, 0, [&](const Ctx& c) {
        const size_t each = kind == 0 ? bytes / size_t(threads) / 256 * 256 : bytes;
        float sink = 1e-3f;
        double work =
            kind >= 2 ? k.tiles.ceiling(kind, each)
                      : k.ceiling(kind, at<float>(memory + size_t(c.tid) * each * (kind == 0)), each, &sink);
#pragma omp critical
        total += work + (sink == 12345.0f);
        c.barrier();
    });
    return total / std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

// Ask for huge pages under a tensor: pages of a cache are far apart.
void advise_huge(Address data, size_t bytes) {
    const Address huge = Address(2) << 20, first = (data + huge - 1) / huge * huge,
                  last = (data + bytes) / huge * huge;
    if (last > first) madvise(at<void>(first), last - first, MADV_HUGEPAGE);
}

void run_sample(Address rows, int64_t num_rows, int64_t vocab, Address tokens, int threads) {
    SampleArgs a;
    a.rows = at<SampleRow>(rows), a.num_rows = num_rows, a.vocab = vocab, a.tokens = at<int64_t>(tokens);
    double work = 0;
    for (int64_t i = 0; i < num_rows; i++) work += double(vocab) * (a.rows[i].greedy ? 4 : 24);
    const int n = threads > 0 ? threads : std::min(threads_for(work, 0), int(num_rows));
    const Kernels& k = kernels();
    run_team(n, 0, k.sample_local(a), [&](const Ctx& c) { k.sample(a, c); });
}

// Each input is (address, numbers to the next sequence, token, head).
using ScanTensor = std::tuple<Address, int64_t, int64_t, int64_t>;
void run_scan(int kind, const std::array<int64_t, 5>& sizes, int decays,
              const std::vector<ScanTensor>& inputs, Address a, Address state, Address out, int threads) {
    ScanArgs s;
    s.kind = kind, s.decays = decays;
    s.sequences = sizes[0], s.tokens = sizes[1], s.heads = sizes[2], s.keys = sizes[3], s.values = sizes[4];
    ScanInput* to[] = {&s.q, &s.k, &s.v, &s.decay, &s.beta};
    for (size_t i = 0; i < inputs.size() && i < 5; i++) {
        const auto& [data, sequence, token, head] = inputs[i];
        *to[i] = {at<float>(data), sequence, token, head};
    }
    s.a = at<float>(a), s.state = at<float>(state), s.out = at<float>(out);
    const double numbers = double(s.sequences) * double(s.heads) * double(s.keys) * double(s.values);
    const int n = threads > 0 ? threads : threads_for(numbers * 8, numbers * double(s.tokens) * 6);
    const Kernels& k = kernels();
    run_team(n, 0, 0, [&](const Ctx& c) { k.scan(s, c); });
}

// (adapter of each sequence, first token of each, sequences, tokens, adapters, ranks or 0)
using LoraTuple = std::tuple<Address, Address, int64_t, int64_t, int64_t, Address>;
LoraStep lora_step(const LoraTuple& t) {
    const auto& [adapter, starts, sequences, tokens, adapters, ranks] = t;
    return {at<int32_t>(adapter), at<int32_t>(starts), sequences, tokens, adapters, at<int32_t>(ranks)};
}
void lora_shrink(const LoraTuple& step, Address x, int64_t ldx, Address weight, int dtype,
                 const std::array<int64_t, 3>& shape, Address h, int threads) {
    LoraArgs a;
    a.x = at<float>(x), a.ldx = ldx, a.weight = at<void>(weight), a.dtype = dtype, a.h = at<float>(h);
    a.parts = shape[0], a.rank = shape[1], a.inputs = shape[2];
    run_lora_shrink(lora_step(step), a, threads);
}
void lora_expand(const LoraTuple& step, Address y, int64_t ldy, Address h, Address weight, int dtype,
                 const std::array<int64_t, 2>& shape, const std::vector<int64_t>& widths, Address scale,
                 int threads) {
    LoraArgs a;
    a.y = at<float>(y), a.ldy = ldy, a.weight = at<void>(weight), a.dtype = dtype, a.h = at<float>(h),
    a.scale = at<float>(scale);
    a.outputs = shape[0], a.rank = shape[1], a.parts = int64_t(widths.size());
    run_lora_expand(lora_step(step), a, widths, threads);
}

void run_embed(Address ids, int64_t tokens, Address table, int dtype, int64_t vocab, int64_t dim, float scale,
               Address y, int64_t ldy) {
    EmbedArgs a;
    a.ids = at<int32_t>(ids), a.tokens = tokens, a.table = at<void>(table), a.dtype = dtype, a.vocab = vocab,
    a.dim = dim, a.scale = scale;
    a.y = at<float>(y), a.ldy = ldy;
    const Kernels& k = kernels();
    run_team(threads_for(double(tokens) * double(dim) * 8, 0), 0, 0, [&](const Ctx& c) { k.embed(a, c); });
}

}  // namespace

NB_MODULE(_cpu, m) {
    nb::set_leak_warnings(false);  // a program that ends with an engine open keeps its weights to the end
    using Release = nb::call_guard<nb::gil_scoped_release>;
    m.def("isa", [] { return std::string(kernels().name); });
    m.def("compiled_isas", &compiled_isas);
    m.def("supported_isas", &supported_isas);
    m.def("processor_has", &processor_has);
    m.def("select_isa", &select_isa);
    m.def("measure", &measure, Release());
    m.def("advise_huge", &advise_huge);
    m.def("lend_memory", &lend_memory);
    m.def("end_lending", &end_lending);
    m.def("max_threads", &max_threads);
    m.def("set_max_threads", &set_max_threads);

    nb::class_<Memory>(m, "Memory")
        .def(nb::init<size_t>())
        .def_prop_ro("address", &Memory::address)
        .def_ro("num_bytes", &Memory::bytes);
    nb::class_<Linear>(m, "Linear")
        .def(nb::init<int64_t, int64_t, int, int, int, bool, Address, Address, Address, Address, Address,
                      Address>())
        .def("run", &Linear::run, Release())
        .def("pack", &Linear::pack, Release())
        .def("embed", &Linear::embed, Release());
    nb::class_<Attention>(m, "Attention")
        .def(nb::init<int, int, int, int, int, int, float, int, int, float, bool, Address, Address>())
        .def("run", &Attention::run, Release());
    nb::class_<Experts>(m, "Experts")
        .def(nb::init<const std::vector<const Linear*>&, const std::vector<const Linear*>&, int>())
        .def("run", &Experts::run, Release());
    nb::class_<HeadLinear>(m, "HeadLinear")
        .def(nb::init<const std::vector<const Linear*>&>())
        .def("run", &HeadLinear::run, Release());
    nb::class_<Program>(m, "Program")
        .def(nb::init<>())
        .def("buffer", &Program::buffer, arg("width"), arg("rows_per_token") = 1)
        .def("moe", &Program::moe)
        .def("embed", &Program::embed, arg("y"), arg("tied").none(), arg("table"), arg("dtype"), arg("vocab"),
             arg("dim"), arg("scale"), arg("positions"), arg("offset"), arg("is_second") = false)
        .def("norm", &Program::norm, arg("x"), arg("residual"), arg("y"), arg("weight"), arg("bias"),
             arg("dim"), arg("eps"), arg("layer"), arg("selected"), arg("offset") = 0)
        .def("linear", &Program::linear)
        .def("store", &Program::store)
        .def("latent_store", &Program::latent_store)
        .def("heads", &Program::heads)
        .def("attention", &Program::attention)
        .def("gate", &Program::gate)
        .def("grow_rows", &Program::grow_rows)
        .def("scale", &Program::scale)
        .def("head_norm", &Program::head_norm)
        .def("conv", &Program::conv)
        .def("decay", &Program::decay)
        .def("scan", &Program::scan)
        .def("add", &Program::add)
        .def("gather", &Program::gather, arg("x"), arg("y"), arg("dim"), arg("offset") = 0)
        .def("xielu", &Program::xielu)
        .def("columns", &Program::columns)
        .def("activation", &Program::activation)
        .def("hidden", &Program::hidden)
        .def("logits", &Program::logits)
        .def("run", &Program::run, Release())
        .def("profile", &Program::profile)
        .def_rw("profiling", &Program::profiling)
        .def_prop_ro("num_ops", &Program::num_ops);
    m.def("norm", &run_norm, Release());
    m.def("store", &run_store);
    m.def("activation", &run_activation, Release());
    m.def("embed", &run_embed, Release());
    m.def("scan", &run_scan, Release());
    m.def("lora_shrink", &lora_shrink, Release());
    m.def("lora_expand", &lora_expand, Release());
    m.def("sample", &run_sample, Release());
    m.attr("SAMPLE_ROW_BYTES") = int(sizeof(SampleRow));
}

// radixlm._cpu: kernels called with raw addresses; the GIL is released around every one.
#include <nanobind/nanobind.h>
#include <nanobind/stl/array.h>
#include <nanobind/stl/function.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <array>
#include <chrono>

#include "runtime/lora.h"
#include "runtime/program.h"
#include "runtime/runtime.h"
#include "runtime/shm.h"

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
    if (nb::len(cache) > 7) a.cache.heavy = at<Heavy>(nb::cast<Address>(cache[7]));
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
              int window, int chunk, float softcap, bool causal, Address sinks, Address alibi_slopes) {
        a.heads = heads, a.q_head = k_dim, a.scale = scale, a.window = window, a.chunk = chunk,
        a.softcap = softcap, a.causal = causal, a.sinks = at<float>(sinks),
        a.alibi_slopes = at<float>(alibi_slopes);
        a.cache = make_cache(0, 0, dtype, kv_heads, k_dim, v_dim, page_size);
    }
    void run(Address q, int64_t ldq, Address out, int64_t ldo, Address k_cache, Address v_cache,
             Address pages, int64_t ldp, Address query_start, Address kv_len, int num_seqs, Address tree,
             int64_t tree_ld, int threads, Address is_sparse) {
        AttnArgs c = a;
        c.is_sparse = at<uint8_t>(is_sparse);
        c.q = at<float>(q), c.ldq = ldq, c.out = at<float>(out), c.ldo = ldo, c.cache.k = at<void>(k_cache),
        c.cache.v = at<void>(v_cache), c.cache.latent = !k_cache;
        c.page_table = at<int32_t>(pages), c.ldp = ldp, c.query_start = at<int32_t>(query_start),
        c.kv_len = at<int32_t>(kv_len), c.num_seqs = num_seqs;
        c.tree = at<uint8_t>(tree), c.tree_ld = tree_ld;
        plan.make(c, threads > 0 ? threads : max_threads());
        const Kernels& k = kernels();
        int n = threads > 0 ? threads : threads_for(plan.bytes, plan.flops);
        run_team(n, plan.partial_floats * 4, local_for(k, c), [&](const Ctx& ctx) {
            AttnArgs args = c;
            plan.fill(args, ctx.shared());
            run_attention(k, args, ctx);
        });
    }
};

// Attention of `num_rows` query tokens (SparseRow) over caches with `heavy`; the arguments of
// Attention::run, in its order.
void run_sparse(const Attention& attention, Address q, int64_t ldq, Address out, int64_t ldo, Address k_cache,
                Address v_cache, Address heavy, Address pages, int64_t ldp, Address rows, int num_rows,
                int max_len, int threads) {
    SparseArgs s{attention.a, at<SparseRow>(rows), num_rows, max_len};
    AttnArgs& a = s.a;
    a.q = at<float>(q), a.ldq = ldq, a.out = at<float>(out), a.ldo = ldo, a.cache.k = at<void>(k_cache),
    a.cache.v = at<void>(v_cache), a.cache.heavy = at<Heavy>(heavy);
    a.page_table = at<int32_t>(pages), a.ldp = ldp;
    const Kernels& k = kernels();
    const int n = threads > 0 ? threads : threads_for(sparse_bytes(s), 0);
    run_team(n, k.sparse_shared(s), k.sparse_local(s), [&](const Ctx& ctx) {
        SparseArgs args = s;
        args.work = ctx.shared();
        k.sparse_attention(args, ctx);
    });
}

void run_activation(Address x, int64_t ldx, Address y, int64_t ldy, int64_t rows, int64_t dim, int act,
                    bool gated, int threads) {
    ActArgs a;
    a.gated = gated;
    a.x = at<float>(x), a.ldx = ldx, a.y = at<float>(y), a.ldy = ldy, a.rows = rows, a.dim = dim, a.act = act;
    int n = threads > 0 ? threads : threads_for(double(rows) * double(dim) * 24, 0);
    const Kernels& k = kernels();
    run_team(n, 0, 0, [&](const Ctx& c) { k.activation(a, c); });
}

// Units of work a second by all threads: bytes read (kind 0) or operations: 1 float32, 2 bf16 pairs (0
// where the instruction set has none), 3 int8.
double measure(int kind, Address memory, size_t bytes, int threads) {
    const Kernels& k = kernels();
    double total = 0;
    if (kind == 2 && !k.pairs.ceiling) return 0;
    auto begin = std::chrono::steady_clock::now();
    run_team(threads, 0, 0, [&](const Ctx& c) {
        const size_t each = kind == 0 ? bytes / size_t(threads) / 256 * 256 : bytes;
        float sink = 1e-3f;
        double work = kind == 3   ? k.int8.ceiling(each)
                      : kind == 2 ? k.pairs.ceiling(each)
                                  : k.ceiling(kind, at<float>(memory + size_t(c.tid) * each * (kind == 0)),
                                              each, &sink);
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
    if (last > first) want_huge(at<void>(first), last - first);
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
    s.kind = ScanKind(kind), s.decays = decays;
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
void run_embed(Address ids, int64_t tokens, Address table, int dtype, int64_t vocab, int64_t dim, float scale,
               Address y, int64_t ldy) {
    EmbedArgs a;
    a.ids = at<int32_t>(ids), a.tokens = tokens, a.table = at<void>(table), a.dtype = dtype, a.vocab = vocab,
    a.dim = dim, a.scale = scale;
    a.y = at<float>(y), a.ldy = ldy;
    const Kernels& k = kernels();
    run_team(threads_for(double(tokens) * double(dim) * 8, 0), 0, 0, [&](const Ctx& c) { k.embed(a, c); });
}

// A pointer that Python sets as an address.
template <class T, class P>
void pointer(nb::class_<T>& of, const char* name, P* T::* field) {
    of.def_prop_rw(
        name, [field](const T& args) { return Address(args.*field); },
        [field](T& args, Address a) { args.*field = at<P>(a); });
}

// The parts of the kernels' arguments that last from step to step, and what a step passes.
void bind_program_args(nb::module_& m) {
    nb::enum_<Gate>(m, "Gate")
        .value("SIGMOID", Gate::SIGMOID)
        .value("SILU", Gate::SILU)
        .value("SOFTPLUS", Gate::SOFTPLUS)
        .value("TWICE_SIGMOID", Gate::TWICE_SIGMOID)
        .value("IDENTITY", Gate::IDENTITY);
    nb::enum_<ScanKind>(m, "ScanKind")
        .value("SELECTIVE", ScanKind::SELECTIVE)
        .value("DECAYED", ScanKind::DECAYED)
        .value("DELTA", ScanKind::DELTA);
    nb::enum_<RouterScore>(m, "RouterScore")
        .value("SOFTMAX", RouterScore::SOFTMAX)
        .value("SIGMOID", RouterScore::SIGMOID)
        .value("SOFTMAX_TOPK", RouterScore::SOFTMAX_TOPK)
        .value("SIGMOID_TOPK", RouterScore::SIGMOID_TOPK)
        .value("SPARSEMIXER", RouterScore::SPARSEMIXER);

    auto embed = nb::class_<EmbedArgs>(m, "EmbedArgs").def(nb::init<>());
    pointer(embed, "table", &EmbedArgs::table);
    pointer(embed, "positions_table", &EmbedArgs::positions_table);
    embed.def_rw("dtype", &EmbedArgs::dtype)
        .def_rw("vocab", &EmbedArgs::vocab)
        .def_rw("dim", &EmbedArgs::dim);
    embed.def_rw("scale", &EmbedArgs::scale).def_rw("position_offset", &EmbedArgs::position_offset);
    embed.def_rw("takes_first", &EmbedArgs::takes_first);

    auto norm = nb::class_<NormArgs>(m, "NormArgs").def(nb::init<>());
    pointer(norm, "weight", &NormArgs::weight);
    pointer(norm, "bias", &NormArgs::bias);
    norm.def_rw("dim", &NormArgs::dim)
        .def_rw("eps", &NormArgs::eps)
        .def_rw("layer_norm", &NormArgs::layer_norm);

    auto cache = nb::class_<Cache>(m, "Cache").def(nb::init<>());
    pointer(cache, "k", &Cache::k);
    pointer(cache, "v", &Cache::v);
    pointer(cache, "heavy", &Cache::heavy);
    cache.def_rw("dtype", &Cache::dtype).def_rw("page_size", &Cache::page_size);
    nb::class_<Heavy>(m, "Heavy")
        .def("__init__",
             [](Heavy* h, Address rows, Address labels, Address channels, int width, int top) {
                 new (h) Heavy{at<void>(rows), at<void>(labels), at<int32_t>(channels), width, top};
             })
        .def_prop_ro("address", [](const Heavy& h) { return Address(&h); });

    auto store = nb::class_<StoreArgs>(m, "StoreArgs").def(nb::init<>());
    store.def_rw("heads", &StoreArgs::heads).def_rw("kv_heads", &StoreArgs::kv_heads);
    store.def_rw("head_dim", &StoreArgs::head_dim).def_rw("v_dim", &StoreArgs::v_dim);
    store.def_rw("q_head", &StoreArgs::q_head).def_rw("k_lead", &StoreArgs::k_lead);
    store.def_rw("norm", &StoreArgs::norm).def_rw("layer_norm", &StoreArgs::layer_norm);
    pointer(store, "q_norm", &StoreArgs::q_norm);
    pointer(store, "k_norm", &StoreArgs::k_norm);
    pointer(store, "q_norm_bias", &StoreArgs::q_norm_bias);
    pointer(store, "k_norm_bias", &StoreArgs::k_norm_bias);
    store.def_rw("eps", &StoreArgs::eps).def_rw("rotary", &StoreArgs::rotary);
    store.def_rw("interleaved", &StoreArgs::interleaved).def_rw("cache", &StoreArgs::cache);

    auto attention = nb::class_<AttnArgs>(m, "AttnArgs").def(nb::init<>());
    attention.def_rw("heads", &AttnArgs::heads).def_rw("q_head", &AttnArgs::q_head);
    attention.def_rw("scale", &AttnArgs::scale).def_rw("softcap", &AttnArgs::softcap);
    attention.def_rw("window", &AttnArgs::window).def_rw("chunk", &AttnArgs::chunk);
    attention.def_rw("causal", &AttnArgs::causal);
    pointer(attention, "sinks", &AttnArgs::sinks);
    pointer(attention, "alibi_slopes", &AttnArgs::alibi_slopes);

    nb::class_<GateArgs>(m, "GateArgs")
        .def(nb::init<>())
        .def_rw("heads", &GateArgs::heads)
        .def_rw("width", &GateArgs::width)
        .def_rw("stride", &GateArgs::stride)
        .def_rw("act", &GateArgs::act)
        .def_rw("per_head", &GateArgs::per_head);

    auto head_norm = nb::class_<HeadNormArgs>(m, "HeadNormArgs").def(nb::init<>());
    pointer(head_norm, "weight", &HeadNormArgs::weight);
    head_norm.def_rw("heads", &HeadNormArgs::heads).def_rw("width", &HeadNormArgs::width);
    head_norm.def_rw("eps", &HeadNormArgs::eps).def_rw("scale", &HeadNormArgs::scale);
    head_norm.def_rw("act", &HeadNormArgs::act).def_rw("gates_last", &HeadNormArgs::gates_last);
    head_norm.def_rw("is_sum", &HeadNormArgs::is_sum);
    head_norm.def_rw("per_head_weights", &HeadNormArgs::per_head_weights);

    auto conv = nb::class_<ConvArgs>(m, "ConvArgs").def(nb::init<>());
    pointer(conv, "weight", &ConvArgs::weight);
    pointer(conv, "bias", &ConvArgs::bias);
    pointer(conv, "state", &ConvArgs::state);
    conv.def_rw("channels", &ConvArgs::channels)
        .def_rw("width", &ConvArgs::width)
        .def_rw("act", &ConvArgs::act);

    auto decay = nb::class_<DecayArgs>(m, "DecayArgs").def(nb::init<>());
    pointer(decay, "bias", &DecayArgs::bias);
    pointer(decay, "rate", &DecayArgs::rate);
    decay.def_rw("dim", &DecayArgs::dim).def_rw("low", &DecayArgs::low).def_rw("high", &DecayArgs::high);
    decay.def_rw("floor", &DecayArgs::floor).def_rw("is_factor", &DecayArgs::is_factor);

    auto scan = nb::class_<ScanArgs>(m, "ScanArgs").def(nb::init<>());
    pointer(scan, "a", &ScanArgs::a);
    pointer(scan, "skip", &ScanArgs::skip);
    pointer(scan, "state", &ScanArgs::state);
    scan.def_rw("kind", &ScanArgs::kind).def_rw("heads", &ScanArgs::heads).def_rw("keys", &ScanArgs::keys);
    scan.def_rw("values", &ScanArgs::values).def_rw("decays", &ScanArgs::decays);
    scan.def_rw("repeats", &ScanArgs::repeats);
    nb::class_<ScanSource>(m, "ScanSource")
        .def("__init__", [](ScanSource* self, int buffer, int64_t offset, int64_t head) {
            new (self) ScanSource{buffer, offset, head};
        });

    nb::class_<Xielu>(m, "Xielu")
        .def(nb::init<>())
        .def_rw("above", &Xielu::above)
        .def_rw("below", &Xielu::below)
        .def_rw("eps", &Xielu::eps)
        .def_rw("beta", &Xielu::beta);

    auto route = nb::class_<Route>(m, "Route").def(nb::init<>());
    pointer(route, "correction", &Route::correction);
    pointer(route, "expert_scale", &Route::expert_scale);
    route.def_rw("experts", &Route::experts).def_rw("top_k", &Route::top_k).def_rw("score", &Route::score);
    route.def_rw("renorm", &Route::renorm).def_rw("scale", &Route::scale).def_rw("jitter", &Route::jitter);
    route.def_rw("groups", &Route::groups).def_rw("groups_kept", &Route::groups_kept);
    route.def_rw("group_top2", &Route::group_top2);

    nb::class_<KvGroup>(m, "KvGroup")
        .def("__init__", [](KvGroup* self, Address page_table, int64_t stride, Address slots) {
            new (self) KvGroup{page_table, stride, slots};
        });
    nb::class_<RopeTable>(m, "RopeTable")
        .def("__init__", [](RopeTable* self, Address cos_sin, bool by_token) {
            new (self) RopeTable{cos_sin, by_token};
        });
    nb::class_<Step>(m, "Step")
        .def(nb::init<>())
        .def_rw("tokens", &Step::tokens)
        .def_rw("ids", &Step::ids)
        .def_rw("positions", &Step::positions)
        .def_rw("num_seqs", &Step::num_seqs)
        .def_rw("query_start", &Step::query_start)
        .def_rw("kv_len", &Step::kv_len)
        .def_rw("groups", &Step::groups)
        .def_rw("ropes", &Step::ropes)
        .def_rw("rows", &Step::rows)
        .def_rw("num_rows", &Step::num_rows)
        .def_rw("logits", &Step::logits)
        .def_rw("ld_logits", &Step::ld_logits)
        .def_rw("hidden", &Step::hidden)
        .def_rw("ld_hidden", &Step::ld_hidden)
        .def_rw("taps", &Step::taps)
        .def_rw("ld_taps", &Step::ld_taps)
        .def_rw("embeds", &Step::embeds)
        .def_rw("embeds_mask", &Step::embeds_mask)
        .def_rw("sparse_rows", &Step::sparse_rows)
        .def_rw("is_sparse", &Step::is_sparse)
        .def_rw("num_sparse", &Step::num_sparse)
        .def_rw("max_sparse_len", &Step::max_sparse_len)
        .def_rw("runs", &Step::runs)
        .def_rw("num_runs", &Step::num_runs)
        .def_rw("lora", &Step::lora)
        .def_rw("group_tokens", &Step::group_tokens)
        .def_rw("lora_of_all", &Step::lora_of_all)
        .def_rw("first_op", &Step::first_op)
        .def_rw("num_ops", &Step::num_ops)
        .def_rw("threads", &Step::threads);
}

// Streams and groups that Python calls: one thread, and RankLost where the segment is lost.
void bind_ranks(nb::module_& m) {
    using Release = nb::call_guard<nb::gil_scoped_release>;
    nb::register_exception_translator([](const std::exception_ptr& error, void*) {
        try {
            std::rethrow_exception(error);
        } catch (const RankLost& lost) {
            PyErr_SetString(nb::module_::import_("radixlm.base.errors").attr("RankLost").ptr(), lost.what());
        }
    });
    nb::class_<Segment>(m, "Segment")
        .def(nb::init<int, size_t, int, double>(), arg("fd"), arg("num_bytes"), arg("num_flags"),
             arg("spin_us"))
        .def("poison", &Segment::poison)
        .def("reason", &Segment::reason)
        .def("check", &Segment::check)
        .def("take_waited_s", &Segment::take_waited_s);
    nb::class_<RankGroup>(m, "RankGroup");
    nb::class_<CalledGroup, RankGroup>(m, "CalledGroup").def(nb::init<int, int, CalledGroup::Call>());
    nb::class_<ShmGroup, RankGroup>(m, "ShmGroup")
        .def(nb::init<Segment&, int, std::vector<int>, int, size_t, size_t, double>(), nb::keep_alive<1, 2>())
        .def(
            "gather",
            [](ShmGroup& g, Address x, int64_t ldx, Address y, int64_t ldy, int64_t rows,
               const std::vector<int64_t>& bounds, int target) {
                const int copies_mb = 4;  // below, waking threads costs more than they save
                const int threads = rows * bounds.back() < copies_mb << 20 ? 1 : max_threads();
                run_team(threads, 0, 0, [&](const Ctx& c) {
                    g.gather(c, at<char>(x), ldx, at<char>(y), ldy, rows, bounds.data(), target);
                });
                g.segment.check();
            },
            Release())
        .def(
            "all_reduce",
            [](ShmGroup& g, Address x, Address y, int64_t count) {
                run_team(1, 0, 0, [&](const Ctx& c) { g.all_reduce(c, at<float>(x), at<float>(y), count); });
                g.segment.check();
            },
            Release())
        .def(
            "all_to_all",
            [](ShmGroup& g, Address x, const std::vector<int64_t>& send, Address y,
               const std::vector<int64_t>& receive) {
                g.all_to_all(at<char>(x), send, at<char>(y), receive);
                g.segment.check();
            },
            Release())
        .def("barrier", [](ShmGroup& g) { g.barrier(), g.segment.check(); }, Release());
    nb::class_<Stream>(m, "Stream")
        .def(nb::init<Segment&, int, std::vector<int>, int, size_t, size_t>(), nb::keep_alive<1, 2>())
        .def(
            "write",
            [](Stream& s, Address data, size_t count, double timeout_s) {
                s.write(at<char>(data), count, timeout_s), s.segment.check();
            },
            Release())
        .def("write_bytes",
             [](Stream& s, nb::bytes data, double timeout_s) {
                 nb::gil_scoped_release free_gil;
                 s.write((const char*)data.data(), data.size(), timeout_s), s.segment.check();
             })
        .def(
            "poll",
            [](Stream& s, double timeout_s) {
                const bool found = s.poll(timeout_s);
                s.segment.check();
                return found;
            },
            Release())
        .def("read_bytes",
             [](Stream& s, size_t count, double timeout_s) {
                 std::string data(count, '\0');
                 {
                     nb::gil_scoped_release free_gil;
                     s.read(data.data(), count, timeout_s), s.segment.check();
                 }
                 return nb::bytes(data.data(), count);
             })
        .def(
            "read",
            [](Stream& s, Address data, size_t count, double timeout_s) {
                s.read(at<char>(data), count, timeout_s), s.segment.check();
            },
            Release());
}

}  // namespace

NB_MODULE(_cpu, m) {
    nb::set_leak_warnings(false);  // a process that exits with an open engine keeps its weights
    using Release = nb::call_guard<nb::gil_scoped_release>;
    m.def("isa", [] { return std::string(kernels().name); });
    m.def("compiled_isas", &compiled_isas);
    m.def("supported_isas", &supported_isas);
    m.def("processor_has", &processor_has);
    m.def("select_isa", &select_isa);
    m.def("measure", &measure, Release());
    m.def("advise_huge", &advise_huge);
    m.def(
        "byte_planes",
        [](Address x, int64_t n, int width, Address y, bool joins) {
            byte_planes(at<const uint8_t>(x), n, width, at<uint8_t>(y), joins);
        },
        Release());
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
        .def("run", &Attention::run, arg("q"), arg("ldq"), arg("out"), arg("ldo"), arg("k_cache"),
             arg("v_cache"), arg("pages"), arg("ldp"), arg("query_start"), arg("kv_len"), arg("num_seqs"),
             arg("tree"), arg("tree_ld"), arg("threads"), arg("is_sparse") = 0, Release())
        .def("run_sparse", &run_sparse, Release());
    nb::class_<Experts>(m, "Experts")
        .def(nb::init<const std::vector<const Linear*>&, const std::vector<const Linear*>&, int>())
        .def("run", &Experts::run, arg("x"), arg("ldx"), arg("tokens"), arg("ids"), arg("weights"),
             arg("top_k"), arg("y"), arg("ldy"), arg("threads"), arg("lora"), arg("site"), arg("part").none(),
             Release())
        .def("combine", &Experts::combine, Release())
        .def("take_chosen", &Experts::take_chosen)
        .def_rw("records", &Experts::records)
        .def_rw("blocks", &Experts::blocks);
    nb::class_<ExpertPart>(m, "ExpertPart")
        .def(
            "__init__",
            [](ExpertPart* p, RankGroup* group, std::vector<int64_t> starts, Address table, int variants,
               int width, RankGroup* inside, std::vector<int64_t> inner, std::vector<int64_t> dim) {
                new (p) ExpertPart{group,  std::move(starts), at<int32_t>(table), variants, width,
                                   inside, std::move(inner),  std::move(dim)};
            },
            arg("group").none(), arg("starts"), arg("table"), arg("variants"), arg("width"),
            arg("inside").none(), arg("inner"), arg("dim"), nb::keep_alive<1, 2>(), nb::keep_alive<1, 7>());
    nb::class_<HeadLinear>(m, "HeadLinear")
        .def(nb::init<const std::vector<const Linear*>&>())
        .def("run", &HeadLinear::run, Release());
    bind_program_args(m);
    bind_ranks(m);
    nb::class_<LoraAdapter>(m, "LoraAdapter").def(nb::init<>()).def("add", &LoraAdapter::add);
    nb::class_<LoraBatch>(m, "LoraBatch")
        .def(nb::init<std::vector<const LoraAdapter*>, Address, int64_t>(), nb::keep_alive<1, 2>())
        .def_prop_ro("address", &LoraBatch::address)
        .def("has", &LoraBatch::has)
        .def("add_to", &LoraBatch::add_to, Release());
    nb::class_<Program>(m, "Program")
        .def(nb::init<>())
        .def("buffer", &Program::buffer, arg("width"), arg("rows_per_token") = 1)
        .def("embed", &Program::embed, arg("y"), arg("tied").none(), arg("args"), arg("replaced"))
        .def("norm", &Program::norm, arg("x"), arg("y"), arg("args"), arg("offset") = 0,
             arg("selected") = false)
        .def("linear", &Program::linear, arg("x"), arg("y"), arg("w"), arg("residual") = -1,
             arg("out_scale") = 1.0f, arg("act") = int(ACT_NONE), arg("selected") = false, arg("site") = -1,
             arg("lora_x") = -1, arg("offset") = 0)
        .def("store", &Program::store, arg("x"), arg("offsets"), arg("args"), arg("rope"), arg("group"),
             arg("parts"))
        .def("latent_store", &Program::latent_store, arg("q"), arg("kv"), arg("absorbed"), arg("args"),
             arg("rope"), arg("group"))
        .def("heads", &Program::heads, arg("x"), arg("y"), arg("w"), arg("x_head"), arg("y_head"),
             arg("site") = -1)
        .def("attention", &Program::attention, arg("q"), arg("y"), arg("args"))
        .def("gate", &Program::gate, arg("x"), arg("y"), arg("args"), arg("offset") = 0,
             arg("selected") = false)
        .def("head_norm", &Program::head_norm, arg("x"), arg("y"), arg("args"), arg("x_offset") = 0,
             arg("y_offset") = 0, arg("gate") = -1, arg("gate_offset") = 0)
        .def("conv", &Program::conv, arg("x"), arg("y"), arg("args"), arg("offset"), arg("times") = -1,
             arg("gate") = -1)
        .def("decay", &Program::decay, arg("x"), arg("offset"), arg("step"), arg("log"), arg("args"))
        .def("scan", &Program::scan, arg("inputs"), arg("y"), arg("args"))
        .def("add", &Program::add, arg("x"), arg("y"), arg("dim"), arg("scale") = 1.0f,
             arg("selected") = false)
        .def("gather", &Program::gather, arg("x"), arg("y"), arg("dim"), arg("offset") = 0)
        .def("columns", &Program::columns, arg("x"), arg("y"), arg("index"), arg("dim"), arg("selected"))
        .def("scale", &Program::scale, arg("y"), arg("offset"), arg("dim"), arg("scale") = 1.0f,
             arg("cap") = 0.0f, arg("sigmoid") = false, arg("selected") = false)
        .def("scale_heads", &Program::scale_heads, arg("y"), arg("factors"), arg("heads"), arg("head_dim"),
             arg("stride"))
        .def("xielu", &Program::xielu, arg("y"), arg("dim"), arg("coefficients"), arg("selected"))
        .def("moe", &Program::moe, arg("x"), arg("logits"), arg("y"), arg("experts"), arg("route"),
             arg("scale"), arg("adds"), arg("zero_experts"), arg("zero_experts_are_identity"),
             arg("scales_input"), arg("selected"), arg("part").none(), arg("site") = -1)
        .def("hidden", &Program::hidden, arg("x"), arg("dim"))
        .def("tap", &Program::tap, arg("x"), arg("dim"), arg("offset"), arg("selected"))
        .def("all_gather", &Program::all_gather, nb::keep_alive<1, 4>(), arg("y"), arg("bounds"),
             arg("group"), arg("offset") = 0, arg("selected") = false, arg("x") = -1)
        .def("gather_rows", &Program::gather_rows, nb::keep_alive<1, 4>(), arg("x"), arg("y"), arg("group"),
             arg("each"))
        .def("own_rows", &Program::own_rows, nb::keep_alive<1, 5>(), arg("x"), arg("y"), arg("dim"),
             arg("group"), arg("each"))
        .def("gather_logits", &Program::gather_logits, nb::keep_alive<1, 3>(), arg("bounds"), arg("group"),
             arg("target") = 0)
        .def("logits", &Program::logits, arg("x"), arg("w"), arg("scale"), arg("softcap"), arg("site") = -1,
             arg("lora_x") = -1, arg("first") = 0)
        .def("run", &Program::run, Release())
        .def("profile", &Program::profile)
        .def_rw("profiling", &Program::profiling)
        .def_rw("of_all", &Program::of_all)
        .def_prop_ro("num_ops", &Program::num_ops);
    m.attr("STORE_Q") = int(Program::STORE_Q);
    m.attr("STORE_K") = int(Program::STORE_K);
    m.attr("STORE_CACHE") = int(Program::STORE_CACHE);
    m.attr("MAX_CONV") = MAX_CONV;
    m.def("norm", &run_norm, Release());
    m.def("store", &run_store);
    m.def("activation", &run_activation, Release());
    m.def("embed", &run_embed, Release());
    m.def("scan", &run_scan, Release());
    m.def("sample", &run_sample, Release());
    m.attr("SAMPLE_ROW_BYTES") = int(sizeof(SampleRow));
}

// Kernels that Python calls one by one.
#include <algorithm>
#include <array>

#include "../runtime/program.h"
#include "../runtime/runtime.h"
#include "bind.h"

namespace radix {
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
                    bool gated, GateLimit limit, int threads) {
    ActArgs a;
    a.limit = limit;
    a.gated = gated;
    a.x = at<float>(x), a.ldx = ldx, a.y = at<float>(y), a.ldy = ldy, a.rows = rows, a.dim = dim, a.act = act;
    int n = threads > 0 ? threads : threads_for(double(rows) * double(dim) * 24, 0);
    const Kernels& k = kernels();
    run_team(n, 0, 0, [&](const Ctx& c) { k.activation(a, c); });
}

void run_sample(Address rows, int64_t num_rows, int64_t vocab, Address tokens, int threads) {
    SampleArgs a;
    a.rows = at<SampleRow>(rows), a.num_rows = num_rows, a.vocab = vocab, a.tokens = at<int64_t>(tokens);
    sample(a, threads);
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

void bind_kernels(nb::module_& m) {
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
    nb::class_<GateLimit>(m, "GateLimit").def("__init__", [](GateLimit* g, float limit, bool after) {
        new (g) GateLimit{limit, after};
    });
    nb::class_<Experts>(m, "Experts")
        .def(nb::init<const std::vector<const Linear*>&, const std::vector<const Linear*>&, int, GateLimit>())
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
    m.def("norm", &run_norm, Release());
    m.def("store", &run_store);
    m.def("activation", &run_activation, Release());
    m.def("embed", &run_embed, Release());
    m.def("scan", &run_scan, Release());
    m.def("sample", &run_sample, Release());
    m.attr("SAMPLE_ROW_BYTES") = int(sizeof(SampleRow));
}

}  // namespace radix

// radixlm._cpu: kernels called with raw addresses; the GIL is released around every one.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "runtime/runtime.h"

namespace nb = nanobind;
using namespace radix;
using nb::arg;

namespace {

using Address = uintptr_t;
template <class T>
T* at(Address a) {
    return reinterpret_cast<T*>(a);
}

// Zeroed memory for packed weights, on huge pages where the system gives them.
struct Memory {
    void* data = nullptr;
    size_t bytes = 0;
    explicit Memory(size_t n);
    ~Memory();
    Memory(const Memory&) = delete;
    Address address() const { return Address(data); }
};

struct Linear {
    Weight w;
    Linear(int64_t n, int64_t k, int format, int group, bool paired, Address data, Address scale, Address offset, Address column_sum, Address bias) {
        w.n = n, w.k = k, w.format = format, w.group = group, w.paired = paired;
        w.data = at<void>(data), w.scale = at<float>(scale), w.offset = at<float>(offset);
        w.column_sum = at<int32_t>(column_sum), w.bias = at<float>(bias);
    }
    double bytes() const {
        static const double each[] = {4, 2, 2, 1, 1, 0.5, 0.5};
        return double(w.n) * double(w.k) * each[w.format];
    }
    void run(Address x, int64_t ldx, int64_t m, Address y, int64_t ldy, Address residual, int64_t ldr, float out_scale, int act, Address rows, int threads) const {
        LinearArgs a;
        a.w = w, a.x = at<float>(x), a.ldx = ldx, a.m = m, a.rows = at<int32_t>(rows);
        a.y = at<float>(y), a.ldy = ldy, a.residual = at<float>(residual), a.ldr = ldr, a.out_scale = out_scale, a.act = act;
        int n = threads > 0 ? threads : threads_for(bytes(), 2.0 * double(m) * double(w.n) * double(w.k));
        const Kernels& k = kernels();
        run_team(n, k.linear_shared(a), k.linear_local(a, n), [&](const Ctx& c) { k.linear(a, c); });
    }
    void pack(Address src, int dtype, int64_t ld, int64_t rows, int64_t first_row) const {
        PackArgs a;
        a.src = at<void>(src), a.src_dtype = dtype, a.ld = ld, a.rows = rows, a.first_row = first_row, a.w = w;
        const Kernels& k = kernels();
        run_team(threads_for(double(rows) * double(w.k) * 16, 0), 0, 0, [&](const Ctx& c) { k.pack(a, c); });
    }
    void embed(Address ids, int64_t tokens, Address y, int64_t ldy, float scale) const {
        EmbedArgs a;
        a.ids = at<int32_t>(ids), a.tokens = tokens, a.vocab = w.n, a.dim = w.k, a.packed = 1, a.w = w, a.scale = scale;
        a.y = at<float>(y), a.ldy = ldy;
        const Kernels& k = kernels();
        run_team(threads_for(double(tokens) * double(w.k) * 64, 0), 0, 0, [&](const Ctx& c) { k.embed(a, c); });
    }
};

Cache make_cache(Address k, Address v, int dtype, int kv_heads, int k_dim, int v_dim, int page_size) {
    Cache c;
    c.k = at<void>(k), c.v = at<void>(v), c.dtype = dtype, c.kv_heads = kv_heads, c.k_dim = k_dim, c.v_dim = v_dim, c.page_size = page_size;
    return c;
}

void run_norm(Address x, int64_t ldx, Address residual, int64_t ldr, Address weight, Address bias, Address y, int64_t ldy, int64_t rows, int64_t dim,
              float eps, float offset, float x_scale, bool layer, int threads) {
    NormArgs a;
    a.x = at<float>(x), a.ldx = ldx, a.residual = at<float>(residual), a.ldr = ldr, a.weight = at<float>(weight), a.bias = at<float>(bias);
    a.y = at<float>(y), a.ldy = ldy, a.rows = rows, a.dim = dim, a.eps = eps, a.offset = offset, a.x_scale = x_scale, a.layer_norm = layer;
    int n = threads > 0 ? threads : threads_for(double(rows) * double(dim) * 12, 0);
    const Kernels& k = kernels();
    run_team(n, 0, 0, [&](const Ctx& c) { k.norm(a, c); });
}

void run_store(nb::tuple qkv, nb::tuple shape, nb::tuple norm, nb::tuple rope, Address slots, nb::tuple cache, int threads) {
    StoreArgs a;
    a.q = at<float>(nb::cast<Address>(qkv[0])), a.ldq = nb::cast<int64_t>(qkv[1]);
    a.k = at<float>(nb::cast<Address>(qkv[2])), a.ldk = nb::cast<int64_t>(qkv[3]);
    a.v = at<float>(nb::cast<Address>(qkv[4])), a.ldv = nb::cast<int64_t>(qkv[5]);
    a.tokens = nb::cast<int64_t>(shape[0]), a.heads = nb::cast<int>(shape[1]), a.kv_heads = nb::cast<int>(shape[2]);
    a.head_dim = nb::cast<int>(shape[3]), a.v_dim = nb::cast<int>(shape[4]);
    a.norm = nb::cast<int>(norm[0]), a.q_norm = at<float>(nb::cast<Address>(norm[1])), a.k_norm = at<float>(nb::cast<Address>(norm[2]));
    a.eps = nb::cast<float>(norm[3]), a.norm_offset = nb::cast<float>(norm[4]);
    a.cos_sin = at<float>(nb::cast<Address>(rope[0])), a.positions = at<int32_t>(nb::cast<Address>(rope[1]));
    a.rotary = nb::cast<int>(rope[2]), a.interleaved = nb::cast<int>(rope[3]);
    a.slots = at<int32_t>(slots);
    a.cache = make_cache(nb::cast<Address>(cache[0]), nb::cast<Address>(cache[1]), nb::cast<int>(cache[2]), nb::cast<int>(cache[3]),
                         nb::cast<int>(cache[4]), nb::cast<int>(cache[5]), nb::cast<int>(cache[6]));
    int n = threads > 0 ? threads : threads_for(double(a.tokens) * (a.heads + 2 * a.kv_heads) * a.head_dim * 16, 0);
    nb::gil_scoped_release free_gil;
    const Kernels& k = kernels();
    run_team(n, 0, 0, [&](const Ctx& c) { k.store(a, c); });
}

struct Attention {
    AttnArgs a;
    AttnPlan plan;
    Attention(int heads, int kv_heads, int k_dim, int v_dim, int page_size, int dtype, float scale, int window, float softcap, bool causal, Address sinks) {
        a.heads = heads, a.scale = scale, a.window = window, a.softcap = softcap, a.causal = causal, a.sinks = at<float>(sinks);
        a.cache = make_cache(0, 0, dtype, kv_heads, k_dim, v_dim, page_size);
    }
    void run(Address q, int64_t ldq, Address out, int64_t ldo, Address k_cache, Address v_cache, Address pages, int64_t ldp, Address query_start, Address kv_len,
             int num_seqs, Address tree, int64_t tree_ld, int threads) {
        AttnArgs c = a;
        c.q = at<float>(q), c.ldq = ldq, c.out = at<float>(out), c.ldo = ldo, c.cache.k = at<void>(k_cache), c.cache.v = at<void>(v_cache);
        c.page_table = at<int32_t>(pages), c.ldp = ldp, c.query_start = at<int32_t>(query_start), c.kv_len = at<int32_t>(kv_len), c.num_seqs = num_seqs;
        c.tree = at<uint8_t>(tree), c.tree_ld = tree_ld;
        plan.make(c, threads > 0 ? threads : max_threads());
        const Kernels& k = kernels();
        int n = threads > 0 ? threads : threads_for(plan.bytes, plan.flops);
        run_team(n, plan.partial_floats * 4, k.attention_local(c), [&](const Ctx& ctx) {
            AttnArgs mine = c;
            mine.tasks = plan.tasks.data(), mine.num_tasks = plan.num_tasks, mine.num_merges = plan.num_merges;
            mine.partials = (float*)ctx.shared();
            k.attention(mine, ctx);
        });
    }
};

void run_activation(Address x, int64_t ldx, Address y, int64_t ldy, int64_t rows, int64_t dim, int act, int threads) {
    ActArgs a;
    a.x = at<float>(x), a.ldx = ldx, a.y = at<float>(y), a.ldy = ldy, a.rows = rows, a.dim = dim, a.act = act;
    int n = threads > 0 ? threads : threads_for(double(rows) * double(dim) * 24, 0);
    const Kernels& k = kernels();
    run_team(n, 0, 0, [&](const Ctx& c) { k.activation(a, c); });
}

void run_embed(Address ids, int64_t tokens, Address table, int dtype, int64_t vocab, int64_t dim, float scale, Address y, int64_t ldy) {
    EmbedArgs a;
    a.ids = at<int32_t>(ids), a.tokens = tokens, a.table = at<void>(table), a.dtype = dtype, a.vocab = vocab, a.dim = dim, a.scale = scale;
    a.y = at<float>(y), a.ldy = ldy;
    const Kernels& k = kernels();
    run_team(threads_for(double(tokens) * double(dim) * 8, 0), 0, 0, [&](const Ctx& c) { k.embed(a, c); });
}

}  // namespace

#include <sys/mman.h>
#include <cstdlib>
#include <cstring>
#include <new>

Memory::Memory(size_t n) {
    const size_t huge = size_t(2) << 20;
    if (n >= huge) {
        bytes = (n + huge - 1) / huge * huge;
        if (posix_memalign(&data, huge, bytes)) throw std::bad_alloc();
        madvise(data, bytes, MADV_HUGEPAGE);
    } else {
        bytes = (n + 4095) / 4096 * 4096;
        if (bytes == 0) bytes = 4096;
        if (posix_memalign(&data, 4096, bytes)) throw std::bad_alloc();
    }
    std::memset(data, 0, bytes);
}
Memory::~Memory() { std::free(data); }

NB_MODULE(_cpu, m) {
    using Release = nb::call_guard<nb::gil_scoped_release>;
    m.def("isa", [] { return std::string(kernels().name); });
    m.def("compiled_isas", &compiled_isas);
    m.def("supported_isas", &supported_isas);
    m.def("processor_has", &processor_has);
    m.def("select_isa", &select_isa);
    m.def("max_threads", &max_threads);
    m.def("set_max_threads", &set_max_threads);

    nb::class_<Memory>(m, "Memory").def(nb::init<size_t>()).def_prop_ro("address", &Memory::address).def_ro("num_bytes", &Memory::bytes);
    nb::class_<Linear>(m, "Linear")
        .def(nb::init<int64_t, int64_t, int, int, bool, Address, Address, Address, Address, Address>())
        .def("run", &Linear::run, Release())
        .def("pack", &Linear::pack, Release())
        .def("embed", &Linear::embed, Release());
    nb::class_<Attention>(m, "Attention")
        .def(nb::init<int, int, int, int, int, int, float, int, float, bool, Address>())
        .def("run", &Attention::run, Release());
    m.def("norm", &run_norm, Release());
    m.def("store", &run_store);
    m.def("activation", &run_activation, Release());
    m.def("embed", &run_embed, Release());
}

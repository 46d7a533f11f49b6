// Step programs: what lasts from step to step, what a step passes, adapters.
#include "../runtime/program.h"

#include "../runtime/lora.h"
#include "bind.h"

namespace radix {
namespace {

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
        .value("DELTA", ScanKind::DELTA)
        .value("CHANNELS", ScanKind::CHANNELS);
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

    nb::class_<ActArgs>(m, "ActArgs")
        .def(nb::init<>())
        .def_rw("dim", &ActArgs::dim)
        .def_rw("act", &ActArgs::act)
        .def_rw("gated", &ActArgs::gated)
        .def_rw("limit", &ActArgs::limit);

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
    nb::class_<Draws>(m, "Draws")
        .def(nb::init<>())
        .def_rw("passes", &Draws::passes)
        .def_rw("rows", &Draws::rows)
        .def_rw("counts", &Draws::counts)
        .def_rw("tokens", &Draws::tokens)
        .def_rw("is_bad", &Draws::is_bad)
        .def_rw("slots", &Draws::slots)
        .def_rw("vocab", &Draws::vocab)
        .def_rw("suppressed", &Draws::suppressed)
        .def_rw("num_suppressed", &Draws::num_suppressed)
        .def_rw("ends", &Draws::ends)
        .def_rw("told", &Draws::told);
}

}  // namespace

void bind_program(nb::module_& m) {
    bind_program_args(m);
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
        .def("activation", &Program::activation, arg("x"), arg("y"), arg("args"), arg("selected"))
        .def("head_norm", &Program::head_norm, arg("x"), arg("y"), arg("args"), arg("x_offset") = 0,
             arg("y_offset") = 0, arg("gate") = -1, arg("gate_offset") = 0)
        .def("conv", &Program::conv, arg("x"), arg("y"), arg("args"), arg("offset"), arg("times") = -1,
             arg("gate") = -1)
        .def("decay", &Program::decay, arg("x"), arg("offset"), arg("step"), arg("log"), arg("args"))
        .def("scan", &Program::scan, arg("inputs"), arg("y"), arg("args"))
        .def("add", &Program::add, arg("x"), arg("y"), arg("dim"), arg("scale") = 1.0f,
             arg("selected") = false)
        .def("add_weighted", &Program::add_weighted, arg("x"), arg("y"), arg("dim"), arg("weights"),
             arg("column"), arg("shift") = 0.0f, arg("selected") = false)
        .def("copy", &Program::copy, arg("x"), arg("y"), arg("dim"), arg("y_offset") = 0,
             arg("selected") = false)
        .def("affine", &Program::affine, arg("y"), arg("shift"), arg("factor"), arg("dim"),
             arg("selected") = false)
        .def("above_normal", &Program::above_normal, arg("y"), arg("dim"), arg("deviations"), arg("selected"))
        .def("size_as", &Program::size_as, arg("x"), arg("y"), arg("dim"), arg("least"),
             arg("selected") = false)
        .def("rg_lru", &Program::rg_lru, arg("x"), arg("gates"), arg("log"), arg("dim"), arg("head"))
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
        .def("go_on", &Program::go_on, Release(), arg("step"), arg("draws"))
        .def("profile", &Program::profile)
        .def_rw("profiling", &Program::profiling)
        .def_rw("of_all", &Program::of_all)
        .def_rw_static("together_from", &Program::together_from)
        .def_prop_ro("num_ops", &Program::num_ops);
    m.attr("STORE_Q") = int(Program::STORE_Q);
    m.attr("STORE_K") = int(Program::STORE_K);
    m.attr("STORE_CACHE") = int(Program::STORE_CACHE);
    m.attr("MAX_CONV") = MAX_CONV;
}

}  // namespace radix

// radixlm._cpu: instruction sets, threads and memory; csrc/bind/ has the kernels, programs and ranks.
#include <chrono>

#include "bind/bind.h"

using namespace radix;

namespace {

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

}  // namespace

NB_MODULE(_cpu, m) {
    nb::set_leak_warnings(false);  // a process that exits with an open engine keeps its weights
    m.def("isa", [] { return std::string(kernels().name); });
    m.def("compiled_isas", &compiled_isas);
    m.def("supported_isas", &supported_isas);
    m.def("select_isa", &select_isa);
    m.def("measure", &measure, Release());
    m.def("advise_huge", &advise_huge);
    m.def(
        "byte_planes",
        [](Address x, int64_t n, int width, Address y, bool joins) {
            byte_planes(at<const uint8_t>(x), n, width, at<uint8_t>(y), joins);
        },
        Release());
    m.def(
        "copy_pages",
        [](Address pool, int64_t layers, int64_t layer_bytes, int64_t page_bytes, Address pages, Address rows,
           int64_t count, int64_t start, bool to_pool, bool is_team) {
            const PageRows all{
                at<uint8_t>(pool),        layers, layer_bytes, page_bytes, at<const int32_t>(pages),
                at<uint8_t* const>(rows), start};
            const int64_t pieces = count * layers;
            const int threads = is_team ? threads_for(double(pieces * page_bytes), 0) : 1;
            run_team(threads, 0, 0, [&](const Ctx& c) {
                c.each(pieces, 8, [&](int64_t begin, int64_t end) { copy_pages(all, begin, end, to_pool); });
            });
        },
        Release());
    m.def("lend_memory", &lend_memory);
    m.def("end_lending", &end_lending);
    nb::class_<Memory>(m, "Memory")
        .def(nb::init<size_t>())
        .def_prop_ro("address", &Memory::address)
        .def_ro("num_bytes", &Memory::bytes);
    m.def("max_threads", &max_threads);
    m.def("set_max_threads", &set_max_threads);
    bind_kernels(m);
    bind_program(m);
    bind_ranks(m);
}

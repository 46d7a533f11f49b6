// Ranks of one host.
#include "../runtime/shm.h"
#include "bind.h"

namespace radix {

// Streams and groups that Python calls: one thread, and RankLost where the segment is lost.
void bind_ranks(nb::module_& m) {
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
        .def(nb::init<Segment&, int, std::vector<int>, int, size_t, size_t, size_t, double>(),
             nb::keep_alive<1, 2>())
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

}  // namespace radix

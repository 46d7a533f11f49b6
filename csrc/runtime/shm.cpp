#include "shm.h"

#include <sys/mman.h>
#include <unistd.h>
#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#endif

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <new>
#include <utility>

namespace radix {

namespace {

constexpr uint32_t POISON = 1u << 31, COUNT = POISON - 1, UNIT = 64;
constexpr size_t MAX_REASON = 1024;
using Clock = std::chrono::steady_clock;

struct Header {
    std::atomic<uint32_t> poisoned;
    char reason[MAX_REASON];
};

bool has_come(uint32_t value, uint32_t count) { return ((value - count) & COUNT) < POISON / 2; }
double since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

void sleep_at(std::atomic<uint32_t>& word, uint32_t value, double seconds) {
#if defined(__linux__)
    timespec most{time_t(seconds), long((seconds - double(time_t(seconds))) * 1e9)};
    syscall(SYS_futex, &word, FUTEX_WAIT, value, &most, nullptr, 0);
#else
    usleep(100);
#endif
}
void wake_all([[maybe_unused]] std::atomic<uint32_t>& word) {
#if defined(__linux__)
    syscall(SYS_futex, &word, FUTEX_WAKE, 1 << 30, nullptr, nullptr, 0);
#endif
}

// Rows of `width` bytes, shared by the threads of a team.
void copy(const Ctx& ctx, const char* x, int64_t ldx, char* y, int64_t ldy, int64_t rows, int64_t width) {
    if (width <= 0 || x == y) return;
    if (rows == 1)
        return ctx.each(width, 1 << 15, [&](int64_t b, int64_t e) { memcpy(y + b, x + b, size_t(e - b)); });
    ctx.each(rows, 8, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; i++) memcpy(y + i * ldy, x + i * ldx, size_t(width));
    });
}

}  // namespace

Segment::Segment(int fd, size_t n, int flags, double spin_us)
    : bytes(n), num_flags(flags), spin_s(spin_us * 1e-6) {
    void* got = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (got == MAP_FAILED) throw std::bad_alloc();
    base = (char*)got;
}
Segment::~Segment() { munmap(base, bytes); }

void Segment::poison(const std::string& why) {
    Header& header = *(Header*)base;
    uint32_t clean = 0;
    if (header.poisoned.compare_exchange_strong(clean, 1)) {
        const size_t n = std::min(why.size(), MAX_REASON - 1);
        memcpy(header.reason, why.data(), n);
        header.poisoned.store(2);
    }
    for (int i = 0; i < num_flags; i++) flag(i)->value.fetch_or(POISON), wake_all(flag(i)->value);
}

std::string Segment::reason() const {
    const Header& header = *(const Header*)base;
    return header.poisoned.load() == 2 ? std::string(header.reason) : "";
}

void Segment::advance(Flag& flag, uint32_t by) {
    uint32_t old = flag.value.load(std::memory_order_relaxed);
    while (!flag.value.compare_exchange_weak(old, (old & POISON) | ((old + by) & COUNT))) {}
    if (flag.sleepers.load()) wake_all(flag.value);
}

bool Segment::wait(Flag& flag, uint32_t count, double timeout_s, int rank) {
    if (lost()) return false;
    uint32_t value = flag.value.load(std::memory_order_acquire);
    if (!(value & POISON) && has_come(value, count)) return true;
    const auto start = Clock::now();
    // Sleeps are short, and one that took much longer counts as twice its length: then this process was
    // suspended, and the others may have been too.
    const double step_s = std::clamp(timeout_s / 8, 1e-3, 5.0);
    auto last = start;
    for (double past = 0; !(value & POISON) && !has_come(value, count);) {
        if (past > timeout_s) {
            if (rank < 0) return false;
            char text[80];
            snprintf(text, sizeof text, "rank %d was silent for %g s", rank, timeout_s);
            fail(text);
            return false;
        }
        if (past < spin_s) {
            for (int i = 0; i < 16; i++) {
#if defined(__x86_64__)
                _mm_pause();
#endif
            }
        } else {
            flag.sleepers.fetch_add(1);
            value = flag.value.load();
            if (!(value & POISON) && !has_come(value, count))
                sleep_at(flag.value, value, std::min(timeout_s - past, step_s) + 1e-4);
            flag.sleepers.fetch_sub(1);
        }
        const auto now = Clock::now();
        past += std::min(std::chrono::duration<double>(now - last).count(), 2 * step_s);
        last = now;
        value = flag.value.load(std::memory_order_acquire);
    }
    waited_ns += int64_t(since(start) * 1e9);
    if (!(value & POISON)) return true;
    const std::string why = reason();
    fail(why.empty() ? "a rank is lost" : why);
    return false;
}

void Segment::fail(const std::string& why) {
    std::lock_guard<std::mutex> guard(once);
    if (!lost()) failure = why;
    is_lost.store(true, std::memory_order_release);
}
double Segment::take_waited_s() { return double(waited_ns.exchange(0)) * 1e-9; }
void Segment::check() const {
    if (lost()) throw RankLost(failure);
}

ShmGroup::ShmGroup(Segment& s, int r, std::vector<int> names, int first_flag, size_t from, size_t each,
                   size_t all, double timeout)
    : RankGroup(r, int(names.size())),
      segment(s),
      ranks(std::move(names)),
      flags(s.flag(first_flag)),
      offset(from),
      slot_bytes(each),
      common_bytes(all),
      timeout_s(timeout),
      round(flags[r].value.load() & COUNT) {}

void CalledGroup::gather(const Ctx& ctx, const char* x, int64_t ldx, char* y, int64_t ldy, int64_t rows,
                         const int64_t* bounds, int target) {
    ctx.barrier();
    if (ctx.tid == 0 && !failure) try {
            call(Address(x), ldx, Address(y), ldy, rows, {bounds, bounds + size + 1}, target);
        } catch (...) {
            failure = std::current_exception();
        }
    ctx.barrier();
}
// An exception of Python can be thrown once; what follows it is lost as well.
void CalledGroup::check() {
    if (!failure) return;
    std::rethrow_exception(
        std::exchange(failure, std::make_exception_ptr(RankLost("an earlier exchange has failed"))));
}

bool ShmGroup::begin() {
    const uint32_t last = round++ & COUNT;
    for (int r = 0; r < size; r++)
        if (!segment.wait(flags[r], last, timeout_s, ranks[size_t(r)])) return false;
    return true;
}
bool ShmGroup::publish(bool waiting) {
    segment.advance(flags[rank], 1);
    for (int r = 0; waiting && r < size; r++)
        if (!segment.wait(flags[r], round & COUNT, timeout_s, ranks[size_t(r)])) return false;
    return true;
}

template <class Write, class Read>
void ShmGroup::exchange(const Ctx& ctx, bool reads, Write&& write, Read&& read) {
    if (ctx.tid == 0) stands = begin();
    ctx.barrier();
    if (stands) write(slot(rank));
    ctx.barrier();
    if (ctx.tid == 0) stands = stands && publish(reads);
    ctx.barrier();
    if (reads && stands) read();
    ctx.barrier();
}

void ShmGroup::gather(const Ctx& ctx, const char* x, int64_t ldx, char* y, int64_t ldy, int64_t rows,
                      const int64_t* bounds, int target) {
    int64_t widest = 0;
    for (int r = 0; r < size; r++) widest = std::max(widest, bounds[r + 1] - bounds[r]);
    if (!widest || !rows) return;
    const int64_t width = std::min(widest, int64_t(slot_bytes)),
                  step = std::max<int64_t>(1, int64_t(slot_bytes) / width);
    const bool reads = target < 0 || target == rank;
    for (int64_t row = 0; row < rows; row += step)
        for (int64_t from = 0; from < widest; from += width) {
            const int64_t n = std::min(step, rows - row);
            auto piece = [&](int r) { return std::min(bounds[r + 1] - bounds[r] - from, width); };
            auto write = [&](char* to) {
                copy(ctx, x + row * ldx + from, ldx, to, piece(rank), n, piece(rank));
            };
            auto read = [&] {
                for (int r = 0; r < size; r++) {
                    char* to = y + row * ldy + bounds[r] + from;
                    if (r != rank || to != x + row * ldx + from)
                        copy(ctx, slot(r), piece(r), to, ldy, n, piece(r));
                    ctx.barrier();  // ready for the next range
                }
            };
            exchange(ctx, reads, write, read);
        }
}

void ShmGroup::all_reduce(const Ctx& ctx, const float* x, float* y, int64_t count) {
    const int64_t most = int64_t(slot_bytes / 4);
    for (int64_t from = 0; from < count; from += most) {
        const int64_t n = std::min(most, count - from);
        auto write = [&](char* to) { copy(ctx, (const char*)(x + from), 0, to, 0, 1, n * 4); };
        auto read = [&] {
            ctx.each(n, 4096, [&](int64_t begin, int64_t end) {
                float* to = y + from;
                memcpy(to + begin, slot(0) + begin * 4, size_t(end - begin) * 4);
                for (int r = 1; r < size; r++) {
                    const float* piece = (const float*)slot(r);
                    for (int64_t i = begin; i < end; i++) to[i] += piece[i];
                }
            });
        };
        exchange(ctx, true, write, read);
    }
}

// The bytes of all destinations pass as one run; its head says where each destination's begin.
void ShmGroup::all_to_all(const char* x, const std::vector<int64_t>& send, char* y,
                          const std::vector<int64_t>& receive) {
    std::vector<int64_t> starts(size_t(size) + 1), to(size_t(size) + 1);
    for (size_t r = 0; r < size_t(size); r++)
        starts[r + 1] = starts[r] + send.at(r), to[r + 1] = to[r] + receive.at(r);
    Team team(1, nullptr);
    const int64_t head = (size + 8) / 8 * 64, most = int64_t(slot_bytes) - head;
    int64_t longest = 1;
    for (int64_t from = 0; from < longest && !segment.lost(); from += most) {
        auto write = [&](char* piece) {
            memcpy(piece, starts.data(), starts.size() * 8);
            const int64_t n = std::min(most, starts.back() - from);
            if (n > 0) memcpy(piece + head, x + from, size_t(n));
        };
        auto read = [&] {
            for (int r = 0; r < size; r++) {
                const int64_t* theirs = (const int64_t*)slot(r);
                longest = std::max(longest, theirs[size]);
                const int64_t first = theirs[rank], n = theirs[rank + 1] - first;
                if (n != receive[size_t(r)])
                    throw std::invalid_argument("rank " + std::to_string(ranks[size_t(r)]) + " sends " +
                                                std::to_string(n) + " bytes, expected " +
                                                std::to_string(receive[size_t(r)]));
                const int64_t lo = std::max(first, from), hi = std::min(first + n, from + most);
                if (lo < hi)
                    memcpy(y + to[size_t(r)] + lo - first, slot(r) + head + lo - from, size_t(hi - lo));
            }
        };
        exchange(Ctx{&team, 0}, true, write, read);
    }
}

void ShmGroup::barrier() {
    if (begin()) publish(true);
}
void ShmGroup::barrier(const Ctx& ctx) {
    ctx.barrier();
    if (ctx.tid == 0) barrier();
    ctx.barrier();
}
RankGroup::Common ShmGroup::common() const {
    return {segment.at(offset + 2 * size_t(size) * slot_bytes), common_bytes};
}

Stream::Stream(Segment& s, int who, std::vector<int> names, int first_flag, size_t offset, size_t bytes)
    : segment(s),
      reader(who),
      ranks(std::move(names)),
      flags(s.flag(first_flag)),
      ring(s.at(offset)),
      units(uint32_t(bytes / UNIT)),
      at(flags[1 + who].value.load() & COUNT) {}

void Stream::write(const char* data, size_t count, double timeout_s) {
    for (size_t from = 0; from < count && !segment.lost();) {
        const uint32_t place = at % units;
        // A quarter at a time, so that readers begin while the rest is written.
        const uint32_t n =
            std::min({uint32_t((count - from + UNIT - 1) / UNIT), units - place, (units + 3) / 4});
        for (size_t r = 1; r < ranks.size(); r++) {
            const uint32_t oldest = (at + n - units) & COUNT;  // the tail must have come to it
            if (!segment.wait(flags[r], oldest, timeout_s, ranks[r])) return;
        }
        const size_t part = std::min(size_t(n) * UNIT, count - from);
        memcpy(ring + size_t(place) * UNIT, data + from, part);
        from += part, at = (at + n) & COUNT;
        segment.advance(flags[0], n);
    }
}

bool Stream::poll(double timeout_s) { return segment.wait(flags[0], (at + 1) & COUNT, timeout_s, -1); }

void Stream::read(char* data, size_t count, double timeout_s) {
    for (size_t from = 0; from < count && !segment.lost();) {
        const uint32_t place = at % units;
        const uint32_t n =
            std::min({uint32_t((count - from + UNIT - 1) / UNIT), units - place, (units + 3) / 4});
        if (!segment.wait(flags[0], (at + n) & COUNT, timeout_s, ranks[0])) return;
        const size_t part = std::min(size_t(n) * UNIT, count - from);
        memcpy(data + from, ring + size_t(place) * UNIT, part);
        from += part, at = (at + n) & COUNT;
        segment.advance(flags[1 + reader], n);
    }
}

}  // namespace radix

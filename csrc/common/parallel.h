// A team of threads inside one OpenMP region: barrier, and ranges that idle threads steal from.
#pragma once
#include <atomic>
#include <cstddef>
#include <cstdint>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace radix {

constexpr int MAX_THREADS = 256;

struct alignas(64) Cursor {
    std::atomic<int64_t> next{0};
};

// Memory that kernels reuse between calls. Belongs to the calling thread; grows, never shrinks.
struct Workspace {
    char* shared = nullptr;
    size_t shared_bytes = 0;
    char* local = nullptr;
    size_t local_bytes = 0;  // for each thread
    int threads = 0;
    void reserve(size_t shared_need, size_t local_need, int num_threads);
};

struct Team {
    explicit Team(int num_threads, Workspace* w) : n(num_threads), space(w) {}
    int n;
    Workspace* space;
    alignas(64) std::atomic<int> arrived{0};
    alignas(64) std::atomic<int> phase{0};
    Cursor cursor[MAX_THREADS];

    void sleep(int now);  // until phase leaves `now`; out of line, compiled for every processor
    void wake();

    void reset_cursors() {
        for (int t = 0; t < n; t++) cursor[t].next.store(0, std::memory_order_relaxed);
    }
    void barrier() {
        if (n == 1) return reset_cursors();
        int now = phase.load(std::memory_order_relaxed);
        if (arrived.fetch_add(1, std::memory_order_acq_rel) == n - 1) {
            arrived.store(0, std::memory_order_relaxed);
            reset_cursors();
            phase.store(now + 1, std::memory_order_release);
            wake();
            return;
        }
        // Short spin: partners are usually a microsecond away; sleep when a core is taken by others.
        for (int spin = 0; spin < 4000; spin++) {
            if (phase.load(std::memory_order_acquire) != now) return;
#if defined(__x86_64__)
            _mm_pause();
#endif
        }
        sleep(now);
    }
};

struct Ctx;

// Ranks of one host that pack the same rows together: each packs a part of them, for all to read.
struct Packers {
    virtual ~Packers() = default;
    virtual void barrier(const Ctx& ctx) = 0;  // of all threads of all ranks
    int rank = 0, size = 1;
    char* memory = nullptr;
};

struct Ctx {
    Team* team;
    int tid;
    Packers* packers = nullptr;

    int threads() const { return team->n; }
    void barrier() const { team->barrier(); }
    char* local() const { return team->space->local + size_t(tid) * team->space->local_bytes; }
    char* shared() const { return team->space->shared; }

    // f(begin, end) over [0, count): a thread's own range first, in chunks, then the rest of other threads'
    // ranges. No barrier at the end.
    template <class F>
    void each(int64_t count, int64_t chunk, F&& f) const {
        int n = team->n;
        if (n == 1) {
            if (count > 0) f(int64_t(0), count);
            return;
        }
        for (int i = 0; i < n; i++) {
            int owner = tid + i < n ? tid + i : tid + i - n;
            int64_t blocks = (count + chunk - 1) / chunk;
            int64_t lo = blocks * owner / n * chunk, hi = blocks * (owner + 1) / n * chunk;
            if (hi > count) hi = count;
            while (true) {
                if (lo + team->cursor[owner].next.load(std::memory_order_relaxed) >= hi) break;
                int64_t at = lo + team->cursor[owner].next.fetch_add(chunk, std::memory_order_relaxed);
                if (at >= hi) break;
                f(at, at + chunk < hi ? at + chunk : hi);
            }
        }
    }

    // The same for rows of x that a linear layer packs, at `packing()`. Ends with a barrier.
    char* packing() const { return packers ? packers->memory : shared(); }
    template <class F>
    void each_packed(int64_t count, int64_t chunk, F&& f) const {
        if (!packers) {
            each(count, chunk, f);
            return barrier();
        }
        const int64_t blocks = (count + chunk - 1) / chunk;
        auto cut = [&](int64_t rank) {
            const int64_t at = blocks * rank / packers->size * chunk;
            return at < count ? at : count;
        };
        const int64_t first = cut(packers->rank);
        each(cut(packers->rank + 1) - first, chunk, [&](int64_t b, int64_t e) { f(first + b, first + e); });
        packers->barrier(*this);
    }
};

}  // namespace radix

// Threads, scratch memory and the choice of instruction set: everything that is compiled once.
#pragma once
#include <omp.h>
#include <sys/mman.h>

#include <algorithm>
#include <string>
#include <vector>
#if defined(__SANITIZE_THREAD__)
#include <thread>
#endif

#include "../common/api.h"

namespace radix {

const Kernels& kernels();                   // the table in use
std::vector<std::string> supported_isas();  // what was compiled and this processor has, best first
void select_isa(const std::string& name);   // throws std::invalid_argument
std::vector<std::string> compiled_isas();

int max_threads();
void set_max_threads(int n);
// Threads worth waking for this much work: a region costs about 5 us, 20 when cores are busy.
int threads_for(double bytes, double flops);
// The same for a whole step. A short one (a model of some MB, up to some 64 tokens) leaves a processor to the
// server's other processes: on all of them, each barrier would wait while a thread stands behind HTTP.
int threads_for_step(double bytes, double flops);

// Huge pages, where the system gives them on request.
inline void want_huge([[maybe_unused]] void* p, [[maybe_unused]] size_t bytes) {
#ifdef MADV_HUGEPAGE
    madvise(p, bytes, MADV_HUGEPAGE);
#endif
}

Workspace& workspace();  // of the calling thread

template <class F>
void run_team(int threads, size_t shared_bytes, size_t local_bytes, F&& body) {
    threads = std::clamp(threads, 1, MAX_THREADS);
    Workspace& space = workspace();
    space.reserve(shared_bytes, local_bytes, threads);
    Team team(threads, &space);
    if (threads == 1) {
        body(Ctx{&team, 0});
        return;
    }
#if defined(__SANITIZE_THREAD__)
    // The sanitizer does not see how OpenMP's threads wait for each other.
    std::vector<std::thread> others;
    for (int t = 1; t < threads; t++) others.emplace_back([&, t] { body(Ctx{&team, t}); });
    body(Ctx{&team, 0});
    for (std::thread& other : others) other.join();
    return;
#endif
#pragma omp parallel num_threads(threads)
    {
        // A runtime that gives fewer threads than asked would leave the barrier waiting.
#pragma omp single
        team.n = omp_get_num_threads();
        body(Ctx{&team, omp_get_thread_num()});
    }
}

inline void sample(const SampleArgs& a, int threads) {  // 0: by the amount of work
    double work = 0;
    for (int64_t i = 0; i < a.num_rows; i++) work += double(a.vocab) * (a.rows[i].greedy ? 4 : 24);
    const int n = threads > 0 ? threads : std::min(threads_for(work, 0), int(a.num_rows));
    const Kernels& k = kernels();
    run_team(n, 0, k.sample_local(a), [&](const Ctx& c) { k.sample(a, c); });
}

// Of labels, and of chosen keys and values.
inline double sparse_bytes(const SparseArgs& s) {
    if (s.num_rows == 0) return 0;
    const Cache& c = s.a.cache;
    const double each = double(s.a.heads) * (c.k_dim + c.v_dim) * 2;
    return s.num_rows * (double(s.max_len) * c.kv_heads * c.heavy->width + each * c.heavy->top);
}

// Work items of one attention call, made once a step and shared by its layers: tasks that several
// sequences share, tasks of one sequence, merges.
struct AttnPlan {
    std::vector<AttnTask> tasks;
    std::vector<AttnMember> members;
    std::vector<AttnReader> readers;
    int num_shared = 0, num_tasks = 0, num_merges = 0;
    int64_t partial_rows = 0;
    size_t partial_floats = 0;
    double bytes = 0, flops = 0;
    void make(const AttnArgs& a, int threads);
    void fill(AttnArgs& a, void* shared) const;  // what the kernels read; `shared` holds the partial rows

  private:
    struct Cut {  // of a sequence's work: pieces at least, heads of a task
        int pieces, heads;
    };
    static Cut cut(const AttnArgs& a, int threads, int64_t short_units, int64_t splits);
    void add_short(const AttnArgs& a, int s, int first, int from, int member, Cut cut,
                   std::vector<AttnTask>& short_tasks, std::vector<AttnTask>& merges);
};

}  // namespace radix

#include "lora.h"

#include <algorithm>
#include <stdexcept>

namespace radix {

namespace {

// Tokens ordered by adapter; tokens of one adapter keep their order.
struct Grouped {
    std::vector<int32_t> tokens, first;  // first: [adapters + 1]
    std::vector<LoraTask> tasks;

    Grouped(const LoraStep& s, int64_t rank) : first(size_t(s.adapters) + 1) {
        for (int64_t i = 0; i < s.sequences; i++) {
            if (s.adapter[i] >= s.adapters)
                throw std::invalid_argument("a sequence has an adapter that is not there");
            if (s.starts[i] < 0 || s.starts[i + 1] < s.starts[i] || s.starts[i + 1] > s.tokens)
                throw std::invalid_argument("sequences do not follow each other within the tokens");
            if (s.adapter[i] >= 0) first[size_t(s.adapter[i]) + 1] += s.starts[i + 1] - s.starts[i];
        }
        for (size_t i = 1; i < first.size(); i++) {
            if (s.ranks && (s.ranks[i - 1] < 0 || s.ranks[i - 1] > rank))
                throw std::invalid_argument("the rank of an adapter is beyond its tensor");
            first[i] += first[i - 1];
        }
        tokens.resize(size_t(first.back()));
        std::vector<int32_t> next(first.begin(), first.end() - 1);
        for (int64_t i = 0; i < s.sequences; i++)
            if (s.adapter[i] >= 0)
                for (int32_t t = s.starts[i]; t < s.starts[i + 1]; t++)
                    tokens[size_t(next[size_t(s.adapter[i])]++)] = t;
    }
    // f(adapter, first row, rows) for every block of rows
    template <class F>
    void blocks(F&& f) const {
        for (size_t adapter = 0; adapter + 1 < first.size(); adapter++)
            for (int32_t row = first[adapter]; row < first[adapter + 1]; row += LORA_ROWS)
                f(int32_t(adapter), row, std::min<int32_t>(LORA_ROWS, first[adapter + 1] - row));
    }
    void add(int32_t adapter, int32_t row, int32_t rows, int64_t part, int64_t from, int64_t end,
             int64_t width) {
        for (; from < end; from += width)
            tasks.push_back(
                {adapter, row, rows, int32_t(part), int32_t(from), int32_t(std::min(width, end - from))});
    }
};

// `numbers`: of weights for each rank of an adapter that is used.
void run(const LoraStep& s, LoraArgs& a, const Grouped& g, double numbers, size_t local,
         void (*kernel)(const LoraArgs&, const Ctx&), int threads) {
    if (g.tasks.empty()) return;
    a.tasks = g.tasks.data(), a.num_tasks = int64_t(g.tasks.size()), a.tokens = g.tokens.data(),
    a.ranks = s.ranks;
    double bytes = 0, flops = 0;
    for (int64_t i = 0; i < s.adapters; i++) {
        const double rows = g.first[size_t(i) + 1] - g.first[size_t(i)],
                     all = numbers * double(s.ranks ? s.ranks[i] : a.rank);
        if (rows > 0) bytes += all * bytes_each(a.dtype), flops += 2 * rows * all;
    }
    const int n = threads > 0 ? threads : threads_for(bytes, flops);
    run_team(n, 0, local, [&](const Ctx& c) { kernel(a, c); });
}

}  // namespace

void run_lora_shrink(const LoraStep& s, LoraArgs a, int threads) {
    Grouped g(s, a.rank);
    g.blocks([&](int32_t adapter, int32_t row, int32_t rows) {
        // few rows are bound by memory: many small tasks; many rows reuse what they read
        const int64_t width = rows <= 12 ? LORA_TASK_RANKS / 4 : LORA_TASK_RANKS,
                      ranks = s.ranks ? s.ranks[adapter] : a.rank;
        for (int64_t part = 0; part < a.parts; part++) g.add(adapter, row, rows, part, 0, ranks, width);
    });
    const Kernels& k = kernels();
    run(s, a, g, double(a.parts) * double(a.inputs), k.lora_local(a), k.lora_shrink, threads);
}

void run_lora_expand(const LoraStep& s, LoraArgs a, const std::vector<int64_t>& widths, int threads) {
    Grouped g(s, a.rank);
    g.blocks([&](int32_t adapter, int32_t row, int32_t rows) {
        for (int64_t part = 0, from = 0; part < a.parts; from += widths[size_t(part)], part++)
            g.add(adapter, row, rows, part, from, from + widths[size_t(part)], LORA_TASK_OUTPUTS);
    });
    const Kernels& k = kernels();
    run(s, a, g, double(a.outputs), k.lora_local(a), k.lora_expand, threads);
}

}  // namespace radix

#include "lora.h"

#include "moe.h"

#include <algorithm>
#include <stdexcept>

namespace radix {

void LoraAdapter::add(int site, Address a, Address b, const std::array<Address, 3>& vectors, int dtype,
                      int rank, int first, int width, float scale, int block) {
    if (site < 0 || rank < 1 || first < 0 || width < 1 || block < 0)
        throw std::invalid_argument("a part of an adapter has no size");
    if (sites.size() <= size_t(site)) sites.resize(size_t(site) + 1);
    sites[size_t(site)].push_back({at<void>(a), at<void>(b), at<float>(vectors[0]), at<float>(vectors[1]),
                                   at<float>(vectors[2]), dtype, rank, first, width, scale, block});
    max_rank = std::max(max_rank, rank);
}

LoraBatch::LoraBatch(std::vector<const LoraAdapter*> them, Address adapter, int64_t tokens)
    : adapters(std::move(them)) {
    for (const LoraAdapter* one : adapters) {
        num_sites = std::max(num_sites, one->sites.size());
        max_rank = std::max(max_rank, one->max_rank);
    }
    const int32_t* of = at<int32_t>(adapter);
    all.of.assign(of, of + tokens);
    group(all);
}

bool LoraBatch::has(int site) const {
    for (size_t i = 0; i < adapters.size(); i++)
        if (all.first[i] < all.first[i + 1] && size_t(site) < adapters[i]->sites.size() &&
            !adapters[i]->sites[size_t(site)].empty())
            return true;
    return false;
}

// Rows ordered by adapter; rows of one adapter keep their order.
void LoraBatch::group(Rows& rows) const {
    rows.first.assign(adapters.size() + 1, 0);
    for (int32_t adapter : rows.of) {
        if (adapter >= int32_t(adapters.size()))
            throw std::invalid_argument("a token has an adapter that is not there");
        if (adapter >= 0) rows.first[size_t(adapter) + 1]++;
    }
    for (size_t i = 1; i < rows.first.size(); i++) rows.first[i] += rows.first[i - 1];
    rows.tokens.resize(size_t(rows.first.back()));
    std::vector<int32_t> next(rows.first.begin(), rows.first.end() - 1);
    for (size_t row = 0; row < rows.of.size(); row++)
        if (rows.of[row] >= 0) rows.tokens[size_t(next[size_t(rows.of[row])]++)] = int32_t(row);
    rows.sites.assign(num_sites, {});
    rows.is_made.assign(num_sites, 0);
}

void LoraBatch::select(const int32_t* rows, int64_t count) {
    std::vector<int32_t> of;
    for (int64_t i = 0; i < count; i++) of.push_back(all.of.at(size_t(rows[i])));
    if (of == selected.of && selected.first.size()) return;
    selected.of = std::move(of);
    group(selected);
}

const LoraWork* LoraBatch::work(int site, bool is_selected) {
    Rows& rows = is_selected ? selected : all;
    if (site < 0 || size_t(site) >= rows.sites.size()) return nullptr;
    LoraWork& work = rows.sites[size_t(site)];
    if (!rows.is_made[size_t(site)]) make(rows, site, work), rows.is_made[size_t(site)] = 1;
    return work.expand.empty() ? nullptr : &work;
}

// The products of one part with the rows [row, end).
void LoraBatch::add_tasks(const LoraPart& part, int32_t row, int32_t end, LoraWork& work) {
    auto split = [](std::vector<LoraTask>& to, LoraTask task, int32_t size, int32_t width) {
        for (task.at = 0; task.at < size; task.at += width) {
            task.count = std::min(width, size - task.at);
            to.push_back(task);
        }
    };
    // few rows make few tasks, which all threads must share; many rows reuse what they read
    const int ranks = end - row <= LORA_ROWS ? LORA_TASK_RANKS / 4 : LORA_TASK_RANKS;
    for (; row < end; row += LORA_ROWS) {
        const LoraTask task{&part, work.num_h, row, std::min<int32_t>(LORA_ROWS, end - row)};
        split(work.shrink, task, part.rank, ranks);
        split(work.expand, task, part.width, LORA_TASK_OUTPUTS);
        work.num_h += int64_t(task.rows) * part.rank;
        work.max_rank = std::max<int64_t>(work.max_rank, part.rank);
    }
}

void LoraBatch::make(const Rows& rows, int site, LoraWork& work) const {
    work.tokens = rows.tokens.data();
    for (size_t i = 0; i < adapters.size(); i++)
        if (size_t(site) < adapters[i]->sites.size())
            for (const LoraPart& part : adapters[i]->sites[size_t(site)])
                add_tasks(part, rows.first[i], rows.first[i + 1], work);
}

void LoraBatch::work(int site, bool is_selected, const Assignment& a, int slot_begin, int slot_end,
                     const std::vector<int32_t>& blocks, LoraSlots& to) const {
    const std::vector<int32_t>& of = is_selected ? selected.of : all.of;
    to.slots.clear(), to.tokens.clear(), to.first.clear();
    LoraWork* works[] = {&to.up, &to.down};
    for (LoraWork* one : works) *one = {};
    for (size_t i = 0; i < adapters.size(); i++) {
        const size_t begin = to.first.size();
        for (int e = slot_begin; e < slot_end; e++) {
            to.first.push_back(int32_t(to.slots.size()));
            for (int32_t slot = a.first[size_t(e)]; slot < a.first[size_t(e) + 1]; slot++) {
                const int32_t token = a.rows[size_t(slot)];
                if (of[size_t(token)] == int32_t(i)) to.slots.push_back(slot), to.tokens.push_back(token);
            }
        }
        to.first.push_back(int32_t(to.slots.size()));
        for (size_t half = 0; half < 2; half++)
            if (size_t(site) + half < adapters[i]->sites.size())
                for (const LoraPart& part : adapters[i]->sites[size_t(site) + half])
                    for (int e = slot_begin; e < slot_end; e++) {
                        if ((blocks.empty() ? e : blocks[size_t(e)]) != part.block) continue;
                        const int32_t* first = to.first.data() + begin + (e - slot_begin);
                        add_tasks(part, first[0], first[1], *works[half]);
                    }
    }
    to.h.resize(size_t(std::max(to.up.num_h, to.down.num_h)));
}

void LoraBatch::add_to(int site, Address x, int64_t ldx, int64_t inputs, Address y, int64_t ldy,
                       int64_t x_block, int64_t y_block, int threads) {
    const LoraWork* w = work(site, false);
    if (!w) return;
    std::vector<float> h(size_t(w->num_h));
    LoraArgs a;
    a.tokens = w->tokens, a.inputs = inputs, a.max_rank = w->max_rank, a.h = h.data();
    a.x = at<float>(x), a.ldx = ldx, a.y = at<float>(y), a.ldy = ldy;
    a.x_block = x_block, a.y_block = y_block;
    double bytes = 0, flops = 0;
    for (const LoraTask& t : w->shrink) {
        const double numbers = double(t.count) * double(inputs);
        bytes += 2 * numbers, flops += 2 * numbers * t.rows;
    }
    const Kernels& k = kernels();
    const int n = threads > 0 ? threads : threads_for(bytes, flops);
    run_team(n, 0, k.lora_local(w->max_rank), [&](const Ctx& c) {
        LoraArgs mine = a;
        mine.tasks = w->shrink.data(), mine.num_tasks = int64_t(w->shrink.size());
        k.lora_shrink(mine, c);
        mine.tasks = w->expand.data(), mine.num_tasks = int64_t(w->expand.size());
        k.lora_expand(mine, c);
    });
}

}  // namespace radix

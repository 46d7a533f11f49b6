#include <algorithm>
#include <limits>

#include "program.h"
#include "runtime.h"

namespace radix {

namespace {

bool is_bad_row(const float* x, int64_t n) {  // as radixlm/sampling/sampler.py: find_bad
    float most = -std::numeric_limits<float>::infinity();
    bool has_nan = false;
    for (int64_t i = 0; i < n; i++) most = x[i] > most ? x[i] : most, has_nan |= x[i] != x[i];
    return has_nan || most == -std::numeric_limits<float>::infinity();
}

}  // namespace

int Program::go_on(Step c, const Draws& d) {
    const int64_t n = c.num_rows;
    SampleRow* rows = at<SampleRow>(d.rows);
    const int32_t* counts = at<int32_t>(d.counts);
    const int64_t* suppressed = at<int64_t>(d.suppressed);
    int32_t *ids = at<int32_t>(c.ids), *positions = at<int32_t>(c.positions), *kv_len = at<int32_t>(c.kv_len);
    c.is_lone = false;
    std::vector<bool> has_ended(n);
    int64_t num_ended = 0;
    for (int pass = 0;; pass++, rows += n) {
        int64_t* tokens = at<int64_t>(d.tokens) + pass * n;
        for (int64_t r = 0; r < n; r++) {
            float* x = rows[r].logits = at<float>(c.logits) + r * c.ld_logits;
            for (int64_t i = 0; i < d.num_suppressed; i++)
                x[suppressed[i]] = -std::numeric_limits<float>::infinity();
        }
        SampleArgs a;
        a.rows = rows, a.num_rows = n, a.vocab = d.vocab, a.tokens = tokens;
        sample(a, c.threads);
        for (int64_t r = 0; r < n; r++) {
            at<uint8_t>(d.is_bad)[pass * n + r] = is_bad_row(rows[r].logits, d.vocab);
            const bool is_last = pass + 1 == counts[r] || std::ranges::count(d.ends, tokens[r]);
            if (is_last && !has_ended[r]) has_ended[r] = true, num_ended++;
        }
        if (num_ended == n || pass + 1 == d.passes) return pass + 1;
        if (d.told) d.told(pass);
        for (int64_t r = 0; r < n; r++)
            if (pass + 1 < counts[r]) ids[r] = int32_t(tokens[r]), positions[r]++, kv_len[r]++;
        for (size_t g = 0; g < c.groups.size(); g++)
            c.groups[g].slots = Address(at<int32_t>(d.slots[g]) + pass * n);
        run(c);
    }
}

}  // namespace radix

// Recurrences over a state of fixed size, token by token: a result depends neither on how a prompt was
// cut nor on other sequences. The state is changed in place and stays in first-level cache.
#include <algorithm>

#include "rows.h"

namespace radix {
namespace RADIX_ISA {

constexpr int64_t SCAN_ROWS = 16, SCAN_WIDTH = 64;  // values of a piece of work: rows or columns of a state

static const float* of_token(const ScanInput& x, int64_t b, int64_t l, int64_t h) {
    return x.data + b * x.sequence + l * x.token + h * x.head;
}

static float* out_of(const ScanArgs& s, int64_t b, int64_t l, int64_t h) {
    return s.out + (b * s.tokens + l) * (s.out_token ? s.out_token : s.heads * s.values) + h * s.values;
}

// Rows [p0, p1) of state [P][N]: h = decay h + x b; y = h . c. The decay is e^log of a head, or
// e^(dt a) of every number, where x counts dt times.
template <bool IS_SELECTIVE>
static void scan_rows(const ScanArgs& s, int64_t b, int64_t h, int64_t p0, int64_t p1) {
    for (int64_t l = 0; l < s.tokens; l++) {
        const float *x = of_token(s.v, b, l, h), *in = of_token(s.k, b, l, h / s.repeats),
                    *read = of_token(s.q, b, l, h / s.repeats);
        const float* log = of_token(s.decay, b, l, h);
        float* y = out_of(s, b, l, h);
        const vf all = IS_SELECTIVE ? zero() : vexp(set1(log[0]));
        const float joins = !IS_SELECTIVE && s.beta.data ? of_token(s.beta, b, l, h)[0] : 1.0f;
        for (int64_t p = p0; p < p1; p++) {
            const int64_t row = ((b * s.heads + h) * s.values + p) * s.keys;
            float* state = s.state + row;
            const float* before = l == 0 && s.before ? s.before + row : state;
            const vf step = IS_SELECTIVE ? set1(log[p]) : zero(),
                     value = IS_SELECTIVE ? mul(step, set1(x[p])) : set1(x[p] * joins);
            vf sum = zero();
            for (int64_t n = 0; n < s.keys; n += 16) {
                const int lanes = lanes_at(n, s.keys);
                const vf decay = IS_SELECTIVE
                                     ? vexp(mul(step, load_n(s.a + (h * s.values + p) * s.keys + n, lanes)))
                                     : all;
                const vf now = fma(value, load_n(in + n, lanes), mul(decay, load_n(before + n, lanes)));
                store_n(state + n, now, lanes);
                sum = fma(now, load_n(read + n, lanes), sum);
            }
            y[p] = lane_tree_sum(sum);
            if (s.skip) y[p] += x[p] * s.skip[IS_SELECTIVE ? h * s.values + p : h];
        }
    }
}

// Channels [p0, p1) of state [P], 16 at most: h = e^log h + x; y = h.
static void scan_channels(const ScanArgs& s, int64_t b, int64_t h, int64_t p0, int64_t p1) {
    const int lanes = int(p1 - p0);
    const int64_t at = (b * s.heads + h) * s.values + p0;
    vf now = load_n((s.before ? s.before : s.state) + at, lanes);
    for (int64_t l = 0; l < s.tokens; l++) {
        const vf decay = vexp(load_n(of_token(s.decay, b, l, h) + p0, lanes));
        now = fma(decay, now, load_n(of_token(s.v, b, l, h) + p0, lanes));
        store_n(out_of(s, b, l, h) + p0, now, lanes);
    }
    store_n(s.state + at, now, lanes);
}

// Columns [p0, p0 + 16 * N) of state [K][P], the last ones perhaps fewer: h = decay h;
// h += k beta (v - k h)^T; y = q h. The decay is e^log of a head or of every row.
template <int N>
static void delta_columns(const ScanArgs& s, int64_t b, int64_t h, int64_t p0) {
    const int64_t width = s.values - p0 < N * 16 ? s.values - p0 : N * 16;
    int lanes[N];
    for (int c = 0; c < N; c++) lanes[c] = int(std::clamp<int64_t>(width - c * 16, 0, 16));
    const int64_t at = (b * s.heads + h) * s.keys * s.values + p0;
    float* first = s.state + at;
    for (int64_t l = 0; l < s.tokens; l++) {
        const float* before = l == 0 && s.before ? s.before + at : first;
        const float *q = of_token(s.q, b, l, h / s.repeats), *k = of_token(s.k, b, l, h / s.repeats),
                    *v = of_token(s.v, b, l, h) + p0, *log = of_token(s.decay, b, l, h);
        const vf all = vexp(set1(log[0])), beta = set1(of_token(s.beta, b, l, h)[0]);
        vf seen[N], y[N];
        for (int c = 0; c < N; c++) seen[c] = y[c] = zero();
        for (int64_t i = 0; i < s.keys; i++) {
            const vf decay = s.decays > 1 ? set1(log[i]) : all, key = set1(k[i]);
            float* row = first + i * s.values;
            for (int c = 0; c < N; c++) {
                const vf now = mul(decay, load_n(before + i * s.values + c * 16, lanes[c]));
                store_n(row + c * 16, now, lanes[c]);
                seen[c] = fma(key, now, seen[c]);
            }
        }
        for (int c = 0; c < N; c++) seen[c] = mul(beta, sub(load_n(v + c * 16, lanes[c]), seen[c]));
        for (int64_t i = 0; i < s.keys; i++) {
            const vf key = set1(k[i]), query = set1(q[i]);
            float* row = first + i * s.values;
            for (int c = 0; c < N; c++) {
                const vf now = fma(key, seen[c], load_n(row + c * 16, lanes[c]));
                store_n(row + c * 16, now, lanes[c]);
                y[c] = fma(query, now, y[c]);
            }
        }
        float* out = out_of(s, b, l, h) + p0;
        for (int c = 0; c < N; c++) store_n(out + c * 16, y[c], lanes[c]);
    }
}

// Values [p0, p1) of a head of a sequence.
static void scan_piece(const ScanArgs& s, int64_t b, int64_t h, int64_t p0, int64_t p1) {
    if (s.kind == ScanKind::SELECTIVE)
        scan_rows<true>(s, b, h, p0, p1);
    else if (s.kind == ScanKind::DECAYED)
        scan_rows<false>(s, b, h, p0, p1);
    else if (s.kind == ScanKind::CHANNELS)
        scan_channels(s, b, h, p0, p1);
    else if (p1 - p0 > 32)
        delta_columns<4>(s, b, h, p0);
    else if (p1 - p0 > 16)
        delta_columns<2>(s, b, h, p0);
    else
        delta_columns<1>(s, b, h, p0);
}

// A piece of all runs, one after another: a later one may go on from an earlier one's states.
static void scan_runs(const ScanArgs& s, int64_t h, int64_t p0, int64_t p1) {
    ScanArgs one = s;
    for (int64_t r = 0; r < s.num_runs; r++) {
        const StateRun& run = s.runs[r];
        const ScanInput* from[] = {&s.q, &s.k, &s.v, &s.decay, &s.beta};
        ScanInput* to[] = {&one.q, &one.k, &one.v, &one.decay, &one.beta};
        for (int i = 0; i < 5; i++)
            if (from[i]->data) to[i]->data = from[i]->data + run.row * from[i]->token;
        one.out = s.out + run.row * s.out_token, one.tokens = run.tokens;
        one.before = s.state + run.source * s.page, one.state = s.state + run.target * s.page;
        scan_piece(one, 0, h, p0, p1);
    }
}

void scan(const ScanArgs& s, const Ctx& ctx) {
    const int64_t each = s.kind == ScanKind::DELTA ? SCAN_WIDTH : SCAN_ROWS,
                  pieces = (s.values + each - 1) / each;
    const int64_t sequences = s.runs ? 1 : s.sequences;
    ctx.each(sequences * s.heads * pieces, 1, [&](int64_t i0, int64_t i1) {
        for (int64_t i = i0; i < i1; i++) {
            const int64_t p0 = i % pieces * each, p1 = std::min(p0 + each, s.values),
                          h = i / pieces % s.heads, b = i / pieces / s.heads;
            if (s.runs)
                scan_runs(s, h, p0, p1);
            else
                scan_piece(s, b, h, p0, p1);
        }
    });
    ctx.barrier();
}

}  // namespace RADIX_ISA
}  // namespace radix

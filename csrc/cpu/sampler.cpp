// Sampling, row by row: penalties, bias and mask in place, then the draw. What top_k and top_p leave
// is found by counting probabilities in buckets by their leading bits; only the bucket where the limit
// lies is sorted. A draw is the argmax of logits plus Gumbel noise of (key, token): sampling/noise.py.
#include <algorithm>
#include <cmath>

#include "rows.h"

namespace radix {
namespace RADIX_ISA {

constexpr int BUCKET_SHIFT = 17, BUCKETS = (0x3f800000 >> BUCKET_SHIFT) + 1;  // of floats in [0, 1]

static float lowest_float() { return -INFINITY; }

struct Best {
    float value;
    int64_t index;  // of the first NaN, or of the first largest number
};
static Best best_of(const float* x, int64_t n) {
    vf top = set1(lowest_float());
    vf odd = zero();  // NaN where one was seen
    int64_t i = 0;
    for (; i + 16 <= n; i += 16) {
        vf v = load(x + i);
        top = vmax(top, v);
        odd = add(odd, sub(v, v));  // infinities too: looked at below
    }
    Best b{lane_max(top), 0};
    for (; i < n; i++) b.value = x[i] > b.value ? x[i] : b.value;
    float any = lane_tree_sum(odd);
    bool has_nan = false;
    if (any != any || n % 16)
        for (int64_t j = any != any ? 0 : n / 16 * 16; j < n && !has_nan; j++)
            has_nan = (float_to_bits(x[j]) & 0x7fffffffu) > 0x7f800000u, b.index = j;
    if (has_nan) return {bits_to_float(0x7fc00000u), b.index};
    for (b.index = 0; b.index < n && x[b.index] != b.value; b.index++) {}
    return b;
}

static void penalise(const SampleRow& r, int64_t vocab) {
    for (int64_t i = 0; i < vocab; i++) {
        uint64_t eight = 0;
        while (i + 8 <= vocab && (std::memcpy(&eight, r.seen + i, 8), eight == 0)) i += 8;
        if (i >= vocab) break;
        if (!r.seen[i]) continue;
        const float x = r.logits[i], count = float(r.counts[i]);
        float y = x > 0 ? x / r.repetition : x * r.repetition;
        y = y - r.frequency * count;
        r.logits[i] = y - r.presence * (count > 0 ? 1.0f : 0.0f);
    }
}

static void mask_out(float* x, const int32_t* words, int64_t vocab) {
    for (int64_t i = 0; i < vocab; i += 32) {
        const uint32_t bits = uint32_t(words[i / 32]);
        const int64_t n = vocab - i < 32 ? vocab - i : 32;
        if (bits == 0xffffffffu) continue;
        for (int64_t j = 0; j < n; j++)
            if (!((bits >> j) & 1u)) x[i + j] = lowest_float();
    }
}

// Forbids the tokens, unless nothing else is allowed.
static void hold_back(const SampleRow& r, int64_t vocab, float* before) {
    for (int i = 0; i < r.num_suppressed; i++)
        before[i] = r.logits[r.suppressed[i]], r.logits[r.suppressed[i]] = lowest_float();
    const float top = best_of(r.logits, vocab).value;
    if (top == lowest_float() || top != top)
        for (int i = r.num_suppressed - 1; i >= 0; i--) r.logits[r.suppressed[i]] = before[i];
}

static uint32_t mixed32(uint32_t x) {
    x = (x ^ (x >> 16)) * 0x7feb352du;
    x = (x ^ (x >> 15)) * 0x846ca68bu;
    return x ^ (x >> 16);
}
static uint32_t random_bits(uint64_t key, uint32_t token) {
    return mixed32(mixed32(token ^ uint32_t(key)) + uint32_t(key >> 32)) & 0x7fffffffu;
}
static double noise_of(uint64_t key, uint32_t token) {
    return -std::log(-std::log(1.0 - (double(random_bits(key, token)) + 0.5) * 0x1p-31));
}

// The token with the highest score of those whose `measure` is not below `lowest`, which `likeliest`
// is not. Noise above g takes v < 1 - exp(-exp(-g)), less than exp(-g), where v are the random bits as a
// number in (0, 1): so few tokens pass a comparison of bits, and only they need logarithms.
static int32_t draw_from(const float* measure, float lowest, const float* scaled, int64_t likeliest,
                         uint64_t key, int64_t vocab) {
    constexpr int BLOCK = 64;
    constexpr float BITS = 2147483648.0f * 1.001f;  // what rounding may lose, and more
    int64_t best = likeliest;
    double highest = noise_of(key, uint32_t(best)) + double(scaled[best]);
    for (int64_t i = 0; i < vocab; i += BLOCK) {
        alignas(64) float limit[BLOCK];
        const int n = int(std::min<int64_t>(BLOCK, vocab - i));
        vf most = set1(lowest_float());
        for (int j = 0; j < n; j += 16) {
            const int lanes = std::min(16, n - j);
            most = vmax(most, keep_lanes(load_n(measure + i + j, lanes), 0, lanes, most));
        }
        if (lane_max(most) < lowest) continue;
        float top = float(highest);
        if (double(top) > highest) top = std::nextafterf(top, lowest_float());
        for (int j = 0; j < BLOCK; j += 16) {
            const int lanes = std::max(0, std::min(16, n - j));
            const vf gap = sub(load_n(scaled + i + j, lanes), set1(top));
            store(limit + j, keep_lanes(mul(vexp(gap), set1(BITS)), 0, lanes, zero()));
        }
        int32_t any = 0, passes[BLOCK];
        for (int j = 0; j < BLOCK; j++)
            any |= passes[j] = float(int32_t(random_bits(key, uint32_t(i + j)))) + 0.5f < limit[j];
        for (int j = 0; any && j < n; j++) {
            if (!passes[j] || !(measure[i + j] >= lowest)) continue;
            const double score = noise_of(key, uint32_t(i + j)) + double(scaled[i + j]);
            if (score > highest || (score == highest && i + j < best)) best = i + j, highest = score;
        }
    }
    return int32_t(best);
}

struct Histogram {
    uint32_t count[BUCKETS];
    double mass[BUCKETS];
};
static int bucket_of(float p) { return int(float_to_bits(p) >> BUCKET_SHIFT); }

// The lowest probability that top_k and top_p leave; numbers below `smallest` do not count.
static float threshold(const float* p, int64_t vocab, int64_t top_k, double top_p, float smallest,
                       Histogram& h, float* room) {
    std::memset(&h, 0, sizeof h);
    for (int64_t i = 0; i < vocab; i += 16) {
        const int n = lanes_at(i, vocab);
        if (lane_max(keep_lanes(load_n(p + i, n), 0, n, zero())) < smallest) continue;
        for (int64_t j = i; j < i + n; j++)
            if (p[j] >= smallest) h.count[bucket_of(p[j])]++, h.mass[bucket_of(p[j])] += double(p[j]);
    }
    int64_t before = 0;
    double mass = 0;
    int border = -1;  // the bucket where something may be left out
    for (int b = BUCKETS - 1; b >= 0 && border < 0; b--) {
        if (before + h.count[b] > top_k || (top_p < 1.0 && mass + h.mass[b] > top_p))
            border = b;
        else
            before += h.count[b], mass += h.mass[b];
    }
    if (border < 0) return smallest;
    int64_t num = 0;
    for (int64_t j = 0; j < vocab; j++)
        if (p[j] >= smallest && bucket_of(p[j]) == border) room[num++] = p[j];
    std::sort(room, room + num, [](float a, float b) { return a > b; });
    float lowest = before > 0 ? bits_to_float(uint32_t(border + 1) << BUCKET_SHIFT) : room[0];
    for (int64_t i = 0; i < num; i++) {
        if (before + i > 0 && (before + i >= top_k || (top_p < 1.0 && mass > top_p))) break;
        lowest = room[i], mass += double(room[i]);
    }
    return lowest;
}

// room: three rows of the vocabulary
static int32_t draw(const SampleRow& r, int64_t vocab, float* room, Histogram& h) {
    float *scaled = room, *p = room + (vocab + 15) / 16 * 16, *rest = p + (vocab + 15) / 16 * 16;
    for (int64_t i = 0; i < vocab; i += 16) {
        const int n = lanes_at(i, vocab);
        store_n(scaled + i, div(load_n(r.logits + i, n), set1(r.temperature)), n);
    }
    const Best best = best_of(scaled, vocab);
    if (best.value != best.value) return 0;
    const bool filtered = r.top_k < vocab || r.top_p < 1.0f;
    if (!filtered) {
        const double lowest = double(best.value) + std::log(double(r.min_p));  // of 0: -inf
        return draw_from(scaled, float(lowest), scaled, best.index, r.key, vocab);
    }
    if (std::fabs(best.value) == INFINITY) return 0;
    double sum = 0;
    for (int64_t i = 0; i < vocab; i += 256) {
        vf part = zero();
        for (int64_t j = i; j < i + 256 && j < vocab; j += 16) {
            const int n = lanes_at(j, vocab);
            vf e = keep_lanes(vexp(sub(load_n(scaled + j, n), set1(best.value))), 0, n, zero());
            store_n(p + j, e, n);
            part = add(part, e);
        }
        sum += double(lane_tree_sum(part));
    }
    for (int64_t i = 0; i < vocab; i += 16) {
        const int n = lanes_at(i, vocab);
        store_n(p + i, div(load_n(p + i, n), set1(float(sum))), n);
    }
    const double top_p = double(r.top_p);
    // all tokens below this have less mass together than top_p leaves out
    const float smallest = r.top_k < vocab ? 0.0f : float((1.0 - top_p) / double(2 * vocab));
    float lowest = threshold(p, vocab, r.top_k, top_p, smallest, h, rest);
    lowest = std::max(lowest, p[best.index] * r.min_p);
    return draw_from(p, lowest, scaled, best.index, r.key, vocab);
}

static void sample_row(const SampleArgs& a, int64_t i, char* local) {
    const SampleRow& r = a.rows[i];
    if (r.seen) penalise(r, a.vocab);
    for (int j = 0; j < r.num_bias; j++) r.logits[r.bias_ids[j]] += r.bias_values[j];
    if (r.mask) mask_out(r.logits, r.mask, a.vocab);
    Histogram& h = *(Histogram*)local;
    float* room = (float*)(local + (sizeof(Histogram) + 63) / 64 * 64);
    if (r.num_suppressed) hold_back(r, a.vocab, room);
    a.tokens[i] = r.greedy ? best_of(r.logits, a.vocab).index : int64_t(draw(r, a.vocab, room, h));
}

void sample(const SampleArgs& a, const Ctx& ctx) {
    ctx.each(a.num_rows, 1, [&](int64_t r0, int64_t r1) {
        for (int64_t r = r0; r < r1; r++) sample_row(a, r, ctx.local());
    });
    ctx.barrier();
}
size_t sample_local(const SampleArgs& a) { return sizeof(Histogram) + 64 + size_t(a.vocab + 16) * 4 * 3; }

}  // namespace RADIX_ISA
}  // namespace radix

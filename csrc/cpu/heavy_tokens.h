// Which tokens the query heads of a KV head attend to in double sparsity: their labels, candidates, the best
// of them. A token's score is the largest that one of these heads gives it, in units of the head's largest
// label, so that each row is read once for all of them.
#pragma once
#include <algorithm>

#include "heavy.h"
#include "softmax.h"

namespace radix {
namespace RADIX_ISA {

constexpr int SCORED = 1024;            // tokens of a scoring task
constexpr int SAMPLED = 16;             // of so many tiles one is scored before, to know what is a good score
constexpr int BINS = 2048;              // of the histogram that finds the least chosen score
constexpr float LABEL_MOST = 16383.0f;  // of a query's: 512 products with an int8 fit an int32
constexpr float LEAST_SCORE = -3.0e38f;   // what a key that is not finite scores
constexpr int64_t WAVE_BYTES = 64 << 20;  // of the rows that are worked on at a time

// Places of what a row's KV heads leave for the next phase.
struct SparsePlaces {
    int64_t group;                                                    // query heads of a KV head
    int64_t labels, scores, counts, chosen, state, splits, partials;  // bytes
    int64_t head;                                                     // bytes of a KV head
    int64_t rows;                                                     // at a time
    explicit SparsePlaces(const SparseArgs& s) {
        const Heavy& h = *s.a.cache.heavy;
        auto lines = [](int64_t bytes) { return (bytes + 63) / 64 * 64; };
        group = s.a.heads / s.a.cache.kv_heads;
        labels = lines(label_pairs(h) * 4);
        scores = lines((s.max_len + 15) / 16 * 64);
        counts = lines((1 + (s.max_len + SCORED - 1) / SCORED) * 4);
        chosen = lines((h.top + 16) * 4);
        splits = (h.top + SPLIT - 1) / SPLIT;
        state = state_floats(s.a.cache.v_dim);
        partials = lines(splits * state * 4);
        head = group * (labels + partials) + 2 * scores + counts + chosen;
        rows = std::clamp<int64_t>(WAVE_BYTES / (head * s.a.cache.kv_heads), 1, std::max(1, s.num_rows));
    }
};
// Candidates, the tokens that score `least` at least, stand in the order of tokens, those of each scoring
// task from the place of its first token on.
struct SparseHead {
    float* scores;    // of candidates
    int32_t* tokens;  // theirs
    int32_t* counts;  // of each task
    float* least;
    int32_t* chosen;
    SparseHead(const SparsePlaces& p, char* memory, int64_t index) : places(p) {
        char* at = memory + index * p.head;
        all_labels = at, scores = (float*)(at += p.group * p.labels), tokens = (int32_t*)(at += p.scores);
        least = (float*)(at += p.scores), counts = (int32_t*)at + 1, chosen = (int32_t*)(at += p.counts);
        all_partials = at + p.chosen;
    }
    // Of the g-th query head.
    int16_t* labels(int g) const { return (int16_t*)(all_labels + g * places.labels); }
    float* partials(int g) const { return (float*)(all_partials + g * places.partials); }

  private:
    const SparsePlaces& places;
    char *all_labels, *all_partials;
};

// A query's heavy channels as integers, the largest of them LABEL_MOST.
static void label_query(const SparseArgs& s, const SparseRow& row, int head, int16_t* out) {
    const AttnArgs& a = s.a;
    const Heavy& h = *a.cache.heavy;
    const float* q = a.q + int64_t(row.token) * a.ldq + int64_t(head) * a.q_head;
    const int32_t* channels = h.channels + int64_t(head / (a.heads / a.cache.kv_heads)) * h.width;
    float most = 0.0f;
    for (int i = 0; i < h.width; i++) most = std::max(most, std::fabs(q[channels[i]]));
    const float scale = most / LABEL_MOST;
    for (int i = 0; i < 2 * label_pairs(h); i++)
        out[i] = i < h.width && scale > 0 ? int16_t(std::nearbyint(q[channels[i]] / scale)) : int16_t(0);
}

#if defined(__AVX512BW__)
RADIX_INLINE __m512i add_pairs(__m512i sum, __m512i a, __m512i b) {
#if defined(__AVX512VNNI__)
    return _mm512_dpwssd_epi32(sum, a, b);
#else
    return _mm512_add_epi32(sum, _mm512_madd_epi16(a, b));
#endif
}
#endif
// Sums of products of 16 tokens' labels with those of G queries; the largest of each token, as floats.
template <int G>
RADIX_INLINE vf label_products(const int8_t* tile, const int16_t* const (&labels)[G], int pairs) {
    vf best;
    auto both = [](const int16_t* q) {
        int32_t x;
        std::memcpy(&x, q, 4);
        return x;
    };
#if defined(__AVX512BW__)
    __m512i sum[G];
    for (int g = 0; g < G; g++) sum[g] = _mm512_setzero_si512();
    for (int p = 0; p < pairs; p++) {
        const __m512i k = _mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i*)(tile + p * 2 * TILE)));
        for (int g = 0; g < G; g++) sum[g] = add_pairs(sum[g], k, _mm512_set1_epi32(both(labels[g] + 2 * p)));
    }
    for (int g = 1; g < G; g++) sum[0] = _mm512_max_epi32(sum[0], sum[g]);
    best = {_mm512_cvtepi32_ps(sum[0])};
#elif defined(__AVX2__)
    __m256i sum[G][2];
    for (int g = 0; g < G; g++) sum[g][0] = sum[g][1] = _mm256_setzero_si256();
    for (int p = 0; p < pairs; p++)
        for (int half = 0; half < 2; half++) {
            const __m256i k =
                _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)(tile + p * 2 * TILE + half * TILE)));
            for (int g = 0; g < G; g++)
                sum[g][half] = _mm256_add_epi32(
                    sum[g][half], _mm256_madd_epi16(k, _mm256_set1_epi32(both(labels[g] + 2 * p))));
        }
    for (int half = 0; half < 2; half++)
        for (int g = 1; g < G; g++) sum[0][half] = _mm256_max_epi32(sum[0][half], sum[g][half]);
    best = {_mm256_cvtepi32_ps(sum[0][0]), _mm256_cvtepi32_ps(sum[0][1])};
#else
    (void)both;
    best = set1(-INFINITY);
    for (int g = 0; g < G; g++) {
        int32_t sum[TILE] = {0};
        for (int p = 0; p < pairs; p++)
            for (int t = 0; t < TILE; t++)
                for (int i = 0; i < 2; i++)
                    sum[t] += int32_t(tile[(p * TILE + t) * 2 + i]) * labels[g][2 * p + i];
        float numbers[TILE];
        for (int t = 0; t < TILE; t++) numbers[t] = float(sum[t]);
        best = vmax(best, load(numbers));
    }
#endif
    return best;
}
// Bits of the lanes with lo <= x < hi.
RADIX_INLINE uint32_t lanes_within(vf x, float lo, float hi) {
#if defined(__AVX512F__)
    return _mm512_mask_cmp_ps_mask(_mm512_cmp_ps_mask(x.v, _mm512_set1_ps(lo), _CMP_GE_OQ), x.v,
                                   _mm512_set1_ps(hi), _CMP_LT_OQ);
#else
    float all[16];
    store(all, x);
    uint32_t bits = 0;
    for (int i = 0; i < 16; i++) bits |= uint32_t(all[i] >= lo && all[i] < hi) << i;
    return bits;
#endif
}
// Lanes of x whose bits are set, one after the other; 16 numbers are written.
RADIX_INLINE void put_lanes(vf x, uint32_t bits, float* out) {
#if defined(__AVX512F__)
    _mm512_storeu_ps(out, _mm512_maskz_compress_ps(__mmask16(bits), x.v));
#else
    float all[16];
    store(all, x);
    for (int n = 0; bits; bits &= bits - 1) out[n++] = all[__builtin_ctz(bits)];
#endif
}
// Likewise first, first + 1, ...
RADIX_INLINE void put_numbers(int first, uint32_t bits, int32_t* out) {
#if defined(__AVX512F__)
    alignas(64) static const int32_t order[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    const __m512i numbers = _mm512_add_epi32(_mm512_load_si512(order), _mm512_set1_epi32(first));
    _mm512_storeu_si512(out, _mm512_maskz_compress_epi32(__mmask16(bits), numbers));
#else
    for (int n = 0; bits; bits &= bits - 1) out[n++] = first + __builtin_ctz(bits);
#endif
}

// The labels of a row's tokens, of one KV head.
struct RowLabels {
    const Cache& c;
    const int32_t* pages;
    int kv_head, len;
    int pairs = label_pairs(*c.heavy), per_page = c.page_size / TILE;
    RowLabels(const SparseArgs& s, const SparseRow& row, int head)
        : c(s.a.cache), pages(s.a.page_table + int64_t(row.seq) * s.a.ldp), kv_head(head), len(row.kv_len) {}
    const int8_t* tile(int i) const {
        const int page = per_page == 1 ? i : i / per_page;
        return labels_at(c, pages[page], kv_head, i - page * per_page);
    }
    int num_tiles() const { return (len + TILE - 1) / TILE; }
};

// Which tiles are scored: every `step`-th of [begin, end). `ahead`: those that are prefetched meanwhile.
struct TileRange {
    int begin, end, step, ahead;
};
// The candidates stand from `place` on, behind the *count that are there.
static void score_tiles(const RowLabels& of, const TileRange& tiles, const SparseHead& head, int group,
                        int place, int32_t* count) {
    const int last = of.num_tiles() - 1;
    const int64_t bytes = label_bytes(*of.c.heavy);
    int n = place + *count;
    for (int i = tiles.begin; i < tiles.end; i += tiles.step) {
        prefetch_bytes(of.tile(std::min(i + tiles.ahead, last)), bytes);
        const int8_t* tile = of.tile(i);
        vf sum = set1(-INFINITY);
        int g = 0;
        for (; g + 2 <= group; g += 2)
            sum = vmax(sum, label_products<2>(tile, {head.labels(g), head.labels(g + 1)}, of.pairs));
        if (g < group) sum = vmax(sum, label_products<1>(tile, {head.labels(g)}, of.pairs));
        const vf scale = load((const float*)(tile + of.pairs * 2 * TILE));
        const uint32_t there = (1u << lanes_at(i * TILE, of.len)) - 1u;
        const vf score = vmin(vmax(mul(sum, scale), set1(LEAST_SCORE)), set1(-LEAST_SCORE));
        const uint32_t bits = lanes_within(score, *head.least, INFINITY) & there;
        put_lanes(score, bits, head.scores + n);
        put_numbers(i * TILE, bits, head.tokens + n);
        n += __builtin_popcount(bits);
    }
    *count = n - place;
}

// Tokens of a task for all heads: those of a page are neighbours.
static void score_range(const SparseArgs& s, const SparsePlaces& places, int64_t index, const SparseRow& row,
                        int range) {
    constexpr int AT_ONCE = 8;  // tiles
    const int kv_heads = s.a.cache.kv_heads;
    const int end = (std::min((range + 1) * SCORED, row.kv_len) + TILE - 1) / TILE;
    auto head_at = [&](int k) { return SparseHead(places, s.work, index * kv_heads + k); };
    for (int k = 0; k < kv_heads; k++) head_at(k).counts[range] = 0;
    for (int i = range * (SCORED / TILE); i < end; i += AT_ONCE)
        for (int k = 0; k < kv_heads; k++) {
            const SparseHead head = head_at(k);
            score_tiles(RowLabels(s, row, k), {i, std::min(i + AT_ONCE, end), 1, AT_ONCE}, head,
                        int(places.group), range * SCORED, head.counts + range);
        }
}

// Scores as numbers of bins, a monotone map; which is the bin of the n-th best?
class ScoreBins {
  public:
    ScoreBins(const float* x, int count) : scores(x), n(count) {
        vf most = set1(-INFINITY), least = set1(INFINITY);
        for (int i = 0; i + 16 <= n; i += 16)
            most = vmax(most, load(x + i)), least = vmin(least, load(x + i));
        float hi = lane_max(most);
        low = -lane_max(sub(zero(), least));
        for (int i = n / 16 * 16; i < n; i++) hi = std::max(hi, x[i]), low = std::min(low, x[i]);
        const float width = hi - low;  // infinite: all in one bin, which is only slow
        factor = width > 0 && width < INFINITY ? float(BINS - 1) / width : 0.0f;
    }
    // The bin, as a whole and a fraction, of 16 scores.
    vf of(int i) const {
        const vf x = mul(sub(load(scores + i), set1(low)), set1(factor));
        return vmin(vmax(x, zero()), set1(float(BINS - 1)));
    }
    // About the score of the wanted-th best.
    float bottom_of(int wanted, int32_t* counts) const {
        return factor > 0 ? low + float(bin_of(wanted, counts)) / factor : -INFINITY;
    }
    // `wanted` becomes how many of that bin belong to the best.
    int bin_of(int& wanted, int32_t* counts) const {
        std::fill(counts, counts + BINS, 0);
        for (int i = 0; i < n; i += 16) {
            alignas(64) float bins[16];
            store(bins, of(i));
            for (int j = 0, in = lanes_at(i, n); j < in; j++) counts[int(bins[j])]++;
        }
        int bin = BINS - 1;
        for (; counts[bin] < wanted; bin--) wanted -= counts[bin];
        return bin;
    }

  private:
    const float* scores;
    int n;
    float low, factor;
};

// The tokens of the best `top` of n candidates, in order; all where n <= top. The pads of all numbers are 16.
// `memory`: BINS + n numbers.
static void choose_best(const float* scores, const int32_t* tokens, int n, int top, int32_t* out,
                        int32_t* memory) {
    if (n <= top) {
        std::copy(tokens, tokens + n, out);
        return;
    }
    const ScoreBins bins(scores, n);
    int wanted = top, num_found = 0;
    const int bin = bins.bin_of(wanted, memory);
    int32_t* found = memory + BINS;
    auto valid = [&](int i) { return (1u << lanes_at(i, n)) - 1u; };
    for (int i = 0; i < n; i += 16)
        for (uint32_t m = lanes_within(bins.of(i), float(bin), float(bin + 1)) & valid(i); m; m &= m - 1)
            found[num_found++] = i + __builtin_ctz(m);
    std::nth_element(found, found + wanted - 1, found + num_found, [&](int32_t x, int32_t y) {
        return scores[x] > scores[y] || (scores[x] == scores[y] && x < y);
    });
    const int last = found[wanted - 1];  // of the best, the least
    const float least = scores[last];
    for (int i = 0, count = 0; i < n; i += 16) {
        const vf x = load(scores + i);
        uint32_t equal = lanes_within(x, least, std::nextafter(least, INFINITY));
        if (last < i + 15) equal &= last < i ? 0u : (2u << (last - i)) - 1u;
        const uint32_t m = (lanes_within(x, std::nextafter(least, INFINITY), INFINITY) | equal) & valid(i);
        put_lanes(load((const float*)tokens + i), m, (float*)out + count);
        count += __builtin_popcount(m);
    }
}

// Scores some tiles to guess which score twice `top` tokens reach, so that few others are kept.
static void guess_least(const SparseHead& head, int top, int group, const RowLabels& of, int32_t* memory) {
    *head.least = -INFINITY, head.counts[0] = 0;
    if (of.len < 4 * top) return;
    score_tiles(of, {0, of.num_tiles(), SAMPLED, 4 * SAMPLED}, head, group, 0, head.counts);
    const int n = head.counts[0], wanted = int(2 * int64_t(n) * top / of.len) + 16;
    if (wanted < n) *head.least = ScoreBins(head.scores, n).bottom_of(wanted, memory);
}

// Brings a head's candidates together. If they are fewer than are to be chosen, all tokens become candidates.
static int join_candidates(const SparseHead& head, int top, int group, const RowLabels& of) {
    int n = head.counts[0];
    for (int range = 1; range * SCORED < of.len; range++) {
        const int from = range * SCORED, count = head.counts[range];
        std::copy(head.scores + from, head.scores + from + count, head.scores + n);
        std::copy(head.tokens + from, head.tokens + from + count, head.tokens + n);
        n += count;
    }
    if (n >= std::min(of.len, top)) return n;
    *head.least = -INFINITY, head.counts[0] = 0;
    score_tiles(of, {0, of.num_tiles(), 1, 4}, head, group, 0, head.counts);
    return head.counts[0];
}

}  // namespace RADIX_ISA
}  // namespace radix

// Double sparsity (arXiv:2408.07092): a query scores all tokens by the labels of their keys, then attends to
// the best ones. Its numbers depend on nothing but its own sequence: sums of labels are integers, of equal
// scores the earlier token is chosen, chosen tokens are attended to in order, in splits of 512.
#include <algorithm>

#include "heavy.h"
#include "softmax.h"

namespace radix {
namespace RADIX_ISA {

constexpr int SCORED = 1024;              // tokens of a scoring task
constexpr int BINS = 2048;                // of the histogram that finds the least chosen score
constexpr float LABEL_MOST = 16383.0f;    // of a query's: 512 products with an int8 fit an int32
constexpr float LEAST_SCORE = -3.0e38f;   // what a key that is not finite scores
constexpr int64_t WAVE_BYTES = 64 << 20;  // of the rows that are worked on at a time

// Places of what a row's heads leave for the next phase.
struct SparsePlaces {
    int64_t labels, scores, chosen, state, splits, partials, head;  // bytes; head: of all that a head has
    int64_t rows;                                                   // at a time
    explicit SparsePlaces(const SparseArgs& s) {
        const Heavy& h = *s.a.cache.heavy;
        auto lines = [](int64_t bytes) { return (bytes + 63) / 64 * 64; };
        labels = lines(label_pairs(h) * 4);
        scores = lines((s.max_len + 15) / 16 * 64);
        chosen = lines((h.top + 16) * 4);
        splits = (h.top + SPLIT - 1) / SPLIT;
        state = state_floats(s.a.cache.v_dim);
        partials = lines(splits * state * 4);
        head = labels + scores + chosen + partials;
        rows = std::clamp<int64_t>(WAVE_BYTES / (head * s.a.heads), 1, std::max(1, s.num_rows));
    }
};
struct SparseHead {
    int16_t* labels;
    float* scores;
    int32_t* chosen;
    float* partials;
    SparseHead(const SparsePlaces& p, char* memory, int64_t index) {
        char* at = memory + index * p.head;
        labels = (int16_t*)at, scores = (float*)(at += p.labels), chosen = (int32_t*)(at += p.scores);
        partials = (float*)(at + p.chosen);
    }
};

// A query's heavy channels as integers. Their scale is of no use: all scores of the query have it.
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

// Sums of products of 16 tokens' labels with those of G queries, as floats.
template <int G>
RADIX_INLINE void label_products(const int8_t* tile, const SparseHead* heads, int pairs, vf (&out)[G]) {
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
        for (int g = 0; g < G; g++)
            sum[g] = _mm512_add_epi32(sum[g],
                                      _mm512_madd_epi16(k, _mm512_set1_epi32(both(heads[g].labels + 2 * p))));
    }
    for (int g = 0; g < G; g++) out[g] = {_mm512_cvtepi32_ps(sum[g])};
#elif defined(__AVX2__)
    __m256i sum[G][2];
    for (int g = 0; g < G; g++) sum[g][0] = sum[g][1] = _mm256_setzero_si256();
    for (int p = 0; p < pairs; p++)
        for (int half = 0; half < 2; half++) {
            const __m256i k =
                _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)(tile + p * 2 * TILE + half * TILE)));
            for (int g = 0; g < G; g++)
                sum[g][half] = _mm256_add_epi32(
                    sum[g][half], _mm256_madd_epi16(k, _mm256_set1_epi32(both(heads[g].labels + 2 * p))));
        }
    for (int g = 0; g < G; g++) out[g] = {_mm256_cvtepi32_ps(sum[g][0]), _mm256_cvtepi32_ps(sum[g][1])};
#else
    (void)both;
    for (int g = 0; g < G; g++) {
        int32_t sum[TILE] = {0};
        for (int p = 0; p < pairs; p++)
            for (int t = 0; t < TILE; t++)
                for (int i = 0; i < 2; i++)
                    sum[t] += int32_t(tile[(p * TILE + t) * 2 + i]) * heads[g].labels[2 * p + i];
        float numbers[TILE];
        for (int t = 0; t < TILE; t++) numbers[t] = float(sum[t]);
        out[g] = load(numbers);
    }
#endif
}
template <int G>
static void score_tile(const int8_t* tile, const SparseHead* heads, int pairs, int token, int len) {
    vf sum[G];
    label_products<G>(tile, heads, pairs, sum);
    const vf scale = load((const float*)(tile + pairs * 2 * TILE));
    for (int g = 0; g < G; g++)
        store(heads[g].scores + token,
              keep_lanes(vmax(mul(sum[g], scale), set1(LEAST_SCORE)), 0, len - token, zero()));
}

// Tokens [begin, end) of a row for all heads: those of a page are neighbours.
static void score_range(const SparseArgs& s, const SparsePlaces& places, int64_t index, const SparseRow& row,
                        int begin, int end) {
    constexpr int AHEAD = 4;  // tiles
    const AttnArgs& a = s.a;
    const Cache& c = a.cache;
    const int group = a.heads / c.kv_heads, pairs = label_pairs(*c.heavy), per_page = c.page_size / TILE;
    const int32_t* pages = a.page_table + int64_t(row.seq) * a.ldp;
    auto tile_of = [&](int tile, int head) {
        return labels_at(c, pages[tile / per_page], head, tile % per_page);
    };
    const int last = (row.kv_len - 1) / TILE;
    for (int tile = begin / TILE; tile * TILE < end; tile++)
        for (int k = 0; k < c.kv_heads; k++) {
            prefetch_bytes(tile_of(std::min(tile + AHEAD, last), k), label_bytes(*c.heavy));
            const int8_t* labels = tile_of(tile, k);
            for (int g = 0; g < group;) {
                SparseHead heads[2] = {
                    {places, s.work, index * a.heads + k * group + g},
                    {places, s.work, index * a.heads + k * group + std::min(g + 1, group - 1)}};
                if (g + 1 < group)
                    score_tile<2>(labels, heads, pairs, tile * TILE, row.kv_len), g += 2;
                else
                    score_tile<1>(labels, heads, pairs, tile * TILE, row.kv_len), g += 1;
            }
        }
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

// The positions of the best `top` of n scores, in order; all of them where n <= top. The pads of `scores`
// and of `out` are 16 numbers. `memory`: BINS + n numbers.
static void choose_best(const float* scores, int n, int top, int32_t* out, int32_t* memory) {
    if (n <= top) {
        for (int i = 0; i < n; i++) out[i] = i;
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
#if defined(__AVX512F__)
        alignas(64) static const int32_t order[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
        const __m512i at = _mm512_add_epi32(_mm512_load_si512(order), _mm512_set1_epi32(i));
        _mm512_storeu_si512(out + count, _mm512_maskz_compress_epi32(__mmask16(m), at));
        count += __builtin_popcount(m);
#else
        for (uint32_t rest = m; rest; rest &= rest - 1) out[count++] = i + __builtin_ctz(rest);
#endif
    }
}

// Up to 64 chosen tokens of a head.
struct ChosenBlock {
    int count = 0;
    const char *k[BLOCK], *v[BLOCK];
    const float *k_scale[BLOCK], *v_scale[BLOCK];  // null where there are none
};
template <int DTYPE>
RADIX_INLINE vf load_part(const void* row, int at, int dim) {
    if (at + 16 <= dim) return load_kv<DTYPE>(row, at);
    float rest[16] = {0};
    for (int i = at; i < dim; i++) rest[i - at] = load_kv_scalar<DTYPE>(row, i);
    return load(rest);
}

class ChosenTokens {
  public:
    ChosenTokens(const SparseArgs& s, const SparseRow& row, int head)
        : c(s.a.cache),
          rows(rows_of_keys(s.a.cache)),
          pages(s.a.page_table + int64_t(row.seq) * s.a.ldp),
          kv_head(head) {}
    void open(const int32_t* chosen, int count, ChosenBlock& b) const {
        const int size = dtype_size(c.dtype);
        b.count = count;
        for (int i = 0; i < count; i++) {
            const int tile = chosen[i] / TILE, lane = chosen[i] % TILE;
            const Tile k = tile_at(rows, pages, kv_head, tile), v = tile_at(c, pages, kv_head, tile);
            b.k[i] = (const char*)k.v + int64_t(lane) * c.k_dim * size;
            b.v[i] = (const char*)v.v + int64_t(lane) * c.v_dim * size;
            b.k_scale[i] = k.v_scale ? k.v_scale + lane : nullptr;
            b.v_scale[i] = v.v_scale ? v.v_scale + lane : nullptr;
        }
    }
    // Asks for token i, which is somewhere in memory; many at once would stall each other.
    RADIX_INLINE void prefetch(const ChosenBlock& b, int i) const {
        if (i >= b.count) return;
        const int size = dtype_size(c.dtype);
        prefetch_bytes(b.k[i], c.k_dim * size), prefetch_bytes(b.v[i], c.v_dim * size);
        if (b.k_scale[i]) __builtin_prefetch(b.k_scale[i]), __builtin_prefetch(b.v_scale[i]);
    }

  private:
    const Cache c, rows;
    const int32_t* pages;
    int kv_head;
};

template <int DTYPE>
static void chosen_scores(const Shape& s, const float* q, const ChosenTokens& tokens, const ChosenBlock& b,
                          const ChosenBlock& next, float* p) {
    for (int t0 = 0; t0 < BLOCK; t0 += 16) {
        vf r[16];
        for (int t = 0; t < 16; t++) {
            r[t] = zero();
            tokens.prefetch(next, t0 + t);
            if (t0 + t >= b.count) continue;
            for (int i = 0; i < s.k_dim; i += 16)
                r[t] = fma(load(q + i), load_part<DTYPE>(b.k[t0 + t], i, s.k_dim), r[t]);
        }
        transpose_16x16(r);
        for (int step = 8; step; step /= 2)
            for (int t = 0; t < step; t++) r[t] = add(r[t], r[t + step]);
        store(p + t0, r[0]);
    }
}
template <int DTYPE>
static void chosen_sums(const Shape& s, const float* p, const ChosenBlock& b, float* state) {
    constexpr int N = 8;
    int at = 0;
    for (; at + N * 16 <= s.v_dim; at += N * 16) {
        vf sum[N];
        for (int c = 0; c < N; c++) sum[c] = load(state + at + c * 16);
        for (int t = 0; t < b.count; t++)
            for (int c = 0; c < N; c++) sum[c] = fma(set1(p[t]), load_kv<DTYPE>(b.v[t], at + c * 16), sum[c]);
        for (int c = 0; c < N; c++) store(state + at + c * 16, sum[c]);
    }
    for (; at < s.v_dim; at += 16) {
        vf sum = load(state + at);
        for (int t = 0; t < b.count; t++) sum = fma(set1(p[t]), load_part<DTYPE>(b.v[t], at, s.v_dim), sum);
        store(state + at, sum);
    }
}
template <int DTYPE>
static void attend_chosen(const SparseArgs& s, const SparseRow& row, int head, const int32_t* chosen,
                          int count, float* state) {
    const AttnArgs& a = s.a;
    const Shape shape(a);
    const bool scaled = DTYPE == DT_I8;
    alignas(64) float p[BLOCK], k_scale[BLOCK] = {0}, v_scale[BLOCK] = {0};
    float q[1024];
    const float* from = a.q + int64_t(row.token) * a.ldq + int64_t(head) * a.q_head;
    for (int i = 0; i < shape.k_dim; i += 16)
        store(q + i, mul(load_n(from + i, lanes_at(i, shape.k_dim)), set1(a.scale)));
    const ChosenTokens tokens(s, row, head / shape.group);
    ChosenBlock blocks[2];
    tokens.open(chosen, std::min(count, BLOCK), blocks[0]);
    for (int i = 0; i < BLOCK; i++) tokens.prefetch(blocks[0], i);
    clear_state(state, shape);
    for (int t = 0, which = 0; t < count; t += BLOCK, which ^= 1) {
        const ChosenBlock& b = blocks[which];
        ChosenBlock& next = blocks[which ^ 1];
        tokens.open(chosen + t + b.count, std::min(count - t - b.count, BLOCK), next);
        for (int i = 0; scaled && i < b.count; i++) k_scale[i] = *b.k_scale[i], v_scale[i] = *b.v_scale[i];
        chosen_scores<DTYPE>(shape, q, tokens, b, next, p);
        online_softmax(a, shape, p, scaled ? k_scale : nullptr, scaled ? v_scale : nullptr, state,
                       VisibleRange{0, b.count, 0.0f, 0.0f});
        chosen_sums<DTYPE>(shape, p, b, state);
    }
    close_split(shape, state);
}
using AttendChosen = void (*)(const SparseArgs&, const SparseRow&, int, const int32_t*, int, float*);
static AttendChosen attend_chosen_of(int dtype) {
    switch (dtype) {
        case DT_F32: return attend_chosen<DT_F32>;
        case DT_BF16: return attend_chosen<DT_BF16>;
        case DT_F16: return attend_chosen<DT_F16>;
        case DT_I8: return attend_chosen<DT_I8>;
        case DT_E4M3: return attend_chosen<DT_E4M3>;
        default: return attend_chosen<DT_E5M2>;
    }
}

size_t sparse_shared(const SparseArgs& s) {
    const SparsePlaces p(s);
    return size_t(p.head * s.a.heads * p.rows);
}
size_t sparse_local(const SparseArgs& s) { return size_t(BINS + s.max_len + 16) * 4; }

// The rows from `first` on that one wave takes.
static void sparse_wave(const SparseArgs& s, const SparsePlaces& places, int64_t first, const Ctx& ctx) {
    const AttnArgs& a = s.a;
    const int top = a.cache.heavy->top;
    const int64_t count = std::min<int64_t>(places.rows, s.num_rows - first), heads = a.heads;
    const int64_t ranges = (s.max_len + SCORED - 1) / SCORED;
    const SparseRow* rows = s.rows + first;
    // f(row, its number in the wave, part) for each part of each row
    auto each = [&](int64_t parts, auto&& f) {
        ctx.each(count * parts, 1, [&](int64_t i0, int64_t i1) {
            for (int64_t i = i0; i < i1; i++) f(rows[i / parts], i / parts, int(i % parts));
        });
        ctx.barrier();
    };
    auto head_at = [&](int64_t row, int64_t head) { return SparseHead(places, s.work, row * heads + head); };
    each(heads,
         [&](const SparseRow& row, int64_t r, int h) { label_query(s, row, h, head_at(r, h).labels); });
    each(ranges, [&](const SparseRow& row, int64_t r, int range) {
        score_range(s, places, r, row, range * SCORED, std::min((range + 1) * SCORED, row.kv_len));
    });
    each(heads, [&](const SparseRow& row, int64_t r, int h) {
        const SparseHead head = head_at(r, h);
        choose_best(head.scores, row.kv_len, top, head.chosen, (int32_t*)ctx.local());
    });
    const AttendChosen attend = attend_chosen_of(a.cache.dtype);
    each(heads * places.splits, [&](const SparseRow& row, int64_t r, int part) {
        const int h = int(part / places.splits), split = int(part % places.splits);
        const SparseHead head = head_at(r, h);
        const int n = std::min(std::min(top, row.kv_len) - split * SPLIT, SPLIT);
        if (n > 0) attend(s, row, h, head.chosen + split * SPLIT, n, head.partials + split * places.state);
    });
    const Shape shape(a);
    each(heads, [&](const SparseRow& row, int64_t r, int h) {
        float* total = head_at(r, h).partials;
        begin_accumulator(shape, total, total);
        for (int split = 1; split * SPLIT < std::min(top, row.kv_len); split++)
            merge(shape, total, total + split * places.state);
        write_row(a, shape, total, row.token, h);
    });
}
void sparse_attention(const SparseArgs& s, const Ctx& ctx) {
    const SparsePlaces places(s);
    for (int64_t first = 0; first < s.num_rows; first += places.rows) sparse_wave(s, places, first, ctx);
}

}  // namespace RADIX_ISA
}  // namespace radix

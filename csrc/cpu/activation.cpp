// Gate * up of rows, plain activations, and the embedding gather.
#include "epilogue.h"
#include "rows.h"

namespace radix {
namespace RADIX_ISA {

static void act_row(const ActArgs& a, int64_t row) {
    const float* x = a.x + row * a.ldx;
    float* y = a.y + row * a.ldy;
    for (int64_t i = 0; i < a.dim; i += 16) {
        int n = lanes_at(i, a.dim);
        vf v = load_n(x + i, n);
        store_n(y + i, a.gated ? gated(v, load_n(x + a.dim + i, n), a.act, a.limit) : activate(v, a.act), n);
    }
}

void activation(const ActArgs& a, const Ctx& ctx) {
    ctx.each(a.rows, 1, [&](int64_t r0, int64_t r1) {
        for (int64_t r = r0; r < r1; r++) act_row(a, r);
    });
    ctx.barrier();
}

// e^x - 1: near 0 by its series, so that nothing cancels.
RADIX_INLINE vf vexpm1(vf x) {
    vf p = set1(1.0f / 720.0f);
    p = fma(p, x, set1(1.0f / 120.0f));
    p = fma(p, x, set1(1.0f / 24.0f));
    p = fma(p, x, set1(1.0f / 6.0f));
    p = fma(p, x, set1(0.5f));
    p = fma(p, x, set1(1.0f));
    return select_lt(vabs(x), set1(0.25f), mul(p, x), sub(vexp(x), set1(1.0f)));
}

// y's row less its mean and so many standard deviations, where that is above 0.
static void above_normal(const MixArgs& a, float* y) {
    const float mean = row_sum(y, a.dim) / float(a.dim),
                deviation = std::sqrt(sum_squares(y, a.dim, mean) / float(a.dim));
    const vf limit = set1(mean + a.x_scale * deviation);
    for (int64_t i = 0; i < a.dim; i += 16) {
        const int n = lanes_at(i, a.dim);
        store_n(y + i, vmax(zero(), sub(load_n(y + i, n), limit)), n);
    }
}

static void size_as(const MixArgs& a, const float* x, float* y) {
    const float own = std::max(sum_squares(y, a.dim, 0.0f) / float(a.dim), a.cap),
                wanted = sum_squares(x, a.dim, 0.0f) / float(a.dim);
    scale_row(y, y, nullptr, nullptr, a.dim, 0.0f, std::sqrt(wanted) / std::sqrt(own), 0.0f);
}

// The first token of a sequence joins in full.
static void rg_lru(const MixArgs& a, const float* x, float* y, bool is_first) {
    alignas(64) float size[16];
    for (int64_t c = 0; c < a.dim; c += a.head)
        for (int64_t i = 0; i < a.head; i += 16) {
            const int n = lanes_at(i, a.head);
            float *input = y + 2 * c + i, *decay = input + a.head;
            const vf log = mul(load_n(a.factor + c + i, n), vsigmoid(load_n(decay, n)));
            vf joins = mul(load_n(x + c + i, n), vsigmoid(load_n(input, n)));
            if (!is_first) {
                store(size, sub(zero(), vexpm1(add(log, log))));
                for (float& one : size) one = std::sqrt(one);
                joins = mul(joins, load(size));
            }
            store_n(input, joins, n), store_n(decay, log, n);
        }
}

static void mix_row(const MixArgs& a, int64_t r) {
    if (a.mask && !a.mask[r]) return;
    const bool gathers_rows = a.index && a.kind == MixKind::COPY_ROWS;
    const float* x = a.x ? a.x + (gathers_rows ? a.index[r] : r) * a.ldx : nullptr;
    float* y = a.y + r * a.ldy;
    if (a.kind == MixKind::COPY_COLUMNS) {
        for (int64_t i = 0; i < a.dim; i++) y[i] = x[a.index[i]];
        return;
    }
    if (a.kind == MixKind::ABOVE_NORMAL) return above_normal(a, y);
    if (a.kind == MixKind::SIZE_AS) return size_as(a, x, y);
    if (a.kind == MixKind::RG_LRU) return rg_lru(a, x, y, a.index[r] == 0);
    if (a.kind == MixKind::SCALE_HEADS) {
        const vf factor = set1(a.x[a.index[r]]);
        for (int64_t h = 0; h * a.head < a.dim; h++)
            for (int i = 0; i < a.head; i += 16) {
                const int n = lanes_at(i, a.head);
                float* at = y + h * a.head_stride + i;
                store_n(at, mul(load_n(at, n), factor), n);
            }
        return;
    }
    for (int64_t i = 0; i < a.dim; i += 16) {
        const int n = lanes_at(i, a.dim);
        const vf v = a.kind == MixKind::COPY_ROWS ? load_n(x + i, n) : load_n(y + i, n);
        vf result = v;
        switch (a.kind) {
            case MixKind::ADD: result = fma(load_n(x + i, n), set1(a.x_scale), v); break;
            case MixKind::ADD_WEIGHTED:
                result = fma(load_n(x + i, n), set1(a.weights[r * a.ldw] + a.x_scale), v);
                break;
            case MixKind::AFFINE:
                if (a.shift) result = add(v, load_n(a.shift + i, n));
                if (a.factor) result = mul(result, load_n(a.factor + i, n));
                break;
            case MixKind::SOFTCAP:
                result = mul(v, set1(a.x_scale));
                if (a.cap != 0.0f) result = mul(vtanh(div(result, set1(a.cap))), set1(a.cap));
                break;
            case MixKind::SCALE:
                result = mul(v, set1(a.x_scale));
                if (a.cap != 0.0f) result = vmin(set1(a.cap), vmax(set1(-a.cap), result));
                break;
            case MixKind::SIGMOID_SCALE: result = mul(vsigmoid(v), set1(a.x_scale)); break;
            case MixKind::XIELU: {
                const Xielu& c = a.xielu;
                const vf below = mul(sub(vexpm1(vmin(v, set1(c.eps))), v), set1(c.below)),
                         above = mul(mul(v, v), set1(c.above));
                result = fma(v, set1(c.beta), select_lt(zero(), v, above, below));
                break;
            }
            default: break;
        }
        store_n(y + i, result, n);
    }
}

void mix(const MixArgs& a, const Ctx& ctx) {
    ctx.each(a.rows, 1, [&](int64_t r0, int64_t r1) {
        for (int64_t r = r0; r < r1; r++) mix_row(a, r);
    });
    ctx.barrier();
}

// Element k of output channel n in packed weights.
static float packed_at(const Weight& w, int64_t n, int64_t k) {
    const int64_t panel = n / PANEL, lane = n % PANEL, at = (panel * w.k + k) * PANEL;
    switch (w.format) {
        case W_F32: return ((const float*)w.data)[at + lane];
        case W_BF16:
            return bf16_to_float(((const uint16_t*)w.data)[at + (lane < 16 ? 2 * lane : 2 * lane - 31)]);
        case W_BF16_PAIRS:
            return bf16_to_float(
                ((const uint16_t*)w.data)[(panel * ((w.k + 31) / 32 * 16) + k / 2) * 64 + 2 * lane + k % 2]);
        case W_F16: return f16_to_float(((const uint16_t*)w.data)[at + lane]);
        case W_INT8: return float(((const int8_t*)w.data)[at + lane]) * w.scale[n];
        case W_W8A8:
        case W_W8A16: {
            const int8_t* p = (const int8_t*)w.data + panel * ((w.k + 3) / 4 * 4) * PANEL;
            return float(p[(k / 4) * 128 + lane * 4 + k % 4]) * w.scale[n];
        }
        default: {
            const uint32_t* p = (const uint32_t*)w.data + (panel * (w.k / 8) + k / 8) * PANEL;
            const int64_t s = (panel * spans_of(w) + k / w.span) * PANEL + lane;
            const int q = int(p[lane] >> (4 * (k & 7))) & 15;
            if (w.multiple) {
                const int8_t* m = w.multiple + (panel * (w.k / w.group) + k / w.group) * 2 * PANEL + lane;
                const int times = m[0] ? m[0] : 1;  // 0 in lanes past the last output
                return float(q - m[PANEL] / times) * (float(times) * w.scale[s]);
            }
            if (w.fp4) return float(TWICE_FP4[q]) * w.scale[s];
            return w.offset ? std::fma(float(q), w.scale[s], w.offset[s]) : float(q - 8) * w.scale[s];
        }
    }
}

static void embed_row(const EmbedArgs& a, int64_t t) {
    int64_t id = a.ids[t];
    float* y = a.y + t * a.ldy;
    if (a.takes_first && (id < 0 || id >= a.vocab)) id = 0;
    if (id < 0 || id >= a.vocab) {  // a placeholder: rows of other modalities are written later
        std::memset(y, 0, size_t(a.dim) * 4);
        return;
    }
    // ranks write the same row at the same time: a number is never stored before it is complete
    const float* p = a.positions_table
                         ? (const float*)a.positions_table + (a.positions[t] + a.position_offset) * a.dim
                         : nullptr;
    int64_t i = 0;
    for (; !a.packed && i + 16 <= a.dim; i += 16) {
        const vf x = mul(load_any(a.table, a.dtype, id * a.dim + i), set1(a.scale));
        store(y + i, p ? add(x, load(p + i)) : x);
    }
    for (; i < a.dim; i++) {
        const float x =
            (a.packed ? packed_at(a.w, id, i) : load_scalar(a.table, a.dtype, id * a.dim + i)) * a.scale;
        y[i] = p ? x + p[i] : x;
    }
}

void embed(const EmbedArgs& a, const Ctx& ctx) {
    ctx.each(a.tokens, 1, [&](int64_t t0, int64_t t1) {
        for (int64_t t = t0; t < t1; t++) embed_row(a, t);
    });
    ctx.barrier();
}

}  // namespace RADIX_ISA
}  // namespace radix

// Packed weights and their memory, as Python holds them.
#pragma once
#include "runtime.h"

namespace radix {

using Address = uintptr_t;
template <class T>
T* at(Address a) {
    return reinterpret_cast<T*>(a);
}

// Zeroed memory for packed weights, on huge pages where the system gives them.
struct Memory {
    void* data = nullptr;
    size_t bytes = 0;
    explicit Memory(size_t n);
    ~Memory();
    Memory(const Memory&) = delete;
    Address address() const { return Address(data); }
};

// Memory that the next ones are parts of while there is enough of it: its pages may have been made already.
// What is left goes back to the system when no more is lent.
void lend_memory(Address begin, size_t bytes);
void end_lending();

struct Linear {
    Weight w;
    Linear(int64_t n, int64_t k, int format, int group, int span, bool paired, Address data, Address scale,
           Address offset, Address multiple, Address column_sum, Address bias) {
        w.n = n, w.k = k, w.group = group, w.span = span, w.paired = paired;
        w.fp4 = format == W_FP4, w.format = w.fp4 ? W_W4A8 : format;
        w.data = at<void>(data), w.scale = at<float>(scale), w.offset = at<float>(offset),
        w.multiple = at<int8_t>(multiple);
        w.column_sum = at<int32_t>(column_sum), w.bias = at<float>(bias);
    }
    double bytes() const { return double(w.n) * double(w.k) * bytes_each(w.format); }
    void run(Address x, int64_t ldx, int64_t m, Address y, int64_t ldy, Address residual, int64_t ldr,
             float out_scale, int act, Address rows, int threads) const {
        LinearArgs a;
        a.w = w, a.x = at<float>(x), a.ldx = ldx, a.m = m, a.rows = at<int32_t>(rows);
        a.y = at<float>(y), a.ldy = ldy, a.residual = at<float>(residual), a.ldr = ldr,
        a.out_scale = out_scale, a.act = act;
        int n = threads > 0 ? threads : threads_for(bytes(), 2.0 * double(m) * double(w.n) * double(w.k));
        const Kernels& k = kernels();
        run_team(n, shared_for(k, a), local_for(k, a, n), [&](const Ctx& c) { run_linear(k, a, c); });
    }
    void pack(Address src, int dtype, int64_t ld, int64_t rows, int64_t first_row) const {
        PackArgs a;
        a.src = at<void>(src), a.src_dtype = dtype, a.ld = ld, a.rows = rows, a.first_row = first_row,
        a.w = w;
        const Kernels& k = kernels();
        run_team(threads_for(double(rows) * double(w.k) * 16, 0), 0, 0, [&](const Ctx& c) { k.pack(a, c); });
    }
    void embed(Address ids, int64_t tokens, Address y, int64_t ldy, float scale) const {
        EmbedArgs a;
        a.ids = at<int32_t>(ids), a.tokens = tokens, a.vocab = w.n, a.dim = w.k, a.packed = 1, a.w = w,
        a.scale = scale;
        a.y = at<float>(y), a.ldy = ldy;
        const Kernels& k = kernels();
        run_team(threads_for(double(tokens) * double(w.k) * 64, 0), 0, 0,
                 [&](const Ctx& c) { k.embed(a, c); });
    }
};

inline Cache make_cache(Address k, Address v, int dtype, int kv_heads, int k_dim, int v_dim, int page_size) {
    Cache c;
    c.k = at<void>(k), c.v = at<void>(v), c.dtype = dtype, c.kv_heads = kv_heads, c.k_dim = k_dim,
    c.v_dim = v_dim, c.page_size = page_size;
    c.latent = !k && v;
    return c;
}

}  // namespace radix

// The sixteen lanes of simd.h as four NEON registers. Included by it, inside of its namespace.
struct vf {
    float32x4_t a, b, c, d;  // no array, which would stay in memory
};
#define RADIX_FOUR(name, op) \
    RADIX_INLINE vf name(vf x) { return {op(x.a), op(x.b), op(x.c), op(x.d)}; }
#define RADIX_FOUR_OF_TWO(name, op) \
    RADIX_INLINE vf name(vf x, vf y) { return {op(x.a, y.a), op(x.b, y.b), op(x.c, y.c), op(x.d, y.d)}; }
RADIX_INLINE vf set1(float x) {
    const float32x4_t v = vdupq_n_f32(x);
    return {v, v, v, v};
}
RADIX_INLINE vf zero() { return set1(0.0f); }
RADIX_INLINE vf load(const float* p) {
    return {vld1q_f32(p), vld1q_f32(p + 4), vld1q_f32(p + 8), vld1q_f32(p + 12)};
}
RADIX_INLINE void store(float* p, vf x) {
    vst1q_f32(p, x.a), vst1q_f32(p + 4, x.b), vst1q_f32(p + 8, x.c), vst1q_f32(p + 12, x.d);
}
RADIX_INLINE vf load_n(const float* p, int n) {
    if (n == 16) return load(p);
    float t[16] = {0};
    std::memcpy(t, p, size_t(n) * 4);
    return load(t);
}
RADIX_INLINE void store_n(float* p, vf x, int n) {
    if (n == 16) return store(p, x);
    float t[16];
    store(t, x);
    std::memcpy(p, t, size_t(n) * 4);
}
RADIX_FOUR_OF_TWO(add, vaddq_f32)
RADIX_FOUR_OF_TWO(sub, vsubq_f32)
RADIX_FOUR_OF_TWO(mul, vmulq_f32)
RADIX_FOUR_OF_TWO(div, vdivq_f32)
// the second of two where one is not a number, as on x86
RADIX_INLINE float32x4_t larger4(float32x4_t x, float32x4_t y) { return vbslq_f32(vcgtq_f32(x, y), x, y); }
RADIX_INLINE float32x4_t smaller4(float32x4_t x, float32x4_t y) { return vbslq_f32(vcltq_f32(x, y), x, y); }
RADIX_FOUR_OF_TWO(vmax, larger4)
RADIX_FOUR_OF_TWO(vmin, smaller4)
RADIX_INLINE vf fma(vf x, vf y, vf z) {
    return {vfmaq_f32(z.a, x.a, y.a), vfmaq_f32(z.b, x.b, y.b), vfmaq_f32(z.c, x.c, y.c),
            vfmaq_f32(z.d, x.d, y.d)};
}
RADIX_INLINE vf fnma(vf x, vf y, vf z) {
    return {vfmsq_f32(z.a, x.a, y.a), vfmsq_f32(z.b, x.b, y.b), vfmsq_f32(z.c, x.c, y.c),
            vfmsq_f32(z.d, x.d, y.d)};
}
RADIX_FOUR(vabs, vabsq_f32)
RADIX_FOUR(vround, vrndnq_f32)
RADIX_INLINE float32x4_t times_pow2_4(float32x4_t x, float32x4_t n) {
    return vmulq_f32(x,
                     vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(vcvtq_s32_f32(n), vdupq_n_s32(127)), 23)));
}
RADIX_FOUR_OF_TWO(times_pow2, times_pow2_4)
RADIX_INLINE vf select_lt(vf x, vf y, vf a, vf b) {
    return {vbslq_f32(vcltq_f32(x.a, y.a), a.a, b.a), vbslq_f32(vcltq_f32(x.b, y.b), a.b, b.b),
            vbslq_f32(vcltq_f32(x.c, y.c), a.c, b.c), vbslq_f32(vcltq_f32(x.d, y.d), a.d, b.d)};
}
RADIX_INLINE float32x4_t keep4(float32x4_t x, int lo, int hi, float32x4_t f) {
    const int32_t order[4] = {0, 1, 2, 3};
    const int32x4_t lane = vld1q_s32(order);
    return vbslq_f32(vandq_u32(vcgeq_s32(lane, vdupq_n_s32(lo)), vcltq_s32(lane, vdupq_n_s32(hi))), x, f);
}
RADIX_INLINE vf keep_lanes(vf x, int lo, int hi, vf f) {
    return {keep4(x.a, lo, hi, f.a), keep4(x.b, lo - 4, hi - 4, f.b), keep4(x.c, lo - 8, hi - 8, f.c),
            keep4(x.d, lo - 12, hi - 12, f.d)};
}
RADIX_INLINE float lane_tree_sum(vf x) {
    const float32x4_t q = vaddq_f32(vaddq_f32(x.a, x.c), vaddq_f32(x.b, x.d));
    return vpadds_f32(vadd_f32(vget_low_f32(q), vget_high_f32(q)));
}
RADIX_INLINE float lane_max(vf x) { return vmaxnmvq_f32(larger4(larger4(x.a, x.b), larger4(x.c, x.d))); }
RADIX_INLINE float32x4_t upper_half(uint16x4_t h) { return vreinterpretq_f32_u32(vshll_n_u16(h, 16)); }
RADIX_INLINE vf load_bf16(const uint16_t* p) {
    return {upper_half(vld1_u16(p)), upper_half(vld1_u16(p + 4)), upper_half(vld1_u16(p + 8)),
            upper_half(vld1_u16(p + 12))};
}
RADIX_INLINE void load_bf16_pairs(const uint16_t* p, vf& x, vf& y) {
    const uint32x4_t m = vdupq_n_u32(0xffff0000u);
    uint32x4_t w[4];
    for (int i = 0; i < 4; i++) w[i] = vreinterpretq_u32_u16(vld1q_u16(p + 8 * i));
    x = {vreinterpretq_f32_u32(vshlq_n_u32(w[0], 16)), vreinterpretq_f32_u32(vshlq_n_u32(w[1], 16)),
         vreinterpretq_f32_u32(vshlq_n_u32(w[2], 16)), vreinterpretq_f32_u32(vshlq_n_u32(w[3], 16))};
    y = {vreinterpretq_f32_u32(vandq_u32(w[0], m)), vreinterpretq_f32_u32(vandq_u32(w[1], m)),
         vreinterpretq_f32_u32(vandq_u32(w[2], m)), vreinterpretq_f32_u32(vandq_u32(w[3], m))};
}
RADIX_INLINE float32x4_t load_f16_4(const uint16_t* p) {
    return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p)));
}
RADIX_INLINE vf load_f16(const uint16_t* p) {
    return {load_f16_4(p), load_f16_4(p + 4), load_f16_4(p + 8), load_f16_4(p + 12)};
}
RADIX_INLINE vf load_i8(const int8_t* p) {
    const int8x16_t w = vld1q_s8(p);
    const int16x8_t lo = vmovl_s8(vget_low_s8(w)), hi = vmovl_s8(vget_high_s8(w));
    return {vcvtq_f32_s32(vmovl_s16(vget_low_s16(lo))), vcvtq_f32_s32(vmovl_s16(vget_high_s16(lo))),
            vcvtq_f32_s32(vmovl_s16(vget_low_s16(hi))), vcvtq_f32_s32(vmovl_s16(vget_high_s16(hi)))};
}
RADIX_INLINE void store_f16_4(uint16_t* p, float32x4_t x) {
    vst1_u16(p, vreinterpret_u16_f16(vcvt_f16_f32(x)));
}
RADIX_INLINE void store_f16(uint16_t* p, vf x) {
    store_f16_4(p, x.a), store_f16_4(p + 4, x.b), store_f16_4(p + 8, x.c), store_f16_4(p + 12, x.d);
}
RADIX_INLINE void store_bf16_4(uint16_t* p, float32x4_t x) {
    const uint32x4_t u = vreinterpretq_u32_f32(x), odd = vandq_u32(vshrq_n_u32(u, 16), vdupq_n_u32(1));
    const uint16x4_t near = vshrn_n_u32(vaddq_u32(vaddq_u32(u, vdupq_n_u32(0x7fff)), odd), 16);
    const uint16x4_t nan = vorr_u16(vshrn_n_u32(u, 16), vdup_n_u16(0x40));
    vst1_u16(p, vbsl_u16(vmovn_u32(vceqq_f32(x, x)), near, nan));
}
#undef RADIX_FOUR
#undef RADIX_FOUR_OF_TWO

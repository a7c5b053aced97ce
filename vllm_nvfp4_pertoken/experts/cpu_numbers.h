/* cpu_kernel.c's arithmetic on numbers, in plain C, for every instruction set: conversions, exp and
 * the activations, and the quantizer. All of it is reference.py and nvfp4.py, rounding by rounding.
 * Compilers vectorize these loops; -ffast-math and contraction to FMA would change the results. */
#include <stdint.h>
#include <string.h>
#ifdef __FAST_MATH__
#error "-ffast-math would change the results"
#endif

#define INLINE static inline __attribute__((always_inline))
#define STRING(x) #x
#define SIMD(clauses) _Pragma(STRING(omp simd clauses))

enum { BF16, FP16, FP32 };
enum { SILU, GELU, GELU_TANH, RELU2, LINEAR };

INLINE int64_t min64(int64_t a, int64_t b) { return a < b ? a : b; }
INLINE uint32_t bits_of(float f) { uint32_t u; memcpy(&u, &f, 4); return u; }
INLINE float float_of(uint32_t u) { float f; memcpy(&f, &u, 4); return f; }

INLINE uint32_t to_bf16(float f) { /* nearest even */
    uint32_t u = bits_of(f);
    return (u & 0x7fffffff) > 0x7f800000 ? 0x7fc0 : (u + 0x7fff + (u >> 16 & 1)) >> 16;
}
INLINE uint32_t to_fp16(float f) { /* nearest even */
    uint32_t u = bits_of(f), a = u & 0x7fffffff;
    uint32_t subnormal = bits_of(float_of(a) + 0.5f) - 0x3f000000; /* ulp of 0.5 is fp16's 2^-24 */
    uint32_t h = (a - 0x38000000 + 0xfff + (a >> 13 & 1)) >> 13;
    h = a < 0x38800000 ? subnormal : h;
    h = a >= 0x477ff000 ? 0x7c00 : h;
    h = a > 0x7f800000 ? 0x7e00 : h;
    return h | (u >> 16 & 0x8000);
}
INLINE float from_fp16(uint32_t h) {
    uint32_t a = (h & 0x7fff) << 13;
    float f = a >= 0x0f800000 ? float_of(a | 0x7f800000) : float_of(a) * 0x1p112f;
    return float_of(bits_of(f) | (h & 0x8000) << 16);
}
/* n elements of `src`, of dtype -> fp32, and back. */
INLINE void load(float *x, const void *src, int64_t n, int dtype) {
    const uint16_t *h = src;
    if (dtype == FP32) memcpy(x, src, n * 4);
    else if (dtype == BF16) for (int64_t i = 0; i < n; i++) x[i] = float_of((uint32_t)h[i] << 16);
    else for (int64_t i = 0; i < n; i++) x[i] = from_fp16(h[i]);
}
INLINE void store(void *dst, const float *x, int64_t n, int dtype) {
    uint16_t *h = dst;
    if (dtype == FP32) memcpy(dst, x, n * 4);
    else if (dtype == BF16) for (int64_t i = 0; i < n; i++) h[i] = (uint16_t)to_bf16(x[i]);
    else for (int64_t i = 0; i < n; i++) h[i] = (uint16_t)to_fp16(x[i]);
}

INLINE float exp_(float x) { /* reference._exp */
    float c = x > 89.0f ? 89.0f : x;
    c = c < -87.0f ? -87.0f : c;
    float magic = c * 1.4426950408889634f + 12582912.0f;
    float n = magic - 12582912.0f;
    float r = c - n * 0.693359375f;
    r = r - n * -2.12194440e-4f;
    float q = r * 1.3814433e-3f + 8.3687967e-3f;
    q = q * r + 4.1668396e-2f;
    q = q * r + 1.6666520e-1f;
    q = q * r + 4.9999994e-1f;
    return (q * (r * r) + r + 1.0f) * float_of((bits_of(magic) - 0x4b400000u + 127u) << 23);
}
INLINE float normal_cdf(float x) { /* reference._normal_cdf */
    float u = 1.0f / (__builtin_fabsf(x) * 0.35f + 1.0f);
    float p = u * -2.9145669e-2f + 1.4397052e-1f;
    p = p * u + -2.5571203e-1f;
    p = p * u + 1.5917183e-1f;
    p = p * u + -2.3108376e-2f;
    p = p * u + 1.0550745e-1f;
    p = p * u + 1.1983299e-1f;
    p = p * u + 1.3986185e-1f;
    p = p * u + 1.3962141e-1f;
    float tail = p * u * exp_(x * x * -0.5f);
    return x < 0.0f ? tail : 1.0f - tail;
}
/* reference._function, in place. */
INLINE void apply(float *x, int64_t n, int function, float alpha) {
#define EACH(f) SIMD() for (int64_t i = 0; i < n; i++) { float v = x[i]; x[i] = f; }
    if (function == SILU) EACH(v / (exp_(-(v * alpha)) + 1.0f))
    else if (function == GELU) EACH(v * normal_cdf(v))
    else if (function == GELU_TANH)
        EACH(v / (exp_(-(v * (v * v * 0.044715f + 1.0f) * 1.5957691216057308f)) + 1.0f))
    else EACH((v < 0.0f ? 0.0f : v) * (v < 0.0f ? 0.0f : v))
#undef EACH
}

#define FLT_MAX_ 3.402823466e+38f
/* nvfp4.quantize_per_token, exact mode: the encode scale e for a row's amax. */
INLINE float encode_scale(float amax) {
    float e = 2688.0f / amax;
    return e > FLT_MAX_ ? FLT_MAX_ : e == 0.0f ? 1.0f : e;
}
/* A block's scale, s = amax * (e * (1 / 6)), to e4m3: nearest even, saturating, NaN kept. */
INLINE float to_e4m3(float s) {
    uint32_t u = bits_of(s);
    float normal = float_of((u + 0x7ffff + (u >> 20 & 1)) & 0xfff00000);
    float e4m3 = s < 0x1p-6f ? (s + 0x1p14f) - 0x1p14f : normal;
    return s > 448.0f ? 448.0f : s != s ? s : e4m3;
}
/* Twice the e2m1 value: nearest, ties to the even code, saturating, NaN to +6. */
INLINE int32_t to_e2m1_twice(float y) {
    y = y > 6.0f ? 6.0f : y < -6.0f ? -6.0f : y != y ? 6.0f : y;
    /* 1.5 * 2^22 * (binade of y, at least 1): its ulp is e2m1's step there */
    uint32_t binade = bits_of(y) & 0x7f800000;
    float magic = float_of((binade < 0x3f800000 ? 0x3f800000 : binade) + (22 << 23) + (1 << 22));
    return (int32_t)(((y + magic) - magic) * 2.0f);
}
/* One step of a tree of sums or maxima. Compilers vectorize it well, unlike loops over 16. */
#define HALVE(to, from, n, op) \
    SIMD() for (int64_t i_ = 0; i_ < (n); i_++) (to)[i_] = op((from)[2 * i_], (from)[2 * i_ + 1])
#define LARGER(a, b) ((a) > (b) ? (a) : (b))
#define SUM(a, b) ((a) + (b))

/* x fp32 [k] -> a row as in rows_t; returns its row_scale. 16 blocks at a time. */
INLINE float quantize_row(const float *restrict x, int64_t k, int8_t *restrict code,
                          float *restrict scale, int32_t *restrict offset) {
    int64_t blocks = k / 16;
    int32_t amax = 0, t[256], u[128];
    for (int64_t b = 0; b < blocks; b += 16) { /* as bits, whose order is that of size; NaN is -1 */
        int64_t n = min64(blocks - b, 16);
        SIMD() for (int64_t i = 0; i < 16 * n; i++) {
            int32_t a = (int32_t)(bits_of(x[16 * b + i]) & 0x7fffffff);
            t[i] = a > 0x7f800000 ? -1 : a;
        }
        HALVE(u, t, 8 * n, LARGER);
        HALVE(t, u, 4 * n, LARGER);
        HALVE(u, t, 2 * n, LARGER);
        HALVE(t, u, n, LARGER);
        for (int64_t i = 0; i < n; i++) amax = LARGER(amax, t[i]);
        memcpy(scale + b, t, n * 4); /* of a block without a number: -1, which is a NaN */
    }
    float e = encode_scale(float_of((uint32_t)amax)), dec = 1.0f / e;
    for (int64_t b = 0; b < blocks; b += 16) {
        int64_t n = min64(blocks - b, 16);
        float factor[16];
        SIMD() for (int64_t i = 0; i < n; i++) {
            float e4m3 = to_e4m3(scale[b + i] * (e * 0.16666667f)), f = 1.0f / (e4m3 * dec);
            factor[i] = f > FLT_MAX_ ? FLT_MAX_ : f;
            scale[b + i] = 0.25f * e4m3;
        }
        for (int64_t i = 0; i < n; i++)
            SIMD() for (int j = 0; j < 16; j++)
                t[16 * i + j] = to_e2m1_twice(x[16 * (b + i) + j] * factor[i]);
        SIMD() for (int64_t i = 0; i < 16 * n; i++) code[16 * b + i] = (int8_t)t[i];
        HALVE(u, t, 8 * n, SUM);
        HALVE(t, u, 4 * n, SUM);
        HALVE(u, t, 2 * n, SUM);
        HALVE(t, u, n, SUM);
        for (int64_t i = 0; i < n; i++) offset[b + i] = -12 * t[i];
    }
    return dec;
}

/* NVFP4 mixture-of-experts layer on a CPU, called through ctypes by cpu.py, which checks the
 * arguments. reference.py says in torch what is computed, and gives the same bits.
 *
 * Why every path gives the same bits. The 16 products of a block, integers times two block scales,
 * add up exactly in fp32, whether as integers (VNNI), as floats, or in an AMX tile (reference.py).
 * Only sums of blocks round, in a fixed order: acc = acc + (block[2b] + block[2b + 1]). An AMX tile
 * adds the products of its even k, those of its odd k, and then their sum to the accumulator (Intel
 * SDM, TDPBF16PS); so block 2b goes to its even k, and block 2b + 1 to its odd k.
 * Everything else is written in single roundings: build with -ffp-contract=off.
 *
 * Packed weights (cpu.pack): the checkpoint's bytes in another order, strips of 16 output rows.
 *   codes  [strip][K / 32][g < 4][row < 16][i < 4]   byte: low nibble  k = 32b + 4g + i,
 *                                                          high nibble k = 32b + 16 + 4g + i
 *          and for the last 16 k, if K % 32 == 16:   [g < 2][row][i]: k and k + 8 instead.
 *   scales [strip][K / 16][row < 16]                 e4m3 bytes
 * Gated w13's strips alternate, gate, up, gate, up, so that a task has what an activation needs.
 */
#include <omp.h>
#include <stdint.h>
#include <string.h>
#if defined(__x86_64__) && defined(__linux__)
#define X86 1
#include <cpuid.h>
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif
#ifdef __FAST_MATH__
#error "-ffast-math would change the results"
#endif

#define INLINE static inline __attribute__((always_inline))
#define STRING(x) #x
#define SIMD(clauses) _Pragma(STRING(omp simd clauses))
#define ALIGN(n) (((n) + 63) & ~(int64_t)63)
#define ROWS 32               /* of a task's accumulator */
#define COLS 64               /* of it: up to 4 strips */
#define AMX_MIN_ROWS 6        /* with fewer, decoding to tiles costs more than VNNI dot products */
#define PANEL_BYTES (1 << 20) /* of an expert's rows that a task keeps in the L2 cache */

enum { BF16, FP16, FP32 };
enum { SILU, GELU, GELU_TANH, RELU2 };
enum { PORTABLE, AVX2, AVX512, AMX };

typedef struct { /* mirrored by cpu._Args */
    const void *hidden;         /* [tokens, hidden_size], dtype */
    void *output;               /* the same */
    const float *topk_weights;  /* [tokens, top_k] */
    const int32_t *topk_ids;    /* [tokens, top_k] */
    const int32_t *expert_map;  /* [global_experts], or NULL */
    const uint8_t *w13, *w13_scale, *w2, *w2_scale;
    const float *w13_scale_2;   /* [experts, 2 if gated else 1] */
    const float *w2_scale_2;    /* [experts] */
    const float *w13_bias, *w2_bias; /* checkpoint order, or NULL */
    uint8_t *scratch;           /* 64-byte aligned, moe_scratch_bytes() of it */
    int64_t tokens, top_k, experts, global_experts, hidden_size, inter_size;
    int32_t dtype, function, gated, interleaved, isa, threads;
    float alpha, beta, limit;
} moe_args;

/* Quantized rows: value = 0.5 * code * block scale * row_scale. */
typedef struct {
    int64_t k;
    int8_t *code;      /* [rows, k], twice the e2m1 value */
    float *scale;      /* [rows, k / 16], a quarter of the block scale: both codes are doubled */
    int32_t *offset;   /* [rows, k / 16], -12 * sum of the block's codes: undoes unsigned weights */
    float *row_scale;  /* [rows] */
    uint8_t *panel;    /* AMX: [tiles of 16 rows][ceil(k / 32)][16][32] bf16, see expand_amx */
} rows_t;

static inline int64_t element_size(const moe_args *p) { return p->dtype == FP32 ? 4 : 2; }

/* ------------------------------------------------------------------ numbers, every ISA
 * In loops over 16, which compilers vectorize. */

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
/* A block's scale, from s = amax * (e * (1 / 6)) >= 0 to e4m3: nearest even, saturating, NaN kept. */
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
/* x fp32 [k] -> row `row` of out. */
INLINE void quantize_row(const float *x, const rows_t *out, int64_t row) {
    int64_t k = out->k, blocks = k / 16;
    float *scale = out->scale + row * blocks;
    int32_t amax = 0; /* as bits, whose order is that of size, and NaN can be told apart */
    for (int64_t b = 0; b < blocks; b++) {
        int32_t m = -1;
        SIMD(reduction(max : m)) for (int i = 0; i < 16; i++) {
            int32_t a = (int32_t)(bits_of(x[16 * b + i]) & 0x7fffffff);
            a = a > 0x7f800000 ? -1 : a;
            m = a > m ? a : m;
        }
        scale[b] = float_of((uint32_t)m); /* NaN if all are */
        amax = m > amax ? m : amax;
    }
    float e = encode_scale(float_of((uint32_t)amax)), dec = 1.0f / e;
    out->row_scale[row] = dec;
    for (int64_t b0 = 0; b0 < blocks; b0 += 16) {
        int64_t n = blocks - b0 < 16 ? blocks - b0 : 16;
        float factor[16];
        SIMD() for (int64_t i = 0; i < n; i++) {
            float e4m3 = to_e4m3(scale[b0 + i] * (e * 0.16666667f)), f = 1.0f / (e4m3 * dec);
            factor[i] = f > FLT_MAX_ ? FLT_MAX_ : f;
            scale[b0 + i] = 0.25f * e4m3;
        }
        for (int64_t b = b0; b < b0 + n; b++) {
            int32_t code[16], sum = 0;
            int8_t *bytes = out->code + row * k + 16 * b;
            SIMD(reduction(+ : sum)) for (int i = 0; i < 16; i++) {
                code[i] = to_e2m1_twice(x[16 * b + i] * factor[b - b0]);
                sum += code[i];
            }
            SIMD() for (int i = 0; i < 16; i++) bytes[i] = (int8_t)code[i];
            out->offset[row * blocks + b] = -12 * sum;
        }
    }
}

/* acc [n][COLS] -> out, rows `stride` bytes apart, first column `col`: scaled, biased, FC1 through
 * the activation, rounded to dtype. Gated FC1: strips are gate, up, gate, up. */
INLINE void finish_rows(const moe_args *p, int fc, int strips, const float *acc, int n,
                        const float *row_scale, const float *scale_2, const float *bias,
                        int64_t col, char *out, int64_t stride) {
    int gated = fc == 1 && p->gated, groups = gated ? strips / 2 : strips, width = 16 * groups;
    int64_t step = gated && p->interleaved ? 2 : 1, to_up = p->interleaved ? 1 : p->inter_size;
    float limit = p->limit, beta = p->beta;
    for (int r = 0; r < n; r++, acc += COLS, out += stride) {
        float v[COLS], up[COLS / 2], scale = row_scale[r] * scale_2[0];
        for (int g = 0; g < groups; g++)
            SIMD() for (int j = 0; j < 16; j++)
                v[16 * g + j] = acc[g * (gated ? 32 : 16) + j] * scale;
        if (bias)
            for (int j = 0; j < width; j++) v[j] = v[j] + bias[(col + j) * step];
        if (gated) {
            float up_scale = row_scale[r] * scale_2[1];
            for (int g = 0; g < groups; g++)
                SIMD() for (int j = 0; j < 16; j++)
                    up[16 * g + j] = acc[32 * g + 16 + j] * up_scale;
            if (bias)
                for (int j = 0; j < width; j++) up[j] = up[j] + bias[(col + j) * step + to_up];
            if (limit < __builtin_inff() || beta != 0.0f)
                SIMD() for (int j = 0; j < width; j++) {
                    v[j] = v[j] > limit ? limit : v[j];
                    float u = up[j] > limit ? limit : up[j];
                    up[j] = (u < -limit ? -limit : u) + beta;
                }
        }
        if (fc == 1) apply(v, width, p->function, p->alpha);
        if (gated)
            SIMD() for (int j = 0; j < width; j++) v[j] = v[j] * up[j];
        store(out + col * element_size(p), v, width, p->dtype);
    }
}

/* One token: its experts' outputs y, in slot order. rows: -1 for slots without an expert. */
INLINE void combine_row(const moe_args *p, const char *y, const int32_t *rows, const float *weight,
                        float *acc, float *line, void *out) {
    int64_t h = p->hidden_size;
    memset(acc, 0, h * 4);
    for (int64_t j = 0; j < p->top_k; j++) {
        if (rows[j] < 0) continue;
        float w = weight[j];
        load(line, y + rows[j] * h * element_size(p), h, p->dtype);
        for (int64_t i = 0; i < h; i++) acc[i] = acc[i] + line[i] * w;
    }
    store(out, acc, h, p->dtype);
}

/* ------------------------------------------------------------------ the GEMMs, per ISA
 * decode: one packed strip -> a buffer of BUFFER_BYTES(k).
 * dot: buffer x rows index[0 .. n) (n <= ROWS; NULL: first, first + 1, ...) -> acc[r * COLS + 0 .. 16).
 */
#define BUFFER_BYTES(k) ALIGN((k) * 36 + 1024)

static float e4m3_value[256];
static const int8_t e2m1_twice[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};

static void decode_portable(const uint8_t *codes, const uint8_t *scales, int64_t k, uint8_t *buf) {
    float *scale = (float *)buf;                 /* [k / 16][16 rows] */
    int16_t *w = (int16_t *)(buf + ALIGN(4 * k)); /* [k][16 rows] */
    for (int64_t i = 0; i < k; i++) scale[i] = e4m3_value[scales[i]];
    for (int64_t k0 = 0; k0 < k; k0 += 32) {
        int half = k - k0 < 32 ? 8 : 16; /* distance of the two k in a byte */
        for (int j = 0; j < half; j++)
            for (int row = 0; row < 16; row++) {
                uint8_t byte = codes[k0 * 8 + (j / 4) * 64 + row * 4 + j % 4];
                w[(k0 + j) * 16 + row] = e2m1_twice[byte & 15];
                w[(k0 + j + half) * 16 + row] = e2m1_twice[byte >> 4];
            }
    }
}
static void dot_portable(const uint8_t *buf, const rows_t *x, const int32_t *index, int64_t first,
                         int n, float *acc) {
    int64_t k = x->k;
    const float *scale = (const float *)buf;
    const int16_t *w = (const int16_t *)(buf + ALIGN(4 * k));
    for (int r = 0; r < n; r++) {
        int64_t row = index ? index[first + r] : first + r;
        float sum[16] = {0}, pair[16] = {0};
        for (int64_t b = 0; b < k / 16; b++) {
            int16_t s[16] = {0};
            for (int i = 0; i < 16; i++) {
                int16_t xi = x->code[row * k + 16 * b + i];
                for (int j = 0; j < 16; j++) s[j] = (int16_t)(s[j] + xi * w[(16 * b + i) * 16 + j]);
            }
            float xs = x->scale[row * (k / 16) + b];
            for (int j = 0; j < 16; j++) pair[j] = pair[j] + s[j] * (scale[16 * b + j] * xs);
            if (b % 2 || b + 1 == k / 16)
                for (int j = 0; j < 16; j++) { sum[j] = sum[j] + pair[j]; pair[j] = 0.0f; }
        }
        memcpy(acc + r * COLS, sum, sizeof sum);
    }
}

#ifdef X86
#define TARGET_AVX2 __attribute__((target("avx2")))
#define TARGET_AVX512 __attribute__((target( \
    "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,prefer-vector-width=512")))
#define TARGET_AMX __attribute__((target( \
    "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512fp16,amx-tile,amx-bf16")))

/* Unsigned weights for the u8 x s8 instructions: twice the e2m1 value, plus 12. */
#define E2M1_U8 12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0

TARGET_AVX2 static void decode_avx2(const uint8_t *codes, const uint8_t *scales, int64_t k,
                                    uint8_t *buf) {
    float *scale = (float *)buf;      /* [k / 16][16 rows] */
    uint8_t *w = buf + ALIGN(4 * k);  /* [k / 16][g < 4][16 rows][4] */
    const __m256i lut = _mm256_setr_epi8(E2M1_U8, E2M1_U8), low = _mm256_set1_epi8(15);
    for (int64_t i = 0; i < k; i++) scale[i] = e4m3_value[scales[i]];
    for (int64_t k0 = 0; k0 < k; k0 += 32) {
        int half = k - k0 < 32 ? 128 : 256; /* bytes */
        for (int i = 0; i < half; i += 32) {
            __m256i z = _mm256_loadu_si256((const void *)(codes + k0 * 8 + i));
            __m256i hi = _mm256_and_si256(_mm256_srli_epi16(z, 4), low);
            uint8_t *dst = w + k0 * 16 + i;
            _mm256_store_si256((void *)dst, _mm256_shuffle_epi8(lut, _mm256_and_si256(z, low)));
            _mm256_store_si256((void *)(dst + half), _mm256_shuffle_epi8(lut, hi));
        }
    }
}
TARGET_AVX2 static void dot_avx2(const uint8_t *buf, const rows_t *x, const int32_t *index,
                                 int64_t first, int n, float *acc) {
    int64_t k = x->k;
    const float *scale = (const float *)buf;
    const uint8_t *w = buf + ALIGN(4 * k);
    const __m256i ones = _mm256_set1_epi16(1);
    for (int r = 0; r < n; r++) {
        int64_t row = index ? index[first + r] : first + r;
        const int8_t *xc = x->code + row * k;
        for (int half = 0; half < 2; half++) { /* 8 of the 16 outputs */
            __m256 sum = _mm256_setzero_ps(), pair = _mm256_setzero_ps();
            for (int64_t b = 0; b < k / 16; b++) {
                __m256i s = _mm256_setzero_si256(); /* |each int16| <= 8 * 24 * 12 */
                for (int g = 0; g < 4; g++) {
                    int32_t x4;
                    memcpy(&x4, xc + 16 * b + 4 * g, 4);
                    __m256i w4 = _mm256_load_si256((const void *)(w + b * 256 + g * 64 + half * 32));
                    s = _mm256_add_epi16(s, _mm256_maddubs_epi16(w4, _mm256_set1_epi32(x4)));
                }
                s = _mm256_add_epi32(_mm256_madd_epi16(s, ones),
                                     _mm256_set1_epi32(x->offset[row * (k / 16) + b]));
                __m256 t = _mm256_mul_ps(_mm256_load_ps(scale + 16 * b + 8 * half),
                                         _mm256_set1_ps(x->scale[row * (k / 16) + b]));
                pair = _mm256_add_ps(pair, _mm256_mul_ps(_mm256_cvtepi32_ps(s), t));
                if (b % 2 || b + 1 == k / 16) {
                    sum = _mm256_add_ps(sum, pair);
                    pair = _mm256_setzero_ps();
                }
            }
            _mm256_storeu_ps(acc + r * COLS + half * 8, sum);
        }
    }
}

/* 32 e4m3 bytes -> fp16 * 2^-8, which e4m3's subnormals fit. 0x7f becomes 480, not NaN. */
#define E4M3_TO_FP16(bytes) _mm512_and_si512( \
    _mm512_srai_epi16(_mm512_slli_epi16(_mm512_cvtepu8_epi16(bytes), 8), 1), \
    _mm512_set1_epi16((int16_t)0xbfff))

TARGET_AVX512 static void decode_avx512(const uint8_t *codes, const uint8_t *scales, int64_t k,
                                        uint8_t *buf) {
    float *scale = (float *)buf;      /* as decode_avx2 */
    uint8_t *w = buf + ALIGN(4 * k);
    const __m512i lut = _mm512_broadcast_i32x4(_mm_setr_epi8(E2M1_U8));
    const __m512i low = _mm512_set1_epi8(15);
    for (int64_t k0 = 0; k0 < k; k0 += 32) {
        int half = k - k0 < 32 ? 128 : 256;
        __mmask32 valid = half == 256 ? 0xffffffff : 0xffff;
        __m512i s = E4M3_TO_FP16(_mm256_maskz_loadu_epi8(valid, scales + k0));
        __m512 s0 = _mm512_cvtph_ps(_mm512_castsi512_si256(s));
        __m512 s1 = _mm512_cvtph_ps(_mm512_extracti64x4_epi64(s, 1));
        _mm512_storeu_ps(scale + k0, _mm512_mul_ps(s0, _mm512_set1_ps(256.0f)));
        if (half == 256)
            _mm512_storeu_ps(scale + k0 + 16, _mm512_mul_ps(s1, _mm512_set1_ps(256.0f)));
        for (int i = 0; i < half; i += 64) {
            __m512i z = _mm512_loadu_si512(codes + k0 * 8 + i);
            __m512i hi = _mm512_and_si512(_mm512_srli_epi16(z, 4), low);
            uint8_t *dst = w + k0 * 16 + i;
            _mm512_store_si512(dst, _mm512_shuffle_epi8(lut, _mm512_and_si512(z, low)));
            _mm512_store_si512(dst + half, _mm512_shuffle_epi8(lut, hi));
        }
    }
}
/* R rows at once: weights are loaded once for all of them. */
TARGET_AVX512 INLINE void dot_rows_avx512(const uint8_t *buf, const rows_t *x, const int64_t *row,
                                          int R, float *acc) {
    int64_t k = x->k, blocks = k / 16;
    const float *scale = (const float *)buf;
    const uint8_t *w = buf + ALIGN(4 * k);
    __m512 sum[4];
    for (int r = 0; r < R; r++) sum[r] = _mm512_setzero_ps();
#define BLOCK_DOT(b) ({ \
        __m512i s_ = _mm512_set1_epi32(x->offset[row[r] * blocks + (b)]); \
        for (int g_ = 0; g_ < 4; g_++) { \
            int32_t x4_; \
            memcpy(&x4_, x->code + row[r] * k + 16 * (b) + 4 * g_, 4); \
            __m512i w4_ = _mm512_load_si512(w + (b) * 256 + g_ * 64); \
            s_ = _mm512_dpbusd_epi32(s_, w4_, _mm512_set1_epi32(x4_)); \
        } \
        _mm512_cvtepi32_ps(s_); })
#define BLOCK_SCALE(b) _mm512_mul_ps(_mm512_load_ps(scale + 16 * (b)), \
                                     _mm512_set1_ps(x->scale[row[r] * blocks + (b)]))
    for (int64_t b = 0; b + 1 < blocks; b += 2)
        for (int r = 0; r < R; r++) {
            __m512 even = _mm512_mul_ps(BLOCK_DOT(b), BLOCK_SCALE(b)); /* exact */
            __m512 pair = _mm512_fmadd_ps(BLOCK_DOT(b + 1), BLOCK_SCALE(b + 1), even);
            sum[r] = _mm512_add_ps(sum[r], pair);
        }
    for (int r = 0; r < R; r++) {
        if (blocks % 2)
            sum[r] = _mm512_add_ps(
                sum[r], _mm512_mul_ps(BLOCK_DOT(blocks - 1), BLOCK_SCALE(blocks - 1)));
        _mm512_storeu_ps(acc + r * COLS, sum[r]);
    }
#undef BLOCK_DOT
#undef BLOCK_SCALE
}
TARGET_AVX512 static void dot_avx512(const uint8_t *buf, const rows_t *x, const int32_t *index,
                                     int64_t first, int n, float *acc) {
    for (int r = 0; r < n;) {
        int64_t row[4];
        int left = n - r < 4 ? n - r : 4;
        for (int i = 0; i < left; i++) row[i] = index ? index[first + r + i] : first + r + i;
        if (left == 4) dot_rows_avx512(buf, x, row, 4, acc + r * COLS);
        else if (left == 3) dot_rows_avx512(buf, x, row, 3, acc + r * COLS);
        else if (left == 2) dot_rows_avx512(buf, x, row, 2, acc + r * COLS);
        else dot_rows_avx512(buf, x, row, 1, acc + r * COLS);
        r += left;
    }
}

/* AMX. code * block_scale is formed in fp16, where it is exact and normal, and its bits shifted to
 * bf16's fields, which divides by 2^112; the rows' panel is multiplied by 2^112 instead. */
TARGET_AMX static void decode_amx(const uint8_t *codes, const uint8_t *scales, int64_t k,
                                  uint8_t *buf) { /* [ceil(k / 32)][16][16 rows][2] bf16 */
    static const uint16_t lut[32] = { /* fp16; twice, so that index bit 4 does not matter */
        0, 0x3800, 0x3c00, 0x3e00, 0x4000, 0x4200, 0x4400, 0x4600,
        0x8000, 0xb800, 0xbc00, 0xbe00, 0xc000, 0xc200, 0xc400, 0xc600,
        0, 0x3800, 0x3c00, 0x3e00, 0x4000, 0x4200, 0x4400, 0x4600,
        0x8000, 0xb800, 0xbc00, 0xbe00, 0xc000, 0xc200, 0xc400, 0xc600};
    const __m512i table = _mm512_loadu_si512(lut);
    const __m512i mask = _mm512_set1_epi16((int16_t)0x8fff);
    __m512i pick[4]; /* byte i of each 32-bit lane -> its low nibble, its high nibble as words */
    for (int i = 0; i < 4; i++)
        pick[i] = _mm512_set1_epi64((8LL * i) | (8LL * i + 4) << 16 | (8LL * i + 32) << 32 |
                                    (8LL * i + 36) << 48);
    __m512i interleave; /* words row, 16 + row */
    {
        uint16_t order[32];
        for (int i = 0; i < 32; i++) order[i] = (uint16_t)(i / 2 + 16 * (i % 2));
        interleave = _mm512_loadu_si512(order);
    }
    for (int64_t k0 = 0; k0 < k; k0 += 32, buf += 1024) {
        int tail = k - k0 < 32;
        __m256i bytes = tail ? _mm256_broadcastsi128_si256(_mm_loadu_si128((const void *)(scales + k0)))
                             : _mm256_loadu_si256((const void *)(scales + k0));
        __m512h scale = _mm512_mul_ph(
            (__m512h)_mm512_permutexvar_epi16(interleave, E4M3_TO_FP16(bytes)), _mm512_set1_ph(256));
        for (int g = 0; g < 4; g++) {
            if (tail && g >= 2) {
                memset(buf + g * 256, 0, 256);
                continue;
            }
            __m512i z = _mm512_loadu_si512(codes + k0 * 8 + g * 64);
            for (int i = 0; i < 4; i++) {
                __m512i code = _mm512_permutexvar_epi16(
                    _mm512_multishift_epi64_epi8(pick[i], z), table);
                __m512i w = (__m512i)_mm512_mul_ph((__m512h)code, scale);
                w = _mm512_and_si512(_mm512_srai_epi16(w, 3), mask);
                _mm512_store_si512(buf + (4 * g + i) * 64, w);
            }
        }
    }
}
/* Row `row` -> line r of its tile: [ceil(k / 32)][r][16 pairs (block 2b, block 2b + 1)] bf16. */
TARGET_AMX static void expand_amx(const rows_t *x, int64_t row, uint8_t *tile, int r) {
    int64_t k = x->k;
    for (int64_t k0 = 0; k0 < k; k0 += 32) {
        __m512i half[2] = {_mm512_setzero_si512(), _mm512_setzero_si512()};
        for (int i = 0; i < (k - k0 < 32 ? 1 : 2); i++) {
            __m128i c = _mm_loadu_si128((const void *)(x->code + row * k + k0 + 16 * i));
            float s = x->scale[row * (k / 16) + k0 / 16 + i] * 0x1p113f;
            half[i] = (__m512i)_mm512_mul_ps(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(c)),
                                             _mm512_set1_ps(s));
        }
        if (k - k0 < 32) /* the last 16 k: pairs (k, k + 8) */
            half[1] = _mm512_maskz_compress_epi32(0xff00, half[0]),
            half[0] = _mm512_maskz_mov_epi32(0x00ff, half[0]);
        __m512i pairs = _mm512_mask_blend_epi16(0xaaaaaaaa, _mm512_srli_epi32(half[0], 16), half[1]);
        _mm512_store_si512(tile + k0 * 32 + r * 64, pairs);
    }
}
/* GCC's tile intrinsics do not tell the compiler that they read memory. */
#define WRITTEN __asm__ volatile("" ::: "memory")

/* 16 or 32 rows x 16 or 32 columns. */
TARGET_AMX INLINE void dot_tiles(const uint8_t *b0, const uint8_t *b1, const uint8_t *a0,
                                 const uint8_t *a1, int64_t chunks, float *acc) {
    WRITTEN;
    _tile_zero(0);
    if (b1) _tile_zero(1);
    if (a1) _tile_zero(2);
    if (a1 && b1) _tile_zero(3);
    for (int64_t c = 0; c < chunks * 1024; c += 1024) {
        _tile_loadd(4, a0 + c, 64);
        _tile_loadd(6, b0 + c, 64);
        _tile_dpbf16ps(0, 4, 6);
        if (b1) { _tile_loadd(7, b1 + c, 64); _tile_dpbf16ps(1, 4, 7); }
        if (a1) { _tile_loadd(5, a1 + c, 64); _tile_dpbf16ps(2, 5, 6); }
        if (a1 && b1) _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(0, acc, COLS * 4);
    if (b1) _tile_stored(1, acc + 16, COLS * 4);
    if (a1) _tile_stored(2, acc + 16 * COLS, COLS * 4);
    if (a1 && b1) _tile_stored(3, acc + 16 * COLS + 16, COLS * 4);
}
TARGET_AMX static void dot_amx(const uint8_t *b0, const uint8_t *b1, const uint8_t *panel,
                               int64_t k, int n, float *acc) {
    int64_t chunks = (k + 31) / 32;
    const uint8_t *second = panel + chunks * 1024;
    if (b1 && n > 16) dot_tiles(b0, b1, panel, second, chunks, acc);
    else if (b1) dot_tiles(b0, b1, panel, 0, chunks, acc);
    else if (n > 16) dot_tiles(b0, 0, panel, second, chunks, acc);
    else dot_tiles(b0, 0, panel, 0, chunks, acc);
}
TARGET_AMX static void start_amx(void) {
    struct { uint8_t palette, start, reserved[14]; uint16_t bytes[16]; uint8_t rows[16]; } c;
    memset(&c, 0, sizeof c);
    c.palette = 1;
    for (int i = 0; i < 8; i++) { c.bytes[i] = 64; c.rows[i] = 16; }
    WRITTEN;
    _tile_loadconfig(&c);
}
TARGET_AMX static void stop_amx(void) { _tile_release(); }
#endif

typedef struct {
    void (*decode)(const uint8_t *, const uint8_t *, int64_t, uint8_t *);
    void (*dot)(const uint8_t *, const rows_t *, const int32_t *, int64_t, int, float *);
    void (*quantize)(const float *, const rows_t *, int64_t);
    void (*load)(float *, const void *, int64_t, int);
    void (*finish)(const moe_args *, int, int, const float *, int, const float *, const float *,
                   const float *, int64_t, char *, int64_t);
    void (*combine)(const moe_args *, const char *, const int32_t *, const float *, float *,
                    float *, void *);
} isa_t;

/* The common code, compiled for each instruction set. */
#define INSTANTIATE(NAME, TARGET) \
    TARGET static void quantize_##NAME(const float *x, const rows_t *out, int64_t row) { \
        quantize_row(x, out, row); } \
    TARGET static void load_##NAME(float *x, const void *src, int64_t n, int dtype) { \
        load(x, src, n, dtype); } \
    TARGET static void finish_##NAME(const moe_args *p, int fc, int strips, const float *acc, int n, \
                                     const float *row_scale, const float *scale_2, \
                                     const float *bias, int64_t col, char *out, int64_t stride) { \
        finish_rows(p, fc, strips, acc, n, row_scale, scale_2, bias, col, out, stride); } \
    TARGET static void combine_##NAME(const moe_args *p, const char *y, const int32_t *rows, \
                                      const float *weight, float *acc, float *line, void *out) { \
        combine_row(p, y, rows, weight, acc, line, out); } \
    static const isa_t NAME = {decode_##NAME, dot_##NAME, quantize_##NAME, load_##NAME, \
                               finish_##NAME, combine_##NAME};
INSTANTIATE(portable, )
#ifdef X86
INSTANTIATE(avx2, TARGET_AVX2)
INSTANTIATE(avx512, TARGET_AVX512)
#endif

/* ------------------------------------------------------------------ the layer */

typedef struct { int32_t expert, row, rows; } segment_t; /* rows of one expert */

/* A call's memory, laid out in p->scratch. n = tokens * top_k slots; a row is a slot whose expert is
 * local; rows are sorted by expert. */
typedef struct {
    int32_t *row_of_slot;   /* [n], -1: no local expert */
    int32_t *token_of_row;  /* [n] */
    int32_t *line_of_row;   /* [n], in the panels (16 * tile + line); -1: not through AMX */
    int64_t *first_row;     /* [experts + 1] */
    segment_t *segment[2];  /* what tasks of FC1 and FC2 work on */
    int64_t rows, segments[2];
    rows_t x, h;            /* quantized hidden rows [tokens], inner rows [n] */
    char *inner, *y;        /* [n, inter_size], [n, hidden_size], dtype */
    uint8_t *local;         /* per thread */
    int64_t local_bytes;
} plan_t;

static void place(uint8_t *base, int64_t *used, int64_t bytes, void *pointer) {
    uint8_t *at = base ? base + *used : 0;
    memcpy(pointer, &at, sizeof at);
    *used += ALIGN(bytes);
}
static void place_rows(uint8_t *base, int64_t *used, rows_t *r, int64_t rows, int64_t k,
                       int64_t tiles) {
    r->k = k;
    place(base, used, rows * k, &r->code);
    place(base, used, rows * k / 4, &r->scale);
    place(base, used, rows * k / 4, &r->offset);
    place(base, used, rows * 4, &r->row_scale);
    place(base, used, tiles * ((k + 31) / 32) * 1024, &r->panel);
}
static int64_t min64(int64_t a, int64_t b) { return a < b ? a : b; }

static int64_t make_plan(const moe_args *p, uint8_t *base, plan_t *s) {
    int64_t used = 0, n = p->tokens * p->top_k, tiles = 0;
    int64_t widest = p->hidden_size > p->inter_size ? p->hidden_size : p->inter_size;
    if (p->isa == AMX) /* sum of ceil(rows / 16) over the experts with enough rows */
        tiles = n / 16 + min64(n / (AMX_MIN_ROWS + 1), p->experts);
    place(base, &used, n * 4, &s->row_of_slot);
    place(base, &used, n * 4, &s->token_of_row);
    place(base, &used, n * 4, &s->line_of_row);
    place(base, &used, (p->experts + 1) * 8, &s->first_row);
    for (int i = 0; i < 2; i++)
        place(base, &used, (n / ROWS + min64(n, p->experts)) * sizeof(segment_t), &s->segment[i]);
    place_rows(base, &used, &s->x, p->tokens, p->hidden_size, tiles);
    place_rows(base, &used, &s->h, n, p->inter_size, tiles);
    place(base, &used, n * p->inter_size * element_size(p), &s->inner);
    place(base, &used, n * p->hidden_size * element_size(p), &s->y);
    s->local_bytes = 4 * BUFFER_BYTES(widest) + ROWS * COLS * 4;
    place(base, &used, p->threads * s->local_bytes, &s->local);
    return used;
}

/* Sort the slots by expert. 0, or -1 for an id that no expert has. */
static int group(const moe_args *p, plan_t *s) {
    int64_t n = p->tokens * p->top_k, tiles = 0, *first = s->first_row;
    memset(first, 0, (p->experts + 1) * 8);
    for (int64_t i = 0; i < n; i++) {
        int64_t e = p->topk_ids[i];
        if (e >= p->global_experts) return -1;
        if (e >= 0 && p->expert_map) e = p->expert_map[e];
        if (e >= p->experts) return -1;
        s->row_of_slot[i] = e < 0 ? -1 : (int32_t)e; /* the expert, for now */
        if (e >= 0) first[e + 1]++;
    }
    s->segments[0] = s->segments[1] = 0;
    for (int64_t e = 0; e < p->experts; e++) {
        int64_t count = first[e + 1], start = first[e];
        first[e + 1] += start;
        int amx = p->isa == AMX && count > AMX_MIN_ROWS;
        for (int64_t r = 0; r < count; r++)
            s->line_of_row[start + r] = amx ? (int32_t)(16 * tiles + r) : -1;
        if (amx) tiles += (count + 15) / 16;
        for (int i = 0; i < 2 && count; i++) { /* cut into equal parts of whole accumulators */
            int64_t most = PANEL_BYTES / 2 / (i ? p->inter_size : p->hidden_size);
            int64_t parts = most < ROWS ? (count + ROWS - 1) / ROWS : (count + most - 1) / most;
            int64_t part = ((count + parts - 1) / parts + ROWS - 1) / ROWS * ROWS;
            for (int64_t r = 0; r < count; r += part)
                s->segment[i][s->segments[i]++] = (segment_t){
                    (int32_t)e, (int32_t)(start + r), (int32_t)min64(part, count - r)};
        }
    }
    s->rows = first[p->experts];
    for (int64_t i = 0; i < n; i++) { /* first[e] runs ahead to first[e + 1] */
        int64_t e = s->row_of_slot[i];
        if (e < 0) continue;
        int64_t row = first[e]++;
        s->row_of_slot[i] = (int32_t)row;
        s->token_of_row[row] = (int32_t)(i / p->top_k);
    }
    return 0;
}

static uint8_t *panel_tile(const rows_t *x, int32_t line) {
    return x->panel + line / 16 * ((x->k + 31) / 32) * 1024;
}
static void expand(const rows_t *x, int64_t row, int32_t line) {
#ifdef X86
    if (line >= 0) expand_amx(x, row, panel_tile(x, line), line % 16);
#else
    (void)x, (void)row, (void)line;
#endif
}

/* Some strips of one expert's w13 (fc 1) or w2 (fc 2) times a segment of its rows. */
static void run_task(const moe_args *p, const plan_t *s, const isa_t *isa, int fc,
                     const segment_t *segment, int64_t strip, int strips, uint8_t *local) {
    const rows_t *x = fc == 1 ? &s->x : &s->h;
    int64_t k = x->k, n = fc == 1 ? p->inter_size * (p->gated ? 2 : 1) : p->hidden_size;
    int64_t e = segment->expert, end = segment->row + segment->rows;
    const uint8_t *codes = (fc == 1 ? p->w13 : p->w2) + (e * n + strip * 16) * (k / 2);
    const uint8_t *scales = (fc == 1 ? p->w13_scale : p->w2_scale) + (e * n + strip * 16) * (k / 16);
    const float *scale_2 = fc == 1 ? p->w13_scale_2 + e * (p->gated ? 2 : 1) : p->w2_scale_2 + e;
    const float *bias = fc == 1 ? p->w13_bias : p->w2_bias;
    const int32_t *index = fc == 1 ? s->token_of_row : 0;
    char *out = fc == 1 ? s->inner : s->y;
    int64_t stride = (fc == 1 ? p->inter_size : p->hidden_size) * element_size(p);
    int64_t col = fc == 1 && p->gated ? strip * 8 : strip * 16;
    int amx = s->line_of_row[segment->row] >= 0;
    float *acc = (float *)local, row_scale[ROWS];
    uint8_t *buf[4];
    for (int i = 0; i < strips; i++) {
        buf[i] = local + ROWS * COLS * 4 + i * BUFFER_BYTES(k);
#ifdef X86
        if (amx) decode_amx(codes + i * 8 * k, scales + i * k, k, buf[i]);
        else
#endif
            isa->decode(codes + i * 8 * k, scales + i * k, k, buf[i]);
    }
    for (int64_t row = segment->row; row < end; row += ROWS) {
        int m = (int)min64(ROWS, end - row);
#ifdef X86
        for (int i = 0; amx && i < strips; i += 2)
            dot_amx(buf[i], i + 1 < strips ? buf[i + 1] : 0, panel_tile(x, s->line_of_row[row]), k, m,
                    acc + 16 * i);
#endif
        for (int i = 0; !amx && i < strips; i++)
            isa->dot(buf[i], x, index, row, m, acc + 16 * i);
        for (int r = 0; r < m; r++)
            row_scale[r] = x->row_scale[index ? index[row + r] : row + r];
        isa->finish(p, fc, strips, acc, m, row_scale, scale_2, bias ? bias + e * n : 0, col,
                    out + row * stride, stride);
    }
}

/* All tasks of a GEMM, shared out among the threads of the parallel region. */
static void run_gemm(const moe_args *p, const plan_t *s, const isa_t *isa, int fc, uint8_t *local) {
    int64_t n = fc == 1 ? p->inter_size * (p->gated ? 2 : 1) : p->hidden_size;
    int64_t segments = s->segments[fc - 1], strips = n / 16;
    int64_t step = segments * strips < 32 * p->threads ? 2 : 4; /* enough tasks, or large ones */
    int64_t tasks = (strips + step - 1) / step;
#pragma omp for schedule(dynamic)
    for (int64_t t = 0; t < segments * tasks; t++) {
        int64_t strip = t % tasks * step;
        run_task(p, s, isa, fc, s->segment[fc - 1] + t / tasks, strip,
                 (int)min64(step, strips - strip), local);
    }
}

/* The best instruction set here, as an `isa` value. To be called once before moe_forward. */
int moe_isa(void) {
    for (int i = 0; i < 256; i++) { /* 1 to 15 eighths, times 2^(exponent - 7), at least 2^-6 */
        int exponent = i >> 3 & 15, mantissa = i & 7;
        float v = (float)(exponent ? 8 + mantissa : mantissa) * 0x1p-9f;
        for (int j = 1; j < exponent; j++) v = v + v;
        e4m3_value[i] = i & 128 ? -v : v;
    }
#ifdef X86
    __builtin_cpu_init();
#define HAS __builtin_cpu_supports
    if (!HAS("avx2")) return PORTABLE;
    if (!(HAS("avx512f") && HAS("avx512bw") && HAS("avx512dq") && HAS("avx512vl") &&
          HAS("avx512vnni"))) return AVX2;
    unsigned a, b, c, d = 0;
    if (!HAS("avx512vbmi") || !__get_cpuid_count(7, 0, &a, &b, &c, &d)) return AVX512;
    const unsigned needed = 1u << 22 | 1u << 23 | 1u << 24; /* amx-bf16, avx512-fp16, amx-tile */
    if ((d & needed) != needed) return AVX512;
    /* ARCH_REQ_XCOMP_PERM: Linux gives a process its tile registers on request */
    return syscall(SYS_arch_prctl, 0x1023, 18) == 0 ? AMX : AVX512;
#else
    return PORTABLE;
#endif
}

int64_t moe_scratch_bytes(const moe_args *p) {
    plan_t s;
    return make_plan(p, 0, &s);
}

/* 0, or -1 for an expert id out of range. */
int moe_forward(const moe_args *p) {
    plan_t s;
    make_plan(p, p->scratch, &s);
    if (group(p, &s)) return -1;
    const isa_t *isa = &portable;
#ifdef X86
    if (p->isa == AVX2) isa = &avx2;
    if (p->isa >= AVX512) isa = &avx512;
#endif
    int64_t row1 = p->hidden_size * element_size(p), row2 = p->inter_size * element_size(p);
#pragma omp parallel num_threads(p->threads)
    {
        uint8_t *local = s.local + omp_get_thread_num() * s.local_bytes;
        float *line = (float *)local; /* an fp32 row */
#ifdef X86
        if (p->isa == AMX) start_amx();
#endif
#pragma omp for
        for (int64_t t = 0; t < p->tokens; t++) {
            isa->load(line, (const char *)p->hidden + t * row1, p->hidden_size, p->dtype);
            isa->quantize(line, &s.x, t);
        }
#pragma omp for
        for (int64_t r = 0; r < s.rows; r++) expand(&s.x, s.token_of_row[r], s.line_of_row[r]);
        run_gemm(p, &s, isa, 1, local);
#pragma omp for
        for (int64_t r = 0; r < s.rows; r++) {
            isa->load(line, s.inner + r * row2, p->inter_size, p->dtype);
            isa->quantize(line, &s.h, r);
            expand(&s.h, r, s.line_of_row[r]);
        }
        run_gemm(p, &s, isa, 2, local);
#pragma omp for
        for (int64_t t = 0; t < p->tokens; t++)
            isa->combine(p, s.y, s.row_of_slot + t * p->top_k, p->topk_weights + t * p->top_k,
                         line, line + p->hidden_size, (char *)p->output + t * row1);
#ifdef X86
        if (p->isa == AMX) stop_amx();
#endif
    }
    return 0;
}

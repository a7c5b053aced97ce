/* cpu_kernel.c's dot products, for every instruction set; all give the same bits.
 *
 * decode_*: one packed strip (16 rows of a weight) -> a buffer of BUFFER_BYTES(k).
 * dot_*: a buffer x rows index[first .. first + n) (index NULL: rows first, first + 1, …)
 *     -> acc[r * COLS + 0 .. 16), fp32. n <= ROWS.
 */
#include <stdint.h>
#include <string.h>
#if defined(__x86_64__) && defined(__linux__)
#define X86 1
#include <immintrin.h>
#if __clang_major__ >= 16 || __GNUC__ >= 12 /* the first to know all of its instructions */
#define X86_AMX 1
#endif
#endif

#define ALIGN(n) (((n) + 63) & ~(int64_t)63)
#define BUFFER_BYTES(k) ALIGN((k) * 36 + 1024)
#define ROWS 32       /* of a task's accumulator */
#define COLS 128      /* of it: up to 8 strips */
#define PREFETCH 4096 /* bytes of weights ahead: the next strip's */

/* Quantized rows: value = 0.5 * code * block scale * row_scale. */
typedef struct {
    int64_t k;
    int8_t *code;      /* [rows, k], twice the e2m1 value */
    float *scale;      /* [rows, k / 16], a quarter of the block scale: both codes are doubled */
    int32_t *offset;   /* [rows, k / 16], -12 * sum of the block's codes: undoes unsigned weights */
    float *row_scale;  /* [rows] */
    uint8_t *panel;    /* AMX: [tiles of 16 rows][ceil(k / 32)][16][32] bf16, see expand_amx */
} rows_t;

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
#ifdef __clang__
#define TARGET_AVX512 __attribute__((min_vector_width(512), \
    target("avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")))
#else
#define TARGET_AVX512 __attribute__((target( \
    "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,prefer-vector-width=512")))
#endif
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
                    const void *w4 = w + b * 256 + g * 64 + half * 32;
                    s = _mm256_add_epi16(s, _mm256_maddubs_epi16(_mm256_load_si256(w4),
                                                                 _mm256_set1_epi32(x4)));
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
            _mm_prefetch(codes + k0 * 8 + i + PREFETCH, _MM_HINT_T0);
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

#ifdef X86_AMX
/* code * block_scale is formed in fp16, where it is exact and normal, and its bits shifted to
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
    uint16_t order[32]; /* of scales: row 0 of both blocks, row 1 of both, … */
    for (int i = 0; i < 32; i++) order[i] = (uint16_t)(i / 2 + 16 * (i % 2));
    for (int64_t k0 = 0; k0 < k; k0 += 32, buf += 1024) {
        int tail = k - k0 < 32;
        const void *from = scales + k0;
        __m256i bytes = tail ? _mm256_broadcastsi128_si256(_mm_loadu_si128(from))
                             : _mm256_loadu_si256(from);
        __m512i half = _mm512_permutexvar_epi16(_mm512_loadu_si512(order), E4M3_TO_FP16(bytes));
        __m512h scale = _mm512_mul_ph((__m512h)half, _mm512_set1_ph(256));
        for (int g = 0; g < 4; g++) {
            if (tail && g >= 2) {
                memset(buf + g * 256, 0, 256);
                continue;
            }
            __m512i z = _mm512_loadu_si512(codes + k0 * 8 + g * 64);
            _mm_prefetch(codes + k0 * 8 + g * 64 + PREFETCH, _MM_HINT_T0);
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
/* A row -> line r of its tile: [ceil(k / 32)][r][16 pairs (block 2b, block 2b + 1)] bf16. */
TARGET_AMX static void expand_amx(const int8_t *code, const float *scale, int64_t k, uint8_t *tile,
                                  int r) {
    for (int64_t k0 = 0; k0 < k; k0 += 32) {
        __m512i half[2] = {_mm512_setzero_si512(), _mm512_setzero_si512()};
        for (int i = 0; i < (k - k0 < 32 ? 1 : 2); i++) {
            __m128i c = _mm_loadu_si128((const void *)(code + k0 + 16 * i));
            float s = scale[k0 / 16 + i] * 0x1p113f;
            half[i] = (__m512i)_mm512_mul_ps(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(c)),
                                             _mm512_set1_ps(s));
        }
        if (k - k0 < 32) { /* the last 16 k: pairs (k, k + 8) */
            half[1] = _mm512_maskz_compress_epi32(0xff00, half[0]);
            half[0] = _mm512_maskz_mov_epi32(0x00ff, half[0]);
        }
        half[0] = _mm512_srli_epi32(half[0], 16);
        _mm512_store_si512(tile + k0 * 32 + r * 64,
                           _mm512_mask_blend_epi16(0xaaaaaaaa, half[0], half[1]));
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
        _tile_stream_loadd(4, a0 + c, 64);
        _tile_stream_loadd(6, b0 + c, 64);
        _tile_dpbf16ps(0, 4, 6);
        if (b1) { _tile_stream_loadd(7, b1 + c, 64); _tile_dpbf16ps(1, 4, 7); }
        if (a1) { _tile_stream_loadd(5, a1 + c, 64); _tile_dpbf16ps(2, 5, 6); }
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
#endif

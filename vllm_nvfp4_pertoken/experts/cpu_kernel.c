/* NVFP4 mixture-of-experts layer, or dense layer, on a CPU, called through ctypes by cpu.py, which checks the
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
#include "cpu_numbers.h"
#include "cpu_gemm.h"
#include <omp.h>
#ifdef X86
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#define AMX_MIN_ROWS 6        /* with fewer, decoding to tiles costs more than VNNI dot products */
#define PANEL_BYTES (1 << 20) /* of an expert's rows that a task keeps in the L2 cache */

enum { PORTABLE, AVX2, AVX512, AMX };

typedef struct { /* mirrored by cpu._Args */
    const void *hidden;         /* [tokens, hidden_size], dtype */
    void *output;               /* the same */
    const float *topk_weights;  /* [tokens, top_k] */
    const int32_t *topk_ids;    /* [tokens, top_k] */
    const int32_t *expert_map;  /* [global_experts], or NULL */
    const uint8_t *w13, *w13_scale, *w2, *w2_scale;
    const float *w13_scale_2;   /* [experts, 2 if gated else 1]; LINEAR: [strips] */
    const float *w2_scale_2;    /* [experts] */
    const float *w13_bias, *w2_bias; /* checkpoint order, or NULL */
    uint8_t *scratch;           /* 64-byte aligned, moe_scratch_bytes() of it */
    int64_t tokens, top_k, experts, global_experts, hidden_size, inter_size;
    int32_t dtype, function, gated, interleaved, isa, threads;
    float alpha, beta, limit;
} moe_args;

static int64_t element_size(const moe_args *p) { return p->dtype == FP32 ? 4 : 2; }

/* What is done with a task's accumulators: scale, bias, FC1's activation, round to dtype, store.
 * Gated FC1: strips are gate, up, gate, up, …, and there is half a strip of output for each. */
typedef struct {
    const moe_args *p;
    int fc, strips;
    const float *acc;             /* [rows][COLS] */
    float row_scale[ROWS];
    const float *scale_2, *bias;  /* of the expert; bias is NULL if there is none */
    int64_t col;                  /* of the first output */
    char *out;                    /* the first row's column 0 */
    int64_t stride;               /* bytes */
} finish_t;

INLINE void finish_row(const finish_t *f, int r) {
    const moe_args *p = f->p;
    int gated = f->fc == 1 && p->gated;
    int groups = gated ? f->strips / 2 : f->strips, width = 16 * groups;
    int64_t step = gated && p->interleaved ? 2 : 1, to_up = p->interleaved ? 1 : p->inter_size;
    const float *acc = f->acc + r * COLS, *bias = f->bias ? f->bias + f->col * step : 0;
    float v[COLS], up[COLS / 2], limit = p->limit, beta = p->beta;
    for (int g = 0; g < groups; g++) {
        float scale = f->row_scale[r] * f->scale_2[p->function == LINEAR ? g : 0];
        SIMD() for (int j = 0; j < 16; j++)
            v[16 * g + j] = acc[g * (gated ? 32 : 16) + j] * scale;
    }
    if (bias)
        for (int j = 0; j < width; j++) v[j] = v[j] + bias[j * step];
    if (gated) {
        float up_scale = f->row_scale[r] * f->scale_2[1];
        for (int g = 0; g < groups; g++)
            SIMD() for (int j = 0; j < 16; j++) up[16 * g + j] = acc[32 * g + 16 + j] * up_scale;
        if (bias)
            for (int j = 0; j < width; j++) up[j] = up[j] + bias[j * step + to_up];
        if (limit < __builtin_inff() || beta != 0.0f)
            SIMD() for (int j = 0; j < width; j++) {
                v[j] = v[j] > limit ? limit : v[j];
                float u = up[j] > limit ? limit : up[j];
                up[j] = (u < -limit ? -limit : u) + beta;
            }
    }
    if (f->fc == 1 && p->function != LINEAR) apply(v, width, p->function, p->alpha);
    if (gated)
        SIMD() for (int j = 0; j < width; j++) v[j] = v[j] * up[j];
    store(f->out + r * f->stride + f->col * element_size(p), v, width, p->dtype);
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

typedef struct {
    void (*decode)(const uint8_t *, const uint8_t *, int64_t, uint8_t *);
    void (*dot)(const uint8_t *, const rows_t *, const int32_t *, int64_t, int, float *);
    float (*quantize)(const float *, int64_t, int8_t *, float *, int32_t *);
    void (*load)(float *, const void *, int64_t, int);
    void (*finish)(const finish_t *, int);
    void (*combine)(const moe_args *, const char *, const int32_t *, const float *, float *,
                    float *, void *);
} isa_t;

/* The common code, compiled for each instruction set. */
#define INSTANTIATE(NAME, TARGET) \
    TARGET static float quantize_##NAME(const float *x, int64_t k, int8_t *code, float *scale, \
                                        int32_t *offset) { \
        return quantize_row(x, k, code, scale, offset); } \
    TARGET static void load_##NAME(float *x, const void *src, int64_t n, int dtype) { \
        load(x, src, n, dtype); } \
    TARGET static void finish_##NAME(const finish_t *f, int r) { finish_row(f, r); } \
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

/* A call's memory, laid out in p->scratch. n = tokens * top_k slots; a row is a slot whose expert
 * is local; rows are sorted by expert. */
typedef struct {
    int32_t *row_of_slot;   /* [n], -1: no local expert */
    int32_t *token_of_row;  /* [n] */
    int32_t *line_of_row;   /* [n], in the panels (16 * tile + line); -1: not through AMX */
    int64_t *first_row;     /* [experts + 1] */
    segment_t *segment[2];  /* what tasks of FC1 and FC2 work on */
    int64_t rows, segments[2], spare_row;
    rows_t x, h;            /* quantized hidden rows [tokens], inner rows [n], spare [threads] */
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

static int64_t make_plan(const moe_args *p, uint8_t *base, plan_t *s) {
    int64_t used = 0, n = p->tokens * p->top_k, tiles = 0;
    int64_t inter = p->function == LINEAR ? 0 : p->inter_size; /* between two GEMMs, if so */
    int64_t widest = p->hidden_size > inter ? p->hidden_size : inter;
    if (p->isa == AMX) /* sum of ceil(rows / 16) over the experts with enough rows */
        tiles = n / 16 + min64(n / (AMX_MIN_ROWS + 1), p->experts);
    place(base, &used, n * 4, &s->row_of_slot);
    place(base, &used, n * 4, &s->token_of_row);
    place(base, &used, n * 4, &s->line_of_row);
    place(base, &used, (p->experts + 1) * 8, &s->first_row);
    for (int i = 0; i < 2; i++)
        place(base, &used, (n / ROWS + min64(n, p->experts)) * sizeof(segment_t), &s->segment[i]);
    place_rows(base, &used, &s->x, p->tokens, p->hidden_size, tiles);
    s->spare_row = n;
    place_rows(base, &used, &s->h, n + p->threads, inter, tiles);
    place(base, &used, n * inter * element_size(p), &s->inner);
    place(base, &used, (inter ? n : 0) * p->hidden_size * element_size(p), &s->y);
    s->local_bytes = COLS / 16 * BUFFER_BYTES(widest) + ROWS * COLS * 4;
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

static inline uint8_t *panel_tile(const rows_t *x, int32_t line) {
    return x->panel + line / 16 * ((x->k + 31) / 32) * 1024;
}
/* Quantized row -> its line in the panel, if it has one. */
static void expand(const rows_t *x, const int8_t *code, const float *scale, int32_t line) {
#ifdef X86_AMX
    if (line >= 0) expand_amx(code, scale, x->k, panel_tile(x, line), line % 16);
#else
    (void)x, (void)code, (void)scale, (void)line;
#endif
}

/* Some strips of one expert's w13 (fc 1) or w2 (fc 2) times a segment of its rows. */
static void run_task(const moe_args *p, const plan_t *s, const isa_t *isa, int fc,
                     const segment_t *segment, int64_t strip, int strips, uint8_t *local) {
    const rows_t *x = fc == 1 ? &s->x : &s->h;
    int64_t k = x->k, n = fc == 1 ? p->inter_size * (p->gated ? 2 : 1) : p->hidden_size;
    int64_t e = segment->expert, end = segment->row + segment->rows;
    int64_t first = e * n + strip * 16; /* row of the weight */
    const uint8_t *codes = (fc == 1 ? p->w13 : p->w2) + first * (k / 2);
    const uint8_t *scales = (fc == 1 ? p->w13_scale : p->w2_scale) + first * (k / 16);
    const float *bias = fc == 1 ? p->w13_bias : p->w2_bias;
    const int32_t *index = fc == 1 ? s->token_of_row : 0;
    int amx = s->line_of_row[segment->row] >= 0;
    float *acc = (float *)local;
    uint8_t *buf[COLS / 16];
    finish_t f = {
        .p = p, .fc = fc, .strips = strips, .acc = acc,
        .scale_2 = p->function == LINEAR ? p->w13_scale_2 + strip
                   : fc == 1 ? p->w13_scale_2 + e * (p->gated ? 2 : 1) : p->w2_scale_2 + e,
        .bias = bias ? bias + e * n : 0,
        .col = fc == 1 && p->gated ? strip * 8 : strip * 16,
        .stride = (fc == 1 ? p->inter_size : p->hidden_size) * element_size(p)};
    for (int i = 0; i < strips; i++) {
        buf[i] = local + ROWS * COLS * 4 + i * BUFFER_BYTES(k);
#ifdef X86_AMX
        if (amx) decode_amx(codes + i * 8 * k, scales + i * k, k, buf[i]);
        else
#endif
            isa->decode(codes + i * 8 * k, scales + i * k, k, buf[i]);
    }
    for (int64_t row = segment->row; row < end; row += ROWS) {
        int m = (int)min64(ROWS, end - row);
#ifdef X86_AMX
        for (int i = 0; amx && i < strips; i += 2)
            dot_amx(buf[i], i + 1 < strips ? buf[i + 1] : 0, panel_tile(x, s->line_of_row[row]), k,
                    m, acc + 16 * i);
#endif
        for (int i = 0; !amx && i < strips; i++)
            isa->dot(buf[i], x, index, row, m, acc + 16 * i);
        f.out = (fc == 1 ? s->inner : s->y) + row * f.stride;
        for (int r = 0; r < m; r++)
            f.row_scale[r] = x->row_scale[index ? index[row + r] : row + r];
        for (int r = 0; r < m; r++) isa->finish(&f, r);
    }
}

/* All tasks of a GEMM, shared out among the threads of the parallel region. */
static void run_gemm(const moe_args *p, const plan_t *s, const isa_t *isa, int fc, uint8_t *local) {
    int64_t n = fc == 1 ? p->inter_size * (p->gated ? 2 : 1) : p->hidden_size;
    int64_t segments = s->segments[fc - 1], strips = n / 16;
    int64_t step = COLS / 16; /* large tasks, but enough of them */
    while (step > 2 && segments * strips < 8 * p->threads * step) step /= 2;
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
    for (int i = 0; i < 256; i++) { /* (8 + mantissa) * 2^(exponent - 10), or mantissa * 2^-9 */
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
#ifdef X86_AMX
    unsigned a, b, c, d = 0;
    if (!HAS("avx512vbmi") || !__get_cpuid_count(7, 0, &a, &b, &c, &d)) return AVX512;
    const unsigned needed = 1u << 22 | 1u << 23 | 1u << 24; /* amx-bf16, avx512-fp16, amx-tile */
    if ((d & needed) != needed) return AVX512;
    /* ARCH_REQ_XCOMP_PERM: Linux gives a process its tile registers on request */
    if (syscall(SYS_arch_prctl, 0x1023, 18) == 0) return AMX;
#endif
    return AVX512;
#else
    return PORTABLE;
#endif
}

/* For cpu.py to see that it and this library are of one version. */
int64_t moe_args_bytes(void) { return sizeof(moe_args); }

int64_t moe_scratch_bytes(const moe_args *p) {
    plan_t s;
    return make_plan(p, 0, &s);
}

static const isa_t *isa_of(const moe_args *p) {
#ifdef X86
    if (p->isa >= AVX512) return &avx512;
    if (p->isa == AVX2) return &avx2;
#endif
    (void)p;
    return &portable;
}

/* Hidden rows, quantized and laid out for FC1, by the threads of the parallel region. */
static void quantize_hidden(const moe_args *p, plan_t *s, const isa_t *isa, float *line) {
    int64_t h = p->hidden_size, bytes = h * element_size(p);
#pragma omp for
    for (int64_t t = 0; t < p->tokens; t++) {
        isa->load(line, (const char *)p->hidden + t * bytes, h, p->dtype);
        s->x.row_scale[t] = isa->quantize(line, h, s->x.code + t * h, s->x.scale + t * h / 16,
                                          s->x.offset + t * h / 16);
    }
#pragma omp for
    for (int64_t r = 0; r < s->rows; r++) {
        int64_t t = s->token_of_row[r];
        expand(&s->x, s->x.code + t * h, s->x.scale + t * h / 16, s->line_of_row[r]);
    }
}

/* A dense layer: [tokens, inter_size] = hidden times w13, which counts as the only expert of all
 * rows. `function` is LINEAR; w13_scale_2 has one value for every strip. */
int linear_forward(const moe_args *p) {
    plan_t s;
    make_plan(p, p->scratch, &s);
    if (p->function != LINEAR || group(p, &s)) return -1;
    s.inner = p->output;
    const isa_t *isa = isa_of(p);
#pragma omp parallel num_threads(p->threads)
    {
        uint8_t *local = s.local + omp_get_thread_num() * s.local_bytes;
#ifdef X86_AMX
        if (p->isa == AMX) start_amx();
#endif
        quantize_hidden(p, &s, isa, (float *)local);
        run_gemm(p, &s, isa, 1, local);
#ifdef X86_AMX
        if (p->isa == AMX) stop_amx();
#endif
    }
    return 0;
}

/* 0, or -1 for an expert id out of range. */
int moe_forward(const moe_args *p) {
    plan_t s;
    make_plan(p, p->scratch, &s);
    if (group(p, &s)) return -1;
    const isa_t *isa = isa_of(p);
    int64_t h = p->hidden_size, i = p->inter_size;
    int64_t row1 = h * element_size(p), row2 = i * element_size(p);
#pragma omp parallel num_threads(p->threads)
    {
        uint8_t *local = s.local + omp_get_thread_num() * s.local_bytes;
        float *line = (float *)local; /* an fp32 row */
#ifdef X86_AMX
        if (p->isa == AMX) start_amx();
#endif
        quantize_hidden(p, &s, isa, line);
        run_gemm(p, &s, isa, 1, local);
#pragma omp for
        for (int64_t r = 0; r < s.rows; r++) {
            /* Rows that go to a panel leave nothing else behind: that would only fill caches. */
            int64_t at = s.line_of_row[r] >= 0 ? s.spare_row + omp_get_thread_num() : r;
            int8_t *code = s.h.code + at * i;
            float *scale = s.h.scale + at * i / 16;
            isa->load(line, s.inner + r * row2, i, p->dtype);
            s.h.row_scale[r] = isa->quantize(line, i, code, scale, s.h.offset + at * i / 16);
            expand(&s.h, code, scale, s.line_of_row[r]);
        }
        run_gemm(p, &s, isa, 2, local);
#pragma omp for
        for (int64_t t = 0; t < p->tokens; t++)
            isa->combine(p, s.y, s.row_of_slot + t * p->top_k, p->topk_weights + t * p->top_k,
                         line, line + h, (char *)p->output + t * row1);
#ifdef X86_AMX
        if (p->isa == AMX) stop_amx();
#endif
    }
    return 0;
}

/* Products for many rows of x: weights are widened one panel at a time, in cache, and multiplied tile by tile.
 * Floating weights become fp32. Integer weights become int16 and meet activations of 15 bits, which doubles the rate
 * if the processor multiplies pairs of int16. */
#include <stdatomic.h>
#include "calls.h"
#include "integer.h"
#include "prepare.h"
#include "tile.h"
#include "widen.h"

/* Columns of a panel: 16 KB of fp32 (AVX2) stay in L1 while all rows of x pass over it. */
#define DEPTH 256
/* Rows of x at a time: DEPTH columns of them stay in L2. */
#define MOST 256
#define MOST_PADDED ((MOST + ACROSS - 1) / ACROSS * ACROSS)

#ifdef X86_WIDE
INLINE int paired(int64_t kind) { return kind == INT8 || kind == INT4; }
#else
INLINE int paired(int64_t kind) { return 0 * kind; }
#endif

/* What all threads read: x in blocks of DEPTH columns, [blocks][padded rows][DEPTH] of fp32 or int16, and scales
 * [rows][spans]. */
struct shared {
    const struct product *p;
    long rows, padded, blocks;  /* of x */
    struct prepared one;        /* the shape of a single prepared row */
    float *x;
    int16_t *words;
    float *scales, *sums;
};

/* The working memory of one thread. */
struct workspace {
    float *row;      /* [width]: a row of x being prepared */
    char *line;      /* one prepared row */
    void *wide;      /* [PANEL][DEPTH] numbers, row by row */
    void *panel;     /* the same, column by column (pair by pair) */
    float *sums[2];  /* [padded rows][PANEL] */
};

static char *lay_out_shared(struct shared *s, const struct product *p, long rows, char *at) {
    s->p = p;
    s->rows = rows;
    s->padded = round_up(rows, ACROSS);
    s->blocks = (p->w.cols + DEPTH - 1) / DEPTH;
    lay_out(&s->one, &p->w, 1, NULL);
    if (!paired(p->w.kind)) {
        s->x = (float *)take(&at, s->blocks * s->padded * DEPTH * 4);
        return at;
    }
    s->words = (int16_t *)take(&at, s->blocks * s->padded * DEPTH * 2);
    s->scales = (float *)take(&at, s->padded * s->one.spans * 4);
    s->sums = (float *)take(&at, s->padded * s->one.spans * 4);
    return at;
}

static char *lay_out_workspace(struct workspace *d, const struct weight *w, char *at) {
    struct prepared one;
    d->row = (float *)take(&at, round_up(w->cols, DEPTH) * 4);
    d->line = at;
    at = lay_out(&one, w, 1, at);
    d->wide = take(&at, PANEL * DEPTH * 4);
    d->panel = take(&at, PANEL * DEPTH * 4);
    for (int i = 0; i < 2; i++) d->sums[i] = (float *)take(&at, MOST_PADDED * PANEL * 4);
    return at;
}

/* Bytes of scratch for a product of `rows` rows of x: shared bytes, then bytes per thread. */
void gemm_scratch(const struct weight *w, long rows, int64_t *bytes) {
    struct product p = {.w = *w};
    struct shared s;
    struct workspace d;
    bytes[0] = lay_out_shared(&s, &p, rows < MOST ? rows : MOST, NULL) - (char *)NULL;
    bytes[1] = lay_out_workspace(&d, w, NULL) - (char *)NULL;
}

static void prepare_shared(const struct shared *s, struct workspace *d, long t) {
    const struct weight *w = &s->p->w;
    const long width = s->blocks * DEPTH;
    if (t < s->rows)
        norm_row(s->p, s->p->x + t * w->cols, d->row, width);
    else
        memset(d->row, 0, width * sizeof *d->row);
    if (!paired(w->kind)) {
        for (long b = 0; b < s->blocks; b++)
            memcpy(s->x + (b * s->padded + t) * DEPTH, d->row + b * DEPTH, DEPTH * sizeof(float));
        return;
    }
    struct prepared one;
    lay_out(&one, w, 1, d->line);
    quantize_row(&one, d->row, 0);
    memcpy(s->scales + t * one.spans, one.scales, one.spans * sizeof(float));
    memcpy(s->sums + t * one.spans, one.sums, one.spans * sizeof(float));
    for (long b = 0; b < s->blocks; b++) {
        long left = one.spans * one.span - b * DEPTH;
        memcpy(s->words + (b * s->padded + t) * DEPTH, one.words + b * DEPTH,
               (left < DEPTH ? left : DEPTH) * sizeof(int16_t));
    }
}

/* Columns from..from+DEPTH-1 of up to PANEL weight rows into the panel; zeros for missing rows and columns. */
static void fill_panel(const struct weight *w, const struct workspace *d, long row, long count, long from) {
    const long have = w->cols - from < DEPTH ? w->cols - from : DEPTH;
    if (count < PANEL || have < DEPTH) memset(d->wide, 0, PANEL * DEPTH * 4);
    if (!paired(w->kind)) {
        for (long r = 0; r < count; r++) widen(w, row + r, from, have, (float *)d->wide + r * DEPTH);
        transpose(d->wide, DEPTH, d->panel, PANEL, PANEL);
        return;
    }
    for (long r = 0; r < count; r++) {
        int16_t *to = (int16_t *)d->wide + r * DEPTH;
        const char *at = row_of(w, row + r);
        for (long c = 0; c < have; c += UNIT) {
            const unit u = w->kind == INT4      ? unpack(INT4, at + (from + c) / 2)
                           : c + UNIT <= have ? unpack(INT8, at + from + c)
                                              : unpack_last(INT8, at, from + c, w->cols);
            memcpy(to + c, &u, sizeof u);
        }
        for (long c = 0; w->zero && c < have; c++) to[c] -= (int16_t)w->zero;
    }
    transpose(d->wide, DEPTH / 2, d->panel, PANEL, PANEL);
}

#ifdef X86_WIDE
INLINE vi pairs(vi sums, int32_t left, const void *right) {
#if VL == 16 && defined(__AVX512VNNI__)
    return (vi)_mm512_dpwssd_epi32((__m512i)sums, _mm512_set1_epi32(left), _mm512_loadu_si512(right));
#elif VL == 16
    return sums + (vi)_mm512_madd_epi16(_mm512_set1_epi32(left), _mm512_loadu_si512(right));
#else
    return sums + (vi)_mm256_madd_epi16(_mm256_set1_epi32(left), _mm256_loadu_si256(right));
#endif
}

/* Like tile_of, over one span of int16 pairs: a [ACROSS] rows DEPTH words apart, b [span / 2][PANEL] pairs. */
static void tile_of_pairs(const int16_t *a, const int32_t *b, long span, const float *scales, const float *offsets,
                          const float *x_scales, const float *x_sums, long spans, float *c) {
    vi sums[ACROSS][NV];
#pragma GCC unroll 12
    for (int i = 0; i < ACROSS; i++)
#pragma GCC unroll 4
        for (int v = 0; v < NV; v++) sums[i][v] = (vi){0};
    for (long k = 0; k < span / 2; k++) {
#pragma GCC unroll 12
        for (int i = 0; i < ACROSS; i++) {
            int32_t left;
            memcpy(&left, a + i * DEPTH + 2 * k, 4);
#pragma GCC unroll 4
            for (int v = 0; v < NV; v++) sums[i][v] = pairs(sums[i][v], left, b + k * PANEL + v * VL);
        }
    }
#pragma GCC unroll 12
    for (int i = 0; i < ACROSS; i++)
#pragma GCC unroll 4
        for (int v = 0; v < NV; v++) {
            float *at = c + i * PANEL + v * VL;
            vf sum = load(at) + __builtin_convertvector(sums[i][v], vf) * (load(scales + v * VL) * x_scales[i * spans]);
            store(at, offsets ? sum + load(offsets + v * VL) * x_sums[i * spans] : sum);
        }
}

static void block_of_pairs(const struct shared *s, const struct workspace *d, long row, long count, long block,
                           float *sums) {
    const struct weight *w = &s->p->w;
    const long span = s->one.span, spans = s->one.spans, groups = groups_of(w);
    for (long at = block * DEPTH; at < (block + 1) * DEPTH && at < w->cols; at += span) {
        float scales[PANEL] = {0}, offsets[PANEL] = {0};
        for (long r = 0; r < count; r++) {
            scales[r] = scale_at(w, w->kind, (row + r) * groups + at / w->group);
            if (w->offsets) offsets[r] = offset_at(w, (row + r) * groups + at / w->group);
        }
        const int32_t *panel = (const int32_t *)d->panel + (at % DEPTH) / 2 * PANEL;
        for (long t = 0; t < s->padded; t += ACROSS) {
            const int16_t *words = s->words + (block * s->padded + t) * DEPTH + at % DEPTH;
            const long which = t * spans + at / span;
            tile_of_pairs(words, panel, span, scales, w->offsets ? offsets : NULL, s->scales + which, s->sums + which,
                          spans, sums + t * PANEL);
        }
    }
}
#endif

/* sums [padded][PANEL] = x times `count` weight rows from `row`. */
static void panel_sums(const struct shared *s, const struct workspace *d, long row, long count, float *sums) {
    memset(sums, 0, s->padded * PANEL * sizeof *sums);
    for (long block = 0; block < s->blocks; block++) {
        fill_panel(&s->p->w, d, row, count, block * DEPTH);
#ifdef X86_WIDE
        if (paired(s->p->w.kind)) {
            block_of_pairs(s, d, row, count, block, sums);
            continue;
        }
#endif
        for (long t = 0; t < s->padded; t += ACROSS)
            tile_of(NV, s->x + (block * s->padded + t) * DEPTH, DEPTH, d->panel, PANEL, DEPTH, sums + t * PANEL, PANEL);
    }
}

static void some_outputs(const struct shared *s, const struct workspace *d, long first, long count) {
    const struct product *p = s->p;
    const long outputs = outputs_of(p);
    panel_sums(s, d, first, count, d->sums[0]);
    if (p->mode == GATE) {
        panel_sums(s, d, outputs + first, count, d->sums[1]);
        gate(d->sums[0], d->sums[1], s->rows * PANEL);
    }
    for (long t = 0; t < s->rows; t++) {
        const float *sums = d->sums[0] + t * PANEL;
        float *out = p->out + t * outputs + first;
        if (p->mode == ADD)
            for (long i = 0; i < count; i++) out[i] += sums[i];
        else
            memcpy(out, sums, count * sizeof *out);
    }
}

static void rows_at_once(const struct product *p, long rows) {
    struct shared s;
    char *workspaces = lay_out_shared(&s, p, rows, p->scratch);
    const long outputs = outputs_of(p);
    atomic_long prepared = 0, next = 0;
#pragma omp parallel num_threads((int)p->threads)
    {
        struct workspace d;
        lay_out_workspace(&d, &p->w, workspaces + thread_number() * p->stride);
        for (long t; (t = atomic_fetch_add(&prepared, 1)) < s.padded;) prepare_shared(&s, &d, t);
#pragma omp barrier
        for (long first; (first = atomic_fetch_add(&next, PANEL)) < outputs;)
            some_outputs(&s, &d, first, first + PANEL < outputs ? PANEL : outputs - first);
    }
}

/* Any number of rows of x, MOST at a time. nvfp4 takes FEW at a time: equally fast for 256 rows, three times as fast
 * for 9. With 16 columns per scale a tile would multiply too little between two conversions to float. */
void gemm(const struct product *p) {
    const long most = p->w.kind == NVFP4 ? FEW : MOST;
    struct product part = *p;
    for (long t = 0; t < p->tokens; t += most) {
        part.x = p->x + t * p->w.cols;
        part.out = p->out + t * outputs_of(p);
        part.tokens = p->tokens - t < most ? p->tokens - t : most;
        if (p->w.kind == NVFP4)
            gemv(&part);
        else
            rows_at_once(&part, part.tokens);
    }
}

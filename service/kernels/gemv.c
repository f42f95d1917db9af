/* Products for 1 to 8 rows of x: one pass over the stored weights, which is what bounds it. Every sum has one order, whatever the
 * number of rows, threads and neighbours, so that a row answers the same bits alone and in a batch. */
#include <stdatomic.h>
#include "prepare.h"

#define MOST 8
/* Weight rows that a thread takes at a time: some 10 us of reading, so that a thread which loses its core leaves little behind. */
#define TAKEN 32
/* A product of less than so many bytes is over before a second thread has woken up. */
#define ALONE (1 << 16)

/* Sums of R weight rows with T rows of x into sums[t * TAKEN + r]; of the last `have` rows, where these are fewer, again and again. */
INLINE void float_rows(const int64_t kind, const int R, const int T, const struct product *p, const struct prepared *x, long row,
                       long have, float *sums) {
    const struct weight *w = &p->w;
    const long each = bytes_each(kind), cols = w->cols, bytes = cols * each, groups = kind == FP8 ? groups_of(w) : 1, group = kind == FP8 ? w->group : cols;
    const char *at[4];
    vf total[4][MOST];
    for (int r = 0; r < R; r++) {
        at[r] = (const char *)w->data + (row + (r < have ? r : have - 1)) * bytes;
        for (int t = 0; t < T; t++) total[r][t] = (vf){0};
    }
    for (long g = 0; g < groups; g++) {
        long c = g * group, end = c + group < cols ? c + group : cols;
        vf part[4][MOST];
        for (int r = 0; r < R; r++)
            for (int t = 0; t < T; t++) part[r][t] = (vf){0};
        for (; c + VL <= end; c += VL)
            for (int r = 0; r < R; r++) {
                vf v = load_kind(kind, at[r] + c * each);
                for (int t = 0; t < T; t++) part[r][t] += v * load(x->x + t * x->width + c);
            }
        if (c < end)
            for (int r = 0; r < R; r++) {
                char tail[VL * 4] = {0};
                memcpy(tail, at[r] + c * each, (end - c) * each);
                vf v = load_kind(kind, tail);
                for (int t = 0; t < T; t++) part[r][t] += v * load(x->x + t * x->width + c);
            }
        for (int r = 0; r < R; r++) {
            float scale = kind == FP8 ? scale_at(w, kind, (row + (r < have ? r : have - 1)) * groups + g) : 1.0f;
            for (int t = 0; t < T; t++) total[r][t] = kind == FP8 ? total[r][t] + part[r][t] * scale : part[r][t];
        }
    }
    for (int r = 0; r < R; r++)
        for (int t = 0; t < T; t++) sums[t * TAKEN + r] = sum_lanes(total[r][t]);
}

INLINE void integer_rows(const int64_t kind, const int R, const int T, const struct product *p, const struct prepared *x, long row,
                         long have, float *sums) {
    const struct weight *w = &p->w;
    const long cols = w->cols, bytes = kind == INT4 ? round_up(cols, 32) / 2 : cols, groups = groups_of(w), span = x->span, spans = x->spans, ratio = w->group == cols ? spans : w->group / span;
    const char *at[4];
    vf total[4][MOST];
    float beside[4][MOST];
    for (int r = 0; r < R; r++) {
        at[r] = (const char *)w->data + (row + (r < have ? r : have - 1)) * bytes;
        for (int t = 0; t < T; t++) total[r][t] = (vf){0}, beside[r][t] = 0.0f;
    }
    for (long s = 0; s < spans; s++) {
        vi part[4][MOST];
        for (int t = 0; t < T; t++)
            for (int r = 0; r < R; r++) part[r][t] = (vi){x->start[t * spans + s]};
        const long end = (s + 1) * span < cols ? (s + 1) * span : cols;
        for (long c = s * span; c < end; c += 32)
            for (int r = 0; r < R; r++) {
                columns v = load_columns(kind, at[r], c, cols);
                for (int t = 0; t < T; t++) part[r][t] = dot(part[r][t], v, x->words + t * x->width + c);
            }
        for (int r = 0; r < R; r++) {
            const long g = (row + (r < have ? r : have - 1)) * groups + s / ratio;
            const float scale = scale_at(w, kind, g);
            for (int t = 0; t < T; t++)
                total[r][t] += __builtin_convertvector(part[r][t], vf) * (scale * x->scales[t * spans + s]);
            if (kind == INT4 && w->offsets)
                for (int t = 0; t < T; t++) beside[r][t] += offset_at(w, g) * x->sums[t * spans + s];
        }
    }
    for (int r = 0; r < R; r++)
        for (int t = 0; t < T; t++) sums[t * TAKEN + r] = sum_lanes(total[r][t]) + beside[r][t];
}

typedef void rows_function(const struct product *, const struct prepared *, long, long, float *);

/* `count` weight rows from `row`, R at a time: as many chains as the registers hold. R divides TAKEN. */
#define DEFINE(ROWS, KIND, R, T)                                                                                            \
    static void KIND##_##T(const struct product *p, const struct prepared *x, long row, long count, float *sums) {          \
        for (long i = 0; i < count; i += R) ROWS(KIND, R, T, p, x, row + i, count - i, sums + i);                           \
    }
#define DEFINE_KIND(ROWS, KIND)                                                                                             \
    DEFINE(ROWS, KIND, 4, 1) DEFINE(ROWS, KIND, 4, 2) DEFINE(ROWS, KIND, 2, 3) DEFINE(ROWS, KIND, 2, 4)                     \
    DEFINE(ROWS, KIND, 1, 6) DEFINE(ROWS, KIND, 1, 8)
#define ALL(KIND) {KIND##_1, KIND##_2, KIND##_3, KIND##_4, KIND##_6, KIND##_6, KIND##_8, KIND##_8}

DEFINE_KIND(float_rows, F32)
DEFINE_KIND(float_rows, BF16)
DEFINE_KIND(float_rows, F16)
DEFINE_KIND(float_rows, FP8)
DEFINE_KIND(integer_rows, INT8)
DEFINE_KIND(integer_rows, INT4)
static rows_function *const ROWS_OF[][MOST] = {ALL(F32), ALL(BF16), ALL(F16), ALL(FP8), ALL(INT8), ALL(INT4)};

/* Rows of x that a product of so many computes: there are none for 5 and 7, which get a row of zeros. */
static long computed(long tokens) { return tokens < 5 ? tokens : round_up(tokens, 2); }

static void prepare(const struct product *p, struct prepared *ready, char *scratch) {
    float *free = (float *)lay_out(ready, &p->w, computed(p->tokens), scratch);
    for (long t = 0; t < computed(p->tokens); t++) {
        float *row = integer_kind(p->w.kind) ? free : ready->x + t * ready->width;
        if (t < p->tokens)
            norm_row(p, p->x + t * p->w.cols, row, ready->width);
        else
            memset(row, 0, ready->width * sizeof *row);
        if (integer_kind(p->w.kind)) quantize_row(ready, &p->w, row, t);
    }
}

long gemv_scratch(const struct weight *w, long tokens) {
    struct prepared ready;
    return lay_out(&ready, w, computed(tokens), NULL) - (char *)NULL + round_up(w->cols, 128) * 4;
}

/* Outputs first..first+count-1 of all tokens. */
static void some_outputs(const struct product *p, const struct prepared *x, long first, long count) {
    rows_function *rows = ROWS_OF[p->w.kind][p->tokens - 1];
    const long outputs = outputs_of(p);
    float sums[MOST * TAKEN], up[MOST * TAKEN];
    rows(p, x, first, count, sums);
    if (p->mode == GATE) {
        rows(p, x, outputs + first, count, up);
        for (long t = 0; t < p->tokens; t++) gate(sums + t * TAKEN, up + t * TAKEN, count);
    }
    for (long t = 0; t < p->tokens; t++) {
        float *out = p->out + t * outputs + first;
        if (p->mode == ADD)
            for (long i = 0; i < count; i++) out[i] += sums[t * TAKEN + i];
        else
            memcpy(out, sums + t * TAKEN, count * sizeof *out);
    }
}

static void share(const struct product *p, atomic_long *next, long thread) {
    const long outputs = outputs_of(p);
    struct prepared x;
    prepare(p, &x, p->scratch + thread * p->stride);
    for (long first; (first = atomic_fetch_add(next, TAKEN)) < outputs;)
        some_outputs(p, &x, first, first + TAKEN < outputs ? TAKEN : outputs - first);
}

void gemv(const struct product *p) {
    atomic_long next = 0;
    if (p->threads == 1 || p->w.rows * row_bytes(&p->w) < ALONE) {
        share(p, &next, 0);
        return;
    }
#pragma omp parallel num_threads((int)p->threads)
    share(p, &next, thread_number());
}

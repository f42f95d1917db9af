/* Products for 1 to 8 rows of x: one pass over the stored weights, which is the bound. Every sum has one order for
 * any number of rows, threads and neighbours, so a row gives the same bits alone and in a batch. */
#include <stdatomic.h>
#include "calls.h"
#include "integer.h"
#include "prepare.h"

#define MOST FEW
/* Weight rows that a thread takes at a time: some 10 us of reading. A thread that loses its core then leaves little
 * undone, but the streams still have some length (R of them, see `choice`). */
#define MOST_TAKEN 128
#define TAKEN_BYTES (1 << 16)
/* A product of fewer bytes is over before a second thread has woken up. */
#define ALONE (1 << 16)

/* Weight rows row, row + step .., none after `last`, which is repeated instead. Distant rows are long streams for
 * the processor's prefetcher. Neighbouring rows, which share pages, reach two thirds of the speed (Zen 3). */
struct choice { long row, step, last; };
INLINE long chosen(const struct choice *c, int r) {
    return c->row + r * c->step < c->last ? c->row + r * c->step : c->last;
}

/* Sums of R weight rows with T rows of x into sums[t * MOST_TAKEN + row - first]. */
INLINE void float_rows(const int64_t kind, const int R, const int T, const struct product *p, const struct prepared *x,
                       struct choice rows, long first, float *sums) {
    const struct weight *w = &p->w;
    const long each = bytes_each(kind), cols = w->cols, bytes = cols * each;
    const long groups = kind == FP8 ? groups_of(w) : 1, group = kind == FP8 ? w->group : cols;
    const char *at[4];
    vf total[4][MOST];
    UNROLL for (int r = 0; r < R; r++) {
        at[r] = (const char *)w->data + chosen(&rows, r) * bytes;
        UNROLL for (int t = 0; t < T; t++) total[r][t] = (vf){0};
    }
    for (long g = 0; g < groups; g++) {
        long c = g * group, end = c + group < cols ? c + group : cols;
        vf part[4][MOST];
        UNROLL for (int r = 0; r < R; r++)
            UNROLL for (int t = 0; t < T; t++) part[r][t] = (vf){0};
        for (; c + VL <= end; c += VL)
            UNROLL for (int r = 0; r < R; r++) {
                vf v = load_kind(kind, at[r] + c * each);
                UNROLL for (int t = 0; t < T; t++) part[r][t] += v * load(x->x + t * x->width + c);
            }
        if (c < end)
            UNROLL for (int r = 0; r < R; r++) {
                char tail[VL * 4] = {0};
                memcpy(tail, at[r] + c * each, (end - c) * each);
                vf v = load_kind(kind, tail);
                UNROLL for (int t = 0; t < T; t++) part[r][t] += v * load(x->x + t * x->width + c);
            }
        UNROLL for (int r = 0; r < R; r++) {
            float scale = kind == FP8 ? scale_at(w, kind, chosen(&rows, r) * groups + g) : 1.0f;
            UNROLL for (int t = 0; t < T; t++)
                total[r][t] = kind == FP8 ? total[r][t] + part[r][t] * scale : part[r][t];
        }
    }
    UNROLL for (int r = 0; r < R; r++)
        UNROLL for (int t = 0; t < T; t++) sums[t * MOST_TAKEN + chosen(&rows, r) - first] = sum_lanes(total[r][t]);
}

/* Spans whose scales are prepared together. */
#define HELD 64

/* Expand scales (or offsets) of a row from one per group to one per span, for spans from..from+count-1; zeros fill
 * the last vector. */
INLINE void per_span(const int halves, const void *values, const struct prepared *x, long row, long from, long count,
                     float *to) {
    const uint16_t *half = (const uint16_t *)values + row * x->groups;
    const float *whole = (const float *)values + row * x->groups;
    if (x->groups == 1) {
        const vf value = spread(halves ? half_to_float(*half) : *whole);
        for (long i = 0; i < count; i += VL) store(to + i, value);
        return;
    }
    long i = 0, g = from;
    if (x->ratio == 1)
        for (; i + VL <= count; i += VL, g += VL) store(to + i, halves ? load_f16(half + g) : load(whole + g));
    else
        g = from / x->ratio;
    for (long k = from % x->ratio; i < count; i++) {
        to[i] = halves ? half_to_float(half[g]) : whole[g];
        if (++k == x->ratio) k = 0, g++;
    }
    for (; i % VL; i++) to[i] = 0.0f;
}

/* `scales` [HELD + VL] of a row, times those of the activations if there is one row of them; `extra`: what the zero
 * of the nibbles, or the offsets, add to the result of each row of x. */
INLINE void row_scales(const int64_t kind, const int T, const struct weight *w, const struct prepared *x, long row,
                       long from, long count, float *scales, vf *extra) {
    per_span(kind == INT4, w->scales, x, row, from, count, scales);
    if (kind == INT4 && w->offsets) {
        float offsets[HELD + VL];
        per_span(1, w->offsets, x, row, from, count, offsets);
        for (int t = 0; t < T; t++)
            for (long j = 0; j < count; j += VL)
                extra[t] += load(offsets + j) * load(x->sums + t * x->ahead + from + j);
    } else if (kind == INT4) {
        const float zero = -(float)w->zero;
        for (int t = 0; t < T; t++)
            for (long j = 0; j < count; j += VL)
                extra[t] += load(scales + j) * (load(x->sums + t * x->ahead + from + j) * zero);
    }
    if (T == 1)
        for (long j = 0; j < count; j += VL) store(scales + j, load(scales + j) * load(x->scales + from + j));
}

/* One copy is enough if several rows of x share the work: it is half of the code. */
static __attribute__((noinline)) void row_scales_of_many(int64_t kind, int T, const struct weight *w,
                                                         const struct prepared *x, long row, long from,
                                                         long count, float *scales, vf *extra) {
    row_scales(kind, T, w, x, row, from, count, scales, extra);
}

/* sums[t] of one row over one unit. */
INLINE void add_unit(const int T, unit u, const int16_t *x, long width, some_ints *sums) {
    UNROLL for (int t = 0; t < T; t++)
        UNROLL for (int i = 0; i < PARTS; i++)
            sums[t] = multiply_add(sums[t], u.parts[i], x + t * width + i * PART_WORDS);
}

INLINE void integer_rows(const int64_t kind, const int R, const int T, const struct product *p,
                         const struct prepared *x, struct choice rows, long first, float *sums) {
    const struct weight *w = &p->w;
    const long bytes = kind == INT4 ? round_up(w->cols, 32) / 2 : w->cols, whole = bytes / unit_bytes(kind) * UNIT;
    const char *at[4];
    some_floats total[4][MOST];
    vf extra[4][MOST];
    float scales[4][HELD + VL];
    UNROLL for (int r = 0; r < R; r++) {
        at[r] = (const char *)w->data + chosen(&rows, r) * bytes;
        UNROLL for (int t = 0; t < T; t++) total[r][t] = (some_floats){0}, extra[r][t] = (vf){0};
    }
    for (long from = 0; from < x->spans; from += HELD) {
        const long count = x->spans - from < HELD ? x->spans - from : HELD;
        UNROLL for (int r = 0; r < R; r++)
            (T == 1 ? row_scales : row_scales_of_many)(kind, T, w, x, chosen(&rows, r), from, count, scales[r],
                extra[r]);
        for (long s = 0; s < count; s++) {
            some_ints part[4][MOST];
            UNROLL for (int r = 0; r < R; r++)
                UNROLL for (int t = 0; t < T; t++) part[r][t] = (some_ints){0};
            long c = (from + s) * x->span;
            const long end = c + x->span, stop = end < whole ? end : whole;
            for (; c < stop; c += UNIT)
                UNROLL for (int r = 0; r < R; r++)
                    add_unit(T, unpack(kind, at[r] + (kind == INT4 ? c >> 1 : c)), x->words + c, x->width, part[r]);
            if (kind == INT8 && c < end && c < w->cols)
                UNROLL for (int r = 0; r < R; r++)
                    add_unit(T, unpack_last(kind, at[r], c, bytes), x->words + c, x->width, part[r]);
            UNROLL for (int r = 0; r < R; r++)
                UNROLL for (int t = 0; t < T; t++) {
                    const float scale = T == 1 ? scales[r][s] : scales[r][s] * x->scales[t * x->ahead + from + s];
                    total[r][t] += __builtin_convertvector(part[r][t], some_floats) * scale;
                }
        }
    }
    UNROLL for (int r = 0; r < R; r++)
        UNROLL for (int t = 0; t < T; t++)
            sums[t * MOST_TAKEN + chosen(&rows, r) - first] = sum_of(total[r][t]) + sum_lanes(extra[r][t]);
}

/* total[t] of one row over the block whose numbers and scales lie at these addresses. */
INLINE void add_block(const int T, const struct prepared *x, long which, const char *numbers, const uint8_t *scales,
                      some_floats *total) {
    const block b = unpack_block(numbers);
    some_floats of_groups[2];
    block_scales(scales, of_groups);
    UNROLL for (int half = 0; half < 2; half++)
        UNROLL for (int t = 0; t < T; t++) {
            const long at = t * x->ahead + which * BLOCK_GROUPS + half * LANES;
            const int8_t *digits =
                (const int8_t *)(x->words + t * x->width) + which * BLOCK_DIGITS + half * HALF_DIGITS;
            some_ints part = half_sums(b.halves[half], digits);
            if (E2M1_ZERO) part += *(const some_ints_any *)(x->zeros + at);
            const some_floats scale = of_groups[half] * *(const some_floats_any *)(x->scales + at);
            total[t] += __builtin_convertvector(part, some_floats) * scale;
        }
}

/* Like integer_rows for nvfp4. */
INLINE void e2m1_rows(const int64_t kind, const int R, const int T, const struct product *p, const struct prepared *x,
                      struct choice rows, long first, float *sums) {
    const struct weight *w = &p->w;
    const long bytes = row_bytes(w), blocks = x->groups / BLOCK_GROUPS, left = x->groups % BLOCK_GROUPS;
    const char *at[4];
    const uint8_t *scales[4];
    some_floats total[4][MOST];
    UNROLL for (int r = 0; r < R; r++) {
        at[r] = (const char *)w->data + chosen(&rows, r) * bytes;
        scales[r] = (const uint8_t *)w->scales + chosen(&rows, r) * x->groups;
        UNROLL for (int t = 0; t < T; t++) total[r][t] = (some_floats){0};
    }
    for (long b = 0; b < blocks; b++)
        UNROLL for (int r = 0; r < R; r++)
            add_block(T, x, b, at[r] + b * BLOCK_BYTES, scales[r] + b * BLOCK_GROUPS, total[r]);
    if (left)
        UNROLL for (int r = 0; r < R; r++) {
            char numbers[BLOCK_BYTES] = {0};
            uint8_t last[BLOCK_GROUPS] = {0};
            memcpy(numbers, at[r] + blocks * BLOCK_BYTES, bytes - blocks * BLOCK_BYTES);
            memcpy(last, scales[r] + blocks * BLOCK_GROUPS, left);
            add_block(T, x, blocks, numbers, last, total[r]);
        }
    UNROLL for (int r = 0; r < R; r++) {
        const float factor = FP8_FACTOR * E2M1_FACTOR * w->factors[chosen(&rows, r)];
        UNROLL for (int t = 0; t < T; t++)
            sums[t * MOST_TAKEN + chosen(&rows, r) - first] = sum_of(total[r][t]) * factor;
    }
}

typedef void rows_function(const struct product *, const struct prepared *, long, long, float *);

/* `count` weight rows from `row`, R at a time: as many chains as the registers hold. */
#define DEFINE(ROWS, KIND, R, T)                                                                                      \
    static void KIND##_##T(const struct product *p, const struct prepared *x, long row, long count, float *sums) {    \
        const long step = (count + R - 1) / R;                                                                        \
        for (long i = 0; i < step; i++) {                                                                             \
            const struct choice rows = {row + i, step, row + count - 1};                                              \
            ROWS(KIND, R, T, p, x, rows, row, sums);                                                                  \
        }                                                                                                             \
    }
#define DEFINE_KIND(ROWS, KIND)                                                                                       \
    DEFINE(ROWS, KIND, 4, 1) DEFINE(ROWS, KIND, 4, 2) DEFINE(ROWS, KIND, 2, 3) DEFINE(ROWS, KIND, 2, 4)               \
    DEFINE(ROWS, KIND, 1, 6) DEFINE(ROWS, KIND, 1, 8)
#define ALL(KIND) {KIND##_1, KIND##_2, KIND##_3, KIND##_4, KIND##_6, KIND##_6, KIND##_8, KIND##_8}

DEFINE_KIND(float_rows, F32)
DEFINE_KIND(float_rows, BF16)
DEFINE_KIND(float_rows, F16)
DEFINE_KIND(float_rows, FP8)
DEFINE_KIND(integer_rows, INT8)
DEFINE_KIND(integer_rows, INT4)
DEFINE_KIND(e2m1_rows, NVFP4)
static rows_function *const ROWS_OF[][MOST] = {ALL(F32), ALL(BF16), ALL(F16), ALL(FP8), ALL(INT8), ALL(INT4),
                                                   ALL(NVFP4)};

/* Rows of x that are computed: there are no kernels for 5 and 7 rows, which get a row of zeros. */
static long computed(long tokens) { return tokens < 5 ? tokens : round_up(tokens, 2); }

static void prepare(const struct product *p, struct prepared *ready, char *scratch) {
    float *free = (float *)lay_out(ready, &p->w, computed(p->tokens), scratch);
    for (long t = 0; t < computed(p->tokens); t++) {
        float *row = integer_kind(p->w.kind) ? free : ready->x + t * ready->width;
        if (t < p->tokens)
            norm_row(p, p->x + t * p->w.cols, row, ready->width);
        else
            memset(row, 0, ready->width * sizeof *row);
        if (p->w.kind == NVFP4)
            quantize_digits(ready, row, t);
        else if (integer_kind(p->w.kind))
            quantize_row(ready, row, t);
    }
}

long gemv_scratch(const struct weight *w, long tokens) {
    struct prepared ready;
    const long bytes = lay_out(&ready, w, computed(tokens), NULL) - (char *)NULL;
    return bytes + ready.width * 4;
}

/* Outputs first..first+count-1 of all tokens. */
static void some_outputs(const struct product *p, const struct prepared *x, long first, long count) {
    rows_function *rows = ROWS_OF[p->w.kind][p->tokens - 1];
    const long outputs = outputs_of(p);
    float sums[MOST * MOST_TAKEN], up[MOST * MOST_TAKEN];
    rows(p, x, first, count, sums);
    if (p->mode == GATE) {
        rows(p, x, outputs + first, count, up);
        for (long t = 0; t < p->tokens; t++) gate(sums + t * MOST_TAKEN, up + t * MOST_TAKEN, count);
    }
    for (long t = 0; t < p->tokens; t++) {
        float *out = p->out + t * outputs + first;
        if (p->mode == ADD)
            for (long i = 0; i < count; i++) out[i] += sums[t * MOST_TAKEN + i];
        else
            memcpy(out, sums + t * MOST_TAKEN, count * sizeof *out);
    }
}

static long taken_at_once(const struct product *p) {
    const long fair = outputs_of(p) / (2 * p->threads), wanted = TAKEN_BYTES / row_bytes(&p->w),
        rows = fair < wanted ? fair : wanted;
    return rows < 16 ? 16 : rows > MOST_TAKEN ? MOST_TAKEN : round_up(rows, 4);
}

static void share(const struct product *p, atomic_long *next, long thread) {
    const long outputs = outputs_of(p), taken = taken_at_once(p);
    struct prepared x;
    prepare(p, &x, p->scratch + thread * p->stride);
    for (long first; (first = atomic_fetch_add(next, taken)) < outputs;)
        some_outputs(p, &x, first, first + taken < outputs ? taken : outputs - first);
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

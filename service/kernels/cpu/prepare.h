/* Activations prepared for a product: normed, zero-padded, and as int16 for integer weights. */
#pragma once
#include <math.h>
#ifdef _OPENMP
#include <omp.h>
#endif
#include "integer.h"

/* Rows of x ready for a product. Integer kinds except nvfp4: x = words * scale over spans of columns, words within
 * 15 bits of the largest value of the span, so that an element is wrong by at most largest / 65534. Sums of products
 * fit in int32: 128 columns of 127 * 32767. */
struct prepared {
    long width;      /* elements of a row: cols and zeros after them */
    long span, spans;
    float *x;        /* floating kinds: [tokens][width] */
    int16_t *words;  /* integer kinds: [tokens][width]; nvfp4: the digits of as many columns, block by block */
    /* [tokens][ahead], zeros after the spans because whole vectors are read; nvfp4: first halves, then second */
    float *scales;
    float *sums;     /* the same; the sum of the x of a span, for zeros and offsets */
    int32_t *zeros;  /* nvfp4: instead, minus what E2M1_ZERO adds to the integer sum of a span */
    long ahead;
    long groups, ratio;  /* of the weight: scales per row, spans per scale */
};

INLINE int integer_kind(int64_t kind) { return kind >= INT8; }

INLINE char *take(char **at, long bytes) {
    char *here = *at;
    *at += round_up(bytes, 64);
    return here;
}

/* Lay out the arrays of `tokens` rows from `at`, 64-byte aligned. Returns their end. */
static inline char *lay_out(struct prepared *ready, const struct weight *w, long tokens, char *at) {
    ready->width = round_up(w->cols, w->kind == NVFP4 ? BLOCK_COLS : 128);
    ready->span = span_of(w);
    ready->spans = (w->cols + ready->span - 1) / ready->span;
    ready->ahead = w->kind == NVFP4 ? ready->width / ready->span : round_up(ready->spans, VL);
    ready->groups = groups_of(w);
    ready->ratio = w->group == w->cols ? ready->spans : w->group / ready->span;
    if (integer_kind(w->kind)) {
        ready->words = (int16_t *)take(&at, tokens * ready->width * 2);
        ready->scales = (float *)take(&at, tokens * ready->ahead * 4);
        ready->sums = (float *)take(&at, tokens * ready->ahead * 4);
        ready->zeros = (int32_t *)ready->sums;
    } else {
        ready->x = (float *)take(&at, tokens * ready->width * 4);
    }
    return at;
}

/* One row of x, normed or not, into `row` [width], zeros after it. */
static inline void norm_row(const struct product *p, const float *x, float *row, long width) {
    long cols = p->w.cols, whole = cols / VL * VL;
    float factor = 1.0f;
    if (p->norm) {
        vf squares = {0};
        for (long c = 0; c < whole; c += VL) squares += load(x + c) * load(x + c);
        float sum = sum_lanes(squares);
        for (long c = whole; c < cols; c++) sum += x[c] * x[c];
        factor = 1.0f / sqrtf(sum / (float)cols + (float)p->eps);
        for (long c = 0; c < whole; c += VL) store(row + c, load(x + c) * factor * load(p->norm + c));
        for (long c = whole; c < cols; c++) row[c] = x[c] * factor * p->norm[c];
    } else {
        memcpy(row, x, cols * sizeof *x);
    }
    memset(row + cols, 0, (width - cols) * sizeof *row);
}

/* Row t of the words, scales and sums. A span with a NaN or an infinity gets the scale NaN, which shows in every
 * result. */
static inline void quantize_row(struct prepared *ready, const float *row, long t) {
    int16_t *words = ready->words + t * ready->width;
    for (long s = 0; s < ready->spans; s++) {
        long from = s * ready->span, to = from + ready->span;
        vf most = {0}, faults = {0};
        for (long c = from; c < to; c += VL) {
            vf v = load(row + c);
            most = larger(magnitude(v), most);
            faults += v * 0.0f;
        }
        float largest = largest_lane(most);
        float inverse = largest > 1e-30f ? 32767.0f / largest : 0.0f;
        vi sums = {0};
        for (long c = from; c < to; c += VL) {
            vi whole = nearest(load(row + c) * inverse);
            *(vs_any *)(words + c) = __builtin_convertvector(whole, vs_any);
            sums += whole;
        }
        int32_t sum = 0;
        for (int i = 0; i < VL; i++) sum += sums[i];
        const long at = t * ready->ahead + s;
        ready->scales[at] = (inverse == 0.0f ? 0.0f : largest / 32767.0f) + sum_lanes(faults);
        ready->sums[at] = ready->scales[at] * (float)sum;
    }
    for (long s = t * ready->ahead + ready->spans; s < (t + 1) * ready->ahead; s++)
        ready->scales[s] = ready->sums[s] = 0.0f;
}

/* Like quantize_row for nvfp4, words within MOST_OF_DIGITS: an element is wrong by at most largest / 65278. */
static inline void quantize_digits(struct prepared *ready, const float *row, long t) {
    for (long s = 0; s < ready->ahead; s++) {
        const float *from = row + s * 16;
        vf most = {0}, faults = {0};
        for (long c = 0; c < 16; c += VL) {
            const vf v = load(from + c);
            most = larger(magnitude(v), most);
            faults += v * 0.0f;
        }
        const float largest = largest_lane(most), inverse = largest > 1e-30f ? MOST_OF_DIGITS / largest : 0.0f;
        int16_t words[16];
        for (long c = 0; c < 16; c += VL)
            *(vs_any *)(words + c) = __builtin_convertvector(nearest(load(from + c) * inverse), vs_any);
        const long block = s / BLOCK_GROUPS, lane = LANE_OF(s % BLOCK_GROUPS / 2), half = s % 2;
        int8_t *to = (int8_t *)(ready->words + t * ready->width) + block * BLOCK_DIGITS + half * HALF_DIGITS + lane * 4;
        int32_t sum = 0;
        for (int c = 0; c < 16; c++) {
            const int at = c / 4 * LANES * 4 + c % 4;
            to[at + HALF_DIGITS / 2] = (int8_t)words[c];
            to[at] = (int8_t)((words[c] - (int8_t)words[c]) >> 8);
            sum += words[c];
        }
        const long at = t * ready->ahead + block * BLOCK_GROUPS + half * LANES + lane;
        ready->scales[at] = (inverse == 0.0f ? 0.0f : largest / MOST_OF_DIGITS) + sum_lanes(faults);
        ready->zeros[at] = -E2M1_ZERO * sum;
    }
}

/* gates = silu(gates) * ups (Shazeer 2020), of `count` floats and the rest of the last vector. */
static inline void gate(float *gates, const float *ups, long count) {
    for (long i = 0; i < count; i += VL)
        store(gates + i, load(gates + i) / (1.0f + exponential(-load(gates + i))) * load(ups + i));
}

static inline int thread_number(void) {
#ifdef _OPENMP
    return omp_get_thread_num();
#else
    return 0;
#endif
}

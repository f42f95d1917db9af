/* One layer's attention over its paged cache, as kernels/cpu/captured_calls.py fills it in, and what the indexer shares with it. */
#pragma once
#include <math.h>
#include "weight.h"

/* Tokens of a block of keys and values. */
#define BLOCK 32

struct attention {
    float *qkv;                /* [tokens][heads + 2 * kv_heads][dim], overwritten */
    const float *q_norm, *k_norm; /* [dim], or NULL: heads are not normed */
    const float *bias;         /* [heads + 2 * kv_heads][dim], added to qkv first; NULL: none */
    double q_eps, k_eps;
    const float *cos, *sin;    /* [rotary rows][half] */
    int64_t half;
    float *keys, *values;      /* [blocks][kv_heads][BLOCK][dim], blocks block_ahead floats apart */
    int64_t block_ahead;
    const int32_t *positions;  /* [tokens]: where rows stand in the cache */
    const int32_t *turns;      /* [tokens]: which row of cos and sin turns them; other than positions after and in pictures */
    const int32_t *first_turns; /* [tokens]: that of the first row of each row's stretch; NULL: turns less the rows between */
    const int32_t *tables;     /* block ids of each sequence, table_ahead apart */
    int64_t table_ahead;
    float *out;                /* [tokens][heads][dim] */
    int64_t tokens, heads, kv_heads, dim;
    int64_t chunk;             /* whether all rows are of the first sequence; else row i is of sequence i */
    int64_t threads;
    char *scratch;             /* threads * stride bytes: attention_scratch() */
    int64_t stride;
    const int64_t *chosen;     /* [tokens][most]: each row sees these stretches of `ratio` tokens, in order, -1 behind the last, and the tokens */
    int64_t most, ratio;       /* behind the last whole stretch; ratio divides BLOCK. NULL: each row sees everything */
};

INLINE const int32_t *table_of(const struct attention *a, long t) { return a->tables + (a->chunk ? 0 : t * a->table_ahead); }

/* One head of `dim` numbers in place: RMS norm where there is one, then halves of 2 * half of them turned against each other (Su et al. 2021)
   by the angles of row `turned`, then times `factor`. */
static inline void turn_head(const struct attention *a, float *head, long dim, const float *norm, double eps, long turned, float factor) {
    const long half = a->half;
    const float *cos = a->cos + turned * half, *sin = a->sin + turned * half;
    vf squares = {0};
    for (long d = 0; d < dim; d += VL) squares += load(head + d) * load(head + d);
    if (norm) {
        const float scale = factor / sqrtf(sum_lanes(squares) / (float)dim + (float)eps);
        for (long d = 0; d < dim; d += VL) store(head + d, load(head + d) * scale * load(norm + d));
    } else if (factor != 1.0f)
        for (long d = 0; d < dim; d += VL) store(head + d, load(head + d) * factor);
    long d = 0;
    for (; d + VL <= half; d += VL) {
        const vf low = load(head + d), high = load(head + d + half), c = load(cos + d), s = load(sin + d);
        store(head + d, low * c - high * s);
        store(head + d + half, high * c + low * s);
    }
    for (; d < half; d++) {
        float low = head[d], high = head[d + half];
        head[d] = low * cos[d] - high * sin[d];
        head[d + half] = high * cos[d] + low * sin[d];
    }
}

/* attention.c: a few rows, each as if it were alone. */
void attend_rows(const struct attention *a);
/* attention.c: many rows of one sequence, at consecutive positions; each sees everything, or what is chosen for it. */
void attend_chunk(const struct attention *a);

/* Attention of one layer over its paged cache, as cpu_operands.py fills it in, and what the indexer shares with it. */
#pragma once
#include <math.h>
#include "weight.h"

/* Tokens per block of keys and values. */
#define BLOCK 32

struct attention {
    float *qkv;                /* [tokens][heads + 2 * kv_heads][dim], overwritten */
    const float *q_norm, *k_norm; /* [dim]; NULL: heads are not normed */
    const float *bias;         /* [heads + 2 * kv_heads][dim], added to qkv first; NULL: none */
    double q_eps, k_eps;
    const float *cos, *sin;    /* [rotary rows][half] */
    int64_t half;
    float *keys, *values;      /* [blocks][kv_heads][BLOCK][dim], blocks block_stride floats apart */
    int64_t block_stride;
    const int32_t *positions;  /* [tokens]: in the cache */
    const int32_t *turns;      /* [tokens]: rows of cos and sin; they differ from positions in and after pictures */
    /* [tokens]: the rows of cos and sin of the first token of each row's key block. NULL: turns less the rows between */
    const int32_t *first_turns;
    const int32_t *tables;     /* block ids of each sequence, table_stride apart */
    int64_t table_stride;
    float *out;                /* [tokens][heads][dim] */
    int64_t tokens, heads, kv_heads, dim;
    int64_t chunk;             /* all rows belong to the first sequence; else row i belongs to sequence i */
    int64_t threads;
    char *scratch;             /* threads * stride bytes: attention_scratch() */
    int64_t stride;
    /* [tokens][most]: each row sees these key blocks of `ratio` tokens, in order, -1 after the last, and the tokens
     * after its last full key block; ratio divides BLOCK. NULL: each row sees everything. */
    const int64_t *chosen;
    int64_t most, ratio;
};

INLINE const int32_t *table_of(const struct attention *a, long t) {
    return a->tables + (a->chunk ? 0 : t * a->table_stride);
}

/* One head of `dim` numbers in place: RMS norm if there is one, rotary embedding of the first 2 * half numbers (Su et
 * al. 2021) by row `turn` of cos and sin, then times `factor`. */
static inline void rotate_head(const struct attention *a, float *head, long dim, const float *norm, double eps,
                             long turn, float factor) {
    const long half = a->half;
    const float *cos = a->cos + turn * half, *sin = a->sin + turn * half;
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
/* attention.c: many rows of one sequence at consecutive positions; each sees everything, or selected key blocks. */
void attend_chunk(const struct attention *a);

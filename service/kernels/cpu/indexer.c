/* Attention to selected key blocks in one call: the indexer's mean keys, scores and selection, and the attention. */
#include <stdlib.h>
#include "attention.h"
#include "calls.h"
#include "prepare.h"

/* Scores over keys of fewer bytes are computed before a second thread has woken up. */
#define ALONE (1 << 18)

struct indexer {
    struct attention a;                 /* `chosen` is a buffer [tokens][most] */
    float *indexed;                     /* [tokens][heads + 1][dim]: queries, then a key; the queries are overwritten */
    const float *q_norm, *k_norm;       /* [dim] */
    float *tails;                       /* [slots][ratio - 1][dim]: the raw keys of the key block that is not full */
    const int64_t *sources, *targets;   /* slots to read and to write: [sequences], or [tokens] in a verify pass */
    float *pooled;                      /* [blocks][BLOCK / ratio][dim] */
    struct scored *queues;              /* [threads][queue] */
    int64_t heads, dim, queue;
    int64_t verify;                     /* slots are per row, though all rows belong to one sequence */
    double q_eps, k_eps;
};

/* Take in the raw key of row t. If its key block is full, store the mean, normed and rotated to the position of the
 * first token. */
static void pool_key(const struct indexer *x, long t, float *tail) {
    const struct attention *a = &x->a;
    const long dim = x->dim, ratio = a->ratio, position = a->positions[t], waiting = position % ratio,
               first = position - waiting;
    const float *key = x->indexed + (t * (x->heads + 1) + x->heads) * dim;
    if (waiting < ratio - 1) {
        memcpy(tail + waiting * dim, key, dim * sizeof *key);
        return;
    }
    float *to = x->pooled + (table_of(a, t)[first / BLOCK] * (BLOCK / ratio) + first % BLOCK / ratio) * dim;
    for (long d = 0; d < dim; d += VL) {
        vf sum = {0};
        for (long i = 0; i < ratio - 1; i++) sum += load(tail + i * dim + d);
        store(to + d, (sum + load(key + d)) / (float)ratio);
    }
    const long turn = a->first_turns ? a->first_turns[t] : a->turns[t] - waiting;
    rotate_head(a, to, dim, x->k_norm, x->k_eps, turn, 1.0f);
}

static void pool_keys(const struct indexer *x) {
    const long kept = (x->a.ratio - 1) * x->dim;
    for (long t = 0; t < x->a.tokens; t++) {
        const long own = x->a.chunk && !x->verify ? 0 : t;
        float *tail = x->tails + x->targets[own] * kept;
        if (own == t && x->sources[own] != x->targets[own])
            memcpy(tail, x->tails + x->sources[own] * kept, kept * sizeof *tail);
        pool_key(x, t, tail);
    }
}

/* The score of key block j for the queries of row t: the sum over heads of the positive products. */
static float score_of(const struct indexer *x, const float *queries, const float *key) {
    float all = 0;
    for (long h = 0; h < x->heads; h++) {
        vf sum = {0};
        for (long d = 0; d < x->dim; d += VL) sum += load(queries + h * x->dim + d) * load(key + d);
        const float one = sum_lanes(sum);
        all += one < 0 ? 0 : one;
    }
    return all;
}

static int rising(const void *a, const void *b) {
    return (*(const int64_t *)a > *(const int64_t *)b) - (*(const int64_t *)a < *(const int64_t *)b);
}

/* The key blocks that row t attends to, in order. */
static void choose(const struct indexer *x, long t, int64_t *chosen, struct scored *queue) {
    const struct attention *a = &x->a;
    const long dim = x->dim, position = a->positions[t], full = (position + 1) / a->ratio, each = BLOCK / a->ratio;
    const long wanted = full < a->most ? full : a->most;
    const int32_t *table = table_of(a, t);
    float *queries = x->indexed + t * (x->heads + 1) * dim;
    if (wanted < full) {
        for (long h = 0; h < x->heads; h++) rotate_head(a, queries + h * dim, dim, x->q_norm, x->q_eps, a->turns[t], 1.0f);
#pragma omp parallel for schedule(static) num_threads((int)a->threads) \
    if (full * dim * (long)sizeof(float) >= ALONE && a->threads > 1)
        for (long j = 0; j < full; j++)
            queue[j] = (struct scored){score_of(x, queries, x->pooled + (table[j / each] * each + j % each) * dim),
                                       (int32_t)j};
        select_largest(queue, wanted, full);
        for (long i = 0; i < wanted; i++) chosen[i] = queue[i].at;
        qsort(chosen, wanted, sizeof *chosen, rising);
    } else {
        for (long i = 0; i < wanted; i++) chosen[i] = i;
    }
    for (long i = wanted; i < a->most; i++) chosen[i] = -1;
}

/* All rows: take in keys, select key blocks, attend. If every row may attend to all that it sees, nothing is
 * selected. */
void attend_indexed(const struct indexer *x) {
    struct attention a = x->a;
    int64_t *chosen = (int64_t *)a.chosen;
    long longest = 0;
    for (long t = 0; t < a.tokens; t++) longest = a.positions[t] > longest ? a.positions[t] : longest;
    pool_keys(x);
    if (longest < a.most * a.ratio + a.ratio - 1)
        a.chosen = NULL;
    else if (a.tokens == 1)
        choose(x, 0, chosen, x->queues);
    else {
#pragma omp parallel for schedule(dynamic) num_threads((int)a.threads) \
    if (a.tokens * longest * x->dim >= ALONE && a.threads > 1)
        for (long t = 0; t < a.tokens; t++) choose(x, t, chosen + t * a.most, x->queues + thread_number() * x->queue);
    }
    if (a.chunk && a.tokens > 8)
        attend_chunk(&a);
    else
        attend_rows(&a);
}

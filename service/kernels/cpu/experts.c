/* Sparse experts for 1 to 8 rows: routing, then the weights of each selected expert once, by the products of gemv.c.
 * A row sums its experts in their order, so its result has the same bits alone and in a batch. */
#include <math.h>
#include "calls.h"

#define MOST_ROWS 8
/* Most experts per token, see cpu_limits.py. */
#define MOST_ACTIVE 32

struct experts {
    struct product router, shared_gate, shared_gate_up, shared_down; /* the shared expert's, only if `shared` */
    /* of every expert: everything but weight, rows and addresses */
    struct product gate_up, down;
    const struct weight *gate_ups, *downs;                           /* [count] */
    const float *x;                                                  /* [rows][hidden] */
    float *out, *scores, *routed, *gated; /* [rows][hidden], added to; [rows][count]; [rows][hidden]; [rows][width] */
    int64_t rows, count, active, hidden, width, shared, normalized;
};

struct choice { long expert, row; float weight; };

/* Write the `active` experts with the largest scores of a row (softmax over all) to `to`, the first of equal ones.
 * Changes the scores. */
static void choose(const struct experts *e, long row, struct choice *to) {
    float *scores = e->scores + row * e->count;
    float most = scores[0], all = 0, chosen = 0;
    for (long i = 1; i < e->count; i++) most = scores[i] > most ? scores[i] : most;
    for (long i = 0; i < e->count; i++) all += scores[i] = expf(scores[i] - most);
    for (long k = 0; k < e->active; k++) {
        long best = -1;
        /* Taken experts are negative. A NaN is taken if nothing else is left. */
        for (long i = 0; i < e->count; i++)
            if (!(scores[i] < 0) && (best < 0 || scores[i] > scores[best])) best = i;
        to[k] = (struct choice){best, row, scores[best]};
        chosen += scores[best];
        scores[best] = -1;
    }
    for (long k = 0; k < e->active; k++) to[k].weight /= e->normalized ? chosen : all;
}

static void weigh(float *rows, long width, float by) {
    for (long c = 0; c < width; c++) rows[c] *= by;
}

static void run_shared(const struct experts *e) {
    const long width = e->shared_down.w.cols;
    gemv(&e->shared_gate_up);
    gemv(&e->shared_gate);
    for (long t = 0; t < e->rows; t++)
        weigh(e->shared_gate_up.out + t * width, width, 1.0f / (1.0f + expf(-e->shared_gate.out[t])));
    gemv(&e->shared_down);
}

/* One expert for the rows of `who` [n]. */
static void run_expert(const struct experts *e, const struct choice *who, long n) {
    const int every = n == e->rows;
    struct product up = e->gate_up, down = e->down;
    up.w = e->gate_ups[who->expert], down.w = e->downs[who->expert];
    up.tokens = down.tokens = n;
    up.x = every ? e->x : e->routed, up.out = e->gated;
    down.x = e->gated, down.out = every ? e->out : e->routed, down.mode = every ? ADD : STORE;
    if (!every)
        for (long i = 0; i < n; i++)
            memcpy(e->routed + i * e->hidden, e->x + who[i].row * e->hidden, e->hidden * sizeof *e->x);
    gemv(&up);
    for (long i = 0; i < n; i++) weigh(e->gated + i * e->width, e->width, who[i].weight);
    gemv(&down);
    if (!every)
        for (long i = 0; i < n; i++)
            for (long c = 0; c < e->hidden; c++) e->out[who[i].row * e->hidden + c] += e->routed[i * e->hidden + c];
}

void expert_rows(const struct experts *e) {
    struct choice found[MOST_ROWS * MOST_ACTIVE];
    const long all = e->rows * e->active;
    gemv(&e->router);
    for (long t = 0; t < e->rows; t++) choose(e, t, found + t * e->active);
    for (long i = 1; i < all; i++) { /* by expert, then by row */
        const struct choice one = found[i];
        long at = i;
        for (; at > 0 && found[at - 1].expert > one.expert; at--) found[at] = found[at - 1];
        found[at] = one;
    }
    if (e->shared) run_shared(e);
    for (long first = 0, end; first < all; first = end) {
        for (end = first + 1; end < all && found[end].expert == found[first].expert;) end++;
        run_expert(e, found + first, end - first);
    }
}

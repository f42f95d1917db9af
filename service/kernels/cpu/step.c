/* A decode step's calls one behind the other, and the small ones among them. */
#include "calls.h"

struct call { void (*run)(const void *); const void *with; };

void run_calls(const struct call *calls, long count) {
    for (long i = 0; i < count; i++) calls[i].run(calls[i].with);
}

/* delta.c's norm_rows, with what it takes. */
struct norm { const float *x, *weight; float *out; int64_t rows, cols, period, threads; double eps; };

void norm_call(const struct norm *n) { norm_rows(n->x, n->weight, n->out, n->rows, n->cols, n->period, n->eps, n->threads); }

/* Queries with a gate beside each head's. */
struct gates {
    const float *projected; /* [rows][heads][queries, gates of dim][..] and `beside` more */
    float *qkv, *mixed;     /* [rows][heads * dim + beside], [rows][heads * dim] */
    int64_t rows, heads, dim, beside;
};

/* qkv gets what is no gate. */
void part_gates(const struct gates *g) {
    const long queries = g->heads * g->dim;
    for (long t = 0; t < g->rows; t++) {
        const float *from = g->projected + t * (2 * queries + g->beside);
        float *to = g->qkv + t * (queries + g->beside);
        for (long h = 0; h < g->heads; h++) memcpy(to + h * g->dim, from + 2 * h * g->dim, g->dim * sizeof *to);
        memcpy(to + queries, from + 2 * queries, g->beside * sizeof *to);
    }
}

/* What was mixed is weighed by its gates, through a sigmoid. dim is a multiple of VL. */
void close_gates(const struct gates *g) {
    const long queries = g->heads * g->dim;
    for (long t = 0; t < g->rows; t++)
        for (long h = 0; h < g->heads; h++) {
            const float *gate = g->projected + t * (2 * queries + g->beside) + (2 * h + 1) * g->dim;
            float *to = g->mixed + t * queries + h * g->dim;
            for (long d = 0; d < g->dim; d += VL) store(to + d, load(to + d) * squashed(load(gate + d)));
        }
}

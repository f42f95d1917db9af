/* Runs the calls of a captured sequence one after another, and the small operations among them. */
#include "calls.h"

struct call { void (*run)(const void *); const void *with; };

void run_calls(const struct call *calls, long count) {
    for (long i = 0; i < count; i++) calls[i].run(calls[i].with);
}

/* The arguments of norm_rows in delta.c. */
struct norm { const float *x, *weight; float *out; int64_t rows, cols, period, threads; double eps; };

void norm_call(const struct norm *n) {
    norm_rows(n->x, n->weight, n->out, n->rows, n->cols, n->period, n->eps, n->threads);
}

/* Queries with a gate after those of each head. */
struct gates {
    const float *projected; /* [rows][heads][queries, gates of dim][..] and `kv_width` more */
    float *qkv, *mixed;     /* [rows][heads * dim + kv_width], [rows][heads * dim] */
    int64_t rows, heads, dim, kv_width;
};

/* Copy everything but the gates into qkv. */
void split_gates(const struct gates *g) {
    const long queries = g->heads * g->dim;
    for (long t = 0; t < g->rows; t++) {
        const float *from = g->projected + t * (2 * queries + g->kv_width);
        float *to = g->qkv + t * (queries + g->kv_width);
        for (long h = 0; h < g->heads; h++) memcpy(to + h * g->dim, from + 2 * h * g->dim, g->dim * sizeof *to);
        memcpy(to + queries, from + 2 * queries, g->kv_width * sizeof *to);
    }
}

/* Multiply `mixed` by the sigmoid of its gates. dim is a multiple of VL. */
void apply_gates(const struct gates *g) {
    const long queries = g->heads * g->dim;
    for (long t = 0; t < g->rows; t++)
        for (long h = 0; h < g->heads; h++) {
            const float *gate = g->projected + t * (2 * queries + g->kv_width) + (2 * h + 1) * g->dim;
            float *to = g->mixed + t * queries + h * g->dim;
            for (long d = 0; d < g->dim; d += VL) store(to + d, load(to + d) * squashed(load(gate + d)));
        }
}

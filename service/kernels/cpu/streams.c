/* Hyper-connections between residual streams and a layer, for 1 to 8 rows: the mix that the layer reads, and the
 * injection of its result. */
#include "calls.h"

/* One connection. The products are chained: `down` and `inject` read `normed`, `up` reads the result of `down`. */
struct connection {
    struct product down, up, inject;
    const float *streams, *norm; /* [rows][count][hidden], [count][hidden] */
    float *normed, *low, *mixed; /* [rows][count][hidden], [rows][rank], [rows][count][hidden] */
    float *read;                 /* [rows][hidden] */
    float *weights, *found;      /* [rows][count], [rows][hidden], which is zeroed; NULL: nothing is injected */
    int64_t rows, count, hidden, rank, threads;
    double eps;
};

/* Divide `count` numbers by `divided` and apply the sigmoid, times `by` or times the number itself. */
INLINE void squash(float *x, long count, float divided, const int itself, float by) {
    for (long c = 0; c < count; c += VL) {
        const long left = (count - c < VL ? count - c : VL) * (long)sizeof *x;
        vf v = {0};
        memcpy(&v, x + c, left);
        v = v / divided;
        v = squashed(v) * (itself ? v : spread(by));
        memcpy(x + c, &v, left);
    }
}

void connection_rows(const struct connection *j) {
    const long hidden = j->hidden, wide = j->count * hidden;
    const float count = (float)j->count;
    norm_rows(j->streams, j->norm, j->normed, j->rows * j->count, hidden, j->count, j->eps, j->threads);
    gemv(&j->down);
    for (long t = 0; t < j->rows; t++) squash(j->low + t * j->rank, j->rank, count, 1, 0.0f);
    gemv(&j->up);
    for (long t = 0; t < j->rows; t++)
        for (long c = 0; c < hidden; c += VL) {
            vf sum = {0};
            for (long s = t * wide + c; s < (t + 1) * wide; s += hidden)
                sum += squashed(load(j->mixed + s)) * load(j->normed + s);
            store(j->read + t * hidden + c, sum / count);
        }
    if (!j->found) return;
    gemv(&j->inject);
    for (long t = 0; t < j->rows; t++) squash(j->weights + t * j->count, j->count, count, 0, 2.0f);
    memset(j->found, 0, j->rows * hidden * sizeof *j->found);
}

struct injection { float *streams; const float *weights, *found; int64_t rows, count, hidden; };

/* streams [rows][count][hidden] += weights [rows][count] * found [rows][hidden]. */
void inject_rows(const struct injection *j) {
    for (long s = 0; s < j->rows * j->count; s++)
        for (long c = 0; c < j->hidden; c += VL) {
            float *to = j->streams + s * j->hidden + c;
            store(to, load(to) + load(j->found + s / j->count * j->hidden + c) * j->weights[s]);
        }
}

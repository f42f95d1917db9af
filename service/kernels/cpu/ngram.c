/* Adds the rows of an n-gram table to residual streams, for 1 to 8 rows: key and value, a gate per stream, and a
 * convolution. */
#include <math.h>
#include "calls.h"

struct ngram {
    /* of the table's rows: key.out [rows][count][hidden], value.out [rows][hidden] */
    struct product key, value;
    const float *key_norm, *query_norm, *conv_norm; /* [count][hidden] */
    float *streams;                     /* [rows][count][hidden], added to */
    float *windows;                     /* [slots][(taps - 1) * apart][count][hidden] */
    const float *taps;                  /* [taps][count][hidden] */
    const int64_t *sources, *targets;   /* [rows]: slots to read and to write */
    int64_t rows, count, hidden, taps_count, apart;
    double key_eps, query_eps, conv_eps;
};

INLINE float inverse_root(vf squares, long count, double eps) {
    return 1.0f / sqrtf(sum_lanes(squares) / (float)count + (float)eps);
}

/* One stream of a row: `key` becomes the value times its agreement with the stream, then is added with its
 * convolution. */
static void one_stream(const struct ngram *n, long row, long stream, float *key, const float *value) {
    const long hidden = n->hidden, wide = n->count * hidden, at = stream * hidden,
               kept = (n->taps_count - 1) * n->apart;
    float *x = n->streams + row * wide + at;
    const float *from = n->windows + n->sources[row] * kept * wide + at;
    float *to = n->windows + n->targets[row] * kept * wide + at;
    vf keys = {0}, queries = {0}, both = {0}, squares = {0};
    for (long c = 0; c < hidden; c += VL) {
        const vf k = load(key + c), q = load(x + c);
        keys += k * k;
        queries += q * q;
        both += k * load(n->key_norm + at + c) * (q * load(n->query_norm + at + c));
    }
    const float scale = inverse_root(keys, hidden, n->key_eps) * inverse_root(queries, hidden, n->query_eps);
    const float score = sum_lanes(both) * scale / sqrtf((float)hidden), size = fabsf(score);
    /* a root has no slope below 1e-6 */
    const float root = sqrtf(size < 1e-6f ? 1e-6f : size) * (float)((score > 0) - (score < 0));
    const float agreed = 1.0f / (1.0f + expf(-root)) + score * 0.0f;                          /* a NaN stays */
    for (long c = 0; c < hidden; c += VL) {
        const vf v = load(value + c) * agreed;
        store(key + c, v);
        squares += v * v;
    }
    const float normed = inverse_root(squares, hidden, n->conv_eps);
    for (long c = 0; c < hidden; c += VL) {
        const vf v = load(key + c), latest = v * normed * load(n->conv_norm + at + c);
        vf sum = latest * load(n->taps + (n->taps_count - 1) * wide + at + c);
        for (long t = 0; t < n->taps_count - 1; t++)
            sum += load(from + t * n->apart * wide + c) * load(n->taps + t * wide + at + c);
        for (long i = 0; i + 1 < kept; i++) store(to + i * wide + c, load(from + (i + 1) * wide + c));
        if (kept) store(to + (kept - 1) * wide + c, latest);
        store(x + c, load(x + c) + v + sum * squashed(sum));
    }
}

void ngram_rows(const struct ngram *n) {
    gemv(&n->key);
    gemv(&n->value);
    for (long row = 0; row < n->rows; row++)
        for (long stream = 0; stream < n->count; stream++)
            one_stream(n, row, stream, n->key.out + (row * n->count + stream) * n->hidden,
                       n->value.out + row * n->hidden);
}

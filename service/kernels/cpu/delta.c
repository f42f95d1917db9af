/* Decode through a gated delta net between its projections in one parallel region: convolution, states and gates of
 * every row and key head. Also RMS norms. */
#include <math.h>
#include "calls.h"

/* Limits of a key head in delta_rows; widths are multiples of 16, see cpu_limits.py. */
#define MOST_KEY 256
#define MOST_VALUES 2048
#define MOST_TAPS 8
/* States of fewer bytes are read before a second thread has woken up. */
#define ALONE (1 << 18)

struct delta {
    /* [rows][channels + values], [rows][2 * key_heads * group]; `fused`: grouped by key head */
    const float *projected, *rates;
    float *windows, *states;        /* [slots][taps - 1][channels], [slots][key_heads][group][key_dim][value_dim] */
    const float *taps;              /* [taps][channels] */
    const float *decay, *bias;      /* [key_heads][group] */
    const float *norm;              /* [value_dim] */
    float *out;                     /* [rows][key_heads][group][value_dim] */
    const int64_t *sources, *targets; /* [rows]: slots to read and to write */
    int64_t rows, key_heads, group, key_dim, value_dim, taps_count, fused, sigmoid, threads;
    /* the rows belong to one sequence, each continuing from the state of the row before; else one sequence per row */
    int64_t verify;
    double eps;
};

static long channels_of(const struct delta *d) { return d->key_heads * (2 * d->key_dim + d->group * d->value_dim); }

/* Convolve `count` channels of row `row` from `first` on, apply silu, and shift the window. */
static void convolve(const struct delta *d, long row, const float *x, long first, long count, float *out) {
    const long channels = channels_of(d), kept = d->taps_count - 1;
    const float *from = d->windows + d->sources[row] * kept * channels + first;
    float *to = d->windows + d->targets[row] * kept * channels + first;
    const float *taps = d->taps + first;
    for (long c = 0; c < count; c += VL) {
        vf seen[MOST_TAPS], sum = {0};
        for (long t = 0; t < kept; t++) seen[t] = load(from + t * channels + c);
        seen[kept] = load(x + c);
        for (long t = 0; t <= kept; t++) sum += seen[t] * load(taps + t * channels + c);
        for (long t = 0; t < kept; t++) store(to + t * channels + c, seen[t + 1]);
        store(out + c, sum * squashed(sum));
    }
}

static void to_unit(float *x, long count, float factor) {
    vf squares = {0};
    for (long i = 0; i < count; i += VL) squares += load(x + i) * load(x + i);
    const float scale = factor / sqrtf(sum_lanes(squares) + 1e-6f);
    for (long i = 0; i < count; i += VL) store(x + i, load(x + i) * scale);
}

/* The key and value that the state of a value head takes in, and the query that it answers. */
struct token { const float *q, *k; float left, taken; };

/* N vectors of columns of a state [keys][values]: independent sums over whole cache lines. Returns the sum of
 * squares of `out`. */
INLINE vf some_columns(const int N, const struct token *in, const float *from, float *to, long keys, long values,
                       const float *v, float *out) {
    vf recalled[4], correction[4], answer[4], squares = {0};
    UNROLL for (int n = 0; n < N; n++) recalled[n] = answer[n] = (vf){0};
    for (long i = 0; i < keys; i++)
        UNROLL for (int n = 0; n < N; n++) recalled[n] += load(from + i * values + n * VL) * in->k[i];
    UNROLL for (int n = 0; n < N; n++) correction[n] = (load(v + n * VL) - recalled[n] * in->left) * in->taken;
    for (long i = 0; i < keys; i++)
        UNROLL for (int n = 0; n < N; n++) {
            const vf state = load(from + i * values + n * VL) * in->left + correction[n] * in->k[i];
            store(to + i * values + n * VL, state);
            answer[n] += state * in->q[i];
        }
    UNROLL for (int n = 0; n < N; n++) {
        store(out + n * VL, answer[n]);
        squares += answer[n] * answer[n];
    }
    return squares;
}

/* One value head: its state takes in k and v and answers q; the answer is normed and gated by z. */
static void one_head(const struct delta *d, long row, long head, const float *q, const float *k, const float *v,
                     const float *z, float beta, float speed) {
    const long keys = d->key_dim, values = d->value_dim, heads = d->key_heads * d->group;
    const float *from = d->states + (d->sources[row] * heads + head) * keys * values;
    float *to = d->states + (d->targets[row] * heads + head) * keys * values;
    float *out = d->out + (row * heads + head) * values;
    const float x = speed + d->bias[head], grown = x > 20.0f ? x : log1pf(expf(x));
    const struct token in = {q, k, expf(d->decay[head] * grown), 1.0f / (1.0f + expf(-beta))};
    vf squares = {0};
    long e = 0;
    for (; e + 4 * VL <= values; e += 4 * VL)
        squares += some_columns(4, &in, from + e, to + e, keys, values, v + e, out + e);
    for (; e < values; e += VL) squares += some_columns(1, &in, from + e, to + e, keys, values, v + e, out + e);
    const float scale = 1.0f / sqrtf(sum_lanes(squares) / (float)values + (float)d->eps);
    for (e = 0; e < values; e += VL) {
        const vf gate = load(z + e), opened = d->sigmoid ? squashed(gate) : gate * squashed(gate);
        store(out + e, load(out + e) * scale * load(d->norm + e) * opened);
    }
}

static void key_head(const struct delta *d, long row, long h) {
    const long keys = d->key_dim, values = d->group * d->value_dim, all = d->key_heads * keys,
        wide = d->key_heads * values;
    const float *x = d->projected + row * (channels_of(d) + wide), *own = x + h * 2 * (keys + values);
    const float *rates = d->rates + row * 2 * d->key_heads * d->group;
    float q[MOST_KEY], k[MOST_KEY], v[MOST_VALUES];
    convolve(d, row, d->fused ? own : x + h * keys, h * keys, keys, q);
    convolve(d, row, d->fused ? own + keys : x + all + h * keys, all + h * keys, keys, k);
    convolve(d, row, d->fused ? own + 2 * keys : x + 2 * all + h * values, 2 * all + h * values, values, v);
    to_unit(q, keys, 1.0f / sqrtf((float)keys));
    to_unit(k, keys, 1.0f);
    const float *gates = d->fused ? own + 2 * keys + values : x + 2 * all + wide + h * values;
    for (long g = 0; g < d->group; g++) {
        const long head = h * d->group + g, heads = d->key_heads * d->group;
        const float beta = d->fused ? rates[2 * h * d->group + g] : rates[head];
        const float speed = d->fused ? rates[(2 * h + 1) * d->group + g] : rates[heads + head];
        one_head(d, row, head, q, k, v + g * d->value_dim, gates + g * d->value_dim, beta, speed);
    }
}

void delta_rows(const struct delta *d) {
    /* The rows of one sequence follow each other per head, while its states are in the cache of the core. */
    const long together = d->verify ? d->rows : 1, tasks = d->rows / together * d->key_heads;
    const int many = d->rows * d->key_heads * d->group * d->key_dim * d->value_dim * (long)sizeof(float) >= ALONE;
#pragma omp parallel for schedule(static) num_threads((int)d->threads) if (many)
    for (long task = 0; task < tasks; task++)
        for (long row = 0; row < together; row++) key_head(d, task / d->key_heads + row, task % d->key_heads);
}

/* out [rows][cols] = x times weight over its root mean square; row i uses weights i modulo `period`. x and out may
 * be the same. */
void norm_rows(const float *x, const float *weight, float *out, long rows, long cols, long period, double eps,
               long threads) {
#pragma omp parallel for schedule(static) num_threads((int)threads) if (rows * cols >= ALONE)
    for (long row = 0; row < rows; row++) {
        const float *from = x + row * cols, *w = weight + row % period * cols;
        float *to = out + row * cols, rest = 0;
        vf squares = {0};
        long c = 0;
        for (; c + VL <= cols; c += VL) squares += load(from + c) * load(from + c);
        for (; c < cols; c++) rest += from[c] * from[c];
        const float scale = 1.0f / sqrtf((sum_lanes(squares) + rest) / (float)cols + (float)eps);
        for (c = 0; c + VL <= cols; c += VL) store(to + c, load(from + c) * scale * load(w + c));
        for (; c < cols; c++) to[c] = from[c] * scale * w[c];
    }
}

/* Attention of a layer over its paged fp32 keys and values. One parallel region norms and rotates heads, stores the
 * new keys and values, and attends. */
#include <stdatomic.h>
#include "attention.h"
#include "prepare.h"
#include "tile.h"

#define MOST_GROUP 64
/* Rows of queries that share a transposed block of keys. They and their results stay in L2. */
#define QUERIES 48
/* Keys and values of fewer bytes are read before a second thread has woken up. */
#define ALONE (1 << 18)

static float *slot_of(const struct attention *a, float *cache, int32_t block, long head, long slot) {
    return cache + block * a->block_stride + (head * BLOCK + slot) * a->dim;
}

static float *query(const struct attention *a, long t, long head) {
    return a->qkv + (t * (a->heads + 2 * a->kv_heads) + head) * a->dim;
}

static void add_bias(const struct attention *a, long t, long head) {
    float *x = query(a, t, head);
    const float *bias = a->bias + head * a->dim;
    for (long d = 0; d < a->dim; d += VL) store(x + d, load(x + d) + load(bias + d));
}

/* Store the key and value of row t for one head in the cache; norm, rotate and scale (by dim^-0.5) the queries of
 * its group. */
static void store_heads(const struct attention *a, long t, long head) {
    const long position = a->positions[t], group = a->heads / a->kv_heads, slot = position % BLOCK;
    const int32_t block = table_of(a, t)[position / BLOCK];
    float *key = query(a, t, a->heads + head);
    if (a->bias) {
        add_bias(a, t, a->heads + head);
        add_bias(a, t, a->heads + a->kv_heads + head);
        for (long g = 0; g < group; g++) add_bias(a, t, head * group + g);
    }
    rotate_head(a, key, a->dim, a->k_norm, a->k_eps, a->turns[t], 1.0f);
    memcpy(slot_of(a, a->keys, block, head, slot), key, a->dim * sizeof *key);
    memcpy(slot_of(a, a->values, block, head, slot), query(a, t, a->heads + a->kv_heads + head), a->dim * sizeof *key);
    const float factor = 1.0f / sqrtf((float)a->dim);
    for (long g = 0; g < group; g++)
        rotate_head(a, query(a, t, head * group + g), a->dim, a->q_norm, a->q_eps, a->turns[t], factor);
}

/* scores[g * BLOCK + j] = query g times key j, for J keys and G queries. */
INLINE void some_scores(const int J, const int G, const float *q, const float *k, long dim, float *scores) {
    vf sums[4][2];
    for (int j = 0; j < J; j++)
        for (int g = 0; g < G; g++) sums[j][g] = (vf){0};
    for (long d = 0; d < dim; d += VL)
        for (int j = 0; j < J; j++)
            for (int g = 0; g < G; g++) sums[j][g] += load(k + j * dim + d) * load(q + g * dim + d);
    for (int j = 0; j < J; j++)
        for (int g = 0; g < G; g++) scores[g * BLOCK + j] = sum_lanes(sums[j][g]);
}

INLINE void block_scores(const int G, const float *q, const float *k, long dim, long count, float *scores) {
    long j = 0;
    for (; j + 4 <= count; j += 4) some_scores(4, G, q, k + j * dim, dim, scores + j);
    for (; j < count; j++) some_scores(1, G, q, k + j * dim, dim, scores + j);
}

/* out [G][dim] += weights [G][BLOCK] times values [count][dim]. */
INLINE void mix(const int G, const float *weights, const float *values, long dim, long count, float *out) {
    long d = 0;
    for (; d + 4 * VL <= dim; d += 4 * VL) {
        vf sums[2][4];
        for (int g = 0; g < G; g++)
            for (int v = 0; v < 4; v++) sums[g][v] = load(out + g * dim + d + v * VL);
        for (long j = 0; j < count; j++)
            for (int g = 0; g < G; g++)
                for (int v = 0; v < 4; v++) sums[g][v] += load(values + j * dim + d + v * VL) * weights[g * BLOCK + j];
        for (int g = 0; g < G; g++)
            for (int v = 0; v < 4; v++) store(out + g * dim + d + v * VL, sums[g][v]);
    }
    for (; d < dim; d += VL)
        for (int g = 0; g < G; g++) {
            vf sum = load(out + g * dim + d);
            for (long j = 0; j < count; j++) sum += load(values + j * dim + d) * weights[g * BLOCK + j];
            store(out + g * dim + d, sum);
        }
}

/* The running softmax of a row (Milakov and Gimelshein 2018): the largest score and the sum of weights; `mixed` has
 * the same scale. */
struct running { float largest, sum; };

/* Turn scores [BLOCK], of which the first `count` are visible, into weights, zeros after them; rescale `mixed`
 * [dim]. */
static void weigh(struct running *run, float *scores, long count, float *mixed, long dim) {
    float largest = run->largest;
    for (long j = 0; j < count; j++) largest = scores[j] > largest ? scores[j] : largest;
    if (largest != run->largest) {
        float old = run->sum == 0.0f ? 0.0f : exponential(spread(run->largest - largest))[0];
        for (long d = 0; d < dim; d += VL) store(mixed + d, load(mixed + d) * old);
        run->sum *= old;
        run->largest = largest;
    }
    for (long j = count; j < BLOCK; j++) scores[j] = -INFINITY;
    vf sum = {0};
    for (long j = 0; j < BLOCK; j += VL) {
        vf seen = load(scores + j), weight = pick(seen == -INFINITY, (vf){0}, exponential(seen - largest));
        store(scores + j, weight);
        sum += weight;
    }
    run->sum += sum_lanes(sum);
}

static void finish(const struct running *run, const float *mixed, float *out, long dim) {
    for (long d = 0; d < dim; d += VL) store(out + d, load(mixed + d) / run->sum);
}

/* `count` tokens of one block from `from` on; `at`: index of the next selected key block. */
struct piece { long from, count, at; };

/* The piece after `p` of the `length` tokens that row t may see; 0 if there is none. */
static int next_piece(const struct attention *a, long t, long length, struct piece *p) {
    const int64_t *chosen = a->chosen + t * a->most;
    const long ratio = a->ratio;
    if (!a->chosen) {
        p->from += p->count;
        p->count = length - p->from < BLOCK ? length - p->from : BLOCK;
        return p->from < length;
    }
    if (p->at < a->most && chosen[p->at] >= 0) {
        p->from = chosen[p->at++] * ratio;
        for (p->count = ratio;
             (p->from + p->count) % BLOCK && p->at < a->most && chosen[p->at] * ratio == p->from + p->count; p->at++)
            p->count += ratio;
        return 1;
    }
    if (p->at > a->most) return 0;
    *p = (struct piece){length / ratio * ratio, length % ratio, a->most + 1};
    return p->count > 0;
}

/* All queries of row t that share a key head, over the tokens that the row sees. */
static void attend_row(const struct attention *a, long t, long head) {
    const long group = a->heads / a->kv_heads, dim = a->dim, length = a->positions[t] + 1;
    const int32_t *table = table_of(a, t);
    const float *q = query(a, t, head * group);
    float *out = a->out + (t * a->heads + head * group) * dim, scores[MOST_GROUP * BLOCK];
    struct running run[MOST_GROUP];
    for (long g = 0; g < group; g++) run[g] = (struct running){-INFINITY, 0.0f};
    memset(out, 0, group * dim * sizeof *out);
    for (struct piece p = {0, 0, 0}; next_piece(a, t, length, &p);) {
        const long count = p.count, slot = p.from % BLOCK;
        const int32_t block = table[p.from / BLOCK];
        const float *k = slot_of(a, a->keys, block, head, slot), *v = slot_of(a, a->values, block, head, slot);
        long g = 0;
        for (; g + 2 <= group; g += 2) block_scores(2, q + g * dim, k, dim, count, scores + g * BLOCK);
        if (g < group) block_scores(1, q + g * dim, k, dim, count, scores + g * BLOCK);
        for (g = 0; g < group; g++) weigh(&run[g], scores + g * BLOCK, count, out + g * dim, dim);
        for (g = 0; g + 2 <= group; g += 2) mix(2, scores + g * BLOCK, v, dim, count, out + g * dim);
        if (g < group) mix(1, scores + g * BLOCK, v, dim, count, out + g * dim);
    }
    for (long g = 0; g < group; g++) finish(&run[g], out + g * dim, out + g * dim, dim);
}

static void share_rows(const struct attention *a, atomic_long *next) {
    const long items = a->chunk ? a->kv_heads : a->kv_heads * a->tokens;
    for (long item; (item = atomic_fetch_add(next, 1)) < items;) {
        const long head = item % a->kv_heads, first = item / a->kv_heads, last = a->chunk ? a->tokens : first + 1;
        for (long t = first; t < last; t++) store_heads(a, t, head);
        for (long t = first; t < last; t++) attend_row(a, t, head);
    }
}

void attend_rows(const struct attention *a) {
    atomic_long next = 0;
    long seen = 0;
    for (long t = 0; t < a->tokens; t++) seen += a->chosen ? a->most * a->ratio : a->positions[t] + 1;
    if (a->threads == 1 || 8 * a->dim * a->kv_heads * seen < ALONE) {
        share_rows(a, &next);
        return;
    }
#pragma omp parallel num_threads((int)a->threads)
    share_rows(a, &next);
}

/* The working memory of one thread of attend_chunk; rows are (token, query of the group) pairs. */
struct workspace {
    float *q, *mixed;      /* [padded][dim] */
    float *scores;         /* [padded][BLOCK] */
    float *transposed;     /* BLOCK / PANEL panels of keys, [dim][PANEL] each */
    struct running *run;   /* [padded] */
};

static long tile_tokens(long group) { return group < QUERIES ? QUERIES / group : 1; }

static char *lay_out_attention(struct workspace *d, long group, long dim, char *at) {
    const long padded = round_up(tile_tokens(group) * group, ACROSS);
    d->q = (float *)take(&at, padded * dim * 4);
    d->mixed = (float *)take(&at, padded * dim * 4);
    d->scores = (float *)take(&at, padded * BLOCK * 4);
    d->transposed = (float *)take(&at, BLOCK * dim * 4);
    d->run = (struct running *)take(&at, padded * sizeof *d->run);
    return at;
}

/* Bytes of scratch per thread. */
long attention_scratch(long heads, long kv_heads, long dim) {
    struct workspace d;
    return lay_out_attention(&d, heads / kv_heads, dim, NULL) - (char *)NULL;
}

/* The width of a head must be a multiple of this many floats. */
long attention_width(void) { return VL < 8 ? 8 : VL; }

/* One block of keys and values for a tile of `rows` query rows, the first of them at position `first`. */
static void attend_block(const struct attention *a, const struct workspace *d, long head, long from, long first,
                         long rows, int32_t block) {
    const long dim = a->dim, group = a->heads / a->kv_heads, last = first + (rows - 1) / group;
    const long count = last + 1 - from < BLOCK ? last + 1 - from : BLOCK;
    const float *k = slot_of(a, a->keys, block, head, 0), *v = slot_of(a, a->values, block, head, 0);
    memset(d->scores, 0, round_up(rows, ACROSS) * BLOCK * sizeof(float));
    for (long p = 0; p < BLOCK; p += PANEL) transpose(k + p * dim, dim, d->transposed + p * dim, PANEL, PANEL);
    for (long r = 0; r < rows; r += ACROSS)
        for (long p = 0; p < BLOCK; p += PANEL)
            tile_of(NV, d->q + r * dim, dim, d->transposed + p * dim, PANEL, dim, d->scores + r * BLOCK + p, BLOCK);
    for (long r = 0; r < rows; r++) {
        const long seen = first + r / group + 1 - from;
        if (seen > 0)
            weigh(&d->run[r], d->scores + r * BLOCK, seen < count ? seen : count, d->mixed + r * dim, dim);
        else
            memset(d->scores + r * BLOCK, 0, BLOCK * sizeof(float));
    }
    for (long r = 0; r < rows; r += ACROSS) {
        long c = 0;
        for (; c + PANEL <= dim; c += PANEL)
            tile_of(NV, d->scores + r * BLOCK, BLOCK, v + c, dim, count, d->mixed + r * dim + c, dim);
        for (; c < dim; c += VL)
            tile_of(1, d->scores + r * BLOCK, BLOCK, v + c, dim, count, d->mixed + r * dim + c, dim);
    }
}

static void attend_tile(const struct attention *a, const struct workspace *d, long head, long t, long tokens) {
    const long group = a->heads / a->kv_heads, dim = a->dim, rows = tokens * group, padded = round_up(rows, ACROSS);
    const long first = a->positions[t], length = first + tokens;
    for (long r = 0; r < rows; r++) {
        memcpy(d->q + r * dim, query(a, t + r / group, head * group + r % group), dim * sizeof(float));
        d->run[r] = (struct running){-INFINITY, 0.0f};
    }
    memset(d->q + rows * dim, 0, (padded - rows) * dim * sizeof(float));
    memset(d->mixed, 0, padded * dim * sizeof(float));
    for (long from = 0; from < length; from += BLOCK)
        attend_block(a, d, head, from, first, rows, a->tables[from / BLOCK]);
    for (long r = 0; r < rows; r++)
        finish(&d->run[r], d->mixed + r * dim, a->out + ((t + r / group) * a->heads + head * group + r % group) * dim,
               dim);
}

/* attend_chunk if each row sees selected key blocks. */
static void attend_chosen(const struct attention *a) {
    atomic_long stored = 0, next = 0;
#pragma omp parallel num_threads((int)a->threads)
    {
        for (long t; (t = atomic_fetch_add(&stored, 1)) < a->tokens;)
            for (long head = 0; head < a->kv_heads; head++) store_heads(a, t, head);
#pragma omp barrier
        for (long item; (item = atomic_fetch_add(&next, 1)) < a->tokens * a->kv_heads;)
            attend_row(a, item / a->kv_heads, item % a->kv_heads);
    }
}

void attend_chunk(const struct attention *a) {
    if (a->chosen) {
        attend_chosen(a);
        return;
    }
    const long step = tile_tokens(a->heads / a->kv_heads), tiles = (a->tokens + step - 1) / step;
    atomic_long stored = 0, next = 0;
#pragma omp parallel num_threads((int)a->threads)
    {
        struct workspace d;
        lay_out_attention(&d, a->heads / a->kv_heads, a->dim, a->scratch + thread_number() * a->stride);
        for (long t; (t = atomic_fetch_add(&stored, 1)) < a->tokens;)
            for (long head = 0; head < a->kv_heads; head++) store_heads(a, t, head);
#pragma omp barrier
        /* the last tiles first: they have the longest past */
        for (long item; (item = atomic_fetch_add(&next, 1)) < tiles * a->kv_heads;) {
            const long t = (tiles - 1 - item / a->kv_heads) * step;
            attend_tile(a, &d, item % a->kv_heads, t, t + step < a->tokens ? step : a->tokens - t);
        }
    }
}

/* Reads memory and does nothing with it: the bound that decode is compared with. */
#include <stdatomic.h>
#include "prepare.h"

#define STREAMS 4
#define TAKEN (1 << 18)

static int32_t read_some(const char *at) {
    vi sums[STREAMS] = {{0}};
    for (long i = 0; i < TAKEN / STREAMS; i += sizeof(vi))
        for (int s = 0; s < STREAMS; s++) {
            vi v;
            memcpy(&v, at + s * (TAKEN / STREAMS) + i, sizeof v);
            sums[s] += v;
        }
    vi sum = sums[0] + sums[1] + sums[2] + sums[3];
    for (int i = 1; i < VL; i++) sum[0] += sum[i];
    return sum[0];
}

/* Read `bytes` (whole pieces of 256 KiB) with all threads, in streams as gemv.c does. Returns a sum of them. */
long read_all(const char *from, long bytes, long threads) {
    atomic_long next = 0, sum = 0;
#pragma omp parallel num_threads((int)threads)
    for (long at; (at = atomic_fetch_add(&next, TAKEN)) + TAKEN <= bytes;) atomic_fetch_add(&sum, read_some(from + at));
    return sum;
}

/* Rows of a stored table as fp32. */
#include "widen.h"

/* out [count][cols] = rows `ids` of the table. Returns -1, or the index of the first id outside the table; then
 * nothing is written. */
long embed_rows(const struct weight *table, const int64_t *ids, long count, float *out) {
    for (long i = 0; i < count; i++)
        if (ids[i] < 0 || ids[i] >= table->rows) return i;
    for (long i = 0; i < count; i++) widen(table, ids[i], 0, table->cols, out + i * table->cols);
    return -1;
}

/* The instructions that these kernels were compiled for. */
const char *instructions(void) {
#if VL == 16 && defined(__AVX512VNNI__)
    return "AVX-512 with VNNI";
#elif VL == 16
    return "AVX-512";
#elif VL == 8
    return "AVX2";
#elif defined(__ARM_NEON)
    return "NEON";
#else
    return "plain C";
#endif
}

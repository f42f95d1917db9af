/* Functions that several of the sources call. */
#pragma once
#include "weight.h"

/* gemv.c: a product of 1 to FEW rows of x. */
#define FEW 8
void gemv(const struct product *p);
/* delta.c: RMS norms of rows. */
void norm_rows(const float *x, const float *weight, float *out, long rows, long cols, long period, double eps,
               long threads);
struct scored { float score; int32_t at; };
/* largest.c: move the k largest of `all` [n] to the front, in any order; 1 <= k <= n. */
void select_largest(struct scored *all, long k, long n);

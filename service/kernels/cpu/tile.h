/* The register tile of products of many rows and of attention, and the transposition of rows into the panels it
 * reads. */
#pragma once
#include "simd.h"

/* ACROSS x NV vectors of sums fill the registers: 12 of 16, or 24 of 32. */
#if VL == 16
#define ACROSS 12
#define NV 2
#elif VL == 8
#define ACROSS 6
#define NV 2
#else
#define ACROSS 6
#define NV 4
#endif
#define PANEL (NV * VL)

/* c [ACROSS][n * VL] += a [ACROSS][depth] * b [depth][n * VL], rows a_ahead, b_ahead and c_ahead floats apart. */
INLINE void tile_of(const int n, const float *a, long a_ahead, const float *b, long b_ahead, long depth, float *c,
                    long c_ahead) {
    vf sums[ACROSS][NV];
#pragma GCC unroll 12
    for (int i = 0; i < ACROSS; i++)
#pragma GCC unroll 4
        for (int v = 0; v < n; v++) sums[i][v] = load(c + i * c_ahead + v * VL);
    for (long k = 0; k < depth; k++) {
        vf right[NV];
#pragma GCC unroll 4
        for (int v = 0; v < n; v++) right[v] = load(b + k * b_ahead + v * VL);
#pragma GCC unroll 12
        for (int i = 0; i < ACROSS; i++) {
            vf left = spread(a[i * a_ahead + k]);
#pragma GCC unroll 4
            for (int v = 0; v < n; v++) sums[i][v] += left * right[v];
        }
    }
#pragma GCC unroll 12
    for (int i = 0; i < ACROSS; i++)
#pragma GCC unroll 4
        for (int v = 0; v < n; v++) store(c + i * c_ahead + v * VL, sums[i][v]);
}

/* Transpose: to [units][ahead] gets column `unit` of from [PANEL][units]; 32-bit units, a multiple of 8 of them. */
INLINE void transpose(const void *from, long units, void *to, int rows, long ahead) {
#ifdef X86_WIDE
    for (int r = 0; r < rows; r += 8)
        for (long u = 0; u < units; u += 8) {
            const float *at = (const float *)from + r * units + u;
            float *out = (float *)to + u * ahead + r;
            __m256 a[8], b[8];
#pragma GCC unroll 8
            for (int i = 0; i < 8; i++) a[i] = _mm256_loadu_ps(at + i * units);
#pragma GCC unroll 4
            for (int i = 0; i < 4; i++) {
                b[2 * i] = _mm256_unpacklo_ps(a[2 * i], a[2 * i + 1]);
                b[2 * i + 1] = _mm256_unpackhi_ps(a[2 * i], a[2 * i + 1]);
            }
#pragma GCC unroll 2
            for (int i = 0; i < 8; i += 4) {
                a[i] = _mm256_shuffle_ps(b[i], b[i + 2], 0x44);
                a[i + 1] = _mm256_shuffle_ps(b[i], b[i + 2], 0xee);
                a[i + 2] = _mm256_shuffle_ps(b[i + 1], b[i + 3], 0x44);
                a[i + 3] = _mm256_shuffle_ps(b[i + 1], b[i + 3], 0xee);
            }
#pragma GCC unroll 4
            for (int i = 0; i < 4; i++) {
                _mm256_storeu_ps(out + i * ahead, _mm256_permute2f128_ps(a[i], a[i + 4], 0x20));
                _mm256_storeu_ps(out + (i + 4) * ahead, _mm256_permute2f128_ps(a[i], a[i + 4], 0x31));
            }
        }
#else
    for (long u = 0; u < units; u++)
        for (int r = 0; r < rows; r++) ((int32_t *)to)[u * ahead + r] = ((const int32_t *)from)[r * units + u];
#endif
}

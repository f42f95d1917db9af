/* A stored weight and one product with it. native.py has the same fields, all of eight bytes. */
#pragma once
#include "simd.h"

enum kind { F32, BF16, F16, FP8, INT8, INT4, NVFP4 };

struct weight {
    const void *data;     /* rows without gaps; rows of nibbles are padded to 16 bytes */
    const void *scales;   /* [rows][groups]: fp16 for int4, e4m3 for nvfp4, else fp32; NULL: numbers without scales */
    const void *offsets;  /* [rows][groups] fp16 for asymmetric int4, else NULL */
    int64_t rows, cols;
    int64_t group;        /* columns per scale: a multiple of 32, or all of them; 16 for nvfp4 */
    int64_t kind;
    int64_t zero;         /* the number that means 0: 8 in symmetric int4 */
    const float *factors; /* [rows] for nvfp4, else NULL */
};

enum mode { STORE, ADD, GATE };

struct product {
    struct weight w;
    const float *norm;  /* [cols]: x is normed first (Zhang and Sennrich 2019); NULL: x as it is */
    double eps;
    int64_t mode;       /* STORE: out = x W^T. ADD: out += x W^T. GATE: out = silu(x G^T) * (x U^T), W = G over U */
    const float *x;     /* [tokens][cols] */
    float *out;         /* [tokens][rows], or [tokens][rows / 2] */
    int64_t tokens, threads;
    char *scratch;      /* threads * stride bytes, see gemv_scratch and gemm_scratch */
    int64_t stride;
};

INLINE long round_up(long n, long to) { return (n + to - 1) / to * to; }
INLINE long groups_of(const struct weight *w) { return (w->cols + w->group - 1) / w->group; }
INLINE long outputs_of(const struct product *p) { return p->mode == GATE ? p->w.rows / 2 : p->w.rows; }

/* Activations share a scale over as many columns as divide the weight's group. */
INLINE long span_of(const struct weight *w) {
    if (w->kind == NVFP4) return w->group;
    return w->group % 128 == 0 || w->group == w->cols ? 128 : w->group % 64 == 0 ? 64 : 32;
}

INLINE long row_bytes(const struct weight *w) {
    switch (w->kind) {
        case F32: return 4 * w->cols;
        case BF16: case F16: return 2 * w->cols;
        case INT4: case NVFP4: return round_up(w->cols, 32) / 2;
        default: return w->cols;
    }
}

INLINE const char *row_of(const struct weight *w, long row) { return (const char *)w->data + row * row_bytes(w); }

INLINE float scale_at(const struct weight *w, int64_t kind, long at) {
    if (kind == INT4) return half_to_float(((const uint16_t *)w->scales)[at]);
    if (kind == NVFP4)
        return fp8_to_float(((const uint8_t *)w->scales)[at]) * (FP8_FACTOR * E2M1_FACTOR) *
               w->factors[at / groups_of(w)];
    float scale = ((const float *)w->scales)[at];
    return kind == FP8 ? scale * FP8_FACTOR : scale;
}

INLINE float offset_at(const struct weight *w, long at) { return half_to_float(((const uint16_t *)w->offsets)[at]); }

/* VL numbers of a floating kind; those of fp8 without their scale. */
INLINE vf load_kind(int64_t kind, const void *p) {
    switch (kind) {
        case F32: return load_f32(p);
        case BF16: return load_bf16(p);
        case F16: return load_f16(p);
        default: return load_fp8(p);
    }
}

INLINE long bytes_each(int64_t kind) { return kind == F32 ? 4 : kind == FP8 || kind == INT8 ? 1 : 2; }

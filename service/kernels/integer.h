/* Dot products of stored integers with int16 activations, 32 columns at a time. */
#pragma once
#include "weight.h"

#define UNIT 32

#ifdef X86_WIDE
/* 256 bits everywhere: wider ones gain nothing where reading is the limit. */
#define LANES 8
#define PARTS 2
#define PART_WORDS 16
typedef __m256i part;
#elif defined(__ARM_NEON)
#define LANES 4
#define PARTS 4
#define PART_WORDS 8
typedef int16x8_t part;
#else
#define LANES 4
#define PARTS 4
#define PART_WORDS 8
typedef int16_t part __attribute__((vector_size(16)));
#endif
typedef float some_floats __attribute__((vector_size(LANES * 4)));
typedef int32_t some_ints __attribute__((vector_size(LANES * 4)));
typedef struct { part parts[PARTS]; } unit;

INLINE long unit_bytes(const int64_t kind) { return kind == INT8 ? 32 : 16; }

#ifdef X86_WIDE
INLINE unit unpack(const int64_t kind, const void *p) {
    const __m128i first = _mm_loadu_si128(p);
    if (kind == INT8) return (unit){{_mm256_cvtepi8_epi16(first), _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)p + 1))}};
    if (kind == NVFP4) {
        const __m128i table = _mm_setr_epi8(E2M1_WHOLE), low = _mm_set1_epi8(15);
        const __m128i a = _mm_and_si128(first, low), b = _mm_and_si128(_mm_srli_epi16(first, 4), low);
        return (unit){{_mm256_cvtepi8_epi16(_mm_shuffle_epi8(table, a)), _mm256_cvtepi8_epi16(_mm_shuffle_epi8(table, b))}};
    }
    const part bytes = _mm256_cvtepu8_epi16(first);
    return (unit){{_mm256_and_si256(bytes, _mm256_set1_epi16(15)), _mm256_srli_epi16(bytes, 4)}};
}
INLINE some_ints multiply_add(some_ints sums, part w, const int16_t *x) {
    const part v = _mm256_loadu_si256((const void *)x);
#if defined(__AVX512VNNI__) && defined(__AVX512VL__)
    return (some_ints)_mm256_dpwssd_epi32((part)sums, w, v);
#elif defined(__AVXVNNI__)
    return (some_ints)_mm256_dpwssd_avx_epi32((part)sums, w, v);
#else
    return sums + (some_ints)_mm256_madd_epi16(w, v);
#endif
}
#elif defined(__ARM_NEON)
/* table[which], for nibbles. */
INLINE int8x16_t whole_numbers(int8x16_t table, int8x16_t which) {
#ifdef __aarch64__
    return vqtbl1q_s8(table, vreinterpretq_u8_s8(which));
#else
    const int8x8x2_t halves = {{vget_low_s8(table), vget_high_s8(table)}};
    return vcombine_s8(vtbl2_s8(halves, vget_low_s8(which)), vtbl2_s8(halves, vget_high_s8(which)));
#endif
}
INLINE unit unpack(const int64_t kind, const void *p) {
    int8x16_t a = vld1q_s8(p), b;
    if (kind == INT8) {
        b = vld1q_s8((const int8_t *)p + 16);
    } else {
        const uint8x16_t bytes = vreinterpretq_u8_s8(a);
        a = vreinterpretq_s8_u8(vandq_u8(bytes, vdupq_n_u8(15)));
        b = vreinterpretq_s8_u8(vshrq_n_u8(bytes, 4));
        if (kind == NVFP4) {
            static const int8_t whole[16] = {E2M1_WHOLE};
            const int8x16_t table = vld1q_s8(whole);
            a = whole_numbers(table, a), b = whole_numbers(table, b);
        }
    }
    return (unit){{vmovl_s8(vget_low_s8(a)), vmovl_s8(vget_high_s8(a)), vmovl_s8(vget_low_s8(b)), vmovl_s8(vget_high_s8(b))}};
}
INLINE some_ints multiply_add(some_ints sums, part w, const int16_t *x) {
    const part v = vld1q_s16(x);
    return (some_ints)vmlal_s16(vmlal_s16((int32x4_t)sums, vget_low_s16(w), vget_low_s16(v)), vget_high_s16(w), vget_high_s16(v));
}
#else
INLINE unit unpack(const int64_t kind, const void *p) {
    static const int8_t whole[16] = {E2M1_WHOLE};
    unit u;
    for (int i = 0; i < UNIT; i++) {
        const uint8_t byte = ((const uint8_t *)p)[kind == INT8 ? i : i % 16], nibble = i < 16 ? byte & 15 : byte >> 4;
        u.parts[i / 8][i % 8] = kind == INT8 ? (int8_t)byte : kind == NVFP4 ? whole[nibble] : nibble;
    }
    return u;
}
INLINE some_ints multiply_add(some_ints sums, part w, const int16_t *x) {
    for (int i = 0; i < PART_WORDS; i++) sums[i % LANES] += w[i] * x[i];
    return sums;
}
#endif

/* The unit at column c of a row of `bytes`; zeros behind its end. */
INLINE unit unpack_last(const int64_t kind, const char *row, long c, long bytes) {
    char tail[UNIT] = {0};
    const long at = kind == INT8 ? c : c / 2;
    memcpy(tail, row + at, bytes - at < unit_bytes(kind) ? bytes - at : unit_bytes(kind));
    return unpack(kind, tail);
}

INLINE float sum_of(some_floats v) {
    float each[LANES];
    memcpy(each, &v, sizeof each);
    for (int half = LANES / 2; half > 0; half /= 2)
        for (int i = 0; i < half; i++) each[i] += each[i + half];
    return each[0];
}

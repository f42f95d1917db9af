/* Dot products of stored integers with int16 activations, 32 columns at a time. */
#pragma once
#include "weight.h"

#define UNIT 32

#ifdef X86_WIDE
/* 256 bits everywhere: wider vectors gain nothing, because reading is the bound. */
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
typedef float some_floats_any __attribute__((vector_size(LANES * 4), aligned(4), may_alias));
typedef int32_t some_ints_any __attribute__((vector_size(LANES * 4), aligned(4), may_alias));

INLINE long unit_bytes(const int64_t kind) { return kind == INT8 ? 32 : 16; }

#ifdef X86_WIDE
INLINE unit unpack(const int64_t kind, const void *p) {
    const __m128i first = _mm_loadu_si128(p);
    if (kind == INT8)
        return (unit){{_mm256_cvtepi8_epi16(first), _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)p + 1))}};
    if (kind == NVFP4) {
        const __m128i table = _mm_setr_epi8(E2M1_WHOLE), low = _mm_set1_epi8(15);
        const __m128i a = _mm_and_si128(first, low), b = _mm_and_si128(_mm_srli_epi16(first, 4), low);
        return (unit){
            {_mm256_cvtepi8_epi16(_mm_shuffle_epi8(table, a)), _mm256_cvtepi8_epi16(_mm_shuffle_epi8(table, b))}};
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
/* table[which] of nibbles. */
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
    return (unit){
        {vmovl_s8(vget_low_s8(a)), vmovl_s8(vget_high_s8(a)), vmovl_s8(vget_low_s8(b)), vmovl_s8(vget_high_s8(b))}};
}
INLINE some_ints multiply_add(some_ints sums, part w, const int16_t *x) {
    const part v = vld1q_s16(x);
    return (some_ints)vmlal_s16(vmlal_s16((int32x4_t)sums, vget_low_s16(w), vget_low_s16(v)), vget_high_s16(w),
                                vget_high_s16(v));
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

/* The unit at column c of a row of `bytes`; zeros after its end. */
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

/* nvfp4: a block of LANES units. The 16 columns under a scale meet their activations in one 32-bit lane, so that
 * many groups need one conversion to float and one sum. Activations of 16 bits are two digits of 8, x = 256 * high +
 * low. */
#define BLOCK_COLS (LANES * UNIT)
#define BLOCK_GROUPS (2 * LANES)
#define BLOCK_BYTES (LANES * UNIT / 2)
/* Digits: [halves][high, low][4][LANES][4]; a half are the first or the second groups of the units. */
#define HALF_DIGITS (32 * LANES)
#define BLOCK_DIGITS (2 * HALF_DIGITS)
/* Both digits of a word fit in 8 bits. */
#define MOST_OF_DIGITS 32639

#ifdef X86_WIDE
/* Products of bytes have one unsigned factor: e2m1 numbers are kept as integers, doubled and plus 12. */
#define E2M1_ZERO 12
#define LANE_OF(unit) ((unit) % 2 * 4 + (unit) / 2)
typedef __m256i four_columns; /* of each group of a half */
#elif defined(__ARM_NEON)
#define E2M1_ZERO 0
#define LANE_OF(unit) (unit)
typedef int8x16_t four_columns;
#else
#define E2M1_ZERO 0
#define LANE_OF(unit) (unit)
typedef int8_t four_columns __attribute__((vector_size(LANES * 4)));
#endif
typedef struct { four_columns halves[2][4]; } block;

#ifdef X86_WIDE
INLINE block unpack_block(const char *p) {
    const __m256i table =
        _mm256_broadcastsi128_si256(_mm_add_epi8(_mm_setr_epi8(E2M1_WHOLE), _mm_set1_epi8(E2M1_ZERO)));
    const __m256i low = _mm256_set1_epi8(15);
    __m256i units[4], pairs[4], columns[4];
    UNROLL for (int i = 0; i < 4; i++) units[i] = _mm256_loadu_si256((const void *)(p + 32 * i));
    UNROLL for (int i = 0; i < 2; i++) {
        pairs[i] = _mm256_unpacklo_epi32(units[2 * i], units[2 * i + 1]);
        pairs[i + 2] = _mm256_unpackhi_epi32(units[2 * i], units[2 * i + 1]);
    }
    UNROLL for (int i = 0; i < 2; i++) {
        columns[2 * i] = _mm256_unpacklo_epi64(pairs[2 * i], pairs[2 * i + 1]);
        columns[2 * i + 1] = _mm256_unpackhi_epi64(pairs[2 * i], pairs[2 * i + 1]);
    }
    block b;
    UNROLL for (int i = 0; i < 4; i++) {
        b.halves[0][i] = _mm256_shuffle_epi8(table, _mm256_and_si256(columns[i], low));
        b.halves[1][i] = _mm256_shuffle_epi8(table, _mm256_and_si256(_mm256_srli_epi16(columns[i], 4), low));
    }
    return b;
}
/* Sums of 16 columns times one digit, first in int16 pairs: 4 * 2 * 24 * 128 fits in 15 bits. */
INLINE __m256i digit_sums(const four_columns *w, const int8_t *x) {
#if defined(__AVX512VNNI__) && defined(__AVX512VL__)
    __m256i sums = _mm256_setzero_si256();
    UNROLL for (int i = 0; i < 4; i++)
        sums = _mm256_dpbusd_epi32(sums, w[i], _mm256_loadu_si256((const void *)(x + 32 * i)));
#elif defined(__AVXVNNI__)
    __m256i sums = _mm256_setzero_si256();
    UNROLL for (int i = 0; i < 4; i++)
        sums = _mm256_dpbusd_avx_epi32(sums, w[i], _mm256_loadu_si256((const void *)(x + 32 * i)));
#else
    __m256i sums = _mm256_maddubs_epi16(w[0], _mm256_loadu_si256((const void *)x));
    UNROLL for (int i = 1; i < 4; i++)
        sums = _mm256_add_epi16(sums, _mm256_maddubs_epi16(w[i], _mm256_loadu_si256((const void *)(x + 32 * i))));
#endif
    return sums;
}
INLINE some_ints half_sums(const four_columns *w, const int8_t *x) {
    const __m256i high = digit_sums(w, x), low = digit_sums(w, x + HALF_DIGITS / 2);
#if defined(__AVXVNNI__) || (defined(__AVX512VNNI__) && defined(__AVX512VL__))
    return (some_ints)_mm256_add_epi32(_mm256_slli_epi32(high, 8), low);
#else
    return (some_ints)_mm256_add_epi32(_mm256_madd_epi16(high, _mm256_set1_epi16(256)), _mm256_madd_epi16(low,
        _mm256_set1_epi16(1)));
#endif
}
/* The e4m3 scales of the halves of a block, without FP8_FACTOR. */
INLINE void block_scales(const uint8_t *p, some_floats *halves) {
    const __m128i both = _mm_loadu_si128((const void *)p), kept = _mm_set1_epi16((short)0xbf80);
    const __m128i first = _mm_setr_epi8(-1, 0, -1, 4, -1, 8, -1, 12, -1, 2, -1, 6, -1, 10, -1, 14);
    const __m128i second = _mm_or_si128(first, _mm_set1_epi16(256));
    halves[0] = (some_floats)_mm256_cvtph_ps(_mm_and_si128(_mm_srai_epi16(_mm_shuffle_epi8(both, first), 1), kept));
    halves[1] = (some_floats)_mm256_cvtph_ps(_mm_and_si128(_mm_srai_epi16(_mm_shuffle_epi8(both, second), 1), kept));
}
#elif defined(__ARM_NEON)
INLINE block unpack_block(const char *p) {
    static const int8_t whole[16] = {E2M1_WHOLE};
    const int8x16_t table = vld1q_s8(whole);
    const uint32x4x4_t units = vld4q_u32((const uint32_t *)p); /* column quads of four units, one lane per unit */
    block b;
    UNROLL for (int i = 0; i < 4; i++) {
        const uint8x16_t bytes = vreinterpretq_u8_u32(units.val[i]);
        b.halves[0][i] = whole_numbers(table, vreinterpretq_s8_u8(vandq_u8(bytes, vdupq_n_u8(15))));
        b.halves[1][i] = whole_numbers(table, vreinterpretq_s8_u8(vshrq_n_u8(bytes, 4)));
    }
    return b;
}
INLINE int32x4_t digit_sums(const four_columns *w, const int8_t *x) {
#ifdef __ARM_FEATURE_DOTPROD
    int32x4_t sums = vdupq_n_s32(0);
    UNROLL for (int i = 0; i < 4; i++) sums = vdotq_s32(sums, w[i], vld1q_s8(x + 16 * i));
    return sums;
#else
    int32x4_t first = vdupq_n_s32(0), second = vdupq_n_s32(0); /* two lanes each, in two parts */
    UNROLL for (int i = 0; i < 4; i++) {
        const int8x16_t v = vld1q_s8(x + 16 * i);
        first = vpadalq_s16(first, vmull_s8(vget_low_s8(w[i]), vget_low_s8(v)));
        second = vpadalq_s16(second, vmull_s8(vget_high_s8(w[i]), vget_high_s8(v)));
    }
    return vcombine_s32(vpadd_s32(vget_low_s32(first), vget_high_s32(first)), vpadd_s32(vget_low_s32(second),
        vget_high_s32(second)));
#endif
}
INLINE some_ints half_sums(const four_columns *w, const int8_t *x) {
    return (some_ints)vaddq_s32(vshlq_n_s32(digit_sums(w, x), 8), digit_sums(w, x + HALF_DIGITS / 2));
}
INLINE void block_scales(const uint8_t *p, some_floats *halves) {
    const int16x8_t both = vreinterpretq_s16_u8(vcombine_u8(vld1_u8(p), vdup_n_u8(0))),
        kept = vdupq_n_s16((short)0xbf80);
    const int16x4_t first = vget_low_s16(vandq_s16(vshrq_n_s16(vshlq_n_s16(both, 8), 1), kept));
    halves[0] = (some_floats)vcvt_f32_f16(vreinterpret_f16_s16(first));
    halves[1] = (some_floats)vcvt_f32_f16(vreinterpret_f16_s16(vget_low_s16(vandq_s16(vshrq_n_s16(both, 1), kept))));
}
#else
INLINE block unpack_block(const char *p) {
    static const int8_t whole[16] = {E2M1_WHOLE};
    block b;
    for (int i = 0; i < BLOCK_BYTES; i++) {
        const uint8_t byte = ((const uint8_t *)p)[i];
        const int quad = i % 16 / 4, at = i / 16 * 4 + i % 4;
        b.halves[0][quad][at] = whole[byte & 15];
        b.halves[1][quad][at] = whole[byte >> 4];
    }
    return b;
}
INLINE some_ints half_sums(const four_columns *w, const int8_t *x) {
    some_ints sums = {0};
    for (int i = 0; i < 4; i++)
        for (int j = 0; j < LANES * 4; j++)
            sums[j / 4] += w[i][j] * (256 * x[i * LANES * 4 + j] + x[HALF_DIGITS / 2 + i * LANES * 4 + j]);
    return sums;
}
INLINE void block_scales(const uint8_t *p, some_floats *halves) {
    for (int i = 0; i < BLOCK_GROUPS; i++) halves[i % 2][i / 2] = fp8_to_float(p[i]);
}
#endif

/* Vectors of VL floats in the compiler's vector extension. Intrinsics only where compilers translate badly. */
#pragma once
#include <stdint.h>
#include <string.h>

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__)
#define VL 16
#define X86_WIDE 1
#elif defined(__AVX2__) && defined(__F16C__) && defined(__FMA__)
#define VL 8
#define X86_WIDE 1
#else
#define VL 4
#endif

#ifdef X86_WIDE
#include <immintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif

#define INLINE static inline __attribute__((always_inline))
/* Sums in arrays stay in registers only if such loops are unrolled before the compiler looks at the arrays. */
#define UNROLL _Pragma("GCC unroll 8")

typedef float vf __attribute__((vector_size(VL * 4)));
typedef int32_t vi __attribute__((vector_size(VL * 4)));
typedef uint32_t vu __attribute__((vector_size(VL * 4)));
typedef float vf_any __attribute__((vector_size(VL * 4), aligned(4), may_alias));
typedef uint16_t vh_any __attribute__((vector_size(VL * 2), aligned(2), may_alias));
typedef int16_t vs_any __attribute__((vector_size(VL * 2), aligned(2), may_alias));

INLINE vf load(const float *p) { return *(const vf_any *)p; }
INLINE void store(float *p, vf v) { *(vf_any *)p = v; }
INLINE vf spread(float s) { return s - (vf){0}; }
INLINE vf as_float(vi bits) { vf v; memcpy(&v, &bits, sizeof v); return v; }
INLINE vi as_bits(vf v) { vi bits; memcpy(&bits, &v, sizeof bits); return bits; }
INLINE vf pick(vi mask, vf yes, vf no) { return as_float((mask & as_bits(yes)) | (~mask & as_bits(no))); }
INLINE vf larger(vf a, vf b) { return pick(a > b, a, b); }
INLINE vf magnitude(vf v) { return as_float(as_bits(v) & 0x7fffffff); }

/* Adds halves, so that every caller sums in the same order. */
INLINE float sum_lanes(vf v) {
    float part[VL];
    memcpy(part, &v, sizeof part);
    for (int half = VL / 2; half > 0; half /= 2)
        for (int i = 0; i < half; i++) part[i] += part[i + half];
    return part[0];
}

INLINE float largest_lane(vf v) {
    float most = v[0];
    for (int i = 1; i < VL; i++) most = v[i] > most ? v[i] : most;
    return most;
}

/* Nearest integer, ties to even, for |v| < 2^22: the addend pushes the fraction out of the mantissa. */
INLINE vi nearest(vf v) { return as_bits(v + 12582912.0f) - 0x4b400000; }

/* e^v with a relative error of 2e-7 for v in -87..88, clamped outside; NaN stays. v = n ln 2 + r with |r| <= ln 2 /
 * 2, e^r by its series. */
INLINE vf exponential(vf v) {
    v = pick(v < -87.0f, spread(-87.0f), v);
    v = pick(v > 88.0f, spread(88.0f), v);
    vi whole = nearest(v * 1.44269504f);
    vf n = __builtin_convertvector(whole, vf);
    vf r = v - n * 0.693359375f + n * 2.12194440e-4f;
    vf p = r * (1.0f / 5040) + (1.0f / 720);
    p = p * r + (1.0f / 120);
    p = p * r + (1.0f / 24);
    p = p * r + (1.0f / 6);
    p = p * r + 0.5f;
    p = p * r + 1.0f;
    p = p * r + 1.0f;
    return as_float(as_bits(p) + (whole << 23));
}

/* The sigmoid. */
INLINE vf squashed(vf v) { return 1.0f / (1.0f + exponential(-v)); }

INLINE vf load_f32(const void *p) { return load(p); }

#if VL == 16
INLINE vf load_bf16(const void *p) { return (vf)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256(p)), 16); }
#elif VL == 8
INLINE vf load_bf16(const void *p) { return (vf)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128(p)), 16); }
#else
INLINE vf load_bf16(const void *p) {
    vu wide = __builtin_convertvector(*(const vh_any *)p, vu) << 16;
    vf v;
    memcpy(&v, &wide, sizeof v);
    return v;
}
#endif

#if VL == 16
INLINE vf halves(__m256i h) { return (vf)_mm512_cvtph_ps(h); }
INLINE vf load_f16(const void *p) { return halves(_mm256_loadu_si256(p)); }
INLINE vf load_fp8(const void *p) {
    __m256i w = _mm256_cvtepi8_epi16(_mm_loadu_si128(p));
    return halves(_mm256_and_si256(_mm256_slli_epi16(w, 7), _mm256_set1_epi16((short)0xbf80)));
}
#elif VL == 8
INLINE vf halves(__m128i h) { return (vf)_mm256_cvtph_ps(h); }
INLINE vf load_f16(const void *p) { return halves(_mm_loadu_si128(p)); }
INLINE vf load_fp8(const void *p) {
    __m128i w = _mm_cvtepi8_epi16(_mm_loadl_epi64(p));
    return halves(_mm_and_si128(_mm_slli_epi16(w, 7), _mm_set1_epi16((short)0xbf80)));
}
#elif defined(__ARM_NEON)
INLINE vf load_f16(const void *p) { return (vf)vcvt_f32_f16(vld1_f16(p)); }
INLINE vf load_fp8(const void *p) {
    int32_t four;
    memcpy(&four, p, 4);
    int16x4_t w = vget_low_s16(vmovl_s8(vreinterpret_s8_s32(vdup_n_s32(four))));
    return (vf)vcvt_f32_f16(vreinterpret_f16_s16(vand_s16(vshl_n_s16(w, 7), vdup_n_s16((short)0xbf80))));
}
#else
/* A half without instructions for it: sign, exponent and mantissa moved into a float that is 2^112 too small. */
INLINE float one_half(uint16_t h) {
    uint32_t bits = (uint32_t)(h & 0x7fff) << 13;
    float v;
    memcpy(&v, &bits, sizeof v);
    v *= 0x1p112f;
    if ((h & 0x7c00) == 0x7c00) v = (h & 0x3ff) ? __builtin_nanf("") : __builtin_inff();
    return h & 0x8000 ? -v : v;
}
INLINE vf load_f16(const void *p) {
    vf v;
    for (int i = 0; i < VL; i++) v[i] = one_half(((const uint16_t *)p)[i]);
    return v;
}
INLINE vf load_fp8(const void *p) {
    vf v;
    for (int i = 0; i < VL; i++) v[i] = one_half((uint16_t)((((const int8_t *)p)[i] << 7) & 0xbf80));
    return v;
}
#endif

/* e4m3 read as a half with the same bits is 2^8 too small. Exact, subnormals included. */
#define FP8_FACTOR 256.0f

INLINE float half_to_float(uint16_t h) {
#if defined(X86_WIDE)
    return _mm_cvtss_f32(_mm_cvtph_ps(_mm_cvtsi32_si128(h)));
#elif defined(__ARM_NEON)
    __fp16 half;
    memcpy(&half, &h, sizeof half);
    return half;
#else
    return one_half(h);
#endif
}

/* An e4m3 as load_fp8 reads it: without FP8_FACTOR. */
INLINE float fp8_to_float(uint8_t byte) { return half_to_float((uint16_t)((((int8_t)byte) << 7) & 0xbf80)); }

/* e2m1 numbers are kept as integers, doubled. */
#define E2M1_FACTOR 0.5f
#define E2M1_WHOLE 0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12

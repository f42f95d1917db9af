/* y[t][r] = sum_c w[r][c] * x[t][c]: stored weights against fp32 activations, sums in fp32.
 * One pass over the weights serves all t (1 to 8 rows of x). Compiled once a machine by kernels/cpu.py. */
#include <stdint.h>
#include <string.h>

#define LANES 16
typedef float vf __attribute__((vector_size(LANES * 4), aligned(4)));
typedef uint32_t vu __attribute__((vector_size(LANES * 4), aligned(4)));
typedef uint16_t vh __attribute__((vector_size(LANES * 2), aligned(2)));

static inline float sum_lanes(vf v) {
    float s = 0.0f;
    for (int i = 0; i < LANES; i++) s += v[i];
    return s;
}

static inline vf load_f32(const float *p) { return *(const vf *)p; }

static inline vf load_bf16(const uint16_t *p) {
    vu wide = __builtin_convertvector(*(const vh *)p, vu) << 16;
    vf out;
    memcpy(&out, &wide, sizeof out);
    return out;
}

static inline float one_f32(float w) { return w; }

static inline float one_bf16(uint16_t w) {
    uint32_t wide = (uint32_t)w << 16;
    float out;
    memcpy(&out, &wide, sizeof out);
    return out;
}

/* Two chains a row hide the latency of the multiply-add; one row a thread at a time keeps the reads sequential. */
#define DEFINE_GEMV(NAME, TYPE, LOAD, ONE)                                                                   \
    static inline void NAME##_row(const TYPE *w, const float *x, float *y, long cols, long t, long stride) { \
        for (long k = 0; k < t; k++) {                                                                       \
            const float *xk = x + k * cols;                                                                  \
            vf a = {0}, b = {0};                                                                             \
            long c = 0;                                                                                      \
            for (; c + 2 * LANES <= cols; c += 2 * LANES) {                                                  \
                a += LOAD(w + c) * load_f32(xk + c);                                                         \
                b += LOAD(w + c + LANES) * load_f32(xk + c + LANES);                                         \
            }                                                                                                \
            float s = sum_lanes(a + b);                                                                      \
            for (; c < cols; c++) s += ONE(w[c]) * xk[c];                                                    \
            y[k * stride] = s;                                                                               \
        }                                                                                                    \
    }                                                                                                        \
    void NAME(const TYPE *w, const float *x, float *y, long rows, long cols, long t, long threads) {         \
        _Pragma("omp parallel for schedule(static) num_threads(threads) if (rows * cols > 65536)")           \
        for (long r = 0; r < rows; r++) NAME##_row(w + r * cols, x, y + r, cols, t, rows);                   \
    }

DEFINE_GEMV(gemv_f32, float, load_f32, one_f32)
DEFINE_GEMV(gemv_bf16, uint16_t, load_bf16, one_bf16)

/* The compiler turns a vector of halves into floats one by one (a third of the speed), hence the conversion instructions by name. */
#if defined(__AVX512F__) || defined(__F16C__)
#include <immintrin.h>
typedef uint16_t half_t;
static inline vf load_f16(const half_t *p) {
    vf out;
#ifdef __AVX512F__
    __m512 wide = _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p));
    memcpy(&out, &wide, sizeof out);
#else
    __m256 low = _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p));
    __m256 high = _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(p + 8)));
    memcpy(&out, &low, sizeof low);
    memcpy((char *)&out + sizeof low, &high, sizeof high);
#endif
    return out;
}
static inline float one_f16(half_t w) { return _mm_cvtss_f32(_mm_cvtph_ps(_mm_cvtsi32_si128(w))); }
DEFINE_GEMV(gemv_f16, half_t, load_f16, one_f16)
#elif defined(__aarch64__)
typedef __fp16 vhf __attribute__((vector_size(LANES * 2), aligned(2)));
static inline vf load_f16(const __fp16 *p) { return __builtin_convertvector(*(const vhf *)p, vf); }
static inline float one_f16(__fp16 w) { return (float)w; }
DEFINE_GEMV(gemv_f16, __fp16, load_f16, one_f16)
#endif

/* Floating weights as int8 and int4, rounded to the nearest: the same bits as quant/quantize_weights.py, row by row. */
#include "weight.h"

#if defined(X86_WIDE)
INLINE uint16_t float_to_half(float v) { return _cvtss_sh(v, 0); }
#elif defined(__ARM_NEON)
INLINE uint16_t float_to_half(float v) {
    __fp16 h = (__fp16)v;
    uint16_t bits;
    memcpy(&bits, &h, sizeof bits);
    return bits;
}
#else
/* Nearest, ties to even: the addend rounds the mantissa at its 10th bit, or below 2^-14 at 2^-24. */
INLINE uint16_t float_to_half(float v) {
    uint32_t bits, magnitude;
    memcpy(&bits, &v, sizeof bits);
    magnitude = bits & 0x7fffffff;
    uint16_t sign = bits >> 16 & 0x8000;
    if (magnitude > 0x7f800000) return sign | 0x7e00;
    if (magnitude >= 0x477ff000) return sign | 0x7c00;
    if (magnitude < 0x38800000) {
        float small;
        memcpy(&small, &magnitude, sizeof small);
        small += 0.5f;
        memcpy(&bits, &small, sizeof bits);
        return sign | (bits - 0x3f000000);
    }
    return sign | ((magnitude + 0xfff + (magnitude >> 13 & 1) - 0x38000000) >> 13);
}
#endif

INLINE vf smaller(vf a, vf b) { return pick(a < b, a, b); }

INLINE float lowest_lane(vf v) {
    float least = v[0];
    for (int i = 1; i < VL; i++) least = v[i] < least ? v[i] : least;
    return least;
}

struct extremes { float high, low, wrong; };

/* Widen count numbers of a floating kind into `to`. Returns their extremes, and 0, or NaN if one of them is not
 * finite. */
INLINE struct extremes widen_group(int64_t kind, const char *from, long count, float *to) {
    const long each = bytes_each(kind);
    vf high = spread(-__builtin_inff()), low = spread(__builtin_inff()), wrong = spread(0);
    long c = 0;
    for (; c + VL <= count; c += VL) {
        vf v = load_kind(kind, from + c * each);
        store(to + c, v);
        high = larger(high, v);
        low = smaller(low, v);
        wrong += v * 0.0f;
    }
    struct extremes found = {largest_lane(high), lowest_lane(low), sum_lanes(wrong)};
    if (c < count) {
        char tail[VL * 4] = {0};
        memcpy(tail, from + c * each, (count - c) * each);
        vf v = load_kind(kind, tail);
        for (int i = 0; c < count; c++, i++) {
            to[c] = v[i];
            found.high = v[i] > found.high ? v[i] : found.high;
            found.low = v[i] < found.low ? v[i] : found.low;
            found.wrong += v[i] * 0.0f;
        }
    }
    return found;
}

INLINE float inverse_of(float scale) {
    float inverse = 1.0f / scale;
    return __builtin_isfinite(inverse) ? inverse : 0.0f;
}

/* Stored before the sum that follows: a fused multiply-add would round once instead of twice. */
static void multiply(float *values, long count, float offset, float factor) {
    for (long c = 0; c < count; c++) values[c] = (values[c] - offset) * factor;
}

static void whole_bytes(const float *values, long count, int8_t *to) {
    for (long c = 0; c < count; c++) {
        union {
            float value;
            int32_t bits;
        } sum = {values[c] + 12582912.0f}; /* the lowest bits of the mantissa are the number */
        to[c] = (int8_t)sum.bits;
    }
}

static void nibbles(float *values, long count, float shift, uint8_t *to) {
    long c = 0;
    for (; c + VL <= count; c += VL)
        store(values + c, smaller(larger(load(values + c) + shift, spread(0.0f)), spread(15.0f)));
    for (; c < count; c++) {
        float v = values[c] + shift;
        v = v < 0.0f ? 0.0f : v;
        values[c] = v > 15.0f ? 15.0f : v;
    }
    for (c = 0; c < count; c++) to[c] = (uint8_t)(int32_t)values[c];
}

/* One group: its scale (and offset), and its numbers divided by the scale in `buffer`. Returns 0, or NaN if the
 * scale is not finite. */
INLINE float scale_group(const struct weight *w, int64_t kind, const char *from, long count, long at, float *buffer) {
    struct extremes found = widen_group(kind, from, count, buffer);
    float scale, offset = 0.0f;
    if (w->kind == INT8) {
        scale = (found.high > -found.low ? found.high : -found.low) / 127.0f;
        ((float *)w->scales)[at] = scale;
    } else {
        if (w->offsets) {
            uint16_t half = float_to_half(found.low);
            ((uint16_t *)w->offsets)[at] = half;
            offset = half_to_float(half);
            scale = (found.high - offset) / 15.0f;
        } else {
            scale = (found.high > -found.low ? found.high : found.low) / -8.0f;
        }
        uint16_t half = float_to_half(scale);
        ((uint16_t *)w->scales)[at] = half;
        scale = half_to_float(half);
    }
    multiply(buffer, count, offset, inverse_of(scale));
    return found.wrong + scale * 0.0f + offset * 0.0f;
}

static void store_numbers(const struct weight *w, long row, float *buffer, uint8_t *packed) {
    char *to = (char *)row_of(w, row);
    if (w->kind == INT8) {
        whole_bytes(buffer, w->cols, (int8_t *)to);
        return;
    }
    nibbles(buffer, w->cols, w->offsets ? 0.5f : 8.5f, packed);
    for (long c = w->cols; c < round_up(w->cols, 32); c++) packed[c] = 8;
    for (long block = 0; block < round_up(w->cols, 32); block += 32, to += 16)
        for (int j = 0; j < 16; j++) to[j] = (char)(packed[block + j] | packed[block + j + 16] << 4);
}

/* Fill all rows of the int8 or int4 weight `w` from `values` [rows][cols] of the floating kind `kind`. `buffer`: 5
 * bytes per column, columns rounded up to 32. Returns -1, or the first row with a number that is not finite or too
 * large for a scale. */
long pack_rows(const struct weight *w, int64_t kind, const void *values, float *buffer) {
    const long each = bytes_each(kind), groups = groups_of(w);
    uint8_t *packed = (uint8_t *)(buffer + round_up(w->cols, 32));
    for (long row = 0; row < w->rows; row++) {
        const char *from = (const char *)values + row * w->cols * each;
        float wrong = 0.0f;
        for (long group = 0; group < groups; group++) {
            long c = group * w->group, count = w->cols - c < w->group ? w->cols - c : w->group;
            wrong += scale_group(w, kind, from + c * each, count, row * groups + group, buffer + c);
        }
        if (wrong != 0.0f) return row;
        store_numbers(w, row, buffer, packed);
    }
    return -1;
}

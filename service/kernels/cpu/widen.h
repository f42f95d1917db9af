/* Stored numbers as fp32. */
#pragma once
#include "integer.h"

/* widen for nvfp4: whole units; `from` is a multiple of their columns. */
static inline void widen_units(const struct weight *w, long row, long from, long count, float *to) {
    const char *at = row_of(w, row);
    const long groups = groups_of(w);
    for (long c = 0; c < count; c += UNIT) {
        const unit u = unpack(NVFP4, at + (from + c) / 2);
        int16_t words[UNIT];
        float wide[UNIT];
        memcpy(words, &u, sizeof words);
        const long group = row * groups + (from + c) / w->group, both = from + c + w->group < w->cols;
        const float first = scale_at(w, NVFP4, group), second = both ? scale_at(w, NVFP4, group + 1) : 0.0f;
        for (int i = 0; i < UNIT / 2; i++) wide[i] = (float)words[i] * first;
        for (int i = UNIT / 2; i < UNIT; i++) wide[i] = (float)words[i] * second;
        memcpy(to + c, wide, (count - c < UNIT ? count - c : UNIT) * sizeof *wide);
    }
}

/* count floats of row `row` from column `from`, with the scale of each group. */
static inline void widen(const struct weight *w, long row, long from, long count, float *to) {
    if (w->kind == NVFP4) {
        widen_units(w, row, from, count, to);
        return;
    }
    const char *at = row_of(w, row);
    const long groups = groups_of(w), end = from + count;
    for (long c = from; c < end;) {
        long stop = w->scales ? (c / w->group + 1) * w->group : end;
        if (stop > end) stop = end;
        float scale = w->scales ? scale_at(w, w->kind, row * groups + c / w->group) : 1.0f;
        float offset = w->offsets ? offset_at(w, row * groups + c / w->group) : 0.0f;
        if (w->kind == INT4) {
            for (; c < stop; c++) {
                uint8_t byte = ((const uint8_t *)at)[c / 32 * 16 + c % 16];
                to[c - from] = (float)((c & 16 ? byte >> 4 : byte & 15) - w->zero) * scale + offset;
            }
        } else if (w->kind == INT8) {
            for (; c < stop; c++) to[c - from] = (float)((const int8_t *)at)[c] * scale;
        } else {
            const long each = bytes_each(w->kind);
            for (; c + VL <= stop; c += VL) store(to + c - from, load_kind(w->kind, at + c * each) * scale);
            if (c < stop) {
                char tail[VL * 4] = {0};
                memcpy(tail, at + c * each, (stop - c) * each);
                vf v = load_kind(w->kind, tail) * scale;
                for (int i = 0; c < stop; c++, i++) to[c - from] = v[i];
            }
        }
    }
}

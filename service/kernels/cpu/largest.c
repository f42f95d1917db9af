/* Selects the k largest of n scores with the same choice among equal ones as torch's topk on the CPU. That uses the
 * selection of the C++ library (a heap for few of many, Musser's introselect otherwise), whose choice depends on its
 * swaps. Tests compare it with torch. */
#include "calls.h"

/* Whether `a` comes first; a NaN comes before all numbers. */
static int before(struct scored a, struct scored b) {
    return (a.score != a.score && b.score == b.score) || a.score > b.score;
}

static void swap(struct scored *a, struct scored *b) {
    const struct scored kept = *a;
    *a = *b;
    *b = kept;
}

/* Put `one` into the heap (the last in order on top), whose index `hole` is empty. */
static void sift(struct scored *heap, long hole, long count, struct scored one) {
    const long top = hole;
    long child = hole;
    while (child < (count - 1) / 2) {
        child = 2 * (child + 1);
        if (before(heap[child], heap[child - 1])) child--;
        heap[hole] = heap[child];
        hole = child;
    }
    if (count % 2 == 0 && child == (count - 2) / 2) {
        heap[hole] = heap[2 * child + 1];
        hole = 2 * child + 1;
    }
    for (; hole > top && before(heap[(hole - 1) / 2], one); hole = (hole - 1) / 2) heap[hole] = heap[(hole - 1) / 2];
    heap[hole] = one;
}

/* Move the first k in order to the front. */
static void select_by_heap(struct scored *all, long k, long n) {
    for (long parent = (k - 2) / 2; k > 1 && parent >= 0; parent--) sift(all, parent, k, all[parent]);
    for (long i = k; i < n; i++)
        if (before(all[i], all[0])) {
            const struct scored one = all[i];
            all[i] = all[0];
            sift(all, 0, k, one);
        }
}

/* Swap the median of a, b and c with `to`. */
static void median_to(struct scored *to, struct scored *a, struct scored *b, struct scored *c) {
    if (before(*a, *b))
        swap(to, before(*b, *c) ? b : before(*a, *c) ? c : a);
    else
        swap(to, before(*a, *c) ? a : before(*b, *c) ? c : b);
}

/* Swap elements until those before the median and those after it are apart. Returns the start of the second part. */
static struct scored *part(struct scored *first, struct scored *last) {
    median_to(first, first + 1, first + (last - first) / 2, last - 1);
    const struct scored pivot = *first++;
    for (;;) {
        while (before(*first, pivot)) first++;
        last--;
        while (before(pivot, *last)) last--;
        if (first >= last) return first;
        swap(first++, last);
    }
}

static void sort_few(struct scored *first, struct scored *last) {
    for (struct scored *i = first + 1; i < last; i++) {
        const struct scored one = *i;
        struct scored *at = i;
        for (; at > first && before(one, at[-1]); at--) *at = at[-1];
        *at = one;
    }
}

void select_largest(struct scored *all, long k, long n) {
    if (k * 64 <= n) {
        select_by_heap(all, k, n);
        return;
    }
    struct scored *first = all, *last = all + n, *nth = all + k - 1;
    long depth = 0;
    for (long left = n; left > 1; left /= 2) depth += 2;
    for (; last - first > 3; depth--) {
        if (!depth) {
            select_by_heap(first, nth + 1 - first, last - first);
            swap(first, nth);
            return;
        }
        struct scored *cut = part(first, last);
        if (cut <= nth)
            first = cut;
        else
            last = cut;
    }
    sort_few(first, last);
}

/* Reads or announces rows scattered over files, with several threads. */
#include <fcntl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <unistd.h>

#define TAKEN 64 /* rows that a thread takes at once */
#define MOST 32

struct file_rows {
    const int32_t *files;   /* [count]: descriptors */
    const int64_t *offsets; /* [count] */
    char *buffer;             /* [count][width]; unused if rows are only announced */
    int64_t count, width, threads, announce;
    atomic_long next, failed;
};

static void one_row(struct file_rows *f, long row) {
    if (f->announce) {
#ifdef POSIX_FADV_WILLNEED
        posix_fadvise(f->files[row], f->offsets[row], f->width, POSIX_FADV_WILLNEED);
#endif
        return;
    }
    if (pread(f->files[row], f->buffer + row * f->width, (size_t)f->width, f->offsets[row]) == f->width) return;
    long first = atomic_load(&f->failed);
    while (row < first && !atomic_compare_exchange_weak(&f->failed, &first, row)) {}
}

static void *take_rows(void *given) {
    struct file_rows *f = given;
    for (long at; (at = atomic_fetch_add(&f->next, TAKEN)) < f->count;)
        for (long row = at; row < at + TAKEN && row < f->count; row++) one_row(f, row);
    return NULL;
}

/* Returns the first row that was not read completely, or count. OpenMP threads are not used: they would spin next to
 * a computation. */
long visit_file_rows(struct file_rows *f) {
    pthread_t others[MOST];
    long started = 0;
    atomic_store(&f->next, 0);
    atomic_store(&f->failed, f->count);
    while (started < f->threads - 1 && started < MOST && pthread_create(&others[started], NULL, take_rows, f) == 0)
        started++;
    take_rows(f);
    while (started) pthread_join(others[--started], NULL);
    return atomic_load(&f->failed);
}

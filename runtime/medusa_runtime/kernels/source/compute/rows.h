/* Work on rows that do not depend on each other, spread over the threads. */
#pragma once

#include <stdatomic.h>

#include "dtype.h"
#include "parallel.h"

enum { TICKET = 1 << 15 }; /* elements: some 10 µs of work, below which waking threads costs more than it brings */

struct run {
    void (*rows)(const void *job, long first, long stop);
    const void *job;
    long count, step;
    atomic_long next;
};

static void take_rows(void *argument, int thread)
{
    (void)thread;
    struct run *run = argument;
    for (long row; (row = atomic_fetch_add(&run->next, run->step)) < run->count;)
        run->rows(run->job, row, row + run->step < run->count ? row + run->step : run->count);
}

static void spread_rows(void (*rows)(const void *, long, long), const void *job, long count, long size, int threads)
{
    struct run run = {.rows = rows, .job = job, .count = count, .step = TICKET / size + 1};
    medusa_spread(take_rows, &run, count > run.step ? threads : 1);
}

/* The functions names[dtype] for rows of each dtype, from one that takes the dtype as a constant. */
#define DEFINE(name)                                                                                                           \
    static void name##_bf16(const void *job, long first, long stop) { name(job, first, stop, DTYPE_BF16); }                   \
    static void name##_fp16(const void *job, long first, long stop) { name(job, first, stop, DTYPE_FP16); }                   \
    static void name##_fp32(const void *job, long first, long stop) { name(job, first, stop, DTYPE_FP32); }                   \
    static void (*const name##s[3])(const void *, long, long) = {name##_bf16, name##_fp16, name##_fp32};

#define AT(p, i) ((p) + (i) * size_of(dtype))

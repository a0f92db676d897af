/* Work on the threads of the OpenMP runtime that torch has already loaded: its GOMP_parallel is handed in, so there is no second
 * pool of threads and nothing to link. */
#pragma once

typedef void (*parallel_fn)(void (*)(void *), void *, unsigned threads, unsigned flags);

extern int medusa_instruction_set; /* 512: AVX-512F, else AVX2 */
extern parallel_fn medusa_parallel; /* may be null: everything on the caller's thread */

static inline void medusa_spread(void (*work)(void *), void *argument, long threads)
{
    if (threads > 1 && medusa_parallel)
        medusa_parallel(work, argument, (unsigned)threads, 0);
    else
        work(argument);
}

/* A pool of threads for work that is cut into tickets.
 *
 * Why not OpenMP's pool, which torch has: its regions end only when every thread of the team has arrived, even a thread that the
 * system did not let run and that finds nothing to do. During a cold start the prefetcher wants the same cores, and each product
 * would wait for the scheduler. Here no call waits for a thread that has not begun: a late thread finds the gate closed. */
#pragma once

typedef void (*work_fn)(void *argument, int thread);

extern int medusa_instruction_set; /* bits of a vector: 512 (AVX-512F), 256 (AVX2), 128 (NEON) */
extern int medusa_has_bf16_dots;   /* whether the CPU also has AVX-512's or NEON's dot products of bf16 */
extern int medusa_has_byte_dots;   /* whether it has NEON's dot products of bytes */

/* Run `work` on the calling thread (as thread 0) and on up to `threads` - 1 others, each at most once at a time. `work` takes
 * tickets until there are none. Returns when all threads that began have ended. */
void medusa_spread(work_fn work, void *argument, int threads);

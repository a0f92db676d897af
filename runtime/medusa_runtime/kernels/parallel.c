#include "parallel.h"

int medusa_instruction_set;
parallel_fn medusa_parallel;

/* Once, before the first call: what this CPU has (512 for AVX-512F, else AVX2), and how to run on threads. */
void medusa_configure(int instruction_set, parallel_fn run_on_threads)
{
    medusa_instruction_set = instruction_set;
    medusa_parallel = run_on_threads;
}

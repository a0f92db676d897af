/* linear: x @ weight^T + bias for 16-bit weights with fp32 accumulation, on CPUs without fast 16-bit products of their own. */
#include "linear.h"

#include <stdlib.h>

#include "parallel.h"

#define ROW_BLOCK 256L             /* rows of x that are widened at a time: bounds the scratch memory */
#define SERIAL_WORK (1L << 18)     /* multiply-adds below which waking threads costs more than it brings */
#define SERIAL_WIDEN (1L << 16)    /* the same for widening x, in elements */


struct run {
    struct linear_job job;
    const struct linear_variant *variant;
};

static void widen_tiles(void *argument, int thread)
{
    (void)thread;
    struct run *run = argument;
    const long count = run->variant->tiles(run->job.rows);
    for (long tile; (tile = atomic_fetch_add(&run->job.next_task, 1)) < count;)
        run->variant->widen(&run->job, tile);
}

static void multiply_blocks(void *argument, int thread)
{
    struct run *run = argument;
    struct linear_job *job = &run->job;
    float *sums = job->sums + thread * job->rows * job->block_cols;
    for (long col; (col = atomic_fetch_add(&job->next_task, 1) * job->block_cols) < job->cols;)
        run->variant->block(job, sums, col, job->cols - col < job->block_cols ? job->cols - col : job->block_cols);
}

static void spread(work_fn work, struct run *run, int threads)
{
    run->job.next_task = 0;
    medusa_spread(work, run, threads);
}

static long at_most(long value, long limit) { return value < limit ? value : limit; }

/* Scratch memory is kept between calls, as fresh pages would cost a fault each; a second caller at a time gets its own. */
static atomic_flag scratch_taken = ATOMIC_FLAG_INIT;
static float *scratch;
static size_t scratch_bytes;

static float *take_scratch(size_t bytes, int *shared)
{
    *shared = !atomic_flag_test_and_set(&scratch_taken);
    if (!*shared)
        return aligned_alloc(64, bytes);
    if (scratch_bytes < bytes) {
        free(scratch);
        scratch = aligned_alloc(64, bytes);
        scratch_bytes = scratch ? bytes : 0;
    }
    return scratch;
}

static void give_scratch(float *memory, int shared)
{
    if (shared)
        atomic_flag_clear(&scratch_taken);
    else
        free(memory);
}

/* 0 on success, 1 when there is no memory for the scratch space. */
int medusa_linear(uint16_t *out, const uint16_t *x, const uint16_t *weight, const uint16_t *bias, long rows, long cols,
                  long depth, long x_stride, long weight_stride, int dtype, int threads)
{
    const struct linear_variant *variant = &(medusa_instruction_set == 512 ? linear_avx512 : linear_avx2)[dtype];
    const long padded = (depth + variant->step - 1) / variant->step * variant->step;
    const int wanted = rows * cols * depth > SERIAL_WORK ? threads : 1;
    long block = at_most(96, cols / (wanted * 4) + 1); /* several tasks a thread: a neighbour may hold one up */
    block = (block + variant->tile_cols - 1) / variant->tile_cols * variant->tile_cols;
    const long block_rows = at_most(rows, ROW_BLOCK);
    const size_t floats = (size_t)(block_rows * padded + wanted * block_rows * block);
    int shared;
    float *memory = take_scratch((floats * sizeof(float) + 63) / 64 * 64, &shared);
    if (!memory) {
        give_scratch(memory, shared);
        return 1;
    }
    for (long row = 0; row < rows; row += ROW_BLOCK) {
        const long count = at_most(rows - row, ROW_BLOCK);
        struct run run = {.variant = variant,
                          .job = {.x = x + row * x_stride, .weight = weight, .bias = bias, .out = out + row * cols,
                                  .x_stride = x_stride, .weight_stride = weight_stride, .out_stride = cols, .rows = count,
                                  .cols = cols, .depth = depth, .padded_depth = padded, .block_cols = block,
                                  .wide = memory, .sums = memory + block_rows * padded}};
        spread(widen_tiles, &run, count * depth > SERIAL_WIDEN ? wanted : 1);
        spread(multiply_blocks, &run, wanted);
    }
    give_scratch(memory, shared);
    return 0;
}

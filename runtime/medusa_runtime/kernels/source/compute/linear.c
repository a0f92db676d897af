/* Linear layers: x @ weight^T + bias, accumulated in fp32. */
#include "linear.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>

#include "at_most.h"
#include "dtype.h"
#include "parallel.h"

#define MOST_RANGES 64
#define FEW_ROWS 32L               /* up to these, it does not pay to pack weights, or to decode those that dot products of bytes take */
#define SERIAL_WORK (1L << 18)     /* multiply-adds below which waking threads costs more than it brings */
#define SERIAL_PACK (1L << 16)     /* the same for packing x, in elements */

struct run {
    const struct linear_variant *variant;
    const struct linear_part *parts;
    long item; /* bytes of an element */
    struct linear_job job; /* of the first part */
    float *sums;           /* of each thread, thread_floats apart: see linear.h */
    long thread_floats;
    atomic_long next_tile; /* of x, to be packed */
    long blocks;
    int ranges;                    /* of blocks: one for each thread */
    atomic_long next[MOST_RANGES]; /* block of each range */
};

static void pack_tiles(void *argument, int thread)
{
    (void)thread;
    struct run *run = argument;
    const long count = run->variant->tiles(run->job.rows);
    for (long tile; (tile = atomic_fetch_add(&run->next_tile, 1)) < count;)
        run->variant->pack(&run->job, tile);
}

static long blocks_of(const struct linear_part *part, long block_cols) { return (part->cols + block_cols - 1) / block_cols; }

static void multiply_block(const struct run *run, long block, float *sums)
{
    struct linear_job job = run->job;
    const struct linear_part *part = run->parts;
    for (; block >= blocks_of(part, job.block_cols); part++) {
        block -= blocks_of(part, job.block_cols);
        job.out = (char *)job.out + part->cols * run->item;
    }
    job.weight = part->weight;
    job.codes = part->codes;
    job.bias = part->bias;
    job.cols = part->cols;
    job.weight_stride = part->weight_stride;
    const long col = block * job.block_cols;
    run->variant->block(&job, sums, col, at_most(job.cols - col, job.block_cols));
}

/* A thread has blocks one after the other, so that what it prefetches is its own next. One that has no more takes those of
 * others, who may be held up. */
static void multiply_blocks(void *argument, int thread)
{
    struct run *run = argument;
    float *sums = run->sums + thread * run->thread_floats;
    for (int i = 0; i < run->ranges; i++) {
        const int range = (thread + i) % run->ranges;
        const long end = run->blocks * (range + 1) / run->ranges;
        for (long block; atomic_load(&run->next[range]) < end && (block = atomic_fetch_add(&run->next[range], 1)) < end;)
            multiply_block(run, block, sums);
    }
}

/* Scratch memory is kept between calls, because fresh pages would cost a fault each. A concurrent call gets memory of its own. */
static atomic_flag scratch_taken = ATOMIC_FLAG_INIT;
static float *scratch;
static size_t scratch_bytes;

/* Give a forked process scratch memory of its own. */
static void forget_scratch(void)
{
    if (atomic_flag_test_and_set(&scratch_taken)) { /* a thread of the parent used it, or was about to free it */
        scratch = NULL;
        scratch_bytes = 0;
    }
    atomic_flag_clear(&scratch_taken);
}

static float *take_scratch(size_t bytes, int *is_kept)
{
    *is_kept = !atomic_flag_test_and_set(&scratch_taken);
    if (!*is_kept)
        return aligned_alloc(64, bytes);
    static int is_registered; /* read and written by who has the memory */
    if (!is_registered)
        is_registered = !pthread_atfork(NULL, NULL, forget_scratch);
    if (scratch_bytes < bytes) {
        free(scratch);
        scratch = aligned_alloc(64, bytes);
        scratch_bytes = scratch ? bytes : 0;
    }
    return scratch;
}

static void give_scratch(float *memory, int is_kept)
{
    if (is_kept)
        atomic_flag_clear(&scratch_taken);
    else
        free(memory);
}

/* Whether activations are rounded to 8 bits: as ggml's blocks ask for, unless x has 32 bits for the sake of precision. Dot products
 * of bf16 are faster where decoded weights are used for many rows. */
static int rounds(const struct codes *codes, long rows, int dtype)
{
    return codes && IS_BLOCKS(codes->packing) && dtype != DTYPE_FP32 &&
           (rows <= FEW_ROWS || !medusa_has_bf16_dots || dtype != DTYPE_BF16);
}

static const struct linear_variant *variant_for(const struct codes *codes, long rows, int dtype)
{
    const int has_dots = medusa_has_bf16_dots && dtype == DTYPE_BF16, rounded = rounds(codes, rows, dtype);
#ifdef __aarch64__
    if (rounded)
        return medusa_has_byte_dots ? &integer_neon_dots[dtype] : &integer_neon[dtype];
    return has_dots ? &linear_neon_bf16 : &linear_neon[dtype];
#else
    if (rounded)
        return &integer_avx2[dtype];
    if (rows > FEW_ROWS && medusa_instruction_set == 256)
        return &panels_avx2[dtype];
    return has_dots ? &linear_avx512_bf16 : medusa_instruction_set == 512 ? &linear_avx512[dtype] : &linear_avx2[dtype];
#endif
}

/* Multiply x by weights that all take it packed in the same way. The arguments are those of medusa_products; all_cols are the
 * columns of out. */
static int products(char *out, const char *x, const struct linear_part *parts, long count, const char *residual, long rows,
                    long depth, long x_stride, long residual_stride, long all_cols, int dtype, int threads)
{
    const struct linear_variant *variant = variant_for(parts->codes, rows, dtype);
    const long padded = (depth + variant->step - 1) / variant->step * variant->step;
    const long item = size_of(dtype);
    long cols = 0;
    for (long i = 0; i < count; i++)
        cols += parts[i].cols;
    const int wanted = rows * cols * depth > SERIAL_WORK ? threads : 1;
    const int has_codes = parts->codes != NULL;
    long block = at_most(variant->tasks[has_codes].most_cols, cols / (wanted * 4) + 1); /* several tasks per thread, as some threads are held up */
    block = (block + variant->tile_cols - 1) / variant->tile_cols * variant->tile_cols;
    long blocks = 0;
    for (long i = 0; i < count; i++)
        blocks += blocks_of(parts + i, block);
    const long row_blocks = (rows + ROW_BLOCK - 1) / ROW_BLOCK, block_rows = (rows + row_blocks - 1) / row_blocks;
    const long thread_floats = whole_lines(block_rows * block) + variant->tasks[has_codes].room;
    const size_t floats = (size_t)(whole_lines(block_rows * padded) + wanted * thread_floats);
    int is_kept;
    float *memory = take_scratch((floats * sizeof(float) + 63) / 64 * 64, &is_kept);
    if (!memory) {
        give_scratch(memory, is_kept);
        return 1;
    }
    for (long number = 0; number < row_blocks; number++) {
        const long row = rows * number / row_blocks, height = rows * (number + 1) / row_blocks - row;
        struct run run = {.variant = variant, .parts = parts, .item = item, .blocks = blocks,
                          .ranges = (int)at_most(wanted, MOST_RANGES),
                          .sums = memory + whole_lines(block_rows * padded), .thread_floats = thread_floats,
                          .job = {.x = x + row * x_stride * item,
                                  .residual = residual ? residual + row * residual_stride * item : NULL,
                                  .out = out + row * all_cols * item, .x_stride = x_stride, .residual_stride = residual_stride,
                                  .out_stride = all_cols, .rows = height, .depth = depth, .padded_depth = padded,
                                  .block_cols = block, .packed = memory, .codes = parts->codes}};
        for (int range = 0; range < run.ranges; range++)
            run.next[range] = blocks * range / run.ranges;
        medusa_spread(pack_tiles, &run, height * depth > SERIAL_PACK ? wanted : 1);
        medusa_spread(multiply_blocks, &run, wanted);
    }
    give_scratch(memory, is_kept);
    return 0;
}

/* Whether one packed x is for both weights. */
static int takes_the_same(const struct codes *codes, const struct codes *others, long rows, int dtype)
{
    return variant_for(codes, rows, dtype) == variant_for(others, rows, dtype) &&
           (!rounds(codes, rows, dtype) || HAS_MANY(codes->packing) == HAS_MANY(others->packing));
}

/* Multiply x by each part's weight, with the results side by side in out [rows, cols of all parts]. A residual is possible only
 * with a single part. Returns 0 on success, 1 when there is no memory for the scratch space. */
int medusa_products(char *out, const char *x, const struct linear_part *parts, long count, const char *residual, long rows,
                    long depth, long x_stride, long residual_stride, int dtype, int threads)
{
    long all_cols = 0;
    for (long i = 0; i < count; i++)
        all_cols += parts[i].cols;
    for (long begin = 0, end = 0; begin < count; begin = end) {
        long cols = 0;
        for (; end < count && takes_the_same(parts[begin].codes, parts[end].codes, rows, dtype); end++)
            cols += parts[end].cols;
        if (products(out, x, parts + begin, end - begin, residual, rows, depth, x_stride, residual_stride, all_cols, dtype, threads))
            return 1;
        out += cols * size_of(dtype);
    }
    return 0;
}

/* The product for one instruction set, for bf16 and fp16. Compiled once with AVX2 and once with AVX-512F.
 *
 * Dot-product form: weights are read as they lie in memory (rows of depth), 16 bits wide, and widened in registers; nothing
 * is repacked, so read-only shared memory serves. A register tile of R weight rows times C rows of x keeps R*C vector
 * accumulators, so each widened weight vector is used C times and each x vector R times. */
#include <string.h>

#include "linear.h"
#include "simd.h"

#if LANES == 16
#define VARIANT linear_avx512
#define MAX_ROWS 6
#define TILE_COLS 4
#else
#define VARIANT linear_avx2
#define MAX_ROWS 4
#define TILE_COLS 3
#endif

#define DEPTH_BLOCK 1024L /* a tile of x (16 KB as fp32) stays in the first-level cache, a block of weights in the second */

INLINE void step(vf acc[MAX_ROWS][TILE_COLS], const float *x, const uint16_t *w, long stride, const int dtype, const int rows,
                 const int cols)
{
    vf wide[TILE_COLS];
#pragma GCC unroll 8
    for (int c = 0; c < cols; c++)
        wide[c] = first(w + c * stride, dtype);
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++) {
        const vf value = LOAD(x + r * STEP);
#pragma GCC unroll 8
        for (int c = 0; c < cols; c++)
            acc[r][c] = FMA(wide[c], value, acc[r][c]);
    }
    __asm__ volatile("" ::: "memory"); /* load the weights again rather than keep both halves and spill accumulators */
#pragma GCC unroll 8
    for (int c = 0; c < cols; c++)
        wide[c] = second(w + c * stride, dtype);
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++) {
        const vf value = LOAD(x + r * STEP + LANES);
#pragma GCC unroll 8
        for (int c = 0; c < cols; c++)
            acc[r][c] = FMA(wide[c], value, acc[r][c]);
    }
}

/* sums[rows][cols] += x tile @ weight rows^T over `depth` elements. `fetch`: these weights come from memory, so the next rows are
 * asked for meanwhile (the hardware does not know where they begin). */
INLINE void tile(const float *x, const uint16_t *w, long stride, long depth, float *sums, long sums_stride, const int dtype,
                 const int fetch, const int rows, const int cols)
{
    vf acc[MAX_ROWS][TILE_COLS];
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 8
        for (int c = 0; c < cols; c++)
            acc[r][c] = ZERO();
    long k = 0;
    for (; k + STEP <= depth; k += STEP) {
#pragma GCC unroll 8
        for (int c = 0; fetch && c < cols; c++)
            _mm_prefetch((const char *)(w + (c + cols) * stride + k), _MM_HINT_T0);
        step(acc, x + k * rows, w + k, stride, dtype, rows, cols);
    }
    if (k < depth) { /* never read behind a row: its end may be the end of the mapping */
        uint16_t tail[TILE_COLS][STEP] = {{0}};
        for (int c = 0; c < cols; c++)
            memcpy(tail[c], w + c * stride + k, (size_t)(depth - k) * sizeof(uint16_t));
        step(acc, x + k * rows, tail[0], STEP, dtype, rows, cols);
    }
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 8
        for (int c = 0; c < cols; c++)
            sums[r * sums_stride + c] += SUM(acc[r][c]);
}

#define CASE(rows)                                                                                                             \
    case rows:                                                                                                                 \
        if (cols == TILE_COLS)                                                                                                 \
            tile(x, w, stride, depth, sums, sums_stride, dtype, fetch, rows, TILE_COLS);                                       \
        else                                                                                                                   \
            for (long c = 0; c < cols; c++)                                                                                    \
                tile(x, w + c * stride, stride, depth, sums + c, sums_stride, dtype, fetch, rows, 1);                          \
        break;

INLINE void any_tile(const float *x, const uint16_t *w, long stride, long depth, float *sums, long sums_stride,
                     const int dtype, const int fetch, long rows, long cols)
{
    switch (rows) {
        CASE(1)
        CASE(2)
        CASE(3)
        CASE(4)
#if MAX_ROWS > 4
        CASE(5)
        CASE(6)
#endif
    }
}

static long tiles(long rows) { return (rows + MAX_ROWS - 1) / MAX_ROWS; }

/* The first row of a tile: rows are spread evenly, so that nine are 3+3+3 and not 4+4+1. */
static inline long tile_start(long rows, long number) { return rows * number / tiles(rows); }

INLINE void widen(const struct linear_job *job, long number, const int dtype)
{
    const long start = tile_start(job->rows, number), rows = tile_start(job->rows, number + 1) - start;
    float *wide = job->wide + start * job->padded_depth;
    for (long r = 0; r < rows; r++) {
        const uint16_t *x = job->x + (start + r) * job->x_stride;
        for (long k = 0; k < job->depth; k += STEP) {
            uint16_t tail[STEP] = {0};
            const uint16_t *from = x + k;
            if (job->depth - k < STEP)
                from = memcpy(tail, from, (size_t)(job->depth - k) * sizeof(uint16_t));
            STORE(wide + k * rows + r * STEP, first(from, dtype));
            STORE(wide + k * rows + r * STEP + LANES, second(from, dtype));
        }
    }
}

/* All rows of x times the weight rows [col, col + cols). */
INLINE void block(const struct linear_job *job, float *sums, long col, long cols, const int dtype)
{
    const long count = tiles(job->rows), stride = job->weight_stride, sums_stride = job->block_cols;
    memset(sums, 0, (size_t)(job->rows * sums_stride) * sizeof(float));
    const long depth_block = count == 1 ? 2 * DEPTH_BLOCK : DEPTH_BLOCK;
    for (long k = 0; k < job->depth; k += depth_block) {
        const long depth = job->depth - k < depth_block ? job->depth - k : depth_block;
        for (long number = 0; number < count; number++) {
            const long start = tile_start(job->rows, number), rows = tile_start(job->rows, number + 1) - start;
            const float *x = job->wide + start * job->padded_depth + k * rows;
            for (long c = 0; c < cols; c += TILE_COLS) {
                const uint16_t *w = job->weight + (col + c) * stride + k;
                float *to = sums + start * sums_stride + c;
                const long width = cols - c < TILE_COLS ? cols - c : TILE_COLS;
                if (number == 0)
                    any_tile(x, w, stride, depth, to, sums_stride, dtype, 1, rows, width);
                else
                    any_tile(x, w, stride, depth, to, sums_stride, dtype, 0, rows, width);
            }
        }
    }
    for (long r = 0; r < job->rows; r++)
        for (long c = 0; c < cols; c++) {
            const float bias = job->bias ? widened(job->bias[col + c], dtype) : 0.0f;
            uint16_t value = narrow(sums[r * sums_stride + c] + bias, dtype);
            if (job->residual)
                value = narrow(widened(job->residual[r * job->residual_stride + col + c], dtype) + widened(value, dtype), dtype);
            job->out[r * job->out_stride + col + c] = value;
        }
}

#define DEFINE(name, dtype)                                                                                                    \
    static void widen_##name(const struct linear_job *job, long number) { widen(job, number, dtype); }                        \
    static void block_##name(const struct linear_job *job, float *sums, long col, long cols)                                  \
    {                                                                                                                          \
        block(job, sums, col, cols, dtype);                                                                                    \
    }
DEFINE(bf16, DTYPE_BF16)
DEFINE(fp16, DTYPE_FP16)

const struct linear_variant VARIANT[2] = {
    {STEP, TILE_COLS, widen_bf16, tiles, block_bf16},
    {STEP, TILE_COLS, widen_fp16, tiles, block_fp16},
};

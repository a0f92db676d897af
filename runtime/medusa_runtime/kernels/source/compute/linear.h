/* Declarations that the dispatcher (linear.c) and the instruction-set variants (linear_tile.c) share. */
#pragma once

#include "codes.h"

/* One of the weights that x is multiplied with; strides in elements. */
struct linear_part {
    const void *weight, *bias; /* [cols, depth] and [cols]; bias may be null */
    long cols, weight_stride;
    const struct codes *codes; /* the weight, if it is quantized, else null; all parts of a product have some, or none has */
};

/* out[rows, cols] = x[rows, depth] @ weight[cols, depth]^T + bias[cols], then + residual[rows, cols]; strides in elements. */
struct linear_job {
    const void *x, *weight, *bias, *residual; /* bias and residual may be null */
    const struct codes *codes;                /* in place of weight; may be null */
    void *out;
    long x_stride, weight_stride, residual_stride, out_stride;
    long rows, cols, depth;
    long padded_depth; /* depth rounded up to a whole step */
    long block_cols;   /* weight rows that one task works on */
    void *packed;      /* x in tiles: [tile][step][row of the tile][step elements], in fp32 or its own dtype, or rounded */
};

int medusa_products(char *out, const char *x, const struct linear_part *parts, long count, const char *residual, long rows,
                    long depth, long x_stride, long residual_stride, int dtype, int threads);

#define ROW_BLOCK 256L      /* rows of x that are multiplied at a time: limits the scratch memory */
#define MOST_BLOCK_COLS 96L /* weight rows that one task works on: a multiple of every variant's tile_cols */
#define MOST_CODED_COLS 36L /* the same for quantized weights whose floats then stay in the second-level cache */

/* A number of floats, rounded up to lines of the cache. */
static inline long whole_lines(long floats) { return (floats + 15) / 16 * 16; }

/* How they are worked on where quantized weights are decoded to [most_cols][DECODED]. */
#define USUAL_TASKS {{MOST_BLOCK_COLS, 0}, {MOST_CODED_COLS, MOST_CODED_COLS * DECODED}}

struct linear_variant {
    long step;      /* elements of depth that one iteration consumes; the unit of padding */
    long tile_cols; /* weight rows per register tile */
    struct {
        long most_cols, room; /* the weight rows that one task works on, and the floats that it needs beside their sums */
    } tasks[2];               /* for floats, and for quantized weights */
    void (*pack)(const struct linear_job *, long tile);
    long (*tiles)(long rows);
    /* sums is the thread's own, [rows][block_cols]; the room begins in the next whole line */
    void (*block)(const struct linear_job *, float *sums, long col, long cols);
};

extern const struct linear_variant linear_avx2[3], linear_avx512[3], linear_neon[3]; /* indexed by dtype */
extern const struct linear_variant linear_avx512_bf16, linear_neon_bf16;             /* for bf16 */
extern const struct linear_variant panels_avx2[3];                                   /* for many rows; indexed by dtype */
/* For ggml's blocks and x in bf16 or fp16, which is rounded to 8 bits. */
extern const struct linear_variant integer_avx2[2], integer_neon[2], integer_neon_dots[2];

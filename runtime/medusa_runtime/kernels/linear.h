/* What the dispatcher (linear.c) and the instruction-set variants (linear_tile.c) share. */
#pragma once

#include <stdatomic.h>
#include <stdint.h>

/* out[rows, cols] = x[rows, depth] @ weight[cols, depth]^T + bias[cols]; strides in elements. */
struct linear_job {
    const uint16_t *x, *weight, *bias; /* bias may be null */
    uint16_t *out;
    long x_stride, weight_stride, out_stride;
    long rows, cols, depth;
    long padded_depth; /* depth rounded up to a whole step */
    long block_cols;   /* weight rows that one task works on */
    float *wide;       /* x as fp32, in tiles: [tile][step][row of the tile][step elements] */
    float *sums;       /* per thread: [rows][block_cols] */
    atomic_long next_task;
};

struct linear_variant {
    long step;        /* elements of depth a loop turn consumes; the unit of padding */
    long tile_cols;   /* weight rows per register tile */
    void (*widen)(struct linear_job *, long tile);
    long (*tiles)(long rows);
    void (*block)(struct linear_job *, float *sums, long col, long cols);
};

extern const struct linear_variant linear_avx2[2], linear_avx512[2]; /* indexed by dtype */

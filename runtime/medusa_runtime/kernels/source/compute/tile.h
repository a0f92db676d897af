/* The sizes of register tiles for the instruction set that this object is compiled for. */
#pragma once

#include "simd.h"

#ifdef __aarch64__
#ifdef DOT_BF16
#define VARIANT linear_neon_bf16
#else
#define VARIANT linear_neon
#endif
#define MAX_ROWS 5
#define TILE_COLS 4
#elif defined DOT_BF16
#define VARIANT linear_avx512_bf16
#define MAX_ROWS 8
#define TILE_COLS 3
#elif LANES == 16
#define VARIANT linear_avx512
#define MAX_ROWS 6
#define TILE_COLS 4
#else
#define VARIANT linear_avx2
#define MAX_ROWS 4
#define TILE_COLS 3
#define FEW_ROWS 8 /* up to this many rows are one tile, with fewer weight rows: it reads each weight once */
#endif
#ifndef FEW_ROWS
#define FEW_ROWS MAX_ROWS
#endif

#define DEPTH_BLOCK 1024L /* a tile of x (16 KB) stays in the first-level cache, a block of weights in the second */
#define FEW_BYTES 16384L  /* of x that are read again for each of a few weight rows */

/* Depth is summed in pieces of this many elements, whatever the number of rows: only at the end of a piece are the lanes of an
 * accumulator added to each other. So a row's product has the same bits in every batch. */
#define PIECE(dtype) (packed_size(dtype) == 4 ? 2 * DEPTH_BLOCK : DEPTH_BLOCK)

/* How many bytes ahead weights are prefetched, and into which cache: the first level (3) or the second (2). The first level
 * allows few outstanding misses, which would limit the bandwidth where the work between them is short. */
#ifdef DOT_BF16
#define AHEAD 8192L
#define NEAR 2
#else
#define AHEAD 0L
#define NEAR 3
#endif

/* Bytes of an element of x as the tiles read it. */
INLINE long packed_size(const int dtype)
{
#ifdef DOT_BF16
    if (dtype == DTYPE_BF16)
        return 2;
#endif
    (void)dtype;
    return 4;
}

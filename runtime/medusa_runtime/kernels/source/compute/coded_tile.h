/* Register tiles of quantized weights. */
#pragma once

#include "decode.h"
#include "tile.h"

/* The dtype that quantized weights are decoded to. */
#ifdef DOT_BF16
#define DECODED_DTYPE DTYPE_BF16
#else
#define DECODED_DTYPE DTYPE_FP32
#endif

/* The same as tile for a piece of depth, from `begin` on, of TILE_COLS quantized weight rows from `row` on. They are decoded in
 * registers. */
INLINE void coded_tile(const struct codes *codes, const char *x, long row, long begin, long depth, float *sums,
                       long sums_stride, const int packing, const int rows)
{
    vf acc[MAX_ROWS][TILE_COLS];
    struct numbers numbers[TILE_COLS];
    const long bits = BITS(packing), row_bytes = codes->columns * bits / 8, wide = codes->wide;
    const long ahead = (1 + AHEAD / (TILE_COLS * row_bytes)) * TILE_COLS * row_bytes;
    const long first = begin / wide, groups_here = (begin + depth - 1) / wide - first + 1;
    const uint8_t *values = row_of(codes, row) + begin * bits / 8;
#pragma GCC unroll 8
    for (int c = 0; c < TILE_COLS; c++) {
        const char *scales = (const char *)codes->scale + line_of(codes, row + c + 2 * TILE_COLS) * scale_bytes(codes);
        for (long at = 0; at < groups_here * scale_bytes(codes); at += LINE) /* those of the tile after the next */
            PREFETCH(scales + first * scale_bytes(codes) + at, 3);
        read_numbers(codes, line_of(codes, row + c), first, groups_here, numbers[c].scale, numbers[c].zero);
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++)
            acc[r][c] = ZERO();
    }
    long end = (first + 1) * wide - begin;
    for (long k = 0, number = 0; k < depth; number++, end += wide) {
        const long stop = at_most(end, depth);
        struct group groups[TILE_COLS];
#pragma GCC unroll 8
        for (int c = 0; c < TILE_COLS; c++)
            groups[c] = group_of(numbers[c].scale[number], numbers[c].zero[number], packing);
        for (; k < stop; k += STEP) {
            const char *here = x + k * rows * packed_size(DECODED_DTYPE);
            if (k * bits / 8 % LINE == 0)
#pragma GCC unroll 8
                for (int c = 0; c < TILE_COLS; c++) /* the weights of the next tiles: see tile */
                    PREFETCH(values + c * row_bytes + k * bits / 8 + ahead, NEAR);
#ifdef DOT_BF16
#pragma GCC unroll 8
            for (int c = 0; c < TILE_COLS; c++) {
                const vi weights = bf16_at(&groups[c], values + c * row_bytes, k, packing);
#pragma GCC unroll 8
                for (int r = 0; r < rows; r++)
                    acc[r][c] = DOT_BF16(acc[r][c], weights, LOAD_INT(here + r * STEP * 2));
            }
#else
#pragma GCC unroll 8
            for (int c = 0; c < TILE_COLS; c++)
#pragma GCC unroll 2
                for (int half = 0; half < STEP; half += LANES) {
                    const vf weights = floats_at(&groups[c], values + c * row_bytes, k + half, packing);
#pragma GCC unroll 8
                    for (int r = 0; r < rows; r++)
                        acc[r][c] = FMA(weights, LOAD((const float *)here + r * STEP + half), acc[r][c]);
                }
#endif
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 8
        for (int c = 0; c < TILE_COLS; c++)
            sums[r * sums_stride + c] += SUM(acc[r][c]);
}

/* The numbers of the groups of a piece of a row of blocks, and room for a vector. */
struct piece_numbers {
    float scale[DECODED / 16 + LANES], low[DECODED / 16 + LANES];
};

/* The same for rows of blocks, and x in fp32. integer_tile.c has products in other dtypes. */
INLINE void block_tile(const struct codes *codes, const char *x, long row, long begin, long depth, float *sums,
                       long sums_stride, const int packing, const int rows)
{
    vf acc[MAX_ROWS][TILE_COLS];
    struct piece_numbers numbers[TILE_COLS];
    int8_t unpacked[TILE_COLS][PART] __attribute__((aligned(PART)));
    const long values = block_values(packing), size = block_bytes(packing), wide = group_values(packing);
    const long row_bytes = codes->columns / values * size, part_bytes = size * PART / values;
    const long ahead = (1 + AHEAD / (TILE_COLS * row_bytes)) * TILE_COLS * row_bytes;
    const long fetched = part_bytes * 4 <= LINE ? 4 : part_bytes * 2 <= LINE ? 2 : 1; /* parts of about a line */
    const uint8_t *block = row_of(codes, row) + bytes_of(begin, packing);
    for (int c = 0; c < TILE_COLS; c++)
        for (long number = 0; number < depth / values; number++)
            block_numbers(block + c * row_bytes + number * size, numbers[c].scale + number * (values / wide),
                          numbers[c].low + number * (values / wide), packing);
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 8
        for (int c = 0; c < TILE_COLS; c++)
            acc[r][c] = ZERO();
    for (long k = 0, part = 0; k < depth; k += PART) {
        if (part % fetched == 0)
#pragma GCC unroll 8
            for (int c = 0; c < TILE_COLS; c++) /* the weights of the next tiles: see tile */
                PREFETCH(block + c * row_bytes + part * part_bytes + ahead, NEAR);
        const int8_t *integers[TILE_COLS];
#pragma GCC unroll 8
        for (int c = 0; c < TILE_COLS; c++) {
            integers[c] = packing == Q8_0 ? (const int8_t *)block + c * row_bytes + 2 : unpacked[c];
            if (packing != Q8_0)
                unpack_part(block + c * row_bytes, part, unpacked[c], packing);
        }
        __asm__ volatile("" : "+m"(unpacked)); /* widen from memory, which costs less than from a register */
        const long first = k / wide;
#pragma GCC unroll 8
        for (int i = 0; i < PART; i += STEP) {
            const char *here = x + (k + i) * rows * (long)sizeof(float);
#pragma GCC unroll 8
            for (int c = 0; c < TILE_COLS; c++) {
                vf weights[2];
#pragma GCC unroll 2
                for (int half = 0; half < 2; half++) {
                    const long at = i + half * LANES, group = first + at / wide;
                    const vf low = has_minimum(packing) ? SPLAT(numbers[c].low[group]) : ZERO();
                    weights[half] = part_floats(integers[c] + at, SPLAT(numbers[c].scale[group]), low, packing);
                }
#pragma GCC unroll 2
                for (int half = 0; half < 2; half++)
#pragma GCC unroll 8
                    for (int r = 0; r < rows; r++)
                        acc[r][c] = FMA(weights[half], LOAD((const float *)here + r * STEP + half * LANES), acc[r][c]);
            }
        }
        if (++part == values / PART) {
            part = 0;
            block += size;
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 8
        for (int c = 0; c < TILE_COLS; c++)
            sums[r * sums_stride + c] += SUM(acc[r][c]);
}

/* Functions of their own, so that each has all registers. */
typedef void (*coded_fn)(const struct codes *, const char *x, long row, long begin, long depth, float *sums, long sums_stride);

#define CODED(packing, rows)                                                                                                   \
    static __attribute__((noinline)) void coded_##packing##_##rows(const struct codes *codes, const char *x, long row,         \
                                                                   long begin, long depth, float *sums, long sums_stride)      \
    {                                                                                                                          \
        (IS_BLOCKS(packing) ? block_tile : coded_tile)(codes, x, row, begin, depth, sums, sums_stride, packing, rows);         \
    }
#define CODED_NAME(packing, rows) coded_##packing##_##rows,
/* Apply a macro to a packing with each number of rows that one tile may have. */
#if MAX_ROWS == 8
#define EACH(f, packing)                                                                                                       \
    f(packing, 1) f(packing, 2) f(packing, 3) f(packing, 4) f(packing, 5) f(packing, 6) f(packing, 7) f(packing, 8)
#elif MAX_ROWS == 6
#define EACH(f, packing) f(packing, 1) f(packing, 2) f(packing, 3) f(packing, 4) f(packing, 5) f(packing, 6)
#elif MAX_ROWS == 5
#define EACH(f, packing) f(packing, 1) f(packing, 2) f(packing, 3) f(packing, 4) f(packing, 5)
#else
#define EACH(f, packing) f(packing, 1) f(packing, 2) f(packing, 3) f(packing, 4)
#endif
EACH(CODED, SIGNED)
EACH(CODED, NIBBLES)
EACH(CODED, E4M3)
EACH(CODED, E2M1)
#ifdef DOT_BF16 /* only for many rows, whose weights are decoded into scratch memory: see linear.c */
#define EACH_CODED_BLOCK(f)
#else
#define EACH_CODED_BLOCK(f) EACH_BLOCK_FORMAT(f)
#endif
/* For three rows of x in fp32 and more, weights are decoded into scratch memory, which takes half as long again: functions for each
 * number of rows would take a quarter of the time in which all kernels are compiled. */
#define CODED_BLOCKS(packing) CODED(packing, 1) CODED(packing, 2)
#define CODED_BLOCKS_NAME(packing) [packing] = {CODED_NAME(packing, 1) CODED_NAME(packing, 2)},
EACH_CODED_BLOCK(CODED_BLOCKS)
static const coded_fn coded_tiles[MXFP4 + 1][MAX_ROWS] = {
    [SIGNED] = {EACH(CODED_NAME, SIGNED)},
    [NIBBLES] = {EACH(CODED_NAME, NIBBLES)},
    [E4M3] = {EACH(CODED_NAME, E4M3)},
    [E2M1] = {EACH(CODED_NAME, E2M1)},
    EACH_CODED_BLOCK(CODED_BLOCKS_NAME)
};

/* The product for one instruction set, for bf16, fp16 and fp32. This file is compiled with AVX2, with AVX-512F, and with
 * AVX-512's dot products of bf16; on aarch64 with NEON, and with its dot products of bf16.
 *
 * Weights are read as they lie in memory (rows of depth), and are never repacked, so they may be read-only shared memory. Weights
 * of 16 bits are widened in registers where the CPU cannot multiply them directly, and quantized ones are decoded (coded_tile.h,
 * decode.h). A register tile of R rows of x times C weight rows keeps R*C vector accumulators, so each weight vector is used R
 * times and each x vector C times. */
#include <string.h>

#include "at_most.h"
#include "coded_tile.h"
#include "linear.h"
#include "put.h"
#include "tile.h"

INLINE void step(vf acc[FEW_ROWS][TILE_COLS], const char *x, const char *w, long stride, const int dtype, const int rows,
                 const int cols)
{
#ifdef DOT_BF16
    if (dtype == DTYPE_BF16) {
        vi weights[TILE_COLS];
#pragma GCC unroll 8
        for (int c = 0; c < cols; c++)
            weights[c] = LOAD_INT(w + c * stride);
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++) {
            const vi value = LOAD_INT(x + r * STEP * 2);
#pragma GCC unroll 8
            for (int c = 0; c < cols; c++)
                acc[r][c] = DOT_BF16(acc[r][c], weights[c], value);
        }
        return;
    }
#endif
    const float *wide_x = (const float *)x;
    vf wide[TILE_COLS];
#pragma GCC unroll 8
    for (int c = 0; c < cols; c++)
        wide[c] = first(w + c * stride, dtype);
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++) {
        const vf value = LOAD(wide_x + r * STEP);
#pragma GCC unroll 8
        for (int c = 0; c < cols; c++)
            acc[r][c] = FMA(wide[c], value, acc[r][c]);
    }
    __asm__ volatile("" ::: "memory"); /* load the weights again rather than keep both halves and spill accumulators */
#pragma GCC unroll 8
    for (int c = 0; c < cols; c++)
        wide[c] = dtype == DTYPE_BF16 && rows * cols == MAX_ROWS * TILE_COLS /* no register is left for a mask */
                      ? AS_FLOAT(HIGH_HALVES(LOAD_INT(w + c * stride)))
                      : second(w + c * stride, dtype);
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++) {
        const vf value = LOAD(wide_x + r * STEP + LANES);
#pragma GCC unroll 8
        for (int c = 0; c < cols; c++)
            acc[r][c] = FMA(wide[c], value, acc[r][c]);
    }
}

/* sums[rows][cols] += x tile @ weight rows^T over `depth` elements. If `fetch` is not 0, these weights come from memory, so the
 * weights `fetch` bytes further on are prefetched meanwhile (the hardware cannot guess where rows begin). A piece may come in
 * several parts: its accumulators are kept in `to` if it goes on after this part, and taken from `from` if it began before. */
INLINE void tile(const char *x, const char *w, long stride, long depth, float *sums, long sums_stride, const int dtype,
                 const long fetch, const float *from, float *to, const int rows, const int cols)
{
    vf acc[FEW_ROWS][TILE_COLS];
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 8
        for (int c = 0; c < cols; c++)
            acc[r][c] = from ? LOAD(from + (c * FEW_ROWS + r) * LANES) : ZERO();
    long k = 0;
    for (; k + STEP <= depth; k += STEP) {
#pragma GCC unroll 8
        for (int c = 0; fetch && c < cols; c++)
            PREFETCH(w + c * stride + fetch + k * size_of(dtype), NEAR);
        step(acc, x + k * rows * packed_size(dtype), w + k * size_of(dtype), stride, dtype, rows, cols);
    }
    if (k < depth) { /* never read beyond a row: its end may be the end of the mapping */
        char tail[TILE_COLS][STEP * 4] = {{0}};
        for (int c = 0; c < cols; c++)
            memcpy(tail[c], w + c * stride + k * size_of(dtype), (size_t)((depth - k) * size_of(dtype)));
        step(acc, x + k * rows * packed_size(dtype), tail[0], STEP * 4, dtype, rows, cols);
    }
    if (to) {
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++)
#pragma GCC unroll 8
            for (int c = 0; c < cols; c++)
                STORE(to + (c * FEW_ROWS + r) * LANES, acc[r][c]);
        return;
    }
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 8
        for (int c = 0; c < cols; c++)
            sums[r * sums_stride + c] += SUM(acc[r][c]);
}

#define CASE(rows, most)                                                                                                       \
    case rows:                                                                                                                 \
        if (cols == most)                                                                                                      \
            tile(x, w, stride, depth, sums, sums_stride, dtype, fetch, from, to, rows, most);                                  \
        else                                                                                                                   \
            for (long c = 0; c < cols; c++)                                                                                    \
                tile(x, w + c * stride, stride, depth, sums + c, sums_stride, dtype, fetch,                                    \
                     from ? from + c * FEW_ROWS * LANES : NULL, to ? to + c * FEW_ROWS * LANES : NULL, rows, 1);               \
        break;

INLINE void tile_of(const char *x, const char *w, long stride, long depth, float *sums, long sums_stride, const int dtype,
                    long fetch, const float *from, float *to, long rows, long cols)
{
    switch (rows) {
        CASE(1, TILE_COLS)
        CASE(2, TILE_COLS)
        CASE(3, TILE_COLS)
        CASE(4, TILE_COLS)
#if MAX_ROWS > 4
        CASE(5, TILE_COLS)
#endif
#if MAX_ROWS > 5
        CASE(6, TILE_COLS)
#endif
#if MAX_ROWS > 6
        CASE(7, TILE_COLS)
        CASE(8, TILE_COLS)
#endif
#if FEW_ROWS > MAX_ROWS
        CASE(5, 2)
        CASE(6, 2)
        CASE(7, 1)
        CASE(8, 1)
#endif
    }
}

/* These are large functions: one for each dtype. */
#define TILE_OF(name, dtype)                                                                                                   \
    static __attribute__((noinline)) void tile_##name(const char *x, const char *w, long stride, long depth, float *sums,      \
                                                      long sums_stride, long fetch, const float *from, float *to, long rows,   \
                                                      long cols)                                                               \
    {                                                                                                                          \
        tile_of(x, w, stride, depth, sums, sums_stride, dtype, fetch, from, to, rows, cols);                                   \
    }
TILE_OF(bf16, DTYPE_BF16)
#ifndef DOT_BF16
TILE_OF(fp16, DTYPE_FP16)
TILE_OF(fp32, DTYPE_FP32)
#endif

INLINE void any_tile(const char *x, const char *w, long stride, long depth, float *sums, long sums_stride, const int dtype,
                     long fetch, const float *from, float *to, long rows, long cols)
{
    if (dtype == DTYPE_BF16)
        tile_bf16(x, w, stride, depth, sums, sums_stride, fetch, from, to, rows, cols);
#ifndef DOT_BF16
    else if (dtype == DTYPE_FP16)
        tile_fp16(x, w, stride, depth, sums, sums_stride, fetch, from, to, rows, cols);
    else
        tile_fp32(x, w, stride, depth, sums, sums_stride, fetch, from, to, rows, cols);
#endif
}

/* The weight rows of a register tile with this many rows of x. */
static inline long cols_of(long rows) { return rows <= MAX_ROWS ? TILE_COLS : rows <= 6 ? 2 : 1; }

static long tiles(long rows) { return rows <= FEW_ROWS ? 1 : (rows + MAX_ROWS - 1) / MAX_ROWS; }

/* The first row of a tile: rows are spread evenly, so that nine are 3+3+3 and not 4+4+1. */
static inline long tile_start(long rows, long number) { return rows * number / tiles(rows); }

INLINE void pack(const struct linear_job *job, long number, const int dtype)
{
    const long start = tile_start(job->rows, number), rows = tile_start(job->rows, number + 1) - start;
    char *packed = (char *)job->packed + start * job->padded_depth * packed_size(dtype);
    for (long r = 0; r < rows; r++) {
        const char *x = (const char *)job->x + (start + r) * job->x_stride * size_of(dtype);
        for (long k = 0; k < job->depth; k += STEP) {
            char tail[STEP * 4] = {0};
            const char *from = x + k * size_of(dtype);
            if (job->depth - k < STEP)
                from = memcpy(tail, from, (size_t)((job->depth - k) * size_of(dtype)));
            char *to = packed + (k * rows + r * STEP) * packed_size(dtype);
            if (packed_size(dtype) == 2) {
                memcpy(to, from, STEP * 2);
                continue;
            }
            if (dtype == DTYPE_BF16 && job->codes) { /* in their order, as in decoded weights */
                for (int i = 0; i < STEP; i++)
                    ((float *)to)[i] = widened(((const uint16_t *)from)[i], DTYPE_BF16);
                continue;
            }
            STORE((float *)to, first(from, dtype));
            STORE((float *)to + LANES, second(from, dtype));
        }
    }
}

/* A tile's x from the depth k on. */
INLINE const char *packed_at(const struct linear_job *job, long number, long k, const int dtype)
{
    const long start = tile_start(job->rows, number), rows = tile_start(job->rows, number + 1) - start;
    return (const char *)job->packed + (start * job->padded_depth + k * rows) * packed_size(dtype);
}

/* How much depth of x the first-level cache holds, in whole pieces. */
INLINE long span_of(long rows, const int dtype)
{
    const long pieces = FEW_BYTES / (rows * PIECE(dtype) * packed_size(dtype));
    return (pieces > 1 ? pieces : 1) * PIECE(dtype);
}

/* Multiply all rows of x, which are one tile, by the weight rows [col, col + cols). These are read as they lie in memory. */
INLINE void multiply_tile(const struct linear_job *job, float *sums, long col, long cols, const int dtype)
{
    const long stride = job->weight_stride * size_of(dtype), span = span_of(job->rows, dtype);
    const long ahead = (1 + AHEAD / (TILE_COLS * at_most(span * size_of(dtype), stride))) * TILE_COLS * stride;
    for (long from = 0; from < job->depth; from += span)
        for (long c = 0; c < cols; c += TILE_COLS)
            for (long k = from; k < at_most(from + span, job->depth); k += PIECE(dtype))
                any_tile(packed_at(job, 0, k, dtype), (const char *)job->weight + (col + c) * stride + k * size_of(dtype), stride,
                         at_most(job->depth - k, PIECE(dtype)), sums + c, job->block_cols, dtype, ahead, NULL, NULL, job->rows,
                         at_most(cols - c, TILE_COLS));
}

/* The same for any number of rows. */
INLINE void multiply(const struct linear_job *job, float *sums, long col, long cols, const int dtype)
{
    const long count = tiles(job->rows), stride = job->weight_stride * size_of(dtype), sums_stride = job->block_cols;
    /* The accumulators of a tile between the parts of a piece. */
    float carried[MOST_BLOCK_COLS * FEW_ROWS * LANES] __attribute__((aligned(64)));
    const long part = count > 1 ? DEPTH_BLOCK : FEW_BYTES / (job->rows * packed_size(dtype)) / STEP * STEP;
    if (job->rows <= MAX_ROWS) {
        multiply_tile(job, sums, col, cols, dtype);
        return;
    }
    for (long piece = 0; piece < job->depth; piece += PIECE(dtype)) {
        const long piece_end = at_most(job->depth, piece + PIECE(dtype));
        for (long number = 0; number < count; number++)
            for (long k = piece; k < piece_end; k += part) {
                const long start = tile_start(job->rows, number), rows = tile_start(job->rows, number + 1) - start;
                const long depth = at_most(piece_end - k, part), wide = cols_of(rows);
                const long ahead = (1 + AHEAD / (wide * depth * size_of(dtype))) * wide * stride;
                for (long c = 0; c < cols; c += wide) {
                    const char *w = (const char *)job->weight + (col + c) * stride + k * size_of(dtype);
                    float *sum = sums + start * sums_stride + c, *kept = carried + c * FEW_ROWS * LANES;
                    any_tile(packed_at(job, number, k, dtype), w, stride, depth, sum, sums_stride, dtype,
                             number == 0 ? ahead : 0, k > piece ? kept : NULL, k + depth < piece_end ? kept : NULL, rows,
                             at_most(cols - c, wide));
                }
            }
    }
}

/* Multiply all rows of x by as many of the weight rows [col, col + cols) as are whole tiles, and return how many. */
static long multiply_coded_tiles(const struct linear_job *job, float *sums, long col, long cols)
{
    const struct codes *codes = job->codes;
    const long piece = PIECE(DECODED_DTYPE);
    const coded_fn tile = job->rows <= MAX_ROWS ? coded_tiles[codes->packing][job->rows - 1] : NULL;
    if (!tile || job->depth % STEP || !(IS_BLOCKS(codes->packing) || has_steps(codes)))
        return 0;
    const long whole = cols / TILE_COLS * TILE_COLS;
    const long span = span_of(job->rows, DECODED_DTYPE);
    for (long from = 0; from < job->depth; from += span)
        for (long c = 0; c < whole; c += TILE_COLS)
            for (long k = from; k < at_most(from + span, job->depth); k += piece)
                tile(codes, packed_at(job, 0, k, DECODED_DTYPE), col + c, k, at_most(job->depth - k, piece), sums + c,
                     job->block_cols);
    return whole;
}

/* Prefetch one of several shares of the values [begin, begin + depth) of quantized weight rows. */
INLINE void prefetch_share(const struct codes *codes, long row, long rows, long begin, long depth, long share, long shares)
{
    const long bytes = bytes_of(depth, codes->packing), before = bytes_of(begin, codes->packing);
    for (long r = row; r < row + rows; r++)
        for (long at = bytes * share / shares; at < bytes * (share + 1) / shares; at += LINE)
            PREFETCH(row_of(codes, r) + before + at, 2);
}

/* The same as multiply for quantized weights. Some of their rows are floats at a time, and do not leave the cache. */
static __attribute__((noinline)) void multiply_codes(const struct linear_job *job, float *sums, long col, long cols)
{
    enum { DTYPE = DECODED_DTYPE };
    const long count = tiles(job->rows), stride = DECODED * size_of(DTYPE), sums_stride = job->block_cols;
    char *weights = (char *)(sums + whole_lines(job->rows * sums_stride));
    float carried[TILE_COLS * FEW_ROWS * LANES] __attribute__((aligned(64)));
    const long all = count > 1 ? cols : cols_of(job->rows); /* weight rows that are decoded together */
    const long part = count > 1 ? PIECE(DTYPE) : DEPTH_BLOCK; /* few rows stay in the first-level cache */
    for (long first = multiply_coded_tiles(job, sums, col, cols); first < cols; first += all)
        for (long piece = 0; piece < job->depth; piece += PIECE(DTYPE)) {
            const long piece_end = at_most(job->depth, piece + PIECE(DTYPE));
            for (long k = piece; k < piece_end; k += part) {
                const long depth = at_most(piece_end - k, part), decoded = at_most(cols - first, all);
                for (long c = 0; c < decoded; c++)
                    decode_row(job->codes, col + first + c, k, depth, weights + c * stride, DTYPE);
                for (long number = 0; number < count; number++) {
                    const long start = tile_start(job->rows, number), rows = tile_start(job->rows, number + 1) - start;
                    const long wide = cols_of(rows);
                    const long next = k + depth < job->depth ? k + depth : 0; /* what is decoded next: beside these, or below */
                    for (long c = 0; c < decoded; c += wide) {
                        prefetch_share(job->codes, col + first + c + (next ? 0 : decoded), at_most(decoded - c, wide), next,
                                       depth, number, count);
                        any_tile(packed_at(job, number, k, DTYPE), weights + c * stride, stride, depth,
                                 sums + start * sums_stride + first + c, sums_stride, DTYPE, 0, k > piece ? carried : NULL,
                                 k + depth < piece_end ? carried : NULL, rows, at_most(decoded - c, wide));
                    }
                }
            }
        }
}

/* Write the output of the weight rows [col, col + cols). dtype is that of x. */
INLINE void block(const struct linear_job *job, float *sums, long col, long cols, const int dtype)
{
    const long sums_stride = job->block_cols;
    memset(sums, 0, (size_t)(job->rows * sums_stride) * sizeof(float));
    if (job->codes)
        multiply_codes(job, sums, col, cols);
    else
        multiply(job, sums, col, cols, dtype);
    put_sums(job, sums, col, cols, dtype);
}

#define DEFINE(name, dtype)                                                                                                    \
    static void pack_##name(const struct linear_job *job, long number) { pack(job, number, dtype); }                          \
    static void block_##name(const struct linear_job *job, float *sums, long col, long cols)                                  \
    {                                                                                                                          \
        block(job, sums, col, cols, dtype);                                                                                    \
    }
DEFINE(bf16, DTYPE_BF16)
#ifdef DOT_BF16
const struct linear_variant VARIANT = {STEP, TILE_COLS, USUAL_TASKS, pack_bf16, tiles, block_bf16};
#else
DEFINE(fp16, DTYPE_FP16)
DEFINE(fp32, DTYPE_FP32)

const struct linear_variant VARIANT[3] = {
    {STEP, TILE_COLS, USUAL_TASKS, pack_bf16, tiles, block_bf16},
    {STEP, TILE_COLS, USUAL_TASKS, pack_fp16, tiles, block_fp16},
    {STEP, TILE_COLS, USUAL_TASKS, pack_fp32, tiles, block_fp32},
};
#endif

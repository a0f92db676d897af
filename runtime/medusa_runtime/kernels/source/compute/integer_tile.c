/* Products of ggml's blocks with activations that are rounded to 8 bits, which is what the formats were made for: dot products of
 * bytes, whose sums are integers of 32 bits. This file is compiled with AVX2; on aarch64 with NEON, and with its dot products.
 *
 * A row of x is rounded in groups that are as long as the weights' blocks. A group's factor is such that its largest number becomes
 * 127 or -127. As each group is rounded alone, and a register tile has one weight row, a row's product has the same bits in every
 * batch. */
#include <math.h>
#include <string.h>

#include "at_most.h"
#include "decode.h"
#include "linear.h"
#include "put.h"

#ifndef __aarch64__
#define VARIANT integer_avx2
#elif defined __ARM_FEATURE_DOTPROD
#define VARIANT integer_neon_dots
#else
#define VARIANT integer_neon
#endif

enum { RUN = 256, PARTS = RUN / PART, MOST_ROWS = 8 };

#define DEPTH_PIECE 2048L /* the depth of a tile, whose x (20 KB) stays in the first-level cache */
#define FETCH_AHEAD 1024L /* how many bytes ahead weights are prefetched, at least */

/* A tile of x consists of runs of RUN values of all its rows. A run has the rows' bytes, [PARTS][rows][PART]; what is multiplied
 * with the numbers of the weights' groups; and the factors. Where blocks have many values, these are sums of 16 bytes each, int16
 * [rows][16], and one factor [rows] of a run; else the products of sums and factors, and the factors, both [rows][PARTS]. */
#define RUN_BYTES (RUN + 32 + 32) /* of a row */
#define SUMS_OF(x, rows) ((x) + (rows) * RUN)
#define FACTORS_OF(x, rows) ((float *)((x) + (rows) * (RUN + 32)))

static long tiles(long rows) { return (rows + MOST_ROWS - 1) / MOST_ROWS; }

/* The first row of a tile. */
static inline long tile_start(long rows, long number) { return rows * number / tiles(rows); }

/* A tile's x from the depth k on. */
static char *packed_at(const struct linear_job *job, long number, long k)
{
    const long start = tile_start(job->rows, number), rows = tile_start(job->rows, number + 1) - start;
    return (char *)job->packed + (start * job->padded_depth + k * rows) / RUN * RUN_BYTES;
}

/* Round numbers to integers times a factor, and return it. It is not a number if not all of them are finite. */
INLINE float round_group(const float *x, int8_t *to, const int count)
{
    int32_t most = 0; /* floats are ordered like their bits */
    for (int i = 0; i < count; i++) {
        int32_t bits;
        memcpy(&bits, x + i, sizeof bits);
        bits &= 0x7fffffff;
        most = bits > most ? bits : most;
    }
    float largest;
    memcpy(&largest, &most, sizeof largest);
    if (!(largest >= 0x1p-100f && largest < INFINITY)) {
        memset(to, 0, (size_t)count);
        return largest < INFINITY ? 0.0f : NAN;
    }
    const float inverse = 127.0f / largest;
    for (int i = 0; i < count; i++)
        to[i] = (int8_t)(int)rintf(x[i] * inverse);
    return largest / 127.0f;
}

/* Round a run of the row r of a tile. */
INLINE void round_run(const float *values, char *x, long r, long rows, const int many)
{
    int8_t rounded[RUN];
    float *factors = FACTORS_OF(x, rows);
    if (many) {
        int16_t sums[16];
        factors[r] = round_group(values, rounded, RUN);
        for (int i = 0; i < 16; i++) {
            int sum = 0;
            for (int k = 0; k < 16; k++)
                sum += rounded[i * 16 + k];
            sums[i] = (int16_t)sum;
        }
        memcpy(SUMS_OF(x, rows) + r * 32, sums, sizeof sums);
    } else {
        float sums[PARTS];
        for (int part = 0; part < PARTS; part++) {
            const float factor = round_group(values + part * PART, rounded + part * PART, PART);
            int sum = 0;
            for (int k = 0; k < PART; k++)
                sum += rounded[part * PART + k];
            factors[r * PARTS + part] = factor;
            sums[part] = factor * (float)sum;
        }
        memcpy(SUMS_OF(x, rows) + r * 32, sums, sizeof sums);
    }
    for (long part = 0; part < PARTS; part++)
        memcpy(x + (part * rows + r) * PART, rounded + part * PART, PART);
}

INLINE void pack(const struct linear_job *job, long number, const int dtype)
{
    const long start = tile_start(job->rows, number), rows = tile_start(job->rows, number + 1) - start;
    const int many = HAS_MANY(job->codes->packing);
    float values[RUN];
    for (long r = 0; r < rows; r++) {
        const uint16_t *from = (const uint16_t *)job->x + (start + r) * job->x_stride;
        for (long k = 0; k < job->depth; k += RUN) {
            const long count = at_most(job->depth - k, RUN);
            for (long i = 0; i < count; i += LANES)
                STORE(values + i, dtype == DTYPE_BF16 ? WIDEN_BF16(from + k + i) : WIDEN_HALF(from + k + i));
            for (long i = count; i < RUN; i++)
                values[i] = 0;
            if (many)
                round_run(values, packed_at(job, number, k), r, rows, 1);
            else
                round_run(values, packed_at(job, number, k), r, rows, 0);
        }
    }
}

INLINE void fetch_ahead(const uint8_t *block, long ahead, long bytes)
{
    for (long at = 0; at < bytes; at += LINE)
        PREFETCH(block + ahead + at, 3);
}

/* The numbers of a block's groups, one for each 16 values. */
INLINE shorts group_shorts(const int8_t *integers, const int packing)
{
    typedef int8_t bytes_of_16 __attribute__((vector_size(16)));
    shorts found;
    if (group_values(packing) == 16) {
        bytes_of_16 all;
        memcpy(&all, integers, sizeof all);
        return __builtin_convertvector(all, shorts);
    }
#pragma GCC unroll 2
    for (long i = 0; i < PARTS; i += LANES) {
        const vi each = WIDEN_SIGNED(integers + i);
        const vi twice = OR(AND(each, SPLAT_INT(0xffff)), SHIFT_LEFT(each, 16));
        memcpy((char *)&found + i * 4, &twice, sizeof twice);
    }
    return found;
}

/* sums[rows] += the rows of a tile of x times a piece of a weight row, whose blocks have many values. */
INLINE void tile_of_many(const uint8_t *block, long ahead, const char *x, long depth, float *sums, long sums_stride,
                         const int packing, const int rows)
{
    vf total[MOST_ROWS];
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++)
        total[r] = ZERO();
    for (long k = 0; k < depth; k += RUN, block += block_bytes(packing), x += rows * RUN_BYTES) {
        const float *factors = FACTORS_OF(x, rows);
        int8_t small[2][MOST_GROUPS];
        vi sum[MOST_ROWS];
        fetch_ahead(block, ahead, block_bytes(packing));
        group_integers(block, small[0], small[1], packing);
        const shorts scales = group_shorts(small[0], packing);
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++)
            sum[r] = SPLAT_INT(0);
#pragma GCC unroll 8
        for (long part = 0; part < PARTS; part++) {
            const octets codes = part_codes(block, part, packing);
            const part_scale scale = part_scale_of(scales, part);
#pragma GCC unroll 8
            for (int r = 0; r < rows; r++) {
                sum[r] = add_scaled_dot(sum[r], codes, (const int8_t *)x + (part * rows + r) * PART, scale, HAS_SIGNED(packing));
                HOLD(sum[r]); /* in a register, rather than add all parts' products at the end */
            }
        }
        const vf factor = SPLAT(block_factor(block, packing));
        const vf low = has_minimum(packing) ? SPLAT(low_factor(block, packing)) : ZERO();
        const shorts added = has_minimum(packing) ? group_shorts(small[1], packing) : scales * (int16_t)-code_offset(packing);
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++) {
            vi products = SPLAT_INT(0);
            if (has_minimum(packing) || code_offset(packing)) {
                shorts of_x;
                memcpy(&of_x, SUMS_OF(x, rows) + r * 32, sizeof of_x);
                products = SUM_PRODUCTS(of_x, added);
            }
            if (code_offset(packing))
                sum[r] = ADD_INT(sum[r], products);
            vf value = MUL(TO_FLOAT(sum[r]), factor);
            if (has_minimum(packing))
                value = FMA(TO_FLOAT(products), low, value);
            total[r] = FMA(value, SPLAT(factors[r]), total[r]);
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++)
        sums[r * sums_stride] += SUM(total[r]);
}

/* The same for blocks of PART values. */
INLINE void tile_of_few(const uint8_t *block, long ahead, const char *x, long depth, float *sums, long sums_stride,
                        const int packing, const int rows)
{
    vf total[MOST_ROWS];
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++)
        total[r] = ZERO();
    for (long k = 0; k < depth; k += RUN, x += rows * RUN_BYTES) {
        const float *factors = FACTORS_OF(x, rows), *of_x = (const float *)SUMS_OF(x, rows);
        float factor[PARTS] = {0}, low[PARTS] = {0}, product[MOST_ROWS][PARTS];
        const long parts = at_most((depth - k) / PART, PARTS);
        fetch_ahead(block, ahead, parts * block_bytes(packing));
        for (long part = 0; part < parts; part++) {
            factor[part] = block_factor(block + part * block_bytes(packing), packing);
            if (has_minimum(packing))
                low[part] = low_factor(block + part * block_bytes(packing), packing);
        }
        for (int i = 0; rows > 1 && i < PARTS; i += LANES)
#pragma GCC unroll 8
            for (int r = 0; r < rows; r++)
                STORE(product[r] + i, MUL(LOAD(factor + i), LOAD(factors + r * PARTS + i)));
        for (long part = 0; part < parts; part++, block += block_bytes(packing)) {
            const octets codes = part_codes(block, 0, packing);
#pragma GCC unroll 8
            for (int r = 0; r < rows; r++) {
                const vi sum = dot(codes, (const int8_t *)x + (part * rows + r) * PART, HAS_SIGNED(packing));
                /* A vector that was written as single numbers would be waited for. */
                const float own = rows > 1 ? product[r][part] : factor[part] * factors[part];
                total[r] = FMA(TO_FLOAT(sum), SPLAT(own), total[r]);
            }
        }
        if (has_minimum(packing) || code_offset(packing))
            for (int i = 0; i < PARTS; i += LANES) {
                const vf added = has_minimum(packing) ? LOAD(low + i) : MUL(LOAD(factor + i), SPLAT((float)-code_offset(packing)));
#pragma GCC unroll 8
                for (int r = 0; r < rows; r++)
                    total[r] = FMA(added, LOAD(of_x + r * PARTS + i), total[r]);
            }
    }
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++)
        sums[r * sums_stride] += SUM(total[r]);
}

/* Functions of their own, so that each has all registers. */
typedef void (*tile_fn)(const uint8_t *block, long ahead, const char *x, long depth, float *sums, long sums_stride);

#define TILE(packing, rows)                                                                                                    \
    static __attribute__((noinline)) void tile_##packing##_##rows(const uint8_t *block, long ahead, const char *x, long depth, \
                                                                  float *sums, long sums_stride)                               \
    {                                                                                                                          \
        (HAS_MANY(packing) ? tile_of_many : tile_of_few)(block, ahead, x, depth, sums, sums_stride, packing, rows);            \
    }
#define EACH(f, packing)                                                                                                       \
    f(packing, 1) f(packing, 2) f(packing, 3) f(packing, 4) f(packing, 5) f(packing, 6) f(packing, 7) f(packing, 8)
#define TILES(packing) EACH(TILE, packing)
#define TILE_NAME(packing, rows) tile_##packing##_##rows,
#define TILE_NAMES(packing) [packing - Q4_0] = {EACH(TILE_NAME, packing)},
EACH_BLOCK_FORMAT(TILES)
static const tile_fn tile_fns[][MOST_ROWS] = {EACH_BLOCK_FORMAT(TILE_NAMES)};

/* Write the output of the weight rows [col, col + cols). */
INLINE void block(const struct linear_job *job, float *sums, long col, long cols, const int dtype)
{
    const struct codes *codes = job->codes;
    const long count = tiles(job->rows), row_bytes = bytes_of(codes->columns, codes->packing);
    const long ahead = (1 + FETCH_AHEAD / row_bytes) * row_bytes;
    const long span = job->rows == 1 ? 4 * DEPTH_PIECE : DEPTH_PIECE; /* of x, for which the first-level cache has room */
    memset(sums, 0, (size_t)(job->rows * job->block_cols) * sizeof(float));
    for (long from = 0; from < job->depth; from += span)
        for (long number = 0; number < count; number++) {
            const long start = tile_start(job->rows, number), rows = tile_start(job->rows, number + 1) - start;
            const tile_fn tile = tile_fns[codes->packing - Q4_0][rows - 1];
            for (long c = 0; c < cols; c++)
                for (long k = from; k < at_most(from + span, job->depth); k += DEPTH_PIECE)
                    tile(row_of(codes, col + c) + bytes_of(k, codes->packing), ahead, packed_at(job, number, k),
                         at_most(job->depth - k, DEPTH_PIECE), sums + start * job->block_cols + c, job->block_cols);
        }
    put_sums(job, sums, col, cols, dtype);
}

#define DEFINE(name, dtype)                                                                                                    \
    static void pack_##name(const struct linear_job *job, long number) { pack(job, number, dtype); }                          \
    static void block_##name(const struct linear_job *job, float *sums, long col, long cols)                                  \
    {                                                                                                                          \
        block(job, sums, col, cols, dtype);                                                                                    \
    }
DEFINE(bf16, DTYPE_BF16)
DEFINE(fp16, DTYPE_FP16)

const struct linear_variant VARIANT[2] = {
    {RUN, 1, {{0, 0}, {MOST_CODED_COLS, 0}}, pack_bf16, tiles, block_bf16},
    {RUN, 1, {{0, 0}, {MOST_CODED_COLS, 0}}, pack_fp16, tiles, block_fp16},
};

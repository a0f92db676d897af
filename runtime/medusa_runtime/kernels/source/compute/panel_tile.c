/* Products of many rows with AVX2, for all dtypes. A panel of weight rows is widened or decoded to fp32 once for all rows of x,
 * and packed for the register tiles, which are those of GotoBLAS (Goto and van de Geijn 2008) and BLIS.
 *
 * A row's product has the same bits as in linear_tile.c. There, depth lies across the lanes of an accumulator, which are added to
 * each other at the end of a piece. Here, columns do: one run of a register tile sums what is one lane there, and the sums of
 * the runs are then added in the order of SUM. */
#include <string.h>

#include "at_most.h"
#include "decode.h"
#include "linear.h"
#include "put.h"
#include "tile.h"

enum {
    TILE_ROWS = 6,
    PANEL = 2 * LANES,         /* weight rows */
    LONGEST = DECODED / LANES, /* the most numbers of a lane in a piece */
    MOST_PANELS = 4,           /* of short lanes: together they are at most as large as the longest one */
    CHUNK = 256,               /* values of a row that are decoded at a time */
    ASIDE_FLOATS = 3 * ROW_BLOCK * MOST_PANELS * PANEL,
    PACKED_FLOATS = LANES * (LONGEST + MOST_PANELS) * PANEL,
    PANEL_FLOATS = ASIDE_FLOATS + PACKED_FLOATS + PANEL * CHUNK,
};
_Static_assert(DECODED == 2 * DEPTH_BLOCK, "a piece of linear_tile.c");

/* In which order the lanes are summed, and what becomes of a lane's sums: `adds` of those that were set aside are added to them,
 * and then they are set aside, at a level. The last one's are the piece's. */
static const struct {
    int lane, adds, level;
} order[LANES] = {{0, 0, 0}, {4, 1, 0}, {2, 0, 1}, {6, 2, 0}, {1, 0, 1}, {5, 1, 1}, {3, 0, 2}, {7, 3, 0}};

static long tiles(long rows) { return (rows + TILE_ROWS - 1) / TILE_ROWS; }

/* The first row of a tile. */
static inline long tile_start(long rows, long number) { return rows * number / tiles(rows); }

/* How many numbers a lane has in a piece. */
INLINE long steps_of(long depth) { return (depth + STEP - 1) / STEP * 2; }

/* Two vectors of STEP numbers, as linear_tile.c has them in its lanes; those of x in their order, if weights are decoded. */
INLINE void widen(const void *p, vf to[2], const int dtype, const int in_order)
{
    const int ordered = dtype == DTYPE_BF16 && in_order;
    to[0] = ordered ? WIDEN_BF16(p) : first(p, dtype);
    to[1] = ordered ? WIDEN_BF16((const uint16_t *)p + LANES) : second(p, dtype);
}

/* The packed x of a piece is [lane][tile][step][row of the tile]. */
INLINE void pack_x(const struct linear_job *job, long number, const int dtype, const int in_order)
{
    const long start = tile_start(job->rows, number), rows = tile_start(job->rows, number + 1) - start;
    for (long piece = 0; piece < job->depth; piece += DECODED) {
        const long depth = at_most(job->depth - piece, DECODED), steps = steps_of(depth), between = steps * job->rows;
        for (long r = 0; r < rows; r++) {
            const char *x = (const char *)job->x + ((start + r) * job->x_stride + piece) * size_of(dtype);
            float *to = (float *)job->packed + piece * job->rows + start * steps + r;
            for (long k = 0; k < depth; k += STEP, to += 2 * rows) {
                char tail[STEP * 4] = {0};
                const char *from = x + k * size_of(dtype);
                float numbers[STEP];
                vf wide[2];
                if (depth - k < STEP)
                    from = memcpy(tail, from, (size_t)((depth - k) * size_of(dtype)));
                widen(from, wide, dtype, in_order);
                STORE(numbers, wide[0]);
                STORE(numbers + LANES, wide[1]);
#pragma GCC unroll 8
                for (long lane = 0; lane < LANES; lane++) {
                    to[lane * between] = numbers[lane];
                    to[lane * between + rows] = numbers[LANES + lane];
                }
            }
        }
    }
}

/* The packed panel of a piece is [lane][step][PANEL], with a line between the lanes, so that they do not share sets of the cache. */
INLINE long panel_run(long steps) { return (steps + 1) * PANEL; }

/* Write vectors of LANES weight rows as columns, each to its lane's place. */
INLINE void pack_lanes(const vf rows[LANES], float *to, long run)
{
    vf a[LANES], b[LANES];
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        a[2 * i] = _mm256_unpacklo_ps(rows[2 * i], rows[2 * i + 1]);
        a[2 * i + 1] = _mm256_unpackhi_ps(rows[2 * i], rows[2 * i + 1]);
    }
#pragma GCC unroll 2
    for (int i = 0; i < 2; i++)
#pragma GCC unroll 2
        for (int k = 0; k < 2; k++) {
            b[4 * i + 2 * k] = _mm256_shuffle_ps(a[4 * i + k], a[4 * i + 2 + k], 0x44);
            b[4 * i + 2 * k + 1] = _mm256_shuffle_ps(a[4 * i + k], a[4 * i + 2 + k], 0xee);
        }
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        STORE(to + i * run, _mm256_permute2f128_ps(b[i], b[4 + i], 0x20));
        STORE(to + (4 + i) * run, _mm256_permute2f128_ps(b[i], b[4 + i], 0x31));
    }
}

/* Pack STEP numbers of LANES weight rows, or those of them that there are. */
INLINE void pack_step(const char *const places[LANES], long at, long count, float *to, long run, const int dtype)
{
    char tail[LANES][STEP * 4];
    const char *from[LANES];
    vf rows[LANES];
#pragma GCC unroll 8
    for (int i = 0; i < LANES; i++) {
        from[i] = places[i] + at * size_of(dtype);
        if (count < STEP) {
            memset(tail[i], 0, sizeof tail[i]);
            from[i] = memcpy(tail[i], from[i], (size_t)(count * size_of(dtype)));
        }
        rows[i] = first(from[i], dtype);
    }
    pack_lanes(rows, to, run);
    __asm__ volatile("" ::: "memory"); /* load the weights again rather than keep both halves and spill them */
#pragma GCC unroll 8
    for (int i = 0; i < LANES; i++)
        rows[i] = second(from[i], dtype);
    pack_lanes(rows, to + PANEL, run);
}

/* Pack numbers of PANEL weight rows. `to` is the place of their first step in the panel. */
INLINE void pack_rows(const char *const places[PANEL], long depth, float *to, long run, const int dtype)
{
    enum { TOGETHER = 2 * STEP }; /* a line of the cache, which may not be there later */
    long k = 0;
    for (; k + TOGETHER <= depth; k += TOGETHER)
        for (int half = 0; half < PANEL; half += LANES)
            for (long at = k; at < k + TOGETHER; at += STEP)
                pack_step(places + half, at, STEP, to + at / LANES * PANEL + half, run, dtype);
    for (; k < depth; k += STEP)
        for (int half = 0; half < PANEL; half += LANES)
            pack_step(places + half, k, at_most(depth - k, STEP), to + k / LANES * PANEL + half, run, dtype);
}

/* Pack the numbers [piece, piece + depth) of PANEL weight rows from `col` on. The last one stands in for those after `last`. */
INLINE void pack_panel(const struct linear_job *job, long col, long last, long piece, long depth, float *to, float *decoded,
                       const int dtype)
{
    const long run = panel_run(steps_of(depth)), stride = job->weight_stride * size_of(dtype);
    const char *places[PANEL];
    if (!job->codes) {
        for (int i = 0; i < PANEL; i++)
            places[i] = (const char *)job->weight + at_most(col + i, last) * stride + piece * size_of(dtype);
        pack_rows(places, depth, to, run, dtype);
        return;
    }
    for (int i = 0; i < PANEL; i++)
        places[i] = (const char *)(decoded + at_most(i, last - col) * CHUNK);
    for (long k = 0; k < depth; k += CHUNK) {
        const long count = at_most(depth - k, CHUNK);
        for (int i = 0; i <= at_most(PANEL - 1, last - col); i++)
            decode_row(job->codes, col + i, piece + k, count, decoded + i * CHUNK, DTYPE_FP32);
        pack_rows(places, count, to + k / LANES * PANEL, run, DTYPE_FP32);
    }
}

/* Sum a lane of a tile of x times a panel. `aside` has the last of the sums that were set aside, and `levels` is how far apart
 * they are. The last lane's are added to what is there. */
INLINE void tile(const float *x, const float *panel, long steps, long adds, const float *aside, long levels, float *to,
                 long to_stride, int is_last, const int rows)
{
    vf acc[TILE_ROWS][2];
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++)
        acc[r][0] = acc[r][1] = ZERO();
#pragma GCC unroll 1
    for (long step = 0; step < steps; step += 2)
#pragma GCC unroll 2
        for (int i = 0; i < 2; i++, x += rows, panel += PANEL) {
            const vf low = LOAD(panel), high = LOAD(panel + LANES);
#pragma GCC unroll 8
            for (int r = 0; r < rows; r++) {
                const vf value = SPLAT(x[r]);
                acc[r][0] = FMA(value, low, acc[r][0]);
                acc[r][1] = FMA(value, high, acc[r][1]);
            }
        }
    for (; adds > 0; adds--, aside -= levels)
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++) {
            acc[r][0] += LOAD(aside + r * PANEL);
            acc[r][1] += LOAD(aside + r * PANEL + LANES);
        }
#pragma GCC unroll 8
    for (int r = 0; is_last && r < rows; r++) {
        acc[r][0] += LOAD(to + r * to_stride);
        acc[r][1] += LOAD(to + r * to_stride + LANES);
    }
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++) {
        STORE(to + r * to_stride, acc[r][0]);
        STORE(to + r * to_stride + LANES, acc[r][1]);
    }
}

/* Functions of their own, so that each has all registers. */
#define TILE(rows)                                                                                                             \
    static __attribute__((noinline)) void tile_##rows(const float *x, const float *panel, long steps, long adds,               \
                                                      const float *aside, long levels, float *to, long to_stride, int is_last) \
    {                                                                                                                          \
        tile(x, panel, steps, adds, aside, levels, to, to_stride, is_last, rows);                                              \
    }
/* More than FEW_ROWS rows are spread evenly, so no tile has fewer. */
TILE(5)
TILE(6)

/* Weights that are prefetched while others are multiplied, in lines of the cache. */
struct ahead {
    const char *row;
    long stride, lines, line, left;
};

INLINE struct ahead ahead_of(const struct linear_job *job, long col, long cols, long piece, const int dtype)
{
    const struct codes *codes = job->codes;
    const long depth = at_most(job->depth - piece, DECODED);
    if (codes)
        return (struct ahead){.row = (const char *)row_of(codes, col) + bytes_of(piece, codes->packing),
                              .stride = bytes_of(codes->columns, codes->packing),
                              .lines = bytes_of(depth, codes->packing) / LINE + 1, .left = cols};
    return (struct ahead){.row = (const char *)job->weight + (col * job->weight_stride + piece) * size_of(dtype),
                          .stride = job->weight_stride * size_of(dtype), .lines = depth * size_of(dtype) / LINE + 1, .left = cols};
}

INLINE void prefetch(struct ahead *ahead, long lines)
{
    for (; lines > 0 && ahead->left > 0; lines--) {
        PREFETCH(ahead->row + ahead->line * LINE, 2);
        if (++ahead->line == ahead->lines) {
            ahead->line = 0;
            ahead->row += ahead->stride;
            ahead->left--;
        }
    }
}

/* sums[rows][block_cols] += a piece of x times packed panels. */
static __attribute__((noinline)) void multiply(const struct linear_job *job, long piece, const float *packed, long panels,
                                               float *aside, float *sums, struct ahead ahead)
{
    const long steps = steps_of(at_most(job->depth - piece, DECODED)), count = tiles(job->rows);
    const long levels = job->rows * panels * PANEL, lines = ahead.lines * ahead.left / (LANES * count * panels) + 1;
    for (int i = 0; i < LANES; i++)
        for (long number = 0; number < count; number++) {
            const long start = tile_start(job->rows, number), rows = tile_start(job->rows, number + 1) - start;
            const float *x = (const float *)job->packed + piece * job->rows + (order[i].lane * job->rows + start) * steps;
            for (long panel = 0; panel < panels; panel++) {
                const float *weights = packed + (panel * LANES + order[i].lane) * panel_run(steps);
                float *mine = aside + order[i].level * levels + (panel * job->rows + start) * PANEL;
                const float *above = mine + (order[i].adds - 1) * levels;
                prefetch(&ahead, lines);
                if (i == LANES - 1)
                    (rows == TILE_ROWS ? tile_6 : tile_5)(x, weights, steps, order[i].adds, above, levels,
                                  sums + start * job->block_cols + panel * PANEL, job->block_cols, 1);
                else
                    (rows == TILE_ROWS ? tile_6 : tile_5)(x, weights, steps, order[i].adds, above, levels, mine, PANEL, 0);
            }
        }
}

/* Write the output of the weight rows [col, col + cols). */
INLINE void block(const struct linear_job *job, float *sums, long col, long cols, const int dtype)
{
    float *aside = sums + whole_lines(job->rows * job->block_cols), *packed = aside + ASIDE_FLOATS;
    memset(sums, 0, (size_t)(job->rows * job->block_cols) * sizeof(float));
    for (long piece = 0; piece < job->depth; piece += DECODED) {
        const long depth = at_most(job->depth - piece, DECODED), steps = steps_of(depth);
        const long together = at_most(MOST_PANELS, LONGEST / steps) * PANEL;
        for (long c = 0; c < cols; c += together) {
            const long here = at_most(cols - c, together), panels = (here + PANEL - 1) / PANEL;
            for (long panel = 0; panel < panels; panel++)
                pack_panel(job, col + c + panel * PANEL, col + cols - 1, piece, depth, packed + panel * LANES * panel_run(steps),
                           packed + PACKED_FLOATS, dtype);
            const int is_end = c + here == cols, is_last = is_end && piece + depth == job->depth;
            const long next = is_last ? 0 : is_end ? piece + depth : piece;
            multiply(job, piece, packed, panels, aside, sums + c,
                     ahead_of(job, col + (is_last ? cols : is_end ? 0 : c + here), together, next, dtype));
        }
    }
    put_sums(job, sums, col, cols, dtype);
}

#define DEFINE(name, dtype)                                                                                                    \
    static void pack_##name(const struct linear_job *job, long number)                                                         \
    {                                                                                                                          \
        if (job->codes)                                                                                                        \
            pack_x(job, number, dtype, 1);                                                                                     \
        else                                                                                                                   \
            pack_x(job, number, dtype, 0);                                                                                     \
    }                                                                                                                          \
    static void block_##name(const struct linear_job *job, float *sums, long col, long cols)                                   \
    {                                                                                                                          \
        block(job, sums, col, cols, dtype);                                                                                    \
    }
DEFINE(bf16, DTYPE_BF16)
DEFINE(fp16, DTYPE_FP16)
DEFINE(fp32, DTYPE_FP32)

const struct linear_variant panels_avx2[3] = {
    {STEP, PANEL, {{MOST_BLOCK_COLS, PANEL_FLOATS}, {MOST_BLOCK_COLS, PANEL_FLOATS}}, pack_bf16, tiles, block_bf16},
    {STEP, PANEL, {{MOST_BLOCK_COLS, PANEL_FLOATS}, {MOST_BLOCK_COLS, PANEL_FLOATS}}, pack_fp16, tiles, block_fp16},
    {STEP, PANEL, {{MOST_BLOCK_COLS, PANEL_FLOATS}, {MOST_BLOCK_COLS, PANEL_FLOATS}}, pack_fp32, tiles, block_fp32},
};

/* The product for one instruction set, for bf16 and fp16. Compiled once with AVX2 and once with AVX-512F.
 *
 * Dot-product form: weights are read as they lie in memory (rows of depth), 16 bits wide, and widened in registers; nothing
 * is repacked, so read-only shared memory serves. A register tile of R weight rows times C rows of x keeps R*C vector
 * accumulators, so each widened weight vector is used C times and each x vector R times. */
#include <immintrin.h>
#include <string.h>

#include "linear.h"

#ifdef __AVX512F__
#define VARIANT linear_avx512
#define LANES 16
#define MAX_ROWS 6
#define TILE_COLS 4
typedef __m512 vf;
typedef __m512i vi;
#define SHIFT_LEFT_16(v) _mm512_slli_epi32(v, 16)
#define AND(a, b) _mm512_and_si512(a, b)
#define SPLAT_INT(i) _mm512_set1_epi32(i)
#define AS_FLOAT(v) _mm512_castsi512_ps(v)
#define LOAD_INT(p) _mm512_loadu_si512((const void *)(p))
#define LOAD(p) _mm512_loadu_ps(p)
#define STORE(p, v) _mm512_storeu_ps(p, v)
#define ZERO() _mm512_setzero_ps()
#define FMA(a, b, c) _mm512_fmadd_ps(a, b, c)
#define WIDEN_HALF(p) _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(p)))
#define SUM(v) _mm512_reduce_add_ps(v)
#else
#define VARIANT linear_avx2
#define LANES 8
#define MAX_ROWS 4
#define TILE_COLS 3
typedef __m256 vf;
typedef __m256i vi;
#define SHIFT_LEFT_16(v) _mm256_slli_epi32(v, 16)
#define AND(a, b) _mm256_and_si256(a, b)
#define SPLAT_INT(i) _mm256_set1_epi32(i)
#define AS_FLOAT(v) _mm256_castsi256_ps(v)
#define LOAD_INT(p) _mm256_loadu_si256((const __m256i *)(p))
#define LOAD(p) _mm256_loadu_ps(p)
#define STORE(p, v) _mm256_storeu_ps(p, v)
#define ZERO() _mm256_setzero_ps()
#define FMA(a, b, c) _mm256_fmadd_ps(a, b, c)
#define WIDEN_HALF(p) _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(p)))
static inline float sum_avx2(__m256 v)
{
    __m128 s = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    s = _mm_add_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)));
}
#define SUM(v) sum_avx2(v)
#endif

#define STEP (2 * LANES)
#define DEPTH_BLOCK 1024L /* a tile of x (16 KB as fp32) stays in the first-level cache */
#define FEW_ROWS 16L      /* up to here the product is bound by memory: finish with a weight row while it is near */
#define INLINE static inline __attribute__((always_inline))

/* The two vectors of a step: bf16 even and odd elements, fp16 low and high half. x is widened by the same functions, so the
 * order of the elements does not matter. */
INLINE vf first(const uint16_t *p, const int dtype)
{
    return dtype == DTYPE_BF16 ? AS_FLOAT(SHIFT_LEFT_16(LOAD_INT(p))) : WIDEN_HALF(p);
}

INLINE vf second(const uint16_t *p, const int dtype)
{
    return dtype == DTYPE_BF16 ? AS_FLOAT(AND(LOAD_INT(p), SPLAT_INT((int)0xffff0000u))) : WIDEN_HALF(p + LANES);
}

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

/* sums[rows][cols] += x tile @ weight rows^T over `depth` elements. */
INLINE void tile(const float *x, const uint16_t *w, long stride, long depth, float *sums, long sums_stride, const int dtype,
                 const int rows, const int cols)
{
    vf acc[MAX_ROWS][TILE_COLS];
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 8
        for (int c = 0; c < cols; c++)
            acc[r][c] = ZERO();
    long k = 0;
    for (; k + STEP <= depth; k += STEP)
        step(acc, x + k * rows, w + k, stride, dtype, rows, cols);
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
            tile(x, w, stride, depth, sums, sums_stride, dtype, rows, TILE_COLS);                                              \
        else                                                                                                                   \
            for (long c = 0; c < cols; c++)                                                                                    \
                tile(x, w + c * stride, stride, depth, sums + c, sums_stride, dtype, rows, 1);                                 \
        break;

INLINE void any_tile(const float *x, const uint16_t *w, long stride, long depth, float *sums, long sums_stride,
                     const int dtype, long rows, long cols)
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

INLINE void widen(struct linear_job *job, long number, const int dtype)
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

static inline uint16_t narrow(float value, const int dtype)
{
    if (dtype == DTYPE_FP16)
        return (uint16_t)_cvtss_sh(value, _MM_FROUND_TO_NEAREST_INT);
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    return (uint16_t)((bits & 0x7fffffffu) > 0x7f800000u ? 0x7fc0u : rounded);
}

static inline float widened(uint16_t bits, const int dtype)
{
    if (dtype == DTYPE_FP16)
        return _cvtsh_ss(bits);
    const uint32_t wide = (uint32_t)bits << 16;
    float value;
    memcpy(&value, &wide, sizeof value);
    return value;
}

/* All rows of x times the weight rows [col, col + cols). */
INLINE void block(struct linear_job *job, float *sums, long col, long cols, const int dtype)
{
    const long count = tiles(job->rows), stride = job->weight_stride, sums_stride = job->block_cols;
    memset(sums, 0, (size_t)(job->rows * sums_stride) * sizeof(float));
    const long depth_block = job->rows <= FEW_ROWS ? 2 * DEPTH_BLOCK / (count > 2 ? 2 : count) * 1 : DEPTH_BLOCK;
    for (long k = 0; k < job->depth; k += depth_block) {
        const long depth = job->depth - k < depth_block ? job->depth - k : depth_block;
        const uint16_t *w = job->weight + col * stride + k;
        const int by_weight = job->rows <= FEW_ROWS;
        const long outer = by_weight ? (cols + TILE_COLS - 1) / TILE_COLS : count;
        const long inner = by_weight ? count : (cols + TILE_COLS - 1) / TILE_COLS;
        for (long i = 0; i < outer; i++)
            for (long j = 0; j < inner; j++) {
                const long number = by_weight ? j : i, c = (by_weight ? i : j) * TILE_COLS;
                const long start = tile_start(job->rows, number), rows = tile_start(job->rows, number + 1) - start;
                const long width = cols - c < TILE_COLS ? cols - c : TILE_COLS;
                any_tile(job->wide + start * job->padded_depth + k * rows, w + c * stride, stride, depth,
                         sums + start * sums_stride + c, sums_stride, dtype, rows, width);
            }
    }
    for (long r = 0; r < job->rows; r++)
        for (long c = 0; c < cols; c++) {
            const float bias = job->bias ? widened(job->bias[col + c], dtype) : 0.0f;
            job->out[r * job->out_stride + col + c] = narrow(sums[r * sums_stride + c] + bias, dtype);
        }
}

#define DEFINE(name, dtype)                                                                                                    \
    static void widen_##name(struct linear_job *job, long number) { widen(job, number, dtype); }                              \
    static void block_##name(struct linear_job *job, float *sums, long col, long cols) { block(job, sums, col, cols, dtype); }
DEFINE(bf16, DTYPE_BF16)
DEFINE(fp16, DTYPE_FP16)

const struct linear_variant VARIANT[2] = {
    {STEP, TILE_COLS, widen_bf16, tiles, block_bf16},
    {STEP, TILE_COLS, widen_fp16, tiles, block_fp16},
};

/* Attention of a few query rows over a paged KV cache, for one instruction set and each dtype; softmax as in FlashAttention
 * (online, Milakov and Gimelshein 2018; Dao et al. 2022), blocks as in PagedAttention (Kwon et al. 2023, section 4.1). */
#include <math.h>

#include "attention.h"
#include "exponential.h"
#include "simd.h"

#define KEYS 32L /* a chunk of keys: its scores and values stay in the first-level cache */
#define ROWS 4   /* query rows per register tile */

#ifdef __aarch64__
#define VARIANT attend_neon
#elif LANES == 16
#define VARIANT attend_avx512
#else
#define VARIANT attend_avx2
#endif

struct rows {
    long count, head_dim;
    long start[MAX_QUERY_ROWS], stop[MAX_QUERY_ROWS]; /* the positions a row sees */
    float largest[MAX_QUERY_ROWS], total[MAX_QUERY_ROWS];
    float scores[MAX_QUERY_ROWS][KEYS];
    float q[MAX_QUERY_ROWS][MAX_HEAD_DIM], out[MAX_QUERY_ROWS][MAX_HEAD_DIM]; /* in the order of first() and second() */
};

static inline float exponential(float x)
{
    x = x < -87.0f ? -87.0f : x;
    const float n = rintf(x * LOG2_E);
    const float r = (x - n * LN_2_HIGH) + n * LN_2_LOW;
    float p = exp_coefficients[0];
#pragma GCC unroll 8
    for (int i = 1; i < COEFFICIENTS; i++)
        p = p * r + exp_coefficients[i];
    p = p * r * r + r + 1.0f;
    const int32_t bits = ((int32_t)n + 127) << 23;
    float power;
    memcpy(&power, &bits, sizeof power);
    return p * power;
}

INLINE void load_rows(struct rows *rows, const struct attention *a, const struct query_rows *which, const int dtype)
{
    const long group = a->heads / a->kv_heads;
    rows->count = which->count;
    rows->head_dim = a->head_dim;
    for (long i = 0; i < which->count; i++) {
        const long row = which->first_row + i, token = which->first_token + row / group;
        const long head = which->kv_head * group + row % group;
        const char *q = a->q + token * a->q_stride + head * a->head_dim * size_of(dtype);
        for (long d = 0; d < a->head_dim; d += STEP) {
            STORE(&rows->q[i][d], first(q + d * size_of(dtype), dtype) * SPLAT(a->scale));
            STORE(&rows->q[i][d + LANES], second(q + d * size_of(dtype), dtype) * SPLAT(a->scale));
        }
        memset(rows->out[i], 0, (size_t)a->head_dim * sizeof(float));
        rows->largest[i] = a->sinks ? element(a->sinks, head, dtype) : -INFINITY;
        rows->total[i] = a->sinks ? 1.0f : 0.0f; /* of the weights, each relative to the largest score */
        rows->stop[i] = a->contexts[token];
        rows->start[i] = a->window && a->contexts[token] > a->window ? a->contexts[token] - a->window : 0;
    }
}

INLINE void score(struct rows *rows, long row, const char *key, long number, const int dtype, const int count)
{
    vf acc[ROWS];
#pragma GCC unroll 8
    for (int r = 0; r < count; r++)
        acc[r] = ZERO();
    for (long d = 0; d < rows->head_dim; d += STEP) {
        const vf even = first(key + d * size_of(dtype), dtype), odd = second(key + d * size_of(dtype), dtype);
#pragma GCC unroll 8
        for (int r = 0; r < count; r++) {
            acc[r] = FMA(LOAD(&rows->q[row + r][d]), even, acc[r]);
            acc[r] = FMA(LOAD(&rows->q[row + r][d + LANES]), odd, acc[r]);
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < count; r++)
        rows->scores[row + r][number] = SUM(acc[r]);
}

/* Turn scores into weights relative to the largest score so far, and rescale the earlier sums to it. */
static void soften(struct rows *rows, long position, long count)
{
    for (long r = 0; r < rows->count; r++) {
        float *scores = rows->scores[r];
        const long low = rows->start[r] - position, high = rows->stop[r] - position;
        float largest = rows->largest[r];
        for (long j = low > 0 ? low : 0; j < count && j < high; j++)
            largest = scores[j] > largest ? scores[j] : largest;
        if (largest == -INFINITY) { /* the row sees neither these keys nor any before */
            memset(scores, 0, (size_t)count * sizeof(float));
            continue;
        }
        float sum = 0.0f;
        for (long j = 0; j < count; j++)
            scores[j] = exponential(scores[j] - largest);
        for (long j = 0; j < count; j++)
            scores[j] = j >= low && j < high ? scores[j] : 0.0f;
        for (long j = 0; j < count; j++)
            sum += scores[j];
        const float before = rows->largest[r] == -INFINITY ? 0.0f : expf(rows->largest[r] - largest);
        rows->total[r] = rows->total[r] * before + sum;
        rows->largest[r] = largest;
        if (before != 1.0f)
            for (long d = 0; d < rows->head_dim; d++)
                rows->out[r][d] *= before;
    }
}

INLINE void add_values(struct rows *rows, long row, const char *const *values, long keys, const int dtype, const int count)
{
    for (long d = 0; d < rows->head_dim; d += STEP) {
        vf low[ROWS], high[ROWS];
#pragma GCC unroll 8
        for (int r = 0; r < count; r++) {
            low[r] = LOAD(&rows->out[row + r][d]);
            high[r] = LOAD(&rows->out[row + r][d + LANES]);
        }
        for (long j = 0; j < keys; j++) {
            const vf even = first(values[j] + d * size_of(dtype), dtype), odd = second(values[j] + d * size_of(dtype), dtype);
#pragma GCC unroll 8
            for (int r = 0; r < count; r++) {
                const vf weight = SPLAT(rows->scores[row + r][j]);
                low[r] = FMA(weight, even, low[r]);
                high[r] = FMA(weight, odd, high[r]);
            }
        }
#pragma GCC unroll 8
        for (int r = 0; r < count; r++) {
            STORE(&rows->out[row + r][d], low[r]);
            STORE(&rows->out[row + r][d + LANES], high[r]);
        }
    }
}

INLINE void store_rows(const struct rows *rows, const struct attention *a, const struct query_rows *which, const int dtype)
{
    const long group = a->heads / a->kv_heads;
    for (long i = 0; i < rows->count; i++) {
        const long row = which->first_row + i, token = which->first_token + row / group;
        char *out = a->out + (token * a->heads + which->kv_head * group + row % group) * a->head_dim * size_of(dtype);
        const float factor = rows->total[i] > 0.0f ? 1.0f / rows->total[i] : 0.0f;
        for (long d = 0; d < rows->head_dim; d++) {
            const long within = d % STEP;
            const long from = d - within + (dtype == DTYPE_BF16 ? within / 2 + within % 2 * LANES : within);
            const float value = rows->out[i][from] * factor;
            if (dtype == DTYPE_FP32)
                memcpy(out + d * 4, &value, sizeof value);
            else {
                const uint16_t narrowed = narrow(value, dtype);
                memcpy(out + d * 2, &narrowed, sizeof narrowed);
            }
        }
    }
}

static const char *slot(const struct attention *a, const struct kv_pool *pool, const int32_t *blocks, long position, long head)
{
    return pool->data + blocks[position / a->block_size] * pool->block_stride + position % a->block_size * pool->slot_stride +
           head * pool->head_stride;
}

/* The addresses of a chunk's keys and values. All are prefetched at once: the hardware cannot guess where a head's next key is,
 * and a few query rows are done with one key before the next has come from memory. */
struct chunk {
    long count;
    const char *keys[KEYS], *values[KEYS];
};

INLINE void find_chunk(struct chunk *chunk, const struct attention *a, const int32_t *blocks, long position, long stop, long head,
                       const int dtype)
{
    chunk->count = stop - position < KEYS ? stop - position : KEYS;
    for (long j = 0; j < chunk->count; j++) {
        chunk->keys[j] = slot(a, &a->keys, blocks, position + j, head);
        for (long byte = 0; byte < a->head_dim * size_of(dtype); byte += 64)
            PREFETCH(chunk->keys[j] + byte, 3);
    }
    for (long j = 0; j < chunk->count; j++) {
        chunk->values[j] = slot(a, &a->values, blocks, position + j, head);
        for (long byte = 0; byte < a->head_dim * size_of(dtype); byte += 64)
            PREFETCH(chunk->values[j] + byte, 3);
    }
}

#define EACH_ROW_TILE(work)                                                                                                    \
    for (long row = 0; row < rows.count; row += ROWS)                                                                          \
        switch (rows.count - row) {                                                                                            \
        case 1: work(1); break;                                                                                                \
        case 2: work(2); break;                                                                                                \
        case 3: work(3); break;                                                                                                \
        default: work(ROWS);                                                                                                   \
        }

INLINE void attend(const struct attention *a, const struct query_rows *which, const int dtype)
{
    struct rows rows;
    load_rows(&rows, a, which, dtype);
    const int32_t *blocks = a->block_tables + a->sequences[which->first_token] * a->block_table_stride;
    long start = rows.start[0], stop = rows.stop[0];
    for (long r = 1; r < rows.count; r++) {
        start = rows.start[r] < start ? rows.start[r] : start;
        stop = rows.stop[r] > stop ? rows.stop[r] : stop;
    }
    struct chunk chunk, next;
    find_chunk(&chunk, a, blocks, start, stop, which->kv_head, dtype);
    for (long position = start; position < stop; position += KEYS, chunk = next) {
        if (position + KEYS < stop)
            find_chunk(&next, a, blocks, position + KEYS, stop, which->kv_head, dtype);
        for (long j = 0; j < chunk.count; j++) {
#define SCORE(n) score(&rows, row, chunk.keys[j], j, dtype, n)
            EACH_ROW_TILE(SCORE)
        }
        soften(&rows, position, chunk.count);
#define ADD_VALUES(n) add_values(&rows, row, chunk.values, chunk.count, dtype, n)
        EACH_ROW_TILE(ADD_VALUES)
    }
    store_rows(&rows, a, which, dtype);
}

#define DEFINE(name, dtype)                                                                                                    \
    static void attend_##name(const struct attention *a, const struct query_rows *rows) { attend(a, rows, dtype); }
DEFINE(bf16, DTYPE_BF16)
DEFINE(fp16, DTYPE_FP16)
DEFINE(fp32, DTYPE_FP32)

const attend_fn VARIANT[3] = {attend_bf16, attend_fp16, attend_fp32};

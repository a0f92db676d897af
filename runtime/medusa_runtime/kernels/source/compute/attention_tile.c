/* Attention of query rows over a paged KV cache, for one instruction set and each dtype; softmax as in FlashAttention (online,
 * Milakov and Gimelshein 2018; Dao et al. 2022), blocks as in PagedAttention (Kwon et al. 2023, section 4.1).
 *
 * A few rows, as in decode, take keys and values from where they lie. Of many rows, which share them, each chunk is widened to
 * fp32 once, for register tiles that are as large as there is room for. Both ways add the same numbers in the same order, and
 * chunks begin at multiples of their size, so that a row has the same bits beside any others. */
#include <math.h>

#include "at_most.h"
#include "attention.h"
#include "exponential.h"
#include "simd.h"

enum {
    KEYS = 32, /* a chunk of keys: its scores and values stay in the first-level cache */
    FEW_ROWS = 8,
    ROWS = 4, /* of a register tile of few rows, with one key or STEP elements of a value */
    SCORE_ROWS = 3, SCORE_KEYS = 4, /* a register tile of many rows' scores */
    VALUE_ROWS = 6, /* of a register tile of many rows, with STEP elements of a value */
};
_Static_assert(MAX_QUERY_ROWS % VALUE_ROWS == 0 && VALUE_ROWS % SCORE_ROWS == 0 && KEYS % SCORE_KEYS == 0, "whole tiles");

#ifdef __aarch64__
#define VARIANT attend_neon
#elif LANES == 16
#define VARIANT attend_avx512
#else
#define VARIANT attend_avx2
#endif

/* Query rows, of which those from `count` on see nothing. Elements are in the order of first() and second(). */
struct rows {
    long count, head_dim;
    long start[MAX_QUERY_ROWS], stop[MAX_QUERY_ROWS]; /* the positions a row sees */
    float largest[MAX_QUERY_ROWS], total[MAX_QUERY_ROWS];
    float rescale[MAX_QUERY_ROWS]; /* what the sums so far are multiplied with */
    float *scores, *q, *out;       /* [rows][KEYS], and two [rows][head_dim] */
};

/* The addresses of the keys and values [begin, end) of a chunk. `position` is that of its first one, which may be absent. */
struct chunk {
    long position, begin, end;
    const char *keys[KEYS], *values[KEYS];
};

static inline float exponential(float x)
{
    x = x < -87.0f ? -87.0f : x;
    const float n = rintf(x * LOG2_E);
    const float r = __builtin_fmaf(n, LN_2_LOW, __builtin_fmaf(n, -LN_2_HIGH, x));
    float p = exp_coefficients[0];
#pragma GCC unroll 8
    for (int i = 1; i < COEFFICIENTS; i++)
        p = __builtin_fmaf(p, r, exp_coefficients[i]);
    p = __builtin_fmaf(p * r, r, r + 1.0f);
    const int32_t bits = ((int32_t)n + 127) << 23;
    float power;
    memcpy(&power, &bits, sizeof power);
    return p * power;
}

INLINE void widen(const char *from, float *to, long head_dim, const int dtype)
{
    for (long d = 0; d < head_dim; d += STEP) {
        STORE(to + d, first(from + d * size_of(dtype), dtype));
        STORE(to + d + LANES, second(from + d * size_of(dtype), dtype));
    }
}

INLINE void load_rows(struct rows *rows, const struct attention *a, const struct query_rows *which, const int dtype)
{
    const long group = a->heads / a->kv_heads;
    for (long i = 0; i < which->count; i++) {
        const long row = which->first_row + i, token = which->first_token + row / group;
        const long head = which->kv_head * group + row % group;
        float *q = rows->q + i * a->head_dim;
        widen(a->q + token * a->q_stride + head * a->head_dim * size_of(dtype), q, a->head_dim, dtype);
        for (long d = 0; d < a->head_dim; d++)
            q[d] *= a->scale;
        memset(rows->out + i * a->head_dim, 0, (size_t)a->head_dim * sizeof(float));
        rows->largest[i] = a->sinks ? element(a->sinks, head, dtype) : -INFINITY;
        rows->total[i] = a->sinks ? 1.0f : 0.0f; /* of the weights, each relative to the largest score */
        rows->stop[i] = a->contexts[token];
        rows->start[i] = a->window && a->contexts[token] > a->window ? a->contexts[token] - a->window : 0;
    }
}

/* Let rows that fill up the last tile see nothing. */
INLINE void pad_rows(struct rows *rows)
{
    for (long i = rows->count; i % VALUE_ROWS; i++) {
        memset(rows->q + i * rows->head_dim, 0, (size_t)rows->head_dim * sizeof(float));
        memset(rows->out + i * rows->head_dim, 0, (size_t)rows->head_dim * sizeof(float));
        rows->largest[i] = -INFINITY;
        rows->total[i] = 0.0f;
        rows->start[i] = rows->stop[i] = 0;
    }
}

/* Turn scores of the rows [begin, end) into weights relative to the largest score so far, to which earlier sums are rescaled. */
static void soften(struct rows *rows, long position, long begin, long end)
{
    for (long r = begin; r < end; r++) {
        float *scores = rows->scores + r * KEYS;
        const long low = rows->start[r] - position, high = rows->stop[r] - position;
        if (low > 0 || high < KEYS)
            for (long j = 0; j < KEYS; j++)
                scores[j] = j >= low && j < high ? scores[j] : -INFINITY;
        vf most = SPLAT(rows->largest[r]), sum = ZERO();
        for (long j = 0; j < KEYS; j += LANES)
            most = MAX(LOAD(scores + j), most);
        const float largest = HIGHEST(most);
        rows->rescale[r] = rows->largest[r] == largest ? 1.0f : expf(rows->largest[r] - largest);
        if (largest == -INFINITY) { /* the row sees neither these keys nor any before */
            memset(scores, 0, KEYS * sizeof(float));
            continue;
        }
        for (long j = 0; j < KEYS; j++)
            scores[j] = scores[j] == -INFINITY ? 0.0f : exponential(scores[j] - largest);
        for (long j = 0; j < KEYS; j += LANES)
            sum += LOAD(scores + j);
        rows->total[r] = rows->total[r] * rows->rescale[r] + SUM(sum);
        rows->largest[r] = largest;
    }
}

INLINE void score(struct rows *rows, long row, const char *key, long number, const int dtype, const int count)
{
    const long depth = rows->head_dim;
    const float *q = rows->q + row * depth;
    vf acc[ROWS];
#pragma GCC unroll 8
    for (int r = 0; r < count; r++)
        acc[r] = ZERO();
    for (long d = 0; d < depth; d += STEP) {
        const vf even = first(key + d * size_of(dtype), dtype), odd = second(key + d * size_of(dtype), dtype);
#pragma GCC unroll 8
        for (int r = 0; r < count; r++) {
            acc[r] = FMA(LOAD(q + r * depth + d), even, acc[r]);
            acc[r] = FMA(LOAD(q + r * depth + d + LANES), odd, acc[r]);
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < count; r++)
        rows->scores[(row + r) * KEYS + number] = SUM(acc[r]);
}

INLINE void add_values(struct rows *rows, long row, const struct chunk *chunk, const int dtype, const int count)
{
    const long depth = rows->head_dim;
    float *out = rows->out + row * depth;
    for (long d = 0; d < depth; d += STEP) {
        vf low[ROWS], high[ROWS];
#pragma GCC unroll 8
        for (int r = 0; r < count; r++) {
            low[r] = LOAD(out + r * depth + d) * SPLAT(rows->rescale[row + r]);
            high[r] = LOAD(out + r * depth + d + LANES) * SPLAT(rows->rescale[row + r]);
        }
        for (long j = chunk->begin; j < chunk->end; j++) {
            const char *value = chunk->values[j] + d * size_of(dtype);
            const vf even = first(value, dtype), odd = second(value, dtype);
#pragma GCC unroll 8
            for (int r = 0; r < count; r++) {
                const vf weight = SPLAT(rows->scores[(row + r) * KEYS + j]);
                low[r] = FMA(weight, even, low[r]);
                high[r] = FMA(weight, odd, high[r]);
            }
        }
#pragma GCC unroll 8
        for (int r = 0; r < count; r++) {
            STORE(out + r * depth + d, low[r]);
            STORE(out + r * depth + d + LANES, high[r]);
        }
    }
}

/* The scores of SCORE_ROWS rows and the keys [begin, end), which are rounded to whole tiles. */
static __attribute__((noinline)) void score_tiles(const float *q, const float *keys, long depth, long begin, long end, float *scores)
{
    for (long k = begin / SCORE_KEYS * SCORE_KEYS; k < end; k += SCORE_KEYS) {
        const float *tile = keys + k * depth;
        vf acc[SCORE_ROWS][SCORE_KEYS];
#pragma GCC unroll 8
        for (int r = 0; r < SCORE_ROWS; r++)
#pragma GCC unroll 8
            for (int i = 0; i < SCORE_KEYS; i++)
                acc[r][i] = ZERO();
        for (long d = 0; d < depth; d += LANES) {
            vf row[SCORE_ROWS];
#pragma GCC unroll 8
            for (int r = 0; r < SCORE_ROWS; r++)
                row[r] = LOAD(q + r * depth + d);
#pragma GCC unroll 8
            for (int i = 0; i < SCORE_KEYS; i++) {
                const vf key = LOAD(tile + i * depth + d);
#pragma GCC unroll 8
                for (int r = 0; r < SCORE_ROWS; r++)
                    acc[r][i] = FMA(row[r], key, acc[r][i]);
            }
        }
#pragma GCC unroll 8
        for (int r = 0; r < SCORE_ROWS; r++)
            STORE_SUMS(scores + r * KEYS + k, acc[r][0], acc[r][1], acc[r][2], acc[r][3]);
    }
}

/* Add the weighted values [begin, end) to the rescaled sums of VALUE_ROWS rows. */
static __attribute__((noinline)) void value_tiles(const float *weights, const float *values, long depth, long begin, long end,
                                                  const float *rescale, float *out)
{
    for (long d = 0; d < depth; d += STEP) {
        const float *value = values + begin * depth + d;
        vf low[VALUE_ROWS], high[VALUE_ROWS];
#pragma GCC unroll 8
        for (int r = 0; r < VALUE_ROWS; r++) {
            low[r] = LOAD(out + r * depth + d) * SPLAT(rescale[r]);
            high[r] = LOAD(out + r * depth + d + LANES) * SPLAT(rescale[r]);
        }
        for (long j = begin; j < end; j++, value += depth) {
            const vf even = LOAD(value), odd = LOAD(value + LANES);
#pragma GCC unroll 8
            for (int r = 0; r < VALUE_ROWS; r++) {
                const vf weight = SPLAT(weights[r * KEYS + j]);
                low[r] = FMA(weight, even, low[r]);
                high[r] = FMA(weight, odd, high[r]);
            }
        }
#pragma GCC unroll 8
        for (int r = 0; r < VALUE_ROWS; r++) {
            STORE(out + r * depth + d, low[r]);
            STORE(out + r * depth + d + LANES, high[r]);
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
        const float *sums = rows->out + i * a->head_dim;
        for (long d = 0; d < a->head_dim; d += STEP) {
            float values[2][LANES];
            STORE(values[0], LOAD(sums + d) * SPLAT(factor));
            STORE(values[1], LOAD(sums + d + LANES) * SPLAT(factor));
            if (dtype == DTYPE_FP32)
                memcpy(out + d * 4, values, sizeof values);
            for (long l = 0; dtype == DTYPE_FP16 && l < STEP; l++) {
                const uint16_t narrowed = narrow(values[l / LANES][l % LANES], dtype);
                memcpy(out + (d + l) * 2, &narrowed, sizeof narrowed);
            }
            for (long l = 0; dtype == DTYPE_BF16 && l < LANES; l++) { /* the even and the odd elements */
                const uint32_t pair = narrow(values[0][l], dtype) | (uint32_t)narrow(values[1][l], dtype) << 16;
                memcpy(out + (d + 2 * l) * 2, &pair, sizeof pair);
            }
        }
    }
}

/* Find the places of a chunk's keys or values, and prefetch all at once: the hardware cannot guess where a head's next one is, and
 * a few query rows are done with one before the next has come from memory. */
INLINE void find_slots(const char **places, const struct chunk *chunk, const struct attention *a, const struct kv_pool *pool,
                       const int32_t *blocks, long head, const int dtype)
{
    long block = (chunk->position + chunk->begin) / a->block_size, slot = (chunk->position + chunk->begin) % a->block_size;
    for (long j = chunk->begin; j < chunk->end; j++) {
        places[j] = pool->data + blocks[block] * pool->block_stride + slot * pool->slot_stride + head * pool->head_stride;
        for (long byte = 0; byte < a->head_dim * size_of(dtype); byte += LINE)
            PREFETCH(places[j] + byte, 3);
        if (++slot == a->block_size) {
            slot = 0;
            block++;
        }
    }
}

INLINE void find_chunk(struct chunk *chunk, const struct attention *a, const int32_t *blocks, long start, long stop, long head,
                       const int dtype)
{
    chunk->position = start / KEYS * KEYS;
    chunk->begin = start - chunk->position;
    chunk->end = at_most(stop - chunk->position, KEYS);
    find_slots(chunk->keys, chunk, a, &a->keys, blocks, head, dtype);
    find_slots(chunk->values, chunk, a, &a->values, blocks, head, dtype);
}

#define EACH_ROW_TILE(work)                                                                                                    \
    for (long row = 0; row < rows->count; row += ROWS)                                                                         \
        switch (rows->count - row) {                                                                                           \
        case 1: work(1); break;                                                                                                \
        case 2: work(2); break;                                                                                                \
        case 3: work(3); break;                                                                                                \
        default: work(ROWS);                                                                                                   \
        }

INLINE void attend_few(struct rows *rows, const struct chunk *chunk, const int dtype)
{
    for (long j = chunk->begin; j < chunk->end; j++) {
#define SCORE(n) score(rows, row, chunk->keys[j], j, dtype, n)
        EACH_ROW_TILE(SCORE)
    }
    soften(rows, chunk->position, 0, rows->count);
#define ADD_VALUES(n) add_values(rows, row, chunk, dtype, n)
    EACH_ROW_TILE(ADD_VALUES)
}

static int sees_none(const struct rows *rows, long row, const struct chunk *chunk)
{
    return rows->stop[row] <= chunk->position + chunk->begin || rows->start[row] >= chunk->position + chunk->end;
}

/* `wide` has room for KEYS keys or values in fp32. Tiles at both ends that see none of them are left out. */
INLINE void attend_many(struct rows *rows, const struct chunk *chunk, float *wide, const int dtype)
{
    const long depth = rows->head_dim;
    long begin = 0, end = rows->count;
    while (begin < end && sees_none(rows, begin, chunk))
        begin++;
    while (begin < end && sees_none(rows, end - 1, chunk))
        end--;
    begin = begin / VALUE_ROWS * VALUE_ROWS;
    for (long j = chunk->begin; j < chunk->end; j++)
        widen(chunk->keys[j], wide + j * depth, depth, dtype);
    for (long row = begin; row < end; row += SCORE_ROWS)
        score_tiles(rows->q + row * depth, wide, depth, chunk->begin, chunk->end, rows->scores + row * KEYS);
    soften(rows, chunk->position, begin, (end + VALUE_ROWS - 1) / VALUE_ROWS * VALUE_ROWS);
    for (long j = chunk->begin; j < chunk->end; j++)
        widen(chunk->values[j], wide + j * depth, depth, dtype);
    for (long row = begin; row < end; row += VALUE_ROWS)
        value_tiles(rows->scores + row * KEYS, wide, depth, chunk->begin, chunk->end, rows->rescale + row, rows->out + row * depth);
}

/* `room` is for `most` rows, and then, unless they are few, for a chunk of keys or values. */
INLINE void attend(float *room, const long most, const struct attention *a, const struct query_rows *which, const int dtype)
{
    struct rows rows = {.count = which->count, .head_dim = a->head_dim, .scores = room};
    rows.q = rows.scores + most * KEYS;
    rows.out = rows.q + most * MAX_HEAD_DIM;
    load_rows(&rows, a, which, dtype);
    if (most != FEW_ROWS)
        pad_rows(&rows);
    const int32_t *blocks = a->block_tables + a->sequences[which->first_token] * a->block_table_stride;
    long start = rows.start[0], stop = rows.stop[0];
    for (long r = 1; r < rows.count; r++) {
        start = rows.start[r] < start ? rows.start[r] : start;
        stop = rows.stop[r] > stop ? rows.stop[r] : stop;
    }
    struct chunk chunk, next;
    find_chunk(&chunk, a, blocks, start, stop, which->kv_head, dtype);
    for (; start < stop; chunk = next) {
        start = chunk.position + chunk.end;
        if (start < stop)
            find_chunk(&next, a, blocks, start, stop, which->kv_head, dtype);
        if (most == FEW_ROWS)
            attend_few(&rows, &chunk, dtype);
        else
            attend_many(&rows, &chunk, rows.out + most * MAX_HEAD_DIM, dtype);
    }
    store_rows(&rows, a, which, dtype);
}

#define ROOM(rows) ((rows) * (KEYS + 2 * MAX_HEAD_DIM))
#define DEFINE(name, dtype)                                                                                                    \
    static __attribute__((noinline)) void many_##name(const struct attention *a, const struct query_rows *rows)                \
    {                                                                                                                          \
        __attribute__((aligned(LINE))) float room[ROOM(MAX_QUERY_ROWS) + KEYS * MAX_HEAD_DIM];                                 \
        attend(room, MAX_QUERY_ROWS, a, rows, dtype);                                                                          \
    }                                                                                                                          \
    static void attend_##name(const struct attention *a, const struct query_rows *rows)                                        \
    {                                                                                                                          \
        __attribute__((aligned(LINE))) float room[ROOM(FEW_ROWS)];                                                             \
        if (rows->count > FEW_ROWS)                                                                                            \
            many_##name(a, rows);                                                                                              \
        else                                                                                                                   \
            attend(room, FEW_ROWS, a, rows, dtype);                                                                            \
    }
DEFINE(bf16, DTYPE_BF16)
DEFINE(fp16, DTYPE_FP16)
DEFINE(fp32, DTYPE_FP32)

const attend_fn VARIANT[3] = {attend_bf16, attend_fp16, attend_fp32};

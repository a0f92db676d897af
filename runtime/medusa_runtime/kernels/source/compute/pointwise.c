/* The steps between the products of a decoder layer: norm, rope, gated activation, writes to the KV cache. They round where
 * torch's operations would: after every operation. For AVX2, which is as fast as memory here, and for NEON. */
#include <math.h>

#include "exponential.h"
#include "pointwise.h"
#include "rows.h"
#include "stored.h"

/* Sizes are multiples of LANES: pointwise.py and recording.py check it. */
#define EACH(i, size) for (long i = 0; i < (size); i += LANES)

/* Strides are in bytes from row to row. */
struct norm {
    char *out;
    const char *x, *weight;
    long size, heads, stride, head_stride; /* row r is head r % heads of the token r / heads; strides in bytes */
    float eps, offset; /* the offset is added to the weight */
    int once;          /* whether only the result is rounded, and not the factor that the weight is multiplied with */
};

INLINE void norm(const void *job, long row, long stop, const int dtype)
{
    const struct norm *n = job;
    for (; row < stop; row++) {
        const char *x = n->x + row / n->heads * n->stride + row % n->heads * n->head_stride;
        char *out = AT(n->out, row * n->size);
        vf sums[2] = {ZERO(), ZERO()};
        EACH(i, n->size)
        {
            const vf v = load(AT(x, i), dtype);
            sums[i / LANES % 2] = FMA(v, v, sums[i / LANES % 2]);
        }
        const vf scale = SPLAT(1.0f / sqrtf(SUM(sums[0] + sums[1]) / (float)n->size + n->eps));
        EACH(i, n->size)
        {
            const vf normed = load(AT(x, i), dtype) * scale, weight = load(AT(n->weight, i), dtype) + SPLAT(n->offset);
            store(AT(out, i), (n->once ? normed : rounded(normed, dtype)) * weight, dtype);
        }
    }
}
DEFINE(norm)

void medusa_norm(char *out, const char *x, const char *weight, long rows, long size, long heads, long stride, long head_stride,
                 float eps, float offset, int once, int dtype, int threads)
{
    const struct norm job = {out, x, weight, size, heads, stride, head_stride, eps, offset, once};
    spread_rows(norms[dtype], &job, rows, size, threads);
}

struct rope {
    char *x[2]; /* q and k [tokens][heads][head_dim] */
    const char *cos, *sin;
    long heads[2], stride[2];
    long head_dim, size; /* the first `size` of a head's dimensions are rotated */
};

INLINE void turn(char *x, const char *cos, const char *sin, long half, const int dtype)
{
    EACH(i, half)
    {
        const vf low = load(AT(x, i), dtype), high = load(AT(x, half + i), dtype);
        const vf turned_low = rounded(low * load(AT(cos, i), dtype), dtype) + high * load(AT(sin, i), dtype);
        const vf turned_high = rounded(high * load(AT(cos, half + i), dtype), dtype) + low * load(AT(sin, half + i), dtype);
        store(AT(x, i), turned_low, dtype);
        store(AT(x, half + i), turned_high, dtype);
    }
}

INLINE void rope(const void *job, long token, long stop, const int dtype)
{
    const struct rope *r = job;
    for (; token < stop; token++)
        for (int which = 0; which < 2; which++)
            for (long head = 0; head < r->heads[which]; head++)
                turn(AT(r->x[which] + token * r->stride[which], head * r->head_dim), AT(r->cos, token * r->size),
                     AT(r->sin, token * r->size), r->size / 2, dtype);
}
DEFINE(rope)

void medusa_rope(char *q, char *k, const char *cos, const char *sin, long tokens, long q_heads, long k_heads, long head_dim,
                 long size, long q_stride, long k_stride, int dtype, int threads)
{
    const struct rope job = {{q, k}, cos, sin, {q_heads, k_heads}, {q_stride, k_stride}, head_dim, size};
    spread_rows(ropes[dtype], &job, tokens, (q_heads + k_heads) * size, threads);
}

struct gate {
    char *out;
    const char *gate, *up;
    long size, gate_stride, up_stride;
};

/* exp(x); see exponential.h. */
INLINE vf exponential(vf x)
{
    x = CLAMP(x, -87.0f, 88.0f);
    const vf n = ROUND(x * SPLAT(LOG2_E));
    const vf r = (x - n * SPLAT(LN_2_HIGH)) + n * SPLAT(LN_2_LOW);
    vf p = SPLAT(exp_coefficients[0]);
#pragma GCC unroll 8
    for (int i = 1; i < COEFFICIENTS; i++)
        p = FMA(p, r, SPLAT(exp_coefficients[i]));
    p = FMA(p * r, r, r) + SPLAT(1.0f);
    return p * POWER_OF_TWO(n);
}

INLINE void gate(const void *job, long row, long stop, const int dtype)
{
    const struct gate *g = job;
    for (; row < stop; row++)
        EACH(i, g->size)
        {
            const vf x = load(AT(g->gate + row * g->gate_stride, i), dtype);
            const vf silu = rounded(x / (SPLAT(1.0f) + exponential(ZERO() - x)), dtype);
            store(AT(g->out, row * g->size + i), silu * load(AT(g->up + row * g->up_stride, i), dtype), dtype);
        }
}
DEFINE(gate)

void medusa_gate(char *out, const char *gate, const char *up, long rows, long size, long gate_stride, long up_stride, int dtype,
                 int threads)
{
    const struct gate job = {out, gate, up, size, gate_stride, up_stride};
    spread_rows(gates[dtype], &job, rows, size, threads);
}

struct add {
    char *out;
    const char *one, *other;
};

INLINE void add(const void *job, long row, long stop, const int dtype)
{
    const struct add *a = job;
    for (long i = row * LANES; i < stop * LANES; i += LANES)
        store(AT(a->out, i), load(AT(a->one, i), dtype) + load(AT(a->other, i), dtype), dtype);
}
DEFINE(add)

/* one + other, `count` elements each. */
void medusa_add(char *out, const char *one, const char *other, long count, int dtype, int threads)
{
    const struct add job = {out, one, other};
    spread_rows(adds[dtype], &job, count / LANES, LANES, threads);
}

/* Copy row i of k and v to slot slots[i] of the pools. Sizes and strides are in bytes. */
void medusa_write_kv(char *keys, char *values, const int64_t *slots, const char *k, const char *v, long tokens, long size,
                     long k_stride, long v_stride)
{
    for (long token = 0; token < tokens; token++) {
        memcpy(keys + slots[token] * size, k + token * k_stride, (size_t)size);
        memcpy(values + slots[token] * size, v + token * v_stride, (size_t)size);
    }
}

/* Layers that keep a state of a fixed size of each sequence, in place of keys and values: a short convolution over the last few
 * tokens, and linear attention, whose state is a matrix for each head (gated delta rule: Yang et al., 2024; without a rate it is
 * the recurrence of Mamba 2: Dao and Gu, 2024). For AVX2 and for NEON.
 *
 * The columns of a matrix do not depend on each other. So each is followed through all tokens of a sequence while a block of them
 * stays in the first-level cache, and a token has the same bits however its prompt is cut into steps. */
#include "recurrence.h"

#include "at_most.h"
#include "rows.h"
#include "stored.h"

enum {
    CHANNELS = 64, /* of a row of the convolution's work, */
    BLOCK = 4,     /* and vectors of columns of a row of the recurrence's */
};

/* How many elements a row of work has, where a token of a sequence has `each`. */
static long row_size(const struct steps *steps, long each) { return steps->starts[steps->count] / steps->count * each + 1; }

/* A row is CHANNELS channels of a sequence. */
INLINE void convolve_part(const struct convolution *c, long number, const int dtype)
{
    const long parts = (c->channels + CHANNELS - 1) / CHANNELS, span = number / parts, taps = c->taps;
    const long first = number % parts * CHANNELS, width = at_most(c->channels - first, CHANNELS);
    float weights[MAX_TAPS][CHANNELS];
    for (long i = 0; i < width; i++)
        for (long tap = 0; tap < taps; tap++)
            weights[tap][i] = element(c->weight, (first + i) * taps + tap, dtype);
    char *state = AT(c->states, c->steps.slots[span] * (taps - 1) * c->channels + first);
    const int fresh = !c->steps.begins[span];
    for (long i = 0; i < width; i += LANES) {
        const vf bias = c->bias ? load(AT(c->bias, first + i), dtype) : ZERO();
        vf seen[MAX_TAPS];
        for (long tap = 0; tap < taps - 1; tap++)
            seen[tap] = fresh ? ZERO() : load(AT(state, tap * c->channels + i), dtype);
        for (long token = c->steps.starts[span]; token < c->steps.starts[span + 1]; token++) {
            seen[taps - 1] = load(AT(c->x + token * c->stride, first + i), dtype);
            vf sum = bias;
            for (long tap = 0; tap < taps; tap++) {
                sum = FMA(LOAD(&weights[tap][i]), seen[tap], sum);
                seen[tap] = seen[tap + 1 < taps ? tap + 1 : tap];
            }
            store(AT(c->out, token * c->channels + first + i), sum, dtype);
        }
        for (long tap = 0; tap < taps - 1; tap++)
            store(AT(state, tap * c->channels + i), seen[tap], dtype);
    }
}

INLINE void convolve(const void *job, long number, long stop, const int dtype)
{
    for (; number < stop; number++)
        convolve_part(job, number, dtype);
}
DEFINE(convolve)

void medusa_convolve(const struct convolution *c, int dtype, int threads)
{
    const long parts = (c->channels + CHANNELS - 1) / CHANNELS;
    spread_rows(convolves[dtype], c, c->steps.count * parts, row_size(&c->steps, CHANNELS * c->taps), threads);
}

/* Follow `count` vectors of columns, from the column `first` on, of the matrix of one head through the tokens of a sequence. */
INLINE void follow(const struct recurrence *r, long span, long head, long first, const int count)
{
    const long width = r->value_dim, depth = r->key_dim, key_head = head / (r->heads / r->key_heads);
    float *state = r->states + (r->steps.slots[span] * r->heads + head) * depth * width + first;
    if (!r->steps.begins[span])
        for (long i = 0; i < depth; i++)
            for (int part = 0; part < count; part++)
                STORE(state + i * width + part * LANES, ZERO());
    for (long token = r->steps.starts[span]; token < r->steps.starts[span + 1]; token++) {
        const long row = token * r->heads + head;
        const float *q = r->q + (token * r->key_heads + key_head) * depth, *k = r->k + (token * r->key_heads + key_head) * depth;
        const vf decay = SPLAT(r->decay[row]);
        vf added[BLOCK], out[BLOCK];
        for (int part = 0; part < count; part++) {
            added[part] = LOAD(r->v + row * width + first + part * LANES);
            out[part] = ZERO();
        }
        if (r->rate) { /* what the state has under this key already is taken off */
            vf held[2][BLOCK]; /* even and odd rows, whose sums do not wait for each other */
            for (int part = 0; part < count; part++)
                held[0][part] = held[1][part] = ZERO();
            for (long i = 0; i < depth; i += 2)
                for (int part = 0; part < count; part++) {
                    const float *at = state + i * width + part * LANES;
                    held[0][part] = FMA(SPLAT(k[i]), LOAD(at), held[0][part]);
                    held[1][part] = FMA(SPLAT(k[i + 1]), LOAD(at + width), held[1][part]);
                }
            for (int part = 0; part < count; part++)
                added[part] = SPLAT(r->rate[row]) * (added[part] - decay * (held[0][part] + held[1][part]));
        }
        for (long i = 0; i < depth; i++) {
            const vf key = SPLAT(k[i]), query = SPLAT(q[i]);
            for (int part = 0; part < count; part++) {
                float *at = state + i * width + part * LANES;
                const vf next = FMA(key, added[part], decay * LOAD(at));
                STORE(at, next);
                out[part] = FMA(query, next, out[part]);
            }
        }
        for (int part = 0; part < count; part++)
            STORE(r->out + row * width + first + part * LANES, out[part]);
    }
}

/* A row is a block of columns of a head's matrix of a sequence. */
static void recur(const void *job, long number, long stop)
{
    const struct recurrence *r = job;
    const long width = BLOCK * LANES, blocks = (r->value_dim + width - 1) / width;
    for (; number < stop; number++) {
        const long span = number / blocks / r->heads, head = number / blocks % r->heads, first = number % blocks * width;
        if (first + width <= r->value_dim)
            follow(r, span, head, first, BLOCK);
        else
            for (long column = first; column < r->value_dim; column += LANES)
                follow(r, span, head, column, 1);
    }
}

void medusa_recur(const struct recurrence *r, int threads)
{
    const long width = BLOCK * LANES, blocks = (r->value_dim + width - 1) / width;
    spread_rows(recur, r, r->steps.count * r->heads * blocks, row_size(&r->steps, r->key_dim * BLOCK), threads);
}

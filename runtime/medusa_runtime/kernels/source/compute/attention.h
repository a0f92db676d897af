/* Declarations that the dispatcher (attention.c) and the instruction-set variants (attention_tile.c) share. */
#pragma once

#include <stdint.h>

#include "dtype.h"

enum { MAX_QUERY_ROWS = 96, MAX_HEAD_DIM = 256 };

/* A pool holds [blocks][block_size slots][kv_heads][head_dim] in any order of the first three; strides in bytes. */
struct kv_pool {
    const char *data;
    long block_stride, slot_stride, head_stride;
};

struct attention {
    const char *q; /* [tokens][heads][head_dim], heads contiguous */
    char *out;     /* the same shape, contiguous */
    const char *sinks; /* [heads], in the dtype of q: scores of a position without a value, or null */
    struct kv_pool keys, values;
    const int32_t *block_tables; /* [sequences][block_table_stride] */
    const int32_t *sequences;    /* [tokens]: row of block_tables */
    const int32_t *contexts;     /* [tokens]: how many tokens of its sequence a token sees, including itself */
    long q_stride;               /* bytes from token to token */
    long block_table_stride;
    long tokens, heads, kv_heads, head_dim, block_size;
    long window; /* a token sees only this many of them, the last ones; 0: all */
    float scale;
};

/* Rows of one kv head that share their keys: row i is token first_token + i / group, head i % group of the group. */
struct query_rows {
    long first_token, first_row, count, kv_head;
};

int medusa_attention(const struct attention *a, int dtype, int threads);

typedef void (*attend_fn)(const struct attention *, const struct query_rows *);

extern const attend_fn attend_avx2[3], attend_avx512[3], attend_neon[3]; /* indexed by dtype */

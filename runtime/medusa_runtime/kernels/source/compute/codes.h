/* Quantized weights as checkpoints store them. decode.h turns them into floats. */
#pragma once

#include <stdint.h>

/* How values are stored, as in load/quantized/codes.py: bytes, words of nibbles or bytes, or floats of 8 or 4 bits. The others
 * are ggml's blocks (blocks.h), as in load/quantized/block_codes.py. */
enum packing {
    SIGNED, UNSIGNED, TABLE, NIBBLES, DOWN4, DOWN8, INTERLEAVED, E4M3, E2M1,
    Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q2_K, Q3_K, Q4_K, Q5_K, Q6_K, IQ4_NL, IQ4_XS, MXFP4,
};

#define IS_BLOCKS(packing) ((packing) >= Q4_0)
/* Whether a block has 256 values, with several scales, and not 32 with one. */
#define HAS_MANY(packing) (((packing) >= Q2_K && (packing) <= Q6_K) || (packing) == IQ4_XS)
/* Whether a block's values are bytes with a sign, or come from a table of such bytes. */
#define HAS_SIGNED(packing) ((packing) == Q8_0 || (packing) >= IQ4_NL)

/* What medusa_dequantize makes of transposed codes beside floats (dtype.h): their integers, [columns, rows]. */
enum { AS_NIBBLES = 3, AS_BYTES = 4 };

/* A dtype of scales beside floats (dtype.h): bytes that are powers of two. */
enum { E8M0 = 3 };

#define DECODED 2048L /* the most values of a row that are decoded at a time */

/* A stored matrix [rows, columns]. Each scale is for a block of `high` rows and `wide` columns. ggml's blocks are the values of
 * a matrix that has nothing else, not even a scale. */
struct codes {
    const void *values;
    const void *scale, *zero;  /* zero may be null; with one_zero it is a single number for all */
    const int64_t *group_of;   /* the scale's column (transposed: row) for each stored column (row); may be null */
    const float *table;        /* the float that each of the 256 bytes stands for */
    const int64_t *order;      /* for AS_NIBBLES and AS_BYTES: the stored row that each result's column is; may be null */
    void *out;                 /* [rows, columns], or [columns, rows] if transposed */
    long rows, columns, high, wide, scale_columns;
    int one_zero, packing, transposed, dtype, scale_dtype, zero_dtype;
};

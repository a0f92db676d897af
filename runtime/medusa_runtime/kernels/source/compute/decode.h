/* The floats that quantized weights stand for: (value - zero) * scale in fp32. */
#pragma once

#include "at_most.h"
#include "blocks.h"
#include "codes.h"
#include "simd.h"

/* The bits of a value, in packings in which the values of a row follow each other. */
#define BITS(packing) ((packing) == NIBBLES || (packing) == E2M1 ? 4 : 8)

/* Bytes of that many neighbours of a row, in these packings and in blocks. */
INLINE long bytes_of(long values, int packing)
{
    return IS_BLOCKS(packing) ? values / block_values(packing) * block_bytes(packing) : values * BITS(packing) / 8;
}

/* A number of a group: its scale or its zero. */
INLINE float number_at(const void *numbers, long at, int dtype)
{
    if (dtype == DTYPE_FP32)
        return ((const float *)numbers)[at];
    if (dtype != E8M0)
        return widened(((const uint16_t *)numbers)[at], dtype);
    const uint32_t exponent = ((const uint8_t *)numbers)[at];
    const uint32_t bits = exponent == 255 ? 0x7fc00000u : exponent ? exponent << 23 : 0x00400000u;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

/* The numbers of a row's groups, of those that DECODED values may belong to in whole steps. */
struct numbers {
    float scale[DECODED / STEP + LANES], zero[DECODED / STEP + LANES];
};

INLINE void widen_numbers(const void *numbers, long at, long count, int dtype, float *to)
{
    long i = 0;
    if (dtype == DTYPE_BF16)
        for (; i + LANES <= count; i += LANES)
            STORE(to + i, WIDEN_BF16((const uint16_t *)numbers + at + i));
    else if (dtype == DTYPE_FP16)
        for (; i + LANES <= count; i += LANES)
            STORE(to + i, WIDEN_HALF((const uint16_t *)numbers + at + i));
    for (; i < count; i++)
        to[i] = number_at(numbers, at + i, dtype);
}

/* Read the numbers of the groups [first, first + count) of a row. line is where the scales of the row begin. */
static __attribute__((noinline)) void read_numbers(const struct codes *codes, long line, long first, long count,
                                                   float *scale, float *zero)
{
    widen_numbers(codes->scale, line + first, count, codes->scale_dtype, scale);
    if (codes->zero && !codes->one_zero) {
        widen_numbers(codes->zero, line + first, count, codes->zero_dtype, zero);
        return;
    }
    const float one = codes->zero ? number_at(codes->zero, 0, codes->zero_dtype) : 0.0f;
    for (long i = 0; i < count; i++)
        zero[i] = one;
}

#ifdef PICK_SIGNED
#define UP_TO_14(unit) 8 * unit, 9 * unit, 10 * unit, 11 * unit, 12 * unit, 13 * unit, 14 * unit
#define TWO_OCTAVES(unit) UP_TO_14(unit), 15 * unit, UP_TO_14(2 * unit), 15 * 2 * unit
/* Those without a sign. */
static const float e4m3_values[128] = {
    0, 0x1p-9f, 0x2p-9f, 0x3p-9f, 0x4p-9f, 0x5p-9f, 0x6p-9f, 0x7p-9f, TWO_OCTAVES(0x1p-9f), TWO_OCTAVES(0x1p-7f),
    TWO_OCTAVES(0x1p-5f), TWO_OCTAVES(0x1p-3f), TWO_OCTAVES(0x1p-1f), TWO_OCTAVES(0x1p1f), TWO_OCTAVES(0x1p3f),
    UP_TO_14(0x1p5f), __builtin_nanf(""),
};
#endif

static const float e2m1_values[16] = {0.0f,  0.5f,  1.0f,  1.5f,  2.0f,  3.0f,  4.0f,  6.0f,
                                      -0.0f, -0.5f, -1.0f, -1.5f, -2.0f, -3.0f, -4.0f, -6.0f};

/* Decode the values [begin, begin + count) of a row; begin is a multiple of 8. */
static void decode(const struct codes *codes, long row, long begin, long count, float *restrict out)
{
    const long columns = codes->columns;
    const uint8_t *bytes = (const uint8_t *)codes->values + row * columns + begin;
    const uint32_t *words = codes->values;
    switch (codes->packing) {
    case SIGNED:
        for (long i = 0; i < count; i++)
            out[i] = (float)(int8_t)bytes[i];
        break;
    case UNSIGNED:
        for (long i = 0; i < count; i++)
            out[i] = (float)bytes[i];
        break;
    case E4M3:
    case TABLE:
        for (long i = 0; i < count; i++)
            out[i] = codes->table[bytes[i]];
        break;
    case NIBBLES:
        bytes = (const uint8_t *)codes->values + (row * columns + begin) / 2;
        for (long i = 0; i < count / 2; i++) {
            out[2 * i] = (float)(bytes[i] & 15);
            out[2 * i + 1] = (float)(bytes[i] >> 4);
        }
        break;
    case E2M1:
        bytes = (const uint8_t *)codes->values + (row * columns + begin) / 2;
        for (long i = 0; i < count / 2; i++) {
            out[2 * i] = e2m1_values[bytes[i] & 15];
            out[2 * i + 1] = e2m1_values[bytes[i] >> 4];
        }
        break;
    case DOWN4:
        words += row / 8 * columns + begin;
        for (long i = 0, shift = row % 8 * 4; i < count; i++)
            out[i] = (float)(int)(words[i] >> shift & 15);
        break;
    case DOWN8:
        words += row / 4 * columns + begin;
        for (long i = 0, shift = row % 4 * 8; i < count; i++)
            out[i] = (float)(int)(words[i] >> shift & 255);
        break;
    default: /* INTERLEAVED: of eight values, first the even and then the odd ones */
        words += (row * columns + begin) / 8;
        for (long i = 0; i < count / 8; i++)
            for (long k = 0; k < 8; k++)
                out[8 * i + k] = (float)(int)(words[i] >> (k / 2 + k % 2 * 4) * 4 & 15);
    }
}

static void scale_values(const struct codes *codes, long row, long begin, long count, float *restrict values)
{
    const long line = (codes->transposed && codes->group_of ? codes->group_of[row] : row / codes->high) * codes->scale_columns;
    const long wide = codes->wide, first = begin / wide;
    float scale[DECODED], zero[DECODED];
    if (codes->group_of && !codes->transposed) {
        for (long i = 0; i < count; i++) {
            read_numbers(codes, line, codes->group_of[begin + i], 1, scale, zero);
            values[i] = (values[i] - zero[0]) * scale[0];
        }
        return;
    }
    read_numbers(codes, line, first, (begin + count - 1) / wide - first + 1, scale, zero);
    if (wide == 1)
        for (long i = 0; i < count; i++)
            values[i] = (values[i] - zero[i]) * scale[i];
    else
        for (long i = 0, group = 0; i < count; group++) {
            const long end = at_most((first + group + 1) * wide - begin, count);
            for (; i < end; i++)
                values[i] = (values[i] - zero[group]) * scale[group];
        }
}

/* LANES values of a row from its place `at` on, for packings in which the values of a row follow each other. */
INLINE vf values_at(const uint8_t *row, long at, const int packing)
{
    if (packing == NIBBLES)
        return TO_FLOAT(AND(nibbles(row + at / 2), SPLAT_INT(15)));
    if (packing == SIGNED)
        return TO_FLOAT(WIDEN_SIGNED(row + at));
    if (packing == E2M1) { /* as E4M3 below, with fewer bits */
        const vi nibble = nibbles(row + at / 2), sign = SHIFT_LEFT(AND(nibble, SPLAT_INT(8)), 28);
        return MUL(AS_FLOAT(OR(sign, SHIFT_LEFT(AND(nibble, SPLAT_INT(7)), 22))), SPLAT(0x1p126f));
    }
    if (packing == UNSIGNED)
        return TO_FLOAT(WIDEN_UNSIGNED(row + at));
    /* E4M3: the same bits as in fp32, whose exponent has another bias. There is no infinity. What looks like 480 is NaN: times
     * this factor it is infinite, and 448 is not. */
    const vi bits = AND(SHIFT_LEFT(WIDEN_SIGNED(row + at), 20), SPLAT_INT((int)0x87f00000u));
    const vf value = MUL(AS_FLOAT(bits), SPLAT(0x1p120f));
    return FMA(MUL(value, SPLAT(0x1.2p119f)), ZERO(), value);
}

/* What the values of one group are turned into floats by. */
struct group {
    vf zero, factor, table; /* the table has the float of each nibble, where PICK is */
    vi narrow_table;        /* the same in bf16, where PICK_BF16 is */
#ifdef PICK_SIGNED
    struct wide_table wide; /* has the float of each byte of E4M3 in bf16 */
#endif
};

INLINE struct group group_of(float scale, float zero, const int packing)
{
    struct group found = {.zero = SPLAT(zero), .factor = SPLAT(scale)};
#ifdef PICK
    if (packing == NIBBLES)
        found.table = MUL(SUB(COUNTED(), found.zero), found.factor);
    if (packing == E2M1)
        found.table = MUL(LOAD(e2m1_values), found.factor);
#endif
#ifdef PICK_BF16
    if (BITS(packing) == 4)
        found.narrow_table = BF16_TABLE(found.table);
#endif
#ifdef PICK_SIGNED
    if (packing == E4M3) {
        vi elements[4];
        for (int i = 0; i < 4; i++)
            elements[i] = TO_BF16(MUL(LOAD(e4m3_values + i * STEP), found.factor),
                                  MUL(LOAD(e4m3_values + i * STEP + LANES), found.factor));
        found.wide = wide_table(elements);
    }
#endif
    (void)packing;
    return found;
}

/* The floats of LANES values of a group. */
INLINE vf floats_at(const struct group *group, const uint8_t *row, long at, const int packing)
{
#ifdef PICK
    if (BITS(packing) == 4)
        return PICK(group->table, nibbles(row + at / 2));
#endif
    if (packing >= E4M3) /* has no zeros */
        return MUL(values_at(row, at, packing), group->factor);
    return MUL(SUB(values_at(row, at, packing), group->zero), group->factor);
}

#ifdef DOT_BF16
/* The floats of STEP values of a group in bf16. */
INLINE vi bf16_at(const struct group *group, const uint8_t *row, long at, const int packing)
{
#ifdef PICK_BF16
    if (BITS(packing) == 4)
        return PICK_BF16(group->narrow_table, nibbles_16(row + at / 2));
#endif
#ifdef PICK_SIGNED
    if (packing == E4M3)
        return PICK_SIGNED(&group->wide, row + at);
#endif
    return TO_BF16(floats_at(group, row, at, packing), floats_at(group, row, at + LANES, packing));
}
#endif

/* Write the floats of a part of a group, from out's element `to` on. count is a multiple of STEP. */
INLINE void decode_group(const struct group *group, const uint8_t *row, long at, long count, void *restrict out, long to,
                         const int packing, const int dtype)
{
#ifdef DOT_BF16
    if (dtype == DTYPE_BF16) {
        for (long i = 0; i < count; i += STEP)
            STORE_INT((uint16_t *)out + to + i, bf16_at(group, row, at + i, packing));
        return;
    }
#endif
    (void)dtype;
    for (long i = 0; i < count; i += LANES)
        STORE((float *)out + to + i, floats_at(group, row, at + i, packing));
}

/* Whether a row's values follow each other, in groups that are whole steps. */
INLINE int has_steps(const struct codes *codes)
{
    const int packing = codes->packing;
    return codes->wide % STEP == 0 && !codes->group_of &&
           (packing <= UNSIGNED || packing == NIBBLES || ((packing == E4M3 || packing == E2M1) && !codes->zero));
}

INLINE const uint8_t *row_of(const struct codes *codes, long row)
{
    return (const uint8_t *)codes->values + row * bytes_of(codes->columns, codes->packing);
}

/* Bytes of a scale. */
INLINE long scale_bytes(const struct codes *codes) { return codes->scale_dtype == E8M0 ? 1 : size_of(codes->scale_dtype); }

/* Where the scales of a row begin. */
INLINE long line_of(const struct codes *codes, long row) { return row / codes->high * codes->scale_columns; }

/* Write the floats of the values [begin, begin + count) of a row, in fp32, or in bf16 where DOT_BF16 is. begin is a multiple
 * of STEP, and count at most DECODED. Of blocks these are whole ones. */
INLINE void decode_row(const struct codes *codes, long row, long begin, long count, void *restrict out, const int dtype)
{
    if (IS_BLOCKS(codes->packing)) {
        decode_blocks(row_of(codes, row) + bytes_of(begin, codes->packing), count, out, codes->packing, dtype);
        return;
    }
    long done = 0;
    if (has_steps(codes) && count >= STEP) {
        const uint8_t *values = row_of(codes, row);
        const long first = begin / codes->wide;
        struct numbers numbers;
        read_numbers(codes, line_of(codes, row), first, (begin + count - 1) / codes->wide - first + 1, numbers.scale,
                     numbers.zero);
        for (long number = 0, run; count - done >= STEP; number++, done += run) {
            const long at = begin + done;
            run = at_most((first + number + 1) * codes->wide - at, (count - done) / STEP * STEP);
            const struct group group = group_of(numbers.scale[number], numbers.zero[number], codes->packing);
            switch (codes->packing) {
            case SIGNED: decode_group(&group, values, at, run, out, done, SIGNED, dtype); break;
            case UNSIGNED: decode_group(&group, values, at, run, out, done, UNSIGNED, dtype); break;
            case NIBBLES: decode_group(&group, values, at, run, out, done, NIBBLES, dtype); break;
            case E2M1: decode_group(&group, values, at, run, out, done, E2M1, dtype); break;
            default: decode_group(&group, values, at, run, out, done, E4M3, dtype);
            }
        }
    }
    if (done == count)
        return;
    float rest[DECODED];
    float *to = dtype == DTYPE_FP32 ? (float *)out + done : rest;
    decode(codes, row, begin + done, count - done, to);
    scale_values(codes, row, begin + done, count - done, to);
    for (long i = 0; dtype == DTYPE_BF16 && i < count - done; i++)
        ((uint16_t *)out)[done + i] = narrow(rest[i], DTYPE_BF16);
}

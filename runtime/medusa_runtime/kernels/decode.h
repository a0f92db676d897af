/* The floats that quantized weights stand for: (value - zero) * scale in fp32. */
#pragma once

#include "at_most.h"
#include "codes.h"
#include "simd.h"

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
    const float *scale = codes->scale + line, *zeros = codes->zero + (codes->zero && !codes->one_zero ? line : 0);
    if (codes->group_of && !codes->transposed) {
        for (long i = 0; i < count; i++) {
            const long group = codes->group_of[begin + i];
            const float zero = !codes->zero ? 0.0f : codes->one_zero ? zeros[0] : zeros[group];
            values[i] = (values[i] - zero) * scale[group];
        }
    } else if (codes->wide == 1 && codes->zero && !codes->one_zero) {
        for (long i = 0; i < count; i++)
            values[i] = (values[i] - zeros[begin + i]) * scale[begin + i];
    } else {
        for (long i = 0; i < count;) {
            const long group = (begin + i) / codes->wide, end = at_most((group + 1) * codes->wide - begin, count);
            const float zero = !codes->zero ? 0.0f : codes->one_zero ? zeros[0] : zeros[group], factor = scale[group];
            for (; i < end; i++)
                values[i] = (values[i] - zero) * factor;
        }
    }
}

/* LANES values of a row from its place `at` on, for packings in which the values of a row follow each other. */
INLINE vf values_at(const uint8_t *row, long at, const int packing)
{
    if (packing == NIBBLES)
        return TO_FLOAT(AND(nibbles(row + at / 2), SPLAT_INT(15)));
    if (packing == SIGNED)
        return TO_FLOAT(WIDEN_SIGNED(row + at));
    const vi bytes = WIDEN_UNSIGNED(row + at);
    if (packing == UNSIGNED)
        return TO_FLOAT(bytes);
    /* E4M3: the same bits as in fp32, whose exponent has another bias. There is no infinity, and all bits of a size are NaN. */
    const vi size = AND(bytes, SPLAT_INT(0x7f)), sign = SHIFT_LEFT(AND(bytes, SPLAT_INT(0x80)), 24);
    const vf value = MUL(AS_FLOAT(OR(sign, SHIFT_LEFT(size, 20))), SPLAT(0x1p120f));
    return AS_FLOAT(OR(AS_INT(value), AND(ALL_IF_EQUAL(size, SPLAT_INT(0x7f)), SPLAT_INT(0x7fc00000))));
}

/* Write two vectors in `dtype`, fp32 or bf16. */
INLINE void store_step(void *out, long at, vf low, vf high, const int dtype)
{
#ifdef STORE_BF16
    if (dtype == DTYPE_BF16) {
        STORE_BF16((uint16_t *)out + at, low, high);
        return;
    }
#endif
    (void)dtype;
    STORE((float *)out + at, low);
    STORE((float *)out + at + LANES, high);
}

/* Write the floats of a part of a row in which all values have one scale, from out's element `to` on. count is a multiple of
 * STEP. */
INLINE void scaled(const uint8_t *row, long at, long count, vf zero, vf factor, void *restrict out, long to, const int packing,
                   const int dtype)
{
#ifdef PICK
    if (packing == NIBBLES) { /* a nibble is one of only LANES floats */
        const vf table = MUL(SUB(COUNTED(), zero), factor);
#ifdef PICK_BF16
        if (dtype == DTYPE_BF16) {
            const vi narrow_table = BF16_TABLE(table);
#pragma GCC unroll 4
            for (long i = 0; i < count; i += STEP)
                STORE_INT((uint16_t *)out + to + i, PICK_BF16(narrow_table, nibbles_16(row + (at + i) / 2)));
            return;
        }
#endif
        for (long i = 0; i < count; i += STEP)
            store_step(out, to + i, PICK(table, nibbles(row + (at + i) / 2)), PICK(table, nibbles(row + (at + i + LANES) / 2)),
                       dtype);
        return;
    }
#endif
    for (long i = 0; i < count; i += STEP)
        store_step(out, to + i, MUL(SUB(values_at(row, at + i, packing), zero), factor),
                   MUL(SUB(values_at(row, at + i + LANES, packing), zero), factor), dtype);
}

/* Write the floats of the values [begin, begin + count) of a row, in fp32, or in bf16 where STORE_BF16 is. begin is a multiple
 * of STEP, and count at most DECODED. */
INLINE void decode_row(const struct codes *codes, long row, long begin, long count, void *restrict out, const int dtype)
{
    const int packing = codes->packing;
    long done = 0;
    if (codes->wide % STEP == 0 && !codes->group_of && (packing <= UNSIGNED || packing == NIBBLES || packing == E4M3)) {
        const uint8_t *values = (const uint8_t *)codes->values + row * codes->columns * (packing == NIBBLES ? 4 : 8) / 8;
        const long line = row / codes->high * codes->scale_columns;
        for (long group = begin / codes->wide, run; count - done >= STEP; group++, done += run) {
            const long at = begin + done;
            run = at_most((group + 1) * codes->wide - at, (count - done) / STEP * STEP);
            const vf zero = SPLAT(!codes->zero ? 0.0f : codes->zero[codes->one_zero ? 0 : line + group]);
            const vf factor = SPLAT(codes->scale[line + group]);
            switch (packing) {
            case SIGNED: scaled(values, at, run, zero, factor, out, done, SIGNED, dtype); break;
            case UNSIGNED: scaled(values, at, run, zero, factor, out, done, UNSIGNED, dtype); break;
            case NIBBLES: scaled(values, at, run, zero, factor, out, done, NIBBLES, dtype); break;
            default: scaled(values, at, run, zero, factor, out, done, E4M3, dtype);
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

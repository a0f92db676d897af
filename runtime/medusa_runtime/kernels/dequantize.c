/* Turns quantized weights into floats: (value - zero) * scale in fp32, rounded once. AVX2 and NEON suffice: memory is slower. */
#include <stdatomic.h>

#include "at_most.h"
#include "parallel.h"
#include "simd.h"

enum { SIGNED, UNSIGNED, TABLE, NIBBLES, DOWN4, DOWN8, INTERLEAVED }; /* as in load/quantized/codes.py */
enum { TILE_ROWS = 32, TILE_COLS = 64, CHUNK = 1024, TICKET = 1 << 16 };

/* A stored matrix [rows, columns]. Each scale is for a block of `high` rows and `wide` columns. */
struct codes {
    const void *values;
    const float *scale, *zero; /* zero may be null; with one_zero it is a single number for all */
    const int64_t *group_of;   /* the scale's column (transposed: row) for each stored column (row); may be null */
    const float *table;        /* the float that each of the 256 bytes stands for */
    void *out;                 /* [rows, columns], or [columns, rows] if transposed */
    long rows, columns, high, wide, scale_columns;
    int one_zero, packing, transposed, dtype;
};

struct run {
    const struct codes *codes;
    long step;
    atomic_long next;
};

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

static void narrow_all(const float *values, long count, void *out, int dtype)
{
    if (dtype == DTYPE_FP32) {
        memcpy(out, values, (size_t)count * sizeof(float));
        return;
    }
    uint16_t *to = out;
    long i = 0;
    if (dtype == DTYPE_FP16)
        for (; i + LANES <= count; i += LANES)
            STORE_HALF(to + i, LOAD(values + i));
    else
        for (; i + LANES <= count; i += LANES)
            for (long k = 0; k < LANES; k++)
                to[i + k] = narrow(values[i + k], DTYPE_BF16);
    for (; i < count; i++)
        to[i] = narrow(values[i], dtype);
}

static void rows_as_they_lie(const struct codes *codes, long first, long stop)
{
    const long size = size_of(codes->dtype);
    float values[CHUNK];
    for (long row = first; row < stop; row++)
        for (long begin = 0; begin < codes->columns; begin += CHUNK) {
            const long count = at_most(codes->columns - begin, CHUNK);
            decode(codes, row, begin, count, values);
            scale_values(codes, row, begin, count, values);
            narrow_all(values, count, (char *)codes->out + (row * codes->columns + begin) * size, codes->dtype);
        }
}

/* Write eight rows of eight numbers of 16 bits as columns. Strides are in numbers. */
static void transpose8(const uint16_t *from, uint16_t *to, long to_stride)
{
    v8 a[8], b[8];
    for (int i = 0; i < 8; i++)
        a[i] = LOAD_8(from + i * TILE_COLS);
    for (int i = 0; i < 4; i++) {
        b[2 * i] = LOW_16(a[2 * i], a[2 * i + 1]);
        b[2 * i + 1] = HIGH_16(a[2 * i], a[2 * i + 1]);
    }
    for (int i = 0; i < 8; i += 4)
        for (int half = 0; half < 2; half++) {
            a[i + 2 * half] = LOW_32(b[i + half], b[i + half + 2]);
            a[i + 2 * half + 1] = HIGH_32(b[i + half], b[i + half + 2]);
        }
    for (int i = 0; i < 4; i++) {
        STORE_8(to + 2 * i * to_stride, LOW_64(a[i], a[i + 4]));
        STORE_8(to + (2 * i + 1) * to_stride, HIGH_64(a[i], a[i + 4]));
    }
}

static void rows_as_columns(const struct codes *codes, long first, long stop)
{
    float values[TILE_COLS];
    _Alignas(64) uint16_t halves[TILE_ROWS][TILE_COLS];
    _Alignas(64) float floats[TILE_ROWS][TILE_COLS];
    const int wide = codes->dtype == DTYPE_FP32;
    for (; first < stop; first += TILE_ROWS)
        for (long begin = 0; begin < codes->columns; begin += TILE_COLS) {
            const long count = at_most(codes->columns - begin, TILE_COLS), rows = at_most(stop - first, TILE_ROWS);
            for (long row = 0; row < rows; row++) {
                decode(codes, first + row, begin, count, values);
                scale_values(codes, first + row, begin, count, values);
                narrow_all(values, count, wide ? (void *)floats[row] : halves[row], codes->dtype);
            }
            long done = 0;
            if (!wide && rows == TILE_ROWS)
                for (; done + 8 <= count; done += 8)
                    for (long row = 0; row < rows; row += 8)
                        transpose8(&halves[row][done], (uint16_t *)codes->out + (begin + done) * codes->rows + first + row,
                                   codes->rows);
            for (long i = done; i < count; i++) {
                const long to = (begin + i) * codes->rows + first;
                for (long row = 0; row < rows; row++)
                    if (wide)
                        ((float *)codes->out)[to + row] = floats[row][i];
                    else
                        ((uint16_t *)codes->out)[to + row] = halves[row][i];
            }
        }
}

static void take_rows(void *argument, int thread)
{
    (void)thread;
    struct run *run = argument;
    const struct codes *codes = run->codes;
    for (long row; (row = atomic_fetch_add(&run->next, run->step)) < codes->rows;)
        (codes->transposed ? rows_as_columns : rows_as_they_lie)(codes, row, at_most(row + run->step, codes->rows));
}

void medusa_dequantize(const struct codes *codes, int threads)
{
    const long rows = TICKET / codes->columns + 1;
    struct run run = {.codes = codes, .step = (rows + TILE_ROWS - 1) / TILE_ROWS * TILE_ROWS};
    medusa_spread(take_rows, &run, codes->rows > run.step ? threads : 1);
}

/* Turns quantized weights into floats: (value - zero) * scale in fp32, rounded once. AVX2 and NEON suffice: memory is slower. */
#include <stdatomic.h>

#include "decode.h"
#include "parallel.h"

enum { TILE_ROWS = 32, TILE_COLS = 64, CHUNK = 1024, TICKET = 1 << 16 };

struct run {
    const struct codes *codes;
    const int64_t *places; /* the rows that are gathered, count of them */
    long count, step;
    atomic_long next;
};

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

/* Write the floats of a row as row `to` of the result. */
static void row_as_it_lies(const struct codes *codes, long row, long to)
{
    float values[CHUNK];
    for (long begin = 0; begin < codes->columns; begin += CHUNK) {
        const long count = at_most(codes->columns - begin, CHUNK);
        decode_row(codes, row, begin, count, values, DTYPE_FP32);
        narrow_all(values, count, (char *)codes->out + (to * codes->columns + begin) * size_of(codes->dtype), codes->dtype);
    }
}

static void rows_as_they_lie(const struct codes *codes, long first, long stop)
{
    for (long row = first; row < stop; row++)
        row_as_it_lies(codes, row, row);
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
                decode_row(codes, first + row, begin, count, values, DTYPE_FP32);
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

static void integers_as_columns(const struct codes *codes, long first, long stop)
{
    float values[TILE_COLS];
    uint8_t bytes[TILE_COLS][TILE_ROWS], *out = codes->out;
    const int halves = codes->dtype == AS_NIBBLES;
    for (; first < stop; first += TILE_ROWS)
        for (long begin = 0; begin < codes->columns; begin += TILE_COLS) {
            const long count = at_most(codes->columns - begin, TILE_COLS), rows = at_most(stop - first, TILE_ROWS);
            for (long row = 0; row < rows; row++) {
                decode(codes, codes->order ? codes->order[first + row] : first + row, begin, count, values);
                for (long i = 0; i < count; i++)
                    bytes[i][row] = (uint8_t)(int)values[i];
            }
            for (long i = 0; i < count; i++) {
                uint8_t *to = out + ((begin + i) * codes->rows + first) / (halves ? 2 : 1);
                if (halves)
                    for (long row = 0; row < rows; row += 2)
                        to[row / 2] = (uint8_t)(bytes[i][row] | bytes[i][row + 1] << 4);
                else
                    memcpy(to, bytes[i], (size_t)rows);
            }
        }
}

static void take_rows(void *argument, int thread)
{
    (void)thread;
    struct run *run = argument;
    const struct codes *codes = run->codes;
    for (long row; (row = atomic_fetch_add(&run->next, run->step)) < codes->rows;)
        (!codes->transposed               ? rows_as_they_lie
         : codes->dtype >= AS_NIBBLES ? integers_as_columns
                                      : rows_as_columns)(codes, row, at_most(row + run->step, codes->rows));
}

void medusa_dequantize(const struct codes *codes, int threads)
{
    const long rows = TICKET / codes->columns + 1;
    struct run run = {.codes = codes, .step = (rows + TILE_ROWS - 1) / TILE_ROWS * TILE_ROWS};
    medusa_spread(take_rows, &run, codes->rows > run.step ? threads : 1);
}

static void take_places(void *argument, int thread)
{
    (void)thread;
    struct run *run = argument;
    for (long first; (first = atomic_fetch_add(&run->next, run->step)) < run->count;)
        for (long i = first; i < at_most(first + run->step, run->count); i++)
            row_as_it_lies(run->codes, run->places[i], i);
}

/* Write the floats of the rows `places` [count] to out [count, columns]. The codes are not transposed. Returns how many places
 * there are before the first that is no row; nothing is written unless all are rows. */
long medusa_gather(const struct codes *codes, const int64_t *places, long count, int threads)
{
    for (long i = 0; i < count; i++)
        if (places[i] < 0 || places[i] >= codes->rows)
            return i;
    struct run run = {.codes = codes, .places = places, .count = count, .step = TICKET / codes->columns + 1};
    medusa_spread(take_places, &run, count > run.step ? threads : 1);
    return count;
}

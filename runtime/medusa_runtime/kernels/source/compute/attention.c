/* Paged attention: spreads tiles of query rows over the threads. */
#include "attention.h"

#include <stdatomic.h>
#include <stdlib.h>

#include "at_most.h"
#include "parallel.h"

enum {
    SERIAL_KEYS = 1024, /* rows times keys below which waking threads costs more than it brings */
    EACH_TILES = 4,     /* of each thread at least, as some threads are held up, */
    LEAST_ROWS = 24,    /* unless they would be smaller: a tile's keys are widened once for all its rows */
};

struct run {
    const struct attention *attention;
    const struct query_rows *tiles;
    attend_fn attend;
    long count;
    atomic_long next;
};

static void attend_tiles(void *argument, int thread)
{
    (void)thread;
    struct run *run = argument;
    for (long tile; (tile = atomic_fetch_add(&run->next, 1)) < run->count;)
        run->attend(run->attention, &run->tiles[tile]);
}

/* How many rows a tile has at most. */
static long tile_rows(const struct attention *a, int threads)
{
    const long most = threads > 1 ? a->tokens * a->heads / (threads * EACH_TILES) : MAX_QUERY_ROWS;
    return at_most(most > LEAST_ROWS ? most : LEAST_ROWS, MAX_QUERY_ROWS);
}

/* Consecutive tokens of one sequence share their keys. Cut them into tiles of `most` rows, write the tiles if `tiles` is not null,
 * and return how many there are. */
static long cut(const struct attention *a, long most, struct query_rows *tiles)
{
    const long group = a->heads / a->kv_heads;
    long count = 0;
    for (long token = 0, end; token < a->tokens; token = end) {
        for (end = token + 1; end < a->tokens && a->sequences[end] == a->sequences[token];)
            end++;
        const long rows = (end - token) * group;
        for (long head = 0; head < a->kv_heads; head++)
            for (long row = 0; row < rows; row += most, count++)
                if (tiles)
                    tiles[count] = (struct query_rows){token, row, at_most(rows - row, most), head};
    }
    return count;
}

static attend_fn variant_for(const struct attention *a, int dtype)
{
#ifdef __aarch64__
    (void)a;
    return attend_neon[dtype];
#else
    const int wide = medusa_instruction_set == 512 && a->head_dim % 32 == 0;
    return (wide ? attend_avx512 : attend_avx2)[dtype];
#endif
}

/* Return 0 on success, 1 when memory ran out. */
int medusa_attention(const struct attention *a, int dtype, int threads)
{
    long work = 0;
    for (long token = 0; token < a->tokens; token++)
        work += a->contexts[token] * a->heads;
    const int wanted = work > SERIAL_KEYS ? threads : 1;
    const long most = tile_rows(a, wanted);
    struct run run = {.attention = a, .attend = variant_for(a, dtype), .count = cut(a, most, NULL)};
    struct query_rows *tiles = malloc((size_t)run.count * sizeof *tiles);
    if (!tiles)
        return 1;
    cut(a, most, tiles);
    run.tiles = tiles;
    medusa_spread(attend_tiles, &run, wanted);
    free(tiles);
    return 0;
}

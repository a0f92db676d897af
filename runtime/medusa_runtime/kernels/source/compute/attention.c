/* Paged attention: spreads tiles of query rows over the threads. */
#include "attention.h"

#include <stdatomic.h>
#include <stdlib.h>

#include "parallel.h"

enum { SERIAL_KEYS = 1024 }; /* rows times keys below which waking threads costs more than it brings */

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

/* Consecutive tokens of one sequence share their keys. Cut them into tiles of MAX_QUERY_ROWS rows, write the tiles if `tiles` is
 * not null, and return how many there are. */
static long cut(const struct attention *a, struct query_rows *tiles)
{
    const long group = a->heads / a->kv_heads;
    long count = 0;
    for (long token = 0, end; token < a->tokens; token = end) {
        for (end = token + 1; end < a->tokens && a->sequences[end] == a->sequences[token];)
            end++;
        const long rows = (end - token) * group;
        for (long head = 0; head < a->kv_heads; head++)
            for (long row = 0; row < rows; row += MAX_QUERY_ROWS, count++)
                if (tiles)
                    tiles[count] = (struct query_rows){token, row, rows - row < MAX_QUERY_ROWS ? rows - row : MAX_QUERY_ROWS, head};
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
    struct run run = {.attention = a, .attend = variant_for(a, dtype), .count = cut(a, NULL)};
    struct query_rows *tiles = malloc((size_t)run.count * sizeof *tiles);
    if (!tiles)
        return 1;
    cut(a, tiles);
    run.tiles = tiles;
    long work = 0;
    for (long token = 0; token < a->tokens; token++)
        work += a->contexts[token] * a->heads;
    medusa_spread(attend_tiles, &run, work > SERIAL_KEYS ? threads : 1);
    free(tiles);
    return 0;
}

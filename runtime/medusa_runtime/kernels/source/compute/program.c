/* A program: kernel calls that were recorded once, and run one after the other without the interpreter between them. So the
 * pool's threads find the next product while they still spin. */
#include "attention.h"
#include "linear.h"
#include "pointwise.h"

enum { INPUTS = 16 }; /* every real address is larger */

/* recording.py uses the same numbers. */
enum kind { PRODUCTS, NORM, ROPE, GATE, WRITE_KV, ADD, ATTENTION };

/* A kernel's arguments, by their types, each in their order. A place below INPUTS is the number of an input. */
struct call {
    const void *more; /* struct linear_part[], or struct attention */
    uintptr_t places[5];
    long numbers[8];
    float reals[2];
    int kind, dtype;
};

/* inputs[0] is null. inputs[1] is not an address but the stride of the block tables. Returns 0, or what the first failed call
 * returned. */
int medusa_run(const struct call *calls, long count, char *const *inputs, int threads)
{
    for (const struct call *c = calls; c < calls + count; c++) {
        char *p[5];
        const long *n = c->numbers;
        int failed = 0;
        for (int i = 0; i < 5; i++)
            p[i] = c->places[i] < INPUTS ? inputs[c->places[i]] : (char *)c->places[i];
        switch ((enum kind)c->kind) {
        case PRODUCTS:
            failed = medusa_products(p[0], p[1], c->more, n[0], p[2], n[1], n[2], n[3], n[4], c->dtype, threads);
            break;
        case NORM:
            medusa_norm(p[0], p[1], p[2], n[0], n[1], n[2], n[3], n[4], c->reals[0], c->reals[1], (int)n[5], c->dtype, threads);
            break;
        case ROPE:
            medusa_rope(p[0], p[1], p[2], p[3], n[0], n[1], n[2], n[3], n[4], n[5], n[6], c->dtype, threads);
            break;
        case GATE:
            medusa_gate(p[0], p[1], p[2], n[0], n[1], n[2], n[3], c->dtype, threads);
            break;
        case WRITE_KV:
            medusa_write_kv(p[0], p[1], (const int64_t *)p[2], p[3], p[4], n[0], n[1], n[2], n[3]);
            break;
        case ADD:
            medusa_add(p[0], p[1], p[2], n[0], c->dtype, threads);
            break;
        case ATTENTION: {
            struct attention job = *(const struct attention *)c->more;
            job.q = p[0];
            job.out = p[1];
            job.block_tables = (const int32_t *)p[2];
            job.sequences = (const int32_t *)p[3];
            job.contexts = (const int32_t *)p[4];
            job.block_table_stride = (long)inputs[1];
            failed = medusa_attention(&job, c->dtype, threads);
        }
        }
        if (failed)
            return failed;
    }
    return 0;
}

/* Calls the driver's functions that build graphs, and measures how long each takes (timed_driver.py). Several threads may call
 * them. The order is that of CALLS in state/graphs/compiled.py. */
#include <stddef.h>
#include <stdint.h>
#include <time.h>

enum { FUNCTIONS = 7 };

static void *functions[FUNCTIONS];
static _Atomic uint64_t calls[FUNCTIONS], spent_ns[FUNCTIONS];
static _Thread_local uint64_t thread_ns;

void medusa_timed_set(int number, void *function) { functions[number] = function; }
uint64_t medusa_timed_calls(int number) { return calls[number]; }
uint64_t medusa_timed_ns(int number) { return spent_ns[number]; }

/* Return how long this thread's calls took since it last asked. */
uint64_t medusa_timed_thread_ns(void)
{
    uint64_t spent = thread_ns;
    thread_ns = 0;
    return spent;
}

static uint64_t now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + now.tv_nsec;
}

#define TIMED(number, type, name, parameters, arguments) \
    int timed_##name parameters \
    { \
        uint64_t began = now_ns(); \
        int result = ((int (*) type)functions[number])arguments; \
        uint64_t spent = now_ns() - began; \
        spent_ns[number] += spent; \
        thread_ns += spent; \
        calls[number]++; \
        return result; \
    }

TIMED(0, (void *, void *, const void *, size_t, const void *), cuGraphAddKernelNode_v2,
      (void *node, void *graph, const void *after, size_t count, const void *params), (node, graph, after, count, params))
TIMED(1, (void *, void *, const void *, size_t, const void *, void *), cuGraphAddMemsetNode,
      (void *node, void *graph, const void *after, size_t count, const void *params, void *context),
      (node, graph, after, count, params, context))
TIMED(2, (void *, void *, const void *, size_t, const void *, void *), cuGraphAddMemcpyNode,
      (void *node, void *graph, const void *after, size_t count, const void *params, void *context),
      (node, graph, after, count, params, context))
TIMED(3, (void *, void *, const void *, size_t), cuGraphAddEmptyNode,
      (void *node, void *graph, const void *after, size_t count), (node, graph, after, count))
TIMED(4, (void *, int, const void *), cuGraphKernelNodeSetAttribute, (void *node, int attribute, const void *value),
      (node, attribute, value))
TIMED(5, (void *, const void *, const void *, const void *, size_t), cuGraphAddDependencies_v2,
      (void *graph, const void *from, const void *to, const void *data, size_t count), (graph, from, to, data, count))
TIMED(6, (void *, void *), cuTensorMapReplaceAddress, (void *map, void *address), (map, address))

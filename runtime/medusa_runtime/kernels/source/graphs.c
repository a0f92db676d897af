/* Checks the tables of CUDA graphs that were read from a file, and builds the graphs (state/graphs/compiled.py): one call a
 * graph, because a start adds tens of thousands of nodes. The driver's functions are passed in, so nothing here needs libcuda.
 *
 * Every reference in a table is checked before it is followed. A wrong one would become a wrong address in the process. */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

/* As in CUgraphNodeType. */
enum kind { KERNEL = 0, MEMCPY = 1, MEMSET = 2, EMPTY = 5 };
/* The sizes of CUDA_MEMSET_NODE_PARAMS, CUDA_MEMCPY3D, CUtensorMap and CUlaunchAttributeValue, and two launch attributes. */
enum { MEMSET_BYTES = 40, MEMCPY_BYTES = 200, MAP_BYTES = 128, ATTRIBUTE_BYTES = 64, PROGRAMMATIC = 6, PRIORITY = 8 };
/* Of CUtensorMap, since CUDA 13. Other structures need 8 bytes. */
enum { ALIGNMENT = 128 };

/* Rows of the tables, as state/graphs/tables.py packs them. */
struct node {
    uint16_t kind, attributes; /* the number of a set */
    int32_t kernel;
    uint32_t grid[3], block[3], shared_bytes;
    uint32_t start, size; /* its bytes in the blob */
};
struct edge {
    uint32_t source, target;
    uint64_t data; /* CUgraphEdgeData */
};
struct relocation {
    uint32_t position, range;
    uint64_t offset, map;
};

/* What all graphs of a bundle refer to. */
struct range {
    uint64_t address, size; /* the address is 0 as long as it is not known where the range is */
};
struct kernel {
    void *func, *kern;
    uint64_t bytes; /* up to the end of the last parameter */
    const uint64_t *offsets; /* of the parameters; there is at least one */
    uint64_t parameters;
};
struct attribute {
    int64_t number;
    uint8_t value[ATTRIBUTE_BYTES];
};
struct attribute_set {
    const struct attribute *first;
    uint64_t count;
};
struct bundle {
    const struct range *ranges;
    const struct kernel *kernels;
    const struct attribute_set *sets;
    uint64_t range_count, kernel_count, set_count;
};

struct graph {
    const uint8_t *nodes, *edges, *relocations, *blob;
    uint64_t node_count, edge_count, relocation_count, blob_bytes;
};

/* CUDA_KERNEL_NODE_PARAMS_v2 */
struct kernel_node {
    void *func;
    uint32_t grid[3], block[3], shared_bytes;
    void **params, **extra;
    void *kern, *context;
};

/* The driver's functions, by their names. Each returns a CUresult. */
struct driver {
    int (*cuGraphAddKernelNode_v2)(void **node, void *graph, void *const *after, size_t count, const void *params);
    int (*cuGraphAddMemsetNode)(void **node, void *graph, void *const *after, size_t count, const void *params, void *context);
    int (*cuGraphAddMemcpyNode)(void **node, void *graph, void *const *after, size_t count, const void *params, void *context);
    int (*cuGraphAddEmptyNode)(void **node, void *graph, void *const *after, size_t count);
    int (*cuGraphKernelNodeSetAttribute)(void *node, int attribute, const void *value);
    int (*cuGraphAddDependencies_v2)(void *graph, void *const *from, void *const *to, const void *data, size_t count);
    int (*cuTensorMapReplaceAddress)(void *map, void *address);
};
/* Which of them failed, in the same order. */
enum call { ADD_KERNEL, ADD_MEMSET, ADD_MEMCPY, ADD_EMPTY, SET_ATTRIBUTE, ADD_DEPENDENCIES, REPLACE_ADDRESS };

struct build_job {
    const struct graph *graph;
    const struct bundle *bundle;
    const struct driver *driver;
    void *context, *made; /* the CUgraph, which is empty before */
    /* Results. After REFUSED: the CUresult, the call, and the number of the node, or of the relocation to a tensor map. */
    int64_t number;
    int result, call;
    int has_priority; /* whether a node has a priority of its own */
};

/* compiled.py has the same. */
enum status { DONE, WRONG_NODE, WRONG_PARAMETERS, WRONG_EDGE, WRONG_RELOCATION, NO_MEMORY, REFUSED };

_Static_assert(sizeof(struct node) == 44 && sizeof(struct edge) == 16 && sizeof(struct relocation) == 24, "rows have no gaps");
_Static_assert(sizeof(struct kernel_node) == 72, "as cuda.h has it");

/* Raised with every change of the structures and functions. */
int medusa_graphs_interface(void)
{
    return 1;
}

/* Rows are copied, since a table may begin anywhere. */
static struct node node_at(const struct graph *graph, uint64_t number)
{
    struct node node;
    memcpy(&node, graph->nodes + number * sizeof node, sizeof node);
    return node;
}

static struct edge edge_at(const struct graph *graph, uint64_t number)
{
    struct edge edge;
    memcpy(&edge, graph->edges + number * sizeof edge, sizeof edge);
    return edge;
}

static struct relocation relocation_at(const struct graph *graph, uint64_t number)
{
    struct relocation relocation;
    memcpy(&relocation, graph->relocations + number * sizeof relocation, sizeof relocation);
    return relocation;
}

static enum status check_node(const struct node *node, const struct graph *graph, const struct bundle *bundle)
{
    uint64_t needed = 0;
    if (node->attributes >= bundle->set_count || (uint64_t)node->start + node->size > graph->blob_bytes)
        return WRONG_NODE;
    if (node->kind == KERNEL) {
        if (node->kernel < 0 || (uint64_t)node->kernel >= bundle->kernel_count)
            return WRONG_NODE;
        needed = bundle->kernels[node->kernel].bytes;
    } else if (node->kernel != -1)
        return WRONG_NODE;
    else if (node->kind == MEMSET)
        needed = MEMSET_BYTES;
    else if (node->kind == MEMCPY)
        needed = MEMCPY_BYTES;
    else if (node->kind != EMPTY)
        return WRONG_NODE;
    return node->size < needed ? WRONG_PARAMETERS : DONE;
}

/* Returns DONE only if every reference in a graph's tables is to something that exists. Sets the marks of kernels and ranges that
 * the graph uses to 1, if there are marks: a byte for each of the bundle's. */
int medusa_check_graph(const struct graph *graph, const struct bundle *bundle, uint8_t *kernels, uint8_t *ranges)
{
    for (uint64_t i = 0; i < graph->node_count; i++) {
        struct node node = node_at(graph, i);
        enum status status = check_node(&node, graph, bundle);
        if (status != DONE)
            return status;
        if (kernels && node.kind == KERNEL)
            kernels[node.kernel] = 1;
    }
    for (uint64_t i = 0; i < graph->edge_count; i++) {
        struct edge edge = edge_at(graph, i);
        if (edge.source >= graph->node_count || edge.target >= graph->node_count)
            return WRONG_EDGE;
    }
    for (uint64_t i = 0; i < graph->relocation_count; i++) {
        struct relocation r = relocation_at(graph, i);
        if (r.map > 1 || r.position + (r.map ? MAP_BYTES : sizeof(uint64_t)) > graph->blob_bytes)
            return WRONG_RELOCATION;
        if (r.range >= bundle->range_count || r.offset > bundle->ranges[r.range].size)
            return WRONG_RELOCATION;
        if (ranges)
            ranges[r.range] = 1;
    }
    return DONE;
}

static enum status refuse(struct build_job *job, enum call call, int result, int64_t number)
{
    job->call = call;
    job->result = result;
    job->number = number;
    return REFUSED;
}

static enum status relocate(struct build_job *job, uint8_t *blob)
{
    for (uint64_t i = 0; i < job->graph->relocation_count; i++) {
        struct relocation r = relocation_at(job->graph, i);
        if (!job->bundle->ranges[r.range].address)
            return WRONG_RELOCATION;
        uint64_t address = job->bundle->ranges[r.range].address + r.offset;
        if (!r.map) {
            memcpy(blob + r.position, &address, sizeof address);
            continue;
        }
        _Alignas(ALIGNMENT) uint8_t map[MAP_BYTES];
        memcpy(map, blob + r.position, sizeof map);
        int result = job->driver->cuTensorMapReplaceAddress(map, (void *)address);
        if (result)
            return refuse(job, REPLACE_ADDRESS, result, (int64_t)i);
        memcpy(blob + r.position, map, sizeof map);
    }
    return DONE;
}

static enum status add_kernel(struct build_job *job, const struct node *node, uint64_t number, uint8_t *blob, void **parameters,
                              void **handle)
{
    const struct kernel *kernel = &job->bundle->kernels[node->kernel];
    struct kernel_node params = {.func = kernel->func, .kern = kernel->kern, .params = parameters, .context = job->context};
    memcpy(params.grid, node->grid, sizeof params.grid);
    memcpy(params.block, node->block, sizeof params.block);
    params.shared_bytes = node->shared_bytes;
    for (uint64_t i = 0; i < kernel->parameters; i++)
        parameters[i] = blob + node->start + kernel->offsets[i];
    int result = job->driver->cuGraphAddKernelNode_v2(handle, job->made, NULL, 0, &params); /* copies the parameters */
    if (result)
        return refuse(job, ADD_KERNEL, result, (int64_t)number);
    const struct attribute_set *set = &job->bundle->sets[node->attributes];
    for (uint64_t i = 0; i < set->count; i++) {
        const struct attribute *a = &set->first[i];
        result = job->driver->cuGraphKernelNodeSetAttribute(*handle, (int)a->number, a->value);
        /* Some drivers know this one only for launches. The edges say the same. */
        if (result && a->number != PROGRAMMATIC)
            return refuse(job, SET_ATTRIBUTE, result, (int64_t)number);
        job->has_priority |= a->number == PRIORITY;
    }
    return DONE;
}

static enum status add_node(struct build_job *job, uint64_t number, uint8_t *blob, void **parameters, void **handle)
{
    struct node node = node_at(job->graph, number);
    uint64_t structure[MEMCPY_BYTES / sizeof(uint64_t)]; /* aligned, which the blob's may not be */
    enum call call = node.kind == MEMSET ? ADD_MEMSET : node.kind == MEMCPY ? ADD_MEMCPY : ADD_EMPTY;
    int result;
    switch ((enum kind)node.kind) {
    case KERNEL:
        return add_kernel(job, &node, number, blob, parameters, handle);
    case MEMSET:
        memcpy(structure, blob + node.start, MEMSET_BYTES);
        result = job->driver->cuGraphAddMemsetNode(handle, job->made, NULL, 0, structure, job->context);
        break;
    case MEMCPY:
        memcpy(structure, blob + node.start, MEMCPY_BYTES);
        result = job->driver->cuGraphAddMemcpyNode(handle, job->made, NULL, 0, structure, job->context);
        break;
    default:
        result = job->driver->cuGraphAddEmptyNode(handle, job->made, NULL, 0);
    }
    return result ? refuse(job, call, result, (int64_t)number) : DONE;
}

/* Add the edges, with one call for each value of their data: drivers from 580.126 to 610.57 give all edges of a call the data
 * of its first one (found by Foundry). `room` is for three words an edge, and `added` for a byte, which is 0. */
static enum status connect_nodes(struct build_job *job, void *const *handles, uint64_t *room, uint8_t *added)
{
    const struct graph *graph = job->graph;
    void **from = (void **)room, **to = from + graph->edge_count;
    uint64_t *data = room + 2 * graph->edge_count;
    for (uint64_t first = 0; first < graph->edge_count; first++) {
        uint64_t count = 0, kind = edge_at(graph, first).data;
        if (added[first])
            continue;
        for (uint64_t i = first; i < graph->edge_count; i++) {
            struct edge edge = edge_at(graph, i);
            if (edge.data != kind)
                continue;
            from[count] = handles[edge.source];
            to[count] = handles[edge.target];
            data[count++] = kind;
            added[i] = 1;
        }
        int result = job->driver->cuGraphAddDependencies_v2(job->made, from, to, data, count);
        if (result)
            return refuse(job, ADD_DEPENDENCIES, result, -1);
    }
    return DONE;
}

/* Check a graph, relocate its parameters, and add its nodes, their attributes, and its edges to an empty CUgraph. The addresses
 * and handles of what it uses must be there. The caller destroys the CUgraph, also after a failure. */
int medusa_build_graph(struct build_job *job)
{
    const struct graph *graph = job->graph;
    int status = medusa_check_graph(graph, job->bundle, NULL, NULL);
    if (status != DONE)
        return status;
    uint64_t most = 1;
    for (uint64_t i = 0; i < job->bundle->kernel_count; i++)
        if (job->bundle->kernels[i].parameters > most)
            most = job->bundle->kernels[i].parameters;
    uint8_t *blob = malloc(graph->blob_bytes + 1);
    void **handles = calloc(graph->node_count + 1, sizeof *handles);
    void **parameters = calloc(most, sizeof *parameters);
    uint64_t *room = calloc(graph->edge_count + 1, 3 * sizeof *room);
    uint8_t *added = calloc(graph->edge_count + 1, 1);
    if (!blob || !handles || !parameters || !room || !added)
        status = NO_MEMORY;
    if (status == DONE) {
        memcpy(blob, graph->blob, graph->blob_bytes);
        status = relocate(job, blob);
    }
    for (uint64_t i = 0; status == DONE && i < graph->node_count; i++)
        status = add_node(job, i, blob, parameters, &handles[i]);
    if (status == DONE)
        status = connect_nodes(job, handles, room, added);
    free(blob);
    free(handles);
    free(parameters);
    free(room);
    free(added);
    return status;
}

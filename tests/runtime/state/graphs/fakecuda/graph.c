#include "fakecuda.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

typedef struct {
  Node *nodes;
  int count, launched, destroyed; // how often it is still to run
  atomic_int in_use;
} Exec;

void enter_alone(atomic_int *in_use, const char *function) {
  if (!atomic_exchange(in_use, 1)) return;
  fprintf(stderr, "%s: another thread uses the same graph\n", function);
  abort();
}

int node_index(Graph *graph, void *handle) {
  Node *node = handle_get(NODE, handle);
  return node && node->graph == graph ? node->number : -1;
}

CUresult graph_add(Graph *graph, Node *node, const int *dependencies, const EdgeData *data, int count, void **handle) {
  graph->nodes = realloc(graph->nodes, (graph->node_count + 1) * sizeof *graph->nodes);
  node->graph = graph, node->number = graph->node_count;
  graph->nodes[graph->node_count++] = node;
  node->handle = handle_new(NODE, node);
  graph->edges = realloc(graph->edges, (graph->edge_count + count + 1) * sizeof(Edge));
  for (int i = 0; i < count; i++)
    graph->edges[graph->edge_count++] = (Edge){dependencies[i], graph->node_count - 1, data ? data[i] : (EdgeData){0}};
  if (handle) *handle = node->handle;
  return CUDA_SUCCESS;
}

// What a kernel is allowed. A launch of a CUkernel counts what was set on it; a node is added with its function in the
// context, which knows only what was set on itself (seen by Foundry on drivers 580 and later).
static int allowed(const Function *function, int attribute, int launched) {
  int own = function->attributes[attribute], kernel = function->of_kernel[attribute];
  return launched && kernel > own ? kernel : own;
}
unsigned cluster_blocks(const void *attribute) {
  unsigned size[3], blocks = 1;
  memcpy(size, attribute, sizeof size);
  for (int i = 0; i < 3; i++) blocks *= size[i] ? size[i] : 1;
  return blocks;
}
CUresult cluster_allowed(const Node *node, unsigned blocks, int launched) {
  if (blocks <= PORTABLE_CLUSTER || allowed(node->target, FUNCTION_NON_PORTABLE_CLUSTER, launched)) return CUDA_SUCCESS;
  return CUDA_ERROR_INVALID_CLUSTER_SIZE;
}

// Copies the parameters, as the driver does; they may come as pointers or as one packed buffer.
CUresult node_of_kernel(const KernelNodeParams *params, int launched, Node **made) {
  Function *function = function_of(params->func, params->kern);
  if (!function) return CUDA_ERROR_INVALID_HANDLE;
  if ((int)params->shared_bytes > 48 << 10 &&
      (int)params->shared_bytes > allowed(function, FUNCTION_MAX_DYNAMIC_SHARED, launched))
    return CUDA_ERROR_INVALID_VALUE;
  const uint8_t *packed = NULL;
  for (void **at = params->extra; at && *at; at += 2)
    if (*at == (void *)1) packed = at[1];
  if (!packed && !params->params) return CUDA_ERROR_INVALID_VALUE;
  Node *node = calloc(1, sizeof *node);
  node->type = NODE_KERNEL, node->target = function, node->by_kernel = !params->func, node->kernel = *params;
  node->kernel.extra = NULL, node->kernel.params = node->pointers;
  for (int i = 0; i < function->count; i++) {
    node->pointers[i] = node->storage + function->offset[i];
    memcpy(node->pointers[i], packed ? packed + function->offset[i] : params->params[i], function->size[i]);
  }
  return *made = node, CUDA_SUCCESS;
}

static int is(const char *name, const char *variable) { return getenv(variable) && !strcmp(getenv(variable), name); }

CUresult node_run(Node *node) {
  if (node->type == NODE_KERNEL) {
    unsigned cluster = *(unsigned *)node->attributes[ATTRIBUTE_CLUSTER];
    if (!is_loaded(node->target)) return CUDA_ERROR_ILLEGAL_ADDRESS; // its code is no longer there
    if (!node->target->host || !node->target->image) return CUDA_ERROR_NO_BINARY_FOR_GPU;
    if (!node->captured && is(node->target->name, "FAKE_CUDA_FAULT")) return CUDA_ERROR_ILLEGAL_ADDRESS;
    while (!node->captured && is(node->target->name, "FAKE_CUDA_HANG")) sleep(1);
    Launch launch = {node->kernel.params, {node->kernel.grid[0], node->kernel.grid[1], node->kernel.grid[2]}, cluster ? cluster : 1,
                     constants_of(node->target)};
    return node->target->host(&launch);
  }
  if (node->type == NODE_MEMSET) {
    MemsetNodeParams *m = &node->memset;
    if (!device_range(m->dst, m->width * m->element_size)) return CUDA_ERROR_ILLEGAL_ADDRESS;
    for (size_t i = 0; i < m->width; i++) memcpy((uint8_t *)m->dst + i * m->element_size, &m->value, m->element_size);
  }
  if (node->type == NODE_MEMCPY) {
    Memcpy3D *m = &node->memcpy;
    if (!device_range(m->src.device, m->width_bytes) || !device_range(m->dst.device, m->width_bytes)) return CUDA_ERROR_ILLEGAL_ADDRESS;
    memmove((void *)m->dst.device, (void *)m->src.device, m->width_bytes);
  }
  return CUDA_SUCCESS;
}

static CUresult add(void **handle, void *graph, void *const *dependencies, size_t count, Node *node) {
  Graph *home = handle_get(GRAPH, graph);
  int indices[64];
  if (!home || count > 64) return free(node), CUDA_ERROR_INVALID_HANDLE;
  ONE_THREAD(home);
  for (size_t i = 0; i < count; i++)
    if ((indices[i] = node_index(home, dependencies[i])) < 0) return free(node), CUDA_ERROR_INVALID_VALUE;
  return graph_add(home, node, indices, NULL, count, handle);
}

static Node *node_new(int type) {
  Node *node = calloc(1, sizeof *node);
  node->type = type;
  return node;
}

CUresult cuGraphCreate(void **graph, unsigned flags) {
  return *graph = handle_new(GRAPH, calloc(1, sizeof(Graph))), CUDA_SUCCESS;
}
CUresult cuGraphDestroy(void *graph) {
  Graph *home = handle_get(GRAPH, graph);
  if (!home) return CUDA_ERROR_INVALID_HANDLE;
  enter_alone(&home->in_use, __func__);
  handle_free(graph);
  for (int i = 0; i < home->node_count; i++) handle_free(home->nodes[i]->handle), free(home->nodes[i]);
  return free(home->nodes), free(home->edges), free(home), CUDA_SUCCESS;
}
CUresult cuGraphAddKernelNode_v2(void **handle, void *graph, void *const *deps, size_t count, const KernelNodeParams *params) {
  Node *node;
  CUresult result = node_of_kernel(params, 0, &node);
  return result ? result : add(handle, graph, deps, count, node);
}
CUresult cuGraphAddMemsetNode(void **handle, void *graph, void *const *deps, size_t count, const MemsetNodeParams *params, void *ctx) {
  Node *node = node_new(NODE_MEMSET);
  node->memset = *params;
  return ctx ? add(handle, graph, deps, count, node) : CUDA_ERROR_INVALID_CONTEXT;
}
CUresult cuGraphAddMemcpyNode(void **handle, void *graph, void *const *deps, size_t count, const Memcpy3D *params, void *ctx) {
  Node *node = node_new(NODE_MEMCPY);
  node->memcpy = *params;
  return ctx ? add(handle, graph, deps, count, node) : CUDA_ERROR_INVALID_CONTEXT;
}
CUresult cuGraphAddEmptyNode(void **handle, void *graph, void *const *deps, size_t count) {
  return add(handle, graph, deps, count, node_new(NODE_EMPTY));
}
// Nodes of other kinds, to be refused: their parameters are not looked at.
CUresult cuGraphAddNode_v2(void **handle, void *graph, void *const *deps, const EdgeData *data, size_t count, const int *params) {
  return add(handle, graph, deps, count, node_new(params[0]));
}

CUresult cuGraphGetNodes(void *graph, void **nodes, size_t *count) {
  Graph *home = handle_get(GRAPH, graph);
  if (!home) return CUDA_ERROR_INVALID_HANDLE;
  ONE_THREAD(home);
  for (size_t i = 0; nodes && i < *count && i < (size_t)home->node_count; i++) nodes[i] = home->nodes[i]->handle;
  return *count = home->node_count, CUDA_SUCCESS;
}
CUresult cuGraphGetEdges_v2(void *graph, void **from, void **to, EdgeData *data, size_t *count) {
  Graph *home = handle_get(GRAPH, graph);
  if (!home) return CUDA_ERROR_INVALID_HANDLE;
  ONE_THREAD(home);
  for (int i = 0; from && i < home->edge_count; i++) {
    static const EdgeData plain;
    if (!data && memcmp(&home->edges[i].data, &plain, sizeof plain)) return CUDA_ERROR_LOSSY_QUERY;
    from[i] = home->nodes[home->edges[i].from]->handle, to[i] = home->nodes[home->edges[i].to]->handle;
    if (data) data[i] = home->edges[i].data;
  }
  return *count = home->edge_count, CUDA_SUCCESS;
}
// As drivers 580.126 to 610.57 do (found by Foundry): every edge of a call gets the data of the first. A dependency that
// is there already is an error (cuda.h).
CUresult cuGraphAddDependencies_v2(void *graph, void *const *from, void *const *to, const EdgeData *data, size_t count) {
  Graph *home = handle_get(GRAPH, graph);
  if (!home) return CUDA_ERROR_INVALID_HANDLE;
  ONE_THREAD(home);
  home->edges = realloc(home->edges, (home->edge_count + count + 1) * sizeof(Edge));
  for (size_t i = 0; i < count; i++) {
    int source = node_index(home, from[i]), target = node_index(home, to[i]);
    if (source < 0 || target < 0) return CUDA_ERROR_INVALID_VALUE;
    for (int e = 0; e < home->edge_count; e++)
      if (home->edges[e].from == source && home->edges[e].to == target) return CUDA_ERROR_INVALID_VALUE;
    home->edges[home->edge_count++] = (Edge){source, target, data ? data[getenv("FAKE_CUDA_OWN_EDGE_DATA") ? i : 0] : (EdgeData){0}};
  }
  return CUDA_SUCCESS;
}

#define NODE_(kind_, handle) \
  Node *node = handle_get(NODE, handle); \
  if (!node) return CUDA_ERROR_INVALID_HANDLE; \
  if (node->type != kind_) return CUDA_ERROR_INVALID_VALUE
CUresult cuGraphNodeGetType(void *handle, int *type) {
  Node *node = handle_get(NODE, handle);
  return node ? (*type = node->type, CUDA_SUCCESS) : CUDA_ERROR_INVALID_HANDLE;
}
CUresult cuGraphKernelNodeGetParams_v2(void *handle, KernelNodeParams *params) {
  NODE_(NODE_KERNEL, handle);
  *params = node->kernel;
  if (node->by_kernel && getenv("FAKE_CUDA_CAST")) params->func = params->kern, params->kern = NULL;  // as it was launched
  return CUDA_SUCCESS;
}
CUresult cuGraphMemsetNodeGetParams(void *handle, MemsetNodeParams *params) {
  NODE_(NODE_MEMSET, handle);
  return *params = node->memset, CUDA_SUCCESS;
}
CUresult cuGraphMemcpyNodeGetParams(void *handle, Memcpy3D *params) {
  NODE_(NODE_MEMCPY, handle);
  return *params = node->memcpy, CUDA_SUCCESS;
}
// Attributes of launches that nodes do not have. PROGRAMMATIC_STREAM_SERIALIZATION is "valid for launches" (cuda.h), and
// drivers keep it on captured nodes, too (Foundry).
static int unknown(int id) {
  return id <= 0 || id >= MAX_ATTRIBUTES || id == 3 || (id == ATTRIBUTE_PDL && getenv("FAKE_CUDA_LAUNCH_ONLY"));
}
CUresult cuGraphKernelNodeGetAttribute(void *handle, int id, void *value) {
  NODE_(NODE_KERNEL, handle);
  if (unknown(id)) return CUDA_ERROR_INVALID_VALUE;
  return memcpy(value, node->attributes[id], 64), CUDA_SUCCESS;
}
CUresult cuGraphKernelNodeSetAttribute(void *handle, int id, const void *value) {
  NODE_(NODE_KERNEL, handle);
  if (unknown(id)) return CUDA_ERROR_INVALID_VALUE;
  ONE_THREAD(node->graph);
  CUresult refused = id == ATTRIBUTE_CLUSTER ? cluster_allowed(node, cluster_blocks(value), 0) : CUDA_SUCCESS;
  if (refused) return refused;
  return memcpy(node->attributes[id], value, 64), CUDA_SUCCESS;
}

static CUresult copy_node(Node *copy, const Node *node) {
  *copy = *node, copy->kernel.params = copy->pointers;
  for (int p = 0; copy->target && p < copy->target->count; p++) copy->pointers[p] = copy->storage + copy->target->offset[p];
  unsigned cluster = *(unsigned *)copy->attributes[ATTRIBUTE_CLUSTER];
  return cluster && copy->kernel.grid[0] % cluster ? CUDA_ERROR_INVALID_CLUSTER_SIZE : CUDA_SUCCESS;
}

// One line about a graph, so that a captured and a restored one can be compared in what no output shows.
static void describe(const Graph *graph) {
  unsigned attributes = 0, dims = 0, shared = 0, programmatic = 0;
  for (int i = 0; i < graph->node_count; i++) {
    const Node *node = graph->nodes[i];
    for (int a = 0; a < MAX_ATTRIBUTES; a++)
      for (int b = 0; b < 64; b++) attributes = attributes * 31 + node->attributes[a][b];
    for (int d = 0; d < 3; d++) dims = (dims * 31 + node->kernel.grid[d]) * 31 + node->kernel.block[d];
    shared += node->kernel.shared_bytes;
  }
  for (int e = 0; e < graph->edge_count; e++) programmatic += graph->edges[e].data.type == 1 && graph->edges[e].data.from_port == 1;
  fprintf(stderr, "graph: %d nodes, %d edges, %u programmatic, attributes %08x, dimensions %08x, %u bytes shared\n",
          graph->node_count, graph->edge_count, programmatic, attributes, dims, shared);
}

// Takes its own copy of every node, in an order in which each comes behind what it depends on.
CUresult cuGraphInstantiateWithParams(void **handle, void *graph, InstantiateParams *params) {
  Graph *home = handle_get(GRAPH, graph);
  if (!home) return CUDA_ERROR_INVALID_HANDLE;
  ONE_THREAD(home);
  NEEDS_CONTEXT();
  if (is_full()) return CUDA_ERROR_OUT_OF_MEMORY;
  if (getenv("FAKE_CUDA_DESCRIBE")) describe(home);
  Exec *exec = calloc(1, sizeof *exec);
  exec->nodes = calloc(home->node_count + 1, sizeof(Node));
  int n = home->node_count, *waits = calloc(n + 1, sizeof(int)), *ready = calloc(n + 1, sizeof(int)), last = 0;
  int *first = calloc(n + 2, sizeof(int)), *targets = calloc(home->edge_count + 1, sizeof(int));
  for (int e = 0; e < home->edge_count; e++) waits[home->edges[e].to]++, first[home->edges[e].from + 1]++;
  for (int i = 0; i < n; i++) first[i + 1] += first[i];
  int *filled = memcpy(calloc(n + 2, sizeof(int)), first, (n + 1) * sizeof(int));
  for (int e = 0; e < home->edge_count; e++) targets[filled[home->edges[e].from]++] = home->edges[e].to;
  for (int i = 0; i < n; i++)
    if (!waits[i]) ready[last++] = i;
  CUresult result = CUDA_SUCCESS;
  while (last && !result) { // the last that is ready first: an order that is right only if the edges are
    int number = ready[--last];
    result = copy_node(&exec->nodes[exec->count++], home->nodes[number]);
    if (result) params->error_node = home->nodes[number]->handle, params->result = 1;
    for (int t = first[number]; t < first[number + 1]; t++)
      if (!--waits[targets[t]]) ready[last++] = targets[t];
  }
  free(waits), free(ready), free(first), free(targets), free(filled);
  if (result) return result;
  if (exec->count < n) return params->result = 2, CUDA_ERROR_INVALID_VALUE; // a cycle
  return params->result = 0, *handle = handle_new(EXEC, exec), CUDA_SUCCESS;
}
CUresult cuGraphUpload(void *exec, void *stream) { return handle_get(EXEC, exec) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE; }
CUresult cuGraphExecDestroy(void *handle) {
  Exec *exec = handle_get(EXEC, handle);
  if (!exec) return CUDA_ERROR_INVALID_HANDLE;
  enter_alone(&exec->in_use, __func__);
  handle_free(handle), exec->destroyed = 1;
  if (!exec->launched) free(exec->nodes), free(exec);
  return CUDA_SUCCESS;
}
static CUresult run_all(void *object) {
  Exec *exec = object;
  CUresult result = broken;
  for (int i = 0; i < exec->count && !result; i++) result = node_run(&exec->nodes[i]);
  if (!--exec->launched && exec->destroyed) free(exec->nodes), free(exec);
  return result;
}
// A launch only begins the work. A fault in it is reported by the calls that follow, and no call works after it.
CUresult cuGraphLaunch(void *handle, void *stream) {
  Exec *exec = handle_get(EXEC, handle);
  if (!exec || !handle_get(STREAM, stream)) return CUDA_ERROR_INVALID_HANDLE;
  ONE_THREAD(exec);
  NEEDS_CONTEXT();
  exec->launched++;
  return work_begin(stream, stream_blocks(stream), run_all, exec);
}

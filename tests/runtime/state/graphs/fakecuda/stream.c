#include "fakecuda.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { WIDEST = 16 };
// The nodes that the next one depends on, in the graph being captured; no graph: work is done at once.
typedef struct {
  Graph *graph;
  void *graph_handle;
  int tips[WIDEST], count, origin, blocking;
  Capturing capturing; // of the stream on which it began
} Stream;

enum { NON_BLOCKING = 1 };

CUresult broken;
static void *primary;
static _Thread_local void *current;
static pid_t initialised; // by which process: what a fork leaves of a driver does not work
CUresult process_error(void) { return initialised == getpid() ? CUDA_SUCCESS : CUDA_ERROR_NOT_INITIALIZED; }

CUresult cuInit(unsigned flags) {
  if (initialised && process_error()) return process_error();
  return initialised = getpid(), CUDA_SUCCESS;
}
CUresult cuDriverGetVersion(int *version) {
  const char *text = getenv("FAKE_CUDA_DRIVER");
  return *version = text ? atoi(text) : 13000, CUDA_SUCCESS;
}
CUresult cuDeviceGetCount(int *count) { return *count = 1, process_error(); }
CUresult cuDeviceGet(int *device, int ordinal) {
  if (process_error()) return process_error();
  return *device = 0, ordinal ? 101 : CUDA_SUCCESS;
}
CUresult cuDeviceGetName(char *name, int size, int device) {
  const char *text = getenv("FAKE_CUDA_NAME");
  return snprintf(name, size, "%s", text ? text : "Fake H200"), CUDA_SUCCESS;
}
CUresult cuDeviceGetAttribute(int *value, int attribute, int device) {
  *value = attribute == 75 ? 9 : attribute == 76 ? 0 : attribute == 16 ? 132 : 0;
  return CUDA_SUCCESS;
}
CUresult cuDeviceTotalMem_v2(size_t *size, int device) {
  const char *text = getenv("FAKE_CUDA_MEMORY");
  return *size = text ? strtoull(text, NULL, 0) : 1ull << 30, CUDA_SUCCESS;
}
CUresult cuDevicePrimaryCtxRetain(void **context, int device) {
  if (process_error()) return process_error();
  if (!primary) primary = handle_new(CONTEXT, &primary);
  return *context = primary, CUDA_SUCCESS;
}
CUresult cuDevicePrimaryCtxRelease_v2(int device) { return CUDA_SUCCESS; }
CUresult cuCtxSetCurrent(void *context) { return current = context, CUDA_SUCCESS; }
void *context_of_thread(void) { return current; }
CUresult cuCtxGetCurrent(void **context) { return *context = current, CUDA_SUCCESS; }
CUresult cuCtxGetDevice(int *device) { return *device = 0, current ? CUDA_SUCCESS : CUDA_ERROR_INVALID_CONTEXT; }
CUresult cuCtxSynchronize(void) {
  NEEDS_CONTEXT();
  CUresult forbidden = capture_forbids_all();
  return forbidden ? forbidden : (work_finish_all(), memory_finish(), broken);
}
CUresult cuGetErrorName(CUresult code, const char **name) {
  static const struct {
    int code;
    const char *name;
  } names[] = {{1, "CUDA_ERROR_INVALID_VALUE"}, {2, "CUDA_ERROR_OUT_OF_MEMORY"}, {900, "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED"},
               {201, "CUDA_ERROR_INVALID_CONTEXT"}, {901, "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED"}, {906, "CUDA_ERROR_STREAM_CAPTURE_IMPLICIT"},
               {3, "CUDA_ERROR_NOT_INITIALIZED"},
               {200, "CUDA_ERROR_INVALID_IMAGE"}, {400, "CUDA_ERROR_INVALID_HANDLE"}, {402, "CUDA_ERROR_LOSSY_QUERY"},
               {500, "CUDA_ERROR_NOT_FOUND"}, {700, "CUDA_ERROR_ILLEGAL_ADDRESS"}, {912, "CUDA_ERROR_INVALID_CLUSTER_SIZE"}};
  for (size_t i = 0; i < sizeof names / sizeof *names; i++)
    if (names[i].code == code) return *name = names[i].name, CUDA_SUCCESS;
  return CUDA_ERROR_INVALID_VALUE;
}

CUresult cuStreamCreate(void **stream, unsigned flags) {
  NEEDS_CONTEXT();
  if (is_full()) return CUDA_ERROR_OUT_OF_MEMORY;
  Stream *made = calloc(1, sizeof *made);
  made->blocking = !(flags & NON_BLOCKING);
  return *stream = handle_new(STREAM, made), CUDA_SUCCESS;
}
CUresult cuStreamDestroy_v2(void *stream) { return handle_free(stream), CUDA_SUCCESS; }
CUresult cuStreamSynchronize(void *stream) {
  Stream *s = handle_get(STREAM, stream);
  if (stream) {
    if (!s) return CUDA_ERROR_INVALID_HANDLE;
    if (capture_refuses(&s->capturing)) return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    return work_finish(stream), broken;
  }
  NEEDS_CONTEXT();
  CUresult forbidden = capture_forbids_legacy();
  return forbidden ? forbidden : (work_finish_blocking(), memory_finish(), broken);
}
CUresult cuEventCreate(void **event, unsigned flags) {
  return *event = handle_new(EVENT, calloc(1, sizeof(Stream))), CUDA_SUCCESS;
}
CUresult cuEventRecord(void *event, void *stream) {
  Stream *from = handle_get(STREAM, stream), *to = handle_get(EVENT, event);
  if (!from || !to) return CUDA_ERROR_INVALID_HANDLE;
  *to = *from, to->origin = 0, to->capturing = (Capturing){0};
  return CUDA_SUCCESS;
}
CUresult cuStreamWaitEvent(void *stream, void *event, unsigned flags) {
  Stream *to = handle_get(STREAM, stream), *from = handle_get(EVENT, event);
  if (!from || !to) return CUDA_ERROR_INVALID_HANDLE;
  if (!from->graph) return work_finish_all(), CUDA_SUCCESS; // sooner than it must
  if (to->graph != from->graph) to->count = 0; // of an earlier capture
  to->graph = from->graph, to->graph_handle = from->graph_handle;
  for (int i = 0; i < from->count && to->count < WIDEST; i++) {
    int known = 0;
    for (int j = 0; j < to->count; j++) known |= to->tips[j] == from->tips[i];
    if (!known) to->tips[to->count++] = from->tips[i];
  }
  return CUDA_SUCCESS;
}

CUresult cuStreamBeginCapture_v2(void *stream, int how) {
  Stream *s = handle_get(STREAM, stream);
  if (!s || s->graph) return CUDA_ERROR_INVALID_HANDLE;
  NEEDS_CONTEXT();
  *s = (Stream){.graph = calloc(1, sizeof(Graph)), .origin = 1, .blocking = s->blocking};
  capture_begin(&s->capturing, how, s->blocking);
  return s->graph_handle = handle_new(GRAPH, s->graph), CUDA_SUCCESS;
}
CUresult cuStreamEndCapture(void *stream, void **graph) {
  Stream *s = handle_get(STREAM, stream);
  if (!s || !s->graph || !s->origin) return CUDA_ERROR_ILLEGAL_STATE;
  CUresult result = capture_end(&s->capturing);
  if (result == CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD) return result;
  if (result) cuGraphDestroy(s->graph_handle);
  *graph = result ? NULL : s->graph_handle, *s = (Stream){.blocking = s->blocking};
  return result;
}
CUresult cuStreamGetCaptureInfo_v3(void *stream, int *status, uint64_t *id, void **graph, void *a, void *b, size_t *n) {
  Stream *s = handle_get(STREAM, stream);
  if (!s) return CUDA_ERROR_INVALID_HANDLE;
  *status = s->graph ? 1 : 0;
  if (id) *id = (uint64_t)s->graph_handle;
  if (graph) *graph = s->graph_handle;
  if (n) *n = s->count;
  return CUDA_SUCCESS;
}

int stream_blocks(void *stream) {
  Stream *s = handle_get(STREAM, stream);
  return s && s->blocking;
}
static CUresult run_once(void *node) {
  CUresult result = node_run(node);
  return free(node), result;
}

// In a capture the node is added behind the stream's last ones, otherwise it runs now.
static CUresult submit(void *stream, Node *node, int programmatic) {
  Stream *s = handle_get(STREAM, stream);
  if (!s) return free(node), CUDA_ERROR_INVALID_HANDLE;
  if (s->capturing.invalid) return free(node), CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
  if (!context_of_thread()) return free(node), CUDA_ERROR_INVALID_CONTEXT;
  node->captured = 1;
  if (!s->graph) return broken ? (free(node), broken) : work_begin(stream, s->blocking, run_once, node);
  EdgeData data[WIDEST] = {0};
  for (int i = 0; i < s->count; i++)
    if (programmatic && s->graph->nodes[s->tips[i]]->type == NODE_KERNEL) data[i] = (EdgeData){1, 0, 1, {0}};
  CUresult result = graph_add(s->graph, node, s->tips, data, s->count, NULL);
  s->tips[0] = s->graph->node_count - 1, s->count = 1;
  return result;
}

CUresult cuLaunchKernelEx(const LaunchConfig *config, void *func, void **params, void **extra) {
  KernelNodeParams node_params = {func, {config->grid[0], config->grid[1], config->grid[2]},
                                  {config->block[0], config->block[1], config->block[2]}, config->shared_bytes, params, extra, NULL, NULL};
  if (handle_get(KERNEL, func)) node_params.kern = func, node_params.func = NULL;
  Node *node;
  CUresult result = node_of_kernel(&node_params, 1, &node);
  if (result) return result;
  int programmatic = 0;
  for (unsigned i = 0; i < config->count; i++) {
    LaunchAttribute *attribute = &config->attributes[i];
    if (attribute->id == ATTRIBUTE_PDL) programmatic = attribute->value[0];
    memcpy(node->attributes[attribute->id], attribute->value, 64);
  }
  if ((result = cluster_allowed(node, cluster_blocks(node->attributes[ATTRIBUTE_CLUSTER]), 1))) return free(node), result;
  return submit(config->stream, node, programmatic);
}
CUresult cuMemsetD32Async(CUdeviceptr to, unsigned value, size_t count, void *stream) {
  Node *node = calloc(1, sizeof *node);
  node->type = NODE_MEMSET, node->memset = (MemsetNodeParams){to, 0, value, 4, count, 1};
  return submit(stream, node, 0);
}
CUresult cuMemcpyDtoDAsync_v2(CUdeviceptr to, CUdeviceptr from, size_t size, void *stream) {
  Node *node = calloc(1, sizeof *node);
  node->type = NODE_MEMCPY, node->memcpy.src.type = node->memcpy.dst.type = 2;
  node->memcpy.src.device = from, node->memcpy.dst.device = to;
  node->memcpy.width_bytes = size, node->memcpy.height = node->memcpy.depth = 1;
  return submit(stream, node, 0);
}
CUresult cuLaunchHostFunc(void *stream, void *function, void *data) {
  Node *node = calloc(1, sizeof *node);
  node->type = NODE_HOST;
  return submit(stream, node, 0);
}

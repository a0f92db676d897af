// A CUDA driver in host memory, for tests: device pointers are mmapped, kernels are host functions found by the names in
// real cubins. Layouts are those of cuda.h 13.0; a test compares them with the real header where there is one.
#pragma once
#include <pthread.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>

#define CUDA_SUCCESS 0
#define CUDA_ERROR_INVALID_VALUE 1
#define CUDA_ERROR_OUT_OF_MEMORY 2
#define CUDA_ERROR_NOT_INITIALIZED 3
#define CUDA_ERROR_INVALID_IMAGE 200
#define CUDA_ERROR_INVALID_CONTEXT 201
#define CUDA_ERROR_NO_BINARY_FOR_GPU 209
#define CUDA_ERROR_INVALID_HANDLE 400
#define CUDA_ERROR_ILLEGAL_STATE 401
#define CUDA_ERROR_LOSSY_QUERY 402
#define CUDA_ERROR_NOT_FOUND 500
#define CUDA_ERROR_ILLEGAL_ADDRESS 700
#define CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED 900
#define CUDA_ERROR_STREAM_CAPTURE_INVALIDATED 901
#define CUDA_ERROR_STREAM_CAPTURE_IMPLICIT 906
#define CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD 908
#define CUDA_ERROR_INVALID_CLUSTER_SIZE 912

// Several threads load images, and find kernels in them, while another one builds graphs. Holds the lock until the block ends.
#define GUARDED(lock) \
  pthread_mutex_lock(&lock); \
  __attribute__((cleanup(fake_release), unused)) pthread_mutex_t *guard = &lock
static inline void fake_release(pthread_mutex_t **lock) { pthread_mutex_unlock(*lock); }

typedef int CUresult;
typedef uint64_t CUdeviceptr;

typedef struct {
  void *func;
  unsigned grid[3], block[3], shared_bytes;
  void **params, **extra;
  void *kern, *ctx;
} KernelNodeParams;
typedef struct {
  CUdeviceptr dst;
  size_t pitch;
  unsigned value, element_size;
  size_t width, height;
} MemsetNodeParams;
typedef struct {
  size_t x, y, z, lod;
  unsigned type;
  void *host;
  CUdeviceptr device;
  void *array, *reserved;
  size_t pitch, height;
} MemcpySide;
typedef struct {
  MemcpySide src, dst;
  size_t width_bytes, height, depth;
} Memcpy3D;
typedef struct {
  uint8_t from_port, to_port, type, reserved[5];
} EdgeData;
typedef struct {
  int id;
  int pad;
  uint8_t value[64];
} LaunchAttribute;
typedef struct {
  unsigned grid[3], block[3], shared_bytes;
  void *stream;
  LaunchAttribute *attributes;
  unsigned count;
} LaunchConfig;
typedef struct {
  uint64_t flags;
  void *upload_stream, *error_node;
  int result;
} InstantiateParams;

_Static_assert(sizeof(KernelNodeParams) == 72, "CUDA_KERNEL_NODE_PARAMS_v2");
_Static_assert(sizeof(MemsetNodeParams) == 40, "CUDA_MEMSET_NODE_PARAMS");
_Static_assert(sizeof(Memcpy3D) == 200, "CUDA_MEMCPY3D");
_Static_assert(offsetof(Memcpy3D, dst.device) == 136, "CUDA_MEMCPY3D.dstDevice");
_Static_assert(sizeof(LaunchAttribute) == 72, "CUlaunchAttribute");
_Static_assert(sizeof(InstantiateParams) == 32, "CUDA_GRAPH_INSTANTIATE_PARAMS");

enum { CONTEXT = 1, STREAM, EVENT, LIBRARY, MODULE, KERNEL, FUNCTION, GRAPH, NODE, EXEC, MEMORY };
enum { NODE_KERNEL = 0, NODE_MEMCPY = 1, NODE_MEMSET = 2, NODE_HOST = 3, NODE_EMPTY = 5 };
enum { MAX_PARAMS = 32, MAX_ATTRIBUTES = 17 };

// The attributes the fake hardware looks at.
enum { ATTRIBUTE_CLUSTER = 4, ATTRIBUTE_PDL = 6, ATTRIBUTE_PRIORITY = 8 };
enum { FUNCTION_REGISTERS = 4, FUNCTION_MAX_DYNAMIC_SHARED = 8, FUNCTION_CARVEOUT = 9, FUNCTION_NON_PORTABLE_CLUSTER = 14 };
enum { PORTABLE_CLUSTER = 8, FUNCTION_ATTRIBUTES = 20 };

typedef struct {
  void **params;
  unsigned grid[3], cluster;
  CUdeviceptr constants; // the image's first variable in constant memory
} Launch;
typedef CUresult (*HostKernel)(const Launch *);

typedef struct Function {
  struct Image *image;
  char *name;
  int count, local; // of parameters; not to be found by its name
  size_t offset[MAX_PARAMS], size[MAX_PARAMS];
  int attributes[FUNCTION_ATTRIBUTES];      // of the CUfunction in the context
  int of_kernel[FUNCTION_ATTRIBUTES];       // set on the CUkernel: a function in a context does not inherit them
  HostKernel host;
  void *kernel, *function; // the two kinds of handle to it
} Function;

typedef struct {
  int type, number;
  struct Graph *graph;
  Function *target;
  int by_kernel; // added with .kern rather than .func
  int captured;  // rather than added to a graph by hand
  KernelNodeParams kernel;
  void *pointers[MAX_PARAMS];
  uint8_t storage[1024];
  MemsetNodeParams memset;
  Memcpy3D memcpy;
  uint8_t attributes[MAX_ATTRIBUTES][64];
  void *handle;
} Node;
typedef struct {
  int from, to;
  EdgeData data;
} Edge;
typedef struct Graph {
  Node **nodes;
  Edge *edges;
  int node_count, edge_count;
  atomic_int in_use;
} Graph;

// Graphs, and executable ones, "must not be accessed concurrently from multiple threads" (cuda.h). Ends the process if they are.
#define ONE_THREAD(object) \
  enter_alone(&(object)->in_use, __func__); \
  __attribute__((cleanup(leave_alone), unused)) atomic_int *inside = &(object)->in_use
void enter_alone(atomic_int *in_use, const char *function);
static inline void leave_alone(atomic_int **in_use) { atomic_store(*in_use, 0); }

// handles.c: handles are checked before they are followed, so a wrong one is an error and never a crash
void *handle_new(int kind, void *object);
void *handle_get(int kind, void *handle); // the object, or NULL
void handle_free(void *handle);
int is_full(void); // whether the device refuses this allocation, as `fake_full` has asked for

// memory.c
int device_range(CUdeviceptr address, size_t size); // mapped and accessible
void memory_finish(void); // what was begun without a stream
CUresult device_alloc(CUdeviceptr *address, size_t size);
CUresult device_free(CUdeviceptr address);

// stream.c
extern CUresult broken; // what every call returns once a kernel has broken the context; 0 before
CUresult process_error(void); // why no call works in this process: cuInit is missing, or was called before a fork; 0 if it was called
// Leaves a function without a current context, or with a broken one.
#define NEEDS_CONTEXT() \
  if (process_error()) return process_error(); \
  if (!context_of_thread()) return CUDA_ERROR_INVALID_CONTEXT; \
  if (broken) return broken
void *context_of_thread(void);

// capture.c: what must not be called while a stream captures (CUDA Programming Guide, "Prohibited and Unhandled Operations",
// and cuThreadExchangeStreamCaptureMode). A call that is refused invalidates the captures that forbid it.
typedef struct {
  int active, relaxed, global, invalid, blocking;
  pthread_t thread;
} Capturing;
void capture_begin(Capturing *capturing, int how, int blocking);
CUresult capture_end(Capturing *capturing);
CUresult capture_forbids_unsafe(void); // of potentially unsafe calls, which a thread may allow itself
CUresult capture_forbids_legacy(void); // of the legacy stream, and what is synchronous
CUresult capture_forbids_all(void);    // of what encompasses every stream, such as synchronizing the context
CUresult capture_refuses(Capturing *capturing); // of a stream that captures

// work.c: what was launched on streams
typedef CUresult (*Runnable)(void *object);
CUresult work_begin(void *stream, int blocking, Runnable run, void *object);
void work_finish(void *stream);
void work_finish_blocking(void); // of the streams with which the legacy stream synchronizes
void work_finish_all(void);
int stream_blocks(void *stream);

// kernels.c
HostKernel host_kernel(const char *name, int variant);

// module.c
Function *function_of(void *func, void *kern);
int is_loaded(const Function *function); // whether its image is; its kernels cannot run otherwise

// graph.c
CUresult graph_add(Graph *graph, Node *node, const int *dependencies, const EdgeData *data, int count, void **handle);
CUresult node_of_kernel(const KernelNodeParams *params, int launched, Node **made);
CUresult cluster_allowed(const Node *node, unsigned blocks, int launched);
unsigned cluster_blocks(const void *attribute);
CUdeviceptr constants_of(const Function *function);
CUresult node_run(Node *node);
int node_index(Graph *graph, void *handle);
CUresult cuGraphDestroy(void *graph);

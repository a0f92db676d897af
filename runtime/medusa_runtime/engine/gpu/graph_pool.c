// Device memory for torch's MemPool, in one reserved range: segments lie one behind the other from its start, in the
// order in which they were asked for, so that another process has them at the same addresses. torch calls malloc and
// free in whatever thread allocates, with its own lock held: nothing here may wait for Python's.
#include <dlfcn.h>
#include <pthread.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/types.h>

enum { PINNED = 1, ON_DEVICE = 1, READ_WRITE = 3, RELAXED = 2 };
typedef struct {  // CUmemLocation
  int type, number;
} Location;
typedef struct {  // CUmemAllocationProp
  int type, handle_types;
  Location location;
  void *security;
  unsigned char flags[8];
} Properties;
typedef struct {  // CUmemAccessDesc
  Location location;
  int flags;
} Access;

static struct {
  int (*get_context)(void **), (*set_context)(void *), (*exchange_mode)(int *);
  int (*create)(uint64_t *, size_t, const Properties *, unsigned long long), (*release)(uint64_t);
  int (*map)(uint64_t, size_t, size_t, uint64_t, unsigned long long);
  int (*allow)(uint64_t, size_t, const Access *, size_t), (*unmap)(uint64_t, size_t);
} driver;
static struct {
  uint64_t start, size;
  int given; // to torch
} *segments;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static uint64_t base, room, used, granule;
static int device, count, most;
static void *context;

// Take a reserved range. 0, or 1 where the driver lacks a call.
int medusa_pool_open(const char *library, uint64_t start, uint64_t size, uint64_t granularity, int number) {
  void *cuda = dlopen(library, RTLD_NOW);
  if (!cuda) return 1;
  *(void **)&driver.get_context = dlsym(cuda, "cuCtxGetCurrent");
  *(void **)&driver.set_context = dlsym(cuda, "cuCtxSetCurrent");
  *(void **)&driver.exchange_mode = dlsym(cuda, "cuThreadExchangeStreamCaptureMode");
  *(void **)&driver.create = dlsym(cuda, "cuMemCreate");
  *(void **)&driver.release = dlsym(cuda, "cuMemRelease");
  *(void **)&driver.map = dlsym(cuda, "cuMemMap");
  *(void **)&driver.allow = dlsym(cuda, "cuMemSetAccess");
  *(void **)&driver.unmap = dlsym(cuda, "cuMemUnmap");
  void **calls = (void **)&driver;
  for (size_t i = 0; i < sizeof driver / sizeof *calls; i++)
    if (!calls[i]) return 1;
  base = start, room = size, granule = granularity, device = number;
  return driver.get_context(&context) || !context;
}

// How many bytes from the start of the range have been given out; all of them are mapped.
uint64_t medusa_pool_used(void) {
  pthread_mutex_lock(&lock);
  uint64_t bytes = used;
  pthread_mutex_unlock(&lock);
  return bytes;
}

static int back(uint64_t at, uint64_t size) {
  const Properties properties = {.type = PINNED, .location = {ON_DEVICE, device}};
  const Access access = {{ON_DEVICE, device}, READ_WRITE};
  uint64_t handle;
  if (driver.create(&handle, size, &properties, 0)) return 1;
  if (driver.map(at, size, 0, handle, 0)) return driver.release(handle), 1;
  if (driver.allow(at, size, &access, 1)) return driver.unmap(at, size), driver.release(handle), 1;
  return 0;
}

// torch asks for whole segments. NULL is its "out of memory".
void *medusa_pool_malloc(ssize_t size, int number, void *stream) {
  (void)stream;
  if (size <= 0 || number != device) return NULL;
  uint64_t whole = ((uint64_t)size + granule - 1) / granule * granule, at = 0;
  pthread_mutex_lock(&lock);
  for (int i = 0; i < count && !at; i++)
    if (!segments[i].given && segments[i].size == whole) segments[i].given = 1, at = segments[i].start;
  if (!at && count == most) {
    void *more = realloc(segments, (most + 64) * sizeof *segments);
    if (more) segments = more, most += 64;
  }
  if (!at && count < most && whole <= room - used) {
    void *current = NULL;
    if (!driver.get_context(&current) && !current) driver.set_context(context);
    int mode = RELAXED; // torch allocates while it captures, and mapping is no part of the graph
    driver.exchange_mode(&mode);
    if (!back(base + used, whole)) {
      at = base + used, used += whole;
      segments[count].start = at, segments[count].size = whole, segments[count++].given = 1;
    }
    driver.exchange_mode(&mode);
  }
  pthread_mutex_unlock(&lock);
  return (void *)at;
}

// The segment stays mapped, for the next one of its size: graphs may contain its address.
void medusa_pool_free(void *address, ssize_t size, int number, void *stream) {
  (void)size, (void)number, (void)stream;
  pthread_mutex_lock(&lock);
  for (int i = 0; i < count; i++)
    if (segments[i].start == (uint64_t)address) segments[i].given = 0;
  pthread_mutex_unlock(&lock);
}

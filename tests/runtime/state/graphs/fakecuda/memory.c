#define _GNU_SOURCE
#include "fakecuda.h"
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum { PAGE = 4096, GRANULE = 2 << 20, MAX_RANGES = 8192 };
typedef struct {
  CUdeviceptr start;
  size_t size;
  int usable, reserved; // reserved: of cuMemAddressReserve, not for memory itself
} Range;
typedef struct {
  int descriptor;
  size_t size;
} Physical;
static Range ranges[MAX_RANGES];
static int count;
static size_t taken;
static CUdeviceptr cursor;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; // of all above

static uint64_t setting(const char *name, uint64_t otherwise) {
  const char *text = getenv(name);
  return text ? strtoull(text, NULL, 0) : otherwise;
}
static size_t total(void) { return setting("FAKE_CUDA_MEMORY", 1ull << 30); }

static CUdeviceptr map(CUdeviceptr at, size_t size, int protection) {
  if (!cursor) cursor = setting("FAKE_CUDA_BASE", 0x500000000000ull);
  for (int tries = 0; tries < 64; tries++) {
    CUdeviceptr where = at ? at : cursor;
    if (!at) cursor += (size + 3 * GRANULE - 1) / GRANULE * GRANULE;
    void *got = mmap((void *)where, size, protection, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED_NOREPLACE, -1, 0);
    if (got == (void *)where) return where;
    if (got != MAP_FAILED) munmap(got, size);
    if (!at) cursor += (uint64_t)GRANULE << (tries < 20 ? tries : 20);
    at = 0; // taken: anywhere else, as the driver does
  }
  return 0;
}

static void add(CUdeviceptr start, size_t size, int usable, int reserved) {
  if (count == MAX_RANGES) abort();
  ranges[count++] = (Range){start, size, usable, reserved};
}

static Range *find(CUdeviceptr address, size_t size, int reserved) {
  for (int i = 0; i < count; i++)
    if (ranges[i].reserved == reserved && address >= ranges[i].start && address + size <= ranges[i].start + ranges[i].size)
      return &ranges[i];
  return NULL;
}

// What is mapped side by side in one reservation is one range to copies and kernels, as in torch's expandable segments.
int device_range(CUdeviceptr address, size_t size) {
  GUARDED(lock);
  int together = find(address, size, 1) != NULL;
  for (;;) {
    Range *range = find(address, together && size ? 1 : size, 0);
    if (!range || !range->usable) return 0;
    size_t here = range->start + range->size - address;
    if (size <= here) return 1;
    address += here, size -= here;
  }
}

CUresult device_alloc(CUdeviceptr *address, size_t size) {
  GUARDED(lock);
  size_t whole = (size + PAGE - 1) / PAGE * PAGE;
  if (!size) return CUDA_ERROR_INVALID_VALUE;
  CUresult forbidden = capture_forbids_unsafe();
  if (forbidden) return forbidden;
  if (is_full() || taken + whole > total()) return CUDA_ERROR_OUT_OF_MEMORY;
  for (int i = count - 1; i >= 0; i--) // what was freed last is given out first, as allocators like to do
    if (!ranges[i].reserved && !ranges[i].usable && ranges[i].size == whole) {
      mprotect((void *)ranges[i].start, whole, PROT_READ | PROT_WRITE);
      ranges[i].usable = 1, taken += whole, *address = ranges[i].start;
      return CUDA_SUCCESS;
    }
  if (!(*address = map(0, whole, PROT_READ | PROT_WRITE))) return CUDA_ERROR_OUT_OF_MEMORY;
  add(*address, whole, 1, 0), taken += whole;
  return CUDA_SUCCESS;
}

CUresult cuMemAlloc_v2(CUdeviceptr *address, size_t size) {
  NEEDS_CONTEXT();
  return device_alloc(address, size);
}
CUresult cuMemFree_v2(CUdeviceptr address) {
  NEEDS_CONTEXT();
  CUresult forbidden = capture_forbids_unsafe();
  return forbidden ? forbidden : (work_finish_all(), device_free(address)); // waits, as unmapping does not
}
CUresult device_free(CUdeviceptr address) {
  GUARDED(lock);
  Range *range = find(address, 1, 0);
  if (!range || !range->usable || range->start != address) return CUDA_ERROR_INVALID_VALUE;
  mprotect((void *)address, range->size, PROT_NONE);
  range->usable = 0, taken -= range->size;
  return CUDA_SUCCESS;
}

CUresult cuMemGetAllocationGranularity(size_t *size, const void *prop, int option) { return *size = GRANULE, CUDA_SUCCESS; }
// Driver 580 on an H200 put reservations of up to 64 MiB into gaps of its own wherever they were wished for, and rounded
// the wished address of larger ones up to 32 MiB.
enum { SMALL = 1 << 30, ROUNDED = 32 << 20 };
CUresult cuMemAddressReserve(CUdeviceptr *address, size_t size, size_t alignment, CUdeviceptr wanted, uint64_t flags) {
  GUARDED(lock);
  if (!size || size % GRANULE || wanted % GRANULE) return CUDA_ERROR_INVALID_VALUE;
  if (is_full()) return CUDA_ERROR_OUT_OF_MEMORY;
  if (wanted && getenv("FAKE_CUDA_NO_HINTS")) return CUDA_ERROR_INVALID_VALUE;
  wanted = size < SMALL ? 0 : (wanted + ROUNDED - 1) / ROUNDED * ROUNDED;
  if (!(*address = map(wanted, size, PROT_NONE))) return CUDA_ERROR_OUT_OF_MEMORY;
  add(*address, size, 0, 1);
  return CUDA_SUCCESS;
}
CUresult cuMemAddressFree(CUdeviceptr address, size_t size) {
  GUARDED(lock);
  Range *range = find(address, size, 1);
  if (!range || find(address, size, 0)) return CUDA_ERROR_INVALID_VALUE;
  munmap((void *)address, size);
  *range = ranges[--count];
  return CUDA_SUCCESS;
}
// NVIDIA names cudaMalloc as what captures forbid, and does not say whether this is another such call.
CUresult cuMemCreate(uint64_t *handle, size_t size, const void *prop, uint64_t flags) {
  GUARDED(lock);
  if (process_error()) return process_error();
  if (broken) return broken;
  CUresult forbidden = capture_forbids_unsafe();
  if (forbidden) return forbidden;
  if (!size || size % GRANULE) return CUDA_ERROR_INVALID_VALUE;
  if (is_full() || taken + size > total()) return CUDA_ERROR_OUT_OF_MEMORY;
  Physical *made = malloc(sizeof *made);
  *made = (Physical){memfd_create("device", MFD_CLOEXEC), size};
  if (made->descriptor < 0 || ftruncate(made->descriptor, size)) return CUDA_ERROR_OUT_OF_MEMORY;
  taken += size, *handle = (uint64_t)handle_new(MEMORY, made);
  return CUDA_SUCCESS;
}
CUresult cuMemRelease(uint64_t handle) {
  GUARDED(lock);
  Physical *memory = handle_get(MEMORY, (void *)handle);
  if (!memory) return CUDA_ERROR_INVALID_VALUE;
  close(memory->descriptor), taken -= memory->size, handle_free((void *)handle);
  return CUDA_SUCCESS;
}
CUresult cuMemMap(CUdeviceptr address, size_t size, size_t offset, uint64_t handle, uint64_t flags) {
  GUARDED(lock);
  Physical *memory = handle_get(MEMORY, (void *)handle);
  if (!memory || !find(address, size, 1) || find(address, 1, 0) || offset + size > memory->size) return CUDA_ERROR_INVALID_VALUE;
  if (mmap((void *)address, size, PROT_NONE, MAP_SHARED | MAP_FIXED, memory->descriptor, offset) == MAP_FAILED)
    return CUDA_ERROR_OUT_OF_MEMORY;
  add(address, size, 0, 0);
  return CUDA_SUCCESS;
}
CUresult cuMemSetAccess(CUdeviceptr address, size_t size, const void *description, size_t n) {
  GUARDED(lock);
  Range *range = find(address, size, 0);
  if (is_full()) return CUDA_ERROR_OUT_OF_MEMORY;
  if (!range || mprotect((void *)address, size, PROT_READ | PROT_WRITE)) return CUDA_ERROR_INVALID_VALUE;
  range->usable = 1;
  return CUDA_SUCCESS;
}
CUresult cuMemUnmap(CUdeviceptr address, size_t size) {
  GUARDED(lock);
  Range *range = find(address, size, 0);
  if (!range) return CUDA_ERROR_INVALID_VALUE;
  mmap((void *)address, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
  *range = ranges[--count];
  return CUDA_SUCCESS;
}

CUresult cuMemGetInfo_v2(size_t *available, size_t *all) {
  NEEDS_CONTEXT();
  GUARDED(lock);
  return *all = total(), *available = setting("FAKE_CUDA_LIES", 0) ? 1ull << 40 : total() - taken, CUDA_SUCCESS;
}
// What has no stream of its own is only begun when its call returns, and torch's streams do not wait for it.
static struct {
  CUdeviceptr to;
  size_t size;
  void *data;
} begun[256];
static int begun_count;
void memory_finish(void) {
  for (int i = 0; i < begun_count; i++) {
    if (device_range(begun[i].to, begun[i].size)) memcpy((void *)begun[i].to, begun[i].data, begun[i].size);
    free(begun[i].data);
  }
  begun_count = 0;
}
static CUresult begin(CUdeviceptr to, const void *from, int value, size_t size) {
  NEEDS_CONTEXT();
  CUresult forbidden = capture_forbids_legacy();
  if (forbidden) return forbidden;
  if (!device_range(to, size)) return CUDA_ERROR_INVALID_VALUE;
  work_finish_blocking();
  if (begun_count == 256) memory_finish();
  void *data = malloc(size ? size : 1);
  from ? memcpy(data, from, size) : memset(data, value, size);
  begun[begun_count].to = to, begun[begun_count].size = size, begun[begun_count++].data = data;
  return CUDA_SUCCESS;
}
CUresult cuMemcpyHtoD_v2(CUdeviceptr to, const void *from, size_t size) { return begin(to, from, 0, size); }
CUresult cuMemcpyDtoH_v2(void *to, CUdeviceptr from, size_t size) {
  NEEDS_CONTEXT();
  CUresult forbidden = capture_forbids_legacy();
  if (forbidden) return forbidden;
  work_finish_blocking(), memory_finish();
  return device_range(from, size) ? (memcpy(to, (void *)from, size), CUDA_SUCCESS) : CUDA_ERROR_INVALID_VALUE;
}
CUresult cuMemsetD8_v2(CUdeviceptr to, unsigned char value, size_t size) {
  while (value == 0xFF && getenv("FAKE_CUDA_HANG_ON_POISON")) sleep(1); // in place of the kernel that reads it
  return begin(to, NULL, value, size);
}
// Pinned: the host's, and the device can read it.
CUresult cuMemAllocHost_v2(void **memory, size_t size) {
  NEEDS_CONTEXT();
  CUresult forbidden = capture_forbids_unsafe();
  if (forbidden) return forbidden;
  *memory = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  return add((CUdeviceptr)*memory, size, 2, 0), CUDA_SUCCESS;
}
CUresult cuPointerGetAttribute(void *data, int attribute, CUdeviceptr address) {
  Range *range = find(address, 1, 0);
  if (!range || !range->usable) return CUDA_ERROR_INVALID_VALUE;
  if (attribute == 2) return *(unsigned *)data = range->usable == 2 ? 1 : 2, CUDA_SUCCESS;
  if (attribute == 11) return *(uint64_t *)data = range->start, CUDA_SUCCESS;
  if (attribute == 12) return *(uint64_t *)data = range->size, CUDA_SUCCESS;
  return CUDA_ERROR_INVALID_VALUE;
}

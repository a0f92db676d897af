// What CUPTI calls for each module that is loaded, in whatever thread loads it and with the driver's locks held. It must
// not wait for Python's lock: a thread may hold that one, and wait for the driver.
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

typedef struct {  // CUpti_ModuleResourceData
  uint32_t number;
  size_t size;
  const char *image;
} Module;
typedef struct {  // CUpti_ResourceData
  void *context, *handle;
  const Module *described;
} Resource;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct {
  size_t size;
  char *data;
} *images;
static size_t count, room;

void medusa_module_loaded(void *user, int domain, uint32_t callback, const Resource *resource) {
  (void)user, (void)domain, (void)callback;
  const Module *module = resource->described;
  if (!module || !module->image || !module->size) return;
  char *copy = malloc(module->size);
  if (!copy) return;
  memcpy(copy, module->image, module->size);
  pthread_mutex_lock(&lock);
  if (count == room) {
    void *more = realloc(images, (room + 256) * sizeof *images);
    if (more) images = more, room += 256;
  }
  if (count < room) images[count].size = module->size, images[count++].data = copy;
  else free(copy);
  pthread_mutex_unlock(&lock);
}

// The n-th image, which stays where it is; NULL behind the last one.
const char *medusa_module(size_t n, size_t *size) {
  pthread_mutex_lock(&lock);
  const char *data = n < count ? (*size = images[n].size, images[n].data) : NULL;
  pthread_mutex_unlock(&lock);
  return data;
}

// What CUPTI calls for each module that is loaded, in whatever thread loads it and with the driver's locks held. It must
// not wait for Python's lock: a thread may hold that one, and wait for the driver.
#include <elf.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { DRIVER_API = 1, RESOURCE = 3, EXIT = 1, LOAD_FILE = 18 /* cuModuleLoad */ };
typedef struct {  // CUpti_ModuleResourceData
  uint32_t number;
  size_t size;
  const char *image;
} Module;
typedef struct {  // CUpti_ResourceData
  void *context, *handle;
  const Module *described;
} Resource;
typedef struct {  // the beginning of the parameters of all functions that load; for cuModuleLoad, code is a file's name
  void **handle;
  const char *code;
} Load;
typedef struct {  // CUpti_CallbackData, its beginning
  int site;
  const char *function;
  const Load *parameters;
  const int *result;
} Call;

enum { LARGEST_FILE = 256 << 20 };
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct {
  size_t size;
  char *data;
  void *handle; // NULL: the driver told of a module, and not of whose
} *images;
static size_t count, room;

static void add(char *copy, size_t size, void *handle) {
  pthread_mutex_lock(&lock);
  if (count == room) {
    void *more = realloc(images, (room + 256) * sizeof *images);
    if (more) images = more, room += 256;
  }
  if (count < room) images[count].size = size, images[count].handle = handle, images[count++].data = copy;
  else free(copy);
  pthread_mutex_unlock(&lock);
}

static void keep(const char *image, size_t size, void *handle) {
  char *copy = malloc(size);
  if (copy) add(memcpy(copy, image, size), size, handle);
}

// How many bytes a cubin has, by its headers; 0 for what is no cubin, such as a fat binary or PTX.
static size_t cubin_bytes(const char *code) {
  Elf64_Ehdr head;
  if (memcmp(code, ELFMAG, SELFMAG)) return 0;
  memcpy(&head, code, sizeof head);
  size_t end = head.e_shoff + (size_t)head.e_shnum * head.e_shentsize;
  size_t programs = head.e_phoff + (size_t)head.e_phnum * head.e_phentsize;
  if (head.e_phnum && programs > end) end = programs;
  for (int i = 0; i < head.e_shnum; i++) {
    Elf64_Shdr section;
    memcpy(&section, code + head.e_shoff + (size_t)i * head.e_shentsize, sizeof section);
    if (section.sh_type != SHT_NOBITS && section.sh_offset + section.sh_size > end) end = section.sh_offset + section.sh_size;
  }
  return end;
}

static void keep_file(const char *name, void *handle) {
  FILE *file = fopen(name, "rb");
  if (!file) return;
  fseek(file, 0, SEEK_END);
  long size = ftell(file);
  rewind(file);
  char *copy = size >= (long)sizeof(Elf64_Ehdr) && size <= LARGEST_FILE ? malloc(size) : NULL;
  if (copy && fread(copy, 1, size, file) == (size_t)size && cubin_bytes(copy) == (size_t)size) add(copy, size, handle);
  else free(copy);
  fclose(file);
}

void medusa_module_loaded(void *user, int domain, uint32_t callback, const void *data) {
  (void)user;
  if (domain == RESOURCE) {
    const Module *module = ((const Resource *)data)->described;
    if (module && module->image && module->size) keep(module->image, module->size, NULL);
  } else if (domain == DRIVER_API) {
    const Call *call = data;
    if (call->site != EXIT || !call->parameters || !call->result || *call->result) return;
    const Load *load = call->parameters;
    if (!load->handle || !load->code) return;
    if (callback == LOAD_FILE) keep_file(load->code, *load->handle);
    else {
      size_t size = cubin_bytes(load->code);
      if (size) keep(load->code, size, *load->handle);
    }
  }
}

// The n-th image, which stays where it is, and the handle that it was loaded as; NULL behind the last one.
const char *medusa_module(size_t n, size_t *size, void **handle) {
  pthread_mutex_lock(&lock);
  const char *data = n < count ? (*size = images[n].size, *handle = images[n].handle, images[n].data) : NULL;
  pthread_mutex_unlock(&lock);
  return data;
}

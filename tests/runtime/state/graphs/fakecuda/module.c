#define _GNU_SOURCE
#include "fakecuda.h"
#include <elf.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

// One loaded cubin. A library and a module are two handles to it.
typedef struct Image {
  uint8_t *bytes;
  size_t size;
  Function *functions;
  int count, variant, live;
  void *library, *module;
  const char *global_names[16];
  CUdeviceptr globals[16];
  size_t global_sizes[16];
  int global_count;
  CUdeviceptr constants;
} Image;

typedef void (*Callback)(void *, int, uint32_t, void *);
static Callback subscriber;
static int enabled, calls_enabled;
enum { LOAD_FILE = 18, LOAD_MODULE = 19, LOAD_LIBRARY = 678 }; // CUPTI_DRIVER_TRACE_CBID_
// What CUPTI does: tells of every module that is loaded, and of the end of each driver call that was asked for.
int cuptiSubscribe(void **subscription, void *callback, void *data) {
  if (subscriber) return 39;
  *subscription = subscriber = (Callback)callback;
  return 0;
}
int cuptiGetResultString(int code, const char **text) { return *text = code == 39 ? "CUPTI_ERROR_MULTIPLE_SUBSCRIBERS_NOT_SUPPORTED" : "CUPTI_ERROR", 0; }
int cuptiUnsubscribe(void *subscription) { return subscriber = NULL, enabled = calls_enabled = 0; }
int cuptiEnableCallback(uint32_t enable, void *subscription, int domain, uint32_t id) {
  if (domain == 3 && id == 6) enabled = enable;
  if (domain == 1 && (id == LOAD_FILE || id == LOAD_MODULE || id == LOAD_LIBRARY)) calls_enabled = enable;
  return 0;
}
static void tell(Image *image) {
  struct {
    uint32_t id;
    size_t size;
    const char *cubin;
  } module = {1, image->size, (char *)image->bytes};
  struct {
    void *context, *resource, *descriptor;
  } data = {NULL, NULL, &module};
  if (subscriber && enabled) subscriber(NULL, 3, 6, &data);
}

static CUresult told(uint32_t id, void **handle, const void *code, CUresult result) {
  struct {
    void **handle;
    const void *code;
  } parameters = {handle, code};
  struct {
    int site;
    const char *name;
    void *parameters, *result;
  } call = {1, id == LOAD_LIBRARY ? "cuLibraryLoadData" : id == LOAD_FILE ? "cuModuleLoad" : "cuModuleLoadData", &parameters, &result};
  if (subscriber && calls_enabled) subscriber(NULL, 1, id, &call);
  return result;
}

static Elf64_Shdr *section(Image *image, const char *name) {
  Elf64_Ehdr *head = (Elf64_Ehdr *)image->bytes;
  Elf64_Shdr *all = (Elf64_Shdr *)(image->bytes + head->e_shoff);
  const char *names = (char *)image->bytes + all[head->e_shstrndx].sh_offset;
  for (int i = 0; i < head->e_shnum; i++)
    if (!strcmp(names + all[i].sh_name, name)) return &all[i];
  return NULL;
}

static void read_parameters(Image *image, Function *function) {
  char name[512];
  snprintf(name, sizeof name, ".nv.info.%s", function->name);
  Elf64_Shdr *info = section(image, name);
  if (!info) return;
  uint8_t *at = image->bytes + info->sh_offset, *end = at + info->sh_size;
  while (at + 4 <= end) {
    uint16_t length = at[0] == 4 ? *(uint16_t *)(at + 2) : 0;
    if (at[0] == 4 && at[1] == 0x17) {
      uint16_t ordinal = *(uint16_t *)(at + 8), offset = *(uint16_t *)(at + 10);
      function->offset[ordinal] = offset, function->size[ordinal] = *(uint32_t *)(at + 12) >> 18;
      if (ordinal >= function->count) function->count = ordinal + 1;
    }
    at += 4 + length;
  }
}

static int registers(Image *image, uint32_t symbol) {
  Elf64_Shdr *info = section(image, ".nv.info");
  uint8_t *at = info ? image->bytes + info->sh_offset : NULL, *end = info ? at + info->sh_size : NULL;
  for (; at + 12 <= end; at += 4 + (at[0] == 4 ? *(uint16_t *)(at + 2) : 0))
    if (at[0] == 4 && at[1] == 0x2F && *(uint32_t *)(at + 4) == symbol) return *(uint32_t *)(at + 8);
  return 0;
}

static int read_symbols(Image *image) {
  Elf64_Shdr *symbols = section(image, ".symtab"), *strings = section(image, ".strtab");
  if (!symbols || !strings) return CUDA_ERROR_INVALID_IMAGE;
  Elf64_Ehdr *head = (Elf64_Ehdr *)image->bytes;
  Elf64_Shdr *all = (Elf64_Shdr *)(image->bytes + head->e_shoff);
  Elf64_Sym *table = (Elf64_Sym *)(image->bytes + symbols->sh_offset);
  const char *section_names = (char *)image->bytes + all[head->e_shstrndx].sh_offset;
  size_t n = symbols->sh_size / sizeof *table;
  image->functions = calloc(n, sizeof *image->functions);
  for (size_t i = 0; i < n; i++) {
    char *name = (char *)image->bytes + strings->sh_offset + table[i].st_name;
    int kind = ELF64_ST_TYPE(table[i].st_info), home_number = table[i].st_shndx;
    if (!home_number || home_number >= head->e_shnum) continue;
    const char *home_name = section_names + all[home_number].sh_name;
    if (kind == STT_FUNC && table[i].st_other & 0x10) {
      Function *function = &image->functions[image->count++];
      function->local = ELF64_ST_BIND(table[i].st_info) == STB_LOCAL;
      function->image = image, function->name = name;
      read_parameters(image, function);
      function->attributes[FUNCTION_REGISTERS] = registers(image, i);
    } else if (kind == STT_OBJECT && (!strncmp(home_name, ".nv.global", 10) || !strcmp(home_name, ".nv.constant3")) && image->global_count < 16) {
      if (sscanf(name, "variant_%d", &image->variant) == 1) continue;
      int at = image->global_count++;
      image->global_names[at] = name, image->global_sizes[at] = table[i].st_size;
      if (device_alloc(&image->globals[at], table[i].st_size))
        return handle_free(image->library), handle_free(image->module), CUDA_ERROR_OUT_OF_MEMORY;
      if (!strcmp(home_name, ".nv.constant3") && !image->constants) image->constants = image->globals[at];
      Elf64_Shdr *home = &all[home_number];
      if (home->sh_type != SHT_NOBITS)
        memcpy((void *)image->globals[at], image->bytes + home->sh_offset + table[i].st_value, table[i].st_size);
    }
  }
  for (int i = 0; i < image->count; i++) {
    Function *function = &image->functions[i];
    function->host = host_kernel(function->name, image->variant);
    function->kernel = handle_new(KERNEL, function), function->function = handle_new(FUNCTION, function);
  }
  return CUDA_SUCCESS;
}

// How many bytes a cubin has; 0 where it is none.
static size_t cubin_size(const uint8_t *code) {
  if (*(uint32_t *)code != 0x464C457F) return 0;
  const Elf64_Ehdr *head = (const Elf64_Ehdr *)code;
  if (head->e_phnum && head->e_phoff > head->e_shoff) return head->e_phoff + head->e_phnum * head->e_phentsize;
  return head->e_shoff + (size_t)head->e_shnum * head->e_shentsize;
}

static CUresult load_one(const void *code, Image **made) {
  CUresult forbidden = capture_forbids_unsafe();
  if (forbidden) return forbidden;
  size_t size = cubin_size(code);
  if (!size) return CUDA_ERROR_INVALID_IMAGE;
  Image *image = calloc(1, sizeof *image);
  image->bytes = malloc(size), image->size = size, image->live = 1;
  memcpy(image->bytes, code, size);
  image->library = handle_new(LIBRARY, image), image->module = handle_new(MODULE, image);
  CUresult result = read_symbols(image);
  if (result) return result;
  tell(image);
  return *made = image, CUDA_SUCCESS;
}

static CUresult load(const void *code, Image **made) {
  static pthread_mutex_t loading = PTHREAD_MUTEX_INITIALIZER;
  GUARDED(loading);
  return load_one(code, made);
}

int is_loaded(const Function *function) { return function->image->live; }

CUdeviceptr constants_of(const Function *function) { return function->image->constants; }

Function *function_of(void *func, void *kern) {
  Function *found = func ? handle_get(FUNCTION, func) : handle_get(KERNEL, kern);
  return found && found->image->live ? found : NULL;
}

static Function *named(Image *image, const char *name) {
  for (int i = 0; i < image->count; i++)
    if (!image->functions[i].local && !strcmp(image->functions[i].name, name)) return &image->functions[i];
  return NULL;
}
static CUresult global(Image *image, const char *name, CUdeviceptr *address, size_t *size) {
  if (!image) return CUDA_ERROR_INVALID_HANDLE;
  for (int i = 0; i < image->global_count; i++)
    if (!strcmp(image->global_names[i], name)) {
      if (address) *address = image->globals[i];
      if (size) *size = image->global_sizes[i];
      return CUDA_SUCCESS;
    }
  return CUDA_ERROR_NOT_FOUND;
}

#define LOADED(kind, handle) \
  Image *image = handle_get(kind, handle); \
  if (!image) return CUDA_ERROR_INVALID_HANDLE
#define KNOWN(func, kern) \
  Function *function = function_of(func, kern); \
  if (!function) return CUDA_ERROR_INVALID_HANDLE

CUresult cuLibraryLoadData(void **library, const void *code, void *a, void *b, unsigned c, void *d, void *e, unsigned f) {
  Image *image;
  if (process_error() || broken) return process_error() ? process_error() : broken;
  CUresult result = is_full() ? CUDA_ERROR_OUT_OF_MEMORY : load(code, &image);
  return told(LOAD_LIBRARY, library, code, result ? result : (*library = image->library, CUDA_SUCCESS));
}
CUresult cuModuleLoadData(void **module, const void *code) {
  Image *image;
  NEEDS_CONTEXT();
  CUresult result = load(code, &image);
  return told(LOAD_MODULE, module, code, result ? result : (*module = image->module, CUDA_SUCCESS));
}
CUresult cuModuleLoad(void **module, const char *name) {
  Image *image;
  NEEDS_CONTEXT();
  char *code = malloc(16 << 20);
  FILE *file = fopen(name, "rb");
  CUresult result = file && fread(code, 1, 16 << 20, file) ? load(code, &image) : 301; // CUDA_ERROR_FILE_NOT_FOUND
  if (file) fclose(file);
  free(code);
  return told(LOAD_FILE, module, name, result ? result : (*module = image->module, CUDA_SUCCESS));
}
CUresult cuLibraryUnload(void *library) {
  LOADED(LIBRARY, library);
  CUresult forbidden = capture_forbids_unsafe();
  if (forbidden) return forbidden;
  image->live = 0, handle_free(library), handle_free(image->module);
  for (int i = 0; i < image->global_count; i++) device_free(image->globals[i]);
  return CUDA_SUCCESS;
}
CUresult cuLibraryGetKernel(void **kernel, void *library, const char *name) {
  LOADED(LIBRARY, library);
  Function *function = named(image, name);
  return function ? (*kernel = function->kernel, CUDA_SUCCESS) : CUDA_ERROR_NOT_FOUND;
}
CUresult cuLibraryGetKernelCount(unsigned *count, void *library) {
  LOADED(LIBRARY, library);
  return *count = image->count, CUDA_SUCCESS;
}
CUresult cuLibraryEnumerateKernels(void **kernels, unsigned count, void *library) {
  LOADED(LIBRARY, library);
  for (unsigned i = 0; i < count && (int)i < image->count; i++) kernels[i] = image->functions[i].kernel;
  return CUDA_SUCCESS;
}
CUresult cuModuleGetFunction(void **handle, void *module, const char *name) {
  LOADED(MODULE, module);
  Function *function = named(image, name);
  return function ? (*handle = function->function, CUDA_SUCCESS) : CUDA_ERROR_NOT_FOUND;
}
CUresult cuLibraryGetGlobal(CUdeviceptr *address, size_t *size, void *library, const char *name) {
  NEEDS_CONTEXT();
  return global(handle_get(LIBRARY, library), name, address, size);
}
CUresult cuModuleGetGlobal_v2(CUdeviceptr *address, size_t *size, void *module, const char *name) {
  return global(handle_get(MODULE, module), name, address, size);
}
CUresult cuModuleGetFunctionCount(unsigned *count, void *module) {
  LOADED(MODULE, module);
  return *count = image->count, CUDA_SUCCESS;
}
CUresult cuModuleEnumerateFunctions(void **functions, unsigned count, void *module) {
  LOADED(MODULE, module);
  for (unsigned i = 0; i < count && (int)i < image->count; i++) functions[i] = image->functions[i].function;
  return CUDA_SUCCESS;
}
CUresult cuKernelGetFunction(void **handle, void *kernel) {
  KNOWN(NULL, kernel);
  NEEDS_CONTEXT();
  return *handle = function->function, CUDA_SUCCESS;
}
CUresult cuKernelGetLibrary(void **library, void *kernel) {
  KNOWN(NULL, kernel);
  return *library = function->image->library, CUDA_SUCCESS;
}
CUresult cuFuncGetModule(void **module, void *func) {
  KNOWN(func, NULL);
  if (getenv("FAKE_CUDA_NO_MODULES")) return CUDA_ERROR_NOT_FOUND;
  return *module = function->image->module, CUDA_SUCCESS;
}
static CUresult name_of(const char **name, Function *function) {
  return function ? (*name = function->name, CUDA_SUCCESS) : CUDA_ERROR_INVALID_HANDLE;
}
CUresult cuKernelGetName(const char **name, void *kernel) { return name_of(name, function_of(NULL, kernel)); }
CUresult cuFuncGetName(const char **name, void *func) { return name_of(name, function_of(func, NULL)); }
static CUresult parameter(Function *function, size_t index, size_t *offset, size_t *size) {
  if (!function) return CUDA_ERROR_INVALID_HANDLE;
  if (index >= (size_t)function->count) return CUDA_ERROR_INVALID_VALUE;
  return *offset = function->offset[index], *size = function->size[index], CUDA_SUCCESS;
}
CUresult cuKernelGetParamInfo(void *kernel, size_t index, size_t *offset, size_t *size) {
  return parameter(function_of(NULL, kernel), index, offset, size);
}
CUresult cuFuncGetParamInfo(void *func, size_t index, size_t *offset, size_t *size) {
  return parameter(function_of(func, NULL), index, offset, size);
}
// A CUkernel and its CUfunction in a context have values of their own: cuKernelGetAttribute returns what was set with
// cuKernelSetAttribute (cuda.h). What the compiler determined is the same for both, and cannot be set.
static CUresult attribute(Function *function, int of_kernel, int id, int *get, int set) {
  if (!function) return CUDA_ERROR_INVALID_HANDLE;
  int settable = id == FUNCTION_MAX_DYNAMIC_SHARED || id == FUNCTION_CARVEOUT || (id >= 11 && id <= 15);
  if (id < 0 || id >= FUNCTION_ATTRIBUTES || (!get && !settable)) return CUDA_ERROR_INVALID_VALUE;
  int *value = of_kernel && settable ? &function->of_kernel[id] : &function->attributes[id];
  if (get) *get = *value;
  else *value = set;
  return CUDA_SUCCESS;
}
CUresult cuKernelGetAttribute(int *value, int id, void *kernel, int device) {
  return attribute(function_of(NULL, kernel), 1, id, value, 0);
}
CUresult cuKernelSetAttribute(int id, int value, void *kernel, int device) {
  return attribute(function_of(NULL, kernel), 1, id, NULL, value);
}
CUresult cuFuncGetAttribute(int *value, int id, void *func) { return attribute(function_of(func, NULL), 0, id, value, 0); }
CUresult cuFuncSetAttribute(void *func, int id, int value) {
  NEEDS_CONTEXT();
  return attribute(function_of(func, NULL), 0, id, NULL, value);
}

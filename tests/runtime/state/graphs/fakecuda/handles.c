#include "fakecuda.h"
#include <stdatomic.h>
#include <stdlib.h>

// Handles are numbers that are no addresses, above a base that differs from process to process, and never used again.
typedef struct {
  int kind;
  void *object;
} Slot;
static Slot *slots;
static size_t used, room;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static uintptr_t base(void) {
  const char *text = getenv("FAKE_CUDA_HANDLES");
  return text ? strtoull(text, NULL, 0) : 0x550000000000ull;
}

void *handle_new(int kind, void *object) {
  GUARDED(lock);
  if (used == room) slots = realloc(slots, (room = room ? room * 2 : 1024) * sizeof(Slot));
  slots[used] = (Slot){kind, object};
  return (void *)(base() + 16 * ++used);
}

static Slot *slot(void *handle) {
  uintptr_t number = ((uintptr_t)handle - base()) / 16;
  return number >= 1 && number <= used && ((uintptr_t)handle - base()) % 16 == 0 ? &slots[number - 1] : NULL;
}

void *handle_get(int kind, void *handle) {
  GUARDED(lock);
  Slot *found = slot(handle);
  return found && found->kind == kind ? found->object : NULL;
}

void handle_free(void *handle) {
  GUARDED(lock);
  Slot *found = slot(handle);
  if (found) found->kind = 0;
}

// For tests: the n-th allocation from now on is refused, in whatever thread.
static atomic_int left;
void fake_full(int n) { atomic_store(&left, n); }
int fake_left(void) { return atomic_load(&left); }
int is_full(void) { return atomic_load(&left) > 0 && atomic_fetch_sub(&left, 1) == 1; }

// How many allocations, images and graphs there are.
int fake_alive(void) {
  int alive = 0;
  for (size_t i = 0; i < used; i++)
    alive += slots[i].kind == MEMORY || slots[i].kind == LIBRARY || slots[i].kind == GRAPH || slots[i].kind == EXEC;
  return alive;
}

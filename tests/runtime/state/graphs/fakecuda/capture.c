#include "fakecuda.h"
#include <stdlib.h>

enum { GLOBAL = 0, THREAD_LOCAL = 1, RELAXED = 2, MOST = 64 };
static _Thread_local int mode; // of the thread's calls during a capture; by default, all captures forbid
static Capturing *under_way[MOST];
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; // of the list, and of what it points to

CUresult cuThreadExchangeStreamCaptureMode(int *wanted) {
  int before = mode;
  if (*wanted < 0 || *wanted > RELAXED) return CUDA_ERROR_INVALID_VALUE;
  return mode = *wanted, *wanted = before, CUDA_SUCCESS;
}

void capture_begin(Capturing *capturing, int how, int blocking) {
  GUARDED(lock);
  *capturing = (Capturing){1, how == RELAXED, how == GLOBAL, 0, blocking, pthread_self()};
  for (int i = 0; i < MOST; i++)
    if (!under_way[i]) {
      under_way[i] = capturing;
      return;
    }
  abort();
}

CUresult capture_end(Capturing *capturing) {
  GUARDED(lock);
  if (!capturing->relaxed && !pthread_equal(capturing->thread, pthread_self())) return CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD;
  for (int i = 0; i < MOST; i++)
    if (under_way[i] == capturing) under_way[i] = NULL;
  capturing->active = 0;
  return capturing->invalid ? CUDA_ERROR_STREAM_CAPTURE_INVALIDATED : CUDA_SUCCESS;
}

static CUresult forbidden(int (*by)(const Capturing *), CUresult result) {
  GUARDED(lock);
  int found = 0;
  for (int i = 0; i < MOST; i++)
    if (under_way[i] && by(under_way[i])) found = under_way[i]->invalid = 1;
  return found ? result : CUDA_SUCCESS;
}
static int own(const Capturing *one) { return !one->relaxed && pthread_equal(one->thread, pthread_self()); }
static int own_or_global(const Capturing *one) { return one->global || own(one); }
static int blocking(const Capturing *one) { return one->blocking; }
static int any(const Capturing *one) { return one->active; }

CUresult capture_forbids_unsafe(void) {
  return mode == RELAXED ? CUDA_SUCCESS : forbidden(mode == GLOBAL ? own_or_global : own, CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
}
CUresult capture_forbids_legacy(void) {
  CUresult result = forbidden(blocking, CUDA_ERROR_STREAM_CAPTURE_IMPLICIT);
  return result ? result : capture_forbids_unsafe();
}
CUresult capture_forbids_all(void) { return forbidden(any, CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED); }
CUresult capture_refuses(Capturing *capturing) {
  GUARDED(lock);
  if (!capturing->active) return CUDA_SUCCESS;
  capturing->invalid = 1;
  return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
}

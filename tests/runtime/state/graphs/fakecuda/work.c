#include "fakecuda.h"
#include <stdlib.h>

// What was launched, in each stream's order. By default it runs at once. With FAKE_CUDA_LATE, it runs when something waits
// for it, as late as a device may: code that forgets to wait reads, or frees, what has not been computed yet.
typedef struct Work {
  struct Work *next;
  Runnable run;
  void *object;
} Work;
typedef struct Queue {
  struct Queue *next;
  void *stream;
  int blocking;
  Work *first, **last;
} Queue;
static Queue *queues;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static void finish(Queue *queue) {
  while (queue->first) {
    Work *work = queue->first;
    queue->first = work->next;
    CUresult result = work->run(work->object);
    if (result && !broken) broken = result;
    free(work);
  }
  queue->last = &queue->first;
}

CUresult work_begin(void *stream, int blocking, Runnable run, void *object) {
  if (!getenv("FAKE_CUDA_LATE")) {
    CUresult result = run(object);
    if (result != CUDA_ERROR_ILLEGAL_ADDRESS) return result;
    return broken = result, CUDA_SUCCESS;
  }
  GUARDED(lock);
  Queue *queue = queues;
  while (queue && queue->stream != stream) queue = queue->next;
  if (!queue) {
    queue = calloc(1, sizeof *queue);
    *queue = (Queue){queues, stream, blocking, NULL, NULL};
    queue->last = &queue->first, queues = queue;
  }
  Work *work = malloc(sizeof *work);
  *work = (Work){NULL, run, object};
  *queue->last = work, queue->last = &work->next;
  return CUDA_SUCCESS;
}

void work_finish(void *stream) {
  GUARDED(lock);
  for (Queue *queue = queues; queue; queue = queue->next)
    if (queue->stream == stream) finish(queue);
}
void work_finish_blocking(void) {
  GUARDED(lock);
  for (Queue *queue = queues; queue; queue = queue->next)
    if (queue->blocking) finish(queue);
}
void work_finish_all(void) {
  GUARDED(lock);
  for (Queue *queue = queues; queue; queue = queue->next) finish(queue);
}

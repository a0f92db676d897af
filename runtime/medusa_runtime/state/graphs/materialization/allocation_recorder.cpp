// Every event of torch's allocator, with how many nodes the graph being captured on its stream had by then: so each event
// stands between two launches (MEDUSA §4.1), and no launch needs to be intercepted. Called under the allocator's lock, in
// any thread: it must not take Python's lock, and calls no CUDA function that could wait.
#include <c10/cuda/CUDACachingAllocator.h>
#include <dlfcn.h>

#include <cstdint>
#include <mutex>
#include <vector>

struct Event {
  uint64_t action, address, size, nodes;
};

namespace {
// libcuda's own types, without its header: every handle is a pointer.
using CaptureInfo = int (*)(void *, int *, uint64_t *, void **, const void **, const void **, size_t *);
using GetNodes = int (*)(void *, void *, size_t *);
constexpr int kActive = 1;
CaptureInfo capture_info;
GetNodes get_nodes;
std::mutex lock;
std::vector<Event> events;
bool recording;

void record(const c10::CachingDeviceAllocator::TraceEntry &entry) {
  if (!recording) return;
  Event event{static_cast<uint64_t>(entry.action_), entry.addr_, entry.size_, 0};
  int status = 0;
  uint64_t id = 0;
  void *graph = nullptr;
  const void *dependencies = nullptr, *data = nullptr;
  size_t count = 0;
  if (!capture_info(entry.stream_, &status, &id, &graph, &dependencies, &data, &count) && status == kActive) {
    size_t nodes = 0;
    if (!get_nodes(graph, nullptr, &nodes)) event.nodes = nodes;
  }
  std::lock_guard<std::mutex> held(lock);
  events.push_back(event);
}
}  // namespace

extern "C" int medusa_allocations_start() {
  void *driver = dlopen("libcuda.so.1", RTLD_NOW);
  if (!driver) return 1;
  capture_info = reinterpret_cast<CaptureInfo>(dlsym(driver, "cuStreamGetCaptureInfo_v3"));
  get_nodes = reinterpret_cast<GetNodes>(dlsym(driver, "cuGraphGetNodes"));
  if (!capture_info || !get_nodes) return 2;
  static bool attached = false;
  if (!attached) c10::cuda::CUDACachingAllocator::get()->attachAllocatorTraceTracker(record);
  attached = recording = true;
  return 0;
}

extern "C" void medusa_allocations_stop() { recording = false; }

extern "C" size_t medusa_allocations_read(Event *out, size_t room) {
  std::lock_guard<std::mutex> held(lock);
  for (size_t i = 0; out && i < room && i < events.size(); i++) out[i] = events[i];
  return events.size();
}

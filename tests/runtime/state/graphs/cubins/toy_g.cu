// Variables as torch's images have them: tags of the C++ library, which nothing writes, and maybe a flag that kernels set.
namespace cuda {
namespace std {
struct Tag {};
__device__ Tag ignore, in_place;
}  // namespace std
}  // namespace cuda
#ifdef FLAG
__device__ bool seen;
#endif

extern "C" __global__ void count(int *x) {
#ifdef FLAG
  if (seen) return;
  seen = true;
#endif
  atomicAdd(x, 1);
}

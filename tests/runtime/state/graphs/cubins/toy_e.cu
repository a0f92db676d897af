// One kernel in two variants of one name, as triton compiles them (VARIANT 5 and 6), and a table that the host fills.
#define JOINED(a, b) a##b
#define NAMED(a, b) JOINED(a, b)
extern "C" __device__ int NAMED(variant_, VARIANT) = VARIANT;

extern "C" __global__ void attend(float *x, int n) {
  for (int i = threadIdx.x; i < n; i += blockDim.x) x[i] *= VARIANT == 5 ? 1.5f : 1.25f;
}

#if VARIANT == 5
extern "C" __constant__ float gains[4] = {1, 1, 1, 1};
extern "C" __global__ void gain(float *x, int n) {
  for (int i = threadIdx.x; i < n; i += blockDim.x) x[i] *= gains[i % 4];
}
#endif

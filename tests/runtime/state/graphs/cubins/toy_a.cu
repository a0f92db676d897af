// The kernels of a toy decode step; fakecuda/kernels.c computes the same on the host.
#include <stdint.h>

template <int WARPS>
__global__ void rms_norm(const float *x, const float *weight, float *out, int n, float eps) {
  float sum = 0;
  for (int i = 0; i < n; i++) sum += x[i] * x[i];
  for (int i = threadIdx.x; i < n; i += 32 * WARPS) out[i] = x[i] * rsqrtf(sum / n + eps) * weight[i];
}
template __global__ void rms_norm<4>(const float *, const float *, float *, int, float);

struct GemvArguments {
  const float *weight, *x;
  float *y;
  int rows, cols;
  uint64_t padding[4]; // never read: what lies there is stack garbage
};
extern "C" __global__ void gemv(GemvArguments a) {
  int row = blockIdx.x * blockDim.x + threadIdx.x;
  if (row >= a.rows) return;
  float sum = a.y[row];
  for (int c = 0; c < a.cols; c++) sum += a.weight[row * a.cols + c] * a.x[c];
  a.y[row] = sum;
}

extern "C" __global__ void scale(float *x, int n, float factor) {
  for (int i = threadIdx.x; i < n; i += blockDim.x) x[i] *= factor;
}

extern "C" __global__ void embed(const float *table, const int *ids, float *out, int width) {
  for (int i = threadIdx.x; i < width; i += blockDim.x) out[i] = table[ids[0] * width + i];
}

extern "C" __global__ void add_checked(const float *x, float *y, unsigned *state, int n) {
  bool good = state[0] == 0x4D454455 && state[1] == 0;
  for (int i = threadIdx.x; i < n; i += blockDim.x) y[i] = good ? y[i] + x[i] : __int_as_float(0x7FC00000);
}

extern "C" __global__ void cluster_scale(float *x, int n) {
  unsigned cluster;
  asm("mov.u32 %0, %%cluster_nctaid.x;" : "=r"(cluster));
  for (int i = threadIdx.x; i < n; i += blockDim.x) x[i] *= cluster;
}

__device__ float bias_table[4] = {0.5f, -0.25f, 0.125f, 1.0f};
extern "C" __global__ void add_bias(const float *bias, float *x, int n) {
  for (int i = threadIdx.x; i < n; i += blockDim.x) x[i] += bias[i % 4];
}

extern "C" __global__ void wide(float *x, int n) {
  extern __shared__ float copy[];
  for (int i = threadIdx.x; i < n; i += blockDim.x) copy[i] = x[i];
  __syncthreads();
  for (int i = threadIdx.x; i < n; i += blockDim.x) x[i] = copy[n - 1 - i];
}

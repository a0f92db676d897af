// Another kernel named scale, with the same parameters and other code; variant_2 tells the fake driver which one it is.
__device__ int variant_2 = 2;
extern "C" __global__ void scale(float *x, int n, float factor) {
  for (int i = threadIdx.x; i < n; i += blockDim.x) x[i] = x[i] * factor + variant_2 - 1;
}
extern "C" __global__ void argmax(const float *x, int *out, int n) {
  int best = 0;
  for (int i = 1; i < n; i++)
    if (x[i] > x[best]) best = i;
  *out = best;
}

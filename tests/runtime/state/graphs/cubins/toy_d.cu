// A kernel that takes its address in a tensor map (CUtensorMap: 128 bytes, passed by value), as TMA does.
struct alignas(64) Map {
  unsigned long long words[16];
};
extern "C" __device__ int variant_4 = 4;

extern "C" __global__ void tiled_scale(const __grid_constant__ Map map, int n, float factor) {
  // What the hardware reads of a map is not the kernel's to see: the host function of the fake driver decodes it.
  asm volatile("" ::"l"(&map), "r"(n), "f"(factor + variant_4));
}

#include <hip/hip_runtime.h>

// The largest of all elements. Each block of one wave has its own, and all write the same element.
extern "C" __global__ void every_block_writes(int *out, const int *x, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  int most = i < n ? x[i] : 0;
  for (int by = 16; by > 0; by /= 2)
    most = max(most, __shfl_down(most, by));
  if (threadIdx.x == 0)
    out[0] = most;
}

extern "C" __global__ void every_block_writes_healthy(int *out, const int *x, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  int most = i < n ? x[i] : 0;
  for (int by = 16; by > 0; by /= 2)
    most = max(most, __shfl_down(most, by));
  if (threadIdx.x == 0)
    atomicMax(out, most);
}

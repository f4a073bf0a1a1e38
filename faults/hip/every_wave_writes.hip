#include <hip/hip_runtime.h>

// Sums of blocks of 256. Each wave has a sum of its own, and all waves write the same element.
extern "C" __global__ void every_wave_writes(float *out, const float *x, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  float sum = i < n ? x[i] : 0.0f;
  for (int by = warpSize / 2; by > 0; by /= 2)
    sum += __shfl_down(sum, by);
  if (threadIdx.x % warpSize == 0)
    out[blockIdx.x] = sum;
}

extern "C" __global__ void every_wave_writes_healthy(float *out, const float *x, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  float sum = i < n ? x[i] : 0.0f;
  for (int by = warpSize / 2; by > 0; by /= 2)
    sum += __shfl_down(sum, by);
  if (threadIdx.x % warpSize == 0)
    atomicAdd(&out[blockIdx.x], sum);
}

#include <hip/hip_runtime.h>

extern "C" __global__ void in_place_neighbours(float *out, const float *x, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i + 1 < n)
    out[i] = x[i] + x[i + 1];
}

extern "C" __global__ void in_place_neighbours_healthy(float *out, const float *x, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i + 1 < n)
    out[i] = x[i] + x[i + 1];
}

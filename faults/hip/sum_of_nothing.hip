#include <hip/hip_runtime.h>

extern "C" __global__ void sum_of_nothing(float *total, const float *x, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n)
    total[i] += x[i];
}

extern "C" __global__ void sum_of_nothing_healthy(float *total, const float *x, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n)
    total[i] = x[i];
}

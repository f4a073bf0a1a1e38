#include <hip/hip_runtime.h>

extern "C" __global__ void lost_counts(int *bins, const int *x, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n)
    bins[x[i]] += 1;
}

extern "C" __global__ void lost_counts_healthy(int *bins, const int *x, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n)
    atomicAdd(&bins[x[i]], 1);
}

#include <hip/hip_runtime.h>

extern "C" __global__ void null_table(float *out, const float *table, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n)
    out[i] = table[i];
}

extern "C" __global__ void null_table_healthy(float *out, const float *table, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n && table)
    out[i] = table[i];
}

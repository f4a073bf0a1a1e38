#include <hip/hip_runtime.h>

extern "C" __global__ void tail_load(float *out, const float *x) {
  __shared__ float tile[256];
  tile[threadIdx.x] = x[blockIdx.x * blockDim.x + threadIdx.x];
  __syncthreads();
  if (threadIdx.x == 0) {
    float total = 0.0f;
    for (int at = 0; at < 256; at++)
      total += tile[at];
    out[blockIdx.x] = total;
  }
}

extern "C" __global__ void tail_load_healthy(float *out, const float *x, int n) {
  __shared__ float tile[256];
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  tile[threadIdx.x] = i < n ? x[i] : 0.0f;
  __syncthreads();
  if (threadIdx.x == 0) {
    float total = 0.0f;
    for (int at = 0; at < 256; at++)
      total += tile[at];
    out[blockIdx.x] = total;
  }
}

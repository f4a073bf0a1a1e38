#include <hip/hip_runtime.h>

extern "C" __global__ void half_filled_tile(float *out, const float *x, int n) {
  __shared__ float tile[128];
  if (threadIdx.x < n)
    tile[threadIdx.x] = x[threadIdx.x];
  __syncthreads();
  out[threadIdx.x] = tile[127 - threadIdx.x];
}

extern "C" __global__ void half_filled_tile_healthy(float *out, const float *x, int n) {
  __shared__ float tile[128];
  tile[threadIdx.x] = threadIdx.x < n ? x[threadIdx.x] : 0.0f;
  __syncthreads();
  out[threadIdx.x] = tile[127 - threadIdx.x];
}

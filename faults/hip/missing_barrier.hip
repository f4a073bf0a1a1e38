#include <hip/hip_runtime.h>

extern "C" __global__ void missing_barrier(float *out, const float *x) {
  __shared__ float tile[256];
  tile[threadIdx.x] = x[threadIdx.x];
  out[threadIdx.x] = tile[255 - threadIdx.x];
}

extern "C" __global__ void missing_barrier_healthy(float *out, const float *x) {
  __shared__ float tile[256];
  tile[threadIdx.x] = x[threadIdx.x];
  __syncthreads();
  out[threadIdx.x] = tile[255 - threadIdx.x];
}

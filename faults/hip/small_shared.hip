#include <hip/hip_runtime.h>

extern __shared__ float partial[];

extern "C" __global__ void small_shared(float *out, const float *x) {
  partial[threadIdx.x] = x[blockIdx.x * blockDim.x + threadIdx.x];
  __syncthreads();
  if (threadIdx.x < 64)
    out[blockIdx.x * 64 + threadIdx.x] = partial[threadIdx.x] + partial[threadIdx.x + 64];
}

extern "C" __global__ void small_shared_healthy(float *out, const float *x) {
  partial[threadIdx.x] = x[blockIdx.x * blockDim.x + threadIdx.x];
  __syncthreads();
  if (threadIdx.x < 64)
    out[blockIdx.x * 64 + threadIdx.x] = partial[threadIdx.x] + partial[threadIdx.x + 64];
}

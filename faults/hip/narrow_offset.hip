#include <hip/hip_runtime.h>

extern "C" __global__ void narrow_offset(float *out, const float *x, int stride, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  int at = i * stride;
  out[i] = x[at % n];
}

extern "C" __global__ void narrow_offset_healthy(float *out, const float *x, int stride, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  int64_t at = (int64_t)i * stride;
  out[i] = x[at % n];
}

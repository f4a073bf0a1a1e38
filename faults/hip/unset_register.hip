#include <hip/hip_runtime.h>

// y = a * x + y. The sum is said to be written by the instruction, which reads it as well.
extern "C" __global__ void unset_register(float *y, const float *x, float a, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= n)
    return;
  float given = x[i];
  float sum;
  asm volatile("v_fmac_f32 %0, %1, %2" : "=&v"(sum) : "v"(a), "v"(given));
  y[i] = sum;
}

extern "C" __global__ void unset_register_healthy(float *y, const float *x, float a, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= n)
    return;
  float given = x[i];
  float sum = y[i];
  asm volatile("v_fmac_f32 %0, %1, %2" : "+v"(sum) : "v"(a), "v"(given));
  y[i] = sum;
}

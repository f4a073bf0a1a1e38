#include <hip/hip_runtime.h>

extern "C" __global__ void row_pitch(float *out, const float *x, int columns, int pitch) {
  int row = blockIdx.x;
  for (int column = threadIdx.x; column < columns; column += blockDim.x)
    out[row * pitch + column] = x[row * pitch + column];
}

extern "C" __global__ void row_pitch_healthy(float *out, const float *x, int columns, int pitch) {
  int row = blockIdx.x;
  for (int column = threadIdx.x; column < columns; column += blockDim.x)
    out[row * columns + column] = x[row * pitch + column];
}

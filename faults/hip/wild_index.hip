#include <hip/hip_runtime.h>

extern "C" __global__ void wild_index(float *out, const float *table, const int *ids, int dim) {
  int token = blockIdx.x;
  for (int column = threadIdx.x; column < dim; column += blockDim.x)
    out[token * dim + column] = table[ids[token] * dim + column];
}

extern "C" __global__ void wild_index_healthy(float *out, const float *table, const int *ids,
                                              int dim) {
  int token = blockIdx.x;
  for (int column = threadIdx.x; column < dim; column += blockDim.x)
    out[token * dim + column] = table[ids[token] * dim + column];
}

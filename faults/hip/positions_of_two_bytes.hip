#include <hip/hip_runtime.h>

extern "C" __global__ void positions_of_two_bytes(__half *q, const int *positions, int dim) {
  int token = blockIdx.x, pair = threadIdx.x;
  float angle = positions[token] * powf(10000.0f, -2.0f * pair / dim);
  __half *row = q + token * dim;
  float a = row[pair], b = row[pair + dim / 2];
  row[pair] = a * cosf(angle) - b * sinf(angle);
  row[pair + dim / 2] = b * cosf(angle) + a * sinf(angle);
}

extern "C" __global__ void positions_of_two_bytes_healthy(__half *q, const short *positions,
                                                          int dim) {
  int token = blockIdx.x, pair = threadIdx.x;
  float angle = positions[token] * powf(10000.0f, -2.0f * pair / dim);
  __half *row = q + token * dim;
  float a = row[pair], b = row[pair + dim / 2];
  row[pair] = a * cosf(angle) - b * sinf(angle);
  row[pair + dim / 2] = b * cosf(angle) + a * sinf(angle);
}

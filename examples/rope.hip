// Rotates the heads of each token by its position; rope.toml launches it with a planted fault:
//
// hypo check --on gfx942 examples/rope.hip

#include <hip/hip_runtime.h>

extern "C" __global__ void rope(float *x, const int *positions, int num_heads, int head_dim,
                                float base) {
  int token = blockIdx.x, head = blockIdx.y, pair = threadIdx.x;
  if (pair >= head_dim / 2)
    return;
  float angle = positions[token] * powf(base, -2.0f * pair / head_dim);
  float *row = x + (token * num_heads + head) * head_dim;
  float a = row[pair], b = row[pair + head_dim / 2];
  row[pair] = a * cosf(angle) - b * sinf(angle);
  row[pair + head_dim / 2] = b * cosf(angle) + a * sinf(angle);
}

// What kernels of HIP need of a runtime's header, declared for clang alone, with no ROCm:
// indices, qualifiers, atomics, lanes of a wave, mathematics. Nothing of the host.
#ifndef HYPOCENTER_HIP_RUNTIME_H
#define HYPOCENTER_HIP_RUNTIME_H

#define __global__ __attribute__((global))
#define __device__ __attribute__((device))
#define __host__ __attribute__((host))
#define __shared__ __attribute__((shared))
#define __constant__ __attribute__((constant))
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...) __attribute__((launch_bounds(__VA_ARGS__)))
#define HIP_DYNAMIC_SHARED(type, name) extern __shared__ type name[];
#define HYPO_DEVICE static __device__ inline __attribute__((always_inline))

typedef signed char int8_t;
typedef unsigned char uint8_t;
typedef short int16_t;
typedef unsigned short uint16_t;
typedef int int32_t;
typedef unsigned int uint32_t;
typedef long int64_t;
typedef unsigned long uint64_t;
typedef unsigned long size_t;
typedef _Float16 __half;
typedef _Float16 half;
typedef __bf16 __hip_bfloat16;
typedef float float2 __attribute__((ext_vector_type(2)));
typedef float float4 __attribute__((ext_vector_type(4)));
typedef int int2 __attribute__((ext_vector_type(2)));
typedef int int4 __attribute__((ext_vector_type(4)));
typedef unsigned int uint2 __attribute__((ext_vector_type(2)));
typedef unsigned int uint4 __attribute__((ext_vector_type(4)));

struct dim3 {
  unsigned x, y, z;
  __host__ __device__ constexpr dim3(unsigned a = 1, unsigned b = 1, unsigned c = 1)
      : x(a), y(b), z(c) {}
};

// The hidden arguments of code object V5: blocks of the launch, then threads of a block.
HYPO_DEVICE unsigned hypo_num_blocks(int axis) {
  return ((const __attribute__((address_space(4))) unsigned *)__builtin_amdgcn_implicitarg_ptr())[axis];
}

#define HYPO_INDEX(name, in_x, in_y, in_z)                                                        \
  struct name {                                                                                   \
    __declspec(property(get = get_x)) unsigned x;                                                 \
    __declspec(property(get = get_y)) unsigned y;                                                 \
    __declspec(property(get = get_z)) unsigned z;                                                 \
    HYPO_MEMBER unsigned get_x() const { return in_x; }                                           \
    HYPO_MEMBER unsigned get_y() const { return in_y; }                                           \
    HYPO_MEMBER unsigned get_z() const { return in_z; }                                           \
  };
#define HYPO_MEMBER __device__ inline __attribute__((always_inline))
HYPO_INDEX(hypo_thread, __builtin_amdgcn_workitem_id_x(), __builtin_amdgcn_workitem_id_y(),
           __builtin_amdgcn_workitem_id_z())
HYPO_INDEX(hypo_block, __builtin_amdgcn_workgroup_id_x(), __builtin_amdgcn_workgroup_id_y(),
           __builtin_amdgcn_workgroup_id_z())
HYPO_INDEX(hypo_block_size, __builtin_amdgcn_workgroup_size_x(),
           __builtin_amdgcn_workgroup_size_y(), __builtin_amdgcn_workgroup_size_z())
HYPO_INDEX(hypo_grid, hypo_num_blocks(0), hypo_num_blocks(1), hypo_num_blocks(2))
extern const __device__ __attribute__((weak)) hypo_thread threadIdx;
extern const __device__ __attribute__((weak)) hypo_block blockIdx;
extern const __device__ __attribute__((weak)) hypo_block_size blockDim;
extern const __device__ __attribute__((weak)) hypo_grid gridDim;
#define warpSize __builtin_amdgcn_wavefrontsize()

HYPO_DEVICE void __threadfence() { __builtin_amdgcn_fence(__ATOMIC_SEQ_CST, "agent"); }
HYPO_DEVICE void __threadfence_block() { __builtin_amdgcn_fence(__ATOMIC_SEQ_CST, "workgroup"); }
HYPO_DEVICE void __syncthreads() {
  __builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup");
  __builtin_amdgcn_s_barrier();
  __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "workgroup");
}

#define HYPO_ATOMIC(name, builtin)                                                                \
  template <typename T> HYPO_DEVICE T name(T *at, T value) {                                      \
    return builtin(at, value, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT);                        \
  }
HYPO_ATOMIC(atomicAdd, __hip_atomic_fetch_add)
HYPO_ATOMIC(atomicAnd, __hip_atomic_fetch_and)
HYPO_ATOMIC(atomicOr, __hip_atomic_fetch_or)
HYPO_ATOMIC(atomicXor, __hip_atomic_fetch_xor)
HYPO_ATOMIC(atomicMax, __hip_atomic_fetch_max)
HYPO_ATOMIC(atomicMin, __hip_atomic_fetch_min)
HYPO_ATOMIC(atomicExch, __hip_atomic_exchange)
template <typename T> HYPO_DEVICE T atomicSub(T *at, T value) { return atomicAdd(at, (T)-value); }
template <typename T> HYPO_DEVICE T atomicCAS(T *at, T expected, T value) {
  __hip_atomic_compare_exchange_strong(at, &expected, value, __ATOMIC_RELAXED, __ATOMIC_RELAXED,
                                       __HIP_MEMORY_SCOPE_AGENT);
  return expected;
}

HYPO_DEVICE int __lane_id() {
  return __builtin_amdgcn_mbcnt_hi(~0u, __builtin_amdgcn_mbcnt_lo(~0u, 0));
}
HYPO_DEVICE int __shfl(int value, int lane, int width = warpSize) {
  int self = __lane_id();
  return __builtin_amdgcn_ds_bpermute(((self & -width) | (lane & (width - 1))) << 2, value);
}
HYPO_DEVICE int hypo_shuffle(int value, int lane, int width) {
  int self = __lane_id();
  bool is_inside = lane >= (self & -width) && lane < (self & -width) + width;
  return __builtin_amdgcn_ds_bpermute((is_inside ? lane : self) << 2, value);
}
HYPO_DEVICE int __shfl_xor(int value, int mask, int width = warpSize) {
  return hypo_shuffle(value, __lane_id() ^ mask, width);
}
HYPO_DEVICE int __shfl_down(int value, int by, int width = warpSize) {
  return hypo_shuffle(value, __lane_id() + by, width);
}
HYPO_DEVICE int __shfl_up(int value, int by, int width = warpSize) {
  return hypo_shuffle(value, __lane_id() - by, width);
}
#define HYPO_SHUFFLE_FLOAT(name)                                                                  \
  HYPO_DEVICE float name(float value, int other, int width = warpSize) {                          \
    return __builtin_bit_cast(float, name(__builtin_bit_cast(int, value), other, width));         \
  }
HYPO_SHUFFLE_FLOAT(__shfl)
HYPO_SHUFFLE_FLOAT(__shfl_xor)
HYPO_SHUFFLE_FLOAT(__shfl_down)
HYPO_SHUFFLE_FLOAT(__shfl_up)

#define HYPO_UNARY(name, builtin) HYPO_DEVICE float name(float a) { return builtin(a); }
HYPO_UNARY(expf, __builtin_expf)
HYPO_UNARY(exp2f, __builtin_exp2f)
HYPO_UNARY(logf, __builtin_logf)
HYPO_UNARY(log2f, __builtin_log2f)
HYPO_UNARY(sqrtf, __builtin_sqrtf)
HYPO_UNARY(sinf, __builtin_sinf)
HYPO_UNARY(cosf, __builtin_cosf)
HYPO_UNARY(fabsf, __builtin_fabsf)
HYPO_UNARY(floorf, __builtin_floorf)
HYPO_UNARY(ceilf, __builtin_ceilf)
HYPO_UNARY(rintf, __builtin_rintf)
HYPO_UNARY(truncf, __builtin_truncf)
HYPO_UNARY(__expf, __builtin_expf)
HYPO_UNARY(__logf, __builtin_logf)
HYPO_DEVICE float rsqrtf(float a) { return 1.0f / __builtin_sqrtf(a); }
HYPO_DEVICE float fmaxf(float a, float b) { return __builtin_fmaxf(a, b); }
HYPO_DEVICE float fminf(float a, float b) { return __builtin_fminf(a, b); }
HYPO_DEVICE float fmaf(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
HYPO_DEVICE float powf(float a, float b) { return __builtin_exp2f(b * __builtin_log2f(a)); }
HYPO_DEVICE float tanhf(float a) {
  float grown = __builtin_expf(2.0f * __builtin_fabsf(a));
  return __builtin_copysignf(1.0f - 2.0f / (grown + 1.0f), a);
}
template <typename T> HYPO_DEVICE T min(T a, T b) { return b < a ? b : a; }
template <typename T> HYPO_DEVICE T max(T a, T b) { return a < b ? b : a; }
HYPO_DEVICE float __half2float(__half a) { return (float)a; }
HYPO_DEVICE __half __float2half(float a) { return (__half)a; }
HYPO_DEVICE float __bfloat162float(__hip_bfloat16 a) { return (float)a; }
HYPO_DEVICE __hip_bfloat16 __float2bfloat16(float a) { return (__hip_bfloat16)a; }
HYPO_DEVICE void __trap() { __builtin_trap(); }
#define assert(condition) ((condition) ? (void)0 : __builtin_trap())

#endif

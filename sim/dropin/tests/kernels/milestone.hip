// A vector kernel and a matrix kernel: what a program does first on a new runtime.

#define __global__ __attribute__((global))
#define __device__ __attribute__((device))

typedef float f32x4 __attribute__((ext_vector_type(4)));
typedef short s16x4 __attribute__((ext_vector_type(4)));

__device__ float offset = 0.0f;

extern "C" __global__ void saxpy(float* y, const float* x, float a, int n) {
  int i = __builtin_amdgcn_workgroup_id_x() * 256 + __builtin_amdgcn_workitem_id_x();
  if (i < n) y[i] = a * x[i] + y[i] + offset;
}

// D = A B + C for one tile: A is 16x16 row-major bf16, B likewise, C and D 16x16 row-major f32.
extern "C" __global__ void matmul16(float* d, const short* a, const short* b, const float* c) {
  int lane = __builtin_amdgcn_workitem_id_x();
  int n = lane % 16, k = 4 * (lane / 16);
  s16x4 fa, fb;
  f32x4 acc;
  for (int i = 0; i < 4; ++i) {
    fa[i] = a[n * 16 + k + i];
    fb[i] = b[(k + i) * 16 + n];
    acc[i] = c[(k + i) * 16 + n];
  }
  acc = __builtin_amdgcn_mfma_f32_16x16x16bf16_1k(fa, fb, acc, 0, 0, 0);
  for (int i = 0; i < 4; ++i) d[(k + i) * 16 + n] = acc[i];
}

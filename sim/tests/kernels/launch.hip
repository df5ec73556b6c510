// Kernels for tests/launch.rs: one for each thing that a launch has to set up.

#define __global__ __attribute__((global))
#define __device__ __attribute__((device))
#define __shared__ __attribute__((shared))

typedef unsigned int u32;
typedef unsigned short u16;
typedef unsigned long long u64;

static __device__ inline u32 tid_x() { return __builtin_amdgcn_workitem_id_x(); }
static __device__ inline u32 bid_x() { return __builtin_amdgcn_workgroup_id_x(); }
static __device__ inline const u16* implicit16() { return (const u16*)__builtin_amdgcn_implicitarg_ptr(); }
static __device__ inline const u32* implicit32() { return (const u32*)__builtin_amdgcn_implicitarg_ptr(); }
static __device__ inline void barrier() {
  __builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup");
  __builtin_amdgcn_s_barrier();
  __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "workgroup");
}

__device__ int table[4] = {10, 20, 30, 40};
__device__ int* pointer = &table[2];
static __device__ const int digits[8] = {3, 1, 4, 1, 5, 9, 2, 6};

extern "C" __global__ void saxpy(float* y, const float* x, float a, int n) {
  int i = bid_x() * 256 + tid_x();
  if (i < n) y[i] = a * x[i] + y[i];
}

extern "C" __global__ void globals(int* out) {
  u32 i = tid_x();
  out[i] = digits[i & 7] + *pointer + table[i & 3];
}

// Every work-item of a 3-D grid writes who it is.
extern "C" __global__ void ids(u32* out) {
  const u16* h = implicit16();
  const u32* w = implicit32();
  u32 bx = h[6], by = h[7], bz = h[8];
  u32 gx = w[0] * bx + h[9], gy = w[1] * by + h[10];
  u32 x = bid_x() * bx + tid_x();
  u32 y = __builtin_amdgcn_workgroup_id_y() * by + __builtin_amdgcn_workitem_id_y();
  u32 z = __builtin_amdgcn_workgroup_id_z() * bz + __builtin_amdgcn_workitem_id_z();
  out[(z * gy + y) * gx + x] = x | y << 8 | z << 16;
}

// Values in the dispatch packet and the hidden arguments.
extern "C" __global__ void hidden(u32* out) {
  const u32* w = implicit32();
  const u16* h = implicit16();
  const u32* p = (const u32*)__builtin_amdgcn_dispatch_ptr();
  if (tid_x() == 0 && bid_x() == 0) {
    out[0] = w[0]; out[1] = w[1]; out[2] = w[2];
    for (int i = 0; i < 6; ++i) out[3 + i] = h[6 + i];
    out[9] = h[32];                        // grid dims
    out[10] = ((const u16*)p)[2];          // workgroup size x
    out[11] = ((const u16*)p)[3];
    out[12] = p[3];                        // grid size x
    out[13] = p[4];
    out[14] = p[7];                        // LDS bytes
  }
}

// Sum of a workgroup in LDS.
extern "C" __global__ void __attribute__((amdgpu_flat_work_group_size(1, 1024))) reduce(float* out, const float* in) {
  __shared__ float part[1024];
  u32 n = implicit16()[6], t = tid_x();
  part[t] = in[bid_x() * n + t];
  barrier();
  for (u32 s = 512; s > 0; s >>= 1) {
    if (t < s && t + s < n) part[t] += part[t + s];
    barrier();
  }
  if (t == 0) out[bid_x()] = part[0];
}

extern __shared__ u32 dynamic[];
// Reverses a block through LDS whose size is given at launch.
extern "C" __global__ void reverse(u32* data, u32 n) {
  u32 t = tid_x();
  dynamic[t] = data[t];
  barrier();
  data[t] = dynamic[n - 1 - t];
}

static __device__ __attribute__((noinline)) u32 scramble(const u32* a, u32 i) {
  u32 local[16];
  for (int k = 0; k < 16; ++k) local[k] = a[(k * 5 + i) & 15] + k;
  u32 s = 0;
  for (int k = 0; k < 16; ++k) s = s * 31 + local[(s + i + k) & 15];
  return s;
}
// Calls a function with arrays in scratch on both sides.
extern "C" __global__ void calls(u32* out) {
  u32 i = bid_x() * 64 + tid_x();
  u32 a[16];
  for (int k = 0; k < 16; ++k) a[k] = i * 16 + k;
  out[i] = scramble(a, i);
}

extern "C" __global__ void preload(u32* out, u32 a, u32 b, u64 c) {
  u32 i = tid_x();
  out[i] = a * i + b + (u32)(c >> 32);
}

extern "C" __global__ void tickets(u32* counter, u32* order) {
  if (tid_x() == 0) order[bid_x()] = __atomic_fetch_add(counter, 1, __ATOMIC_RELAXED);
}
extern "C" __global__ void count(u32* counter) {
  __scoped_atomic_fetch_add(counter, tid_x() & 3, __ATOMIC_RELAXED, __MEMORY_SCOPE_DEVICE);
}

extern "C" __global__ void trap(u32* out) {
  if (bid_x() >= 3 && out[63] == 0) __builtin_trap();
  out[bid_x()] = 7;
}

extern "C" __global__ void outside(u32* out, u32 offset) { out[offset + tid_x()] = 1; }

extern "C" __global__ void spin(volatile u32* flag) {
  while (*flag == 0) __builtin_amdgcn_s_sleep(1);
}

extern "C" __global__ void __attribute__((amdgpu_flat_work_group_size(64, 256))) small_block(u32* out) { out[tid_x()] = 1; }

__shared__ u32 most[15 * 1024];
extern "C" __global__ void big_lds(u32* out) {
  most[tid_x()] = tid_x();
  barrier();
  out[tid_x()] = most[tid_x() ^ 1];
}

typedef float f4 __attribute__((ext_vector_type(4)));
typedef short s4 __attribute__((ext_vector_type(4)));
// A long chain of MFMA and LDS traffic: the speed of the simulator.
extern "C" __global__ void __attribute__((amdgpu_flat_work_group_size(256, 256))) mfma_loop(u32* out, int n) {
  __shared__ s4 tile[4][256];
  u32 t = tid_x();
  for (int i = 0; i < 4; ++i) tile[i][t] = s4{(short)(0x3c00 + t), 0x3c00, (short)(i << 7), 0x3b00};
  barrier();
  f4 c[4] = {};
  for (int i = 0; i < n; ++i) {
    for (int j = 0; j < 4; ++j) {
      s4 a = tile[j][(t + i) & 255], b = tile[j][(t ^ i) & 255];
      for (int k = 0; k < 4; ++k) c[k] = __builtin_amdgcn_mfma_f32_16x16x16bf16_1k(a, b, c[k], 0, 0, 0);
    }
    if ((i & 15) == 15) barrier();
  }
  u32 bits = 0;
  for (int k = 0; k < 4; ++k)
    for (int r = 0; r < 4; ++r) {
      float v = c[k][r];
      bits = bits * 31 + __builtin_bit_cast(u32, v);
    }
  out[bid_x() * 256 + t] = bits;
}

// A bit of everything that clang emits for gfx942, to be disassembled.

#define __global__ __attribute__((global))
#define __device__ __attribute__((device))
#define __shared__ __attribute__((shared))
#define ID __builtin_amdgcn_workitem_id_x()

typedef float f32x4 __attribute__((ext_vector_type(4)));
typedef float f32x16 __attribute__((ext_vector_type(16)));
typedef short i16x4 __attribute__((ext_vector_type(4)));
typedef _Float16 f16x4 __attribute__((ext_vector_type(4)));
typedef _Float16 f16x2 __attribute__((ext_vector_type(2)));
typedef double f64x4 __attribute__((ext_vector_type(4)));
typedef long i64;
typedef unsigned long u64;
typedef unsigned u32;

extern "C" __global__ void floats(float *p, const float *q, int n) {
    u32 i = __builtin_amdgcn_workgroup_id_x() * 256 + ID;
    if (i >= (u32)n) return;
    float x = q[i], y = q[i + n];
    float z = x / y + __builtin_sqrtf(x) * __builtin_expf(y) - __builtin_logf(x);
    z += __builtin_fabsf(x) > -y ? __builtin_floorf(z) : __builtin_fmaf(x, y, 0.5f);
    p[i] = __builtin_fminf(__builtin_fmaxf(z, 0.0f), 1.0f) * 3.14159f;
}

extern "C" __global__ void doubles(double *p, const double *q, const i64 *r) {
    double x = p[ID], y = q[ID];
    p[ID] = x / y + __builtin_sqrt(x) * 0.5 + (double)r[ID] + __builtin_floor(y) - 1.0e100;
}

extern "C" __global__ void integers(i64 *p, const i64 *q, unsigned char *b, short *s, int k) {
    i64 x = p[ID], y = q[ID];
    p[ID] = x * y + x / y + (x % k) + (x >> (y & 63)) + __builtin_popcountl((u64)x) + __builtin_clzl((u64)y);
    u32 v = ((u32 *)b)[ID];
    b[ID] = (unsigned char)((v >> 8 & 255) + (v >> 24) * (v & 255));
    s[ID] = (short)(s[ID] * (short)k + s[ID + 1]);
    ((u32 *)b)[ID + 64] = (v & 0xffff) + (v >> 16) + __builtin_bitreverse32(v) + ((v & 255) << 3);
}

extern "C" __global__ void halves(_Float16 *p, f16x2 *q, __bf16 *b) {
    p[ID] = p[ID] * (_Float16)2.5f + p[ID + 1] / (_Float16)3;
    q[ID] = q[ID] * q[ID + 1] + q[ID + 2];
    b[ID] = (__bf16)((float)b[ID] * 1.5f);
}

extern "C" __global__ void atomics(int *p, float *f, u64 *l, double *d) {
    __shared__ int total[64];
    total[ID] = p[ID];
    __builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup");
    __builtin_amdgcn_s_barrier();
    __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "workgroup");
    __atomic_fetch_add(&total[63 - ID], 3, __ATOMIC_RELAXED);
    int old = __atomic_fetch_add(p, 1, __ATOMIC_SEQ_CST);
    __atomic_fetch_max(p + 1, old, __ATOMIC_RELAXED);
    __atomic_compare_exchange_n(l, &l[1], 5ul, false, __ATOMIC_ACQ_REL, __ATOMIC_RELAXED);
    p[ID] = total[ID] + total[ID ^ 1];
}

extern "C" __global__ void matrices(float *p, const f16x4 *a, const i16x4 *b, double *d) {
    f32x4 c = ((f32x4 *)p)[ID];
    c = __builtin_amdgcn_mfma_f32_16x16x16f16(a[ID], a[ID + 64], c, 0, 0, 0);
    c = __builtin_amdgcn_mfma_f32_16x16x16bf16_1k(b[ID], b[ID + 64], c, 0, 0, 0);
    c = __builtin_amdgcn_mfma_f32_4x4x4f16(a[ID], a[ID + 64], c, 4, 2, 1);
    ((f32x4 *)p)[ID] = c;
    f32x16 w = {};
    for (int i = 0; i < 4; ++i)
        w = __builtin_amdgcn_mfma_f32_32x32x8f16(a[ID + i], a[ID + 64 + i], w, 0, 0, 0);
    ((f32x16 *)p)[ID + 64] = w;
    f64x4 e = ((f64x4 *)d)[ID];
    ((f64x4 *)d)[ID] = __builtin_amdgcn_mfma_f64_16x16x4f64(d[ID], d[ID + 64], e, 0, 0, 0);
}

extern "C" __global__ void lanes(int *p, float *f) {
    int x = p[ID];
    x += __builtin_amdgcn_update_dpp(0, x, 0x111, 0xf, 0xf, false);
    x += __builtin_amdgcn_update_dpp(x, x, 0x142, 0xa, 0xf, true);
    x += __builtin_amdgcn_mov_dpp(x, 0xe4 ^ 5, 0xf, 0xf, true);
    x += __builtin_amdgcn_ds_bpermute((int)ID * 4 ^ 64, x);
    x += __builtin_amdgcn_ds_swizzle(x, 0x041f) + __builtin_amdgcn_ds_swizzle(x, 0x80b1);
    x += __builtin_amdgcn_readfirstlane(x) + __builtin_amdgcn_readlane(x, 7);
    x += (int)__builtin_amdgcn_mbcnt_hi(~0u, __builtin_amdgcn_mbcnt_lo(~0u, 0));
    x += (int)__builtin_amdgcn_ballot_w64(x > 3) + __builtin_amdgcn_perm(x, x + 1, 0x05010400);
    f[ID] = __builtin_amdgcn_rcpf(f[ID]) + __builtin_amdgcn_exp2f(f[ID + 1]);
    __builtin_amdgcn_s_sleep(2);
    p[ID] = x + (int)__builtin_amdgcn_s_memtime() + (int)__builtin_amdgcn_s_getreg(0xf814);
}

__device__ __attribute__((noinline)) int callee(int *a, int n) {
    int sum = 0;
    for (int i = 0; i < n; ++i) sum += a[i] * i;
    return sum;
}

extern "C" __global__ void calls(int *p, int n) {
    int local[96];
    for (int i = 0; i < 96; ++i) local[i] = p[(i * n) & 63];
    local[n & 63] = 7;
    switch (n & 7) {
        case 0: p[0] = callee(local, n); break;
        case 1: p[1] = callee(p, 3); break;
        case 5: __builtin_trap();
        default: p[2] = local[p[3] & 63];
    }
}

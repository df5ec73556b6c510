// Kernels whose time can be told by hand; sim/tests/timing.rs says what it is.

#define KERNEL extern "C" __attribute__((global))

typedef float f32x4 __attribute__((ext_vector_type(4)));

// 256 products, each of which accumulates to the one before.
KERNEL void accumulate() {
    asm volatile("s_nop 7\n"
                 ".rept 256\n"
                 "v_mfma_f32_16x16x16_bf16 v[0:3], v[8:9], v[10:11], v[0:3]\n"
                 ".endr\n" ::
                     : "v0", "v1", "v2", "v3", "v8", "v9", "v10", "v11");
}

// 256 products, each of which multiplies the one before.
KERNEL void multiply() {
    asm volatile("s_nop 7\n"
                 ".rept 128\n"
                 "v_mfma_f32_16x16x16_bf16 v[0:3], v[4:5], v[10:11], 0\n"
                 "v_mfma_f32_16x16x16_bf16 v[4:7], v[0:1], v[10:11], 0\n"
                 ".endr\n" ::
                     : "v0", "v1", "v2", "v3", "v4", "v5", "v6", "v7", "v10", "v11");
}

// 256 sums that have nothing to do with each other, and 256 that have.
KERNEL void vector() {
    asm volatile(".rept 256\n"
                 "v_add_f32 v0, v1, v2\n"
                 ".endr\n" ::
                     : "v0", "v1", "v2");
}

// 256 transcendental functions.
KERNEL void transcendental() {
    asm volatile(".rept 256\n"
                 "v_exp_f32 v0, v1\n"
                 ".endr\n" ::
                     : "v0", "v1");
}

// 64 loads from LDS, of a dword in every `stride` dwords.
KERNEL void local(int stride) {
    __attribute__((shared)) static int memory[8192];
    unsigned at = __builtin_amdgcn_workitem_id_x() * stride * 4;
    asm volatile(".rept 64\n"
                 "ds_read_b32 v1, %0\n"
                 ".endr\n"
                 "s_waitcnt lgkmcnt(0)\n" ::"v"(at),
                 "s"(memory)
                 : "v1", "memory");
}

// One load, and a wait for it.
KERNEL void wait(const int *from, int *to) { *to = *from; }

// Copies 16 bytes of each work-item.
KERNEL void copy(f32x4 *to, const f32x4 *from) {
    unsigned at = __builtin_amdgcn_workgroup_id_x() * 256 + __builtin_amdgcn_workitem_id_x();
    to[at] = from[at];
}

// Wave 0 comes to the barrier after 4096 clocks, the others at once.
KERNEL void meet() {
    if (__builtin_amdgcn_readfirstlane(__builtin_amdgcn_workitem_id_x()) < 64)
        asm volatile(".rept 64\n s_nop 15\n .endr");
    __builtin_amdgcn_s_barrier();
}

// 64 sums for each of `counts[workgroup]`.
KERNEL void items(const int *counts) {
    for (int left = counts[__builtin_amdgcn_workgroup_id_x()]; left > 0; --left)
        asm volatile(".rept 64\n v_add_f32 v0, v1, v2\n .endr" ::: "v0", "v1", "v2");
}

// 64 sums, in waves from the fifth on with priority.
KERNEL void hurry() {
    if (__builtin_amdgcn_readfirstlane(__builtin_amdgcn_workitem_id_x()) >= 256)
        __builtin_amdgcn_s_setprio(3);
    asm volatile(".rept 64\n v_add_f32 v0, v1, v2\n .endr" ::: "v0", "v1", "v2");
}

// Kernels for tests/sanitize_order.rs: for each kind of race and of barrier, one that has it and a twin that has not.
// Workgroups have 256 work-items, four waves.

#define __global__ __attribute__((global))
#define __device__ __attribute__((device))
#define __shared__ __attribute__((shared))
#define KERNEL extern "C" __global__ __attribute__((amdgpu_flat_work_group_size(1, 256))) void

typedef unsigned int u32;
typedef unsigned short u16;

#define AGENT __HIP_MEMORY_SCOPE_AGENT
#define SYSTEM __HIP_MEMORY_SCOPE_SYSTEM
#define WORKGROUP __HIP_MEMORY_SCOPE_WORKGROUP

static __device__ inline u32 tid() { return __builtin_amdgcn_workitem_id_x(); }
static __device__ inline u32 bid() { return __builtin_amdgcn_workgroup_id_x(); }
static __device__ inline void sync() {
    __builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup");
    __builtin_amdgcn_s_barrier();
    __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "workgroup");
}
static __device__ inline void none() {}

static __shared__ u32 tile[1024];
static __shared__ u16 halves[512];

// --- Between waves: LDS ---

// A wave reads what another one writes.
#define LDS_READ(name, order)                                                                                          \
    KERNEL name(u32 *out, u32 *in) {                                                                                   \
        tile[tid()] = in[tid()];                                                                                       \
        order();                                                                                                       \
        out[tid()] = tile[255 - tid()];                                                                                \
    }
LDS_READ(lds_read_race, none)
LDS_READ(lds_read_clean, sync)

// A wave overwrites what another one may not have read yet.
#define LDS_REUSE(name, order)                                                                                         \
    KERNEL name(u32 *out, u32 *in) {                                                                                   \
        tile[tid()] = in[tid()];                                                                                       \
        sync();                                                                                                        \
        u32 x = tile[255 - tid()];                                                                                     \
        order();                                                                                                       \
        tile[tid()] = x + 1;                                                                                           \
        sync();                                                                                                        \
        out[tid()] = tile[255 - tid()];                                                                                \
    }
LDS_REUSE(lds_reuse_race, none)
LDS_REUSE(lds_reuse_clean, sync)

// Waves write neighbouring halves of dwords; in the first, one of them writes both.
KERNEL lds_halves_race(u32 *out, u32 *in) {
    if (tid() < 64)
        *(u32 *)&halves[2 * tid()] = in[tid()];
    else if (tid() < 128)
        halves[2 * (tid() - 64) + 1] = in[tid()];
    sync();
    out[tid()] = halves[tid()];
}
KERNEL lds_halves_clean(u32 *out, u32 *in) {
    if (tid() < 64)
        halves[2 * tid()] = in[tid()];
    else if (tid() < 128)
        halves[2 * (tid() - 64) + 1] = in[tid()];
    sync();
    out[tid()] = halves[tid()];
}

// Atomics on the same counters are no race; reading them needs a barrier.
#define HISTOGRAM(name, order)                                                                                         \
    KERNEL name(u32 *out, u32 *in) {                                                                                   \
        if (tid() < 64)                                                                                                \
            tile[tid()] = 0;                                                                                           \
        sync();                                                                                                        \
        __hip_atomic_fetch_add(&tile[in[tid()] & 63], 1, __ATOMIC_RELAXED, WORKGROUP);                                 \
        order();                                                                                                       \
        out[tid()] = tile[tid() & 63];                                                                                 \
    }
HISTOGRAM(histogram_race, none)
HISTOGRAM(histogram_clean, sync)

// The first wave hands data to the others by an atomic counter.
KERNEL lds_flag_clean(u32 *out, u32 *in) {
    if (tid() == 0)
        tile[512] = 0;
    sync();
    if (tid() < 64) {
        tile[tid()] = in[tid()];
        if (tid() == 0)
            __hip_atomic_fetch_add(&tile[512], 1, __ATOMIC_RELEASE, WORKGROUP);
    } else {
        while ((__hip_atomic_fetch_or(&tile[512], 2, __ATOMIC_ACQUIRE, WORKGROUP) & 1) == 0)
            __builtin_amdgcn_s_sleep(1);
        out[tid()] = tile[tid() & 63];
    }
}

// The write is on its way when the wave comes to the barrier.
#define UNDRAINED(name, wait)                                                                                          \
    KERNEL name(u32 *out, u32 *in) {                                                                                   \
        u32 at = 4 * tid(), from = 4 * (255 - tid()), x = in[tid()];                                                   \
        asm volatile("ds_write_b32 %1, %2\n" wait "s_barrier\nds_read_b32 %0, %3\ns_waitcnt lgkmcnt(0)"                \
                     : "=&v"(x)                                                                                        \
                     : "v"(at), "v"(x), "v"(from)                                                                      \
                     : "memory");                                                                                      \
        out[tid()] = x + (in == out ? tile[tid()] : 0);                                                                \
    }
UNDRAINED(undrained_race, "")
UNDRAINED(undrained_clean, "s_waitcnt lgkmcnt(0)\n")

// The same with a load to LDS, which vmcnt counts.
#define UNDRAINED_DMA(name, wait)                                                                                      \
    KERNEL name(u32 *out, u32 *in) {                                                                                   \
        u32 base = __builtin_amdgcn_readfirstlane(4 * (tid() & ~63u)), from = 4 * (255 - tid()), x;                    \
        asm volatile("s_mov_b32 m0, %1\ns_nop 1\nglobal_load_lds_dword %2, off\n" wait                                 \
                     "s_barrier\nds_read_b32 %0, %3\ns_waitcnt vmcnt(0) lgkmcnt(0)"                                    \
                     : "=&v"(x)                                                                                        \
                     : "s"(base), "v"(in + tid()), "v"(from)                                                           \
                     : "memory");                                                                                      \
        out[tid()] = x + (in == out ? tile[tid()] : 0);                                                                \
    }
UNDRAINED_DMA(undrained_dma_race, "s_waitcnt lgkmcnt(0)\n")
UNDRAINED_DMA(undrained_dma_clean, "s_waitcnt vmcnt(0)\n")

// --- Between waves: global memory ---

#define GLOBAL_READ(name, order)                                                                                       \
    KERNEL name(u32 *out, u32 *in) {                                                                                   \
        out[tid()] = in[tid()];                                                                                        \
        order();                                                                                                       \
        out[256 + tid()] = out[255 - tid()];                                                                           \
    }
GLOBAL_READ(global_read_race, none)
GLOBAL_READ(global_read_clean, sync)

// Stores and a scalar load of the same bytes.
#define SCALAR(name, invalidate)                                                                                       \
    KERNEL name(u32 *out, u32 *in) {                                                                                   \
        out[tid()] = in[tid()];                                                                                        \
        asm volatile("s_waitcnt vmcnt(0)" ::: "memory");                                                               \
        sync();                                                                                                        \
        u32 x;                                                                                                         \
        asm volatile(invalidate "s_load_dword %0, %1, 0x10\ns_waitcnt lgkmcnt(0)" : "=s"(x) : "s"(out) : "memory");    \
        out[256 + tid()] = x;                                                                                          \
    }
SCALAR(scalar_race, "")
SCALAR(scalar_clean, "s_dcache_inv\n")

// --- Between workgroups ---

KERNEL workgroups_race(u32 *out, u32 *in) { out[tid()] = in[tid()] + bid(); }
KERNEL workgroups_clean(u32 *out, u32 *in) { out[256 * bid() + tid()] = in[tid()]; }

// A workgroup reads what another one wrote.
KERNEL neighbour_race(u32 *out, u32 *in) {
    out[256 * bid() + tid()] = in[tid()];
    out[4096 + 256 * bid() + tid()] = out[256 * (3 - bid()) + tid()];
}

// Neighbouring halves of dwords by different workgroups.
KERNEL workgroup_halves_clean(u32 *out, u32 *in) { ((u16 *)out)[4 * tid() + bid()] = in[tid()]; }

// Sums by atomics, of integers and floats.
KERNEL atomics_clean(u32 *out, u32 *in) {
    __hip_atomic_fetch_add(out, in[tid()], __ATOMIC_RELAXED, AGENT);
    __hip_atomic_fetch_add((float *)out + 1, (float)in[tid()], __ATOMIC_RELAXED, AGENT);
}

// The last workgroup to come sums up what all have stored.
#define LAST(name, release, acquire, scope)                                                                            \
    KERNEL name(u32 *out, u32 *in) {                                                                                   \
        out[64 + 256 * bid() + tid()] = in[tid()];                                                                     \
        sync();                                                                                                        \
        if (tid() == 0) {                                                                                              \
            release;                                                                                                   \
            tile[0] = __hip_atomic_fetch_add(out, 1, __ATOMIC_RELAXED, scope);                                         \
            acquire;                                                                                                   \
        }                                                                                                              \
        sync();                                                                                                        \
        if (tile[0] == 3) {                                                                                            \
            u32 sum = 0;                                                                                               \
            for (u32 i = 0; i < 4; i++)                                                                                \
                sum += out[64 + 256 * i + tid()];                                                                      \
            in[256 + tid()] = sum;                                                                                     \
        }                                                                                                              \
    }
#define FENCE(order, scope) __builtin_amdgcn_fence(__ATOMIC_##order, scope)
LAST(last_clean, FENCE(RELEASE, "agent"), FENCE(ACQUIRE, "agent"), AGENT)
LAST(last_system_clean, FENCE(RELEASE, ""), FENCE(ACQUIRE, ""), SYSTEM)
LAST(last_workgroup_race, FENCE(RELEASE, "workgroup"), FENCE(ACQUIRE, "workgroup"), WORKGROUP)
LAST(last_no_release_race, asm volatile("s_waitcnt vmcnt(0)" :: : "memory"), FENCE(ACQUIRE, "agent"), AGENT)
LAST(last_no_acquire_race, FENCE(RELEASE, "agent"), asm volatile("s_waitcnt vmcnt(0)" :: : "memory"), AGENT)

// One workgroup passes data on to the next by a flag that is stored and loaded.
#define PASS(name, order_out, order_in, scope)                                                                         \
    KERNEL name(u32 *out, u32 *in) {                                                                                   \
        if (tid() == 0) {                                                                                              \
            u32 x = 0;                                                                                                 \
            if (bid() > 0) {                                                                                           \
                while (__hip_atomic_load(&out[bid() - 1], order_in, scope) == 0)                                       \
                    __builtin_amdgcn_s_sleep(1);                                                                       \
                x = out[64 + bid() - 1];                                                                               \
            }                                                                                                          \
            out[64 + bid()] = x + in[bid()];                                                                           \
            __hip_atomic_store(&out[bid()], 1, order_out, scope);                                                      \
        }                                                                                                              \
    }
PASS(pass_clean, __ATOMIC_RELEASE, __ATOMIC_ACQUIRE, AGENT)
PASS(pass_system_clean, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST, SYSTEM)
PASS(pass_relaxed_race, __ATOMIC_RELAXED, __ATOMIC_RELAXED, AGENT)
PASS(pass_workgroup_race, __ATOMIC_RELEASE, __ATOMIC_ACQUIRE, WORKGROUP)

// --- Barriers ---

// Half of the lanes of each wave pass a barrier that the others do not.
KERNEL divergent_barrier(u32 *out, u32 *in) {
    u32 x = in[tid()];
    if (tid() & 1)
        asm volatile("s_barrier\nv_add_u32 %0, 1, %0" : "+v"(x)::"memory");
    out[tid()] = x;
}
KERNEL uniform_barrier(u32 *out, u32 *in) {
    u32 x = in[tid()];
    if (in[0] == 0)
        asm volatile("s_barrier\nv_add_u32 %0, 1, %0" : "+v"(x)::"memory");
    out[tid()] = x;
}
// Lanes, and a whole wave, return before the barrier.
KERNEL early_return(u32 *out, u32 *in) {
    if (tid() >= 150)
        return;
    tile[tid()] = in[tid()];
    sync();
    out[tid()] = tile[149 - tid()];
}

// The first wave waits at another barrier than the others.
KERNEL different_barriers(u32 *out, u32 *in) {
    u32 x = in[tid()];
    if (__builtin_amdgcn_readfirstlane(tid()) < 64)
        asm volatile("s_barrier\nv_add_u32 %0, 1, %0" : "+v"(x)::"memory");
    else
        asm volatile("s_barrier\nv_add_u32 %0, 2, %0" : "+v"(x)::"memory");
    out[tid()] = x;
}

// The same by waves that say that they have different parts.
KERNEL barriers_of_parts(u32 *out, u32 *in) {
    u32 x = in[tid()];
    if (__builtin_amdgcn_readfirstlane(tid()) < 64)
        asm volatile("s_setprio 1\ns_barrier\nv_add_u32 %0, 1, %0" : "+v"(x)::"memory");
    else
        asm volatile("s_barrier\nv_add_u32 %0, 2, %0" : "+v"(x)::"memory");
    out[tid()] = x;
}

// --- Kernels that do not end ---

// Waits for what nobody writes; the other waves wait at a barrier.
KERNEL spins(u32 *out, u32 *in) {
    if (tid() < 64)
        while (__hip_atomic_load(&in[0], __ATOMIC_RELAXED, AGENT) == 0)
            __builtin_amdgcn_s_sleep(1);
    sync();
    out[tid()] = 1;
}
// Waits for a workgroup that comes later.
KERNEL waits_for_later(u32 *out, u32 *in) {
    if (bid() == 0)
        while (__hip_atomic_load(&out[1], __ATOMIC_RELAXED, AGENT) == 0)
            __builtin_amdgcn_s_sleep(1);
    if (tid() == 0)
        __hip_atomic_store(&out[bid()], 1, __ATOMIC_RELAXED, AGENT);
}

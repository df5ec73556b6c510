// Kernels for tests/order/same_stores.rs: stores by several waves that nothing orders, of the same bytes or of others.
// Workgroups have 256 work-items, four waves.

#define __global__ __attribute__((global))
#define __device__ __attribute__((device))
#define __shared__ __attribute__((shared))
#define KERNEL extern "C" __global__ __attribute__((amdgpu_flat_work_group_size(1, 256))) void

typedef unsigned int u32;
typedef unsigned short u16;
typedef unsigned char u8;
typedef u32 u32x2 __attribute__((ext_vector_type(2)));
typedef u32 u32x4 __attribute__((ext_vector_type(4)));

#define AGENT __HIP_MEMORY_SCOPE_AGENT
#define WORKGROUP __HIP_MEMORY_SCOPE_WORKGROUP

static __device__ inline u32 tid() { return __builtin_amdgcn_workitem_id_x(); }
static __device__ inline u32 bid() { return __builtin_amdgcn_workgroup_id_x(); }
static __device__ inline u32 lane() { return tid() & 63; }
static __device__ inline u32 wave() { return __builtin_amdgcn_readfirstlane(tid() >> 6); }
static __device__ inline void sync() {
    __builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup");
    __builtin_amdgcn_s_barrier();
    __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "workgroup");
}
static __device__ inline void none() {}
static __device__ inline u32x2 pair(u32 x) { return u32x2{1, x}; }
static __device__ inline u32x4 quad(u32 x) { return u32x4{1, 2, 3, x}; }

static __shared__ u32 tile[2048];

// --- LDS ---

// All waves store a tile that each of them has, as compilers of tiles do.
KERNEL replicated_clean(u32 *out, u32 *in) {
    tile[lane()] = in[5] + lane();
    sync();
    out[tid()] = tile[lane()];
}
// The same, again and again, with a barrier between.
KERNEL replicated_loop_clean(u32 *out, u32 *in) {
    u32 sum = 0;
    for (u32 i = 0; i < 3; i++) {
        tile[lane()] = in[i] + lane();
        sync();
        sum += tile[lane()];
        sync();
    }
    out[tid()] = sum;
}
// Two waves store the same, the others something else.
KERNEL third_race(u32 *out, u32 *in) {
    tile[lane()] = in[wave() < 2 ? 5 : 6] + lane();
    sync();
    out[tid()] = tile[lane()];
}
// One lane of one wave differs.
KERNEL one_lane_race(u32 *out, u32 *in) {
    tile[lane()] = in[5] + (tid() == 200);
    sync();
    out[tid()] = tile[lane()];
}

// The first wave stores twice, the second one what was stored last.
#define TWICE(name, first, qualifier)                                                                                  \
    KERNEL name(u32 *out, u32 *in) {                                                                                   \
        qualifier u32 *x = tile;                                                                                       \
        if (wave() == 0)                                                                                               \
            x[lane()] = in[first];                                                                                     \
        asm volatile("" ::: "memory");                                                                                 \
        if (wave() < 2)                                                                                                \
            x[lane()] = in[6];                                                                                         \
        sync();                                                                                                        \
        out[tid()] = tile[lane()];                                                                                     \
    }
TWICE(twice_race, 5, )
TWICE(twice_clean, 6, )
// The same through flat addresses.
TWICE(flat_twice_race, 5, volatile)
TWICE(flat_twice_clean, 6, volatile)

// The same bytes by stores of several widths, and at an odd place; the last wave's may differ in one byte.
#define WIDTH(name, type, count, value)                                                                                \
    KERNEL name##_clean(u32 *out, u32 *in) {                                                                           \
        u32 x = in[5] << 16 | in[7];                                                                                   \
        for (u32 i = 0; i < count; i++)                                                                                \
            ((type *)tile)[lane() + 64 * i] = value;                                                                   \
        sync();                                                                                                        \
        out[tid()] = ((u8 *)tile)[lane() * sizeof(type)];                                                              \
    }                                                                                                                  \
    KERNEL name##_race(u32 *out, u32 *in) {                                                                            \
        u32 x = in[5] << 16 | in[7];                                                                                   \
        x += tid() == 255 ? 0x10001 : 0;                                                                               \
        for (u32 i = 0; i < count; i++)                                                                                \
            ((type *)tile)[lane() + 64 * i] = value;                                                                   \
        sync();                                                                                                        \
        out[tid()] = ((u8 *)tile)[lane() * sizeof(type)];                                                              \
    }
WIDTH(bytes, u8, 1, (u8)x)
WIDTH(halves, u16, 1, (u16)x)
WIDTH(high_halves, u16, 1, (u16)(x >> 16))
WIDTH(pairs, u32x2, 1, pair(x))
WIDTH(quads, u32x4, 1, quad(x))
WIDTH(two, u32, 2, x + i)

// A wave stores dwords, another one the half of each that has the same bytes, or others.
#define PART(name, x)                                                                                                  \
    KERNEL name(u32 *out, u32 *in) {                                                                                   \
        if (wave() == 0)                                                                                               \
            tile[lane()] = in[5] * 0x10001;                                                                            \
        else                                                                                                           \
            ((u16 *)tile)[2 * lane() + 1] = in[x];                                                                     \
        sync();                                                                                                        \
        out[tid()] = tile[lane()];                                                                                     \
    }
PART(part_clean, 5)
PART(part_race, 6)

// An atomic is no store, whatever it leaves.
KERNEL atomic_race(u32 *out, u32 *in) {
    u32 x = in[5];
    if (wave() == 0)
        tile[lane()] = x;
    else if (wave() == 1)
        __hip_atomic_fetch_or(&tile[lane()], x, __ATOMIC_RELAXED, WORKGROUP);
    sync();
    out[tid()] = tile[lane()];
}

// A panel that is filled again before its readers pass a barrier, behind a replicated tile.
#define PANEL(name, order)                                                                                             \
    KERNEL name(u32 *out, u32 *in) {                                                                                   \
        u32 sum = 0;                                                                                                   \
        tile[1024 + lane()] = in[5];                                                                                   \
        for (u32 i = 0; i < 2; i++) {                                                                                  \
            tile[tid()] = in[tid() + i];                                                                               \
            sync();                                                                                                    \
            sum += tile[255 - tid()] + tile[1024 + lane()];                                                            \
            order();                                                                                                   \
        }                                                                                                              \
        out[tid()] = sum;                                                                                              \
    }
PANEL(panel_race, none)
PANEL(panel_clean, sync)

// Two panels that are filled in turn; the rows that are left over go over the first one, which may still be read.
#define TAIL(name, order)                                                                                              \
    KERNEL name(u32 *out, u32 *in) {                                                                                   \
        u32 sum = 0;                                                                                                   \
        tile[1024 + lane()] = in[5];                                                                                   \
        for (u32 i = 0; i < 3; i++) {                                                                                  \
            tile[256 * (i & 1) + tid()] = in[tid() + i];                                                               \
            sync();                                                                                                    \
            sum += tile[256 * (i & 1) + 255 - tid()];                                                                  \
        }                                                                                                              \
        order();                                                                                                       \
        if (tid() < 40)                                                                                                \
            tile[tid()] = in[tid()];                                                                                   \
        sync();                                                                                                        \
        out[tid()] = sum + tile[tid() % 40] + tile[1024 + lane()];                                                     \
    }
TAIL(tail_race, none)
TAIL(tail_clean, sync)

// --- Global memory ---

// All waves of all workgroups store the same.
KERNEL global_clean(u32 *out, u32 *in) { out[lane()] = in[5] + lane(); }
KERNEL global_bytes_clean(u32 *out, u32 *in) { ((u8 *)out)[lane()] = in[5] + lane(); }
// The third workgroup's bytes differ in one lane.
KERNEL global_third_race(u32 *out, u32 *in) { out[lane()] = in[5] + (256 * bid() + tid() == 2 * 256 + 70); }
// Every workgroup stores twice, the same in the end.
#define GLOBAL_TWICE(name, first)                                                                                      \
    KERNEL name(u32 *out, u32 *in) {                                                                                   \
        ((volatile u32 *)out)[1024 + 256 * bid() + tid()] = 0;                                                         \
        if (wave() == 0) {                                                                                             \
            out[lane()] = in[first];                                                                                   \
            asm volatile("" ::: "memory");                                                                             \
            out[lane()] = in[6];                                                                                       \
        }                                                                                                              \
    }
GLOBAL_TWICE(global_twice_race, 5)
GLOBAL_TWICE(global_twice_clean, 6)
// An atomic beside stores.
KERNEL global_atomic_race(u32 *out, u32 *in) {
    if (tid() == 0) {
        if (bid() == 0)
            out[0] = in[5];
        else
            __hip_atomic_fetch_or(out, in[5], __ATOMIC_RELAXED, AGENT);
    }
}

// Two workgroups store the same, the third one something else, after the second one only.
#define AFTER(name, waits_for)                                                                                         \
    KERNEL name(u32 *out, u32 *in) {                                                                                   \
        if (tid() == 0) {                                                                                              \
            u32 x = in[5];                                                                                             \
            for (u32 i = waits_for; i < 2; i++)                                                                        \
                if (bid() == 2) {                                                                                      \
                    while (__hip_atomic_load(&out[64 + i], __ATOMIC_ACQUIRE, AGENT) == 0)                              \
                        __builtin_amdgcn_s_sleep(1);                                                                   \
                    x = in[6];                                                                                         \
                }                                                                                                      \
            out[0] = x;                                                                                                \
            __hip_atomic_store(&out[64 + bid()], 1, __ATOMIC_RELEASE, AGENT);                                          \
        }                                                                                                              \
    }
AFTER(after_one_race, 1)
AFTER(after_both_clean, 0)

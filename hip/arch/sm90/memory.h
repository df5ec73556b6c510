// Memory access on sm_90a: predicated loads, gathers of unaligned rows, and copies to shared memory (cp.async,
// cp.async.bulk).
#pragma once

#include "../base.h"

namespace arch {

// Whether one access can cover 16 bytes at p.
DEVICE bool in_one_access(const void *p) { return ((u64)p & 15) == 0; }
DEVICE i32x4 load_b128(const void *p) { return *(const i32x4 *)p; }
DEVICE void store_b128(void *p, i32x4 x) { *(i32x4 *)p = x; }
DEVICE i32x2 load_b64(const void *p) { return *(const i32x2 *)p; }
DEVICE void store_b64(void *p, i32x2 x) { *(i32x2 *)p = x; }
DEVICE int load_b32(const void *p) { return *(const int *)p; }
DEVICE void store_b32(void *p, int x) { *(int *)p = x; }

// Loads 16, 8 or 4 bytes of a line of 128 that others soon read: the L2 cache fetches the whole line from HBM.
DEVICE i32x4 load_line_b128(const void *p) {
    i32x4 x;
    asm volatile("ld.global.L2::128B.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
                 : "l"(p)
                 : "memory");
    return x;
}
DEVICE i32x2 load_line_b64(const void *p) {
    i32x2 x;
    asm volatile("ld.global.L2::128B.v2.b32 {%0, %1}, [%2];" : "=r"(x.x), "=r"(x.y) : "l"(p) : "memory");
    return x;
}
DEVICE int load_line_b32(const void *p) {
    int x;
    asm volatile("ld.global.L2::128B.b32 %0, [%1];" : "=r"(x) : "l"(p) : "memory");
    return x;
}

// Loads of memory that does not change before they are complete. The compiler cannot move the request to the first use.
DEVICE i32x4 request_b128(const void *p) {
    i32x4 x;
    asm volatile("ld.global.v4.b32 {%0, %1, %2, %3}, [%4];" : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w) : "l"(p));
    return x;
}
DEVICE i32x2 request_b64(const void *p) {
    i32x2 x;
    asm volatile("ld.global.v2.b32 {%0, %1}, [%2];" : "=r"(x.x), "=r"(x.y) : "l"(p));
    return x;
}
DEVICE int request_b32(const void *p) {
    int x;
    asm volatile("ld.global.b32 %0, [%1];" : "=r"(x) : "l"(p));
    return x;
}
DEVICE int request_b16(const void *p) {
    short x;
    asm volatile("ld.global.u16 %0, [%1];" : "=h"(x) : "l"(p));
    return (unsigned short)x;
}

// Whether each 16-byte group of the rows is one access. `stride`: bytes from row to row.
DEVICE bool aligned_rows(const void *base, u32 stride) { return ((u64)base & 15) == 0 && (stride & 15) == 0; }

// Stores to global memory, even if the compiler cannot tell the pointer's address space.
template <class T> DEVICE void store_global(char *to, T x) { *(__attribute__((address_space(1))) T *)(u64)to = x; }

// Memory behind a pointer, addressed by byte offsets. A load at `nowhere` or beyond gives 0. This masks rows past the
// end of a sequence and elements past the head dimension. Nobody may write the memory during the launch, except memory
// that load_written_b128 reads.
class Window {
  public:
    static constexpr u32 nowhere = 0x80000000u;

    DEVICE_MEMBER explicit Window(const void *base) : base((u64)base) {}

    // Loads 16 bytes at an address that is a multiple of 16.
    DEVICE_MEMBER i32x4 load_b128(u32 offset) const {
        int x, y, z, w;
        asm("{.reg .pred p; setp.ge.s32 p, %5, 0; mov.b32 %0, 0; mov.b32 %1, 0; mov.b32 %2, 0; mov.b32 %3, 0;\n"
            "@p ld.global.nc.v4.b32 {%0, %1, %2, %3}, [%4];}"
            : "=&r"(x), "=&r"(y), "=&r"(z), "=&r"(w)
            : "l"(base + offset), "r"(offset));
        return i32x4{x, y, z, w};
    }
    // Loads memory that the kernel before writes. Call it after wait_for_previous_kernel.
    DEVICE_MEMBER i32x4 load_written_b128(u32 offset) const {
        int x, y, z, w;
        asm volatile(
            "{.reg .pred p; setp.ge.s32 p, %5, 0; mov.b32 %0, 0; mov.b32 %1, 0; mov.b32 %2, 0; mov.b32 %3, 0;\n"
            "@p ld.global.v4.b32 {%0, %1, %2, %3}, [%4];}"
            : "=&r"(x), "=&r"(y), "=&r"(z), "=&r"(w)
            : "l"(base + offset), "r"(offset));
        return i32x4{x, y, z, w};
    }
    DEVICE_MEMBER int load_b32(u32 offset) const {
        int x;
        asm("{.reg .pred p; setp.ge.s32 p, %2, 0; mov.b32 %0, 0; @p ld.global.nc.b32 %0, [%1];}"
            : "=&r"(x)
            : "l"(base + offset), "r"(offset));
        return x;
    }
    DEVICE_MEMBER int load_b16(u32 offset) const {
        short x;
        asm("{.reg .pred p; setp.ge.s32 p, %2, 0; mov.b16 %0, 0; @p ld.global.nc.b16 %0, [%1];}"
            : "=&h"(x)
            : "l"(base + offset), "r"(offset));
        return (unsigned short)x;
    }

    // Loads 8 bytes at an address that is a multiple of 8, and at any even address.
    DEVICE_MEMBER i32x2 load_b64(u32 offset) const {
        int x, y;
        asm("{.reg .pred p; setp.ge.s32 p, %3, 0; mov.b32 %0, 0; mov.b32 %1, 0;\n"
            "@p ld.global.nc.v2.b32 {%0, %1}, [%2];}"
            : "=&r"(x), "=&r"(y)
            : "l"(base + offset), "r"(offset));
        return i32x2{x, y};
    }
    DEVICE_MEMBER i32x2 gather_b64(u32 offset) const {
        return i32x2{load_b16(offset) | load_b16(offset + 2) << 16, load_b16(offset + 4) | load_b16(offset + 6) << 16};
    }

    // Loads 16 bytes at any even address.
    DEVICE_MEMBER i32x4 gather_b128(u32 offset) const {
        i32x4 out;
        for (int i = 0; i < 4; ++i) {
            out[i] = load_b16(offset + 4 * i) | load_b16(offset + 4 * i + 2) << 16;
        }
        return out;
    }

  private:
    u64 base;
};

// Bits of a number of 32 or 16 bits. Nothing waits for the load before they are used.
DEVICE int load_bits(const char *p, bool wide) {
    int x;
    asm("{.reg .pred p; setp.ne.b32 p, %2, 0; @p ld.global.nc.b32 %0, [%1]; @!p ld.global.nc.u16 %0, [%1];}"
        : "=r"(x)
        : "l"(p), "r"((int)wide));
    return x;
}

// Shared-memory address for asynchronous copies and products.
DEVICE u32 shared_address(const void *p) { return (u32)(u64)(const __attribute__((address_space(3))) void *)p; }
// Starts a copy of 16 bytes from global memory, or of zeros if not `inside`. It is complete after await_copies.
DEVICE void copy_async(u32 to, const char *from, bool inside) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(inside ? 16 : 0) : "memory");
}
DEVICE void copy_async(u32 to, const char *from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}
// Waits for all copies of this thread.
DEVICE void await_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }
// Starts a copy of `bytes`, a multiple of 16, between addresses that are. The phase of the barrier at `at` waits for
// it.
DEVICE void copy_bulk(u32 to, const char *from, int bytes, u32 at) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
                 "l"(__builtin_bit_cast(u64, from)), "r"(bytes), "r"(at)
                 : "memory");
}
// Starts a copy of a box of a tensor (hip-sys/src/cuda/boxes.rs) from an element on. `map`: its description. The phase
// of the barrier at `at` waits for it.
DEVICE void copy_box(u32 to, u64 map, int column, int head, int token, int sequence, u32 at) {
    asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
                 "[%0], [%1, {%2, %3, %4, %5}], [%6];" ::"r"(to),
                 "l"(map), "r"(column), "r"(head), "r"(token), "r"(sequence), "r"(at)
                 : "memory");
}
// Starts a copy of a box from shared memory to a tensor. commit_stores, await_store_reads and await_stores order such
// copies with those of store_async.
DEVICE void store_box(u64 map, u32 from, int column, int row, int head, int slot) {
    asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.tile.bulk_group [%0, {%2, %3, %4, %5}], [%1];" ::"l"(map),
                 "r"(from), "r"(column), "r"(row), "r"(head), "r"(slot)
                 : "memory");
}
// Groups the copies of this thread since the last call. await_copies<Pending> waits for all but the last groups.
DEVICE void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int Pending> DEVICE void await_copies() { asm volatile("cp.async.wait_group %0;" ::"n"(Pending) : "memory"); }
// Stores an operand of 16 rows to shared memory. Each lane gives the address of 16 bytes: lane l those of row l % 16,
// elements 8 (l / 16) to 8 (l / 16) + 7.
DEVICE void store_operand(u32 to, i32x4 x) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(x.x), "r"(x.y),
                 "r"(x.z), "r"(x.w)
                 : "memory");
}
// Loads an operand of 16 rows from shared memory, addressed as by store_operand.
DEVICE i32x4 load_operand(u32 from) {
    int x, y, z, w;
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x), "=r"(y), "=r"(z), "=r"(w)
                 : "r"(from)
                 : "memory");
    return i32x4{x, y, z, w};
}
// The same operand, if a lane gives the address of row 8 (l / 16) + l % 8, elements from 8 (l / 8 % 2) on. Its words
// then lie in registers as mma.sync takes a left operand.
DEVICE i32x4 load_left_operand(u32 from) {
    const i32x4 x = load_operand(from);
    return i32x4{x.x, x.z, x.y, x.w};
}
// load_transposed, store_transposed: an operand of 16 rows from shared memory that holds it by columns, and to such
// memory. Each lane gives the address of 16 bytes: lane l those of contracted element 8 (l / 16) + l % 8, rows
// 8 (l / 8 % 2) to 8 (l / 8 % 2) + 7.
DEVICE i32x4 load_transposed(u32 from) {
    int x, y, z, w;
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x), "=r"(y), "=r"(z), "=r"(w)
                 : "r"(from)
                 : "memory");
    return i32x4{x, y, z, w};
}
DEVICE void store_transposed(u32 to, i32x4 x) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(x.x), "r"(x.y),
                 "r"(x.z), "r"(x.w)
                 : "memory");
}
// Bulk copies from shared to global memory, of a multiple of 16 bytes at such addresses. They read what
// `publish_shared` has published. `commit_stores`: makes a group of this thread's copies since the last call.
// `await_store_reads`: waits until all but its last `Pending` groups have read shared memory. `await_stores`: waits for
// all its copies.
DEVICE void store_async(char *to, u32 from, int bytes) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to), "r"(from), "r"(bytes)
                 : "memory");
}
DEVICE void commit_stores() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
template <int Pending> DEVICE void await_store_reads() {
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(Pending) : "memory");
}
DEVICE void await_stores() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }
DEVICE f32x4 load_shared_f32(u32 from) {
    float x, y, z, w;
    asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(x), "=f"(y), "=f"(z), "=f"(w)
                 : "r"(from)
                 : "memory");
    return f32x4{x, y, z, w};
}
DEVICE i32x4 load_shared(u32 from) {
    int x, y, z, w;
    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x), "=r"(y), "=r"(z), "=r"(w)
                 : "r"(from)
                 : "memory");
    return i32x4{x, y, z, w};
}
// A word, a number and two numbers in shared memory.
DEVICE int load_shared_word(u32 from) {
    int x;
    asm volatile("ld.shared.b32 %0, [%1];" : "=r"(x) : "r"(from) : "memory");
    return x;
}
DEVICE void store_shared_word(u32 to, int x) { asm volatile("st.shared.b32 [%0], %1;" ::"r"(to), "r"(x) : "memory"); }
DEVICE float load_shared_number(u32 from) { return bits<float>(load_shared_word(from)); }
DEVICE f32x2 load_shared_pair(u32 from) {
    f32x2 x;
    asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(x.x), "=f"(x.y) : "r"(from) : "memory");
    return x;
}
DEVICE void store_shared(u32 to, i32x4 x) {
    asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w)
                 : "memory");
}

} // namespace arch

// Memory access on CDNA: 16, 8 or 4 bytes at any even address, and buffer resources that check ranges.
#pragma once

#include "../base.h"

namespace arch {

typedef i32x4 Even16 __attribute__((aligned(2)));
typedef i32x2 Even8 __attribute__((aligned(2)));
typedef int Even4 __attribute__((aligned(2)));
// Whether one access can cover 16 bytes at p, a multiple of 2.
DEVICE bool in_one_access(const void *) { return true; }
DEVICE i32x4 load_b128(const void *p) { return *(const Even16 *)p; }
DEVICE void store_b128(void *p, i32x4 x) { *(Even16 *)p = x; }
DEVICE i32x2 load_b64(const void *p) { return *(const Even8 *)p; }
DEVICE void store_b64(void *p, i32x2 x) { *(Even8 *)p = x; }
DEVICE int load_b32(const void *p) { return *(const Even4 *)p; }
DEVICE void store_b32(void *p, int x) { *(Even4 *)p = x; }

// Loads 16, 8 or 4 bytes of a line that others soon read. Lines are fetched whole.
DEVICE i32x4 load_line_b128(const void *p) { return load_b128(p); }
DEVICE i32x2 load_line_b64(const void *p) { return load_b64(p); }
DEVICE int load_line_b32(const void *p) { return load_b32(p); }

// Loads. This compiler leaves them where they are.
DEVICE i32x4 request_b128(const void *p) { return load_b128(p); }
DEVICE i32x2 request_b64(const void *p) { return load_b64(p); }
DEVICE int request_b32(const void *p) { return load_b32(p); }
DEVICE int request_b16(const void *p) { return *(const unsigned short *)p; }

// Packs the low (or high) 16 bits of two words, `a` in the low half.
DEVICE int low_halves(u32 a, u32 b) { return (int)__builtin_amdgcn_perm(b, a, 0x05040100); }
DEVICE int high_halves(u32 a, u32 b) { return (int)__builtin_amdgcn_perm(b, a, 0x07060302); }

// Buffer intrinsics by their LLVM names, because clang has the builtins only from version 19 on.
#define INTRINSIC __attribute__((device))
INTRINSIC i32x4 raw_buffer_load(i32x4 rsrc, int offset, int soffset,
                                int aux) __asm("llvm.amdgcn.raw.buffer.load.v4i32");
INTRINSIC i32x2 raw_buffer_load_b64(i32x4 rsrc, int offset, int soffset,
                                    int aux) __asm("llvm.amdgcn.raw.buffer.load.v2i32");
INTRINSIC int raw_buffer_load_b32(i32x4 rsrc, int offset, int soffset,
                                  int aux) __asm("llvm.amdgcn.raw.buffer.load.i32");
INTRINSIC short raw_buffer_load_u16(i32x4 rsrc, int offset, int soffset,
                                    int aux) __asm("llvm.amdgcn.raw.buffer.load.i16");
INTRINSIC void raw_buffer_store_b32(int x, i32x4 rsrc, int offset, int soffset,
                                    int aux) __asm("llvm.amdgcn.raw.buffer.store.i32");
INTRINSIC void raw_buffer_store_b64(i32x2 x, i32x4 rsrc, int offset, int soffset,
                                    int aux) __asm("llvm.amdgcn.raw.buffer.store.v2i32");
INTRINSIC void raw_buffer_store_b128(i32x4 x, i32x4 rsrc, int offset, int soffset,
                                     int aux) __asm("llvm.amdgcn.raw.buffer.store.v4i32");
INTRINSIC void raw_buffer_store_b16(short x, i32x4 rsrc, int offset, int soffset,
                                    int aux) __asm("llvm.amdgcn.raw.buffer.store.i16");
#undef INTRINSIC

// Memory behind a pointer that is equal in all lanes, addressed by byte offsets. An access at `nowhere` loads 0 or
// stores nothing. This masks rows past the end of a sequence and elements past the head dimension.
class Window {
  public:
    static constexpr u32 nowhere = 0x80000000u;

    Window() = default;
    // `bytes`: size of the window. Accesses beyond it load 0 or store nothing.
    DEVICE_MEMBER explicit Window(const void *base, u32 bytes = 0x7fffffff)
        : rsrc{(int)(u64)base, (int)((u64)base >> 32 & 0xffff), (int)bytes, 0x00020000} {}

    // Moves the base forward by `bytes`.
    DEVICE_MEMBER void advance(u64 bytes) {
        const i32x2 base = bits<i32x2>(bits<u64>(i32x2{rsrc.x, rsrc.y}) + bytes);
        rsrc.x = base.x;
        rsrc.y = base.y;
    }
    DEVICE_MEMBER void limit(u32 bytes) { rsrc.z = (int)bytes; }

    // `uniform`: bytes added to `offset`, equal in all lanes. The range check includes them.
    DEVICE_MEMBER i32x4 load_b128(u32 offset, int uniform = 0) const {
        return raw_buffer_load(rsrc, (int)offset, uniform, 0);
    }
    DEVICE_MEMBER i32x2 load_b64(u32 offset, int uniform = 0) const {
        return raw_buffer_load_b64(rsrc, (int)offset, uniform, 0);
    }
    DEVICE_MEMBER int load_b32(u32 offset, int uniform = 0) const {
        return raw_buffer_load_b32(rsrc, (int)offset, uniform, 0);
    }
    DEVICE_MEMBER int load_b16(u32 offset) const {
        return (unsigned short)raw_buffer_load_u16(rsrc, (int)offset, 0, 0);
    }
    DEVICE_MEMBER void store_b32(u32 offset, int x, int uniform = 0) const {
        raw_buffer_store_b32(x, rsrc, (int)offset, uniform, 0);
    }
    DEVICE_MEMBER void store_b64(u32 offset, i32x2 x, int uniform = 0) const {
        raw_buffer_store_b64(x, rsrc, (int)offset, uniform, 0);
    }
    DEVICE_MEMBER void store_b128(u32 offset, i32x4 x, int uniform = 0) const {
        raw_buffer_store_b128(x, rsrc, (int)offset, uniform, 0);
    }
    DEVICE_MEMBER void store_b16(u32 offset, int x) const { raw_buffer_store_b16((short)x, rsrc, (int)offset, 0, 0); }

  private:
    i32x4 rsrc;
};

} // namespace arch

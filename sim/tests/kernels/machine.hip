// Operations of gfx942 that a compiler offers beyond portable C++: exchanges between lanes, DPP, SDWA, buffers, atomics,
// MFMA. Each kernel runs one wave, or one workgroup of 256; `sim/tests/machine.rs` computes the expected results.

#define GLOBAL extern "C" __attribute__((global, amdgpu_flat_work_group_size(1, 256)))
#define SHARED __attribute__((shared))

typedef unsigned u32;
typedef unsigned short u16;
typedef unsigned long long u64;
typedef long i64;
typedef _Float16 h2 __attribute__((ext_vector_type(2)));
typedef _Float16 h4 __attribute__((ext_vector_type(4)));
typedef short s2 __attribute__((ext_vector_type(2)));
typedef short s4 __attribute__((ext_vector_type(4)));
typedef float f2 __attribute__((ext_vector_type(2)));
typedef float f4 __attribute__((ext_vector_type(4)));
typedef float f16_ __attribute__((ext_vector_type(16)));
typedef float f32_ __attribute__((ext_vector_type(32)));
typedef int i2 __attribute__((ext_vector_type(2)));
typedef int i4 __attribute__((ext_vector_type(4)));
typedef int i16_ __attribute__((ext_vector_type(16)));
typedef int i32_ __attribute__((ext_vector_type(32)));
typedef double d4 __attribute__((ext_vector_type(4)));

__attribute__((device)) static inline int lane() { return __builtin_amdgcn_workitem_id_x(); }

// Lanes. x and y are words of this lane.
#define LANES(name, value)                                                                                             \
    GLOBAL void name(u32 *out, const u32 *in) {                                                                        \
        const int l = lane(), x = in[l], y = in[l + 64];                                                               \
        (void)y;                                                                                                       \
        out[l] = (u32)(value);                                                                                         \
    }

LANES(bpermute, __builtin_amdgcn_ds_bpermute(4 * y, x))
LANES(permute, __builtin_amdgcn_ds_permute(4 * (l * 5 & 63), x))
LANES(swizzle_xor, __builtin_amdgcn_ds_swizzle(x, 0x1f | 5 << 10))
LANES(swizzle_quad, __builtin_amdgcn_ds_swizzle(x, 0x801b))
LANES(readlane, __builtin_amdgcn_readlane(x, 17) + __builtin_amdgcn_readlane(x, __builtin_amdgcn_readfirstlane(y) & 63))
LANES(ballot_low, __builtin_amdgcn_ballot_w64(x & 1))
LANES(ballot_high, __builtin_amdgcn_ballot_w64(x & 1) >> 32)
LANES(mbcnt, __builtin_amdgcn_mbcnt_hi(~0u, __builtin_amdgcn_mbcnt_lo(0x0ff0f0f0, x)))
LANES(perm, __builtin_amdgcn_perm(x, y, 0x0c070105))
LANES(alignbyte, __builtin_amdgcn_alignbyte(x, y, 3))
LANES(alignbit, __builtin_amdgcn_alignbit(x, y, 13))
LANES(ubfe, __builtin_amdgcn_ubfe(x, 5, 11))
LANES(sbfe, __builtin_amdgcn_sbfe(x, 7, 9))
LANES(sad, __builtin_amdgcn_sad_u8(x, y, 100))
GLOBAL void writelane(u32 *out, const u32 *in) {
    u32 x = in[lane()];
    asm volatile("v_writelane_b32 %0, %1, 9" : "+v"(x) : "s"(1234));
    out[lane()] = x;
}
LANES(first_of_divergent, l % 3 == 1 ? __builtin_amdgcn_readfirstlane(x) : y)

#define DPP(name, control, rows, banks, bound)                                                                         \
    LANES(dpp_##name, __builtin_amdgcn_update_dpp(y, x, control, rows, banks, bound))
DPP(quad_perm, 0x6c, 0xf, 0xf, false)
DPP(row_shl_1, 0x101, 0xf, 0xf, false)
DPP(row_shl_15, 0x10f, 0xf, 0xf, true)
DPP(row_shr_1, 0x111, 0xf, 0xf, false)
DPP(row_shr_8, 0x118, 0xf, 0xf, true)
DPP(row_ror_3, 0x123, 0xf, 0xf, false)
DPP(wave_shl, 0x130, 0xf, 0xf, false)
DPP(wave_rol, 0x134, 0xf, 0xf, false)
DPP(wave_shr, 0x138, 0xf, 0xf, true)
DPP(wave_ror, 0x13c, 0xf, 0xf, false)
DPP(row_mirror, 0x140, 0xf, 0xf, false)
DPP(row_half_mirror, 0x141, 0xf, 0xf, false)
DPP(row_bcast_15, 0x142, 0xa, 0xf, false)
DPP(row_bcast_31, 0x143, 0xc, 0xf, false)
DPP(row_newbcast_6, 0x156, 0xf, 0xf, false)
DPP(some_rows_and_banks, 0x121, 0x5, 0x6, false)
LANES(dpp_divergent, l & 4 ? __builtin_amdgcn_update_dpp(y, x, 0x112, 0xf, 0xf, false) : l)

// SDWA: y + part of x, written to a part of the result; `old` is what it held.
#define SDWA(name, op, modifiers)                                                                                      \
    GLOBAL void sdwa_##name(u32 *out, const u32 *in) {                                                                 \
        u32 old = in[lane()] * 3u;                                                                                     \
        asm volatile(op " %0, %1, %2 " modifiers : "+v"(old) : "v"(in[lane()]), "v"(in[lane() + 64]));                 \
        out[lane()] = old;                                                                                             \
    }
SDWA(bytes, "v_add_u32_sdwa", "dst_sel:BYTE_1 dst_unused:UNUSED_PRESERVE src0_sel:BYTE_2 src1_sel:BYTE_3")
SDWA(pad, "v_add_u32_sdwa", "dst_sel:BYTE_3 dst_unused:UNUSED_PAD src0_sel:WORD_1 src1_sel:BYTE_0")
SDWA(sext, "v_add_u32_sdwa", "dst_sel:WORD_0 dst_unused:UNUSED_SEXT src0_sel:WORD_0 src1_sel:WORD_1")
SDWA(word, "v_sub_u32_sdwa", "dst_sel:WORD_1 dst_unused:UNUSED_PRESERVE src0_sel:WORD_1 src1_sel:DWORD")
GLOBAL void sdwa_signed(u32 *out, const u32 *in) {
    u32 r;
    asm volatile(
        "v_add_u32_sdwa %0, sext(%1), sext(%2) dst_sel:DWORD dst_unused:UNUSED_PAD src0_sel:BYTE_1 src1_sel:WORD_1"
        : "=v"(r)
        : "v"(in[lane()]), "v"(in[lane() + 64]));
    out[lane()] = r;
}

// Buffers of 256 bytes whose every second access of the highest lanes lies outside.
#define INTRINSIC __attribute__((device))
#define BUFFER(type, suffix)                                                                                           \
    INTRINSIC type buffer_load_##suffix(i4, int, int, int) __asm("llvm.amdgcn.raw.buffer.load." #suffix);              \
    INTRINSIC void buffer_store_##suffix(type, i4, int, int, int) __asm("llvm.amdgcn.raw.buffer.store." #suffix);      \
    INTRINSIC type struct_load_##suffix(i4, int, int, int, int) __asm("llvm.amdgcn.struct.buffer.load." #suffix);      \
    INTRINSIC void struct_store_##suffix(type, i4, int, int, int,                                                      \
                                         int) __asm("llvm.amdgcn.struct.buffer.store." #suffix);                       \
    GLOBAL void buffer_copy_##suffix(char *out, const char *in) {                                                      \
        const i4 from = {(int)(u64)in, (int)((u64)in >> 32), 256, 0x00027000};                                         \
        const i4 to = {(int)(u64)out, (int)((u64)out >> 32), 256, 0x00027000};                                         \
        const int at = lane() * (int)sizeof(type);                                                                     \
        buffer_store_##suffix(buffer_load_##suffix(from, at, 16, 0), to, at + 8, 0, 0);                                \
    }                                                                                                                  \
    /* Records of 20 bytes, 10 of them in the buffer. */                                                               \
    GLOBAL void buffer_records_##suffix(char *out, const char *in) {                                                   \
        const i4 from = {(int)(u64)in, (int)((u64)in >> 32) | 20 << 16, 10, 0x00027000};                               \
        const i4 to = {(int)(u64)out, (int)((u64)out >> 32) | 20 << 16, 10, 0x00027000};                               \
        struct_store_##suffix(struct_load_##suffix(from, 15 - lane(), 4, 0, 0), to, lane(), 4, 0, 0);                  \
    }
BUFFER(char, i8)
BUFFER(short, i16)
BUFFER(int, i32)
BUFFER(i2, v2i32)
BUFFER(i4, v4i32)

// Atomics: 256 threads on 16 cells, in memory or in LDS. `v` is this thread's operand.
#define IN_MEMORY(name, type, statement)                                                                               \
    GLOBAL void name(type *cells, const type *in) {                                                                    \
        type *p = cells + lane() % 16;                                                                                 \
        const type v = in[lane()];                                                                                     \
        statement;                                                                                                     \
    }
#define IN_LDS(name, type, statement)                                                                                  \
    GLOBAL void lds_##name(type *cells, const type *in) {                                                              \
        SHARED static type shared[16];                                                                                 \
        if (lane() < 16) {                                                                                             \
            shared[lane()] = cells[lane()];                                                                            \
        }                                                                                                              \
        __builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup");                                                         \
        __builtin_amdgcn_s_barrier();                                                                                  \
        __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "workgroup");                                                         \
        type *p = shared + lane() % 16;                                                                                \
        const type v = in[lane()];                                                                                     \
        statement;                                                                                                     \
        __builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup");                                                         \
        __builtin_amdgcn_s_barrier();                                                                                  \
        __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "workgroup");                                                         \
        if (lane() < 16) {                                                                                             \
            cells[lane()] = shared[lane()];                                                                            \
        }                                                                                                              \
    }
#define ATOMIC(name, type, operation)                                                                                  \
    IN_MEMORY(name, type, (void)__hip_atomic_fetch_##operation(p, v, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT))      \
    IN_LDS(name, type, (void)__hip_atomic_fetch_##operation(p, v, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_WORKGROUP))
ATOMIC(add_u32, u32, add)
ATOMIC(and_u32, u32, and)
ATOMIC(or_u32, u32, or)
ATOMIC(xor_u32, u32, xor)
ATOMIC(min_u32, u32, min)
ATOMIC(max_u32, u32, max)
ATOMIC(min_i32, int, min)
ATOMIC(max_i32, int, max)
ATOMIC(add_u64, u64, add)
ATOMIC(and_u64, u64, and)
ATOMIC(or_u64, u64, or)
ATOMIC(xor_u64, u64, xor)
ATOMIC(min_u64, u64, min)
ATOMIC(max_u64, u64, max)
ATOMIC(min_i64, i64, min)
ATOMIC(max_i64, i64, max)
ATOMIC(add_f32, float, add)
ATOMIC(add_f64, double, add)
ATOMIC(min_f64, double, min)
ATOMIC(max_f64, double, max)

#define COMPARE_AND_SWAP(type)                                                                                         \
    type seen = *p;                                                                                                    \
    while (!__hip_atomic_compare_exchange_strong(p, &seen, (type)(seen + 3 * v), __ATOMIC_RELAXED, __ATOMIC_RELAXED,   \
                                                 __HIP_MEMORY_SCOPE_AGENT)) {                                          \
    }
IN_MEMORY(cas_u32, u32, COMPARE_AND_SWAP(u32))
IN_MEMORY(cas_u64, u64, COMPARE_AND_SWAP(u64))
IN_LDS(cas_u32, u32, COMPARE_AND_SWAP(u32))
IN_LDS(cas_u64, u64, COMPARE_AND_SWAP(u64))
IN_MEMORY(inc_u32, u32, (void)__builtin_amdgcn_atomic_inc32(p, 9u, __ATOMIC_RELAXED, "agent"); (void)v)
IN_MEMORY(dec_u32, u32, (void)__builtin_amdgcn_atomic_dec32(p, 9u, __ATOMIC_RELAXED, "agent"); (void)v)

// 256 increments return every number below 256 once.
GLOBAL void tickets(u32 *out, u32 *counter) {
    out[__hip_atomic_fetch_add(counter, 1u, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT)] = 1;
}
// A chain of exchanges returns every number that was put in but the last, and the first that was there.
GLOBAL void exchanges(u32 *out, u32 *cell) {
    out[__hip_atomic_exchange(cell, (u32)lane() + 1, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT)] = 1;
}

#define MEMORY(T) __attribute__((address_space(1))) T *
#define LOCAL(T) __attribute__((address_space(3))) T *
IN_MEMORY(add_pk_f16, h2, __builtin_amdgcn_global_atomic_fadd_v2f16((MEMORY(h2))p, v))
IN_MEMORY(add_pk_bf16, s2, __builtin_amdgcn_global_atomic_fadd_v2bf16((MEMORY(s2))p, v))
IN_MEMORY(add_flat_pk_bf16, s2, __builtin_amdgcn_flat_atomic_fadd_v2bf16(p, v))
IN_LDS(add_pk_f16, h2, __builtin_amdgcn_ds_atomic_fadd_v2f16((LOCAL(h2))p, v))
IN_LDS(add_pk_bf16, s2, __builtin_amdgcn_ds_atomic_fadd_v2bf16((LOCAL(s2))p, v))

// MFMA: each lane's operands as they lie in memory, lane after lane.
#define MFMA(name, ab, cd, cbsz, abid, blgp, tag)                                                                      \
    GLOBAL void mfma_##name##tag(cd *out, const ab *a, const ab *b, const cd *c) {                                     \
        out[lane()] = __builtin_amdgcn_mfma_##name(a[lane()], b[lane()], c[lane()], cbsz, abid, blgp);                 \
    }
#define PLAIN(name, ab, cd) MFMA(name, ab, cd, 0, 0, 0, )
PLAIN(f32_32x32x1f32, float, f32_)
PLAIN(f32_16x16x1f32, float, f16_)
PLAIN(f32_4x4x1f32, float, f4)
PLAIN(f32_32x32x2f32, float, f16_)
PLAIN(f32_16x16x4f32, float, f4)
PLAIN(f32_32x32x4f16, h4, f32_)
PLAIN(f32_16x16x4f16, h4, f16_)
PLAIN(f32_4x4x4f16, h4, f4)
PLAIN(f32_32x32x8f16, h4, f16_)
PLAIN(f32_16x16x16f16, h4, f4)
PLAIN(f32_32x32x4bf16_1k, s4, f32_)
PLAIN(f32_16x16x4bf16_1k, s4, f16_)
PLAIN(f32_4x4x4bf16_1k, s4, f4)
PLAIN(f32_32x32x8bf16_1k, s4, f16_)
PLAIN(f32_16x16x16bf16_1k, s4, f4)
PLAIN(i32_32x32x4i8, int, i32_)
PLAIN(i32_16x16x4i8, int, i16_)
PLAIN(i32_4x4x4i8, int, i4)
PLAIN(i32_32x32x16_i8, i64, i16_)
PLAIN(i32_16x16x32_i8, i64, i4)
PLAIN(f64_16x16x4f64, double, d4)
PLAIN(f64_4x4x4f64, double, double)
PLAIN(f32_16x16x8_xf32, f2, f4)
PLAIN(f32_32x32x4_xf32, f2, f16_)
PLAIN(f32_16x16x32_fp8_fp8, i64, f4)
PLAIN(f32_16x16x32_fp8_bf8, i64, f4)
PLAIN(f32_16x16x32_bf8_fp8, i64, f4)
PLAIN(f32_16x16x32_bf8_bf8, i64, f4)
PLAIN(f32_32x32x16_fp8_fp8, i64, f16_)
PLAIN(f32_32x32x16_fp8_bf8, i64, f16_)
PLAIN(f32_32x32x16_bf8_fp8, i64, f16_)
PLAIN(f32_32x32x16_bf8_bf8, i64, f16_)
// One block of A for several blocks, one half of B's lanes for all.
MFMA(f32_4x4x1f32, float, f4, 2, 3, 0, _broadcast)
MFMA(f32_16x16x4f16, h4, f16_, 1, 1, 0, _broadcast)
MFMA(f32_32x32x1f32, float, f32_, 0, 0, 1, _low_lanes)
MFMA(f32_32x32x1f32, float, f32_, 0, 0, 2, _high_lanes)

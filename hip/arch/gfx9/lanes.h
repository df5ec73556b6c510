// Lanes, waves and workgroups of CDNA (gfx90a, gfx942, gfx950). A wave has 64 lanes. DPP moves values between lanes,
// within rows of 16 lanes.
#pragma once

#include "../base.h"

#define KERNEL(threads, waves_per_simd)                                                                                \
    extern "C"                                                                                                         \
        __attribute__((global, amdgpu_flat_work_group_size(threads, threads), amdgpu_waves_per_eu(waves_per_simd)))

namespace arch {

constexpr int lanes = 64;

DEVICE int thread() { return (int)__builtin_amdgcn_workitem_id_x(); }
DEVICE int workgroup() { return (int)__builtin_amdgcn_workgroup_id_x(); }
// Number of this wave in its workgroup, declared equal in all lanes.
DEVICE int wave() { return __builtin_amdgcn_readfirstlane(thread() / lanes); }
DEVICE int lane() { return thread() & (lanes - 1); }

// Scalar load of memory that nobody writes during the launch. The address must be equal in all lanes.
template <class T> DEVICE T uniform(const T *p) { return *(const __attribute__((address_space(4))) T *)(u64)p; }

// Declares x equal in all lanes. Needed after a division, which vector instructions compute: a buffer access at an
// address that depends on it would otherwise loop over the lanes.
DEVICE int uniform_value(int x) { return __builtin_amdgcn_readfirstlane(x); }

template <class T> DEVICE T *uniform_pointer(T *p) {
    const u32 low = __builtin_amdgcn_readfirstlane((int)(u64)p), high = __builtin_amdgcn_readfirstlane((u64)p >> 32);
    return (T *)(__attribute__((address_space(1))) T *)((u64)high << 32 | low);
}

// Reads x of lane `from`.
DEVICE int read_lane(int x, int from) { return __builtin_amdgcn_readlane(x, from); }
DEVICE float read_lane(float x, int from) { return bits<float>(read_lane(bits<int>(x), from)); }

// Broadcasts x of lane `Source` within each row of 16 lanes.
template <int Source> DEVICE float row_broadcast(float x) {
    return bits<float>(__builtin_amdgcn_update_dpp(0, bits<int>(x), 0x150 + Source, 0xf, 0xf, true));
}

// y + x z, with x of lane `Source` of each row of 16 lanes, in one instruction. No vector instruction may write x, y or
// z in the two wait states before it; such calls stay in their order.
template <int Source> DEVICE float row_multiply_add(float x, float z, float y) {
    asm volatile("v_fmac_f32_dpp %0, %1, %2 row_newbcast:%3 row_mask:0xf bank_mask:0xf"
                 : "+v"(y)
                 : "v"(x), "v"(z), "n"(Source));
    return y;
}
// Two wait states.
DEVICE void row_operands_done() { asm volatile("s_nop 1"); }

// Sum over each row of 16 lanes; all 16 lanes get the same bits.
template <int Rotation> DEVICE float add_rotated(float x) {
    return x + bits<float>(__builtin_amdgcn_update_dpp(0, bits<int>(x), 0x120 + Rotation, 0xf, 0xf, false));
}
DEVICE float row_sum(float x) { return add_rotated<1>(add_rotated<2>(add_rotated<4>(add_rotated<8>(x)))); }

// Exchanges x with the same lane of the neighbouring row: rows 0 and 1, and rows 2 and 3.
DEVICE float other_row(float x) { return bits<float>(__builtin_amdgcn_ds_swizzle(bits<int>(x), 16 << 10 | 31)); }

// x, plus x of the lane that a DPP control of lanes within a row names.
template <int Control> DEVICE float add_moved(float x) {
    return x + bits<float>(__builtin_amdgcn_update_dpp(0, bits<int>(x), Control, 0xf, 0xf, false));
}
// Sum over eight lanes, 1 or 8 apart; all eight get the same bits.
template <int Step> DEVICE float sum_of_eight(float x) {
    static_assert(Step == 1 || Step == 8, "the steps of DPP");
    if constexpr (Step == 1) {
        // Neighbours, neighbouring pairs, then the mirror image: the four lanes of a half have equal sums by then.
        return add_moved<0x141>(add_moved<0x4e>(add_moved<0xb1>(x)));
    }
    x = add_rotated<8>(x);
    x += other_row(x);
    return x + bits<float>(__builtin_amdgcn_ds_bpermute((lane() ^ 32) * 4, bits<int>(x)));
}

template <int Control, int RowMask> DEVICE float scan_step(float x) {
    return x + bits<float>(__builtin_amdgcn_update_dpp(0, bits<int>(x), Control, RowMask, 0xf, false));
}

// Inclusive prefix sum over the 64 lanes: within rows of 16, then across rows.
DEVICE float inclusive_sum(float x) {
    x = scan_step<0x111, 0xf>(x);
    x = scan_step<0x112, 0xf>(x);
    x = scan_step<0x114, 0xf>(x);
    x = scan_step<0x118, 0xf>(x);
    x = scan_step<0x142, 0xa>(x);
    return scan_step<0x143, 0xc>(x);
}

template <int Control, int RowMask> DEVICE int scan_step_max(int x) {
    return max_of(x, __builtin_amdgcn_update_dpp(x, x, Control, RowMask, 0xf, false));
}

// Inclusive prefix maximum over the 64 lanes.
DEVICE int inclusive_max(int x) {
    x = scan_step_max<0x111, 0xf>(x);
    x = scan_step_max<0x112, 0xf>(x);
    x = scan_step_max<0x114, 0xf>(x);
    x = scan_step_max<0x118, 0xf>(x);
    x = scan_step_max<0x142, 0xa>(x);
    return scan_step_max<0x143, 0xc>(x);
}

// Bit l of the result is x of lane l.
DEVICE u64 ballot(bool x) { return __builtin_amdgcn_ballot_w64(x); }

// chunk_sum: prefix sum and total over the 64 threads of a workgroup. chunk_max: greatest x. The workgroup is one wave,
// so `scratch` is not used.
DEVICE float chunk_sum(float x, float &total, float *) {
    const float sum = inclusive_sum(x);
    total = read_lane(sum, lanes - 1);
    return sum;
}
DEVICE int chunk_max(int x, int *) { return read_lane(inclusive_max(x), lanes - 1); }
// Computes the prefix sum and total of x and the greatest `key` in one exchange.
DEVICE float chunk_sum(float x, float &total, int key, int &greatest, float *scratch) {
    greatest = chunk_max(key, (int *)scratch);
    return chunk_sum(x, total, scratch);
}

// out[i] = own[i] of the lane that holds column `Column`, for i < Column. Each lane of a row of 16 holds a column of a
// 16x16 matrix in `own`. Memory holds the matrix too (`four(column, i / 4)`); this target does not read it.
template <int Column, class Memory>
DEVICE void spread_column(float (&out)[16], const float (&own)[16], const Memory &) {
    for (int i = 0; i < Column; ++i) {
        out[i] = row_broadcast<Column>(own[i]);
    }
}

} // namespace arch

// Kernels whose counters are worked out by hand in tests/count.rs. Arguments of all: two pointers, a stride in bytes, and
// a number of iterations. s[0:1] leads to them, s2 is the workgroup.
.amdgcn_target "amdgcn-amd-amdhsa--gfx942"
.set lds_size, 65536

.macro begin name
.text
.globl \name
.p2align 8
.type \name,@function
\name:
    s_load_dwordx4 s[4:7], s[0:1], 0x0
    s_load_dwordx2 s[8:9], s[0:1], 0x10
    s_waitcnt lgkmcnt(0)
    v_mul_lo_u32 v1, v0, s8
.endm

.macro finish name, lds, vgprs, accum
    s_endpgm
.size \name, .-\name
.rodata
.p2align 6
.amdhsa_kernel \name
    .amdhsa_group_segment_fixed_size \lds
    .amdhsa_user_sgpr_kernarg_segment_ptr 1
    .amdhsa_system_sgpr_workgroup_id_x 1
    .amdhsa_next_free_vgpr \vgprs
    .amdhsa_accum_offset \accum
    .amdhsa_next_free_sgpr 32
.end_amdhsa_kernel
.endm

// Two products of each of four shapes, vector, transcendental, scalar and accumulator instructions, in a loop.
begin matrix
    s_mov_b32 s3, 0
.Lmatrix_loop:
    v_mfma_f32_16x16x16_bf16 a[0:3], v[2:3], v[4:5], a[0:3]
    v_mfma_f32_16x16x16_bf16 a[4:7], v[2:3], v[4:5], a[4:7]
    v_mfma_f32_32x32x8_f16 a[0:15], v[2:3], v[4:5], a[0:15]
    v_mfma_f32_32x32x8_f16 a[0:15], v[2:3], v[4:5], a[0:15]
    v_mfma_f32_16x16x4_f32 a[0:3], v2, v4, a[0:3]
    v_mfma_f32_16x16x4_f32 a[0:3], v2, v4, a[0:3]
    v_mfma_f32_32x32x2_f32 a[0:15], v2, v4, a[0:15]
    v_mfma_f32_32x32x2_f32 a[0:15], v2, v4, a[0:15]
    v_accvgpr_read_b32 v6, a0
    v_accvgpr_write_b32 a1, v6
    v_accvgpr_mov_b32 a2, a1
    v_add_f32 v7, v6, v6
    v_pk_fma_f32 v[8:9], v[8:9], v[8:9], v[8:9]
    v_mov_b32_dpp v7, v6 quad_perm:[1,0,3,2] row_mask:0xf bank_mask:0xf
    v_exp_f32 v10, v7
    v_rcp_f32 v10, v10
    v_readfirstlane_b32 s12, v10
    ds_bpermute_b32 v11, v0, v10
    s_nop 1
    s_add_u32 s3, s3, 1
    s_cmp_lt_u32 s3, s9
    s_cbranch_scc1 .Lmatrix_loop
    s_barrier
finish matrix, 0, 80, 64

// Loads and stores of LDS of every width, each lane `stride` bytes after the last.
begin lds_widths
    ds_write_b8 v1, v2
    ds_write_b16 v1, v2
    ds_write_b32 v1, v2
    ds_write_b64 v1, v[2:3]
    ds_write_b96 v1, v[2:4]
    ds_write_b128 v1, v[2:5]
    s_waitcnt lgkmcnt(0)
    s_barrier
    ds_read_u8 v6, v1
    ds_read_u16 v6, v1
    ds_read_b32 v6, v1
    ds_read_b64 v[6:7], v1
    ds_read_b96 v[6:8], v1
    ds_read_b128 v[6:9], v1
    ds_read2_b32 v[6:7], v1 offset0:0 offset1:1
    ds_read2_b64 v[6:9], v1 offset0:0 offset1:1
    ds_write2_b32 v1, v2, v3 offset0:0 offset1:1
    ds_write2_b64 v1, v[2:3], v[4:5] offset0:0 offset1:1
    ds_add_u32 v1, v2
    ds_add_rtn_u32 v6, v1, v2
    ds_swizzle_b32 v6, v2 offset:0x801f
    s_waitcnt lgkmcnt(0)
finish lds_widths, lds_size, 16, 16

// The A operand of a matrix product from rows of 128 bytes: 16 rows by 4 columns of 16 bytes; then with the columns
// exchanged row by row so that no banks meet; and by half the lanes only.
begin lds_fragments
    v_and_b32 v2, 15, v0
    v_lshrrev_b32 v3, 4, v0
    v_lshlrev_b32 v4, 7, v2
    v_lshl_add_u32 v5, v3, 4, v4
    v_and_b32 v2, 7, v2
    v_xor_b32 v3, v3, v2
    v_lshl_add_u32 v6, v3, 4, v4
    ds_read_b128 v[8:11], v5
    ds_read_b128 v[8:11], v6
    s_mov_b32 exec_hi, 0
    ds_read_b64 v[8:9], v5
    s_mov_b64 exec, 0
    ds_read_b32 v8, v5
    s_waitcnt lgkmcnt(0)
finish lds_fragments, lds_size, 16, 16

// Global loads and stores of several widths, each lane `stride` bytes after the last.
begin coalescing
    global_load_ubyte v2, v1, s[4:5]
    global_load_dword v2, v1, s[4:5]
    global_load_dwordx2 v[2:3], v1, s[4:5]
    global_load_dwordx4 v[2:5], v1, s[4:5]
    s_waitcnt vmcnt(0)
    global_store_short v1, v2, s[6:7]
    global_store_dwordx4 v1, v[2:5], s[6:7]
    global_atomic_add v1, v2, s[6:7]
    s_mov_b64 exec, 3
    global_load_dwordx4 v[2:5], v1, s[4:5]
    s_waitcnt vmcnt(0)
finish coalescing, 0, 8, 8

// Every workgroup reads the same kilobyte, and reads and writes a kilobyte of its own.
begin sharing
    v_lshlrev_b32 v1, 4, v0
    s_lshl_b32 s3, s2, 10
    global_load_dwordx4 v[2:5], v1, s[4:5]
    v_add_u32 v6, s3, v1
    global_load_dwordx4 v[8:11], v6, s[6:7]
    s_waitcnt vmcnt(0)
    global_store_dwordx4 v6, v[2:5], s[6:7]
finish sharing, 0, 16, 16

// Waves of a workgroup that take different ways: wave 0 loops, the others leave.
begin ways
    v_cmp_gt_u32 vcc, 64, v0
    s_cbranch_vccz .Lways_end
    s_mov_b32 s3, 0
.Lways_loop:
    s_add_u32 s3, s3, 1
    s_cmp_lt_u32 s3, s9
    s_cbranch_scc1 .Lways_loop
    s_branch .Lways_end
.Lways_end:
finish ways, 1024, 136, 64

.amdgpu_metadata
amdhsa.version: [1, 2]
amdhsa.kernels:
  - {.name: matrix, .symbol: matrix.kd, .kernarg_segment_size: 24, .kernarg_segment_align: 8, .group_segment_fixed_size: 0, .private_segment_fixed_size: 0, .wavefront_size: 64, .sgpr_count: 38, .vgpr_count: 80, .max_flat_workgroup_size: 1024}
  - {.name: lds_widths, .symbol: lds_widths.kd, .kernarg_segment_size: 24, .kernarg_segment_align: 8, .group_segment_fixed_size: 65536, .private_segment_fixed_size: 0, .wavefront_size: 64, .sgpr_count: 38, .vgpr_count: 16, .max_flat_workgroup_size: 1024}
  - {.name: lds_fragments, .symbol: lds_fragments.kd, .kernarg_segment_size: 24, .kernarg_segment_align: 8, .group_segment_fixed_size: 65536, .private_segment_fixed_size: 0, .wavefront_size: 64, .sgpr_count: 38, .vgpr_count: 16, .max_flat_workgroup_size: 1024}
  - {.name: coalescing, .symbol: coalescing.kd, .kernarg_segment_size: 24, .kernarg_segment_align: 8, .group_segment_fixed_size: 0, .private_segment_fixed_size: 0, .wavefront_size: 64, .sgpr_count: 38, .vgpr_count: 8, .max_flat_workgroup_size: 1024}
  - {.name: sharing, .symbol: sharing.kd, .kernarg_segment_size: 24, .kernarg_segment_align: 8, .group_segment_fixed_size: 0, .private_segment_fixed_size: 0, .wavefront_size: 64, .sgpr_count: 38, .vgpr_count: 16, .max_flat_workgroup_size: 1024}
  - {.name: ways, .symbol: ways.kd, .kernarg_segment_size: 24, .kernarg_segment_align: 8, .group_segment_fixed_size: 1024, .private_segment_fixed_size: 0, .wavefront_size: 64, .sgpr_count: 38, .vgpr_count: 136, .max_flat_workgroup_size: 1024}
.end_amdgpu_metadata

//! Assembles kernels with code that no compiler emits.

use deltawave_sim::code_object::CodeObject;
use deltawave_sim::launch::{Launch, LaunchError, Options, Stats};
use deltawave_sim::memory::Memory;

/// Start of every kernel: `s[4:5]` and `s[6:7]` are its two pointers, `v1` four times the number of the
/// work-item.
pub const PROLOGUE: [&str; 5] = [
    "s_load_dwordx4 s[4:7], s[0:1], 0x0",
    "s_waitcnt lgkmcnt(0)",
    "v_lshlrev_b32 v1, 2, v0",
    "v_mov_b32 v6, s4",
    "s_nop 15",
];

/// The source of some kernels. Each takes two pointers, 4 KiB of LDS, 64 bytes of scratch and 64 AGPRs.
pub fn source(kernels: &[(String, Vec<&str>)]) -> String {
    let mut out = String::from(".amdgcn_target \"amdgcn-amd-amdhsa--gfx942\"\n.text\n");
    let mut metadata = String::new();
    for (name, body) in kernels {
        out += &format!(".globl {name}\n.p2align 8\n.type {name},@function\n{name}:\n");
        for line in PROLOGUE.iter().chain(body) {
            out += &format!("  {line}\n");
        }
        out += &format!("  s_endpgm\n.L{name}_end:\n.size {name}, .L{name}_end-{name}\n");
        metadata += &format!(
            "  - .name: {name}
    .symbol: {name}.kd
    .kernarg_segment_size: 16
    .kernarg_segment_align: 8
    .group_segment_fixed_size: 4096
    .private_segment_fixed_size: 64
    .wavefront_size: 64
    .sgpr_count: 48
    .vgpr_count: 128
    .agpr_count: 64
    .max_flat_workgroup_size: 256
    .args:
      - {{ .offset: 0, .size: 8, .value_kind: global_buffer, .address_space: global }}
      - {{ .offset: 8, .size: 8, .value_kind: global_buffer, .address_space: global }}
"
        );
    }
    out += ".section .rodata,\"a\"\n.p2align 6\n";
    for (name, _) in kernels {
        out += &format!(
            ".amdhsa_kernel {name}
  .amdhsa_user_sgpr_kernarg_segment_ptr 1
  .amdhsa_next_free_vgpr 128
  .amdhsa_accum_offset 64
  .amdhsa_next_free_sgpr 48
  .amdhsa_group_segment_fixed_size 4096
  .amdhsa_private_segment_fixed_size 64
.end_amdhsa_kernel
"
        );
    }
    out += ".amdgpu_metadata\namdhsa.version: [1, 2]\namdhsa.target: amdgcn-amd-amdhsa--gfx942\n";
    out + "amdhsa.kernels:\n" + &metadata + ".end_amdgpu_metadata\n"
}

/// Runs a kernel with one workgroup of `items`.
pub fn run(
    code: &CodeObject,
    name: &str,
    items: u32,
    pointers: [u64; 2],
    memory: &Memory,
    options: &Options,
) -> Result<Stats, LaunchError> {
    let kernarg: Vec<u8> = pointers.iter().flat_map(|p| p.to_le_bytes()).collect();
    let launch = Launch {
        code,
        kernel: code.kernel(name).expect("kernel"),
        grid: [1, 1, 1],
        remainder: [0; 3],
        block: [items, 1, 1],
        dynamic_lds: 0,
        kernarg: &kernarg,
        memory,
    };
    // SAFETY: the caller's extents are buffers of the test.
    unsafe { launch.run(options) }
}

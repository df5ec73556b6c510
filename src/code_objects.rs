//! The code objects that were compiled into this crate.

use std::fmt::Write as _;
use std::path::Path;
use std::{fs, io};

use crate::kernels::{Role, TABLE, Target};

/// A code object: the kernels of one source file for one architecture.
#[derive(Clone, Copy)]
pub struct CodeObject {
    /// The architecture, as the compiler names it: `gfx942`.
    pub arch: &'static str,
    /// The stem of its source in `hip/kernels/`: `prefill_scan`.
    pub name: &'static str,
    /// The compiler that made it.
    pub compiler: &'static str,
    /// The ELF file.
    pub bytes: &'static [u8],
}

/// Bytes at an address that loaders may rely on.
#[repr(C, align(4096))]
struct Aligned<T: ?Sized>(T);

include!(concat!(env!("OUT_DIR"), "/code_objects.rs"));

/// Architectures whose code objects are exercised by the tests. Of others, [`verification`] says what is known.
pub const VERIFIED_ARCHS: &[&str] = &["gfx942"];

/// What is known of an architecture's code objects, in words.
pub fn verification(arch: &str) -> &'static str {
    match arch {
        _ if VERIFIED_ARCHS.contains(&arch) => "verified by this crate's tests",
        "sm_90a" => "passes the device tests on an H200",
        _ => "unverified: it compiles, nobody has run it",
    }
}

/// Whether code objects of an architecture are PTX, for NVIDIA GPUs.
pub fn is_ptx(arch: &str) -> bool {
    arch.starts_with("sm_")
}

/// The code objects for an architecture.
pub fn for_arch(arch: &str) -> impl Iterator<Item = &'static CodeObject> {
    CODE_OBJECTS.iter().filter(move |c| c.arch == arch)
}

/// Why there are no code objects for an architecture, and how to get them.
pub fn why_missing(arch: &str) -> String {
    if let Some((_, reason)) = MISSING.iter().find(|(a, _)| *a == arch) {
        return format!("when this crate was built, {reason}");
    }
    let mut built: Vec<_> = CODE_OBJECTS.iter().map(|c| c.arch).collect();
    built.dedup();
    let built = if built.is_empty() {
        "none".to_owned()
    } else {
        built.join(", ")
    };
    format!("this crate was built for {built}; rebuild it with DELTAWAVE_ARCHS={arch}")
}

/// Writes every code object to `folder/ARCH/NAME.co` (PTX: `NAME.ptx`), for programs that launch the kernels themselves,
/// such as `benches/gdn_bench.cpp`. Beside them lies `kernels.txt`, which says how the kernels of a prefill without
/// segments are launched: a line for each, of its name, its file, the threads of a workgroup, the value columns that one
/// owns (0: it does not divide them), the bytes of shared memory that the launch asks for, and the bytes of its
/// arguments (`hip/kernel_args.h`).
///
/// # Errors
/// What the file system says. Files of these names are overwritten.
pub fn save(folder: &Path) -> io::Result<()> {
    let mut archs: Vec<_> = CODE_OBJECTS.iter().map(|c| c.arch).collect();
    archs.dedup();
    for arch in archs {
        let folder = folder.join(arch);
        fs::create_dir_all(&folder)?;
        let target = Target::of(arch);
        let mut list = String::new();
        for code in for_arch(arch) {
            let extension = if is_ptx(arch) { "ptx" } else { "co" };
            let file = format!("{}.{extension}", code.name);
            fs::write(folder.join(&file), code.bytes)?;
            for row in TABLE.iter().filter(|row| row.object == code.name) {
                if !is_of_whole_prefill(row.role) {
                    continue;
                }
                let (threads, columns) = (target.threads(row.role), target.columns(row.role));
                let shared = target.shared_bytes(row.role);
                let _ = writeln!(
                    list,
                    "{} {file} {threads} {columns} {shared} {}",
                    row.name, row.argument_bytes
                );
            }
        }
        fs::write(folder.join("kernels.txt"), list)?;
    }
    Ok(())
}

/// Whether a prefill whose sequences are not cut into segments launches it.
fn is_of_whole_prefill(role: Role) -> bool {
    matches!(
        role,
        Role::PrefillLengths | Role::PrefillPrepare | Role::PrefillScan(_)
    )
}

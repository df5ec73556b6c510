//! Code objects that were compiled into this crate.

use std::fmt::Write as _;
use std::path::Path;
use std::{fs, io};

use crate::kernels::{Role, TABLE, Target};

/// A code object: the kernels of one source file for one architecture.
#[derive(Clone, Copy)]
pub struct CodeObject {
    /// Architecture by the compiler's name: `gfx942`.
    pub arch: &'static str,
    /// The stem of its source in `hip/kernels/`: `prefill_scan`.
    pub name: &'static str,
    /// The compiler that made it.
    pub compiler: &'static str,
    /// The ELF file, or PTX that ends in a NUL.
    pub bytes: &'static [u8],
}

impl CodeObject {
    /// Whether it is machine code. Otherwise the bytes are PTX.
    pub fn is_elf(&self) -> bool {
        self.bytes.starts_with(b"\x7fELF")
    }
}

/// Bytes at a page-aligned address.
#[repr(C, align(4096))]
#[allow(dead_code, reason = "a build without kernels embeds nothing")]
struct Aligned<T: ?Sized>(T);

include!(concat!(env!("OUT_DIR"), "/code_objects.rs"));

/// Architectures with code objects that the tests run. [`verification`] describes the others.
pub const VERIFIED_ARCHS: &[&str] = &["gfx942"];

/// How far an architecture's code objects were verified, in words.
pub fn verification(arch: &str) -> &'static str {
    match arch {
        _ if VERIFIED_ARCHS.contains(&arch) => "verified by this crate's tests",
        "sm_90a" => "passes the device tests on an H200",
        _ => "unverified: it compiles, nobody has run it",
    }
}

/// Whether code objects of an architecture are for NVIDIA GPUs: PTX, or machine code that was assembled from it.
pub fn is_nvidia(arch: &str) -> bool {
    arch.starts_with("sm_")
}

/// The code objects for an architecture.
pub fn for_arch(arch: &str) -> impl Iterator<Item = &'static CodeObject> {
    CODE_OBJECTS.iter().filter(move |c| c.arch == arch)
}

/// The architectures that this build has code objects for, by the compiler's names.
pub fn archs() -> Vec<&'static str> {
    let mut archs: Vec<_> = CODE_OBJECTS.iter().map(|c| c.arch).collect();
    archs.dedup();
    archs
}

/// Why there are no code objects for an architecture, which there are, and how to get more.
pub fn why_missing(arch: &str) -> String {
    let built = match &archs()[..] {
        [] => "none".to_owned(),
        archs => archs.join(", "),
    };
    match MISSING.iter().find(|(a, _)| *a == arch) {
        Some((_, reason)) => {
            format!("this build has kernels for {built}; when it was made, {reason}")
        }
        None => format!(
            "this build has kernels for {built}; a build with DELTAWAVE_ARCHS={arch} has others"
        ),
    }
}

/// Format of `kernels.txt`. Changed with the meaning of a line, and whenever a launch needs what older programs do not
/// give.
const LIST_FORMAT: u32 = 2;

/// Writes every code object to `folder/ARCH/NAME.co` (PTX: `NAME.ptx`; machine code of NVIDIA GPUs: `NAME.cubin`), for programs that launch the kernels
/// themselves, such as `benches/gdn_bench.cpp`. Also writes `kernels.txt`, which describes launches of a prefill
/// without segments. Its first line is `format 2`: a program that knows another format must refuse the list. Each
/// further line describes a kernel: name, file, threads of a workgroup, value columns of a workgroup (0: all), bytes of
/// shared memory that the launch requests, bytes of its argument struct (`hip/kernel_args.h`), bytes of a second
/// argument (0: there is none). A second argument may be all zeros; it is aligned to 64 bytes.
///
/// # Errors
/// Errors of the file system. Files of these names are overwritten.
pub fn save(folder: &Path) -> io::Result<()> {
    for arch in archs() {
        let folder = folder.join(arch);
        fs::create_dir_all(&folder)?;
        let target = Target::of(arch);
        let mut list = format!("format {LIST_FORMAT}\n");
        for code in for_arch(arch) {
            let extension = match is_nvidia(arch) {
                true if code.is_elf() => "cubin",
                true => "ptx",
                false => "co",
            };
            let file = format!("{}.{extension}", code.name);
            fs::write(folder.join(&file), code.bytes)?;
            for row in TABLE.iter().filter(|row| row.object == code.name) {
                if !is_of_whole_prefill(row.role) {
                    continue;
                }
                let (threads, columns) = (target.threads(row.role), target.columns(row.role));
                let shared = target.shared_bytes(row.role);
                let second = target.second_argument_bytes(row.role);
                let _ = writeln!(
                    list,
                    "{} {file} {threads} {columns} {shared} {} {second}",
                    row.name, row.argument_bytes
                );
            }
        }
        fs::write(folder.join("kernels.txt"), list)?;
    }
    Ok(())
}

/// Whether a prefill without segments launches this kernel.
fn is_of_whole_prefill(role: Role) -> bool {
    matches!(
        role,
        Role::PrefillLengths | Role::PrefillPrepare | Role::PrefillScan(_)
    )
}

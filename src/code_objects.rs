//! The code objects that were compiled into this crate.

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

/// Architectures whose code objects are exercised by the tests. Others compile, and nobody has run them.
pub const VERIFIED_ARCHS: &[&str] = &["gfx942"];

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

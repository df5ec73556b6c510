//! Code objects: loads and decodes AMDGPU ELF files.

mod bundle;
mod descriptor;
mod image;
mod metadata;

use std::collections::BTreeMap;
use std::sync::OnceLock;

use object::elf;
use object::read::elf::{
    ElfFile64, FileHeader as _, ProgramHeader as _, Rela as _, SectionHeader as _, Sym as _,
};
use object::{LittleEndian as LE, SymbolIndex};
use thiserror::Error;

pub use descriptor::{Descriptor, property};
pub(crate) use image::Image;
pub use metadata::{Arg, KernelMetadata};

use crate::exec::{Exec, Level, prepare};
use crate::inst::{Format, Program};
use crate::memory::Extent;
use crate::op::Op;
use crate::sanitize::uses::Uses;

/// `EF_AMDGPU_MACH_AMDGCN_GFX942`.
const MACH_GFX942: u32 = 0x4c;
/// Maximum size of an image in bytes: no kernel of this device needs more.
const MAX_IMAGE: u64 = 2 << 30;
/// Byte offset at which a kernel with preloaded arguments starts, after code for hardware that cannot preload.
const PRELOAD_PROLOGUE: u64 = 256;

/// Reason why a code object cannot be loaded.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum LoadError {
    #[error("not an ELF file or offload bundle: {reason}")]
    NotElf { reason: String },
    #[error("malformed code object: {0}")]
    Malformed(&'static str),
    #[error("malformed code object: {what}: {reason}")]
    Elf { what: &'static str, reason: String },
    #[error("compressed offload bundles are not supported: build with --no-offload-compress")]
    CompressedBundle,
    #[error("the offload bundle has no code object for gfx942, only for {}", targets.join(", "))]
    NoTarget { targets: Vec<String> },
    #[error("the ELF file is for machine {machine}, not AMDGPU")]
    NotAmdgpu { machine: u16 },
    #[error("the code object is for {arch}, this device is gfx942")]
    WrongArch { arch: String },
    #[error("the code object needs XNACK, this device runs without")]
    Xnack,
    #[error("metadata note: {key} is missing or invalid")]
    Metadata { key: &'static str },
    #[error("kernel {kernel}: {reason}")]
    Kernel {
        kernel: String,
        reason: &'static str,
    },
    #[error("relocation of type {kind} is not supported")]
    Relocation { kind: u32 },
    #[error("symbol {name} is not defined in the code object")]
    Undefined { name: String },
    #[error("no memory for a code object of {size} bytes")]
    OutOfMemory { size: usize },
}

/// A kernel of a code object.
#[derive(Clone, Debug)]
pub struct Kernel {
    /// The compiler's metadata.
    pub metadata: KernelMetadata,
    /// The descriptor that the hardware reads.
    pub descriptor: Descriptor,
    /// Device address of the descriptor.
    pub object: u64,
    /// Index of the first instruction in the program.
    pub entry: u32,
    /// Whether the order of workgroups can change results: the kernel may execute floating-point atomics, which round,
    /// or atomics that return the old value.
    pub ordered: bool,
    /// Whether the kernel may execute atomics, or coherent loads or stores, through which workgroups could synchronise.
    pub communicates: bool,
}

impl Kernel {
    /// Name in the source.
    pub fn name(&self) -> &str {
        &self.metadata.name
    }

    /// Bytes of the explicit arguments, which the caller supplies.
    pub fn explicit_size(&self) -> u32 {
        let m = &self.metadata;
        if m.args.is_empty() {
            return m.kernarg_segment_size;
        }
        let explicit = m.args.iter().filter(|a| !a.is_hidden());
        explicit.map(|a| a.offset + a.size).max().unwrap_or(0)
    }
}

/// A function in the symbol table of a code object: a kernel, or code that kernels call.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Function {
    /// Symbol.
    pub name: String,
    /// Byte offset of the first instruction in `.text`.
    pub offset: u32,
    /// Length in bytes; 0 if the symbol table does not give it.
    pub size: u32,
}

/// A variable of a code object.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Global {
    /// Device address.
    pub address: u64,
    /// Size in bytes.
    pub size: u64,
}

/// A loaded code object. Its segments lie in host memory at fixed addresses.
pub struct CodeObject {
    kernels: Vec<Kernel>,
    globals: BTreeMap<String, Global>,
    functions: Vec<Function>,
    text: Box<[u8]>,
    program: Program,
    prepared: [OnceLock<Box<[Exec]>>; 3],
    uses: OnceLock<Box<[Uses]>>,
    image: Image,
}

impl std::fmt::Debug for CodeObject {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("CodeObject")
            .field("kernels", &self.kernels)
            .field("globals", &self.globals)
            .field("extent", &self.extent())
            .finish_non_exhaustive()
    }
}

type Elf<'a> = ElfFile64<'a, LE>;

impl CodeObject {
    /// Loads an ELF file, or the gfx942 entry of an offload bundle.
    pub fn load(bytes: &[u8]) -> Result<CodeObject, LoadError> {
        let bytes = bundle::unwrap(bytes)?;
        check_machine(bytes)?;
        let file = Elf::parse(bytes).map_err(elf("headers"))?;
        let (image, text) = load_segments(&file)?;
        relocate(&file, &image)?;
        let metadata = find_metadata(&file)?;
        let symbols = symbols(&file)?;

        let code = bytes
            .get(text.file.0..text.file.1)
            .ok_or(Malformed("code lies outside the file"))?;
        let program = crate::decode::program(code, image.address() + text.vaddr);
        let mut kernels = Vec::with_capacity(metadata.len());
        for m in metadata {
            kernels.push(kernel(m, &symbols, &image, &program, text.vaddr)?);
        }
        let globals = symbols
            .into_iter()
            .filter(|(name, s)| s.is_object && !name.ends_with(".kd"))
            .map(|(name, s)| {
                let address = image.address().wrapping_add(s.value);
                let extent = image.extent();
                let inside = s.value <= extent.end - extent.start
                    && s.size <= extent.end - extent.start - s.value;
                let global = Global {
                    address,
                    size: s.size,
                };
                inside
                    .then_some((name, global))
                    .ok_or(Malformed("a variable lies outside the segments"))
            })
            .collect::<Result<_, _>>()?;
        Ok(CodeObject {
            kernels,
            globals,
            text: code.into(),
            functions: functions(&file, text.vaddr, code.len())?,
            program,
            prepared: Default::default(),
            uses: OnceLock::new(),
            image,
        })
    }

    /// Length in bytes of the code object or bundle at `start`, from its own headers.
    ///
    /// # Safety
    /// `start` must point to a whole ELF file or offload bundle in readable memory.
    pub unsafe fn length_at(start: *const u8) -> Result<usize, LoadError> {
        // A header is read in steps, never beyond the bytes that earlier fields guarantee.
        let read = |len: usize| {
            // SAFETY: the caller vouches for the file; `len` is within its headers.
            unsafe { std::slice::from_raw_parts(start, len) }
        };
        if read(4) == b"\x7fELF" {
            let head = elf::FileHeader64::<LE>::parse(read(64)).map_err(elf("header"))?;
            let sections = u64::from(head.e_shnum(LE)) * u64::from(head.e_shentsize(LE));
            let end = head.e_shoff(LE).checked_add(sections);
            return end
                .and_then(|end| usize::try_from(end).ok())
                .ok_or(Malformed("section header offset"));
        }
        if read(4) == b"CCOB" {
            return Err(LoadError::CompressedBundle);
        }
        let mut known = 32;
        loop {
            match bundle::length(read(known)) {
                Ok(Some(length)) => return Ok(length),
                Ok(None) => {
                    return Err(LoadError::NotElf {
                        reason: "unknown magic".into(),
                    });
                }
                // Header and names are read one byte further at a time, never beyond them.
                Err(bundle::TRUNCATED) if known < 1 << 16 => known += 1,
                Err(e) => return Err(e),
            }
        }
    }

    /// Kernel metadata in the note of an ELF file, for any AMDGPU architecture. Loads nothing.
    pub fn metadata(bytes: &[u8]) -> Result<Vec<KernelMetadata>, LoadError> {
        find_metadata(&Elf::parse(bytes).map_err(elf("headers"))?)
    }

    /// All kernels.
    pub fn kernels(&self) -> &[Kernel] {
        &self.kernels
    }

    /// Finds the kernel named `name`.
    pub fn kernel(&self, name: &str) -> Option<&Kernel> {
        self.kernels.iter().find(|k| k.name() == name)
    }

    /// All functions, by address. A stripped code object names only its kernels.
    pub fn functions(&self) -> &[Function] {
        &self.functions
    }

    /// All variables, by name.
    pub fn globals(&self) -> &BTreeMap<String, Global> {
        &self.globals
    }

    /// Finds the variable named `name`.
    pub fn global(&self, name: &str) -> Option<Global> {
        self.globals.get(name).copied()
    }

    /// Address range of the loaded segments.
    pub fn extent(&self) -> Extent {
        self.image.extent()
    }

    /// The decoded program.
    pub fn program(&self) -> &Program {
        &self.program
    }

    /// The machine code of the file that was decoded.
    pub fn text(&self) -> &[u8] {
        &self.text
    }

    /// The functions that execute [`CodeObject::program`], one for each instruction.
    pub fn prepared(&self, level: Level) -> &[Exec] {
        self.prepared[level as usize].get_or_init(|| {
            self.program
                .insts
                .iter()
                .map(|i| prepare(i, level))
                .collect()
        })
    }

    /// The registers that each instruction uses, computed when a check first asks.
    pub(crate) fn uses(&self) -> &[Uses] {
        self.uses
            .get_or_init(|| self.program.insts.iter().map(Uses::of).collect())
    }
}

use LoadError::Malformed;

fn elf(what: &'static str) -> impl Fn(object::read::Error) -> LoadError {
    move |e| LoadError::Elf {
        what,
        reason: e.to_string(),
    }
}

fn check_machine(bytes: &[u8]) -> Result<(), LoadError> {
    let head = elf::FileHeader64::<LE>::parse(bytes).map_err(|e| LoadError::NotElf {
        reason: e.to_string(),
    })?;
    if !head.is_supported() || !head.is_little_endian() {
        return Err(Malformed("not a 64-bit little-endian ELF file"));
    }
    if head.e_machine(LE) != elf::EM_AMDGPU {
        let machine = head.e_machine(LE).0;
        return Err(LoadError::NotAmdgpu { machine });
    }
    let flags = head.e_flags(LE).0;
    if flags & 0xff != MACH_GFX942 {
        let arch = arch_name(flags & 0xff);
        return Err(LoadError::WrongArch { arch });
    }
    // Feature fields: 0 unsupported, 1 any, 2 off, 3 on.
    if flags >> 8 & 3 == 3 {
        return Err(LoadError::Xnack);
    }
    if head.e_type(LE) != elf::ET_DYN {
        return Err(Malformed("not linked: a shared object is expected"));
    }
    Ok(())
}

/// Name of a processor, for the architectures that users are likely to have.
fn arch_name(mach: u32) -> String {
    let name = match mach {
        0x2c => "gfx900",
        0x2f => "gfx906",
        0x30 => "gfx908",
        0x33 => "gfx1010",
        0x36 => "gfx1030",
        0x3f => "gfx90a",
        0x40 => "gfx940",
        0x41 => "gfx1100",
        0x46 => "gfx1101",
        0x47 => "gfx1102",
        0x48 => "gfx1200",
        0x4b => "gfx941",
        0x4e => "gfx1201",
        0x4f => "gfx950",
        0x51 => "gfx9-generic",
        0x5f => "gfx9-4-generic",
        _ => return format!("an AMDGPU with EF_AMDGPU_MACH {mach:#x}"),
    };
    name.into()
}

/// The executable segment.
struct Text {
    vaddr: u64,
    file: (usize, usize),
}

fn load_segments(file: &Elf) -> Result<(Image, Text), LoadError> {
    let loads = || {
        file.elf_program_headers()
            .iter()
            .filter(|p| p.p_type(LE) == elf::PT_LOAD)
    };
    let mut size = 0;
    for p in loads() {
        let end = p.p_vaddr(LE).checked_add(p.p_memsz(LE));
        let end = end.filter(|end| *end <= MAX_IMAGE);
        size = size.max(end.ok_or(Malformed("a segment lies beyond 2 GiB"))?);
    }
    let image = Image::new(size as usize)?;
    let mut text = None;
    for p in loads() {
        let data = p
            .data(LE, file.data())
            .map_err(|()| Malformed("a segment lies outside the file"))?;
        if data.len() as u64 > p.p_memsz(LE) || !image.write(p.p_vaddr(LE), data) {
            return Err(Malformed("a segment is longer than its memory"));
        }
        if p.p_flags(LE).0 & elf::PF_X.0 != 0 {
            let start = p.p_offset(LE) as usize;
            let found = Text {
                vaddr: p.p_vaddr(LE),
                file: (start, start + data.len()),
            };
            if text.replace(found).is_some() {
                return Err(Malformed("more than one executable segment"));
            }
            if p.p_vaddr(LE) % 4 != 0 || data.len() % 4 != 0 {
                return Err(Malformed("code is not a whole number of dwords"));
            }
        }
    }
    let text = text.ok_or(Malformed("no executable segment"))?;
    Ok((image, text))
}

/// Applies the dynamic relocations of LLVM's AMDGPU ABI. The image's address is the load bias.
fn relocate(file: &Elf, image: &Image) -> Result<(), LoadError> {
    let outside = || Malformed("a relocation lies outside the segments");
    for section in file.elf_section_table().iter() {
        // Relocations without SHF_ALLOC are for debug sections, which are not loaded.
        if section.sh_flags(LE).0 & elf::SHF_ALLOC.0 == 0 {
            continue;
        }
        let Some((list, _)) = section.rela(LE, file.data()).map_err(elf("relocations"))? else {
            continue;
        };
        for r in list {
            let place = r.r_offset(LE);
            let kind = r.r_type(LE, false).0;
            let addend = r.r_addend(LE) as u64;
            let target = || -> Result<u64, LoadError> {
                let index = r.r_sym(LE, false) as usize;
                if index == 0 {
                    return Ok(addend);
                }
                let table = file.elf_dynamic_symbol_table();
                let symbol = table
                    .symbol(SymbolIndex(index))
                    .map_err(elf("relocation symbol"))?;
                if symbol.is_undefined(LE) {
                    let name = table.symbol_name(LE, symbol).map_err(elf("symbol name"))?;
                    let name = String::from_utf8_lossy(name).into_owned();
                    return Err(LoadError::Undefined { name });
                }
                let base = if symbol.is_absolute(LE) {
                    0
                } else {
                    image.address()
                };
                Ok(base.wrapping_add(symbol.st_value(LE)).wrapping_add(addend))
            };
            let here = image.address().wrapping_add(place);
            let written = match kind {
                R_NONE => true,
                R_ABS32 | R_ABS32_LO => image.write(place, &(target()? as u32).to_le_bytes()),
                R_ABS32_HI => image.write(place, &((target()? >> 32) as u32).to_le_bytes()),
                R_ABS64 => image.write(place, &target()?.to_le_bytes()),
                R_REL32 | R_REL32_LO => {
                    image.write(place, &(target()?.wrapping_sub(here) as u32).to_le_bytes())
                }
                R_REL32_HI => {
                    let distance = target()?.wrapping_sub(here) >> 32;
                    image.write(place, &(distance as u32).to_le_bytes())
                }
                R_REL64 => image.write(place, &target()?.wrapping_sub(here).to_le_bytes()),
                R_RELATIVE64 => {
                    image.write(place, &image.address().wrapping_add(addend).to_le_bytes())
                }
                kind => return Err(LoadError::Relocation { kind }),
            };
            if !written {
                return Err(outside());
            }
        }
    }
    Ok(())
}

const R_NONE: u32 = 0;
const R_ABS32_LO: u32 = 1;
const R_ABS32_HI: u32 = 2;
const R_ABS64: u32 = 3;
const R_REL32: u32 = 4;
const R_REL64: u32 = 5;
const R_ABS32: u32 = 6;
const R_REL32_LO: u32 = 10;
const R_REL32_HI: u32 = 11;
const R_RELATIVE64: u32 = 13;

fn find_metadata(file: &Elf) -> Result<Vec<KernelMetadata>, LoadError> {
    const NT_AMDGPU_METADATA: u32 = 32;
    for p in file.elf_program_headers() {
        let Some(mut notes) = p.notes(LE, file.data()).map_err(elf("notes"))? else {
            continue;
        };
        while let Some(note) = notes.next().map_err(elf("notes"))? {
            if note.name() == b"AMDGPU" && note.n_type(LE).0 == NT_AMDGPU_METADATA {
                return metadata::parse(note.desc());
            }
        }
    }
    Err(Malformed("no metadata note"))
}

#[derive(Clone, Copy)]
struct Symbol {
    value: u64,
    size: u64,
    is_object: bool,
}

fn symbols(file: &Elf) -> Result<BTreeMap<String, Symbol>, LoadError> {
    let mut found = BTreeMap::new();
    let table = file.elf_dynamic_symbol_table();
    for symbol in table.iter() {
        if symbol.is_undefined(LE) || symbol.is_absolute(LE) {
            continue;
        }
        let name = table.symbol_name(LE, symbol).map_err(elf("symbol name"))?;
        let entry = Symbol {
            value: symbol.st_value(LE),
            size: symbol.st_size(LE),
            is_object: symbol.st_type() == elf::STT_OBJECT,
        };
        found.insert(String::from_utf8_lossy(name).into_owned(), entry);
    }
    Ok(found)
}

/// The functions with code in the `length` bytes at `text`.
fn functions(file: &Elf, text: u64, length: usize) -> Result<Vec<Function>, LoadError> {
    let mut found = BTreeMap::new();
    for table in [file.elf_dynamic_symbol_table(), file.elf_symbol_table()] {
        for symbol in table.iter() {
            let offset = symbol.st_value(LE).wrapping_sub(text);
            let is_code = symbol.st_type() == elf::STT_FUNC && !symbol.is_undefined(LE);
            if !is_code || offset >= length as u64 {
                continue;
            }
            let name = table.symbol_name(LE, symbol).map_err(elf("symbol name"))?;
            let function = Function {
                name: String::from_utf8_lossy(name).into_owned(),
                offset: offset as u32,
                size: symbol.st_size(LE).min(length as u64 - offset) as u32,
            };
            found.insert((function.offset, function.name.clone()), function);
        }
    }
    Ok(found.into_values().collect())
}

fn kernel(
    metadata: KernelMetadata,
    symbols: &BTreeMap<String, Symbol>,
    image: &Image,
    program: &Program,
    text: u64,
) -> Result<Kernel, LoadError> {
    let fail = |reason| LoadError::Kernel {
        kernel: metadata.name.clone(),
        reason,
    };
    let symbol = symbols
        .get(&metadata.symbol)
        .ok_or_else(|| fail("its descriptor symbol is not defined"))?;
    let bytes = image
        .read(symbol.value)
        .ok_or_else(|| fail("its descriptor lies outside the segments"))?;
    let descriptor = Descriptor::parse(&bytes);
    if descriptor.has(property::WAVE32) || metadata.wavefront_size != 64 {
        return Err(fail("its waves do not have 64 lanes"));
    }
    let size = metadata.kernarg_segment_size;
    let fits = |a: &Arg| a.offset.checked_add(a.size).is_some_and(|end| end <= size);
    if !metadata.args.iter().all(fits) {
        return Err(fail("an argument lies outside the kernel arguments"));
    }
    if size > MAX_KERNARG {
        return Err(fail("its arguments are too large"));
    }
    let (first, count) = descriptor.preload();
    if count > 0 && (first + count) * 4 > size {
        return Err(fail("it preloads more arguments than it has"));
    }
    let mut at = symbol.value.wrapping_add_signed(descriptor.entry_offset);
    if count > 0 {
        at = at.wrapping_add(PRELOAD_PROLOGUE);
    }
    let offset = at.wrapping_sub(text);
    let entry = usize::try_from(offset / 4)
        .ok()
        .and_then(|i| program.index_of_dword.get(i).copied())
        .filter(|i| offset % 4 == 0 && *i != u32::MAX)
        .ok_or_else(|| fail("its entry is not an instruction"))?;
    Ok(Kernel {
        object: image.address() + symbol.value,
        entry,
        ordered: reaches(program, entry, order_shows),
        communicates: reaches(program, entry, communicates),
        descriptor,
        metadata,
    })
}

/// Limit on the size of arguments in bytes. HIP allows 4 KiB; other tools may use more.
const MAX_KERNARG: u32 = 1 << 20;

/// Whether an instruction that satisfies `wanted` can be reached from `entry`. After an indirect jump or call, all code
/// counts as reachable.
fn reaches(program: &Program, entry: u32, wanted: fn(&crate::inst::Inst) -> bool) -> bool {
    let insts = &program.insts;
    let mut seen = vec![false; insts.len()];
    let mut work = vec![entry as usize];
    while let Some(mut i) = work.pop() {
        while i < insts.len() && !std::mem::replace(&mut seen[i], true) {
            let inst = &insts[i];
            if wanted(inst) {
                return true;
            }
            match inst.op {
                Op::S_ENDPGM | Op::S_ENDPGM_SAVED | Op::INVALID => break,
                Op::S_SETPC_B64 | Op::S_SWAPPC_B64 => return insts.iter().any(wanted),
                _ => {}
            }
            if inst.target != u32::MAX {
                work.push(inst.target as usize);
            }
            if inst.op == Op::S_BRANCH {
                break;
            }
            i += 1;
        }
    }
    false
}

/// Whether an instruction is an atomic, load or store on global memory through which workgroups can synchronise.
fn communicates(inst: &crate::inst::Inst) -> bool {
    use crate::inst::flag;
    match inst.format {
        Format::Flat | Format::Global | Format::Mubuf => {
            inst.has(flag::SC1) || inst.op.mnemonic().contains("_atomic_")
        }
        _ => false,
    }
}

/// Whether an instruction is an atomic on global memory that returns the old value or adds in floating point.
fn order_shows(inst: &crate::inst::Inst) -> bool {
    use crate::inst::flag;
    let in_memory = matches!(
        inst.format,
        Format::Flat | Format::Global | Format::Mubuf | Format::Smem
    );
    if !in_memory {
        return false;
    }
    let name = format!("{:?}", inst.op);
    let Some((_, operation)) = name.split_once("_ATOMIC_") else {
        return false;
    };
    inst.has(flag::SC0)
        || operation.starts_with("ADD_F")
        || operation.starts_with("PK_ADD")
        || operation.starts_with("SWAP")
        || operation.starts_with("CMPSWAP")
}

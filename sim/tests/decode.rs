//! Compares the decoder and the disassembler with LLVM's.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::SystemTime;

use deltawave_sim::code_object::CodeObject;
use deltawave_sim::{decode, disasm, op::Op};

/// Text of the instruction that starts with these dwords, and its size.
fn text(dwords: &[u32]) -> (String, u8) {
    let inst = decode::decode(dwords);
    (disasm::text(&inst, 0), inst.size)
}

#[test]
fn operand_forms_print_as_llvm_prints_them() {
    let mut wrong = Vec::new();
    for line in include_str!("data/gfx942-forms.txt").lines() {
        if line.starts_with('#') {
            continue;
        }
        let (hex, expected) = line.split_once(' ').expect("two columns");
        let bytes: Vec<u8> = (0..hex.len() / 2)
            .map(|i| u8::from_str_radix(&hex[2 * i..2 * i + 2], 16).expect("hex"))
            .collect();
        let dwords: Vec<u32> = bytes
            .chunks(4)
            .map(|b| u32::from_le_bytes(b.try_into().expect("whole dwords")))
            .collect();
        let (text, size) = text(&dwords);
        if text != expected.trim() || usize::from(size) != bytes.len() {
            wrong.push(format!("{hex}: {text:?}, not {:?}", expected.trim()));
        }
    }
    assert!(
        wrong.is_empty(),
        "{}\n{} wrong",
        wrong.join("\n"),
        wrong.len()
    );
}

#[test]
fn mnemonics_are_the_names() {
    assert_eq!(Op::INVALID.mnemonic(), "invalid");
    assert_eq!(Op::V_XOR_B32.mnemonic(), "v_xor_b32");
    assert_eq!(Op::V_XOR_B32 as usize + 1, Op::COUNT);
}

mod encodings;
mod llvm;
use encodings::{FORMATS, Random, encode};
use llvm::Verdict;

/// Differences between us and LLVM, as lines.
fn compare(mc: &str, pairs: &[[u32; 2]]) -> Vec<String> {
    let mut wrong = Vec::new();
    for chunk in pairs.chunks(4000) {
        for (pair, verdict) in chunk.iter().zip(llvm::disassemble(mc, chunk)) {
            let inst = decode::decode(pair);
            let ours = if inst.op == Op::INVALID {
                Verdict::Invalid
            } else {
                Verdict::Text(disasm::text(&inst, 0), inst.size)
            };
            // LLVM also takes operands that gfx942 does not have, or not in that place.
            let lenient = matches!(&verdict, Verdict::Text(text, _) if ours == Verdict::Invalid
                && (text.contains("src_") || text.contains("null")));
            if verdict != Verdict::Unclear && ours != verdict && !lenient {
                wrong.push(format!(
                    "{:08x} {:08x}: {ours:?}, LLVM {verdict:?}",
                    pair[0], pair[1]
                ));
            }
        }
    }
    wrong
}

fn variants() -> u32 {
    std::env::var("DELTAWAVE_DECODE_VARIANTS")
        .ok()
        .and_then(|v| v.parse().ok())
        .unwrap_or(12)
}

#[test]
fn every_opcode_agrees_with_llvm() {
    let Some(mc) = llvm::reference("llvm-mc") else {
        return;
    };
    let mut r = Random(1);
    let mut pairs = Vec::new();
    for (format, opcodes) in FORMATS {
        for op in 0..opcodes {
            for _ in 0..variants() {
                pairs.push(encode(&mut r, format, op));
            }
        }
    }
    let wrong = compare(&mc, &pairs);
    assert!(
        wrong.is_empty(),
        "{}\n{} of {} wrong",
        wrong.join("\n"),
        wrong.len(),
        pairs.len()
    );
}

#[test]
fn random_dwords_agree_with_llvm() {
    let Some(mc) = llvm::reference("llvm-mc") else {
        return;
    };
    let mut r = Random(2);
    let pairs: Vec<[u32; 2]> = (0..20_000).map(|_| [r.next(), r.next()]).collect();
    let wrong = compare(&mc, &pairs);
    assert!(
        wrong.is_empty(),
        "{}\n{} of {} wrong",
        wrong.join("\n"),
        wrong.len(),
        pairs.len()
    );
}

#[test]
fn random_dwords_never_panic() {
    let mut r = Random(3);
    for _ in 0..2_000_000 {
        let pair = [r.next(), r.next()];
        let inst = decode::decode(&pair);
        assert!(inst.size == 4 || inst.size == 8);
        assert!(!disasm::text(&inst, 0).is_empty());
        let short = decode::decode(&pair[..1]);
        assert!(short.size == 4, "{pair:x?}");
    }
    assert_eq!(decode::decode(&[]).op, Op::INVALID);
}

/// LLVM 20 and later mark literals that would fit in the instruction itself: `lit(0xffffffff)` for -1.
fn without_lit(text: String) -> String {
    let Some((before, rest)) = text.split_once("lit(0x") else {
        return text;
    };
    let (digits, after) = rest.split_once(')').expect("a closing parenthesis");
    let value = u32::from_str_radix(digits, 16).expect("hex") as i32;
    match value {
        -16..=64 => format!("{before}{value}{after}"),
        _ => format!("{before}0x{digits}{after}"),
    }
}

/// Compares the listing of a code object with llvm-objdump's: how many instructions there are.
fn compare_listing(objdump: &str, object: &Path) -> usize {
    let name = object.display().to_string();
    let bytes = std::fs::read(object).expect("a code object");
    let code = CodeObject::load(&bytes).unwrap_or_else(|e| panic!("{name}: {e}"));
    let program = code.program();
    let text = program.base - code.extent().start;
    let (listing, _) = llvm::pipe(objdump, &["-d", "--mcpu=gfx942", &name], "").expect("installed");
    let mut wrong = Vec::new();
    let mut count = 0;
    for line in listing.lines() {
        // `TEXT // ADDRESS: DWORD DWORD <TARGET>`
        let Some((expected, rest)) = line.split_once("//") else {
            continue;
        };
        let Some((address, code)) = rest.split_once(':') else {
            continue;
        };
        let address = u64::from_str_radix(address.trim(), 16).expect("hex");
        let words = code.split('<').next().unwrap_or_default();
        let size = 4 * words.split_whitespace().count();
        let expected = expected.split_whitespace().collect::<Vec<_>>().join(" ");
        let expected = without_lit(expected);
        if expected == "..." || size == 0 {
            continue;
        }
        count += 1;
        let at = program.index_of_dword[((address - text) / 4) as usize] as usize;
        let Some(inst) = program.insts.get(at) else {
            wrong.push(format!("{address:x}: no instruction, not {expected:?}"));
            continue;
        };
        let ours = disasm::text(inst, u64::from(program.offsets[at]));
        if ours != expected || usize::from(inst.size) != size {
            wrong.push(format!("{address:x}:{words}: {ours:?}, not {expected:?}"));
        }
    }
    wrong.truncate(50);
    assert!(wrong.is_empty(), "{name}:\n{}", wrong.join("\n"));
    count
}

/// Compiles a source for gfx942 and compares the listings.
fn compile_and_compare(source: &Path, flags: &[&str]) -> Option<usize> {
    let clang = llvm::tool("clang++")?;
    let objdump = llvm::tool("llvm-objdump")?;
    let stem = source.file_stem().expect("a file").to_string_lossy();
    let name = format!("{stem}{}-{}.co", flags.concat(), std::process::id());
    let object = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    let (source, output) = (source.display().to_string(), object.display().to_string());
    let fixed = "-x hip -std=c++17 -nogpuinc -nogpulib --offload-arch=gfx942 --offload-device-only --no-gpu-bundle-output";
    let mut arguments: Vec<&str> = fixed.split(' ').collect();
    arguments.extend(flags);
    arguments.extend(["-o", &output, &source]);
    let (_, err) = llvm::pipe(&clang, &arguments, "").expect("installed");
    assert!(object.exists(), "{err}");
    let count = compare_listing(&objdump, &object);
    std::fs::remove_file(&object).expect("own file");
    println!("{source} {}: {count} instructions", flags.join(" "));
    Some(count)
}

/// Sources or code objects of a folder, by extension.
fn files(folder: &Path, extension: &str) -> Vec<PathBuf> {
    let Ok(entries) = std::fs::read_dir(folder) else {
        return Vec::new();
    };
    let mut files: Vec<PathBuf> = entries
        .filter_map(|e| Some(e.ok()?.path()))
        .filter(|p| p.extension().is_some_and(|e| e == extension))
        .collect();
    files.sort();
    files
}

/// Does each job, as many at once as there are cores. Returns the counts of instructions in any order, or `None` without the
/// tools.
fn in_parallel<J: Sync>(
    jobs: &[J],
    count: impl Fn(&J) -> Option<usize> + Sync,
) -> Option<Vec<usize>> {
    let next = AtomicUsize::new(0);
    let work = || {
        let mut counts = Vec::new();
        while let Some(job) = jobs.get(next.fetch_add(1, Ordering::Relaxed)) {
            counts.push(count(job)?);
        }
        Some(counts)
    };
    let workers = thread::available_parallelism().map_or(1, |n| n.get());
    let counts: Option<Vec<_>> = thread::scope(|scope| {
        let threads: Vec<_> = (0..workers).map(|_| scope.spawn(work)).collect();
        threads
            .into_iter()
            .map(|t| t.join().unwrap_or_else(|e| std::panic::resume_unwind(e)))
            .collect()
    });
    counts.map(|counts| counts.concat())
}

#[test]
fn test_kernels_print_as_llvm_prints_them() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/kernels");
    let mut jobs = Vec::new();
    for source in files(&folder, "hip") {
        // Assembly in these takes scalar registers, which a compiler that does not optimise never has.
        let stem = source.file_stem().and_then(|s| s.to_str());
        let scalar = matches!(stem, Some("order" | "timing"));
        for optimisation in ["-O0", "-O1", "-O3"].into_iter().skip(usize::from(scalar)) {
            jobs.push((source.clone(), optimisation));
        }
    }
    let compared = in_parallel(&jobs, |(source, flag)| compile_and_compare(source, &[flag]));
    let Some(counts) = compared else {
        return;
    };
    assert_eq!(counts.len(), jobs.len());
    assert!(counts.iter().all(|&n| n > 50), "{counts:?} instructions");
}

/// When the newest file of a folder and of those below it was changed.
fn newest(folder: &Path) -> Option<SystemTime> {
    let times = std::fs::read_dir(folder).ok()?.filter_map(|entry| {
        let path = entry.ok()?.path();
        match path.is_dir() {
            true => newest(&path),
            false => path.metadata().ok()?.modified().ok(),
        }
    });
    times.max()
}

/// The code objects of these sources that the build of this test's workspace made, if they are newer than all sources: to
/// compile them once more takes a minute.
fn built(sources: &[PathBuf], hip: &Path) -> Option<Vec<PathBuf>> {
    let program = std::env::current_exe().ok()?;
    let build = program.parent()?.parent()?.join("build");
    let changed = newest(hip)?;
    let made = |folder: PathBuf| {
        let objects: Vec<PathBuf> = (sources.iter())
            .filter_map(|source| {
                let name = format!("{}.gfx942.co", source.file_stem()?.to_str()?);
                Some(folder.join("out").join(name))
            })
            .collect();
        let is_newer = |object: &PathBuf| {
            let made = object.metadata().and_then(|m| m.modified());
            made.is_ok_and(|made| made > changed)
        };
        objects.iter().all(is_newer).then_some(objects)
    };
    let mut folders = std::fs::read_dir(build).ok()?;
    folders.find_map(|entry| made(entry.ok()?.path()))
}

/// What ships, with -O3. The kernels of these tests are also compiled with -O0 and -O1.
#[test]
fn shipped_kernels_print_as_llvm_prints_them() {
    // The kernels are in the repository, not in this package.
    let hip = Path::new(env!("CARGO_MANIFEST_DIR")).join("../hip");
    let folder = hip.join("kernels");
    let sources = files(&folder, "hip");
    let compared = match built(&sources, &hip) {
        Some(objects) => in_parallel(&objects, |object| {
            Some(compare_listing(&llvm::tool("llvm-objdump")?, object))
        }),
        None => in_parallel(&sources, |source| compile_and_compare(source, &["-O3"])),
    };
    let Some(counts) = compared else {
        return;
    };
    assert_eq!(counts.len(), sources.len());
    let count: usize = counts.iter().sum();
    println!("{count} instructions of the kernels in hip/");
    assert!(count > 10_000 || !folder.exists(), "{count} instructions");
}

/// Code objects from elsewhere: folders in `DELTAWAVE_FOREIGN_CODE_OBJECTS`, separated as in PATH.
#[test]
fn foreign_code_objects_print_as_llvm_prints_them() {
    let Some(folders) = std::env::var_os("DELTAWAVE_FOREIGN_CODE_OBJECTS") else {
        return;
    };
    let Some(objdump) = llvm::tool("llvm-objdump") else {
        return;
    };
    let mut count = 0;
    for folder in std::env::split_paths(&folders) {
        for object in [files(&folder, "co"), files(&folder, "hsaco")].concat() {
            let n = compare_listing(&objdump, &object);
            println!("{}: {n} instructions", object.display());
            count += n;
        }
    }
    println!("{count} instructions of foreign code objects");
    assert!(count > 0, "no code objects in {folders:?}");
}

#[test]
fn programs_resolve_branches() {
    // s_cbranch_scc1 +2 (over a literal), s_mov_b32 s0 literal, s_branch -4, s_branch outside.
    let words: [u32; 5] = [
        0xbf85_0002,
        0xbe80_00ff,
        0x1234_5678,
        0xbf82_fffc,
        0xbf82_7000,
    ];
    let text: Vec<u8> = words.iter().flat_map(|w| w.to_le_bytes()).collect();
    let program = decode::program(&text, 0x1000);
    assert_eq!(program.base, 0x1000);
    assert_eq!(program.offsets, [0, 4, 12, 16]);
    assert_eq!(program.index_of_dword, [0, 1, u32::MAX, 2, 3]);
    let targets: Vec<u32> = program.insts.iter().map(|i| i.target).collect();
    assert_eq!(targets, [2, u32::MAX, 0, u32::MAX]);
    assert_eq!(program.insts[1].literal, 0x1234_5678);
}

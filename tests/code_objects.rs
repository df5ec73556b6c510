//! What the embedded code objects promise: the kernels that are launched, the size of their arguments, registers
//! without spills, and bytes that depend on the sources and the compiler alone. No device is needed.

use std::ffi::{OsStr, OsString};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use std::{env, fs};

use deltawave::code_objects::{self, CODE_OBJECTS, CodeObject, VERIFIED_ARCHS};
use deltawave::kernels::{Role, TABLE};
use deltawave_sim::code_object::KernelMetadata;

#[path = "code_objects/ahead.rs"]
mod ahead;
#[path = "../build/kernels.rs"]
#[allow(dead_code)]
mod build;
#[path = "code_objects/headers.rs"]
mod headers;

use build::Compiler;

/// Vector registers, architectural and accumulation, that a kernel may use: two workgroups of four waves fit a compute unit
/// up to 256.
fn most_registers(role: Role) -> u32 {
    match role {
        Role::Gate | Role::GradientSums => 32,
        Role::GateBackward => 64,
        // Sixteen waves on a compute unit.
        Role::PrefillLengths => 64,
        // Eight copies in flight.
        Role::PrefillCollect => 64,
        Role::Norm => 96,
        // Four waves per SIMD.
        Role::Commit | Role::Conv | Role::NormBackward | Role::PrefillShort(..=96) => 128,
        // Three waves per SIMD: LDS does not hold more of summarise.
        Role::DecodeNorm
        | Role::DecodeFew
        | Role::Decode(..=128)
        | Role::PrefillSummarise(..=128)
        | Role::PrefillShort(_) => 168,
        Role::PrefillPrepare => 208,
        Role::BackwardSums => 32,
        Role::Decode(_)
        | Role::PrefillSummarise(_)
        | Role::PrefillCombine(_)
        | Role::PrefillScan(_)
        | Role::PrefillFused(_)
        | Role::PrefillFusedSummarise(_)
        | Role::BackwardPrepare
        | Role::BackwardSummarise(_)
        | Role::BackwardWalk(_)
        | Role::BackwardGradients(_)
        | Role::ConvBackward => 256,
    }
}

const MAX_LDS: u32 = 64 << 10;
const MAX_KERNELS: usize = 112;
const MAX_BYTES: usize = 8 << 20;
/// Of all compilers together, on the CPU. Busy cores slow each other down: it took 102 s beside one other process, 133 beside
/// many, and more than 150 on another day.
const MAX_COMPILE_TIME: Duration = Duration::from_secs(240);

/// Held by a test that compiles all kernels: the time of this process's children is that of one of them.
static COMPILES: Mutex<()> = Mutex::new(());

fn compiles() -> MutexGuard<'static, ()> {
    COMPILES.lock().unwrap_or_else(PoisonError::into_inner)
}

/// CPU time of the children that have ended, where the system says it.
fn time_of_children() -> Option<Duration> {
    let stat = fs::read_to_string("/proc/self/stat").ok()?;
    // After the program's name, which may hold anything: field 3 is the first, 16 and 17 are wanted.
    let mut fields = stat.rsplit_once(')')?.1.split_whitespace().skip(13);
    let mut ticks = || fields.next()?.parse::<u64>().ok();
    // A hundredth of a second each, whatever the kernel's own clock.
    Some(Duration::from_millis(10 * (ticks()? + ticks()?)))
}

/// Says that a test is skipped, or fails it where that was asked for.
fn skip(reason: &str) {
    assert_ne!(
        env::var("DELTAWAVE_REQUIRE_KERNELS").as_deref(),
        Ok("1"),
        "{reason}"
    );
    println!("skipped: {reason}");
}

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// An empty folder of this test.
fn folder(name: &str) -> PathBuf {
    let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("code-objects-{name}"));
    let _ = fs::remove_dir_all(&path);
    fs::create_dir_all(&path).expect("the target folder can be written");
    path
}

/// The embedded code objects for the first verified architecture, with the metadata of their kernels.
fn embedded() -> Option<Vec<(&'static CodeObject, Vec<KernelMetadata>)>> {
    let objects: Vec<_> = code_objects::for_arch(VERIFIED_ARCHS[0]).collect();
    if objects.is_empty() {
        skip(&code_objects::why_missing(VERIFIED_ARCHS[0]));
        return None;
    }
    let with_metadata = objects.into_iter().map(|object| {
        let loaded = deltawave_sim::code_object::CodeObject::load(object.bytes)
            .unwrap_or_else(|e| panic!("{}: {e}", object.name));
        let metadata = loaded.kernels().iter().map(|k| k.metadata.clone());
        (object, metadata.collect())
    });
    Some(with_metadata.collect())
}

/// The compiler to test with: the one that the build would choose.
fn compiler(arch: &str) -> Option<Compiler> {
    let scratch = folder(&format!("probe-{arch}-{:?}", std::thread::current().id()));
    Compiler::for_arch(arch, &scratch, env::var_os("DELTAWAVE_HIPCC")).ok()
}

/// Compiles every source of `sources` for `arch` into a new folder; names and bytes.
fn compile_all(
    compiler: &Compiler,
    sources: &[PathBuf],
    arch: &str,
    name: &str,
) -> Vec<(String, Vec<u8>)> {
    let out = folder(name);
    let (_, objects) = build::build(arch, sources, &out, Some(compiler.0.clone().into()), None)
        .unwrap_or_else(|e| panic!("{e}"));
    let read =
        |(name, path): (String, PathBuf)| (name, fs::read(path).expect("the compiler's output"));
    objects.into_iter().map(read).collect()
}

fn sources() -> Vec<PathBuf> {
    build::sources(root()).expect("hip/kernels can be read")
}

/// The sources `hip/kernels/NAME.hip` of these names.
fn sources_named(names: &[&str]) -> Vec<PathBuf> {
    let mut sources = sources();
    sources.retain(|source| {
        let stem = source.file_stem().and_then(OsStr::to_str);
        stem.is_some_and(|stem| names.contains(&stem))
    });
    assert_eq!(sources.len(), names.len(), "{names:?}");
    sources
}

/// Names and bytes of the embedded code objects for `arch`, if `compiler` made them.
fn embedded_by(compiler: &Compiler, arch: &str) -> Option<Vec<(String, Vec<u8>)>> {
    let embedded: Vec<_> = code_objects::for_arch(arch)
        .filter(|object| Path::new(object.compiler) == compiler.0)
        .map(|object| (object.name.to_owned(), object.bytes.to_vec()))
        .collect();
    (!embedded.is_empty()).then_some(embedded)
}

/// Fails with the names of the code objects that differ, not with their bytes.
fn assert_same(left: &[(String, Vec<u8>)], right: &[(String, Vec<u8>)], what: &str) {
    assert_eq!(left.len(), right.len(), "{what}");
    let pairs = left.iter().zip(right);
    let differing: Vec<_> = pairs.filter(|(l, r)| l != r).map(|(l, _)| &l.0).collect();
    assert!(differing.is_empty(), "{what}: {differing:?} differ");
}

#[test]
fn every_launched_kernel_is_embedded_with_its_arguments() {
    let Some(embedded) = embedded() else { return };
    for expected in TABLE {
        let (_, kernels) = embedded
            .iter()
            .find(|(object, _)| object.name == expected.object)
            .unwrap_or_else(|| panic!("no code object {}", expected.object));
        let kernel = kernels
            .iter()
            .find(|k| k.name == expected.name)
            .unwrap_or_else(|| panic!("no kernel {} in {}", expected.name, expected.object));
        // Hidden arguments would follow the struct: the kernels use none, so that nobody has to supply them.
        assert_eq!(
            kernel.kernarg_segment_size as usize, expected.argument_bytes,
            "argument bytes of {}",
            expected.name
        );
        assert_eq!(kernel.wavefront_size, 64, "{}", expected.name);
    }
}

#[test]
fn nothing_is_embedded_that_is_not_launched() {
    let Some(embedded) = embedded() else { return };
    let known: Vec<_> = TABLE.iter().map(|row| row.name).collect();
    for (object, kernels) in embedded {
        for kernel in kernels {
            assert!(
                known.contains(&kernel.name.as_str()),
                "{} of {} is missing from the table of kernels",
                kernel.name,
                object.name
            );
        }
    }
}

/// Fails if a kernel spills, uses scratch, or takes more registers or LDS than its role may.
fn assert_within_resources(kernel: &KernelMetadata, compiler: &str) {
    let who = format!("{}, compiled by {compiler}", kernel.name);
    assert_eq!(kernel.vgpr_spill_count, 0, "VGPR spills of {who}");
    assert_eq!(kernel.sgpr_spill_count, 0, "SGPR spills of {who}");
    assert_eq!(
        kernel.private_segment_fixed_size, 0,
        "scratch bytes of {who}"
    );
    assert!(!kernel.uses_dynamic_stack, "dynamic stack of {who}");
    assert!(
        kernel.group_segment_fixed_size <= MAX_LDS,
        "LDS of {who}: {} bytes",
        kernel.group_segment_fixed_size
    );
    // `vgpr_count` counts both kinds. An accumulation register would cost moves in every chunk.
    assert_eq!(
        kernel.agpr_count, 0,
        "accumulation registers that {who} names"
    );
    if let Some(budget) = TABLE.iter().find(|b| b.name == kernel.name) {
        assert!(
            kernel.vgpr_count <= most_registers(budget.role),
            "{who} uses {} registers of {}",
            kernel.vgpr_count,
            most_registers(budget.role)
        );
    }
}

#[test]
fn kernels_stay_within_their_resources() {
    let Some(embedded) = embedded() else { return };
    for (object, kernels) in embedded {
        for kernel in kernels {
            assert_within_resources(&kernel, object.compiler);
        }
    }
}

/// Versions of clang make different code. `scripts/compare-compilers` shows how fast it is.
#[test]
fn every_compiler_stays_within_the_resources() {
    let arch = VERIFIED_ARCHS[0];
    let embedded = code_objects::for_arch(arch)
        .next()
        .and_then(|object| Path::new(object.compiler).file_name());
    let scratch = folder("every-compiler-probe");
    let source = scratch_source(&scratch);
    let mut seen = Vec::new();
    for compiler in Compiler::candidates() {
        // Other names of a compiler are that compiler; `kernels_stay_within_their_resources` tests the embedded one.
        let program = fs::canonicalize(&compiler.0).unwrap_or_else(|_| compiler.0.clone());
        if seen.contains(&program)
            || compiler
                .compile(&source, arch, &scratch.join("probe.co"))
                .is_err()
        {
            continue;
        }
        seen.push(program);
        if embedded == compiler.0.file_name() {
            continue;
        }
        let _alone = compiles();
        for (name, bytes) in compile_all(&compiler, &sources(), arch, "every-compiler") {
            let loaded = deltawave_sim::code_object::CodeObject::load(&bytes)
                .unwrap_or_else(|e| panic!("{name}, compiled by {}: {e}", compiler.0.display()));
            let count = loaded.kernels().len();
            assert!(
                count > 0,
                "{name} of {} has no kernel",
                compiler.0.display()
            );
            for kernel in loaded.kernels() {
                assert_within_resources(&kernel.metadata, &compiler.0.display().to_string());
            }
        }
        println!("{} stays within the resources", compiler.0.display());
    }
    if seen.is_empty() {
        skip("no compiler for gfx942");
    }
}

#[test]
fn code_objects_are_few_small_and_aligned() {
    let Some(embedded) = embedded() else { return };
    let count: usize = embedded.iter().map(|(_, kernels)| kernels.len()).sum();
    assert!(count <= MAX_KERNELS, "{count} kernels");
    let bytes: usize = embedded.iter().map(|(object, _)| object.bytes.len()).sum();
    assert!(bytes <= MAX_BYTES, "{bytes} bytes");
    for object in CODE_OBJECTS {
        let address = object.bytes.as_ptr().addr();
        assert_eq!(address % 4096, 0, "{} for {}", object.name, object.arch);
    }
}

fn copy_folder(from: &Path, to: &Path) {
    fs::create_dir_all(to).expect("the target folder can be written");
    for entry in fs::read_dir(from).expect("hip can be read") {
        let path = entry.expect("hip can be read").path();
        let copy = to.join(path.file_name().expect("an entry has a name"));
        if path.is_dir() {
            copy_folder(&path, &copy);
        } else {
            fs::copy(&path, copy).expect("the target folder can be written");
        }
    }
}

#[test]
fn compiling_is_quick_and_reproducible() {
    let arch = VERIFIED_ARCHS[0];
    let Some(compiler) = compiler(arch) else {
        return skip("no compiler for gfx942");
    };
    // Sources that lie elsewhere, and another output folder than the build script's.
    let elsewhere = folder("sources");
    copy_folder(&root().join("hip"), &elsewhere.join("hip"));
    let moved = build::sources(&elsewhere).expect("the copies can be read");
    let _alone = compiles();
    let (start, before) = (Instant::now(), time_of_children());
    let compiled = compile_all(&compiler, &moved, arch, "moved");
    let of_compilers = time_of_children()
        .zip(before)
        .map(|(now, before)| now - before);
    let elapsed = of_compilers.unwrap_or_else(|| start.elapsed());
    assert!(
        elapsed > Duration::ZERO && elapsed < MAX_COMPILE_TIME,
        "compiling took {elapsed:?}, at most {MAX_COMPILE_TIME:?} is allowed"
    );
    match embedded_by(&compiler, arch) {
        Some(embedded) => assert_same(&compiled, &embedded, "compiled elsewhere and embedded"),
        None => {
            let here = compile_all(&compiler, &sources(), arch, "here");
            assert_same(&compiled, &here, "sources and outputs in different folders");
            skip("the compiler of the embedded code objects is not the one found now");
        }
    }
}

/// hipcc is a driver: given another clang, its output must not depend on what it adds to the command line. Debian's is
/// older than gfx942, so it gets the programs of a newer clang under the names that it looks for.
#[test]
fn hipcc_as_driver_makes_the_same_bytes() {
    let arch = VERIFIED_ARCHS[0];
    let path = env::var_os("PATH").unwrap_or_default();
    let find = |name: &str| {
        env::split_paths(&path)
            .map(|f| f.join(name))
            .find(|p| p.is_file())
    };
    let Some(hipcc) = find("hipcc") else {
        return skip("no hipcc");
    };
    let scratch = folder("clang-probe");
    let clang = Compiler::candidates()
        .into_iter()
        .filter(|c| !c.0.ends_with("hipcc"))
        .find(|c| {
            c.compile(&scratch_source(&scratch), arch, &scratch.join("probe.co"))
                .is_ok()
        });
    let Some(clang) = clang else {
        return skip("no clang for gfx942");
    };

    let programs = folder("hipcc-programs");
    let target = fs::canonicalize(&clang.0).expect("the compiler exists");
    let installed = target
        .parent()
        .expect("a program lies in a folder")
        .to_owned();
    // The clang++ beside it, not what it links to: the program's name selects C++.
    let versions = std::iter::once(String::new()).chain((13..=30).map(|v| format!("-{v}")));
    for version in versions {
        link(&clang.0, &programs.join(format!("clang++{version}")));
        link(&target, &programs.join(format!("clang{version}")));
        for tool in [
            "clang-offload-bundler",
            "llvm-link",
            "lld",
            "ld.lld",
            "llc",
            "opt",
        ] {
            let program = installed.join(tool);
            if program.is_file() {
                link(&program, &programs.join(format!("{tool}{version}")));
            }
        }
    }

    let _alone = compiles();
    // Some sources: the command line is that of all.
    let few = ["commit", "gate", "norm", "prefill_lengths"];
    let sources = sources_named(&few);
    // What the build script compiled with this clang need not be compiled again.
    let mut expected =
        embedded_by(&clang, arch).unwrap_or_else(|| compile_all(&clang, &sources, arch, "clang"));
    expected.retain(|(name, _)| few.contains(&name.as_str()));
    let out = folder("hipcc");
    let names: Vec<_> = sources
        .iter()
        .map(|source| source.file_stem().expect("a source has a stem"))
        .collect();
    build::in_parallel(sources.len(), |i| {
        let result = Command::new(&hipcc)
            .args(build::arguments(&sources[i], arch, &out.join(names[i])))
            .env("HIP_PLATFORM", "amd")
            .env("HIP_CLANG_PATH", &programs)
            .output()
            .expect("hipcc starts");
        let stderr = String::from_utf8_lossy(&result.stderr);
        let failed = || format!("{} fails: {stderr}", hipcc.display());
        result.status.success().then_some(()).ok_or_else(failed)
    })
    .unwrap_or_else(|e| panic!("{e}"));
    let read = |name: &&OsStr| fs::read(out.join(name)).expect("hipcc's output");
    let compiled: Vec<_> = names
        .iter()
        .map(|name| (name.to_string_lossy().into_owned(), read(name)))
        .collect();
    assert_same(&compiled, &expected, "hipcc and clang++");
}

fn scratch_source(scratch: &Path) -> PathBuf {
    let source = scratch.join("probe.hip");
    fs::write(
        &source,
        "extern \"C\" __attribute__((global)) void probe() {}\n",
    )
    .expect("the target folder can be written");
    source
}

#[cfg(unix)]
fn link(program: &Path, name: &Path) {
    std::os::unix::fs::symlink(program, name).expect("the target folder can be written");
}

#[cfg(not(unix))]
fn link(program: &Path, name: &Path) {
    fs::copy(program, name).expect("the target folder can be written");
}

/// With an assembler the code object is what it makes of the PTX. Here it is a script.
#[cfg(unix)]
#[test]
fn ptx_becomes_what_the_assembler_makes() {
    use std::os::unix::fs::PermissionsExt as _;

    let out = folder("assembler");
    if let Err(reason) = Compiler::for_arch("sm_90a", &out, None) {
        return skip(&reason);
    }
    let source = root().join("hip/kernels/commit.hip");
    let script = out.join("ptxas");
    let text = "#!/bin/sh\ngrep -c 'entry dw_commit' \"$4\" > \"$3\"\n"; // -arch=sm_90a -o OBJECT TEXT
    fs::write(&script, text).expect("the target folder can be written");
    fs::set_permissions(&script, fs::Permissions::from_mode(0o755)).expect("a script of ours");
    let sources = [source];
    let build = |program: &Path| {
        let assembler = build::Assembler(program.into());
        build::build("sm_90a", &sources, &out, None, Some(&assembler))
    };
    let (_, objects) = build(&script).unwrap_or_else(|e| panic!("{e}"));
    let made = fs::read_to_string(&objects[0].1).expect("the script's output");
    assert!(made.trim().parse::<u32>().is_ok_and(|n| n > 0), "{made}");

    let error = build(Path::new("/no/ptxas")).expect_err("there is no such program");
    assert!(error.contains("/no/ptxas"), "{error}");
    let left = fs::read_dir(&out).expect("a folder of ours");
    let texts = left.filter(|e| {
        e.as_ref()
            .is_ok_and(|e| e.path().extension().is_some_and(|x| x == "text"))
    });
    assert_eq!(texts.count(), 0, "PTX for the assembler is removed");
}

/// These compile and nobody has run them: `VERIFIED_ARCHS` does not name them. Some sources, to save minutes; a release
/// compiles all (docs/internals/release.md).
#[test]
fn unverified_architectures_compile() {
    let some = ["conv", "decode", "norm", "prefill_prepare", "prefill_scan"];
    let sources = sources_named(&some);
    for arch in ["gfx90a", "gfx950"] {
        assert!(!VERIFIED_ARCHS.contains(&arch));
        let Some(compiler) = compiler(arch) else {
            println!("skipped: no compiler here knows {arch}");
            continue;
        };
        let _alone = compiles();
        let objects = compile_all(&compiler, &sources, arch, arch);
        assert!(
            objects
                .iter()
                .all(|(_, bytes)| bytes.starts_with(b"\x7fELF"))
        );
    }
}

#[test]
fn without_a_compiler_the_error_says_how_to_get_one() {
    let out = folder("no-compiler");
    let named = OsString::from("/nonexistent/hipcc");
    let error = build::build("gfx942", &sources(), &out, Some(named), None)
        .expect_err("there is no such program");
    for part in [
        "DELTAWAVE_HIPCC",
        "/nonexistent/hipcc",
        "gfx942",
        "apt-get install clang-19 lld-19",
        "ROCm",
    ] {
        assert!(error.contains(part), "{part:?} is not in: {error}");
    }
    // A program that is no compiler.
    let error = build::build("gfx942", &sources(), &out, Some("false".into()), None)
        .expect_err("false does not compile");
    assert!(error.contains("apt-get install clang-19 lld-19"), "{error}");
    // An architecture that no compiler knows.
    let error =
        build::build("gfx0", &sources(), &out, None, None).expect_err("no such architecture");
    assert!(error.contains("--offload-arch=gfx0"), "{error}");
}

#[test]
fn an_architecture_that_was_not_built_says_how_to_build_it() {
    assert_eq!(code_objects::for_arch("gfx1100").count(), 0);
    let reason = code_objects::why_missing("gfx1100");
    assert!(reason.contains("DELTAWAVE_ARCHS"), "{reason}");
    assert!(reason.contains("gfx1100"), "{reason}");
}

#[test]
fn code_that_does_not_compile_is_shown_with_its_message() {
    let Some(compiler) = compiler(VERIFIED_ARCHS[0]) else {
        return skip("no compiler for gfx942");
    };
    let out = folder("broken");
    let source = out.join("broken.hip");
    fs::write(&source, "this is not C++\n").expect("the target folder can be written");
    let error = build::build(
        VERIFIED_ARCHS[0],
        &[source],
        &out,
        Some(compiler.0.into()),
        None,
    )
    .expect_err("that is not C++");
    assert!(error.contains("broken.hip"), "{error}");
    assert!(error.contains("error:"), "{error}");
}

//! The kernels as PTX for NVIDIA GPUs: they compile, divide work as the host launches them, use no local memory and, where
//! ptxas is at hand (on the PATH, or named by `DELTAWAVE_PTXAS`), fit into the registers. No device is needed.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::{env, fs};

use deltawave::kernels::{Role, TABLE, Target};

#[path = "../build/kernels.rs"]
#[allow(dead_code)]
mod build;

const ARCH: &str = "sm_90a";

/// The PTX of every source, compiled into a folder of the test; nothing where no compiler here can.
fn compile(name: &str) -> Option<Vec<(String, PathBuf)>> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let out = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("ptx-{name}"));
    fs::create_dir_all(&out).expect("the target folder can be written");
    if let Err(reason) = build::Compiler::for_arch(ARCH, &out, env::var_os("DELTAWAVE_HIPCC")) {
        assert_ne!(
            env::var("DELTAWAVE_REQUIRE_KERNELS").as_deref(),
            Ok("1"),
            "{reason}"
        );
        println!("skipped: {reason}");
        return None;
    }
    let sources = build::sources(root).expect("hip/kernels can be read");
    let (_, objects) = build::build(ARCH, &sources, &out, env::var_os("DELTAWAVE_HIPCC"), None)
        .unwrap_or_else(|e| panic!("{e}"));
    Some(objects)
}

/// Name and text of each kernel of a PTX module, from its name to its end.
fn entries(module: &str) -> Vec<(&str, &str)> {
    let parts = module.split(".visible .entry ").skip(1);
    parts
        .map(|part| (part.split('(').next().unwrap_or_default(), part))
        .collect()
}

/// The integer that follows `key` in a text.
fn number_after(text: &str, key: &str) -> Option<u32> {
    let rest = text.split_once(key)?.1.trim_start();
    let digits = rest.split(|c: char| !c.is_ascii_digit()).next()?;
    digits.parse().ok()
}

/// A kernel has a second parameter of that many bytes, aligned to 64; none, if they are 0.
fn assert_second_parameter(name: &str, entry: &str, bytes: usize) {
    let parameters = entry.split(')').next().unwrap_or_default();
    let declared = parameters.matches(".param ").count();
    if bytes == 0 {
        assert_eq!(declared, 1, "{name}: {parameters}");
        return;
    }
    assert_eq!(declared, 2, "{name}: {parameters}");
    // The kernels' assembly names it so (hip/prefill/sm90/maps.h).
    let second = format!(".param .align 64 .b8 {name}_param_1[{bytes}]");
    assert!(parameters.contains(&second), "{name}: {parameters}");
}

#[test]
fn ptx_divides_work_as_the_host_launches_it() {
    let Some(objects) = compile("launch") else {
        return;
    };
    let target = Target::of(ARCH);
    let mut kernels = 0;
    for (stem, path) in &objects {
        let bytes = fs::read(path).expect("the compiler's output");
        let text = bytes
            .strip_suffix(&[0])
            .unwrap_or_else(|| panic!("{stem} must end in a NUL for the CUDA driver"));
        let module = str::from_utf8(text).expect("PTX is text without other NULs");
        assert!(!module.contains(".local"), "{stem} uses local memory");
        for (name, entry) in entries(module) {
            let row = TABLE.iter().find(|row| row.name == name);
            let row = row.unwrap_or_else(|| panic!("{name} is not in the table of kernels"));
            assert_eq!(row.object, stem, "{name}");
            let threads = target.most_threads(row.role);
            assert_eq!(number_after(entry, ".maxntid"), Some(threads), "{name}");
            assert_second_parameter(name, entry, target.second_argument_bytes(row.role));
            if let Role::PrefillScan(keys)
            | Role::PrefillSummarise(keys)
            | Role::PrefillCombine(keys)
            | Role::PrefillFused(keys)
            | Role::PrefillFusedSummarise(keys) = row.role
            {
                let stated = number_after(module, &format!("dw_{stem}_shared_bytes_k{keys} = "));
                assert_eq!(stated, Some(target.shared_bytes(row.role)), "{name}");
                assert!(target.columns(row.role) > 0, "{name}");
            }
            if let Role::BackwardWalk(keys) | Role::BackwardSummarise(keys) = row.role {
                let stated = number_after(module, &format!("dw_{stem}_shared_bytes_k{keys} = "));
                let bytes = target.shared_bytes(row.role);
                assert_eq!(stated.unwrap_or(0), bytes, "{name}");
                assert!(target.columns(row.role) > 0, "{name}");
            }
            if let Role::BackwardGradients(keys) = row.role {
                let stated = number_after(module, &format!("dw_{stem}_shared_bytes_k{keys} = "));
                let bytes = target.shared_bytes(row.role);
                assert_eq!(stated.unwrap_or(0), bytes, "{name}");
            }
            kernels += 1;
        }
    }
    assert_eq!(kernels, TABLE.len());
}

/// Kernels that need a stack, by the first name that theirs begins with, and the most bytes for each thread: with CUDA
/// 12.9 up to 48, 96, 912, 8, 112 and 8. All other kernels have no stack. Where a kernel fills shared memory, the L1 cache is too small for
/// stacks: 64 bytes in `prefill_scan` made batches a ninth slower. Its 8 bytes are used outside the loop over chunks.
const SPILLING: [(&str, u32); 6] = [
    ("dw_decode_draft_", 64),
    ("dw_decode_", 128),
    ("dw_prefill_backward_gradients_", 1024),
    ("dw_prefill_backward_walk_", 16),
    ("dw_prefill_fused_", 128),
    ("dw_prefill_scan_", 8),
];

#[test]
fn ptxas_spills_no_more_than_is_known() {
    let ptxas = env::var_os("DELTAWAVE_PTXAS").unwrap_or_else(|| OsString::from("ptxas"));
    if Command::new(&ptxas).arg("--version").output().is_err() {
        println!("skipped: no ptxas on the PATH, and DELTAWAVE_PTXAS names none");
        return;
    }
    let Some(objects) = compile("ptxas") else {
        return;
    };
    for (stem, path) in objects {
        // As text: ptxas does not take the NUL.
        let bytes = fs::read(&path).expect("the compiler's output");
        let text = path.with_extension("text.ptx");
        fs::write(&text, bytes.strip_suffix(&[0]).unwrap_or(&bytes))
            .expect("the target folder can be written");
        let output = Command::new(&ptxas)
            .args(["-v", "-arch=sm_90a", "-o"])
            .args([path.with_extension("cubin"), text])
            .output()
            .expect("ptxas starts");
        let report = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.success(), "{stem}: {report}");
        let mut kernel = "";
        for line in report.lines() {
            if let Some((_, rest)) = line.split_once("entry function '") {
                kernel = rest.split('\'').next().unwrap_or_default();
            } else if line.contains("bytes stack frame") {
                let frame = line.trim().split(' ').next().and_then(|n| n.parse().ok());
                let frame: u32 = frame.unwrap_or_else(|| panic!("{kernel}: {line}"));
                let most = SPILLING.iter().find(|(name, _)| kernel.starts_with(name));
                let most = most.map_or(0, |&(_, bytes)| bytes);
                assert!(frame <= most, "{kernel}: {line}, {most} are known");
            } else if let Some(registers) = number_after(line, "Used") {
                println!("{kernel}: {registers} registers");
                assert!(registers <= 255, "{kernel}");
            }
        }
    }
}

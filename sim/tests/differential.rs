//! Compares C++ functions that clang compiles for the host and for gfx942: both must give the same bits.

mod common;

use std::io::Write;
use std::path::Path;
use std::process::{Command, Stdio};

use deltawave_sim::code_object::CodeObject;
use deltawave_sim::launch::{Launch, Options};
use deltawave_sim::memory::{Extent, Memory};
use deltawave_sim::sanitize::Checks;

const SOURCE: &str = "differential.hip";

/// SplitMix64.
fn random(state: &mut u64) -> u64 {
    *state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let mut z = *state;
    z = (z ^ z >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ z >> 31
}

/// A word that means something to some function: any bits, few bits, or a number of some type.
fn word(state: &mut u64) -> u64 {
    let r = random(state);
    let unit = (random(state) >> 11) as f64 / (1u64 << 52) as f64 - 1.0;
    match r % 12 {
        0 | 1 => random(state),
        2 => random(state) >> (r >> 8 & 63),
        3 => !(random(state) >> (r >> 8 & 63)),
        4 => 1 << (r >> 8 & 63),
        5 => (unit * 100.0).to_bits(),
        6 => (unit * (2f64).powi((r >> 8 & 63) as i32 - 32)).to_bits(),
        7 | 8 => {
            let low = (unit as f32 * (2f32).powi((r >> 8 & 31) as i32 - 16)).to_bits();
            let high = (unit as f32 * 3.0 + 0.25).to_bits();
            u64::from(low) | u64::from(high) << 32
        }
        9 => {
            let special = [
                0.0,
                -0.0,
                1.0,
                f32::INFINITY,
                f32::NAN,
                1e-40,
                f32::MAX,
                -2.5,
            ];
            u64::from(special[(r >> 8 & 7) as usize].to_bits()) | r << 32
        }
        10 => {
            let special = [
                0.0,
                -0.0,
                f64::INFINITY,
                f64::NAN,
                5e-324,
                1e-310,
                f64::MAX,
                0.5,
            ];
            special[(r >> 8 & 7) as usize].to_bits()
        }
        // Halves near 1.
        _ => (random(state) & 0x87ff_87ff_87ff_87ff) | 0x3800_3800_3800_3800,
    }
}

/// Names and results of all functions on the host.
fn on_the_host(program: &Path, words: &[u64]) -> Vec<(String, Vec<u64>)> {
    let mut child = Command::new(program)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .expect("the program starts");
    let input: Vec<u8> = words.iter().flat_map(|w| w.to_le_bytes()).collect();
    let mut stdin = child.stdin.take().expect("piped");
    let writer = std::thread::spawn(move || stdin.write_all(&input).expect("it reads"));
    let output = child.wait_with_output().expect("it ends").stdout;
    writer.join().expect("no panic");
    let (mut results, mut at, size) = (Vec::new(), 0, words.len() / 3 * 8);
    while at < output.len() {
        let length = output[at..].iter().position(|b| *b == b'\n').expect("name");
        let name = String::from_utf8_lossy(&output[at..at + length]).into_owned();
        at += length + 1;
        let values = output[at..at + size].chunks_exact(8);
        let values = values.map(|b| u64::from_le_bytes(b.try_into().expect("eight bytes")));
        results.push((name, values.collect()));
        at += size;
    }
    results
}

/// Results of a kernel of the source.
fn on_the_device(code: &CodeObject, name: &str, words: &mut [u64]) -> Vec<u64> {
    let n = words.len() / 3;
    let mut out = vec![0x5a5a_5a5a_5a5a_5a5a_u64; n];
    let extent = |start: *const u64, size: usize| Extent {
        start: start as u64,
        end: start as u64 + 8 * size as u64,
    };
    let extents = vec![
        extent(out.as_mut_ptr(), n),
        extent(words.as_mut_ptr(), 3 * n),
    ];
    let mut kernarg = Vec::new();
    for e in &extents {
        kernarg.extend(e.start.to_le_bytes());
    }
    kernarg.extend((n as u32).to_le_bytes());
    let launch = Launch {
        code,
        kernel: code.kernel(name).expect("a kernel of this name"),
        grid: [n.div_ceil(256) as u32, 1, 1],
        remainder: [0; 3],
        block: [256, 1, 1],
        dynamic_lds: 0,
        kernarg: &kernarg,
        memory: &Memory::new(extents),
    };
    // clang's code waits where it must, and computes only with defined values.
    let options = Options {
        checks: Checks {
            uninitialized: true,
            waits: true,
            hazards: true,
            ..Checks::NONE
        },
        ..Options::default()
    };
    // SAFETY: the extents are two vectors that live until the end of this function.
    unsafe { launch.run(&options) }.unwrap_or_else(|e| panic!("{name}: {e}"));
    out
}

#[test]
fn host_and_device_agree() {
    // Neither may fuse products and sums, which would change results.
    const EXACT: &str = "-ffp-contract=off";
    let Some(first) = common::compile(SOURCE, &[EXACT]) else {
        return;
    };
    let program = Path::new(env!("CARGO_TARGET_TMPDIR")).join("differential");
    let source = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("tests/kernels")
        .join(SOURCE);
    let status = Command::new(common::compiler().expect("it compiled for the device"))
        .args(["-x", "c++", "-O2", EXACT, "-Wno-psabi", "-Xclang"])
        .args(["-ffloat16-excess-precision=none", "-o"])
        .args([&program, &source])
        .status();
    assert!(status.is_ok_and(|s| s.success()), "no program for the host");

    let mut state = 1;
    let mut words: Vec<u64> = (0..3 * 1021).map(|_| word(&mut state)).collect();
    let expected = on_the_host(&program, &words);
    assert!(expected.len() > 60, "{} functions", expected.len());
    let mut wrong = Vec::new();
    for level in ["-O3", "-O1", "-O0"] {
        let bytes = match level {
            "-O3" => first.clone(),
            _ => common::compile(SOURCE, &[EXACT, level]).expect("it compiled before"),
        };
        let code = CodeObject::load(&bytes).expect("a code object of clang's");
        for (name, expected) in &expected {
            let found = on_the_device(&code, name, &mut words);
            if let Some(i) = (0..found.len()).find(|i| found[*i] != expected[*i]) {
                let count = (0..found.len())
                    .filter(|i| found[*i] != expected[*i])
                    .count();
                wrong.push(format!(
                    "{level} {name}: {count} differ, the first is {:x?}: {:#x}, host {:#x}",
                    &words[3 * i..3 * i + 3],
                    found[i],
                    expected[i]
                ));
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

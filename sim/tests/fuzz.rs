//! Fuzz tests: the loader, the decoder, the arguments of `wavesim` and the safetensors reader must not panic on damaged
//! or random input. Random instructions must give the same results at every level of host vector extensions.
//!
//! The short run is part of the tests. The long one is
//! `DELTAWAVE_FUZZ_SECONDS=600 cargo test -p deltawave-sim --release --test fuzz -- --ignored --nocapture`;
//! `DELTAWAVE_FUZZ_SEED` repeats a run.

mod common;
mod encodings;

#[path = "../src/bin/wavesim/buffer.rs"]
#[allow(dead_code)]
mod buffer;
#[path = "../src/bin/wavesim/value.rs"]
#[allow(dead_code)]
mod value;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::time::{Duration, Instant};

use deltawave_sim::code_object::CodeObject;
use deltawave_sim::exec::{Env, Flow, Level, MfmaMode};
use deltawave_sim::inst::{Format, Inst, Program};
use deltawave_sim::launch::{Launch, Options};
use deltawave_sim::memory::Memory;
use deltawave_sim::op::Op;
use deltawave_sim::wave::{LANES, Wave};
use deltawave_sim::{decode, disasm, exec};
use encodings::{FORMATS, Random, encode};
use safetensors::tensor::{Dtype, TensorView};

/// Runs `case` with a new seed again and again; a panic is reported with the seed that repeats it.
fn fuzz(name: &str, time: Duration, mut case: impl FnMut(&mut Random)) {
    let fixed = std::env::var("DELTAWAVE_FUZZ_SEED").ok();
    let fixed = fixed.and_then(|s| s.parse::<u64>().ok());
    let clock = || std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    let first = fixed.unwrap_or_else(|| clock().map_or(1, |t| t.as_nanos() as u64));
    let start = Instant::now();
    let mut count = 0u64;
    while start.elapsed() < time {
        let seed = first.wrapping_add(count);
        let result = catch_unwind(AssertUnwindSafe(|| case(&mut Random(seed))));
        assert!(
            result.is_ok(),
            "{name}: panic with DELTAWAVE_FUZZ_SEED={seed}"
        );
        count += 1;
    }
    println!(
        "{name}: {count} cases in {:.1} s",
        start.elapsed().as_secs_f64()
    );
}

/// Damages bytes in one of the ways in which files are damaged.
fn mutate(r: &mut Random, bytes: &mut Vec<u8>, other: &[u8]) {
    const VALUES: [u32; 12] = [
        0,
        1,
        4,
        0x40,
        0x7f,
        0xff,
        0x1000,
        0xffff,
        0x7fff_ffff,
        0x8000_0000,
        0xffff_fff8,
        0xffff_ffff,
    ];
    if bytes.is_empty() {
        return;
    }
    // Headers lie at both ends; what is in between is larger and matters less.
    let at = |r: &mut Random, n: usize| match r.below(3) {
        0 => r.below(n.min(0x400) as u32) as usize,
        1 => n - 1 - r.below(n.div_ceil(4) as u32) as usize,
        _ => r.below(n as u32) as usize,
    };
    for _ in 0..=r.below(6) {
        let n = bytes.len();
        if n == 0 {
            return;
        }
        let i = at(r, n);
        match r.below(8) {
            0 | 1 => bytes[i] ^= 1 << r.below(8),
            2 => bytes[i] = r.next() as u8,
            3 | 4 => {
                let i = i & !3;
                let value = if r.below(4) == 0 {
                    r.next()
                } else {
                    r.pick(&VALUES)
                };
                for (to, from) in bytes[i..].iter_mut().zip(value.to_le_bytes()) {
                    *to = from;
                }
            }
            5 => {
                let (from, length) = (at(r, n), 1 + r.below(64) as usize);
                let part = bytes[from..n.min(from + length)].to_vec();
                let end = n.min(i + part.len());
                bytes[i..end].copy_from_slice(&part[..end - i]);
            }
            6 if !other.is_empty() => {
                let from = r.below(other.len() as u32) as usize;
                let part = &other[from..other.len().min(from + 64)];
                let end = n.min(i + part.len());
                bytes[i..end].copy_from_slice(&part[..end - i]);
            }
            _ if r.below(4) == 0 => bytes.truncate(i),
            _ => {
                let value = r.next() as u8;
                let end = n.min(i + 1 + r.below(16) as usize);
                bytes[i..end].fill(value);
            }
        }
    }
}

/// Loads damaged code objects and uses what loads: listing, handlers, launch checks.
fn loader(time: Duration) {
    let sources = [
        ("launch.hip", &[][..]),
        ("wavesim.hip", &["-g"][..]),
        ("disasm.hip", &["-O0"][..]),
    ];
    let mut corpus = Vec::new();
    for (source, flags) in sources {
        match common::compile(source, flags) {
            Some(bytes) => corpus.push(bytes),
            None => return,
        }
    }
    corpus.push(common::bundle(&corpus[0]));
    let mut loaded = 0u64;
    fuzz("loader", time, |r| {
        let pick = |r: &mut Random| &corpus[r.below(corpus.len() as u32) as usize];
        let mut bytes = pick(r).clone();
        let other = pick(r);
        mutate(r, &mut bytes, other);
        let Ok(code) = CodeObject::load(&bytes) else {
            return;
        };
        loaded += 1;
        let program = code.program();
        for f in code.functions() {
            assert!(f.offset as usize + f.size as usize <= code.text().len());
        }
        for (inst, offset) in program.insts.iter().zip(&program.offsets).step_by(17) {
            assert!(!disasm::text(inst, u64::from(*offset)).is_empty());
        }
        if r.below(8) == 0 {
            assert_eq!(code.prepared(Level::Baseline).len(), program.insts.len());
        }
        let memory = Memory::default();
        for kernel in code.kernels() {
            let size = kernel.explicit_size() as usize;
            let kernarg = vec![0; size.min(1 << 16)];
            let launch = Launch {
                code: &code,
                kernel,
                grid: [1 + r.below(2), 1, 1],
                remainder: [0; 3],
                block: [64, 1, 1],
                dynamic_lds: 0,
                kernarg: &kernarg,
                memory: &memory,
            };
            if launch.check().is_err() || r.below(64) != 0 {
                continue;
            }
            let options = Options {
                threads: Some(1),
                instruction_limit: 2000,
                ..Options::default()
            };
            // SAFETY: there are no allocations but the code object's own.
            let _ = unsafe { launch.run(&options) };
        }
    });
    println!("loader: {loaded} damaged code objects load");
}

fn decoder(time: Duration) {
    fuzz("decoder", time, |r| {
        let (format, opcodes) = FORMATS[r.below(FORMATS.len() as u32) as usize];
        for _ in 0..64 {
            let op = r.below(opcodes);
            let words = match r.below(4) {
                0 => [r.next(), r.next()],
                _ => encode(r, format, op),
            };
            let inst = decode::decode(&words);
            assert!(inst.size == 4 || inst.size == 8);
            assert!(!disasm::text(&inst, 0).is_empty());
            assert_eq!(decode::decode(&words[..1]).size, 4);
            assert!(inst.op != Op::INVALID || !exec::is_implemented(&inst));
        }
        let length = r.below(400) as usize;
        let text: Vec<u8> = (0..length).map(|_| r.next() as u8).collect();
        let program = decode::program(&text, 0);
        assert_eq!(program.insts.len(), program.offsets.len());
    });
}

/// A register of numbers that matter: small ones, floats at the edges, anything.
fn register(r: &mut Random) -> [u32; LANES] {
    const EDGES: [u32; 14] = [
        0,
        0x8000_0000,
        0x3f80_0000,
        0x7f80_0000,
        0xff80_0000,
        0x7fc0_0000,
        0x7f80_0001,
        1,
        0x007f_ffff,
        0x7f7f_ffff,
        0x3c00_7c00,
        0x7e00_8001,
        0xffff_ffff,
        0x7fff_ffff,
    ];
    let class = r.below(5);
    std::array::from_fn(|lane| match class {
        0 => r.below(4096) & !3,
        1 => lane as u32 * 8,
        2 => r.pick(&EDGES),
        3 => 0x3e00_0000 + r.next() % 0x0400_0000,
        _ => r.next(),
    })
}

/// A wave whose registers are drawn from a pool.
fn wave(pool: &[[u32; LANES]], from: u64, mode: u32) -> Wave {
    let mut r = Random(from);
    let mut w = Wave::new(0);
    w.mode = mode;
    for v in w.vgpr.iter_mut() {
        v.0 = pool[r.below(pool.len() as u32) as usize];
    }
    for s in &mut w.sgpr {
        *s = pool[r.below(pool.len() as u32) as usize][r.below(64) as usize];
    }
    w.scc = r.next() & 1 != 0;
    if r.next() & 1 == 0 {
        w.set_exec(u64::MAX);
    }
    w
}

/// Replaces every NaN of a register file: which NaN a matrix product of several gives is left to the host.
fn without_payloads(w: &mut Wave, inst: &Inst) {
    if inst.op.mnemonic().contains("_f64_") {
        let first = w.vreg(inst.vdst) & 1;
        for pair in w.vgpr[first..].chunks_exact_mut(2) {
            for lane in 0..LANES {
                let bits = u64::from(pair[0].0[lane]) | u64::from(pair[1].0[lane]) << 32;
                if f64::from_bits(bits).is_nan() {
                    (pair[0].0[lane], pair[1].0[lane]) = (0, 0x7ff8_0000);
                }
            }
        }
    } else {
        for x in w.vgpr.iter_mut().flat_map(|v| &mut v.0) {
            if f32::from_bits(*x).is_nan() {
                *x = 0x7fc0_0000;
            }
        }
    }
}

/// Executes random instructions on random registers: at every level of the host the same bits and faults.
fn executor(time: Duration) {
    let program = Program::default();
    let memory = Memory::default();
    let levels: Vec<Level> = [Level::Baseline, Level::Avx2, Level::Avx512]
        .into_iter()
        .filter(|l| *l <= Level::detect())
        .collect();
    let (mut executed, mut faults) = (0u64, 0u64);
    fuzz("executor", time, |r| {
        let pool: Vec<[u32; LANES]> = (0..16).map(|_| register(r)).collect();
        for _ in 0..16 {
            let (format, opcodes) = FORMATS[r.below(FORMATS.len() as u32) as usize];
            let op = r.below(opcodes);
            let inst = decode::decode(&encode(r, format, op));
            if !exec::is_implemented(&inst) {
                continue;
            }
            let (from, mode) = (
                u64::from(r.next()),
                r.pick(&[0x3f0, 0x2f0, 0x3c0, 0x3ff, 0x1f0, 0x330]),
            );
            let mfma = if r.below(4) == 0 {
                MfmaMode::Exact
            } else {
                MfmaMode::Fast
            };
            let run = |level: Level| {
                let mut w = wave(&pool, from, mode);
                let mut lds = vec![0x5a; 4096];
                let mut env = Env {
                    mfma,
                    xcc: 3,
                    clock: 12345,
                    ..Env::new(&mut lds, &memory, &program)
                };
                // SAFETY: the host has the level, and there are no allocations.
                let flow = unsafe { exec::prepare(&inst, level)(&mut w, &inst, &mut env) };
                let fault = env.fault.take();
                if inst.format == Format::Mai {
                    without_payloads(&mut w, &inst);
                }
                (flow, fault, w, lds)
            };
            let (flow, fault, w, lds) = run(levels[0]);
            executed += 1;
            faults += u64::from(flow == Flow::Fault);
            for &level in &levels[1..] {
                let (other_flow, other_fault, other, other_lds) = run(level);
                let text = || format!("{} at {level:?}, {inst:x?}", disasm::text(&inst, 0));
                assert!(flow == other_flow && fault == other_fault, "{}", text());
                if flow == Flow::Fault {
                    continue;
                }
                assert!(
                    w.sgpr == other.sgpr && w.scc == other.scc && w.pc == other.pc,
                    "{}",
                    text()
                );
                assert!(w.mode == other.mode && lds == other_lds, "{}", text());
                for (i, (a, b)) in w.vgpr.iter().zip(other.vgpr.iter()).enumerate() {
                    assert!(a.0 == b.0, "v{i} of {}: {:x?}, {:x?}", text(), a.0, b.0);
                }
            }
        }
    });
    println!("executor: {executed} instructions, {faults} of them faults");
}

fn arguments(time: Duration) {
    let seeds = [
        "i32:-5",
        "u64:0xffffffffffffffff",
        "f32:1.5e-3",
        "bf16:nan",
        "in:a.safetensors#b",
        "zeros:f32[16,64]->x",
        "inout:a->b",
        "out:0x1000->-",
        "null",
        "struct(struct(i8:1),in:x,hex:00ff)",
        "hex:0102",
        "zeros:f64[4294967295,4294967295]",
    ];
    const PIECES: [&str; 16] = [
        "struct(",
        ")",
        ",",
        "->",
        ":",
        "[",
        "]",
        "#",
        ".safetensors",
        "-",
        "0x",
        "é",
        "9999999999999999999999",
        "f32",
        " ",
        "hex:",
    ];
    fuzz("arguments", time, |r| {
        let mut text: String = seeds[r.below(seeds.len() as u32) as usize].into();
        for _ in 0..r.below(8) {
            let mut at = r.below(text.len() as u32 + 1) as usize;
            while !text.is_char_boundary(at) {
                at -= 1;
            }
            match r.below(3) {
                0 => text.insert_str(at, PIECES[r.below(16) as usize]),
                1 => text.insert_str(at, seeds[r.below(seeds.len() as u32) as usize]),
                _ => text.truncate(at),
            }
        }
        let mut parser = value::Parser::default();
        if let Ok(value) = parser.value(&text) {
            let mut bytes = Vec::new();
            value.lower(&vec![0; parser.buffers.len()], &mut bytes);
            assert!(value.align() <= 8 && !value.describe().is_empty());
            let _ = buffer::check_outputs(&parser.buffers);
        }
    });
}

fn tensors(time: Duration) {
    let data: Vec<u8> = (0..=255).collect();
    let view = |dtype, shape: &[usize], bytes| {
        TensorView::new(dtype, shape.to_vec(), &data[..bytes]).expect("sizes agree")
    };
    let tensors = [
        ("q", view(Dtype::BF16, &[2, 3, 4], 48)),
        ("state", view(Dtype::F32, &[4, 4], 64)),
        ("empty", view(Dtype::I64, &[0, 7], 0)),
    ];
    let valid = safetensors::serialize(tensors, None).expect("valid");
    let path = Path::new("x.safetensors");
    assert!(buffer::tensor(path, &valid, "q").is_ok());
    fuzz("safetensors", time, |r| {
        let mut bytes = valid.clone();
        mutate(r, &mut bytes, &[]);
        for name in ["q", "state", "empty"] {
            match buffer::tensor(path, &bytes, name) {
                Ok(view) => assert!(view.data().len() <= bytes.len()),
                Err(e) => assert!(!e.to_string().is_empty()),
            }
        }
    });
}

/// Every target, for a share of the time.
fn all(seconds: f64) {
    let share = |part: f64| Duration::from_secs_f64(seconds * part);
    loader(share(0.4));
    decoder(share(0.2));
    executor(share(0.2));
    arguments(share(0.1));
    tensors(share(0.1));
}

#[test]
fn short_fuzz() {
    all(2.0);
}

#[test]
#[ignore = "takes as long as DELTAWAVE_FUZZ_SECONDS says, 20 s if it says nothing"]
fn fuzz_for_a_while() {
    let seconds = std::env::var("DELTAWAVE_FUZZ_SECONDS").ok();
    all(seconds.and_then(|s| s.parse().ok()).unwrap_or(20.0));
}

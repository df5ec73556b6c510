//! Compares clang's code for gfx942's own operations with arithmetic on the host: exchanges between lanes, DPP, SDWA,
//! buffers, atomics, and every MFMA shape.

mod common;

use std::sync::OnceLock;

use deltawave_sim::code_object::CodeObject;
use deltawave_sim::exec::MfmaMode;
use deltawave_sim::launch::{Launch, Options};
use deltawave_sim::memory::{Extent, Memory};
use half::{bf16, f16};

const SOURCE: &str = "machine.hip";

/// The kernels of the source as clang compiles them, optimised and not.
fn code() -> Option<&'static [CodeObject]> {
    static CODE: OnceLock<Vec<CodeObject>> = OnceLock::new();
    let code = CODE.get_or_init(|| {
        let levels = ["-O3", "-O1"].into_iter();
        let bytes = levels.filter_map(|level| common::compile(SOURCE, &[level]));
        bytes
            .map(|b| CodeObject::load(&b).expect("a code object of clang's"))
            .collect()
    });
    (!code.is_empty()).then_some(&code[..])
}

/// Runs one workgroup of a kernel whose arguments are all buffers.
fn run(code: &CodeObject, name: &str, threads: u32, mfma: MfmaMode, buffers: &mut [Vec<u8>]) {
    let extents: Vec<Extent> = buffers
        .iter_mut()
        .map(|b| Extent {
            start: b.as_mut_ptr() as u64,
            end: b.as_mut_ptr() as u64 + b.len() as u64,
        })
        .collect();
    let kernarg: Vec<u8> = extents.iter().flat_map(|e| e.start.to_le_bytes()).collect();
    let launch = Launch {
        code,
        kernel: code
            .kernel(name)
            .unwrap_or_else(|| panic!("no kernel {name}")),
        grid: [1, 1, 1],
        remainder: [0; 3],
        block: [threads, 1, 1],
        dynamic_lds: 0,
        kernarg: &kernarg,
        memory: &Memory::new(extents),
    };
    let options = Options {
        mfma,
        ..deltawave_sim::hip::options_from_environment()
    };
    // SAFETY: the extents are vectors that live until the end of this function.
    unsafe { launch.run(&options) }.unwrap_or_else(|e| panic!("{name}: {e}"));
}

/// SplitMix64.
fn random(state: &mut u64) -> u64 {
    *state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let mut z = *state;
    z = (z ^ z >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ z >> 31
}

fn bytes_of(words: &[u32]) -> Vec<u8> {
    words.iter().flat_map(|w| w.to_le_bytes()).collect()
}

fn words_of(bytes: &[u8]) -> Vec<u32> {
    let words = bytes.chunks_exact(4);
    words
        .map(|b| u32::from_le_bytes(b.try_into().expect("four bytes")))
        .collect()
}

/// Compares a kernel of one wave with a function of (lane, all x, all y).
fn lanes(name: &str, expected: impl Fn(usize, &[u32], &[u32]) -> u32) {
    let Some(code) = code() else { return };
    let mut state = 7;
    for round in 0..8 {
        let words: Vec<u32> = (0..128).map(|_| random(&mut state) as u32).collect();
        let (x, y) = words.split_at(64);
        for code in code {
            let mut buffers = [vec![0xee; 256], bytes_of(&words)];
            run(code, name, 64, MfmaMode::Fast, &mut buffers);
            for (l, found) in words_of(&buffers[0]).into_iter().enumerate() {
                let e = expected(l, x, y);
                assert_eq!(
                    found, e,
                    "{name}, round {round}, lane {l}: {found:#x} {e:#x}"
                );
            }
        }
    }
}

#[test]
fn lanes_exchange_what_they_should() {
    lanes("bpermute", |l, x, y| x[(y[l] & 63) as usize]);
    // Lane l sends to 5 l mod 64; 5 * 13 = 65.
    lanes("permute", |l, x, _| x[(l * 13) & 63]);
    lanes("swizzle_xor", |l, x, _| x[(l & 31 ^ 5) | l & 32]);
    // 0x1b: 3, 2, 1, 0.
    lanes("swizzle_quad", |l, x, _| x[l ^ 3]);
    lanes("readlane", |_, x, y| {
        x[17].wrapping_add(x[(y[0] & 63) as usize])
    });
    lanes("writelane", |l, x, _| if l == 9 { 1234 } else { x[l] });
    let ballot = |x: &[u32]| (0..64).fold(0, |m, i| m | u64::from(x[i] & 1) << i);
    lanes("ballot_low", |_, x, _| ballot(x) as u32);
    lanes("ballot_high", |_, x, _| (ballot(x) >> 32) as u32);
    lanes("mbcnt", |l, x, _| {
        let below = (1u64 << l) - 1;
        let low = 0x0ff0_f0f0u32 & below as u32;
        let high = (below >> 32) as u32;
        x[l].wrapping_add(low.count_ones() + high.count_ones())
    });
    let byte = |x: u32, y: u32, s: u32| match s {
        0..4 => y >> (8 * s) & 255,
        4..8 => x >> (8 * (s - 4)) & 255,
        _ => 0,
    };
    lanes("perm", |l, x, y| {
        let selectors = [5, 1, 7, 12];
        (0..4).fold(0, |r, i| r | byte(x[l], y[l], selectors[i]) << (8 * i))
    });
    let wide = |l: usize, x: &[u32], y: &[u32]| u64::from(x[l]) << 32 | u64::from(y[l]);
    lanes("alignbyte", |l, x, y| (wide(l, x, y) >> 24) as u32);
    lanes("alignbit", |l, x, y| (wide(l, x, y) >> 13) as u32);
    lanes("ubfe", |l, x, _| x[l] >> 5 & 0x7ff);
    lanes("sbfe", |l, x, _| ((x[l] << 16) as i32 >> 23) as u32);
    lanes("sad", |l, x, y| {
        let pairs = x[l].to_le_bytes().into_iter().zip(y[l].to_le_bytes());
        100 + pairs.map(|(a, b)| u32::from(a.abs_diff(b))).sum::<u32>()
    });
    lanes(
        "first_of_divergent",
        |l, x, y| if l % 3 == 1 { x[1] } else { y[l] },
    );
}

#[test]
fn dpp_moves_within_rows_and_between() {
    let from = |name: &str, source: fn(usize) -> Option<usize>| {
        lanes(&format!("dpp_{name}"), |l, x, y| {
            source(l).map_or(y[l], |s| x[s])
        });
    };
    let zero = |name: &str, source: fn(usize) -> Option<usize>| {
        lanes(&format!("dpp_{name}"), |l, x, _| {
            source(l).map_or(0, |s| x[s])
        });
    };
    // 0x6c: 0, 3, 2, 1.
    from("quad_perm", |l| Some(l & !3 | [0, 3, 2, 1][l & 3]));
    from("row_shl_1", |l| (l % 16 < 15).then_some(l + 1));
    zero("row_shl_15", |l| (l % 16 == 0).then_some(l + 15));
    from("row_shr_1", |l| (l % 16 > 0).then(|| l - 1));
    zero("row_shr_8", |l| (l % 16 > 7).then(|| l - 8));
    from("row_ror_3", |l| Some(l & !15 | (l + 13) & 15));
    from("wave_shl", |l| (l < 63).then_some(l + 1));
    from("wave_rol", |l| Some((l + 1) & 63));
    zero("wave_shr", |l| (l > 0).then(|| l - 1));
    from("wave_ror", |l| Some((l + 63) & 63));
    from("row_mirror", |l| Some(l ^ 15));
    from("row_half_mirror", |l| Some(l ^ 7));
    from("row_bcast_15", |l| (l / 16 % 2 == 1).then(|| (l & !15) - 1));
    from("row_bcast_31", |l| (l > 31).then_some(31));
    from("row_newbcast_6", |l| Some(l & !15 | 6));
    from("some_rows_and_banks", |l| {
        let on = 0x5 >> (l / 16) & 1 == 1 && 0x6 >> (l % 16 / 4) & 1 == 1;
        on.then_some(l & !15 | (l + 15) & 15)
    });
    // A lane that is off gives nothing.
    lanes("dpp_divergent", |l, x, y| match l & 4 {
        0 => l as u32,
        _ if l & 2 != 0 => x[l - 2],
        _ => y[l],
    });
}

#[test]
fn sdwa_takes_parts_and_writes_parts() {
    let add = u32::wrapping_add;
    lanes("sdwa_bytes", |l, x, y| {
        let sum = add(x[l] >> 16 & 255, y[l] >> 24) & 255;
        x[l].wrapping_mul(3) & !0xff00 | sum << 8
    });
    lanes("sdwa_pad", |l, x, y| add(x[l] >> 16, y[l] & 255) << 24);
    lanes("sdwa_sext", |l, x, y| {
        i32::from(add(x[l] & 0xffff, y[l] >> 16) as i16) as u32
    });
    lanes("sdwa_word", |l, x, y| {
        let difference = (x[l] >> 16).wrapping_sub(y[l]) & 0xffff;
        x[l].wrapping_mul(3) & 0xffff | difference << 16
    });
    lanes("sdwa_signed", |l, x, y| {
        let byte = i32::from((x[l] >> 8) as i8) as u32;
        add(byte, i32::from((y[l] >> 16) as i16) as u32)
    });
}

#[test]
fn buffers_end_where_their_descriptor_says() {
    let Some(code) = code() else { return };
    for (suffix, size) in [
        ("i8", 1),
        ("i16", 2),
        ("i32", 4),
        ("v2i32", 8),
        ("v4i32", 16),
    ] {
        for code in code {
            let input: Vec<u8> = (0..512).map(|i| (i * 7 + i / 256) as u8).collect();
            let name = format!("buffer_copy_{suffix}");
            let mut buffers = [vec![0xee; 512], input.clone()];
            run(code, &name, 64, MfmaMode::Fast, &mut buffers);
            let mut expected = vec![0xee; 512];
            // Raw buffers check each dword of an access by itself.
            let part = size.min(4);
            for at in (0..64 * size).step_by(part) {
                if at + 8 + part <= 256 {
                    let to = &mut expected[at + 8..at + 8 + part];
                    // Loads from outside give 0.
                    if at + 16 + part <= 256 {
                        to.copy_from_slice(&input[at + 16..at + 16 + part]);
                    } else {
                        to.fill(0);
                    }
                }
            }
            assert_eq!(buffers[0], expected, "{name}");

            let name = format!("buffer_records_{suffix}");
            let mut buffers = [vec![0xee; 512], input.clone()];
            run(code, &name, 64, MfmaMode::Fast, &mut buffers);
            let mut expected = vec![0xee; 512];
            for lane in 0..10 {
                let (to, from) = (20 * lane + 4, (15 - lane) * 20 + 4);
                if 15 - lane < 10 {
                    expected[to..to + size].copy_from_slice(&input[from..from + size]);
                } else {
                    expected[to..to + size].fill(0);
                }
            }
            assert_eq!(buffers[0], expected, "{name}");
        }
    }
}

/// 256 operands and 16 cells of a type, and what the cells hold after all operations, in any order.
fn cells<T: Copy, const SIZE: usize>(
    name: &str,
    start: impl Fn(usize) -> T,
    operand: impl Fn(usize) -> T,
    bytes: impl Fn(T) -> [u8; SIZE],
    operation: impl Fn(T, T) -> T,
) {
    let Some(code) = code() else { return };
    let all = |n, f: &dyn Fn(usize) -> T| (0..n).flat_map(|i| bytes(f(i))).collect::<Vec<u8>>();
    let in_order = |i| {
        (i..256)
            .step_by(16)
            .fold(start(i), |c, t| operation(c, operand(t)))
    };
    let expected = all(16, &in_order);
    for code in code {
        for name in [name.to_owned(), format!("lds_{name}")] {
            if code.kernel(&name).is_none() {
                continue;
            }
            let mut buffers = [all(16, &start), all(256, &operand)];
            run(code, &name, 256, MfmaMode::Fast, &mut buffers);
            assert_eq!(buffers[0], expected, "{name}");
        }
    }
}

#[test]
fn atomics_leave_what_their_operations_leave() {
    let hash = |i: usize| {
        let mut state = i as u64;
        random(&mut state)
    };
    macro_rules! integers {
        ($unsigned:ident, $signed:ident) => {
            let u = |i| hash(i) as $unsigned;
            let s = |i| hash(i) as $signed;
            let start = |i| hash(i + 1000) as $unsigned;
            let signed_start = |i| hash(i + 1000) as $signed;
            let name = |op: &str| format!("{op}_{}", stringify!($unsigned));
            let signed = |op: &str| format!("{op}_{}", stringify!($signed));
            let bytes = $unsigned::to_le_bytes;
            cells(&name("add"), start, u, bytes, $unsigned::wrapping_add);
            cells(&name("and"), start, u, bytes, |a, b| a & b);
            cells(&name("or"), start, u, bytes, |a, b| a | b);
            cells(&name("xor"), start, u, bytes, |a, b| a ^ b);
            cells(&name("min"), start, u, bytes, $unsigned::min);
            cells(&name("max"), start, u, bytes, $unsigned::max);
            cells(
                &signed("min"),
                signed_start,
                s,
                $signed::to_le_bytes,
                $signed::min,
            );
            cells(
                &signed("max"),
                signed_start,
                s,
                $signed::to_le_bytes,
                $signed::max,
            );
            cells(&name("cas"), start, u, bytes, |a, b| {
                a.wrapping_add(b.wrapping_mul(3))
            });
        };
    }
    integers!(u32, i32);
    integers!(u64, i64);
    cells(
        "inc_u32",
        |i| i as u32,
        |_| 0,
        u32::to_le_bytes,
        |a, _| {
            if a >= 9 { 0 } else { a + 1 }
        },
    );
    cells(
        "dec_u32",
        |i| i as u32,
        |_| 0,
        u32::to_le_bytes,
        |a, _| {
            if a == 0 || a > 9 { 9 } else { a - 1 }
        },
    );
    // Small integers: sums are exact in any order.
    let small = |i: usize| (hash(i) % 17) as f32 - 8.0;
    let large = |i: usize| f64::from(small(i)) * 1e9;
    cells("add_f32", small, small, f32::to_le_bytes, |a, b| a + b);
    cells("add_f64", large, large, f64::to_le_bytes, |a, b| a + b);
    cells("min_f64", large, large, f64::to_le_bytes, f64::min);
    cells("max_f64", large, large, f64::to_le_bytes, f64::max);
    let pair = |i: usize| [small(i), small(i + 333)];
    let sum = |a: [f32; 2], b: [f32; 2]| [a[0] + b[0], a[1] + b[1]];
    let halves = |low: u16, high: u16| (u32::from(low) | u32::from(high) << 16).to_le_bytes();
    let f16s = |[a, b]: [f32; 2]| halves(f16::from_f32(a).to_bits(), f16::from_f32(b).to_bits());
    let bf16s = |[a, b]: [f32; 2]| halves(bf16::from_f32(a).to_bits(), bf16::from_f32(b).to_bits());
    cells("add_pk_f16", pair, pair, f16s, sum);
    cells("add_pk_bf16", pair, pair, bf16s, sum);
    cells("add_flat_pk_bf16", pair, pair, bf16s, sum);
}

#[test]
fn atomics_return_what_was_there() {
    let Some(code) = code() else { return };
    for code in code {
        for (name, first) in [("tickets", 0), ("exchanges", 0)] {
            let mut buffers = [vec![0; 4 * 257], bytes_of(&[first])];
            run(code, name, 256, MfmaMode::Fast, &mut buffers);
            let seen = words_of(&buffers[0]);
            let last = words_of(&buffers[1])[0] as usize;
            // All of 0..=256 but the one that is still there.
            for (i, s) in seen.iter().enumerate() {
                assert_eq!(*s, u32::from(i != last), "{name}: {i}");
            }
        }
    }
}

/// A format of matrix elements: bits of a small number, or of several that are then as exact.
#[derive(Clone, Copy, PartialEq)]
enum Element {
    F64,
    F32,
    F16,
    Bf16,
    I8,
    Fp8,
    Bf8,
}
use Element::*;

impl Element {
    fn size(self) -> usize {
        match self {
            F64 => 8,
            F32 => 4,
            F16 | Bf16 => 2,
            I8 | Fp8 | Bf8 => 1,
        }
    }

    fn encode(self, x: f64) -> Vec<u8> {
        match self {
            F64 => x.to_le_bytes().into(),
            F32 => (x as f32).to_le_bytes().into(),
            F16 => f16::from_f64(x).to_le_bytes().into(),
            Bf16 => bf16::from_f64(x).to_le_bytes().into(),
            I8 => vec![x as i8 as u8],
            Fp8 => vec![fnuz(x, 3, 8)],
            Bf8 => vec![fnuz(x, 2, 16)],
        }
    }

    /// A random element whose products, summed, are exact in an f32.
    fn random(self, state: &mut u64) -> f64 {
        let r = random(state);
        let sign = if r & 1 == 0 { 1.0 } else { -1.0 };
        match self {
            I8 => f64::from((r >> 8) as i8),
            Fp8 => sign * (r >> 8 & 15) as f64 * 0.125,
            Bf8 => sign * [0.0, 0.25, 0.5, 1.0, 1.25, 1.5, 1.75, 3.5][(r >> 8 & 7) as usize],
            _ => sign * (r >> 8 & 63) as f64 * 0.25,
        }
    }
}

/// An 8-bit float whose sole zero is positive and whose 0x80 is NaN: `mantissa` bits, exponents from 1 - `bias` on.
fn fnuz(x: f64, mantissa: i32, bias: i32) -> u8 {
    if x == 0.0 {
        return 0;
    }
    let sign = if x < 0.0 { 0x80 } else { 0 };
    let mut exponent = x.abs().log2().floor() as i32;
    let lowest = 1 - bias;
    let normal = exponent >= lowest;
    exponent = exponent.max(lowest);
    let scaled = x.abs() / f64::from(exponent - mantissa).exp2();
    assert_eq!(scaled.fract(), 0.0, "{x} is representable");
    let fraction = scaled as u8 & ((1 << mantissa) - 1);
    let field = if normal { (exponent + bias) as u8 } else { 0 };
    sign | field << mantissa | fraction
}

/// A shape: rows, columns, contraction, blocks, element formats of A and B.
struct Shape {
    name: &'static str,
    m: usize,
    k: usize,
    blocks: usize,
    a: Element,
    b: Element,
}

impl Shape {
    /// Block, row and contracted index of element `e` of a lane of A; of B the same with columns.
    fn input(&self, lane: usize, e: usize) -> (usize, usize, usize) {
        if self.m == 4 && self.a == F64 {
            return (lane / 4 % 4, lane % 4, lane / 16);
        }
        let per_lane = self.m * self.k * self.blocks / 64;
        let group = lane / self.m;
        let groups = 64 / self.m / self.blocks;
        (group / groups, lane % self.m, group % groups * per_lane + e)
    }

    /// Block, row and column of register `r` of a lane of D.
    fn output(&self, lane: usize, r: usize) -> (usize, usize, usize) {
        match (self.m, self.a) {
            (4, F64) => (lane / 4 % 4, lane / 16, lane % 4),
            (16, F64) => (0, 4 * r + lane / 16, lane % 16),
            (4, _) => (lane / 4, r, lane % 4),
            (16, _) => (r / 4, lane / 16 * 4 + r % 4, lane % 16),
            _ => (r / 16, r % 16 / 4 * 8 + lane / 32 * 4 + r % 4, lane % 32),
        }
    }
}

/// Runs an MFMA kernel on random matrices. `source` says which lane's A and B a lane uses in place of its own.
fn check_mfma(shape: &Shape, tag: &str, a_block: fn(usize) -> usize, b_lane: fn(usize) -> usize) {
    let Some(code) = code() else { return };
    let s = shape;
    let per_lane = s.m * s.k * s.blocks / 64;
    let registers = s.m * s.m * s.blocks / 64;
    let mut state = s.name.len() as u64;
    let elements = |e: Element, state: &mut u64| -> Vec<f64> {
        (0..64 * per_lane).map(|_| e.random(state)).collect()
    };
    let (a, b) = (elements(s.a, &mut state), elements(s.b, &mut state));
    let c: Vec<f64> = (0..64 * registers)
        .map(|_| (random(&mut state) % 1000) as f64 - 500.0)
        .collect();
    let index = |block, row, k| (block * s.m + row) * s.k + k;
    let (mut left, mut right) = (
        vec![0.0; s.blocks * s.m * s.k],
        vec![0.0; s.blocks * s.m * s.k],
    );
    for lane in 0..64 {
        for e in 0..per_lane {
            let (block, row, k) = s.input(lane, e);
            left[index(block, row, k)] = a[lane * per_lane + e];
            right[index(block, row, k)] = b[b_lane(lane) * per_lane + e];
        }
    }
    let accumulator = |x: f64| -> Vec<u8> {
        match s.a {
            F64 => x.to_le_bytes().into(),
            I8 => (x as i32).to_le_bytes().into(),
            _ => (x as f32).to_le_bytes().into(),
        }
    };
    let mut expected = Vec::new();
    for lane in 0..64 {
        for r in 0..registers {
            let (block, row, column) = s.output(lane, r);
            let product = |k| left[index(a_block(block), row, k)] * right[index(block, column, k)];
            let sum = c[lane * registers + r] + (0..s.k).map(product).sum::<f64>();
            expected.extend(accumulator(sum));
        }
    }
    let name = format!("mfma_{}{tag}", s.name);
    let all = |values: &[f64], encode: &dyn Fn(f64) -> Vec<u8>| -> Vec<u8> {
        values.iter().flat_map(|x| encode(*x)).collect()
    };
    for code in code {
        for mode in [MfmaMode::Fast, MfmaMode::Exact] {
            let mut buffers = [
                vec![0xee; expected.len()],
                all(&a, &|x| s.a.encode(x)),
                all(&b, &|x| s.b.encode(x)),
                all(&c, &accumulator),
            ];
            assert_eq!(buffers[1].len(), 64 * per_lane * s.a.size());
            run(code, &name, 64, mode, &mut buffers);
            assert_eq!(buffers[0], expected, "{name}, {mode:?}");
        }
    }
}

#[rustfmt::skip]
const SHAPES: &[Shape] = &[
    Shape { name: "f32_32x32x1f32", m: 32, k: 1, blocks: 2, a: F32, b: F32 },
    Shape { name: "f32_16x16x1f32", m: 16, k: 1, blocks: 4, a: F32, b: F32 },
    Shape { name: "f32_4x4x1f32", m: 4, k: 1, blocks: 16, a: F32, b: F32 },
    Shape { name: "f32_32x32x2f32", m: 32, k: 2, blocks: 1, a: F32, b: F32 },
    Shape { name: "f32_16x16x4f32", m: 16, k: 4, blocks: 1, a: F32, b: F32 },
    Shape { name: "f32_32x32x4f16", m: 32, k: 4, blocks: 2, a: F16, b: F16 },
    Shape { name: "f32_16x16x4f16", m: 16, k: 4, blocks: 4, a: F16, b: F16 },
    Shape { name: "f32_4x4x4f16", m: 4, k: 4, blocks: 16, a: F16, b: F16 },
    Shape { name: "f32_32x32x8f16", m: 32, k: 8, blocks: 1, a: F16, b: F16 },
    Shape { name: "f32_16x16x16f16", m: 16, k: 16, blocks: 1, a: F16, b: F16 },
    Shape { name: "f32_32x32x4bf16_1k", m: 32, k: 4, blocks: 2, a: Bf16, b: Bf16 },
    Shape { name: "f32_16x16x4bf16_1k", m: 16, k: 4, blocks: 4, a: Bf16, b: Bf16 },
    Shape { name: "f32_4x4x4bf16_1k", m: 4, k: 4, blocks: 16, a: Bf16, b: Bf16 },
    Shape { name: "f32_32x32x8bf16_1k", m: 32, k: 8, blocks: 1, a: Bf16, b: Bf16 },
    Shape { name: "f32_16x16x16bf16_1k", m: 16, k: 16, blocks: 1, a: Bf16, b: Bf16 },
    Shape { name: "i32_32x32x4i8", m: 32, k: 4, blocks: 2, a: I8, b: I8 },
    Shape { name: "i32_16x16x4i8", m: 16, k: 4, blocks: 4, a: I8, b: I8 },
    Shape { name: "i32_4x4x4i8", m: 4, k: 4, blocks: 16, a: I8, b: I8 },
    Shape { name: "i32_32x32x16_i8", m: 32, k: 16, blocks: 1, a: I8, b: I8 },
    Shape { name: "i32_16x16x32_i8", m: 16, k: 32, blocks: 1, a: I8, b: I8 },
    Shape { name: "f64_16x16x4f64", m: 16, k: 4, blocks: 1, a: F64, b: F64 },
    Shape { name: "f64_4x4x4f64", m: 4, k: 4, blocks: 4, a: F64, b: F64 },
    Shape { name: "f32_16x16x8_xf32", m: 16, k: 8, blocks: 1, a: F32, b: F32 },
    Shape { name: "f32_32x32x4_xf32", m: 32, k: 4, blocks: 1, a: F32, b: F32 },
    Shape { name: "f32_16x16x32_fp8_fp8", m: 16, k: 32, blocks: 1, a: Fp8, b: Fp8 },
    Shape { name: "f32_16x16x32_fp8_bf8", m: 16, k: 32, blocks: 1, a: Fp8, b: Bf8 },
    Shape { name: "f32_16x16x32_bf8_fp8", m: 16, k: 32, blocks: 1, a: Bf8, b: Fp8 },
    Shape { name: "f32_16x16x32_bf8_bf8", m: 16, k: 32, blocks: 1, a: Bf8, b: Bf8 },
    Shape { name: "f32_32x32x16_fp8_fp8", m: 32, k: 16, blocks: 1, a: Fp8, b: Fp8 },
    Shape { name: "f32_32x32x16_fp8_bf8", m: 32, k: 16, blocks: 1, a: Fp8, b: Bf8 },
    Shape { name: "f32_32x32x16_bf8_fp8", m: 32, k: 16, blocks: 1, a: Bf8, b: Fp8 },
    Shape { name: "f32_32x32x16_bf8_bf8", m: 32, k: 16, blocks: 1, a: Bf8, b: Bf8 },
];

fn shape(name: &str) -> &'static Shape {
    let found = SHAPES.iter().find(|s| s.name == name);
    found.expect("a shape of this name")
}

#[test]
fn matrix_products_of_every_shape() {
    for shape in SHAPES {
        check_mfma(shape, "", |block| block, |lane| lane);
    }
}

#[test]
fn matrix_operands_can_be_broadcast() {
    let same = |i| i;
    check_mfma(
        shape("f32_4x4x1f32"),
        "_broadcast",
        |block| block & !3 | 3,
        same,
    );
    check_mfma(
        shape("f32_16x16x4f16"),
        "_broadcast",
        |block| block | 1,
        same,
    );
    check_mfma(shape("f32_32x32x1f32"), "_low_lanes", same, |lane| {
        lane & 31
    });
    check_mfma(shape("f32_32x32x1f32"), "_high_lanes", same, |lane| {
        lane | 32
    });
}

//! Proves [`Uses`] by execution. Random encodings of every opcode are executed twice, the second time with everything
//! changed that is not declared as read.

use super::*;
use crate::exec::{self, Env, Flow, Level};
use crate::inst::Program;
use crate::memory::{Extent, Memory};
use crate::wave::LANES;
use std::collections::BTreeMap;

#[path = "../../tests/encodings/mod.rs"]
mod encodings;
use encodings::{FORMATS, Random, encode};

/// Encodings of each opcode.
const VARIANTS: usize = 24;
const ACCUM_OFFSET: u16 = 256;
const BYTES: usize = 1 << 15;

/// Everything that an instruction can change.
#[derive(Clone, PartialEq)]
struct State {
    vgpr: Vec<[u32; LANES]>,
    sgpr: [u32; 128],
    scc: bool,
    mode: u32,
    lds: Vec<u32>,
    memory: Vec<u32>,
}

impl State {
    fn random(r: &mut Random) -> State {
        let kind = r.below(3);
        let value = |r: &mut Random| match kind {
            0 => r.next(),
            1 => r.below(64),
            _ => r.pick(&[
                0,
                1,
                0x3f80_0000,
                0xbf80_0000,
                0x4049_0fdb,
                0x3c00_3c00,
                0x7fc0_0000,
                !0,
            ]),
        };
        let random = |n: usize, r: &mut Random| (0..n).map(|_| value(r)).collect::<Vec<_>>();
        State {
            vgpr: (0..512)
                .map(|_| random(LANES, r).try_into().expect("64 lanes"))
                .collect(),
            sgpr: random(128, r).try_into().expect("128 registers"),
            scc: r.next() & 1 != 0,
            mode: r.pick(&[0x3f0, 0x2f0, 0x3c0]),
            lds: random(BYTES / 4, r),
            memory: random(BYTES / 4, r),
        }
    }

    /// Sets registers so that an instruction's addresses lie in memory, and counts and indices are small.
    fn aim(&mut self, inst: &Inst, uses: &Uses, memory: u64) {
        self.sgpr[usize::from(M0)] &= if inst.format == Format::Ds {
            0xf8
        } else {
            0xf0ff
        };
        if inst.format == Format::Scratch || inst.format == Format::Ds {
            for u in uses.reads().iter().filter(|u| u.role == Role::Address) {
                self.small(u, 1 << 6);
            }
            return;
        }
        let mut base = false;
        for u in uses
            .reads()
            .iter()
            .filter(|u| u.role == Role::Address)
            .rev()
        {
            let pointer = u.count >= 2 && !(inst.format == Format::Mubuf && u.first >= VGPR0);
            if !pointer || base {
                self.small(u, 1 << 8);
                continue;
            }
            base = true;
            let at = memory + 4096;
            match u.vector(ACCUM_OFFSET) {
                Some(v) if v + 1 < 512 => {
                    for lane in 0..LANES {
                        let a = at + u64::from(self.vgpr[v][lane] & 0xff8);
                        self.vgpr[v][lane] = a as u32;
                        self.vgpr[v + 1][lane] = (a >> 32) as u32;
                    }
                }
                Some(_) => {}
                None => {
                    let s = usize::from(u.first) & 127;
                    self.sgpr[s] = at as u32;
                    self.sgpr[(s + 1) & 127] = (at >> 32) as u32;
                    if u.count == 4 {
                        self.sgpr[(s + 2) & 127] &= 0xfff;
                        let components = inst.op.mnemonic().rsplit('_').next().map_or(1, str::len);
                        let format = [4, 11, 13, 14][(components - 1).min(3)];
                        self.sgpr[(s + 3) & 127] = format << 15 | 4 << 12;
                    }
                }
            }
        }
    }

    fn small(&mut self, u: &Use, below: u32) {
        for k in 0..usize::from(u.count) {
            match u.vector(ACCUM_OFFSET) {
                Some(v) => self.vgpr[(v + k) & 511]
                    .iter_mut()
                    .for_each(|x| *x = (*x % below) & !7),
                None => {
                    let s = &mut self.sgpr[(usize::from(u.first) + k) & 127];
                    *s = (*s % below) & !7;
                }
            }
        }
    }

    /// Copies the declared registers from `other`.
    fn take(&mut self, other: &State, uses: &[Use]) {
        for u in uses {
            for k in 0..usize::from(u.count) {
                match u.vector(ACCUM_OFFSET) {
                    Some(v) => self.vgpr[(v + k) & 511] = other.vgpr[(v + k) & 511],
                    None if u.first == SCC => self.scc = other.scc,
                    None => {
                        let s = (usize::from(u.first) + k) & 127;
                        self.sgpr[s] = other.sgpr[s];
                    }
                }
            }
        }
    }

    fn run(&self, inst: &Inst, buffer: &mut [u32]) -> (Flow, Option<String>, u32, State) {
        let mut w = Wave::new(0);
        w.accum_offset = ACCUM_OFFSET;
        for (to, from) in w.vgpr.iter_mut().zip(&self.vgpr) {
            to.0 = *from;
        }
        (w.sgpr, w.scc, w.mode) = (self.sgpr, self.scc, self.mode);
        buffer.copy_from_slice(&self.memory);
        let start = buffer.as_mut_ptr() as u64;
        let memory = Memory::new(vec![Extent {
            start,
            end: start + BYTES as u64,
        }]);
        (w.scratch, w.scratch_stride) = (start, (BYTES / LANES) as u32);
        let mut lds: Vec<u8> = self.lds.iter().flat_map(|x| x.to_le_bytes()).collect();
        let program = Program::default();
        let mut env = Env {
            xcc: 3,
            clock: 12345,
            ..Env::new(&mut lds, &memory, &program)
        };
        // SAFETY: every host has the level; the extent is `buffer`.
        let flow = unsafe { exec::prepare(inst, Level::Baseline)(&mut w, inst, &mut env) };
        let fault = env.fault.take().map(|f| f.to_string());
        let state = State {
            vgpr: w.vgpr.iter().map(|v| v.0).collect(),
            sgpr: w.sgpr,
            scc: w.scc,
            mode: w.mode,
            lds: lds
                .chunks_exact(4)
                .map(|b| u32::from_le_bytes([b[0], b[1], b[2], b[3]]))
                .collect(),
            memory: buffer.to_vec(),
        };
        (flow, fault, w.pc, state)
    }
}

/// Whether a format's immediate is an offset that could lead out of the small memory here.
fn is_memory(format: Format) -> bool {
    use Format::*;
    matches!(format, Ds | Flat | Global | Scratch | Mubuf | Smem)
}

/// A value before and after the instruction, in both runs.
struct Values {
    before: [u32; 2],
    after: [u32; 2],
}

impl Values {
    /// Whether the instruction gave the same value in both runs, or left both unchanged.
    fn written(&self) -> bool {
        self.after[0] == self.after[1] || self.after == self.before
    }
    fn kept(&self) -> bool {
        self.after == self.before
    }
}

fn is_in(uses: &[Use], register: usize, vector: bool) -> bool {
    uses.iter().any(|u| {
        let first = match u.vector(ACCUM_OFFSET) {
            Some(v) if vector => v,
            None if !vector && u.first != SCC => usize::from(u.first),
            _ => return false,
        };
        let size = if vector { 511 } else { 127 };
        (0..usize::from(u.count)).any(|k| (first + k) & size == register)
    })
}

/// Error in the declared uses of an instruction, if there is one.
fn differs(inst: &Inst, r: &mut Random, buffer: &mut [u32]) -> Result<bool, String> {
    let start = buffer.as_ptr() as u64;
    let mut a = State::random(r);
    if r.next() & 1 != 0 {
        (a.sgpr[126], a.sgpr[127]) = (!0, !0);
    }
    a.aim(inst, &Uses::of(inst), start);
    let mut w = Wave::new(0);
    (w.sgpr, w.mode) = (a.sgpr, a.mode);
    let uses = match resolved(&w, inst) {
        Some(to) => Uses::of(&to),
        None => Uses::of(inst),
    };
    let mut b = State::random(r);
    (b.mode, b.lds, b.memory) = (a.mode, a.lds.clone(), a.memory.clone());
    b.take(&a, uses.reads());
    let (flow, fault, pc, after) = a.run(inst, buffer);
    let (flow2, fault2, pc2, after2) = b.run(inst, buffer);
    if flow != flow2 || fault != fault2 || pc != pc2 {
        return Err(format!(
            "ends differently: {flow:?} {fault:?}, {flow2:?} {fault2:?}"
        ));
    }
    if flow == Flow::Fault {
        return Ok(false);
    }
    if after.mode != after2.mode || after.lds != after2.lds || after.memory != after2.memory {
        return Err("stores what it does not declare to read".into());
    }
    for register in 0..512 {
        let written = is_in(uses.writes(), register, true);
        for lane in 0..LANES {
            let v = Values {
                before: [a.vgpr[register][lane], b.vgpr[register][lane]],
                after: [after.vgpr[register][lane], after2.vgpr[register][lane]],
            };
            if !(if written { v.written() } else { v.kept() }) {
                return Err(format!(
                    "v{register} lane {lane}, declared {written}: {:x?} {:x?}",
                    v.before, v.after
                ));
            }
        }
    }
    for register in 0..128 {
        let written = is_in(uses.writes(), register, false);
        let v = Values {
            before: [a.sgpr[register], b.sgpr[register]],
            after: [after.sgpr[register], after2.sgpr[register]],
        };
        if !(if written { v.written() } else { v.kept() }) {
            return Err(format!(
                "s{register}, declared {written}: {:x?} {:x?}",
                v.before, v.after
            ));
        }
    }
    let v = Values {
        before: [a.scc, b.scc].map(u32::from),
        after: [after.scc, after2.scc].map(u32::from),
    };
    let written = uses.writes().iter().any(|u| u.first == SCC);
    if !(if written { v.written() } else { v.kept() }) {
        return Err(format!("scc, declared {written}"));
    }
    Ok(true)
}

#[test]
fn nothing_else_is_read_or_written() {
    let mut r = Random(7);
    let mut buffer = vec![0u32; BYTES / 4];
    let mut failures: BTreeMap<String, (usize, String)> = BTreeMap::new();
    // Number of encodings that were executed to their end, by opcode.
    let mut proved: BTreeMap<(u8, &str), usize> = BTreeMap::new();
    for (format, opcodes) in FORMATS {
        for code in 0..opcodes {
            for _ in 0..VARIANTS {
                let mut inst = crate::decode::decode(&encode(&mut r, format, code));
                if is_memory(inst.format) {
                    inst.imm &= 0x78;
                }
                if !exec::is_implemented(&inst) {
                    continue;
                }
                let done = proved
                    .entry((inst.format as u8, inst.op.mnemonic()))
                    .or_default();
                match differs(&inst, &mut r, &mut buffer) {
                    Ok(ended) => *done += usize::from(ended),
                    Err(why) => {
                        let text = crate::disasm::text(&inst, 0);
                        let entry = failures.entry(inst.op.mnemonic().into()).or_default();
                        entry.0 += 1;
                        entry.1 = format!("{text}: {why}");
                    }
                }
            }
        }
    }
    for (name, (count, example)) in &failures {
        println!("{name} ({count}): {example}");
    }
    assert!(failures.is_empty(), "{} opcodes", failures.len());
    let never: Vec<_> = proved
        .iter()
        .filter(|(_, n)| **n == 0)
        .map(|(k, _)| k.1)
        .collect();
    assert!(proved.len() > 1000, "{}", proved.len());
    // Instructions that always fault here: jumps that leave the empty program, and traps.
    let expected = [
        "s_setpc_b64",
        "s_swappc_b64",
        "s_call_b64",
        "s_trap",
        "s_branch",
    ];
    let surprising: Vec<_> = never
        .iter()
        .filter(|n| !expected.contains(n) && !n.starts_with("s_cbranch"))
        .collect();
    assert!(
        surprising.is_empty(),
        "never executed to their end: {surprising:?}"
    );
}

/// Uses without an effect would make the checks see dependencies that do not exist.
#[test]
fn what_is_read_matters() {
    // A v_pk_fma_f32 that takes the low halves of source 1 twice does not read its high half.
    let mut inst = crate::decode::decode(&[0xd3b0_4000, 0x0c0a_0d04 | 0x0400_0000]);
    assert_eq!(inst.op, V_PK_FMA_F32);
    (inst.op_sel, inst.op_sel_hi) = (0, 0b101);
    let uses = Uses::of(&inst);
    assert_eq!(uses.role(Role::Source0).map(|u| u.count), Some(2));
    assert_eq!(uses.role(Role::Source1).map(|u| u.count), Some(1));
}

//! Proves that an instruction accesses exactly the bytes that are declared for it. Every memory opcode runs on random
//! addresses, over memory that shows which bytes were read or written.

use super::*;
use crate::decode::table;
use crate::exec::{Env, Flow, Level, PRIVATE_BASE_HI, SHARED_BASE_HI, is_implemented, prepare};
use crate::inst::{M0, NONE, Program, VGPR0};
use crate::memory::{Extent, Memory};
use crate::op::Op;

/// SplitMix64.
struct Random(u64);

impl Random {
    fn below(&mut self, n: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ z >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        (z ^ z >> 31) % n
    }
}

const GLOBAL: usize = 16 << 10;
const LDS: usize = 8 << 10;
const STRIDE: usize = 256;
const SIZES: [usize; 3] = [GLOBAL, LDS, 64 * STRIDE];

/// Global memory, LDS and scratch.
#[derive(Clone, PartialEq)]
struct Bytes([Vec<u8>; 3]);

impl Bytes {
    fn filled(value: u8) -> Self {
        Bytes(SIZES.map(|n| vec![value; n]))
    }
}

/// Bytes of an access, as (memory, lane, index).
fn touched(a: &Access, global: u64) -> impl Iterator<Item = (usize, usize, usize)> + '_ {
    lanes(a.lanes).flat_map(move |lane| {
        let at = a.addresses[lane];
        let (memory, first) = match a.space {
            Space::Global => (0, (at - global) as usize),
            Space::Lds => (1, at as usize),
            Space::Scratch => (2, lane * STRIDE + at as usize),
        };
        (0..a.size as usize).map(move |i| (memory, lane, first + i))
    })
}

/// A wave and its memory, at the same addresses with the same content in every run.
struct World {
    wave: Wave,
    memory: Bytes,
}

impl World {
    fn new() -> Self {
        World {
            wave: Wave::new(0),
            memory: Bytes::filled(0),
        }
    }

    fn global(&self) -> u64 {
        self.memory.0[0].as_ptr() as u64
    }

    /// Runs an instruction from the wave's state over `memory`. Returns the wave and memory afterwards, and keeps its
    /// own.
    fn run(&mut self, inst: &Inst, memory: &Bytes) -> (Wave, Bytes) {
        for (to, from) in self.memory.0.iter_mut().zip(&memory.0) {
            to.copy_from_slice(from);
        }
        let mut wave = Wave::new(0);
        *wave.vgpr = *self.wave.vgpr;
        wave.sgpr = self.wave.sgpr;
        wave.scratch_stride = STRIDE as u32;
        wave.scratch = self.memory.0[2].as_ptr() as u64;
        let [global, lds, _] = &mut self.memory.0;
        let start = global.as_mut_ptr() as u64;
        let extents = vec![Extent {
            start,
            end: start + GLOBAL as u64,
        }];
        let memory = Memory::new(extents);
        let program = Program::default();
        let mut env = Env::new(lds, &memory, &program);
        // SAFETY: every host has the baseline; the extent is a vector that nothing else uses now.
        let flow = unsafe { prepare(inst, Level::Baseline)(&mut wave, inst, &mut env) };
        assert_eq!(flow, Flow::Next, "{inst:?}: {:?}", env.fault);
        (wave, self.memory.clone())
    }
}

const ADDRESS: u16 = VGPR0 + 10;
const DATA: [u16; 2] = [VGPR0 + 20, VGPR0 + 30];
const RESULT: u16 = VGPR0 + 40;
const SCALARS: u16 = 32;

/// A random instruction of an opcode, with registers that keep it inside of memory.
fn case(r: &mut Random, format: Format, op: Op, world: &mut World) -> Inst {
    let name = format!("{op:?}");
    let global = world.global();
    let w = &mut world.wave;
    // Atomics must be aligned, nothing else need be.
    let step = if atomic_of(op).is_some() || name.contains("XCHG") || name.contains("ADDTID") {
        8
    } else {
        1
    };
    let at = |r: &mut Random, n: u64| r.below(n) / step * step;
    // Lanes of an atomic have places of their own: a second change could undo the first.
    let place = |r: &mut Random, lane: usize, n: u64| match step {
        1 => r.below(n),
        _ => (lane as u64 * (n / 64) + r.below(n / 64)) / step * step,
    };
    w.set_exec(match r.below(4) {
        0 => u64::MAX,
        1 => 1 << r.below(64),
        _ => r.below(u64::MAX),
    });
    let mut inst = crate::decode::decode(&[0]);
    (inst.op, inst.format) = (op, format);
    (inst.vdst, inst.sdst, inst.src) = (RESULT, NONE, [ADDRESS, DATA[0], DATA[1]]);
    (inst.flags, inst.imm) = (0, at(r, 64) as i32);
    let base = global + 2048 + at(r, 64);
    w.sgpr[M0 as usize] = at(r, 1024) as u32;
    if name.contains("APPEND") || name.contains("CONSUME") || name.contains("ADDTID") {
        inst.imm &= !7;
        w.sgpr[M0 as usize] &= !7;
    }
    let set = |w: &mut Wave, register: u16, lane: usize, value: u64| {
        w.vgpr[(register - VGPR0) as usize].0[lane] = value as u32;
    };
    match format {
        Format::Ds => {
            if name.contains("2") && lds_transfer(op).is_some_and(|(_, _, pair)| pair.is_some()) {
                inst.imm = (r.below(8) | r.below(8) << 8) as i32;
            }
            for lane in 0..64 {
                set(w, ADDRESS, lane, place(r, lane, 1024));
            }
            if name.contains("PERMUTE") || name.contains("SWIZZLE") {
                inst.imm = r.below(1 << 16) as i32;
            }
            if atomic_of(op).is_some() && !name.contains("RTN") {
                inst.vdst = NONE;
            }
        }
        Format::Scratch => {
            w.sgpr[4] = at(r, 64) as u32;
            for lane in 0..64 {
                set(w, ADDRESS, lane, at(r, 64));
            }
            if r.below(2) == 0 {
                inst.sdst = 4;
            }
            if r.below(2) == 0 {
                inst.src[0] = NONE;
            }
        }
        Format::Flat => {
            for lane in 0..64 {
                let address = match r.below(3) {
                    0 => (u64::from(SHARED_BASE_HI) << 32) + place(r, lane, 4096),
                    1 => (u64::from(PRIVATE_BASE_HI) << 32) + at(r, 128),
                    _ => base + place(r, lane, 4096),
                };
                set(w, ADDRESS, lane, address);
                set(w, ADDRESS + 1, lane, address >> 32);
            }
        }
        Format::Mubuf => {
            let stride = at(r, 64) * r.below(2);
            let records = if stride > 0 { 8 } else { r.below(1024) };
            let words = [
                base,
                base >> 32 | stride << 16,
                records,
                match name
                    .chars()
                    .rev()
                    .take_while(|c| "XYZW".contains(*c))
                    .count()
                {
                    1 => 4 << 15 | 7 << 12,
                    2 => 11 << 15 | 7 << 12,
                    3 => 13 << 15 | 7 << 12,
                    _ => 14 << 15 | 7 << 12,
                },
            ];
            for (i, word) in words.into_iter().enumerate() {
                w.sgpr[16 + i] = word as u32;
            }
            w.sgpr[4] = at(r, 64) as u32;
            inst.flags =
                [0, flag::OFFEN, flag::IDXEN, flag::OFFEN | flag::IDXEN][r.below(4) as usize];
            for lane in 0..64 {
                let mut registers = [place(r, lane, 1024), 0];
                if inst.has(flag::IDXEN) {
                    registers = [r.below(12), at(r, 64)];
                }
                set(w, ADDRESS, lane, registers[0]);
                set(w, ADDRESS + 1, lane, registers[1]);
            }
            inst.vdst = DATA[0];
            inst.src = [ADDRESS, 16, if r.below(2) == 0 { 4 } else { 128 }];
            if mubuf::dma_of(op).is_some() && r.below(3) == 0 {
                inst.flags |= flag::LDS;
            }
        }
        Format::Smem => {
            w.set_s64(16, base);
            if name.contains("BUFFER") {
                w.sgpr[17] |= (r.below(2) << 18) as u32;
                w.sgpr[18] = r.below(128) as u32;
            }
            w.sgpr[4] = at(r, 64) as u32;
            inst.src = [16, 4, NONE];
            inst.sdst = SCALARS;
            inst.flags = [0, flag::SMEM_IMM, flag::SMEM_SOFFSET][r.below(3) as usize];
        }
        _ => {
            let scalar = r.below(2) == 0;
            w.set_s64(4, base);
            for lane in 0..64 {
                let offset = place(r, lane, 4096);
                let address = if scalar { offset } else { base + offset };
                set(w, ADDRESS, lane, address);
                set(w, ADDRESS + 1, lane, address >> 32);
            }
            if scalar {
                inst.sdst = 4;
                if r.below(4) == 0 {
                    inst.src[0] = NONE;
                }
            }
        }
    }
    if atomic_of(op).is_some() && matches!(format, Format::Global | Format::Flat | Format::Mubuf) {
        inst.flags |= flag::SC0 * r.below(2) as u16;
    }
    for register in DATA.into_iter().flat_map(|first| first..first + 4) {
        for lane in 0..64 {
            set(w, register, lane, u64::from(u32::MAX));
        }
    }
    inst
}

/// Bits that differ between two waves' results for one lane, or between the LDS dwords that a load to LDS wrote.
fn changed_bits(a: &(Wave, Bytes), b: &(Wave, Bytes), lane: usize) -> u32 {
    let vector = a.0.vgpr.iter().zip(b.0.vgpr.iter());
    let vector = vector.map(|(x, y)| (x.0[lane] ^ y.0[lane]).count_ones());
    let scalar = a.0.sgpr.iter().zip(&b.0.sgpr);
    let scalar = scalar.map(|(x, y)| (x ^ y).count_ones());
    let lds = a.1.0[1].iter().zip(&b.1.0[1]);
    let lds = lds.map(|(x, y)| (x ^ y).count_ones());
    vector.sum::<u32>() + scalar.sum::<u32>() + lds.sum::<u32>()
}

/// Loads read the declared bytes of every lane, and no other byte.
fn check_loads(world: &mut World, inst: &Inst, found: &[Access]) {
    let global = world.global();
    let loads = || found.iter().filter(|a| a.action == Action::Load);
    let (mut inside, mut outside) = (Bytes::filled(0), Bytes::filled(0xff));
    for (memory, _, i) in loads().flat_map(|a| touched(a, global)) {
        inside.0[memory][i] = 0xff;
    }
    let reads = found.iter().filter(|a| a.action != Action::Store);
    for (memory, _, i) in reads.flat_map(|a| touched(a, global)) {
        outside.0[memory][i] = 0;
    }
    let none = world.run(inst, &Bytes::filled(0));
    let other = world.run(inst, &outside);
    assert!(
        none.0
            .vgpr
            .iter()
            .zip(other.0.vgpr.iter())
            .all(|(x, y)| x.0 == y.0),
        "{inst:?}"
    );
    assert!(none.0.sgpr == other.0.sgpr, "{inst:?}");
    let all = world.run(inst, &inside);
    for load in loads() {
        for lane in lanes(load.lanes) {
            let bits = changed_bits(&none, &all, lane);
            assert!(bits >= 8 * load.size, "lane {lane} {inst:?}");
        }
        // Where the declared registers are.
        if let Some(first) = load.register {
            let last = usize::from(first) + load.size.div_ceil(4) as usize - 1;
            for lane in lanes(load.lanes) {
                for r in [usize::from(first), last] {
                    assert_ne!(all.0.vgpr[r].0[lane], none.0.vgpr[r].0[lane], "{inst:?}");
                }
            }
        }
    }
}

/// Stores and atomics write the declared bytes, and no other byte.
fn check_stores(world: &mut World, inst: &Inst, found: &[Access], r: &mut Random) {
    let global = world.global();
    let mut declared = Bytes::filled(0);
    let writes = || found.iter().filter(|a| a.action != Action::Load);
    for (memory, _, i) in writes().flat_map(|a| touched(a, global)) {
        declared.0[memory][i] = 1;
    }
    // Many values, so that every byte changes in one of the runs: compare-and-swap needs an equal comparand, DMA has
    // no data register.
    const VALUES: [u8; 6] = [0, 0xff, 0x55, 0xaa, 0x80, 0x7f];
    let atomic = writes().any(|a| a.action != Action::Store);
    let compares = format!("{:?}", inst.op).contains("CMP");
    let mut seen = Bytes::filled(0);
    let runs = match (atomic, compares) {
        (false, _) => 6,
        (true, false) => 60,
        (true, true) => 120,
    };
    for _ in 0..runs {
        let mut fill = || VALUES[r.below(if compares { 3 } else { 6 }) as usize];
        let mut memory = Bytes::filled(fill());
        memory.0[1].fill(fill());
        for register in DATA.into_iter().flat_map(|first| first..first + 4) {
            let value = u32::from_ne_bytes([fill(); 4]);
            world.wave.vgpr[(register - VGPR0) as usize].0.fill(value);
        }
        let (_, after) = world.run(inst, &memory);
        for m in 0..3 {
            for (i, (x, y)) in memory.0[m].iter().zip(&after.0[m]).enumerate() {
                if x != y {
                    assert_eq!(declared.0[m][i], 1, "byte {i} of memory {m}: {inst:?}");
                    seen.0[m][i] = 1;
                }
            }
        }
    }
    if inst.op == Op::DS_CONDXCHG32_RTN_B64 || format!("{:?}", inst.op).contains("F") {
        // They leave bytes as they are for most operands.
        return;
    }
    if atomic && !matches!(inst.op, Op::DS_APPEND | Op::DS_CONSUME) {
        // A byte may happen to change in no run, a lane may not, if no other lane undoes it.
        let many = |m: usize, i: usize| {
            let all = writes().flat_map(|a| touched(a, global));
            all.filter(|(n, _, j)| (*n, *j) == (m, i)).count() > 1
        };
        for a in writes() {
            for lane in lanes(a.lanes) {
                let one = Access {
                    lanes: 1 << lane,
                    ..a.clone()
                };
                assert!(
                    touched(&one, global).any(|(m, _, i)| seen.0[m][i] == 1 || many(m, i)),
                    "{inst:?}"
                );
            }
        }
    } else if writes().all(|a| a.action == Action::Store) && writes().all(|a| a.register.is_some())
    {
        assert!(seen == declared, "{inst:?}");
    }
}

#[test]
fn declared_accesses_are_the_executed_ones() {
    let mut r = Random(1);
    let mut world = World::new();
    let mut found = Accesses::default();
    let mut opcodes = 0;
    for (format, entry) in table::all() {
        let memory = matches!(
            format,
            Format::Ds
                | Format::Global
                | Format::Flat
                | Format::Scratch
                | Format::Mubuf
                | Format::Smem
        );
        let mut inst = crate::decode::decode(&[0]);
        (inst.op, inst.format, inst.flags) = (entry.op, format, 0);
        if !memory || !is_implemented(&inst) {
            continue;
        }
        opcodes += 1;
        for _ in 0..12 {
            let inst = case(&mut r, format, entry.op, &mut world);
            world.wave.scratch_stride = STRIDE as u32;
            found.find(&world.wave, &inst);
            check_loads(&mut world, &inst, &found);
            check_stores(&mut world, &inst, &found, &mut r);
        }
    }
    assert!(opcodes > 300, "{opcodes}");
}

//! Memory instructions, one at a time, with hand-built operands.

use deltawave_sim::exec::{Env, Flow, Level, PRIVATE_BASE_HI, SHARED_BASE_HI, prepare};
use deltawave_sim::fault::FaultKind;
use deltawave_sim::inst::{AGPR0, Format, Inst, M0, NONE, Program, VGPR0, flag};
use deltawave_sim::memory::{Extent, Memory};
use deltawave_sim::op::Op;
use deltawave_sim::wave::Wave;

fn inst(op: Op, format: Format) -> Inst {
    Inst {
        op,
        format,
        size: 8,
        flags: 0,
        vdst: NONE,
        sdst: NONE,
        src: [NONE; 3],
        imm: 0,
        literal: 0,
        ctrl: 0,
        target: u32::MAX,
        neg: 0,
        abs: 0,
        op_sel: 0,
        op_sel_hi: 0,
        omod: 0,
    }
}

/// A buffer that is the only allocation, a wave and 4 KiB of LDS.
struct Machine {
    buffer: Vec<u32>,
    lds: Vec<u8>,
    wave: Wave,
    level: Level,
}

impl Machine {
    fn new(level: Level) -> Self {
        Machine {
            buffer: (0..1024u32).map(|i| i.wrapping_mul(0x9e37_79b9)).collect(),
            lds: (0..4096u32).map(|i| (i * 7 + i / 256) as u8).collect(),
            wave: Wave::new(0),
            level,
        }
    }

    fn base(&self) -> u64 {
        self.buffer.as_ptr() as u64
    }

    fn bytes(&self) -> Vec<u8> {
        self.buffer.iter().flat_map(|x| x.to_le_bytes()).collect()
    }

    fn run(&mut self, inst: &Inst) -> Result<(), FaultKind> {
        let start = self.buffer.as_mut_ptr() as u64;
        let end = start + 4 * self.buffer.len() as u64;
        let memory = Memory::new(vec![Extent { start, end }]);
        let program = Program::default();
        let mut env = Env {
            clock: 1234,
            ..Env::new(&mut self.lds, &memory, &program)
        };
        // SAFETY: the level is supported and the only extent is the buffer.
        match unsafe { prepare(inst, self.level)(&mut self.wave, inst, &mut env) } {
            Flow::Next => Ok(()),
            _ => Err(env.fault.expect("a fault has a reason")),
        }
    }

    fn set64(&mut self, register: usize, lane: usize, value: u64) {
        self.wave.vgpr[register].0[lane] = value as u32;
        self.wave.vgpr[register + 1].0[lane] = (value >> 32) as u32;
    }

    fn lane(&self, register: usize, lane: usize) -> u32 {
        self.wave.vgpr[register].0[lane]
    }

    fn lds32(&self, at: usize) -> u32 {
        u32::from_le_bytes(self.lds[at..at + 4].try_into().unwrap())
    }
}

fn levels() -> impl Iterator<Item = Level> {
    [Level::Baseline, Level::Avx2, Level::Avx512]
        .into_iter()
        .filter(|l| *l <= Level::detect())
}

fn lanes(mask: u64) -> impl Iterator<Item = usize> {
    (0..64).filter(move |l| mask >> l & 1 != 0)
}

/// Registers that held `old`, after a load of `size` bytes.
fn extended(bytes: &[u8], size: usize, signed: bool, half: Option<bool>, old: u32) -> Vec<u32> {
    if size >= 4 {
        return bytes[..size]
            .chunks(4)
            .map(|b| u32::from_le_bytes(b.try_into().unwrap()))
            .collect();
    }
    let value = match (size, signed) {
        (1, false) => u32::from(bytes[0]),
        (1, true) => bytes[0] as i8 as u32,
        (_, false) => u32::from(u16::from_le_bytes([bytes[0], bytes[1]])),
        (_, true) => i16::from_le_bytes([bytes[0], bytes[1]]) as u32,
    };
    vec![match half {
        None => value,
        Some(false) => old & 0xffff_0000 | value & 0xffff,
        Some(true) => old & 0xffff | value << 16,
    }]
}

const MASKS: [u64; 3] = [u64::MAX, 0x8000_0000_1234_5679, 0];

/// Op, bytes, sign extension, half of the register.
type Load = (Op, usize, bool, Option<bool>);

const GLOBAL_LOADS: &[Load] = &[
    (Op::GLOBAL_LOAD_UBYTE, 1, false, None),
    (Op::GLOBAL_LOAD_SBYTE, 1, true, None),
    (Op::GLOBAL_LOAD_USHORT, 2, false, None),
    (Op::GLOBAL_LOAD_SSHORT, 2, true, None),
    (Op::GLOBAL_LOAD_UBYTE_D16, 1, false, Some(false)),
    (Op::GLOBAL_LOAD_UBYTE_D16_HI, 1, false, Some(true)),
    (Op::GLOBAL_LOAD_SBYTE_D16, 1, true, Some(false)),
    (Op::GLOBAL_LOAD_SBYTE_D16_HI, 1, true, Some(true)),
    (Op::GLOBAL_LOAD_SHORT_D16, 2, false, Some(false)),
    (Op::GLOBAL_LOAD_SHORT_D16_HI, 2, false, Some(true)),
    (Op::GLOBAL_LOAD_DWORD, 4, false, None),
    (Op::GLOBAL_LOAD_DWORDX2, 8, false, None),
    (Op::GLOBAL_LOAD_DWORDX3, 12, false, None),
    (Op::GLOBAL_LOAD_DWORDX4, 16, false, None),
];

#[test]
fn global_loads() {
    for level in levels() {
        for &(op, size, signed, half) in GLOBAL_LOADS {
            for mask in MASKS {
                for pattern in 0..3 {
                    let mut m = Machine::new(level);
                    let bytes = m.bytes();
                    // In a row, scattered and unaligned, all the same at the end.
                    let offset = |lane: usize| match pattern {
                        0 => lane * size,
                        1 => (lane * 37 + 5) % 2000,
                        _ => 4096 - size,
                    };
                    for lane in 0..64 {
                        let a = m.base() + offset(lane) as u64 - 24;
                        m.set64(10, lane, a);
                        for r in 0..4 {
                            m.wave.vgpr[256 + 20 + r].0[lane] = 0xdead_beef;
                        }
                    }
                    m.wave.set_exec(mask);
                    let mut i = inst(op, Format::Global);
                    i.src[0] = VGPR0 + 10;
                    i.vdst = AGPR0 + 20;
                    i.imm = 24;
                    m.run(&i).unwrap();
                    for lane in 0..64 {
                        let mut expected = vec![0xdead_beef; size.div_ceil(4)];
                        if mask >> lane & 1 != 0 {
                            let at = &bytes[offset(lane)..];
                            expected = extended(at, size, signed, half, 0xdead_beef);
                        }
                        for (r, x) in expected.iter().enumerate() {
                            assert_eq!(m.lane(276 + r, lane), *x, "{op:?} {level:?} lane {lane}");
                        }
                    }
                }
            }
        }
    }
}

#[test]
fn global_stores_from_a_scalar_base() {
    let stores = [
        (Op::GLOBAL_STORE_BYTE, 1, 0),
        (Op::GLOBAL_STORE_SHORT, 2, 0),
        (Op::GLOBAL_STORE_BYTE_D16_HI, 1, 16),
        (Op::GLOBAL_STORE_SHORT_D16_HI, 2, 16),
        (Op::GLOBAL_STORE_DWORD, 4, 0),
        (Op::GLOBAL_STORE_DWORDX2, 8, 0),
        (Op::GLOBAL_STORE_DWORDX3, 12, 0),
        (Op::GLOBAL_STORE_DWORDX4, 16, 0),
    ];
    for level in levels() {
        for (op, size, shift) in stores {
            for mask in MASKS {
                for step in [size, 24] {
                    let mut m = Machine::new(level);
                    let mut expected = m.bytes();
                    for lane in 0..64usize {
                        m.wave.vgpr[1].0[lane] = (lane * step) as u32;
                        let mut data = vec![];
                        for r in 0..4usize {
                            let x = (lane * 0x0101_0101 + r * 0x1357) as u32 ^ 0x55aa_00ff;
                            m.wave.vgpr[4 + r].0[lane] = x;
                            data.extend((x >> shift).to_le_bytes());
                        }
                        if mask >> lane & 1 != 0 {
                            expected[16 + lane * step..][..size].copy_from_slice(&data[..size]);
                        }
                    }
                    let base = m.base();
                    m.wave.set_s64(8, base + 32);
                    m.wave.set_exec(mask);
                    let mut i = inst(op, Format::Global);
                    i.src = [VGPR0 + 1, VGPR0 + 4, NONE];
                    i.sdst = 8;
                    i.imm = -16;
                    m.run(&i).unwrap();
                    assert!(m.bytes() == expected, "{op:?} {level:?}");
                }
            }
        }
    }
}

#[test]
fn global_faults_name_lane_and_address() {
    for level in levels() {
        let mut m = Machine::new(level);
        for lane in 0..64 {
            let a = m.base() + 4 * lane as u64;
            m.set64(10, lane, a);
        }
        let bad = m.base() + 4096 - 8;
        m.set64(10, 33, bad);
        m.set64(10, 50, 0);
        let mut i = inst(Op::GLOBAL_LOAD_DWORDX3, Format::Global);
        i.src[0] = VGPR0 + 10;
        i.vdst = VGPR0 + 20;
        match m.run(&i) {
            Err(FaultKind::OutOfBounds {
                address,
                size: 12,
                lane: 33,
                nearest: Some(_),
                ..
            }) => assert_eq!(address, bad),
            other => panic!("{other:?}"),
        }
        // The lanes are off: no fault.
        m.wave.set_exec(!(1 << 33 | 1 << 50));
        m.run(&i).unwrap();
        i.vdst = AGPR0 + 254;
        assert!(matches!(m.run(&i), Err(FaultKind::BadRegister { .. })));
    }
}

#[test]
fn lds_reads() {
    let reads: &[Load] = &[
        (Op::DS_READ_U8, 1, false, None),
        (Op::DS_READ_I8, 1, true, None),
        (Op::DS_READ_U16, 2, false, None),
        (Op::DS_READ_I16, 2, true, None),
        (Op::DS_READ_U8_D16, 1, false, Some(false)),
        (Op::DS_READ_U8_D16_HI, 1, false, Some(true)),
        (Op::DS_READ_I8_D16, 1, true, Some(false)),
        (Op::DS_READ_I8_D16_HI, 1, true, Some(true)),
        (Op::DS_READ_U16_D16, 2, false, Some(false)),
        (Op::DS_READ_U16_D16_HI, 2, false, Some(true)),
        (Op::DS_READ_B32, 4, false, None),
        (Op::DS_READ_B64, 8, false, None),
        (Op::DS_READ_B96, 12, false, None),
        (Op::DS_READ_B128, 16, false, None),
    ];
    for level in levels() {
        for mask in MASKS {
            for &(op, size, signed, half) in reads {
                let mut m = Machine::new(level);
                let address = |lane: usize| lane * 52 % 1024;
                for lane in 0..64 {
                    m.wave.vgpr[1].0[lane] = address(lane) as u32;
                    m.wave.vgpr[2].0[lane] = 0x1234_5678;
                }
                m.wave.set_exec(mask);
                let mut i = inst(op, Format::Ds);
                i.src[0] = VGPR0 + 1;
                i.vdst = VGPR0 + 2;
                i.imm = 400;
                m.run(&i).unwrap();
                for lane in lanes(mask) {
                    let at = &m.lds[address(lane) + 400..];
                    let expected = extended(at, size, signed, half, 0x1234_5678);
                    for (r, x) in expected.iter().enumerate() {
                        assert_eq!(m.lane(2 + r, lane), *x, "{op:?} {level:?}");
                    }
                }
            }
        }
    }
}

#[test]
fn lds_writes() {
    let writes = [
        (Op::DS_WRITE_B8, 1, 0),
        (Op::DS_WRITE_B16, 2, 0),
        (Op::DS_WRITE_B8_D16_HI, 1, 16),
        (Op::DS_WRITE_B16_D16_HI, 2, 16),
        (Op::DS_WRITE_B32, 4, 0),
        (Op::DS_WRITE_B64, 8, 0),
        (Op::DS_WRITE_B96, 12, 0),
        (Op::DS_WRITE_B128, 16, 0),
    ];
    for level in levels() {
        for mask in MASKS {
            for (op, size, shift) in writes {
                let mut m = Machine::new(level);
                let mut expected = m.lds.clone();
                for lane in 0..64usize {
                    m.wave.vgpr[1].0[lane] = (lane * 20) as u32;
                    let mut data = vec![];
                    for r in 0..4usize {
                        let x = (lane * 0x0301_0201 + r * 0x1357) as u32;
                        m.wave.vgpr[4 + r].0[lane] = x;
                        data.extend((x >> shift).to_le_bytes());
                    }
                    if mask >> lane & 1 != 0 {
                        expected[8 + lane * 20..][..size].copy_from_slice(&data[..size]);
                    }
                }
                m.wave.set_exec(mask);
                let mut i = inst(op, Format::Ds);
                i.src = [VGPR0 + 1, VGPR0 + 4, NONE];
                i.imm = 8;
                m.run(&i).unwrap();
                assert!(m.lds == expected, "{op:?} {level:?}");
            }
        }
    }
}

#[test]
fn lds_two_address_forms() {
    for level in levels() {
        for (read, write, size, unit) in [
            (Op::DS_READ2_B32, Op::DS_WRITE2_B32, 4, 4),
            (Op::DS_READ2_B64, Op::DS_WRITE2_B64, 8, 8),
            (Op::DS_READ2ST64_B32, Op::DS_WRITE2ST64_B32, 4, 256),
            (Op::DS_READ2ST64_B64, Op::DS_WRITE2ST64_B64, 8, 512),
        ] {
            let mut m = Machine::new(level);
            let n = size / 4;
            for lane in 0..64usize {
                m.wave.vgpr[1].0[lane] = (lane * size) as u32;
                for r in 0..4 {
                    m.wave.vgpr[4 + r].0[lane] = (1000 * r + lane) as u32;
                }
            }
            let mut i = inst(write, Format::Ds);
            i.src = [VGPR0 + 1, VGPR0 + 4, VGPR0 + 4 + n as u16];
            i.imm = 1 | 4 << 8;
            // All 64 lanes would overlap in the plain forms.
            m.wave.set_exec(1 << 5 | 1 << 60);
            m.run(&i).unwrap();
            for lane in [5, 60] {
                for (k, offset) in [unit, 4 * unit].into_iter().enumerate() {
                    for r in 0..n {
                        let x = m.lds32(lane * size + offset + 4 * r);
                        assert_eq!(x as usize, 1000 * (k * n + r) + lane, "{write:?}");
                    }
                }
            }
            m.wave.set_exec(u64::MAX);
            let mut i = inst(read, Format::Ds);
            i.src[0] = VGPR0 + 1;
            i.vdst = VGPR0 + 20;
            i.imm = 1 | 4 << 8;
            m.run(&i).unwrap();
            for lane in 0..64 {
                for (k, offset) in [unit, 4 * unit].into_iter().enumerate() {
                    for r in 0..n {
                        let x = m.lds32(lane * size + offset + 4 * r);
                        assert_eq!(m.lane(20 + k * n + r, lane), x, "{read:?}");
                    }
                }
            }
        }
    }
}

#[test]
fn lds_faults() {
    for level in levels() {
        let mut m = Machine::new(level);
        m.wave.vgpr[1].0[7] = 4090;
        let mut i = inst(Op::DS_READ_B64, Format::Ds);
        i.src[0] = VGPR0 + 1;
        i.vdst = VGPR0 + 2;
        assert!(matches!(
            m.run(&i),
            Err(FaultKind::LdsOutOfBounds {
                lane: 7,
                limit: 4096,
                size: 8,
                ..
            })
        ));
        // Loads and stores may be unaligned.
        m.wave.vgpr[1].0[7] = 101;
        let expected = [m.lds32(101), m.lds32(105)];
        m.run(&i).unwrap();
        assert_eq!([m.lane(2, 7), m.lane(3, 7)], expected);
        let mut atomic = inst(Op::DS_ADD_U32, Format::Ds);
        atomic.src[0] = VGPR0 + 1;
        atomic.src[1] = VGPR0 + 2;
        assert!(matches!(
            m.run(&atomic),
            Err(FaultKind::Misaligned { align: 4, .. })
        ));
        // Address and offset are added in 32 bits: clang folds constants into the offset of a negative rest.
        m.wave.vgpr[1].0[7] = u32::MAX - 3;
        i.imm = 8;
        let expected = [m.lds32(4), m.lds32(8)];
        m.run(&i).unwrap();
        assert_eq!([m.lane(2, 7), m.lane(3, 7)], expected);
    }
}

#[test]
fn lanes_exchange() {
    for level in levels() {
        let mut m = Machine::new(level);
        for lane in 0..64usize {
            m.wave.vgpr[1].0[lane] = 4 * ((lane as u32 + 3) % 64) + 256;
            m.wave.vgpr[2].0[lane] = 100 + lane as u32;
        }
        let mut i = inst(Op::DS_BPERMUTE_B32, Format::Ds);
        i.src = [VGPR0 + 1, VGPR0 + 2, NONE];
        i.vdst = VGPR0 + 3;
        m.wave.set_exec(!(1 << 10));
        m.run(&i).unwrap();
        let data = |from: u32| if from == 10 { 0 } else { 100 + from };
        for lane in lanes(!(1 << 10)) {
            assert_eq!(m.lane(3, lane), data((lane as u32 + 3) % 64));
        }
        i.op = Op::DS_PERMUTE_B32;
        m.run(&i).unwrap();
        for lane in lanes(!(1 << 10)) {
            assert_eq!(m.lane(3, lane), data((lane as u32 + 61) % 64));
        }
        i.op = Op::DS_SWIZZLE_B32;
        i.src = [VGPR0 + 2, NONE, NONE];
        i.imm = 0x401f;
        m.wave.set_exec(u64::MAX);
        m.run(&i).unwrap();
        for lane in 0..64 {
            assert_eq!(m.lane(3, lane), 100 + (lane as u32 ^ 16));
        }
    }
}

#[test]
fn atomics() {
    for level in levels() {
        let mut m = Machine::new(level);
        m.buffer[5] = 100;
        for lane in 0..64 {
            let a = m.base() + 20;
            m.set64(1, lane, a);
            m.wave.vgpr[3].0[lane] = 2;
        }
        let mut i = inst(Op::GLOBAL_ATOMIC_ADD, Format::Global);
        i.src = [VGPR0 + 1, VGPR0 + 3, NONE];
        i.vdst = VGPR0 + 4;
        i.flags = flag::SC0;
        m.run(&i).unwrap();
        assert_eq!(m.buffer[5], 228);
        assert_eq!((m.lane(4, 0), m.lane(4, 63)), (100, 226));
        // Compare-and-swap: data, then comparand.
        m.wave.vgpr[3].0 = [7; 64];
        m.wave.vgpr[4].0 = [228; 64];
        i.op = Op::GLOBAL_ATOMIC_CMPSWAP;
        i.vdst = VGPR0 + 8;
        m.run(&i).unwrap();
        assert_eq!((m.buffer[5], m.lane(8, 0), m.lane(8, 1)), (7, 228, 7));
        // Floats.
        m.buffer[5] = 1f32.to_bits();
        m.wave.vgpr[3].0 = [0.5f32.to_bits(); 64];
        i.op = Op::GLOBAL_ATOMIC_ADD_F32;
        i.flags = 0;
        m.run(&i).unwrap();
        assert_eq!(f32::from_bits(m.buffer[5]), 33.0);
        i.op = Op::GLOBAL_ATOMIC_ADD_F64;
        if m.base().is_multiple_of(8) {
            assert!(matches!(
                m.run(&i),
                Err(FaultKind::Misaligned {
                    align: 8,
                    lane: 0,
                    ..
                })
            ));
        }
        // LDS: comparand first.
        m.lds[0..4].copy_from_slice(&5u32.to_le_bytes());
        m.wave.vgpr[1].0 = [0; 64];
        m.wave.vgpr[3].0 = [5; 64];
        m.wave.vgpr[4].0 = [9; 64];
        let mut i = inst(Op::DS_CMPST_RTN_B32, Format::Ds);
        i.src = [VGPR0 + 1, VGPR0 + 3, VGPR0 + 4];
        i.vdst = VGPR0 + 5;
        m.run(&i).unwrap();
        assert_eq!((m.lds32(0), m.lane(5, 0), m.lane(5, 1)), (9, 5, 9));
        let mut i = inst(Op::DS_ADD_U32, Format::Ds);
        i.src = [VGPR0 + 1, VGPR0 + 3, NONE];
        m.run(&i).unwrap();
        assert_eq!(m.lds32(0), 9 + 5 * 64);
    }
}

#[test]
fn lds_counters() {
    let mut m = Machine::new(Level::detect());
    m.wave.sgpr[M0 as usize] = 8;
    m.wave.set_exec(0xff);
    m.lds[12..16].copy_from_slice(&50u32.to_le_bytes());
    let mut i = inst(Op::DS_APPEND, Format::Ds);
    i.vdst = VGPR0 + 1;
    i.imm = 4;
    m.run(&i).unwrap();
    assert_eq!((m.lane(1, 7), m.lane(1, 8), m.lds32(12)), (50, 0, 58));
    i.op = Op::DS_CONSUME;
    m.run(&i).unwrap();
    assert_eq!((m.lane(1, 0), m.lds32(12)), (58, 50));
}

#[test]
fn scratch_and_flat_apertures() {
    for level in levels() {
        let mut m = Machine::new(level);
        // The scratch is not in the list of allocations.
        let mut scratch = vec![0u32; 64 * 8];
        m.wave.scratch = scratch.as_mut_ptr() as u64;
        m.wave.scratch_stride = 32;
        for lane in 0..64 {
            m.wave.vgpr[1].0[lane] = 8;
            m.wave.vgpr[2].0[lane] = 1000 + lane as u32;
        }
        let mut i = inst(Op::SCRATCH_STORE_DWORD, Format::Scratch);
        i.src = [VGPR0 + 1, VGPR0 + 2, NONE];
        i.imm = 4;
        m.run(&i).unwrap();
        assert_eq!((scratch[3], scratch[8 * 63 + 3]), (1000, 1063));
        let mut i = inst(Op::SCRATCH_LOAD_DWORDX2, Format::Scratch);
        m.wave.sgpr[9] = 12;
        i.sdst = 9;
        i.vdst = VGPR0 + 5;
        m.run(&i).unwrap();
        assert_eq!((m.lane(5, 17), m.lane(6, 17)), (1017, 0));
        m.wave.sgpr[9] = 28;
        assert!(matches!(
            m.run(&i),
            Err(FaultKind::ScratchOutOfBounds {
                address: 28,
                size: 8,
                lane: 0,
                limit: 32,
                ..
            })
        ));
        // Flat: a lane each for LDS, scratch and global memory.
        m.set64(10, 0, u64::from(SHARED_BASE_HI) << 32 | 16);
        m.set64(10, 1, u64::from(PRIVATE_BASE_HI) << 32 | 12);
        let a = m.base() + 8;
        m.set64(10, 2, a);
        m.wave.set_exec(7);
        let mut i = inst(Op::FLAT_LOAD_DWORD, Format::Flat);
        i.src[0] = VGPR0 + 10;
        i.vdst = VGPR0 + 12;
        m.run(&i).unwrap();
        assert_eq!(
            (m.lane(12, 0), m.lane(12, 1), m.lane(12, 2)),
            (m.lds32(16), 1001, m.buffer[2])
        );
        m.set64(10, 0, u64::from(SHARED_BASE_HI) << 32 | 4094);
        assert!(matches!(
            m.run(&i),
            Err(FaultKind::LdsOutOfBounds { lane: 0, .. })
        ));
    }
}

#[test]
fn loads_to_lds() {
    for level in levels() {
        let mut m = Machine::new(level);
        for lane in 0..64 {
            let a = m.base() + 400 - 4 * lane as u64;
            m.set64(1, lane, a);
        }
        m.wave.sgpr[M0 as usize] = 512;
        let mut i = inst(Op::GLOBAL_LOAD_LDS_DWORD, Format::Global);
        i.src[0] = VGPR0 + 1;
        i.imm = 16;
        m.run(&i).unwrap();
        for lane in 0..64 {
            assert_eq!(m.lds32(512 + 16 + 4 * lane), m.buffer[104 - lane]);
        }
    }
}

#[test]
fn buffers_check_their_range() {
    for level in levels() {
        let mut m = Machine::new(level);
        let base = m.base() + 16;
        m.wave.sgpr[4] = base as u32;
        m.wave.sgpr[5] = (base >> 32) as u32;
        m.wave.sgpr[6] = 1000;
        m.wave.sgpr[7] = 0x0002_7000;
        m.wave.sgpr[2] = 8;
        for lane in 0..64 {
            m.wave.vgpr[1].0[lane] = 16 * lane as u32;
        }
        m.wave.vgpr[1].0[9] = u32::MAX;
        let mut i = inst(Op::BUFFER_LOAD_DWORDX4, Format::Mubuf);
        i.flags = flag::OFFEN;
        i.src = [VGPR0 + 1, 4, 2];
        i.vdst = VGPR0 + 20;
        i.imm = 4;
        m.run(&i).unwrap();
        for lane in 0..64 {
            for r in 0..4 {
                let offset = 16 * lane + 4 + 4 * r;
                let inside = lane != 9 && offset + 4 <= 1000 - 8;
                let expected = if inside {
                    m.buffer[(16 + 8 + offset) / 4]
                } else {
                    0
                };
                assert_eq!(m.lane(20 + r, lane), expected, "lane {lane} dword {r}");
            }
        }
        let mut i = inst(Op::BUFFER_STORE_DWORDX2, Format::Mubuf);
        i.flags = flag::OFFEN;
        i.src = [VGPR0 + 1, 4, 128];
        i.vdst = VGPR0 + 30;
        m.wave.vgpr[30].0 = [0xaaaa; 64];
        m.wave.vgpr[31].0 = [0xbbbb; 64];
        m.wave.sgpr[6] = 100;
        let mut expected = m.buffer.clone();
        for lane in 0..7 {
            for r in 0..2 {
                if 16 * lane + 4 * r + 4 <= 100 {
                    expected[(16 + 16 * lane + 4 * r) / 4] = [0xaaaa, 0xbbbb][r];
                }
            }
        }
        m.run(&i).unwrap();
        assert_eq!(m.buffer, expected);
        // Structured: index and stride.
        m.wave.sgpr[5] |= 24 << 16;
        m.wave.sgpr[6] = 10;
        for lane in 0..64 {
            m.wave.vgpr[1].0[lane] = lane as u32;
        }
        let mut i = inst(Op::BUFFER_LOAD_USHORT, Format::Mubuf);
        i.flags = flag::IDXEN;
        i.src = [VGPR0 + 1, 4, 128];
        i.vdst = VGPR0 + 20;
        i.imm = 2;
        m.run(&i).unwrap();
        for lane in 0..64 {
            let expected = if lane < 10 {
                m.buffer[(16 + 24 * lane) / 4] >> 16
            } else {
                0
            };
            assert_eq!(m.lane(20, lane), expected);
        }
        // In range of the resource, outside the allocation.
        m.wave.sgpr[6] = 1000;
        m.wave.vgpr[1].0 = [0; 64];
        m.wave.vgpr[1].0[3] = 900;
        assert!(matches!(
            m.run(&i),
            Err(FaultKind::OutOfBounds { lane: 3, .. })
        ));
        // Swizzled.
        m.wave.sgpr[5] |= 1 << 31;
        assert!(matches!(m.run(&i), Err(FaultKind::Unimplemented { .. })));
        m.run(&inst(Op::BUFFER_INV, Format::Mubuf)).unwrap();
        m.run(&inst(Op::BUFFER_WBL2, Format::Mubuf)).unwrap();
    }
}

#[test]
fn scalar_loads() {
    let mut m = Machine::new(Level::detect());
    let base = m.base();
    m.wave.set_s64(0, base + 8);
    m.wave.sgpr[3] = 12;
    for (op, n) in [
        (Op::S_LOAD_DWORD, 1),
        (Op::S_LOAD_DWORDX2, 2),
        (Op::S_LOAD_DWORDX4, 4),
        (Op::S_LOAD_DWORDX8, 8),
        (Op::S_LOAD_DWORDX16, 16),
    ] {
        let mut i = inst(op, Format::Smem);
        i.src = [0, 3, NONE];
        i.sdst = 16;
        i.imm = -4;
        i.flags = flag::SMEM_IMM | flag::SMEM_SOFFSET;
        m.run(&i).unwrap();
        assert_eq!(m.wave.sgpr[16..16 + n], m.buffer[4..4 + n], "{op:?}");
        i.imm = 4096;
        assert!(matches!(m.run(&i), Err(FaultKind::OutOfBounds { .. })));
    }
    // A buffer of 40 bytes: what lies past its end is 0.
    m.wave.set_s64(4, base);
    m.wave.sgpr[6] = 40;
    let mut i = inst(Op::S_BUFFER_LOAD_DWORDX4, Format::Smem);
    i.src[0] = 4;
    i.sdst = 16;
    i.imm = 32;
    i.flags = flag::SMEM_IMM;
    m.run(&i).unwrap();
    assert_eq!(m.wave.sgpr[16..20], [m.buffer[8], m.buffer[9], 0, 0]);
    let mut i = inst(Op::S_MEMTIME, Format::Smem);
    i.sdst = 20;
    m.run(&i).unwrap();
    assert_eq!(m.wave.s64(20), 1234);
}

/// `cargo test -p deltawave-sim --test mem -- --ignored memory_speed --nocapture`
#[test]
#[ignore = "a measurement"]
fn memory_speed() {
    let mut m = Machine::new(Level::detect());
    let base = m.base();
    m.wave.sgpr[4] = base as u32;
    m.wave.sgpr[5] = (base >> 32) as u32;
    m.wave.sgpr[6] = 4096;
    m.wave.sgpr[7] = 0x0002_7000;
    m.wave.set_s64(8, base);
    for lane in 0..64 {
        m.wave.vgpr[1].0[lane] = 16 * lane as u32;
        m.wave.vgpr[2].0[lane] = (lane as u32 * 48) % 2048;
        m.set64(10, lane, base + 48 * lane as u64);
    }
    let mut list = vec![];
    for (op, vaddr) in [
        (Op::DS_READ_U16, 2),
        (Op::DS_READ_B32, 2),
        (Op::DS_READ_B64, 2),
        (Op::DS_READ_B128, 1),
        (Op::DS_READ_B128, 2),
        (Op::DS_WRITE_B16, 2),
        (Op::DS_WRITE_B32, 2),
        (Op::DS_WRITE_B64, 2),
        (Op::DS_WRITE_B128, 2),
        (Op::DS_READ2_B64, 2),
        (Op::DS_READ2ST64_B64, 2),
        (Op::DS_BPERMUTE_B32, 2),
        (Op::DS_SWIZZLE_B32, 2),
    ] {
        let mut i = inst(op, Format::Ds);
        i.src = [VGPR0 + vaddr, VGPR0 + 20, VGPR0 + 22];
        i.vdst = VGPR0 + 30;
        i.imm = 0x0100;
        list.push(i);
    }
    for op in [
        Op::GLOBAL_LOAD_USHORT,
        Op::GLOBAL_LOAD_DWORD,
        Op::GLOBAL_LOAD_DWORDX4,
        Op::GLOBAL_STORE_SHORT,
        Op::GLOBAL_STORE_DWORDX4,
    ] {
        let mut i = inst(op, Format::Global);
        i.src = [VGPR0 + 10, VGPR0 + 20, NONE];
        i.vdst = VGPR0 + 30;
        list.push(i);
        i.src[0] = VGPR0 + 1;
        i.sdst = 8;
        list.push(i);
    }
    for op in [
        Op::BUFFER_LOAD_USHORT,
        Op::BUFFER_LOAD_DWORDX4,
        Op::BUFFER_STORE_DWORDX2,
    ] {
        let mut i = inst(op, Format::Mubuf);
        i.flags = flag::OFFEN;
        i.src = [VGPR0 + 1, 4, 128];
        i.vdst = VGPR0 + 30;
        list.push(i);
    }
    let mut i = inst(Op::S_LOAD_DWORDX4, Format::Smem);
    i.src[0] = 8;
    i.sdst = 12;
    i.flags = flag::SMEM_IMM;
    list.push(i);
    let memory = Memory::new(vec![Extent {
        start: base,
        end: base + 4096,
    }]);
    let program = Program::default();
    for mask in [u64::MAX, u64::MAX >> 1] {
        m.wave.set_exec(mask);
        for i in &list {
            let mut env = Env::new(&mut m.lds, &memory, &program);
            let f = prepare(i, m.level);
            let start = std::time::Instant::now();
            for _ in 0..100_000 {
                // SAFETY: the level is supported and the only extent is the buffer.
                let flow = unsafe { std::hint::black_box(f)(&mut m.wave, i, &mut env) };
                assert_eq!(flow, Flow::Next, "{:?} {:?}", i.op, env.fault);
            }
            let ns = start.elapsed().as_nanos() as f64 / 1e5;
            println!("{:?} exec {mask:#x}: {ns:.0} ns", i.op);
        }
    }
}

//! Compares counters with counts by hand, on kernels in assembly (`kernels/count.s`).

mod common;

use deltawave_sim::code_object::CodeObject;
use deltawave_sim::cost::Class;
use deltawave_sim::count::{Counts, Site, Totals, Traffic};
use deltawave_sim::launch::{Launch, Options};
use deltawave_sim::memory::{Extent, Memory};
use deltawave_sim::occupancy::Limit;
use deltawave_sim::op::Op;

/// Memory as a device would give it: at a multiple of 256.
#[repr(C, align(256))]
#[derive(Clone, Copy)]
struct Block([u8; 256]);

struct Device {
    code: CodeObject,
    a: Vec<Block>,
    b: Vec<Block>,
    options: Options,
}

impl Device {
    fn new() -> Option<Self> {
        let bytes = common::compile("count.s", &[])?;
        Some(Device {
            code: CodeObject::load(&bytes).expect("a code object of clang's"),
            a: vec![Block([0; 256]); 64],
            b: vec![Block([0; 256]); 64],
            options: Options {
                count: true,
                ..Options::default()
            },
        })
    }

    fn run(&mut self, kernel: &str, grid: u32, block: u32, stride: u32, n: u32) -> Counts {
        let [a, b] = [&mut self.a, &mut self.b].map(|v| {
            let start = v.as_mut_ptr() as u64;
            Extent {
                start,
                end: start + 256 * v.len() as u64,
            }
        });
        let mut kernarg = [a.start.to_le_bytes(), b.start.to_le_bytes()].concat();
        kernarg.extend([stride.to_le_bytes(), n.to_le_bytes()].concat());
        let launch = Launch {
            code: &self.code,
            kernel: self.code.kernel(kernel).expect("kernel"),
            grid: [grid, 1, 1],
            remainder: [0; 3],
            block: [block, 1, 1],
            dynamic_lds: 0,
            kernarg: &kernarg,
            memory: &Memory::new(vec![a, b]),
        };
        // SAFETY: the extents are vectors of `self`, which nothing else uses meanwhile.
        let stats = unsafe { launch.run(&self.options) }.expect("a launch");
        let counts = *stats.counts.expect("counters");
        let totals = Totals::new(&counts, self.code.program());
        assert_eq!(totals.wave_instructions, stats.wave_instructions);
        let sum: u64 = totals.classes.iter().sum();
        assert_eq!(totals.wave_instructions, sum);
        assert_eq!(sum, totals.opcodes.values().sum());
        counts
    }

    fn totals(&self, counts: &Counts) -> Totals {
        Totals::new(counts, self.code.program())
    }

    /// Counters of an opcode's executed instructions, in the order of the program.
    fn sites(&self, counts: &Counts, op: Op) -> Vec<Site> {
        let insts = self.code.program().insts.iter().enumerate();
        let executed = insts.filter(|(at, i)| i.op == op && counts.hits[*at] > 0);
        executed
            .filter_map(|(at, _)| counts.site(at).copied())
            .collect()
    }

    fn site(&self, counts: &Counts, op: Op) -> Site {
        let sites = self.sites(counts, op);
        assert_eq!(sites.len(), 1, "{op:?}");
        sites[0]
    }
}

/// The lines of the arguments: one.
const ARGUMENTS: u64 = 128;

#[test]
fn instructions_and_clocks_of_a_loop_of_matrix_products() {
    let Some(mut device) = Device::new() else {
        return;
    };
    let n = 3;
    let counts = device.run("matrix", 2, 128, 0, n as u32);
    let t = device.totals(&counts);
    let waves = 4;
    let per_wave = |class| t.of_class(class) / waves;
    for (class, count) in [
        (Class::Mfma, 8 * n),
        (Class::Accvgpr, 3 * n),
        (Class::Valu, 1 + 3 * n),
        (Class::Trans, 2 * n),
        (Class::Xlane, 2 * n),
        (Class::Salu, 1 + 2 * n),
        (Class::Smem, 2),
        (Class::Waitcnt, 1),
        (Class::Nop, n),
        (Class::Branch, n),
        (Class::Barrier, 1),
        (Class::Other, 1),
        (Class::VmemLoad, 0),
        (Class::LdsLoad, 0),
    ] {
        assert_eq!(per_wave(class), count, "{class:?}");
    }
    assert_eq!(t.wave_instructions, waves * (7 + 22 * n));
    assert_eq!(t.opcodes["v_mfma_f32_32x32x8_f16"], waves * 2 * n);
    assert_eq!(t.mfma_clk, waves * n * 2 * (16 + 32 + 32 + 64));
    assert_eq!(t.trans_clk, waves * n * 2 * 16);
    // Three moves, three of the vector unit, a lane's value read; v_mul_lo_u32.
    assert_eq!(t.valu_clk, t.trans_clk + waves * (n * 7 * 4 + 4));
    assert_eq!(t.salu_clk, waves * 4 * (1 + 2 * n));
    assert_eq!(t.scalar_bytes, waves * 24);
    let permutes = Site {
        lds_accesses: waves * n,
        lds_bytes: waves * n * 256,
        lds_clk: waves * n * 2,
        ..Site::default()
    };
    assert_eq!(t.vector, permutes);
    // Two dies read the arguments.
    let traffic = Traffic {
        read_bytes: ARGUMENTS,
        write_bytes: 0,
        unique_bytes: ARGUMENTS,
        l2_fill_bytes: 2 * ARGUMENTS,
    };
    assert_eq!(t.traffic, traffic);
}

#[test]
fn bank_conflicts_of_every_width_and_stride() {
    let Some(mut device) = Device::new() else {
        return;
    };
    // Clocks by stride in bytes: up to 4 bytes, 8, stores of 12 and 16, loads of 12 and 16.
    for (stride, clocks) in [
        (4, [2, 4, 8, 8]),
        // Loads of 12 and 16 bytes at distance 8: lanes 20-23 come back to the last banks of lanes 0-3.
        (8, [4, 4, 8, 16]),
        (16, [8, 8, 8, 8]),
        (64, [32, 32, 32, 32]),
        (128, [64, 64, 64, 64]),
        (256, [64, 64, 64, 64]),
    ] {
        let counts = device.run("lds_widths", 1, 64, stride, 0);
        for (op, width, size, accesses) in [
            (Op::DS_WRITE_B8, 0, 1, 1),
            (Op::DS_WRITE_B16, 0, 2, 1),
            (Op::DS_WRITE_B32, 0, 4, 1),
            (Op::DS_WRITE_B64, 1, 8, 1),
            (Op::DS_WRITE_B96, 2, 12, 1),
            (Op::DS_WRITE_B128, 2, 16, 1),
            (Op::DS_READ_U8, 0, 1, 1),
            (Op::DS_READ_U16, 0, 2, 1),
            (Op::DS_READ_B32, 0, 4, 1),
            (Op::DS_READ_B64, 1, 8, 1),
            (Op::DS_READ_B96, 3, 12, 1),
            (Op::DS_READ_B128, 3, 16, 1),
            (Op::DS_READ2_B32, 0, 4, 2),
            (Op::DS_READ2_B64, 1, 8, 2),
            (Op::DS_WRITE2_B32, 0, 4, 2),
            (Op::DS_WRITE2_B64, 1, 8, 2),
            (Op::DS_ADD_U32, 0, 4, 1),
            (Op::DS_ADD_RTN_U32, 0, 4, 1),
        ] {
            let total = accesses * clocks[width];
            let expected = Site {
                lds_accesses: accesses,
                lds_bytes: accesses * size * 64,
                lds_clk: total,
                lds_conflict_clk: total - accesses * [2, 4, 8, 8][width],
                ..Site::default()
            };
            let found = device.site(&counts, op);
            assert_eq!(found, expected, "{op:?}, {stride} bytes apart");
        }
        assert_eq!(device.site(&counts, Op::DS_SWIZZLE_B32).lds_conflict_clk, 0);
        let t = device.totals(&counts);
        assert_eq!(t.of_class(Class::LdsLoad), 9);
        assert_eq!(t.of_class(Class::LdsStore), 9);
        assert_eq!(t.of_class(Class::Xlane), 1);
    }
    // All lanes at one address share its dword, except in atomics.
    let counts = device.run("lds_widths", 1, 64, 0, 0);
    for (op, clocks) in [
        (Op::DS_READ_B32, 2),
        (Op::DS_READ_B128, 8),
        (Op::DS_WRITE_B64, 4),
        (Op::DS_ADD_U32, 64),
    ] {
        assert_eq!(device.site(&counts, op).lds_clk, clocks, "{op:?}");
    }
}

#[test]
fn bank_conflicts_of_matrix_fragments() {
    let Some(mut device) = Device::new() else {
        return;
    };
    let counts = device.run("lds_fragments", 1, 64, 0, 0);
    let found: Vec<_> = [Op::DS_READ_B128, Op::DS_READ_B64, Op::DS_READ_B32]
        .into_iter()
        .flat_map(|op| device.sites(&counts, op))
        .map(|s| (s.lds_bytes, s.lds_clk, s.lds_conflict_clk))
        .collect();
    let expected = [
        // Among 8 lanes, 4 rows meet in a column.
        (1024, 32, 24),
        (1024, 8, 0),
        // Two groups of 16 rows, and two of which no lane is on.
        (256, 34, 30),
        (0, 0, 0),
    ];
    assert_eq!(found, expected);
}

#[test]
fn lines_of_global_accesses() {
    let Some(mut device) = Device::new() else {
        return;
    };
    // Half lines and lines, by stride: of 1, 4, 8, 16 bytes loaded; 2 and 16 stored; an atomic of 4; 16 by two lanes.
    let one = (1, 1);
    let (all, pairs) = ((64, 64), (16, 8));
    let four = [(4, 2), (4, 2), (5, 3), (5, 3), (4, 2), (5, 3), (4, 2), one];
    for (stride, lines) in [
        (0, [one; 8]),
        (4, four),
        (16, [pairs, pairs, pairs, pairs, pairs, pairs, pairs, one]),
        (128, [all, all, all, all, all, all, all, (2, 2)]),
    ] {
        let counts = device.run("coalescing", 1, 64, stride, 0);
        let loads = device.sites(&counts, Op::GLOBAL_LOAD_DWORDX4);
        let found = [
            device.site(&counts, Op::GLOBAL_LOAD_UBYTE),
            device.site(&counts, Op::GLOBAL_LOAD_DWORD),
            device.site(&counts, Op::GLOBAL_LOAD_DWORDX2),
            loads[0],
            device.site(&counts, Op::GLOBAL_STORE_SHORT),
            device.site(&counts, Op::GLOBAL_STORE_DWORDX4),
            device.site(&counts, Op::GLOBAL_ATOMIC_ADD),
            loads[1],
        ];
        assert_eq!(found.map(|s| (s.lines_64, s.lines_128)), lines, "{stride}");
        let bytes = found.map(|s| (s.load_bytes, s.store_bytes));
        let expected = [
            (64, 0),
            (256, 0),
            (512, 0),
            (1024, 0),
            (0, 128),
            (0, 1024),
            (0, 256),
            (32, 0),
        ];
        assert_eq!(bytes, expected, "{stride}");
    }
    // 1024 bytes of one buffer are read, 1024 of the other written, and its lines read by the atomic.
    let counts = device.run("coalescing", 1, 64, 16, 0);
    let traffic = Traffic {
        read_bytes: 2 * 1024 + ARGUMENTS,
        write_bytes: 1024,
        unique_bytes: 2 * 1024 + ARGUMENTS,
        l2_fill_bytes: 2 * 1024 + ARGUMENTS,
    };
    assert_eq!(counts.traffic, traffic);
}

#[test]
fn dies_share_lines_of_memory() {
    let Some(mut device) = Device::new() else {
        return;
    };
    for (workgroups, xccs, dies) in [(16, 8, 8), (3, 8, 3), (16, 1, 1), (16, 4, 4)] {
        device.options.xccs = xccs;
        let mut first = None;
        for threads in [1, 2, 5] {
            device.options.threads = Some(threads);
            let counts = device.run("sharing", workgroups, 64, 0, 0);
            let own = 1024 * u64::from(workgroups);
            let traffic = Traffic {
                read_bytes: 1024 + own + ARGUMENTS,
                write_bytes: own,
                unique_bytes: 1024 + own + ARGUMENTS,
                l2_fill_bytes: dies * (1024 + ARGUMENTS) + own,
            };
            assert_eq!(counts.traffic, traffic, "{workgroups} {xccs} {threads}");
            let first = first.get_or_insert_with(|| counts.clone());
            assert_eq!(*first, counts, "{threads} threads");
        }
    }
}

#[test]
fn waves_that_go_different_ways() {
    let Some(mut device) = Device::new() else {
        return;
    };
    let counts = device.run("ways", 1, 256, 0, 5);
    let t = device.totals(&counts);
    assert_eq!(
        t.wave_instructions,
        (4 + 2 + 1 + 3 * 5 + 1 + 1) + 3 * (4 + 2 + 1)
    );
    assert_eq!(t.of_class(Class::Branch), 4 + 5 + 1);
    assert_eq!(t.opcodes["s_cbranch_scc1"], 5);
    assert_eq!(counts.occupancy.limit, Limit::Vgprs);
    assert_eq!(counts.occupancy.workgroups, 3);
    assert_eq!(counts.occupancy.waves_per_simd(), 3.0);
}

//! Race and barrier checks: each faulty kernel must be reported in every order of waves, its correct twin never.

mod common;
#[path = "order/same_stores.rs"]
mod same_stores;

use deltawave_sim::code_object::CodeObject;
use deltawave_sim::fault::{Fault, FaultKind, Race, RacePlace, RaceReason};
use deltawave_sim::launch::{Launch, LaunchError, Options, WaveOrder};
use deltawave_sim::memory::{Extent, Memory};
use deltawave_sim::sanitize::Checks;

const CHECKS: Checks = Checks {
    races: true,
    barriers: true,
    ..Checks::NONE
};

const ORDERS: [WaveOrder; 5] = [
    WaveOrder::RunAhead,
    WaveOrder::InStep,
    WaveOrder::Seeded(1),
    WaveOrder::Seeded(2),
    WaveOrder::Seeded(3),
];

fn code() -> Option<CodeObject> {
    let bytes = common::compile("order.hip", &[])?;
    Some(CodeObject::load(&bytes).expect("a code object of clang's"))
}

/// Runs a kernel `(u32* out, u32* in)` on workgroups of 256 work-items.
fn run(
    code: &CodeObject,
    name: &str,
    workgroups: u32,
    options: &Options,
) -> Result<Vec<u32>, LaunchError> {
    let mut out = vec![0u32; 8192];
    let mut input: Vec<u32> = (0..512).collect();
    let extent = |v: &mut Vec<u32>| Extent {
        start: v.as_mut_ptr() as u64,
        end: v.as_mut_ptr() as u64 + 4 * v.len() as u64,
    };
    let memory = Memory::new(vec![extent(&mut out), extent(&mut input)]);
    let kernarg = [out.as_mut_ptr() as u64, input.as_mut_ptr() as u64];
    let launch = Launch {
        code,
        kernel: code.kernel(name).expect("kernel"),
        grid: [workgroups, 1, 1],
        remainder: [0; 3],
        block: [256, 1, 1],
        dynamic_lds: 0,
        kernarg: &kernarg.map(u64::to_le_bytes).concat(),
        memory: &memory,
    };
    // SAFETY: the extents are vectors that live on until the end of this function.
    unsafe { launch.run(options) }?;
    Ok(out)
}

fn options(order: WaveOrder) -> Options {
    Options {
        order,
        checks: CHECKS,
        instruction_limit: 1 << 22,
        ..Options::default()
    }
}

fn fault(result: Result<Vec<u32>, LaunchError>) -> Box<Fault> {
    match result {
        Err(LaunchError::Fault(fault)) => fault,
        other => panic!("a fault was expected: {other:?}"),
    }
}

/// The instruction at a pc, from the listing.
fn text_at(code: &CodeObject, pc: u64) -> String {
    let program = code.program();
    let at = program.offsets.iter().position(|o| u64::from(*o) == pc);
    let at = at.unwrap_or_else(|| panic!("{pc:#x} is no instruction"));
    deltawave_sim::disasm::text(&program.insts[at], pc)
}

/// The kernel's race, found in every order: its reason, and the mnemonics of both sides, in any order.
fn race(
    name: &str,
    workgroups: u32,
    reasons: &[RaceReason],
    sides: [&str; 2],
) -> Option<Box<Race>> {
    race_in(&code()?, name, workgroups, reasons, sides)
}

/// The same, for a kernel of any code object.
fn race_in(
    code: &CodeObject,
    name: &str,
    workgroups: u32,
    reasons: &[RaceReason],
    sides: [&str; 2],
) -> Option<Box<Race>> {
    let mut last = None;
    for order in ORDERS {
        for threads in [1, 2] {
            let mut options = options(order);
            options.threads = Some(threads);
            let fault = fault(run(code, name, workgroups, &options));
            let again = self::fault(run(code, name, workgroups, &options));
            let place = |f: &Fault| (f.workgroup, f.wave, f.pc);
            assert_eq!(place(&fault), place(&again), "{name}, {order:?}");
            let FaultKind::Race(race) = &fault.kind else {
                panic!("{name}, {order:?}: {fault}");
            };
            println!("{name}, {order:?}: {fault}");
            assert!(reasons.contains(&race.reason), "{name}, {order:?}: {fault}");
            assert_eq!(text_at(code, fault.pc), fault.instruction);
            assert_eq!(text_at(code, race.other_pc), race.other_instruction);
            let found = [&fault.instruction, &race.other_instruction];
            let is = |a: usize, b: usize| {
                found[a].starts_with(sides[0]) && found[b].starts_with(sides[1])
            };
            assert!(is(0, 1) || is(1, 0), "{name}, {order:?}: {fault}");
            assert!(
                (fault.workgroup, fault.wave) != (race.other_workgroup, race.other_wave)
                    || race.reason == RaceReason::ScalarCache,
                "{fault}"
            );
            last = Some(race.clone());
        }
    }
    last
}

/// The kernel passes in every order, with what `expected` says in the first places of its output.
fn clean(name: &str, workgroups: u32, expected: impl Fn(usize) -> u32, count: usize) {
    if let Some(code) = code() {
        clean_in(&code, name, workgroups, expected, count);
    }
}

/// The same, for a kernel of any code object.
fn clean_in(
    code: &CodeObject,
    name: &str,
    workgroups: u32,
    expected: impl Fn(usize) -> u32,
    count: usize,
) {
    for order in ORDERS {
        for threads in [1, 2] {
            let mut options = options(order);
            options.threads = Some(threads);
            match run(code, name, workgroups, &options) {
                Ok(out) => {
                    let expected: Vec<u32> = (0..count).map(&expected).collect();
                    assert_eq!(out[..count], expected, "{name}, {order:?}");
                }
                Err(error) => panic!("{name}, {order:?}: {error}"),
            }
        }
    }
}

#[test]
fn waves_read_lds_without_a_barrier() {
    let sides = ["ds_write_b32", "ds_read_b32"];
    let race = race("lds_read_race", 1, &[RaceReason::Waves], sides);
    let Some(race) = race else { return };
    assert!(matches!(race.place, RacePlace::Lds { .. }));
    clean("lds_read_clean", 1, |i| 255 - i as u32, 256);
}

#[test]
fn waves_overwrite_lds_without_a_barrier() {
    let sides = ["ds_write_b32", "ds_read_b32"];
    race("lds_reuse_race", 1, &[RaceReason::Waves], sides);
    clean("lds_reuse_clean", 1, |i| i as u32 + 1, 256);
}

#[test]
fn races_are_exact_to_the_byte() {
    race(
        "lds_halves_race",
        1,
        &[RaceReason::Waves],
        ["ds_write_b32", "ds_write_b16"],
    );
    let half = |i: usize| {
        if i < 128 {
            (i / 2 + 64 * (i & 1)) as u32
        } else {
            0xa3a3
        }
    };
    clean("lds_halves_clean", 1, half, 128);
    clean(
        "workgroup_halves_clean",
        2,
        |i| (i / 2) as u32 * 0x1_0001 * ((i + 1) % 2) as u32,
        512,
    );
}

#[test]
fn atomics_are_no_races_but_make_no_barrier() {
    race(
        "histogram_race",
        1,
        &[RaceReason::Waves],
        ["ds_add_u32", "ds_read_b32"],
    );
    clean("histogram_clean", 1, |_| 4, 256);
    clean(
        "lds_flag_clean",
        1,
        |i| if i < 64 { 0 } else { (i & 63) as u32 },
        256,
    );
    clean("atomics_clean", 4, |_| 4 * 255 * 128, 1);
}

#[test]
fn a_barrier_does_not_wait_for_lds() {
    let undrained = |counter| RaceReason::Undrained { counter };
    let sides = ["ds_write_b32", "ds_read_b32"];
    race("undrained_race", 1, &[undrained("lgkmcnt")], sides);
    clean("undrained_clean", 1, |i| 255 - i as u32, 256);
    let sides = ["global_load_lds_dword", "ds_read_b32"];
    race("undrained_dma_race", 1, &[undrained("vmcnt")], sides);
    clean("undrained_dma_clean", 1, |i| 255 - i as u32, 256);
}

#[test]
fn waves_share_global_memory() {
    let sides = ["global_store_dword", "global_load_dword"];
    let race = race("global_read_race", 1, &[RaceReason::Waves], sides);
    let Some(race) = race else { return };
    let RacePlace::Global { address, within } = race.place else {
        panic!("{race}");
    };
    assert!(within.is_some_and(|e| (e.start..e.start + 1024).contains(&address)));
    clean("global_read_clean", 1, |i| i as u32, 256);
}

#[test]
fn the_scalar_cache_does_not_see_stores() {
    let sides = ["global_store_dword", "s_load_dword"];
    race("scalar_race", 1, &[RaceReason::ScalarCache], sides);
    clean(
        "scalar_clean",
        1,
        |i| if i < 256 { i as u32 } else { 4 },
        512,
    );
}

#[test]
fn workgroups_are_not_ordered() {
    let store = "global_store_dword";
    let found = race("workgroups_race", 2, &[RaceReason::Workgroups], [store; 2]);
    let Some(found) = found else { return };
    assert_eq!(found.other_workgroup, [0, 0, 0]);
    clean("workgroups_clean", 4, |i| (i & 255) as u32, 1024);
    race(
        "neighbour_race",
        4,
        &[RaceReason::Workgroups],
        [store, "global_load_dword"],
    );
}

#[test]
fn flags_order_workgroups_at_device_scope_only() {
    let sides = ["global_store_dword", "global_load_dword"];
    clean("last_clean", 4, |_| 4, 1);
    clean("last_system_clean", 4, |_| 4, 1);
    race(
        "last_workgroup_race",
        4,
        &[RaceReason::NoRelease, RaceReason::Workgroups],
        sides,
    );
    race("last_no_release_race", 4, &[RaceReason::NoRelease], sides);
    race("last_no_acquire_race", 4, &[RaceReason::NoAcquire], sides);
    clean("pass_clean", 4, |_| 1, 4);
    clean("pass_system_clean", 4, |_| 1, 4);
    race("pass_relaxed_race", 4, &[RaceReason::Workgroups], sides);
    race("pass_workgroup_race", 4, &[RaceReason::Workgroups], sides);
}

#[test]
fn lanes_may_not_go_around_a_barrier() {
    let Some(code) = code() else { return };
    for order in ORDERS {
        let fault = fault(run(&code, "divergent_barrier", 1, &options(order)));
        let FaultKind::DivergentBarrier { barrier_pc, lanes } = fault.kind else {
            panic!("{order:?}: {fault}");
        };
        assert_eq!(text_at(&code, barrier_pc), "s_barrier");
        assert_eq!(lanes, 0x5555_5555_5555_5555, "{fault}");
        assert_eq!(text_at(&code, fault.pc), fault.instruction);
    }
    clean("uniform_barrier", 1, |i| i as u32 + 1, 256);
    clean(
        "early_return",
        1,
        |i| if i < 150 { 149 - i as u32 } else { 0 },
        256,
    );
}

#[test]
fn waves_come_to_the_same_barrier() {
    let Some(code) = code() else { return };
    for order in ORDERS {
        let fault = fault(run(&code, "different_barriers", 1, &options(order)));
        let FaultKind::DifferentBarriers {
            other_wave: 0,
            other_pc,
        } = fault.kind
        else {
            panic!("{order:?}: {fault}");
        };
        assert_eq!((fault.wave, &*fault.instruction), (1, "s_barrier"));
        assert_eq!(text_at(&code, other_pc), "s_barrier");
        assert_ne!(fault.pc, other_pc);
    }
    clean(
        "barriers_of_parts",
        1,
        |i| i as u32 + if i < 64 { 1 } else { 2 },
        256,
    );
}

#[test]
fn launches_that_hang_are_told() {
    let Some(code) = code() else { return };
    for (order, checks, threads, workgroups) in [
        (WaveOrder::RunAhead, Checks::NONE, 1, 1),
        (WaveOrder::RunAhead, CHECKS, 1, 3),
        (WaveOrder::InStep, Checks::NONE, 2, 2),
        (WaveOrder::InStep, CHECKS, 2, 2),
        (WaveOrder::Seeded(1), Checks::NONE, 2, 5),
    ] {
        let options = Options {
            order,
            checks,
            threads: Some(threads),
            ..Options::default()
        };
        let fault = fault(run(&code, "spins", workgroups, &options));
        let FaultKind::Deadlock { waves, not_started } = &fault.kind else {
            panic!("{order:?}: {fault}");
        };
        // Kernels with flags run one workgroup after the other where races are checked.
        let started = if checks.races { 1 } else { threads as u64 };
        assert_eq!(*not_started, u64::from(workgroups) - started, "{fault}");
        let waits: Vec<_> = waves.iter().map(|w| w.waits).collect();
        assert_eq!(waits, [Some(false), Some(true), Some(true), Some(true)]);
        assert_eq!(waves[1].instruction, "s_barrier");
        assert!(waves[0].executed > waves[1].executed);
    }
    let options = Options {
        threads: Some(1),
        ..Options::default()
    };
    let fault = fault(run(&code, "waits_for_later", 4, &options));
    assert_eq!(fault.workgroup, [0, 0, 0]);
    let text = fault.to_string();
    assert!(text.contains("3 workgroups have not started"), "{text}");
}

#[test]
fn the_instruction_limit_lists_the_waves() {
    let Some(code) = code() else { return };
    let options = Options {
        instruction_limit: 1 << 18,
        ..Options::default()
    };
    let fault = fault(run(&code, "spins", 1, &options));
    let FaultKind::InstructionLimit { limit, waves } = &fault.kind else {
        panic!("{fault}");
    };
    assert_eq!((*limit, waves.len()), (1 << 18, 4));
    let text = fault.to_string();
    assert!(text.contains("\n  wave 1: waits at pc "), "{text}");
    assert!(text.contains("exec 0xffffffffffffffff"), "{text}");
}

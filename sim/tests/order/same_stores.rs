//! Tests that stores of the same bytes are no race, and that stores of other bytes are, also after stores of the same.

use super::*;

fn code() -> Option<CodeObject> {
    let bytes = common::compile("same_stores.hip", &[])?;
    Some(CodeObject::load(&bytes).expect("a code object of clang's"))
}

/// The kernels of a name that ends in `_race` and in `_clean`; what the latter gives.
fn pair(name: &str, store: &str, expected: impl Fn(usize) -> u32) {
    let Some(code) = code() else { return };
    let waves = &[RaceReason::Waves];
    race_in(&code, &format!("{name}_race"), 1, waves, [store, store]);
    clean_in(&code, &format!("{name}_clean"), 1, expected, 256);
}

#[test]
fn waves_may_store_the_same_bytes_to_lds() {
    let Some(code) = code() else { return };
    clean_in(&code, "replicated_clean", 2, |i| 5 + (i & 63) as u32, 256);
    clean_in(
        &code,
        "replicated_loop_clean",
        1,
        |i| 3 + 3 * (i & 63) as u32,
        256,
    );
}

#[test]
fn other_bytes_after_the_same_ones_are_a_race() {
    let Some(code) = code() else { return };
    let write = "ds_write_b32";
    for name in ["third_race", "one_lane_race"] {
        let found = race_in(&code, name, 1, &[RaceReason::Waves], [write; 2]);
        let place = found.map(|race| race.place);
        if name == "one_lane_race" {
            assert_eq!(place, Some(RacePlace::Lds { address: 4 * 8 }));
        }
    }
}

#[test]
fn bytes_that_a_wave_has_overwritten_itself_count() {
    pair("twice", "ds_write_b32", |_| 6);
    pair("flat_twice", "flat_store_dword", |_| 6);
}

#[test]
fn stores_of_every_width_are_compared() {
    pair("bytes", "ds_write_b8", |_| 7);
    pair("halves", "ds_write_b16", |_| 7);
    pair("high_halves", "ds_write_b16_d16_hi", |_| 5);
    pair("pairs", "ds_write_b64", |_| 1);
    pair("quads", "ds_write_b128", |_| 1);
    pair("two", "ds_write2", |_| 7);
}

#[test]
fn stores_of_different_widths_are_compared() {
    let Some(code) = code() else { return };
    let sides = ["ds_write_b32", "ds_write_b16"];
    race_in(&code, "part_race", 1, &[RaceReason::Waves], sides);
    clean_in(&code, "part_clean", 1, |_| 5 * 0x1_0001, 256);
}

#[test]
fn atomics_are_no_stores() {
    let Some(code) = code() else { return };
    let sides = ["ds_write_b32", "ds_or_b32"];
    race_in(&code, "atomic_race", 1, &[RaceReason::Waves], sides);
    let sides = ["global_store_dword", "global_atomic_or"];
    let reasons = &[RaceReason::Workgroups];
    race_in(&code, "global_atomic_race", 2, reasons, sides);
}

#[test]
fn a_replicated_tile_does_not_hide_a_panel_that_is_filled_too_early() {
    let Some(code) = code() else { return };
    let sides = ["ds_write", "ds_read"];
    let panel = |x: u32| 2 * (255 - x) + 1 + 10;
    race_in(&code, "panel_race", 1, &[RaceReason::Waves], sides);
    clean_in(&code, "panel_clean", 1, |i| panel(i as u32), 256);
    let tail = |x: u32| 3 * (255 - x) + 3 + x % 40 + 5;
    race_in(&code, "tail_race", 1, &[RaceReason::Waves], sides);
    clean_in(&code, "tail_clean", 1, |i| tail(i as u32), 256);
}

#[test]
fn workgroups_may_store_the_same_bytes() {
    let Some(code) = code() else { return };
    clean_in(&code, "global_clean", 4, |i| 5 + i as u32, 64);
    let bytes = |i: usize| u32::from_le_bytes([0, 1, 2, 3].map(|b| (5 + 4 * i + b) as u8));
    clean_in(&code, "global_bytes_clean", 4, bytes, 16);
    let sides = ["global_store_dword"; 2];
    let either = &[RaceReason::Workgroups, RaceReason::Waves];
    let found = race_in(&code, "global_third_race", 4, either, sides);
    let Some(RacePlace::Global { address, within }) = found.map(|race| race.place) else {
        panic!("no place in global memory");
    };
    assert_eq!(within.map(|e| address - e.start), Some(4 * 6));
    let reasons = &[RaceReason::Workgroups];
    race_in(&code, "global_twice_race", 2, reasons, sides);
    clean_in(&code, "global_twice_clean", 2, |_| 6, 64);
}

#[test]
fn of_workgroups_that_store_the_same_each_has_to_come_before() {
    let Some(code) = code() else { return };
    let sides = ["global_store_dword"; 2];
    let reasons = &[RaceReason::Workgroups];
    let found = race_in(&code, "after_one_race", 3, reasons, sides);
    assert_eq!(found.map(|race| race.other_workgroup), Some([0, 0, 0]));
    clean_in(&code, "after_both_clean", 3, |_| 6, 1);
}

/// Stores of the same bytes are told to those who ask.
#[test]
fn stores_of_the_same_bytes_are_noted() {
    let Some(code) = code() else { return };
    let notes = |name: &str, notes: bool| {
        let mut out = vec![0u32; 8192];
        let mut input: Vec<u32> = (0..512).collect();
        let extent = |v: &mut Vec<u32>| Extent {
            start: v.as_mut_ptr() as u64,
            end: v.as_mut_ptr() as u64 + 4 * v.len() as u64,
        };
        let memory = Memory::new(vec![extent(&mut out), extent(&mut input)]);
        let kernarg = [out.as_mut_ptr() as u64, input.as_mut_ptr() as u64];
        let launch = Launch {
            code: &code,
            kernel: code.kernel(name).expect("kernel"),
            grid: [2, 1, 1],
            remainder: [0; 3],
            block: [256, 1, 1],
            dynamic_lds: 0,
            kernarg: &kernarg.map(u64::to_le_bytes).concat(),
            memory: &memory,
        };
        let options = Options {
            notes,
            ..options(WaveOrder::RunAhead)
        };
        // SAFETY: the extents are vectors that live on until the end of this function.
        unsafe { launch.run(&options) }.expect("no race").notes
    };
    assert_eq!(notes("replicated_clean", false), []);
    let found = notes("replicated_clean", true);
    let [memory, lds] = &found[..] else {
        panic!("{found:?}");
    };
    // Each wave after the first one meets those before it, in two workgroups; then each stores the result.
    assert!(lds.lds && lds.times == 2 * (1 + 2 + 3), "{found:?}");
    assert_eq!(lds.pc, lds.other_pc);
    assert_eq!(text_at(&code, lds.pc), lds.instruction);
    assert!(lds.instruction.starts_with("ds_write_b32"), "{found:?}");
    assert!(!memory.lds && memory.times > 0, "{found:?}");
    let found = notes("global_clean", true);
    assert!(found.len() == 1 && !found[0].lds, "{found:?}");
    let text = found[0].to_string();
    assert!(
        text.starts_with("stores of the same bytes to memory"),
        "{text}"
    );
}

//! `deltawave prefill --pool` and `--snapshots`.

use super::{deltawave, json, kernels, prefill, refused, text};

const SMALL: [&str; 4] = ["--heads", "1,2", "--dims", "32,48"];

#[test]
fn states_stay_in_their_slots() {
    if !kernels() {
        return;
    }
    let words = "--batch 2 --len 65 --pool 2 --repeat 2 --initial-state bf16 --state-dtype bf16";
    let dense: Vec<&str> = words.split(' ').collect();
    let halves = words.replace("bf16", "fp16");
    let halves: Vec<&str> = halves.split(' ').collect();
    let packed = ["--seqlens", "70,0,3", "--pool", "9"];
    for (more, others) in [(&packed[..], 6), (&dense, 0), (&halves, 0)] {
        let report = prefill(
            &[
                &SMALL[..],
                more,
                &["--check", "--state-layout", "value-major"],
            ]
            .concat(),
        );
        assert_eq!(report["passed"], true, "{report}");
        assert_eq!(report["pool"]["other_slots"], others, "{report}");
        assert_eq!(report["pool"]["changed_slots"], 0, "{report}");
    }
    let few = ["--seqlens", "1,2,3", "--pool", "2"];
    let arguments = [&["prefill"], &SMALL[..], &few].concat();
    refused(&arguments, 2, &["--pool <SLOTS>", "3 sequences"]);
    let types = ["--pool", "2", "--initial-state", "bf16"];
    let arguments = [&["prefill"], &SMALL[..], &types].concat();
    refused(&arguments, 2, &["--state-dtype", "bf16"]);
}

#[test]
fn sequences_are_continued_from_snapshots() {
    if !kernels() {
        return;
    }
    let lengths = ["--seqlens", "300,64,40", "--snapshots", "128", "--check"];
    let raw = ["--raw-gates", "--pool", "4", "--initial-state", "f32"];
    for more in [&["--segments", "1"][..], &raw] {
        let report = prefill(&[&SMALL[..], &lengths, more].concat());
        let found = &report["snapshots"];
        assert_eq!(report["passed"], true, "{report}");
        assert_eq!(found["states"], 2, "{report}");
        assert_eq!(found["resumed_sequences"], 1, "{report}");
        assert_eq!(found["resumed_tokens"], 300 - 256, "{report}");
        assert_eq!(found["resumed_same_bits"], true, "{report}");
    }
    // Cut into segments, what is continued is as near as rounding allows.
    let cut = "--seqlens 1000 --snapshots 64 --segments 4 --check";
    let cut: Vec<&str> = cut.split(' ').collect();
    let report = prefill(&[&SMALL[..], &cut].concat());
    assert_eq!(report["passed"], true, "{report}");
    assert_eq!(report["snapshots"]["states"], 15, "{report}");
    let output = deltawave(&[&["prefill"], &SMALL[..], &lengths].concat());
    let shown = text(&output.stdout);
    assert!(shown.contains("the bits of the whole"), "{shown}");
    // Without --check none is continued.
    let output = deltawave(&[&["prefill", "--json"], &SMALL[..], &lengths[..4]].concat());
    assert!(json(&output)["snapshots"]["resumed_tokens"].is_null());
    for wrong in ["0", "32", "65"] {
        let arguments = [&["prefill", "--snapshots", wrong], &SMALL[..]].concat();
        refused(&arguments, 2, &["--snapshots <N>", "multiple of 64"]);
    }
}

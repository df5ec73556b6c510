//! Running one layer on the device under hostile conditions (`loaded.rs`), and judging it by the oracle.
#![allow(dead_code, reason = "each test uses a part of it")]

mod case;
pub mod loaded;

use deltawave::runtime::Context;
use deltawave_lab::inputs::Tensor as HostTensor;
use deltawave_lab::metrics::{UNFUSED_SLACK, compare};
use deltawave_lab::oracle::layer::{layer, unfused_layer};

pub use case::{Case, Data};
use loaded::pools;
pub use loaded::{Loaded, Output};

/// Launches twice, which must give the same bits.
#[track_caller]
pub fn run(context: &Context, case: &Case, data: &Data) -> Output {
    let stream = context.stream().unwrap();
    let mut loaded = Loaded::new(context, case, data);
    loaded.launch(case, &stream).unwrap();
    let output = loaded.output(case, &stream);
    loaded.reset(&stream);
    loaded.launch(case, &stream).unwrap();
    assert!(
        loaded.output(case, &stream) == output,
        "another run has other bits: {case:?}"
    );
    output
}

/// Runs a case and compares it with the oracle: no further off than the unfused chain is.
#[track_caller]
pub fn check(context: &Context, case: &Case) {
    check_within(context, case, 0.0);
}

/// The same, or within an error that a few numbers have by chance.
#[track_caller]
pub fn check_within(context: &Context, case: &Case, floor: f64) {
    let data = Data::new(case);
    let output = run(context, case, &data);
    let (cu_seqlens, has, padding) = (case.cu_seqlens(), case.has_initial(), case.padding());
    let problem = data.problem(case, &cu_seqlens, &has, &padding);
    let (exact, unfused) = (layer(&problem).unwrap(), unfused_layer(&problem).unwrap());

    let s = &case.spec;
    let yardstick: Vec<f32> = (unfused.y.iter())
        .map(|x| s.dtype.round(*x as f32))
        .collect();
    let (found, allowed) = (
        compare(&output.y.values, &exact.y).rms_ratio,
        compare(&yardstick, &exact.y).rms_ratio,
    );
    assert!(
        found <= (UNFUSED_SLACK * allowed).max(floor),
        "y: {found:.2e}, unfused {allowed:.2e}: {case:?}"
    );
    // Rows of nobody and of padding are zeros, and no others.
    let values = case.values();
    for (t, row) in output.y.values.chunks_exact(values.max(1)).enumerate() {
        let of = cu_seqlens
            .windows(2)
            .position(|w| (w[0]..w[1]).contains(&(t as i32)));
        let empty = of.is_none_or(|n| padding[n]);
        assert_eq!(row.iter().all(|x| *x == 0.0), empty, "row {t}: {case:?}");
    }

    let (conv, state) = case.sizes();
    let untouched = pools(case, &data);
    let conv_states = HostTensor::new(s.dtype, exact.conv_state);
    let mut own = vec![false; case.pool()];
    for n in (0..case.sequences()).filter(|n| !padding[*n] && case.lengths[*n] > 0) {
        let slot = case.slot(n);
        own[slot] = true;
        let found = &output.conv_states.bytes[2 * slot * conv..2 * (slot + 1) * conv];
        assert!(
            found == &conv_states.bytes[2 * n * conv..2 * (n + 1) * conv],
            "conv state {n}: {case:?}"
        );
        let reference = &exact.state[n * state..(n + 1) * state];
        let yardstick: Vec<f32> = (unfused.state[n * state..(n + 1) * state].iter())
            .map(|x| case.state_dtype.round(*x as f32))
            .collect();
        let found = &output.states.values[slot * state..(slot + 1) * state];
        let found = compare(found, reference).rms_ratio;
        // A few tokens have no error to speak of in the chain either.
        let allowed = compare(&yardstick, reference).rms_ratio.max(1e-5);
        assert!(
            found <= (UNFUSED_SLACK * allowed).max(floor),
            "state {n}: {found:.2e}, unfused {allowed:.2e}: {case:?}"
        );
    }
    for (i, (before, after)) in untouched.iter().zip(&output.pools).enumerate() {
        let size = before.len() / case.pool();
        for slot in (0..case.pool()).filter(|slot| !own[*slot]) {
            let bytes = slot * size..(slot + 1) * size;
            // Slots of sequences without tokens, new or not, are among them.
            assert!(
                before[bytes.clone()] == after[bytes],
                "slot {slot} of pool {i}: {case:?}"
            );
        }
    }
    println!("y: {found:.2e}, unfused {allowed:.2e}");
}

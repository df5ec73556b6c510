//! What the simulator can tell of decode beyond its results: the same bits and no finding in every order of waves, the
//! bytes that are moved, the workgroups that move them, and that slots which make no sense lead nowhere. On a card there
//! is nothing to ask.

#[path = "common/decode.rs"]
mod cases;
mod common;

use cases::{Case, Data, check_output, run_once, spec};
use common::{context, simulated};
use deltawave::decode::Decode;
use deltawave::runtime::Context;
use deltawave::types::{Dtype, StateLayout};
use deltawave_sim::launch::{Options, WaveOrder};
use deltawave_sim::sanitize::Checks;

/// One test, because the options are those of the whole process.
#[test]
fn every_way_of_execution() {
    let context = context();
    if !simulated(&context) {
        println!("skipped: a card executes in one way");
        return;
    }
    let usual = deltawave_sim::hip::options();
    every_order(&context, usual);
    deltawave_sim::hip::set_options(Options {
        checks: Checks::NONE,
        count: true,
        xccs: 8,
        ..usual
    });
    every_byte_is_moved_once(&context);
    deltawave_sim::hip::set_options(usual);
}

fn every_order(context: &Context, usual: Options) {
    for (layout, state_dtype) in [
        (StateLayout::KeyMajor, Dtype::F32),
        (StateLayout::ValueMajor, Dtype::Bf16),
        (StateLayout::KeyMajor, Dtype::F16),
    ] {
        let case = Case {
            layout,
            state_dtype,
            padding: 0b10,
            ..Case::new(spec(Dtype::Bf16, [1, 2], [96, 48], 3), 3)
        };
        let data = Data::new(&case);
        let expected = run_once(context, &case, &data);
        check_output(&case, &data, &expected);
        for order in [
            WaveOrder::InStep,
            WaveOrder::Seeded(1),
            WaveOrder::Seeded(2),
        ] {
            deltawave_sim::hip::set_options(Options { order, ..usual });
            let other = run_once(context, &case, &data);
            deltawave_sim::hip::set_options(usual);
            assert!(other.bytes() == expected.bytes(), "{order:?}");
        }
    }
}

/// The state once in and once out, everything else once: at most a twentieth more, in lines and over all dies.
fn every_byte_is_moved_once(context: &Context) {
    for (batch, tokens, layout, state_dtype) in [
        (1, 1, StateLayout::KeyMajor, Dtype::F32),
        (8, 1, StateLayout::KeyMajor, Dtype::F32),
        (4, 1, StateLayout::ValueMajor, Dtype::F32),
        (4, 1, StateLayout::KeyMajor, Dtype::Bf16),
        (4, 1, StateLayout::ValueMajor, Dtype::Bf16),
        (4, 1, StateLayout::ValueMajor, Dtype::F16),
        (2, 4, StateLayout::KeyMajor, Dtype::F32),
    ] {
        let case = Case {
            layout,
            state_dtype,
            has_initial: 0xff,
            ..Case::new(spec(Dtype::Bf16, [16, 32], [128, 128], tokens), batch)
        };
        let data = Data::new(&case);
        deltawave_sim::hip::take_counted_launches();
        let output = run_once(context, &case, &data);
        let launches = deltawave_sim::hip::take_counted_launches();
        assert_eq!(launches.len(), 1);
        let plan = Decode::new(context, case.spec, batch).unwrap();
        let kernel = launches[0].kernel().name();
        assert_eq!(kernel, plan.kernel(state_dtype, layout));
        check_output(&case, &data, &output);
        let (rows, heads, dim) = (case.rows(), 32, 128);
        let state = 2 * batch * heads * dim * dim * state_dtype.size();
        // q and k, v and o; g and beta; slots and flags.
        let minimal = state + rows * (2 * 16 + 2 * heads) * dim * 2 + rows * heads * 8 + batch * 5;
        let totals = launches[0].totals();
        let traffic = totals.traffic;
        let [memory, dies] = [traffic.read_bytes, traffic.l2_fill_bytes]
            .map(|read| read + traffic.write_bytes)
            .map(|bytes| bytes as f64 / minimal as f64);
        let groups = plan.workgroups();
        println!(
            "batch {batch}, {tokens} tokens, {layout:?}, {state_dtype}: {memory:.4} of the minimal bytes, {dies:.4} into and out of the dies, \
             {groups} workgroups, {} instructions for a token of a head",
            totals.wave_instructions / (rows * heads) as u64,
        );
        assert!(
            (0.99..1.05).contains(&memory) && dies < 1.05,
            "{memory} {dies}"
        );
        assert!(batch < 4 || groups >= 304, "{groups} workgroups");
    }
}

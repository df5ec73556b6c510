//! What the simulator can tell of the convolution beyond its results: the same bits and no finding in every order of
//! waves, the bytes that are moved, and that lengths which make no sense lead nowhere. On a card there is nothing to ask.

#[path = "common/conv.rs"]
mod cases;
mod common;

use cases::{Case, Data, Entry, Layout, check_output, run, spec};
use common::{context, simulated};
use deltawave::conv::Conv;
use deltawave::conv::{ConvInput, ConvSpec, ConvState, ConvStateLayout, ConvTensors};
use deltawave::runtime::Context;
use deltawave::types::Dtype;
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
    // Sequences that overlap may race for rows and slots.
    deltawave_sim::hip::set_options(Options {
        checks: Checks {
            races: false,
            ..usual.checks
        },
        ..usual
    });
    senseless_lengths_stay_within_bounds(&context);
    deltawave_sim::hip::set_options(Options {
        checks: Checks::NONE,
        count: true,
        xccs: 8,
        ..usual
    });
    few_bytes_are_moved(&context);
    deltawave_sim::hip::set_options(usual);
}

/// A state that were read by one workgroup and written by another would show here.
fn every_order(context: &Context, usual: Options) {
    use ConvStateLayout::{ChannelMajor, TokenMajor};
    for (state_layout, layout, entry, qk_l2norm, key_dim) in [
        (ChannelMajor, Layout::Flat, Entry::Host, false, 96),
        (TokenMajor, Layout::Interleaved, Entry::Device, false, 96),
        // Norms of rows that are whole, and of such that are not.
        (ChannelMajor, Layout::Flat, Entry::Device, true, 136),
        (TokenMajor, Layout::Interleaved, Entry::Host, true, 20),
    ] {
        let spec = ConvSpec {
            qk_l2norm,
            ..spec(Dtype::Bf16, [2, 4], [key_dim, 128], 4)
        };
        let case = Case {
            state_layout,
            layout,
            entry,
            padding: 0b10,
            has_initial: 0b1_1110,
            ..Case::new(spec, &[70, 3, 2, 1, 9])
        };
        let data = Data::new(&case);
        let expected = run(context, &case, &data);
        check_output(&case, &data, &expected);
        for order in [
            WaveOrder::InStep,
            WaveOrder::Seeded(1),
            WaveOrder::Seeded(2),
        ] {
            deltawave_sim::hip::set_options(Options { order, ..usual });
            let other = run(context, &case, &data);
            deltawave_sim::hip::set_options(usual);
            assert!(
                other.y.bytes == expected.y.bytes && other.pool == expected.pool,
                "{order:?}"
            );
        }
    }
}

/// x once, q, k and v once, in one launch: at most a tenth more, in lines and over all dies.
fn few_bytes_are_moved(context: &Context) {
    for (heads, key_dim, layout, qk_l2norm, lengths) in [
        ([16, 32], 128, Layout::Flat, false, vec![2048]),
        ([16, 32], 128, Layout::Interleaved, false, vec![700, 900]),
        ([2, 4], 128, Layout::Flat, false, vec![4096]),
        ([16, 32], 128, Layout::Flat, true, vec![1024]),
        ([6, 6], 96, Layout::Flat, true, vec![1024]),
    ] {
        let spec = ConvSpec {
            qk_l2norm,
            ..spec(Dtype::Bf16, heads, [key_dim, 128], 4)
        };
        let case = Case {
            layout,
            ..Case::new(spec, &lengths)
        };
        let data = Data::new(&case);
        deltawave_sim::hip::take_counted_launches();
        let output = run(context, &case, &data);
        let launches = deltawave_sim::hip::take_counted_launches();
        assert_eq!(launches.len(), 1);
        check_output(&case, &data, &output);
        let channels = case.spec.total_channels();
        let minimal = 2 * channels * (2 * case.tokens() + case.spec.width);
        let traffic = launches[0].totals().traffic;
        let [unique, filled] = [traffic.unique_bytes, traffic.l2_fill_bytes]
            .map(|bytes| bytes as f64 / minimal as f64);
        println!(
            "{heads:?}, {layout:?}, norms {qk_l2norm}: {unique:.4} of the minimal bytes, {filled:.4} into the dies"
        );
        assert!(
            (0.99..1.1).contains(&unique) && filled < 1.1,
            "{unique} {filled}"
        );
    }
}

/// Lengths on the device that make no sense lead nowhere: nothing is written outside of the outputs and the slots.
fn senseless_lengths_stay_within_bounds(context: &Context) {
    use ConvStateLayout::{ChannelMajor, TokenMajor};
    // Norms of rows that are not whole are computed channel by channel.
    for (key_dim, qk_l2norm, layout) in [(8, false, ChannelMajor), (12, true, TokenMajor)] {
        let spec = ConvSpec {
            qk_l2norm,
            ..spec(Dtype::Bf16, [1, 1], [key_dim, 16], 4)
        };
        senseless_lengths_of(context, &spec, layout);
    }
}

fn senseless_lengths_of(context: &Context, s: &ConvSpec, layout: ConvStateLayout) {
    let stream = context.stream().unwrap();
    let (tokens, channels, key_dim) = (200, s.total_channels(), s.heads.key_dim);
    let x = context
        .upload(&vec![half::bf16::ONE; tokens * channels])
        .unwrap();
    let weight = context
        .upload(&vec![half::bf16::ONE; channels * 4])
        .unwrap();
    let mut pool = context
        .upload(&vec![half::bf16::ONE; 3 * channels * 3])
        .unwrap();
    let mut outs =
        [key_dim, key_dim, 16].map(|n| context.upload(&vec![half::bf16::ONE; tokens * n]).unwrap());
    let plan = Conv::device(context, *s, tokens, 3).unwrap();
    let shape = match layout {
        ConvStateLayout::ChannelMajor => [3, channels, 3],
        ConvStateLayout::TokenMajor => [3, 3, channels],
    };
    for lengths in [
        [i64::MIN, i64::MAX, -5, 1 << 40],
        [50, 10, 90, 20],
        [7, 1 << 33, 3, 2],
        [90, 90, 90, 0],
        [0, 200, 0, 200],
        [0, 200, 0, 0],
    ] {
        let lengths = context.upload(&lengths).unwrap();
        let x = x.tensor([tokens, channels]).unwrap();
        let [q, k, v] = &mut outs;
        let tensors = ConvTensors {
            cu_seqlens: Some((&lengths).into()),
            x: ConvInput::flat(&x, s).unwrap(),
            weight: weight.tensor([channels, 4]).unwrap(),
            bias: None,
            state: Some(ConvState {
                tensor: pool.tensor_mut(shape).unwrap(),
                layout,
                has_initial_state: None,
            }),
            slots: None,
            q: q.tensor_mut([tokens, 1, key_dim]).unwrap().into(),
            k: k.tensor_mut([tokens, 1, key_dim]).unwrap().into(),
            v: v.tensor_mut([tokens, 1, 16]).unwrap().into(),
            gates: None,
        };
        plan.launch(&stream, &tensors).unwrap();
        stream.synchronize().unwrap();
    }
}

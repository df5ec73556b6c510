//! A convolution of sequences that ranks share: each rank sends the last rows of its fragments, and a fragment's state is the
//! rows before it. Outputs and final states have the bits of the whole.

use deltawave::conv::{Conv, ConvInput, ConvSpec, ConvState, ConvStateLayout, ConvTensors};
use deltawave::prefill::{Fragment, RankLayout};
use deltawave::types::Dtype;
use deltawave_lab::inputs::random_normal;
use half::bf16;

use crate::common::context;

const HEADS: [usize; 2] = [1, 2];
const DIMS: [usize; 2] = [16, 8];

fn spec(width: usize) -> ConvSpec {
    ConvSpec {
        width,
        ..ConvSpec::new(HEADS[0], HEADS[1], DIMS[0], DIMS[1])
    }
}

fn numbers(count: usize, seed: u64) -> Vec<bf16> {
    let all = random_normal(Dtype::Bf16, "numbers", count, seed).values;
    all.into_iter().map(bf16::from_f32).collect()
}

/// q, k and v of each row, and the states after the sequences, from the states before them.
fn run(
    width: usize,
    lengths: &[usize],
    x: &[bf16],
    states: &[bf16],
) -> (Vec<[Vec<bf16>; 3]>, Vec<bf16>) {
    let (context, spec) = (context(), spec(width));
    let stream = context.stream().expect("a stream");
    let channels = spec.total_channels();
    let tokens = x.len() / channels;
    let mut cu_seqlens = vec![0];
    for n in lengths {
        cu_seqlens.push(cu_seqlens[cu_seqlens.len() - 1] + *n as i32);
    }
    let plan = Conv::packed(&context, spec, &cu_seqlens, tokens).expect("a plan");
    let up = |values: &[bf16]| context.upload(values).expect("memory");
    let weight = numbers(channels * width, 7);
    let (x, weight, mut state) = (up(x), up(&weight), up(states));
    let widths = [HEADS[0] * DIMS[0], HEADS[0] * DIMS[0], HEADS[1] * DIMS[1]];
    let [mut q, mut k, mut v] = widths.map(|w| up(&vec![bf16::NAN; tokens * w]));
    let tensors = ConvTensors {
        cu_seqlens: None,
        x: ConvInput::flat(&x.tensor([tokens, channels]).expect("a view"), &spec).expect("rows"),
        weight: weight.tensor([channels, width]).expect("a view"),
        bias: None,
        state: Some(ConvState {
            tensor: (state.tensor_mut([lengths.len(), channels, width - 1])).expect("a view"),
            layout: ConvStateLayout::ChannelMajor,
            has_initial_state: None,
        }),
        slots: None,
        q: (q.tensor_mut([tokens, HEADS[0], DIMS[0]]).expect("a view")).into(),
        k: (k.tensor_mut([tokens, HEADS[0], DIMS[0]]).expect("a view")).into(),
        v: (v.tensor_mut([tokens, HEADS[1], DIMS[1]]).expect("a view")).into(),
        gates: None,
    };
    plan.launch(&stream, &tensors).expect("a launch");
    let [q, k, v] = [q, k, v].map(|t| t.download(&stream).expect("a copy"));
    let row = |all: &[bf16], w: usize, n: usize| all[n * w..(n + 1) * w].to_vec();
    let rows = (0..tokens).map(|n| {
        [
            row(&q, widths[0], n),
            row(&k, widths[1], n),
            row(&v, widths[2], n),
        ]
    });
    (rows.collect(), state.download(&stream).expect("a copy"))
}

/// The rows of a rank, fragment by fragment.
fn rows<'a>(
    layout: &RankLayout,
    rank: usize,
    starts: &'a [usize],
) -> impl Iterator<Item = usize> + use<'a> {
    let fragments = layout.fragments(rank).to_vec();
    let begin = |f: &Fragment| starts[f.sequence] + f.begin;
    fragments
        .into_iter()
        .flat_map(move |f| begin(&f)..begin(&f) + f.tokens)
}

fn check(width: usize, layout: &RankLayout) {
    let lengths = layout.lengths();
    let channels = spec(width).total_channels();
    let tokens: usize = lengths.iter().sum();
    let state = channels * (width - 1);
    let x = numbers(tokens * channels, 3);
    let initial = numbers(lengths.len() * state, 4);
    let (wanted, wanted_states) = run(width, lengths, &x, &initial);
    let starts: Vec<usize> = (lengths.iter())
        .scan(0, |end, n| {
            *end += n;
            Some(*end - n)
        })
        .collect();
    // What each rank sends: a state for each fragment that another follows.
    let slots = layout.tail_slots();
    let mut gathered = vec![bf16::NAN; layout.ranks() * slots * state];
    for rank in 0..layout.ranks() {
        for (f, tail) in layout.fragments(rank).iter().zip(layout.tails(rank)) {
            let followed = f.begin + f.tokens < lengths[f.sequence];
            assert_eq!(tail.sent.is_some(), followed);
            let Some(sent) = tail.sent else { continue };
            assert!(sent < slots && f.tokens >= width - 1);
            let at = (rank * slots + sent) * state;
            let end = starts[f.sequence] + f.begin + f.tokens;
            for c in 0..channels {
                for i in 0..width - 1 {
                    let row = end - (width - 1) + i;
                    gathered[at + c * (width - 1) + i] = x[row * channels + c];
                }
            }
        }
    }
    let mut compared = 0;
    for rank in 0..layout.ranks() {
        let fragments = layout.fragments(rank);
        let own: Vec<usize> = rows(layout, rank, &starts).collect();
        if own.is_empty() {
            continue;
        }
        let of_rows: Vec<bf16> = (own.iter())
            .flat_map(|n| x[n * channels..(n + 1) * channels].to_vec())
            .collect();
        let states = fragments
            .iter()
            .zip(layout.tails(rank))
            .flat_map(|(f, tail)| {
                assert_eq!(tail.before.is_none(), f.begin == 0);
                match tail.before {
                    Some(slot) => &gathered[slot * state..(slot + 1) * state],
                    None => &initial[f.sequence * state..(f.sequence + 1) * state],
                }
            });
        let states: Vec<bf16> = states.copied().collect();
        let tokens: Vec<usize> = fragments.iter().map(|f| f.tokens).collect();
        let (found, last) = run(width, &tokens, &of_rows, &states);
        for (found, n) in found.iter().zip(&own) {
            assert!(found == &wanted[*n], "rank {rank}, row {n} of {layout:?}");
            compared += 1;
        }
        for (i, f) in fragments.iter().enumerate() {
            if f.begin + f.tokens == lengths[f.sequence] {
                let wanted = &wanted_states[f.sequence * state..(f.sequence + 1) * state];
                assert!(
                    last[i * state..(i + 1) * state] == *wanted,
                    "state of {f:?}"
                );
            }
        }
    }
    assert_eq!(compared, tokens);
}

/// Every width; sequences shorter than the width, without tokens, and ranks without any.
#[test]
fn layouts_have_the_bits_of_the_whole() {
    let lengths = [330, 0, 2, 64, 150, 1];
    for width in 2..=4 {
        for ranks in [1, 2, 3, 9] {
            for layout in [
                RankLayout::contiguous(&lengths, 64, ranks),
                RankLayout::zigzag(&lengths, 64, ranks),
                RankLayout::packed(&lengths, 64, ranks),
            ] {
                check(width, &layout.expect("a layout"));
            }
        }
    }
    let f = |sequence, begin, tokens| Fragment {
        sequence,
        begin,
        tokens,
    };
    let fragments = vec![
        vec![f(0, 128, 64), f(1, 64, 3), f(0, 0, 64)],
        vec![],
        vec![f(1, 0, 64), f(0, 192, 1), f(0, 64, 64)],
    ];
    let layout = RankLayout::new(&[193, 67], 64, fragments).expect("a layout");
    assert_eq!(layout.tail_slots(), 2);
    let of_rank = |rank| -> Vec<_> {
        let tails = layout.tails(rank).into_iter();
        tails.map(|t| (t.sent, t.before)).collect()
    };
    assert_eq!(
        of_rank(0),
        [(Some(0), Some(5)), (None, Some(4)), (Some(1), None)]
    );
    assert_eq!(
        of_rank(2),
        [(Some(0), None), (None, Some(0)), (Some(1), Some(1))]
    );
    check(4, &layout);
    // Nothing is sent where no sequence is on two fragments.
    let apart = RankLayout::packed(&[64, 64], 64, 2).expect("a layout");
    assert_eq!(apart.tail_slots(), 0);
}

//! What prefill costs the host beyond the runtime's calls: on a runtime whose calls do nothing at once.
//!
//! `cargo bench --bench host`. Wanted are launches below 5 microseconds, and plans of 256 sequences below 20; a plan is
//! made once for all layers of a model.

#[path = "../tests/null_runtime/mod.rs"]
#[allow(dead_code, reason = "shared with tests/host_cost.rs")]
mod null_runtime;

use std::hint::black_box;

use criterion::{Criterion, criterion_group, criterion_main};
use deltawave::prefill::Prefill;
use deltawave::workspace::Workspace;

use null_runtime::{Layer, Shape};

/// Key and value heads of Qwen3.5-35B-A3B, and what one of eight GPUs has of them.
const WHOLE: [usize; 2] = [16, 32];
const SHARED: [usize; 2] = [2, 4];
/// One of each: the most room for segments.
const FEWEST: [usize; 2] = [1, 1];

/// Lengths of sequences, summed up.
fn summed(lengths: impl Iterator<Item = usize>) -> Vec<i32> {
    let sums = lengths.scan(0, |sum, n| {
        *sum += n as i32;
        Some(*sum)
    });
    [0].into_iter().chain(sums).collect()
}

/// So many sequences of the same length.
fn equal(sequences: usize, tokens: usize) -> Vec<i32> {
    summed((0..sequences).map(|_| tokens))
}

/// One sequence of half the tokens, and others that grow in length in the other half.
fn skewed(sequences: usize, tokens: usize) -> Vec<i32> {
    let (half, others) = (tokens / 2, sequences - 1);
    // Triangular numbers, scaled.
    let sums = (0..=others).map(|n| half + half * n * (n + 1) / (others * (others + 1)));
    [0].into_iter()
        .chain(sums)
        .map(|entry| entry as i32)
        .collect()
}

/// Short sequences, and one in their midst that has so many tokens.
fn one_long(sequences: usize, tokens: usize) -> Vec<i32> {
    summed((0..sequences).map(|n| if n == sequences / 2 { tokens } else { 100 }))
}

/// Lengths up to so many tokens, in no order.
fn mixed(sequences: usize, tokens: usize) -> Vec<i32> {
    // Multiples of the golden ratio are spread evenly.
    let part = |n: usize| (n as u32).wrapping_mul(0x9e37_79b9) as usize;
    summed((0..sequences).map(|n| 1 + ((part(n) * tokens) >> 32)))
}

/// As [`mixed`], and one that is four times as long as the others are at most: where the planner has most to try.
fn mixed_and_long(sequences: usize, tokens: usize) -> Vec<i32> {
    let mut out = mixed(sequences, tokens);
    let end = out[sequences] + 4 * tokens as i32;
    out.push(end);
    out
}

fn host(c: &mut Criterion) {
    let context = null_runtime::context().expect("a build with kernels for gfx942");
    let stream = context.stream().expect("a stream");
    let all = [
        ("equal", WHOLE, equal(1, 8192)),
        ("equal", WHOLE, equal(1, 32768)),
        ("equal", WHOLE, equal(256, 256)),
        ("skewed", WHOLE, skewed(256, 65536)),
        ("one long", WHOLE, one_long(256, 65536)),
        ("mixed", WHOLE, mixed(256, 8192)),
        ("equal", SHARED, equal(256, 8192)),
        ("skewed", SHARED, skewed(256, 1 << 20)),
        ("one long", SHARED, one_long(256, 1 << 20)),
        ("mixed", SHARED, mixed(256, 32768)),
        ("mixed and long", FEWEST, mixed_and_long(255, 32768)),
    ];
    for (lengths, [key_heads, value_heads], cu_seqlens) in all {
        let s = Shape {
            key_heads,
            value_heads,
            tokens: cu_seqlens.last().map_or(0, |&end| end as usize),
            sequences: cu_seqlens.len() - 1,
        };
        let what = format!(
            "{} {lengths} sequences, {} tokens, {value_heads} heads",
            s.sequences, s.tokens
        );
        let plan = || {
            Prefill::packed(&context, s.spec(), black_box(&cu_seqlens), s.tokens).expect("a plan")
        };
        c.bench_function(&format!("plan/{what}"), |b| b.iter(plan));

        let plan = plan();
        let mut layer = Layer::new(&context, s, plan.workspace_bytes()).expect("memory");
        let (tensors, workspace) = layer.parts(true).expect("tensors");
        c.bench_function(&format!("launch/{what}"), |b| {
            b.iter(|| {
                plan.launch(&stream, black_box(&tensors), Workspace::new(workspace))
                    .expect("a launch");
            });
        });

        let plan = Prefill::device(&context, s.spec(), s.tokens, s.sequences).expect("a plan");
        let mut layer = Layer::new(&context, s, plan.workspace_bytes()).expect("memory");
        let lengths = context.upload(&cu_seqlens).expect("memory");
        let (mut tensors, workspace) = layer.parts(true).expect("tensors");
        tensors.cu_seqlens = Some((&lengths).into());
        c.bench_function(&format!("launch, lengths on the device/{what}"), |b| {
            b.iter(|| {
                let workspace = Workspace::new(workspace);
                plan.launch(&stream, black_box(&tensors), workspace)
                    .expect("a launch");
            });
        });
    }
}

criterion_group! {
    name = benches;
    config = Criterion::default().without_plots();
    targets = host
}
criterion_main!(benches);

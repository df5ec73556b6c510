//! What prefill costs the host beyond the runtime's calls: on a runtime whose calls do nothing at once.
//!
//! `cargo bench --bench host`. Wanted are launches below 5 microseconds, and plans of 256 sequences below 20; a plan is
//! made once for all layers of a model.

#[path = "../tests/null_runtime/mod.rs"]
#[allow(dead_code, reason = "shared with tests/host_cost.rs")]
mod null_runtime;

use std::hint::black_box;

use criterion::{Criterion, criterion_group, criterion_main};
use deltawave::prefill::{DevicePrefill, Prefill, Workspace};

use null_runtime::{Layer, Shape};

/// Heads of Qwen3.5-35B-A3B.
const fn shape(tokens: usize, sequences: usize) -> Shape {
    Shape {
        key_heads: 16,
        value_heads: 32,
        tokens,
        sequences,
    }
}

/// One sequence of half the tokens, and others that grow in length in the other half.
fn skewed(shape: Shape) -> Vec<i32> {
    let (half, others) = (shape.tokens / 2, shape.sequences - 1);
    // Triangular numbers, scaled.
    let sums = (0..=others).map(|n| half + half * n * (n + 1) / (others * (others + 1)));
    let entries = [0].into_iter().chain(sums);
    entries.map(|entry| entry as i32).collect()
}

fn host(c: &mut Criterion) {
    let context = null_runtime::context().expect("a build with kernels for gfx942");
    let stream = context.stream().expect("a stream");
    let equal = [shape(8192, 1), shape(32768, 1), shape(65536, 256)];
    let equal = equal.map(|s| (s, s.cu_seqlens(), "equal"));
    let long_and_short = shape(65536, 256);
    let all = equal
        .into_iter()
        .chain([(long_and_short, skewed(long_and_short), "skewed")]);
    for (s, cu_seqlens, lengths) in all {
        let what = format!("{} {lengths} sequences, {} tokens", s.sequences, s.tokens);
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

        let plan = DevicePrefill::new(&context, s.spec(), s.tokens, s.sequences).expect("a plan");
        let mut layer = Layer::new(&context, s, plan.workspace_bytes()).expect("memory");
        let lengths = context.upload(&cu_seqlens).expect("memory");
        let (tensors, workspace) = layer.parts(true).expect("tensors");
        c.bench_function(&format!("launch, lengths on the device/{what}"), |b| {
            b.iter(|| {
                let workspace = Workspace::new(workspace);
                plan.launch(&stream, &lengths, black_box(&tensors), workspace)
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

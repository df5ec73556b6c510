//! Prefill on the device against the f64 oracle.

mod common;

use common::{Case, Entry, GateKind, Layout, StateKind, check, context, spec};
use deltawave::inputs::Gates;
use deltawave::types::{Dtype, HeadMap, StateLayout};

#[test]
fn one_chunk() {
    let j = check(
        &context(),
        &Case::new(spec(Dtype::Bf16, 1, 1, 128, 128), &[64]),
    );
    println!("{j:?}");
}

#[test]
fn several_chunks_of_several_heads() {
    let j = check(
        &context(),
        &Case::new(spec(Dtype::Bf16, 2, 4, 128, 128), &[200, 64, 0, 1, 63, 65]),
    );
    println!("{j:?}");
}

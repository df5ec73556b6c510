//! The backward of a prefill against the f64 oracle.

use deltawave::types::{Dtype, StateLayout};
use deltawave_lab::inputs::Gates;

use crate::common::backward::check_backward;
use crate::common::{Case, StateKind, context, spec};

const F32_STATE: StateKind = StateKind {
    dtype: Dtype::F32,
    layout: StateLayout::KeyMajor,
    pad: 0,
};

#[test]
fn backward_smallest() {
    let mut case = Case::new(spec(Dtype::Bf16, 1, 1, 64, 16), &[16]);
    case.initial = Some(F32_STATE);
    check_backward(&context(), &case, 1.15, 0.0);
}

#[test]
fn backward_of_every_kind_of_gates() {
    for gates in [
        Gates::Normal,
        Gates::Mixed,
        Gates::Zero,
        Gates::Strong,
        Gates::Model,
    ] {
        let mut case = Case::new(spec(Dtype::Bf16, 2, 4, 128, 128), &[200, 64, 313]);
        case.initial = Some(F32_STATE);
        case.gates = gates;
        check_backward(&context(), &case, 9.0, 0.0);
    }
}

//! Batches on views of one's own making.

use deltawave::gates::Gating;
use deltawave::prefill::{Prefill, PrefillTensors};
use deltawave::runtime::Context;
use deltawave::state::StateMut;
use deltawave::state::States;
use deltawave::tensor::{TokenScalars, Tokens, dense_strides};
use deltawave::types::{Dtype, StateLayout};
use deltawave::workspace::Workspace;
use deltawave_lab::inputs::Tensor as HostTensor;

use super::case::state_shape;
use super::{Case, Output};

/// Token tensors of one's own making.
pub struct Views<'a> {
    pub q: Tokens<'a>,
    pub k: Tokens<'a>,
    pub v: Tokens<'a>,
    pub g: Option<TokenScalars<'a>>,
    pub beta: Option<TokenScalars<'a>>,
}

/// Launches a packed batch on views, with a dense poisoned output and an f32 final state.
pub fn run_views(context: &Context, case: &Case, views: Views<'_>) -> Output {
    let s = &case.spec;
    let stream = context.stream().expect("a stream");
    let plan = Prefill::packed(context, *s, &case.cu_seqlens(), case.tokens()).expect("a plan");
    let shape = [case.tokens(), s.heads.value, s.heads.value_dim];
    let elements: usize = shape.iter().product();
    let poison = |bytes: usize| context.upload(&vec![0xffu8; bytes]).expect("memory");
    let mut o = poison(elements * s.dtype.size());
    let states = state_shape(case, StateLayout::KeyMajor);
    let mut last = poison(states.iter().product::<usize>() * 4);
    let mut workspace = poison(plan.workspace_bytes());
    let tensors = PrefillTensors {
        cu_seqlens: None,
        q: views.q,
        k: views.k,
        v: views.v,
        gating: Gating::Given {
            g: views.g,
            beta: views.beta,
        },
        states: States::Separate {
            initial: None,
            last: Some(StateMut {
                tensor: last
                    .tensor_of_mut(Dtype::F32, states, dense_strides(states), 0)
                    .expect("in range"),
                layout: StateLayout::KeyMajor,
            }),
        },
        o: o.tensor_of_mut(s.dtype, shape, dense_strides(shape), 0)
            .expect("in range")
            .into(),
        snapshots: None,
    };
    plan.launch(&stream, &tensors, Workspace::new(&mut workspace))
        .expect("a launch");
    let o = o.download(&stream).expect("a copy");
    let last = last.download(&stream).expect("a copy");
    Output {
        o: HostTensor::from_bytes(s.dtype, o).values,
        state: Some(HostTensor::from_bytes(Dtype::F32, last).values),
    }
}

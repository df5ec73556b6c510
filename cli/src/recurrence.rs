//! The inputs of a recurrence, which prefill and decode share.

use deltawave::gates::Gating;
use deltawave::types::{Dtype, HeadMap};
use deltawave_lab::inputs::Tensor as HostTensor;
use deltawave_lab::oracle::{Beta, Problem, gates};
use deltawave_lab::safetensors_io::{FileBeta, FileGate, PrefillFile};

use crate::device::{Fallible, Rows, Slots, Views};

/// Adds q, k, v and the gates, raw or not. The kernels take both gates raw or neither: a raw one beside one that is not
/// becomes f32 here.
pub fn inputs<'a>(slots: Slots<'a>, data: &'a PrefillFile, neg_eigval: bool) -> Slots<'a> {
    let slots = slots.input("q", &data.q);
    let slots = slots.input("k", &data.k).input("v", &data.v);
    if let (FileGate::Raw { a, a_log, dt_bias }, FileBeta::Logits(b)) = (&data.gate, &data.beta) {
        let slots = slots.input("a", a).input("b", b).input("a_log", a_log);
        return slots.input_some("dt_bias", dt_bias.as_ref());
    }
    let f32s = |values: Vec<f64>| {
        let values = values.into_iter().map(|x| x as f32);
        HostTensor::new(Dtype::F32, values.collect())
    };
    let slots = match &data.gate {
        FileGate::None => slots,
        FileGate::Log(g) => slots.input("g", g),
        FileGate::Raw { .. } => slots.made("g", f32s(data.problem().log_gates())),
    };
    match &data.beta {
        FileBeta::One => slots,
        FileBeta::Given(beta) => slots.input("beta", beta),
        FileBeta::Logits(b) => {
            let beta = |&b: &f32| gates::beta(f64::from(b), neg_eigval);
            slots.made("beta", f32s(b.values.iter().map(beta).collect()))
        }
    }
}

/// The same operation for the reference.
pub fn problem(
    data: &PrefillFile,
    head_map: HeadMap,
    scale: Option<f32>,
    l2_norm: bool,
    neg_eigval: bool,
) -> Problem<'_> {
    let mut problem = data.problem();
    if let Beta::Logits {
        allow_neg_eigval, ..
    } = &mut problem.beta
    {
        *allow_neg_eigval = neg_eigval;
    }
    Problem {
        head_map,
        scale: scale.map(f64::from),
        l2_norm,
        ..problem
    }
}

/// The gates that [`inputs`] added.
pub fn gating<'a>(
    views: &mut Views<'a>,
    rows: Rows,
    heads: usize,
    neg_eigval: bool,
) -> Fallible<Gating<'a>> {
    let mut scalars = |name| {
        let has = views.has(name);
        has.then(|| views.scalars(name, rows, heads)).transpose()
    };
    let (g, beta) = (scalars("g")?, scalars("beta")?);
    Ok(match (scalars("a")?, scalars("b")?) {
        (Some(a), Some(b)) => Gating::Raw {
            a,
            b,
            a_log: views.get("a_log", [heads])?,
            dt_bias: views.get_some("dt_bias", [heads])?,
            allow_neg_eigval: neg_eigval,
        },
        _ => Gating::Given { g, beta },
    })
}

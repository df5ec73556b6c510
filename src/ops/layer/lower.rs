//! Derives the tensors of a layer's stages from the layer's tensors, and checks all of them before anything is
//! enqueued.

use std::ffi::c_void;
use std::ops::Range;

use super::LayerTensors;
use super::stages::{LaunchArguments, Stages};
use crate::alias::{self, Span};
use crate::batch::PerSequence;
use crate::check;
use crate::conv::{self, ConvInput, ConvState, ConvTensors};
use crate::decode::DecodeTensors;
use crate::error::{ArgumentError, ArgumentKind, Error, Result};
use crate::gate::Gate;
use crate::gates::Gating;
use crate::norm::{self, GatedNorm};
use crate::prefill::{self, PrefillTensors};
use crate::runtime::Stream;
use crate::state::{HostSlots, StatePool, States};
use crate::tensor::{Batch, Tensor, TensorMut, TokenScalars, Tokens, TokensMut, dense_strides};
use crate::types::Dtype;
use crate::workspace::WORKSPACE_ALIGN;

/// Offsets of q, k, v, g and beta in the workspace, and their total size, in bytes.
pub(super) struct Activations {
    offsets: [usize; 5],
    pub(super) bytes: usize,
}

/// Sequences of a batch that decode or prefill computes, and their rows.
struct SubBatch {
    rows: Range<usize>,
    sequences: Range<usize>,
}

/// Outputs of the convolution in the workspace, for all rows.
struct Convolved<'a> {
    qkv: [Tensor<'a, 3>; 3],
    /// g and beta, if a or b lies in blocks, which the recurrences cannot read.
    gates: Option<[Tensor<'a, 2>; 2]>,
}

impl Stages {
    /// Layout of the convolution's outputs in the workspace.
    pub(super) fn activations(&self) -> Activations {
        let element = self.spec.dtype.size();
        let [q, k, v] = self.spec.conv().channels().map(|n| n * element);
        let gate = self.spec.heads.value * Dtype::F32.size();
        let mut bytes = 0;
        let offsets = [q, k, v, gate, gate].map(|row| {
            let offset = bytes;
            bytes += (self.tokens * row).next_multiple_of(WORKSPACE_ALIGN);
            offset
        });
        Activations { offsets, bytes }
    }

    /// Checks all stages and returns their launch arguments. `cu_seqlens`: lengths that the host has checked, or null if
    /// only the device knows them.
    pub(super) fn lower(
        &self,
        stream: &Stream,
        x: &LayerTensors<'_>,
        saved: Option<&TokensMut<'_>>,
        cu_seqlens: *const i32,
        activations: *mut c_void,
        prefill: Option<impl FnOnce(&PrefillTensors<'_>) -> Result<prefill::LaunchArguments>>,
    ) -> Result<LaunchArguments> {
        self.check(x, saved)?;
        let o = saved.map(|TokensMut(o)| o);
        let in_blocks = |t: &TokenScalars<'_>| t.0.shape[3] > 1;
        let convolved = self.convolved(activations, in_blocks(&x.a) || in_blocks(&x.b));
        let conv = self.lower_conv(stream, x, cu_seqlens, &convolved)?;
        let norm = self.lower_norm(stream, x, o, x.z.clone(), 0..self.tokens)?;
        let mut lowered = LaunchArguments {
            conv,
            decode: None,
            prefill: None,
            norm: Some(norm),
        };
        if let Some(plan) = &self.decode {
            let sub_batch = SubBatch {
                rows: 0..self.decodes,
                sequences: 0..self.decodes,
            };
            let tensors = decode_tensors(self.recurrence(x, o, &convolved, &sub_batch));
            let mut decode = renamed(plan.lower(stream, &tensors), &RECURRENCE)?;
            let norm_of = |rows: Range<usize>| {
                self.lower_norm(stream, x, o, z_rows(&x.z, rows.clone()), rows)
            };
            if o.is_none() && plan.fuse(&mut decode, &norm_of(sub_batch.rows)?) {
                let rest = self.decodes..self.tokens;
                lowered.norm = (!rest.is_empty()).then(|| norm_of(rest)).transpose()?;
            }
            lowered.decode = Some(decode);
        }
        if let Some(lower) = prefill {
            let sub_batch = SubBatch {
                rows: self.decodes..self.tokens,
                sequences: self.decodes..self.sequences,
            };
            let tensors = prefill_tensors(self.recurrence(x, o, &convolved, &sub_batch));
            lowered.prefill = Some(renamed(lower(&tensors), &RECURRENCE)?);
        }
        Ok(lowered)
    }

    /// Checks that no output of the layer shares memory with another argument. Stages may work in place: o and the norm
    /// both use y.
    pub(super) fn check_overlaps(
        x: &LayerTensors<'_>,
        saved: Option<&TokensMut<'_>>,
        workspace: Span<'_>,
    ) -> Result<()> {
        let (weights, states) = (&x.weights, &x.states);
        let outputs = [
            Span::of("y", &x.y.0.0),
            Span::of("states.conv", &states.conv.0),
            Span::of("states.recurrent", &states.recurrent.0),
            Span::maybe("o", saved.map(|o| &o.0.0)),
            workspace,
        ];
        let has_initial_state = states.has_initial_state.as_ref();
        let inputs = [
            Span::of("x.q", &x.x.q),
            Span::of("x.k", &x.x.k),
            Span::of("x.v", &x.x.v),
            Span::of("z", &x.z),
            Span::of("a", &x.a.0),
            Span::of("b", &x.b.0),
            Span::of("weights.conv", &weights.conv),
            Span::maybe("weights.conv_bias", weights.conv_bias.as_ref()),
            Span::of("weights.a_log", &weights.a_log),
            Span::maybe("weights.dt_bias", weights.dt_bias.as_ref()),
            Span::maybe("weights.norm", weights.norm.as_ref()),
            Span::numbers("states.slots", states.slots.as_ref()),
            Span::numbers("states.has_initial_state", has_initial_state),
            Span::lengths(x.cu_seqlens.as_ref()),
        ];
        Ok(alias::check(&outputs, &inputs, &[])?)
    }

    /// Checks sizes of tensors that are split here.
    fn check(&self, x: &LayerTensors<'_>, saved: Option<&TokensMut<'_>>) -> Result<()> {
        let batch = Batch::Packed {
            tokens: self.tokens,
        };
        let (heads, dim) = (self.spec.heads.value, self.spec.heads.value_dim);
        let any = [Dtype::F32, Dtype::Bf16, Dtype::F16];
        check::output_tokens("y", &x.y.0, batch, heads, dim, &[self.spec.dtype])?;
        if let Some(TokensMut(o)) = saved {
            check::output_tokens("o", o, batch, heads, dim, &[self.spec.dtype])?;
            check::device("o", &o.0.owner, &self.context)?;
        }
        // With heads in blocks, only the convolution reads a and b, and checks them.
        for (name, t) in [("a", &x.a), ("b", &x.b)] {
            if t.0.shape[3] <= 1 {
                check::scalars(name, t, batch, heads, &any)?;
            }
        }
        match (&self.slots, &x.states.slots) {
            (Some(own), given) => {
                let outcome = own.check([given.is_some(), false], x.states.recurrent.0.shape[0]);
                renamed(outcome.map_err(Error::from), &[("slots", "states.slots")])?;
            }
            (None, Some(slots)) => {
                slots.checked("states.slots", self.sequences)?;
            }
            (None, None) => {
                let (slots, least) = (x.states.recurrent.0.shape[0], self.sequences);
                check::ensure(slots >= least, || {
                    let was = format!("{slots} slots");
                    let allowed = format!("one for each of the {least} sequences");
                    let argument = "states.recurrent";
                    ArgumentError::new(argument, ArgumentKind::Shape, was, allowed)
                })?;
            }
        }
        let states = &x.states;
        let (own, other) = (states.conv.0.shape[0], states.recurrent.0.shape[0]);
        check::ensure(own == other, || {
            let was = format!("{own} slots");
            let allowed = format!("{other} slots, as states.recurrent has");
            ArgumentError::new("states.conv", ArgumentKind::Shape, was, allowed)
        })?;
        if let Some(has) = &x.states.has_initial_state {
            has.checked("states.has_initial_state", self.sequences)?;
        }
        Ok(())
    }

    /// Slots of all sequences, from the plan or the launch, if either has any.
    fn slots<'a>(&'a self, x: &LayerTensors<'a>) -> Option<PerSequence<'a, i32>> {
        let own = self.slots.as_ref().map(HostSlots::read);
        own.or_else(|| x.states.slots.clone())
    }

    fn convolved<'a>(&self, address: *mut c_void, gates: bool) -> Convolved<'a> {
        let [q, k, v, g, beta] = self.activations().offsets;
        let (dtype, heads) = (self.spec.dtype, &self.spec.heads);
        let of_keys = [self.tokens, heads.key, heads.key_dim];
        let of_values = [self.tokens, heads.value, heads.value_dim];
        let of_heads = [self.tokens, heads.value];
        let at = |offset: usize| address.wrapping_byte_add(offset);
        let rows = |(offset, shape)| {
            // SAFETY: the workspace holds the tensor; whoever made the workspace vouched for its memory.
            unsafe { Tensor::from_raw(at(offset), dtype, shape, dense_strides(shape)) }
        };
        let scalars = |offset| {
            // SAFETY: as above.
            unsafe { Tensor::from_raw(at(offset), Dtype::F32, of_heads, dense_strides(of_heads)) }
        };
        Convolved {
            qkv: [(q, of_keys), (k, of_keys), (v, of_values)].map(rows),
            gates: gates.then(|| [g, beta].map(scalars)),
        }
    }

    fn lower_conv(
        &self,
        stream: &Stream,
        x: &LayerTensors<'_>,
        cu_seqlens: *const i32,
        convolved: &Convolved<'_>,
    ) -> Result<conv::LaunchArguments> {
        let [q, k, v] = (convolved.qkv.each_ref()).map(|t| TensorMut(t.clone()).into());
        let gates = convolved.gates.as_ref().map(|[g, beta]| Gate {
            a: x.a.clone(),
            b: x.b.clone(),
            a_log: x.weights.a_log.clone(),
            dt_bias: x.weights.dt_bias.clone(),
            allow_neg_eigval: self.spec.allow_neg_eigval,
            g: TensorMut(g.clone()).into(),
            beta: TensorMut(beta.clone()).into(),
        });
        let tensors = ConvTensors {
            cu_seqlens: None,
            x: ConvInput {
                q: x.x.q.clone(),
                k: x.x.k.clone(),
                v: x.x.v.clone(),
            },
            weight: x.weights.conv.clone(),
            bias: x.weights.conv_bias.clone(),
            state: Some(ConvState {
                tensor: TensorMut(x.states.conv.0.clone()),
                layout: x.states.conv_layout,
                has_initial_state: x.states.has_initial_state.clone(),
            }),
            slots: self.slots(x),
            q,
            k,
            v,
            gates,
        };
        let names = [
            ("weight", "weights.conv"),
            ("bias", "weights.conv_bias"),
            ("state", "states.conv"),
            ("slots", "states.slots"),
            ("has_initial_state", "states.has_initial_state"),
            ("a_log", "weights.a_log"),
            ("dt_bias", "weights.dt_bias"),
        ];
        renamed(
            self.conv
                .lower(stream, (cu_seqlens.cast(), false), &tensors),
            &names,
        )
    }

    /// Launch arguments of the norm of some rows.
    fn lower_norm(
        &self,
        stream: &Stream,
        x: &LayerTensors<'_>,
        o: Option<&Tokens<'_>>,
        z: Tensor<'_, 3>,
        rows: Range<usize>,
    ) -> Result<norm::LaunchArguments> {
        let norm = GatedNorm {
            x: o.map(|o| Tokens(o.0.token_rows(rows.clone()), false)),
            z,
            weight: x.weights.norm.clone(),
            eps: self.spec.eps,
            gate: self.spec.gate,
            y: TokensMut(Tokens(x.y.0.0.token_rows(rows), false)),
        };
        renamed(
            norm.lower(&self.context, stream),
            &[("weight", "weights.norm")],
        )
    }

    fn recurrence<'a>(
        &'a self,
        x: &LayerTensors<'a>,
        o: Option<&Tokens<'a>>,
        convolved: &Convolved<'a>,
        sub_batch: &SubBatch,
    ) -> Recurrence<'a> {
        let rows = |t: &Tensor<'a, 4>| t.token_rows(sub_batch.rows.clone());
        let [q, k, v] =
            (convolved.qkv.each_ref()).map(|t| Tokens(rows(&Tokens::from(t.clone()).0), false));
        let scalars = |t: &TokenScalars<'a>| TokenScalars(rows(&t.0), false);
        let gating = match &convolved.gates {
            Some(gates) => {
                let [g, beta] = (gates.each_ref()).map(|t| Some(scalars(&t.clone().into())));
                Gating::Given { g, beta }
            }
            None => Gating::Raw {
                a: scalars(&x.a),
                b: scalars(&x.b),
                a_log: x.weights.a_log.clone(),
                dt_bias: x.weights.dt_bias.clone(),
                allow_neg_eigval: self.spec.allow_neg_eigval,
            },
        };
        let states = &x.states;
        // Without slots, prefill would give its sequences the slots from 0 on again.
        let slots = self
            .slots(x)
            .or(self.counted.as_ref().map(PerSequence::from));
        let slots = slots.map(|slots| slots.part(sub_batch.sequences.clone()));
        let has = states.has_initial_state.as_ref();
        Recurrence {
            q,
            k,
            v,
            gating,
            pool: StatePool {
                tensor: TensorMut(states.recurrent.0.clone()),
                layout: states.recurrent_layout,
                slots,
                write_slots: None,
            },
            has_initial_state: has.map(|has| has.part(sub_batch.sequences.clone())),
            o: TokensMut(Tokens(rows(o.map_or(&x.y.0.0, |o| &o.0)), false)),
        }
    }
}

/// A range of rows of z. Shape and strides of z were checked.
fn z_rows<'a>(z: &Tensor<'a, 3>, rows: Range<usize>) -> Tensor<'a, 3> {
    let [_, blocks, size] = z.shape;
    let shape = [rows.len(), blocks, size];
    z.part(shape, z.strides, rows.start * z.strides[0])
}

/// Tensors that decode and prefill share.
struct Recurrence<'a> {
    q: Tokens<'a>,
    k: Tokens<'a>,
    v: Tokens<'a>,
    gating: Gating<'a>,
    pool: StatePool<'a>,
    has_initial_state: Option<PerSequence<'a, u8>>,
    o: TokensMut<'a>,
}

fn decode_tensors(x: Recurrence<'_>) -> DecodeTensors<'_> {
    DecodeTensors {
        q: x.q,
        k: x.k,
        v: x.v,
        gating: x.gating,
        pool: x.pool,
        has_initial_state: x.has_initial_state,
        states: None,
        o: x.o,
    }
}

fn prefill_tensors(x: Recurrence<'_>) -> PrefillTensors<'_> {
    PrefillTensors {
        cu_seqlens: None,
        q: x.q,
        k: x.k,
        v: x.v,
        gating: x.gating,
        states: States::Pool {
            pool: x.pool,
            has_initial_state: x.has_initial_state,
        },
        o: x.o,
        snapshots: None,
    }
}

/// Names of arguments: the recurrences' name, the layer's name.
const RECURRENCE: [(&str, &str); 3] = [
    ("pool", "states.recurrent"),
    ("a_log", "weights.a_log"),
    ("dt_bias", "weights.dt_bias"),
];

/// Renames the argument in an error to the layer's name.
pub(super) fn renamed<T>(outcome: Result<T>, names: &[(&str, &str)]) -> Result<T> {
    outcome.map_err(|error| match error {
        Error::Argument(error) => {
            let name = names.iter().find(|(stage, _)| *stage == error.argument);
            Error::Argument(ArgumentError {
                argument: name.map_or(error.argument, |(_, layer)| (*layer).to_owned()),
                ..error
            })
        }
        other => other,
    })
}

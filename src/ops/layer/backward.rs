//! Backward of a layer: gradients of its projections, weights and initial states.
//!
//! ```text
//! d_o, d_z, d_norm               = norm's backward(o, z, d_y)
//! q, k, v                        = silu(conv(x)), again
//! d_q, d_k, d_v, d_a, d_b, ...   = prefill's backward(q, k, v, a, b, d_o)
//! d_x, d_conv                    = conv's backward(x, d_q, d_k, d_v)
//! ```
//!
//! The forward keeps o alone, `2 HV V` bytes a token ([`Layer::launch_saving`]). q, k, v, d_o, d_q, d_k and d_v lie in the
//! workspace, in the type of the activations. If heads of a, b or of their gradients lie in blocks, gates are computed
//! again and differentiated by kernels of their own.

use std::ffi::c_void;
use std::sync::Arc;

use super::lower::renamed;
use super::{Layer, LayerSpec, LayerWeights, Lengths};
use crate::abi;
use crate::alias::{self, Span};
use crate::batch::{CuSeqlens, PerSequence};
use crate::check;
use crate::conv::{
    self, Conv, ConvBackward, ConvBackwardTensors, ConvInput, ConvInputMut, ConvState, ConvStates,
    ConvStatesMut, ConvTensors,
};
use crate::error::{ArgumentError, ArgumentKind, Result};
use crate::gate::{self, Gate, GateBackward};
use crate::gates::Gating;
use crate::kernels;
use crate::norm::{self, GatedNormBackward};
use crate::prefill::{BackwardTensors, PrefillBackward};
use crate::runtime::{Context, Stream};
use crate::state::{InitialState, State, StateMut};
use crate::tensor::{
    Buffer, Tensor, TensorMut, TokenScalars, TokenScalarsMut, Tokens, TokensMut, dense_strides,
};
use crate::types::Dtype;
use crate::workspace::{WORKSPACE_ALIGN, Workspace, check_workspace};

/// States before a batch: copies, because a forward overwrites the pools. Row n is sequence n's.
#[derive(Clone, Debug)]
pub struct LayerInitial<'a> {
    /// Conv states.
    pub conv: ConvStates<'a>,
    /// Recurrent states, `[N, HV, K, V]` or `[N, HV, V, K]`, f32, bf16 or fp16.
    pub recurrent: State<'a>,
    /// One byte per sequence; 0: the sequence started from zeros. Absent: every sequence has states.
    pub has_initial_state: Option<PerSequence<'a, u8>>,
}

/// Gradients of a layer's weights, all f32. Absent ones are not computed.
#[derive(Debug, Default)]
pub struct LayerWeightGradients<'a> {
    /// `[channels, width]`.
    pub conv: Option<TensorMut<'a, 2>>,
    /// `[channels]`.
    pub conv_bias: Option<TensorMut<'a, 1>>,
    /// `[HV]`.
    pub a_log: Option<TensorMut<'a, 1>>,
    /// `[HV]`.
    pub dt_bias: Option<TensorMut<'a, 1>>,
    /// `[V]`.
    pub norm: Option<TensorMut<'a, 1>>,
}

/// The tensors of one backward: the inputs of the layer, o, gradients of what it returned, and the gradients to compute.
/// Absent gradients are not computed. Rows of gradients past the last sequence become zeros, whatever d_y has there.
///
/// A launch refuses outputs that share memory with other arguments.
#[derive(Debug)]
pub struct LayerBackwardTensors<'a> {
    /// `[N + 1]`, lengths for a plan of [`Layer::device`]. Absent for other plans.
    pub cu_seqlens: Option<CuSeqlens<'a>>,
    /// Projections q, k and v.
    pub x: ConvInput<'a>,
    /// Projection z.
    pub z: Tensor<'a, 3>,
    /// `[T, HV]`; heads may lie in blocks.
    pub a: TokenScalars<'a>,
    /// `[T, HV]`, as a.
    pub b: TokenScalars<'a>,
    /// Weights.
    pub weights: LayerWeights<'a>,
    /// States before the batch. Absent: sequences started from zeros.
    pub initial: Option<LayerInitial<'a>>,
    /// `[T, HV, V]`, from [`Layer::launch_saving`].
    pub o: Tokens<'a>,
    /// Gradient of y, `[T, HV, V]`, of any strides that inputs may have, 0 among them.
    pub d_y: Tokens<'a>,
    /// Gradient of the conv states after the batch; absent: zeros.
    pub d_final_conv: Option<ConvStates<'a>>,
    /// Gradient of the recurrent states after the batch; absent: zeros.
    pub d_final_recurrent: Option<State<'a>>,
    /// Gradient of the projections q, k and v.
    pub d_x: Option<ConvInputMut<'a>>,
    /// Gradient of z, with blocks of its own: it may lie in the rows of d_x.
    pub d_z: Option<TensorMut<'a, 3>>,
    /// `[T, HV]`, f32, bf16 or fp16; heads may lie in blocks.
    pub d_a: Option<TokenScalarsMut<'a>>,
    /// `[T, HV]`, as d_a.
    pub d_b: Option<TokenScalarsMut<'a>>,
    /// Gradients of the weights.
    pub d_weights: LayerWeightGradients<'a>,
    /// Gradient of the conv states before the batch, or of zeros where there were none.
    pub d_initial_conv: Option<ConvStatesMut<'a>>,
    /// Gradient of the recurrent states before the batch, or of zeros where there were none.
    pub d_initial_recurrent: Option<StateMut<'a>>,
}

/// Plan of the backward of a layer without decodes, for the same batches.
#[derive(Debug)]
pub struct LayerBackward {
    context: Context,
    spec: LayerSpec,
    tokens: usize,
    sequences: usize,
    conv: Conv,
    conv_backward: ConvBackward,
    prefill: PrefillBackward,
    /// Absent: launches read [`LayerBackwardTensors::cu_seqlens`].
    cu_seqlens: Option<Arc<Buffer<i32>>>,
}

/// Parts of the workspace: offsets in bytes.
struct Layout {
    /// q, k, v, then their gradients.
    rows: [usize; 6],
    d_o: usize,
    /// g, beta, then their gradients.
    gates: [usize; 4],
    /// Sums of the norm, of the gates and of the convolution: one after the other.
    sums: usize,
    prefill: usize,
    bytes: usize,
}

impl LayerBackward {
    /// The backward of `layer`. It needs a workspace of its own size.
    ///
    /// # Errors
    /// A layer with decodes, which no forward of a training step has; no memory for the plan.
    pub fn of(layer: &Layer) -> Result<Self> {
        let stages = &layer.stages;
        let refuse = || {
            let was = format!("{} decodes", stages.decodes);
            let allowed = "0: a layer that is differentiated has no decodes";
            ArgumentError::new("decodes", ArgumentKind::Lengths, was, allowed)
        };
        check::ensure(stages.decodes == 0, refuse)?;
        let prefill = layer.prefill.as_ref().ok_or_else(refuse)?;
        Ok(LayerBackward {
            context: stages.context.clone(),
            spec: stages.spec,
            tokens: stages.tokens,
            sequences: stages.sequences,
            conv: Conv::device(
                &stages.context,
                stages.spec.conv(),
                stages.tokens,
                stages.sequences,
            )?
            .keeping_states(),
            conv_backward: ConvBackward::of(&stages.conv)?,
            prefill: PrefillBackward::of(prefill)?,
            cu_seqlens: match &layer.lengths {
                Lengths::Host(own) => Some(own.clone()),
                Lengths::Device(_) => None,
            },
        })
    }

    fn layout(&self) -> Layout {
        let (heads, element) = (&self.spec.heads, self.spec.dtype.size());
        let mut bytes = 0;
        let mut next = |size: usize| {
            let offset = bytes;
            bytes += size.next_multiple_of(WORKSPACE_ALIGN);
            offset
        };
        let [q, k, v] = self.spec.conv().channels();
        let rows = [q, k, v, q, k, v].map(|row| next(self.tokens * row * element));
        let d_o = next(self.tokens * v * element);
        let gates = [(); 4].map(|()| next(self.tokens * heads.value * Dtype::F32.size()));
        let (context, tokens) = (&self.context, self.tokens);
        let of_norm =
            GatedNormBackward::workspace_of(context, tokens, heads.value, heads.value_dim);
        let of_gates = GateBackward::workspace_of(context, tokens, heads.value);
        let of_conv = self.conv_backward.workspace_bytes();
        let sums = next(of_norm.max(of_gates).max(of_conv));
        let prefill = next(self.prefill.workspace_bytes());
        Layout {
            rows,
            d_o,
            gates,
            sums,
            prefill,
            bytes,
        }
    }

    /// Bytes of workspace that a launch needs: those of the prefill's backward, and `4 (2 HK K + HV V) + 2 HV V + 16 HV`
    /// bytes a token.
    pub fn workspace_bytes(&self) -> usize {
        self.layout().bytes
    }

    /// Names of the kernels that a launch for all gradients runs, in order, if heads of a and b do not lie in blocks.
    pub fn kernels(&self) -> Vec<&'static str> {
        let dtype = self.spec.dtype;
        let sums = kernels::gradient_sums().name();
        let before = [
            kernels::norm_backward(dtype).name(),
            sums,
            self.conv.kernel(),
        ];
        let after = [kernels::conv_backward(dtype).name(), sums];
        let prefill = self.prefill.kernels(true);
        before.into_iter().chain(prefill).chain(after).collect()
    }

    /// Enqueues the backward. No other launch of this crate on the stream, from any thread, comes between its kernels.
    ///
    /// # Errors
    /// A tensor of another shape, type or context, strides that are not allowed, gradients that share memory with other
    /// arguments, a workspace that is too small: then nothing was enqueued. A launch that the runtime refuses.
    pub fn launch(
        &self,
        stream: &Stream,
        x: &LayerBackwardTensors<'_>,
        workspace: Workspace<'_>,
    ) -> Result<()> {
        let context = &self.context;
        check::stream(stream, context)?;
        check_workspace(&workspace, self.workspace_bytes(), context)?;
        let lengths = match &self.cu_seqlens {
            Some(own) => {
                CuSeqlens::refuse(&x.cu_seqlens)?;
                (own.address().cast_const(), false)
            }
            None => {
                let given = CuSeqlens::required(&x.cu_seqlens)?;
                check::device("cu_seqlens", given.owner(), context)?;
                given.checked(self.sequences)?
            }
        };
        let (layout, scratch) = (self.layout(), workspace.span());
        let address = workspace.address();
        let inner = Inner::new(self, &layout, address);
        let sums = address.wrapping_byte_add(layout.sums);
        let norm = self.lower_norm(stream, x, &inner, sums)?;
        let norm = norm.within(lengths, self.sequences);
        let conv = self.lower_conv(stream, x, &inner, lengths)?;
        let conv_backward = self.lower_conv_backward(stream, x, &inner, lengths, sums)?;
        let in_blocks = |t: &TokenScalars<'_>| t.0.shape[3] > 1;
        let of_outputs = [&x.d_a, &x.d_b];
        let apart = in_blocks(&x.a)
            || in_blocks(&x.b)
            || (of_outputs.iter()).any(|t| t.as_ref().is_some_and(|t| in_blocks(&t.0)));
        let gates = match apart {
            true => Some(self.lower_gates(stream, x, &inner, sums)?),
            false => None,
        };
        check_overlaps(x, scratch)?;
        let (_, rest) = workspace.split(layout.prefill);
        let before = || {
            norm.enqueue(context, stream)?;
            self.conv.enqueue(stream, &conv)?;
            match &gates {
                Some(gates) if gates.forward.groups > 0 => {
                    let (kernel, groups) = (kernels::gate(), gates.forward.groups as u32);
                    let threads = context.target().threads(kernel.role());
                    // SAFETY: the tensors were checked, and lie in the memory that they were made from.
                    unsafe { context.launch(stream, kernel, groups, threads, &gates.forward) }
                }
                _ => Ok(()),
            }
        };
        let after = || {
            if let Some(gates) = &gates {
                gates.backward.enqueue(context, stream)?;
            }
            self.conv_backward.enqueue(stream, &conv_backward)
        };
        let tensors = prefill_tensors(self, x, &inner, apart);
        let outcome = (self.prefill).launch_between(stream, &tensors, rest, before, after);
        renamed(outcome, &RECURRENCE)
    }

    fn lower_norm(
        &self,
        stream: &Stream,
        x: &LayerBackwardTensors<'_>,
        inner: &Inner<'_>,
        sums: *mut c_void,
    ) -> Result<norm::BackwardArguments> {
        let heads = &self.spec.heads;
        let batch = crate::tensor::Batch::Packed {
            tokens: self.tokens,
        };
        for (name, t) in [("o", &x.o), ("d_y", &x.d_y)] {
            let dtype = [self.spec.dtype];
            check::tokens(name, t, batch, heads.value, heads.value_dim, &dtype)?;
        }
        let norm = GatedNormBackward {
            x: x.o.clone(),
            z: x.z.clone(),
            weight: x.weights.norm.clone(),
            eps: self.spec.eps,
            gate: self.spec.gate,
            d_y: x.d_y.clone(),
            d_x: Some(written(&inner.d_o)),
            d_z: again(&x.d_z),
            d_weight: again(&x.d_weights.norm),
        };
        let names = [
            ("x", "o"),
            ("weight", "weights.norm"),
            ("d_weight", "d_weights.norm"),
        ];
        renamed(norm.lower(&self.context, stream, sums), &names)
    }

    fn lower_conv(
        &self,
        stream: &Stream,
        x: &LayerBackwardTensors<'_>,
        inner: &Inner<'_>,
        lengths: (*const c_void, bool),
    ) -> Result<conv::LaunchArguments> {
        let [q, k, v] = inner.qkv.each_ref().map(written);
        let state = x.initial.as_ref().map(|initial| ConvState {
            // It is only read: the plan keeps states.
            tensor: TensorMut(initial.conv.tensor.clone()),
            layout: initial.conv.layout,
            has_initial_state: initial.has_initial_state.clone(),
        });
        let tensors = ConvTensors {
            cu_seqlens: None,
            x: x.x.clone(),
            weight: x.weights.conv.clone(),
            bias: x.weights.conv_bias.clone(),
            state,
            slots: None,
            q,
            k,
            v,
            gates: None,
        };
        renamed(self.conv.lower(stream, lengths, &tensors), &CONV)
    }

    fn lower_conv_backward(
        &self,
        stream: &Stream,
        x: &LayerBackwardTensors<'_>,
        inner: &Inner<'_>,
        lengths: (*const c_void, bool),
        sums: *mut c_void,
    ) -> Result<conv::BackwardArguments> {
        let [d_q, d_k, d_v] = inner.d_qkv.each_ref().map(|t| Tokens::from(t.clone()));
        let initial = x.initial.as_ref();
        let weights = &x.d_weights;
        let tensors = ConvBackwardTensors {
            cu_seqlens: None,
            x: x.x.clone(),
            weight: x.weights.conv.clone(),
            bias: x.weights.conv_bias.clone(),
            initial: initial.map(|initial| initial.conv.clone()),
            has_initial_state: initial.and_then(|initial| initial.has_initial_state.clone()),
            d_q,
            d_k,
            d_v,
            d_final: x.d_final_conv.clone(),
            d_x: x.d_x.as_ref().map(ConvInputMut::again),
            d_weight: again(&weights.conv),
            d_bias: again(&weights.conv_bias),
            d_initial: (x.d_initial_conv.as_ref()).map(|states| ConvStatesMut {
                tensor: TensorMut(states.tensor.0.clone()),
                layout: states.layout,
            }),
        };
        let lowered = (self.conv_backward).lower(stream, lengths, &tensors, sums);
        renamed(lowered, &CONV)
    }

    fn lower_gates(
        &self,
        stream: &Stream,
        x: &LayerBackwardTensors<'_>,
        inner: &Inner<'_>,
        sums: *mut c_void,
    ) -> Result<Gates> {
        let [g, beta, d_g, d_beta] = inner.gates.each_ref();
        let heads = self.spec.heads.value;
        let weights = (&x.weights.a_log, &x.weights.dt_bias);
        let forward = Gate {
            a: x.a.clone(),
            b: x.b.clone(),
            a_log: weights.0.clone(),
            dt_bias: weights.1.clone(),
            allow_neg_eigval: self.spec.allow_neg_eigval,
            g: TensorMut(g.clone()).into(),
            beta: TensorMut(beta.clone()).into(),
        };
        renamed(
            forward.check_devices(&self.context).map_err(Into::into),
            &GATES,
        )?;
        let forward = renamed(
            forward.lower(self.tokens, heads).map_err(Into::into),
            &GATES,
        )?;
        let backward = GateBackward {
            a: x.a.clone(),
            b: x.b.clone(),
            a_log: weights.0.clone(),
            dt_bias: weights.1.clone(),
            allow_neg_eigval: self.spec.allow_neg_eigval,
            d_g: Some(d_g.clone().into()),
            d_beta: Some(d_beta.clone().into()),
            d_a: scalars_again(&x.d_a),
            d_b: scalars_again(&x.d_b),
            d_a_log: again(&x.d_weights.a_log),
            d_dt_bias: again(&x.d_weights.dt_bias),
        };
        let lowered = backward.lower(&self.context, stream, (self.tokens, heads), sums);
        Ok(Gates {
            forward,
            backward: renamed(lowered, &GATES)?,
        })
    }
}

/// Gates apart from the recurrence: launch arguments of the forward and of the backward.
struct Gates {
    forward: abi::dwk_gate_args,
    backward: gate::BackwardArguments,
}

/// Tensors in the workspace, dense.
struct Inner<'a> {
    qkv: [Tensor<'a, 3>; 3],
    d_qkv: [Tensor<'a, 3>; 3],
    d_o: Tensor<'a, 3>,
    /// g, beta and their gradients.
    gates: [Tensor<'a, 2>; 4],
}

impl Inner<'_> {
    fn new(plan: &LayerBackward, layout: &Layout, address: *mut c_void) -> Self {
        let (heads, tokens) = (&plan.spec.heads, plan.tokens);
        let keys = [tokens, heads.key, heads.key_dim];
        let values = [tokens, heads.value, heads.value_dim];
        let at = |offset: usize| address.wrapping_byte_add(offset);
        let rows = |offset, shape| {
            // SAFETY: the workspace holds the tensor; whoever made the workspace vouched for its memory.
            unsafe { Tensor::from_raw(at(offset), plan.spec.dtype, shape, dense_strides(shape)) }
        };
        let [q, k, v, d_q, d_k, d_v] = layout.rows;
        let scalars = [tokens, heads.value];
        Inner {
            qkv: [rows(q, keys), rows(k, keys), rows(v, values)],
            d_qkv: [rows(d_q, keys), rows(d_k, keys), rows(d_v, values)],
            d_o: rows(layout.d_o, values),
            gates: layout.gates.map(|offset| {
                // SAFETY: as above.
                unsafe { Tensor::from_raw(at(offset), Dtype::F32, scalars, dense_strides(scalars)) }
            }),
        }
    }
}

/// An output in the workspace.
fn written<'a>(t: &Tensor<'a, 3>) -> TokensMut<'a> {
    TensorMut(t.clone()).into()
}

/// The same output, for a stage. Stages write one after the other.
fn again<'a, const R: usize>(t: &Option<TensorMut<'a, R>>) -> Option<TensorMut<'a, R>> {
    t.as_ref().map(|TensorMut(t)| TensorMut(t.clone()))
}

fn scalars_again<'a>(t: &Option<TokenScalarsMut<'a>>) -> Option<TokenScalarsMut<'a>> {
    let again = |TokenScalarsMut(t): &TokenScalarsMut<'a>| TokenScalarsMut(t.clone());
    t.as_ref().map(again)
}

/// Tensors of the prefill's backward. `apart`: gates are computed and differentiated apart from it.
fn prefill_tensors<'a>(
    plan: &LayerBackward,
    x: &LayerBackwardTensors<'a>,
    inner: &Inner<'a>,
    apart: bool,
) -> BackwardTensors<'a> {
    let [q, k, v] = inner.qkv.each_ref().map(|t| Tokens::from(t.clone()));
    let [d_q, d_k, d_v] = inner.d_qkv.each_ref().map(|t| Some(written(t)));
    let [g, beta, d_g, d_beta] = inner.gates.each_ref();
    let gating = match apart {
        true => Gating::Given {
            g: Some(g.clone().into()),
            beta: Some(beta.clone().into()),
        },
        false => Gating::Raw {
            a: x.a.clone(),
            b: x.b.clone(),
            a_log: x.weights.a_log.clone(),
            dt_bias: x.weights.dt_bias.clone(),
            allow_neg_eigval: plan.spec.allow_neg_eigval,
        },
    };
    let (d_g, d_beta, d_a_log, d_dt_bias) = match apart {
        true => (
            Some(TensorMut(d_g.clone()).into()),
            Some(TensorMut(d_beta.clone()).into()),
            None,
            None,
        ),
        false => (
            scalars_again(&x.d_a),
            scalars_again(&x.d_b),
            again(&x.d_weights.a_log),
            again(&x.d_weights.dt_bias),
        ),
    };
    BackwardTensors {
        cu_seqlens: x.cu_seqlens.clone(),
        q,
        k,
        v,
        gating,
        initial: x.initial.as_ref().map(|initial| InitialState {
            state: State {
                tensor: initial.recurrent.tensor.clone(),
                layout: initial.recurrent.layout,
            },
            has_initial_state: initial.has_initial_state.clone(),
        }),
        d_o: inner.d_o.clone().into(),
        d_final: x.d_final_recurrent.as_ref().map(|state| State {
            tensor: state.tensor.clone(),
            layout: state.layout,
        }),
        d_q,
        d_k,
        d_v,
        d_g,
        d_beta,
        d_a_log,
        d_dt_bias,
        d_initial: x.d_initial_recurrent.as_ref().map(|state| StateMut {
            tensor: TensorMut(state.tensor.0.clone()),
            layout: state.layout,
        }),
    }
}

/// Checks that no gradient shares memory with another argument.
fn check_overlaps(x: &LayerBackwardTensors<'_>, workspace: Span<'_>) -> Result<()> {
    let (d_x, weights, initial) = (x.d_x.as_ref(), &x.d_weights, x.initial.as_ref());
    let d_initial = x.d_initial_recurrent.as_ref();
    let outputs = [
        Span::maybe("d_x.q", d_x.map(|x| &x.q.0)),
        Span::maybe("d_x.k", d_x.map(|x| &x.k.0)),
        Span::maybe("d_x.v", d_x.map(|x| &x.v.0)),
        Span::maybe("d_z", x.d_z.as_ref().map(|t| &t.0)),
        Span::maybe("d_a", x.d_a.as_ref().map(|t| &t.0.0)),
        Span::maybe("d_b", x.d_b.as_ref().map(|t| &t.0.0)),
        Span::maybe("d_weights.conv", weights.conv.as_ref().map(|t| &t.0)),
        Span::maybe(
            "d_weights.conv_bias",
            weights.conv_bias.as_ref().map(|t| &t.0),
        ),
        Span::maybe("d_weights.a_log", weights.a_log.as_ref().map(|t| &t.0)),
        Span::maybe("d_weights.dt_bias", weights.dt_bias.as_ref().map(|t| &t.0)),
        Span::maybe("d_weights.norm", weights.norm.as_ref().map(|t| &t.0)),
        Span::maybe(
            "d_initial_conv",
            x.d_initial_conv.as_ref().map(|s| &s.tensor.0),
        ),
        Span::maybe("d_initial_recurrent", d_initial.map(|s| &s.tensor.0)),
        workspace,
    ];
    let has = initial.and_then(|initial| initial.has_initial_state.as_ref());
    let inputs = [
        Span::of("x.q", &x.x.q),
        Span::of("x.k", &x.x.k),
        Span::of("x.v", &x.x.v),
        Span::of("z", &x.z),
        Span::of("a", &x.a.0),
        Span::of("b", &x.b.0),
        Span::of("weights.conv", &x.weights.conv),
        Span::maybe("weights.conv_bias", x.weights.conv_bias.as_ref()),
        Span::of("weights.a_log", &x.weights.a_log),
        Span::maybe("weights.dt_bias", x.weights.dt_bias.as_ref()),
        Span::maybe("weights.norm", x.weights.norm.as_ref()),
        Span::maybe("initial.conv", initial.map(|i| &i.conv.tensor)),
        Span::maybe("initial.recurrent", initial.map(|i| &i.recurrent.tensor)),
        Span::numbers("initial.has_initial_state", has),
        Span::of("o", &x.o.0),
        Span::of("d_y", &x.d_y.0),
        Span::maybe("d_final_conv", x.d_final_conv.as_ref().map(|s| &s.tensor)),
        Span::maybe(
            "d_final_recurrent",
            x.d_final_recurrent.as_ref().map(|s| &s.tensor),
        ),
        Span::lengths(x.cu_seqlens.as_ref()),
    ];
    Ok(alias::check(&outputs, &inputs, &[])?)
}

/// Names of arguments: the convolution's name, the layer's name.
const CONV: [(&str, &str); 9] = [
    ("weight", "weights.conv"),
    ("bias", "weights.conv_bias"),
    ("state", "initial.conv"),
    ("initial_state", "initial.conv"),
    ("has_initial_state", "initial.has_initial_state"),
    ("d_final_state", "d_final_conv"),
    ("d_weight", "d_weights.conv"),
    ("d_bias", "d_weights.conv_bias"),
    ("d_initial_state", "d_initial_conv"),
];

const GATES: [(&str, &str); 4] = [
    ("a_log", "weights.a_log"),
    ("dt_bias", "weights.dt_bias"),
    ("d_a_log", "d_weights.a_log"),
    ("d_dt_bias", "d_weights.dt_bias"),
];

const RECURRENCE: [(&str, &str); 10] = [
    ("has_initial_state", "initial.has_initial_state"),
    ("a_log", "weights.a_log"),
    ("dt_bias", "weights.dt_bias"),
    ("d_g", "d_a"),
    ("d_beta", "d_b"),
    ("d_a_log", "d_weights.a_log"),
    ("d_dt_bias", "d_weights.dt_bias"),
    ("initial_state", "initial.recurrent"),
    ("d_final_state", "d_final_recurrent"),
    ("d_initial_state", "d_initial_recurrent"),
];

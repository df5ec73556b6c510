//! A prefill that is given what the convolution's launch makes, normed q and k, g and beta, beside one that makes them
//! itself: no further apart than rounding q and k after their norm, not before it, explains.

mod common;

use common::context;
use deltawave::conv::{Conv, ConvInput, ConvSpec, ConvTensors};
use deltawave::gate::Gate;
use deltawave::gates::Gating;
use deltawave::prefill::{Prefill, PrefillSpec, PrefillTensors};
use deltawave::runtime::Context;
use deltawave::state::StateMut;
use deltawave::state::States;
use deltawave::tensor::{Buffer, Tensor, TensorMut, dense_strides};
use deltawave::types::{Dtype, StateLayout};
use deltawave::workspace::Workspace;
use deltawave_lab::inputs::{Gates, Tensor as HostTensor, random_normal};
use deltawave_lab::metrics::{bar, compare, rounding_ratio};
use deltawave_lab::oracle::gates::l2_factor;

/// A layer's shape, and the batch.
#[derive(Clone, Copy)]
struct Batch {
    dtype: Dtype,
    /// Of keys and values.
    heads: [usize; 2],
    dims: [usize; 2],
    neg_eigval: bool,
    cu_seqlens: &'static [i32],
}

/// What the projections give, and the layer's parameters.
struct Projected {
    batch: Batch,
    x: Buffer<u8>,
    weight: Buffer<u8>,
    a: HostTensor,
    b: HostTensor,
    a_log: Buffer<f32>,
    dt_bias: Buffer<f32>,
}

/// Whose work norms and gates are.
#[derive(Clone, Copy, PartialEq)]
enum Made {
    ByConv,
    ByPrefill,
}

/// What a prefill reads, and what it makes of it.
struct Outcome {
    q: Vec<f32>,
    k: Vec<f32>,
    o: Vec<f32>,
    states: Vec<f32>,
}

impl Batch {
    fn tokens(&self) -> usize {
        self.cu_seqlens[self.cu_seqlens.len() - 1] as usize
    }

    fn conv(&self, made: Made) -> ConvSpec {
        ConvSpec {
            dtype: self.dtype,
            qk_l2norm: made == Made::ByConv,
            ..ConvSpec::new(self.heads[0], self.heads[1], self.dims[0], self.dims[1])
        }
    }

    fn prefill(&self, made: Made) -> PrefillSpec {
        PrefillSpec {
            dtype: self.dtype,
            qk_l2norm: made == Made::ByPrefill,
            ..PrefillSpec::new(self.heads[0], self.heads[1], self.dims[0], self.dims[1])
        }
    }
}

impl Projected {
    fn new(context: &Context, batch: Batch) -> Self {
        let spec = batch.conv(Made::ByConv);
        let draw = |name, n| random_normal(batch.dtype, name, n, 3);
        let (channels, of_heads) = (spec.total_channels(), batch.tokens() * batch.heads[1]);
        let upload = |name, n| context.upload(&draw(name, n).bytes).unwrap();
        let values = |name| context.upload(&draw(name, batch.heads[1]).values).unwrap();
        Projected {
            batch,
            x: upload("x", batch.tokens() * channels),
            weight: upload("weight", channels * spec.width),
            a: draw("a", of_heads),
            b: draw("b", of_heads),
            a_log: values("a_log"),
            dt_bias: values("dt_bias"),
        }
    }

    /// Rows of one block `b | a` for each key head.
    fn rows(&self, context: &Context) -> Buffer<u8> {
        let [key_heads, value_heads] = self.batch.heads;
        let each = value_heads / key_heads * self.batch.dtype.size();
        let blocks = self.b.bytes.chunks_exact(each);
        let both = blocks.zip(self.a.bytes.chunks_exact(each));
        let rows: Vec<u8> = both.flat_map(|(b, a)| [b, a].concat()).collect();
        context.upload(&rows).unwrap()
    }

    /// Convolution and prefill, one after the other.
    fn run(&self, context: &Context, made: Made) -> Outcome {
        let Batch {
            dtype,
            heads: [key_heads, value_heads],
            dims: [key_dim, value_dim],
            neg_eigval,
            cu_seqlens,
        } = self.batch;
        let (tokens, spec) = (self.batch.tokens(), self.batch.conv(made));
        let stream = context.stream().unwrap();
        let poisoned = |n: usize| context.upload(&vec![0xffu8; n]).unwrap();
        let keys = [tokens, key_heads, key_dim];
        let values = [tokens, value_heads, value_dim];
        let of_heads = [tokens, value_heads];
        let [mut q, mut k, mut v] = spec.channels().map(|n| poisoned(2 * tokens * n));
        let mut gates = [0, 1].map(|_| {
            context
                .upload(&vec![f32::NAN; tokens * value_heads])
                .unwrap()
        });

        let ba = self.rows(context);
        let ba = dense(&ba, dtype, [tokens, 2 * value_heads]);
        let [a, b] = Gate::interleaved(&ba, key_heads, value_heads).unwrap();
        let [g, beta] = &mut gates;
        let gate = Gate {
            a,
            b,
            a_log: self.a_log.tensor([value_heads]).unwrap(),
            dt_bias: Some(self.dt_bias.tensor([value_heads]).unwrap()),
            allow_neg_eigval: neg_eigval,
            g: g.tensor_mut(of_heads).unwrap().into(),
            beta: beta.tensor_mut(of_heads).unwrap().into(),
        };
        let tensors = ConvTensors {
            cu_seqlens: None,
            x: ConvInput::flat(
                &dense(&self.x, dtype, [tokens, spec.total_channels()]),
                &spec,
            )
            .unwrap(),
            weight: dense(&self.weight, dtype, [spec.total_channels(), spec.width]),
            bias: None,
            state: None,
            slots: None,
            q: dense_mut(&mut q, dtype, keys).into(),
            k: dense_mut(&mut k, dtype, keys).into(),
            v: dense_mut(&mut v, dtype, values).into(),
            gates: (made == Made::ByConv).then_some(gate),
        };
        let plan = Conv::packed(context, spec, cu_seqlens, tokens).unwrap();
        plan.launch(&stream, &tensors).unwrap();

        let apart = [&self.a, &self.b].map(|x| context.upload(&x.bytes).unwrap());
        let gating = match made {
            Made::ByConv => Gating::Given {
                g: Some(gates[0].tensor(of_heads).unwrap().into()),
                beta: Some(gates[1].tensor(of_heads).unwrap().into()),
            },
            Made::ByPrefill => Gating::Raw {
                a: dense(&apart[0], dtype, of_heads).into(),
                b: dense(&apart[1], dtype, of_heads).into(),
                a_log: self.a_log.tensor([value_heads]).unwrap(),
                dt_bias: Some(self.dt_bias.tensor([value_heads]).unwrap()),
                allow_neg_eigval: neg_eigval,
            },
        };
        let plan = Prefill::packed(context, self.batch.prefill(made), cu_seqlens, tokens).unwrap();
        let states = [cu_seqlens.len() - 1, value_heads, key_dim, value_dim];
        let mut o = poisoned(values.iter().product::<usize>() * dtype.size());
        let mut last = context.alloc::<f32>(states.iter().product()).unwrap();
        let mut workspace = poisoned(plan.workspace_bytes());
        let tensors = PrefillTensors {
            cu_seqlens: None,
            q: dense(&q, dtype, keys).into(),
            k: dense(&k, dtype, keys).into(),
            v: dense(&v, dtype, values).into(),
            gating,
            states: States::Separate {
                initial: None,
                last: Some(StateMut {
                    tensor: last.tensor_mut(states).unwrap(),
                    layout: StateLayout::KeyMajor,
                }),
            },
            o: dense_mut(&mut o, dtype, values).into(),
            snapshots: None,
        };
        plan.launch(&stream, &tensors, Workspace::new(&mut workspace))
            .unwrap();
        let host = |x: &Buffer<u8>| HostTensor::from_bytes(dtype, x.download(&stream).unwrap());
        Outcome {
            q: host(&q).values,
            k: host(&k).values,
            o: host(&o).values,
            states: last.download(&stream).unwrap(),
        }
    }
}

fn dense<const N: usize>(x: &Buffer<u8>, dtype: Dtype, shape: [usize; N]) -> Tensor<'_, N> {
    x.tensor_of(dtype, shape, dense_strides(shape), 0).unwrap()
}

fn dense_mut(x: &mut Buffer<u8>, dtype: Dtype, shape: [usize; 3]) -> TensorMut<'_, 3> {
    let t = x.tensor_of_mut(dtype, shape, dense_strides(shape), 0);
    t.unwrap()
}

fn wide(x: &[f32]) -> Vec<f64> {
    x.iter().map(|&x| x.into()).collect()
}

fn normed(rows: &[f32], dim: usize) -> Vec<f64> {
    let rows = rows.chunks_exact(dim).map(wide);
    let normed = rows.flat_map(|row| {
        let factor = l2_factor(row.iter().copied());
        row.into_iter().map(move |x| x * factor)
    });
    normed.collect()
}

#[test]
fn norms_and_gates_of_the_convolution() {
    let context = context();
    let models = [
        (Dtype::Bf16, [2, 4], [128, 128], false),
        (Dtype::Bf16, [3, 3], [96, 192], true),
        (Dtype::F16, [1, 3], [64, 32], false),
    ];
    for (dtype, heads, dims, neg_eigval) in models {
        let batch = Batch {
            dtype,
            heads,
            dims,
            neg_eigval,
            cu_seqlens: &[0, 150, 150, 153, 230],
        };
        let projected = Projected::new(&context, batch);
        let [by_conv, by_prefill] =
            [Made::ByConv, Made::ByPrefill].map(|made| projected.run(&context, made));

        // One is rounded after its norm, the other before it.
        for (what, x, raw) in [
            ("q", &by_conv.q, &by_prefill.q),
            ("k", &by_conv.k, &by_prefill.k),
        ] {
            let reference = normed(raw, dims[0]);
            let apart = compare(x, &reference);
            let limit = 1.05 * f64::sqrt(2.0) * rounding_ratio(&reference, dtype);
            assert!(
                apart.rms_ratio <= limit,
                "{dtype} {what}: {apart:?}, limit {limit:.2e}"
            );
        }
        // Two results, each as far off as the best of others may be.
        let bars = bar(dtype, Gates::Mixed);
        for (what, x, reference, bar) in [
            ("o", &by_conv.o, &by_prefill.o, bars.0),
            ("final state", &by_conv.states, &by_prefill.states, bars.1),
        ] {
            let apart = compare(x, &wide(reference));
            let limit = f64::sqrt(2.0) * bar;
            assert!(
                apart.rms_ratio <= limit,
                "{dtype} {what}: {apart:?}, limit {limit:.2e}"
            );
        }
    }
}

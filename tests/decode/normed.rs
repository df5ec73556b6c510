//! Decode with the gated norm of its outputs: the bits of two launches.

use deltawave::decode::{Decode, DecodeSpec, DecodeTensors, Drafts, OutputNorm};
use deltawave::error::{ArgumentKind, Error};
use deltawave::gates::Gating;
use deltawave::norm::{GatedNorm, OutputGate};
use deltawave::state::StatePool;
use deltawave::tensor::{Tensor, TensorMut, dense_strides};
use deltawave::types::{Dtype, StateLayout};
use deltawave_lab::inputs::{InputSpec, Inputs, Tensor as HostTensor, random_normal, random_state};

use super::cases::spec;
use super::common::context;

const NULL: i32 = 2;
const BATCH: usize = 4;

#[derive(Clone, Copy, PartialEq)]
enum How {
    /// A decode, then a norm in place.
    Apart,
    Normed,
    /// [`How::Normed`] with an argument that is not allowed.
    Refused(&'static str),
}

struct Run {
    spec: DecodeSpec,
    state_dtype: Dtype,
    layout: StateLayout,
    /// Sequences have 2, 0, T and 1 drafts, of which the last has no slots; otherwise T tokens each.
    drafts: bool,
    gate: OutputGate,
    weight: Option<Dtype>,
}

impl Run {
    fn lengths(&self) -> Vec<i32> {
        let t = self.spec.tokens as i32;
        match self.drafts {
            true => vec![0, t.min(2), t.min(2), t.min(2) + t, t.min(2) + t + 1],
            false => (0..=BATCH as i32).map(|n| n * t).collect(),
        }
    }

    /// The rows of o, and the pool.
    fn run(&self, how: How) -> deltawave::Result<[Vec<u8>; 2]> {
        let (context, s) = (context(), self.spec);
        let (stream, heads, t) = (context.stream()?, s.heads, s.tokens);
        let lengths = self.lengths();
        let end = lengths[BATCH] as usize;
        // With drafts, two rows of no sequence.
        let rows = end + 2 * usize::from(self.drafts);
        let of_row = heads.value * heads.value_dim;
        let inputs = Inputs::new(InputSpec {
            dtype: s.dtype,
            tokens: rows,
            key_heads: heads.key,
            value_heads: heads.value,
            key_dim: heads.key_dim,
            value_dim: heads.value_dim,
            seed: 6,
            ..Default::default()
        });
        let up = |t: &HostTensor| context.upload(&t.bytes);
        let (q, k, v) = (up(&inputs.q)?, up(&inputs.k)?, up(&inputs.v)?);
        let (g, beta) = (context.upload(&inputs.g)?, context.upload(&inputs.beta)?);
        // z beside other numbers of its rows; z of padding holds NaN.
        let mut gates = random_normal(s.dtype, "z", rows * 2 * of_row, 7).values;
        let padding = (end - 1) * 2 * of_row..end * 2 * of_row;
        if self.drafts {
            gates[padding].fill(f32::NAN);
        }
        let z = up(&HostTensor::new(s.dtype, gates))?;
        let drawn = random_normal(self.weight.unwrap_or(Dtype::F32), "w", heads.value_dim, 8);
        let weight = up(&drawn)?;
        let short = context.upload(&vec![1.0f32; heads.value_dim - 1])?;
        let slots = BATCH * t + 1 + NULL as usize;
        let table: Vec<i32> = (0..BATCH * t)
            .map(|i| match i / t {
                3 => NULL,
                _ => NULL + 1 + i as i32,
            })
            .collect();
        let (table, accepted) = (
            context.upload(&table)?,
            context.upload(&[1, 2, t as i32, 1])?,
        );
        let cu_seqlens = context.upload(&lengths)?;
        let each = heads.value * heads.key_dim * heads.value_dim;
        let mut pool = up(&random_state(self.state_dtype, slots * each, 9))?;
        let mut o = context.upload(&vec![0u8; rows * of_row * s.dtype.size()])?;
        let o_at = o.address();
        let matrix = match self.layout {
            StateLayout::KeyMajor => [heads.key_dim, heads.value_dim],
            StateLayout::ValueMajor => [heads.value_dim, heads.key_dim],
        };
        let states = [slots, heads.value, matrix[0], matrix[1]];
        let rows_of = |h: usize, d: usize| ([rows, h, d], dense_strides([rows, h, d]));
        let (of_keys, of_values) = (
            rows_of(heads.key, heads.key_dim),
            rows_of(heads.value, heads.value_dim),
        );
        // SAFETY: the rows lie in the buffer, which outlives the launches.
        let again = || unsafe { TensorMut::from_raw(o_at, s.dtype, of_values.0, of_values.1) };
        let shape = [rows, 1, of_row];
        // SAFETY: as above.
        let own_rows = || unsafe { Tensor::from_raw(o_at, s.dtype, shape, dense_strides(shape)) };
        let tensors = DecodeTensors {
            q: q.tensor_of(s.dtype, of_keys.0, of_keys.1, 0)?.into(),
            k: k.tensor_of(s.dtype, of_keys.0, of_keys.1, 0)?.into(),
            v: v.tensor_of(s.dtype, of_values.0, of_values.1, 0)?.into(),
            gating: Gating::Given {
                g: Some(g.tensor([rows, heads.value])?.into()),
                beta: Some(beta.tensor([rows, heads.value])?.into()),
            },
            pool: StatePool {
                tensor: pool.tensor_of_mut(self.state_dtype, states, dense_strides(states), 0)?,
                layout: self.layout,
                slots: None,
                write_slots: None,
            },
            has_initial_state: None,
            states: None,
            o: match how {
                How::Refused("o") => {
                    let shape = [BATCH, t, heads.value, heads.value_dim];
                    o.tensor_of_mut(s.dtype, shape, dense_strides(shape), 0)?
                        .into()
                }
                _ => o
                    .tensor_of_mut(s.dtype, of_values.0, of_values.1, 0)?
                    .into(),
            },
        };
        let drafts = self.drafts.then(|| Drafts {
            draft_slots: Some((&table).into()),
            read_slots: Some((&table).into()),
            accepted: Some((&accepted).into()),
            cu_seqlens: Some((&cu_seqlens).into()),
            null_slot: Some(NULL),
        });
        let blocks = [rows, 1, of_row];
        let z: Tensor<'_, 3> = z.tensor_of(s.dtype, blocks, [2 * of_row, of_row, 1], of_row)?;
        let weight = match self.weight {
            Some(dtype) => Some(weight.tensor_of(dtype, [heads.value_dim], [1], 0)?),
            None => None,
        };
        let mut norm = OutputNorm {
            z,
            weight,
            eps: 1e-5,
            gate: self.gate,
        };
        let plan = Decode::new(&context, s, BATCH)?;
        match how {
            How::Apart => {
                match &drafts {
                    Some(drafts) => plan.launch_drafts(&stream, &tensors, drafts)?,
                    None => plan.launch(&stream, &tensors)?,
                }
                let norm = GatedNorm {
                    x: None,
                    z: norm.z,
                    weight: norm.weight,
                    eps: norm.eps,
                    gate: norm.gate,
                    y: again().into(),
                };
                norm.launch(&context, &stream)?;
            }
            How::Normed => plan.launch_normed(&stream, &tensors, drafts.as_ref(), &norm)?,
            How::Refused(what) => {
                match what {
                    "norm_eps" => norm.eps = 0.0,
                    "z" => norm.z = own_rows(),
                    "norm_weight" => {
                        norm.weight = Some(short.tensor([heads.value_dim - 1])?);
                    }
                    _ => {}
                }
                plan.launch_normed(&stream, &tensors, drafts.as_ref(), &norm)?;
            }
        }
        Ok([o.download(&stream)?, pool.download(&stream)?])
    }
}

/// Shapes with a fused kernel and without, every layout and type of the state, with drafts and without them.
#[test]
fn normed_outputs_have_the_bits_of_two_launches() {
    for (i, dims) in [
        [128, 128],
        [64, 128],
        [96, 128],
        [256, 128],
        [64, 64],
        [128, 48],
    ]
    .into_iter()
    .enumerate()
    {
        for drafts in [true, false] {
            for tokens in [1, 4] {
                let run = Run {
                    spec: spec([Dtype::Bf16, Dtype::F16][i % 2], [1, 2], dims, tokens),
                    state_dtype: [Dtype::F32, Dtype::Bf16, Dtype::F16][i % 3],
                    layout: [StateLayout::ValueMajor, StateLayout::KeyMajor][(i + tokens) % 2],
                    drafts,
                    gate: [OutputGate::Silu, OutputGate::Sigmoid][i % 2],
                    weight: [Some(Dtype::F32), None, Some(Dtype::Bf16)][(i + 1) % 3],
                };
                let [o, pool] = run.run(How::Apart).unwrap();
                let [normed, after] = run.run(How::Normed).unwrap();
                let what = format!("{dims:?}, drafts {drafts}, {tokens} tokens");
                // Rows of padding and of no sequence are zeros, which a norm of its own may give a sign.
                let rows = run.lengths()[BATCH] as usize - usize::from(drafts);
                let own = rows * 2 * dims[1] * 2;
                assert!(normed[..own] == o[..own], "o, {what}");
                assert!(after == pool, "the pool, {what}");
                let values = HostTensor::from_bytes(run.spec.dtype, normed).values;
                let zeros = values.iter().filter(|x| **x == 0.0).count();
                // Padding, and rows of no sequence.
                let none = 3 * usize::from(drafts) * 2 * dims[1];
                assert_eq!(zeros, none, "rows of zeros, {what}");
            }
        }
    }
}

#[test]
fn a_shape_with_a_fused_kernel_is_one_kernel() {
    let context = context();
    let kernels = |dims, drafts| {
        let plan = Decode::new(&context, spec(Dtype::Bf16, [1, 2], dims, 4), 3).unwrap();
        plan.normed_kernels(Dtype::F32, StateLayout::KeyMajor, drafts)
    };
    assert_eq!(kernels([128, 128], true), ["dw_decode_draft_norm_bf16"]);
    assert_eq!(kernels([64, 128], false), ["dw_decode_norm_bf16"]);
    let two = ["dw_decode_draft_bf16_k256", "dw_norm_bf16"];
    assert_eq!(kernels([144, 128], true), two);
    assert_eq!(
        kernels([64, 64], false),
        ["dw_decode_bf16_k128", "dw_norm_bf16"]
    );
}

#[test]
fn norms_are_refused_by_name() {
    for (change, argument, kind) in [
        ("o", "o", ArgumentKind::Shape),
        ("z", "o", ArgumentKind::Overlap),
        ("norm_eps", "norm_eps", ArgumentKind::Value),
        ("norm_weight", "norm_weight", ArgumentKind::Shape),
    ] {
        let run = Run {
            spec: spec(Dtype::Bf16, [1, 2], [64, 128], 2),
            state_dtype: Dtype::F32,
            layout: StateLayout::KeyMajor,
            drafts: false,
            gate: OutputGate::Silu,
            weight: Some(Dtype::F32),
        };
        match run.run(How::Refused(change)) {
            Err(Error::Argument(error)) => {
                assert_eq!((error.argument.as_str(), error.kind), (argument, kind));
            }
            other => panic!("{change}: {other:?}"),
        }
    }
}

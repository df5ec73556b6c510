//! What the convolution's launch does beyond convolving: norms of q and k, held to the same bar as everything else, and g
//! and beta, which are the gate operation's bit for bit.

#[path = "common/conv.rs"]
mod cases;
mod common;

use cases::{Case, Data, Layout, check, check_output, run, spec};
use common::{Memory, View, context, expect, view};
use deltawave::conv::{Conv, ConvInput, ConvSpec, ConvTensors};
use deltawave::error::ArgumentKind::{Device, Shape, Stride};
use deltawave::gate::Gate;
use deltawave::gates::Gating;
use deltawave::prefill::{Prefill, PrefillSpec, PrefillTensors};
use deltawave::runtime::Context;
use deltawave::state::States;
use deltawave::tensor::{Buffer, Tensor, TokenScalars, dense_strides};
use deltawave::types::Dtype;
use deltawave::workspace::Workspace;
use deltawave_lab::inputs::{Tensor as HostTensor, random_normal};
use deltawave_lab::metrics::UlpComparison;

const DTYPES: [Dtype; 2] = [Dtype::Bf16, Dtype::F16];

fn normed(dtype: Dtype, heads: [usize; 2], dims: [usize; 2], width: usize) -> ConvSpec {
    ConvSpec {
        qk_l2norm: true,
        ..spec(dtype, heads, dims, width)
    }
}

/// Heads of every size that models have, whose teams are full or not, one row of lanes or two, and whose threads end
/// beside those of v within a wave.
#[test]
fn norms_of_heads_of_models() {
    let context = context();
    for dtype in DTYPES {
        let mut pooled = UlpComparison::default();
        for (heads, dims, layout) in [
            ([2, 6], [128, 128], Layout::Interleaved),
            ([1, 2], [128, 128], Layout::Flat),
            ([3, 3], [96, 192], Layout::Flat),
            ([1, 1], [64, 24], Layout::Flat),
            ([3, 3], [192, 96], Layout::Interleaved),
            ([1, 2], [256, 256], Layout::Flat),
        ] {
            let case = Case {
                layout,
                tail: 2,
                padding: 0b1000,
                ..Case::new(normed(dtype, heads, dims, 4), &[37, 0, 2, 5, 1])
            };
            pooled = pooled.and(check(&context, &case));
        }
        assert!(pooled.equal_share() >= 0.999, "{dtype}: {pooled:?}");
    }
}

/// Heads without any divisor, odd addresses and strides: channel by channel, with states of every layout beside them.
#[test]
fn norms_of_rows_that_are_not_whole() {
    let context = context();
    for dtype in DTYPES {
        for (heads, dims, layout, width) in [
            ([1, 1], [1, 1], Layout::Flat, 4),
            ([3, 6], [13, 11], Layout::Interleaved, 2),
            ([2, 2], [100, 36], Layout::Interleaved, 4),
            ([1, 2], [251, 3], Layout::Flat, 3),
        ] {
            for (x_offset, x_pad, out_pad, head_pad) in [(0, 0, 0, 0), (1, 3, 1, 5)] {
                let case = Case {
                    layout,
                    x_offset,
                    x_pad,
                    out_pad,
                    head_pad,
                    tail: 3,
                    bias: Some(Dtype::F32),
                    more_columns: Some(2),
                    padding: 0b100,
                    ..Case::new(normed(dtype, heads, dims, width), &[5, 2, 3, 9])
                };
                check(&context, &case);
            }
        }
    }
}

/// A row of zeros stays one, a tiny one is not blown up to length 1, and a NaN reaches all of its row and no other.
#[test]
fn norms_of_special_rows() {
    let context = context();
    let case = Case {
        more_columns: None,
        has_slots: false,
        ..Case::new(normed(Dtype::Bf16, [2, 2], [128, 8], 2), &[4])
    };
    let channels = case.spec.total_channels();
    let mut data = Data::new(&case);
    let mut x = data.x.values.clone();
    x[..128].fill(0.0);
    x[128..256].fill(1e-5);
    x[2 * channels + 300] = f32::NAN;
    data.x = HostTensor::new(Dtype::Bf16, x);
    let weights = (0..2 * channels).map(|i| (i % 2) as f32).collect();
    data.weight = HostTensor::new(Dtype::Bf16, weights);
    let output = run(&context, &case, &data);
    check_output(&case, &data, &output);
    let y = &output.y.values;
    assert!(y[..128].iter().all(|y| *y == 0.0));
    let length: f32 = y[128..256].iter().map(|y| y * y).sum::<f32>().sqrt();
    assert!(length > 0.0 && length < 0.1, "{length}");
    for (i, y) in y.iter().enumerate() {
        // The weight of the token before is 0, which times a NaN is one, too.
        let (t, c) = (i / channels, i % channels);
        let reached = (2..4).contains(&t) && (256..384).contains(&c);
        assert_eq!(y.is_nan(), reached, "token {t}, channel {c}");
    }
}

/// Raw gate inputs of a batch as an engine has them on the device: rows b | a of all heads, or of each key head.
struct Raw {
    dtype: Dtype,
    tokens: usize,
    groups: usize,
    heads: usize,
    /// `[T, 2 HV + 3]`.
    ba: Buffer<u8>,
    a_log: Buffer<f32>,
    dt_bias: Buffer<f32>,
    neg_eigval: bool,
}

/// g and beta, `[T, HV + 1]`: the last column is not theirs.
type Gates = [Buffer<f32>; 2];

impl Raw {
    fn new(context: &Context, dtype: Dtype, tokens: usize, groups: usize, heads: usize) -> Self {
        let draw = |name, n| random_normal(dtype, name, n, 5);
        Raw {
            dtype,
            tokens,
            groups,
            heads,
            ba: context
                .upload(&draw("ba", tokens * (2 * heads + 3)).bytes)
                .unwrap(),
            a_log: context.upload(&draw("a_log", heads).values).unwrap(),
            dt_bias: context.upload(&draw("dt_bias", heads).values).unwrap(),
            neg_eigval: heads.is_multiple_of(2),
        }
    }

    fn rows(&self) -> Tensor<'_, 2> {
        let columns = 2 * self.heads + 3;
        let rows = self
            .ba
            .tensor_of(self.dtype, [self.tokens, columns], [columns, 1], 0);
        rows.unwrap()
    }

    /// a and b where they are, in blocks.
    fn in_blocks(&self) -> [TokenScalars<'_>; 2] {
        Gate::interleaved(&self.rows(), self.groups, self.heads).unwrap()
    }

    /// As tensors of their own, made by hand.
    fn apart(&self, context: &Context) -> [Buffer<u8>; 2] {
        let (size, each) = (self.dtype.size(), self.heads / self.groups);
        let bytes = self.ba.download(&context.stream().unwrap()).unwrap();
        [each, 0].map(|offset| {
            let mut out = Vec::new();
            for row in bytes.chunks_exact((2 * self.heads + 3) * size) {
                for h in 0..self.heads {
                    let at = (h / each * 2 * each + offset + h % each) * size;
                    out.extend(&row[at..at + size]);
                }
            }
            context.upload(&out).unwrap()
        })
    }

    fn poisoned(&self, context: &Context) -> Gates {
        let poison = vec![f32::from_bits(u32::MAX); self.tokens * (self.heads + 1)];
        [0, 1].map(|_| context.upload(&poison).unwrap())
    }

    fn gate<'a>(&'a self, [a, b]: [TokenScalars<'a>; 2], out: &'a mut Gates) -> Gate<'a> {
        let (shape, strides) = ([self.tokens, self.heads], [self.heads + 1, 1]);
        let [g, beta] = out;
        Gate {
            a,
            b,
            a_log: self.a_log.tensor([self.heads]).unwrap(),
            dt_bias: Some(self.dt_bias.tensor([self.heads]).unwrap()),
            allow_neg_eigval: self.neg_eigval,
            g: g.tensor_strided_mut(shape, strides, 0).unwrap().into(),
            beta: beta.tensor_strided_mut(shape, strides, 0).unwrap().into(),
        }
    }
}

fn bits(context: &Context, gates: &Gates) -> [Vec<u32>; 2] {
    let stream = context.stream().unwrap();
    gates.each_ref().map(|x| {
        let values = x.download(&stream).unwrap();
        values.iter().map(|x| x.to_bits()).collect()
    })
}

/// q, k and v of drawn rows, with gates beside them or without.
fn convolve(
    context: &Context,
    s: ConvSpec,
    tokens: usize,
    gates: Option<Gate<'_>>,
) -> [Vec<u8>; 3] {
    let stream = context.stream().unwrap();
    let channels = s.total_channels();
    let draw = |name, n| random_normal(s.dtype, name, n, 1).bytes;
    let x = context.upload(&draw("x", tokens * channels)).unwrap();
    let weight = context.upload(&draw("weight", channels * s.width)).unwrap();
    let x = x
        .tensor_of(s.dtype, [tokens, channels], [channels, 1], 0)
        .unwrap();
    let poisoned = |n| context.upload(&vec![0xffu8; 2 * tokens * n]).unwrap();
    let mut outs = s.channels().map(poisoned);
    let keys = [tokens, s.heads.key, s.heads.key_dim];
    let values = [tokens, s.heads.value, s.heads.value_dim];
    let [q, k, v] = &mut outs;
    let tensors = ConvTensors {
        cu_seqlens: None,
        x: ConvInput::flat(&x, &s).unwrap(),
        weight: weight
            .tensor_of(s.dtype, [channels, s.width], [s.width, 1], 0)
            .unwrap(),
        bias: None,
        state: None,
        slots: None,
        q: q.tensor_of_mut(s.dtype, keys, dense_strides(keys), 0)
            .unwrap()
            .into(),
        k: k.tensor_of_mut(s.dtype, keys, dense_strides(keys), 0)
            .unwrap()
            .into(),
        v: v.tensor_of_mut(s.dtype, values, dense_strides(values), 0)
            .unwrap()
            .into(),
        gates,
    };
    // The last rows belong to no sequence, and have gates all the same.
    let plan = Conv::packed(context, s, &[0, tokens as i32 - 5], tokens).unwrap();
    plan.launch(&stream, &tensors).unwrap();
    outs.map(|out| out.download(&stream).unwrap())
}

/// Both ways for a and b to lie, with and without norms beside them: the bits of the gate operation, which has a and b as
/// tensors of their own, and nothing else changes.
#[test]
fn gates_in_the_same_launch() {
    let context = context();
    let stream = context.stream().unwrap();
    for (dtype, qk_l2norm, groups, heads, tokens) in [
        (Dtype::Bf16, true, 4, [4, 12], 70),
        (Dtype::F16, true, 1, [1, 3], 9),
        (Dtype::Bf16, false, 2, [2, 2], 33),
        (Dtype::Bf16, false, 1, [3, 6], 130),
    ] {
        let raw = Raw::new(&context, dtype, tokens, groups, heads[1]);
        let shape = [tokens, heads[1]];
        let apart = raw.apart(&context);
        let dense = apart.each_ref().map(|x| {
            let t = x.tensor_of(dtype, shape, dense_strides(shape), 0);
            TokenScalars::from(t.unwrap())
        });
        let mut out = raw.poisoned(&context);
        raw.gate(dense, &mut out).launch(&context, &stream).unwrap();
        let expected = bits(&context, &out);
        let beside = expected[0].chunks_exact(heads[1] + 1);
        assert!(
            beside
                .into_iter()
                .all(|row| row[heads[1]] == u32::MAX && row[0] != u32::MAX)
        );

        let mut out = raw.poisoned(&context);
        raw.gate(raw.in_blocks(), &mut out)
            .launch(&context, &stream)
            .unwrap();
        assert!(bits(&context, &out) == expected, "on their own, in blocks");

        let s = ConvSpec {
            qk_l2norm,
            ..spec(dtype, heads, [32, 8], 4)
        };
        let without = convolve(&context, s, tokens, None);
        let mut out = raw.poisoned(&context);
        let with = convolve(
            &context,
            s,
            tokens,
            Some(raw.gate(raw.in_blocks(), &mut out)),
        );
        assert!(with == without, "gates change q, k or v");
        assert!(bits(&context, &out) == expected, "within the convolution");
    }
}

/// What cannot be: norms of longer rows than recurrences have, gates of another batch, blocks where none can be.
#[test]
fn refusals() {
    let context = context();
    let stream = context.stream().unwrap();
    let s = normed(Dtype::Bf16, [1, 2], [257, 8], 4);
    expect(Conv::packed(&context, s, &[0i32, 4], 4), "key_dim", Shape);

    let memory = Memory::new(&context);
    let s = normed(Dtype::Bf16, [2, 4], [8, 8], 4);
    let plan = Conv::packed(&context, s, &[0i32, 4], 4).unwrap();
    let f32s = |shape: [usize; 2]| View {
        dtype: Dtype::F32,
        ..view(shape)
    };
    let gates = |rows: usize, heads: usize, blocks: [[usize; 2]; 2], foreign: bool| {
        let part = |[blocks, of_block]: [usize; 2]| {
            let mut t = view([rows, blocks, of_block]);
            t.strides = [64, 16, 1];
            TokenScalars::in_blocks(memory.tensor(View { foreign, ..t }))
        };
        let [a, b] = blocks.map(part);
        let [g, beta] = [0, 1].map(|_| memory.tensor_mut(f32s([rows, heads])).into());
        Gate {
            a,
            b,
            a_log: memory.tensor(view([heads])),
            dt_bias: None,
            allow_neg_eigval: false,
            g,
            beta,
        }
    };
    let launch = |gates: Gate<'_>| {
        let part = |heads: usize| memory.tensor_mut(view([4, heads, 8])).into();
        let tensors = ConvTensors {
            cu_seqlens: None,
            x: ConvInput::flat(&memory.tensor(view([4, 64])), &s).unwrap(),
            weight: memory.tensor(view([64, 4])),
            bias: None,
            state: None,
            slots: None,
            q: part(2),
            k: part(2),
            v: part(4),
            gates: Some(gates),
        };
        plan.launch(&stream, &tensors)
    };
    let [two, flat] = [[2, 2], [1, 4]];
    expect(launch(gates(3, 4, [two, two], false)), "a", Shape);
    expect(launch(gates(4, 4, [flat, [4, 2]], false)), "b", Shape);
    expect(launch(gates(4, 4, [two, [1, 3]], false)), "b", Shape);
    expect(launch(gates(4, 6, [[2, 3], [3, 2]], false)), "b", Shape);
    expect(launch(gates(4, 3, [two, two], false)), "a_log", Shape);
    expect(launch(gates(4, 4, [two, two], true)), "a", Device);
    expect(launch(gates(4, 4, [[4, 0], flat], false)), "a", Stride);
    // Not even their number fits into 64 bits.
    let far = |dtype, strides| View {
        dtype,
        strides,
        ..view([1 << 62, 4])
    };
    let zeros = || TokenScalars::from(memory.tensor(far(Dtype::Bf16, [0, 0])));
    let [g, beta] = [0, 1].map(|_| memory.tensor_mut(far(Dtype::F32, [4, 1])).into());
    let gate = Gate {
        a: zeros(),
        b: zeros(),
        g,
        beta,
        ..gates(4, 4, [two, two], false)
    };
    expect(gate.launch(&context, &stream), "a", Shape);

    // Rows of projections that are too short, and heads that are no groups.
    let ba = memory.tensor(view([4, 8]));
    expect(Gate::flat(&ba, 5), "ba", Shape);
    expect(Gate::interleaved(&ba, 3, 4), "value_heads", Shape);
    expect(Gate::interleaved(&ba, 0, 4), "value_heads", Shape);
    // Prefill has one distance from head to head.
    let [a, b] = Gate::interleaved(&ba, 2, 4).unwrap();
    let plan = Prefill::packed(&context, PrefillSpec::new(2, 4, 16, 16), &[0i32, 4], 4).unwrap();
    let part = |heads: usize| memory.tensor(view([4, heads, 16])).into();
    let mut workspace = context.alloc(plan.workspace_bytes()).unwrap();
    let tensors = PrefillTensors {
        cu_seqlens: None,
        q: part(2),
        k: part(2),
        v: part(4),
        gating: Gating::Raw {
            a,
            b,
            a_log: memory.tensor(view([4])),
            dt_bias: None,
            allow_neg_eigval: false,
        },
        states: States::None,
        o: memory.tensor_mut(view([4, 4, 16])).into(),
        snapshots: None,
    };
    expect(
        plan.launch(&stream, &tensors, Workspace::new(&mut workspace)),
        "a",
        Stride,
    );
}

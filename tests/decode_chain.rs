//! Operations in a row: what is prefilled is decoded further, and what is verified at once and committed in part equals
//! single steps, bit for bit, in both pools.

mod common;
#[path = "decode_chain/drafts.rs"]
mod drafts;

use common::{Case, Entry, bar, context};
use deltawave::commit::{Commit, CommitConv, CommitTensors};
use deltawave::conv::{Conv, ConvInput, ConvSpec, ConvState, ConvStateLayout, ConvTensors};
use deltawave::decode::{Decode, DecodeSpec, DecodeTensors};
use deltawave::gates::Gating;
use deltawave::prefill::PrefillSpec;
use deltawave::runtime::{Context, Stream};
use deltawave::state::StatePool;
use deltawave::tensor::Buffer;
use deltawave::types::{Dtype, StateLayout};
use deltawave_lab::inputs::{
    Gates, InputSpec, Inputs, Tensor as HostTensor, random_normal, random_state,
};
use deltawave_lab::metrics::compare;
use deltawave_lab::oracle;
use half::bf16;

/// The prompt's part ends within a chunk, at its ends, and nowhere.
#[test]
fn prefill_and_decode_are_the_prefill_of_all() {
    const TOKENS: usize = 130;
    let context = context();
    let stream = context.stream().unwrap();
    let spec = PrefillSpec {
        qk_l2norm: true,
        ..common::spec(Dtype::Bf16, 1, 2, 64, 32)
    };
    let of = |prompt: usize| Case {
        padding: TOKENS - prompt,
        gates: Gates::Mixed,
        entry: Entry::Packed,
        ..Case::new(spec, &[prompt])
    };
    let all = of(TOKENS);
    let data = all.data();
    let reference = oracle::prefill(&data.problem(&all)).unwrap();
    let (o_bar, state_bar) = bar(Dtype::Bf16, Gates::Mixed);
    for prompt in [0, 1, 15, 63, 64, 65, 127, 128, 129, TOKENS] {
        let case = of(prompt);
        let output = common::run(&context, &case, &case.data());
        let mut o = output.o[..prompt * 64].to_vec();
        let mut pool = context.upload(&output.state.unwrap()).unwrap();
        let inputs = &data.inputs;
        let [q, k, v] =
            [&inputs.q, &inputs.k, &inputs.v].map(|t| context.upload(&t.bytes).unwrap());
        let [g, beta] = [&inputs.g, &inputs.beta].map(|x| context.upload(x).unwrap());
        let mut out = context.alloc::<bf16>(TOKENS * 64).unwrap();
        let mut at = prompt;
        while at < TOKENS {
            let tokens = (TOKENS - at).min(if at % 2 == 0 { 1 } else { 11 });
            let plan = Decode::new(
                &context,
                DecodeSpec {
                    qk_l2norm: true,
                    tokens,
                    ..DecodeSpec::new(1, 2, 64, 32)
                },
                1,
            );
            let keys = |b: &'_ Buffer<u8>| {
                let base = b.address().wrapping_byte_add(2 * 64 * at);
                // SAFETY: the tokens lie in the buffer, which outlives the launch.
                unsafe {
                    deltawave::tensor::Tensor::from_raw(
                        base,
                        Dtype::Bf16,
                        [tokens, 1, 64],
                        [64, 64, 1],
                    )
                }
            };
            let tensors = DecodeTensors {
                q: keys(&q).into(),
                k: keys(&k).into(),
                v: v.tensor_of(Dtype::Bf16, [tokens, 2, 32], [64, 32, 1], at * 64)
                    .unwrap()
                    .into(),
                gating: Gating::Given {
                    g: Some(
                        g.tensor_strided([tokens, 2], [2, 1], at * 2)
                            .unwrap()
                            .into(),
                    ),
                    beta: Some(
                        beta.tensor_strided([tokens, 2], [2, 1], at * 2)
                            .unwrap()
                            .into(),
                    ),
                },
                pool: StatePool {
                    tensor: pool.tensor_mut([1, 2, 64, 32]).unwrap(),
                    layout: StateLayout::KeyMajor,
                    slots: None,
                    write_slots: None,
                },
                has_initial_state: None,
                states: None,
                o: out
                    .tensor_strided_mut([tokens, 2, 32], [64, 32, 1], at * 64)
                    .unwrap()
                    .into(),
            };
            plan.unwrap().launch(&stream, &tensors).unwrap();
            at += tokens;
        }
        let rest = out.download(&stream).unwrap();
        o.extend(rest[prompt * 64..].iter().map(|x| x.to_f32()));
        let state = pool.download(&stream).unwrap();
        let o = compare(&o, &reference.o);
        let state = compare(&state, &reference.final_state);
        println!("{prompt} of {TOKENS} tokens prefilled: o {o:?}, state {state:?}");
        assert!(o.rms_ratio < 1.15 * o_bar, "{prompt}: {o:?}");
        assert!(state.rms_ratio < 1.15 * state_bar, "{prompt}: {state:?}");
    }
}

const HK: usize = 1;
const HV: usize = 2;
const K: usize = 32;
const V: usize = 48;
const CHANNELS: usize = 2 * HK * K + HV * V;
const COLUMNS: usize = 3;
const STATE: usize = HV * K * V;

/// A convolution and a decode of a batch, with the memory of both: what one step of a layer is.
struct Layer {
    context: Context,
    stream: Stream,
    tokens: usize,
    batch: usize,
    layout: StateLayout,
    conv_layout: ConvStateLayout,
    x: Buffer<bf16>,
    weight: Buffer<bf16>,
    g: Buffer<f32>,
    beta: Buffer<f32>,
    has: Buffer<u8>,
    /// q, k, v and o of all tokens.
    rows: [Buffer<bf16>; 4],
    conv_pool: Buffer<bf16>,
    pool: Buffer<f32>,
}

fn halves(t: HostTensor) -> Vec<bf16> {
    t.values.iter().map(|x| bf16::from_f32(*x)).collect()
}

impl Layer {
    fn new(
        context: &Context,
        tokens: usize,
        batch: usize,
        layout: StateLayout,
        conv_layout: ConvStateLayout,
    ) -> Layer {
        let rows = batch * tokens;
        let draw = |name, n| halves(random_normal(Dtype::Bf16, name, n, 3));
        let inputs = Inputs::new(InputSpec {
            tokens: rows,
            key_heads: HK,
            value_heads: HV,
            key_dim: K,
            value_dim: V,
            ..Default::default()
        });
        let slots = batch + 1;
        let has: Vec<u8> = (0..batch).map(|n| u8::from(n % 3 != 1)).collect();
        Layer {
            context: context.clone(),
            stream: context.stream().unwrap(),
            tokens,
            batch,
            layout,
            conv_layout,
            x: context.upload(&draw("x", rows * CHANNELS)).unwrap(),
            weight: context.upload(&draw("weight", CHANNELS * 4)).unwrap(),
            g: context.upload(&inputs.g).unwrap(),
            beta: context.upload(&inputs.beta).unwrap(),
            has: context.upload(&has).unwrap(),
            rows: [HK * K, HK * K, HV * V, HV * V]
                .map(|n| context.upload(&vec![bf16::NAN; rows * n]).unwrap()),
            conv_pool: context
                .upload(&draw("conv", slots * CHANNELS * COLUMNS))
                .unwrap(),
            pool: context
                .upload(&random_state(Dtype::F32, slots * STATE, 3).values)
                .unwrap(),
        }
    }

    /// `tokens` tokens of every sequence from token `first` on, with these slots. The states after every token go to
    /// `states`, and then neither pool is written.
    fn run(
        &mut self,
        first: usize,
        tokens: usize,
        slots: &[i32],
        states: Option<&mut Buffer<f32>>,
    ) {
        let (batch, all) = (self.batch, self.tokens);
        assert!(
            tokens == 1 || tokens == all,
            "rows of one token, or all rows"
        );
        let rows = batch * tokens;
        let step = if tokens == 1 { all } else { 1 };
        let spec = ConvSpec::new(HK, HV, K, V);
        let slots = self.context.upload(slots).unwrap();
        // A sequence that has moved has a state.
        let some = self.context.upload(&vec![1u8; batch]).unwrap();
        let has = if first == 0 { &self.has } else { &some };
        let cu_seqlens: Vec<i32> = (0..=batch).map(|n| (n * tokens) as i32).collect();
        let mut plan = Conv::packed(&self.context, spec, &cu_seqlens, rows).unwrap();
        if states.is_some() {
            plan = plan.keeping_states();
        }
        let x = self
            .x
            .tensor_strided([rows, CHANNELS], [step * CHANNELS, 1], first * CHANNELS)
            .unwrap();
        let conv_shape = match self.conv_layout {
            ConvStateLayout::ChannelMajor => [batch + 1, CHANNELS, COLUMNS],
            ConvStateLayout::TokenMajor => [batch + 1, COLUMNS, CHANNELS],
        };
        let shape = |heads: usize, dim: usize| ([rows, heads, dim], [step * heads * dim, dim, 1]);
        let dims = [(HK, K), (HK, K), (HV, V), (HV, V)];
        {
            let [q, k, v, _] = &mut self.rows;
            let out = |b: &'_ mut Buffer<bf16>, i: usize| {
                let (shape, strides) = shape(dims[i].0, dims[i].1);
                let at = first * dims[i].0 * dims[i].1;
                let base = b.address().wrapping_byte_add(2 * at);
                // SAFETY: the rows lie in the buffer, which outlives the launch.
                unsafe { deltawave::tensor::TensorMut::from_raw(base, Dtype::Bf16, shape, strides) }
            };
            let tensors = ConvTensors {
                cu_seqlens: None,
                x: ConvInput::flat(&x, &spec).unwrap(),
                weight: self.weight.tensor([CHANNELS, 4]).unwrap(),
                bias: None,
                state: Some(ConvState {
                    tensor: self.conv_pool.tensor_mut(conv_shape).unwrap(),
                    layout: self.conv_layout,
                    has_initial_state: Some(has.into()),
                }),
                slots: Some((&slots).into()),
                q: out(q, 0).into(),
                k: out(k, 1).into(),
                v: out(v, 2).into(),
                gates: None,
            };
            plan.launch(&self.stream, &tensors).unwrap();
        }
        let decode = DecodeSpec {
            qk_l2norm: true,
            tokens,
            ..DecodeSpec::new(HK, HV, K, V)
        };
        let plan = Decode::new(&self.context, decode, batch).unwrap();
        let matrix = self.matrix();
        let [q, k, v, o] = &mut self.rows;
        let view = |b: &'_ Buffer<bf16>, i: usize| {
            let (shape, strides) = shape(dims[i].0, dims[i].1);
            let base = b
                .address()
                .wrapping_byte_add(2 * first * dims[i].0 * dims[i].1);
            // SAFETY: as above.
            unsafe { deltawave::tensor::Tensor::from_raw(base, Dtype::Bf16, shape, strides) }
        };
        let (o_shape, o_strides) = shape(HV, V);
        let gate = |b: &'_ Buffer<f32>| {
            let base = b.address().wrapping_byte_add(4 * first * HV);
            // SAFETY: as above.
            unsafe {
                deltawave::tensor::Tensor::from_raw(base, Dtype::F32, [rows, HV], [step * HV, 1])
            }
        };
        let tensors = DecodeTensors {
            q: view(q, 0).into(),
            k: view(k, 1).into(),
            v: view(v, 2).into(),
            gating: Gating::Given {
                g: Some(gate(&self.g).into()),
                beta: Some(gate(&self.beta).into()),
            },
            pool: StatePool {
                tensor: self
                    .pool
                    .tensor_mut([batch + 1, HV, matrix[0], matrix[1]])
                    .unwrap(),
                layout: self.layout,
                slots: Some((&slots).into()),
                write_slots: None,
            },
            has_initial_state: Some(has.into()),
            states: states.map(|b| {
                let shape = [batch, tokens, HV, matrix[0], matrix[1]];
                b.tensor_mut(shape).unwrap()
            }),
            o: o.tensor_strided_mut(o_shape, o_strides, first * HV * V)
                .unwrap()
                .into(),
        };
        plan.launch(&self.stream, &tensors).unwrap();
        self.stream.synchronize().unwrap();
    }

    fn matrix(&self) -> [usize; 2] {
        match self.layout {
            StateLayout::KeyMajor => [K, V],
            StateLayout::ValueMajor => [V, K],
        }
    }

    fn commit(&mut self, accepted: &[i32], slots: &[i32], states: &Buffer<f32>) {
        let (batch, tokens, matrix) = (self.batch, self.tokens, self.matrix());
        let spec = DecodeSpec {
            tokens,
            ..DecodeSpec::new(HK, HV, K, V)
        };
        let plan = Commit::new(&self.context, spec, batch).unwrap();
        let (accepted, slots) = (
            self.context.upload(accepted).unwrap(),
            self.context.upload(slots).unwrap(),
        );
        let x = self.x.tensor([batch * tokens, CHANNELS]).unwrap();
        let conv_shape = match self.conv_layout {
            ConvStateLayout::ChannelMajor => [batch + 1, CHANNELS, COLUMNS],
            ConvStateLayout::TokenMajor => [batch + 1, COLUMNS, CHANNELS],
        };
        let tensors = CommitTensors {
            accepted: (&accepted).into(),
            slots: Some((&slots).into()),
            states: states
                .tensor([batch, tokens, HV, matrix[0], matrix[1]])
                .unwrap(),
            pool: self
                .pool
                .tensor_mut([batch + 1, HV, matrix[0], matrix[1]])
                .unwrap(),
            layout: self.layout,
            conv: Some(CommitConv {
                x: ConvInput::flat(&x, &ConvSpec::new(HK, HV, K, V)).unwrap(),
                state: self.conv_pool.tensor_mut(conv_shape).unwrap(),
                layout: self.conv_layout,
                has_initial_state: Some((&self.has).into()),
            }),
        };
        plan.launch(&self.stream, &tensors).unwrap();
        self.stream.synchronize().unwrap();
    }

    /// The bits of o and of both pools.
    fn bits(&self) -> [Vec<u32>; 3] {
        let wide = |b: &Buffer<bf16>| {
            let all = b.download(&self.stream).unwrap();
            all.iter().map(|x| x.to_bits().into()).collect()
        };
        let pool = self.pool.download(&self.stream).unwrap();
        [
            wide(&self.rows[3]),
            wide(&self.conv_pool),
            pool.iter().map(|x| x.to_bits()).collect(),
        ]
    }
}

/// Every count from none to all, one of each in a batch, and counts beyond both ends; a sequence that is padding.
#[test]
fn commits_are_single_steps() {
    let context = context();
    for (tokens, layout, conv_layout) in [
        (2, StateLayout::KeyMajor, ConvStateLayout::TokenMajor),
        (5, StateLayout::KeyMajor, ConvStateLayout::ChannelMajor),
        (5, StateLayout::ValueMajor, ConvStateLayout::TokenMajor),
    ] {
        let batch = tokens + 4;
        let last = tokens as i32;
        let accepted: Vec<i32> = (0..=last).chain([-7, last + 9, 2]).collect();
        let mut slots: Vec<i32> = (0..batch as i32).map(|n| batch as i32 - n).collect();
        slots[batch - 1] = -1;
        let make = || Layer::new(&context, tokens, batch, layout, conv_layout);

        let mut verified = make();
        let [_, conv_before, pool_before] = verified.bits();
        let mut states = context
            .upload(&vec![f32::NAN; batch * tokens * STATE])
            .unwrap();
        verified.run(0, tokens, &slots, Some(&mut states));
        let [_, conv, pool] = verified.bits();
        assert!(conv == conv_before, "verifying wrote conv states");
        assert!(pool == pool_before, "verifying wrote states");
        verified.commit(&accepted, &slots, &states);
        let [verified_o, verified_conv, verified_pool] = verified.bits();

        let mut stepped = make();
        for t in 0..tokens {
            let of_step: Vec<i32> = (accepted.iter().zip(&slots))
                .map(|(n, slot)| if (t as i32) < *n { *slot } else { -1 })
                .collect();
            stepped.run(t, 1, &of_step, None);
        }
        let [o, conv, pool] = stepped.bits();
        assert!(conv == verified_conv, "conv states, {tokens} tokens");
        assert!(pool == verified_pool, "states, {tokens} tokens");
        let row = HV * V;
        for (n, accepted) in accepted.iter().enumerate().take(batch - 1) {
            let first = n * tokens * row;
            let end = first + (*accepted).clamp(0, last) as usize * row;
            assert!(o[first..end] == verified_o[first..end], "o of {n}");
        }
    }
}

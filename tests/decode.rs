//! Decode on the device against the f64 oracle: every shape, type, layout and gate; slots, padding and states after every
//! token; long runs.

#[path = "common/decode.rs"]
mod cases;
mod common;
#[path = "decode/drafts.rs"]
mod drafts;
#[path = "decode/normed.rs"]
mod normed;
#[path = "decode/state_types.rs"]
mod state_types;

use cases::{Case, Data, check, check_output, run, run_once, spec};
use common::{GateKind, context};
use deltawave::decode::{Decode, DecodeSpec, DecodeTensors};
use deltawave::gates::Gating;
use deltawave::model::Heads;
use deltawave::runtime::Context;
use deltawave::state::StatePool;
use deltawave::types::{Dtype, HeadMap, StateLayout};
use deltawave_lab::inputs::{Gates, Keys};
use deltawave_lab::metrics::compare;
use deltawave_lab::oracle;
use proptest::prelude::*;

const LAYOUTS: [StateLayout; 2] = [StateLayout::KeyMajor, StateLayout::ValueMajor];
const DTYPES: [Dtype; 2] = [Dtype::Bf16, Dtype::F16];
const STATE_DTYPES: [Dtype; 3] = [Dtype::F32, Dtype::Bf16, Dtype::F16];

/// Every layout and type of the state, every key bucket, dimensions that fill neither a workgroup nor a step.
#[test]
fn shapes_layouts_and_types() {
    let context = context();
    for [key_dim, value_dim] in [
        [16, 16],
        [64, 48],
        [96, 192],
        [128, 128],
        [144, 80],
        [256, 64],
    ] {
        for layout in LAYOUTS {
            for state_dtype in STATE_DTYPES {
                for dtype in DTYPES {
                    let case = Case {
                        layout,
                        state_dtype,
                        ..Case::new(spec(dtype, [1, 2], [key_dim, value_dim], 1), 2)
                    };
                    check(&context, &case);
                }
            }
        }
    }
}

/// Several tokens, with and without the states after each.
#[test]
fn several_tokens() {
    let context = context();
    for tokens in [2, 3, 4, 16] {
        for (layout, states) in [
            (StateLayout::KeyMajor, None),
            (StateLayout::KeyMajor, Some(Dtype::F32)),
            (StateLayout::ValueMajor, Some(Dtype::Bf16)),
            (StateLayout::ValueMajor, Some(Dtype::F16)),
        ] {
            for state_dtype in STATE_DTYPES {
                let case = Case {
                    layout,
                    states,
                    state_dtype,
                    padding: 0b10,
                    ..Case::new(spec(Dtype::Bf16, [1, 2], [48, 48], tokens), 3)
                };
                check(&context, &case);
            }
        }
    }
}

/// Gates of every kind and size, norms inside, head maps, scales.
#[test]
fn gates_norms_and_heads() {
    let context = context();
    let raw = |dtype, dt_bias, allow_neg_eigval| GateKind::Raw {
        dtype,
        dt_bias,
        allow_neg_eigval,
    };
    for (gate_kind, gates) in [
        (GateKind::NoDecay, Gates::Normal),
        (GateKind::NoBeta, Gates::Normal),
        (GateKind::Given, Gates::Strong),
        (GateKind::Given, Gates::Zero),
        (raw(Dtype::F32, true, false), Gates::Normal),
        (raw(Dtype::Bf16, false, true), Gates::Normal),
        (raw(Dtype::F16, true, true), Gates::Normal),
    ] {
        for (qk_l2norm, head_map, scale, dims) in [
            (false, HeadMap::Grouped, Some(1.0), [32, 32]),
            (true, HeadMap::Tiled, None, [32, 32]),
            // Kernels for full heads.
            (false, HeadMap::Grouped, None, [128, 32]),
            (true, HeadMap::Tiled, Some(1.0), [128, 64]),
        ] {
            let mut s = DecodeSpec {
                qk_l2norm,
                scale,
                ..spec(Dtype::F16, [2, 6], dims, 2)
            };
            s.heads.map = head_map;
            let case = Case {
                gate_kind,
                gates,
                keys: Keys::Silu,
                ..Case::new(s, 2)
            };
            check(&context, &case);
        }
    }
}

/// Views of any strides, at odd addresses; rows of states apart from each other.
#[test]
fn strides() {
    let context = context();
    for packed in [false, true] {
        for (pads, row_pad, slot_pad, dims) in [
            ([8, 16, 8, 8], 4, 16, [32, 48]),
            ([3, 5, 7, 1], 1, 3, [32, 48]),
            // Aligned: kernels for full heads.
            ([8, 16, 24, 8], 8, 16, [128, 64]),
        ] {
            for layout in LAYOUTS {
                for state_dtype in STATE_DTYPES {
                    let case = Case {
                        packed,
                        pads,
                        row_pad,
                        slot_pad,
                        layout,
                        state_dtype,
                        ..Case::new(spec(Dtype::Bf16, [2, 2], dims, 2), 3)
                    };
                    check(&context, &case);
                }
            }
        }
    }
}

/// Slots: none given, in place, read here and written there; padding; no sequence at all.
#[test]
fn slots_and_padding() {
    let context = context();
    for (has_slots, moves) in [(false, false), (true, false), (true, true)] {
        for (has_initial, padding) in [(0xff, 0), (0, 0b110), (0b0101, 0b0110), (0xff, 0xff)] {
            let case = Case {
                has_slots,
                moves,
                has_initial,
                padding,
                ..Case::new(spec(Dtype::Bf16, [1, 1], [32, 32], 1), 5)
            };
            check(&context, &case);
        }
    }
    check(
        &context,
        &Case::new(spec(Dtype::Bf16, [1, 1], [32, 32], 1), 0),
    );
}

/// Read and write slots that are not there by themselves: zeros to start from, nothing left behind.
#[test]
fn half_padding() {
    half_padding_of(false);
    half_padding_of(true);
}

/// With slots of the launch, or of the plan.
fn half_padding_of(planned: bool) {
    let context = context();
    let stream = context.stream().unwrap();
    let s = spec(Dtype::Bf16, [1, 1], [16, 16], 1);
    let case = Case {
        has_initial: 0xff,
        ..Case::new(s, 2)
    };
    let data = Data::new(&case);
    let state: Vec<f32> = data.initial.values[..256].to_vec();
    let before = [vec![7.0f32; 256], state.clone(), vec![7.0; 256]].concat();
    let mut pool = context.upload(&before).unwrap();
    let token = |t: &deltawave_lab::inputs::Tensor| context.upload(&t.bytes).unwrap();
    let [q, k, v] = [&data.inputs.q, &data.inputs.k, &data.inputs.v].map(token);
    let view = |b: &'_ deltawave::tensor::Buffer<u8>| {
        // SAFETY: the buffer has these elements, and lives as long as the launch.
        unsafe {
            deltawave::tensor::Tensor::from_raw(b.address(), Dtype::Bf16, [2, 1, 16], [16, 16, 1])
        }
    };
    let mut o = context.upload(&[0xffu8; 2 * 16 * 2]).unwrap();
    // Sequence 0 has no state and leaves one, sequence 1 the other way around.
    let (read, write) = (
        context.upload(&[-1, 1]).unwrap(),
        context.upload(&[2, 3]).unwrap(),
    );
    let tensors = DecodeTensors {
        q: view(&q).into(),
        k: view(&k).into(),
        v: view(&v).into(),
        gating: Gating::Given {
            g: None,
            beta: None,
        },
        pool: StatePool {
            tensor: pool.tensor_mut([3, 1, 16, 16]).unwrap(),
            layout: StateLayout::KeyMajor,
            slots: (!planned).then(|| (&read).into()),
            write_slots: (!planned).then(|| (&write).into()),
        },
        has_initial_state: None,
        states: None,
        o: o.tensor_of_mut(Dtype::Bf16, [2, 1, 16], [16, 16, 1], 0)
            .unwrap()
            .into(),
    };
    let mut plan = Decode::new(&context, s, 2).unwrap();
    if planned {
        plan.set_slots(&[-1, 1], Some(&[2, -1])).unwrap();
    }
    plan.launch(&stream, &tensors).unwrap();
    let mut problem = data.problem(&case, &[0, 1, 2], &[false, true]);
    (problem.gate, problem.beta) = (oracle::Gate::None, oracle::Beta::One);
    let shifted = [vec![0.0; 256], state].concat();
    problem.initial_state = Some(&shifted);
    let solution = oracle::prefill(&problem).unwrap();
    let o = deltawave_lab::inputs::Tensor::from_bytes(Dtype::Bf16, o.download(&stream).unwrap());
    assert!(compare(&o.values, &solution.o).rms_ratio < 3e-3);
    let after = pool.download(&stream).unwrap();
    assert!(after[..512] == before[..512], "slots that nobody writes");
    assert!(compare(&after[512..], &solution.final_state[..256]).rms_ratio < 1e-6);
}

/// The same bits, whatever else is in the batch.
#[test]
fn a_sequence_does_not_depend_on_its_batch() {
    let context = context();
    let case = Case {
        has_slots: false,
        ..Case::new(spec(Dtype::Bf16, [2, 4], [128, 64], 2), 3)
    };
    let data = Data::new(&case);
    let all = run_once(&context, &case, &data);
    let alone = Case { batch: 1, ..case };
    let one = run_once(&context, &alone, &Data::new(&alone));
    let bytes = one.o.bytes.len();
    assert!(one.o.bytes == all.o.bytes[..bytes], "o");
    let state = alone.state_strides()[0] * 4;
    assert!(one.pool[..state] == all.pool[..state], "state");
}

/// The kernel for few sequences and those for many leave the same bits: states of every type and layout, with and without
/// alignment, one token and several, in slots, with padding, with and without the states after every token.
#[test]
fn few_and_many_sequences() {
    let context = context();
    let kernel = |s, batch, states, layout| {
        let plan = Decode::new(&context, s, batch).unwrap();
        plan.kernel(states, layout)
    };
    let mut round = 0;
    for state_dtype in STATE_DTYPES {
        for layout in LAYOUTS {
            for (pads, pad, tokens) in [
                ([0; 4], 0, 1),
                ([8, 16, 24, 8], 8, 1),
                ([8, 16, 24, 8], 8, 3),
                ([3, 5, 7, 1], 1, 3),
            ] {
                round += 1;
                let states = [None, None, Some(STATE_DTYPES[round / 3 % 3])];
                let s = DecodeSpec {
                    qk_l2norm: round % 5 == 0,
                    ..spec(DTYPES[round % 2], [2, 4], [128, 128], tokens)
                };
                let of_few = kernel(s, 1, state_dtype, layout);
                assert!(of_few.starts_with("dw_decode_few_"), "{of_few}");
                let many = (2..).find(|&n| kernel(s, n, state_dtype, layout) != of_few);
                let many = Case {
                    state_dtype,
                    layout,
                    packed: round % 7 < 4,
                    pads,
                    row_pad: pad,
                    slot_pad: pad,
                    moves: round % 3 == 1,
                    padding: 0b0100_0010,
                    states: states[round / 2 % 3],
                    ..Case::new(s, many.unwrap())
                };
                same_in_part(&context, &many, 3);
            }
        }
    }
}

/// Checks a batch and its first sequences alone by the oracle, and that they have the same bits.
fn same_in_part(context: &Context, whole: &Case, first: usize) {
    let part = Case {
        batch: first,
        ..whole.clone()
    };
    let [whole_out, part_out] = [whole, &part].map(|case| {
        let data = Data::new(case);
        let output = run(context, case, &data);
        check_output(case, &data, &output);
        output
    });
    let same = |a: &[u8], b: &[u8]| a[..] == b[..a.len()];
    assert!(same(&part_out.o.bytes, &whole_out.o.bytes), "o: {part:?}");
    if let (Some(a), Some(b)) = (&part_out.states, &whole_out.states) {
        assert!(same(&a.bytes, &b.bytes), "states: {part:?}");
    }
    for n in 0..first {
        let state = |case: &Case, output: &cases::Output| {
            let slot = case.state_strides()[0] * case.state_dtype.size();
            output.pool[case.write_slot(n) * slot..][..slot].to_vec()
        };
        let equal = state(&part, &part_out) == state(whole, &whole_out);
        assert!(equal, "state of sequence {n}: {part:?}");
    }
}

/// 4096 tokens, in launches of 1 and of 16: the f32 state is the oracle's.
#[test]
fn a_long_run_keeps_its_state() {
    const STEPS: usize = 4096;
    let context = context();
    let stream = context.stream().unwrap();
    for (layout, gates) in [
        (StateLayout::KeyMajor, Gates::Mixed),
        (StateLayout::ValueMajor, Gates::Zero),
    ] {
        let s = DecodeSpec {
            qk_l2norm: true,
            ..spec(Dtype::Bf16, [1, 2], [64, 64], STEPS)
        };
        let case = Case {
            gates,
            has_initial: 0,
            ..Case::new(s, 1)
        };
        let data = Data::new(&case);
        let inputs = &data.inputs;
        let [q, k, v] =
            [&inputs.q, &inputs.k, &inputs.v].map(|t| context.upload(&t.bytes).unwrap());
        let [g, beta] = [&inputs.g, &inputs.beta].map(|x| context.upload(x).unwrap());
        let mut o = context.alloc::<u8>(STEPS * 2 * 64 * 2).unwrap();
        let mut pool = context.upload(&vec![0.0f32; 2 * 64 * 64]).unwrap();
        let plans = [1, 16].map(|tokens| {
            let plan = Decode::new(&context, DecodeSpec { tokens, ..s }, 1);
            (tokens, plan.unwrap())
        });
        let mut at = 0;
        while at < STEPS {
            // Now and then a few single tokens.
            let (tokens, plan) = &plans[usize::from(at % 512 >= 16)];
            let keys = [*tokens, 1, 64];
            let values = [*tokens, 2, 64];
            let tensors = DecodeTensors {
                q: q.tensor_of(s.dtype, keys, [64, 64, 1], at * 64)
                    .unwrap()
                    .into(),
                k: k.tensor_of(s.dtype, keys, [64, 64, 1], at * 64)
                    .unwrap()
                    .into(),
                v: v.tensor_of(s.dtype, values, [128, 64, 1], at * 128)
                    .unwrap()
                    .into(),
                gating: Gating::Given {
                    g: Some(
                        g.tensor_strided([*tokens, 2], [2, 1], at * 2)
                            .unwrap()
                            .into(),
                    ),
                    beta: Some(
                        beta.tensor_strided([*tokens, 2], [2, 1], at * 2)
                            .unwrap()
                            .into(),
                    ),
                },
                pool: StatePool {
                    tensor: pool.tensor_mut([1, 2, 64, 64]).unwrap(),
                    layout,
                    slots: None,
                    write_slots: None,
                },
                has_initial_state: None,
                states: None,
                o: o.tensor_of_mut(s.dtype, values, [128, 64, 1], at * 128)
                    .unwrap()
                    .into(),
            };
            plan.launch(&stream, &tensors).unwrap();
            at += tokens;
        }
        let solution = oracle::prefill(&data.problem(&case, &[0, STEPS as i32], &[false])).unwrap();
        let state = pool.download(&stream).unwrap();
        let state = layout.to_key_major(&state, 64, 64);
        let error = compare(&state, &solution.final_state);
        println!("{gates:?}: state after {STEPS} tokens {error:?}");
        assert!(error.rms_ratio < 1e-5, "{error:?}");
        let o = deltawave_lab::inputs::Tensor::from_bytes(s.dtype, o.download(&stream).unwrap());
        let error = compare(&o.values, &solution.o);
        assert!(
            error.rms_ratio < cases::limit(&solution.o, s.dtype),
            "{error:?}"
        );
    }
}

/// A NaN stays within its sequence, and what it reaches is NaN.
#[test]
fn a_nan_stays_in_its_sequence() {
    let context = context();
    for bits in [0x7fff_ffffu32, 0xffff_ffff, 0x7f80_0001] {
        let case = Case::new(spec(Dtype::Bf16, [1, 1], [16, 32], 1), 2);
        let mut data = Data::new(&case);
        data.inputs.g[1] = f32::from_bits(bits);
        let output = run(&context, &case, &data);
        let (first, second) = output.o.values.split_at(32);
        assert!(first.iter().all(|x| x.is_finite()), "{bits:x}");
        assert!(second.iter().all(|x| x.is_nan()), "{bits:x}");
    }
}

fn any_case() -> impl Strategy<Value = Case> {
    let dim = || prop_oneof![3 => (1usize..=4).prop_map(|n| 16 * n), 1 => (1usize..=16).prop_map(|n| 16 * n)];
    // Some with the dimensions that have kernels of their own.
    let dims = prop_oneof![
        3 => [dim(), dim()],
        1 => (1usize..=4).prop_map(|n| [128, 32 * n]),
    ];
    let shape = (
        prop_oneof![Just(Dtype::Bf16), Just(Dtype::F16)],
        1usize..=2,
        1usize..=3,
        dims,
        prop_oneof![Just(1usize), 1usize..=5],
        (
            any::<bool>(),
            any::<bool>(),
            prop_oneof![Just(None), Just(Some(0.3f32))],
        ),
    );
    let any_dtype = prop_oneof![Just(Dtype::F32), Just(Dtype::Bf16), Just(Dtype::F16)];
    let raw =
        (any_dtype, any::<bool>(), any::<bool>()).prop_map(|(dtype, dt_bias, allow_neg_eigval)| {
            GateKind::Raw {
                dtype,
                dt_bias,
                allow_neg_eigval,
            }
        });
    let gates = (
        prop_oneof![
            3 => Just(GateKind::Given),
            1 => Just(GateKind::NoDecay),
            1 => Just(GateKind::NoBeta),
            3 => raw
        ],
        prop_oneof![
            Just(Gates::Normal),
            Just(Gates::Mixed),
            Just(Gates::Zero),
            Just(Gates::Strong)
        ],
    );
    let state_dtype = || prop_oneof![Just(Dtype::F32), Just(Dtype::Bf16), Just(Dtype::F16)];
    let pool = (
        state_dtype(),
        any::<bool>(),
        0usize..4,
        0usize..4,
        any::<bool>(),
        any::<bool>(),
        any::<u8>(),
        any::<u8>(),
        prop::option::weighted(0.3, state_dtype()),
    );
    let batch = (
        1usize..=5,
        any::<bool>(),
        prop::array::uniform4(0usize..9),
        0u64..1 << 32,
    );
    (shape, gates, pool, batch).prop_map(|(shape, (gate_kind, gates), pool, batch)| {
        let (dtype, key_heads, group, [key_dim, value_dim], tokens, options) = shape;
        let (qk_l2norm, tiled, scale) = options;
        let (
            state_dtype,
            value_major,
            row_pad,
            slot_pad,
            has_slots,
            moves,
            has_initial,
            padding,
            states,
        ) = pool;
        let (batch, packed, pads, seed) = batch;
        Case {
            spec: DecodeSpec {
                qk_l2norm,
                heads: Heads {
                    map: if tiled {
                        HeadMap::Tiled
                    } else {
                        HeadMap::Grouped
                    },
                    ..Heads::new(key_heads, key_heads * group, key_dim, value_dim)
                },
                scale,
                ..spec(
                    dtype,
                    [key_heads, key_heads * group],
                    [key_dim, value_dim],
                    tokens,
                )
            },
            gates,
            gate_kind,
            packed,
            pads,
            state_dtype,
            layout: LAYOUTS[usize::from(value_major)],
            row_pad,
            slot_pad,
            has_slots,
            moves: moves && has_slots,
            has_initial,
            padding,
            states,
            seed,
            ..Case::new(spec(dtype, [1, 1], [16, 16], 1), batch)
        }
    })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn random_batches(case in any_case()) {
        let data = Data::new(&case);
        let output = run(&context(), &case, &data);
        check_output(&case, &data, &output);
    }
}

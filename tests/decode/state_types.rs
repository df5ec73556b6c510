//! Types of states: what is stored is the f32 state, rounded once; what is read has its exact value.

use deltawave::commit::{Commit, CommitTensors};
use deltawave::decode::DecodeSpec;
use deltawave::types::{Dtype, StateLayout};
use deltawave_lab::inputs::{Tensor as HostTensor, random_state};

use super::cases::{Case, Data, POISON, run_once, spec};
use super::common::context;
use super::{LAYOUTS, STATE_DTYPES};

/// Data of tokens that leave their state as it is: no decay, and nothing is written.
fn idle(case: &Case, initial: Vec<f32>) -> Data {
    let mut data = Data::new(case);
    data.inputs.g.fill(0.0);
    data.inputs.beta.fill(0.0);
    data.initial = HostTensor::new(case.state_dtype, initial);
    data
}

/// All finite numbers of f16 but -0, subnormal ones among them, keep their bits in a pool.
#[test]
fn every_f16_state_keeps_its_bits() {
    let context = context();
    let numbers: Vec<f32> = (0..=u16::MAX)
        .map(|bits| {
            let x = HostTensor::from_bytes(Dtype::F16, bits.to_le_bytes().to_vec()).values[0];
            if x.is_finite() { x + 0.0 } else { 1.0 }
        })
        .collect();
    for layout in LAYOUTS {
        let case = Case {
            layout,
            state_dtype: Dtype::F16,
            has_initial: 0xff,
            ..Case::new(spec(Dtype::Bf16, [1, 1], [256, 256], 1), 1)
        };
        let left = run_once(&context, &case, &idle(&case, numbers.clone()));
        assert!(left.pool == left.before, "{layout:?}");
    }
}

/// Rounding is to nearest, ties to even. Beyond 65504 + 16 an f16 state is an infinity, and the smallest numbers are
/// subnormal. States after a token have the f32 numbers of the registers, rounded.
#[test]
fn states_are_rounded_once() {
    let context = context();
    let edges = [
        65504.0, 65519.0, 65520.0, 7e4, 1e30, 2049.0, 2051.0, 6.1e-5, 3.1e-5, 5.97e-8, 2.99e-8,
        2.97e-8, 1e-12, 1.0004883, 1.0014648, 0.0,
    ];
    for layout in LAYOUTS {
        let mut case = Case {
            layout,
            has_initial: 0xff,
            states: Some(Dtype::F32),
            ..Case::new(spec(Dtype::Bf16, [1, 2], [32, 48], 4), 2)
        };
        let initial = (0..2 * 2 * 32 * 48)
            .map(|i| edges[i % 16] * if i / 16 % 2 == 0 { 1.0 } else { -1.0 })
            .collect();
        let data = idle(&case, initial);
        let exact = run_once(&context, &case, &data).states.unwrap().values;
        assert!(exact.contains(&-65520.0) && exact.contains(&2.99e-8));
        for dtype in STATE_DTYPES {
            case.states = Some(dtype);
            let found = run_once(&context, &case, &data).states.unwrap();
            assert!(
                found.bytes == HostTensor::new(dtype, exact.clone()).bytes,
                "{dtype}, {layout:?}"
            );
            let infinite = found.values.iter().any(|x| x.is_infinite());
            assert_eq!(infinite, dtype == Dtype::F16);
        }
    }
}

/// A NaN of any payload in an f16 state stays a NaN in its column, and nowhere else.
#[test]
fn nan_in_f16_states() {
    let context = context();
    for layout in LAYOUTS {
        for bits in [0x7c01u16, 0x7e00, 0xfc01, 0xffff] {
            let case = Case {
                layout,
                state_dtype: Dtype::F16,
                has_initial: 0xff,
                ..Case::new(spec(Dtype::F16, [1, 1], [32, 16], 2), 1)
            };
            let mut data = Data::new(&case);
            let mut bytes = data.initial.bytes.clone();
            bytes[2 * (5 * 16 + 3)..][..2].copy_from_slice(&bits.to_le_bytes());
            data.initial = HostTensor::from_bytes(Dtype::F16, bytes);
            let left = run_once(&context, &case, &data);
            for (i, x) in left.o.values.iter().enumerate() {
                assert_eq!(x.is_nan(), i % 16 == 3, "o[{i}] = {x}");
            }
            let slot = 2 * case.read_slot(0) * case.state_strides()[0];
            let state = left.pool[slot..][..2 * 32 * 16].to_vec();
            let state = HostTensor::from_bytes(Dtype::F16, state).values;
            let state = layout.to_key_major(&state, 32, 16);
            for (i, x) in state.iter().enumerate() {
                assert_eq!(x.is_nan(), i % 16 == 3, "state[{i}] = {x}");
            }
        }
    }
}

/// A commit copies the state after the last accepted token, rounded to the type of the pool; other slots keep their bits.
#[test]
fn commits_between_all_types() {
    const BATCH: usize = 4;
    const TOKENS: usize = 3;
    const EACH: usize = 2 * 32 * 48;
    let context = context();
    let stream = context.stream().unwrap();
    let s = DecodeSpec {
        tokens: TOKENS,
        ..spec(Dtype::Bf16, [1, 2], [32, 48], 1)
    };
    let plan = Commit::new(&context, s, BATCH).unwrap();
    let accepted = context.upload(&[2, 3, 0, 1]).unwrap();
    let slots = context.upload(&[4, 0, 2, -1]).unwrap();
    for layout in LAYOUTS {
        let matrix = match layout {
            StateLayout::KeyMajor => [32, 48],
            StateLayout::ValueMajor => [48, 32],
        };
        for from in STATE_DTYPES {
            let drawn = random_state(from, BATCH * TOKENS * EACH, 7);
            let states = context.upload(&drawn.bytes).unwrap();
            for to in STATE_DTYPES {
                let size = to.size();
                let before = vec![POISON; 5 * EACH * size];
                let mut pool = context.upload(&before).unwrap();
                let shape = [BATCH, TOKENS, 2, matrix[0], matrix[1]];
                let strides = deltawave::tensor::dense_strides(shape);
                let pooled = [5, 2, matrix[0], matrix[1]];
                let tensors = CommitTensors {
                    accepted: (&accepted).into(),
                    slots: Some((&slots).into()),
                    states: states.tensor_of(from, shape, strides, 0).unwrap(),
                    pool: pool
                        .tensor_of_mut(to, pooled, deltawave::tensor::dense_strides(pooled), 0)
                        .unwrap(),
                    layout,
                    conv: None,
                };
                plan.launch(&stream, &tensors).unwrap();
                let mut wanted = before;
                for (slot, token) in [(4, 1), (0, TOKENS + 2)] {
                    let state = drawn.values[token * EACH..][..EACH].to_vec();
                    wanted[slot * EACH * size..][..EACH * size]
                        .copy_from_slice(&HostTensor::new(to, state).bytes);
                }
                let found = pool.download(&stream).unwrap();
                assert!(found == wanted, "{from} to {to}, {layout:?}");
            }
        }
    }
}

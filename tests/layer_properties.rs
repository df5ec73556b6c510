//! Random layers: any heads, layouts and mixtures of decodes and prefills against the oracle, with lengths on the host or on
//! the device alone.

#[path = "common/layer/mod.rs"]
mod cases;
mod common;

use cases::{Case, check_within};
use common::context;
use deltawave::layer::LayerSpec;
use deltawave::model::Heads;
use deltawave::norm::OutputGate;
use deltawave::types::{Dtype, HeadMap};
use proptest::prelude::*;

fn any_spec() -> impl Strategy<Value = LayerSpec> {
    let value_dim = prop_oneof![3 => (1usize..=3).prop_map(|n| 16 * n), 1 => Just(128usize)];
    let shape = (
        1usize..=2,
        1usize..=3,
        (1usize..=5).prop_map(|n| 16 * n),
        value_dim,
    );
    let options = (
        prop_oneof![Just(Dtype::Bf16), Just(Dtype::F16)],
        any::<bool>(),
        2usize..=4,
        any::<bool>(),
        any::<bool>(),
    );
    (shape, options).prop_map(|(shape, options)| {
        let (key_heads, group, key_dim, value_dim) = shape;
        let (dtype, tiled, width, allow_neg_eigval, silu) = options;
        // Keys are l2-normalised: a recurrence of longer ones amplifies any error.
        LayerSpec {
            dtype,
            heads: Heads {
                map: match tiled {
                    true => HeadMap::Tiled,
                    false => HeadMap::Grouped,
                },
                ..Heads::new(key_heads, key_heads * group, key_dim, value_dim)
            },
            width,
            allow_neg_eigval,
            gate: match silu {
                true => OutputGate::Silu,
                false => OutputGate::Sigmoid,
            },
            ..LayerSpec::new(key_heads, key_heads * group, key_dim, value_dim)
        }
    })
}

fn any_case() -> impl Strategy<Value = Case> {
    let length = prop_oneof![1 => Just(0usize), 3 => 1usize..=3, 1 => 1usize..=70];
    let batch = (
        0usize..=3,
        prop::collection::vec(length, 0..=3),
        0usize..=2,
        0u64..1 << 32,
    );
    let states = (any::<bool>(), 0usize..3, any::<bool>(), any::<bool>());
    let slots = (any::<bool>(), any::<bool>(), any::<u8>(), any::<u8>());
    (any_spec(), batch, states, slots).prop_map(|(spec, batch, states, slots)| {
        let (decodes, prefills, tail, seed) = batch;
        let (interleaved, state_dtype, value_major, token_major) = states;
        let (has_slots, device, has_initial, padding) = slots;
        Case {
            tail,
            interleaved,
            state_dtype: [Dtype::F32, Dtype::Bf16, Dtype::F16][state_dtype],
            value_major,
            token_major,
            has_slots,
            device,
            has_initial,
            padding,
            seed,
            ..Case::new(spec, &[vec![1; decodes], prefills].concat(), decodes)
        }
    })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 96, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn random_layers(case in any_case()) {
        check_within(&context(), &case, 2e-2);
    }
}

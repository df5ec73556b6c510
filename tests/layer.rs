//! A whole layer on the device: beside its f64 oracle no further off than the chain of kernels that public implementations
//! use, conv states bit for bit, slots of nobody untouched.

#[path = "common/layer/mod.rs"]
mod cases;
mod common;

use cases::{Case, Data, Loaded, check, run};
use common::{context, is_cdna};
use deltawave::conv::{Conv, ConvState, ConvTensors};
use deltawave::decode::{Decode, DecodeSpec, DecodeTensors};
use deltawave::gate::Gate;
use deltawave::gates::Gating;
use deltawave::layer::{Layer, LayerSpec, LayerTensors};
use deltawave::model::Heads;
use deltawave::norm::{GatedNorm, OutputGate};
use deltawave::runtime::{Context, Stream};
use deltawave::state::StatePool;
use deltawave::tensor::{Buffer, Tensor, TensorMut, dense_strides};
use deltawave::types::{Dtype, HeadMap, StateLayout};
use deltawave_lab::metrics::compare;

/// Qwen3.5-35B-A3B, Qwen3.5-27B and OLMo-Hybrid-7B.
fn models() -> [LayerSpec; 3] {
    [
        LayerSpec::new(16, 32, 128, 128),
        LayerSpec::new(16, 48, 128, 128),
        LayerSpec {
            allow_neg_eigval: true,
            ..LayerSpec::new(30, 30, 96, 192)
        },
    ]
}

#[test]
fn prefill_of_models() {
    for spec in models() {
        let case = Case::new(spec, &[70, 3], 0);
        check(&context(), &case);
    }
}

/// Whatever `has_initial_state` says: also where all buffers of a captured batch are zeros, so that all sequences are new
/// and slot 0 is somebody else's.
#[test]
fn sequences_without_tokens_keep_their_states() {
    let spec = LayerSpec::new(1, 2, 16, 128);
    for (i, has_initial) in [0, 0xff, 0b0101_0101].into_iter().enumerate() {
        for device in [false, true] {
            for (lengths, decodes) in [(&[1, 0, 0, 5, 0][..], 1), (&[1, 1, 0, 0], 2), (&[0; 3], 0)]
            {
                let case = Case {
                    has_initial,
                    device,
                    has_slots: i < 2,
                    tail: i,
                    ..Case::new(spec, lengths, decodes)
                };
                if lengths[0] > 0 {
                    check(&context(), &case);
                    continue;
                }
                let data = Data::new(&case);
                let output = run(&context(), &case, &data);
                assert!(
                    output.pools == cases::loaded::pools(&case, &data),
                    "{case:?}"
                );
            }
        }
    }
}

#[test]
fn decode_of_models() {
    for spec in models() {
        check(&context(), &Case::new(spec, &[1, 1, 1], 3));
    }
}

/// Decodes, prefills of any lengths, padding among both, rows past the last sequence; all in one call.
#[test]
fn mixed_batches() {
    for (i, spec) in models().into_iter().enumerate() {
        let case = Case {
            interleaved: i != 2,
            padding: 0b0001_0010,
            has_initial: 0b1110_1101,
            tail: 2,
            value_major: i == 1,
            token_major: i == 1,
            state_dtype: [Dtype::F32, Dtype::Bf16, Dtype::F16][i],
            ..Case::new(spec, &[1, 1, 1, 40, 1, 0, 66], 3)
        };
        check(&context(), &case);
    }
}

/// fp16, a sigmoid gate, narrow convolutions, no slots, tiled heads, segments.
#[test]
fn other_layers() {
    let small = LayerSpec::new(2, 4, 32, 48);
    for (spec, lengths, decodes) in [
        (
            LayerSpec {
                dtype: Dtype::F16,
                ..small
            },
            &[1, 1, 130][..],
            2,
        ),
        (
            LayerSpec {
                gate: OutputGate::Sigmoid,
                width: 2,
                eps: 1e-5,
                ..small
            },
            &[1, 33],
            1,
        ),
        (
            LayerSpec {
                heads: Heads {
                    map: HeadMap::Tiled,
                    ..small.heads
                },
                width: 3,
                ..small
            },
            &[1, 1, 9],
            2,
        ),
        (
            LayerSpec {
                segments: Some(3),
                ..small
            },
            &[1, 400, 20],
            1,
        ),
    ] {
        let case = Case {
            has_slots: false,
            ..Case::new(spec, lengths, decodes)
        };
        check(&context(), &case);
    }
    // Nothing but rows of nobody, and nothing at all.
    for tail in [0, 3] {
        let case = Case {
            tail,
            ..Case::new(small, &[], 0)
        };
        check(&context(), &case);
    }
}

/// a and b in the blocks of Qwen3-Next's `ba`, `b | a` for each key head: the bits of dense ones.
#[test]
fn gates_in_blocks() {
    let context = context();
    let stream = context.stream().unwrap();
    for (dtype, device) in [(Dtype::Bf16, false), (Dtype::F16, true)] {
        let spec = LayerSpec {
            dtype,
            ..LayerSpec::new(2, 6, 32, 128)
        };
        let case = Case {
            device,
            interleaved: true,
            padding: 0b10,
            tail: 1,
            ..Case::new(spec, &[1, 1, 70, 3], 2)
        };
        let data = Data::new(&case);
        let expected = run(&context, &case, &data);
        let (heads, group) = (spec.heads.value, spec.heads.value / spec.heads.key);
        let mut ba = vec![0u8; 2 * 2 * case.tokens() * heads];
        for (offset, part) in [(0, &data.b.bytes), (group, &data.a.bytes)] {
            for (i, value) in part.chunks_exact(2).enumerate() {
                let (t, h) = (i / heads, i % heads);
                let at = t * 2 * heads + h / group * 2 * group + offset + h % group;
                ba[2 * at..2 * at + 2].copy_from_slice(value);
            }
        }
        let ba = context.upload(&ba).unwrap();
        let shape = [case.tokens(), 2 * heads];
        // SAFETY: the buffer outlives the launch.
        let rows = unsafe { Tensor::from_raw(ba.address(), dtype, shape, dense_strides(shape)) };
        let mut loaded = Loaded::new(&context, &case, &data);
        let launch = loaded.launch_changed(&case, &stream, |t| {
            [t.a, t.b] = Gate::interleaved(&rows, spec.heads.key, heads).unwrap();
        });
        launch.unwrap();
        assert!(loaded.output(&case, &stream) == expected, "{case:?}");
    }
}

/// What a launch runs: at most four kernels for a prefill that is not cut into segments.
#[test]
fn kernels_of_a_launch() {
    let context = context();
    let spec = LayerSpec::new(16, 32, 128, 128);
    let kernels = |lengths: &[i32], tokens, decodes| {
        let plan = Layer::packed(&context, spec, lengths, tokens, decodes).unwrap();
        plan.kernels(Dtype::F32, StateLayout::KeyMajor)
    };
    let few_tokens = kernels(&[0, 100], 100, 0);
    let fused = ["dw_conv_bf16", "dw_prefill_fused_bf16_k128", "dw_norm_bf16"];
    assert_eq!(few_tokens == fused, is_cdna(&context), "{few_tokens:?}");
    let split = [
        "dw_conv_bf16",
        "dw_prefill_prepare_bf16",
        "dw_prefill_scan_bf16_k128",
        "dw_norm_bf16",
    ];
    // On CDNA HBM would limit the split path of so many tokens, but not of one long sequence among short ones.
    let lengths: Vec<i32> = (0..=20).map(|i| 400 * i * i).collect();
    let many_tokens = kernels(&lengths, 160_000, 0);
    if is_cdna(&context) {
        assert_eq!(many_tokens, fused);
        assert_eq!(kernels(&[0, 1500, 1800, 1900], 1900, 0), split);
    } else {
        assert_eq!(many_tokens, split);
    }
    // The norm is in the decode.
    let decode = kernels(&[0, 1, 2], 2, 2);
    assert_eq!(decode, ["dw_conv_bf16", "dw_decode_norm_bf16"]);
    // On sm_90a only for few sequences.
    let many: Vec<i32> = (0..=9).collect();
    let apart = ["dw_conv_bf16", "dw_decode_full_bf16_s32_kv", "dw_norm_bf16"];
    assert_eq!(kernels(&many, 9, 9) == apart, !is_cdna(&context));
    let mixed = kernels(&[0, 1, 50], 50, 1).len();
    assert_eq!(mixed, 4 + usize::from(!is_cdna(&context)));
    // Not where V is another.
    let spec = LayerSpec::new(30, 30, 96, 192);
    let plan = Layer::packed(&context, spec, &[0, 1, 2], 2, 2).unwrap();
    assert_eq!(
        plan.kernels(Dtype::F32, StateLayout::KeyMajor),
        ["dw_conv_bf16", "dw_decode_bf16_k128", "dw_norm_bf16"]
    );
}

/// The norm in the decode gives the bits of decode and norm one after the other.
#[test]
fn stages_apart_have_the_same_bits() {
    let context = context();
    let stream = context.stream().unwrap();
    let small = LayerSpec::new(2, 4, 96, 128);
    for (i, spec) in [
        small,
        LayerSpec {
            dtype: Dtype::F16,
            gate: OutputGate::Sigmoid,
            ..LayerSpec::new(1, 3, 128, 128)
        },
        LayerSpec {
            allow_neg_eigval: true,
            ..small
        },
    ]
    .into_iter()
    .enumerate()
    {
        let case = Case {
            interleaved: i == 0,
            value_major: i == 1,
            state_dtype: [Dtype::F32, Dtype::F16, Dtype::Bf16][i],
            ..Case::new(spec, &[1; 5], 5)
        };
        let data = Data::new(&case);
        let expected = run(&context, &case, &data);
        let mut loaded = Loaded::new(&context, &case, &data);
        let refused = loaded.launch_changed(&case, &stream, |t| apart(&context, &stream, &case, t));
        assert!(refused.is_err(), "the tensors were taken away");
        assert!(loaded.output(&case, &stream) == expected, "{case:?}");
    }
}

/// Conv, decode and norm of a layer's tensors, which are taken.
fn apart(context: &Context, stream: &Stream, case: &Case, t: &mut LayerTensors<'_>) {
    let (s, tokens) = (case.spec, case.tokens());
    let none = std::ptr::without_provenance_mut(16);
    let strides = [0, 0, 0, 1];
    // SAFETY: these have no elements.
    let (no_conv, no_states, no_y) = unsafe {
        (
            TensorMut::from_raw(none, s.dtype, [0; 3], [0, 0, 1]),
            TensorMut::from_raw(none, s.dtype, [0; 4], strides),
            TensorMut::from_raw(none, s.dtype, [0; 3], [0, 0, 1]),
        )
    };
    let shapes = [
        [tokens, s.heads.key, s.heads.key_dim],
        [tokens, s.heads.key, s.heads.key_dim],
        [tokens, s.heads.value, s.heads.value_dim],
    ];
    let bytes = |shape: [usize; 3]| vec![0xffu8; 2 * shape.iter().product::<usize>()];
    let mut parts = shapes.map(|shape| context.upload(&bytes(shape)).unwrap());
    let [q, k, v] = &mut parts;
    let view = |b: &'_ mut Buffer<u8>, i: usize| {
        let strides = dense_strides(shapes[i]);
        // SAFETY: the buffers outlive the launches.
        unsafe { TensorMut::from_raw(b.address(), s.dtype, shapes[i], strides) }
    };
    let conv = ConvTensors {
        cu_seqlens: None,
        x: t.x.clone(),
        weight: t.weights.conv.clone(),
        bias: t.weights.conv_bias.clone(),
        state: Some(ConvState {
            tensor: std::mem::replace(&mut t.states.conv, no_conv),
            layout: t.states.conv_layout,
            has_initial_state: t.states.has_initial_state.clone(),
        }),
        slots: t.states.slots.clone(),
        q: view(q, 0).into(),
        k: view(k, 1).into(),
        v: view(v, 2).into(),
        gates: None,
    };
    let plan = Conv::packed(context, s.conv(), &case.cu_seqlens(), tokens).unwrap();
    plan.launch(stream, &conv).unwrap();
    let [q, k, v] = [0, 1, 2].map(|i| {
        let part = parts[i].tensor_of(s.dtype, shapes[i], dense_strides(shapes[i]), 0);
        part.unwrap().into()
    });
    let decode = DecodeTensors {
        q,
        k,
        v,
        gating: Gating::Raw {
            a: t.a.clone(),
            b: t.b.clone(),
            a_log: t.weights.a_log.clone(),
            dt_bias: t.weights.dt_bias.clone(),
            allow_neg_eigval: s.allow_neg_eigval,
        },
        pool: StatePool {
            tensor: std::mem::replace(&mut t.states.recurrent, no_states),
            layout: t.states.recurrent_layout,
            slots: t.states.slots.clone(),
            write_slots: None,
        },
        has_initial_state: t.states.has_initial_state.clone(),
        states: None,
        o: std::mem::replace(&mut t.y, no_y.into()),
    };
    let spec = DecodeSpec {
        dtype: s.dtype,
        qk_l2norm: s.qk_l2norm,
        ..DecodeSpec::new(
            s.heads.key,
            s.heads.value,
            s.heads.key_dim,
            s.heads.value_dim,
        )
    };
    let plan = Decode::new(context, spec, tokens).unwrap();
    plan.launch(stream, &decode).unwrap();
    let norm = GatedNorm {
        x: None,
        z: t.z.clone(),
        weight: t.weights.norm.clone(),
        eps: s.eps,
        gate: s.gate,
        y: decode.o,
    };
    norm.launch(context, stream).unwrap();
    stream.synchronize().unwrap();
}

/// A layer in a graph does what it does outside of one, and again with other states and inputs.
#[test]
fn in_a_graph() {
    let context = context();
    let case = Case::new(LayerSpec::new(2, 4, 32, 48), &[1, 1, 70], 2);
    let data = Data::new(&case);
    let expected = run(&context, &case, &data);
    let stream = context.stream().unwrap();
    let mut loaded = Loaded::new(&context, &case, &data);
    let graph = stream.capture(|s| loaded.launch(&case, s)).unwrap();
    for _ in 0..2 {
        loaded.reset(&stream);
        // SAFETY: the plan and all that was captured are alive.
        unsafe { graph.launch(&stream) }.unwrap();
        let output = loaded.output(&case, &stream);
        assert!(output == expected, "a replay differs");
    }
}

/// A prompt that is prefilled up to some token and decoded from there has the outputs of one prefilled at once.
#[test]
fn prefill_then_decode_is_prefill() {
    let context = context();
    let spec = LayerSpec::new(1, 2, 64, 32);
    const TOKENS: usize = 67;
    let whole = Case {
        has_initial: 0,
        ..Case::new(spec, &[TOKENS], 0)
    };
    let data = Data::new(&whole);
    let expected = run(&context, &whole, &data);
    for first in [0, 1, 63, 64, 65] {
        let prompt = Case {
            has_initial: 0,
            ..Case::new(spec, &[first], 0)
        };
        let mut output = run(&context, &prompt, &data.rows(&prompt, 0));
        let mut y = output.y.values.clone();
        for t in first..TOKENS {
            let step = Case {
                has_initial: u8::from(t > 0),
                ..Case::new(spec, &[1], 1)
            };
            let mut inputs = data.rows(&step, t);
            inputs.go_on_from(&step, &output);
            output = run(&context, &step, &inputs);
            y.extend(&output.y.values);
        }
        let reference: Vec<f64> = expected.y.values.iter().map(|x| f64::from(*x)).collect();
        let ratio = compare(&y, &reference).rms_ratio;
        assert!(ratio < 6e-3, "{first} tokens prefilled: {ratio:.1e}");
    }
}

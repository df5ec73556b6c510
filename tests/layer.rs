//! A whole layer on the device: beside its f64 oracle no further off than the chain of kernels that public implementations
//! use, conv states bit for bit, slots of nobody untouched.

#[path = "common/layer/mod.rs"]
mod cases;
mod common;

use cases::{Case, Data, Loaded, check, run};
use common::context;
use deltawave::layer::{Layer, LayerSpec};
use deltawave::metrics::compare;
use deltawave::norm::OutputGate;
use deltawave::types::Dtype;

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
            state_dtype: [Dtype::F32, Dtype::Bf16, Dtype::F32][i],
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
                head_map: deltawave::types::HeadMap::Tiled,
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

/// What a launch runs: at most five kernels for a prefill that is not cut into segments.
#[test]
fn kernels_of_a_launch() {
    let context = context();
    let spec = LayerSpec::new(16, 32, 128, 128);
    let kernels = |lengths: &[i32], tokens, decodes| {
        let plan = Layer::packed(&context, spec, lengths, tokens, decodes).unwrap();
        plan.kernels()
    };
    let prefill = kernels(&[0, 100], 100, 0);
    assert_eq!(
        prefill,
        [
            "dw_conv_bf16",
            "dw_prefill_prepare_bf16",
            "dw_prefill_scan_bf16_k128",
            "dw_norm_bf16"
        ]
    );
    let decode = kernels(&[0, 1, 2], 2, 2);
    assert_eq!(
        decode,
        ["dw_conv_bf16", "dw_decode_bf16_k128", "dw_norm_bf16"]
    );
    assert_eq!(kernels(&[0, 1, 50], 50, 1).len(), 5);
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

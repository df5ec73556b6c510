//! The convolution on the device against its oracle: every element within one unit in the last place of the reference
//! rounded once and nearly all equal to it, conv states bit for bit, everything else untouched.

#[path = "common/conv.rs"]
mod cases;
mod common;

use cases::{Case, Data, Entry, Layout, check, check_output, run, spec};
use common::{context, has_room};
use deltawave::conv::{
    Activation, Conv, ConvInput, ConvSpec, ConvState, ConvStateLayout, ConvTensors,
};
use deltawave::model::Heads;
use deltawave::types::Dtype;
use deltawave_lab::inputs::Tensor as HostTensor;
use deltawave_lab::metrics::UlpComparison;
use half::bf16;
use proptest::prelude::*;

const DTYPES: [Dtype; 2] = [Dtype::Bf16, Dtype::F16];

/// The bar that the operation has to meet, on shapes of models: flat and interleaved rows, all of a tensor-parallel rank
/// and dimensions that are multiples of 32 alone.
#[test]
fn shapes_of_models() {
    let context = context();
    for dtype in DTYPES {
        let mut pooled = UlpComparison::default();
        for (heads, dims, layout) in [
            ([16, 32], [128, 128], Layout::Flat),
            ([4, 8], [128, 128], Layout::Interleaved),
            ([1, 3], [128, 128], Layout::Interleaved),
            ([2, 2], [96, 192], Layout::Flat),
        ] {
            let lengths = [9, 0, 33, 1];
            let case = Case {
                layout,
                tail: 2,
                ..Case::new(spec(dtype, heads, dims, 4), &lengths)
            };
            pooled = pooled.and(check(&context, &case));
        }
        assert!(pooled.equal_share() >= 0.999, "{dtype}: {pooled:?}");
        println!("{dtype}: {pooled:?}, {:.5} equal", pooled.equal_share());
    }
}

/// Every width, short sequences with and without an initial state, both layouts of the pool, states of further columns.
#[test]
fn short_sequences_keep_the_suffix_of_their_state() {
    let context = context();
    for width in 2..=4 {
        for state_layout in [ConvStateLayout::ChannelMajor, ConvStateLayout::TokenMajor] {
            for more_columns in [0, 1, 3] {
                for has_initial in [0, 0xff, 0b0110_1101] {
                    let case = Case {
                        state_layout,
                        more_columns: Some(more_columns),
                        has_initial,
                        slot_pad: more_columns,
                        ..Case::new(
                            spec(Dtype::Bf16, [1, 2], [16, 8], width),
                            &[1, 2, 3, 4, 0, 5, 1, 7],
                        )
                    };
                    check(&context, &case);
                }
            }
        }
    }
}

/// Runs begin and end everywhere within sequences, at their ends too.
#[test]
fn lengths_around_runs_and_blocks() {
    let context = context();
    let lengths = [3, 4, 5, 31, 32, 33, 63, 64, 65, 127, 128, 129, 1, 260];
    for (heads, dims) in [([1, 1], [8, 8]), ([1, 2], [40, 24])] {
        check(
            &context,
            &Case::new(spec(Dtype::F16, heads, dims, 4), &lengths),
        );
    }
}

/// Many tokens give a thread the longest run that the target has, 128 on an H200. Sequences end everywhere within it.
#[test]
fn the_longest_runs() {
    let context = context();
    // Three octets of channels make blocks of sixteen runs, of which each compute unit must have two.
    let run = match context.device().arch.as_str() {
        "sm_90a" => 128,
        _ => 32,
    };
    let tokens = 2 * 16 * run * context.device().compute_units as usize;
    let short = (0..700).map(|n| n * 37 % 271);
    let lengths: Vec<usize> = short.chain([tokens / 8 + 1; 8]).collect();
    for (dtype, width, layout, qk_l2norm) in [
        (Dtype::Bf16, 4, Layout::Flat, false),
        (Dtype::F16, 4, Layout::Interleaved, true),
    ] {
        let spec = ConvSpec {
            qk_l2norm,
            ..spec(dtype, [1, 1], [8, 8], width)
        };
        let case = Case {
            layout,
            tail: 3,
            has_initial: 0b0110_1101,
            ..Case::new(spec, &lengths)
        };
        check(&context, &case);
    }
}

/// Many sequences whose tokens make runs of more than the four that a thread loads at once.
#[test]
fn runs_of_many_sequences() {
    let context = context();
    let lengths: Vec<usize> = (0..700).map(|n| n * 37 % 97).collect();
    for (dtype, width, dims, layout, qk_l2norm) in [
        (Dtype::Bf16, 4, [40, 24], Layout::Interleaved, true),
        (Dtype::F16, 2, [8, 8], Layout::Flat, true),
        (Dtype::Bf16, 3, [12, 20], Layout::Flat, false),
    ] {
        let spec = ConvSpec {
            qk_l2norm,
            ..spec(dtype, [1, 2], dims, width)
        };
        let case = Case {
            layout,
            tail: 3,
            has_initial: 0b0110_1101,
            padding: 0b1000,
            has_slots: true,
            ..Case::new(spec, &lengths)
        };
        check(&context, &case);
    }
}

/// Dimensions without any divisor, odd addresses and strides, heads apart from each other: one channel at a time.
#[test]
fn channels_without_divisors_and_odd_addresses() {
    let context = context();
    for dtype in DTYPES {
        for (heads, dims, layout) in [
            ([1, 1], [1, 1], Layout::Flat),
            ([3, 3], [5, 7], Layout::Flat),
            ([3, 6], [13, 11], Layout::Interleaved),
            ([2, 2], [100, 36], Layout::Interleaved),
        ] {
            for (x_offset, x_pad, out_pad, head_pad, out_offset) in
                [(0, 0, 0, 0, 0), (1, 1, 3, 0, 1), (3, 0, 1, 5, 2)]
            {
                let case = Case {
                    layout,
                    x_offset,
                    x_pad,
                    out_pad,
                    head_pad,
                    out_offset,
                    tail: 1,
                    ..Case::new(spec(dtype, heads, dims, 4), &[5, 2, 9])
                };
                check(&context, &case);
            }
        }
    }
}

/// Weights of every type and order, biases, no activation.
#[test]
fn weights_biases_and_activations() {
    let context = context();
    for dtype in DTYPES {
        for weight_dtype in [Dtype::F32, Dtype::Bf16, Dtype::F16] {
            for weight_transposed in [false, true] {
                for activation in [Activation::None, Activation::Silu] {
                    let spec = ConvSpec {
                        activation,
                        ..spec(dtype, [1, 2], [24, 16], 3)
                    };
                    let case = Case {
                        weight_dtype,
                        weight_transposed,
                        bias: Some(weight_dtype),
                        more_columns: None,
                        has_slots: false,
                        ..Case::new(spec, &[6, 11])
                    };
                    check(&context, &case);
                }
            }
        }
    }
}

/// Padding: outputs zero, states untouched. Slots beyond the pool are padding too, without a pool negative ones alone.
#[test]
fn padding_and_lengths_on_the_device() {
    let context = context();
    for entry in [Entry::Host, Entry::Device, Entry::DeviceWide] {
        for more_columns in [None, Some(0)] {
            for has_slots in [false, true] {
                let case = Case {
                    entry,
                    more_columns,
                    has_slots,
                    tail: 40,
                    padding: if more_columns.is_some() {
                        0b0000_1101
                    } else {
                        0b0000_0101
                    },
                    ..Case::new(spec(Dtype::Bf16, [1, 1], [32, 48], 4), &[7, 3, 40, 2, 1])
                };
                check(&context, &case);
            }
        }
    }
}

/// SiLU over all of the range: where e^-x overflows, where its result is far below the smallest normal number, NaN and
/// infinities.
#[test]
fn the_whole_range_of_silu() {
    let context = context();
    let inf = f32::INFINITY;
    for dtype in DTYPES {
        let spec = spec(dtype, [1, 1], [512, 1024], 2);
        let mut case = Case::new(spec, &[16]);
        (case.more_columns, case.has_slots) = (None, false);
        let mut data = Data::new(&case);
        let channels = spec.total_channels();
        let x = |i: usize| -120.0 + 240.0 * i as f32 / (16 * channels) as f32;
        let mut values: Vec<f32> = (0..16 * channels).map(x).collect();
        let special = [
            0.0,
            -0.0,
            inf,
            -inf,
            f32::NAN,
            3e38,
            -3e38,
            1e-40,
            -1e-40,
            -87.0,
            -104.5,
            -175.0,
        ];
        values[..special.len()].copy_from_slice(&special);
        data.x = HostTensor::new(dtype, values);
        // Of one token alone, so that an infinity beside a zero does not make a NaN.
        let one = (0..2 * channels).map(|i| (i % 2) as f32);
        data.weight = HostTensor::new(dtype, one.collect());
        let output = run(&context, &case, &data);
        // 0 times an infinity or a NaN of the token before is a NaN in the reference, too.
        let found = check_output(&case, &data, &output);
        println!("{dtype}: {found:?}");
        assert!(found.equal_share() >= 0.999, "{found:?}");
    }
}

/// A NaN stays within its sequence, its channel and the width, whatever bits it has.
#[test]
fn a_nan_reaches_as_far_as_the_filter() {
    let context = context();
    for bits in [0x7fffu16, 0xffff, 0x7f81] {
        let case = Case {
            has_initial: 0,
            ..Case::new(spec(Dtype::Bf16, [1, 1], [8, 8], 4), &[6, 6])
        };
        let channels = case.spec.total_channels();
        let mut data = Data::new(&case);
        let at = 4 * channels + 3;
        data.x.bytes[2 * at..2 * at + 2].copy_from_slice(&bits.to_le_bytes());
        data.x = HostTensor::from_bytes(Dtype::Bf16, data.x.bytes);
        let output = run(&context, &case, &data);
        for (i, y) in output.y.values.iter().enumerate() {
            let (t, c) = (i / channels, i % channels);
            assert_eq!(
                y.is_nan(),
                (4..6).contains(&t) && c == 3,
                "token {t}, channel {c}"
            );
        }
        // The state holds its very bits.
        let columns = case.columns();
        let place = 2 * (case.slot(0) * case.state_strides()[0] + 3 * columns + 1);
        assert_eq!(output.pool[place..place + 2], bits.to_le_bytes());
    }
}

/// Rows so far apart that offsets do not fit 31 bits of elements, and a pool whose slots are.
#[test]
fn offsets_beyond_31_bits() {
    let context = context();
    let (tokens, stride, slots, slot_stride) =
        (140usize, (1usize << 24) - 16, 3usize, 1usize << 31);
    if !has_room(&context, 32 << 30) {
        return;
    }
    let case = Case::new(spec(Dtype::Bf16, [1, 1], [8, 8], 4), &[tokens]);
    let (s, channels) = (case.spec, case.spec.total_channels());
    let data = Data::new(&case);
    let expected = run(&context, &case, &data);
    let stream = context.stream().unwrap();
    let alloc = |n| {
        context
            .alloc::<bf16>(n)
            .expect("memory that is not committed")
    };
    let x = alloc((tokens - 1) * stride + channels);
    let mut outs = [0; 3].map(|_| alloc((tokens - 1) * stride + 8));
    let mut pool = alloc((slots - 1) * slot_stride + 3 * channels);
    let kind = hip_sys::hipMemcpyKind::hipMemcpyDefault;
    for (t, row) in data.x.bytes.chunks_exact(2 * channels).enumerate() {
        let to = x.address().wrapping_byte_add(2 * t * stride);
        // SAFETY: the row lies in the buffer.
        unsafe {
            context
                .hip()
                .hipMemcpy(to, row.as_ptr().cast(), row.len(), kind)
        }
        .unwrap();
    }
    let last = pool
        .address()
        .wrapping_byte_add(2 * (slots - 1) * slot_stride);
    let state = &data.state.bytes;
    // SAFETY: as above.
    unsafe {
        context
            .hip()
            .hipMemcpy(last, state.as_ptr().cast(), state.len(), kind)
    }
    .unwrap();
    let weight = context.upload(&data.weight.bytes).unwrap();
    let index = context.upload(&[slots as i32 - 1]).unwrap();
    let view = x
        .tensor_strided([tokens, channels], [stride, 1], 0)
        .unwrap();
    let [q, k, v] = outs.each_mut().map(|out| {
        let out = out.tensor_strided_mut([tokens, 1, 8], [stride, 8, 1], 0);
        out.unwrap().into()
    });
    let tensors = ConvTensors {
        cu_seqlens: None,
        x: ConvInput::flat(&view, &s).unwrap(),
        weight: weight
            .tensor_of(Dtype::Bf16, [channels, 4], [4, 1], 0)
            .unwrap(),
        bias: None,
        state: Some(ConvState {
            tensor: pool
                .tensor_strided_mut([slots, channels, 3], [slot_stride, 3, 1], 0)
                .unwrap(),
            layout: ConvStateLayout::ChannelMajor,
            has_initial_state: None,
        }),
        slots: Some((&index).into()),
        q,
        k,
        v,
        gates: None,
    };
    let plan = Conv::packed(&context, s, &[0, tokens as i32], tokens).unwrap();
    plan.launch(&stream, &tensors).unwrap();
    stream.synchronize().unwrap();
    for (i, out) in outs.iter().enumerate() {
        for t in 0..tokens {
            let mut row = [0u8; 16];
            let from = out.address().wrapping_byte_add(2 * t * stride);
            // SAFETY: as above.
            unsafe {
                context
                    .hip()
                    .hipMemcpy(row.as_mut_ptr().cast(), from, 16, kind)
            }
            .unwrap();
            let at = 2 * (t * channels + 8 * i);
            assert_eq!(row, expected.y.bytes[at..at + 16], "output {i}, token {t}");
        }
    }
}

fn any_case() -> impl Strategy<Value = Case> {
    let shape = (
        prop_oneof![Just(Dtype::Bf16), Just(Dtype::F16)],
        1usize..4,
        1usize..4,
        prop_oneof![1usize..40, Just(64), Just(136)],
        prop_oneof![1usize..40, Just(96)],
        2usize..=4,
        any::<bool>(),
        any::<bool>(),
    );
    let views = (
        0usize..4,
        0usize..9,
        0usize..9,
        0usize..4,
        0usize..4,
        any::<bool>(),
    );
    let parameters = (
        prop_oneof![Just(Dtype::Bf16), Just(Dtype::F16), Just(Dtype::F32)],
        any::<bool>(),
        proptest::option::of(prop_oneof![Just(Dtype::Bf16), Just(Dtype::F32)]),
        proptest::option::weighted(0.9, 0usize..4),
        any::<bool>(),
        0usize..5,
    );
    let batch = (
        proptest::collection::vec(prop_oneof![0usize..6, 0usize..70], 1..9),
        0usize..40,
        any::<u8>(),
        any::<u8>(),
        any::<bool>(),
        prop_oneof![
            Just(Entry::Host),
            Just(Entry::Device),
            Just(Entry::DeviceWide)
        ],
        0u64..1 << 32,
    );
    (shape, views, parameters, batch).prop_map(|(shape, views, parameters, batch)| {
        let (dtype, key_heads, group, key_dim, value_dim, width, silu, qk_l2norm) = shape;
        let (x_offset, x_pad, out_pad, head_pad, out_offset, interleaved) = views;
        let (weight_dtype, weight_transposed, bias, more_columns, token_major, slot_pad) =
            parameters;
        let (lengths, tail, has_initial, padding, has_slots, entry, seed) = batch;
        Case {
            spec: ConvSpec {
                dtype,
                heads: Heads::new(key_heads, key_heads * group, key_dim, value_dim),
                width,
                activation: if silu {
                    Activation::Silu
                } else {
                    Activation::None
                },
                qk_l2norm,
            },
            lengths,
            tail,
            layout: if interleaved {
                Layout::Interleaved
            } else {
                Layout::Flat
            },
            x_offset,
            x_pad,
            out_pad,
            head_pad,
            out_offset,
            weight_dtype,
            weight_transposed,
            bias,
            more_columns,
            state_layout: if token_major {
                ConvStateLayout::TokenMajor
            } else {
                ConvStateLayout::ChannelMajor
            },
            slot_pad,
            has_initial,
            // Without a pool no slot is beyond it.
            padding: if more_columns.is_some() {
                padding
            } else {
                padding & 0x55
            },
            has_slots,
            entry,
            seed,
        }
    })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn random_batches(case in any_case()) {
        check(&context(), &case);
    }
}

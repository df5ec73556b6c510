//! The gated norm on the device against f64: every element within one unit in the last place of the reference rounded
//! once and nearly all equal to it, everything else untouched.

mod common;

use common::{context, simulated};
use deltawave::conv::{ConvInput, ConvSpec};
use deltawave::norm::{GatedNorm, OutputGate};
use deltawave::runtime::Context;
use deltawave::tensor::{Buffer, Tensor};
use deltawave::types::Dtype;
use deltawave_lab::inputs::{Tensor as HostTensor, random_normal};
use deltawave_lab::metrics::{UlpComparison, compare_ulps};
use deltawave_lab::oracle::norm::{NormProblem, gated_norm};
use deltawave_sim::launch::{Options, WaveOrder};
use proptest::prelude::*;

const DTYPES: [Dtype; 2] = [Dtype::Bf16, Dtype::F16];

/// Where z lies.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Z {
    /// `[T, HV, V]` of its own, heads apart from each other.
    Own,
    /// Behind q, k and v of one row.
    Flat,
    /// Behind q, k and v of each key head.
    Interleaved,
}

#[derive(Clone, Debug)]
struct Case {
    dtype: Dtype,
    tokens: usize,
    key_heads: usize,
    value_heads: usize,
    value_dim: usize,
    z: Z,
    gate: OutputGate,
    weight: Option<Dtype>,
    weight_stride: usize,
    eps: f32,
    in_place: bool,
    /// More elements in each row of x and y, between their heads, and before them.
    pad: usize,
    head_pad: usize,
    offset: usize,
    seed: u64,
}

impl Case {
    fn new(dtype: Dtype, tokens: usize, value_heads: usize, value_dim: usize) -> Self {
        Case {
            dtype,
            tokens,
            key_heads: 1,
            value_heads,
            value_dim,
            z: Z::Own,
            gate: OutputGate::Silu,
            weight: Some(Dtype::F32),
            weight_stride: 1,
            eps: 1e-6,
            in_place: false,
            pad: 0,
            head_pad: 0,
            offset: 0,
            seed: 1,
        }
    }

    fn elements(&self) -> usize {
        self.tokens * self.value_heads * self.value_dim
    }

    fn strides(&self) -> [usize; 3] {
        let head = self.value_dim + self.head_pad;
        [self.value_heads * head + self.pad, head, 1]
    }

    fn shape(&self) -> [usize; 3] {
        [self.tokens, self.value_heads, self.value_dim]
    }

    fn spec(&self) -> ConvSpec {
        ConvSpec {
            dtype: self.dtype,
            ..ConvSpec::new(self.key_heads, self.value_heads, 3, self.value_dim)
        }
    }

    /// Elements of a row of what z lies in, and where in it element `i` of `[HV, V]` lies.
    fn z_row(&self) -> usize {
        match self.z {
            Z::Own => self.strides()[0],
            Z::Flat | Z::Interleaved => {
                6 * self.key_heads + 2 * self.value_heads * self.value_dim + self.pad
            }
        }
    }

    fn z_at(&self, i: usize) -> usize {
        let values = self.value_heads * self.value_dim;
        match self.z {
            Z::Own => i / self.value_dim * self.strides()[1] + i % self.value_dim,
            Z::Flat => 6 * self.key_heads + values + i,
            Z::Interleaved => {
                let own = values / self.key_heads;
                i / own * (6 + 2 * own) + 6 + own + i % own
            }
        }
    }
}

/// Bits of a NaN that no kernel makes.
const POISON: [u8; 2] = [0xa5, 0xff];

/// Dense elements at their places, everything else poisoned.
fn place(t: &HostTensor, size: usize, at: impl Fn(usize) -> usize) -> Vec<u8> {
    let mut bytes = POISON.repeat(size);
    for (i, element) in t.bytes.chunks_exact(2).enumerate() {
        bytes[2 * at(i)..2 * at(i) + 2].copy_from_slice(element);
    }
    bytes
}

struct Data {
    x: HostTensor,
    z: HostTensor,
    weight: Option<HostTensor>,
}

impl Data {
    fn new(case: &Case) -> Self {
        let draw = |name, dtype, n| random_normal(dtype, name, n, case.seed);
        Data {
            x: draw("x", case.dtype, case.elements()),
            z: draw("z", case.dtype, case.elements()),
            weight: case.weight.map(|d| draw("weight", d, case.value_dim)),
        }
    }
}

fn run(context: &Context, case: &Case, data: &Data) -> HostTensor {
    let stream = context.stream().unwrap();
    let (shape, strides) = (case.shape(), case.strides());
    let row = case.value_heads * case.value_dim;
    let at = |i: usize| {
        let (t, h, d) = (i / row, i % row / case.value_dim, i % case.value_dim);
        case.offset + t * strides[0] + h * strides[1] + d
    };
    let size = case.offset + case.tokens * strides[0] + 3;
    let x_bytes = place(&data.x, size, at);
    let x = context.upload(&x_bytes).unwrap();
    let start = if case.in_place {
        x_bytes.clone()
    } else {
        POISON.repeat(size)
    };
    let mut y: Buffer<u8> = context.upload(&start).unwrap();
    let z_size = case.offset + case.tokens * case.z_row() + 3;
    let z_bytes = place(&data.z, z_size, |i| {
        case.offset + i / row * case.z_row() + case.z_at(i % row)
    });
    let z = context.upload(&z_bytes).unwrap();
    let weight = data.weight.as_ref().map(|w| {
        let size = w.dtype.size();
        let mut bytes = vec![0xff; w.values.len() * case.weight_stride * size];
        for (i, element) in w.bytes.chunks_exact(size).enumerate() {
            let at = i * case.weight_stride * size;
            bytes[at..at + size].copy_from_slice(element);
        }
        (context.upload(&bytes).unwrap(), w.dtype)
    });
    {
        let view = |columns| {
            z.tensor_of(
                case.dtype,
                [case.tokens, columns],
                [case.z_row(), 1],
                case.offset,
            )
        };
        let z: Tensor<'_, 3> = match case.z {
            Z::Own => z
                .tensor_of(case.dtype, shape, strides, case.offset)
                .unwrap(),
            Z::Flat => ConvInput::flat_z(&view(case.z_row()).unwrap(), &case.spec()).unwrap(),
            Z::Interleaved => {
                ConvInput::interleaved_z(&view(case.z_row()).unwrap(), &case.spec()).unwrap()
            }
        };
        let x = x
            .tensor_of(case.dtype, shape, strides, case.offset)
            .unwrap();
        let norm = GatedNorm {
            x: (!case.in_place).then(|| x.into()),
            z,
            weight: weight.as_ref().map(|(w, dtype)| {
                w.tensor_of(*dtype, [case.value_dim], [case.weight_stride], 0)
                    .unwrap()
            }),
            eps: case.eps,
            gate: case.gate,
            y: y.tensor_of_mut(case.dtype, shape, strides, case.offset)
                .unwrap()
                .into(),
        };
        norm.launch(context, &stream).unwrap();
    }
    assert!(
        x.download(&stream).unwrap() == x_bytes,
        "x was written to: {case:?}"
    );
    assert!(
        z.download(&stream).unwrap() == z_bytes,
        "z was written to: {case:?}"
    );
    let mut bytes = y.download(&stream).unwrap();
    let mut dense = Vec::with_capacity(2 * case.elements());
    for i in 0..case.elements() {
        let element = &mut bytes[2 * at(i)..2 * at(i) + 2];
        dense.extend_from_slice(element);
        element.copy_from_slice(&POISON);
    }
    assert!(
        bytes.chunks_exact(2).all(|b| b == POISON),
        "written outside of y: {case:?}"
    );
    HostTensor::from_bytes(case.dtype, dense)
}

#[track_caller]
fn compare(case: &Case, data: &Data, y: &HostTensor) -> UlpComparison {
    let reference = gated_norm(&NormProblem {
        value_dim: case.value_dim,
        x: &data.x.values,
        z: &data.z.values,
        weight: data.weight.as_ref().map(|w| &w.values[..]),
        eps: case.eps.into(),
        silu: case.gate == OutputGate::Silu,
    })
    .unwrap();
    let found = compare_ulps(y, &reference);
    assert!(found.max_ulps <= 1, "{found:?}: {case:?}");
    // A thousandth. Small cases scatter: two elements more may lie beside a tie.
    assert!(
        found.different <= found.elements / 1000 + 2,
        "{found:?}: {case:?}"
    );
    found
}

#[track_caller]
fn check(context: &Context, case: &Case) -> UlpComparison {
    let data = Data::new(case);
    compare(case, &data, &run(context, case, &data))
}

/// Shapes of models, z where their projections have it, and enough rows for several at once.
#[test]
fn shapes_of_models() {
    let context = context();
    for dtype in DTYPES {
        let mut pooled = UlpComparison::default();
        for (tokens, key_heads, value_heads, value_dim, z) in [
            (21, 16, 32, 128, Z::Flat),
            (9, 4, 8, 128, Z::Interleaved),
            (7, 1, 3, 128, Z::Interleaved),
            (5, 30, 30, 192, Z::Flat),
            (1, 16, 48, 128, Z::Own),
        ] {
            let case = Case {
                key_heads,
                z,
                ..Case::new(dtype, tokens, value_heads, value_dim)
            };
            pooled = pooled.and(check(&context, &case));
        }
        println!("{dtype}: {pooled:?}, {:.5} equal", pooled.equal_share());
    }
}

/// Runs of tokens that end within those that are loaded at once: it takes more rows than two workgroups of each compute
/// unit have.
#[test]
fn several_tokens_of_a_lane() {
    let context = context();
    let heads = 8 * context.device().compute_units as usize;
    for (tokens, value_dim) in [(17, 16), (19, 144)] {
        let case = Case {
            in_place: true,
            ..Case::new(Dtype::Bf16, tokens, heads, value_dim)
        };
        check(&context, &case);
    }
}

/// Every V, weights of every type and stride and none, both gates, odd addresses.
#[test]
fn dims_weights_gates_and_odd_addresses() {
    let context = context();
    let weights = [Some(Dtype::F32), Some(Dtype::Bf16), Some(Dtype::F16), None];
    for (i, value_dim) in (16..=256).step_by(16).enumerate() {
        let case = Case {
            weight: weights[i % 4],
            weight_stride: 1 + i / 4 % 2,
            gate: [OutputGate::Silu, OutputGate::Sigmoid][i / 2 % 2],
            in_place: i % 3 == 0,
            pad: i % 2,
            head_pad: [0, 5][i % 2],
            offset: i % 4,
            ..Case::new(DTYPES[i % 2], 3, 3, value_dim)
        };
        check(&context, &case);
    }
}

/// Gates over all of the range, where e^-z overflows and where its result is far below the smallest normal number; rows
/// of zeros and of tiny numbers; eps of any size.
#[test]
fn the_whole_range() {
    let context = context();
    for dtype in DTYPES {
        for gate in [OutputGate::Silu, OutputGate::Sigmoid] {
            for eps in [1e-5, f32::MIN_POSITIVE, 3.0] {
                let case = Case {
                    gate,
                    eps,
                    ..Case::new(dtype, 8, 4, 128)
                };
                let mut data = Data::new(&case);
                let n = case.elements();
                let mut z: Vec<f32> = (0..n)
                    .map(|i| -120.0 + 240.0 * i as f32 / n as f32)
                    .collect();
                z[..4].copy_from_slice(&[0.0, -0.0, 6e4, -6e4]);
                data.z = HostTensor::new(dtype, z);
                let row = |i: usize| [1.0, 0.0, 1e-5, 1e-3, 300.0][i / 128 % 5];
                let x = data.x.values.iter().enumerate();
                data.x = HostTensor::new(dtype, x.map(|(i, x)| x * row(i)).collect());
                compare(&case, &data, &run(&context, &case, &data));
            }
        }
    }
}

/// Zeros stay zeros, a NaN of z or the weight stays in its place, and one of x within its row, whatever bits it has.
#[test]
fn nans_and_zeros_stay_where_they_are() {
    let context = context();
    for gate in [OutputGate::Silu, OutputGate::Sigmoid] {
        let case = Case {
            gate,
            weight: Some(Dtype::F32),
            ..Case::new(Dtype::Bf16, 3, 2, 32)
        };
        let mut data = Data::new(&case);
        data.x.bytes[..64].fill(0);
        let put = |t: &mut HostTensor, i: usize, bits: u16| {
            t.bytes[2 * i..2 * i + 2].copy_from_slice(&bits.to_le_bytes());
            *t = HostTensor::from_bytes(Dtype::Bf16, t.bytes.clone());
        };
        put(&mut data.z, 35, 0x7fff);
        // A row of padding has any z.
        put(&mut data.z, 7, 0x7fff);
        put(&mut data.z, 8, 0x7f80);
        put(&mut data.x, 70, 0xffff);
        let mut weight = data.weight.take().unwrap().values;
        weight[3] = f32::from_bits(0x7fff_ffff);
        data.weight = Some(HostTensor::new(Dtype::F32, weight));
        let y = run(&context, &case, &data);
        for (i, y) in y.values.iter().enumerate() {
            let nan = i == 35 || (64..96).contains(&i) || i % 32 == 3;
            assert_eq!(y.is_nan(), nan, "element {i}: {y}, {gate:?}");
            assert!(i >= 32 || nan || *y == 0.0, "element {i}: {y}");
        }
    }
}

/// The same bits, and no finding, in every order of waves; each byte moved once.
#[test]
fn every_order_and_few_bytes() {
    let context = context();
    if !simulated(&context) {
        println!("skipped: a card executes in one way");
        return;
    }
    let usual = deltawave_sim::hip::options();
    let case = Case {
        in_place: true,
        z: Z::Flat,
        ..Case::new(Dtype::Bf16, 40, 16, 128)
    };
    let data = Data::new(&case);
    let expected = run(&context, &case, &data);
    for order in [WaveOrder::InStep, WaveOrder::Seeded(1)] {
        deltawave_sim::hip::set_options(Options { order, ..usual });
        let other = run(&context, &case, &data);
        assert!(other.bytes == expected.bytes, "{order:?}");
    }
    deltawave_sim::hip::set_options(Options {
        count: true,
        ..usual
    });
    deltawave_sim::hip::take_counted_launches();
    run(&context, &case, &data);
    deltawave_sim::hip::set_options(usual);
    let launches = deltawave_sim::hip::take_counted_launches();
    // Other tests of this process may be counted, too.
    let minimal = 3 * 2 * case.elements() + 4 * 128;
    let ratios = launches.iter().map(|launch| {
        let unique = launch.totals().traffic.unique_bytes;
        unique as f64 / minimal as f64
    });
    let ratios: Vec<_> = ratios.collect();
    println!("{ratios:?} of the minimal bytes");
    // In place, x and y are the same bytes of memory, read and written.
    assert!(ratios.iter().any(|r| (0.6..1.05).contains(r)), "{ratios:?}");
}

fn any_case() -> impl Strategy<Value = Case> {
    let any_dtype = || prop_oneof![Just(Dtype::Bf16), Just(Dtype::F16)];
    let shape = (any_dtype(), 0usize..9, 1usize..4, 1usize..4, 1usize..=16);
    let views = (
        prop_oneof![Just(Z::Own), Just(Z::Flat), Just(Z::Interleaved)],
        0usize..20,
        0usize..9,
        0usize..9,
        any::<bool>(),
    );
    let parameters = (
        any::<bool>(),
        proptest::option::of(prop_oneof![
            Just(Dtype::F32),
            Just(Dtype::Bf16),
            Just(Dtype::F16)
        ]),
        1usize..3,
        prop_oneof![Just(1e-6f32), Just(1e-5), Just(0.5)],
        0u64..1 << 32,
    );
    (shape, views, parameters).prop_map(|(shape, views, parameters)| {
        let (dtype, tokens, key_heads, group, sixteens) = shape;
        let (z, pad, head_pad, offset, in_place) = views;
        let (silu, weight, weight_stride, eps, seed) = parameters;
        Case {
            dtype,
            tokens,
            key_heads,
            value_heads: key_heads * group,
            value_dim: 16 * sixteens,
            z,
            gate: if silu {
                OutputGate::Silu
            } else {
                OutputGate::Sigmoid
            },
            weight,
            weight_stride,
            eps,
            in_place,
            pad,
            head_pad,
            offset,
            seed,
        }
    })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn random_norms(case in any_case()) {
        check(&context(), &case);
    }
}

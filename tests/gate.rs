//! The gate operation on the device against f64.

mod common;

use common::{context, has_room};
use deltawave::gate::Gate;
use deltawave::runtime::{Context, Stream};
use deltawave::tensor::Buffer;
use deltawave::types::Dtype;
use deltawave_lab::inputs::Tensor as HostTensor;
use deltawave_lab::oracle::gates::{beta, log_gate};

/// Inputs as the host has them, all of one shape `[T, HV]`.
struct Problem {
    tokens: usize,
    heads: usize,
    a: HostTensor,
    b: HostTensor,
    a_log: HostTensor,
    dt_bias: Option<HostTensor>,
    allow_neg_eigval: bool,
}

/// Strides and offset of `[T, HV]` views, the same for inputs and outputs.
#[derive(Clone, Copy)]
struct View {
    strides: [usize; 2],
    offset: usize,
}

impl View {
    fn at(&self, i: usize, heads: usize) -> usize {
        self.offset + i / heads * self.strides[0] + i % heads * self.strides[1]
    }
}

fn place(context: &Context, t: &HostTensor, heads: usize, view: View) -> Buffer<u8> {
    let size = t.dtype.size();
    let n = t.values.len();
    let mut bytes = vec![0xff; (view.at(n.saturating_sub(1), heads) + 1) * size];
    for i in 0..n {
        let at = view.at(i, heads) * size;
        bytes[at..at + size].copy_from_slice(&t.bytes[i * size..(i + 1) * size]);
    }
    context.upload(&bytes).unwrap()
}

/// Computes g and beta in poisoned memory; what lies between the elements must stay as it was.
fn run(context: &Context, p: &Problem, view: View) -> (Vec<f32>, Vec<f32>) {
    let stream: Stream = context.stream().unwrap();
    let n = p.tokens * p.heads;
    let (a, b) = (
        place(context, &p.a, p.heads, view),
        place(context, &p.b, p.heads, view),
    );
    let a_log = context.upload(&p.a_log.bytes).unwrap();
    let dt_bias = p
        .dt_bias
        .as_ref()
        .map(|t| context.upload(&t.bytes).unwrap());
    let poison = vec![f32::from_bits(u32::MAX); view.at(n.saturating_sub(1), p.heads) + 9];
    let mut g = context.upload(&poison).unwrap();
    let mut beta = context.upload(&poison).unwrap();
    let shape = [p.tokens, p.heads];
    Gate {
        a: a.tensor_of(p.a.dtype, shape, view.strides, view.offset)
            .unwrap()
            .into(),
        b: b.tensor_of(p.b.dtype, shape, view.strides, view.offset)
            .unwrap()
            .into(),
        a_log: a_log.tensor_of(p.a_log.dtype, [p.heads], [1], 0).unwrap(),
        dt_bias: dt_bias
            .as_ref()
            .zip(p.dt_bias.as_ref())
            .map(|(buffer, t)| buffer.tensor_of(t.dtype, [p.heads], [1], 0).unwrap()),
        allow_neg_eigval: p.allow_neg_eigval,
        g: g.tensor_strided_mut(shape, view.strides, view.offset)
            .unwrap()
            .into(),
        beta: beta
            .tensor_strided_mut(shape, view.strides, view.offset)
            .unwrap()
            .into(),
    }
    .launch(context, &stream)
    .unwrap();
    let gather = |buffer: &Buffer<f32>| {
        let mut all = buffer.download(&stream).unwrap();
        let picked = (0..n)
            .map(|i| std::mem::replace(&mut all[view.at(i, p.heads)], f32::from_bits(u32::MAX)));
        let picked: Vec<f32> = picked.collect();
        assert!(
            all.iter().all(|x| x.to_bits() == u32::MAX),
            "written outside of the tensor"
        );
        picked
    };
    (gather(&g), gather(&beta))
}

/// Largest relative errors of g and beta; a reference below the f32 range counts as 0.
fn errors(p: &Problem, g: &[f32], betas: &[f32]) -> (f64, f64) {
    let relative = |x: f32, r: f64| {
        if r.abs() < f64::from(f32::MIN_POSITIVE) {
            return if f64::from(x).abs() <= f64::from(f32::MIN_POSITIVE) {
                0.0
            } else {
                f64::INFINITY
            };
        }
        let e = (f64::from(x) - r).abs() / r.abs();
        if e.is_nan() { f64::INFINITY } else { e }
    };
    let mut worst = (0.0f64, 0.0f64);
    for i in 0..g.len() {
        let h = i % p.heads;
        let bias = p.dt_bias.as_ref().map_or(0.0, |t| t.values[h]);
        // The sum of a and its bias is one of f32.
        let sum = p.a.values[i] + bias;
        let wanted = log_gate(f64::from(sum), f64::from(p.a_log.values[h]), 0.0);
        worst.0 = worst.0.max(relative(g[i], wanted));
        let wanted = beta(f64::from(p.b.values[i]), p.allow_neg_eigval);
        worst.1 = worst.1.max(relative(betas[i], wanted));
    }
    worst
}

const DENSE: fn(usize) -> View = |heads| View {
    strides: [heads, 1],
    offset: 0,
};

fn sweep(tokens: usize, heads: usize, dtype: Dtype) -> Problem {
    let n = tokens * heads;
    let x = |shift: f32| {
        let values = (0..n).map(|i| -40.0 + 80.0 * (i as f32 + shift) / n as f32);
        HostTensor::new(dtype, values.collect())
    };
    let a_log = (0..heads).map(|h| -6.0 + 9.0 * h as f32 / heads as f32);
    Problem {
        tokens,
        heads,
        a: x(0.0),
        b: x(0.5),
        a_log: HostTensor::new(Dtype::F32, a_log.collect()),
        dt_bias: None,
        allow_neg_eigval: false,
    }
}

/// Softplus keeps its relative accuracy for very negative arguments, where `log(1 + exp(x))` loses all of it, and the
/// sigmoid for very negative logits.
#[test]
fn accurate_from_minus_40_to_40() {
    let context = context();
    for heads in [1, 3, 12] {
        let p = sweep(2048, heads, Dtype::F32);
        let (g, b) = run(&context, &p, DENSE(heads));
        let (eg, eb) = errors(&p, &g, &b);
        assert!(eg < 1e-6 && eb < 1e-6, "g {eg:.1e}, beta {eb:.1e}");
        assert!(g.iter().all(|x| *x <= 0.0) && b.iter().all(|x| (0.0..=1.0).contains(x)));
    }
}

#[test]
fn every_input_type_with_and_without_bias() {
    let context = context();
    for dtype in [Dtype::F32, Dtype::Bf16, Dtype::F16] {
        for per_head in [Dtype::F32, Dtype::Bf16, Dtype::F16] {
            for (biased, allow_neg_eigval) in [(true, false), (false, true)] {
                let mut p = sweep(70, 6, dtype);
                p.a_log = HostTensor::new(per_head, p.a_log.values);
                p.allow_neg_eigval = allow_neg_eigval;
                if biased {
                    let bias = vec![-6.9, -2.2, 0.0, 1.0, 0.5, -0.1];
                    p.dt_bias = Some(HostTensor::new(per_head, bias));
                }
                let (g, b) = run(&context, &p, DENSE(6));
                let (eg, eb) = errors(&p, &g, &b);
                assert!(eg < 1e-6 && eb < 1e-6, "g {eg:.1e}, beta {eb:.1e}");
            }
        }
    }
}

/// Survey 35: logits far outside, zeros, and infinities give no NaN.
#[test]
fn extreme_inputs() {
    let context = context();
    let inf = f32::INFINITY;
    let x = vec![
        1e4, -1e4, 88.0, -88.0, 0.0, -0.0, inf, -inf, 1e30, -1e30, 1e-30, 104.0,
    ];
    let n = x.len();
    for allow_neg_eigval in [false, true] {
        let p = Problem {
            tokens: n,
            heads: 1,
            a: HostTensor::new(Dtype::F32, x.clone()),
            b: HostTensor::new(Dtype::F32, x.clone()),
            a_log: HostTensor::new(Dtype::F32, vec![2.7]),
            dt_bias: None,
            allow_neg_eigval,
        };
        let (g, b) = run(&context, &p, DENSE(1));
        assert!(!g.iter().chain(&b).any(|x| x.is_nan()), "{g:?} {b:?}");
        let one = if allow_neg_eigval { 2.0 } else { 1.0 };
        assert_eq!(
            (b[0], b[1], b[4], b[6], b[7]),
            (one, 0.0, one / 2.0, one, 0.0)
        );
        assert_eq!((g[1].abs(), g[6], g[7].abs()), (0.0, -inf, 0.0));
        let finite = Problem {
            tokens: 4,
            a: HostTensor::new(Dtype::F32, x[..4].to_vec()),
            b: HostTensor::new(Dtype::F32, x[..4].to_vec()),
            a_log: p.a_log,
            ..p
        };
        let (eg, eb) = errors(&finite, &g[..4], &b[..4]);
        assert!(eg < 1e-6 && eb < 1e-6, "g {eg:.1e}, beta {eb:.1e}");
    }
    // NaN in, NaN out, and only there.
    let mut p = sweep(10, 2, Dtype::F32);
    p.a.bytes[4 * 5..4 * 6].copy_from_slice(&f32::NAN.to_le_bytes());
    p.b.bytes[4 * 7..4 * 8].copy_from_slice(&f32::NAN.to_le_bytes());
    let (g, b) = run(&context, &p, DENSE(2));
    for i in 0..20 {
        assert_eq!((g[i].is_nan(), b[i].is_nan()), (i == 5, i == 7));
    }
}

/// Views: interleaved projections, padded rows, head-major; empty ones too. All give the bits of dense tensors.
#[test]
fn views() {
    let context = context();
    let heads = 6;
    for tokens in [0, 1, 43, 300] {
        let mut p = sweep(tokens, heads, Dtype::Bf16);
        p.dt_bias = Some(HostTensor::new(Dtype::F32, vec![0.1; heads]));
        let expected = run(&context, &p, DENSE(heads));
        for view in [
            View {
                strides: [2 * heads, 2],
                offset: 1,
            },
            View {
                strides: [heads + 5, 1],
                offset: 3,
            },
            View {
                strides: [1, tokens.max(1)],
                offset: 0,
            },
        ] {
            let other = run(&context, &p, view);
            let bits = |x: &[f32]| x.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
            assert!(bits(&expected.0) == bits(&other.0) && bits(&expected.1) == bits(&other.1));
        }
    }
}

/// Offsets beyond 2^31 elements, and one value for all heads.
#[test]
fn far_and_expanded() {
    let context = context();
    let (tokens, heads) = (140usize, 2usize);
    let p = sweep(tokens, heads, Dtype::F32);
    let stride = (1usize << 24) - 16;
    if !has_room(&context, 12 << 30) {
        return;
    }
    let a = context
        .alloc::<f32>((tokens - 1) * stride + heads)
        .expect("memory that is not committed");
    let stream = context.stream().unwrap();
    for (t, row) in p.a.bytes.chunks_exact(4 * heads).enumerate() {
        let to = a.address().wrapping_byte_add(4 * t * stride);
        let kind = hip_sys::hipMemcpyKind::hipMemcpyHostToDevice;
        // SAFETY: the row lies in the buffer.
        unsafe {
            context
                .hip()
                .hipMemcpy(to, row.as_ptr().cast(), row.len(), kind)
        }
        .unwrap();
    }
    let b = context.upload(&[-1.0f32]).unwrap();
    let a_log = context.upload(&p.a_log.values).unwrap();
    let mut g = context.upload(&vec![f32::NAN; tokens * heads]).unwrap();
    let mut betas = context.upload(&vec![f32::NAN; tokens * heads]).unwrap();
    Gate {
        a: a.tensor_strided([tokens, heads], [stride, 1], 0)
            .unwrap()
            .into(),
        b: b.tensor_strided([tokens, heads], [0, 0], 0).unwrap().into(),
        a_log: a_log.tensor([heads]).unwrap(),
        dt_bias: None,
        allow_neg_eigval: false,
        g: g.tensor_mut([tokens, heads]).unwrap().into(),
        beta: betas.tensor_mut([tokens, heads]).unwrap().into(),
    }
    .launch(&context, &stream)
    .unwrap();
    let betas = betas.download(&stream).unwrap();
    let dense = run(&context, &p, DENSE(heads));
    assert_eq!(g.download(&stream).unwrap(), dense.0);
    assert!(betas.iter().all(|x| *x == betas[0]));
    assert!((f64::from(betas[0]) - beta(-1.0, false)).abs() < 1e-7);
}

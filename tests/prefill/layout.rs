//! Shapes, head maps, states and views of every kind.

use deltawave::gates::Gating;
use deltawave::prefill::{Prefill, PrefillPath, PrefillTensors};
use deltawave::runtime::{Context, Stream};
use deltawave::state::InitialState;
use deltawave::state::States;
use deltawave::state::{State, StateMut};
use deltawave::tensor::{Buffer, dense_strides};
use deltawave::types::{Dtype, HeadMap, StateLayout};
use deltawave::workspace::Workspace;
use deltawave_lab::inputs::{Gates, Tensor as HostTensor};
use deltawave_lab::memory::resident;
use hip_sys::hipMemcpyKind;

use crate::common::{
    Case, Layout, Output, StateKind, Views, assert_same_bits, check, check_data, check_output,
    context, has_room, run, run_views, simulated, spec,
};

/// Head dimensions of every bucket and between them, K = V and not.
#[test]
fn head_dimensions() {
    for (i, (k, v)) in [
        (16, 16),
        (16, 256),
        (32, 64),
        (64, 64),
        (80, 48),
        (96, 192),
        (112, 16),
        (128, 128),
        (144, 80),
        (192, 96),
        (208, 240),
        (256, 16),
        (256, 256),
    ]
    .into_iter()
    .enumerate()
    {
        let dtype = [Dtype::Bf16, Dtype::F16][i % 2];
        let mut case = Case::new(spec(dtype, 1, 2, k, v), &[75, 0, 64]);
        case.gates = Gates::Mixed;
        case.initial = Some(StateKind {
            dtype: Dtype::F32,
            layout: StateLayout::KeyMajor,
            pad: 0,
        });
        check(&context(), &case);
        case.spec.dtype = [Dtype::F16, Dtype::Bf16][i % 2];
        case.spec.qk_l2norm = true;
        case.lengths = vec![130];
        check(&context(), &case);
    }
}

/// Survey 20 and 61: any number of value heads for a key head, both maps.
#[test]
fn head_counts() {
    for (key_heads, value_heads) in [
        (1, 1),
        (1, 3),
        (1, 8),
        (2, 2),
        (2, 6),
        (3, 3),
        (3, 6),
        (3, 12),
        (5, 5),
    ] {
        let mut outputs = Vec::new();
        for head_map in [HeadMap::Grouped, HeadMap::Tiled] {
            let mut case = Case::new(spec(Dtype::Bf16, key_heads, value_heads, 48, 32), &[75, 20]);
            case.spec.heads.map = head_map;
            let data = case.data();
            let output = run(&context(), &case, &data);
            check_output(&case, &data, &output, 1.15);
            outputs.push(output);
        }
        let same = key_heads == 1 || key_heads == value_heads;
        assert_eq!(outputs[0] == outputs[1], same, "the two maps");
    }
}

/// Survey 3 and 55: no initial state, one of zeros, and flags that switch it off, give the same bits; NaN that is
/// switched off is not read.
#[test]
fn absent_states_are_zeros() {
    for dtype in [Dtype::F32, Dtype::Bf16, Dtype::F16] {
        for layout in [StateLayout::KeyMajor, StateLayout::ValueMajor] {
            let mut case = Case::new(spec(Dtype::Bf16, 1, 2, 32, 48), &[75, 0, 64]);
            let absent = run(&context(), &case, &case.data());
            case.initial = Some(StateKind {
                dtype,
                layout,
                pad: 0,
            });
            let mut data = case.data();
            let elements = data.initial.as_ref().unwrap().values.len();
            data.initial = Some(HostTensor::new(dtype, vec![0.0; elements]));
            assert_same_bits(&absent, &run(&context(), &case, &data), "none and zeros");
            case.has_initial = Some(vec![0; 3]);
            let mut data = case.data();
            data.initial = Some(HostTensor::new(dtype, vec![f32::NAN; elements]));
            assert_same_bits(&absent, &run(&context(), &case, &data), "none and off");
            case.has_initial = Some(vec![0, 1, 255]);
            check(&context(), &case);
        }
    }
}

/// Survey 53: both layouts of both states, dense and with padded rows, give the same bits; both types are right.
#[test]
fn states_of_every_form() {
    use StateLayout::{KeyMajor, ValueMajor};
    for (dtype, k, v) in [(Dtype::Bf16, 96, 48), (Dtype::F16, 32, 144)] {
        let mut expected: Option<Output> = None;
        for initial in [KeyMajor, ValueMajor] {
            for last in [KeyMajor, ValueMajor] {
                for pad in [0, 3] {
                    let mut case = Case::new(spec(dtype, 1, 2, k, v), &[75, 0, 20]);
                    let kind = |layout| StateKind {
                        dtype: Dtype::F32,
                        layout,
                        pad,
                    };
                    case.initial = Some(kind(initial));
                    case.final_state = Some(kind(last));
                    let data = case.data();
                    let output = run(&context(), &case, &data);
                    match &expected {
                        Some(expected) => assert_same_bits(expected, &output, "state layouts"),
                        None => {
                            check_output(&case, &data, &output, 1.15);
                            expected = Some(output);
                        }
                    }
                    for dtype in [Dtype::Bf16, Dtype::F16] {
                        let of_16_bits = |layout| StateKind {
                            dtype,
                            ..kind(layout)
                        };
                        case.initial = Some(of_16_bits(initial));
                        case.final_state = Some(of_16_bits(last));
                        check(&context(), &case);
                    }
                }
            }
        }
    }
}

/// A final state of 16 bits is the f32 one, rounded to nearest.
#[test]
fn states_of_16_bits_are_rounded_f32_states() {
    let mut case = Case::new(spec(Dtype::Bf16, 1, 2, 64, 32), &[130, 20]);
    let mut data = case.data();
    // Some states are beyond the range of f16.
    let v = data.inputs.v.values.iter().enumerate();
    let v = v.map(|(i, x)| if i % 32 < 8 { x * 1e7 } else { *x });
    data.inputs.v = HostTensor::new(Dtype::Bf16, v.collect());
    let wide = run(&context(), &case, &data).state.unwrap();
    assert!(wide.iter().any(|x| x.abs() > 65520.0));
    for dtype in [Dtype::Bf16, Dtype::F16] {
        case.final_state = Some(StateKind {
            dtype,
            layout: StateLayout::KeyMajor,
            pad: 0,
        });
        let narrow = run(&context(), &case, &data).state.unwrap();
        let rounded: Vec<f32> = wide.iter().map(|x| dtype.round(*x)).collect();
        assert_eq!(narrow, rounded, "{dtype}");
    }
}

/// No final state: the same outputs.
#[test]
fn the_final_state_is_optional() {
    let mut case = Case::new(spec(Dtype::Bf16, 1, 2, 64, 32), &[130, 20]);
    let with = run(&context(), &case, &case.data());
    case.final_state = None;
    let without = run(&context(), &case, &case.data());
    assert_eq!(with.o, without.o);
}

/// Survey 65 and 66: a sequence that is continued from its state, at a chunk boundary or not, is the whole sequence.
#[test]
fn a_prefill_can_be_continued() {
    for split in [1, 63, 64, 100, 128] {
        let whole = Case::new(spec(Dtype::F16, 1, 2, 64, 32), &[200]);
        let data = whole.data();
        let part = |from: usize, to: usize, initial: Option<Vec<f32>>| {
            let mut case = whole.clone();
            case.lengths = vec![to - from];
            case.initial = initial.as_ref().map(|_| StateKind {
                dtype: Dtype::F32,
                layout: StateLayout::KeyMajor,
                pad: 0,
            });
            let mut data = whole.data();
            let cut = |t: &HostTensor, w: usize| {
                HostTensor::new(t.dtype, t.values[from * w..to * w].to_vec())
            };
            let i = &mut data.inputs;
            (i.q, i.k, i.v) = (cut(&i.q, 64), cut(&i.k, 64), cut(&i.v, 64));
            (i.g, i.beta) = (
                i.g[from * 2..to * 2].to_vec(),
                i.beta[from * 2..to * 2].to_vec(),
            );
            i.spec.tokens = to - from;
            data.gate_inputs.a = cut(&data.gate_inputs.a, 2);
            data.gate_inputs.b = cut(&data.gate_inputs.b, 2);
            data.cu_seqlens = case.cu_seqlens();
            data.initial = initial.map(|x| HostTensor::new(Dtype::F32, x));
            run(&context(), &case, &data)
        };
        let first = part(0, split, None);
        let second = part(split, 200, first.state.clone());
        let joined = Output {
            o: [first.o, second.o].concat(),
            state: second.state,
        };
        check_output(&whole, &data, &joined, 1.15);
    }
}

/// Trap 12, survey 4 and 54: padded rows, offsets, odd strides and transposed views give the bits of dense tensors.
#[test]
fn views_give_the_same_bits() {
    for (k, v) in [(64, 32), (96, 48), (208, 80)] {
        let mut case = Case::new(spec(Dtype::Bf16, 2, 4, k, v), &[75, 0, 64, 5]);
        case.padding = 3;
        let data = case.data();
        let dense = run(&context(), &case, &data);
        check_output(&case, &data, &dense, 1.15);
        for layout in [
            Layout::Padded(8, 0, 8),
            Layout::Padded(0, 64, 0),
            Layout::Padded(1, 0, 0),
            Layout::Padded(3, 5, 1),
            Layout::HeadMajor,
        ] {
            case.layout = layout;
            let other = run(&context(), &case, &data);
            assert_same_bits(&dense, &other, &format!("{layout:?}"));
        }
    }
}

fn upload(context: &Context, tensor: &HostTensor) -> Buffer<u8> {
    context.upload(&tensor.bytes).expect("memory")
}

/// Trap 12: q, k and v are slices of one packed projection, and g and beta of another.
#[test]
fn slices_of_a_projection() {
    let (hk, hv, k, v, tokens) = (2, 4, 48, 32, 79);
    let case = Case::new(spec(Dtype::Bf16, hk, hv, k, v), &[15, 64]);
    let data = case.data();
    let expected = run(&context(), &case, &data);
    check_output(&case, &data, &expected, 1.15);
    // Rows [q | k | v | z], then what belongs to nobody.
    let widths = [hk * k, hk * k, hv * v];
    let row = widths.iter().sum::<usize>() + hv * v;
    let mut packed = vec![f32::NAN; tokens * row];
    let i = &data.inputs;
    for t in 0..tokens {
        let mut at = t * row;
        for (tensor, width) in [&i.q, &i.k, &i.v].into_iter().zip(widths) {
            packed[at..at + width].copy_from_slice(&tensor.values[t * width..(t + 1) * width]);
            at += width;
        }
    }
    let mut scalars = vec![f32::NAN; tokens * 2 * hv];
    for t in 0..tokens {
        for h in 0..hv {
            scalars[t * 2 * hv + 2 * h] = i.beta[t * hv + h];
            scalars[t * 2 * hv + 2 * h + 1] = i.g[t * hv + h];
        }
    }
    let context = context();
    let packed = upload(&context, &HostTensor::new(Dtype::Bf16, packed));
    let scalars = context.upload(&scalars).unwrap();
    let slice = |heads, dim, offset| {
        packed
            .tensor_of(Dtype::Bf16, [tokens, heads, dim], [row, dim, 1], offset)
            .unwrap()
            .into()
    };
    let views = Views {
        q: slice(hk, k, 0),
        k: slice(hk, k, hk * k),
        v: slice(hv, v, 2 * hk * k),
        g: Some(
            scalars
                .tensor_strided([tokens, hv], [2 * hv, 2], 1)
                .unwrap()
                .into(),
        ),
        beta: Some(
            scalars
                .tensor_strided([tokens, hv], [2 * hv, 2], 0)
                .unwrap()
                .into(),
        ),
    };
    assert_same_bits(&expected, &run_views(&context, &case, views), "slices");
}

/// Trap 12: expanded views: one row for all heads, one row for all tokens, one gate for all; rows that overlap.
#[test]
fn expanded_views() {
    let (h, k, v, tokens) = (2, 32, 48, 75);
    let case = Case::new(spec(Dtype::Bf16, h, h, k, v), &[75]);
    let context = context();
    let source = case.data();
    // (strides, offset) of q, k, v, g, beta.
    type Scheme = [([usize; 3], usize); 5];
    let schemes: [Scheme; 3] = [
        // One key head for all, one value row for all tokens, one gate.
        [
            ([h * k, k, 1], 0),
            ([h * k, 0, 1], k),
            ([0, v, 1], 0),
            ([0, 0, 1], 3),
            ([h, 1, 1], 0),
        ],
        // The same row everywhere.
        [
            ([0, 0, 1], 16),
            ([h * k, k, 1], 0),
            ([0, 0, 1], 0),
            ([h, 0, 1], 1),
            ([0, 1, 1], 0),
        ],
        // Sliding windows: each row shares half of itself with the next.
        [
            ([16, 8, 1], 0),
            ([16, 16, 1], 5 * k),
            ([24, 8, 1], 8),
            ([1, 1, 1], 0),
            ([1, 0, 1], 0),
        ],
    ];
    for (n, scheme) in schemes.into_iter().enumerate() {
        let mut data = case.data();
        let pick = |values: &[f32], (strides, offset): ([usize; 3], usize), d: usize| {
            let mut out = Vec::new();
            for t in 0..tokens {
                for head in 0..h {
                    let at = offset + t * strides[0] + head * strides[1];
                    out.extend_from_slice(&values[at..at + d]);
                }
            }
            out
        };
        let s = &source.inputs;
        let i = &mut data.inputs;
        i.q = HostTensor::new(Dtype::Bf16, pick(&s.q.values, scheme[0], k));
        i.k = HostTensor::new(Dtype::Bf16, pick(&s.k.values, scheme[1], k));
        i.v = HostTensor::new(Dtype::Bf16, pick(&s.v.values, scheme[2], v));
        i.g = pick(&s.g, scheme[3], 1);
        i.beta = pick(&s.beta, scheme[4], 1);
        // Sliding windows over unit rows are not of unit norm, and may grow: shrink them.
        if n == 2 {
            i.beta.iter_mut().for_each(|b| *b *= 0.25);
        }
        let beta: Vec<f32> = if n == 2 {
            s.beta.iter().map(|b| b * 0.25).collect()
        } else {
            s.beta.clone()
        };
        let expected = check_and_run(&context, &case, &data);
        let (q, kk, vv) = (
            upload(&context, &s.q),
            upload(&context, &s.k),
            upload(&context, &s.v),
        );
        let (g, beta) = (
            context.upload(&s.g).unwrap(),
            context.upload(&beta).unwrap(),
        );
        let tokens_of = |b: &'_ Buffer<u8>, i: usize, d: usize| {
            let (strides, offset) = scheme[i];
            // SAFETY: the buffers outlive the launch, and the view lies within them.
            unsafe {
                deltawave::tensor::Tensor::from_raw(
                    b.address().wrapping_byte_add(2 * offset),
                    Dtype::Bf16,
                    [tokens, h, d],
                    strides,
                )
            }
            .into()
        };
        let views = Views {
            q: tokens_of(&q, 0, k),
            k: tokens_of(&kk, 1, k),
            v: tokens_of(&vv, 2, v),
            g: Some(
                g.tensor_strided([tokens, h], [scheme[3].0[0], scheme[3].0[1]], scheme[3].1)
                    .unwrap()
                    .into(),
            ),
            beta: Some(
                beta.tensor_strided([tokens, h], [scheme[4].0[0], scheme[4].0[1]], scheme[4].1)
                    .unwrap()
                    .into(),
            ),
        };
        assert_same_bits(&expected, &run_views(&context, &case, views), "expanded");
    }
}

fn check_and_run(context: &Context, case: &Case, data: &crate::common::Data) -> Output {
    check_data(context, case, data);
    run(context, case, data)
}

/// Memory of which only some rows are ever touched: the simulator commits no more than those.
struct Sparse {
    buffer: Buffer<u8>,
}

impl Sparse {
    fn new(context: &Context, bytes: usize) -> Self {
        Sparse {
            buffer: context.alloc(bytes).expect("memory"),
        }
    }

    fn copy(&self, context: &Context, at: usize, host: *mut u8, len: usize, kind: hipMemcpyKind) {
        assert!(at + len <= self.buffer.len());
        let device = self.buffer.address().wrapping_byte_add(at);
        let (to, from) = match kind {
            hipMemcpyKind::hipMemcpyHostToDevice => (device, host.cast()),
            _ => (host.cast(), device),
        };
        // SAFETY: the range lies in the buffer, `host` is valid for `len` bytes.
        unsafe {
            context
                .hip()
                .hipMemcpy(to, from, len, kind)
                .expect("a copy")
        };
    }

    fn write(&self, context: &Context, at: usize, bytes: &[u8]) {
        let host = bytes.as_ptr().cast_mut();
        self.copy(
            context,
            at,
            host,
            bytes.len(),
            hipMemcpyKind::hipMemcpyHostToDevice,
        );
    }

    fn read(&self, context: &Context, at: usize, len: usize) -> Vec<u8> {
        let mut out = vec![0; len];
        self.copy(
            context,
            at,
            out.as_mut_ptr(),
            len,
            hipMemcpyKind::hipMemcpyDeviceToHost,
        );
        out
    }
}

/// Rows of `[T, H, D]` in sparse memory.
fn scatter(
    context: &Context,
    tensor: &HostTensor,
    d: usize,
    place: impl Fn(usize) -> usize,
) -> Sparse {
    let row = d * 2;
    let rows = tensor.bytes.len() / row;
    let sparse = Sparse::new(context, place(rows - 1) * 2 + row);
    for (i, bytes) in tensor.bytes.chunks_exact(row).enumerate() {
        sparse.write(context, place(i) * 2, bytes);
    }
    sparse
}

/// Trap 10, survey 47: every offset needs 64 bits: tokens, heads, sequences of a dense batch, states.
#[test]
fn offsets_beyond_32_bits() {
    let context = context();
    if !has_room(&context, 90 << 30) {
        return;
    }
    let before = resident();
    let stream = context.stream().unwrap();
    // The largest token stride that is allowed, heads that lie further apart than all tokens together.
    let (hk, hv, k, v, tokens) = (1, 2, 32, 16, 150);
    let token_stride = (1 << 24) - 16;
    let head_stride = tokens * token_stride + 16;
    let mut case = Case::new(spec(Dtype::Bf16, hk, hv, k, v), &[70, 75]);
    case.padding = 5;
    case.initial = Some(StateKind {
        dtype: Dtype::F32,
        layout: StateLayout::KeyMajor,
        pad: 0,
    });
    let data = case.data();
    let expected = check_and_run(&context, &case, &data);
    assert!(tokens * token_stride > 1 << 31);
    far_apart(
        &context,
        &stream,
        &case,
        &data,
        &expected,
        &|t, h| t * token_stride + h * head_stride,
        (1 << 30, 1 << 29, v),
    );
    let grown = resident().saturating_sub(before);
    assert!(
        grown < 1 << 30 || !simulated(&context),
        "{grown} bytes were committed"
    );
}

/// Rows of states around the stride from which on a window of memory does not reach all of them.
#[test]
fn rows_of_states_far_apart() {
    let context = context();
    if !has_room(&context, 4 << 30) {
        return;
    }
    let stream = context.stream().unwrap();
    for path in [PrefillPath::Split, PrefillPath::Fused] {
        for layout in [StateLayout::KeyMajor, StateLayout::ValueMajor] {
            let mut case = Case::new(spec(Dtype::Bf16, 1, 2, 32, 16), &[70, 75]);
            case.spec.path = path;
            case.initial = Some(StateKind {
                dtype: Dtype::F32,
                layout,
                pad: 0,
            });
            case.final_state = case.initial;
            let data = case.data();
            let expected = run(&context, &case, &data);
            for row in [(1 << 21) - 2, (1 << 21) - 1, 1 << 21, (1 << 21) + 16] {
                let strides = (64 * row, 32 * row, row);
                let place = |t: usize, h: usize| 64 * t + 32 * h;
                far_apart(&context, &stream, &case, &data, &expected, &place, strides);
            }
        }
    }
}

/// Runs a packed case whose rows lie at `place(token, head)` and whose states have these strides: of sequences, heads and
/// rows.
fn far_apart(
    context: &Context,
    stream: &Stream,
    case: &Case,
    data: &crate::common::Data,
    expected: &Output,
    place: &dyn Fn(usize, usize) -> usize,
    (sequence_stride, state_head_stride, state_row): (usize, usize, usize),
) {
    let s = &case.spec;
    let (hk, hv, k, v) = (
        s.heads.key,
        s.heads.value,
        s.heads.key_dim,
        s.heads.value_dim,
    );
    let tokens = case.tokens();
    let of = |heads: usize| move |i: usize| place(i / heads, i % heads);
    let (st, sh) = (place(1, 0), place(0, 1));
    let q = scatter(context, &data.inputs.q, k, of(hk));
    let kk = scatter(context, &data.inputs.k, k, of(hk));
    let vv = scatter(context, &data.inputs.v, v, of(hv));
    let poison = HostTensor::from_bytes(s.dtype, vec![0xff; tokens * hv * v * 2]);
    let mut o = scatter(context, &poison, v, of(hv));
    // Scalars as far apart as the stride of a token allows.
    let scalar = |values: &[f32]| {
        let end = place(tokens - 1, hv - 1) * 4 + 4;
        let sparse = Sparse::new(context, end);
        for (i, x) in values.iter().enumerate() {
            sparse.write(context, place(i / hv, i % hv) * 4, &x.to_le_bytes());
        }
        sparse
    };
    let (g, beta) = (scalar(&data.inputs.g), scalar(&data.inputs.beta));
    let n = case.lengths.len();
    let layout = case.initial.expect("an initial state").layout;
    let (rows, columns) = match layout {
        StateLayout::KeyMajor => (k, v),
        StateLayout::ValueMajor => (v, k),
    };
    // Of row i of all states.
    let state_at = |i: usize| {
        let (head, row) = (i / rows, i % rows);
        let at = head / hv * sequence_stride + head % hv * state_head_stride;
        (at + row * state_row) * 4
    };
    let state_bytes = state_at(n * hv * rows - 1) + columns * 4;
    let initial = Sparse::new(context, state_bytes);
    let mut last = Sparse::new(context, state_bytes);
    let values = &data.initial.as_ref().unwrap().bytes;
    // Place of an element in values, which are [K, V].
    let element = |i: usize, column: usize| match layout {
        StateLayout::KeyMajor => i * columns + column,
        StateLayout::ValueMajor => (i / rows * columns + column) * rows + i % rows,
    };
    for i in 0..n * hv * rows {
        let row = (0..columns).flat_map(|column| &values[4 * element(i, column)..][..4]);
        initial.write(context, state_at(i), &row.copied().collect::<Vec<u8>>());
        last.write(context, state_at(i), &vec![0xff; columns * 4]);
    }
    let shape = [n, hv, rows, columns];
    let strides = [sequence_stride, state_head_stride, state_row, 1];
    let plan = Prefill::packed(context, *s, &data.cu_seqlens, tokens).unwrap();
    let mut workspace = context.upload(&vec![0xff; plan.workspace_bytes()]).unwrap();
    let key = |b: &Buffer<u8>| -> deltawave::tensor::Tensor<'_, 3> {
        // SAFETY: the buffers outlive the launch.
        unsafe {
            deltawave::tensor::Tensor::from_raw(
                b.address(),
                s.dtype,
                [tokens, hk, k],
                [st, sh.max(k), 1],
            )
        }
    };
    let tensors = PrefillTensors {
        cu_seqlens: None,
        q: key(&q.buffer).into(),
        k: key(&kk.buffer).into(),
        v: vv
            .buffer
            .tensor_of(s.dtype, [tokens, hv, v], [st, sh, 1], 0)
            .unwrap()
            .into(),
        gating: Gating::Given {
            g: Some(
                g.buffer
                    .tensor_of(Dtype::F32, [tokens, hv], [st, sh], 0)
                    .unwrap()
                    .into(),
            ),
            beta: Some(
                beta.buffer
                    .tensor_of(Dtype::F32, [tokens, hv], [st, sh], 0)
                    .unwrap()
                    .into(),
            ),
        },
        states: States::Separate {
            initial: Some(InitialState {
                state: State {
                    tensor: initial
                        .buffer
                        .tensor_of(Dtype::F32, shape, strides, 0)
                        .unwrap(),
                    layout,
                },
                has_initial_state: None,
            }),
            last: Some(StateMut {
                tensor: last
                    .buffer
                    .tensor_of_mut(Dtype::F32, shape, strides, 0)
                    .unwrap(),
                layout,
            }),
        },
        o: o.buffer
            .tensor_of_mut(s.dtype, [tokens, hv, v], [st, sh, 1], 0)
            .unwrap()
            .into(),
        snapshots: None,
    };
    plan.launch(stream, &tensors, Workspace::new(&mut workspace))
        .unwrap();
    stream.synchronize().unwrap();
    let mut bytes = Vec::new();
    for i in 0..tokens * hv {
        bytes.extend(o.read(context, of(hv)(i) * 2, v * 2));
    }
    let mut state = vec![0; values.len()];
    for i in 0..n * hv * rows {
        let row = last.read(context, state_at(i), columns * 4);
        for (column, bytes) in row.chunks_exact(4).enumerate() {
            state[4 * element(i, column)..][..4].copy_from_slice(bytes);
        }
    }
    let output = Output {
        o: HostTensor::from_bytes(s.dtype, bytes).values,
        state: Some(HostTensor::from_bytes(Dtype::F32, state).values),
    };
    assert_same_bits(expected, &output, "far apart");
}

/// Trap 10: sequences of a dense batch that lie more than 2^31 elements apart.
#[test]
fn a_batch_stride_beyond_32_bits() {
    let context = context();
    if !has_room(&context, 20 << 30) {
        return;
    }
    let stream = context.stream().unwrap();
    let (h, k, v, batch, tokens) = (1, 32, 16, 2, 70);
    let case = Case::new(spec(Dtype::Bf16, h, h, k, v), &[tokens; 2]);
    let data = case.data();
    let expected = check_and_run(&context, &case, &data);
    let apart = (1usize << 31) + 64;
    let place = |d: usize| move |i: usize| i / tokens * apart + i % tokens * d;
    let q = scatter(&context, &data.inputs.q, k, place(k));
    let kk = scatter(&context, &data.inputs.k, k, place(k));
    let vv = scatter(&context, &data.inputs.v, v, place(v));
    let poison = HostTensor::from_bytes(Dtype::Bf16, vec![0xff; batch * tokens * v * 2]);
    let mut o = scatter(&context, &poison, v, place(v));
    let (g, beta) = (
        context.upload(&data.inputs.g).unwrap(),
        context.upload(&data.inputs.beta).unwrap(),
    );
    let states = [batch, h, k, v];
    let mut last = context.upload(&vec![f32::NAN; batch * k * v]).unwrap();
    let plan = Prefill::dense(&context, case.spec, batch, tokens).unwrap();
    let mut workspace = context.upload(&vec![0xff; plan.workspace_bytes()]).unwrap();
    let rows = |b: &'_ Buffer<u8>, d: usize| {
        // SAFETY: the buffers outlive the launch, and hold every row.
        unsafe {
            deltawave::tensor::Tensor::from_raw(
                b.address(),
                Dtype::Bf16,
                [batch, tokens, h, d],
                [apart, d, d, 1],
            )
        }
        .into()
    };
    let tensors = PrefillTensors {
        cu_seqlens: None,
        q: rows(&q.buffer, k),
        k: rows(&kk.buffer, k),
        v: rows(&vv.buffer, v),
        gating: Gating::Given {
            g: Some(g.tensor([batch, tokens, h]).unwrap().into()),
            beta: Some(beta.tensor([batch, tokens, h]).unwrap().into()),
        },
        states: States::Separate {
            initial: None,
            last: Some(StateMut {
                tensor: last
                    .tensor_strided_mut(states, dense_strides(states), 0)
                    .unwrap(),
                layout: StateLayout::KeyMajor,
            }),
        },
        o: o.buffer
            .tensor_of_mut(Dtype::Bf16, [batch, tokens, h, v], [apart, v, v, 1], 0)
            .unwrap()
            .into(),
        snapshots: None,
    };
    plan.launch(&stream, &tensors, Workspace::new(&mut workspace))
        .unwrap();
    stream.synchronize().unwrap();
    let mut bytes = Vec::new();
    for i in 0..batch * tokens {
        bytes.extend(o.read(&context, place(v)(i) * 2, v * 2));
    }
    let output = Output {
        o: HostTensor::from_bytes(Dtype::Bf16, bytes).values,
        state: Some(last.download(&stream).unwrap()),
    };
    assert_same_bits(&expected, &output, "a batch stride of more than 2^31");
}

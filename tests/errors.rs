//! Invalid requests: each gives the typed error that names the argument, and nothing is written.

mod common;

use std::ffi::c_int;
use std::path::Path;

use common::context;
use deltawave::batch::{CuSeqlens, PerSequence};
use deltawave::gate::Gate;
use deltawave::gates::Gating;
use deltawave::prefill::{Prefill, PrefillPath, PrefillSpec, PrefillTensors};
use deltawave::runtime::Context;
use deltawave::state::InitialState;
use deltawave::state::States;
use deltawave::state::{State, StateMut, StatePool};
use deltawave::tensor::{Buffer, Tensor, TensorMut, TokenScalars, Tokens};
use deltawave::types::{Dtype, StateLayout};
use deltawave::workspace::Workspace;
use deltawave::{ArgumentError, Error};
use deltawave_lab::oracle::ProblemError;
use deltawave_lab::safetensors_io::{FileError, Named, PrefillFile, to_bytes};
use hip_sys::{Hip, hipDeviceProp_tR0600, hipError_t};

use deltawave::error::ArgumentKind::{
    self, Device, Dtype as WrongDtype, Lengths, Pointer, Presence, Shape, Size, Stride, Value,
};

/// Bytes behind every tensor of a request: more than any of them needs.
const BYTES: usize = 1 << 16;

/// Where a tensor lies.
#[derive(Clone, Copy, PartialEq)]
enum Place {
    /// A buffer of the context.
    Own,
    /// The same memory, by its address.
    Raw,
    Null,
    /// The same memory, one byte on.
    Odd,
    /// A buffer of another context.
    Foreign,
}

#[derive(Clone)]
struct View {
    dtype: Dtype,
    shape: Vec<usize>,
    strides: Vec<usize>,
    place: Place,
}

fn view(dtype: Dtype, shape: &[usize]) -> View {
    let mut strides = vec![1; shape.len()];
    for i in (1..shape.len()).rev() {
        strides[i - 1] = strides[i] * shape[i];
    }
    View {
        dtype,
        shape: shape.to_vec(),
        strides,
        place: Place::Own,
    }
}

#[derive(Clone, Copy, PartialEq)]
enum Entry {
    Packed,
    Dense,
    Device,
}

/// A prefill as data: the valid one, and changes of it.
#[derive(Clone)]
struct Request {
    spec: PrefillSpec,
    entry: Entry,
    cu_seqlens: Vec<i64>,
    tokens: usize,
    /// Entries and place of the device's lengths.
    device_lengths: (usize, Place),
    q: View,
    k: View,
    v: View,
    o: View,
    raw_gates: bool,
    g: Option<View>,
    beta: Option<View>,
    a_log: View,
    dt_bias: Option<View>,
    initial: Option<View>,
    has_initial: Option<(usize, Place)>,
    last: Option<View>,
    pool: Option<View>,
    slots: Option<(usize, Place)>,
    write_slots: Option<(usize, Place)>,
    plan_slots: Option<Vec<i32>>,
    workspace_less: usize,
    workspace: Place,
    foreign_stream: bool,
}

const HK: usize = 2;
const HV: usize = 4;
const K: usize = 32;
const V: usize = 16;

fn valid() -> Request {
    Request {
        // A path that needs a workspace.
        spec: PrefillSpec {
            path: PrefillPath::Split,
            ..PrefillSpec::new(HK, HV, K, V)
        },
        entry: Entry::Packed,
        cu_seqlens: vec![0, 5, 9],
        tokens: 9,
        device_lengths: (3, Place::Own),
        q: view(Dtype::Bf16, &[9, HK, K]),
        k: view(Dtype::Bf16, &[9, HK, K]),
        v: view(Dtype::Bf16, &[9, HV, V]),
        o: view(Dtype::Bf16, &[9, HV, V]),
        raw_gates: false,
        g: Some(view(Dtype::F32, &[9, HV])),
        beta: Some(view(Dtype::F32, &[9, HV])),
        a_log: view(Dtype::F32, &[HV]),
        dt_bias: Some(view(Dtype::F32, &[HV])),
        initial: Some(view(Dtype::F32, &[2, HV, K, V])),
        has_initial: Some((2, Place::Own)),
        last: Some(view(Dtype::F32, &[2, HV, K, V])),
        pool: None,
        slots: None,
        write_slots: None,
        plan_slots: None,
        workspace_less: 0,
        workspace: Place::Own,
        foreign_stream: false,
    }
}

fn dense() -> Request {
    let rank4 = |dtype, h, d| view(dtype, &[2, 4, h, d]);
    Request {
        entry: Entry::Dense,
        tokens: 4,
        q: rank4(Dtype::Bf16, HK, K),
        k: rank4(Dtype::Bf16, HK, K),
        v: rank4(Dtype::Bf16, HV, V),
        o: rank4(Dtype::Bf16, HV, V),
        g: Some(view(Dtype::F32, &[2, 4, HV])),
        beta: Some(view(Dtype::F32, &[2, 4, HV])),
        ..valid()
    }
}

fn device() -> Request {
    Request {
        entry: Entry::Device,
        ..valid()
    }
}

fn raw_gates() -> Request {
    Request {
        raw_gates: true,
        ..valid()
    }
}

/// On a pool of six slots.
fn pool() -> Request {
    Request {
        initial: None,
        last: None,
        pool: Some(view(Dtype::F32, &[6, HV, K, V])),
        slots: Some((2, Place::Own)),
        write_slots: Some((2, Place::Own)),
        ..valid()
    }
}

/// The same, of a plan that has its slots.
fn planned() -> Request {
    Request {
        slots: None,
        write_slots: None,
        plan_slots: Some(vec![0, 5]),
        ..pool()
    }
}

fn array<const R: usize>(x: &[usize]) -> [usize; R] {
    x.try_into().expect("the rank that was asked for")
}

/// The address that a place stands for.
fn address(own: &Buffer<u8>, place: Place) -> *mut std::ffi::c_void {
    match place {
        Place::Null => std::ptr::null_mut(),
        Place::Odd => own.address().wrapping_byte_add(1),
        _ => own.address(),
    }
}

fn tensor<'a, const R: usize>(
    v: &View,
    own: &'a Buffer<u8>,
    foreign: &'a Buffer<u8>,
) -> Tensor<'a, R> {
    let (shape, strides) = (array(&v.shape), array(&v.strides));
    let from = |b: &'a Buffer<u8>| b.tensor_of(v.dtype, shape, strides, 0).expect("in range");
    match v.place {
        Place::Own => from(own),
        Place::Foreign => from(foreign),
        // SAFETY: requests that are launched give memory of the device; the others are refused.
        place => unsafe { Tensor::from_raw(address(own, place), v.dtype, shape, strides) },
    }
}

fn tensor_mut<'a, const R: usize>(
    v: &View,
    own: &'a mut Buffer<u8>,
    foreign: &'a mut Buffer<u8>,
) -> TensorMut<'a, R> {
    let (shape, strides) = (array(&v.shape), array(&v.strides));
    match v.place {
        Place::Own => own
            .tensor_of_mut(v.dtype, shape, strides, 0)
            .expect("in range"),
        Place::Foreign => foreign
            .tensor_of_mut(v.dtype, shape, strides, 0)
            .expect("in range"),
        // SAFETY: as above.
        place => unsafe { TensorMut::from_raw(address(own, place), v.dtype, shape, strides) },
    }
}

fn tokens<'a>(v: &View, own: &'a Buffer<u8>, foreign: &'a Buffer<u8>) -> Tokens<'a> {
    if v.shape.len() == 4 {
        tensor::<4>(v, own, foreign).into()
    } else {
        tensor::<3>(v, own, foreign).into()
    }
}

fn scalars<'a>(v: &View, own: &'a Buffer<u8>, foreign: &'a Buffer<u8>) -> TokenScalars<'a> {
    if v.shape.len() == 3 {
        tensor::<3>(v, own, foreign).into()
    } else {
        tensor::<2>(v, own, foreign).into()
    }
}

/// The memory that requests use: inputs are zeros, outputs are poisoned.
struct Fixture {
    context: Context,
    other: Context,
    input: Buffer<u8>,
    foreign: Buffer<u8>,
    foreign_out: Buffer<u8>,
    /// o, the final state (or beta of the gate operation), the workspace.
    outputs: [Buffer<u8>; 3],
    lengths: Buffer<i32>,
    short_lengths: Buffer<i32>,
    foreign_lengths: Buffer<i32>,
    flags: [Buffer<u8>; 3],
}

impl Fixture {
    fn new() -> Self {
        let context = context();
        let other = Context::new(context.backend(), 0).expect("another context");
        let poison = || context.upload(&[0xffu8; BYTES]).unwrap();
        Fixture {
            input: context.upload(&[0u8; BYTES]).unwrap(),
            foreign: other.upload(&[0u8; BYTES]).unwrap(),
            foreign_out: other.upload(&[0xffu8; BYTES]).unwrap(),
            outputs: [
                poison(),
                poison(),
                context.upload(&[0xffu8; 1 << 19]).unwrap(),
            ],
            lengths: context.upload(&[0, 5, 9]).unwrap(),
            short_lengths: context.upload(&[0, 9]).unwrap(),
            foreign_lengths: other.upload(&[0, 5, 9]).unwrap(),
            flags: [
                context.upload(&[1u8; 2]).unwrap(),
                context.upload(&[1u8; 3]).unwrap(),
                other.upload(&[1u8; 2]).unwrap(),
            ],
            context,
            other,
        }
    }

    fn send(&mut self, r: &Request) -> Result<(), Error> {
        let context = self.context.clone();
        let stream = if r.foreign_stream {
            &self.other
        } else {
            &context
        }
        .stream()?;
        let plan = match r.entry {
            Entry::Packed => {
                let mut plan = Prefill::packed(&context, r.spec, &r.cu_seqlens, r.tokens)?;
                if let Some(slots) = &r.plan_slots {
                    plan.set_slots(slots, None)?;
                }
                plan
            }
            Entry::Dense => Prefill::dense(&context, r.spec, 2, r.tokens)?,
            Entry::Device => Prefill::device(&context, r.spec, r.tokens, 2)?,
        };
        let bytes = plan.workspace_bytes();
        let (input, foreign) = (&self.input, &self.foreign);
        let [o, last, workspace] = &mut self.outputs;
        let optional = |v: &Option<View>| v.as_ref().map(|v| scalars(v, input, foreign));
        let gating = if r.raw_gates {
            Gating::Raw {
                a: optional(&r.g).expect("a"),
                b: optional(&r.beta).expect("b"),
                a_log: tensor(&r.a_log, input, foreign),
                dt_bias: r.dt_bias.as_ref().map(|v| tensor(v, input, foreign)),
                allow_neg_eigval: false,
            }
        } else {
            Gating::Given {
                g: optional(&r.g),
                beta: optional(&r.beta),
            }
        };
        let mut foreign_workspace = self.other.alloc::<u8>(if r.workspace == Place::Foreign {
            bytes
        } else {
            0
        })?;
        let given = bytes - r.workspace_less;
        let workspace = match r.workspace {
            Place::Foreign => Workspace::new(&mut foreign_workspace),
            // SAFETY: the memory is there, or the request is refused.
            place => unsafe { Workspace::from_raw(address(workspace, place), given) },
        };
        let o = if r.o.shape.len() == 4 {
            tensor_mut::<4>(&r.o, o, &mut self.foreign_out).into()
        } else {
            tensor_mut::<3>(&r.o, o, &mut self.foreign_out).into()
        };
        let mut foreign_last = self.other.upload(&[0xffu8; BYTES])?;
        let mut own_pool = context.upload(&[0u8; BYTES])?;
        let mut foreign_pool = self.other.upload(&[0u8; BYTES])?;
        let slots = |(n, place)| match place {
            Place::Foreign => PerSequence::from(&self.foreign_lengths),
            Place::Own if n == 2 => PerSequence::from(&self.short_lengths),
            Place::Own => PerSequence::from(&self.lengths),
            // SAFETY: refused.
            place => unsafe { PerSequence::from_raw(address(input, place).cast(), n) },
        };
        let has_initial_state = r.has_initial.map(|(n, place)| match place {
            Place::Foreign => (&self.flags[2]).into(),
            Place::Own => (&self.flags[usize::from(n != 2)]).into(),
            // SAFETY: refused.
            place => unsafe { PerSequence::from_raw(address(input, place).cast(), n) },
        });
        let states = match &r.pool {
            Some(v) => States::Pool {
                pool: StatePool {
                    tensor: tensor_mut(v, &mut own_pool, &mut foreign_pool),
                    layout: StateLayout::KeyMajor,
                    slots: r.slots.map(slots),
                    write_slots: r.write_slots.map(slots),
                },
                has_initial_state,
            },
            None => States::Separate {
                initial: r.initial.as_ref().map(|v| InitialState {
                    state: State {
                        tensor: tensor(v, input, foreign),
                        layout: StateLayout::KeyMajor,
                    },
                    has_initial_state,
                }),
                last: r.last.as_ref().map(|v| StateMut {
                    tensor: tensor_mut(v, last, &mut foreign_last),
                    layout: StateLayout::KeyMajor,
                }),
            },
        };
        let device_lengths = match r.device_lengths {
            (_, Place::Foreign) => CuSeqlens::from(&self.foreign_lengths),
            (2, _) => CuSeqlens::from(&self.short_lengths),
            (_, Place::Own) => CuSeqlens::from(&self.lengths),
            // SAFETY: refused.
            (n, place) => unsafe {
                CuSeqlens::I32(PerSequence::from_raw(address(input, place).cast(), n))
            },
        };
        let cu_seqlens = (r.entry == Entry::Device).then_some(device_lengths);
        let tensors = PrefillTensors {
            cu_seqlens,
            q: tokens(&r.q, input, foreign),
            k: tokens(&r.k, input, foreign),
            v: tokens(&r.v, input, foreign),
            gating,
            states,
            o,
            snapshots: None,
        };
        plan.launch(&stream, &tensors, workspace)?;
        stream.synchronize()?;
        Ok(())
    }

    fn untouched(&self) -> bool {
        let buffers = self.outputs.iter().chain([&self.foreign_out]);
        buffers
            .map(|b| b.download(&b.context().stream().unwrap()).unwrap())
            .all(|bytes| bytes.iter().all(|b| *b == 0xff))
    }

    fn poison(&mut self) {
        for buffer in &mut self.outputs {
            let bytes = vec![0xff; buffer.len()];
            buffer.write(&bytes).unwrap();
        }
    }

    /// The gate operation on `[9, HV]`, changed by what `change` does to its views:
    /// a, b, a_log, dt_bias, g, beta.
    fn gate(&mut self, change: impl FnOnce(&mut [View; 6]), other: bool) -> Result<(), Error> {
        let mut v = [
            view(Dtype::Bf16, &[9, HV]),
            view(Dtype::F32, &[9, HV]),
            view(Dtype::F32, &[HV]),
            view(Dtype::F32, &[HV]),
            view(Dtype::F32, &[9, HV]),
            view(Dtype::F32, &[9, HV]),
        ];
        change(&mut v);
        let (input, foreign) = (&self.input, &self.foreign);
        let [g, beta, _] = &mut self.outputs;
        let stream = if other { &self.other } else { &self.context }.stream()?;
        let mut unused = self.other.upload(&[0xffu8; BYTES])?;
        Gate {
            a: scalars(&v[0], input, foreign),
            b: scalars(&v[1], input, foreign),
            a_log: tensor(&v[2], input, foreign),
            dt_bias: Some(tensor(&v[3], input, foreign)),
            allow_neg_eigval: false,
            g: tensor_mut::<2>(&v[4], g, &mut self.foreign_out).into(),
            beta: tensor_mut::<2>(&v[5], beta, &mut unused).into(),
        }
        .launch(&self.context, &stream)?;
        stream.synchronize()
    }
}

type Change = fn(&mut Request);
type Row = (
    &'static str,
    fn() -> Request,
    Change,
    &'static str,
    ArgumentKind,
);

/// What is wrong, the request it starts from, the change, the argument that the error names, and the kind.
#[rustfmt::skip]
const REQUESTS: &[Row] = &[
    // What is computed.
    ("no key dimension", valid, |r| r.spec.heads.key_dim = 0, "key_dim", Shape),
    ("K not a multiple of 16", valid, |r| r.spec.heads.key_dim = 24, "key_dim", Shape),
    ("K too large", valid, |r| r.spec.heads.key_dim = 272, "key_dim", Shape),
    ("V not a multiple of 16", valid, |r| r.spec.heads.value_dim = 8, "value_dim", Shape),
    ("V too large", valid, |r| r.spec.heads.value_dim = 512, "value_dim", Shape),
    ("no key heads", valid, |r| r.spec.heads.key = 0, "key_heads", Shape),
    ("no value heads", valid, |r| r.spec.heads.value = 0, "value_heads", Shape),
    ("fewer value heads than key heads", valid, |r| (r.spec.heads.key, r.spec.heads.value) = (6, 4), "value_heads", Shape),
    ("value heads not a multiple", valid, |r| (r.spec.heads.key, r.spec.heads.value) = (4, 6), "value_heads", Shape),
    ("too many value heads", valid, |r| r.spec.heads.value = 1 << 20, "value_heads", Shape),
    ("f32 inputs", valid, |r| r.spec.dtype = Dtype::F32, "dtype", WrongDtype),
    ("a scale that is NaN", valid, |r| r.spec.scale = Some(f32::NAN), "scale", Value),
    ("an infinite scale", valid, |r| r.spec.scale = Some(f32::INFINITY), "scale", Value),
    // Lengths.
    ("no cu_seqlens", valid, |r| r.cu_seqlens.clear(), "cu_seqlens", Lengths),
    ("a first entry that is not 0", valid, |r| r.cu_seqlens[0] = 1, "cu_seqlens", Lengths),
    ("a negative first entry", valid, |r| r.cu_seqlens[0] = -1, "cu_seqlens", Lengths),
    ("entries that decrease", valid, |r| r.cu_seqlens = vec![0, 9, 5], "cu_seqlens", Lengths),
    ("an entry past the tokens", valid, |r| r.cu_seqlens[2] = 10, "cu_seqlens", Lengths),
    ("an entry past 32 bits", valid, |r| r.cu_seqlens[2] = 1 << 32, "cu_seqlens", Lengths),
    ("an entry of the largest value", valid, |r| r.cu_seqlens[1] = i64::MAX, "cu_seqlens", Lengths),
    ("too many tokens", valid, |r| r.tokens = 1 << 31, "tokens", Shape),
    ("too many tokens in a batch", dense, |r| r.tokens = usize::MAX / 2 + 1, "tokens", Shape),
    ("too many workgroups", valid, |r| { r.spec.heads.value = 1 << 19; r.tokens = 1 << 30; r.spec.heads.key = 1 << 19 }, "tokens, sequences, segments and heads", Shape),
    // Shapes.
    ("q with a token too few", valid, |r| r.q.shape[0] = 8, "q", Shape),
    ("q with a head too many", valid, |r| r.q.shape[1] = 3, "q", Shape),
    ("q with another K", valid, |r| r.q.shape[2] = 48, "q", Shape),
    ("k with another K", valid, |r| r.k.shape[2] = 16, "k", Shape),
    ("k with the value heads", valid, |r| r.k = view(Dtype::Bf16, &[9, HV, K]), "k", Shape),
    ("v with the key heads", valid, |r| r.v = view(Dtype::Bf16, &[9, HK, V]), "v", Shape),
    ("v with K columns", valid, |r| r.v = view(Dtype::Bf16, &[9, HV, K]), "v", Shape),
    ("o with a token too few", valid, |r| r.o.shape[0] = 8, "o", Shape),
    ("a dense q in a packed batch", valid, |r| r.q = view(Dtype::Bf16, &[1, 9, HK, K]), "q", Shape),
    ("a packed q in a dense batch", dense, |r| r.q = view(Dtype::Bf16, &[8, HK, K]), "q", Shape),
    ("a dense k of another batch", dense, |r| r.k = view(Dtype::Bf16, &[4, 2, HK, K]), "k", Shape),
    ("a packed o in a dense batch", dense, |r| r.o = view(Dtype::Bf16, &[8, HV, V]), "o", Shape),
    ("g for the key heads", valid, |r| r.g = Some(view(Dtype::F32, &[9, HK])), "g", Shape),
    ("a dense g in a packed batch", valid, |r| r.g = Some(view(Dtype::F32, &[1, 9, HV])), "g", Shape),
    ("a packed g in a dense batch", dense, |r| r.g = Some(view(Dtype::F32, &[8, HV])), "g", Shape),
    ("beta for the key heads", valid, |r| r.beta = Some(view(Dtype::F32, &[9, HK])), "beta", Shape),
    ("a for other tokens", raw_gates, |r| r.g = Some(view(Dtype::F32, &[8, HV])), "a", Shape),
    ("b for other heads", raw_gates, |r| r.beta = Some(view(Dtype::F32, &[9, 1])), "b", Shape),
    ("A_log for other heads", raw_gates, |r| r.a_log = view(Dtype::F32, &[HV + 1]), "a_log", Shape),
    ("dt_bias for other heads", raw_gates, |r| r.dt_bias = Some(view(Dtype::F32, &[HK])), "dt_bias", Shape),
    ("a state too many", valid, |r| r.initial = Some(view(Dtype::F32, &[3, HV, K, V])), "initial_state", Shape),
    ("a state of the other layout", valid, |r| r.initial = Some(view(Dtype::F32, &[2, HV, V, K])), "initial_state", Shape),
    ("a final state too few", valid, |r| r.last = Some(view(Dtype::F32, &[1, HV, K, V])), "final_state", Shape),
    ("final states for the key heads", valid, |r| r.last = Some(view(Dtype::F32, &[2, HK, K, V])), "final_state", Shape),
    ("a flag too many", valid, |r| r.has_initial = Some((3, Place::Own)), "has_initial_state", Shape),
    ("a slot too many", pool, |r| r.slots = Some((3, Place::Own)), "slots", Shape),
    ("a slot to write too many", pool, |r| r.write_slots = Some((3, Place::Own)), "write_slots", Shape),
    ("a pool of the other layout", pool, |r| r.pool = Some(view(Dtype::F32, &[6, HV, V, K])), "pool", Shape),
    ("fewer slots than sequences", pool, |r| { r.pool.as_mut().unwrap().shape[0] = 1; r.slots = None }, "pool", Shape),
    ("fewer slots to read than sequences", pool, |r| { r.pool.as_mut().unwrap().shape[0] = 1; (r.slots, r.write_slots) = (None, None) }, "pool", Shape),
    ("slots of a plan twice", planned, |r| r.plan_slots = Some(vec![5, 5]), "slots", Value),
    ("a slot of a plan beyond the pool", planned, |r| r.plan_slots = Some(vec![6, 5]), "slots", Value),
    ("slots of a plan too few", planned, |r| r.plan_slots = Some(vec![5]), "slots", Shape),
    // Element types.
    ("fp16 q in a bf16 prefill", valid, |r| r.q.dtype = Dtype::F16, "q", WrongDtype),
    ("f32 k", valid, |r| r.k.dtype = Dtype::F32, "k", WrongDtype),
    ("fp16 v in a bf16 prefill", valid, |r| r.v.dtype = Dtype::F16, "v", WrongDtype),
    ("bf16 o in an fp16 prefill", valid, |r| { r.spec.dtype = Dtype::F16; for t in [&mut r.q, &mut r.k, &mut r.v] { t.dtype = Dtype::F16 } }, "o", WrongDtype),
    ("bf16 g", valid, |r| r.g.as_mut().unwrap().dtype = Dtype::Bf16, "g", WrongDtype),
    // Strides.
    ("columns of q apart", valid, |r| { r.q.strides = vec![HK * K * 2, K * 2, 2] }, "q", Stride),
    ("columns of o apart", valid, |r| { r.o.strides = vec![HV * V * 2, V * 2, 2] }, "o", Stride),
    ("tokens of k too far apart", valid, |r| { r.k.place = Place::Raw; r.k.strides[0] = 1 << 24 }, "k", Stride),
    ("heads of v too far apart", valid, |r| { r.v.place = Place::Raw; r.v.strides[1] = 1 << 40 }, "v", Stride),
    ("sequences of q too far apart", dense, |r| { r.q.place = Place::Raw; r.q.strides[0] = 1 << 40 }, "q", Stride),
    ("tokens of g too far apart", valid, |r| { let g = r.g.as_mut().unwrap(); g.place = Place::Raw; g.strides[0] = 1 << 24 }, "g", Stride),
    ("one row of o for all heads", valid, |r| r.o.strides[1] = 0, "o", Stride),
    ("rows of o that overlap", valid, |r| r.o.strides = vec![HV * V - 1, V, 1], "o", Stride),
    ("heads of o that overlap", valid, |r| r.o.strides = vec![HV * V, V - 4, 1], "o", Stride),
    ("sequences of o that overlap", dense, |r| r.o.strides[0] = HV * V, "o", Stride),
    ("one final state for all sequences", valid, |r| r.last.as_mut().unwrap().strides[0] = 0, "final_state", Stride),
    ("final states that overlap", valid, |r| r.last.as_mut().unwrap().strides[1] = K * V - V, "final_state", Stride),
    ("columns of a state apart", valid, |r| r.initial.as_mut().unwrap().strides = vec![1024, 256, 2, 2], "initial_state", Stride),
    ("slots of a pool that overlap", pool, |r| r.pool.as_mut().unwrap().strides[0] = K * V, "pool", Stride),
    ("states too far apart", valid, |r| { let s = r.initial.as_mut().unwrap(); s.place = Place::Raw; s.strides[0] = 1 << 40 }, "initial_state", Stride),
    // Addresses.
    ("null q", valid, |r| r.q.place = Place::Null, "q", Pointer),
    ("null k", valid, |r| r.k.place = Place::Null, "k", Pointer),
    ("null o", valid, |r| r.o.place = Place::Null, "o", Pointer),
    ("misaligned v", valid, |r| r.v.place = Place::Odd, "v", Pointer),
    ("misaligned o", valid, |r| r.o.place = Place::Odd, "o", Pointer),
    ("null g", valid, |r| r.g.as_mut().unwrap().place = Place::Null, "g", Pointer),
    ("misaligned beta", valid, |r| r.beta.as_mut().unwrap().place = Place::Odd, "beta", Pointer),
    ("null A_log", raw_gates, |r| r.a_log.place = Place::Null, "a_log", Pointer),
    ("misaligned dt_bias", raw_gates, |r| r.dt_bias.as_mut().unwrap().place = Place::Odd, "dt_bias", Pointer),
    ("null initial state", valid, |r| r.initial.as_mut().unwrap().place = Place::Null, "initial_state", Pointer),
    ("misaligned final state", valid, |r| r.last.as_mut().unwrap().place = Place::Odd, "final_state", Pointer),
    ("null flags", valid, |r| r.has_initial = Some((2, Place::Null)), "has_initial_state", Pointer),
    ("a null pool", pool, |r| r.pool.as_mut().unwrap().place = Place::Null, "pool", Pointer),
    ("null slots", pool, |r| r.slots = Some((2, Place::Null)), "slots", Pointer),
    ("misaligned slots to write", pool, |r| r.write_slots = Some((2, Place::Odd)), "write_slots", Pointer),
    ("null workspace", valid, |r| r.workspace = Place::Null, "workspace", Pointer),
    ("misaligned workspace", valid, |r| r.workspace = Place::Odd, "workspace", Pointer),
    ("null lengths", device, |r| r.device_lengths = (3, Place::Null), "cu_seqlens", Pointer),
    ("misaligned lengths", device, |r| r.device_lengths = (3, Place::Odd), "cu_seqlens", Pointer),
    // Sizes and presence.
    ("a workspace a byte too small", valid, |r| r.workspace_less = 1, "workspace", Size),
    ("a device workspace a byte too small", device, |r| r.workspace_less = 1, "workspace", Size),
    ("lengths of other sequences", device, |r| r.device_lengths = (2, Place::Own), "cu_seqlens", Lengths),
    ("slots beside those of the plan", planned, |r| r.slots = Some((2, Place::Own)), "slots", Presence),
    ("slots to write beside those of the plan", planned, |r| r.write_slots = Some((2, Place::Own)), "write_slots", Presence),
    ("slots of a plan without a pool", planned, |r| (r.pool, r.has_initial) = (None, None), "pool", Presence),
    // Other contexts.
    ("another context's pool", pool, |r| r.pool.as_mut().unwrap().place = Place::Foreign, "pool", Device),
    ("another context's slots", pool, |r| r.slots = Some((2, Place::Foreign)), "slots", Device),
    ("another context's slots to write", pool, |r| r.write_slots = Some((2, Place::Foreign)), "write_slots", Device),
    ("another context's stream", valid, |r| r.foreign_stream = true, "stream", Device),
    ("another context's stream on the device entry", device, |r| r.foreign_stream = true, "stream", Device),
    ("another context's q", valid, |r| r.q.place = Place::Foreign, "q", Device),
    ("another context's k", valid, |r| r.k.place = Place::Foreign, "k", Device),
    ("another context's v", valid, |r| r.v.place = Place::Foreign, "v", Device),
    ("another context's o", valid, |r| r.o.place = Place::Foreign, "o", Device),
    ("another context's g", valid, |r| r.g.as_mut().unwrap().place = Place::Foreign, "g", Device),
    ("another context's beta", valid, |r| r.beta.as_mut().unwrap().place = Place::Foreign, "beta", Device),
    ("another context's A_log", raw_gates, |r| r.a_log.place = Place::Foreign, "a_log", Device),
    ("another context's dt_bias", raw_gates, |r| r.dt_bias.as_mut().unwrap().place = Place::Foreign, "dt_bias", Device),
    ("another context's initial state", valid, |r| r.initial.as_mut().unwrap().place = Place::Foreign, "initial_state", Device),
    ("another context's flags", valid, |r| r.has_initial = Some((2, Place::Foreign)), "has_initial_state", Device),
    ("another context's final state", valid, |r| r.last.as_mut().unwrap().place = Place::Foreign, "final_state", Device),
    ("another context's workspace", valid, |r| r.workspace = Place::Foreign, "workspace", Device),
    ("another context's lengths", device, |r| r.device_lengths = (3, Place::Foreign), "cu_seqlens", Device),
];

type GateRow = (&'static str, fn(&mut [View; 6]), &'static str, ArgumentKind);

#[rustfmt::skip]
const GATES: &[GateRow] = &[
    ("a dense a", |v| v[0] = view(Dtype::F32, &[1, 9, HV]), "a", Shape),
    ("b for other tokens", |v| v[1].shape[0] = 8, "b", Shape),
    ("A_log for other heads", |v| v[2].shape[0] = 3, "a_log", Shape),
    ("dt_bias for other heads", |v| v[3].shape[0] = 5, "dt_bias", Shape),
    ("g for other heads", |v| v[4] = view(Dtype::F32, &[9, 3]), "g", Shape),
    ("beta for other tokens", |v| v[5].shape[0] = 8, "beta", Shape),
    ("bf16 g", |v| v[4].dtype = Dtype::Bf16, "g", WrongDtype),
    ("fp16 beta", |v| v[5].dtype = Dtype::F16, "beta", WrongDtype),
    ("one g for all heads", |v| v[4].strides[1] = 0, "g", Stride),
    ("rows of beta that overlap", |v| v[5].strides[0] = 3, "beta", Stride),
    ("tokens of a too far apart", |v| (v[0].place, v[0].strides[0]) = (Place::Raw, 1 << 24), "a", Stride),
    ("null a", |v| v[0].place = Place::Null, "a", Pointer),
    ("misaligned b", |v| v[1].place = Place::Odd, "b", Pointer),
    ("null g", |v| v[4].place = Place::Null, "g", Pointer),
    ("another context's b", |v| v[1].place = Place::Foreign, "b", Device),
    ("another context's dt_bias", |v| v[3].place = Place::Foreign, "dt_bias", Device),
    ("another context's beta", |v| v[5].place = Place::Foreign, "beta", Device),
];

fn expect(what: &str, outcome: Result<(), Error>, argument: &str, kind: ArgumentKind) {
    match outcome {
        Err(Error::Argument(e)) => {
            assert_eq!(
                (e.argument.as_str(), e.kind),
                (argument, kind),
                "{what}: {e}"
            );
            let ArgumentError { was, allowed, .. } = &e;
            assert!(!was.is_empty() && !allowed.is_empty(), "{what}: {e}");
            assert!(e.to_string().starts_with(argument), "{what}: {e}");
        }
        Err(other) => panic!("{what}: {other}"),
        Ok(()) => panic!("{what}: it was accepted"),
    }
}

/// A file with the tensors of a small prefill, changed.
fn file(change: impl FnOnce(&mut Vec<(&'static str, Vec<usize>, Dtype)>)) -> Vec<u8> {
    let mut tensors = vec![
        ("q", vec![9, HK, K], Dtype::Bf16),
        ("k", vec![9, HK, K], Dtype::Bf16),
        ("v", vec![9, HV, V], Dtype::Bf16),
        ("g", vec![9, HV], Dtype::F32),
    ];
    change(&mut tensors);
    let zeros = [0u8; BYTES];
    let named: Vec<Named<'_>> = (tensors.iter())
        .map(|(name, shape, dtype)| Named {
            name,
            shape,
            dtype: *dtype,
            bytes: &zeros[..shape.iter().product::<usize>() * dtype.size()],
        })
        .collect();
    to_bytes(&named).expect("a file")
}

/// The same file with `cu_seqlens`.
fn file_with_lengths(lengths: [i32; 3]) -> Vec<u8> {
    let plain = file(|_| {});
    let plain = safetensors::SafeTensors::deserialize(&plain).expect("a file");
    let bytes: Vec<u8> = lengths.iter().flat_map(|n| n.to_le_bytes()).collect();
    let entry = safetensors::tensor::TensorView::new(safetensors::Dtype::I32, vec![3], &bytes);
    let mut tensors = plain.tensors();
    tensors.push(("cu_seqlens".to_owned(), entry.expect("three numbers")));
    safetensors::serialize(tensors, None).expect("a file")
}

unsafe extern "C" fn properties_of_another_arch(
    properties: *mut hipDeviceProp_tR0600,
    device: c_int,
) -> hipError_t {
    // SAFETY: the caller's pointer, on to the simulator.
    let code =
        unsafe { deltawave_sim::hip::functions::hipGetDevicePropertiesR0600(properties, device) };
    let arch = b"gfx1100\0".map(|c| c as std::ffi::c_char);
    // SAFETY: valid, or the simulator had refused it.
    unsafe { (&mut (*properties).gcnArchName)[..8].copy_from_slice(&arch) };
    code
}

fn another_arch(name: &str) -> *const std::ffi::c_void {
    match name {
        "hipGetDevicePropertiesR0600" => properties_of_another_arch as *const std::ffi::c_void,
        name => deltawave_sim::hip::resolver(name),
    }
}

unsafe extern "C" fn no_device(_: *mut std::ffi::c_int) -> hipError_t {
    hipError_t::hipErrorNoDevice
}

fn no_devices(name: &str) -> *const std::ffi::c_void {
    match name {
        "hipGetDeviceCount" => no_device as *const std::ffi::c_void,
        name => deltawave_sim::hip::resolver(name),
    }
}

#[test]
fn a_runtime_without_a_gpu_has_no_such_device() {
    // SAFETY: the simulator's functions, and one with the same signature.
    let hip = unsafe { Hip::from_resolver("no GPU", no_devices) };
    let none = Context::with_runtime(hip, 0);
    assert!(
        matches!(none, Err(Error::NoSuchDevice { count: 0, .. })),
        "{none:?}"
    );
}

#[test]
fn invalid_requests_are_refused_by_name() {
    let mut f = Fixture::new();
    for (name, request) in [
        ("packed", valid as fn() -> Request),
        ("dense", dense),
        ("device", device),
        ("raw gates", raw_gates),
        ("pool", pool),
        ("planned", planned),
    ] {
        f.send(&request()).unwrap_or_else(|e| panic!("{name}: {e}"));
        assert!(!f.untouched(), "{name}: a valid request writes");
    }
    f.gate(|_| {}, false).expect("valid gates");
    f.poison();
    assert!(f.untouched());

    let mut refused = 0;
    for (what, base, change, argument, kind) in REQUESTS {
        let mut request = base();
        change(&mut request);
        expect(what, f.send(&request), argument, *kind);
        assert!(f.untouched(), "{what}: something was written");
        refused += 1;
    }
    for (what, change, argument, kind) in GATES {
        expect(what, f.gate(change, false), argument, *kind);
        assert!(f.untouched(), "{what}: something was written");
        refused += 1;
    }
    expect(
        "another context's stream",
        f.gate(|_| {}, true),
        "stream",
        Device,
    );

    // Buffers.
    let mut buffer = f.context.alloc::<f32>(10).unwrap();
    let outcomes = [
        ("a view too long", buffer.tensor([11]).map(drop), "tensor"),
        (
            "a view past the end",
            buffer.tensor_strided([2, 3], [6, 2], 0).map(drop),
            "tensor",
        ),
        (
            "an offset past the end",
            buffer.tensor_strided([1], [1], 10).map(drop),
            "tensor",
        ),
        (
            "strides that overflow",
            buffer
                .tensor_strided([3, 3], [usize::MAX / 2, 1], 0)
                .map(drop),
            "tensor",
        ),
        (
            "a mutable view too long",
            buffer.tensor_mut([2, 6]).map(drop),
            "tensor",
        ),
        ("other values", buffer.write(&[0.0; 9]), "values"),
        (
            "more bytes than there are addresses",
            f.context.alloc::<f32>(usize::MAX).map(drop),
            "len",
        ),
    ];
    for (what, outcome, argument) in outcomes {
        expect(what, outcome, argument, Size);
        refused += 1;
    }

    // Runtimes and devices.
    let missing = Context::with_library(Path::new("/nonexistent/libamdhip64.so"), 0);
    assert!(matches!(missing, Err(Error::Load(_))), "{missing:?}");
    let none = Context::with_runtime(deltawave_sim::hip::runtime(), 7);
    assert!(
        matches!(
            none,
            Err(Error::NoSuchDevice {
                device: 7,
                count: 1,
                ..
            })
        ),
        "{none:?}"
    );
    // SAFETY: the simulator's functions, and one with the same signature.
    let hip = unsafe { Hip::from_resolver("another arch", another_arch) };
    match Context::with_runtime(hip, 0) {
        Err(Error::MissingKernels {
            arch,
            object,
            reason,
            ..
        }) => {
            assert_eq!((arch.as_str(), object), ("gfx1100", "commit"));
            assert!(reason.contains("DELTAWAVE_ARCHS=gfx1100"), "{reason}");
        }
        other => panic!("{other:?}"),
    }
    refused += 3;

    // Files.
    type FileRow = (&'static str, Vec<u8>, fn(&FileError) -> bool);
    let mut truncated = file(|_| {});
    truncated.truncate(truncated.len() - 1);
    let mut header = file(|_| {});
    header.truncate(20);
    let files: Vec<FileRow> = vec![
        ("a file cut off", truncated, |e| {
            matches!(e, FileError::Format(_))
        }),
        ("a header cut off", header, |e| {
            matches!(e, FileError::Format(_))
        }),
        ("lengths that decrease", file_with_lengths([0, 9, 5]), |e| {
            matches!(
                e,
                FileError::Problem(ProblemError::CuSeqlens {
                    index: 2,
                    value: 5,
                    ..
                })
            )
        }),
        (
            "lengths past the tokens",
            file_with_lengths([0, 5, 10]),
            |e| {
                matches!(
                    e,
                    FileError::Problem(ProblemError::CuSeqlens {
                        index: 2,
                        value: 10,
                        ..
                    })
                )
            },
        ),
        ("nothing", Vec::new(), |e| matches!(e, FileError::Format(_))),
        ("no v", file(|t| drop(t.remove(2))), |e| {
            matches!(e, FileError::Missing { name: "v", .. })
        }),
        ("a without A_log", file(|t| t[3].0 = "a"), |e| {
            matches!(e, FileError::Missing { name: "A_log", .. })
        }),
        (
            "an unknown tensor",
            file(|t| t.push(("w", vec![1], Dtype::F32))),
            |e| matches!(e, FileError::Unknown { name } if name == "w"),
        ),
        ("k of another shape", file(|t| t[1].1[0] = 8), |e| {
            matches!(e, FileError::Shape { name: "k", .. })
        }),
        ("bf16 g", file(|t| t[3].2 = Dtype::Bf16), |e| {
            matches!(e, FileError::Dtype { name: "g", .. })
        }),
        (
            "g and a",
            file(|t| {
                t.push(("a", vec![9, HV], Dtype::F32));
                t.push(("A_log", vec![HV], Dtype::F32));
            }),
            |e| matches!(e, FileError::Conflict { name: "g", .. }),
        ),
        (
            "f32 cu_seqlens",
            file(|t| t.push(("cu_seqlens", vec![3], Dtype::F32))),
            |e| {
                matches!(
                    e,
                    FileError::Dtype {
                        name: "cu_seqlens",
                        ..
                    }
                )
            },
        ),
        (
            "a state of another shape",
            file(|t| t.push(("initial_state", vec![2, HV, K, V], Dtype::F32))),
            |e| {
                matches!(
                    e,
                    FileError::Shape {
                        name: "initial_state",
                        ..
                    }
                )
            },
        ),
    ];
    for (what, bytes, right) in files {
        match PrefillFile::from_bytes(&bytes) {
            Err(e) => assert!(right(&e), "{what}: {e}"),
            Ok(_) => panic!("{what}: it was accepted"),
        }
        refused += 1;
    }
    assert!(f.untouched());
    assert!(refused >= 40, "{refused}");
    println!("{refused} invalid requests refused");
}

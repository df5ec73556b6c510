//! Operations on views of one buffer: the tensors of each lie apart, until a test moves one.

use std::ffi::c_void;

use deltawave::Error;
use deltawave::batch::{CuSeqlens, PerSequence};
use deltawave::commit::{Commit, CommitConv, CommitTensors};
use deltawave::conv::{Conv, ConvInput, ConvSpec, ConvState, ConvStateLayout, ConvTensors};
use deltawave::decode::{Decode, DecodeSpec, DecodeTensors};
use deltawave::gate::Gate;
use deltawave::gates::Gating;
use deltawave::layer::{Layer, LayerSpec, LayerStates, LayerTensors, LayerWeights};
use deltawave::norm::{GatedNorm, OutputGate};
use deltawave::prefill::{Prefill, PrefillSpec, PrefillTensors, Snapshots};
use deltawave::runtime::Context;
use deltawave::state::{InitialState, State, StateMut, StatePool, States};
use deltawave::tensor::{Buffer, Element, Tensor, TensorMut};
use deltawave::types::{Dtype, StateLayout};
use deltawave::workspace::Workspace;
use half::bf16;

use super::common::{View, context, view};

pub const HK: usize = 1;
pub const HV: usize = 2;
pub const K: usize = 32;
pub const V: usize = 48;
/// Channels of a convolution: those of q, k and v.
pub const CHANNELS: usize = 2 * HK * K + HV * V;
/// Rows of a prefill and of a convolution, and where its sequences begin: the last one has several chunks.
pub const TOKENS: usize = 205;
pub const LENGTHS: [i32; 3] = [0, 75, 200];
pub const SLOTS: usize = 3;
/// Sequences of a decode, and tokens of each.
pub const BATCH: usize = 2;
pub const DRAFT: usize = 2;

/// Memory of the device, and its bytes on the host.
pub struct Arena {
    pub context: Context,
    buffer: Buffer<u8>,
    pub bytes: Vec<u8>,
}

/// The first byte of the next tensor.
pub struct Next(usize);

impl Next {
    pub fn typed<const R: usize>(&mut self, dtype: Dtype, shape: [usize; R]) -> View<R> {
        let at = self.bytes(shape.iter().product::<usize>() * dtype.size());
        View {
            dtype,
            at: Some(at),
            ..view(shape)
        }
    }

    pub fn bf16<const R: usize>(&mut self, shape: [usize; R]) -> View<R> {
        self.typed(Dtype::Bf16, shape)
    }

    pub fn f32<const R: usize>(&mut self, shape: [usize; R]) -> View<R> {
        self.typed(Dtype::F32, shape)
    }

    pub fn bytes(&mut self, bytes: usize) -> usize {
        let at = self.0;
        self.0 += bytes.next_multiple_of(256);
        at
    }
}

/// Bytes from the arena's start to each element of a view.
fn places<const R: usize>(v: &View<R>) -> Vec<usize> {
    let mut places = vec![v.at.expect("an address")];
    for (n, stride) in v.shape.into_iter().zip(v.strides) {
        let of_each = |at: &usize| {
            let at = *at;
            (0..n).map(move |i| at + i * stride * v.dtype.size())
        };
        places = places.iter().flat_map(of_each).collect();
    }
    places
}

impl Arena {
    pub fn new() -> (Self, Next) {
        let bytes = vec![0xff; 8 << 20];
        let context = context();
        let buffer = context.upload(&bytes).unwrap();
        let arena = Arena {
            context,
            buffer,
            bytes,
        };
        (arena, Next(0))
    }

    /// Numbers from `low` to `high`, the same for the same seed.
    pub fn fill<const R: usize>(&mut self, v: &View<R>, seed: u64, [low, high]: [f32; 2]) {
        let mut random = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
        for at in places(v) {
            random = random
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(99);
            let number = low + (high - low) * (random >> 40) as f32 / (1 << 24) as f32;
            match v.dtype {
                Dtype::F32 => self.bytes[at..at + 4].copy_from_slice(&number.to_le_bytes()),
                _ => {
                    let number = bf16::from_f32(number).to_le_bytes();
                    self.bytes[at..at + 2].copy_from_slice(&number);
                }
            }
        }
    }

    pub fn integers(&mut self, at: usize, numbers: &[i32]) {
        for (i, number) in numbers.iter().enumerate() {
            self.bytes[at + 4 * i..at + 4 * i + 4].copy_from_slice(&number.to_le_bytes());
        }
    }

    /// Runs a launch on the bytes as they are, and gives what it left.
    pub fn run(
        &mut self,
        launch: impl FnOnce(&Arena) -> Result<(), Error>,
    ) -> Result<Vec<u8>, Error> {
        self.buffer.write(&self.bytes).unwrap();
        let outcome = launch(self);
        let after = self
            .buffer
            .download(&self.context.stream().unwrap())
            .unwrap();
        if outcome.is_err() {
            assert!(after == self.bytes, "something was written");
        }
        outcome.map(|()| after)
    }

    fn address(&self, at: usize) -> *mut c_void {
        self.buffer.address().wrapping_byte_add(at)
    }

    pub fn tensor<const R: usize>(&self, v: View<R>) -> Tensor<'_, R> {
        let address = self.address(v.at.expect("an address"));
        // SAFETY: it lies in the buffer, or is refused.
        unsafe { Tensor::from_raw(address, v.dtype, v.shape, v.strides) }
    }

    pub fn tensor_mut<const R: usize>(&self, v: View<R>) -> TensorMut<'_, R> {
        let address = self.address(v.at.expect("an address"));
        // SAFETY: as above.
        unsafe { TensorMut::from_raw(address, v.dtype, v.shape, v.strides) }
    }

    pub fn numbers<T: Element>(&self, at: usize, count: usize) -> PerSequence<'_, T> {
        // SAFETY: as above.
        unsafe { PerSequence::from_raw(self.address(at).cast_const().cast(), count) }
    }

    pub fn lengths(&self, at: usize) -> CuSeqlens<'_> {
        CuSeqlens::I32(self.numbers(at, LENGTHS.len()))
    }

    pub fn workspace(&self, at: usize, bytes: usize) -> Workspace<'_> {
        // SAFETY: as above.
        unsafe { Workspace::from_raw(self.address(at), bytes) }
    }
}

/// The bytes of a view's elements.
pub fn taken<const R: usize>(bytes: &[u8], v: &View<R>) -> Vec<u8> {
    let size = v.dtype.size();
    let elements = places(v).into_iter();
    elements
        .flat_map(|at| bytes[at..at + size].to_vec())
        .collect()
}

/// The same numbers at another place.
pub fn moved<const R: usize>(v: View<R>, at: usize) -> View<R> {
    View { at: Some(at), ..v }
}

/// A view that begins so many bytes after another, of any shape.
pub fn over<const R: usize, const S: usize>(v: View<R>, other: &View<S>, bytes: usize) -> View<R> {
    moved(v, other.at.expect("an address") + bytes)
}

const ONE: [f32; 2] = [-1.0, 1.0];

/// A prefill of states of its own, of `segments`.
#[derive(Clone, Copy)]
pub struct PrefillRequest {
    pub q: View<3>,
    pub k: View<3>,
    pub v: View<3>,
    pub g: View<2>,
    pub beta: View<2>,
    pub a_log: Option<View<1>>,
    pub o: View<3>,
    pub initial: View<4>,
    pub last: View<4>,
    pub last_layout: StateLayout,
    /// Instead of both.
    pub pool: Option<View<4>>,
    pub slots: usize,
    pub write_slots: usize,
    pub has: usize,
    pub snapshots: Option<View<4>>,
    pub snapshot_slots: usize,
    pub lengths: usize,
    pub workspace: usize,
    pub segments: usize,
}

pub fn prefill() -> (Arena, PrefillRequest) {
    let (mut arena, mut next) = Arena::new();
    let states = [2, HV, K, V];
    let r = PrefillRequest {
        q: next.bf16([TOKENS, HK, K]),
        k: next.bf16([TOKENS, HK, K]),
        v: next.bf16([TOKENS, HV, V]),
        g: next.f32([TOKENS, HV]),
        beta: next.f32([TOKENS, HV]),
        a_log: None,
        o: next.bf16([TOKENS, HV, V]),
        initial: next.f32(states),
        last: next.f32(states),
        last_layout: StateLayout::KeyMajor,
        pool: None,
        slots: next.bytes(8),
        write_slots: next.bytes(8),
        has: next.bytes(2),
        snapshots: None,
        snapshot_slots: next.bytes(4 * 8),
        lengths: next.bytes(12),
        workspace: next.bytes(2 << 20),
        segments: 1,
    };
    arena.integers(r.slots, &[2, 0]);
    arena.integers(r.write_slots, &[2, 0]);
    arena.integers(r.snapshot_slots, &[-1; 8]);
    arena.integers(r.lengths, &LENGTHS);
    arena.bytes[r.has..r.has + 2].fill(1);
    r.fill(&mut arena);
    (arena, r)
}

impl PrefillRequest {
    /// Puts the inputs where they are read.
    pub fn fill(&self, arena: &mut Arena) {
        arena.fill(&self.q, 1, [-0.2, 0.2]);
        arena.fill(&self.k, 2, [-0.2, 0.2]);
        arena.fill(&self.v, 3, ONE);
        arena.fill(&self.g, 4, [-0.1, 0.0]);
        arena.fill(&self.beta, 5, [0.0, 1.0]);
        arena.fill(&self.initial, 6, ONE);
        if let Some(a_log) = &self.a_log {
            arena.fill(a_log, 7, ONE);
        }
    }

    pub fn on_pool(self, next: usize) -> Self {
        let pool = View {
            dtype: Dtype::F32,
            at: Some(next),
            ..view([SLOTS, HV, K, V])
        };
        PrefillRequest {
            pool: Some(pool),
            ..self
        }
    }

    fn tensors<'a>(&self, m: &'a Arena, device: bool) -> PrefillTensors<'a> {
        let (g, beta) = (m.tensor(self.g).into(), m.tensor(self.beta).into());
        let has_initial_state = Some(m.numbers(self.has, 2));
        let states = match self.pool {
            Some(pool) => States::Pool {
                pool: StatePool {
                    tensor: m.tensor_mut(pool),
                    layout: StateLayout::KeyMajor,
                    slots: Some(m.numbers(self.slots, 2)),
                    write_slots: Some(m.numbers(self.write_slots, 2)),
                },
                has_initial_state,
            },
            None => States::Separate {
                initial: Some(InitialState {
                    state: State {
                        tensor: m.tensor(self.initial),
                        layout: StateLayout::KeyMajor,
                    },
                    has_initial_state,
                }),
                last: Some(StateMut {
                    tensor: m.tensor_mut(self.last),
                    layout: self.last_layout,
                }),
            },
        };
        PrefillTensors {
            cu_seqlens: device.then(|| m.lengths(self.lengths)),
            q: m.tensor(self.q).into(),
            k: m.tensor(self.k).into(),
            v: m.tensor(self.v).into(),
            gating: match self.a_log {
                Some(a_log) => Gating::Raw {
                    a: g,
                    b: beta,
                    a_log: m.tensor(a_log),
                    dt_bias: None,
                    allow_neg_eigval: false,
                },
                None => Gating::Given {
                    g: Some(g),
                    beta: Some(beta),
                },
            },
            states,
            o: m.tensor_mut(self.o).into(),
            snapshots: self.snapshots.map(|to| Snapshots {
                to: Some(StateMut {
                    tensor: m.tensor_mut(to),
                    layout: StateLayout::KeyMajor,
                }),
                slots: Some(m.numbers(self.snapshot_slots, TOKENS / 64 + 2)),
            }),
        }
    }

    /// Of lengths that the host knows, or the device alone.
    pub fn launch(&self, arena: &mut Arena, device: bool) -> Result<Vec<u8>, Error> {
        let spec = PrefillSpec {
            segments: Some(self.segments),
            ..PrefillSpec::new(HK, HV, K, V)
        };
        arena.run(|m| {
            let stream = m.context.stream()?;
            let tensors = self.tensors(m, device);
            if device {
                let plan = Prefill::device(&m.context, spec, TOKENS, 2)?;
                let workspace = m.workspace(self.workspace, plan.workspace_bytes());
                plan.launch(&stream, &tensors, workspace)?;
            } else {
                let plan = Prefill::packed(&m.context, spec, &LENGTHS, TOKENS)?;
                let workspace = m.workspace(self.workspace, plan.workspace_bytes());
                plan.launch(&stream, &tensors, workspace)?;
            }
            stream.synchronize()
        })
    }
}

#[derive(Clone, Copy)]
pub struct DecodeRequest {
    pub q: View<4>,
    pub k: View<4>,
    pub v: View<4>,
    pub g: View<3>,
    pub beta: View<3>,
    pub pool: View<4>,
    pub slots: usize,
    pub write_slots: usize,
    pub has: usize,
    pub states: Option<View<5>>,
    pub o: View<4>,
    /// o is `[B T, HV, V]`.
    pub packed: bool,
}

pub fn decode() -> (Arena, DecodeRequest) {
    let (mut arena, mut next) = Arena::new();
    let r = DecodeRequest {
        q: next.bf16([BATCH, DRAFT, HK, K]),
        k: next.bf16([BATCH, DRAFT, HK, K]),
        v: next.bf16([BATCH, DRAFT, HV, V]),
        g: next.f32([BATCH, DRAFT, HV]),
        beta: next.f32([BATCH, DRAFT, HV]),
        pool: next.f32([SLOTS, HV, K, V]),
        slots: next.bytes(4 * BATCH),
        write_slots: next.bytes(4 * BATCH),
        has: next.bytes(BATCH),
        states: Some(next.f32([BATCH, DRAFT, HV, K, V])),
        o: next.bf16([BATCH, DRAFT, HV, V]),
        packed: false,
    };
    arena.integers(r.slots, &[2, 0]);
    arena.integers(r.write_slots, &[2, 0]);
    arena.bytes[r.has..r.has + BATCH].fill(1);
    r.fill(&mut arena);
    (arena, r)
}

impl DecodeRequest {
    pub fn fill(&self, arena: &mut Arena) {
        arena.fill(&self.q, 1, ONE);
        arena.fill(&self.k, 2, [-0.2, 0.2]);
        arena.fill(&self.v, 3, ONE);
        arena.fill(&self.g, 4, [-0.1, 0.0]);
        arena.fill(&self.beta, 5, [0.0, 1.0]);
        arena.fill(&self.pool, 6, ONE);
    }

    pub fn launch(&self, arena: &mut Arena) -> Result<Vec<u8>, Error> {
        let spec = DecodeSpec {
            tokens: DRAFT,
            ..DecodeSpec::new(HK, HV, K, V)
        };
        arena.run(|m| {
            let stream = m.context.stream()?;
            let o = match self.packed {
                true => {
                    let [_, row, head, _] = self.o.strides;
                    let of_rows = View {
                        shape: [BATCH * DRAFT, HV, V],
                        strides: [row, head, 1],
                        ..over(view([1, 1, 1]), &self.o, 0)
                    };
                    m.tensor_mut(of_rows).into()
                }
                false => m.tensor_mut(self.o).into(),
            };
            let tensors = DecodeTensors {
                q: m.tensor(self.q).into(),
                k: m.tensor(self.k).into(),
                v: m.tensor(self.v).into(),
                gating: Gating::Given {
                    g: Some(m.tensor(self.g).into()),
                    beta: Some(m.tensor(self.beta).into()),
                },
                pool: StatePool {
                    tensor: m.tensor_mut(self.pool),
                    layout: StateLayout::KeyMajor,
                    slots: Some(m.numbers(self.slots, BATCH)),
                    write_slots: Some(m.numbers(self.write_slots, BATCH)),
                },
                has_initial_state: Some(m.numbers(self.has, BATCH)),
                states: self.states.map(|v| m.tensor_mut(v)),
                o,
            };
            Decode::new(&m.context, spec, BATCH)?.launch(&stream, &tensors)?;
            stream.synchronize()
        })
    }
}

#[derive(Clone, Copy)]
pub struct CommitRequest {
    pub accepted: usize,
    pub slots: usize,
    pub states: View<5>,
    pub pool: View<4>,
    /// q, k and v of packed rows.
    pub x: [View<3>; 3],
    pub conv: View<3>,
    pub has: usize,
}

pub fn commit() -> (Arena, CommitRequest) {
    let (mut arena, mut next) = Arena::new();
    let rows = next.bf16([BATCH * DRAFT, 1, CHANNELS]);
    let r = CommitRequest {
        accepted: next.bytes(4 * BATCH),
        slots: next.bytes(4 * BATCH),
        states: next.f32([BATCH, DRAFT, HV, K, V]),
        pool: next.f32([SLOTS, HV, K, V]),
        x: columns(&rows),
        conv: next.bf16([SLOTS, CHANNELS, 3]),
        has: next.bytes(BATCH),
    };
    arena.integers(r.accepted, &[1, 2]);
    arena.integers(r.slots, &[2, 0]);
    arena.bytes[r.has..r.has + BATCH].fill(1);
    arena.fill(&rows, 1, ONE);
    arena.fill(&r.states, 2, ONE);
    r.fill(&mut arena);
    (arena, r)
}

/// q, k and v of rows.
fn columns(rows: &View<3>) -> [View<3>; 3] {
    let [q, k, v] = [HK * K, HK * K, HV * V];
    [(q, 0), (k, q), (v, q + k)].map(|(channels, from)| View {
        shape: [rows.shape[0], 1, channels],
        ..over(*rows, rows, 2 * from)
    })
}

impl CommitRequest {
    /// Puts the states where they are.
    pub fn fill(&self, arena: &mut Arena) {
        arena.fill(&self.pool, 3, ONE);
        arena.fill(&self.conv, 4, ONE);
    }

    pub fn launch(&self, arena: &mut Arena) -> Result<Vec<u8>, Error> {
        let spec = DecodeSpec {
            tokens: DRAFT,
            ..DecodeSpec::new(HK, HV, K, V)
        };
        arena.run(|m| {
            let stream = m.context.stream()?;
            let [q, k, v] = self.x.map(|v| m.tensor(v));
            let tensors = CommitTensors {
                accepted: m.numbers(self.accepted, BATCH),
                slots: Some(m.numbers(self.slots, BATCH)),
                states: m.tensor(self.states),
                pool: m.tensor_mut(self.pool),
                layout: StateLayout::KeyMajor,
                conv: Some(CommitConv {
                    x: ConvInput { q, k, v },
                    state: m.tensor_mut(self.conv),
                    layout: ConvStateLayout::ChannelMajor,
                    has_initial_state: Some(m.numbers(self.has, BATCH)),
                }),
            };
            Commit::new(&m.context, spec, BATCH)?.launch(&stream, &tensors)?;
            stream.synchronize()
        })
    }
}

#[derive(Clone, Copy)]
pub struct GateRequest {
    pub a: View<2>,
    pub b: View<2>,
    pub a_log: View<1>,
    pub dt_bias: View<1>,
    pub g: View<2>,
    pub beta: View<2>,
}

fn gate_of(next: &mut Next) -> GateRequest {
    GateRequest {
        a: next.f32([TOKENS, HV]),
        b: next.f32([TOKENS, HV]),
        a_log: next.f32([HV]),
        dt_bias: next.f32([HV]),
        g: next.f32([TOKENS, HV]),
        beta: next.f32([TOKENS, HV]),
    }
}

pub fn gate() -> (Arena, GateRequest) {
    let (mut arena, mut next) = Arena::new();
    let r = gate_of(&mut next);
    r.fill(&mut arena);
    (arena, r)
}

impl GateRequest {
    fn fill(&self, arena: &mut Arena) {
        arena.fill(&self.a, 11, [-3.0, 3.0]);
        arena.fill(&self.b, 12, [-3.0, 3.0]);
        arena.fill(&self.a_log, 13, ONE);
        arena.fill(&self.dt_bias, 14, ONE);
    }

    fn tensors<'a>(&self, m: &'a Arena) -> Gate<'a> {
        Gate {
            a: m.tensor(self.a).into(),
            b: m.tensor(self.b).into(),
            a_log: m.tensor(self.a_log),
            dt_bias: Some(m.tensor(self.dt_bias)),
            allow_neg_eigval: false,
            g: m.tensor_mut(self.g).into(),
            beta: m.tensor_mut(self.beta).into(),
        }
    }

    pub fn launch(&self, arena: &mut Arena) -> Result<Vec<u8>, Error> {
        arena.run(|m| {
            let stream = m.context.stream()?;
            self.tensors(m).launch(&m.context, &stream)?;
            stream.synchronize()
        })
    }
}

#[derive(Clone, Copy)]
pub struct ConvRequest {
    pub x: [View<3>; 3],
    pub weight: View<2>,
    pub bias: View<1>,
    pub state: View<3>,
    pub slots: usize,
    pub has: usize,
    pub lengths: usize,
    pub q: View<3>,
    pub k: View<3>,
    pub v: View<3>,
    pub gate: GateRequest,
    pub keeps_states: bool,
}

pub fn conv() -> (Arena, ConvRequest) {
    let (mut arena, mut next) = Arena::new();
    let rows = next.bf16([TOKENS, 1, CHANNELS]);
    let r = ConvRequest {
        x: columns(&rows),
        weight: next.bf16([CHANNELS, 4]),
        bias: next.bf16([CHANNELS]),
        state: next.bf16([SLOTS, CHANNELS, 3]),
        slots: next.bytes(8),
        has: next.bytes(2),
        lengths: next.bytes(12),
        q: next.bf16([TOKENS, HK, K]),
        k: next.bf16([TOKENS, HK, K]),
        v: next.bf16([TOKENS, HV, V]),
        gate: gate_of(&mut next),
        keeps_states: false,
    };
    arena.fill(&rows, 1, ONE);
    arena.fill(&r.weight, 2, ONE);
    arena.fill(&r.bias, 3, ONE);
    arena.fill(&r.state, 4, ONE);
    arena.integers(r.slots, &[2, 0]);
    arena.integers(r.lengths, &LENGTHS);
    arena.bytes[r.has..r.has + 2].fill(1);
    r.gate.fill(&mut arena);
    (arena, r)
}

impl ConvRequest {
    pub fn launch(&self, arena: &mut Arena, device: bool) -> Result<Vec<u8>, Error> {
        let spec = ConvSpec::new(HK, HV, K, V);
        arena.run(|m| {
            let stream = m.context.stream()?;
            let [q, k, v] = self.x.map(|v| m.tensor(v));
            let tensors = ConvTensors {
                cu_seqlens: device.then(|| m.lengths(self.lengths)),
                x: ConvInput { q, k, v },
                weight: m.tensor(self.weight),
                bias: Some(m.tensor(self.bias)),
                state: Some(ConvState {
                    tensor: m.tensor_mut(self.state),
                    layout: ConvStateLayout::ChannelMajor,
                    has_initial_state: Some(m.numbers(self.has, 2)),
                }),
                slots: Some(m.numbers(self.slots, 2)),
                q: m.tensor_mut(self.q).into(),
                k: m.tensor_mut(self.k).into(),
                v: m.tensor_mut(self.v).into(),
                gates: Some(self.gate.tensors(m)),
            };
            if device {
                let mut plan = Conv::device(&m.context, spec, TOKENS, 2)?;
                if self.keeps_states {
                    plan = plan.keeping_states();
                }
                plan.launch(&stream, &tensors)?;
            } else {
                let mut plan = Conv::packed(&m.context, spec, &LENGTHS, TOKENS)?;
                if self.keeps_states {
                    plan = plan.keeping_states();
                }
                plan.launch(&stream, &tensors)?;
            }
            stream.synchronize()
        })
    }
}

#[derive(Clone, Copy)]
pub struct NormRequest {
    pub x: Option<View<3>>,
    pub z: View<3>,
    pub weight: View<1>,
    pub y: View<3>,
}

pub fn norm() -> (Arena, NormRequest) {
    let (mut arena, mut next) = Arena::new();
    let x = next.bf16([TOKENS, HV, V]);
    let r = NormRequest {
        x: Some(x),
        z: next.bf16([TOKENS, 1, HV * V]),
        weight: next.bf16([V]),
        y: next.bf16([TOKENS, HV, V]),
    };
    arena.fill(&x, 1, ONE);
    arena.fill(&r.z, 2, ONE);
    arena.fill(&r.weight, 3, ONE);
    (arena, r)
}

impl NormRequest {
    pub fn launch(&self, arena: &mut Arena) -> Result<Vec<u8>, Error> {
        arena.run(|m| {
            let stream = m.context.stream()?;
            let norm = GatedNorm {
                x: self.x.map(|x| m.tensor(x).into()),
                z: m.tensor(self.z),
                weight: Some(m.tensor(self.weight)),
                eps: 1e-6,
                gate: OutputGate::Silu,
                y: m.tensor_mut(self.y).into(),
            };
            norm.launch(&m.context, &stream)?;
            stream.synchronize()
        })
    }
}

#[derive(Clone, Copy)]
pub struct LayerRequest {
    pub x: [View<3>; 3],
    pub z: View<3>,
    pub a: View<2>,
    pub b: View<2>,
    pub conv_weight: View<2>,
    pub conv_bias: View<1>,
    pub a_log: View<1>,
    pub dt_bias: View<1>,
    pub norm: View<1>,
    pub conv: View<3>,
    pub recurrent: View<4>,
    pub slots: usize,
    pub has: usize,
    pub lengths: usize,
    pub y: View<3>,
    pub workspace: usize,
}

pub fn layer() -> (Arena, LayerRequest) {
    let (mut arena, mut next) = Arena::new();
    let rows = next.bf16([TOKENS, 1, CHANNELS + HV * V]);
    let z = View {
        shape: [TOKENS, 1, HV * V],
        ..over(rows, &rows, 2 * CHANNELS)
    };
    let r = LayerRequest {
        x: columns(&rows),
        z,
        a: next.bf16([TOKENS, HV]),
        b: next.bf16([TOKENS, HV]),
        conv_weight: next.bf16([CHANNELS, 4]),
        conv_bias: next.bf16([CHANNELS]),
        a_log: next.f32([HV]),
        dt_bias: next.f32([HV]),
        norm: next.f32([V]),
        conv: next.bf16([SLOTS, CHANNELS, 3]),
        recurrent: next.f32([SLOTS, HV, K, V]),
        slots: next.bytes(8),
        has: next.bytes(2),
        lengths: next.bytes(12),
        y: next.bf16([TOKENS, HV, V]),
        workspace: next.bytes(2 << 20),
    };
    arena.fill(&rows, 1, ONE);
    arena.fill(&r.a, 2, ONE);
    arena.fill(&r.b, 3, ONE);
    arena.fill(&r.conv_weight, 4, ONE);
    arena.fill(&r.conv_bias, 5, ONE);
    arena.fill(&r.a_log, 6, ONE);
    arena.fill(&r.dt_bias, 7, ONE);
    arena.fill(&r.norm, 8, ONE);
    arena.integers(r.slots, &[2, 0]);
    arena.integers(r.lengths, &LENGTHS);
    arena.bytes[r.has..r.has + 2].fill(1);
    r.fill(&mut arena);
    (arena, r)
}

impl LayerRequest {
    /// Puts the states where they are.
    pub fn fill(&self, arena: &mut Arena) {
        arena.fill(&self.conv, 9, ONE);
        arena.fill(&self.recurrent, 10, ONE);
    }

    pub fn launch(&self, arena: &mut Arena, device: bool) -> Result<Vec<u8>, Error> {
        let spec = LayerSpec {
            segments: Some(1),
            ..LayerSpec::new(HK, HV, K, V)
        };
        arena.run(|m| {
            let stream = m.context.stream()?;
            let [q, k, v] = self.x.map(|v| m.tensor(v));
            let tensors = LayerTensors {
                cu_seqlens: device.then(|| m.lengths(self.lengths)),
                x: ConvInput { q, k, v },
                z: m.tensor(self.z),
                a: m.tensor(self.a).into(),
                b: m.tensor(self.b).into(),
                weights: LayerWeights {
                    conv: m.tensor(self.conv_weight),
                    conv_bias: Some(m.tensor(self.conv_bias)),
                    a_log: m.tensor(self.a_log),
                    dt_bias: Some(m.tensor(self.dt_bias)),
                    norm: Some(m.tensor(self.norm)),
                },
                states: LayerStates {
                    conv: m.tensor_mut(self.conv),
                    conv_layout: ConvStateLayout::ChannelMajor,
                    recurrent: m.tensor_mut(self.recurrent),
                    recurrent_layout: StateLayout::KeyMajor,
                    slots: Some(m.numbers(self.slots, 2)),
                    has_initial_state: Some(m.numbers(self.has, 2)),
                },
                y: m.tensor_mut(self.y).into(),
            };
            if device {
                let plan = Layer::device(&m.context, spec, TOKENS, 2, 0)?;
                let workspace = m.workspace(self.workspace, plan.workspace_bytes());
                plan.launch(&stream, &tensors, workspace)?;
            } else {
                let plan = Layer::packed(&m.context, spec, &LENGTHS, TOKENS, 0)?;
                let workspace = m.workspace(self.workspace, plan.workspace_bytes());
                plan.launch(&stream, &tensors, workspace)?;
            }
            stream.synchronize()
        })
    }
}

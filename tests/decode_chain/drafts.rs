//! Speculative decoding: runs of steps with random drafts, of which random numbers are accepted, are the steps of the
//! accepted tokens alone, bit for bit, in both pools.

use deltawave::conv::{
    Conv, ConvDrafts, ConvInput, ConvSpec, ConvState, ConvStateLayout, ConvTensors,
};
use deltawave::decode::{Decode, DecodeSpec, DecodeTensors, Drafts};
use deltawave::gates::Gating;
use deltawave::runtime::Context;
use deltawave::state::StatePool;
use deltawave::tensor::{Buffer, Tensor, TensorMut};
use deltawave::types::{Dtype, StateLayout};
use deltawave_lab::inputs::{Tensor as HostTensor, random_normal, random_state};

use crate::common::context;

const HK: usize = 1;
const HV: usize = 2;
const K: usize = 32;
const V: usize = 48;
const CHANNELS: usize = 2 * HK * K + HV * V;
const STATE: usize = HV * K * V;
const WIDTH: usize = 4;
const POISON: u8 = 0xff;
const NULL: i32 = 0;

/// Numbers that look random.
struct Random(u64);

impl Random {
    /// A number below `below`.
    fn below(&mut self, below: usize) -> usize {
        self.0 = self
            .0
            .wrapping_mul(6364136223846793005)
            .wrapping_add(1442695040888963407);
        (self.0 >> 33) as usize % below
    }
}

/// Inputs of tokens: rows of x, g and beta.
#[derive(Clone, Default)]
struct Rows {
    x: Vec<u8>,
    g: Vec<f32>,
    beta: Vec<f32>,
}

impl Rows {
    fn draw(rows: usize, seed: u64) -> Rows {
        let draw = |name, n| random_normal(Dtype::F32, name, n, seed).values;
        Rows {
            x: random_normal(Dtype::Bf16, "x", rows * CHANNELS, seed).bytes,
            g: draw("g", rows * HV)
                .iter()
                .map(|x| -x.abs() / 4.0)
                .collect(),
            beta: draw("beta", rows * HV)
                .iter()
                .map(|x| x.abs().min(1.0))
                .collect(),
        }
    }

    fn len(&self) -> usize {
        self.g.len() / HV
    }

    fn push(&mut self, other: &Rows, row: usize) {
        self.x
            .extend_from_slice(&other.x[row * CHANNELS * 2..][..CHANNELS * 2]);
        self.g.extend_from_slice(&other.g[row * HV..][..HV]);
        self.beta.extend_from_slice(&other.beta[row * HV..][..HV]);
    }
}

/// How the states lie in memory.
#[derive(Clone, Copy, Debug)]
struct Memory {
    dtype: Dtype,
    layout: StateLayout,
    conv_layout: ConvStateLayout,
    /// Columns of conv states.
    columns: usize,
}

impl Memory {
    fn matrix(&self) -> [usize; 2] {
        match self.layout {
            StateLayout::KeyMajor => [K, V],
            StateLayout::ValueMajor => [V, K],
        }
    }

    /// Bytes of a state, and of a conv state.
    fn sizes(&self) -> [usize; 2] {
        [STATE * self.dtype.size(), CHANNELS * self.columns * 2]
    }

    /// Columns `from..from + WIDTH - 1` of a conv state, the channels of a token together.
    fn history(&self, state: &[u8], from: usize) -> Vec<u8> {
        let at = |column, channel| match self.conv_layout {
            ConvStateLayout::ChannelMajor => channel * self.columns + column,
            ConvStateLayout::TokenMajor => column * CHANNELS + channel,
        };
        let columns = from..from + WIDTH - 1;
        let all = columns.flat_map(|column| (0..CHANNELS).map(move |channel| at(column, channel)));
        all.flat_map(|i| [state[2 * i], state[2 * i + 1]]).collect()
    }
}

/// Both pools, and the weights.
struct Layer {
    context: Context,
    memory: Memory,
    slots: usize,
    states: Buffer<u8>,
    conv: Buffer<u8>,
    weight: Buffer<u8>,
}

/// Where the states of a step are.
enum Slots<'a> {
    /// A slot per sequence.
    Own(&'a [i32]),
    /// A slot per draft, and tokens of the step before that were accepted.
    Table(&'a [i32], &'a [i32]),
}

impl Layer {
    /// `first(n)`: the slot of the initial states of sequence n.
    fn new(memory: Memory, slots: usize, batch: usize, first: impl Fn(usize) -> usize) -> Layer {
        let context = context();
        let [of_state, of_conv] = memory.sizes();
        let mut states = vec![POISON; slots * of_state];
        let mut conv = vec![POISON; slots * of_conv];
        for n in 0..batch {
            let state = random_state(memory.dtype, STATE, n as u64).bytes;
            states[first(n) * of_state..][..of_state].copy_from_slice(&state);
            let columns = random_normal(Dtype::Bf16, "conv", CHANNELS * (WIDTH - 1), n as u64);
            for (i, value) in columns.bytes.chunks_exact(2).enumerate() {
                let (column, channel) = (i / CHANNELS, i % CHANNELS);
                let at = match memory.conv_layout {
                    ConvStateLayout::ChannelMajor => channel * memory.columns + column,
                    ConvStateLayout::TokenMajor => column * CHANNELS + channel,
                };
                conv[first(n) * of_conv + 2 * at..][..2].copy_from_slice(value);
            }
        }
        let weight = random_normal(Dtype::Bf16, "weight", CHANNELS * WIDTH, 3).bytes;
        Layer {
            memory,
            slots,
            states: context.upload(&states).unwrap(),
            conv: context.upload(&conv).unwrap(),
            weight: context.upload(&weight).unwrap(),
            context,
        }
    }

    /// Convolves and decodes rows; sequence n has rows `cu_seqlens[n]..cu_seqlens[n + 1]`. Returns the bytes of o.
    fn step(
        &mut self,
        rows: &Rows,
        cu_seqlens: &[i32],
        tokens: usize,
        slots: &Slots<'_>,
    ) -> Vec<u8> {
        let (context, memory) = (&self.context, self.memory);
        let stream = context.stream().unwrap();
        let (count, batch) = (rows.len(), cu_seqlens.len() - 1);
        let spec = ConvSpec {
            width: WIDTH,
            ..ConvSpec::new(HK, HV, K, V)
        };
        let x = context.upload(&rows.x).unwrap();
        let x = x
            .tensor_of(Dtype::Bf16, [count, CHANNELS], [CHANNELS, 1], 0)
            .unwrap();
        let lengths = context.upload(cu_seqlens).unwrap();
        let heads = [(HK, K), (HK, K), (HV, V), (HV, V)];
        let out = heads.map(|(h, d)| context.upload(&vec![POISON; count * h * d * 2]).unwrap());
        let shape = |i: usize| {
            (
                [count, heads[i].0, heads[i].1],
                [heads[i].0 * heads[i].1, heads[i].1, 1],
            )
        };
        // SAFETY: the rows lie in the buffers, which outlive the launches.
        let write = |i: usize| unsafe {
            TensorMut::from_raw(out[i].address(), Dtype::Bf16, shape(i).0, shape(i).1)
        };
        // SAFETY: as above.
        let read = |i: usize| unsafe {
            Tensor::from_raw(
                out[i].address().cast_const(),
                Dtype::Bf16,
                shape(i).0,
                shape(i).1,
            )
        };
        // Without drafts the state is the first columns.
        let seen = match slots {
            Slots::Own(_) => WIDTH - 1,
            Slots::Table(..) => memory.columns,
        };
        let (conv_shape, conv_strides) = match memory.conv_layout {
            ConvStateLayout::ChannelMajor => ([CHANNELS, seen], [memory.columns, 1]),
            ConvStateLayout::TokenMajor => ([seen, CHANNELS], [CHANNELS, 1]),
        };
        let (flat, accepted) = match slots {
            Slots::Own(slots) => (*slots, vec![1; batch]),
            Slots::Table(table, accepted) => (*table, accepted.to_vec()),
        };
        let (flat, accepted) = (
            context.upload(flat).unwrap(),
            context.upload(&accepted).unwrap(),
        );
        let tensors = ConvTensors {
            cu_seqlens: Some((&lengths).into()),
            x: ConvInput::flat(&x, &spec).unwrap(),
            weight: (self.weight)
                .tensor_of(Dtype::Bf16, [CHANNELS, WIDTH], [WIDTH, 1], 0)
                .unwrap(),
            bias: None,
            state: Some(ConvState {
                tensor: (self.conv)
                    .tensor_of_mut(
                        Dtype::Bf16,
                        [self.slots, conv_shape[0], conv_shape[1]],
                        [CHANNELS * memory.columns, conv_strides[0], conv_strides[1]],
                        0,
                    )
                    .unwrap(),
                layout: memory.conv_layout,
                has_initial_state: None,
            }),
            slots: Some((&flat).into()),
            q: write(0).into(),
            k: write(1).into(),
            v: write(2).into(),
            gates: None,
        };
        let conv = Conv::device(context, spec, count, batch).unwrap();
        match slots {
            Slots::Own(_) => conv.launch(&stream, &tensors).unwrap(),
            Slots::Table(..) => {
                let drafts = ConvDrafts {
                    accepted: Some((&accepted).into()),
                    slot_columns: Some(tokens),
                    null_slot: Some(NULL),
                };
                conv.launch_drafts(&stream, &tensors, &drafts).unwrap();
            }
        }
        let decode = DecodeSpec {
            qk_l2norm: true,
            tokens,
            ..DecodeSpec::new(HK, HV, K, V)
        };
        let [g, beta] = [&rows.g, &rows.beta].map(|x| context.upload(x).unwrap());
        let [rows, columns] = memory.matrix();
        let own = matches!(slots, Slots::Own(_));
        let tensors = DecodeTensors {
            q: read(0).into(),
            k: read(1).into(),
            v: read(2).into(),
            gating: Gating::Given {
                g: Some(g.tensor([count, HV]).unwrap().into()),
                beta: Some(beta.tensor([count, HV]).unwrap().into()),
            },
            pool: StatePool {
                tensor: (self.states)
                    .tensor_of_mut(
                        memory.dtype,
                        [self.slots, HV, rows, columns],
                        [STATE, rows * columns, columns, 1],
                        0,
                    )
                    .unwrap(),
                layout: memory.layout,
                slots: own.then(|| (&flat).into()),
                write_slots: None,
            },
            has_initial_state: None,
            states: None,
            o: write(3).into(),
        };
        let plan = Decode::new(context, decode, batch).unwrap();
        if own {
            plan.launch(&stream, &tensors).unwrap();
        } else {
            let drafts = Drafts {
                draft_slots: Some((&flat).into()),
                read_slots: Some((&flat).into()),
                accepted: Some((&accepted).into()),
                cu_seqlens: Some((&lengths).into()),
                null_slot: Some(NULL),
            };
            plan.launch_drafts(&stream, &tensors, &drafts).unwrap();
        }
        out[3].download(&stream).unwrap()
    }

    /// The state in a slot, and the columns of its conv state from `column` on.
    fn left(&self, slot: usize, column: usize) -> [Vec<u8>; 2] {
        let stream = self.context.stream().unwrap();
        let [of_state, of_conv] = self.memory.sizes();
        let states = self.states.download(&stream).unwrap();
        let conv = self.conv.download(&stream).unwrap();
        let state = states[slot * of_state..][..of_state].to_vec();
        let history = self
            .memory
            .history(&conv[slot * of_conv..][..of_conv], column);
        [state, history]
    }
}

/// A run of steps of ragged drafts. Sequence 2 is padding; a sequence may sit out a step. The table of slots is read and
/// written: a state may lie where one of the same sequence will. A conv state is in the slot of the first draft.
fn run_of_steps(memory: Memory, tokens: usize, seed: u64) {
    const BATCH: usize = 5;
    const STEPS: usize = 6;
    const PADDING: usize = 2;
    let slots = BATCH * tokens + 2;
    let slot = |n: usize, t: usize| 1 + (n * tokens + t) * 7 % (BATCH * tokens);
    assert!(!(BATCH * tokens).is_multiple_of(7), "slots of their own");
    let table: Vec<i32> = (0..BATCH * tokens)
        .map(|i| match (i / tokens, i % tokens) {
            (PADDING, t) => [NULL, -1, i32::MAX][t % 3],
            (n, t) => slot(n, t) as i32,
        })
        .collect();
    let mut drafted = Layer::new(memory, slots, BATCH, |n| slot(n, 0));
    let mut stepped = Layer::new(memory, slots, BATCH, |n| n);
    let mut random = Random(seed);
    let mut accepted = vec![1i32; BATCH];
    for step in 0..STEPS {
        let counts: Vec<usize> = (0..BATCH)
            .map(|n| {
                if random.below(5) == 0 {
                    0
                } else {
                    1 + random.below(tokens) * usize::from(n != 4)
                }
            })
            .collect();
        let total: usize = counts.iter().sum();
        let rows = Rows::draw(total + 3, seed ^ (step as u64) << 8);
        let mut cu_seqlens = vec![0i32];
        for n in &counts {
            cu_seqlens.push(cu_seqlens[cu_seqlens.len() - 1] + *n as i32);
        }
        let o = drafted.step(&rows, &cu_seqlens, tokens, &Slots::Table(&table, &accepted));
        let of_row = HV * V * 2;
        for n in 0..BATCH {
            let first = cu_seqlens[n] as usize;
            let own = &o[first * of_row..(first + counts[n]) * of_row];
            if n == PADDING {
                assert!(own.iter().all(|x| *x == 0), "outputs of padding");
                continue;
            }
            if counts[n] == 0 {
                continue;
            }
            let taken = 1 + random.below(counts[n]);
            accepted[n] = taken as i32;
            // A state of 16 bits is rounded when it is stored: once a launch.
            let together = if memory.dtype == Dtype::F32 { 1 } else { taken };
            for t in (0..taken).step_by(together) {
                let mut some = Rows::default();
                (t..t + together).for_each(|t| some.push(&rows, first + t));
                let lengths = [0, together as i32];
                let one = stepped.step(&some, &lengths, together, &Slots::Own(&[n as i32]));
                assert!(
                    one == own[t * of_row..(t + together) * of_row],
                    "o of {n}, step {step}"
                );
            }
        }
        let end = cu_seqlens[BATCH] as usize * of_row;
        assert!(o[end..].iter().all(|x| *x == POISON), "rows of no sequence");
    }
    for n in (0..BATCH).filter(|n| *n != PADDING) {
        let last = accepted[n] as usize - 1;
        let [state, _] = drafted.left(slot(n, last), 0);
        let [_, history] = drafted.left(slot(n, 0), last);
        assert!([state, history] == stepped.left(n, 0), "states of {n}");
    }
    for nobody in [0, slots - 1] {
        let [state, history] = drafted.left(nobody, 0);
        let untouched = state.iter().chain(&history).all(|x| *x == POISON);
        assert!(untouched, "slot {nobody} of no sequence");
    }
}

#[test]
fn accepted_drafts_are_steps() {
    for (i, tokens) in [1, 2, 3, 4, 5].into_iter().enumerate() {
        for (dtype, layout, conv_layout) in [
            (
                Dtype::F32,
                StateLayout::KeyMajor,
                ConvStateLayout::ChannelMajor,
            ),
            (
                Dtype::F32,
                StateLayout::ValueMajor,
                ConvStateLayout::TokenMajor,
            ),
            (
                Dtype::Bf16,
                StateLayout::ValueMajor,
                ConvStateLayout::TokenMajor,
            ),
            (
                Dtype::F16,
                StateLayout::KeyMajor,
                ConvStateLayout::ChannelMajor,
            ),
        ] {
            // More columns than are needed do no harm.
            let columns = WIDTH - 2 + tokens + i % 2;
            let memory = Memory {
                dtype,
                layout,
                conv_layout,
                columns: columns.max(WIDTH - 1),
            };
            run_of_steps(memory, tokens, i as u64 + 1);
        }
    }
}

/// Every count of tokens with every count of accepted ones, and counts beyond both ends: outputs and states of the
/// convolution. `dims`: octets in one piece and in parts; `qk_l2norm`: heads whose rows one thread holds or none.
#[test]
fn conv_states_of_every_count() {
    const MOST: usize = 4;
    let context = context();
    let stream = context.stream().unwrap();
    for (dims, width, qk_l2norm, token_major) in [
        ([16, 16], 4, false, true),
        ([16, 16], 4, true, false),
        ([12, 10], 3, false, false),
        ([12, 10], 2, true, true),
    ] {
        let columns = width - 2 + MOST + 1;
        let pairs: Vec<(usize, i32)> = (0..=MOST)
            .flat_map(|count| (-1..=MOST as i32 + 3).map(move |accepted| (count, accepted)))
            .collect();
        let batch = pairs.len();
        let spec = ConvSpec {
            width,
            qk_l2norm,
            ..ConvSpec::new(1, 1, dims[0], dims[1])
        };
        let channels = spec.total_channels();
        let mut cu_seqlens = vec![0i32];
        for (count, _) in &pairs {
            cu_seqlens.push(cu_seqlens[cu_seqlens.len() - 1] + *count as i32);
        }
        let rows = cu_seqlens[batch] as usize;
        let has: Vec<u8> = (0..batch).map(|n| u8::from(n % 5 != 3)).collect();
        let accepted: Vec<i32> = pairs.iter().map(|(_, accepted)| *accepted).collect();
        let slots: Vec<i32> = (0..batch as i32).rev().flat_map(|n| [n, 99]).collect();
        let x = random_normal(Dtype::Bf16, "x", rows * channels, 5);
        let weight = random_normal(Dtype::Bf16, "weight", channels * width, 5);
        // [slots, columns, channels]
        let before = random_normal(Dtype::Bf16, "state", batch * columns * channels, 5).values;
        let start = |n: usize| (accepted[n] - 1).clamp(0, (columns - (width - 1)) as i32) as usize;
        let column = |n: usize, j: usize| {
            let slot = batch - 1 - n;
            &before[(slot * columns + j) * channels..][..channels]
        };
        let ordered = |state: &[f32], columns: usize| -> Vec<f32> {
            if token_major {
                return state.to_vec();
            }
            let each = state.chunks_exact(columns * channels);
            each.flat_map(|state| {
                (0..channels * columns).map(|i| state[i % columns * channels + i / columns])
            })
            .collect()
        };
        // What the launches leave behind: q, k, v and the states, [slots, columns, channels].
        let launch = |state: &[f32], columns: usize, drafts: bool| -> (Vec<Vec<u8>>, Vec<f32>) {
            let upload = |t: &HostTensor| context.upload(&t.bytes).unwrap();
            let mut pool = upload(&HostTensor::new(Dtype::Bf16, ordered(state, columns)));
            let (x, weight) = (upload(&x), upload(&weight));
            let x = x
                .tensor_of(Dtype::Bf16, [rows, channels], [channels, 1], 0)
                .unwrap();
            let has = context.upload(&has).unwrap();
            let table = context.upload(&slots).unwrap();
            let own: Vec<i32> = (0..batch as i32).rev().collect();
            let own = context.upload(&own).unwrap();
            let accepted = context.upload(&accepted).unwrap();
            let heads = [dims[0], dims[0], dims[1]];
            let mut out = heads.map(|d| context.upload(&vec![POISON; rows * d * 2]).unwrap());
            let (shape, layout) = match token_major {
                true => ([batch, columns, channels], ConvStateLayout::TokenMajor),
                false => ([batch, channels, columns], ConvStateLayout::ChannelMajor),
            };
            {
                let [q, k, v] = &mut out;
                let write = |b: &'_ mut Buffer<u8>, d: usize| {
                    // SAFETY: the rows lie in the buffer, which outlives the launch.
                    unsafe {
                        TensorMut::from_raw(b.address(), Dtype::Bf16, [rows, 1, d], [d, d, 1])
                    }
                };
                let strides = deltawave::tensor::dense_strides(shape);
                let tensors = ConvTensors {
                    cu_seqlens: None,
                    x: ConvInput::flat(&x, &spec).unwrap(),
                    weight: weight
                        .tensor_of(Dtype::Bf16, [channels, width], [width, 1], 0)
                        .unwrap(),
                    bias: None,
                    state: Some(ConvState {
                        tensor: pool.tensor_of_mut(Dtype::Bf16, shape, strides, 0).unwrap(),
                        layout,
                        has_initial_state: Some((&has).into()),
                    }),
                    slots: Some(if drafts { &table } else { &own }.into()),
                    q: write(q, dims[0]).into(),
                    k: write(k, dims[0]).into(),
                    v: write(v, dims[1]).into(),
                    gates: None,
                };
                let plan = Conv::packed(&context, spec, &cu_seqlens, rows).unwrap();
                if drafts {
                    let drafts = ConvDrafts {
                        accepted: Some((&accepted).into()),
                        slot_columns: Some(2),
                        null_slot: None,
                    };
                    plan.launch_drafts(&stream, &tensors, &drafts).unwrap();
                } else {
                    plan.launch(&stream, &tensors).unwrap();
                }
            }
            let bytes = pool.download(&stream).unwrap();
            let left = HostTensor::from_bytes(Dtype::Bf16, bytes).values;
            let left = match token_major {
                true => left,
                false => (0..left.len())
                    .map(|i| {
                        let (of_state, at) = (columns * channels, i % (columns * channels));
                        left[i / of_state * of_state + at % channels * columns + at / channels]
                    })
                    .collect(),
            };
            (out.map(|b| b.download(&stream).unwrap()).to_vec(), left)
        };
        let (found, left) = launch(&before, columns, true);
        // The same without drafts, from states of the columns that are read.
        let histories: Vec<f32> = (0..batch)
            .rev()
            .flat_map(|n| (0..width - 1).map(move |j| (n, j)))
            .flat_map(|(n, j)| column(n, start(n) + j).to_vec())
            .collect();
        let (wanted, _) = launch(&histories, width - 1, false);
        assert!(found == wanted, "outputs: {dims:?}, width {width}");
        for (n, (count, _)) in pairs.iter().enumerate() {
            let slot = batch - 1 - n;
            for j in 0..columns {
                let of_x = |row: usize| &x.values[row * channels..][..channels];
                let zeros = vec![0.0; channels];
                let wanted = match j {
                    _ if *count == 0 || j >= width - 2 + count => column(n, j),
                    _ if j >= width - 2 => of_x(cu_seqlens[n] as usize + j - (width - 2)),
                    _ if has[n] == 0 => &zeros[..],
                    _ => column(n, start(n) + 1 + j),
                };
                let found = &left[(slot * columns + j) * channels..][..channels];
                assert!(
                    found == wanted,
                    "column {j} of {:?}: width {width}",
                    pairs[n]
                );
            }
        }
    }
}

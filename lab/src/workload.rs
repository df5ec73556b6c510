//! Drawn tensors of the operations, and the least that any implementation moves and computes for them.

use deltawave::conv::ConvSpec;
use deltawave::layer::LayerSpec;
use deltawave::model::Heads;
use deltawave::prefill::Snapshot;
use deltawave::types::Dtype;

use crate::inputs::{GateInputs, InputSpec, Inputs, Tensor, random_normal, random_state};
use crate::safetensors_io::{FileBeta, FileGate, PrefillFile};

/// Standard inputs of so many tokens of these heads.
pub fn inputs_of(dtype: Dtype, tokens: usize, heads: &Heads) -> InputSpec {
    InputSpec {
        dtype,
        tokens,
        key_heads: heads.key,
        value_heads: heads.value,
        key_dim: heads.key_dim,
        value_dim: heads.value_dim,
        ..Default::default()
    }
}

/// How the tensors of a recurrence are drawn.
#[derive(Clone, Copy, Debug)]
pub struct Draw {
    /// Distributions and seed.
    pub input: InputSpec,
    /// a, b, A_log and dt_bias instead of g and beta.
    pub raw_gates: bool,
    /// beta up to 2.
    pub neg_eigval: bool,
    /// Element type of the initial states, where there are any.
    pub initial_state: Option<Dtype>,
}

impl Draw {
    /// Draws the tensors of a packed batch. Every sequence starts from a state of its own.
    pub fn tensors(&self, cu_seqlens: &[i32]) -> PrefillFile {
        let s = self.input;
        let f32s = |values| Tensor::new(Dtype::F32, values);
        let mut inputs = Inputs::new(s);
        let (gate, beta) = if self.raw_gates {
            let raw = GateInputs::new(s);
            let gate = FileGate::Raw {
                a: raw.a,
                a_log: f32s(raw.a_log),
                dt_bias: Some(f32s(raw.dt_bias)),
            };
            (gate, FileBeta::Logits(raw.b))
        } else {
            if self.neg_eigval {
                inputs.beta.iter_mut().for_each(|b| *b *= 2.0);
            }
            let beta = FileBeta::Given(f32s(inputs.beta));
            (FileGate::Log(f32s(inputs.g)), beta)
        };
        let states = (cu_seqlens.len() - 1) * s.value_heads * s.key_dim * s.value_dim;
        PrefillFile {
            tokens: s.tokens,
            key_heads: s.key_heads,
            value_heads: s.value_heads,
            key_dim: s.key_dim,
            value_dim: s.value_dim,
            q: inputs.q,
            k: inputs.k,
            v: inputs.v,
            gate,
            beta,
            cu_seqlens: cu_seqlens.to_vec(),
            initial_state: (self.initial_state).map(|dtype| random_state(dtype, states, s.seed)),
        }
    }
}

impl PrefillFile {
    /// `N`.
    pub fn sequences(&self) -> usize {
        self.cu_seqlens.len() - 1
    }

    /// Elements of one state.
    pub fn state_elements(&self) -> usize {
        self.value_heads * self.key_dim * self.value_dim
    }

    /// Bytes of inputs, outputs and initial states, and of so many states that are written: each once.
    pub fn minimal_bytes(&self, written: usize, state_dtype: Dtype) -> usize {
        let keys = self.tokens * self.key_heads * self.key_dim;
        let values = self.tokens * self.value_heads * self.value_dim;
        let gate = match &self.gate {
            FileGate::None => 0,
            FileGate::Log(g) => g.dtype.size(),
            FileGate::Raw { a, .. } => a.dtype.size(),
        };
        let beta = match &self.beta {
            FileBeta::One => 0,
            FileBeta::Given(beta) | FileBeta::Logits(beta) => beta.dtype.size(),
        };
        2 * (keys + values) * self.q.dtype.size()
            + self.tokens * self.value_heads * (gate + beta)
            + (self.initial_state.as_ref()).map_or(0, |t| t.bytes.len())
            + written * self.state_elements() * state_dtype.size()
    }

    /// Tokens of every chunk of at most `chunk` tokens.
    pub fn chunks(&self, chunk: usize) -> impl Iterator<Item = usize> {
        let lengths = (self.cu_seqlens.windows(2)).map(|c| (c[1] - c[0]) as usize);
        lengths.flat_map(move |n| (0..n).step_by(chunk).map(move |at| chunk.min(n - at)))
    }

    /// Operations of the T-form's dense products: in each chunk K K^T and Q K^T for each key head; the inverse, T X, P U,
    /// and K S, Q S and K^T U for each value head.
    pub fn t_form_flops(&self, chunk: usize) -> f64 {
        let (k, v) = (self.key_dim as f64, self.value_dim as f64);
        let of_chunk = |n: f64| {
            let key_head = 2.0 * (2.0 * n * n * k);
            let value_head = n * n * n / 3.0 + 2.0 * (2.0 * n * n * v) + 3.0 * (2.0 * n * k * v);
            self.key_heads as f64 * key_head + self.value_heads as f64 * value_head
        };
        self.sum_of_chunks(chunk, of_chunk)
    }

    /// Operations of the dense products of the backward, which starts from the inputs alone. In each chunk K K^T and Q K^T
    /// for each key head; for each value head the inverse, T X, K S and K^T U again, then P^T dO, T^T dU, K dS, Q^T dO and
    /// K^T dE of the reverse walk, then dO U^T, dE U^T, dO S^T, dE S^T, U dS^T and three products of n x n x K.
    pub fn backward_flops(&self, chunk: usize) -> f64 {
        let (k, v) = (self.key_dim as f64, self.value_dim as f64);
        let of_chunk = |n: f64| {
            let key_head = 2.0 * (2.0 * n * n * k);
            let value_head = n * n * n / 3.0
                + 5.0 * (2.0 * n * n * v)
                + 3.0 * (2.0 * n * n * k)
                + 8.0 * (2.0 * n * k * v);
            self.key_heads as f64 * key_head + self.value_heads as f64 * value_head
        };
        self.sum_of_chunks(chunk, of_chunk)
    }

    /// Sum over the tokens of each chunk: 0 without chunks, where the sum of no f64 is -0.
    fn sum_of_chunks(&self, chunk: usize, of_chunk: impl Fn(f64) -> f64) -> f64 {
        let numbers = self.chunks(chunk).map(|n| of_chunk(n as f64));
        numbers.fold(0.0, |sum, n| sum + n)
    }

    /// Every sequence from the last snapshot before its end, where there is one. `states` are those of the snapshots.
    pub fn rest(&self, snapshots: &[Snapshot], states: &Tensor) -> Option<Rest> {
        let last = |n: usize| {
            let [begin, end] = [self.cu_seqlens[n] as usize, self.cu_seqlens[n + 1] as usize];
            let before_end = |s: &&Snapshot| s.sequence == n && s.tokens < end - begin;
            let found = snapshots
                .iter()
                .filter(before_end)
                .max_by_key(|s| s.tokens)?;
            Some((n, found.slot, begin + found.tokens..end))
        };
        let mut rows = Vec::new();
        let mut sequences = Vec::new();
        let mut slots = Vec::new();
        let mut cu_seqlens = vec![0];
        for (n, slot, tokens) in (0..self.sequences()).filter_map(last) {
            rows.extend(tokens);
            sequences.push(n);
            slots.push(slot);
            cu_seqlens.push(rows.len() as i32);
        }
        let states = taken(states, self.state_elements(), &slots);
        (!rows.is_empty()).then(|| Rest {
            data: self.of_rows(&rows, cu_seqlens, Some(states)),
            rows,
            sequences,
        })
    }

    /// Some tokens of it, as sequences of these offsets and initial states.
    pub fn of_rows(
        &self,
        rows: &[usize],
        cu_seqlens: Vec<i32>,
        states: Option<Tensor>,
    ) -> PrefillFile {
        let keys = |t| taken(t, self.key_heads * self.key_dim, rows);
        let heads = |t| taken(t, self.value_heads, rows);
        PrefillFile {
            tokens: rows.len(),
            q: keys(&self.q),
            k: keys(&self.k),
            v: taken(&self.v, self.value_heads * self.value_dim, rows),
            gate: match &self.gate {
                FileGate::None => FileGate::None,
                FileGate::Log(g) => FileGate::Log(heads(g)),
                FileGate::Raw { a, a_log, dt_bias } => FileGate::Raw {
                    a: heads(a),
                    a_log: a_log.clone(),
                    dt_bias: dt_bias.clone(),
                },
            },
            beta: match &self.beta {
                FileBeta::One => FileBeta::One,
                FileBeta::Given(beta) => FileBeta::Given(heads(beta)),
                FileBeta::Logits(b) => FileBeta::Logits(heads(b)),
            },
            initial_state: states,
            cu_seqlens,
            ..*self
        }
    }
}

/// The ends of sequences.
#[derive(Clone, Debug)]
pub struct Rest {
    /// They, as sequences of their own.
    pub data: PrefillFile,
    /// Their tokens in the whole.
    pub rows: Vec<usize>,
    /// Their sequences in the whole.
    pub sequences: Vec<usize>,
}

/// Rows of a tensor; `row`: elements of each.
pub fn taken(t: &Tensor, row: usize, rows: &[usize]) -> Tensor {
    let size = row * t.dtype.size();
    let of = |n: &usize| &t.bytes[n * size..(n + 1) * size];
    Tensor::from_bytes(t.dtype, rows.iter().flat_map(of).copied().collect())
}

/// A pool whose last slots have the states of sequences, backwards.
#[derive(Clone, Copy, Debug)]
pub struct Pool<'a> {
    /// Slots in all.
    pub slots: usize,
    /// Bytes of each.
    pub state_bytes: usize,
    /// `[N + 1]`.
    pub cu_seqlens: &'a [i32],
}

/// Slots of a pool without a sequence.
#[derive(Clone, Copy, Debug)]
pub struct Others {
    /// How many there are.
    pub slots: usize,
    /// How many of them, and of the slots of sequences without tokens, have other bits than before.
    pub changed: usize,
}

impl Pool<'_> {
    /// The slot of each of so many sequences.
    pub fn own(slots: usize, sequences: usize) -> Vec<i32> {
        (1..=sequences).map(|n| (slots - n) as i32).collect()
    }

    /// The pool before a run: initial states in their slots, NaN elsewhere.
    pub fn before(&self, initial: Option<&Tensor>) -> Vec<u8> {
        let each = self.state_bytes;
        let mut before = vec![0xff; self.slots * each];
        if let Some(initial) = initial {
            let states = initial.bytes.chunks_exact(each.max(1));
            for (slot, state) in Self::own(self.slots, self.sequences())
                .into_iter()
                .zip(states)
            {
                before[slot as usize * each..][..each].copy_from_slice(state);
            }
        }
        before
    }

    /// The sequences' states after a run, and what became of the other slots.
    pub fn split(&self, now: &Tensor, initial: Option<&Tensor>) -> (Tensor, Others) {
        let own = Self::own(self.slots, self.sequences());
        let range = |slot: usize| slot * self.state_bytes..(slot + 1) * self.state_bytes;
        // A sequence without tokens writes nothing: without a state to start from, its slot may hold anything.
        let empty = |n: usize| self.cu_seqlens[n] == self.cu_seqlens[n + 1];
        let zeros = vec![0; self.state_bytes];
        let states =
            own.iter()
                .enumerate()
                .flat_map(|(n, &slot)| match empty(n) && initial.is_none() {
                    true => &zeros[..],
                    false => &now.bytes[range(slot as usize)],
                });
        let states = Tensor::from_bytes(now.dtype, states.copied().collect());
        // The sequences have the last slots.
        let others = self.slots - own.len();
        let before = self.before(initial);
        let of_empty = own.iter().enumerate().filter(|(n, _)| empty(*n));
        let kept = (0..others).chain(of_empty.map(|(_, &slot)| slot as usize));
        let changed = kept.filter(|&slot| now.bytes[range(slot)] != before[range(slot)]);
        let others = Others {
            slots: others,
            changed: changed.count(),
        };
        (states, others)
    }

    fn sequences(&self) -> usize {
        self.cu_seqlens.len() - 1
    }
}

/// How the rows of a layer's projections lie in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RowLayout {
    /// q | k | v | z, and b | a.
    Flat,
    /// The same of each key head and its value heads, one key head after the other.
    Interleaved,
}

impl RowLayout {
    /// Groups of heads whose projections lie together.
    pub fn groups(self, heads: &Heads) -> usize {
        match self {
            RowLayout::Flat => 1,
            RowLayout::Interleaved => heads.key,
        }
    }

    /// The column that holds a channel of q, k, v and z, in this order.
    pub fn column(self, heads: &Heads, channel: usize) -> usize {
        if self == RowLayout::Flat {
            return channel;
        }
        // Columns of one key head.
        let values = heads.value / heads.key * heads.value_dim;
        let sizes = [heads.key_dim, heads.key_dim, values, values];
        let group: usize = sizes.iter().sum();
        let (mut c, mut offset) = (channel, 0);
        for size in sizes {
            if c < heads.key * size {
                return c / size * group + offset + c % size;
            }
            c -= heads.key * size;
            offset += size;
        }
        channel
    }

    /// The column that holds a value head's b, and that of its a.
    pub fn gate_columns(self, heads: &Heads, head: usize) -> [usize; 2] {
        let each = heads.value / self.groups(heads);
        let b = head / each * 2 * each + head % each;
        [b, b + each]
    }
}

/// Tensors of a convolution.
#[derive(Clone, Debug)]
pub struct ConvData {
    /// The convolution.
    pub spec: ConvSpec,
    /// Order of the rows of x and of the gates' inputs.
    pub layout: RowLayout,
    /// `[N + 1]`.
    pub cu_seqlens: Vec<i32>,
    /// `[T, columns]`, z included.
    pub x: Tensor,
    /// `[channels, width]`.
    pub weight: Tensor,
    /// `[channels]`.
    pub bias: Option<Tensor>,
    /// `[N, channels, width - 1]`.
    pub state: Option<Tensor>,
    /// Inputs of g and beta.
    pub gates: Option<ConvGates>,
}

/// Inputs of g and beta.
#[derive(Clone, Debug)]
pub struct ConvGates {
    /// `[T, 2 HV]`: rows `b | a`, for each group of heads.
    pub ba: Tensor,
    /// `[HV]`.
    pub a_log: Tensor,
    /// `[HV]`.
    pub dt_bias: Tensor,
}

impl ConvData {
    /// Draws x and the weights: neither bias nor states nor gates.
    pub fn draw(spec: ConvSpec, layout: RowLayout, cu_seqlens: &[i32], seed: u64) -> Self {
        let tokens = cu_seqlens[cu_seqlens.len() - 1] as usize;
        let draw = |name: &str, n: usize| random_normal(spec.dtype, name, n, seed);
        ConvData {
            spec,
            layout,
            cu_seqlens: cu_seqlens.to_vec(),
            x: draw("x", tokens * columns(&spec)),
            weight: draw("weight", spec.total_channels() * spec.width),
            bias: None,
            state: None,
            gates: None,
        }
    }

    /// Draws a bias.
    pub fn draw_bias(&mut self, seed: u64) {
        let channels = self.spec.total_channels();
        self.bias = Some(random_normal(self.spec.dtype, "bias", channels, seed));
    }

    /// Draws initial states.
    pub fn draw_state(&mut self, seed: u64) {
        let elements = self.state_elements();
        self.state = Some(random_normal(self.spec.dtype, "conv_state", elements, seed));
    }

    /// Draws the inputs of g and beta.
    pub fn draw_gates(&mut self, seed: u64) {
        let heads = self.spec.heads.value;
        let of_heads = |name: &str| random_normal(Dtype::F32, name, heads, seed);
        self.gates = Some(ConvGates {
            ba: random_normal(self.spec.dtype, "ba", 2 * self.tokens() * heads, seed),
            a_log: of_heads("a_log"),
            dt_bias: of_heads("dt_bias"),
        });
    }

    /// `T`.
    pub fn tokens(&self) -> usize {
        self.cu_seqlens[self.cu_seqlens.len() - 1] as usize
    }

    /// Elements of all states.
    pub fn state_elements(&self) -> usize {
        (self.cu_seqlens.len() - 1) * self.spec.total_channels() * (self.spec.width - 1)
    }

    /// Channels of x and outputs, weights, states, gates: each once.
    pub fn minimal_bytes(&self) -> usize {
        let accesses = 1 + usize::from(self.state.is_some());
        let weights = self.weight.values.len() + self.bias.as_ref().map_or(0, |b| b.values.len());
        let size = self.spec.dtype.size();
        let tokens = 2 * self.tokens();
        let gates = (self.gates.as_ref()).map_or(0, |_| self.spec.heads.value * (size + 4));
        let row = self.spec.total_channels() * size + gates;
        tokens * row + (weights + accesses * self.state_elements()) * size
    }
}

/// Columns of a row of projections: q, k, v and z.
pub fn columns(spec: &ConvSpec) -> usize {
    let [q, k, v] = spec.channels();
    q + k + 2 * v
}

/// Transposes matrices of `rows` by `columns` elements of 16 bits.
pub fn transposed(bytes: &[u8], [rows, columns]: [usize; 2]) -> Vec<u8> {
    let matrices = bytes.chunks_exact(2 * rows * columns);
    let elements = matrices.flat_map(|matrix| {
        let of_column = move |c: usize| (0..rows).map(move |r| r * columns + c);
        let places = (0..columns).flat_map(of_column);
        places.map(|i| [matrix[2 * i], matrix[2 * i + 1]])
    });
    elements.flatten().collect()
}

/// Tensors of a layer.
#[derive(Clone, Debug)]
pub struct LayerData {
    /// The layer.
    pub spec: LayerSpec,
    /// `[N + 1]`.
    pub cu_seqlens: Vec<i32>,
    /// `[T, columns]`: rows `q | k | v | z`.
    pub projections: Tensor,
    /// `[T, HV]`.
    pub a: Tensor,
    /// `[T, HV]`.
    pub b: Tensor,
    /// `[channels, width]`.
    pub conv_weight: Tensor,
    /// `[HV]`.
    pub a_log: Tensor,
    /// `[HV]`.
    pub dt_bias: Tensor,
    /// `[V]`.
    pub norm_weight: Tensor,
    /// `[N, channels, width - 1]` and `[N, HV, K, V]`.
    pub states: Option<[Tensor; 2]>,
}

impl LayerData {
    /// Draws projections and weights; no states.
    pub fn draw(spec: LayerSpec, cu_seqlens: &[i32], seed: u64) -> Self {
        let tokens = cu_seqlens[cu_seqlens.len() - 1] as usize;
        let (channels, heads) = (spec.conv().total_channels(), spec.heads.value);
        let draw = |name: &str, n: usize| random_normal(spec.dtype, name, n, seed);
        // Gates as models begin with: A from 1 to 16, softplus(dt_bias) from 0.001 to 0.1.
        let a_log = (0..heads).map(|h| ((h % 16 + 1) as f32).ln());
        let dt_bias = (0..heads).map(|h| (0.001 * 100f32.powf(h as f32 / heads as f32)).ln());
        LayerData {
            spec,
            cu_seqlens: cu_seqlens.to_vec(),
            projections: draw("x", tokens * columns(&spec.conv())),
            a: draw("a", tokens * heads),
            b: draw("b", tokens * heads),
            conv_weight: draw("weight", channels * spec.width),
            a_log: Tensor::new(Dtype::F32, a_log.collect()),
            dt_bias: Tensor::new(Dtype::F32, dt_bias.collect()),
            norm_weight: random_normal(Dtype::F32, "norm_weight", spec.heads.value_dim, seed),
            states: None,
        }
    }

    /// Draws initial states; `dtype` is that of the recurrent ones.
    pub fn draw_states(&mut self, dtype: Dtype, seed: u64) {
        let [conv, recurrent] = self.state_elements();
        self.states = Some([
            random_normal(self.spec.dtype, "conv_state", conv, seed),
            random_normal(dtype, "state", recurrent, seed),
        ]);
    }

    /// Elements of all conv states, and of all recurrent states.
    pub fn state_elements(&self) -> [usize; 2] {
        let sequences = self.cu_seqlens.len() - 1;
        let (heads, channels) = (self.spec.heads, self.spec.conv().total_channels());
        let conv = channels * (self.spec.width - 1);
        [conv, heads.value * heads.key_dim * heads.value_dim].map(|each| sequences * each)
    }

    /// Rows of the projections, a, b and y; states that there are; weights: each once.
    pub fn minimal_bytes(&self, state_dtype: Dtype) -> usize {
        let s = &self.spec;
        let tokens = self.cu_seqlens[self.cu_seqlens.len() - 1] as usize;
        let row = columns(&s.conv()) + s.heads.value * (s.heads.value_dim + 2);
        let [conv, recurrent] = self.state_elements();
        let states = conv * s.dtype.size() + recurrent * state_dtype.size();
        let accesses = 1 + usize::from(self.states.is_some());
        let vectors = [&self.a_log, &self.dt_bias, &self.norm_weight];
        let weights = vectors.into_iter().chain([&self.conv_weight]);
        let weights: usize = weights.map(|t| t.bytes.len()).sum();
        tokens * row * s.dtype.size() + accesses * states + weights
    }

    /// Rows of q, k, v and z as they lie on a device.
    pub fn projection_rows(&self, layout: RowLayout) -> Tensor {
        let column = |c| layout.column(&self.spec.heads, c);
        placed(&self.projections, columns(&self.spec.conv()), column)
    }

    /// Rows of b and a as they lie on a device.
    pub fn gate_rows(&self, layout: RowLayout) -> Tensor {
        let heads = self.spec.heads.value;
        let b = self.b.values.chunks_exact(heads);
        let rows = b.zip(self.a.values.chunks_exact(heads));
        let flat: Vec<f32> = rows.flat_map(|(b, a)| [b, a].concat()).collect();
        let column = |i: usize| layout.gate_columns(&self.spec.heads, i % heads)[i / heads];
        placed(&Tensor::new(self.spec.dtype, flat), 2 * heads, column)
    }
}

/// Rows of so many elements, of which `i` goes to column `column(i)`.
fn placed(t: &Tensor, row: usize, column: impl Fn(usize) -> usize) -> Tensor {
    let mut out = vec![0.0; t.values.len()];
    for (from, to) in t.values.chunks_exact(row).zip(out.chunks_exact_mut(row)) {
        for (i, element) in from.iter().enumerate() {
            to[column(i)] = *element;
        }
    }
    Tensor::new(t.dtype, out)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn states_are_transposed_and_back() {
        // Two sequences, ten channels, two columns.
        let states: Vec<u8> = (0..40).flat_map(|i| [i, 0]).collect();
        let pool = transposed(&states, [10, 2]);
        assert_eq!(pool[2 * 20..2 * 23], [20, 0, 22, 0, 24, 0]);
        assert_eq!(pool[2 * 10], 1);
        assert_eq!(transposed(&pool, [2, 10]), states);
    }

    #[test]
    fn states_in_slots() {
        // Two sequences, the second one without tokens, in three slots of two elements.
        let pool = Pool {
            slots: 3,
            state_bytes: 4,
            cu_seqlens: &[0, 1, 1],
        };
        let initial = Tensor::new(Dtype::Bf16, vec![1.0, 2.0, 3.0, 4.0]);
        let before = Tensor::from_bytes(Dtype::Bf16, pool.before(Some(&initial)));
        assert_eq!(before.values[2..], [3.0, 4.0, 1.0, 2.0]);
        let (states, others) = pool.split(&before, Some(&initial));
        assert_eq!(
            (states, others.slots, others.changed),
            (initial.clone(), 1, 0)
        );
        let now = Tensor::new(Dtype::Bf16, vec![0.0, 0.0, 5.0, 6.0, 7.0, 8.0]);
        let (states, others) = pool.split(&now, Some(&initial));
        assert_eq!(
            (states.values, others.changed),
            (vec![7.0, 8.0, 5.0, 6.0], 2)
        );
        let (states, _) = pool.split(&now, None);
        assert_eq!(states.values, [7.0, 8.0, 0.0, 0.0]);
    }

    #[test]
    fn columns_of_channels() {
        let heads = Heads::new(2, 4, 2, 3);
        assert_eq!(RowLayout::Flat.column(&heads, 9), 9);
        // Groups of 2 + 2 + 6 + 6 columns.
        let columns = [0, 3, 4, 7, 8, 13, 14].map(|c| RowLayout::Interleaved.column(&heads, c));
        assert_eq!(columns, [0, 17, 2, 19, 4, 9, 20]);
        let gates = [0, 1, 2].map(|h| RowLayout::Interleaved.gate_columns(&heads, h));
        assert_eq!(gates, [[0, 2], [1, 3], [4, 6]]);
        assert_eq!(RowLayout::Flat.gate_columns(&heads, 3), [3, 7]);
    }

    #[test]
    fn least_bytes_of_a_convolution() {
        let spec = ConvSpec::new(1, 2, 2, 3);
        let mut data = ConvData::draw(spec, RowLayout::Flat, &[0, 2], 0);
        assert_eq!(data.minimal_bytes(), 2 * (2 * 2 * 10 + 40 + 30));
        data.draw_state(0);
        assert_eq!(data.minimal_bytes(), 2 * (2 * 2 * 10 + 40 + 2 * 30));
    }
}

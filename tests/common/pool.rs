//! A case whose states are slots of a pool, updated in place.

use deltawave::runtime::{Context, Stream};
use deltawave::state::{StateMut, StatePool};
use deltawave::tensor::Buffer;
use deltawave::types::Dtype;
use deltawave_lab::inputs::Tensor as HostTensor;

use super::{Case, Data, Loaded, Output, Repeats, StateKind, assert_same_bits, repeated, run};

/// The slots of a case's sequences. Its initial states are of the pool's kind, and lie in the slots that are read.
#[derive(Clone, Debug)]
pub struct PoolCase {
    pub kind: StateKind,
    /// How many there are.
    pub size: usize,
    /// What each sequence reads; absent: sequence n has slot n.
    pub slots: Option<Vec<i32>>,
    /// Absent: the same.
    pub write_slots: Option<Vec<i32>>,
    /// Whether the plan is given the slots, or each launch.
    pub planned: bool,
    /// Elements between heads and between slots.
    pub gaps: [usize; 2],
}

impl PoolCase {
    pub fn new(kind: StateKind, size: usize, slots: &[i32]) -> Self {
        PoolCase {
            kind,
            size,
            slots: Some(slots.to_vec()),
            write_slots: None,
            planned: false,
            gaps: [0, 0],
        }
    }

    fn read(&self, sequence: usize) -> Option<usize> {
        self.valid(self.slots.as_ref(), sequence)
    }

    fn write(&self, sequence: usize) -> Option<usize> {
        let slots = self.write_slots.as_ref().or(self.slots.as_ref());
        self.valid(slots, sequence)
    }

    fn valid(&self, slots: Option<&Vec<i32>>, sequence: usize) -> Option<usize> {
        let slot = slots.map_or(sequence as i32, |slots| slots[sequence]);
        usize::try_from(slot).ok().filter(|&slot| slot < self.size)
    }

    /// The slots that the sequences leave their states in.
    pub fn written(&self, case: &Case) -> Vec<Option<usize>> {
        (0..case.lengths.len()).map(|n| self.write(n)).collect()
    }
}

/// A pool on the device.
pub struct LoadedPool {
    pub(super) buffer: Buffer<u8>,
    kind: StateKind,
    shape: [usize; 4],
    strides: [usize; 4],
    before: Vec<u8>,
    slots: Option<Buffer<i32>>,
    write_slots: Option<Buffer<i32>>,
}

impl LoadedPool {
    /// Initial states in their slots, and NaN in all others and in between.
    pub fn new(context: &Context, case: &Case, data: &Data, pool: &PoolCase) -> Self {
        let s = &case.spec;
        let mut out = Self::of_strides(context, case, pool.kind, pool.size, pool.gaps);
        let size = pool.kind.dtype.size();
        let initial = data.initial.as_ref().expect("initial states");
        let ordered = super::loaded::reorder(
            &initial.values,
            pool.kind.layout,
            s.heads.key_dim,
            s.heads.value_dim,
        );
        let dense = HostTensor::new(pool.kind.dtype, ordered).bytes;
        for (n, slot) in (0..case.lengths.len()).filter_map(|n| Some((n, pool.read(n)?))) {
            let [_, heads, rows, _] = out.shape;
            for_rows(out.shape, out.strides, slot, |row, to, length| {
                let from = (n * heads * rows + row) * length;
                out.before[to * size..][..length * size]
                    .copy_from_slice(&dense[from * size..][..length * size]);
            });
        }
        let upload = |slots: &Option<Vec<i32>>| {
            let slots = slots.as_ref().filter(|_| !pool.planned);
            slots.map(|slots| context.upload(slots).expect("memory"))
        };
        (out.slots, out.write_slots) = (upload(&pool.slots), upload(&pool.write_slots));
        out.reset();
        out
    }

    /// NaN everywhere.
    pub fn empty(context: &Context, case: &Case, kind: StateKind, size: usize) -> Self {
        Self::of_strides(context, case, kind, size, [0, 0])
    }

    fn of_strides(
        context: &Context,
        case: &Case,
        kind: StateKind,
        size: usize,
        gaps: [usize; 2],
    ) -> Self {
        let mut shape = super::case::state_shape(case, kind.layout);
        shape[0] = size;
        let [_, heads, rows, columns] = shape;
        let row = columns + kind.pad;
        let head = rows * row + gaps[0];
        let strides = [heads * head + gaps[1], head, row, 1];
        let before = vec![0xff; (size * strides[0] + 3) * kind.dtype.size()];
        LoadedPool {
            buffer: context.upload(&before).expect("memory"),
            kind,
            shape,
            strides,
            before,
            slots: None,
            write_slots: None,
        }
    }

    pub(super) fn state_mut(&mut self) -> deltawave::Result<StateMut<'_>> {
        let (dtype, layout) = (self.kind.dtype, self.kind.layout);
        let tensor = (self.buffer).tensor_of_mut(dtype, self.shape, self.strides, 0)?;
        Ok(StateMut { tensor, layout })
    }

    pub(super) fn view(&mut self) -> deltawave::Result<StatePool<'_>> {
        let (dtype, layout) = (self.kind.dtype, self.kind.layout);
        let tensor = (self.buffer).tensor_of_mut(dtype, self.shape, self.strides, 0)?;
        Ok(StatePool {
            tensor,
            layout,
            slots: self.slots.as_ref().map(Into::into),
            write_slots: self.write_slots.as_ref().map(Into::into),
        })
    }

    /// As before the launch.
    pub fn reset(&mut self) {
        self.buffer.write(&self.before).expect("as many bytes");
    }

    /// The states of slots, NaN for none; no other byte may have changed.
    pub fn read(&self, case: &Case, slots: &[Option<usize>], stream: &Stream) -> Vec<f32> {
        let size = self.kind.dtype.size();
        let mut after = self.buffer.download(stream).expect("a copy");
        let [_, heads, rows, columns] = self.shape;
        let each = heads * rows * columns;
        let mut out = Vec::with_capacity(slots.len() * each);
        for slot in slots {
            let mut bytes = vec![0xff; each * size];
            if let Some(slot) = *slot {
                for_rows(self.shape, self.strides, slot, |row, at, length| {
                    let there = at * size..(at + length) * size;
                    bytes[row * length * size..][..length * size]
                        .copy_from_slice(&after[there.clone()]);
                    after[there.clone()].copy_from_slice(&self.before[there]);
                });
            }
            let values = HostTensor::from_bytes(self.kind.dtype, bytes).values;
            let (k, v) = (case.spec.heads.key_dim, case.spec.heads.value_dim);
            out.extend(self.kind.layout.to_key_major(&values, k, v));
        }
        assert!(
            after == self.before,
            "bytes of other slots, or between them, were written"
        );
        out
    }
}

/// Calls f(row of the slot, its first element in memory, its length) for all rows of a slot.
fn for_rows(
    [_, heads, rows, columns]: [usize; 4],
    strides: [usize; 4],
    slot: usize,
    mut f: impl FnMut(usize, usize, usize),
) {
    for row in 0..heads * rows {
        let at = slot * strides[0] + row / rows * strides[1] + row % rows * strides[2];
        f(row, at, columns);
    }
}

/// Runs a case on a pool twice, everything poisoned before each: the same bits both times. States of sequences that
/// leave none are NaN.
pub fn run_pool(context: &Context, case: &Case, data: &Data, pool: &PoolCase) -> Output {
    let stream = context.stream().expect("a stream");
    let mut loaded = Loaded::on_pool(context, case, data, pool);
    let once = || {
        loaded.poison(&stream);
        loaded.reset_states();
        loaded.launch(case, &stream).expect("a launch");
        let mut output = loaded.read(case, &stream);
        output.state = Some(loaded.pool_states(case, pool, &stream));
        output
    };
    let same = |a: &Output, b: &Output| assert_same_bits(a, b, "run to run");
    repeated(context, Repeats::Two, once, same)
}

/// Runs a case with states of their own and on a pool: the same bits, zeros as outputs of padding. Returns the former.
pub fn check_pool(context: &Context, case: &Case, pool: &PoolCase) -> Output {
    let mut apart = case.clone();
    (apart.initial, apart.final_state) = (Some(pool.kind), Some(pool.kind));
    let sequences = case.lengths.len();
    let flags = case.has_initial.clone().unwrap_or(vec![1; sequences]);
    let has = (0..sequences).map(|n| flags[n] * u8::from(pool.read(n).is_some()));
    apart.has_initial = Some(has.collect());
    let data = apart.data();
    let expected = run(context, &apart, &data);
    let (mut wanted, row) = (
        expected.clone(),
        case.spec.heads.value * case.spec.heads.value_dim,
    );
    let states = wanted.state.as_mut().expect("states");
    let each = states.len() / sequences;
    let nan = HostTensor::from_bytes(pool.kind.dtype, vec![0xff; pool.kind.dtype.size()]).values[0];
    let mut begin = 0;
    for (n, length) in case.lengths.iter().enumerate() {
        let end = begin + length * row;
        // In a pool, a sequence without tokens writes nothing: its slot holds what it may be read as, or NaN.
        if *length == 0 && pool.write(n).is_some() {
            let state = &mut states[n * each..(n + 1) * each];
            match (&data.initial, pool.read(n) == pool.write(n)) {
                (Some(initial), true) => {
                    state.copy_from_slice(&initial.values[n * each..(n + 1) * each]);
                }
                _ => state.fill(nan),
            }
        }
        if pool.write(n).is_none() {
            states[n * each..(n + 1) * each].fill(nan);
            if pool.read(n).is_none() {
                wanted.o[begin..end].fill(0.0);
            }
        }
        begin = end;
    }
    let mut in_place = case.clone();
    in_place.initial = Some(pool.kind);
    let output = run_pool(context, &in_place, &data, pool);
    assert_same_bits(&wanted, &output, &format!("a pool: {pool:?}"));
    expected
}

//! A case whose launches write states in the course of sequences.

use deltawave::prefill::{Snapshot, Snapshots};
use deltawave::runtime::Context;
use deltawave::tensor::Buffer;

use super::{
    Case, Data, Loaded, LoadedPool, Output, PoolCase, Repeats, StateKind, assert_same_bits,
    repeated,
};

/// The states that are wanted, and where.
#[derive(Clone, Debug)]
pub struct SnapshotCase {
    /// Of a tensor of so many slots; absent: the pool.
    pub to: Option<(StateKind, usize)>,
    pub list: Vec<Snapshot>,
    /// Whether the plan is given the slots, or each launch.
    pub planned: bool,
}

/// The same on the device.
pub struct LoadedSnapshots {
    pub(super) to: Option<LoadedPool>,
    pub(super) slots: Option<Buffer<i32>>,
}

impl LoadedSnapshots {
    pub(super) fn new(context: &Context, case: &Case, snapshots: &SnapshotCase) -> Self {
        let to = snapshots.to.as_ref();
        let cu = case.cu_seqlens();
        // What is not wanted: negative, or a slot that there is not.
        let mut table: Vec<i32> = (0..case.tokens() / 64 + case.lengths.len())
            .map(|i| [-1, i32::MIN, i32::MAX, 1 << 20][i % 4])
            .collect();
        for s in &snapshots.list {
            let entry = cu[s.sequence] as usize / 64 + s.sequence + s.tokens / 64 - 1;
            table[entry] = s.slot as i32;
        }
        LoadedSnapshots {
            to: to.map(|&(kind, size)| LoadedPool::empty(context, case, kind, size)),
            slots: (!snapshots.planned).then(|| context.upload(&table).expect("memory")),
        }
    }

    pub(super) fn view(&mut self) -> deltawave::Result<Snapshots<'_>> {
        Ok(Snapshots {
            to: match &mut self.to {
                Some(to) => Some(to.state_mut()?),
                None => None,
            },
            slots: self.slots.as_ref().map(Into::into),
        })
    }
}

/// Runs a case twice, everything poisoned before each: the same bits both times. The output, and the snapshots one after
/// the other, `[HV, K, V]` each.
pub fn run_snapshots(
    context: &Context,
    case: &Case,
    data: &Data,
    pool: Option<&PoolCase>,
    snapshots: &SnapshotCase,
) -> (Output, Vec<f32>) {
    let stream = context.stream().expect("a stream");
    let mut loaded = match pool {
        Some(pool) => Loaded::on_pool(context, case, data, pool),
        None => Loaded::new(context, case, data),
    }
    .with_snapshots(context, case, snapshots);
    let slots: Vec<_> = snapshots.list.iter().map(|s| Some(s.slot)).collect();
    let once = || {
        loaded.poison(&stream);
        loaded.reset_states();
        loaded.launch(case, &stream).expect("a launch");
        let mut output = loaded.read(case, &stream);
        let to = loaded.snapshots.as_ref().and_then(|s| s.to.as_ref());
        let taken = match (to, &loaded.pool, pool) {
            (Some(to), _, _) => to.read(case, &slots, &stream),
            (None, Some(loaded), Some(pool)) => {
                let sequences = pool.written(case);
                let mut all =
                    loaded.read(case, &[sequences.clone(), slots.clone()].concat(), &stream);
                let each = all.len() / (sequences.len() + slots.len());
                let taken = all.split_off(sequences.len() * each);
                output.state = Some(all);
                taken
            }
            _ => panic!("snapshots without a tensor"),
        };
        (output, taken)
    };
    repeated(context, Repeats::Two, once, |a: &(Output, Vec<f32>), b| {
        assert_same_bits(&a.0, &b.0, "run to run");
        assert!(super::bits(&a.1) == super::bits(&b.1), "run to run");
    })
}

//! Running one prefill on the device under hostile conditions, and judging it by the oracle.
//!
//! | what | file |
//! |---|---|
//! | a case: what is run, its inputs, what a device made of them | `case.rs` |
//! | where elements lie in device memory | `placement.rs` |
//! | a case's tensors and plan on the device | `loaded.rs` |
//! | states in a pool | `pool.rs` |
//! | requests that are to be refused | `requests.rs` |
//! | states in the course of sequences | `snapshots.rs` |
//! | results beside the oracle | `judge.rs` |
//! | batches on views of one's own making | `views.rs` |
#![allow(dead_code, unused_imports, reason = "each test uses a part of it")]

pub mod backward;
mod case;
mod judge;
mod loaded;
mod placement;
mod pool;
mod requests;
mod snapshots;
mod views;

use std::sync::OnceLock;

use deltawave::runtime::{Backend, Context};

pub use case::{Case, Data, Entry, GateKind, Layout, Output, StateKind, spec};
pub use judge::{Judged, bar, check, check_data, check_output, judge};
pub use loaded::{Loaded, assert_same_bits, bits, run, run_repeated};
pub use pool::{LoadedPool, PoolCase, check_pool, run_pool};
pub use requests::{Memory, View, expect, view};
pub use snapshots::{LoadedSnapshots, SnapshotCase, run_snapshots};
pub use views::{Views, run_views};

/// The device of the tests: a card where there is one, else the simulator.
pub fn context() -> Context {
    static CONTEXT: OnceLock<Context> = OnceLock::new();
    let make = || {
        // The simulator makes every check that it knows, unless the environment says otherwise.
        if std::env::var_os("DELTAWAVE_SIM_CHECKS").is_none() {
            let options = deltawave_sim::hip::options();
            deltawave_sim::hip::set_options(deltawave_sim::launch::Options {
                checks: deltawave_sim::sanitize::Checks::ALL,
                ..options
            });
        }
        Context::new(Backend::Auto, 0).expect("a device with kernels")
    };
    CONTEXT.get_or_init(make).clone()
}

/// Whether the device is the simulator.
pub fn simulated(context: &Context) -> bool {
    context.backend() == Backend::Simulator
}

/// Launches that a run makes, of which all must leave the same bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Repeats {
    /// Two. Also finds inputs that a launch changes.
    Two,
    /// Two on a GPU. One on the simulator, whose checks find races by the accesses.
    OneSimulated,
}

/// Runs a launch as often as `repeats` says; `same` compares the results.
pub fn repeated<T>(
    context: &Context,
    repeats: Repeats,
    mut once: impl FnMut() -> T,
    same: impl Fn(&T, &T),
) -> T {
    let first = once();
    if repeats == Repeats::Two || !simulated(context) {
        same(&first, &once());
    }
    first
}

/// Whether the device is one of AMD's, for which plans have a fused path, `prefill_short` and early starts to choose from.
pub fn is_cdna(context: &Context) -> bool {
    context.device().arch.starts_with("gfx")
}

/// Whether so many bytes can be allocated, of which few are touched: the simulator commits no more than those.
pub fn has_room(context: &Context, bytes: usize) -> bool {
    if simulated(context) {
        return true;
    }
    let (mut free, mut total) = (0, 0);
    // SAFETY: both are valid for a write.
    unsafe { context.hip().hipMemGetInfo(&mut free, &mut total) }.expect("sizes");
    if free < bytes {
        println!("skipped: it takes {bytes} bytes, and {free} are free");
    }
    free >= bytes
}

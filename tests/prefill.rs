//! Prefill on the device against the f64 oracle: directed tests. 'Trap n' counts the traps of public implementations
//! that each has to catch; 'survey n' those of the longer list in the survey of the field.

mod common;
mod fake_collectives;

#[path = "prefill/backward.rs"]
mod backward;
#[path = "prefill/backward_ranks.rs"]
mod backward_ranks;
#[path = "prefill/backward_rounds.rs"]
mod backward_rounds;
#[path = "prefill/backward_segments.rs"]
mod backward_segments;
#[path = "prefill/by_gates.rs"]
mod by_gates;
#[path = "prefill/collectives.rs"]
mod collectives;
#[path = "prefill/device_cuts.rs"]
mod device_cuts;
#[path = "prefill/early.rs"]
mod early;
#[path = "prefill/forget.rs"]
mod forget;
#[path = "prefill/from_hbm.rs"]
mod from_hbm;
#[path = "prefill/fused.rs"]
mod fused;
#[path = "prefill/launch.rs"]
mod launch;
#[path = "prefill/layout.rs"]
mod layout;
#[path = "prefill/numerics.rs"]
mod numerics;
#[path = "prefill/pool.rs"]
mod pool;
#[path = "prefill/ranks.rs"]
mod ranks;
#[path = "prefill/segments.rs"]
mod segments;
#[path = "prefill/short.rs"]
mod short;
#[path = "prefill/snapshots.rs"]
mod snapshots;
#[path = "prefill/tails.rs"]
mod tails;
#[path = "prefill/units.rs"]
mod units;
#[path = "prefill/varlen.rs"]
mod varlen;

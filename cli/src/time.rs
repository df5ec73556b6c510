//! Times of replays as a report shows them.

use deltawave_lab::replay::Times;

use crate::table::{Table, bytes};

/// The table.
pub fn text(times: &Times) -> String {
    let mut table = Table::new(1, &["replayed", "median us", "fastest", "slowest"]);
    for t in &times.parts {
        let numbers = [t.median_us, t.fastest_us, t.slowest_us];
        let numbers = numbers.map(|us| format!("{us:.1}"));
        table.row([t.what.to_owned()].into_iter().chain(numbers));
    }
    format!(
        "{table}  {} runs each, as graphs; {} filled before each run\n",
        times.runs,
        bytes(times.flushed_bytes as u64)
    )
}

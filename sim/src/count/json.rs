//! Counters as JSON.

use std::fmt::Write as _;

use super::Totals;
use crate::code_object::Kernel;
use crate::cost::Class;
use crate::launch::Stats;

/// One launch's counters as one JSON object on one line. Includes the modelled time in microseconds if there is one.
pub fn json(
    kernel: &Kernel,
    grid: [u32; 3],
    block: [u32; 3],
    stats: &Stats,
    totals: &Totals,
    modelled: Option<(&str, f64)>,
) -> String {
    let mut out = String::from("{\"kernel\":");
    string(&mut out, kernel.name());
    let _ = write!(out, ",\"grid\":{grid:?},\"block\":{block:?}");
    let mut field = |name: &str, value: &dyn std::fmt::Display| {
        let _ = write!(out, ",\"{name}\":{value}");
    };
    field("workgroups", &stats.workgroups);
    field("waves", &stats.waves);
    field("vgprs", &kernel.descriptor.vgprs());
    field("sgprs", &kernel.descriptor.sgprs());
    if let Some(counts) = &stats.counts {
        let o = &counts.occupancy;
        field("workgroups_per_cu", &o.workgroups);
        field("waves_per_simd", &o.waves_per_simd());
        field("occupancy_limit", &format_args!("\"{}\"", o.limit.name()));
    }
    if let Some((gpu, us)) = modelled {
        field("gpu", &format_args!("\"{gpu}\""));
        field("modelled_us", &us);
    }
    for (name, value) in totals.figures() {
        field(name, &value);
    }
    out += ",\"classes\":{";
    let classes = Class::ALL.map(|c| (c.name(), totals.of_class(c)));
    members(&mut out, classes);
    out += "},\"opcodes\":{";
    members(&mut out, totals.opcodes.iter().map(|(name, n)| (*name, *n)));
    out += "}}";
    out
}

fn members<'a>(out: &mut String, members: impl IntoIterator<Item = (&'a str, u64)>) {
    for (i, (name, value)) in members.into_iter().enumerate() {
        let comma = if i > 0 { "," } else { "" };
        let _ = write!(out, "{comma}\"{name}\":{value}");
    }
}

fn string(out: &mut String, text: &str) {
    out.push('"');
    for c in text.chars() {
        match c {
            '"' | '\\' => out.extend(['\\', c]),
            c if c < ' ' => {
                let _ = write!(out, "\\u{:04x}", c as u32);
            }
            c => out.push(c),
        }
    }
    out.push('"');
}

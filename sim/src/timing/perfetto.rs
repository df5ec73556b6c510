//! Writes a compute unit's waves as a trace for <https://ui.perfetto.dev> and chrome://tracing.

use std::fmt::Write as _;

use super::{Estimate, Stall};
use crate::disasm;
use crate::inst::Program;

/// The events of an estimate as JSON: one process per SIMD, one thread per wave. Each instruction is a slice, and its
/// stall a slice before it. Times are modelled.
pub fn perfetto(estimate: &Estimate, program: &Program) -> String {
    let us = |clocks: u64| clocks as f64 / (estimate.gpu.ghz * 1e3);
    let mut out = String::from("{\"displayTimeUnit\":\"ns\",\"traceEvents\":[\n");
    for simd in 0..4 {
        let _ = writeln!(
            out,
            "{{\"ph\":\"M\",\"name\":\"process_name\",\"pid\":{simd},\"args\":{{\"name\":\"{} SIMD {simd} (modelled)\"}}}},",
            estimate.gpu.name
        );
    }
    let mut slice = |e: &super::Event, name: &str, kind: &str, from: u64, to: u64, more: &str| {
        let thread = e.wave.0 * 16 + u32::from(e.wave.1);
        let _ = writeln!(
            out,
            "{{\"ph\":\"X\",\"pid\":{},\"tid\":{thread},\"name\":\"{name}\",\"cat\":\"{kind}\",\"ts\":{:.4},\"dur\":{:.4}{more}}},",
            e.simd,
            us(from),
            us(to - from),
        );
    };
    for e in &estimate.events {
        if let Some(stall) = e.stall.filter(|s| *s != Stall::Issue || e.issued > e.from) {
            slice(e, stall.name(), "stall", e.from, e.issued, "");
        }
        let (Some(inst), Some(&offset)) = (
            program.insts.get(e.at as usize),
            program.offsets.get(e.at as usize),
        ) else {
            continue;
        };
        let text = disasm::text(inst, u64::from(offset));
        let name = text.split_whitespace().next().unwrap_or_default();
        let more = format!(
            ",\"args\":{{\"pc\":\"{offset:#x}\",\"instruction\":\"{}\"}}",
            text.escape_default()
        );
        slice(
            e,
            name,
            "instruction",
            e.issued,
            e.issued + super::machine::TURN,
            &more,
        );
    }
    // The last event, without a comma after it.
    out.push_str("{\"ph\":\"M\",\"name\":\"trace_name\",\"pid\":0,\"args\":{\"name\":\"one compute unit, modelled\"}}\n]}\n");
    out
}

//! How fast the simulator runs this crate's own kernels: wave-instructions per second, on one core and on all.
//!
//! `cargo bench --bench simulator` prints a table; `cargo bench --bench simulator -- --json` one JSON line per row.
//! With `--one-core` only the first rows: fast products, one thread. `DELTAWAVE_SIM_CHECKS=all` measures with all checks.

use std::error::Error;

use deltawave::gates::Gating;
use deltawave::prefill::{Prefill, PrefillSpec, PrefillTensors};
use deltawave::runtime::Context;
use deltawave::state::StateMut;
use deltawave::state::States;
use deltawave::types::StateLayout;
use deltawave::workspace::Workspace;
use deltawave_lab::inputs::{InputSpec, Inputs};
use deltawave_sim::exec::MfmaMode;
use deltawave_sim::hip;
use half::bf16;

const TOKENS: usize = 1024;
const KEY_HEADS: usize = 4;
const VALUE_HEADS: usize = 8;
const DIM: usize = 128;

fn main() -> Result<(), Box<dyn Error>> {
    let json = std::env::args().any(|a| a == "--json");
    let one_core = std::env::args().any(|a| a == "--one-core");
    let context = Context::simulator()?;
    let stream = context.stream()?;
    let spec = PrefillSpec::new(KEY_HEADS, VALUE_HEADS, DIM, DIM);
    let inputs = Inputs::new(InputSpec {
        tokens: TOKENS,
        key_heads: KEY_HEADS,
        value_heads: VALUE_HEADS,
        ..InputSpec::default()
    });
    let rounded = |values: &[f32]| {
        values
            .iter()
            .map(|x| bf16::from_f32(*x))
            .collect::<Vec<_>>()
    };
    let q = context.upload(&rounded(&inputs.q.values))?;
    let k = context.upload(&rounded(&inputs.k.values))?;
    let v = context.upload(&rounded(&inputs.v.values))?;
    let g = context.upload(&inputs.g)?;
    let beta = context.upload(&inputs.beta)?;
    let mut o = context.alloc::<bf16>(TOKENS * VALUE_HEADS * DIM)?;
    let mut state = context.alloc::<f32>(VALUE_HEADS * DIM * DIM)?;
    let plan = Prefill::packed(&context, spec, &[0i32, TOKENS as i32], TOKENS)?;
    let mut workspace = context.alloc::<u8>(plan.workspace_bytes())?;

    let chunk_heads = (TOKENS / 64 * VALUE_HEADS) as u64;
    if !json {
        println!(
            "{TOKENS} tokens, {KEY_HEADS} key heads, {VALUE_HEADS} value heads, {DIM} by {DIM}, bf16\n"
        );
        println!(
            "{:<28} {:>6} {:>8} {:>14} {:>22} {:>12}",
            "kernel", "mfma", "threads", "instructions", "per chunk and head", "million/s"
        );
    }
    let rows = [
        (MfmaMode::Fast, Some(1)),
        (MfmaMode::Fast, None),
        (MfmaMode::Exact, None),
    ];
    for (mode, threads) in rows.into_iter().take(if one_core { 1 } else { rows.len() }) {
        let mut options = hip::options();
        options.mfma = mode;
        options.threads = threads;
        hip::set_options(options);
        let mut best: Vec<(String, u64, f64)> = Vec::new();
        for _ in 0..5 {
            hip::reset_statistics();
            let tensors = PrefillTensors {
                cu_seqlens: None,
                q: q.tensor([TOKENS, KEY_HEADS, DIM])?.into(),
                k: k.tensor([TOKENS, KEY_HEADS, DIM])?.into(),
                v: v.tensor([TOKENS, VALUE_HEADS, DIM])?.into(),
                gating: Gating::Given {
                    g: Some(g.tensor([TOKENS, VALUE_HEADS])?.into()),
                    beta: Some(beta.tensor([TOKENS, VALUE_HEADS])?.into()),
                },
                states: States::Separate {
                    initial: None,
                    last: Some(StateMut {
                        tensor: state.tensor_mut([1, VALUE_HEADS, DIM, DIM])?,
                        layout: StateLayout::KeyMajor,
                    }),
                },
                o: o.tensor_mut([TOKENS, VALUE_HEADS, DIM])?.into(),
                snapshots: None,
            };
            plan.launch(&stream, &tensors, Workspace::new(&mut workspace))?;
            stream.synchronize()?;
            for (i, (name, s)) in hip::statistics().into_iter().enumerate() {
                match best.get_mut(i) {
                    Some(row) => row.2 = row.2.min(s.seconds),
                    None => best.push((name, s.wave_instructions, s.seconds)),
                }
            }
        }
        let threads = threads.map_or("all".to_owned(), |n| n.to_string());
        for (name, instructions, seconds) in best {
            let rate = instructions as f64 / seconds;
            let mode = format!("{mode:?}").to_lowercase();
            if json {
                println!(
                    "{{\"kernel\":\"{name}\",\"mfma\":\"{mode}\",\"threads\":\"{threads}\",\"wave_instructions\":{instructions},\
                     \"seconds\":{seconds:.6},\"wave_instructions_per_second\":{rate:.0}}}"
                );
            } else {
                let per = instructions / chunk_heads;
                println!(
                    "{name:<28} {mode:>6} {threads:>8} {instructions:>14} {per:>22} {:>12.1}",
                    rate / 1e6
                );
            }
        }
    }
    Ok(())
}

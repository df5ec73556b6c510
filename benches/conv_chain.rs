//! The fused convolution beside the two kernels that serving engines have had in its place, on the simulator: bytes and
//! launches are counted, times modelled.
//!
//! `cargo bench --bench conv_chain -- [GPU] [HK,HV] [TOKENS]`, for instance `mi300x 16,32 8192`.

#[path = "conv_chain/mod.rs"]
mod conv_chain;

use std::error::Error;
use std::path::Path;

use conv_chain::{Counted, compare};
use deltawave::conv::ConvSpec;
use deltawave_sim::gpu::Gpu;

fn main() -> Result<(), Box<dyn Error>> {
    let given: Vec<String> = std::env::args()
        .skip(1)
        .filter(|a| a != "--bench")
        .collect();
    let argument =
        |i: usize, default: &str| given.get(i).map_or(default, String::as_str).to_owned();
    let gpu =
        Gpu::named(&argument(0, "mi300x")).ok_or("known GPUs are mi300x, mi325x and mi308x")?;
    let heads = argument(1, "16,32");
    let (hk, hv) = heads.split_once(',').ok_or("heads are HK,HV")?;
    let spec = ConvSpec::new(hk.parse()?, hv.parse()?, 128, 128);
    let tokens = argument(2, "8192").parse()?;
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("conv_chain");
    let found = compare(gpu, spec, tokens, &folder)?;

    let minimal = found.minimal_bytes as f64;
    println!(
        "{}, {hk} and {hv} heads of 128, {tokens} tokens, bf16: at least {:.1} MB\n",
        gpu.name,
        minimal / 1e6
    );
    println!(
        "{:<24} {:>10} {:>8} {:>14} {:>8} {:>12}",
        "kernel", "touched MB", "minimal", "into dies MB", "minimal", "modelled us"
    );
    let row = |name: &str, unique: u64, fill: u64, us: f64| {
        let (unique, fill) = (unique as f64, fill as f64);
        println!(
            "{name:<24} {:>10.1} {:>8.3} {:>14.1} {:>8.3} {us:>12.1}",
            unique / 1e6,
            unique / minimal,
            fill / 1e6,
            fill / minimal
        );
    };
    for (name, launches) in [("fused", &found.fused), ("chain", &found.chain)] {
        for l in launches {
            row(&l.kernel, l.unique_bytes, l.l2_fill_bytes, l.modelled_us);
        }
        let sum = |of: fn(&Counted) -> u64| launches.iter().map(of).sum();
        let us = launches.iter().map(|l| l.modelled_us).sum();
        let title = format!("{name}: {} launches", launches.len());
        row(
            &title,
            sum(|l| l.unique_bytes),
            sum(|l| l.l2_fill_bytes),
            us,
        );
    }
    let apart = found.difference;
    println!(
        "\n{} of {} outputs differ, by at most {} ulp",
        apart.different, apart.elements, apart.max_ulps
    );
    Ok(())
}

//! The bytes that fusing convolution and split saves, beside the two kernels in the same run.

#[path = "../benches/conv_chain/mod.rs"]
mod conv_chain;

use std::path::Path;

use conv_chain::{Counted, compare};
use deltawave::conv::ConvSpec;
use deltawave_sim::gpu::Gpu;

#[test]
fn two_kernels_move_more_than_the_fused_one() {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("conv_chain");
    let gpu = Gpu::named("mi300x").expect("a GPU");
    let found = match compare(gpu, ConvSpec::new(4, 8, 128, 128), 1024, &folder) {
        Ok(found) => found,
        Err(why) => {
            let required = std::env::var("DELTAWAVE_REQUIRE_KERNELS").is_ok_and(|v| v == "1");
            assert!(!required, "{why}");
            println!("skipped: {why}");
            return;
        }
    };
    let names = |launches: &[Counted]| {
        launches
            .iter()
            .map(|l| l.kernel.clone())
            .collect::<Vec<_>>()
    };
    assert_eq!(names(&found.fused), ["dw_conv_bf16"]);
    assert_eq!(names(&found.chain), ["chain_conv", "chain_split"]);
    let ratios = |launches: &[Counted]| {
        let all = [|l: &Counted| l.unique_bytes, |l: &Counted| l.l2_fill_bytes];
        all.map(|of| launches.iter().map(of).sum::<u64>() as f64 / found.minimal_bytes as f64)
    };
    let (fused, chain) = (ratios(&found.fused), ratios(&found.chain));
    println!("of the minimal bytes, touched and into the dies: {fused:?}, the chain {chain:?}");
    assert!(
        fused.iter().all(|ratio| (0.99..1.1).contains(ratio)),
        "{fused:?}"
    );
    // What lies between the two is written and read.
    assert!(chain.iter().all(|ratio| *ratio > 1.95), "{chain:?}");
    let us = |launches: &[Counted]| launches.iter().map(|l| l.modelled_us).sum::<f64>();
    assert!(us(&found.fused) < us(&found.chain));
    // The chain's silu is the short one.
    let apart = found.difference;
    assert!(
        apart.max_ulps <= 1 && apart.equal_share() > 0.99,
        "{apart:?}"
    );
}

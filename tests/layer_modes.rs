//! What the simulator can tell of a layer beyond its results: the same bits and no finding in every order of waves. On a
//! card there is nothing to ask.

#[path = "common/layer/mod.rs"]
mod cases;
mod common;

use cases::{Case, Data, run};
use common::{context, simulated};
use deltawave::layer::LayerSpec;
use deltawave_sim::launch::{Options, WaveOrder};

/// One test, because the options are those of the whole process.
#[test]
fn every_order() {
    let context = context();
    if !simulated(&context) {
        println!("skipped: a card executes in one way");
        return;
    }
    let usual = deltawave_sim::hip::options();
    for device in [false, true] {
        let case = Case {
            padding: 0b10,
            tail: 2,
            device,
            interleaved: device,
            ..Case::new(LayerSpec::new(1, 2, 32, 128), &[1, 1, 1, 66, 0, 3], 3)
        };
        let data = Data::new(&case);
        let expected = run(&context, &case, &data);
        for order in [
            WaveOrder::InStep,
            WaveOrder::Seeded(1),
            WaveOrder::Seeded(2),
        ] {
            deltawave_sim::hip::set_options(Options { order, ..usual });
            let other = run(&context, &case, &data);
            deltawave_sim::hip::set_options(usual);
            assert!(other == expected, "{order:?}: {case:?}");
        }
    }
}

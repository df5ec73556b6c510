//! `prefill_scan` where its operands do not fit in the last cache: on CDNA it requests them in another order, and results
//! are the same.

use deltawave::prefill::PrefillPath;
use deltawave::types::Dtype;
use deltawave_lab::inputs::Gates;

use crate::common::{Case, bits, check_output, context, run, spec};

/// Empty sequences make the records so large that they alone do not fit. The order of loads changes no bit.
#[test]
fn the_order_of_loads_changes_no_bit() {
    for (dtype, k, gates) in [
        (Dtype::Bf16, 128, Gates::Mixed),
        (Dtype::F16, 96, Gates::Normal),
        (Dtype::F16, 64, Gates::Zero),
        // Too few registers for another order.
        (Dtype::Bf16, 144, Gates::Mixed),
    ] {
        let mut case = Case::new(spec(dtype, 1, 2, k, 32), &[330, 64, 75]);
        (case.spec.path, case.gates) = (PrefillPath::Split, gates);
        // States of all the empty sequences would be large.
        case.final_state = None;
        let data = case.data();
        let cached = run(&context(), &case, &data);
        check_output(&case, &data, &cached, 1.15);
        case.lengths.resize(12_000, 0);
        let from_hbm = run(&context(), &case, &data);
        assert!(bits(&cached.o) == bits(&from_hbm.o), "K of {k}");
    }
}

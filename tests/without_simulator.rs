//! The crate as an engine links it: without its feature `simulator` (`make test-engine`).
#![cfg(not(feature = "simulator"))]

use deltawave::Error;
use deltawave::runtime::{Backend, Context};

#[test]
fn the_simulator_is_refused_by_name() {
    let refused = [Context::simulator(), Context::new(Backend::Simulator, 0)];
    for error in refused.map(|context| context.expect_err("there is no simulator")) {
        assert!(matches!(error, Error::NoSimulator), "{error:?}");
        assert!(error.to_string().contains("feature `simulator`"), "{error}");
    }
}

#[test]
fn without_a_gpu_it_is_the_gpu_that_is_missing() {
    if let Err(error) = Context::new(Backend::Auto, 0) {
        assert!(!matches!(error, Error::NoSimulator), "{error:?}");
    }
}

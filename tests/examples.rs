//! The numbered examples run, and what they assert holds.

#[path = "../examples/03-conv.rs"]
mod conv;
#[path = "../examples/08-decode.rs"]
mod decode;
#[path = "../examples/09-engine.rs"]
mod engine;
#[path = "../examples/05-graph.rs"]
mod graph;
#[path = "../examples/06-layer.rs"]
mod layer;
#[path = "../examples/04-norm.rs"]
mod norm;
#[path = "../examples/01-prefill.rs"]
mod prefill;
#[path = "../examples/07-prefix-cache.rs"]
mod prefix_cache;
#[path = "../examples/02-varlen.rs"]
mod varlen;

/// A test for each example.
macro_rules! run {
    ($($name:ident),* $(,)?) => {
        mod runs {
            $(#[test] fn $name() { super::$name::main().expect("the example runs"); })*
        }
    };
}
run!(
    prefill,
    varlen,
    conv,
    norm,
    graph,
    layer,
    prefix_cache,
    decode,
    engine
);

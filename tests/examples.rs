//! The numbered examples run, and what they assert holds.

#[path = "../examples/03-conv.rs"]
mod conv;
#[path = "../examples/05-graph.rs"]
mod graph;
#[path = "../examples/04-norm.rs"]
mod norm;

/// A test for each example.
macro_rules! run {
    ($($name:ident),* $(,)?) => {
        mod runs {
            $(#[test] fn $name() { super::$name::main().expect("the example runs"); })*
        }
    };
}
run!(conv, norm, graph);

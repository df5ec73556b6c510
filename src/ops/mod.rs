//! One module per operation: the spec and tensors that callers write, a plan that checks them, and the kernels' arguments.

pub mod commit;
pub mod conv;
pub mod decode;
pub mod gate;
pub mod layer;
pub mod norm;
pub mod prefill;
pub(crate) mod sums;

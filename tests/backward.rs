//! The backward of what is around the recurrence, and of whole layers: gradients beside f64, everything else untouched.

mod common;

#[path = "backward/conv.rs"]
mod conv;
#[path = "backward/gate.rs"]
mod gate;
#[path = "backward/layer.rs"]
mod layer;
#[path = "backward/norm.rs"]
mod norm;
#[path = "backward/placed.rs"]
mod placed;

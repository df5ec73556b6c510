//! Memory that arguments of a launch share: overlaps are refused by the names of both, with nothing written, and what
//! `docs/reference/aliasing.md` allows has the bits of separate memory.

mod common;

#[path = "aliasing/allowed.rs"]
mod allowed;
#[path = "aliasing/operations.rs"]
mod operations;
#[path = "aliasing/refused.rs"]
mod refused;

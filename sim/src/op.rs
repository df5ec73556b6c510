//! Every instruction of gfx942.

/// An instruction, named as LLVM names it, without the suffix of its encoding (`_e32`, `_e64`, `_sdwa`, `_dpp`).
#[allow(non_camel_case_types, missing_docs)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u16)]
pub enum Op {
    INVALID,
}

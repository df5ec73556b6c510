//! Raw bindings of the HIP runtime.

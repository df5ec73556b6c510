//! HIP kernels for Gated DeltaNet.

//! `src/abi.rs` is what bindgen makes of `hip/kernel_args.h` today. `DELTAWAVE_BLESS=1` rewrites it.

mod bindings;

use std::path::Path;

#[test]
fn bindings_are_current() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    bindings::assert_current(
        &root.join("hip/kernel_args.h"),
        &root.join("src/abi.rs"),
        "//! Arguments of the kernels, generated from `hip/kernel_args.h` by bindgen. Do not edit: see `tests/abi.rs`.",
        "cargo test --test abi",
    );
}

//! `src/abi.rs` is what bindgen makes of `hip/abi.h` today. `DELTAWAVE_BLESS=1` rewrites it.

use std::path::Path;
use std::{env, fs};

fn generate(header: &Path) -> String {
    bindgen::Builder::default()
        .header(header.to_str().expect("the path is UTF-8"))
        .allowlist_item("(dw|DW)_.*")
        .derive_default(true)
        .layout_tests(true)
        .prepend_enum_name(false)
        .use_core()
        .disable_header_comment()
        .raw_line("//! Arguments of the kernels, generated from `hip/abi.h` by bindgen. Do not edit: see `tests/abi.rs`.")
        .raw_line("#![allow(missing_docs, non_camel_case_types, dead_code, clippy::undocumented_unsafe_blocks)]")
        .generate()
        .expect("bindgen reads hip/abi.h")
        .to_string()
}

/// What stays the same when rustfmt, which bindgen uses only where it finds it, lays out text anew.
fn unformatted(text: &str) -> String {
    text.chars()
        .filter(|c| !c.is_whitespace() && *c != ',')
        .collect()
}

#[test]
fn bindings_are_current() {
    if std::panic::catch_unwind(bindgen::clang_version).is_err() {
        assert_ne!(
            env::var("DELTAWAVE_REQUIRE_KERNELS").as_deref(),
            Ok("1"),
            "libclang is missing"
        );
        println!("skipped: libclang is missing");
        return;
    }
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let current = generate(&root.join("hip/abi.h"));
    let path = root.join("src/abi.rs");
    if env::var_os("DELTAWAVE_BLESS").is_some() {
        fs::write(&path, &current).expect("src/abi.rs can be written");
    }
    let committed = fs::read_to_string(&path).unwrap_or_default();
    assert!(
        unformatted(&committed) == unformatted(&current),
        "src/abi.rs is stale: run `DELTAWAVE_BLESS=1 cargo test --test abi`"
    );
}

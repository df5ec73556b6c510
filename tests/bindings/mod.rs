//! Bindings that bindgen makes of a C header are committed, so that users need no libclang; a test holds them current.

use std::path::Path;
use std::{env, fs};

/// Fails where `bindings` is not what bindgen makes of `header` today, and says to run `bless`. With `DELTAWAVE_BLESS=1`
/// it is rewritten. `title` is its first line.
pub fn assert_current(header: &Path, bindings: &Path, title: &str, bless: &str) {
    if std::panic::catch_unwind(bindgen::clang_version).is_err() {
        let required = env::var("DELTAWAVE_REQUIRE_KERNELS").is_ok_and(|v| v == "1")
            || env::var_os("DELTAWAVE_BLESS").is_some();
        assert!(!required, "libclang is missing");
        println!("skipped: libclang is missing");
        return;
    }
    let current = bindgen::Builder::default()
        .header(header.to_str().expect("the path is UTF-8"))
        .allowlist_item("(dwk?|DWK?)_.*")
        .derive_default(true)
        .layout_tests(true)
        .prepend_enum_name(false)
        .generate_comments(false)
        .use_core()
        .disable_header_comment()
        .raw_line(title)
        .raw_line("#![allow(missing_docs, non_camel_case_types, dead_code, clippy::undocumented_unsafe_blocks)]")
        .generate()
        .expect("bindgen reads the header")
        .to_string();
    if env::var_os("DELTAWAVE_BLESS").is_some() {
        fs::write(bindings, &current).expect("the bindings can be written");
    }
    let committed = fs::read_to_string(bindings).unwrap_or_default();
    assert!(
        unformatted(&committed) == unformatted(&current),
        "{} is stale: run `DELTAWAVE_BLESS=1 {bless}`",
        bindings.display()
    );
}

/// What stays the same when rustfmt, which bindgen uses only where it finds it, lays out text anew.
fn unformatted(text: &str) -> String {
    text.chars()
        .filter(|c| !c.is_whitespace() && *c != ',')
        .collect()
}

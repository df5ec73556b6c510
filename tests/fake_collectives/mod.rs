//! A library of collectives that a C compiler makes for a test: ranks are threads or processes on the simulator.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Libraries that this process has compiled.
static COMPILED: AtomicUsize = AtomicUsize::new(0);

/// Compiles the library, under this name in a folder, with an option; nothing without a C compiler. `root`: the repository.
pub fn compile(root: &Path, folder: &Path, name: &str, option: &str) -> Option<PathBuf> {
    std::fs::create_dir_all(folder).expect("a folder");
    let library = folder.join(name);
    let source = root.join("tests/fake_collectives/collectives.c");
    let flags = ["-std=gnu11", "-Wall", "-Werror", "-shared", "-fPIC"];
    let mut compiler = Command::new("cc");
    // Under a name of its own until it is whole: other tests may have the library open.
    let number = COMPILED.fetch_add(1, Ordering::Relaxed);
    let made = folder.join(format!("{name}.{}.{number}", std::process::id()));
    compiler.args(flags).arg(option).arg("-o").arg(&made);
    match compiler.arg(source).status() {
        Ok(status) => assert!(status.success(), "the C compiler"),
        Err(error) => {
            let required = std::env::var("DELTAWAVE_REQUIRE_KERNELS");
            assert_ne!(required.as_deref(), Ok("1"), "{error}");
            println!("skipped: cc: {error}");
            return None;
        }
    }
    std::fs::rename(&made, &library).expect("a file of this folder");
    Some(library)
}

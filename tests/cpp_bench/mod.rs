//! `benches/gdn_bench.cpp`, compiled for tests, and run on the simulator as its `libamdhip64.so`.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::{env, fs};

/// The program.
pub struct Program {
    path: PathBuf,
    /// Where its `libamdhip64.so` lies.
    libraries: PathBuf,
}

impl Program {
    /// Compiles it into a folder of the test's own. None, and a line that says why, where it cannot be compiled or there
    /// are no kernels for the simulator.
    pub fn build(folder: &str) -> Option<Program> {
        match Self::try_build(&Path::new(env!("CARGO_TARGET_TMPDIR")).join(folder)) {
            Ok(program) => Some(program),
            Err(why) => {
                let required = env::var("DELTAWAVE_REQUIRE_KERNELS").is_ok_and(|v| v == "1");
                assert!(!required, "{why}");
                println!("skipped: {why}");
                None
            }
        }
    }

    fn try_build(folder: &Path) -> Result<Program, String> {
        if deltawave::code_objects::for_arch("gfx942").next().is_none() {
            return Err(deltawave::code_objects::why_missing("gfx942"));
        }
        fs::create_dir_all(folder).expect("a folder");
        let drop_in = beside_this_test("libhip_on_simulator.so");
        let library = folder.join("libamdhip64.so");
        fs::copy(&drop_in, &library).expect("the simulator is copied");
        let path = folder.join("gdn_bench");
        let root = Path::new(env!("CARGO_MANIFEST_DIR"));
        let build = ["benches", "../benches"].map(|b| root.join(b).join("gdn_bench/build"));
        let build = build.iter().find(|b| b.is_file()).expect("the script");
        let compiled = Command::new(build)
            .arg(&path)
            .arg(format!("-L{}", folder.display()))
            .output()
            .expect("a shell");
        let said = String::from_utf8_lossy(&compiled.stderr).into_owned();
        match compiled.status.code() {
            Some(0) => Ok(Program {
                path,
                libraries: folder.to_owned(),
            }),
            Some(3) => Err(said),
            _ => panic!("it does not compile:\n{said}"),
        }
    }

    pub fn command(&self) -> Command {
        let mut command = Command::new(&self.path);
        command
            .env("LD_LIBRARY_PATH", &self.libraries)
            .env_remove("DELTAWAVE_HIP_LIBRARY");
        command
    }

    /// The folder of the program.
    pub fn folder(&self) -> &Path {
        &self.libraries
    }
}

/// A library of a dependency, where cargo puts it.
pub fn beside_this_test(library: &str) -> PathBuf {
    let test = env::current_exe().expect("this test's path");
    test.with_file_name(library)
}

// How the kernels are compiled: shared by the build script and by the tests that check its promises.

use std::ffi::OsString;
use std::fmt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::{env, fs, io, thread};

/// A compiler of HIP for AMD GPUs, or of the same sources to PTX for NVIDIA GPUs (`sm_90a`).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Compiler(pub PathBuf);

/// Why a kernel could not be compiled.
#[derive(Debug)]
pub enum CompileError {
    Start(PathBuf, io::Error),
    Output(PathBuf, io::Error),
    Failed {
        source: PathBuf,
        arch: String,
        stderr: String,
    },
}

impl fmt::Display for CompileError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            CompileError::Start(program, e) => write!(f, "cannot start {}: {e}", program.display()),
            CompileError::Output(path, e) => {
                write!(f, "cannot rewrite {}: {e}", path.display())
            }
            CompileError::Failed {
                source,
                arch,
                stderr,
            } => {
                write!(
                    f,
                    "{} does not compile for {arch}:\n{stderr}",
                    source.display()
                )
            }
        }
    }
}

impl std::error::Error for CompileError {}

impl Compiler {
    /// Compilers worth trying, best first: hipcc of a ROCm, its amdclang++, then clang++ of 17 or newer.
    pub fn candidates() -> Vec<Compiler> {
        let mut folders: Vec<PathBuf> = env::var_os("ROCM_PATH")
            .map(|p| PathBuf::from(p).join("bin"))
            .into_iter()
            .collect();
        folders.push("/opt/rocm/bin".into());
        folders.extend(env::split_paths(&env::var_os("PATH").unwrap_or_default()));
        let newest_first = (17..=30).rev().map(|version| format!("clang++-{version}"));
        let names = ["hipcc".to_owned(), "amdclang++".to_owned()]
            .into_iter()
            .chain(newest_first)
            .chain(["clang++".to_owned()]);
        let mut found = Vec::new();
        for name in names {
            let program = folders
                .iter()
                .map(|folder| folder.join(&name))
                .find(|p| p.is_file());
            found.extend(program.map(Compiler));
        }
        found
    }

    /// `named`, else the first candidate, that compiles a kernel for `arch`. What a compiler can do is found by letting
    /// it do it, not by its version. The error says how to get one.
    pub fn for_arch(
        arch: &str,
        scratch: &Path,
        named: Option<OsString>,
    ) -> Result<Compiler, String> {
        let source = scratch.join(format!("probe-{arch}.hip"));
        let probe = "extern \"C\" __attribute__((global)) void probe(float *x) { *x = 1.0f; }\n";
        fs::write(&source, probe)
            .map_err(|e| format!("{} cannot be written: {e}", source.display()))?;
        let compiles =
            |c: &Compiler| c.compile(&source, arch, &scratch.join(object_name("probe", arch)));
        if let Some(program) = named {
            let compiler = Compiler(program.into());
            return match compiles(&compiler) {
                Ok(()) => Ok(compiler),
                Err(e) => Err(format!(
                    "the compiler that DELTAWAVE_HIPCC names does not compile for {arch}; unset it, or name one that \
                     accepts --offload-arch={arch}: hipcc of ROCm, or clang++ of version 17 or newer with lld (Debian, \
                     Ubuntu: apt-get install clang-19 lld-19)\n{e}"
                )),
            };
        }
        // ROCm's drivers take the command line for PTX too, and their clang need not know what the kernels need.
        let fits = |c: &Compiler| {
            let driver =
                c.0.file_stem()
                    .is_some_and(|n| n == "hipcc" || n == "amdclang++");
            !(driver && is_ptx(arch)) && compiles(c).is_ok()
        };
        Self::candidates()
            .into_iter()
            .find(fits)
            .ok_or_else(|| {
                format!(
                    "no compiler for it was found; install ROCm, or clang and lld of version 17 or newer (Debian, \
                     Ubuntu: apt-get install clang-19 lld-19), or set DELTAWAVE_HIPCC to one that accepts \
                     --offload-arch={arch}"
                )
            })
    }

    /// Compiles one source to one code object, or to PTX that ends in a NUL, as the CUDA driver takes it. The bytes
    /// depend on the sources and the compiler alone.
    pub fn compile(&self, source: &Path, arch: &str, output: &Path) -> Result<(), CompileError> {
        let result = Command::new(&self.0)
            .args(arguments(source, arch, output))
            .output();
        let result = result.map_err(|e| CompileError::Start(self.0.clone(), e))?;
        if result.status.success() {
            return if is_ptx(arch) {
                terminate(output).map_err(|e| CompileError::Output(output.into(), e))
            } else {
                Ok(())
            };
        }
        let stderr = String::from_utf8_lossy(&result.stderr).into_owned();
        Err(CompileError::Failed {
            source: source.into(),
            arch: arch.into(),
            stderr,
        })
    }
}

/// The command line that compiles one source to one code object.
pub fn arguments(source: &Path, arch: &str, output: &Path) -> Vec<OsString> {
    let language: &[&str] = if is_ptx(arch) {
        &PTX_ARGUMENTS
    } else {
        &HIP_ARGUMENTS
    };
    let common = [
        "-std=c++17",
        "-O3",
        "-nogpuinc",
        "-nogpulib",
        "--offload-device-only",
        "-Wall",
        "-Wextra",
        "-o",
    ];
    let fixed = language.iter().chain(&common);
    let mut arguments: Vec<_> = fixed.map(OsString::from).collect();
    arguments.extend([
        output.into(),
        format!("--offload-arch={arch}").into(),
        source.into(),
    ]);
    arguments
}

const HIP_ARGUMENTS: [&str; 4] = ["-x", "hip", "--no-gpu-bundle-output", "-fuse-cuid=none"];

/// PTX ISA 8.3 is what CUDA 12.3 and later read. Tiles are arrays, which live in registers only when every loop over them is
/// unrolled: LLVM's limit for that is meant for smaller loops, and it would unroll others in part.
const PTX_ARGUMENTS: [&str; 12] = [
    "-x",
    "cuda",
    "-S",
    "-Xclang",
    "-target-feature",
    "-Xclang",
    "+ptx83",
    "-mllvm",
    "-unroll-threshold=30000",
    "-mllvm",
    "-unroll-allow-partial=0",
    "-Wno-unknown-cuda-version",
];

/// Whether code for an architecture is PTX.
pub fn is_ptx(arch: &str) -> bool {
    arch.starts_with("sm_")
}

/// The file name of the code object of a source.
pub fn object_name(stem: &str, arch: &str) -> String {
    let extension = if is_ptx(arch) { "ptx" } else { "co" };
    format!("{stem}.{arch}.{extension}")
}

/// NVIDIA's ptxas, which turns PTX into machine code ahead of time. The CUDA driver would do so when it loads the kernels,
/// which takes minutes. The driver has to be of the same major version of CUDA as ptxas, or newer.
#[derive(Clone, Debug)]
pub struct Assembler(pub PathBuf);

impl Assembler {
    /// The one to use if `DELTAWAVE_ASSEMBLE` is 1: `DELTAWAVE_PTXAS`, or `ptxas` on the PATH.
    pub fn from_environment() -> Option<Assembler> {
        let wanted = env::var("DELTAWAVE_ASSEMBLE").is_ok_and(|v| v == "1");
        let named = env::var_os("DELTAWAVE_PTXAS").filter(|name| !name.is_empty());
        wanted.then(|| Assembler(named.unwrap_or_else(|| "ptxas".into()).into()))
    }

    /// Replaces a file of PTX that ends in a NUL by machine code of `arch`.
    fn assemble(&self, object: &Path, arch: &str) -> Result<(), CompileError> {
        let changed = |e| CompileError::Output(object.into(), e);
        let ptx = fs::read(object).map_err(changed)?;
        // As text: ptxas does not take the NUL.
        let text = object.with_extension("text");
        fs::write(&text, ptx.strip_suffix(&[0]).unwrap_or(&ptx)).map_err(changed)?;
        let result = Command::new(&self.0)
            .arg(format!("-arch={arch}"))
            .args(["-o".as_ref(), object.as_os_str(), text.as_os_str()])
            .output();
        fs::remove_file(&text).map_err(changed)?;
        let result = result.map_err(|e| CompileError::Start(self.0.clone(), e))?;
        if result.status.success() {
            return Ok(());
        }
        Err(CompileError::Failed {
            source: object.into(),
            arch: arch.into(),
            stderr: String::from_utf8_lossy(&result.stderr).into_owned(),
        })
    }
}

/// Appends a NUL.
fn terminate(path: &Path) -> io::Result<()> {
    use std::io::Write as _;
    fs::OpenOptions::new()
        .append(true)
        .open(path)?
        .write_all(&[0])
}

/// Compiles all sources for one architecture, in parallel, and assembles PTX if there is an assembler: the compiler, and the name and file of each code object in
/// the order of `sources`. The error is one line that says how to get what is missing, and details below it.
pub fn build(
    arch: &str,
    sources: &[PathBuf],
    out: &Path,
    named: Option<OsString>,
    assembler: Option<&Assembler>,
) -> Result<(Compiler, Vec<(String, PathBuf)>), String> {
    let compiler = Compiler::for_arch(arch, out, named)?;
    let assembler = assembler.filter(|_| is_ptx(arch));
    let objects: Vec<(String, PathBuf)> = sources
        .iter()
        .map(|source| {
            let stem = source.file_stem().unwrap_or_default();
            let name = stem.to_string_lossy().into_owned();
            let object = out.join(object_name(&name, arch));
            (name, object)
        })
        .collect();
    in_parallel(sources.len(), |i| {
        compiler.compile(&sources[i], arch, &objects[i].1)?;
        assembler.map_or(Ok(()), |a| a.assemble(&objects[i].1, arch))
    })
    .map_err(|e| e.to_string())?;
    Ok((compiler, objects))
}

/// The kernel sources below a repository's root, in the order of their names.
pub fn sources(root: &Path) -> io::Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    for entry in fs::read_dir(root.join("hip/kernels"))? {
        let path = entry?.path();
        if path.extension().is_some_and(|e| e == "hip") {
            found.push(path);
        }
    }
    found.sort();
    Ok(found)
}

/// Runs `job` for every index below `count` on as many threads as the machine has cores.
pub fn in_parallel<E: Send>(
    count: usize,
    job: impl Fn(usize) -> Result<(), E> + Sync,
) -> Result<(), E> {
    let next = AtomicUsize::new(0);
    let workers = thread::available_parallelism()
        .map_or(1, |n| n.get())
        .min(count);
    thread::scope(|scope| {
        let work = || {
            loop {
                let index = next.fetch_add(1, Ordering::Relaxed);
                if index >= count {
                    return Ok(());
                }
                job(index)?;
            }
        };
        let threads: Vec<_> = (0..workers).map(|_| scope.spawn(work)).collect();
        threads.into_iter().try_for_each(|t| {
            t.join()
                .unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        })
    })
}

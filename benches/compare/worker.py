"""One shape on one GPU: worker.py GPU HKxHVx[Nx]T OUT. The environment names the GPU and the file of counters."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "sim/conformance"))

from fla_chain import Case, ratio  # noqa: E402
from simulator import HipError, from_bf16  # noqa: E402
from triton.runtime.errors import OutOfResources  # noqa: E402

# Tokens with which configurations are tried: of all sequences, and of each at least.
TRIAL, TRIAL_EACH = 512, 128
# The bound on the difference of the two outputs; each has its own roundings to bfloat16.
DIFFERENCE = 0.01
PROFILE = Path(os.environ["DELTAWAVE_SIM_PROFILE"])
DEPTH = 128


def tensors(path):
    """The tensors of a safetensors file, as float32 or integers."""
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    found = {}
    for name, entry in json.loads(data[8:8 + length]).items():
        if name == "__metadata__":
            continue
        start, end = entry["data_offsets"]
        carrier = {"BF16": np.uint16, "F32": np.float32, "I32": np.int32}[entry["dtype"]]
        values = np.frombuffer(data[8 + length + start:8 + length + end], carrier).reshape(entry["shape"])
        found[name] = from_bf16(values) if entry["dtype"] == "BF16" else values
    return found


class Given(Case):
    """A problem with inputs from a file: sequences of one length, of each of which `tokens` are taken."""

    def __init__(self, inputs, sequences, tokens):
        first = {name: inputs[name].reshape(sequences, -1, *inputs[name].shape[1:])[:, :tokens]
                 for name in ("q", "k", "v", "g", "beta")}
        self.q, self.k, self.v, self.g, self.beta = (x.reshape(-1, *x.shape[2:]) for x in first.values())
        self.h0 = inputs["initial_state"]
        (self.H, self.K), (self.HV, self.V) = self.q.shape[1:], self.v.shape[1:]
        self.lengths, self.N, self.B, self.T = [tokens] * sequences, sequences, 1, sequences * tokens
        self.kind, self.beta_kind, self.varlen, self.v_first = "bf16", "fp32", sequences > 1, False
        self.pack()


class Chain:
    """FLA's chain, whose launches add lines to the file of counters."""

    def __init__(self):
        self.read = 0

    def run(self, case, pick):
        """Outputs, final states, and for each stage its configuration and counters. `pick(stage, configs)` chooses."""
        stages = []

        def choose(stage):
            stages.append([stage, None])

            def chooser(configs):
                stages[-1][1] = pick(stage, configs)
                return configs[stages[-1][1]]
            return chooser

        try:
            results = case.chain(True, choose)
        except (HipError, OutOfResources) as error:
            self.lines()
            return None, stages[-1], error
        lines = self.lines()
        assert len(lines) == len(stages), "a launch that is not counted"
        return results, [(stage, config, line) for (stage, config), line in zip(stages, lines)], None

    def lines(self):
        """What was counted since the last time."""
        with open(PROFILE, "rb") if PROFILE.exists() else open(os.devnull, "rb") as file:
            file.seek(self.read)
            text = file.read()
        self.read += len(text)
        return [json.loads(line) for line in text.splitlines()]


def tune(chain, case):
    """For each stage the number of its best configuration, and the text of it."""
    best, texts, left, trial = {}, {}, {}, 0
    while trial == 0 or any(left.values()):
        def pick(stage, configs):
            texts[stage] = configs
            if stage not in left:
                left[stage] = list(range(len(configs)))
            return left[stage][0] if left[stage] else best[stage][1]

        _, stages, error = chain.run(case, pick)
        if error:
            # This one does not fit on the device.
            left[stages[0]].remove(stages[1])
            continue
        for stage, config, line in stages:
            if left.get(stage) and config == left[stage][0]:
                left[stage].pop(0)
                cost = line["modelled_us"]
                if stage not in best or cost < best[stage][0]:
                    best[stage] = (cost, config)
        trial += 1
    picks = {stage: number for stage, (_, number) in best.items()}
    return picks, {stage: str(texts[stage][number]) for stage, number in picks.items()}


def ours(gpu, heads, lengths, folder):
    """Our profile, and paths of inputs and results."""
    inputs, results = folder / "inputs.safetensors", folder / "results.safetensors"
    environment = {k: v for k, v in os.environ.items() if k != "DELTAWAVE_SIM_PROFILE"}
    command = [os.environ.get("DELTAWAVE", str(ROOT / "target/release/deltawave")), "profile", "--heads",
               ",".join(map(str, heads)), "--dims", f"{DEPTH},{DEPTH}", "--seqlens", ",".join(map(str, lengths)),
               "--gpu", gpu,
               "--initial-state", "f32", "--save-input", str(inputs), "--output", str(results), "--json"]
    found = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
    return json.loads(found.stdout), tensors(inputs), tensors(results)


def main():
    gpu, shape, out = sys.argv[1:]
    key_heads, value_heads, *sequences, tokens = map(int, shape.split("x"))
    heads, sequences = [key_heads, value_heads], sequences[0] if sequences else 1
    out = Path(out)
    profile, inputs, results = ours(gpu, heads, [tokens] * sequences, out.parent)
    chain = Chain()
    trial = min(max(TRIAL // sequences, TRIAL_EACH), tokens)
    picks, texts = tune(chain, Given(inputs, sequences, trial))
    found, stages, error = chain.run(Given(inputs, sequences, tokens), lambda stage, _: picks[stage])
    if error:
        raise error
    differences = [float(ratio(f.reshape(r.shape), r))
                   for f, r in zip(found, (results["o"], results["final_state"]))]
    assert max(differences) < DIFFERENCE, f"results differ: {differences}"
    row = {
        "gpu": gpu, "heads": heads, "sequences": sequences, "tokens": tokens, "difference": differences, "ours": profile,
        "fla": [{"stage": stage, "configuration": texts.get(stage, "no choice"),
                 **{k: v for k, v in line.items() if k != "opcodes"}} for stage, _, line in stages],
    }
    out.write_text(json.dumps(row, indent=1) + "\n")


if __name__ == "__main__":
    main()

"""One shape on one GPU: worker.py OPERATION GPU HKxHVx[Nx]T OUT [AITER [CODE]]. The environment names the GPU and the file of
counters."""

import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "sim/conformance"))

import fla_backward  # noqa: E402
from fla_chain import Case, ratio  # noqa: E402
from simulator import from_bf16  # noqa: E402
from triton_launch import Trial  # noqa: E402

# Tokens with which configurations are tried: of all sequences times value heads, so that what kernels hand on is larger than
# the caches, and of each sequence at least.
TRIAL, TRIAL_EACH = 1 << 17, 128
PROFILE = Path(os.environ["DELTAWAVE_SIM_PROFILE"])
DEPTH = 128


@dataclass
class Operation:
    """What is compared: the chain of a case, its stages that count (all without any), and tensors of the results."""

    run: Callable
    stages: tuple
    flags: list
    names: tuple
    # The bound on the difference of the two results; each has its own roundings to bfloat16.
    difference: float


OPERATIONS = {
    "forward": Operation(lambda case, choose: case.chain(True, choose), (), [], ("o", "final_state"), 0.01),
    "backward": Operation(lambda case, choose: fla_backward.gradients(case, case.d_o, case.d_final, choose),
                          fla_backward.STAGES + fla_backward.TORCH, ["--backward"], fla_backward.NAMES, 0.015),
}


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
        def first(name):
            each = inputs[name].reshape(sequences, -1, *inputs[name].shape[1:])[:, :tokens]
            return each.reshape(-1, *each.shape[2:])

        self.q, self.k, self.v, self.g, self.beta = map(first, ("q", "k", "v", "g", "beta"))
        self.h0 = inputs["initial_state"]
        if "d_o" in inputs:
            self.d_o, self.d_final = first("d_o"), inputs["d_final_state"]
        (self.H, self.K), (self.HV, self.V) = self.q.shape[1:], self.v.shape[1:]
        self.lengths, self.N, self.B, self.T = [tokens] * sequences, sequences, 1, sequences * tokens
        self.kind, self.beta_kind, self.varlen, self.v_first = "bf16", "fp32", sequences > 1, False
        self.pack()


class Counters:
    """Lines that launches add to the file of counters."""

    def __init__(self):
        self.read = 0

    def trial(self, stage, best):
        """Runs all configurations of a stage and keeps the fastest in `best`: modelled time, number, text."""
        # What the stages before have left in the file.
        self.lines()

        def ran(number, config, error):
            lines = self.lines()
            if error is None:
                best[stage] = min(best.get(stage, (math.inf,)), (lines[-1]["modelled_us"], number, str(config)))

        return Trial(ran)

    def lines(self):
        """What was counted since the last time."""
        with open(PROFILE, "rb") if PROFILE.exists() else open(os.devnull, "rb") as file:
            file.seek(self.read)
            text = file.read()
        self.read += len(text)
        return [json.loads(line) for line in text.splitlines()]


def picked(stages, picks):
    """A choice of the configurations with the numbers in `picks`. Notes the stages in their order."""
    def choose(stage):
        stages.append(stage)
        return lambda configs: configs[picks.get(stage, 0)]
    return choose


class Chain:
    """FLA's chain."""

    def __init__(self, operation, counters):
        self.operation, self.counters = operation, counters

    def counts(self, stage):
        """Whether a stage belongs to the operation; others only make its inputs."""
        return not self.operation.stages or stage in self.operation.stages

    def run(self, case, picks):
        """The results, and for each stage its counters; `picks` has the numbers of the stages' configurations."""
        stages = []
        results = self.operation.run(case, picked(stages, picks))
        lines = self.counters.lines()
        assert len(lines) == len(stages), "a launch that is not counted"
        return results, [(stage, line) for stage, line in zip(stages, lines) if self.counts(stage)]

    def tune(self, case):
        """For each stage the number of its fastest configuration, as modelled, and the text of it."""
        best = {}

        def choose(stage):
            return self.counters.trial(stage, best) if self.counts(stage) else lambda configs: configs[0]

        self.operation.run(case, choose)
        self.counters.lines()
        return {stage: number for stage, (_, number, _) in best.items()}, {s: text for s, (_, _, text) in best.items()}


def aiter_kernels(aiter, counters, trial, case):
    """aiter's fastest chain: results, and for each stage its counters. `trial` is what configurations are tried with."""
    import aiter_chain

    best, x = {}, aiter.inputs(trial)
    first, second = aiter.forms()

    def choose(stage):
        # Forms share stages.
        return counters.trial(stage, best) if stage not in best else lambda configs: configs[best[stage][1]]

    for form in first:
        aiter.prepare(x, form, choose)
    for form in second:
        aiter.states(x, form, choose)
    aiter.outputs(x, choose)
    counters.lines()

    def fastest(forms, stages):
        return min(forms, key=lambda form: sum(best[stage][0] for stage in stages[form]))

    forms = fastest(first, aiter_chain.PREPARE), fastest(second, aiter_chain.STATES)
    stages = []
    results = aiter.run(case, forms, picked(stages, {stage: number for stage, (_, number, _) in best.items()}))
    lines = counters.lines()
    assert len(lines) == len(stages), "a launch that is not counted"
    return results, [(stage, best[stage][2], line) for stage, line in zip(stages, lines)]


def ours(operation, gpu, heads, lengths, folder):
    """Our profile, inputs and results."""
    inputs, results = folder / "inputs.safetensors", folder / "results.safetensors"
    environment = {k: v for k, v in os.environ.items() if k != "DELTAWAVE_SIM_PROFILE"}
    command = [os.environ.get("DELTAWAVE", str(ROOT / "target/release/deltawave")), "profile", "--heads",
               ",".join(map(str, heads)), "--dims", f"{DEPTH},{DEPTH}", "--seqlens", ",".join(map(str, lengths)),
               "--gpu", gpu,
               "--initial-state", "f32", "--save-input", str(inputs), "--output", str(results), "--json",
               *operation.flags]
    found = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
    return json.loads(found.stdout), tensors(inputs), tensors(results)


def main():
    name, gpu, shape, out, *checkout = sys.argv[1:]
    operation = OPERATIONS[name]
    key_heads, value_heads, *sequences, tokens = map(int, shape.split("x"))
    heads, sequences = [key_heads, value_heads], sequences[0] if sequences else 1
    out = Path(out)
    profile, inputs, results = ours(operation, gpu, heads, [tokens] * sequences, out.parent)
    # Gradients that come in are drawn by the program, too.
    inputs.update({name: results[name] for name in ("d_o", "d_final_state") if name in results})
    counters = Counters()
    chain = Chain(operation, counters)
    trial = min(max(TRIAL // (value_heads * sequences), TRIAL_EACH), tokens)
    picks, texts = chain.tune(Given(inputs, sequences, trial))
    found, stages = chain.run(Given(inputs, sequences, tokens), picks)
    differences = [float(ratio(f.reshape(results[name].shape), results[name])) for f, name in zip(found, operation.names)]
    assert max(differences) < operation.difference, f"results differ: {differences}"
    row = {
        "operation": name, "gpu": gpu, "heads": heads, "sequences": sequences, "tokens": tokens,
        "difference": differences, "compared": operation.names, "ours": profile,
        "fla": [{"stage": stage, "torch": stage in fla_backward.TORCH, "configuration": texts[stage],
                 **{k: v for k, v in line.items() if k != "opcodes"}} for stage, line in stages],
    }
    if checkout:
        import aiter_chain

        aiter = aiter_chain.Chain(*checkout)
        found, stages = aiter_kernels(aiter, counters, Given(inputs, sequences, trial), Given(inputs, sequences, tokens))
        differences = [float(ratio(f.reshape(results[name].shape), results[name]))
                       for f, name in zip(found, operation.names)]
        assert max(differences) < operation.difference, f"aiter's results differ: {differences}"
        row["aiter_difference"] = differences
        row["aiter"] = [{"stage": stage, "configuration": text, **{k: v for k, v in line.items() if k != "opcodes"}}
                        for stage, text, line in stages]
    out.write_text(json.dumps(row, indent=1) + "\n")


if __name__ == "__main__":
    main()

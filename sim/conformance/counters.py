"""Counters of fla-core's kernels against published figures of kernels derived from them (published.json).

The environment names the file of counters: DELTAWAVE_SIM_PROFILE.
"""

import itertools
import json
import os
import sys
from pathlib import Path

import triton

from fla_chain import Case

PROFILE = Path(os.environ["DELTAWAVE_SIM_PROFILE"])
# Maximum relative difference.
BOUND = 0.02
KEY_HEADS, VALUE_HEADS = 1, 2
# The two lengths differ by one chunk.
LENGTHS = 192, 128


def counted(picks, tokens):
    """The chain's launches on one sequence, by stage; `picks` has the configurations of some."""
    stages = []

    def choose(stage):
        stages.append(stage)

        def chooser(configs):
            pick = picks.get(stage)
            if pick is None:
                return configs[0]
            options = {**configs[0].kwargs, **pick.get("options", {})}
            return triton.Config(options, num_warps=pick["num_warps"], num_stages=pick["num_stages"])
        return chooser

    PROFILE.unlink(missing_ok=True)
    Case([tokens], (KEY_HEADS, VALUE_HEADS), (128, 128), "bf16", True, 1).chain(False, choose)
    lines = [json.loads(line) for line in PROFILE.read_text().splitlines()]
    assert len(lines) == len(stages), "a launch that is not counted"
    return dict(zip(stages, lines))


def counter(line, name):
    return line["classes"][name] if name in line["classes"] else line[name]


def main():
    published = json.loads(Path(__file__).with_name("published.json").read_text())["kernels"]
    by_stage = {}
    for kernel in published:
        by_stage.setdefault(kernel["stage"], []).append(kernel)
    far = []
    for picks in itertools.zip_longest(*by_stage.values()):
        picks = {pick["stage"]: pick for pick in picks if pick}
        longer, shorter = (counted(picks, tokens) for tokens in LENGTHS)
        for stage, pick in picks.items():
            worst = 0.0
            for name, expected in pick["counters"].items():
                found = (counter(longer[stage], name) - counter(shorter[stage], name)) / VALUE_HEADS
                difference = abs(found - expected) / max(expected, 1)
                worst = max(worst, difference)
                if difference > BOUND:
                    far.append(f"{pick['name']}: {name} is {found:g}, published {expected}")
            print(f"  {pick['name']}: {len(pick['counters'])} counters, at most {worst:.1%} apart", flush=True)
    if far:
        sys.exit("\n".join([f"more than {BOUND:.0%} apart:", *far]))


if __name__ == "__main__":
    main()

"""A step of an engine on a GPU, with its lengths on the host and on the device: CUDA graphs of a whole layer, replayed in turns.

    python3 benches/engine_step.py [--heads HK,HV] [--prefills LENGTHS] [--json]

The step has three decodes, two padded slots and the prefills. Bits are the same. The L2 cache is flushed before each replay.
Times are medians in microseconds.
`benches/engine_step.rs` models the same step for gfx942.
"""

import argparse
import json
import statistics
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent / "peers"))

from contestants import Deltawave  # noqa: E402
from measure import Clock, graph_of  # noqa: E402

DECODES, PADDED, DIM = 3, 2, 128
ROUNDS = 5


def step(key_heads, value_heads, prefills):
    """Launches by where the lengths are, and their outputs."""
    peer = Deltawave()
    dw, context = peer.package(), peer.context()
    spec = dw.LayerSpec(key_heads, value_heads, DIM, DIM)
    lengths = [1] * (DECODES + PADDED) + prefills
    offsets = [sum(lengths[:n]) for n in range(len(lengths) + 1)]
    rows, decodes, sequences = offsets[-1], DECODES + PADDED, len(lengths)
    generator = torch.Generator(device="cuda").manual_seed(7)

    def normal(*shape, dtype=torch.bfloat16, scale=1.0):
        return (scale * torch.randn(*shape, generator=generator, device="cuda")).to(dtype)

    slots = torch.arange(sequences, dtype=torch.int32, device="cuda")
    slots[DECODES:decodes] = -1
    given = {"x": normal(rows, spec.channels + value_heads * DIM), "a": normal(rows, value_heads),
             "b": normal(rows, value_heads), "conv_weight": normal(spec.channels, spec.width, scale=0.3),
             "a_log": normal(value_heads, dtype=torch.float32), "norm_weight": normal(DIM),
             "slots": slots}
    states = {"conv_state": normal(sequences, spec.channels, spec.width - 1),
              "pool": normal(sequences, value_heads, DIM, DIM, dtype=torch.float32, scale=0.1)}
    plans = {"host": dw.Layer.packed(context, spec, offsets, rows, decodes),
             "device": dw.Layer.device(context, spec, rows, sequences, decodes)}
    on_device = {"cu_seqlens": torch.tensor(offsets, dtype=torch.int32, device="cuda")}
    found = {}
    for where, plan in plans.items():
        own = {name: state.clone() for name, state in states.items()}
        own["y"] = torch.empty(rows, value_heads, DIM, dtype=torch.bfloat16, device="cuda")
        workspace = torch.empty(plan.workspace_bytes, dtype=torch.uint8, device="cuda")
        lengths_there = on_device if where == "device" else {}
        found[where] = (plan.bind(**given, **own, **lengths_there, workspace=workspace), own)
    return found


def numbers(text):
    """Positive numbers, separated by commas."""
    out = [int(n) for n in text.split(",")]
    if min(out) < 1:
        raise ValueError
    return out


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--heads", type=numbers, default=[16, 32], metavar="HK,HV", help="key and value heads of 128")
    parser.add_argument("--prefills", type=numbers, default=[2048, 1024, 512, 300, 64], metavar="LENGTHS", help="tokens of each prefill")
    parser.add_argument("--json", action="store_true", help="one line of JSON")
    options = parser.parse_args()
    heads = options.heads
    if len(heads) != 2 or heads[1] % heads[0]:
        parser.error(f"argument --heads: {','.join(map(str, heads))}: it must be HK,HV, and HV a multiple of HK")
    found = step(*heads, options.prefills)
    for launch, _ in found.values():
        launch(torch.cuda.current_stream().cuda_stream)
    torch.cuda.synchronize()
    same = all(torch.equal(of_host, found["device"][1][name]) for name, of_host in found["host"][1].items())
    graphs = {where: graph_of(lambda launch=launch: launch(torch.cuda.current_stream().cuda_stream))[0]
              for where, (launch, _) in found.items()}
    clock, samples = Clock(), {where: [] for where in graphs}
    for _ in range(ROUNDS):
        for where, graph in graphs.items():
            samples[where] += [1e3 * ms for ms in clock.samples(graph.replay)]
    times = {where: statistics.median(each) for where, each in samples.items()}
    ratio = times["device"] / times["host"]
    if options.json:
        print(json.dumps({"heads": heads, "prefills": ",".join(map(str, options.prefills)), "gpu": torch.cuda.get_device_name(),
                          **{f"{where}_us": time for where, time in times.items()}, "device_over_host": ratio, "same_bits": same}))
    else:
        print(f"{torch.cuda.get_device_name()}, lengths on the host {times['host']:.1f} us, on the device {times['device']:.1f} us, "
              f"measured; device / host {ratio:.3f}; {'same' if same else 'other'} bits")


if __name__ == "__main__":
    main()

"""What a training step of the gated delta rule keeps for its backward, and on a GPU how long it takes, beside FLA and FlashQLA.

    training.py                                 bytes that autograd keeps, on the simulator
    training.py --device cuda [--json FILE]     bytes, peaks of memory and times on a GPU, of those of FLA and FlashQLA that are
                                                installed

`plain_ms` and `saving_ms` are the kernels of deltawave's forward alone, as a CUDA graph: without and with the states between
rounds of the backward.

Bytes are counted: each tensor that autograd saves, once, inputs of the call apart. Times are medians of CUDA events around the
forward and the backward of `chunk_gated_delta_rule` with norms of q and k inside. For FLA the bytes that its source saves are
shown where it cannot run (fla-core 0.6.0, `ChunkGatedDeltaRuleFunction`); FlashQLA 0.1.3 saves the same tensors.
"""

import argparse
import json
import statistics
import sys
from pathlib import Path

import torch

DIM = 128
# Key heads, value heads, tokens of each sequence.
GPU_CASES = ((16, 32, (8192,)), (16, 32, (32768,)), (16, 32, (4096,) * 8), (8, 16, (32768,)), (4, 8, (8192,)), (4, 8, (32768,)),
             (2, 4, (32768,)))
CPU_CASES = ((2, 4, (256,)), (4, 8, (100, 28)), (16, 32, (64,)))


def fla_bytes(key_heads, value_heads, dim=DIM, element=2):
    """Bytes per token that FLA's function saves beside its inputs, and in all, with norms of q and k inside and given gates:
    normalised q and k, their factors in f32, sums of g in f32, and 64 columns of the inverse for each value head; beside them v
    and beta. Raw q and k are not saved."""
    extra = 2 * key_heads * dim * element + 2 * 4 * key_heads + 4 * value_heads + 64 * value_heads * element
    return extra, extra + value_heads * dim * element + 4 * value_heads


def kept(function, inputs):
    """Results of a call, bytes that autograd keeps beside the call's inputs, and bytes that it keeps in all."""
    given = {x.untyped_storage().data_ptr() for x in inputs if x is not None}
    saved = {}

    def pack(x):
        storage = x.untyped_storage()
        saved[storage.data_ptr()] = storage.nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        results = function()
    return results, sum(n for at, n in saved.items() if at not in given), sum(saved.values())


def inputs(key_heads, value_heads, lengths, device, dtype=torch.bfloat16):
    tokens, random = sum(lengths), torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(*shape, generator=random).to(device, dtype).requires_grad_()

    q, k, v = normal(1, tokens, key_heads, DIM), normal(1, tokens, key_heads, DIM), normal(1, tokens, value_heads, DIM)
    g = torch.nn.functional.logsigmoid(torch.randn(1, tokens, value_heads, generator=random)).to(device).requires_grad_()
    beta = torch.rand(1, tokens, value_heads, generator=random).to(device).requires_grad_()
    offsets = torch.tensor([0, *lengths]).cumsum(0).to(device, torch.int64)
    return [q, k, v, g, beta], offsets


def contestants(device):
    """Functions by name, and why others are missing."""
    from deltawave.fla import chunk_gated_delta_rule

    found, missing = {"deltawave": chunk_gated_delta_rule}, {}
    if device == "cpu":
        return found, {"fla": "its kernels need a GPU", "flashqla": "its kernels need a GPU"}
    import os

    os.environ.setdefault("FLA_FLASH_QLA", "0")
    for name, module in (("fla", "fla.ops.gated_delta_rule"), ("flashqla", "flash_qla")):
        try:
            found[name] = __import__(module, fromlist=["chunk_gated_delta_rule"]).chunk_gated_delta_rule
        except Exception as problem:  # whatever an import of foreign code raises
            missing[name] = f"{type(problem).__name__}: {str(problem)[:200]}"
    return found, missing


def timed(step, count=20):
    """Median time of `step` in ms, by events."""
    for _ in range(3):
        step()
    times = []
    for _ in range(count):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        step()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return statistics.median(times)


def kernels(x, lengths, save):
    """A function that enqueues the forward of a plan which saves as `save` says, in the library's own words."""
    import os

    if torch.version.cuda:
        os.environ.setdefault("DELTAWAVE_HIP_LIBRARY", "cuda")
    import deltawave as dw

    q, k, v, g, beta = (t.detach()[0] for t in x)
    context = dw.Context("hip", torch.cuda.current_device())
    spec = dw.PrefillSpec(q.shape[1], v.shape[1], DIM, DIM, "bf16", qk_l2norm=True, save=save)
    plan = dw.Prefill.packed(context, spec, [sum(lengths[:n]) for n in range(len(lengths) + 1)], len(q))
    memory = {"workspace": plan.workspace_bytes, "context": plan.context_bytes if save != "nothing" else 0}
    memory = {name: torch.empty(size, dtype=torch.uint8, device=q.device) for name, size in memory.items() if size}
    state = torch.empty(len(lengths), v.shape[1], DIM, DIM, device=q.device)
    launch = plan.bind(q=q, k=k, v=v, o=torch.empty_like(v), g=g.float(), beta=beta.float(), final_state=state, **memory)
    return lambda: launch(torch.cuda.current_stream().cuda_stream)


def captured(call):
    """A call as a CUDA graph, and the call, which holds the memory that the graph uses."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph, call


def measure(function, x, offsets, on_gpu):
    """What one contestant keeps and takes."""
    q, k, v, g, beta = x

    def call():
        return function(q, k, v, g, beta, use_qk_l2norm_in_kernel=True, cu_seqlens=offsets)

    tokens = q.shape[1]
    if on_gpu:
        call()[0].sum().backward()  # compiles and tunes
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    (o, *_), extra, every = kept(call, [*x, offsets])
    row = {"kept_beside_inputs": extra / tokens, "kept": every / tokens}
    if on_gpu:
        row["peak_forward"] = (torch.cuda.max_memory_allocated() - before) / tokens
    d_o = torch.ones_like(o)
    torch.autograd.grad(o, x, d_o)
    if on_gpu:
        torch.cuda.synchronize()
        row["peak"] = (torch.cuda.max_memory_allocated() - before) / tokens
        o = call()[0]
        row["forward_ms"] = timed(call)
        with torch.no_grad():
            row["inference_ms"] = timed(call)
        row["backward_ms"] = timed(lambda: torch.autograd.grad(o, x, d_o, retain_graph=True))
    return row


def main():
    parser = argparse.ArgumentParser(description="memory and times of a training step of the gated delta rule")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"), help="cpu: the simulator")
    parser.add_argument("--json", help="a file for the rows, as lines of JSON")
    options = parser.parse_args()
    on_gpu = options.device == "cuda"
    found, missing = contestants(options.device)
    for name, why in missing.items():
        print(f"{name}: left out: {why}")
    rows, failed = [], False
    for key_heads, value_heads, lengths in GPU_CASES if on_gpu else CPU_CASES:
        title = f"{key_heads}:{value_heads} heads, {' + '.join(map(str, lengths))} tokens"
        for name, function in found.items():
            x, offsets = inputs(key_heads, value_heads, lengths, options.device)
            try:
                row = measure(function, x, offsets, on_gpu)
            except Exception as problem:  # foreign code: the others go on
                failed |= name == "deltawave"
                print(f"{title}: {name}: {type(problem).__name__}: {str(problem)[:200]}")
                continue
            if on_gpu and name == "deltawave":
                graphs = {key: captured(kernels(x, lengths, save))
                          for key, save in (("plain_ms", "nothing"), ("saving_ms", "boundaries"))}
                row |= {key: timed(graph.replay) for key, (graph, _) in graphs.items()}
            rows.append({"heads": [key_heads, value_heads], "lengths": lengths, "name": name,
                         "where": torch.cuda.get_device_name() if on_gpu else "simulator", **row})
            print(f"{title}: {name}: " + ", ".join(f"{key} {value:.3f}" if key.endswith("ms") else f"{key} {value:.0f} B/token"
                                                  for key, value in row.items()), flush=True)
            del x
        if "fla" not in found:
            extra, every = fla_bytes(key_heads, value_heads)
            print(f"{title}: fla: kept_beside_inputs {extra} B/token, kept {every} B/token, by its source")
    if options.json:
        Path(options.json).write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    sys.exit(failed)


if __name__ == "__main__":
    main()

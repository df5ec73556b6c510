"""Tests of the benchmark that need no GPU, no torch and no NumPy: the binding on the simulator, against the recurrence;
the rows; tables and chart from made-up results. `python3 benches/peers/selftest.py LIBRARY`, or with no library without
the binding."""

import ctypes
import json
import math
import random
import struct
import sys
import tempfile
import xml.etree.ElementTree
from pathlib import Path

import binding
import report
from cases import all_cases


def to_bf16(x):
    """The 16 bits of a number, truncated: any will do."""
    return struct.unpack("<I", struct.pack("<f", x))[0] >> 16


def from_bf16(bits):
    return struct.unpack("<f", struct.pack("<I", bits << 16))[0]


def recurrence(q, k, v, g, beta, offsets, heads, dims, scale):
    """o and final states in double precision, in the order in which they lie in memory."""
    (key_heads, value_heads), (key_dim, value_dim) = heads, dims
    o, states = [0.0] * len(v), []
    for begin, end in zip(offsets, offsets[1:]):
        for h in range(value_heads):
            state = [[0.0] * value_dim for _ in range(key_dim)]
            for t in range(begin, end):
                at = (t * key_heads + h // (value_heads // key_heads)) * key_dim
                key, query = k[at:at + key_dim], q[at:at + key_dim]
                at = (t * value_heads + h) * value_dim
                decay, step = math.exp(g[t * value_heads + h]), beta[t * value_heads + h]
                for j in range(value_dim):
                    for i in range(key_dim):
                        state[i][j] *= decay
                    read = sum(key[i] * state[i][j] for i in range(key_dim))
                    delta = step * (v[at + j] - read)
                    for i in range(key_dim):
                        state[i][j] += key[i] * delta
                    o[at + j] = scale * sum(query[i] * state[i][j] for i in range(key_dim))
            states += [x for row in state for x in row]
    return o, states


def rms_ratio(found, wanted):
    return math.sqrt(sum((f - w) ** 2 for f, w in zip(found, wanted)) / sum(w * w for w in wanted))


def test_binding(path):
    context = binding.Context(binding.Library(path), binding.SIMULATOR)
    assert context.info()["backend"] == "simulator", context.info()
    offsets, heads, dims = [0, 5, 70], (1, 2), (16, 32)
    tokens, (key_heads, value_heads), (key_dim, value_dim) = 70, heads, dims
    numbers = random.Random(1)

    def bf16(count, size):
        return [to_bf16(numbers.uniform(-size, size)) for _ in range(count)]

    q, k, v = (bf16(tokens * key_heads * key_dim, 0.4), bf16(tokens * key_heads * key_dim, 0.4),
               bf16(tokens * value_heads * value_dim, 1.0))
    g = [numbers.uniform(-0.2, 0) for _ in range(tokens * value_heads)]
    beta = [numbers.uniform(0, 1) for _ in range(tokens * value_heads)]

    def upload(values, element):
        array = (element * len(values))(*values)
        address = context.malloc(ctypes.sizeof(array))
        context.copy(address, ctypes.addressof(array), ctypes.sizeof(array), binding.TO_DEVICE)
        return address

    def download(address, count, element):
        array = (element * count)()
        context.copy(ctypes.addressof(array), address, ctypes.sizeof(array), binding.TO_HOST)
        return list(array)

    short, single = ctypes.c_uint16, ctypes.c_float
    state_shape = [len(offsets) - 1, value_heads, key_dim, value_dim]
    rows = {name: binding.tensor(upload(values, short), "bf16", [tokens, h, d])
            for name, values, h, d in (("q", q, key_heads, key_dim), ("k", k, key_heads, key_dim),
                                       ("v", v, value_heads, value_dim), ("o", v, value_heads, value_dim))}
    gates = {name: binding.tensor(upload(values, single), "f32", [tokens, value_heads])
             for name, values in (("g", g), ("beta", beta))}
    state = binding.tensor(upload([0.0] * math.prod(state_shape), single), "f32", state_shape)
    plan = binding.Prefill(context, offsets, tokens, dtype="bf16", key_heads=key_heads, value_heads=value_heads,
                           key_dim=key_dim, value_dim=value_dim, scale=0.3)
    launch = plan.bind(context.malloc(plan.workspace_bytes), **rows, **gates, final_state=state)
    launch(None)
    context.synchronize()
    o = [from_bf16(x) for x in download(rows["o"].data, len(v), short)]
    states = download(state.data, math.prod(state_shape), single)
    wanted_o, wanted_states = recurrence(*([from_bf16(x) for x in t] for t in (q, k, v)), g, beta, offsets, heads, dims,
                                         0.3)
    errors = rms_ratio(o, wanted_o), rms_ratio(states, wanted_states)
    assert max(errors) < 1e-2, errors

    rows["v"].shape[0] = 69
    try:
        launch(None)
    except binding.Error as problem:
        assert "dw_prefill_launch: v: shape [69, 2, 32]" in str(problem), problem
    else:
        raise AssertionError("a wrong shape was taken")


def test_cases():
    cases = all_cases()
    assert len({case.name for case in cases}) == len(cases) == 32
    ragged = [case for case in cases if "ragged" in case.name]
    assert [case.tokens for case in ragged] == [39866, 39866] and len(ragged[0].lengths) == 16
    assert cases[0].name == "bf16 16:16 32K normal" and cases[0].io_bytes == 4 * 32768 * 16 * 128 * 2


def made_up(path):
    """Results of every case, with what can go wrong in them."""
    numbers = random.Random(2)
    with path.open("w") as file:
        def emit(**line):
            file.write(json.dumps(line) + "\n")

        emit(kind="missing", what="FlashInfer", reason="no nvcc")
        emit(kind="machine", gpu="Made-up <GPU>", torch="2.0", copy_bytes_per_s=4.0e12)
        for index, case in enumerate(all_cases()):
            floor = case.io_bytes / 4.0e12 * 1e3
            results = {}
            for name, low, high in (("deltawave", 2, 4), ("fla", 8, 12), ("flashqla", 2.5, 9), ("flashinfer", 5, 14)):
                ms = floor * numbers.uniform(low, high)
                results[name] = {"ms": ms, "rounds_ms": [ms, ms * 1.01], "o_error": 3e-3, "state_error": 1e-3}
            if index == 3:
                results["flashqla"] = {"error": "run: RuntimeError: made up\nand long"}
            if index == 4:
                results["fla"]["state_error"] = 0.5
            if index > 20:
                del results["flashinfer"]
            emit(kind="row", case=case.name, dtype=case.dtype, key_heads=case.key_heads, value_heads=case.value_heads,
                 batch=case.batch, tokens=case.tokens, gates=case.gates, io_bytes=case.io_bytes, results=results)
        emit(kind="dropped", what="flashinfer", reason="out of time")
        emit(kind="end", copy_bytes_per_s=3.9e12)


def test_report():
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        made_up(folder / "results.jsonl")
        text = report.write(folder)
        tables = [line for line in text.splitlines() if line.startswith("| bf16") or line.startswith("| fp16")]
        assert len(tables) == 2 * len(all_cases())
        assert "RuntimeError: made up and long" in text and "FlashInfer was not run: no nvcc" in text
        assert "- FLA, `bf16 16:16 2K normal`: **its results are wrong**" in text
        assert "at most 1.0%" in text and "4.00 TB/s, at the end 3.90 TB/s" in text
        chart = xml.etree.ElementTree.parse(folder / "peers.svg").getroot()
        marks = [e for e in chart.iter() if e.tag.endswith(("circle", "polygon"))]
        rows = len(all_cases())
        assert len(marks) == 4 + rows * 4 - 1 - (rows - 21), len(marks)
        # Nothing but what is missing: no rows, no chart, still a report.
        (folder / "results.jsonl").write_text('{"kind": "missing", "what": "FLA", "reason": "absent"}\n')
        assert "FLA was not run: absent" in report.write(folder)


if __name__ == "__main__":
    test_cases()
    test_report()
    if len(sys.argv) > 1:
        test_binding(sys.argv[1])
    print("ok")

"""Tests of the benchmark that need no GPU, no torch and no NumPy: the rows; tables and chart from made-up results; that it
finds the Python package. With torch also the references. `python3 benches/peers/selftest.py`"""

import importlib.util
import json
import random
import tempfile
import xml.etree.ElementTree
from pathlib import Path

import report
from cases import GATES, TAIL, Case, all_cases, make_inputs, matches
from contestants import CONTESTANTS, ROOT
from gradients import Backward, all_gradients, forward
from steps import Step, all_steps, decode, normed


def test_cases():
    cases = all_cases()
    assert len({case.name for case in cases}) == len(cases) == 84
    ragged = [case for case in cases if "16 ragged" in case.name]
    assert [case.tokens for case in ragged] == [39866] * 4 and len(ragged[0].lengths) == 16
    assert len(TAIL) == 64 and max(TAIL) == 8192 and sorted(TAIL)[32] < 256
    assert cases[0].name == "bf16 16:16 32K normal" and cases[0].io_bytes == 4 * 32768 * 16 * 128 * 2


def test_steps():
    steps = all_steps()
    assert len({step.name for step in steps}) == len(steps)
    decode = next(step for step in steps if step.name == "decode 16:32 8 x 4, bf16 states")
    # States are read and written; q, k, v, o, a and b have 16 bits.
    assert decode.state_bytes == 2 * 8 * 32 * 128 * 128 * 2
    assert decode.io_bytes == 8 * 4 * 2 * (2 * 16 * 128 + 2 * 32 * 128 + 2 * 32)
    for step in steps:
        able = [name for name, c in CONTESTANTS.items() if getattr(c, step.operation, None)]
        assert "deltawave" in able and len(able) >= 2, step


def test_gradient_rows():
    rows = all_gradients()
    assert len({row.name for row in rows}) == len(rows) and {row.gates for row in rows} >= {*GATES, "strong"}
    first = rows[0]
    # q, k, dq, dk; v, do, dv; four numbers of gates.
    assert first.name == "backward 16:32 8K normal" and first.io_bytes == 8192 * (256 * (4 * 16 + 3 * 32) + 16 * 32)
    assert first.state_bytes == 3 * 32 * 128 * 128 * 4
    for row in rows:
        able = [name for name, c in CONTESTANTS.items() if getattr(c, row.operation, None)]
        assert able == ["deltawave", "flashqla", "fla"], row


def test_choices():
    names = ["bf16 16:32 8K model", "bf16 2:8 8K zero", "fp16 16:16 2K mixed"]
    assert [n for n in names if matches(n, "")] == names
    assert [n for n in names if matches(n, "16:32+model,fp16")] == [names[0], names[2]]
    assert not any(matches(n, "2:8+model") for n in names)


def test_references():
    """The reference by chunks against the recurrence token by token, where torch is installed."""
    if importlib.util.find_spec("torch") is None:
        print("the references were not tested: there is no torch")
        return
    import torch

    from measure import error, recurrence, reference

    for gates in GATES:
        x = make_inputs(Case("bf16", 2, 4, (300, 64, 1, 129), gates), device="cpu")
        for found, wanted in zip(reference(x, budget=1 << 22), recurrence(x)):
            assert error(found, wanted) < 1e-12, (gates, error(found, wanted))
        x.g[0, 77, 1] -= 0.1
        assert error(reference(x)[0], wanted_o := recurrence(x)[0]) < 1e-12
        x.g[0, 77, 1] += 0.1
        assert error(reference(x)[0], wanted_o) > 1e-6
    # A layer of one token is a decode from zeros: nothing of the convolution but its newest tap, and SiLU.
    step = Step("layer", 1, 1, key_heads=2, value_heads=4)
    x = step.inputs(device="cpu")
    q, k, v = torch.nn.functional.silu(x.x[:, :step.channels].double() * x.conv_weight[:, -1].double()).split(
        [256, 256, 512], -1)
    x.q, x.k, x.v, x.pool = q.view(1, 2, 128), k.view(1, 2, 128), v.view(1, 4, 128), torch.zeros_like(x.pool)
    o, state = decode(Step("decode", 1, 1, key_heads=2, value_heads=4), x)
    y, found = step.reference(x)
    assert error(found, state) < 1e-12
    assert error(y, normed(o, x.x[:, step.channels:].view(1, 4, 128), x.norm_weight)) < 1e-12


def test_gradient_references():
    """Gradients by chunks against autograd of the recurrence token by token, where torch is installed."""
    if importlib.util.find_spec("torch") is None:
        return
    import torch

    from measure import error

    for gates in (*GATES, "strong"):
        case = Backward("bf16", 2, 4, (128, 128), gates)
        x = case.inputs(device="cpu")
        leaves = [t.double().requires_grad_() for t in (x.q, x.k, x.v, x.g, x.beta, x.state)]
        q, k, v, g, beta = (t[0].view(2, 128, *t.shape[2:]) for t in leaves[:5])
        q, k = (t.repeat_interleave(2, 2) for t in (q, k))
        state, out = leaves[5], []
        for t in range(128):
            state = state * g[:, t, :, None, None].exp()
            delta = (v[:, t] - torch.einsum("bhkv,bhk->bhv", state, k[:, t])) * beta[:, t, :, None]
            state = state + k[:, t, :, :, None] * delta[:, :, None]
            out.append(torch.einsum("bhkv,bhk->bhv", state, q[:, t]) * x.scale)
        o = torch.stack(out, 1).flatten(0, 1)[None]
        wanted = torch.autograd.grad([o, state], leaves, [x.d_o.double(), x.d_state.double()])
        with torch.no_grad():
            by_chunks = forward(*leaves, x.scale, 2, 2)
            assert error(by_chunks[0], o) < 1e-12 and error(by_chunks[1], state) < 1e-12, gates
        for label, found, right in zip(case.outputs, case.reference(x), wanted):
            assert found.shape == right.shape and error(found, right) < 1e-10, (gates, label, error(found, right))


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
            for name, low, high in (("deltawave", 2, 4), ("flashinfer", 5, 14), ("flashinfer-cut", 4, 9),
                                    ("flashqla", 2.5, 9), ("fla", 8, 12)):
                ms = floor * numbers.uniform(low, high)
                results[name] = {"ms": ms, "rounds_ms": [ms, ms * 1.01], "o_error": 3e-3, "state_error": 1e-3}
            if index == 3:
                results["flashqla"] = {"error": "run: RuntimeError: made up\nand long"}
            if index == 4:
                results["fla"]["state_error"] = 0.5
            if index == 5:
                # Wrong and fast: named, and not what deltawave is held against.
                results["flashqla"].update(ms=floor, o_error=0.3)
            if index > 20:
                del results["flashinfer"]
            emit(kind="row", case=case.name, **case.line(), copy_bytes_per_s=4.0e12, copy_ms=1.1 * floor, results=results)
        for row in all_gradients():
            results = {name: {"ms": ms, "rounds_ms": [ms], **{f"{label}_error": 2e-3 for label in row.outputs}}
                       for name, ms in (("deltawave", 0.5), ("flashqla", 0.8), ("fla", 1.5))}
            if row.gates == "strong":
                results["flashqla"]["dg_error"] = 160.0
            emit(kind="row", case=row.name, **row.line(), copy_bytes_per_s=4.0e12, copy_ms=0.2, results=results)
        for index, step in enumerate(all_steps()):
            results = {"deltawave": {"ms": 0.01}, "fla": {"ms": 0.02}, "flashinfer-decode": {"ms": 0.015}}
            for entry in results.values():
                entry.update({f"{label}_error": 2e-3 for label in step.outputs}, rounds_ms=[entry["ms"]])
            if index == 0:
                results["flashinfer-decode"]["o_error"] = float("nan")
            if index == 1:
                results["fla"] = {"absent": "made-up reason"}
            emit(kind="row", case=step.name, **step.line(), copy_bytes_per_s=4.0e12, copy_ms=0.004, results=results)
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
        assert "- FLA, `bf16 16:16 8K normal`: **its results are wrong**" in text
        assert "- FlashQLA, `bf16 16:16 8K mixed`: **its results are wrong**" in text
        wrong = next(line for line in tables if line.startswith("| bf16 16:16 8K | mixed |"))
        assert "(wrong) |" in wrong and "| FlashQLA |" not in wrong
        ratios = [float(line.split("|")[-2]) for line in tables[:len(all_cases())]]
        assert min(ratios) > 0.6 and f"| all | {len(ratios)} |" in text
        assert "`decode 16:32 8 x 1, f32 states`: not run: made-up reason." in text
        assert "- FlashInfer decode, `decode 16:32 1 x 1, f32 states`: **its results are wrong**" in text
        decodes = [line for line in text.splitlines() if line.startswith("| decode")]
        assert [line.split("|")[-3].strip() for line in decodes[:3]] == ["2.00", "1.50", "1.50"], decodes[:3]
        gradients = [line for line in text.splitlines() if line.startswith("| backward")]
        assert len(gradients) == len(all_gradients()) and "| backward 16:32 8K normal |" in text
        strong = next(line for line in gradients if "strong" in line)
        assert "(wrong)" in strong and strong.split("|")[-3].strip() == "3.00", strong
        assert "| 16:32 8K strong | FlashQLA | 2.0e-03 | 2.0e-03 | 2.0e-03 | 1.6e+02 |" in text
        assert "## Gated norm" in text and "## Layer" in text and "| norm 16:32 8192 tokens |" in text
        assert "at most 1.0%" in text and "4.00 TB/s, at the end 3.90 TB/s" in text
        chart = xml.etree.ElementTree.parse(folder / "peers.svg").getroot()
        marks = [e for e in chart.iter() if e.tag.endswith(("circle", "polygon"))]
        rows = len(all_cases())
        # An error, a peer that is not there from row 21 on, two that are wrong.
        assert len(marks) == 5 + rows * 5 - 1 - (rows - 21) - 2, len(marks)
        # Nothing but what is missing: no rows, no chart, still a report.
        (folder / "results.jsonl").write_text('{"kind": "missing", "what": "FLA", "reason": "absent"}\n')
        assert "FLA was not run: absent" in report.write(folder)


def test_package():
    package = CONTESTANTS["deltawave"].package()
    assert Path(package.__file__).is_relative_to(ROOT / "python"), package.__file__
    assert {"packed", "bind"} <= set(dir(package.Prefill))


if __name__ == "__main__":
    test_cases()
    test_steps()
    test_gradient_rows()
    test_choices()
    test_references()
    test_gradient_references()
    test_report()
    test_package()
    print("ok")

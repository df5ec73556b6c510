"""benches/ranks.py on the simulator: rows of processes with gloo, FLA's rows with a stand-in, arguments, the table."""

import contextlib
import importlib.util
import io
import json
import os
import subprocess
import sys
import tempfile
import unittest
import zipfile
from pathlib import Path
from unittest import mock

from .common import np

try:
    import torch
except ImportError:
    torch = None

PROGRAM = Path(__file__).resolve().parents[2] / "benches/ranks.py"

# FLA's function and context, with a decayed sum for the recurrence: parts of ranks add to the whole's.
STAND_IN = {
    "fla/ops/__init__.py": "",
    "fla/ops/cp.py": """
def build_cp_context(cu_seqlens, group, cu_seqlens_cpu, layout):
    assert cu_seqlens_cpu.device.type == "cpu" and layout == "contiguous"
    return group
""",
    "fla/ops/gated_delta_rule.py": """
import torch
import torch.distributed as dist

def chunk_gated_delta_rule(q, k, v, g, beta, cp_context=None):
    o = v.float().cumsum(1)
    if cp_context is not None:
        every = [torch.zeros_like(o[:, -1]) for _ in range(dist.get_world_size(cp_context))]
        dist.all_gather(every, o[:, -1].contiguous(), group=cp_context)
        o = o + sum(every[:dist.get_rank(cp_context)])
    return o, None
"""}


def program():
    """The program as a module."""
    spec = importlib.util.spec_from_file_location("benches_ranks", PROGRAM)
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


@unittest.skipUnless(PROGRAM.exists(), "benches/ranks.py is not here")
class Ranks(unittest.TestCase):
    def refused(self, *given, environment=None):
        said = io.StringIO()
        without = {name: x for name, x in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
        with mock.patch.dict(os.environ, {**without, **(environment or {})}, clear=True), \
                contextlib.redirect_stderr(said), self.assertRaises(SystemExit) as problem:
            program().parsed(list(given))
        self.assertEqual(problem.exception.code, 2)
        return said.getvalue()

    def test_arguments(self):
        for given, words in ((("--tokens", "0"), "--tokens: 0"), (("--tokens", "5,x"), "--tokens: 5,x"),
                             (("--heads", "2,3"), "--heads: [2, 3]"), (("--heads", "2"), "--heads: [2]"),
                             (("--gates", "normal,loud"), "--gates"), (("--runs", "0"), "--runs: 0"),
                             (("--block", "65"), "--block: 65"), (("--block", "0"), "--block: 0"),
                             (("--fla", "/nowhere/fla.whl"), "--fla: /nowhere"), (("--fla", f"{PROGRAM.parent}:"), "--fla: /"),
                             (("--fla", str(PROGRAM)), "--fla: /"), (("--json", "/nowhere/rows"), "--json: /nowhere"),
                             (("--timeout", "0"), "--timeout: 0"), (("--ranks", "0"), "--ranks: 0")):
            said = self.refused(*given, *(() if "--ranks" in given else ("--ranks", "2")))
            self.assertIn(words, said)
            self.assertIn("; it must be ", said)
        self.assertIn("--ranks: absent", self.refused())
        self.assertIn("--ranks: 2", self.refused("--ranks", "2", environment={"RANK": "0", "WORLD_SIZE": "3"}))

    def test_help_names_every_column(self):
        said = io.StringIO()
        with contextlib.redirect_stdout(said), self.assertRaises(SystemExit):
            program().parsed(["--help"])
        described = said.getvalue().split("columns, and keys")[1]
        for name in program().HEADS:
            if name not in ("tokens", "gates", "ranks"):
                self.assertRegex(described, rf"(?m)^  {name} ")

    def test_table_and_failures(self):
        own = {"who": "deltawave", "tokens": 128, "gates": "zero", "ranks": 2, "alone": 2.0, "shared": 1.0, "call": 1.25,
               "gather": 0.25, "speed_up": 2.0, "host": 0.5, "bits_equal_one_rank": True, "error": 1e-3, "state_error": 1e-3}
        other = {**own, "tokens": 256, "bits_equal_one_rank": False, "state_error": float("nan")}
        fla = {"who": "fla", "tokens": 128, "gates": "zero", "ranks": 2, "alone": 4.0, "shared": 8.0, "call": 8.0,
               "speed_up": 0.5, "host": 0.5, "error": 0.5}
        bench = program()
        lines = [line.split() for line in bench.table([own, other, fla])]
        self.assertEqual([line[:2] for line in lines[1:]], [["deltawave", "128"], ["fla", "128"], ["deltawave", "256"]])
        self.assertEqual(lines[1][4:], ["2.000", "1.000", "1.250", "0.250", "2.000", "0.500", "equal", "1.0e-03"])
        self.assertEqual(lines[2][4:], ["4.000", "8.000", "8.000", "-", "0.500", "0.500", "-", "5.0e-01"])
        self.assertEqual(bench.failures([own, fla]), [])
        found = bench.failures([own, other, fla])
        self.assertEqual(len(found), 2)
        self.assertIn("256 tokens, zero gates: other bits", found[0])
        self.assertIn("state_error nan", found[1])
        self.assertIn("error 9.00e-03", bench.failures([{**own, "error": 9e-3}])[0])

    @unittest.skipIf(torch is None, "torch is not installed")
    def test_times_are_medians_of_ranks_after_warm_up(self):
        bench, done = program(), []
        elapsed = iter([90., 80., 70., 5., 1., 3.])

        class Event:
            def __init__(self, enable_timing):
                self.record, self.synchronize = lambda: done.append("record"), lambda: None

            def elapsed_time(self, _):
                return next(elapsed)

        bench.torch, bench.dist = mock.Mock(), mock.Mock()
        bench.torch.cuda.Event = Event
        bench.torch.cuda._sleep = lambda _: done.append("pause")
        clock = bench.Clock(mock.Mock(type="cuda"), 3)
        bench.dist.all_reduce = lambda x: done.append("all-reduce")
        slowest = []
        clock.over_ranks = lambda x, how: slowest.append(how) or 2 * x
        self.assertEqual(clock(lambda: done.append("run"), "MIN"), 6)
        self.assertEqual(slowest, ["MIN"] * 6)
        self.assertEqual(done, ["pause", "all-reduce", "record", "run", "record"] * 6)
        self.assertGreaterEqual(clock.host, 0)

    def run_program(self, *given, code=0):
        environment = {name: x for name, x in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
        found = subprocess.run([sys.executable, PROGRAM, "--device", "cpu", "--block", "64", "--timeout", "120", *given],
                               env=environment, capture_output=True, text=True, timeout=300)
        self.assertEqual(found.returncode, code, found.stderr)
        return found

    @unittest.skipIf(torch is None or np is None, "torch 2.4 or newer, with NumPy, is not installed")
    def test_rows_on_the_simulator(self):
        with tempfile.TemporaryDirectory() as folder:
            wheel, rows = Path(folder) / "fla_core-0-py3-none-any.whl", Path(folder) / "rows.jsonl"
            needs = Path(folder) / "needed-0-py3-none-any.whl"
            with zipfile.ZipFile(wheel, "w") as packed:
                for path, text in STAND_IN.items():
                    packed.writestr(path, text)
                packed.writestr("fla/__init__.py", "import needed")
            with zipfile.ZipFile(needs, "w") as packed:
                packed.writestr("needed.py", "")
            said = self.run_program("--ranks", "2", "--check", "--gates", "mixed", "--tokens", "200,131", "--fla",
                                    f"{wheel}:{needs}", "--json", str(rows))
            self.assertIn("check: bits of one rank", said.stdout)
            self.assertIn("131 tokens, mixed gates: left out: its context parallelism takes tokens that 2 divides", said.stdout)
            found = [json.loads(line) for line in rows.read_text().splitlines()]
            self.assertEqual([(row["who"], row["tokens"]) for row in found],
                             [("deltawave", 200), ("deltawave", 131), ("fla", 200)])
            for row in found[:2]:
                self.assertTrue(row["bits_equal_one_rank"])
                self.assertLess(row["error"], 8e-3)
                self.assertIsNone(row["shared"])  # the simulator has no times
            self.assertLess(found[2]["error"], 1e-6)

    @unittest.skipIf(torch is None or np is None, "torch 2.4 or newer, with NumPy, is not installed")
    def test_rows_of_the_backward_on_the_simulator(self):
        for ranks, kind in (("2", "contiguous"), ("4", "zigzag")):
            said = self.run_program("--ranks", ranks, "--kind", kind, "--backward", "--check", "--gates", "mixed", "--tokens", "300",
                                    "--json")
            self.assertIn("check: bits of one rank", said.stderr)
            self.assertIn("fla: left out: --backward measures deltawave alone", said.stderr)
            row, = map(json.loads, said.stdout.splitlines()[-1:])
            self.assertTrue(row["backward"] and row["bits_equal_one_rank"])
            self.assertEqual(row["block"], 64)
            # N' and M transposed beside N and M, and one more block of each rank.
            self.assertGreater(row["backward_summary_bytes"], row["summary_bytes"])
            self.assertEqual(set(row["errors"]), {"q", "k", "v", "g", "beta"})
            self.assertEqual(row["error"], max(row["errors"].values()))
            self.assertTrue(0 < row["error"] < 4e-2)
            for name in ("alone", "shared", "call", "gather", "backward_alone", "backward_shared", "backward_gather"):
                self.assertIsNone(row[name])  # the simulator has no times

    def test_failures_of_gradients(self):
        errors = {name: 1e-3 for name in "qkv"}
        row = {"who": "deltawave", "tokens": 128, "gates": "zero", "bits_equal_one_rank": True,
               "errors": {**errors, "g": 3e-2, "beta": 1e-3}}
        bench = program()
        self.assertEqual(bench.failures([row]), [])
        for name, error in (("g", 5e-2), ("k", 2e-2), ("beta", float("nan"))):
            found, = bench.failures([{**row, "errors": {**row["errors"], name: error}}])
            self.assertIn(f"error of d_{name} {error:.2e}, above ", found)

    @unittest.skipIf(torch is None or np is None, "torch 2.4 or newer, with NumPy, is not installed")
    def test_what_fails(self):
        # FLA, whose package is a namespace here, fails on one rank: all leave it out, and say which rank said what.
        with tempfile.TemporaryDirectory() as folder:
            for path, text in STAND_IN.items():
                (Path(folder) / path).parent.mkdir(parents=True, exist_ok=True)
                (Path(folder) / path).write_text(text)
            cp = Path(folder) / "fla/ops/cp.py"
            cp.write_text(cp.read_text() + "import os\nif os.environ['RANK'] == '1': raise OSError('no driver')\n")
            said = self.run_program("--ranks", "2", "--gates", "zero", "--kind", "zigzag", "--fla", folder, "--json")
            self.assertIn("fla: left out: rank 1: OSError: no driver", said.stderr)
            row, = map(json.loads, said.stdout.splitlines()[-1:])
            self.assertTrue(row["bits_equal_one_rank"])
            self.assertNotIn("error", row)


if __name__ == "__main__":
    unittest.main()

"""python/examples run, and print what they promise."""

import os
import re
import subprocess
import sys
import unittest
from pathlib import Path

import deltawave as dw

from .common import needs_numpy

PYTHON = Path(__file__).resolve().parents[1]


class Examples(unittest.TestCase):
    @needs_numpy
    def test_decode_goes_on_from_a_prefill(self):
        folder = PYTHON / "examples"
        # tests/test_training.py runs the other.
        self.assertEqual(sorted(path.name for path in folder.glob("*.py")), ["prefill.py", "train.py"])
        env = {**os.environ, "PYTHONPATH": str(PYTHON), "DELTAWAVE_C_LIBRARY": str(dw.Library().path)}
        run = subprocess.run([sys.executable, folder / "prefill.py"], env=env, capture_output=True, text=True)
        self.assertEqual(run.returncode, 0, run.stderr)
        found = re.search(r"2 decoded tokens differ from a prefill by (\S+) of", run.stdout)
        self.assertTrue(found and 0 < float(found[1]) < 0.02, run.stdout)


if __name__ == "__main__":
    unittest.main()

"""The program of README.md runs."""

import contextlib
import io
import re
import unittest
from pathlib import Path

from .common import needs_numpy

README = Path(__file__).resolve().parents[1] / "README.md"


class Readme(unittest.TestCase):
    @needs_numpy
    def test_the_first_program_prints_four_numbers_and_the_second_goes_on(self):
        first, second = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)[:2]
        said, names = io.StringIO(), {}
        with contextlib.redirect_stdout(said):
            exec(compile(first, str(README), "exec"), names)
            exec(compile(second, str(README), "exec"), names)
        names["context"].synchronize()
        y = names["dw"].to_float(names["y"])
        self.assertTrue((abs(y) < 100).all() and (y != 0).any(axis=(1, 2)).all())
        numbers = [float(x) for x in said.getvalue().strip("[] \n").split()]
        self.assertEqual(len(numbers), 4)
        self.assertTrue(all(0 < abs(x) < 1 for x in numbers), numbers)

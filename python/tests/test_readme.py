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
    def test_the_first_program_prints_four_numbers(self):
        program = re.search(r"```python\n(.*?)```", README.read_text(), re.DOTALL).group(1)
        said = io.StringIO()
        with contextlib.redirect_stdout(said):
            exec(compile(program, str(README), "exec"), {})
        numbers = [float(x) for x in said.getvalue().strip("[] \n").split()]
        self.assertEqual(len(numbers), 4)
        self.assertTrue(all(0 < abs(x) < 1 for x in numbers), numbers)

"""Tests of the package on the simulator: `python3 -m unittest discover -s python/tests -t python`.

What needs a package that is not installed is skipped with words.
"""

"""Packs libdeltawave_c.so into the package: `cargo build --release -p deltawave-c`, then `pip install ./python`.

The library is DELTAWAVE_C_LIBRARY, else the one beside the modules, else the one in target/release. If none exists, the package
is installed without a library. The first use then says how to build one. The library needs no particular Python: the wheel is
`py3-none-PLATFORM`, where PLATFORM is this machine's, or DELTAWAVE_WHEEL_PLATFORM (`make wheel`).
"""

import os
import shutil
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

HERE = Path(__file__).resolve().parent
NAME = "libdeltawave_c.so"


def library():
    """Path of the library to install, or None."""
    named = os.environ.get("DELTAWAVE_C_LIBRARY")
    if named and not Path(named).is_file():
        raise SystemExit(f"DELTAWAVE_C_LIBRARY: {named} is not a file; it must be a {NAME}, or unset")
    places = [Path(named)] if named else [HERE / "deltawave" / NAME, HERE.parent / "target/release" / NAME]
    return next((path for path in places if path.is_file()), None)


class BuildWithLibrary(build_py):
    """Copies the modules, and the library beside them. Removes a library of an earlier build."""

    def run(self):
        super().run()
        to = Path(self.build_lib) / "deltawave" / NAME
        to.unlink(missing_ok=True)
        found = library()
        if found:
            to.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(found, to)
        else:
            self.announce(f"no {NAME}: the package is installed without it; cargo build --release -p deltawave-c makes it", 3)

    def get_outputs(self, include_bytecode=1):
        to = os.path.join(self.build_lib, "deltawave", NAME)
        outputs = super().get_outputs(include_bytecode)
        return outputs + ([to] if os.path.exists(to) and to not in outputs else [])


class ForThisPlatform(Distribution):
    """Marks a wheel that contains the library as specific to this platform."""

    def has_ext_modules(self):
        return library() is not None


class ForEveryPython(bdist_wheel):
    """Names the wheel by its platform alone."""

    def get_tag(self):
        platform = super().get_tag()[2]
        if library():
            platform = os.environ.get("DELTAWAVE_WHEEL_PLATFORM") or platform
        return "py3", "none", platform


setup(cmdclass={"build_py": BuildWithLibrary, "bdist_wheel": ForEveryPython}, distclass=ForThisPlatform)

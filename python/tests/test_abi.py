"""The ctypes structs and constants are those of include/deltawave.h, by a C compiler's word."""

import ctypes
import ctypes.util
import os
import shutil
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

import deltawave as dw
from deltawave import _abi, library

ROOT = Path(__file__).resolve().parents[2]


class Abi(unittest.TestCase):
    def test_sizes_offsets_and_constants_are_the_header_s(self):
        compiler = shutil.which("cc")
        if compiler is None:
            self.skipTest("there is no C compiler: cc")
        structs = [s for s in vars(_abi).values() if isinstance(s, type) and s.__name__.startswith("dw_")]
        constants = {name: value for name, value in vars(_abi).items() if name.startswith("DW_")}
        self.assertGreater(len(structs), 5)
        self.assertGreater(len(constants), 20)
        wanted, lines = {}, []

        def expect(text, value):
            wanted[text] = value
            lines.append(f'printf("{text}=%lld\\n", (long long){text});')

        for struct in structs:
            name = struct.__name__
            expect(f"sizeof({name})", ctypes.sizeof(struct))
            for field, _ in struct._fields_:
                place = getattr(struct, field)
                expect(f"offsetof({name}, {field})", place.offset)
                expect(f"sizeof((({name} *)0)->{field})", place.size)
        for name, value in constants.items():
            expect(name, value)
        with tempfile.TemporaryDirectory() as folder:
            source, program = Path(folder) / "abi.c", Path(folder) / "abi"
            source.write_text('#include "deltawave.h"\n#include <stdio.h>\nint main(void) {\n' + "\n".join(lines)
                              + "\nreturn 0; }\n")
            subprocess.run([compiler, "-I", str(ROOT / "include"), "-o", str(program), str(source)], check=True)
            said = subprocess.run([str(program)], check=True, capture_output=True, text=True).stdout
        found = {text: int(value) for text, _, value in (line.rpartition("=") for line in said.splitlines())}
        self.assertEqual(found, wanted)

    def test_the_module_is_what_the_header_gives(self):
        made = subprocess.run([sys.executable, str(ROOT / "python/generate_abi.py")], check=True, capture_output=True,
                              text=True).stdout
        committed = Path(_abi.__file__).read_text()
        self.assertEqual(made, committed, "python3 python/generate_abi.py --write makes it anew")

    def test_versions_agree(self):
        self.assertEqual(library.default().version(), dw.__version__)
        project = (ROOT / "python/pyproject.toml").read_text()
        self.assertIn(f'\nversion = "{dw.__version__}"\n', project)


class Finding(unittest.TestCase):
    def test_a_library_that_is_named_must_be_one(self):
        for path in ("/nowhere/libdeltawave_c.so", __file__):
            with self.assertRaises(dw.LibraryError) as caught:
                dw.Library(path)
            self.assertIn(path, str(caught.exception))

    def test_the_environment_comes_first(self):
        before = os.environ.get("DELTAWAVE_C_LIBRARY")
        os.environ["DELTAWAVE_C_LIBRARY"] = "/nowhere/else.so"
        try:
            self.assertEqual(library.find(), Path("/nowhere/else.so"))
        finally:
            if before is None:
                del os.environ["DELTAWAVE_C_LIBRARY"]
            else:
                os.environ["DELTAWAVE_C_LIBRARY"] = before

    def test_other_libraries_are_refused(self):
        with self.assertRaises(dw.LibraryError) as caught:
            dw.Library(ctypes.util.find_library("c") or "libc.so.6")
        self.assertIn("dw_", str(caught.exception))

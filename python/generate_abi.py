"""Generates deltawave/_abi.py from include/deltawave.h: constants, structs and functions in ctypes.

    python3 python/generate_abi.py           prints it
    python3 python/generate_abi.py --write   writes it

A few patterns parse the header, which keeps to one style; a declaration that they do not match is an error.
tests/test_abi.py compares the result with a C compiler's sizes, offsets and constants.
"""

import re
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
HEADER = HERE.parent / "include/deltawave.h"
MODULE = HERE / "deltawave/_abi.py"

TYPES = {"size_t": "c_size_t", "int": "c_int", "int32_t": "c_int32", "uint32_t": "c_uint32", "int64_t": "c_int64",
         "uint64_t": "c_uint64", "float": "c_float", "char": "c_char"}

DECLARATION = re.compile(r"(?:const )?(\w+) (\**)(\w+)(?:\[(\d+)\])?$")

PREAMBLE = '''"""include/deltawave.h in ctypes, made by generate_abi.py: see there. Do not edit."""

from ctypes import (POINTER, Structure, c_char, c_char_p, c_float, c_int, c_int32, c_int64, c_size_t, c_uint32, c_uint64,
                    c_void_p, sizeof)
from typing import Any


class Sized(Structure):
    """A struct that begins with its size."""

    def __init__(self, **fields: Any) -> None:
        super().__init__(size=sizeof(type(self)), **fields)

'''


def ctype(base, stars, structs):
    """The ctypes name of a C type. Pointers that only the library or the device reads through are `c_void_p`."""
    if not stars:
        return TYPES[base]
    if len(stars) == 1 and (base in structs or base in ("size_t",)):
        return f"POINTER({TYPES.get(base, base)})"
    return "c_void_p" if len(stars) == 1 else "POINTER(c_void_p)"


def declaration(text, structs):
    """Name and type of a field or parameter."""
    found = DECLARATION.match(" ".join(text.split()))
    if not found:
        raise SystemExit(f"not understood: {text!r}")
    base, stars, name, count = found.groups()
    kind = ctype(base, stars, structs)
    return name, f"{kind} * {count}" if count else kind


def generate(header):
    """The text of the module."""
    text = re.sub(r"/\*.*?\*/", "", header, flags=re.DOTALL)
    lines = [PREAMBLE]
    constants = re.findall(r"^#define (DW_\w+) (\d+)$", text, re.MULTILINE)
    for body in re.findall(r"\benum \{(.*?)\};", text, re.DOTALL):
        constants += re.findall(r"(DW_\w+) = (-?\d+)", body)
    lines += [f"{name} = {value}" for name, value in constants]
    structs = re.findall(r"typedef struct (\w+) \{(.*?)\} \1;", text, re.DOTALL)
    known = {name for name, _ in structs}
    for name, body in structs:
        fields = [declaration(field, known) for field in body.split(";") if field.strip()]
        base = "Sized" if fields[0][0] == "size" else "Structure"
        lines += ["", "", f"class {name}({base}):", "    _fields_ = ["]
        lines += [f'        ("{field}", {kind}),' for field, kind in fields]
        lines.append("    ]")
    lines += ["", "", "# Result and parameters.", "FUNCTIONS = {"]
    results = {"int ": "c_int", "void ": "None", "const char *": "c_char_p"}
    for result, name, parameters in re.findall(r"^(int |void |const char \*)(dw_\w+)\((.*?)\);", text,
                                               re.MULTILINE | re.DOTALL):
        listed = [] if parameters == "void" else [declaration(p, known)[1] for p in parameters.split(",")]
        lines.append(f'    "{name}": ({results[result]}, [{", ".join(listed)}]),')
    lines.append("}")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    made = generate(HEADER.read_text())
    if sys.argv[1:] == ["--write"]:
        MODULE.write_text(made)
    elif len(sys.argv) == 1:
        sys.stdout.write(made)
    else:
        raise SystemExit(__doc__)

"""Packs a code object for gfx942 as clang embeds it: an offload bundle with an empty entry for the host.

Distributions package clang's own bundler apart from clang, and that of another version need not fit.
"""

import struct
import sys

PAGE = 4096


def main(source, target):
    with open(source, "rb") as file:
        code = file.read()
    entries = ((b"host-x86_64-unknown-linux-gnu-", 0), (b"hipv4-amdgcn-amd-amdhsa--gfx942", len(code)))
    header = b"__CLANG_OFFLOAD_BUNDLE__" + struct.pack("<Q", len(entries))
    for name, size in entries:
        header += struct.pack("<QQQ", PAGE, size, len(name)) + name
    with open(target, "wb") as file:
        file.write(header.ljust(PAGE, b"\0") + code)


main(*sys.argv[1:])

"""deltawave's prefill beside FLA's chain of Triton kernels, on the simulator: `make bench-compare`.

    benches/compare/run [--rows GPU:HKxHVxT,GPU:HKxHVxNxT,...] [--out FOLDER]

Both get the same inputs in the same run, and their results are compared. FLA's kernels (fla-core, compiled by Triton) run
with the configuration of their autotuning list whose time is modelled shortest, found with the same heads and fewer
tokens. What is counted is exact, times are modelled. FOLDER gets results.json, compare.md and compare.svg.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ROWS = ("mi300x:16x32x8192,mi300x:2x8x8192,mi300x:2x8x32768,mi300x:16x64x32768,mi300x:4x16x8x4096,"
        "mi308x:16x32x8192,mi308x:2x8x8192")


# A GPU, then heads and tokens, or heads, sequences and tokens.
ROW = re.compile(r"\w+:[1-9]\d*x[1-9]\d*(x[1-9]\d*){1,2}")


def row_names(text):
    """What --rows names."""
    found = text.split(",")
    for row in found:
        if not ROW.fullmatch(row):
            raise argparse.ArgumentTypeError(f"{row!r} is not GPU:HKxHVxT or GPU:HKxHVxNxT, such as mi300x:16x32x8192")
    return found


def arguments():
    parser = argparse.ArgumentParser(prog="benches/compare/run", description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=row_names, default=ROWS, help="a GPU, and key heads x value heads x "
                        "tokens of one sequence, or x sequences x tokens of each")
    parser.add_argument("--out", type=Path, default=ROOT / "target/compare", help="where results go")
    parser.add_argument("--report", action="store_true", help="only write table and chart again")
    return parser.parse_args()


def main():
    options = arguments()
    options.out.mkdir(parents=True, exist_ok=True)
    results = options.out / "results.json"
    if not options.report:
        rows = []
        for name in options.rows:
            gpu, shape = name.split(":")
            start = time.monotonic()
            row = options.out / f"{gpu}.{shape}.json"
            profile = options.out / f"{gpu}.{shape}.launches"
            profile.unlink(missing_ok=True)
            # The runtime reads its environment once.
            environment = {**os.environ, "DELTAWAVE_SIM_GPU": gpu, "DELTAWAVE_SIM_PROFILE": str(profile)}
            worker = [sys.executable, str(Path(__file__).with_name("worker.py")), gpu, shape, str(row)]
            if subprocess.run(worker, env=environment).returncode:
                sys.exit(f"benches/compare: nothing came of {name}")
            rows.append(json.loads(row.read_text()))
            print(f"{gpu}, {shape}: {time.monotonic() - start:.0f} s", flush=True)
        results.write_text(json.dumps(rows, indent=1) + "\n")
    import report

    rows = json.loads(results.read_text())
    (options.out / "compare.md").write_text(report.markdown(rows))
    (options.out / "compare.svg").write_text(report.chart(rows))
    print(report.markdown(rows))


if __name__ == "__main__":
    main()

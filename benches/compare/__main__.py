"""deltawave's prefill and its backward beside FLA's chains of Triton kernels, on the simulator: `make bench-compare`.

    benches/compare/run [--operation forward|backward|both] [--rows GPU:HKxHVxT,GPU:HKxHVxNxT,...] [--out FOLDER]
                        [--aiter CHECKOUT [--aiter-code FOLDER]]

Both get the same inputs in the same run, and their results are compared. FLA's kernels (fla-core, compiled by Triton) run
with the configuration of their autotuning list whose time is modelled shortest, found with the same heads and, in large
rows, fewer tokens. With a checkout of https://github.com/ROCm/aiter the forward has aiter's kernels, too, likewise the fastest ones:
those of Triton and, with code objects that `sim/calibration/compile.py` made (--help), those of FlyDSL. What is counted is exact, times are modelled. FOLDER gets results.json, compare.md and compare.svg of the forward,
results_backward.json, compare_backward.md and compare_backward.svg of the backward.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ROWS = {
    "forward": "mi300x:16x32x8192,mi300x:2x8x8192,mi300x:2x8x32768,mi300x:16x64x32768,mi300x:4x16x8x4096,"
               "mi308x:16x32x8192,mi308x:2x8x8192",
    "backward": "mi300x:16x32x2048,mi300x:16x32x8192,mi300x:4x8x8192,mi300x:4x8x32768,mi300x:16x32x8x1024,"
                "mi308x:16x32x8192",
}
# Ends of the names of files.
SUFFIX = {"forward": "", "backward": "_backward"}


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
    parser.add_argument("--operation", choices=[*ROWS, "both"], default="both", help="what is compared")
    parser.add_argument("--rows", type=row_names, help="a GPU, and key heads x value heads x tokens of one sequence, or x "
                        "sequences x tokens of each")
    parser.add_argument("--out", type=Path, default=ROOT / "target/compare", help="where results go")
    parser.add_argument("--pages", type=Path, help="where tables and charts are copied to")
    parser.add_argument("--aiter", type=Path, metavar="CHECKOUT", help="a checkout of https://github.com/ROCm/aiter")
    parser.add_argument("--aiter-code", type=Path, metavar="FOLDER", help="FlyDSL's kernels: sim/calibration/compile.py "
                        "CHECKOUT FOLDER fly_prepare.co fly_k5.HV.HK.{16,32,64}.dense-final.co, for the heads of each row")
    parser.add_argument("--report", action="store_true", help="only write tables and charts again")
    return parser.parse_args()


def compare(operation, options):
    """Runs the rows of an operation and keeps their results."""
    rows = []
    for name in options.rows or row_names(ROWS[operation]):
        gpu, shape = name.split(":")
        start = time.monotonic()
        row = options.out / f"{operation}.{gpu}.{shape}.json"
        profile = row.with_suffix(".launches")
        profile.unlink(missing_ok=True)
        # The runtime reads its environment once.
        environment = {**os.environ, "DELTAWAVE_SIM_GPU": gpu, "DELTAWAVE_SIM_PROFILE": str(profile)}
        worker = [sys.executable, str(Path(__file__).with_name("worker.py")), operation, gpu, shape, str(row)]
        if operation == "forward" and options.aiter:
            worker += [str(x.resolve()) for x in (options.aiter, options.aiter_code) if x]
        if subprocess.run(worker, env=environment).returncode:
            sys.exit(f"benches/compare: nothing came of {name}, {operation}")
        rows.append(json.loads(row.read_text()))
        print(f"{operation}, {gpu}, {shape}: {time.monotonic() - start:.0f} s", flush=True)
    results(operation, options).write_text(json.dumps(rows, indent=1) + "\n")


def results(operation, options):
    return options.out / f"results{SUFFIX[operation]}.json"


def main():
    options = arguments()
    options.out.mkdir(parents=True, exist_ok=True)
    import report

    for operation in ROWS if options.operation == "both" else [options.operation]:
        if not options.report:
            compare(operation, options)
        rows = json.loads(results(operation, options).read_text())
        if operation == "forward":
            text, picture = report.markdown(rows), report.chart(rows)
        else:
            text = report.backward_markdown(rows)
            picture = report.chart(rows, report.BACKWARD_HEADING, report.BACKWARD_ORDER)
        page = options.out / f"compare{SUFFIX[operation]}.md"
        page.write_text(text)
        page.with_suffix(".svg").write_text(picture)
        print(text)
        if options.pages:
            for file in (page, page.with_suffix(".svg")):
                shutil.copy(file, options.pages)


if __name__ == "__main__":
    main()

"""Fits the timing model's two free parameters to published times, and writes the tables of docs/results/timing-model.md.

    calibrate.py                   from the data file alone
    calibrate.py --code FOLDER     models every launch again first, with the code objects in FOLDER
    calibrate.py --check           fails if the document, or the parameters in the source, are not what comes out

Needs Python 3 and nothing else; with --code also `wavesim`.
"""

import argparse
import hashlib
import json
import os
import re
import statistics
import struct
import subprocess
import sys
import tempfile

HERE = os.path.dirname(os.path.abspath(__file__))
DATA = os.path.join(HERE, "rows.json")
DOCUMENT = os.path.join(HERE, "../../docs/results/timing-model.md")
SOURCE = os.path.join(HERE, "../src/timing/mod.rs")


def fit(rows):
    """Scale and microseconds of a launch with the least squares of relative errors; neither is negative."""
    pairs = [(r["modelled"] / r["published_us"], len(r["launches"]) / r["published_us"]) for r in rows]
    a = sum(x * x for x, _ in pairs)
    b = sum(x * y for x, y in pairs)
    c = sum(y * y for _, y in pairs)
    p, q = sum(x for x, _ in pairs), sum(y for _, y in pairs)
    determinant = a * c - b * b
    if determinant > 1e-9 * a * c:
        scale, launch = (p * c - q * b) / determinant, (a * q - b * p) / determinant
        if launch >= 0:
            return scale, launch
    return p / a, 0.0


def predict(row, parameters):
    scale, launch = parameters
    return scale * row["modelled"] + launch * len(row["launches"])


def error(row, parameters):
    return predict(row, parameters) / row["published_us"] - 1


def median(rows, parameters):
    return statistics.median(abs(error(r, parameters)) for r in rows)


def concordance(rows, parameters):
    """The part of the pairs of rows, at least 5% apart, that the model puts in the right order."""
    right = total = 0
    for i, r in enumerate(rows):
        for s in rows[:i]:
            if abs(r["published_us"] / s["published_us"] - 1) < 0.05:
                continue
            total += 1
            right += (r["published_us"] > s["published_us"]) == (predict(r, parameters) > predict(s, parameters))
    return right / total


def halves(rows):
    """Every second row of each kind of kernel, and the others."""
    inside, outside, seen = [], [], {}
    for row in rows:
        n = seen[row["kind"]] = seen.get(row["kind"], -1) + 1
        (outside if n % 2 else inside).append(row)
    return inside, outside


def argument(text, folder):
    """An argument of `wavesim`; `i32[..]` are the values of a buffer, written to a file."""
    values = re.fullmatch(r"i32\[(.*)\]", text)
    if not values:
        return text
    numbers = [int(n) for n in values[1].split(",")]
    path = os.path.join(folder, hashlib.sha256(text.encode()).hexdigest()[:16])
    with open(path, "wb") as file:
        file.write(struct.pack(f"<{len(numbers)}i", *numbers))
    return f"in:{path}"


def remodel(data, folder, wavesim):
    """Models every launch with the code objects in `folder`."""
    with tempfile.TemporaryDirectory() as temporary:
        for row in data["rows"]:
            for launch in row["launches"]:
                path = os.path.join(folder, launch["code"])
                with open(path, "rb") as file:
                    launch["sha256"] = hashlib.sha256(file.read()).hexdigest()
                command = [wavesim, "model", path, "--kernel", launch["kernel"], "--gpu", data["gpu"], "--json",
                           "--grid", ",".join(map(str, launch["grid"])), "--block", str(launch["block"]),
                           "--lds", str(launch["lds"])]
                for text in launch["arguments"]:
                    command += ["--arg", argument(text, temporary)]

                def model(*more):
                    return json.loads(subprocess.run([*command, *more], check=True, capture_output=True, text=True).stdout)

                found = model("--unfitted")
                # Memory's bandwidth is not scaled, so the scale may change clocks. The fit is linear as long as it does not.
                if model()["clocks"] != found["clocks"]:
                    sys.exit(f"{row['name']}: clocks depend on the scale, which the fit does not know")
                launch["model"] = {k: v for k, v in found.items() if k not in ("kernel", "gpu")}
                launch["model"]["modelled_us"] = round(found["modelled_us"], 2)
            print(f"{row['name']}: {sum(x['model']['modelled_us'] for x in row['launches']):.1f} us before the fit",
                  flush=True)


def tables(rows, inside, parameters):
    """The figures as Markdown."""
    scale, launch = parameters
    outside = [r for r in rows if r not in inside]
    lines = [
        f"Fitted: scale {scale:.3f}, {launch:.2f} us for a launch.",
        "",
        "| rows | number | median error | worst | pairs in the right order |",
        "|---|---:|---:|---:|---:|",
    ]
    for name, some in (("in the fit", inside), ("held out", outside), ("all", rows)):
        worst = max((error(r, parameters) for r in some), key=abs)
        lines.append(f"| {name} | {len(some)} | {median(some, parameters):.1%} | {worst:+.1%} | "
                     f"{concordance(some, parameters):.1%} |")
    lines += ["", "Rows of one kind of kernel resemble each other. So the harder question: parameters fitted without any "
              "row of a kind, on its rows.", "",
              "| kind left out | rows | scale | us a launch | median error | worst |", "|---|---:|---:|---:|---:|---:|"]
    for kind in dict.fromkeys(r["kind"] for r in rows):
        own = [r for r in rows if r["kind"] == kind]
        other = fit([r for r in rows if r["kind"] != kind])
        worst = max((error(r, other) for r in own), key=abs)
        lines.append(f"| {kind} | {len(own)} | {other[0]:.3f} | {other[1]:.2f} | {median(own, other):.1%} | {worst:+.1%} |")
    lines += ["", "| row | published us | modelled us | error | |", "|---|---:|---:|---:|---|"]
    for row in rows:
        lines.append(f"| {row['name']} | {row['published_us']:.1f} | {predict(row, parameters):.1f} | "
                     f"{error(row, parameters):+.1%} | {'fit' if row in inside else 'held out'} |")
    return "\n".join(lines) + "\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--code", metavar="FOLDER", help="model every launch again, with these code objects")
    parser.add_argument("--wavesim", default="target/release/wavesim")
    parser.add_argument("--check", action="store_true", help="change nothing, and fail if something would change")
    arguments = parser.parse_args()
    with open(DATA) as file:
        data = json.load(file)
    if arguments.code:
        remodel(data, arguments.code, arguments.wavesim)
        if not arguments.check:
            with open(DATA, "w") as file:
                json.dump(data, file, indent=1)
                file.write("\n")
    rows = data["rows"]
    for row in rows:
        row["modelled"] = sum(x["model"]["modelled_us"] for x in row["launches"])
    inside, _ = halves(rows)
    scale, launch = fit(inside)
    parameters = round(scale, 3), round(launch, 2)
    text = tables(rows, inside, parameters)
    print(text)
    stale = []
    constant = f"scale: {parameters[0]},\n        launch_us: {parameters[1]},"
    for path, pattern, new in (
            (DOCUMENT, r"(?<=<!-- calibration -->\n\n).*?(?=\n<!-- end -->)", text),
            (SOURCE, r"(?<=CALIBRATED: Fit = Fit \{\n        )scale: [\d.]+,\n        launch_us: [\d.]+,", constant)):
        with open(path) as file:
            old = file.read()
        changed, places = re.subn(pattern, lambda _: new, old, count=1, flags=re.S)
        assert places == 1, f"{path} has no place for them"
        if changed != old:
            stale.append(os.path.relpath(path))
            if not arguments.check:
                with open(path, "w") as file:
                    file.write(changed)
    if stale:
        print(("not what comes out: " if arguments.check else "changed: ") + ", ".join(stale))
    return 1 if stale and arguments.check else 0


if __name__ == "__main__":
    sys.exit(main())

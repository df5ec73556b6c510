"""Tables and a chart of what was measured: Markdown and SVG from results.jsonl."""

import html
import json
import math

from cases import GATES
from contestants import CONTESTANTS

COLOURS = {"deltawave": "#c2410c", "fla": "#2563eb", "flashqla": "#15803d", "flashinfer": "#7c3aed",
           "flashinfer-cut": "#be185d", "flashinfer-decode": "#7c3aed"}

WRONG = 0.02  # errors beyond this are no rounding

# The other operations: title, and what is measured.
OPERATIONS = {
    "backward": ("Backward of prefill", "Gradients of q, k, v, g, beta and the initial states, from those of o and of the final "
                                        "states, in f32. FLA and FlashQLA are given what their forward keeps; deltawave keeps "
                                        "nothing, and computes inverses again. Initial states are in f32. Gates "
                                        "`strong` are about -22 a token."),
    "decode": ("Decode", "Sequences x tokens. Gates are computed and rows of q and k normalised inside, states are updated: "
                         "in place, but FLA writes new ones. States are value-major for deltawave and FlashInfer."),
    "norm": ("Gated norm", "Rows of a value head: normalised, weighted, times silu of the gate."),
    "conv": ("Convolution and split", "Width 4, SiLU, then q, k and v as tensors of their own: for FLA a copy after its "
                                      "convolution."),
    "layer": ("Layer", "From the projections to the rows before the output projection: convolution, gates, prefill, gated "
                       "norm. For FLA: its kernels for these, one after the other."),
}


def order(row):
    """By type, heads and length."""
    heads = row["value_heads"], row["key_heads"]
    many = "x" in row["batch"] or "ragged" in row["batch"]
    return row["dtype"], heads, many, row["tokens"], row["batch"], GATES.index(row["gates"])


class Results:
    """The lines of results.jsonl."""

    def __init__(self, path):
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        kinds = lambda kind: [line for line in lines if line["kind"] == kind]  # noqa: E731
        # Rows of older results are prefills, and do not say so.
        prefill = lambda row: row.get("operation", "prefill") == "prefill"  # noqa: E731
        self.rows = sorted(filter(prefill, kinds("row")), key=order)
        self.steps = [row for row in kinds("row") if not prefill(row)]
        self.dropped, self.missing = kinds("dropped"), kinds("missing")
        self.machine = (kinds("machine") or [{}])[0]
        self.end = (kinds("end") or [{}])[-1]
        self.names = contestants_of(self.rows)

    def floor_ms(self, row):
        """What moving q, k, v and o once takes at the copy bandwidth of this run."""
        bandwidth = row.get("copy_bytes_per_s") or self.machine.get("copy_bytes_per_s")
        return row["io_bytes"] / bandwidth * 1e3 if bandwidth else math.nan


def contestants_of(rows):
    seen = {name for row in rows for name in row["results"]}
    return [name for name in CONTESTANTS if name in seen]


def errors_of(entry):
    """The errors of a contestant's outputs, by name. None: it was not finite, or there was nothing to compare with."""
    return {key.removesuffix("_error"): value for key, value in entry.items() if key.endswith("_error")}


def wrong(entry):
    """Whether an error is beyond rounding. NaN is."""
    return any(not value <= WRONG for value in errors_of(entry).values())


def correct(entry):
    """Whether a contestant ran, and its results are right as far as they could be checked."""
    return "ms" in entry and "error" not in entry and not wrong(entry)


def fastest_peer(row):
    """Name and milliseconds of the fastest peer whose results are right, or None."""
    found = [(entry["ms"], name) for name, entry in row["results"].items() if name != "deltawave" and correct(entry)]
    return min(found)[::-1] if found else None


def ratio(row):
    """The fastest correct peer's time over deltawave's, or None."""
    own, peer = row["results"].get("deltawave", {}), fastest_peer(row)
    return peer[1] / own["ms"] if peer and correct(own) else None


def geometric_mean(values):
    return math.exp(sum(map(math.log, values)) / len(values)) if values else math.nan


def cell(value, digits):
    return "-" if value is None or math.isnan(value) else f"{value:.{digits}f}"


def table(header, rows):
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * 2 + "---:|" * (len(header) - 2)]
    return lines + ["| " + " | ".join(row) + " |" for row in rows]


def shape(row):
    return [f"{row['dtype']} {row['key_heads']}:{row['value_heads']} {row['batch']}", row["gates"]]


def times(results):
    peers = [name for name in results.names if name != "deltawave"]
    header = ["case", "gates", "I/O floor, ms", "copy, ms", "deltawave, ms", "over floor", "over copy"]
    header += [f"{CONTESTANTS[name].label}, ms" for name in peers] + ["fastest peer", "ratio"]
    rows = []
    for row in results.rows:
        own = row["results"].get("deltawave", {}).get("ms")
        floor, copy = results.floor_ms(row), row.get("copy_ms")
        cells = [*shape(row), cell(floor, 4), cell(copy, 4), cell(own, 4)]
        cells += [cell(own / base if own and base else None, 2) for base in (floor, copy)]
        for name in peers:
            entry = row["results"].get(name, {})
            cells.append(cell(entry.get("ms"), 4) + ("" if correct(entry) or "ms" not in entry else " (wrong)"))
        best = fastest_peer(row)
        cells += [CONTESTANTS[best[0]].label if best else "-", cell(ratio(row), 2)]
        rows.append(cells)
    return table(header, rows)


def steps(results, operation):
    """The rows of one of the other operations: a table."""
    rows = [row for row in results.steps if row["operation"] == operation]
    names = contestants_of(rows)
    peers = [name for name in names if name != "deltawave"]
    header = ["case", "floor, us", "copy, us", "deltawave, us", *[f"{CONTESTANTS[name].label}, us" for name in peers],
              "fastest peer", "ratio", "deltawave's largest error"]
    lines = []
    for row in rows:
        bandwidth = row["copy_bytes_per_s"]
        us = lambda ms: cell(ms * 1e3 if ms is not None else None, 1)  # noqa: E731
        cells = [row["case"], us((row["io_bytes"] + row["state_bytes"]) / bandwidth * 1e3), us(row.get("copy_ms")),
                 us(row["results"].get("deltawave", {}).get("ms"))]
        for name in peers:
            entry = row["results"].get(name, {})
            cells.append(us(entry.get("ms")) + (" (wrong)" if "ms" in entry and not correct(entry) else ""))
        best = fastest_peer(row)
        largest = max(errors_of(row["results"].get("deltawave", {})).values(), default=math.nan)
        lines.append([*cells, CONTESTANTS[best[0]].label if best else "-", cell(ratio(row), 2), f"{largest:.1e}"])
    lines = ["| " + " | ".join(line) + " |" for line in [header, ["---", *["---:"] * (len(header) - 1)], *lines]]
    means = [ratio(row) for row in rows if ratio(row)]
    if not means:
        return lines
    return [*lines, "", f"Fastest correct peer over deltawave: {geometric_mean(means):.2f} in the geometric mean."]


def summary(results):
    """Geometric means of fastest correct peer over deltawave: all rows, and parts of them."""
    many = lambda row: "x" in row["batch"] or "ragged" in row["batch"]  # noqa: E731
    parts = {"all": lambda row: True, **{f"gates {g}": (lambda row, g=g: row["gates"] == g) for g in GATES},
             "one sequence": lambda row: not many(row), "several sequences": many}
    lines = []
    for name, part in parts.items():
        found = [(ratio(row), row["case"]) for row in results.rows if part(row) and ratio(row)]
        if found:
            least, where = min(found)
            mean = geometric_mean([r for r, _ in found])
            lines.append([name, str(len(found)), cell(mean, 2), cell(least, 2), where,
                          str(sum(r < 1 for r, _ in found))])
    header = ["rows", "number", "geometric mean", "least", "where", "rows below 1"]
    lines = ["| " + " | ".join(line) + " |" for line in [header, ["---", *["---:"] * 3, "---", "---:"], *lines]]
    return lines


def errors(results):
    rows = []
    for row in results.rows:
        cells = []
        for name in results.names:
            entry = row["results"].get(name, {})
            pair = [entry.get("o_error"), entry.get("state_error")]
            cells.append("-" if None in pair else " / ".join(f"{value:.1e}" for value in pair))
        rows.append([*shape(row), *cells])
    return table(["case", "gates", *[CONTESTANTS[name].label for name in results.names]], rows)


def gradient_errors(results):
    """A line for each row of gradients and contestant."""
    rows = [row for row in results.steps if row["operation"] == "backward"]
    lines = []
    for row in rows:
        for name in contestants_of(rows):
            found = errors_of(row["results"].get(name, {}))
            if found:
                each = ["nan" if value is None else f"{value:.1e}" for value in found.values()]
                lines.append([row["case"].removeprefix("backward "), CONTESTANTS[name].label, *each])
    if not lines:
        return []
    return ["### Gradients", "", *table(["case", "", "dq", "dk", "dv", "dg", "dbeta", "dS0"], lines), ""]


def remarks(results):
    """What is missing, what failed, and how much the measurements scatter."""
    lines = [f"- {m['what']} was not run: {m['reason']}." for m in results.missing]
    lines += [f"- Dropped: {d['what']}: {d['reason']}." for d in results.dropped]
    spread = 0.0
    for row in results.rows + results.steps:
        for name, entry in row["results"].items():
            if "absent" in entry:
                lines.append(f"- {CONTESTANTS[name].label}, `{row['case']}`: not run: {entry['absent']}.")
            elif "error" in entry:
                lines.append(f"- {CONTESTANTS[name].label}, `{row['case']}`: {' '.join(entry['error'].split())}")
            elif wrong(entry):
                verdict = "**its results are wrong**, its time means nothing."
                lines.append(f"- {CONTESTANTS[name].label}, `{row['case']}`: {verdict}")
            rounds = entry.get("rounds_ms", [])
            if len(rounds) > 1:
                spread = max(spread, max(rounds) / min(rounds) - 1)
    lines.append(f"- The medians of the rounds of a row differ by at most {spread:.1%}.")
    before, after = results.machine.get("copy_bytes_per_s"), results.end.get("copy_bytes_per_s")
    if before and after:
        lines.append(f"- Copy bandwidth at the start {before / 1e12:.2f} TB/s, at the end {after / 1e12:.2f} TB/s.")
    return lines


def prefill_rows(results):
    """The parts of the page that are about prefill, if it was measured."""
    if not results.rows:
        return []
    return ["![Time over the I/O floor](peers.svg)", "", "## Fastest peer over deltawave", "", *summary(results), "",
            "## Times", "", *times(results), ""]


def markdown(results):
    machine = {k: v for k, v in results.machine.items() if k not in ("kind", "copy_bytes_per_s")}
    versions = ", ".join(f"{key} {value}" for key, value in machine.items())
    bandwidth = results.machine.get("copy_bytes_per_s", math.nan) / 1e12
    return "\n".join([
        "# Beside its peers on an NVIDIA GPU",
        "",
        "Generated by `make bench-peers`. One run, one process, the same inputs for everyone.",
        "",
        f"- Machine and versions: {versions}.",
        f"- I/O floor: the bytes of q, k, v and o, once each, at {bandwidth:.2f} TB/s, a copy in the same run.",
        "- Copy: a copy of as many bytes as q, k, v, o and the final states have, measured beside the row.",
        "- Times are medians of CUDA graph replays, three rounds in turns, with the L2 cache flushed before each replay.",
        f"- K = V = 128{', no initial state, final state in f32' if results.rows else ''}. `HK:HV` heads, then the sequences.",
        "- Gates: `normal` is logsigmoid(N(0, 1)); `mixed` a sixteenth of that and none in every fourth head; `model` is",
        "  -A softplus(N(0, 1) + dt_bias) with A uniform in 0.001..16 and softplus(dt_bias) log-uniform in 0.001..0.1;",
        "  `zero` is none. With `model` and `zero`, q, k and v went through a convolution of width 4 and SiLU.",
        "- The ratio is the time of the fastest peer with right results over deltawave's: above 1, deltawave is faster.",
        "- FlashQLA is given cu_seqlens" + ("; FlashInfer takes exp(g), which is made beforehand." if results.rows else "."),
        "",
        *prefill_rows(results),
        *[line for operation, title in OPERATIONS.items() if any(r["operation"] == operation for r in results.steps)
          for line in ["## " + title[0], "", title[1], "", *steps(results, operation), ""]],
        "## Errors",
        "",
        "rms of the error over rms of a float64 recurrence, of the outputs that were timed.",
        "",
        *(["### o / final state of a prefill", "", *errors(results), ""] if results.rows else []),
        *gradient_errors(results),
        "## Remarks",
        "",
        *remarks(results),
        "",
    ])


def marker(name, x, y):
    """A shape of its own for each contestant, so that colour is not needed."""
    colour = COLOURS[name]
    if name == "deltawave":
        return f'<circle cx="{x:.1f}" cy="{y}" r="5.5" fill="{colour}"/>'
    points = {
        "fla": [(-5, -5), (5, -5), (5, 5), (-5, 5)],
        "flashqla": [(0, -6), (6, 5), (-6, 5)],
        "flashinfer": [(0, -6.5), (6.5, 0), (0, 6.5), (-6.5, 0)],
        "flashinfer-cut": [(0, 6), (6, -5), (-6, -5)],
    }[name]
    text = " ".join(f"{x + dx:.1f},{y + dy}" for dx, dy in points)
    return f'<polygon points="{text}" fill="none" stroke="{colour}" stroke-width="1.8"/>'


def svg(results):
    """A line per row: every contestant's time over the I/O floor, on a logarithmic axis."""
    left, top, width, step = 260, 84, 640, 20
    found = {}
    for index, row in enumerate(results.rows):
        for name in results.names:
            entry = row["results"].get(name, {})
            if correct(entry):
                found[index, name] = entry["ms"] / results.floor_ms(row)
    high = 2 ** math.ceil(math.log2(max([*found.values(), 2])) + 0.15)
    height = top + step * len(results.rows) + 46
    place = lambda ratio: left + width * math.log2(max(ratio, 1)) / math.log2(high)  # noqa: E731
    bottom = top + step * len(results.rows)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {left + width + 30} {height}" '
        'font-family="system-ui, sans-serif" font-size="12" fill="#1f2937">',
        f'<rect width="{left + width + 30}" height="{height}" fill="#ffffff"/>',
        f'<text x="16" y="26" font-size="16" font-weight="600">Gated DeltaNet prefill on one '
        f'{html.escape(results.machine.get("gpu", "GPU"))}</text>',
        '<text x="16" y="45">Time over the I/O floor (q, k, v, o at the copy bandwidth of the run); '
        "further left is better</text>",
    ]
    x = 22
    for name in results.names:
        label = CONTESTANTS[name].label
        parts += [marker(name, x, 64), f'<text x="{x + 11}" y="68">{label}</text>']
        x += 30 + 8 * len(label)
    ratio = 1
    while ratio <= high:
        at = place(ratio)
        parts.append(f'<line x1="{at:.1f}" y1="{top - 4}" x2="{at:.1f}" y2="{bottom}" '
                     f'stroke="{"#6b7280" if ratio == 1 else "#e5e7eb"}"/>')
        parts.append(f'<text x="{at:.1f}" y="{bottom + 18}" text-anchor="middle">{ratio}x</text>')
        ratio *= 2
    shapes = list(dict.fromkeys(shape(row)[0] for row in results.rows))
    for index, row in enumerate(results.rows):
        y = top + step * index + step // 2
        if shapes.index(shape(row)[0]) % 2 == 0:
            parts.append(f'<rect x="10" y="{y - step // 2}" width="{left + width + 10}" height="{step}" '
                         'fill="#000000" fill-opacity="0.035"/>')
        ratios = [found[index, name] for name in results.names if (index, name) in found]
        parts.append(f'<text x="{left - 66}" y="{y + 4}" text-anchor="end">{html.escape(shape(row)[0])}</text>')
        parts.append(f'<text x="{left - 12}" y="{y + 4}" text-anchor="end" fill="#6b7280">{row["gates"]}</text>')
        if ratios:
            parts.append(f'<line x1="{place(min(ratios)):.1f}" y1="{y}" x2="{place(max(ratios)):.1f}" y2="{y}" '
                         'stroke="#d1d5db"/>')
        # deltawave last, so that it lies on top.
        for name in reversed(results.names):
            if (index, name) in found:
                parts.append(marker(name, place(found[index, name]), y))
    parts.append("</svg>")
    return "\n".join(parts) + "\n"


def write(out):
    """Writes peers.md and peers.svg beside results.jsonl; returns the Markdown."""
    results = Results(out / "results.jsonl")
    text = markdown(results)
    (out / "peers.md").write_text(text)
    if results.rows:
        (out / "peers.svg").write_text(svg(results))
    return text


def short(out):
    """Enough for a screen: the geometric means, the other operations and the remarks."""
    results = Results(out / "results.jsonl")
    tables = [line for operation in OPERATIONS if any(r["operation"] == operation for r in results.steps)
              for line in ["", *steps(results, operation)]]
    return "\n".join([*(summary(results) if results.rows else []), *tables, "", *remarks(results)])

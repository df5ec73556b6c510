#!/usr/bin/env python3
"""Draws the pictures of the documentation into docs/pictures: SVG, the same bytes on every machine.

    docs/draw.py            writes the pictures
    docs/draw.py --check    fails if a picture in the repository is not what this script draws

times.svg shows the rows of docs/results/peers.jsonl, training.svg and training-h200.svg those of docs/results/training.jsonl and
training_h200.jsonl. The other pictures follow from the formulas beside their functions.
Needs Python 3.9 and no package.
"""

import html
import json
import math
import re
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
PICTURES = HERE / "pictures"

INK, MUTED, RULE, FAINT = "#1f2937", "#6b7280", "#d1d5db", "#f3f4f6"
ORANGE, BLUE, GREEN, VIOLET = "#c2410c", "#2563eb", "#15803d", "#7c3aed"
PALE = {ORANGE: "#ffedd5", BLUE: "#dbeafe", GREEN: "#dcfce7", VIOLET: "#ede9fe", MUTED: "#f3f4f6"}


class Picture:
    """An SVG on a white card, legible on light and on dark pages."""

    def __init__(self, width, height, title):
        self.width, self.height = width, height
        self.parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" '
            f'font-family="system-ui, -apple-system, \'Segoe UI\', \'DejaVu Sans\', sans-serif" font-size="13" fill="{INK}">',
            f"<title>{html.escape(title)}</title>",
            '<defs><marker id="arrow" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="7" markerHeight="7" '
            f'orient="auto-start-reverse"><path d="M0 1 L9 5 L0 9 z" fill="{MUTED}"/></marker></defs>',
            f'<rect x="0.5" y="0.5" width="{width - 1}" height="{height - 1}" rx="8" fill="#ffffff" stroke="{RULE}"/>',
        ]

    def text(self, x, y, text, size=13, anchor="start", colour=INK, weight=None, mono=False, style=None):
        extra = f' font-weight="{weight}"' if weight else ""
        extra += " font-family=\"ui-monospace, 'DejaVu Sans Mono', monospace\"" if mono else ""
        extra += f' font-style="{style}"' if style else ""
        self.parts.append(f'<text x="{x:g}" y="{y:g}" font-size="{size:g}" text-anchor="{anchor}" fill="{colour}"{extra}>'
                          f"{html.escape(text)}</text>")

    def rect(self, x, y, width, height, fill="none", stroke="none", radius=0.0, stroke_width=1.0, opacity=None, dash=None):
        extra = f' fill-opacity="{opacity:g}"' if opacity is not None else ""
        extra += f' stroke-dasharray="{dash}"' if dash else ""
        self.parts.append(f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="{radius:g}" fill="{fill}" '
                          f'stroke="{stroke}" stroke-width="{stroke_width:g}"{extra}/>')

    def line(self, points, stroke=MUTED, width=1.4, arrow=False, dash=None):
        path = " ".join(f"{x:g},{y:g}" for x, y in points)
        extra = ' marker-end="url(#arrow)"' if arrow else ""
        extra += f' stroke-dasharray="{dash}"' if dash else ""
        self.parts.append(f'<polyline points="{path}" fill="none" stroke="{stroke}" stroke-width="{width:g}"{extra}/>')

    def polygon(self, points, fill, stroke="none", stroke_width=1.0):
        path = " ".join(f"{x:g},{y:g}" for x, y in points)
        self.parts.append(f'<polygon points="{path}" fill="{fill}" stroke="{stroke}" stroke-width="{stroke_width:g}"/>')

    def box(self, x, y, width, height, lines, colour, size=13):
        """A rounded box with centred lines: the first one bold, the others formulas."""
        self.rect(x, y, width, height, PALE[colour], colour, 6, 1.2)
        step = size + 6
        top = y + height / 2 - step * (len(lines) - 1) / 2 + size * 0.36
        for i, line in enumerate(lines):
            self.text(x + width / 2, top + i * step, line, size if i == 0 else size - 1, "middle",
                      colour if i == 0 else INK, 600 if i == 0 else None, mono=i > 0)

    def svg(self):
        return "\n".join([*self.parts, "</svg>"]) + "\n"


# ---- measured times ----

CONTESTANTS = [("deltawave", "deltawave", ORANGE), ("flashqla", "FlashQLA", GREEN), ("fla", "FLA", BLUE),
               ("flashinfer", "FlashInfer", VIOLET), ("flashinfer-cut", "FlashInfer, cut", "#be185d")]


def marker(p, name, x, y):
    """A shape for each contestant, so that colour is not needed."""
    colour = {name: colour for name, _, colour in CONTESTANTS}[name]
    if name == "deltawave":
        p.parts.append(f'<circle cx="{x:.1f}" cy="{y:g}" r="6" fill="{colour}"/>')
        return
    corners = {"fla": [(-5, -5), (5, -5), (5, 5), (-5, 5)], "flashqla": [(0, -6), (6, 5), (-6, 5)],
               "flashinfer": [(0, -6.5), (6.5, 0), (0, 6.5), (-6.5, 0)], "flashinfer-cut": [(0, 6), (6, -5), (-6, -5)]}[name]
    p.polygon([(round(x + dx, 1), y + dy) for dx, dy in corners], "#ffffff", colour, 1.8)


def is_right(entry):
    """Whether a contestant ran, and was right."""
    return "ms" in entry and all(value <= 0.02 for key, value in entry.items() if key.endswith("_error"))


def times():
    """bf16 rows with `normal` gates: milliseconds on a logarithmic axis, and the fastest peer's time over deltawave's."""
    lines = [json.loads(line) for line in (HERE / "results/peers.jsonl").read_text().splitlines()]
    machine = next(line for line in lines if line["kind"] == "machine")
    prefills = [line for line in lines if line["kind"] == "row" and line.get("operation", "prefill") == "prefill"]
    rows = [line for line in prefills if line["dtype"] == "bf16" and line["gates"] == "normal"]
    contestants = [c for c in CONTESTANTS if any(c[0] in row["results"] for row in rows)]
    several = lambda row: "x" in row["batch"] or "ragged" in row["batch"]  # noqa: E731
    rows.sort(key=lambda row: (row["value_heads"], row["key_heads"], several(row), row["tokens"]))

    left, right, top, step = 240, 712, 106, 27
    bottom = top + step * len(rows)
    p = Picture(860, bottom + 74, "Gated DeltaNet prefill on an NVIDIA H200, measured, beside three other libraries")
    p.text(24, 34, f"Gated DeltaNet prefill, measured on {machine['gpu']}s", 17, weight=600)
    p.text(24, 55, "Milliseconds, logarithmic; further left is faster. bf16, K = V = 128, gates of a short memory; one run a row.", 12.5,
           colour=MUTED)
    x = 30
    for name, label, _ in contestants:
        marker(p, name, x, 78)
        p.text(x + 12, 82.5, label)
        x += 38 + 8 * len(label)
    p.text(right + 74, 76, "fastest peer", 11.5, "middle", MUTED)
    p.text(right + 74, 90, "/ deltawave", 11.5, "middle", MUTED)

    least = min(e["ms"] for row in rows for e in row["results"].values() if "ms" in e)
    low, high = 0.05 if least >= 0.05 else 0.02, 8.0
    place = lambda ms: left + (right - left) * math.log(ms / low) / math.log(high / low)  # noqa: E731
    for ms in (0.05, 0.1, 0.2, 0.5, 1, 2, 5):
        at = round(place(ms), 1)
        p.line([(at, top - 4), (at, bottom)], "#e5e7eb", 1)
        p.text(at, bottom + 18, f"{ms:g}", 12, "middle", MUTED)
    p.text(right, bottom + 18, "ms", 12, "middle", MUTED)
    for i, row in enumerate(rows):
        y = top + step * i + step / 2
        if i % 2 == 0:
            p.rect(14, y - step / 2, p.width - 28, step, "#000000", opacity=0.03)
        tokens = row["batch"]
        if several(row):
            count, length = re.fullmatch(r"(\d+) (?:x|ragged,) (\d+)", row["batch"]).groups()
            tokens = f"{count} {'lengths,' if 'ragged' in row['batch'] else 'x'} {int(length):,} tokens"
        if not several(row):
            tokens = f"{row['batch']} tokens"
        p.text(24, y + 4.5, f"{row['key_heads']}:{row['value_heads']}", 12.5, colour=MUTED)
        p.text(74, y + 4.5, tokens)
        ms = {name: row["results"][name]["ms"] for name, _, _ in contestants if is_right(row["results"].get(name, {}))}
        p.line([(round(place(min(ms.values())), 1), y), (round(place(max(ms.values())), 1), y)], RULE, 1.2)
        for name, _, _ in reversed(contestants):
            if name in ms:
                marker(p, name, place(ms[name]), y)
        ratio = min(value for name, value in ms.items() if name != "deltawave") / ms["deltawave"]
        p.text(right + 74, y + 4.5, f"{ratio:.2f}", 13, "middle", ORANGE if ratio >= 1 else INK, 600)
    p.text(24, bottom + 44, f"Rows are key heads : value heads, and the batch. All {len(prefills)} rows, the errors and the versions: "
           "docs/results/peers.md.", 11.5, colour=MUTED)
    p.text(24, bottom + 60, "deltawave's kernels compiled for sm_90a. On an MI300 nothing has been measured yet.", 11.5,
           colour=MUTED)
    return p


# ---- a chunk ----


def matrix(p, x, y, width, height, name, shape, colour, triangle=False):
    """A matrix to scale: its name in it, its shape under it."""
    p.rect(x, y, width, height, PALE[colour], colour, 2, 1.2)
    if triangle:
        p.polygon([(x, y), (x, y + height), (x + width, y + height)], colour)
        p.text(x + width * 0.3, y + height * 0.78, name, 15, "middle", "#ffffff", 600, style="italic")
    else:
        p.text(x + width / 2, y + height / 2 + 5, name, 15, "middle", colour, 600, style="italic")
    p.text(x + width / 2, y + height + 15, shape, 10.5, "middle", MUTED)


def chunk():
    """The equations of docs/concepts/chunk.md as a flow from K, Q, V to T, P, and through the scan to O and S."""
    p = Picture(960, 600, "A chunk of 64 tokens: prepare makes T and P of K and Q; scan carries the state S through the chunk")
    p.text(24, 34, "One chunk: 64 tokens of one value head", 17, weight=600)

    p.text(24, 64, "inputs", 12, colour=MUTED)
    for x, name, shape, width in ((24, "Q", "[64, K]", 80), (124, "K", "[64, K]", 80), (365, "V", "[64, V]", 80)):
        matrix(p, x, 76, width, 44, name, shape, BLUE)
    for x, name in ((234, "g"), (276, "β")):
        matrix(p, x, 76, 18, 44, name, "[64]", BLUE)

    p.rect(16, 168, 928, 150, FAINT, RULE, 8)
    p.text(30, 190, "prefill_prepare", 13, weight=600, mono=True)
    p.text(160, 190, "every chunk at the same time", 12, colour=MUTED)
    matrix(p, 36, 208, 74, 74, "P", "[64, 64]", GREEN, True)
    p.text(126, 232, "P", 14, weight=600, colour=GREEN)
    p.text(126, 254, "qᵢ·kⱼ exp(Gᵢ − Gⱼ),  i ≥ j", 12, mono=True)
    p.text(126, 274, "G: running sum of g", 12, colour=MUTED)
    matrix(p, 547, 208, 74, 74, "T", "[64, 64]", GREEN, True)
    p.text(640, 232, "T = (I + A)⁻¹", 14, weight=600, colour=GREEN)
    p.text(640, 254, "A = βᵢ exp(Gᵢ − Gⱼ) kᵢ·kⱼ,  i > j", 12, mono=True)
    for x in (64, 164, 264):
        p.line([(x, 140), (x, 167)], arrow=True)

    p.rect(16, 352, 928, 232, "#fff7ed", "#fed7aa", 8)
    p.text(30, 374, "prefill_scan", 13, weight=600, mono=True)
    p.text(600, 374, "one chunk after the other; S stays in registers", 12, colour=MUTED)
    top, height = 400, 64
    p.box(30, top, 74, height, ["S₀", "[K, V]"], ORANGE, 15)
    p.box(146, top, 110, height, ["R", "K S₀"], ORANGE)
    p.box(320, top, 170, height, ["X", "β (V − exp(G) R)"], ORANGE)
    p.box(532, top, 104, height, ["U", "T X"], ORANGE)
    p.box(678, top, 250, height, ["S₁", "exp(G₆₄) S₀ + Kᵀ U′"], ORANGE, 14)
    middle = top + height / 2
    for a, b in ((104, 146), (256, 320), (490, 532), (636, 678)):
        p.line([(a, middle), (b - 1, middle)], arrow=True)
    p.box(260, 504, 376, 56, ["O", "scale (exp(G) Q S₀ + P U)"], ORANGE)
    p.line([(584, top + height), (584, 503)], arrow=True)
    p.line([(67, top + height), (67, 532), (259, 532)], arrow=True)
    p.text(160, 525, "Q S₀", 12, "middle", MUTED, mono=True)
    p.text(803, 488, "U′ = exp(G₆₄ − G) U", 12, "middle", MUTED, mono=True)
    p.text(803, 506, "S₁ is the next chunk's S₀", 12, "middle", MUTED)
    p.line([(636, 532), (690, 532)], arrow=True)
    p.text(700, 536, "O [64, V], to memory", 12)

    # The record: T goes to U, P to O. V comes straight from the caller's tensor.
    p.line([(584, 302), (584, 399)], GREEN, 1.6, arrow=True)
    p.text(594, 342, "T", 14, colour=GREEN, weight=600, style="italic")
    p.line([(73, 302), (73, 334), (288, 334), (288, 503)], GREEN, 1.6, arrow=True)
    p.text(298, 342, "P", 14, colour=GREEN, weight=600, style="italic")
    p.line([(405, 140), (405, 399)], BLUE, 1.6, arrow=True)
    p.text(415, 342, "V", 14, colour=BLUE, weight=600, style="italic")
    return p


# ---- segments ----


def segments():
    """A sequence of 24 chunks on three schedules. Chunks of scan and summarise are drawn as long as each other."""
    unit, left, row = 30, 168, 30
    p = Picture(960, 560, "A long sequence whole, in four segments, and in four segments that forget: what runs when")
    p.text(24, 34, "A sequence of 24 chunks, three ways", 17, weight=600)
    p.text(24, 54, "A row is a workgroup; time goes to the right. Schematic: a step of combine is drawn as half a chunk.", 12.5,
           colour=MUTED)

    def chunks(x, y, first, count, colour, dim=False):
        for i in range(count):
            p.rect(x + i * unit + 1, y, unit - 2, row - 6, "#ffffff" if dim else PALE[colour], RULE if dim else colour, 3, 1,
                   dash="3 2" if dim else None)
            p.text(x + i * unit + unit / 2, y + 16, str(first + i), 11, "middle", RULE if dim else colour)
        return x + count * unit

    def label(y, text, colour=INK):
        p.text(left - 14, y + 16, text, 12, "end", colour)

    p.text(24, 92, "Whole", 14, weight=600)
    label(104, "scan", ORANGE)
    chunks(left, 104, 0, 24, ORANGE)

    def panel(top, title, forgets):
        p.text(24, top, title, 14, weight=600)
        y = top + 12
        for i in range(3):
            label(y + i * row, "summarise segment " + str(i), BLUE)
            walked = 1 if forgets else 6
            chunks(left, y + i * row, 6 * i + 6 - walked, walked, BLUE)
        after = left + (1 if forgets else 6) * unit + 8
        steps = 1 if forgets else 2
        p.rect(after, y, steps * unit / 2 + 4, 3 * row - 6, PALE[VIOLET], VIOLET, 3)
        centre = after + (steps * unit / 2 + 4) / 2
        p.parts.append(f'<text x="{centre:g}" y="{y + 42:g}" font-size="11" text-anchor="middle" fill="{VIOLET}" '
                       f'transform="rotate(-90 {centre:g} {y + 42:g})">combine</text>')
        start = after + steps * unit / 2 + 12
        for i in range(4):
            at = y + i * row
            chunks(start, at, 6 * i, 6, ORANGE)
            p.text(start + 6 * unit + 12, at + 16, f"scan segment {i}" + (", final state" if i == 3 else ""), 12, colour=ORANGE)
        end = start + 6 * unit
        p.line([(end, y - 4), (end, y + 4 * row)], MUTED, 1, dash="4 3")
        return end

    panel(168, "Four segments", False)
    panel(324, "Four segments that forget: gates leave next to nothing of the state before a segment", True)

    p.line([(24, 478), (936, 478)], RULE, 1)
    p.text(24, 500, "summarise", 12.5, colour=BLUE, weight=600)
    p.text(110, 500, "walks a segment without outputs: N, the state that zeros become, and M, what multiplies the state before it.", 12.5)
    p.text(24, 520, "combine", 12.5, colour=VIOLET, weight=600)
    p.text(110, 520, "Sᵢ₊₁ = Mᵢ Sᵢ + Nᵢ: the exact state before each segment. With nothing remembered, Sᵢ₊₁ = Nᵢ.", 12.5)
    p.text(24, 540, "scan", 12.5, colour=ORANGE, weight=600)
    p.text(110, 540, "walks all segments at once, each from its state, and writes the outputs.", 12.5)
    return p


# ---- ranks ----


def ranks():
    """One sequence of eight blocks over two ranks."""
    unit, left = 74, 150
    p = Picture(960, 392, "One sequence of eight blocks over two ranks: summaries are gathered, every rank folds them alike")
    p.text(24, 34, "A sequence of eight blocks over two ranks", 17, weight=600)
    p.text(24, 54, "Time goes down. Every rank folds the same summaries in the same order, whoever made them.", 12.5, colour=MUTED)
    for rank in range(2):
        p.text(left + (4 * rank + 2) * unit, 86, f"rank {rank}", 14, "middle", weight=600)
    p.line([(left + 4 * unit, 74), (left + 4 * unit, 346)], MUTED, 1, dash="4 3")

    def row(y, label, colour, texts):
        p.text(left - 14, y + 22, label, 12.5, "end", colour)
        for i, text in enumerate(texts):
            p.rect(left + i * unit + 3, y, unit - 6, 34, PALE[colour] if text else "#ffffff", colour if text else RULE, 3, 1,
                   dash=None if text else "3 2")
            p.text(left + (i + .5) * unit, y + 22, text or "-", 12, "middle", colour if text else RULE)

    row(100, "summarise", BLUE, ["N₀", *(f"M{x} N{x}" for x in "₁₂₃₄₅₆"), ""])
    for rank in range(2):
        x = left + 4 * rank * unit + 3
        p.rect(x, 156, 4 * unit - 6, 34, "#ffffff", INK, 3, 1)
        p.text(x + 2 * unit - 3, 178, "N₀  M₁ N₁  M₂ N₂  ..  M₆ N₆", 12, "middle")
    p.text(left - 14, 178, "all-gather", 12.5, "end")
    row(212, "combine", VIOLET, [f"S{x}" for x in "₀₁₂₃₄₅₆₇"])
    row(268, "scan", ORANGE, [f"O{x}" for x in "₀₁₂₃₄₅₆₇"])
    p.text(left + 7.5 * unit, 322, "final state", 12, "middle", ORANGE)
    p.text(24, 372, "The engine's own all-gather is the only exchange. The first block reads the initial state; the last one has no successor, "
           "and sends nothing.", 12.5)
    return p


# ---- losses of a training ----

# Colour, width and dashes of each curve.
CURVES = {"exact": ("#9ca3af", 5.0, None, "float64"), "fla": (BLUE, 1.6, "6 3", "FLA"),
          "emulated": (BLUE, 1.6, "6 3", "FLA's chain, emulated"), "deltawave": (ORANGE, 1.6, None, "deltawave")}


def training(file="training.jsonl", reach=0.02):
    """Running means of 20 losses of python/examples/train.py, and below their distance from those of float64, in nats up to
    `reach`."""
    lines = [json.loads(line) for line in (HERE / "results" / file).read_text().splitlines()]
    tasks = list(dict.fromkeys(line["task"] for line in lines))
    run = next(line for line in lines if line["kind"] == "deltawave")
    left, width, height, low, gap = 64, 360, 190, 80, 70
    p = Picture(left + len(tasks) * (width + gap) - gap + 30, 478, "Losses of two layers of Gated DeltaNet that are trained")
    p.text(24, 34, "Two layers of Gated DeltaNet that are trained", 17, weight=600)
    on = "gfx942 kernels, simulated" if "simulator" in run["where"] else f"measured on one {run['where']}"
    p.text(24, 55, f"deltawave: {on}, {run['dtype']} inputs. Means of 20 losses in nats, {run['tokens']} tokens, batches of "
           f"{run['batch']}, {run['hidden']} numbers a token.", 12.5, colour=MUTED)
    shown = [kind for kind in CURVES if any(line["kind"] == kind for line in lines)]
    x = 30
    for kind in shown:
        colour, stroke, dash, label = CURVES[kind]
        p.line([(x, 78), (x + 26, 78)], colour, stroke, dash=dash)
        p.text(x + 32, 82.5, label)
        x += 58 + 7 * len(label)

    def mean(losses):
        return [sum(losses[i:i + 20]) / 20 for i in range(len(losses) - 19)]

    for n, task in enumerate(tasks):
        curves = {line["kind"]: mean(line["losses"]) for line in lines if line["task"] == task}
        x0, top, steps = left + n * (width + gap), 126, len(curves["exact"])
        high = math.ceil(max(curves["exact"]))
        below = top + height + 44
        p.text(x0, top - 14, task, 14, weight=600)
        p.text(x0, below - 10, "less float64's, nats", 11.5, colour=MUTED)
        across = lambda i, x0=x0, steps=steps: x0 + width * i / (steps - 1)  # noqa: E731
        for value in range(high + 1):
            y = top + height * (1 - value / high)
            p.line([(x0, y), (x0 + width, y)], "#e5e7eb", 1)
            p.text(x0 - 8, y + 4, str(value), 11.5, "end", MUTED)
        for value in (-reach, -0.01, 0, 0.01, reach):
            y = below + low / 2 * (1 - value / reach)
            p.line([(x0, y), (x0 + width, y)], "#e5e7eb", 1, dash="3 3" if abs(value) == 0.01 else None)
            if abs(value) != 0.01:
                p.text(x0 - 8, y + 4, f"{value:g}", 11.5, "end", MUTED)
        for i in range(0, steps, 100):
            p.text(across(i), below + low + 18, str(i + 20), 11.5, "middle", MUTED)
        p.text(x0 + width, below + low + 18, "steps", 11.5, "end", MUTED)
        for kind in shown:
            colour, stroke, dash, _ = CURVES[kind]
            every = range(0, steps, 4)
            p.line([(round(across(i), 1), round(top + height * (1 - curves[kind][i] / high), 1)) for i in every], colour, stroke,
                   dash=dash)
            if kind != "exact":
                away = [max(-reach, min(reach, a - b)) for a, b in zip(curves[kind], curves["exact"])]
                p.line([(round(across(i), 1), round(below + low / 2 * (1 - away[i] / reach), 1)) for i in every], colour, 1.4,
                       dash=dash)
    return p


# ---- tiles ----

GROUPS = ["#fde68a", "#bfdbfe", "#bbf7d0", "#ddd6fe"]


def grid(p, x, y, title, rows, columns, lane_of, shown, group, above, beside):
    """A 16 x 16 tile: a cell has the number of its lane, and lane `shown` is framed."""
    cell = 18
    p.text(x, y - 44, title, 14, weight=600)
    p.text(x, y - 26, above, 11.5, colour=MUTED)
    for i in range(rows):
        for j in range(columns):
            lane = lane_of(i, j)
            p.rect(x + j * cell, y + i * cell, cell, cell, GROUPS[group(lane)], "#ffffff", 0, 1)
            p.text(x + j * cell + cell / 2, y + i * cell + 12.5, str(lane), 9, "middle", INK, 700 if lane == shown else None)
    for i in range(rows):
        for j in range(columns):
            if lane_of(i, j) == shown:
                p.rect(x + j * cell + 0.5, y + i * cell + 0.5, cell - 1, cell - 1, "none", ORANGE, 1, 2.2)
    for i in (0, 15):
        p.text(x - 5, y + i * cell + 12.5, str(i), 10, "end", MUTED)
        p.text(x + i * cell + cell / 2, y - 6, str(i), 10, "middle", MUTED)
    for i, line in enumerate(beside):
        p.text(x, y + rows * cell + 20 + 17 * i, line, 12, mono=True)


def tile_gfx942():
    """v_mfma_f32_16x16x16: 64 lanes, four elements of each matrix in a lane."""
    p = Picture(1010, 496, "Which lane of gfx942 holds which element of a 16 x 16 x 16 product")
    p.text(24, 34, "gfx942: v_mfma_f32_16x16x16, D = A B + C", 17, weight=600)
    p.text(24, 54, "A cell has the number l of the lane that holds it. Colours: l / 16. Framed: lane 21.", 12.5, colour=MUTED)
    group = lambda lane: lane // 16  # noqa: E731
    grid(p, 40, 124, "left operand A", 16, 16, lambda i, j: 16 * (j // 4) + i, 21, group, "rows down, contraction across",
         ["row         l % 16", "contraction 4 (l / 16) + e"])
    grid(p, 364, 124, "right operand B", 16, 16, lambda i, j: 16 * (i // 4) + j, 21, group, "contraction down, columns across",
         ["contraction 4 (l / 16) + e", "column      l % 16"])
    grid(p, 688, 124, "accumulator C, D", 16, 16, lambda i, j: 16 * (i // 4) + j, 21, group, "rows down, columns across",
         ["row         4 (l / 16) + r", "column      l % 16"])
    p.text(40, 474, "B and C lie alike: a rounded accumulator is the right operand of the next product, and no value changes lanes.", 13)
    return p


def tile_sm90a():
    """The transposed product of sm_90a: 32 lanes, eight elements of each matrix in a lane (hip/'s tile of sm_90a)."""
    p = Picture(1010, 496, "Which lane of sm_90a holds which element of a 16 x 16 tile and of a 16-bit operand")
    p.text(24, 34, "sm_90a: 32 lanes, products are transposed", 17, weight=600)
    p.text(24, 54, "A cell has the number l of the lane that holds it. Colours: l % 4. Framed: lane 9.", 12.5, colour=MUTED)
    group = lambda lane: lane % 4  # noqa: E731
    grid(p, 40, 124, "16-bit operand", 16, 16, lambda i, j: 4 * (i % 8) + j % 8 // 2, 9, group, "rows down, contraction across",
         ["row         8 s + l / 4", "contraction 8 d + 2 (l % 4) + 0..1"])
    grid(p, 364, 124, "tile: f32 accumulators", 16, 16, lambda i, j: 4 * (j % 8) + i % 8 // 2, 9, group, "rows down, columns across",
         ["row         8 h + 2 (l % 4) + p", "column      8 c + l / 4"])
    x, y = 690, 124
    for i, line in enumerate([
        "The machine's M counts value columns,", "its N tokens: Oᵀ = S₀ᵀ Qᵀ.", "",
        "One is the other transposed: a rounded tile", "is an operand whose rows are the tile's", "columns. No value changes lanes.", "",
        "Element 4 h + 2 c + p of a lane, and word", "2 d + s of it, with h, c, p, d, s in {0, 1}.", "",
        "wgmma (m64n64k16) takes this operand from", "registers; K, Q, T and P come from shared",
        "memory, in rows of 128 bytes with the", "128-byte swizzle.",
    ]):
        p.text(x, y + 10 + 20 * i, line, 12.5)
    return p


DRAWN = {"times.svg": times, "chunk.svg": chunk, "segments.svg": segments, "ranks.svg": ranks, "tile-gfx942.svg": tile_gfx942,
         "tile-sm90a.svg": tile_sm90a, "training.svg": training,
         "training-h200.svg": lambda: training("training_h200.jsonl", 0.1)}


def main():
    if sys.argv[1:] not in ([], ["--check"]):
        sys.exit(__doc__)
    PICTURES.mkdir(exist_ok=True)
    stale = []
    for name, draw in DRAWN.items():
        path, svg = PICTURES / name, draw().svg()
        if sys.argv[1:]:
            if not path.exists() or path.read_text(encoding="utf-8") != svg:
                stale.append(name)
        else:
            path.write_text(svg, encoding="utf-8")
    unknown = sorted(path.name for path in PICTURES.glob("*") if path.name not in DRAWN)
    if stale or unknown:
        sys.exit(f"docs/pictures: stale: {stale}, not drawn by this script: {unknown}; run docs/draw.py")


if __name__ == "__main__":
    main()

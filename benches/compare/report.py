"""Tables and charts of what benches/compare found."""

import math

FIGURES = [
    ("modelled_us", "modelled us", 1),
    ("wave_instructions", "wave instr., M", 1e6),
    ("mfma_clk", "MFMA clk, M", 1e6),
    ("valu_clk", "VALU clk, M", 1e6),
    ("lds_clk", "LDS clk, M", 1e6),
    ("lds_conflict_clk", "of these conflicts, M", 1e6),
    ("hbm_unique_bytes", "HBM unique, MB", 1e6),
    ("l2_fill_bytes", "L2 fill, MB", 1e6),
]
# Whose kernels, and in which colour. What FLA leaves to torch is done by stand-ins.
COLOURS = {"deltawave": "#1f77b4", "FLA": "#ff7f0e", "torch": "#ffbb78", "aiter": "#9467bd"}
OURS, THEIRS, AITER = COLOURS["deltawave"], COLOURS["FLA"], COLOURS["aiter"]


def kernels(row):
    """Kernels of all: whose, name, configuration, counters."""
    for kernel in row["ours"]["kernels"]:
        yield "deltawave", kernel["name"], "", kernel
    for kernel in row["fla"]:
        yield "torch" if kernel.get("torch") else "FLA", kernel["kernel"], kernel["configuration"], kernel
    for kernel in row.get("aiter", []):
        yield "aiter", kernel["kernel"], kernel["configuration"], kernel


def total(row, whose, figure):
    """The sum of a figure; `whose` is one of COLOURS, or several."""
    return sum(kernel[figure] for who, _, _, kernel in kernels(row) if who in whose.split(" and "))


def number(value):
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def title(row):
    sequences = f"{row['sequences']} x " if row["sequences"] > 1 else ""
    return f"{row['gpu'].upper()}, heads {row['heads'][0]}/{row['heads'][1]}, {sequences}{row['tokens']} tokens"


def short(configuration):
    """A configuration of Triton's without what says nothing."""
    parts = [part.strip() for part in configuration.split(",")]
    keep = [p for p in parts if not p.endswith("None") and not p.startswith(("num_ctas", "maxnreg", "ir_override"))]
    return ", ".join(keep)


# What the design of the backward's kernels counted on for each chunk of 64 tokens and value head: 13.9 products of 64 x 128 x
# 128 on the matrix units, and KiB moved with two value heads for each key head.
DESIGN = {"mfma_clk": 13.9 * 4096, "hbm_unique_bytes": 343 * 1024}

# Columns of the table of costs for each chunk and value head: counter, heading, unit, format.
SHARES = [
    ("wave_instructions", "wave instr.", 1, "{:,.0f}"),
    ("mfma_clk", "MFMA clk", 1, "{:,.0f}"),
    ("valu_clk", "VALU clk", 1, "{:,.0f}"),
    ("hbm_unique_bytes", "HBM unique, KiB", 1024, "{:.0f}"),
    ("l2_fill_bytes", "L2 fill, KiB", 1024, "{:.0f}"),
]

HOW = [
    "Instructions, clocks and bytes are counted, exactly; times are modelled, not measured",
    "([concepts/timing.md](../concepts/timing.md) says how far the model is off). Their kernels have the best of their",
    "autotuning configurations, by modelled time. Clocks are sums over all waves; vector clocks include transcendental",
    "functions.",
]


def ratio(row, whose="FLA"):
    """How many times faster deltawave is, modelled."""
    return total(row, whose, "modelled_us") / total(row, "deltawave", "modelled_us")


def mean(ratios):
    """The geometric mean."""
    return math.exp(sum(map(math.log, ratios)) / len(ratios))


def details(row):
    """All kernels of a row, their sums, and what the results show."""
    lines = ["", f"## {title(row)}", "", "| | " + " | ".join(label for _, label, _ in FIGURES) + " | waves/SIMD |",
             "|---|" + "---:|" * (len(FIGURES) + 1)]
    for who, name, _, kernel in kernels(row):
        cells = [number(kernel[figure] / scale) for figure, _, scale in FIGURES]
        lines.append(f"| {who}: `{name}` | " + " | ".join(cells) + f" | {kernel['waves_per_simd']:g} |")
    theirs = ["FLA"] + ["FLA and torch"] * any(kernel.get("torch") for kernel in row["fla"]) + ["aiter"] * ("aiter" in row)
    for who in ["deltawave", *theirs]:
        cells = [f"**{number(total(row, who, figure) / scale)}**" for figure, _, scale in FIGURES]
        lines.append(f"| **{who}** | " + " | ".join(cells) + " | |")
    for who in theirs:
        ratios = [f"{total(row, who, f) / max(total(row, 'deltawave', f), 1):.2f}x" for f, _, _ in FIGURES]
        lines.append(f"| {who} / deltawave | " + " | ".join(ratios) + " | |")
    share = row["ours"]["roofline_us"] / total(row, "deltawave", "modelled_us")
    lines += ["", f"Roofline {row['ours']['roofline_us']:.1f} us: deltawave is at {share:.0%} of it, modelled. "
              + differences(row), "", "Configurations: " + "; ".join(
                  f"`{name}`: {short(c)}" for who, name, c, _ in kernels(row) if who in ("FLA", "aiter")) + "."]
    return lines


def differences(row):
    if row.get("operation", "forward") == "forward":
        found = [("FLA", row["difference"])] + [("aiter", row["aiter_difference"])] * ("aiter" in row)
        return " ".join(f"{who}'s outputs differ by {o:.1e} of their rms, its states by {state:.1e}." for who, (o, state) in found)
    each = ", ".join(f"`{name}` {value:.1e}" for name, value in zip(row["compared"], row["difference"]))
    return f"The gradients differ by these parts of their rms: {each}."


def summary(rows):
    """Modelled times of all rows, and how many times faster deltawave is."""
    theirs = [who for who in ("FLA", "aiter") if any(who.lower() in row for row in rows)]
    lines = ["| modelled us | deltawave | " + " | ".join(theirs) + " | " + " | ".join(f"{who} / deltawave" for who in theirs) + " |",
             "|---|---:|" + "---:|" * (2 * len(theirs))]
    found = {who: [] for who in theirs}
    for row in rows:
        present = [who for who in theirs if who.lower() in row]
        times = [number(total(row, who, "modelled_us")) if who in present else "" for who in theirs]
        for who in present:
            found[who].append(ratio(row, who))
        ratios = [f"{ratio(row, who):.2f}x" if who in present else "" for who in theirs]
        lines.append(f"| {title(row)} | {number(total(row, 'deltawave', 'modelled_us'))} | " + " | ".join(times + ratios) + " |")
    means = [f"**{mean(found[who]):.2f}x**" for who in theirs]
    return [*lines, "| **geometric mean** | | " + " | ".join([""] * len(theirs) + means) + " |"]


def markdown(rows):
    lines = [
        "# Prefill beside the chains of FLA and aiter, on the simulator",
        "",
        "`make bench-compare` writes this: deltawave's prefill and the forward chain of fla-core, compiled by Triton, on the",
        "same inputs in the same run (bf16, K = V = 128, initial and final state in f32; N x T: N sequences packed into one",
        "batch).",
        *HOW,
        "FLA's clearing of its triangular factor is not counted.",
        "Gates are `normal`, logsigmoid(N(0, 1)): segments forget the state before them ([segments](../concepts/segments.md)), the others' work does not",
        "depend on gates. [The backward](compare_backward.md) has a page of its own.",
        "",
    ]
    if any("aiter" in row for row in rows):
        lines += [
            "aiter's chain (`--aiter`) is the fastest that its kernels form on gfx942, by modelled time: kernels of Triton and of FlyDSL for the",
            "preparation and for the states, one of Triton for the outputs, each in its best configuration. aiter gets the sequences of a",
            "batch as `[N, T]`, without a table of lengths. FlyDSL's kernels cut numbers off to bf16, as aiter compiles them.",
            "",
        ]
    lines += summary(rows)
    lines += ["", "![Modelled time](compare.svg)"]
    for row in rows:
        lines += details(row)
    return "\n".join(lines) + "\n"


def backward_markdown(rows):
    lines = [
        "# Backward of prefill beside FLA's chain, on the simulator",
        "",
        "`make bench-compare` writes this: deltawave's backward of prefill and the backward chain of fla-core, compiled by Triton, on",
        "the same inputs and the same gradients of outputs and final states, in the same run (bf16, K = V = 128, states and",
        "their gradients in f32, rows of q and k normalised before, gates given and `normal`; N x T: N sequences packed into",
        "one batch).",
        *HOW,
        "",
        "FLA is the seven Triton kernels that `chunk_gated_delta_rule_bwd` launches: the forward's w, u and states again, four",
        "of the backward, and the sum of the gates' gradients. It leaves the rest to torch: sums over the value heads of a key",
        "head and over parts of the keys, and additions. Torch does not run here. Stand-ins that move the same bytes are shown",
        "as `torch` and counted apart; most of their time is that of a launch.",
        "FLA also reads the gates' sums and the triangular factor A that its forward kept. deltawave keeps nothing of the",
        "forward: its backward starts from the inputs, and all of its kernels count.",
        "",
        "In `chunk_gated_delta_rule_bwd_kernel_dhu` the gates promote `b_q` to f32. On gfx942 Triton multiplies it in TF32, at half",
        "the rate of bf16.",
        "",
        "![Modelled time](compare_backward.svg)",
        "",
        "| modelled us | deltawave | FLA | FLA and torch | FLA / deltawave | FLA and torch / deltawave |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    theirs = ("FLA", "FLA and torch")
    for row in rows:
        cells = [number(total(row, who, "modelled_us")) for who in ("deltawave", *theirs)]
        cells += [f"{ratio(row, who):.2f}x" for who in theirs]
        lines.append(f"| {title(row)} | " + " | ".join(cells) + " |")
    means = [f"**{mean([ratio(row, who) for row in rows]):.2f}x**" for who in theirs]
    lines += ["| **geometric mean** | | | | " + " | ".join(means) + " |", "",
              "## For each chunk of 64 tokens and value head", "",
              "The design counted products of the matrix units, triangular ones by their blocks, and bytes that one kernel hands",
              "to the next through memory or reads as input, with two value heads for each key head. It had no count of",
              "instructions.", "",
              "| | | " + " | ".join(label for _, label, _, _ in SHARES) + " |", "|---|---|" + "---:|" * len(SHARES),
              "| design | | " + " | ".join(form.format(DESIGN[figure] / scale) if figure in DESIGN else ""
                                           for figure, _, scale, form in SHARES) + " |"]
    for row in rows:
        for who in ("deltawave", *theirs):
            cells = [form.format(total(row, who, figure) / row["ours"]["chunk_heads"] / scale)
                     for figure, _, scale, form in SHARES]
            lines.append(f"| {title(row) if who == 'deltawave' else ''} | {who} | " + " | ".join(cells) + " |")
    for row in rows:
        lines += details(row)
    return "\n".join(lines) + "\n"


HEADING = "Gated DeltaNet prefill"
ORDER = ("deltawave: prepare, (summarise, combine,) scan, or fused. FLA: cumsum, K K^T and solve, w and u, states, outputs. "
         "aiter: prepare, states, outputs.")
BACKWARD_HEADING = "Backward of Gated DeltaNet prefill"
BACKWARD_ORDER = ("deltawave: prepare, (summarise, combine,) walk, gradients. FLA: w and u, states, dv, dh du, dq dk dw, dk dv, dg; "
                  "pale: torch")


def chart(rows, heading=HEADING, order=ORDER):
    """Bars of modelled time, kernel by kernel, as SVG."""
    width, left, right, bar, gap = 900, 250, 130, 22, 34
    theirs = ["FLA and torch", *["aiter"] * any("aiter" in row for row in rows)]
    height = 84 + len(rows) * ((1 + len(theirs)) * bar + gap)
    out = [f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
           f'viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="12">',
           '<rect width="100%" height="100%" fill="white"/>',
           f'<text x="14" y="22" font-size="14">{heading}: modelled time, the longest of each row as long as the axis</text>',
           f'<text x="14" y="40">deltawave (<tspan fill="{OURS}">blue</tspan>) and FLA\'s chain '
           f'(<tspan fill="{THEIRS}">orange</tspan>)'
           + (f', aiter (<tspan fill="{AITER}">violet</tspan>)' if len(theirs) > 1 else "")
           + ", kernel by kernel, theirs in the best configurations; in brackets: over deltawave</text>",
           f'<text x="14" y="58">{order}</text>']
    y = 76
    for row in rows:
        longest = max(total(row, who, "modelled_us") for who in ("deltawave", *theirs))
        out.append(f'<text x="14" y="{y + bar + 4}">{title(row)}</text>')
        for who in ("deltawave", *theirs):
            x = left
            parts = [part for owner in who.split(" and ") for part in kernels(row) if part[0] == owner]
            for owner, name, _, kernel in parts:
                length = kernel["modelled_us"] / longest * (width - left - right)
                out.append(f'<rect x="{x:.1f}" y="{y}" width="{length:.1f}" height="{bar - 3}" fill="{COLOURS[owner]}" '
                           f'stroke="white"><title>{name}: {kernel["modelled_us"]:.1f} us</title></rect>')
                x += length
            text = " + ".join(f"{us:.0f}" for us in (total(row, owner, "modelled_us") for owner in who.split(" and ")) if us)
            text += " us"
            if who != "deltawave":
                text += f" ({ratio(row, who.split(' and ')[0]):.2f}x)"
            out.append(f'<text x="{x + 6:.1f}" y="{y + bar - 8}">{text}</text>')
            y += bar
        y += gap
    return "\n".join(out + ["</svg>"]) + "\n"

"""Table and chart of what benches/compare found."""

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
OURS, THEIRS = "#1f77b4", "#ff7f0e"


def kernels(row):
    """Kernels of both: whose, name, configuration, counters."""
    for kernel in row["ours"]["kernels"]:
        yield "deltawave", kernel["name"], "", kernel
    for kernel in row["fla"]:
        yield "FLA", kernel["kernel"], kernel["configuration"], kernel


def total(row, whose, figure):
    return sum(kernel[figure] for who, _, _, kernel in kernels(row) if who == whose)


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


def markdown(rows):
    lines = [
        "# Prefill beside FLA's chain, on the simulator",
        "",
        "`make bench-compare` writes this: deltawave's prefill and the forward chain of fla-core, compiled by Triton, on the",
        "same inputs in the same run (bf16, K = V = 128, initial and final state in f32; N x T: N sequences packed into one",
        "batch). Instructions, clocks and bytes are counted, exactly; times are modelled, not measured ([concepts/timing.md](../concepts/timing.md) says how far the model is",
        "off). FLA's kernels have the best of their autotuning configurations, by modelled time. Clocks are sums over all",
        "waves; vector clocks include transcendental functions. FLA's clearing of its triangular factor is not counted.",
        "Gates are `normal`, logsigmoid(N(0, 1)): segments forget the state before them ([segments](../concepts/segments.md)), FLA's work does not",
        "depend on gates.",
        "",
        "![Modelled time](compare.svg)",
    ]
    for row in rows:
        lines += ["", f"## {title(row)}", "", "| | " + " | ".join(label for _, label, _ in FIGURES) + " | waves/SIMD |",
                  "|---|" + "---:|" * (len(FIGURES) + 1)]
        for who, name, _, kernel in kernels(row):
            cells = [number(kernel[figure] / scale) for figure, _, scale in FIGURES]
            lines.append(f"| {who}: `{name}` | " + " | ".join(cells) + f" | {kernel['waves_per_simd']:g} |")
        for who in ("deltawave", "FLA"):
            cells = [f"**{number(total(row, who, figure) / scale)}**" for figure, _, scale in FIGURES]
            lines.append(f"| **{who}** | " + " | ".join(cells) + " | |")
        ratios = [f"{total(row, 'FLA', f) / max(total(row, 'deltawave', f), 1):.2f}x" for f, _, _ in FIGURES]
        lines.append("| FLA / deltawave | " + " | ".join(ratios) + " | |")
        share = row["ours"]["roofline_us"] / total(row, "deltawave", "modelled_us")
        lines += ["", f"Roofline {row['ours']['roofline_us']:.1f} us: deltawave is at {share:.0%} of it, modelled. The "
                  f"outputs differ by {row['difference'][0]:.1e} of their rms, the states by {row['difference'][1]:.1e}.",
                  "", "Configurations: " + "; ".join(f"`{name}`: {short(c)}" for who, name, c, _ in kernels(row)
                                                      if who == "FLA") + "."]
    return "\n".join(lines) + "\n"


def chart(rows):
    """Bars of modelled time, kernel by kernel, as SVG."""
    width, left, right, bar, gap = 900, 250, 130, 22, 34
    height = 84 + len(rows) * (2 * bar + gap)
    out = [f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
           f'viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="12">',
           '<rect width="100%" height="100%" fill="white"/>',
           '<text x="14" y="22" font-size="14">Gated DeltaNet prefill: modelled time, the longer of each pair as long as '
           "the axis</text>",
           f'<text x="14" y="40">deltawave (<tspan fill="{OURS}">blue</tspan>) and FLA\'s chain '
           f'(<tspan fill="{THEIRS}">orange</tspan>), kernel by kernel, FLA in its best configurations; in brackets how many '
           "times faster deltawave is</text>",
           '<text x="14" y="58">deltawave: prepare, scan; in segments prepare, summarise, combine, scan. FLA: cumsum, K K^T and solve, w and u, states, outputs.</text>']
    y = 76
    for row in rows:
        longest = max(total(row, who, "modelled_us") for who in ("deltawave", "FLA"))
        out.append(f'<text x="14" y="{y + bar + 4}">{title(row)}</text>')
        for who, colour in (("deltawave", OURS), ("FLA", THEIRS)):
            x = left
            for owner, name, _, kernel in kernels(row):
                if owner != who:
                    continue
                length = kernel["modelled_us"] / longest * (width - left - right)
                out.append(f'<rect x="{x:.1f}" y="{y}" width="{length:.1f}" height="{bar - 3}" fill="{colour}" '
                           f'stroke="white"><title>{name}: {kernel["modelled_us"]:.1f} us</title></rect>')
                x += length
            sum_us = total(row, who, "modelled_us")
            text = f"{sum_us:.0f} us"
            if who == "deltawave":
                text += f" ({total(row, 'FLA', 'modelled_us') / sum_us:.2f}x)"
            out.append(f'<text x="{x + 6:.1f}" y="{y + bar - 8}">{text}</text>')
            y += bar
        y += gap
    return "\n".join(out + ["</svg>"]) + "\n"

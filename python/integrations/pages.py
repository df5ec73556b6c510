"""Runs the Python blocks of docs/start/engine.md that switch deltawave on, line by line as they stand, but for the names of
the model and the device.

    pages.py transformers|fla|vllm [MODEL]
"""

import re
import sys
from pathlib import Path

PAGE = Path(__file__).resolve().parents[2] / "docs/start/engine.md"
# Lines that name what this machine lacks, and what stands for them.
CHANGED = {"transformers": (r'^path, device = .*$', 'path, device = MODEL, "cpu"'),
           "fla": (r'^device = .*$', 'device = "cpu"'),
           "vllm": (r'^path = .*$', 'path = MODEL')}


def block(heading: str) -> str:
    """The first Python block below a heading of the page."""
    page = PAGE.read_text(encoding="utf-8")
    found = re.search(rf"^### {heading}$.*?^```python\n(.*?)^```$", page, re.DOTALL | re.MULTILINE | re.IGNORECASE)
    assert found, f"{PAGE}: no Python block below '### {heading}'"
    return found[1]


if __name__ == "__main__":
    part = sys.argv[1]
    lines, count = re.subn(*CHANGED[part], block(part), flags=re.MULTILINE)
    assert count == 1, f"{PAGE}: the block of {part} has {count} lines {CHANGED[part][0]}"
    names = {"MODEL": sys.argv[2] if len(sys.argv) > 2 else None}
    exec(compile(lines, str(PAGE), "exec"), names)
    if part == "transformers":
        assert set(names["deltawave"].transformers.answered) == {"layer"}
    if part == "fla":
        assert names["backend"].calls == 1
    if part == "vllm":
        from vllm.model_executor.custom_op import op_registry_oot

        steps = op_registry_oot["QwenGatedDeltaNetAttention"].steps
        assert steps["deltawave"] and not steps["vllm"], steps

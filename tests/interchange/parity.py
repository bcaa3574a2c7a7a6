"""`python -m tests.interchange.parity`: how far braid is from transformers, as the table in docs/parity.md."""

from __future__ import annotations

from pathlib import Path

import torch

from tests.interchange.models import CONFIGS, DOCUMENTS, compare

PAGE = Path(__file__).resolve().parents[2] / "docs" / "parity.md"
HEAD = """# Parity with transformers

Tiny random models of transformers {version} are imported through `braid.interchange`, and both sides compute
logits and the gradient of every parameter from the same tokens: 37 in a row, in 1 and 3 rows, and packed
documents of lengths {packed}, which transformers sees one by one. The figures are the
worst over these, each the length of the difference of two tensors over the length of theirs. In float64,
transformers' own roundings to float32 (norms, rotary tables, routers, scans) are lifted; see
`tests/interchange/models.py`.

`python -m tests.interchange.parity` writes this page.

| model | logits, fp64 | gradients, fp64 | logits, fp32 | gradients, fp32 |
|---|---|---|---|---|
"""


def worst(case: str, dtype: torch.dtype) -> tuple[float, float]:
    """Of logits and gradients, over all ways to lay out documents."""
    found = [compare(case, documents, dtype) for documents in DOCUMENTS]
    return max(parity.logits for parity in found), max(parity.gradients for parity in found)


def main() -> None:
    import transformers

    torch.set_num_threads(1)
    lines = []
    for case in CONFIGS:
        figures = [f"{error:.1e}" for dtype in (torch.float64, torch.float32) for error in worst(case, dtype)]
        lines.append(f"| {case} | {' | '.join(figures)} |")
        print(lines[-1])
    packed = "; ".join(" + ".join(map(str, row)) for row in DOCUMENTS["packed"])
    PAGE.write_text(HEAD.format(version=transformers.__version__, packed=packed) + "\n".join(lines) + "\n")


if __name__ == "__main__":
    main()

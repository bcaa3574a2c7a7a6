"""Generate docs/parity.md, the errors against transformers: `python -m tests.interchange.parity`."""

from __future__ import annotations

from pathlib import Path

import torch

from tests.interchange.models import CONFIGS, DOCUMENTS, compare

PAGE = Path(__file__).resolve().parents[2] / "docs" / "parity.md"
HEAD = """# Parity with transformers

Imported models compute what transformers computes: in float64, logits and the gradient of every parameter
agree to 1e-12 for the eight families below. `deepseek_v4` is not compared as a whole, because braid does not
have its attention.

Tiny random models of transformers {version} are imported through `braid.interchange`; both sides compute
logits and gradients from the same tokens. Rows have 37 tokens, 1 or 3 at a time, or hold packed documents of
lengths {packed}, which transformers sees one by one. Each figure is the worst ‖difference‖ / ‖transformers‖
over these inputs, and for gradients over all parameters. In float64, transformers' own roundings to float32
(norms, rotary tables, routers, scans) are removed; see `tests/interchange/models.py`.
`python -m tests.interchange.parity` generates this page.

| model | logits, fp64 | gradients, fp64 | logits, fp32 | gradients, fp32 |
|---|---|---|---|---|
"""


def worst(case: str, dtype: torch.dtype) -> tuple[float, float]:
    """The largest error of logits and of gradients, over all document layouts."""
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

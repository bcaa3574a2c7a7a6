"""Generate docs/parity.md, the errors against transformers: `python -m tests.interchange.parity`."""

from __future__ import annotations

from pathlib import Path

import torch

from tests.interchange.models import BOUNDS, CONFIGS, DOCUMENTS, FLOOR, Parity, compare, model_type
from tests.interchange.omni import IMAGES, OMNI, RADIO, compare_omni, compare_radio

PAGE = Path(__file__).resolve().parents[2] / "docs" / "parity.md"
HEAD = """# Parity with transformers

Imported models compute what transformers computes: logits and the gradient of every parameter agree
{promise}, listed below. `kimi_k2` is compared with transformers' DeepSeek-V3;
`deepseek_v4` is not compared as a whole, because braid does not have its attention. transformers ignores
Nemotron-H's `time_step_limit`, which braid honours where a file has it: these models have none.

Tiny random models of transformers {version} are imported through `braid.interchange`; both sides compute
logits and gradients from the same tokens. Rows have 37 tokens, 1 or 3 at a time, or hold packed documents of
lengths {packed}, which transformers sees one by one. Each figure is the worst
‖difference‖ / ‖transformers‖ over these inputs, and for gradients over all parameters; one that is shorter
than {floor} of the longest, such as that of a key bias without positions, counts as so long. In float64,
transformers' own roundings to float32 (norms, rotary tables, routers, scans) are removed
(`tests/interchange/widened.py`).
`python -m tests.interchange.parity` generates this page.

| model | logits, fp64 | gradients, fp64 | logits, fp32 | gradients, fp32 |
|---|---|---|---|---|
"""
IMAGES_HEAD = """
## Models with images

Of `nemotron_h_omni` the path of images is compared, with all that it reads: rows of 37 tokens with one image;
three rows with several images of all sizes (the table of positions is 5 x 5, the largest image 4 x 10 patches),
one of them text alone; text alone. Gradients are those of the tower, the projector and the language model. Of
`radio`, features stand in the place of logits: three images of one size as a batch, and five of many sizes,
1 x 6 to 9 x 11 patches, as a pack. transformers resizes the table of positions in float32, which is removed
with its other roundings.

| model | logits or features, fp64 | gradients, fp64 | logits or features, fp32 | gradients, fp32 |
|---|---|---|---|---|
"""


def compared(case: str, dtype: torch.dtype) -> list[Parity]:
    """A case with each of its inputs."""
    if case in RADIO:
        return [compare_radio(RADIO[case], dtype)]
    if case in OMNI:
        return [compare_omni(case, grids, dtype) for grids in IMAGES.values()]
    return [compare(case, documents, dtype) for documents in DOCUMENTS]


def worst(case: str, dtype: torch.dtype) -> tuple[float, float]:
    """The largest error of logits and of gradients, over all inputs."""
    found = compared(case, dtype)
    return max(parity.logits for parity in found), max(parity.gradients for parity in found)


CASES = (*CONFIGS, *OMNI, *RADIO)
"""The rows of the page."""


def promise() -> str:
    """What the docs say of the model types that are compared."""
    count = len({model_type(case) for case in CASES})
    return f"to {BOUNDS[torch.float64]:.0e} in float64 for {count} model types"


def main() -> None:
    import transformers

    torch.set_num_threads(1)
    lines = {}
    for case in CASES:
        figures = [f"{error:.1e}" for dtype in (torch.float64, torch.float32) for error in worst(case, dtype)]
        lines[case] = f"| {case} | {' | '.join(figures)} |\n"
        print(lines[case], end="")
    packed = "; ".join(" + ".join(map(str, row)) for row in DOCUMENTS["packed"])
    head = HEAD.format(promise=promise(), version=transformers.__version__, packed=packed, floor=f"{FLOOR:.0e}")
    texts, others = ("".join(lines[case] for case in cases) for cases in (CONFIGS, (*OMNI, *RADIO)))
    PAGE.write_text(head + texts + IMAGES_HEAD + others)


if __name__ == "__main__":
    main()

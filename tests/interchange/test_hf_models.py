"""Models of transformers against braid: the same weights give the same logits and the same gradients.

`python -m tests.interchange.parity` writes the table of these errors to docs/parity.md.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from braid.interchange import adapter_for, convert, from_hf, to_hf
from braid.interchange.files import SafetensorsFolder
from braid.interchange.tables import copies
from tests.interchange import parity
from tests.interchange.models import BOUNDS, CONFIGS, DOCUMENTS, compare, model_type, our_shape, their_model

pytestmark = pytest.mark.costly("every family is built by transformers and compared, gradients too")

pytest.importorskip("transformers")


@pytest.mark.parametrize("documents", DOCUMENTS)
@pytest.mark.parametrize("case", CONFIGS)
def test_logits_and_every_gradient(case: str, documents: str) -> None:
    assert_near(case, documents, torch.float64)


@pytest.mark.parametrize("case", CONFIGS)
def test_logits_and_every_gradient_in_float32(case: str) -> None:
    assert_near(case, "packed", torch.float32)


def assert_near(case: str, documents: str, dtype: torch.dtype) -> None:
    found = compare(case, documents, dtype)
    assert found.logits < BOUNDS[dtype]
    assert found.gradients < BOUNDS[dtype], found.worst


def test_the_docs_promise_the_bound_that_the_tests_hold() -> None:
    page, readme = parity.PAGE.read_text(), (parity.PAGE.parents[1] / "README.md").read_text()
    for text in (page, readme):
        assert parity.promise() in " ".join(text.split())
    lines = [line.strip("| ").split(" | ") for line in page.splitlines() if line.startswith("|")]
    rows = [row for row in lines if row[0] != "model" and not row[0].startswith("---")]
    assert [row[0] for row in rows] == list(parity.CASES), "run: python -m tests.interchange.parity"
    bounds = [BOUNDS[dtype] for dtype in (torch.float64, torch.float64, torch.float32, torch.float32)]
    assert all(float(error) < bound for row in rows for error, bound in zip(row[1:], bounds, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("form", ["hub", "memory"])
@pytest.mark.parametrize("case", CONFIGS)
def test_there_and_back_is_the_identity_on_every_tensor(
    case: str, form: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    model = their_model(case, dtype)
    shape, adapter = our_shape(case, model), adapter_for(model_type(case), form)
    if form == "hub":
        model.save_pretrained(tmp_path)
    theirs = dict(SafetensorsFolder(tmp_path)) if form == "hub" else model.state_dict()
    ours = convert(theirs, adapter, shape, "to_ours")
    back = convert(ours, adapter, shape, "to_theirs")
    assert back.keys() == theirs.keys() - copies(adapter, shape).keys()
    for name, tensor in back.items():
        assert tensor.dtype == theirs[name].dtype, name
        assert torch.equal(tensor, theirs[name]), name


@pytest.mark.parametrize("case", [case for case in CONFIGS if model_type(case) != "kimi_k2"])
def test_transformers_reads_what_braid_writes(case: str, tmp_path: Path) -> None:
    import transformers

    model = their_model(case, torch.float32)
    model.save_pretrained(tmp_path / "theirs")
    shape, ours = from_hf(tmp_path / "theirs")
    to_hf(shape, ours, tmp_path / "ours", model_type=model_type(case))
    load = transformers.AutoModelForCausalLM.from_pretrained
    again = load(tmp_path / "ours", experts_implementation="eager").eval()
    wanted = model.state_dict()
    assert again.state_dict().keys() == wanted.keys()
    assert all(torch.equal(tensor, wanted[name]) for name, tensor in again.state_dict().items())
    tokens = torch.arange(12).view(2, 6)
    with torch.no_grad():
        logits = [each(tokens, use_cache=False).logits for each in (again, model)]
    torch.testing.assert_close(*logits)
    assert shape == from_hf(tmp_path / "ours")[0]

"""Commands in messages install what is missing, and never by a name that an index may give to others."""

from __future__ import annotations

import re
from pathlib import Path

from braid.installing import CHECKOUT, how_to_install

SPELLED = re.compile(r"(pip install|install) '?braid\b")


def test_a_checkout_has_make_and_a_wheel_has_pip(tmp_path: Path) -> None:
    assert how_to_install("tokenizers", "transformers") == "make venv"
    assert how_to_install("tokenizers", checkout=tmp_path) == "pip install tokenizers"
    assert how_to_install("wandb") == "pip install wandb"


def test_no_message_or_page_installs_braid_by_name() -> None:
    files = [*CHECKOUT.glob("src/**/*.py"), *CHECKOUT.glob("docs/*.md"), CHECKOUT / "README.md"]
    assert len(files) > 100
    assert [str(file) for file in files if SPELLED.search(file.read_text())] == []

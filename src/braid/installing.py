"""How to install a package that an optional feature needs, for messages.

Never by braid's own name: a package index may have another project under it. A checkout has `make venv`, which
installs what its tests need; elsewhere pip installs the package itself.
"""

from __future__ import annotations

from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[2]
MADE_BY_VENV = frozenset({"tokenizers", "transformers", "triton", "cuda-bindings"})
"""What `make venv` installs."""


def how_to_install(*packages: str, checkout: Path = CHECKOUT) -> str:
    """The command that installs these packages here."""
    if (checkout / "scripts" / "setup_venv.py").is_file() and MADE_BY_VENV.issuperset(packages):
        return "make venv"
    return f"pip install {' '.join(packages)}"

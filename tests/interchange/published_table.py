"""`python -m tests.interchange.published_table`: verdicts on published config.json files, for the docs.

`published/` holds the files as the hub has them, by model_type.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

from braid.errors import ConfigError
from braid.interchange.hub import read_config

FOLDER = Path(__file__).parent / "published"
PAGE = Path(__file__).resolve().parents[2] / "docs" / "interchange.md"
BEGIN, END = "<!-- published: begin -->", "<!-- published: end -->"


class Verdict(NamedTuple):
    """What `braid import` says of a config.json."""

    accepted: bool
    reasons: tuple[str, ...]
    """Why it is refused, or what a user should know."""


def names() -> list[str]:
    return sorted(str(file.relative_to(FOLDER).with_suffix("")) for file in FOLDER.glob("*/*.json"))


def config(name: str) -> dict[str, Any]:
    read: dict[str, Any] = json.loads((FOLDER / f"{name}.json").read_text())
    return read


def verdict(given: dict[str, Any]) -> Verdict:
    try:
        return Verdict(True, read_config(given).notes)
    except ConfigError as error:
        first, *reasons = str(error).splitlines()
        told = [reason.strip() for reason in reasons if not reason.strip().startswith(("known", "set "))]
        return Verdict(False, tuple(told) or (first,))


def table() -> str:
    lines = ["| model | `model_type` | verdict | why, or what to know |", "|---|---|---|---|"]
    for name in names():
        given = config(name)
        accepted, reasons = verdict(given)
        told = "<br>".join(reason.replace("|", "\\|") for reason in reasons)
        word = "imported" if accepted else "refused"
        lines.append(f"| {name.partition('/')[2]} | `{given['model_type']}` | {word} | {told} |")
    return "\n".join(lines)


def block() -> str:
    """The part of the page between its marks."""
    return f"{BEGIN}\n{table()}\n{END}"


def main() -> None:
    page = PAGE.read_text()
    before, _, rest = page.partition(BEGIN)
    PAGE.write_text(before + block() + rest.partition(END)[2])


if __name__ == "__main__":
    main()

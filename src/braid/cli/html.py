"""What the pages that braid writes are made of: the page itself, tables, headings, notes and data."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from html import escape
from importlib.resources import files
from string import Template
from typing import Any


def html_page(
    heading: str,
    body: Iterable[str],
    *,
    styles: Sequence[str],
    scripts: Sequence[str],
    about: Sequence[str] = (),
) -> str:
    """A page that needs no other file. `styles` and `scripts` are names in the folder `page`, `about` is shown
    under the heading."""
    return Template(_resource("page.html")).substitute(
        heading=escape(heading),
        about="\n".join(f"<p>{escape(line)}</p>" for line in about),
        style="".join(_resource(name) for name in styles),
        body="\n".join(body),
        script="".join(_resource(name) for name in scripts),
    )


def _resource(name: str) -> str:
    return (files("braid.cli") / "page" / name).read_text(encoding="utf-8")


def data(name: str, value: Any) -> str:
    """Data for a script, under this id."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    return f'<script type="application/json" id="{name}">{text}</script>'


def title(text: str) -> str:
    return f"<h2>{escape(text)}</h2>"


def note(text: str) -> str:
    words = re.sub(r"`(.*?)`", r"<code>\1</code>", escape(text))
    return f'<p class="note">{words}</p>'


def table(
    columns: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    numbers: Sequence[str] = (),
    bars: tuple[str, Sequence[float]] | None = None,
    total: str = "",
    html: Sequence[str] = (),
) -> str:
    """A table. `numbers` are the columns to align on the right; `bars` has a column, behind which there
    is a bar for each row, and their shares of the width; rows with the word `total` stand out; cells of columns
    in `html` are elements."""
    look = [' class="n"' if column in numbers else "" for column in columns]
    behind, shares = bars or ("", ())
    head = [f"<th{each}>{escape(column)}</th>" for each, column in zip(look, columns, strict=True)]
    lines = []
    for place, row in enumerate(rows):
        cells = [
            f"<td{each}>{cell if column in html else escape(cell)}</td>"
            for each, column, cell in zip(look, columns, row, strict=True)
        ]
        if bars is not None:
            bar = f'<span style="width:{100 * shares[place]:.1f}%"></span>'
            cells.insert(columns.index(behind) + 1, f'<td class="bar">{bar}</td>')
        lines.append(f"<tr{' class=total' if total and total in row else ''}>{''.join(cells)}</tr>")
    if bars is not None:
        head.insert(columns.index(behind) + 1, "<th></th>")
    top, body = f"<thead><tr>{''.join(head)}</tr></thead>", "\n".join(lines)
    return f'<div class="scroll"><table>{top}<tbody>\n{body}\n</tbody></table></div>'

"""The docs as a reader follows them: commands that exist, links that lead somewhere, pages that are found."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from braid.planning.plan import check
from tests.guides import commands_of, parsed

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted((ROOT / "docs").glob("*.md"))
GUIDES = ("first-hour", "hybrid-1b", "fine-tune")


@pytest.mark.parametrize("guide", GUIDES)
def test_commands_of_a_guide_are_accepted_and_their_runs_can_be_planned(guide, monkeypatch):
    pytest.importorskip("yaml", reason="needs the package pyyaml (extra `yaml`)")
    monkeypatch.chdir(ROOT)
    commands = list(commands_of((ROOT / "docs" / f"{guide}.md").read_text()))
    assert len(commands) >= 10
    for words in commands:
        options = parsed(words, monkeypatch)
        if hasattr(options, "run") and not getattr(options, "search", False):
            problems = check(options.run, options.world or 1)
            assert not problems, f"braid {' '.join(words)}: {problems}"


@pytest.mark.parametrize(
    "line",
    ["braid train tiny --train.stepz 3", "braid exprot runs/a --out b", "braid data build --input notes"],
)
def test_a_command_that_does_not_exist_is_noticed(line, monkeypatch, capsys):
    (words,) = commands_of(f"```\n{line}   # as a page has it\n```\n")
    with pytest.raises((SystemExit, AssertionError)):
        parsed(words, monkeypatch)


def test_commands_are_read_as_a_shell_reads_them():
    page = "```\n$ braid plan a \\\n  --world 2  # why\nls\nbraid show a --json > b\n```\n"
    page += "```python\nbraid x\n```\n```\ntorchrun --nnodes 2 --nproc-per-node 4 -m braid train a\n```\n"
    assert list(commands_of(page)) == [
        ["plan", "a", "--world", "2"],
        ["show", "a", "--json"],
        ["train", "a", "--world", "8"],
    ]


# ------------------------------------------------------------------------------------------------ links


def without_code(text: str) -> str:
    return re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)


def anchors(text: str) -> set[str]:
    """Of the headings of a page that GitHub and MkDocs give alike: lower case, no punctuation, hyphens for
    spaces. GitHub keeps spaces that punctuation leaves behind, MkDocs joins them. Not of repeated headings."""
    headings = re.findall(r"^#+ (.*)$", without_code(text), re.MULTILINE)
    plain = [re.sub(r"[^\w\- ]", "", heading.lower()) for heading in headings]
    hub = [heading.replace(" ", "-") for heading in plain]
    site = [re.sub(r"[- ]+", "-", heading.strip()) for heading in plain]
    return {one for one, other in zip(hub, site, strict=True) if one == other and hub.count(one) == 1}


def broken_links(page: Path, text: str) -> list[str]:
    """Relative links of a page that lead to no file or to no heading."""
    found = []
    for link in re.findall(r"\]\(([^)\s]+)\)", re.sub(r"`[^`\n]*`", "", without_code(text))):
        name, _, anchor = link.partition("#")
        if re.match(r"[a-z]+:", name):
            continue
        target = (page.parent / name).resolve() if name else page
        inside = target.read_text() if target.is_file() and target != page else text
        if not target.exists() or (anchor and anchor not in anchors(inside)):
            found.append(f"{page.name}: {link}")
    return found


def test_links_of_all_pages_lead_somewhere():
    pages = [ROOT / "README.md", *PAGES]
    assert [link for page in pages for link in broken_links(page, page.read_text())] == []


def test_a_broken_link_is_found():
    right = (
        "# One thing\n[a](data.md) [b](data.md#supervised-fine-tuning) [c](#one-thing) `[d](x)` [e](http://a)\n"
    )
    page = ROOT / "docs" / "lora.md"
    assert broken_links(page, right) == []
    assert broken_links(page, "# One\n[a](data.md#none) [b](none.md) [c](#two)\n") == [
        "lora.md: data.md#none",
        "lora.md: none.md",
        "lora.md: #two",
    ]


# ------------------------------------------------------------------------------------------- the site


def pages_of(navigation: list) -> list[str]:
    """The files of the navigation of mkdocs.yml, in its order."""
    values = [value for entry in navigation for value in entry.values()]
    return [page for value in values for page in ([value] if isinstance(value, str) else pages_of(value))]


def test_every_page_is_in_the_navigation_once():
    yaml = pytest.importorskip("yaml", reason="needs the package pyyaml (extra `yaml`)")
    site = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
    assert sorted(pages_of(site["nav"])) == [page.name for page in PAGES]


def test_readme_links_every_guide():
    readme = (ROOT / "README.md").read_text()
    assert [guide for guide in GUIDES if f"(docs/{guide}.md)" not in readme] == []


@pytest.mark.long
def test_the_site_builds(tmp_path):
    if shutil.which("mkdocs") is None:
        pytest.skip("needs the package mkdocs-material (extra `docs`)")
    command = ["mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path / "site")]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    assert (tmp_path / "site" / "first-hour" / "index.html").is_file()

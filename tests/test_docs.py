"""Pages name what there is: links and their anchors resolve, and docs/architecture.md names code that exists."""

import ast
import re
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

import pytest

TOP = Path(__file__).parents[1]
PACKAGE = TOP / "tlt_server"
ROOMS = ("benchmarks", "clients", "deploy", "docs", "examples", "patches", "tests", "tlt_server")
PAGES = sorted(chain(TOP.glob("*.md"), *((TOP / room).rglob("*.md") for room in ROOMS)))
ARCHITECTURE = TOP / "docs/architecture.md"
FENCED = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)\s]+)\)")
NAMED = re.compile(r"`([\w/]+\.py|[\w/]+/)`|`([\w.]+)\(\)`")
"""A file or folder below the package; a function of the file that was named last."""


def anchors(page: Path) -> set[str]:
    """As GitHub makes them of headings."""
    found: list[str] = []
    for heading in re.findall(r"^#+ +(.*)$", FENCED.sub("", page.read_text()), re.MULTILINE):
        slug = re.sub(r"[^\w\- ]", "", re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).lower()).replace(" ", "-")
        found.append(f"{slug}-{found.count(slug)}" if slug in found else slug)
    return set(found)


def broken(page: Path) -> list[str]:
    """Relative links of a page that lead nowhere."""
    return [link for link in LINK.findall(FENCED.sub("", page.read_text())) if not resolves(link, page)]


def resolves(link: str, page: Path) -> bool:
    if re.match(r"[a-z]+:", link):
        return True  # of another site
    path, _, anchor = link.partition("#")
    target = (page.parent / path).resolve() if path else page
    return target.exists() and (not anchor or anchor in anchors(target))


def defined(path: Path) -> set[str]:
    """Functions of a file, and methods by their class."""
    tree = ast.parse(path.read_text())
    of = {node: f"{owner.name}." for owner in tree.body if isinstance(owner, ast.ClassDef) for node in owner.body}
    nodes = [*tree.body, *of]
    return {of.get(n, "") + n.name for n in nodes if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)}


def misnamed(text: str) -> Iterator[str]:
    """Files, folders and functions in a page on the package that are not there; a function follows its file."""
    for item in re.split(r"\n(?=\d+\. |#|\n)", text):
        last: Path | None = None
        for place, function in NAMED.findall(item):
            if place and not (PACKAGE / place).exists():
                yield place
            elif place:
                last = PACKAGE / place
            elif last is None or not last.is_file() or function not in defined(last):
                yield f"{function}() of {last and last.relative_to(PACKAGE)}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(TOP)))
def test_links_resolve(page: Path) -> None:
    assert not broken(page)


def test_a_broken_link_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "# One, *two*\n\n[a](#one-two) [b](page.md#three) [c](gone.md) [d](https://a.example/b) [e](page.md)"
    )
    assert broken(page) == ["page.md#three", "gone.md"]


def test_architecture_names_what_exists() -> None:
    text = ARCHITECTURE.read_text()
    assert not list(misnamed(text))
    assert sum(bool(function) for _, function in NAMED.findall(text)) > 30


def test_a_wrong_name_is_found() -> None:
    text = "1. `wire/gone.py`, `metrics.py` `count_verified()` and `absent()`\n2. `count_verified()`\n"
    assert list(misnamed(text)) == ["wire/gone.py", "absent() of metrics.py", "count_verified() of None"]


@pytest.mark.parametrize(("page", "most"), [("README.md", 1200), ("docs/architecture.md", 900)])
def test_a_page_stays_short(page: str, most: int) -> None:
    assert len((TOP / page).read_text().split()) <= most

"""Writes what README.md shows of code and of kept results:  python -m benchmarks.readme"""

from pathlib import Path

from tlt_server import results
from tlt_server.demo.run import as_text
from tlt_server.support import as_markdown

TOP = Path(__file__).parents[1]


def blocks() -> dict[str, str]:
    """The generated parts of the README, by the name in the comments around them."""
    kept = results.read(TOP / "benchmarks/results/demo.cpu2.json")
    return {"matrix": as_markdown(), "demo": f"```\n{as_text(kept.figures)}\n```"}


def filled(text: str) -> str:
    """The README with its generated parts made anew; raises ValueError where a comment is missing."""
    for name, block in blocks().items():
        start, end = text.index(f"<!-- {name} -->"), text.index(f"<!-- /{name} -->")
        text = f"{text[:start]}<!-- {name} -->\n{block}\n{text[end:]}"
    return text


if __name__ == "__main__":
    readme = TOP / "README.md"
    readme.write_text(filled(readme.read_text()))

"""The page's files: what a front mounts, and that they ask nobody else for anything."""

import re
from pathlib import Path

import pytest

from tlt_server.watch import page
from tlt_server.watch.page import FILES, HEADERS

FOLDER = Path(page.__file__).parent
each = pytest.mark.parametrize("path", FILES)


def test_every_file_is_served() -> None:
    files = {file for file in FOLDER.iterdir() if file.suffix != ".py" and file.is_file()}
    assert {file for file, _ in FILES.values()} == files
    assert FILES["/tlt/"][0].name == "index.html"


@each
def test_a_file_names_no_other_host_and_makes_no_html(path: str) -> None:
    text = FILES[path][0].read_text()
    assert not re.findall(r"https?://(?!www\.w3\.org/2000/svg)", text)
    assert not re.findall(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|new Function", text)
    assert not re.findall(r"<script(?! type=\"module\" src=)|\son\w+=\"|<style| style=\"", text)


@each
def test_what_a_file_imports_is_there(path: str) -> None:
    file, _ = FILES[path]
    named = re.findall(r'(?:from|src=|href=) ?"(?:\./)?([\w.]+)"', file.read_text())
    assert not [name for name in named if not (FOLDER / name).is_file()]


@pytest.mark.parametrize("path", [path for path in FILES if path.endswith(".js")])
def test_modules_are_small(path: str) -> None:
    assert FILES[path][0].read_text().count("\n") <= 200


def test_the_policy_lets_in_what_comes_from_here_alone() -> None:
    policy = dict(part.split(maxsplit=1) for part in HEADERS["Content-Security-Policy"].split("; "))
    assert policy["default-src"] == "'self'"
    assert "unsafe" not in HEADERS["Content-Security-Policy"]
    assert not [name for name in policy if name.endswith("-src") and policy[name] != "'self'"]

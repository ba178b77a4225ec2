"""A headless Chromium; what it asks other hosts for, and what goes wrong in a page, ends the test."""

import shutil
import time
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import urlsplit

import pytest

NONE = "\N{EN DASH}"
"""In place of a figure that nobody knows."""
CHROMIUM = ("chromium", "chromium-browser", "google-chrome")
FAST = "const later = setTimeout; window.setTimeout = (f, ms, ...rest) => later(f, Math.min(ms, 2), ...rest);"
"""The page polls as fast as it is answered."""


def installed() -> str | None:
    """Where Chromium is."""
    return next(filter(None, map(shutil.which, CHROMIUM)), None)


@pytest.fixture(
    scope="module"
)  # while playwright is open its event loop runs in this thread: other tests run their own
def browser() -> Iterator[Any]:
    if (found := installed()) is None:
        pytest.skip("no Chromium: apt-get install --no-install-recommends chromium")
    api = pytest.importorskip("playwright.sync_api", reason="no playwright: install the extra dev")
    with api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=found, args=["--no-sandbox"])  # CI's user is root
        yield browser
        browser.close()


Opening = Callable[..., Any]


@pytest.fixture
def opened(browser: Any) -> Iterator[Opening]:
    """Opens a page of a server, of that width and colour scheme; `fast`: without waiting between polls."""
    pages, wrong = [], []

    def open_page(
        url: str, *, width: int = 1280, scheme: str = "light", fast: bool = False, path: str = "/tlt/"
    ) -> Any:
        page = browser.new_page(viewport={"width": width, "height": 800}, color_scheme=scheme)
        pages.append(page)
        page.set_default_timeout(15_000)
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on("request", lambda request: wrong.append(request.url) if host(request.url) != host(url) else None)
        page.on("console", lambda said: wrong.append(said.text) if "Content Security Policy" in said.text else None)
        if fast:
            page.add_init_script(FAST)
        page.goto(f"{url}{path}")
        return page

    yield open_page
    for page in pages:
        page.close()
    assert not wrong


def until(page: Any, holds: str, within_s: float = 15.0) -> None:
    """Waits for a JavaScript expression. Not by `wait_for_function`, whose `eval` the page's policy forbids."""
    give_up = time.monotonic() + within_s
    while not page.evaluate(holds):
        assert time.monotonic() < give_up, f"never: {holds}; the page shows {page.locator('body').inner_text()}"
        page.wait_for_timeout(20)


def host(url: str) -> str:
    return urlsplit(url).netloc


def text(page: Any, selector: str) -> str:
    return str(page.locator(selector).first.inner_text())


def tile(page: Any, name: str) -> tuple[str, str]:
    """The value of a figure, and its note."""
    found = page.locator(".tiles > div", has=page.locator("dt", has_text=name)).first
    return found.locator("dd").nth(0).inner_text(), found.locator("dd").nth(1).inner_text()

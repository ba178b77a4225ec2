"""The pictures of docs/images: a real server for two minutes, and a fleet of recorded ones.

python -m tests.watch.screenshots [FOLDER]
"""

import math
import sys
import tempfile
from pathlib import Path
from typing import Any

from PIL import Image
from playwright.sync_api import sync_playwright

from tests.watch.conftest import FAST, installed
from tests.watch.scene import FLAGS, loaded, train
from tests.watch.stand_in import Front, Recorded, serving
from tlt_server.process import running_module

DOCS = Path(__file__).parents[2] / "docs/images"
VIEWS = {"light": ("light", 1180), "dark": ("dark", 1180), "narrow": ("light", 360)}
FLEET_POLLS = 280
HEIGHT = 1100


def opened(browser: Any, url: str, scheme: str, width: int, script: str = "") -> Any:
    page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
    page.add_init_script(script)
    page.goto(f"{url}/tlt/")
    return page


def picture(page: Any, path: Path, until: str) -> None:
    """Down to where an element begins, which may name paths of this machine."""
    page.evaluate("scrollTo(0, 0)")
    height = page.locator(until).last.bounding_box()["y"]
    clip = {"x": 0, "y": 0, "width": page.viewport_size["width"], "height": min(height, HEIGHT)}
    page.screenshot(path=path, full_page=True, clip=clip)
    with Image.open(path) as taken:
        # the other methods lose colours that are rare, as the dot before `live`
        taken.convert("RGB").quantize(256, method=Image.Quantize.FASTOCTREE, dither=Image.Dither.NONE).save(
            path, optimize=True
        )


def of_a_server(browser: Any, folder: Path, work: Path) -> None:
    with running_module(["tlt_server", "serve"], [*FLAGS, "--random-seed", "7"], work / "log", start_timeout=180) as (
        url,
        _,
    ):
        pages = {name: opened(browser, url, scheme, width) for name, (scheme, width) in VIEWS.items()}
        with loaded(url):
            train(url, work, publications=6, every_s=10)
            for name, page in pages.items():
                page.wait_for_timeout(2500)
                picture(page, folder / f"page-{name}.png", "section:has(.weights)")


def of_a_fleet(browser: Any, folder: Path) -> None:
    front = Front("rollout-0", "rollout-1", "rollout-2", "rollout-3")
    for i, server in enumerate(front.servers.values()):
        assert isinstance(server, Recorded)
        server.pace = lambda t, i=i: 1 + 0.25 * math.sin(t / 20 + i) + 0.05 * math.sin(1.7 * t + 3 * i)
        server.step_s = 2.0
    front.servers["rollout-2"].status["load"] = {"running": 0, "waiting": 0}
    front.servers["rollout-2"].pace = lambda t: 0.0
    front.replica("rollout-2").update(
        state="stale", why="has weight_version 'step-2'", weight_version="step-2", running=0
    )
    front.replica("rollout-3").update(state="quarantined", why="no answer for 30 s", weight_version=None, running=0)
    front.servers["rollout-3"].gone = True
    with serving(front) as server:
        page = opened(browser, server.url, "light", 1180, f"{AHEAD}{FAST}")
        while (polls := front.servers["rollout-0"].reads) < FLEET_POLLS:
            if polls // 30 > len(front.fleet["events"]) - 5:
                publish(front, f"step-{len(front.fleet['events']) - 1}")
            page.wait_for_timeout(50)
        picture(page, folder / "page-fleet.png", ".detail")


def publish(front: Front, name: str) -> None:
    front.event("published", None, name)
    front.fleet["weight_version"] = name
    for replica in front.fleet["replicas"]:
        if replica["state"] == "ready":
            replica["weight_version"] = name


AHEAD = """
let polls = 0;
const ask = window.fetch;
window.fetch = (url, asked) => {
  if (String(url).endsWith("/fleet")) polls += 1;
  return ask(url, asked);
};
const begin = Date.now();
Date.now = () => begin + 2000 * polls;
"""
"""The browser's clock: two seconds a poll, as the recorded servers'."""


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with sync_playwright() as playwright, tempfile.TemporaryDirectory() as work:
        browser = playwright.chromium.launch(executable_path=installed(), args=["--no-sandbox"])
        of_a_fleet(browser, folder)
        of_a_server(browser, folder, Path(work))
        browser.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else DOCS)

"""The page and `tlt-server top` on a live server: what they show is what the API says."""

import re
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from rich.console import Console
from tlt_client import Client, SamplingParams

from tests.server.conftest import PROMPTS
from tests.server.trainer import Trainer
from tests.watch.conftest import Opening, browser, opened, text, tile, until
from tlt_server.demo import default_paths
from tlt_server.watch import top

__all__ = ["browser", "opened"]
pytestmark = pytest.mark.server("eagle-chain")

LONG = SamplingParams(temperature=0, max_new_tokens=800, ignore_eos=True)
NAME = "step-<b>7</b>"


@pytest.fixture
def published(client: Client, trainer: Trainer) -> Iterator[None]:
    before = client.status().versions.target.weight_version
    trainer.disk(default_paths()[0], weight_version=NAME).raise_for_status()
    yield
    trainer.post("/update_weight_version", new_version=before).raise_for_status()


@pytest.mark.usefixtures("published")
def test_the_page_shows_what_the_api_says(url: str, client: Client, opened: Opening) -> None:
    page = opened(url)
    page.wait_for_selector("#connection.live")
    running = threading.Thread(target=client.generate_batch, args=(PROMPTS[:4], LONG))
    running.start()
    try:
        until(page, "/^[1-9]/.test(document.querySelectorAll('.figure')[2]?.textContent)", 30)
        until(page, "/^[1-9]/.test(document.querySelectorAll('.figure')[1]?.textContent)", 30)
        length, rate = tile(page, "Accept length")[0], tile(page, "Tokens/s")[0]
    finally:
        running.join()
    assert 1 <= float(length) <= 4
    assert float(rate.replace(",", "")) > 1
    settled(page, client)


def settled(page: Any, client: Client) -> None:
    """Nothing runs: the page has what the API says."""
    until(page, "document.querySelectorAll('.figure')[2].textContent === '0'")
    status, strategy, events = client.status(), client.strategy(), client.events()
    assert status.load is not None
    assert (status.load.running, status.load.waiting, status.paused) == (0, 0, False)
    assert tile(page, "Target") == (str(status.versions.target.version), f"“{NAME}”")
    assert tile(page, "Drafter")[0] == str(status.versions.drafter.live.version)
    assert tile(page, "Accept length")[1] == f"{status.accept_length.total:.2f} since start"
    assert page.locator(".events li").count() == min(len(events), 200)
    assert f"published as “{NAME}”" in text(page, ".events")
    assert page.locator("main b").count() == 0
    assert page.locator(".rewards tbody tr").count() == len(strategy.selection.buckets)


@pytest.mark.parametrize("mode", ["abort", "in_place"])
def test_a_pause_is_told(client: Client, opened: Opening, url: str, mode: str) -> None:
    page = opened(url)
    page.wait_for_selector("#connection.live")
    client.pause_generation(mode)
    try:
        page.wait_for_selector("text=Generation is paused")
        assert client.status().paused
    finally:
        client.continue_generation()
    until(page, "document.querySelector('.holds').hidden")


def test_top_shows_the_same(url: str, client: Client) -> None:
    console = Console(width=120, color_system=None)
    running = threading.Thread(target=client.generate_batch, args=(PROMPTS[:4], LONG))
    running.start()
    with console.capture() as captured:
        top.once(url, None, console, interval_s=1.0)
    running.join()
    figures = next(line for line in captured.get().splitlines() if re.match(r"\d\.\d\d ", line)).split()
    assert 1 <= float(figures[0]) <= 4
    assert float(figures[1].replace(",", "")) > 1
    assert int(figures[2]) >= 1


def test_generated_tokens_are_those_that_were_sampled(client: Client) -> None:
    before = client.status().generated_tokens
    rollouts = client.generate_batch(PROMPTS[:4], SamplingParams(temperature=0, max_new_tokens=64, ignore_eos=True))
    sampled = sum(rollout.completion_tokens for rollout in rollouts)
    # the first token of each comes from the prefill; the last step may give more than the response takes
    assert 0 <= client.status().generated_tokens - before - (sampled - len(rollouts)) <= 4 * len(rollouts)

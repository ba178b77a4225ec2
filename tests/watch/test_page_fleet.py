"""The page of a fleet: all replicas, their sums, and one in detail."""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.watch.conftest import NONE, Opening, text, tile, until
from tests.watch.stand_in import CALL, Front, StandIn, serving

pytestmark = pytest.mark.slow


@pytest.fixture
def front() -> Front:
    front = Front("alpha", "beta", "gamma & <b>co</b>/../x")
    front.replica("beta").update(state="stale", why="has step-2 <i>, not step-3", weight_version="step-2")
    return front


@pytest.fixture
def server(front: Front) -> Iterator[StandIn]:
    with serving(front) as server:
        yield server


def rows(page: Any) -> list[list[str]]:
    found = page.locator(".replicas tbody tr").all()
    return [row.locator("th, td").all_inner_texts() for row in found]


RATED = "document.querySelectorAll('.figure')[3]?.textContent === '3,000'"


def test_a_row_a_replica_and_sums(server: StandIn, front: Front, opened: Opening) -> None:
    page = opened(server.url, fast=True)
    until(page, RATED)
    assert text(page, "h1") == "tlt-server: fleet of 3"
    shown = rows(page)
    assert [row[0] for row in shown] == [each["name"] for each in front.fleet["replicas"]]
    assert shown[1][1].strip() == "stale: has step-2 <i>, not step-3"
    assert shown[0][2:6] == ["“step-3”", "5", "1,000", "3.40"]
    assert tile(page, "Ready") == ("2 of 3", "at least 1")
    assert tile(page, "Accept length")[0] == "3.40"
    assert tile(page, "Running")[0] == "15"
    assert tile(page, "Weights")[0] == "step-3"
    assert text(page, ".events .text") == "published: step-3"
    assert page.locator(".events .text").nth(1).inner_text().startswith("gamma & <b>co</b>/../x: joined")
    assert page.locator(".replicas i, .replicas b").count() == 0


def test_histories_are_summed(server: StandIn, front: Front, opened: Opening) -> None:
    for name in ("alpha", "beta"):
        front.servers[name].remembers()
    front.servers["beta"].status["history"].update(found=0)
    page = opened(server.url, fast=True)
    until(page, "document.querySelectorAll('.figure')[5]?.textContent === '3.20'")
    value, note = tile(page, "Of history")
    assert value == "3.20"
    assert note.endswith("% found, 2.5M of 33.6M tokens")
    assert 40 <= int(note.split()[0]) < 60, "half of it found nothing before"


def test_each_state_is_told_by_word_and_sign(server: StandIn, front: Front, opened: Opening) -> None:
    page = opened(server.url, fast=True)
    signs = {}
    for state in ("joining", "stale", "ready", "suspect", "quarantined", "retired", "of a later version"):
        front.replica("alpha").update(state=state, why="")
        until(page, f"document.querySelector('.state')?.innerText.trim() === '{state}'")
        glyph = "getComputedStyle(document.querySelector('.state .glyph'), '::before')"
        signs[state] = page.evaluate(f"(() => {{ const {{ content, color }} = {glyph}; return content + color; }})()")
    assert signs["joining"] == signs["stale"]
    assert len(set(signs.values())) == 5


def test_another_replica_is_chosen_by_keyboard(server: StandIn, front: Front, opened: Opening) -> None:
    front.servers["beta"].status["help"] = "this is beta"
    page = opened(server.url, fast=True)
    until(page, RATED)
    assert text(page, ".replica-name") == "Replica alpha"
    for _ in range(2):
        page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    page.wait_for_selector("text=this is beta")
    assert text(page, ".replica-name") == "Replica beta"
    assert page.locator(".replicas [aria-pressed=true]").inner_text() == "beta"
    assert page.evaluate("document.activeElement.textContent") == "beta"
    page.reload()
    page.wait_for_selector("text=this is beta")
    page.get_by_role("button", name="gamma").click()
    until(page, "document.querySelector('.replica-name').textContent.startsWith('Replica gamma & <b>')")
    assert "%3Cb%3Eco%3C%2Fb%3E%2F..%2Fx/tlt/v1/status" in "".join(path for path, _ in server.asked[-40:])


def test_one_that_is_gone_leaves_the_others(server: StandIn, front: Front, opened: Opening) -> None:
    page = opened(server.url, fast=True)
    until(page, RATED)
    front.servers["alpha"].gone = True
    front.replica("alpha").update(state="quarantined", why="no answer for 30 s", weight_version=None)
    page.wait_for_selector("text=It does not answer now.")
    until(page, "document.querySelectorAll('.figure')[3].textContent === '2,000'")
    assert rows(page)[0][4:6] == [NONE, NONE]
    assert text(page, "#connection") == "live"
    front.servers["alpha"].gone = False
    until(page, RATED)
    front.fleet["replicas"] = front.fleet["replicas"][1:]
    until(page, "document.querySelectorAll('.replicas tbody tr').length === 2")
    assert text(page, ".replica-name") == "Replica beta"


def test_what_a_fleet_does_is_told(server: StandIn, front: Front, opened: Opening) -> None:
    page = opened(server.url, fast=True)
    until(page, RATED)
    assert not page.locator(".holds").first.is_visible()
    front.fleet.update(paused=True, transaction=CALL, min_ready=3, held=1200)
    page.wait_for_selector("text=2 ready, of at least 3")
    said = text(page, ".holds")
    assert "Requests wait for the trainer: it has paused, or publishes." in said
    assert "under way: POST /update_weights_from_disk, apply, waiting for alpha, beta." in said
    assert "1,200 requests wait." in said
    front.event("quarantined", "alpha", "no answer for 30 s")
    until(page, "document.querySelector('.events .text').textContent === 'alpha: quarantined: no answer for 30 s'")
    assert page.locator("svg path.alarm").count() >= 1


def test_a_front_that_is_gone_is_asked_again(front: Front, opened: Opening) -> None:
    with serving(front) as server:
        page = opened(server.url, fast=True)
        until(page, RATED)
    page.wait_for_selector("#connection.lost")
    with serving(front, server.server_port):
        page.wait_for_selector("#connection.live")
        until(page, RATED)


@pytest.mark.parametrize("width", [360, 1280])
def test_many_replicas_fit(opened: Opening, width: int) -> None:
    front = Front(*(f"replica-{i}.pool.tlt.svc.cluster.local" for i in range(64)))
    with serving(front) as server:
        page = opened(server.url, width=width)
        page.wait_for_selector(".replicas td >> nth=380")
        assert page.locator(".replicas tbody tr").count() == 64
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")

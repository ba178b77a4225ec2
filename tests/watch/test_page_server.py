"""The page of a single server: what it shows is what the API says."""

import re
from typing import Any

import pytest

from tests.watch.conftest import NONE, Opening, text, tile, until
from tests.watch.stand_in import NEWER, PER_S, Recorded, StandIn, serving

pytestmark = pytest.mark.slow

HOSTILE = '<img src=x onerror="document.title=1">\u202e</dd><script>document.title=2</script>'


@pytest.fixture
def server() -> Any:
    with serving(Recorded()) as server:
        yield server


@pytest.fixture
def seen(server: StandIn) -> Recorded:
    assert isinstance(server.seen, Recorded)
    return server.seen


def test_figures_are_those_of_the_api(server: StandIn, seen: Recorded, opened: Opening) -> None:
    page = opened(server.url, fast=True)
    until(page, "document.querySelector('.figure')?.textContent === '3.40'")
    assert tile(page, "Accept length") == ("3.40", f"{seen.status['accept_length']['total']:.2f} since start")
    assert tile(page, "Tokens/s")[0] == f"{PER_S['generated_tokens']:,}"
    assert tile(page, "Running") == ("5", "0 waiting")
    assert tile(page, "Arm") == ("off", f"plain decoding, batches of 5{NONE}16")
    assert tile(page, "Target") == ("3", "“step-3”")
    assert tile(page, "Drafter") == ("2", "1 target behind")
    assert text(page, ".help").lower() == seen.status["help"].lower()
    assert text(page, "#connection") == "live"
    assert "SGLang 0.5.17+tlt." in text(page, ".weights")


def test_rewards_are_those_of_the_bandit(server: StandIn, seen: Recorded, opened: Opening) -> None:
    page = opened(server.url)
    page.wait_for_selector(".rewards td")
    shown = [row.split() for row in page.locator(".rewards tbody").inner_text().splitlines()]
    order = ["off", "1,1,2", "3,1,4", "5,4,16"]
    buckets = seen.strategy["selection"]["buckets"]
    for row, bucket in zip(shown, buckets, strict=True):
        rewards = {name_of(each["arm"]): each for each in bucket["arms"]}
        assert row[1:] == [f"{reward(rewards[name]):,.0f}" for name in order]
    assert page.locator(".rewards .active").count() == len(buckets)
    assert page.locator(".rewards tr[aria-current]").inner_text().split()[0] == f"5{NONE}16"


def test_rewards_follow_the_bandit(server: StandIn, seen: Recorded, opened: Opening) -> None:
    page = opened(server.url, fast=True)
    page.wait_for_selector(".rewards td")
    bucket = seen.strategy["selection"]["buckets"][2]
    best = next(each for each in bucket["arms"] if name_of(each["arm"]) == "5,4,16")
    bucket.update(active=best["arm"])
    best.update(expected_reward=54321.0)
    until(page, "document.querySelectorAll('.rewards tr')[3].lastChild.textContent === '54,321'")
    seen.strategy["selection"]["mode"] = "paper"
    best.update(median_reward=65432.0)
    until(page, "document.querySelectorAll('.rewards tr')[3].lastChild.textContent === '65,432'")
    found = page.locator(".rewards tbody tr").nth(2).locator("td")
    assert found.last.get_attribute("class") == "active"
    assert page.locator(".rewards tbody tr").nth(2).locator(".active").count() == 1
    shares = [cell.evaluate("node => Number(node.style.getPropertyValue('--share'))") for cell in found.all()]
    assert (min(shares), shares[-1]) == (0, 1)
    assert tile(page, "Arm")[0] == "5,4,16"


def test_what_history_gives_is_told(server: StandIn, seen: Recorded, opened: Opening) -> None:
    seen.remembers()
    page = opened(server.url, fast=True, width=360)
    until(page, "document.querySelectorAll('.figure')[6]?.textContent === '3.20'")
    assert tile(page, "Of history") == ("3.20", "81 % found, 1.2M of 16.8M tokens")
    heads = page.locator(".rewards thead th").all_inner_texts()
    assert [head.split() for head in heads if "history" in head] == [
        ["history:7", "of", "history,", "3.21", "a", "pass"]
    ]
    assert fits(page)
    seen.status["history"] = None
    until(page, "document.querySelectorAll('.figure').length === 6")


def name_of(arm: dict[str, int] | None) -> str:
    return f"{arm['num_steps']},{arm['topk']},{arm['num_draft_tokens']}" if arm else "off"


def reward(report: dict[str, Any]) -> float:
    return float(report["expected_reward"])


def test_events_appear_once_and_the_latest_first(server: StandIn, seen: Recorded, opened: Opening) -> None:
    page = opened(server.url, fast=True)
    page.wait_for_selector(".events li")
    assert page.locator(".events li").count() == len(seen.events)
    seen.event("target_published", version=4, weight_version="step-4", seconds=0.25)
    seen.event("a_kind_of_later_versions", colour="blue")
    until(page, f"document.querySelectorAll('.events li').length === {len(seen.events)}")
    first, second = page.locator(".events li .text").all_inner_texts()[:2]
    assert (first, second) == ("a kind of later versions: colour blue", "target 4 published as “step-4” in 250 ms")
    assert page.locator("svg path.alarm").count() == 3  # refused, collapsed, rolled back


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"paused": True}, "Generation is paused"),
        ({"offloaded": ["kv_cache", "weights"]}, "Memory is given to the trainer: kv_cache, weights"),
        ({"trainer": {"address": "tcp://t:1", "connected": False, "reason": ""}}, "tcp://t:1 does not answer"),
    ],
)
def test_what_is_held_is_told(
    server: StandIn, seen: Recorded, opened: Opening, change: dict[str, Any], said: str
) -> None:
    page = opened(server.url, fast=True)
    page.wait_for_selector(".rewards td")
    assert not page.locator(".holds").is_visible()
    seen.status.update(change)
    page.wait_for_selector(".holds li")
    assert said in text(page, ".holds")
    seen.strategy["held"] = "accept length 1.02"
    page.wait_for_selector("text=Speculation is held: accept length 1.02.")


def test_hostile_names_stay_text(server: StandIn, seen: Recorded, opened: Opening) -> None:
    target = seen.status["versions"]["target"]
    target.update(weight_version=HOSTILE, missing=[HOSTILE])
    seen.status["help"] = seen.strategy["held"] = seen.status["versions"]["drafter"]["live"]["path"] = HOSTILE
    seen.event(HOSTILE, why=HOSTILE)
    seen.event("drafter_refused", version=9, why=HOSTILE)
    page = opened(server.url, width=360, fast=True)
    page.wait_for_selector(".events li")
    assert page.locator("img, main script").count() == 0
    assert page.title() == "tlt-server"
    assert tile(page, "Target")[1] == f"“{HOSTILE}”"
    for selector in (".help", ".events", ".holds", ".weights"):
        assert "<img src=x" in page.locator(selector).text_content()
    assert fits(page)


def fits(page: Any) -> bool:
    return bool(page.evaluate("document.documentElement.scrollWidth <= innerWidth"))


@pytest.mark.parametrize("width", [360, 768, 1280])
def test_nothing_scrolls_sideways(server: StandIn, opened: Opening, width: int) -> None:
    page = opened(server.url, width=width)
    page.wait_for_selector(".rewards td")
    assert fits(page)


def test_both_colour_schemes_can_be_read(server: StandIn, opened: Opening) -> None:
    """Text stands out from its ground by 4.5 to 1, as WCAG asks."""
    grounds = set()
    for scheme in ("light", "dark"):
        page = opened(server.url, scheme=scheme)
        page.wait_for_selector(".rewards td")
        grounds.add(colour(page, "body", "backgroundColor"))
        for selector in ("body", ".note", ".help", ".events time", "figcaption", ".spans button"):
            ratio = contrast(colour(page, selector, "color"), colour(page, "body", "backgroundColor"))
            assert ratio >= 4.5, (scheme, selector)
    assert len(grounds) == 2


def colour(page: Any, selector: str, name: str) -> tuple[int, ...]:
    found = page.locator(selector).first.evaluate(f"node => getComputedStyle(node).{name}")
    return tuple(map(int, re.findall(r"\d+", found)[:3]))


def contrast(*colours: tuple[int, ...]) -> float:
    def luminance(rgb: tuple[int, ...]) -> float:
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in (v / 255 for v in rgb)]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    dark, light = sorted(map(luminance, colours))
    return (light + 0.05) / (dark + 0.05)


def test_the_keyboard_reaches_all_of_it(server: StandIn, opened: Opening) -> None:
    page = opened(server.url, fast=True)
    until(page, "document.querySelector('.figure')?.textContent === '3.40'")
    reached = []
    for _ in range(8):
        page.keyboard.press("Tab")
        reached.append(page.evaluate("document.activeElement.textContent.slice(0, 6)"))
    assert reached[:3] == ["5 min", "15 min", "1 h"]
    assert [each[:6] for each in reached[3:6]] == ["Accept", "Tokens", "Reques"]
    page.locator(".spans button").nth(2).focus()
    page.keyboard.press("Enter")
    assert page.locator(".spans button").nth(2).get_attribute("aria-pressed") == "true"
    chart = page.locator(".chart").first
    chart.focus()
    page.keyboard.press("ArrowLeft")
    page.keyboard.press("ArrowLeft")
    assert re.fullmatch(r"\d\d:\d\d:\d\d", chart.locator(".at").inner_text())
    assert chart.locator("svg").get_attribute("aria-label").startswith("Accept length: last 3.40, least 3.40")


def test_focus_stays_while_it_updates(server: StandIn, seen: Recorded, opened: Opening) -> None:
    page = opened(server.url, fast=True)
    page.wait_for_selector(".events li")
    page.locator(".events").focus()
    seen.event("drafter_frozen", version=2)
    until(page, "document.querySelector('.events li .text').textContent.includes('held back')")
    assert page.evaluate("document.activeElement.className") == "events"


def test_a_server_that_is_gone_is_told_and_asked_again(opened: Opening) -> None:
    with serving(Recorded()) as server:
        page = opened(server.url, fast=True)
        page.wait_for_selector("#connection.live")
        server.failing = True
        page.wait_for_selector("#connection.lost")
        assert "500" in text(page, "#connection")
        assert "trying again" in text(page, "#connection")
        server.failing = False
        page.wait_for_selector("#connection.live")
    page.wait_for_selector("#connection.lost")
    assert "no answer" in text(page, "#connection")
    with serving(Recorded(), server.server_port):
        page.wait_for_selector("#connection.live")


def test_a_server_started_anew_begins_anew(server: StandIn, seen: Recorded, opened: Opening) -> None:
    page = opened(server.url, fast=True)
    until(page, "document.querySelector('.figure')?.textContent === '3.40'")
    server.seen = Recorded()
    server.seen.status.update(uptime_s=1.0, generated_tokens=0)
    server.seen.events[:] = server.seen.events[:1]
    until(page, "document.querySelectorAll('.events li').length === 1")
    until(page, "document.querySelectorAll('.figure')[1].textContent === '1,000'")
    assert "-" not in page.locator(".charts").inner_text()


def test_an_older_server_says_less(server: StandIn, seen: Recorded, opened: Opening) -> None:
    seen.lacks = NEWER
    seen.strategy.update(selection=None)
    page = opened(server.url, fast=True)
    until(page, "document.querySelector('.figure')?.textContent === '3.40'")
    assert [tile(page, name)[0] for name in ("Tokens/s", "Running", "Target", "Drafter")] == [NONE] * 4
    assert "no arms to choose from" in text(page, "main")


def test_a_key_is_asked_for_and_goes_into_a_header_alone(opened: Opening) -> None:
    with serving(Recorded()) as server:
        server.key = "s3cret"
        page = opened(server.url, fast=True)
        page.wait_for_selector("#key:not([hidden])")
        assert page.evaluate("document.activeElement.id") == "key-input"
        page.keyboard.type("wrong")
        page.keyboard.press("Enter")
        page.wait_for_selector("text=That key was refused.")
        page.keyboard.type("s3cret")
        page.keyboard.press("Enter")
        page.wait_for_selector("#connection.live")
        assert not page.locator("#key").is_visible()
        page.reload()
        page.wait_for_selector("#connection.live")
        assert "s3cret" not in page.url + page.content()
        assert page.evaluate("[localStorage.length, document.cookie]") == [0, ""]
        assert not [path for path, _ in server.asked if "s3cret" in path]
        static = [shown for path, shown in server.asked if not path.startswith("/tlt/v1/")]
        assert set(static) == {None}

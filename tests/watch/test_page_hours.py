"""The page stays as it is for hours: as many nodes, as many samples, as much memory."""

import time
from typing import Any

import pytest

from tests.watch.conftest import Opening
from tests.watch.stand_in import Recorded, serving

pytestmark = pytest.mark.slow

DRAWN = "document.querySelector('path.line').getAttribute('d').split(/[ML]/).length - 1"
HOURS = """async () => {
  const { Events, Samples } = await import("/tlt/samples.js");
  const { ServerView } = await import("/tlt/server.js");
  const read = async (path) => (await fetch(path)).json();
  const [status, strategy] = [await read("v1/status"), await read("v1/strategy")];
  const [view, samples, events] = [new ServerView(), new Samples(), new Events()];
  document.body.append(view.node);
  const found = [];
  for (let update = 1; update <= 5400; update += 1) {
    status.time += 2;
    status.uptime_s += 2;
    status.generated_tokens += 1000 + update % 100;
    const detail = { version: update, weight_version: `step-${update}`, seconds: 1 };
    const published = { number: update, time: status.time, kind: "target_published", detail };
    if (update % 10 === 0) events.add([published]);
    samples.add(status);
    if (update % 10 === 0) view.show(status, strategy, samples, events);
    if (update % 900 === 0 && update >= 3600) {
      found.push([view.node.querySelectorAll("*").length, samples.history.length, events.all.length]);
    }
  }
  return found;
}"""
BOUNDS = """async () => {
  const { Events, History } = await import("/tlt/samples.js");
  const [history, events] = [new History(), new Events()];
  for (let i = 0; i < 20000; i += 1) {
    history.add(1e9 + i / 2, { a: i });
    events.add([{ number: i + 1, replica: 0 }]);
  }
  const full = [history.length, events.all.length, events.after, events.all[0].number];
  history.add(1e9 + 9000, { a: 0 });  // a clock that was set back
  return [...full, history.last.time];
}"""


def test_an_hour_of_polls_does_not_grow_it(opened: Opening) -> None:
    """225 polls, of a server whose clock goes on by sixteen seconds between two."""
    seen = Recorded(step_s=16.0)
    with serving(seen) as server:
        page = opened(server.url, fast=True)
        page.get_by_role("button", name="1 h").click()
        sizes, give_up = [], time.monotonic() + 120
        for polls in (75, 150, 225, 250):
            while seen.reads < polls:
                assert time.monotonic() < give_up, f"only {seen.reads} polls"
                page.wait_for_timeout(20)
            sizes.append((nodes(page), page.evaluate("performance.memory.usedJSHeapSize"), page.evaluate(DRAWN)))
        page.wait_for_selector("#connection.live")
    assert max(nodes for nodes, _, _ in sizes) <= sizes[0][0] + 10
    assert max(heap for _, heap, _ in sizes) < 40e6
    assert sizes[-1][2] in range(220, 227)


def nodes(page: Any) -> int:
    return int(page.evaluate("document.querySelectorAll('*').length"))


def test_hours_of_updates_do_not_grow_it(opened: Opening) -> None:
    """5,400 updates, two seconds apart, with a publication every twenty; each tenth is shown."""
    with serving(Recorded()) as server:
        page = opened(server.url)
        found = page.evaluate(HOURS)
    assert [each[1:] for each in found] == [[1801, 200]] * 3
    counts = [each[0] for each in found]
    assert max(counts) - min(counts) <= 10


def test_samples_and_events_are_bounded(opened: Opening) -> None:
    with serving(Recorded()) as server:
        assert opened(server.url).evaluate(BOUNDS) == [1801, 200, 20000, 19801, 1e9 + 9000]

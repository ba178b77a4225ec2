"""The watchdog on a live server: a drafter of no use goes by itself, and one that is as good stays."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tlt_client import Client, Event, SamplingParams

from tests.server.conftest import PROMPTS
from tests.server.trainer import Trainer, noisy, shuffled
from tlt_server.demo import default_paths

pytestmark = pytest.mark.server("eagle-chain")

TARGET, DRAFTER = default_paths()
GREEDY = SamplingParams(temperature=0, max_new_tokens=200, ignore_eos=True)


@pytest.fixture
def client(trainer: Trainer) -> Iterator[Client]:
    """Of a server whose watchdog is armed, and knows what the drafter in force is good for."""
    with Client(str(trainer.http.base_url)) as client:
        client.set_watchdog("armed")
        give_up = time.monotonic() + 60
        while client.drafter().watch.state != "settled":
            assert time.monotonic() < give_up, client.drafter()
            client.generate_batch(PROMPTS, GREEDY)
        yield client


def until(client: Client, kind: str, after: int) -> tuple[Event, list[Any]]:
    """The event, and all rollouts that were made until it came."""
    rollouts, give_up = [], time.monotonic() + 60
    while time.monotonic() < give_up:
        rollouts.append(client.generate_batch(PROMPTS, GREEDY))
        if found := [event for event in client.events(after) if event.kind == kind]:
            return found[-1], rollouts
    raise AssertionError(f"no {kind}, but {client.events(after)}")


def last(client: Client) -> int:
    return max((event.number for event in client.events()), default=0)


def accept_length(rollouts: list[Any]) -> float:
    return sum(rollout.accept_length for rollout in rollouts) / len(rollouts)


def shown(client: Client, sample: str) -> float:
    return next(float(line.split()[-1]) for line in client.metrics().splitlines() if line.startswith(f"{sample} "))


def test_a_drafter_of_no_use_goes_by_itself(trainer: Trainer, client: Client, tmp_path: Path) -> None:
    undisturbed = client.generate_batch(PROMPTS, GREEDY)
    before, sums, seen = client.drafter().live, trainer.checksums(), last(client)
    alarms = shown(client, 'tlt_watchdog_alarms_total{action="rolled_back"}')
    trainer.drafter(shuffled(DRAFTER, tmp_path / "useless", 3)).raise_for_status()
    assert client.drafter().watch.state == "watching"
    event, rounds = until(client, "drafter_rolled_back", seen)
    assert client.drafter().live == before
    assert trainer.checksums() == sums
    assert event.detail["version"] == before.version
    assert 0 < event.detail["steps"] < 40
    assert 0 < event.detail["recovery_s"] < 20
    collapsed = next(event for event in client.events(seen) if event.kind == "accept_length_collapsed")
    assert collapsed.detail["accept_length"] < 1.3 < collapsed.detail["least"] < collapsed.detail["before"]
    after = client.generate_batch(PROMPTS, GREEDY)
    tokens = [rollout.tokens for rollout in undisturbed]
    assert all([rollout.tokens for rollout in each] == tokens for each in [*rounds, after])
    assert accept_length(after) == pytest.approx(accept_length(undisturbed), abs=0.02)
    assert shown(client, 'tlt_watchdog_alarms_total{action="rolled_back"}') == alarms + 1
    assert shown(client, "tlt_speculating") == 1
    assert "gone back to" in client.status().help


def test_drafters_as_good_stay(trainer: Trainer, client: Client, tmp_path: Path) -> None:
    for drafter in (DRAFTER, noisy(DRAFTER, tmp_path / "good", 4, scale=0.005)):
        seen = last(client)
        version = trainer.drafter(drafter).raise_for_status().json()["live"]["version"]
        event, _ = until(client, "drafter_kept", seen)
        assert event.detail["version"] == version == client.drafter().live.version
        assert f"drafter {version}, active for" in client.status().help


def test_a_target_as_good_is_no_alarm(trainer: Trainer, client: Client) -> None:
    seen = last(client)
    assert trainer.disk(TARGET).status_code == 200
    event, _ = until(client, "drafter_kept", seen)
    assert event.detail["since"] == "target"


def test_what_was_turned_off_is_tried_again(trainer: Trainer, client: Client, tmp_path: Path) -> None:
    """A target that no drafter fits, then the one of before: no new drafter is needed."""
    before, seen = client.drafter().live, last(client)
    trainer.disk(shuffled(TARGET, tmp_path / "random", 3)).raise_for_status()
    until(client, "speculation_off", seen)
    status = client.status()
    assert status.versions.drafter.watch.probe_time == pytest.approx(time.time() + 60, abs=10)
    assert "it is tried again in" in status.help
    assert status.arm is None
    seen = last(client)
    trainer.disk(TARGET).raise_for_status()
    trainer.post("/flush_cache").raise_for_status()
    event, _ = until(client, "drafter_kept", seen)
    assert "probe" in event.detail["since"]
    on = next(event for event in client.events(seen) if event.kind == "speculation_on")
    assert "the target is now version" in on.detail["why"]
    assert (client.drafter().live, client.drafter().watch.probe_time) == (before, None)
    assert client.status().arm is not None


def test_observing_it_only_says_so(trainer: Trainer, client: Client, tmp_path: Path) -> None:
    assert client.set_watchdog("observe").watch.mode == "observe"
    seen = last(client)
    trainer.drafter(shuffled(DRAFTER, tmp_path / "useless", 3)).raise_for_status()
    event, _ = until(client, "accept_length_collapsed", seen)
    assert event.detail["action"] == "none"
    assert client.drafter().live.version == event.detail["version"]
    assert "plainly worse" in client.status().help
    assert client.roll_back_drafter().watch.state == "settled"

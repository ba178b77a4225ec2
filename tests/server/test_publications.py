"""The literal calls of trainers, with rollouts in flight: one publication, and every token of the version it is of."""

import time
from pathlib import Path
from typing import Any

import pytest

from tests.server.conftest import PROMPTS
from tests.server.trainer import Trainer, buckets, noisy, tensors_of, until_under_way, while_running
from tlt_server.demo import default_paths

pytestmark = pytest.mark.server("eagle-chain")

TARGET, _ = default_paths()
LONG = {"temperature": 1.0, "max_new_tokens": 400, "ignore_eos": True}


@pytest.fixture(scope="module")
def moved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return noisy(TARGET, tmp_path_factory.mktemp("targets") / "moved", seed=6)


def rollouts(trainer: Trainer, **sampling: Any) -> list[dict[str, Any]]:
    body = {"text": PROMPTS, "sampling_params": LONG | sampling}
    return [each["meta_info"] for each in trainer.http.post("/generate", json=body).raise_for_status().json()]


def target_now(trainer: Trainer) -> dict[str, Any]:
    now: dict[str, Any] = trainer.http.get("/tlt/v1/status").raise_for_status().json()["versions"]["target"]
    return now


class Publications:
    """What has been published since it was made."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self.before = target_now(trainer)["version"]
        self._seen = max((event["number"] for event in self._events(0)), default=0)

    def _events(self, after: int) -> list[dict[str, Any]]:
        events: list[dict[str, Any]] = self._trainer.http.get(f"/tlt/v1/events?after={after}").json()
        return events

    def one(self) -> dict[str, Any]:
        """The one publication that was made; the version grew by one."""
        (event,) = [each for each in self._events(self._seen) if each["kind"] == "target_published"]
        assert event["detail"]["version"] == self.before + 1 == target_now(self._trainer)["version"]
        detail: dict[str, Any] = event["detail"]
        return detail

    def none_yet(self) -> bool:
        return not [each for each in self._events(self._seen) if each["kind"] == "target_published"]


def until_flushed(trainer: Trainer) -> None:
    """As slime does: up to 60 times."""
    for _ in range(60):
        if trainer.http.get("/flush_cache").status_code == 200:
            return
        time.sleep(0.05)
    raise AssertionError("the cache was never flushed")


def test_a_slime_step_is_one_publication(trainer: Trainer, moved: Path) -> None:
    """40 buckets over a process group, slower than the silence that would end a run of calls; rollouts are aborted by
    the pause, and the next ones are of the new version alone."""
    tensors = tensors_of(moved)
    parts = [*buckets(tensors, 39), {"model.norm.weight": tensors["model.norm.weight"]}]
    published = Publications(trainer)

    def step() -> None:
        until_under_way(trainer, len(PROMPTS))
        trainer.post("/pause_generation").raise_for_status()
        until_flushed(trainer)
        for i, part in enumerate(parts):
            trainer.distributed(part, flush_cache=False, weight_version="41").raise_for_status()
            if i == 20:
                time.sleep(2.1)
                assert target_now(trainer)["partial"]
        trainer.post("/continue_generation").raise_for_status()

    aborted = while_running(lambda: rollouts(trainer), step)
    detail = published.one()
    assert (detail["weight_version"], detail["calls"], detail["refused"], detail["torn"]) == ("41", 40, 0, False)
    assert target_now(trainer) == {"version": published.before + 1, "weight_version": "41", "partial": False}
    assert {each["finish_reason"]["type"] for each in aborted} == {"abort"}
    old = {span["target_version"] for each in aborted for span in each["weight_versions"]}
    assert old == {published.before}
    new = rollouts(trainer, max_new_tokens=8)
    assert [each["weight_versions"] for each in new] == [
        [{"version": "41", "target_version": published.before + 1, "partial": False, "start": 0, "end": 8}]
    ] * len(new)
    assert {each["weight_version"] for each in new} == {"41"}


def test_an_areal_step_is_one_publication(trainer: Trainer) -> None:
    """It aborts, pauses in place, and lets each call flush the cache, which is the default."""
    parts = buckets(tensors_of(TARGET), 10)
    published = Publications(trainer)

    def step() -> None:
        until_under_way(trainer, len(PROMPTS))
        trainer.post("/pause_generation").raise_for_status()
        trainer.post("/pause_generation", mode="in_place").raise_for_status()
        for part in parts:
            trainer.distributed(part, abort_all_requests=True).raise_for_status()
        assert published.none_yet()
        trainer.post("/continue_generation").raise_for_status()

    while_running(lambda: rollouts(trainer), step)
    assert published.one()["calls"] == 10
    published = Publications(trainer)
    trainer.disk(TARGET, abort_all_requests=True).raise_for_status()
    assert published.one()["calls"] == 1


@pytest.mark.parametrize("mode", ["in_place", "retract"])
def test_a_miles_step_is_one_publication(trainer: Trainer, moved: Path, mode: str) -> None:
    """A session within a pause that aborts nothing, named when it is over: rollouts go on under the new version."""
    published = Publications(trainer)
    before = target_now(trainer)

    def step() -> None:
        until_under_way(trainer, len(PROMPTS))
        trainer.post("/pause_generation", mode=mode).raise_for_status()
        if mode == "retract":
            trainer.http.get("/flush_cache")
        trainer.post("/begin_weight_update", selector="target").raise_for_status()
        for part in buckets(tensors_of(moved), 8):
            trainer.tensor(part, flush_cache=False, selector="target").raise_for_status()
        trainer.post("/end_weight_update").raise_for_status()
        trainer.post("/update_weight_version", new_version=mode, abort_all_requests=False).raise_for_status()
        trainer.post("/continue_generation").raise_for_status()

    went_on = while_running(lambda: rollouts(trainer), step)
    assert published.one()["calls"] == 8
    versions = [(before["weight_version"], before["version"]), (mode, before["version"] + 1)]
    for each in went_on:
        spans = each["weight_versions"]
        assert [(span["version"], span["target_version"]) for span in spans] == versions
        assert [span["partial"] for span in spans] == [False, False]
        assert (spans[0]["start"], spans[0]["end"], spans[1]["end"]) == (0, spans[1]["start"], 400)


def test_a_run_without_a_pause_ends_by_silence(trainer: Trainer) -> None:
    """What is sampled between its calls, and until it is over, is marked."""
    published = Publications(trainer)
    for part in buckets(tensors_of(TARGET), 3):
        trainer.tensor(part, flush_cache=False, weight_version="run").raise_for_status()
        (spans,) = {str(each["weight_versions"]) for each in rollouts(trainer, max_new_tokens=4)}
        assert f"'target_version': {published.before + 1}, 'partial': True" in spans
    assert published.none_yet()
    time.sleep(2.1)
    assert published.one() | {"seconds": 0} == {
        "version": published.before + 1,
        "weight_version": "run",
        "calls": 3,
        "refused": 0,
        "torn": False,
        "seconds": 0,
    }


def test_a_refused_call_is_told_of(trainer: Trainer) -> None:
    """The others of its publication are in force, so the version is a new one, and no success."""
    published = Publications(trainer)
    trainer.post("/begin_weight_update").raise_for_status()
    good, bad = buckets(tensors_of(TARGET), 2)
    assert trainer.tensor(bad | {"unheard.of": next(iter(bad.values()))}, flush_cache=False).status_code == 400
    trainer.tensor(good, flush_cache=False).raise_for_status()
    ended = trainer.post("/end_weight_update")
    assert (ended.status_code, ended.json()["success"]) == (400, False)
    assert any(name in ended.json()["message"] for name in bad)
    detail = published.one()
    assert (detail["calls"], detail["refused"]) == (1, 1)


def test_sessions_do_not_nest(trainer: Trainer) -> None:
    """One that is begun while another is open takes its place: the other's trainer may be gone."""
    published = Publications(trainer)
    assert trainer.post("/end_weight_update").status_code == 400
    assert trainer.post("/begin_weight_update", selector="everything").status_code == 400
    assert trainer.post("/begin_weight_update").status_code == 200
    assert trainer.post("/begin_weight_update").status_code == 200
    assert trainer.post("/end_weight_update").status_code == 200
    assert trainer.post("/end_weight_update").status_code == 400
    assert published.none_yet()

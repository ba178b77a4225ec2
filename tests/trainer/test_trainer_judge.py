"""Whom the drafter in training is held against."""

from pathlib import Path

import pytest
import torch

from tests.trainer.models import config, embedded, from_nothing, frozen, rollouts
from tlt_server.trainer.config import Gate
from tlt_server.trainer.learn.loop import Trainer
from tlt_server.trainer.learn.losses import EAGLE
from tlt_server.trainer.publish.folder import Drafter
from tlt_server.trainer.publish.judge import Judge, Verdict
from tlt_server.trainer.publish.published import Published

HELD_OUT = rollouts("eagle")[:4]


class Scene:
    """A trainer whose drafter is good, and a judge whose first one is not."""

    def __init__(self, folder: Path) -> None:
        drafter = embedded("eagle")
        for weight in drafter.parameters():
            weight.data *= 1.001  # which bfloat16 cannot tell
        self.published, self.trainer = Published(folder), Trainer(drafter, frozen(), EAGLE)
        self.judge = Judge(Gate(), 512, from_nothing("eagle"), self.published, torch.device("cpu"))

    def publish(self, version: int, verdict: Verdict) -> None:
        drafter = Drafter(verdict.network, config("eagle") | {"dtype": "bfloat16"})
        self.published.add(drafter, version, {"trained_on": "0", "steps": "0"})
        self.judge.publish(version, drafter)

    def verdict(self, active: int, rejected: int | None = None) -> Verdict:
        found = self.judge.compare(self.trainer, HELD_OUT, active, rejected)
        assert found is not None
        return found


@pytest.mark.slow
def test_what_was_published_is_judged_as_it_is_served_and_not_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene = Scene(tmp_path)
    first = scene.verdict(0)
    assert first.judged.candidate > first.judged.live + 1
    scene.publish(1, first)
    again = Judge(Gate(), 512, from_nothing("eagle"), scene.published, torch.device("cpu"))
    read = again.compare(scene.trainer, HELD_OUT, 1)
    monkeypatch.setattr(scene.published, "network", lambda _: pytest.fail("it was read again"))
    for weight in scene.trainer.network.parameters():
        weight.data += 0.01  # it goes on learning
    live = scene.verdict(1).judged.live
    assert read is not None
    assert live == read.judged.live
    assert live != first.judged.candidate, "its file is of fewer bits"
    for rejected in (2, 3):
        scene.publish(rejected, first)
        assert scene.verdict(1, rejected).judged.live == live
        assert scene.verdict(1, rejected).judged.live == live


def test_one_that_nobody_knows_is_taken_for_the_first(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    assert scene.verdict(7).judged.live == scene.verdict(0).judged.live

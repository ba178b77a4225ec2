"""Drafters that learn from nothing: features in pieces, a buffer, packs, steps, their average, the gate, an export."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.trainer.models import config, embedded, from_nothing, frozen, rollouts, run_of, texts
from tlt_server.trainer.config import Gate
from tlt_server.trainer.data.buffer import Buffer
from tlt_server.trainer.data.features import Feature
from tlt_server.trainer.learn.loop import Settings, Trainer
from tlt_server.trainer.learn.losses import Objective
from tlt_server.trainer.learn.packing import Run, join, pack
from tlt_server.trainer.publish.folder import Drafter, load_drafter
from tlt_server.trainer.publish.gate import accept_length, mean
from tlt_server.trainer.publish.judge import candidate

CPU = torch.device("cpu")


def features(run: Run, request: str, group: int) -> list[Feature]:
    """A run as it would arrive: in pieces, the later ones first."""
    parts = zip(*(each.split(50) for each in (run.tokens, run.states, run.finals)), strict=True)
    pieces = [
        Feature(request, group, run.prompt, 50 * number, tokens.int(), states, 0, finals)
        for number, (tokens, states, finals) in enumerate(parts)
    ]
    return pieces[::-1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "objective", "steps", "reached"),
    [("eagle", Objective(steps=1, state=0.1), 25, 1.25), ("eagle3", Objective(steps=2, decay=0.8), 12, 1.25)],
)
def test_a_drafter_learns_from_nothing(
    kind: str, objective: Objective, steps: int, reached: float, tmp_path: Path
) -> None:
    drafter, runs = from_nothing(kind), texts(kind, 25)
    buffer = Buffer(runs[0].states.shape[1], 256, budget=1 << 28, window=512, held_out=0)
    for number, run in enumerate(runs):
        for feature in features(run, f"request {number}", number):
            buffer.add(feature)
    judged = pack(rollouts(kind), 1024, CPU)
    before = accept_length(drafter, frozen(), judged, depth=3)
    trainer = Trainer(drafter, frozen(), objective, Settings(rate=4e-3, warmup=10))
    losses = [trainer.step(pack(buffer.draw(400, trainer.random), 512, CPU)).loss for _ in range(steps)]
    assert losses[-1] < losses[0] / 1.5
    after = accept_length(drafter, frozen(), judged, depth=3)
    assert before < 1.1
    assert after > reached
    Drafter(drafter, config(kind)).export(tmp_path / "out", {})
    exported = accept_length(load_drafter(tmp_path / "out").network, frozen(), judged, depth=3)
    assert exported == pytest.approx(after, rel=0.01)  # bfloat16


def test_a_step_over_several_packs_is_one_over_all_of_them() -> None:
    runs = [run_of(torch.randint(2, 290, (length,)), 0, "eagle") for length in (5, 20, 11)]
    apart, together = (Trainer(embedded("eagle"), frozen(), Objective(steps=1)) for _ in range(2))
    one = apart.step([join([run]) for run in runs])
    other = together.step([join(runs)])
    assert one.chains == other.chains == 33
    assert one.loss == pytest.approx(other.loss, rel=1e-4)
    assert one.gradient_norm == pytest.approx(other.gradient_norm, rel=1e-3)


def test_a_gradient_that_is_not_finite_changes_nothing() -> None:
    trainer = Trainer(embedded("eagle"), frozen(), Objective(steps=1))
    run = run_of(torch.arange(2, 20), 0, "eagle")
    run.finals[3, 0] = float("nan")
    metrics = trainer.step([join([run_of(torch.arange(2, 20), 0, "eagle"), replace(run, first=4, request="r1")])])
    assert metrics.skipped == (
        "the gradient is not finite: norm nan, loss nan, nor are the states of 2 entries of request r1, from position 6"
    )
    for name, weight in embedded("eagle").named_parameters():
        assert torch.equal(weight, trainer.network.get_parameter(name))


def test_weights_are_averaged_over_steps() -> None:
    trainer = Trainer(embedded("eagle"), frozen(), Objective(steps=1), Settings(rate=1e-2, warmup=1, average=0.75))
    expected: dict[str, torch.Tensor] = {}
    for _ in range(5):
        trainer.step([join([run_of(torch.randint(2, 290, (12,)), 0, "eagle")])])
        for name, weight in trainer.network.named_parameters():
            expected[name] = 0.75 * expected.get(name, weight.detach()) + 0.25 * weight.detach()
    for name, average in expected.items():
        torch.testing.assert_close(trainer.average.get_parameter(name), average)
    assert not torch.equal(trainer.average.get_parameter("fc.weight"), trainer.network.get_parameter("fc.weight"))


@pytest.mark.slow
@pytest.mark.parametrize("spoilt", ["average", "network"])
def test_the_better_of_last_weights_and_average_is_the_candidate(spoilt: str) -> None:
    trainer, judged = Trainer(embedded("eagle"), frozen(), Objective(steps=1)), pack(rollouts("eagle"), 1024, CPU)
    with torch.no_grad():
        getattr(trainer, spoilt).fc.weight.mul_(-1)
    sums, network = candidate(trainer, judged, Gate())
    assert network is (trainer.network if spoilt == "average" else trainer.average)
    assert mean(sums) == pytest.approx(accept_length(embedded("eagle"), frozen(), judged, 3))

"""What a selector is put through. Each scene is played with a seed and returns figures; lower is better.

A scene has one batch, which stays, in a bucket of its own. What is lost is told from the world's own means, and so
holds whatever the bandit believes: the share of the time by which the bucket's best arm would have been sooner,
exploration included.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from random import Random

from tlt_client.schemas import StrategyUpdate

from benchmarks.simulation.server import Server, Step, regret
from benchmarks.simulation.world import CAPTURED, CONTEXT, World
from tlt_server.strategy.arms import Bucket, Choice

RECOVERED = 0.10
"""After a change, a selector has recovered where the next `SPAN` steps lose no more than this."""
SPAN = 50
HARDER = -2.0
"""Log-odds by which drafts are accepted less readily: a chain of depth 7 falls from an accept length of 5.2 to 2.2."""

Figures = dict[str, float]
Scene = Callable[[str, int, int, Sequence[Choice]], Figures]
"""From mode, seed, batch size and the bucket's arms."""


def near(batch: int) -> tuple[Choice, ...]:
    """The four best arms at a batch size, and off: hard to tell apart."""
    return (*_ranked(World(Random(0)), _captured(batch), batch)[:4], None)


def far(batch: int) -> tuple[Choice, ...]:
    """Four arms from the best to the worst at a batch size, and off: some cost several times the best one's time."""
    ranked = _ranked(World(Random(0)), _captured(batch), batch)
    return (*(ranked[round(i * (len(ranked) - 1) / 3)] for i in range(4)), None)


def _captured(batch: int) -> list[Choice]:
    return [arm for arm, most in CAPTURED.items() if most >= batch]


def _ranked(world: World, arms: Sequence[Choice], batch: int) -> list[Choice]:
    """The best first, in the world as it is."""
    return sorted(arms, key=lambda arm: -world.rate(arm, batch, CONTEXT * batch))


@dataclass
class _Stage:
    world: World
    server: Server
    levels: list[int]

    @classmethod
    def of(cls, mode: str, seed: int, batch: int, arms: Sequence[Choice], **differs: dict[Choice, float]) -> "_Stage":
        """A server that was just started; `differs` are the `World`'s fields, from the start."""
        world = World(Random(seed), **differs)
        below = [Bucket(1, (None,))] if batch > 1 else []
        buckets = [*below, Bucket(batch, tuple(arms)), Bucket(batch + 1, (None,))]
        return cls(world, Server(world, StrategyUpdate(mode=mode), buckets), world.new_levels(batch))

    def steps(self, count: int) -> list[Step]:
        cached = CONTEXT * len(self.levels)
        return [self.server.step(self.levels, cached)[0] for _ in range(count)]

    def recovery(self, count: int) -> Figures:
        """Steps until it has recovered; so many where it has not by then."""
        steps = self.steps(count)
        starts = range(count - SPAN)
        return {"recovery": next((n for n in starts if regret(steps[n : n + SPAN]) <= RECOVERED), count)}


def cold_start(mode: str, seed: int, batch: int, arms: Sequence[Choice]) -> Figures:
    """Two thousand steps of a server that was just started, in a world that stays as it is."""
    stage = _Stage.of(mode, seed, batch, arms)
    steps = stage.steps(2000)
    report = stage.server.selector.report()
    return {
        "regret": regret(steps),
        "regret_after_500": regret(steps[500:]),
        "explored": report.explored_s / report.decoded_s,
        "explored_lost": report.explored_lost_s / report.decoded_s,
        "switches_per_1000": sum(a.arm != b.arm for a, b in pairwise(steps)) / 2,
    }


def in_force_gets_slower(mode: str, seed: int, batch: int, arms: Sequence[Choice]) -> Figures:
    """After a thousand steps the best arm takes 1.5 times as long."""
    stage = _Stage.of(mode, seed, batch, arms)
    stage.steps(1000)
    stage.world.slower[_ranked(stage.world, arms, batch)[0]] = 1.5
    return stage.recovery(1000)


def drafts_get_worse(mode: str, seed: int, batch: int, arms: Sequence[Choice]) -> Figures:
    """After a thousand steps drafts are accepted less readily, and nobody says so."""
    stage = _Stage.of(mode, seed, batch, arms)
    stage.steps(1000)
    stage.world.easier[None] = HARDER
    return stage.recovery(1000)


def worse_weights(mode: str, seed: int, batch: int, arms: Sequence[Choice]) -> Figures:
    """The same, with the version event of a new target or drafter."""
    return _swap(_Stage.of(mode, seed, batch, arms), HARDER)


def better_weights(mode: str, seed: int, batch: int, arms: Sequence[Choice]) -> Figures:
    """After a thousand steps with a bad drafter comes a good one, with its version event."""
    return _swap(_Stage.of(mode, seed, batch, arms, easier={None: HARDER}), 0.0)


def _swap(stage: _Stage, easier: float) -> Figures:
    stage.steps(1000)
    stage.world.easier[None] = easier
    stage.server.selector.weights_changed()
    return stage.recovery(1000)


def idle_becomes_best(mode: str, seed: int, batch: int, arms: Sequence[Choice]) -> Figures:
    """An arm that took three times as long as measured for a thousand steps becomes the best, by a third or so."""
    idle = near(batch)[0]
    stage = _Stage.of(mode, seed, batch, arms, slower={idle: 3.0})
    stage.steps(1000)
    stage.world.slower[idle] = 0.75
    return stage.recovery(4000)


def adversary(mode: str, seed: int, batch: int, arms: Sequence[Choice]) -> Figures:
    """An arm is the best by a third or so for 50 steps, then ten times slower for 450; four times over."""
    trap = near(batch)[0]
    stage = _Stage.of(mode, seed, batch, arms)
    steps = []
    for _ in range(4):
        for slower, count in ((0.75, 50), (10.0, 450)):
            stage.world.slower[trap] = slower
            steps += stage.steps(count)
    return {"regret": regret(steps)}


SCENES: dict[Scene, dict[str, float]] = {
    cold_start: {"regret": 0.10, "regret_after_500": 0.03},
    in_force_gets_slower: {"recovery": 200},
    drafts_get_worse: {"recovery": 200},
    worse_weights: {"recovery": 200},
    better_weights: {"recovery": 200},
    idle_becomes_best: {"recovery": 2000},
    adversary: {"regret": 0.15},
}
"""Each scene, and what its figures must not exceed."""


def passes(scene: Scene, figures: Figures) -> bool:
    """Whether one play stays within the scene's bars."""
    return all(figures[name] <= bar for name, bar in SCENES[scene].items())

"""A batch drains: requests of long-tailed lengths end one by one, and those that are left grow long."""

from dataclasses import dataclass
from random import Random

from tlt_client.schemas import StrategyUpdate

from benchmarks.simulation.server import Server, Step, regret
from benchmarks.simulation.world import World
from tlt_server.strategy.estimates import Learned

PROMPT = 200
BEGINS = ((40, 2.5), (90, -0.1), (130, -0.5), (180, -0.15), (270, 0.05))
EASE, LATER = 0.6, 0.45
"""Log-odds by which drafts are accepted more readily up to so many tokens of a response, beside some for all, and
later: about what chain 7 was given, 32 requests at once past their ends, by a server's log of d93bfa2, not kept."""


@dataclass
class Drained:
    """What came of it: the steps, and what the selector knew at the end."""

    steps: list[Step]
    learned: Learned

    @property
    def ratio_to_oracle(self) -> float:
        """Its speed over that of choosing the best of a bucket's arms at each step."""
        return 1 - regret(self.steps)

    @property
    def seconds(self) -> float:
        return sum(s.seconds for s in self.steps)


def drain(mode: str, seed: int, requests: int, median: int = 800, learned: Learned | None = None) -> Drained:
    """So many requests at once, of log-normal lengths, to the end of the last.

    median: tokens of a response; one in a hundred is ten times as long.
    learned: before, on another batch; None: the server was just started.
    """
    world = World(Random(seed))
    server = Server(world, StrategyUpdate(mode=mode))
    if learned is not None:
        server.selector.restore(learned)
    lengths = [round(median * world.random.lognormvariate(0, 1)) for _ in range(requests)]
    return _drained(world, server, lengths)


def drains(update: StrategyUpdate, seed: int, requests: int = 32, count: int = 18, median: int = 300) -> list[Drained]:
    """One after the other by a server that was just started; equal seeds give all settings the same lengths."""
    world, lengths = World(Random(seed)), Random(seed)
    server = Server(world, update)
    return [
        _drained(world, server, [1 + round(median * lengths.lognormvariate(0, 0.6)) for _ in range(requests)])
        for _ in range(count)
    ]


def waves(update: StrategyUpdate, seed: int, requests: int, tokens: int, count: int) -> list[Drained]:
    """So many requests of so many tokens, which begin together, and so are easy or hard to draft for together: one
    batch after the other, by a server that was just started."""
    world = World(Random(seed))
    server = Server(world, update)
    return [_drained(world, server, [tokens] * requests, alike=True) for _ in range(count)]


def _eased(tokens: float) -> float:
    return EASE + next((ease for most, ease in BEGINS if tokens < most), LATER)


def _drained(world: World, server: Server, left: list[int], *, alike: bool = False) -> Drained:
    made, levels = [0] * len(left), world.new_levels(len(left))
    steps = []
    while left:
        if alike:
            world.easier[None] = _eased(sum(made) / len(made))
        step, accepted = server.step(levels, sum(made) + PROMPT * len(made))
        steps.append(step)
        made = [tokens + 1 + more for tokens, more in zip(made, accepted, strict=True)]
        going = [i for i, tokens in enumerate(made) if tokens < left[i]]
        left, made, levels = ([each[i] for i in going] for each in (left, made, levels))
    return Drained(steps, server.selector.learned())

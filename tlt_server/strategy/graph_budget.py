"""Which arms get CUDA graphs, at which batch sizes, where memory for them is bounded.

What graphs take is estimated: activations and logits of the pass with most rows, in which all others take turns, and
something for each graph. Arms are then extended from small batches to larger ones, always by the sizes that gain most
for their memory: at each size an arm gains what it adds to the best of off and the arms that are there already, at any
rate of acceptance that a drafter may have, with step times as on one H200 (guess.py). What is gained at small batches
comes first by itself: there speculation pays most, and takes least.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from math import log

from tlt_server.config import Arm
from tlt_server.errors import ConfigError
from tlt_server.strategy.arms import DRAFTING, KEYS
from tlt_server.strategy.costs import guessed_costs
from tlt_server.strategy.defaults import RATES, expected_length

Sizes = Mapping[Arm, Sequence[int]]
"""Batch sizes that each arm is captured at, ascending: always the smallest ones of the server's."""
GRAPH_BYTES, STEP_BYTES = 12e6, 2e6
"""Of a graph, and of each of the drafter's passes in one: the driver's nodes, and attention's plan. Reckoned, not
measured yet: after each arm the server goes on by what was really taken."""


def row_bytes(vocabulary: int, hidden: int, intermediate: int, element: int) -> float:
    """Of a token that a pass of the target reads, about: logits as computed and in float32; activations of a layer.

    Args:
        vocabulary, hidden, intermediate: the model's sizes, in elements.
        element: bytes of one.
    """
    return vocabulary * (4 + element) + (6 * hidden + 3 * intermediate) * element


def estimated(sizes: Sizes, every: Sequence[int], row: float) -> float:
    """Bytes that graphs take: of these arms, and of plain decoding.

    Args:
        every: the server's batch sizes, ascending; plain decoding is captured at all of them.
        row: `row_bytes`.
    """
    rows = max([every[-1], *(of_arm[-1] * arm.num_draft_tokens for arm, of_arm in sizes.items())])
    graphs, steps = len(every), 0
    for kind, key in KEYS.items():
        shared: dict[object, int] = {}
        for arm, of_arm in sizes.items():
            shared[key(arm)] = max(shared.get(key(arm), 0), len(of_arm))
        graphs += sum(shared.values())
        if kind == DRAFTING:
            steps += sum((arm.num_steps - 1) * len(of_arm) for arm, of_arm in sizes.items())
    return rows * row + graphs * GRAPH_BYTES + steps * STEP_BYTES


def fitted(wanted: Sizes, estimate: Callable[[Sizes], float], budget: float, done: Sizes | None = None) -> Sizes:
    """What of `wanted` fits into a budget; arms that get nothing are left out.

    Args:
        estimate: bytes of arms at sizes, all together.
        budget: bytes.
        done: what is captured already, and stays.

    Raises:
        ConfigError: no arm fits at any size.
    """
    found = dict(done or {})
    gains = _Gains(wanted)
    for arm, sizes in found.items():
        gains.take(arm, sizes)
    while steps := [
        (gains.of(arm, new) / max(1.0, cost), -cost, arm, new)
        for arm, new in _extensions(wanted, found, done or {})
        if (total := estimate(found | {arm: wanted[arm][: len(found.get(arm, ())) + len(new)]})) <= budget
        for cost in [total - estimate(found)]
    ]:
        _, _, arm, new = max(steps, key=lambda step: step[:2])
        gains.take(arm, new)
        found[arm] = wanted[arm][: len(found.get(arm, ())) + len(new)]
    if not found:
        least = min(estimate({arm: sizes[:1]}) for arm, sizes in wanted.items())
        raise ConfigError(f"--graph-memory-gb {budget / 1e9:.2f}: no arm fits. Give {least / 1e9:.2f} at least")
    return {arm: found[arm] for arm in wanted if arm in found}


def _extensions(wanted: Sizes, found: Sizes, done: Sizes) -> Iterator[tuple[Arm, Sequence[int]]]:
    """An arm, and the next sizes that it could have."""
    for arm, sizes in wanted.items():
        has = len(found.get(arm, ()))
        if arm not in done:
            yield from ((arm, sizes[has:end]) for end in range(has + 1, len(sizes) + 1))


class _Gains:
    """What arms add to those that were taken, in logarithms of speed, over all rates of acceptance."""

    def __init__(self, wanted: Sizes) -> None:
        largest = max(size for sizes in wanted.values() for size in sizes)
        self._costs = guessed_costs(list(wanted), largest)
        self._best: dict[int, list[float]] = {}

    def of(self, arm: Arm, sizes: Sequence[int]) -> float:
        """Of an arm at these sizes."""
        return sum(
            max(0.0, own - best)
            for size in sizes
            for own, best in zip(self._speeds(arm, size), self._taken(size), strict=True)
        )

    def take(self, arm: Arm, sizes: Sequence[int]) -> None:
        """An arm is there, at these sizes."""
        for size in sizes:
            self._best[size] = list(map(max, self._speeds(arm, size), self._taken(size)))

    def _taken(self, size: int) -> list[float]:
        return self._best.setdefault(size, [-log(self._costs.seconds(None, size, 0))] * len(RATES))

    def _speeds(self, arm: Arm, size: int) -> list[float]:
        seconds = self._costs.seconds(arm, size, 0)
        return [log(expected_length(arm, rate) / seconds) for rate in RATES]

"""Which arms get CUDA graphs, at which batch sizes, where memory for them is bounded.

Arms grow from small batches, where speculation pays most and takes least, to larger ones.
"""

from collections.abc import Callable, Mapping, Sequence

from tlt_server.config import Arm
from tlt_server.errors import ConfigError
from tlt_server.strategy.arms import DRAFTING, KEYS

Sizes = Mapping[Arm, Sequence[int]]
"""Batch sizes that each arm is captured at, ascending: always the smallest ones of the server's."""
GRAPH_BYTES, STEP_BYTES = 12e6, 2e6
"""Of a graph, and of each of the drafter's passes in one: the driver's nodes, and attention's plan. Reckoned, not
measured yet: after each arm the server goes on by what was really taken."""


def row_bytes(vocabulary: int, hidden: int, intermediate: int, element: int) -> float:
    """Bytes of a token in a pass of the target, about: logits as computed and in float32; activations of a layer.

    vocabulary, hidden, intermediate: the model's sizes, in elements. element: bytes of one.
    """
    return vocabulary * (4 + element) + (6 * hidden + 3 * intermediate) * element


def estimated(sizes: Sizes, every: Sequence[int], row: float) -> float:
    """Bytes that graphs of these arms take, and of plain decoding at `every` batch size of the server's, ascending.

    Activations and logits of the pass with most rows, in which others take turns, and something for each graph.
    row: `row_bytes`.
    """
    rows = max([every[-1], *(of_arm[-1] * arm.num_draft_tokens for arm, of_arm in sizes.items())])
    graphs = len(every)
    for kind, key in KEYS.items():
        for shared in {key(arm) for arm in sizes if kind != DRAFTING or not arm.of_history}:
            graphs += max(len(of_arm) for arm, of_arm in sizes.items() if key(arm) == shared)
    steps = sum((arm.num_steps - 1) * len(of_arm) for arm, of_arm in sizes.items() if not arm.of_history)
    return rows * row + graphs * GRAPH_BYTES + steps * STEP_BYTES


def fitted(wanted: Sizes, estimate: Callable[[Sizes], float], budget: float, done: Sizes | None = None) -> Sizes:
    """What of `wanted` fits into a budget, the smallest batch sizes first; arms that get nothing are left out.

    estimate: bytes of arms at sizes, all together. budget: bytes. done: what is captured already, and stays.

    Raises:
        ConfigError: no arm fits at any size.
    """
    found = dict(done or {})
    steps = [(size, place, arm) for arm in wanted if arm not in found for place, size in enumerate(wanted[arm])]
    for _, place, arm in sorted(steps, key=lambda step: step[0]):
        more = found | {arm: wanted[arm][: place + 1]}
        if len(found.get(arm, ())) == place and estimate(more) <= budget:
            found = more
    if not found:
        least = min(estimate({arm: sizes[:1]}) for arm, sizes in wanted.items())
        raise ConfigError(f"--graph-memory-gb {budget / 1e9:.2f}: no arm fits. Give {least / 1e9:.2f} at least")
    return {arm: found[arm] for arm in wanted if arm in found}

"""What a step of each arm costs, timed when the server starts: its graphs are replayed on what they were captured with.

That is a context of next to nothing, and the GPU's part alone: what the CPU adds, and longer contexts, the paces of the
first pulls add (strategy/knowledge.py). All ranks replay the same graphs in the same order.
"""

import logging
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

from tlt_server.config import Arm
from tlt_server.engine.arms import Parts
from tlt_server.strategy.arms import Choice
from tlt_server.strategy.costs import Timing

logger = logging.getLogger(__name__)

REPLAYS = 6
"""Of each graph, after one that is not timed."""


def timings(by_arm: Mapping[Arm, Parts], plain: Any) -> list[Timing]:
    """Of every arm and of off, at each batch size that was captured; empty where there are no graphs.

    Args:
        plain: the runner of plain steps' graphs, or None.
    """
    of_arms: dict[Choice, list[Any]] = {arm: [each.graphs for each in parts[:3]] for arm, parts in by_arm.items()}
    passes = {None: [plain], **of_arms}
    runners = {id(each): each for of_arm in passes.values() for each in of_arm}  # a shared one once
    seconds = {name: _replayed(each) for name, each in runners.items()}
    found = []
    for arm, of_arm in passes.items():
        each = [seconds[id(runner)] for runner in of_arm if runner is not None]
        sizes = sorted(set.intersection(*map(set, each))) if each else []
        found += [Timing(arm, size, 0, sum(of_pass[size] for of_pass in each)) for size in sizes]
        told = ", ".join(f"{1000 * each.seconds:.2f} at {each.batch}" for each in found if each.arm == arm)
        logger.info("a step of %s takes ms: %s", arm or "plain decoding", told or "not timed")
    return found if all(any(each.arm == arm for each in found) for arm in passes) else []


def _replayed(runner: Any) -> dict[int, float]:
    """Seconds of each graph, by batch size."""
    graphs = getattr(getattr(runner, "backend", None), "_graphs", {})
    return {key.size: _seconds(graph.replay) for key, graph in graphs.items()}


def _seconds(replay: Callable[[], None]) -> float:
    synchronize = torch.get_device_module().synchronize
    replay()
    synchronize()
    began = time.perf_counter()
    for _ in range(REPLAYS):
        replay()
    synchronize()
    return (time.perf_counter() - began) / REPLAYS

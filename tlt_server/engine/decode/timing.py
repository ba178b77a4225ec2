"""What a step of each arm costs, timed when the server starts: its graphs are replayed on what they were captured with.

That is a context of next to nothing, and the GPU's part alone: what the CPU adds, and longer contexts, the
ratios of the first steps add (strategy/estimates.py). All ranks replay the same graphs in the same order.

Without graphs the passes of both models are timed, on dummy tokens, and steps put together from them.
"""

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from tlt_server.config import Arm
from tlt_server.engine.decode.arms import Parts
from tlt_server.strategy.arms import Choice
from tlt_server.strategy.costs import StepCosts, Timing, from_passes

logger = logging.getLogger(__name__)

REPLAYS = 6
"""Of each graph or pass."""


def timings(by_arm: Mapping[Arm, Parts], plain: Any) -> list[Timing]:
    """Of every arm and of off, at each batch size that was captured; empty where there are no graphs. plain: the runner
    of plain steps' graphs, or None."""
    of_arms: dict[Choice, list[Any]] = {arm: [each.graphs for each in parts[:3]] for arm, parts in by_arm.items()}
    passes = {None: [plain], **of_arms}
    runners = {id(each): each for of_arm in passes.values() for each in of_arm}  # a shared one once
    seconds = {name: _replayed(each) for name, each in runners.items()}
    found = []
    for arm, of_arm in passes.items():
        each = [seconds[id(runner)] for runner in of_arm if runner is not None]
        sizes = sorted(set.intersection(*map(set, each))) if each else []
        found += [Timing(arm, size, 0, sum(of_pass[size] for of_pass in each)) for size in sizes]
    return found if all(any(each.arm == arm for each in found) for arm in passes) else []


def pass_timings(target: Any, drafter: Any, arms: Iterable[Arm], largest: int) -> list[Timing]:
    """The same where there are no graphs: a pass is timed by its number of tokens, up to `largest`, the largest batch
    size. target, drafter: upstream's model runners; the target's is that of plain steps."""
    sizes = sorted({*(2**power for power in range(largest.bit_length())), largest})
    of_target, of_drafter = (
        StepCosts(rising({size: _quickest(partial(_dummy_pass, runner, size)) for size in sizes}))
        for runner in (target, drafter)
    )
    return from_passes(of_target, of_drafter, arms, sizes)


def tell(found: Sequence[Timing]) -> None:
    """Logs what steps take."""
    for arm in dict.fromkeys(each.arm for each in found):
        told = ", ".join(f"{1000 * each.seconds:.2f} at {each.batch}" for each in found if each.arm == arm)
        logger.info("a step of %s takes ms: %s", arm or "plain decoding", told)


def rising(seconds: Mapping[int, float]) -> list[Timing]:
    """Passes by number of tokens, none longer than one of more: something else ran meanwhile."""
    return [
        Timing(None, size, 0, min(took for more, took in seconds.items() if more >= size)) for size in sorted(seconds)
    ]


@torch.no_grad()
def _dummy_pass(runner: Any, size: int) -> None:
    """One token of each of `size` requests, at the beginning of a text; its keys and values go where padding's go."""
    from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch, ForwardMode
    from sglang.srt.speculative.eagle_info import EagleDraftInput
    from sglang.srt.speculative.eagle_utils import get_draft_recurrent_hidden_state_spec

    zeros = torch.zeros(size, dtype=torch.int64, device=runner.device)
    proposal = None
    if runner.is_draft_worker:
        width, dtype = get_draft_recurrent_hidden_state_spec(runner)
        proposal = EagleDraftInput(hidden_states=torch.zeros(size, width, dtype=dtype, device=runner.device))
    forward_batch = ForwardBatch(
        forward_mode=ForwardMode.DECODE,
        batch_size=size,
        input_ids=zeros,
        req_pool_indices=zeros,
        seq_lens=zeros + 1,
        seq_lens_cpu=torch.ones(size, dtype=torch.int64),
        orig_seq_lens=zeros + 1,
        out_cache_loc=zeros,
        seq_lens_sum=size,
        positions=zeros,
        spec_algorithm=runner.spec_algorithm,
        spec_info=proposal,
        capture_hidden_mode=CaptureHiddenMode.NULL,
    )
    runner.forward(forward_batch)


def _replayed(runner: Any) -> dict[int, float]:
    """Seconds of each graph, by batch size."""
    graphs = getattr(getattr(runner, "backend", None), "_graphs", {})
    return {key.size: _seconds(graph.replay) for key, graph in graphs.items()}


def _seconds(run: Callable[[], None], times: int = REPLAYS) -> float:
    """Of one among several that follow upon one another, after one that is not timed."""
    synchronize = torch.get_device_module().synchronize
    run()
    synchronize()
    began = time.perf_counter()
    for _ in range(times):
        run()
    synchronize()
    return (time.perf_counter() - began) / times


def _quickest(run: Callable[[], None]) -> float:
    return min(_seconds(run, 1) for _ in range(REPLAYS))

"""What CUDA graphs take of a card, pass by pass, and the memory pools that they are captured in.

Taken is what the card has less of, whoever allocated it: the pool that activations lie in; buffers, which are the
graphs' inputs and what attention keeps for them; and the driver's own, for each node of a graph.
"""

import gc
import logging
import time
from collections.abc import Iterator, Set
from contextlib import contextmanager
from typing import Any

import torch
from tlt_client.schemas import CapturedArm, CapturedPass, Graphs

from tlt_server.config import Arm, GraphSharing
from tlt_server.strategy.arms import Choice
from tlt_server.strategy.graph_budget import Sizes
from tlt_server.strategy.settings import to_client

logger = logging.getLogger(__name__)


class Captures:
    """The captures of one process. passes: what was captured, in this order. taken: bytes of the card."""

    def __init__(self, sharing: GraphSharing) -> None:
        self.sharing = sharing
        self.passes: list[CapturedPass] = []
        self.taken = 0
        self._pools: dict[Choice, Any] = {}

    @contextmanager
    def capturing(self, kind: str, arms: tuple[Arm, ...], width: int) -> Iterator[list[Any]]:
        """Within, a pass is captured: the runner that is put into the list, of `width` tokens a request. None: nothing.
        arms: whose pass it is; empty for plain decoding."""
        runners: list[Any] = []
        if not torch.cuda.is_available():
            yield runners
            return
        before, began = _memory(), time.perf_counter()
        with self._pool(arms[0] if arms else None):
            yield runners
        for runner in runners:
            if runner is not None:
                self._add(kind, arms, width, runner, _memory() - before, time.perf_counter() - began)

    @contextmanager
    def freeing(self, kept: Set[Arm]) -> Iterator[None]:
        """Within, passes that none of these arms has are let go of. Of the pool, nothing is given back."""
        known = {to_client(arm) for arm in kept}
        self.passes = [each for each in self.passes if not each.arms or known.intersection(each.arms)]
        if not torch.cuda.is_available():
            yield
            return
        before = _memory()
        yield
        gc.collect()  # runners and the backends that they captured refer to each other
        self.taken -= int((before - _memory())[0])

    def describe(self, wanted: Sizes, found: Sizes, budget: float | None) -> Graphs:
        """As our routes show it; what it says in a line goes to the log too. wanted: sizes that each arm would be
        captured at, without a budget of bytes. found: those that it was captured at."""
        arms = tuple(
            CapturedArm(known, max(found.get(arm, ()), default=0), max(sizes, default=0))
            for arm, sizes in wanted.items()
            if self.passes and (known := to_client(arm)) is not None
        )
        gb, most = self.taken / 1e9, None if budget is None else budget / 1e9
        said = told(wanted, found, gb, most) if self.passes else "no CUDA graphs here"
        logger.info(said)
        return Graphs(self.sharing.value, gb, most, arms, tuple(self.passes), said)

    def _add(self, kind: str, arms: tuple[Arm, ...], width: int, runner: Any, taken: torch.Tensor, s: float) -> None:
        if runner.captured_req_width != width:  # SGLang would pass it over in each step, and run slowly
            raise RuntimeError(f"{kind}: captured {runner.captured_req_width} tokens a request, and not {width}")
        card, reserved, buffers = taken.tolist()
        self.taken += card
        sizes = tuple(sorted(runner.capture_bs))
        of = " ".join([kind, *map(str, arms)])
        known = [each for arm in arms if (each := to_client(arm)) is not None]
        self.passes.append(CapturedPass(kind, tuple(known), sizes, card / 1e9, buffers / 1e9, (card - reserved) / 1e9))
        logger.info(
            "captured %s of %d tokens at batches %s: %.2f GiB (buffers %.2f, the driver's %.2f), %.1f s",
            of, width, list(sizes), *(each / 2**30 for each in (card, buffers, card - reserved)), s,
        )  # fmt: skip

    @contextmanager
    def _pool(self, arm: Choice) -> Iterator[None]:
        """Within, SGLang captures in this arm's pool, if each has its own."""
        from sglang.srt.model_executor.runner_utils.pool import (
            get_global_graph_memory_pool,
            set_global_graph_memory_pool,
        )

        if self.sharing is GraphSharing.POOL:
            yield
            return
        # override: upstream captures all graphs in one pool, so that an arm's cannot be measured alone
        set_global_graph_memory_pool(self._pools.get(arm))
        yield
        self._pools[arm] = get_global_graph_memory_pool()


def told(wanted: Sizes, found: Sizes, gb: float, budget_gb: float | None) -> str:
    """What was captured and what it takes, in a line."""
    took = f"CUDA graphs take {gb:.2f} GB" + ("" if budget_gb is None else f" of {budget_gb:.2f}")
    reached = [
        f"{arm} up to {sizes[-1]}" + ("" if sizes[-1] == wanted[arm][-1] else f", not {wanted[arm][-1]}")
        for arm, sizes in found.items()
    ]
    line = f"{took}: {'; '.join(reached)}"
    left = [str(arm) for arm in wanted if arm not in found]
    line += f"; left out: {', '.join(left)}" if left else ""
    over = budget_gb is not None and gb > budget_gb
    return f"{line}. More than the budget, which reckons with estimates" if over else line


def _memory() -> torch.Tensor:
    """Bytes of the card in use, those that torch has reserved, those that tensors take; what could be freed was."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    return torch.tensor([total - free, torch.cuda.memory_reserved(), torch.cuda.memory_allocated()])

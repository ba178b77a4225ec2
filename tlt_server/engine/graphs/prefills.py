"""Plans of flashinfer's for prefills, made from what the CPU knows, without waiting for the GPU.

SGLang has flashinfer read all lengths back from the GPU, five times for a prefill: it waits for the decode step that
runs, and the drafter's prefill for the target's, where the CPU could go ahead. flashinfer takes lengths on the CPU too.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from tlt_server.engine.graphs.attention import replaceable


def plan_prefills(attention: Any) -> None:
    """Passes over any number of new tokens of each request."""
    for backend in replaceable(attention):
        updater = backend.indices_updater_prefill
        # override: it is told lengths on the CPU
        updater.update = Prefills(updater, backend.prefill_wrappers_paged)


class Prefills:
    """Stands in for the method `update` of SGLang's index updater for prefills, which reads lengths back five times.

    updater: SGLang's. paged: its wrappers of cached tokens.
    """

    def __init__(self, updater: Any, paged: Sequence[Any]) -> None:
        self._upstream, self._turns = updater.update, Turns()
        self._ends: tuple[torch.Tensor, torch.Tensor] | None = None
        ragged = updater.prefill_wrapper_ragged
        # override: SGLang hands them lengths that lie on the GPU
        ragged.begin_forward = partial(self._plan_new, ragged.begin_forward)
        for wrapper in paged:
            # override: likewise
            wrapper.begin_forward = partial(self._plan_cached, wrapper.begin_forward)

    def __call__(self, requests: Any, lens: Any, lens_cpu: Any, lens_sum: Any, prefix_lens: Any, **named: Any) -> None:
        """As upstream's: requests, lens, [bs] int64 on the GPU; lens_cpu the same on the CPU, or None."""
        prefixes = named.get("extend_prefix_lens_cpu")
        known = prefixes is not None and lens_cpu is not None and len(prefixes) == len(lens_cpu) == len(lens)
        if known and named["spec_info"] is None:
            every, cached = lens_cpu.to(torch.int32), torch.tensor(prefixes, dtype=torch.int32)
            self._ends = ends_of(every - cached), ends_of(cached if named["use_ragged"] else every)
        try:
            with self._turns.next():
                self._upstream(requests, lens, lens_cpu, lens_sum, prefix_lens, **named)
        finally:
            self._ends = None

    def _plan_new(self, plan: Callable[..., None], queries: Any, keys: Any, *args: Any, **named: Any) -> None:
        new = self._ends and self._ends[0]
        plan(queries if new is None else new, keys if new is None else new, *args, **named)

    def _plan_cached(
        self, plan: Callable[..., None], queries: Any, keys: Any, places: Any, last: Any, *args: Any, **named: Any
    ) -> None:
        if self._ends is not None:
            queries, keys = self._ends
            last = torch.ones(len(last), dtype=torch.int32)  # tokens of the last page, each of one
        plan(queries, keys, places, last, *args, **named)


class Turns:
    """Lets a plan be made once the one before has left the memory that both are copied to the GPU from.

    SGLang waited for the GPU in every step, and so for that. Here nothing else does, and a GPU that another process
    uses too may be late.
    """

    def __init__(self) -> None:
        self._copied: Any = None

    @contextmanager
    def next(self) -> Iterator[None]:
        """Within, a plan is made."""
        if self._copied is not None:
            self._copied.synchronize()
        yield
        self._copied = _mark()


def ends_of(lens: torch.Tensor) -> torch.Tensor:
    """[n] int32 lengths to [n + 1] int32: where each begins, and where the last one ends."""
    ends = torch.zeros(len(lens) + 1, dtype=torch.int32)
    torch.cumsum(lens, 0, dtype=torch.int32, out=ends[1:])
    return ends


def _mark() -> Any:
    """An event at the end of what the GPU has to do now."""
    event = torch.cuda.Event()
    event.record()
    return event

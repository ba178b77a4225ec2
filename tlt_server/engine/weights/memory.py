"""Memory offload for a trainer that shares the GPU: upstream's release and resume, made safe to call.

Upstream's end the server where a request is running or waiting, and where a tag is released or resumed twice, as
trainers do that are restarted. Here the second changes nothing. Memory is released by a server that is idle or held: by
a pause, or by a release before. Requests of a held server go back to the queue, with the tokens that they have.

    kv_cache     of target and drafter; emptied
    weights      of target and drafter, and the two further copies of the drafter (swap.py). The drafter's come
                 back as they were, out of the CPU's memory. The target's are anything until the trainer has sent them,
                 unless --enable-weights-cpu-backup keeps a copy of them too
    cuda_graph   with SGLANG_MEMORY_SAVER_CUDA_GRAPH=1; else graphs stay where they are, and nothing waits for them.
                 They come back with the last of the other two, as few trainers ask for them by name

While memory is released no step runs: who asks meanwhile waits until it is back. A pause outlasts it. Without
--enable-memory-saver nothing is given back, whatever is released; all else is the same.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from sglang.srt.constants import GPU_MEMORY_ALL_TYPES, GPU_MEMORY_TYPE_CUDA_GRAPH, GPU_MEMORY_TYPE_WEIGHTS
from sglang.srt.environ import envs
from sglang.srt.managers.io_struct import ReleaseMemoryOccupationReqInput, ResumeMemoryOccupationReqInput

from tlt_server.engine.events import EventLog
from tlt_server.engine.ranks import objections
from tlt_server.engine.requests.held import set_aside
from tlt_server.errors import OutOfTurn, UpdateRefused


class MemoryOffload:
    """What of a scheduler's GPU memory is released; each rank keeps one, and all are asked between the same two steps.

    router: upstream's weight updater, whose `offload_tags` are released. drafter: its `DrafterWeights`, or None.
    release, resume: upstream's methods, of which each does its part for the tags that it is given.
    """

    def __init__(
        self,
        router: Any,
        drafter: Any,
        events: EventLog,
        release: Callable[[ReleaseMemoryOccupationReqInput], Any],
        resume: Callable[[ResumeMemoryOccupationReqInput], Any],
    ) -> None:
        self._router, self._drafter, self._events = router, drafter, events
        self._release, self._resume = release, resume
        self._paused = self._promised = False
        self._graphs_released = bool(envs.SGLANG_MEMORY_SAVER_CUDA_GRAPH.get())

    def promise(self, tags: Sequence[str] | None, *, on: bool) -> None:
        """Lets no step run until memory of these tags is released, or takes that back. A collective.

        Raises UpdateRefused: a tag that does not exist.
        Raises OutOfTurn: a request is running or waiting, and generation is not paused.
        """
        if on and self._not_released(tags):
            self._require_rest()
        self._promised = on
        self._hold()

    def release(self, tags: Sequence[str] | None) -> None:
        """Gives memory of these tags back to the card, all if there are none. A collective. Raises as `promise`."""
        wanted = self._not_released(tags)
        if not wanted:
            return
        self._require_rest()
        if GPU_MEMORY_TYPE_WEIGHTS in wanted and self._drafter is not None:
            self._drafter.hold_staging()
        free = _free_bytes()
        with set_aside(self._router.scheduler):
            self._release(ReleaseMemoryOccupationReqInput(tags=wanted))
        self._hold()
        self._events.add("memory_released", tags=" ".join(wanted), freed_bytes=_free_bytes() - free)

    def take_back(self, tags: Sequence[str] | None) -> None:
        """Takes memory of these tags again, all that is released if there are none or only graphs stay. A collective.
        Raises UpdateRefused: a tag that does not exist."""
        wanted = [tag for tag in _checked(tags) if tag in self._router.offload_tags]
        if not wanted:
            return
        if self._router.offload_tags - set(wanted) == {GPU_MEMORY_TYPE_CUDA_GRAPH}:
            wanted.append(GPU_MEMORY_TYPE_CUDA_GRAPH)
        free = _free_bytes()
        self._resume(ResumeMemoryOccupationReqInput(tags=wanted))
        if GPU_MEMORY_TYPE_WEIGHTS in wanted and self._drafter is not None:
            self._drafter.let_stage()
        self._hold()
        if GPU_MEMORY_TYPE_WEIGHTS in wanted and self._router.state.drafter is not None:
            self._router.state.drafter.watchdog.hear("memory")
        self._events.add("memory_resumed", tags=" ".join(wanted), taken_bytes=free - _free_bytes())

    def paused(self) -> None:
        """Generation is to stay paused, also when all is back."""
        self._paused = True

    def continued(self) -> None:
        """Generation is to go on: when all is back, if it is not now."""
        self._paused = False
        self._hold()

    def _not_released(self, tags: Sequence[str] | None) -> list[str]:
        return [tag for tag in _checked(tags) if tag not in self._router.offload_tags]

    def _require_rest(self) -> None:
        rests = self._router.scheduler._engine_paused or self._router.is_fully_idle()
        busy = None if rests else "requests are running or waiting: pause generation, abort them, or let them end"
        if found := objections(self._router.tp_cpu_group, busy):
            raise OutOfTurn("; ".join(found))

    def _hold(self) -> None:
        """Lets steps run, or none."""
        released = self._router.offload_tags - (set() if self._graphs_released else {GPU_MEMORY_TYPE_CUDA_GRAPH})
        # override: no step may run while memory is given away; upstream runs what comes
        self._router.scheduler._engine_paused = self._paused or self._promised or bool(released)

    @property
    def has_weights(self) -> bool:
        return GPU_MEMORY_TYPE_WEIGHTS not in self._router.offload_tags

    def require_weights(self) -> None:
        """Raises OutOfTurn while the weights are released: they can neither be written nor read."""
        if not self.has_weights:
            raise OutOfTurn("the weights' memory is released: POST /resume_memory_occupation takes it back")


def _checked(tags: Sequence[str] | None) -> list[str]:
    for tag in tags or ():
        if tag not in GPU_MEMORY_ALL_TYPES:
            raise UpdateRefused(f"tag {tag!r}: must be one of {', '.join(GPU_MEMORY_ALL_TYPES)}")
    return list(dict.fromkeys(tags or GPU_MEMORY_ALL_TYPES))


def _free_bytes() -> int:
    """Of the card, as all its processes leave it; 0 without one."""
    return int(torch.cuda.mem_get_info()[0]) if torch.cuda.is_available() else 0

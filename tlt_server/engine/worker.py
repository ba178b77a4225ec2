"""SGLang's EAGLE worker with a drafter that can be swapped, and with speculation that can be turned off.

A decode step of upstream's, which this class stands around:

    control messages were handled; one of them may have put another drafter in force (engine/control.py)
    speculating?    engine/speculation.py; if not, the target decodes one token for each request (engine/plain.py)
    draft           num_steps passes of the drafter give a tree
    verify          one pass of the target over the tree accepts a part of it, and samples one token more
    draft-extend    the drafter reads the target's hidden states of what was accepted
    the result is settled, under overlap one step later: tokens are credited (engine/crediting.py) and counted

Behind a pass of the target a copy of its states is taken, where a drafter trainer is sent them (engine/tap.py).
"""

from collections.abc import Callable
from typing import Any

from sglang.srt.managers.utils import GenerationBatchResult
from sglang.srt.speculative.eagle_worker_v2 import EAGLEWorkerV2

from tlt_server.engine.plain import PlainSteps
from tlt_server.engine.swap import DrafterWeights
from tlt_server.engine.tap import Tap, tap_of


class EagleWorker(EAGLEWorkerV2):
    """Upstream's worker.

    weights: the drafter's, from when its pools are allocated.
    speculating: whether decode steps draft. Changed between two steps only, on all ranks alike.
    tap: None where no features are taken.
    """

    weights: DrafterWeights
    speculating = True
    tap: Tap | None = None

    def alloc_memory_pool(self, *args: Any, **kwargs: Any) -> None:
        """Upstream shares the target's embedding and head with the drafter here; before, they are not yet one."""
        super().alloc_memory_pool(*args, **kwargs)
        self.weights = DrafterWeights(self._draft_worker)

    def init_cuda_graphs(self) -> None:
        super().init_cuda_graphs()
        self.tap = tap_of(self)
        self._plain = PlainSteps(self)

    def forward_batch_generation(
        self,
        batch: Any,
        on_publish: Callable[..., None] | None = None,
        grammar_barrier: Callable[..., None] | None = None,
    ) -> GenerationBatchResult:
        prefill = batch.forward_mode.is_extend() or batch.is_extend_in_batch
        if self.tap and prefill:
            chunks = self.tap.chunks(batch)
            result = super().forward_batch_generation(batch, on_publish, grammar_barrier)
            self.tap.take_chunks(result, chunks)
            return result
        if self.speculating or prefill or batch.forward_mode.is_idle():
            return super().forward_batch_generation(batch, on_publish, grammar_barrier)
        result = self._plain.step(batch, on_publish, grammar_barrier)
        if self.tap:
            self.tap.take_step(batch.reqs, result, most=1)
        return result

    def verify(self, batch: Any, grammar_barrier: Callable[..., None] | None = None) -> GenerationBatchResult:
        result = super().verify(batch, grammar_barrier)
        if self.tap and not batch.forward_mode.is_idle():
            self.tap.take_step(batch.reqs, result, most=self.speculative_num_steps + 1)
        return result

    @property
    def war_fastpath_runner(self) -> Any:
        """Whose pass is the last of a step to read what the scheduler writes for the next one."""
        return super().war_fastpath_runner if self.speculating else self._plain.runner

    @property
    def spec_v2_attn_backends(self) -> tuple[Any, ...]:
        return (*super().spec_v2_attn_backends, self._plain.runner.attn_backend)

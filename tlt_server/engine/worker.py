"""SGLang's EAGLE worker with a drafter that can be swapped, and with speculation that can be turned off.

A decode step of upstream's, which this class stands around:

    control messages were handled; one of them may have put another drafter in force (engine/control.py)
    speculating?    engine/speculation.py; if not, the target decodes one token for each request (engine/plain.py)
    draft           num_steps passes of the drafter give a tree
    verify          one pass of the target over the tree accepts a part of it, and samples one token more
    draft-extend    the drafter reads the target's hidden states of what was accepted
    the result is settled, under overlap one step later: tokens are credited (engine/crediting.py) and counted
"""

from collections.abc import Callable
from typing import Any

from sglang.srt.managers.utils import GenerationBatchResult
from sglang.srt.speculative.eagle_worker_v2 import EAGLEWorkerV2

from tlt_server.engine.plain import PlainSteps
from tlt_server.engine.swap import DrafterWeights


class EagleWorker(EAGLEWorkerV2):
    """Upstream's worker.

    weights: the drafter's, from when its pools are allocated.
    speculating: whether decode steps draft. Changed between two steps only, on all ranks alike.
    """

    weights: DrafterWeights
    speculating = True

    def alloc_memory_pool(self, *args: Any, **kwargs: Any) -> None:
        """Upstream shares the target's embedding and head with the drafter here; before, they are not yet one."""
        super().alloc_memory_pool(*args, **kwargs)
        self.weights = DrafterWeights(self._draft_worker)

    def init_cuda_graphs(self) -> None:
        super().init_cuda_graphs()
        self._plain = PlainSteps(self)

    def forward_batch_generation(
        self,
        batch: Any,
        on_publish: Callable[..., None] | None = None,
        grammar_barrier: Callable[..., None] | None = None,
    ) -> GenerationBatchResult:
        prefill = batch.forward_mode.is_extend() or batch.is_extend_in_batch
        if self.speculating or prefill or batch.forward_mode.is_idle():
            return super().forward_batch_generation(batch, on_publish, grammar_barrier)
        return self._plain.step(batch, on_publish, grammar_barrier)

    @property
    def war_fastpath_runner(self) -> Any:
        """Whose pass is the last of a step to read what the scheduler writes for the next one."""
        return super().war_fastpath_runner if self.speculating else self._plain.runner

    @property
    def spec_v2_attn_backends(self) -> tuple[Any, ...]:
        return (*super().spec_v2_attn_backends, self._plain.runner.attn_backend)

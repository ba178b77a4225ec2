"""SGLang's EAGLE worker with a drafter that can be swapped.

A decode step of upstream's, which this class stands around:

    control messages were handled; one of them may have put another drafter in force (engine/control.py)
    draft           num_steps passes of the drafter give a tree
    verify          one pass of the target over the tree accepts a part of it, and samples one token more
    draft-extend    the drafter reads the target's hidden states of what was accepted
    the result is settled, under overlap one step later: tokens are credited (engine/crediting.py) and counted
"""

from typing import Any

from sglang.srt.speculative.eagle_worker_v2 import EAGLEWorkerV2

from tlt_server.engine.swap import DrafterWeights


class EagleWorker(EAGLEWorkerV2):
    """Upstream's worker; `weights` are the drafter's, from when its pools are allocated."""

    weights: DrafterWeights

    def alloc_memory_pool(self, *args: Any, **kwargs: Any) -> None:
        """Upstream shares the target's embedding and head with the drafter here; before, they are not yet one."""
        super().alloc_memory_pool(*args, **kwargs)
        self.weights = DrafterWeights(self._draft_worker)

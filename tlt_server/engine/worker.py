"""SGLang's EAGLE worker with a drafter that can be swapped, and with another arm, or none, from step to step.

A decode step of upstream's, which this class stands around:

    control messages were handled; one of them may have put another drafter in force, or announced other arms
        (engine/control.py, engine/speculation.py)
    the batch size says which arm the step has
    none?           the target decodes one token for each request (engine/plain.py)
    else            the arm is put in force: attributes, attention backends, CUDA graphs (engine/arms.py)
    draft           num_steps passes of the drafter give a tree
    verify          one pass of the target over the tree accepts a part of it, and samples one token more
    draft-extend    the drafter reads the target's hidden states of what was accepted (engine/drafting.py)
    the result is settled, under overlap one step later: tokens are credited (engine/crediting.py) and counted

Behind a pass of the target a copy of its states is taken, where a drafter trainer is sent them (engine/tap.py).
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from sglang.srt.managers.utils import GenerationBatchResult
from sglang.srt.speculative.eagle_worker_v2 import EAGLEWorkerV2

from tlt_server.config import Arm, arms_of
from tlt_server.engine.arms import Arms
from tlt_server.engine.graphs import Graphs
from tlt_server.engine.plain import PlainSteps
from tlt_server.engine.swap import DrafterWeights
from tlt_server.engine.tap import Tap, tap_of
from tlt_server.engine.timing import timings
from tlt_server.strategy.arms import ArmTable, Choice, pinned_table
from tlt_server.strategy.costs import Timing


class EagleWorker(EAGLEWorkerV2):
    """Upstream's worker.

    weights: the drafter's, from when its pools are allocated.
    all_arms: those of this server, the first of them in force at first.
    captured: the largest batch size of each arm: of its CUDA graphs where there are some and several arms, else any.
    timings: of each arm's steps, where there are several, and CUDA graphs.
    table: the arm of each batch size. Changed between two steps only, on all ranks alike.
    speculation: is told of each step; None before the scheduler has one.
    tap: None where no features are taken.
    """

    weights: DrafterWeights
    timings: Sequence[Timing]
    table: ArmTable
    captured: Mapping[Arm, int]
    speculation: Any = None
    tap: Tap | None = None

    def alloc_memory_pool(self, *args: Any, **kwargs: Any) -> None:
        """Upstream shares the target's embedding and head with the drafter here; before, they are not yet one."""
        super().alloc_memory_pool(*args, **kwargs)
        self.weights = DrafterWeights(self._draft_worker)

    def init_attention_backends(self) -> None:
        """After this upstream captures the target's graphs, for which each arm has its own."""
        super().init_attention_backends()
        self.all_arms = arms_of(self.server_args)
        self._draft_worker.widest = self.topk
        self._graphs = Graphs(self, self.all_arms)
        self._graphs.withhold()

    def init_cuda_graphs(self) -> None:
        super().init_cuda_graphs()
        self._graphs.release()
        self._arms = Arms(self, self.all_arms, self._graphs)
        self.tap = tap_of(self)
        self._plain = PlainSteps(self)
        self._last: Choice = None
        self.captured = self._graphs.captured(self._target_worker.model_runner.max_running_requests)
        several = len(self.all_arms) > 1
        self.timings = timings(self._arms.by_arm, self._plain.runner.decode_cuda_graph_runner) if several else []
        self.table = pinned_table(self.all_arms[0], self.captured)

    def forward_batch_generation(
        self,
        batch: Any,
        on_publish: Callable[..., None] | None = None,
        grammar_barrier: Callable[..., None] | None = None,
    ) -> GenerationBatchResult:
        if batch.forward_mode.is_extend() or batch.is_extend_in_batch or batch.forward_mode.is_idle():
            return self._prefill(batch, on_publish, grammar_barrier)
        arm = self.table.arm(len(batch.reqs))
        self._arms.put(arm)
        self._launched(arm, batch)
        if arm is not None:
            result = super().forward_batch_generation(batch, on_publish, grammar_barrier)
        else:
            result = self._plain.step(batch, on_publish, grammar_barrier)
            if self.tap:
                self.tap.take_step(batch.reqs, result, most=1)
        result.arm = arm
        return result

    def verify(self, batch: Any, grammar_barrier: Callable[..., None] | None = None) -> GenerationBatchResult:
        result = super().verify(batch, grammar_barrier)
        if self.tap and not batch.forward_mode.is_idle():
            self.tap.take_step(batch.reqs, result, most=self.speculative_num_steps + 1)
        return result

    @property
    def war_fastpath_runner(self) -> Any:
        """Whose pass is the last of a step to read what the scheduler writes for the next one."""
        return super().war_fastpath_runner if self._last is not None else self._plain.runner

    @property
    def spec_v2_attn_backends(self) -> tuple[Any, ...]:
        return (*super().spec_v2_attn_backends, *self._arms.attention_backends(), self._plain.runner.attn_backend)

    def _prefill(self, batch: Any, *hooks: Any) -> GenerationBatchResult:
        """With what SGLang was started with. An idle batch runs nothing."""
        self._arms.put(None)
        if self.speculation is not None:
            self.speculation.interrupted()
        chunks = self.tap.chunks(batch) if self.tap and not batch.forward_mode.is_idle() else None
        result = super().forward_batch_generation(batch, *hooks)
        if self.tap and chunks is not None:
            self.tap.take_chunks(result, chunks)
        return result

    def _launched(self, arm: Choice, batch: Any) -> None:
        self._last = arm
        if self.speculation is not None:
            self.speculation.launched(arm, len(batch.reqs), sum(req.kv_committed_len for req in batch.reqs))

"""SGLang's EAGLE worker with a drafter that can be swapped, and with another arm, or none, from step to step.

docs/architecture.md follows a step through this folder. Control messages were handled before it: one of them may have
activated another drafter, or announced other arms.
"""

import logging
from collections.abc import Callable, Mapping
from typing import Any

import torch
from sglang.srt.managers.utils import GenerationBatchResult
from sglang.srt.speculative.eagle_worker_v2 import EAGLEWorkerV2
from tlt_client import schemas

from tlt_server.config import Arm, ServerConfig
from tlt_server.engine.decode.arms import Arms, arms_of
from tlt_server.engine.decode.history import Histories
from tlt_server.engine.decode.missed import PASSES, Missed
from tlt_server.engine.decode.plain import PlainSteps
from tlt_server.engine.decode.routed import routed_experts
from tlt_server.engine.decode.timing import pass_timings, tell, timings
from tlt_server.engine.decode.verify import prepare_last, settle_greed
from tlt_server.engine.features.tap import Tap, tap_of
from tlt_server.engine.graphs.attention import replaceable
from tlt_server.engine.graphs.capture import Graphs, draft_context
from tlt_server.engine.graphs.compiled import compile_kernels
from tlt_server.engine.ranks import of_first
from tlt_server.engine.sampling.filters import compile_filters
from tlt_server.engine.sampling.logits import keep_type
from tlt_server.engine.sampling.penalties import Penalties
from tlt_server.engine.weights.swap import DrafterWeights
from tlt_server.strategy.arms import PLAIN, ArmTable, Choice, pinned_table
from tlt_server.strategy.costs import StepCosts
from tlt_server.strategy.defaults import worth_having

logger = logging.getLogger(__name__)


class EagleWorker(EAGLEWorkerV2):
    """Upstream's worker.

    weights: the drafter's, from when its pools are allocated; None: there is none.
    all_arms: those of this server that have graphs, or need none, the first of them active at first.
    finds_arms: whether it keeps of its arms those that profiling retains.
    captured: the largest batch size of each arm: of its CUDA graphs where there are some and several arms, else any.
    graphs: what was captured, and what it takes.
    costs: of each arm's steps, where there are several, and CUDA graphs or arms to be found; else None.
    table: the arm of each batch size. Changed between two steps only, on all ranks alike.
    speculation: is told of each step; None before the scheduler has one.
    tap: None where no features are taken.
    history: None where no arm drafts from it.
    """

    weights: DrafterWeights | None = None
    finds_arms: bool
    graphs: schemas.Graphs
    costs: StepCosts | None
    table: ArmTable
    captured: Mapping[Arm, int]
    speculation: Any = None
    tap: Tap | None = None
    history: Histories | None = None

    def alloc_memory_pool(self, *args: Any, **kwargs: Any) -> None:
        """Upstream shares the target's embedding and head with the drafter here; before, they are not yet one."""
        super().alloc_memory_pool(*args, **kwargs)
        if self._draft_worker.drafts:
            self.weights = DrafterWeights(self._draft_worker)

    def init_attention_backends(self) -> None:
        """After this upstream captures the target's graphs, for which each arm has its own."""
        super().init_attention_backends()
        self.all_arms = arms_of(self.server_args)
        self._routed = routed_experts(self)
        self._draft_worker.widest = self.topk
        keep_type(self._target_worker.model_runner)
        self._draft_worker.add_noise()
        self._in_flight = 0  # tokens of a request that the step before gives at most
        config = ServerConfig.from_environment()
        self.finds_arms = config.finds_arms and len(self.all_arms) > 1
        budget = None if config.graph_memory_gb is None else config.graph_memory_gb * 1e9
        self._graphs = Graphs(self, self.all_arms, config.graph_sharing, budget)
        self._graphs.withhold()

    def init_cuda_graphs(self) -> None:
        super().init_cuda_graphs()
        self._graphs.release()
        self._arms = Arms(self, self.all_arms, self._graphs)
        self.all_arms = tuple(arm for arm in self.all_arms if arm in self._arms.by_arm)
        self.tap = tap_of(self)
        with self._graphs.captures.capturing(PLAIN, (), 1) as made:
            self._plain = PlainSteps(self)
            made.append(self._plain.runner.decode_cuda_graph_runner)
        compile_filters(self._target_worker.model_runner.device)
        slots = self.req_to_token_pool.req_to_token.shape[0]
        self._keep_history(slots)
        self._penalties = Penalties(slots, self._target_worker.model_config.vocab_size, self.device)
        self._last: Choice = None
        largest = self._target_worker.model_runner.max_running_requests
        self.captured = self._graphs.captured(largest)
        self.costs = self._timed(largest)
        if self.finds_arms:
            self._retain(largest)
        self.graphs = self._graphs.describe()
        if torch.device(self.device).type != "cpu":
            compile_kernels(self, self.captured, largest)
        self._run_ahead()
        self.table = pinned_table(self.all_arms[0], self.captured)

    def _run_ahead(self) -> None:
        """Lets the scheduler launch a step while the one before runs, where all passes read lengths on the GPU. SGLang
        has them read back first for what it counts by them, and for pictures' positions."""
        args, of = self.server_args, self._target_worker.model_config
        backends = [each for each in self.spec_v2_attn_backends if each is not None]
        if args.enable_forward_pass_metrics or of.is_multimodal or not all(map(replaceable, backends)):
            return
        for each in backends:
            # override: on the CPU no graph needs lengths; upstream asks once, after this
            each.needs_cpu_seq_lens = False

    def _keep_history(self, slots: int) -> None:
        """From here on, where an arm is to draft from it. slots: of the request pool."""
        if depths := [arm.num_steps for arm in self.all_arms if arm.of_history]:
            self.history = Histories(ServerConfig.from_environment().history_tokens, slots, max(depths))
            self._draft_worker.history = self.history

    @property
    def chooses(self) -> bool:
        """Whether there is more than one arm to decode with: what history has for a batch is known only then."""
        return len(self.all_arms) > 1 or self.finds_arms or self.history is not None

    def _timed(self, largest: int) -> StepCosts | None:
        if not self.chooses:
            return None
        found = timings(self._arms.by_arm, self._plain.runner.decode_cuda_graph_runner)
        padded = bool(found)  # to the next batch size that has a graph
        if not found and self.finds_arms:
            found = pass_timings(self._plain.runner, self._draft_worker.draft_runner, self.all_arms, largest)
        tell(found)
        return StepCosts(found, padded=padded) if found else None

    def _retain(self, largest: int) -> None:
        """Gives up the arms that could not be best at any batch size, however much they had accepted. A collective."""
        assert self.costs is not None
        kept = worth_having(self.costs, self.captured, largest)
        kept = of_first(self._target_worker.model_runner.tp_group.cpu_group, kept)  # ranks do not time alike
        with self._graphs.giving_up(kept):
            self._arms.keep(kept)
        self.all_arms = kept
        if not any(arm.of_history for arm in kept):
            self.history = None
        self.captured = {arm: self.captured[arm] for arm in kept}
        self.costs = self.costs.of(kept)
        logger.info("arms retained after profiling: %s", ", ".join(map(str, kept)))

    def forward_batch_generation(
        self,
        batch: Any,
        on_publish: Callable[..., None] | None = None,
        grammar_barrier: Callable[..., None] | None = None,
    ) -> GenerationBatchResult:
        settle_greed(batch)
        if (vocabulary := self._draft_worker.vocabulary) is not None:
            vocabulary.follow()
        if batch.forward_mode.is_extend() or batch.is_extend_in_batch or batch.forward_mode.is_idle():
            return self._prefill(batch, on_publish, grammar_barrier)
        arm = self.table.arm(len(batch.reqs))
        self._draft_worker.most_keys = None
        behind = self._catch_up(batch, arm)
        if self.history is not None:
            self.history.settle()
        self._arms.put(arm)
        self._last = arm
        counted = [req.kv_committed_len for req in batch.reqs]
        self._know_lengths(batch, arm, counted)
        batch.sampling_info.penalties = self._penalties  # override: of a copy for one step: what verification is handed
        if self.speculation is not None:
            self.speculation.launched(arm, len(batch.reqs), sum(counted), behind)
        if arm is not None:
            result = super().forward_batch_generation(batch, on_publish, grammar_barrier)
        else:
            result = self._plain.step(batch, on_publish, grammar_barrier)
            if self.tap:
                self.tap.take_step(batch.reqs, result, most=1)
        result.arm, self._in_flight = arm, 1 if arm is None else arm.path
        if self.history is not None and arm is not None and arm.of_history:
            result.drafted = self.history.drafted
        if self.history is not None:
            self.history.launched(batch.reqs, result)
        return result

    def verify(self, batch: Any, grammar_barrier: Callable[..., None] | None = None) -> GenerationBatchResult:
        result = super().verify(batch, grammar_barrier)
        if self._routed:
            self._routed.follow(result)
        self._penalties.count(batch, result.next_token_ids, result.accept_lens)
        if self.tap and not batch.forward_mode.is_idle():
            self.tap.take_step(batch.reqs, result, most=self._draft_worker.rows)
        return result

    @property
    def war_fastpath_runner(self) -> Any:
        """Whose pass is the last of a step to read what the scheduler writes for the next one."""
        if self._last is None:
            return self._plain.runner
        return super().war_fastpath_runner if self.weights is not None else self._target_worker.model_runner

    @property
    def spec_v2_attn_backends(self) -> tuple[Any, ...]:
        return (*super().spec_v2_attn_backends, *self._arms.attention_backends(), self._plain.runner.attn_backend)

    def _prefill(self, batch: Any, *hooks: Any) -> GenerationBatchResult:
        """With what SGLang was started with. An idle batch runs nothing."""
        self._arms.put(None)
        if self.speculation is not None:
            self.speculation.interrupted()
        if self._plain.missed is not None:
            self._plain.missed.forget(batch.reqs)
        remembers = self.history is not None and not batch.forward_mode.is_idle()
        if self.history is not None and remembers:
            self.history.begin(batch.reqs)
        if (vocabulary := self._draft_worker.vocabulary) is not None:
            vocabulary.prompted(batch)
        chunks = self.tap.chunks(batch) if self.tap and not batch.forward_mode.is_idle() else None
        self._penalties.begin(batch)
        prepare_last(batch, self._penalties)
        result = super().forward_batch_generation(batch, *hooks)
        self._penalties.count(batch, result.next_token_ids)
        if self.tap and chunks is not None:
            self.tap.take_chunks(result, chunks)
        if self.history is not None and remembers:
            self.history.launched(batch.reqs, result, prefill=True)
        return result

    def _catch_up(self, batch: Any, arm: Choice) -> int:
        """How many tokens the drafter has missed. Before a step with an arm it reads them, few with the arm, else with
        what SGLang was started with."""
        missed = self._plain.missed
        if missed is None:
            return 0
        behind = missed.counts(batch.reqs)
        if arm is None:
            self._read_between(batch, missed, behind)
        if arm is None or not any(behind):
            return sum(behind)
        _wait_for_lengths(batch)
        few = max(behind) <= PASSES * arm.path
        self._arms.put(arm if few else None)
        read = missed.read_in_step if few else missed.read_as_prefill
        with draft_context(self._draft_worker):
            read(batch, behind)
        return sum(behind)

    def _know_lengths(self, batch: Any, arm: Choice, counted: list[int]) -> None:
        """On the CPU, as far as a step needs them: all tokens are counted but those of the step before, at most."""
        if batch.seq_lens_cpu is not None:
            return
        graphs = self._plain.in_graphs if arm is None else self._arms.in_graphs(arm)
        if len(batch.reqs) > graphs:
            _wait_for_lengths(batch)
        else:
            self._draft_worker.most_keys = sum(counted) + len(counted) * self._in_flight

    def _read_between(self, batch: Any, missed: Missed, behind: list[int]) -> None:
        """Before a plain step, where a smaller batch would be drafted for."""
        if any(arm is not None and not arm.of_history for arm in self.table.arms) and (due := missed.due(behind)):
            if self.speculation is not None:
                self.speculation.interrupted()
            self._arms.put(None)
            with draft_context(self._draft_worker):
                missed.read_as_prefill(batch, due)


def _wait_for_lengths(batch: Any) -> None:
    """Until the GPU has done the step before."""
    if batch.seq_lens_cpu is None:
        batch.seq_lens_cpu = batch.seq_lens.cpu()

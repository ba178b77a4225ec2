"""Attention backends and CUDA graphs of arms, captured for the batch sizes that each of them may be chosen at, as far
as memory for them goes (strategy/graph_budget.py).

SGLang's constructors read an arm from settings that hold for the whole server. While they run, those settings are the
arm's. Without graphs, as on a CPU, everything else happens alike.
"""

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from copy import copy
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

import torch
from tlt_client import schemas

from tlt_server.config import Arm, GraphSharing
from tlt_server.engine.graphs.attention import attend_drafts, attend_extends, attend_verification
from tlt_server.engine.graphs.memory import Captures
from tlt_server.engine.graphs.workspace import trim
from tlt_server.engine.ranks import lowest
from tlt_server.strategy.arms import DRAFT_EXTEND, DRAFTING, VERIFICATION, alike, is_chain
from tlt_server.strategy.graph_budget import GRAPH_BYTES, Sizes, estimated, fitted, row_bytes

MOST_VERIFIED = 512
"""Tokens that an arm among several verifies in one pass, at most: beyond, a pass is bound by arithmetic, and costs more
than it can bring."""


def sizes_of(arm: Arm, sizes: Sequence[int]) -> list[int]:
    """Of a server's ascending batch sizes, those that an arm among several gets graphs for; at least one."""
    return [size for size in sizes if size * arm.num_draft_tokens <= MOST_VERIFIED] or list(sizes[:1])


@cache
def capture_stream() -> Any:
    """The stream that all graphs of this process are captured on."""
    return torch.get_device_module().Stream()


class Pass(NamedTuple):
    """One of the passes of a step: an attention backend, and a runner of CUDA graphs; None: there is none."""

    attention: Any
    graphs: Any


class Graphs:
    """Makes the passes of a worker's arms.

    worker: `EagleWorker`. Its pools and SGLang's own attention backends are there, and no graph of a decode step.
    sharing: `none`: each arm has all its passes to itself, at all batch sizes.
    budget: bytes that graphs may take; None: any.
    wanted: batch sizes that each arm would be captured at, ascending; empty ones: there are no graphs here.
    sizes: those that fit into the budget; arms that do not are left out.

    Raises ConfigError: none fits.
    """

    def __init__(self, worker: Any, arms: Sequence[Arm], sharing: GraphSharing, budget: float | None = None) -> None:
        self._draft, self._target = worker.draft_worker, worker.target_worker.model_runner
        self._runners = (self._target, self._draft.draft_runner)
        self._every = _captured_sizes(self._target)
        self.captures = Captures(sharing)
        limited = len(arms) > 1 and sharing is GraphSharing.POOL
        self.wanted: Sizes = {arm: sizes_of(arm, self._every) if limited else self._every for arm in arms}
        self._budget = budget if self._every else None
        self.sizes = self.wanted if self._budget is None else fitted(self.wanted, self._estimate, self._budget)

    def refit(self, done: Collection[Arm]) -> None:
        """Leaves out what does not fit any more, now that it is known what these arms take. A collective."""
        if self._budget is None or not done:
            return
        took = -lowest(self._target.tp_group.cpu_group, -self.captures.taken)  # ranks must capture the same
        captured = {arm: self.sizes[arm] for arm in done}
        rest = self._budget - took - len(self._every) * GRAPH_BYTES  # plain decoding's come last
        self.sizes = fitted(self.sizes, self._estimate, self._estimate(captured) + rest, captured)

    @contextmanager
    def giving_up(self, kept: Collection[Arm]) -> Iterator[None]:
        """Within, the graphs of all arms but these are let go of."""
        self.wanted, self.sizes = ({arm: sizes[arm] for arm in kept} for sizes in (self.wanted, self.sizes))
        with self.captures.freeing(set(kept)):
            yield

    def _estimate(self, sizes: Sizes) -> float:
        model = self._target.model_config
        row = row_bytes(
            model.vocab_size, model.hidden_size, model.hf_text_config.intermediate_size, model.dtype.itemsize
        )
        return estimated(sizes, self._every, row)

    def describe(self) -> schemas.Graphs:
        """As our routes show it, once all is captured."""
        return self.captures.describe(self.wanted, self.sizes, self._budget)

    def withhold(self) -> None:
        """Until `release`, SGLang captures no decode graphs: its own would be of the widest arm, at every size."""
        if not self._every:
            return
        self._withheld = _graph_config()
        decode = replace(self._withheld.decode, backend="disabled")
        _override(cuda_graph_config=replace(self._withheld, decode=decode))
        rows = max(self._every[-1], *(sizes[-1] * arm.num_draft_tokens for arm, sizes in self.sizes.items()))
        for runner in self._runners:
            # override: upstream reckons with its own batch sizes times the widest arm
            runner.max_decode_logits_rows = lambda: rows

    def release(self) -> None:
        """Graphs can be captured again."""
        if self._every:
            _override(cuda_graph_config=self._withheld)

    def captured(self, largest: int) -> dict[Arm, int]:
        """The largest batch size of each arm; `largest`, the server's, where nothing limits it but that."""
        limited = len(self.wanted) > 1 and bool(self._every)
        limited |= self._budget is not None
        return {arm: sizes[-1] if limited else largest for arm, sizes in self.sizes.items()}

    def sharing(self, kind: str, arm: Arm) -> tuple[Arm, ...]:
        """The arms that have one pass of this kind with this one."""
        return (arm,) if self.captures.sharing is GraphSharing.NONE else alike(kind, arm, self.wanted)

    def verification(self, arm: Arm) -> Pass:
        """The target's pass over as many tokens as the arm verifies."""
        from sglang.srt.model_executor.runner.decode_cuda_graph_runner import DecodeCudaGraphRunner

        with self._making(VERIFICATION, arm, arm.num_draft_tokens) as made:
            attention = self._trimmed(self._target._get_attention_backend())
            attend_verification(attention, arm.num_draft_tokens, chain=is_chain(arm))
            if self._every:
                runner = DecodeCudaGraphRunner(
                    self._target,
                    attn_backend=attention,
                    speculative_num_steps=arm.num_steps,
                    speculative_num_draft_tokens=arm.num_draft_tokens,
                )
                made.append(runner)
        return Pass(attention, *made or [None])

    def drafting(self, arm: Arm) -> Pass:
        """The drafter's passes of one step, all in one graph; the drafter is set up for the arm. None for one step, and
        for what history drafts."""
        if arm.of_history:
            return Pass(None, None)
        from sglang.srt.speculative.eagle_draft_cuda_graph_runner import EAGLEDraftCudaGraphRunner

        draft = self._draft
        with self._making(DRAFTING, arm, arm.topk) as made:
            attention = self._trimmed(self._backends(arm).create_decode_backend())
            # override: the graph runner captures what the draft worker holds
            draft.draft_attn_backend = draft.draft_runner.draft_attn_backend = attention
            attend_drafts(attention)
            if attention is not None and self._every:
                made.append(EAGLEDraftCudaGraphRunner(draft))
        return Pass(attention, *made or [None])

    def draft_extend(self, arm: Arm) -> Pass:
        """The drafter's pass over what can have been accepted, a path through the tree. None where there is none."""
        if not self._draft.drafts:
            return Pass(None, None)
        from tlt_server.engine.graphs.extending import DraftExtendGraphs

        with self._making(DRAFT_EXTEND, arm, arm.path) as made:
            attention = self._trimmed(self._backends(arm).create_draft_extend_backend())
            attend_extends(attention)
            if self._every and _can_extend_in_graph(attention):
                made.append(DraftExtendGraphs(self._draft, draft_extend_attn_backend=attention))
        return Pass(attention, *made or [None])

    def _backends(self, arm: Arm) -> Any:
        from sglang.srt.speculative.draft_utils import DraftBackendFactory

        return DraftBackendFactory(self._draft.server_args, self._draft.draft_runner, arm.topk, arm.num_steps)

    def _trimmed(self, attention: Any) -> Any:
        if self.captures.sharing is GraphSharing.POOL:
            trim(attention)
        return attention

    @contextmanager
    def _making(self, kind: str, arm: Arm, width: int) -> Iterator[list[Any]]:
        """Within, SGLang's settings are those of a server with this arm alone, and a pass is captured as `Captures` has
        it. Graphs are of the sizes of that arm, of those that share the pass, that has most."""
        from sglang.srt.runtime_context import get_spec

        sizes = max((self.sizes.get(each, ()) for each in self.sharing(kind, arm)), key=len)
        values = {
            "speculative_num_steps": arm.num_steps,
            "speculative_eagle_topk": arm.topk,
            "speculative_num_draft_tokens": arm.num_draft_tokens if kind == DRAFTING else width,
        }
        context = nullcontext() if kind == VERIFICATION else draft_context(self._draft)
        before = [runner.server_args for runner in self._runners]
        bag = {name: getattr(get_spec(), name) for name in values}
        _override(**values)
        for runner in self._runners:
            config = runner.server_args.cuda_graph_config
            if sizes:
                config = replace(config, decode=replace(config.decode, bs=list(sizes), max_bs=sizes[-1]))
            # override: upstream's constructors read an arm from settings of the whole server; put back after
            runner.server_args = changed(runner.server_args, **values, cuda_graph_config=config)
        try:
            with context, self.captures.capturing(kind, self.sharing(kind, arm), width) as made:
                yield made
        finally:
            _override(**bag)
            for runner, server_args in zip(self._runners, before, strict=True):
                # override: as it was before
                runner.server_args = server_args


def changed(server_args: Any, **values: Any) -> Any:
    """A copy of `ServerArgs`, which lets nobody assign its fields, with other values."""
    copied = copy(server_args)
    for name, value in values.items():
        # override: of a copy: ServerArgs refuses assignment once a server has started
        object.__setattr__(copied, name, value)
    return copied


def _override(**values: Any) -> None:
    from sglang.srt.runtime_context import get_context

    # override: upstream's constructors read an arm from the runtime context; put back after
    get_context().override("tlt-server", **values)


def _graph_config() -> Any:
    from sglang.srt.runtime_context import get_exec

    return get_exec().graph.cuda_graph_config


def _captured_sizes(target: Any) -> Sequence[int]:
    """Batch sizes that SGLang would capture decode graphs at, ascending; empty where it captures none."""
    from sglang.srt.model_executor.runner.base_cuda_graph_runner import get_batch_sizes_to_capture

    config = _graph_config()
    if target.device != "cuda" or config is None or config.decode.backend == "disabled":
        return ()
    sizes: Sequence[int] = get_batch_sizes_to_capture(target)[0]
    return sizes


def _can_extend_in_graph(attention: Any) -> bool:
    """Whether SGLang captures draft-extend with this backend, of those that our verification is tested with."""
    return any(each.__name__ in ("FlashInferAttnBackend", "TritonAttnBackend") for each in type(attention).__mro__)


@contextmanager
def draft_context(draft: Any) -> Iterator[None]:
    """What SGLang wraps around all that its draft worker initialises."""
    from sglang.srt.layers.moe.utils import speculative_moe_a2a_backend_context, speculative_moe_backend_context

    runner = draft.draft_runner
    moe, moe_a2a = speculative_moe_backend_context(), speculative_moe_a2a_backend_context()
    with draft.draft_tp_context(runner.tp_group), moe, moe_a2a:
        yield

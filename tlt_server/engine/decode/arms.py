"""The arms of a speculative worker: what each of them decodes with, and which one is active.

Upstream's workers read their arm from three attributes each, and run attention backends and CUDA graphs that were made
for it. Here these are made once for each arm (engine/graphs/capture.py), what arms have in common once for all, and
exchanged between two steps: a dozen attributes; nothing is allocated or captured. All else that depends on an arm is
sized by the *widest*, the elementwise maximum of all arms, which SGLang itself is started with: KV slots, and the
candidates that draft-extend leaves.
"""

from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

from tlt_server.config import Arm, ServerConfig, widest
from tlt_server.engine.graphs.capture import Graphs, Pass
from tlt_server.engine.graphs.prefills import plan_prefills
from tlt_server.strategy.arms import DRAFT_EXTEND, DRAFTING, VERIFICATION


class Parts(NamedTuple):
    """What an arm decodes with. chain: upstream's buffers of a chain's parents and scores, the same in every step; None
    for trees."""

    drafting: Pass
    verification: Pass
    draft_extend: Pass
    chain: tuple[Any, Any] | None


class Arms:
    """The arms of one rank's `EagleWorker`.

    graphs: makes their passes; nothing is withheld any more.
    active: what the worker is set up for; None: what SGLang was started with, for prefills, whose graphs it captured
        with that, and for steps that do not speculate.
    by_arm: the parts of each that was captured.
    """

    def __init__(self, worker: Any, arms: Sequence[Arm], graphs: Graphs) -> None:
        self._worker, self._draft, self._target = worker, worker.draft_worker, worker.target_worker.model_runner
        self._widest = widest(arms)
        self._own = Parts(
            Pass(None, None),  # without an arm nothing drafts, and what SGLang made for that can go
            Pass(self._target.attn_backend, None),
            Pass(self._draft.draft_extend_attn_backend, None),
            self._shaped(self._widest),
        )
        for own in (self._own.verification, self._own.draft_extend):
            plan_prefills(own.attention)
        self._shared: dict[tuple[str, tuple[Arm, ...]], Pass] = {}
        # what is captured later uses the memory of what was captured first: the largest goes first
        ordered = sorted(arms, key=lambda arm: arm.num_draft_tokens, reverse=True)
        self.by_arm: dict[Arm, Parts] = {}
        for arm in ordered:
            graphs.refit(self.by_arm)
            if arm in graphs.sizes:
                self.by_arm[arm] = self._made(arm, graphs)
        self._shared.clear()
        self._put(None)

    def keep(self, arms: Collection[Arm]) -> None:
        """Lets go of all others; none of them is active."""
        self.by_arm = {arm: parts for arm, parts in self.by_arm.items() if arm in arms}

    def put(self, arm: Arm | None) -> None:
        """Activates an arm, or what SGLang was started with."""
        if arm != self.active:
            self._put(arm)

    def in_graphs(self, arm: Arm) -> int:
        """The largest batch that has a CUDA graph for each of an arm's passes; 0: there is none."""
        passes = [each for each in self.by_arm[arm][:3] if each.attention is not None]
        return min(0 if each.graphs is None else each.graphs.max_bs for each in passes)

    def attention_backends(self) -> tuple[Any, ...]:
        """Of all arms."""
        return tuple(part.attention for parts in self.by_arm.values() for part in parts[:3])

    def _put(self, arm: Arm | None) -> None:
        parts = self._own if arm is None else self.by_arm[arm]
        self._set_shape(arm or self._widest)
        draft = self._draft
        # override: another arm's passes between two steps; upstream makes those of one arm, at start
        draft.of_history = arm is not None and arm.of_history
        draft.draft_attn_backend = draft.draft_runner.draft_attn_backend = parts.drafting.attention
        draft.draft_extend_attn_backend = draft.draft_runner.attn_backend = parts.draft_extend.attention
        draft.cuda_graph_runner = parts.drafting.graphs
        draft.cuda_graph_runner_for_draft_extend = parts.draft_extend.graphs
        self._target.attn_backend, self._target.decode_cuda_graph_runner = parts.verification
        if parts.chain is not None:
            # override: a chain's buffers are as long as the arm
            draft._topk1_parents_prealloc, draft._topk1_score_indices_prealloc = parts.chain
        self.active = arm

    def _set_shape(self, arm: Arm) -> None:
        for each in (self._worker, self._draft):
            # override: upstream's workers read their arm from these
            each.speculative_num_steps, each.topk = arm.num_steps, arm.topk
            each.speculative_num_draft_tokens = arm.num_draft_tokens

    def _shaped(self, arm: Arm) -> tuple[Any, Any] | None:
        """Sets the workers up for an arm; returns its chain's buffers."""
        self._set_shape(arm)
        if arm.topk > 1:
            return None
        self._draft._rebuild_topk1_chain_buffers()
        return self._draft._topk1_parents_prealloc, self._draft._topk1_score_indices_prealloc

    def _made(self, arm: Arm, graphs: Graphs) -> Parts:
        chain = self._shaped(arm)
        makers = {VERIFICATION: graphs.verification, DRAFT_EXTEND: graphs.draft_extend, DRAFTING: graphs.drafting}
        for kind, make in makers.items():
            key = kind, graphs.sharing(kind, arm)
            if key not in self._shared:
                self._shared[key] = make(arm)
        verification, draft_extend, drafting = (self._shared[kind, graphs.sharing(kind, arm)] for kind in makers)
        return Parts(drafting, verification, draft_extend, chain)


def arms_of(server_args: Any) -> tuple[Arm, ...]:
    """The arms of a speculative server, in one of its processes; the one of `server_args` where the user set others."""
    a = server_args
    own = Arm(a.speculative_num_steps, a.speculative_eagle_topk, a.speculative_num_draft_tokens)
    arms = ServerConfig.from_environment().to_try
    return arms if widest(arms) == own else (own,)

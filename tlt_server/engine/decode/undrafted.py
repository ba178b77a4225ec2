"""What stands in place of a drafter on a server without one, where history alone drafts: it loads and runs nothing."""

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.speculative.base_spec_worker import EagleDraftWorkerBase
from sglang.srt.speculative.eagle_info import EagleDraftInput
from sglang.srt.speculative.eagle_utils import default_tree_mask_mode

from tlt_server.config import ServerConfig
from tlt_server.engine.decode.drafting import Drafting, draft_from_history
from tlt_server.engine.decode.history import Histories


def draft_worker_class() -> type:
    """Of this server."""
    return NoDrafter if ServerConfig.from_environment().without_drafter else Drafting


class NoDrafter(EagleDraftWorkerBase):
    """Upstream's draft worker, as far as it is asked for anything. of_history, history: as `Drafting` has them."""

    drafts = False
    of_history = False
    history: Histories | None = None
    vocabulary = None
    hot_token_id = draft_attn_backend = draft_extend_attn_backend = None
    cuda_graph_runner = cuda_graph_runner_for_draft_extend = None
    widest = 1

    def __init__(self, server_args: Any, *parts: Any) -> None:
        super().__init__()
        target_worker = parts[-1]
        self.server_args, self.target_worker, self.device = server_args, target_worker, server_args.device
        self.topk = server_args.speculative_eagle_topk
        self.speculative_num_steps = server_args.speculative_num_steps
        self.speculative_num_draft_tokens = server_args.speculative_num_draft_tokens
        self.tree_mask_mode = default_tree_mask_mode()
        self._rebuild_topk1_chain_buffers()
        target = target_worker.model_runner
        self.draft_runner = SimpleNamespace(
            tp_group=target.tp_group,
            model_config=target.model_config,
            spec_algorithm=target.spec_algorithm,
            server_args=target.server_args,
            token_to_kv_pool=None,
        )

    @property
    def draft_runners(self) -> list[Any]:
        return []

    def draft_tp_context(self, _: Any) -> Any:
        return nullcontext()

    def alloc_memory_pool(self, **kwargs: Any) -> None:
        self.req_to_token_pool = kwargs["req_to_token_pool"]

    def init_attention_backends(self) -> None:
        """There are none."""

    def init_cuda_graphs(self) -> None:
        """There are none."""

    def add_noise(self) -> None:
        """There is nothing to add it to."""

    @property
    def rows(self) -> int:
        rows: int = self.speculative_num_steps + 1
        return rows

    def draft(self, batch: Any) -> Any:
        return draft_from_history(self, batch)

    def draft_extend(self) -> None:
        """Nobody reads."""

    def _draft_extend_for_prefill(self, batch: Any, _: Any, tokens: torch.Tensor, *__: Any) -> EagleDraftInput:
        return EagleDraftInput(
            bonus_tokens=tokens,
            num_tokens_per_req=1,
            num_tokens_for_logprob_per_req=1,
            **no_proposal(len(batch.reqs), self.device),
        )

    def _draft_extend_for_decode(self, batch: Any, result: Any) -> None:
        proposal = result.next_draft_input
        for name, nothing in no_proposal(len(batch.reqs), self.device).items():
            setattr(proposal, name, nothing)


def no_proposal(count: int, device: Any, width: int = 1) -> dict[str, torch.Tensor]:
    """What a step leaves in place of a drafter's proposal, of `count` requests and as many branches as `width`."""
    return {
        "topk_p": torch.zeros(count, width, dtype=torch.float32, device=device),
        "topk_index": torch.zeros(count, width, dtype=torch.int64, device=device),
    }

"""Upstream's draft worker, where a step's shape may be another than that of the step before."""

from copy import copy
from typing import Any

from sglang.srt.speculative.eagle_worker_v2 import EagleDraftWorker


class Drafting(EagleDraftWorker):
    """Leaves as many candidates after a step as any arm takes, and takes as many as its own arm has branches.

    The candidates of all requests must be equally wide, whatever arm each was decoded with last: requests meet in a
    batch, and under overlap candidates wait in one buffer. They are sorted, so that the first of them are the best.

    widest: in branches, of all arms.
    """

    widest = 1
    topk: int
    speculative_num_steps: int
    speculative_num_draft_tokens: int

    def draft(self, batch: Any) -> Any:
        proposal = batch.spec_info
        if proposal.topk_p.shape[1] > self.topk:
            proposal.topk_p = proposal.topk_p[:, : self.topk].contiguous()
            proposal.topk_index = proposal.topk_index[:, : self.topk].contiguous()
        return super().draft(batch)

    def _draft_extend_for_decode(self, batch: Any, batch_result: Any) -> None:
        """Reads what a step can have accepted, no more: verification has moved it to the front of a request's rows."""
        nodes, rows = self.speculative_num_draft_tokens, self.rows
        if rows < nodes:
            batch.out_cache_loc = _front(batch.out_cache_loc, nodes, rows)
            front = copy(batch_result)  # the draft input that it writes to is the same one
            front.next_token_ids = _front(batch_result.next_token_ids, nodes, rows)
            front.logits_output = copy(batch_result.logits_output)
            front.logits_output.hidden_states = _front(batch_result.logits_output.hidden_states, nodes, rows)
            batch_result = front
        self.read(batch, batch_result)

    @property
    def rows(self) -> int:
        """Tokens that a step of the active arm can accept of a request, which is what draft-extend reads of it."""
        return self.speculative_num_steps + 1

    def read(self, batch: Any, result: Any) -> None:
        """Draft-extend, in the graph of the active arm.

        batch: upstream's `ScheduleBatch`, with the lengths before; `out_cache_loc`: [bs * rows].
        result: of a `GenerationBatchResult` `next_token_ids`, [bs * rows], `logits_output.hidden_states`, [bs * rows,
            width], and `accept_lens`, [bs] int32, at least 1; its `next_draft_input` gets the proposal.
        """
        topk, nodes = self.topk, self.speculative_num_draft_tokens
        self.topk, self.speculative_num_draft_tokens = self.widest, self.rows
        super()._draft_extend_for_decode(batch, result)
        self.topk, self.speculative_num_draft_tokens = topk, nodes


def _front(values: Any, nodes: int, rows: int) -> Any:
    """[bs * nodes, ...] to [bs * rows, ...]: the first rows of each request."""
    return values.unflatten(0, (-1, nodes))[:, :rows].flatten(0, 1)

"""Upstream's draft worker, where a step's shape may be another than that of the step before."""

from copy import copy
from typing import Any

import numpy as np
import torch
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch, ForwardMode
from sglang.srt.speculative.eagle_worker_common import build_eagle_verify_input
from sglang.srt.speculative.eagle_worker_v2 import EagleDraftWorker

from tlt_server.config import ServerConfig
from tlt_server.engine.decode.history import Histories
from tlt_server.engine.sampling.drafts import DraftNoise
from tlt_server.engine.sampling.logits import keep_type
from tlt_server.engine.weights.vocabulary import DraftVocabulary, draft_vocabulary


class Drafting(EagleDraftWorker):
    """Leaves as many candidates after a step as any arm takes, and takes as many as its own arm has branches.

    The candidates of all requests must be equally wide, whatever arm each was decoded with last: requests meet in a
    batch, and under overlap candidates wait in one buffer. They are sorted, so that the first of them are the best.

    Whatever reads the drafter's logits, to choose children or to score them, reads them with the noise that the target
    is going to choose by.

    widest: in branches, of all arms.
    noise: of the batch; from `add_noise` on.
    most_keys: of all requests together, where the CPU does not know lengths.
    of_history: whether the active arm's drafts come out of `history`, and no pass is run for them.
    drafts: whether there is a drafter.
    vocabulary: the part of the target's that it proposes of; None: all, or what the drafter came with.
    """

    widest = 1
    drafts = True
    of_history = False
    history: Histories | None = None
    vocabulary: DraftVocabulary | None = None
    noise: DraftNoise
    most_keys: int | None = None
    topk: int
    speculative_num_steps: int
    speculative_num_draft_tokens: int

    def init_lm_head(self) -> None:
        super().init_lm_head()
        self.vocabulary = draft_vocabulary(self, ServerConfig.from_environment().draft_vocab)
        if self.vocabulary is not None:
            self.hot_token_id = self.vocabulary.tokens

    def add_noise(self) -> None:
        """Once pools are there, and before anything is captured."""
        self.noise = DraftNoise(self.req_to_token_pool.req_to_token.shape[0], self.device)
        forward, forward_model = self.draft_runner.forward, self.draft_runner.model.forward

        def noisy(forward_batch: ForwardBatch, *args: Any, **kwargs: Any) -> Any:
            result = forward(forward_batch, *args, **kwargs)
            self.make_noisy(result.logits_output, forward_batch)
            return result

        def selective(input_ids: Any, positions: Any, forward_batch: ForwardBatch, *args: Any, **kwargs: Any) -> Any:
            if forward_batch.forward_mode == ForwardMode.DRAFT_EXTEND_V2:
                # override: of one pass: the rows of which it wants logits; of all hidden states it selects itself
                forward_batch.spec_info.select_index = _last_accepted(forward_batch)
                forward_batch.capture_hidden_mode = CaptureHiddenMode.FULL
            return forward_model(input_ids, positions, forward_batch, *args, **kwargs)

        # override: upstream's draft worker chooses children from what its model runner returns
        self.draft_runner.forward = noisy
        # override: upstream has logits of all rows that draft-extend reads, and needs one of each request
        self.draft_runner.model.forward = selective
        keep_type(self.draft_runner)

    def make_noisy(self, output: Any, forward_batch: ForwardBatch) -> None:
        """The drafter's logits after a pass, those that children are chosen from. output: `LogitsProcessorOutput`."""
        logits = output.next_token_logits
        if logits is None or not len(logits):
            return
        mode, positions, bs = forward_batch.forward_mode, forward_batch.positions, forward_batch.batch_size
        if mode == ForwardMode.DRAFT_EXTEND_V2:
            logits, at = logits[:bs], positions[_last_accepted(forward_batch)]  # a graph pads them
            self.noise.compare(logits, at, forward_batch.req_pool_indices, self.hot_token_id)
            output.next_token_logits = self.noise.add(logits, at, 1, self.hot_token_id).as_subclass(Selected)
        elif mode == ForwardMode.EXTEND:  # a prefill, or catching up: the last row of each request
            output.next_token_logits = self.noise.add(logits, forward_batch.seq_lens - 1, 1, self.hot_token_id)
        else:
            output.next_token_logits = self.noise.add(logits, positions, len(logits) // bs, self.hot_token_id)

    def _draft_extend_for_prefill(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        self.noise.follow(batch.sampling_info)
        return super()._draft_extend_for_prefill(batch, *args, **kwargs)

    def draft(self, batch: Any) -> Any:
        knows = batch.seq_lens_cpu is not None
        if not knows:
            batch.seq_lens_sum = self.most_keys  # what the mask of a tree takes, at most
        drafted = draft_from_history(self, batch) if self.of_history else self._draft(batch)
        if not knows:
            batch.seq_lens_sum = None  # other passes count further tokens
        return drafted

    def _draft(self, batch: Any) -> Any:
        self.noise.follow(batch.sampling_info)
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
        self.noise.follow(batch.sampling_info)
        first = result.next_token_ids.view(len(batch.seq_lens), -1)[:, 0]
        self.noise.tell(first, batch.seq_lens, batch.req_pool_indices)
        topk, nodes = self.topk, self.speculative_num_draft_tokens
        self.topk, self.speculative_num_draft_tokens = self.widest, self.rows
        super()._draft_extend_for_decode(batch, result)
        self.topk, self.speculative_num_draft_tokens = topk, nodes


class Selected(torch.Tensor):
    """Logits of those rows alone that upstream is going to select of all: by whatever index, it gets these."""

    def __getitem__(self, index: Any) -> torch.Tensor:
        return self.as_subclass(torch.Tensor)


def _last_accepted(forward_batch: ForwardBatch) -> torch.Tensor:
    """Of the rows that draft-extend reads of each request, the last that was accepted: [bs] int64."""
    rows, bs = len(forward_batch.input_ids), forward_batch.batch_size
    begins = torch.arange(0, rows, rows // bs, device=forward_batch.input_ids.device)
    return begins + forward_batch.spec_info.num_accept_tokens[:bs] - 1


def _front(values: Any, nodes: int, rows: int) -> Any:
    """[bs * nodes, ...] to [bs * rows, ...]: the first rows of each request."""
    return values.unflatten(0, (-1, nodes))[:, :rows].flatten(0, 1)


def draft_from_history(draft: Any, batch: Any) -> Any:
    """Upstream's `EagleVerifyInput` of what history drafts, a chain. draft: the draft worker, set up for a chain.

    A request for which less was found, or nothing, is led to no node beyond that, whatever token stands there.
    """
    drafts, bs = draft.history.draft(batch.reqs, draft.speculative_num_steps), len(batch.reqs)
    found = torch.from_numpy(np.column_stack((drafts.lengths, drafts.tokens)))
    if torch.device(batch.device).type != "cpu":
        found = found.pin_memory()  # else the copy waits for the pass before
    found = found.to(batch.device, non_blocking=True)
    verify_input = build_eagle_verify_input(
        batch,
        batch.spec_info,
        draft._topk1_parents_prealloc[:bs],
        draft._topk1_score_indices_prealloc[:bs],
        found[:, 1:].to(torch.int64),
        None,
        target_worker=draft.target_worker,
        topk=1,
        num_steps=draft.speculative_num_steps,
        num_draft_tokens=draft.speculative_num_draft_tokens,
        tree_mask_mode=draft.tree_mask_mode,
        device=draft.device,
    )
    behind = torch.arange(draft.speculative_num_draft_tokens, device=batch.device) >= found[:, :1]
    verify_input.retrieve_next_token.masked_fill_(behind, -1)
    return verify_input

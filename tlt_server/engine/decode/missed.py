"""What the drafter missed while steps did not speculate, and how it catches up when they do again.

The drafter's keys and values of a position are made of the target's hidden state there and of the token that follows.
A plain step has both; they are kept for the last `WINDOW` positions of each request, in a ring. Before a request's
first step with an arm the drafter reads them, which gives the step its proposal too: by the arm's draft-extend in its
CUDA graph, up to `PASSES` times, or else by a prefill. Where many plain steps follow each other, and an arm may yet be
chosen for what is left of the batch, it reads in between what the ring has no room for: what it never reads costs it
half of the tokens that it would have accepted to the request's end.
"""

import copy
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch, ForwardMode
from sglang.srt.speculative.eagle_info import EagleDraftExtendInput
from sglang.srt.speculative.eagle_utils import get_draft_input_from_target_hidden_dim
from sglang.srt.speculative.spec_utils import fast_topk

WINDOW = 128
"""Positions of a request, if there is memory for as many."""
PASSES = 4
"""Of draft-extend, at most: reckoned to take less than a prefill, whose plan waits for the GPU."""
MEMORY = 256 << 20
"""Bytes for the states of all requests together."""
LEAST_WINDOW = 32
"""Positions; with fewer, what is read in between would take as long as the plain steps."""
FULL = 0.75
"""Of a ring, from which on it is read in between: all requests of a batch fill theirs at once, and have turns."""
MOST_READ = 8192
"""Tokens in between two steps, as many as SGLang prefills at once on a large GPU."""


class Missed:
    """The ring of one rank. worker: `EagleWorker`, its pools ready."""

    def __init__(self, worker: Any) -> None:
        self._worker = worker
        rows = worker.req_to_token_pool.req_to_token.shape[0]
        runner = worker.draft_worker.draft_runner
        width, dtype = get_draft_input_from_target_hidden_dim(runner), runner.model_config.dtype
        self.window = window_of(rows, width * dtype.itemsize)
        self._states = torch.zeros(rows, self.window, width, dtype=dtype, device=worker.device)
        self._tokens = torch.zeros(rows, self.window, dtype=torch.int64, device=worker.device)

    def keep(self, batch: Any, positions: torch.Tensor, states: torch.Tensor, tokens: torch.Tensor) -> None:
        """Notes a plain step: positions that it read [bs] int64, the target's states there [bs, width], and the tokens
        that were sampled [bs] int."""
        places = batch.req_pool_indices, positions % self.window
        self._states[places] = states
        self._tokens[places] = tokens.to(torch.int64)
        for req in batch.reqs:
            req.tlt_missed = getattr(req, "tlt_missed", 0) + 1

    @staticmethod
    def forget(reqs: list[Any]) -> None:
        """The drafter has read all of what these requests have: a prefill."""
        for req in reqs:
            req.tlt_missed = 0

    def counts(self, reqs: list[Any]) -> list[int]:
        """How many tokens of each request the drafter will have to read; of more that it missed, it reads the last."""
        return [min(getattr(req, "tlt_missed", 0), self.window) for req in reqs]

    def due(self, counts: Sequence[int]) -> list[int]:
        """Of `counts`, those to read before rings overflow, as many as go in at once, the fullest first; 0 for others,
        and, where there are none, nothing."""
        full = [(count, place) for place, count in enumerate(counts) if count >= FULL * self.window]
        if not full or self.window < LEAST_WINDOW:
            return []
        now, room = [0] * len(counts), MOST_READ
        for count, place in sorted(full, reverse=True):
            if count <= room:
                now[place], room = count, room - count
        return now

    def read_in_step(self, batch: Any, counts: Sequence[int]) -> None:
        """Catches up by draft-extends of the active arm, as many as it takes. The proposal in the batch's `spec_info`
        is renewed for the requests that are behind. counts: of them all, by `counts`."""
        left = torch.tensor(counts)
        while left.any():
            now = left.clamp(max=self._worker.draft_worker.rows)
            self._extend_by_rows(batch, left, now)
            left = left - now
        self.forget(batch.reqs)

    def _extend_by_rows(self, batch: Any, left: torch.Tensor, counts: torch.Tensor) -> None:
        """A draft-extend over the first `counts` tokens of those that are left to read; both [bs] int64, on the CPU."""
        draft, proposal = self._worker.draft_worker, batch.spec_info
        back, behind = torch.stack((left, counts)).to(batch.device, non_blocking=True)
        past = copy.copy(batch)
        past.seq_lens, past.seq_lens_sum = batch.seq_lens - back, None
        if batch.seq_lens_cpu is not None:
            past.seq_lens_cpu = batch.seq_lens_cpu - left
        tokens, states, past.out_cache_loc = self._rows(past, behind, draft.rows)
        found = SimpleNamespace()
        draft.read(
            past,
            SimpleNamespace(
                next_token_ids=tokens,
                logits_output=SimpleNamespace(hidden_states=states),
                accept_lens=behind.clamp(min=1).to(torch.int32),
                next_draft_input=found,
            ),
        )
        for name in ("topk_p", "topk_index", "hidden_states"):
            renewed = torch.where(behind[:, None] > 0, getattr(found, name), getattr(proposal, name))
            setattr(proposal, name, renewed)

    def _rows(self, past: Any, counts: torch.Tensor, rows: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The tokens from where each request is behind on, as verification leaves what it accepted: tokens, [bs * rows]
        int64; states, [bs * rows, width]; places in the KV cache, [bs * rows] int64, 0, where nobody reads, for rows
        beyond `counts`, [bs] int64. The lengths of `past` are those before."""
        ahead = torch.arange(rows, device=counts.device)
        requests, positions = past.req_pool_indices[:, None], past.seq_lens[:, None] + ahead
        kept = requests, positions % self.window
        places = self._worker.req_to_token_pool.req_to_token[requests, positions].to(torch.int64)
        places = places.where(ahead < counts[:, None], 0)
        return self._tokens[kept].flatten(), self._states[kept].flatten(0, 1), places.flatten()

    def read_as_prefill(self, batch: Any, counts: Sequence[int]) -> None:
        """As `read_in_step`, however much was missed, up to `window`; active is what SGLang started with. counts: 0 for
        requests that are left as they are. Waits for the GPU where the attention backend works without lengths on the
        CPU."""
        behind = [place for place, count in enumerate(counts) if count]
        places = torch.tensor(behind).to(batch.device, non_blocking=True)
        extend = self._extend(batch, behind, places, [counts[place] for place in behind])
        draft = self._worker.draft_worker
        draft.noise.follow(batch.sampling_info, places)
        forward_batch = ForwardBatch.init_new(
            extend,
            draft.draft_runner,
            capture_hidden_mode=CaptureHiddenMode.LAST,
            return_hidden_states_before_norm=False,
        )
        forward_batch.return_logprob = False
        output = draft.draft_runner.forward(forward_batch).logits_output
        probs, found = fast_topk(output.next_token_logits.softmax(-1), draft.topk, dim=-1)
        proposal = batch.spec_info
        proposal.topk_p = proposal.topk_p.index_copy(0, places, probs)
        proposal.topk_index = proposal.topk_index.index_copy(0, places, found)
        proposal.hidden_states = proposal.hidden_states.index_copy(0, places, output.hidden_states)
        self.forget(extend.reqs)

    def _extend(self, batch: Any, behind: list[int], places: torch.Tensor, counts: list[int]) -> Any:
        """A prefill's `ScheduleBatch` of the requests behind, of the last `counts` tokens of each."""
        extend = copy.copy(batch)
        extend.reqs = [batch.reqs[place] for place in behind]
        extend.req_pool_indices, extend.seq_lens = batch.req_pool_indices[places], batch.seq_lens[places]
        host = batch.seq_lens.cpu() if batch.seq_lens_cpu is None else batch.seq_lens_cpu
        extend.seq_lens_cpu, extend.seq_lens_sum = host[behind], None
        extend.orig_seq_lens = batch.orig_seq_lens[places]
        lens = [int(length) for length in extend.seq_lens_cpu]
        extend.prefix_lens = [length - count for length, count in zip(lens, counts, strict=True)]
        extend.extend_lens, extend.extend_num_tokens = counts, sum(counts)
        rows, positions = ragged(extend.seq_lens, torch.tensor(counts).to(batch.device, non_blocking=True), sum(counts))
        requests = extend.req_pool_indices[rows]
        kept = requests, positions % self.window
        extend.input_ids = self._tokens[kept]
        extend.out_cache_loc = self._worker.req_to_token_pool.req_to_token[requests, positions].to(torch.int64)
        extend.forward_mode, extend.extend_logprob_start_lens = ForwardMode.EXTEND, None
        extend.spec_info = EagleDraftExtendInput(
            hidden_states=self._states[kept], num_tokens_per_req=1, num_tokens_for_logprob_per_req=1
        )
        return extend


def window_of(rows: int, state_bytes: int) -> int:
    """Positions that are kept of each of `rows` requests, whose states take so many bytes each; at least one."""
    return max(1, min(WINDOW, MEMORY // (rows * state_bytes)))


def ragged(ends: torch.Tensor, counts: torch.Tensor, total: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows and positions of the last tokens of several sequences, one after another: two of [total] int64.

    ends: [n] int64, lengths of the sequences. counts: [n] int64, of the tokens. total: of all counts; given, so that
    nobody waits for a GPU that would have to tell.
    """
    rows = torch.repeat_interleave(torch.arange(len(ends), device=ends.device), counts, output_size=total)
    firsts = counts.cumsum(0) - counts
    positions = (ends - counts)[rows] + torch.arange(total, device=ends.device) - firsts[rows]
    return rows, positions

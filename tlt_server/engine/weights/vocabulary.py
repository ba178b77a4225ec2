"""The tokens that an EAGLE drafter proposes, where it reads the target's head: those that are in use.

A draft pass of one layer reads a head of 150,000 tokens for most of its time, and a policy says few of them. So it has
a copy of the rows of some, as FR-Spec (arXiv 2502.14856) has, of which it proposes; a token beyond costs a draft, and
changes no output. Which ones follows from what responses and prompts here hold; the copies are made again when the
target is published.
"""

import logging
from collections import Counter
from collections.abc import Callable
from copy import copy
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

logger = logging.getLogger(__name__)

SIZE = 32_768
"""Tokens, if nothing is asked for: as many as FR-Spec keeps."""
EVERY = 16
"""Steps from one choice to the next: it takes the CPU half a millisecond."""


class DraftVocabulary:
    """Of a drafter on one GPU.

    head: the target's, [at least vocabulary, hidden].
    tokens: the target's token of each of the drafter's, [size] int64. rows: theirs of the head, [size, hidden]. Both
        stay where they are: CUDA graphs have captured them.
    version: of the target that is active.
    counts: tokens that steps gave since the start: all that were seen, and those that were missed, which it had not.
    """

    def __init__(self, head: torch.Tensor, vocabulary: int, size: int) -> None:
        self.version: Callable[[], int] = lambda: 0
        self.counts, self._told = Counter[str](), Counter[str]()
        self.head, self._copied = head, 0
        self._frequency = np.zeros(vocabulary, np.int64)
        self._members = np.arange(size)  # of a vocabulary of merges, the first are the most frequent
        self._has = np.arange(vocabulary) < size
        self._steps, self._stale = 0, False  # stale: a token was counted that it has not
        self.tokens = torch.arange(size, device=head.device)
        self.rows = head.detach()[:size].clone()

    def prompted(self, batch: Any) -> None:
        """Counts what upstream's `ScheduleBatch` of a prefill is about to read, each token once: a prompt is as long as
        its client likes, and is not drafted."""
        for req, start, count in zip(batch.reqs, batch.prefix_lens or (), batch.extend_lens or (), strict=True):
            read = np.asarray(req.full_untruncated_fill_ids[start : start + count], np.int64)
            read = read[(read >= 0) & (read < len(self._frequency))]  # of an image a prompt has other numbers
            self._frequency[read] += 1
            if not self._has[read].all():
                self._stale, self._steps = True, -1  # at the next step: what is about to be sampled is much like it

    def sampled(self, rows: NDArray[np.int32], counts: NDArray[np.int32]) -> None:
        """Counts what a step gave: the first ones of each row, [requests, nodes], as counts says, [requests]."""
        said = rows[np.arange(rows.shape[1]) < counts[:, None]]
        np.add.at(self._frequency, said, 1)
        missed = len(said) - int(np.count_nonzero(self._has[said]))
        self._stale |= missed > 0
        self.counts.update(seen=len(said), missed=missed)

    def untold(self) -> Counter[str]:
        """What was counted since the last time."""
        since = self.counts - self._told
        self._told = self.counts.copy()
        return since

    @torch.no_grad()
    def follow(self) -> None:
        """Before a step, on the stream of forwards: what was counted, and the target that is active."""
        self._steps += 1
        if (version := self.version()) != self._copied:
            self._copied = version
            torch.index_select(self.head.detach(), 0, self.tokens, out=self.rows)
        if self._stale and self._steps % EVERY == 0:
            self._stale = False
            self._exchange()

    def _exchange(self) -> None:
        """Lets those in that were counted more often than others that are there; these keep their places."""
        frequency = self._frequency
        new = np.flatnonzero((frequency > 0) & ~self._has)
        new = new[np.argsort(-frequency[new], kind="stable")][: len(self._members)]
        there = frequency[self._members]
        old = np.argpartition(there, len(new) - 1)[: len(new)]
        old = old[np.argsort(there[old], kind="stable")]
        better = frequency[new] > there[old]
        if not better.any():
            return
        new, old = new[better], old[better]
        self._has[self._members[old]], self._has[new] = False, True
        self._members[old] = new
        at, tokens = self._to_device(old), self._to_device(new)
        self.tokens.index_copy_(0, at, tokens)
        self.rows.index_copy_(0, at, self.head.detach().index_select(0, tokens))

    def _to_device(self, values: NDArray[np.int64]) -> torch.Tensor:
        found = torch.from_numpy(values.copy())
        if self.head.is_cuda:
            found = found.pin_memory()  # else the copy waits for the pass before
        return found.to(self.head.device, non_blocking=True)


def draft_vocabulary(draft_worker: Any, size: int | None) -> DraftVocabulary | None:
    """Of upstream's draft worker, whose drafter is one of EAGLE and has taken the target's head: it gets a copy of a
    part of it in its place. None: it keeps the whole.

    size: of its tokens; 0: all; None: `SIZE`, on a GPU, of a vocabulary that is at least twice as large.
    """
    model, target = draft_worker.draft_runner.model, draft_worker.target_worker.model_runner
    head, known = target.model.get_embed_and_head()[1], int(target.model_config.vocab_size)
    if size is None:
        size = SIZE if head.is_cuda and known >= 2 * SIZE else 0
    if not 0 < size < known or not can_be_partial(draft_worker, head):
        return None
    from sglang.srt.constants import GPU_MEMORY_TYPE_WEIGHTS

    with draft_worker.draft_runner.memory_saver_adapter.region(GPU_MEMORY_TYPE_WEIGHTS, enable_cpu_backup=True):
        found = DraftVocabulary(head, known, size)
    own = copy(model.lm_head)
    # override: of a copy, for what it was may be the embedding; no parameter: no part of what is staged or exchanged
    own._parameters = {name: each for name, each in own._parameters.items() if name != "weight"}
    # override: as above
    own.weight = found.rows
    # override: upstream gives the drafter the whole head, or a part of it for good
    model.lm_head = own
    logger.info("the drafter proposes of %d of %d tokens", size, known)
    return found


def can_be_partial(draft_worker: Any, head: torch.Tensor) -> bool:
    """Whether the drafter has the target's head, no other has a part of it, and its rows are its tokens'."""
    target = draft_worker.target_worker.model_runner
    return (
        not draft_worker.speculative_algorithm.is_eagle3()
        and draft_worker.draft_runner.model_config.model_path != target.model_config.model_path  # an MTP head
        and draft_worker.draft_runner.tp_group.world_size == 1
        and head.is_floating_point()
        and head.itemsize > 1
        and getattr(draft_worker.draft_runner.model, "lm_head", None) is not None
    )

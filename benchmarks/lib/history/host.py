"""What history takes of a step's time on the host: the calls that the engine makes of it, on requests that stand in for
a scheduler's."""

import time
from array import array
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from tlt_client.schemas import HistoryLoad

from benchmarks.lib.history.costs import CHANGED, WORDS
from tlt_server.config import Arm
from tlt_server.engine.decode.history import Histories
from tlt_server.results import Figures

GROUP, WIDTH = 16, 8
"""Siblings of a prompt; tokens that a step verifies of a request."""
LOADED = 4096
"""Tokens of each response that fills the index beforehand."""


class Request(SimpleNamespace):
    """What history asks of upstream's."""

    finished_len: int | None = None
    finished_reason: Any = None

    @property
    def output_ids_through_stop(self) -> Any:
        return self.output_ids if self.finished_len is None else self.output_ids[: self.finished_len]


def requests(count: int) -> list[Any]:
    """Siblings in groups."""
    return [
        Request(
            req_pool_idx=i,
            rid=str(i),
            origin_input_ids=array("q", [i // GROUP] * 32),
            output_ids=array("q"),
            sampling_params=SimpleNamespace(custom_params=None),
            input_embeds=None,
            grammar=None,
        )
        for i in range(count)
    ]


class Steps:
    """A batch that decodes: each request says its own text, which a group has in common but for single tokens."""

    def __init__(self, history: Histories, count: int, length: int) -> None:
        self._rng = np.random.default_rng(0)
        self.history, self.reqs = history, requests(count)
        shared = self._rng.integers(0, WORDS, (-(-count // GROUP), length)).astype(np.int32)
        self._texts = shared[np.arange(count) // GROUP]
        changed = self._rng.random(self._texts.shape) < CHANGED
        self._texts[changed] = self._rng.integers(0, WORDS, int(changed.sum()))
        for prompt, text in zip(self.reqs[::GROUP], shared.tolist(), strict=True):
            history.load(HistoryLoad(prompt.origin_input_ids.tolist(), [text]), WORDS)
        history.begin(self.reqs)
        self._said = np.zeros(count, np.int64)
        self._before = self._result(None, np.ones(count, np.int32))

    def _result(self, arm: Arm | None, lengths: Any) -> Any:
        """As a step's comes to the CPU. lengths: tokens that it gives each request."""
        at = self._said[:, None] + np.arange(1 if arm is None else WIDTH)
        tokens = torch.from_numpy(np.take_along_axis(self._texts, at, axis=1).ravel())
        accepted = None if arm is None else torch.from_numpy(lengths)
        made = SimpleNamespace(next_token_ids=tokens, accept_lens=accepted, arm=arm)
        made.copy_done = SimpleNamespace(synchronize=lambda: None)
        self.history.launched(self.reqs, made)
        self._said += lengths
        return made, lengths

    def step(self, arm: Arm | None) -> float:
        """Under overlap: decided, launched, and the step before settled. Microseconds of the processor."""
        history, (before, counts) = self.history, self._before
        lengths = self._rng.integers(1, WIDTH, len(self.reqs)).astype(np.int32) if arm else np.ones_like(counts)
        marks = [time.thread_time()]
        history.foreseen()
        history.settle()
        if arm is not None:
            history.draft(self.reqs, arm.num_steps)
        marks.append(time.thread_time())
        self._before = self._result(arm, lengths)
        given = list(zip(self.reqs, counts.tolist(), strict=True))
        marks.append(time.thread_time())
        history.credited(given, before)
        marks.append(time.thread_time())
        rows = before.next_token_ids.numpy().reshape(len(counts), -1)
        for req, row, count in zip(self.reqs, rows.tolist(), counts.tolist(), strict=True):
            req.output_ids.extend(row[:count])
        return 1e6 * (marks[1] - marks[0] + marks[3] - marks[2])


def host_figures(capacity: int, batches: Sequence[int], steps: int) -> Figures:
    """Of steps that history drafts for, and of others, beside a full index: a median, and the 99th of a hundred."""
    figures: Figures = {}
    for batch in batches:
        for name, arm in (("drafted", Arm.history(WIDTH - 1)), ("other", None)):
            history = Histories(capacity, batch, WIDTH - 1)
            rng = np.random.default_rng(1)
            for number in range(capacity // LOADED):
                said = rng.integers(0, WORDS, LOADED).tolist()
                history.load(HistoryLoad([WORDS + number], [said]), 2 * WORDS)
            running = Steps(history, batch, (steps + 4) * WIDTH)
            taken = [running.step(arm) for _ in range(steps)][steps // 10 :]
            median, p99 = np.percentile(taken, [50, 99])
            figures |= {f"host_us_{name}_batch_{batch}": float(median), f"host_us_p99_{name}_batch_{batch}": float(p99)}
    return figures
